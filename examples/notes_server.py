#!/usr/bin/env python3
"""A small MCP server over stdio that keeps plain-text notes in one file.

    python3 notes_server.py [--file PATH]

The file is --file, else $NOTES_FILE, else ~/.notes.jsonl. It holds one JSON
object per line and is created, readable by you alone, with the first note.

Standard library only, Python 3.6 or newer. To add a tool, write a function
under @tool: the schema you give there is what clients see and what we check.
"""
import argparse
import json
import os
import secrets
import signal
import sys
import time
import traceback

ABOUT = {"capabilities": {"tools": {}}, "instructions":
         "Plain-text notes. Search or list first, then read by id."}
SERVER_INFO = {"name": "notes", "title": "Notes", "version": "1.0.0"}

# Up to 2025-11-25 a client opens with "initialize". From 2026-07-28 on there
# is no handshake: every request names its version in params._meta.
HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSION = "2026-07-28"
META = "io.modelcontextprotocol/"
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601
INVALID_PARAMS, INTERNAL_ERROR, WRONG_VERSION = -32602, -32603, -32022

MAX_LINE = 1024 * 1024  # bytes, in a message as in the notes file
TOOLS = {}  # name -> (function, definition), filled by @tool


class RpcError(Exception):
    """A request to refuse; its arguments are code, message and any data."""


class ToolError(Exception):
    """A tool call that failed; the model reads why and may try again."""


def read_line(stream):
    """Return the next line, or b"" at the end; never more than MAX_LINE."""
    line = stream.readline(MAX_LINE)
    if len(line) < MAX_LINE or line.endswith(b"\n"):
        return line
    while line and not line.endswith(b"\n"):
        line = stream.readline(MAX_LINE)
    return b"(a line that was too long)\n"


def decode(line):
    """Return the JSON value on a line, or raise RpcError."""
    try:
        value = json.loads(line.decode("utf-8"))
        if b"\\u" in line:  # half a surrogate pair is no text: make it "?"
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-8", "replace").decode("utf-8"))
        return value
    except (ValueError, RecursionError) as exc:
        raise RpcError(PARSE_ERROR, "Not a JSON message") from exc


class NoteFile:
    """Notes in a file that several processes may read and change at once.

    No locks are needed: a note is added by one write in append mode, and
    deleted by overwriting its line with spaces, so that no line ever moves.
    Lines that hold no note (blank, damaged, too long) are passed over.
    """

    def __init__(self, path):
        self.path = path

    def notes(self):
        """Return all notes, newest first."""
        try:
            with open(self.path, "rb") as stream:
                return [note for _, note in self._scan(stream)][::-1]
        except FileNotFoundError:
            return []

    def find(self, note_id, delete=False):
        """Return one note; if asked to, blank it out in the file."""
        try:
            with open(self.path, "rb+" if delete else "rb") as stream:
                for line, note in self._scan(stream):
                    if note["id"] == note_id:
                        if delete:
                            stream.seek(-len(line), os.SEEK_CUR)
                            stream.write(b" " * len(line.rstrip(b"\r\n")))
                        return note
        except FileNotFoundError:
            pass
        raise ToolError("There is no note with the id %a." % note_id)

    def add(self, note):
        """Append a note, creating the file if there is none."""
        line = json.dumps(note, ensure_ascii=False).encode("utf-8") + b"\n"
        with open(self.path, "ab+", buffering=0, opener=lambda path, flags:
                  os.open(path, flags, 0o600)) as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":  # someone's unfinished line
                    line = b"\n" + line
            if stream.write(line) != len(line):
                raise ToolError("The note was cut short: is the disk full?")
            os.fsync(stream.fileno())

    @staticmethod
    def _scan(stream):
        """Yield (line, note) for every line that holds a note."""
        for line in iter(lambda: read_line(stream), b""):
            try:
                note = decode(line)
                check(note, NOTE)
            except (RpcError, ToolError):
                continue
            yield line, note


def an_object(**properties):
    """A closed object schema; what has no default is required."""
    required = [k for k in properties if "default" not in properties[k]]
    return {"type": "object", "properties": properties,
            "required": required, "additionalProperties": False}


def a_string(description, longest):
    """The schema of an argument with 1 to `longest` characters."""
    return {"type": "string", "description": description,
            "minLength": 1, "maxLength": longest}


