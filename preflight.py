#!/usr/bin/env python3
"""preflight.py: are the MCP tools that an unattended job needs there?

One file, the standard library only, Python 3.6 to 3.14. `tools preflight`
answers from local state: it contacts no server and leaves one audit record.
`sync` is the part that looks at servers. README.md has the manual.

The map. Data flows down the page and every reference points up it; a
section may use those named behind "uses", and itself. Sections 1 to 13 are
pure: values in, values out, time passed in as a number. A test parses
this table and holds the file to it. Numbers without a row are free.

   1 constants  limits with their units, exit codes            uses nothing
   2 errors     one base error; children by who must act       uses 1
   3 reasons    the 15 reasons, classes, verdicts, worst-of    uses 1
   4 values     the nouns, one record each                     uses 1-3
   5 text       JSON in, durations, times, safe text, masks    uses 1-4
   6 identity   ids, pins, canonical JSON, hashes, launches    uses 1-5
   7 config     file text + environment -> servers, profiles   uses 1-6
   8 wire       MCP without I/O: messages, SSE, HTTP's rules   uses 1-6
   9 trust      seen + approved -> status; what a sync writes  uses 1-6
  10 judge      the gates in order, evaluate, explain          uses 1-6, 9
  11 lock       lockfile <-> values, definition diffs          uses 1-6
  12 report     values -> table, json, yaml                    uses 1-6, 11
  == below this line the program touches the world ==
  14 world      clock, randomness, environment, files, stops   uses 1-5
  15 store      SQLite: schema, snapshot reads, writes         uses 1-6, 14
  16 audit      append, chain, verify, prune                   uses 1-6, 14-15
  17 links      carry bytes: a child's stdio, HTTP, TLS        uses 1-2, 5, 14
  18 sync       observe servers, record what was seen          uses 1-9, 14-17
  19 health     is a server up, is the API behind it up        uses 1-10, 14-18
  20 commands   one function per use case, returns a value     uses 1-12, 14-19
  22 serve      the loop: request -> answer; tiers, waits      uses 1-20
  23 cli        argparse, dispatch, streams, exit code         uses all
"""
import sys

# `python3 preflight.py` puts this file's directory first on the path, and a
# json.py dropped beside it would run. Nothing of ours is imported from there.
if (__name__ == '__main__' and not sys.flags.isolated
        and not getattr(sys.flags, 'safe_path', False)):
    sys.path.pop(0)

# The script is compiled at every run and each import is paid for at every
# cron tick: every other import is the first line of the function that needs
# it. A test holds the set of modules that `tools preflight` loads.
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402
from collections import namedtuple  # noqa: E402

# ==========================================================================
# 1. constants
# ==========================================================================

VERSION = '0.1.0'

EXIT_READY = 0
EXIT_FAILED = 1
EXIT_RETRY = 10
EXIT_BLOCKED = 11
EXIT_UNKNOWN = 12

HASH_VERSION = 1
SCHEMA_VERSION = 2

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
DAY_MS = 24 * 60 * MINUTE_MS
MAX_AGE_MS = 15 * MINUTE_MS
MAX_TTL_MS = DAY_MS
MAX_DURATION_MS = 100000 * DAY_MS
START_TIMEOUT_MS = 60 * SECOND_MS
REQUEST_TIMEOUT_MS = 30 * SECOND_MS
FUTURE_MS = 60 * SECOND_MS      # clocks may differ by this much
LEASE_GRACE_MS = 10 * SECOND_MS
MAX_WAIT_MS = 10 * SECOND_MS
WAIT_STEP_MS = 250
BUSY_TIMEOUT_MS = 8 * SECOND_MS
GRACE_MS = 1000                 # for each of: end of input, TERM, KILL
QUIET_MS = 150                  # after a list_changed, before listing again
RETRY_MS = 1000                 # before a cut event stream is resumed
ENDPOINT_MS = 5 * SECOND_MS     # for the first event where HTTP+SSE is a guess
DISCOVER_MS = 10 * SECOND_MS    # for a server that may be of the other era
METADATA_MS = 5 * SECOND_MS     # to learn who signs in
PROBE_CONNECT_MS = 5 * SECOND_MS
PROBE_TOTAL_MS = 8 * SECOND_MS  # of one request to an API, answer and all
ENGINE_MS = 3 * SECOND_MS       # for docker to stop, or remove, one
NOTIFY_MS = 30 * SECOND_MS      # for the command of sync --notify
COMMIT_PAUSE_MS = 5             # so that a sync never starves the gate

MIN_FREE_BYTES = 32 << 20       # a disk with less is told of

MAX_IDS = 100
MAX_SUGGESTED = 10              # misses of one request that get suggestions
MAX_SIDE_BY_SIDE = 16
MAX_PAGES = 1000
MAX_DIGITS = 4000
MAX_DEPTH = 200
MAX_MESSAGE_BYTES = 16 << 20
MAX_NOISE_BYTES = 1 << 20
MAX_NOISE_LINES = 1000
MAX_CONFIG_BYTES = 16 << 20
MAX_NAMED_BYTES = 1 << 20       # of a file that a config refers to
MAX_LOCK_BYTES = 64 << 20
MAX_SNAPSHOT_BYTES = 256 << 20
STDERR_TAIL_BYTES = 8 << 10
PROBE_BODY_BYTES = 64 << 10     # enough of an answer to tell what it is

HINTS = ('readOnlyHint', 'destructiveHint', 'idempotentHint',
         'openWorldHint')
# The definition's members that are hashed, besides "v" (contract 10).
HASHED = ('name', 'title', 'description', 'inputSchema', 'outputSchema')
IGNORABLE = HASHED[1:]          # what ignore_changes may name
WORDY = HASHED[1:3]             # what it is ever said to be good for

# MCP revisions that are opened by a handshake, newest first, and the
# stateless ones. They are names: never compare them as text.
HANDSHAKE_VERSIONS = ('2025-11-25', '2025-06-18', '2025-03-26',
                      '2024-11-05', '2024-10-07')
MODERN_VERSIONS = ('2026-07-28',)

# ==========================================================================
# 2. errors: a verdict is a value, never one of these
# ==========================================================================


class PreflightError(Exception):
    """A normal failure: one sentence for the user, and what to do next.

    exit_code is what the shell sees, http_status what a REST client sees.
    """

    exit_code = EXIT_FAILED
    http_status = 500

    def __init__(self, message, hint=''):
        super().__init__(message)
        self.hint = hint


class UsageError(PreflightError):
    """The caller asked for something that cannot be asked."""

    http_status = 400


class ConfigError(PreflightError):
    """A config file must be mended by its owner."""

    http_status = 503


class StoreError(PreflightError):
    """The state directory must be mended, or is busy."""

    http_status = 503


class StoreBusy(StoreError):
    """Another process holds the state; a later try may succeed."""


class UpstreamError(PreflightError):
    """A server did not do what MCP asks; cause is one of contract 9."""

    http_status = 502
    is_listing = False      # it failed at the list, once connected

    def __init__(self, cause, message):
        super().__init__(message)
        self.cause = cause


class LoginNeeded(UpstreamError):
    """A server asks for a credential, or for a better one."""

    def __init__(self, message):
        super().__init__('', message)


class Redirected(UpstreamError):
    """A server sends us elsewhere: the status of its answer, and where."""

    def __init__(self, message, status, place):
        super().__init__('redirected', message)
        self.status, self.place = status, place


class Interrupted(BaseException):
    """A signal asked this run to end; number is the signal's."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


# ==========================================================================
# 3. reasons (contract 2)
# ==========================================================================

RETRYABLE, FIX, PERMANENT = 'retryable', 'fix-state-first', 'permanent-config'
READY, RETRY, BLOCKED, UNKNOWN = ('ready', 'degraded_retryable', 'blocked',
                                  'unknown_ids')

# Worst last; the exit code of a set is that of its worst verdict.
EXIT_CODES = {READY: EXIT_READY, RETRY: EXIT_RETRY, BLOCKED: EXIT_BLOCKED,
              UNKNOWN: EXIT_UNKNOWN}

Reason = namedtuple('Reason', 'code kind retryable action verdict')
Reason.__doc__ = """One of the closed set of reasons.

code: as on the wire. kind: its class. retryable: waiting may help.
action: what an operator does, '' for none. verdict: what it makes of a set.
"""

REASONS = {row[0]: Reason(*row) for row in (
    ('server_initializing', RETRYABLE, True, '', RETRY),
    ('server_unhealthy', RETRYABLE, True, 'view_logs', RETRY),
    ('server_disabled', FIX, False, 'enable', BLOCKED),
    ('server_quarantined', FIX, False, 'approve', BLOCKED),
    ('tool_pending_approval', FIX, False, 'approve', BLOCKED),
    ('tool_changed', FIX, False, 'approve', BLOCKED),
    ('tool_blocked_by_user', FIX, False, 'enable', BLOCKED),
    ('oauth_required', FIX, False, 'login', BLOCKED),
    ('hash_mismatch', FIX, False, 'configure', BLOCKED),
    ('server_not_in_scope', PERMANENT, False, 'configure', BLOCKED),
    ('tool_denied_by_config', PERMANENT, False, 'configure', BLOCKED),
    ('missing_annotation', PERMANENT, False, 'configure', BLOCKED),
    ('policy_filtered', PERMANENT, False, '', BLOCKED),
    ('not_found', PERMANENT, False, 'configure', UNKNOWN),
    ('server_not_configured', PERMANENT, False, 'configure', UNKNOWN),
)}

# Causes of server_unhealthy for which a new look is the cure.
RESTART_CAUSES = ('refused', 'stale', 'interrupted')
# Causes that time alone does not cure, whatever "retryable" says.
STUCK_CAUSES = ('never_seen', 'stale', 'unresolved', 'command_not_found')


def action_of(code, cause=''):
    """Name the action for a reason, '' for none (contract 2)."""
    if code == 'server_unhealthy' and cause in RESTART_CAUSES:
        return 'restart'
    return REASONS[code].action


def worst_verdict(codes):
    """Give the verdict of a set of reason codes; '' stands for ready.

    A code that is not known counts as blocked (contract 2).
    """
    order = list(EXIT_CODES)
    found = [REASONS[code].verdict if code in REASONS else
             BLOCKED if code else READY for code in codes]
    return max(found, key=order.index) if found else READY


# ==========================================================================
# 4. values. Every instant is an integer of milliseconds since 1970, UTC,
#    every duration an integer of milliseconds, unless a name says otherwise.
# ==========================================================================

OPERATOR, AGENT = 'operator', 'agent'

Server = namedtuple('Server', (
    'name file dialect base transport command args env cwd url headers '
    'enabled quarantined trust_mode allow deny start_timeout '
    'request_timeout max_age client health ignore_changes overlaid '
    'warnings extra'))
Server.__doc__ = """One server as its config files define it, unexpanded.

file: real path of the file that defines it. base: directory that relative
paths start from. transport: stdio, http, sse or auto. env: name -> text,
None removes. allow: names or None for all. deny: names. max_age: or None.
overlaid: 'env.X' and 'headers.X' that an overlay set (our expansion rules).
extra: what some clients know beside: env_file, env_vars (names to hand
down), env_headers (header -> variable), bearer (a variable), inputs, lacks
(what a recipe needs), required, waits (the time-outs that the file sets),
allow and deny ((key, file) of what set the list), shown (patterns of names),
hidden (pattern of server_tool -> file).
"""

Config = namedtuple('Config', 'files entries skipped profiles settings '
                              'warnings lock')
Config.__new__.__defaults__ = (None,)
Config.__doc__ = """What the config files say together.

files: paths as given, in order, then those that they name. entries: name
-> Entry, read by look_up. skipped: name -> why. profiles: name -> list of
server names. settings: our top-level keys, defaults filled in. warnings:
sentences.
lock: the Lock that holds the approvals, None where the state does.
"""

Definition = namedtuple('Definition', 'name hash text hints flaw')
Definition.__doc__ = """One tool as a server listed it.

hash: 64 hex digits, '' when flawed. text: canonical JSON. hints: dict of
the booleans given. flaw: why it may not be trusted, '' if it may.
"""

Tool = namedtuple('Tool', 'server name listed hash version hints flaw '
                          'approved blocked_at first_seen last_seen moves '
                          'differs ignored')
Tool.__new__.__defaults__ = ((0, 0), (), ())
Tool.__doc__ = """What the state knows of one tool, at one instant.

listed: in the last good list. hash, version, hints, flaw: as last listed.
approved: Approval or None. blocked_at: instant of `tools block` or None.
moves: (how often its definition moved, in how many of the last looks) since
an approval. differs: fields in which it is not the approved one, named only
where ignore_changes or a text that never rests asks for it, and the text of
that is kept. ignored: the same, where ignore_changes covers all of them.
"""

Approval = namedtuple('Approval', 'hash version hints at how')
Approval.__doc__ = """The definition an operator (or the baseline) trusts."""

Connection = namedtuple('Connection', (
    'launch state cause detail since observed_at listed_at protocol era '
    'ttl stderr refused lease_at lease_until lease_launch expires_at'))
Connection.__new__.__defaults__ = (None,)
Connection.__doc__ = """What is recorded of the link to one server.

state: ready, pending_auth, error or '' (never looked at). launch: digest it
was seen under. observed_at: end of the newest completed look. since: when
this state began. ttl: what the server said its list is good for, or 0.
refused: name -> why, for definitions that were not stored. expires_at: end
of the credential that the config sends, None if it does not say.
"""

Known = namedtuple('Known', 'server skipped disabled quarantined connection '
                            'launch launch_note lock')
Known.__new__.__defaults__ = (None,)
Known.__doc__ = """One server at one instant, as the gates see it.

server: Server, or None when the config has none; skipped then says why, if
an entry was there. disabled, quarantined: the fact, '' when it is not so.
connection: Connection under the configured launch, or None. lock: the Lock
that holds the approvals, None where the state does.
"""

Caller = namedtuple('Caller', 'tier actor profile servers')
Caller.__doc__ = """Who asks: tier, name for the audit, profile name or '',
and the server names in scope (None: all)."""

Ref = namedtuple('Ref', 'id server tool pin')
Ref.__doc__ = """One required tool: the trimmed text, its halves ('' both
when it is malformed) and the pin asked for, '' for none."""

Question = namedtuple('Question', 'refs caller filters now settings how '
                                  'places horizon lock')
Question.__new__.__defaults__ = (0, None)
Question.__doc__ = """One check. filters: names that are on. settings: as in
Config. how: the command that started this run, which remedies repeat.
places: the state directory and config files, in words. horizon: for so long
a credential must still be good. lock: the Lock that was asked for, whose
launches and hints must hold beside the state; None without one."""

Case = namedtuple('Case', 'ref known tool question')
Case.__doc__ = """What one gate looks at: a ref, its server, its tool."""

Finding = namedtuple('Finding', 'reason fact remedy cause')
Finding.__doc__ = """What one gate saw. reason: '' when it lets pass; fact:
a sentence for the operator; remedy: one instruction; cause: contract 9."""

Answer = namedtuple('Answer', (
    'id status reason retryable action detail remediation hash '
    'did_you_mean observed_at cause'))
Answer.__doc__ = """The result for one id; None where a key is absent."""

Report = namedtuple('Report', 'verdict checked_at waited_ms answers '
                              'request_id stuck')
Report.__doc__ = """The answer to a Question. waited_ms: None when no wait
was asked. stuck: sentences about causes that time alone does not cure."""

Record = namedtuple('Record', 'type source at request_id actor status '
                              'metadata')
Record.__doc__ = """One audit record before it has a place in the chain."""

Lock = namedtuple('Lock', 'path launches tools contract at')
Lock.__new__.__defaults__ = ('', None)
Lock.__doc__ = """A lockfile: required tools as they were reviewed.

path: as it was named. launches: server name -> (digest, masked text);
tools: id -> Locked. contract: name of the one that keeps it as it was at
that instant, '' for what the file says now."""

Locked = namedtuple('Locked', 'version hash hints text')
Locked.__doc__ = """One locked tool. version, hash: its pin; text: its
canonical definition, '' in a file without definitions."""

Contract = namedtuple('Contract', 'name at needs lock path files held told')
Contract.__doc__ = """What an automation needs, as `contract add` was told.

needs: [id, pin] pairs. lock: text of a lockfile, read from path, '' both
without one. files: real paths of the config files it is for. held: id ->
what is wrong with it, as far as syncs have told; told: the same, as far as
a --notify has delivered it. A fault is a dict of event, reason, detail.
"""

Launch = namedtuple('Launch', 'digest text how at baselined')
Launch.__doc__ = """A launch known for a server name. baselined: False when
it was approved and its first list is still to come."""

Switch = namedtuple('Switch', 'value over at')
Switch.__doc__ = """An operator's switch: value, and the config value that
it overrode; it counts while the config still says that."""

Token = namedtuple('Token', 'name servers profile required at expires_at')
Token.__doc__ = """An agent token, without its secret. servers: names, ['*']
for all, or None when it is pinned to a profile; required: [id, pin] pairs;
expires_at: None for never."""

Observation = namedtuple('Observation', (
    'state cause detail protocol era ttl tools refused warnings stderr '
    'expires_at cache_scope'))
Observation.__new__.__defaults__ = (None, '')
Observation.__doc__ = """What one look at one server found. tools: list of
Definition, None when nothing was listed. cache_scope: public, private or
'', as the server said of its list."""

# ==========================================================================
# 5. text
# ==========================================================================


class Refused(str):
    """Stands in parsed JSON for a value that may not be trusted: why.

    table: the object as read, where a key of it stands twice.
    """

    table = None


def _unique(pairs):
    table = dict(pairs)
    if len(table) == len(pairs):
        return table
    seen = set()
    again = next(k for k, _ in pairs if k in seen or seen.add(k))
    refused = Refused('the key %s stands twice' % json.dumps(again))
    refused.table = table
    return refused


def _whole(text):
    if len(text.lstrip('-')) <= MAX_DIGITS:
        return int(text)
    return Refused('a number has over %d digits' % MAX_DIGITS)


def _number(text):
    if len(text) > MAX_DIGITS:
        return Refused('a number has over %d digits' % MAX_DIGITS)
    value = float(text)
    if value - value != 0:      # 1e400 never reaches parse_constant
        return Refused('a number is too large')
    return int(value) if value.is_integer() else value


def _constant(name):
    if name == 'NaN':
        return Refused('NaN, or nesting over %d levels' % MAX_DEPTH)
    return Refused('%s is not JSON' % name)


# A string may lack its end: scanned once more from each quote in it, a
# long one would take for ever.
JSON_TOKEN = r'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]'


def cut_deep(text, limit):
    """Replace what nests deeper than limit by NaN, which is then refused.

    json.loads recurses, and the depth it stands differs by version.
    """
    if text.count('[') + text.count('{') <= limit:
        return text
    kept, depth, start = [], 0, 0
    for token in re.finditer(JSON_TOKEN, text):
        if token.group() in '[{':
            depth += 1
            if depth == limit + 1:
                kept.append(text[start:token.start()] + 'NaN')
        elif token.group() in ']}':
            depth -= 1
            if depth == limit:
                start = token.end()
    if depth <= limit:
        kept.append(text[start:])
    return ''.join(kept)


def decode_json(text, limit=MAX_DEPTH):
    """Parse JSON; a Refused stands where a value may not be trusted.

    Integral floats become integers, so that 1.0 and 1 hash alike. Raises
    ValueError when the text is not JSON.
    """
    return json.loads(cut_deep(text, limit), object_pairs_hook=_unique,
                      parse_float=_number, parse_int=_whole,
                      parse_constant=_constant)


def find_refused(value):
    """Return the first Refused inside a value, or ''."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Refused):
            return str(item)
        if isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return ''


# json.dumps would make such an encoder at every call.
compact_json = json.JSONEncoder(separators=(',', ':')).encode

DURATION = ''.join(r'(?:([0-9]+(?:\.[0-9]+)?)%s)?' % unit
                   for unit in ('d', 'h', 'm(?!s)', 's', 'ms'))
UNITS_MS = (DAY_MS, 60 * MINUTE_MS, MINUTE_MS, SECOND_MS, 1)


def parse_duration(text):
    """Read '1m30s', '1.5s', '250ms' or '0' into milliseconds.

    Raises UsageError for anything else, a bare number included.
    """
    if text == '0':
        return 0
    found = re.match('(?:%s)$' % DURATION, text) if text else None
    if not found or found.end() != len(text):
        raise UsageError('%s is not a duration; write for example 500ms, '
                         '1.5s, 1m30s or 2h' % json.dumps(text))
    parts = zip(found.groups(), UNITS_MS)
    total = sum(float(n) * unit for n, unit in parts if n)
    if total > MAX_DURATION_MS:
        raise UsageError('%s is too long; at most %dd' % (
            json.dumps(text[:40]), MAX_DURATION_MS // DAY_MS))
    return max(int(round(total)), 1 if total else 0)    # 0 has a meaning


def format_duration(ms):
    """Write milliseconds as people read them: '3m05s', '1h05m', '250ms'."""
    if ms < SECOND_MS:
        return '%dms' % ms
    seconds = ms // SECOND_MS
    if seconds < 60:
        return '%ds' % seconds
    minutes, hours = seconds // 60, seconds // 3600
    if minutes < 60:
        rest = seconds % 60
        return '%dm%02ds' % (minutes, rest) if rest else '%dm' % minutes
    if hours < 48:
        return '%dh%02dm' % (hours, minutes % 60)
    return '%dd' % (hours // 24)


def format_time(ms):
    """Write an instant as RFC 3339: UTC, Z, milliseconds (contract 5)."""
    seconds, rest = divmod(int(ms), 1000)
    stamp = time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))
    return '%s.%03dZ' % (stamp, rest)


TIME = (r'([0-9]{4})-([0-9]{2})-([0-9]{2})(?:[Tt ]([0-9]{2}):([0-9]{2})'
        r'(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?(?:[Zz]|([+-])([0-9]{2}):?'
        r'([0-9]{2}))?)?\Z')


def parse_time(text):
    """Read an RFC 3339 instant (a bare date is its midnight, UTC)."""
    import calendar
    found = re.match(TIME, text)
    if not found:
        raise UsageError('%s is not a time; write for example 2026-08-27 '
                         'or 2026-08-27T12:30:45Z' % json.dumps(text))
    y, mon, d, h, m, s, off_h, off_m = [int(found.group(n) or 0) for n in (
        1, 2, 3, 4, 5, 6, 9, 10)]
    if not (y and 1 <= mon <= 12 and 1 <= d <= calendar.monthrange(
            y, mon)[1] and h < 24 and m < 60 and s < 61 and off_h < 24
            and off_m < 60):
        raise UsageError('%s is not a time that exists' % json.dumps(text))
    at = calendar.timegm((y, mon, d, h, m, s)) * 1000
    at += int((found.group(7) or '0').ljust(3, '0')[:3])
    offset = (off_h * 60 + off_m) * MINUTE_MS
    return at + offset if found.group(8) == '-' else at - offset


def is_text(value):
    """Claim that a value is a string."""
    return isinstance(value, str)


def is_flag(value):
    """Claim that a value is true or false."""
    return isinstance(value, bool)


def is_table(value):
    """Claim that a value is a JSON object."""
    return isinstance(value, dict)


def is_list(value):
    """Claim that a value is a JSON array."""
    return isinstance(value, list)


def is_texts(value):
    """Claim that a value is an array of strings."""
    return isinstance(value, list) and all(map(is_text, value))


def is_duration(value):
    """Claim that a value is a duration such as "15m"."""
    try:
        return is_text(value) and parse_duration(value) >= 0
    except UsageError:
        return False


# C0, DEL, C1, bidirectional controls, line separators, zero-width marks,
# lone surrogates, tags: whatever could move a cursor, forge a line or be
# read by a model and not by the person who approves it.
UNSAFE = ('[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e'
          '\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff'
          '\U000e0000-\U000e0fff]')


def escape_char(found):
    """Write a matched character as an escape that YAML knows too."""
    code = ord(found.group())
    return ('\\x%02x' if code < 0x100 else '\\u%04x' if code < 0x10000
            else '\\U%08x') % code


def safe_text(text, keep=''):
    """Make foreign text fit for a terminal; a newline only if kept."""
    parts = str(text).split(keep) if keep else [str(text)]
    return keep.join(re.sub(UNSAFE, escape_char, part) for part in parts)


def shell_word(text):
    """Quote one word for a POSIX shell when it needs it (contract 11)."""
    if re.match(r'[A-Za-z0-9_./:@-]+\Z', text):
        return text
    return "'%s'" % text.replace("'", "'\\''")


def plural(count, noun):
    """Write '1 tool', '2 tools'."""
    return '%d %s%s' % (count, noun, '' if count == 1 else 's')


# What a reviewer would not see as it is, beside UNSAFE: by category, drawn
# as nothing or as a blank, or drawn like an ASCII character.
UNSEEN = ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zs', 'Zl', 'Zp')
DISGUISED = ('[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164'
             '\ufe00-\ufe0f\uffa0\u0251\u0261\u2044\u2215\u2236\ua789'
             '\U000e0100-\U000e01ef]')
# A word is of one of these; letters of another in it are there to mislead.
ALPHABETS = ('LATIN', 'CYRILLIC', 'GREEK', 'ARMENIAN', 'CHEROKEE', 'COPTIC',
             'LISU')
# Greek letters that stand beside Latin ones as symbols, and look like none.
SYMBOLS = ('[\u0393\u0394\u0398\u039b\u039e\u03a0\u03a3\u03a6\u03a8\u03a9'
           '\u03b2\u03b4-\u03b6\u03b8\u03bb\u03bc\u03be\u03c0\u03c3\u03c6'
           '\u03c8\u03c9]')
# Letters that look like Latin ones: a word of nothing else passes for one.
TWINS = {'CYRILLIC': '[\u0430\u0441\u0435\u043e\u0440\u0445\u0443\u0456'
                     '\u0458\u0455\u04bb\u0501\u051b\u051d\u0410\u0412'
                     '\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422'
                     '\u0423\u0425\u0405\u0406\u0408]+\\Z',
         'GREEK': '[\u03b1\u03b9\u03ba\u03bd\u03bf\u03c1\u03c5\u03c7'
                  '\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d'
                  '\u039f\u03a1\u03a4\u03a5\u03a7]+\\Z'}
# A sign and the one selector that asks for its picture, as in a warning.
EMOJI = '[\u2000-\u3300\U0001f000-\U0001faff]\ufe0f'
MAX_NOTES = 12


def _is_disguised(char):
    """Tell whether a character cannot be seen, or looks like another."""
    import unicodedata
    kind = unicodedata.category(char)
    if kind in UNSEEN or re.match(DISGUISED, char):
        return True
    plain = unicodedata.normalize('NFKC', char)
    is_plain = char > '\xff' and kind != 'No' and re.match('[!-~]\\Z', plain)
    # Fullwidth commas and the like are how Chinese is written.
    return bool(is_plain) and (plain.isalnum()
                               or not '\uff00' <= char <= '\uffef')


def _alphabets(word):
    """Sort the places of a word's letters by their alphabet."""
    import unicodedata
    found = {}
    for place, char in enumerate(word):
        name = unicodedata.name(char, '').split(' ')[0]
        if name in ALPHABETS and not re.match(SYMBOLS, char):
            found.setdefault(name, []).append(place)
    return found


def _misleading_letters(text):
    """Find letters that stand in a word of another alphabet, and words
    that could be Latin, where nothing else is written in theirs."""
    places, twins, honest = [], [], set()
    for hit in re.finditer(r'\w+', text):
        if not re.search('[^\0-\x7f]', hit.group()):
            continue
        found = _alphabets(hit.group())
        own = 'LATIN' if 'LATIN' in found else max(
            found, key=lambda name: len(found[name]), default='')
        places += [hit.start() + place for name in found if name != own
                   for place in found[name]]
        if own in TWINS:
            if re.match(TWINS[own], hit.group()):
                twins.append((own, hit))
            else:
                honest.add(own)
    if re.search('[A-Za-z]', text):
        for own, hit in twins:
            if own not in honest:
                places += range(*hit.span())
    return places


def odd_places(text):
    """Find the characters of a text that hide or mislead: their places.

    Controls, what is not drawn, white space other than a plain blank, and
    letters that look like those of another alphabet.
    """
    found = {hit.start() for hit in re.finditer(EMOJI + '|[^\x20-\x7e]',
                                                text)
             if len(hit.group()) == 1 and _is_disguised(hit.group())}
    return found.union(_misleading_letters(text))


def reveal(text):
    """Make foreign text fit to be judged: what hides or misleads in it
    stands as an escape."""
    odd = odd_places(text)
    return re.sub('[^\x20-\x7e]', lambda hit: escape_char(hit)
                  if hit.start() in odd else hit.group(), text)


CONTROL_NAMES = {
    '\0': 'NULL', '\a': 'BELL', '\b': 'BACKSPACE', '\t': 'TAB',
    '\r': 'CARRIAGE RETURN', '\x1b': 'ESCAPE', '\x7f': 'DELETE'}
UNNAMED = {'Cc': 'CONTROL CHARACTER', 'Co': 'PRIVATE USE',
           'Cs': 'LONE SURROGATE'}


def _odd_note(char, count, near):
    import unicodedata
    name = unicodedata.name(char, '') or CONTROL_NAMES.get(
        char, UNNAMED.get(unicodedata.category(char), 'UNASSIGNED'))
    return '%s %s, %s, near "%s"' % (
        re.sub('(?s).', escape_char, char), name, 'once' if count == 1
        else '%d times' % count, near)


def odd_notes(text):
    """Name the characters of a text that hide or mislead, a line each."""
    counts, near, spelt = {}, {}, ''
    for line in text.split('\n'):
        for place in sorted(odd_places(line)):
            char = line[place]
            if '\U000e0000' <= char <= '\U000e007f':
                spelt += chr(ord(char) - 0xe0000)
                continue
            counts[char] = counts.get(char, 0) + 1
            if len(near) < MAX_NOTES and char not in near:
                near[char] = reveal(line[max(0, place - 12):place + 13])
    notes = [_odd_note(char, count, near[char])
             for char, count in list(counts.items())[:MAX_NOTES]]
    if len(counts) > MAX_NOTES:
        notes.append('and %d more' % (len(counts) - MAX_NOTES))
    if spelt:
        notes.append('%s, which nobody sees and a model reads: "%s"' % (
            plural(len(spelt), 'tag character'), reveal(spelt)))
    return notes


def _mask_query(found):
    return found.group(1) + ('?***' if found.group(2) else '')


def is_loopback(host):
    """Tell whether a host name or address stays on this machine."""
    return host == 'localhost' or host.endswith('.localhost') or bool(
        re.match(r'(?:(?:::ffff:)?127(?:\.[0-9]{1,3}){1,3}|::1)\Z', host))


def origin_of(url):
    """Give (scheme, host, port) of an HTTP URL; raises ValueError."""
    from urllib.parse import urlsplit
    parts, usual = urlsplit(url), {'http': 80, 'https': 443}
    if parts.scheme not in usual or not parts.hostname:
        raise ValueError('not an http:// or https:// URL')
    host = parts.hostname
    if re.search('[^\0-\x7f]', host):
        host = host.encode('idna').decode('ascii')
    return parts.scheme, host, parts.port or usual[parts.scheme]


def host_text(origin, is_full=False):
    """Write the host of an origin; its port too, unless it is the usual."""
    scheme, host, port = origin
    host = '[%s]' % host if ':' in host else host
    is_usual = (scheme, port) in (('http', 80), ('https', 443))
    return host if is_usual and not is_full else '%s:%d' % (host, port)


def plain_url(url):
    """Cut a URL down to what may be shown: no user, query or fragment."""
    from urllib.parse import urlsplit
    try:
        origin = origin_of(url)
    except ValueError:
        return '(no URL)'
    return '%s://%s%s' % (origin[0], host_text(origin), urlsplit(url).path)


def unsendable(headers):
    """Name the first header that HTTP cannot carry, None without one."""
    for name, value in headers.items():
        if not re.match(r'[!-9;-~][ -9;-~]*\Z', name) or re.search(
                r'\n(?![ \t])|\r(?![ \t\n])|[^\x00-\xff]', value):
            return name
    return None


# A whole name that tells of a secret. It is looked at once, from its start:
# a server writes the text, and must not be able to keep us busy with it.
SECRET_NAME = (r'(?<![A-Za-z0-9_.-])(?=[A-Za-z0-9_.-]*(?:key|token|secret|'
               r'passw|passphrase|pwd|credential|authorization|cookie|'
               r'bearer))[A-Za-z0-9_.-]+')
# The same for an option, where what is an everyday word in a sentence tells.
SECRET_FLAG = SECRET_NAME + (r'|-{0,2}(?!no[-_])(?:[a-z0-9]+[-_])*'
                             r'(?:pass|pat|jwt|otp|session|auth)'
                             r'(?:[-_]header)?')
QUOTED = r'"(?:[^"\\\n]|\\.)*"?|\'(?:[^\'\\\n]|\\.)*\'?'    # or cut off
# Order matters: each rule sees what the ones before it left.
MASKS = (
    (r'(://)[^/?#\s\'"]*@', r'\1***@'),
    (r'(\b[\w.-]+:)[^@\s\'"]+(@(?:tcp|unix)\()', r'\1***\2'),
    (r'(://[^\s?#\'"<>]*)(\?[^\s\'"<>]*)?', _mask_query),
    (r'(?i)(cookie["\']?\s*:\s*)[^\r\n"\']+', r'\1***'),
    (r'(?i)\b(bearer|basic)\s+[^\s"\',;]+', r'\1 ***'),
    ((r'(?i)(' + SECRET_NAME + r'["\']?\s*[=:]\s*)(?!\*\*\*)(?:'
      + QUOTED + r'|[^\s"\',;&]+)'), r'\1***'),
    (r'(?i)((?=-)' + SECRET_NAME + r'[ \t]+)(?:' + QUOTED
     + r'|[^\s"\'-][^\s]*)', r'\1***'),
    ((r'\b(?:sk|pk|rk|gh[pousr]|glpat|xox[abeprs]|tvly|pplx|hf|pfl_agt)'
      r'[-_][A-Za-z0-9._-]{4,}'), '***'),
    (r'\b(?:github_pat_|npm_|AKIA|AIza|ya29\.|eyJ)[A-Za-z0-9._-]{12,}',
     '***'),
    (r'\b(?=[A-Za-z_]*[0-9])(?=[0-9_]*[A-Za-z])[A-Za-z0-9_]{32,}\b', '***'),
)


def is_secret_name(name):
    """Tell whether a variable or an option tells of a secret by its name."""
    return bool(re.match('(?i)(?:%s)\\Z' % SECRET_FLAG, name))


def mask_values(text, secrets):
    """Mask the values that are credentials."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= 4:
            text = text.replace(value, '***')
    return text


def redact(text, secrets=()):
    """Mask what looks like a credential, and the values that are ones."""
    text = mask_values(text, secrets)
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


ContainerRun = namedtuple('ContainerRun', 'engine at options image')
ContainerRun.__doc__ = """A command line that starts a container.

engine: docker, podman or nerdctl. at: index behind the word run. options:
letter or long name -> value, True where it takes none. image: the first word
that is no option, '' without one.
"""
ENGINE = r'(?i)(?:.*[/\\])?(docker|podman|podman-remote|nerdctl)(?:\.exe)?\Z'
# Options before `run`, and behind it, that take no word of their own.
ENGINE_FLAGS = frozenset(
    '-D --debug --tls --tlsverify -r --remote --noout --syslog --trace '
    '--transient-store --debug-full --insecure-registry '
    '--experimental'.split())
RUN_FLAGS = frozenset(
    'detach disable-content-trust env-host help http-proxy init interactive '
    'no-healthcheck no-hostname no-hosts oom-kill-disable passwd privileged '
    'publish-all quiet read-only read-only-tmpfs replace rm rmi rootfs '
    'sig-proxy tls-verify tty unsetenv-all use-api-socket'.split())
RUN_LETTERS = 'diPqt'           # short ones that take no word


def _run_option(word, after):
    """Read one option of `run`: ({name: value}, took it the word after)."""
    if word[:2] == '--':
        name, equals, value = word[2:].partition('=')
        if equals or name in RUN_FLAGS:
            return {name: value if equals else True}, False
        return {name: after}, not re.match('--?[A-Za-z]', after)
    found, letters = {}, word[1:]
    for n, letter in enumerate(letters):
        rest = letters[n + 1:]
        if rest[:1] == '=' or letter not in RUN_LETTERS:
            found[letter] = rest.lstrip('=') or after
            return found, not rest
        found[letter] = True
    return found, False


def container_of(argv):
    """Read a `docker run` or its like: a ContainerRun, None for all else."""
    engine, at = re.match(ENGINE, argv[0]), 1
    while at < len(argv) and argv[at][:1] == '-':
        word = argv[at]
        is_alone = ('=' in word or word in ENGINE_FLAGS
                    or word[1:2] != '-' and len(word) > 2)
        at += 1 if is_alone else 2
    at += argv[at:at + 1] == ['container']
    if not engine or argv[at:at + 1] != ['run']:
        return None
    options, at, start = {}, at + 1, at + 1
    while at < len(argv) and len(argv[at]) > 1 and argv[at][0] == '-':
        word, after = argv[at], ''.join(argv[at + 1:at + 2])
        at += 1
        if word == '--':
            break
        found, is_taken = _run_option(word, after)
        options.update(found)
        at += is_taken
    return ContainerRun(engine.group(1).lower(), start, options,
                        ''.join(argv[at:at + 1]))


def is_interactive(run):
    """Tell whether a container reads what is sent to it (-i)."""
    said = run.options.get('i', run.options.get('interactive'))
    return said is True or str(said).lower() in ('1', 't', 'true')


# ==========================================================================
# 6. identity
# ==========================================================================

REQUEST_ID = r'[A-Za-z0-9_-]{1,256}\Z'
ID_HINT = 'An id has the form <server>:<tool>'


def parse_id(text, pin=''):
    """Split a required id at its first colon (contract 4) into a Ref."""
    trimmed = text.strip()
    server, _, tool = trimmed.partition(':')
    server, tool = server.strip(), tool.strip()
    if not server or not tool:
        server = tool = ''
    return Ref(trimmed, server, tool, pin)


def id_hint(ref):
    """Say how a malformed id should look; knows the hosts' spelling."""
    found = re.match(r'mcp__(.+?)__(.+)\Z', ref.id, re.DOTALL)
    if found and ':' not in ref.id:
        return '%s; did you mean %s:%s?' % ((ID_HINT,) + found.groups())
    return ID_HINT + '.'


def is_storable(text):
    """Tell whether a text is Unicode that can be a key of the store."""
    try:
        text.encode('utf-8')
    except UnicodeEncodeError:
        return False
    return '\0' not in text


def unstorable_fact(text):
    """Say why a text cannot be a key of the store."""
    return 'holds a NUL' if '\0' in text else 'is not Unicode text'


def parse_pin(text):
    """Read 'sha256/v<N>:<64 hex>' into (version, hex), or None."""
    found = re.match(r'sha256/v([0-9]+):([0-9A-Fa-f]{64})\Z', text)
    if not found or len(found.group(1)) > MAX_DIGITS:
        return None
    return int(found.group(1)), found.group(2).lower()


def format_hash(version, digest):
    """Write a hash as pins are written."""
    return 'sha256/v%d:%s' % (version, digest)


def canonical(value):
    """Write JSON in the one form that is hashed (contract 10)."""
    return json.dumps(value, sort_keys=True, separators=(',', ':'),
                      allow_nan=False)


def sha256(text):
    """Digest text (or bytes) to 64 hex digits."""
    import hashlib
    data = text if isinstance(text, bytes) else text.encode('ascii')
    return hashlib.sha256(data).hexdigest()


def definition_text(tool):
    """Give the canonical text of a listed tool, hash version 1."""
    body = {key: tool[key] for key in HASHED if tool.get(key) is not None}
    body['v'] = HASH_VERSION
    return canonical(body)


def rehash(digest, text):
    """Hash a stored definition of an earlier hash version anew.

    Returns (hash, text) as a look of today would give them, None where the
    text is not the one that was hashed.
    """
    try:
        is_same = is_text(text) and sha256(text) == digest
        tool = decode_json(text) if is_same else None
    except ValueError:
        return None
    if not is_table(tool) or find_refused(tool):
        return None
    text = definition_text(tool)
    return sha256(text), text


def changed_fields(old, new):
    """Name the hashed members in which two canonical texts differ.

    '' is a definition that has none. Compared as they are hashed: in
    Python 1 == True.
    """
    before, after = (json.loads(text) if text else {} for text in (old, new))
    return tuple(field for field in HASHED if canonical(
        before.get(field)) != canonical(after.get(field)))


def read_hints(annotations):
    """Keep the hints that count: JSON booleans of a known name."""
    if not isinstance(annotations, dict):
        return {}
    return {name: annotations[name] for name in HINTS
            if isinstance(annotations.get(name), bool)}


# Hint -> the value that is safe; leaving that value is a step to risk.
SAFE_HINTS = (('readOnlyHint', True), ('destructiveHint', False),
              ('openWorldHint', False))


def riskier_hints(approved, current):
    """List the hints that left their safe value, in words."""
    word = {True: 'true', False: 'false', None: 'absent'}
    return ['%s %s -> %s' % (name, word[safe], word[current.get(name)])
            for name, safe in SAFE_HINTS
            if approved.get(name) is safe and current.get(name) is not safe]


def review_token(digest, hints):
    """Bind an approval to what was shown: definition and hints."""
    return sha256(canonical([HASH_VERSION, digest, hints]))


# Variables that choose what code is started, by the program that asks them:
# the loader, a shell, an interpreter, or what fetches a package. HOME does
# (user site, .npmrc). npm reads its own in any case.
CODE_ENV = r'''(?x)(?: PATH | HOME | LD_.* | DYLD_.* | GCONV_PATH
    | OPENSSL_CONF | XDG_(?:CONFIG|DATA)_(?:HOME|DIRS)
    | ENV | BASH_ENV | BASH_FUNC_.* | SHELLOPTS | PS4
    | PYTHON.* | PIP_.* | PIPX_.* | UV_.* | VIRTUAL_ENV | PYENV_.*
    | NODE_OPTIONS | NODE_PATH | (?i:npm_config_).* | COREPACK_.* | NVM_DIR
    | VOLTA_HOME | BUN_.* | DENO_.* | ASDF_.*
    | RUBYOPT | RUBYLIB | GEM_HOME | GEM_PATH | PERL5OPT | PERL5LIB | PERL5DB
    | JAVA_TOOL_OPTIONS | JDK_JAVA_OPTIONS | _JAVA_OPTIONS | CLASSPATH
    | DOTNET_STARTUP_HOOKS | CARGO_HOME | GOFLAGS | GOPROXY
    | GIT_SSH.* | GIT_CONFIG.* | GIT_EXEC_PATH
    | DOCKER_HOST | DOCKER_CONTEXT | DOCKER_CONFIG )\Z'''


def is_code_env(name):
    """Tell whether a variable can choose the code that is started."""
    return re.match(CODE_ENV, name) is not None


def launch_value(server):
    """Say what is started or called, as written (contract 10, Launch)."""
    env = {name: value for name, value in server.env.items()
           if is_code_env(name)}
    return {'transport': server.transport, 'command': server.command,
            'args': list(server.args), 'cwd': server.cwd, 'url': server.url,
            'env': env}


def seen_key(server):
    """Name where a look at a server is kept: its file, and the base that
    its relative paths start from where that is not the file's directory."""
    if server.base == os.path.dirname(server.file):
        return server.file
    return '%s @ %s' % (server.file, server.base)


def launch_digest(server):
    """Digest of the launch; an approval belongs to it."""
    return sha256(canonical(launch_value(server)))


def split_args(args):
    """Find the values in a command line that look like credentials.

    For each word (what of it may be shown, the sign that stands for the
    rest, the name of the value, the value); the last are '' without one.
    """
    found, after, flag = [], '', ''
    for word in args:
        match, sign = None, '=***'
        if after == 'secret':
            found.append(('', '***', flag, word))
            after = ''
            continue
        named = re.match('([A-Z][A-Z0-9_]*)=', word)
        if after == 'env' or re.match('(?i)(?:%s)=' % SECRET_FLAG, word) or (
                named and not is_code_env(named.group(1))):
            match = re.match('(?s)()([^=]*)=(.*)', word)
        elif after == 'header':
            match = re.match('(?s)()([^:=]*)[:=](.*)', word)
            sign = ': ***'
        elif re.match('-e[A-Za-z_]|--env=', word):
            match = re.match('(?s)(-e|--env=)([^=]*)=(.*)', word)
        elif re.match('-H[A-Za-z]|--header=', word):
            match = re.match('(?s)(-H|--header=)([^:=]*)[:=](.*)', word)
            sign = ': ***'
        found.append((match.group(1) + match.group(2), sign, match.group(2),
                      match.group(3).strip()) if match
                     else (word, '', '', ''))
        flag = word.lstrip('-')
        is_flag = word[:1] == '-' and '=' not in word and not match
        after = ''
        if is_flag and flag in ('e', 'env'):
            after = 'env'
        elif is_flag and flag in ('H', 'header', 'headers'):
            after = 'header'
        elif is_flag and is_secret_name(flag):
            after = 'secret'
    return found


def mask_args(args):
    """Mask the values in a command line that look like credentials."""
    return [redact(shown + sign) for shown, sign, _, _ in split_args(args)]


def is_secret_env(name):
    """Tell whether a variable of a launch tells of a secret: npm is given
    credentials in one."""
    return bool(re.search(r'(?i)%s|_auth\Z' % SECRET_NAME, name))


def _env_text(name, value):
    return '%s=%s' % (name, '***' if value and is_secret_env(name)
                      else redact(value or '(removed)'))


def launch_text(server):
    """Show a launch to people, secrets masked."""
    if server.transport != 'stdio':
        return '%s %s' % (server.transport, redact(server.url or ''))
    words = [redact(server.command or '')] + mask_args(server.args)
    text = ' '.join(shell_word(word) for word in words)
    extra = [_env_text(*pair) for pair in sorted(
        launch_value(server)['env'].items())]
    if server.cwd:
        extra.insert(0, 'cwd=%s' % redact(server.cwd))
    return text + (' [%s]' % ' '.join(extra) if extra else '')


def glob_matches(pattern, text):
    """Match a text whole with a pattern of * and ?, in linear time."""
    pieces = [re.escape(piece).replace(r'\?', '.')
              for piece in pattern.split('*')]
    pieces[-1] += r'\Z'
    at = 0
    for n, piece in enumerate(pieces):
        known = re.compile(piece, re.DOTALL)
        found = known.search(text, at) if n else known.match(text)
        if not found:
            return False
        at = found.end()
    return True


def denied_by(server, tool):
    """Tell what in a config keeps a tool out, None if nothing does.

    Gives (key, file, what the key does with the tool). OpenCode's patterns
    are of the names that it shows a model: server_tool.
    """
    extra, shown = server.extra, server.extra.get('shown')
    if server.allow is not None and tool not in server.allow or (
            shown is not None and not any(
                glob_matches(pattern, tool) for pattern in shown)):
        return extra.get('allow', ('enabled_tools', server.file)) + (
            'does not name',)
    if tool in server.deny:
        return extra.get('deny', ('disabled_tools', server.file)) + (
            'names',)
    for pattern, file in extra.get('hidden', {}).items():
        full = '%s_%s' % (server.name, tool)
        if glob_matches(pattern, full) or glob_matches(
                pattern, re.sub('[^A-Za-z0-9_-]', '_', full)):
            return 'tools[%s]' % json.dumps(pattern), file, 'hides'
    return None


# ==========================================================================
# 7. config (contract 12): bytes of files in, servers out. A dialect is a
#    row in DIALECTS: how its owner reads an entry, and how it expands text.
# ==========================================================================

Entry = namedtuple('Entry', 'raw path file dialect base overlays top level '
                            'notes flagged off')
Entry.__new__.__defaults__ = ('', '')
Entry.__doc__ = """A server's table as it stands in a file, not yet read.

path: as the user named the file; file: its real path. base: directory that
relative paths start from. overlays: (raw, path) pairs from our own files.
top: the whole file. level: its place in the client's precedence, 2 for a
project's. notes: what was seen while it was found. flagged: the file whose
enabled or disabled counts, '' for its own; off: the file of a list that
leaves the server out, '' for none.
"""

# -- the text of a file: JSON with comments -----------------------------------

# A string may lack its end, as in JSON_TOKEN.
STRING = r'(?s)"(?:[^"\\\r\n]|\\.)*"?'
COMMENT = STRING + r'|//[^\r\n]*|/\*.*?\*/|/\*'
TRAILING = STRING + r'|,(?=\s*[}\]])'


def _blank(found):
    token = found.group()
    if token[0] == '"':
        return token
    if token == '/*':
        raise json.JSONDecodeError('a /* comment has no end', found.string,
                                   found.start())
    return re.sub(r'[^\r\n]', ' ', token)


def blank_comments(text):
    """Replace comments and trailing commas by blanks of the same shape.

    Strings are copied whole and lines stay lines, so that a parser's error
    names the right place. Raises ValueError for a comment without an end.
    """
    return re.sub(TRAILING, _blank, re.sub(COMMENT, _blank, text))


def _decode_bytes(data, path):
    if not data.strip():
        raise ConfigError('config %s is empty' % path)
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError('config %s is larger than %d bytes'
                          % (path, MAX_CONFIG_BYTES))
    encoding = 'utf-8-sig'
    if data[:2] in (b'\xff\xfe', b'\xfe\xff'):
        encoding = 'utf-16'
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        raise ConfigError('config %s is not UTF-8 (byte %d); save it as '
                          'UTF-8' % (path, exc.start)) from exc


def _json_hint(message, text, at):
    around = text[max(0, at - 1):at + 1]
    if 'escape' in message and 'backslash' not in message:
        return ' (double each backslash of a Windows path)'
    if "'" in around or '\u201c' in around or '\u201d' in around:
        return ' (JSON takes straight double quotes)'
    return ''


def _misread(path, exc, text):
    """Say where a parser stopped, whichever it was."""
    text, at = getattr(exc, 'doc', text), getattr(exc, 'pos', 0)
    before = text[:at]
    return ConfigError('config %s, line %d, column %d: %s%s' % (
        path, before.count('\n') + 1, len(before) - before.rfind('\n'),
        getattr(exc, 'msg', exc), _json_hint(str(exc), text, at)))


def _load_json(text, doubles):
    def pairs_seen(pairs):
        table = dict(pairs)
        if len(table) != len(pairs):
            seen = set()
            doubles.extend(sorted({name for name, _ in pairs
                                   if name in seen or seen.add(name)}))
        return table

    def refuse(name):
        at = next(token.start() for token in re.finditer(
            STRING + '|' + name, text) if token.group() == name)
        raise json.JSONDecodeError('%s is not JSON' % name, text, at)
    cut = cut_deep(text, MAX_DEPTH)
    if cut != text:
        raise json.JSONDecodeError('it nests deeper than %d levels'
                                   % MAX_DEPTH, text,
                                   len(os.path.commonprefix((text, cut))))
    return json.loads(text, object_pairs_hook=pairs_seen,
                      parse_constant=refuse)


def decode_config(text, path):
    """Parse JSON into (table, names that stand twice, how lenient).

    How lenient: 0 for strict JSON, 1 with comments, 2 with trailing commas.
    Raises ConfigError with file, line and column.
    """
    doubles, leniency = [], 0
    try:
        try:
            table = _load_json(text, doubles)
        except ValueError:
            del doubles[:]
            plain = blank_comments(text)
            leniency = 1 if plain == re.sub(COMMENT, _blank, text) else 2
            table = _load_json(plain, doubles)
    except ValueError as exc:
        raise _misread(path, exc, text) from exc
    if not isinstance(table, dict):
        raise ConfigError('config %s holds no JSON object' % path)
    return table, doubles, leniency


# -- TOML ---------------------------------------------------------------------

TOML_DEPTH = 64
TOML_COMMENT = r'#[^\n\0-\x08\x0b-\x1f\x7f]*'
TOML_STRINGS = (        # pattern of a string, are its escapes read
    ((r'"""\n?((?:[^"\\\x00-\x08\x0b-\x1f\x7f]|\\[\s\S]|"{1,2}(?!"))*'
      r'"{0,2})"""'), True),
    (r"'''\n?((?:[^'\x00-\x08\x0b-\x1f\x7f]|'{1,2}(?!'))*'{0,2})'''",
     False),
    (r'"((?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\[^\n])*)"', True),
    (r"'([^'\x00-\x08\x0a-\x1f\x7f]*)'", False))
TOML_ESCAPE = (r'\\(?:([btnfre"\\])|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|'
               r'U([0-9A-Fa-f]{8})|[ \t]*\n[ \t\n]*|([\s\S]?))')
TOML_SCALARS = (        # of a whole word, what reads it
    (r'true|false', 'true'.__eq__),
    ((r'[+-]?(?:0|[1-9](?:_?[0-9])*)|0x[0-9A-Fa-f](?:_?[0-9A-Fa-f])*'
      r'|0o[0-7](?:_?[0-7])*|0b[01](?:_?[01])*'),
     lambda word: int(word.replace('_', ''), 0)),
    ((r'[+-]?(?:(?:0|[1-9](?:_?[0-9])*)(?:\.[0-9](?:_?[0-9])*)?'
      r'(?:[eE][+-]?[0-9](?:_?[0-9])*)?|inf|nan)'),
     lambda word: float(word.replace('_', ''))),
    # Dates and times stay text: nothing here reads them.
    ((r'[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[Tt ][0-9]{2}:[0-9]{2}(?::[0-9]{2}'
      r'(?:\.[0-9]+)?)?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})?)?'
      r'|[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?'), str))


class Toml:
    """A TOML 1.1 document being read, as Codex takes it.

    What it does not know it refuses, with its place; a table is never
    skipped in silence.
    """

    def __init__(self, text):
        self.text, self.at = text.replace('\r\n', '\n'), 0
        self.closed = set()     # ids of values, which take no more keys
        self.places = {}        # (id of a table, key or None) -> place

    def fail(self, why, at=None):
        """Refuse the document at a place."""
        raise json.JSONDecodeError(why, self.text,
                                   self.at if at is None else at)

    def take(self, pattern):
        """Step over a pattern: its match, or None when it is not here."""
        found = re.compile(pattern).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def note(self, table, key, at):
        """Remember where a key stands; it may stand only once."""
        first = self.places.setdefault((id(table), key), at)
        if first != at:
            self.fail('%s stands twice, first in line %d' % (
                'this table' if key is None else json.dumps(key),
                self.text.count('\n', 0, first) + 1), at)

    def string(self, kinds=TOML_STRINGS):
        """Read a string of one of these kinds, None if none is here."""
        for pattern, is_escaped in kinds:
            found = self.take(pattern)
            if found:
                return self.plain(found) if is_escaped else found.group(1)
        return None

    def plain(self, found):
        """Give the text of a string, its escapes read."""
        return re.sub(TOML_ESCAPE, lambda escape: self.escaped(
            escape, found.start(1)), found.group(1))

    def escaped(self, found, start):
        """Give the character of an escape."""
        letter, bad = found.group(1), found.group(5)
        code = int(found.group(2) or found.group(3) or found.group(4)
                   or '0', 16)
        if bad is not None or code > 0x10ffff or 0xd800 <= code < 0xe000:
            self.fail('bad escape %s; write a Windows path in single quotes, '
                      'or double each backslash' % found.group(),
                      start + found.start())
        if letter:
            return dict(zip('btnfre"\\', '\b\t\n\f\r\x1b"\\'))[letter]
        return chr(code) if found.lastindex else ''

    def key(self):
        """Read a dotted key: its parts."""
        parts = []
        while not parts or self.take(r'\.'):
            self.take(r'[ \t]*')
            bare = self.take(r'[A-Za-z0-9_-]+')
            part = bare.group() if bare else self.string(TOML_STRINGS[2:])
            if part is None or len(parts) > TOML_DEPTH:
                self.fail('a key is expected')
            parts.append(part)
            self.take(r'[ \t]*')
        return parts

    def value(self, depth=0):
        """Read a value, nested ones too."""
        text = self.string()
        if text is not None:
            return text
        if depth > TOML_DEPTH:
            self.fail('it nests deeper than %d levels' % TOML_DEPTH)
        if self.take(r'\['):
            return self.items([], r'\]', lambda items: items.append(
                self.value(depth + 1)))
        if self.take(r'\{'):
            return self.items({}, r'\}', lambda table: self.pair(
                table, depth + 1))
        word = self.take(r'[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9][0-9:.Zz+-]*'
                         r'|[A-Za-z0-9_.:+-]+')
        for pattern, read in TOML_SCALARS if word else ():
            if re.match('(?:%s)\\Z' % pattern, word.group()):
                return read(word.group())
        return self.fail('a value is expected', word and word.start())

    def items(self, held, end, read):
        """Read what stands in brackets; since 1.1 lines may break in both."""
        blank = r'(?:[ \t\n]|%s)*' % TOML_COMMENT
        self.take(blank)
        while not self.take(end):
            read(held)
            self.take(blank)
            if not self.take(',' + blank) and not re.compile(end).match(
                    self.text, self.at):
                self.fail('a comma or %s is expected' % end[1:])
        self.closed.add(id(held))
        return held

    def pair(self, table, depth=0):
        """Read `key = value` into a table."""
        at, parts = self.at, self.key()
        if not self.take(r'=[ \t]*'):
            self.fail('= is expected')
        table = self.descend(table, parts[:-1], at, True)
        self.note(table, parts[-1], at)
        if parts[-1] in table:
            self.fail('%s is a table already' % parts[-1], at)
        table[parts[-1]] = self.value(depth)

    def descend(self, table, parts, at, is_key=False):
        """Go down from a table, making those on the way."""
        for part in parts:
            if part not in table:
                table[part] = {}
                if is_key:
                    self.note(table[part], None, at)
            table = table[part]
            if isinstance(table, list) and not (
                    is_key or id(table) in self.closed):
                table = table[-1]
            if not isinstance(table, dict) or id(table) in self.closed:
                self.fail('%s is a value already' % part, at)
        return table

    def header(self, root):
        """Read a [table] or [[element]]: the table that follows."""
        at, is_list = self.at, self.take(r'\[\[')
        if not is_list:
            self.take(r'\[')
        parts = self.key()
        if not self.take(r'\]\]' if is_list else r'\]'):
            self.fail('] is expected')
        above = self.descend(root, parts[:-1], at)
        if is_list:
            found = above.setdefault(parts[-1], [])
            if not isinstance(found, list) or id(found) in self.closed:
                self.fail('%s is no array of tables' % parts[-1], at)
            found.append({})
            return found[-1]
        if isinstance(above.get(parts[-1]), list):
            self.fail('%s is an array already' % parts[-1], at)
        table = self.descend(above, parts[-1:], at)
        self.note(table, None, at)
        return table

    def document(self):
        """Read it whole."""
        root = table = {}
        while True:
            self.take(r'(?:[ \t\n]|%s)*' % TOML_COMMENT)
            if self.at == len(self.text):
                return root
            if self.text[self.at] == '[':
                table = self.header(root)
            else:
                self.pair(table)
            if not self.take(r'[ \t]*(?:%s)?(?:\n|\Z)' % TOML_COMMENT):
                self.fail('the line should end here')


# -- what our own keys take ---------------------------------------------------

def one_of(*words):
    """Make a claim that a value is one of these words."""
    def is_one(value):
        return is_text(value) and value in words
    is_one.__doc__ = 'one of ' + ', '.join(json.dumps(w) for w in words)
    return is_one


def is_http_url(value):
    """Claim that a value is an HTTP URL, with nothing still to encode."""
    try:
        return (is_text(value) and not re.search(r'[\s\0-\x1f\x7f]', value)
                and bool(origin_of(value)))
    except ValueError:
        return False


def is_variable(value):
    """Claim that a value is the name of a variable."""
    return is_text(value) and bool(re.match(r'[A-Za-z_][A-Za-z0-9_]*\Z',
                                            value))


def is_auth(value):
    """Claim that a value says how a probe sends its credential."""
    return is_text(value) and bool(re.match(
        r"(?:bearer|header:(?!(?i:host|connection|content-length|"
        r"transfer-encoding|expect)\Z)[!#$%&'*+.^_`|~A-Za-z0-9-]+)\Z",
        value))


def is_credential_name(value):
    """Claim that a value names a variable, or may name a header."""
    return is_variable(value) or is_text(value) and is_auth('header:'
                                                            + value)


def is_body(value):
    """Claim that a value can be the body of a probe."""
    return isinstance(value, (str, dict, list))


KIND = {is_text: 'a string', is_flag: 'true or false',
        is_table: 'an object', is_list: 'an array',
        is_texts: 'an array of strings',
        is_duration: 'a duration such as "15m"',
        is_http_url: 'an http:// or https:// URL without blanks',
        is_credential_name: 'the name of a variable, or of a header of its '
                            'entry',
        is_auth: '"bearer" or "header:NAME"',
        is_body: 'a string, an object or an array'}


def _expected(claim):
    return KIND.get(claim) or claim.__doc__


# Our top-level keys: what they take, and what stands for an absent one.
SETTINGS = {
    'quarantine_enabled': (is_flag, True),
    'quarantine_new_servers': (is_flag, False),
    'max_age': (is_duration, None),
    'listen': (is_text, '127.0.0.1:8080'),
    'allow_hosts': (is_texts, []),
    'sync_interval': (is_duration, '5m'),
    'activity_retention': (is_duration, '90d'),
    'lockfile': (is_text, 'preflight.lock'),
    'approvals': (one_of('state', 'lockfile'), 'state'),
}
# The keys of a server entry that are ours: an overlay may carry these.
OUR_KEYS = {
    'enabled': is_flag, 'disabled': is_flag, 'quarantined': is_flag,
    'trust_mode': one_of('manual', 'auto', 'scan'),
    'enabled_tools': is_texts, 'disabled_tools': is_texts,
    'start_timeout': is_duration, 'request_timeout': is_duration,
    'max_age': is_duration, 'client': one_of('claude-code'),
    'health': is_table, 'ignore_changes': is_table,
    'env': is_table, 'headers': is_table,
}


def _preset(version, validates, variable, url, **more):
    """Make a row of PRESETS; what it does not say costs money or quota.

    version: of the server that this was measured with.
    """
    return dict({'version': version, 'validates_credential': validates,
                 'token_env': variable, 'url': url, 'auth': 'bearer',
                 'method': 'POST', 'costs': True}, **more)


def _one_token(model):
    return {'model': model, 'max_tokens': 1,
            'messages': [{'role': 'user', 'content': 'x'}]}


# Probes of well-known servers, as checked in November 2026. None of them
# rejected a made-up key at its start, whatever its documentation says;
# "presence" is a look at whether the variable is empty. notes: what a status
# means there.
PRESETS = {
    'exa': _preset('3.1.8', 'none', 'EXA_API_KEY',
                   'https://api.exa.ai/search', auth='header:x-api-key',
                   body={'query': 'x', 'numResults': 1}),
    'tavily': _preset('0.2.17', 'none', 'TAVILY_API_KEY',
                      'https://api.tavily.com/search',
                      body={'query': 'x', 'max_results': 1}),
    'perplexity': _preset('0.8.4', 'presence', 'PERPLEXITY_API_KEY',
                          'https://api.perplexity.ai/chat/completions',
                          body=_one_token('sonar')),
    'morph': _preset('0.8.177', 'presence', 'MORPH_API_KEY',
                     'https://api.morphllm.com/v1/chat/completions',
                     body=_one_token('morph-v3-fast'), tools=['edit_file']),
    'semgrep': _preset('1.185.0', 'none', 'SEMGREP_APP_TOKEN',
                       'https://semgrep.dev/api/v1/me', method='GET',
                       costs=False, notes={404: 'the token is one for CI '
                                                'scans only'}),
}
# The keys of `health`; "tool" is a list of one.
HEALTH_KEYS = {
    'preset': one_of(*PRESETS), 'url': is_http_url,
    'method': one_of('GET', 'HEAD', 'POST'), 'body': is_body,
    'token_env': is_credential_name, 'auth': is_auth,
    'validates_credential': one_of('none', 'presence', 'remote'),
    'tools': is_texts, 'tool': is_text, 'setup': is_text,
    'status_page': is_http_url,
}
# -- dialects: how each client means an entry ---------------------------------

# What says how a server is started: never in an overlay.
LAUNCH_KEYS = {'command': is_text, 'args': is_list, 'cwd': is_text,
               'url': is_text, 'type': is_text}
# Keys of known clients: never a reason to warn.
CLIENT_KEYS = frozenset(
    'alwaysAllow alwaysLoad auth authProviderType autoApprove callTimeout '
    'bearer_token_env_var default_tools_approval_mode deferTools description '
    'dev disabledTools enabled_tools endpoint environment envFile '
    'env_http_headers env_vars excludeTools experimental_environment gallery '
    'headersHelper httpUrl http_headers includeTools init_timeout isolation '
    'metadata name note oauth oauthClient oauthClientId oauthClientSecret '
    'oauthScopes oauth_resource protocol reconnect_on_use remote '
    'remoteConfigured request_timeout_ms required sandbox sandboxEnabled '
    'scopes serverUrl settings skip_quarantine source startup_timeout_ms '
    'startup_timeout_sec supports_parallel_tool_calls targetAudience '
    'targetServiceAccount tcp timeout tool_timeout_sec tools transport '
    'transportType trust version watchPaths working_dir '
    'workingDirectory'.split())
URL_KEYS = ('httpUrl', 'url', 'serverUrl', 'endpoint')
TRANSPORTS = {'stdio': 'stdio', 'local': 'stdio', 'http': 'http',
              'streamable-http': 'http', 'streamable_http': 'http',
              'streamableHttp': 'http', 'StreamableHTTP': 'http',
              'sse': 'sse', 'remote': 'auto'}

# What is said of an entry, by the code that `config show` has for it.
NOTES = {
    'variable_not_expanded': 'has a variable that its client leaves as text',
    'client_would_reject': 'would be refused by its client',
    'mixed_transport': 'has a command and a url, or two; the first counts',
    'env_key_ignored': 'env is ignored; its client reads environment',
    'value_coerced': 'args that are no text are read as text',
    'timeout_ignored': 'timeout is ignored',
    'timeout_clamped': 'timeout is cut to what its client takes',
    'timeout_guessed': 'timeout has no unit: from 1000 on milliseconds',
    'quarantined': 'is quarantined by its file',
    'duplicate_name': 'is listed twice; the last one counts',
}

Dialect = namedtuple('Dialect', 'client table bare http types leniency env '
                                'waits allow deny own refs unset')
Dialect.__doc__ = """How one client reads its files.

client: whose files merge. table: path of the server table. bare: transport
of a url without a type, or refused; http: what type http means. types: the
words its owner takes, '' for any. leniency: 1 comments, 2 trailing commas.
env: the key of the variables. waits: (key, milliseconds of its unit, 0 for
durations, None to guess; 's'tart, 'r'equest). allow, deny: keys of tool
lists. own: keys of ours that are its owner's too. refs: the references that
it expands: N ${NAME}, :- a default, $ $NAME, env: ${env:NAME}, names by
themselves; keep: an empty value beats a default; %: %NAME% in env, on
Windows. unset: a variable without
a value stays text, is empty, or half: empty in env and headers.
"""

ANY = Dialect('', 'mcpServers', 'auto', 'http', '', 0, 'env', (), (), (), (),
              '', 'text')
CALL_MS = (('timeout', 1, 'r'),)
OURS = ANY._replace(
    leniency=2, waits=(('timeout', None, 'r'),), allow=('includeTools',),
    deny=('disabledTools', 'excludeTools'), own=tuple(OUR_KEYS),
    refs='N :- env: input: CLAUDE_PROJECT_DIR workspaceFolder')
CLAUDE = ANY._replace(
    client='claude', bare='refused', types='stdio http streamable-http sse',
    waits=(('request_timeout_ms', 1, 'r'),) + CALL_MS,
    refs='N :- CLAUDE_PROJECT_DIR workspaceFolder')
CURSOR = ANY._replace(refs='env: workspaceFolder workspaceFolderBasename '
                           'userHome pathSeparator /')
VSCODE = CURSOR._replace(
    client='vscode', table='servers', http='auto', leniency=2, unset='empty',
    refs=CURSOR.refs + ' cwd workspaceFolder: input: config: command:')
WINDSURF = ANY._replace(deny=('disabledTools',), refs='env: file:')
OPENCODE = ANY._replace(
    client='opencode', table='mcp', leniency=2, env='environment',
    waits=(('timeout', 1, 's'),), refs='{env: {file:', unset='empty')
KIRO = ANY._replace(waits=CALL_MS, deny=('disabledTools',), refs='N')
DIALECTS = {
    'preflight': OURS, 'generic': OURS, 'claude-code': CLAUDE,
    'claude-code-user': CLAUDE, 'claude-plugin': CLAUDE._replace(
        refs=CLAUDE.refs + ' CLAUDE_PLUGIN_ROOT user_config.'),
    'claude-desktop': ANY._replace(bare='refused', types='stdio'),
    'cursor': CURSOR, 'vscode': VSCODE,
    'vscode-settings': VSCODE._replace(table='mcp.servers'),
    'windsurf': WINDSURF, 'devin': WINDSURF,
    'cline': ANY._replace(
        bare='sse', types='stdio sse streamableHttp', refs='env:',
        waits=(('timeout', 1000, 'sr'),)),
    'roo': ANY._replace(
        bare='refused', types='stdio sse streamable-http',
        waits=(('timeout', 1000, 'r'),), deny=('disabledTools',),
        refs='env: workspaceFolder'),
    'codex': ANY._replace(
        table='mcp_servers', bare='http', allow=('enabled_tools',),
        deny=('disabled_tools',), own=('enabled_tools', 'disabled_tools'),
        waits=(('startup_timeout_sec', 1000, 's'),
               ('startup_timeout_ms', 1, 's'),
               ('tool_timeout_sec', 1000, 'r'))),
    'gemini': ANY._replace(
        leniency=1, waits=(('timeout', 1, 'sr'),), allow=('includeTools',),
        deny=('excludeTools',), refs='N :- $ keep %', unset='half'),
    'copilot': ANY._replace(bare='http', waits=CALL_MS, allow=('tools',),
                            refs='N :- $'),
    'zed': ANY._replace(table='context_servers', bare='http', leniency=2,
                        waits=(('timeout', 1000, 'r'),)),
    'opencode-v1': OPENCODE, 'opencode-v2': OPENCODE._replace(
        table='mcp.servers', waits=(('startup', 1, 's'), ('request', 1, 'r'),
                                    ('timeout', 1, 'sr'))),
    'kiro': KIRO, 'amazon-q': KIRO._replace(refs='env:'),
    'lmstudio': ANY._replace(waits=CALL_MS),
    'jetbrains': OURS._replace(leniency=0, own=()),
    'mcpproxy': ANY._replace(
        bare='http', refs='env: keyring:', waits=(
            ('init_timeout', 0, 's'), ('call_tool_timeout', 0, 'r')),
        own=('enabled_tools', 'disabled_tools', 'quarantined',
             'trust_mode')),
    'registry': ANY,
}
OUR_DIALECTS = ('preflight', 'generic')

# -- where clients keep theirs, and whose a file is ---------------------------

# Where clients keep their files: whose, then paths, each behind the systems
# (l Linux, m macOS, w Windows) that have it if not all do. ~ is home, {X:y}
# a variable or y, * varies; without a root it is in a project. What stands
# behind // (else behind the root) tells a file by its path.
PLACES = '''
claude-code .mcp.json; .github/mcp.json; l /etc/claude-code//managed-mcp.json;
 m /Library/Application Support/ClaudeCode//managed-mcp.json;
 w C:/Program Files/ClaudeCode//managed-mcp.json
claude-code-user {CLAUDE_CONFIG_DIR:~}//.claude.json
claude-plugin .claude-plugin/plugin.json; .plugin/plugin.json
claude-desktop l ~/.config/Claude//claude_desktop_config.json;
 l ~/.config/claude//claude_desktop_config.json;
 w {LOCALAPPDATA:~/AppData/Local}/Packages/Claude_*/LocalCache/Roaming/Claude\
//claude_desktop_config.json; mw {DATA}/Claude//claude_desktop_config.json
cursor .cursor/mcp.json; ~//.cursor/mcp.json
vscode .vscode/mcp.json; {DATA}//*Cod*/User/mcp.json;
 {DATA}//*Cod*/User/profiles/*/mcp.json
vscode-settings .vscode/settings.json; {DATA}//*Cod*/User/settings.json;
 .devcontainer/devcontainer.json; .devcontainer.json
windsurf ~/.codeium//windsurf/mcp_config.json; ~//.codeium/mcp_config.json
devin .devin/mcp_config.json; lm ~/.config//devin/mcp_config.json;
 w {DATA}//devin/mcp_config.json; .devin/config.json
cline {CLINE_MCP_SETTINGS_PATH}; {CLINE_DATA_DIR}/settings//\
cline_mcp_settings.json; {CLINE_DIR:~/.cline}/data/settings//\
cline_mcp_settings.json; {DATA}/*/User/globalStorage/saoudrizwan.claude-dev/\
settings//cline_mcp_settings.json
roo .roo/mcp.json; .kilocode/mcp.json; {DATA}/*/User/globalStorage/\
/rooveterinaryinc.roo-cline/settings/mcp_settings.json
codex .codex/config.toml; {CODEX_HOME:~/.codex}//config.toml;
 lm //etc/codex/config.toml
gemini .gemini/settings.json; {GEMINI_CLI_HOME:~}//.gemini/settings.json;
 gemini-extension.json; {GEMINI_CLI_SYSTEM_SETTINGS_PATH};
 l /etc//gemini-cli/settings.json; l /etc//gemini-cli/system-defaults.json;
 m /Library/Application Support//GeminiCli/settings.json;
 w C:/ProgramData//gemini-cli/settings.json
copilot {COPILOT_HOME:~/.copilot}//mcp-config.json
zed .zed/settings.json; l {XDG_CONFIG_HOME:~/.config}//zed/settings.json;
 m ~/.config//zed/settings.json; w {DATA}//Zed/settings.json
opencode-v1 opencode.json; opencode.jsonc; .opencode/opencode.json;
 .opencode/opencode.jsonc; ~/.config/opencode//opencode.json;
 ~/.config/opencode//opencode.jsonc; ~/.config//opencode/config.json;
 w {LOCALAPPDATA:~/AppData/Local}//opencode/opencode.json; {OPENCODE_CONFIG};
 {OPENCODE_CONFIG_DIR}//opencode.json; {OPENCODE_CONFIG_DIR}//opencode.jsonc;
 codearts_cli.json
kiro .kiro/settings/mcp.json; ~//.kiro/settings/mcp.json; .kiro/agents/*.json;
 ~//.kiro/agents/*.json
amazon-q .amazonq/mcp.json; .amazonq/cli-agents/*.json;
 ~/.aws//amazonq/mcp.json; ~/.aws//amazonq/cli-agents/*.json
lmstudio ~//.lmstudio/mcp.json; ~/.cache//lm-studio/mcp.json
jetbrains .junie/mcp/mcp.json; ~//.junie/mcp/mcp.json; .air/mcp.json
generic .continue/mcpServers/*.json
mcpproxy ~//.mcpproxy/mcp_config.json
'''


def _places(text):
    """Give (dialect, its places) a row."""
    for line in text.replace('\n ', ' ').split('\n')[1:-1]:
        dialect, _, places = line.partition(' ')
        yield dialect, places.split('; ')


def client_places(system, environ):
    """List where clients keep their files: (dialect, path or pattern).

    system: l, m or w. A path without a root is one of a project.
    """
    home = environ.get('HOME') or environ.get('USERPROFILE') or '~'
    given = dict(environ, DATA={
        'l': '~/.config', 'm': '~/Library/Application Support',
        'w': environ.get('APPDATA') or '~/AppData/Roaming'}[system])

    def put(found):
        return given.get(found.group(1)) or found.group(2) or '\0'
    for dialect, places in _places(PLACES):
        for place in places:
            systems, path = re.match('(?:([lmw]+) )?(.*)', place).groups()
            path = re.sub(r'\{(\w+)(?::([^}]*))?\}', put, path)
            if system in (systems or system) and '\0' not in path:
                yield dialect, re.sub('^~', lambda _: home, path).replace(
                    '//', '/')


# What is a client's wherever it lies in the client's directory.
TREES = (('kiro', r'/\.kiro/(?:.*/)?mcp\.json\Z'),
         ('amazon-q', r'/\.?amazonq/.*\.json\Z'),
         ('jetbrains', r'/\.junie/.*\.json\Z'),
         ('roo', r'roo-cline/(?:.*/)?mcp_settings\.json\Z'))


def dialect_of(*paths):
    """Tell whose file it is by its paths, '' when they do not tell."""
    paths, text = ['/' + path.replace('\\', '/') for path in paths], PLACES
    if os.name == 'nt':
        paths, text = [path.lower() for path in paths], text.lower()
    lasts = tuple(path.rpartition('/')[2] for path in paths) + ('*.json',)
    for dialect, places in _places(text):
        for place in places:
            if place.endswith(lasts):
                parts = ('/' + place.split('//')[-1]).split('*')
                if any(path.endswith(parts[-1]) and all(
                        part in path for part in parts) for path in paths):
                    return dialect
    for dialect, pattern in TREES:
        if any(re.search(pattern, path) for path in paths):
            return dialect
    return 'codex' if paths[0].endswith('.toml') else ''


# What in an entry tells whose it is; the most votes count.
SIGNS = (
    ('gemini', lambda raw: {'httpUrl', 'includeTools', 'excludeTools'}
     & set(raw)),
    ('windsurf', lambda raw: 'serverUrl' in raw),
    ('copilot', lambda raw: raw.get('type') == 'local' and 'tools' in raw),
    ('cline', lambda raw: 'transportType' in raw or raw.get('type')
     == 'streamableHttp' or is_table(raw.get('transport'))),
    ('roo', lambda raw: {'alwaysAllow', 'disabledTools'} <= set(raw)))


def _by_votes(table, text):
    """Tell whose file has a map "mcpServers" by what stands in it."""
    votes = [dialect for dialect, is_so in (
        ('gemini', is_table(table.get('mcp')) and {
            'allowed', 'excluded'} & set(table['mcp'])),
        ('claude-desktop', 'globalShortcut' in table),
        ('claude-plugin', '${CLAUDE_PLUGIN_ROOT}' in text),
        ('amazon-q', 'useLegacyMcpJson' in table or re.match(
            r".*'@[^']*/", str(table.get('allowedTools'))))) if is_so]
    for raw in filter(is_table, table['mcpServers'].values()):
        votes += [dialect for dialect, is_so in SIGNS if is_so(raw)]
    ranks = sorted((votes.count(dialect), dialect) for dialect in set(votes))
    if not ranks or len(ranks) > 1 and ranks[-1][0] == ranks[-2][0]:
        return 'generic'
    return ranks[-1][1]


def _by_mcp(mcp):
    """Tell whose file has a table "mcp"; '' when it has no entries."""
    inner = mcp.get('servers')
    is_inner = is_table(inner) and not is_text(inner.get('type'))
    entries = list(filter(is_table, (inner if is_inner else mcp).values()))
    kinds = {raw['type'] for raw in entries if is_text(raw.get('type'))}
    if kinds & {'local', 'remote'} or not kinds and not is_inner:
        return ('opencode-v2' if is_inner else
                'opencode-v1' if entries else '')
    return 'vscode-settings' if is_inner else 'generic'     # Crush


def _is_entry(raw):
    return is_table(raw) and any(raw.get(key) is not None for key in
                                 ('command',) + URL_KEYS)


def _by_content(table, text):
    """Tell whose file a table is by what stands in it."""
    servers, projects = table.get('mcpServers'), table.get('projects')
    is_ours = not {'profiles', *SETTINGS}.isdisjoint(table)
    for dialect, is_so in (
            ('preflight', is_table(servers) and is_ours),
            ('zed', is_table(table.get('context_servers'))),
            ('registry', is_list(table.get('packages'))
             or is_list(table.get('remotes'))
             or is_table(table.get('server'))
             and 'packages' in table['server']),
            ('mcpproxy', is_list(servers)),
            (_by_mcp(table['mcp']) if is_table(table.get('mcp')) else '',
             servers is None),
            ('claude-code-user', is_table(projects) and any(
                is_table(state) and 'mcpServers' in state
                for state in projects.values())),
            ('vscode', not is_table(servers) and (
                is_table(table.get('servers'))
                or is_list(table.get('inputs'))))):
        if dialect and is_so:
            return dialect
    if is_table(servers):
        return _by_votes(table, text)
    if '${CLAUDE_PLUGIN_' in text and all(map(_is_entry, table.values())):
        return 'claude-plugin'
    return 'preflight' if is_ours else 'generic'


File = namedtuple('File', 'path file dialect table doubles codes '
                          'is_container')
File.__doc__ = """A config file, parsed. doubles: keys that stand twice.
codes: what `config show` says of the file. is_container: it is that of a
dev container, of which the table is what stands for VS Code."""


def parse_config(path, file, data, wanted=''):
    """Parse one config file and tell its dialect: by flag, path, content.

    path: as named; file: its real path, for a link of another name must not
    hide a client's file. Raises ConfigError for what cannot be read.
    """
    if re.search(r'(?i)\.ya?ml$', path):
        raise ConfigError('config %s: YAML client config is not supported'
                          % path, 'Export or write a JSON file.')
    text = _decode_bytes(data, path)
    dialect = wanted or dialect_of(path, file)
    doubles, leniency, table = [], 0, None
    if dialect == 'codex' or not dialect and text.lstrip()[:1] not in '{/':
        try:
            table = Toml(text).document()
        except ValueError as exc:
            if dialect or 'mcp_servers' in text:
                raise _misread(path, exc, text) from exc
        if table and 'mcp_servers' in table:
            dialect = 'codex'
    if dialect != 'codex':
        table, doubles, leniency = decode_config(text, path)
        if not dialect:
            dialect = _by_content(table, text)
        elif not wanted and dialect == 'claude-code' and (
                'mcpServers' not in table):
            is_map = any(map(_is_entry, table.values()))
            dialect = 'claude-plugin' if is_map else dialect
        elif not wanted and dialect == 'opencode-v1':
            found = is_table(table.get('mcp')) and _by_mcp(table['mcp'])
            dialect = found if found == 'opencode-v2' else dialect
    is_container = dialect == 'vscode-settings' and is_table(
        table.get('customizations'))
    if is_container:
        table = table['customizations'].get('vscode')
        table = table if is_table(table) else {}
    is_lenient = leniency > (0 if dialect == 'generic'
                             else DIALECTS[dialect].leniency)
    return File(path, file, dialect, table, doubles, [code for code, is_so in (
        ('bom', data[:2] in (b'\xff\xfe', b'\xfe\xff', b'\xef\xbb')),
        ('lenient_syntax', is_lenient), ('duplicate_key', doubles)) if is_so],
        is_container)


# -- an entry -> Server -------------------------------------------------------

class BadEntry(Exception):
    """An entry that is skipped; the text says why, code in one word."""

    def __init__(self, text, code='bad_value'):
        super().__init__(text)
        self.code = code


def _note(code, more=''):
    return NOTES[code] + (': ' + more if more else '')


def _check(raw, keys, where=''):
    for key, claim in keys.items():
        value = raw.get(key)
        if value is not None and claim and not claim(value):
            raise BadEntry('%s%s must be %s' % (where, key,
                                                _expected(claim)))


def _as_text(value, key):
    if is_text(value):
        return value
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, (int, float)):
        return str(value)
    raise BadEntry('%s must be text' % key)


def _as_texts(table, field, can_remove=False):
    out = {}
    for key, value in (table or {}).items():
        if value is None and can_remove:
            out[key] = None
        elif value is not None:
            out[key] = _as_text(value, '%s.%s' % (field, key))
    return out


def _first(raw, *keys):
    return next((raw[key] for key in keys if raw.get(key) not in (None, '')),
                None)


def _flatten(raw, dialect, notes):
    """Bring the spellings of all clients to those of LAUNCH_KEYS."""
    row, flat, command = DIALECTS[dialect], dict(raw), raw.get('command')
    if is_table(raw.get('transport')):              # as Cline's CLI writes
        flat.update(raw['transport'], transport=None)
    if is_table(command) and dialect == 'zed':      # until 2025
        flat.update(command=command.get('path'), args=command.get('args'),
                    env=command.get('env'))
        notes.append(_note('client_would_reject', 'command is an object'))
    elif is_texts(command) and command:
        flat.update(command=command[0], args=command[1:] + (
            flat['args'] if is_list(flat.get('args')) else []))
        if row.client != 'opencode' and dialect not in OUR_DIALECTS:
            notes.append(_note('client_would_reject', 'command is an array'))
    urls = [flat[key] for key in URL_KEYS if flat.get(key)]
    if len(urls) + bool(flat.get('command')) > 1:
        notes.append(_note('mixed_transport'))
        if dialect in ('codex', 'roo') and flat.get('command'):
            notes.append(_note('client_would_reject'))
    if row.env != 'env' and flat.get('env') is not None:
        notes.append(_note('env_key_ignored'))
    kind = _first(flat, 'type', 'transport', 'transportType', 'protocol')
    if dialect == 'codex' or dialect == 'mcpproxy' and kind == 'auto':
        kind = None
    flat.update(
        type=kind, url=urls[0] if urls else None, env=flat.get(row.env),
        cwd=_first(flat, 'cwd', 'working_dir', 'workingDirectory'),
        headers=_first(flat, 'headers', 'http_headers'))
    return flat


def _close_matches(*args):
    import difflib
    return difflib.get_close_matches(*args)


def _meant(raw):
    """Name the key of an entry that was meant for its command or url."""
    for key in raw:
        near = [] if key in LAUNCH_KEYS or key in OUR_KEYS or (
            key in CLIENT_KEYS) else _close_matches(
                key.lower(), ('command', 'url'), 1)
        if near:
            return '; it has %s: did you mean %s?' % (json.dumps(key),
                                                      near[0])
    return ''


def _lack(raw):
    return 'it has no command and no url' + _meant(raw)


def _transport(raw, flat, dialect, notes):
    """Tell the transport of an entry by its type, command and url."""
    kind, url, row = flat['type'], flat['url'] or '', DIALECTS[dialect]
    if kind in ('sdk', 'sse-ide', 'ws-ide', 'builtin'):
        raise BadEntry('type %s is inside its client' % json.dumps(kind),
                       'client_internal')
    if kind is not None and kind not in TRANSPORTS or re.match(
            '(?i)(?:wss?|unix|pipe):', url):
        raise BadEntry('unknown type %s' % json.dumps(
            kind or url.split(':')[0]), 'unsupported_transport')
    if row.types and raw.get('type') and kind not in row.types.split():
        notes.append(_note('client_would_reject', 'type ' + json.dumps(kind)))
    if flat.get('command'):
        return 'stdio'
    found = TRANSPORTS.get(kind, 'http' if flat.get('httpUrl') else row.bare)
    if url and found == 'refused':
        notes.append(_note('client_would_reject', 'a url without a type'))
        return 'auto'
    if url and found != 'stdio':
        return row.http if found == 'http' else found
    if dialect == 'zed' and (flat.get('source') == 'extension'
                             or 'settings' in flat):
        raise BadEntry('it belongs to an extension', 'extension_managed')
    if kind is None:
        raise BadEntry(
            _lack(raw), 'override_only' if raw and
            set(raw) <= {'enabled', 'disabled'} else 'no_transport')
    raise BadEntry('type %s needs a %s%s' % (
        kind, 'command' if TRANSPORTS[kind] == 'stdio' else 'url',
        _meant(raw)), 'no_transport')


def _duration(raw, key):
    return parse_duration(raw[key]) if raw.get(key) is not None else None


def _milliseconds(value, unit):
    """Read a time-out of a client's file, None for one that is ignored."""
    if unit == 0:
        return parse_duration(value) if is_duration(value) else None
    if is_flag(value) or not isinstance(value, (int, float)):
        return None
    ms = value * (unit or (1 if value >= 1000 else 1000))
    return int(ms) if 0 < ms <= MAX_DURATION_MS else None


def _waits(entry, notes):
    """Read the time-outs of an entry: 's' and 'r' -> milliseconds."""
    raw, out, dialect = entry.raw, {}, entry.dialect
    top = {'opencode-v2': entry.top.get('mcp'), 'mcpproxy': entry.top}.get(
        dialect) or {}
    if is_table(raw.get('timeout', top.get('timeout'))):
        raw = raw.get('timeout', top.get('timeout'))
    for key, unit, ends in DIALECTS[dialect].waits:
        value = raw.get(key, top.get(key))
        if value is None or is_table(value) or set(ends) <= set(out):
            continue
        ms, low = _milliseconds(value, unit), 1
        if unit is None and ms:
            notes.append(_note('timeout_guessed'))
        if dialect == 'cline' and ms and not 1000 <= ms <= 3600000:
            notes.append(_note('timeout_clamped'))
            ms = min(max(ms, 1000), 3600000)
        if dialect == 'roo' or DIALECTS[dialect].client == 'claude':
            low = 1000
        if not ms or ms < low or dialect == 'roo' and ms > 3600000:
            notes.append(_note('timeout_ignored', '%s is %s' % (
                key, json.dumps(value)[:40])))
            continue
        for end in ends:
            out.setdefault(end, ms)
    return out


def _list_of(raw, keys):
    """Read a client's list of tool names, None if there is none."""
    names = None
    for key in keys:
        _check(raw, {key: is_texts})
        if raw.get(key) is not None:
            names = (names or []) + [
                name.split('(')[0] if key == 'includeTools' else name
                for name in raw[key]]
    return None if keys == ('tools',) and names and '*' in names else names


def _is_on(raw):
    if raw.get('disabled') is True:
        return False
    return raw.get('enabled') is not False


def _extra(entry):
    """Collect what only some clients know, for when it is contacted."""
    raw, dialect, extra = entry.raw, entry.dialect, {}
    if dialect == 'codex':
        _check(raw, {'env_vars': is_list, 'env_http_headers': is_table,
                     'bearer_token_env_var': is_text})
        extra = {'env_vars': [name for name in (
            one.get('name') if is_table(one) else one
            for one in raw.get('env_vars') or ()) if is_text(name)],
            'env_headers': _as_texts(raw.get('env_http_headers'),
                                     'env_http_headers'),
            'bearer': raw.get('bearer_token_env_var'),
            'required': raw.get('required') is True}
    elif dialect in ('cursor', 'vscode', 'vscode-settings'):
        _check(raw, {'envFile': is_text})
        top = entry.top['mcp'] if dialect == 'vscode-settings' else entry.top
        asked = top.get('inputs') if is_list(top.get('inputs')) else []
        extra = {'env_file': raw.get('envFile') if raw.get('url') is None
                 else None, 'inputs': {      # of a child alone
            'input:%s' % one.get('id'): one['default'] for one in asked
            if is_table(one) and is_text(one.get('default'))}}
    elif dialect == 'registry':
        extra = raw['extra']
        _check(extra, {'env_vars': is_texts})
    return {key: value for key, value in extra.items() if value}


def _lists_at(raw, file, allow, deny):
    """Tell which key of which file sets a server's lists of tools."""
    found = (('allow', allow), ('deny', deny))
    return {kind: (key, file) for kind, keys in found for key in keys[::-1]
            if raw.get(key) is not None}


def _patterns(name, entry):
    """Read the patterns by which a client chooses tools of a server.

    OpenCode's are gathered in _gather_hidden. In agents' files of Kiro and
    Amazon Q "tools" names @server or @server/tool; allowedTools is for
    approvals only.
    """
    tools, path = entry.top.get('tools'), entry.file.replace('\\', '/')
    if DIALECTS[entry.dialect].client == 'opencode':
        return {'hidden': tools} if tools else {}
    if entry.dialect not in ('kiro', 'amazon-q') or not is_texts(tools) or (
            not re.search('/(?:cli-)?agents/', path)):
        return {}
    parts = [word.partition('/') for word in tools]
    shown = [tool if slash else '*' for server, slash, tool in parts
             if server == '*' or glob_matches(server, '@' + name)]
    return {'shown': shown, 'allow': ('tools', entry.file)}


def _deaf_container(command, args):
    """Warn of a `docker run` without -i, as a list of sentences.

    A reference where its options end may yet become one.
    """
    run = container_of([command] + args)
    if run is None or is_interactive(run) or run.image[:1] in ('$', '{'):
        return []
    return ['its `%s run` lacks -i: nothing that is sent reaches the server, '
            'so no look at it can succeed' % run.engine]


def _base_server(name, entry):
    """Read what every dialect has, by its owner's rules."""
    raw, row, notes = entry.raw, DIALECTS[entry.dialect], list(entry.notes)
    flat = _flatten(raw, entry.dialect, notes)
    _check(flat, LAUNCH_KEYS)
    _check(flat, {'env': is_table, 'headers': is_table,
                  'enabled': is_flag, 'disabled': is_flag})
    transport = _transport(raw, flat, entry.dialect, notes)
    is_child, args = transport == 'stdio', flat.get('args') or []
    if is_child and not is_texts(args):
        notes.append(_note('value_coerced'))
    if is_child:
        notes += _deaf_container(flat['command'], list(map(str, args)))
    extra, waits = _extra(entry), _waits(entry, notes)
    extra.update(_lists_at(raw, entry.file, row.allow, row.deny),
                 **_patterns(name, entry))
    if waits:
        extra['waits'] = waits
    if entry.off or entry.flagged:
        extra['enabled_at'] = entry.off or entry.flagged
    return Server(
        name=name, file=entry.file, dialect=entry.dialect, base=entry.base,
        transport=transport, command=flat['command'] if is_child else None,
        args=tuple(_as_text(word, 'args[%d]' % n)
                   for n, word in enumerate(args)) if is_child else (),
        env=_as_texts(flat['env'], 'env', True), cwd=flat['cwd'],
        url=None if is_child else flat['url'],
        headers=_as_texts(flat['headers'], 'headers'),
        enabled=_is_on(raw) and not entry.off and not (
            entry.dialect == 'mcpproxy' and raw.get('enabled') is None),
        quarantined=False, trust_mode='manual',
        allow=_list_of(raw, row.allow), deny=_list_of(raw, row.deny) or [],
        start_timeout=waits.get('s', START_TIMEOUT_MS),
        request_timeout=waits.get('r', REQUEST_TIMEOUT_MS), max_age=None,
        client=None, health={}, ignore_changes={}, overlaid=frozenset(),
        warnings=notes, extra=extra)


def _ignored(raw):
    """Read ignore_changes: (it, what to warn of); raises BadEntry."""
    table, notes = raw.get('ignore_changes') or {}, []
    for tool, fields in table.items():
        if not is_texts(fields):
            raise BadEntry('ignore_changes.%s must be an array of strings'
                           % tool)
        for field in fields:
            if field not in IGNORABLE:
                raise BadEntry('ignore_changes.%s names %s; it takes %s' % (
                    tool, json.dumps(field), ', '.join(IGNORABLE)))
        if '*' in tool and tool != '*':
            notes.append('ignore_changes.%s is no pattern: it is for a tool '
                         'of just that name; "*" is for all' % tool)
    return table, notes


def _unknown_keys(raw, known, where=''):
    """Warn of keys that nobody knows, with the nearest that is known.

    where: the table of ours that they stand in, '' for a server's own.
    """
    notes = []
    for key in raw:
        if key in known or not where and key in CLIENT_KEYS:
            continue
        near = _close_matches(key, sorted(known), 1)
        notes.append('unknown key %s%s%s' % (
            json.dumps(key), where and ' in ' + where,
            ' (did you mean %s?)' % near[0] if near else ''))
    return notes


def _health(raw):
    """Read the `health` of an entry; raises BadEntry."""
    table = dict(raw.get('health') or ())
    if '${' in str(table.get('url')):
        raise BadEntry('health.url is not expanded; write the address '
                       'itself, without ${...}')
    _check(table, HEALTH_KEYS, 'health.')
    one = table.pop('tool', None)
    if one is not None:
        if table.get('tools') is not None:
            raise BadEntry('health.tool and health.tools are both given')
        table['tools'] = [one]
    return table


def _with_ours(server, raw, file):
    """Lay our own keys over a server: maps key by key, the rest whole."""
    _check(raw, OUR_KEYS)
    env = _as_texts(raw.get('env'), 'env', True)
    headers = _as_texts(raw.get('headers'), 'headers')

    def pick(key, value, current):
        return current if raw.get(key) is None else value
    flags = [key for key in ('enabled', 'disabled')
             if raw.get(key) is not None]
    places = {key + '_at': file for key, is_given in (
        ('enabled', flags), ('quarantined', raw.get('quarantined')
                             is not None)) if is_given}
    gone = [kind for kind, key in (('shown', 'enabled_tools'),
                                   ('hidden', 'disabled_tools'))
            if raw.get(key) is not None]
    allow = pick('enabled_tools', raw.get('enabled_tools') or None,
                 server.allow)
    deny = pick('disabled_tools', raw.get('disabled_tools'), server.deny)
    if allow and deny and (raw.get('enabled_tools')
                           or raw.get('disabled_tools')):
        raise BadEntry('enabled_tools and disabled_tools are both given')
    health = _health(raw)
    ignored, notes = _ignored(raw)
    return server._replace(
        env=dict(server.env, **env), headers=dict(server.headers, **headers),
        enabled=_is_on(raw) if flags else server.enabled,
        quarantined=pick('quarantined', raw.get('quarantined'),
                         server.quarantined),
        trust_mode=pick('trust_mode', 'auto' if raw.get('trust_mode')
                        == 'auto' else 'manual', server.trust_mode),
        allow=allow, deny=deny,
        start_timeout=pick('start_timeout', _duration(raw, 'start_timeout'),
                           server.start_timeout),
        request_timeout=pick('request_timeout',
                             _duration(raw, 'request_timeout'),
                             server.request_timeout),
        max_age=pick('max_age', _duration(raw, 'max_age'), server.max_age),
        client=pick('client', raw.get('client'), server.client),
        health=dict(server.health, **health),
        warnings=server.warnings + _unknown_keys(health, HEALTH_KEYS,
                                                 'health') + notes,
        ignore_changes=dict(server.ignore_changes, **ignored),
        extra=dict({key: value for key, value in server.extra.items()
                    if key not in gone}, **_lists_at(
            raw, file, ('enabled_tools',), ('disabled_tools',)), **places))


def texts_of(server):
    """Give every text of a server that may hold references, by place."""
    texts = [('command', server.command)]
    texts += [('args[%d]' % n, v) for n, v in enumerate(server.args)]
    texts += [('env.' + k, v) for k, v in server.env.items()]
    texts += [('cwd', server.cwd), ('url', server.url)]
    texts += [('headers.' + k, v) for k, v in server.headers.items()]
    return {place: text for place, text in texts if text}


MCPPROXY_OFF = 'lacks "enabled", and so is off in a file of mcpproxy'


def read_entry(name, entry):
    """Read an entry by its owner's rules into a Server; raises BadEntry.

    Our keys in a client's file, but enabled and disabled, are ignored with
    a warning: a pull request must not switch the guard off (contract 12).
    """
    raw, dialect = entry.raw, entry.dialect
    if not is_table(raw):
        raise BadEntry('it is not an object', 'not_an_object')
    if not is_text(name):
        raise BadEntry('it has no name', 'no_name')
    server, own = _base_server(name, entry), DIALECTS[dialect].own
    if dialect in ('preflight', 'mcpproxy'):
        server = _with_ours(server, {key: raw[key] for key in own
                                     if key in raw}, entry.file)
    notes = list(server.warnings)
    ours = sorted(set(OUR_KEYS) & set(raw) - set(own)
                  - {'env', 'headers', 'enabled', 'disabled'})
    if ours:
        notes.append('%s ignored in a client\'s file; put it into a config '
                     'of our own, as an overlay' % ', '.join(ours))
    if dialect == 'mcpproxy':
        notes += [_note('quarantined')] * server.quarantined
        notes += [MCPPROXY_OFF] * (raw.get('enabled') is None)
    if dialect == 'codex' and raw.get('bearer_token') is not None:
        notes.append(_note('client_would_reject', 'bearer_token'))
    if dialect != 'registry':
        notes += _unknown_keys(raw, list(OUR_KEYS) + list(LAUNCH_KEYS))
    return server._replace(warnings=notes)


def _bad_name(name):
    if not name or name != name.strip():
        return 'its name is empty or has blanks at an end'
    if ':' in name:
        return 'its name holds a ":", which ids are split at'
    return '' if is_storable(name) else 'its name ' + unstorable_fact(name)


def _top_level(file, settings, profiles, warnings):
    """Take our top-level keys from one file; the last file wins."""
    table, path = file.table, file.path
    for key, (claim, _) in SETTINGS.items():
        value = table.get(key)
        if value is None:
            continue
        if not claim(value):
            raise ConfigError('config %s: %s must be %s' % (
                path, key, _expected(claim)))
        settings[key] = value
    if table.get('lockfile') == '':
        raise ConfigError('config %s: lockfile is empty' % path)
    name = table.get('lockfile')
    if name is None and table.get('approvals') == 'lockfile':
        name = settings.get('lockfile', SETTINGS['lockfile'][1])
    if name is not None:        # relative to the file that asks for it
        settings['lockfile'] = os.path.join(os.path.dirname(file.file), name)
    found = table.get('profiles')
    if found is not None:
        if not is_table(found):
            raise ConfigError('config %s: profiles must be an object' % path)
        for name, profile in found.items():
            if not (is_table(profile) and is_texts(profile.get('servers'))
                    and set(profile) == {'servers'}):
                raise ConfigError('config %s: profiles.%s must be '
                                  '{"servers": [names]}' % (path, name))
        profiles.clear()
        profiles.update((n, p['servers']) for n, p in found.items())
    if 'mcpServers' in table or file.dialect == 'preflight':
        known = list(SETTINGS) + ['profiles', 'mcpServers']
        warnings += ['%s: %s' % (path, note)
                     for note in _unknown_keys(table, known)]


# -- forms that are not a table of servers ------------------------------------

# kind of package -> what runs it, before it, its form, behind it
REGISTRIES = {
    'npm': ('npx', ['-y'], '%s@%s', []), 'pypi': ('uvx', [], '%s==%s', []),
    'oci': ('docker', ['run', '-i', '--rm'], '%s:%s', []),
    'nuget': ('dnx', [], '%s@%s', ['--yes'])}


def _camel(value):
    """Write keys as the registry does since late 2025."""
    if is_list(value):
        return [_camel(item) for item in value]
    return {re.sub('_([a-z])', lambda found: found.group(1).upper(), key):
            _camel(item) for key, item in value.items()
            } if is_table(value) else value


def _package(package, version):
    """Make the entry that would run one package of a registry's recipe."""
    kind, lacks, env, needed = package['registryType'], [], {}, []

    def words(parts):
        for part in parts or ():
            value = _first(part, 'value', 'default')
            if value is not None:
                if part['type'] == 'named':
                    yield part['name']
                yield value
            elif part.get('isRequired'):
                lacks.append('arg:%s' % _first(part, 'valueHint', 'name'))
    if kind not in REGISTRIES or package.get('transport', {}).get(
            'type', 'stdio') != 'stdio':
        return {'type': kind}
    command, args, form, last = REGISTRIES[kind]
    args = list(words(package.get('runtimeArguments'))) or list(args)
    for variable in package.get('environmentVariables') or ():
        value = _first(variable, 'value', 'default')
        if value is not None:
            env[str(variable['name'])] = value
        elif variable.get('isRequired'):
            needed.append(variable['name'])
        args += ['-e', variable['name']] * (kind == 'oci')
    version = package.get('version') or version
    args.append(form % (package['identifier'], version) if version
                else package['identifier'])
    return {'command': package.get('runtimeHint') or command, 'env': env,
            'args': args + last + list(words(package.get(
                'packageArguments'))),
            'extra': {'lacks': lacks, 'env_vars': needed}}


def _remote(remote):
    """Make the entry that would call one remote of a registry's recipe."""
    lacks, headers, known = [], {}, remote.get('variables') or {}

    def fill(found):
        value = _first(known.get(found.group(1)) or {}, 'value', 'default')
        lacks.extend(['url:' + found.group(1)] * (value is None))
        return found.group() if value is None else str(value)
    url = re.sub(r'\{([^{}]*)\}', fill, remote['url'])
    for header in remote.get('headers') or ():
        value = _first(header, 'value', 'default')
        if value is not None:
            headers[str(header['name'])] = value
        elif header.get('isRequired'):
            lacks.append('header:' + header['name'])
    return {'type': remote['type'], 'url': url, 'headers': headers,
            'extra': {'lacks': lacks}}


def _candidates(table):
    """Give the entries that a registry's server.json could become."""
    table = _camel(table.get('server', table))
    version = table.get('version') or (table.get('versionDetail') or {}).get(
        'version')
    made = [(one['registryType'], _package(one, version))
            for one in table.get('packages') or ()]
    made += [('remote', _remote(one)) for one in table.get('remotes') or ()]
    kinds = [kind for kind, _ in made]
    return [('%s#%s%d' % (table['name'], kind, kinds[:n].count(kind)), raw,
             ()) for n, (kind, raw) in enumerate(made)]


def _plugin_root(path):
    """Name the directory of a plugin by that of its manifest."""
    folder = os.path.dirname(path)
    is_inner = os.path.basename(folder) in ('.claude-plugin', '.plugin')
    return os.path.dirname(folder) if is_inner else folder


def _with_named(file, read, warnings):
    """Read the files that a plugin's manifest names: (File, their paths).

    "mcpServers" may be a path in the plugin, or a list of paths and maps.
    """
    servers, found, paths = file.table.get('mcpServers'), {}, []
    if file.dialect != 'claude-plugin' or not (is_text(servers)
                                               or is_list(servers)):
        return file, ()
    root = _plugin_root(file.file)
    for part in [servers] if is_text(servers) else servers:
        if is_text(part):
            path = os.path.normpath(os.path.join(root, part.replace(
                '${CLAUDE_PLUGIN_ROOT}', root)))
            is_inside = path.startswith(root.rstrip('/\\') + os.sep)
            paths += [path] * is_inside
            text = read(path) if read and is_inside else None
            if text is None:
                warnings.append('%s names %s, which %s; its servers are not '
                                'known' % (file.path, json.dumps(part),
                                           'cannot be read' if is_inside
                                           else 'is outside the plugin'))
                continue
            part = decode_config(text, path)[0]
        part = part.get('mcpServers', part) if is_table(part) else {}
        found.update(part if is_table(part) else {})
    return file._replace(table=dict(file.table, mcpServers=found)), paths


def _misspelt(table, wanted):
    """Name the key of a file that was meant for its table of servers."""
    def plain(name):
        return re.sub('[^a-z]', '', name.lower())
    for key, value in table.items():
        if key not in ('servers', wanted) and (
                is_table(value) or is_list(value)) and _close_matches(
                    plain(key), [plain(wanted)], 1, 0.8):
            return '; there is %s: did you mean %s?' % (json.dumps(key),
                                                        wanted)
    return ''


def _rows_of(file, warnings):
    """Give (name, raw, notes) of each server in a file."""
    table, found, key = file.table, file.table, DIALECTS[file.dialect].table
    if file.dialect == 'registry':
        try:
            return _candidates(table)
        except (AttributeError, KeyError, TypeError) as exc:
            raise ConfigError('config %s is no server.json of a registry'
                              % file.path) from exc
    for word in key.split('.'):
        found = found.get(word) if is_table(found) else None
    if found is None and file.dialect in ('generic', 'claude-plugin'):
        found = table.get('mcp')                    # as Crush has it
        if any(is_text(table.get(key)) for key in ('command',) + URL_KEYS):
            name = os.path.basename(file.path)
            found = {os.path.splitext(name)[0]: table}
        elif any(map(_is_entry, table.values())):
            found = table
    if found is None:
        warnings.append('%s: no server table found; looked for "%s"%s%s' % (
            file.path, key, ''.join(
                '; there is "%s"' % other for other in (
                    'mcpServers', 'servers', 'mcp') if table.get(other)),
            _misspelt(table, key)))
        return []
    if file.dialect == 'mcpproxy' and is_list(found):
        rows = {}
        for n, raw in enumerate(found):
            name = _first(raw, 'name') if is_table(raw) else None
            name = name if is_text(name) else None
            rows[n if name is None else name] = (
                name, raw, (_note('duplicate_name'),) * (name in rows))
        return list(rows.values())
    if not is_table(found):
        raise ConfigError('config %s: %s must be an object' % (file.path,
                                                               key))
    return [(name, raw, ()) for name, raw in found.items()]


# -- files -> Config: bases, layers, overlays ---------------------------------

# Folders that clients keep their files in: the project is above.
CLIENT_FOLDERS = frozenset(
    '.air .amazonq .aws .claude-plugin .cline .codeium .codex .config '
    '.continue .copilot .cursor .devcontainer .devin .gemini .github .junie '
    '.kilocode .kiro .lmstudio .mcpproxy .opencode .plugin .roo .vscode '
    '.zed'.split())


def _root_of(file, home):
    """Tell where a client's file belongs: (its directory, level).

    level: the place in its client's precedence: 0 plugins and defaults, 1
    the user, 2 a project, 3 closer still, 4 what an administrator set.
    """
    path, dialect = file.file.replace('\\', '/'), file.dialect
    parts = path.split('/')[:-1]
    at = max([n for n, part in enumerate(parts) if part in CLIENT_FOLDERS]
             or [-1])
    is_user = dialect in ('claude-desktop', 'claude-code-user', 'cline') or (
        re.search('/(?:Library/Application Support|AppData)/', path))
    root = '/'.join(parts[:at]) or '/' if at >= 0 else (
        is_user and home or os.path.dirname(file.file))
    if dialect == 'claude-plugin' or 'system-defaults' in path:
        return root, 0
    if re.match('(?i)/etc/|/Library/|[A-Z]:/Program', path):
        return home or root, 0 if dialect == 'codex' else 4
    if dialect == 'codex' and path.endswith('.config.toml'):
        return root, 3          # of a profile, which lies on all the others
    return root, 1 if is_user or root == home else (
        3 if '/agents/' in path else 2)


def _project_state(table, base):
    """Find what Claude Code's user file holds of one project."""
    projects = table.get('projects')
    for key in (base, base.replace('/', '\\'), base.replace('\\', '/')):
        if is_table(projects) and is_table(projects.get(key)):
            return projects[key]
    return {}


def _entries_of(file, workspace, home, warnings):
    """Give (name, Entry) of each server in a file, lowest scope first."""
    dialect, root, level = file.dialect, os.path.dirname(file.file), 2
    if dialect in OUR_DIALECTS:             # contract 12: generic is ours
        dialect, workspace = 'preflight', ''
    else:
        root, level = _root_of(file, home)
    base, local = workspace or root, None
    if dialect == 'claude-code-user':
        local = _project_state(file.table, base).get('mcpServers')
    rows = [(level, row) for row in _rows_of(file, [] if local else warnings)]
    rows += [(3, (name, raw, ())) for name, raw in (
        local.items() if is_table(local) else ())]
    return [(name, Entry(raw, file.path, file.file, dialect, base, (),
                         file.table, (level, root), notes))
            for level, (name, raw, notes) in rows]


def _is_left_out(name, entry, file):
    """Tell whether the lists in a file of its client leave a server out."""
    if file.dialect == 'claude-code-user':
        key = {'claude-code': 'disabledMcpjsonServers',
               'claude-code-user': 'disabledMcpServers'}.get(entry.dialect)
        names = _project_state(file.table, entry.base).get(key)
        return is_list(names) and name in names
    lists = file.table.get('mcp')
    return file.dialect == entry.dialect == 'gemini' and is_table(lists) and (
        is_list(lists.get('excluded')) and name in lists['excluded']
        or is_list(lists.get('allowed')) and name not in lists['allowed'])


def _apply_lists(entries, files):
    """Switch off what the lists of clients leave out.

    They hold together, whichever file of the client defines a server.
    """
    for file in files:
        for name, entry in entries.items():
            if _is_left_out(name, entry, file):
                entries[name] = entry._replace(off=file.file)


def _gather_hidden(entries, files):
    """Gather the tools that OpenCode's files hide by pattern.

    They hold together, whichever of the files defines a server; a pattern
    that shows some again does not count: which wins is not laid down.
    """
    hidden = {}
    for file in files:
        tools = file.table.get('tools')
        if DIALECTS[file.dialect].client == 'opencode' and is_table(tools):
            hidden.update((pattern, file.file) for pattern, is_on
                          in tools.items() if is_on is False)
    for name, entry in entries.items():
        if DIALECTS[entry.dialect].client == 'opencode':
            entries[name] = entry._replace(top=dict(entry.top, tools=hidden))


def _laid_over(low, high):
    """Merge tables key by key, as Codex and OpenCode merge their files."""
    return dict(low, **{key: _laid_over(low[key], value) if is_table(value)
                        and is_table(low.get(key)) else value
                        for key, value in high.items()})


def _merge(name, old, new):
    """Choose between two definitions of a name; raises ConfigError."""
    def rank(entry):
        return (entry.level[0], len(entry.level[1]),
                entry.path.endswith('.jsonc'))
    low, high = sorted((old, new), key=rank)
    clients = {DIALECTS[entry.dialect].client or entry.dialect
               for entry in (old, new)}
    is_near = low.level[0] < high.level[0] or rank(low) < rank(high) and (
        high.level[1] + '/').startswith(low.level[1].rstrip('/') + '/')
    if len(clients) > 1 or 'preflight' in clients or not is_near:
        raise ConfigError('server %s is defined twice: in %s and in %s' % (
            json.dumps(name), old.path, new.path),
            'Remove one, or leave command and url out of one to make it an '
            'overlay, which is read as ours: --dialect holds for every file.')
    if high.dialect in ('codex', 'opencode-v1') and (
            is_table(high.raw) and is_table(low.raw)):
        flagged = high if {'enabled', 'disabled'} & set(high.raw) else low
        return (high if _is_entry(high.raw) else low)._replace(
            raw=_laid_over(low.raw, high.raw), level=high.level,
            flagged=flagged.flagged or flagged.file)
    return high._replace(notes=high.notes + (
        'hides the definition in ' + low.path,))


def _unread(file):
    """Say what of a client's file has a say there and none here."""
    table, notes = file.table, []
    found, tools = table.get('profiles'), table.get('tools')
    if file.dialect == 'codex' and is_table(found):
        notes += ['profiles.%s.mcp_servers is not read; it counts only for '
                  'codex --profile %s' % (name, name)
                  for name, profile in found.items()
                  if is_table(profile) and profile.get('mcp_servers')]
    if DIALECTS[file.dialect].client == 'opencode' and is_table(tools) and (
            {True, False} <= {one for one in tools.values() if is_flag(one)}):
        notes.append('a true in "tools" is not read: what a false hides '
                     'stays hidden here')
    if file.is_container:
        notes.append('its client starts these servers inside the dev '
                     'container; here they start on this host')
    return notes


def _read_file(file, asked, settings, profiles, warnings):
    """Take from a file all that is no server; raises ConfigError."""
    path, is_ours = file.path, file.dialect in OUR_DIALECTS
    if file.dialect == 'registry' and asked != 'registry':
        raise ConfigError('config %s is a recipe of a registry' % path,
                          'To start what it downloads: --dialect registry')
    if is_ours and file.doubles:
        raise ConfigError('config %s: the key %s stands twice' % (
            path, json.dumps(file.doubles[0])))
    warnings += ['%s: the key %s stands twice; the last one counts'
                 % (path, json.dumps(name)) for name in file.doubles]
    if is_ours:
        _top_level(file, settings, profiles, warnings)
        return
    if 'lenient_syntax' in file.codes:
        warnings.append('%s: its client does not read comments or trailing '
                        'commas' % path)
    warnings += ['%s: %s ignored in a client\'s file' % (path, key)
                 for key in sorted(set(file.table) & {'profiles', *SETTINGS})
                 if file.dialect not in ('mcpproxy', 'codex')
                 or 'quarantine' in key]
    warnings += ['%s: %s' % (path, note) for note in _unread(file)]


def ungated_fact(settings, server=None):
    """Say that a lockfile does not gate the tools of a server, or, without
    one, of any, although it holds the approvals; '' where it does."""
    if settings.get('approvals') != 'lockfile':
        return ''
    what = 'trust_mode of server %s is auto' % json.dumps(server.name) if (
        server and server.trust_mode == 'auto') else (
            'quarantine_enabled is false' if not server
            and not settings['quarantine_enabled'] else '')
    return what and (
        '"approvals" is "lockfile" and %s: a tool that the lockfile lacks, '
        'or has otherwise, is ready all the same' % what)


def read_config(sources, dialect='', workspace='', home='', read=None):
    """Read config files, in order, into one Config.

    sources: (path as named, real path, bytes) each. workspace: where the
    servers of clients' files are started, '' for their project; home: the
    user's directory. Entries stay unread until look_up, so that a check
    pays only for the servers it asks for. read(path) -> text or None, for
    the files that a file names. Raises ConfigError for what only the owner
    can mend.
    """
    entries, overlays, skipped, warnings = {}, {}, {}, []
    settings, profiles, files, more = {}, {}, [], []
    for path, real, data in sources:
        file, named = _with_named(parse_config(path, real, data, dialect),
                                  read, warnings)
        files.append(file)
        more.extend(named)
        _read_file(file, dialect, settings, profiles, warnings)
        for name, entry in _entries_of(file, workspace, home, warnings):
            if name is None:
                warnings.append('%s: an entry without a name was skipped'
                                % path)
            elif entry.dialect == 'preflight' and is_table(entry.raw) and (
                    not _is_entry(entry.raw)):
                overlays.setdefault(name, []).append((entry.raw, path))
            else:
                entries[name] = (_merge(name, entries[name], entry)
                                 if name in entries else entry)
    _apply_lists(entries, files)
    _gather_hidden(entries, files)
    for name, layers in overlays.items():
        if name in entries:
            entries[name] = entries[name]._replace(overlays=tuple(layers))
        else:
            raw, path = layers[0]
            skipped[name] = 'entry %s in %s was skipped: %s' % (
                json.dumps(name), path, _lack(raw))
    full = {key: settings.get(key, default)
            for key, (_, default) in SETTINGS.items()}
    for key in ('max_age', 'sync_interval', 'activity_retention'):
        full[key] = parse_duration(full[key]) if full[key] else None
    warnings += filter(None, [ungated_fact(full)])
    return Config(tuple([path for path, _, _ in sources] + more), entries,
                  skipped, profiles, full, warnings)


def _check_header(server):
    """Hold a health.token_env that is no variable to the headers sent."""
    name = server.health.get('token_env')
    if name and not is_variable(name) and name.lower() not in map(
            str.lower, list(server.headers) + list(
                server.extra.get('env_headers', ()))):
        raise BadEntry('health.token_env is neither the name of a variable '
                       'nor of a header of the entry')


def look_up(config, name):
    """Read one server of a config: (Server, '') or (None, why not).

    why is '' too when there is no entry of that name at all.
    """
    entry = config.entries.get(name)
    if entry is None:
        return None, config.skipped.get(name, '')
    path = entry.path
    try:
        if _bad_name(name):
            raise BadEntry(_bad_name(name))
        server = read_entry(name, entry)
        for raw, over_path in entry.overlays:
            path = over_path    # the one to name when it is at fault
            for key in LAUNCH_KEYS:
                if raw.get(key) is not None:
                    raise BadEntry('an overlay cannot set %s' % key)
            over = _with_ours(server, raw, over_path)
            notes = _unknown_keys(raw, list(OUR_KEYS))
            marks = ['env.' + key for key in raw.get('env') or ()]
            marks += ['headers.' + key for key in raw.get('headers') or ()]
            server = over._replace(overlaid=over.overlaid | set(marks),
                                   warnings=over.warnings + notes)
        _check_header(server)
    except BadEntry as exc:
        return None, 'entry %s in %s was skipped: %s' % (
            json.dumps(name), path, exc)
    fact = ungated_fact(config.settings, server)
    return server._replace(warnings=server.warnings + [fact]
                           ) if fact else server, ''


def all_servers(config):
    """Read every entry: (Servers in file order, sentences on skipped)."""
    servers, skipped = [], list(config.skipped.values())
    for name in config.entries:
        server, why = look_up(config, name)
        if server:
            servers.append(server)
        else:
            skipped.append(why)
    return servers, skipped


# -- variables: expanded when a server is started -----------------------------

NAME = '[A-Za-z_][A-Za-z0-9_]*'
REFERENCE = r'\$\{([^}]*)\}|\$(' + NAME + r')|\{((?:env|file):[^{}]*)\}'
PERCENT = '|%(' + NAME + ')%'
KINDS = (r'(\$|\{?(?:env|file):|(?:input|keyring|config|command|'
         r'workspaceFolder):|user_config\.)?([\s\S]*)')


def home_of(environ):
    """Name the user's home directory, '' if nothing tells it."""
    return environ.get('HOME') or environ.get('USERPROFILE') or ''


def read_env_file(text):
    """Read an envFile: KEY=VALUE lines, export, quotes and comments."""
    rows = re.findall(r'(?m)^[ \t]*(?:export[ \t]+)?([^\s=#]+)[ \t]*=[ \t]*'
                      r'(?:"([^"\n]*)"|\'([^\'\n]*)\'|([^\n]*?))'
                      r'[ \t\r]*(?:[ \t]#.*)?$', text)
    return {name: double or single or plain
            for name, double, single, plain in rows}


class Expansion:
    """The references of one server, looked up as its client would.

    lacks: (name, place, does that stop the server) of what has no value.
    read(path) -> text or None; nothing else is read.
    """

    is_windows = os.name == 'nt'

    def __init__(self, server, environ, read):
        self.server, self.environ, self.read = server, environ, read
        self.lacks, self.notes = [], list(server.warnings)
        self.folder, base = os.path.dirname(server.file), server.base
        last = os.path.basename(base)
        self.names = dict(
            server.extra.get('inputs', ()), CLAUDE_PROJECT_DIR=base,
            CLAUDE_PLUGIN_ROOT=_plugin_root(server.file),
            workspaceFolder=base, cwd=base,
            workspaceFolderBasename=last, userHome=home_of(environ),
            pathSeparator=os.sep)
        self.names.update({'/': os.sep, 'workspaceFolder:' + last: base})

    def variable(self, name):
        """Find a variable; Windows alone does not mind the case."""
        return self.environ.get(name.upper() if self.is_windows else name)

    def open(self, folder, path):
        """Read a file that the config names; '' counts as a value."""
        if path[:2] == '~/':
            folder, path = home_of(self.environ), path[2:]
        text = self.read(os.path.join(folder, path)) if self.read else None
        return None if text is None else text.strip()

    def look_up(self, found, refs):
        """Look one reference up: (name, value, is it a variable).

        name: '' for what the dialect does not know; value: None if none.
        """
        braced, bare, curly = found.groups()[:3]
        bare = bare or ''.join(found.groups('')[3:])    # %NAME%
        word = '$' + bare if bare else '{' + curly if curly else braced
        kind, name = re.match(KINDS, word).groups()
        if word in self.names and (word in refs or kind and kind in refs):
            return word, self.names[word], False
        default = None
        if ':-' in refs and kind in (None, 'env:'):
            name, dash, default = name.partition(':-')
            default = default if dash else None
        if (kind or 'N') not in refs or not kind and not re.match(
                NAME + r'\Z', name):
            return '', None, False
        if kind in ('file:', '{file:'):
            return 'file:' + name, self.open(self.folder, name), False
        if kind not in (None, '$', 'env:', '{env:'):
            return word, None, False
        value = self.variable(name.strip())
        if default is not None and (value is None or not value
                                    and 'keep' not in refs):
            value = default
        return name.strip(), value, True

    def text(self, place, text):
        """Expand the references of a text once.

        What is put in is not scanned again: a second pass would leak other
        variables.
        """
        row = DIALECTS['preflight' if place in self.server.overlaid
                       else self.server.dialect]
        refs, is_half = row.refs.split(), place[:4] in ('env.', 'head')
        can_empty = row.unset == 'empty' or row.unset == 'half' and is_half

        def put(found):
            name, value, is_variable = self.look_up(found, refs)
            is_empty = can_empty and is_variable
            if name and value is None:
                self.lack(name, place, not is_empty)
            elif not name and (found.group(2) is None
                               or self.variable(found.group(2)) is not None):
                self.notes.append(_note('variable_not_expanded'))
            return value if value is not None else (
                '' if name and is_empty else found.group())
        more = PERCENT if '%' in refs and self.is_windows and (
            place[:4] == 'env.') else ''
        return re.sub(REFERENCE + more, put, text) if text else text

    def lack(self, name, place, is_fatal):
        """Note what has no value; if it is not fatal, it is left out."""
        self.lacks.append((name, place, is_fatal))
        if not is_fatal:
            self.notes.append('%s is not set; its client leaves it out (%s)'
                              % (name, place))

    def env(self):
        """Expand the variables: a file's, those handed down, its own."""
        server, env = self.server, {}
        path = self.text('envFile', server.extra.get('env_file'))
        if path:
            text = self.open(server.base, path)
            if text is None:
                self.lack('file:' + path, 'envFile', True)
            found = read_env_file(text or '')
            code = sorted(name for name in found if is_code_env(name))
            if code:            # it is no part of the approved launch
                self.notes.append('%s of the envFile is left out: what '
                                  'chooses code belongs into env'
                                  % ', '.join(code))
            env.update((name, value) for name, value in found.items()
                       if name not in code)
        for name in server.extra.get('env_vars', ()):
            if self.variable(name) is not None:
                env[name] = self.variable(name)
            elif name not in server.env:
                self.lack(name, 'env_vars', server.dialect == 'registry')
        env.update((name, self.text('env.' + name, value))
                   for name, value in server.env.items())
        return env

    def headers(self):
        """Expand the headers; Codex names variables for some."""
        server, extra = self.server, self.server.extra
        headers = {name: self.text('headers.' + name, value)
                   for name, value in server.headers.items()}
        named = [(header, name, '%s') for header, name in
                 extra.get('env_headers', {}).items()]
        if 'bearer' in extra:
            named.append(('Authorization', extra['bearer'], 'Bearer %s'))
        for header, name, form in named:
            old = [word for word in headers if word.lower()
                   == header.lower()]
            value = self.variable(name) or ''
            if any('headers.' + word in server.overlaid for word in old):
                continue
            if not value.strip():
                self.lack(name, 'headers.' + header, form != '%s')
                continue
            for word in old:
                del headers[word]
            headers[header] = form % value
        return headers

    def run(self):
        """Give the server with all of it expanded."""
        server = self.server
        for name in server.extra.get('lacks', ()):
            self.lack(name, 'the recipe', True)
        command = self.text('command', server.command)
        args = tuple(self.text('args[%d]' % n, word)
                     for n, word in enumerate(server.args))
        env, cwd = self.env(), self.text('cwd', server.cwd)
        if cwd and cwd[:2] == '~/' and server.dialect == 'preflight':
            cwd = os.path.join(home_of(self.environ), cwd[2:])
        return server._replace(
            command=command, args=args, env=env, cwd=cwd,
            url=self.text('url', server.url), headers=self.headers(),
            warnings=list(dict.fromkeys(self.notes)))


def expand_server(server, environ, read=None):
    """Expand all texts of a server: (Server, ['TOK (headers.X)', ...]).

    The list names what has no value and stops the server.
    """
    work = Expansion(server, environ, read)
    return work.run(), ['%s (%s)' % (name, place)
                        for name, place, is_fatal in work.lacks if is_fatal]


# -- config show --------------------------------------------------------------

def normal_form(server, file, environ, read):
    """Give one server as `config show` prints it, expanded."""
    work = Expansion(server, environ, read)
    plain, waits = work.run(), server.extra.get('waits', {})

    def seconds(end, ms, default):
        return ms / 1000 if end in waits or ms != default else None
    form = {key: getattr(plain, key) for key in (
        'name', 'transport', 'command', 'args', 'env', 'cwd', 'url',
        'headers', 'enabled', 'allow', 'deny')}
    form.update(
        args=list(plain.args), start_timeout=seconds(
            's', plain.start_timeout, START_TIMEOUT_MS),
        request_timeout=seconds('r', plain.request_timeout,
                                REQUEST_TIMEOUT_MS),
        required=server.extra.get('required', False), source=file.path,
        dialect=file.dialect,
        unresolved=list(dict.fromkeys(lack[0] for lack in work.lacks)),
        warnings=[code for code, words in NOTES.items() if any(
            note.startswith(words) for note in plain.warnings)])
    return form


def masked_form(form, secrets):
    """Mask the credentials of a normal form: env, headers and their like."""
    def hide(table):
        return {name: value and '***' for name, value in table.items()}
    return dict(
        form, env=hide(form['env']), headers=hide(form['headers']),
        command=form['command'] and redact(form['command'], secrets),
        args=[redact(word, secrets) for word in mask_args(form['args'])],
        url=form['url'] and redact(form['url'], secrets))


def show_config(file, workspace, environ, read, warnings):
    """Give a file in normal form: dialect, servers, skipped, warnings."""
    entries, skipped, servers = {}, [], []
    file = _with_named(file, read, warnings)[0]
    for name, entry in _entries_of(file, workspace, home_of(environ),
                                   warnings):
        name = len(entries) if name is None else name
        entries[name] = (_merge(name, entries[name], entry)
                         if name in entries else entry)
    _apply_lists(entries, [file])
    _gather_hidden(entries, [file])
    for name, entry in entries.items():
        try:
            servers.append(normal_form(read_entry(name, entry), file,
                                       environ, read))
        except BadEntry as exc:
            skipped.append({'name': name if is_text(name) else None,
                            'reason': exc.code})
    return {'dialect': file.dialect, 'servers': servers, 'skipped': skipped,
            'file_warnings': file.codes}


CODEX_ENV = frozenset(
    'HOME LOGNAME PATH SHELL USER LANG LC_ALL TERM TMPDIR TZ PATHEXT '
    'SYSTEMROOT SYSTEMDRIVE COMSPEC WINDIR USERNAME USERDOMAIN USERPROFILE '
    'HOMEDRIVE HOMEPATH PROGRAMFILES PROGRAMFILES(X86) PROGRAMW6432 '
    'PROGRAMDATA LOCALAPPDATA APPDATA TEMP TMP'.split())


def child_environment(server, environ, is_windows=os.name == 'nt'):
    """Give the environment of a server that is started (contract 12).

    Everything but PREFLIGHT_*, of which Codex hands down a few; no browser
    that could open, UTF-8 for Python children, then the entry's own env,
    where None removes. Windows knows a name in one case only: Path is PATH.
    """
    env = {name: value for name, value in environ.items()
           if not name.startswith('PREFLIGHT_')
           and (server.dialect != 'codex' or name in CODEX_ENV)}
    env.update(BROWSER='true', PYTHONUTF8='1', PYTHONIOENCODING='utf-8')
    if (server.client == 'claude-code'
            or DIALECTS[server.dialect].client == 'claude'):
        env['CLAUDE_PROJECT_DIR'] = server.base
    for name, value in server.env.items():
        name = name.upper() if is_windows else name
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


# ==========================================================================
# 8. wire: MCP as values. A conversation is a generator that yields what to
#    send and is sent the reply; whoever drives it owns the bytes.
# ==========================================================================

META = 'io.modelcontextprotocol/'
METHOD_NOT_FOUND, BAD_PARAMS, BAD_VERSION = -32601, -32602, -32022
HEADER_MISMATCH = -32020        # only servers of 2026-07-28 say it

Ask = namedtuple('Ask', 'method params')
Ask.__doc__ = """A request to send; its reply is sent into the generator."""

Listing = namedtuple('Listing', 'protocol era tools ttl cache_scope')
Listing.__doc__ = """The end of a conversation: era is handshake or modern,
tools the raw list, ttl in milliseconds as the server said (0: none), as is
cache_scope: public, private or ''."""

AT = 0      # key of a reply: where an HTTP error came from. JSON has no such
TELL, SETTLE = 'tell', 'settle'     # Ask.params of what is no request


def encode_message(message):
    """Write one JSON-RPC message as one line (MCP stdio transport)."""
    return canonical(dict(message, jsonrpc='2.0')).encode('ascii') + b'\n'


def is_reply_to(message, number, is_open=True):
    """Tell whether a message answers the request of that number.

    A number that comes back as text counts. is_open: a reply has come
    before. Until then one request alone is out, so that an error without an
    id is of it; later it may be of anything, say of our notification.
    Raises UpstreamError for a server that answers without echoing ids.
    """
    if 'method' in message or not {'result', 'error'} & set(message):
        return False
    got = message.get('id')
    if got == number and not isinstance(got, bool) or got == str(number):
        return True
    if is_open:
        return False
    if got is None and message.get('error') is not None:
        return True             # it could not read the id of the request
    if got is None or got == 0:
        raise UpstreamError('protocol',
                            'the server does not echo request ids')
    return False


def decode_line(line, waiting):
    """Read one line from a server: a message, or None for noise.

    Raises UpstreamError when the line is the reply that is waited for (its
    id) but not UTF-8: nothing with a replacement character may be hashed.
    """
    line = line.rstrip(b'\r')
    if line[:3] == b'\xef\xbb\xbf':
        line = line[3:]
    if not line.lstrip().startswith(b'{'):
        return None
    try:
        text, is_clean = line.decode('utf-8'), True
    except UnicodeDecodeError:
        text, is_clean = line.decode('utf-8', 'replace'), False
    try:
        # Three levels of the message stand around each definition.
        message = decode_json(text, MAX_DEPTH + 3)
    except (ValueError, RecursionError):
        return None
    if isinstance(message, Refused):
        raise UpstreamError('protocol', 'a message is ambiguous: %s'
                            % message)
    if not isinstance(message, dict) or 'jsonrpc' not in message:
        return None
    if not is_clean:
        if is_reply_to(message, waiting):
            raise UpstreamError('protocol', 'the reply is not UTF-8')
        return None
    return message


def answer_request(message, client, base):
    """Answer what a server asks while it is looked at, None for a notice.

    Nothing is ever acted upon; what the host's client would have declared
    is declined politely, the rest is unknown here.
    """
    if 'id' not in message or 'method' not in message:
        return None
    method, result = message['method'], None
    if method == 'ping':
        result = {}
    elif client == 'claude-code' and method == 'roots/list':
        from urllib.parse import quote
        result = {'roots': [{'uri': 'file://' + quote(base)}]}
    elif client == 'claude-code' and method == 'elicitation/create':
        result = {'action': 'decline'}
    if result is not None:
        return {'id': message['id'], 'result': result}
    return {'id': message['id'], 'error': {
        'code': METHOD_NOT_FOUND, 'message': 'Method not found'}}


def capabilities_of(client):
    """Give the capabilities that the job's host declares (contract 12)."""
    if client == 'claude-code':
        return {'roots': {}, 'elicitation': {}}
    return {}


def _client_info():
    return {'name': 'preflight', 'version': VERSION}


def _shown(value):
    """Write a server's value into a sentence, whatever its size."""
    text = value if is_text(value) else canonical(value)
    return text if len(text) <= 300 else text[:300] + '...'


def _error_text(error):
    if not isinstance(error, dict):
        return 'an error without a reason'
    return 'error %s: %s' % (_shown(error.get('code')),
                             _shown(error.get('message')))


def _refusal(reply, method):
    return UpstreamError('protocol', '%s failed with %s%s' % (
        method, _error_text(reply.get('error')), reply.get(AT, '')))


def _result_of(reply, method):
    result = reply.get('result')
    if reply.get('error') is not None or 'result' not in reply:
        raise _refusal(reply, method)
    if not isinstance(result, dict):
        why = str(result) if isinstance(result, Refused) else 'no object'
        raise UpstreamError('protocol', 'the result of %s cannot be used: %s'
                            % (method, why))
    kind = result.get('resultType', 'complete')
    if kind != 'complete':
        raise UpstreamError('protocol', 'the result of %s is of the unknown '
                            'type %s' % (method, _shown(kind)))
    return result


def _named_versions(error):
    """List the versions that an error names, in its data or its text."""
    data = error.get('data') if isinstance(error, dict) else None
    listed = data.get('supported') if isinstance(data, dict) else None
    named = [v for v in listed if is_text(v)] if isinstance(listed,
                                                            list) else []
    text = _error_text(error)
    return named + re.findall(r'20[0-9]{2}-[0-9]{2}-[0-9]{2}', text)


def _speaks(versions, known):
    return UpstreamError('protocol', 'the server speaks %s, we know %s' % (
        _shown(versions), ', '.join(known)))


def _discover(meta):
    reply = yield Ask('server/discover', {'_meta': meta})
    result = _result_of(reply, 'server/discover')
    if not isinstance(result.get('supportedVersions'), list):
        raise _speaks(result.get('supportedVersions'), MODERN_VERSIONS)
    return result


def _open_modern(client, refusal=None):
    """Open without a handshake.

    refusal: the UpstreamError of an initialize before. It says more than
    the failure of what a server may never have heard of.
    """
    meta = {META + 'protocolVersion': MODERN_VERSIONS[0],
            META + 'clientCapabilities': capabilities_of(client),
            META + 'clientInfo': _client_info()}
    try:
        result = yield from _discover(meta)
    except UpstreamError as exc:
        if refusal is None or exc.cause in ('', 'rate_limited'):
            raise
        raise refusal from exc
    if MODERN_VERSIONS[0] not in result['supportedVersions']:
        raise _speaks(result['supportedVersions'], MODERN_VERSIONS)
    return (MODERN_VERSIONS[0], 'modern', result.get('capabilities'),
            {'_meta': meta})


def _open_handshake(client, version=HANDSHAKE_VERSIONS[0]):
    reply = yield Ask('initialize', {
        'protocolVersion': version, 'clientInfo': _client_info(),
        'capabilities': capabilities_of(client)})
    error = reply.get('error')
    if error is not None:
        named = _named_versions(error)
        code = error.get('code') if isinstance(error, dict) else None
        common = [v for v in HANDSHAKE_VERSIONS if v in named
                  and v != version]     # a refusal often names that one too
        if common and version == HANDSHAKE_VERSIONS[0]:
            return (yield from _open_handshake(client, common[0]))
        if (code in (BAD_VERSION, METHOD_NOT_FOUND, BAD_PARAMS,
                     HEADER_MISMATCH)
                or set(named) & set(MODERN_VERSIONS)):
            return (yield from _open_modern(client,
                                            _refusal(reply, 'initialize')))
    result = _result_of(reply, 'initialize')
    spoken = result.get('protocolVersion')
    if spoken in MODERN_VERSIONS:       # no handshake opens that one
        return (yield from _open_modern(client, _speaks(
            spoken, HANDSHAKE_VERSIONS)))
    if spoken not in HANDSHAKE_VERSIONS:
        raise _speaks(spoken, HANDSHAKE_VERSIONS)
    yield Ask('notifications/initialized', TELL)
    return spoken, 'handshake', result.get('capabilities'), {}


def _next_cursor(result, seen):
    """Give the cursor of the next page, None at the end of the list."""
    cursor = result.get('nextCursor')
    if cursor is None:
        return None
    if not is_text(cursor):
        raise UpstreamError('protocol', 'nextCursor is not text')
    pages = len(seen) + 1
    if cursor in seen:
        if cursor == '':        # some servers mean the end by it
            return None
        raise UpstreamError('protocol', 'pagination loop: a cursor was '
                            'repeated after %s' % plural(pages, 'page'))
    if pages >= MAX_PAGES:
        raise UpstreamError('protocol', 'the list has over %d pages'
                            % MAX_PAGES)
    seen.add(cursor)
    return cursor


def _list_pages(meta):
    """List all pages: (tools, ttl, cache scope)."""
    tools, seen, cursor, ttl, scope = [], set(), None, 0, ''
    while True:
        params = dict(meta) if cursor is None else dict(meta, cursor=cursor)
        reply = yield Ask('tools/list', params)
        error = reply.get('error')
        if (isinstance(error, dict) and error.get('code') == METHOD_NOT_FOUND
                and not tools):
            return [], 0, ''
        result = _result_of(reply, 'tools/list')
        if not isinstance(result.get('tools'), list):
            raise UpstreamError('protocol', 'tools/list gave no list')
        tools += result['tools']
        limit = result.get('ttlMs')
        if isinstance(limit, int) and not is_flag(limit):
            ttl = max(0, limit)
        if result.get('cacheScope') in ('public', 'private'):
            scope = result['cacheScope']
        cursor = _next_cursor(result, seen)
        if cursor is None:
            return tools, ttl, scope


def explore(era, client):
    """Converse with a server: open it, list its tools; returns a Listing.

    A generator. era: 'handshake' sends initialize first and falls back to
    server/discover where the refusal asks for it; 'modern' starts there.
    A list that the server says has changed is fetched again, once.
    """
    opening = _open_modern if era == 'modern' else _open_handshake
    protocol, era, capabilities, meta = yield from opening(client)
    if not isinstance(capabilities, dict) or capabilities.get(
            'tools') is None:
        return Listing(protocol, era, [], 0, '')
    found = yield from _list_pages(meta)
    if (yield Ask('notifications/tools/list_changed', SETTLE)):
        found = yield from _list_pages(meta)
    return Listing(protocol, era, *found)


class SseParser:
    """Cuts an event stream into events, by the rules of WHATWG's HTML.

    last_id, and retry in milliseconds (None: never said), are the stream's.
    """

    def __init__(self):
        self.line, self.size = [], 0    # pieces; bytes of this event so far
        self.kind, self.data = '', []
        self.next_id, self.last_id, self.retry = '', '', None
        self.is_after_cr, self.is_start = False, True

    def feed(self, chunk):
        """Take bytes: the (type, data) of each event that they complete."""
        pieces, events = re.split(b'\r\n|\r|\n', chunk), []
        if self.is_after_cr and chunk[:1] == b'\n':
            del pieces[0]       # the other half of that line end
        self.is_after_cr = chunk[-1:] == b'\r'
        for piece in pieces[:-1]:
            self.size += len(piece)
            line, self.line = b''.join(self.line + [piece]), []
            if line:
                self._take(line)
            elif self.data:
                events.append((self.kind or 'message', b'\n'.join(self.data)))
            if not line:
                self.kind, self.data, self.size = '', [], 0
                self.last_id = self.next_id
            self.is_start = False
        self.line.append(pieces[-1])
        self.size += len(pieces[-1])
        if self.size > MAX_MESSAGE_BYTES:
            raise UpstreamError('protocol', 'a message is larger than %d '
                                'bytes' % MAX_MESSAGE_BYTES)
        return events

    def _take(self, line):
        if self.is_start and line[:3] == b'\xef\xbb\xbf':
            line = line[3:]
        name, _, value = line.partition(b':')
        value = value[1:] if value[:1] == b' ' else value
        if name == b'data':
            self.data.append(value)
            return
        self.size -= len(line)  # nothing of it is kept
        if name == b'event':
            self.kind = value.decode('utf-8', 'replace')
        elif name == b'id' and b'\0' not in value:
            text = value.decode('utf-8', 'replace')
            if unsendable({'Last-Event-ID': text}) is None:
                self.next_id = text     # else none could be resumed behind
        elif name == b'retry' and value.isdigit():
            self.retry = int(value[:9])

    def is_held(self):
        """Tell whether data is there, and only the event's end is not."""
        return bool(self.data) and not any(self.line)


CHALLENGE = (r'([!#$%&\'*+.^_`|~A-Za-z0-9-]+)'
             r'(?:\s*=\s*("(?:[^"\\]|\\.)*"|[^\s",]+))?')


def bearer_challenge(headers):
    """Read the parameters of the Bearer challenge, {} for none.

    WWW-Authenticate may hold several challenges. Names of headers and
    parameters are in lower case.
    """
    found, scheme = {}, ''
    text = headers.get('www-authenticate', '')
    for name, value in re.findall(CHALLENGE, text):
        if not value:
            scheme = name.lower()
        elif scheme == 'bearer':
            if value[0] == '"':
                value = re.sub(r'\\(.)', r'\1', value[1:-1])
            found.setdefault(name.lower(), value)
    return found


# 4xx whose body is never the reply to a request.
FINAL_STATUSES = (401, 403, 407, 408, 429)
# What a server that speaks only the older HTTP+SSE says to a POST.
SSE_STATUSES = (400, 404, 405, 406, 415)


def status_error(status, headers, has_credential, body=b''):
    """Say what an HTTP status means: the UpstreamError to raise.

    body: of the answer, as far as it is known.
    """
    given = bearer_challenge(headers)
    said = ', '.join(given[key][:200] for key in ('error', 'scope')
                     if given.get(key))
    said = ' (%s)' % said if said else ''
    if status == 401:
        return LoginNeeded('401: %s%s' % (
            'the credential was refused' if has_credential
            else 'no credential is configured', said))
    if status == 403:
        return LoginNeeded('403: token lacks rights%s' % (
            said if has_credential else ' (none is configured)'))
    text = ('endpoint or session not found (404)' if status == 404
            else 'HTTP %d' % status)
    excerpt = ' '.join(body[:1000].decode('utf-8', 'replace').split())[:200]
    if excerpt and excerpt[0] != '<':
        text += ': ' + excerpt
    if headers.get('retry-after'):
        text += '; Retry-After: %s' % headers['retry-after'][:40]
    return UpstreamError('rate_limited' if status == 429 else 'http_status',
                         text)


def mcp_headers(message, version):
    """Give the headers that name the protocol: none on initialize.

    None of our messages is of a kind that Mcp-Name goes with.
    """
    meta = (message.get('params') or {}).get('_meta') or {}
    modern = meta.get(META + 'protocolVersion')
    if modern:
        return {'MCP-Protocol-Version': modern,
                'Mcp-Method': message['method']}
    if not version or message.get('method') == 'initialize':
        return {}
    return {'MCP-Protocol-Version': version}


def media_type(headers):
    """Give the media type in lower case, without its parameters."""
    return headers.get('content-type', '').split(';')[0].strip().lower()


def url_secrets(url):
    """List what looks like a credential in a URL."""
    found = re.findall(r'(?i)//(?:[^/@:]*:)?([^/@]+)@|[?&]%s=([^&#]+)'
                       % SECRET_NAME, url or '')
    return [word or value for word, value in found]


def has_credential(server):
    """Tell whether a server's config sends something like a credential."""
    return bool(url_secrets(server.url)) or any(
        value and re.match('(?i)%s\\Z' % SECRET_NAME, name)
        for name, value in server.headers.items())


def credential_end(headers):
    """Read when the bearer token in headers ends, None if it says not.

    Only a JWT says it; nothing else of the token is kept.
    """
    import base64
    for name, value in headers.items():
        found = re.match(r'(?i)bearer\s+[\w-]+\.([\w-]+)\.[\w-]*\s*\Z', value)
        if name.lower() != 'authorization' or not found:
            continue
        try:
            text = base64.urlsafe_b64decode(found.group(1) + '==')
            end = decode_json(text.decode('utf-8')).get('exp')
        except (ValueError, AttributeError, RecursionError):
            return None
        if isinstance(end, (int, float)) and not is_flag(end) and (
                0 < end < 1e11):
            return int(end * 1000)
    return None


def metadata_urls(url, challenge):
    """List where a server's protected resource metadata may stand.

    RFC 9728's order. Only https, or both ends on this machine: a server
    must not make us call what only this machine can reach.
    """
    from urllib.parse import urlsplit
    here, found = origin_of(url), []
    base = '%s://%s/.well-known/oauth-protected-resource' % (
        here[0], host_text(here))
    named = challenge.get('resource_metadata')
    for place in [named] if named else dict.fromkeys(
            (base + urlsplit(url).path.rstrip('/'), base)):
        try:
            scheme, host, _ = origin_of(place)
        except ValueError:
            continue
        if is_loopback(here[1]) if is_loopback(host) else scheme == 'https':
            found.append(place)
    return found


def read_issuers(body):
    """List the authorization servers that resource metadata names."""
    try:
        listed = decode_json(body.decode('utf-8'))['authorization_servers']
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [plain_url(url)[:200] for url in listed[:3]
            if is_text(url)] if is_list(listed) else []


ADVERTISED_TWICE = 'advertised twice, with different definitions or hints'


def _read_tool(item):
    """Read one listed item: (Definition, '') or (None, why it is none)."""
    flaw = ''
    if isinstance(item, Refused):
        flaw, item = str(item), item.table
    if not isinstance(item, dict):
        return None, flaw or 'it is not an object'
    name = item.get('name')
    if not is_text(name) or isinstance(name, Refused) or not name:
        return None, flaw or 'it has no name'
    if not is_storable(name):
        return None, 'its name ' + unstorable_fact(name)
    parts = {key: item.get(key) for key in HASHED + ('annotations',)}
    flaw = flaw or find_refused(parts)
    if flaw:
        return Definition(name, '', '', {}, 'definition refused: '
                          + flaw), ''
    text = definition_text(parts)
    return Definition(name, sha256(text), text,
                      read_hints(parts['annotations']), ''), ''


def read_tools(items):
    """Read a raw tool list: (Definitions by first place, warnings).

    One malformed tool costs only itself. Two of one name that differ are
    one flawed Definition; identical copies collapse (contract 10).
    """
    found, warnings = {}, []
    for place, item in enumerate(items):
        tool, why = _read_tool(item)
        if tool is None:
            warnings.append('tool %d of the list is skipped: %s'
                            % (place, why))
            continue
        if tool.flaw:
            warnings.append('%s: %s' % (json.dumps(tool.name), tool.flaw))
        before = found.setdefault(tool.name, tool)
        if before is tool:
            continue
        if before == tool and not tool.flaw:
            warnings.append('%s stands twice in the list, alike'
                            % json.dumps(tool.name))
        else:
            found[tool.name] = Definition(tool.name, '', '', {},
                                          ADVERTISED_TWICE)
    return list(found.values()), warnings


# ==========================================================================
# 9. trust: what was seen beside what was approved. Statuses are derived,
#    stored nowhere: what cannot be written cannot be wrong (contract 10).
# ==========================================================================

APPROVED, PENDING, CHANGED = 'approved', 'pending', 'changed'

Plan = namedtuple('Plan', 'state cause detail rows gone approve how added '
                          'changed vanished')
Plan.__doc__ = """What one observation writes. rows: Definitions to list,
None to keep the old list; gone: names no longer listed; approve: names
whose definition becomes the approved one, and how (baseline or auto)."""


def tool_status(tool):
    """Derive (status, why) of a listed tool; why is '' when approved."""
    if tool.flaw:
        return CHANGED, tool.flaw
    approved = tool.approved
    if approved is None:
        return PENDING, 'nobody has approved it since'
    if not tool.ignored and (approved.version, approved.hash) != (
            tool.version, tool.hash):
        return CHANGED, 'the definition is not the approved one'
    risks = riskier_hints(approved.hints, tool.hints)
    if risks:
        return CHANGED, 'hints became riskier: ' + ', '.join(risks)
    return APPROVED, ''


def fields_of_rule(rules, name):
    """Give the fields that ignore_changes has for a tool.

    rules: that of its server; a tool's own entry replaces that of '*'.
    """
    return rules.get(name, rules.get('*', ()))


def ignored_fields(rules, name, differs):
    """Give the fields to ignore: all that differ, or none of them.

    One field beyond the rule, and the tool is changed as a whole.
    """
    return differs if set(differs) <= set(fields_of_rule(rules, name)) else ()


def textless_fact(known, tool):
    """Say that ignore_changes lacks the approved text to work with, or ''."""
    approved, server = tool.approved, known.server
    if (not approved or not tool.hash or tool.differs
            or approved.hash == tool.hash or approved.version != tool.version
            or not fields_of_rule(server.ignore_changes, tool.name)):
        return ''
    if known.lock is None:
        return 'ignore_changes needs the approved text, which is not kept.'
    return ('ignore_changes needs the locked text, which %s does not hold: '
            '`tools lock --full` writes it.' % known.lock.path)


def is_restless(tool):
    """Tell whether a tool's text changed more often than releases do.

    Each change that a person approved began the count anew.
    """
    changes, looks = tool.moves
    return changes >= 3 and 2 * changes >= looks


def _rule_for(server, tool):
    """Write the ignore_changes that would cover a tool, '' for none.

    Words only, and only where nothing else differs: what a tool takes and
    gives does not change by itself. What its rule has stays in.
    """
    words = set(tool.differs)
    if not words or not words <= set(WORDY) or tool.name == '*':
        return ''
    words.update(fields_of_rule(server.ignore_changes, tool.name))
    rule = {tool.name: [field for field in WORDY if field in words]}
    place = ('its entry in ' + server.file if server.dialect == 'preflight'
             else 'an entry for it in a config of our own, as an overlay')
    return ', or put "ignore_changes": %s into %s' % (json.dumps(rule), place)


def restless_fact(server, tool):
    """Say that a tool's text keeps changing, '' where it is not plain.

    The fact first: who has a tool change three times must not get the
    advice to look away read before it.
    """
    if not is_restless(tool) or tool.ignored or tool.flaw:
        return ''
    where = ': ' + ', '.join(tool.differs) if tool.differs else ''
    return ('It changed %d times in %d looks without an approval between%s. '
            'If it changes by itself, fix the server%s.' % (
                tool.moves + (where, _rule_for(server, tool))))


def moves_text(server, tool):
    """Say how often a tool's text moved of late, '' for at most once."""
    if tool.moves[0] < 2:       # one change is what a diff shows
        return ''
    return restless_fact(server, tool) or (
        'Changed in %d of the last %d looks.' % tool.moves)


def switched(config_value, switch):
    """Decide between config and switch: (value, True if switch decides)."""
    if switch and switch.over == config_value:
        return switch.value, True
    return config_value, False


def disabled_fact(server, switch):
    """Say why a server is switched off, '' when it is on."""
    enabled, by_switch = switched(server.enabled, switch)
    if enabled:
        return ''
    return 'Server %s is switched off %s.' % (
        json.dumps(server.name), 'by `servers disable` since '
        + format_time(switch.at) if by_switch
        else 'in ' + server.extra.get('enabled_at', server.file))


def launch_fact(server, launches, seen_launch):
    """Say how the configured launch departs from the known ones, or ''.

    launches: Launch rows known for the name; seen_launch: digest that this
    file's server was last seen under, to name the one that was replaced.
    """
    digest = launch_digest(server)
    if not launches or any(row.digest == digest for row in launches):
        return ''
    old = next((row for row in launches if row.digest == seen_launch),
               launches[-1])
    new = launch_text(server)
    note = ' (only a masked part differs)' if old.text == new else ''
    return 'Server %s: launch changed: it was %s, now it is %s%s.' % (
        json.dumps(server.name), old.text, new, note)


def quarantine_fact(server, switch, launches, settings, seen_launch):
    """Say why a server is quarantined, '' when it is not (contract 10)."""
    quarantined, by_switch = switched(server.quarantined, switch)
    name = json.dumps(server.name)
    if quarantined:
        return 'Server %s is quarantined %s.' % (
            name, 'by `servers quarantine` since ' + format_time(switch.at)
            if by_switch
            else 'in ' + server.extra.get('quarantined_at', server.file))
    if not launches and settings['quarantine_new_servers']:
        return ('Server %s is new, and quarantine_new_servers is on.' % name)
    return launch_fact(server, launches, seen_launch)


def lock_label(lock):
    """Name a Lock: the file, or the contract that keeps what it was."""
    if not lock.contract:
        return 'the lockfile ' + lock.path
    return 'contract %s (%s as of %s)' % (lock.contract, lock.path,
                                          format_time(lock.at))


def lock_fact(server, digest, lock):
    """Say how a server's launch departs from the locked one, or ''.

    digest: of the configured launch. A server that is not in the lockfile
    departs from nothing.
    """
    held = lock.launches.get(server.name)
    if held is None or held[0] == digest:
        return ''
    new = launch_text(server)
    note = ' (only a masked part differs)' if held[1] == new else ''
    return 'Server %s: launch changed: %s has %s, now it is %s%s.' % (
        json.dumps(server.name), lock_label(lock), held[1], new, note)


def locked_approval(lock, server, tool):
    """Give the Approval that a lockfile is for a tool, None without one.

    The file does not say when.
    """
    held = lock.tools.get('%s:%s' % (server, tool))
    return held and Approval(held.hash, held.version, held.hints, None,
                             'lock')


def is_lease_running(link, now):
    """Tell whether a sync of this server is under way."""
    return (link.lease_until is not None and now < link.lease_until
            and link.lease_at <= now + FUTURE_MS)


def is_baseline(digest, launches):
    """Tell whether a list now seen under a launch becomes its baseline."""
    if not launches:
        return True
    return any(row.digest == digest and not row.baselined
               for row in launches)


def _refused_row(tool, before):
    """Keep a refused definition only where the tool was known."""
    old = before.get(tool.name)
    return (not tool.flaw.startswith('definition refused')
            or old is not None and (old.listed or old.approved))


def _is_moved(digest, new, quiet):
    return digest != new.hash and (digest, new.hash) not in quiet


def _is_news(old, new, quiet):
    approved = old.approved if old else None
    return (approved is None or _is_moved(approved.hash, new, quiet)
            or approved.version != HASH_VERSION
            or bool(riskier_hints(approved.hints, new.hints)))


def _is_change(old, new, quiet):
    """Tell whether a known tool moved; one that is back (its approval
    outlived it) is compared with what was approved."""
    if old is None or not old.listed:
        return bool(old and old.approved) and (
            bool(new.flaw) or _is_news(old, new, quiet))
    return (_is_moved(old.hash, new, quiet) or old.flaw != new.flaw
            or bool(riskier_hints(old.hints, new.hints)))


def plan_sync(before, seen, is_first, mode, quiet=frozenset()):
    """Compare one Observation with the Tools known before it: a Plan.

    is_first: its list is the baseline; mode: the server's trust mode. An
    empty list where tools were known is an error and keeps the old list;
    a failed look changes no tool and no approval. quiet: (old hash, new
    hash) of definitions that differ in ignored fields only: no news, and
    nothing that mode auto would approve.
    """
    kept = Plan(seen.state, seen.cause, seen.detail, None, [], [], '', [],
                [], [])
    listed = {name for name, tool in before.items() if tool.listed}
    if seen.tools is None:
        return kept
    if not seen.tools and listed:
        return kept._replace(state='error', cause='no_tools', detail=(
            'it lists no tools, and %s known' % (
                '1 was' if len(listed) == 1 else '%d were' % len(listed))))
    rows = [tool for tool in seen.tools if _refused_row(tool, before)]
    names = {tool.name for tool in rows}
    changed = [t.name for t in rows if _is_change(before.get(t.name), t,
                                                  quiet)]
    added = [t.name for t in rows if t.name not in listed
             and t.name not in set(changed)]
    approve, how = [], ''
    if is_first:
        approve, how = [t.name for t in rows if not t.flaw], 'baseline'
    elif mode == 'auto':
        approve, how = [t.name for t in rows if not t.flaw and _is_news(
            before.get(t.name), t, quiet)], 'auto'
    return kept._replace(
        rows=rows, gone=sorted(listed - names), approve=approve, how=how,
        added=[] if is_first else added, changed=changed,
        vanished=sorted(listed - names))


# ==========================================================================
# 10. judge: values in, a verdict out. It cannot reach a transport; that is
#     what makes "zero upstream calls" true (contract 1).
# ==========================================================================

NOT_FOUND = 'No tool with this id is available.'

# What an agent may read of each reason: nothing of this host (contract 7).
AGENT_TEXTS = {
    'server_initializing': ('The server is not connected yet.',
                            'Try again later.'),
    'server_unhealthy': ('The server is not available.',
                         'Try again later, or tell the operator.'),
    'server_disabled': ('The server is switched off.',
                        'Ask the operator to enable it.'),
    'server_quarantined': ('The server is quarantined.',
                           'Ask the operator to review it.'),
    'tool_pending_approval': ('The tool awaits approval.',
                              'Ask the operator to review it.'),
    'tool_changed': ('The tool changed since it was approved.',
                     'Ask the operator to review it.'),
    'tool_blocked_by_user': ('The operator has blocked the tool.',
                             'Ask the operator to unblock it.'),
    'oauth_required': ('The server needs a login.',
                       'Ask the operator to sign in.'),
    'hash_mismatch': ('The tool is not the one that was pinned.',
                      'Review the tool and renew the pin.'),
    'tool_denied_by_config': ('The configuration denies the tool.',
                              'Ask the operator to change it.'),
    'missing_annotation': ('The tool lacks a hint that the policy needs.',
                           'Leave the filter out, or use another tool.'),
    'policy_filtered': ('The policy leaves the tool out.',
                        'Leave the filter out, or use another tool.'),
    'not_found': (NOT_FOUND, 'List the tools and correct the id.'),
    # Two causes of hash_mismatch, which say nothing of what is stored.
    'pin_form': ('The pin is not of the form sha256/v<N>:<64 hex digits>.',
                 'Correct the pin.'),
    'pin_version': ('The pin is of another hash version than the tool.',
                    'Renew the pin.'),
}


def passed(fact):
    """A gate that lets pass, and what it looked at."""
    return Finding('', fact, '', '')


def stopped(reason, fact, remedy, cause=''):
    """A gate that stops: the operator's fact and one instruction."""
    return Finding(reason, fact, remedy, cause)


def command_line(how, words, *names):
    """Write a command that runs as printed (contract 11).

    A name with control characters is never put into a command: the list
    that shows it is named instead.
    """
    if any(safe_text(name) != name for name in names):
        return '%s tools list' % how
    dash = ['--'] if any(name[:1] == '-' for name in names) else []
    return ' '.join([how, words] + dash + [shell_word(n) for n in names])


def _run(case, words, *names):
    return 'Run: ' + command_line(case.question.how, words, *names)


def lock_line(how, tool, path=''):
    """Write the command that locks a tool as it is now listed.

    path: the lockfile, '' for that of the config.
    """
    name = '%s:%s' % (tool.server, tool.name)
    words = 'tools lock' + (' --file=' + shell_word(path) if path else '')
    pair = '%s=%s' % (name, review_token(tool.hash, tool.hints))
    return command_line(how, '%s --expect=%s' % (words, shell_word(pair)),
                        name)


def _renew(case):
    """Word the remedy for what is not as a contract's lockfile was."""
    how, lock = case.question.how, case.question.lock
    path = shell_word(lock.path)
    return 'Review it: %s; once that file holds it, run: %s' % (
        command_line(how, 'tools verify --lock=' + path),
        command_line(how, 'contract add --lock=' + path, lock.contract))


def _review(case, path=''):
    """Word the remedy for a tool that is not the locked one."""
    tool, words = case.tool, 'tools diff'
    if path and case.question.lock.contract:
        return _renew(case)
    if not tool.hash or safe_text(case.ref.id) != case.ref.id:
        return _run(case, words, case.ref.id)
    if path:
        words = 'tools verify --lock=' + shell_word(path)
    how = case.question.how
    return 'Review it: %s; then run: %s' % (command_line(
        how, words, *([] if path else [case.ref.id])),
        lock_line(how, tool, path))


def _locked(case):
    """Give what the lockfile asked for says of a tool: Locked or None."""
    lock, ref = case.question.lock, case.ref
    return lock and lock.tools.get('%s:%s' % (ref.server, ref.tool))


def max_age_of(server, settings, ttl):
    """Decide how old a good look may be, 0 for any age (contract 9).

    What is configured holds as written. Unset, it is 15m or 3 sync
    intervals, and a server's own ttl can only lengthen that.
    """
    for value in (server.max_age, settings['max_age']):
        if value is not None:
            return value
    unset = max(MAX_AGE_MS, 3 * (settings['sync_interval'] or 0))
    return max(unset, min(ttl or 0, MAX_TTL_MS))


def is_stale(link, limit, now):
    """Tell whether a good look is too old, or dated in the future."""
    age = now - link.observed_at
    return age < -FUTURE_MS or bool(limit) and age > limit


def _stale_finding(case, link, limit, sync):
    now, name = case.question.now, json.dumps(case.known.server.name)
    if link.observed_at > now:
        fact = 'in the future (%s)' % format_time(link.observed_at)
    else:
        fact = '%s ago, longer than max_age %s' % (format_duration(
            now - link.observed_at), format_duration(limit))
    return stopped('server_unhealthy', 'Server %s was last seen ready %s '
                   '(%s).' % (name, fact, case.question.places), sync,
                   'stale')


def _credential_end(link, question):
    """Say that a credential has ended or will within the horizon, or ''."""
    end, now = link.expires_at, question.now
    if end is None or end > now + question.horizon:
        return ''
    span = format_duration(abs(end - now))
    return '%s (%s)' % ('ended %s ago' % span if end <= now
                        else 'ends in %s' % span, format_time(end))


def connection_state(case):
    """Read a server's state off its record: a Finding (contract 9).

    Its reason is '' for ready; its cause is that of server_unhealthy, or
    never_seen. The order of the rules is the contract's.
    """
    known, now = case.known, case.question.now
    link, name = known.connection, json.dumps(known.server.name)
    limit, is_old = 0, False
    ending = _credential_end(link, case.question) if link else ''
    if link is not None and link.state == 'ready' and not ending:
        limit = max_age_of(known.server, case.question.settings, link.ttl)
        is_old = is_stale(link, limit, now)
        if not is_old:
            return passed('Server %s was seen ready %s ago.' % (
                name, format_duration(max(0, now - link.observed_at))))
    sync = _run(case, 'sync', known.server.name)
    if link is None:
        return stopped('server_initializing',
                       'Server %s has never been looked at (%s).' % (
                           name, case.question.places), sync, 'never_seen')
    if link.state == 'pending_auth' or ending:
        fact = ('Server %s asked for a login: %s.' % (name, link.detail)
                if link.state == 'pending_auth' else
                'The credential of server %s %s.' % (name, ending))
        return stopped('oauth_required', fact, 'Set headers.Authorization '
                       'for %s (an entry in our own config) to a ${VAR}, '
                       'then run: %s' % (name, sync[5:]))
    if is_lease_running(link, now):
        return stopped('server_initializing', 'A sync of server %s is under '
                       'way since %s.' % (name, format_time(link.lease_at)),
                       sync)
    if link.lease_until is not None and link.lease_until > (
            link.observed_at or 0):
        return stopped('server_unhealthy', 'The last sync of server %s was '
                       'cut off before it had a result.' % name, sync,
                       'interrupted')
    if link.state == 'error':
        show = _run(case, 'servers show', known.server.name)
        cause = link.cause
        # what no time cures is mended in a file: which one? (contract 9)
        where = (' (%s)' % case.question.places if cause in STUCK_CAUSES
                 else '')
        return stopped('server_unhealthy', 'Server %s: %s%s.' % (
            name, (link.detail or cause).rstrip('.'), where),
            sync if action_of('server_unhealthy', cause) == 'restart'
            else show, cause)
    if is_old:
        return _stale_finding(case, link, limit, sync)
    return stopped('server_initializing', 'Server %s has never been looked '
                   'at (%s).' % (name, case.question.places), sync,
                   'never_seen')


def gate_well_formed(case):
    """Stop an id without a server or a tool half (contract 4)."""
    if case.ref.server:
        return passed('The id names a server and a tool.')
    return stopped('not_found', id_hint(case.ref), 'Write the id as '
                   '<server>:<tool>.')


def gate_configured(case):
    """Stop an id whose server no config file defines (contract 3)."""
    known = case.known
    if known.server:
        return passed('Server %s is configured in %s.' % (
            json.dumps(case.ref.server), known.server.file))
    why = known.skipped or 'No server %s is configured (%s)' % (
        json.dumps(case.ref.server), case.question.places)
    return stopped('server_not_configured', why.rstrip('.') + '.',
                   _run(case, 'servers list'))


def gate_scope(case):
    """Stop a server outside the caller's scope (contract 7)."""
    caller, name = case.question.caller, case.ref.server
    if caller.servers is None or name in caller.servers:
        return passed('The server is in scope.')
    return stopped('server_not_in_scope', 'Profile %s leaves server %s out; '
                   'a session under it sees not_found.' % (
                       json.dumps(caller.profile), json.dumps(name)),
                   'Add %s to profiles.%s.servers (%s), then run: %s' % (
                       json.dumps(name), caller.profile,
                       case.question.places,
                       command_line(case.question.how, 'config check')))


def gate_quarantine(case):
    """Stop a quarantined server, or one whose launch changed.

    That of a lockfile asked for comes first: its remedy lifts all three.
    """
    known, lock = case.known, case.question.lock
    fact = lock and lock_fact(known.server, known.launch, lock)
    if fact:
        return stopped(
            'server_quarantined', fact, _renew(case) if lock.contract else
            'Review it, then run: ' + command_line(
                case.question.how, 'servers approve --lock='
                + shell_word(lock.path), case.ref.server))
    fact = known.quarantined
    if not fact:
        return passed('The server is not quarantined; %s.'
                      % case.known.launch_note)
    return stopped('server_quarantined', fact,
                   _run(case, 'servers approve', case.ref.server))


def gate_enabled(case):
    """Stop a server that is switched off."""
    if not case.known.disabled:
        return passed('The server is enabled.')
    return stopped('server_disabled', case.known.disabled,
                   _run(case, 'servers enable', case.ref.server))


def gate_exists(case):
    """Stop a tool that a ready server does not list (contract 3).

    On a server that is not ready existence is unknowable: the connection
    gates further down answer for it.
    """
    if case.tool is not None:
        return passed('The server lists the tool.')
    state = connection_state(case)
    if state.reason:
        return passed('Unknown: ' + state.fact)
    link = case.known.connection
    why = link.refused.get(case.ref.tool) if link else None
    return stopped('not_found', NOT_FOUND + (' %s.' % why if why else ''),
                   _run(case, 'tools list', case.ref.server))


def gate_denied(case):
    """Stop a tool that the config's tool lists leave out."""
    server = case.known.server
    found = denied_by(server, case.ref.tool)
    if not found or case.tool is None:
        return passed('No tool list of the config denies it.')
    key, file, fact = found
    return stopped('tool_denied_by_config', '%s of server %s in %s %s this '
                   'tool.' % (key, json.dumps(server.name), file, fact),
                   'Change %s in %s, then run: %s' % (
                       key, shell_word(file),
                       command_line(case.question.how, 'config check')))


def gate_blocked(case):
    """Stop a tool that the operator blocked by name."""
    if case.tool is None or case.tool.blocked_at is None:
        return passed('The operator has not blocked it.')
    return stopped('tool_blocked_by_user', 'Blocked with `tools block` since '
                   '%s.' % format_time(case.tool.blocked_at),
                   _run(case, 'tools unblock', case.ref.id))


def is_trusting(case):
    """Tell whether pending and changed gate for this server."""
    return (case.question.settings['quarantine_enabled']
            and case.known.server.trust_mode != 'auto')


def _with_moves(fact, case):
    known, tool = case.known, case.tool
    return ' '.join(filter(None, (fact, textless_fact(known, tool),
                                  restless_fact(known.server, tool))))


def gate_changed(case):
    """Stop a tool that is not the approved one (contract 10).

    A definition that was refused or advertised twice gates always, and so do
    hints riskier than those of a lockfile asked for; another change only in
    trust mode manual, with quarantine on.
    """
    if case.tool is None:
        return passed('No definition to compare.')
    held, lock = _locked(case), case.known.lock
    risks = riskier_hints(held.hints, case.tool.hints) if held else ()
    status, why = tool_status(case.tool)
    if risks and not case.tool.flaw:
        return stopped('tool_changed', 'Hints became riskier than in %s: %s.'
                       % (lock_label(case.question.lock), ', '.join(risks)),
                       _review(case, case.question.lock.path))
    if status != CHANGED:
        ignored = ', '.join(case.tool.ignored)
        return passed('It differs from the approved definition in %s only, '
                      'which ignore_changes leaves out.' % ignored
                      if ignored else 'The definition is not a changed one.')
    if not case.tool.flaw and not is_trusting(case):
        return passed('Changed, but trust is automatic here: %s.' % why)
    approved = case.tool.approved
    since = ' (approved %s)' % format_time(approved.at) if (
        approved and not lock) else ''
    if lock:
        since = ' (lockfile %s)' % lock.path
    return stopped('tool_changed', _with_moves('%s%s%s.' % (
        why[0].upper(), why[1:], since), case),
        _review(case) if lock else _run(case, 'tools diff', case.ref.id))


def gate_pending(case):
    """Stop a tool that came after the baseline and awaits approval."""
    if case.tool is None or tool_status(case.tool)[0] != PENDING:
        return passed('It does not await approval.')
    if not is_trusting(case):
        return passed('New, but trust is automatic here.')
    if case.known.lock:
        return stopped('tool_pending_approval', 'It is not in the lockfile '
                       '%s.' % case.known.lock.path, _review(case))
    return stopped('tool_pending_approval', _with_moves(
        'First listed %s; nobody has approved it since.'
        % format_time(case.tool.first_seen), case),
        _run(case, 'tools diff', case.ref.id))


def gate_pin(case):
    """Stop a tool whose last listed hash is not the pinned one.

    The pin is compared with what is listed, never with what is approved
    (contract 4).
    """
    if not case.ref.pin:
        return passed('No pin was asked for.')
    pin, tool, cause = parse_pin(case.ref.pin), case.tool, ''
    held, word = _locked(case), 'Pinned'
    remedy = _run(case, 'tools show', case.ref.id)
    if held and tool and pin == (held.version, held.hash):
        word = 'Locked in ' + lock_label(case.question.lock)
        remedy = _review(case, case.question.lock.path)
    if pin is None:
        fact, cause = AGENT_TEXTS['pin_form'][0], 'pin_form'
    elif tool is None:
        return passed('No hash to compare the pin with yet.')
    elif not tool.hash:
        fact = 'There is no hash to compare the pin with.'
    elif pin[0] != tool.version:
        cause = 'pin_version'
        fact = ('The pin is of hash version %d, the stored hash of version '
                '%d: the hash version changed and the pin must be renewed.'
                % (pin[0], tool.version))
    elif pin[1] == tool.hash:
        return passed('The pin matches.')
    else:
        fact = '%s is %s, last listed is %s.' % (word, format_hash(
            *pin), format_hash(tool.version, tool.hash))
    return stopped('hash_mismatch', fact, remedy, cause)


def gate_login(case):
    """Stop on a server that asked for a login."""
    state = connection_state(case)
    if state.reason == 'oauth_required':
        return state
    return passed('The server did not ask for a login.')


def gate_healthy(case):
    """Stop on a server whose last look failed, is stale or was cut off."""
    state = connection_state(case)
    if state.reason == 'server_unhealthy':
        return state
    return passed('No failed or stale look is in the way.')


def gate_started(case):
    """Stop on a server that was never seen, or is just being looked at."""
    state = connection_state(case)
    if state.reason == 'server_initializing':
        return state
    return passed(state.fact if not state.reason else
                  'It was looked at, which is all that this gate asks.')


def _filter(case, name, hint, unsafe, is_safe):
    if name not in case.question.filters or case.tool is None:
        return passed('The filter %s is not on.' % name)
    value = case.tool.hints.get(hint)
    if is_safe:
        return passed('%s fits the filter %s.' % (hint, name))
    option = '--' + name.replace('_', '-')
    if value is None:
        return stopped('missing_annotation', 'It has no %s, and %s needs '
                       'one.' % (hint, name), 'Leave out %s, or have the '
                       'server publish %s.' % (option, hint))
    return stopped('policy_filtered', '%s is %s, which %s leaves out.' % (
        hint, json.dumps(unsafe), name), 'Leave out %s, or use another tool.'
        % option)


def gate_read_only(case):
    """Apply read_only_only: readOnlyHint must be true."""
    hints = case.tool.hints if case.tool else {}
    return _filter(case, 'read_only_only', 'readOnlyHint', False,
                   hints.get('readOnlyHint') is True)


def gate_destructive(case):
    """Apply exclude_destructive: read-only, or destructiveHint false."""
    hints = case.tool.hints if case.tool else {}
    return _filter(case, 'exclude_destructive', 'destructiveHint', True,
                   hints.get('readOnlyHint') is True
                   or hints.get('destructiveHint') is False)


def gate_open_world(case):
    """Apply exclude_open_world: openWorldHint must be false."""
    hints = case.tool.hints if case.tool else {}
    return _filter(case, 'exclude_open_world', 'openWorldHint', True,
                   hints.get('openWorldHint') is False)


# The precedence (contract 3): the first gate that stops owns the answer.
# The first two need no server, the rest need one.
GATES = (
    ('well_formed', gate_well_formed), ('configured', gate_configured),
    ('scope', gate_scope), ('quarantine', gate_quarantine),
    ('enabled', gate_enabled), ('exists', gate_exists),
    ('denied', gate_denied), ('blocked', gate_blocked),
    ('changed', gate_changed), ('pending', gate_pending),
    ('pin', gate_pin), ('login', gate_login), ('healthy', gate_healthy),
    ('started', gate_started), ('read_only_only', gate_read_only),
    ('exclude_destructive', gate_destructive),
    ('exclude_open_world', gate_open_world),
)


def _observed_at(case):
    link = case.known.connection
    if (case.question.caller.tier != OPERATOR or link is None
            or link.observed_at is None):
        return None
    return format_time(link.observed_at)


def _unavailable(case, finding):
    """Word a finding for the caller's tier (contract 7)."""
    code = finding.reason
    if case.question.caller.tier != OPERATOR:
        if code in ('server_not_configured', 'server_not_in_scope'):
            code = 'not_found'
        detail, remedy = AGENT_TEXTS.get(finding.cause, AGENT_TEXTS[code])
        if not case.ref.server:
            detail = id_hint(case.ref)
        cause = observed = None
    else:
        detail, remedy = finding.fact, finding.remedy
        observed = _observed_at(case)
        cause = finding.cause if code == 'server_unhealthy' else None
    return Answer(case.ref.id, 'unavailable', code, REASONS[code].retryable,
                  action_of(code, finding.cause) or None, detail, remedy,
                  None, None, observed, cause)


def evaluate(case):
    """Judge one id: (Answer, Finding of the gate that decided)."""
    for _, gate in GATES:
        finding = gate(case)
        if finding.reason:
            return _unavailable(case, finding), finding
    is_operator = case.question.caller.tier == OPERATOR
    digest = format_hash(case.tool.version, case.tool.hash)
    return Answer(case.ref.id, 'ready', None, None, None, None, None,
                  digest if is_operator and case.tool.hash else None, None,
                  _observed_at(case), None), finding


def explain(case):
    """Run every gate: (name, passed | stopped | not reached, fact) each."""
    rows, end = [], False
    for name, gate in GATES:
        if end:
            rows.append((name, 'not reached', '-'))
            continue
        finding = gate(case)
        rows.append((name, 'stopped' if finding.reason else 'passed',
                     finding.fact))
        end = bool(finding.reason) and case.known.server is None
    return rows


def rank_nearest(word, candidates, count=3, cutoff=0.6):
    """Pick the candidates nearest to word, best first, ties by name."""
    import difflib
    matcher, scored = difflib.SequenceMatcher(), []
    matcher.set_seq2(word)
    for other in sorted(set(candidates) - {word}):
        matcher.set_seq1(other)
        if (matcher.real_quick_ratio() >= cutoff
                and matcher.quick_ratio() >= cutoff):
            score = matcher.ratio()
            if score >= cutoff:
                scored.append((-score, other))
    return [other for _, other in sorted(scored)[:count]]


def unique_refs(pairs):
    """Turn (id, pin) pairs into Refs, one per id, at its first place.

    Raises UsageError for no id, or one id with two different pins; an
    absent pin counts as a value (contract 4).
    """
    refs = {}
    for text, pin in pairs:
        ref = parse_id(text, pin or '')
        before = refs.setdefault(ref.id, ref)
        if before.pin != ref.pin:
            raise UsageError('%s is asked for with two pins: %s and %s' % (
                json.dumps(ref.id), before.pin or 'none',
                ref.pin or 'none'))
    if not refs:
        raise UsageError('no tool id was given')
    return list(refs.values())


# ==========================================================================
# 11. lock: lockfiles, and two definitions side by side
# ==========================================================================

LOCK_VERSION = 1
LOCK_DEPTH = 4                  # levels around a definition in a lockfile
LOCK_HINT = ('Restore it from version control, or move it aside and write it '
             'anew with `tools lock`.')


class LockError(ConfigError):
    """A lockfile is not one, or is damaged: nothing is checked by it."""

    def __init__(self, path, why, hint=LOCK_HINT):
        super().__init__('lockfile %s: %s' % (path, why), hint)
        self.path = path


def _lock_table(path, data):
    """Parse a lockfile's bytes: an object with the three keys it has."""
    try:
        text = data.decode('utf-8-sig')
        table = decode_json(text, MAX_DEPTH + LOCK_DEPTH)
    except ValueError as exc:
        why = 'is not JSON: %s' % exc
        if not data.strip():
            why = 'is empty'
        elif re.search(rb'(?m)^(?:<<<<<<<|>>>>>>>)', data):
            why = 'has the marks of a merge conflict'
        raise LockError(path, why) from exc
    refused = find_refused(table)
    if refused:
        raise LockError(path, refused)
    if not is_table(table) or 'lockfileVersion' not in table:
        raise LockError(path, 'has no lockfileVersion: it is not a lockfile '
                        'of preflight.py')
    number = table['lockfileVersion']
    if type(number) is not int or number != LOCK_VERSION:
        raise LockError(path, 'has lockfileVersion %s, this version reads %d'
                        % (json.dumps(number), LOCK_VERSION))
    for key in ('servers', 'tools'):
        if not is_table(table.get(key)):
            raise LockError(path, '%s must be an object' % key)
    if set(table) != {'lockfileVersion', 'servers', 'tools'}:
        raise LockError(path, 'has a key it cannot have: %s' % ', '.join(
            sorted(set(table) - {'lockfileVersion', 'servers', 'tools'})))
    return table


def _locked_launch(path, name, raw):
    if (not is_table(raw) or set(raw) != {'digest', 'launch'}
            or not is_text(raw['launch']) or not is_text(raw['digest'])
            or not re.match(r'[0-9a-f]{64}\Z', raw['digest'])):
        raise LockError(path, 'servers.%s must be {"digest": 64 hex digits, '
                        '"launch": text}' % safe_text(name))
    return raw['digest'], raw['launch']


def _locked_tool(path, name, raw):
    ref, shown = parse_id(name), safe_text(name)
    if not ref.server or name != '%s:%s' % ref[1:3]:
        raise LockError(path, 'tools: %s is not an id' % json.dumps(name))
    if not is_table(raw) or not {'pin', 'hints'} <= set(raw) <= {
            'pin', 'hints', 'definition'}:
        raise LockError(path, 'tools.%s must have pin, hints and perhaps '
                        'definition' % shown)
    pin = parse_pin(raw['pin']) if is_text(raw['pin']) else None
    if pin is None:
        raise LockError(path, 'tools.%s: the pin is not sha256/v<N>:<64 hex '
                        'digits>' % shown)
    if not is_table(raw['hints']) or read_hints(raw['hints']) != raw['hints']:
        raise LockError(path, 'tools.%s: hints must be booleans by the names '
                        'that MCP gives them' % shown)
    text = canonical(raw['definition']) if 'definition' in raw else ''
    if text and sha256(text) != pin[1]:
        raise LockError(path, 'tools.%s: the definition is not the one that '
                        'its pin names' % shown)
    return Locked(pin[0], pin[1], raw['hints'], text)


def parse_lock(path, data):
    """Read a lockfile's bytes into a Lock; raises LockError.

    Whatever is not exactly what render_lock writes is damage: half of a
    lock must not pass for the whole.
    """
    table = _lock_table(path, data)
    launches = {name: _locked_launch(path, name, raw)
                for name, raw in table['servers'].items()}
    tools = {name: _locked_tool(path, name, raw)
             for name, raw in table['tools'].items()}
    if not tools:
        raise LockError(path, 'locks no tool')
    missing = sorted({parse_id(name).server for name in tools}
                     - set(launches))
    if missing:
        raise LockError(path, 'has no launch of server %s' % ', '.join(
            safe_text(name) for name in missing))
    return Lock(path, launches, tools)


def render_lock(lock):
    """Write a Lock as the text of its file: sorted, a fact to a line."""
    tools = {}
    for name, tool in lock.tools.items():
        tools[name] = {'pin': format_hash(tool.version, tool.hash),
                       'hints': tool.hints}
        if tool.text:
            tools[name]['definition'] = json.loads(tool.text)
    used = {parse_id(name).server for name in tools}
    servers = {name: {'digest': digest, 'launch': text}
               for name, (digest, text) in lock.launches.items()
               if name in used}
    return json.dumps({'lockfileVersion': LOCK_VERSION, 'servers': servers,
                       'tools': tools}, indent=2, sort_keys=True) + '\n'


MAX_STEPS = 20000000            # of one diff; what is left is rewritten
LONG_LINE = 72                  # a longer one is compared word by word
NEAR_LINES, NEAR_WORDS = 3, 10  # of what stays, shown around a change
# A word with the blanks behind it. CJK is written without any.
CJK = '\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff'
WORDS = '[%s]\\s*|[^\\s%s]+\\s*|\\s+' % (CJK, CJK)


def _match(old, new, left):
    """Compare two lists as difflib does, as far as the steps that are left
    go: it needs the cube of a length where a server wants it to."""
    import difflib
    matcher = difflib.SequenceMatcher(None, old, new)
    find = matcher.find_longest_match

    def find_bounded(*bounds):
        if left[0] >= 0:
            places = matcher.b2j
            left[0] -= sum(1 + len(places.get(item, ()))
                           for item in old[bounds[0]:bounds[1]])
        return (find(*bounds) if left[0] >= 0
                else difflib.Match(bounds[0], bounds[2], 0))
    matcher.find_longest_match = find_bounded
    return matcher.get_opcodes()


def _opcodes(old, new, left):
    """Compare two lists as difflib does: [steps left] are used up."""
    head, tail, most = 0, 0, min(len(old), len(new))
    while head < most and old[head] == new[head]:
        head += 1
    while tail < most - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head:len(old) - tail], new[head:len(new) - tail]
    codes = [(code[0],) + tuple(place + head for place in code[1:])
             for code in _match(a, b, left)]
    if head:
        codes.insert(0, ('equal', 0, head, 0, head))
    if tail:
        codes.append(('equal', len(old) - tail, len(old), len(new) - tail,
                      len(new)))
    return codes


def _blocks(old, new, least, left):
    """Split two lists into (is_same, old part, new part) in turn.

    Fewer than `least` like items between two changes belong to them.
    """
    codes, out = _opcodes(old, new, left), []
    for n, (tag, a1, a2, b1, b2) in enumerate(codes):
        is_same = tag == 'equal' and (a2 - a1 >= least
                                      or n in (0, len(codes) - 1))
        if out and not is_same and not out[-1][0]:
            out[-1] = (False, out[-1][1] + old[a1:a2],
                       out[-1][2] + new[b1:b2])
        else:
            out.append((is_same, old[a1:a2], new[b1:b2]))
    return out


def _near(items, keep, is_after, is_before):
    """Give the items of a like part that stand near a change: (those
    after one, those before the next); all of them where few are left."""
    head = keep if is_after else 0
    tail = keep if is_before else 0
    if len(items) <= head + tail:
        return items, []
    return items[:head], items[len(items) - tail:]


def _signed(sign, text):
    return [sign + line for line in text.split('\n')]


def _sides(old, new):
    """Show the words that went and those that came."""
    n, most = 0, min(len(old), len(new))
    while n < most and old[-1 - n] == new[-1 - n] and old[-1 - n].isspace():
        n += 1
    old, new = old[:len(old) - n], new[:len(new) - n]
    if not (old and new):       # the blank behind words, not blanks alone
        old, new = old.rstrip(' ') or old, new.rstrip(' ') or new
    return ((_signed('-', old) if old else [])
            + (_signed('+', new) if new else []))


def _word_lines(old, new, place, left):
    """Compare long lines word by word, as hunks of words.

    place: where the new lines stand in the whole text, and of how many
    characters that is. What is mostly rewritten is shown old and new.
    """
    at, size = place
    # With a blank behind it the last word is a word like the others.
    a, b = re.findall(WORDS, old + ' '), re.findall(WORDS, new + ' ')
    blocks = _blocks(a, b, 3, left)
    same = sum(len(its) for is_same, its, _ in blocks if is_same)
    if 2 * same < max(len(a), len(b)):
        return _signed('-', old) + _signed('+', new)
    out = []
    for n, (is_same, before, after) in enumerate(blocks):
        text = ''.join(after)
        at += len(text)
        if not is_same:
            out += _sides(''.join(before), text)
            continue
        head, tail = _near(after, NEAR_WORDS, n > 0, n + 1 < len(blocks))
        last = ''.join(tail)
        rest = '' if tail or len(head) == len(after) else ' [...]'
        out += _signed(' ', ''.join(head).rstrip() + rest) if head else []
        if tail:
            out.append('@character %d of %d' % (at - len(last) + 1, size))
            out += _signed(' ', last.rstrip())
    return out


def _clipped(line):
    return ' ' + (line if len(line) <= LONG_LINE
                  else line[:LONG_LINE - 6].rstrip() + ' [...]')


def _text_lines(old, new, left):
    """Compare two texts: lines that start with '-', '+', ' ', or with '@'
    to say where the next ones stand. None is no text."""
    a, b = ([] if text is None else text.split('\n') for text in (old, new))
    blocks, out, row, at = _blocks(a, b, 1, left), [], 0, 0
    for n, (is_same, before, after) in enumerate(blocks):
        row += len(after)
        if is_same:
            head, tail = _near(after, NEAR_LINES, n > 0,
                               n + 1 < len(blocks))
            out += map(_clipped, head)
            if tail:
                out.append('@line %d of %d' % (row - len(tail) + 1, len(b)))
                out += map(_clipped, tail)
        elif before and after and max(map(len, before + after)) > LONG_LINE:
            out += _word_lines('\n'.join(before), '\n'.join(after),
                               (at, len(new)), left)
        else:
            out += ['-' + line for line in before]
            out += ['+' + line for line in after]
        at += sum(map(len, after)) + len(after)
    return out


def _json_word(value):
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _path(path, key):
    """Write where a value stands, one step further."""
    if isinstance(key, int):
        return '%s[%d]' % (path, key)
    if re.match(r'[A-Za-z0-9_$-]+\Z', key):
        return '%s.%s' % (path, key)
    return '%s[%s]' % (path, _json_word(key))


def _is_plain(value):
    return not isinstance(value, (dict, list))


def _leaves(sign, path, value):
    """Show a value that came or went, a line for each of its leaves."""
    word = _json_word(value)
    if _is_plain(value) or len(word) <= 48 or (
            is_list(value) and all(map(_is_plain, value))):
        return ['%s%s: %s' % (sign, path, word)]
    pairs = sorted(value.items()) if is_table(value) else enumerate(value)
    return [line for key, item in pairs
            for line in _leaves(sign, _path(path, key), item)]


def _beyond(words, others):
    """Split words into those that others lack, and the rest."""
    left, extra, rest = {}, [], []
    for word in others:
        left[word] = left.get(word, 0) + 1
    for word in words:
        (rest if left.get(word) else extra).append(word)
        left[word] = left.get(word, 0) - 1
    return extra, rest


def _member_lines(path, old, new):
    """Compare two lists of plain values as sets that have an order."""
    a, b = list(map(_json_word, old)), list(map(_json_word, new))
    (gone, kept), (came, same) = _beyond(a, b), _beyond(b, a)
    said = ['- ' + word for word in gone] + ['+ ' + word for word in came]
    if kept != same:
        said.append('order changed: %s -> %s' % (_json_word(old),
                                                 _json_word(new)))
    return ['~%s: %s' % (path, ', '.join(said))]


def _list_lines(path, old, new, left, compare):
    """Compare two lists that hold objects, item by item: compare(path,
    old, new, left) does it for two of them."""
    a, b = list(map(canonical, old)), list(map(canonical, new))
    if sorted(a) == sorted(b):
        return ['~%s: order changed' % path]
    out = []
    for tag, a1, a2, b1, b2 in _opcodes(a, b, left):
        if tag == 'replace' and a2 - a1 == b2 - b1:
            for n, m in zip(range(a1, a2), range(b1, b2)):
                out += compare(_path(path, m), old[n], new[m], left)
        elif tag != 'equal':
            for n in range(a1, a2):
                out += _leaves('-', _path(path, n), old[n])
            for n in range(b1, b2):
                out += _leaves('+', _path(path, n), new[n])
    return out


def _value_lines(path, old, new, left):
    """Compare two JSON values: lines of what came, went and changed.

    '~path: old -> new', '+path: value', '-path: value'; below '~path:' a
    long text is compared as one.
    """
    if canonical(old) == canonical(new):
        return []
    if is_table(old) and is_table(new):
        out = []
        for key in sorted(set(old) | set(new)):
            where = _path(path, key)
            if key not in new or key not in old:
                out += (_leaves('-', where, old[key]) if key in old
                        else _leaves('+', where, new[key]))
            else:
                out += _value_lines(where, old[key], new[key], left)
        return out
    if is_list(old) and is_list(new):
        if all(map(_is_plain, old + new)):
            return _member_lines(path, old, new)
        return _list_lines(path, old, new, left, _value_lines)
    if is_text(old) and is_text(new) and (
            max(len(old), len(new)) > LONG_LINE or '\n' in old + new):
        return ['~%s:' % path] + _text_lines(old, new, left)
    if _is_plain(old) and _is_plain(new):
        return ['~%s: %s -> %s' % (path, _json_word(old), _json_word(new))]
    return _leaves('-', path, old) + _leaves('+', path, new)


def diff_definitions(old, new):
    """Compare two canonical texts field by field: (field, lines) each.

    The first character of a line is its sign: '-' went, '+' came, ' '
    stays, '@' says where the next lines stand; '~' is a path whose value
    changed. old is '' for a tool that was never approved, new is '' for
    one that has no text.
    """
    before = json.loads(old) if old else {}
    after = json.loads(new) if new else {}
    out, left = [], [MAX_STEPS]
    for field in changed_fields(old, new):
        a, b = before.get(field), after.get(field)
        if all(value is None or is_text(value) for value in (a, b)):
            lines = _text_lines(a, b, left)
        elif a is None or b is None:
            lines = (_leaves('+', field, b) if a is None
                     else _leaves('-', field, a))
        else:
            lines = _value_lines(field, a, b, left)
        out.append((field, lines))
    return out


def _texts_in(value):
    """Collect the strings of a JSON value, its keys among them."""
    todo, texts = [value], []
    while todo:
        item = todo.pop()
        if is_text(item):
            texts.append(item)
        elif is_table(item):
            for key in sorted(item, reverse=True):
                todo += [item[key], key]
        elif is_list(item):
            todo += reversed(item)
    return texts


def definition_notes(text):
    """Name what hides or misleads in a definition: (field, note) each."""
    table = json.loads(text) if text else {}
    return [(field, note) for field in HASHED if field in table
            for note in odd_notes('\n'.join(_texts_in(table[field])))]


def diff_hints(old, new):
    """Compare hints: lines 'name: old -> new (riskier)'.

    old: None for a tool that was never approved.
    """
    word = {True: 'true', False: 'false', None: 'absent'}
    if old is None:
        return ['%s: %s' % (name, word[new[name]]) for name in HINTS
                if name in new]
    ways = [(line.split(' ')[0], way) for way, lines in (
        (' (riskier)', riskier_hints(old, new)),
        (' (safer)', riskier_hints(new, old))) for line in lines]
    return ['%s: %s -> %s%s' % (
        name, word[old.get(name)], word[new.get(name)],
        dict(ways).get(name, ''))
        for name in HINTS if old.get(name) is not new.get(name)]


CONTRACT_NAME = r'[A-Za-z0-9._-]{1,64}\Z'
# What happened to a required tool: reason -> event, event -> words.
REASON_EVENTS = {
    'tool_changed': 'changed', 'not_found': 'vanished',
    'tool_pending_approval': 'pending', 'oauth_required': 'login_needed',
    'hash_mismatch': 'pin_mismatch', 'server_quarantined': 'quarantined',
    'server_disabled': 'disabled', 'tool_blocked_by_user': 'blocked',
    'tool_denied_by_config': 'denied',
    'server_not_configured': 'not_configured'}
EVENT_WORDS = {
    'pending': 'pending approval', 'login_needed': 'needs a login',
    'pin_mismatch': 'pin no longer fits', 'missing': 'is not there',
    'launch_changed': 'launch changed', 'quarantined': 'is quarantined',
    'disabled': 'is switched off', 'blocked': 'is blocked',
    'denied': 'is denied by the config',
    'not_configured': 'is not configured', 'back': 'is back'}


def read_contract(name, at, body):
    """Read a Contract as contract_text wrote it; raises StoreError."""
    try:
        return Contract(name, at, **json.loads(body))
    except (ValueError, TypeError) as exc:
        raise StoreError('the state database is damaged: contract %s cannot '
                         'be read' % json.dumps(name),
                         'Restore a backup of it.') from exc


def contract_text(contract):
    """Write what the state keeps of a Contract beside name and instant."""
    return compact_json(dict(zip(contract._fields[2:], contract[2:])))


def contract_moves(before, found):
    """Set what is wrong now beside what was: (events, what is wrong).

    before: id -> fault. found: id -> fault, {} where all is well; an id
    that it lacks stays as it was. Only a move is an event: a fault that
    lasts is not told again.
    """
    events, after = [], dict(before)
    for name, fault in found.items():
        old = after.pop(name, {})
        if fault:
            after[name] = fault
        if fault.get('event') != old.get('event'):
            events.append(dict({'id': name}, **(fault or {'event': 'back'})))
    return events, after


def contract_line(name, events):
    """Say what happened to a contract, such as 'job: gh:a changed'."""
    return '%s: %s' % (name, ', '.join('%s %s' % (
        event['id'], EVENT_WORDS.get(event['event'], event['event']))
        for event in events))


# A snapshot carries what is known of servers to another host (state export).
SNAPSHOT_VERSION = 1
SNAPSHOT_DEPTH = 3              # levels around a definition in a snapshot


def _is_hash(value):
    return is_text(value) and bool(re.match(r'[0-9a-f]{64}\Z', value))


def _is_word(value):
    return is_text(value) and is_storable(value)


def _is_name(value):
    return _is_word(value) and bool(value.strip())


def _is_instant(value):
    try:
        return is_text(value) and format_time(parse_time(value)) == value
    except UsageError:
        return False


def _is_hints(value):
    return is_table(value) and read_hints(value) == value


def _or_null(claim):
    return lambda value: value is None or claim(value)


# The shape of each server in a snapshot: a claim, {key: shape} for just
# these keys, [shape], or (claim, shape) for any keys that a claim holds for.
SNAPSHOT_SHAPE = {
    'launch': {'digest': _is_hash, 'text': _is_word, 'known': is_flag,
               'baselined': is_flag},
    'seen': {
        'state': lambda value: value in ('ready', 'pending_auth', 'error'),
        'cause': _is_word, 'detail': is_text, 'since': _is_instant,
        'observed_at': _is_instant, 'listed_at': _or_null(_is_instant),
        'protocol': _or_null(_is_word), 'era': _or_null(_is_word),
        'ttl': lambda value: type(value) is int and 0 <= value <= MAX_TTL_MS,
        'refused': (is_text, is_text), 'expires_at': _or_null(_is_instant)},
    'tools': [{'name': _is_word, 'listed': is_flag, 'hash': _or_null(
        _is_hash), 'hints': _is_hints, 'flaw': _is_word,
        'first_seen': _is_instant, 'last_seen': _is_instant}],
    'approved': [{'name': _is_word, 'hash': _is_hash, 'hints': _is_hints,
                  'at': _is_instant}],
    'blocks': (_is_name, _is_instant),
    'switches': (lambda key: key in ('enabled', 'quarantined'), {
        'value': is_flag, 'over': is_flag, 'at': _is_instant})}
SNAPSHOT = {
    'snapshot_version': lambda value: value == SNAPSHOT_VERSION,
    'hash_version': lambda value: value == HASH_VERSION,
    'exported_at': _is_instant, 'servers': (_is_name, SNAPSHOT_SHAPE),
    'definitions': (_is_hash, is_table), 'sha256': _is_hash}


def _misfit(value, shape, where):
    """Find where a value has not the shape that it must have, or ''."""
    if isinstance(shape, (dict, tuple)):
        keys, is_good = shape, is_table(value)
        if isinstance(shape, dict):
            is_good = is_good and set(value) == set(shape)
        else:
            keys = value if is_good else ()
            is_good = is_good and all(map(shape[0], value))
        parts = [(key, value[key], shape[key] if isinstance(shape, dict)
                  else shape[1]) for key in keys] if is_good else []
    elif isinstance(shape, list):
        is_good = is_list(value)
        parts = [(str(n), item, shape[0]) for n, item in enumerate(
            value if is_good else ())]
    else:
        is_good, parts = shape(value), []
    for key, item, inner in parts:
        found = _misfit(item, inner, '%s.%s' % (where, key))
        if found:
            return found
    return '' if is_good else where


def _snapshot_flaw(table):
    """Say how a snapshot contradicts itself, '' when it does not."""
    texts = table['definitions']
    for digest, text in texts.items():
        if sha256(canonical(text)) != digest or (
                definition_text(text) != canonical(text)):
            return 'definition %s is not the one of that hash' % digest
    for name, server in table['servers'].items():
        for key in ('tools', 'approved'):
            rows = server[key]
            if len({row['name'] for row in rows}) != len(rows):
                return '%s of server %s has a tool twice' % (key, name)
            for row in rows:
                shown = json.dumps('%s:%s' % (name, row['name']))
                flaw = row.get('flaw')
                if bool(row['hash']) == bool(flaw):
                    return '%s has both a hash and a flaw, or none' % shown
                if row['hash'] and texts.get(row['hash'], {}).get(
                        'name') != row['name']:
                    return 'the definition of %s is not in it' % shown
    return ''


def snapshot_digest(table):
    """Digest all that a snapshot says but the digest itself."""
    return sha256(canonical({key: value for key, value in table.items()
                             if key != 'sha256'}))


def read_snapshot(path, data):
    """Read the bytes of a snapshot; raises UsageError for any damage."""
    try:
        table = decode_json(data.decode('utf-8-sig'),
                            MAX_DEPTH + SNAPSHOT_DEPTH)
        why = find_refused(table)
    except ValueError as exc:
        why = 'is not JSON: %s' % exc if data.strip() else 'is empty'
    if not why and (not is_table(table) or 'snapshot_version' not in table):
        why = 'has no snapshot_version: `state export` did not write it'
    for key, ours in (('snapshot_version', SNAPSHOT_VERSION),
                      ('hash_version', HASH_VERSION)):
        if not why and (type(table.get(key)) is not int
                        or table[key] != ours):
            why = ('has %s %s, this version reads %d; export and import with '
                   'the same preflight.py' % (
                       key, safe_text(table.get(key)), ours))
    if not why and table.get('sha256') != snapshot_digest(table):
        why = 'is damaged: its SHA-256 is not that of what it says'
    if not why:
        where = _misfit(table, SNAPSHOT, 'top')
        why = where and 'has at %s what cannot stand there' % safe_text(
            where)
    why = why or safe_text(_snapshot_flaw(table))
    if why:
        raise UsageError('snapshot %s: %s' % (path, why), 'Nothing was '
                         'changed. Export it anew with `state export`.')
    return table


# ==========================================================================
# 12. report: values in, text out
# ==========================================================================


def answer_fields(answer):
    """Give the keys of one result in the contract's order, no nulls."""
    return {key: value for key, value in zip(answer._fields, answer)
            if value is not None}


def report_data(report):
    """Give the data object of contract 5, in its key order."""
    data = {'verdict': report.verdict, 'checked_at': report.checked_at}
    if report.waited_ms is not None:
        data['waited_ms'] = report.waited_ms
    data['tools'] = [answer_fields(answer) for answer in report.answers]
    return data


def render_json(value):
    """Write JSON with indent 2, ASCII, keys in their order."""
    return json.dumps(value, indent=2) + '\n'


def _yaml_leaf(value):
    if isinstance(value, str):
        return re.sub('[^\x20-\x7e]', escape_char,
                      json.dumps(value, ensure_ascii=False))
    if isinstance(value, float) and '.' not in repr(value):
        return repr(value).replace('e', '.0e')
    return json.dumps(value)


def _yaml_key(key):
    words = ('yes', 'no', 'on', 'off', 'true', 'false', 'null')
    is_plain = re.match(r'[a-z][a-z_]+\Z', key) and key not in words
    return key if is_plain else _yaml_leaf(key)


def _yaml_lines(value, pad):
    is_map = isinstance(value, dict)
    for key, item in value.items() if is_map else enumerate(value):
        head = pad + (_yaml_key(key) + ':' if is_map else '-')
        if not item or not isinstance(item, (dict, list, tuple)):
            yield head + ' ' + _yaml_leaf(item)
            continue
        lines = list(_yaml_lines(item, pad + '  '))
        if is_map:
            yield head
        else:
            lines[0] = head + lines[0][len(pad) + 1:]
        for line in lines:
            yield line


def render_yaml(value):
    """Write YAML that every loader, 1.1 or 1.2, reads back as the JSON.

    Strings are always double-quoted: no word can turn into a boolean, a
    number or a date.
    """
    if not value or not isinstance(value, (dict, list, tuple)):
        return _yaml_leaf(value) + '\n'
    return '\n'.join(_yaml_lines(value, '')) + '\n'


def text_width(text):
    """Count the terminal columns of a text."""
    if all(ord(char) < 0x300 for char in text):
        return len(text)
    import unicodedata
    return sum(0 if unicodedata.category(c) in ('Mn', 'Me') else
               2 if unicodedata.east_asian_width(c) in 'WF' else 1
               for c in text)


def _cut_word(word, width):
    """Cut a word that is longer than a line, in one walk: a server may
    send a megabyte without a blank."""
    parts, used = [''], 0
    for char in word:
        size = text_width(char)
        if used + size > width and parts[-1]:
            parts.append('')
            used = 0
        parts[-1] += char
        used += size
    return parts


def wrap_text(text, width):
    """Break a text at blanks into lines of so many columns."""
    lines, used = [''], 0
    for word in re.findall('[^ ]+ *| +', text):
        size = text_width(word.rstrip(' '))
        if used and used + size > width:
            lines[-1] = lines[-1].rstrip(' ')
            lines.append('')
            used = 0
        if size > width:        # longer than a line, such as a URL
            bare = word.rstrip(' ')
            *parts, last = _cut_word(bare, width)
            lines[-1:] = parts + ['']
            word = last + word[len(bare):]
        lines[-1] += word
        used += text_width(word)
    return lines


def _fit_columns(sizes, width):
    """Count the columns that fit in a line of a terminal, at least one."""
    used, count = -2, 0
    for size in sizes:
        used += 2 + size
        if used > width:
            break
        count += 1
    return max(count, 1)


def render_table(heads, rows, width=0):
    """Write columns two spaces apart, the last one unpadded.

    Cells are made safe; an empty cell is '-'. width: of the terminal that
    shows it, 0 for none; there the columns that do not fit stand below
    their row, where a terminal would break them in the middle of a word.
    """
    table = [[safe_text(cell) or '-' for cell in row]
             for row in [heads] + [list(row) for row in rows]]
    sizes = [max(map(text_width, column)) for column in zip(*table)]
    count = _fit_columns(sizes, width) if width else len(sizes)
    lines = []
    for row in table:
        cells = [cell + ' ' * (size - text_width(cell))
                 for cell, size in zip(row, sizes)]
        lines.append('  '.join(cells[:count - 1] + [row[count - 1]]))
        if set(row[count:]) - {'-'}:
            lines += ['    ' + line for line in wrap_text(
                '  '.join(row[count:]), max(width - 4, 20))]
    return '\n'.join(lines) + '\n'


def _yes(value):
    return '' if value is None else 'true' if value else 'false'


def render_report(report, width):
    """Write a Report as the table of contract 6.

    On a terminal the remedies and suggestions follow as a second block.
    width: of the terminal, 0 for none.
    """
    rows = [(a.id, a.status, a.reason or '', _yes(a.retryable),
             a.action or '', a.detail or '') for a in report.answers]
    text = render_table(('ID', 'STATUS', 'REASON', 'RETRYABLE', 'ACTION',
                         'DETAIL'), rows, width)
    text += 'VERDICT: %s (exit %d)\n' % (report.verdict,
                                         EXIT_CODES[report.verdict])
    if not width:
        return text
    for answer in report.answers:
        if answer.remediation:
            text += '\n%s\n  %s\n' % (safe_text(answer.id),
                                      safe_text(answer.remediation))
        if answer.did_you_mean:
            text += '  Did you mean: %s\n' % ', '.join(
                map(safe_text, answer.did_you_mean))
    return text


def record_line(activity):
    """Say what a check found, as one readable phrase (contract 8).

    A record that another service tells may lack what ours have.
    """
    data, kind = activity.get('metadata'), activity.get('type')
    needed = {'preflight': 'ids_count', 'health': 'overall'}.get(kind)
    if not is_table(data) or needed and needed not in data:
        return ' '.join(filter(is_text, map(activity.get, (
            'status', 'server_name', 'tool_name'))))
    if kind == 'health':
        return '%s: %s' % (data['overall'], ', '.join(
            '%s %s (%s)' % (row['server'], row['state'], row['reason'])
            for row in data['servers']))
    if kind == 'contract' and 'server' in data:
        return contract_line(data['contract'], data['tools'])
    if kind != 'preflight':
        what = (data.get('server') or data.get('token')
                or data.get('contract') or ', '.join(data.get('tools') or ()))
        return ('%s %s' % (data.get('action') or data.get('state')
                           or activity['status'], what)).strip()
    text = '%s (%s)' % ('ready' if activity['status'] == 'success'
                        else 'blocked', plural(data['ids_count'], 'id'))
    if data.get('contract'):
        text = '%s: %s' % (data['contract'], text)
    parts = ['%s x%d' % (code, count) if count > 1 else code
             for code, count in data['reasons'].items()]
    return text + (': ' + ', '.join(parts) if parts else '')


def render_health(report, code, width):
    """Write a health report: rows, what to do, and the overall line.

    code: the exit code that the report is worth. width: of the terminal,
    0 for none.
    """
    text = render_table(
        ('SERVER', 'STATE', 'REASON', 'CREDENTIAL', 'EVIDENCE'),
        [(row['server'], row['state'], row['reason'],
          row['credential_source'], '[%s]' % row['evidence'])
         for row in report['servers']], width)
    for row in report['servers']:
        text += '\nWhat to do about %s (%s):\n' % (
            safe_text(row['server']), row['state'])
        text += ''.join('  - %s\n' % safe_text(step)
                        for step in row['what_to_do'])
    return text + '\nOVERALL: %s (exit %d)\n' % (report['overall'], code)


def cell_text(value):
    """Write a value as a table cell."""
    if value is None or value == [] or value == {}:
        return ''
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, list):
        return ', '.join(map(cell_text, value))
    if isinstance(value, dict):
        return ' '.join('%s=%s' % (key, cell_text(item))
                        for key, item in value.items())
    return str(value)


def render_rows(rows, columns, width):
    """Write rows (dicts) as a table of some of their keys."""
    heads = [name.upper().replace('_', ' ') for name in columns]
    return render_table(heads, [[cell_text(row.get(name))
                                 for name in columns] for row in rows],
                        width)


def render_fields(row):
    """Write one dict, a key a line.

    Text of several lines is indented below its key; only where it may have
    them is a line break one, or a name could forge a field.
    """
    width, lines = max(map(len, row)) + 2, []
    for key, value in row.items():
        if isinstance(value, (dict, list)) and key == 'definition':
            value = json.dumps(value, indent=2, ensure_ascii=False)
        is_long = key in ('definition', 'stderr')
        text = safe_text(cell_text(value).rstrip('\n') if is_long
                         else cell_text(value), '\n' if is_long else '')
        text = text or '-'
        if '\n' in text:
            lines.append(key + ':')
            lines += ['  ' + line for line in text.split('\n')]
        else:
            lines.append((key + ':').ljust(width) + text)
    return '\n'.join(lines) + '\n'


def _diff_lines(lines):
    """Make signed lines fit to be judged at 79 columns: what hides shows,
    blanks at the end too, and each line has the sign of its side."""
    for line in lines:
        sign, text = line[:1], reveal(line[1:])
        if sign in '+-':
            bare = text.rstrip(' ')
            text = bare + '\\x20' * (len(text) - len(bare))
        first, *more = wrap_text(text, 75)
        yield '  %s%s' % (sign, first)
        for part in more:
            yield '  %s  %s' % (sign, part)


def _field_head(part):
    sizes = [len(part[key]) if isinstance(part.get(key), str) else 0
             for key in ('old', 'new')]
    return '%s%s:' % (part['field'], ' (%d -> %d characters)' % tuple(sizes)
                      if min(sizes) > 200 else '')


def render_diff(diff):
    """Write what approving a tool would trust, and the line that does."""
    # What is foreign never begins a line, or it could forge one of ours.
    lines = ['\n  '.join(wrap_text('%s: %s%s' % (
        reveal(diff['id']), diff['status'],
        ' (%s)' % safe_text(diff['why']) if diff['why'] else ''), 77))]
    for word, text in (('approved: ', diff['approved_hash'] or 'never'),
                       ('listed:   ', diff['hash'] or 'no hash')):
        lines.append(word + text if len(text) < 70
                     else '%s\n  %s' % (word.rstrip(), text))
    if not diff.get('listed', True):
        lines.append('not listed now: there is nothing to approve')
    if diff.get('note'):
        lines.append('\n  '.join(wrap_text('note: ' + safe_text(
            diff['note']), 77)))
    for part in diff['fields']:
        lines.append(_field_head(part))
        lines += _diff_lines(part['lines'])
    if diff['hints']:
        lines += ['hints:'] + ['  ' + line for line in diff['hints']]
    if not diff['fields'] and not diff['hints'] and diff['hash']:
        lines.append('no difference')
    if diff.get('odd_characters'):
        lines.append('characters that hide or look like others:')
        lines += ['  ' + '\n    '.join(wrap_text(safe_text(note), 75))
                  for note in diff['odd_characters']]
    if diff['token']:
        lines.append('review token: ' + diff['token'])
    if diff['approve'] and (diff['status'] != 'approved'
                            or diff.get('ignored')):
        lines.append('approve: ' + safe_text(diff['approve']))
    return '\n'.join(lines) + '\n'


def render_lock_check(found, width):
    """Write a check by a lockfile, then what drifted and what is new."""
    text = render_report(found.report, width)
    for row in found.drift:
        text += '\ndrift: '
        if row['token']:
            text += render_diff(row)
            continue
        lines = ['%s: %s%s' % (row['id'], row['status'], ' (%s)' % row['why']
                               if row['why'] else '')]
        lines += ['  ' + line for part in row['fields']
                  for line in part['lines']]
        lines += ['approve: ' + row['approve']] if row['approve'] else []
        text += '\n'.join(map(safe_text, lines)) + '\n'
    if found.new:
        text += '\nnot in the lockfile:\n' + render_rows(
            found.new, ('id', 'status', 'hash'), width)
    return text


def render_review(found, width):
    """Write what a walk through all that awaits review came to."""
    text = ''
    if found['tools']:
        text = render_rows(found['tools'], ('result', 'id'), width)
        said = [row['result'] for row in found['tools']]
        text += ', '.join('%d %s' % (said.count(word), word)
                          for word in dict.fromkeys(said)) + '\n'
    elif not found['servers']:
        text = 'nothing awaits review\n'
    for row in found['servers']:
        text += '\n%s\n  approve it: %s\n' % (
            '\n  '.join(wrap_text(safe_text(row['why']), 77)),
            safe_text(row['approve']))
    return text


def render_check(found):
    """Write the findings of `config check`."""
    lines = ['error: ' + text for text in found['errors']]
    lines += ['warning: ' + text for text in found['warnings']]
    lines.append('%s, %s, %s' % (plural(found['servers'], 'server'),
                                 plural(len(found['errors']), 'error'),
                                 plural(len(found['warnings']), 'warning')))
    return '\n'.join(safe_text(line) for line in lines) + '\n'


def render_import(found, width):
    """Write what `state import` did, a line for each server."""
    rows = [dict(row, approved=len(row['approved']),
                 blocked=len(row['blocked'])) for row in found['servers']]
    return render_rows(rows, ('server', 'result', 'tools', 'approved',
                              'blocked', 'observed_at', 'stale_at',
                              'detail'), width)


def render_doctor(found, width):
    """Write the findings of `doctor`, with a remedy below each problem.

    A terminal's lines are broken at blanks, but for the remedies: they are
    pasted.
    """
    lines = []
    for row in found['checks']:
        text = safe_text('%s: %s' % (row['check'], row['detail']))
        first, *more = wrap_text(text, max(width - 9, 20)) if width else [
            text]
        lines.append('%-8s %s' % ('ok' if row['ok'] else 'PROBLEM', first))
        lines += [' ' * 9 + line for line in more]
        if row['remedy']:
            lines.append(' ' * 9 + safe_text(row['remedy']))
    bad = [row for row in found['checks'] if not row['ok']]
    lines.append('%s, %s' % (plural(len(found['checks']), 'check'),
                             plural(len(bad), 'problem')))
    return '\n'.join(lines) + '\n'


def render_verify(found):
    """Write the findings of `activity verify`."""
    lines = ['problem: ' + text for text in found['problems']]
    lines.append('%s, %s, head %s' % (
        plural(found['records'], 'record'), 'intact' if found['ok']
        else plural(len(found['problems']), 'problem'),
        found['head'] or '-'))
    return '\n'.join(lines) + '\n'


def render_activities(found, width):
    """Write audit records, a line each (contract 8)."""
    rows = [dict(row, time=row.get('timestamp'), what=record_line(row))
            for row in found['activities']]
    text = render_rows(rows, ('time', 'id', 'type', 'actor', 'request_id',
                              'what'), width)
    return text + '%d of %s\n' % (len(rows), plural(found['total'],
                                                    'record'))


# ==========================================================================
# == below this line the program touches the world ==
# ==========================================================================

# ==========================================================================
# 14. world
# ==========================================================================

World = namedtuple('World', (
    'env how home configs dialect workspace now clock sleep random stop '
    'ask tell width said ca_file url request_id'))
World.__new__.__defaults__ = ('', '', '')
World.__doc__ = """What a command may know of its surroundings.

env: dict. how: the command that started this run, for remedies. home: the
state directory. configs: paths as named, () for the state's own file.
now() -> ms; clock() -> monotonic seconds; random(n) -> bytes. stop: signal
numbers that arrived. ask(question) -> bool, ask(question, choices) -> one
of them, whose initials differ; tell(line) writes to stderr. width: columns
of the terminal that stdout is, 0 when it is none. said: set of what is told
once in a run, and was (tell_once).
ca_file: certificates to trust besides the system's, '' for none. url: the
service to ask instead of the state, '' for none. request_id: that the audit
records of this run carry, '' for none.
"""


def tell_once(world, line):
    """Tell what holds for all of a run, unless this run has told it."""
    if line not in world.said:
        world.said.add(line)
        world.tell(line)


class Deferral:
    """While entered a signal only asks to stop, through world.stop.

    Raised in the middle of a start it would leave a child that nobody
    knows. On leaving, it is raised.
    """

    def __init__(self, world):
        self.stop, self.was = world.stop, False

    def __enter__(self):
        self.was, self.stop.is_deferred = self.stop.is_deferred, True

    def __exit__(self, kind, exc, trace):
        self.stop.is_deferred = self.was
        if exc is None and self.stop:
            raise Interrupted(self.stop[0])


OUR_CONFIG = 'mcp_config.json'
NETWORK_FILE_SYSTEMS = ('nfs', 'nfs4', 'cifs', 'smb3', 'smbfs', '9p', 'afs',
                        'fuse.sshfs', 'lustre', 'gpfs', 'ceph', 'glusterfs',
                        'fuse.glusterfs', 'beegfs', 'ocfs2')


def state_home(flag, env):
    """Find the state directory; raises StoreError when there is none.

    Order: --home, PREFLIGHT_HOME, STATE_DIRECTORY (systemd), the XDG state
    directory, ~/.preflight. Never a literal ~, never a relative guess.
    """
    for given in (flag, env.get('PREFLIGHT_HOME'),
                  env.get('STATE_DIRECTORY', '').split(':')[0]):
        if given and given[0] == '~':
            raise StoreError('the state directory %s begins with a ~ that '
                             'no shell has expanded' % given,
                             'Write the path in full.')
        if given:
            return os.path.abspath(given)
    xdg = env.get('XDG_STATE_HOME', '')
    if os.path.isabs(xdg):
        return os.path.join(xdg, 'preflight')
    home = env.get('HOME') or env.get('USERPROFILE') or ''
    if os.path.isabs(home):
        return os.path.join(home, '.preflight')
    raise StoreError('there is no state directory: HOME is not set',
                     'Pass --home DIR or set PREFLIGHT_HOME.')


def os_reason(exc):
    """Say why the system refused, without numbers or paths."""
    return (exc.strerror or str(exc)).lower()


def make_home(home):
    """Create the state directory, 0700 whatever the umask.

    So are the directories above it that are not there.
    """
    if os.path.isdir(home):
        return
    make_home(os.path.dirname(home))
    try:
        os.mkdir(home, 0o700)
        os.chmod(home, 0o700)
    except FileExistsError as exc:
        if not os.path.isdir(home):
            raise StoreError('the state directory %s is not a directory'
                             % home) from exc
    except OSError as exc:
        raise StoreError('cannot make the state directory %s: %s' % (
            home, os_reason(exc)), 'Pass --home DIR.') from exc


def open_private(path):
    """Open a file to read and write; made here, it is 0600.

    Whatever the umask is, and without a moment in which others may read.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, 'O_CLOEXEC', 0)
    try:
        file = os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)
    if hasattr(os, 'fchmod'):
        os.fchmod(file, 0o600)
    return file


def read_bytes(path, limit=MAX_CONFIG_BYTES):
    """Read a config file whole; raises ConfigError naming it.

    One byte more than limit says that it is longer.
    """
    try:
        with open(path, 'rb') as file:
            return file.read(limit + 1)
    except OSError as exc:
        raise ConfigError('cannot read config %s: %s' % (
            path, os_reason(exc))) from exc


def read_text(path):
    """Read a small file that a config names: its text, None if it is not
    there or no text."""
    try:
        if os.path.isfile(path) and os.path.getsize(path) <= MAX_NAMED_BYTES:
            return read_bytes(path).decode('utf-8-sig')
    except (ConfigError, OSError, UnicodeDecodeError):
        pass
    return None


def replace_file(path, data, ready=None, mode=None):
    """Write a file whole or not at all; a link to it stays.

    ready() is called when the new bytes are on the disk, before they take
    the place of the old. mode: of a file that is private; None keeps the
    mode of the file that is there. Raises PreflightError.
    """
    real = os.path.realpath(path)
    fresh, is_made = '%s.%d.new' % (real, os.getpid()), False
    if os.path.exists(real) and not os.path.isfile(real):
        raise PreflightError('cannot write %s: it is not a regular file'
                             % path)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                               mode or 0o666), 'wb') as file:
            is_made = True
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is None and os.path.exists(real):
            os.chmod(fresh, os.stat(real).st_mode & 0o7777)
        if ready:
            ready()
        os.replace(fresh, real)
    except OSError as exc:
        raise PreflightError('cannot write %s: %s' % (
            path, os_reason(exc))) from exc
    finally:
        if is_made and os.path.exists(fresh):
            os.unlink(fresh)


def file_system_of(path):
    """Name the type of file system a directory is on, '' if unknown."""
    path, best = os.path.realpath(path), ('', '')
    try:
        with open('/proc/self/mounts', encoding='utf-8',
                  errors='replace') as mounts:
            for line in mounts:
                point, kind = (line.split(' ') + ['', ''])[1:3]
                point = point.replace('\\040', ' ')
                inside = path == point or path.startswith(
                    point.rstrip('/') + '/')
                if inside and len(point) >= len(best[0]):
                    best = (point, kind)
    except OSError:
        pass
    return best[1]


class FileLock:
    """One exclusive lock on a file, held while entered.

    Every write transaction and every close of a connection happens under
    it: SQLite 3.7.0 to 3.51.2 can lose committed pages when two checkpoints
    overlap a commit (sqlite.org/wal.html), and many short processes that
    checkpoint on close are the shape that hits it.
    """

    def __init__(self, path, world):
        self.path, self.world, self.file = path, world, None
        self.is_held = False

    def take_now(self):
        """Take the lock if it is free; tells whether it is held.

        Entering it then finds it taken.
        """
        try:
            if self.file is None:
                self.file = open_private(self.path)
        except OSError as exc:
            raise StoreError('cannot open %s: %s' % (
                self.path, os_reason(exc))) from exc
        self.is_held = self.is_held or self._take()
        return self.is_held

    def __enter__(self):
        end = self.world.clock() + BUSY_TIMEOUT_MS / 1000
        pause = 0.0005
        while not self.take_now():
            if self.world.clock() > end:
                raise StoreBusy('the state database is busy: %s was held '
                                'for %s' % (self.path, format_duration(
                                    BUSY_TIMEOUT_MS)))
            self.world.sleep(pause)
            pause = min(pause * 2, 0.004)
        return self

    def _take(self):
        try:
            if os.name == 'nt':
                import msvcrt
                msvcrt.locking(self.file, msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            return False
        except OSError as exc:
            raise StoreError('cannot lock %s: %s' % (
                self.path, os_reason(exc))) from exc

    def __exit__(self, *exc):
        self.is_held = False
        if os.name == 'nt':
            import msvcrt
            msvcrt.locking(self.file, msvcrt.LK_UNLCK, 1)
        else:
            import fcntl
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self):
        """Let go of the file itself."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


# ==========================================================================
# 15. store: preflight.db in the state directory. SQL stands nowhere else.
#     Three things are kept apart: seen (server, tool), approved (launch,
#     approved), decided (block, switch). Beside them activity and meta.
# ==========================================================================

SCHEMA = """
create table meta(key text primary key, value) without rowid;
create table server(id integer primary key, name text not null,
  file text not null, launch text, state text not null default '',
  cause text, detail text, since integer, observed_at integer,
  listed_at integer, protocol text, era text, ttl integer, stderr text,
  refused text, lease_at integer, lease_until integer, lease_launch text,
  lease_owner text, expires_at integer, unique(name, file));
create table tool(server integer not null, name text not null,
  listed integer not null, hash text not null, version integer not null,
  hints text not null, flaw text not null, changes integer not null,
  first_seen integer not null, last_seen integer not null,
  primary key(server, name)) without rowid;
create index tool_name on tool(name, server, listed);
create table definition(hash text primary key, text text not null);
create table launch(server text not null, digest text not null,
  text text not null, how text not null, at integer not null,
  baselined integer not null, primary key(server, digest)) without rowid;
create table approved(server text not null, launch text not null,
  name text not null, hash text not null, version integer not null,
  hints text not null, at integer not null, how text not null,
  primary key(server, launch, name)) without rowid;
create table block(server text not null, name text not null,
  at integer not null, primary key(server, name)) without rowid;
create table switch(server text not null, file text not null,
  key text not null, value integer not null, over integer not null,
  at integer not null, primary key(server, file, key)) without rowid;
create table activity(seq integer primary key, at integer not null,
  request_id text not null, type text not null, status text not null,
  body text not null, hash text not null);
create table token(name text primary key, digest text not null unique,
  servers text, profile text, required text not null, at integer not null,
  expires_at integer) without rowid;
create index activity_at on activity(at);
create index activity_request on activity(request_id);
"""

# What makes each later schema from the one before it. A new database runs
# them all, so that an upgraded one cannot differ from it.
UPGRADES = (
    # 2: how often a tool was listed (its changes are from now on a bit for
    # each of the last looks), the last probe, contracts
    """
alter table tool add column looks integer not null default 0;
update tool set changes=0;
alter table server add column probe text;
create table contract(name text primary key, at integer not null,
  body text not null) without rowid;
""",
)


ASIDE = ('Restore a backup of it. If there is none: move it aside, with what '
         'stands beside it (-wal, -shm). All approvals, blocks and records '
         'go with it, and the next sync trusts what it finds: check by a '
         'lockfile or pins then.')


def _disk_error(text, path):
    """Word what a disk does to the database: is there no room?"""
    import shutil
    place, is_full = os.path.dirname(path), 'is full' in text
    try:
        free = shutil.disk_usage(place).free
        is_full = is_full or free < MIN_FREE_BYTES
        text += '; %s has %d MB free' % (place, free >> 20)
    except OSError:
        pass                    # the error itself says enough
    return StoreError(
        'the state database %s failed: %s' % (path, text),
        'Make room there, or pass --home DIR.' if is_full else 'The disk '
        'fails, or a quota is used up: see what the system logs, or pass '
        '--home DIR.')


def store_error(exc, path):
    """Translate an sqlite3 error into one sentence."""
    text = str(exc)
    if 'locked' in text or 'busy' in text:
        return StoreBusy('the state database %s is busy' % path)
    if re.search('malformed|not a database|no such (table|column)', text):
        return StoreError(
            'the state database %s is damaged: %s' % (path, text),
            ASIDE)
    if 'readonly' in text or 'unable to open' in text:
        return StoreError('the state database %s cannot be written: %s'
                          % (path, text))
    if 'disk I/O' in text or 'is full' in text:
        return _disk_error(text, path)
    return StoreError('the state database %s failed: %s' % (path, text))


class Transaction:
    """What Store.write() and Store.read() enter."""

    def __init__(self, store, is_write):
        self.store, self.is_write = store, is_write

    def __enter__(self):
        import sqlite3
        con = self.store.connect()
        if self.is_write:
            self.store.lock.__enter__()
        try:
            con.execute('begin immediate' if self.is_write else 'begin')
            self.store.check_schema()
        except BaseException as exc:
            self._roll_back()
            if isinstance(exc, sqlite3.Error):
                raise store_error(exc, self.store.path) from exc
            raise
        return con

    def _roll_back(self):
        import sqlite3
        try:
            if self.store.con.in_transaction:
                self.store.con.execute('rollback')
        except sqlite3.Error:
            pass                # SQLite did, or will when it is closed
        finally:
            if self.is_write:
                self.store.lock.__exit__()

    def __exit__(self, kind, exc, trace):
        import sqlite3
        try:
            if exc is None:
                self.store.con.execute('commit')
        except sqlite3.Error as err:
            raise store_error(err, self.store.path) from err
        finally:
            self._roll_back()
        if isinstance(exc, sqlite3.Error):
            raise store_error(exc, self.store.path) from exc


def load_meta(con, key):
    """Load one value of the meta table, None when it is not there."""
    row = con.execute('select value from meta where key=?',
                      (key,)).fetchone()
    return row[0] if row else None


def save_meta(con, key, value):
    """Save one value of the meta table."""
    con.execute('insert or replace into meta values(?, ?)', (key, value))


def bump_generation(con):
    """Move the mark that says the state (not the audit) has changed."""
    con.execute("update meta set value=value+1 where key='generation'")


def load_definition(con, digest):
    """Load a canonical definition by its hash, '' when there is none."""
    row = con.execute('select text from definition where hash=?',
                      (digest,)).fetchone()
    return row[0] if row else ''


def rehash_stored(con):
    """Bring hashes of an earlier version up, seen and approved alike.

    So a definition whose text is equal stays approved (contract 10). One
    whose text is not there keeps its hash and version: what is listed is
    then changed, until the next look.
    """
    found = {'': ''}            # a refused definition has no hash
    for (digest,) in con.execute(
            'select hash from tool where version<:now union select hash '
            'from approved where version<:now', {'now': HASH_VERSION}
    ).fetchall():
        fresh = rehash(digest, load_definition(con, digest))
        if fresh:
            found[digest] = fresh[0]
            con.execute('insert or ignore into definition values(?, ?)',
                        fresh)

    def rehashed(digest):       # Python 3.6 would hash found with its get
        return found.get(digest)
    con.create_function('rehashed', 1, rehashed)
    for table in ('tool', 'approved'):
        con.execute('update %s set hash=rehashed(hash), version=:now where '
                    'version<:now and rehashed(hash) is not null' % table,
                    {'now': HASH_VERSION})
    con.execute("update tool set flaw='the way to hash changed, and its "
                "definition is not stored; look again' where version<?",
                (HASH_VERSION,))


class Store:
    """The state of one directory, through one connection.

    `with store.write() as con` is one locked transaction that commits at
    its end or rolls back; `with store.read() as con` is one snapshot.
    Errors of SQLite come out as StoreError.
    """

    def __init__(self, home, world, busy_ms=None):
        make_home(home)
        if os.name != 'nt' and os.stat(home).st_mode & 0o1002 == 2:
            tell_once(world, 'warning: everybody may write to the state '
                      'directory %s, so its approvals are anybody\'s: chmod '
                      '700 %s' % (home, shell_word(home)))
        self.home, self.world = home, world
        self.busy_ms = BUSY_TIMEOUT_MS if busy_ms is None else busy_ms
        self.path = os.path.join(home, 'preflight.db')
        self.lock = FileLock(os.path.join(home, 'store.lock'), world)
        self.con, self.is_checked, self.inode = None, False, None

    def __enter__(self):
        return self

    def __exit__(self, kind, exc, trace):
        try:
            self.close()
        except StoreError:
            if exc is None:
                raise           # else what ended us says more

    def connect(self):
        """Open the database, creating it where there is none."""
        import sqlite3
        if self.is_checked:
            return self.con
        try:
            if self.con is None:
                self._be_there()
                self.inode = os.stat(self.path).st_ino
                self.con = self._open(self.path)
            if self._is_older():
                self._upgrade()
        except sqlite3.Error as exc:
            raise store_error(exc, self.path) from exc
        except OSError as exc:
            raise StoreError('cannot open %s: %s' % (
                self.path, os_reason(exc))) from exc
        return self.con

    def _be_there(self):
        """Make the database where there is none, once of many at once."""
        if not self._is_there():
            with self.lock:
                if not self._is_there():
                    self._create(self.path + '.new')

    def _is_there(self):
        """Tell whether there is a database; it is born complete."""
        if not os.path.lexists(self.path):
            return False
        if os.path.isfile(self.path) and os.path.getsize(self.path):
            return True
        raise StoreError('the state database %s is damaged: it is empty, or '
                         'no file' % self.path,
                         ASIDE)

    def _open(self, path):
        import sqlite3
        if sys.version_info < (3, 7):   # it encodes to UTF-8 by itself
            path = os.fsencode(path).decode('utf-8', 'replace')
        con = sqlite3.connect(path, isolation_level=None,
                              timeout=self.busy_ms / 1000)
        try:
            con.execute('pragma synchronous=full')
        except sqlite3.Error:
            con.close()
            raise
        return con

    def _create(self, fresh):
        """Make the database beside its place, under the lock, and move it.

        So none of thirty processes sees it half made. It is born 0600 (its
        journals take its mode), and its directory is synced: some SQLites
        never do. Journals of one that was there before must not be applied.
        """
        for left in [fresh] + [path + end for path in (fresh, self.path)
                               for end in ('-journal', '-wal', '-shm')]:
            if os.path.exists(left):
                os.remove(left)
        os.close(open_private(fresh))
        con = self._open(fresh)
        try:
            con.execute('begin immediate')
            for statement in ';'.join((SCHEMA,) + UPGRADES).split(';'):
                con.execute(statement)
            con.executemany('insert into meta values(?, ?)', (
                ('schema', SCHEMA_VERSION), ('generation', 0),
                ('hash_version', HASH_VERSION)))
            con.execute('commit')
            if file_system_of(self.home) not in NETWORK_FILE_SYSTEMS:
                con.execute('pragma journal_mode=wal')
        finally:
            con.close()
        os.replace(fresh, self.path)
        if os.name != 'nt':
            place = os.open(self.home, os.O_RDONLY)
            try:
                os.fsync(place)
            finally:
                os.close(place)

    def has_moved(self):
        """Tell whether the open database is no longer the one in place."""
        try:
            return os.stat(self.path).st_ino != self.inode
        except OSError:
            return True

    def _versions(self):
        """Give the versions of schema and hash that the database has."""
        found = load_meta(self.con, 'hash_version')
        return load_meta(self.con, 'schema'), 1 if found is None else found

    def _is_older(self):
        have, ours = self._versions(), (SCHEMA_VERSION, HASH_VERSION)
        return have != ours and all(
            isinstance(version, int) and 0 < version <= limit
            for version, limit in zip(have, ours))

    def _upgrade(self):
        """Bring a database of an earlier version up, all or nothing.

        Whoever comes second under the lock finds it done.
        """
        import sqlite3
        try:
            with self.lock:
                self.con.execute('begin immediate')
                try:
                    if self._is_older():
                        self._migrate()
                    self.con.execute('commit')
                finally:
                    if self.con.in_transaction:
                        self.con.execute('rollback')
        except (sqlite3.Error, StoreError) as exc:
            if isinstance(exc, sqlite3.Error):
                exc = store_error(exc, self.path)
            exc.hint = exc.hint or (
                'An earlier version made it. It is brought up to date once, '
                'by a run that may write to %s.' % self.home)
            raise exc

    def _migrate(self):
        """Make what later versions have; hash anew what is stored."""
        for statement in ';'.join(
                UPGRADES[self._versions()[0] - 1:]).split(';'):
            self.con.execute(statement)
        rehash_stored(self.con)
        save_meta(self.con, 'schema', SCHEMA_VERSION)
        save_meta(self.con, 'hash_version', HASH_VERSION)
        bump_generation(self.con)

    def check_schema(self):
        """Refuse a database that another version of this file made."""
        if self.is_checked:
            return
        have = self._versions()
        if have != (SCHEMA_VERSION, HASH_VERSION):
            raise StoreError(
                'the state database %s has schema %s and hash version %s, '
                'this version reads %d and %d' % (
                    (self.path,) + have + (SCHEMA_VERSION, HASH_VERSION)),
                'Use the newer preflight.py, or another --home.')
        self.is_checked = True

    def write(self):
        """One locked transaction; see the class."""
        return Transaction(self, True)

    def read(self):
        """One snapshot; see the class."""
        return Transaction(self, False)

    def close(self):
        """Close under the lock: the last close is a checkpoint."""
        import sqlite3
        con, self.con, self.is_checked = self.con, None, False
        try:
            if con is not None:
                with self.lock:
                    con.close()
        except sqlite3.Error as exc:
            raise store_error(exc, self.path) from exc
        finally:
            self.lock.close()


def key_text(path):
    """Make a path fit to be a key, whatever bytes its name holds."""
    return path.encode('utf-8', 'backslashreplace').decode('utf-8')


# -- servers, launches and switches -------------------------------------------

LINK_COLUMNS = ('launch, state, cause, detail, since, observed_at, '
                'listed_at, protocol, era, ttl, stderr, refused, lease_at, '
                'lease_until, lease_launch, expires_at')


def _look_key(kind, name, file):
    """Name the key in meta of what a look at a server leaves there."""
    return '%s %s' % (kind, json.dumps([name, key_text(file)]))


def load_notes(con, name, file):
    """Load what was warned of at the last look: [of its config, of it]."""
    return json.loads(load_meta(con, _look_key('notes', name, file))
                      or '[[], []]')


def save_notes(con, name, file, notes):
    """Save what a look at a server warned of: is it news?"""
    if notes == load_notes(con, name, file):
        return False
    save_meta(con, _look_key('notes', name, file), json.dumps(notes))
    return True


def load_scope(con, name, file):
    """Load the cacheScope of the newest list: public, private or ''."""
    return load_meta(con, _look_key('scope', name, file)) or ''


def save_scope(con, name, file, scope):
    """Save the cacheScope of a list."""
    if scope != load_scope(con, name, file):
        save_meta(con, _look_key('scope', name, file), scope)


def load_link(con, name, file):
    """Load what is recorded of a server: (row id, owner, Connection)."""
    row = con.execute('select id, lease_owner, %s from server where name=? '
                      'and file=?' % LINK_COLUMNS,
                      (name, key_text(file))).fetchone()
    if row is None:
        return None, None, None
    link = Connection(*row[2:])
    return row[0], row[1], link._replace(
        refused=json.loads(link.refused or '{}'))


def load_launches(con, name):
    """Load the known launches of a server name, oldest first."""
    return [Launch(*row[:4], baselined=bool(row[4])) for row in con.execute(
        'select digest, text, how, at, baselined from launch where server=? '
        'order by at, digest', (name,))]


def load_switches(con, name, file):
    """Load the operator's switches of a server: key -> Switch."""
    return {key: Switch(bool(value), bool(over), at)
            for key, value, over, at in con.execute(
        'select key, value, over, at from switch where server=? and file=?',
        (name, key_text(file)))}


# -- tools --------------------------------------------------------------------

MOVES_KEPT = 20                 # looks that a tool's moves are counted in
TOOL_QUERY = """
select t.name, t.listed, t.hash, t.version, t.hints, t.flaw, t.first_seen,
  t.last_seen, a.hash, a.version, a.hints, a.at, a.how, b.at, t.changes,
  t.looks
from tool t left join approved a on a.server=:name and a.launch=:launch
  and a.name=t.name left join block b on b.server=:name and b.name=t.name
where t.server=:id"""


def _tool(name, row):
    approved = Approval(row[8], row[9], json.loads(row[10]), row[11],
                        row[12]) if row[8] is not None else None
    return Tool(name, row[0], bool(row[1]), row[2], row[3],
                json.loads(row[4]), row[5], approved, row[13], row[6],
                row[7], (bin(row[14]).count('1'), min(row[15], MOVES_KEPT)))


def load_tools(con, server_id, name, launch, only=None):
    """Load the tools of one server row: name -> Tool, gone ones too.

    only: one tool name, or None for all.
    """
    query, given = TOOL_QUERY, {'id': server_id, 'name': name,
                                'launch': launch, 'only': only}
    if only is not None:
        query += ' and t.name=:only'
    return {row[0]: _tool(name, row) for row in con.execute(query, given)}


def load_approved(con, name, launch):
    """Load approvals without their tools: name -> Approval."""
    return {row[0]: Approval(row[1], row[2], json.loads(row[3]), *row[4:])
            for row in con.execute(
        'select name, hash, version, hints, at, how from approved where '
        'server=? and launch=?', (name, launch))}


def load_listed_names(con, server_id, limit):
    """Load the names a server lists, in order, at most limit."""
    return [row[0] for row in con.execute(
        'select name from tool where server=? and listed=1 order by name '
        'limit ?', (server_id, limit))]


def count_listed(con, server_id):
    """Count the tools that a server lists."""
    return con.execute('select count(*) from tool where server=? and '
                       'listed=1', (server_id,)).fetchone()[0]


def load_names_like(con, server_id, word, limit=150):
    """Shortlist a big server's names for difflib, which is slow.

    Of the names within 2 of the word's length, those that hold the most of
    its four quarters.
    """
    row = con.execute(      # the index is shorter to read than the rows
        'select group_concat(name, char(31)) from tool indexed by tool_name '
        'where server=? and listed=1 and length(name) between ? and ? and '
        'instr(name, char(31))=0',
        (server_id, len(word) - 2, len(word) + 2)).fetchone()
    names = row[0].split('\x1f') if row[0] else []
    step = max(1, -(-len(word) // 4))
    a, b, c, d = ([word[n:n + step] for n in range(0, len(word), step)]
                  + [''] * 4)[:4]
    scores = [(a in name) + (b in name) + (c in name) + (d in name)
              for name in names]
    best = []
    for score in (4, 3, 2, 1, 0):
        if len(best) < limit:
            best += [name for name, its in zip(names, scores)
                     if its == score]
    return best[:limit]


def load_homes_of(con, tool, limit=200):
    """Load the (server name, file) pairs that list a tool of this name."""
    return con.execute(
        'select s.name, s.file from tool t join server s on s.id=t.server '
        'where t.name=? and t.listed=1 order by s.name limit ?',
        (tool, limit)).fetchall()


# -- probes and contracts -----------------------------------------------------

def load_probe(con, name, file):
    """Load the last health probe of a server: a dict, or None."""
    row = con.execute('select probe from server where name=? and file=?',
                      (name, key_text(file))).fetchone()
    return json.loads(row[0]) if row and row[0] else None


def save_probe(con, name, file, value):
    """Save the last health probe (a JSON value) of a server seen before."""
    con.execute('update server set probe=? where name=? and file=?',
                (compact_json(value), name, key_text(file)))
    bump_generation(con)


def save_definitions(con, texts):
    """Save canonical definitions: hash -> text."""
    con.executemany('insert or ignore into definition values(?, ?)',
                    texts.items())


def save_contract(con, name, at, body):
    """Register what an automation needs: a JSON text under its name."""
    con.execute('insert or replace into contract values(?, ?, ?)',
                (name, at, body))
    bump_generation(con)


def load_contracts(con):
    """Load all contracts by name: (name, instant, JSON text) each."""
    return con.execute('select name, at, body from contract order by name'
                       ).fetchall()


def delete_contract(con, name):
    """Remove a contract; tells whether there was one."""
    bump_generation(con)
    return con.execute('delete from contract where name=?',
                       (name,)).rowcount > 0


# -- what a look writes -------------------------------------------------------

def take_lease(con, name, file, lease):
    """Mark a server as being looked at; returns its row id.

    lease: (start, end, launch digest, owner).
    """
    con.execute('insert or ignore into server(name, file) values(?, ?)',
                (name, key_text(file)))
    con.execute('update server set lease_at=?, lease_until=?, '
                'lease_launch=?, lease_owner=? where name=? and file=?',
                tuple(lease) + (name, key_text(file)))
    bump_generation(con)


def drop_lease(con, name, file, owner):
    """Give a lease back, if it is still the owner's."""
    con.execute('update server set lease_at=null, lease_until=null, '
                'lease_launch=null, lease_owner=null where name=? and '
                'file=? and lease_owner=?', (name, key_text(file), owner))
    bump_generation(con)


def save_link(con, server_id, link):
    """Save a completed look at a server.

    detail and stderr are foreign text: what SQLite cannot hold is escaped.
    """
    link = link._replace(detail=key_text(link.detail),
                         stderr=key_text(link.stderr))
    con.execute('update server set launch=?, state=?, cause=?, detail=?, '
                'since=?, observed_at=?, listed_at=?, protocol=?, era=?, '
                'ttl=?, stderr=?, refused=?, expires_at=? where id=?',
                link[:11] + (canonical(link.refused), link.expires_at,
                             server_id))
    bump_generation(con)


def reset_moves(con, ids, names):
    """Count the moves of tools anew: what they came to is approved.

    ids: of server rows; names: of tools.
    """
    con.executemany('update tool set looks=0, changes=0 where server=? and '
                    'name=?', [(row_id, name) for row_id in ids
                               for name in names])


def save_tools(con, server_id, rows, gone, now):
    """Replace a server's list: rows are Definitions, gone are names.

    A flaw has no text: none moved to it or from it.
    """
    con.executemany('insert or ignore into definition values(?, ?)',
                    [(t.hash, t.text) for t in rows if t.hash])
    con.executemany('update tool set listed=0 where server=? and name=?',
                    [(server_id, name) for name in gone])
    for tool in rows:
        given = {'hash': tool.hash, 'version': HASH_VERSION, 'now': now,
                 'hints': canonical(tool.hints), 'flaw': tool.flaw,
                 'server': server_id, 'name': tool.name,
                 'kept': (1 << MOVES_KEPT) - 1}
        done = con.execute(
            'update tool set looks=looks+1, changes=(changes<<1 | '
            "(hash<>:hash and hash<>'' and :hash<>'')) & :kept, listed=1, "
            'hash=:hash, version=:version, hints=:hints, flaw=:flaw, '
            'last_seen=:now where server=:server and name=:name', given)
        if not done.rowcount:
            con.execute('insert into tool values(:server, :name, 1, :hash, '
                        ':version, :hints, :flaw, 0, :now, :now, 1)', given)


def forget_list(con, server_id):
    """Unlist every tool: another launch's list is not this one's."""
    con.execute('update tool set listed=0 where server=?', (server_id,))


def save_carried(con, name, file, link, tools):
    """Save what another host saw of a server, its list included.

    tools: dicts with the columns' names. It is no look of this host: how
    often a tool was listed here, and moved, stays.
    """
    con.execute('insert or ignore into server(name, file) values(?, ?)',
                (name, key_text(file)))
    row_id = load_link(con, name, file)[0]
    save_link(con, row_id, link)
    forget_list(con, row_id)
    for row in tools:
        given = dict(row, server=row_id, version=HASH_VERSION,
                     hints=canonical(row['hints']))
        done = con.execute(
            'update tool set listed=:listed, hash=:hash, version=:version, '
            'hints=:hints, flaw=:flaw, first_seen=min(first_seen, '
            ':first_seen), last_seen=:last_seen where server=:server and '
            'name=:name', given)
        if not done.rowcount:
            con.execute(
                'insert into tool(server, name, listed, hash, version, '
                'hints, flaw, changes, first_seen, last_seen) values('
                ':server, :name, :listed, :hash, :version, :hints, :flaw, 0, '
                ':first_seen, :last_seen)', given)


# -- what the operator decides ------------------------------------------------

def load_row_ids(con, name):
    """Load the ids of all rows of a server name, one for each file."""
    return [row[0] for row in con.execute(
        'select id from server where name=?', (name,))]


def save_approvals(con, name, launch, tools, how):
    """Make definitions the approved ones; how: (word, instant)."""
    con.executemany(
        'insert or replace into approved values(?, ?, ?, ?, ?, ?, ?, ?)',
        [(name, launch, tool.name, tool.hash, HASH_VERSION,
          canonical(tool.hints), how[1], how[0]) for tool in tools])
    reset_moves(con, load_row_ids(con, name), [tool.name for tool in tools])
    bump_generation(con)


def save_launch(con, name, launch):
    """Make a Launch known for a server name."""
    con.execute('insert or replace into launch values(?, ?, ?, ?, ?, ?)', (
        name, launch.digest, key_text(launch.text), launch.how, launch.at,
        int(launch.baselined)))
    bump_generation(con)


def copy_approvals(con, name, old, new, now):
    """Carry the approvals of one launch over to another; how many."""
    done = con.execute(
        "insert or ignore into approved select server, ?, name, hash, "
        "version, hints, ?, 'carried' from approved where server=? and "
        'launch=?', (new, now, name, old))
    reset_moves(con, load_row_ids(con, name), load_approved(con, name, new))
    bump_generation(con)
    return done.rowcount


def save_block(con, name, tool, at):
    """Block a tool by name, or unblock it when at is None."""
    if at is None:
        con.execute('delete from block where server=? and name=?',
                    (name, tool))
    else:
        con.execute('insert or ignore into block values(?, ?, ?)',
                    (name, tool, at))
    bump_generation(con)


def load_blocks(con, name):
    """Load the blocked tool names of a server: name -> since."""
    return dict(con.execute('select name, at from block where server=?',
                            (name,)).fetchall())


def save_switch(con, name, file, key, switch):
    """Set an operator's switch, or drop it when switch is None."""
    where = (name, key_text(file), key)
    if switch is None:
        con.execute('delete from switch where server=? and file=? and '
                    'key=?', where)
    else:
        con.execute('insert or replace into switch values(?, ?, ?, ?, ?, ?)',
                    where + (int(switch.value), int(switch.over), switch.at))
    bump_generation(con)


# -- agent tokens -------------------------------------------------------------

TOKEN_COLUMNS = 'name, servers, profile, required, at, expires_at'


def _token(row):
    return Token(row[0], json.loads(row[1]) if row[1] else None, row[2],
                 json.loads(row[3]), row[4], row[5])


def save_token(con, token, digest):
    """Save a new Token under the keyed digest of its secret."""
    con.execute('insert into token values(?, ?, ?, ?, ?, ?, ?)', (
        token.name, digest, json.dumps(token.servers), token.profile,
        json.dumps(token.required), token.at, token.expires_at))


def load_token(con, digest):
    """Load the Token of a keyed digest, or None."""
    row = con.execute('select %s from token where digest=?' % TOKEN_COLUMNS,
                      (digest,)).fetchone()
    return _token(row) if row else None


def load_tokens(con):
    """Load all Tokens by name."""
    return [_token(row) for row in con.execute(
        'select %s from token order by name' % TOKEN_COLUMNS)]


def delete_token(con, name):
    """Remove a token; tells whether there was one."""
    return con.execute('delete from token where name=?',
                       (name,)).rowcount > 0


# -- the database itself ------------------------------------------------------

def data_version(con):
    """Give a number that moves when another connection has written."""
    return con.execute('pragma data_version').fetchone()[0]


def sqlite_version():
    """Give the version of SQLite as three numbers."""
    import sqlite3
    return sqlite3.sqlite_version_info


def load_latest(con):
    """Load two instants, 0 for none: of the last record, whatever those
    before it say, and of the newest look."""
    return con.execute('select ifnull((select at from activity order by seq '
                       'desc limit 1), 0), (select ifnull(max(observed_at), '
                       '0) from server)').fetchone()


def find_damage(con):
    """Read the whole database and say what is damaged, '' for nothing."""
    said = con.execute('pragma quick_check(1)').fetchone()[0]
    return '' if said == 'ok' else ' '.join(said.split())


def is_wal(path):
    """Tell whether a database file is in WAL mode, without opening it."""
    try:
        with open(path, 'rb') as file:
            return file.read(20)[18:] == b'\2\2'
    except OSError:
        return False


# -- the audit log ------------------------------------------------------------

def load_last_record(con):
    """Load (seq, hash) of the newest audit record, (0, '') for none."""
    row = con.execute('select seq, hash from activity order by seq desc '
                      'limit 1').fetchone()
    return row or (0, '')


def save_record(con, row):
    """Append an audit row: seq, at, request_id, type, status, body, hash."""
    con.execute('insert into activity values(?, ?, ?, ?, ?, ?, ?)', row)


def load_records(con, after=-1 << 62):
    """Iterate over audit rows in order, as save_record takes them."""
    return con.execute('select seq, at, request_id, type, status, body, '
                       'hash from activity where seq>? order by seq',
                       (after,))


def find_changes(con, after, limit):
    """Find the newest changes of the state: (seq, body) of their records."""
    return con.execute(
        "select seq, body from activity where seq>? and type in ('sync', "
        "'approval', 'server') order by seq desc limit ?",
        (after, limit)).fetchall()


def load_record(con, seq):
    """Load one audit body by its place, None when it is not there."""
    row = con.execute('select body from activity where seq=?',
                      (seq,)).fetchone()
    return row[0] if row else None


def find_records(con, filters, limit, offset):
    """Find audit bodies, newest first: (total, bodies).

    filters: type, status, request_id, since, until (instants), actor, each
    or None.
    """
    tests = {'actor': 'instr(body, :actor)>0', 'type': 'type=:type',
             'status': 'status=:status', 'since': 'at>=:since',
             'until': 'at<:until', 'request_id': 'request_id=:request_id'}
    on = [tests[key] for key in tests if filters.get(key) is not None]
    where = ' where ' + ' and '.join(on) if on else ''
    given = dict(filters, limit=limit, offset=offset)
    if given.get('actor') is not None:      # no id can hold a bare quote
        given['actor'] = '"actor":%s,"status":' % json.dumps(given['actor'])
    total = con.execute('select count(*) from activity' + where,
                        given).fetchone()[0]
    rows = con.execute('select body from activity%s order by seq desc limit '
                       ':limit offset :offset' % where, given)
    return total, [row[0] for row in rows]


def load_oldest(con, limit):
    """Load (seq, at, hash) of the oldest audit rows, at most limit."""
    return con.execute('select seq, at, hash from activity order by seq '
                       'limit ?', (limit,)).fetchall()


def delete_records(con, last):
    """Remove the audit rows up to a place."""
    con.execute('delete from activity where seq<=?', (last,))


# ==========================================================================
# 16. audit (contract 8): a chain of SHA-256, one record per executed check
# ==========================================================================

PRUNE_STEP = 2000


def append_record(con, record):
    """Append a Record to the chain inside the caller's transaction.

    Returns its id, which sorts by time and names its place. The body is
    ASCII before it is bound: no foreign character can sink a transaction.
    """
    last, before = load_last_record(con)
    seq = last + 1
    name = '%012x-%08x' % (record.at, seq)
    body = compact_json({
        'id': name, 'type': record.type, 'source': record.source,
        'timestamp': format_time(record.at),
        'request_id': record.request_id, 'actor': record.actor,
        'status': record.status, 'metadata': record.metadata})
    save_record(con, (seq, record.at, record.request_id, record.type,
                      record.status, body, sha256(before + body)))
    return name


def check_record(report, caller, at, source='cli'):
    """Make the record of one executed check: ids and codes only."""
    counts, per_tool = {}, []
    for answer in report.answers:
        row = {'id': answer.id, 'status': answer.status}
        if answer.reason:
            counts[answer.reason] = counts.get(answer.reason, 0) + 1
            row['reason'] = answer.reason
        per_tool.append(row)
    return Record('preflight', source, at, report.request_id, caller.actor,
                  'success' if report.verdict == READY else 'blocked',
                  {'verdict': report.verdict,
                   'ids_count': len(report.answers), 'reasons': counts,
                   'per_tool': per_tool})


def _body_of(body):
    """Read the text of a record, {} when it is not one of ours."""
    try:
        body.encode('ascii')
        data = json.loads(body)
        return data if data['id'] and is_table(data['metadata']) else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _row_fault(row, before):
    """Say what is wrong with one row of the chain, '' for nothing."""
    seq, at, request_id, kind, status, body, digest = row
    data = _body_of(body)
    if not data or digest != sha256(before + body):
        return 'was edited, or a record before it was removed'
    place = '%012x-%08x' % (at, seq) if isinstance(at, int) else ''
    if (place, request_id, kind, status) != (
            data['id'], data['request_id'], data['type'], data['status']):
        return 'has columns that differ from its text'
    return ''


def _hash_before(con, first):
    """Find the hash that the oldest record left builds on, or None."""
    if first == 1:
        return ''
    for body in find_records(con, {'type': 'prune'}, 1000, 0)[1]:
        data = _body_of(body).get('metadata', {})
        if data.get('last_seq') == first - 1:
            return data.get('last_hash')
    return None


def verify_chain(con, expected=''):
    """Check every record: a dict with ok, records, head and problems.

    expected: a head noted earlier, which must still stand in the chain;
    that is how a cut tail shows.
    """
    problems, heads, rows, last, before = [], set(), 0, 0, ''
    for row in load_records(con):
        seq, is_first = row[0], not rows
        if is_first:
            before = _hash_before(con, seq)
        elif seq != last + 1:
            problems.append('records %d to %d are missing' % (
                last + 1, seq - 1))
        if before is None:      # what it builds on is not known
            problems.append('the first record left is %d, and no prune '
                            'record accounts for those before it' % seq)
        else:
            fault = _row_fault(row, before)
            problems += ['record %d %s' % (seq, fault)] if fault else []
        rows, last, before = rows + 1, seq, str(row[6])
        heads.add(before)
        if row[3] == 'prune':
            heads.add(_body_of(row[5]).get('metadata', {}).get('last_hash'))
    if expected and expected not in heads:
        problems.append('the head %s is not in the chain: its end was cut '
                        'off or rewritten, or it was pruned' % expected)
    return {'ok': not problems, 'records': rows, 'head': before,
            'problems': problems}


def prune_records(store, before, actor):
    """Remove records older than an instant, oldest first; how many.

    In small steps, each of which leaves a record with the last removed
    hash, so that the chain can still be verified. Never by the gate.
    """
    removed = 0
    while True:
        with store.write() as con:
            old = []
            for seq, at, digest in load_oldest(con, PRUNE_STEP):
                if at >= before:
                    break
                old.append((seq, digest))
            if not old:
                return removed
            last_seq, last_hash = old[-1]
            append_record(con, Record(
                'prune', 'cli', store.world.now(), '', actor, 'success',
                {'action': 'pruned', 'removed': len(old),
                 'last_seq': last_seq, 'last_hash': last_hash}))
            delete_records(con, last_seq)
            removed += len(old)
        if len(old) < PRUNE_STEP or store.world.stop:
            return removed
        store.world.sleep(COMMIT_PAUSE_MS / 1000)


# ==========================================================================
# 17. links: carry bytes between us and one server, under deadlines
# ==========================================================================


# -- finding and ending a program ---------------------------------------------

def windows_names(command, env):
    """List the file names that Windows tries for a command, best first.

    PATHEXT tells them: npx is npx.cmd there, and the npx beside it is a
    script for other systems.
    """
    kinds = (env.get('PATHEXT') or '.COM;.EXE;.BAT;.CMD').lower().split(';')
    if os.path.splitext(command)[1].lower() in filter(None, kinds):
        return [command]
    return [command + kind for kind in kinds if kind]


def find_command(command, base, env, is_windows=os.name == 'nt',
                 cure='give an absolute path or set env.PATH'):
    """Resolve a command as the config's author meant it.

    With a slash it is relative to base, else it is looked up in the PATH of
    the server's own environment, in which a relative place is one of base,
    never of where we run. Raises UpstreamError command_not_found.
    """
    path, divider = env.get('PATH', os.defpath), os.pathsep
    places, names = [''], [command]
    if is_windows:
        names, divider = windows_names(command, env), ';'
    is_path = '/' in command or is_windows and '\\' in command
    if not is_path:
        places = [place.strip('"') for place in path.split(divider)]
    found = [os.path.join(base, place, name)
             for place in places for name in names]
    for each in found:
        if os.path.isfile(each) and (is_windows or os.access(each, os.X_OK)):
            return each
    if not is_path:
        raise UpstreamError(
            'command_not_found', "command '%s' not found; PATH was %s; %s"
            % (command, path, cure))
    raise UpstreamError('command_not_found', 'command %s %s' % (
        os.path.join(base, command), 'is not executable'
        if any(map(os.path.exists, found)) else 'not found'))


def find_server_command(server, env):
    """Resolve the command of a server that is started.

    One that holds its arguments too is a slip: it is told as it is written.
    Raises UpstreamError command_not_found.
    """
    try:
        return find_command(server.command, server.base, env)
    except UpstreamError as exc:
        if re.search(r'\S\s', server.command) and not str(exc).endswith(
                'is not executable'):
            exc.args = ("command '%s' not found; it holds a blank: "
                        'arguments belong into args' % server.command,)
        raise


def batch_line(path, args, env):
    """Write the command line that runs a .cmd or .bat file on Windows.

    cmd.exe reads it, which knows a % inside quotes too: the empty part of a
    variable behind each keeps it a sign. Raises UpstreamError for a line
    break, which nothing keeps.
    """
    shell = env.get('COMSPEC') or os.path.join(
        env.get('SYSTEMROOT') or r'C:\Windows', 'System32', 'cmd.exe')

    def quote(word):
        if re.search('[\r\n]', word):
            raise UpstreamError('protocol', 'an argument holds a line break, '
                                'which no batch file can be given')
        word = re.sub(r'(\\*)"', r'\1\1""', word.replace('%', '%%cd:~,%'))
        return '"%s"' % re.sub(r'(\\+)\Z', r'\1\1', word)
    return '"%s" /e:ON /v:OFF /d /c "%s"' % (
        shell, ' '.join(map(quote, [path] + list(args))))


def end_group(child, is_forced, env, is_windows=os.name == 'nt'):
    """Ask a child and all that it started to end, or end them by force."""
    import signal
    import subprocess
    try:
        if not is_windows:
            os.killpg(child.pid, signal.SIGKILL if is_forced
                      else signal.SIGTERM)
        elif not is_forced:
            child.send_signal(getattr(signal, 'CTRL_BREAK_EVENT',
                                      signal.SIGTERM))
        else:
            subprocess.call(
                [os.path.join(env.get('SYSTEMROOT') or r'C:\Windows',
                              'System32', 'taskkill.exe'), '/F', '/T',
                 '/PID', str(child.pid)], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=ENGINE_MS / 1000)
    except (OSError, subprocess.TimeoutExpired):
        pass                    # it has ended, or is not ours to end
    if is_windows and is_forced and child.poll() is None:
        child.kill()


def reap(child, seconds):
    """Wait for a child to end; tells whether it did. One under sudo, say,
    may not be ours to end."""
    import subprocess
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def own_group():
    """Give what has Popen start a group of processes of its own."""
    if os.name == 'nt':
        return {'creationflags': 0x200}     # CREATE_NEW_PROCESS_GROUP
    return {'start_new_session': True}


# -- containers ---------------------------------------------------------------

class Container:
    """What `docker run` starts: the end of its client does not end it.

    It is told by the id that the client writes into a file: one of ours, in
    a directory of our own, unless the config names one that is not there
    yet. Nothing is ever ended by its image or name.
    """

    # What the clients say when there is nobody to start it.
    AWAY = (r'(?i)cannot connect to (?:the docker daemon|podman)|error '
            r'during connect|failed to connect to the docker api|unable to '
            r'connect to podman|cannot access containerd socket|permission '
            r'denied while trying to connect')

    def __init__(self, run, argv, cwd, env):
        self.run, self.argv, self.cwd, self.env = run, argv, cwd, env
        self.place = None       # our directory
        self.file = None        # where the id will stand

    def open(self):
        """Give the command line to start, which leaves the id behind."""
        import tempfile
        given = self.run.options.get('cidfile')
        if given:
            path = os.path.join(self.cwd, given)
            self.file = None if os.path.lexists(path) else path
            return self.argv
        if self._is_walled():
            return self.argv
        self.place = tempfile.mkdtemp(prefix='preflight-')
        self.file, at = os.path.join(self.place, 'cid'), self.run.at
        return (self.argv[:at] + ['--cidfile', self.file] + self.argv[at:])

    def _is_walled(self):
        """Tell of a client that sees another /tmp, and would fail."""
        return '/snap/' in self.argv[0] or 'WSL_DISTRO_NAME' in self.env and (
            self.argv[0].lower().endswith('.exe'))

    def id(self):
        """Give the container's id, '' while there is none."""
        try:
            with open(self.file or os.devnull, encoding='ascii') as file:
                found = re.match(r'[0-9a-f]{12,64}\Z', file.read(80).strip())
        except (OSError, ValueError):
            return ''
        return found.group() if found else ''

    def is_away(self, tail):
        """Tell whether a client that failed had nobody to talk to."""
        text = tail.decode('utf-8', 'replace')
        return not self.id() and re.search(self.AWAY, text) is not None

    def end(self, is_survivor):
        """End the container itself, once its client is gone.

        is_survivor: it outlived the end of its input and a TERM. Of another
        only what still runs is stopped; what it left is the user's.
        """
        name = self.id()
        if name and (not self._call('stop', '-t', '1', name) or is_survivor):
            self._call('rm', '-f', name)

    def _call(self, *words):
        import subprocess
        at = self.run.at - 1
        try:
            child = subprocess.Popen(
                self.argv[:at] + list(words), cwd=self.cwd, env=self.env,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, **own_group())
        except OSError:
            return False
        if not reap(child, ENGINE_MS / 1000):
            end_group(child, True, self.env)
            reap(child, ENGINE_MS / 1000)
        return child.returncode == 0

    def close(self):
        """Remove our directory."""
        import shutil
        if self.place:
            shutil.rmtree(self.place, ignore_errors=True)
            self.place = None


# -- a child's standard input and output --------------------------------------

# Why a command cannot be started, where the command itself is at fault.
UNSTARTABLE = ('ENOENT', 'ENOTDIR', 'EACCES', 'EPERM', 'ENOEXEC', 'EISDIR',
               'ELOOP', 'ENAMETOOLONG', 'ELIBBAD')


def start_error(exc, command):
    """Translate what Popen raises: UpstreamError.

    A system that is out of descriptors or memory says nothing of the
    command.
    """
    import errno
    if not isinstance(exc, OSError):
        return UpstreamError('command_not_found', 'command %s cannot be '
                             'started: %s' % (command, exc))
    if exc.errno is None or errno.errorcode.get(exc.errno) in UNSTARTABLE:
        return UpstreamError('command_not_found', 'command %s cannot be '
                             'started: %s' % (command, os_reason(exc)))
    return UpstreamError('exited', 'could not be started: %s'
                         % os_reason(exc))


class ChildLink:
    """A server that is our child process, one JSON message a line.

    stdout and stderr are read in one selector against an absolute deadline
    (monotonic seconds), so that dribbling cannot extend it; stderr is
    drained and only its tail kept. close() leaves no process behind.
    """

    patience = 0.02     # seconds until what was written must have come

    def __init__(self, argv, cwd, env, world):
        from collections import deque
        self.argv, self.cwd, self.env, self.world = argv, cwd, env, world
        run = container_of(argv)
        self.container = run and Container(run, argv, cwd, env)
        self.child, self.selector = None, None
        self.is_closing = False     # what still comes is thrown away
        self.lines = deque()    # complete lines not yet taken
        self.partial = []       # chunks of the line that is not complete
        self.size = 0           # bytes in partial
        self.outgoing = b''     # what stdin did not take yet
        self.tail = b''         # the end of stderr
        self.open_pipes = set()

    def open(self):
        """Start the server in a session, and so a process group, of its own.

        Raises UpstreamError when it cannot be started.
        """
        import subprocess
        if not os.path.isdir(self.cwd):
            raise UpstreamError('command_not_found', 'the directory %s to '
                                'start it in is not there' % self.cwd)
        argv = self.argv
        try:
            if self.container:
                argv = self.container.open()
            if os.name == 'nt' and re.search(r'(?i)\.(?:cmd|bat)\Z', argv[0]):
                argv = batch_line(argv[0], argv[1:], self.env)
            self._prepare()
            self.child = subprocess.Popen(
                argv, cwd=self.cwd, env=self.env, bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, **own_group())
        except (OSError, ValueError) as exc:
            raise start_error(exc, self.argv[0]) from exc
        self.open_pipes = {self.child.stdout, self.child.stderr}
        self._attach()

    def _prepare(self):
        import selectors
        self.selector = selectors.DefaultSelector()

    def _attach(self):
        import selectors
        for pipe in (self.child.stdin, self.child.stdout,
                     self.child.stderr):
            os.set_blocking(pipe.fileno(), False)
        for pipe in self.open_pipes:
            self.selector.register(pipe, selectors.EVENT_READ)

    def send(self, data):
        """Queue bytes for the server; what blocks is sent while reading.

        Raises UpstreamError for a server that asks and never reads.
        """
        self.outgoing += data
        self._check_unread(len(self.outgoing))
        self._write()

    def _check_unread(self, size):
        if size > MAX_NOISE_BYTES:
            raise UpstreamError('protocol', 'it does not read its input')

    def _write(self):
        import selectors
        pipe = self.child.stdin
        if pipe.closed:
            return
        try:
            while self.outgoing:
                done = os.write(pipe.fileno(), self.outgoing)
                self.outgoing = self.outgoing[done:]
        except BlockingIOError:
            if pipe not in self.selector.get_map():
                self.selector.register(pipe, selectors.EVENT_WRITE)
            return
        except OSError:         # the server is gone; reading will tell
            self.outgoing = b''
        if pipe in self.selector.get_map():
            self.selector.unregister(pipe)

    def pump(self, seconds):
        """Move bytes for at most so long; returns whether any came."""
        moved = False
        for key, _ in self.selector.select(seconds):
            pipe = key.fileobj
            if pipe is self.child.stdin:
                self._write()
                continue
            try:
                chunk = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                chunk = b''
            moved = True
            if not chunk:
                self.selector.unregister(pipe)
            self._take(pipe, chunk)
        return moved

    def _take(self, pipe, chunk):
        """Put what came where it belongs; b'' is the end of a pipe."""
        if not chunk:
            self.open_pipes.discard(pipe)
        elif pipe is self.child.stderr:
            self.tail = (self.tail + chunk)[-2 * STDERR_TAIL_BYTES:]
        elif not self.is_closing:
            self._feed(chunk)

    def _feed(self, chunk):
        pieces = chunk.split(b'\n')
        for piece in pieces[:-1]:
            self.partial.append(piece)
            self.lines.append(b''.join(self.partial))
            self.partial, self.size = [], 0
        self.partial.append(pieces[-1])
        self.size += len(pieces[-1])
        if self.size > MAX_MESSAGE_BYTES:
            raise UpstreamError('protocol', 'a message is larger than %d '
                                'bytes' % MAX_MESSAGE_BYTES)

    def receive(self, deadline):
        """Give the next line, or None once the deadline has passed.

        Raises UpstreamError exited when the server is gone, Interrupted
        when this run is asked to stop.
        """
        while True:
            if self.lines:
                return self.lines.popleft()
            if self.world.stop:
                raise Interrupted(self.world.stop[0])
            left = deadline - self.world.clock()
            if left <= 0:
                return None
            moved = self.pump(min(left, 0.05))
            if not moved and not self.lines and self._is_over():
                self._raise_exit()

    def _is_over(self):
        """Tell whether nothing more can come of the server."""
        return self.child.stdout not in self.open_pipes or self.is_dead()

    def _raise_exit(self):
        self._wait_dead(0.3)
        end = self.world.clock() + 0.3
        while (self.open_pipes and self.world.clock() < end
               and self.pump(self.patience)):
            pass                # its last words
        code = self._exit_code()
        text = ('closed its output' if code is None
                else 'killed by signal %d' % -code if code < 0
                else 'exited with code %d' % code)
        if code and self.container and self.container.is_away(self.tail):
            raise UpstreamError('refused', 'cannot reach %s: its client %s'
                                % (self.container.run.engine, text))
        raise UpstreamError('exited', text)

    def is_dead(self):
        """Tell whether the server itself has ended, without reaping it.

        Its pid is the group's id: reaped, it could be given to another.
        """
        return self._exit_code() is not None

    def _exit_code(self):
        if self.child.returncode is not None or not hasattr(os, 'waitid'):
            return self.child.poll()
        try:
            found = os.waitid(os.P_PID, self.child.pid, os.WEXITED
                              | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self.child.poll()
        if found is None:
            return None
        return (found.si_status if found.si_code == os.CLD_EXITED
                else -found.si_status)

    def _wait_dead(self, seconds):
        end = self.world.clock() + seconds
        while not self.is_dead():
            if self.world.clock() > end:
                return False
            if self.open_pipes:
                self.pump(0.01)
            else:
                self.world.sleep(0.01)
        return True

    def close(self):
        """End the server: end of input, TERM, KILL, each with a grace.

        The signals go to its group, so grandchildren end too, and only then
        is it reaped. We never wait for the end of its output: a grandchild
        may hold that open.
        """
        self.is_closing = True
        try:
            if self.child is not None:
                self._end_child(GRACE_MS / 1000)
        finally:
            if self.selector is not None:
                self.selector.close()
                self.selector = None
            if self.container:
                self.container.close()

    def _end_child(self, grace):
        was_alive = not self.is_dead()
        self._end_input()
        is_polite = self._wait_dead(grace)
        end_group(self.child, False, self.env)
        if not is_polite:
            self._wait_dead(grace)
        elif self.open_pipes:
            self._drain(0.2)    # grandchildren get a moment, too
        end_group(self.child, True, self.env)
        reap(self.child, grace)
        if self.container and not (was_alive and is_polite):
            self.container.end(was_alive)
        self._let_go()
        self.child = None

    def _end_input(self):
        pipe = self.child.stdin
        if not pipe.closed and pipe in self.selector.get_map():
            self.selector.unregister(pipe)
        pipe.close()

    def _drain(self, seconds):
        end = self.world.clock() + seconds
        while self.open_pipes and self.world.clock() < end:
            self.pump(0.02)

    def _let_go(self):
        self.child.stdout.close()
        self.child.stderr.close()


class ThreadedLink(ChildLink):
    """The same with a thread a pipe, for Windows: selectors take no pipes.

    Each thread alone closes its pipe. Closed from here, the number could
    soon mean another file, which the thread would then read.
    """

    patience = 0.2      # a thread that has read must get its turn to tell

    def _prepare(self):
        import queue
        self.moves = queue.Queue(64)    # (pipe, bytes) that came
        self.inputs = queue.Queue()     # bytes to send; None is the end
        self.sent = self.written = 0    # bytes
        self.is_ended = False

    def _attach(self):
        import threading
        child = self.child
        for work, pipe in ((self._read, child.stdout),
                           (self._read, child.stderr),
                           (self._write_all, child.stdin)):
            threading.Thread(target=work, args=(pipe,), daemon=True).start()

    def _read(self, pipe):
        chunk = b'-'
        while chunk and not self.is_ended:
            try:
                chunk = os.read(pipe.fileno(), 1 << 16)
            except OSError:
                chunk = b''
            self.moves.put((pipe, chunk))
        pipe.close()

    def _write_all(self, pipe):
        for data in iter(self.inputs.get, None):
            left = data
            try:
                while left:
                    left = left[os.write(pipe.fileno(), left):]
            except OSError:     # the server is gone; reading will tell
                pass
            self.written += len(data)
        pipe.close()

    def send(self, data):
        """Hand bytes to the thread that writes them.

        Raises UpstreamError for a server that asks and never reads.
        """
        self.sent += len(data)
        self.inputs.put(data)
        self._check_unread(self.sent - self.written)

    def pump(self, seconds):
        """Wait for bytes for at most so long; returns whether any came."""
        import queue
        try:
            self._take(*self.moves.get(timeout=seconds))
        except queue.Empty:
            return False
        return True

    def _is_over(self):
        """Tell whether nothing more can come of the server."""
        return super()._is_over() and not (
            self.open_pipes and self.pump(self.patience))

    def _end_input(self):
        self.inputs.put(None)

    def _let_go(self):
        import queue
        self.is_ended = True
        try:
            while True:         # a thread may wait for room
                self.moves.get_nowait()
        except queue.Empty:
            pass


CHILD_LINK = ThreadedLink if os.name == 'nt' else ChildLink


class CommandLink(CHILD_LINK):
    """A command that is no server: it reads some input, and ends."""

    def feed(self, data, seconds):
        """Have a command read some input to its end: its exit code.

        None when it has not ended in so many seconds. Of its output only
        the tail of stderr is kept.
        """
        self.is_closing, end = True, self.world.clock() + seconds
        while (data or self.outgoing) and not self.is_dead() and (
                self.world.clock() < end):
            if data and not self.outgoing:
                self.send(data[:1 << 16])
                data = data[1 << 16:]
            self._wait(0.02)
        self._end_input()
        while not self.is_dead() and self.world.clock() < end:
            self._wait(0.02)
        return self._exit_code()

    def _wait(self, seconds):
        if self.world.stop:
            raise Interrupted(self.world.stop[0])
        if self.open_pipes:
            self.pump(seconds)
        else:
            self.world.sleep(seconds)


def find_ours(command, env):
    """Resolve a command of the operator's, who has no entry to mend.

    Raises UpstreamError, or OSError where the directory is gone.
    """
    return find_command(command, os.path.abspath('.'), env,
                        cure='give an absolute path')


def feed_command(words, data, world):
    """Run a command of the operator's on some input: '' or what failed.

    No shell reads the words. It starts where we were started, with our
    environment but PREFLIGHT_*, and ends with all that it started once it
    exits, after NOTIFY_MS, or when we are interrupted. Its output is
    dropped, but for the last line of stderr when it fails.
    """
    env = {name: value for name, value in world.env.items()
           if not name.startswith('PREFLIGHT_')}
    try:
        path = find_ours(words[0], env)
    except (OSError, UpstreamError) as exc:
        return str(exc)
    link = CommandLink([path] + words[1:], '.', env, world)
    try:
        link.open()
        code = link.feed(data, NOTIFY_MS / 1000)
    except UpstreamError as exc:
        return str(exc)
    finally:
        link.close()
    if code == 0:
        return ''
    text = ('has not ended after %s' % format_duration(NOTIFY_MS)
            if code is None else 'was killed by signal %d' % -code
            if code < 0 else 'exited with code %d' % code)
    lines = redact(link.tail.decode('utf-8', 'replace')).strip().splitlines()
    return ': '.join([text] + lines[-1:])


# -- HTTP ---------------------------------------------------------------------

def _is_exempt(rule, host, port):
    """Tell whether a rule of no_proxy names a host: *, a name or suffix,
    an address or network, a port behind a name."""
    import ipaddress
    rule = rule.strip().lower()
    try:
        network = ipaddress.ip_network(rule.strip('[]'), strict=False)
        return ipaddress.ip_address(host) in network
    except ValueError:
        pass
    name, colon, number = rule.rpartition(':')
    if colon and number.isdigit():
        if int(number) != port:
            return False
        rule = name.strip('[]')
    name = rule.lstrip('*').lstrip('.')
    return rule == '*' or bool(name) and (
        host == name or host.endswith('.' + name))


def proxy_for(origin, env):
    """Name the proxy for an origin, '' for none (loopback never has one)."""
    scheme, host, port = origin

    def of(name):
        return env.get(name) or env.get(name.upper()) or ''
    if is_loopback(host) or any(_is_exempt(rule, host, port)
                                for rule in of('no_proxy').split(',')):
        return ''
    proxy = of(scheme + '_proxy') or of('all_proxy')
    return proxy if not proxy or '://' in proxy else 'http://' + proxy


def _login_of(url, header):
    """Make a header of the user part of a URL, {} when it has none."""
    import base64
    from urllib.parse import unquote_to_bytes, urlsplit
    user, at, _ = urlsplit(url).netloc.rpartition('@')
    plain = unquote_to_bytes(user if ':' in user else user + ':')
    return {header: 'Basic ' + base64.b64encode(plain).decode(
        'ascii')} if at else {}


def merge_headers(*tables):
    """Join tables of headers; of one name, in any case, the last counts."""
    found = {}
    for table in tables:
        found.update((name.lower(), (name, table[name])) for name in table)
    return dict(found.values())


def issuer_text(chain):
    """Name who issued the first certificate of a TLS message, or ''.

    In DER the issuer's names stand before the validity, the subject's
    behind it.
    """
    head = re.split(rb'\x17\r[0-9]{12}Z|\x18\x0f[0-9]{14}Z', chain)[0]
    return ', '.join(
        head[found.end():found.end() + ord(found.group(1))].decode(
            'utf-8', 'replace')
        for found in re.finditer(
            rb'\x55\x04[\x03\x0a][\x0c\x13]([\x01-\x7f])', head))


def _tls_error(exc, pipe):
    why = (getattr(exc, 'verify_message', '') or str(exc)).rstrip('.')
    hint = re.search('issuer|self.signed|SSL: CERT', why)
    issuer = issuer_text(pipe.chain)
    return UpstreamError('tls', 'no TLS with %s: %s%s%s' % (
        pipe.place, why, issuer and '; the certificate was issued by '
        + issuer, '; name the CA with --ca-file or SSL_CERT_FILE'
        if hint else ''))


def link_error(exc, pipe):
    """Translate what sockets, TLS and http.client raise: UpstreamError."""
    import socket
    import ssl
    place = pipe.place
    if isinstance(exc, (ssl.SSLError, ssl.CertificateError)):
        return _tls_error(exc, pipe)
    if isinstance(exc, (socket.gaierror, UnicodeError)):
        return UpstreamError('dns', 'the name of %s cannot be resolved: %s'
                             % (place, exc.args[-1]))
    if isinstance(exc, socket.timeout):
        return UpstreamError('timeout', 'no answer')
    if isinstance(exc, OSError):
        return UpstreamError('refused', '%s %s' % (
            place, 'cannot be reached: ' + os_reason(exc) if exc.errno
            else 'closed the connection without an answer'))
    if isinstance(exc, ValueError):     # its text may hold a password
        return UpstreamError('protocol', '%s cannot be sent over HTTP' % (
            'the URL of ' + place if place.startswith('the proxy')
            else 'its url'))
    return UpstreamError('protocol', 'the answer of %s is no HTTP: %s' % (
        place, str(exc)[:200] or type(exc).__name__))


class Pipe:
    """One TCP or TLS connection, under an absolute deadline.

    Every wait is cut into slices, so that neither dribbling nor a socket's
    own time-out holds up the deadline or a signal. To http.client it is a
    socket; what closes it is end().
    """

    def __init__(self, world, deadline):
        self.world, self.deadline = world, deadline
        self.sock, self.place, self.is_ended = None, '', False
        self.chain = b''        # the certificates that the other end sent

    def slice(self, what='no answer'):
        """Give the seconds to wait now; raises when there are none left."""
        if self.world.stop:
            raise Interrupted(self.world.stop[0])
        left = self.deadline - self.world.clock()
        if left <= 0:
            raise UpstreamError('timeout', what)
        return min(left, 0.1)

    def connect(self, host, port):
        """Connect to the first address of a host that lets us.

        In a thread of its own: nothing else can end the wait for a name.
        """
        import socket
        import threading
        failed, span = [], max(0.001, self.deadline - self.world.clock())

        def attempt():
            for name in (('127.0.0.1', '::1') if host == 'localhost'
                         else (host,)):
                try:
                    self.sock = socket.create_connection((name, port), span)
                    break
                except (OSError, ValueError) as exc:
                    failed.append(exc)
            if self.is_ended and self.sock:     # nobody waits any more
                self.sock.close()
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(self.slice('no connection, so no answer'))
        if self.sock is None:
            raise failed[0]
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context, host):
        """Do the TLS handshake."""
        def note(con, direction, version, kind, message, data):
            if direction == 'read' and message == 11:   # Certificate
                self.chain = data
        if hasattr(context, '_msg_callback'):           # from 3.8 on
            context._msg_callback = note
        self.sock = context.wrap_socket(self.sock, server_hostname=host,
                                        do_handshake_on_connect=False)
        self._patient(self.sock.do_handshake)

    def _patient(self, step, *given):
        import socket
        while True:
            self.sock.settimeout(self.slice())
            try:
                return step(*given)
            except socket.timeout:
                pass

    def sendall(self, data):
        """Send bytes, within what is left of the deadline."""
        self.slice()
        self.sock.settimeout(self.deadline - self.world.clock())
        self.sock.sendall(data)

    def makefile(self, mode):
        """Give http.client something to read from."""
        import io

        class Raw(io.RawIOBase):
            """The receiving end of the pipe."""

            def readable(raw):
                """Claim that it can be read."""
                return True

            def readinto(raw, buffer):
                """Receive some bytes, within the deadline."""
                return self._patient(self.sock.recv_into, buffer)

        return io.BufferedReader(Raw(), 1 << 16)

    def close(self):
        """Do nothing: http.client calls it while the answer is read."""

    def end(self):
        """Close the connection."""
        self.is_ended = True
        if self.sock is not None:
            self.sock.close()


class HttpReply:
    """The answer to one request, whose body is read while it arrives.

    headers: by names in lower case. url: where it came from in the end.
    """

    def __init__(self, pipe, raw, url):
        self.pipe, self.raw, self.url = pipe, raw, url
        self.status, self.headers = raw.status, {}
        for name, value in raw.getheaders():
            self.headers.setdefault(name.lower(), []).append(value)
        self.headers = {name: ', '.join(values)
                        for name, values in self.headers.items()}

    def chunk(self, deadline):
        """Give the bytes that come next, b'' at the end."""
        import http.client
        self.pipe.deadline = deadline
        try:
            return self.raw.read1(1 << 16)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise link_error(exc, self.pipe) from exc

    def body(self, deadline):
        """Give the whole body; raises UpstreamError for one too large."""
        parts, size = [], 0
        while not parts or parts[-1]:
            parts.append(self.chunk(deadline))
            size += len(parts[-1])
            if size > MAX_MESSAGE_BYTES:
                raise UpstreamError('protocol', 'a message is larger than '
                                    '%d bytes' % MAX_MESSAGE_BYTES)
        return b''.join(parts)

    def close(self):
        """Close the connection, read or not."""
        self.pipe.end()


def final_response():
    """Give the class that reads an answer, behind those that are none yet.

    http.client passes over 100 (Continue) alone, and not over 103.
    """
    import http.client

    class FinalResponse(http.client.HTTPResponse):
        """An answer; each 1xx before it counts as a 100."""

        def _read_status(self):
            version, status, reason = super()._read_status()
            return version, 100 if 101 < status < 200 else status, reason
    return FinalResponse


class HttpLink:
    """Requests over HTTP, each over a connection of its own.

    The one place that connects to servers: proxies, TLS and redirects.
    connecting: seconds that a connection may take to come about, None for
    whatever the request has.
    """

    def __init__(self, world, connecting=None):
        self.world, self.context = world, None
        self.connecting = connecting

    def request(self, method, url, headers, body, deadline):
        """Send a request: the HttpReply, whatever its status.

        Only a redirect to the same origin that keeps method and body is
        followed: no credential may reach another host.
        """
        from urllib.parse import urljoin
        asked, is_circle = plain_url(url), False
        for _ in range(4):
            reply = self._once(method, url, headers, body, deadline)
            place = reply.headers.get('location')
            if not 300 <= reply.status < 400 or not place:
                return reply
            reply.close()
            try:
                here, url = origin_of(url), urljoin(url, place)
                if origin_of(url) != here:
                    break
            except ValueError:
                break
            if reply.status not in (307, 308):
                break
        else:
            is_circle = True
        place = plain_url(url)
        raise Redirected(
            'redirected to itself' if is_circle or place == asked
            else 'redirected to what is no HTTP URL' if place == '(no URL)'
            else 'redirected to %s, set that URL' % place, reply.status, url)

    def _once(self, method, url, headers, body, deadline):
        import http.client
        from urllib.parse import quote, urlsplit
        pipe = Pipe(self.world, deadline)
        try:
            origin, parts = origin_of(url), urlsplit(url)
            target = (parts.path or '/') + (parts.query and '?' + parts.query)
            more = dict({'User-Agent': 'preflight/' + VERSION,
                         'Host': host_text(origin)},
                        **_login_of(url, 'Authorization'))
            if self.connecting is not None:
                pipe.deadline = min(deadline, self.world.clock()
                                    + self.connecting)
            name = unsendable(headers)
            if name is not None:        # its value is never shown
                raise UpstreamError('protocol', 'its header %s cannot be '
                                    'sent over HTTP' % json.dumps(name))
            via = self._connect(pipe, origin)
            pipe.deadline = deadline
            if via is not None:         # a proxy, asked for the whole URL
                target = 'http://' + host_text(origin) + target
            con = http.client.HTTPConnection(*origin[1:])
            con.sock, con.response_class = pipe, final_response()
            con.request(method, quote(target, "%/:=&?~#+!$,;'@()*[]"), body,
                        merge_headers(more, headers, via or {},
                                      {'Connection': 'close'}))
            return HttpReply(pipe, con.getresponse(), url)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            pipe.end()
            raise link_error(exc, pipe) from exc
        except BaseException:
            pipe.end()
            raise

    def _connect(self, pipe, origin):
        """Connect; gives the headers for a proxy that is asked for the
        whole URL, None where there is none."""
        proxy = proxy_for(origin, self.world.env)
        pipe.place = host_text(origin, True)
        if proxy and self._enter(pipe, proxy, origin):
            return _login_of(proxy, 'Proxy-Authorization')
        if not proxy:
            pipe.connect(*origin[1:])
        if origin[0] == 'https':
            pipe.secure(self._tls(), origin[1])
        return None

    def _tls(self):
        import ssl
        if self.context is None:        # OpenSSL reads SSL_CERT_FILE itself
            self.context = ssl.create_default_context()
            if self.world.ca_file:
                self.context.load_verify_locations(self.world.ca_file)
        return self.context

    def _enter(self, pipe, proxy, origin):
        """Connect to a proxy, and for https through it; True for http."""
        import http.client
        place = pipe.place
        pipe.place = 'the proxy ' + plain_url(proxy)
        if proxy[:7].lower() != 'http://':
            raise UpstreamError('protocol', 'the proxy that the environment '
                                'names is not an http:// URL')
        pipe.connect(*origin_of(proxy)[1:])
        if origin[0] == 'http':
            return True
        con = http.client.HTTPConnection(*origin[1:])
        con.sock = pipe
        con.request('CONNECT', place, None, dict(
            _login_of(proxy, 'Proxy-Authorization'), Host=place))
        status = con.getresponse().status
        if status != 200:
            raise UpstreamError('http_status', '%s refused to connect to %s: '
                                'HTTP %d' % (pipe.place, place, status))
        pipe.place = place
        return False


def peer_uid(sock):
    """Ask the OS for the user at the other end of a Unix socket."""
    import socket
    import struct
    if not hasattr(socket, 'SO_PEERCRED'):
        return None
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack('3i', data)[1]


class LocalLink(HttpLink):
    """Requests over a Unix socket."""

    def __init__(self, world, path):
        super().__init__(world)
        self.path = path

    def _connect(self, pipe, origin):
        import socket
        pipe.place = self.path
        pipe.sock = socket.socket(socket.AF_UNIX)
        pipe.sock.settimeout(pipe.slice())
        pipe.sock.connect(self.path)
        uid, place = peer_uid(pipe.sock), os.path.dirname(self.path)
        if uid not in (None, 0, os.getuid(), os.stat(place or '.').st_uid):
            # who may write in an open directory could bind the name, take
            # the credential and answer ready
            raise UpstreamError('refused', 'it is answered by the user %d, '
                                'who is neither root nor the owner of its '
                                'directory' % uid)


# ==========================================================================
# 18. sync: the one thing that looks at servers (contract 9, 10)
# ==========================================================================


def _child_link(server, environ, world):
    env = child_environment(server, environ)
    base = server.base
    cwd = os.path.join(base, server.cwd) if server.cwd else base
    command = find_server_command(server, env)
    return CHILD_LINK([command] + list(server.args), cwd, env, world)


class Talk:
    """One way to exchange messages with a server; here are its defaults.

    ask() sends a request and yields what comes, until the reply or, in an
    error or at the deadline, the end. tell() sends what has no reply.
    listen() yields what comes unasked until a deadline. close() ends it.
    """

    tail, noise = b'', 0        # the end of stderr; lines that were noise
    strays = 0                  # replies to nothing that we wait for
    is_started = False          # its process is there
    is_open = False             # a first reply has come
    status, version = 0, ''     # of the last HTTP answer; agreed upon

    def open(self):
        """Start what has to be started."""

    def renew(self):
        """Forget a session that the server has forgotten."""
        return False


class ChildTalk(Talk):
    """Messages with a child process, one a line."""

    def __init__(self, server, world):
        self.world, self.number, self.noise_bytes = world, None, 0
        self.link = _child_link(server, world.env, world)

    def open(self):
        """Start the server."""
        self.link.open()
        self.is_started = True

    @property
    def tail(self):
        """Give the end of the server's stderr."""
        return self.link.tail

    def tell(self, message, deadline):
        """Send a message that has no reply."""
        self.link.send(encode_message(message))

    def ask(self, message, deadline):
        """Send a request; yield the messages that come."""
        self.number = message['id']
        self.tell(message, deadline)
        return self.listen(deadline)

    def listen(self, deadline):
        """Yield the messages that come until the deadline."""
        line = self.link.receive(deadline)
        while line is not None:
            message = decode_line(line, self.number)
            if message is None:
                self._count_noise(line)
            else:
                yield message
            line = self.link.receive(deadline)

    def _count_noise(self, line):
        self.noise += 1
        self.noise_bytes += len(line)
        if not self.is_open and (self.noise > MAX_NOISE_LINES
                                 or self.noise_bytes > MAX_NOISE_BYTES):
            raise UpstreamError('protocol', '%s on stdout and no message'
                                % plural(self.noise, 'non-protocol line'))

    def close(self):
        """End the server and all that it started."""
        self.link.close()


class EventStream:
    """The events of one HTTP answer, while it arrives."""

    def __init__(self, reply, deadline):
        self.reply, self.deadline = reply, deadline
        self.parser, self.events = SseParser(), []

    def next(self):
        """Give the next (type, data), None at the end of the stream."""
        while not self.events:
            chunk = self.reply.chunk(self.deadline)
            self.events = self.parser.feed(chunk)
            if not self.events and self.parser.is_held() and decode_line(
                    b'\n'.join(self.parser.data), None):
                # A whole message whose event some servers never end.
                self.events = self.parser.feed(b'\n\n')
            if not chunk and not self.events:
                return None
        return self.events.pop(0)

    def messages(self, number):
        """Yield the messages until the end of the stream."""
        for kind, data in iter(self.next, None):
            message = decode_line(data, number) if kind == 'message' else None
            if message:
                yield message


class HttpTalk(Talk):
    """Streamable HTTP: every message of ours is a POST of its own."""

    def __init__(self, server, world):
        self.server, self.world = server, world
        self.link, self.url = HttpLink(world), server.url
        self.session = ''

    def send(self, method, deadline, message=None, last_id=''):
        """Send one HTTP request: the HttpReply, whatever its status."""
        ours = {'Accept': 'text/event-stream'}
        if message:
            ours = {'Accept': 'application/json, text/event-stream',
                    'Content-Type': 'application/json'}
        if last_id:
            ours['Last-Event-ID'] = last_id
        if self.session:
            ours['Mcp-Session-Id'] = self.session
        reply = self.link.request(
            method, self.url, merge_headers(
                self.server.headers, ours,
                mcp_headers(message or {}, self.version)),
            encode_message(message) if message else None, deadline)
        self.status = reply.status
        return reply

    def tell(self, message, deadline):
        """Send what has no reply; if that failed, the next request says."""
        try:
            self.send('POST', deadline, message).close()
        except UpstreamError as exc:
            if exc.cause == 'timeout':
                raise

    def ask(self, message, deadline):
        """Send a request; yield the messages of its answer."""
        reply = self.send('POST', deadline, message)
        try:
            if reply.status == 200 and (
                    media_type(reply.headers) == 'text/event-stream'):
                found = self._stream(reply, message['id'], deadline)
            else:
                found = [self._whole(reply, message['id'], deadline)]
            held = None
            for got in found:
                if got.get('id') is None and got.get('error') is not None:
                    held = dict(got, id=message['id'])
                    continue
                self._adopt(message, got, reply)
                yield got
            if held:            # no better reply has come
                yield held
        finally:
            reply.close()
        raise UpstreamError('protocol', 'the answer to %s ended without a '
                            'reply' % message['method'])

    def _adopt(self, message, got, reply):
        """Take the session and version that a good initialize names."""
        result = got.get('result')
        if message['method'] != 'initialize' or not is_table(result):
            return
        session = reply.headers.get('mcp-session-id', '')
        self.session = session if re.match(r'[\x21-\x7e]+\Z',
                                           session) else ''
        spoken = result.get('protocolVersion')
        self.version = spoken if spoken in HANDSHAKE_VERSIONS else ''

    def _whole(self, reply, number, deadline):
        """Read a reply that is one JSON message."""
        status, body, message = reply.status, b'', None
        if status == 200 or 400 <= status < 500 and not (
                status in FINAL_STATUSES or status == 404 and self.session):
            body = reply.body(deadline)
            message = decode_line(body, number)
        if message and status == 200:
            return dict(message, id=number) if is_reply_to(
                message, number, False) else message
        place = 'from ' + plain_url(reply.url)
        if message and message.get('error') is not None:
            message.update({'id': number,       # it may be anything
                            AT: ' (HTTP %d; %s)' % (status, place)})
            return message
        if status == 200:
            raise UpstreamError(
                'protocol', 'the answer (%s) is no JSON-RPC message; %s'
                % (media_type(reply.headers) or 'of no type', place))
        raise self.refusal(reply, body, deadline)

    def refusal(self, reply, body, deadline):
        """Make the error for a status; a 401 tells who signs in."""
        exc = status_error(reply.status, reply.headers,
                           has_credential(self.server), body)
        if exc.cause:
            exc.args = ('%s; from %s' % (
                exc, reply.pipe.place if reply.status == 407
                else plain_url(reply.url)),)
        if reply.status == 401:
            issuers = self._find_issuers(reply, min(
                deadline, self.world.clock() + METADATA_MS / 1000))
            if issuers:
                exc.args = ('%s; its authorization server is %s' % (
                    exc, ', '.join(issuers)),)
        return exc

    def _find_issuers(self, reply, deadline):
        """Look up who signs in: GETs, without credentials."""
        for url in metadata_urls(self.server.url,
                                 bearer_challenge(reply.headers)):
            try:
                found = self.link.request(
                    'GET', url, {'Accept': 'application/json'}, None,
                    deadline)
                try:
                    if found.status == 200:
                        return read_issuers(found.body(deadline))
                finally:
                    found.close()
            except UpstreamError:
                pass            # the 401 is the finding
        return []

    def _stream(self, reply, number, deadline):
        """Yield the messages of an event stream; resume one cut short."""
        last, tries = '', 2
        while reply.status == 200:
            stream = EventStream(reply, deadline)
            try:
                yield from stream.messages(number)
            finally:
                reply.close()
            last, wait = stream.parser.last_id or last, stream.parser.retry
            if not last or not tries:
                return
            tries -= 1
            self._pause(deadline, RETRY_MS if wait is None else wait)
            reply = self.send('GET', deadline, last_id=last)
        reply.close()

    def _pause(self, deadline, wait_ms):
        end = min(deadline, self.world.clock() + wait_ms / 1000)
        while self.world.clock() < end and not self.world.stop:
            self.world.sleep(min(0.05, wait_ms / 1000))

    def listen(self, deadline):
        """Yield nothing until the deadline: nothing comes unasked."""
        self._pause(deadline, QUIET_MS)
        return iter(())

    def renew(self):
        """Forget a session that the server has forgotten."""
        if self.status != 404 or not self.session:
            return False
        self.session = self.version = ''
        return True

    def close(self):
        """End the session; what the server says to that is no matter."""
        try:
            if self.session:
                self.send('DELETE', self.world.clock()
                          + GRACE_MS / 1000).close()
        except (UpstreamError, Interrupted):
            pass


class SseTalk(HttpTalk):
    """The older HTTP+SSE: we post messages, replies come on one stream."""

    stream = None

    def _opening_events(self):
        try:
            yield from iter(self.stream.next, None)
        except UpstreamError as exc:
            if exc.cause == 'timeout':
                exc.args = ('no endpoint event, so no answer',)
            raise

    def _open(self, deadline):
        from urllib.parse import urljoin
        reply = self.send('GET', deadline)
        if self.server.transport == 'auto':     # it may be no such server
            deadline = min(deadline, self.world.clock() + ENDPOINT_MS / 1000)
        self.stream = EventStream(reply, deadline)
        if reply.status != 200:
            raise self.refusal(reply, b'', deadline)
        kind = media_type(reply.headers)
        if kind != 'text/event-stream':
            raise UpstreamError(
                'protocol', 'the answer (%s) is no event stream; from %s' % (
                    kind or 'of no type', plain_url(reply.url)))
        for kind, data in self._opening_events():
            if kind != 'endpoint':
                continue
            try:
                self.url = urljoin(reply.url, data.decode('utf-8').strip())
                if origin_of(self.url) == origin_of(reply.url):
                    return
            except ValueError:
                pass
            raise UpstreamError('protocol', 'its endpoint event names '
                                'another origin: %s' % plain_url(self.url))
        raise UpstreamError('protocol', 'the event stream names no endpoint')

    def ask(self, message, deadline):
        """Post a request; yield the messages that come on the stream."""
        if self.stream is None:
            self._open(deadline)
        reply = self.send('POST', deadline, message)
        reply.close()
        if not 200 <= reply.status < 300:
            raise self.refusal(reply, b'', deadline)
        self.stream.deadline = deadline
        for got in self.stream.messages(message['id']):
            self._adopt(message, got, self.stream.reply)
            yield got
        raise UpstreamError('protocol', 'the event stream ended')

    def close(self):
        """Close the stream, and so the session."""
        if self.stream:
            self.stream.reply.close()


TALKS = {'stdio': ChildTalk, 'http': HttpTalk, 'sse': SseTalk}


class Dialogue:
    """Drives one conversation of section 8, whatever carries it.

    opening, ending: monotonic deadlines of the first reply and of all.
    is_last: there is no other way to look at this server.
    """

    def __init__(self, talk, server, opening, ending, is_last):
        self.talk, self.server, self.is_last = talk, server, is_last
        self.opening, self.ending = opening, ending
        self.start = talk.world.clock()
        self.is_sure = False    # it must know server/discover
        self.number = 0         # of the request that is waited for
        self.method = ''        # of the step that is being done
        self.is_list_changed = False

    def run(self, era):
        """Converse to the end: the Listing. Raises UpstreamError."""
        try:
            return self._converse(era)
        except UpstreamError:
            if not self.talk.renew():
                raise
        return self._converse(era)

    def _converse(self, era):
        steps = explore(era, self.server.client)
        self.is_sure = era == 'modern' and self.is_last
        try:
            step = steps.send(None)
            while True:
                self.method = step.method
                try:
                    reply = self._do(step)
                except UpstreamError as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(reply)
        except StopIteration as end:
            return end.value
        except UpstreamError as exc:
            exc.is_listing = self.method == 'tools/list'
            raise
        finally:
            steps.close()

    def _do(self, step):
        try:
            if step.params == TELL:
                return self.talk.tell({'method': step.method}, self.ending)
            if step.params == SETTLE:
                return self._settle()
            return self._ask(step)
        except UpstreamError as exc:
            if exc.cause == 'timeout':
                spent = round(self.talk.world.clock() - self.start, 1)
                exc.args = ('%s to %s within %s' % (
                    exc, step.method, format_duration(int(spent * 1000))),)
            raise

    def _deadline(self, method):
        """Give until when to wait for the reply to a method.

        Silence is how some servers answer what they do not know: they get
        less time for server/discover where that is a guess.
        """
        end = self.ending if self.talk.is_open else self.opening
        if method != 'server/discover' or self.is_sure:
            return end
        now = self.talk.world.clock()
        return now + min(DISCOVER_MS / 1000, (end - now) / 2)

    def _ask(self, step):
        """Send a request and give its reply, before the deadline."""
        self.number += 1
        if step.method == 'tools/list' and 'cursor' not in step.params:
            self.is_list_changed = False
        messages = self.talk.ask(
            {'id': self.number, 'method': step.method,
             'params': step.params}, self._deadline(step.method))
        try:
            for message in messages:
                if is_reply_to(message, self.number, self.talk.is_open):
                    self.talk.is_open = True
                    return message
                self._hear(message)
        finally:
            messages.close()
        raise UpstreamError('timeout', 'no answer')

    def _hear(self, message):
        """Note that the list changed; answer what the server asks."""
        if 'method' not in message:
            self.talk.strays += 1
        if message.get('method') == 'notifications/tools/list_changed':
            self.is_list_changed = True
        reply = answer_request(message, self.server.client,
                               self.server.base)
        if reply:
            self.talk.tell(reply, self.ending)

    def _settle(self):
        """After a list_changed: wait until it is quiet, list once more."""
        if not self.is_list_changed:
            return False
        quiet, now = QUIET_MS / 1000, self.talk.world.clock()
        end = min(self.ending, now + 10 * quiet)
        while True:
            for message in self.talk.listen(
                    min(end, self.talk.world.clock() + quiet)):
                self._hear(message)
                break
            else:
                return True


def _stderr_of(talk, secrets):
    """Give the end of stderr, masked.

    Masked before it is cut: half a secret would not be recognized.
    """
    tail = talk.tail.decode('utf-8', 'replace') if talk else ''
    return redact(tail, secrets)[-STDERR_TAIL_BYTES:]


LIST_FAILED = 'tools/list failed'
# What of a connected server can keep its list back; others lose the server.
LIST_CAUSES = ('protocol', 'timeout', 'http_status', 'rate_limited')


def is_list_failure(state, cause, detail):
    """Tell whether a look found a server connected, but not its list."""
    return (state == 'error' and cause in LIST_CAUSES
            and (detail or '').startswith(LIST_FAILED))


LAST_WORDS = '; last stderr: '


def _strays_text(talk):
    return '%s came that answered nothing we asked' % plural(
        talk.strays, 'message')


def _failure(exc, talk, secrets):
    """Word a failure, with the last line a dying server wrote."""
    detail, tail = redact(str(exc), secrets), _stderr_of(talk, secrets)
    if exc.is_listing and exc.cause in LIST_CAUSES and (
            not detail.startswith(LIST_FAILED)):
        detail = LIST_FAILED + ': ' + detail
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    if talk and talk.strays and exc.cause in ('exited', 'timeout'):
        detail += '; ' + _strays_text(talk)
    if exc.cause in ('exited', 'timeout', 'refused') and lines:
        detail += LAST_WORDS + lines[-1][:300]
    state = 'pending_auth' if isinstance(exc, LoginNeeded) else 'error'
    return Observation(state, exc.cause, detail, None, None, 0, None, {},
                       [], tail)


# What our own details are made of, and what variables hold that are no
# secrets: were it masked, no detail could be read.
PLAIN_WORDS = (
    'redirected to itself, to what is no http url, set that url; tools/list '
    'failed with error; the server speaks; we know; exited with code before '
    'initialize, its list was complete; killed by signal; last stderr; no '
    'answer within, no connection; the name cannot be resolved, reached, '
    'started: connection refused; closed the connection without an answer; '
    'the message is larger than bytes; the credential was refused, none is '
    'configured, token lacks rights; retry-after; https localhost timeout '
    'trace debug verbose info notice warning critical fatal true false null '
    'auto default test development staging production json text plain stdio')


def is_plain_word(name, value):
    """Tell whether a variable holds what gives nothing away.

    That is a part of a text of ours, or an address without a path; never
    under a name that tells of a secret.
    """
    return not is_secret_name(name) and (
        value.lower() in PLAIN_WORDS
        or bool(re.match(r'(?i)https?://[^/?#@\s]+/?\Z', value)))


def secrets_of(server, plain, environ):
    """List the values of a server that must never be shown.

    Those of env, headers and URL, and those that mask_args masks, but for
    what chooses code and plain words; of variables elsewhere that are no
    paths, and what health probes with. plain: the server expanded.
    """
    args = [row[2:] for row in split_args(plain.args)
            if not is_code_env(row[2])]
    texts = list(plain.env.items()) + list(plain.headers.items()) + args
    # of "Bearer abc" the last word alone may be repeated, too
    words = {word for name, text in texts if text
             for word in (text, text.split(' ')[-1])
             if not is_plain_word(name, word)}
    named = {text.split(' ')[-1] for name, text in texts if text
             and is_secret_name(name)
             and re.search('/[A-Za-z0-9+/=]{19,}\\Z', text)}
    words.update(url_secrets(plain.url))
    words -= {value for name, value in launch_value(plain)['env'].items()
              if not is_secret_env(name)}
    named_by = dict(PRESETS.get(server.health.get('preset'), ()),
                    **server.health)
    words.add(environ.get(named_by.get('token_env') or '', ''))
    for text in texts_of(server).values():
        for name in re.findall(r'(?:\$|\{)(?:\{?env:|\{)? ?(%s)' % NAME,
                               text):
            value = environ.get(name, '')
            if value and not is_plain_word(name, value):
                words.add(value)
    return [word for word in words if len(word) >= 4 and (
        word[0] != '/' or word in named)]       # base64 may begin so


def _observation(listing, talk, secrets):
    tools, warnings = read_tools(listing.tools)
    if talk.noise:
        warnings.insert(0, '%s on stdout' % plural(
            talk.noise, 'non-protocol line'))
    if talk.strays:
        warnings.insert(0, _strays_text(talk))
    refused = {tool.name: tool.flaw for tool in tools
               if tool.flaw.startswith('definition refused')}
    return Observation('ready', '', '', listing.protocol, listing.era,
                       min(listing.ttl, MAX_TTL_MS), tools, refused,
                       warnings, _stderr_of(talk, secrets),
                       cache_scope=listing.cache_scope)


def _ways(server, era):
    """List the (transport, era) pairs to try, in order."""
    kind = server.transport
    eras = ['handshake', 'modern'] if kind == 'stdio' else ['handshake']
    if era == 'modern' and kind != 'sse':
        eras = ['modern', 'handshake']
    if kind == 'auto':
        return [('http', each) for each in eras] + [('sse', 'handshake')]
    return [(kind, each) for each in eras]


def _is_misled(exc, talk, era):
    """Tell whether the next way may do better than one that failed.

    So it is for a server that died on the first message, for one that has
    left the era remembered of it, and for one that refuses our POST as the
    older HTTP+SSE does.
    """
    if exc.cause == 'exited' or talk is None:
        return talk is not None and talk.is_started and not talk.is_open
    if era == 'modern':
        return exc.cause in ('protocol', 'http_status') or (
            exc.cause in ('timeout', 'refused') and not talk.is_open)
    return talk.status in SSE_STATUSES and not talk.version


def _look_once(server, way, deadlines, world, secrets):
    """Look one way: (Observation, True if the next may do better).

    way: (transport, era, whether it is the last).
    """
    talk = None
    try:
        talk = TALKS[way[0]](server, world)
        talk.open()
        listing = Dialogue(talk, server, *deadlines,
                           is_last=way[2]).run(way[1])
        return _observation(listing, talk, secrets), False
    except UpstreamError as exc:
        if exc.cause == 'exited' and talk.is_started:
            exc.args = ('%s before %s' % (
                exc, 'its list was complete' if talk.is_open
                else 'initialize'),)
        return _failure(exc, talk, secrets), _is_misled(exc, talk, way[1])
    finally:
        if talk:
            talk.close()


def observe_server(server, era, deadlines, world):
    """Look at one server: an Observation, whatever happens to it.

    deadlines: seconds on the monotonic clock by which the first reply must
    be there, and the list complete. What is started is ended before this
    returns. Of several ways that fail, the first says most, unless nothing
    came of it.
    """
    plain, missing = expand_server(server, world.env, read_text)
    if missing:
        return Observation(
            'error', 'unresolved', '%s has no value' % ', '.join(missing)
            if len(missing) == 1 else '%s have no value' % ', '.join(missing),
            None, None, 0, None, {}, [], '')
    first, secrets = None, secrets_of(server, plain, world.env)
    ways = _ways(plain, era)
    for way in ways:
        seen, is_misled = _look_once(plain, way + (way == ways[-1],),
                                     deadlines, world, secrets)
        if first is None or first.cause == 'timeout':
            first = seen
        if not is_misled:
            break
    return (first if seen.state == 'error' else seen)._replace(
        expires_at=credential_end(plain.headers))


def _link_of(link, digest):
    """Cut a record down to what counts under the configured launch."""
    if link is None:
        return None
    if link.launch != digest:
        link = Connection(*[None] * len(link._fields))._replace(
            launch=digest, state='', refused={}, lease_at=link.lease_at,
            lease_until=link.lease_until, lease_launch=link.lease_launch)
    if link.lease_launch != digest:
        link = link._replace(lease_at=None, lease_until=None)
    return link


def known_launches(con, config, server):
    """Load the launches that the configured one is compared with.

    Where a lockfile holds the approvals (contract 12) it is asked first;
    the state's memory counts only for a server that it lacks, and only
    that this very launch was approved, so that the server is not new.
    """
    launches, lock = load_launches(con, server.name), config.lock
    if lock is None:
        return launches
    digest = launch_digest(server)
    if server.name in lock.launches:
        return [Launch(*lock.launches[server.name], how='lock', at=0,
                       baselined=True)]
    return [row for row in launches if row.digest == digest]


def load_known(con, config, name):
    """Load one server as the gates see it: (Known, row id)."""
    server, why = look_up(config, name)
    if server is None:
        return Known(None, why, '', '', None, '', ''), None
    digest = launch_digest(server)
    row_id, _, link = load_link(con, name, seen_key(server))
    switches = load_switches(con, name, server.file)
    launches = known_launches(con, config, server)
    fact = (config.lock and lock_fact(server, digest, config.lock)
            or quarantine_fact(server, switches.get('quarantined'), launches,
                               config.settings, link.launch if link
                               else None))
    note = 'its launch is ' + ('known' if launches else 'new')
    return Known(
        server, '', disabled_fact(server, switches.get('enabled')), fact,
        _link_of(link, digest), digest, note, config.lock), row_id


def _with_lock(known, tools):
    """Put a lockfile's approvals in the place of the state's."""
    name, lock = known.server.name, known.lock
    if lock is None:
        return tools
    return {tool: row._replace(approved=locked_approval(lock, name, tool))
            for tool, row in tools.items()}


def load_approvals(con, known):
    """Load what is approved of a server: name -> Approval."""
    name, lock = known.server.name, known.lock
    if lock is None:
        return load_approved(con, name, known.launch)
    refs = [parse_id(text) for text in lock.tools]
    return {ref.tool: locked_approval(lock, name, ref.tool)
            for ref in refs if ref.server == name}


def load_approved_text(con, lock, tool):
    """Load the canonical text of what is approved, '' if it is not kept.

    lock: that may hold it beside the state, or None.
    """
    text = load_definition(con, tool.approved.hash) if tool.approved else ''
    held = lock and lock.tools.get('%s:%s' % (tool.server, tool.name))
    return text or (held.text if held and tool.approved and held.hash
                    == tool.approved.hash else '')


Row = namedtuple('Row', 'server state cause detail tools added changed '
                        'vanished baseline ms notes broken awaiting was '
                        'remedy approved')
Row.__new__.__defaults__ = ((), 0, None, '', 0)
Row.__doc__ = """What a sync says of one server. baseline: True when its
list was trusted on first use; notes: sentences for the operator; broken:
lines on the contracts that it broke or mended; awaiting: how many tools
await an approval; was: (state, cause) at the last look, None for the first;
remedy: the command to run next, '' for none; approved: how many tools this
look approved."""


def _row(name, state, cause='', detail='', tools=0):
    return Row(name, state, cause, detail, tools, [], [], [], False, 0, [])


def _compared(con, known, tool):
    """Say in which fields a tool is not the approved one, and whether
    ignore_changes covers them. A flaw has no text to compare."""
    approved, server = tool.approved, known.server
    if not (approved and tool.hash and approved.hash != tool.hash
            and approved.version == tool.version
            and (server.ignore_changes or is_restless(tool))):
        return tool
    old = load_approved_text(con, known.lock, tool)
    differs = changed_fields(old, load_definition(con, tool.hash)
                             ) if old else ()
    return tool._replace(differs=differs, ignored=ignored_fields(
        server.ignore_changes, tool.name, differs))


def load_server_tools(con, row_id, known, only=None):
    """Load a server's tools under its configured launch: name -> Tool.

    The one way to tools whose status is asked for: what ignore_changes
    covers is known of each. only: one tool name, or None for all.
    """
    server = known.server
    tools = _with_lock(known, load_tools(con, row_id, server.name,
                                         known.launch, only))
    return {name: _compared(con, known, tool)
            for name, tool in tools.items()}


def _quiet_pairs(con, known, before, seen):
    """Pair the hashes whose definitions differ in ignored fields only."""
    server, pairs = known.server, set()
    for new in (seen.tools or ()) if server.ignore_changes else ():
        old = before.get(new.name)
        texts = {old.hash: load_definition(con, old.hash)} if old else {}
        if old and old.approved:
            texts[old.approved.hash] = load_approved_text(con, known.lock,
                                                          old)
        for digest, text in texts.items() if new.hash else ():
            if text and ignored_fields(
                    server.ignore_changes, new.name,
                    changed_fields(text, new.text)):
                pairs.add((digest, new.hash))
    return pairs


def _tools_before(con, row_id, known, link):
    """Give the Tools to compare with, tombstones among them."""
    name, digest = known.server.name, known.launch
    tools = _with_lock(known, load_tools(con, row_id, name, digest))
    if link.launch != digest:
        tools = {n: t._replace(listed=False) for n, t in tools.items()}
    for tool, approval in load_approvals(con, known).items():
        if tool not in tools:
            tools[tool] = Tool(name, tool, False, '', 0, {}, '', approval,
                               None, None, None)
    return tools


def _save_trust(con, known, plan, launches, now):
    """Approve what a baseline or mode auto approves; know the launch.

    Where a lockfile holds the approvals, neither is written.
    """
    if known.lock:
        return
    name = known.server.name
    approve = set(plan.approve)
    rows = [tool for tool in plan.rows if tool.name in approve]
    if rows:
        save_approvals(con, name, known.launch, rows, (plan.how, now))
    if plan.rows and is_baseline(known.launch, launches):
        how = next((row.how for row in launches
                    if row.digest == known.launch), 'baseline')
        save_launch(con, name, Launch(
            known.launch, launch_text(known.server), how, now, True))


def _row_of(con, row_id, known, plan, seen):
    name = known.server.name
    tools = [tool for tool in load_server_tools(con, row_id, known).values()
             if tool.listed]
    notes = ['%s: %s' % (name, note) for note in known.server.warnings]
    notes += ['%s: %s' % (name, note) for note in seen.warnings]
    detail, awaiting = plan.detail, 0
    held = [tool_status(tool)[0] for tool in tools]
    words = ['%d %s' % (held.count(status), word) for status, word in (
        (PENDING, 'pending'), (CHANGED, 'changed')) if status in held]
    if plan.state == 'ready':
        awaiting = held.count(PENDING) + held.count(CHANGED)
        found = ['awaiting approval: ' + ', '.join(words)] if words else []
        quiet = sum(1 for tool in tools if tool.ignored)
        found += ['changes ignored: %d' % quiet] if quiet else []
        detail = '; '.join(found) or detail
    return Row(name, plan.state, plan.cause, detail, len(tools), plan.added,
               plan.changed, plan.vanished, plan.how == 'baseline'
               and bool(plan.approve), 0, notes, (), awaiting,
               approved=len(plan.approve))


def _record_sync(con, world, row, plan, is_same):
    """Leave a record when something changed, or was approved by itself."""
    def ids(names):
        return ['%s:%s' % (row.server, name) for name in names]
    if plan.approve or row.added or row.changed or row.vanished or (
            not is_same):
        append_record(con, Record(
            'sync', 'cli', world.now(), world.request_id, 'operator',
            'success' if row.state == 'ready' else 'blocked', {
                'server': row.server, 'state': row.state,
                'cause': row.cause, 'added': ids(row.added),
                'changed': ids(row.changed), 'vanished': ids(row.vanished),
                'approved': ids(plan.approve), 'baseline': row.baseline}))
        bump_generation(con)


def no_watch(con, name):
    """Watch no contracts: no lines."""
    return ()


def save_observation(store, known, seen, owner, watch=no_watch):
    """Write what was seen of a server, and give its lease back: its Row.

    What it is compared with is read inside the same transaction, so an
    approval that came meanwhile is not undone. owner: of the lease.
    watch(con, name) then gives the lines on what that means for contracts.
    """
    server, now = known.server, store.world.now()
    with store.write() as con:
        drop_lease(con, server.name, seen_key(server), owner)
        row_id, _, link = load_link(con, server.name, seen_key(server))
        before = _tools_before(con, row_id, known, link)
        launches = () if known.lock else load_launches(con, server.name)
        # a list that was imported came first, and nobody has approved it
        is_first = not known.lock and is_baseline(
            known.launch, launches) and not any(
                tool.listed for tool in before.values())
        fact = launch_fact(server, launches, None)
        if fact:                # another became the baseline while we looked
            return _row(server.name, 'quarantined', '', fact)
        plan = plan_sync(before, seen, is_first, 'manual' if known.lock
                         else server.trust_mode,
                         _quiet_pairs(con, known, before, seen))
        is_same = (link.launch == known.launch and link.state == plan.state)
        is_listed = plan.rows is not None
        kept = link if link.launch == known.launch else link._replace(
            listed_at=None, refused={}, protocol=None, era=None, ttl=0)
        if link.launch != known.launch and row_id:
            forget_list(con, row_id)
        save_link(con, row_id, kept._replace(
            launch=known.launch, state=plan.state, cause=plan.cause,
            detail=plan.detail[:1000], observed_at=now, stderr=seen.stderr,
            since=link.since if is_same else now,
            listed_at=now if is_listed else kept.listed_at,
            protocol=seen.protocol or kept.protocol,
            era=seen.era or kept.era,
            ttl=seen.ttl if is_listed else kept.ttl,
            expires_at=seen.expires_at,
            refused=seen.refused if is_listed else kept.refused))
        if is_listed:
            if known.lock:      # it may be renewed with nothing run here
                reset_moves(con, [row_id], [
                    name for name, tool in before.items() if tool.approved
                    and tool.approved.hash == tool.hash])
            save_tools(con, row_id, plan.rows, plan.gone, now)
            save_scope(con, server.name, seen_key(server), seen.cache_scope)
            _save_trust(con, known, plan, launches, now)
        row = _row_of(con, row_id, known, plan, seen)
        _record_sync(con, store.world, row, plan, is_same)
        is_news = save_notes(con, server.name, seen_key(server),
                             [server.warnings, seen.warnings])
        return row._replace(
            notes=row.notes if is_news or store.world.width else [],
            was=(link.state, link.cause) if link.state else None,
            broken=watch(con, server.name))


def _drop_dead_switches(con, server):
    """Drop switches whose config value has changed since: sentences."""
    notes = []
    values = {'enabled': server.enabled, 'quarantined': server.quarantined}
    for key, switch in load_switches(con, server.name, server.file).items():
        if switch.over != values[key]:
            save_switch(con, server.name, server.file, key, None)
            notes.append('%s: %s is now %s in the config, which ends the '
                         'switch set by hand' % (
                             server.name, key, json.dumps(values[key])))
    return notes


class OwnerLock(FileLock):
    """The lock that a run of sync holds while it lives.

    The system lets go of it when the run is killed, and its file stays: so
    its leases need not run out before another run looks.
    """

    def __init__(self, world, owner):
        super().__init__(os.path.join(world.home, 'sync-%s.lock' % owner),
                         world)

    def is_killed(self):
        """Tell whether its run is certainly gone.

        Without a file nothing is known: it may be an older version's.
        """
        try:
            return os.path.exists(self.path) and self.take_now()
        except StoreError:
            return False
        finally:
            self.close()

    def forget(self):
        """Take the file away; where it cannot be, it is swept later."""
        try:
            os.unlink(self.path)
        except OSError:
            pass

    def __exit__(self, *exc):
        self.forget()
        super().__exit__(*exc)
        self.close()


def _sweep_owners(world):
    """Take away the lock files of runs that were killed."""
    for name in os.listdir(world.home):
        match = re.match(r'sync-([0-9a-f]+)\.lock\Z', name)
        lock = OwnerLock(world, match.group(1)) if match else None
        if lock and lock.is_killed():
            lock.forget()


def _is_held(world, link, owner, now):
    """Tell whether a lease runs, and its run may still live."""
    return is_lease_running(link, now) and not OwnerLock(
        world, os.path.basename(owner or '')).is_killed()


class Round:
    """One run of sync: leases, looks side by side, results.

    Only the main thread touches the store; a worker looks at one server and
    hands back an Observation.
    """

    def __init__(self, store, config, limit, progress, watch=no_watch):
        import queue
        self.store, self.world = store, store.world
        self.config, self.limit = config, limit
        self.progress = progress        # called with (done, all, names)
        self.watch = watch              # see save_observation
        self.owner = self.world.random(8).hex()
        self.results = queue.Queue()
        self.rows = {}          # name -> Row
        self.running = {}       # name -> (thread, start, Known)
        self.waiting = []       # Servers still to be looked at
        self.foreign = {}       # name -> (Server, lease_at, owner)

    def run(self, servers):
        """Look at all of them: Rows in the order asked for.

        Raises Interrupted once every child is gone and every lease given
        back.
        """
        self.waiting = list(servers)
        _sweep_owners(self.world)
        with OwnerLock(self.world, self.owner):
            try:
                while self.waiting or self.running or self.foreign:
                    if self.world.stop:
                        raise Interrupted(self.world.stop[0])
                    self._start_some()
                    self._collect(0.05)
                    self._watch_foreign()
                    self._tell_progress(len(servers))
            finally:
                self._end()
        return [self.rows[server.name] for server in servers]

    def _tell_progress(self, total):
        names = ['%s (another sync looks)' % name
                 for name in sorted(self.foreign)]
        self.progress(len(self.rows), total, sorted(self.running) + names)

    def _end(self):
        """End the looks that still run, whatever ended this round."""
        if not self.running:
            return
        self.world.stop.append(0)       # no signal: for the looks alone
        for thread, _, _ in self.running.values():
            thread.join()
        self.world.stop.remove(0)
        try:
            with self.store.write() as con:
                for name, (_, _, known) in self.running.items():
                    drop_lease(con, name, seen_key(known.server), self.owner)
        except StoreError:
            pass                # it runs out; what ended us says more

    def _start_some(self):
        for server in list(self.waiting):
            if len(self.running) >= MAX_SIDE_BY_SIDE:
                return
            self.waiting.remove(server)
            self._start(server)

    def _start(self, server):
        import threading
        opening = self.limit or server.start_timeout
        span = self.limit or opening + server.request_timeout
        with self.store.write() as con:
            notes = _drop_dead_switches(con, server)
            known = self._admit(con, server, span)
        for note in notes:      # never told under the lock
            self.world.tell(note)
        if known is None:
            self._tell_broken(self.rows.get(server.name))
            return
        era = known.connection.era if known.connection else None
        start = self.world.clock()
        thread = threading.Thread(target=self._work, args=(
            known.server, era, (start + opening / 1000,
                                start + span / 1000)))
        thread.start()
        self.running[server.name] = (thread, start, known)

    def _admit(self, con, server, span):
        """Take the lease of a server: its Known, None if not ours to see."""
        name, now = server.name, self.world.now()
        known, _ = load_known(con, self.config, name)
        owner, link = load_link(con, name, seen_key(server))[1:]
        if known.disabled or known.quarantined:
            state = 'disabled' if known.disabled else 'quarantined'
            row = _row(name, state, '', known.disabled or known.quarantined)
            self.rows[name] = row._replace(broken=self.watch(con, name))
            return None
        if link and owner != self.owner and _is_held(self.world, link, owner,
                                                     now):
            self.foreign[name] = (server, link.lease_at, owner)
            return None
        take_lease(con, name, seen_key(server), (
            now, now + span + LEASE_GRACE_MS, known.launch, self.owner))
        return known

    def _work(self, server, era, deadlines):
        try:
            seen = observe_server(server, era, deadlines, self.world)
            notes = expand_server(server, self.world.env, read_text)[0]
            seen = seen._replace(warnings=notes.warnings[
                len(server.warnings):] + seen.warnings)
        except Interrupted:
            seen = None
        except Exception as exc:    # one server must not cost the others
            seen = Observation('error', 'protocol', 'internal error: %r'
                               % exc, None, None, 0, None, {}, [], '')
        self.results.put((server.name, seen))

    def _collect(self, seconds):
        import queue
        try:
            name, seen = self.results.get(timeout=seconds)
        except queue.Empty:
            return
        thread, start, known = self.running[name]
        if seen is None:
            return
        thread.join()
        row = save_observation(self.store, known, seen, self.owner,
                               self.watch)
        self._tell_broken(row)
        del self.running[name]
        spent = int((self.world.clock() - start) * 1000)
        self.rows[name] = row._replace(ms=spent)
        self.world.sleep(COMMIT_PAUSE_MS / 1000)

    def _tell_broken(self, row):
        """Tell at once what was found out only once, off the progress."""
        for line in row.broken if row else ():
            self.progress(0, 0, ())
            self.world.tell(line)

    def _watch_foreign(self):
        """Take the result of another's look, or look where it had none."""
        for name, (server, lease_at, owner) in list(self.foreign.items()):
            with self.store.read() as con:
                known, row_id = load_known(con, self.config, name)
                holder, link = load_link(con, name, seen_key(server))[1:]
                count = count_listed(con, row_id)
            if holder == owner and _is_held(self.world, link, owner,
                                            self.world.now()):
                continue
            del self.foreign[name]
            link = known.connection
            if link.observed_at is not None and link.observed_at >= lease_at:
                self.rows[name] = _row(name, link.state, link.cause or '',
                                       link.detail or '', count)
            else:
                self.waiting.append(server)


# ==========================================================================
# 19. health: is a server up, and is the API behind it up. The four states
#     and their table are closed. Up to send_probe all is values in, values
#     out; a probe flips nothing that the gate reads.
# ==========================================================================

OFFLINE, DEGRADED, PRESENT, HEALTHY = STATES = (
    'OFFLINE', 'DEGRADED', 'PRESENT (untested)', 'HEALTHY')
# DEGRADED for a reason that no time cures.
REFUSED = ('http_401', 'http_403', 'credential_ended',
           'credential_malformed')
NO_UPSTREAM = 'no upstream'
NOT_VISIBLE = 'its tools are not visible'
ENDED = 'the credential that is configured has ended'
NO_TOOLS = 'process is up, lists no tools: usually a missing credential'

Sight = namedtuple('Sight', 'state reason fact visible')
Sight.__doc__ = """What is seen of a server's tools, before any probe.

state: '' where a probe decides; reason is then '' or tool_missing. fact: in
words, '' when there is nothing to say. visible: names of tools.
"""

Credential = namedtuple('Credential', 'source value plugin')
Credential.__new__.__defaults__ = ('',)
Credential.__doc__ = """Where a server's credential is kept.

value: where it can be read here, else ''; it is never shown. plugin: of
Claude Code, that the server is of or that has it as an option: its name,
with its marketplace where that is known; '' for none.
"""

Checkup = namedtuple('Checkup', 'server settings sight credential since '
                                'link how secrets')
Checkup.__doc__ = """One server as `health` found it, before its probe.

settings: of health_settings. since: how long ago it was looked at, None for
just now or never. link: its Connection or None. how: what started this run.
secrets: values that no text of the server's may hold.
"""


def no_probe(why):
    """Give the probe of a row that has none."""
    return {'status': None, 'ms': None, 'skipped': why}


def exit_of_state(state, reason):
    """Give the exit code that one server is worth."""
    if reason == 'not_configured':
        return EXIT_UNKNOWN
    if state == OFFLINE or reason in REFUSED:
        return EXIT_BLOCKED
    return EXIT_RETRY if state == DEGRADED else EXIT_READY


def health_settings(server):
    """Complete the `health` of a server by its preset and the defaults."""
    given = {key: server.health[key] for key in HEALTH_KEYS
             if server.health.get(key) is not None}
    settings = {'url': None, 'method': 'GET', 'body': None, 'auth': None,
                'token_env': None, 'validates_credential': 'none',
                'tools': [], 'setup': '', 'status_page': '', 'costs': False,
                'notes': {}}
    settings.update(PRESETS.get(given.get('preset'), ()), **given)
    name = settings['token_env']
    if name and not settings['auth']:       # else it is a header's
        settings['auth'] = ('bearer' if is_variable(name)
                            else 'header:' + name)
    return settings


def probe_key(settings):
    """Tell probes apart: what was asked of whom, and as whom."""
    return sha256(canonical([settings[key] for key in (
        'url', 'method', 'body', 'auth', 'token_env')]))[:16]


def _recorded_sight(link, limit, now):
    """Judge a record that says nothing of now: a Sight, else None."""
    is_cut = link is not None and link.lease_until is not None and (
        link.lease_until > (link.observed_at or 0)
        and not is_lease_running(link, now))
    if link is None or not link.state:
        return Sight(DEGRADED, 'interrupted', 'its first look was cut off',
                     ()) if is_cut else Sight(
                         DEGRADED, 'not_seen', 'never looked at', ())
    if is_stale(link, limit, now):
        return Sight(DEGRADED, 'stale', 'too old: max_age is %s'
                     % format_duration(limit) if now >= link.observed_at
                     else 'dated in the future', ())
    if is_cut and link.state == 'error':
        return Sight(DEGRADED, 'interrupted', 'the last look was cut off',
                     ())
    return None


def _refused_sight(link, is_configured):
    reason = 'http_403' if link.detail.startswith('403') else 'http_401'
    if is_configured:
        return Sight(DEGRADED, reason, 'credential refused: ' + link.detail,
                     ())
    return Sight(OFFLINE, reason, 'sign-in needed: ' + link.detail, ())


def _listed_sight(names, expected):
    """Judge a good list by the tools that are expected in it."""
    missing = [name for name in expected if name not in names]
    if not names:
        return Sight(OFFLINE, 'no_tools', NO_TOOLS, ())
    if not missing:
        return Sight('', '', '', names)
    fact = 'expected and not listed: ' + ', '.join(missing)
    return Sight('' if len(missing) < len(expected) else OFFLINE,
                 'tool_missing', fact, names)


def sight_of(known, names, is_configured, limit, now):
    """Judge what is recorded of a server: a Sight.

    names: the tools that it listed last. is_configured: a credential is
    sent to it. limit: how old a look may be, 0 for any age.
    """
    link = known.connection
    if known.disabled or known.quarantined:
        return Sight(OFFLINE, 'disabled' if known.disabled else
                     'quarantined', known.disabled or known.quarantined, ())
    found = _recorded_sight(link, limit, now)
    if found:
        return found
    if link.state == 'pending_auth':
        return _refused_sight(link, is_configured)
    if is_list_failure(link.state, link.cause, link.detail):
        return Sight(DEGRADED, 'list_failed', link.detail, ())
    if link.state == 'error':
        return Sight(OFFLINE, link.cause, NO_TOOLS if link.cause
                     == 'no_tools' else link.detail, ())
    if link.expires_at is not None and link.expires_at <= now:
        return Sight(DEGRADED, 'credential_ended', 'the credential that is '
                     'configured ended at %s' % format_time(link.expires_at),
                     names)
    return _listed_sight(names, health_settings(known.server)['tools'])


def health_state(sight, probe, validates):
    """Decide a server's state by the closed table: (state, reason).

    probe: of a Checkup, with `skipped` as why there is none or None.
    validates: what the server does with its credential at its start.
    """
    if sight.state:
        return sight.state, sight.reason
    if probe['skipped'] == NO_UPSTREAM:
        state, reason = HEALTHY, 'no_upstream'
    elif probe['skipped']:
        state, reason = (HEALTHY if validates == 'remote' else PRESENT,
                         'probe_skipped')
    else:
        reason = probe['reason']
        state = HEALTHY if reason == 'ok' else DEGRADED
    if sight.reason and exit_of_state(state, reason) <= EXIT_RETRY:
        return DEGRADED, sight.reason
    return state, reason


def own_credential(name, plain, environ):
    """Find a credential that can be read here, by the variable's name.

    The value is what the server gets: what its own env says of the name
    beats the shell's, even where it says nothing. plain: the server
    expanded. Gives None without one.
    """
    headers = {key.lower(): value for key, value in plain.headers.items()}
    given = shell = environ.get(name, '')
    if name in plain.env:
        given = plain.env[name] or ''
    elif name.lower() in headers:
        given = headers[name.lower()]
    elif plain.transport == 'stdio':
        given = child_environment(plain, environ).get(name, '')
    if not given.strip() or '${' in given and given != shell:
        return None
    return Credential('shell env' if given == shell else 'config', given)


def _variables_in(text):
    return re.findall(r'\$\{?(?:env:)?([A-Za-z_][A-Za-z0-9_]*)', text)


def sent_source(server, plain, environ):
    """Tell where the credential is kept that a server over HTTP is sent."""
    headers = {name: value for name, value in plain.headers.items()
               if '${' not in value}        # else it has no value
    if plain.transport == 'stdio' or not has_credential(
            plain._replace(headers=headers)):
        return 'none'
    names = _variables_in(' '.join([server.url or ''] + [
        server.headers.get(name, '') for name in headers]))
    names += [server.extra.get('bearer')]
    names += server.extra.get('env_headers', {}).values()
    return 'shell env' if any(map(environ.get, filter(None, names))) else (
        'config')


def plugin_options(server, name):
    """List the names that a plugin's option for a variable may have."""
    text = server.env.get(name) or ''
    return {name.lower()} | {word.lower() for word in re.findall(
        r'\$\{user_config\.([^}]+)\}', text)}


def user_config_source(settings, secrets, names, plugin):
    """Look for an option among those that Claude Code keeps.

    settings, secrets: its two files as read, None for one that cannot be.
    Of secrets nothing but the names is looked at. plugin: the one whose
    options count, '' for any. Gives (source, key of the plugin).
    """
    is_unknown = False
    for table, key in ((settings, 'pluginConfigs'),
                       (secrets, 'pluginSecrets')):
        plugins = table.get(key, {}) if is_table(table) else None
        if not is_table(plugins):
            is_unknown = True
            continue
        for owner, options in plugins.items():
            if key == 'pluginConfigs':
                options = options.get('options') if is_table(
                    options) else None
            found = {word.lower() for word, value in options.items()
                     if key == 'pluginSecrets' or value not in (None, '')
                     } if is_table(options) else set()
            if names & found and plugin in ('', owner.partition('@')[0]):
                return 'userConfig', owner
    return 'unknown' if is_unknown else 'none', ''


def why_skipped(sight, settings, credential, may_pay):
    """Say why no probe may be sent, '' when one may."""
    if sight.state:
        return ENDED if sight.reason == 'credential_ended' else NOT_VISIBLE
    if not settings['url']:
        return NO_UPSTREAM
    if settings['auth'] and not credential.value:
        return 'credential not readable here'
    if settings['costs'] and not may_pay:
        return 'it costs money or quota; --probe sends it'
    return ''


def is_page(headers, head):
    """Tell whether an answer is a page for people, by its first bytes."""
    if media_type(headers) in ('text/html', 'application/xhtml+xml'):
        return True
    if head[:2] in (b'\xff\xfe', b'\xfe\xff'):          # UTF-16
        head = head[2:].replace(b'\0', b'')
    blanks = b' \t\r\n\f\v\xef\xbb\xbf'
    head = head.lstrip(blanks)
    while head[:4] == b'<!--':
        head = head.partition(b'-->')[2].lstrip(blanks) or b'<html'
    return bool(re.match(rb'(?i)<(?:!doctype\s+html|html|head|body)\b',
                         head))


# What of an answer's headers is kept. The API chooses the text: it may hold
# what it was sent, in whatever spelling.
WAIT = (r'[0-9]{1,9}(?:\.[0-9]{1,3})?s?\Z|[A-Z][a-z]{2}, [0-9]{2} '
        r'[A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT\Z')
QUOTA_NAME = (r'(?:x-)?ratelimit-remaining(?:-(?:requests|tokens|input|'
              r'output|project|second|minute|hour|day|week|month|year)){0,2}'
              r'\Z')
QUOTA = r'[0-9]{1,15}(?:\.[0-9]{1,3})?(?:[,;] ?(?:[a-z]=)?[0-9]{1,9}){0,3}\Z'


def read_answer(status, headers, head):
    """Judge the answer to a probe: (reason, detail).

    head: the first bytes of its body. Only 200 is 200.
    """
    if status == 200:
        return ('login_page', 'looks like a login page') if is_page(
            headers, head) else ('ok', '')
    if status in (401, 403):
        return 'http_%d' % status, ''
    wait = headers.get('retry-after', '')
    return ('rate_limited' if status == 429 else 'http_status',
            'Retry-After: ' + wait if re.match(WAIT, wait) else '')


def quota_of(headers):
    """List what an answer says of the quota that is left."""
    return ['%s: %s' % (name, value)
            for name, value in sorted(headers.items())
            if re.match(QUOTA_NAME, name) and re.match(QUOTA, value)][:5]


def redirect_text(asked, place):
    """Say where a probe was sent on to: no more than an origin.

    asked: the URL of the probe. place: whither; the API chose it.
    """
    try:
        origin, here = origin_of(place), origin_of(asked)
    except ValueError:
        return 'redirected to what is no HTTP URL'
    if origin == here:
        return 'redirected to itself' if plain_url(place) == plain_url(
            asked) else 'redirected to another address of its own'
    return 'redirected to %s://%s' % (origin[0], host_text(origin))


def credential_flaw(value):
    """Say why no header can carry a credential, '' when one can."""
    if re.match(r'[\x20-\x7e]*\Z', value):
        return ''
    if re.match(r'[\x20-\x7e]*[\r\n]+\Z', value):
        return 'ends with a line break'
    return 'holds a %s' % (
        'line break' if re.search(r'[\r\n]', value) else
        'control character' if re.search(r'[\0-\x1f\x7f]', value) else
        'character that is not ASCII')


def _probe_text(probe, now):
    if probe['skipped'] in (NOT_VISIBLE, NO_UPSTREAM, ENDED):
        return {NO_UPSTREAM: 'no upstream to probe'}.get(probe['skipped'])
    if probe['skipped']:
        return 'probe skipped: ' + probe['skipped']
    if probe['reason'] == 'credential_malformed':
        return 'probe not sent: ' + probe['detail']
    text = 'probe failed' if probe['status'] is None else (
        'probe %d' % probe['status'])
    text += ' in %d ms' % probe['ms']
    if now - probe['at'] > MINUTE_MS:
        text += ', %s ago' % format_duration(now - probe['at'])
    return text + (': ' + probe['detail'] if probe['detail'] else '')


def evidence_of(case, probe, now):
    """Say on what the state of a server rests, in one line."""
    sight = case.sight
    if sight.reason in ('disabled', 'quarantined'):
        return 'not contacted; ' + sight.fact
    seen = 'live' if case.since is None else 'cached, %s old' % (
        format_duration(max(0, case.since)))
    if case.link is None or not case.link.state:
        seen = 'cached'
    parts = [seen, plural(len(sight.visible), 'tool'), sight.fact,
             _probe_text(probe, now)]
    return '; '.join(filter(None, parts))


# What a state is cured by, or where its details stand, if not by
# `servers show`.
STEPS = {'disabled': 'servers enable', 'quarantined': 'servers approve',
         'not_seen': 'health', 'stale': 'health', 'interrupted': 'health',
         'tool_missing': 'tools list'}


def _command(case, words):
    return command_line(case.how, words, case.server.name)


def _entry(case):
    """Name the entry of a server, and the file that it stands in."""
    return 'server %s (%s)' % (json.dumps(case.server.name),
                               case.server.file)


def is_of_plugin(server):
    """Tell whether a server is one that a plugin of Claude Code brings."""
    texts = ' '.join(texts_of(server).values())
    return (server.dialect == 'claude-plugin' or '${user_config.' in texts
            or '${CLAUDE_PLUGIN' in texts)


def _plugin_steps(case):
    """Tell how Claude Code asks again for what a plugin lacks."""
    if not (is_of_plugin(case.server)
            or case.credential.source == 'userConfig'):
        return []
    name = shell_word(case.credential.plugin)
    how = ('/plugin disable %s, then /plugin enable %s' % (name, name)
           if case.credential.plugin else
           'disable and enable the plugin of this server with /plugin')
    return ['In Claude Code: %s, so that it asks for its userConfig '
            '(claude-code#39827)' % how]


def _stderr_steps(case):
    text = mask_values(case.link.stderr or '' if case.link else '',
                       case.secrets)
    lines = [line.strip()[:200] for line in text.splitlines()
             if line.strip()]
    return ['Its stderr ends: ' + ' | '.join(lines[-5:])] if lines else []


def _wait_step(text, again):
    """Tell how long to wait; text: what may hold a Retry-After."""
    found = re.search('Retry-After: (%s)' % WAIT, text)
    return 'Wait %s, or raise the plan, then run: %s' % (
        'as Retry-After says: %s' % found.group(1) if found else 'a while',
        again)


def _key_of(case):
    """Name the key of a server's entry that its credential stands under,
    '' for none."""
    name, server = case.settings['token_env'], case.server
    if name in server.env:
        return 'env.' + name
    return next(('headers.' + key for key in server.headers
                 if name and key.lower() == name.lower()), '')


def _credential_place(case):
    """Name a probe's credential, and where it is kept."""
    name, source = case.settings['token_env'], case.credential.source
    if source in ('none', 'unknown'):
        return name
    return '%s (%s)' % (name, '%s of %s' % (_key_of(case), _entry(case))
                        if source == 'config' and _key_of(case) else source)


def _offline_steps(case):
    """Tell what may bring a server up."""
    again, setup = _command(case, 'health'), case.settings['setup']
    steps, reason = [setup] if setup else [], case.sight.reason
    name = case.settings['token_env']
    if reason == 'no_tools' and name and case.credential.value:
        steps.append('Check %s, and renew it if it is no longer good, then '
                     'run: %s' % (_credential_place(case), again))
    elif reason == 'no_tools':
        steps.append('Set %s in the env of %s, then run: %s' % (
            name or 'the variable of its credential', _entry(case), again))
    elif reason in ('http_401', 'http_403'):
        steps.append('Set headers.Authorization for %s (an entry in our own '
                     'config) to a ${VAR}, then run: %s' % (
                         json.dumps(case.server.name), again))
    elif reason == 'rate_limited':
        steps.append(_wait_step(case.sight.fact, again))
    return steps + _plugin_steps(case) + _stderr_steps(case)


def credential_names(server):
    """Name where the credential of a server over HTTP is configured."""
    names = ['headers.%s%s' % (key, ''.join(
        ' (%s)' % name for name in _variables_in(value)))
        for key, value in server.headers.items()
        if has_credential(server._replace(url=None, headers={key: value}))]
    names += [name for name in [server.extra.get('bearer')] if name]
    return names + ['its url'] * bool(url_secrets(server.url))


def _by_hand(case):
    """Write a probe for curl: a step.

    Its credential goes from a variable through a pipe: what no shell has as
    a command of its own would show it among its arguments.
    """
    settings, notes = case.settings, []
    name, auth, body = [settings[key] for key in ('token_env', 'auth',
                                                  'body')]
    words, url = 'curl -sS -i -m 8', plain_url(settings['url'])
    if settings['method'] == 'HEAD':
        words += ' -I'
    elif body is not None:
        body = body if is_text(body) else compact_json(body)
        words += " -X %s -H 'Content-Type: application/json' -d %s" % (
            settings['method'], shell_word(re.sub(r'\s*[\r\n]\s*', ' ', body)))
    elif settings['method'] != 'GET':
        words += ' -X %s -d ""' % settings['method']
    if name and auth:
        variable = name if is_variable(name) else 'TOKEN'
        head = ('Authorization: Bearer %s' if auth == 'bearer'
                else auth.partition(':')[2].replace('%', '%%') + ': %s')
        words = 'printf %s "$%s" | %s -K -' % (
            shell_word('header = "%s"\\n' % head), variable, words)
        if case.credential.source != 'shell env':
            words = 'read -r %s; %s' % (variable, words)
            notes.append('paste the value of %s when it waits'
                         % _credential_place(case))
    if url != settings['url']:
        notes.append('add what health.url holds beside this address')
    return 'Try it by hand%s: %s %s' % (
        notes and ' (%s)' % '; '.join(notes) or '', words, shell_word(url))


def _probe_steps(case, probe):
    """Tell what to do about an answer that is not 200."""
    settings, reason = case.settings, probe['reason']
    again, note = _command(case, 'health'), settings['notes'].get(
        probe['status'])
    name = settings['token_env'] and _credential_place(case)
    steps = ['%d: %s' % (probe['status'], note)] if note else []
    if reason in ('http_401', 'http_403'):
        steps.append(
            'Name a credential for the probe in health.token_env of %s'
            % _entry(case)
            if not name else 'Renew %s, then run: %s' % (name, again)
            if reason == 'http_401' else 'Give %s the rights that %s asks '
            'for, or renew it, then run: %s' % (
                name, plain_url(settings['url']), again))
    elif reason == 'credential_malformed':
        steps.append('Correct %s, then run: %s' % (name, again))
    elif reason == 'rate_limited':
        steps.append(_wait_step(probe['detail'], again))
    else:
        if reason == 'login_page' or reason == 'redirected' and (
                not probe['detail'].endswith('itself')):
            steps.append('Set health.url of %s to an address of the API '
                         'itself' % _entry(case))
        if settings['status_page']:
            steps.append('Look at ' + settings['status_page'])
        steps.append(_by_hand(case))
    return steps


def _value_step(case):
    """Tell how a credential that has no value here comes to one."""
    name, key, server = (case.settings['token_env'], _key_of(case),
                         case.server)
    text = (server.env if key[:4] == 'env.' else server.headers).get(
        key.partition('.')[2]) or '' if key else ''
    if not key and server.dialect == 'codex' and (
            server.transport == 'stdio'):
        return 'name %s in env_vars of %s' % (name, _entry(case))
    if not key or _variables_in(text) == [name]:
        return 'set %s in this environment' % name
    if _variables_in(text):
        return 'set %s in this environment, which %s of %s reads' % (
            _variables_in(text)[0], key, _entry(case))
    if key[:4] == 'env.' and server.env[name] is None:
        return ('take %s, which removes it, out of %s, and set %s in this '
                'environment' % (key, _entry(case), name))
    return 'give %s of %s a value' % (key, _entry(case))


def _skipped_steps(case, probe):
    """Tell how the probe that was skipped is sent."""
    settings = case.settings
    if settings['auth'] and not settings['token_env']:
        return ['Name the credential of the probe in health.token_env of '
                + _entry(case)]
    again = 'health --probe' if settings['costs'] else 'health'
    if settings['auth'] and not case.credential.value:
        return ['To test the API: %s, then run: %s' % (
            _value_step(case), _command(case, again))]
    return ['To test the API%s: %s' % (
        ' (costs money or quota)' if settings['costs'] else '',
        _command(case, again))]


def what_to_do(case, reason, probe):
    """List what to do about one server; there is always something."""
    sight, steps = case.sight, []
    if sight.state == OFFLINE and sight.reason not in (
            'disabled', 'quarantined'):
        steps = _offline_steps(case)
    elif sight.state and reason in REFUSED:
        steps = ['Renew %s of %s, then run: %s' % (
            ', '.join(credential_names(case.server)) or 'the credential',
            _entry(case), _command(case, 'health'))]
    elif reason == 'list_failed':
        steps = _stderr_steps(case)
    if sight.reason == 'tool_missing':
        steps.append('Correct health.tools of %s, or the server'
                     % _entry(case))
    if not sight.state and probe['skipped'] not in (None, NO_UPSTREAM):
        steps += _skipped_steps(case, probe)
    elif not sight.state and not probe['skipped']:
        steps += ['Quota left: ' + text for text in probe['quota']]
        steps += _probe_steps(case, probe) if probe['reason'] != 'ok' else []
    words = STEPS.get(reason, 'servers show')
    return steps + [('Details: ' if words == 'servers show' else 'Run: ')
                    + _command(case, words)]


def _mask_step(case, step):
    """Mask the credential in a step, but not in the command of ours that
    it ends with, which must run as it is printed.

    What is foreign in it is masked before; our own words may hold the
    value of any other variable.
    """
    ours = [_command(case, words) for words in sorted(
        {'servers show', 'health --probe'}.union(STEPS.values()))]
    end = next((command for command in ours if step.endswith(command)), '')
    return mask_values(step[:len(step) - len(end)],
                       [case.credential.value]) + end


def health_row(case, probe, now):
    """Give one server as `health` reports it, in the keys' order."""
    state, reason = health_state(case.sight, probe,
                                 case.settings['validates_credential'])

    return {'server': case.server.name, 'state': state, 'reason': reason,
            'evidence': mask_values(evidence_of(case, probe, now),
                                    [case.credential.value]),
            'tools_visible': len(case.sight.visible),
            'tools_expected': list(case.settings['tools']),
            'credential_source': case.credential.source,
            'probe': {key: probe[key] for key in ('status', 'ms',
                                                  'skipped')},
            'what_to_do': [_mask_step(case, step) for step in what_to_do(
                case, reason, probe)]}


def unknown_row(name, why, near, how):
    """Give the row of a server that is not configured."""
    steps = ['Run: ' + command_line(how, 'health', other) for other in near]
    return {'server': name, 'state': OFFLINE, 'reason': 'not_configured',
            'evidence': why or 'no server of this name is configured'
            + (near and '; did you mean %s?' % near[0] or ''),
            'tools_visible': 0, 'tools_expected': [],
            'credential_source': 'none', 'probe': no_probe(NOT_VISIBLE),
            'what_to_do': steps + ['Run: %s servers list' % how]}


def health_report(rows, now):
    """Put rows together, worst first; PRESENT counts as HEALTHY."""
    rows = sorted(rows, key=lambda row: (
        STATES.index(row['state']),
        -exit_of_state(row['state'], row['reason'])))
    worst = rows[0]['state'] if rows else OFFLINE
    return {'overall': HEALTHY if worst == PRESENT else worst,
            'checked_at': format_time(now), 'servers': rows}


def exit_of_health(report):
    """Give the exit code of a report: the worst of its servers."""
    return max([exit_of_state(row['state'], row['reason'])
                for row in report['servers']] or [EXIT_FAILED])


def _send(settings, value, world, deadline):
    """Send the request of a probe: (status, reason, detail, quota)."""
    headers = {'Accept': 'application/json'}
    body = settings['body']
    if body is not None:
        headers['Content-Type'] = 'application/json'
        body = (body if is_text(body) else compact_json(body)).encode(
            'utf-8', 'replace')
    if credential_flaw(value):
        raise UpstreamError('credential_malformed', 'the value of %s %s' % (
            settings['token_env'], credential_flaw(value)))
    if value and settings['auth'] == 'bearer':
        headers['Authorization'] = 'Bearer ' + value
    elif value:
        headers[settings['auth'].partition(':')[2]] = value
    reply = HttpLink(world, PROBE_CONNECT_MS / 1000).request(
        settings['method'], settings['url'], headers, body, deadline)
    try:
        head, chunk = b'', b'-'
        while (reply.status == 200 and chunk
               and len(head) < PROBE_BODY_BYTES):
            chunk = reply.chunk(deadline)
            head += chunk
        if not chunk and reply.raw.length:
            raise UpstreamError('protocol', 'the answer was cut short')
    finally:
        reply.close()
    held = [value] + url_secrets(settings['url'])   # it may send them back
    plain = {name: mask_values(text, held)
             for name, text in reply.headers.items()}
    return (reply.status,) + read_answer(
        reply.status, plain, head) + (quota_of(plain),)


def _probe_failure(exc, settings, value):
    """Word why a probe got no answer: nothing that the API chose."""
    text = re.sub(r'(?s)( is no HTTP): .*', r'\1', str(exc))
    if exc.cause == 'redirected':
        text = redirect_text(settings['url'], exc.place)
        if len(value) >= 4:         # a host has no case
            text = re.sub('(?i)' + re.escape(value), '***', text)
    return redact(text, [value] + url_secrets(settings['url']))


def send_probe(settings, value, world, limit=None):
    """Ask a server's API for one answer: what came of it, as a dict.

    value: the credential, '' for none. Nothing of the answer's body is
    kept. limit: milliseconds, when it may take less than PROBE_TOTAL_MS.
    """
    start, at = world.clock(), world.now()
    try:
        status, reason, detail, quota = _send(
            settings, value, world, start + min(
                PROBE_TOTAL_MS, limit or PROBE_TOTAL_MS) / 1000)
    except UpstreamError as exc:
        status, reason, quota = getattr(exc, 'status', None), exc.cause, []
        detail = _probe_failure(exc, settings, value)
        if exc.cause == 'timeout':
            detail += ' within %s' % format_duration(
                int((world.clock() - start) * 1000))
    return {'at': at, 'key': probe_key(settings), 'status': status,
            'ms': int((world.clock() - start) * 1000), 'reason': reason,
            'detail': detail, 'quota': quota, 'skipped': None}


def send_probes(cases, world, may_pay, limit=None):
    """Send the probes of Checkups side by side: server name -> probe.

    limit: as of send_probe.
    """
    from concurrent.futures import ThreadPoolExecutor
    found, jobs = {}, {}
    with ThreadPoolExecutor(MAX_SIDE_BY_SIDE) as pool:
        for case in cases:
            why = why_skipped(case.sight, case.settings, case.credential,
                              may_pay)
            if why:
                found[case.server.name] = no_probe(why)
            else:
                jobs[case.server.name] = pool.submit(
                    send_probe, case.settings, case.credential.value, world,
                    limit)
        found.update((name, job.result()) for name, job in jobs.items())
    return found


def _claude_file(world, name):
    """Read a file of Claude Code: {} if there is none, None if corrupt."""
    folder = world.env.get('CLAUDE_CONFIG_DIR') or (
        home_of(world.env) and os.path.join(home_of(world.env), '.claude'))
    path = os.path.join(folder, name)
    try:
        if not folder or not os.stat(path):
            return {}
        return decode_json(read_text(path) or '')
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError):
        return None


def plugin_of(server):
    """Name the plugin of Claude Code that brings a server, '' for none or
    where its manifest does not say."""
    folder = os.path.dirname(server.file)
    if os.path.basename(folder) in ('.claude-plugin', '.plugin'):
        folder = os.path.dirname(folder)
    for inner in ('.claude-plugin', '.plugin'):
        path = os.path.join(folder, inner, 'plugin.json')
        try:
            table = decode_json(is_of_plugin(server) and read_text(path)
                                or '{}')
        except ValueError:
            continue
        if is_table(table) and is_text(table.get('name')):
            return table['name']
    return ''


def find_credential(server, plain, settings, world):
    """Find where the credential of a server's API is kept: Credential."""
    name, plugin = settings['token_env'], plugin_of(server)
    if not name:
        return Credential(sent_source(server, plain, world.env), '', plugin)
    found = own_credential(name, plain, world.env)
    if found is None:
        source, key = user_config_source(
            _claude_file(world, 'settings.json'),
            _claude_file(world, '.credentials.json'),
            plugin_options(server, name), plugin)
        return Credential(source, '', key or plugin)
    if settings['auth'] == 'bearer':    # a scheme is added to it
        found = found._replace(value=re.sub(
            r'(?i)\A\s*(?:bearer|token)\s+', '', found.value))
    return found._replace(plugin=plugin)


def load_checkup(con, config, name, world, is_live):
    """Load what is recorded of a server: (Checkup, is it switched off)."""
    known, row_id = load_known(con, config, name)
    server, link, now = known.server, known.connection, world.now()
    settings = health_settings(server)
    plain = expand_server(server, world.env, read_text)[0]
    names = ()
    if link is not None and link.state == 'ready':
        names = tuple(name for name, tool in load_tools(
            con, row_id, server.name, known.launch).items() if tool.listed)
        names += tuple(set(link.refused) - set(names))
    limit = 0 if is_live else max_age_of(server, config.settings,
                                         link.ttl if link else 0)
    credential = find_credential(server, plain, settings, world)
    since = None if is_live or link is None or not link.state else (
        now - link.observed_at)
    secrets = (secrets_of(server, plain, world.env) + [credential.value]
               + url_secrets(settings['url']))
    sight = sight_of(known, names, has_credential(plain), limit, now)
    if link is not None and link.detail:        # what of it is the server's
        sight = sight._replace(fact=sight.fact.replace(
            link.detail, mask_values(link.detail, secrets)))
    return Checkup(server, settings, sight, credential, since, link,
                   world.how, secrets), bool(known.disabled)


def recorded_probe(con, case, limit, now):
    """Give the last probe of a server if it still says something."""
    why = why_skipped(case.sight, case.settings, Credential('', '-'), True)
    if why:
        return no_probe(why)
    found = load_probe(con, case.server.name, seen_key(case.server))
    if (not found or found['key'] != probe_key(case.settings)
            or found['at'] > now + FUTURE_MS
            or limit and now - found['at'] > limit):
        return no_probe('none is recorded that is young enough')
    return dict(found, skipped=None)


def record_health(con, report, now):
    """Leave the audit record of a report: names and codes only."""
    append_record(con, Record(
        'health', 'cli', now, '', 'operator', 'blocked'
        if exit_of_health(report) else 'success', {
            'overall': report['overall'], 'servers': [
                {key: row[key] for key in ('server', 'state', 'reason')}
                for row in report['servers']]}))


# ==========================================================================
# 20. commands: World and options in, a value out. None prints or exits.
# ==========================================================================


# -- the config ---------------------------------------------------------------

def config_paths(world):
    """Name the config files of this run, in order (contract 12)."""
    return world.configs or (os.path.join(world.home, OUR_CONFIG),)


def cmd_config_paths(world, options):
    """List every place a config is looked for, and what is there.

    Files that are there but not named are never used (contract 12).
    """
    import glob
    rows = [('', '--config or PREFLIGHT_CONFIG', path)
            for path in world.configs]
    rows.append(('', 'state directory', os.path.join(world.home,
                                                     OUR_CONFIG)))
    platform = ('w' if os.name == 'nt' else 'm' if sys.platform == 'darwin'
                else 'l')
    for client, path in client_places(platform, world.env):
        path = os.path.abspath(os.path.join(world.workspace, path))
        rows += [(client, 'only if named with --config', place)
                 for place in sorted(glob.glob(path)) or [path]]
    used = set(map(os.path.realpath, config_paths(world)))
    return [{'path': path, 'client': client, 'how': how,
             'found': os.path.isfile(path),
             'used': os.path.isfile(path) and os.path.realpath(path) in used}
            for client, how, path in dict.fromkeys(rows)]


def workspace_of(world):
    """Name the directory of --workspace, '' when it was not given."""
    return os.path.abspath(world.workspace) if world.workspace else ''


def read_lock_bytes(path):
    """Read a lockfile's bytes; raises LockError."""
    try:
        data = read_bytes(path, MAX_LOCK_BYTES)
    except ConfigError as exc:
        why = os_reason(exc.__cause__)
        if isinstance(exc.__cause__, FileNotFoundError):
            raise LockError(path, 'is not there', 'Write it with `tools '
                            'lock`, or correct the path.') from exc
        raise LockError(path, 'cannot be read: ' + why) from exc
    if len(data) > MAX_LOCK_BYTES:
        raise LockError(path, 'is longer than %d MiB' % (
            MAX_LOCK_BYTES >> 20))
    return data


def read_lock(path):
    """Read a lockfile whole: a Lock; raises LockError."""
    return parse_lock(path, read_lock_bytes(path))


def _is_lock_there(path):
    """Tell whether a lockfile is there; raises LockError for a pipe or a
    device, which may keep whoever reads it waiting for ever."""
    is_there = os.path.exists(path)
    if is_there and not os.path.isfile(path) and not os.path.isdir(path):
        raise LockError(path, 'is not a regular file')
    return is_there


def _with_lockfile(world, config, may_lack):
    """Read the lockfile that holds a config's approvals, if one does."""
    if config.settings['approvals'] != 'lockfile':
        return config
    path = config.settings['lockfile']
    if _is_lock_there(path):
        return config._replace(lock=read_lock(path))
    if not may_lack:
        raise LockError(
            path, 'is not there', 'To write it, look at the servers: %s; '
            'then, at a terminal: %s' % (
                command_line(world.how, 'sync'),
                command_line(world.how, 'tools lock --all')))
    world.tell('warning: the lockfile %s is not there; no tool is approved '
               'until `tools lock` writes it' % path)
    return config._replace(lock=Lock(path, {}, {}))


def load_config(world, may_lack=False):
    """Read the config files; raises ConfigError when there are none.

    may_lack: take a lockfile that is not there for an empty one, so that
    the first one can be made. No check does.
    """
    if not world.configs and not os.path.exists(config_paths(world)[0]):
        places = cmd_config_paths(world, None)
        found = [row['path'] for row in places if row['found']
                 and row['how'] != 'state directory']
        hint = 'Write one, or pass --config FILE.'
        if found:
            hint = 'There is %s; to use it, add --config %s' % (
                found[0], shell_word(found[0]))
        raise ConfigError('there is no config; looked at --config, '
                          'PREFLIGHT_CONFIG and %s' % config_paths(world)[0],
                          hint)
    sources, seen = [], set()
    for path in config_paths(world):
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            sources.append((path, real, read_bytes(path)))
    return _with_lockfile(world, read_config(
        sources, world.dialect, workspace_of(world), home_of(world.env),
        read_text), may_lack)


def cmd_config_show(world, options):
    """Show files as they are read, in one form for all clients: an object
    for one file, else a list. Secrets are masked without --reveal."""
    paths = [os.fsdecode(path.encode('utf-8', 'surrogateescape'))
             for path in options.ids] or config_paths(world)
    shown, secrets = [], []

    def read(place):
        text = read_text(place)
        secrets.append((text or '').strip())
        return text
    for path in paths:
        data, notes = read_bytes(path), []
        file = parse_config(path, os.path.realpath(path), data,
                            world.dialect)
        form = show_config(file, workspace_of(world), world.env, read,
                           notes)
        secrets += [world.env[name] for name in set(re.findall(
            NAME, data.decode('utf-8', 'replace')))
            if world.env.get(name, '/')[:1] != '/']
        for note in notes:
            world.tell('warning: ' + note)
        if not options.reveal:
            form['servers'] = [masked_form(server, secrets)
                               for server in form['servers']]
        shown.append(form)
    return shown[0] if len(shown) == 1 else shown


def _blank_command(world, server):
    try:
        find_server_command(server, child_environment(server, world.env))
    except UpstreamError as exc:
        return ['%s: %s' % (server.name, redact(str(exc)))]
    return []


def cmd_config_check(world, options):
    """Read every entry: {'errors': [...], 'warnings': [...]}."""
    try:
        config = load_config(world)
    except ConfigError as exc:
        return {'errors': [' '.join(filter(None, (str(exc), exc.hint)))],
                'warnings': [], 'servers': 0}
    servers, skipped = all_servers(config)
    warnings = list(config.warnings) + skipped
    for server in servers:
        server, missing = expand_server(server, world.env, read_text)
        warnings += ['%s: %s' % (server.name, w) for w in server.warnings]
        warnings += ['%s: %s has no value here' % (server.name, name)
                     for name in missing]
        if not missing and re.search(r'\S\s', server.command or ''):
            warnings += _blank_command(world, server)
    for name, members in config.profiles.items():
        warnings += ['profile %s names server %s, which is not configured'
                     % (name, json.dumps(member)) for member in members
                     if member not in config.entries]
    return {'errors': [], 'warnings': warnings, 'servers': len(servers)}


def cmd_profiles_list(world, options):
    """List the profiles: name and server names each."""
    config = load_config(world)
    return [{'profile': name, 'servers': list(members),
             'not_configured': [m for m in members
                                if m not in config.entries]}
            for name, members in sorted(config.profiles.items())]


def places_of(world):
    """Name the state directory and the config files, in words."""
    return 'state %s, config %s' % (world.home,
                                    ', '.join(config_paths(world)))


def operator(config, profile=''):
    """Make the Caller at this machine; raises UsageError for a profile
    that does not exist."""
    if not profile:
        return Caller(OPERATOR, 'operator', '', None)
    if profile not in config.profiles:
        near = rank_nearest(profile, config.profiles, 1)
        raise UsageError('Unknown profile %s%s' % (
            json.dumps(profile), '; did you mean %s?' % near[0] if near
            else ''))
    return Caller(OPERATOR, 'operator', profile,
                  frozenset(config.profiles[profile]))


def known_server(config, name):
    """Give the Server of a name; raises UsageError when there is none."""
    server, why = look_up(config, name)
    if server is None:
        near = rank_nearest(name, config.entries, 1)
        raise UsageError(why or 'no server %s is configured%s' % (
            json.dumps(name), '; did you mean %s?' % near[0] if near
            else ''), 'See `servers list`.')
    return server


# -- a check, from one snapshot of the state ----------------------------------

Snapshot = namedtuple('Snapshot', 'con config servers tools ready')
Snapshot.__doc__ = """One instant of the state, read as it is asked for.

servers: name -> (Known, row id); tools: (server, tool) -> Tool or None;
ready: who asks -> ref -> its ready Answer and when that holds. They fill
up; who outlives the instant must drop them when the generation has moved.
"""


def open_snapshot(con, config):
    """Open a Snapshot inside a transaction."""
    return Snapshot(con, config, {}, {}, {})


def known_of(snap, name):
    """Give (Known, row id) of a server, read at most once."""
    if name not in snap.servers:
        snap.servers[name] = load_known(snap.con, snap.config, name)
    return snap.servers[name]


def _listed_tool(snap, name, tool):
    """Give a tool that is now listed under the configured launch."""
    known, row_id = known_of(snap, name)
    link = known.connection
    if link is None or not link.state or not is_storable(tool):
        return None
    found = load_server_tools(snap.con, row_id, known, tool).get(tool)
    return found if found and found.listed else None


def load_case(snap, question, ref):
    """Set what is known beside one ref of a question."""
    key = ref.server, ref.tool
    if key not in snap.tools:
        snap.tools[key] = _listed_tool(snap, *key)
    return Case(ref, known_of(snap, ref.server)[0], snap.tools[key],
                question)


def _ids_of_server(snap, name, word):
    """List ids to suggest from one server, none if it is not visible."""
    known, row_id = known_of(snap, name)
    link = known.connection
    if (known.server is None or known.disabled or known.quarantined
            or link is None or not link.state):
        return []
    names = load_listed_names(snap.con, row_id, 1001)
    if len(names) > 1000:
        names = load_names_like(snap.con, row_id, word)
    return ['%s:%s' % (name, tool) for tool in names]


def suggest_ids(snap, question, ref):
    """Suggest up to 3 ids for one that is not there (contract 7).

    difflib over 100,000 names takes seconds, so it ranks a shortlist: the
    server's own tools, or those of the nearest servers, and the tools of
    that very name anywhere.
    """
    scope = question.caller.servers
    names = {name for name in snap.config.entries
             if scope is None or name in scope}
    near, found = [ref.server], []
    if ref.server not in names:
        near = rank_nearest(ref.server, names)
    for name in near:
        found += _ids_of_server(snap, name, ref.tool)
    homes = load_homes_of(snap.con, ref.tool) if is_storable(
        ref.tool) else ()
    for name in {home for home, _ in homes} & names - set(near):
        if _listed_tool(snap, name, ref.tool):
            known = known_of(snap, name)[0]
            if not known.disabled and not known.quarantined:
                found.append('%s:%s' % (name, ref.tool))
    return rank_nearest(ref.id, found)


def _suggest_renamed(snap, question, ref):
    """Suggest ids of the server with the nearest name (was it renamed?)."""
    scope = question.caller.servers
    names = [name for name in snap.config.entries
             if scope is None or name in scope]
    for name in rank_nearest(ref.server, names, 1):
        ids = _ids_of_server(snap, name, ref.tool)
        return rank_nearest(ref.id, ids, cutoff=0.0)
    return []


def _with_suggestions(snap, question, answers):
    """Add did_you_mean to the first misses of a request."""
    left, out = MAX_SUGGESTED, []
    for ref, answer in zip(question.refs, answers):
        if answer.reason in ('not_found', 'server_not_configured') and (
                ref.server and left):
            left -= 1
            finder = (suggest_ids if answer.reason == 'not_found'
                      else _suggest_renamed)
            ids = finder(snap, question, ref)
            answer = answer._replace(did_you_mean=ids or None)
        out.append(answer)
    return out


def _ready_span(case):
    """Give the instants between which a ready answer stays as it is."""
    link = case.known.connection
    limit = max_age_of(case.known.server, case.question.settings, link.ttl)
    last = link.observed_at + (limit or MAX_DURATION_MS)
    if link.expires_at is not None:
        last = min(last, link.expires_at - case.question.horizon - 1)
    return link.observed_at - FUTURE_MS, last


def judge_refs(snap, question):
    """Judge every ref of a question: (Answer, Finding or None) each.

    A ready answer depends on the snapshot and, by its age, on the time
    alone: it is repeated as long as it holds.
    """
    pairs, now = [], question.now
    held = snap.ready.setdefault((question.caller, question.filters,
                                  question.horizon), {})
    if question.lock:           # which holds as long as this question
        held = {}
    for ref in question.refs:
        answer, (first, last) = held.get(ref, (None, (0, 0)))
        finding = None
        if not first <= now <= last:
            case = load_case(snap, question, ref)
            answer, finding = evaluate(case)
            if answer.status == 'ready':
                held[ref] = answer, _ready_span(case)
        pairs.append((answer, finding))
    return pairs


def judge_all(snap, question, request_id, waited_ms=None):
    """Judge a question against one snapshot, with suggestions: a Report."""
    pairs = judge_refs(snap, question)
    answers = _with_suggestions(snap, question,
                                [answer for answer, _ in pairs])
    verdict = worst_verdict([answer.reason or '' for answer in answers])
    stuck = []
    if verdict == RETRY:
        stuck = ['Waiting alone will not help: %s %s' % (finding.fact,
                                                         finding.remedy)
                 for _, finding in pairs
                 if finding and finding.cause in STUCK_CAUSES]
    return Report(verdict, format_time(question.now), waited_ms, answers,
                  request_id, list(dict.fromkeys(stuck)))


def new_request_id(world):
    """Make a random UUID (version 4) for a check without an id."""
    digits = bytearray(world.random(16))
    digits[6] = digits[6] & 0x0f | 0x40
    digits[8] = digits[8] & 0x3f | 0x80
    text = bytes(digits).hex()
    return '-'.join((text[:8], text[8:12], text[12:16], text[16:20],
                     text[20:]))


def pin_pairs(ids, pins):
    """Pair ids with the pins of --pin ID=PIN; raises UsageError."""
    table = {}
    for word in pins or ():
        name, sign, pin = word.rpartition('=')
        if not sign or not name.strip() or not pin.strip():
            raise UsageError('--pin %s is not ID=PIN' % json.dumps(word))
        before = table.setdefault(name.strip(), pin.strip())
        if before != pin.strip():
            raise UsageError('%s is asked for with two pins: %s and %s' % (
                json.dumps(name.strip()), before, pin.strip()))
    asked = {word.strip() for word in ids}
    for name in table:
        if name not in asked:
            raise UsageError('--pin names %s, which is not asked for'
                             % json.dumps(name))
    return [(word, table.get(word.strip(), '')) for word in ids]


def lock_refs(lock, ids=(), pins=()):
    """Turn a Lock into Refs with its pins, one per tool, in order.

    ids narrow it; pins, those of --pin, are asked for beside its own.
    Raises UsageError for an id that is not in it, and for two pins of one
    tool that differ.
    """
    refs = []
    for ref in unique_refs(pin_pairs(list(ids) or sorted(lock.tools), pins)):
        held = lock.tools.get('%s:%s' % (ref.server, ref.tool))
        if held is None:
            near = rank_nearest(ref.id, lock.tools, 1)
            raise UsageError('%s is not in the lockfile %s%s' % (
                json.dumps(ref.id), lock.path, '; did you mean %s?'
                % near[0] if near else ''))
        pin = format_hash(held.version, held.hash)
        if ref.pin and parse_pin(ref.pin) != (held.version, held.hash):
            raise UsageError('%s is asked for with two pins: %s and, in the '
                             'lockfile %s, %s' % (json.dumps(ref.id), ref.pin,
                                                  lock.path, pin))
        refs.append(ref._replace(pin=pin))
    return refs


def check_options(options, lock=None):
    """Read what both ways of checking share: (Refs, filters that are on).

    lock: the Lock of --lock, None without one.
    """
    refs = (lock_refs(lock, options.ids, options.pin) if lock else
            unique_refs(pin_pairs(options.ids, options.pin)))
    bare = [ref.id for ref in refs if not ref.pin]
    if options.require_pins and bare:
        raise UsageError('--require-pins: there is no pin for %s' % ', '.join(
            map(json.dumps, bare)))
    if options.profile == '':
        raise UsageError('--profile is empty; an unset variable must not '
                         'loosen a check')
    return refs, frozenset(name for name in (
        'read_only_only', 'exclude_destructive', 'exclude_open_world')
        if getattr(options, name))


def _question(world, config, options, lock=None):
    if options.lock == '':
        raise UsageError('--lock is empty; an unset variable must not loosen '
                         'a check')
    if options.lock is not None:
        lock = read_lock(options.lock)
    refs, filters = check_options(options, lock)
    return Question(refs, operator(config, options.profile), filters,
                    world.now(), config.settings, world.how,
                    places_of(world), parse_duration(options.horizon)
                    if options.horizon is not None else 0, lock)


def _wait(world, store, config, question, wait_ms):
    """Poll the state until waiting is of no more use (contract 5).

    Returns the milliseconds waited, and what was told of causes that time
    alone does not cure. The last look, at the deadline itself, is the
    caller's.
    """
    start, told = world.clock(), []
    while True:
        with store.read() as con:
            report = judge_all(open_snapshot(con, config),
                               question._replace(now=world.now()), '')
        spent = int((world.clock() - start) * 1000)
        if report.verdict != RETRY or spent >= wait_ms:
            return spent, told
        if not told:
            for line in report.stuck:
                world.tell(line)
            told = report.stuck
        world.sleep(min(WAIT_STEP_MS, wait_ms - spent) / 1000)


def check_request_id(text):
    """Refuse a --request-id that would not be taken as a header."""
    if text is not None and not re.match(REQUEST_ID, text):
        raise UsageError('--request-id takes 1 to 256 of A-Z a-z 0-9 _ -')


def parse_wait(text):
    """Read --wait: milliseconds from 0 to 10 seconds."""
    wait_ms = parse_duration(text) if text is not None else 0
    if wait_ms > MAX_WAIT_MS:
        raise UsageError('--wait takes at most 10s')
    return wait_ms


def warn_of(world, config, names):
    """Tell the config's warnings that concern these servers."""
    for name in sorted(names & set(config.entries)):
        server, why = look_up(config, name)
        for note in server.warnings if server else ():
            world.tell('warning: %s: %s' % (name, note))
    if not config.entries:
        for note in config.warnings:
            world.tell('warning: %s' % note)


# -- what a look tells of contracts -------------------------------------------

def contract_question(world, config, contract, needs):
    """Ask whether what a Contract needs is there, without any filter.

    needs: those of its needs that are asked for.
    """
    lock = None
    if contract.lock:
        lock = parse_lock(contract.path, contract.lock.encode('utf-8')
                          )._replace(contract=contract.name, at=contract.at)
    return Question(unique_refs(needs), operator(config), frozenset(),
                    world.now(), config.settings, world.how,
                    places_of(world), 0, lock)


def _event_of(snap, ref, answer):
    """Name what happened to a tool, which may be more than the reason."""
    known, row_id = known_of(snap, ref.server)
    if answer.reason == 'not_found' and not (
            row_id is not None and is_storable(ref.tool) and load_tools(
                snap.con, row_id, ref.server, known.launch, ref.tool)):
        return 'missing'        # it never was there
    if answer.detail.startswith('Server %s: launch changed: '
                                % json.dumps(ref.server)):
        return 'launch_changed'
    return REASON_EVENTS.get(answer.reason, answer.reason)


def contract_faults(snap, question):
    """Say what is wrong with each ref: id -> fault, {} for nothing.

    A ref that an outage hides is left out: what it was, it still may be.
    """
    found = {}
    for ref, (answer, _) in zip(question.refs, judge_refs(snap, question)):
        if answer.reason is None:
            found[ref.id] = {}
        elif not answer.retryable:
            found[ref.id] = {'event': _event_of(snap, ref, answer),
                             'reason': answer.reason,
                             'detail': answer.detail}
    return found


def _record_moves(con, world, contract, server, events):
    is_back = all(event['event'] == 'back' for event in events)
    append_record(con, Record(
        'contract', 'cli', world.now(), world.request_id, 'operator',
        'success' if is_back else 'blocked', {
            'contract': contract.name, 'server': server, 'tools': [
                {'id': event['id'], 'event': event['event']}
                for event in events]}))


def _is_meant(contract, config, server):
    """Tell whether a server, or its absence, is one a contract is for."""
    if server:
        return server.file in contract.files
    return set(contract.files) <= set(map(os.path.realpath, config.files))


def watch_contracts(con, world, config, name):
    """Record what a result of one server does to contracts: lines to tell.

    It runs in the transaction that wrote the result, so that of two syncs
    only one finds a move. A contract is of the config files it was added
    with: another project's server of that name is not the one it needs.
    """
    lines, snap = [], open_snapshot(con, config)
    for contract in [read_contract(*row) for row in load_contracts(con)]:
        needs = [need for need in contract.needs
                 if parse_id(need[0]).server == name]
        if not needs or not _is_meant(contract, config,
                                      known_of(snap, name)[0].server):
            continue
        events, held = contract_moves(contract.held, contract_faults(
            snap, contract_question(world, config, contract, needs)))
        if events:
            contract = contract._replace(held=held)
            save_contract(con, contract.name, contract.at,
                          contract_text(contract))
            _record_moves(con, world, contract, name, events)
            lines += [contract_line(contract.name, [event])
                      for event in events]
    return lines


def _watch_removed(store, config, watch):
    """Watch the servers of contracts that the config no longer has."""
    with store.read() as con:
        needed = {parse_id(need[0]).server for row in load_contracts(con)
                  for need in read_contract(*row).needs}
    gone = sorted(name for name in needed
                  if look_up(config, name)[0] is None)
    lines = []
    if gone:
        with store.write() as con:
            for name in gone:
                lines += watch(con, name)
    for line in lines:
        store.world.tell(line)


# -- sync, and a check that looks first ---------------------------------------

def no_progress(done, total, names):
    """Show nothing while a sync runs."""


def run_sync(world, config, servers, limit, progress):
    """Look at servers and record what was seen: Rows.

    While it runs a signal only asks: every child is ended and every lease
    given back before Interrupted is raised. What it does to contracts is
    told while it runs.
    """
    def watch(con, name):
        return watch_contracts(con, world, config, name)
    with Deferral(world), Store(world.home, world) as store:
        rows = Round(store, config, limit, progress, watch).run(servers)
        _watch_removed(store, config, watch)
        keep = config.settings['activity_retention']
        if keep:                # 0 keeps them for ever
            prune_records(store, world.now() - keep, 'operator')
    return rows


def tell_sync(world, rows, lock=None):
    """Tell what a sync found that somebody should know.

    lock: the Lock that the check behind it compares with, None for none.
    """
    for row in rows:
        for note in row.notes:
            world.tell('warning: ' + note)
    first = [row for row in rows if row.baseline]
    if first:
        world.tell('trusted on first use: %s, %s; %s' % (
            plural(len(first), 'server'),
            plural(sum(row.approved for row in first), 'tool'),
            'this check compares them with %s, one without --lock with '
            'nothing.' % lock_label(lock) if lock else
            'nothing to compare with. '
            'Keep the state directory %s or commit a lockfile (tools lock).'
            % world.home))


def _sync_first(world, config, question, progress):
    """Look at the servers a check names: the names looked at.

    One whose launch is not the one of the lockfile asked for is told, and
    not started.
    """
    scope, servers, lock = question.caller.servers, [], question.lock
    for name in dict.fromkeys(ref.server for ref in question.refs):
        server, _ = look_up(config, name)
        if server and (scope is None or name in scope):
            fact = lock and lock_fact(server, launch_digest(server), lock)
            if fact:
                world.tell('not started: ' + fact)
            else:
                servers.append(server)
    tell_sync(world, run_sync(world, config, servers, None, progress), lock)
    return {server.name for server in servers}


def _run_check(world, config, question, options, contract=''):
    """Do what a check's options say: a Report, whose record is on disk.

    The record is written in the transaction that was judged from, so it is
    never younger than the verdict. Raises an error, and gives no verdict,
    when it cannot be written. contract: its name, for the record.
    """
    wait_ms = parse_wait(options.wait)
    check_request_id(options.request_id)
    request_id = options.request_id or new_request_id(world)
    world = world._replace(request_id=request_id)
    names, looked_at = {ref.server for ref in question.refs}, set()
    if options.sync:
        looked_at = _sync_first(world, config, question, options.progress)
    warn_of(world, config, names - looked_at)
    with Store(world.home, world) as store:
        waited, told = None, []
        if wait_ms:
            waited, told = _wait(world, store, config, question, wait_ms)
        with store.write() as con:
            question = question._replace(now=world.now())
            report = judge_all(open_snapshot(con, config), question,
                               request_id, waited)
            record = check_record(report, question.caller, question.now)
            if contract:
                record.metadata['contract'] = contract
            append_record(con, record)
    return report._replace(stuck=[line for line in report.stuck
                                  if line not in told])


def cmd_preflight(world, options):
    """Check required tools: a Report, whose record is on disk."""
    config = load_config(world)
    return _run_check(world, config, _question(world, config, options),
                      options)


def parse_limit(text):
    """Read --timeout: milliseconds, None where it is not given."""
    limit = parse_duration(text) if text else None
    if text is not None and not limit:
        raise UsageError('--timeout must be longer than 0')
    return limit


def chosen_servers(world, config, names):
    """Give the servers named, or all: (Servers, unknown -> nearest).

    What is wrong with the config is told, whatever was named.
    """
    servers, skipped = all_servers(config)
    for note in config.warnings + skipped:
        world.tell('warning: ' + note)
    wanted = list(dict.fromkeys(name.strip() for name in names))
    by_name = {server.name: server for server in servers}
    unknown = {name: rank_nearest(name, by_name, 1) for name in wanted
               if name not in by_name}
    if wanted:
        servers = [by_name[name] for name in wanted if name in by_name]
    return servers, unknown


# -- sync --notify ------------------------------------------------------------

def split_notify(text):
    """Split the command of --notify into words, as a shell would.

    None stays None. Raises UsageError.
    """
    import shlex
    if text is None:
        return None
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ''
    if os.name == 'nt':         # there it divides directories
        lexer.escape = ''
    try:
        words = list(lexer)
    except ValueError as exc:
        raise UsageError('--notify: %s' % str(exc).lower()) from exc
    if not words or not words[0]:
        raise UsageError('--notify is empty')
    return words


def read_notify(world, text):
    """Read --notify into words, None without; its program must be there.

    So that it is known before anything runs, and not when there is news.
    """
    words = split_notify(text)
    try:
        if words:
            find_ours(words[0], world.env)
    except (OSError, UpstreamError) as exc:
        raise UsageError('--notify: %s' % exc) from exc
    return words


def _claim_news(store, config):
    """Take what no --notify has delivered yet: (events, what was told).

    Taken in one transaction, so that of two syncs one delivers it.
    """
    events, before = [], {}
    files = set(map(os.path.realpath, config.files))
    with store.write() as con:
        for contract in [read_contract(*row) for row in load_contracts(con)]:
            news = contract_moves(contract.told, {
                need[0]: contract.held.get(need[0], {})
                for need in contract.needs})[0]
            if not news or not files & set(contract.files):
                continue
            before[contract.name] = {event['id']: contract.told.get(
                event['id']) for event in news}
            save_contract(con, contract.name, contract.at, contract_text(
                contract._replace(told=contract.held)))
            for event in news:
                ref = parse_id(event['id'])
                events.append(dict({
                    'contract': contract.name, 'server': ref.server,
                    'tool': ref.tool}, **event))
    return events, before


def _give_back(store, before):
    """Note that what was taken was not delivered."""
    with store.write() as con:
        for contract in [read_contract(*row) for row in load_contracts(con)]:
            undone = before.get(contract.name)
            if undone:
                told = dict(contract.told, **undone)
                save_contract(con, contract.name, contract.at, contract_text(
                    contract._replace(told={
                        name: fault for name, fault in told.items()
                        if fault})))


def notify(world, config, words):
    """Deliver to a command what happened to contracts since the last time.

    JSON on its stdin: {"events": [{contract, server, tool, id, event,
    reason, detail}], "at"}. What it fails to take is told, and offered to
    the next sync that has a --notify.
    """
    with Deferral(world), Store(world.home, world) as store:
        events, before = _claim_news(store, config)
        if not events:
            return
        fault = 'was cut off'
        try:
            fault = feed_command(words, (compact_json({
                'events': events, 'at': format_time(world.now())})
                + '\n').encode('ascii'), world)
        finally:
            if fault:
                _give_back(store, before)
    if fault:
        world.tell('warning: --notify %s: %s; the next sync with --notify '
                   'tries again' % (words[0], fault))


def _after_look(world, row):
    """Name the command that a Row of sync calls for, '' for none."""
    words = {'error': 'servers show', 'pending_auth': 'servers show',
             'quarantined': 'servers approve',
             'ready': 'tools review' if row.awaiting else ''}.get(row.state)
    return command_line(world.how, words, row.server) if words else ''


def _tell_turned(world, rows):
    """Tell, once, of each server that is not what it was at the last look."""
    for row in rows:
        is_bad = row.state in ('error', 'pending_auth')
        if is_bad and row.was != (row.state, row.cause):
            world.tell('%s: %s' % (row.server, ': '.join(filter(None, (
                row.state, row.cause, row.detail)))))
            world.tell('%s: Run: %s' % (row.server, row.remedy))
        elif row.state == 'ready' and row.was and row.was[0] != 'ready':
            world.tell('%s: ready again' % row.server)
        if row.awaiting and (row.added or row.changed):
            world.tell('%s: %s: Run: %s' % (row.server, row.detail,
                                            row.remedy))


def cmd_sync(world, options):
    """Look at servers: (Rows, names that are not configured)."""
    words = read_notify(world, options.notify)
    limit = parse_limit(options.timeout)
    check_request_id(options.request_id)
    world = world._replace(request_id=options.request_id or '')
    config = load_config(world, True)
    servers, unknown = chosen_servers(world, config, options.ids)
    for name, near in unknown.items():
        world.tell(look_up(config, name)[1] or 'no server %s is configured%s'
                   % (json.dumps(name), '; did you mean %s?' % near[0]
                      if near else ''))
    rows = [row._replace(remedy=_after_look(world, row)) for row in run_sync(
        world, config, servers, limit, options.progress)]
    tell_sync(world, rows)
    if not world.width:     # a terminal has it all in the table
        _tell_turned(world, rows)
    if words:
        notify(world, config, words)
    return rows, list(unknown)


def exit_of_sync(found):
    """Give the exit code of a sync: the worst of its servers."""
    rows, unknown = found
    codes = {'ready': EXIT_READY, 'disabled': EXIT_READY,
             'error': EXIT_RETRY, 'quarantined': EXIT_BLOCKED,
             'pending_auth': EXIT_BLOCKED}
    worst = max([codes[row.state] for row in rows] or [EXIT_READY])
    return EXIT_UNKNOWN if unknown else worst


# -- health -------------------------------------------------------------------

def _look_twice(world, config, servers, limit, progress):
    """Look at servers, and again where one was up but gave no list."""
    rows = {row.server: row for row in run_sync(
        world, config, servers, limit, progress)}
    again = [server for server in servers if is_list_failure(
        *rows[server.name][1:4])]
    if again:
        rows.update((row.server, row) for row in run_sync(
            world, config, again, limit, progress))
    tell_sync(world, list(rows.values()))


def _checkups(con, world, config, servers, is_live):
    """Load the Checkups of servers: those that are on, and those off."""
    found = [load_checkup(con, config, server.name, world, is_live)
             for server in servers]
    return ([case for case, is_off in found if not is_off],
            [case for case, is_off in found if is_off])


def cmd_health(world, options):
    """Tell whether servers, and the APIs behind them, are up: a report.

    A look is recorded like a sync's; beside it the last probe is kept, and
    an audit record. What the gate reads of a probe is nothing.
    """
    limit = parse_limit(options.timeout)
    config = load_config(world)
    servers, unknown = chosen_servers(world, config, options.ids)
    if servers and not options.cached:
        _look_twice(world, config, servers, limit, options.progress)
    with Store(world.home, world) as store:
        with store.read() as con:
            cases, off = _checkups(con, world, config, servers,
                                   not options.cached)
        cases += off if options.ids else []
        if options.cached:          # else the looks have told
            warn_of(world, config, {case.server.name for case in cases})
        if not cases and not unknown:
            raise UsageError('there is no server to look at',
                             'See `servers list`; one that is switched off '
                             'must be named.')
        probes = send_probes(cases, world, options.probe, limit)
        now = world.now()
        rows = [health_row(case, probes[case.server.name], now)
                for case in cases]
        rows += [unknown_row(name, look_up(config, name)[1], near, world.how)
                 for name, near in unknown.items()]
        report = health_report(rows, now)
        with store.write() as con:
            for case in cases:
                probe = probes[case.server.name]
                if not probe['skipped']:
                    save_probe(con, case.server.name, seen_key(case.server),
                               probe)
            record_health(con, report, now)
    return report


def recorded_health(world, config):
    """Report what is recorded of all servers: no look, no probe."""
    with Store(world.home, world) as store, store.read() as con:
        now = world.now()
        cases, _ = _checkups(con, world, config, all_servers(config)[0],
                             False)
        rows = [health_row(case, recorded_probe(con, case, max_age_of(
            case.server, config.settings, case.link.ttl if case.link else 0),
            now), now) for case in cases]
    return health_report(rows, now)


# -- tools: what is known, diff, approve --------------------------------------

def _tool_row(server, tool):
    is_denied = denied_by(server, tool.name) is not None
    approved = tool.approved
    row = {
        'id': '%s:%s' % (server.name, tool.name), 'server': server.name,
        'name': tool.name, 'listed': tool.listed,
        'status': tool_status(tool)[0],
        'blocked': tool.blocked_at is not None, 'denied': is_denied,
        'hash': format_hash(tool.version, tool.hash) if tool.hash else None,
        'approved_hash': format_hash(approved.version, approved.hash)
        if approved else None, 'annotations': tool.hints,
        'first_seen': format_time(tool.first_seen),
        'last_seen': format_time(tool.last_seen)}
    if tool.ignored:
        row['ignored'] = list(tool.ignored)
    return row


def _note_of(server, tool):
    """Say what is ignored of a tool, and how often its text moves."""
    ignored = ('Differs from the approved definition in %s only, which '
               'ignore_changes of server %s leaves out (%s).' % (
                   ', '.join(tool.ignored), json.dumps(server.name),
                   server.file) if tool.ignored else '')
    return ' '.join(filter(None, (ignored, moves_text(server, tool))))


def _tools_of(con, config, server, only=None):
    """Load a server's tools under its configured launch: (Tools, row).

    only: one tool name, or None for all.
    """
    known, row_id = load_known(con, config, server.name)
    link = known.connection
    if link is None or not link.state:
        return {}, row_id
    return load_server_tools(con, row_id, known, only), row_id


def _selected(config, names):
    if names:
        return [known_server(config, name) for name in names]
    return all_servers(config)[0]


def cmd_tools_list(world, options):
    """List what is known of the tools of some servers, or of all."""
    config = load_config(world, True)
    rows = []
    with Store(world.home, world) as store, store.read() as con:
        for server in _selected(config, options.ids):
            tools, _ = _tools_of(con, config, server)
            rows += [_tool_row(server, tools[name])
                     for name in sorted(tools)]
    return rows


def _find_tool(con, config, text, world):
    """Find one tool by id: (server, Tool, row id).

    Raises UsageError for an id that is malformed or not known here.
    """
    ref = parse_id(text)
    if not ref.server:
        raise UsageError('%s: %s' % (json.dumps(ref.id), id_hint(ref)))
    server, tools = known_server(config, ref.server), {}
    if is_storable(ref.tool):
        tools, row_id = _tools_of(con, config, server, ref.tool)
    if ref.tool in tools:
        return server, tools[ref.tool], row_id
    question = Question([ref], operator(config), (), 0, config.settings,
                        world.how, '')
    near = suggest_ids(open_snapshot(con, config), question, ref)
    raise UsageError('no tool %s is known%s' % (
        json.dumps(ref.id), '; did you mean %s?' % ', '.join(near)
        if near else ''), 'See: ' + command_line(
            world.how, 'tools list', server.name))


def _one_id(options):
    if len(options.ids) != 1:
        raise UsageError('give exactly one tool id')
    return options.ids[0]


def cmd_tools_show(world, options):
    """Show all that is known of one tool, its definition included."""
    text, config = _one_id(options), load_config(world, True)
    with Store(world.home, world) as store, store.read() as con:
        server, tool, row_id = _find_tool(con, config, text, world)
        row = _tool_row(server, tool)
        row['why'] = tool_status(tool)[1] or None
        at = tool.approved.at if tool.approved else None
        row['approved_at'] = format_time(at) if at is not None else None
        row['approved_how'] = tool.approved.how if tool.approved else None
        row['changes'], row['looks'] = tool.moves
        row['note'] = _note_of(server, tool) or None
        text = load_definition(con, tool.hash)
        row['definition'] = json.loads(text) if text else None
        row['pin'] = ('--pin ' + shell_word('%s=%s' % (
            row['id'], row['hash'])) if row['hash'] else None)
    return row


def _diff_fields(old, new):
    """Give the fields that differ: old and new value, and lines."""
    before, after = (json.loads(text) if text else {} for text in (old, new))
    return [{'field': field, 'lines': lines, 'old': before.get(field),
             'new': after.get(field)}
            for field, lines in diff_definitions(old, new)]


def _approve_line(how, tool, lock):
    """Write the command that trusts a tool as it is now listed."""
    if lock:
        return lock_line(how, tool, lock.path)
    token = review_token(tool.hash, tool.hints)
    return command_line(how, 'tools approve --expect ' + token,
                        '%s:%s' % (tool.server, tool.name))


def _diff(con, server, tool, how, lock=None):
    """Set the listed definition beside the approved one.

    lock: the Lock that approves, its path '' where the config names it.
    """
    approved = tool.approved
    status, why = tool_status(tool)
    old = load_approved_text(con, lock, tool)
    new = load_definition(con, tool.hash) if tool.hash else ''
    name = '%s:%s' % (server.name, tool.name)
    token = review_token(tool.hash, tool.hints) if tool.hash else None
    note = _note_of(server, tool)
    if approved and new and not old:
        note = (note + ' The approved text is not kept here: all of the '
                'listed one is shown.').strip()
        if fields_of_rule(server.ignore_changes, tool.name):
            note += ' ignore_changes needs it%s.' % (
                ': `tools lock --full` writes it' if lock else '')
    diff = {
        'id': name, 'status': status, 'why': why or None,
        'approved_hash': format_hash(approved.version, approved.hash)
        if approved else None,
        'hash': format_hash(tool.version, tool.hash) if tool.hash else None,
        'listed': tool.listed, 'note': note or None,
        'changes': tool.moves[0], 'looks': tool.moves[1],
        'fields': _diff_fields(old, new) if new else [],
        'hints': diff_hints(approved.hints if approved else None,
                            tool.hints),
        'odd_characters': ['%s: %s' % pair
                           for pair in definition_notes(new)],
        'token': token, 'approve': _approve_line(how, tool, lock)
        if token and tool.listed else None}
    if tool.ignored:
        diff['ignored'] = list(tool.ignored)
    return diff


def _own_lock(config):
    """Give the Lock of a config as _diff takes it, None without one."""
    return config.lock and config.lock._replace(path='')


def cmd_tools_diff(world, options):
    """Show what approving a tool would trust, and the line that does it."""
    text, config = _one_id(options), load_config(world, True)
    with Store(world.home, world) as store, store.read() as con:
        server, tool, _ = _find_tool(con, config, text, world)
        return _diff(con, server, tool, world.how, _own_lock(config))


def _to_approve(con, config, options, world):
    """Load what an approve asks for: [(server, Tool, diff)]."""
    found = []
    if options.ids:
        for text in dict.fromkeys(word.strip() for word in options.ids):
            server, tool, _ = _find_tool(con, config, text, world)
            found.append((server, tool))
    else:
        names = [] if options.server is None else [options.server.strip()]
        for server in _selected(config, names):
            tools, _ = _tools_of(con, config, server)
            for name in sorted(tools):
                if tools[name].flaw and tools[name].listed:
                    world.tell('left out: %s:%s cannot be approved: %s' % (
                        server.name, name, tools[name].flaw))
                elif tools[name].listed and tool_status(
                        tools[name])[0] != APPROVED:
                    found.append((server, tools[name]))
    if not found:
        world.tell('nothing awaits approval')
    for server, tool in found:
        name = json.dumps('%s:%s' % (server.name, tool.name))
        if tool.flaw:
            raise UsageError('%s cannot be approved: %s' % (name, tool.flaw))
        if not tool.listed:
            raise UsageError('%s is not listed now; there is nothing to '
                             'approve' % name)
    return [(server, tool, _diff(con, server, tool, world.how))
            for server, tool in found]


def _check_approve_options(options):
    ways = bool(options.ids), options.server is not None, options.all
    if sum(ways) != 1:
        raise UsageError('give tool ids, or --server NAME, or --all')
    if options.expect is not None and len(options.ids) != 1:
        raise UsageError('--expect goes with exactly one tool id')


class ReviewOutdated(UsageError):
    """What was reviewed is no longer what is listed."""


def _write_approvals(con, world, config, tokens):
    """Approve what its review token still fits, with a record: rows.

    Raises ReviewOutdated, and approves nothing, where one does not.
    """
    now, rows = world.now(), []
    for name, token in tokens.items():
        server, tool, _ = _find_tool(con, config, name, world)
        if not tool.listed or tool.flaw or token != review_token(
                tool.hash, tool.hints):
            raise ReviewOutdated('%s changed while it was reviewed; nothing '
                                 'was approved' % name)
        old = tool.approved
        is_same = old and (old.hash, old.hints) == (tool.hash, tool.hints)
        if not is_same:
            digest = launch_digest(server)
            save_approvals(con, server.name, digest, [tool],
                           ('approve', now))
            if not (config.settings['quarantine_new_servers']
                    or load_launches(con, server.name)):
                # Only an import lists tools under a launch that is not
                # known. A choice makes it so, where a new one may run.
                save_launch(con, server.name, Launch(
                    digest, launch_text(server), 'approve', now, True))
        rows.append({'id': name, 'result': 'unchanged' if is_same
                     else 'approved'})
    done = [row['id'] for row in rows if row['result'] == 'approved']
    if done:
        append_record(con, Record(
            'approval', 'cli', now, '', 'operator', 'success', {
                'action': 'approve', 'tools': done,
                'tokens': [tokens[name] for name in done]}))
    return rows


def _approve(world, store, config, tokens):
    """Write approvals whose review tokens still fit, in one transaction."""
    with store.write() as con:
        return _write_approvals(con, world, config, tokens)


def refuse_lock_mode(config, how, ids=()):
    """Refuse to approve in the state where a lockfile approves."""
    if config.lock:
        raise UsageError('approvals are kept in the lockfile %s: `tools lock` '
                         'approves' % config.lock.path, 'Run: '
                         + command_line(how, 'tools lock' if ids else
                                        'tools lock --all', *ids))


def review_text(diff, question):
    """Write a diff, and the question that is put below it."""
    return '%s%s %s?' % (render_diff(dict(diff, approve=None)), question,
                         reveal(diff['id']))


def cmd_tools_approve(world, options):
    """Trust listed definitions: rows of {'id', 'result'}.

    What was shown (or --expect names) must still be what is listed when it
    is written; otherwise nothing is approved.
    """
    _check_approve_options(options)
    is_settled = options.yes or options.expect is not None
    config = load_config(world, True)
    refuse_lock_mode(config, world.how, options.ids)
    with Store(world.home, world) as store:
        with store.read() as con:
            found = _to_approve(con, config, options, world)
        tokens = {}
        for _, _, diff in found:
            wanted = (diff['token'] if options.expect is None
                      else options.expect.lower())
            if wanted != diff['token']:
                raise UsageError(
                    '%s is not what was reviewed: its token is now %s'
                    % (diff['id'], diff['token']),
                    'Review it again: ' + command_line(
                        world.how, 'tools diff', diff['id']))
            if not is_settled and not world.ask(review_text(diff,
                                                            'Approve')):
                raise UsageError(
                    'nothing was approved: the answer for %s was not yes'
                    % diff['id'], '`tools review` keeps each answer.')
            tokens[diff['id']] = wanted
        return _approve(world, store, config, tokens)


# -- tools lock, tools verify -------------------------------------------------

LockJob = namedtuple('LockJob', 'path old data options')
LockJob.__doc__ = """One run that rewrites a lockfile. path: as it was named;
old: the Lock in it, data its bytes, None where there is no file yet."""

LockPlan = namedtuple('LockPlan', 'lock tools diffs faults notes')
LockPlan.__doc__ = """What a run of `tools lock` would write, read at one
instant. lock: the Lock; tools: id -> Tool, those looked at; diffs: id -> the
diff of one that nobody has approved; faults: why it cannot be done; notes:
what was left out, and why."""


def _lock_job(path, options):
    """Read the lockfile that is to be rewritten, if it is there."""
    if not _is_lock_there(path):
        return LockJob(path, Lock(path, {}, {}), None, options)
    data = read_lock_bytes(path)    # of one instant
    return LockJob(path, parse_lock(path, data), data, options)


def _replace_lock(world, store, job, lock, write):
    """Put a Lock in the place of the one that was read.

    write(con) does what belongs to it in the state and gives the metadata
    of its record, which is on the disk before the file is replaced. Raises
    UsageError, and writes nothing, when the file has changed meanwhile.
    """
    data = render_lock(lock).encode('ascii')
    if len(data) > MAX_LOCK_BYTES:
        raise UsageError('the lockfile would be longer than %d MiB' % (
            MAX_LOCK_BYTES >> 20), 'Lock fewer tools, or without --full.')
    parse_lock(job.path, data)  # what could not be read is never written

    def record():
        with store.write() as con:
            there = _is_lock_there(job.path)
            if job.data != (read_lock_bytes(job.path) if there else None):
                raise UsageError('the lockfile %s changed meanwhile; nothing '
                                 'was written' % job.path, 'Run it again.')
            about = dict(write(con), file=os.path.abspath(job.path))
            append_record(con, Record('lock', 'cli', world.now(), '',
                                      'operator', 'success', about))
    mutex = FileLock(os.path.join(world.home, 'lockfile.mutex'), world)
    try:
        with mutex:             # of the runs that rewrite one
            replace_file(job.path, data, record)
    finally:
        mutex.close()


def _check_listing(snap, how, name):
    """Refuse to lock tools of a server that is held, or was never seen."""
    known, _ = known_of(snap, name)
    link = known.connection
    if known.quarantined:
        raise UsageError(known.quarantined, 'Run: ' + command_line(
            how, 'servers approve', name))
    if link is None or link.listed_at is None:
        raise UsageError('Server %s has not listed its tools under its '
                         'launch yet.' % json.dumps(name),
                         'Run: ' + command_line(how, 'sync', name))


def _left_out(server, tool):
    """Say why a listed tool can never be ready, '' if it can."""
    if tool.blocked_at is not None:
        return 'it is blocked'
    if _tool_row(server, tool)['denied']:
        return 'the config denies it'
    ref = parse_id('%s:%s' % (server.name, tool.name))
    is_plain = (ref.server, ref.tool) == (server.name, tool.name)
    return '' if is_plain else 'no id can name it'


def _lock_all(snap, how, faults, notes):
    """Name all that the configured servers list and that can be ready."""
    servers, skipped = all_servers(snap.config)
    notes += skipped
    for server in servers:
        known, row_id = known_of(snap, server.name)
        if known.disabled:
            notes.append('left out: ' + known.disabled)
            continue
        try:
            _check_listing(snap, how, server.name)
        except UsageError as exc:
            faults.append('%s %s' % (exc, exc.hint))
            continue
        for name, tool in sorted(load_server_tools(
                snap.con, row_id, known).items()):
            text, why = '%s:%s' % (server.name, name), _left_out(server, tool)
            if tool.listed and not why:
                yield text
            elif tool.listed:
                notes.append('left out: %s: %s' % (json.dumps(text), why))


def _lock_ids(snap, how, job, faults, notes):
    """Name the tools that are to be locked as they are listed now."""
    if job.options.all:
        return list(_lock_all(snap, how, faults, notes))
    given = job.options.ids
    if not given and not job.options.remove:
        given = sorted(job.old.tools)
    wanted = []
    for text in given:
        ref = parse_id(text)
        if not ref.server:
            raise UsageError('%s: %s' % (json.dumps(ref.id), id_hint(ref)))
        wanted.append('%s:%s' % (ref.server, ref.tool))
    return list(dict.fromkeys(wanted))


def _tool_to_lock(snap, how, job, text):
    """Find a tool that is listed now; raises UsageError with the cure."""
    ref = parse_id(text)
    known_server(snap.config, ref.server)
    _check_listing(snap, how, ref.server)
    tool = _listed_tool(snap, ref.server, ref.tool)
    if tool is None and text in job.old.tools:
        raise UsageError('%s is not listed now.' % json.dumps(text), 'Run: '
                         + command_line(how, 'tools lock --file=%s --remove='
                                        '%s' % (shell_word(job.path),
                                                shell_word(text))))
    if tool is None:
        raise UsageError('%s is not listed now.' % json.dumps(text), 'Run: '
                         + command_line(how, 'tools list', ref.server))
    if tool.flaw:
        raise UsageError('%s cannot be locked: %s.' % (json.dumps(text),
                                                       tool.flaw))
    return tool


def _unseen_drift(tool, lock):
    """Set a tool beside the locked one, where another was approved by a
    first look only: a host that starts empty has shown it to nobody."""
    held = locked_approval(lock, tool.server, tool.name)
    if (held is None or tool.approved is None
            or tool.approved.how != 'baseline'):
        return None
    beside = tool._replace(approved=held, differs=(), ignored=())
    return None if tool_status(beside)[0] == APPROVED else beside


def _check_locked_launch(snap, how, job, name):
    """Refuse to lock another launch that only a first look trusted."""
    known, _ = known_of(snap, name)
    fact = lock_fact(known.server, known.launch, job.old)
    if fact and any(row.digest == known.launch and row.how == 'baseline'
                    for row in load_launches(snap.con, name)):
        raise UsageError(fact, 'Run: ' + command_line(
            how, 'servers approve --lock=' + shell_word(job.path), name))


def _fault_text(exc):
    """Write an error, and what to do about it, as sentences."""
    text = str(exc)
    return ' '.join(filter(None, (
        text if text.endswith(('.', '?')) else text + '.', exc.hint)))


def _plan_lock(con, config, how, job):
    """Plan what a run of `tools lock` would write: a LockPlan."""
    snap, old, is_whole = open_snapshot(con, config), job.old, job.options.all
    plan = LockPlan(Lock(job.path, {} if is_whole else dict(old.launches),
                         {} if is_whole else dict(old.tools)), {}, {}, [], [])
    for text in job.options.remove or ():
        ref = parse_id(text)
        if plan.lock.tools.pop('%s:%s' % (ref.server, ref.tool), None) is None:
            plan.faults.append('%s is not in the lockfile %s.' % (
                json.dumps(ref.id), job.path))
    is_full = job.options.full or any(row.text for row in old.tools.values())
    for text in _lock_ids(snap, how, job, plan.faults, plan.notes):
        try:
            tool = plan.tools[text] = _tool_to_lock(snap, how, job, text)
            _check_locked_launch(snap, how, job, tool.server)
        except UsageError as exc:
            plan.faults.append(_fault_text(exc))
            continue
        known, _ = known_of(snap, tool.server)
        plan.lock.launches[tool.server] = (known.launch,
                                           launch_text(known.server))
        plan.lock.tools[text] = Locked(
            tool.version, tool.hash, tool.hints,
            load_definition(con, tool.hash) if is_full else '')
        why = _left_out(known.server, tool)
        if why:                 # it was named, so it is not left out
            plan.notes.append('warning: %s is never ready: %s' % (
                json.dumps(text), why))
        if tool_status(tool)[0] != APPROVED or tool.ignored:
            plan.diffs[text] = _diff(con, known.server, tool, how,
                                     _own_lock(config))
            continue
        beside = _unseen_drift(tool, old)
        if beside:
            plan.diffs[text] = dict(
                _diff(con, known.server, beside, how, old),
                review='tools verify --lock=' + shell_word(job.path))
    return plan


def _fitting(how, words, tools):
    """Read --expect ID=TOKEN: the ids whose tokens fit; raises UsageError."""
    names = set()
    for word in words or ():
        text, _, token = word.rpartition('=')
        ref = parse_id(text)
        name = '%s:%s' % (ref.server, ref.tool)
        if not ref.server:
            raise UsageError('--expect %s is not ID=TOKEN' % json.dumps(word))
        if name not in tools:
            raise UsageError('--expect names %s, which is not locked here'
                             % json.dumps(ref.id))
        now = review_token(tools[name].hash, tools[name].hints)
        if token.strip().lower() != now:
            raise UsageError(
                '%s, as it was last listed here (%s), is not what was '
                'reviewed' % (json.dumps(ref.id), format_time(
                    tools[name].last_seen)), 'Look again: %s; then review '
                'it: %s' % (command_line(how, 'sync', ref.server),
                            command_line(how, 'tools diff', name)))
        names.add(name)
    return names


def _settle_lock(world, plan, options):
    """Refuse what cannot be locked, and what nobody approves now."""
    if plan.faults:
        for fault in dict.fromkeys(plan.faults):
            world.tell(fault)
        raise UsageError('nothing was written: not all of it can be locked')
    if not plan.lock.tools:
        raise UsageError('nothing is left to be locked; to lock nothing, '
                         'remove the file')
    names = _fitting(world.how, options.expect, plan.tools)
    todo = [name for name in plan.diffs if name not in names]
    try:
        while todo and (options.yes or world.ask(
                render_diff(dict(plan.diffs[todo[0]], approve=None))
                + 'Lock %s as it is listed now?' % safe_text(todo[0]))):
            todo.pop(0)
    except UsageError:          # there is nobody to ask
        pass
    for name in todo:
        diff = plan.diffs[name]
        world.tell('%s is %s: %s. Review it: %s' % (
            json.dumps(name), diff['status'],
            (diff['why'] or diff['note']).rstrip('.'), command_line(
                world.how, diff.get('review', 'tools diff'), name)))
    if todo:
        raise UsageError('nothing was written: %s awaiting approval' % plural(
            len(todo), 'tool'), 'Review each, then lock it with --expect '
            'ID=TOKEN, or all of them with --yes.')


def _lock_rows(job, plan):
    """Say what became of each tool of a lockfile."""
    old, new, rows = job.old, plan.lock, []
    for name in sorted(set(old.tools) | set(plan.tools)):
        server = parse_id(name).server
        is_same = old.tools.get(name) == new.tools.get(name) and (
            name not in plan.tools
            or old.launches.get(server) == new.launches.get(server))
        rows.append({'id': name, 'result': (
            'removed' if name not in new.tools else
            'added' if name not in old.tools else
            'unchanged' if is_same else 'renewed')})
    return rows


def _lock_notes(job, plan):
    """Say what somebody who locks tools should know beside the rows."""
    notes = list(plan.notes)
    for name, launch in sorted(plan.lock.launches.items()):
        before = job.old.launches.get(name, launch)
        if before != launch:
            notes.append('the launch of server %s was %s, now it is %s' % (
                json.dumps(name), before[1], launch[1]))
    return notes


def _check_lock_options(options):
    if options.file == '':
        raise UsageError('--file is empty')
    if options.all and (options.ids or options.remove):
        raise UsageError('give tool ids, or --all, not both')
    both = set(map(parse_id, options.ids)) & set(map(
        parse_id, options.remove or ()))
    if both:
        raise UsageError('%s is to be locked and to be removed' % json.dumps(
            both.pop().id))


def cmd_tools_lock(world, options):
    """Lock listed definitions: rows of {'id', 'result'}.

    Nothing is written unless all of it can be, and is approved: before, by
    --expect, at a terminal or by --yes. What was shown must still be what
    is listed when it is written.
    """
    _check_lock_options(options)
    config = load_config(world, True)
    job = _lock_job(config.settings['lockfile'] if options.file is None
                    else options.file, options)
    if job.data is None and not (options.ids or options.all):
        raise UsageError('there is no lockfile %s yet; give tool ids, or '
                         '--all' % job.path)
    with Store(world.home, world) as store:
        with store.read() as con:
            plan = _plan_lock(con, config, world.how, job)
        _settle_lock(world, plan, options)
        rows = _lock_rows(job, plan)
        tokens = {name: diff['token'] for name, diff in plan.diffs.items()}

        def write(con):
            now = _plan_lock(con, config, world.how, job)
            if (now.lock, now.faults, sorted(now.diffs)) != (
                    plan.lock, [], sorted(plan.diffs)):
                raise UsageError('something changed while it was reviewed; '
                                 'nothing was written', 'Run it again.')
            if tokens and not config.lock:
                _write_approvals(con, world, config, tokens)
            for tool in map(plan.tools.get, tokens):
                reset_moves(con, load_row_ids(con, tool.server), [tool.name])
            done = {word: [row['id'] for row in rows if row['result'] == word]
                    for word in ('added', 'renewed', 'removed')}
            return dict(done, action='lock', tools=sorted(
                name for names in done.values() for name in names),
                approved=sorted(tokens), tokens=[
                    tokens[name] for name in sorted(tokens)])
        is_new = tokens or job.data != render_lock(plan.lock).encode('ascii')
        if is_new:
            _replace_lock(world, store, job, plan.lock, write)
    for note in _lock_notes(job, plan):
        world.tell(note)
    world.tell('%s: %s' % ('written' if is_new else 'unchanged', job.path))
    return rows


Verified = namedtuple('Verified', 'report drift new')
Verified.__doc__ = """A check by a lockfile, and what is beside it: drift,
as _diff gives each; new: tools of its servers that it does not hold."""


def _drifted(snap, question, ref):
    """Set a listed tool beside the locked one: its diff, None if alike."""
    lock, known = question.lock, known_of(snap, ref.server)[0]
    tool = load_case(snap, question, ref).tool
    approved = locked_approval(lock, ref.server, ref.tool)
    if tool is None:
        is_gone = (known.connection is not None
                   and known.connection.listed_at is not None)
        return {'id': ref.id, 'status': 'not listed', 'why': None,
                'approved_hash': ref.pin, 'hash': None, 'fields': [],
                'hints': [], 'token': None, 'approve': None
                } if is_gone else None
    if not tool.flaw and (tool.version, tool.hash, tool.hints) == (
            approved.version, approved.hash, approved.hints):
        return None
    return _diff(snap.con, known.server, tool._replace(
        approved=approved, differs=(), ignored=()), question.how, lock)


def _launch_drift(question, known):
    """Set a launch beside the locked one: a row as of a tool, or None."""
    name, lock = known.server.name, question.lock
    fact = lock_fact(known.server, known.launch, lock)
    if not fact:
        return None
    (old, text), now = lock.launches[name], launch_text(known.server)
    return {'id': name, 'status': 'launch changed',
            'why': 'only a masked part differs' if text == now else None,
            'approved_hash': old, 'hash': known.launch,
            'fields': [{'field': 'launch', 'lines': ['-' + text,
                                                     '+' + now]}],
            'hints': [], 'token': None, 'approve': command_line(
                question.how, 'servers approve --lock=' + shell_word(
                    lock.path), name)}


def _beside_lock(snap, question):
    """Compare a lockfile with what was seen: (drift, new)."""
    drift, new, lock = [], [], question.lock
    for name in dict.fromkeys(ref.server for ref in question.refs):
        known, row_id = known_of(snap, name)
        if known.server is None:
            continue
        drift.append(_launch_drift(question, known))
        link = known.connection
        tools = load_server_tools(snap.con, row_id, known) if (
            link and link.state) else {}
        new += [{'id': '%s:%s' % (name, tool), 'status': tool_status(row)[0],
                 'hash': format_hash(row.version, row.hash) if row.hash
                 else None} for tool, row in sorted(tools.items())
                if row.listed and '%s:%s' % (name, tool) not in lock.tools]
    drift += [_drifted(snap, question, ref) for ref in question.refs
              if known_of(snap, ref.server)[0].server]
    return [row for row in drift if row], new


def _tell_launch_texts(world, config, lock, names):
    """Tell where a lockfile shows a launch as its digest does not.

    The digest alone is compared, and people review the text.
    """
    for name in names & set(lock.launches):
        (digest, text), server = lock.launches[name], look_up(config,
                                                              name)[0]
        if server and launch_digest(server) == digest and (
                key_text(launch_text(server)) != key_text(text)):
            world.tell('note: the lockfile %s says that server %s starts %s, '
                       'and has the digest of: %s. It was edited, or written '
                       'by another version; `tools lock` writes it anew.' % (
                           lock.path, json.dumps(name), text,
                           launch_text(server)))


def cmd_tools_verify(world, options):
    """Check by a lockfile, and say what drifted from it: a Verified.

    It looks at no server: what is beside the lock is what a sync saw.
    """
    check_request_id(options.request_id)
    config = load_config(world)
    if options.lock is None:
        options.lock = config.settings['lockfile']
    question = _question(world, config, options)
    names = {ref.server for ref in question.refs}
    warn_of(world, config, names)
    _tell_launch_texts(world, config, question.lock, names)
    with Store(world.home, world) as store:
        with store.write() as con:
            report = judge_all(open_snapshot(con, config), question,
                               options.request_id or new_request_id(world))
            append_record(con, check_record(report, question.caller,
                                            question.now))
        with store.read() as con:   # comparing takes time: nobody waits
            return Verified(report, *_beside_lock(open_snapshot(con, config),
                                                  question))


# -- tools review, block, explain ---------------------------------------------

def _write_blocks(con, world, config, ids, verb):
    """Block or unblock tools, with a record: rows of id and result."""
    now, rows = world.now(), []
    for text in dict.fromkeys(word.strip() for word in ids):
        ref = parse_id(text)
        if not ref.server or not is_storable(ref.tool):
            raise UsageError('%s: %s' % (json.dumps(ref.id), id_hint(ref)))
        server = known_server(config, ref.server)
        tools, _ = _tools_of(con, config, server, ref.tool)
        if verb == 'block' and ref.tool not in tools:
            world.tell('note: %s is not known here; the block holds '
                       'when it comes' % json.dumps(ref.id))
        is_on = ref.tool in load_blocks(con, ref.server)
        save_block(con, ref.server, ref.tool,
                   now if verb == 'block' else None)
        rows.append({'id': ref.id, 'result': verb + 'ed' if is_on
                     is (verb != 'block') else 'unchanged'})
    done = [row['id'] for row in rows if row['result'] != 'unchanged']
    if done:
        append_record(con, Record(
            'approval', 'cli', now, '', 'operator', 'success', {
                'action': verb, 'tools': done}))
    return rows


def _cmd_block(world, options, verb):
    config = load_config(world, True)
    if not options.ids:
        raise UsageError('no tool id was given')
    with Store(world.home, world) as store, store.write() as con:
        return _write_blocks(con, world, config, options.ids, verb)


REVIEW_CHOICES = ('approve', 'block', 'skip', 'quit')


def _awaiting(con, config, servers, world):
    """List the ids that await a decision; tells what is left out."""
    ids, blocked = [], 0
    for server in servers:
        tools, _ = _tools_of(con, config, server)
        for name in sorted(tools):
            tool, text = tools[name], '%s:%s' % (server.name, name)
            if not tool.listed or tool_status(tool)[0] == APPROVED:
                continue
            if tool.blocked_at is not None:
                blocked += 1
            elif parse_id(text).tool != name:
                world.tell('left out: %s begins or ends with a blank, and '
                           'no id can name it' % json.dumps(text))
            else:
                ids.append(text)
    if blocked:
        world.tell('left out: %s that you have blocked'
                   % plural(blocked, 'tool'))
    return ids


def _held_launches(con, config, servers, world):
    """List the servers that wait for `servers approve`, by their launch."""
    rows = []
    for server in servers:
        known, _ = load_known(con, config, server.name)
        switch = load_switches(con, server.name, server.file).get(
            'quarantined')
        if known.quarantined and not switched(server.quarantined,
                                              switch)[0]:
            rows.append({'server': server.name, 'why': known.quarantined,
                         'approve': command_line(
                             world.how, 'servers approve', server.name)})
    return rows


def _review_tool(world, store, config, name, place):
    """Show one tool until it is decided on: what was done."""
    is_outdated = False
    while True:
        with store.read() as con:
            server, tool, _ = _find_tool(con, config, name, world)
            diff = _diff(con, server, tool, world.how)
        is_settled = not tool.listed or diff['status'] == APPROVED
        if is_outdated:
            world.tell('%s changed while it was shown%s' % (
                name, ' and is not listed now; nothing was approved'
                if not tool.listed else '; what is listed now is approved'
                if is_settled else ' and is not approved; this is what is '
                'listed now:'))
        if is_settled:
            return 'settled meanwhile'
        answer = world.ask(
            '\n-- %s --\n%s' % (place, review_text(diff, 'What about')),
            REVIEW_CHOICES[0 if diff['token'] else 1:])
        if answer == 'skip':
            return 'skipped'
        if answer == 'quit':
            return answer
        try:
            with store.write() as con:
                if answer == 'block':
                    _write_blocks(con, world, config, [name], 'block')
                    return 'blocked'
                _write_approvals(con, world, config, {name: diff['token']})
                return 'approved'
        except ReviewOutdated:
            is_outdated = True


def cmd_tools_review(world, options):
    """Walk through all that is pending or changed, at a terminal.

    Returns {'tools': [{'id', 'result'}], 'servers': [...]}: each decision
    is written, with a record, before the next tool is shown.
    """
    config = load_config(world, True)
    refuse_lock_mode(config, world.how)
    servers, rows = _selected(config, [name.strip()
                                       for name in options.ids]), []
    with Store(world.home, world) as store:
        with store.read() as con:
            ids = _awaiting(con, config, servers, world)
            held = _held_launches(con, config, servers, world)
        for n, name in enumerate(ids):
            result = _review_tool(world, store, config, name,
                                  '%d of %d' % (n + 1, len(ids)))
            if result == 'quit':
                rows += [{'id': left, 'result': 'not looked at'}
                         for left in ids[n:]]
                break
            rows.append({'id': name, 'result': result})
    return {'tools': rows, 'servers': held}


def cmd_tools_block(world, options):
    """Block tools by name, for every launch: rows of id and result."""
    return _cmd_block(world, options, 'block')


def cmd_tools_unblock(world, options):
    """Take blocks back: rows of id and result."""
    return _cmd_block(world, options, 'unblock')


def cmd_tools_explain(world, options):
    """Run every gate for one id: rows of {'gate', 'result', 'fact'}."""
    _one_id(options)
    config = load_config(world)
    question = _question(world, config, options)
    with Store(world.home, world) as store, store.read() as con:
        case = load_case(open_snapshot(con, config), question,
                         question.refs[0])
        return [{'gate': gate, 'result': result, 'fact': fact}
                for gate, result, fact in explain(case)]


# -- servers ------------------------------------------------------------------

SERVER_STATES = ('ready', 'pending_auth', 'error', 'stale', 'initializing',
                 'never_seen', 'disabled', 'quarantined')


def server_state(known, settings, now):
    """Say in one of SERVER_STATES what is known of a server."""
    if known.disabled or known.quarantined:
        return 'disabled' if known.disabled else 'quarantined'
    found = connection_state(Case(None, known, None, Question(
        (), None, (), now, settings, '', '')))
    if found.cause in ('never_seen', 'stale'):
        return found.cause
    return {'': 'ready', 'oauth_required': 'pending_auth',
            'server_initializing': 'initializing'}.get(found.reason, 'error')


def _server_row(con, config, server, now):
    known, row_id = load_known(con, config, server.name)
    link = known.connection
    tools = _tools_of(con, config, server)[0].values()
    held = [tool_status(tool)[0] for tool in tools if tool.listed]
    is_seen = link is not None and bool(link.state)
    return {
        'server': server.name,
        'state': server_state(known, config.settings, now),
        'cause': (link.cause or None) if is_seen else None,
        'tools': len(held), 'pending': held.count(PENDING),
        'changed': held.count(CHANGED),
        'observed_at': format_time(link.observed_at) if is_seen else None,
        'transport': server.transport, 'file': server.file}


def cmd_servers_list(world, options):
    """List the configured servers with what is known of each."""
    config = load_config(world, True)
    for note in all_servers(config)[1]:
        world.tell('warning: ' + note)
    with Store(world.home, world) as store, store.read() as con:
        return [_server_row(con, config, server, world.now())
                for server in _selected(config, options.ids)]


def _one_server(world, options):
    config = load_config(world, True)
    if len(options.ids) != 1:
        raise UsageError('give exactly one server name')
    return config, known_server(config, options.ids[0].strip())


def _next_step(world, row):
    """Name the command that a server's state calls for, or None."""
    waits = row[PENDING] or row[CHANGED]
    words = {'disabled': 'servers enable', 'quarantined': 'servers approve',
             'ready': 'tools review' if waits else None}.get(
                 row['state'], 'sync')
    if words == 'servers approve' and row['quarantined_by'] == 'launch':
        words += ' --expect=' + row['launch_digest']
    return words and command_line(world.how, words, row['server'])


def cmd_servers_show(world, options):
    """Show one server: who decides, its launch, the last look at it."""
    config, server = _one_server(world, options)
    with Store(world.home, world) as store, store.read() as con:
        row = _server_row(con, config, server, world.now())
        known, _ = load_known(con, config, server.name)
        switches = load_switches(con, server.name, server.file)
        launches = [launch.digest
                    for launch in load_launches(con, server.name)]
        if config.lock:
            launches = config.lock.launches.get(server.name, ())[:1]
        link = known.connection
        notes = load_notes(con, server.name, seen_key(server))[1]
        scope = load_scope(con, server.name, seen_key(server))
    for key in ('enabled', 'quarantined'):
        value, by_switch = switched(getattr(server, key), switches.get(key))
        row[key] = value
        row[key + '_by'] = 'switch' if by_switch else 'config'
    if known.quarantined and not row['quarantined']:
        row['quarantined'], row['quarantined_by'] = True, 'launch'
    row['why'] = known.disabled or known.quarantined or None
    row['launch'] = launch_text(server)
    row['launch_digest'] = known.launch
    row['launch_known'] = known.launch in launches
    row['trust_mode'] = server.trust_mode
    limit = max_age_of(server, config.settings, link.ttl if link else 0)
    row['max_age'] = format_duration(limit) if limit else '0 (never stale)'
    for key in ('detail', 'protocol', 'era', 'stderr'):
        row[key] = (getattr(link, key) or None) if link else None
    for key in ('since', 'listed_at', 'expires_at'):
        at = getattr(link, key) if link else None
        row[key] = format_time(at) if at is not None else None
    row['ttl'] = format_duration(link.ttl) if link and link.ttl else None
    row['cache_scope'] = scope if link and link.listed_at is not None and (
        scope) else None
    row['refused'] = link.refused if link else {}
    row['next'] = _next_step(world, row)
    row['warnings'] = list(dict.fromkeys(server.warnings + notes))
    return row


def _record_server(con, world, server, action, **more):
    append_record(con, Record('server', 'cli', world.now(), '', 'operator',
                              'success', dict(more, action=action,
                                              server=server.name)))


def _set_switch(world, options, key, value, action):
    """Turn a switch of one server; the config file is never touched."""
    config, server = _one_server(world, options)
    over = getattr(server, key)
    with Store(world.home, world) as store, store.write() as con:
        switch = Switch(value, over, world.now()) if over != value else None
        save_switch(con, server.name, server.file, key, switch)
        _record_server(con, world, server, action)
    return {'server': server.name, 'result': action}


def cmd_servers_enable(world, options):
    """Switch a server on, whatever the config says now."""
    return _set_switch(world, options, 'enabled', True, 'enabled')


def cmd_servers_disable(world, options):
    """Switch a server off, whatever the config says now."""
    return _set_switch(world, options, 'enabled', False, 'disabled')


def cmd_servers_quarantine(world, options):
    """Put a server into quarantine: nothing of it is ready, no looks."""
    return _set_switch(world, options, 'quarantined', True, 'quarantined')


def _approve_launch(con, world, server, config):
    """Make the configured launch known: how many approvals it carries."""
    name, digest, now = server.name, launch_digest(server), world.now()
    launches = load_launches(con, name)
    is_new = not launches and config.settings['quarantine_new_servers']
    if not is_new and not launch_fact(server, launches, None):
        return 0
    link, carried = load_link(con, name, seen_key(server))[2], 0
    if launches:
        known = {row.digest for row in launches}
        old = link.launch if link and link.launch in known else (
            launches[-1].digest)
        carried = copy_approvals(con, name, old, digest, now)
    save_launch(con, name, Launch(digest, launch_text(server), 'approved',
                                  now, carried > 0))
    return carried


def _launch_job(config, server, options):
    """Read the lockfile that a launch is approved in, None without one."""
    if options.lock == '':
        raise UsageError('--lock is empty')
    if options.lock is not None:
        lock = read_lock(options.lock)
        if server.name not in lock.launches:
            raise UsageError('no tool of server %s is in the lockfile %s' % (
                json.dumps(server.name), lock.path))
        return _lock_job(lock.path, options)
    return _lock_job(config.lock.path, options) if config.lock else None


def cmd_servers_approve(world, options):
    """Trust a server's launch as configured, and lift a quarantine.

    A launch other than the known ones is shown beside the old one first,
    and the approvals of the launch last used under this name by this file
    are carried over to it (contract 10). A lockfile that is named, or that
    holds the approvals, gets the launch too; its pins stay, so the next
    sync compares with them.
    """
    config, server = _one_server(world, options)
    digest = launch_digest(server)
    job = _launch_job(config, server, options)
    if options.expect is not None and options.expect.lower() != digest:
        raise UsageError('the launch of %s is not the one reviewed: its '
                         'digest is now %s' % (server.name, digest))
    with Store(world.home, world) as store:
        with store.read() as con:
            launches = known_launches(con, config, server)
            link = load_link(con, server.name, seen_key(server))[2]
        departs = lock_fact(server, digest, job.old) if job else ''
        fact = departs or launch_fact(server, launches,
                                      link.launch if link else None)
        if fact and not (options.yes or options.expect) and not world.ask(
                '%s\nThe new launch has the digest %s.\nApprove it?' % (
                    safe_text(fact), digest)):
            raise UsageError('not approved: server %s' % server.name)
        carried = sum(1 for name in job.old.tools if parse_id(name).server
                      == server.name) if departs else 0

        def write(con):
            switch = (Switch(False, True, world.now())
                      if server.quarantined else None)
            save_switch(con, server.name, server.file, 'quarantined', switch)
            _record_server(con, world, server, 'approved', launch=digest)
            is_locked = config.lock and server.name in config.lock.launches
            done = 0 if is_locked else _approve_launch(con, world, server,
                                                       config)
            return {'action': 'approved', 'server': server.name,
                    'carried': carried or done}
        if departs:
            _replace_lock(world, store, job, job.old._replace(
                launches=dict(job.old.launches, **{
                    server.name: (digest, launch_text(server))})), write)
        else:
            with store.write() as con:
                carried = write(con)['carried']
    world.tell('next: ' + command_line(world.how, 'sync', server.name))
    return dict({'server': server.name, 'result': 'approved',
                 'carried': carried}, **({'lockfile': job.path}
                                         if departs else {}))


# -- agent tokens -------------------------------------------------------------

def hash_token(con, world, text):
    """Digest a token with the key of this state, made at first use."""
    import hmac
    key = load_meta(con, 'token_key')
    if key is None:
        key = world.random(32).hex()
        save_meta(con, 'token_key', key)
    return hmac.new(key.encode('ascii'), text.encode('utf-8', 'replace'),
                    'sha256').hexdigest()


def _token_row(token):
    return {'name': token.name, 'allowed_servers': token.servers,
            'profile_pin': token.profile,
            'expires_at': format_time(token.expires_at)
            if token.expires_at is not None else None,
            'required_tools': [
                dict({'id': name}, **({'pin_hash': pin} if pin else {}))
                for name, pin in token.required]}


def _required(words):
    """Read --require ID[=PIN]: [id, pin] pairs."""
    pairs = []
    for word in words or ():
        name, sign, pin = word.rpartition('=')
        if not sign or parse_pin(pin) is None:
            name, pin = word, ''
        if not parse_id(name).server:
            raise UsageError('--require %s: %s' % (
                json.dumps(word), id_hint(parse_id(name))))
        pairs.append((name.strip(), pin))
    return [[ref.id, ref.pin] for ref in unique_refs(pairs)] if pairs else []


def _token_scope(config, options):
    """Read --servers and --profile: (names or None, profile or None)."""
    if options.servers is None and options.profile is None:
        raise UsageError('give --servers a,b or --profile P, or both')
    if options.profile is not None:
        operator(config, options.profile)
        if not options.profile:
            raise UsageError('--profile is empty')
    if options.servers is None:
        return None, options.profile
    names = [name.strip() for name in options.servers.split(',')
             if name.strip()]
    for name in names:
        if name != '*':
            known_server(config, name)
    return names, options.profile


def _record_token(con, world, name, action):
    append_record(con, Record('token', 'cli', world.now(), '', 'operator',
                              'success', {'action': action, 'token': name}))
    bump_generation(con)


def cmd_token_create(world, options):
    """Make an agent token; its secret is shown this once (contract 5)."""
    if len(options.ids) != 1 or not re.match(r'[A-Za-z0-9_.-]{1,64}\Z',
                                             options.ids[0]):
        raise UsageError('give one name for the token: 1 to 64 of A-Z a-z '
                         '0-9 _ . -')
    if options.ids[0] == 'operator':
        raise UsageError('the name operator is taken: records of the '
                         'operator carry it')
    name, now = options.ids[0], world.now()
    servers, profile = _token_scope(load_config(world), options)
    expires = None
    if options.expires != 'never':
        expires = now + parse_duration(options.expires)
        if expires == now:
            raise UsageError('--expires 0 would be over at once; write never '
                             'for a token without an end')
    token = Token(name, servers, profile, _required(options.require), now,
                  expires)
    secret = 'pfl_agt_' + world.random(32).hex()
    with Store(world.home, world) as store, store.write() as con:
        if any(other.name == name for other in load_tokens(con)):
            raise UsageError('a token named %s exists; revoke it first'
                             % name)
        save_token(con, token, hash_token(con, world, secret))
        _record_token(con, world, name, 'create')
    world.tell('the token is shown this once; send it as the header '
               'X-API-Key, or set PREFLIGHT_API_KEY to it')
    row = _token_row(token)
    return dict([('name', row.pop('name')), ('token', secret)], **row)


def cmd_token_list(world, options):
    """List the agent tokens, without their secrets."""
    with Store(world.home, world) as store, store.read() as con:
        return [dict(_token_row(token), created_at=format_time(token.at))
                for token in load_tokens(con)]


def cmd_token_revoke(world, options):
    """Revoke an agent token, from the very next request on."""
    if len(options.ids) != 1:
        raise UsageError('give exactly one token name')
    with Store(world.home, world) as store, store.write() as con:
        if not delete_token(con, options.ids[0]):
            raise UsageError('no token is named %s'
                             % json.dumps(options.ids[0]))
        _record_token(con, world, options.ids[0], 'revoke')
    return {'name': options.ids[0], 'result': 'revoked'}


# -- contracts ----------------------------------------------------------------

def _contract_name(words):
    """Read the one word that names a contract; raises UsageError."""
    if len(words) != 1 or not re.match(CONTRACT_NAME, words[0]):
        raise UsageError('give one name for the contract: 1 to 64 of A-Z a-z '
                         '0-9 . _ -')
    return words[0]


def _find_contract(con, name):
    """Load one Contract by its name; raises UsageError with the nearest."""
    rows = {row[0]: row for row in load_contracts(con)}
    if name in rows:
        return read_contract(*rows[name])
    near = rank_nearest(name, rows)
    raise UsageError('no contract is named %s%s' % (
        json.dumps(name), '; did you mean %s?' % ', '.join(near)
        if near else ''), 'See `contract list`.')


def _new_contract(world, options):
    """Read what `contract add` is told: a Contract, nothing of it judged."""
    name, ids, lock = _contract_name(options.ids[:1]), options.ids[1:], None
    if (options.lock is None) == (not ids) or options.lock == '':
        raise UsageError('give the tool ids that it needs, or --lock FILE')
    if options.lock is not None:
        if options.pin:
            raise UsageError('--pin goes with tool ids: a lockfile has its '
                             'own')
        lock = read_lock(options.lock)
        lock = lock._replace(tools={name: tool._replace(text='') for
                                    name, tool in lock.tools.items()})
    refs = lock_refs(lock) if lock else unique_refs(
        pin_pairs(ids, options.pin))
    for ref in refs:
        if not ref.server:
            raise UsageError('%s: %s' % (json.dumps(ref.id), id_hint(ref)))
        if ref.pin and parse_pin(ref.pin) is None:
            raise UsageError('the pin of %s is not sha256/v<N>:<64 hex '
                             'digits>' % json.dumps(ref.id))
    return Contract(
        name, world.now(), sorted([ref.id, ref.pin] for ref in refs),
        render_lock(lock) if lock else '',
        os.path.abspath(options.lock) if lock else '',
        sorted(set(map(os.path.realpath, config_paths(world)))), {}, {})


def _inherit(new, old, faults):
    """Give a contract added anew what is known of it: no news of its own.

    The command tells what is wrong now; what a --notify has yet to deliver
    of a need that stays is kept.
    """
    ids = {need[0] for need in new.needs}
    kept = {need[0] for need in old.needs} & ids if old else set()
    held = contract_moves({name: fault for name, fault in (
        old.held if old else {}).items() if name in ids}, faults)[1]
    told = {name: fault for name, fault in held.items() if name not in kept}
    told.update((name, fault) for name, fault in (
        old.told if old else {}).items() if name in kept)
    return new._replace(held=held, told=told)


def _tell_not_ready(world, name, answers):
    """Note which needs of a contract are not there now; none is refused."""
    rows = [answer for answer in answers if answer.reason]
    for answer in rows[:MAX_SUGGESTED]:
        near = ', '.join(answer.did_you_mean or ())
        world.tell('note: %s is not ready now: %s: %s%s %s' % (
            answer.id, answer.reason, answer.detail,
            ' Did you mean %s?' % near if near else '', answer.remediation))
    if len(rows) > MAX_SUGGESTED:
        world.tell('note: %d more are not ready; see: %s' % (
            len(rows) - MAX_SUGGESTED,
            command_line(world.how, 'contract check', name)))


def _broken(contract):
    return {name: fault['event']
            for name, fault in sorted(contract.held.items())}


def cmd_contract_add(world, options):
    """Register what an automation needs: a dict with the result.

    The same again is unchanged; anything else under the name replaces what
    was there. What is not ready is told, and registered all the same.
    """
    new, config = _new_contract(world, options), load_config(world, True)
    row = {'contract': new.name, 'result': 'added', 'tools': len(new.needs)}
    with Store(world.home, world) as store, store.write() as con:
        old = next((read_contract(*held) for held in load_contracts(con)
                    if held[0] == new.name), None)
        snap, question = open_snapshot(con, config), contract_question(
            world, config, new, new.needs)
        answers = judge_all(snap, question, '').answers
        if old:
            row['result'] = 'replaced'
            before, after = dict(old.needs), dict(new.needs)
            row.update(new=sorted(set(after) - set(before)),
                       gone=sorted(set(before) - set(after)),
                       other_pin=[name for name in sorted(after) if before.get(
                           name, after[name]) != after[name]])
        if old and (old.needs, old.lock, old.files) == (
                new.needs, new.lock, new.files):
            row = dict(list(row.items())[:3], result='unchanged')
        else:
            new = _inherit(new, old, contract_faults(snap, question))
            if new.held:
                row['broken'] = _broken(new)
            save_contract(con, new.name, new.at, contract_text(new))
            append_record(con, Record(
                'contract', 'cli', new.at, '', 'operator', 'success', {
                    'action': row['result'], 'contract': new.name,
                    'tools': [need[0] for need in new.needs]}))
    _tell_not_ready(world, new.name, answers)
    if row.get('broken'):
        world.tell('note: sync and its --notify tell what changes from now '
                   'on, not what is broken already')
    return row


def cmd_contract_list(world, options):
    """List the contracts, and what syncs have found to be wrong."""
    with Store(world.home, world) as store, store.read() as con:
        found = [read_contract(*row) for row in load_contracts(con)]
    return [{'contract': contract.name, 'tools': len(contract.needs),
             'lock': contract.path or None, 'broken': _broken(contract),
             'registered_at': format_time(contract.at),
             'configs': contract.files,
             'needs': [dict({'id': name}, **({'pin': pin} if pin else {}))
                       for name, pin in contract.needs]}
            for contract in found]


def cmd_contract_remove(world, options):
    """Forget a contract."""
    name = _contract_name(options.ids)
    with Store(world.home, world) as store, store.write() as con:
        _find_contract(con, name)
        delete_contract(con, name)
        append_record(con, Record(
            'contract', 'cli', world.now(), '', 'operator', 'success',
            {'action': 'removed', 'contract': name}))
    return {'contract': name, 'result': 'removed'}


def cmd_contract_check(world, options):
    """Check what a contract needs, as `tools preflight` would: a Report."""
    name, config = _contract_name(options.ids), load_config(world)
    with Store(world.home, world) as store, store.read() as con:
        contract = _find_contract(con, name)
    lock = contract_question(world, config, contract, contract.needs).lock
    options.lock, options.require_pins = None, False
    options.ids = [need[0] for need in contract.needs]
    options.pin = ['%s=%s' % (need[0], need[1]) for need in contract.needs
                   if need[1]]
    report = _run_check(world, config, _question(
        world, config, options, lock), options, name)
    if lock and report.verdict == BLOCKED:
        world.tell('note: contract %s is the lockfile as it was when it was '
                   'added; once that is renewed, run: %s' % (
                       name, command_line(world.how, 'contract add --lock='
                                          + shell_word(contract.path), name)))
    return report


# -- the audit log ------------------------------------------------------------

RECORD_TYPES = ('preflight', 'sync', 'approval', 'server', 'token', 'health',
                'lock', 'contract', 'prune')


def _filters_of(world, options):
    def instant(text):
        if text is not None and re.match('[0-9.]+[a-z]', text):
            return world.now() - parse_duration(text)
        return parse_time(text) if text is not None else None
    if options.type not in (None,) + RECORD_TYPES:
        raise UsageError('the type of a record is one of ' + ', '.join(
            RECORD_TYPES))
    if options.status not in (None, 'success', 'blocked'):
        raise UsageError('the status of a record is success or blocked')
    return {'type': options.type, 'status': options.status,
            'actor': getattr(options, 'actor', None),
            'request_id': options.request_id,
            'since': instant(options.since), 'until': instant(options.until)}


def _whole_number(text, name, low, high):
    if not re.match(r'[0-9]{1,9}\Z', text) or not low <= int(text) <= high:
        raise UsageError('%s takes a whole number from %d to %d' % (
            name, low, high))
    return int(text)


def cmd_activity_list(world, options):
    """List audit records, newest first (contract 8)."""
    limit = _whole_number(options.limit, '--limit', 1, 1000)
    offset = _whole_number(options.offset, '--offset', 0, 10 ** 9)
    filters = _filters_of(world, options)
    with Store(world.home, world) as store, store.read() as con:
        total, bodies = find_records(con, filters, limit, offset)
    return {'activities': [json.loads(body) for body in bodies],
            'total': total, 'limit': limit, 'offset': offset}


def cmd_activity_show(world, options):
    """Show one audit record by its id."""
    if len(options.ids) != 1:
        raise UsageError('give exactly one record id')
    found = re.match(r'[0-9a-f]{12}-([0-9a-f]{8})\Z', options.ids[0])
    body = None
    if found:
        with Store(world.home, world) as store, store.read() as con:
            body = load_record(con, int(found.group(1), 16))
    activity = json.loads(body) if body else {}
    if activity.get('id') != options.ids[0]:
        raise UsageError('no record has the id %s'
                         % json.dumps(options.ids[0]))
    return {'activity': activity}


def cmd_activity_verify(world, options):
    """Check the chain of records (contract 8)."""
    expected = options.expect_head
    if expected is not None and not re.match(r'[0-9a-f]{64}\Z', expected):
        raise UsageError('--expect-head takes the 64 hex digits that '
                         '`activity head` printed')
    with Store(world.home, world) as store, store.read() as con:
        return verify_chain(con, expected or '')


def cmd_activity_head(world, options):
    """Give the hash of the newest record, to note it elsewhere."""
    with Store(world.home, world) as store, store.read() as con:
        seq, head = load_last_record(con)
    return {'records': seq, 'head': head}


def cmd_activity_prune(world, options):
    """Remove records older than the retention (or --older-than)."""
    if options.older_than is not None:
        keep = parse_duration(options.older_than)
    else:
        keep = load_config(world, True).settings['activity_retention']
        if not keep:
            raise UsageError('activity_retention is 0, which keeps records '
                             'for ever; give --older-than')
    with Store(world.home, world) as store:
        return {'removed': prune_records(store, world.now() - keep,
                                         'operator')}


# -- state export and import: what one host saw, for another ------------------

INSTANTS = ('at', 'since', 'observed_at', 'listed_at', 'expires_at',
            'first_seen', 'last_seen')


def _times(row):
    """Write the instants of a row as a snapshot has them."""
    return {key: format_time(value) if key in INSTANTS and value is not None
            else value for key, value in row.items()}


def _instants(row):
    """Read back what _times wrote."""
    return {key: parse_time(value) if key in INSTANTS and value is not None
            else value for key, value in row.items()}


def _carried_tools(tools):
    """Write Tools for a snapshot.

    One whose definition could not be hashed anew has a flaw for its hash.
    """
    return [_times({
        'name': tool.name, 'listed': tool.listed,
        'hash': None if tool.flaw else tool.hash, 'hints': tool.hints,
        'flaw': tool.flaw, 'first_seen': tool.first_seen,
        'last_seen': tool.last_seen}) for _, tool in sorted(tools.items())]


SEEN_FIELDS = ('state', 'cause', 'detail', 'since', 'observed_at',
               'listed_at', 'protocol', 'era', 'ttl', 'refused',
               'expires_at')


def _carried_server(con, config, server):
    """Write one server for a snapshot, None when it was not looked at."""
    name = server.name
    known, row_id = load_known(con, config, name)
    link = known.connection
    if link is None or not link.state:
        return None
    launch = next((row for row in load_launches(con, name)
                   if row.digest == known.launch), None)
    seen = {key: getattr(link, key) for key in SEEN_FIELDS}
    seen.update(cause=link.cause or '', ttl=link.ttl or 0,
                detail=(link.detail or '').split(LAST_WORDS)[0])
    switches = load_switches(con, name, server.file)
    return {
        'launch': {'digest': known.launch,
                   'text': key_text(launch_text(server)),
                   'known': launch is not None,
                   'baselined': bool(launch and launch.baselined)},
        'seen': _times(seen),
        'tools': _carried_tools(load_tools(con, row_id, name,
                                           known.launch)),
        'approved': [_times({'name': tool, 'hash': row.hash,
                             'hints': row.hints, 'at': row.at})
                     for tool, row in sorted(load_approved(
                         con, name, known.launch).items())
                     if row.version == HASH_VERSION],
        'blocks': {tool: format_time(at) for tool, at in sorted(
            load_blocks(con, name).items())},
        'switches': {key: _times(switch._asdict())
                     for key, switch in sorted(switches.items())
                     if switch.over == getattr(server, key)}}


def _snapshot(world, config, servers, is_named):
    """Make a snapshot of what is known of some servers, at one instant.

    One that was never looked at is left out, unless it was asked for.
    """
    table = {'snapshot_version': SNAPSHOT_VERSION,
             'hash_version': HASH_VERSION,
             'exported_at': format_time(world.now()), 'servers': {},
             'definitions': {}}
    with Store(world.home, world) as store, store.read() as con:
        for server in servers:
            row = _carried_server(con, config, server)
            if row is None:
                why = 'server %s was never looked at under its launch' % (
                    json.dumps(server.name))
                if is_named:
                    is_held = load_known(con, config, server.name)[
                        0].quarantined
                    raise UsageError(why, 'Run: ' + command_line(
                        world.how, 'servers approve' if is_held else 'sync',
                        server.name))
                world.tell('left out: ' + why)
                continue
            table['servers'][server.name] = row
            for digest in {item['hash'] for item in row['tools']
                           + row['approved']} - {None}:
                text = load_definition(con, digest)
                if not text:
                    raise StoreError('the state database %s is damaged: a '
                                     'definition of server %s is not in it'
                                     % (store.path, json.dumps(server.name)))
                table['definitions'][digest] = json.loads(text)
    if not table['servers']:
        raise UsageError('there is nothing to export',
                         'Run: ' + command_line(world.how, 'sync'))
    table['sha256'] = snapshot_digest(table)
    return table


def cmd_state_export(world, options):
    """Write what is known of servers for another host: the snapshot.

    With --file it is written there, and what was written is told.
    """
    form = options.output or world.env.get('PREFLIGHT_OUTPUT')
    if form == 'yaml' and options.file is None:
        raise UsageError('a snapshot is JSON; leave the format yaml out, or '
                         'give --file')
    names = None
    if options.servers is not None:
        names = [name.strip() for name in options.servers.split(',')
                 if name.strip()]
    if names == [] or options.file == '':
        raise UsageError('--servers and --file must not be empty')
    config = load_config(world)
    table = _snapshot(world, config, _selected(config, names), bool(names))
    if options.file is None:
        return table
    replace_file(options.file, render_json(table).encode('ascii'),
                 mode=0o600)
    return {'file': options.file, 'servers': sorted(table['servers']),
            'tools': sum(tool['listed'] for row in table['servers'].values()
                         for tool in row['tools']),
            'exported_at': table['exported_at'], 'sha256': table['sha256']}


SWITCH_WORDS = {('enabled', True): 'enabled', ('enabled', False): 'disabled',
                ('quarantined', True): 'quarantined',
                ('quarantined', False): 'approved'}


class Import:
    """Takes servers over from a snapshot, inside one transaction."""

    def __init__(self, con, world, config, table, is_approving):
        self.con, self.world, self.config = con, world, config
        self.table, self.is_approving = table, is_approving
        self.now = world.now()
        self.is_changing, self.lines = False, []    # lines to tell
        self.others = []        # (Server, remedy) of another launch here

    def take(self, name):
        """Take one server over: a row that says what happened."""
        server, why = look_up(self.config, name)
        row = dict.fromkeys(('server', 'result', 'tools', 'approved',
                             'blocked', 'observed_at', 'stale_at', 'detail'))
        row.update(server=name, result='skipped', tools=0, approved=[],
                   blocked=[])
        if server is None:
            return dict(row, detail=why or 'no such server is configured '
                        'here')
        given = self.table['servers'][name]
        row['blocked'] = self._block(server, given)
        is_same = launch_digest(server) == given['launch']['digest']
        notes = self._switch(server, given, is_same)
        if not is_same:
            self.others.append((server, command_line(
                self.world.how, 'servers approve' if self._held(name)
                else 'sync', name)))
            there, here = given['launch']['text'], launch_text(server)
            notes.insert(0, 'another launch: there %s, here %s%s' % (
                there, here, ' (only a masked part differs)'
                if there == key_text(here) else ''))
        else:
            row['result'], why = self._see(server, given)
            notes.append(why)
            if self.is_approving:
                row['approved'], why = self._approve(server, given)
                notes.append(why)
            self._tell_state(server, row, notes)
            if self._held(name):
                notes.append('quarantined here: ' + self._held(name))
        self.lines += watch_contracts(self.con, self.world, self.config,
                                      name)
        return dict(row, detail='; '.join(filter(None, notes)) or None)

    def _held(self, name):
        return load_known(self.con, self.config, name)[0].quarantined

    def _tell_state(self, server, row, notes):
        """Add what is now known of the server, and until when."""
        found = _server_row(self.con, self.config, server, self.now)
        link = load_link(self.con, server.name, seen_key(server))[2]
        if link is None:
            return
        limit = max_age_of(server, self.config.settings, link.ttl)
        row.update(tools=found['tools'], observed_at=found['observed_at'])
        if limit and link.state == 'ready':
            row['stale_at'] = format_time(link.observed_at + limit)
        words = ['%d %s' % (found[key], key) for key in (PENDING, CHANGED)
                 if found[key]]
        if words:
            notes.append('awaiting approval: ' + ', '.join(words))

    def _record(self, kind, action, **more):
        """Leave the record of one thing that was taken over."""
        self.is_changing = True
        append_record(self.con, Record(
            kind, 'cli', self.now, '', 'operator', 'success', dict(
                more, action=action, snapshot=self.table['sha256'])))

    def _record_tools(self, action, name, tools):
        """Leave the record of what happened to tools: their ids."""
        ids = ['%s:%s' % (name, tool) for tool in tools]
        if ids:
            self._record('approval', action, tools=ids)
        return ids

    def _block(self, server, given):
        """Take over blocks: ids of those that were not blocked here."""
        before = load_blocks(self.con, server.name)
        fresh = [tool for tool in given['blocks'] if tool not in before]
        for tool in fresh:
            save_block(self.con, server.name, tool,
                       parse_time(given['blocks'][tool]))
        return self._record_tools('block', server.name, fresh)

    def _switch(self, server, given, is_same):
        """Take over switches, in words; only approvals may loosen."""
        mine = load_switches(self.con, server.name, server.file)
        done = []
        for key, raw in given['switches'].items():
            switch = Switch(**_instants(raw))
            is_tight = switch.value is (key == 'quarantined')
            is_older = key in mine and mine[key].at >= switch.at
            may_loosen = (self.is_approving and is_same
                          and switch.at <= self.now + FUTURE_MS)
            if is_older or switch.over != getattr(server, key) or not (
                    is_tight or may_loosen):
                continue
            save_switch(self.con, server.name, server.file, key, switch)
            word = SWITCH_WORDS[key, switch.value]
            self._record('server', word, server=server.name)
            done.append(word + ' as there')
        return done

    def _see(self, server, given):
        """Take over what was seen: (result, why not or '')."""
        seen, key = _instants(given['seen']), seen_key(server)
        if seen['observed_at'] > self.now + FUTURE_MS:
            return 'skipped', 'seen in the future (%s): a clock is wrong' % (
                given['seen']['observed_at'])
        link = load_link(self.con, server.name, key)[2]
        if link and (link.observed_at or 0) >= seen['observed_at']:
            return 'kept', 'what was seen here is as new or newer (%s)' % (
                ': '.join(filter(None, (link.state, link.cause))))
        fresh = Connection(*[None] * len(Connection._fields))._replace(
            launch=given['launch']['digest'], stderr='', **seen)
        save_carried(self.con, server.name, key, fresh, [
            dict(_instants(tool), hash=tool['hash'] or '')
            for tool in given['tools']])
        self._record('server', 'imported', server=server.name)
        return 'imported', ''

    def _approve(self, server, given):
        """Take over approvals: (ids, why there are none or '')."""
        con, name, launch = self.con, server.name, given['launch']
        digest, launches = launch['digest'], load_launches(con, name)
        if load_known(con, self.config, name)[0].lock:
            return [], 'no approvals: here they stand in the lockfile'
        if launches and all(known.digest != digest for known in launches):
            return [], ('no approvals, for another launch is known here: '
                        'servers approve, then import again')
        if (launch['known'] or given['approved']) and not launches:
            save_launch(con, name, Launch(
                digest, launch_text(server), 'imported', self.now,
                launch['baselined'] or bool(given['approved'])))
            self._record('server', 'launch approved', server=name)
        mine, taken = load_approved(con, name, digest), []
        rows = [_instants(row) for row in given['approved']]
        late = sum(row['at'] > self.now + FUTURE_MS for row in rows)
        for row in rows:        # a wrong clock must not outdo a later choice
            tool = row['name']
            if row['at'] <= self.now + FUTURE_MS and (
                    tool not in mine or mine[tool].at < row['at']):
                taken.append(tool)
                save_approvals(con, name, digest, [Definition(
                    tool, row['hash'], '', row['hints'], '')],
                    ('imported', row['at']))
        return self._record_tools('import', name, taken), late and (
            '%s from the future left out: a clock is wrong' % plural(
                late, 'approval')) or ''


def _tell_stale(world, rows):
    """Tell what will be stale, when, and how any age is allowed."""
    found = [row for row in rows if row['stale_at']]
    for row in found:
        is_over = parse_time(row['stale_at']) < world.now()
        world.tell('%s: seen %s, stale %s %s' % (
            row['server'], row['observed_at'], 'since' if is_over
            else 'from', row['stale_at']))
    if found:
        world.tell('To accept them at any age, put this into a file, say '
                   'allow.json: ' + json.dumps({'mcpServers': {
                       row['server']: {'max_age': '0'} for row in found}}))
        paths = [os.path.abspath(path) for path in config_paths(world)]
        world.tell('Then run every command with: ' + ' '.join(
            '--config ' + shell_word(path) for path in paths + [
                'allow.json']))


def _launch_remedy(others):
    """Say how to take over what was seen under another launch."""
    return ('For %s: the entry in %s must start what is started there. Make '
            'the two alike, sync there and export again; or look from here: '
            '%s' % (
                ', '.join(server.name for server, _ in others),
                ', '.join(sorted({server.file for server, _ in others})),
                '; '.join(remedy for _, remedy in others)))


def cmd_state_import(world, options):
    """Take a snapshot over, in one transaction: what happened to whom.

    A server's look is taken over only under the launch it was made under,
    and never in the place of a newer one; raises UsageError, and changes
    nothing, for a snapshot that is damaged or has nothing for this host.
    """
    if len(options.ids) != 1:
        raise UsageError('give exactly one snapshot file')
    path, config = options.ids[0], load_config(world)
    try:
        with open(path, 'rb') as file:
            data = file.read(MAX_SNAPSHOT_BYTES + 1)
    except OSError as exc:
        raise UsageError('cannot read the snapshot %s: %s' % (
            path, os_reason(exc))) from exc
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise UsageError('snapshot %s is larger than %d bytes' % (
            path, MAX_SNAPSHOT_BYTES))
    table = read_snapshot(path, data)
    with Store(world.home, world) as store, store.write() as con:
        carry = Import(con, world, config, table, options.approvals)
        save_definitions(con, {digest: canonical(text) for digest, text
                               in table['definitions'].items()})
        rows = [carry.take(name) for name in sorted(table['servers'])]
        if not carry.is_changing and all(row['result'] == 'skipped'
                                         for row in rows):
            raise UsageError(
                'snapshot %s has nothing for this host: %s' % (
                    path, '; '.join('%s: %s' % (row['server'], row['detail'])
                                    for row in rows)),
                _launch_remedy(carry.others) if carry.others else
                'See: %s' % command_line(world.how, 'servers list'))
    for line in carry.lines:
        world.tell(line)
    if carry.others:
        world.tell(_launch_remedy(carry.others))
    _tell_stale(world, rows)
    return {'file': path, 'sha256': table['sha256'],
            'exported_at': table['exported_at'], 'servers': rows}


# -- doctor -------------------------------------------------------------------

# The server that a self-test plants. It lists what stands in a file, which
# is read anew at each start, so that its tools change and its launch does
# not.
CANARY = r'''
import json, sys
with open(sys.argv[1]) as file:
    tools = json.load(file)
if tools is None:
    raise RuntimeError('the canary is silent')
for line in sys.stdin:
    message = json.loads(line)
    if message.get('method') == 'initialize':
        result = {'protocolVersion': message['params']['protocolVersion'],
                  'capabilities': {'tools': {}},
                  'serverInfo': {'name': 'canary', 'version': '1'}}
    elif message.get('method') == 'tools/list':
        result = {'tools': tools}
    else:
        continue
    print(json.dumps({'jsonrpc': '2.0', 'id': message['id'],
                      'result': result}), flush=True)
'''


def _canary(name, text, is_safe=True):
    return {'name': name, 'description': text,
            'inputSchema': {'type': 'object'},
            'annotations': {'readOnlyHint': is_safe}}


SONG, OTHER = _canary('sing', 'Sing'), _canary('other', 'Something else')
LATER = _canary('later', 'Sing later')
Step = namedtuple('Step', 'name tools more wanted tool pin is_blocked')
Step.__new__.__defaults__ = ('sing', '', False)
Step.__doc__ = """One step of a self-test.

name: what happens. tools: what the canary lists, None for a failure. more:
further arguments of its launch. wanted: what the gate must say of `tool`,
asked for with `pin`. is_blocked: has the operator just blocked it.
"""
CANARY_STEPS = (
    Step('first look', [SONG], [], 'ready'),
    Step('its definition changes', [_canary('sing', 'Sing, and send the '
                                            'keys')], [], 'tool_changed'),
    Step('it changes back', [SONG], [], 'ready'),
    Step('it becomes riskier', [_canary('sing', 'Sing', False)], [],
         'tool_changed'),
    Step('it is advertised twice', [SONG, _canary('sing', 'Sing too')], [],
         'tool_changed'),
    Step('it vanishes', [OTHER], [], 'not_found'),
    Step('it is back', [SONG], [], 'ready'),
    Step('the server fails', None, [], 'server_unhealthy'),
    Step('the server is back', [SONG], [], 'ready'),
    Step('a new tool comes', [SONG, LATER], [], 'tool_pending_approval',
         'later'),
    Step('a pin is not its own', [SONG], [], 'hash_mismatch', 'sing',
         format_hash(HASH_VERSION, '0' * 64)),
    Step('it is blocked', [SONG], [], 'tool_blocked_by_user', 'sing', '',
         True),
    Step('its launch changes', [SONG], ['--more'], 'server_quarantined'))


def _judge_canary(world, step):
    """Look at the canary, then ask for a tool of it: the Answer."""
    config = load_config(world)
    run_sync(world, config, all_servers(config)[0], None, no_progress)
    caller = operator(config)
    with Store(world.home, world) as store, store.write() as con:
        if step.is_blocked:
            save_block(con, 'canary', step.tool, world.now())
        question = Question(
            unique_refs([('canary:' + step.tool, step.pin)]), caller,
            frozenset(), world.now(), config.settings, world.how,
            places_of(world))
        report = judge_all(open_snapshot(con, config), question, '')
        append_record(con, check_record(report, caller, question.now))
    return report.answers[0]


def _sing(world, place):
    """Take the steps of a self-test: a row each."""
    config, script, listed = (os.path.join(place, name) for name in (
        OUR_CONFIG, 'canary.py', 'tools.json'))
    world = world._replace(
        home=os.path.join(place, 'state'), configs=(config,), dialect='',
        workspace='', tell=lambda line: None)
    replace_file(script, CANARY.encode('ascii'))
    for step in CANARY_STEPS:
        replace_file(listed, json.dumps(step.tools).encode('ascii'))
        replace_file(config, json.dumps({'mcpServers': {'canary': {
            'command': sys.executable, 'args': ['-I', script, listed]
            + step.more}}}).encode('ascii'))
        answer, wanted = _judge_canary(world, step), step.wanted
        seen = answer.reason or answer.status
        yield step.name, seen == wanted, seen + (
            '' if seen == wanted else ', which should be ' + wanted) + (
            ': ' + answer.detail if answer.detail else ''), (
            '' if seen == wanted else 'The gate did not do its work here: '
            'do not rely on it, and report this.')
    with Store(world.home, world) as store, store.read() as con:
        found = verify_chain(con)
    yield 'its records', found['ok'], '%s, %s' % (
        plural(found['records'], 'record'), '; '.join(found['problems'])
        or 'the chain is intact'), '' if found['ok'] else 'Report this.'


def _self_test(world):
    """Plant a server, change it, and see what the gate says: rows.

    In a state of its own, which is gone afterwards.
    """
    import shutil
    import tempfile
    place = ''
    try:
        place = tempfile.mkdtemp(prefix='preflight-')
        return list(_sing(world, place))
    except (PreflightError, OSError) as exc:
        return [('self-test', False, str(exc), getattr(exc, 'hint', '')
                 or 'The gate was not seen to close: do not rely on it.')]
    finally:
        if place:
            shutil.rmtree(place, ignore_errors=True)


MAX_NAMED = 20                  # servers that a doctor names one by one


def _doctor_python(world):
    import platform
    yield True, 'Python %s (%s)' % (platform.python_version(),
                                    sys.executable), ''


def _is_anybodys(path):
    """Tell whether everybody may write to a file."""
    import stat
    return os.name != 'nt' and bool(os.stat(path).st_mode & stat.S_IWOTH)


def _doctor_program(world):
    """Look at this file: who can write it decides what every job runs."""
    path = os.path.realpath(__file__)
    is_open = _is_anybodys(path)
    yield not is_open, '%s, version %s%s' % (
        path, VERSION, '; everybody may change it' if is_open else ''), (
        'Run: chmod o-w %s' % shell_word(path) if is_open else '')


def _doctor_sqlite(world):
    version, note = sqlite_version(), ''
    if (3, 7, 0) <= version <= (3, 51, 2):
        note = ' (its fault with checkpoints is met by our lock)'
    yield version >= (3, 8, 3), 'SQLite %s%s' % (
        '.'.join(map(str, version)), note), (
        '' if version >= (3, 8, 3) else 'Use a Python with SQLite 3.8.3 or '
        'newer.')


def _modes(home, files, shown):
    mode = os.stat(home).st_mode & 0o777
    if mode & 0o077:
        yield False, '%s is open to others (mode %04o)' % (home, mode), (
            'Run: chmod 700 %s' % shown)
    wide = [path for path in files if os.path.isfile(path)
            and os.stat(path).st_mode & 0o077]
    if wide:
        yield False, 'open to others: ' + ', '.join(wide), (
            'Run: chmod 600 ' + ' '.join(map(shell_word, wide)))
    shut = [path for path in files if os.path.isfile(path)
            and not os.access(path, os.R_OK | os.W_OK)]
    mine = os.geteuid()
    if shut and all(os.stat(path).st_uid == mine for path in shut):
        yield False, 'may not be written: ' + ', '.join(shut), (
            'Run: chmod 600 ' + ' '.join(map(shell_word, shut)))
    other = [path for path in [home] + files
             if os.lstat(path).st_uid != mine]
    if other:
        yield False, 'user %d owns %s, and this is user %d' % (
            os.lstat(other[0]).st_uid, ', '.join(other), mine), (
            'Run it as the user of the jobs; or, to make it theirs, as '
            'root: chown -R USER %s' % shown)


def _who_may(path):
    """Say who can mend what this user may not use at a path."""
    shown = shell_word(path)
    try:
        owner = os.lstat(path).st_uid
        is_mine = os.name != 'nt' and owner == os.geteuid()
    except OSError:             # so it is not told whose it is
        owner = is_mine = None
    if is_mine:
        return 'Run: chmod %s %s' % (
            '700' if os.path.isdir(path) else '600', shown)
    if owner is None or os.name == 'nt':
        return ('Run it as the user of the jobs, and give that user all '
                'rights to %s.' % shown)
    return ('User %d owns it, and this is user %d: run it as that user; or, '
            'to make it theirs, as root: chown -R USER %s' % (
                owner, os.geteuid(), shown))


def _unusable(home):
    """Say why there can be no state in a directory: (why, remedy), or
    None where there is one, or can be made one."""
    place = home
    while not os.path.lexists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return '%s is no directory' % place, (
            'Move it aside, or pass --home DIR.')
    need = os.W_OK | os.X_OK | (os.R_OK if place == home else 0)
    if os.access(place, need):
        return None
    if place == home:
        return '%s may not be read and written' % home, _who_may(home)
    return '%s cannot be %s %s' % (
        home, 'made: this user may not write to'
        if os.access(place, os.X_OK) else
        'reached: this user may not enter', place), (
        'Pass --home DIR; or, as root: install -d -m 700 -o USER %s'
        % shell_word(home))


def _doctor_home(world):
    """Look at the state directory and our files in it; makes nothing."""
    home, shown = world.home, shell_word(world.home)
    flaw = _unusable(home)
    if flaw or not os.path.isdir(home):
        why, remedy = flaw or (home + ' is not there yet', '')
        yield not flaw, why, remedy
        return
    files = [os.path.join(home, name) for name in sorted(os.listdir(home))
             if re.match(r'preflight\.db|store\.lock\Z|api_key\Z', name)]
    found = list(_modes(home, files, shown)) if os.name != 'nt' else []
    yield from found or [(True, home, '')]


def _doctor_disk(world):
    """Look at the file system that the state is on, or would be."""
    import shutil
    place = world.home
    while not os.path.isdir(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    kind, free = file_system_of(place), shutil.disk_usage(place).free
    text = '%d MB free' % (free >> 20)
    if free < MIN_FREE_BYTES:
        yield False, 'only %s at %s' % (text, place), (
            'Make room there, or pass --home DIR: without its record no '
            'check has a verdict.')
    is_remote = kind in NETWORK_FILE_SYSTEMS
    if is_remote and is_wal(os.path.join(world.home, 'preflight.db')):
        yield False, ('%s is on a network (%s), and the database was made '
                      'on a local disk' % (place, kind)), (
            'Use a local disk: --home DIR.')
    elif free >= MIN_FREE_BYTES:
        yield True, text + (', on %s: it must keep locks' % kind
                            if is_remote else ''), ''


def _doctor_config(world):
    """Read the config files, every entry of them."""
    check = command_line(world.how, 'config check')
    try:
        skipped = all_servers(load_config(world))[1]
    except ConfigError as exc:
        yield False, str(exc), exc.hint or 'Mend it, then run: ' + check
        return
    for text in skipped:
        yield False, text, 'Mend it, then run: ' + check
    found = cmd_config_check(world, None)
    if not found['servers'] and not skipped:
        yield False, 'no server is configured', (
            'Add one to ' + ', '.join(map(shell_word, config_paths(world))))
    elif not skipped:
        notes = len(found['warnings'])
        yield True, plural(found['servers'], 'server') + (
            ', ' + plural(notes, 'warning') if notes else ''), (
            'See: ' + check if notes else '')


def _doctor_database(world):
    """Open the database, which brings one of an earlier version up."""
    path = os.path.join(world.home, 'preflight.db')
    if _unusable(world.home):
        return                  # the check of the state says it
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        yield False, '%s is not there: nothing was looked at yet' % path, (
            'Run: ' + command_line(world.how, 'sync'))
        return
    with Store(world.home, world) as store, store.read() as con:
        damage = find_damage(con)
    yield not damage, 'schema %d%s' % (SCHEMA_VERSION, damage and (
        '; damaged: ' + damage)), (
        ASIDE if damage else '')


def _doctor_clock(world):
    """Compare the clock with what the state was told before."""
    with Store(world.home, world) as store, store.read() as con:
        latest = max(load_latest(con))
    now = world.now()
    if latest > now + FUTURE_MS:
        yield False, 'it is %s, and something is recorded for %s' % (
            format_time(now), format_time(latest)), (
            'Set the clock. If it is right now, look at the servers and '
            'check again: ' + command_line(world.how, 'sync'))
    else:
        yield True, 'it is %s; nothing is recorded for later' % format_time(
            now), ''


def _doctor_audit(world):
    with Store(world.home, world) as store, store.read() as con:
        found = verify_chain(con)
    yield found['ok'], '%s, %s' % (
        plural(found['records'], 'record'), 'the chain is intact'
        if found['ok'] else '; '.join(found['problems'][:3])), (
        '' if found['ok'] else 'Find out who wrote to %s; see: %s' % (
            shell_word(world.home),
            command_line(world.how, 'activity verify')))


def _doctor_servers(world):
    """Look at what is known of each server: never seen, stale, failed."""
    config, now, rows, states = load_config(world), world.now(), [], []
    question = Question((), operator(config), (), now, config.settings,
                        world.how, places_of(world))
    with Store(world.home, world) as store, store.read() as con:
        for server in all_servers(config)[0]:
            known = load_known(con, config, server.name)[0]
            states.append(_server_row(con, config, server, now))
            if known.disabled or known.quarantined:
                continue
            found = connection_state(Case(None, known, None, question))
            if found.reason and states[-1]['state'] != 'initializing':
                rows.append((False, found.fact, found.remedy))
    if len(rows) > MAX_NAMED:
        rows[MAX_NAMED:] = [(False, 'so it is with %d more' % (
            len(rows) - MAX_NAMED), 'See: ' + command_line(
                world.how, 'servers list'))]
    held = [row['state'] for row in states]
    counts = ['%s %s' % (plural(held.count(state), 'server'), state)
              for state in ('ready', 'initializing', 'disabled',
                            'quarantined') if state in held]
    for key in (PENDING, CHANGED):
        count = sum(row[key] for row in states)
        counts += ['%s %s' % (plural(count, 'tool'), key)] if count else []
    yield from rows
    if not rows:
        yield True, ', '.join(counts) or 'none', ''


def _doctor_interval(world):
    """Compare how often servers are looked at with how old a look may be."""
    config = load_config(world)
    interval = config.settings['sync_interval']
    short = [server.name for server in all_servers(config)[0]
             if interval and 0 < max_age_of(server, config.settings,
                                            0) <= interval]
    if short:
        yield False, ('max_age of %s is not longer than sync_interval, %s: '
                      'between two syncs of serve they are stale' % (
                          ', '.join(map(json.dumps, short[:MAX_NAMED])),
                          format_duration(interval))), (
            'Set max_age to three times sync_interval or more; where '
            'something else than serve syncs, set sync_interval to how '
            'often it does.')
    else:
        yield True, 'every look is good for longer than sync_interval', ''


def _doctor_trust(world):
    """Look at what decides which tools are trusted, and who may edit it."""
    config, rows = load_config(world), []
    settings, lock = config.settings, config.lock
    for key, server in [('quarantine_enabled', None)] + [
            ('trust_mode', server) for server in all_servers(config)[0]]:
        fact = ungated_fact(settings, server)
        if fact:
            rows.append((False, fact, 'Set "approvals" to "state", or mend '
                         '%s%s.' % (key, server and ' in %s' % server.file
                                    or '')))
    files = [path for path in config.files + (settings['lockfile'],)
             if os.path.isfile(path) and _is_anybodys(path)]
    if files:
        rows.append((False, 'everybody may write to %s, and so choose what '
                     'runs' % ', '.join(files), 'Run: chmod o-w ' + ' '.join(
                         map(shell_word, files))))
    yield from rows or [(True, 'approvals stand in %s' % (
        'the lockfile ' + lock.path if lock else 'the state directory'), '')]


# The checks of a doctor, each (ok, detail, remedy) rows of a World.
DOCTOR = (('python', _doctor_python), ('program', _doctor_program),
          ('sqlite', _doctor_sqlite), ('state', _doctor_home),
          ('disk', _doctor_disk), ('config', _doctor_config),
          ('trust', _doctor_trust), ('sync interval', _doctor_interval),
          ('database', _doctor_database), ('clock', _doctor_clock),
          ('audit', _doctor_audit), ('servers', _doctor_servers))


def _examine(world, function):
    """Run one check; what it raises is what it found."""
    try:
        return list(function(world))
    except ImportError as exc:
        return [(False, 'this Python lacks %s' % exc.name,
                 'Use another Python.')]
    except ConfigError:
        return []               # the check of the config says it
    except PreflightError as exc:
        return [(False, str(exc), exc.hint or (
            'Wait for what holds it to end, then look again.'
            if isinstance(exc, StoreBusy) else _who_may(world.home)))]
    except OSError as exc:
        path = exc.filename or world.home
        return [(False, '%s: %s' % (path, os_reason(exc)), _who_may(path))]
    except (ArithmeticError, LookupError, TypeError, ValueError) as exc:
        return [(False, 'what is stored makes no sense: %s: %s' % (
            type(exc).__name__, exc), 'Find out who wrote to %s.'
            % shell_word(world.home))]


def cmd_doctor(world, options):
    """Check the installation: {'ok', 'checks': [...]}, a remedy for each.

    It makes nothing and contacts no server. With --self-test, instead, a
    server of its own is changed in a state of its own.
    """
    rows = []
    if options.self_test:
        rows = _self_test(world)
    else:
        for name, function in DOCTOR:
            found = _examine(world, function)
            rows += [(name,) + row for row in found]
            if name == 'database' and not (found and found[-1][0]):
                break           # the others look into it
    keys = ('check', 'ok', 'detail', 'remedy')
    checks = [dict(zip(keys, row), remedy=row[3] or None) for row in rows]
    return {'ok': all(row['ok'] for row in checks), 'checks': checks}


# -- the same, asked of a service (--url) -------------------------------------

ENV_HINT = 'Run it without --url, and as: env -u PREFLIGHT_URL ...'


def _remote_link(world):
    """Give what carries requests to world.url: (HttpLink, base URL).

    Never through a proxy: it is our own service. Raises UsageError for a
    URL of another kind.
    """
    direct = world._replace(env={})
    if world.url[:7] == 'unix://' and world.url[7:8] == '/':
        return LocalLink(direct, world.url[7:]), 'http://localhost'
    try:
        kind = origin_of(world.url)[0]
    except ValueError:
        kind = ''
    if kind not in ('http', 'https') or '?' in world.url:
        raise UsageError('--url takes http://HOST:PORT, https://HOST:PORT '
                         'or unix:///PATH')
    return HttpLink(direct), world.url.rstrip('/')


def _service_name(world):
    return (world.url if world.url[:7] == 'unix://'
            else plain_url(world.url))


def call_remote(world, method, path, body=None, more=()):
    """Ask the service at world.url: (data of its answer, request id).

    more: further headers. Raises PreflightError for whatever is not the
    envelope of contract 5 with "success": true.
    """
    key = world.env.get('PREFLIGHT_API_KEY', '')
    headers = {'Accept': 'application/json', 'Content-Type':
               'application/json', 'X-MCPProxy-Client': 'cli/' + VERSION}
    headers.update(more)
    if key:
        headers['X-API-Key'] = key
    text = None if body is None else json.dumps(body).encode('ascii')
    deadline = world.clock() + (MAX_WAIT_MS + REQUEST_TIMEOUT_MS) / 1000
    link, url = _remote_link(world)
    try:
        reply = link.request(method, url + path, headers, text, deadline)
        try:
            status, data = reply.status, reply.body(deadline)
        finally:
            reply.close()
    except UpstreamError as exc:
        raise PreflightError('%s: %s' % (_service_name(world), exc)) from exc
    request_id = reply.headers.get('x-request-id', '')
    try:
        answer = decode_json(data.decode('utf-8'))
    except ValueError as exc:
        raise PreflightError('%s answered HTTP %d without JSON; is it '
                             'preflight.py serve, or mcpproxy?' % (
                                 _service_name(world), status)) from exc
    why = find_refused(answer)
    is_good = is_table(answer) and answer.get('success') is True
    if why or not is_good or not 200 <= status < 300:
        said = answer.get('error') if is_table(answer) else None
        hint = ('Set PREFLIGHT_API_KEY to its key, or to a token of it.'
                if status == 401 else '')
        raise PreflightError('%s answered HTTP %d: %s' % (
            _service_name(world), status,
            said if is_text(said) else why or 'no error text'), hint)
    return answer.get('data'), request_id


def _remote_shape(claim, what):
    if not claim:
        raise PreflightError('the service\'s answer is not a check\'s: %s'
                             % what)


def _remote_answer(item):
    """Read one result of another program's answer (contract 2).

    A reason that is not known here is not retryable. Raises PreflightError
    for what has not the shape of contract 5.
    """
    _remote_shape(is_table(item) and is_text(item.get('id')),
                  'a result has no id')
    code = item.get('reason')
    is_ready = item.get('status') == 'ready'
    _remote_shape(item.get('status') in ('ready', 'unavailable')
                  and (is_ready and code is None
                       or not is_ready and is_text(code) and code),
                  'status or reason of %s' % json.dumps(item['id']))
    kinds = {'retryable': is_flag, 'did_you_mean': is_texts}
    values = {}
    for key in Answer._fields:
        value = item.get(key)
        _remote_shape(value is None or kinds.get(key, is_text)(value),
                      '%s of %s' % (key, json.dumps(item['id'])))
        values[key] = value
    if code is not None and code not in REASONS:
        values['retryable'] = False
    return Answer(**values)


def remote_report(data, refs, request_id):
    """Read another program's answer to a check into a Report.

    It is worth the worse of its verdict and its per-tool reasons, and
    nothing without a result for each id asked for (contract 2).
    """
    _remote_shape(is_table(data) and is_list(data.get('tools'))
                  and is_text(data.get('verdict')), 'verdict or tools')
    answers = [_remote_answer(item) for item in data['tools']]
    by_id = {answer.id: answer for answer in answers}
    missing = [ref.id for ref in refs if ref.id not in by_id]
    _remote_shape(not missing, 'no result for %s' % ', '.join(missing))
    _remote_shape(len(answers) == len(refs), 'results nobody asked for')
    told = data['verdict'] if data['verdict'] in EXIT_CODES else BLOCKED
    verdict = max(told, worst_verdict([a.reason or '' for a in answers]),
                  key=list(EXIT_CODES).index)
    waited, at = data.get('waited_ms'), data.get('checked_at')
    _remote_shape(is_text(at) and (waited is None or type(waited) is int),
                  'checked_at or waited_ms')
    return Report(verdict, at, waited, answers, request_id, [])


def remote_preflight(world, options):
    """Run the check at a service: a Report."""
    for name in ('sync', 'horizon', 'lock'):
        if getattr(options, name) not in (None, False):
            raise UsageError('--%s is local only' % name, ENV_HINT)
    wait_ms, (refs, filters) = parse_wait(options.wait), check_options(
        options)
    check_request_id(options.request_id)
    body = {'tools': [dict({'id': ref.id}, **(
        {'pin_hash': ref.pin} if ref.pin else {})) for ref in refs]}
    if filters:
        body['policy'] = dict.fromkeys(sorted(filters), True)
    if options.profile:
        body['profile'] = options.profile
    if wait_ms:
        body['wait_ms'] = wait_ms
    more = {'X-Request-Id': options.request_id} if options.request_id else {}
    data, request_id = call_remote(world, 'POST', '/api/v1/preflight', body,
                                   more)
    return remote_report(data, refs, request_id)


def _remote_list(world, path, key):
    """Ask a service for the data that has rows under a key: all of it."""
    data, _ = call_remote(world, 'GET', path)
    rows = data.get(key) if is_table(data) else None
    if not is_list(rows) or not all(map(is_table, rows)):
        raise PreflightError('the service\'s answer has no %s' % key)
    return data


def remote_tools_list(world, options):
    """List tools as a service tells them, of some servers or of all."""
    from urllib.parse import quote
    paths = ['/api/v1/servers/%s/tools' % quote(name, '')
             for name in options.ids] or ['/api/v1/tools']
    rows = []
    for path in paths:
        rows += _remote_list(world, path, 'tools')['tools']
    for row in rows:                        # mcpproxy has no id
        row.setdefault('id', '%s:%s' % (
            row.get('server_name', row.get('server')), row.get('name')))
    return rows


def remote_servers_list(world, options):
    """List servers as a service tells them."""
    rows = _remote_list(world, '/api/v1/servers', 'servers')['servers']
    for row in rows:                        # mcpproxy has other names
        row.setdefault('server', row.get('name'))
        row.setdefault('state', row.get('status'))
    return [row for row in rows if not options.ids
            or row['server'] in options.ids]


ACTIVITY_FILTERS = ('type', 'status', 'request_id', 'since', 'until',
                    'limit', 'offset')


def remote_activity_list(world, options):
    """List a service's audit records."""
    from urllib.parse import urlencode
    given = {key: getattr(options, key) for key in ACTIVITY_FILTERS}
    query = urlencode({k: v for k, v in given.items() if v is not None})
    data = _remote_list(world, '/api/v1/activity?' + query, 'activities')
    return dict({'total': len(data['activities'])}, **data)


def remote_activity_show(world, options):
    """Show one of a service's audit records."""
    from urllib.parse import quote
    if len(options.ids) != 1:
        raise UsageError('give exactly one record id')
    data, _ = call_remote(world, 'GET', '/api/v1/activity/' + quote(
        options.ids[0], ''))
    if not is_table(data) or not is_table(data.get('activity')):
        raise PreflightError('the service\'s answer has no activity')
    return data


# ==========================================================================
# 22. serve (contract 5, 7): one asyncio loop. Bytes -> Request -> a plain
#     function -> Response. Checks are judged and recorded together, once a
#     tick, and answered when their batch is on disk.
# ==========================================================================

MAX_BODY_BYTES = 1 << 20
MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_PEERS = 512                 # below the usual limit of 1024 open files
MAX_WAITS = 4
MAX_STREAMS = 64
MAX_REPLAY = 10000              # changes that a resumed stream is told
MAX_CACHE_BYTES = 8 << 20       # bodies judged before rows are read anew
READ_TIMEOUT_S = 10             # a whole request, from its first byte
IDLE_TIMEOUT_S = 75
LINGER_S = 2                    # for a refusal to be read before the reset
SWEEP_S = 0.5
SHUTDOWN_S = 5
BEAT_S = 15                     # between comments on an event stream
TICK_S = 0.25                   # between looks for events
CONFIG_RETRY_S = 0.2
CLOCK_TICK_MS = 50              # that files are dated with, or finer
BUSY_STEP_S = 0.002
REQUEST_DEPTH = 64
SECRET_PREFIX = 'pfl_agt_'

PHRASES = {200: 'OK', 202: 'Accepted', 400: 'Bad Request',
           401: 'Unauthorized', 403: 'Forbidden', 404: 'Not Found',
           405: 'Method Not Allowed', 408: 'Request Timeout',
           411: 'Length Required', 431: 'Request Header Fields Too Large',
           500: 'Internal Server Error', 503: 'Service Unavailable'}

Request = namedtuple('Request', 'method path query headers body id is_last '
                                'names')
Request.__doc__ = """One request. path: as written; query: name -> values;
id: the X-Request-Id that answers it; is_last: the connection closes after;
names: what stands in the path, decoded."""

Response = namedtuple('Response', 'status body kind headers')
Response.__doc__ = """One response. body: bytes; kind: its media type;
headers: further (name, value) pairs."""

Who = namedtuple('Who', 'tier token digest')
Who.__doc__ = """Whose credential a request carries; token: Token or None
(the operator), and the keyed digest it was found by."""


class HttpError(PreflightError):
    """A request that is refused, with a status of contract 5."""

    def __init__(self, status, message, headers=()):
        super().__init__(message)
        self.http_status, self.headers = status, headers


def respond(value, status=200, headers=()):
    """Make a JSON response."""
    return Response(status, compact_json(value).encode('ascii') + b'\n',
                    'application/json', headers)


def respond_text(text, status=200, kind='text/plain'):
    """Make a response of plain text."""
    return Response(status, text.encode('ascii') + b'\n', kind, ())


def respond_error(exc, request_id, who):
    """Make the error envelope of contract 5.

    What is wrong with this host's files is told to its operator only.
    """
    text = str(exc)
    if isinstance(exc, (ConfigError, StoreError)) and (
            who is None or who.tier != OPERATOR):
        text = 'the state or the configuration cannot be used now'
    return respond({'success': False, 'error': text,
                    'request_id': request_id}, exc.http_status,
                   getattr(exc, 'headers', ()))


# -- a request's head and body ------------------------------------------------

HEADER = (rb"(?m)^([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*"
          rb'([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*\r\n')
# Of these a second one would leave open which counts.
SINGLE_HEADERS = ('content-length', 'transfer-encoding', 'host', 'origin',
                  'authorization', 'x-api-key', 'x-request-id', 'expect',
                  'connection')


def read_headers(text):
    """Read header lines strictly: lower-case name -> value.

    text: bytes, each line with its end. Raises HttpError.
    """
    pairs = re.findall(HEADER, text)
    if len(pairs) != text.count(b'\n'):
        raise HttpError(400, 'a header line is malformed')
    if len(pairs) > MAX_HEADERS:
        raise HttpError(431, 'there are over %d headers' % MAX_HEADERS)
    table = {}
    for name, value in pairs:
        name = name.decode('ascii').lower()
        if name in SINGLE_HEADERS and name in table:
            raise HttpError(400, 'the header %s stands twice' % name)
        table[name] = value.decode('latin-1')
    return table


def check_framing(line, headers):
    """Refuse what two readers could frame differently (RFC 9112).

    line: the request line. Returns the length of the body, None for none,
    or 'chunked'. Raises HttpError, and the connection closes.
    """
    if not re.match(rb'[A-Z]{1,20} [\x21-\x7e]+ HTTP/1\.[01]\Z', line):
        raise HttpError(400, 'the request line is malformed')
    is_old = line.endswith(b'1.0')
    if 'host' not in headers and not is_old:
        raise HttpError(400, 'the header Host is missing')
    length = headers.get('content-length')
    coding = headers.get('transfer-encoding')
    if coding is not None:
        if length is not None or is_old or coding.lower() != 'chunked':
            raise HttpError(400, 'Transfer-Encoding must be chunked, alone')
        return 'chunked'
    if length is None:
        return None
    if not re.match(r'[0-9]{1,18}\Z', length):
        raise HttpError(400, 'Content-Length must be digits')
    if int(length) > MAX_BODY_BYTES:
        raise HttpError(400, 'the body is over 1 MiB')
    return int(length)


class Body:
    """Collects a body of a known length, or in chunks (RFC 9112, 7.1)."""

    def __init__(self, length):
        self.is_chunked = length == 'chunked'
        self.left = None if self.is_chunked else length or 0
        self.is_ending, self.data = False, bytearray()

    def feed(self, data):
        """Consume a bytearray from its front; True once it is complete."""
        if not self.is_chunked:
            return self._take(data)
        while not self.is_ending:
            if self.left is None:
                if not self._take_size(data):
                    return False
            elif not self._take(data) or not self._take_end(data):
                return False
            else:
                self.left = None
        return self._take_end(data)

    def _take(self, data):
        piece = data[:self.left]
        del data[:self.left]
        self.data += piece
        self.left -= len(piece)
        return self.left == 0

    def _take_size(self, data):
        end = data.find(b'\r\n', 0, 200)
        if end < 0 and len(data) < 200:
            return False
        found = re.match(rb'([0-9A-Fa-f]{1,8})(?:[ \t]*;[\x20-\x7e\t]*)?\Z',
                         data[:max(end, 0)])
        if not found:
            raise HttpError(400, 'a chunk is malformed')
        del data[:end + 2]
        self.left = int(found.group(1), 16)
        self.is_ending = self.left == 0
        if len(self.data) + self.left > MAX_BODY_BYTES:
            raise HttpError(400, 'the body is over 1 MiB')
        return True

    def _take_end(self, data):
        if not b'\r\n'.startswith(data[:2]):
            raise HttpError(400, 'trailers are not accepted' if
                            self.is_ending else 'a chunk is malformed')
        if len(data) < 2:
            return False
        del data[:2]
        return True


def unrepeated(pairs):
    """Make a JSON object; raises ValueError for a key that stands twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError('a key of an object stands twice')
    return table


def small_number(text):
    """Read an integer; raises ValueError for one that none of ours is."""
    if len(text) > 20:
        raise ValueError('a number has over 20 digits')
    return int(text)


def no_constant(name):
    """Refuse NaN and Infinity; raises ValueError."""
    raise ValueError('%s is not JSON' % name)


def strict_json(data):
    """Parse a request's body; raises HttpError 400 with the rule broken."""
    try:
        text = data.decode('utf-8')
    except UnicodeDecodeError:
        raise HttpError(400, 'the body is not UTF-8') from None
    if text[:1] == '\ufeff':
        raise HttpError(400, 'the body begins with a byte order mark')
    if cut_deep(text, REQUEST_DEPTH) != text:
        raise HttpError(400, 'the body nests over %d levels' % REQUEST_DEPTH)
    try:
        value = json.loads(text, object_pairs_hook=unrepeated,
                           parse_int=small_number,
                           parse_constant=no_constant)
    except ValueError as exc:
        raise HttpError(400, 'the body is not exactly one JSON object: %s'
                        % exc) from exc
    if not is_table(value):
        raise HttpError(400, 'the body is not exactly one JSON object')
    return value


# -- what a check asks --------------------------------------------------------

CHECK_KEYS = ('tools', 'profile', 'policy', 'wait_ms')
FILTERS = ('read_only_only', 'exclude_destructive', 'exclude_open_world')

Asked = namedtuple('Asked', 'refs profile filters wait_ms')
Asked.__doc__ = """A check as a request asks for it, before any look-up.
refs: Refs, None when the request leaves the tools to its token."""


def only_keys(table, keys, where=''):
    """Refuse keys that are not known; raises HttpError 400."""
    for key in table:
        if key == 'as_user':
            raise HttpError(400, 'as_user is reserved')
        if key not in keys:
            raise HttpError(400, 'unknown key %s%s' % (json.dumps(key),
                                                       where))


def typed(table, key, is_kind, kind):
    """Give an optional member; raises HttpError 400 for a wrong type."""
    value = table.get(key)
    if value is not None and not is_kind(value):
        raise HttpError(400, '%s must be %s' % (key, kind))
    return value


def asked_refs(tools):
    """Read the member tools: Refs; raises an error of status 400."""
    if not tools:
        raise HttpError(400, 'tools is empty')
    if len(tools) > MAX_IDS:
        raise HttpError(400, 'tools has over %d entries' % MAX_IDS)
    pairs = []
    for item in tools:
        if not is_table(item):
            raise HttpError(400, 'an entry of tools must be an object, such '
                            'as {"id": "server:tool"}')
        name, pin = item.get('id'), item.get('pin_hash')
        if name is None or len(item) > 1:
            only_keys(item, ('id', 'pin_hash'), ' in an entry of tools')
        if not is_text(name) or not (pin is None or is_text(pin)):
            raise HttpError(400, 'an entry of tools needs an id; id and '
                            'pin_hash must be strings')
        pairs.append((name, pin or ''))
    return unique_refs(pairs)


def is_wait(value):
    """Claim that a value is an integer of milliseconds to wait."""
    return type(value) is int and 0 <= value <= MAX_WAIT_MS


def parse_check(data, has_own_tools):
    """Read the body of POST /api/v1/preflight (contract 5) into Asked.

    has_own_tools: the caller's token carries required tools, so that the
    key may be left out. Raises an error of status 400 naming the rule.
    """
    table, refs = strict_json(data), None
    only_keys(table, CHECK_KEYS)
    tools = typed(table, 'tools', is_list, 'an array')
    if tools is not None or not has_own_tools:
        if tools is None:
            raise HttpError(400, 'tools is missing, such as {"tools": '
                            '[{"id": "server:tool"}]}')
        refs = asked_refs(tools)
    wait_ms = typed(table, 'wait_ms', is_wait, 'an integer from 0 to %d'
                    % MAX_WAIT_MS)
    profile = typed(table, 'profile', is_text, 'a string')
    policy = typed(table, 'policy', is_table, 'an object') or {}
    only_keys(policy, FILTERS, ' in policy')
    on = frozenset(key for key in policy
                   if typed(policy, key, is_flag, 'true or false'))
    return Asked(refs, profile or '', on, wait_ms or 0)


def caller_of(who, config, profile=''):
    """Give the Caller of a credential, narrowed by a profile.

    For an agent an unknown profile and one that shares no server with its
    scope are the same error (contract 5). Raises an error of status 400.
    """
    if who.token is None:
        return operator(config, profile)
    token, servers = who.token, None
    if token.servers not in (None, ['*']):
        servers = frozenset(token.servers)
    for name in (token.profile, profile or None):
        if name is not None:
            members = frozenset(config.profiles.get(name, ()))
            servers = members if servers is None else members & servers
    if profile and not servers:
        raise HttpError(400, 'Unknown profile')
    return Caller(AGENT, token.name, profile, servers)


# -- judging in batches, one synced commit each -------------------------------

class Check:
    """One check under way: from its request to its answer."""

    def __init__(self, peer, request, who, asked, is_probe=False):
        self.peer, self.request, self.who = peer, request, who
        self.asked = asked
        self.is_probe = is_probe    # /readyz?tool=: 503 when not ready
        self.is_final = False       # its wait is over
        self.start = None           # of the wait, monotonic seconds


class Gate:
    """Judges checks in batches; each is released when its record is there.

    One synced commit per tick, however many checks are in it. A failed
    write is 503 for exactly the checks of that batch.
    """

    def __init__(self, service):
        self.service, self.world = service, service.world
        # What blocks here blocks the loop: a busy state is tried again.
        self.store = Store(self.world.home, self.world, busy_ms=20)
        self.todo, self.waiting = [], set()
        self.is_scheduled, self.since = False, None
        self.cache, self.mark, self.room = None, None, 0
        self.texts = {}             # id of an Answer -> it and its JSON
        self.places = places_of(self.world)

    def submit(self, check):
        """Take a check into the next batch."""
        self.todo.append(check)
        if not self.is_scheduled:
            self.is_scheduled = True
            self.service.loop.call_soon(self.flush)

    def flush(self):
        """Judge, record and answer what has come together."""
        now = self.world.clock()
        self.is_scheduled, self.since = False, self.since or now
        batch = [check for check in self.todo if not check.peer.is_gone()]
        try:
            done, again = [], CONFIG_RETRY_S
            if self.service.configs.is_settled():
                if not self.store.lock.take_now():
                    raise StoreBusy('the state database is busy')
                done, again = self._record(batch, now), None
        except StoreBusy as exc:
            self.waiting -= set(batch)
            again = BUSY_STEP_S
            if now - self.since > BUSY_TIMEOUT_MS / 1000:
                done, again = [(check, exc) for check in batch], None
        except Exception as exc:
            self.waiting -= set(batch)
            self.cache = self.store.inode = None    # opened anew next time
            error = self.service.error_of(exc)
            done, again = [(check, error) for check in batch], None
        finally:
            if self.store.lock.is_held:
                self.store.lock.__exit__()
        if again is not None:
            self.is_scheduled = True
            self.service.loop.call_later(again, self.flush)
            return
        self.todo, self.since = [], None
        self._answer(done)

    def _record(self, batch, now):
        """Judge and record a batch in one transaction: (Check, result)s."""
        config, counts = self.service.configs.current(), self.service.counts
        if self.store.has_moved():
            self.cache = None
            self.store.close()
        with self.store.write() as con:
            done = [(check, self._judge(con, config, check))
                    for check in batch]
        counts.write_seconds += self.world.clock() - now
        counts.writes += 1
        return done

    def snapshot(self, con, config):
        """Give the rows read before, unless the state has moved.

        data_version on this connection moves for others' commits only, and
        generation only with the state, not with audits.
        """
        version, held = data_version(con), self.cache
        if held is not None and (held.config is not config or self.room < 0):
            held = None
        if held is None or self.mark[0] != version:
            generation = load_meta(con, 'generation')
            if held is None or self.mark[1] != generation:
                self.cache = open_snapshot(con, config)
                self.room, self.texts = MAX_CACHE_BYTES, {}
            self.mark = version, generation
        return self.cache

    def evaluate(self, con, config, check):
        """Judge one check now: (Report, Question). Raises HttpError."""
        asked, who, waited = check.asked, check.who, None
        if who.token and not self.service.is_valid(con, who):
            raise HttpError(401, 'the token was revoked or has expired')
        refs = asked.refs
        if refs is None:
            refs = unique_refs(who.token.required)
        if asked.wait_ms:
            waited = 0 if check.start is None else int(
                (self.world.clock() - check.start) * 1000)
        self.room -= len(check.request.body)
        question = Question(
            refs, caller_of(who, config, asked.profile), asked.filters,
            self.world.now(), config.settings, self.world.how, self.places)
        return judge_all(self.snapshot(con, config), question,
                         check.request.id, waited), question

    def _judge(self, con, config, check):
        """Judge and record one check, or let it wait: None, then."""
        import sqlite3
        try:
            report, question = self.evaluate(con, config, check)
        except sqlite3.Error:
            raise               # it is the batch that failed
        except Exception as exc:
            return self.service.error_of(exc)
        if (report.verdict == RETRY and check.asked.wait_ms
                and not check.is_final and not check.peer.is_closing
                and len(self.waiting) < MAX_WAITS):
            self.waiting.add(check)
            return None
        client = check.request.headers.get('x-mcpproxy-client', '')
        append_record(con, check_record(
            report, question.caller, question.now,
            'cli' if client.startswith('cli/') else 'api'))
        return report

    def _poll_later(self, check):
        left = (check.start - self.world.clock()
                + check.asked.wait_ms / 1000)
        self.service.loop.call_later(
            max(0, min(WAIT_STEP_MS / 1000, left)), self._poll, check)

    def _poll(self, check):
        if check not in self.waiting:
            return              # its client has gone
        spent = self.world.clock() - check.start
        is_over = spent >= check.asked.wait_ms / 1000
        try:
            if not is_over and self.service.configs.is_settled():
                with self.store.read() as con:
                    report, _ = self.evaluate(
                        con, self.service.configs.current(), check)
                is_over = report.verdict != RETRY
        except PreflightError:
            is_over = True      # the last look words it
        if is_over:
            self.finish(check)
        else:
            self._poll_later(check)

    def finish(self, check):
        """End a wait: one last look, then the answer."""
        self.waiting.discard(check)
        check.is_final = True
        self.submit(check)

    def drop(self, peer):
        """Forget the wait of a client that has gone; tells if it had one."""
        gone = {check for check in self.waiting if check.peer is peer}
        self.waiting -= gone
        return bool(gone)

    def _answer(self, done):
        for check, result in done:
            if result is None:
                check.start = self.world.clock()
                self._poll_later(check)
            else:
                check.peer.reply(check.request, self._response(
                    check, result), check.who)

    def _response(self, check, result):
        if isinstance(result, PreflightError):
            return respond_error(result, check.request.id, check.who)
        self.service.counts.check(result)
        is_bad = check.is_probe and result.verdict != READY
        text = compact_json({'success': True, 'data': report_data(
            result._replace(answers=()))})
        body = '%s%s]}}\n' % (text[:-3], ','.join(
            [self._text_of(answer) for answer in result.answers]))
        return Response(503 if is_bad else 200, body.encode('ascii'),
                        'application/json', ())

    def _text_of(self, answer):
        """Encode one result; a ready one is kept as its snapshot keeps it."""
        held, text = self.texts.get(id(answer), (None, ''))
        if held is not answer:
            text = compact_json(answer_fields(answer))
            if answer.status == READY:
                self.texts[id(answer)] = answer, text
        return text


# -- config files that change -------------------------------------------------

class Configs:
    """The config files, read again when they change (contract 5)."""

    def __init__(self, world, sync_ms):
        self.world, self.sync_ms = world, sync_ms
        self.config, self.stamp, self.fault = None, None, None
        self.retry_at, self.lock_path = None, None
        self.hosts = frozenset()        # of the key allow_hosts

    def _stamp(self):
        stamps = []
        named = self.config.files if self.config else ()
        for path in dict.fromkeys(config_paths(self.world) + named + (
                (self.lock_path,) if self.lock_path else ())):
            try:
                info = os.stat(path)
                stamps.append((info.st_mtime_ns, info.st_ctime_ns,
                               info.st_size, info.st_ino))
            except OSError as exc:
                stamps.append(exc.errno)
        return stamps

    def _watch(self, path):
        """Watch the lockfile that the config names, too, or none."""
        if path != self.lock_path:
            self.lock_path, self.stamp = path, None

    def is_settled(self):
        """Read what has changed; False while a second try is due."""
        stamp, now = self._stamp(), self.world.clock()
        if stamp == self.stamp and self.retry_at is None:
            return True         # with the config, or with why not
        if self.retry_at is not None and now < self.retry_at:
            return False
        self.stamp = stamp
        try:
            config = load_config(self.world)
        except ConfigError as exc:
            is_second = self.retry_at is not None
            self.fault = exc
            self._watch(getattr(exc, 'path', self.lock_path))
            self.retry_at = None if is_second else now + CONFIG_RETRY_S
            return is_second
        if self.sync_ms:        # what --sync-interval says, max_age follows
            config = config._replace(settings=dict(
                config.settings, sync_interval=self.sync_ms))
        self.config, self.fault, self.retry_at = config, None, None
        self._watch(config.lock and config.lock.path)
        age = self.world.now() - max([0] + [
            row[0] // 10 ** 6 for row in stamp if isinstance(row, tuple)])
        if 0 <= age < CLOCK_TICK_MS:
            self.stamp = None   # a second change might look like this one
        self.hosts = frozenset(name.lower() for name in
                               config.settings['allow_hosts'])
        return True

    def current(self):
        """Give the Config; raises ConfigError while it cannot be read."""
        if self.fault is not None:
            raise self.fault
        return self.config

    def latest(self):
        """Read what has changed and give the Config, as current() does."""
        self.is_settled()
        return self.current()


# -- metrics ------------------------------------------------------------------

class Counts:
    """Counters for /metrics."""

    def __init__(self):
        self.verdicts = dict.fromkeys(EXIT_CODES, 0)
        self.reasons = dict.fromkeys(('ready',) + tuple(REASONS), 0)
        self.statuses = {}
        self.writes, self.write_seconds = 0, 0

    def status(self, status):
        """Count one response."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def check(self, report):
        """Count one check and its results."""
        self.verdicts[report.verdict] += 1
        for answer in report.answers:
            self.reasons[answer.reason or 'ready'] += 1

    def render(self, waits, states):
        """Write the counters as Prometheus text; names start preflight_."""
        lines = []

        def family(name, kind, about, label, rows):
            lines.append('# HELP preflight_%s %s' % (name, about))
            lines.append('# TYPE preflight_%s %s' % (name, kind))
            lines.extend('preflight_%s{%s="%s"} %d' % (name, label, key,
                                                       number)
                         for key, number in sorted(rows.items()))
        family('checks_total', 'counter', 'Checks by verdict.', 'verdict',
               self.verdicts)
        family('results_total', 'counter', 'Results by reason.', 'reason',
               self.reasons)
        family('http_requests_total', 'counter', 'Responses by status.',
               'status', self.statuses)
        family('wait_slots', 'gauge', 'Wait slots.', 'state',
               {'busy': waits, 'free': MAX_WAITS - waits})
        family('servers', 'gauge', 'Configured servers by state.', 'state',
               {state: states.count(state) for state in SERVER_STATES})
        family('audit_write_seconds', 'summary', 'Commits of audit records.',
               '', {})
        lines.append('preflight_audit_write_seconds_sum %.6f'
                     % self.write_seconds)
        lines.append('preflight_audit_write_seconds_count %d' % self.writes)
        return '\n'.join(lines)


# -- connections --------------------------------------------------------------

def encode_response(response, request_id, is_last):
    """Write the bytes of a response; one without a body is a stream."""
    lines = ['HTTP/1.1 %d %s' % (response.status,
                                 PHRASES[response.status]),
             'Content-Type: ' + response.kind,
             'X-Request-Id: ' + request_id]
    if response.body is not None:
        lines.append('Content-Length: %d' % len(response.body))
    lines += ['%s: %s' % pair for pair in response.headers]
    lines.append('Cache-Control: no-store\r\n'
                 'X-Content-Type-Options: nosniff\r\n'
                 'Connection: %s\r\n\r\n' % (
                     'close' if is_last else 'keep-alive'))
    return '\r\n'.join(lines).encode('ascii') + (response.body or b'')


class Peer:
    """One connection: an asyncio protocol that reads one request a time.

    is_busy: a request is being answered. is_closing: no further one will be
    read. deadline: when sweep() ends a peer that is not busy.
    """

    def __init__(self, service, is_local):
        self.service, self.is_local = service, is_local
        self.clock = service.world.clock
        self.transport, self.buffer = None, bytearray()
        self.request, self.body = None, None    # being read
        self.current = None                     # being answered
        self.is_busy = self.is_closing = False
        self.is_stream = self.is_refused = False
        self.is_reading, self.is_writable = True, True
        self.deadline, self.start = self.clock() + READ_TIMEOUT_S, 0

    def connection_made(self, transport):
        """Begin, if the service takes this peer."""
        self.transport = transport
        if not self.service.admit_peer(self):
            self.is_closing = True
            transport.abort()

    def connection_lost(self, exc):
        """Forget all that waited for this peer."""
        self.is_closing = True
        self.service.peers.discard(self)
        self.service.gate.drop(self)
        self.service.events.drop(self)

    def is_gone(self):
        """Tell whether nobody is there to be answered."""
        return self.transport.is_closing()

    def eof_received(self):
        """Let an answer under way go out; a waiting one has lost its peer."""
        is_gone = self.service.gate.drop(self) or self.is_stream
        self.is_closing = True
        is_tls = self.transport.get_extra_info('sslcontext') is not None
        return self.is_busy and not is_gone and not is_tls

    def pause_writing(self):
        """Take no more requests from a peer that does not read."""
        self.is_writable = False
        self._steer()

    def resume_writing(self):
        """Go on once it reads again."""
        self.is_writable = True
        self._steer()
        self._next()

    def _steer(self):
        """Read from the socket only as much as can be dealt with."""
        wanted = self.is_writable and (
            len(self.buffer) <= MAX_BODY_BYTES + MAX_HEAD_BYTES)
        if wanted != self.is_reading and not self.is_gone():
            self.is_reading = wanted
            (self.transport.resume_reading if wanted
             else self.transport.pause_reading)()

    def data_received(self, data):
        """Take bytes; what follows a request waits until it is answered."""
        if self.is_stream or self.is_closing:
            return              # of a refused body nothing is read
        if not self.buffer and self.request is None:
            self.deadline = self.clock() + READ_TIMEOUT_S
        self.buffer += data
        if self.is_busy:
            self._steer()
        else:
            self._advance()

    def _next(self):
        if not (self.is_busy or self.is_closing) and (
                self.buffer and self.is_writable):
            self._advance()

    def _advance(self):
        """Read a request from the buffer and hand it over."""
        try:
            if self.request is None and not self._take_head():
                return
            if not self.body.feed(self.buffer):
                self._continue()
                return
        except Exception as exc:
            self.refuse(self.service.error_of(exc))
            return
        self.current = self.request._replace(body=bytes(self.body.data))
        self.request = self.body = None
        self.is_busy, self.start = True, self.clock()
        self.service.handle(self, self.current)

    def refuse(self, exc):
        """Answer what is no request, and close: its bytes are not read."""
        self.current = self.request or Request(
            '-', '-', {}, {}, b'', new_request_id(self.service.world), True,
            ())
        self.request, self.is_refused = None, True
        self.is_busy = self.is_closing = True
        self.start = self.clock()
        self.buffer.clear()
        self.reply(self.current, respond_error(exc, self.current.id, None),
                   None)

    def _take_head(self):
        if self.buffer[:2] == b'\r\n':
            del self.buffer[:2]         # RFC 9112, 2.2
        end = self.buffer.find(b'\r\n\r\n')
        if end < 0 and re.search(rb'\A[^A-Z]|[^\r]\n', self.buffer):
            raise HttpError(400, 'the request line is malformed')
        if max(end, len(self.buffer) if end < 0 else 0) > MAX_HEAD_BYTES:
            raise HttpError(431, 'the headers are larger than %d bytes'
                            % MAX_HEAD_BYTES)
        if end < 0:
            return False
        line, _, rest = bytes(self.buffer[:end + 2]).partition(b'\r\n')
        del self.buffer[:end + 4]
        headers = read_headers(rest)
        length = check_framing(line, headers)
        self.request = self.service.parse_head(line, headers)
        if length is None and self.request.method in ('POST', 'PUT',
                                                      'PATCH'):
            raise HttpError(411, 'the request has no Content-Length and is '
                            'not chunked; send a body, {} at least')
        self.body = Body(length)
        return True

    def _continue(self):
        """Ask for the body, once what stands before it is admitted."""
        if self.request.headers.pop('expect', '').lower() == '100-continue':
            self.service.admit(self, self.request)
            self.transport.write(b'HTTP/1.1 100 Continue\r\n\r\n')

    def expire(self):
        """End a peer that is too slow, or idle."""
        if self.is_closing or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.buffer or self.request:
            self.refuse(HttpError(408, 'the request was too slow'))
        else:
            self.transport.close()

    def reply(self, request, response, who):
        """Write a response in one go, and read on."""
        if request is not self.current or not self.is_busy or self.is_gone():
            return
        if self.is_stream:          # it has begun, and cannot go on
            self.transport.abort()
            return
        self.is_closing |= request.is_last or self.service.is_stopping
        data = encode_response(response, request.id, self.is_closing)
        if request.method == 'HEAD':
            data = data[:-len(response.body)]
        self.transport.write(data)
        self.service.log.request(self, request, response.status, who)
        self.service.counts.status(response.status)
        self.is_busy = False
        self.deadline = self.clock() + (
            READ_TIMEOUT_S if self.buffer else IDLE_TIMEOUT_S)
        if not self.is_closing:
            self._steer()
            if self.buffer:
                self.service.loop.call_soon(self._next)
        elif self.is_refused and not self.service.is_stopping:
            self._linger()
        else:
            self.transport.close()

    def _linger(self):
        """Close once the peer has read: a reset would lose the answer."""
        self.deadline = self.clock() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()


# -- the event stream ---------------------------------------------------------

class Events:
    """GET /events: a change of a server's or tool's readiness.

    Each event but a passing of time carries the place of the audit record
    behind it as its id, so Last-Event-ID resumes, over a restart too. Where
    it cannot, `event: reset` tells the reader to ask for all again.
    """

    def __init__(self, service):
        self.service, self.peers = service, {}  # peer -> [Who, last beat]
        self.seen, self.states = 0, {}
        self.is_running = False

    def drop(self, peer):
        """Forget a client that has gone."""
        self.peers.pop(peer, None)

    def open(self, peer, request, who):
        """Begin a stream, with what came after Last-Event-ID."""
        service = self.service
        if len(self.peers) >= MAX_STREAMS:
            raise HttpError(503, 'too many event streams are open')
        config = service.configs.latest()
        last = request.headers.get('last-event-id', '')
        with service.gate.store.read() as con:
            head = load_last_record(con)[0]
            since = int(last) if re.match(r'[0-9]{1,15}\Z', last) else head
            reset = b''
            if self._has_gap(con, since, head):
                since, reset = head, b'event: reset\ndata: {}\n\n'
            if not self.peers:
                self.seen, self.states = head, service.states(con, config)
            peer.is_stream, peer.deadline = True, None
            peer.transport.write(encode_response(Response(
                200, None, 'text/event-stream', ()), request.id, True)
                + b': ready\nid: %d\n\n' % since + reset)
            self.peers[peer] = [who, peer.clock()]
            self._send([peer], con, config, self._since(con, since))
        service.log.request(peer, request, 200, who)
        service.counts.status(200)
        if not self.is_running:
            self.is_running = True
            service.loop.call_later(TICK_S, self._tick)

    def _has_gap(self, con, since, head):
        """Tell whether a stream cannot be resumed whole: its place is not
        in this log (yet, or any more), or too far back."""
        oldest = load_oldest(con, 1)
        return (since > head or bool(oldest) and since < oldest[0][0] - 1
                or len(find_changes(con, since, MAX_REPLAY + 1))
                > MAX_REPLAY)

    def _since(self, con, after):
        """List what changed after a record: (its place, kind, name)."""
        rows, out = find_changes(con, after, MAX_REPLAY), {}
        for seq, body in reversed(rows):
            data = json.loads(body)['metadata']
            if data.get('server'):
                out['server', data['server']] = seq
            for key in ('added', 'changed', 'vanished', 'tools'):
                for name in data.get(key) or ():
                    out['tool', name] = seq
        return sorted((seq,) + key for key, seq in out.items())

    def _tick(self):
        """Look for changes, while anybody listens."""
        self.is_running = bool(self.peers)
        if not self.peers:
            return
        try:
            with self.service.gate.store.read() as con:
                self._beat(con)
                if self.service.configs.is_settled():
                    self._look(con, self.service.configs.current())
        except PreflightError:
            pass                # whoever asks for a check is told
        self.service.loop.call_later(TICK_S, self._tick)

    def _look(self, con, config):
        head, events = load_last_record(con)[0], []
        if head != self.seen:
            events = self._since(con, self.seen)
        states = self.service.states(con, config)
        named = {name for _, kind, name in events if kind == 'server'}
        events += [(None, 'server', name) for name in sorted(states)
                   if name not in named
                   and states[name] != self.states.get(name)]
        self.seen, self.states = head, states
        self._send(list(self.peers), con, config, events)

    def _beat(self, con):
        """End streams that may not go on; show the others a sign of life."""
        for peer, state in list(self.peers.items()):
            if state[0].token and not self.service.is_valid(con, state[0]):
                self.drop(peer)
                peer.transport.close()
            elif peer.transport.get_write_buffer_size() > MAX_BODY_BYTES:
                peer.transport.abort()
            elif peer.clock() - state[1] > BEAT_S:
                state[1] = peer.clock()
                peer.transport.write(b': still here\n\n')

    def _send(self, peers, con, config, events):
        """Send events, to each reader what is in its scope."""
        made = {}
        for peer in peers:
            caller = caller_of(self.peers[peer][0], config)
            for number, kind, name in events:
                server = name if kind == 'server' else parse_id(name).server
                if not (caller.servers is None or server in caller.servers):
                    continue
                key = caller.tier, kind, name
                if key not in made:
                    made[key] = self._data(con, config, *key)
                if made[key]:
                    text = 'event: %s\ndata: %s\n\n' % (kind, json.dumps(
                        made[key]))
                    if number is not None:
                        text = 'id: %d\n' % number + text
                    peer.transport.write(text.encode('ascii'))

    def _data(self, con, config, tier, kind, name):
        snap = self.service.gate.snapshot(con, config)
        now = self.service.world.now()
        if kind == 'server':
            known = known_of(snap, name)[0]
            return {'server': name, 'state': server_state(
                known, config.settings, now)} if known.server else None
        question = Question([parse_id(name)], Caller(tier, '', '', None), (),
                            now, config.settings, '', '')
        answer = answer_fields(judge_refs(snap, question)[0][0])
        return {key: answer[key] for key in ('id', 'status', 'reason')
                if key in answer}


# -- the sync in the background -----------------------------------------------

class Syncer:
    """Background sync: a child process, so that no request waits for it.

    At start, then every interval with jitter; after a run that failed the
    pause doubles, up to 8 intervals.
    """

    def __init__(self, service, interval_ms):
        self.service, self.interval_ms = service, interval_ms
        self.child, self.thread, self.timer = None, None, None
        self.failures = 0
        self.again = None       # names, id of the run after this one

    def start(self, names=(), request_id=''):
        """Start a sync of some servers, or of all: the id of its records.

        While one runs it is followed by another, once, for all who ask.
        """
        import subprocess
        import threading
        names = list(names)
        if self.child is not None:
            held, given = self.again or (names, request_id)
            self.again = (held + names if held and names else [],
                          given or request_id)
            return self.again[1]
        if self.timer is not None:
            self.timer.cancel()
        fault = self._fault()
        if fault:
            self.service.log.tell('sync: not started: ' + fault)
            self._ended(EXIT_FAILED)
            return request_id
        world = self.service.world
        words = ['--home', world.home]
        for path in world.configs:
            words += ['--config', path]
        for name in ('dialect', 'workspace', 'ca_file'):
            if getattr(world, name):
                words += ['--' + name.replace('_', '-'),
                          getattr(world, name)]
        words += self._notify_words()
        if request_id:
            words += ['--request-id=' + request_id]
        try:
            self.child = subprocess.Popen(
                [sys.executable, '-I', os.path.abspath(__file__), 'sync']
                + words + ['--'] + names, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env={name: value for name, value in world.env.items()
                     if not name.startswith('PREFLIGHT_')})
        except OSError as exc:
            self.service.log.tell('sync cannot be started: %s'
                                  % os_reason(exc))
            self._ended(EXIT_FAILED)
        else:
            self.thread = threading.Thread(target=self._follow,
                                           args=(self.child,))
            self.thread.start()
        return request_id

    def _notify_words(self):
        """Hand down --notify, unless its program has gone meanwhile: that
        would end each sync before it looks. News is kept until it is back."""
        text = self.service.settings.notify
        try:
            read_notify(self.service.world, text)
        except UsageError as exc:
            self.service.log.tell('sync: warning: %s' % exc)
            return []
        return ['--notify=' + text] if text else []

    def _fault(self):
        """Say why the config cannot be used, '' when it can.

        A sync by hand does without the lockfile, so that a first one can be
        made; by one that has gone a service would hold back no launch.
        """
        try:
            self.service.configs.latest()
        except ConfigError as exc:
            return str(exc)
        return ''

    def _follow(self, child):
        """Pass on what a sync says, and its end; runs in a thread."""
        call = self.service.loop.call_soon_threadsafe
        for line in child.stderr:
            call(self.service.log.tell, 'sync: ' + line.decode(
                'utf-8', 'replace').rstrip())
        child.stderr.close()
        call(self._ended, child.wait())

    def _ended(self, code):
        self.child = None
        if self.service.is_stopping:
            return
        self.failures = self.failures + 1 if code == EXIT_FAILED else 0
        again, self.again = self.again, None
        if again is not None:
            self.start(*again)
        elif self.interval_ms:
            spread = 0.9 + 0.2 * self.service.world.random(1)[0] / 255
            self.timer = self.service.loop.call_later(
                self.interval_ms / 1000 * spread * 2 ** min(
                    self.failures, 3), self.start)

    def stop(self):
        """End a sync under way: it gives its leases back."""
        if self.timer is not None:
            self.timer.cancel()
        if self.child is not None:
            self.child.terminate()

    def join(self):
        """Wait for a sync that was told to end, and end it in any case."""
        if self.thread is not None:
            self.thread.join(SHUTDOWN_S)
            if self.thread.is_alive():
                self.child.kill()
                self.thread.join()


# -- routes -------------------------------------------------------------------

AGENT_TOOL_KEYS = ('id', 'server', 'name', 'listed', 'status', 'blocked',
                   'denied', 'annotations')
AGENT_SERVER_KEYS = ('server', 'state', 'tools', 'pending', 'changed')

Options = namedtuple('Options', 'ids type status request_id since until '
                                'limit offset actor')
Options.__doc__ = """What a request passes to a command, as the CLI would."""


def make_options(**given):
    """Make Options; what is not given is as without any option."""
    plain = dict.fromkeys(Options._fields)
    plain.update(ids=[], limit='50', offset='0')
    return Options(**dict(plain, **given))


def cut_rows(rows, who, caller, keys):
    """Cut rows to a caller's scope, and for an agent to some keys."""
    rows = [row for row in rows if caller.servers is None
            or row['server'] in caller.servers]
    if who.token is None:
        return rows
    return [{key: row[key] for key in keys} for row in rows]


def get_servers(world, config, request, who):
    """GET /api/v1/servers: what is known of each, cut to the caller."""
    rows = cut_rows(cmd_servers_list(world, make_options()), who,
                    caller_of(who, config), AGENT_SERVER_KEYS)
    return respond({'success': True, 'data': {'servers': rows}})


def get_tools(world, config, request, who):
    """GET /api/v1/tools and /servers/{name}/tools, cut to the caller."""
    caller, names = caller_of(who, config), list(request.names)
    if names and (look_up(config, names[0])[0] is None
                  or caller.servers is not None
                  and names[0] not in caller.servers):
        raise HttpError(404, 'no such server')
    rows = cut_rows(cmd_tools_list(world, make_options(ids=names)), who,
                    caller, AGENT_TOOL_KEYS)
    return respond({'success': True, 'data': {'tools': rows}})


def get_health(world, config, request, who):
    """GET /api/v1/health: what is recorded, and no look or probe."""
    return respond({'success': True, 'data': recorded_health(world, config)})


def get_activities(world, config, request, who):
    """GET /api/v1/activity: records; an agent's, since it was made."""
    given = {key: values[0] for key, values in request.query.items()
             if key != 'apikey'}
    if who.token:
        since = max(who.token.at, parse_time(given.get('since', '1970-01-01')))
        given.update(actor=who.token.name, since=format_time(since))
    try:
        found = cmd_activity_list(world, make_options(**given))
    except UsageError as exc:
        raise HttpError(400, str(exc).lstrip('-')) from exc
    return respond({'success': True, 'data': found})


def get_activity(world, config, request, who):
    """GET /api/v1/activity/{id}: one record, or the same 404 for all."""
    try:
        found = cmd_activity_show(world, make_options(ids=request.names))
        activity = found['activity']
    except UsageError:
        activity = None
    if not activity or who.token and (
            activity['actor'] != who.token.name
            or parse_time(activity['timestamp']) < who.token.at):
        raise HttpError(404, 'no such record')
    return respond({'success': True, 'data': found})


def do_preflight(service, peer, request, who):
    """POST /api/v1/preflight: a check, answered when it is recorded."""
    parse = service.parse_short if len(request.body) < 4096 else parse_check
    asked = parse(request.body, bool(who.token and who.token.required))
    service.gate.submit(Check(peer, request, who, asked))


def do_ready(service, peer, request, who):
    """GET /readyz: one bit, or a check where tool= names ids."""
    for key in request.query:
        if key not in ('tool', 'apikey'):
            raise HttpError(400, 'unknown parameter %s' % json.dumps(key))
    ids = request.query.get('tool')
    if ids is None:
        return service.readiness()
    asked = Asked(asked_refs([{'id': name} for name in ids]), '',
                  frozenset(), 0)
    service.gate.submit(Check(peer, request, who, asked, True))
    return None


def do_sync(service, peer, request, who):
    """POST /api/v1/sync: start a look at servers in the background."""
    table = strict_json(request.body) if request.body.strip() else {}
    only_keys(table, ('servers',))
    names = typed(table, 'servers', is_texts, 'an array of strings') or []
    config = service.configs.latest()
    for name in names:
        if look_up(config, name)[0] is None:
            raise HttpError(400, 'no server %s is configured'
                            % json.dumps(name))
    return respond({'success': True, 'data': {
        'id': service.syncer.start(names, request.id)}}, 202)


def do_metrics(service, peer, request, who):
    """GET /metrics, as Prometheus text."""
    config = service.configs.latest()
    with service.gate.store.read() as con:
        states = list(service.states(con, config).values())
    return respond_text(
        service.counts.render(len(service.gate.waiting), states),
        kind='text/plain; version=0.0.4; charset=utf-8')


# What GET /api/v1/openapi.json answers, but for what is the same everywhere.
# It is text, so that no other command has to compile it.
OPENAPI = r"""{"openapi": "3.0.3",
"info": {"title": "preflight", "version": "@VERSION@",
  "description": "Are these MCP tools ready, or exactly why not."},
"security": [{"key": []}, {"bearer": []}],
"paths": {
"/healthz": {"get": {"summary": "The process answers.", "security": [],
  "responses": {"200": {"$ref": "#/components/responses/word"}}}},
"/readyz": {"get": {
  "summary": "One word for all; with tool=ID the answer of a check.",
  "security": [{}, {"key": []}, {"bearer": []}],
  "parameters": [{"name": "tool", "in": "query", "schema": {
    "type": "array", "items": {"type": "string"}, "maxItems": 100}}],
  "responses": {"200": {"$ref": "#/components/responses/ready"},
    "503": {"$ref": "#/components/responses/ready"}}}},
"/api/v1/preflight": {"post": {
  "summary": "Check required tools. HTTP tells that the check ran.",
  "requestBody": {"required": true, "content": {"application/json": {
    "schema": {"type": "object", "required": ["tools"],
      "additionalProperties": false, "properties": {
      "tools": {"type": "array", "minItems": 1, "maxItems": 100, "items": {
        "type": "object", "required": ["id"], "additionalProperties": false,
        "properties": {"id": {"type": "string"},
          "pin_hash": {"type": "string", "nullable": true}}}},
      "profile": {"type": "string", "nullable": true},
      "policy": {"type": "object", "nullable": true,
        "additionalProperties": false, "properties": {
        "read_only_only": {"type": "boolean", "nullable": true},
        "exclude_destructive": {"type": "boolean", "nullable": true},
        "exclude_open_world": {"type": "boolean", "nullable": true}}},
      "wait_ms": {"type": "integer", "minimum": 0, "maximum": 10000,
        "nullable": true}}}}}},
  "responses": {"200": {"$ref": "#/components/responses/report"}}}},
"/api/v1/servers": {"get": {"summary": "The configured servers."}},
"/api/v1/servers/{name}/tools": {"get": {"summary": "A server's tools.",
  "parameters": [{"name": "name", "in": "path", "required": true,
    "schema": {"type": "string"}}]}},
"/api/v1/tools": {"get": {"summary": "All tools."}},
"/api/v1/health": {"get": {
  "summary": "What is recorded of each server's health. No look, no probe.",
  "responses": {"200": {"description": "Whatever the states are.",
    "content": {"application/json": {"schema": {
      "$ref": "#/components/schemas/health"}}}}}}},
"/api/v1/activity": {"get": {"summary": "Audit records, newest first.",
  "parameters": [
    {"name": "type", "in": "query", "schema": {"type": "string"}},
    {"name": "status", "in": "query", "schema": {"type": "string"}},
    {"name": "request_id", "in": "query", "schema": {"type": "string"}},
    {"name": "since", "in": "query", "schema": {
      "type": "string", "format": "date-time"}},
    {"name": "until", "in": "query", "schema": {
      "type": "string", "format": "date-time"}},
    {"name": "limit", "in": "query", "schema": {
      "type": "integer", "minimum": 1, "maximum": 1000, "default": 50}},
    {"name": "offset", "in": "query", "schema": {
      "type": "integer", "minimum": 0, "default": 0}}]}},
"/api/v1/activity/{id}": {"get": {"summary": "One audit record.",
  "parameters": [{"name": "id", "in": "path", "required": true,
    "schema": {"type": "string"}}]}},
"/api/v1/sync": {"post": {"summary": "Look at servers, all if none named.",
  "requestBody": {"content": {"application/json": {"schema": {
    "type": "object", "additionalProperties": false, "properties": {
      "servers": {"type": "array", "nullable": true,
        "items": {"type": "string"}}}}}}},
  "responses": {"202": {"$ref": "#/components/responses/data"}}}},
"/api/v1/openapi.json": {"get": {"summary": "This document.",
  "responses": {"200": {"description": "OpenAPI.", "content": {
      "application/json": {"schema": {"type": "object"}}}}}}},
"/metrics": {"get": {"summary": "Prometheus text.",
  "responses": {"200": {"$ref": "#/components/responses/word"}}}},
"/events": {"get": {"summary": "Server-Sent Events: changes of readiness.",
  "parameters": [{"name": "Last-Event-ID", "in": "header",
    "schema": {"type": "string"}}],
  "responses": {"200": {
    "description": "A stream: server, tool; reset: ask for all again.",
    "content": {
      "text/event-stream": {"schema": {"type": "string"}}}}}}}},
"components": {
"securitySchemes": {
  "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
  "bearer": {"type": "http", "scheme": "bearer"}},
"responses": {
  "error": {"description": "Why not, in one sentence.", "content": {
    "application/json": {"schema": {"$ref": "#/components/schemas/error"}}}},
  "word": {"description": "Plain text.", "content": {
    "text/plain": {"schema": {"type": "string"}}}},
  "data": {"description": "What was asked for.", "content": {
    "application/json": {"schema": {"$ref": "#/components/schemas/data"}}}},
  "report": {"description": "The check ran; see verdict.", "content": {
    "application/json": {"schema": {"$ref":
      "#/components/schemas/report"}}}},
  "ready": {"description": "200 ready, 503 not.", "content": {
    "text/plain": {"schema": {"type": "string"}},
    "application/json": {"schema": {"anyOf": [
      {"$ref": "#/components/schemas/report"},
      {"$ref": "#/components/schemas/error"}]}}}}},
"schemas": {
  "error": {"type": "object", "additionalProperties": false,
    "required": ["success", "error", "request_id"], "properties": {
    "success": {"type": "boolean", "enum": [false]},
    "error": {"type": "string"}, "request_id": {"type": "string"}}},
  "data": {"type": "object", "additionalProperties": false,
    "required": ["success", "data"], "properties": {
    "success": {"type": "boolean", "enum": [true]},
    "data": {"type": "object"}}},
  "report": {"type": "object", "additionalProperties": false,
    "required": ["success", "data"], "properties": {
    "success": {"type": "boolean", "enum": [true]},
    "data": {"type": "object", "additionalProperties": false,
      "required": ["verdict", "checked_at", "tools"], "properties": {
      "verdict": {"type": "string", "enum": ["ready", "degraded_retryable",
        "blocked", "unknown_ids"]},
      "checked_at": {"type": "string", "format": "date-time"},
      "waited_ms": {"type": "integer", "minimum": 0},
      "tools": {"type": "array", "minItems": 1, "items": {
        "$ref": "#/components/schemas/result"}}}}}},
  "health": {"type": "object", "additionalProperties": false,
    "required": ["success", "data"], "properties": {
    "success": {"type": "boolean", "enum": [true]},
    "data": {"type": "object", "additionalProperties": false,
      "required": ["overall", "checked_at", "servers"], "properties": {
      "overall": {"type": "string", "enum": ["OFFLINE", "DEGRADED",
        "HEALTHY"]},
      "checked_at": {"type": "string", "format": "date-time"},
      "servers": {"type": "array", "items": {
        "$ref": "#/components/schemas/checkup"}}}}}},
  "checkup": {"type": "object", "additionalProperties": false,
    "required": ["server", "state", "reason", "evidence", "tools_visible",
      "tools_expected", "credential_source", "probe", "what_to_do"],
    "properties": {
    "server": {"type": "string"},
    "state": {"type": "string", "enum": ["OFFLINE", "DEGRADED",
      "PRESENT (untested)", "HEALTHY"]},
    "reason": {"type": "string"}, "evidence": {"type": "string"},
    "tools_visible": {"type": "integer", "minimum": 0},
    "tools_expected": {"type": "array", "items": {"type": "string"}},
    "credential_source": {"type": "string", "enum": ["shell env", "config",
      "userConfig", "none", "unknown"]},
    "probe": {"type": "object", "additionalProperties": false,
      "required": ["status", "ms", "skipped"], "properties": {
      "status": {"type": "integer", "nullable": true},
      "ms": {"type": "integer", "minimum": 0, "nullable": true},
      "skipped": {"type": "string", "nullable": true}}},
    "what_to_do": {"type": "array", "minItems": 1,
      "items": {"type": "string"}}}},
  "result": {"type": "object", "additionalProperties": false,
    "required": ["id", "status"], "properties": {
    "id": {"type": "string"},
    "status": {"type": "string", "enum": ["ready", "unavailable"]},
    "reason": {"type": "string"}, "retryable": {"type": "boolean"},
    "action": {"type": "string"}, "detail": {"type": "string"},
    "remediation": {"type": "string"}, "hash": {"type": "string",
      "pattern": "^sha256/v[0-9]+:[0-9a-f]{64}$"},
    "did_you_mean": {"type": "array", "maxItems": 3,
      "items": {"type": "string"}},
    "observed_at": {"type": "string", "format": "date-time"},
    "cause": {"type": "string"}}}}}}
"""


def get_openapi(service, peer, request, who):
    """GET /api/v1/openapi.json: this service, described."""
    document = json.loads(OPENAPI.replace('@VERSION@', VERSION))
    document['paths']['/api/v1/events'] = document['paths']['/events']
    for operations in document['paths'].values():
        for operation in operations.values():
            found = operation.setdefault('responses', {'200': {
                '$ref': '#/components/responses/data'}})
            found['default'] = {'$ref': '#/components/responses/error'}
    return respond(document)


def do_events(service, peer, request, who):
    """GET /events: a stream of what becomes ready, or no longer is."""
    service.events.open(peer, request, who)


def reader(run, known=()):
    """Make a handler of what reads much: it runs in a thread of its own.

    known: the parameters it takes, once each. What a filter that nobody
    knows was to leave out would be answered like the rest.
    """
    def do_read(service, peer, request, who):
        for key, values in request.query.items():
            if key not in known and key != 'apikey' or len(values) > 1:
                raise HttpError(400, 'unknown or repeated parameter %s'
                                % json.dumps(key))
        service.read(peer, request, who, run)
    return do_read


NOBODY, ANYBODY = 'nobody', 'anybody'   # beside OPERATOR: who is asked for

# path -> method -> (who may, handler); {} is one segment.
ROUTES = {
    '/healthz': {'GET': (NOBODY, lambda *_: respond_text('ok'))},
    '/readyz': {'GET': (NOBODY, do_ready)},
    '/api/v1/preflight': {'POST': (ANYBODY, do_preflight)},
    '/api/v1/servers': {'GET': (ANYBODY, reader(get_servers))},
    '/api/v1/servers/{}/tools': {'GET': (ANYBODY, reader(get_tools))},
    '/api/v1/tools': {'GET': (ANYBODY, reader(get_tools))},
    '/api/v1/health': {'GET': (OPERATOR, reader(get_health))},
    '/api/v1/activity': {'GET': (ANYBODY, reader(
        get_activities, ACTIVITY_FILTERS))},
    '/api/v1/activity/{}': {'GET': (ANYBODY, reader(get_activity))},
    '/api/v1/sync': {'POST': (OPERATOR, do_sync)},
    '/metrics': {'GET': (OPERATOR, do_metrics)},
    '/events': {'GET': (ANYBODY, do_events)},
    '/api/v1/events': {'GET': (ANYBODY, do_events)},
    '/api/v1/openapi.json': {'GET': (ANYBODY, get_openapi)},
}


def find_route(request):
    """Find the route of a request: (Request with names, who may, handler).

    Raises HttpError 404, or 405 with Allow.
    """
    from urllib.parse import unquote
    path = request.path
    found = re.match(r'(/api/v1/(?:servers|activity)/)([^/]+)(.*)\Z', path)
    if found:
        path = found.group(1) + '{}' + found.group(3)
        request = request._replace(names=(unquote(found.group(2)),))
    verbs = ROUTES.get(path)
    if verbs is None:
        raise HttpError(404, 'no such path')
    if request.method not in verbs:
        allowed = ', '.join(verbs)
        raise HttpError(405, 'this path takes %s' % allowed,
                        [('Allow', allowed)])
    return (request,) + verbs[request.method]


# -- hosts, queries, peers ----------------------------------------------------

def is_host_allowed(host, is_loopback, names):
    """Decide whether a Host may be ours (DNS rebinding, contract 5).

    is_loopback: we are bound to loopback, and other addresses are not us.
    """
    import ipaddress
    host = host.lower()
    if re.match(r'(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]+)?\Z', host):
        return True
    found = re.match(r'(?:\[([0-9a-f:.]+)\]|([^:\[\]/@]+))(?::[0-9]+)?\Z',
                     host)
    if not found:
        return False
    name = found.group(1) or found.group(2)
    if name in names or host in names:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback or not is_loopback
    except ValueError:
        return False


def parse_query(text):
    """Read a query string: name -> values, in order."""
    from urllib.parse import unquote_plus
    out = {}
    for part in text.split('&') if text else ():
        name, _, value = part.partition('=')
        out.setdefault(unquote_plus(name), []).append(unquote_plus(value))
    return out


def make_head_parser():
    """Make the function that lends us http.server's reading of a head.

    (request line, Connection, Expect) -> (method, path, query, is_last,
    is_expecting). It is given the headers it decides by, and no others: the
    parser of mail headers behind it costs more than a check. Clients repeat
    themselves, so what it said is kept.
    """
    import functools
    import http.server
    import io

    class Head(http.server.BaseHTTPRequestHandler):
        """Parses a head that check_framing has let through."""

        protocol_version, fault, is_expecting = 'HTTP/1.1', 400, False

        def __init__(self, line, headers):
            self.raw_requestline = line + b'\r\n'
            self.rfile = io.BytesIO(headers.encode('latin-1') + b'\r\n')

        def send_error(self, code, message=None, explain=None):
            """Note a refusal, where http.server would send it."""
            self.fault = int(code)

        def handle_expect_100(self):
            """Leave it to Peer, which first looks who asks."""
            self.is_expecting = True
            return True

    @functools.lru_cache(64)
    def parse(line, connection, expect):
        head = Head(line, 'Connection: %s\r\nExpect: %s\r\n' % (
            connection, expect))
        if not head.parse_request():
            raise HttpError(head.fault if head.fault in PHRASES else 400,
                            'the head cannot be read')
        path, _, query = head.path.partition('?')
        return (head.command, path, parse_query(query),
                head.close_connection or 'close' in connection.lower(),
                head.is_expecting)

    return parse


# -- the service --------------------------------------------------------------

ServeSettings = namedtuple('ServeSettings', (
    'key is_loopback hosts ready log_format sync_ms write_log notify'))
ServeSettings.__doc__ = """What serve was started with. key: bytes; hosts:
names to answer to; ready: Refs folded into /readyz; sync_ms: 0 for no
background sync; notify: the command that syncs are given, or None."""


class Log:
    """The lines on stderr; those of a tick are written together."""

    def __init__(self, world, settings, loop):
        self.world, self.settings, self.loop = world, settings, loop
        self.lines, self.is_json = [], settings.log_format == 'json'

    def tell(self, line):
        """Log a line that is about no request."""
        if self.is_json:
            line = json.dumps({'time': format_time(self.world.now()),
                               'message': line})
        self._add(safe_text(line))

    def request(self, peer, request, status, who):
        """Log one request; its query may hold a key."""
        actor = '-' if who is None else 'operator'
        row = (format_time(self.world.now()), request.method, request.path,
               status, int((peer.clock() - peer.start) * 1000), request.id,
               who.token.name if who and who.token else actor)
        if self.is_json:
            self._add(json.dumps(dict(zip((
                'time', 'method', 'path', 'status', 'ms', 'request_id',
                'actor'), row))))
        else:
            self._add('%s %s %s %d %dms %s %s' % row)

    def _add(self, line):
        if not self.lines:
            self.loop.call_soon(self.write)
        self.lines.append(line)

    def write(self):
        """Write what has come together."""
        lines, self.lines = self.lines, []
        if lines:
            self.settings.write_log('\n'.join(lines) + '\n')


class Service:
    """All that the handlers share."""

    def __init__(self, world, settings, loop, configs):
        import concurrent.futures
        import functools
        self.world, self.settings, self.loop = world, settings, loop
        self.configs, self.counts = configs, Counts()
        self.log = Log(world, settings, loop)
        self.gate, self.events = Gate(self), Events(self)
        self.syncer = Syncer(self, settings.sync_ms)
        self.parse_line = make_head_parser()
        # Clients repeat themselves: what was read of a body is kept.
        self.parse_short = functools.lru_cache(128)(parse_check)
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.peers, self.servers = set(), []
        self.is_stopping, self.signal = False, None

    def admit_peer(self, peer):
        """Take a new connection, dropping the idlest when there are many.

        One by the Unix socket must be of this user, where the OS tells.
        """
        sock = peer.transport.get_extra_info('socket')
        if peer.is_local and peer_uid(sock) not in (None, os.getuid()):
            return False
        if len(self.peers) >= MAX_PEERS:
            idle = [other for other in self.peers if not other.is_busy]
            if not idle:
                return False
            idlest = min(idle, key=lambda other: other.deadline)
            self.peers.discard(idlest)
            idlest.transport.abort()
        self.peers.add(peer)
        return True

    def parse_head(self, line, headers):
        """Read a head into a Request; raises HttpError."""
        method, path, query, is_last, is_expecting = self.parse_line(
            line, headers.get('connection', ''), headers.get('expect', ''))
        if not is_expecting:
            headers.pop('expect', None)
        request_id = headers.get('x-request-id', '')
        if not re.match(REQUEST_ID, request_id):
            request_id = new_request_id(self.world)
        return Request(method, path, query, headers, b'', request_id,
                       is_last, ())

    def is_valid(self, con, who):
        """Tell whether a token still stands as it was read."""
        return load_token(con, who.digest) == who.token and (
            who.token.expires_at is None
            or self.world.now() < who.token.expires_at)

    def _credential(self, request):
        """Find the credential presented, as bytes; None for none.

        The first one present counts (contract 5).
        """
        headers = request.headers
        if 'x-api-key' in headers:
            return headers['x-api-key'].encode('latin-1')
        if 'authorization' in headers:
            scheme, _, given = headers['authorization'].partition(' ')
            return (given.strip() if scheme.lower() == 'bearer'
                    else '').encode('latin-1')
        if request.method == 'GET' and 'apikey' in request.query:
            return request.query['apikey'][0].encode('utf-8', 'replace')
        return None

    def identify(self, peer, request):
        """Say whose credential a request carries: Who, or None.

        The Unix socket needs none; one presented there narrows.
        """
        import hmac
        given = self._credential(request)
        if given is None:
            return Who(OPERATOR, None, '') if peer.is_local else None
        if hmac.compare_digest(given, self.settings.key):
            return Who(OPERATOR, None, '')
        text = given.decode('latin-1')
        if not text.startswith(SECRET_PREFIX):
            return None
        with self.gate.store.read() as con:
            if load_meta(con, 'token_key') is None:
                return None
            digest = hash_token(con, self.world, text)
            who = Who(AGENT, load_token(con, digest), digest)
            return who if who.token and self.is_valid(con, who) else None

    def _check_host(self, headers):
        """Refuse a foreign Host or Origin; raises HttpError 403."""
        names = self.settings.hosts | self.configs.hosts
        host, origin = headers.get('host'), headers.get('origin')
        if host is not None and not is_host_allowed(
                host, self.settings.is_loopback, names):
            raise HttpError(403, 'the host %s is not allowed; see '
                            '--allow-host' % json.dumps(host))
        if origin is None:
            return
        found = re.match(r'(?i)https?://([^/]+)\Z', origin)
        if not found or not is_host_allowed(
                found.group(1), self.settings.is_loopback, names):
            raise HttpError(403, 'the origin %s is not allowed; see '
                            '--allow-host' % json.dumps(origin))

    def admit(self, peer, request):
        """Decide who asks and for what: (Request, Who or None, handler).

        Raises HttpError 401, 403, 404 or 405.
        """
        is_probe = request.path == '/healthz' or (
            request.path == '/readyz' and 'tool' not in request.query)
        if not peer.is_local and not is_probe:
            self._check_host(request.headers)
        request, tier, run = find_route(request)
        if is_probe:
            return request, None, run
        who = self.identify(peer, request)
        if who is None:
            raise HttpError(401, 'a credential is missing or wrong: send '
                            'X-API-Key or Authorization: Bearer', [
                ('WWW-Authenticate', 'Bearer realm="preflight"')])
        if tier == OPERATOR and who.tier != OPERATOR:
            raise HttpError(403, 'this is for the operator only')
        return request, who, run

    def handle(self, peer, request):
        """Serve one request; whatever goes wrong costs only this one."""
        who = None
        try:
            if self.is_stopping:
                raise HttpError(503, 'the service is shutting down')
            request, who, run = self.admit(peer, request)
            peer.current = request
            response = run(self, peer, request, who)
        except Exception as exc:
            response = respond_error(self.error_of(exc), request.id, who)
        if response is not None:
            peer.reply(request, response, who)

    def error_of(self, exc):
        """Give the PreflightError to answer with; others are told."""
        if isinstance(exc, PreflightError):
            return exc
        self.log.tell('internal error: %s: %s' % (type(exc).__name__, exc))
        return HttpError(500, 'internal error')

    def note_fault(self, loop, context):
        """Tell what went wrong in the loop, but for a peer's own doing."""
        exc = context.get('exception')
        if exc is not None and not isinstance(exc, OSError):
            self.error_of(exc)

    def read(self, peer, request, who, run):
        """Answer from the store in the reading thread."""
        if not self.configs.is_settled():
            self.loop.call_later(CONFIG_RETRY_S, self.handle, peer, request)
            return

        def done(future):
            try:
                response = future.result()
            except Exception as exc:
                response = respond_error(self.error_of(exc), request.id, who)
            peer.reply(request, response, who)
        quiet = self.world._replace(tell=lambda line: None)
        self.loop.run_in_executor(
            self.pool, run, quiet, self.configs.current(), request,
            who).add_done_callback(done)

    def states(self, con, config):
        """Say what is known of each server: name -> state."""
        snap, now = self.gate.snapshot(con, config), self.world.now()
        known = [known_of(snap, name)[0] for name in config.entries]
        return {row.server.name: server_state(row, config.settings, now)
                for row in known if row.server}

    def readiness(self):
        """Fold state, config and the set of --ready into one bit."""
        is_ready = False
        try:
            config = self.configs.latest()
            with self.gate.store.read() as con:
                question = Question(
                    self.settings.ready, operator(config), (),
                    self.world.now(), config.settings, '', '')
                snap = self.gate.snapshot(con, config)
                is_ready = not any(answer.reason for answer, _ in
                                   judge_refs(snap, question))
        except PreflightError:
            pass
        return respond_text('ready' if is_ready else 'unready',
                            200 if is_ready else 503)

    def sweep(self):
        """End what is too slow or idle."""
        now = self.world.clock()
        for peer in list(self.peers):
            if not peer.is_busy and now > peer.deadline:
                peer.expire()
        self.loop.call_later(SWEEP_S, self.sweep)

    def stop(self, number):
        """Finish what is in flight, then end (SIGTERM)."""
        if self.is_stopping:
            return
        self.is_stopping, self.signal = True, number
        for server in self.servers:
            server.close()
        self.syncer.stop()
        for check in list(self.gate.waiting):
            self.gate.finish(check)
        for peer in list(self.peers):
            if peer.is_stream or not (peer.is_busy or peer.buffer
                                      or peer.request):
                peer.transport.close()
            elif not peer.is_busy:
                peer.refuse(HttpError(503, 'the service is shutting down'))
        self._end_by(self.world.clock() + SHUTDOWN_S)

    def _end_by(self, end):
        if self.peers and self.world.clock() < end:
            self.loop.call_later(0.02, self._end_by, end)
        else:
            self.loop.stop()


# -- starting it: key, addresses, sockets, TLS --------------------------------

def make_api_key(world, path):
    """Make the key at the first start of all; tells whether it did."""
    make_home(world.home)
    lock = FileLock(os.path.join(world.home, 'store.lock'), world)
    try:
        with lock:
            if os.path.exists(path):
                return False
            with os.fdopen(open_private(path), 'wb') as file:
                file.write(world.random(32).hex().encode('ascii') + b'\n')
            return True
    except OSError as exc:
        raise StoreError('cannot write the API key %s: %s' % (
            path, os_reason(exc))) from exc
    finally:
        lock.close()


def load_api_key(world, given_path):
    """Find the API key: (bytes, where it stands, made by this start).

    --api-key-file, PREFLIGHT_API_KEY, else the file api_key in the state
    directory, which is made at first start (contract 5).
    """
    given = world.env.get('PREFLIGHT_API_KEY', '').strip()
    if given_path is None and given:
        return os.fsencode(given), 'PREFLIGHT_API_KEY', False
    path, is_new = given_path, False
    if path is None:
        path = os.path.join(world.home, 'api_key')
        is_new = make_api_key(world, path)
    try:
        with open(path, 'rb') as source:
            key = source.read(4096).strip()
    except OSError as exc:
        raise StoreError('cannot read the API key %s: %s' % (
            path, os_reason(exc))) from exc
    if not key:
        raise StoreError('the API key %s is empty' % path)
    return key, path, is_new


def parse_listen(text):
    """Read HOST:PORT: (host, port); raises UsageError."""
    found = re.match(r'(?:\[([^\]]+)\]|([^:]*)):([0-9]{1,5})\Z', text)
    if not found or int(found.group(3)) > 65535:
        raise UsageError('--listen %s is not HOST:PORT' % json.dumps(text))
    return found.group(1) or found.group(2) or '0.0.0.0', int(
        found.group(3))


def bind_tcp(host, port):
    """Bind a listening socket: (socket, is it loopback only)."""
    import ipaddress
    import socket
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                   flags=socket.AI_PASSIVE)
        found.sort(key=lambda row: row[0] != socket.AF_INET)
        family, kind, proto, _, address = found[0]
        sock = socket.socket(family, kind, proto)
        if os.name != 'nt':     # there it would let others take the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(512)
    except (OSError, UnicodeError) as exc:
        why = os_reason(exc) if isinstance(exc, OSError) else 'no such host'
        raise UsageError('cannot listen on %s port %d: %s' % (
            host, port, why)) from exc
    return sock, ipaddress.ip_address(
        address[0].partition('%')[0]).is_loopback


def remove_stale(path):
    """Remove a socket file that nobody listens on, and ours only."""
    import socket
    import stat
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.getuid():
        raise UsageError('--socket %s exists and is not a socket of ours'
                         % path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as exc:
            raise UsageError('--socket %s: %s' % (
                path, os_reason(exc))) from exc
        else:
            raise UsageError('another server listens on %s' % path)


def bind_unix(path):
    """Bind a Unix socket, 0600 from the start; raises UsageError."""
    import socket
    if not hasattr(socket, 'AF_UNIX'):
        raise UsageError('this system has no Unix sockets')
    if len(os.fsencode(path)) > 103:
        raise UsageError('--socket %s is too long: at most 103 bytes' % path)
    place = os.path.dirname(path)
    make_home(place)
    if os.stat(place).st_mode & 0o77:
        raise UsageError('the directory of --socket %s must be 0700: who may '
                         'write there could answer in our place' % path)
    sock, before = None, os.umask(0o177)
    try:
        remove_stale(path)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(128)
    except OSError as exc:
        if sock is not None:
            sock.close()
        raise UsageError('cannot listen on %s: %s' % (
            path, os_reason(exc))) from exc
    finally:
        os.umask(before)
    return sock


def load_tls(cert, key):
    """Load --tls-cert and --tls-key: an SSLContext, None without them."""
    import ssl
    if (cert is None) != (key is None):
        raise UsageError('--tls-cert and --tls-key go together')
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if hasattr(ssl, 'TLSVersion'):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    else:
        context.options |= ssl.OP_NO_TLSv1 | ssl.OP_NO_TLSv1_1
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as exc:
        raise UsageError('cannot use --tls-cert %s with --tls-key %s: %s' % (
            cert, key, exc)) from exc
    return context


def listen(service, sock, context, path):
    """Start to accept, by TCP and by a Unix socket: the places, in words."""
    loop, places = service.loop, []
    if sock is not None:
        more = {}
        if context and sys.version_info >= (3, 7):
            more['ssl_handshake_timeout'] = READ_TIMEOUT_S
        service.servers.append(loop.run_until_complete(loop.create_server(
            lambda: Peer(service, False), sock=sock, ssl=context,
            backlog=512, **more)))
        name = sock.getsockname()
        places.append('%s://%s:%d' % (
            'https' if context else 'http',
            '[%s]' % name[0] if ':' in name[0] else name[0], name[1]))
    if path:
        service.servers.append(loop.run_until_complete(
            loop.create_unix_server(lambda: Peer(service, True),
                                    sock=bind_unix(path))))
        places.append('unix://' + path)
    return ' and '.join(places)


def run_loop(service, path):
    """Serve until a signal ends it; path: of the Unix socket, or ''."""
    import signal
    loop, inode = service.loop, path and os.stat(path).st_ino
    loop.set_exception_handler(service.note_fault)
    for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
        number = getattr(signal, name, None)
        if number is not None and (
                signal.getsignal(number) != signal.SIG_IGN):
            loop.add_signal_handler(number, service.stop, number)
    loop.call_soon(service.sweep)
    if service.settings.sync_ms:
        loop.call_soon(service.syncer.start)
    try:
        loop.run_forever()
    finally:
        service.syncer.join()
        service.pool.shutdown()
        service.log.write()
        loop.set_exception_handler(lambda *_: None)
        service.gate.store.close()
        loop.close()
        if path and os.path.exists(path) and os.stat(path).st_ino == inode:
            os.unlink(path)     # and never that of a later server


def ready_refs(options):
    """Read --ready ID,ID: Refs; raises UsageError."""
    refs = [parse_id(name) for words in options.ready or ()
            for name in words.split(',')]
    for ref in refs:
        if not ref.server:
            raise UsageError('--ready %s: %s' % (json.dumps(ref.id),
                                                 id_hint(ref)))
    return refs


def cmd_serve(world, options):
    """Serve the REST gate until a signal ends it; raises Interrupted."""
    import asyncio
    import gc
    gc.enable()                 # main() turns it off, for short runs
    if options.log_format not in ('text', 'json'):
        raise UsageError('--log-format takes text or json')
    if options.socket == '':
        raise UsageError('--socket is empty')
    read_notify(world, options.notify)
    interval, path = None, os.path.abspath(options.socket or '')
    if options.sync_interval is not None:
        interval = parse_duration(options.sync_interval)
    configs, refs = Configs(world, interval), ready_refs(options)
    settings, sock, is_loopback = configs.latest().settings, None, True
    context = load_tls(options.tls_cert, options.tls_key)
    if options.listen is not None or not options.socket:
        sock, is_loopback = bind_tcp(*parse_listen(
            settings['listen'] if options.listen is None
            else options.listen))
    key, place, is_new = load_api_key(world, options.api_key_file)
    if is_new and not is_loopback:
        raise UsageError(
            'will not listen beyond loopback with a key that nobody has yet',
            'The key was just made: copy it from %s and start again.'
            % place)
    is_quiet = options.no_sync or interval == 0
    service = Service(world, ServeSettings(
        key, is_loopback, frozenset(name.lower() for name in
                                    options.allow_host or ()), refs,
        options.log_format, 0 if is_quiet else settings['sync_interval'],
        options.write_log, options.notify), asyncio.new_event_loop(),
        configs)
    service.gate.store.connect()
    places = listen(service, sock, context, options.socket and path)
    if not is_loopback and context is None:
        service.log.tell('warning: beyond loopback without --tls-cert, keys '
                         'cross the network in plain text')
    service.log.tell('listening on %s; the key is in %s' % (places, place))
    gc.collect()
    getattr(gc, 'freeze', int)()    # what is here now stays
    run_loop(service, options.socket and path)
    raise Interrupted(service.signal)


# ==========================================================================
# 23. cli
# ==========================================================================

FORMATS = ('table', 'json', 'yaml')

OVERVIEW = """\
usage: preflight.py [options] COMMAND ...

Are the MCP tools that a job needs there? `tools preflight` answers from
local state: exit 0 go, 10 retry later, 11 page a human, 12 unknown id,
1 could not check. `sync` is what looks at servers.

commands:
%s
global options, before or after the command:
  --home DIR         state directory (else PREFLIGHT_HOME, STATE_DIRECTORY,
                     XDG_STATE_HOME/preflight, ~/.preflight)
  --url URL          ask this service instead of the state directory (else
                     PREFLIGHT_URL; its key is PREFLIGHT_API_KEY):
                     http://, https:// or unix:///PATH
  --config FILE      config, may be repeated (else PREFLIGHT_CONFIG, else
                     mcp_config.json in the state directory)
  --dialect NAME     read the config files as one of
%s
  --workspace DIR    where servers of a client's config file are started
  --ca-file FILE     certificates to trust besides the system's
  -o, --output F     table, json or yaml (else PREFLIGHT_OUTPUT, else table)
  --debug            show a traceback for an internal error
  --version          print version and the digest of this file
  -h, --help         this text; after a command: that command's options
"""


class Stops(list):
    """The signals that arrived. Outside a sync each raises Interrupted."""

    is_deferred = is_ending = False

    def handle(self, number, frame):
        """Note a signal; a sync is asked to stop, all else is cut off.

        A second one does not cut off what the first one began to end.
        """
        self.append(number)
        if not (self.is_deferred or self.is_ending):
            self.is_ending = True
            raise Interrupted(number)


Command = namedtuple('Command', 'run options render exit_of takes about '
                                'more')
Command.__new__.__defaults__ = ('',)
Command.__doc__ = """One row of the command table. run(world, options) ->
value; options: rows for add_argument; render(value, width) -> text, where
width is the columns of the terminal, 0 for none;
exit_of(value) -> code; takes: what follows the words; about: its line of
help; more: for its own --help, paragraphs with a blank line between."""


def _flag(name, about):
    return name, {'action': 'store_true', 'help': about}


def _text(name, meta, about, **more):
    return name, dict(more, metavar=meta, help=about)


CHECK_OPTIONS = (
    _text('--profile', 'P', 'only servers of this profile are in scope'),
    _text('--pin', 'ID=PIN', 'the hash a tool must have; may be repeated',
          action='append'),
    _flag('--read-only-only', 'readOnlyHint must be true'),
    _flag('--exclude-destructive', 'read-only, or destructiveHint false'),
    _flag('--exclude-open-world', 'openWorldHint must be false'),
    _text('--horizon', 'D', 'a credential must be good for so long'),
    _text('--lock', 'FILE', 'check the tools of this lockfile, or those of '
          'them named: pins, hints and launches must be the locked ones'),
    _flag('--require-pins', 'each tool must have a pin, from --pin or '
          '--lock'))

RUN_OPTIONS = (
    _text('--wait', 'D', 'wait up to 10s while that may help'),
    _flag('--sync', 'look at the named servers first'),
    _text('--request-id', 'R', 'id for the audit record'))


def _rows(*columns):
    return lambda rows, width: render_rows(rows, columns, width)


def _plain(render):
    return lambda value, width: render(value)


def _always_ready(value):
    return EXIT_READY


def sync_data(found):
    """Give a sync's rows as contract 6 prints them in JSON."""
    keys = Row._fields[:Row._fields.index('notes')]
    return {'servers': [dict(zip(keys, row), cause=row.cause or None,
                             detail=row.detail or None)
                        for row in found[0]]}


def _render_contracts(rows, width):
    rows = [dict(row, tools='%d: %s' % (row['tools'], ', '.join(
        need['id'] for need in row['needs']))) for row in rows]
    return render_rows(rows, ('contract', 'tools', 'lock', 'broken',
                              'registered_at'), width)


def _render_sync(found, width):
    rows = [{'server': row.server, 'state': row.state, 'tools': row.tools,
             'added': len(row.added), 'changed': len(row.changed),
             'vanished': len(row.vanished),
             'time': format_duration(row.ms), 'detail': ' '.join(filter(
                 None, (row.cause and row.cause + ':', row.detail)))}
            for row in found[0]]
    text = render_rows(rows, ('server', 'state', 'tools', 'added',
                              'changed', 'vanished', 'time', 'detail'), width)
    for row in found[0]:
        for sign, names in (('+', row.added), ('~', row.changed),
                            ('-', row.vanished)):
            text += ''.join('%s %s:%s\n' % (
                sign, safe_text(row.server), safe_text(name))
                for name in names)
    if width:               # a log has it on stderr
        text += ''.join('\n%s\n  Run: %s\n' % (
            safe_text(row.server), safe_text(row.remedy))
            for row in found[0] if row.remedy)
    return text


def _render_tools(rows, width):
    if width:             # `tools show` has the whole hash
        rows = [dict(row, hash=row['hash'] and row['hash'][:22] + '...')
                for row in rows]
    columns = ('id', 'listed', 'status', 'blocked', 'denied', 'hash',
               'last_seen')
    if any(row.get('ignored') for row in rows):
        columns += ('ignored',)
    return render_rows(rows, columns, width)


def _render_tokens(rows, width):
    rows = [dict(row, allowed_servers='all of the profile'
                 if row['allowed_servers'] is None
                 else row['allowed_servers'] or 'none') for row in rows]
    return render_rows(rows, ('name', 'allowed_servers', 'profile_pin',
                              'expires_at', 'required_tools'), width)


RESULTS = _rows('id', 'result')
SERVER_RESULT = _plain(render_fields)

HEALTH_HELP = (
    'It looks at servers as sync does, and then asks the API behind each for '
    'one answer (`health` of its entry names the URL). A server that does '
    'not start is OFFLINE, one whose API fails is DEGRADED. Exit 0: all are '
    'HEALTHY or PRESENT (untested); 10: one is DEGRADED; 11: somebody has '
    'to look (OFFLINE, or a credential is refused); 12: unknown server; 1: '
    'could not check. `tools preflight` is another question: may this tool '
    'be called, by what is recorded? A crashed server is 10 there, since it '
    'may come back, and 11 here. What an API answers changes nothing that '
    'the gate reads.\n\n'
    'Keys of `health` in an entry, none of which must be there: url (as it '
    'is: ${VAR} is not expanded), method (GET, HEAD, POST) and body of the '
    'probe; token_env, the variable, or the header of the entry, that holds '
    'its credential; auth, how that is sent ("bearer", "header:X-Api-Key"); '
    'tools, or tool: what the server must list; validates_credential: what '
    'it does with a credential at its start ("none", "presence", "remote"); '
    'setup, what to do when it is OFFLINE; status_page of the API. preset '
    '(%s) fills them in for a well-known server.' % ', '.join(PRESETS))

COMMANDS = {
    ('tools', 'preflight'): Command(
        cmd_preflight, CHECK_OPTIONS + RUN_OPTIONS,
        render_report, lambda report: EXIT_CODES[report.verdict], 'ID...',
        'are these tools ready, or exactly why not'),
    ('tools', 'list'): Command(
        cmd_tools_list, (), _render_tools, _always_ready, '[SERVER...]',
        'what is known of the tools'),
    ('tools', 'show'): Command(
        cmd_tools_show, (), _plain(render_fields), _always_ready, 'ID',
        'one tool: definition, hash to pin, approval'),
    ('tools', 'diff'): Command(
        cmd_tools_diff, (), _plain(render_diff), _always_ready, 'ID',
        'listed beside approved, and the line that approves'),
    ('tools', 'review'): Command(
        cmd_tools_review, (), render_review, _always_ready,
        '[SERVER...]', 'at a terminal: show all that is new or changed, and '
        'ask'),
    ('tools', 'approve'): Command(
        cmd_tools_approve, (
            _text('--server', 'S', 'all that awaits approval of a server'),
            _flag('--all', 'all that awaits approval'),
            _text('--expect', 'TOKEN', 'the review token of `tools diff`'),
            _flag('--yes', 'do not ask')),
        RESULTS, _always_ready, '[ID...]', 'trust listed definitions'),
    ('tools', 'lock'): Command(
        cmd_tools_lock, (
            _flag('--all', 'every listed tool of the configured servers; '
                  'what is no longer listed is dropped'),
            _text('--file', 'FILE', 'the lockfile (else `lockfile` of the '
                  'config, relative to it, else preflight.lock here)'),
            _flag('--full', 'keep the definitions too, so that drift can be '
                  'reviewed offline; a file that has them keeps them'),
            _text('--expect', 'ID=TOKEN', 'approve what `tools diff` showed '
                  'with this token; may be repeated', action='append'),
            _flag('--yes', 'approve all of it, unseen'),
            _text('--remove', 'ID', 'take a tool out; may be repeated',
                  action='append')),
        RESULTS, _always_ready, '[ID...]',
        'write the reviewed tools into a file to commit',
        'The tools named are added or renewed as they were last listed, and '
        'every other tool of the file is left as it is; without ids, --all '
        'or --remove, all that the file has is renewed. A tool that is '
        'pending or changed is refused unless it is approved in the same '
        'breath. The file holds a pin and the hints of each tool, and what '
        'starts each server, secrets masked; `tools preflight --lock FILE` '
        'checks by it. With "approvals": "lockfile" in the config this is '
        'the only approval there is, and the file stands beside that config '
        'unless `lockfile` says otherwise.'),
    ('tools', 'verify'): Command(
        cmd_tools_verify, CHECK_OPTIONS + (
            _text('--request-id', 'R', 'id for the audit record'),),
        render_lock_check, lambda found: EXIT_CODES[found.report.verdict],
        '[ID...]', 'the check by a lockfile, and what drifted from it',
        'The file is --lock FILE, else that of `tools lock`. It looks at no '
        'server: what is compared is what a sync saw, so it takes no --sync. '
        'Drift is shown field by field where the locked text is kept, in a '
        'file written with --full or in the state. What is new on the '
        'servers does not change the exit code.'),
    ('tools', 'block'): Command(
        cmd_tools_block, (), RESULTS, _always_ready, 'ID...',
        'never ready until unblocked'),
    ('tools', 'unblock'): Command(
        cmd_tools_unblock, (), RESULTS, _always_ready, 'ID...',
        'take blocks back'),
    ('tools', 'explain'): Command(
        cmd_tools_explain, CHECK_OPTIONS, _rows('gate', 'result', 'fact'),
        _always_ready, 'ID', 'each gate in order, and what it looked at'),
    ('servers', 'list'): Command(
        cmd_servers_list, (), _rows('server', 'state', 'cause', 'tools',
                                    'pending', 'changed', 'observed_at'),
        _always_ready, '[SERVER...]', 'the configured servers'),
    ('servers', 'show'): Command(
        cmd_servers_show, (), _plain(render_fields), _always_ready, 'NAME',
        'one server: its launch, the last look, its stderr'),
    ('servers', 'enable'): Command(
        cmd_servers_enable, (), SERVER_RESULT, _always_ready, 'NAME',
        'switch a server on'),
    ('servers', 'disable'): Command(
        cmd_servers_disable, (), SERVER_RESULT, _always_ready, 'NAME',
        'switch a server off; approvals are kept'),
    ('servers', 'quarantine'): Command(
        cmd_servers_quarantine, (), SERVER_RESULT, _always_ready, 'NAME',
        'nothing of it is ready, it is not contacted'),
    ('servers', 'approve'): Command(
        cmd_servers_approve, (
            _text('--expect', 'DIGEST', 'the digest of the new launch'),
            _flag('--yes', 'do not ask'),
            _text('--lock', 'FILE', 'write the launch into this lockfile '
                  'too; its pins stay')),
        SERVER_RESULT, _always_ready, 'NAME',
        'trust a launch, lift a quarantine'),
    ('sync',): Command(
        cmd_sync, (
            _text('--timeout', 'D', 'longest look at one server'),
            _text('--request-id', 'R', 'id for its audit records'),
            _text('--notify', 'CMD', 'run this command, without a shell, '
                  'with JSON on its stdin, when a contract broke or came '
                  'back (an outage is no break); it has 30s')),
        _render_sync, exit_of_sync, '[SERVER...]',
        'look at servers, all or those named; record what is seen',
        '--notify is split into words as a shell would, but none reads it; '
        'for one, write --notify "sh -c \'...\'". The JSON is {"events": '
        '[{"contract", "server", "tool", "id", "event", "reason", '
        '"detail"}], "at"}; event is %s. The command is given what none was '
        'given before, whichever sync found it. One that fails is told on '
        'stderr, moves no exit code, and the next sync tries again. Its '
        'output is dropped, PREFLIGHT_* variables are not handed down, and '
        'its process group ends with it. A kill -9 of this program while it '
        'runs loses that delivery.' % ', '.join(dict.fromkeys(
            list(REASON_EVENTS.values()) + list(EVENT_WORDS)))),
    ('health',): Command(
        cmd_health, (
            _flag('--cached', 'judge what is recorded; starts and contacts '
                  'no MCP server, the API is still asked'),
            _flag('--probe', 'send the probes that cost money or quota, '
                  'too'),
            _text('--timeout', 'D', 'longest look at one server, and '
                  'longest probe (at most 8s)')),
        lambda report, width: render_health(
            report, exit_of_health(report), width), exit_of_health,
        '[SERVER...]', 'is the server up, is the API behind it up',
        HEALTH_HELP),
    ('serve',): Command(
        cmd_serve, (
            _text('--listen', 'H:P', 'address (else `listen` of the config, '
                  '127.0.0.1:8080; none with --socket alone)'),
            _text('--socket', 'PATH', 'a Unix socket, for this user'),
            _text('--sync-interval', 'D', 'look at the servers so often'),
            _flag('--no-sync', 'leave looking at servers to others'),
            _text('--ready', 'ID,ID', 'tools that /readyz stands for',
                  action='append'),
            _text('--tls-cert', 'F', 'certificate chain, PEM'),
            _text('--tls-key', 'F', 'its key, PEM'),
            _text('--allow-host', 'H', 'a Host to answer to',
                  action='append'),
            _text('--api-key-file', 'F', 'the operator\'s key'),
            _text('--notify', 'CMD', 'as that of sync, for the background '
                  'sync'),
            _text('--log-format', 'F', 'text or json', default='text')),
        None, None, '', 'the same check over REST'),
    ('contract', 'add'): Command(
        cmd_contract_add, (
            _text('--lock', 'FILE', 'the tools, pins, hints and launches of '
                  'this lockfile, as it is now'),
            _text('--pin', 'ID=PIN', 'the hash a tool must have; may be '
                  'repeated', action='append')),
        SERVER_RESULT, _always_ready, 'NAME [ID...]',
        'what a job needs: a sync says what breaks it',
        'The tools need not be ready now. From then on whatever looks at '
        'their server (sync, serve, --sync, health) tells once on stderr '
        'that one changed, vanished, awaits approval or needs a login, and '
        'once that it is back; an outage is none of these. The same again '
        'is unchanged; anything else replaces what the name had. It is for '
        'the config files of this run.'),
    ('contract', 'list'): Command(
        cmd_contract_list, (), _render_contracts,
        _always_ready, '', 'the contracts, and what syncs found broken'),
    ('contract', 'check'): Command(
        cmd_contract_check, tuple(
            row for row in CHECK_OPTIONS if row[0] not in (
                '--pin', '--lock', '--require-pins')) + RUN_OPTIONS,
        render_report, lambda report: EXIT_CODES[report.verdict], 'NAME',
        'the same check, of what a contract needs'),
    ('contract', 'remove'): Command(
        cmd_contract_remove, (), SERVER_RESULT, _always_ready, 'NAME',
        'forget a contract'),
    ('state', 'export'): Command(
        cmd_state_export, (
            _text('--servers', 'A,B', 'these servers only'),
            _text('--file', 'F', 'write it there, whole or not at all, for '
                  'this user alone')),
        lambda value, width: render_json(value)
        if 'snapshot_version' in value else render_fields(value),
        _always_ready, '', 'what is known, as one file for another host',
        'Tools, approvals, blocks, states and when each server was seen, '
        'with a SHA-256 over it all. No token, key, audit record or output '
        'of a server is in it; launches are masked.'),
    ('state', 'import'): Command(
        cmd_state_import, (
            _flag('--approvals', 'trust what was approved there'),),
        render_import,
        _always_ready, 'FILE', 'take over what another host saw',
        'Servers are matched by name; what was seen is taken over where the '
        'launch is the same and nothing newer is known here. Ages stay true. '
        'What only tightens comes along: blocks, and servers that were '
        'switched off or quarantined. What was approved, or switched on, '
        'comes with --approvals alone, where the launch is the same: without '
        'it the tools are pending, unless they are approved here. A damaged '
        'file changes nothing. The SHA-256 finds damage; it does not tell '
        'who wrote the file.'),
    ('doctor',): Command(
        cmd_doctor, (
            _flag('--self-test', 'instead, change a server of its own in a '
                  'state of its own, and see the gate close'),),
        render_doctor, lambda found: EXIT_READY if found['ok']
        else EXIT_FAILED, '', 'is this installation sound; exit 1 if not',
        'Looks at Python, SQLite, directories and modes, config, clock, '
        'audit chain and how old the looks at servers are, with a remedy '
        'for each problem. It makes nothing and contacts no server.'),
    ('activity', 'list'): Command(
        cmd_activity_list, (
            _text('--type', 'T', 'one of ' + ', '.join(RECORD_TYPES)),
            _text('--status', 'S', 'success or blocked'),
            _text('--request-id', 'R', 'the records of one request'),
            _text('--since', 'TIME', 'not before; or an age, such as 2h'),
            _text('--until', 'TIME', 'before'),
            _text('--limit', 'N', 'at most 1000', default='50'),
            _text('--offset', 'N', 'leave out the newest', default='0')),
        render_activities, _always_ready, '', 'the audit records'),
    ('activity', 'show'): Command(
        cmd_activity_show, (), lambda value, width:
        render_json(value['activity']), _always_ready, 'ID',
        'one audit record'),
    ('activity', 'verify'): Command(
        cmd_activity_verify, (
            _text('--expect-head', 'H', 'a head noted earlier'),),
        _plain(render_verify), lambda found: EXIT_READY if found['ok']
        else EXIT_FAILED, '', 'is the chain of records intact'),
    ('activity', 'head'): Command(
        cmd_activity_head, (), lambda value, width:
        value['head'] + '\n', _always_ready, '',
        'the hash of the newest record'),
    ('activity', 'prune'): Command(
        cmd_activity_prune, (
            _text('--older-than', 'D', 'else activity_retention'),),
        _plain(render_fields), _always_ready, '', 'remove old records'),
    ('token', 'create'): Command(
        cmd_token_create, (
            _text('--servers', 'A,B', 'the servers in scope; * for all'),
            _text('--profile', 'P', 'the scope is this profile, always'),
            _text('--expires', 'D', 'such as 30d, or never; 90d unless set',
                  default='90d'),
            _text('--require', 'ID[=PIN]', 'a tool that a check without '
                  'tools asks for; may be repeated', action='append')),
        _plain(render_fields), _always_ready, 'NAME',
        'a credential for one agent, shown once'),
    ('token', 'list'): Command(
        cmd_token_list, (), _render_tokens,
        _always_ready, '', 'the agent tokens'),
    ('token', 'revoke'): Command(
        cmd_token_revoke, (), _plain(render_fields), _always_ready, 'NAME',
        'from the very next request on'),
    ('profiles', 'list'): Command(
        cmd_profiles_list, (), _rows('profile', 'servers',
                                     'not_configured'),
        _always_ready, '', 'the profiles of the config'),
    ('config', 'check'): Command(
        cmd_config_check, (), _plain(render_check), lambda found:
        EXIT_FAILED if found['errors'] else EXIT_READY, '',
        'read every entry and say what is wrong'),
    ('config', 'paths'): Command(
        cmd_config_paths, (), _rows('path', 'client', 'how', 'found',
                                    'used'),
        _always_ready, '', 'every place a config is looked for'),
    ('config', 'show'): Command(
        cmd_config_show, (
            _flag('--reveal', 'print the values of env and headers'),),
        _plain(render_yaml), _always_ready, '[FILE...]',
        'any client\'s files, in one form'),
}


def _parser(words):
    """Make a parser: no abbreviations, errors raised, fixed width."""
    import argparse

    class Parser(argparse.ArgumentParser):
        """An ArgumentParser that raises UsageError."""

        def error(self, message):
            """Raise, where argparse would exit with 2."""
            raise UsageError(message, 'See: %s --help' % self.prog)

    return Parser(prog=' '.join(('preflight.py',) + words), add_help=False,
                  allow_abbrev=False, formatter_class=lambda prog:
                  argparse.HelpFormatter(prog, width=79))


def _split_short(argv):
    """Turn -ojson into -o json: old Pythons do not without abbreviations."""
    for word in argv:
        if word[:2] == '-o' and len(word) > 2:
            yield '-o'
            yield word[2:].lstrip('=')
        else:
            yield word


def _find_command(words):
    for length in (2, 1):
        verb = tuple(words[:length])
        if verb in COMMANDS and len(verb) == length:
            return verb
    if not words:
        raise UsageError('no command was given', 'See: preflight.py --help')
    if words[0] == 'help':
        raise UsageError('there is no command help', 'See: preflight.py '
                         '--help, preflight.py COMMAND --help')
    if words[0][:1] == '-':
        raise UsageError('unknown option %s before the command' % words[0],
                         "A command's own options stand after it.")
    group = [verb[1] for verb in COMMANDS if verb[:-1] == (words[0],)]
    if group and (len(words) < 2 or words[1][:1] == '-'):
        raise UsageError('%s needs a command behind it: %s' % (
            words[0], ', '.join(group)),
            'See: preflight.py %s --help' % words[0])
    asked = ' '.join(word for word in words[:2] if word[:1] != '-')
    near = rank_nearest(asked, [' '.join(verb) for verb in COMMANDS], 1)
    raise UsageError('unknown command %s%s' % (
        json.dumps(asked), '; did you mean %s?' % near[0] if near else ''),
        'See: preflight.py --help')


def _decode(word):
    """Read a word as UTF-8, whatever the locale: names are UTF-8."""
    try:
        return os.fsencode(word).decode('utf-8', 'surrogateescape')
    except UnicodeEncodeError:
        return word             # text already, whatever the locale


def _add_globals(parser):
    for names, more in (
            (('--home',), {}), (('--config',), {'action': 'append'}),
            (('--dialect',), {}), (('--workspace',), {}), (('--url',), {}),
            (('--ca-file',), {}), (('-o', '--output'), {}),
            (('--debug',), {'action': 'store_true'}),
            (('--version',), {'action': 'store_true'}),
            (('-h', '--help'), {'action': 'store_true'})):
        parser.add_argument(*names, **more)


ONCE = '--lock', '--file', '--profile'  # what is checked by, or written


def parse_argv(argv):
    """Read the command line: (verb, options); verb is () for the overview.

    Ids and options may come in any order, global options before or after
    the verb. Raises UsageError. One pattern for every Python: no
    subparsers, no positionals, at most two parsers.
    """
    at = argv.index('--') if '--' in argv else len(argv)
    before, after = list(_split_short(argv[:at])), argv[at + 1:]
    top = _parser(())
    _add_globals(top)
    seen, rest = top.parse_known_args(before)
    groups = [[]] + [[verb[0]] for verb in COMMANDS if len(verb) > 1]
    if seen.version and rest and tuple(rest) not in COMMANDS:
        # it ends with 0, which behind ids would say that they are ready
        raise UsageError('--version stands alone, or alone behind a command')
    if seen.version or seen.help and rest in groups:
        return tuple(rest), seen
    verb = _find_command(rest)
    if seen.help and (len(rest) > len(verb) or after):
        raise UsageError('--help stands alone behind a command',
                         'See: preflight.py %s --help' % ' '.join(verb))
    leaf = _parser(verb)
    for name, more in COMMANDS[verb].options:
        leaf.add_argument(name, **more)
    if seen.help:
        seen.usage = leaf.format_help()
        return verb, seen
    words = [_decode(word) for word in rest[len(verb):]]
    for name in ONCE:           # the last would win, unsaid
        if sum(word.split('=')[0] == name for word in words) > 1:
            raise UsageError('%s is given twice' % name, 'See: %s --help'
                             % leaf.prog)
    seen, ids = leaf.parse_known_args(words, seen)
    for word in ids:
        if word[:1] == '-' and word != '-':
            raise UsageError('unknown option %s' % word,
                             'See: %s --help' % leaf.prog)
    seen.ids = ids + [_decode(word) for word in after]
    if seen.ids and not COMMANDS[verb].takes:
        raise UsageError('%s takes no %s' % (
            ' '.join(verb), json.dumps(seen.ids[0])), 'See: %s --help'
            % leaf.prog)
    return verb, seen


def _help_text(verb, options):
    import textwrap
    lines = ''.join('  %-20s %s\n' % (' '.join(words), row.about)
                    for words, row in COMMANDS.items()
                    if words[:len(verb)] == verb)
    if not verb:
        return OVERVIEW % (lines, textwrap.fill(
            ', '.join(sorted(DIALECTS)), 79, initial_indent=' ' * 21,
            subsequent_indent=' ' * 21, break_on_hyphens=False))
    if verb not in COMMANDS:
        return ('usage: preflight.py %s COMMAND ...\n\ncommands:\n%s\n'
                'options of a command: preflight.py %s COMMAND --help\n'
                % (verb[0], lines, verb[0]))
    row = COMMANDS[verb]
    text = '%s\n\n%s\n' % (('usage: preflight.py %s [options] %s' % (
        ' '.join(verb), row.takes)).rstrip(), row.about)
    if row.more:
        text += ''.join('\n%s\n' % textwrap.fill(part, 79)
                        for part in row.more.split('\n\n'))
    if row.options:
        text += '\n' + options.usage.split('\n\n', 1)[1]
    return text + '\nglobal options: see preflight.py --help\n'


def _version_text():
    with open(__file__, 'rb') as file:
        digest = sha256(file.read())
    return 'preflight.py %s (%s)\n' % (VERSION, digest[:12])


def _configs(options, env):
    named = options.config or [
        path for path in env.get('PREFLIGHT_CONFIG', '').split(os.pathsep)
        if path]
    if '' in named:
        raise UsageError('--config is empty')
    return tuple(named)


def _terminal_width(stream):
    """Count the columns of a stream's terminal, 0 when it is none."""
    if stream is None or not stream.isatty():
        return 0
    try:    # a serial line may say 0
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _started_how(options, env):
    """Write the command that started this run, for remedies to repeat.

    As it was typed for whoever sits there; what a log keeps is pasted
    elsewhere, so there every path is absolute.
    """
    place_of = str if _terminal_width(sys.stdout) else os.path.abspath
    words = [sys.executable or 'python3']
    for place in env.get('PATH', '').split(os.pathsep):
        path = os.path.join(place, 'python3')
        if os.path.exists(path):
            if os.path.realpath(path) == os.path.realpath(words[0]):
                words[0] = 'python3'
            break
    words += ['-I'] if sys.flags.isolated else []
    words.append(place_of(sys.argv[0] or 'preflight.py'))
    home = (options.home or env.get('PREFLIGHT_HOME')
            or env.get('STATE_DIRECTORY', '').split(':')[0])
    words += ['--home', place_of(home)] if home else []
    for path in _configs(options, env):
        words += ['--config', place_of(path)]
    words += ['--dialect', options.dialect] if options.dialect else []
    for name in ('workspace', 'ca_file'):
        value = getattr(options, name)
        words += (['--' + name.replace('_', '-'), place_of(value)] if value
                  else [])
    return ' '.join(map(shell_word, words))


def _ask(question, choices=()):
    """Put a question to whoever sits at the terminal.

    Yes or no, where all but yes is no. Of choices the one that is named,
    by its initial if need be: another word asks again, and the end of
    input is the last of them.
    """
    if not all(stream is not None and stream.isatty()
               for stream in (sys.stdin, sys.stderr)):
        raise UsageError('there is no terminal to ask at; '
                         + ('run it at one' if choices else 'review first, '
                            'then give --expect or --yes'),
                         '`tools diff ID` and `servers show NAME` print the '
                         'line that approves just what they show.')
    way = ', '.join('[%s]%s' % (word[0], word[1:]) for word in choices)
    sys.stderr.write('%s %s ' % (question, way + '?' if way else '[y/N]'))
    while True:
        sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        word = line.strip().lower().decode('ascii', 'replace')
        if not choices:
            return word in ('y', 'yes')
        for choice in choices:
            if word and choice.startswith(word):
                return choice
        if not line:
            sys.stderr.write('\n')
            return choices[-1]
        sys.stderr.write(way + '? ')


def drop_stderr():
    """Let stderr go nowhere: what it still holds would fail at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def print_line(line):
    """Write one line to stderr, safe for a terminal and any encoding."""
    if sys.stderr is None:
        return
    data = (safe_text(line) + '\n').encode(
        sys.stderr.encoding or 'ascii', 'backslashreplace')
    try:
        sys.stderr.flush()
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
    except (OSError, ValueError):
        drop_stderr()           # nobody reads it; the exit code stands


def write_log(text):
    """Write lines that are safe already to stderr, at once."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            drop_stderr()       # a log nobody reads stops no check


def make_world(options, stops, url=''):
    """Gather what commands may know of their surroundings."""
    env = dict(os.environ)
    if options.home == '' or options.workspace == '':
        raise UsageError('--home and --workspace must not be empty')
    if options.ca_file is not None and not os.path.isfile(options.ca_file):
        raise UsageError('--ca-file %s is not a file'
                         % json.dumps(options.ca_file))
    if options.dialect is not None and options.dialect not in DIALECTS:
        raise UsageError('unknown dialect %s; known: %s' % (
            json.dumps(options.dialect), ', '.join(sorted(DIALECTS))))
    return World(
        env=env, how=_started_how(options, env),
        home='' if url else state_home(options.home, env),
        configs=_configs(options, env), url=url,
        dialect=options.dialect or '', workspace=options.workspace or '',
        now=lambda: int(time.time() * 1000), clock=time.monotonic,
        sleep=time.sleep, random=os.urandom, stop=stops, ask=_ask,
        tell=print_line,
        width=_terminal_width(sys.stdout), said=set(),
        ca_file=os.path.abspath(options.ca_file) if options.ca_file else '')


def show_progress(done, total, names):
    """Show on a terminal how far a sync is, on one line."""
    text = 'sync: %d of %d; waiting for %s' % (
        done, total, ', '.join(map(safe_text, names[:3])) or '-')
    text += ', ...' if len(names) > 3 else ''
    sys.stderr.write('\r\x1b[K' + text[:76] if done < total else '\r\x1b[K')
    sys.stderr.flush()


def print_output(text):
    """Write data to stdout; False when its reader has gone.

    Raises PreflightError when it could not be written for another reason.
    """
    if sys.stdout is None:
        raise PreflightError('stdout is closed')
    data = text.encode(sys.stdout.encoding or 'ascii', 'backslashreplace')
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as exc:
        # What is still buffered would fail once more at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if isinstance(exc, BrokenPipeError):
            return False
        raise PreflightError('cannot write to stdout: %s'
                             % os_reason(exc)) from exc
    return True


def _format_of(options, env):
    name = options.output
    if name is None:
        name = env.get('PREFLIGHT_OUTPUT') or 'table'
    if name not in FORMATS:
        raise UsageError('unknown output format %s; known: %s' % (
            json.dumps(name), ', '.join(FORMATS)))
    return name


def _data_of(verb, value):
    if isinstance(value, Report):
        return report_data(value)
    if isinstance(value, Verified):
        return dict(report_data(value.report), drift=value.drift,
                    new=value.new)
    return sync_data(value) if verb == ('sync',) else value


# What asks a service where --url or PREFLIGHT_URL names one (contract 6).
REMOTE = {
    ('tools', 'preflight'): remote_preflight,
    ('tools', 'list'): remote_tools_list,
    ('servers', 'list'): remote_servers_list,
    ('activity', 'list'): remote_activity_list,
    ('activity', 'show'): remote_activity_show,
}


def _url_of(verb, options, env):
    """Give the service to ask, '' for none; an empty variable is unset."""
    if options.url == '':
        raise UsageError('--url is empty')
    url = options.url or env.get('PREFLIGHT_URL', '')
    if verb == ('serve',) and not options.url:
        return ''
    if url and verb not in REMOTE:
        raise UsageError('%s is local only' % ' '.join(verb), ENV_HINT)
    return url


def _print_remedies(report):
    """Tell a log what to do; a terminal is shown it with the table."""
    for answer in report.answers:
        remedy = answer.remediation
        if remedy and not any(remedy in line for line in report.stuck):
            print_line('%s: %s' % (answer.id, remedy))


def run_command(verb, options, stops):
    """Run one command and print what it found; returns the exit code."""
    command, form = COMMANDS[verb], _format_of(options, os.environ)
    url, run = _url_of(verb, options, os.environ), command.run
    if url:
        run = REMOTE[verb]
    world = make_world(options, stops, url)
    options.progress, options.write_log = no_progress, write_log
    if sys.stderr is not None and sys.stderr.isatty():
        options.progress = show_progress
    value = run(world, options)
    report = getattr(value, 'report', value)
    if isinstance(report, Report) and report.verdict != READY:
        for line in report.stuck:
            print_line(line)
        if report.request_id:   # a service may have sent none
            print_line('request id: %s' % report.request_id)
        if form == 'table' and not world.width:
            _print_remedies(report)
    if form == 'table':
        text = command.render(value, world.width)
    else:
        write = render_json if form == 'json' else render_yaml
        text = write(_data_of(verb, value))
    print_output(text)
    return command.exit_of(value)


def _install_handlers(stops):
    import signal
    for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
        number = getattr(signal, name, None)
        if number is not None and (
                signal.getsignal(number) != signal.SIG_IGN):
            signal.signal(number, stops.handle)


def _open_standard_files():
    """Fill closed descriptors 0 to 2, or the database would take them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _fail(exc, is_debug):
    if is_debug:
        import traceback
        traceback.print_exc()
    if not isinstance(exc, PreflightError):
        exc = PreflightError('internal error: %s: %s' % (
            type(exc).__name__, exc), 'Run it with --debug and report this.')
    print_line('preflight.py: %s' % exc)
    if exc.hint:
        print_line(exc.hint)
    return exc.exit_code


def main(argv=None):
    """Run the command line; returns the exit code (contract 6)."""
    import gc
    gc.disable()                # a short run; the pauses cost more than RAM
    getattr(sys, 'set_int_max_str_digits', int)(0)
    _open_standard_files()
    stops = Stops()
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            _install_handlers(stops)
            verb, options = parse_argv(argv)
            if options.version:
                print_output(_version_text())
                return EXIT_READY
            if options.help:
                print_output(_help_text(verb, options))
                return EXIT_READY
            return run_command(verb, options, stops)
        except Exception as exc:
            return _fail(exc, '--debug' in argv)
    except (Interrupted, KeyboardInterrupt) as exc:
        if sys.stderr is not None and sys.stderr.isatty():
            write_log('\r\x1b[K')     # the line of progress
        return 128 + getattr(exc, 'number', 2)
    finally:
        getattr(gc, 'freeze', int)()    # nothing to look for at tear-down


if __name__ == '__main__':
    sys.exit(main())