def check(value, schema, name="arguments"):
    """Raise ToolError unless value fits; knows only what we use here."""
    kind = schema["type"]
    types = {"string": str, "integer": int, "array": list, "object": dict}
    if type(value) is not types[kind]:  # isinstance would take True for 1
        raise ToolError("%s: must be of type %s" % (name, kind))
    size = value if kind == "integer" else len(value)
    for word in ("minimum", "minLength", "maximum", "maxLength", "maxItems"):
        excess = size - schema.get(word, size)
        if (excess < 0) if word.startswith("min") else (excess > 0):
            raise ToolError("%s: %s is %d" % (name, word, schema[word]))
    if kind == "array":
        for item in value:
            check(item, schema["items"], "%s: each item" % name)
    if kind == "object":
        for key in schema["required"]:
            if key not in value:
                raise ToolError("%s: is required" % key)
        for key in value:
            if key not in schema["properties"]:
                raise ToolError("%.80a: no such argument" % key)
            check(value[key], schema["properties"][key], key)


NOTE_ID = a_string("The id that listing, searching or adding returned.", 64)
LIMIT = {"type": "integer", "minimum": 1, "maximum": 100, "default": 20,
         "description": "The most notes to return."}
TAGS = {"type": "array", "items": a_string("One tag.", 40), "maxItems": 10,
        "default": [], "description": "Labels to find the note by."}
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "array", "items": TEXT}
NOTE = an_object(id=TEXT, title=TEXT, text=TEXT, tags=TEXTS, created=TEXT)
NOTES = an_object(notes={"type": "array", "items": NOTE}, total=COUNT)
READS = {"readOnlyHint": True, "openWorldHint": False}
ADDS = {"readOnlyHint": False, "destructiveHint": False,
        "idempotentHint": False, "openWorldHint": False}
DELETES = {"readOnlyHint": False, "destructiveHint": True,
           "idempotentHint": True, "openWorldHint": False}


def tool(title, hints, takes, returns):
    """Register a function as a tool; its docstring is the description."""
    def register(function):
        TOOLS[function.__name__] = function, {
            "name": function.__name__, "title": title,
            "description": " ".join(function.__doc__.split()),
            "annotations": hints, "inputSchema": takes,
            "outputSchema": returns}
        return function
    return register


@tool("Search notes", READS, returns=NOTES, takes=an_object(
    query=a_string("Words that must all occur, in any case.", 200),
    limit=LIMIT))
def search_notes(store, query, limit=LIMIT["default"]):
    """Find notes by words in their title, text or tags, newest first.
    Texts are cut to 160 characters; read_note gives the whole note."""
    words, found = query.casefold().split(), []
    for note in store.notes():
        content = "\n".join([note["title"], note["text"]] + note["tags"])
        if all(word in content.casefold() for word in words):
            found.append(dict(note, text=note["text"][:160]))
    return {"notes": found[:limit], "total": len(found)}


@tool("List notes", READS, returns=NOTES, takes=an_object(limit=LIMIT))
def list_notes(store, limit=LIMIT["default"]):
    """List the newest notes and say how many there are in all.
    Texts are cut to 160 characters; read_note gives the whole note."""
    return search_notes(store, "", limit)


@tool("Read note", READS, returns=NOTE, takes=an_object(id=NOTE_ID))
def read_note(store, id):
    """Return one whole note: title, text, tags and when it was added."""
    return store.find(id)


@tool("Add note", ADDS, returns=NOTE, takes=an_object(
    title=a_string("One line that says what it is.", 200),
    text=a_string("The note itself, plain text.", 20000), tags=TAGS))
def add_note(store, title, text, tags=()):
    """Save a new plain-text note. Returns it with its id."""
    title = " ".join(title.split()) or "-"
    note = {"id": secrets.token_hex(5), "title": title, "text": text,
            "tags": list(tags),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    store.add(note)
    return note


@tool("Delete note", DELETES, returns=NOTE, takes=an_object(id=NOTE_ID))
def delete_note(store, id):
    """Delete one note for good. Returns what it was."""
    return store.find(id, delete=True)


def initialize(store, params):
    """Shake hands, in the client's version if that is one we know."""
    version = params.get("protocolVersion")
    if version not in HANDSHAKE_VERSIONS:
        version = HANDSHAKE_VERSIONS[-1]
    return dict(ABOUT, protocolVersion=version, serverInfo=SERVER_INFO)


def list_tools(store, params):
    """Return all tools; they fit one page, so no cursor is valid."""
    if params.get("cursor") is not None:
        raise RpcError(INVALID_PARAMS, "Unknown cursor")
    return {"tools": [definition for _, definition in TOOLS.values()]}


def call_tool(store, params):
    """Run a tool. A failure inside it is a result, for the model to read."""
    name, arguments = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or name not in TOOLS:
        raise RpcError(INVALID_PARAMS, "Unknown tool: %.80a" % (name,))
    function, definition = TOOLS[name]
    try:
        check(arguments, definition["inputSchema"])
        value = function(store, **arguments)
    except (ToolError, OSError) as error:
        return {"content": [{"type": "text", "text": str(error)}],
                "isError": True}
    text = json.dumps(value, ensure_ascii=False)
    return {"content": [{"type": "text", "text": text}],
            "structuredContent": value, "isError": False}


COMMON = {"tools/list": list_tools, "tools/call": call_tool}
LEGACY = dict(COMMON, initialize=initialize, ping=lambda store, params: {})
MODERN = dict(COMMON, **{"server/discover": lambda store, params: dict(
    ABOUT, supportedVersions=[MODERN_VERSION])})


def is_modern(method, params):
    """Tell from params._meta which kind of request this is."""
    meta = params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    version = meta.get(META + "protocolVersion")
    able = meta.get(META + "clientCapabilities")
    if version is None and method != "server/discover":
        return False
    if not isinstance(version, str) or not isinstance(able, dict):
        raise RpcError(INVALID_PARAMS, "params._meta needs protocolVersion "
                       "and clientCapabilities")
    if version != MODERN_VERSION:
        raise RpcError(WRONG_VERSION, "Unsupported protocol version", {
            "supported": [MODERN_VERSION], "requested": version})
    return True


def respond(store, method, params):
    """Return the result of a request, or raise RpcError."""
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params must be an object")
    modern = is_modern(method, params)
    methods = MODERN if modern else LEGACY
    if method not in methods:
        raise RpcError(METHOD_NOT_FOUND, "Unknown method: %.80a" % method)
    result = methods[method](store, params)
    if modern:
        result["resultType"] = "complete"
        result["_meta"] = {META + "serverInfo": SERVER_INFO}
        if method != "tools/call":  # the same for all, until an update
            result.update(ttlMs=300000, cacheScope="public")
    return result


def answer(store, line):
    """Return the reply to a line from the client, None if none is due."""
    reply = {"jsonrpc": "2.0", "id": None}
    try:
        message = decode(line)
        if not isinstance(message, dict):  # a list would be a batch
            raise RpcError(INVALID_REQUEST, "Send one JSON object per line")
        method, number = message.get("method"), message.get("id")
        if "id" not in message and isinstance(method, str):
            return None  # a notification
        if method is None and ("result" in message or "error" in message):
            return None  # a response, though we never ask anything
        if (type(number) not in (int, str) or not isinstance(method, str)
                or message.get("jsonrpc") != "2.0"):
            raise RpcError(INVALID_REQUEST, "Not a JSON-RPC 2.0 request")
        reply["id"] = number
        reply["result"] = respond(store, method, message.get("params", {}))
    except RpcError as error:
        reply["error"] = dict(zip(("code", "message", "data"), error.args))
    except Exception:  # a bug here should cost one answer, not the server
        traceback.print_exc()
        reply["error"] = {"code": INTERNAL_ERROR, "message": "Internal error"}
    return reply


def main():
    """Read the options, then answer lines until the input is closed."""
    # A note is saved by a single write, so it is safe to leave at any time.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    parser = argparse.ArgumentParser(
        description="An MCP server over stdio for plain-text notes.")
    parser.add_argument("--file", metavar="PATH", help="where the notes are "
                        "(default: $NOTES_FILE, else ~/.notes.jsonl)",
                        default=os.environ.get("NOTES_FILE"))
    path = parser.parse_args().file or "~/.notes.jsonl"
    store = NoteFile(os.path.expanduser(path))
    sink, sys.stdout = sys.stdout.buffer, sys.stderr  # keep prints off it
    try:
        for line in iter(lambda: read_line(sys.stdin.buffer), b""):
            reply = answer(store, line) if line.strip() else None
            if reply is not None:
                sink.write(json.dumps(reply).encode("ascii") + b"\n")
                sink.flush()
    except OSError:  # the client has stopped reading
        os._exit(0)


if __name__ == "__main__":
    main()
