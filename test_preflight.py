#!/usr/bin/env python3
"""Tests of preflight.py, on a bare Python from 3.6 up: no package needed.

The classes carry the banners and numbers of the program's sections, so the
first red class is the lowest broken layer. Sections 1 to 13 are tested with
values; below the line the real thing is used: temporary directories, real
databases, real child processes, real commands. Run one class or test with
`python3 test_preflight.py Test10Judge`.
"""
import ast
import contextlib
import errno
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from unittest import mock
from collections import namedtuple

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(HERE, 'preflight.py')


def load_program():
    """Import preflight.py by its path, whatever else has that name."""
    spec = importlib.util.spec_from_file_location('preflight', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


pf = load_program()

# A server for the tests. What it does stands in a JSON file that is read at
# each start, so that a test can change the server and not its launch.
FAKE_SERVER = r'''
import json, os, signal, sys, time
SPEC = json.load(open(sys.argv[1], encoding='utf-8'))
out = sys.stdout.buffer
def raw(data):
    out.write(data); out.flush()
def send(message):
    raw(json.dumps(dict(message, jsonrpc='2.0')).encode('ascii') + b'\n')
if SPEC.get('starts'):
    with open(SPEC['starts'], 'a') as file:
        file.write('%d\n' % os.getpid())
if SPEC.get('stderr'):
    sys.stderr.write(SPEC['stderr']); sys.stderr.flush()
if SPEC.get('noise'):
    raw(SPEC['noise'].encode('latin-1'))
while SPEC.get('flood'):
    raw(SPEC['flood'].encode('latin-1'))
    time.sleep(SPEC.get('pause', 0))
if SPEC.get('ignore_term'):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if SPEC.get('grandchild'):
    import subprocess
    held = subprocess.Popen([sys.executable, '-c',
                             'import time; time.sleep(60)'],
                            stdin=subprocess.DEVNULL)
    with open(SPEC['grandchild'], 'w') as file:
        file.write(str(held.pid))
def die(stage):
    if SPEC.get('die') == stage:
        if 'signal' in SPEC:
            os.kill(os.getpid(), SPEC['signal'])
        sys.exit(SPEC.get('code', 3))
    time.sleep(SPEC.get('sleep', {}).get(stage, 0))
die('start')
for line in sys.stdin.buffer:
    try:
        message = json.loads(line.decode('utf-8'))
    except ValueError:
        continue
    if SPEC.get('log'):
        with open(SPEC['log'], 'a') as file:
            file.write(json.dumps(message) + '\n')
    number, method = message.get('id'), message.get('method')
    if number is None or method is None:
        continue
    number = {'text': str(number), 'null': None, 'zero': 0}.get(
        SPEC.get('ids'), number)
    die(method)
    answer = SPEC.get('answers', {}).get(method)
    for before in SPEC.get('before', {}).get(method, ()):
        send(before)
    if answer is not None:
        if 'raw' in answer:
            for part in answer['raw'].split('@PAUSE@'):
                raw(part.encode('latin-1').replace(
                    b'@ID@', str(number).encode()))
                time.sleep(0.02)
        else:
            send(dict(answer, id=number))
    elif method == 'initialize':
        send({'id': number, 'result': {
            'protocolVersion': SPEC.get(
                'version', message['params']['protocolVersion']),
            'capabilities': SPEC.get('capabilities', {'tools': {}}),
            'serverInfo': {'name': 'fake', 'version': '0'}}})
    elif method == 'tools/list':
        pages = SPEC.get('pages')
        if pages is not None:
            cursor = (message.get('params') or {}).get('cursor')
            send({'id': number, 'result': pages[cursor or 'first']})
        else:
            send({'id': number, 'result': {'tools': SPEC.get('tools', [])}})
    elif method == 'ping':
        send({'id': number, 'result': {}})
    else:
        send({'id': number, 'error': {'code': -32601, 'message': 'no'}})
if SPEC.get('no_eof') or SPEC.get('ignore_term'):
    time.sleep(60)
'''


def tool(name='echo', description='Echo text', **more):
    """Make a tool as a server lists it."""
    return dict({'name': name, 'description': description,
                 'inputSchema': {'type': 'object'}}, **more)


SAFE = {'readOnlyHint': True, 'destructiveHint': False,
        'openWorldHint': False}


def quiet_fork():
    """Fork; what a thread of another test still holds is not used here."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        return os.fork()


class Result:
    """What a command left: code, out and err as text."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        """Give stdout as JSON."""
        return json.loads(self.out)

    def __repr__(self):
        return 'exit %s\n-- out\n%s\n-- err\n%s' % (self.code, self.out,
                                                    self.err)


class TempCase(unittest.TestCase):
    """A test with a directory of its own, gone afterwards."""

    def setUp(self):
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.dir = os.path.realpath(held.name)
        self.home = os.path.join(self.dir, 'state')
        self.config = os.path.join(self.dir, 'config.json')

    def path(self, *names):
        """Give a path in the test's directory."""
        return os.path.join(self.dir, *names)

    def write(self, name, text):
        """Write a file in the test's directory; returns its path."""
        with open(self.path(name), 'wb') as file:
            file.write(text if isinstance(text, bytes)
                       else text.encode('utf-8'))
        return self.path(name)

    def serve(self, name='s', **spec):
        """(Re)write what a fake server does; returns its config entry."""
        self.write('fake.py', FAKE_SERVER)
        self.write(name + '.spec.json', json.dumps(spec))
        return {'command': sys.executable,
                'args': [self.path('fake.py'), self.path(
                    name + '.spec.json')]}

    def configure(self, servers, **top):
        """Write our own config; returns its path."""
        return self.write('config.json',
                          json.dumps(dict(top, mcpServers=servers)))

    def run_cli(self, *args, **more):
        """Run the program as a user does, against this test's state."""
        env = dict(os.environ)
        for name in list(env):
            if name.startswith(('PREFLIGHT_', 'STATE_DIRECTORY', 'XDG_')):
                del env[name]
        env.update(more.pop('env', {}))
        words = [sys.executable, SCRIPT]
        if more.pop('is_placed', True):
            words += ['--home', self.home, '--config', self.config]
        done = subprocess.Popen(
            words + list(args), env=env, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, stdin=subprocess.PIPE,
            cwd=more.pop('cwd', self.dir))
        out, err = done.communicate(more.pop('stdin', b''), timeout=60)
        self.assertFalse(more)
        return Result(done.returncode, out.decode('utf-8'),
                      err.decode('utf-8', 'replace'))

    def check(self, *args, **more):
        """Run `tools preflight -o json`; returns the Result."""
        return self.run_cli('tools', 'preflight', '-o', 'json', *args,
                            **more)

    def sync(self, *args, **more):
        """Run `sync -o json`; returns the Result."""
        return self.run_cli('sync', '-o', 'json', *args, **more)

    def world(self, **more):
        """Make a World for calls inside this process."""
        stops = pf.Stops()
        stops.is_deferred = True
        self.told = []
        given = dict(
            env=dict(os.environ), how='preflight', home=self.home,
            configs=(self.config,), dialect='', workspace='',
            now=lambda: int(time.time() * 1000), clock=time.monotonic,
            sleep=time.sleep, random=os.urandom, stop=stops,
            ask=lambda question, choices=(): False, tell=self.told.append,
            width=0)
        return pf.World(**dict(given, **more))


# ==========================================================================
# What the pure sections are tested with: one value of each kind
# ==========================================================================

NOW = 1790000000000             # 2026-09-21T14:13:20.000Z
H1, H2, H3 = '1' * 64, '2' * 64, '3' * 64


def a_server(**more):
    """Make a Server as a config gives it; more: what is different."""
    given = dict(
        name='s', file='/c/config.json', dialect='preflight', base='/c',
        transport='stdio', command='run', args=(), env={}, cwd=None,
        url=None, headers={}, enabled=True, quarantined=False,
        trust_mode='manual', allow=None, deny=[], start_timeout=60000,
        request_timeout=30000, max_age=None, client=None, health={},
        ignore_changes={}, overlaid=frozenset(), warnings=[],
        extra={})
    return pf.Server(**dict(given, **more))


def a_tool(**more):
    """Make a Tool that is listed and approved as listed."""
    given = dict(
        server='s', name='t', listed=True, hash=H1, version=1, hints={},
        flaw='', approved=pf.Approval(H1, 1, {}, NOW - 5000, 'baseline'),
        blocked_at=None, first_seen=NOW - 9000, last_seen=NOW - 1000)
    return pf.Tool(**dict(given, **more))


def a_link(**more):
    """Make a Connection of a server that was seen ready a second ago."""
    given = dict(
        launch='L', state='ready', cause='', detail='', since=NOW - 9000,
        observed_at=NOW - 1000, listed_at=NOW - 1000, protocol='2025-11-25',
        era='handshake', ttl=0, stderr='', refused={}, lease_at=None,
        lease_until=None, lease_launch=None)
    return pf.Connection(**dict(given, **more))


# ==========================================================================
# 2. errors
# ==========================================================================


class Test02Errors(unittest.TestCase):
    """Errors carry what the shell and a REST client see."""

    TABLE = ((pf.UsageError('m'), 400), (pf.ConfigError('m'), 503),
             (pf.StoreError('m'), 503), (pf.UpstreamError('timeout', 'm'),
                                         502), (pf.PreflightError('m'), 500))

    def test_codes(self):
        for error, status in self.TABLE:
            with self.subTest(error=error):
                self.assertEqual((error.exit_code, error.http_status),
                                 (1, status))
                self.assertIsInstance(error, pf.PreflightError)
                self.assertEqual(str(error), 'm')

    def test_hint(self):
        self.assertEqual(pf.UsageError('m', 'do this').hint, 'do this')
        self.assertEqual(pf.UsageError('m').hint, '')

    def test_upstream_cause(self):
        self.assertEqual(pf.UpstreamError('timeout', 'm').cause, 'timeout')

    def test_signal_is_no_exception(self):
        """`except Exception` around one server must not eat a signal."""
        self.assertNotIsInstance(pf.Interrupted(15), Exception)
        self.assertEqual(pf.Interrupted(15).number, 15)


# ==========================================================================
# 3. reasons
# ==========================================================================

RETRY_CODES = ('server_initializing', 'server_unhealthy')
UNKNOWN_CODES = ('not_found', 'server_not_configured')
# Why a server is unhealthy, as the contract has it.
CAUSES = ('command_not_found exited timeout refused dns tls http_status '
          'rate_limited redirected protocol no_tools unresolved stale '
          'interrupted').split()
# The contract's table: reason, class, retryable, action, verdict, exit.
REASON_TABLE = """
server_initializing   retryable         yes -         degraded_retryable 10
server_unhealthy      retryable         yes view_logs degraded_retryable 10
server_disabled       fix-state-first   no  enable    blocked            11
server_quarantined    fix-state-first   no  approve   blocked            11
tool_pending_approval fix-state-first   no  approve   blocked            11
tool_changed          fix-state-first   no  approve   blocked            11
tool_blocked_by_user  fix-state-first   no  enable    blocked            11
oauth_required        fix-state-first   no  login     blocked            11
hash_mismatch         fix-state-first   no  configure blocked            11
server_not_in_scope   permanent-config  no  configure blocked            11
tool_denied_by_config permanent-config  no  configure blocked            11
missing_annotation    permanent-config  no  configure blocked            11
policy_filtered       permanent-config  no  -         blocked            11
not_found             permanent-config  no  configure unknown_ids        12
server_not_configured permanent-config  no  configure unknown_ids        12
"""


class Test03Reasons(unittest.TestCase):
    """The closed set of reasons, their classes and verdicts."""

    def test_the_set_is_closed(self):
        self.assertEqual([line.split()[0] for line in
                          REASON_TABLE.strip().split('\n')],
                         list(pf.REASONS))

    def test_each_row(self):
        for line in REASON_TABLE.strip().split('\n'):
            code, kind, retry, action, verdict, number = line.split()
            reason = pf.REASONS[code]
            with self.subTest(code=code):
                self.assertEqual(
                    (reason.code, reason.kind, reason.retryable,
                     pf.action_of(code), reason.verdict,
                     pf.EXIT_CODES[reason.verdict]),
                    (code, kind, retry == 'yes', action.strip('-'), verdict,
                     int(number)))

    def test_ready_exits_0(self):
        self.assertEqual(pf.EXIT_CODES['ready'], 0)

    def test_action_by_cause(self):
        found = [cause for cause in CAUSES
                 if pf.action_of('server_unhealthy', cause) == 'restart']
        self.assertEqual(found, ['refused', 'stale', 'interrupted'])
        self.assertEqual(pf.action_of('server_unhealthy', 'tls'),
                         'view_logs')
        self.assertEqual(pf.action_of('server_initializing', 'stale'), '')

    def test_worst_of_all_pairs(self):
        """unknown > blocked > retryable > ready, in either order."""
        def rank(code):
            return (3 if code in UNKNOWN_CODES else 1 if code in RETRY_CODES
                    else 2 if code else 0)
        names = ('ready', 'degraded_retryable', 'blocked', 'unknown_ids')
        for pair in itertools.product([''] + list(pf.REASONS), repeat=2):
            with self.subTest(pair=pair):
                self.assertEqual(pf.worst_verdict(pair),
                                 names[max(map(rank, pair))])

    def test_worst_of_nothing(self):
        self.assertEqual(pf.worst_verdict([]), 'ready')


# ==========================================================================
# 5. text
# ==========================================================================


def first_flaw(text):
    """Decode JSON and name what of it may not be trusted."""
    return pf.find_refused(pf.decode_json(text))


class Test05Json(unittest.TestCase):
    """decode_json, cut_deep, find_refused."""

    def test_what_is_not_json(self):
        for text in ('', ' ', '{', '[1,]', '{}{}', "{'a': 1}", '{"a":1,}',
                     '[1] x', 'nan', '[01]', '["\n"]', '"\\x41"'):
            with self.subTest(text=text), self.assertRaises(ValueError):
                pf.decode_json(text)

    def test_refused(self):
        table = (
            ('[1e400]', 'a number is too large'),
            ('[-1e400]', 'a number is too large'),
            ('[NaN]', 'NaN, or nesting over 200 levels'),
            ('[Infinity]', 'Infinity is not JSON'),
            ('[-Infinity]', '-Infinity is not JSON'),
            ('{"a": 1, "a": 1}', 'the key "a" stands twice'),
            ('[{"b": {"a": 1, "c": 2, "a": 1}}]',
             'the key "a" stands twice'),
            ('[%s]' % ('9' * 4001), 'a number has over 4000 digits'),
            ('[-%s]' % ('9' * 4001), 'a number has over 4000 digits'),
            ('[0.%s]' % ('1' * 4001), 'a number has over 4000 digits'))
        for text, why in table:
            with self.subTest(text=text[:40]):
                self.assertEqual(first_flaw(text), why)

    def test_not_refused(self):
        for text in ('[1e308]', '[%s]' % ('9' * 4000),
                     '[-%s]' % ('9' * 4000), '["NaN", "a", "a"]',
                     '{"a": {"a": {"a": 1}}}', '{"a": 1, "A": 2}', '1'):
            with self.subTest(text=text[:40]):
                self.assertEqual(first_flaw(text), '')

    def test_a_double_key_keeps_what_was_read(self):
        found = pf.decode_json('{"name": "x", "name": "y"}')
        self.assertEqual(found.table, {'name': 'y'})

    def test_integral_floats_become_integers(self):
        found = pf.decode_json('[1.0, 1e2, 1e16, -0.0, -0, 2.5, 1E+3]')
        self.assertEqual(repr(found),
                         '[1, 100, 10000000000000000, 0, 0, 2.5, 1000]')

    def test_depth_limit(self):
        self.assertEqual(first_flaw('[' * 200 + ']' * 200), '')
        self.assertIn('nesting over 200', first_flaw('[' * 201 + ']' * 201))

    def test_any_depth(self):
        for text in ('[' * 100000 + ']' * 100000,
                     '{"a":' * 100000 + '1' + '}' * 100000):
            with self.subTest(text=text[:5]):
                self.assertIn('nesting over 200', first_flaw(text))

    def test_cut_deep(self):
        table = (
            ('[[1],[2]]', '[[1],[2]]'),
            ('[[[1]],[2]]', '[[NaN],[2]]'),
            ('[[{"a":[1]}, 5, [6]]]', '[[NaN, 5, NaN]]'),
            ('["[[[[", [1]]', '["[[[[", [1]]'),
            (r'["\"[[[\\", [1]]', r'["\"[[[\\", [1]]'),
            ('[[[', '[[NaN'))
        for text, cut in table:
            with self.subTest(text=text):
                self.assertEqual(pf.cut_deep(text, 2), cut)

    def test_a_string_without_end_costs_one_scan(self):
        """Scanned again from each quote, this would take for ever."""
        text = '"' + '\\"' * 200000 + '[' * 300
        self.assertEqual(pf.cut_deep(text, 200), text)


class Test05Durations(unittest.TestCase):
    """Durations in and out."""

    VALID = (('0', 0), ('0s', 0), ('250ms', 250), ('1.5s', 1500),
             ('1m30s', 90000), ('15m', 900000), ('2h', 7200000),
             ('90d', 7776000000), ('1d2h3m4s5ms', 93784005),
             ('1h1ms', 3600001), ('1.5h', 5400000), ('1m1ms', 60001),
             ('0.25m', 15000), ('007s', 7000), ('100000d', 8640000000000))
    INVALID = ('', ' ', '5', '1.5', '-1s', '+1s', ' 1s', '1s ', '1 s',
               '1s\n', '1S', '1M', '1w', '1us', '1s1m', '1s1s', '1m30',
               '.5s', '1.s', '1,5s', '1e3s', '\u0663s', '\uff15s', '1_0s',
               's', 'ms', '0x1s', 'inf', '00', '0.0', '100001d',
               '9' * 400 + 's', '1ms1s')

    def test_valid(self):
        for text, ms in self.VALID:
            with self.subTest(text=text):
                self.assertEqual(pf.parse_duration(text), ms)
                self.assertTrue(pf.is_duration(text))

    def test_invalid(self):
        for text in self.INVALID:
            with self.subTest(text=text):
                self.assertFalse(pf.is_duration(text))
                with self.assertRaises(pf.UsageError):
                    pf.parse_duration(text)

    def test_no_duration_rounds_to_0(self):
        """0 means "never" for max_age: a tiny one must not become it."""
        for text in ('0.1ms', '0.0001s', '0.5ms'):
            with self.subTest(text=text):
                self.assertEqual(pf.parse_duration(text), 1)

    def test_other_types(self):
        for value in (None, 5, 1.5, True, ['1s'], {}):
            with self.subTest(value=value):
                self.assertFalse(pf.is_duration(value))

    def test_written(self):
        table = ((0, '0ms'), (250, '250ms'), (999, '999ms'), (1000, '1s'),
                 (59999, '59s'), (60000, '1m'), (95000, '1m35s'),
                 (185000, '3m05s'), (900000, '15m'), (3600000, '1h00m'),
                 (3900000, '1h05m'), (172799999, '47h59m'),
                 (172800000, '2d'), (864000000, '10d'))
        for ms, text in table:
            with self.subTest(ms=ms):
                self.assertEqual(pf.format_duration(ms), text)


class Test05Times(unittest.TestCase):
    """RFC 3339 in and out."""

    WRITTEN = ((0, '1970-01-01T00:00:00.000Z'),
               (1, '1970-01-01T00:00:00.001Z'),
               (NOW, '2026-09-21T14:13:20.000Z'),
               (1709251199999, '2024-02-29T23:59:59.999Z'),
               (-1, '1969-12-31T23:59:59.999Z'))
    READ = (('2026-09-21T14:13:20Z', NOW), ('2026-09-21 14:13:20', NOW),
            ('2026-09-21t14:13:20z', NOW),
            ('2026-09-21T16:13:20+02:00', NOW),
            ('2026-09-21T08:43:20-0530', NOW),
            ('2026-09-21T14:13:20.1234567Z', NOW + 123),
            ('2026-09-21T14:13:20.5Z', NOW + 500),
            ('1970-01-02', 86400000), ('1970-01-01T01:00', 3600000),
            ('2024-02-29', 1709164800000),
            ('2016-12-31T23:59:60Z', 1483228800000))
    INVALID = ('', 'now', '2026', '2026-08', '20260827', '2026-08-27T',
               '2026-08-27T12', '2026-08-27T12:30:45Z ', '2026-08-27\n',
               ' 2026-08-27', '2026-13-01', '2026-00-01', '2026-01-00',
               '2026-02-29', '2026-04-31', '0000-01-01',
               '2026-08-27T24:00:00Z', '2026-08-27T12:60:00Z',
               '2026-08-27T12:00:61Z', '2026-08-27T12:00:00+24:00',
               '2026-08-27T12:00:00+01:60', '2026-08-27T12:00:00+1:00',
               '2026-08-27Z', '\u0662026-08-27')

    def test_written(self):
        for ms, text in self.WRITTEN:
            with self.subTest(ms=ms):
                self.assertEqual(pf.format_time(ms), text)
                self.assertEqual(pf.parse_time(text), ms)

    def test_read(self):
        for text, ms in self.READ:
            with self.subTest(text=text):
                self.assertEqual(pf.parse_time(text), ms)

    def test_invalid(self):
        for text in self.INVALID:
            with self.subTest(text=text), self.assertRaises(pf.UsageError):
                pf.parse_time(text)


class Test05Text(unittest.TestCase):
    """Foreign text on its way to a terminal, a shell, a log."""

    # Code points that move a cursor, forge a line, reorder or hide text.
    UNSAFE = list(itertools.chain(
        range(0x20), range(0x7f, 0xa0), (0xad, 0x61c, 0xfeff),
        range(0x200b, 0x2010), range(0x2028, 0x202f),
        range(0x2060, 0x206a), range(0xfff9, 0xfffc),
        (0xd800, 0xdbff, 0xdc00, 0xdfff, 0xe0001, 0xe0041, 0xe007f,
         0xe0100, 0xe01ef)))

    def test_unsafe_characters(self):
        for code in self.UNSAFE:
            with self.subTest(code=hex(code)):
                shown = pf.safe_text('a%sb' % chr(code))
                self.assertRegex(shown, r'\Aa\\[xuU][0-9a-f]+b\Z')
                self.assertEqual(int(shown[3:-1], 16), code)

    def test_escapes(self):
        self.assertEqual(
            pf.safe_text('\x1b[31m\r\n\x9b\u202e\u2028\ud800\U000e0041'),
            r'\x1b[31m\x0d\x0a\x9b\u202e\u2028\ud800\U000e0041')

    def test_other_characters_stay(self):
        for text in ('', 'plain', 'caf\u00e9', 'cafe\u0301', '\u65e5\u672c',
                     '\U0001f600', '\\x1b', '\u00a0', '\ufe0f'):
            with self.subTest(text=text):
                self.assertEqual(pf.safe_text(text), text)

    def test_what_is_kept(self):
        self.assertEqual(pf.safe_text('a\nb\tc', '\n'), 'a\nb\\x09c')

    def test_shell_word(self):
        table = (
            ('gh-ops:a/b.c@1_X', 'gh-ops:a/b.c@1_X'), ('', "''"),
            ('a b', "'a b'"), ('$(x)', "'$(x)'"), ('~', "'~'"),
            ("it's", "'it'\\''s'"), ('a\n', "'a\n'"),
            ('caf\u00e9', "'caf\u00e9'"))
        for word, quoted in table:
            with self.subTest(word=word):
                self.assertEqual(pf.shell_word(word), quoted)
                self.assertEqual(shlex.split(quoted), [word])

    def test_plural(self):
        self.assertEqual([pf.plural(n, 'tool') for n in (0, 1, 2)],
                         ['0 tools', '1 tool', '2 tools'])


class Test05Reveal(unittest.TestCase):
    """What a reviewer would not see as it is, made visible and named."""

    TABLE = (
        ('plain text, caf\u00e9, \u65e5\u672c\uff0c \u2013 \u201cx\u201d', ''),
        ('\u26a0\ufe0f careful, 5 m\u00b2, n\u00ba 3, \u2139\ufe0f', ''),
        ('\u0394t in \u03bcs, \u03c32, \u03bb\u03b1\u03bb\u03ac', ''),
        ('\u042d\u0442\u043e \u0438 \u0441 \u043e JSON', ''),
        ('p\u0430th', '\u0430'), ('\u0430\u0441\u0435', ''),
        ('the \u0430\u0441\u0435 of', '\u0430\u0441\u0435'),
        ('\u0430\u0441\u0435 and \u042f', ''),
        ('v\u03b1lue', '\u03b1'), ('the \u03bf', '\u03bf'),
        ('\uff21B', '\uff21'), ('\U0001d41a', '\U0001d41a'),
        ('\u212aey', '\u212a'), ('\u2215etc', '\u2215'),
        ('a\xa0b\u2003c\u3000d', '\xa0\u2003\u3000'),
        ('co\xadop\u200b\u202e\u2060\ufeff', '\xad\u200b\u202e\u2060\ufeff'),
        ('\U000e0049\U000e0100', '\U000e0049\U000e0100'),
        ('a\ufe0f\ufe0f', '\ufe0f\ufe0f'), ('\u26a0\ufe0f\ufe0f', '\ufe0f'),
        ('\u3164\u2800\u115f', '\u3164\u2800\u115f'),
        ('\t\r\n\x1b\x7f\x85', '\t\r\n\x1b\x7f\x85'),
        ('\ud800\ue000\u0378', '\ud800\ue000\u0378'))

    def test_what_is_odd(self):
        for text, odd in self.TABLE:
            with self.subTest(text=ascii(text)):
                places = sorted(pf.odd_places(text))
                self.assertEqual(''.join(text[n] for n in places), odd)

    def test_reveal(self):
        self.assertEqual(
            pf.reveal('p\u0430th \u0430nd\u200b \u65e5 \u26a0\ufe0f\x1b'),
            'p\\u0430th \\u0430nd\\u200b \u65e5 \u26a0\ufe0f\\x1b')

    def test_whatever_is_unsafe_is_revealed(self):
        for code in Test05Text.UNSAFE:
            with self.subTest(code=hex(code)):
                self.assertEqual(pf.reveal(chr(code)),
                                 pf.safe_text(chr(code)))

    def test_notes(self):
        for text, notes in (
                ('fine', []), ('two\nlines', []),
                ('a p\u0430th, p\u0430th', [
                    '\\u0430 CYRILLIC SMALL LETTER A, 2 times, near "a '
                    'p\\u0430th, p\\u0430th"']),
                ('\x1b[2J', ['\\x1b ESCAPE, once, near "\\x1b[2J"']),
                ('\x9b', ['\\x9b CONTROL CHARACTER, once, near "\\x9b"']),
                ('\ue000\ud800\u0378', [
                    '\\ue000 PRIVATE USE, once, near '
                    '"\\ue000\\ud800\\u0378"',
                    '\\ud800 LONE SURROGATE, once, near '
                    '"\\ue000\\ud800\\u0378"',
                    '\\u0378 UNASSIGNED, once, near '
                    '"\\ue000\\ud800\\u0378"'])):
            with self.subTest(text=ascii(text)):
                self.assertEqual(pf.odd_notes(text), notes)

    def test_tags_are_spelt_out(self):
        hidden = ''.join(chr(0xe0000 + ord(char)) for char in 'rm "x"')
        self.assertEqual(pf.odd_notes('Reads.' + hidden), [
            '6 tag characters, which nobody sees and a model reads: '
            '"rm "x""'])

    def test_notes_are_bounded(self):
        notes = pf.odd_notes(''.join(map(chr, range(0xe000, 0xe040))))
        self.assertEqual((len(notes), notes[-1]), (13, 'and 52 more'))

    def test_notes_are_made_once(self):
        with mock.patch.object(pf, 'reveal', mock.Mock(
                return_value='x')) as made:
            pf.odd_notes('\u200b\x1b' * 1000)
        self.assertEqual(made.call_count, 2)

    def test_a_long_word_takes_no_long_time(self):
        self.assertEqual(pf.odd_places('a' * 300000), set())
        self.assertEqual(pf.odd_places('a' * 100000 + '\u0430'), {100000})


class Test05Redact(unittest.TestCase):
    """What looks like a credential is masked."""

    MASKED = (
        ('sk-live-1234', '***'),
        ('FATAL: bad key sk-live-abcd9 here', 'FATAL: bad key *** here'),
        ('Authorization: Bearer abc', 'Authorization: *** ***'),
        ('got bearer abc.def-1', 'got bearer ***'),
        ('Proxy-Authorization: Basic dXNlcjpw',
         'Proxy-Authorization: *** ***'),
        ('API_KEY=zz', 'API_KEY=***'), ('api-key: zz', 'api-key: ***'),
        ('x.secret.y = zz', 'x.secret.y = ***'),
        ('error: API_KEY=zz next', 'error: API_KEY=*** next'),
        ('a=1&access_token=zz&b=2', 'a=1&access_token=***&b=2'),
        ('{"client_secret": "z z", "n": 1}',
         '{"client_secret": ***, "n": 1}'),
        ('{"password":"z\\"z"}', '{"password":***}'),
        ("db_passwd='z z'", 'db_passwd=***'),
        ('{"token":"cut off', '{"token":***'),
        ('run --token zz --v', 'run --token *** --v'),
        ('run --api-key "z z"', 'run --api-key ***'),
        ('run -secret zz', 'run -secret ***'),
        ('Cookie: a=zz; b=zz', 'Cookie: ***'),
        ('Set-Cookie: sid=zz; Path=/', 'Set-Cookie: ***'),
        ('https://u:p@h/mcp?exaApiKey=zz', 'https://***@h/mcp?***'),
        ('HTTPS://u:p@s@h/x', 'HTTPS://***@h/x'),
        ('see wss://h/a?k=zz#f.', 'see wss://h/a?***'),
        ('postgres://u:zz@db:5/x', 'postgres://***@db:5/x'),
        ('eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln', '***'),
        ('ghp_0123456789abcdef', '***'), ('AKIAIOSFODNN7EXAMPLE', '***'),
        ('pfl_agt_0123456789abcdef', '***'),
        ('id 0123456789abcdef0123456789abcdef', 'id ***'))
    PLAIN = (
        '', 'FATAL: API_KEY is not set', 'exited with code 3',
        'listening on http://127.0.0.1:8080/mcp', 'see https://h/a and b@c',
        'the tool list has 12 open issues', 'commit 9fceb02, 3 files',
        'a --flag x', 'key', 'token', 'no such file: /a/b', 'x=1 y=2',
        'TypeError: a is not b', 'a_very_long_identifier_without_a_digit_x',
        'Press any key to go on', '10:30:45 started')

    def test_masked(self):
        for text, shown in self.MASKED:
            with self.subTest(text=text):
                self.assertEqual(pf.redact(text), shown)

    def test_twice_is_once(self):
        for text, shown in self.MASKED:
            with self.subTest(text=text):
                self.assertEqual(pf.redact(shown), shown)

    def test_ordinary_text(self):
        for text in self.PLAIN:
            with self.subTest(text=text):
                self.assertEqual(pf.redact(text), text)

    def test_known_values(self):
        self.assertEqual(
            pf.redact('a hunter2-long b hunter2 c abc d abcd',
                      ('hunter2', 'hunter2-long', 'abc', 'abcd')),
            'a *** b *** c abc d ***')

    def test_long_text_costs_one_scan(self):
        """A server's own text must not be able to keep us busy."""
        for text in ('key' * 30000, 'a' * 90000, '-' * 90000,
                     'http://' * 9000, 'token ' * 9000, '"' * 90000,
                     'key' + ' ' * 90000, '://' + 'a' * 90000):
            with self.subTest(text=text[:10]):
                self.assertEqual(pf.redact(text), text)


class Test05Containers(unittest.TestCase):
    """Command lines that start a container, and those that do not."""

    # line, engine, index behind run, interactive, cidfile, image
    RUNS = (
        ('docker run -i --rm img', 'docker', 2, True, None, 'img'),
        ('docker run img -i', 'docker', 2, False, None, 'img'),
        ('/usr/bin/podman run -it img', 'podman', 2, True, None, 'img'),
        ('nerdctl run -ti img', 'nerdctl', 2, True, None, 'img'),
        (r'C:\bin\docker.exe run -dit img', 'docker', 2, True, None, 'img'),
        ('DOCKER.EXE container run -i a', 'docker', 3, True, None, 'a'),
        ('podman container run a', 'podman', 3, False, None, 'a'),
        ('docker -H tcp://h:1 run -i a', 'docker', 4, True, None, 'a'),
        ('docker -Htcp://h:1 -D run -i a', 'docker', 4, True, None, 'a'),
        ('docker --context run run -i a', 'docker', 4, True, None, 'a'),
        ('docker --tls --config=/c run -i a', 'docker', 4, True, None, 'a'),
        ('docker run --interactive a', 'docker', 2, True, None, 'a'),
        ('docker run --interactive=true a', 'docker', 2, True, None, 'a'),
        ('docker run --interactive=false a', 'docker', 2, False, None, 'a'),
        ('docker run -i=false a', 'docker', 2, False, None, 'a'),
        ('docker run -e -i a', 'docker', 2, False, None, 'a'),
        ('docker run -e K=zz -i a', 'docker', 2, True, None, 'a'),
        ('docker run -ite K=zz a', 'docker', 2, True, None, 'a'),
        ('docker run -teK=i a', 'docker', 2, False, None, 'a'),
        ('docker run --new-flag -i a', 'docker', 2, True, None, 'a'),
        ('docker run --name -1 -i a', 'docker', 2, True, None, 'a'),
        ('docker run --cidfile /f -i a', 'docker', 2, True, '/f', 'a'),
        ('docker run --cidfile=/f a -i', 'docker', 2, False, '/f', 'a'),
        ('docker run -i -- a -t', 'docker', 2, True, None, 'a'),
        ('docker run -i', 'docker', 2, True, None, ''),
        ('docker run -w', 'docker', 2, False, None, ''),
        ('docker run - a', 'docker', 2, False, None, '-'))
    OTHERS = ('docker', 'docker -H', 'docker exec -i c x', 'docker -D',
              'docker mcp gateway run', 'docker compose run a',
              'docker-compose run -i a', 'my-docker run -i a', 'run run',
              'sh -c run', 'docker.py run -i a')

    def test_runs(self):
        for line, engine, at, is_open, file, image in self.RUNS:
            with self.subTest(line):
                run = pf.container_of(line.split())
                self.assertEqual((run.engine, run.at, run.image),
                                 (engine, at, image))
                self.assertIs(pf.is_interactive(run), is_open)
                self.assertEqual(run.options.get('cidfile'), file)

    def test_others(self):
        for line in self.OTHERS:
            with self.subTest(line):
                self.assertIsNone(pf.container_of(line.split()))


# ==========================================================================
# 6. identity
# ==========================================================================


class Test06Ids(unittest.TestCase):
    """Ids are split at the first colon, and never changed otherwise."""

    X200 = 'x' * 200
    GOOD = (
        ('s:t', 's', 't'), (' s:t\n', 's', 't'), ('s : t', 's', 't'),
        ('s:ns:sub:tool', 's', 'ns:sub:tool'), ('s:a/b', 's', 'a/b'),
        ('s:a.b', 's', 'a.b'), ('srv.x:t', 'srv.x', 't'),
        ('S:T', 'S', 'T'), ('s:' + X200, 's', X200), ('a=b:c=d', 'a=b',
                                                      'c=d'),
        ('s:caf\u00e9', 's', 'caf\u00e9'), ('s:cafe\u0301', 's',
                                            'cafe\u0301'),
        ('npm:@a/b:t', 'npm', '@a/b:t'), ('s::', 's', ':'))
    BAD = ('s', '', ':', ':x', 's:', ' : ', 's: ', ' :t', 'mcp__gh__x')

    def test_good(self):
        for text, server, name in self.GOOD:
            with self.subTest(text=text):
                self.assertEqual(pf.parse_id(text, 'p'),
                                 (text.strip(), server, name, 'p'))

    def test_malformed(self):
        for text in self.BAD:
            with self.subTest(text=text):
                self.assertEqual(pf.parse_id(text),
                                 (text.strip(), '', '', ''))

    def test_hint(self):
        plain = 'An id has the form <server>:<tool>.'
        table = (
            ('s', plain), (':x', plain), ('mcp__gh', plain),
            ('mcp____x', plain), ('mcp__gh__x:', plain),
            ('mcp__gh__create_issue', 'An id has the form <server>:<tool>; '
             'did you mean gh:create_issue?'),
            ('mcp__gh__a__b', 'An id has the form <server>:<tool>; did you '
             'mean gh:a__b?'))
        for text, hint in table:
            with self.subTest(text=text):
                self.assertEqual(pf.id_hint(pf.parse_id(text)), hint)

    def test_storable(self):
        for text, is_storable in (('a', True), ('\U0001f600', True),
                                  ('a\nb', True), ('\ud800', False),
                                  ('a\0', False)):
            with self.subTest(text=text):
                self.assertIs(pf.is_storable(text), is_storable)


class Test06Pins(unittest.TestCase):
    """Pins: sha256/v<N>:<64 hex>."""

    HEX = '0123456789abcdef' * 4

    def test_valid(self):
        for text, pin in (
                ('sha256/v1:' + self.HEX, (1, self.HEX)),
                ('sha256/v1:' + self.HEX.upper(), (1, self.HEX)),
                ('sha256/v0001:' + self.HEX, (1, self.HEX)),
                ('sha256/v12:' + self.HEX, (12, self.HEX)),
                ('sha256/v0:' + self.HEX, (0, self.HEX))):
            with self.subTest(text=text):
                self.assertEqual(pf.parse_pin(text), pin)

    def test_invalid(self):
        for text in (
                '', 'x', self.HEX, 'sha256/v1:', 'sha256:' + self.HEX,
                'sha256/v1:' + self.HEX[:-1], 'sha256/v1:%s0' % self.HEX,
                'sha256/v:' + self.HEX, 'sha256/v-1:' + self.HEX,
                'sha256/v+1:' + self.HEX, 'sha256/v1.0:' + self.HEX,
                'SHA256/v1:' + self.HEX, 'sha256/V1:' + self.HEX,
                'sha512/v1:' + self.HEX, ' sha256/v1:' + self.HEX,
                'sha256/v1:%s\n' % self.HEX, 'sha256/v1:g' + self.HEX[1:],
                'sha256/v\u0661:' + self.HEX, 'sha256/v1:' + '\uff11' * 64,
                'sha256/v%s:%s' % ('1' * 4001, self.HEX)):
            with self.subTest(text=text[:80]):
                self.assertIsNone(pf.parse_pin(text))

    def test_written_as_read(self):
        text = 'sha256/v1:' + self.HEX
        self.assertEqual(pf.format_hash(*pf.parse_pin(text)), text)


# Definitions as a server sends them, the text that is hashed (written by
# hand from the rules), and its SHA-256. Frozen: pins of users hold these.
VECTORS = (
    (r'{"name": "echo"}',
     r'{"name":"echo","v":1}',
     '3bb929a2e99cb3e6615d59dbddc620f5086faa7260e5104aaf5df257ca34f197'),
    (r'{"name": "echo", "description": "Echo text",'
     r' "inputSchema": {"type": "object"},'
     r' "annotations": {"readOnlyHint": true}, "_meta": {"a": 1}}',
     r'{"description":"Echo text","inputSchema":{"type":"object"},'
     r'"name":"echo","v":1}',
     '48ddcb232ca83e17c79dfb6ac3d9909450729352e3eaa349d52d1b92b2f8e9a3'),
    (r'{"name": "n", "inputSchema": {"h": -0, "g":'
     r' 123456789012345678901234567890, "f": 0.0000001, "e": 1E2, "d": 0.1,'
     r' "c": -0.0, "b": 1e16, "a": 1.0, "i": -25e-1}}',
     r'{"inputSchema":{"a":1,"b":10000000000000000,"c":0,"d":0.1,"e":100,'
     r'"f":1e-07,"g":123456789012345678901234567890,"h":0,"i":-2.5},'
     r'"name":"n","v":1}',
     'e0f67f13570e81408dca442aa54f522df6a2db9733c15b50afbb4c05f850ea25'),
    (r'{"name": "u", "description":'
     r' "caf\u00E9 \uD83D\uDE00 \ud800 \u2028 \u007f \/ \"\\ \u000a"}',
     r'{"description":"caf\u00e9 \ud83d\ude00 \ud800 \u2028 \u007f / \"\\'
     r' \n","name":"u","v":1}',
     'd6877c4d948c12518de84a564b29dba8daec849c742726aa7aafaaae93c39b6b'),
    (r'{"name": "x", "title": null, "description": null, "outputSchema":'
     r' null, "inputSchema": {"required": null}}',
     r'{"inputSchema":{"required":null},"name":"x","v":1}',
     'fdba4db54472ad349341f2ecc4a4636fd48469bd2a09af77175958d1b45bd945'),
    ('{"name": "k", "inputSchema": {"\U0001f600": 5, "\uff5e": 4,'
     ' "\u00e9": 3, "b": 2, "a": 1}}',
     r'{"inputSchema":{"a":1,"b":2,"\u00e9":3,"\uff5e":4,'
     r'"\ud83d\ude00":5},"name":"k","v":1}',
     'c0789f57c38455547b2096400cc86343dcdd5c472f4789c706f64c2bf6ebbf41'),
    (r'{"title": "T", "outputSchema": [false, true, null], "name": "all",'
     r' "inputSchema": {}, "description": ""}',
     r'{"description":"","inputSchema":{},"name":"all",'
     r'"outputSchema":[false,true,null],"title":"T","v":1}',
     '17f2398b9aa746d51892b4e3434a76cfa2dd15231d04690d12332ee14181491c'),
)


def read_one(text):
    """Read the JSON of one listed tool into its Definition."""
    tools, _ = pf.read_tools([pf.decode_json(text)])
    return tools[0]


def digest_with(members):
    """Hash a tool t with these further members (JSON text)."""
    return read_one('{"name": "t", %s}' % members).hash


class Test06Hash(unittest.TestCase):
    """Hash version 1 (contract 10), the same on every Python."""

    def test_vectors(self):
        for given, text, digest in VECTORS:
            with self.subTest(text=text):
                found = read_one(given)
                self.assertEqual((found.text, found.hash, found.flaw),
                                 (text, digest, ''))

    ALIKE = (
        ('"inputSchema": {"a": 1, "b": 2}', '"inputSchema": {"b":2, "a":1}'),
        ('"inputSchema": {"a": 10}', '"inputSchema": {"a": 10.0}'),
        ('"inputSchema": {"a": 0}', '"inputSchema": {"a": -0.0}'),
        ('"inputSchema": {"a": 1e2}', '"inputSchema": {"a": 100}'),
        ('"inputSchema": {"a": 10000000000000000}',
         '"inputSchema": {"a": 1e16}'),
        ('"description": "\\u00e9"', '"description": "\u00e9"'),
        ('"description": null', '"title": null'),
        ('"description": "d"', '"annotations": {"readOnlyHint": true},'
         ' "description": "d"'),
        ('"description": "d"', '"icons": [], "execution": {"taskSupport": '
         '"optional"}, "description": "d"'))
    DIFFERENT = (
        ('"inputSchema": {"required": ["a", "b"]}',
         '"inputSchema": {"required": ["b", "a"]}'),
        ('"inputSchema": {"required": null}', '"inputSchema": {}'),
        ('"inputSchema": {}', '"inputSchema": null'),
        ('"inputSchema": {"a": 1}', '"inputSchema": {"a": true}'),
        ('"inputSchema": {"a": 1}', '"inputSchema": {"a": "1"}'),
        ('"inputSchema": {"a": 1}', '"inputSchema": {"a": 1.5}'),
        ('"description": ""', '"description": null'),
        ('"description": "a "', '"description": "a"'),
        ('"description": "\u00e9"', '"description": "e\u0301"'),
        ('"description": "\\ud800"', '"description": "\ufffd"'),
        ('"title": "a", "description": "b"', '"title": "ab"'),
        ('"title": "a"', '"description": "a"'),
        ('"inputSchema": {"a": 1}', '"outputSchema": {"a": 1}'),
        ('"description": "x\\",\\"title\\":\\"y"',
         '"description": "x", "title": "y"'))

    def test_alike(self):
        for one, two in self.ALIKE:
            with self.subTest(one=one, two=two):
                self.assertEqual(digest_with(one), digest_with(two))

    def test_different(self):
        for one, two in self.DIFFERENT:
            with self.subTest(one=one, two=two):
                self.assertNotEqual(digest_with(one), digest_with(two))

    def test_the_name_counts(self):
        self.assertNotEqual(read_one('{"name": "a"}').hash,
                            read_one('{"name": "b"}').hash)

    REFUSED = (
        ('"inputSchema": {"a": NaN}', 'NaN'),
        ('"inputSchema": {"a": [Infinity]}', 'Infinity'),
        ('"inputSchema": {"a": 1e400}', 'too large'),
        ('"inputSchema": {"a": %s}' % ('1' * 4001), '4000 digits'),
        ('"inputSchema": {"a": 1, "a": 2}', '"a" stands twice'),
        ('"outputSchema": [{"b": 1, "b": 1}]', '"b" stands twice'),
        ('"annotations": {"x": 1, "x": 1}', '"x" stands twice'),
        ('"description": "a", "description": "a"', '"description" stands'),
        ('"icons": 1, "icons": 2', '"icons" stands twice'),
        ('"inputSchema": ' + '[' * 200 + ']' * 200, 'nesting over 200'),
        ('"inputSchema": ' + '[' * 100000 + ']' * 100000,
         'nesting over 200'))

    def test_refused(self):
        for members, why in self.REFUSED:
            with self.subTest(members=members[:60]):
                found = read_one('{"name": "t", %s}' % members)
                self.assertIn(why, found.flaw)
                self.assertEqual(
                    (found.name, found.hash, found.text, found.hints,
                     found.flaw[:20]),
                    ('t', '', '', {}, 'definition refused: '))

    def test_depth_of_a_definition(self):
        deep = '"inputSchema": ' + '[' * 199 + ']' * 199
        self.assertEqual(read_one('{"name": "t", %s}' % deep).flaw, '')


class Test06Fields(unittest.TestCase):
    """Which members two definitions differ in, as they are hashed."""

    def test_fields(self):
        for more, fields in (
                ({}, ()), ({'annotations': SAFE}, ()), ({'title': None}, ()),
                ({'title': 'T'}, ('title',)),
                ({'outputSchema': {}, 'description': 'x'},
                 ('description', 'outputSchema')),
                ({'name': 'b'}, ('name',)),
                ({'inputSchema': {'type': 'object', 'a': None}},
                 ('inputSchema',))):
            with self.subTest(more):
                self.assertEqual(pf.changed_fields(
                    pf.definition_text(tool()),
                    pf.definition_text(dict(tool(), **more))), fields)

    def test_true_is_not_1(self):
        """Python says so, and a default of true must not pass for 1."""
        self.assertEqual(pf.changed_fields(*(pf.definition_text(
            tool(inputSchema={'default': value})) for value in (1, True))),
            ('inputSchema',))

    def test_a_missing_text_has_no_name_either(self):
        self.assertIn('name', pf.changed_fields('', pf.definition_text(
            tool())))


class Test06Hints(unittest.TestCase):
    """Hints count as JSON booleans only, and have a direction."""

    def test_read(self):
        table = (
            (None, {}), ({}, {}), ('x', {}), ([], {}), (True, {}),
            ({'readOnlyHint': True, 'title': 'x'}, {'readOnlyHint': True}),
            ({'readOnlyHint': 'true', 'destructiveHint': 0,
              'openWorldHint': None, 'idempotentHint': 1}, {}),
            ({'readOnlyHint': False, 'destructiveHint': True,
              'idempotentHint': False, 'openWorldHint': True},
             {'readOnlyHint': False, 'destructiveHint': True,
              'idempotentHint': False, 'openWorldHint': True}))
        for annotations, hints in table:
            with self.subTest(annotations=annotations):
                self.assertEqual(pf.read_hints(annotations), hints)

    def test_direction(self):
        """Riskier: from the safe value to the other one or to none."""
        safe = {'readOnlyHint': True, 'destructiveHint': False,
                'openWorldHint': False}
        values = (True, False, None)
        for name in ('readOnlyHint', 'destructiveHint', 'idempotentHint',
                     'openWorldHint'):
            for old, new in itertools.product(values, values):
                is_riskier = (name in safe and old is safe[name]
                              and new is not safe[name])
                with self.subTest(name=name, old=old, new=new):
                    before = {} if old is None else {name: old}
                    after = {} if new is None else {name: new}
                    self.assertEqual(
                        bool(pf.riskier_hints(before, after)), is_riskier)

    def test_words(self):
        self.assertEqual(
            pf.riskier_hints(SAFE, {'destructiveHint': True,
                                    'readOnlyHint': False}),
            ['readOnlyHint true -> false', 'destructiveHint false -> true',
             'openWorldHint false -> absent'])

    def test_review_token(self):
        """It is bound to the definition and to every hint."""
        tokens = {pf.review_token(H1, {}), pf.review_token(H2, {}),
                  pf.review_token(H1, {'readOnlyHint': True}),
                  pf.review_token(H1, {'readOnlyHint': False})}
        self.assertEqual(len(tokens), 4)
        self.assertEqual(pf.review_token(H1, dict(SAFE)),
                         pf.review_token(H1, dict(reversed(list(
                             SAFE.items())))))


class Test06Launch(unittest.TestCase):
    """An approval belongs to what is started, as written."""

    COUNTS = (
        {'command': 'other'}, {'args': ('a',)}, {'cwd': '/d'},
        {'transport': 'http', 'command': None, 'url': 'https://h/'},
        {'env': {'PATH': '/x'}}, {'env': {'PATH': None}},
        {'env': {'LD_PRELOAD': 'x'}}, {'env': {'DYLD_INSERT': 'x'}},
        {'env': {'NODE_OPTIONS': 'x'}}, {'env': {'NODE_PATH': 'x'}},
        {'env': {'PYTHONPATH': 'x'}}, {'env': {'PYTHONSTARTUP': 'x'}},
        {'env': {'RUBYOPT': 'x'}}, {'env': {'PERL5OPT': 'x'}},
        {'env': {'BASH_ENV': 'x'}}, {'env': {'npm_config_registry': 'x'}},
        {'env': {'NPM_CONFIG_REGISTRY': 'x'}}, {'env': {'HOME': 'x'}},
        {'env': {'UV_INDEX_URL': 'x'}}, {'env': {'PIP_CONFIG_FILE': 'x'}},
        {'env': {'GIT_SSH_COMMAND': 'x'}}, {'env': {'PERL5LIB': 'x'}},
        {'env': {'JAVA_TOOL_OPTIONS': 'x'}}, {'env': {'DOCKER_HOST': 'x'}},
        {'env': {'XDG_DATA_HOME': 'x'}}, {'env': {'BASH_FUNC_ls%%': 'x'}})
    COUNTS_NOT = (
        {'env': {'TOKEN': 'x'}}, {'env': {'MYPATH': 'x'}},
        {'env': {'NODE_ENV': 'x'}}, {'headers': {'A': 'x'}},
        {'env': {'GIT_TOKEN': 'x'}}, {'env': {'HOMEPAGE': 'x'}},
        {'name': 'n'}, {'file': '/d/x.json'}, {'base': '/d'},
        {'enabled': False}, {'quarantined': True}, {'trust_mode': 'auto'},
        {'allow': ['t']}, {'deny': ['t']}, {'max_age': 5},
        {'start_timeout': 5}, {'request_timeout': 5},
        {'client': 'claude-code'}, {'dialect': 'claude-code'},
        {'health': {'a': 1}}, {'overlaid': frozenset(('env.A',))},
        {'warnings': ['w']})

    def test_what_counts(self):
        digests = [pf.launch_digest(a_server(**more))
                   for more in self.COUNTS]
        digests.append(pf.launch_digest(a_server()))
        self.assertEqual(len(set(digests)), len(self.COUNTS) + 1)

    def test_what_does_not(self):
        for more in self.COUNTS_NOT:
            with self.subTest(more=more):
                self.assertEqual(pf.launch_digest(a_server(**more)),
                                 pf.launch_digest(a_server()))

    def test_no_field_bleeds(self):
        self.assertNotEqual(
            pf.launch_digest(a_server(command='a', args=('b c',))),
            pf.launch_digest(a_server(command='a', args=('b', 'c'))))

    def test_frozen(self):
        """Stored approvals hold these digests."""
        self.assertEqual(
            pf.launch_digest(a_server(command='npx', args=('-y', 'x'),
                                      env={'PATH': None, 'K': 'v'})),
            '7d9d419727546e70dfbfd6f0c0695b91435d970dbb20a33d47d34cd83f74918f')

    MASKED = (
        (('--token', 'zz'), "--token '***'"),
        (('--token=zz', 'a'), "'--token=***' a"),
        (('-e', 'K=zz', '-v'), "-e 'K=***' -v"), (('-eK=zz',), "'-eK=***'"),
        (('--env', 'K=z=z'), "--env 'K=***'"),
        (('--env=K=zz',), "'--env=K=***'"),
        (('--header', 'X: zz'), "--header 'X: ***'"),
        (('-H', 'X:zz', 'a'), "-H 'X: ***' a"),
        (('--header=X: zz',), "'--header=X: ***'"),
        (('-HX: zz',), "'-HX: ***'"),
        (('API_KEY=a zz',), "'API_KEY=***'"),
        (('--db-password', 'zz'), "--db-password '***'"),
        (('-apikey', 'zz'), "-apikey '***'"),
        (('https://u:zz@h/x',), "'https://***@h/x'"),
        (('https://h/x?k=zz',), "'https://h/x?***'"),
        (('--header', 'Authorization: Bearer zz'),
         "--header 'Authorization: ***'"),
        (('Bearer zz',), "'Bearer ***'"))

    def test_masked_arguments(self):
        for args, shown in self.MASKED:
            with self.subTest(args=args):
                self.assertEqual(pf.launch_text(a_server(args=args)),
                                 'run ' + shown)

    def test_plain_arguments(self):
        args = ('-y', '@scope/pkg@1.2', '--port', '80', '--verbose', 'a b')
        self.assertEqual(
            pf.launch_text(a_server(command='npx', args=args)),
            "npx -y @scope/pkg@1.2 --port 80 --verbose 'a b'")

    def test_masked_url(self):
        server = a_server(transport='http', command=None,
                          url='https://u:zz@h/mcp?exaApiKey=zz',
                          headers={'X': 'zz'})
        self.assertEqual(pf.launch_text(server),
                         'http https://***@h/mcp?***')

    def test_masked_environment(self):
        """It goes into lockfiles, which are committed."""
        names = ('npm_config_//r.org/:_authToken', 'NPM_CONFIG__PASSWORD',
                 'npm_config__auth', 'PYTHON_TOKEN')
        self.assertEqual(
            pf.launch_text(a_server(env=dict.fromkeys(names, 'z "z'))),
            'run [%s]' % ' '.join(name + '=***' for name in sorted(names)))
        self.assertEqual(pf.launch_text(a_server(env={
            'npm_config__auth': None})), 'run [npm_config__auth=(removed)]')

    def test_shown_environment(self):
        """Only what chooses code is shown, and where it runs."""
        server = a_server(cwd='/w', env={'TOKEN': 'zz', 'PATH': None,
                                         'PYTHONPATH': '/p'})
        self.assertEqual(
            pf.launch_text(server),
            'run [cwd=/w PATH=(removed) PYTHONPATH=/p]')


# ==========================================================================
# 7. config
# ==========================================================================

OURS, CLAUDE = '/c/ours.json', '/r/.mcp.json'


def read_files(*files, **more):
    """Read config files, each a path and its bytes, text or value."""
    sources = []
    for path, content in files:
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        if isinstance(content, str):
            content = content.encode('utf-8')
        sources.append((path, path, content))
    return pf.read_config(sources, **more)


def decode(data, path):
    """Parse a file of ours: (table, keys that stand twice)."""
    file = pf.parse_config(path, path, data, 'preflight')
    return file.table, file.doubles


def read_entry(entry, path=OURS, *overlays):
    """Read the entry s of a file, with overlays: (Server, why not)."""
    files = [(path, {'mcpServers': {'s': entry}})]
    files += [('/o/%d.json' % place, {'mcpServers': {'s': overlay}})
              for place, overlay in enumerate(overlays)]
    return pf.look_up(read_files(*files), 's')


def read_good(entry, path=OURS, *overlays):
    """Read the entry s, which must be good."""
    server, why = read_entry(entry, path, *overlays)
    if server is None:
        raise AssertionError(why)
    return server


class Test07Bytes(unittest.TestCase):
    """Bytes of a config file in, a table or a place out."""

    TABLE = {'mcpServers': {'s': {'command': 'caf\u00e9'}}}
    TEXT = json.dumps(TABLE, ensure_ascii=False)

    def test_encodings(self):
        for data in (
                self.TEXT.encode('utf-8'), self.TEXT.encode('utf-8-sig'),
                self.TEXT.encode('utf-16'),
                b'\xff\xfe' + self.TEXT.encode('utf-16-le'),
                b'\xfe\xff' + self.TEXT.encode('utf-16-be'),
                self.TEXT.replace(' ', '\r\n').encode('utf-8')):
            with self.subTest(data=data[:8]):
                self.assertEqual(decode(data, 'c'),
                                 (self.TABLE, []))

    def refusal(self, data):
        """Give the text of the error that these bytes are."""
        with self.assertRaises(pf.ConfigError) as caught:
            decode(data, 'DIR/c.json')
        self.assertIn('DIR/c.json', str(caught.exception))
        return str(caught.exception)

    def test_not_utf8(self):
        self.assertIn('is not UTF-8 (byte 6)', self.refusal(b'{"a":"\xe9"}'))
        self.assertIn('is not UTF-8', self.refusal(b'\xff\xfe{\0"'))

    def test_nothing_there(self):
        for data in (b'', b' \n\t'):
            self.assertIn('is empty', self.refusal(data))

    def test_too_large(self):
        self.assertIn('is larger than', self.refusal(b'{}' + b' ' * (16
                                                                     << 20)))

    def test_no_object(self):
        for data in (b'[]', b'"x"', b'null', b'1', b'[1, // x\n]'):
            self.assertIn('holds no JSON object', self.refusal(data))

    PLACES = (
        ('{"a": 1,\n "b" 2}', 2, 6, "Expecting ':' delimiter"),
        ('{"mcpServers": {', 1, 17, 'Expecting property name'),
        ('{"mcpServers": {"s": {"command": "x', 1, 34, 'Unterminated'),
        ('// one\n{"a": 1, // two\n "b" 2}', 3, 6, "Expecting ':'"),
        ('{"a": 1, /* two\n lines */ "b" 2}', 2, 15, "Expecting ':'"),
        ('{\r\n"a" 1}', 2, 5, "Expecting ':'"),
        ('{\n  "a": /* x', 2, 8, 'a /* comment has no end'),
        ('{"a": "/*", "b": /*', 1, 18, 'a /* comment has no end'),
        ('{"a":\n NaN}', 2, 2, 'NaN is not JSON'),
        ('{"a": "NaN", "b": -Infinity}', 1, 19, '-Infinity is not JSON'),
        ('\0\0\0', 1, 1, 'Expecting value'),
        ('{} {}', 1, 4, 'Extra data'),
        ('{"a":\n' + '[' * 200 + ']' * 200 + '}', 2, 200,
         'nests deeper than 200 levels'),
        ('{"a": // "\n' + '[' * 100000, 2, 200, 'nests deeper'),
        (r'{"a": "C:\dir"}', 1, 10, 'double each backslash'),
        ("{'a': 1}", 1, 2, 'straight double quotes'),
        ('{\u201ca\u201d: 1}', 1, 2, 'straight double quotes'))

    def test_error_places(self):
        for text, line, column, why in self.PLACES:
            with self.subTest(text=text[:40]):
                found = self.refusal(text.encode('utf-8'))
                self.assertIn('DIR/c.json, line %d, column %d: '
                              % (line, column), found)
                self.assertIn(why, found)

    def test_deep_in_a_comment_is_not_deep(self):
        text = '{"a": 1, // %s\n "b": 2}' % ('[' * 300)
        self.assertEqual(decode(text.encode(), 'c')[0],
                         {'a': 1, 'b': 2})

    def test_comments(self):
        table = (
            ('{"a": 1} // x', {'a': 1}), ('/**/{"a": 1}', {'a': 1}),
            ('{"a": [1, 2,], }', {'a': [1, 2]}),
            ('{"a": 1, // x\n}', {'a': 1}),
            ('{"a": 1, /* , } */ /* ] */ }', {'a': 1}),
            ('{"u": "https://h/x//y", "t": ["a,]", "/* b */",],}',
             {'u': 'https://h/x//y', 't': ['a,]', '/* b */']}),
            (r'{"a": "\"//\\", /* " */ "b": "\\",}',
             {'a': '"//\\', 'b': '\\'}),
            ('{"a": 1, // it\'s "here\n "b": 2}', {'a': 1, 'b': 2}),
            ('{ // note\n "mcpServers":{ "s":{"url":"https://h/x//y", '
             '/* a , } */ "args":["a,]","b",],}, } }', {'mcpServers': {
                 's': {'url': 'https://h/x//y', 'args': ['a,]', 'b']}}}))
        for text, value in table:
            with self.subTest(text=text):
                self.assertEqual(decode(text.encode(), 'c'),
                                 (value, []))

    def test_blanks_keep_their_shape(self):
        text = '{"a": 1, // \u00e9\r\n /* x\ny */ "b": "//",\n}'
        blank = pf.blank_comments(text)
        self.assertEqual(len(blank), len(text))
        self.assertEqual(blank, '{"a": 1,     \r\n     \n     "b": "//" \n}')

    def test_doubles(self):
        text = '{"a": {"x": 1, "x": 2, "y": 1, "y": 1}, "b": 1}'
        self.assertEqual(decode(text.encode(), 'c'),
                         ({'a': {'x': 2, 'y': 1}, 'b': 1}, ['x', 'y']))

    def test_a_string_without_end_costs_one_scan(self):
        self.refusal(b'{"' + b'\\"' * 200000)


class Test07Paths(unittest.TestCase):
    """Whose file it is, by flag and path."""

    def test_ours_or_not_told(self):
        for path in ('c.json', '/x/config.json', '/x/mcp_config.json',
                     '/x/my.mcp.json', '/x/mcp.json', '/x/settings.json'):
            with self.subTest(path=path):
                self.assertEqual(pf.dialect_of(path), '')

    def test_flag_wins(self):
        entry = {'mcpServers': {'s': {'command': 'x', 'trust_mode': 'auto'}}}
        for path, flag, mode in (
                (CLAUDE, '', 'manual'), (CLAUDE, 'preflight', 'auto'),
                (OURS, '', 'auto'), (OURS, 'cursor', 'manual')):
            with self.subTest(path=path, flag=flag):
                config = read_files((path, entry), dialect=flag)
                self.assertEqual(pf.look_up(config, 's')[0].trust_mode, mode)

    def test_a_link_hides_no_client(self):
        """A link of another name leads to a file that a pull request may
        change: its owner's rules hold."""
        data = b'{"mcpServers": {}, "quarantine_enabled": false}'
        for real in ('/r/.mcp.json', '/r/.cursor/mcp.json'):
            config = pf.read_config([('/c/x.json', real, data)])
            self.assertTrue(config.settings['quarantine_enabled'])
            self.assertIn('quarantine_enabled ignored', config.warnings[0])


class Test07Entries(unittest.TestCase):
    """An entry of our own file, and of Claude Code's."""

    def test_stdio(self):
        for path, more in ((OURS, {}), (CLAUDE, {
                'dialect': 'claude-code', 'base': '/r'})):
            self.assertEqual(
                read_good({'command': 'x', 'args': ['a', 1, 2.5, True,
                                                    False],
                           'env': {'A': 'b', 'N': 3, 'T': True, 'R': None},
                           'cwd': 'sub'}, path),
                a_server(file=path, command='x', cwd='sub', args=(
                    'a', '1', '2.5', 'true', 'false'), env={
                        'A': 'b', 'N': '3', 'T': 'true', 'R': None},
                    warnings=['args that are no text are read as text'],
                    **more))

    def test_http(self):
        self.assertEqual(
            read_good({'type': 'http', 'url': 'https://h/', 'headers': {
                'A': 'b', 'N': 3, 'R': None}}),
            a_server(file=OURS, transport='http', command=None,
                     url='https://h/', headers={'A': 'b', 'N': '3'}))

    def test_transports(self):
        url = {'url': 'https://h/'}
        for entry, transport in (
                ({'command': 'x'}, 'stdio'), (url, 'auto'),
                (dict(url, type='http'), 'http'),
                (dict(url, type='sse'), 'sse'),
                (dict(url, type='streamable-http'), 'http'),
                (dict(url, type='streamableHttp'), 'http'),
                (dict(url, type='StreamableHTTP'), 'http'),
                (dict(url, type=None), 'auto'),
                ({'command': 'x', 'type': 'stdio'}, 'stdio'),
                ({'command': 'x', 'type': 'local'}, 'stdio')):
            for path in (OURS, CLAUDE):
                with self.subTest(entry=entry, path=path):
                    self.assertEqual(read_good(entry, path).transport,
                                     transport)

    def test_command_beats_url(self):
        server = read_good({'command': 'x', 'url': 'https://h/'})
        self.assertEqual((server.transport, server.url), ('stdio', None))
        self.assertEqual(server.warnings,
                         ['has a command and a url, or two; the first '
                          'counts'])

    def test_our_keys(self):
        server = read_good({
            'command': 'x', 'quarantined': True, 'trust_mode': 'auto',
            'disabled_tools': ['t'], 'start_timeout': '1s',
            'request_timeout': '2s', 'max_age': '0', 'client':
            'claude-code', 'health': {'setup': 'a'}, 'ignore_changes': {
                't': ['description']}})
        self.assertEqual(server, a_server(
            file=OURS, command='x', quarantined=True, trust_mode='auto',
            deny=['t'], start_timeout=1000, request_timeout=2000,
            max_age=0, client='claude-code', health={'setup': 'a'},
            ignore_changes={'t': ['description']},
            extra={'deny': ('disabled_tools', OURS)}))

    def test_trust_modes(self):
        for word, mode in (('manual', 'manual'), ('scan', 'manual'),
                           ('auto', 'auto'), (None, 'manual')):
            self.assertEqual(read_good({'command': 'x', 'trust_mode': word
                                        }).trust_mode, mode)

    def test_on_and_off(self):
        """Off wins a contradiction; missing and null mean on."""
        for flags, is_on in (
                ({}, True), ({'enabled': True}, True),
                ({'enabled': False}, False), ({'disabled': True}, False),
                ({'disabled': False}, True), ({'enabled': None}, True),
                ({'disabled': None, 'enabled': None}, True),
                ({'enabled': True, 'disabled': True}, False),
                ({'enabled': False, 'disabled': False}, False)):
            for path in (OURS, CLAUDE):
                with self.subTest(flags=flags, path=path):
                    server = read_good(dict(flags, command='x'), path)
                    self.assertIs(server.enabled, is_on)
                    self.assertEqual(server.warnings, [])

    def test_tool_lists(self):
        for lists, found in (
                ({}, (None, [])), ({'enabled_tools': ['a']}, (['a'], [])),
                ({'disabled_tools': ['a']}, (None, ['a'])),
                ({'enabled_tools': []}, (None, [])),
                ({'enabled_tools': [], 'disabled_tools': ['a']},
                 (None, ['a'])),
                ({'enabled_tools': ['a'], 'disabled_tools': []},
                 (['a'], []))):
            with self.subTest(lists=lists):
                server = read_good(dict(lists, command='x'))
                self.assertEqual((server.allow, server.deny), found)

    BAD = (
        (5, 'it is not an object'), (None, 'it is not an object'),
        ([], 'it is not an object'),
        ({'command': ''}, 'it has no command and no url'),
        ({'type': 'ws', 'url': 'wss://h'}, 'unknown type "ws"'),
        ({'type': 'ftp', 'command': 'x'}, 'unknown type "ftp"'),
        ({'type': 5, 'command': 'x'}, 'type must be a string'),
        ({'type': 'stdio', 'url': 'https://h'}, 'type stdio needs a comm'),
        ({'type': 'http', 'url': ''}, 'type http needs a url'),
        ({'command': {'path': 'x'}}, 'command must be a string'),
        ({'command': ['x', 1]}, 'command must be a string'),
        ({'command': 'x', 'args': 'a'}, 'args must be an array'),
        ({'command': 'x', 'args': ['a', {}]}, 'args[1] must be text'),
        ({'command': 'x', 'args': [None]}, 'args[0] must be text'),
        ({'command': 'x', 'env': ['a']}, 'env must be an object'),
        ({'command': 'x', 'env': {'A': {}}}, 'env.A must be text'),
        ({'command': 'x', 'cwd': 5}, 'cwd must be a string'),
        ({'url': 'https://h', 'headers': 'x'}, 'headers must be an object'),
        ({'url': 'https://h', 'headers': {'A': []}},
         'headers.A must be text'),
        ({'command': 'x', 'enabled': 'yes'}, 'enabled must be true or'),
        ({'command': 'x', 'disabled': 1}, 'disabled must be true or'))
    BAD_OURS = (
        ({'command': 'x', 'quarantined': 'no'}, 'quarantined must be'),
        ({'command': 'x', 'trust_mode': 'none'},
         'trust_mode must be one of "manual", "auto", "scan"'),
        ({'command': 'x', 'enabled_tools': 't'}, 'enabled_tools must be'),
        ({'command': 'x', 'disabled_tools': [1]}, 'disabled_tools must be'),
        ({'command': 'x', 'enabled_tools': ['a'], 'disabled_tools': ['b']},
         'enabled_tools and disabled_tools are both given'),
        ({'command': 'x', 'max_age': 15}, 'max_age must be a duration'),
        ({'command': 'x', 'start_timeout': '60'}, 'start_timeout must be'),
        ({'command': 'x', 'request_timeout': '-1s'}, 'request_timeout must'),
        ({'command': 'x', 'client': 'cursor'}, 'client must be one of'),
        ({'command': 'x', 'health': []}, 'health must be an object'),
        ({'command': 'x', 'ignore_changes': {'t': 'description'}},
         'ignore_changes.t must be an array of strings'),
        ({'command': 'x', 'ignore_changes': {'*': ['descripton']}},
         'ignore_changes.* names "descripton"; it takes title, description, '
         'inputSchema, outputSchema'),
        ({'command': 'x', 'ignore_changes': {'t': ['title', 'annotations']}},
         'ignore_changes.t names "annotations"; it takes'),
        ({'command': 'x', 'ignore_changes': {'t': ['name']}},
         'ignore_changes.t names "name"; it takes'))

    def test_bad_entries(self):
        for path in (OURS, CLAUDE):
            rows = self.BAD + (self.BAD_OURS if path == OURS else ())
            for entry, why in rows:
                with self.subTest(entry=entry, path=path):
                    server, found = read_entry(entry, path)
                    self.assertIsNone(server)
                    self.assertIn('entry "s" in %s was skipped: %s' % (
                        path, why), found)

    def test_bad_names(self):
        for name, why in (
                ('a:b', 'its name holds a ":"'), ('', 'its name is empty'),
                (' s', 'blanks at an end'), ('s\t', 'blanks at an end'),
                ('s\ud800', 'not Unicode text')):
            with self.subTest(name=name):
                config = read_files((OURS, {'mcpServers': {
                    name: {'command': 'x'}}}))
                server, found = pf.look_up(config, name)
                self.assertIsNone(server)
                self.assertIn(why, found)

    def test_odd_names_are_good(self):
        for name in ('@a/b', 'srv.x', 'S', 'a b', 'caf\u00e9', '-x'):
            config = read_files((OURS, {'mcpServers': {
                name: {'command': 'x'}}}))
            self.assertEqual(pf.look_up(config, name)[0].name, name)

    def test_one_bad_entry_costs_only_itself(self):
        config = read_files((OURS, {'mcpServers': {
            'a': {'command': 'x'}, 'b': 5, 'c': {'url': 'https://h'}}}))
        servers, skipped = pf.all_servers(config)
        self.assertEqual([server.name for server in servers], ['a', 'c'])
        self.assertEqual(skipped, ['entry "b" in /c/ours.json was skipped: '
                                   'it is not an object'])

    def test_no_entry(self):
        config = read_files((OURS, {'mcpServers': {}}))
        self.assertEqual(pf.look_up(config, 'x'), (None, ''))

    def test_unknown_keys(self):
        for key, note in (
                ('quarantind', 'unknown key "quarantind" (did you mean '
                 'quarantined?)'),
                ('xyzzy', 'unknown key "xyzzy"')):
            for path in (OURS, CLAUDE):
                with self.subTest(key=key, path=path):
                    server = read_good({'command': 'x', key: 1}, path)
                    self.assertEqual(server.warnings, [note])

    def test_keys_of_clients_do_not_warn(self):
        entry = dict.fromkeys(('autoApprove', 'alwaysAllow', 'description',
                               'oauth', 'disabledTools', 'timeout'), None)
        for path in (OURS, CLAUDE):
            server = read_good(dict(entry, command='x'), path)
            self.assertEqual(server.warnings, [])

    def test_a_container_that_hears_nothing_warns(self):
        for words, is_told in (
                ('run --rm img', True), ('run --rm -i img', False),
                ('run img -i', True), ('run -dit img', False),
                ('run ${OPTIONS} img', False), ('ps', False)):
            for path in (OURS, '/r/.vscode/mcp.json'):
                config = read_files((path, {('servers' if 'vscode' in path
                                             else 'mcpServers'): {'s': {
                    'command': 'docker', 'args': words.split()}}}))
                with self.subTest(words=words, path=path):
                    found = ' '.join(pf.look_up(config, 's')[0].warnings)
                    self.assertEqual('`docker run` lacks -i' in found,
                                     is_told)


class Test07Claude(unittest.TestCase):
    """A .mcp.json is read by Claude Code's rules alone."""

    def test_our_keys_are_ignored(self):
        """A pull request must not switch the guard off."""
        server = read_good({
            'command': 'x', 'quarantined': False, 'trust_mode': 'auto',
            'enabled_tools': ['a'], 'max_age': '0', 'client':
            'claude-code', 'disabled_tools': 5}, CLAUDE)
        self.assertEqual(server._replace(warnings=[]), a_server(
            file=CLAUDE, dialect='claude-code', base='/r', command='x'))
        self.assertEqual(
            [note.split(' ignored')[0] for note in server.warnings],
            ['client, disabled_tools, enabled_tools, max_age, quarantined, '
             'trust_mode'])

    def test_top_level_keys_are_ignored(self):
        config = read_files((CLAUDE, {
            'mcpServers': {}, 'quarantine_enabled': False,
            'profiles': {'p': {'servers': []}}, 'max_age': 'x'}))
        self.assertIs(config.settings['quarantine_enabled'], True)
        self.assertIsNone(config.settings['max_age'])
        self.assertEqual(config.profiles, {})
        self.assertEqual(config.warnings, [
            '/r/.mcp.json: %s ignored in a client\'s file' % key
            for key in ('max_age', 'profiles', 'quarantine_enabled')])

    def test_url_without_type(self):
        server = read_good({'url': 'https://h/'}, CLAUDE)
        self.assertEqual(server.warnings, [
            'would be refused by its client: a url without a type'])

    def test_timeouts(self):
        for keys, ms, is_noted in (
                ({}, 30000, False), ({'timeout': 45000}, 45000, False),
                ({'timeout': 1000}, 1000, False),
                ({'timeout': 1500.5}, 1500, False),
                ({'timeout': 999}, 30000, True),
                ({'timeout': 60}, 30000, True),
                ({'timeout': '60000'}, 30000, True),
                ({'timeout': True}, 30000, True),
                ({'timeout': 1e300}, 30000, True),
                ({'timeout': None}, 30000, False),
                ({'request_timeout_ms': 2000, 'timeout': 5000}, 2000,
                 False),
                ({'request_timeout_ms': None, 'timeout': 5000}, 5000,
                 False)):
            with self.subTest(keys=keys):
                server = read_good(dict(keys, command='x'), CLAUDE)
                self.assertEqual(server.request_timeout, ms)
                self.assertEqual(bool(server.warnings), is_noted)

    def test_a_timeout_that_is_infinite(self):
        config = read_files((CLAUDE, '{"mcpServers": {"s": {"command": "x",'
                             ' "timeout": 1e400}}}'))
        self.assertEqual(pf.look_up(config, 's')[0].request_timeout, 30000)

    def test_references_it_does_not_expand(self):
        for text, is_noted in (
                ('${A}', False), ('${A:-b}', False), ('$A', False),
                ('${env:A}', True), ('${input:a}', True),
                ('${A:-${B}}', False), ('${A%x}', True)):
            with self.subTest(text=text):
                server = read_good({'command': 'x', 'args': [text]}, CLAUDE)
                server = pf.expand_server(server, {})[0]
                self.assertEqual(
                    'has a variable that its client leaves as text'
                    in server.warnings, is_noted)

    def test_double_keys(self):
        config = read_files((CLAUDE, '{"mcpServers": {"s": {"command": "x"},'
                             ' "s": {"command": "y"}}}'))
        self.assertEqual(pf.look_up(config, 's')[0].command, 'y')
        self.assertEqual(config.warnings, [
            '/r/.mcp.json: the key "s" stands twice; the last one counts'])


class Test07Expansion(unittest.TestCase):
    """References, by the dialect that owns the text."""

    ENV = {'A': 'aa', 'EMPTY': '', 'REF': '${A}', 'IN': 'x'}
    # text, (ours, missing), (Claude Code's, missing)
    TABLE = (
        ('plain', ('plain', []), ('plain', [])),
        ('x${A}y${A}', ('xaayaa', []), ('xaayaa', [])),
        ('${NO}', ('${NO}', ['NO']), ('${NO}', ['NO'])),
        ('${EMPTY}', ('', []), ('', [])),
        ('${NO:-d}', ('d', []), ('d', [])),
        ('${NO:-}', ('', []), ('', [])),
        ('${EMPTY:-d}', ('d', []), ('d', [])),
        ('${A:-d}', ('aa', []), ('aa', [])),
        ('${NO:-a b:-c$}', ('a b:-c$', []), ('a b:-c$', [])),
        ('${env:A}', ('aa', []), ('${env:A}', [])),
        ('${env:NO}', ('${env:NO}', ['NO']), ('${env:NO}', [])),
        ('${env:NO:-d}', ('d', []), ('${env:NO:-d}', [])),
        ('${input:key}', ('${input:key}', ['input:key']),
         ('${input:key}', [])),
        ('${input:}', ('${input:}', ['input:']), ('${input:}', [])),
        ('$A', ('$A', []), ('$A', [])),
        ('${REF}', ('${A}', []), ('${A}', [])),
        ('${NO:-${A}}', ('${A}', []), ('${A}', [])),
        ('${A%x}${}${ A}${1A}', ('${A%x}${}${ A}${1A}', []),
         ('${A%x}${}${ A}${1A}', [])),
        ('${CLAUDE_PROJECT_DIR}/x', ('/base/x', []), ('/base/x', [])),
        ('${workspaceFolder}', ('/base', []), ('/base', [])),
        ('${NO}${NO2}', ('${NO}${NO2}', ['NO', 'NO2']),
         ('${NO}${NO2}', ['NO', 'NO2'])))

    def test_texts(self):
        for text, ours, claude in self.TABLE:
            for dialect, found in (('preflight', ours),
                                   ('claude-code', claude)):
                with self.subTest(text=text, dialect=dialect):
                    server, missing = pf.expand_server(a_server(
                        args=(text,), dialect=dialect, base='/base'),
                        self.ENV)
                    self.assertEqual((server.args[0], missing), (
                        found[0], [name + ' (args[0])'
                                   for name in found[1]]))

    def test_every_place(self):
        server = a_server(
            command='${A}c', args=('${A}1', 'x'), cwd='${A}w',
            env={'K': '${A}e', 'R': None, 'E': ''}, url='${A}u',
            headers={'H': '${A}h'})
        found, missing = pf.expand_server(server, self.ENV)
        self.assertEqual(found, a_server(
            command='aac', args=('aa1', 'x'), cwd='aaw', env={
                'K': 'aae', 'R': None, 'E': ''}, url='aau',
            headers={'H': 'aah'}))
        self.assertEqual(missing, [])

    def test_names_and_keys_are_not_expanded(self):
        server = a_server(name='${A}', env={'${A}': 'x'})
        self.assertEqual(pf.expand_server(server, self.ENV)[0], server)

    def test_missing_names_its_place(self):
        server = a_server(headers={'Authorization': 'Bearer ${TOK}'},
                          args=('a', '${input:k}'))
        self.assertEqual(pf.expand_server(server, {})[1],
                         ['input:k (args[1])',
                          'TOK (headers.Authorization)'])

    def test_overlay_values_expand_by_our_rules(self):
        server = read_good({'command': 'x', 'env': {'A': '${env:A}'}},
                           CLAUDE, {'env': {'B': '${env:A}'}})
        server = pf.expand_server(server, self.ENV)[0]
        self.assertEqual(server.env, {'A': '${env:A}', 'B': 'aa'})


class Test07Overlays(unittest.TestCase):
    """Our own entries without command and url, laid over a definition."""

    BASE = {'command': 'x', 'env': {'A': '1', 'B': '2'}}

    def test_carried(self):
        server = read_good(self.BASE, CLAUDE, {
            'env': {'B': '3', 'C': None}, 'headers': {'H': 'h'},
            'quarantined': True, 'trust_mode': 'auto', 'enabled': False,
            'enabled_tools': ['t'], 'max_age': '1m', 'start_timeout': '2m',
            'request_timeout': '3m', 'client': 'claude-code',
            'health': {'setup': 'a'}, 'ignore_changes': {'t': ['title']}})
        self.assertEqual(server, a_server(
            file=CLAUDE, dialect='claude-code', base='/r', command='x',
            env={'A': '1', 'B': '3', 'C': None}, headers={'H': 'h'},
            quarantined=True, trust_mode='auto', enabled=False,
            allow=['t'], max_age=60000, start_timeout=120000,
            request_timeout=180000, client='claude-code',
            health={'setup': 'a'}, ignore_changes={'t': ['title']},
            overlaid=frozenset(('env.B', 'env.C', 'headers.H')),
            extra={'allow': ('enabled_tools', '/o/0.json')}))

    def test_maps_merge_and_the_rest_replaces(self):
        below = dict(self.BASE, max_age='1m', disabled_tools=['a'], health={
            'setup': 'a', 'tool': 'b'}, ignore_changes={
                't': ['title'], 'u': []})
        server = read_good(below, OURS, {
            'max_age': '2m', 'disabled_tools': ['b'],
            'health': {'tools': ['c', 'd']},
            'ignore_changes': {'u': ['title']}})
        self.assertEqual(
            (server.max_age, server.deny, server.health,
             server.ignore_changes),
            (120000, ['b'], {'setup': 'a', 'tools': ['c', 'd']},
             {'t': ['title'], 'u': ['title']}))

    def test_it_answers_for_the_tool_lists_that_it_sets(self):
        """The gate names the file in which the list can be changed."""
        for below, overlay, key, file in (
                ({}, {'enabled_tools': ['a']}, 'enabled_tools', '/o/0.json'),
                ({'disabled_tools': ['x']}, {'disabled_tools': ['t']},
                 'disabled_tools', '/o/0.json'),
                ({'disabled_tools': ['t']}, {'max_age': '1m'},
                 'disabled_tools', OURS),
                ({'excludeTools': ['t']}, {}, 'excludeTools', OURS),
                ({'includeTools': ['t']}, {'enabled_tools': ['a']},
                 'enabled_tools', '/o/0.json')):
            server = read_good(dict(self.BASE, **below), OURS, overlay)
            answer = judge(a_tool(), a_link(), server=server)
            with self.subTest(overlay=overlay):
                self.assertEqual(answer.reason, 'tool_denied_by_config')
                self.assertIn('%s of server "s" in %s ' % (key, file),
                              answer.detail)
                self.assertIn('Change %s in %s, then' % (key, file),
                              answer.remediation)

    def test_what_it_does_not_say_stays(self):
        below = dict(self.BASE, enabled=False, quarantined=True,
                     trust_mode='auto', enabled_tools=['a'], max_age='1m')
        self.assertEqual(
            read_good(below, OURS, dict.fromkeys(
                ('enabled', 'disabled', 'quarantined', 'trust_mode',
                 'enabled_tools', 'max_age', 'env'), None)),
            read_good(below, OURS))

    def test_switches(self):
        for below, over, is_on in (
                ({'enabled': False}, {'enabled': True}, True),
                ({'disabled': True}, {'enabled': True}, True),
                ({'disabled': True}, {'disabled': False}, True),
                ({}, {'enabled': False}, False),
                ({}, {'disabled': True}, False),
                ({'enabled': True}, {'enabled': True, 'disabled': True},
                 False)):
            with self.subTest(below=below, over=over):
                server = read_good(dict(self.BASE, **below), CLAUDE, over)
                self.assertIs(server.enabled, is_on)

    def test_the_last_one_wins(self):
        server = read_good(self.BASE, CLAUDE, {'env': {'A': '7'}, 'max_age':
                                               '1m'}, {'env': {'A': '8'}})
        self.assertEqual((server.env['A'], server.max_age), ('8', 60000))

    def test_order_of_files(self):
        """An overlay may be read before what it lies on."""
        config = read_files((OURS, {'mcpServers': {'s': {'max_age': '1m'}}}),
                            (CLAUDE, {'mcpServers': {'s': self.BASE}}))
        self.assertEqual(pf.look_up(config, 's')[0].max_age, 60000)

    def test_forbidden(self):
        for key, value in (('args', ['a']), ('cwd', '/x'), ('type', 'sse')):
            with self.subTest(key=key):
                server, why = read_entry(self.BASE, CLAUDE, {key: value})
                self.assertIsNone(server)
                self.assertIn('/o/0.json was skipped: an overlay cannot set '
                              + key, why)

    def test_two_lists_that_meet(self):
        server, why = read_entry(dict(self.BASE, disabled_tools=['a']),
                                 OURS, {'enabled_tools': ['a', 'b']})
        self.assertIsNone(server)
        self.assertIn('enabled_tools and disabled_tools are both given', why)

    def test_a_bad_value_is_no_guess(self):
        for overlay, fault in (
                ({'quarantined': 'yes'}, 'quarantined must be true or'),
                ({'env': {'A': {}}}, 'env.A must be text'),
                ({'headers': {'A': {}}}, 'headers.A must be text'),
                ({'max_age': 5}, 'max_age must be a duration')):
            server, why = read_entry(self.BASE, CLAUDE, overlay)
            self.assertIsNone(server)
            self.assertIn('/o/0.json was skipped: ' + fault, why)

    def test_a_misspelt_key_warns(self):
        server = read_good(self.BASE, CLAUDE, {'quarantind': True})
        self.assertEqual(server.warnings, [
            'unknown key "quarantind" (did you mean quarantined?)'])

    def test_nothing_below(self):
        config = read_files((OURS, {'mcpServers': {'s': {'enabled': True}}}))
        self.assertEqual(pf.look_up(config, 's'), (None, (
            'entry "s" in /c/ours.json was skipped: it has no command and '
            'no url')))
        self.assertEqual(pf.all_servers(config)[1],
                         [pf.look_up(config, 's')[1]])

    def test_a_client_has_no_overlays(self):
        server, why = read_entry({'enabled': True}, CLAUDE)
        self.assertIsNone(server)
        self.assertIn('it has no command and no url', why)

    def test_two_definitions(self):
        for first, second in ((OURS, CLAUDE), (CLAUDE, OURS),
                              (OURS, '/d/x.json')):
            with self.subTest(first=first), \
                    self.assertRaises(pf.ConfigError) as caught:
                read_files((first, {'mcpServers': {'s': self.BASE}}),
                           (second, {'mcpServers': {'s': self.BASE}}))
            self.assertIn('"s" is defined twice: in %s and in %s'
                          % (first, second), str(caught.exception))


class Test07Settings(unittest.TestCase):
    """Our top-level keys and profiles."""

    def test_defaults(self):
        config = read_files((OURS, {'mcpServers': {}}))
        self.assertEqual(config.settings, {
            'quarantine_enabled': True, 'quarantine_new_servers': False,
            'max_age': None, 'listen': '127.0.0.1:8080', 'allow_hosts': [],
            'sync_interval': 300000, 'activity_retention': 7776000000,
            'lockfile': 'preflight.lock', 'approvals': 'state'})

    def test_the_last_file_wins(self):
        config = read_files(
            (OURS, {'max_age': '1m', 'quarantine_enabled': False,
                    'profiles': {'a': {'servers': []}}}),
            ('/d/x.json', {'max_age': '0', 'quarantine_enabled': None,
                           'profiles': {'b': {'servers': ['s']}}}))
        self.assertEqual(config.settings['max_age'], 0)
        self.assertIs(config.settings['quarantine_enabled'], False)
        self.assertEqual(config.profiles, {'b': ['s']})

    WRONG = (
        ('quarantine_enabled', 'yes'), ('quarantine_enabled', 0),
        ('quarantine_new_servers', 'no'), ('max_age', 15),
        ('max_age', '15'), ('listen', 8080), ('allow_hosts', 'h'),
        ('allow_hosts', [1]), ('sync_interval', '5'),
        ('activity_retention', 90), ('lockfile', []), ('approvals', 'git'),
        ('lockfile', ''), ('profiles', []),
        ('profiles', {'p': ['s']}), ('profiles', {'p': {}}),
        ('profiles', {'p': {'servers': 's'}}),
        ('profiles', {'p': {'servers': ['s'], 'x': 1}}),
        ('mcpServers', 'x'))

    def test_wrong_types(self):
        for key, value in self.WRONG:
            with self.subTest(key=key, value=value), \
                    self.assertRaises(pf.ConfigError) as caught:
                read_files((OURS, {key: value}))
            self.assertIn('config /c/ours.json: ' + key,
                          str(caught.exception))

    def test_where_the_lockfile_is(self):
        """Relative to the file that names it, or that asks for one."""
        mode = {'approvals': 'lockfile'}
        for tops, path in (
                (({},), 'preflight.lock'), ((mode,), '/c/preflight.lock'),
                (({'lockfile': 'x/y'},), '/c/x/y'),
                (({'lockfile': '/z'},), '/z'),
                ((dict(mode, lockfile='x'), {'approvals': 'lockfile'}),
                 '/c/x'),
                (({'lockfile': 'a'}, {'lockfile': 'b'}), '/d/b')):
            with self.subTest(tops=tops):
                config = read_files(*zip((OURS, '/d/ours.json'), tops))
                self.assertEqual(config.settings['lockfile'], path)
                self.assertIsNone(config.lock)

    def test_unknown_keys(self):
        config = read_files((OURS, {'mcpServers': {}, 'quarantine_enable':
                                    1}))
        self.assertEqual(config.warnings, [
            '/c/ours.json: unknown key "quarantine_enable" (did you mean '
            'quarantine_enabled?)'])

    def test_no_server_table(self):
        for path, value in ((OURS, {}), (OURS, {'mcpServers': None}),
                            (CLAUDE, {'servers': {}}), (CLAUDE, {})):
            with self.subTest(path=path, value=value):
                config = read_files((path, value))
                self.assertEqual(config.entries, {})
                self.assertIn(path + ': no server table found; looked for '
                              '"mcpServers"', ' '.join(config.warnings))

    def test_double_keys(self):
        with self.assertRaises(pf.ConfigError) as caught:
            read_files((OURS, '{"mcpServers": {"s": {"command": "x", '
                        '"command": "y"}}}'))
        self.assertIn('the key "command" stands twice',
                      str(caught.exception))

    def test_base(self):
        entry = {'mcpServers': {'s': {'command': 'x'}}}
        for path, workspace, base in (
                (OURS, '', '/c'), (OURS, '/w', '/c'), (CLAUDE, '', '/r'),
                (CLAUDE, '/w', '/w')):
            with self.subTest(path=path, workspace=workspace):
                config = read_files((path, entry), workspace=workspace)
                self.assertEqual(pf.look_up(config, 's')[0].base, base)


class Test07Children(unittest.TestCase):
    """The environment of a server that is started."""

    def given(self, environ, **more):
        """Give the child's environment but what is always added."""
        env = pf.child_environment(a_server(**more), environ)
        self.assertEqual(env.pop('PYTHONIOENCODING', 'utf-8'), 'utf-8')
        self.assertEqual(env.pop('PYTHONUTF8', '1'), '1')
        return env

    def test_inherited(self):
        self.assertEqual(
            self.given({'A': '1', 'PREFLIGHT_API_KEY': 'zz',
                        'PREFLIGHT_': 'x', 'PATH': '/bin'}),
            {'A': '1', 'PATH': '/bin', 'BROWSER': 'true'})

    def test_browser(self):
        self.assertEqual(self.given({'BROWSER': 'firefox'}),
                         {'BROWSER': 'true'})
        self.assertEqual(self.given({}, env={'BROWSER': 'x'}),
                         {'BROWSER': 'x'})

    def test_own_env_wins_and_null_removes(self):
        self.assertEqual(
            self.given({'A': '1', 'B': '2'}, env={
                'A': None, 'B': '3', 'NO': None, 'BROWSER': None,
                'PREFLIGHT_X': 'y'}),
            {'B': '3', 'PREFLIGHT_X': 'y'})

    def test_encoding_is_a_default(self):
        env = pf.child_environment(a_server(env={'PYTHONUTF8': '0'}), {})
        self.assertEqual((env['PYTHONUTF8'], env['PYTHONIOENCODING']),
                         ('0', 'utf-8'))

    def test_project_directory(self):
        for more in ({'dialect': 'claude-code'}, {'client': 'claude-code'}):
            self.assertEqual(self.given({}, base='/r', **more)[
                'CLAUDE_PROJECT_DIR'], '/r')
        self.assertNotIn('CLAUDE_PROJECT_DIR', self.given({}))

    def test_windows_minds_no_case(self):
        env = {'Path': 'x', 'Own': '1', 'Gone': None}
        for is_windows, names in (
                (True, ['BROWSER', 'OWN', 'PATH']),
                (False, ['BROWSER', 'GONE', 'Own', 'PATH', 'Path'])):
            found = pf.child_environment(a_server(env=env), {
                'PATH': 'y', 'GONE': 'z'}, is_windows)
            self.assertEqual(sorted(set(found) - {
                'PYTHONUTF8', 'PYTHONIOENCODING'}), names)
            self.assertEqual(found['PATH'], 'x' if is_windows else 'y')

    def test_the_environment_given_is_not_changed(self):
        environ = {'A': '1'}
        pf.child_environment(a_server(env={'A': None}), environ)
        self.assertEqual(environ, {'A': '1'})


# ==========================================================================
# 8. wire
# ==========================================================================


def converse(replies, era='handshake', client=None, is_changed=False):
    """Drive one conversation: (what was sent, its Listing or its error)."""
    steps, sent, left = pf.explore(era, client), [], list(replies)
    reply = None
    try:
        while True:
            step = steps.send(reply)
            sent.append((step.method, step.params))
            if step.params == pf.TELL:
                reply = None
            else:
                reply = (is_changed if step.params == pf.SETTLE
                         else left.pop(0))
    except StopIteration as end:
        return sent, end.value
    except pf.UpstreamError as exc:
        return sent, exc


def welcome(version='2025-11-25', **more):
    """Answer initialize."""
    return {'result': dict({'protocolVersion': version, 'capabilities': {
        'tools': {}}}, **more)}


def discovered(*versions, **more):
    """Answer server/discover."""
    return {'result': dict({'supportedVersions': list(versions),
                            'capabilities': {'tools': {}}}, **more)}


def page(tools=(), cursor=None, **more):
    """Answer tools/list with one page."""
    result = dict(more, tools=list(tools))
    if cursor is not None:
        result['nextCursor'] = cursor
    return {'result': result}


def wire_error(code, message='no', **more):
    """Answer anything with an error."""
    return {'error': dict(more, code=code, message=message)}


class Test08Opening(unittest.TestCase):
    """Which revision of MCP is spoken."""

    def test_the_handshake(self):
        sent, listing = converse([welcome(), page(['t'])])
        self.assertEqual(sent, [
            ('initialize', {'protocolVersion': '2025-11-25', 'clientInfo': {
                'name': 'preflight', 'version': pf.VERSION},
                'capabilities': {}}),
            ('notifications/initialized', 'tell'), ('tools/list', {}),
            ('notifications/tools/list_changed', 'settle')])
        self.assertEqual(listing, ('2025-11-25', 'handshake', ['t'], 0))

    def test_every_known_version(self):
        for version in ('2025-11-25', '2025-06-18', '2025-03-26',
                        '2024-11-05', '2024-10-07'):
            listing = converse([welcome(version), page()])[1]
            self.assertEqual(listing.protocol, version)

    def test_unknown_versions(self):
        for version in ('2099-01-01', '2026-07-28', None, 5, {}, '',
                        'x' * 1000):
            with self.subTest(version=version):
                sent, exc = converse([welcome(version), page()])
                self.assertEqual(len(sent), 1)
                self.assertEqual(exc.cause, 'protocol')
                self.assertRegex(str(exc), r'the server speaks .*, we know '
                                 r'2025-11-25, 2025-06-18, ')
                self.assertLess(len(str(exc)), 500)

    def test_one_retry_with_a_listed_version(self):
        for refusal in (
                wire_error(-32602, data={'supported': ['2024-11-05']}),
                wire_error(-32602, data={'supported': [
                    'x', 5, '2024-11-05', '2024-10-07']}),
                wire_error(-32000, 'we speak 2024-11-05'),
                wire_error(-32602, 'bad version 2025-11-25, use 2024-11-05'),
                wire_error(-32022, data={'supported': [
                    '2026-07-28', '2024-11-05']})):
            with self.subTest(refusal=refusal):
                sent, listing = converse([refusal, welcome('2024-11-05'),
                                          page()])
                self.assertEqual([params['protocolVersion']
                                  for _, params in sent[:2]],
                                 ['2025-11-25', '2024-11-05'])
                self.assertEqual(listing.protocol, '2024-11-05')

    def test_no_second_retry(self):
        refusal = wire_error(-32000, 'use 2024-11-05 or 2024-10-07')
        sent, exc = converse([refusal, refusal, welcome()])
        self.assertEqual(len(sent), 2)
        self.assertEqual(exc.cause, 'protocol')

    def test_falls_to_discover(self):
        for refusal in (wire_error(-32022), wire_error(-32601),
                        wire_error(-32602),
                        wire_error(-32000, 'try 2026-07-28'),
                        wire_error(1, data={'supported': ['2026-07-28']})):
            with self.subTest(refusal=refusal):
                sent, listing = converse([
                    refusal, discovered('2026-07-28'), page(['t'])])
                self.assertEqual([method for method, _ in sent],
                                 ['initialize', 'server/discover',
                                  'tools/list', 'notifications/tools/'
                                  'list_changed'])
                self.assertEqual(listing[:3], ('2026-07-28', 'modern',
                                               ['t']))

    def test_any_other_refusal_is_final(self):
        for error, why in (
                ({'code': -32603, 'message': 'boom'}, 'error -32603: boom'),
                ({}, 'error null: null'), ('x', 'an error without a reason'),
                ({'code': 1, 'message': 'x' * 5000}, 'xxx...')):
            with self.subTest(error=error):
                sent, exc = converse([{'error': error}])
                self.assertEqual(len(sent), 1)
                self.assertTrue(str(exc).startswith('initialize failed with '
                                                    ))
                self.assertIn(why, str(exc))
                self.assertLess(len(str(exc)), 500)

    def test_the_first_refusal_says_more(self):
        sent, exc = converse([wire_error(-32602, 'no key given'),
                              wire_error(-32601, 'what?')])
        self.assertEqual(len(sent), 2)
        self.assertEqual(str(exc), 'initialize failed with error -32602: no '
                         'key given')

    def test_modern(self):
        """Every request of that revision carries its _meta."""
        sent, listing = converse([
            discovered('2026-07-28', '2027-01-01'), page(['a'], 'c',
                                                         ttlMs=5),
            page(['b'], ttlMs=7)], 'modern')
        meta = {'io.modelcontextprotocol/protocolVersion': '2026-07-28',
                'io.modelcontextprotocol/clientCapabilities': {},
                'io.modelcontextprotocol/clientInfo': {
                    'name': 'preflight', 'version': pf.VERSION}}
        self.assertEqual(sent[:3], [
            ('server/discover', {'_meta': meta}),
            ('tools/list', {'_meta': meta}),
            ('tools/list', {'_meta': meta, 'cursor': 'c'})])
        self.assertEqual(listing, ('2026-07-28', 'modern', ['a', 'b'], 7))

    def test_modern_without_a_common_version(self):
        for reply in (discovered('2027-01-01'), discovered(),
                      {'result': {'supportedVersions': '2026-07-28'}},
                      {'result': {}}):
            with self.subTest(reply=reply):
                exc = converse([reply], 'modern')[1]
                self.assertIn('we know 2026-07-28', str(exc))

    def test_capabilities_by_host(self):
        for client, declared in ((None, {}), ('claude-code', {
                'roots': {}, 'elicitation': {}})):
            sent = converse([welcome(), page()], client=client)[0]
            self.assertEqual(sent[0][1]['capabilities'], declared)
            sent = converse([discovered('2026-07-28'), page()], 'modern',
                            client)[0]
            self.assertEqual(sent[1][1]['_meta'][
                'io.modelcontextprotocol/clientCapabilities'], declared)

    def test_unusable_results(self):
        double = pf.decode_json('{"a": 1, "a": 2}')
        for reply, why in (
                ({'result': None}, 'no object'), ({'result': []},
                                                  'no object'),
                ({'result': double}, '"a" stands twice'), ({}, 'failed'),
                (welcome(resultType='input_required'),
                 'unknown type input_required')):
            with self.subTest(reply=reply):
                exc = converse([reply])[1]
                self.assertIn(why, str(exc))
                self.assertEqual(exc.cause, 'protocol')

    def test_a_null_error_is_none(self):
        listing = converse([dict(welcome(), error=None),
                            dict(page(['t']), error=None)])[1]
        self.assertEqual(listing.tools, ['t'])


class Test08Paging(unittest.TestCase):
    """tools/list, page by page."""

    def listed(self, *pages, **more):
        """List these pages: (cursors asked for, Listing or error)."""
        sent, found = converse((welcome(),) + pages, **more)
        return [params.get('cursor') for method, params in sent
                if method == 'tools/list'], found

    def test_two_pages(self):
        cursors, listing = self.listed(page([1, 2], 'c'), page([3]))
        self.assertEqual(cursors, [None, 'c'])
        self.assertEqual(listing.tools, [1, 2, 3])

    def test_null_ends(self):
        last = page([1])
        last['result']['nextCursor'] = None
        self.assertEqual(self.listed(last)[1].tools, [1])

    def test_loops(self):
        for pages, why in (
                ([page([1], 'A')] * 9, 'repeated after 2 pages'),
                ([page([1], 'A'), page([2], 'B')] * 9,
                 'repeated after 3 pages')):
            exc = self.listed(*pages)[1]
            self.assertEqual(exc.cause, 'protocol')
            self.assertIn('pagination loop: a cursor was ' + why, str(exc))

    def test_the_empty_cursor_is_followed_once(self):
        cursors, listing = self.listed(page([1], ''), page([2]))
        self.assertEqual((cursors, listing.tools), ([None, ''], [1, 2]))
        cursors, listing = self.listed(page([1], ''), page([2], ''))
        self.assertEqual((cursors, listing.tools), ([None, ''], [1, 2]))

    def test_a_cursor_is_text(self):
        for cursor in (5, {}, [], False, 0):
            self.assertIn('nextCursor is not text',
                          str(self.listed(page([1], cursor))[1]))

    def test_page_cap(self):
        pages = [page([n], str(n)) for n in range(1000)]
        full = pages[:999] + [page([999])]
        self.assertEqual(self.listed(*full)[1].tools, list(range(1000)))
        cursors, exc = self.listed(*pages)
        self.assertEqual(len(cursors), 1000)
        self.assertEqual(str(exc), 'the list has over 1000 pages')

    def test_an_error_on_a_later_page_keeps_nothing(self):
        for code in (-32601, -32602):
            exc = self.listed(page([1], 'c'), wire_error(code))[1]
            self.assertIn('tools/list failed', str(exc))

    def test_no_list(self):
        for reply in ({'result': {}}, {'result': {'tools': {}}},
                      {'result': {'tools': None}}):
            self.assertEqual(str(self.listed(reply)[1]),
                             'tools/list gave no list')

    def test_no_tools_capability(self):
        for capabilities in (None, {}, {'tools': None}, [], {'prompts': {}}):
            with self.subTest(capabilities=capabilities):
                sent, listing = converse([welcome(
                    capabilities=capabilities)])
                self.assertEqual(listing.tools, [])
                self.assertNotIn('tools/list', dict(sent))

    def test_method_not_found(self):
        self.assertEqual(self.listed(wire_error(-32601))[1].tools, [])
        self.assertIn('tools/list failed with error -32603',
                      str(self.listed(wire_error(-32603))[1]))

    def test_ttl(self):
        for value, ttl in ((None, 0), (0, 0), (5, 5), (-5, 0), ('5', 0),
                           (True, 0), (1.5, 0), ([], 0)):
            with self.subTest(value=value):
                self.assertEqual(self.listed(page([], ttlMs=value))[1].ttl,
                                 ttl)

    def test_a_list_that_changed_is_fetched_again_once(self):
        cursors, listing = self.listed(
            page([1], 'c'), page([2]), page([3]), is_changed=True)
        self.assertEqual((cursors, listing.tools), ([None, 'c', None], [3]))


class Test08Lines(unittest.TestCase):
    """One line from a server: a message, or noise."""

    def test_messages(self):
        message = {'jsonrpc': '2.0', 'id': 1, 'result': {'a': '\u00e9'}}
        line = json.dumps(message, ensure_ascii=False).encode('utf-8')
        for found in (line, line + b'\r', b'\xef\xbb\xbf' + line,
                      b'  ' + line + b' '):
            with self.subTest(line=found):
                self.assertEqual(pf.decode_line(found, 1), message)

    def test_noise(self):
        for line in (b'', b'\r', b'Server started', b'[INFO] ready', b'5',
                     b'"x"', b'null', b'{}', b'{"id": 1, "result": {}}',
                     b'{"jsonrpc": "2.0"', b'[{"jsonrpc": "2.0"}]',
                     b'\xff\xfe', b'\x97{}', b'{\xff}',
                     b'{"jsonrpc": "2.0"} x', b'\xef\xbb\xbf',
                     b'{"a":' * 100000):
            with self.subTest(line=line[:30]):
                self.assertIsNone(pf.decode_line(line, 1))

    def test_bytes_that_are_not_utf8(self):
        """Noise, unless it is the reply that is waited for."""
        line = b'{"jsonrpc": "2.0", "id": 1, "result": {"a": "\xe9"}}'
        with self.assertRaises(pf.UpstreamError) as caught:
            pf.decode_line(line, 1)
        self.assertEqual(str(caught.exception), 'the reply is not UTF-8')
        self.assertIsNone(pf.decode_line(line, 2))
        self.assertIsNone(pf.decode_line(
            b'{"jsonrpc": "2.0", "method": "x", "a": "\xe9"}', 1))

    def test_ambiguous(self):
        with self.assertRaises(pf.UpstreamError) as caught:
            pf.decode_line(b'{"jsonrpc": "2.0", "id": 1, "id": 2}', 1)
        self.assertEqual(str(caught.exception), 'a message is ambiguous: '
                         'the key "id" stands twice')

    def test_depth(self):
        """A definition of 200 levels fits, with the message around it."""
        def flaw(depth):
            tool = '{"name": "t", "inputSchema": %s}' % (
                '[' * (depth - 1) + ']' * (depth - 1))
            line = ('{"jsonrpc": "2.0", "id": 1, "result": {"tools": [%s, '
                    '{"name": "u"}]}}' % tool)
            message = pf.decode_line(line.encode('ascii'), 1)
            tools, _ = pf.read_tools(message['result']['tools'])
            self.assertEqual((len(tools), tools[1].flaw), (2, ''))
            return tools[0].flaw
        self.assertEqual(flaw(200), '')
        self.assertIn('nesting over 200', flaw(201))
        self.assertIn('nesting over 200', flaw(100000))

    def test_replies(self):
        for message, is_reply in (
                ({'id': 2, 'result': {}}, True),
                ({'id': 2, 'error': {}}, True),
                ({'id': '2', 'result': {}}, True),
                ({'id': None, 'error': {'code': -32700}}, True),
                ({'error': {'code': -32700}}, True),
                ({'id': 1, 'result': {}}, False),
                ({'id': '1', 'result': {}}, False),
                ({'id': 3, 'error': {}}, False),
                ({'id': True, 'result': {}}, False),
                ({'id': [2], 'result': {}}, False),
                ({'id': 'server-error', 'error': {}}, False),
                ({'id': 2}, False), ({'id': 2, 'method': 'ping'}, False),
                ({'id': 2, 'method': 'x', 'result': {}}, False),
                ({'method': 'notifications/message'}, False)):
            with self.subTest(message=message):
                self.assertIs(pf.is_reply_to(message, 2), is_reply)

    def test_ids_that_are_not_echoed(self):
        for message in ({'id': None, 'result': {}}, {'result': {}},
                        {'id': 0, 'result': {}}, {'id': 0, 'error': {}},
                        {'id': None, 'result': {}, 'error': None}):
            with self.subTest(message=message), \
                    self.assertRaises(pf.UpstreamError) as caught:
                pf.is_reply_to(message, 2)
            self.assertEqual((caught.exception.cause, str(
                caught.exception)), ('protocol', 'the server does not echo '
                                     'request ids'))

    def test_written(self):
        self.assertEqual(
            pf.encode_message({'id': 1, 'method': 'x', 'params': {
                'b': '\u00e9\n', 'a': None}}),
            b'{"id":1,"jsonrpc":"2.0","method":"x","params":{"a":null,'
            b'"b":"\\u00e9\\n"}}\n')

    UNKNOWN = {'code': -32601, 'message': 'Method not found'}
    # What a server asks, and what it is told: by default, as claude-code.
    ASKED = (
        ('ping', {'result': {}}, {'result': {}}),
        ('roots/list', {'error': UNKNOWN},
         {'result': {'roots': [{'uri': 'file:///a%20b'}]}}),
        ('elicitation/create', {'error': UNKNOWN},
         {'result': {'action': 'decline'}}),
        ('sampling/createMessage', {'error': UNKNOWN}, {'error': UNKNOWN}),
        ('tasks/list', {'error': UNKNOWN}, {'error': UNKNOWN}),
        (5, {'error': UNKNOWN}, {'error': UNKNOWN}))

    def test_requests_of_the_server(self):
        for method, plain, claude in self.ASKED:
            for client, answer in ((None, plain), ('claude-code', claude)):
                for number in (7, 'x', 0):
                    with self.subTest(method=method, client=client):
                        self.assertEqual(
                            pf.answer_request({'id': number, 'method':
                                               method}, client, '/a b'),
                            dict(answer, id=number))

    def test_no_answer(self):
        for message in ({'method': 'notifications/message'},
                        {'id': 1, 'result': {}}, {'id': 1}, {}):
            self.assertIsNone(pf.answer_request(message, None, '/'))


class Test08Tools(unittest.TestCase):
    """The raw list: one malformed tool costs only itself."""

    def read(self, *items):
        """Read a list: ([(name, flaw)], warnings)."""
        tools, warnings = pf.read_tools(list(items))
        return [(found.name, found.flaw) for found in tools], warnings

    def test_malformed(self):
        names, warnings = self.read(
            tool('good'), {'description': 'x'}, 'text', None, [], 5,
            {'name': 5}, {'name': ''}, {'name': None},
            {'name': 'a\ud800'}, {'name': 'a\0'}, tool('good2'))
        self.assertEqual(names, [('good', ''), ('good2', '')])
        no_name, no_object, no_text = ('it has no name', 'it is not an '
                                       'object', 'its name is not Unicode '
                                       'text')
        self.assertEqual(warnings, [
            'tool %d of the list is skipped: %s' % row for row in (
                (1, no_name), (2, no_object), (3, no_object),
                (4, no_object), (5, no_object), (6, no_name), (7, no_name),
                (8, no_name), (9, no_text), (10, no_text))])

    def test_kept_as_sent(self):
        """This is about identity, not about the quality of a schema."""
        for more in ({'inputSchema': None}, {'inputSchema': 5},
                     {'inputSchema': {'anyOf': [], 'required': None}},
                     {'description': 5}, {'title': []},
                     {'annotations': 'x'}, {'annotations': None}):
            names, warnings = self.read(tool(**more))
            self.assertEqual((names, warnings), ([('echo', '')], []))

    def test_hints_are_beside_the_hash(self):
        tools = [pf.read_tools([tool(annotations=value)])[0][0]
                 for value in (SAFE, None, {'readOnlyHint': 'yes'})]
        self.assertEqual([found.hints for found in tools], [SAFE, {}, {}])
        self.assertEqual(len({found.hash for found in tools}), 1)

    def test_alike_copies_collapse(self):
        names, warnings = self.read(tool('a'), tool('b'), tool('a'))
        self.assertEqual(names, [('a', ''), ('b', '')])
        self.assertEqual(warnings, ['"a" stands twice in the list, alike'])

    def test_different_copies(self):
        for first, second in (
                (tool('a'), tool('a', 'other')),
                (tool('a'), tool('a', annotations=SAFE)),
                (tool('a'), dict(tool('a'), outputSchema={}))):
            for items in ((first, second), (second, first),
                          (first, second, first), (first, first, second)):
                names, _ = self.read(tool('b'), *items)
                self.assertEqual(names, [('b', ''), (
                    'a', 'advertised twice, with different definitions or '
                    'hints')])

    def test_a_copy_that_is_refused(self):
        bad = pf.decode_json('{"name": "a", "inputSchema": NaN}')
        for items in ((bad, tool('a')), (tool('a'), bad)):
            names, _ = self.read(*items)
            self.assertIn('advertised twice', names[0][1])

    def test_refused_with_a_warning(self):
        names, warnings = self.read(pf.decode_json(
            '{"name": "a", "inputSchema": {"x": NaN}}'), tool('b'))
        self.assertEqual([name for name, _ in names], ['a', 'b'])
        self.assertIn('"a": definition refused: NaN', warnings[0])

    def test_no_name_that_counts(self):
        for text in ('{"name": 1e400}', '{"name": NaN}',
                     '{"a": 1, "a": 2}'):
            names, warnings = self.read(pf.decode_json(text))
            self.assertEqual((names, len(warnings)), ([], 1))

    def test_many(self):
        names, warnings = self.read(*[tool('t%d' % n) for n in range(3000)])
        self.assertEqual((len(names), warnings), (3000, []))
        self.assertEqual(names[0], ('t0', ''))


# ==========================================================================
# 9. trust
# ==========================================================================


def approval(digest=H1, hints=None, version=1):
    """Make an Approval of a definition."""
    return pf.Approval(digest, version, hints or {}, NOW - 5000, 'baseline')


class Test09Status(unittest.TestCase):
    """Statuses are derived from what was seen and approved."""

    TABLE = (
        ('approved', {}),
        ('approved', {'hints': SAFE}),
        ('approved', {'hints': {'readOnlyHint': False}}),
        ('approved', {'approved': approval(H1, SAFE), 'hints': SAFE}),
        ('approved', {'approved': approval(H1, {'readOnlyHint': False}),
                      'hints': SAFE}),
        ('pending', {'approved': None}),
        ('pending', {'approved': None, 'hints': SAFE}),
        ('changed', {'hash': H2}),
        ('changed', {'version': 2}),
        ('changed', {'approved': approval(H2)}),
        ('changed', {'approved': approval(version=2)}),
        ('changed', {'approved': approval(H1, SAFE)}),
        ('changed', {'approved': approval(H1, SAFE),
                     'hints': dict(SAFE, openWorldHint=True)}),
        ('changed', {'flaw': 'advertised twice', 'hash': ''}),
        ('changed', {'flaw': 'advertised twice', 'hash': '',
                     'approved': None}),
        ('changed', {'flaw': 'definition refused: x'}),
        ('approved', {'hash': H2, 'ignored': ('title',)}),
        ('approved', {'hash': H2, 'differs': ('title',),
                      'ignored': ('title',)}),
        ('changed', {'hash': H2, 'differs': ('title',)}),
        ('changed', {'hash': H2, 'ignored': ('title',),
                     'approved': approval(H1, SAFE)}),
        ('changed', {'hash': '', 'flaw': 'x', 'ignored': ('title',)}),
        ('pending', {'approved': None, 'ignored': ('title',)}))

    def test_table(self):
        for status, more in self.TABLE:
            with self.subTest(more=more):
                found, why = pf.tool_status(a_tool(**more))
                self.assertEqual(found, status)
                self.assertEqual(bool(why), status != 'approved')

    def test_why(self):
        for more, why in (
                ({'flaw': 'the flaw'}, 'the flaw'),
                ({'hash': H2, 'approved': approval(H1, SAFE)},
                 'the definition is not the approved one'),
                ({'approved': approval(H1, SAFE), 'hints':
                  {'readOnlyHint': True, 'openWorldHint': True}},
                 'hints became riskier: destructiveHint false -> absent, '
                 'openWorldHint false -> true')):
            self.assertEqual(pf.tool_status(a_tool(**more))[1], why)


class Test09Ignored(unittest.TestCase):
    """ignore_changes, and texts that change by themselves."""

    def test_all_that_differs_must_be_covered(self):
        rules = {'t': ['description', 'title'], 'u': [], '*': ['title']}
        for name, differs, is_ignored in (
                ('t', ('description',), True),
                ('t', ('title', 'description'), True),
                ('t', ('description', 'inputSchema'), False),
                ('t', ('name', 'title'), False), ('other', ('title',), True),
                ('other', ('description',), False),
                ('u', ('title',), False), ('t', (), False)):
            with self.subTest(name, differs=differs):
                self.assertEqual(
                    pf.ignored_fields(rules, name, differs),
                    differs if is_ignored else ())
        self.assertEqual(pf.ignored_fields({}, 't', ('title',)), ())

    def test_when_it_is_plain(self):
        for moves, is_plain in (
                ((0, 0), False), ((2, 2), False), ((2, 3), False),
                ((3, 4), True), ((3, 6), True), ((3, 7), False),
                ((10, 20), True), ((9, 20), False), ((20, 20), True)):
            with self.subTest(moves):
                self.assertEqual(pf.is_restless(a_tool(moves=moves)),
                                 is_plain)

    def test_words(self):
        for more, text in (
                ({}, ''), ({'moves': (1, 9)}, ''),
                ({'moves': (2, 9)}, 'Changed in 2 of the last 9 looks.'),
                ({'moves': (14, 20)},
                 "This tool's text changes by itself (14 changes in 20 "
                 'looks): fix the server, or put "ignore_changes": '
                 '{"t": ["description"]} into its entry.'),
                ({'moves': (14, 20), 'differs': ('title', 'description')},
                 "This tool's text changes by itself (14 changes in 20 "
                 'looks; title, description): fix the server, or put '
                 '"ignore_changes": {"t": ["title", "description"]} into '
                 'its entry.'),
                ({'moves': (14, 20), 'ignored': ('title',)},
                 'Changed in 14 of the last 20 looks.')):
            with self.subTest(more):
                self.assertEqual(pf.moves_text(a_tool(**more)), text)


class Test09Switches(unittest.TestCase):
    """An operator's switch counts while the config says what it said."""

    def test_switched(self):
        for value, over, config in itertools.product((True, False),
                                                     repeat=3):
            with self.subTest(value=value, over=over, config=config):
                self.assertEqual(
                    pf.switched(config, pf.Switch(value, over, NOW)),
                    (value, True) if over == config else (config, False))
        for config in (True, False):
            self.assertEqual(pf.switched(config, None), (config, False))

    def test_disabled_fact(self):
        on, off = a_server(), a_server(enabled=False)
        by_hand = ('Server "s" is switched off by `servers disable` since '
                   '2026-09-21T14:13:20.000Z.')
        for server, switch, fact in (
                (on, None, ''), (off, None, 'Server "s" is switched off in '
                                 '/c/config.json.'),
                (on, pf.Switch(False, True, NOW), by_hand),
                (off, pf.Switch(True, False, NOW), ''),
                (on, pf.Switch(False, False, NOW), ''),
                (off, pf.Switch(True, True, NOW),
                 'Server "s" is switched off in /c/config.json.')):
            with self.subTest(server=server.enabled, switch=switch):
                self.assertEqual(pf.disabled_fact(server, switch), fact)


class Test09Launches(unittest.TestCase):
    """Which launches are known, and when that quarantines."""

    OLD, NEW = a_server(command='old'), a_server(command='new')

    def known(self, *servers, **more):
        """Make the Launch rows of these servers."""
        return [pf.Launch(pf.launch_digest(server), pf.launch_text(server),
                          'baseline', NOW, more.get('baselined', True))
                for server in servers]

    def test_launch_fact(self):
        changed = 'Server "s": launch changed: it was %s, now it is new.'
        third = a_server(command='third')
        for launches, seen, fact in (
                ([], None, ''), (self.known(self.NEW), None, ''),
                (self.known(self.OLD, self.NEW), None, ''),
                (self.known(self.OLD), None, changed % 'old'),
                (self.known(self.OLD, third), None, changed % 'third'),
                (self.known(self.OLD, third), pf.launch_digest(self.OLD),
                 changed % 'old')):
            with self.subTest(launches=launches, seen=seen):
                self.assertEqual(pf.launch_fact(self.NEW, launches, seen),
                                 fact)

    def test_only_a_masked_part_differs(self):
        one, two = (a_server(args=('--token', word))
                    for word in ('zz1', 'zz2'))
        fact = pf.launch_fact(two, self.known(one), None)
        self.assertIn("now it is run --token '***' (only a masked part "
                      'differs).', fact)
        self.assertNotIn('zz', fact)

    def test_quarantine_fact(self):
        settings = {'quarantine_new_servers': False}
        strict = {'quarantine_new_servers': True}
        held = a_server(quarantined=True)
        new = self.known(self.NEW)
        lift = pf.Switch(False, True, NOW)
        for server, switch, launches, given, fact in (
                (self.NEW, None, [], settings, ''),
                (self.NEW, None, new, strict, ''),
                (self.NEW, None, [], strict, 'Server "s" is new, and '
                 'quarantine_new_servers is on.'),
                (held, None, [], settings, 'Server "s" is quarantined in '
                 '/c/config.json.'),
                (held, lift, [], settings, ''),
                (held, lift, [], strict, 'Server "s" is new, and '
                 'quarantine_new_servers is on.'),
                (self.NEW, pf.Switch(True, False, NOW), new, settings,
                 'Server "s" is quarantined by `servers quarantine` since '
                 '2026-09-21T14:13:20.000Z.'),
                (held, lift, self.known(self.OLD), settings,
                 'Server "s": launch changed: it was old, now it is run.')):
            with self.subTest(fact=fact):
                self.assertEqual(pf.quarantine_fact(
                    server, switch, launches, given, None), fact)

    def test_baseline(self):
        """Without a known launch, or one whose first list is to come."""
        digest = pf.launch_digest(self.NEW)
        for launches, is_first in (
                ([], True), (self.known(self.NEW), False),
                (self.known(self.OLD), False),
                (self.known(self.OLD)
                 + self.known(self.NEW, baselined=False), True),
                (self.known(self.OLD, baselined=False), False)):
            self.assertIs(pf.is_baseline(digest, launches), is_first)

    def test_lease(self):
        for start, end, is_running in (
                (None, None, False), (NOW - 5, NOW + 1, True),
                (NOW - 5, NOW, False), (NOW - 5, NOW - 1, False),
                (NOW + 60000, NOW + 90000, True),
                (NOW + 60001, NOW + 90000, False)):
            with self.subTest(start=start, end=end):
                link = a_link(lease_at=start, lease_until=end)
                self.assertIs(pf.is_lease_running(link, NOW), is_running)


def observed(*tools, **more):
    """Make an Observation that listed these Definitions."""
    given = dict(state='ready', cause='', detail='', protocol='2025-11-25',
                 era='handshake', ttl=0, tools=list(tools), refused={},
                 warnings=[], stderr='')
    return pf.Observation(**dict(given, **more))


def defined(name, digest=H1, hints=None, flaw=''):
    """Make a Definition as it was just listed."""
    return pf.Definition(name, digest, 'text', hints or {}, flaw)


class Test09Plan(unittest.TestCase):
    """What one look writes, beside what was known before it."""

    REFUSED, TWICE = 'definition refused: x', 'advertised twice, x'

    def plan(self, before, seen, is_first=False, mode='manual', quiet=()):
        """Plan a sync: the Plan."""
        return pf.plan_sync({found.name: found for found in before}, seen,
                            is_first, mode, frozenset(quiet))

    def lists(self, *given, **more):
        """Plan a sync: (approve, added, changed, vanished) as words."""
        plan = self.plan(*given, **more)
        self.assertEqual(plan.gone, plan.vanished)
        return tuple(' '.join(names) for names in (
            plan.approve, plan.added, plan.changed, plan.vanished))

    def test_baseline(self):
        plan = self.plan([], observed(
            defined('a'), defined('b', '', flaw=self.TWICE),
            defined('c', '', flaw=self.REFUSED)), True)
        self.assertEqual((plan.approve, plan.how), (['a'], 'baseline'))
        self.assertEqual([row.name for row in plan.rows], ['a', 'b'])
        self.assertEqual((plan.added, plan.changed, plan.vanished),
                         ([], [], []))

    def test_nothing_new(self):
        self.assertEqual(self.lists([a_tool()], observed(defined('t'))),
                         ('', '', '', ''))

    def test_added_and_vanished(self):
        self.assertEqual(
            self.lists([a_tool(), a_tool(name='u'), a_tool(name='v')],
                       observed(defined('v'), defined('new'))),
            ('', 'new', '', 't u'))

    CHANGES = (
        (True, {}, defined('t', H2)),
        (True, {'hints': SAFE}, defined('t')),
        (True, {}, defined('t', '', flaw='advertised twice')),
        (True, {'flaw': 'x', 'hash': ''}, defined('t')),
        (True, {'hash': H2}, defined('t')),         # a revert, seen once
        (True, {'approved': None}, defined('t', H2)),
        (False, {'hash': H2}, defined('t', H2)),    # changed as before
        (False, {}, defined('t', H1, SAFE)),        # safer only
        (False, {'flaw': 'x', 'hash': ''}, defined('t', '', flaw='x')))

    def test_changed(self):
        for is_changed, old, new in self.CHANGES:
            with self.subTest(old=old, new=new):
                self.assertEqual(self.lists([a_tool(**old)], observed(new)),
                                 ('', '', 't' if is_changed else '', ''))

    def test_an_ignored_difference_is_no_news(self):
        """Whatever it is compared with: what was listed, or approved."""
        quiet = [(H1, H2), (H1, H3), (H2, H3)]
        for mode in 'manual', 'auto':
            for old, new, is_news in (
                    ({}, defined('t', H2), False),
                    ({'hash': H2}, defined('t', H3), False),
                    ({'hash': H3}, defined('t', H2), True),
                    ({'listed': False}, defined('t', H2), False),
                    ({}, defined('t', '', flaw='x'), True),
                    ({'hints': SAFE, 'approved': approval(H1, SAFE)},
                     defined('t', H2), True)):
                with self.subTest(mode, old=old, new=new):
                    approve, _, changed, _ = self.lists(
                        [a_tool(**old)], observed(new), mode=mode,
                        quiet=quiet)
                    self.assertEqual(bool(changed), is_news)
                    if not is_news:
                        self.assertEqual(approve, '')

    def test_a_revert_is_approved_again(self):
        """Without a new approval, which no sync gives in mode manual."""
        plan = self.plan([a_tool(hash=H2)], observed(defined('t')))
        self.assertEqual(plan.approve, [])
        seen = a_tool()._replace(hash=plan.rows[0].hash)
        self.assertEqual(pf.tool_status(seen)[0], 'approved')

    def test_a_return(self):
        """A tombstone that returns changed is changed, not new."""
        for old, new, found in (
                ({}, defined('t'), 'added'),
                ({'hash': H2}, defined('t'), 'added'),
                ({}, defined('t', H2), 'changed'),
                ({'approved': approval(H1, SAFE)}, defined('t'), 'changed'),
                ({}, defined('t', '', flaw='advertised twice'), 'changed'),
                ({'approved': None}, defined('t'), 'added'),
                ({'approved': None}, defined('t', H2), 'added')):
            with self.subTest(old=old, new=new):
                self.assertEqual(
                    self.lists([a_tool(listed=False, **old)], observed(new)),
                    ('', 't' if found == 'added' else '',
                     't' if found == 'changed' else '', ''))

    def test_mode_auto(self):
        """Approved as they come, but nothing that is flawed."""
        before = [a_tool(name='same'), a_tool(name='moved'),
                  a_tool(name='risky', approved=approval(H1, SAFE)),
                  a_tool(name='pending', approved=None),
                  a_tool(name='twice')]
        seen = observed(
            defined('same'), defined('moved', H2), defined('risky'),
            defined('pending'), defined('new'),
            defined('twice', '', flaw=self.TWICE))
        plan = self.plan(before, seen, mode='auto')
        self.assertEqual((plan.approve, plan.how), (
            ['moved', 'risky', 'pending', 'new'], 'auto'))

    def test_an_old_hash_version_is_news(self):
        self.assertEqual(
            self.lists([a_tool(approved=approval(version=0))],
                       observed(defined('t')), mode='auto')[0], 't')

    def test_an_empty_list_keeps_the_old_one(self):
        for count, words in ((1, '1 was known'), (3, '3 were known')):
            before = [a_tool(name='t%d' % n) for n in range(count)]
            plan = self.plan(before + [a_tool(name='gone', listed=False)],
                             observed())
            self.assertEqual((plan.state, plan.cause, plan.rows, plan.gone),
                             ('error', 'no_tools', None, []))
            self.assertEqual(plan.detail, 'it lists no tools, and ' + words)

    def test_an_empty_list_where_none_was(self):
        for before in ([], [a_tool(listed=False)]):
            plan = self.plan(before, observed())
            self.assertEqual((plan.state, plan.rows), ('ready', []))

    def test_a_failed_look_changes_nothing(self):
        for is_first, mode in ((True, 'manual'), (False, 'auto')):
            plan = self.plan([a_tool()], observed(
                state='error', cause='timeout', detail='d', tools=None),
                is_first, mode)
            self.assertEqual(plan, ('error', 'timeout', 'd', None, [], [],
                                    '', [], [], []))

    def test_refused_definitions(self):
        """A known tool is kept as changed, an unknown one not listed."""
        refused = defined('t', '', flaw=self.REFUSED)
        for before, is_kept in (
                ([], False), ([a_tool()], True),
                ([a_tool(listed=False)], True),
                ([a_tool(listed=False, approved=None)], False),
                ([a_tool(approved=None)], True)):
            for mode in ('manual', 'auto'):
                with self.subTest(before=before, mode=mode):
                    plan = self.plan(before, observed(refused, defined('u')),
                                     mode=mode)
                    names = [row.name for row in plan.rows]
                    self.assertEqual(names, ['t', 'u'] if is_kept else ['u'])
                    self.assertNotIn('t', plan.approve)

    def test_a_tool_advertised_twice_is_listed(self):
        twice = defined('t', '', flaw=self.TWICE)
        self.assertEqual(self.lists([], observed(twice))[1], 't')


# ==========================================================================
# 7. config: the files of other programs, read as their owners read them
# ==========================================================================

HOME_ENV = {'HOME': '/h', 'T': 'tok-1', 'E': '', 'R': 'eu'}


def as_toml(value):
    """Write a value in one line of TOML."""
    if isinstance(value, dict):
        return '{%s}' % ', '.join('%s = %s' % (json.dumps(key), as_toml(item))
                                  for key, item in value.items())
    if isinstance(value, list):
        return '[%s]' % ', '.join(map(as_toml, value))
    return json.dumps(value)


def text_of(content, dialect):
    """Write the text of a file in its dialect."""
    if isinstance(content, (str, bytes)):
        return content
    if dialect == 'codex':
        return ''.join('%s = %s\n' % (key, as_toml(value))
                       for key, value in content.items())
    return json.dumps(content)


def show(path, content, dialect='', workspace='', files=None, notes=None):
    """Read one file as `config show` does; files: path -> text."""
    content = text_of(content, dialect)
    data = content if isinstance(content, bytes) else content.encode('utf-8')
    file = pf.parse_config(path, path, data, dialect)
    return pf.show_config(file, workspace, HOME_ENV, (files or {}).get,
                          [] if notes is None else notes)


def only(found):
    """Give the one server that a file has."""
    if len(found['servers']) != 1:
        raise AssertionError(found)
    return found['servers'][0]


def in_table(dialect, entry, name='s', **top):
    """Put an entry where a dialect's file has its servers."""
    content = {name: entry}
    for key in reversed(pf.DIALECTS[dialect].table.split('.')):
        content = {key: content}
    return dict(top, **content)


def entry_of(dialect, entry, **more):
    """Read an entry by a dialect's rules, whatever the path."""
    return only(show('/r/file', in_table(dialect, entry), dialect, **more))


class Test07Toml(unittest.TestCase):
    """Our reader of TOML: what Codex takes, and nothing else."""

    def read(self, text):
        return pf.Toml(text).document()

    # What both versions of the language know.
    COMMON = (
        ('', {}), ('# c\n\n', {}), ('a = 1', {'a': 1}),
        ('a = 1 # c\r\nb = 2\r\n', {'a': 1, 'b': 2}),
        ('"a b".\'c.d\' . e-1 = true', {'a b': {'c.d': {'e-1': True}}}),
        ('1 = "x"\n"" = ""\n[t]\n"" = 1', {'1': 'x', '': '', 't': {'': 1}}),
        ('[t]\nx = 1\n[t.u."v.w"]\ny = 2\n[ q . r ]\n', {
            't': {'x': 1, 'u': {'v.w': {'y': 2}}}, 'q': {'r': {}}}),
        ('[a.b]\nx = 1\n[a]\ny = 2', {'a': {'b': {'x': 1}, 'y': 2}}),
        ('a.x = 1\n[a.b]\ny = 2', {'a': {'x': 1, 'b': {'y': 2}}}),
        ('[[t]]\nn = 1\n[t.u]\nm = 2\n[[t.v]]\n[[t]]\nn = 3', {'t': [
            {'n': 1, 'u': {'m': 2}, 'v': [{}]}, {'n': 3}]}),
        ('a = [1, [2, "]"], # ]\n {b = "},"},\n]', {
            'a': [1, [2, ']'], {'b': '},'}]}),
        ('a = []\nb = {}\nc = {d.e = 1, f = [{}]}', {
            'a': [], 'b': {}, 'c': {'d': {'e': 1}, 'f': [{}]}}),
        (r'a = "\b\t\n\f\r\"\\\u00e9\U0001F600#"',
         {'a': '\b\t\n\f\r"\\\u00e9\U0001f600#'}),
        ("a = 'C:\\new\\\"x'", {'a': 'C:\\new\\"x'}),
        ('a = """\n[x]\nb = 1\\\n   c""d\\""""', {'a': '[x]\nb = 1c""d"'}),
        ('a = """x"""""\nb = """"x"""', {'a': 'x""', 'b': '"x'}),
        ("a = '''\n\\n''x'''''", {'a': "\\n''x''"}),
        ('a = """x\r\ny"""', {'a': 'x\ny'}),
        ('a = [1_000, +5, -17, 0, -0, 0xDEAD_beef, 0o755, 0b10]', {
            'a': [1000, 5, -17, 0, 0, 0xdeadbeef, 493, 2]}),
        ('a = [6.5e-3, 1e3, 1.0, -0.5E+1_0, inf, -inf]', {
            'a': [0.0065, 1000.0, 1.0, -0.5e10, float('inf'),
                  float('-inf')]}))

    def test_common(self):
        for text, value in self.COMMON:
            with self.subTest(text=text):
                self.assertEqual(self.read(text), value)

    def test_the_standard_reader_agrees(self):
        try:
            import tomllib
        except ImportError:
            self.skipTest('tomllib came with Python 3.11')
        for text, value in self.COMMON:
            with self.subTest(text=text):
                self.assertEqual(tomllib.loads(text.replace('\r\n', '\n')),
                                 value)

    def test_integers_and_floats_differ(self):
        found = self.read('a = 1\nb = 1.0\nc = 1e0')
        self.assertEqual([type(value) for value in found.values()],
                         [int, float, float])

    def test_newer_forms(self):
        for text, value in (
                (r'a = "\e\x41"', {'a': '\x1bA'}),
                ('a = {\n b = 1, # c\n c = 2,\n}', {'a': {'b': 1, 'c': 2}}),
                ('a = 07:08', {'a': '07:08'})):
            with self.subTest(text=text):
                self.assertEqual(self.read(text), value)

    def test_times_stay_text(self):
        for word in ('2026-01-02', '2026-01-02T03:04:05Z', '07:08:09.5',
                     '2026-01-02 03:04:05.5', '2026-01-02t03:04:05-07:00'):
            with self.subTest(word=word):
                self.assertEqual(self.read('a = %s # c' % word),
                                 {'a': word})

    # text, the line that is named, a part of the reason
    REFUSED = (
        ('a = 1\nb', 2, '= is expected'), ('= 1', 1, 'a key is expected'),
        ('a = ', 1, 'a value is expected'), ('a = x', 1, 'a value is exp'),
        ('a = 1 b = 2', 1, 'the line should end'),
        ('a = 01', 1, 'a value is exp'), ('a = 1__0', 1, 'a value is exp'),
        ('a = .5', 1, 'a value is exp'), ('a = True', 1, 'a value is exp'),
        ('a = "x', 1, 'a value is exp'), ("a = '\n'", 1, 'a value is exp'),
        ('a = "\x01"', 1, 'a value is exp'),
        ('a = """x""""""', 1, 'the line should end'),
        ('"""a""" = 1', 1, '= is expected'),
        ('a = [1\nb = 2', 2, 'a comma or ] is expected'),
        ('a = [1 2]', 1, 'a comma or ] is exp'), ('a = [,]', 1, 'a value'),
        ('a = {b = 1', 1, 'a comma or } is exp'), ('a = {,}', 1, 'a key'),
        ('[a', 1, '] is expected'), ('[]', 1, 'a key is exp'),
        ('[a] b = 1', 1, 'the line should end'), ('[[a]', 1, '] is exp'),
        ('[a . ]', 1, 'a key is exp'), ('a. = 1', 1, 'a key is exp'),
        ('a = 1\n\n a = 2', 3, '"a" stands twice, first in line 1'),
        ('[a]\n[b]\n[a]', 3, 'stands twice, first in line 1'),
        ('a.b = 1\n[a]', 2, 'stands twice, first in line 1'),
        ('[a]\nb = 1\n[a.b]', 3, 'b is a value already'),
        ('a = {}\n[a.b]', 2, 'a is a value already'),
        ('a = {}\na.b = 1', 2, 'a is a value already'),
        ('a = {b = 1, b = 2}', 1, '"b" stands twice'),
        ('a = []\n[[a]]', 2, 'a is no array of tables'),
        ('[a]\n[[a]]', 2, 'a is no array of tables'),
        ('[[a]]\n[a]', 2, 'a is an array already'),
        ('[a.b]\n[a]\nb = 1', 3, 'b is a table already'),
        ('a = """\n\\q"""', 2, 'bad escape \\q'),
        ('\n\na = "C:\\Users"', 3, 'write a Windows path in single quotes'),
        (r'a = "\ud800"', 1, 'bad escape'), (r'a = "\x4"', 1, 'bad escape'),
        (r'a = "\UFFFFFFFF"', 1, 'bad escape'),
        ('a = ' + '[' * 100, 1, 'nests deeper than 64 levels'),
        ('a = ' + '{a = ' * 100, 1, 'nests deeper than 64 levels'),
        ('.'.join('a' * 100) + ' = 1', 1, 'a key is expected'))

    def test_refused_with_the_line(self):
        for text, line, why in self.REFUSED:
            with self.subTest(text=text[:40]):
                with self.assertRaises(json.JSONDecodeError) as caught:
                    self.read(text)
                self.assertEqual(caught.exception.lineno, line)
                self.assertIn(why, caught.exception.msg)

    def test_the_file_and_the_place_are_named(self):
        with self.assertRaises(pf.ConfigError) as caught:
            show('/h/.codex/config.toml', '\ufeffa = 1\r\nb = "\\q"\r\n')
        self.assertIn('config /h/.codex/config.toml, line 2, column 6: bad '
                      'escape', str(caught.exception))

    def test_a_text_without_end_costs_one_scan(self):
        for text in ('a = "' + '\\"' * 200000, 'a = """' + '"x' * 200000,
                     'a = ' + '[' * 300000, '# x\n' * 100000 + '['):
            with self.assertRaises(json.JSONDecodeError):
                self.read(text)


class Test07Dialects(unittest.TestCase):
    """Whose file it is: by flag, then by path, then by what is in it."""

    def test_by_path(self):
        for path, dialect in (
                ('/h/Claude/claude_desktop_config.json', 'claude-desktop'),
                ('/h/.claude.json', 'claude-code-user'),
                ('.mcp.json', 'claude-code'), ('/r/.mcp.json', 'claude-code'),
                ('/r/.github/mcp.json', 'claude-code'),
                ('C:\\r\\.mcp.json', 'claude-code'),
                ('/p/.claude-plugin/plugin.json', 'claude-plugin'),
                ('/r/.cursor/mcp.json', 'cursor'),
                ('C:\\r\\.cursor\\mcp.json', 'cursor'),
                ('.vscode/mcp.json', 'vscode'),
                ('/h/.config/Code/User/mcp.json', 'vscode'),
                ('/h/Code - Insiders/User/profiles/p/mcp.json', 'vscode'),
                ('/h/VSCodium/User/settings.json', 'vscode-settings'),
                ('/r/.vscode/settings.json', 'vscode-settings'),
                ('/h/.gemini/settings.json', 'gemini'),
                ('/etc/gemini-cli/settings.json', 'gemini'),
                ('/h/.config/zed/settings.json', 'zed'),
                ('/r/.zed/settings.json', 'zed'),
                ('/h/.codeium/windsurf/mcp_config.json', 'windsurf'),
                ('/r/.devin/mcp_config.json', 'devin'),
                ('/h/.config/devin/mcp_config.json', 'devin'),
                ('/h/.mcpproxy/mcp_config.json', 'mcpproxy'),
                ('/x/cline_mcp_settings.json', 'cline'),
                ('/r/.roo/mcp.json', 'roo'), ('.kilocode/mcp.json', 'roo'),
                (('/h/Code/User/globalStorage/rooveterinaryinc.roo-cline/'
                 'settings/mcp_settings.json'), 'roo'),
                ('/h/.codex/config.toml', 'codex'), ('any.toml', 'codex'),
                ('/h/.copilot/mcp-config.json', 'copilot'),
                ('/r/.kiro/settings/mcp.json', 'kiro'),
                ('/r/.kiro/agents/x.json', 'kiro'),
                ('/r/.amazonq/mcp.json', 'amazon-q'),
                ('/h/.aws/amazonq/cli-agents/x.json', 'amazon-q'),
                ('opencode.json', 'opencode-v1'),
                ('/r/opencode.jsonc', 'opencode-v1'),
                ('/h/.lmstudio/mcp.json', 'lmstudio'),
                ('/r/.junie/mcp/mcp.json', 'jetbrains'),
                ('/r/mcp.json', ''), ('/r/settings.json', ''),
                ('/r/x.mcp.json', ''), ('/r/cursor/mcp.json', '')):
            with self.subTest(path=path):
                self.assertEqual(pf.dialect_of(path), dialect)

    RUN = {'command': 'x'}
    CONTENTS = (
        ({'mcpServers': {'s': RUN}, 'max_age': '1m'}, 'preflight'),
        ({'profiles': {}}, 'preflight'), ({}, 'generic'),
        ({'mcpServers': {}}, 'generic'), ({'mcpServers': {'s': RUN}},
                                          'generic'),
        ({'context_servers': {'s': RUN}}, 'zed'),
        ({'name': 'n', 'packages': []}, 'registry'),
        ({'server': {'name': 'n', 'packages': []}}, 'registry'),
        ({'mcpServers': [], 'listen': 'x'}, 'mcpproxy'),
        ({'mcp': {'servers': {'s': RUN}}}, 'vscode-settings'),
        ({'mcp': {'servers': {'s': {'type': 'local'}}}}, 'opencode-v2'),
        ({'mcp': {'s': {'type': 'remote', 'url': 'u'}}}, 'opencode-v1'),
        ({'mcp': {'s': {'command': ['x']}}}, 'opencode-v1'),
        ({'mcp': {'servers': {'type': 'local', 'command': ['x']}}},
         'opencode-v1'),
        ({'mcp': {'s': {'type': 'stdio', 'command': 'x'}}}, 'generic'),
        ({'mcpServers': {}, 'projects': {'/r': {'mcpServers': {}}}},
         'claude-code-user'),
        ({'mcpServers': {'s': {'httpUrl': 'u'}}}, 'gemini'),
        ({'mcpServers': {'s': RUN}, 'mcp': {'allowed': ['s']}}, 'gemini'),
        ({'mcpServers': {'s': RUN}, 'globalShortcut': ''}, 'claude-desktop'),
        ({'mcpServers': {'s': {'serverUrl': 'u'}}}, 'windsurf'),
        ({'mcpServers': {'s': {'type': 'local', 'tools': []}}}, 'copilot'),
        ({'mcpServers': {'s': {'transport': {'type': 'sse'}}}}, 'cline'),
        ({'mcpServers': {'s': {'type': 'streamableHttp'}}}, 'cline'),
        ({'mcpServers': {'s': {'alwaysAllow': [], 'disabledTools': []}}},
         'roo'),
        ({'mcpServers': {'s': {'command': '${CLAUDE_PLUGIN_ROOT}/x'}}},
         'claude-plugin'),
        ({'mcpServers': {'s': RUN}, 'useLegacyMcpJson': True}, 'amazon-q'),
        ({'mcpServers': {'s': RUN}, 'allowedTools': ['@s/t']}, 'amazon-q'),
        ({'servers': {'s': RUN}}, 'vscode'), ({'inputs': []}, 'vscode'),
        ({'s': RUN, 't': {'url': 'u'}}, 'generic'),
        ({'s': {'command': '${CLAUDE_PLUGIN_ROOT}/x'}}, 'claude-plugin'),
        ({'command': 'x'}, 'generic'), ({'zip': 1}, 'generic'))

    def test_by_content(self):
        for content, dialect in self.CONTENTS:
            with self.subTest(content=content):
                self.assertEqual(show('/c/x', content)['dialect'], dialect)

    def test_votes_count_every_entry(self):
        """The first entry that tells something does not decide alone."""
        gemini, windsurf = {'httpUrl': 'u'}, {'serverUrl': 'u'}
        for entries, dialect in (
                ((gemini, windsurf, windsurf), 'windsurf'),
                ((windsurf, gemini, gemini), 'gemini'),
                ((gemini, windsurf), 'generic')):
            with self.subTest(entries=entries):
                self.assertEqual(show('/c/x', {'mcpServers': {
                    str(n): entry for n, entry in enumerate(entries)}})[
                        'dialect'], dialect)

    def test_toml_without_its_name(self):
        for text, dialect in (
                ('# x\n[mcp_servers.s]\ncommand = "x"\n', 'codex'),
                ('mcp_servers.s.command = "x"', 'codex'),
                ('// x\n{"mcpServers": {}}', 'generic')):
            self.assertEqual(show('/c/x', text)['dialect'], dialect)

    def test_flag_then_path_then_content(self):
        content = {'mcpServers': {'s': {'serverUrl': 'u'}}}
        for path, flag, dialect in (
                ('/r/.cursor/mcp.json', 'roo', 'roo'),
                ('/r/.cursor/mcp.json', '', 'cursor'),
                ('/r/x.json', '', 'windsurf')):
            self.assertEqual(show(path, content, flag)['dialect'], dialect)

    def test_what_shares_a_path(self):
        for path, content, dialect in (
                ('/r/.mcp.json', {'s': {'command': 'x'}}, 'claude-plugin'),
                ('/r/.mcp.json', {'mcpServers': {}}, 'claude-code'),
                ('/r/.mcp.json', {}, 'claude-code'),
                ('/r/opencode.json', {'mcp': {'s': {'type': 'local'}}},
                 'opencode-v1'),
                ('/r/opencode.json', {'mcp': {'servers': {
                    's': {'type': 'local'}}}}, 'opencode-v2')):
            self.assertEqual(show(path, content)['dialect'], dialect)

    def test_yaml_is_refused_by_name(self):
        for path in ('/h/.continue/config.yaml', 'x.yml'):
            with self.assertRaises(pf.ConfigError) as caught:
                show(path, 'a: 1')
            self.assertIn('YAML', str(caught.exception))
            self.assertIn('JSON', caught.exception.hint)

    def test_what_is_said_of_a_file(self):
        table = '{"%s": {"s": {"command": "x"}}%s}'
        for path, key, more, codes in (
                ('/r/.mcp.json', 'mcpServers', '', []),
                ('/r/.mcp.json', 'mcpServers', ' // c', ['lenient_syntax']),
                ('/r/.vscode/mcp.json', 'servers', ', // c', []),
                ('/r/.zed/settings.json', 'context_servers', ',', []),
                ('/r/.gemini/settings.json', 'mcpServers', '/**/', []),
                ('/r/.gemini/settings.json', 'mcpServers', ',',
                 ['lenient_syntax']),
                ('/c/x', 'mcpServers', ',', ['lenient_syntax']),
                ('/c/x', 'mcpServers', ', "max_age": "1m", ', []),
                ('/r/.mcp.json', 'mcpServers', ', "a": 1, "a": 2',
                 ['duplicate_key'])):
            with self.subTest(path=path, more=more):
                text = table % (key, more.replace('// c', '// c\n'))
                self.assertEqual(show(path, text)['file_warnings'], codes)
        self.assertEqual(show('/r/.mcp.json', b'\xef\xbb\xbf{}')[
            'file_warnings'], ['bom'])

    def test_no_server_table(self):
        for path, content, words in (
                ('/r/.vscode/mcp.json', {'mcpServers': {}, 'a': 1},
                 'looked for "servers"'),
                ('/r/.vscode/mcp.json', {'mcpServers': {'s': {}}},
                 'looked for "servers"; there is "mcpServers"'),
                ('/r/.mcp.json', {'servers': {'s': {'command': 'x'}}},
                 'looked for "mcpServers"; there is "servers"'),
                ('/r/x.toml', '[mcp.servers.s]\ncommand = "x"',
                 'looked for "mcp_servers"; there is "mcp"')):
            with self.subTest(path=path, content=content):
                notes = []
                self.assertEqual(show(path, content, notes=notes)['servers'],
                                 [])
                self.assertIn(words, notes[0])

    def test_where_clients_keep_their_files(self):
        for system, env, dialect, path in (
                ('l', {}, 'cursor', '.cursor/mcp.json'),
                ('l', {}, 'cursor', '/h/.cursor/mcp.json'),
                ('l', {}, 'claude-desktop',
                 '/h/.config/Claude/claude_desktop_config.json'),
                ('m', {}, 'claude-desktop', ('/h/Library/Application Support/'
                 'Claude/claude_desktop_config.json')),
                ('w', {'APPDATA': 'C:/A'}, 'claude-desktop',
                 'C:/A/Claude/claude_desktop_config.json'),
                ('w', {'LOCALAPPDATA': 'C:/L'}, 'claude-desktop',
                 ('C:/L/Packages/Claude_*/LocalCache/Roaming/Claude/'
                 'claude_desktop_config.json')),
                ('l', {}, 'claude-code-user', '/h/.claude.json'),
                ('l', {'CLAUDE_CONFIG_DIR': '/x'}, 'claude-code-user',
                 '/x/.claude.json'),
                ('l', {}, 'codex', '/h/.codex/config.toml'),
                ('l', {'CODEX_HOME': '/x'}, 'codex', '/x/config.toml'),
                ('m', {}, 'codex', '/etc/codex/config.toml'),
                ('w', {}, 'vscode',
                 '/h/AppData/Roaming/*Cod*/User/mcp.json'),
                ('l', {'OPENCODE_CONFIG': '/x'}, 'opencode-v1', '/x')):
            with self.subTest(system=system, path=path):
                self.assertIn((dialect, path), list(pf.client_places(
                    system, dict(env, HOME='/h'))))

    def test_places_of_other_systems_are_left_out(self):
        for system, word in (('l', 'Library'), ('l', 'AppData'),
                             ('w', '/etc/'), ('m', 'C:/'), ('l', '{')):
            with self.subTest(system=system, word=word):
                self.assertEqual([path for _, path in pf.client_places(
                    system, {'HOME': '/h'}) if word in path], [])

    def test_each_place_tells_its_file(self):
        for dialect, path in pf.client_places('l', {'HOME': '/h'}):
            path = path.replace('*Cod*', 'Code').replace('*', 'x')
            with self.subTest(path=path):
                self.assertEqual(pf.dialect_of(path), dialect)


class Test07Spellings(unittest.TestCase):
    """One entry in the words of each client."""

    def test_url_without_a_type(self):
        for dialects, transport, codes in (
                ('cline', 'sse', []),
                ('codex copilot zed mcpproxy', 'http', []),
                (('gemini cursor vscode windsurf devin opencode-v1 kiro '
                 'lmstudio amazon-q generic jetbrains'), 'auto', []),
                (('claude-code claude-code-user claude-plugin roo '
                 'claude-desktop'), 'auto', ['client_would_reject'])):
            for dialect in dialects.split():
                with self.subTest(dialect=dialect):
                    server = entry_of(dialect, {'url': 'https://u'})
                    self.assertEqual((server['transport'], server[
                        'warnings']), (transport, codes))

    def test_words_for_the_transport(self):
        for dialect, entry, transport, codes in (
                ('claude-code', {'type': 'streamable-http'}, 'http', []),
                ('claude-code', {'type': 'streamableHttp'}, 'http',
                 ['client_would_reject']),
                ('vscode', {'type': 'http'}, 'auto', []),
                ('vscode', {'type': 'sse'}, 'sse', []),
                ('vscode', {'transport': 'sse'}, 'sse', []),
                ('cline', {'type': 'streamableHttp'}, 'http', []),
                ('cline', {'type': 'http'}, 'http', ['client_would_reject']),
                ('cline', {'transportType': 'http'}, 'http', []),
                ('roo', {'type': 'streamable-http'}, 'http', []),
                ('devin', {'transport': 'http'}, 'http', []),
                ('opencode-v1', {'type': 'remote'}, 'auto', []),
                ('gemini', {'type': 'sse'}, 'sse', []),
                ('codex', {'type': 'sse'}, 'http', []),
                ('mcpproxy', {'protocol': 'auto'}, 'http', []),
                ('mcpproxy', {'protocol': 'sse'}, 'sse', [])):
            with self.subTest(dialect=dialect, entry=entry):
                server = entry_of(dialect, dict(entry, url='https://u'))
                self.assertEqual((server['transport'], server['warnings']),
                                 (transport, codes))

    def test_local_is_a_command(self):
        for dialect in ('copilot', 'opencode-v1'):
            server = entry_of(dialect, {'type': 'local', 'command': 'x'})
            self.assertEqual(server['transport'], 'stdio')

    def test_keys_of_the_url(self):
        for dialect, entry, url, codes in (
                ('gemini', {'httpUrl': 'a', 'url': 'b'}, 'a',
                 ['mixed_transport']),
                ('gemini', {'httpUrl': 'a'}, 'a', []),
                ('windsurf', {'serverUrl': 'a'}, 'a', []),
                ('generic', {'endpoint': 'a'}, 'a', [])):
            with self.subTest(entry=entry):
                server = entry_of(dialect, entry)
                self.assertEqual((server['url'], server['warnings']),
                                 (url, codes))
        self.assertEqual(entry_of('gemini', {'httpUrl': 'a'})['transport'],
                         'http')

    def test_command_beats_url(self):
        both = {'command': 'x', 'url': 'u'}
        for dialect, codes in (
                ('generic', ['mixed_transport']),
                ('codex', ['client_would_reject', 'mixed_transport']),
                ('roo', ['client_would_reject', 'mixed_transport'])):
            with self.subTest(dialect=dialect):
                server = entry_of(dialect, both)
                self.assertEqual((server['transport'], server['url']),
                                 ('stdio', None))
                self.assertEqual(sorted(server['warnings']), codes)

    def test_commands(self):
        for dialect, entry, found, codes in (
                ('opencode-v1', {'command': ['x', 'a b'], 'args': ['c']},
                 ('x', ['a b', 'c']), []),
                ('generic', {'command': ['x']}, ('x', []), []),
                ('cursor', {'command': ['x', 'y']}, ('x', ['y']),
                 ['client_would_reject']),
                ('cursor', {'command': 'x y'}, ('x y', []), []),
                ('zed', {'command': {'path': 'x', 'args': ['y']}},
                 ('x', ['y']), ['client_would_reject']),
                ('cursor', {'command': 'x', 'args': [1, True, 'a']},
                 ('x', ['1', 'true', 'a']), ['value_coerced'])):
            with self.subTest(dialect=dialect, entry=entry):
                server = entry_of(dialect, entry)
                self.assertEqual((server['command'], server['args']), found)
                self.assertEqual(server['warnings'], codes)

    def test_a_transport_that_is_an_object(self):
        server = entry_of('cline', {'timeout': 30, 'transport': {
            'type': 'streamableHttp', 'url': 'u', 'headers': {'A': 'b'}}})
        self.assertEqual((server['transport'], server['url'],
                          server['headers'], server['request_timeout']),
                         ('http', 'u', {'A': 'b'}, 30.0))

    def test_other_keys(self):
        for dialect, entry, key, value in (
                ('generic', {'working_dir': 'd'}, 'cwd', 'd'),
                ('generic', {'workingDirectory': 'd'}, 'cwd', 'd'),
                ('codex', {'http_headers': {'A': 'b'}}, 'headers',
                 {'A': 'b'}),
                ('opencode-v1', {'environment': {'A': 'b'}}, 'env',
                 {'A': 'b'}),
                ('opencode-v1', {'env': {'A': 'b'}}, 'env', {}),
                ('vscode', {'env': {'A': 1, 'B': None, 'C': True}}, 'env',
                 {'A': '1', 'B': None, 'C': 'true'}),
                ('codex', {'required': True}, 'required', True),
                ('gemini', {'required': True}, 'required', False)):
            with self.subTest(dialect=dialect, entry=entry):
                server = entry_of(dialect, dict(entry, command='x'))
                self.assertEqual(server[key], value)
        self.assertEqual(entry_of('opencode-v1', {
            'command': ['x'], 'env': {}})['warnings'], ['env_key_ignored'])

    # dialect, keys, start, request, codes
    WAITS = (
        ('claude-code', {'timeout': 45000}, None, 45.0, []),
        ('claude-code', {'timeout': 30000}, None, 30.0, []),
        ('claude-code', {'timeout': 999}, None, None, ['timeout_ignored']),
        ('claude-code', {'request_timeout_ms': 2000, 'timeout': 5000}, None,
         2.0, []),
        ('cline', {'timeout': 15}, 15.0, 15.0, []),
        ('cline', {'timeout': 60000}, 3600.0, 3600.0, ['timeout_clamped']),
        ('cline', {'timeout': '15'}, None, None, ['timeout_ignored']),
        ('roo', {'timeout': 15}, None, 15.0, []),
        ('roo', {'timeout': 3601}, None, None, ['timeout_ignored']),
        ('codex', {'startup_timeout_sec': 20, 'startup_timeout_ms': 5000,
                   'tool_timeout_sec': 1.5}, 20.0, 1.5, []),
        ('codex', {'startup_timeout_ms': 5000}, 5.0, None, []),
        ('gemini', {'timeout': 30000}, 30.0, 30.0, []),
        ('copilot', {'timeout': 20000}, None, 20.0, []),
        ('kiro', {'timeout': 60000}, None, 60.0, []),
        ('zed', {'timeout': 90}, None, 90.0, []),
        ('opencode-v1', {'timeout': 8000}, 8.0, None, []),
        ('opencode-v2', {'timeout': 8000}, 8.0, 8.0, []),
        ('opencode-v2', {'timeout': {'startup': 1000}}, 1.0, None, []),
        ('opencode-v2', {'timeout': {'startup': 1000, 'request': 2000}},
         1.0, 2.0, []),
        ('mcpproxy', {'init_timeout': '1m30s'}, 90.0, None, []),
        ('mcpproxy', {'init_timeout': 90}, None, None, ['timeout_ignored']),
        ('generic', {'timeout': 30}, None, 30.0, ['timeout_guessed']),
        ('generic', {'timeout': 1000}, None, 1.0, ['timeout_guessed']),
        ('generic', {'timeout': True}, None, None, ['timeout_ignored']),
        ('generic', {'timeout': -1}, None, None, ['timeout_ignored']),
        ('cursor', {'timeout': 30}, None, None, []))

    def test_timeouts(self):
        for dialect, keys, start, request, codes in self.WAITS:
            with self.subTest(dialect=dialect, keys=keys):
                server = entry_of(dialect, dict(keys, command='x'))
                self.assertEqual(
                    (server['start_timeout'], server['request_timeout'],
                     server['warnings']), (start, request, codes))

    def test_timeouts_of_the_whole_file(self):
        for dialect, content, found in (
                ('opencode-v2', {'mcp': {'timeout': 7000, 'servers': {
                    's': {'type': 'local', 'command': ['x']}}}}, (7.0, 7.0)),
                ('mcpproxy', {'init_timeout': '5s', 'call_tool_timeout': '2m',
                              'mcpServers': [{'name': 's', 'command': 'x'}]},
                 (5.0, 120.0))):
            with self.subTest(dialect=dialect):
                server = only(show('/c/x', content))
                self.assertEqual((server['start_timeout'],
                                  server['request_timeout']), found)

    # dialect, keys, allow, deny
    LISTS = (
        ('codex', {'enabled_tools': ['a', 'b'], 'disabled_tools': ['b']},
         ['a', 'b'], ['b']),
        ('gemini', {'includeTools': ['a', 'b(x)'], 'excludeTools': ['b']},
         ['a', 'b'], ['b']),
        ('gemini', {'trust': True}, None, []),
        ('copilot', {'tools': ['*']}, None, []),
        ('copilot', {'tools': []}, [], []),
        ('copilot', {'tools': ['a']}, ['a'], []),
        ('roo', {'disabledTools': ['a'], 'alwaysAllow': ['b']}, None, ['a']),
        ('kiro', {'disabledTools': ['a'], 'autoApprove': ['*']}, None,
         ['a']),
        ('windsurf', {'disabledTools': ['a']}, None, ['a']),
        ('cline', {'autoApprove': ['a']}, None, []),
        ('amazon-q', {'allowedTools': ['a']}, None, []),
        ('generic', {'alwaysAllow': ['a'], 'autoApprove': ['a']}, None, []),
        ('generic', {'disabledTools': ['a']}, None, ['a']),
        ('claude-code', {'enabled_tools': ['a']}, None, []))

    def test_tool_lists_and_lists_of_approvals(self):
        for dialect, keys, allow, deny in self.LISTS:
            with self.subTest(dialect=dialect, keys=keys):
                server = entry_of(dialect, dict(keys, command='x'))
                self.assertEqual((server['allow'], server['deny']),
                                 (allow, deny))

    def test_a_list_that_cannot_be_read_makes_a_bad_entry(self):
        for dialect, key in (('gemini', 'includeTools'), ('copilot',
                                                          'tools')):
            found = show('/r/x', in_table(dialect, {
                'command': 'x', key: 'a'}), dialect)
            self.assertEqual(found['skipped'],
                             [{'name': 's', 'reason': 'bad_value'}])

    def test_on_and_off(self):
        for dialect, keys, is_on in (
                ('zed', {'enabled': False}, False), ('zed', {}, True),
                ('roo', {'disabled': True}, False),
                ('opencode-v2', {'disabled': True}, False),
                ('cursor', {'disabled': True, 'enabled': True}, False),
                ('mcpproxy', {}, False), ('mcpproxy', {'enabled': True},
                                          True)):
            with self.subTest(dialect=dialect, keys=keys):
                server = entry_of(dialect, dict(keys, command='x'))
                self.assertIs(server['enabled'], is_on)

    def test_lists_of_servers(self):
        for lists, on in (
                ({}, 'abc'), ({'allowed': ['a', 'b']}, 'ab'),
                ({'excluded': ['a']}, 'bc'), ({'allowed': []}, ''),
                ({'allowed': ['a', 'b'], 'excluded': ['a']}, 'b')):
            with self.subTest(lists=lists):
                found = show('/r/.gemini/settings.json', {
                    'mcp': lists, 'mcpServers': {
                        name: {'command': 'x'} for name in 'abc'}})
                self.assertEqual(''.join(
                    server['name'] for server in found['servers']
                    if server['enabled']), on)

    SKIPPED = (
        ('codex', {'startup_timeout_sec': 1}, 'no_transport'),
        ('cursor', {}, 'no_transport'), ('cursor', 5, 'not_an_object'),
        ('cursor', {'type': 'ws', 'url': 'u'}, 'unsupported_transport'),
        ('cursor', {'url': 'wss://h'}, 'unsupported_transport'),
        ('vscode', {'type': 'http', 'url': 'unix:///s'},
         'unsupported_transport'),
        ('claude-code', {'type': 'sdk'}, 'client_internal'),
        ('zed', {'source': 'extension', 'settings': {}},
         'extension_managed'),
        ('zed', {'settings': {}}, 'extension_managed'),
        ('opencode-v1', {'enabled': False}, 'override_only'),
        ('gemini', {'tcp': 'h:1'}, 'no_transport'),
        ('roo', {'type': 'stdio', 'url': 'u'}, 'no_transport'))

    def test_skipped(self):
        for dialect, entry, reason in self.SKIPPED:
            with self.subTest(dialect=dialect, entry=entry):
                content = in_table(dialect, entry)
                found = show('/r/x', content, dialect)
                self.assertEqual((found['servers'], found['skipped']), (
                    [], [{'name': 's', 'reason': reason}]))

    def test_our_keys_count_only_in_our_files(self):
        ours = {'trust_mode': 'auto', 'quarantined': True, 'max_age': '0',
                'health': {}}
        for dialect in sorted(set(pf.DIALECTS) - {
                'preflight', 'generic', 'mcpproxy', 'registry', 'codex'}):
            with self.subTest(dialect=dialect):
                config = read_files(
                    ('/r/x', in_table(dialect, dict(ours, command='x'))),
                    dialect=dialect)
                server, why = pf.look_up(config, 's')
                self.assertEqual((server.trust_mode, server.quarantined,
                                  server.max_age), ('manual', False, None))
                self.assertIn('health, max_age, quarantined, trust_mode '
                              'ignored', ' '.join(server.warnings))

    def test_a_list_of_servers_is_mcpproxys(self):
        found = show('/c/x', {'mcpServers': [
            {'name': 'a', 'command': 'x', 'enabled': True}, {'url': 'u'}, 5,
            {'name': 'b', 'command': 'y', 'quarantined': True,
             'trust_mode': 'scan', 'enabled_tools': [],
             'disabled_tools': ['t']},
            {'name': 'a', 'command': 'z', 'enabled': True},
            {'name': 'c', 'command': 'x', 'enabled_tools': ['t'],
             'disabled_tools': ['u']}]})
        self.assertEqual(
            [(server['name'], server['command'], server['enabled'],
              server['allow'], server['deny'], server['warnings'])
             for server in found['servers']], [
                 ('a', 'z', True, None, [], ['duplicate_name']),
                 ('b', 'y', False, None, ['t'], ['quarantined'])])
        self.assertEqual([row['reason'] for row in found['skipped']],
                         ['no_name', 'not_an_object', 'bad_value'])

    def test_mcpproxys_missing_enabled_is_told(self):
        config = read_files(('/c/x', {'mcpServers': [
            {'name': 's', 'command': 'x'}]}))
        self.assertIn('lacks "enabled", and so is off',
                      pf.look_up(config, 's')[0].warnings[0])

    def test_an_entry_without_a_name_is_told(self):
        config = read_files(('/c/x', {'mcpServers': [{'command': 'x'}]}))
        self.assertEqual((config.entries, config.warnings), (
            {}, ['/c/x: an entry without a name was skipped']))

    def test_one_naked_entry(self):
        for entry in ({'url': 'u'}, {'command': 'x', 'env': {'url': 'u'}}):
            self.assertEqual(only(show('/c/web.json', entry))['name'], 'web')

    def test_maps_within_a_plugins_list(self):
        found = show('/p/.claude-plugin/plugin.json', {'mcpServers': [
            './other.json', {'a': {'command': 'x'}},
            {'mcpServers': {'b': {'command': 'y'}}}]})
        self.assertEqual([server['name'] for server in found['servers']],
                         ['a', 'b'])


class Test07References(unittest.TestCase):
    """What a text becomes, by the dialect that owns it."""

    # dialect, text, expanded, missing; '' in missing: something stays text
    TEXTS = (
        ('claude-code', '${T} ${NO:-d} ${E:-d} $T', 'tok-1 d d $T', ['']),
        ('claude-code', '${NO}', '${NO}', ['NO']),
        ('claude-code', '${env:T}', '${env:T}', ['']),
        ('claude-plugin', '${CLAUDE_PLUGIN_ROOT}/x', '/r/x', []),
        ('claude-plugin', '${user_config.key}', '${user_config.key}',
         ['user_config.key']),
        ('claude-desktop', '${T}', '${T}', ['']),
        ('claude-desktop', '$NO {T} $', '$NO {T} $', []),
        ('cursor', '${env:T} ${env:E}|', 'tok-1 |', []),
        ('cursor', '${env:NO}', '${env:NO}', ['NO']),
        ('cursor', '${T}', '${T}', ['']),
        ('cursor', ('${userHome} ${workspaceFolder} '
         '${workspaceFolderBasename}${/}'), '/h /w/app app/', []),
        ('cursor', '${cwd}', '${cwd}', ['']),
        ('vscode', '${env:T}${env:NO}.', 'tok-1.', ['NO']),
        ('vscode', '${input:a}', '${input:a}', ['input:a']),
        ('vscode', '${command:a}', '${command:a}', ['command:a']),
        ('vscode', '${cwd} ${workspaceFolder:app}', '/w/app /w/app', []),
        ('vscode', '${T}', '${T}', ['']),
        ('windsurf', '${env:T} ${file:/k}', 'tok-1 secret', []),
        ('windsurf', '${file:/no}', '${file:/no}', ['file:/no']),
        ('cline', '${env: T }${env:E}', 'tok-1', []),
        ('roo', '${env:T} ${workspaceFolder}', 'tok-1 /w/app', []),
        ('codex', '${T}', '${T}', ['']),
        ('gemini', '$T ${T} ${NO:-d} [${E:-d}]', 'tok-1 tok-1 d []', []),
        ('gemini', '$NO', '$NO', ['NO']),
        ('gemini', '${env:T}', '${env:T}', ['']),
        ('copilot', '$T ${T} ${NO:-d}${E:-d}', 'tok-1 tok-1 dd', []),
        ('copilot', '${NO}', '${NO}', ['NO']),
        ('zed', '${T}', '${T}', ['']),
        ('opencode-v1', '{env:T} {env:NO}.', 'tok-1 .', ['NO']),
        ('opencode-v1', '{file:k} {file:~/k}', 'near far', []),
        ('opencode-v1', '{file:no}', '{file:no}', ['file:no']),
        ('opencode-v1', '${T}', '${T}', ['']),
        ('kiro', '${T}', 'tok-1', []), ('kiro', '${NO}', '${NO}', ['NO']),
        ('kiro', '${T:-d}', '${T:-d}', ['']),
        ('amazon-q', '${env:T}', 'tok-1', []),
        ('lmstudio', '${T}', '${T}', ['']),
        ('mcpproxy', '${env:T}', 'tok-1', []),
        ('mcpproxy', '${keyring:k}', '${keyring:k}', ['keyring:k']),
        ('mcpproxy', '${T}', '${T}', ['']),
        ('generic', '${T} ${env:T} ${env:NO:-d} ${E:-d}', 'tok-1 tok-1 d d',
         []),
        ('generic', '${NO}', '${NO}', ['NO']),
        ('generic', '{env:T}', '{env:T}', ['']))
    FILES = {'/k': 'secret\n', '/r/k': ' near ', '/h/k': 'far'}

    def test_texts(self):
        for dialect, text, value, missing in self.TEXTS:
            with self.subTest(dialect=dialect, text=text):
                server = entry_of(dialect, {'command': 'x', 'args': [text]},
                                  workspace='/w/app', files=self.FILES)
                self.assertEqual(server['args'], [value])
                found = server['unresolved'] + [''] * (
                    'variable_not_expanded' in server['warnings'])
                self.assertEqual(found, missing)

    # dialect, entry, what stops the server
    STOPS = (
        ('claude-code', {'args': ['${NO}']}, ['NO (args[0])']),
        ('cursor', {'env': {'A': '${env:NO}'}}, ['NO (env.A)']),
        ('cursor', {'env': {'A': '${NO}'}}, []),
        ('vscode', {'env': {'A': '${env:NO}'}}, []),
        ('vscode', {'env': {'A': '${input:k}'}}, ['input:k (env.A)']),
        ('gemini', {'args': ['$NO'], 'env': {'A': '$NO'}},
         ['NO (args[0])']),
        ('gemini', {'env': {'A': '$NO'}}, []),
        ('opencode-v1', {'environment': {'A': '{env:NO}'}}, []),
        ('opencode-v1', {'environment': {'A': '{file:no}'}},
         ['file:no (env.A)']),
        ('zed', {'env': {'A': '${NO}'}}, []),
        ('codex', {'env_vars': ['NO'], 'env': {'A': '${NO}'}}, []))

    def test_what_stops_a_server(self):
        """Only what would be sent as text by a client that expands, and a
        file, bearer or input that has no value."""
        for dialect, entry, missing in self.STOPS:
            with self.subTest(dialect=dialect, entry=entry):
                config = read_files(('/r/x', text_of(in_table(
                    dialect, dict(entry, command='x')), dialect)),
                    dialect=dialect)
                server = pf.look_up(config, 's')[0]
                self.assertEqual(pf.expand_server(server, HOME_ENV)[1],
                                 missing)

    def test_what_is_left_out_is_told(self):
        for dialect, entry, note in (
                ('vscode', {'env': {'A': '${env:NO}'}}, ('NO is not set; its '
                 'client leaves it out (env.A)')),
                ('codex', {'env_vars': ['NO']}, ('NO is not set; its client '
                 'leaves it out (env_vars)'))):
            config = read_files(('/r/x', text_of(in_table(
                dialect, dict(entry, command='x')), dialect)),
                dialect=dialect)
            server = pf.look_up(config, 's')[0]
            self.assertIn(note, pf.expand_server(server, {})[0].warnings)

    def test_order_and_no_repeats(self):
        server = entry_of('cursor', {
            'command': '${env:C}', 'args': ['${env:A}', '${env:C}'],
            'env': {'X': '${env:B}'}, 'cwd': '${env:D}'})
        self.assertEqual(server['unresolved'], ['C', 'A', 'B', 'D'])

    def test_inputs_with_a_default(self):
        for path, wrap in (
                ('/r/.vscode/mcp.json', lambda top: top),
                ('/r/.vscode/settings.json', lambda top: {'mcp': top})):
            with self.subTest(path=path):
                server = only(show(path, wrap({
                    'inputs': [{'id': 'a', 'default': 'd'}, {'id': 'b'}, 5],
                    'servers': {'s': {'command': 'x', 'args': [
                        '${input:a}', '${input:b}']}}})))
                self.assertEqual(server['args'], ['d', '${input:b}'])
                self.assertEqual(server['unresolved'], ['input:b'])

    def test_env_file(self):
        text = ('# c\nA=1\nexport B = "x y" # c\nC=\'q\'\n\nD=a=b # c\r\n'
                'E=\nbad line\nF=over\n')
        for dialect in ('vscode', 'cursor'):
            server = entry_of(
                dialect, {'command': 'x', 'envFile': '${workspaceFolder}/e',
                          'env': {'F': 'own'}},
                workspace='/w', files={'/w/e': text})
            self.assertEqual(server['env'], {
                'A': '1', 'B': 'x y', 'C': 'q', 'D': 'a=b', 'E': '',
                'F': 'own'})
        server = entry_of('vscode', {'command': 'x', 'envFile': 'no'})
        self.assertEqual(server['unresolved'], ['file:no'])

    def test_codex_names_variables(self):
        server = entry_of('codex', {
            'command': 'x', 'env': {'R': 'us'},
            'env_vars': ['T', 'NO', {'name': 'R', 'source': 'local'}]})
        self.assertEqual(server['env'], {'T': 'tok-1', 'R': 'us'})
        self.assertEqual(server['unresolved'], ['NO'])

    def test_codex_headers(self):
        server = entry_of('codex', {
            'url': 'u', 'bearer_token_env_var': 'T', 'http_headers': {
                'authorization': 'x', 'A': 'a', 'B': 'b'},
            'env_http_headers': {'a': 'R', 'B': 'NO', 'C': 'E'}})
        self.assertEqual(server['headers'], {
            'a': 'eu', 'B': 'b', 'Authorization': 'Bearer tok-1'})
        self.assertEqual(server['unresolved'], ['NO', 'E'])

    def test_a_bearer_without_a_value_stops_the_server(self):
        for overlay, missing in (
                ({}, ['NO (headers.Authorization)']),
                ({'headers': {'authorization': 'x'}}, [])):
            with self.subTest(overlay=overlay):
                sources = [('/r/x.toml', '/r/x.toml', (b'[mcp_servers.s]\n'
                            b'url = "u"\nbearer_token_env_var = "NO"')),
                           ('/c/o', '/c/o', json.dumps({'mcpServers': {
                               's': overlay}}).encode())]
                server = pf.look_up(pf.read_config(sources), 's')[0]
                self.assertEqual(pf.expand_server(server, {})[1], missing)

    def test_a_token_in_codex_own_key_is_refused_there(self):
        server = entry_of('codex', {'url': 'u', 'bearer_token': 'x'})
        self.assertEqual((server['headers'], server['warnings']),
                         ({}, ['client_would_reject']))

    def test_the_plugin_is_above_its_manifests_folder(self):
        for path, root in (('/p/.claude-plugin/plugin.json', '/p'),
                           ('/p/.mcp.json', '/p')):
            server = only(show(path, {'mcpServers': {'s': {
                'command': '${CLAUDE_PLUGIN_ROOT}/x'}}}, 'claude-plugin'))
            self.assertEqual(server['command'], root + '/x')

    def test_home_in_cwd_only(self):
        server = entry_of('generic', {'command': '~/x', 'cwd': '~/y'})
        self.assertEqual((server['command'], server['cwd']), ('~/x', '/h/y'))
        self.assertEqual(entry_of('cursor', {'command': 'x', 'cwd': '~/y'})[
            'cwd'], '~/y')

    def test_launch_is_the_text_as_written(self):
        config = read_files(('/r/.cursor/mcp.json', in_table('cursor', {
            'command': '${env:T}', 'args': ['${workspaceFolder}']})))
        server = pf.look_up(config, 's')[0]
        self.assertEqual((server.command, server.args),
                         ('${env:T}', ('${workspaceFolder}',)))

    def test_secrets_are_masked(self):
        form = pf.masked_form(entry_of('generic', {
            'command': 'x', 'args': ['--token', 'abc', 'see', 'tok-1'],
            'env': {'A': 'abc', 'E': '', 'N': None},
            'headers': {'H': 'abc'}}), ['tok-1'])
        self.assertEqual(form['args'], ['--token', '***', 'see', '***'])
        self.assertEqual(form['env'], {'A': '***', 'E': '', 'N': None})
        self.assertEqual(form['headers'], {'H': '***'})
        form = pf.masked_form(entry_of('generic', {
            'url': 'https://u:p@h/m?k=v'}), [])
        self.assertEqual(form['url'], 'https://***@h/m?***')

    def test_codex_hands_down_a_short_list(self):
        environ = {'PATH': '/b', 'HOME': '/h', 'AWS_SECRET': 'x', 'TZ': 'Z'}
        env = pf.child_environment(a_server(dialect='codex', env={
            'A': '1'}), environ)
        self.assertEqual({name: env.get(name) for name in (
            'PATH', 'HOME', 'TZ', 'A', 'AWS_SECRET', 'BROWSER')}, {
                'PATH': '/b', 'HOME': '/h', 'TZ': 'Z', 'A': '1',
                'AWS_SECRET': None, 'BROWSER': 'true'})


class Test07Precedence(unittest.TestCase):
    """Several files: one client's merge, others' collide."""

    def config(self, *files, **more):
        """Read files: path -> entries, each the command of s or an entry."""
        return read_files(*[
            (path, entry if isinstance(entry, (str, dict)) and (
                'mcp' in str(entry)) else in_table(
                    pf.dialect_of(path) or 'generic',
                    {'command': entry} if isinstance(entry, str) else entry))
            for path, entry in files], home='/h', **more)

    # files in the order given, the command that wins
    WINNERS = (
        ((('/h/.cursor/mcp.json', 'user'), ('/r/.cursor/mcp.json', 'project')
          ), 'project'),
        ((('/r/.cursor/mcp.json', 'project'), ('/h/.cursor/mcp.json', 'user')
          ), 'project'),
        ((('/r/.mcp.json', 'outer'), ('/r/a/.mcp.json', 'inner')), 'inner'),
        ((('/h/.claude.json', 'user'), ('/r/.mcp.json', 'project')),
         'project'),
        ((('/r/.claude-plugin/plugin.json', 'plugin'),
          ('/h/.claude.json', 'user')), 'user'),
        ((('/etc/gemini-cli/settings.json', 'system'),
          ('/r/.gemini/settings.json', 'project')), 'system'),
        ((('/etc/gemini-cli/system-defaults.json', 'low'),
          ('/h/.gemini/settings.json', 'user')), 'user'),
        ((('/h/.config/Code/User/mcp.json', 'user'),
          ('/r/.vscode/mcp.json', 'project')), 'project'),
        ((('/r/.kiro/agents/a.json', 'agent'),
          ('/r/.kiro/settings/mcp.json', 'project')), 'agent'),
        ((('/r/opencode.jsonc', 'c'), ('/r/opencode.json', 'plain')), 'c'))

    def test_winners(self):
        for files, command in self.WINNERS:
            with self.subTest(files=files):
                server, why = pf.look_up(self.config(*files), 's')
                self.assertEqual(why, '')
                self.assertEqual(server.command, command)

    def test_the_loser_is_told(self):
        config = self.config(('/h/.cursor/mcp.json', 'x'),
                             ('/r/.cursor/mcp.json', 'y'))
        self.assertEqual(pf.look_up(config, 's')[0].warnings,
                         ['hides the definition in /h/.cursor/mcp.json'])

    def test_a_workspace_changes_no_precedence(self):
        config = self.config(('/r/.cursor/mcp.json', 'y'),
                             ('/h/.cursor/mcp.json', 'x'), workspace='/w')
        self.assertEqual(pf.look_up(config, 's')[0].command, 'y')

    def test_two_definitions(self):
        for first, second in (
                ('/r/.cursor/mcp.json', '/r/.mcp.json'),
                ('/a/.mcp.json', '/b/.mcp.json'),
                ('/r/.vscode/mcp.json', '/r/.vscode/settings.json'),
                ('/c/x.json', '/r/.cursor/mcp.json')):
            with self.subTest(first=first), \
                    self.assertRaises(pf.ConfigError) as caught:
                self.config((first, 'x'), (second, 'y'))
            self.assertIn('in %s and in %s' % (first, second),
                          str(caught.exception))

    def test_codex_merges_key_by_key(self):
        config = self.config(
            ('/h/.codex/config.toml', ('[mcp_servers.s]\ncommand = "x"\n'
             '[mcp_servers.s.env]\nA = "1"\nB = "2"')),
            ('/r/.codex/config.toml', ('[mcp_servers.s]\nenabled = false\n'
             'env = {B = "3"}')))
        server = pf.look_up(config, 's')[0]
        self.assertEqual(
            (server.command, server.enabled, server.env, server.file),
            ('x', False, {'A': '1', 'B': '3'}, '/h/.codex/config.toml'))

    def test_opencode_switches_what_another_file_defines(self):
        config = self.config(
            ('/h/.config/opencode/opencode.json', {'mcp': {'s': {
                'type': 'local', 'command': ['x']}}}),
            ('/r/opencode.json', {'mcp': {'s': {'enabled': False}}}))
        server = pf.look_up(config, 's')[0]
        self.assertEqual((server.command, server.enabled), ('x', False))

    CLAUDE_USER = {
        'mcpServers': {'a': {'command': 'user'}, 'b': {'command': 'b'}},
        'projects': {
            '/r': {'mcpServers': {'a': {'command': 'local'},
                                  'c': {'command': 'c'}},
                   'disabledMcpServers': ['b'],
                   'disabledMcpjsonServers': ['p']},
            '/q': {'mcpServers': {'d': {'command': 'd'}}}}}

    def test_claudes_user_file(self):
        found = show('/h/.claude.json', self.CLAUDE_USER, workspace='/r')
        self.assertEqual(
            [(server['name'], server['command'], server['enabled'])
             for server in found['servers']],
            [('a', 'local', True), ('b', 'b', False), ('c', 'c', True)])
        found = show('/h/.claude.json', self.CLAUDE_USER)
        self.assertEqual([server['command'] for server in found['servers']],
                         ['user', 'b'])

    def test_claudes_user_file_without_servers_of_its_own(self):
        notes = []
        found = show('/h/.claude.json', {'projects': {'/r': {'mcpServers': {
            's': {'command': 'x'}}}}}, workspace='/r', notes=notes)
        self.assertEqual((only(found)['name'], notes), ('s', []))

    def test_claudes_user_file_switches_the_projects(self):
        project = {'mcpServers': {'p': {'command': 'p'},
                                  'q': {'command': 'q'}}}
        config = read_files(('/r/.mcp.json', project),
                            ('/h/.claude.json', self.CLAUDE_USER), home='/h')
        self.assertFalse(pf.look_up(config, 'p')[0].enabled)
        self.assertTrue(pf.look_up(config, 'q')[0].enabled)

    def test_an_overlay_lies_on_any_client(self):
        config = self.config(
            ('/r/.codex/config.toml', ('[mcp_servers.s]\ncommand = "x"\n'
             'enabled_tools = ["a", "b"]\ndisabled_tools = ["b"]')),
            ('/c/x.json', {'trust_mode': 'auto', 'env': {'A': '${T}'}}))
        server = pf.look_up(config, 's')[0]
        self.assertEqual((server.trust_mode, server.allow, server.deny),
                         ('auto', ['a', 'b'], ['b']))
        self.assertEqual(pf.expand_server(server, HOME_ENV)[0].env,
                         {'A': 'tok-1'})

    def test_base(self):
        for path, base in (
                ('/r/.mcp.json', '/r'), ('/r/.cursor/mcp.json', '/r'),
                ('/r/.github/mcp.json', '/r'), ('/r/opencode.json', '/r'),
                ('/h/.claude.json', '/h'), ('/h/.cursor/mcp.json', '/h'),
                ('/h/.codeium/windsurf/mcp_config.json', '/h'),
                ('/h/.config/zed/settings.json', '/h'),
                ('/h/.trees/r/.mcp.json', '/h/.trees/r'),
                ('/etc/codex/config.toml', '/h'),
                (('/h/Library/Application Support/Claude/'
                 'claude_desktop_config.json'), '/h'),
                ('/r/.kiro/settings/mcp.json', '/r')):
            entry = ('[mcp_servers.s]\ncommand = "x"'
                     if path.endswith('.toml') else 'x')
            for workspace in ('', '/w'):
                with self.subTest(path=path, workspace=workspace):
                    config = self.config((path, entry), workspace=workspace)
                    self.assertEqual(pf.look_up(config, 's')[0].base,
                                     workspace or base)

    def test_a_bad_entry_costs_only_itself(self):
        config = read_files(('/r/.codex/config.toml', (
            '[mcp_servers.a]\nstartup_timeout_sec = 1\n'
            '[mcp_servers.b]\ncommand = "x"\n[mcp_servers."n:x"]\n'
            'command = "x"')))
        self.assertEqual([server.name for server
                          in pf.all_servers(config)[0]], ['b'])
        self.assertIn('its name holds a ":"', pf.look_up(config, 'n:x')[1])

    def test_file_warnings_are_sentences_too(self):
        config = read_files(('/r/.mcp.json', '{"mcpServers": {}, }'))
        self.assertEqual(config.warnings, [
            ('/r/.mcp.json: its client does not read comments or trailing '
            'commas')])


class Test07Registry(unittest.TestCase):
    """A registry's recipe: candidates, and only when that is meant."""

    RECIPE = {
        'name': 'io.x/w', 'version': '2',
        'packages': [
            {'registryType': 'pypi', 'identifier': 'w', 'version': '1',
             'transport': {'type': 'stdio'}, 'packageArguments': [
                 {'type': 'positional', 'value': 'go'},
                 {'type': 'named', 'name': '--n', 'default': 3},
                 {'type': 'named', 'name': '--o'},
                 {'type': 'positional', 'valueHint': 'city',
                  'isRequired': True}],
             'environmentVariables': [
                 {'name': 'T', 'isRequired': True},
                 {'name': 'NO', 'isRequired': True},
                 {'name': 'LOG', 'default': 'info'}, {'name': 'OPT'}]},
            {'registry_type': 'npm', 'identifier': '@a/b',
             'runtime_arguments': [{'type': 'positional', 'value': '-q'}]},
            {'registryType': 'npm', 'identifier': 'c', 'transport': {
                'type': 'streamable-http', 'url': 'u'}},
            {'registryType': 'oci', 'identifier': 'img', 'version': '3',
             'environmentVariables': [{'name': 'A', 'value': 'b'}]},
            {'registryType': 'mcpb', 'identifier': 'd'}],
        'remotes': [
            {'type': 'sse', 'url': 'https://{t}.h/{v}', 'variables': {
                'v': {'default': 'x'}}, 'headers': [
                    {'name': 'K', 'isRequired': True},
                    {'name': 'L', 'value': 'l'}]}]}

    def test_candidates(self):
        found = show('/r/server.json', self.RECIPE)
        self.assertEqual(found['dialect'], 'registry')
        self.assertEqual(
            [(server['name'], server['command'], server['args'],
              server['env'], server['unresolved'])
             for server in found['servers'][:3]], [
                ('io.x/w#pypi0', 'uvx', ['w==1', 'go', '--n', '3'],
                 {'T': 'tok-1', 'LOG': 'info'}, ['arg:city', 'NO']),
                ('io.x/w#npm0', 'npx', ['-q', '@a/b@2'], {}, []),
                ('io.x/w#oci0', 'docker', ['run', '-i', '--rm', '-e', 'A',
                                           'img:3'], {'A': 'b'}, [])])
        self.assertEqual(
            [(server['transport'], server['url'], server['headers'],
              server['unresolved']) for server in found['servers'][3:]],
            [('sse', 'https://{t}.h/x', {'L': 'l'}, ['url:t', 'header:K'])])
        self.assertEqual([row['name'] for row in found['skipped']],
                         ['io.x/w#npm1', 'io.x/w#mcpb0'])

    def test_an_answer_of_the_registry_is_unwrapped(self):
        found = show('/r/x.json', {'server': self.RECIPE, '_meta': {}})
        self.assertEqual(len(found['servers']), 4)

    def test_only_on_request(self):
        with self.assertRaises(pf.ConfigError) as caught:
            read_files(('/r/server.json', self.RECIPE))
        self.assertIn('--dialect registry', caught.exception.hint)
        config = read_files(('/r/server.json', self.RECIPE),
                            dialect='registry')
        server = pf.look_up(config, 'io.x/w#pypi0')[0]
        self.assertEqual(pf.expand_server(server, {})[1], [
            'arg:city (the recipe)', 'T (env_vars)', 'NO (env_vars)'])

    def test_nonsense_is_refused(self):
        for recipe in ({'packages': [5]}, {'packages': [{}]}, {
                'name': 'n', 'packages': [], 'remotes': [{'url': 5}]}):
            with self.subTest(recipe=recipe), \
                    self.assertRaises(pf.ConfigError):
                show('/r/server.json', recipe, 'registry')


class Test07Patterns(unittest.TestCase):
    """Tools that a client chooses by pattern, and layers it alone knows."""

    GLOBS = (
        ('*', 'x', True), ('*', '', True), ('a*', 'abc', True),
        ('a*', 'ba', False), ('*c', 'abc', True), ('a*c', 'abcd', False),
        ('a?c', 'abc', True), ('a?c', 'ac', False), ('a*b*c', 'aXbYc', True),
        ('a*b*c', 'acb', False), ('a', 'ab', False), ('a', 'a', True),
        ('[a]', 'a', False), ('[a]', '[a]', True), ('a*a', 'a', False),
        ('*a*', 'bab', True), ('a.*', 'a.b', True), ('a.*', 'axb', False),
        ('*', 'a\nb', True), ('*ab', 'aab', True), ('**b', 'ab', True))

    def test_globs(self):
        for pattern, text, is_so in self.GLOBS:
            with self.subTest(pattern=pattern, text=text):
                self.assertIs(pf.glob_matches(pattern, text), is_so)

    def test_a_pattern_of_many_stars_costs_no_time(self):
        self.assertFalse(pf.glob_matches('a*' * 60 + 'b', 'a' * 5000))

    def server(self, path, content, *more):
        """Give the server s of some files."""
        server, why = pf.look_up(read_files((path, content), *more), 's')
        self.assertEqual(why, '')
        return server

    def denied(self, server, names):
        """Name those of some tools that the config keeps out."""
        return [name for name in names.split()
                if pf.denied_by(server, name)]

    RUN = {'mcp': {'s': {'type': 'local', 'command': ['x']}}}

    def test_opencode_hides_by_pattern(self):
        path = '/r/opencode.json'
        for tools, denied in (
                ({}, ''), ({'s_*': False}, 'get set a.b'),
                ({'s_g*': False}, 'get'), ({'s_get': False}, 'get'),
                ({'t_*': False}, ''), ({'*': False}, 'get set a.b'),
                ({'s_a_b': False}, 'a.b'), ({'s_get': True}, ''),
                ({'s*': False, 's_get': True}, 'get set a.b'),
                ({'s_?et': False}, 'get set'), ({'s_get': 'no'}, '')):
            with self.subTest(tools=tools):
                server = self.server(path, dict(self.RUN, tools=tools))
                self.assertEqual(self.denied(server, 'get set a.b'),
                                 denied.split())

    def test_opencodes_patterns_hold_across_its_files(self):
        user, project = '/h/.config/opencode/opencode.json', (
            '/h/r/opencode.json')
        server = self.server(user, self.RUN, (project, {
            'mcp': {}, 'tools': {'s_get': False}}))
        self.assertEqual(pf.denied_by(server, 'get'),
                         ('tools["s_get"]', project, 'hides'))
        answer = judge(a_tool(name='get'), a_link(), 's:get', server=server)
        self.assertIn('tools["s_get"] of server "s" in %s hides this tool.'
                      % project, answer.detail)
        self.assertIn('Change ', answer.remediation)

    def test_an_overlay_of_ours_wins_over_patterns(self):
        for path, content, over in (
                ('/r/opencode.json', dict(self.RUN, tools={'*': False}),
                 {'disabled_tools': ['set']}),
                ('/r/.kiro/agents/a.json', {
                    'mcpServers': {'s': {'command': 'x'}}, 'tools': []},
                 {'enabled_tools': ['get']})):
            server = self.server(path, content, (OURS, {
                'mcpServers': {'s': over}}))
            with self.subTest(path):
                self.assertEqual(self.denied(server, 'get set'), ['set'])

    def test_agents_files_choose_by_server_and_tool(self):
        for tools, denied in (
                (None, ''), ([], 'get set'), (['*'], ''), (['@s'], ''),
                (['@s/get'], 'set'), (['@s/g*', 'read'], 'set'),
                (['@t', '@t/get', 's'], 'get set'), (['@s/*'], ''),
                (['@*'], ''), (['@s/get', '@s'], ''), ('@s/get', '')):
            for path in ('/r/.kiro/agents/a.json',
                         '/r/.amazonq/cli-agents/a.json'):
                server = self.server(path, {
                    'mcpServers': {'s': {'command': 'x'}}, 'tools': tools,
                    'allowedTools': ['@s/set']})
                with self.subTest(tools=tools, path=path):
                    self.assertEqual(self.denied(server, 'get set'),
                                     denied.split())

    def test_other_files_have_no_such_lists(self):
        for path in ('/r/.kiro/settings/mcp.json', '/r/.cursor/mcp.json'):
            server = self.server(path, {'mcpServers': {'s': {
                'command': 'x'}}, 'tools': []})
            self.assertEqual(self.denied(server, 'get set'), [])

    def test_opencodes_true_is_told(self):
        for tools, is_told in (({'a': False}, False), ({'a': True}, False),
                               ({'a*': False, 'ab': True}, True)):
            config = read_files(('/r/opencode.json', dict(self.RUN,
                                                          tools=tools)))
            with self.subTest(tools=tools):
                self.assertEqual('a true in "tools"' in ' '.join(
                    config.warnings), is_told)

    def test_codex_profiles_in_its_file_are_told_and_not_read(self):
        text = ('[mcp_servers.s]\ncommand = "x"\n[profiles.a]\nmodel = "m"\n'
                '[profiles.b.mcp_servers.s]\nenabled = false\n')
        config = read_files(('/h/.codex/config.toml', text))
        self.assertEqual(config.warnings, [
            '/h/.codex/config.toml: profiles.b.mcp_servers is not read; it '
            'counts only for codex --profile b'])
        self.assertTrue(pf.look_up(config, 's')[0].enabled)

    def test_a_profiles_own_file_lies_on_the_others(self):
        files = [('/h/.codex/b.config.toml',
                  '[mcp_servers.s]\nenabled = false\n'),
                 ('/h/.codex/config.toml', '[mcp_servers.s]\ncommand = "x"'
                  '\n[mcp_servers.s.env]\nA = "1"\n'),
                 ('/h/r/.codex/config.toml',
                  '[mcp_servers.s]\nenabled = true\n')]
        for order in itertools.permutations(files):
            server = pf.look_up(read_files(*order, home='/h'), 's')[0]
            self.assertEqual((server.enabled, server.env),
                             (False, {'A': '1'}))

    CONTAINER = '{"customizations": {"vscode": %s}, /* c */ "image": "i"}'

    def test_dev_containers(self):
        for path in ('/r/.devcontainer/devcontainer.json',
                     '/r/.devcontainer.json'):
            config = read_files((path, self.CONTAINER % json.dumps({'mcp': {
                'inputs': [{'id': 'k', 'default': 'v'}], 'servers': {
                    's': {'command': 'x', 'args': ['${input:k}']}}}})))
            server = pf.look_up(config, 's')[0]
            with self.subTest(path):
                self.assertEqual(
                    (server.dialect, server.base,
                     pf.expand_server(server, {})[0].args),
                    ('vscode-settings', '/r', ('v',)))
                self.assertEqual(config.warnings, [
                    path + ': its client starts these servers inside the dev '
                    'container; here they start on this host'])
            for other in ('{}', '{"mcp": {}}', '{"extensions": []}', '[]'):
                self.assertEqual(read_files((
                    path, self.CONTAINER % other)).entries, {})

    def test_a_manifest_may_name_files(self):
        files = {'/p/a.json': '{"mcpServers": {"a": {"command": "x"}}}',
                 '/p/d/b.json': '{/* c */ "b": {"command": "x", "args":'
                                ' ["${CLAUDE_PLUGIN_ROOT}"]}}',
                 '/q.json': '{"q": {"command": "x"}}'}
        inline = {'c': {'command': 'x'}}
        for named, names, paths in (
                ('./a.json', 'a', ['/p/a.json']),
                (['a.json', inline, '${CLAUDE_PLUGIN_ROOT}/d/b.json'],
                 'a c b', ['/p/a.json', '/p/d/b.json']),
                (['../q.json', inline], 'c', []), (['/q.json'], '', []),
                (['d/../../q.json', {'mcpServers': inline}], 'c', []),
                (['gone.json', inline], 'c', ['/p/gone.json']),
                ([5, {'mcpServers': 5}], '', []), ([], '', [])):
            path = '/p/.claude-plugin/plugin.json'
            with self.subTest(named=named):
                config = read_files((path, {'mcpServers': named}),
                                    read=files.get)
                self.assertEqual(list(config.entries), names.split())
                self.assertEqual(list(config.files), [path] + paths)
                self.assertEqual(
                    len(config.warnings), 'gone' in str(named)
                    or 'q.json' in str(named), config.warnings)
                shown = show(path, {'mcpServers': named}, files=files)
                self.assertEqual([server['name'] for server in
                                  shown['servers']], names.split())
                if 'b' in config.entries:
                    server = pf.look_up(config, 'b')[0]
                    self.assertEqual((server.file, pf.expand_server(
                        server, {})[0].args), (path, ('/p',)))

    def test_a_named_file_that_cannot_be_parsed_is_named(self):
        with self.assertRaises(pf.ConfigError) as caught:
            read_files(('/p/.plugin/plugin.json', {'mcpServers': 'a.json'}),
                       read={'/p/a.json': '{'}.get)
        self.assertIn('config /p/a.json, line 1', str(caught.exception))

    def test_percent_signs_of_gemini_on_windows(self):
        entry = {'command': 'x', 'args': ['%T%'], 'env': {
            'A': '%T%-$T-%NO%', 'B': '100%'}}
        for is_windows, args, env in (
                (True, ['%T%'], {'A': 'tok-1-tok-1-', 'B': '100%'}),
                (False, ['%T%'], {'A': '%T%-tok-1-%NO%', 'B': '100%'})):
            with mock.patch.object(pf.Expansion, 'is_windows', is_windows):
                for dialect in ('gemini', 'copilot'):
                    server = entry_of(dialect, entry)
                    if dialect == 'copilot':
                        env = {'A': '%T%-tok-1-%NO%', 'B': '100%'}
                    with self.subTest(dialect, is_windows=is_windows):
                        self.assertEqual((server['args'], server['env']),
                                         (args, env))


SAMPLES = os.path.join(HERE, '..', 'shared', 'dialects')


@unittest.skipUnless(os.path.isdir(SAMPLES), 'no samples are here')
class Test07Samples(unittest.TestCase):
    """Every sample comes out as it expects."""

    maxDiff = None

    def samples(self):
        """Give (name, what is expected, bytes) of each sample."""
        for name in sorted(os.listdir(SAMPLES)):
            if not name.endswith('.expected.json'):
                continue
            stem = name[:-len('.expected.json')]
            with open(os.path.join(SAMPLES, name), encoding='utf-8') as file:
                expected = json.load(file)
            given = next(other for other in os.listdir(SAMPLES)
                         if other.startswith(stem + '.in.'))
            with open(os.path.join(SAMPLES, given), 'rb') as file:
                yield stem, expected, file.read()

    def test_dialects(self):
        count = 0
        for name, expected, data in self.samples():
            given, want = expected.get('given'), expected['expect']
            if given is None:
                continue
            with self.subTest(name):
                path = given['path'] if given['path_hint'] else '/x/y'
                file = pf.parse_config(path, path, data)
                found = pf.show_config(
                    file, given['workspace'], given['env'],
                    given.get('files', {}).get, [])
                for server in found['servers'] + want['servers']:
                    server['warnings'] = sorted(server['warnings'])
                    if not given['path_hint']:
                        server['source'] = given['path']
                self.assertEqual(found, want)
                count += 1
        self.assertGreater(count, 0)

    def test_toml(self):
        for name, expected, data in self.samples():
            if not name.startswith('toml-'):
                continue
            with self.subTest(name):
                text, want = data.decode('utf-8-sig'), expected['expect']
                if 'error' in want:
                    with self.assertRaises(json.JSONDecodeError) as caught:
                        pf.Toml(text).document()
                    self.assertEqual(caught.exception.lineno,
                                     want['error']['line'])
                    continue
                found = pf.Toml(text).document()
                for key, value in want['value'].items():
                    if re.match('[0-9-]*[0-9]{2}[-:]', str(value)):
                        found[key] = value      # times stay as written
                self.assertEqual(found, want['value'])


# ==========================================================================
# 10. judge
# ==========================================================================

# Facts of this host, which no agent may be told, hold this word.
MARK = 'HOSTFACT'
PLACES = 'state /%s/state, config /%s/c.json' % (MARK, MARK)
SETTINGS = {'quarantine_enabled': True, 'quarantine_new_servers': False,
            'max_age': None, 'sync_interval': 300000}
MINUTES = 60000


def a_caller(tier='operator', servers=None):
    """Make a Caller; servers: its scope, None for all."""
    return pf.Caller(tier, 'someone', '' if servers is None else 'p',
                     servers)


def a_question(tier='operator', servers=None, filters=(), **settings):
    """Make a Question; settings: what differs from the defaults."""
    return pf.Question((), a_caller(tier, servers), frozenset(filters), NOW,
                       dict(SETTINGS, **settings), MARK + '.py', PLACES)


def a_known(connection=None, server=None, **more):
    """Make what is known of a server that is configured and enabled."""
    given = dict(server=server or a_server(file='/%s/c.json' % MARK),
                 skipped='', disabled='', quarantined='',
                 connection=connection, launch='L', launch_note='known')
    return pf.Known(**dict(given, **more))


def a_case(tool=None, link=None, ref='s:t', pin='', question=None, **known):
    """Make a Case; known: what differs of the server."""
    return pf.Case(pf.parse_id(ref, pin), a_known(link, **known), tool,
                   question or a_question())


def judge(*args, **more):
    """Judge one case: its Answer."""
    return pf.evaluate(a_case(*args, **more))[0]


# --------------------------------------------------------------------------
# The oracle: the contract's sections 2, 3, 7, 9 and 10 once more, over plain
# facts. It shares no code and no value with the program, and asks a
# different question: not "who stops first" but "what holds", then the order.
# --------------------------------------------------------------------------

Facts = namedtuple('Facts', (
    'config scope quarantined disabled link limit tool lists is_blocked '
    'is_guarded mode pin filters hints tier'))
Facts.__doc__ = """What one check depends on, in plain values.

config: yes, skipped or none. scope: all, in or out. link: None, or (state,
cause, age of the last look in ms, (start, end) of a lease from now in ms).
limit: max_age in ms. tool: absent, refused, same, safer, none (approved),
other (hash or version), riskier, flawed. lists: which tool list of the
config is there. pin: none, ok, wrong, version, form. hints: three values.
"""

ORDER = ('server_not_configured server_not_in_scope server_quarantined '
         'server_disabled not_found tool_denied_by_config '
         'tool_blocked_by_user tool_changed tool_pending_approval '
         'hash_mismatch oauth_required server_unhealthy '
         'server_initializing missing_annotation policy_filtered').split()
ROWS = {line.split()[0]: line.split()[1:]
        for line in REASON_TABLE.strip().split('\n')}


def oracle_link(link, limit):
    """Say what the recorded connection amounts to: (reason, cause)."""
    if link is None:
        return 'server_initializing', ''
    state, cause, age, lease = link
    if state == 'pending_auth':
        return 'oauth_required', ''
    is_old = state == 'ready' and (
        age < -60000 or limit != 0 and age > limit)
    if state == 'ready' and not is_old:
        return '', ''
    if lease and lease[0] <= 60000 and lease[1] > 0:
        return 'server_initializing', ''
    if lease and (age is None or lease[1] > -age):
        return 'server_unhealthy', 'interrupted'
    if state == 'error':
        return 'server_unhealthy', cause
    return ('server_unhealthy', 'stale') if is_old else (
        'server_initializing', '')


def oracle_filter(facts):
    """Name what the first filter that excludes says, '' for none."""
    read_only, destructive, open_world = facts.hints
    for name, is_fit, value in (
            ('read_only_only', read_only is True, read_only),
            ('exclude_destructive', read_only is True
             or destructive is False, destructive),
            ('exclude_open_world', open_world is False, open_world)):
        if name in facts.filters and not is_fit:
            return ('missing_annotation' if value is None
                    else 'policy_filtered')
    return ''


def oracle_tool(facts):
    """List what holds against a tool that is known."""
    is_gating = facts.is_guarded and facts.mode == 'manual'
    return {reason for reason, holds in (
        ('tool_denied_by_config', facts.lists in ('others', 'denied')),
        ('tool_blocked_by_user', facts.is_blocked),
        ('tool_changed', facts.tool == 'flawed' or is_gating
         and (facts.tool == 'other' or facts.tool == 'riskier'
              and facts.hints != (True, False, False))),
        ('tool_pending_approval', is_gating and facts.tool == 'none'),
        ('hash_mismatch', facts.pin in ('wrong', 'version')),
        (oracle_filter(facts), True)) if holds}


def oracle(facts):
    """Give (reason, cause) of the operator's answer, '' when ready."""
    holds, cause = set(), ''
    if facts.config != 'yes':
        holds.add('server_not_configured')
    if facts.scope == 'out':
        holds.add('server_not_in_scope')
    if facts.quarantined:
        holds.add('server_quarantined')
    if facts.disabled:
        holds.add('server_disabled')
    if facts.pin == 'form':     # it can be told before a hash is known
        holds.add('hash_mismatch')
    reason, cause = oracle_link(facts.link, facts.limit)
    holds.add(reason)
    if facts.tool not in ('absent', 'refused'):
        holds |= oracle_tool(facts)
    elif not reason:
        holds.add('not_found')
    first = min(holds - {''}, key=ORDER.index) if holds - {''} else ''
    return first, cause if first == 'server_unhealthy' else ''


def oracle_answer(facts):
    """Give the Answer's fields, but for the two sentences."""
    reason, cause = oracle(facts)
    is_operator = facts.tier == 'operator'
    observed = digest = None
    if is_operator and facts.config == 'yes' and facts.link and (
            facts.link[2] is not None):
        observed = NOW - facts.link[2]
    if not reason:
        if is_operator:
            digest = 'sha256/v1:' + H1
        return 'ready', None, None, None, digest, observed, None
    if not is_operator and reason in ('server_not_configured',
                                      'server_not_in_scope'):
        reason = 'not_found'
    _, retry, action, _, _ = ROWS[reason]
    if cause in ('refused', 'stale', 'interrupted'):
        action = 'restart'
    return ('unavailable', reason, retry == 'yes', action.strip('-') or None,
            None, observed, cause or None if is_operator else None)


# --------------------------------------------------------------------------
# From facts to the program's values, each made once
# --------------------------------------------------------------------------


def made_once(make):
    """Remember what a function made of the same arguments."""
    made = {}

    def give(*args):
        if args not in made:
            made[args] = make(*args)
        return made[args]
    return give


@made_once
def tool_of(kind, is_blocked, hints):
    """Make the Tool of some facts, None when it is not listed."""
    if kind in ('absent', 'refused'):
        return None
    names = ('readOnlyHint', 'destructiveHint', 'openWorldHint')
    now = {name: value for name, value in zip(names, hints)
           if value is not None}
    approved = {'none': None, 'other': approval(H2, now),
                'safer': approval(H1, {'readOnlyHint': False}),
                'riskier': approval(H1, SAFE)}.get(kind, approval(H1, now))
    return a_tool(hash='' if kind == 'flawed' else H1, hints=now,
                  flaw=MARK if kind == 'flawed' else '', approved=approved,
                  blocked_at=NOW - 5 if is_blocked else None)


@made_once
def known_of(config, quarantined, disabled, link, is_refused, lists, mode):
    """Make the Known of some facts."""
    if config != 'yes':
        return pf.Known(None, MARK if config == 'skipped' else '', '', '',
                        None, '', '')
    connection = None
    if link is not None:
        state, cause, age, lease = link
        connection = a_link(
            state=state, cause=cause, detail=MARK, stderr=MARK,
            observed_at=None if age is None else NOW - age,
            lease_at=lease and NOW + lease[0],
            lease_until=lease and NOW + lease[1],
            refused={'t': MARK} if is_refused else {'other': MARK})
    server = a_server(
        file='/%s/c.json' % MARK, trust_mode=mode,
        allow={'others': ['x'], 'allowed': ['x', 't']}.get(lists),
        deny={'denied': ['x', 't'], 'allowed': ['y']}.get(lists, []))
    return a_known(connection, server, quarantined=quarantined and MARK,
                   disabled=disabled and MARK, launch_note=MARK)


@made_once
def question_of(tier, scope, filters, is_guarded, limit):
    """Make the Question of some facts."""
    servers = {'all': None, 'in': frozenset('s'), 'out': frozenset('x')}
    return a_question(tier, servers[scope], filters, max_age=limit,
                      quarantine_enabled=is_guarded)


REFS = {word: pf.parse_id('s:t', pin) for word, pin in (
    ('none', ''), ('ok', 'sha256/v01:' + H1), ('wrong', 'sha256/v1:' + H2),
    ('version', 'sha256/v2:' + H1), ('form', 'sha1:' + H1))}


def case_of(facts):
    """Make the Case that these facts describe."""
    return pf.Case(
        REFS[facts.pin],
        known_of(facts.config, facts.quarantined, facts.disabled, facts.link,
                 facts.tool == 'refused', facts.lists, facts.mode),
        tool_of(facts.tool, facts.is_blocked, facts.hints)
        if facts.config == 'yes' else None,
        question_of(facts.tier, facts.scope, facts.filters,
                    facts.is_guarded, facts.limit))


FRESH = ('ready', '', 1000, None)
RUNS, RAN_OUT = (-5000, 5000), (-5000, -500)
AHEAD, TOO_FAR_AHEAD = (60000, 90000), (60001, 90000)
LINKS = (
    None, ('', '', None, None), FRESH, ('ready', '', 15 * MINUTES, None),
    ('ready', '', 15 * MINUTES + 1, None), ('ready', '', -60000, None),
    ('ready', '', -60001, None), ('ready', '', 1000, RUNS),
    ('ready', '', 1000, RAN_OUT), ('ready', '', 20 * MINUTES, RUNS),
    ('ready', '', 20 * MINUTES, RAN_OUT),
    ('pending_auth', '', 99 * MINUTES, None),
    ('pending_auth', '', 1000, RUNS), ('pending_auth', '', 1000, RAN_OUT),
    ('error', 'timeout', 1000, None), ('error', 'refused', 1000, None),
    ('error', 'timeout', 1000, RUNS), ('error', 'timeout', 1000, RAN_OUT),
    ('', '', None, RUNS), ('', '', None, RAN_OUT), ('', '', None, AHEAD),
    ('', '', None, TOO_FAR_AHEAD))
# One link for each thing that it can amount to.
KINDS = (None, FRESH, ('ready', '', 16 * MINUTES, None),
         ('pending_auth', '', 1000, None), ('error', 'timeout', 1000, None),
         ('', '', None, RUNS))
TOOLS = ('absent', 'refused', 'same', 'safer', 'none', 'other', 'riskier',
         'flawed')
TIERS = ('operator', 'agent')
BOTH = (False, True)
FILTERS = ('read_only_only', 'exclude_destructive', 'exclude_open_world')
FILTER_SETS = [frozenset(names) for count in range(4)
               for names in itertools.combinations(FILTERS, count)]
PINS = ('none', 'ok', 'wrong', 'version', 'form')
PLAIN = Facts('yes', 'all', False, False, FRESH, 15 * MINUTES, 'same', 'no',
              False, True, 'manual', 'none', frozenset(),
              (None, None, None), 'operator')


def crossed(**dimensions):
    """Yield every combination of these facts, the others plain."""
    names = list(dimensions)
    at = [Facts._fields.index(name) for name in names]
    for values in itertools.product(*dimensions.values()):
        facts = list(PLAIN)
        for place, value in zip(at, values):
            facts[place] = value
        yield Facts(*facts)


class Test10Judge(unittest.TestCase):
    """Every combination of what the gates look at, against the oracle.

    The full product is in the hundreds of millions, but a gate that stops
    hides whatever lies behind it, so facts meet only in groups: those of
    the server with each other and a few tools (with every connection),
    those of the tool with each other and one connection of each kind, all
    hints with all filters, and all times with all times.
    """

    def hold(self, count, **dimensions):
        """Judge the product of these facts, which has count members."""
        wrong, seen = [], 0
        for facts in crossed(**dimensions):
            seen += 1
            answer = pf.evaluate(case_of(facts))[0]
            observed = answer.observed_at
            found = (answer.status, answer.reason, answer.retryable,
                     answer.action, answer.hash, observed and pf.parse_time(
                         observed), answer.cause)
            texts = (answer.detail, answer.remediation)
            is_worded = texts == (None, None) if not answer.reason else (
                all(texts) and (facts.tier == 'operator'
                                or MARK not in ''.join(texts)))
            if found != oracle_answer(facts) or not is_worded or (
                    answer.id != 's:t' or answer.did_you_mean):
                wrong.append((facts, found, texts, oracle_answer(facts)))
        self.assertEqual(wrong[:3], [])
        self.assertEqual(seen, count)

    def test_servers(self):
        self.hold(57024, config=('yes', 'skipped', 'none'),
                  scope=('all', 'in', 'out'), quarantined=BOTH,
                  disabled=BOTH, link=LINKS, lists=('no', 'others'),
                  tool=('absent', 'refused', 'same', 'none', 'flawed',
                        'other'), pin=('none', 'form', 'wrong'),
                  tier=TIERS)

    def test_tools(self):
        self.hold(46080, link=KINDS, tool=TOOLS, is_blocked=BOTH,
                  lists=('no', 'allowed', 'others', 'denied'),
                  is_guarded=BOTH, mode=('manual', 'auto'), pin=PINS,
                  filters=FILTER_SETS[:2] + FILTER_SETS[-1:],
                  tier=TIERS)

    def test_filters(self):
        self.hold(5184, hints=itertools.product((True, False, None),
                                                repeat=3),
                  filters=FILTER_SETS, tool=('same', 'none', 'riskier'),
                  is_guarded=BOTH, link=(FRESH, KINDS[2]), tier=TIERS)

    def test_times(self):
        ages = (-60001, -60000, 0, 4000, 60000, 60001, 15 * MINUTES,
                15 * MINUTES + 1)
        leases = (None, RUNS, RAN_OUT, AHEAD, TOO_FAR_AHEAD, (-5000, 0),
                  (-5000, 1), (-90000, -60001), (-90000, -60000),
                  (-90000, -59999))
        links = [(state, cause, age, lease) for (state, cause), age, lease
                 in itertools.product((
                     ('ready', ''), ('pending_auth', ''),
                     ('error', 'timeout'), ('error', 'refused')), ages,
                     leases)]
        links += [('', '', None, lease) for lease in leases]
        self.hold(7920, link=links, tool=('absent', 'same', 'refused'),
                  limit=(0, MINUTES, 15 * MINUTES, 1), tier=TIERS)


class Test10Explain(unittest.TestCase):
    """explain runs every gate; what it shows is what evaluate answers."""

    def test_agrees_with_evaluate(self):
        for facts in crossed(
                config=('yes', 'none'), scope=('all', 'out'),
                quarantined=BOTH, link=KINDS, tool=TOOLS,
                lists=('no', 'denied'), pin=('none', 'wrong'),
                filters=FILTER_SETS[:2]):
            case = case_of(facts)
            answer, finding = pf.evaluate(case)
            stops = [fact for _, state, fact in pf.explain(case)
                     if state == 'stopped']
            if stops[:1] != ([finding.fact] if answer.reason else []):
                self.fail((facts, stops, finding))

    ORDER = ('well_formed configured scope quarantine enabled exists denied '
             'blocked changed pending pin login healthy started '
             'read_only_only exclude_destructive exclude_open_world').split()

    def test_every_gate_is_shown(self):
        for link in KINDS:
            rows = pf.explain(a_case(a_tool(), link and a_link(
                state=link[0], observed_at=None if link[2] is None
                else NOW - link[2])))
            self.assertEqual([row[0] for row in rows], self.ORDER)
            self.assertTrue(all(row[2] for row in rows))

    def test_a_gate_that_passes_shows_no_fact_of_one_that_stops(self):
        facts = {name: (state, fact) for name, state, fact in pf.explain(
            a_case(a_tool(), a_link(state='error', cause='exited',
                                    detail='exited with code 1')))}
        self.assertEqual(facts['healthy'][0], 'stopped')
        self.assertEqual(facts['started'][0], 'passed')
        self.assertNotIn('exited', facts['started'][1])

    def test_what_needs_a_server_is_not_reached(self):
        for ref, stop in (('no:t', 'configured'), ('no', 'well_formed')):
            case = a_case(ref=ref)._replace(known=pf.Known(
                None, '', '', '', None, '', ''))
            rows = pf.explain(case)
            states = {name: state for name, state, _ in rows}
            after = self.ORDER[self.ORDER.index(stop) + 1:]
            self.assertEqual(states[stop], 'stopped')
            self.assertEqual({states[name] for name in after},
                             {'not reached'})

    def test_several_stops(self):
        case = a_case(a_tool(hash=H2, blocked_at=NOW), disabled='Off.',
                      quarantined='Held.')
        self.assertEqual(
            [name for name, state, _ in pf.explain(case)
             if state == 'stopped'],
            ['quarantine', 'enabled', 'blocked', 'changed', 'started'])


class Test10Agent(unittest.TestCase):
    """An agent token reads fixed sentences and nothing of this host."""

    def missing(self):
        """Give answers that must look alike, each for its own id."""
        agent = a_question('agent', frozenset('s'))
        nobody = pf.Known(None, '', '', '', None, '', '')
        skipped = nobody._replace(skipped=MARK)
        fresh = a_link(refused={'t5': MARK})
        return [
            judge(a_tool(), fresh, 'out:t1', question=agent),
            judge(a_tool(flaw=MARK, hash=''), None, 'out:t2',
                  question=agent, quarantined=MARK, disabled=MARK),
            pf.evaluate(pf.Case(pf.parse_id('no:t3'), nobody, None,
                                agent))[0],
            pf.evaluate(pf.Case(pf.parse_id('no:t4'), skipped, None,
                                agent))[0],
            judge(None, fresh, 's:t5', question=agent),
            judge(None, fresh, 's:t6', 'sha256/v1:' + H1, agent)]

    def test_what_is_not_there_looks_alike(self):
        """Out of scope, unconfigured, misspelt: the same bytes but for
        the id."""
        texts = {json.dumps(pf.answer_fields(answer)).replace(
            answer.id, 'ID') for answer in self.missing()}
        self.assertEqual(texts, {json.dumps({
            'id': 'ID', 'status': 'unavailable', 'reason': 'not_found',
            'retryable': False, 'action': 'configure',
            'detail': 'No tool with this id is available.',
            'remediation': 'List the tools and correct the id.'})})

    def test_the_format_hint(self):
        answer = judge(ref='mcp__gh__x', question=a_question('agent'))
        self.assertEqual((answer.reason, answer.detail), (
            'not_found', 'An id has the form <server>:<tool>; did you mean '
            'gh:x?'))

    def test_pins(self):
        """Malformed, of another version and drifted can be told apart."""
        for pin, detail in (
                ('sha1:x', 'The pin is not of the form sha256/v<N>:<64 hex '
                 'digits>.'),
                ('sha256/v7:' + H1, 'The pin is of another hash version '
                 'than the tool.'),
                ('sha256/v1:' + H2, 'The tool is not the one that was '
                 'pinned.')):
            answer = judge(a_tool(), a_link(), pin=pin,
                           question=a_question('agent'))
            self.assertEqual((answer.reason, answer.detail),
                             ('hash_mismatch', detail))

    def test_one_sentence_for_every_cause(self):
        """The operator reads the fact, an agent always the same words."""
        known = [a_tool(name=name) for name in 'ab']
        plan = pf.plan_sync({one.name: one for one in known}, pf.Observation(
            'ready', '', '', None, None, 0, [], {}, [], ''), False, 'manual')
        told = {'no_tools': plan.detail, 'stale': 'longer than max_age',
                'interrupted': 'cut off before it had a result'}
        self.assertEqual(plan[:3], ('error', 'no_tools', 'it lists no tools, '
                                    'and 2 were known'))
        for cause in CAUSES:
            link = a_link(state='error', cause=cause, detail=told.get(
                cause, MARK + ' ' + cause))
            if cause == 'stale':
                link = a_link(observed_at=0)
            if cause == 'interrupted':
                link = a_link(lease_at=NOW - 9, lease_until=NOW - 1,
                              state='error', observed_at=NOW - 99)
            with self.subTest(cause):
                answer = judge(a_tool(), link)
                self.assertEqual((answer.reason, answer.cause),
                                 ('server_unhealthy', cause))
                self.assertIn(told.get(cause, MARK + ' ' + cause),
                              answer.detail)
                agent = judge(a_tool(), link, question=a_question('agent'))
                self.assertEqual(
                    (agent.reason, agent.detail, agent.remediation,
                     agent.cause, agent.observed_at),
                    ('server_unhealthy', 'The server is not available.',
                     'Try again later, or tell the operator.', None, None))

    def test_a_word_for_every_reason(self):
        self.assertEqual(
            set(pf.REASONS) - set(pf.AGENT_TEXTS),
            {'server_not_in_scope', 'server_not_configured'})

    def test_an_unknown_tier_is_no_operator(self):
        """The operator tier is granted, never assumed."""
        answer = judge(a_tool(), a_link(), question=a_question('admin'))
        self.assertEqual((answer.hash, answer.observed_at), (None, None))
        answer = judge(a_tool(), None, question=a_question(''))
        self.assertNotIn(MARK, answer.detail + answer.remediation)


class Test10Wording(unittest.TestCase):
    """What the operator reads (contract 11)."""

    RUN = 'Run: HOSTFACT.py '
    TABLE = (
        ('server_initializing', {}, None, 'sync s'),
        ('server_unhealthy', {}, {'observed_at': 0}, 'sync s'),
        ('server_unhealthy', {}, {'state': 'error', 'cause': 'refused'},
         'sync s'),
        ('server_unhealthy', {}, {'lease_at': NOW - 9, 'lease_until':
                                  NOW - 1, 'state': 'error', 'cause':
                                  'timeout'}, 'sync s'),
        ('server_unhealthy', {}, {'state': 'error', 'cause': 'timeout'},
         'servers show s'),
        ('server_unhealthy', {}, {'state': 'error', 'cause': 'unresolved'},
         'servers show s'),
        ('server_disabled', {'disabled': 'Off.'}, {}, 'servers enable s'),
        ('server_quarantined', {'quarantined': 'Held.'}, {},
         'servers approve s'),
        ('tool_pending_approval', {'tool': a_tool(approved=None)}, {},
         'tools diff s:t'),
        ('tool_changed', {'tool': a_tool(hash=H2)}, {}, 'tools diff s:t'),
        ('tool_blocked_by_user', {'tool': a_tool(blocked_at=NOW)}, {},
         'tools unblock s:t'),
        ('hash_mismatch', {'pin': 'sha256/v1:' + H2}, {}, 'tools show s:t'),
        ('not_found', {'tool': None}, {}, 'tools list s'))

    def answer(self, link, **more):
        """Judge a tool that is there, with these differences."""
        given = dict({'tool': a_tool()}, **more)
        return judge(link=link if link is None else a_link(**link), **given)

    def test_commands(self):
        for reason, more, link, command in self.TABLE:
            with self.subTest(reason=reason, link=link):
                answer = self.answer(link, **more)
                self.assertEqual((answer.reason, answer.remediation),
                                 (reason, self.RUN + command))

    def test_not_configured(self):
        for skipped, detail in (
                ('', 'No server "no" is configured (%s).' % PLACES),
                ('entry "no" in F was skipped: why', 'entry "no" in F was '
                 'skipped: why.')):
            answer = pf.evaluate(pf.Case(
                pf.parse_id('no:t'), pf.Known(None, skipped, '', '', None,
                                              '', ''), None,
                a_question()))[0]
            self.assertEqual(
                (answer.reason, answer.detail, answer.remediation),
                ('server_not_configured', detail, self.RUN
                 + 'servers list'))

    def test_scope(self):
        answer = self.answer({}, question=a_question(
            servers=frozenset('x')))
        self.assertEqual(answer.detail, 'Profile "p" leaves server "s" out; '
                         'a session under it sees not_found.')
        self.assertEqual(
            answer.remediation, 'Add "s" to profiles.p.servers (%s), then '
            'run: HOSTFACT.py config check' % PLACES)

    def test_denied(self):
        for lists, key, word in (({'allow': []}, 'enabled_tools',
                                  'does not name'),
                                 ({'deny': ['t']}, 'disabled_tools',
                                  'names')):
            answer = self.answer({}, server=a_server(**lists))
            self.assertEqual(answer.detail, '%s of server "s" in /c/config.'
                             'json %s this tool.' % (key, word))
            self.assertEqual(answer.remediation, 'Change %s in /c/config.'
                             'json, then run: HOSTFACT.py config check'
                             % key)

    def test_login(self):
        answer = self.answer({'state': 'pending_auth', 'detail': '401'})
        self.assertEqual(answer.detail, 'Server "s" asked for a login: 401.')
        self.assertEqual(
            answer.remediation, 'Set headers.Authorization for "s" (an '
            'entry in our own config) to a ${VAR}, then run: HOSTFACT.py '
            'sync s')

    def test_filters(self):
        for name, hints, detail, remedy in (
                ('read_only_only', {}, 'It has no readOnlyHint, and '
                 'read_only_only needs one.', 'Leave out --read-only-only, '
                 'or have the server publish readOnlyHint.'),
                ('exclude_open_world', {'openWorldHint': True},
                 'openWorldHint is true, which exclude_open_world leaves '
                 'out.', 'Leave out --exclude-open-world, or use another '
                 'tool.'),
                ('read_only_only', {'readOnlyHint': False},
                 'readOnlyHint is false, which read_only_only leaves out.',
                 'Leave out --read-only-only, or use another tool.')):
            answer = self.answer({}, tool=a_tool(hints=hints),
                                 question=a_question(filters=[name]))
            self.assertEqual((answer.detail, answer.remediation),
                             (detail, remedy))

    def test_the_first_filter_owns_the_answer(self):
        hints = {'readOnlyHint': False, 'openWorldHint': True}
        for filters, reason in (
                (FILTERS, 'policy_filtered'),
                (FILTERS[1:], 'missing_annotation'),
                (FILTERS[2:], 'policy_filtered')):
            answer = self.answer({}, tool=a_tool(hints=hints),
                                 question=a_question(filters=filters))
            self.assertEqual(answer.reason, reason)

    def test_never_seen(self):
        """It names the fact and the places; nobody started anything."""
        answer = self.answer(None)
        self.assertEqual(answer.detail, 'Server "s" has never been looked '
                         'at (%s).' % PLACES)
        answer = self.answer({'state': '', 'observed_at': None})
        self.assertEqual(answer.detail, 'Server "s" has never been looked '
                         'at (%s).' % PLACES)

    def test_stale(self):
        for ms, age in ((16 * MINUTES, '16m ago, longer than max_age 15m'),
                        (15 * MINUTES + 9000, '15m09s ago, longer than '
                         'max_age 15m'),
                        (-61000, 'in the future (2026-09-21T14:14:21.000Z)'
                         )):
            answer = self.answer({'observed_at': NOW - ms})
            self.assertEqual((answer.cause, answer.detail), (
                'stale', 'Server "s" was last seen ready %s (%s).'
                % (age, PLACES)))

    def test_pins(self):
        for more, detail in (
                ({'pin': 'sha256/v1:' + H2}, 'Pinned is sha256/v1:%s, last '
                 'listed is sha256/v1:%s.' % (H2, H1)),
                ({'pin': 'x'}, 'The pin is not of the form sha256/v<N>:<64 '
                 'hex digits>.'),
                ({'pin': 'sha256/v2:' + H1}, 'The pin is of hash version 2, '
                 'the stored hash of version 1: the hash version changed '
                 'and the pin must be renewed.'),
                ({'pin': 'sha256/v1:' + H1, 'tool': a_tool(
                    hash='', approved=approval('')),
                  }, 'There is no hash to compare the pin with.')):
            self.assertEqual(self.answer({}, **more).detail, detail)

    def test_a_pin_is_compared_with_what_is_listed(self):
        """Never with what is approved, and case counts for nothing."""
        moved = a_tool(hash=H3.replace('3', 'a'))
        free = a_question(quarantine_enabled=False)
        for digest, reason in ((moved.hash, None), (moved.hash.upper(),
                                                    None),
                               (H1, 'hash_mismatch')):
            self.assertEqual(self.answer({}, tool=moved, question=free,
                                         pin='sha256/v1:' + digest).reason,
                             reason)

    def test_failed_looks(self):
        for link, detail in (
                ({'detail': 'it broke.'}, 'Server "s": it broke.'),
                ({'detail': '', 'cause': 'timeout'},
                 'Server "s": timeout.')):
            answer = self.answer(dict(link, state='error'))
            self.assertEqual(answer.detail, detail)

    def test_refused_definition(self):
        answer = self.answer({'refused': {'t': 'definition refused: why'}},
                             tool=None)
        self.assertEqual((answer.reason, answer.detail), (
            'not_found', 'No tool with this id is available. definition '
            'refused: why.'))

    def test_a_definition_with_a_flaw(self):
        """It gates in every trust mode and with quarantine off."""
        flawed = a_tool(flaw='advertised twice', hash='')
        for mode in ('manual', 'auto'):
            answer = self.answer(
                {}, tool=flawed, server=a_server(trust_mode=mode),
                question=a_question(quarantine_enabled=False))
            self.assertEqual((answer.reason, answer.detail), (
                'tool_changed', 'Advertised twice (approved '
                '2026-09-21T14:13:15.000Z).'))

    def test_a_text_that_changes_by_itself_is_named(self):
        """To the operator; an agent reads its fixed sentence."""
        for more in ({'hash': H2}, {'approved': None}):
            moving = a_tool(moves=(14, 20), differs=('description',), **more)
            answer = self.answer({}, tool=moving)
            self.assertIn(
                "This tool's text changes by itself (14 changes in 20 "
                'looks; description): fix the server, or put '
                '"ignore_changes": {"t": ["description"]} into its entry.',
                answer.detail)
            case = a_case(moving, a_link())
            agent = pf.evaluate(case._replace(question=case.question._replace(
                caller=pf.Caller(pf.AGENT, 'a', '', None))))[0]
            self.assertEqual((agent.detail, agent.remediation),
                             pf.AGENT_TEXTS[answer.reason])

    def test_explain_names_what_is_ignored(self):
        facts = {name: fact for name, _, fact in pf.explain(a_case(a_tool(
            hash=H2, ignored=('title', 'description')), a_link()))}
        self.assertEqual(facts['changed'], 'It differs from the approved '
                         'definition in title, description only, which '
                         'ignore_changes leaves out.')

    def test_a_pin_covers_what_is_ignored(self):
        pinned = pf.parse_id('s:t', pf.format_hash(1, H1))
        case = a_case(a_tool(hash=H2, ignored=('title',)), a_link())
        self.assertEqual(pf.evaluate(case)[0].status, 'ready')
        self.assertEqual(pf.evaluate(case._replace(ref=pinned))[0].reason,
                         'hash_mismatch')

    def test_detail_does_not_repeat_the_code(self):
        for reason, more, link, _ in self.TABLE:
            with self.subTest(reason=reason):
                self.assertNotIn(reason, self.answer(link, **more).detail)

    def test_stuck_causes(self):
        """Those that time alone does not cure are marked as such."""
        for link, cause in (
                (None, 'never_seen'), ({'observed_at': 0}, 'stale'),
                ({'state': '', 'observed_at': None}, 'never_seen'),
                ({'state': 'error', 'cause': 'unresolved'}, 'unresolved'),
                ({'state': 'error', 'cause': 'command_not_found'},
                 'command_not_found')):
            finding = pf.evaluate(a_case(a_tool(), link if link is None
                                         else a_link(**link)))[1]
            self.assertEqual(finding.cause, cause)
            self.assertIn(finding.cause, pf.STUCK_CAUSES)
        for link in ({'state': 'error', 'cause': 'timeout'},
                     {'state': '', 'lease_at': NOW, 'lease_until': NOW + 9,
                      'observed_at': None}):
            finding = pf.evaluate(a_case(a_tool(), a_link(**link)))[1]
            self.assertNotIn(finding.cause, pf.STUCK_CAUSES)


class Test10Quoting(unittest.TestCase):
    """A remedy must not become an injection: names are foreign text."""

    def words(self, name, how='pf'):
        """Give the words that a shell makes of a remedy for a tool."""
        line = pf.command_line(how, 'tools diff', name)
        return shlex.split(line)

    ODD = ('s:a b', 's:$(touch x)', 's:`x`', "s:'; rm -rf /; '", 's:"x"',
           's:a;b', 's:a&&b', 's:a|b', 's:*', 's:~', 's:a\\b', 's:#x',
           's:caf\u00e9', 's:{a,b}', 's:!x', 's:a=b', '')

    def test_odd_names_stay_one_word(self):
        for name in self.ODD:
            with self.subTest(name=name):
                self.assertEqual(self.words(name),
                                 ['pf', 'tools', 'diff', name])

    def test_plain_names_stay_plain(self):
        for name in ('gh-ops:sync_issues', 's:a/b', 's:a.b', 's:@x:1'):
            self.assertEqual(pf.command_line('pf', 'tools diff', name),
                             'pf tools diff ' + name)

    def test_a_name_is_no_option(self):
        self.assertEqual(self.words('-x:t'),
                         ['pf', 'tools', 'diff', '--', '-x:t'])

    def test_control_characters(self):
        """Such a name never stands in a command, whatever shows it."""
        for name in ('s:a\nrm', 's:a\x1b[2J', 's:a\x7f', 's:a\x9b',
                     's:a\u202eb', 's:a\u2028b', 's:a\u200bb', 's:\0',
                     's:\ud800', 's:\U000e0041'):
            with self.subTest(name=name):
                self.assertEqual(pf.command_line('pf', 'tools diff', name),
                                 'pf tools list')

    def test_in_an_answer(self):
        answer = judge(a_tool(name='a b', hash=H2), a_link(), 's:a b')
        self.assertEqual(answer.remediation,
                         "Run: HOSTFACT.py tools diff 's:a b'")
        answer = judge(a_tool(name='a\nb', hash=H2), a_link(), 's:a\nb')
        self.assertEqual(answer.remediation, 'Run: HOSTFACT.py tools list')
        self.assertEqual(answer.id, 's:a\nb')

    def test_a_file_is_quoted(self):
        answer = judge(a_tool(), a_link(), server=a_server(
            file='/a b/c.json', deny=['t']))
        self.assertIn("in '/a b/c.json', then", answer.remediation)


class Test10Ages(unittest.TestCase):
    """How old a good look may be (contract 9)."""

    DAY = 24 * 60 * MINUTES
    # server's max_age, global max_age, sync_interval, ttl: what holds.
    TABLE = (
        (None, None, None, 0, 15 * MINUTES),
        (None, None, 5 * MINUTES, 0, 15 * MINUTES),
        (None, None, 6 * MINUTES, 0, 18 * MINUTES),
        (None, 20 * MINUTES, 60 * MINUTES, 0, 20 * MINUTES),
        (MINUTES, 20 * MINUTES, 60 * MINUTES, DAY, MINUTES),
        (None, 0, 5 * MINUTES, 0, 0), (0, 5, 5, 5, 0), (5, 0, 5, 5, 5),
        (None, None, 5 * MINUTES, 60 * MINUTES, 60 * MINUTES),
        (None, None, 5 * MINUTES, 10 * MINUTES, 15 * MINUTES),
        (None, None, 5 * MINUTES, 5 * DAY, DAY),
        (None, None, DAY, 0, 3 * DAY), (None, None, DAY, 5 * DAY, 3 * DAY),
        (None, MINUTES, 5 * MINUTES, 60 * MINUTES, MINUTES),
        (None, None, 5 * MINUTES, None, 15 * MINUTES))

    def test_table(self):
        for own, general, interval, ttl, limit in self.TABLE:
            with self.subTest(own=own, general=general, ttl=ttl):
                settings = {'max_age': general, 'sync_interval': interval}
                self.assertEqual(pf.max_age_of(a_server(max_age=own),
                                               settings, ttl), limit)

    def test_a_ttl_lengthens(self):
        hour = a_link(observed_at=NOW - 60 * MINUTES, ttl=61 * MINUTES)
        for more, reason in (
                ({}, None), ({'question': a_question(max_age=15 * MINUTES)},
                             'server_unhealthy'),
                ({'server': a_server(max_age=MINUTES)},
                 'server_unhealthy')):
            self.assertEqual(judge(a_tool(), hour, **more).reason, reason)

    def test_any_age(self):
        for age in (1, self.DAY * 999):
            answer = judge(a_tool(), a_link(observed_at=NOW - age),
                           question=a_question(max_age=0))
            self.assertEqual(answer.status, 'ready')

    def test_the_future_is_no_age(self):
        """A clock that was wrong does not make a look good for ever."""
        answer = judge(a_tool(), a_link(observed_at=NOW + self.DAY),
                       question=a_question(max_age=0))
        self.assertEqual(answer.cause, 'stale')


class Test10Requests(unittest.TestCase):
    """Refs of a request, and suggestions."""

    def test_unique(self):
        refs = pf.unique_refs([(' s:t ', None), ('u:v', 'x'), ('s:t', ''),
                               ('bad', None), ('u:v', 'x')])
        self.assertEqual(refs, [
            ('s:t', 's', 't', ''), ('u:v', 'u', 'v', 'x'),
            ('bad', '', '', '')])

    def test_two_pins(self):
        """An absent pin counts as a value."""
        for pins in (('x', 'y'), ('x', None), (None, 'x'), ('', 'x')):
            with self.subTest(pins=pins), \
                    self.assertRaises(pf.UsageError) as caught:
                pf.unique_refs([('s:t', pins[0]), (' s:t', pins[1])])
            self.assertIn('"s:t" is asked for with two pins',
                          str(caught.exception))

    def test_no_id(self):
        with self.assertRaises(pf.UsageError):
            pf.unique_refs([])

    def test_lookups_do_not_merge_ids(self):
        """Ids that differ inside are two results, though one tool."""
        self.assertEqual(len(pf.unique_refs([('s:t', ''), ('s : t', '')])),
                         2)

    def test_nearest(self):
        names = ['gh:create_issue', 'gh:create_issues', 'gh:close_issue',
                 'x:y', 'gh:create_isue']
        self.assertEqual(
            pf.rank_nearest('gh:create_issue', names),
            ['gh:create_issues', 'gh:create_isue', 'gh:close_issue'])
        self.assertEqual(pf.rank_nearest('gh:create_issue', names, 1),
                         ['gh:create_issues'])
        self.assertEqual(pf.rank_nearest('zzz', names), [])

    def test_ties_go_by_name(self):
        self.assertEqual(pf.rank_nearest('s:a', ['s:d', 's:c', 's:b',
                                                 's:b', 's:e']),
                         ['s:b', 's:c', 's:d'])

    def test_nearest_is_what_difflib_finds(self):
        import difflib
        names = ['%s%s_%s' % parts for parts in itertools.product(
            'ab', ('', 'x', 'yy'), ('list', 'lists', 'get'))]
        for word in names:
            matcher = difflib.SequenceMatcher(None, '', word)
            scores = []
            for name in names:
                matcher.set_seq1(name)
                if name != word and matcher.ratio() >= 0.6:
                    scores.append((-matcher.ratio(), name))
            self.assertEqual(pf.rank_nearest(word, names),
                             [name for _, name in sorted(scores)[:3]])


class Test10Lock(unittest.TestCase):
    """What the gates do with a lockfile, asked for or in the config."""

    TOOL = a_tool(hints=SAFE, approved=pf.Approval(H1, 1, SAFE, NOW, 'x'))

    def case(self, asked, tool=TOOL, pin='', tier='operator', **known):
        """Make a Case of s:t, seen ready, with a lockfile asked for."""
        given = dict(launch=H2)
        return a_case(tool, a_link(), pin=pin, question=a_question(
            tier)._replace(lock=asked), **dict(given, **known))

    def judge(self, *args, **more):
        """Judge a case: its Answer."""
        return pf.evaluate(self.case(*args, **more))[0]

    def test_nothing_departs(self):
        answer = self.judge(a_lock(hints=SAFE), pin='sha256/v1:' + H1)
        self.assertEqual((answer.status, answer.hash),
                         ('ready', 'sha256/v1:' + H1))

    def test_another_launch(self):
        """It comes first, and its remedy writes the launch that is there."""
        server = a_server(command='new', args=('--key', 'swordfish'))
        for more in ({}, {'quarantined': 'Held.'}, {'disabled': 'Off.'}):
            answer = self.judge(a_lock(launches={'s': (H3, "old '***'")}),
                                server=server, **more)
            with self.subTest(more=more):
                self.assertEqual(answer.reason, 'server_quarantined')
                self.assertEqual(
                    answer.detail, 'Server "s": launch changed: the lockfile '
                    "my.lock has old '***', now it is new --key '***'.")
                self.assertEqual(answer.remediation, (
                    'Review it, then run: %s.py servers approve '
                    '--lock=my.lock s' % MARK))

    def test_a_launch_that_differs_in_a_masked_part(self):
        server = a_server(command='run', args=('--key', 'swordfish'))
        text = pf.launch_text(server)
        answer = self.judge(a_lock(launches={'s': (H3, text)}),
                            server=server)
        self.assertIn('(only a masked part differs)', answer.detail)
        self.assertNotIn('swordfish', ' '.join(map(str, answer)))

    def test_a_server_that_is_not_in_it(self):
        answer = self.judge(a_lock(launches={'b': (H3, 'x')}, hints=SAFE))
        self.assertEqual(answer.status, 'ready')

    def test_riskier_hints_gate_always(self):
        tool = self.TOOL._replace(hints={'readOnlyHint': True})
        for more in ({}, {'server': a_server(trust_mode='auto')}):
            answer = self.judge(a_lock(hints=SAFE), tool, **more)
            with self.subTest(more=more):
                self.assertEqual(answer.reason, 'tool_changed')
                self.assertEqual(
                    answer.detail, 'Hints became riskier than in the '
                    'lockfile my.lock: destructiveHint false -> absent, '
                    'openWorldHint false -> absent.')
                self.assertIn('tools verify --lock=my.lock; then run: ',
                              answer.remediation)
                self.assertIn(' tools lock --file=my.lock --expect=',
                              answer.remediation)

    def test_safer_hints_do_not(self):
        answer = self.judge(a_lock(hints={'readOnlyHint': False}))
        self.assertEqual(answer.status, 'ready')

    def test_a_pin_of_it(self):
        answer = self.judge(a_lock(hash=H3, hints=SAFE),
                            pin='sha256/v1:' + H3)
        self.assertEqual(answer.reason, 'hash_mismatch')
        self.assertEqual(answer.detail, (
            'Locked in my.lock is sha256/v1:%s, last listed is sha256/v1:%s.'
            % (H3, H1)))
        self.assertIn(' tools lock --file=my.lock ', answer.remediation)

    def test_a_pin_beside_it(self):
        answer = self.judge(a_lock(), pin='sha256/v1:' + H3)
        self.assertIn('Pinned is sha256/v1:' + H3, answer.detail)
        self.assertIn(' tools show s:t', answer.remediation)

    def test_an_agent_reads_nothing_of_it(self):
        for lock in (a_lock(launches={'s': (H3, 'x')}), a_lock(
                hash=H3, hints=SAFE), a_lock(hints={'idempotentHint': True})):
            answer = self.judge(lock, self.TOOL._replace(hints={}),
                                pin='sha256/v1:' + H3, tier='agent')
            self.assertEqual(answer.status, 'unavailable')
            text = ' '.join(map(str, answer))
            for secret in 'my.lock', 'launch', H3, 'tools lock':
                self.assertNotIn(secret, text)

    def test_where_it_holds_the_approvals(self):
        lock = a_lock()
        for tool, reason, word in (
                (self.TOOL._replace(approved=None), 'tool_pending_approval',
                 'It is not in the lockfile my.lock.'),
                (self.TOOL._replace(approved=pf.Approval(
                    H3, 1, {}, None, 'lock')), 'tool_changed',
                 'The definition is not the approved one (lockfile '
                 'my.lock).')):
            answer = self.judge(None, tool, lock=lock)
            with self.subTest(reason=reason):
                self.assertEqual((answer.reason, answer.detail),
                                 (reason, word))
                self.assertEqual(
                    answer.remediation, 'Review it: %s.py tools diff s:t; '
                    "then run: %s.py tools lock --expect='s:t=%s' s:t" % (
                        MARK, MARK, pf.review_token(H1, SAFE)))
            for settings, server in (({'quarantine_enabled': False}, {}),
                                     ({}, {'trust_mode': 'auto'})):
                answer = judge(tool, a_link(), lock=lock, server=a_server(
                    **server), question=a_question(**settings))
                self.assertEqual(answer.status, 'ready')

    def test_a_flaw_has_no_line_that_locks(self):
        tool = self.TOOL._replace(flaw='advertised twice', hash='')
        answer = self.judge(a_lock(), tool, lock=a_lock())
        self.assertEqual(answer.remediation, 'Run: %s.py tools diff s:t'
                         % MARK)

    def test_a_lock_line_quotes(self):
        for name, path, words in (
                ('a b', '', "--expect='s:a b=%s' 's:a b'"),
                ('t', 'a b', "--file='a b' --expect='s:t=%s' s:t"),
                ('t', '-x', "--file=-x --expect='s:t=%s' s:t")):
            with self.subTest(name=name, path=path):
                self.assertEqual(
                    pf.lock_line('p', self.TOOL._replace(name=name), path),
                    'p tools lock ' + words % pf.review_token(H1, SAFE))
        self.assertEqual(pf.lock_line('p', self.TOOL._replace(
            name='a\nb')), 'p tools list')


# ==========================================================================
# 11. lock
# ==========================================================================


class Test11Lock(unittest.TestCase):
    """Two definitions, or the hints of two, side by side."""

    def diff(self, old, new):
        """Compare two definitions given as values."""
        return pf.diff_definitions(*(pf.definition_text(value) if value
                                     else '' for value in (old, new)))

    def test_alike(self):
        self.assertEqual(self.diff(tool(), tool(annotations=SAFE)), [])

    def test_one_line(self):
        self.assertEqual(self.diff(tool(), tool(description='Echo!')),
                         [('description', ['-Echo text', '+Echo!'])])

    def test_steps_are_bounded(self):
        """Of the whole diff, and all of both texts is shown then."""
        words = ['x%d' % n for n in range(60)]
        old = ' '.join(words)
        new = ' '.join(['A'] + words[1:30] + ['B'] + words[31:59] + ['C'])
        pair = ('title', 'description')
        for steps, end in ((10 ** 6, False), (0, True), (300, True)):
            with self.subTest(steps=steps), mock.patch.object(
                    pf, 'MAX_STEPS', steps):
                found = self.diff(*({'name': 'a', **dict.fromkeys(
                    pair, text)} for text in (old, new)))
                self.assertEqual(tuple(field for field, _ in found), pair)
                self.assertEqual(found[1][1] == ['-' + old, '+' + new], end)

    def test_lines_of_a_text(self):
        self.assertEqual(
            self.diff(tool(description='a\nb\nc'),
                      tool(description='a\nX\nc')),
            [('description', [' a', '-b', '+X', ' c'])])

    def test_fields_in_order(self):
        new = tool(title='T', inputSchema={'type': 'string'},
                   outputSchema={}, description=None)
        self.assertEqual(self.diff(tool(), new), [
            ('title', ['+T']), ('description', ['-Echo text']),
            ('inputSchema', ['~inputSchema.type: "object" -> "string"']),
            ('outputSchema', ['+outputSchema: {}'])])

    def test_key_order_is_no_difference(self):
        self.assertEqual(self.diff(
            tool(inputSchema={'a': 1, 'b': 2}),
            tool(inputSchema={'b': 2, 'a': 1})), [])

    def test_another_type_is_shown(self):
        """What looks alike as lines is shown as JSON."""
        for old, new, lines in (
                ('5', 5, ['~description: "5" -> 5']),
                (True, 'true', ['~description: true -> "true"']),
                (True, 1, ['~description: true -> 1']),
                ('null', None, ['-null']), (None, '', ['+'])):
            with self.subTest(old=old):
                self.assertEqual(self.diff(tool(description=old), tool(
                    description=new)), [('description', lines)])

    def test_a_new_tool_and_one_without_text(self):
        whole = [('name', ['+echo']), ('description', ['+Echo text']),
                 ('inputSchema', ['+inputSchema: {"type": "object"}'])]
        self.assertEqual(self.diff(None, tool()), whole)
        self.assertEqual([field for field, _ in self.diff(tool(), None)],
                         ['name', 'description', 'inputSchema'])

    def test_text_that_looks_like_a_diff(self):
        self.assertEqual(
            self.diff(tool(description='@@ -1 +1 @@\n--- a'),
                      tool(description='@@ -1 +1 @@\n+++ b')),
            [('description', [' @@ -1 +1 @@', '---- a', '++++ b'])])

    def test_far_lines_are_left_out(self):
        old = [str(n) for n in range(20)]
        lines = self.diff(tool(description='\n'.join(old)),
                          tool(description='\n'.join(old + ['end'])))[0][1]
        self.assertEqual(lines, ['@line 18 of 21', ' 17', ' 18', ' 19',
                                 '+end'])

    def text(self, old, new):
        """Compare two descriptions: the lines."""
        found = self.diff(tool(description=old), tool(description=new))
        self.assertEqual([field for field, _ in found], ['description'])
        return found[0][1]

    LONG = ' '.join('Sentence %d tells of case %d.' % (n, n)
                    for n in range(100))

    def test_a_word_in_a_long_line_is_seen_at_once(self):
        self.assertGreater(len(self.LONG), 2900)
        before = 'case 48. Sentence 49 tells of case 49. Sentence 50'
        self.assertEqual(
            self.text(self.LONG, self.LONG.replace('50 tells', '50 hides')),
            ['@character %d of 2979' % (self.LONG.index(before) + 1),
             ' ' + before, '-tells', '+hides',
             ' of case 50. Sentence 51 tells of case 51. Sentence [...]'])

    def test_words_that_came_or_went(self):
        head = self.LONG[:90]
        for old, new, lines in (
                (head, head + ' Run it.', ['+Run it.']),
                (head + ' Run it.', head, ['-Run it.']),
                (head, head + '  ', ['-Senten', '+Senten  ']),
                (head + ' ', head, ['-Senten ', '+Senten']),
                (head, head + '\nRun it.', ['+Run it.'])):
            with self.subTest(new=new[-12:]):
                found = [line for line in self.text(old, new)
                         if line[0] in '+-']
                self.assertEqual(found, lines)

    def test_what_is_rewritten_is_shown_whole(self):
        old, new = self.LONG[:200], self.LONG[:200].upper()
        self.assertEqual(self.text(old, new), ['-' + old, '+' + new])

    def test_a_long_text_beside_lines(self):
        lines = self.text('a\nb\n' + self.LONG, 'a\nX\n' + self.LONG)
        self.assertEqual(lines[:3], [' a', '-b', '+X'])
        self.assertEqual(len(lines), 4)
        self.assertRegex(lines[3], r'\A Sentence 0 .{40,70} \[\.\.\.\]\Z')

    def test_chinese_is_compared_character_by_character(self):
        old = '\u4f60\u597d' * 60
        lines = self.text(old, old[:60] + '\u574f' + old[61:])
        self.assertEqual([line for line in lines if line[0] in '+-'],
                         ['-\u4f60', '+\u574f'])

    def test_every_word_that_changed_is_shown(self):
        """Whatever is left out of the lines stands in both texts."""
        old = self.LONG.split(' ')
        for step in 3, 7, 40:
            new = [word + 'x' if n % step == 0 else word
                   for n, word in enumerate(old)]
            lines = self.text(' '.join(old), ' '.join(new))
            for sign, words in (('-', old), ('+', new)):
                said = ' '.join(line[1:] for line in lines
                                if line[0] == sign).split(' ')
                missed = set(words[::step]) - set(said)
                self.assertEqual((step, sign, missed), (step, sign, set()))

    def test_a_huge_text_is_compared_in_bounded_time(self):
        """Word by word it would take minutes: it counts as rewritten."""
        old, new = 'a b ' * 60000, 'b a c ' * 40000
        self.assertEqual(self.text(old, new), ['-' + old, '+' + new])

    def schema(self, old, new):
        """Compare two input schemas: the lines."""
        (field, lines), = self.diff(tool(inputSchema=old),
                                    tool(inputSchema=new))
        self.assertEqual(field, 'inputSchema')
        return [line.replace('inputSchema', '$') for line in lines]

    SCHEMAS = (
        ({'a': {'b': 'x'}}, {'a': {'b': 'y'}}, ['~$.a.b: "x" -> "y"']),
        ({'a': 1}, {'a': True}, ['~$.a: 1 -> true']),
        ({'a': None}, {'a': 0}, ['~$.a: null -> 0']),
        ({'a': None}, {}, ['-$.a: null']), ({}, {'a': {}}, ['+$.a: {}']),
        ({'a b': 1, 'c.d': {'"': 2}}, {'a b': 2, 'c.d': {'"': 3}},
         ['~$["a b"]: 1 -> 2', '~$["c.d"]["\\""]: 2 -> 3']),
        ({'a': [1]}, {'a': {'b': 1}}, ['-$.a: [1]', '+$.a: {"b": 1}']),
        ({'a': 1}, {'a': [1]}, ['-$.a: 1', '+$.a: [1]']),
        ({}, {'a': {'type': 'string', 'description': 'd' * 40}},
         ['+$.a.description: "%s"' % ('d' * 40), '+$.a.type: "string"']))
    LISTS = (
        (['a', 'b'], ['b', 'c'], ['~$.x: - "a", + "c"']),
        (['a', 'b'], ['b', 'a'],
         ['~$.x: order changed: ["a", "b"] -> ["b", "a"]']),
        (['a', 'b'], ['b', 'a', 'c'],
         ['~$.x: + "c", order changed: ["a", "b"] -> ["b", "a", "c"]']),
        (['a'], ['a', 'a'], ['~$.x: + "a"']),
        ([1, '1'], ['1', True], ['~$.x: - 1, + true']),
        ([], [None], ['~$.x: + null']),
        ([{'t': 1}, {'t': 2}], [{'t': 1}, {'t': 3}],
         ['~$.x[1].t: 2 -> 3']),
        ([{'t': 1}, {'t': 2}], [{'t': 0}, {'t': 1}, {'t': 2}],
         ['+$.x[0]: {"t": 0}']),
        ([{'t': 1}, {'t': 2}], [{'t': 2}], ['-$.x[0]: {"t": 1}']),
        ([{'t': 1}, {'t': 2}], [{'t': 2}, {'t': 1}],
         ['~$.x: order changed']),
        ([[1, 2]], [[1, 3]], ['~$.x[0]: - 2, + 3']))

    def test_schemas_are_compared_path_by_path(self):
        for old, new, lines in self.SCHEMAS + tuple(
                ({'x': old}, {'x': new}, lines)
                for old, new, lines in self.LISTS):
            with self.subTest(old=old, new=new):
                self.assertEqual(self.schema(old, new), lines)

    def test_a_long_text_in_a_schema(self):
        lines = self.schema({'d': self.LONG}, {'d': self.LONG.replace(
            '50 tells', '50 hides')})
        self.assertEqual((lines[0], lines[3:5]), ('~$.d:', ['-tells',
                                                            '+hides']))

    def test_notes_name_field_and_character(self):
        text = pf.definition_text(tool('n\u200b', title='fine', inputSchema={
            'properties': {'p\u0430th': {'enum': [['\u202e']]}}}))
        self.assertEqual(
            [(field, note.split(',')[0])
             for field, note in pf.definition_notes(text)],
            [('name', '\\u200b ZERO WIDTH SPACE'),
             ('inputSchema', '\\u0430 CYRILLIC SMALL LETTER A'),
             ('inputSchema', '\\u202e RIGHT-TO-LEFT OVERRIDE')])
        self.assertEqual(pf.definition_notes(''), [])

    def test_hints(self):
        self.assertEqual(
            pf.diff_hints(SAFE, {'readOnlyHint': False,
                                 'destructiveHint': False,
                                 'idempotentHint': True}),
            ['readOnlyHint: true -> false (riskier)',
             'idempotentHint: absent -> true',
             'openWorldHint: false -> absent (riskier)'])
        self.assertEqual(pf.diff_hints(SAFE, dict(SAFE)), [])
        self.assertEqual(pf.diff_hints({}, {'readOnlyHint': True}),
                         ['readOnlyHint: absent -> true (safer)'])
        self.assertEqual(
            pf.diff_hints({'destructiveHint': True},
                          {'destructiveHint': False}),
            ['destructiveHint: true -> false (safer)'])
        self.assertEqual(pf.diff_hints(None, {'readOnlyHint': False}),
                         ['readOnlyHint: false'])


class Test11Contracts(unittest.TestCase):
    """What is wrong now beside what was: only a move is an event."""

    CHANGED = {'event': 'changed', 'reason': 'tool_changed', 'detail': 'd'}
    GONE = {'event': 'vanished', 'reason': 'not_found', 'detail': 'e'}

    def test_moves(self):
        changed, gone = self.CHANGED, self.GONE
        for before, found, events, after in (
                ({}, {'a': {}}, [], {}),
                ({}, {'a': changed}, [('a', 'changed')], {'a': changed}),
                ({'a': changed}, {'a': changed}, [], {'a': changed}),
                ({'a': changed}, {'a': gone}, [('a', 'vanished')],
                 {'a': gone}),
                ({'a': changed}, {'a': {}}, [('a', 'back')], {}),
                ({'a': changed}, {}, [], {'a': changed}),
                ({'a': changed}, {'b': gone}, [('b', 'vanished')],
                 {'a': changed, 'b': gone})):
            with self.subTest(before=before, found=found):
                got, held = pf.contract_moves(before, found)
                self.assertEqual([(event['id'], event['event'])
                                  for event in got], events)
                self.assertEqual(held, after)

    def test_the_values_given_stay_as_they_are(self):
        before = {'a': self.CHANGED}
        pf.contract_moves(before, {'a': {}, 'b': self.GONE})
        self.assertEqual(before, {'a': self.CHANGED})

    def test_an_event_carries_what_is_wrong(self):
        events, _ = pf.contract_moves({}, {'a': self.CHANGED})
        self.assertEqual(events, [dict(self.CHANGED, id='a')])

    def test_another_detail_of_the_same_is_no_event(self):
        newer = dict(self.CHANGED, detail='newer')
        self.assertEqual(pf.contract_moves({'a': self.CHANGED},
                                           {'a': newer}),
                         ([], {'a': newer}))

    def test_every_reason_that_lasts_has_an_event_of_its_own(self):
        lasting = {code for code, row in pf.REASONS.items()
                   if not row.retryable} - {
            'server_not_in_scope', 'missing_annotation', 'policy_filtered'}
        self.assertEqual(set(pf.REASON_EVENTS), lasting)
        self.assertEqual(len(set(pf.REASON_EVENTS.values())), len(lasting))

    def test_lines(self):
        for event, line in (
                ('changed', 'job: gh:a changed'),
                ('vanished', 'job: gh:a vanished'),
                ('pending', 'job: gh:a pending approval'),
                ('login_needed', 'job: gh:a needs a login'),
                ('pin_mismatch', 'job: gh:a pin no longer fits'),
                ('launch_changed', 'job: gh:a launch changed'),
                ('back', 'job: gh:a is back')):
            self.assertEqual(pf.contract_line('job', [
                {'id': 'gh:a', 'event': event}]), line)

    def test_what_is_kept_reads_back_the_same(self):
        contract = pf.Contract('job', NOW, [['s:\u00e9\ud800', '']], '{}\n',
                               '/x\u2028', ['/c'], {'a': self.CHANGED}, {})
        text = pf.contract_text(contract)
        text.encode('ascii')
        self.assertEqual(pf.read_contract('job', NOW, text), contract)


def a_locked(definition=None, hints=None, is_full=False):
    """Make what a lockfile holds of a tool that is listed as given."""
    text = pf.definition_text(definition or tool())
    return pf.Locked(1, pf.sha256(text), hints or {}, text if is_full else '')


def a_lock(launches=None, **more):
    """Make a Lock of s:t with the launch L; more: other fields of s:t."""
    given = dict(version=1, hash=H1, hints={}, text='')
    return pf.Lock('my.lock', launches or {'s': (H2, 'run')},
                   {'s:t': pf.Locked(**dict(given, **more))})


class Test11Lockfile(unittest.TestCase):
    """The text of a lockfile, and the values it stands for."""

    LOCK = pf.Lock('f', {'s': (H1, "run '***'"), 'b c': (H2, 'http u')}, {
        's:t': a_locked(hints=SAFE, is_full=True),
        's:a:b': a_locked(tool('a:b')),
        'b c:\u00e9 \u202e': a_locked(tool('\u00e9 \u202e'))})

    def text(self, **more):
        """Write the lock of one tool, as an object that can be damaged."""
        lock = pf.Lock('f', {'s': (H1, 'run')}, {'s:t': a_locked(
            is_full=True)})
        return dict(json.loads(pf.render_lock(lock)), **more)

    def refused(self, data, *parts):
        """Hold bytes, or a value, to being refused with a path and why."""
        if not isinstance(data, bytes):
            data = json.dumps(data).encode('ascii')
        with self.assertRaises(pf.LockError) as caught:
            pf.parse_lock('my.lock', data)
        for part in ('lockfile my.lock: ',) + parts:
            self.assertIn(part, str(caught.exception))
        self.assertIn('tools lock', caught.exception.hint)
        self.assertEqual(caught.exception.path, 'my.lock')

    def test_round_trip(self):
        data = pf.render_lock(self.LOCK).encode('ascii')
        self.assertEqual(pf.parse_lock('f', data), self.LOCK)

    def test_the_same_set_is_the_same_bytes(self):
        """Whatever order it came in; a fact stands on a line of its own."""
        turned = pf.Lock('g', *({key: table[key] for key in reversed(list(
            table))} for table in self.LOCK[1:]))
        text = pf.render_lock(self.LOCK)
        self.assertEqual(pf.render_lock(turned), text)
        self.assertEqual(text[-2:], '}\n')
        found = json.loads(text)
        for table in found, found['servers'], found['tools']:
            self.assertEqual(list(table), sorted(table))
        self.assertEqual(list(found), ['lockfileVersion', 'servers', 'tools'])
        self.assertEqual(found['tools']['s:a:b'], {
            'hints': {}, 'pin': 'sha256/v1:' + pf.sha256(
                pf.definition_text(tool('a:b')))})
        self.assertIn('\n    "s:a:b": {\n      "hints": {},\n      "pin": "',
                      text)

    def test_a_server_without_a_tool_is_not_written(self):
        lock = self.LOCK._replace(launches=dict(self.LOCK.launches, x=(
            H3, 'y')))
        self.assertEqual(pf.render_lock(lock), pf.render_lock(self.LOCK))

    def test_definitions_of_any_shape(self):
        deep = {'a': 1}
        for _ in range(pf.MAX_DEPTH - 2):
            deep = {'a': deep}
        for schema in (deep, {'n': [None, 1.5, 10 ** 30, -1e-7, True]},
                       {'': '\ud800', '\U0001f600': '"\\'}):
            lock = pf.Lock('f', {'s': (H1, 'r')}, {'s:t': a_locked(
                tool(inputSchema=schema), is_full=True)})
            data = pf.render_lock(lock).encode('ascii')
            self.assertEqual(pf.parse_lock('f', data), lock)

    def test_what_is_read_too(self):
        """A BOM and CRLF, which editors and git leave behind."""
        text = pf.render_lock(self.LOCK)
        for data in (b'\xef\xbb\xbf' + text.encode('ascii'),
                     text.replace('\n', '\r\n').encode('ascii')):
            self.assertEqual(pf.parse_lock('f', data), self.LOCK)

    def test_bytes_that_are_no_lockfile(self):
        for data, why in (
                (b'', 'is empty'), (b' \n', 'is empty'),
                (b'\xff{}', 'is not JSON'), (b'[]', 'no lockfileVersion'),
                (b'null', 'no lockfileVersion'), (b'{}', 'no lockfileVersion'),
                (b'{"a": 1, "a": 1}', 'the key "a" stands twice'),
                (b'{"lockfileVersion": NaN}', 'NaN'),
                (b'{\n<<<<<<< ours\n"a": 1\n=======\n>>>>>>> theirs\n}',
                 'merge conflict')):
            with self.subTest(data=data):
                self.refused(data, why)

    def test_one_that_is_cut_anywhere(self):
        data = pf.render_lock(self.LOCK).encode('ascii')
        for end in range(len(data) - 2):    # the last is a line end
            self.refused(data[:end])

    def test_the_whole_of_it(self):
        for more, why in (
                ({'lockfileVersion': 2}, 'has lockfileVersion 2, this'),
                ({'lockfileVersion': '1'}, 'has lockfileVersion "1"'),
                ({'lockfileVersion': True}, 'has lockfileVersion true'),
                ({'lockfileVersion': None}, 'has lockfileVersion null'),
                ({'servers': None}, 'servers must be an object'),
                ({'servers': []}, 'servers must be an object'),
                ({'tools': []}, 'tools must be an object'),
                ({'tools': {}}, 'locks no tool'),
                ({'servers': {}}, 'has no launch of server s'),
                ({'more': 1}, 'has a key it cannot have: more')):
            with self.subTest(more=more):
                self.refused(self.text(**more), why)

    def test_a_launch(self):
        for raw in (None, {}, {'digest': H1}, {'launch': 'run'},
                    {'digest': H1, 'launch': 1}, {'digest': 'x' * 64,
                                                  'launch': 'run'},
                    {'digest': H1[1:], 'launch': 'run'},
                    {'digest': H1 + '\n', 'launch': 'run'},
                    {'digest': H1, 'launch': 'run', 'more': 1}):
            with self.subTest(raw=raw):
                self.refused(self.text(servers={'s': raw}), 'servers.s must')

    def test_a_tool(self):
        good = self.text()['tools']['s:t']
        for more, why in (
                ({'pin': None}, 'the pin is not'), ({'pin': 'x'}, 'the pin'),
                ({'hints': None}, 'hints must'),
                ({'hints': {'readOnlyHint': 1}}, 'hints must'),
                ({'hints': {'other': True}}, 'hints must'),
                ({'definition': None}, 'not the one that its pin names'),
                ({'definition': {}}, 'not the one that its pin names'),
                ({'definition': dict(good['definition'], description='!')},
                 'not the one that its pin names'),
                ({'more': 1}, 'must have pin, hints and')):
            with self.subTest(more=more):
                self.refused(self.text(tools={'s:t': dict(good, **more)}),
                             'tools.s:t', why)
        for raw in None, [], {}, {'pin': good['pin']}, {'hints': {}}:
            with self.subTest(raw=raw):
                self.refused(self.text(tools={'s:t': raw}), 'must have pin')
        for name in 's', ':t', 's:', 's: t', ' s:t', '':
            with self.subTest(name=name):
                self.refused(self.text(tools={name: good}), 'is not an id')


class Test11Snapshot(unittest.TestCase):
    """A snapshot is exactly what `state export` writes, or is refused."""

    def table(self):
        """Make a snapshot of one server with one approved tool."""
        text = pf.definition_text(tool())
        digest, at = pf.sha256(text), pf.format_time(NOW)
        return {
            'snapshot_version': 1, 'hash_version': pf.HASH_VERSION,
            'exported_at': at, 'definitions': {digest: json.loads(text)},
            'servers': {'s': {
                'launch': {'digest': H1, 'text': 'run', 'known': True,
                           'baselined': True},
                'seen': {'state': 'ready', 'cause': '', 'detail': '',
                         'since': at, 'observed_at': at, 'listed_at': None,
                         'protocol': None, 'era': None, 'ttl': 0,
                         'refused': {}, 'expires_at': None},
                'tools': [{'name': 'echo', 'listed': True, 'hash': digest,
                           'hints': dict(SAFE), 'flaw': '',
                           'first_seen': at, 'last_seen': at}],
                'approved': [{'name': 'echo', 'hash': digest, 'hints': {},
                              'at': at}],
                'blocks': {'echo': at},
                'switches': {'enabled': {'value': False, 'over': True,
                                         'at': at}}}}}

    def read(self, table):
        """Seal a snapshot and read it back."""
        sealed = dict(table, sha256=pf.snapshot_digest(table))
        return pf.read_snapshot('F', json.dumps(sealed, indent=2).encode())

    def set(self, table, path, value):
        """Set what stands at a path of keys, or take it out."""
        for key in path[:-1]:
            table = table[key]
        if value is None:
            del table[path[-1]]
        else:
            table[path[-1]] = value

    def test_what_is_whole_is_read(self):
        table = self.table()
        found = self.read(table)
        self.assertEqual(found.pop('sha256'), pf.snapshot_digest(table))
        self.assertEqual(found, table)

    S = ('servers', 's')
    WRONG = (
        (('exported_at',), 'yesterday'), (('exported_at',), None),
        (('more',), 1), (('servers',), []), (('servers', ' '), {}),
        (S, {}), (S + ('seen', 'state'), 'fine'),
        (S + ('seen', 'observed_at'), NOW), (S + ('seen', 'ttl'), True),
        (S + ('seen', 'ttl'), -1), (S + ('seen', 'ttl'), 1.5),
        (S + ('seen', 'observed_at'), '2026-13-01T00:00:00.000Z'),
        (S + ('seen', 'observed_at'), '2026-01-01'),
        (S + ('seen', 'refused'), {'a': 1}), (S + ('seen', 'more'), 1),
        (S + ('launch', 'digest'), 'A' * 64),
        (S + ('launch', 'known'), 1), (S + ('launch', 'text'), None),
        (S + ('tools', 0, 'listed'), 1), (S + ('tools', 0, 'name'), ''),
        (S + ('tools', 0, 'name'), 'a\ud800'),
        (S + ('tools', 0, 'name'), 'a\0'),
        (S + ('tools', 0, 'hash'), H1), (S + ('tools', 0, 'flaw'), 'both'),
        (S + ('tools', 0, 'hints'), {'readOnlyHint': 'true'}),
        (S + ('tools', 0, 'hints'), {'otherHint': True}),
        (S + ('tools', 0, 'name'), 'other'), (S + ('tools',), {}),
        (S + ('approved', 0, 'hash'), H2), (S + ('approved', 0), []),
        (S + ('approved', 0, 'name'), 'other'),
        (S + ('blocks', 'echo'), 5), (S + ('blocks', ''), 'x'),
        (S + ('switches', 'other'), {'value': True, 'over': False,
                                     'at': pf.format_time(NOW)}),
        (S + ('switches', 'enabled', 'value'), 0),
        (('definitions', H1), {'name': 'x', 'v': 1}),
        (('definitions',), {}))

    def test_what_is_not_of_its_shape_is_refused_and_named(self):
        for path, value in self.WRONG:
            table = self.table()
            self.set(table, path, value)
            with self.subTest(path=path, value=value):
                with self.assertRaises(pf.UsageError) as caught:
                    self.read(table)
                self.assertTrue(str(caught.exception).startswith(
                    'snapshot F: '))
                self.assertIn('Nothing was changed', caught.exception.hint)

    def test_a_tool_stands_in_it_once(self):
        for key in ('tools', 'approved'):
            table = self.table()
            table['servers']['s'][key] *= 2
            with self.assertRaises(pf.UsageError) as caught:
                self.read(table)
            self.assertIn('has a tool twice', str(caught.exception))

    def test_a_definition_is_of_this_way_to_hash(self):
        for more in ({'v': 2}, {'v': 1, 'title': None}, {'v': 1, 'x': 1}):
            text = dict({'name': 'echo'}, **more)
            table = self.table()
            table['definitions'][pf.sha256(pf.canonical(text))] = text
            with self.subTest(more), self.assertRaises(pf.UsageError):
                self.read(table)

    def test_another_version_is_said_before_all_else(self):
        for key in ('snapshot_version', 'hash_version'):
            for value in (99, True, '1', 1.5):
                table = dict(self.table(), servers=7, **{key: value})
                with self.subTest(key, value=value):
                    with self.assertRaises(pf.UsageError) as caught:
                        self.read(table)
                    self.assertIn('has %s %s' % (key, value),
                                  str(caught.exception))

    def test_any_edit_is_found(self):
        table = self.table()
        text = json.dumps(dict(table, sha256=pf.snapshot_digest(table)))
        for old, new in (('"ready"', '"error"'), ('"run"', '"ran"'),
                         ('true', 'false'), ('"ttl": 0', '"ttl": 1'),
                         ('"since": "20', '"since": "19')):
            edited = text.replace(old, new, 1)
            self.assertNotEqual(edited, text)
            with self.subTest(old), self.assertRaises(
                    pf.UsageError) as caught:
                pf.read_snapshot('F', edited.encode())
            self.assertIn('is damaged', str(caught.exception))


# ==========================================================================
# 12. report
# ==========================================================================

AWKWARD = (
    'no', 'on', 'y', 'null', '~', '1e3', '0o17', '012', '12:30:45',
    '2026-08-27', '', ' lead', 'trail ', 'a: b', 'a #b', '- x', '@a', '%a',
    '{', '}', '[', '&a', '*a', '!a', '|', '>', '?', ':', '"', "'", '\\',
    'a\nb', 'a\n', '\n', '\t', 'a\tb', '\x00', '\x07', '\x1b', '\x7f',
    '\x85', '\xa0', '\xff\u0100', '\uffff\U00010000',
    '\u2028', '\u2029', '\ufeff', '\U0001f600', '\ud800',
    '\udc80', 'caf\u00e9', '/', '<<', '=', '.inf', '.nan', '0x1f', '1_000',
    '+1', '-1', 'true', 'Yes', 'yes', 'off', 'false', '---', '...',
    'a' * 500, 'a b ' * 100)
ESCAPE = (r'\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|'
          r'([ntrbf"\\]))')
NESTED = {
    'verdict': 'ready', 'n': 5, 'is_so': True, 'none': None, 'half': 0.5,
    'big': 1e16, 'small': 1e-07, 'tools': [{'id': 'a:b', 'refs': ['x', []]},
                                           {'on': {'y': {}}}, [[1], 2], 'z'],
    'odd key': {'a': [{'b': [{'c': None}]}]}, '': [], '12': 'x'}


def unquote(text):
    """Read one double-quoted YAML scalar of the plain sort."""
    if not re.match(r'"[\x20-\x7e]*"\Z', text):
        raise AssertionError(text)

    def char(found):
        *codes, short = found.groups()
        code = next(filter(None, codes), None)
        return chr(int(code, 16)) if code else dict(
            zip('ntrbf"\\', '\n\t\r\b\f"\\'))[short]
    left = re.sub(ESCAPE, '', text[1:-1])
    if '"' in left or '\\' in left:
        raise AssertionError(text)
    return re.sub(ESCAPE, char, text[1:-1])


class Test12Yaml(unittest.TestCase):
    """YAML that every loader reads back as the JSON."""

    def test_strings(self):
        """Always double-quoted: no word can turn into something else."""
        lines = pf.render_yaml(list(AWKWARD)).split('\n')
        self.assertEqual(lines.pop(), '')
        self.assertEqual([unquote(line[2:]) for line in lines],
                         list(AWKWARD))
        self.assertEqual({line[:2] for line in lines}, {'- '})

    def test_keys(self):
        words = [word for word in AWKWARD if word != 'a' * 500]
        lines = pf.render_yaml(dict.fromkeys(words, 1)).split('\n')
        self.assertEqual([unquote(line[:-3]) for line in lines[:-1]], words)
        self.assertEqual(pf.render_yaml({'did_you_mean': 1}),
                         'did_you_mean: 1\n')

    def test_layout(self):
        self.assertEqual(
            pf.render_yaml({
                'verdict': 'ready', 'waited_ms': 0, 'tools': [
                    {'id': 'a:b', 'retryable': False, 'did_you_mean': [
                        'c', 'd']}, {'id': 'e'}], 'none': [], 'map': {}}),
            'verdict: "ready"\n'
            'waited_ms: 0\n'
            'tools:\n'
            '  - id: "a:b"\n'
            '    retryable: false\n'
            '    did_you_mean:\n'
            '      - "c"\n'
            '      - "d"\n'
            '  - id: "e"\n'
            'none: []\n'
            'map: {}\n')

    def test_scalars(self):
        for value, text in ((None, 'null'), (True, 'true'), (0, '0'),
                            (-5, '-5'), (0.5, '0.5'), ({}, '{}'),
                            ([], '[]'), (1e16, '1.0e+16'),
                            (1e-07, '1.0e-07'), ('', '""')):
            self.assertEqual(pf.render_yaml(value), text + '\n')

    def hold(self, load):
        """Load what is awkward, and what is nested, with a real loader."""
        for text in AWKWARD:
            with self.subTest(text=text):
                value = {'a': [text, {'b': text}], text: text}
                self.assertEqual(load(pf.render_yaml(value)), value)
        self.assertEqual(load(pf.render_yaml(NESTED)), NESTED)

    def test_yaml_1_1(self):
        try:
            import yaml
        except ImportError:
            self.skipTest('PyYAML is not installed')
        self.hold(yaml.safe_load)

    def test_yaml_1_2(self):
        try:
            from ruamel.yaml import YAML
        except ImportError:
            self.skipTest('ruamel.yaml is not installed')
        self.hold(YAML(typ='safe', pure=True).load)


def a_report(*answers):
    """Make a Report of these Answers."""
    return pf.Report(pf.worst_verdict([a.reason or '' for a in answers]),
                     pf.format_time(NOW), None, list(answers), 'R', [])


def an_answer(name, reason=None, action=None, detail=None, **more):
    """Make an Answer as evaluate does."""
    is_ready = reason is None
    given = dict.fromkeys(pf.Answer._fields)
    given.update(
        id=name, status='ready' if is_ready else 'unavailable',
        reason=reason, retryable=None if is_ready
        else pf.REASONS[reason].retryable, action=action, detail=detail)
    return pf.Answer(**dict(given, **more))


class Test12Report(unittest.TestCase):
    """A Report as table and as data."""

    READY = an_answer('gh-ops:sync_issues', hash='sha256/v1:' + H1)
    MISS = an_answer('gh-ops:nope', 'not_found', 'configure',
                     'No tool with this id is available.')

    def test_table(self):
        self.assertEqual(
            pf.render_report(a_report(self.READY, self.MISS), 0),
            'ID                  STATUS       REASON     RETRYABLE  ACTION  '
            '   DETAIL\n'
            'gh-ops:sync_issues  ready        -          -          -       '
            '   -\n'
            'gh-ops:nope         unavailable  not_found  false      configur'
            'e  No tool with this id is available.\n'
            'VERDICT: unknown_ids (exit 12)\n')

    def test_verdicts(self):
        for reason, line in (
                (None, 'VERDICT: ready (exit 0)'),
                ('server_unhealthy', 'VERDICT: degraded_retryable (exit '
                 '10)'),
                ('tool_changed', 'VERDICT: blocked (exit 11)'),
                ('not_found', 'VERDICT: unknown_ids (exit 12)')):
            text = pf.render_report(a_report(an_answer('a:b', reason)),
                                    0)
            self.assertEqual(text.split('\n')[-2], line)

    def test_no_line_ends_in_blanks(self):
        text = pf.render_report(a_report(self.READY, self.MISS, an_answer(
            'x:y', 'server_initializing', detail='d')), 0)
        for line in text.split('\n'):
            self.assertEqual(line, line.rstrip())
        self.assertIn('x:y                 unavailable  server_initializing '
                      ' true       -          d\n', text)

    def test_nothing_is_cut(self):
        answer = an_answer('s:' + 'x' * 300, 'not_found', 'configure',
                           'y' * 3000)
        text = pf.render_report(a_report(answer), 0)
        self.assertIn('s:' + 'x' * 300 + '  unavailable', text)
        self.assertIn('y' * 3000, text)

    def test_a_name_forges_no_row(self):
        answer = an_answer('s:a\nx:y  ready', 'not_found', 'configure',
                           'd\r\nVERDICT: ready (exit 0)\x1b[2J')
        text = pf.render_report(a_report(answer), 1000)
        self.assertEqual(len(text.split('\n')), 4)
        self.assertNotIn('\x1b', text)
        self.assertIn('s:a\\x0ax:y  ready', text)

    def test_second_block_on_a_terminal(self):
        answer = self.MISS._replace(remediation='Run: pf tools list',
                                    did_you_mean=['a:b', 'c:\x1bd'])
        report = a_report(self.READY, answer)
        plain = pf.render_report(report, 0)
        self.assertEqual(
            pf.render_report(report, 1000)[len(plain):],
            '\ngh-ops:nope\n  Run: pf tools list\n  Did you mean: a:b, '
            'c:\\x1bd\n')

    def test_data(self):
        """Keys in the contract's order, absent ones left out."""
        full = pf.Answer(*['x'] * len(pf.Answer._fields))
        data = pf.report_data(a_report(self.READY)._replace(answers=[
            full, self.READY, self.MISS]))
        self.assertEqual(list(data), ['verdict', 'checked_at', 'tools'])
        self.assertEqual([list(row) for row in data['tools']], [
            ['id', 'status', 'reason', 'retryable', 'action', 'detail',
             'remediation', 'hash', 'did_you_mean', 'observed_at', 'cause'],
            ['id', 'status', 'hash'],
            ['id', 'status', 'reason', 'retryable', 'action', 'detail']])
        self.assertEqual(data['checked_at'], '2026-09-21T14:13:20.000Z')

    def test_waited_ms(self):
        """It is there if a wait was asked for, 0 included."""
        for waited in (0, 250):
            data = pf.report_data(a_report()._replace(waited_ms=waited))
            self.assertEqual(list(data), ['verdict', 'checked_at',
                                          'waited_ms', 'tools'])
            self.assertEqual(data['waited_ms'], waited)

    def test_json(self):
        value = {'b': 1, 'a': ['caf\u00e9', None, '\ud800']}
        text = pf.render_json(value)
        self.assertEqual(text, '{\n  "b": 1,\n  "a": [\n    "caf\\u00e9",\n'
                         '    null,\n    "\\ud800"\n  ]\n}\n')
        self.assertEqual(json.loads(text), value)


class Test12Tables(unittest.TestCase):
    """Columns and cells."""

    def test_widths(self):
        for text, width in (
                ('', 0), ('abc', 3), ('caf\u00e9', 4), ('cafe\u0301', 4),
                ('\u65e5\u672c', 4), ('\uff21', 2), ('\U0001f600', 2),
                ('\u2713', 1), ('\u2764\ufe0f', 1), ('\u0e01\u0e31', 1)):
            with self.subTest(text=text):
                self.assertEqual(pf.text_width(text), width)

    def test_wide_characters_line_up(self):
        self.assertEqual(
            pf.render_table(('A', 'B'), (('\u65e5\u672c', 'x'),
                                         ('cafe\u0301', 'y'), ('', ''))),
            'A     B\n\u65e5\u672c  x\ncafe\u0301  y\n-     -\n')

    def test_no_rows(self):
        self.assertEqual(pf.render_table(('AB', 'C'), ()), 'AB  C\n')

    def test_what_does_not_fit_a_terminal_stands_below_its_row(self):
        heads = ('ID', 'STATUS', 'WHAT', 'DETAIL')
        rows = (('a:b', 'ready', '', ''),
                ('a:long', 'no', 'x', 'no server of that name is known'))
        self.assertEqual(
            pf.render_table(heads, rows, 24),
            'ID      STATUS  WHAT\n'
            '    DETAIL\n'
            'a:b     ready   -\n'
            'a:long  no      x\n'
            '    no server of that\n'
            '    name is known\n')
        self.assertEqual(
            pf.render_table(heads, rows, 53), pf.render_table(heads, rows))
        self.assertEqual(
            pf.render_table(heads, rows[1:], 3),
            'ID\n    STATUS  WHAT  DETAIL\na:long\n'
            '    no  x  no server of\n    that name is known\n')

    def test_on_a_terminal_foreign_text_begins_no_line(self):
        text = pf.render_table(('A', 'B'), (
            ('a', 'x' * 30 + ' VERDICT: ready'),), 20)
        self.assertIn('\n    VERDICT: ready\n', text)

    def test_cells(self):
        for value, text in (
                (None, ''), ([], ''), ({}, ''), ('', ''), (True, 'true'),
                (False, 'false'), (0, '0'), (1.5, '1.5'), ('x', 'x'),
                (['a', True], 'a, true'), ({'a': 1, 'b': None}, 'a=1 b=')):
            with self.subTest(value=value):
                self.assertEqual(pf.cell_text(value), text)

    def test_rows(self):
        self.assertEqual(
            pf.render_rows([{'a_b': None, 'c': True, 'd': 'no'}],
                           ('a_b', 'c'), 0), 'A B  C\n-    true\n')

    def test_fields(self):
        self.assertEqual(
            pf.render_fields({'id': 's:t', 'empty': '', 'name': 'a\nid: b',
                              'stderr': 'a\nb\x1b\n', 'hints': {'a': True},
                              'definition': {'name': 'x'}}),
            'id:         s:t\nempty:      -\nname:       a\\x0aid: b\n'
            'stderr:\n  a\n  b\\x1b\nhints:      a=true\n'
            'definition:\n  {\n    "name": "x"\n  }\n')

    def test_wrapping(self):
        for text, width, lines in (
                ('', 5, ['']), ('a b', 5, ['a b']),
                ('aa bb cc', 5, ['aa bb', 'cc']),
                ('aa  bb cc', 5, ['aa', 'bb cc']),
                ('aaaaaaaa bb', 5, ['aaaaa', 'aaa', 'bb']),
                ('a bbbbbbbb', 5, ['a', 'bbbbb', 'bbb']),
                ('\u65e5\u672c\u8a9e', 4, ['\u65e5\u672c', '\u8a9e']),
                ('  aa', 5, ['  aa']), ('aa   ', 2, ['aa   '])):
            with self.subTest(text=text):
                self.assertEqual(pf.wrap_text(text, width), lines)

    def test_a_word_is_cut_in_one_walk(self):
        """A server may send a megabyte of them; no blank at its end is
        lost."""
        seen, real = [], pf.text_width
        with mock.patch.object(pf, 'text_width', lambda text: seen.append(
                len(text)) or real(text)):
            self.assertEqual(pf.wrap_text('a' * 1000 + '  ' + 'b' * 12, 10),
                             ['a' * 10] * 100 + ['b' * 10, 'bb'])
            self.assertEqual(pf.wrap_text('\u65e5' * 3 + 'a  ', 4),
                             ['\u65e5' * 2, '\u65e5a  '])
        self.assertLess(sum(seen), 5000)

    def test_a_diff_fits_in_80_columns(self):
        """And no line of foreign text begins one of ours."""
        long = 'x' * 100 + ' approve: y ' + 'word ' * 60 + '\u200b'
        diff = dict(self.DIFF, id='s:' + long, note='n ' * 90, fields=[{
            'field': 'description', 'lines': ['-' + long, '+' + long]}],
            odd_characters=[long], approve=None,
            approved_hash=pf.format_hash(1, H1))
        lines = pf.render_diff(diff).split('\n')
        self.assertLess(max(map(len, lines)), 80)
        self.assertEqual([line for line in lines
                          if line.startswith('approve:')], [])
        self.assertEqual({line[2] for line in lines
                          if line.startswith(('  -', '  +'))}, {'-', '+'})

    def test_blanks_at_the_end_of_a_changed_line_show(self):
        diff = dict(self.DIFF, fields=[{'field': 'title', 'lines': [
            ' a ', '-a ', '+a  ', '+\u0430 p\u0430th']}])
        self.assertIn('\n   a \n  -a\\x20\n  +a\\x20\\x20\n  +\\u0430 '
                      'p\\u0430th\n', pf.render_diff(diff))

    def test_diff_says_more(self):
        diff = dict(self.DIFF, listed=False, note='Changed in 2.',
                    status='approved', ignored=['title'],
                    odd_characters=['title: \\u200b'], fields=[{
                        'field': 'title', 'lines': ['-a'],
                        'old': 'a' * 201, 'new': 'b' * 300}])
        text = pf.render_diff(diff)
        for part in ('\nnot listed now: there is nothing to approve\n',
                     '\nnote: Changed in 2.\n',
                     '\ntitle (201 -> 300 characters):\n',
                     '\ncharacters that hide or look like others:\n'
                     '  title: \\u200b\n', '\napprove: pf tools approve'):
            self.assertIn(part, text)

    def test_review(self):
        self.assertEqual(
            pf.render_review({'tools': [], 'servers': []}),
            'nothing awaits review\n')
        self.assertEqual(
            pf.render_review({'tools': [
                {'id': 's:a', 'result': 'approved'},
                {'id': 's:b\x1b', 'result': 'skipped'},
                {'id': 's:c', 'result': 'approved'}], 'servers': [
                {'server': 'z', 'why': 'W\x1b.', 'approve': 'pf x'}]}),
            'RESULT    ID\napproved  s:a\nskipped   s:b\\x1b\n'
            'approved  s:c\n2 approved, 1 skipped\n\nW\\x1b.\n'
            '  approve it: pf x\n')

    DIFF = {'id': 's:t', 'status': 'changed', 'why': 'w', 'hash': 'H',
            'approved_hash': 'G', 'fields': [{
                'field': 'description', 'lines': ['-a', '+b\x1b']}],
            'hints': ['readOnlyHint: true -> absent (riskier)'],
            'token': 'T', 'approve': 'pf tools approve s:t --expect T'}

    def test_diff(self):
        self.assertEqual(
            pf.render_diff(self.DIFF),
            's:t: changed (w)\napproved: G\nlisted:   H\ndescription:\n'
            '  -a\n  +b\\x1b\nhints:\n  readOnlyHint: true -> absent '
            '(riskier)\nreview token: T\napprove: pf tools approve s:t '
            '--expect T\n')

    def test_diff_of_a_new_tool(self):
        diff = dict(self.DIFF, status='pending', approved_hash=None,
                    hash='', why='', fields=[], hints=[])
        self.assertEqual(
            pf.render_diff(diff),
            's:t: pending\napproved: never\nlisted:   no hash\n'
            'review token: T\napprove: pf tools approve s:t --expect T\n')

    def test_diff_of_nothing(self):
        diff = dict(self.DIFF, status='approved', why='', fields=[],
                    hints=[])
        self.assertEqual(
            pf.render_diff(diff),
            's:t: approved\napproved: G\nlisted:   H\nno difference\n'
            'review token: T\n')

    def test_check(self):
        self.assertEqual(
            pf.render_check({'errors': ['e\x1b'], 'warnings': ['w', 'x'],
                             'servers': 1}),
            'error: e\\x1b\nwarning: w\nwarning: x\n1 server, 1 error, '
            '2 warnings\n')

    def test_verify(self):
        self.assertEqual(
            pf.render_verify({'ok': True, 'problems': [], 'records': 3,
                              'head': 'abc'}), '3 records, intact, head '
            'abc\n')
        self.assertEqual(
            pf.render_verify({'ok': False, 'problems': ['p'], 'records': 1,
                              'head': ''}), 'problem: p\n1 record, 1 '
            'problem, head -\n')

    def test_record_lines(self):
        def line(kind, status, **data):
            return pf.record_line({'type': kind, 'status': status,
                                   'metadata': data})
        for found, text in (
                (line('preflight', 'success', ids_count=1, reasons={}),
                 'ready (1 id)'),
                (line('preflight', 'blocked', ids_count=3, reasons={
                    'server_disabled': 2, 'tool_changed': 1}),
                 'blocked (3 ids): server_disabled x2, tool_changed'),
                (line('sync', 'success', server='s', state='ready'),
                 'ready s'),
                (line('approval', 'success', action='approve',
                      tools=['s:a', 's:b']), 'approve s:a, s:b'),
                (line('contract', 'success', action='added', contract='job',
                      tools=['s:a']), 'added job'),
                (line('contract', 'blocked', contract='job', server='s',
                      tools=[{'id': 's:a', 'event': 'changed'},
                             {'id': 's:b', 'event': 'back'}]),
                 'job: s:a changed, s:b is back'),
                (line('preflight', 'success', ids_count=2, reasons={},
                      contract='job'), 'job: ready (2 ids)')):
            self.assertEqual(found, text)

    def test_activities(self):
        row = {'timestamp': 'T', 'id': 'I', 'type': 'preflight', 'actor':
               'operator\x1b', 'request_id': 'R', 'status': 'success',
               'metadata': {'ids_count': 1, 'reasons': {}}}
        self.assertEqual(
            pf.render_activities({'activities': [row], 'total': 7}),
            'TIME  ID  TYPE       ACTOR         REQUEST ID  WHAT\n'
            'T     I   preflight  operator\\x1b  R           ready (1 id)\n'
            '1 of 7 records\n')


# ==========================================================================
# 14. world to 18. sync: the real thing, and small limits where they are
# patched so that a test need not wait for them
# ==========================================================================

OTHER_UID = 54321               # of nobody: no entry in passwd, no files


class WorldCase(TempCase):
    """A test below the line: files, processes, a database."""

    def patch(self, name, value):
        """Set a name of the program for this test."""
        self.addCleanup(setattr, pf, name, getattr(pf, name))
        setattr(pf, name, value)

    def forked(self, *functions):
        """Run functions in a child process each; returns what they give.

        A PreflightError gives its text. A value must be one of JSON.
        """
        children = []
        for function in functions:
            out, into = os.pipe()
            pid = quiet_fork()
            if not pid:
                self.run_forked(function, into)
            os.close(into)
            children.append((pid, out))
        found = []
        for pid, out in children:
            with os.fdopen(out, 'rb') as file:
                found.append(json.loads(file.read().decode('ascii')))
            os.waitpid(pid, 0)
        return found

    def forked_at_once(self, count, function):
        """Run a function in so many child processes at one moment.

        They start by the clock: a pipe that opens would be one whose
        number a later child uses again.
        """
        together = time.monotonic() + 0.2

        def start():
            time.sleep(max(0, together - time.monotonic()))
            return function()
        return self.forked(*[start] * count)

    def run_forked(self, function, into):
        """Be the child: write what function gives, and be gone."""
        try:
            value = function()
        except pf.PreflightError as exc:
            value = ' '.join((str(exc), exc.hint))
        except BaseException as exc:
            value = 'broken: %r' % (exc,)
        os.write(into, json.dumps(value).encode('ascii'))
        os._exit(0)

    def as_other(self, function):
        """Run a function without rights to what is not open to all."""
        def run():
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(OTHER_UID)
                os.setuid(OTHER_UID)
            return function()
        with pf.FileLock(self.path('x'), self.world()):
            pass                # what it imports is loaded by now
        return self.forked(run)[0]

    def store(self, **more):
        """Open this test's store, closed at the end of the test."""
        store = pf.Store(self.home, self.world(**more))
        self.addCleanup(store.close)
        return store

    def raw(self):
        """Connect to the database behind the program's back."""
        con = sqlite3.connect(os.path.join(self.home, 'preflight.db'),
                              isolation_level=None)
        self.addCleanup(con.close)
        return con

    def count(self, table, home=None):
        """Count the rows of a table."""
        path = os.path.join(home or self.home, 'preflight.db')
        with contextlib.closing(sqlite3.connect(path)) as con:
            return con.execute('select count(*) from ' + table).fetchone()[0]

    def do(self, *words, **more):
        """Run a command in this process; returns its value."""
        verb, options = pf.parse_argv(list(words))
        options.progress = pf.no_progress
        world = more.pop('world', None) or self.world(**more)
        return pf.COMMANDS[verb].run(world, options)

    def refused(self, *words, **more):
        """Run a command that fails; returns its sentence and its hint."""
        with self.assertRaises(pf.PreflightError) as caught:
            self.do(*words, **more)
        return ' '.join((str(caught.exception), caught.exception.hint))

    def wait_for(self, claim):
        """Wait until a claim holds; fails the test when it never does."""
        end = time.monotonic() + 20
        while not claim():
            self.assertLess(time.monotonic(), end, 'waited in vain')
            time.sleep(0.01)

    def pids(self, name='starts'):
        """Give the process ids that a fake server wrote at its starts."""
        try:
            with open(self.path(name), 'rb') as file:
                return [int(word) for word in file.read().split()]
        except FileNotFoundError:
            return []

    def assert_gone(self, pids):
        """Hold processes to having ended; a zombie of init's has."""
        for pid in pids:
            self.wait_for(lambda: not is_running(pid))


def is_running(pid):
    """Tell whether a process is there and is no zombie."""
    try:
        os.kill(pid, 0)
        with open('/proc/%d/stat' % pid, 'rb') as file:
            return file.read().rpartition(b')')[2].split()[0] != b'Z'
    except ProcessLookupError:
        return False
    except FileNotFoundError:   # gone between the two, or no /proc
        return not os.path.exists('/proc/self/stat')


class Test14World(WorldCase):
    """The state directory, its modes, its lock."""

    def test_the_first_place_that_is_given_is_the_home(self):
        env = {'PREFLIGHT_HOME': '/p', 'STATE_DIRECTORY': '/s:/s2',
               'XDG_STATE_HOME': '/x', 'HOME': '/h'}
        for gone, home in (
                ('', '/p'), ('PREFLIGHT_HOME', '/s'),
                ('STATE_DIRECTORY', '/x/preflight'),
                ('XDG_STATE_HOME', '/h/.preflight')):
            env.pop(gone, None)
            with self.subTest(sorted(env)):
                self.assertEqual(pf.state_home(None, env), home)
                self.assertEqual(pf.state_home('/flag', env), '/flag')

    def test_what_is_no_place_is_passed_over(self):
        for env in ({'XDG_STATE_HOME': 'x'}, {'XDG_STATE_HOME': '~/x'},
                    {'PREFLIGHT_HOME': ''}, {'STATE_DIRECTORY': ''}):
            with self.subTest(env):
                self.assertEqual(pf.state_home('', dict(env, HOME='/h')),
                                 '/h/.preflight')

    def test_a_file_is_replaced_whole_and_nothing_else_is(self):
        path = os.path.join(self.dir, 'f')
        for mode, wanted in ((0o600, 0o600), (None, 0o600)):
            pf.replace_file(path, b'new', mode=mode)
            self.assertEqual(os.stat(path).st_mode & 0o777, wanted)
        os.chmod(path, 0o640)
        pf.replace_file(path, b'newer')
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o640)
        self.assertEqual(pf.read_bytes(path), b'newer')
        pipe = os.path.join(self.dir, 'pipe')
        os.mkfifo(pipe)
        for place in pipe, self.dir:
            with self.subTest(place), self.assertRaisesRegex(
                    pf.PreflightError, 'is not a regular file'):
                pf.replace_file(place, b'new')
        self.assertEqual(sorted(os.listdir(self.dir)), ['f', 'pipe'])

    def test_without_a_home_there_is_no_guess(self):
        for env in ({}, {'HOME': ''}, {'HOME': 'h'}, {'HOME': '~'},
                    {'XDG_STATE_HOME': 'x'}):
            with self.subTest(env):
                with self.assertRaises(pf.StoreError) as caught:
                    pf.state_home(None, env)
                self.assertIn('--home', caught.exception.hint)

    def test_a_tilde_that_no_shell_expanded_is_refused(self):
        for flag, env in (('~/x', {}), (None, {'PREFLIGHT_HOME': '~/x'}),
                          (None, {'STATE_DIRECTORY': '~root/x'})):
            with self.subTest(flag, **env):
                with self.assertRaises(pf.StoreError):
                    pf.state_home(flag, dict(env, HOME='/h'))

    def test_no_home_in_the_environment_is_exit_1_and_no_tilde(self):
        self.configure({})
        for words in ([], ['--home=~/x']):
            done = self.run_cli(
                '--config', self.config, 'tools', 'preflight', 's:x', *words,
                env={'HOME': '', 'USERPROFILE': ''}, is_placed=False)
            self.assertEqual((done.code, done.out), (1, ''), done)
            self.assertIn('state directory', done.err)
        self.assertEqual(os.listdir(self.dir), ['config.json'])

    def test_modes_do_not_hang_on_the_umask(self):
        for number, umask in enumerate((0, 0o077, 0o177, 0o777)):
            self.home = self.path(str(number), 'a', 'state')
            before = os.umask(umask)
            try:
                store = self.store()
                with store.write() as con:
                    pf.bump_generation(con)
                    names = sorted(os.listdir(self.home))
                    modes = [self.mode(self.home, name) for name in names]
            finally:
                os.umask(before)
            with self.subTest(umask=oct(umask)):
                self.assertEqual(names, [
                    'preflight.db', 'preflight.db-shm', 'preflight.db-wal',
                    'store.lock'])
                self.assertEqual(modes, [0o600] * 4)
                for place in ('', 'a', 'a/state'):
                    self.assertEqual(self.mode(self.path(str(number)),
                                               place), 0o700)

    def mode(self, *names):
        """Give the permission bits of a path."""
        return stat.S_IMODE(os.stat(os.path.join(*names)).st_mode)

    def test_the_mode_of_a_home_that_is_there_is_left_alone(self):
        os.mkdir(self.home)
        os.chmod(self.home, 0o750)
        pf.make_home(self.home)
        self.assertEqual(self.mode(self.home), 0o750)

    def test_a_home_that_is_a_file_is_named(self):
        self.write('state', 'text')
        for home in (self.home, os.path.join(self.home, 'below')):
            self.home = home
            self.assertIn(self.path('state') + ' is not a directory',
                          self.refused('activity', 'list'))

    @unittest.skipUnless(os.geteuid() == 0, 'root can be another user')
    def test_a_home_of_another_user_is_named_with_the_reason(self):
        self.store().connect()
        os.chmod(self.dir, 0o755)
        for mode, home in ((0o700, self.home), (0o755, self.home),
                           (0o755, self.path('new'))):
            os.chmod(self.path('state'), mode)
            self.home = home
            with self.subTest(oct(mode), home=home):
                why = self.as_other(lambda: self.do('activity', 'list'))
                self.assertIn(home, why)
                self.assertRegex(why, 'denied|unable to open')

    def test_the_lock_keeps_processes_apart(self):
        path = self.write('number', '0')

        def count():
            lock = pf.FileLock(self.path('lock'), self.world())
            for _ in range(50):
                with lock:
                    with open(path) as file:
                        number = int(file.read())
                    with open(path, 'w') as file:
                        file.write(str(number + 1))
        self.assertEqual(self.forked(*[count] * 4), [None] * 4)
        with open(path) as file:
            self.assertEqual(file.read(), '200')

    def test_the_lock_is_not_waited_for_without_end(self):
        self.patch('BUSY_TIMEOUT_MS', 60)
        first, second = (pf.FileLock(self.path('lock'), self.world())
                         for _ in range(2))
        self.addCleanup(first.close)
        self.addCleanup(second.close)
        with first:
            with self.assertRaises(pf.StoreError) as caught:
                second.__enter__()
        self.assertIn('lock was held for 60ms', str(caught.exception))
        with second:
            self.assertFalse(first._take())

    @unittest.skipUnless(hasattr(os, 'O_PATH'), 'needs Linux')
    def test_a_file_that_cannot_be_locked_is_not_called_busy(self):
        lock = pf.FileLock(self.path('lock'), self.world())
        lock.file = os.open(self.write('x', ''), os.O_PATH)
        self.addCleanup(lock.close)
        with self.assertRaises(pf.StoreError) as caught:
            lock.__enter__()
        self.assertIn('cannot lock', str(caught.exception))

    @unittest.skipUnless(os.path.exists('/proc/self/mounts'), 'needs Linux')
    def test_the_file_system_of_a_place_is_known(self):
        self.assertEqual(pf.file_system_of('/proc'), 'proc')
        os.symlink('/proc', self.path('link'))
        self.assertEqual(pf.file_system_of(self.path('link')), 'proc')

    def test_a_config_that_cannot_be_read_is_named(self):
        with self.assertRaises(pf.ConfigError) as caught:
            pf.read_bytes(self.path('none.json'))
        self.assertEqual(
            str(caught.exception), 'cannot read config %s: no such file or '
            'directory' % self.path('none.json'))


class Test15Store(WorldCase):
    """The database: born whole, refused when it is not ours, one lock."""

    def bump(self):
        """Open the store, write once, close it."""
        with pf.Store(self.home, self.world()) as store:
            with store.write() as con:
                pf.bump_generation(con)

    def generation(self):
        """Read the mark that moves with every state write."""
        return self.raw().execute("select value from meta where "
                                  "key='generation'").fetchone()[0]

    def test_thirty_processes_create_it_at_once(self):
        found = self.forked_at_once(30, self.bump)
        self.assertEqual(found, [None] * 30)
        self.assertEqual(self.generation(), 30)
        self.assertEqual(self.raw().execute(
            "select count(*) from sqlite_master where type='table' and "
            "name='tool'").fetchone()[0], 1)

    def test_nothing_is_left_beside_a_closed_database(self):
        self.bump()
        self.assertEqual(sorted(os.listdir(self.home)),
                         ['preflight.db', 'store.lock'])

    def test_it_is_never_seen_half_made(self):
        self.patch('SCHEMA', pf.SCHEMA + ';create table tool(x)')
        with self.assertRaises(pf.StoreError):
            self.bump()
        self.assertNotIn('preflight.db', os.listdir(self.home))
        self.doCleanups()

    def test_what_a_cut_off_creation_left_is_in_nobodys_way(self):
        os.mkdir(self.home)
        for name in ('preflight.db.new', 'preflight.db.new-journal'):
            self.write('state/' + name, b'')
        self.bump()
        self.assertEqual(self.generation(), 1)

    def test_journals_of_one_that_was_moved_aside_are_not_applied(self):
        store = self.store()
        with store.write() as con:
            con.execute("insert into meta values('mark', 1)")
        kept = {}
        for name in ('preflight.db-wal', 'preflight.db-shm'):
            with open(os.path.join(self.home, name), 'rb') as file:
                kept[name] = file.read()
        store.close()
        os.remove(os.path.join(self.home, 'preflight.db'))
        for name, data in kept.items():
            self.write('state/' + name, data)
        self.bump()
        self.assertEqual(self.raw().execute(
            "select count(*) from meta where key='mark'").fetchone()[0], 0)

    def test_it_is_wal_and_synced(self):
        con = self.store().connect()
        self.assertEqual(con.execute('pragma journal_mode').fetchone()[0],
                         'wal')
        self.assertEqual(con.execute('pragma synchronous').fetchone()[0], 2)

    def test_on_a_network_it_is_not_wal(self):
        self.patch('file_system_of', lambda path: 'nfs4')
        con = self.store().connect()
        self.assertEqual(con.execute('pragma journal_mode').fetchone()[0],
                         'delete')
        self.bump()
        self.assertEqual(self.generation(), 1)

    def test_another_schema_is_refused(self):
        self.bump()
        for version in (pf.SCHEMA_VERSION + 1, 0, None, 'x'):
            self.raw().execute("update meta set value=? where key='schema'",
                               (version,))
            with self.subTest(version), self.assertRaises(
                    pf.StoreError) as caught:
                self.bump()
            self.assertIn('has schema %s' % version, str(caught.exception))
        self.assertEqual(self.generation(), 1)

    def test_a_damaged_database_is_named_and_left_alone(self):
        self.bump()
        with open(os.path.join(self.home, 'preflight.db'), 'rb') as file:
            whole = file.read()
        for name, data in (
                ('garbage', b'\x5a' * 8192), ('text', b'not a database\n'),
                ('first page', whole[:4096]), ('cut page', whole[:6000]),
                ('cut head', whole[:50]),
                ('zeroed', whole[:100] + b'\0' * (len(whole) - 100))):
            self.write('state/preflight.db', data)
            for verb in ('read', 'write'):
                with self.subTest(name, verb=verb), \
                        warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter('always')
                    with self.assertRaises(pf.StoreError) as caught:
                        with pf.Store(self.home, self.world()) as store:
                            with getattr(store, verb)() as con:
                                con.execute('select * from activity')
                    self.assertIn(self.home, str(caught.exception))
                self.assertEqual(warned, [])
            with open(os.path.join(self.home, 'preflight.db'), 'rb') as file:
                self.assertEqual(file.read(), data)

    def test_another_programs_database_is_refused(self):
        os.mkdir(self.home)
        self.raw().execute('create table theirs(x)')
        with self.assertRaises(pf.StoreError) as caught:
            self.bump()
        self.assertIn('no such table', str(caught.exception))
        self.assertIn('move it aside', caught.exception.hint)

    def test_what_is_empty_or_no_file_is_damage_and_no_new_database(self):
        os.mkdir(self.home)
        self.write('state/preflight.db', b'')
        with self.assertRaises(pf.StoreError) as caught:
            self.bump()
        self.assertIn('is damaged', str(caught.exception))
        os.unlink(self.path('state', 'preflight.db'))
        os.symlink('nowhere', self.path('state', 'preflight.db'))
        with self.assertRaises(pf.StoreError):
            self.bump()

    def test_a_database_that_may_not_be_written_is_named(self):
        self.bump()
        os.chmod(self.dir, 0o755)
        os.chmod(self.home, 0o777)
        os.chmod(os.path.join(self.home, 'store.lock'), 0o666)
        os.chmod(os.path.join(self.home, 'preflight.db'), 0o444)
        why = self.as_other(self.bump)
        self.assertIn(os.path.join(self.home, 'preflight.db'), why)
        self.assertIn('cannot be written', why)

    def test_one_that_others_hold_is_busy_and_gives_no_verdict(self):
        self.configure({})
        self.bump()
        self.patch('BUSY_TIMEOUT_MS', 60)
        other = self.raw()
        other.execute('begin immediate')
        self.assertIn('preflight.db is busy',
                      self.refused('tools', 'preflight', 's:x'))
        other.execute('rollback')
        self.assertEqual(self.do('tools', 'preflight', 's:x').verdict,
                         'unknown_ids')
        self.assertEqual(self.count('activity'), 1)

    def test_a_close_waits_for_the_lock_as_a_write_does(self):
        self.patch('BUSY_TIMEOUT_MS', 60)
        store = self.store()
        self.addCleanup(store.connect().close)
        lock = pf.FileLock(store.lock.path, self.world())
        self.addCleanup(lock.close)
        with lock:
            with self.assertRaises(pf.StoreError), store.write():
                self.fail('two have the lock')
            with store.read() as con:
                con.execute('select * from tool')
            with self.assertRaises(pf.StoreError):
                store.close()

    def test_a_failure_rolls_back_and_lets_go_of_the_lock(self):
        store = self.store()
        for wrong in (ValueError, KeyboardInterrupt):
            with self.assertRaises(wrong), store.write() as con:
                pf.bump_generation(con)
                raise wrong
        with self.assertRaises(pf.StoreError), store.write() as con:
            pf.bump_generation(con)
            con.execute('select nothing')
        with store.write() as con:
            pf.bump_generation(con)
        self.assertEqual(self.generation(), 1)

    def test_a_process_killed_in_a_transaction_leaves_no_trace(self):
        self.bump()

        def die():
            store = pf.Store(self.home, self.world())
            with store.write() as con:
                pf.bump_generation(con)
                os.kill(os.getpid(), signal.SIGKILL)
        pid = quiet_fork()
        if not pid:
            die()
        os.waitpid(pid, 0)
        self.assertEqual(self.generation(), 1)
        self.bump()
        self.assertEqual(self.generation(), 2)

    def test_a_write_keeps_writers_without_the_lock_out_from_its_start(self):
        store, other = self.store(), None
        with store.write():
            other = self.raw()
            other.execute('pragma busy_timeout=0')
            with self.assertRaises(sqlite3.OperationalError):
                other.execute('begin immediate')
        other.execute('begin immediate')
        other.execute('rollback')

    def test_a_big_servers_names_are_shortlisted(self):
        names = ['tool_%03d' % n for n in range(200)] + ['create_issue']
        tools = [pf.Definition(name, '', '', {}, 'x') for name in names]
        with self.store() as store, store.write() as con:
            pf.take_lease(con, 's', '/c.json', (1, 2, 'd', 'me'))
            row = pf.load_link(con, 's', '/c.json')[0]
            pf.save_tools(con, row, tools, [], 1)
            self.assertEqual(pf.load_names_like(con, row, 'creat_issue')[0],
                             'create_issue')
            self.assertEqual(len(pf.load_names_like(con, row, 'tool_9999',
                                                    20)), 20)
            self.assertEqual(pf.load_names_like(con, row, 'x' * 80), [])
            self.assertEqual(pf.load_homes_of(con, 'tool_007'),
                             [('s', '/c.json')])

    def test_moves_are_counted_in_the_last_looks(self):
        """So that a server that was mended is no longer named."""
        with self.store() as store, store.write() as con:
            pf.take_lease(con, 's', '/c.json', (1, 2, 'd', 'me'))
            row = pf.load_link(con, 's', '/c.json')[0]
            moves = []
            for n in range(55):
                text = n // 2 if n < 30 else 'rests'
                pf.save_tools(con, row, [pf.Definition(
                    't', pf.sha256(str(text)), 'x', {}, '')], [], 1)
                moves.append(pf.load_tools(con, row, 's', 'd')['t'].moves)
        self.assertEqual(moves[:5], [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)])
        self.assertEqual(moves[29], (10, 20))
        self.assertEqual([pf.is_restless(a_tool(moves=found)) for found in (
            moves[29], moves[40], moves[-1])], [True, False, False])
        self.assertEqual(moves[-1], (0, 20))

    def test_a_read_is_one_snapshot(self):
        self.bump()
        store = self.store()
        with store.read() as con:
            seen = [con.execute('select value from meta').fetchall()]
            self.bump()
            seen.append(con.execute('select value from meta').fetchall())
        self.assertEqual(seen[0], seen[1])

    def test_records_do_not_move_the_generation(self):
        self.configure({})
        self.bump()
        self.do('tools', 'preflight', 's:x')
        self.assertEqual(self.generation(), 1)

    def test_sql_stands_in_no_other_section(self):
        with open(SCRIPT, encoding='utf-8') as file:
            lines = file.read().split('\n')
        start = next(n for n, line in enumerate(lines, 1)
                     if line.startswith('# 15. store'))
        end = next(n for n, line in enumerate(lines, 1)
                   if line.startswith('# 16. audit'))
        faults = []
        for node in ast.walk(ast.parse('\n'.join(lines))):
            name, text = getattr(node, 'attr', None), None
            for part in ('value', 's'):     # of a string, by version
                if text is None and part in node._fields:
                    text = getattr(node, part)
            is_sql = name in (
                'execute', 'executemany', 'executescript') or (
                getattr(text, 'id', '') == 'sqlite3' and name != 'Error'
            ) or isinstance(text, str) and (re.match(
                    r'(select|insert|update|delete|create|alter|drop|'
                    r'pragma|vacuum) [ a-z=(*]*\Z', text.split(' from ')[0]))
            if is_sql and not start < node.lineno < end:
                faults.append((node.lineno, name or text))
        self.assertEqual(faults, [])

    def test_nothing_warns(self):
        self.configure({'s': self.serve(tools=[tool()])})
        for words in (['sync'], ['tools', 'preflight', 's:echo']):
            done = subprocess.Popen(
                [sys.executable, '-W', 'error', SCRIPT, '--home', self.home,
                 '--config', self.config] + words, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env=dict(os.environ,
                                                 PYTHONDEVMODE='1'))
            _, err = done.communicate(timeout=60)
            self.assertEqual(done.returncode, 0, err)
            self.assertNotIn(b'Warning', err)

    def limited(self, size, *words):
        """Run the program where no file may grow over a size."""
        import resource
        process = subprocess.Popen(
            [sys.executable, '-S', SCRIPT, '--home', self.home, '--config',
             self.config] + list(words), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_FSIZE, (size, size)))
        out, err = process.communicate(timeout=60)
        return Result(process.returncode, out.decode(), err.decode())

    def test_a_full_disk_is_exit_1_and_no_verdict_without_a_record(self):
        self.configure({'s': self.serve(tools=[tool()])})
        self.do('sync')
        kept = self.do('tools', 'list')
        before, shown = self.count('activity'), 0
        for size in (0, 4096, 20000, 40000):
            done = self.limited(size, 'tools', 'preflight', 's:echo')
            with self.subTest(size):
                if size < 20000:
                    self.assertEqual((done.code, done.out), (1, ''))
                if done.code:
                    self.assertIn(self.home, done.err)
                    self.assertNotIn('Traceback', done.err)
            shown += done.code == 0
            self.assertEqual(self.count('activity'), before + shown)
        self.assertEqual(self.do('tools', 'preflight', 's:echo').verdict,
                         'ready')
        self.assertEqual(self.do('tools', 'list'), kept)
        self.assertTrue(self.do('activity', 'verify')['ok'])

    def test_a_sync_on_a_full_disk_keeps_all_and_leaves_no_child(self):
        entry = self.serve(tools=[tool()])
        self.configure({'s': entry})
        self.do('sync')
        kept = self.do('tools', 'list')
        self.serve(tools=[tool('new')], starts=self.path('starts'))
        done = self.limited(4096, 'sync')
        self.assertEqual((done.code, done.out), (1, ''), done)
        self.assert_gone(self.pids())
        self.assertEqual(self.do('tools', 'list'), kept)

    def test_a_first_start_on_a_full_disk_can_be_made_good(self):
        self.configure({})
        done = self.limited(4096, 'tools', 'preflight', 's:x')
        self.assertEqual((done.code, done.out), (1, ''), done)
        self.assertEqual(self.do('tools', 'preflight', 's:x').verdict,
                         'unknown_ids')

    def test_twenty_checks_beside_a_sync_each_leave_their_record(self):
        servers = {name: self.serve(name, tools=[tool()]) for name in 'stu'}
        self.configure(servers)

        def check(number):
            return self.do('tools', 'preflight', 's:echo', 'u:echo',
                           '--request-id', 'r%d' % number).verdict
        found = self.forked(
            lambda: [row.state for row in self.do('sync')[0]],
            *[lambda n=n: check(n) for n in range(20)])
        self.assertEqual(found[0], ['ready'] * 3)
        self.assertEqual(set(found[1:]) - {'ready', 'degraded_retryable'},
                         set())
        rows = self.do('activity', 'list', '--type', 'preflight', '--limit',
                       '1000')['activities']
        self.assertEqual(sorted(row['request_id'] for row in rows),
                         sorted('r%d' % n for n in range(20)))
        self.assertTrue(self.do('activity', 'verify')['ok'])


# The store of a job with two servers, made by the program of schema 1, in
# /here. notes: add is approved, find changed, drop blocked, late pending,
# old has vanished; docs is switched off; nightly is an agent's token.
SCHEMA_1 = r'''
CREATE TABLE meta(key text primary key, value) without rowid;
CREATE TABLE server(id integer primary key, name text not null,
  file text not null, launch text, state text not null default '',
  cause text, detail text, since integer, observed_at integer,
  listed_at integer, protocol text, era text, ttl integer, stderr text,
  refused text, lease_at integer, lease_until integer, lease_launch text,
  lease_owner text, expires_at integer, unique(name, file));
CREATE TABLE tool(server integer not null, name text not null,
  listed integer not null, hash text not null, version integer not null,
  hints text not null, flaw text not null, changes integer not null,
  first_seen integer not null, last_seen integer not null,
  primary key(server, name)) without rowid;
CREATE INDEX tool_name on tool(name, server, listed);
CREATE TABLE definition(hash text primary key, text text not null);
CREATE TABLE launch(server text not null, digest text not null,
  text text not null, how text not null, at integer not null,
  baselined integer not null, primary key(server, digest)) without rowid;
CREATE TABLE approved(server text not null, launch text not null,
  name text not null, hash text not null, version integer not null,
  hints text not null, at integer not null, how text not null,
  primary key(server, launch, name)) without rowid;
CREATE TABLE block(server text not null, name text not null,
  at integer not null, primary key(server, name)) without rowid;
CREATE TABLE switch(server text not null, file text not null,
  key text not null, value integer not null, over integer not null,
  at integer not null, primary key(server, file, key)) without rowid;
CREATE TABLE activity(seq integer primary key, at integer not null,
  request_id text not null, type text not null, status text not null,
  body text not null, hash text not null);
CREATE TABLE token(name text primary key, digest text not null unique,
  servers text, profile text, required text not null, at integer not null,
  expires_at integer) without rowid;
CREATE INDEX activity_at on activity(at);
CREATE INDEX activity_request on activity(request_id);
insert into meta values('generation', 19);
insert into meta values('schema', 1);
insert into meta values('token_key',
  '0a1cb0deeb8bfbd8c4f25a792d7758411e04af2c0088b894ce21561a3a026e81');
insert into server values(1, 'notes', '/here/config.json',
  'd511a2a052e80205fcac7274b231d0d65af8ea1aeb66d50c0556564fb79accee',
  'ready', '', '', 1750000003000, 1750000007000, 1750000007000,
  '2025-11-25', 'handshake', 0, '', '{}', null, null, null, null, null);
insert into server values(2, 'docs', '/here/config.json',
  '468f1c8617b5dd0377fb2bbf0279f582ab96f2bce8af754008e2e6e19b06015a',
  'ready', '', '', 1750000004000, 1750000004000, 1750000004000,
  '2025-11-25', 'handshake', 0, '', '{}', null, null, null, null, null);
insert into tool values(1, 'add', 1,
  '4f1478402dae4d1ced392e6f92a16791261bd16bfd0a4bb2940c14398305c0f5', 1,
  '{}', '', 0, 1750000003000, 1750000007000);
insert into tool values(1, 'drop', 1,
  'f77a56e8d65af864c4906e6805d1d5ca67ea42fc4086fa531a6b351bffa528d4', 1,
  '{}', '', 0, 1750000003000, 1750000007000);
insert into tool values(1, 'find', 1,
  'e99d18b6223c66fca47fa26875245be5d7394bb481e2bf75ec9652bef04f650e', 1,
  '{"readOnlyHint":true}', '', 1, 1750000003000, 1750000007000);
insert into tool values(1, 'late', 1,
  'a69ad52fe0bd4293b5ef71a6875735b359f4242262bd63a283caab8e86c4e21b', 1,
  '{}', '', 0, 1750000007000, 1750000007000);
insert into tool values(1, 'old', 0,
  '75ec4410bb8a649e5f76fdbc46762ee099242ffc5037f404120c63d0d056b7a4', 1,
  '{}', '', 0, 1750000003000, 1750000003000);
insert into tool values(2, 'search', 1,
  '45ca39147516a5395f6aed49142ed12f50b050fd2ba5b35371221d918332d940', 1,
  '{}', '', 0, 1750000004000, 1750000004000);
insert into definition values(
  '4f1478402dae4d1ced392e6f92a16791261bd16bfd0a4bb2940c14398305c0f5',
  '{"description":"Add a note","inputSchema":{"type":"object"},"nam'||
  'e":"add","v":1}');
insert into definition values(
  '9554f5eb26eb718ce749986b35dab141d60ac5f2da7608d0f7f4a58360ae87a6',
  '{"description":"Find a note","inputSchema":{"type":"object"},"na'||
  'me":"find","v":1}');
insert into definition values(
  'f77a56e8d65af864c4906e6805d1d5ca67ea42fc4086fa531a6b351bffa528d4',
  '{"description":"Drop a note","inputSchema":{"type":"object"},"na'||
  'me":"drop","v":1}');
insert into definition values(
  '75ec4410bb8a649e5f76fdbc46762ee099242ffc5037f404120c63d0d056b7a4',
  '{"description":"Was here","inputSchema":{"type":"object"},"name"'||
  ':"old","v":1}');
insert into definition values(
  '45ca39147516a5395f6aed49142ed12f50b050fd2ba5b35371221d918332d940',
  '{"description":"Search","inputSchema":{"type":"object"},"name":"'||
  'search","v":1}');
insert into definition values(
  'e99d18b6223c66fca47fa26875245be5d7394bb481e2bf75ec9652bef04f650e',
  '{"description":"Find a note; send it on","inputSchema":{"type":"'||
  'object"},"name":"find","v":1}');
insert into definition values(
  'a69ad52fe0bd4293b5ef71a6875735b359f4242262bd63a283caab8e86c4e21b',
  '{"description":"Came later","inputSchema":{"type":"object"},"nam'||
  'e":"late","v":1}');
insert into launch values('docs',
  '468f1c8617b5dd0377fb2bbf0279f582ab96f2bce8af754008e2e6e19b06015a',
  './server docs.spec.json', 'baseline', 1750000004000, 1);
insert into launch values('notes',
  'd511a2a052e80205fcac7274b231d0d65af8ea1aeb66d50c0556564fb79accee',
  './server notes.spec.json', 'baseline', 1750000003000, 1);
insert into approved values('docs',
  '468f1c8617b5dd0377fb2bbf0279f582ab96f2bce8af754008e2e6e19b06015a',
  'search',
  '45ca39147516a5395f6aed49142ed12f50b050fd2ba5b35371221d918332d940', 1,
  '{}', 1750000004000, 'baseline');
insert into approved values('notes',
  'd511a2a052e80205fcac7274b231d0d65af8ea1aeb66d50c0556564fb79accee',
  'add',
  '4f1478402dae4d1ced392e6f92a16791261bd16bfd0a4bb2940c14398305c0f5', 1,
  '{}', 1750000003000, 'baseline');
insert into approved values('notes',
  'd511a2a052e80205fcac7274b231d0d65af8ea1aeb66d50c0556564fb79accee',
  'drop',
  'f77a56e8d65af864c4906e6805d1d5ca67ea42fc4086fa531a6b351bffa528d4', 1,
  '{}', 1750000003000, 'baseline');
insert into approved values('notes',
  'd511a2a052e80205fcac7274b231d0d65af8ea1aeb66d50c0556564fb79accee',
  'find',
  '9554f5eb26eb718ce749986b35dab141d60ac5f2da7608d0f7f4a58360ae87a6', 1,
  '{"readOnlyHint":true}', 1750000003000, 'baseline');
insert into approved values('notes',
  'd511a2a052e80205fcac7274b231d0d65af8ea1aeb66d50c0556564fb79accee',
  'old',
  '75ec4410bb8a649e5f76fdbc46762ee099242ffc5037f404120c63d0d056b7a4', 1,
  '{}', 1750000003000, 'baseline');
insert into block values('notes', 'drop', 1750000009000);
insert into switch values('docs', '/here/config.json', 'enabled', 0, 1,
  1750000010000);
insert into activity values(1, 1750000003000, '', 'sync', 'success',
  '{"id":"01977420e7b8-00000001","type":"sync","source":"cli","time'||
  'stamp":"2025-06-15T15:06:43.000Z","request_id":"","actor":"opera'||
  'tor","status":"success","metadata":{"server":"notes","state":"re'||
  'ady","cause":"","added":[],"changed":[],"vanished":[],"approved"'||
  ':["notes:add","notes:find","notes:drop","notes:old"],"baseline":'||
  'true}}',
  '5c7964a61641e6deb741ee14e5416aaa25201c9749127a408b6172b0cba8f53a');
insert into activity values(2, 1750000004000, '', 'sync', 'success',
  '{"id":"01977420eba0-00000002","type":"sync","source":"cli","time'||
  'stamp":"2025-06-15T15:06:44.000Z","request_id":"","actor":"opera'||
  'tor","status":"success","metadata":{"server":"docs","state":"rea'||
  'dy","cause":"","added":[],"changed":[],"vanished":[],"approved":'||
  '["docs:search"],"baseline":true}}',
  '60dc538529ea262dd8b3b769ecb63a6f4f760a34298bf5160d343e109c51142c');
insert into activity values(3, 1750000007000, '', 'sync', 'success',
  '{"id":"01977420f758-00000003","type":"sync","source":"cli","time'||
  'stamp":"2025-06-15T15:06:47.000Z","request_id":"","actor":"opera'||
  'tor","status":"success","metadata":{"server":"notes","state":"re'||
  'ady","cause":"","added":["notes:late"],"changed":["notes:find"],'||
  '"vanished":["notes:old"],"approved":[],"baseline":false}}',
  '1a5109deaf062c2cba855501f282978ab3aced0232f6ec582bff976233bf4834');
insert into activity values(4, 1750000009000, '', 'approval', 'success',
  '{"id":"01977420ff28-00000004","type":"approval","source":"cli","'||
  'timestamp":"2025-06-15T15:06:49.000Z","request_id":"","actor":"o'||
  'perator","status":"success","metadata":{"action":"block","tools"'||
  ':["notes:drop"]}}',
  'b20bbe70d76225fcfe76ac9db880e4c10b31c41732b5cebfeeefe51ec7d220b7');
insert into activity values(5, 1750000011000, '', 'server', 'success',
  '{"id":"0197742106f8-00000005","type":"server","source":"cli","ti'||
  'mestamp":"2025-06-15T15:06:51.000Z","request_id":"","actor":"ope'||
  'rator","status":"success","metadata":{"action":"disabled","serve'||
  'r":"docs"}}',
  'ef7cc546b2eb985c6d0a1d900283d5e20c301da8d0f620b0c2fc2f96953fffc6');
insert into activity values(6, 1750000013000, '', 'token', 'success',
  '{"id":"019774210ec8-00000006","type":"token","source":"cli","tim'||
  'estamp":"2025-06-15T15:06:53.000Z","request_id":"","actor":"oper'||
  'ator","status":"success","metadata":{"action":"create","token":"'||
  'nightly"}}',
  'a9e2867f1f922428de06d912631d34590e71cb9b1cfb7c5ac61592497ade6c6b');
insert into activity values(7, 1750000015000,
  'dc876b10-3c8b-405d-9da3-c7b09684da1d', 'preflight', 'blocked',
  '{"id":"019774211698-00000007","type":"preflight","source":"cli",'||
  '"timestamp":"2025-06-15T15:06:55.000Z","request_id":"dc876b10-3c'||
  '8b-405d-9da3-c7b09684da1d","actor":"operator","status":"blocked"'||
  ',"metadata":{"verdict":"unknown_ids","ids_count":6,"reasons":{"t'||
  'ool_changed":1,"tool_blocked_by_user":1,"tool_pending_approval":'||
  '1,"not_found":1,"server_disabled":1},"per_tool":[{"id":"notes:ad'||
  'd","status":"ready"},{"id":"notes:find","status":"unavailable","'||
  'reason":"tool_changed"},{"id":"notes:drop","status":"unavailable'||
  '","reason":"tool_blocked_by_user"},{"id":"notes:late","status":"'||
  'unavailable","reason":"tool_pending_approval"},{"id":"notes:old"'||
  ',"status":"unavailable","reason":"not_found"},{"id":"docs:search'||
  '","status":"unavailable","reason":"server_disabled"}]}}',
  'b23e559b8c545adc036adae580ba882d0a12712872e4e5afd754f57e17efbd22');
insert into token values('nightly',
  'dfd69703514f189b35893438b52315cf57c45f0b3307668837f3a374b079e539',
  '["notes"]', null, '[]', 1750000012000, null);
'''
OLD_SECRET = ('pfl_agt_32e6e32cca74a0c3fc5a1ac05e05064f'
              '1413daebf48310a830b01da2b39b35e1')


class Test15Upgrade(WorldCase):
    """A store of every earlier version opens, and keeps what it holds."""

    IDS = ('notes:add', 'notes:find', 'notes:drop', 'notes:late',
           'notes:old', 'docs:search')
    REASONS = ['ready', 'tool_changed', 'tool_blocked_by_user',
               'tool_pending_approval', 'not_found', 'server_disabled']

    def setUp(self):
        super().setUp()
        self.configure({name: {'command': './server', 'args': [
            name + '.spec.json']} for name in ('notes', 'docs')},
            max_age='0')
        os.mkdir(self.home, 0o700)
        self.raw().executescript(SCHEMA_1.replace('/here', self.dir))

    def reasons(self, *words):
        """Check all of the fixture's tools; their reasons."""
        return [answer.reason or 'ready' for answer in self.do(
            'tools', 'preflight', *self.IDS + words).answers]

    def columns(self, home):
        """Give what a database is made of: columns and indexes."""
        path = os.path.join(home, 'preflight.db')
        with contextlib.closing(sqlite3.connect(path)) as con:
            names = con.execute('select name, type from sqlite_master '
                                'order by name').fetchall()
            return {name: con.execute('pragma %s_info(%s)' % (
                kind, name)).fetchall() for name, kind in names}

    def versions(self):
        """Give the hash versions of all rows, seen and approved."""
        return {row[0] for row in self.raw().execute(
            'select version from tool union select version from approved')}

    def meta(self, key):
        """Give one value of the meta table."""
        return self.raw().execute('select value from meta where key=?',
                                  (key,)).fetchone()

    def look(self, *tools):
        """Have a server notes with these tools, and look at it."""
        self.serve('notes', tools=list(tools))
        os.chmod(self.write('server', '#!/bin/sh\nexec %s -I -S fake.py '
                            '"$@"\n' % sys.executable), 0o755)
        return self.do('sync', 'notes')[0][0]

    def test_its_verdicts_are_what_they_were(self):
        self.assertEqual(self.reasons(), self.REASONS)
        self.assertEqual(self.meta('schema'), (pf.SCHEMA_VERSION,))

    def test_its_chain_verifies(self):
        found = self.do('activity', 'verify', '--expect-head', re.findall(
            "'([0-9a-f]{64})'", SCHEMA_1.split('insert into token')[0])[-1])
        self.assertEqual((found['ok'], found['records']), (True, 7))

    def test_moves_are_counted_anew(self):
        """They were a plain count, of nobody knows how many looks."""
        old = self.raw().execute('select max(changes) from tool').fetchone()
        self.assertGreater(old[0], 0)
        with self.store() as store, store.read() as con:
            for name in 'notes', 'docs':
                row = pf.load_link(con, name, self.config)[0]
                self.assertEqual({found.moves for found in pf.load_tools(
                    con, row, name, '').values()}, {(0, 0)})

    def test_its_tokens_are_good(self):
        with self.store() as store, store.write() as con:
            found = pf.load_token(con, pf.hash_token(con, self.world(),
                                                     OLD_SECRET))
        self.assertEqual((found.name, found.servers), ('nightly', ['notes']))

    def test_what_vanished_is_approved_when_it_is_back(self):
        row = self.look(tool('add', 'Add a note'), tool('old', 'Was here'),
                        tool('find', 'Find a note', annotations={
                            'readOnlyHint': True}))
        self.assertEqual((row.state, row.tools), ('ready', 3), row)
        self.assertEqual(self.reasons()[:2] + self.reasons()[4:5],
                         ['ready'] * 3)

    def test_it_has_the_columns_of_a_new_one(self):
        self.reasons()
        fresh = self.path('fresh')
        with pf.Store(fresh, self.world()) as store, store.read():
            pass
        self.assertEqual(self.columns(self.home), self.columns(fresh))

    def test_thirty_processes_may_upgrade_it_at_once(self):
        self.assertEqual(self.forked_at_once(30, self.reasons),
                         [self.REASONS] * 30)
        self.assertTrue(self.do('activity', 'verify')['ok'])

    def test_a_cut_off_upgrade_leaves_the_old_one_whole(self):
        pid = quiet_fork()
        if not pid:
            pf.save_meta = lambda *given: os.kill(os.getpid(),
                                                  signal.SIGKILL)
            self.reasons()
        self.assertEqual(os.waitpid(pid, 0)[1], signal.SIGKILL)
        self.assertEqual(self.meta('schema'), (1,))
        self.assertNotIn('contract', self.columns(self.home))
        self.assertEqual(self.reasons(), self.REASONS)

    def test_a_failed_upgrade_leaves_the_old_one_whole(self):
        before = self.columns(self.home)
        self.patch('UPGRADES', pf.UPGRADES + ('create table tool(x)',))
        self.patch('SCHEMA_VERSION', pf.SCHEMA_VERSION + 1)
        said = self.refused('tools', 'list')
        self.assertIn('already exists', said)
        self.assertEqual(self.columns(self.home), before)
        self.assertEqual(self.meta('schema'), (1,))

    def test_who_may_not_write_is_told_who_upgrades_it(self):
        os.chmod(self.dir, 0o755)
        for name in os.listdir(self.home):
            os.chmod(os.path.join(self.home, name), 0o444)
        os.chmod(self.home, 0o555)
        self.addCleanup(os.chmod, self.home, 0o700)
        said = self.as_other(lambda: self.do('tools', 'list'))
        os.chmod(self.home, 0o700)
        self.assertIn('permission denied', said)
        self.assertIn('An earlier version made it', said)
        self.assertEqual(self.meta('schema'), (1,))

    def test_one_of_a_newer_hash_version_is_refused(self):
        self.reasons()
        self.raw().execute("update meta set value=? where key="
                           "'hash_version'", (pf.HASH_VERSION + 1,))
        self.assertIn('hash version %d' % (pf.HASH_VERSION + 1),
                      self.refused('tools', 'list'))

    def test_an_upgrade_of_what_a_newer_program_made_undoes_nothing(self):
        store = self.store()
        with mock.patch.object(pf.Store, '_upgrade'):
            store.connect()
        self.raw().execute("update meta set value=99 where key='schema'")
        store._upgrade()
        self.assertEqual(self.meta('schema'), (99,))

    # What an upgrade of the hash does

    def test_equal_text_stays_approved_under_another_hash_version(self):
        self.patch('HASH_VERSION', 2)
        self.assertEqual(self.reasons(), self.REASONS)
        self.assertEqual((self.versions(), self.meta('hash_version')),
                         ({2}, (2,)))

    def test_the_next_look_finds_what_was_hashed_anew(self):
        self.reasons()          # of version 1, and up to date
        self.patch('HASH_VERSION', 2)
        row = self.look(tool('add', 'Add a note'), tool('drop',
                                                        'Drop a note'))
        self.assertEqual((row.state, row.changed, row.added),
                         ('ready', [], []))
        self.assertEqual(self.reasons()[0], 'ready')

    def test_a_pin_of_another_version_says_so(self):
        pin = 'notes:add=%s' % self.do('tools', 'show', 'notes:add')['hash']
        self.assertEqual(self.reasons('--pin', pin)[0], 'ready')
        self.patch('HASH_VERSION', 2)
        answer = self.do('tools', 'preflight', 'notes:add', '--pin',
                         pin).answers[0]
        self.assertEqual(answer.reason, 'hash_mismatch')
        self.assertIn('the pin must be renewed', answer.detail)

    def test_what_cannot_be_hashed_anew_is_changed(self):
        for change in ("delete from definition where text like '%Add a%'",
                       "update definition set text=replace(text, 'Add a', "
                       "'Sell a')"):
            self.raw().execute(change)
        self.patch('HASH_VERSION', 2)
        self.assertEqual(self.reasons(), ['tool_changed']
                         + self.REASONS[1:])
        self.assertIn('cannot be approved', self.refused(
            'tools', 'approve', 'notes:add', '--yes'))
        self.assertEqual(self.versions(), {1, 2})
        self.look(tool('add', 'Add a note'))
        self.assertEqual(self.reasons()[0], 'tool_changed')
        self.do('tools', 'approve', 'notes:add', '--yes')
        self.assertEqual(self.reasons()[0], 'ready')

    def test_rows_of_an_older_hash_version_are_brought_up(self):
        con = self.raw()
        for digest, text in con.execute('select * from definition'
                                        ).fetchall():
            text = text.replace('"v":1', '"v":0')
            older = pf.sha256(text)
            con.execute('update definition set hash=?, text=? where hash=?',
                        (older, text, digest))
            for table in ('tool', 'approved'):
                con.execute('update %s set hash=?, version=0 where hash=?'
                            % table, (older, digest))
        self.assertEqual(self.versions(), {0})
        self.assertEqual(self.reasons(), self.REASONS)
        self.assertEqual(self.versions(), {1})
        self.assertEqual(
            self.do('tools', 'show', 'notes:add')['hash'],
            pf.format_hash(1, pf.sha256(pf.definition_text(
                tool('add', 'Add a note')))))


class Test16Audit(WorldCase):
    """The chain: what was changed afterwards is found."""

    def append(self, *times, **more):
        """Append a record for each instant; returns their ids."""
        given = dict(type='preflight', source='cli', request_id='r',
                     actor='operator', status='success', metadata={})
        with self.store() as store, store.write() as con:
            return [pf.append_record(con, pf.Record(
                **dict(given, at=at, **more))) for at in times]

    def verify(self, *words):
        """Run `activity verify`; returns its problems in one text."""
        found = self.do('activity', 'verify', *words)
        self.assertEqual(found['ok'], not found['problems'])
        return '\n'.join(found['problems'])

    def head(self):
        """Give the hash of the newest record."""
        return self.do('activity', 'head')['head']

    def test_a_chain_that_was_left_alone_is_ok(self):
        self.assertEqual(self.verify(), '')
        self.append(1000, 2000, 2000, 1500)
        self.assertEqual(self.verify(), '')
        self.assertEqual(self.verify('--expect-head', self.head()), '')

    def test_any_edit_is_found(self):
        self.append(*range(1000, 1008))
        path = os.path.join(self.home, 'preflight.db')
        with open(path, 'rb') as file:
            whole = file.read()
        for change, place in (
                ("update activity set body=replace(body, 'success', "
                 "'blocked') where seq=3", '3'),
                ("update activity set body='[]' where seq=3", '3'),
                ("update activity set body='{' where seq=3", '3'),
                ("update activity set body=replace(body, 'success', "
                 "char(233)) where seq=3", '3'),
                ("update activity set body=x'00ff' where seq=3", '3'),
                ("update activity set body=7 where seq=3", '3'),
                ('update activity set at=at+1 where seq=3', '3'),
                ("update activity set at='x' where seq=3", '3'),
                ("update activity set request_id='q' where seq=3", '3'),
                ("update activity set type='prune' where seq=3", '3'),
                ("update activity set status='blocked' where seq=3", '3'),
                ("update activity set hash='0' where seq=3", '3'),
                ("update activity set hash=x'00' where seq=3", '3'),
                ("update activity set hash='0' where seq=1", '1'),
                ('delete from activity where seq=4', '4 to 4'),
                ('delete from activity where seq in (4, 5)', '4 to 5'),
                ('delete from activity where seq<3', '3'),
                ('update activity set seq=seq+100 where seq=8', '8 to 107'),
                ('update activity set seq=-seq where seq=5', '-5'),
                ('insert into activity select -1, at, request_id, type, '
                 'status, body, hash from activity where seq=8', '-1'),
                ("insert into activity select 9, at, request_id, type, "
                 "status, body, hash from activity where seq=8", '9')):
            self.write('state/preflight.db', whole)
            con = self.raw()
            con.execute(change)
            con.close()
            with self.subTest(change):
                self.assertRegex(self.verify(), r'(?<![\w-])%s\b' % place)

    def test_rows_that_changed_places_are_found(self):
        self.append(1000, 2000, 3000)
        con = self.raw()
        for old, new in ((2, 9), (3, 2), (9, 3)):
            con.execute('update activity set seq=? where seq=?', (new, old))
        self.assertIn('record 2 ', self.verify())

    def test_a_cut_tail_is_found_by_a_head_noted_earlier(self):
        self.append(1000, 2000)
        noted = self.head()
        self.append(3000)
        self.assertEqual(self.verify('--expect-head', noted), '')
        self.raw().execute('delete from activity where seq>1')
        self.assertEqual(self.verify(), '')
        self.assertIn(noted, self.verify('--expect-head', noted))

    def test_a_cut_tail_that_was_written_anew_is_found(self):
        self.append(1000, 2000)
        noted = self.head()
        self.raw().execute('delete from activity where seq=2')
        self.append(2001)
        self.assertEqual(self.verify(), '')
        self.assertIn(noted, self.verify('--expect-head', noted))

    def prune(self, before):
        """Prune the records before an instant; returns how many went."""
        store = self.store(now=lambda: 9000)
        return pf.prune_records(store, before, 'operator')

    def test_a_prune_in_steps_can_be_verified(self):
        self.patch('PRUNE_STEP', 3)
        self.append(*range(1000, 1010))
        self.assertEqual(self.prune(1008), 8)
        self.assertEqual(self.verify(), '')
        rows = self.do('activity', 'list')['activities']
        self.assertEqual([row['type'] for row in rows],
                         ['prune'] * 3 + ['preflight'] * 2)
        self.assertEqual([row['metadata']['last_seq'] for row in rows[:3]],
                         [8, 6, 3])

    def test_after_a_prune_a_removed_record_still_shows(self):
        self.append(*range(1000, 1010))
        self.prune(1005)
        self.raw().execute('delete from activity where seq=6')
        self.assertIn('no prune record', self.verify())

    def test_an_edited_prune_record_is_found(self):
        self.append(*range(1000, 1010))
        self.prune(1005)
        for body in ('{', '{"metadata":7}', "{}"):
            self.raw().execute("update activity set body=? where "
                               "type='prune'", (body,))
            with self.subTest(body):
                self.assertIn('record 11 was edited', self.verify())

    def test_all_but_the_trace_of_it_can_be_pruned(self):
        self.append(1000, 2000)
        self.assertEqual(self.prune(9000), 2)
        self.assertEqual(self.verify(), '')
        self.append(9001)
        self.assertEqual(self.prune(9001), 1)
        self.assertEqual(self.verify(), '')
        self.assertEqual(self.count('activity'), 2)

    def test_there_is_no_trace_where_nothing_was_pruned(self):
        self.append(2000)
        self.assertEqual(self.prune(2000), 0)
        self.assertEqual(self.count('activity'), 1)

    def test_a_head_that_was_just_pruned_still_counts(self):
        self.append(1000, 2000)
        noted = self.head()
        self.append(3000)
        self.prune(2500)
        self.assertEqual(self.verify('--expect-head', noted), '')

    def test_a_prune_keeps_what_came_before_the_end(self):
        self.append(1000, 5000, 2000)
        self.assertEqual(self.prune(3000), 1)
        self.assertEqual(self.verify(), '')

    def test_ids_sort_by_time_and_then_by_place(self):
        ids = self.append(1, 255, 256, 256, 1790000000000, 1790000000001)
        self.assertEqual(ids, sorted(set(ids)))
        self.assertEqual(self.do('activity', 'show', ids[2])['activity'][
            'timestamp'], '1970-01-01T00:00:00.256Z')

    def test_records_are_found_by_what_they_say(self):
        self.append(1000, 2000)
        self.append(3000, type='sync', status='blocked', request_id='q')
        for words, total in (
                ([], 3), (['--type', 'sync'], 1), (['--type', 'x'], 0),
                (['--status', 'success'], 2), (['--request-id', 'q'], 1),
                (['--since', '1970-01-01T00:00:02Z'], 2),
                (['--until', '1970-01-01T00:00:02Z'], 1),
                (['--type', 'sync', '--status', 'success'], 0)):
            with self.subTest(words):
                found = self.do('activity', 'list', *words)
                self.assertEqual(found['total'], total)
                self.assertEqual(len(found['activities']), total)

    def test_the_newest_records_come_first(self):
        self.append(1000, 2000, 3000)
        found = self.do('activity', 'list', '--limit', '1', '--offset', '1')
        self.assertEqual(found['total'], 3)
        self.assertEqual([row['timestamp'][17:] for row in
                          found['activities']], ['02.000Z'])

    def test_foreign_text_sinks_no_transaction(self):
        self.configure({})
        odd = 's:\udcff\0\u2028\U0001f600'
        self.do('tools', 'preflight', odd)
        row = self.do('activity', 'list')['activities'][0]
        self.assertEqual(row['metadata']['per_tool'][0]['id'], odd)
        self.assertEqual(self.verify(), '')

    def test_a_record_goes_with_its_transaction(self):
        with self.assertRaises(ValueError):
            with self.store() as store, store.write() as con:
                pf.append_record(con, pf.Record('sync', 'cli', 1, '', 'x',
                                                'success', {}))
                raise ValueError
        self.assertEqual(self.count('activity'), 0)


NOISE = 'Starting\n\n[INFO] {not json}\n12345\n\xff\xfe\x97 bytes\n'
LIST_CHANGED = {'method': 'notifications/tools/list_changed'}


def reply_text(tools, ending='\n', opening=''):
    """Write a reply to tools/list as a raw answer of the fake server."""
    return {'raw': '%s{"jsonrpc":"2.0","id":@ID@,"result":{"tools":%s}}%s' % (
        opening, tools, ending)}


class LookCase(WorldCase):
    """A test that looks at a fake server."""

    def serve(self, name='s', **spec):
        """As in TempCase, with an interpreter that starts fast."""
        entry = super().serve(name, **spec)
        entry['args'].insert(0, '-IS')
        return entry

    def setUp(self):
        super().setUp()
        self.patch('GRACE_MS', 100)
        self.patch('QUIET_MS', 40)

    def server(self, entry, name='s'):
        """Read one entry of a config of ours into a Server."""
        path = self.configure({name: entry})
        config = pf.read_config([(path, path, pf.read_bytes(path))])
        server, why = pf.look_up(config, name)
        self.assertFalse(why)
        return server

    def look(self, entry=None, limit=20, **spec):
        """Look at a fake server, or an entry: an Observation."""
        era, env = spec.pop('era', None), spec.pop('env', {})
        world = self.world(env=dict(os.environ, **env),
                           clock=spec.pop('clock', time.monotonic))
        entry = entry or self.serve(starts=self.path('starts'), **spec)
        start = world.clock()
        seen = pf.observe_server(self.server(entry), era, (
            start + spec.get('opening', limit), start + limit), world)
        self.assert_gone(self.pids())
        return seen

    def names(self, seen):
        """Give the names a look listed, which must have been a good one."""
        self.assertEqual((seen.state, seen.detail), ('ready', ''))
        return [item.name for item in seen.tools]

    def fails(self, seen, cause, *parts):
        """Hold a look to having failed for a cause, and to its words."""
        self.assertEqual((seen.state, seen.cause), ('error', cause),
                         seen.detail)
        self.assertIsNone(seen.tools)
        for part in parts:
            self.assertIn(part, seen.detail)

    def asked(self):
        """List the messages that the fake server logged."""
        with open(self.path('log')) as file:
            return [json.loads(line) for line in file]


class Test17Links(LookCase):
    """One server that is our child, and all that it may do wrong."""

    def test_a_server_that_does_nothing_wrong(self):
        seen = self.look(tools=[tool('a'), tool('b')], log=self.path('log'))
        self.assertEqual(self.names(seen), ['a', 'b'])
        self.assertEqual((seen.protocol, seen.era, seen.warnings,
                          seen.stderr), ('2025-11-25', 'handshake', [], ''))
        self.assertEqual([row['method'] for row in self.asked()],
                         ['initialize', 'notifications/initialized',
                          'tools/list'])
        self.assertEqual(len(self.pids()), 1)

    def test_noise_on_stdout_is_counted_and_survived(self):
        seen = self.look(noise=NOISE, tools=[tool()])
        self.assertEqual(self.names(seen), ['echo'])
        self.assertEqual(seen.warnings, ['5 non-protocol lines on stdout'])

    def test_endless_noise_is_cut_off(self):
        for size in (0, 2000):
            lines = min(pf.MAX_NOISE_LINES,
                        pf.MAX_NOISE_BYTES // (size or 1)) + 1
            with self.subTest(size):
                self.fails(self.look(flood=('x' * size + '\n') * 50),
                           'protocol', '%d non-protocol lines on stdout and '
                           'no message' % lines)

    def test_a_line_without_an_end_is_refused(self):
        self.patch('MAX_MESSAGE_BYTES', 200000)
        self.fails(self.look(flood='x' * 5000), 'protocol',
                   'a message is larger than 200000 bytes')

    def test_a_message_over_the_cap_is_refused(self):
        self.patch('MAX_MESSAGE_BYTES', 200000)
        self.fails(self.look(tools=[tool('a', 'x' * 400000)]), 'protocol',
                   'a message is larger than 200000 bytes')

    def test_a_line_of_3_mb_works(self):
        seen = self.look(tools=[tool('big', 'A' * 3000000)])
        self.assertEqual(self.names(seen), ['big'])

    def test_a_flood_on_stderr_blocks_nobody(self):
        seen = self.look(stderr='E x\n' * 250000 + 'end\n', tools=[tool()])
        self.assertEqual(self.names(seen), ['echo'])
        self.assertEqual(len(seen.stderr), pf.STDERR_TAIL_BYTES)
        self.assertTrue(seen.stderr.endswith('E x\nend\n'))

    def test_of_stderr_no_more_is_held_than_is_of_use(self):
        entry = self.serve(stderr='E' * 200000, die='start')
        world = self.world()
        link = pf.ChildLink([entry['command']] + entry['args'], self.dir,
                            dict(os.environ), world)
        try:
            link.open()
            with self.assertRaises(pf.UpstreamError):
                link.receive(world.clock() + 20)
            self.assertEqual(len(link.tail), 2 * pf.STDERR_TAIL_BYTES)
        finally:
            link.close()

    def test_stderr_is_shown_masked_and_never_in_halves(self):
        entry = dict(self.serve(stderr='x' * 9000 + ' my-own-thing y\n'
                                + 'z' * (pf.STDERR_TAIL_BYTES - 8) + '\n',
                                die='initialize'),
                     env={'ANY': 'my-own-thing'})
        seen = self.look(entry)
        self.assertNotIn('thing', seen.stderr)
        self.assertIn('*** y\n', seen.stderr)

    def test_a_secret_at_the_cut_of_the_last_line_is_masked(self):
        entry = dict(self.serve(stderr='x' * 290 + ' my-own-thing\n',
                                die='initialize'),
                     env={'ANY': 'my-own-thing'})
        self.assertTrue(self.look(entry).detail.endswith('xx ***'))

    def test_what_a_variable_put_into_an_argument_is_masked(self):
        entry = self.serve(die='initialize', stderr='bad: hush-hush-1\n')
        entry['args'].append('--with=${MY_THING}')
        seen = self.look(entry, env={'MY_THING': 'hush-hush-1'})
        self.fails(seen, 'exited', 'last stderr: bad: ***')
        self.assertNotIn('hush', repr(seen))

    def test_a_key_in_base64_is_no_path(self):
        for value, shown in (('/w8aXyB3pQ+L0m9zRt5v', '***'), (
                '/run/secrets/github-key', '/run/secrets/github-key')):
            entry = dict(self.serve(die='initialize', stderr='bad: ' + value),
                         env={'ANY_KEY': value})
            self.fails(self.look(entry), 'exited', 'last stderr: bad: '
                       + shown)

    def test_what_chooses_code_is_no_secret(self):
        entry = dict(self.serve(die='initialize', stderr='bad: --trace-x'),
                     env={'NODE_OPTIONS': '--trace-x'})
        self.fails(self.look(entry), 'exited', 'last stderr: bad: --trace-x')

    def test_an_exit_before_initialize_is_told_at_once(self):
        stderr = 'line\nFATAL: API_KEY is not set: sk-live-SECRET\n\n'
        for stage in ('start', 'initialize'):
            with self.subTest(stage):
                self.fails(
                    self.look(die=stage, stderr=stderr, limit=60), 'exited',
                    'exited with code 3 before initialize; last stderr: '
                    'FATAL: API_KEY is not set: ***')

    def test_an_exit_between_initialize_and_the_list(self):
        seen = self.look(die='tools/list', code=0, stderr='bye', limit=60)
        self.fails(seen, 'exited', 'exited with code 0 before its list was '
                   'complete; last stderr: bye')
        self.assertEqual(len(self.pids()), 1)

    def test_a_death_by_signal_is_told(self):
        for number in (signal.SIGKILL, signal.SIGTERM):
            seen = self.look(die='initialize', signal=number, limit=60)
            self.fails(seen, 'exited', 'killed by signal %d before '
                       'initialize' % number)

    def test_closed_output_is_told_at_once(self):
        entry = {'command': 'sh', 'args': ['-c', 'exec >&- 2>&-; sleep 20']}
        self.fails(self.look(entry, limit=60), 'exited', 'closed its output')

    def test_last_words_after_a_closed_output_are_heard(self):
        entry = {'command': 'sh', 'args': [
            '-c', 'exec >&-; sleep 0.1; echo last words >&2; exit 4']}
        self.fails(self.look(entry), 'exited', 'exited with code 4 before '
                   'initialize; last stderr: last words')

    def test_a_command_that_is_not_there(self):
        entry = {'command': 'no-such-thing', 'env': {'PATH': '/a:/b'}}
        self.fails(self.look(entry), 'command_not_found',
                   "command 'no-such-thing' not found; PATH was /a:/b; ")

    def test_crons_bare_path_is_named(self):
        seen = self.look({'command': 'no-such-npx'},
                         env={'PATH': '/usr/bin:/bin'})
        self.fails(seen, 'command_not_found', "command 'no-such-npx' not "
                   'found; PATH was /usr/bin:/bin; give an absolute path or '
                   'set env.PATH')

    def test_a_command_is_looked_up_in_the_servers_own_path(self):
        os.mkdir(self.path('bin'))
        self.serve(tools=[tool()])
        self.script('bin/my-server')
        for place in (self.path('bin'), 'bin', '/none:bin'):
            entry = {'command': 'my-server', 'env': {'PATH': place}}
            with self.subTest(place):
                self.assertEqual(self.names(self.look(entry)), ['echo'])

    def script(self, name, text='exec %s -IS %s %s'):
        """Write a shell script that becomes the fake server."""
        self.write(name, '#!/bin/sh\n' + text % tuple(
            map(shlex.quote, (sys.executable, self.path('fake.py'),
                              self.path('s.spec.json')))))
        os.chmod(self.path(name), 0o755)

    def test_a_command_with_a_slash_is_relative_to_the_config(self):
        self.serve(tools=[tool()])
        self.script('my-server')
        seen = self.look({'command': './my-server'})
        self.assertEqual(self.names(seen), ['echo'])

    def test_a_command_that_cannot_be_run(self):
        self.write('plain', 'text')
        self.write('orphan', '#!/no/such/interpreter\n')
        self.write('junk', b'\0\1\2')
        os.chmod(self.path('orphan'), 0o755)
        os.chmod(self.path('junk'), 0o755)
        for name, why in (('./none', 'not found'),
                          ('./plain', 'is not executable'),
                          ('./', 'is not executable'),
                          ('./orphan', 'no such file'),
                          ('./junk', 'cannot be started: exec format')):
            with self.subTest(name):
                self.fails(self.look({'command': name}), 'command_not_found',
                           self.path(name), why)

    def test_a_directory_to_start_in_that_is_not_there(self):
        entry = dict(self.serve(tools=[tool()]), cwd='gone')
        self.fails(self.look(entry), 'command_not_found', self.path('gone'))

    def test_bytes_no_system_takes_cost_only_this_server(self):
        for more in ({'args': ['a\0b']}, {'env': {'A=B': 'x'}},
                     {'env': {'A': '\ud800'}}, {'args': ['\ud800']}):
            with self.subTest(more):
                seen = self.look(dict({'command': 'true'}, **more))
                self.assertEqual(seen.state, 'error')

    def test_it_starts_in_its_cwd_with_its_own_environment(self):
        os.mkdir(self.path('sub'))
        entry = self.serve(tools=[tool()])
        entry = {'command': 'sh', 'cwd': 'sub', 'env': {
            'OWN': '1', 'GONE': None, 'BOTH': 'new'}, 'args': [
                '-c', 'pwd -P > where; env > env; exec "$0" "$@"',
                entry['command']] + entry['args']}
        self.names(self.look(entry, env={
            'PREFLIGHT_API_KEY': 'k', 'GONE': 'x', 'BOTH': 'old',
            'KEPT': 'yes', 'BROWSER': 'firefox'}))
        with open(self.path('sub', 'where')) as file:
            self.assertEqual(file.read().strip(), self.path('sub'))
        with open(self.path('sub', 'env')) as file:
            env = dict(line.rstrip('\n').partition('=')[::2]
                       for line in file)
        self.assertEqual([env.get(name) for name in (
            'OWN', 'GONE', 'BOTH', 'KEPT', 'BROWSER', 'PYTHONUTF8',
            'PREFLIGHT_API_KEY')],
            ['1', None, 'new', 'yes', 'true', '1', None])

    def test_a_reply_that_is_not_utf_8_is_refused(self):
        answer = reply_text('[{"name":"caf\xe9"}]')
        self.fails(self.look(answers={'tools/list': answer}), 'protocol',
                   'the reply is not UTF-8')

    def test_carriage_returns_and_a_byte_order_mark_are_dropped(self):
        answer = reply_text('[{"name":"a"}]', '\r\n', '\xef\xbb\xbf')
        seen = self.look(answers={'tools/list': answer})
        self.assertEqual(self.names(seen), ['a'])
        self.assertEqual(seen.warnings, [])

    def test_a_reply_cut_inside_a_character_is_put_together(self):
        answer = reply_text('[{"name":"caf\xc3@PAUSE@\xa9"}]')
        seen = self.look(answers={'tools/list': answer})
        self.assertEqual(self.names(seen), ['caf\xe9'])

    def test_two_messages_in_one_write_are_two(self):
        answer = reply_text('[{"name":"a"}]', opening='{"jsonrpc":"2.0",'
                            '"method":"notifications/message"}\n')
        self.assertEqual(self.names(self.look(
            answers={'tools/list': answer})), ['a'])

    def test_an_answer_to_an_earlier_request_is_not_the_one(self):
        late = {'id': 1, 'result': {'tools': [tool('late')]}}
        seen = self.look(before={'tools/list': [late, dict(late, id=77)]},
                         tools=[tool('now')])
        self.assertEqual(self.names(seen), ['now'])

    def test_ids_that_come_back_as_text_count(self):
        self.assertEqual(self.names(self.look(ids='text', tools=[tool()])),
                         ['echo'])

    def test_a_server_that_does_not_echo_ids_is_refused(self):
        for ids in ('null', 'zero'):
            with self.subTest(ids):
                self.fails(self.look(ids=ids, tools=[tool()]), 'protocol',
                           'the server does not echo request ids')

    def test_what_the_server_asks_is_answered_and_never_acted_upon(self):
        self.patch('GRACE_MS', 20000)
        asks = [{'id': word, 'method': word} for word in (
            'ping', 'roots/list', 'elicitation/create',
            'sampling/createMessage')]
        no = {'code': -32601, 'message': 'Method not found'}
        uri = {'roots': [{'uri': 'file://' + self.dir}]}
        for client, wanted in (
                (None, {'ping': {}, 'roots/list': no,
                        'elicitation/create': no}),
                ('claude-code', {'ping': {}, 'roots/list': uri,
                                 'elicitation/create': {
                                     'action': 'decline'}})):
            log = self.write('log', '')
            entry = dict(self.serve(before={'tools/list': asks}, log=log,
                                    tools=[tool()]), client=client)
            self.names(self.look(entry))
            replies = {row['id']: row.get('result', row.get('error'))
                       for row in self.asked() if 'method' not in row}
            with self.subTest(client):
                self.assertEqual(replies, dict(
                    wanted, **{'sampling/createMessage': no}))

    def test_a_server_that_asks_and_never_reads_is_cut_off(self):
        self.patch('MAX_NOISE_BYTES', 20000)
        ask = '{"jsonrpc":"2.0","id":"x","method":"ping"}\n'
        self.fails(self.look(flood=ask * 100), 'protocol',
                   'it does not read its input')

    def test_a_storm_of_list_changed_lists_again_once(self):
        seen = self.look(before={'tools/list': [LIST_CHANGED] * 7},
                         tools=[tool()], log=self.path('log'))
        self.assertEqual(self.names(seen), ['echo'])
        self.assertEqual([row['method'] for row in self.asked()].count(
            'tools/list'), 2)

    def test_a_list_changed_before_the_first_list_is_no_reason(self):
        self.look(before={'initialize': [LIST_CHANGED] * 7}, tools=[tool()],
                  log=self.path('log'))
        self.assertEqual([row['method'] for row in self.asked()].count(
            'tools/list'), 1)

    def test_no_answer_is_a_time_out_and_the_child_is_gone(self):
        for stage in ('initialize', 'tools/list'):
            def clock():        # it is late once the server is asked
                return time.monotonic() + 99 * (stage in self.methods())
            with self.subTest(stage):
                self.fails(self.look(
                    sleep={stage: 60}, limit=50, log=self.write('log', ''),
                    stderr='still busy', clock=clock), 'timeout',
                    'no answer to %s within 1m' % stage,
                    'last stderr: still busy')

    def test_the_first_reply_has_a_deadline_of_its_own(self):
        for stage, cause in (('initialize', 'timeout'), ('tools/list', '')):
            def clock():
                return time.monotonic() + 50 * (stage in self.methods())
            with self.subTest(stage):
                self.assertEqual(self.look(
                    limit=200, opening=30, sleep={stage: 0.2}, clock=clock,
                    tools=[tool()], log=self.write('log', '')).cause, cause)

    def methods(self):
        """List the methods that the fake server was asked so far."""
        with open(self.path('log')) as file:
            return re.findall('"method": "([^"]+)"', file.read())

    def test_dribbling_does_not_put_the_deadline_off(self):
        ping = '{"jsonrpc":"2.0","method":"notifications/message"}\n'
        for flood in ('x', ping, '\n'):
            with self.subTest(flood):
                self.fails(self.look(flood=flood, pause=0.02, limit=0.2),
                           'timeout', 'no answer to initialize')

    def test_servers_that_do_not_want_to_end_are_ended(self):
        for spec in ({'ignore_term': True}, {'no_eof': True},
                     {'ignore_term': True, 'flood': 'x\n' * 50}):
            sent, kill = [], os.killpg
            with self.subTest(spec), mock.patch.object(
                    os, 'killpg', lambda pid, number: sent.append(number)
                    or kill(pid, number)):
                seen = self.look(tools=[tool()], **spec)
                self.assertEqual(seen.state, 'error' if 'flood' in spec
                                 else 'ready')
                self.assertEqual(sent, [signal.SIGTERM, signal.SIGKILL])

    def test_grandchildren_are_gone_too(self):
        for more, cause in (({}, ''), ({'no_eof': True}, ''),
                            ({'die': 'tools/list'}, 'exited')):
            held = self.path('held')
            seen = self.look(grandchild=held, tools=[tool()], **more)
            with self.subTest(more):
                self.assertEqual(seen.cause, cause)
                self.assert_gone(self.pids('held'))
        inner = self.serve(grandchild=held, tools=[tool()])
        words = [inner['command']] + inner['args']
        seen = self.look({'command': 'sh', 'args': [
            '-c', ' '.join(map(shlex.quote, words)) + '; true']})
        self.assertEqual(self.names(seen), ['echo'])
        self.assert_gone(self.pids('held'))

    def test_no_descriptor_is_left_open(self):
        self.look(tools=[tool()])
        before = set(os.listdir('/dev/fd'))
        self.look(tools=[tool()])
        self.look(die='initialize')
        self.look({'command': './none'})
        self.look({'command': 'true', 'cwd': 'gone'})
        self.assertEqual(len(os.listdir('/dev/fd')), len(before))

    def test_where_no_descriptors_are_left_that_is_told(self):
        import resource
        server = self.server(self.serve(tools=[tool()]))

        def starve():
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            held, found, world = [], [], self.world()
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for free in (0, 1, 2, 3, 4, 5, 6, len(held) - 21):
                for _ in range(free):   # Popen itself leaks some, by version
                    os.close(held.pop())
                end = world.clock() + 20
                seen = pf.observe_server(server, None, (end, end), world)
                found.append([seen.cause, seen.detail])
            return found
        found = self.forked(starve)[0]
        full = ['exited', 'could not be started: too many open files']
        self.assertEqual((found[0], found[-1]), (full, ['', '']))
        self.assertEqual([one for one in found if one not in (
            full, ['', ''])], [])

    def test_only_the_commands_own_faults_are_laid_to_it(self):
        for name, cause in (
                ('ENOENT', 'command_not_found'), ('EACCES',
                                                  'command_not_found'),
                ('ENOEXEC', 'command_not_found'), ('EMFILE', 'exited'),
                ('ENFILE', 'exited'), ('ENOMEM', 'exited'),
                ('EAGAIN', 'exited'), ('E2BIG', 'exited'),
                ('ETXTBSY', 'exited')):
            number = getattr(errno, name)
            fault = pf.start_error(OSError(number, os.strerror(number)), 'c')
            with self.subTest(name):
                self.assertEqual(fault.cause, cause)
                self.assertIn(os.strerror(number).lower(), str(fault))
                self.assertEqual('command c' in str(fault),
                                 cause == 'command_not_found')

    def test_a_stop_ends_the_look(self):
        world = self.world()
        server = self.server(self.serve(sleep={'initialize': 60},
                                        starts=self.path('starts')))

        def stop():
            self.wait_for(self.pids)
            world.stop.append(15)
        thread = threading.Thread(target=stop)
        thread.start()
        end = world.clock() + 60
        with self.assertRaises(pf.Interrupted):
            pf.observe_server(server, None, (end, end), world)
        thread.join()
        self.assert_gone(self.pids())


# A stand-in for docker. What it starts runs in a session of its own, is told
# by an id, and outlives its client; its calls stand in a log.
FAKE_DOCKER = r'''#!%s -IS
import json, os, signal, subprocess, sys, time
HERE = os.path.dirname(os.path.abspath(sys.argv[0]))
SPEC = json.load(open(os.path.join(HERE, 'spec.json')))
args = sys.argv[1:]
with open(os.path.join(HERE, 'calls'), 'a') as file:
    file.write(json.dumps([args, os.environ.get('MARK')]) + '\n')
while args[0] in ('-H', '--context', 'container'):
    args = args[1 if args[0] == 'container' else 2:]
def state(name):
    return os.path.join(HERE, 'held-' + name)
def kill(name):
    with open(state(name)) as file:
        pid = int(file.read())
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
if args[0] != 'run':
    if SPEC.get('hang') == args[0]:
        time.sleep(60)
    if SPEC.get('fail') == args[0] or not os.path.exists(state(args[-1])):
        sys.exit('Error: No such container: ' + args[-1])
    kill(args[-1])
    if args[0] == 'rm':
        os.remove(state(args[-1]))
    sys.exit(0)
if SPEC.get('away'):
    sys.stderr.write(SPEC['away'] + '\n')
    sys.exit(SPEC.get('code', 125))
name, inner, at = os.urandom(32).hex(), subprocess.DEVNULL, 1
while args[at][:1] == '-':
    if args[at] == '-i':
        inner = None
    if args[at] in ('--cidfile', '-e'):
        at += 1
        if args[at - 1] == '--cidfile':
            try:
                with open(args[at], 'x') as file:
                    file.write(name)
            except FileExistsError:
                sys.stderr.write('docker: container ID file found\n')
                sys.exit(125)
    at += 1
if SPEC.get('slow'):
    time.sleep(SPEC['slow'])
out = None
if SPEC.get('detach'):
    inner = out = subprocess.DEVNULL
server = subprocess.Popen([sys.executable, '-IS'] + SPEC['server'],
                          stdin=inner, stdout=out, stderr=out,
                          start_new_session=True)
with open(state(name), 'w') as file:
    file.write(str(server.pid))
if SPEC.get('detach'):
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *given: server.terminate())
code = server.wait()
if '--rm' in args:
    os.remove(state(name))
sys.exit(code if code >= 0 else 128 - code)
''' % sys.executable


class Test17Commands(LookCase):
    """feed_command: one run of a command of the operator's."""

    def feed(self, code, *words, **more):
        """Run Python code with 200 kB on its stdin; what failed."""
        data = more.pop('data', b'x' * 200000)
        return pf.feed_command([sys.executable, '-ISc', code] + list(words),
                               data, self.world(**more))

    def test_it_is_given_all_of_its_input(self):
        self.assertEqual(self.feed(
            'import sys; open(sys.argv[1], "wb").write('
            'sys.stdin.buffer.read())', self.path('got')), '')
        with open(self.path('got'), 'rb') as file:
            self.assertEqual(file.read(), b'x' * 200000)

    def test_its_environment_has_no_secret_of_ours(self):
        self.assertEqual(self.feed(
            'import os, sys; sys.exit(sorted(n for n in os.environ '
            'if n[:3] in ("PRE", "KEE")) != ["KEEP"])',
            env={'PREFLIGHT_API_KEY': 'k', 'KEEP': '1'}), '')

    def test_what_fails_is_named(self):
        for code, said in (
                ('import sys; sys.stderr.write("a\\nlast\\n"); sys.exit(3)',
                 'exited with code 3: last'),
                ('import os; os.kill(os.getpid(), 9)',
                 'was killed by signal 9')):
            with self.subTest(code):
                self.assertEqual(self.feed(code), said)
        self.assertIn('not found', pf.feed_command(['no-such-command'], b'',
                                                   self.world()))

    def test_input_that_nobody_reads_is_no_failure(self):
        self.assertEqual(self.feed('pass'), '')

    def test_a_flood_of_output_is_dropped(self):
        self.assertEqual(self.feed('print("y" * 3000000)'), '')

    def test_one_that_hangs_ends_with_all_it_started(self):
        self.patch('NOTIFY_MS', 400)
        said = self.feed(
            'import os, subprocess, sys, time; it = subprocess.Popen(['
            'sys.executable, "-ISc", "import time; time.sleep(60)"]); '
            'open(sys.argv[1], "w").write("%d %d" % (it.pid, os.getpid())); '
            'time.sleep(60)', self.path('starts'))
        self.assertEqual(said, 'has not ended after 400ms')
        self.assertEqual(len(self.pids()), 2)
        self.assert_gone(self.pids())


class Test17Containers(LookCase):
    """What `docker run` started is ended too, and by its id alone."""

    def setUp(self):
        super().setUp()
        os.mkdir(self.path('bin'))
        os.mkdir(self.path('tmp'))
        self.write('bin/docker', FAKE_DOCKER)
        os.chmod(self.path('bin', 'docker'), 0o755)
        patched = mock.patch.object(tempfile, 'tempdir', self.path('tmp'))
        patched.start()
        self.addCleanup(patched.stop)

    def docker(self, *options, **spec):
        """Have a fake server run in a container; returns its entry."""
        ours = {key: spec.pop(key) for key in (
            'away', 'code', 'hang', 'fail', 'detach', 'slow') if key in spec}
        server = self.serve(starts=self.path('starts'), **dict(
            {'tools': [tool()]}, **spec))['args'][1:]
        self.write('bin/spec.json', json.dumps(dict(ours, server=server)))
        return {'command': self.path('bin', 'docker'), 'env': {'MARK': 'm'},
                'args': list(options or ('run', '-i', '--rm'))
                + ['img', 'word']}

    def calls(self):
        """List what the stand-in was called with: words, its variable."""
        with open(self.path('bin', 'calls')) as file:
            return [json.loads(line) for line in file]

    def left(self):
        """Name the containers and our directories that are still there."""
        return [name for name in os.listdir(self.path('bin'))
                if name.startswith('held-')] + os.listdir(self.path('tmp'))

    def given(self, words):
        """Give the id file named in a command line."""
        return words[words.index('--cidfile') + 1]

    def test_a_server_that_ends_with_its_input_is_left_alone(self):
        self.patch('GRACE_MS', 20000)
        self.assertEqual(self.names(self.look(self.docker())), ['echo'])
        (words, _), = self.calls()
        self.assertEqual(words[:2], ['run', '--cidfile'])
        self.assertEqual(words[3:], ['-i', '--rm', 'img', 'word'])
        self.assertTrue(words[2].startswith(self.path('tmp') + os.sep))
        self.assertEqual(self.left(), [])

    def test_a_survivor_is_stopped_and_removed_by_its_id(self):
        for options in (('run', '-i', '--rm'),
                        ('-H', 'tcp://h:1', 'container', 'run', '-i')):
            self.write('bin/calls', '')
            entry = self.docker(*options, ignore_term=True)
            before = pf.launch_digest(self.server(entry))
            self.assertEqual(self.names(self.look(entry)), ['echo'])
            calls = self.calls()
            front = list(options[:options.index('run')])
            with self.subTest(options):
                name = calls[1][0][-1]
                self.assertRegex(name, r'\A[0-9a-f]{64}\Z')
                self.assertEqual(calls[1:], [
                    [front + ['stop', '-t', '1', name], 'm'],
                    [front + ['rm', '-f', name], 'm']])
                self.assertEqual(self.left(), [])
                self.assertEqual(pf.launch_digest(self.server(entry)),
                                 before)

    def test_one_that_needs_a_term_is_not_left_either(self):
        self.look(self.docker('run', '-i', no_eof=True))
        self.assertEqual([words[0] for words, _ in self.calls()],
                         ['run', 'stop', 'rm'])
        self.assertEqual(self.left(), [])

    def test_a_stop_that_hangs_or_fails_costs_no_more_than_its_time(self):
        for more in ({'hang': 'stop'}, {'fail': 'stop'}, {'hang': 'rm'}):
            self.patch('ENGINE_MS', 300 if 'hang' in more else 20000)
            self.write('bin/calls', '')
            self.look(self.docker(ignore_term=True, **more))
            with self.subTest(more):
                self.assertEqual([words[0] for words, _ in self.calls()],
                                 ['run', 'stop', 'rm'])
                self.assertEqual(os.listdir(self.path('tmp')), [])

    def test_a_time_out_leaves_nothing(self):
        self.fails(self.look(self.docker(
            sleep={'initialize': 60}), limit=0.6), 'timeout')
        self.assertEqual(self.left(), [])

    def test_a_detached_one_is_stopped_and_what_ended_is_kept(self):
        """What ended by itself may be looked at later: no rm -f."""
        self.fails(self.look(self.docker('run', '-i', detach=True,
                                         no_eof=True)), 'exited')
        self.assertEqual({words[0] for words, _ in self.calls()},
                         {'run', 'stop'})
        self.assertEqual(os.listdir(self.path('tmp')), [])

    def test_an_id_file_of_the_config_is_read_and_kept(self):
        file = self.path('own.cid')
        entry = self.docker('run', '--cidfile', file, '-i',
                            ignore_term=True)
        self.names(self.look(dict(entry, cwd='bin')))
        with open(file) as held:
            name = held.read()
        self.assertEqual([words[1:] for words, _ in self.calls()], [
            ['--cidfile', file, '-i', 'img', 'word'], ['-t', '1', name],
            ['-f', name]])
        self.assertEqual(self.left(), [])

    def test_an_id_file_that_was_there_names_anothers_container(self):
        file = self.write('own.cid', 'ab' * 32)
        seen = self.look(self.docker('run', '--cidfile=' + file, '--cidfile',
                                     file, '-i'))
        self.fails(seen, 'exited', 'exited with code 125 before initialize; '
                   'last stderr: docker: container ID file found')
        self.assertEqual({words[0] for words, _ in self.calls()}, {'run'})
        with open(file) as held:
            self.assertEqual(held.read(), 'ab' * 32)

    def test_what_is_no_id_is_never_put_into_a_command(self):
        run = pf.container_of(['docker', 'run', '-i', 'img'])
        for text, name in (('img', ''), ('-f', ''), ('ab' * 32, 'ab' * 32),
                           ('ab' * 6 + '\n', 'ab' * 6), ('', ''),
                           ('ab' * 32 + ' x', ''), ('caf\xe9', '')):
            held = pf.Container(run, ['docker', 'run', '-i', 'img'],
                                self.dir, {})
            held.open()
            with open(held.file, 'wb') as file:
                file.write(text.encode('utf-8'))
            with self.subTest(text):
                self.assertEqual(held.id(), name)
            held.close()
        self.assertEqual(self.left(), [])

    def test_a_client_that_sees_another_tmp_gets_no_file(self):
        for argv, env in ((['/snap/bin/docker', 'run', 'i'], {}),
                          (['/m/docker.exe', 'run', 'i'],
                           {'WSL_DISTRO_NAME': 'x'})):
            held = pf.Container(pf.container_of(argv), argv, self.dir, env)
            self.assertEqual((held.open(), held.id()), (argv, ''))
        self.assertEqual(self.left(), [])

    AWAY = (
        ('docker: Cannot connect to the Docker daemon at unix:///var/run/'
         'docker.sock. Is the docker daemon running?', 125),
        ('error during connect: in the default daemon configuration', 1),
        ('docker: failed to connect to the docker API at unix:///x', 125),
        ('permission denied while trying to connect to the Docker daemon '
         'socket', 126),
        ('Cannot connect to Podman. Please verify your connection', 125))

    def test_a_daemon_that_is_away_is_named(self):
        for text, code in self.AWAY:
            with self.subTest(text):
                seen = self.look(self.docker(away=text, code=code))
                self.fails(seen, 'refused', 'cannot reach docker: its client '
                           'exited with code %d; last stderr: %s' % (
                               code, text[:40]))
        self.assertEqual(self.left(), [])

    def test_what_a_server_says_of_docker_is_no_daemon_away(self):
        """Its container was there; so was the daemon."""
        seen = self.look(self.docker(die='start', stderr=self.AWAY[0][0]))
        self.fails(seen, 'exited', 'exited with code 3 before initialize')

    def test_another_failure_of_the_client_is_an_exit(self):
        seen = self.look(self.docker(away='Unable to find image'))
        self.fails(seen, 'exited', 'exited with code 125 before initialize; '
                   'last stderr: Unable to find image')

    def test_docker_that_is_not_there_is_not_found(self):
        seen = self.look({'command': 'docker', 'env': {'PATH': '/none'},
                          'args': ['run', '-i', 'img']})
        self.fails(seen, 'command_not_found', "command 'docker' not found")
        self.assertEqual(self.left(), [])

    def test_a_client_that_cannot_be_started_leaves_no_directory(self):
        self.write('bin/podman', '#!/no/such/interpreter\n')
        os.chmod(self.path('bin', 'podman'), 0o755)
        self.fails(self.look({'command': self.path('bin', 'podman'), 'args': [
            'run', '-i', 'img']}), 'command_not_found', 'podman')
        self.assertEqual(self.left(), [])

    def test_signals_leave_no_container(self):
        self.configure({'s': self.docker(sleep={'initialize': 60},
                                         ignore_term=True)})
        wanted, jobs = [(signal.SIGINT, 130), (signal.SIGTERM, 143)], []
        for number, _ in wanted:
            jobs.append(subprocess.Popen(
                [sys.executable, SCRIPT, '--home', self.path('%d' % number),
                 '--config', self.config, 'sync'], env=dict(
                    os.environ, TMPDIR=self.path('tmp')),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        self.wait_for(lambda: len(self.pids()) == 2)
        for job, (number, _) in zip(jobs, wanted):
            job.send_signal(number)
        for job, (number, code) in zip(jobs, wanted):
            err = job.communicate(timeout=60)[1]
            with self.subTest(number):
                self.assertEqual(job.returncode, code, err)
        self.assert_gone(self.pids())
        self.assertEqual(self.left(), [])

    def test_what_is_shown_has_no_id_file_and_no_secret(self):
        self.configure({'s': self.docker('run', '-e', 'K=hush-zz',
                                         die='start')})
        env = {'TMPDIR': self.path('tmp')}
        texts = [self.run_cli(*words, env=env).out for words in (
            ('sync', '-o', 'json'), ('servers', 'show', 's', '-o', 'json'),
            ('config', 'check'))]
        self.assertIn('K=***', ''.join(texts))
        for word in ('cidfile', 'hush'):
            self.assertNotIn(word, ''.join(texts))
        self.assertIn('lacks -i', texts[2])
        self.assertIn('lacks -i', self.run_cli('sync', env=env).err)
        self.assertEqual(os.listdir(self.path('tmp')), [])


class Test17Threads(LookCase):
    """The link that Windows needs: each way to misbehave, once through it."""

    ASK = '{"jsonrpc":"2.0","id":"x","method":"ping"}\n'
    HELD = {'ignore_term': True}
    # what the server does, state, cause, part of the detail
    MODES = {
        'good': ({'tools': [tool()]}, 'ready', '', ''),
        'noise': ({'noise': NOISE, 'tools': [tool()]}, 'ready', '', ''),
        'huge': ({'tools': [tool('big', 'A' * 3000000)]}, 'ready', '', ''),
        'late': (dict(reply='[{"name":"caf\xc3@PAUSE@\xa9"}]'), 'ready', '',
                 ''),
        'latin': (dict(reply='[{"name":"caf\xe9"}]'), 'error', 'protocol',
                  'the reply is not UTF-8'),
        'stderr': ({'stderr': 'E x\n' * 250000 + 'end\n', 'tools': [tool()]},
                   'ready', '', ''),
        'endless': ({'flood': 'x\n' * 50}, 'error', 'protocol',
                    'non-protocol lines on stdout and no message'),
        'unended': ({'flood': 'x' * 200000}, 'error', 'protocol',
                    'a message is larger than 4000000 bytes'),
        'deaf': ({'flood': ASK * 2000}, 'error', 'protocol',
                 'it does not read its input'),
        'dead': ({'die': 'start', 'stderr': 'FATAL: KEY: sk-live-SECRET\n'},
                 'error', 'exited', 'exited with code 3 before initialize; '
                 'last stderr: FATAL: KEY: ***'),
        'half': ({'die': 'tools/list', 'code': 0, 'stderr': 'bye'}, 'error',
                 'exited', 'exited with code 0 before its list was complete; '
                 'last stderr: bye'),
        'killed': ({'die': 'initialize', 'signal': 9}, 'error', 'exited',
                   'killed by signal 9 before initialize'),
        'slow': ({'sleep': {'initialize': 60}, 'stderr': 'busy'}, 'error',
                 'timeout', 'no answer to initialize within'),
        'dribble': ({'flood': '\n', 'pause': 0.02}, 'error', 'timeout',
                    'no answer to initialize'),
        'held': (dict(HELD, tools=[tool()]), 'ready', '', ''),
        'loud': (dict(HELD, flood='x\n' * 50), 'error', 'protocol', 'non-'),
        'no_eof': ({'no_eof': True, 'tools': [tool()]}, 'ready', '', ''),
        'parent': ({'grandchild': 'held', 'tools': [tool()]}, 'ready', '',
                   ''),
        'orphan': ({'grandchild': 'held', 'die': 'tools/list'}, 'error',
                   'exited', 'exited with code 3')}

    def setUp(self):
        super().setUp()
        self.patch('CHILD_LINK', pf.ThreadedLink)
        self.patch('MAX_MESSAGE_BYTES', 4000000)

    def entries(self):
        """Give the config entry of each mode."""
        for name, (spec, _, _, _) in self.MODES.items():
            spec = dict(spec, starts=self.path('starts'))
            if 'grandchild' in spec:
                spec['grandchild'] = self.path('held-' + name)
            if 'reply' in spec:
                spec['answers'] = {'tools/list': reply_text(
                    spec.pop('reply'))}
            yield name, self.serve(name, **spec)

    def look_at_all(self):
        """Look at the servers of all modes at once: name -> Observation."""
        path = self.configure(dict(self.entries()))
        config = pf.read_config([(path, path, pf.read_bytes(path))])
        found, world = {}, self.world()

        def look(server):
            end = world.clock() + (2 if server.name in (
                'slow', 'dribble') else 60)
            found[server.name] = pf.observe_server(server, None, (end, end),
                                                   world)
        jobs = [threading.Thread(target=look, args=(server,))
                for server in pf.all_servers(config)[0]]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return found

    def test_each_mode(self):
        before, threads = os.listdir('/dev/fd'), threading.active_count()
        found = self.look_at_all()
        for name, (_, state, cause, part) in self.MODES.items():
            with self.subTest(name):
                seen = found[name]
                self.assertEqual((seen.state, seen.cause), (state, cause),
                                 seen.detail)
                self.assertIn(part, seen.detail)
        self.assertEqual(found['noise'].warnings,
                         ['5 non-protocol lines on stdout'])
        self.assertEqual([found['late'].tools[0].name,
                          len(found['huge'].tools[0].text) > 3000000],
                         ['caf\xe9', True])
        self.assertIn('E x\nE x\n', found['stderr'].stderr)
        self.assertIn('last stderr: busy', found['slow'].detail)
        self.assert_gone(self.pids() + self.pids('held-parent')
                         + self.pids('held-orphan'))
        self.wait_for(lambda: threading.active_count() <= threads)
        self.wait_for(lambda: len(os.listdir('/dev/fd')) <= len(before))

    def test_a_closed_output_and_last_words(self):
        for script, words in (
                ('exec >&- 2>&-; sleep 20', 'closed its output'),
                ('exec >&-; sleep 0.1; echo last words >&2; exit 4',
                 'exited with code 4 before initialize; last stderr: last '
                 'words')):
            with self.subTest(words):
                self.fails(self.look({'command': 'sh', 'args': [
                    '-c', script]}), 'exited', words)

    def test_a_command_that_cannot_be_started(self):
        self.write('junk', b'\0\1\2')
        os.chmod(self.path('junk'), 0o755)
        self.fails(self.look({'command': './junk'}), 'command_not_found',
                   'cannot be started: exec format')

    def test_a_stop_ends_the_look(self):
        world = self.world()
        server = self.server(self.serve(sleep={'initialize': 60},
                                        starts=self.path('starts')))

        def stop():
            self.wait_for(self.pids)
            world.stop.append(15)
        thread = threading.Thread(target=stop)
        thread.start()
        end = world.clock() + 60
        with self.assertRaises(pf.Interrupted):
            pf.observe_server(server, None, (end, end), world)
        thread.join()
        self.assert_gone(self.pids())


    def test_what_a_thread_has_read_counts_after_a_death(self):
        """It may come to its turn only after the process has gone."""
        class Late(pf.ThreadedLink):
            """A link whose threads are slow to tell."""

            patience = 20

            def _read(self, pipe):
                self._exit_seen.wait(20)
                time.sleep(0.1)
                super()._read(pipe)
        world = self.world()
        link = Late(['/bin/sh', '-c', 'echo words; exit 3'], self.dir,
                    dict(os.environ), world)
        link._exit_seen = threading.Event()
        try:
            link.open()
            self.wait_for(link.is_dead)
            link._exit_seen.set()
            self.assertEqual(link.receive(world.clock() + 30), b'words')
            with self.assertRaises(pf.UpstreamError) as caught:
                link.receive(world.clock() + 30)
            self.assertEqual(str(caught.exception), 'exited with code 3')
        finally:
            link.close()


class Test17Windows(WorldCase):
    """What Windows does with a command, as far as it can be told here."""

    def place(self, folder, *names):
        """Make files in a directory; returns it."""
        os.makedirs(self.path(folder), exist_ok=True)
        for name in names:
            self.write(os.path.join(folder, name), '')
        return self.path(folder)

    def find(self, command, *places, **env):
        """Look a command up as Windows does; returns what is below dir."""
        env = dict({'PATH': ';'.join(places), 'PATHEXT':
                    '.COM;.EXE;.BAT;.CMD'}, **env)
        try:
            found = pf.find_command(command, self.dir, env, True)
        except pf.UpstreamError as exc:
            self.assertEqual(exc.cause, 'command_not_found')
            return str(exc)
        return os.path.relpath(found, self.dir)

    def test_commands(self):
        node = self.place('node', 'npx', 'npx.cmd', 'node.exe', 'x.bat',
                          'x.exe', 'run.py')
        other = self.place('other dir', 'npx.exe', 'cmd.exe', 'uvx.exe')
        for command, found in (
                ('npx', 'node/npx.cmd'), ('npx.cmd', 'node/npx.cmd'),
                ('node', 'node/node.exe'), ('x', 'node/x.exe'),
                ('uvx', 'other dir/uvx.exe'), ('cmd', 'other dir/cmd.exe'),
                ('cmd.exe', 'other dir/cmd.exe'),
                ('./node/npx', 'node/npx.cmd'),
                (node + '/x.bat', 'node/x.bat')):
            with self.subTest(command):
                self.assertEqual(self.find(command, node, '"%s"' % other),
                                 found)

    def test_the_order_of_the_path_and_of_pathext(self):
        first, second = self.place('a', 'x.cmd'), self.place('b', 'x.exe')
        both = self.place('c', 'x.cmd', 'x.exe', 'x.py')
        self.assertEqual(self.find('x', first, second), 'a/x.cmd')
        self.assertEqual(self.find('x', both, PATHEXT='.PY;.CMD'), 'c/x.py')
        self.assertEqual(self.find('x', both, PATHEXT=''), 'c/x.exe')

    def test_what_is_not_there(self):
        node = self.place('node', 'npx', 'run.py')
        self.assertEqual(self.find('npx', node), "command 'npx' not found; "
                         'PATH was %s; give an absolute path or set env.PATH'
                         % node)
        for command in ('run.py', './node/npx', r'node\npx', 'node'):
            with self.subTest(command):
                self.assertIn('not found', self.find(command, node))

    def test_here_a_backslash_and_pathext_mean_nothing(self):
        node = self.place('node', 'a\\b', 'npx.cmd')
        os.chmod(os.path.join(node, 'a\\b'), 0o755)
        env = {'PATH': node, 'PATHEXT': '.CMD'}
        self.assertEqual(pf.find_command('a\\b', '/', env, False),
                         os.path.join(node, 'a\\b'))
        with self.assertRaises(pf.UpstreamError):
            pf.find_command('npx', '/', env, False)

    LINES = (
        ((), ''), (('-y', 'a b'), ' "-y" "a b"'), (('',), ' ""'),
        (('a&b|c^d<e>',), ' "a&b|c^d<e>"'), (('say "x"',), ' "say ""x"""'),
        (('a\\"b',), ' "a\\\\""b"'), (('c:\\d\\',), ' "c:\\d\\\\"'),
        (('%PATH%',), ' "%%cd:~,%PATH%%cd:~,%"'))

    def test_batch_lines(self):
        """Quoted for cmd.exe, by which a batch file is read."""
        for args, text in self.LINES:
            with self.subTest(args):
                self.assertEqual(
                    pf.batch_line(r'C:\n x\npx.cmd', args, {
                        'COMSPEC': r'C:\W\cmd.exe'}),
                    r'"C:\W\cmd.exe" /e:ON /v:OFF /d /c ""C:\n x\npx.cmd"%s"'
                    % text)
        self.assertIn('System32', pf.batch_line('x.bat', (), {}))
        for word in ('a\nb', 'a\rb'):
            with self.assertRaises(pf.UpstreamError):
                pf.batch_line('x.bat', [word], {})

    def test_a_tree_is_ended_by_taskkill(self):
        os.makedirs(self.path('System32'))
        name = self.write('System32/taskkill.exe', '#!/bin/sh\n'
                          'echo "$@" > "$0.args"; kill -9 "$4"\n')
        os.chmod(name, 0o755)
        for is_forced, root in ((False, self.dir), (True, self.dir),
                                (True, '/none')):
            child = subprocess.Popen(['sleep', '60'])
            pf.end_group(child, is_forced, {'SYSTEMROOT': root}, True)
            self.assertEqual(child.wait(20), -9 if is_forced else -15)
            with self.subTest(root=root, is_forced=is_forced):
                self.assertEqual(os.path.exists(name + '.args'), is_forced)
            if is_forced and root == self.dir:
                with open(name + '.args') as file:
                    self.assertEqual(file.read(), '/F /T /PID %d\n'
                                     % child.pid)


class Test18Dialogue(LookCase):
    """The conversation, as it runs over a real child."""

    DISCOVERED = {'result': {
        'supportedVersions': ['2026-07-28'], 'capabilities': {'tools': {}},
        'resultType': 'complete'}}

    def test_pages_are_put_together(self):
        seen = self.look(pages={
            'first': {'tools': [tool('a')], 'nextCursor': '2'},
            '2': {'tools': [tool('b')], 'nextCursor': None}})
        self.assertEqual(self.names(seen), ['a', 'b'])

    def test_cursors_that_never_end_are_a_failed_look(self):
        stuck = {'tools': [tool()], 'nextCursor': '8'}
        for pages in ({'first': stuck, '8': stuck}, {
                'first': dict(stuck, nextCursor='A'),
                'A': {'tools': [tool('a')], 'nextCursor': 'B'},
                'B': {'tools': [tool('b')], 'nextCursor': 'A'}}):
            with self.subTest(sorted(pages)):
                self.fails(self.look(pages=pages), 'protocol',
                           'pagination loop: a cursor was repeated after ')

    def test_a_list_of_too_many_pages_is_a_failed_look(self):
        self.patch('MAX_PAGES', 3)
        pages = {str(n): {'tools': [tool('t%d' % n)],
                          'nextCursor': str(n + 1)} for n in range(9)}
        pages['first'] = pages['0']
        self.fails(self.look(pages=pages), 'protocol', 'over 3 pages')

    def test_versions_are_negotiated(self):
        for spoken, is_good in (('2024-11-05', True), ('2025-06-18', True),
                                ('2099-01-01', False), (7, False)):
            seen = self.look(version=spoken, tools=[tool()])
            with self.subTest(spoken):
                if is_good:
                    self.assertEqual(seen.protocol, spoken)
                else:
                    self.fails(seen, 'protocol', 'the server speaks %s, we '
                               'know 2025-11-25' % spoken)

    def test_a_version_that_the_refusal_lists_is_taken(self):
        refusal = {'error': {'code': -32602, 'message': 'no', 'data': {
            'supported': ['2024-11-05'], 'requested': '2025-11-25'}}}
        self.fails(self.look(answers={'initialize': refusal},
                             log=self.path('log')), 'protocol', '-32602')
        self.assertEqual([row['params'].get('protocolVersion') for row in
                          self.asked()], ['2025-11-25', '2024-11-05', None])

    def modern(self, code=-32601):
        """What a server does that knows the stateless revision alone."""
        refusal = {'error': {'code': code, 'message': 'no', 'data': {
            'supported': ['2026-07-28']}}}
        return dict(answers={'initialize': refusal,
                             'server/discover': self.DISCOVERED},
                    tools=[tool()], log=self.path('log'))

    def test_discover_follows_on_the_same_process(self):
        for code in (-32601, -32602, -32022, -32000):
            self.write('starts', '')
            seen = self.look(**self.modern(code))
            with self.subTest(code):
                self.assertEqual(self.names(seen), ['echo'])
                self.assertEqual((seen.protocol, seen.era),
                                 ('2026-07-28', 'modern'))
                self.assertEqual(len(self.pids()), 1)
        meta = self.asked()[-1]['params']['_meta']
        self.assertEqual(meta['io.modelcontextprotocol/protocolVersion'],
                         '2026-07-28')

    def test_one_that_dies_of_initialize_is_started_once_more(self):
        seen = self.look(die='initialize', answers={
            'server/discover': self.DISCOVERED}, tools=[tool()])
        self.assertEqual(self.names(seen), ['echo'])
        self.assertEqual(seen.era, 'modern')
        self.assertEqual(len(self.pids()), 2)

    def test_one_that_dies_of_both_is_told_by_the_first(self):
        self.fails(self.look(die='start'), 'exited',
                   'exited with code 3 before initialize')
        self.assertEqual(len(self.pids()), 2)

    def test_an_era_that_is_remembered_comes_first(self):
        self.names(self.look(era='modern', **self.modern()))
        self.assertEqual([row['method'] for row in self.asked()],
                         ['server/discover', 'tools/list'])

    def test_a_remembered_era_that_is_over_is_left(self):
        for spec in ({}, {'die': 'server/discover'}):
            self.write('starts', '')
            seen = self.look(era='modern', tools=[tool()], **spec)
            with self.subTest(spec):
                self.assertEqual(self.names(seen), ['echo'])
                self.assertEqual(seen.era, 'handshake')
                self.assertEqual(len(self.pids()), 2)

    def test_one_malformed_tool_costs_itself_alone(self):
        seen = self.look(tools=[
            tool('good'), {'name': 'bad', 'inputSchema': None},
            {'description': 'no name'}, 'text', tool('good2'),
            {'name': 'odd', 'inputSchema': {'required': None, 'anyOf': []}}])
        self.assertEqual(self.names(seen), ['good', 'bad', 'good2', 'odd'])
        self.assertEqual(len(seen.warnings), 2)
        self.assertIn('tool 2 of the list is skipped', seen.warnings[0])

    def test_no_tools_capability_is_an_empty_list(self):
        for more in ({'capabilities': {}}, {'answers': {'tools/list': {
                'error': {'code': -32601, 'message': 'no'}}}}):
            with self.subTest(more):
                self.assertEqual(self.names(self.look(**more)), [])

    def test_errors_are_told_with_their_words(self):
        for answer, part in (
                ({'error': {'code': -32000, 'message': 'no licence'}},
                 'tools/list failed with error -32000: no licence'),
                ({'error': 'x'}, 'an error without a reason'),
                ({'result': {'tools': {}}}, 'tools/list gave no list'),
                ({'result': []}, 'cannot be used'),
                ({'result': {'tools': [], 'resultType': 'task'}},
                 'unknown type task')):
            with self.subTest(answer):
                self.fails(self.look(answers={'tools/list': answer}),
                           'protocol', part)


class SyncCase(LookCase):
    """A test of whole syncs, in this process, on one server `s`."""

    def sees(self, *tools, **spec):
        """Have `s` list these tools and look at it; returns its Row."""
        entry = self.serve(tools=list(tools), **spec)
        if not os.path.exists(self.config):
            self.configure({'s': entry})
        return self.one('sync')

    def one(self, *words, **more):
        """Sync; returns the only Row."""
        rows, _ = self.do(*words, **more)
        self.assertEqual(len(rows), 1)
        return rows[0]

    def gate(self, *ids, **more):
        """Check ids; returns their reasons, 'ready' for none."""
        report = self.do('tools', 'preflight', *ids, **more)
        self.answers = report.answers
        return [answer.reason or 'ready' for answer in report.answers]

    def status(self, name='echo'):
        """Give the status of a tool as `tools list` shows it."""
        return {row['name']: row['status']
                for row in self.do('tools', 'list')}[name]

    def approve(self, *ids):
        """Approve tools as they are now."""
        return self.do('tools', 'approve', '--yes', *ids)

    def news(self, row):
        """Give what a Row says has changed."""
        return row.added, row.changed, row.vanished, row.baseline


class Test18Sync(SyncCase):
    """Leases, looks side by side, signals, what is never started."""

    def toucher(self, **more):
        """Make an entry that leaves a file behind when it is started."""
        return dict({'command': 'sh', 'args': ['-c', 'touch "$0"; true',
                                               self.path('ran')]}, **more)

    def assert_not_run(self):
        """Hold the toucher to never having been started."""
        self.assertFalse(os.path.exists(self.path('ran')))

    def test_what_is_switched_off_never_starts(self):
        for more, state in (
                ({'disabled': True}, 'disabled'),
                ({'enabled': False}, 'disabled'),
                ({'enabled': True, 'disabled': True}, 'disabled'),
                ({'quarantined': True}, 'quarantined')):
            self.configure({'s': self.toucher(**more)})
            with self.subTest(more):
                self.assertEqual(self.one('sync').state, state)
                self.assert_not_run()
                self.assertEqual(self.gate('s:x'), ['server_' + state])

    def test_a_switch_keeps_it_off_and_puts_it_on(self):
        self.configure({'s': self.toucher()})
        for verb, state in (('disable', 'disabled'),
                            ('quarantine', 'quarantined')):
            self.do('servers', verb, 's')
            self.assertEqual(self.one('sync').state, state)
            self.assert_not_run()
            self.do('servers', 'enable', 's')
            self.do('servers', 'approve', 's', '--yes')
        self.assertEqual(self.one('sync').state, 'error')
        self.assertTrue(os.path.exists(self.path('ran')))

    def test_a_config_that_changed_ends_a_switch_and_that_is_told(self):
        self.configure({'s': self.toucher(enabled=False)})
        self.do('servers', 'enable', 's')
        self.configure({'s': self.toucher(enabled=True)})
        self.one('sync')
        self.configure({'s': self.toucher(enabled=False)})
        os.remove(self.path('ran'))
        self.assertEqual(self.one('sync').state, 'disabled')
        self.assert_not_run()

    def test_dead_switches_are_told_outside_the_lock(self):
        self.configure({'s': self.toucher(enabled=False)})
        self.do('servers', 'enable', 's')
        self.configure({'s': self.toucher(enabled=True)})
        lock = pf.FileLock(os.path.join(self.home, 'store.lock'),
                           self.world())
        self.addCleanup(lock.close)
        told = []

        def tell(line):
            with lock:
                told.append(line)
        self.patch('BUSY_TIMEOUT_MS', 200)
        self.do('sync', tell=tell)
        self.assertIn('s: enabled is now true in the config', told[0])

    def test_a_config_that_lies_about_is_never_used(self):
        self.write('.mcp.json', json.dumps(
            {'mcpServers': {'s': self.toucher()}}))
        for words in (['tools', 'preflight', '--sync', 's:x'], ['sync'],
                      ['sync', 's'], ['servers', 'list']):
            done = self.run_cli(*words, is_placed=False, env={
                'HOME': self.dir})
            with self.subTest(words):
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertIn('.mcp.json', done.err)
                self.assert_not_run()

    def test_an_unresolved_variable_starts_nothing(self):
        self.configure({
            's': self.toucher(env={'K': '${NO_SUCH}', 'L': '${HUSH_THING}'}),
            'good': self.serve(tools=[tool()])})
        world = self.world(env={'HUSH_THING': 'hush-hush', 'PATH': '/bin'})
        rows, _ = self.do('sync', world=world)
        self.assertEqual([row.state for row in rows], ['error', 'ready'])
        self.assertEqual(rows[0].cause, 'unresolved')
        self.assertIn('NO_SUCH (env.K)', rows[0].detail)
        self.assertNotIn('hush', repr(rows) + repr(self.told))
        self.assert_not_run()
        with open(os.path.join(self.home, 'preflight.db'), 'rb') as file:
            self.assertNotIn(b'hush-hush', file.read())

    def test_foreign_text_costs_the_sync_nothing(self):
        odd = {'code': 1, 'message': 'a\ud800\0b' + 'x' * 5000}
        row = self.sees(answers={'initialize': {'error': odd}})
        self.assertEqual(row.cause, 'protocol')
        shown = self.do('servers', 'show', 's')
        self.assertIn('a\\ud800', shown['detail'])
        self.assertLessEqual(len(shown['detail']), 1100)

    def test_a_ttl_no_database_holds_is_cut(self):
        row = self.sees(answers={'tools/list': {'result': {
            'tools': [tool()], 'ttlMs': 10 ** 40}}})
        self.assertEqual(row.state, 'ready')
        self.assertEqual(self.raw().execute('select ttl from server')
                         .fetchone()[0], pf.MAX_TTL_MS)

    def test_names_no_database_holds_are_skipped(self):
        row = self.sees(tool('\ud800'), tool('a\0b'), tool())
        self.assertEqual((row.state, row.tools), ('ready', 1))

    def test_sixteen_are_looked_at_side_by_side_and_no_more(self):
        guard, running, most = threading.Lock(), [], []
        full = threading.Event()

        def look(server, era, deadlines, world):
            with guard:
                running.append(server)
                most.append(len(running))
                if len(running) == 16:
                    full.set()
            full.wait(20)
            time.sleep(0.02)
            with guard:
                running.remove(server)
            return pf.Observation('error', 'exited', 'x', None, None, 0,
                                  None, {}, [], '')
        self.patch('observe_server', look)
        self.configure({'s%d' % n: {'command': 'true'} for n in range(20)})
        rows, _ = self.do('sync')
        self.assertEqual([row.server for row in rows],
                         ['s%d' % n for n in range(20)])
        self.assertEqual(max(most), 16)

    def test_a_fault_of_ours_costs_one_server(self):
        def look(server, era, deadlines, world):
            raise KeyError('oops')
        self.patch('observe_server', look)
        self.configure({'s': {'command': 'true'}})
        row = self.one('sync')
        self.assertEqual(row.cause, 'protocol')
        self.assertIn('oops', row.detail)

    def leased(self, start, span, owner='other'):
        """Have another's sync look at `s` from an instant on."""
        if not os.path.exists(self.config):
            self.configure({'s': self.serve(tools=[tool()])})
        config = pf.load_config(self.world())
        server, _ = pf.look_up(config, 's')
        with self.store() as store, store.write() as con:
            pf.take_lease(con, 's', server.file, (
                start, start + span, pf.launch_digest(server), owner))
        return server

    def test_two_syncs_at_once_start_a_server_once(self):
        self.configure({'s': self.serve(
            tools=[tool()], starts=self.path('starts'),
            sleep={'initialize': 0.4})})
        words = [sys.executable, SCRIPT, '--home', self.home, '--config',
                 self.config, 'sync', '-o', 'json']
        jobs = [subprocess.Popen(words, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL)
                for _ in range(2)]
        found = [json.loads(job.communicate(timeout=60)[0].decode())
                 ['servers'][0] for job in jobs]
        self.assertEqual([(row['state'], row['tools']) for row in found],
                         [('ready', 1)] * 2)
        self.assertEqual(len(self.pids()), 1)

    def test_the_gate_tells_of_a_sync_under_way(self):
        now = int(time.time() * 1000)
        self.leased(now - 1000, 60000)
        self.assertEqual(self.gate('s:echo'), ['server_initializing'])
        self.assertIn('under way', self.answers[0].detail)

    def test_a_lease_for_another_launch_says_nothing_of_this_one(self):
        now = int(time.time() * 1000)
        self.leased(now - 1000, 60000)
        self.configure({'s': {'command': 'true'}})
        self.assertEqual(self.gate('s:echo'), ['server_initializing'])
        self.assertIn('never been looked at', self.answers[0].detail)

    def test_leases_that_ran_out_hold_nobody_up(self):
        now = int(time.time() * 1000)
        for start, span in ((now - 60000, 59000), (now + 600000, 60000)):
            self.leased(start, span)
            with self.subTest(start - now):
                self.assertEqual(self.gate('s:echo'), ['server_unhealthy'])
                self.assertEqual(self.answers[0].cause, 'interrupted')
                self.assertEqual(self.one('sync').state, 'ready')
                self.assertEqual(self.gate('s:echo'), ['ready'])
            os.remove(os.path.join(self.home, 'preflight.db'))

    def test_a_lease_that_is_given_back_or_runs_out_is_waited_for(self):
        for looks, is_given_back in ((1, True), (2, False)):
            now = int(time.time() * 1000)
            server = self.leased(now, 30000 if is_given_back else 300)
            self.serve(tools=[tool()], starts=self.path('starts'))

            def give_back():
                time.sleep(0.2)
                with pf.Store(self.home, self.world()) as store:
                    with store.write() as con:
                        pf.drop_lease(con, 's', server.file, 'other')
            thread = threading.Thread(target=give_back)
            if is_given_back:
                thread.start()
            with self.subTest(is_given_back):
                self.assertEqual(self.one('sync').state, 'ready')
                self.assertEqual(len(self.pids()), looks)
            if is_given_back:
                thread.join()

    def owner_locks(self):
        return [name for name in os.listdir(self.home)
                if name.startswith('sync-')]

    def test_a_killed_sync_holds_nobody_up(self):
        self.configure({'s': self.serve(sleep={'initialize': 300},
                                        starts=self.path('starts'))})
        job = subprocess.Popen(
            [sys.executable, SCRIPT, '--home', self.home, '--config',
             self.config, 'sync'], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        self.wait_for(self.pids)
        self.assertEqual(len(self.owner_locks()), 1)

        def progress(done, total, names):
            if job.returncode is None:
                self.assertEqual(names, ['s (another sync looks)'])
                job.kill()
                job.wait()
                os.kill(self.pids()[0], signal.SIGKILL)
                self.serve(tools=[tool()])
        self.patch('no_progress', progress)
        self.assertEqual(self.one('sync').state, 'ready')
        self.assertEqual(job.returncode, -signal.SIGKILL)
        self.wait_for(lambda: self.owner_locks())
        self.assertEqual(self.one('sync').state, 'ready')
        self.assertEqual(self.owner_locks(), [])

    def test_the_result_of_anothers_look_is_taken(self):
        server = self.leased(int(time.time() * 1000), 30000)
        self.serve(starts=self.path('starts'), tools=[tool()])

        def finish():
            time.sleep(0.2)
            with pf.Store(self.home, self.world()) as store:
                with store.read() as con:
                    known, _ = pf.load_known(con, pf.load_config(
                        self.world()), 's')
                pf.save_observation(store, known, pf.Observation(
                    'error', 'exited', 'exited with code 9', None, None, 0,
                    None, {}, [], ''), 'other')
        thread = threading.Thread(target=finish)
        thread.start()
        row = self.one('sync')
        thread.join()
        self.assertEqual((row.state, row.detail),
                         ('error', 'exited with code 9'))
        self.assertEqual(self.pids(), [])
        self.assertEqual(server.name, 's')

    def test_a_late_result_leaves_anothers_lease_alone(self):
        now = int(time.time() * 1000)
        server = self.leased(now, 30000, 'new owner')
        store = self.store()
        with store.read() as con:
            known, _ = pf.load_known(con, pf.load_config(self.world()), 's')
        pf.save_observation(store, known, pf.Observation(
            'error', 'exited', 'x', None, None, 0, None, {}, [], ''), 'old')
        with store.read() as con:
            self.assertEqual(pf.load_link(con, 's', server.file)[1],
                             'new owner')

    def test_a_result_is_written_for_its_own_file_and_launch(self):
        entry = self.serve(tools=[tool()])
        self.configure({'s': entry})
        self.one('sync')
        other = self.write('other.json', json.dumps(
            {'mcpServers': {'s': entry}}))
        self.assertEqual(self.gate('s:echo', configs=(other,)),
                         ['server_initializing'])
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_a_failed_look_of_one_costs_the_others_nothing(self):
        self.configure({
            'dead': self.serve('dead', die='start'),
            's': self.serve(tools=[tool()]),
            'slow': self.serve('slow', sleep={'initialize': 60})})
        rows, _ = self.do('sync', '--timeout', '500ms')
        self.assertEqual([(row.server, row.state, row.cause) for row in rows],
                         [('dead', 'error', 'exited'), ('s', 'ready', ''),
                          ('slow', 'error', 'timeout')])

    def test_a_store_that_fails_ends_the_other_looks_at_once(self):
        self.configure({
            's': self.serve(tools=[tool()]),
            'slow': self.serve('slow', sleep={'initialize': 300},
                               starts=self.path('starts'))})
        taken = []

        def save(*given):
            self.wait_for(self.pids)
            raise pf.StoreError('full')
        self.patch('save_observation', save)
        world = self.world()
        with self.assertRaises(pf.StoreError):
            self.do('sync', world=world)
        self.assert_gone(self.pids())
        self.assertEqual((world.stop, taken), ([], []))
        self.assertEqual(self.count('server where lease_until is not null'),
                         0)

    def test_old_records_are_pruned_by_a_sync_and_not_by_a_check(self):
        self.configure({'s': self.serve(tools=[tool()])},
                       activity_retention='1h')
        self.one('sync')
        later = int(time.time() * 1000) + 7200000
        self.do('tools', 'preflight', 's:echo', now=lambda: later)
        self.assertEqual(self.count("activity where type='sync'"), 1)
        self.do('sync', now=lambda: later)
        self.assertEqual(self.count("activity where type='sync'"), 0)
        self.assertTrue(self.do('activity', 'verify')['ok'])


class Test18Signals(LookCase):
    """A sync that is asked to end: 128 + n, and nothing left behind."""

    def start(self, name, *words, **spec):
        """Start the program on a slow server; returns what to check."""
        home, starts = self.path(name), self.path(name + '.starts')
        entry = self.serve(name, starts=starts, **dict(
            {'sleep': {'initialize': 60}}, **spec))
        config = self.write(name + '.json', json.dumps(
            {'mcpServers': {'s': entry}}))
        job = subprocess.Popen(
            [sys.executable, SCRIPT, '--home', home, '--config', config]
            + list(words or ['sync']), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, preexec_fn=self.reset_signals)
        return job, name, home

    def reset_signals(self):
        """Have the child hear signals, however this suite was started."""
        for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
            signal.signal(getattr(signal, name), signal.SIG_DFL)

    def test_signals_end_it_with_128_and_their_number(self):
        jobs = [
            (self.start('int'), [signal.SIGINT], 130),
            (self.start('term', ignore_term=True), [signal.SIGTERM], 143),
            (self.start('hup', no_eof=True, grandchild=self.path('held')),
             [signal.SIGHUP], 129),
            (self.start('twice', ignore_term=True),
             [signal.SIGTERM, signal.SIGINT, signal.SIGTERM], 143),
            (self.start('gate', 'tools', 'preflight', '--sync', 's:x'),
             [signal.SIGTERM], 143)]
        for (job, name, _), signals, _ in jobs:
            self.wait_for(lambda: self.pids(name + '.starts'))
            for number in signals:
                job.send_signal(number)
                time.sleep(0.1 if len(signals) > 1 else 0)
        for (job, name, home), _, code in jobs:
            out, err = job.communicate(timeout=60)
            with self.subTest(name):
                self.assertEqual((job.returncode, out), (code, b''), err)
                self.assertNotIn(b'Traceback', err)
                self.assert_gone(self.pids(name + '.starts'))
                self.assertEqual(self.count(
                    'server where lease_until is not null', home), 0)
                self.home = home
                with self.store().write() as con:
                    pf.bump_generation(con)
        self.assert_gone(self.pids('held'))

    def test_one_that_comes_when_all_is_seen_still_counts(self):
        self.configure({'s': self.serve(tools=[tool()])})
        world = self.world()

        def prune(*given):
            world.stop.append(signal.SIGTERM)
        self.patch('prune_records', prune)
        with self.assertRaises(pf.Interrupted) as caught:
            self.do('sync', world=world)
        self.assertEqual(caught.exception.number, signal.SIGTERM)
        self.assertEqual(self.count('tool'), 1)

    def test_a_second_one_does_not_cut_off_the_first(self):
        stops = pf.Stops()
        with self.assertRaises(pf.Interrupted):
            stops.handle(15, None)
        stops.handle(2, None)
        self.assertEqual(stops, [15, 2])


class QuickCase(SyncCase):
    """A test of many syncs of `s`: what a look finds is given at once."""

    RULES = {}

    def lists(self, *tools):
        """Have `s` list these tools and sync; returns its Row."""
        if not os.path.exists(self.config):
            self.configure({'s': dict({'command': 'x'}, **self.RULES)})
        self.patch('observe_server', lambda *given: observed(
            *pf.read_tools(list(tools))[0]))
        return self.one('sync')

    def shown(self, name='echo'):
        """Run `tools show`."""
        return self.do('tools', 'show', 's:' + name)

    def diff(self, name='echo'):
        """Run `tools diff`."""
        return self.do('tools', 'diff', 's:' + name)

    def approvals(self):
        """Give what was approved by hand, newest first."""
        return [row['metadata'] for row in self.do(
            'activity', 'list', '--type', 'approval')['activities']]


class Test18Moves(QuickCase):
    """Tools that come, go, are renamed, change, and change again."""

    def test_removed_and_added_again_alike_is_approved(self):
        self.lists(tool(), tool('b'))
        self.assertEqual(self.lists(tool('b')).vanished, ['echo'])
        self.assertEqual(self.gate('s:echo'), ['not_found'])
        row = self.lists(tool(), tool('b'))
        self.assertEqual(self.news(row), (['echo'], [], [], False))
        self.assertEqual(self.gate('s:echo', 's:b'), ['ready', 'ready'])

    def test_one_that_went_while_it_was_pending_comes_back_pending(self):
        self.lists(tool())
        for _ in range(2):
            self.lists(tool(), tool('new'))
            self.assertEqual(self.gate('s:new'), ['tool_pending_approval'])
            self.lists(tool())
            self.assertEqual(self.gate('s:new'), ['not_found'])

    def test_one_that_went_while_it_was_changed_comes_back_changed(self):
        self.lists(tool(), tool('b'))
        self.lists(tool(description='x'), tool('b'))
        self.lists(tool('b'))
        self.lists(tool(description='x'), tool('b'))
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])

    def test_renamed_is_a_new_tool_and_the_old_name_keeps_its_own(self):
        self.lists(tool(), tool('b'))
        row = self.lists(tool('echo2'), tool('b'))
        self.assertEqual(self.news(row), (['echo2'], [], ['echo'], False))
        self.assertEqual(self.gate('s:echo', 's:echo2'),
                         ['not_found', 'tool_pending_approval'])
        self.approve('s:echo2')
        self.lists(tool('echo2', 'Changed'), tool('b'))
        self.assertEqual(self.gate('s:echo2'), ['tool_changed'])
        self.lists(tool(), tool('b'))
        self.assertEqual(self.gate('s:echo', 's:echo2'),
                         ['ready', 'not_found'])

    def test_names_that_change_places_are_two_changes(self):
        self.lists(tool('a', 'A'), tool('b', 'B'))
        self.lists(tool('a', 'B'), tool('b', 'A'))
        self.assertEqual(self.gate('s:a', 's:b'), ['tool_changed'] * 2)

    def test_changed_while_changed(self):
        """Each is compared with what was approved, never with the last."""
        self.lists(tool())
        tokens = []
        for text in 'one', 'two':
            self.assertEqual(self.lists(tool(description=text)).changed,
                             ['echo'])
            self.assertEqual(self.gate('s:echo'), ['tool_changed'])
            found = self.diff()
            self.assertEqual((found['fields'][0]['old'],
                              found['fields'][0]['new']), ('Echo text', text))
            tokens.append(found['token'])
        self.assertIn('is not what was reviewed', self.refused(
            'tools', 'approve', 's:echo', '--expect', tokens[0]))
        self.do('tools', 'approve', 's:echo', '--expect', tokens[1])
        self.assertEqual(self.gate('s:echo'), ['ready'])
        for text in 'one', 'Echo text':
            self.lists(tool(description=text))
            self.assertEqual(self.gate('s:echo'), ['tool_changed'])

    def test_a_revert_needs_no_approval_and_leaves_none(self):
        self.lists(tool())
        self.lists(tool(description='x'))
        self.lists(tool())
        self.assertEqual(self.gate('s:echo'), ['ready'])
        self.assertEqual(self.approvals(), [])

    def test_a_hundred_syncs_in_a_row(self):
        """Whatever flaps: the state does not grow, nothing is approved."""
        self.lists(tool(), tool('calm'))
        for n in range(100):
            row = self.lists(tool(description='text %d' % (n % 2)),
                             tool('calm'))
            self.assertEqual((n, row.changed), (n, ['echo']))
        self.assertEqual([self.count(name) for name in (
            'tool', 'approved', 'launch', 'server', 'definition')],
            [2, 2, 1, 1, 4])
        self.assertEqual(self.gate('s:echo', 's:calm'),
                         ['tool_changed', 'ready'])
        self.assertEqual(self.approvals(), [])
        found = self.do('activity', 'verify')
        self.assertEqual((found['ok'], found['problems']), (True, []))
        self.lists(tool(), tool('calm'))
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_a_text_that_changes_by_itself_is_counted_and_named(self):
        for n in range(4):
            self.lists(tool(description='Now %d' % n), tool('calm'))
        said = ("This tool's text changes by itself (3 changes in 4 looks; "
                'description): fix the server, or put "ignore_changes": '
                '{"echo": ["description"]} into its entry.')
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])
        self.assertIn(said, self.answers[0].detail)
        self.assertEqual((self.shown()['note'], self.diff()['note']),
                         (said, said))
        self.assertEqual((self.diff()['changes'], self.shown()['looks']),
                         (3, 4))
        self.assertIsNone(self.shown('calm')['note'])
        self.approve('s:echo')
        self.lists(tool(description='Now 4'), tool('calm'))
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])

    def test_one_of_many_approves_and_the_others_find_it_done(self):
        self.lists(tool())
        self.lists(tool(description='x'))
        token = self.diff()['token']
        found = self.forked(*[lambda: [row['result'] for row in self.do(
            'tools', 'approve', 's:echo', '--expect', token)]] * 4)
        self.assertEqual(sorted(found),
                         [['approved']] + [['unchanged']] * 3)
        self.assertEqual([row['tokens'] for row in self.approvals()],
                         [[token]])

    def test_of_two_reviews_at_once_only_what_is_listed_counts(self):
        self.lists(tool())
        self.lists(tool(description='x'))
        old = self.diff()['token']
        self.lists(tool(description='y'))
        new = self.diff()['token']
        found = self.forked(*[lambda token=token: self.do(
            'tools', 'approve', 's:echo', '--expect', token)[0]['result']
            for token in (old, new, old)])
        self.assertEqual(found[1], 'approved')
        for text in found[0], found[2]:
            self.assertIn('is not what was reviewed', text)
        self.assertEqual([row['tokens'] for row in self.approvals()],
                         [[new]])

    def test_away_and_back_while_it_is_asked_is_what_was_shown(self):
        self.lists(tool())
        self.lists(tool(description='x'))

        def ask(question, choices=()):
            self.lists(tool(description='y'))
            self.lists(tool(description='x'))
            return True
        self.do('tools', 'approve', 's:echo', ask=ask)
        self.assertEqual(self.gate('s:echo'), ['ready'])


class Test18Ignored(QuickCase):
    """`"ignore_changes": {"tool or *": ["description"]}`."""

    RULES = {'ignore_changes': {'*': ['description', 'title']}}

    def other(self, name='echo', description='Other', **more):
        """Make a tool that differs in its description, and in more."""
        return tool(name, description, **more)

    def test_an_ignored_difference_leaves_it_approved(self):
        self.lists(tool(), tool('b'))
        before = self.shown()['approved_hash']
        records = self.count('activity')
        for n in range(5):
            row = self.lists(self.other(description='%d' % n), tool('b'))
            self.assertEqual(self.news(row), ([], [], [], False))
            self.assertEqual(row.detail, 'changes ignored: 1')
        self.assertEqual(self.gate('s:echo', 's:b'), ['ready', 'ready'])
        self.assertEqual(self.shown()['approved_hash'], before)
        self.assertNotEqual(self.shown()['hash'], before)
        self.assertEqual(self.count("activity where type<>'preflight'"),
                         records)

    def test_it_is_shown_wherever_the_tool_is(self):
        self.lists(tool(), tool('b'))
        self.lists(self.other(title='T'), tool('b'))
        found = {row['name']: row.get('ignored', 'no such key')
                 for row in self.do('tools', 'list')}
        self.assertEqual(found, {'echo': ['title', 'description'],
                                 'b': 'no such key'})
        table = pf.COMMANDS['tools', 'list'].render(
            self.do('tools', 'list'), False)
        self.assertIn('title, description', table)
        for value in self.shown(), self.diff():
            self.assertEqual((value['status'], value['ignored']),
                             ('approved', ['title', 'description']))
            self.assertIn('title, description only, which ignore_changes of '
                          'server "s" leaves out', value['note'])
        self.assertEqual(len(self.diff()['fields']), 2)
        self.assertIn('approve: ', pf.render_diff(self.diff()))
        fact = {row['gate']: row['fact'] for row in self.do(
            'tools', 'explain', 's:echo')}['changed']
        self.assertIn('title, description only', fact)

    def test_what_else_differs_makes_the_whole_a_change(self):
        self.lists(tool(annotations=SAFE))
        for more in ({'inputSchema': {'type': 'string'}},
                     {'outputSchema': {}}, {'annotations': {}}):
            row = self.lists(self.other(**dict({'annotations': SAFE},
                                               **more)))
            with self.subTest(more):
                self.assertEqual(row.changed, ['echo'])
                self.assertEqual(self.gate('s:echo'), ['tool_changed'])
                self.assertEqual(self.shown()['status'], 'changed')
            self.lists(tool(annotations=SAFE))

    def test_true_for_1_does_not_hide_behind_an_ignored_field(self):
        self.lists(tool(inputSchema={'default': 1}))
        self.lists(self.other(inputSchema={'default': True}))
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])

    def test_a_pin_covers_the_whole_definition(self):
        self.lists(tool())
        approved = self.shown()['hash']
        self.lists(self.other())
        for pin, reason in ((approved, 'hash_mismatch'),
                            (self.shown()['hash'], 'ready')):
            self.assertEqual(self.gate('s:echo', '--pin', 's:echo=' + pin),
                             [reason])

    def test_an_approve_moves_what_is_compared_with(self):
        self.lists(tool())
        self.lists(self.other())
        self.assertEqual(self.do('tools', 'approve', '--all', '--yes'), [])
        self.approve('s:echo')
        self.assertNotIn('ignored', self.shown())
        self.configure({'s': {'command': 'x'}})
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_without_the_rule_it_is_changed(self):
        self.lists(tool())
        self.lists(self.other())
        for rules, reason in (({}, 'tool_changed'), ({'echo': ['title'],
                              '*': ['description']}, 'tool_changed'),
                              ({'echo': ['description']}, 'ready'),
                              ({'b': ['description']}, 'tool_changed')):
            self.configure({'s': {'command': 'x', 'ignore_changes': rules}})
            with self.subTest(rules):
                self.assertEqual(self.gate('s:echo'), [reason])

    def test_a_new_tool_is_pending_whatever_is_ignored(self):
        self.lists(tool())
        self.lists(tool(), tool('new'))
        self.lists(tool(), self.other('new'))
        self.assertEqual(self.gate('s:new'), ['tool_pending_approval'])

    def test_a_return_that_differs_in_what_is_ignored_is_no_change(self):
        self.lists(tool(), tool('b'))
        self.lists(tool('b'))
        row = self.lists(self.other(), tool('b'))
        self.assertEqual(self.news(row), (['echo'], [], [], False))
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_mode_auto_does_not_approve_it_each_time(self):
        self.configure({'s': dict(self.RULES, command='x',
                                  trust_mode='auto')})
        self.lists(tool())
        records = self.count('activity')
        for n in range(3):
            self.lists(self.other(description='%d' % n))
        self.assertEqual(self.count('activity'), records)
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_no_text_is_read_where_nothing_is_ignored(self):
        self.lists(tool(), tool('b'))
        self.patch('load_definition', None)
        self.assertEqual(self.gate('s:echo', 's:b'), ['ready', 'ready'])
        self.configure({'s': {'command': 'x'}})
        self.lists(self.other(), tool('b'))
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])


class Test18Trust(SyncCase):
    """What the life cycle of contract 10 comes to, sync by sync."""

    def test_the_first_list_is_the_baseline_and_that_is_told(self):
        row = self.sees(tool(), tool('b'))
        self.assertEqual(self.news(row), ([], [], [], True))
        self.assertIn('trusted on first use: 1 server, 2 tools; nothing to '
                      'compare with. Keep the state directory %s or '
                      'commit a lockfile (tools lock).'
                      % self.home, self.told)
        self.assertEqual(self.gate('s:echo', 's:b'), ['ready', 'ready'])
        record = self.do('activity', 'list', '--type', 'sync')['activities']
        self.assertTrue(record[0]['metadata']['baseline'])

    def test_an_unchanged_server_is_no_news(self):
        self.sees(tool(), tool('b'))
        before = self.do('tools', 'list'), self.count('activity')
        row = self.sees(tool('b'), tool())
        self.assertEqual(self.news(row), ([], [], [], False))
        self.assertEqual(self.told, [])
        after = self.do('tools', 'list'), self.count('activity')
        for rows in before[0], after[0]:
            for item in rows:
                item.pop('last_seen')
        self.assertEqual(after, before)

    def test_twenty_syncs_change_nothing(self):
        self.sees(tool())
        for _ in range(20):
            self.one('sync')
        self.assertEqual(self.gate('s:echo'), ['ready'])
        self.assertEqual([self.count(table) for table in (
            'tool', 'approved', 'launch', 'definition', 'server')], [1] * 5)
        self.assertEqual(self.count("activity where type='sync'"), 1)

    def test_a_tool_that_comes_later_is_pending(self):
        self.sees(tool())
        row = self.sees(tool(), tool('new'))
        self.assertEqual(self.news(row), (['new'], [], [], False))
        self.assertEqual(self.gate('s:echo', 's:new'),
                         ['ready', 'tool_pending_approval'])
        self.assertEqual(self.news(self.one('sync')), ([], [], [], False))
        self.approve('s:new')
        self.assertEqual(self.gate('s:new'), ['ready'])

    def test_a_changed_tool_is_changed_until_it_is_back(self):
        self.sees(tool())
        row = self.sees(tool(description='other'))
        self.assertEqual(self.news(row), ([], ['echo'], [], False))
        for _ in range(2):
            self.assertEqual(self.gate('s:echo'), ['tool_changed'])
            self.assertEqual(self.news(self.one('sync')),
                             ([], [], [], False))
        self.assertEqual(self.news(self.sees(tool()))[1], ['echo'])
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_only_an_approve_moves_what_is_approved(self):
        self.sees(tool())
        self.sees(tool(description='other'))
        self.approve('s:echo')
        self.assertEqual(self.gate('s:echo'), ['ready'])
        self.sees(tool())
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])

    def test_one_that_vanished_and_returns_changed_is_changed(self):
        self.sees(tool(), tool('b'))
        self.assertEqual(self.sees(tool('b')).vanished, ['echo'])
        self.assertEqual(self.gate('s:echo'), ['not_found'])
        self.assertEqual(
            self.news(self.sees(tool('b'), tool(description='x'))),
            ([], ['echo'], [], False))
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])
        self.sees(tool('b'), tool())
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_two_of_a_name_that_differ_gate_in_every_mode(self):
        for top, more in (({}, {}), ({'quarantine_enabled': False}, {}),
                          ({}, {'trust_mode': 'auto'})):
            self.configure({'s': dict(self.serve(), **more)}, **top)
            self.sees(tool(), tool('b'))
            self.sees(tool(), tool(description='other'), tool('b'))
            with self.subTest(top, **more):
                self.assertEqual(self.gate('s:echo', 's:b'),
                                 ['tool_changed', 'ready'])
                self.assertIsNone(self.answers[0].hash)
                self.assertIn('advertised twice', self.refused(
                    'tools', 'approve', '--yes', 's:echo'))
            self.sees(tool(), tool('b'))
            self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_two_of_a_name_alike_are_one_with_a_warning(self):
        row = self.sees(tool(), tool())
        self.assertEqual((row.tools, self.gate('s:echo')), (1, ['ready']))
        self.assertIn('alike', row.notes[0])

    def test_a_refused_definition_of_a_known_tool_is_changed(self):
        for mode in ('manual', 'auto'):
            self.configure({'s': dict(self.serve(), trust_mode=mode)})
            self.sees(tool(), tool('b'))
            self.sees(answers={'tools/list': reply_text(
                '[{"name":"echo","inputSchema":{"x":NaN}},%s]'
                % json.dumps(tool('b')))})
            with self.subTest(mode):
                self.assertEqual(self.gate('s:echo', 's:b'),
                                 ['tool_changed', 'ready'])
                self.assertIn('efinition refused', self.answers[0].detail)
                self.assertIn('efinition refused', self.refused(
                    'tools', 'approve', '--yes', 's:echo'))
            self.sees(tool(), tool('b'))
            self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_a_refused_definition_of_an_unknown_tool_is_not_listed(self):
        self.sees(tool())
        row = self.sees(answers={'tools/list': reply_text(
            '[%s,{"name":"new","title":"a","title":"b"}]'
            % json.dumps(tool()))})
        self.assertEqual((row.tools, self.news(row)),
                         (1, ([], [], [], False)))
        self.assertEqual(self.gate('s:echo', 's:new'),
                         ['ready', 'not_found'])
        self.assertIn('definition refused: the key "title" stands twice',
                      self.answers[1].detail)
        self.sees(tool(), tool('new'))
        self.assertEqual(self.gate('s:new'), ['tool_pending_approval'])

    def test_an_empty_list_keeps_the_old_one(self):
        self.sees(tool())
        for spec in ({}, {'capabilities': {}}):
            row = self.sees(**spec)
            with self.subTest(spec):
                self.assertEqual((row.state, row.cause, row.tools),
                                 ('error', 'no_tools', 1))
                self.assertEqual(self.gate('s:echo'), ['server_unhealthy'])
        self.sees(tool())
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_an_empty_list_where_none_was_known_is_ready(self):
        row = self.sees(capabilities={})
        self.assertEqual((row.state, row.tools, row.baseline),
                         ('ready', 0, False))
        self.assertEqual(self.gate('s:echo'), ['not_found'])
        self.assertTrue(self.sees(tool()).baseline)
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_a_failed_look_changes_no_tool_and_no_approval(self):
        self.sees(tool())
        self.sees(tool(), tool('new'))
        before = self.do('tools', 'list')
        stuck = {'tools': [tool('other')], 'nextCursor': '8'}
        for spec in ({'die': 'initialize'}, {'die': 'tools/list'},
                     {'pages': {'first': stuck, '8': stuck}},
                     {'answers': {'tools/list': {'error': {'code': 1}}}}):
            self.assertEqual(self.sees(**spec).state, 'error')
            with self.subTest(spec):
                self.assertEqual(self.do('tools', 'list'), before)
                self.assertEqual(self.gate('s:echo', 's:new'), [
                    'server_unhealthy', 'tool_pending_approval'])
        self.assertEqual(self.count('approved'), 1)

    def test_key_order_and_10_or_10_0_is_no_change(self):
        schema = '{"type":"object","properties":{"b":{},"a":{"max":%s}}}'
        turned = '{"properties":{"a":{"max":%s},"b":{}},"type":"object"}'
        for text in (schema % '10', turned % '10.0', schema % '1e1'):
            row = self.sees(answers={'tools/list': reply_text(
                '[{"name":"echo","inputSchema":%s}]' % text)})
            with self.subTest(text):
                self.assertEqual((row.state, row.changed), ('ready', []))
                self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_hints_that_flap_gate_only_while_they_are_riskier(self):
        safe = tool(annotations={'readOnlyHint': True})
        for n in range(4):
            row = self.sees(safe if n % 2 == 0 else tool())
            with self.subTest(n):
                self.assertEqual(row.changed, ['echo'] if n % 2 else [])
                self.assertEqual(self.gate('s:echo'), [
                    'tool_changed' if n % 2 else 'ready'])

    def test_a_safer_hint_is_no_change_and_is_what_filters_read(self):
        self.sees(tool())
        self.assertEqual(self.gate('s:echo', '--read-only-only'),
                         ['missing_annotation'])
        self.assertEqual(self.sees(tool(annotations=SAFE)).changed, [])
        self.assertEqual(self.gate('s:echo', '--read-only-only'), ['ready'])

    def test_mode_auto_approves_as_they_come_with_a_record_each(self):
        self.configure({'s': dict(self.serve(), trust_mode='auto')})
        self.sees(tool())
        self.sees(tool(description='other'), tool('new'))
        self.assertEqual(self.gate('s:echo', 's:new'), ['ready', 'ready'])
        self.assertEqual(self.status(), 'approved')
        self.assertEqual(self.count("activity where type='sync'"), 2)

    def test_with_quarantine_off_statuses_are_kept_and_do_not_gate(self):
        self.configure({'s': self.serve()}, quarantine_enabled=False)
        self.sees(tool())
        self.sees(tool(description='other'), tool('new'))
        self.assertEqual(self.gate('s:echo', 's:new'), ['ready', 'ready'])
        self.assertEqual([self.status(), self.status('new')],
                         ['changed', 'pending'])

    def relaunch(self, *more):
        """Change the launch of `s` by more arguments."""
        entry = self.serve(tools=[tool()], starts=self.path('starts'))
        entry['args'] += more
        self.configure({'s': entry})

    def test_another_launch_is_quarantined_at_once_and_not_started(self):
        for top, mode in (({}, 'manual'), ({}, 'auto'),
                          ({'quarantine_enabled': False}, 'manual')):
            entry = self.serve(tools=[tool()], starts=self.path('starts'))
            self.configure({'s': dict(entry, trust_mode=mode)}, **top)
            self.assertEqual(self.one('sync').state, 'ready')
            started = self.pids()
            entry['args'].append('--changed')
            self.configure({'s': dict(entry, trust_mode=mode)}, **top)
            with self.subTest(top, mode=mode):
                self.assertEqual(self.gate('s:echo'),
                                 ['server_quarantined'])
                self.assertIn('launch changed', self.answers[0].detail)
                self.assertIn('--changed', self.answers[0].detail)
                self.assertEqual(self.one('sync').state, 'quarantined')
                self.assertEqual(self.pids(), started)
            os.remove(os.path.join(self.home, 'preflight.db'))

    def test_approving_a_launch_carries_its_approvals_over(self):
        self.sees(tool(), tool('b'))
        self.relaunch('--changed')
        done = self.do('servers', 'approve', 's', '--yes')
        self.assertEqual(done['carried'], 2)
        self.assertEqual(self.gate('s:echo'), ['server_initializing'])
        row = self.sees(tool(), tool('b', 'other'), tool('c'))
        self.assertFalse(row.baseline)
        self.assertEqual(self.gate('s:echo', 's:b', 's:c'), [
            'ready', 'tool_changed', 'tool_pending_approval'])

    def test_a_list_of_another_launch_is_not_this_ones(self):
        self.sees(tool())
        self.relaunch('--changed')
        self.do('servers', 'approve', 's', '--yes')
        self.sees(die='initialize')
        shown = self.do('servers', 'show', 's')
        self.assertEqual([shown[key] for key in (
            'state', 'protocol', 'era', 'listed_at', 'tools')],
            ['error', None, None, None, 0])
        self.assertEqual([row['listed'] for row in self.do('tools', 'list')],
                         [False])
        row = self.sees()
        self.assertEqual((row.state, row.tools), ('ready', 0))

    def test_an_empty_first_list_of_a_known_launch_is_ready(self):
        self.sees(tool())
        self.relaunch('--changed')
        self.do('servers', 'approve', 's', '--yes')
        self.assertEqual(self.sees().state, 'ready')

    def test_a_launch_that_comes_back_has_its_approvals(self):
        self.sees(tool())
        self.relaunch('--changed')
        self.do('servers', 'approve', 's', '--yes')
        self.one('sync')
        self.relaunch()
        self.assertEqual(self.gate('s:echo'), ['server_initializing'])
        self.assertFalse(self.one('sync').baseline)
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_mending_a_typo_before_any_baseline_needs_nothing(self):
        self.configure({'s': {'command': 'no-such-thing'}})
        self.assertEqual(self.one('sync').cause, 'command_not_found')
        self.relaunch()
        self.assertTrue(self.one('sync').baseline)
        self.assertEqual(self.gate('s:echo'), ['ready'])

    def test_what_was_seen_under_another_launch_counts_for_nothing(self):
        self.configure({'s': {'command': 'no-such-thing'}})
        self.one('sync')
        self.relaunch()
        self.assertEqual(self.gate('s:echo'), ['server_initializing'])

    def test_another_checkout_needs_a_sync_and_nothing_else(self):
        entry = self.serve(tools=[tool()])
        self.configure({'s': entry})
        self.one('sync')
        os.mkdir(self.path('second'))
        other = self.write('second/config.json', json.dumps(
            {'mcpServers': {'s': entry}}))
        self.assertEqual(self.gate('s:echo', configs=(other,)),
                         ['server_initializing'])
        self.serve(tools=[tool(), tool('new')])
        row = self.one('sync', configs=(other,))
        self.assertFalse(row.baseline)
        self.assertEqual(self.gate('s:echo', 's:new', configs=(other,)),
                         ['ready', 'tool_pending_approval'])
        self.assertEqual(self.gate('s:echo', 's:new'),
                         ['ready', 'not_found'])

    def test_in_another_checkout_a_changed_tool_is_no_new_one(self):
        entry = self.serve(tools=[tool(), tool('b')])
        self.configure({'s': entry})
        self.one('sync')
        other = self.write('other.json', json.dumps(
            {'mcpServers': {'s': entry}}))
        self.serve(answers={'tools/list': reply_text(
            '[{"name":"echo","title":NaN},%s]' % json.dumps(
                tool('b', 'other')))})
        row = self.one('sync', configs=(other,))
        self.assertEqual(self.news(row), ([], ['echo', 'b'], [], False))
        self.assertEqual(self.gate('s:echo', 's:b', configs=(other,)),
                         ['tool_changed', 'tool_changed'])

    def test_a_block_holds_for_every_launch_and_file(self):
        self.sees(tool())
        self.do('tools', 'block', 's:echo')
        self.relaunch('--changed')
        self.do('servers', 'approve', 's', '--yes')
        self.one('sync')
        self.assertEqual(self.gate('s:echo'), ['tool_blocked_by_user'])

    def test_an_approve_during_a_look_is_not_undone(self):
        self.sees(tool())
        self.sees(tool(description='other'))
        self.serve(tools=[tool(description='other'), tool('new')],
                   sleep={'tools/list': 0.3}, starts=self.path('starts'))
        found = []
        thread = threading.Thread(
            target=lambda: found.append(self.one('sync')))
        thread.start()
        self.wait_for(self.pids)
        self.approve('s:echo')
        thread.join()
        self.assertEqual(found[0].added, ['new'])
        self.assertEqual(self.gate('s:echo', 's:new'),
                         ['ready', 'tool_pending_approval'])

    def test_two_first_looks_at_one_name_make_one_baseline(self):
        self.configure({'s': self.serve(tools=[tool()])})
        config = pf.load_config(self.world())
        entry = self.serve('t', tools=[tool()])
        other = self.write('other.json', json.dumps(
            {'mcpServers': {'s': entry}}))
        seen = self.look(self.serve(tools=[tool()]))
        self.configure({'s': self.serve(tools=[tool()])})
        store = self.store()
        with store.read() as con:
            known, _ = pf.load_known(con, config, 's')
        self.assertTrue(self.one('sync', configs=(other,)).baseline)
        with store.write() as con:
            pf.take_lease(con, 's', known.server.file, (
                1, 2, known.launch, 'me'))
        row = pf.save_observation(store, known, seen, 'me')
        self.assertEqual(row.state, 'quarantined')
        self.assertEqual(self.gate('s:echo'), ['server_quarantined'])
        self.assertEqual(self.gate('s:echo', configs=(other,)), ['ready'])


# ==========================================================================
# 8. wire: what HTTP adds
# ==========================================================================


class Test08Sse(unittest.TestCase):
    """Event streams, cut as browsers cut them."""

    CASES = (
        ('lines end in LF', b'data: a\n\n', [('message', b'a')]),
        ('in CRLF', b'data: a\r\n\r\n', [('message', b'a')]),
        ('in CR', b'data: a\r\r', [('message', b'a')]),
        ('all three in turn', b'data: a\rdata: b\r\ndata: c\n\r',
         [('message', b'a\nb\nc')]),
        ('a byte order mark', b'\xef\xbb\xbfdata: a\n\n',
         [('message', b'a')]),
        ('only at the start', b'\n\xef\xbb\xbfdata: a\n\n', []),
        ('one blank is removed', b'data:  a\n\n', [('message', b' a')]),
        ('no blank', b'data:a\n\n', [('message', b'a')]),
        ('data joins by lines', b'data: a\ndata\ndata: b\n\n',
         [('message', b'a\n\nb')]),
        ('a type', b'event: endpoint\ndata: /x\n\n', [('endpoint', b'/x')]),
        ('which ends with its event', b'event: x\n\ndata: a\n\n',
         [('message', b'a')]),
        ('comments', b': hi\n:\ndata: a\n: no\n\n', [('message', b'a')]),
        ('unknown fields', b'foo: x\ndata: a\nbar\n\n', [('message', b'a')]),
        ('a colon in the data', b'data: a:b\n\n', [('message', b'a:b')]),
        ('empty data', b'id: 1\ndata:\n\n', [('message', b'')]),
        ('no data, no event', b'event: x\nid: 1\n\n', []),
        ('two events', b'data: a\n\ndata: b\n\n',
         [('message', b'a'), ('message', b'b')]),
        ('an end is missing', b'data: a\n\ndata: b\n', [('message', b'a')]),
    )

    def parse(self, *chunks):
        """Feed chunks to a parser; returns it and the events."""
        parser, events = pf.SseParser(), []
        for chunk in chunks:
            events += parser.feed(chunk)
        return parser, events

    def test_events(self):
        for what, stream, events in self.CASES:
            with self.subTest(what):
                self.assertEqual(self.parse(stream)[1], events)

    def test_events_wherever_the_stream_is_cut(self):
        for what, stream, events in self.CASES:
            with self.subTest(what):
                single = [stream[n:n + 1] for n in range(len(stream))]
                self.assertEqual(self.parse(*single)[1], events)
                for at in range(1, len(stream)):
                    self.assertEqual(
                        self.parse(stream[:at], stream[at:])[1], events, at)

    def test_id_counts_once_its_event_has_ended(self):
        for stream, last in ((b'id: 7\n\n', '7'), (b'id: 7\ndata: a\n', ''),
                             (b'id: 7\n\nid\n\n', ''),
                             (b'id: 7\n\nid: 8\0\n\n', '7')):
            with self.subTest(stream):
                self.assertEqual(self.parse(stream)[0].last_id, last)

    def test_retry_takes_digits_only(self):
        for text, wait in ((b'250', 250), (b'1s', None), (b'-1', None),
                           (b'', None), (b'9' * 4000, 999999999)):
            with self.subTest(text):
                self.assertEqual(
                    self.parse(b'retry: %s\n' % text)[0].retry, wait)

    def test_event_larger_than_a_message_may_be_is_refused(self):
        piece = b'data: ' + b'x' * (1 << 20) + b'\n'
        with self.assertRaises(pf.UpstreamError) as caught:
            self.parse(*[piece] * 17)
        self.assertIn('larger than', str(caught.exception))
        with self.assertRaises(pf.UpstreamError):
            self.parse(*[b'x' * (1 << 20)] * 17)

    def test_comments_and_ended_events_do_not_count(self):
        piece = b'x' * (1 << 20)
        self.parse(*[b': %s\n' % piece] * 17)
        self.assertEqual(len(self.parse(
            *[b'data: %s\n\n' % piece] * 17)[1]), 17)

    def test_held_data_lacks_only_the_end_of_its_event(self):
        for stream, held in ((b'data: a\n', True), (b'data: a', False),
                             (b'data: a\nda', False), (b'', False),
                             (b'data: a\n\n', False)):
            with self.subTest(stream):
                self.assertIs(self.parse(stream)[0].is_held(), held)


def jwt(**claims):
    """Make a JSON Web Token that nobody signed."""
    import base64
    return '.'.join(base64.urlsafe_b64encode(part).decode().rstrip('=')
                    for part in (b'{"alg":"none"}',
                                 json.dumps(claims).encode(), b'x'))


class Test08Http(unittest.TestCase):
    """What statuses, headers and tokens mean."""

    def test_challenge(self):
        for text, found in (
                ('Bearer', {}), ('', {}),
                ('bearer error="invalid_token"', {'error': 'invalid_token'}),
                ('Bearer Scope=a, ERROR = b', {'scope': 'a', 'error': 'b'}),
                ('Basic realm="x, Bearer error=no", Bearer realm="y"',
                 {'realm': 'y'}),
                ('Negotiate YWJj==, Bearer a="1"', {'a': '1'}),
                ('Negotiate YWJj, Bearer a="1"', {'a': '1'}),
                (r'Bearer a="say \"hi\", ok"', {'a': 'say "hi", ok'}),
                ('Bearer a="1", Digest a="2", b="3"', {'a': '1'}),
                ('Bearer a="1", a="2"', {'a': '1'}),
                ('Bearer a="1', {})):
            with self.subTest(text):
                self.assertEqual(pf.bearer_challenge(
                    {'www-authenticate': text}), found)

    def test_hostile_challenge_takes_no_time(self):
        text = 'Bearer ' + 'a="' * 20000 + '\\' * 20000
        self.assertIsInstance(
            pf.bearer_challenge({'www-authenticate': text}), dict)

    def test_status(self):
        later = {'retry-after': '3600'}
        for status, headers, has, cause, text in (
                (401, {}, False, '', '401: no credential is configured'),
                (401, {}, True, '', '401: the credential was refused'),
                (403, {}, True, '', '403: token lacks rights'),
                (403, {'www-authenticate': 'Bearer error='
                       '"insufficient_scope", scope="a b"'}, True, '',
                 '403: token lacks rights (insufficient_scope, a b)'),
                (404, {}, True, 'http_status',
                 'endpoint or session not found (404)'),
                (429, later, True, 'rate_limited',
                 'HTTP 429; Retry-After: 3600'),
                (503, later, True, 'http_status',
                 'HTTP 503; Retry-After: 3600'),
                (302, {}, True, 'http_status', 'HTTP 302')):
            with self.subTest(status=status, has=has):
                error = pf.status_error(status, headers, has)
                self.assertEqual((error.cause, str(error)), (cause, text))
                self.assertIs(isinstance(error, pf.LoginNeeded),
                              status in (401, 403))

    def test_body_of_a_refusal_is_quoted_unless_it_is_a_page(self):
        for body, text in ((b'No  such\nversion', 'HTTP 400: No such version'),
                           (b'<html>400</html>', 'HTTP 400'),
                           (b'', 'HTTP 400')):
            with self.subTest(body):
                self.assertEqual(str(pf.status_error(400, {}, True, body)),
                                 text)

    def test_protocol_headers(self):
        meta = {'_meta': {pf.META + 'protocolVersion': '2026-07-28'}}
        agreed = {'MCP-Protocol-Version': '2025-06-18'}
        for message, version, headers in (
                ({'method': 'initialize'}, '', {}),
                ({'method': 'initialize'}, '2025-06-18', {}),
                ({'method': 'tools/list', 'params': {}}, '2025-06-18',
                 agreed),
                ({'method': 'notifications/initialized'}, '2025-06-18',
                 agreed),
                ({'id': 1, 'result': {}}, '2025-06-18', agreed), ({}, '', {}),
                ({'method': 'tools/list', 'params': meta}, '',
                 {'MCP-Protocol-Version': '2026-07-28',
                  'Mcp-Method': 'tools/list'})):
            with self.subTest(message):
                self.assertEqual(pf.mcp_headers(message, version), headers)

    def test_media_type(self):
        for text in ('application/json', 'Application/JSON; Charset=UTF-8',
                     ' application/json ;x'):
            self.assertEqual(pf.media_type({'content-type': text}),
                             'application/json')
        self.assertEqual(pf.media_type({}), '')

    def test_end_of_a_token(self):
        at = 1900000000
        for value, end in (
                ('Bearer ' + jwt(exp=at), at * 1000),
                ('bearer  ' + jwt(exp=at + 0.5), at * 1000 + 500),
                ('Bearer ' + jwt(sub='x'), None),
                ('Bearer ' + jwt(exp=True), None),
                ('Bearer ' + jwt(exp='1'), None),
                ('Bearer ' + jwt(exp=-1), None),
                ('Bearer ' + jwt(exp=1e300), None),
                ('Bearer opaque', None), ('Basic ' + jwt(exp=at), None),
                ('Bearer a.b.c', None), ('Bearer a.WzFd.c', None), ('', None)):
            with self.subTest(value):
                self.assertEqual(
                    pf.credential_end({'AUTHORIZATION': value}), end)
        self.assertIsNone(pf.credential_end({'X': 'Bearer ' + jwt(exp=at)}))

    def test_places_of_metadata(self):
        known = '/.well-known/oauth-protected-resource'
        for url, named, places in (
                ('https://h/a/mcp?k=v', None,
                 ['https://h%s/a/mcp' % known, 'https://h' + known]),
                ('https://u:p@h:444/', None, ['https://h:444' + known]),
                ('https://h/mcp', 'https://as/x', ['https://as/x']),
                ('https://h/mcp', 'http://as/x', []),
                ('https://h/mcp', 'https://127.0.0.1/x', []),
                ('https://h/mcp', 'http://localhost/x', []),
                ('https://h/mcp', 'file:///etc/passwd', []),
                ('http://127.0.0.1:1/mcp', 'http://localhost:2/x',
                 ['http://localhost:2/x']),
                ('http://h/mcp', None, [])):
            with self.subTest(url=url, named=named):
                self.assertEqual(pf.metadata_urls(
                    url, {'resource_metadata': named} if named else {}),
                    places)

    def test_issuers(self):
        for body, found in (
                (b'{"authorization_servers": ["https://as/t?x=1", 5]}',
                 ['https://as/t']),
                (b'{"authorization_servers": {}}', []), (b'[]', []),
                (b'<html>', []), (b'\xff', []), (b'[' * 5000, [])):
            with self.subTest(body[:20]):
                self.assertEqual(pf.read_issuers(body), found)

    def test_secrets_of_a_url(self):
        for url, found in (
                ('https://h/mcp', []), ('https://u:pw@h/mcp', ['pw']),
                ('https://tok@h/mcp', ['tok']),
                ('https://h/mcp?exaApiKey=zz&tools=a', ['zz']), (None, [])):
            with self.subTest(url):
                self.assertEqual(pf.url_secrets(url), found)

    def test_plain_url(self):
        for url, shown in (
                ('https://u:p@H:443/a?k=v#f', 'https://h/a'),
                ('http://[::1]:8080/a', 'http://[::1]:8080/a'),
                ('ftp://h/a', '(no URL)'), ('http://h:port/', '(no URL)'),
                ('http://b\u00fccher.test/', 'http://xn--bcher-kva.test/')):
            with self.subTest(url):
                self.assertEqual(pf.plain_url(url), shown)


# ==========================================================================
# 17. links: HTTP, against a server on loopback that does as it is told
# ==========================================================================

WebRequest = namedtuple('WebRequest', 'method path headers message')


class WebServer:
    """Answers each connection by what answer(request) yields, in bytes.

    requests: all that came. A test that forgets to end it is ended itself:
    it closes with the test case.
    """

    def __init__(self, answer, host='127.0.0.1', context=None):
        family = socket.AF_INET6 if ':' in host else socket.AF_INET
        self.answer, self.context, self.requests = answer, context, []
        self.is_closed, self.threads = threading.Event(), []
        self.socket = socket.socket(family)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind((host, 0))
        self.socket.listen(64)
        self.port = self.socket.getsockname()[1]
        self.start(self.accept)

    def start(self, target, *given):
        """Run a function in a thread of this server."""
        thread = threading.Thread(target=target, args=given, daemon=True)
        self.threads.append(thread)
        thread.start()

    def accept(self):
        """Take connections until the server is closed."""
        while True:
            try:
                con, _ = self.socket.accept()
            except OSError:
                return
            if self.is_closed.is_set():
                con.close()
                return
            self.start(self.talk, con)

    def talk(self, con):
        """Serve one connection, for one request."""
        con.settimeout(10)
        try:
            if self.context:
                con = self.context.wrap_socket(con, server_side=True)
            with con, con.makefile('rb') as file:
                request = self.read(file)
                if not request:
                    return
                self.requests.append(request)
                for piece in self.answer(request):
                    if self.is_closed.is_set():
                        return
                    if callable(piece):     # it takes the connection over
                        piece(self, con)
                    else:
                        con.sendall(piece)
        except OSError:
            con.close()

    @staticmethod
    def read(file):
        """Read one request; None when there is none."""
        line = file.readline().decode('latin-1').split(' ')
        if len(line) < 3:
            return None
        headers = {}
        for row in iter(file.readline, b'\r\n'):
            name, _, value = row.decode('latin-1').partition(':')
            headers[name.lower()] = value.strip()
        body = file.read(int(headers.get('content-length', 0)))
        return WebRequest(line[0], line[1], headers,
                       json.loads(body.decode('utf-8')) if body else {})

    def wait(self, seconds):
        """Sleep, unless the server is closed."""
        self.is_closed.wait(seconds)

    def close(self):
        """End the server and its threads."""
        self.is_closed.set()
        with contextlib.suppress(OSError):
            socket.create_connection(self.socket.getsockname()[:2],
                                     1).close()
        self.socket.close()
        for thread in self.threads:
            thread.join(10)

    @property
    def methods(self):
        """List what was asked for: MCP methods, or those of HTTP."""
        return [request.message.get('method') or request.method
                for request in self.requests]


def web_reply(status=200, body=b'', kind='application/json', **headers):
    """Write an HTTP answer whose length is known."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = ['HTTP/1.1 %d Whatever' % status,
             'Content-Length: %d' % len(body)]
    lines += ['Content-Type: ' + kind] if kind else []
    lines += ['%s: %s' % (name.replace('_', '-'), value)
              for name, value in headers.items()]
    return '\r\n'.join(lines + ['', '']).encode('latin-1') + body


def web_stream(*pieces):
    """Write an event stream of messages (dicts) and of bytes as they are."""
    yield (b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; '
           b'charset=utf-8\r\n\r\n')
    for piece in pieces:
        yield (piece if isinstance(piece, bytes) or callable(piece)
               else b'data: %s\n\n' % json.dumps(piece).encode())


def web_result(request, version=None, tools=None):
    """Give the right JSON-RPC message for a request."""
    if request.message['method'] == 'initialize':
        value = {'protocolVersion': version or
                 request.message['params']['protocolVersion'],
                 'capabilities': {'tools': {}}, 'serverInfo': {}}
    elif request.message['method'] == 'server/discover':
        value = {'supportedVersions': ['2026-07-28'],
                 'capabilities': {'tools': {}}}
    else:
        value = {'tools': [tool()] if tools is None else tools}
    return {'jsonrpc': '2.0', 'id': request.message['id'], 'result': value}


def web_error(request, code, message, **data):
    """Give a JSON-RPC error for a request."""
    return {'jsonrpc': '2.0', 'id': request.message.get('id'),
            'error': {'code': code, 'message': message, 'data': data}}


def web_script(**special):
    """Make an answer of a good server; special: by MCP or HTTP method.

    'tools/list' and the like are written with _ for the slash.
    """
    def answer(request):
        name = request.message.get('method') or request.method
        found = special.get(name.replace('/', '_'))
        if found is not None:
            found = found(request) if callable(found) else found
            return [found] if isinstance(found, bytes) else found
        if 'id' in request.message and 'method' in request.message:
            return [web_reply(200, web_result(request))]
        return [web_reply(202 if request.method == 'POST' else 405)]
    return answer


def web_hang(server, con):
    """Keep a connection open and say no more."""
    server.wait(10)


def web_drip(data):
    """Make something that sends data again and again, for ever."""
    def send(server, con):
        while not server.is_closed.is_set():
            con.sendall(data)
            server.wait(0.01)
    return send


CA_CERT = '''\
-----BEGIN CERTIFICATE-----
MIIBrDCCAVKgAwIBAgIBBzAKBggqhkjOPQQDAjAsMRgwFgYDVQQKDA9UZXN0IElu
c3BlY3Rpb24xEDAOBgNVBAMMB1Rlc3QgQ0EwIBcNMjAwMTAxMDAwMDAwWhgPMjEy
MDAxMDEwMDAwMDBaMCwxGDAWBgNVBAoMD1Rlc3QgSW5zcGVjdGlvbjEQMA4GA1UE
AwwHVGVzdCBDQTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJ4OqYwpROtMlYET
wVIJ0fLvN0mi+vterxILqQvWnVGAe/Y4V8h5bjGIzl3nWSd5OB8IVUtvbxl2F38E
WB6fzDGjYzBhMA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFDc8Glt0QncXMH68
a1ykQpb5Zj1HMB8GA1UdIwQYMBaAFDc8Glt0QncXMH68a1ykQpb5Zj1HMA4GA1Ud
DwEB/wQEAwIBhjAKBggqhkjOPQQDAgNIADBFAiEA45qCPS2/edaCp0Pg0iL1xlSP
JYKCkXaNpyWZt2dYuCMCIC7njvtwKyDqZyvtlbVyfpju5pfRM1jnJaV0jlX2DpBA
-----END CERTIFICATE-----
'''
# For localhost, mcp.test and 127.0.0.1, until 2120; and its key.
SERVER_CERT = '''\
-----BEGIN CERTIFICATE-----
MIIBpzCCAUygAwIBAgIBCDAKBggqhkjOPQQDAjAsMRgwFgYDVQQKDA9UZXN0IElu
c3BlY3Rpb24xEDAOBgNVBAMMB1Rlc3QgQ0EwIBcNMjAwMTAxMDAwMDAwWhgPMjEy
MDAxMDEwMDAwMDBaMBMxETAPBgNVBAMMCG1jcC50ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAE5+4A5qhdfbXdPs4FndzDChqznqsSF8Cui9Bwi2mlSIP1E6hy
dTB0d+OXEwAkDYoqXpfAv0SELxosOgOFf7gk86N2MHQwDAYDVR0TAQH/BAIwADAd
BgNVHQ4EFgQUdgAI2GGZKgmOzUrifEDzjVdCMq4wHwYDVR0jBBgwFoAUNzwaW3RC
dxcwfrxrXKRClvlmPUcwJAYDVR0RBB0wG4IJbG9jYWxob3N0gghtY3AudGVzdIcE
fwAAATAKBggqhkjOPQQDAgNJADBGAiEAzCM/1wblwOJxAkw1Wf4+x4zA3z/B2w0H
zpJbnz9Axp8CIQDzfU4Xmw8KYR1HPfTCTl2qqsRw7No8+dnzS1mphjS58A==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgLKZ1yanqgOXLZ+5c
SYyE+063NexWx4lhw/IxnhjFadShRANCAATn7gDmqF19td0+zgWd3MMKGrOeqxIX
wK6L0HCLaaVIg/UTqHJ1MHR345cTACQNiipel8C/RIQvGiw6A4V/uCTz
-----END PRIVATE KEY-----
'''


class WebCase(TempCase):
    """A test with HTTP servers of its own."""

    @classmethod
    def setUpClass(cls):
        """Let the servers of a failed test end with it."""
        super().setUpClass()
        cls.proxies = dict.fromkeys((
            'http_proxy', 'https_proxy', 'all_proxy', 'no_proxy',
            'HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY', 'NO_PROXY'), '')

    def web(self, answer, **more):
        """Start a server; its URL is web.url. answer: bytes, for any
        request, or a function of it that gives pieces to send."""
        server = WebServer(answer if callable(answer)
                           else lambda request: [answer], **more)
        self.addCleanup(server.close)
        host = more.get('host', '127.0.0.1')
        server.url = 'http%s://%s:%d/mcp' % (
            's' if more.get('context') else '',
            '[%s]' % host if ':' in host else host, server.port)
        return server

    def tls_context(self):
        """Make what a server needs for https."""
        import ssl
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.write('server.pem', SERVER_CERT))
        return context

    def look(self, url, era=None, seconds=10, env=(), world=None, **entry):
        """Look at a server in this process: the Observation."""
        world = world or self.world(
            env=dict(os.environ, **dict(self.proxies, **dict(env))),
            ca_file=entry.pop('ca_file', ''))
        self.configure({'s': dict({'url': url}, **entry)})
        server, why = pf.look_up(pf.load_config(world), 's')
        self.assertEqual(why, '')
        end = world.clock() + seconds
        return pf.observe_server(server, era, (end, end), world)

    def assert_ready(self, seen, names=('echo',)):
        """Hold a look to have seen these tools."""
        self.assertEqual((seen.state, seen.cause, seen.detail),
                         ('ready', '', ''))
        self.assertEqual([found.name for found in seen.tools], list(names))

    def assert_error(self, seen, cause, *texts):
        """Hold a look to have failed for this cause, in these words."""
        self.assertEqual((seen.state, seen.cause, seen.tools),
                         ('error', cause, None), seen.detail)
        for text in texts:
            self.assertIn(text, seen.detail)


class Test17Http(WebCase):
    """Streamable HTTP and the older HTTP+SSE (pitfalls 17 to 24, 61, 66)."""

    def test_conversation(self):
        web = self.web(web_script(initialize=lambda request: web_reply(
            200, web_result(request), Mcp_Session_Id='abc')))
        seen = self.look(web.url, type='http')
        self.assert_ready(seen)
        self.assertEqual((seen.protocol, seen.era),
                         ('2025-11-25', 'handshake'))
        self.assertEqual(web.methods, [
            'initialize', 'notifications/initialized', 'tools/list',
            'DELETE'])

    def test_post_accepts_json_and_event_streams(self):
        web = self.web(web_script())
        self.look(web.url)
        for request in web.requests:
            self.assertEqual(request.headers['accept'],
                             'application/json, text/event-stream')
            self.assertEqual(request.headers['content-type'],
                             'application/json')

    # -- 17. version --------------------------------------------------------

    def test_version_header_is_on_all_but_initialize(self):
        web = self.web(web_script(initialize=lambda request: web_reply(
            200, web_result(request, '2025-06-18'))))
        self.assert_ready(self.look(web.url))
        self.assertEqual(
            [request.headers.get('mcp-protocol-version')
             for request in web.requests], [None, '2025-06-18', '2025-06-18'])

    def test_unknown_version_ends_the_look(self):
        web = self.web(web_script(initialize=lambda request: web_reply(
            200, web_result(request, '2099-01-01'))))
        self.assert_error(self.look(web.url), 'protocol',
                          'the server speaks 2099-01-01, we know 2025-11-25')

    def test_refused_version_is_tried_again_with_one_that_is_named(self):
        def initialize(request):
            if request.message['params']['protocolVersion'] == '2024-11-05':
                return web_reply(200, web_result(request))
            return web_reply(400, web_error(request, -32602, 'Unsupported',
                                      supported=['2024-11-05']))
        web = self.web(web_script(initialize=initialize))
        seen = self.look(web.url)
        self.assert_ready(seen)
        self.assertEqual(seen.protocol, '2024-11-05')

    def test_refused_initialize_is_reported_in_the_words_of_the_server(self):
        web = self.web(web_script(initialize=web_reply(
            400, b'Unsupported protocol version', 'text/plain')))
        self.assert_error(self.look(web.url), 'http_status',
                          'HTTP 400: Unsupported protocol version')

    # -- the modern era -----------------------------------------------------

    def modern(self, code, message, status=400, **special):
        """Start a server that speaks only 2026-07-28."""
        return self.web(web_script(initialize=lambda request: web_reply(
            status, web_error(request, code, message)), **special))

    def test_modern_server(self):
        for code, status in ((-32020, 400), (-32022, 400), (-32601, 404),
                             (-32602, 400)):
            with self.subTest(code):
                web = self.modern(code, 'Unsupported', status)
                seen = self.look(web.url)
                self.assert_ready(seen)
                self.assertEqual((seen.protocol, seen.era),
                                 ('2026-07-28', 'modern'))
                self.assertEqual(
                    [(request.headers.get('mcp-protocol-version'),
                      request.headers.get('mcp-method'),
                      request.headers.get('mcp-name'))
                     for request in web.requests[1:]],
                    [('2026-07-28', 'server/discover', None),
                     ('2026-07-28', 'tools/list', None)])

    def test_remembered_modern_server_is_not_asked_to_initialize(self):
        web = self.web(web_script())
        self.assert_ready(self.look(web.url, 'modern'))
        self.assertEqual(web.methods, ['server/discover', 'tools/list'])

    def test_remembered_modern_server_that_is_no_longer(self):
        for refusal in (
                lambda request: web_reply(400, web_error(
                    request, -32000, 'no')),
                lambda request: web_reply(405, b''),
                lambda request: web_reply(200, {
                    'jsonrpc': '2.0', 'id': request.message['id'],
                    'result': {'capabilities': {}}})):
            web = self.web(web_script(server_discover=refusal))
            seen = self.look(web.url, 'modern')
            self.assert_ready(seen)
            self.assertEqual(seen.era, 'handshake')

    # -- 19. sessions and statuses ------------------------------------------

    def sessions(self, expired, **more):
        """Start a server whose sessions in expired are gone at once."""
        def initialize(request):
            number[0] += 1
            return web_reply(200, web_result(request),
                         Mcp_Session_Id='s%d' % number[0])

        def listing(request):
            if request.headers.get('mcp-session-id') in expired:
                return web_reply(404, web_error(request, -32600, 'Not found'))
            return web_reply(200, web_result(request))
        number = [0]
        return self.web(web_script(initialize=initialize, tools_list=listing,
                               **more))

    def test_session_id_is_sent_after_initialize_and_ended(self):
        web = self.sessions(())
        self.assert_ready(self.look(web.url))
        self.assertEqual([request.headers.get('mcp-session-id')
                          for request in web.requests],
                         [None, 's1', 's1', 's1'])
        self.assertEqual(web.methods[-1], 'DELETE')

    def test_lost_session_is_begun_again_once(self):
        web = self.sessions(('s1',))
        self.assert_ready(self.look(web.url))
        self.assertEqual(web.methods.count('initialize'), 2)
        self.assertEqual([request.headers.get('mcp-session-id')
                          for request in web.requests
                          if request.message.get('method') == 'initialize'],
                         [None, None])

    def test_session_lost_twice_is_an_error(self):
        web = self.sessions(('s1', 's2', 's3'))
        self.assert_error(self.look(web.url), 'http_status',
                          'endpoint or session not found (404)')
        self.assertEqual(web.methods.count('initialize'), 2)

    def test_404_on_initialize_is_the_wrong_url(self):
        web = self.web(web_reply(404, b'<html>', 'text/html',
                                 Mcp_Session_Id='x'))
        self.assert_error(self.look(web.url, type='http'), 'http_status',
                          'not found (404)')
        self.assertEqual(web.methods, ['initialize'])

    def test_session_comes_only_from_a_good_initialize(self):
        for first in (lambda request: web_reply(
                400, web_error(request, -32022, 'x'), Mcp_Session_Id='bad'),
                lambda request: web_reply(
                    200, web_result(request), Mcp_Session_Id='b\xe4d'),
                lambda request: web_reply(
                    200, web_result(request), Mcp_Session_Id='two words')):
            web = self.web(web_script(initialize=first))
            self.assert_ready(self.look(web.url))
            self.assertFalse(any('mcp-session-id' in request.headers
                                 for request in web.requests))
            self.assertNotIn('DELETE', web.methods)

    def test_answer_to_delete_is_ignored(self):
        for answer in (web_reply(405), web_reply(500), b'junk', [web_hang]):
            web = self.sessions((), DELETE=answer)
            with mock.patch.object(pf, 'GRACE_MS', 100):
                self.assert_ready(self.look(web.url))

    # -- 20. streams that stay open -----------------------------------------

    def test_reply_on_a_stream_ends_the_wait(self):
        noted = {'jsonrpc': '2.0', 'method': 'notifications/message',
                 'params': {}}
        for what, after in (('open', [web_hang]),
                            ('kept alive', [web_drip(b': alive\n\n')])):
            with self.subTest(what):
                web = self.web(web_script(
                    tools_list=lambda request, after=after: web_stream(
                        noted, web_result(request), *after)))
                self.assert_ready(self.look(web.url))

    def test_reply_whose_event_never_ends(self):
        web = self.web(web_script(tools_list=lambda request: web_stream(
            b'data: %s\n' % json.dumps(web_result(request)).encode(),
            web_hang)))
        self.assert_ready(self.look(web.url))

    def test_deadline_holds_whatever_trickles_in(self):
        head = b'HTTP/1.1 200 OK\r\nContent-Type: %s\r\n'
        for what, pieces in (
                ('nothing', [web_hang]), ('a header', [head, web_drip(b'x')]),
                ('headers', [web_drip(b'HTTP/1.1 100 Continue\r\n\r\n')]),
                ('a body', [head % b'application/json' + b'\r\n',
                            web_drip(b' ')]),
                ('events', list(web_stream(web_drip(b': alive\n\n')))),
                ('other messages', list(web_stream(web_drip(
                    b'data: {"jsonrpc":"2.0","method":"x"}\n\n'))))):
            with self.subTest(what):
                web = self.web(web_script(initialize=pieces))
                self.assert_error(self.look(web.url, seconds=0.2), 'timeout',
                                  'no answer to initialize within')

    def test_notification_that_is_never_answered(self):
        web = self.web(web_script(
            notifications_initialized=[web_hang]))
        self.assert_error(self.look(web.url, seconds=1), 'timeout',
                          'no answer to notifications/initialized')

    def test_stream_cut_short_is_resumed_behind_its_last_event(self):
        def listing(request):
            asked.append(request)
            return web_stream(b'retry: 10\nid: e1\ndata:\n\nid: e2\n')

        def resumed(request):
            self.assertEqual(request.headers['last-event-id'], 'e1')
            return web_stream(web_result(asked[0]))
        asked = []
        web = self.web(web_script(tools_list=listing, GET=resumed))
        self.assert_ready(self.look(web.url))

    def test_stream_that_only_ends_is_an_error(self):
        for start, gets in ((b'', 0), (b'retry: 1\nid: 1\ndata:\n\n', 2)):
            web = self.web(web_script(
                tools_list=list(web_stream(start)),
                GET=lambda request: web_stream(
                    b'retry: 1\ndata:\n\nid: 2\n\n')))
            self.assert_error(self.look(web.url, type='http'), 'protocol',
                              'the answer to tools/list ended')
            self.assertEqual(web.methods.count('GET'), gets)

    def test_signal_ends_a_wait(self):
        def initialize(request):
            world.stop.append(signal.SIGTERM)
            return [web_hang]
        world = self.world(env=dict(os.environ, **self.proxies))
        web = self.web(web_script(initialize=initialize))
        with self.assertRaises(pf.Interrupted):
            self.look(web.url, world=world)

    def test_answers_have_limits(self):
        line = b'X-%d: y\r\n'
        for pieces in (
                [web_reply(200, b' ' * 2000)],
                list(web_stream(b'data: ' + b'x' * 2000 + b'\n')),
                [b'HTTP/1.1 200 OK\r\n'] + [line % n for n in range(200)],
                [b'HTTP/1.1 200 OK\r\nX: ' + b'y' * 70000 + b'\r\n\r\n']):
            web = self.web(web_script(initialize=pieces))
            with mock.patch.object(pf, 'MAX_MESSAGE_BYTES', 1000):
                seen = self.look(web.url)
            self.assert_error(seen, 'protocol')
            self.assertRegex(seen.detail, 'larger than 1000|no HTTP: got more')

    # -- 21. framing on the wire --------------------------------------------

    def test_framing(self):
        def crlf(data):
            return [b': hi\r\n\r\nid: 1\r\nevent: message\r\ndata:' + data
                    + b'\r', b'\n\r\n']

        def bare(data):
            return [b'data: ' + data + b'\r\r']

        def lines(data):
            at = data.index(b',') + 1
            return [b'data: ' + data[:at] + b'\ndata: ' + data[at:]
                    + b'\n\n']
        for frame in (crlf, bare, lines):
            with self.subTest(frame.__name__):
                web = self.web(web_script(
                    tools_list=lambda request, frame=frame: web_stream(
                        *frame(json.dumps(web_result(request)).encode()))))
                self.assert_ready(self.look(web.url))

    def test_chunked_stream(self):
        def listing(request):
            event = b'data: %s\n\n' % json.dumps(web_result(request)).encode()
            yield (b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n'
                   b'Transfer-Encoding: chunked\r\n\r\n')
            for byte in (event[n:n + 40] for n in range(0, len(event), 40)):
                yield b'%x\r\n%s\r\n' % (len(byte), byte)
            yield web_hang
        self.assert_ready(self.look(self.web(web_script(
            tools_list=listing)).url))

    # -- 22. redirects ------------------------------------------------------

    def test_redirect_to_another_origin_is_not_followed(self):
        thief = self.web(web_script())
        for status in (301, 302, 303, 307, 308):
            web = self.web(web_reply(
                status, Location='http://u:pw@127.0.0.1:%d/steal?k=v'
                % thief.port))
            self.assert_error(
                self.look(web.url, headers={'X-API-Key': 'abcdef'}),
                'redirected', 'redirected to http://127.0.0.1:%d/steal, set '
                'that URL' % thief.port)
        self.assertEqual(thief.requests, [])

    def test_redirect_within_the_origin_keeps_method_and_body(self):
        for status in (307, 308):
            moved = [web_reply(status, Location='/mcp/?a=b')]
            web = self.web(lambda request, moved=moved: moved
                           if request.path == '/mcp'
                           else web_script()(request))
            self.assert_ready(self.look(
                web.url, headers={'X-API-Key': 'abcdef'}))
            self.assertEqual([(request.method, request.path)
                              for request in web.requests[:2]],
                             [('POST', '/mcp'), ('POST', '/mcp/?a=b')])
            self.assertEqual(web.requests[1].headers['x-api-key'], 'abcdef')

    def test_redirect_that_would_change_the_method(self):
        web = self.web(web_reply(302, Location='/login'))
        self.assert_error(self.look(web.url), 'redirected', '/login')
        self.assertEqual(len(web.requests), 1)

    def test_redirects_in_a_circle_end(self):
        web = self.web(web_reply(307, Location='/mcp'))
        self.assert_error(self.look(web.url), 'redirected')
        self.assertEqual(len(web.requests), 4)

    def test_redirect_to_nonsense(self):
        for place in ('ftp://h/x', 'http://[x/', 'http://h:99999/'):
            web = self.web(web_reply(307, Location=place))
            self.assert_error(self.look(web.url), 'redirected')

    # -- 23. proxies, loopback, addresses -----------------------------------

    def test_loopback_never_goes_through_a_proxy(self):
        dead = 'http://127.0.0.1:9'
        web = self.web(web_script())
        for host in ('127.0.0.1', 'localhost'):
            seen = self.look('http://%s:%d/mcp' % (host, web.port), env={
                'http_proxy': dead, 'HTTP_PROXY': dead, 'ALL_PROXY': dead,
                'NO_PROXY': '.corp,10.0.0.0/8'})
            self.assert_ready(seen)

    def test_choice_of_proxy(self):
        for url, env, proxy in (
                ('http://h/', {'http_proxy': 'http://p:1'}, 'http://p:1'),
                ('http://h/', {'HTTP_PROXY': 'p:1'}, 'http://p:1'),
                ('https://h/', {'http_proxy': 'http://p:1'}, ''),
                ('https://h/', {'all_proxy': 'http://p:1'}, 'http://p:1'),
                ('https://h/', {}, '')):
            with self.subTest(url=url, env=env):
                self.assertEqual(pf.proxy_for(pf.origin_of(url), env), proxy)

    def test_exemptions_from_the_proxy(self):
        for url, rules, is_exempt in (
                ('http://a.corp/', '.corp', True),
                ('http://a.corp/', 'corp', True),
                ('http://a.corp/', '*.corp', True),
                ('http://acorp/', 'corp', False),
                ('http://A.CORP/', 'x, a.corp', True),
                ('http://h/', '*', True), ('http://h/', '', False),
                ('http://h/', ' , ,.', False),
                ('http://h:81/', 'h:81', True),
                ('http://h:82/', 'h:81', False),
                ('http://10.1.2.3/', '10.0.0.0/8', True),
                ('http://11.1.2.3/', '10.0.0.0/8', False),
                ('http://10.1.2.3/', '10.1.2.3', True),
                ('http://[fd00::1]/', 'fd00::/8', True),
                ('http://[fd00::1]/', '[fd00::1]', True),
                ('http://[fd00::1]:81/', '[fd00::1]:81', True)):
            for name in ('no_proxy', 'NO_PROXY'):
                with self.subTest(url=url, rules=rules, name=name):
                    self.assertEqual(pf.proxy_for(
                        pf.origin_of(url), {'http_proxy': 'http://p',
                                            name: rules}),
                        '' if is_exempt else 'http://p')

    def test_proxy_is_asked_for_the_whole_url(self):
        proxy = self.web(web_script())
        seen = self.look('http://mcp.test:8080/mcp?a=b', env={
            'http_proxy': 'http://user:pa%%20ss@127.0.0.1:%d' % proxy.port})
        self.assert_ready(seen)
        first = proxy.requests[0]
        self.assertEqual(first.path, 'http://mcp.test:8080/mcp?a=b')
        self.assertEqual(first.headers['host'], 'mcp.test:8080')
        self.assertEqual(first.headers['proxy-authorization'],
                         'Basic dXNlcjpwYSBzcw==')

    def test_https_goes_through_a_tunnel(self):
        def relay(server, con):
            with socket.create_connection(('127.0.0.1', web.port), 5) as far:
                server.start(pump, far, con)
                pump(con, far)

        def pump(source, target):
            with contextlib.suppress(OSError):
                for data in iter(lambda: source.recv(65536), b''):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)
        web = self.web(web_script(), context=self.tls_context())
        proxy = self.web(lambda request: [
            b'HTTP/1.1 200 Connection established\r\n\r\n', relay])
        seen = self.look(
            'https://mcp.test/mcp', ca_file=self.write('ca.pem', CA_CERT),
            env={'https_proxy': 'http://u:pw@127.0.0.1:%d' % proxy.port})
        self.assert_ready(seen)
        first = proxy.requests[0]
        self.assertEqual((first.method, first.path, first.headers['host']),
                         ('CONNECT', 'mcp.test:443', 'mcp.test:443'))
        self.assertIn('proxy-authorization', first.headers)
        self.assertNotIn('proxy-authorization', web.requests[0].headers)
        self.assertEqual(web.requests[0].headers['host'], 'mcp.test')

    def test_proxy_that_is_not_there_is_named_without_its_password(self):
        for scheme in ('http', 'https'):
            seen = self.look(scheme + '://mcp.test/', env={
                scheme + '_proxy': 'http://user:hunter22@127.0.0.1:9'})
            self.assert_error(seen, 'refused',
                              'the proxy http://127.0.0.1:9 cannot be '
                              'reached: connection refused')
            self.assertNotIn('hunter22', repr(seen))

    def test_proxy_that_refuses(self):
        proxy = self.web(web_reply(407))
        self.assert_error(
            self.look('https://mcp.test/', env={
                'https_proxy': 'http://127.0.0.1:%d' % proxy.port}),
            'http_status', 'refused to connect to mcp.test:443: HTTP 407')

    def test_proxy_of_a_kind_we_do_not_know(self):
        self.assert_error(
            self.look('http://mcp.test/', env={
                'http_proxy': 'socks5://u:hunter22@127.0.0.1:9'}),
            'protocol', 'not an http:// URL')

    def test_every_address_of_localhost_is_tried(self):
        for host in ('127.0.0.1', '::1'):
            with self.subTest(host):
                try:
                    web = self.web(web_script(), host=host)
                except OSError:
                    self.skipTest('no %s here' % host)
                self.assert_ready(self.look('http://localhost:%d/mcp'
                                            % web.port))

    def test_nobody_listens(self):
        web = self.web(web_script())
        web.close()
        self.assert_error(self.look(web.url), 'refused', '127.0.0.1:%d cannot '
                          'be reached: connection refused' % web.port)

    def test_connection_closed_without_an_answer(self):
        web = self.web(lambda request: [])
        self.assert_error(self.look(web.url), 'refused',
                          'closed the connection without an answer')

    def test_answer_that_is_no_http(self):
        web = self.web(b'SSH-2.0-x\r\n')
        self.assert_error(self.look(web.url), 'protocol', 'is no HTTP')

    def test_name_that_does_not_resolve(self):
        failed = socket.gaierror(-2, 'Name or service not known')
        with mock.patch('socket.getaddrinfo', side_effect=failed):
            self.assert_error(
                self.look('http://nowhere.test/mcp'), 'dns', 'the name of '
                'nowhere.test:80 cannot be resolved: Name or service')
        self.assert_error(self.look('http://%s.test/' % ('a' * 70)), 'dns')

    def test_name_that_hangs_does_not_hold_up_the_deadline(self):
        let_go = threading.Event()
        self.addCleanup(let_go.set)
        with mock.patch('socket.getaddrinfo',
                        side_effect=lambda *given: let_go.wait(10) and []):
            self.assert_error(self.look('http://h.test/mcp', seconds=0.2),
                              'timeout', 'no connection, so no answer to '
                              'initialize within')

    def test_url_that_cannot_be_called(self):
        for url in ('ftp://h/x', 'h/x', 'http://h:port/', 'http:///x'):
            with self.subTest(url):
                self.assert_error(self.look(url, type='http'), 'protocol',
                                  'cannot be sent over HTTP')

    def test_header_that_cannot_be_sent_is_not_shown(self):
        for value in ('hunter22\r\nX: y', 'hunter22\u20ac'):
            seen = self.look('http://127.0.0.1:9/', type='http',
                             headers={'X-Api-Key': value})
            self.assertNotIn('hunter22', repr(seen))
            self.assertEqual(seen.state, 'error')

    def test_configured_headers_are_sent_ours_win(self):
        web = self.web(web_script())
        self.assert_ready(self.look(web.url, headers={
            'accept': 'text/html', 'X-Two': 'b', 'User-Agent': 'mine',
            'mcp-protocol-version': '1999-01-01'}))
        sent = web.requests[1].headers
        self.assertEqual((sent['x-two'], sent['user-agent'],
                          sent['mcp-protocol-version'], sent['accept']),
                         ('b', 'mine', '2025-11-25',
                          'application/json, text/event-stream'))

    def test_user_in_the_url_logs_in(self):
        web = self.web(web_script())
        url = web.url.replace('//', '//me:pa%20ss@')
        self.assert_ready(self.look(url))
        self.assertEqual(web.requests[0].headers['authorization'],
                         'Basic bWU6cGEgc3M=')

    # -- TLS ----------------------------------------------------------------

    def test_certificate_of_a_named_ca(self):
        ca = self.write('ca.pem', CA_CERT)
        web = self.web(web_script(), context=self.tls_context())
        self.assert_ready(self.look(web.url, ca_file=ca))
        self.configure({'s': {'url': web.url}})
        for words, env in ((['--ca-file', ca], {}),
                           ([], {'SSL_CERT_FILE': ca})):
            done = self.sync(*words, env=dict(self.proxies, **env))
            self.assertEqual(done.code, 0, done)

    def test_certificate_of_an_unknown_ca_names_it(self):
        web = self.web(web_script(), context=self.tls_context())
        seen = self.look(web.url)
        self.assert_error(seen, 'tls', 'no TLS with 127.0.0.1:%d' % web.port,
                          'name the CA with --ca-file or SSL_CERT_FILE')
        if sys.version_info >= (3, 8):
            self.assertIn('issued by Test Inspection, Test CA', seen.detail)
        self.assertEqual(web.requests, [])

    def test_certificate_for_another_name(self):
        web = self.web(web_script(), context=self.tls_context(),
                       host='127.0.0.2')
        seen = self.look(web.url, ca_file=self.write('ca.pem', CA_CERT))
        self.assert_error(seen, 'tls')
        self.assertEqual(web.requests, [])

    def test_plain_http_where_tls_was_expected(self):
        def refuse():
            con, _ = listener.accept()
            with con:
                con.sendall(b'HTTP/1.1 400 Bad Request\r\n\r\n')
                con.recv(65536)
        listener = socket.socket()
        self.addCleanup(listener.close)
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        threading.Thread(target=refuse, daemon=True).start()
        self.assert_error(self.look(
            'https://127.0.0.1:%d/' % listener.getsockname()[1]), 'tls')

    def test_tls_handshake_that_never_ends(self):
        listener = socket.socket()
        self.addCleanup(listener.close)
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        self.assert_error(
            self.look('https://127.0.0.1:%d/' % listener.getsockname()[1],
                      seconds=0.2), 'timeout', 'no answer to initialize')

    def test_ca_file_that_is_not_there(self):
        self.configure({})
        done = self.sync('--ca-file', self.path('no.pem'))
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('is not a file', done.err)

    def test_remedies_repeat_the_ca_file(self):
        ca = self.write('ca.pem', CA_CERT)
        self.configure({'s': {'url': 'https://127.0.0.1:9/'}})
        row = self.check('--ca-file', ca, 's:x').json['tools'][0]
        self.assertIn('--ca-file %s sync s' % ca, row['remediation'])

    # -- 24. logins ---------------------------------------------------------

    def test_statuses_of_a_login(self):
        key = {'X-API-Key': 'abcdef'}
        for status, headers, text in (
                (401, {}, '401: no credential is configured'),
                (401, key, '401: the credential was refused'),
                (403, key, '403: token lacks rights'),
                (403, {}, '403: token lacks rights (none is configured)')):
            for challenge in ({}, {'WWW_Authenticate': 'Bearer realm="x"'}):
                with self.subTest(status=status, headers=headers):
                    web = self.web(web_reply(status, {'error': 'x'},
                                             **challenge))
                    seen = self.look(web.url, headers=headers)
                    self.assertEqual((seen.state, seen.cause, seen.detail),
                                     ('pending_auth', '', text))

    def test_statuses_that_time_may_cure(self):
        for status, cause in ((429, 'rate_limited'), (503, 'http_status')):
            web = self.web(web_reply(status, {'error': 'x'},
                                     Retry_After='3600'))
            self.assert_error(self.look(web.url), cause,
                              'HTTP %d; Retry-After: 3600' % status)
            self.assertEqual(len(web.requests), 1)

    def test_authorization_server_is_looked_up_without_the_credential(self):
        def answer(request):
            if request.path == '/meta':
                return [web_reply(200, {'authorization_servers':
                                    ['https://as.test/t?x=y']})]
            return [web_reply(401, WWW_Authenticate='Bearer resource_metadata='
                          '"http://127.0.0.1:%d/meta"' % web.port)]
        web = self.web(answer)
        seen = self.look(web.url, headers={'Authorization': 'Bearer abcdef'})
        self.assertEqual(seen.state, 'pending_auth')
        self.assertEqual(seen.detail, '401: the credential was refused; its '
                         'authorization server is https://as.test/t')
        self.assertEqual([(request.method, request.path,
                           'authorization' in request.headers)
                          for request in web.requests],
                         [('POST', '/mcp', True), ('GET', '/meta', False)])

    def test_authorization_server_is_found_at_its_known_places(self):
        known = '/.well-known/oauth-protected-resource'
        for place in (known + '/mcp', known):
            web = self.web(lambda request, place=place: [web_reply(
                200, {'authorization_servers': ['https://as.test']})
                if request.path == place else web_reply(401)])
            self.assertIn('https://as.test', self.look(web.url).detail)
            self.assertEqual({request.method for request in
                              web.requests[1:]}, {'GET'})

    def test_metadata_that_does_not_come_changes_nothing(self):
        for answer in (web_reply(500),
                       web_reply(302, Location='http://x.test/'),
                       web_reply(200, b'<html>'), b'junk', b''):
            web = self.web(web_script(GET=answer, initialize=web_reply(401)))
            seen = self.look(web.url)
            self.assertEqual((seen.state, seen.detail),
                             ('pending_auth',
                              '401: no credential is configured'))

    def test_gate_after_a_401(self):
        web = self.web(lambda request: [
            web_reply(200, {'authorization_servers': ['https://as.test']})
            if request.method == 'GET' else web_reply(401)])
        self.configure({'s': {'url': web.url}})
        done = self.sync(env=self.proxies)
        self.assertEqual(done.code, 11, done)
        self.assertEqual(done.json['servers'][0]['state'], 'pending_auth')
        done = self.check('s:x')
        self.assertEqual(done.code, 11, done)
        row = done.json['tools'][0]
        self.assertEqual((row['reason'], row['action']),
                         ('oauth_required', 'login'))
        self.assertIn('https://as.test', row['detail'])
        shown = self.run_cli('servers', 'show', 's', '-o', 'json').json
        self.assertEqual(shown['state'], 'pending_auth')
        self.assertIn('https://as.test', shown['detail'])

    def test_end_of_the_credential_is_seen_and_nothing_else_of_it(self):
        now = int(time.time())
        token = jwt(exp=now + 7200, sub='hunter22')
        web = self.web(web_script())
        self.configure({'s': {'url': web.url, 'headers': {
            'Authorization': 'Bearer ${TOK}'}}})
        done = self.sync(env=dict(self.proxies, TOK=token))
        self.assertEqual(done.code, 0, done)
        shown = self.run_cli('servers', 'show', 's', '-o', 'json').json
        self.assertEqual(shown['expires_at'],
                         pf.format_time((now + 7200) * 1000))
        with open(os.path.join(self.home, 'preflight.db'), 'rb') as file:
            data = file.read()
        self.assertNotIn(token.split('.')[1].encode(), data)
        self.assertNotIn(b'hunter22', data)
        for words, code in (([], 0), (['--horizon', '1h'], 0),
                            (['--horizon', '3h'], 11)):
            done = self.check('s:echo', *words)
            self.assertEqual(done.code, code, done)
        self.assertIn('ends in', done.json['tools'][0]['detail'])
        self.assertEqual(done.json['tools'][0]['reason'], 'oauth_required')

    def test_credential_past_its_end_is_a_login(self):
        web = self.web(web_script())
        for token, code in ((jwt(exp=int(time.time()) - 60), 11),
                            ('opaque', 0)):
            self.configure({'s': {'url': web.url, 'headers': {
                'Authorization': 'Bearer ' + token}}})
            self.assertEqual(self.sync(env=self.proxies).code, 0)
            done = self.check('s:echo')
            self.assertEqual(done.code, code, done)
        self.assertEqual(self.check('s:echo', '--horizon', '900d').code, 0)
        self.assertEqual(self.check('s:echo', '--horizon', 'soon').code, 1)

    def test_end_of_the_credential_among_other_states(self):
        now = int(time.time() * 1000)
        web = self.web(web_script())
        self.configure({'s': {'url': web.url, 'headers': {
            'Authorization': 'Bearer ' + jwt(exp=now // 1000 + 60)}}})
        self.assertEqual(self.sync(env=self.proxies).code, 0)
        world = self.world()
        config = pf.load_config(world)
        question = pf.Question(
            [pf.parse_id('s:echo')], pf.operator(config), frozenset(), now,
            config.settings, 'preflight', 'here')
        with pf.Store(self.home, world) as store, store.write() as con:
            def verdict(at):
                found = pf.judge_all(snap, question._replace(now=at), 'r')
                return found.answers[0].reason
            snap = pf.open_snapshot(con, config)
            self.assertIsNone(verdict(now))
            self.assertEqual(verdict(now + 61000), 'oauth_required')
            self.assertIsNone(verdict(now))
            row, _, link = pf.load_link(con, 's', os.path.realpath(
                self.config))
            for state, reason in (('error', 'oauth_required'),
                                  ('pending_auth', 'oauth_required')):
                pf.save_link(con, row, link._replace(
                    state=state, cause='refused', detail='d'))
                snap = pf.open_snapshot(con, config)
                self.assertEqual(verdict(now + 61000), reason)
                self.assertEqual(verdict(now), {
                    'error': 'server_unhealthy'}.get(state, reason))
            pf.save_link(con, row, link._replace(launch='another'))
            snap = pf.open_snapshot(con, config)
            self.assertEqual(verdict(now + 61000), 'server_initializing')

    def test_secrets_stay_out_of_output_and_state(self):
        secrets = ('sk-live-1234', 'abcd9999', 'zzzz8888', 'pppp7777')

        def echo(request):
            return [web_reply(400, ('bad key: %s %s' % (said.pop(0), [
                request.headers, request.path])).encode(), 'text/plain')]
        said = ['of zzzz8888', 'of pppp7777']
        web = self.web(echo)
        self.configure({'s': {
            'type': 'http', 'url': 'http://u:pppp7777@127.0.0.1:%d/mcp?'
            'exaApiKey=zzzz8888' % web.port,
            'headers': {'X-Api-Key': 'sk-live-1234',
                        'Authorization': 'Bearer abcd9999'}}})
        text = ''
        for words in (('sync',), ('sync', '--debug'), ('servers', 'show', 's'),
                      ('tools', 'preflight', 's:x'), ('activity', 'list')):
            done = self.run_cli(*words, env=self.proxies)
            text += done.out + done.err
        self.assertIn('HTTP 400: bad key', text)
        for name in os.listdir(self.home):
            with open(os.path.join(self.home, name), 'rb') as file:
                text += file.read().decode('latin-1')
        for secret in secrets:
            self.assertNotIn(secret, text)

    # -- 61. ids of replies -------------------------------------------------

    def test_id_that_comes_back_as_text(self):
        web = self.web(web_script(tools_list=lambda request: web_reply(
            200, dict(web_result(request), id=str(request.message['id'])))))
        self.assert_ready(self.look(web.url))

    def test_id_that_does_not_come_back(self):
        for number in (None, 0):
            web = self.web(web_script(
                tools_list=lambda request, number=number: web_reply(
                    200, dict(web_result(request), id=number))))
            self.assert_error(self.look(web.url), 'protocol',
                              'does not echo request ids')

    def test_reply_to_another_request_is_not_taken(self):
        web = self.web(web_script(tools_list=lambda request: web_stream(
            dict(web_result(request, tools=[]), id=1), web_result(request))))
        self.assert_ready(self.look(web.url))
        web = self.web(web_script(tools_list=lambda request: web_reply(
            200, dict(web_result(request), id=99))))
        self.assert_error(self.look(web.url), 'protocol',
                          'ended without a reply')

    def test_error_status_may_carry_any_id(self):
        for number in ('server-error', None, 99):
            web = self.web(web_script(
                tools_list=lambda request, number=number: web_reply(
                    400, dict(web_error(request, -32600, 'why'),
                              id=number))))
            self.assert_error(self.look(web.url), 'protocol',
                              'error -32600: why')

    # -- 66. what counts as an answer ---------------------------------------

    def test_answer_that_is_no_message(self):
        for body, kind in ((b'{"error": "Session not found"}',
                            'application/json'), (b'[]', 'application/json'),
                           (b'<html>', 'text/html'), (b'', None),
                           (b'{"jsonrpc": "2.0", "id"', 'application/json')):
            with self.subTest(body):
                web = self.web(web_script(
                    tools_list=web_reply(200, body, kind)))
                self.assert_error(self.look(web.url), 'protocol',
                                  'JSON-RPC message')

    def test_media_type_in_any_case_with_parameters(self):
        web = self.web(web_script(initialize=lambda request: web_reply(
            200, web_result(request), 'Application/JSON; Charset=UTF-8')))
        self.assert_ready(self.look(web.url))

    def test_notification_may_be_accepted_in_many_ways(self):
        for status in (200, 202, 204, 400):
            web = self.web(web_script(notifications_initialized=web_reply(
                status, kind=None)))
            self.assert_ready(self.look(web.url))

    def test_request_that_is_only_accepted(self):
        web = self.web(web_script(tools_list=web_reply(202)))
        self.assert_error(self.look(web.url), 'http_status', 'HTTP 202')

    def test_reply_that_is_not_utf8(self):
        web = self.web(web_script(tools_list=lambda request: web_reply(
            200, json.dumps(web_result(request)).replace(
                'Echo', '\xff').encode('latin-1'))))
        self.assert_error(self.look(web.url), 'protocol', 'not UTF-8')

    # -- what servers ask and say meanwhile ---------------------------------

    def test_request_of_the_server_is_answered_by_a_post(self):
        web = self.web(web_script(tools_list=lambda request: web_stream(
            {'jsonrpc': '2.0', 'id': 'p', 'method': 'ping'},
            {'jsonrpc': '2.0', 'id': 'r', 'method': 'roots/list'},
            web_result(request))))
        self.assert_ready(self.look(web.url))
        told = [request.message for request in web.requests
                if request.message.get('id') in ('p', 'r')]
        self.assertEqual([(message['id'], 'error' in message)
                          for message in told], [('p', False), ('r', True)])

    def test_list_that_changed_is_fetched_again(self):
        def listing(request):
            asked.append(request)
            if len(asked) > 1:
                return web_reply(200, web_result(request, tools=[tool('new')]))
            return web_stream(
                {'jsonrpc': '2.0', 'method':
                 'notifications/tools/list_changed'}, web_result(request))
        asked, slept = [], []
        web = self.web(web_script(tools_list=listing))
        world = self.world(env=dict(os.environ, **self.proxies),
                           sleep=lambda s: slept.append(time.sleep(s)))
        self.assert_ready(self.look(web.url, world=world), ['new'])
        self.assertTrue(slept)      # until it is quiet

    # -- the older HTTP+SSE -------------------------------------------------

    def older(self, endpoint='/messages?s=1', post=None, **more):
        """Start a server of 2024-11-05: replies come on the stream."""
        replies = []
        ready = threading.Condition()

        def events(server, con):
            while not server.is_closed.is_set():
                with ready:
                    if not replies:
                        ready.wait(0.05)
                    found, replies[:] = list(replies), []
                for message in found:
                    con.sendall(b'event: message\ndata: %s\n\n'
                                % json.dumps(message).encode())

        def answer(request):
            if (request.method, request.path) == ('GET', '/sse'):
                return web_stream(b'event: endpoint\ndata: %s\n\n' % (
                    endpoint % {'port': web.port}).encode(), events)
            if request.path == '/sse':
                return [web_reply(more.get('status', 405), b'<html>')]
            if request.method == 'GET':
                return [web_reply(404)]
            if post:
                return post(request)
            if 'id' in request.message and 'method' in request.message:
                with ready:
                    replies.extend(more.get('notes', ()))
                    replies.append(web_result(request, '2024-11-05'))
                    ready.notify()
            return [web_reply(202, b'Accepted', 'text/plain')]
        web = self.web(answer)
        web.url = web.url.replace('/mcp', '/sse')
        return web

    def test_older_transport(self):
        web = self.older()
        seen = self.look(web.url, type='sse')
        self.assert_ready(seen)
        self.assertEqual(seen.protocol, '2024-11-05')
        self.assertEqual(
            [(request.method, request.path) for request in web.requests],
            [('GET', '/sse')] + [('POST', '/messages?s=1')] * 3)
        self.assertEqual(web.requests[0].headers['accept'],
                         'text/event-stream')

    def test_older_transport_with_an_absolute_endpoint(self):
        self.assert_ready(self.look(self.older(
            'http://127.0.0.1:%(port)d/m').url, type='sse'))

    def test_endpoint_of_another_origin_is_refused(self):
        thief = self.web(web_script())
        for place in ('http://127.0.0.1:%d/m?k=v' % thief.port, '//h.test/m',
                      'https://127.0.0.1:%(port)d/m', 'file:///m'):
            web = self.older(place)
            self.assert_error(self.look(web.url, type='sse'), 'protocol',
                              'another origin')
            self.assertEqual(web.methods, ['GET'])
        self.assertEqual(thief.requests, [])

    def test_url_without_a_type_falls_back_to_the_older_transport(self):
        for status in (400, 404, 405, 406, 415):
            with self.subTest(status):
                web = self.older(status=status)
                self.assert_ready(self.look(web.url))
                self.assertEqual(web.methods[:2], ['initialize', 'GET'])

    def test_other_refusals_do_not_fall_back(self):
        for status in (401, 403, 429, 500):
            web = self.older(status=status)
            self.assertNotEqual(self.look(web.url).state, 'ready')
            self.assertNotIn(('GET', '/sse'), [
                (request.method, request.path) for request in web.requests])

    def test_declared_type_does_not_fall_back(self):
        web = self.older(status=405)
        self.assert_error(self.look(web.url, type='http'), 'http_status',
                          'HTTP 405')
        self.assertEqual(web.methods, ['initialize'])

    def test_refusal_after_the_handshake_does_not_fall_back(self):
        web = self.web(web_script(tools_list=web_reply(404)))
        self.assert_error(self.look(web.url), 'http_status', '(404)')
        self.assertNotIn('GET', web.methods)

    def test_first_refusal_is_the_one_reported(self):
        web = self.web(web_script(
            initialize=web_reply(400, b'no', 'text/plain'),
            GET=web_reply(404)))
        self.assert_error(self.look(web.url), 'http_status', 'HTTP 400: no')
        self.assertEqual(web.methods, ['initialize', 'GET'])

    def test_login_found_on_the_way_back_is_reported(self):
        web = self.web(web_script(initialize=web_reply(405),
                                  GET=web_reply(401)))
        self.assertEqual(self.look(web.url).state, 'pending_auth')

    def test_post_that_is_never_answered(self):
        for post, told in ((lambda request: [web_hang], 'no answer'),
                           (lambda request: [web_reply(202)], 'no answer')):
            web = self.older(post=post)
            self.assert_error(self.look(web.url, type='sse', seconds=0.2),
                              'timeout', told + ' to initialize')

    def test_post_that_is_refused(self):
        web = self.older(post=lambda request: [web_reply(401)])
        self.assertEqual(self.look(web.url, type='sse').state,
                         'pending_auth')
        web = self.older(post=lambda request: [web_reply(500)])
        self.assert_error(self.look(web.url, type='sse'), 'http_status')

    def test_stream_without_an_endpoint(self):
        web = self.web(web_script(
            GET=lambda request: web_stream(b'data: x\n\n')))
        self.assert_error(self.look(web.url, type='sse'), 'protocol',
                          'names no endpoint')
        web = self.web(web_script(GET=lambda request: web_stream(web_hang)))
        with mock.patch.object(pf, 'ENDPOINT_MS', 200):
            self.assert_error(self.look(web.url, type='sse'), 'timeout')

    def test_stream_that_is_none(self):
        web = self.web(web_script(GET=web_reply(200, b'<html>', 'text/html')))
        self.assert_error(self.look(web.url, type='sse'), 'http_status')

    def test_stream_that_ends_before_the_reply(self):
        web = self.web(web_script(
            GET=lambda request: web_stream(b'event: endpoint\ndata: /m\n\n'),
            initialize=web_reply(202)))
        self.assert_error(self.look(web.url, type='sse'), 'protocol',
                          'the event stream ended')

    def test_list_that_changed_on_the_older_transport(self):
        web = self.older(notes=[{
            'jsonrpc': '2.0', 'method': 'notifications/tools/list_changed'}])
        self.assert_ready(self.look(web.url, type='sse'))
        self.assertEqual(web.methods.count('tools/list'), 2)

    # -- all of it, as a user would -----------------------------------------

    def test_sync_and_gate(self):
        web = self.web(web_script())
        old = self.older()
        self.configure({'new': {'url': web.url, 'type': 'http'},
                        'old': {'url': old.url}})
        done = self.sync(env=self.proxies)
        self.assertEqual(done.code, 0, done)
        self.assertEqual([(row['server'], row['state'], row['tools'])
                          for row in done.json['servers']],
                         [('new', 'ready', 1), ('old', 'ready', 1)])
        done = self.check('new:echo', 'old:echo')
        self.assertEqual(done.code, 0, done)
        before = len(web.requests) + len(old.requests)
        self.assertEqual(self.check('new:nope').code, 12)
        self.assertEqual(len(web.requests) + len(old.requests), before)


class Test18Causes(WebCase):
    """Each cause has a detail that names the fact (contract 9)."""

    def child(self, **spec):
        """Look at a fake server that is our child."""
        return self.look(None, seconds=spec.pop('seconds', 20),
                         **self.serve(**spec))

    def answered(self, status, **headers):
        """Look at a server that answers everything with a status."""
        web = self.web(web_reply(status, **headers))
        return self.look(web.url + '?key=hush-1', 'handshake', type='http')

    def closed(self):
        """Look at a place where nobody listens."""
        web = self.web(web_script())
        web.close()
        return self.look(web.url + '?key=hush-1')

    def redirected(self):
        """Look at a server that sends us elsewhere."""
        return self.look(self.web(web_reply(
            307, Location='https://other.test/mcp?key=hush-1')).url)

    def unknown(self):
        """Look at a host that has no address."""
        with mock.patch('socket.getaddrinfo', side_effect=socket.gaierror(
                -2, 'Name or service not known')):
            return self.look('http://nowhere.test/mcp?key=hush-1')

    TABLE = (
        ('command_not_found', lambda case: case.look(
            None, command='no-such', env=[('PATH', '/usr/bin:/bin')]),
         "command 'no-such' not found; PATH was /usr/bin:/bin; give an "
         'absolute path or set env.PATH'),
        ('exited', lambda case: case.child(
            die='start', stderr='FATAL: API_KEY: sk-live-hush\n'),
         'exited with code 3 before initialize; last stderr: FATAL: '
         r'API_KEY: \*\*\*'),
        ('timeout', lambda case: case.child(
            sleep={'initialize': 60}, seconds=0.5, stderr='busy\n'),
         r'no answer to initialize within [0-9.ms]+(; last stderr: busy)?'),
        ('refused', closed, r'127\.0\.0\.1:\d+ cannot be reached: connection '
         'refused'),
        ('dns', unknown, r'the name of nowhere\.test:80 cannot be resolved: '
         'Name or service not known'),
        ('tls', lambda case: case.look(case.web(
            web_script(), context=case.tls_context()).url + '?key=hush-1'),
         r'no TLS with 127\.0\.0\.1:\d+: .*'),
        ('http_status', lambda case: case.answered(503),
         r'HTTP 503; from http://127\.0\.0\.1:\d+/mcp'),
        ('http_status', lambda case: case.answered(404),
         r'endpoint or session not found \(404\); from http://127\.0\.0\.1:'
         r'\d+/mcp'),
        ('rate_limited', lambda case: case.answered(429, Retry_After='60'),
         r'HTTP 429; Retry-After: 60; from http://127\.0\.0\.1:\d+/mcp'),
        ('redirected', redirected, 'redirected to https://other.test/mcp, '
         'set that URL'),
        ('protocol', lambda case: case.child(version='2099-01-01'),
         'the server speaks 2099-01-01, we know .*'),
        ('unresolved', lambda case: case.look('http://h.test/${NO_SUCH}'),
         r'NO_SUCH \(url\) has no value'))

    def test_details(self):
        for cause, look, words in self.TABLE:
            with self.subTest(cause):
                seen = look(self)
                self.assert_error(seen, cause)
                self.assertRegex(seen.detail, r'\A%s\Z' % words)
                self.assertNotIn('hush', repr(seen))

    def test_every_cause_of_a_look_is_in_the_table(self):
        """The other three are no look's: they come of the state."""
        self.assertEqual({row[0] for row in self.TABLE}, set(CAUSES) - {
            'no_tools', 'stale', 'interrupted'})


# ==========================================================================
# 19. health
# ==========================================================================

CASE_FILE = '/c/config.json'
API_TOKEN = 'tok-Zq81-very-secret'      # no real one
SECRET_SPEC = {'url': 'http://127.0.0.1:9/me', 'token_env': 'API_TOKEN'}


class Test07Health(unittest.TestCase):
    """The `health` of an entry: what it takes, and the presets."""

    BAD = (
        ({'url': 'api.example.com'}, 'url must be an http:// or https://'),
        ({'url': 'ftp://h/x'}, 'url must be'), ({'url': 1}, 'url must be'),
        ({'url': 'http://h:port/'}, 'url must be'),
        ({'method': 'DELETE'}, 'method must be one of "GET", "HEAD", '),
        ({'body': 5}, 'body must be a string, an object or an array'),
        ({'token_env': 'A B'}, 'token_env must be the name of a variable'),
        ({'token_env': ''}, 'token_env must be'),
        ({'auth': 'basic'}, 'auth must be "bearer" or "header:NAME"'),
        ({'auth': 'header:'}, 'auth must be'),
        ({'auth': 'header:A B'}, 'auth must be'),
        ({'auth': 'header:Host'}, 'auth must be'),
        ({'auth': 'header:content-length'}, 'auth must be'),
        ({'validates_credential': True}, 'validates_credential must be one'),
        ({'tools': 'x'}, 'tools must be an array of strings'),
        ({'tools': [1]}, 'tools must be'), ({'tool': ['x']}, 'tool must be'),
        ({'tool': 'x', 'tools': ['y']}, 'tool and health.tools are both'),
        ({'setup': 1}, 'setup must be'), ({'status_page': 'x'}, 'status_pa'),
        ({'preset': 'github'}, 'preset must be one of "exa", "tavily", '))

    def test_what_is_refused(self):
        for health, why in self.BAD:
            with self.subTest(health):
                server, found = read_entry({'command': 'x',
                                            'health': health})
                self.assertIsNone(server)
                self.assertIn('was skipped: health.' + why, found)

    def test_a_bad_overlay_is_named(self):
        server, found = read_entry({'command': 'x'}, CLAUDE, {
            'health': {'url': 'x'}})
        self.assertIsNone(server)
        self.assertIn('health.url must be', found)

    def test_unknown_keys_warn(self):
        for layers in (({'command': 'x', 'health': {'urll': 1, 'name': 2}},),
                       ({'command': 'x'}, OURS, {'health': {
                           'urll': 1, 'name': 2}})):
            with self.subTest(layers):
                self.assertEqual(read_good(*layers).warnings, [
                    'unknown key "urll" in health (did you mean url?)',
                    'unknown key "name" in health'])

    def test_one_tool_is_a_list_of_one(self):
        self.assertEqual(read_good({'command': 'x', 'health': {
            'tool': 'a'}}).health, {'tools': ['a']})

    def test_null_is_absent(self):
        server = read_good({'command': 'x', 'health': {
            'url': None, 'body': None, 'tool': None, 'tools': None}})
        self.assertEqual(
            (pf.health_settings(server)['url'], server.warnings),
            (None, []))

    def settings(self, **health):
        """Complete a table."""
        return pf.health_settings(a_server(health=health))

    def test_defaults(self):
        found = self.settings(url='http://h/', token_env='T')
        self.assertEqual(
            [found[key] for key in ('method', 'body', 'auth', 'tools',
                                    'validates_credential', 'costs')],
            ['GET', None, 'bearer', [], 'none', False])
        self.assertIsNone(self.settings(url='http://h/')['auth'])

    # preset, validates, variable, method, host and path, auth, tools, costs
    PRESETS = '''
    exa none EXA_API_KEY POST api.exa.ai/search header:x-api-key - yes
    tavily none TAVILY_API_KEY POST api.tavily.com/search bearer - yes
    perplexity presence PERPLEXITY_API_KEY POST \
api.perplexity.ai/chat/completions bearer - yes
    morph presence MORPH_API_KEY POST \
api.morphllm.com/v1/chat/completions bearer edit_file yes
    semgrep none SEMGREP_APP_TOKEN GET semgrep.dev/api/v1/me bearer - no
    '''

    def test_presets(self):
        rows = [line.split() for line in self.PRESETS.strip().split('\n')]
        self.assertEqual([row[0] for row in rows], list(pf.PRESETS))
        for name, validates, variable, method, place, auth, tool_, costs in (
                rows):
            found = self.settings(preset=name)
            with self.subTest(name):
                self.assertEqual(
                    (found['validates_credential'], found['token_env'],
                     found['method'], found['url'], found['auth'],
                     found['tools'], found['costs']),
                    (validates, variable, method, 'https://' + place, auth,
                     [tool_] if tool_ != '-' else [], costs == 'yes'))
                self.assertRegex(found['version'], r'^\d+\.\d+\.\d+$')

    def test_bodies_of_presets_ask_for_as_little_as_there_is(self):
        message = [{'role': 'user', 'content': 'x'}]
        self.assertEqual(
            [pf.PRESETS[name].get('body') for name in pf.PRESETS],
            [{'query': 'x', 'numResults': 1},
             {'query': 'x', 'max_results': 1},
             {'model': 'sonar', 'max_tokens': 1, 'messages': message},
             {'model': 'morph-v3-fast', 'max_tokens': 1,
              'messages': message}, None])

    def test_the_config_beats_the_preset(self):
        found = self.settings(preset='perplexity', tools=['a'],
                              validates_credential='remote')
        self.assertEqual((found['validates_credential'], found['tools'],
                          found['token_env']),
                         ('remote', ['a'], 'PERPLEXITY_API_KEY'))


def a_sight(state='', reason='', **more):
    """Make a Sight; by default of a server whose tools are all there."""
    return pf.Sight(state, reason, more.get('fact', ''),
                    more.get('visible', ('a',)))


def a_probe(reason='ok', status=200, **more):
    """Make a probe as it is sent, or with skipped=why as it is not."""
    return dict({'at': NOW, 'key': 'k', 'status': status, 'ms': 5,
                 'reason': reason, 'detail': '', 'quota': [],
                 'skipped': None}, **more)


class Test19States(unittest.TestCase):
    """The closed table, the order, the exit codes."""

    SKIPPED = a_probe(skipped='credential not readable here')
    # sight, probe, validates -> state, reason, exit
    TABLE = (
        (a_sight('OFFLINE', 'exited'), a_probe(), 'remote',
         'OFFLINE', 'exited', 11),
        (a_sight(), a_probe(), 'none', 'HEALTHY', 'ok', 0),
        (a_sight(), SKIPPED, 'remote', 'HEALTHY', 'probe_skipped', 0),
        (a_sight(), SKIPPED, 'none', 'PRESENT (untested)', 'probe_skipped',
         0),
        (a_sight(), SKIPPED, 'presence', 'PRESENT (untested)',
         'probe_skipped', 0),
        (a_sight(), a_probe(skipped=pf.NO_UPSTREAM), 'none', 'HEALTHY',
         'no_upstream', 0),
        (a_sight(), a_probe('http_401', 401), 'remote', 'DEGRADED',
         'http_401', 11),
        (a_sight(), a_probe('http_403', 403), 'none', 'DEGRADED',
         'http_403', 11),
        (a_sight(), a_probe('rate_limited', 429), 'none', 'DEGRADED',
         'rate_limited', 10),
        (a_sight(), a_probe('http_status', 503), 'none', 'DEGRADED',
         'http_status', 10),
        (a_sight(), a_probe('tls', None), 'none', 'DEGRADED', 'tls', 10),
        (a_sight('DEGRADED', 'list_failed'), a_probe(), 'none', 'DEGRADED',
         'list_failed', 10),
        (a_sight('DEGRADED', 'http_401'), a_probe(), 'none', 'DEGRADED',
         'http_401', 11),
        (a_sight('', 'tool_missing'), a_probe(), 'none', 'DEGRADED',
         'tool_missing', 10),
        (a_sight('', 'tool_missing'), SKIPPED, 'remote', 'DEGRADED',
         'tool_missing', 10),
        (a_sight('', 'tool_missing'), a_probe('http_401', 401), 'none',
         'DEGRADED', 'http_401', 11))

    def test_the_table(self):
        for sight, probe, validates, state, reason, code in self.TABLE:
            with self.subTest(sight=sight, probe=probe):
                found = pf.health_state(sight, probe, validates)
                self.assertEqual(found, (state, reason))
                self.assertEqual(pf.exit_of_state(*found), code)

    def test_no_other_state_exists(self):
        self.assertEqual(pf.STATES, ('OFFLINE', 'DEGRADED',
                                     'PRESENT (untested)', 'HEALTHY'))

    def row(self, name, state, reason):
        """Make a row as far as the order of rows needs it."""
        return {'server': name, 'state': state, 'reason': reason}

    def test_worst_first_and_the_worst_wins(self):
        rows = [self.row('a', 'HEALTHY', 'ok'),
                self.row('b', 'PRESENT (untested)', 'probe_skipped')]
        report = pf.health_report(rows, NOW)
        self.assertEqual(
            (report['overall'], pf.exit_of_health(report),
             [row['server'] for row in report['servers']]),
            ('HEALTHY', 0, ['b', 'a']))
        for more, overall, code in (
                (('c', 'DEGRADED', 'tls'), 'DEGRADED', 10),
                (('d', 'DEGRADED', 'http_403'), 'DEGRADED', 11),
                (('e', 'OFFLINE', 'exited'), 'OFFLINE', 11),
                (('f', 'OFFLINE', 'not_configured'), 'OFFLINE', 12)):
            rows.append(self.row(*more))
            report = pf.health_report(rows, NOW)
            with self.subTest(more):
                self.assertEqual(
                    (report['overall'], pf.exit_of_health(report),
                     report['servers'][0]['server']),
                    (overall, code, more[0]))

    def test_nothing_at_all_is_not_healthy(self):
        report = pf.health_report([], NOW)
        self.assertEqual((report['overall'], pf.exit_of_health(report)),
                         ('OFFLINE', 1))

    def test_a_list_beside_what_is_expected(self):
        for names, expected, state, reason in (
                ((), [], 'OFFLINE', 'no_tools'),
                ((), ['a'], 'OFFLINE', 'no_tools'),
                (('a',), [], '', ''), (('a', 'b'), ['a'], '', ''),
                (('a',), ['b'], 'OFFLINE', 'tool_missing'),
                (('a',), ['a', 'b'], '', 'tool_missing')):
            with self.subTest(names=names, expected=expected):
                found = pf.sight_of(
                    a_known(a_link(), a_server(health={'tools': expected})),
                    names, False, 0, NOW)
                self.assertEqual((found.state, found.reason),
                                 (state, reason))

    # connection, is a credential configured -> state, reason (limit 15m)
    LINKS = (
        (a_link(), False, '', ''),
        (None, False, 'DEGRADED', 'not_seen'),
        (a_link(state='', observed_at=None), False, 'DEGRADED', 'not_seen'),
        (a_link(state='', observed_at=None, lease_at=NOW - 9000,
                lease_until=NOW - 1000), False, 'DEGRADED', 'interrupted'),
        (a_link(state='', observed_at=None, lease_at=NOW - 9000,
                lease_until=NOW + 1000), False, 'DEGRADED', 'not_seen'),
        (a_link(observed_at=NOW - 16 * 60000), False, 'DEGRADED', 'stale'),
        (a_link(observed_at=NOW + 61000), False, 'DEGRADED', 'stale'),
        (a_link(state='error', cause='exited', observed_at=1), False,
         'DEGRADED', 'stale'),
        (a_link(state='error', cause='exited', lease_at=NOW - 500,
                lease_until=NOW - 100), False, 'DEGRADED', 'interrupted'),
        (a_link(state='error', cause='exited'), False, 'OFFLINE', 'exited'),
        (a_link(state='error', cause='no_tools'), False, 'OFFLINE',
         'no_tools'),
        (a_link(state='error', cause='protocol', detail='tools/list failed '
                'with error -1: x'), False, 'DEGRADED', 'list_failed'),
        (a_link(state='error', cause='refused', detail='tools/list failed'),
         False, 'OFFLINE', 'refused'),
        (a_link(state='pending_auth', detail='401: x'), False, 'OFFLINE',
         'http_401'),
        (a_link(state='pending_auth', detail='403: x'), False, 'OFFLINE',
         'http_403'),
        (a_link(state='pending_auth', detail='401: x'), True, 'DEGRADED',
         'http_401'),
        (a_link(state='pending_auth', detail='403: x'), True, 'DEGRADED',
         'http_403'),
        (a_link(expires_at=NOW), True, 'DEGRADED', 'credential_ended'))

    def test_a_record_of_each_kind(self):
        for link, is_configured, state, reason in self.LINKS:
            with self.subTest(link):
                found = pf.sight_of(a_known(link), ('a',), is_configured,
                                    15 * 60000, NOW)
                self.assertEqual((found.state, found.reason),
                                 (state, reason))

    def test_disabled_beats_quarantined_beats_the_rest(self):
        found = pf.sight_of(a_known(a_link(), disabled='off',
                                    quarantined='why'), (), False, 0, NOW)
        self.assertEqual(found[:3], ('OFFLINE', 'disabled', 'off'))
        found = pf.sight_of(a_known(a_link(), quarantined='why'), ('a',),
                            False, 0, NOW)
        self.assertEqual(found[:3], ('OFFLINE', 'quarantined', 'why'))

    def test_a_look_just_made_is_of_any_age(self):
        found = pf.sight_of(a_known(a_link(observed_at=1)), ('a',), False, 0,
                            NOW)
        self.assertEqual(found.state, '')


class Test19Answers(unittest.TestCase):
    """What an API's answer means. Only 200 is 200."""

    def test_statuses(self):
        for status, headers, head, found in (
                (200, {}, b'{}', ('ok', '')),
                (200, {}, b'', ('ok', '')),
                (200, {'content-type': 'text/plain'}, b'ok <html>',
                 ('ok', '')),
                (200, {'content-type': 'Text/HTML; charset=x'}, b'',
                 ('login_page', 'looks like a login page')),
                (200, {}, b'\xef\xbb\xbf \n<!DOCTYPE html>',
                 ('login_page', 'looks like a login page')),
                (200, {'content-type': 'application/json'}, b'<HTML>',
                 ('login_page', 'looks like a login page')),
                (201, {}, b'', ('http_status', '')),
                (204, {}, b'', ('http_status', '')),
                (304, {}, b'', ('http_status', '')),
                (401, {}, b'', ('http_401', '')),
                (403, {'content-type': 'text/html'}, b'', ('http_403', '')),
                (404, {}, b'', ('http_status', '')),
                (429, {}, b'', ('rate_limited', '')),
                (429, {'retry-after': '3600'}, b'',
                 ('rate_limited', 'Retry-After: 3600')),
                (503, {'retry-after': '9'}, b'',
                 ('http_status', 'Retry-After: 9'))):
            with self.subTest(status=status, headers=headers, head=head):
                self.assertEqual(pf.read_answer(status, headers, head),
                                 found)

    def test_quota(self):
        self.assertEqual(pf.quota_of({
            'x-ratelimit-remaining': '5', 'ratelimit-remaining': '6',
            'x-ratelimit-remaining-tokens': '7', 'x-ratelimit-limit': '9',
            'content-type': 'x'}), [
            'ratelimit-remaining: 6', 'x-ratelimit-remaining: 5',
            'x-ratelimit-remaining-tokens: 7'])

    def test_limits(self):
        self.assertEqual((pf.PROBE_CONNECT_MS, pf.PROBE_TOTAL_MS),
                         (5000, 8000))

    def test_when_no_probe_is_sent(self):
        none, here = pf.Credential('none', ''), pf.Credential('config', 'x')
        unread = 'credential not readable here'
        cost = 'it costs money or quota; --probe sends it'
        for health, credential, may_pay, why in (
                ({}, none, True, 'no upstream'),
                ({'url': 'http://h/'}, none, False, ''),
                (SECRET_SPEC, none, True, unread),
                (SECRET_SPEC, here, False, ''),
                ({'url': 'http://h/', 'auth': 'bearer'}, none, True, unread),
                ({'preset': 'exa'}, none, True, unread),
                ({'preset': 'exa'}, here, False, cost),
                ({'preset': 'exa'}, here, True, ''),
                ({'preset': 'exa', 'url': 'http://h/'}, here, False, cost),
                ({'preset': 'semgrep'}, here, False, '')):
            with self.subTest(health=health, credential=credential):
                settings = pf.health_settings(a_server(health=health))
                self.assertEqual(pf.why_skipped(a_sight(), settings,
                                                credential, may_pay), why)
        self.assertEqual(pf.why_skipped(
            a_sight('OFFLINE', 'exited'), pf.health_settings(a_server()),
            none, True), 'its tools are not visible')


class Test19Credentials(TempCase):
    """Where a credential is kept; reported, never decisive, never shown."""

    # the server's env, its headers, the shell's variable -> source, value
    PLACES = (
        ({}, {}, 'shell', ('shell env', 'shell')),
        ({}, {}, '', None), ({}, {}, ' ', None), ({}, {}, None, None),
        ({'T': 'literal'}, {}, None, ('config', 'literal')),
        ({'T': 'literal'}, {}, 'shell', ('config', 'literal')),
        ({'T': '${T}'}, {}, 'shell', ('shell env', 'shell')),
        ({'T': '${U}'}, {}, None, ('config', 'other')),
        ({'T': '${NOPE}'}, {}, None, None),
        ({'T': '${NOPE:-d}'}, {}, None, ('config', 'd')),
        ({'T': ''}, {}, None, None), ({'T': None}, {}, 'shell', None),
        ({'V': 'literal'}, {}, None, None),
        ({}, {'t': 'literal'}, None, ('config', 'literal')),
        ({}, {'Authorization': 'Bearer literal'}, None, None))

    def test_places_that_can_be_read(self):
        for env, headers, shell, found in self.PLACES:
            environ = {'U': 'other'}
            if shell is not None:
                environ['T'] = shell
            plain = pf.expand_server(a_server(env=env, headers=headers),
                                     environ)[0]
            with self.subTest(env=env, headers=headers, shell=shell):
                self.assertEqual(pf.own_credential('T', plain, environ),
                                 found)

    def find(self, env=(), **files):
        """Find the source by files of Claude Code; @ stands for a dot."""
        for name, text in files.items():
            self.write(name.replace('_', '.', 1) + '.json', text)
        server = a_server(env=dict(env), health=SECRET_SPEC)
        world = self.world(env={'CLAUDE_CONFIG_DIR': self.dir})
        found = pf.find_credential(server, server, pf.health_settings(
            server), world)
        self.assertEqual(found.value, '')
        return found.source

    def test_claude_codes_settings(self):
        def options(**table):
            return json.dumps({'pluginConfigs': {'p@m': {'options': table}}})
        for text, source in (
                (options(API_TOKEN='x'), 'userConfig'),
                (options(api_token='x'), 'userConfig'),
                (options(API_TOKEN=''), 'none'), (options(OTHER='x'), 'none'),
                ('{}', 'none'), ('{"pluginConfigs": {"p@m": {}}}', 'none'),
                ('{"pluginConfigs": {"p@m": {"options": []}}}', 'none'),
                ('{"pluginConfigs": []}', 'unknown'), ('[]', 'unknown'),
                ('', 'unknown'), ('{', 'unknown'), (b'\xff', 'unknown')):
            with self.subTest(text):
                self.assertEqual(self.find(settings=text), source)

    def test_an_option_by_the_name_that_the_entry_gives_it(self):
        text = json.dumps({'pluginConfigs': {'p@m': {'options': {
            'key': 'x'}}}})
        self.assertEqual(self.find(settings=text), 'none')
        self.assertEqual(self.find({'API_TOKEN': '${user_config.key}'},
                                   settings=text), 'userConfig')

    def test_claude_codes_secrets_by_their_names(self):
        for text, source in (
                ('{"pluginSecrets": {"p@m": {"API_TOKEN": "x"}}}',
                 'userConfig'),
                ('{"pluginSecrets": {"p@m": {"x": "API_TOKEN"}}}', 'none'),
                ('{"claudeAiOauth": {"accessToken": "x"}}', 'none'),
                ('{"pluginSecrets": 1}', 'unknown'), ('nope', 'unknown')):
            with self.subTest(text):
                self.assertEqual(self.find(_credentials=text), source)

    def test_without_such_files_there_is_none(self):
        self.assertEqual(self.find(), 'none')

    def test_the_home_directory_is_the_usual_place(self):
        os.mkdir(self.path('.claude'))
        self.write('.claude/settings.json', '{')
        server = a_server(health=SECRET_SPEC)
        for env, source in (({'HOME': self.dir}, 'unknown'), ({}, 'none'),
                            ({'HOME': self.dir, 'CLAUDE_CONFIG_DIR':
                              self.path('none')}, 'none')):
            with self.subTest(env):
                self.assertEqual(pf.find_credential(
                    server, server, pf.health_settings(server),
                    self.world(env=env)).source, source)


class Test19Steps(unittest.TestCase):
    """What to do: for every state something that can be pasted."""

    def steps(self, sight=None, probe=None, **more):
        """List what to do; more: of the server, its link, a credential."""
        credential = more.pop('credential', pf.Credential('none', ''))
        link, probe = more.pop('link', a_link()), probe or a_probe()
        sight, server = sight or a_sight(), a_server(**more)
        case = pf.Checkup(server, pf.health_settings(server), sight,
                          credential, None, link, 'pf', [])
        reason = pf.health_state(sight, probe, 'none')[1]
        return pf.what_to_do(case, reason, probe)

    def test_every_reason_has_a_command(self):
        reasons = ('command_not_found exited timeout refused dns tls '
                   'http_status rate_limited redirected protocol no_tools '
                   'unresolved disabled quarantined http_401 http_403 '
                   'tool_missing').split()
        for reason in reasons:
            with self.subTest(reason):
                found = self.steps(a_sight('OFFLINE', reason))
                self.assertRegex(found[-1], r'^(Run|Details): pf ')
        for reason in ('not_seen', 'stale', 'interrupted', 'list_failed',
                       'http_401', 'http_403', 'credential_ended'):
            with self.subTest(reason):
                found = self.steps(a_sight('DEGRADED', reason))
                self.assertRegex(found[-1], r'^(Run|Details): pf ')

    def test_a_probe_by_hand_has_the_credential_by_name(self):
        probe = a_probe(status=500, reason='http_status')
        for auth, option in (
                ({}, ''), ({'token_env': 'TOK'},
                           ' -H "Authorization: Bearer $TOK"'),
                ({'token_env': 'TOK', 'auth': 'header:X-Key'},
                 ' -H "X-Key: $TOK"')):
            with self.subTest(auth):
                self.assertIn(
                    'Try it by hand: curl -sS -i -m 8 -X GET%s https://a/me'
                    % option, self.steps(probe=probe, health=dict(
                        auth, url='https://a/me')))

    def test_commands_that_cure(self):
        for state, reason, last in (
                ('OFFLINE', 'disabled', 'Run: pf servers enable s'),
                ('OFFLINE', 'quarantined', 'Run: pf servers approve s'),
                ('DEGRADED', 'not_seen', 'Run: pf health s'),
                ('DEGRADED', 'stale', 'Run: pf health s'),
                ('OFFLINE', 'exited', 'Details: pf servers show s')):
            with self.subTest(reason):
                self.assertEqual(self.steps(a_sight(state, reason))[-1],
                                 last)

    def test_offline_has_setup_and_the_end_of_stderr(self):
        found = self.steps(a_sight('OFFLINE', 'exited'),
                           link=a_link(stderr='one\n\n two\nthree\n'),
                           health={'setup': 'Run the installer.'})
        self.assertEqual(found, ['Run the installer.', 'Its stderr ends: '
                                 'one | two | three',
                                 'Details: pf servers show s'])

    def test_disabled_has_neither(self):
        found = self.steps(a_sight('OFFLINE', 'disabled'),
                           link=a_link(stderr='old'),
                           health={'setup': 'x'})
        self.assertEqual(found, ['Run: pf servers enable s'])

    def test_no_tools_names_the_variable_to_set(self):
        found = self.steps(a_sight('OFFLINE', 'no_tools'),
                           health={'preset': 'morph'})
        self.assertEqual(found[0], 'Set MORPH_API_KEY in the env of server '
                         '"s" (%s), then run: pf health s' % CASE_FILE)

    def test_a_plugin_of_claude_code_is_asked_again(self):
        for more in ({'dialect': 'claude-plugin',
                      'file': '/p/my-plugin/.claude-plugin/plugin.json'},
                     {'env': {'K': '${user_config.k}'},
                      'file': '/p/my-plugin/.mcp.json'},
                     {'credential': pf.Credential('userConfig', ''),
                      'file': '/p/my-plugin/x.json'}):
            with self.subTest(more):
                found = self.steps(a_sight('OFFLINE', 'exited'), **more)
                self.assertIn('/plugin disable my-plugin, then /plugin '
                              'enable my-plugin', found[0])
                self.assertIn('claude-code#39827', found[0])

    def test_sign_in_and_refusal_are_told_apart(self):
        found = self.steps(a_sight('OFFLINE', 'http_401'))
        self.assertIn('Set headers.Authorization for "s"', found[0])
        found = self.steps(
            a_sight('DEGRADED', 'http_401'), transport='http',
            url='https://h/?api_key=zz', headers={
                'Authorization': 'Bearer ${GH_TOKEN}', 'X-Other': 'v'})
        self.assertEqual(found[0], 'Renew headers.Authorization (GH_TOKEN), '
                         'its url of server "s" (%s), then run: pf health s'
                         % CASE_FILE)

    def test_each_answer_of_an_api_has_a_step_of_its_own(self):
        here = pf.Credential('shell env', 'x')
        spec = dict(SECRET_SPEC, status_page='https://status.example.com')
        wanted = (
            (a_probe('http_401', 401), 'Renew API_TOKEN (shell env), then '),
            (a_probe('http_403', 403), 'Give API_TOKEN (shell env) the '
             'rights that http://127.0.0.1:9/me asks for, or renew it'),
            (a_probe('rate_limited', 429, detail='Retry-After: 3600'),
             'Wait as Retry-After says: 3600, or raise the plan'),
            (a_probe('rate_limited', 429), 'Wait a while, or raise the '),
            (a_probe('http_status', 503), 'Look at https://status.example'),
            (a_probe('login_page'), 'Set health.url of server "s"'),
            (a_probe('redirected', None), 'Set health.url of server "s"'),
            (a_probe('tls', None), 'Look at https://status.example.com'))
        seen = set()
        for probe, first in wanted:
            with self.subTest(probe):
                found = self.steps(None, probe, health=spec,
                                   credential=here)
                self.assertTrue(found[0].startswith(first), found)
                seen.add(first)
        self.assertEqual(len(seen), 7)

    def test_a_probe_that_has_no_credential_and_is_refused(self):
        found = self.steps(None, a_probe('http_401', 401),
                           health={'url': 'http://h/'})
        self.assertIn('health.token_env of server "s" (%s)' % CASE_FILE,
                      found[0])

    def test_a_preset_knows_what_a_status_means(self):
        found = self.steps(None, a_probe('http_status', 404),
                           health={'preset': 'semgrep'})
        self.assertEqual(found[0], '404: the token is one for CI scans only')

    def test_present_says_how_it_is_tested(self):
        here = pf.Credential('config', 'x')
        for spec, credential, first in (
                (SECRET_SPEC, pf.Credential('none', ''), 'To test the API: '
                 'set API_TOKEN in this environment, then run: pf health s'),
                ({'preset': 'exa'}, here, 'To test the API (costs money or '
                 'quota): pf health --probe s'),
                ({'url': 'http://h/', 'auth': 'bearer'}, here,
                 'Name the credential of the probe in health.token_env of')):
            with self.subTest(spec):
                found = self.steps(None, a_probe(skipped='x'), health=spec,
                                   credential=credential)
                self.assertTrue(found[0].startswith(first), found)
                self.assertEqual(found[-1], 'Details: pf servers show s')

    def test_healthy_says_where_details_and_quota_are(self):
        found = self.steps(None, a_probe(quota=['ratelimit-remaining: 4']))
        self.assertEqual(found, ['Quota left: ratelimit-remaining: 4',
                                 'Details: pf servers show s'])


class HealthCase(WebCase, SyncCase):
    """Health in this process, of a server `s` and an API of the test."""

    shell = ()

    def health(self, *words, **more):
        """Run health; returns the report."""
        env = dict(os.environ, CLAUDE_CONFIG_DIR=self.path('none'),
                   **dict(self.proxies, **dict(self.shell)))
        return self.do('health', *words, world=self.world(env=env, **more))

    def only(self, *words, **more):
        """Run health on one server; returns its row."""
        report = self.health(*words, **more)
        self.assertEqual(len(report['servers']), 1)
        self.code = pf.exit_of_health(report)
        return report['servers'][0]

    def found(self, row):
        """Give what a row comes down to: state, reason, exit code."""
        return row['state'], row['reason'], self.code

    def child(self, health=None, **spec):
        """Configure a fake server `s`, and its health."""
        entry = self.serve(starts=self.path('starts'), **spec)
        self.configure({'s': dict(entry, health=health or {})})
        return entry


class Test19Sight(HealthCase):
    """Step 1 with real servers: is it up, are its tools there."""

    def test_what_children_do(self):
        error = {'error': {'code': -32000, 'message': 'no licence'}}
        for spec, health, found, part in (
                ({'tools': []}, {}, ('OFFLINE', 'no_tools', 11),
                 'process is up, lists no tools: usually a missing cred'),
                ({'tools': [tool('a')]}, {}, ('HEALTHY', 'no_upstream', 0),
                 'live; 1 tool; no upstream to probe'),
                ({'tools': [tool('a')]}, {'tool': 'b'},
                 ('OFFLINE', 'tool_missing', 11), 'not listed: b'),
                ({'tools': [tool('a')]}, {'tools': ['a', 'b']},
                 ('DEGRADED', 'tool_missing', 10), 'not listed: b'),
                ({'tools': [tool('a')], 'die': 'initialize', 'stderr':
                  'no KEY\n'}, {}, ('OFFLINE', 'exited', 11), 'with code 3'),
                ({'answers': {'tools/list': error}}, {},
                 ('DEGRADED', 'list_failed', 10), 'no licence'),
                ({'version': '2099-01-01'}, {}, ('OFFLINE', 'protocol', 11),
                 '2099-01-01')):
            self.home = self.path('home-%d' % len(os.listdir(self.dir)))
            self.child(health, **spec)
            with self.subTest(spec=spec, health=health):
                row = self.only()
                self.assertEqual(self.found(row), found)
                self.assertIn(part, row['evidence'])
                self.assertTrue(row['what_to_do'])

    def test_a_server_that_lost_its_tools_is_offline(self):
        self.child(tools=[tool('a')])
        self.only()
        self.child(tools=[])
        row = self.only()
        self.assertEqual(self.found(row), ('OFFLINE', 'no_tools', 11))
        self.assertEqual(row['tools_visible'], 0)

    def test_the_end_of_stderr_is_shown(self):
        self.child(die='initialize', stderr='FATAL: set KEY_X\n')
        self.assertIn('Its stderr ends: FATAL: set KEY_X',
                      self.only()['what_to_do'])

    def test_what_is_not_there_or_has_no_value(self):
        for entry, reason in (({'command': 'no-such-command-x'},
                               'command_not_found'),
                              ({'command': 'x', 'args': ['${NO_SUCH_V}']},
                               'unresolved')):
            self.home = self.path('home-' + reason)
            self.configure({'s': entry})
            with self.subTest(entry):
                self.assertEqual(self.found(self.only()),
                                 ('OFFLINE', reason, 11))

    def test_a_slow_start_and_a_slow_list(self):
        for stage, found in (('initialize', ('OFFLINE', 'timeout', 11)),
                             ('tools/list', ('DEGRADED', 'list_failed',
                                             10))):
            self.home = self.path('home' + stage[:4])
            self.child(tools=[tool('a')], sleep={stage: 60})
            with self.subTest(stage):
                self.assertEqual(self.found(self.only('--timeout', '500ms')),
                                 found)

    def test_a_list_that_fails_is_asked_for_once_more(self):
        self.child(answers={'tools/list': {'error': {'code': 1}}})
        self.only()
        self.assertEqual(len(self.pids()), 2)

    def test_a_list_that_then_comes_is_good(self):
        lists = []

        def answer(request):
            lists.append(request)
            return [web_reply(200, web_error(request, -1, 'later')
                              if len(lists) == 1 else web_result(request))]
        web = self.web(web_script(tools_list=answer))
        self.configure({'s': {'url': web.url, 'type': 'http'}})
        self.assertEqual(self.found(self.only()),
                         ('HEALTHY', 'no_upstream', 0))
        self.assertEqual(len(lists), 2)

    def test_what_servers_over_http_answer(self):
        bearer = {'Authorization': 'Bearer ' + API_TOKEN}
        for reply, headers, found, part in (
                (web_reply(401), {}, ('OFFLINE', 'http_401', 11),
                 'sign-in needed'),
                (web_reply(401, WWW_Authenticate='Bearer'), bearer,
                 ('DEGRADED', 'http_401', 11), 'credential refused'),
                (web_reply(403), {}, ('OFFLINE', 'http_403', 11),
                 'sign-in needed'),
                (web_reply(403), bearer, ('DEGRADED', 'http_403', 11),
                 'credential refused'),
                (web_reply(429, Retry_After=3600), bearer,
                 ('OFFLINE', 'rate_limited', 11), 'Retry-After: 3600'),
                (web_reply(503), {}, ('OFFLINE', 'http_status', 11), '503'),
                (web_reply(302, Location='http://127.0.0.1:1/steal?x=1'),
                 bearer, ('OFFLINE', 'redirected', 11),
                 'set that URL')):
            web = self.web(reply)
            self.home = self.path('home-%d' % web.port)
            self.configure({'s': {'url': web.url, 'type': 'http',
                                  'headers': headers}})
            with self.subTest(reply=reply, headers=headers):
                row = self.only()
                self.assertEqual(self.found(row), found)
                self.assertIn(part, row['evidence'])
                self.assertNotIn(API_TOKEN, json.dumps(row))

    def test_servers_over_http_that_are_not_reached(self):
        tls = self.web(web_script(), context=self.tls_context())
        for url, cause in (('http://127.0.0.1:9/mcp', 'refused'),
                           ('http://%s.test/' % ('a' * 70), 'dns'),
                           (tls.url, 'tls')):
            self.home = self.path('home-' + cause)
            self.configure({'s': {'url': url, 'type': 'http'}})
            with self.subTest(url):
                self.assertEqual(self.found(self.only()),
                                 ('OFFLINE', cause, 11))

    def test_disabled_is_left_out_unless_it_is_named(self):
        entry = dict(self.child(tools=[tool('a')]), enabled=False,
                     quarantined=True)
        self.configure({'s': entry, 't': self.serve('t', tools=[tool()])})
        self.assertEqual([row['server'] for row in
                          self.health()['servers']], ['t'])
        self.assertEqual(self.found(self.only('s')),
                         ('OFFLINE', 'disabled', 11))
        self.assertEqual(self.pids(), [])

    def test_quarantined_is_never_started(self):
        entry = dict(self.child(tools=[tool('a')]), quarantined=True)
        self.configure({'s': entry})
        self.assertEqual(self.found(self.only()),
                         ('OFFLINE', 'quarantined', 11))
        self.assertEqual(self.pids(), [])

    def test_a_changed_launch_is_never_started(self):
        entry = self.child(tools=[tool('a')])
        self.only()
        before = self.pids()
        entry['args'].append('--other')
        self.configure({'s': entry})
        row = self.only()
        self.assertEqual(self.found(row), ('OFFLINE', 'quarantined', 11))
        self.assertIn('launch changed', row['evidence'])
        self.assertEqual(row['what_to_do'],
                         ['Run: preflight servers approve s'])
        self.assertEqual(self.pids(), before)

    def test_it_is_recorded_as_a_sync_is(self):
        self.child(tools=[tool('echo')])
        self.only()
        self.assertIn('trusted on first use', ' '.join(self.told))
        self.assertEqual(self.gate('s:echo'), ['ready'])
        types = [json.loads(row[0])['type'] for row in self.raw().execute(
            'select body from activity order by seq')]
        self.assertEqual(types, ['sync', 'health', 'preflight'])


class Test19Cached(HealthCase):
    """--cached: what is recorded, and no server is started."""

    def test_states_of_a_record(self):
        self.child(tools=[tool('a')])
        row = self.only('--cached')
        self.assertEqual(self.found(row), ('DEGRADED', 'not_seen', 10))
        self.assertEqual(self.pids(), [])
        self.one('sync')
        before, later = self.pids(), int(time.time() * 1000) + 16 * 60000
        row = self.only('--cached')
        self.assertEqual(self.found(row), ('HEALTHY', 'no_upstream', 0))
        self.assertRegex(row['evidence'], r'^cached, \d+m?s old; 1 tool; ')
        row = self.only('--cached', now=lambda: later)
        self.assertEqual(self.found(row), ('DEGRADED', 'stale', 10))
        self.assertIn('cached, 16m old', row['evidence'])
        self.assertEqual(self.pids(), before)

    def test_max_age_of_the_entry_counts(self):
        entry = self.child(tools=[tool('a')])
        self.one('sync')
        self.configure({'s': dict(entry, max_age='1d')})
        later = int(time.time() * 1000) + 16 * 60000
        self.assertEqual(self.only('--cached', now=lambda: later)['state'],
                         'HEALTHY')

    def test_a_recorded_failure_is_told_with_its_age(self):
        self.child(die='initialize')
        self.one('sync')
        row = self.only('--cached')
        self.assertEqual(self.found(row), ('OFFLINE', 'exited', 11))
        self.assertIn('cached, ', row['evidence'])

    def test_a_look_that_was_cut_off(self):
        self.child(tools=[tool('a')])
        self.one('sync')
        self.raw().execute('update server set state=?, observed_at=?, '
                           'lease_at=1, lease_until=?, lease_launch=launch',
                           ('', None, 2))
        self.assertEqual(self.found(self.only('--cached')),
                         ('DEGRADED', 'interrupted', 10))


class Test19Probe(HealthCase):
    """Steps 2 to 4 with real HTTP servers. One look, then --cached."""

    def setUp(self):
        super().setUp()
        self.entry = self.child(tools=[tool('a')])
        self.one('sync')
        self.shell = (('API_TOKEN', API_TOKEN),)

    def probe(self, answer, *words, **health):
        """Probe an API that answers so; returns the row."""
        self.api = self.web(answer)
        return self.ask(*words, **dict(
            {'url': self.api.url + '?q=1', 'token_env': 'API_TOKEN'},
            **health))

    def ask(self, *words, **health):
        """Run health on what is recorded, with this `health`."""
        self.configure({'s': dict(self.entry, health=health)})
        row = self.only('--cached', *words)
        self.assertNotIn(API_TOKEN, json.dumps(row))
        return row

    ANSWERS = (
        (web_reply(200, {}), 'HEALTHY', 'ok', 0, 'probe 200 in '),
        (web_reply(200, b'plain', 'text/plain'), 'HEALTHY', 'ok', 0, '200'),
        (web_reply(201, {}), 'DEGRADED', 'http_status', 10, 'probe 201'),
        (b'HTTP/1.1 204 No\r\n\r\n', 'DEGRADED', 'http_status', 10, '204'),
        (web_reply(401, {}), 'DEGRADED', 'http_401', 11, 'probe 401'),
        (web_reply(403, {}), 'DEGRADED', 'http_403', 11, 'probe 403'),
        (web_reply(404, {}), 'DEGRADED', 'http_status', 10, 'probe 404'),
        (web_reply(429, {}, Retry_After=3600), 'DEGRADED', 'rate_limited',
         10, 'Retry-After: 3600'),
        (web_reply(503, {}), 'DEGRADED', 'http_status', 10, 'probe 503'),
        (web_reply(302, b'', None), 'DEGRADED', 'http_status', 10, '302'),
        (web_reply(200, b'<html>Sign in</html>', 'text/html'), 'DEGRADED',
         'login_page', 10, 'looks like a login page'),
        (web_reply(200, b'<!doctype html>', 'application/json'), 'DEGRADED',
         'login_page', 10, 'looks like a login page'),
        (b'hello\r\n\r\n', 'DEGRADED', 'protocol', 10, 'is no HTTP'),
        (b'', 'DEGRADED', 'refused', 10, 'probe failed in '),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx', 'DEGRADED',
         'protocol', 10, 'cut short'))

    def test_answers(self):
        for answer, state, reason, code, part in self.ANSWERS:
            with self.subTest(answer):
                row = self.probe(answer)
                self.assertEqual(self.found(row), (state, reason, code))
                self.assertIn(part, row['evidence'])
                self.assertEqual(row['credential_source'], 'shell env')
                self.assertIsNone(row['probe']['skipped'])
                self.assertTrue(row['what_to_do'])

    def test_what_is_asked(self):
        self.probe(web_reply(200, {}))
        request, = self.api.requests
        self.assertEqual(
            (request.method, request.path, request.headers['authorization'],
             request.headers['accept']),
            ('GET', '/mcp?q=1', 'Bearer ' + API_TOKEN, 'application/json'))
        self.probe(web_reply(200, {}), method='POST', body={'a': 1},
                   auth='header:X-Api-Key')
        request, = self.api.requests
        self.assertEqual(
            (request.method, request.message, request.headers['x-api-key'],
             request.headers['content-type'],
             'authorization' in request.headers),
            ('POST', {'a': 1}, API_TOKEN, 'application/json', False))

    def test_a_body_that_is_text_is_sent_as_it_is(self):
        self.probe(web_reply(200, {}), method='POST', body='[ 1,2]')
        self.assertEqual(self.api.requests[0].headers['content-length'], '6')

    def test_a_probe_may_need_no_credential(self):
        self.shell = ()
        row = self.probe(web_reply(200, {}), token_env=None)
        self.assertEqual(self.found(row), ('HEALTHY', 'ok', 0))
        self.assertNotIn('authorization', self.api.requests[0].headers)

    def test_a_redirect_to_another_origin_gets_nothing(self):
        other = self.web(web_reply(200, {}))
        for status in (301, 302, 303, 307, 308):
            with self.subTest(status):
                row = self.probe(web_reply(status, Location=other.url
                                           + '/steal?token=x'))
                self.assertEqual(self.found(row),
                                 ('DEGRADED', 'redirected', 10))
                self.assertIn('redirected to %s/steal, set' % other.url,
                              row['evidence'])
        self.assertEqual(other.requests, [])

    def test_a_redirect_inside_an_origin_keeps_the_method(self):
        def answer(request):
            return [web_reply(307, Location='/there') if request.path
                    != '/there' else web_reply(200, {})]
        row = self.probe(answer, method='POST', body={})
        self.assertEqual(self.found(row), ('HEALTHY', 'ok', 0))
        self.assertEqual([r.method for r in self.api.requests],
                         ['POST', 'POST'])

    def test_transport_errors(self):
        tls = self.web(web_reply(200, {}), context=self.tls_context())
        for url, reason in (('http://127.0.0.1:9/', 'refused'),
                            ('http://%s.test/' % ('a' * 70), 'dns'),
                            (tls.url, 'tls')):
            with self.subTest(url):
                row = self.ask(url=url, token_env='API_TOKEN')
                self.assertEqual(self.found(row), ('DEGRADED', reason, 10))
                self.assertIsNone(row['probe']['status'])
                self.assertIsInstance(row['probe']['ms'], int)

    def test_a_ca_of_the_users_is_trusted(self):
        api = self.web(web_reply(200, {}), context=self.tls_context())
        self.configure({'s': dict(self.entry, health={'url': api.url})})
        row = self.only('--cached', ca_file=self.write('ca.pem', CA_CERT))
        self.assertEqual(row['state'], 'HEALTHY')

    def test_a_proxy_of_the_environment_is_used(self):
        proxy = self.web(web_reply(200, {}))
        self.shell += (('http_proxy', 'http://127.0.0.1:%d' % proxy.port),)
        row = self.ask(url='http://api.test/me', token_env='API_TOKEN')
        self.assertEqual(row['state'], 'HEALTHY')
        self.assertEqual(proxy.requests[0].path, 'http://api.test/me')

    def test_a_slow_drip_ends_at_the_limit(self):
        self.patch('PROBE_TOTAL_MS', 300)
        row = self.probe(lambda request: [
            b'HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n',
            web_drip(b'.')])
        self.assertEqual(self.found(row), ('DEGRADED', 'timeout', 10))
        self.assertIn('no answer within ', row['evidence'])

    def test_a_name_that_hangs_ends_at_the_limit_to_connect(self):
        self.patch('PROBE_CONNECT_MS', 100)
        let_go = threading.Event()
        self.addCleanup(let_go.set)
        with mock.patch('socket.getaddrinfo',
                        side_effect=lambda *given: let_go.wait(7) and []):
            row = self.ask(url='http://h.test/', token_env='API_TOKEN')
        self.assertEqual(self.found(row), ('DEGRADED', 'timeout', 10))
        self.assertIn('no connection', row['evidence'])

    def test_a_connection_in_time_has_the_whole_limit_for_its_answer(self):
        self.patch('PROBE_CONNECT_MS', 250)

        def answer(request):
            self.api.wait(0.4)
            yield web_reply(200, {})
        self.assertEqual(self.probe(answer)['state'], 'HEALTHY')

    def test_a_large_answer_is_not_read_to_its_end(self):
        row = self.probe(lambda request: [
            b'HTTP/1.1 200 OK\r\n\r\n', web_drip(b'x' * 20000)])
        self.assertEqual(self.found(row), ('HEALTHY', 'ok', 0))

    def test_a_value_that_no_header_can_carry(self):
        for value in ('a\nX-Evil: 1', 'caf\xe9', 'new\n'):
            self.shell = (('API_TOKEN', value),)
            with self.subTest(value):
                row = self.probe(web_reply(200, {}))
                self.assertEqual(self.found(row),
                                 ('DEGRADED', 'protocol', 10))
                self.assertEqual(self.api.requests, [])

    def test_a_credential_that_is_not_here_is_not_guessed(self):
        self.shell = ()
        for validates, state in (('none', 'PRESENT (untested)'),
                                 ('presence', 'PRESENT (untested)'),
                                 ('remote', 'HEALTHY')):
            with self.subTest(validates):
                row = self.probe(web_reply(200, {}),
                                 validates_credential=validates)
                self.assertEqual(self.found(row),
                                 (state, 'probe_skipped', 0))
                self.assertEqual(row['probe'], {
                    'status': None, 'ms': None,
                    'skipped': 'credential not readable here'})
                self.assertEqual(self.api.requests, [])

    def test_what_costs_money_is_sent_only_when_asked_for(self):
        self.shell = (('EXA_API_KEY', API_TOKEN),)
        row = self.probe(web_reply(200, {}), preset='exa', token_env=None)
        self.assertEqual(self.found(row),
                         ('PRESENT (untested)', 'probe_skipped', 0))
        self.assertIn('costs money or quota', row['probe']['skipped'])
        self.assertEqual(self.api.requests, [])
        row = self.probe(web_reply(200, {}), '--probe', preset='exa',
                         token_env=None)
        self.assertEqual(self.found(row), ('HEALTHY', 'ok', 0))
        self.assertEqual([(r.headers['x-api-key'], r.message)
                          for r in self.api.requests],
                         [(API_TOKEN, {'query': 'x', 'numResults': 1})])

    def test_nothing_is_asked_before_the_tools_are_seen(self):
        for health in ({'tools': ['b']}, {}):
            self.home = self.path('new-home' if not health else 'state')
            with self.subTest(health):
                row = self.probe(web_reply(200, {}), **health)
                self.assertIn(row['state'], ('OFFLINE', 'DEGRADED'))
                self.assertEqual(row['probe']['skipped'],
                                 'its tools are not visible')
                self.assertEqual(self.api.requests, [])

    def test_a_missing_tool_does_not_hide_a_refusal(self):
        row = self.probe(web_reply(401), tools=['a', 'b'])
        self.assertEqual(self.found(row), ('DEGRADED', 'http_401', 11))
        self.assertIn('not listed: b', row['evidence'])
        row = self.probe(web_reply(200, {}), tools=['a', 'b'])
        self.assertEqual(self.found(row), ('DEGRADED', 'tool_missing', 10))

    def test_the_quota_that_is_left(self):
        row = self.probe(web_reply(200, {}, X_RateLimit_Remaining=42))
        self.assertEqual(row['what_to_do'][0],
                         'Quota left: x-ratelimit-remaining: 42')

    def test_the_gate_does_not_mind(self):
        self.probe(web_reply(503))
        self.assertEqual(self.gate('s:a'), ['ready'])

    def test_the_last_probe_is_kept_and_a_skipped_one_is_none(self):
        self.probe(web_reply(429, Retry_After=9))
        with self.store().read() as con:
            kept = pf.load_probe(con, 's', self.config)
        self.assertEqual((kept['status'], kept['reason'], kept['detail']),
                         (429, 'rate_limited', 'Retry-After: 9'))
        self.shell = ()
        self.ask(url=self.api.url, token_env='API_TOKEN')
        with self.store().read() as con:
            self.assertEqual(pf.load_probe(con, 's', self.config), kept)

    def test_a_word_of_the_env_does_not_break_a_command(self):
        self.entry['env'] = {'MODE': 'servers', 'WORD': 'show'}
        row = self.probe(web_reply(200, {}), setup='servers')
        self.assertTrue(row['what_to_do'][-1].endswith(' servers show s'))

    def test_a_credential_that_is_sent_back_is_not_kept(self):
        long = 'x' * 35 + API_TOKEN
        for answer in (web_reply(429, {}, Retry_After=long), web_reply(
                200, {}, X_RateLimit_Remaining='x' * 20 + long)):
            with self.subTest(answer):
                self.probe(answer)
                with self.store().read() as con:
                    kept = pf.load_probe(con, 's', self.config)
                text = json.dumps([kept['detail'], kept['quota']])
                self.assertIn('x***', text)
                self.assertNotIn(API_TOKEN[:5], text)
        api = self.web(web_reply(429, {}, Retry_After='my-pass'))
        row = self.ask(url=api.url.replace('//', '//me:my-pass@'))
        self.assertIn('Retry-After: ***', row['evidence'])

    def recorded(self, **health):
        """Give the row of `s` as the service would."""
        self.configure({'s': dict(self.entry, health=health)})
        world = self.world(now=lambda: int(time.time() * 1000) + self.later)
        return pf.recorded_health(world, pf.load_config(world))['servers'][0]

    def test_a_recorded_probe_counts_while_it_is_young_and_the_same(self):
        self.later = 0
        self.probe(web_reply(503), token_env=None)
        url = self.api.url + '?q=1'
        self.assertEqual(self.recorded(url=url)['reason'], 'http_status')
        self.assertEqual(self.recorded(url=url)['probe']['status'], 503)
        self.assertEqual(self.recorded(url=url + '2')['reason'],
                         'probe_skipped')
        self.assertEqual(len(self.api.requests), 1)
        self.entry['max_age'] = '1d'
        self.later = 60 * 60000
        row = self.recorded(url=url)
        self.assertEqual(row['reason'], 'http_status')
        self.assertIn('probe 503', row['evidence'])
        self.assertIn('h', row['evidence'].rsplit(', ', 1)[1])
        del self.entry['max_age']
        self.assertEqual(self.recorded(url=url)['reason'], 'stale')


class Test19Report(HealthCase):
    """The report as a whole, and what is left behind."""

    KEYS = ('server state reason evidence tools_visible tools_expected '
            'credential_source probe what_to_do').split()

    def test_the_shape_is_this(self):
        self.child({'tool': 'echo'}, tools=[tool('echo'), tool('b')])
        report = self.health()
        self.assertEqual(list(report), ['overall', 'checked_at', 'servers'])
        self.assertRegex(report['checked_at'],
                         r'^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$')
        row, = report['servers']
        self.assertEqual(list(row), self.KEYS)
        self.assertEqual(list(row['probe']), ['status', 'ms', 'skipped'])
        self.assertEqual(
            (row['tools_visible'], row['tools_expected'],
             row['credential_source'], row['probe']),
            (2, ['echo'], 'none', {'status': None, 'ms': None,
                                   'skipped': 'no upstream'}))

    def test_many_worst_first(self):
        self.configure({
            'fine': self.serve('fine', tools=[tool()]),
            'off': dict(self.serve('off'), enabled=False),
            'bad': self.serve('bad', die='start'),
            'slow': dict(self.serve('slow', tools=[tool()]),
                         health={'tools': ['echo', 'x']})})
        report = self.health()
        self.assertEqual([row['server'] for row in report['servers']],
                         ['bad', 'slow', 'fine'])
        self.assertEqual((report['overall'], pf.exit_of_health(report)),
                         ('OFFLINE', 11))
        report = self.health('--cached', 'fine', 'slow')
        self.assertEqual((report['overall'], pf.exit_of_health(report)),
                         ('DEGRADED', 10))

    def test_a_name_that_is_not_configured(self):
        self.configure({'notes': self.serve(tools=[tool()]), 'bad': {}})
        report = self.health('note', 'bad', 'notes')
        rows = {row['server']: row for row in report['servers']}
        self.assertEqual(pf.exit_of_health(report), 12)
        self.assertEqual(rows['notes']['state'], 'HEALTHY')
        self.assertEqual(list(rows['note']), self.KEYS)
        self.assertIn('did you mean notes?', rows['note']['evidence'])
        self.assertEqual(rows['note']['what_to_do'][0],
                         'Run: preflight health notes')
        self.assertIn('it has no command', rows['bad']['evidence'])

    def test_nothing_to_look_at_is_an_error(self):
        self.configure({})
        self.assertIn('no server to look at', self.refused('health'))
        self.configure({'s': dict(self.serve(), enabled=False)})
        self.assertIn('no server to look at', self.refused('health'))

    def test_the_audit_record_holds_names_and_codes_only(self):
        self.child(die='start', stderr='why\n')
        self.only()
        body = self.raw().execute("select body from activity where "
                                  "type='health'").fetchone()[0]
        record = json.loads(body)
        self.assertEqual((record['status'], record['metadata']), (
            'blocked', {'overall': 'OFFLINE', 'servers': [
                {'server': 's', 'state': 'OFFLINE', 'reason': 'exited'}]}))
        self.assertEqual(pf.record_line(record),
                         'OFFLINE: s OFFLINE (exited)')
        self.assertTrue(self.do('activity', 'verify')['ok'])

    def test_the_table(self):
        report = pf.health_report([dict(pf.unknown_row(
            'a\nb', '', [], 'pf'), evidence='x\x1by')], NOW)
        self.assertEqual(pf.render_health(report, 12), (
            'SERVER  STATE    REASON          CREDENTIAL  EVIDENCE\n'
            'a\\x0ab  OFFLINE  not_configured  none        [x\\x1by]\n\n'
            'What to do about a\\x0ab (OFFLINE):\n'
            '  - Run: pf servers list\n\nOVERALL: OFFLINE (exit 12)\n'))

    def start(self, api, *words, **env):
        """Start the program on what is recorded of `s`."""
        return subprocess.Popen(
            [sys.executable, SCRIPT, '--home', self.home, '--config',
             self.config, 'health'] + list(words), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=dict(os.environ, **dict(
                self.proxies, API_TOKEN=API_TOKEN, **env)))

    def test_the_token_reaches_the_api_and_nothing_else(self):
        seen = []

        def answer(request):
            for pid in filter(str.isdigit, os.listdir('/proc')):
                with contextlib.suppress(OSError):
                    with open('/proc/%s/cmdline' % pid, 'rb') as file:
                        seen.append(file.read())
            return [web_reply(401, {'error': request.headers[
                'authorization']})]
        if not os.path.isdir('/proc/self'):
            self.skipTest('there is no /proc')
        api = self.web(answer)
        self.child({'url': api.url, 'token_env': 'API_TOKEN'},
                   tools=[tool()])
        for words in ((), ('-o', 'json'), ('-o', 'yaml')):
            job = self.start(api, *words)
            out, err = job.communicate(timeout=60)
            with self.subTest(words):
                self.assertEqual(job.returncode, 11, err)
                self.assertIn(b'http_401', out)
                self.assertNotIn(API_TOKEN.encode(), out + err)
        self.assertEqual([r.headers['authorization'] for r in api.requests],
                         ['Bearer ' + API_TOKEN] * 3)
        self.assertNotIn(API_TOKEN.encode(), b''.join(seen))
        for name in os.listdir(self.home):
            with open(os.path.join(self.home, name), 'rb') as file:
                self.assertNotIn(API_TOKEN.encode(), file.read())

    def test_a_signal_ends_a_probe(self):
        api = self.web(lambda request: [web_hang])
        self.child({'url': api.url}, tools=[tool()])
        self.one('sync')
        job = self.start(api, '--cached')
        self.wait_for(lambda: api.requests)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
        self.assertEqual((job.returncode, out), (143, b''), err)


# ==========================================================================
# 20. commands and 23. cli
# ==========================================================================

# What may not reach a terminal from foreign text; \n ends our own lines.
RAW = re.compile('[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')
QUIET = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}


class CliCase(TempCase):
    """Runs the command line inside this process, where one of its own
    would add nothing but the time to start it."""

    def serve(self, name='s', **spec):
        """(Re)write a fake server that starts in less time."""
        entry = super().serve(name, **spec)
        return dict(entry, args=['-I', '-S'] + entry['args'])

    def cli(self, *words, **env):
        """Run main() against this test's state; returns a Result."""
        return self.bare('--home', self.home, '--config', self.config,
                         *words, **env)

    def bare(self, *words, **env):
        """Run main() with the environment given and no place named."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding='utf-8')
                    for _ in range(2))
        numbers = [getattr(signal, name) for name in (
            'SIGINT', 'SIGTERM', 'SIGHUP') if hasattr(signal, name)]
        handlers = [signal.getsignal(number) for number in numbers]
        try:
            with mock.patch.dict(os.environ), mock.patch.multiple(
                    sys, stdin=io.StringIO(), stdout=out, stderr=err,
                    argv=[SCRIPT]):
                for name in list(os.environ):
                    if name.startswith(('PREFLIGHT_', 'STATE_DIR', 'XDG_')):
                        del os.environ[name]
                os.environ.update(env)
                code = pf.main(list(words))
        finally:
            for number, handler in zip(numbers, handlers):
                signal.signal(number, handler)
            self.unfreeze()
        return Result(code, *(stream.buffer.getvalue().decode('utf-8')
                              for stream in (out, err)))

    @staticmethod
    def unfreeze():
        """Give this process its garbage collector back."""
        import gc
        gc.enable()
        getattr(gc, 'unfreeze', int)()

    def ask(self, *words, **env):
        """Run `tools preflight -o json` in this process."""
        return self.cli('tools', 'preflight', '-o', 'json', *words, **env)

    def reasons(self, *words):
        """Ask, and give [reason or 'ready'] of each id."""
        return [row.get('reason', row['status'])
                for row in self.ask(*words).json['tools']]

    def look(self, *words):
        """Run `sync -o json` in this process; it must have run."""
        done = self.cli('sync', '-o', 'json', *words)
        self.assertNotEqual(done.code, 1, done)
        return done

    def one_server(self, *tools, **more):
        """Configure a server s with these tools, and look at it."""
        self.entry = dict(self.serve(tools=list(tools)), **more)
        self.configure({'s': self.entry})
        return self.look()

    def token_of(self, text):
        """Give the review token of an id."""
        return self.cli('tools', 'diff', text, '-o', 'json').json['token']

    def changed(self, *names):
        """Have a server whose tools of these names changed."""
        self.one_server(*[tool(name) for name in names])
        self.serve(tools=[tool(name, 'Changed') for name in names])
        self.look()

    def start(self, *words, **more):
        """Start the program as a process of its own, ended in any case."""
        process = subprocess.Popen(
            [sys.executable, SCRIPT, '--home', self.home, '--config',
             self.config] + list(words), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.dir,
            **more)
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        """End a process of ours, whatever it does."""
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in process.stdout, process.stderr:
            if stream:
                stream.close()

    def shell(self, command, **env):
        """Run a line as an operator would paste it into sh."""
        done = subprocess.Popen(
            ['sh', '-c', command], cwd=self.dir, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=dict(os.environ, **env))
        out, err = done.communicate(timeout=60)
        return Result(done.returncode, out.decode('utf-8'),
                      err.decode('utf-8'))

    def on_terminal(self, command, answer='', before=None):
        """Run a line with a terminal; before() runs while it asks.

        answer: or several, with commas; the last one is given again.
        Returns a Result whose out is all that the terminal showed.
        """
        import pty
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        process = subprocess.Popen(['sh', '-c', command], stdin=theirs,
                                   stdout=theirs, stderr=theirs,
                                   cwd=self.dir)
        self.addCleanup(self.end, process)
        os.close(theirs)
        seen = b''
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:         # how Linux says that nobody is there
                part = b''
            if not part:
                break
            seen += part
            if seen.endswith((b'[y/N] ', b'[q]uit? ')):
                if before:
                    before()
                word, _, rest = answer.partition(',')
                answer = rest or word
                os.write(ours, word.encode() + b'\n')
        return Result(process.wait(60), seen.decode('utf-8').replace(
            '\r\n', '\n'), '')

    def line(self, *words):
        """Write a command line of this test for sh."""
        return ' '.join(map(shlex.quote, (
            sys.executable, SCRIPT, '--home', self.home, '--config',
            self.config) + words))

    def change_link(self, name, **fields):
        """Rewrite fields of the recorded look at a server.

        For what no test can wait for: days gone by, a login asked for.
        """
        world = self.world()
        config = pf.load_config(world)
        server = pf.known_server(config, name)
        with pf.Store(self.home, world) as store, store.write() as con:
            if pf.load_link(con, name, server.file)[0] is None:
                pf.take_lease(con, name, server.file, (0, 0, '', ''))
            row_id, _, link = pf.load_link(con, name, server.file)
            pf.save_link(con, row_id, link._replace(
                launch=pf.launch_digest(server), stderr='', **fields))

    def cut_off(self, name):
        """Leave the lease of a sync that was killed, and has run out."""
        world = self.world()
        server = pf.known_server(pf.load_config(world), name)
        now = world.now()
        with pf.Store(self.home, world) as store, store.write() as con:
            pf.take_lease(con, name, server.file, (
                now - 2000, now - 1000, pf.launch_digest(server), 'gone'))

    def records(self, *filters):
        """Give the audit records, newest first."""
        return self.cli('activity', 'list', '-o', 'json',
                        *filters).json['activities']


# --------------------------------------------------------------------------
# every reason, induced for real
# --------------------------------------------------------------------------

def ready():
    """What is expected of a tool that is ready."""
    return {'status': 'ready', 'verdict': 'ready', 'exit_code': 0}


def retry(reason, action, cause=None):
    """What is expected of a state that waiting may mend."""
    found = {'status': 'unavailable', 'reason': reason, 'retryable': True,
             'verdict': 'degraded_retryable', 'exit_code': 10}
    found.update({'action': action} if action else {})
    return dict(found, cause=cause) if cause else found


def blocked(reason, action):
    """What is expected of a state that somebody must mend."""
    found = {'status': 'unavailable', 'reason': reason, 'retryable': False,
             'verdict': 'blocked', 'exit_code': 11}
    return dict(found, action=action) if action else found


def unknown(reason):
    """What is expected of an id that leads nowhere."""
    return {'status': 'unavailable', 'reason': reason, 'retryable': False,
            'action': 'configure', 'verdict': 'unknown_ids',
            'exit_code': 12}


BASELINE = [
    tool('ok', annotations=SAFE), tool('drift'), tool('gone'),
    tool('twice'), tool('bare'), tool('hidden'), tool('held'),
    tool('riskier', annotations={'destructiveHint': False}),
    tool('unsafe', annotations={'readOnlyHint': False,
                                'destructiveHint': True,
                                'openWorldHint': True})]
PIN = 'sha256/v%d:%s'


def hash_of(tool):
    """Hash a listed tool as its definition is hashed (version 1)."""
    import hashlib
    body = {key: tool[key] for key in ('name', 'description', 'inputSchema')}
    text = json.dumps(dict(body, v=1), sort_keys=True,
                      separators=(',', ':'))
    return hashlib.sha256(text.encode('ascii')).hexdigest()


# name -> (how it is induced between the first sync and the second, the
# checks asked, what is expected of the first id of each).
SCENARIOS = {
    'all_ready': (None, (
        's:ok', 's:ok --read-only-only', 's:ok --exclude-destructive',
        's:ok --exclude-open-world',
        's:ok --pin s:ok=' + PIN % (1, hash_of(BASELINE[0]))), ready()),
    'quarantine_flip': (
        lambda lab: lab.run('servers', 'quarantine', 'flip'), ('flip:echo',),
        blocked('server_quarantined', 'approve')),
    'definition_drift': (
        lambda lab: lab.change('drift', description='Other text'),
        ('s:drift',), blocked('tool_changed', 'approve')),
    'new_tool_after_baseline': (
        lambda lab: lab.tools.append(tool('new')), ('s:new',),
        blocked('tool_pending_approval', 'approve')),
    'blocked_by_user': (
        lambda lab: lab.run('tools', 'block', 's:held'), ('s:held',),
        blocked('tool_blocked_by_user', 'enable')),
    'config_denial': (
        lambda lab: lab.servers['s'].update(disabled_tools=['hidden']),
        ('s:hidden',), blocked('tool_denied_by_config', 'configure')),
    'server_disabled': (
        lambda lab: (lab.servers['off'].update(enabled=False),
                     lab.run('servers', 'disable', 'switch')),
        ('off:echo', 'switch:echo'), blocked('server_disabled', 'enable')),
    'server_killed': (
        lambda lab: lab.serve('dead', die='start', code=3), ('dead:echo',),
        retry('server_unhealthy', 'view_logs', 'exited')),
    'mid_sync': (
        lambda lab: lab.fall_asleep('busy'), ('busy:echo',),
        retry('server_initializing', '')),
    'never_seen': (
        lambda lab: lab.servers.update(never=lab.serve('never')),
        ('never:echo',), retry('server_initializing', '')),
    'missing_annotation_read_only_only': (
        None, ('s:bare --read-only-only',),
        blocked('missing_annotation', 'configure')),
    'policy_filtered_read_only_only': (
        None, ('s:unsafe --read-only-only',),
        blocked('policy_filtered', '')),
    'missing_annotation_exclude_destructive': (
        None, ('s:bare --exclude-destructive',),
        blocked('missing_annotation', 'configure')),
    'policy_filtered_exclude_destructive': (
        None, ('s:unsafe --exclude-destructive',),
        blocked('policy_filtered', '')),
    'missing_annotation_exclude_open_world': (
        None, ('s:bare --exclude-open-world',),
        blocked('missing_annotation', 'configure')),
    'policy_filtered_exclude_open_world': (
        None, ('s:unsafe --exclude-open-world',),
        blocked('policy_filtered', '')),
    'unknown_tool': (None, ('s:drfit',), dict(
        unknown('not_found'), did_you_mean=['s:drift'])),
    'malformed_id': (None, ('colonless s:ok',), unknown('not_found')),
    'unknown_server': (None, ('elsewhere:echo',),
                       unknown('server_not_configured')),
    'hash_mismatch': (None, ('s:ok --pin s:ok=' + PIN % (1, 'f' * 64),),
                      blocked('hash_mismatch', 'configure')),
    'hash_version': (
        None, ('s:ok --pin s:ok=' + PIN % (2, hash_of(BASELINE[0])),),
        blocked('hash_mismatch', 'configure')),
    # The link to servers behind a URL writes this row; here it is written
    # by hand, so that the reason does not wait for that link.
    'pending_auth': (
        lambda lab: lab.login('login', 0), ('login:echo',),
        blocked('oauth_required', 'login')),
    'old_login': (
        lambda lab: lab.login('login2', pf.DAY_MS), ('login2:echo',),
        blocked('oauth_required', 'login')),
    'out_of_profile_operator': (
        None, ('s:ok --profile narrow',),
        blocked('server_not_in_scope', 'configure')),
    'conflicting_pins': (
        None, ('s:ok --pin s:ok=PIN-A --pin s:ok=PIN-B',),
        {'request_error': ('s:ok', 'PIN-A', 'PIN-B')}),
    'resync_of_ready': (lambda lab: lab.fall_asleep('live'), ('live:echo',),
                        ready()),
    'stale': (
        lambda lab: lab.servers['old'].update(max_age='1ms'), ('old:echo',),
        retry('server_unhealthy', 'restart', 'stale')),
    'interrupted': (
        lambda lab: lab.cut_off('cut'), ('cut:echo',),
        retry('server_unhealthy', 'restart', 'interrupted')),
    'no_tools': (
        lambda lab: lab.serve('empty', tools=[]), ('empty:echo',),
        retry('server_unhealthy', 'view_logs', 'no_tools')),
    'unresolved': (
        lambda lab: lab.servers.update(web={
            'url': 'http://127.0.0.1:9/', 'headers': {'X': '${NO_SUCH_V}'}}),
        ('web:echo',), retry('server_unhealthy', 'view_logs', 'unresolved')),
    'launch_changed': (
        lambda lab: lab.servers['edited']['args'].append('--more'),
        ('edited:echo',), blocked('server_quarantined', 'approve')),
    'advertised_twice': (
        lambda lab: lab.tools.append(tool('twice', 'Another')),
        ('s:twice',), blocked('tool_changed', 'approve')),
    'hint_riskier': (
        lambda lab: lab.change('riskier', annotations={
            'destructiveHint': True}),
        ('s:riskier',), blocked('tool_changed', 'approve')),
    'auto_changed': (
        lambda lab: lab.serve('auto', tools=[tool(description='Other')]),
        ('auto:echo',), ready()),
    'quarantine_off_changed': (
        lambda lab: lab.write('off.json', '{"quarantine_enabled": false}'),
        ('--config off.json s:drift',), ready()),
    'vanished': (lambda lab: lab.change('gone'), ('s:gone',),
                 unknown('not_found')),
    'skipped_entry': (
        lambda lab: lab.servers.update(odd={'command': 'x', 'type': 'odd'}),
        ('odd:echo',), unknown('server_not_configured')),
    'worst_wins': (None, ('s:ok dead:echo off:echo s:drfit',),
                   {'verdict': 'unknown_ids', 'exit_code': 12}),
}

# name -> (servers in scope, id, what is expected) for an agent.
AGENT_SCENARIOS = {
    'out_of_scope_token': (['flip'], 's:ok', unknown('not_found')),
    'unknown_server_token': (['s'], 'elsewhere:ok', unknown('not_found')),
    'deleted_pin_token': ([], 's:ok', unknown('not_found')),
    'recreated_profile_token': (['s'], 's:ok', ready()),
}


class Lab(CliCase):
    """One state for all scenarios: two syncs, and a third that hangs."""

    def build(self):
        """Induce every scenario."""
        self.tools, self.asleep = list(BASELINE), []
        plain = {name: self.serve(name, tools=[tool()]) for name in (
            'flip', 'off', 'switch', 'dead', 'live', 'empty', 'edited',
            'old', 'auto')}
        self.servers = dict(
            plain, s=self.serve('s', tools=self.tools),
            busy=self.serve('busy', die='start'), cut=self.serve('cut'),
            login={'url': 'http://127.0.0.1:9/'},
            login2={'url': 'http://127.0.0.1:9/'})
        self.servers['auto'] = dict(plain['auto'], trust_mode='auto')
        self.save()
        self.look('s', 'busy', *plain)
        for how, _, _ in SCENARIOS.values():
            if how:
                how(self)
                self.save()
        self.serve('s', tools=self.tools)
        self.look('s', 'dead', 'empty', 'auto', 'web', 'edited')
        self.sleep()

    def save(self):
        """Write the config as it now is."""
        self.configure(self.servers, profiles={'narrow': {
            'servers': ['flip']}})

    def run(self, *words):
        """Run one of the operator's commands; it must succeed."""
        done = self.cli(*words)
        assert done.code == 0, done

    def change(self, name, **more):
        """Change how a tool is listed; with nothing, drop it."""
        at = [row['name'] for row in self.tools].index(name)
        self.tools[at:at + 1] = [dict(self.tools[at], **more)] * bool(more)

    def login(self, name, age):
        """Record that a server asked for a login, age ms ago."""
        self.change_link(name, state='pending_auth', detail='asked with 401',
                         observed_at=self.world().now() - age)

    def fall_asleep(self, name):
        """Let a server hang in initialize at its next look."""
        self.asleep.append(name)

    def sleep(self):
        """Start a sync that hangs; returns when it holds its leases."""
        for name in self.asleep:
            self.serve(name, sleep={'initialize': 60},
                       starts=self.path(name + '.started'))
        self.sync_process = self.start('sync', *self.asleep)
        for name in self.asleep:
            while not os.path.exists(self.path(name + '.started')):
                assert self.sync_process.poll() is None
                time.sleep(0.01)

    def wake(self):
        """End that sync; returns its exit code."""
        self.sync_process.send_signal(signal.SIGTERM)
        self.sync_process.communicate(timeout=60)
        return self.sync_process.returncode


class TestScenarios(CliCase):
    """Each reason and rule, induced for real, and the exact answer."""

    @classmethod
    def setUpClass(cls):
        cls.lab = Lab('build')
        cls.lab.setUp()
        try:
            cls.lab.build()
        except BaseException:
            cls.lab.doCleanups()
            raise

    @classmethod
    def tearDownClass(cls):
        if cls.lab.sync_process.poll() is None:
            cls.lab.wake()      # it ends the servers that it started
        cls.lab.doCleanups()

    def setUp(self):
        self.dir, self.home = self.lab.dir, self.lab.home
        self.config = self.lab.config
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.dir)

    def found(self, done, expected):
        """Cut what came down to what the scenarios speak of."""
        data = done.json
        first = data['tools'][0]
        keys = ['status', 'reason', 'retryable', 'action'] + [
            key for key in ('cause', 'did_you_mean') if key in expected]
        found = {key: first[key] for key in keys if key in first}
        if 'status' not in expected:
            found = {}
        return dict(found, verdict=data['verdict'], exit_code=done.code)

    def test_each_row_has_its_exact_answer(self):
        for name, (_, checks, expected) in SCENARIOS.items():
            for words in checks:
                with self.subTest(name, words=words):
                    done = self.ask(*words.split(' '))
                    if 'request_error' in expected:
                        self.assertEqual((done.code, done.out), (1, ''))
                        for part in expected['request_error']:
                            self.assertIn(part, done.err)
                    else:
                        self.assertEqual(self.found(done, expected),
                                         expected)

    def test_every_reason_has_a_row(self):
        rows = list(SCENARIOS.values()) + list(AGENT_SCENARIOS.values())
        found = {row[2].get('reason') for row in rows} - {None}
        self.assertEqual(found, set(pf.REASONS))

    def agent(self, servers, *ids):
        """Judge ids for an agent with these servers in scope."""
        world = self.world()
        config = pf.load_config(world)
        question = pf.Question(
            pf.unique_refs([(text, '') for text in ids]), pf.Caller(
                pf.AGENT, 'bot', '', frozenset(servers)), frozenset(),
            world.now(), config.settings, world.how, pf.places_of(world))
        with pf.Store(self.home, world) as store, store.read() as con:
            return pf.judge_all(pf.open_snapshot(con, config), question, 'r')

    def test_each_agent_row_has_its_exact_answer(self):
        for name, (servers, text, expected) in AGENT_SCENARIOS.items():
            with self.subTest(name):
                report = self.agent(servers, text)
                first = pf.answer_fields(report.answers[0])
                found = {key: first[key] for key in expected if key in first}
                self.assertEqual(dict(
                    found, verdict=report.verdict,
                    exit_code=pf.EXIT_CODES[report.verdict]), expected)
                self.assertFalse({'hash', 'cause', 'observed_at'}
                                 & set(first))

    def test_an_agent_cannot_tell_out_of_scope_from_unknown(self):
        ids = 's:ok', 'elsewhere:ok', 'odd:ok', 'off:echo', 'never:x'
        rows = [pf.answer_fields(self.agent(['flip'], text).answers[0])
                for text in ids]
        rows.append(pf.answer_fields(
            self.agent(['live'], 'live:zzzzzzz').answers[0]))
        for row in rows:
            self.assertNotIn('did_you_mean', row)
            del row['id']
        self.assertEqual(len({json.dumps(row) for row in rows}), 1, rows)

    def test_a_malformed_id_costs_only_its_own_entry(self):
        self.assertEqual(self.reasons('colonless', 's:ok', ':x', 's:'), [
            'not_found', 'ready', 'not_found', 'not_found'])

    def test_the_old_list_is_kept_where_a_server_lists_nothing(self):
        rows = self.cli('tools', 'list', 'empty', '-o', 'json').json
        self.assertEqual([(row['id'], row['listed']) for row in rows],
                         [('empty:echo', True)])

    def test_suggestions_name_what_can_be_seen_only(self):
        for row in self.ask('off:ech', 'flip:ech', 'flipp:echo', 'offf:echo',
                            'elsewhere:xx').json['tools']:
            self.assertNotIn('did_you_mean', row)
        row = self.ask('s:echo').json['tools'][0]
        self.assertEqual(row['reason'], 'not_found')
        self.assertIn('old:echo', row['did_you_mean'])
        self.assertFalse({'off:echo', 'flip:echo', 'edited:echo'}
                         & set(row['did_you_mean']))

    def test_a_renamed_server_is_suggested_inside_the_profile_only(self):
        row = self.ask('lives:echo').json['tools'][0]
        self.assertEqual(row['did_you_mean'], ['live:echo'])
        row = self.ask('lives:echo', '--profile', 'narrow').json['tools'][0]
        self.assertNotIn('did_you_mean', row)

    def test_every_unavailable_row_says_what_is_so_and_what_to_do(self):
        for name, (_, checks, expected) in SCENARIOS.items():
            if expected.get('status') == 'unavailable':
                with self.subTest(name):
                    row = self.ask(*checks[0].split(' ')).json['tools'][0]
                    self.assertNotIn(row['reason'], row['detail'])
                    self.assertTrue(row['remediation'])

    def test_servers_list_says_the_same_as_the_gate(self):
        rows = self.cli('servers', 'list', '-o', 'json').json
        state = {row['server']: row['state'] for row in rows}
        for name, expected in (
                ('s', 'ready'), ('flip', 'quarantined'), ('off', 'disabled'),
                ('switch', 'disabled'), ('dead', 'error'), ('old', 'stale'),
                ('never', 'never_seen'), ('login', 'pending_auth'),
                ('edited', 'quarantined')):
            self.assertEqual((name, state[name]), (name, expected))

    def test_z_the_hanging_sync_ends_and_gives_its_leases_back(self):
        # Last by its name: from here on nothing is being looked at.
        self.assertEqual(self.lab.wake(), 143)
        self.assertEqual(self.reasons('busy:echo', 'live:echo'),
                         ['server_unhealthy', 'ready'])


class TestConformance(unittest.TestCase):
    """Our table against one that was agreed on, where it is at hand."""

    path = os.path.join(HERE, '..', 'shared', 'scenarios.json')

    @unittest.skipUnless(os.path.exists(path), 'no ../shared/scenarios.json')
    def test_rows_and_expectations_are_the_agreed_ones(self):
        with open(self.path, encoding='utf-8') as file:
            agreed = json.load(file)['rows']
        for tier, table in (('operator', SCENARIOS),
                            ('agent_token', AGENT_SCENARIOS)):
            rows = {row['scenario']: row['expect'] for row in agreed
                    if row['surface'] == 'rest' and row['tier'] == tier}
            self.assertEqual(sorted(rows), sorted(table))
            for name, expected in rows.items():
                with self.subTest(name):
                    ours = dict(table[name][2])
                    ours.pop('cause', None)
                    ours.pop('did_you_mean', None)
                    if 'request_error' in ours:
                        self.assertIn('request_error', expected)
                    else:
                        self.assertEqual(ours, expected)


# --------------------------------------------------------------------------
# commands
# --------------------------------------------------------------------------

# A name that would run commands, were it not quoted.
ODD = 'we ird\'s "$(touch pwned)" `touch pwned`; touch pwned #'


class Test20Approve(CliCase):
    """What may be approved, and what an approval binds."""

    def test_approve_takes_the_token_that_was_reviewed(self):
        self.changed('echo')
        done = self.cli('tools', 'approve', 's:echo', '--expect',
                        self.token_of('s:echo'))
        self.assertEqual(done.code, 0, done)
        self.assertIn('approved', done.out)
        self.assertEqual(self.reasons('s:echo'), ['ready'])

    def test_approve_refuses_what_changed_since_the_review(self):
        self.changed('echo')
        token = self.token_of('s:echo')
        self.serve(tools=[tool(description='Changed again')])
        self.look()
        done = self.cli('tools', 'approve', 's:echo', '--expect', token)
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn(self.token_of('s:echo'), done.err)
        self.assertIn('tools diff s:echo', done.err)
        self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_approve_binds_the_hints_too(self):
        self.one_server(tool(annotations=SAFE))
        self.serve(tools=[tool(description='Changed', annotations=SAFE)])
        self.look()
        token = self.token_of('s:echo')
        self.serve(tools=[tool(description='Changed')])
        self.look()
        done = self.cli('tools', 'approve', 's:echo', '--expect', token)
        self.assertEqual(done.code, 1)

    def test_an_empty_or_wrong_expect_approves_nothing(self):
        self.changed('echo')
        for token in '', 'f' * 64, self.token_of('s:echo')[:-1]:
            with self.subTest(token):
                done = self.cli('tools', 'approve', 's:echo', '--yes',
                                '--expect', token)
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_approve_asks_and_no_terminal_is_no(self):
        self.changed('echo')
        done = self.cli('tools', 'approve', 's:echo')
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('--expect', done.err)
        self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_approve_asks_with_the_diff(self):
        self.changed('echo')
        line = self.line('tools', 'approve', 's:echo')
        for answer, code, reason in (('n', 1, 'tool_changed'),
                                     ('', 1, 'tool_changed'),
                                     ('y', 0, 'ready')):
            with self.subTest(answer):
                done = self.on_terminal(line, answer)
                self.assertEqual(done.code, code, done)
                self.assertIn('+Changed', done.out)
                self.assertEqual(self.reasons('s:echo'), [reason])

    def test_approve_refuses_what_changes_while_it_asks(self):
        self.changed('echo')

        def change():
            self.serve(tools=[tool(description='Behind your back')])
            self.look()
        done = self.on_terminal(self.line('tools', 'approve', 's:echo'),
                                'y', change)
        self.assertEqual(done.code, 1, done)
        self.assertIn('changed while it was reviewed', done.out)
        self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_what_nobody_can_see_is_not_asked(self):
        """Without stderr on the terminal the diff would go nowhere."""
        self.changed('echo')
        for verb in 'approve', 'review':
            line = self.line('tools', verb, *['s:echo'][verb == 'review':])
            done = self.on_terminal(line + ' 2>/dev/null', 'a')
            self.assertEqual((done.code, done.out), (1, ''))
        done = self.cli('tools', 'review')
        self.assertEqual((done.code, done.out), (1, ''))
        for part in 'no terminal', 'tools diff ID', 'print the line':
            self.assertIn(part, done.err)
        self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_a_review_at_a_terminal(self):
        self.changed('a', 'b', 'c')
        done = self.on_terminal(self.line('tools', 'review'),
                                'x,,A,block,\x04')
        self.assertEqual(done.code, 0, done)
        self.assertEqual(done.out.count('[q]uit?'), 5, done)
        self.assertIn('-- 1 of 3 --\ns:a: changed', done.out)
        self.assertRegex(done.out, r'approved +s:a\nblocked +s:b\n'
                                   r'not looked at +s:c\n')
        self.assertEqual(self.reasons('s:a', 's:b', 's:c'), [
            'ready', 'tool_blocked_by_user', 'tool_changed'])

    def test_approve_of_a_server_or_of_all(self):
        self.changed('a', 'b')
        self.servers = {'s': self.entry, 'other': self.serve(
            'other', tools=[tool()])}
        self.configure(self.servers)
        self.look('other')
        self.serve('other', tools=[tool(), tool('new')])
        self.look('other')
        ids = 's:a', 's:b', 'other:new'
        for words, rows, left in (
                (('--server', 's'), ['s:a', 's:b'],
                 ['ready', 'ready', 'tool_pending_approval']),
                (('--all',), ['other:new'], ['ready'] * 3),
                (('--all',), [], ['ready'] * 3)):
            with self.subTest(words):
                done = self.cli('tools', 'approve', '--yes', '-o', 'json',
                                *words)
                self.assertEqual(done.json, [
                    {'id': row, 'result': 'approved'} for row in rows])
                self.assertEqual(self.reasons(*ids), left)

    def test_approve_wants_one_way_to_name_tools(self):
        self.changed('echo')
        for words in ((), ('--server', 's', '--all'), ('s:echo', '--all'),
                      ('--server', ''), ('--server', 'nope'),
                      ('s:echo', '--server', 's'), ('s:nope',), ('nope:x',),
                      ('colonless',), ('--all', '--expect', 'f' * 64)):
            with self.subTest(words):
                done = self.cli('tools', 'approve', '--yes', *words)
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_approve_refuses_what_has_no_one_definition(self):
        self.one_server(tool(), tool('gone'))
        self.serve(tools=[tool(), tool(description='Another')])
        self.look()
        for text, part in (('s:echo', 'twice'), ('s:gone', 'not listed')):
            with self.subTest(text):
                done = self.cli('tools', 'approve', '--yes', text)
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertIn(part, done.err)

    def test_approve_again_changes_nothing_and_leaves_no_record(self):
        self.changed('echo')
        results = []
        for _ in range(2):
            done = self.cli('tools', 'approve', '--yes', 's:echo', '-o',
                            'json')
            results += [row['result'] for row in done.json]
        self.assertEqual(results, ['approved', 'unchanged'])
        rows = self.records('--type', 'approval')
        self.assertEqual([row['metadata']['tools'] for row in rows],
                         [['s:echo']])

    def test_an_approval_says_who_approved_what(self):
        self.changed('echo')
        token = self.token_of('s:echo')
        self.cli('tools', 'approve', 's:echo', '--expect', token)
        row = self.records('--type', 'approval')[0]
        self.assertEqual((row['actor'], row['source'], row['metadata']), (
            'operator', 'cli', {'action': 'approve', 'tools': ['s:echo'],
                                'tokens': [token]}))
        shown = self.cli('tools', 'show', 's:echo', '-o', 'json').json
        self.assertEqual((shown['status'], shown['approved_how']),
                         ('approved', 'approve'))


class Test20Review(QuickCase):
    """A walk through all that is pending or changed."""

    def review(self, *answers, **more):
        """Review with these answers; returns [(result, id)].

        A function in place of an answer is called for it. What was asked
        stands in self.asked as (question, choices).
        """
        left, self.asked, self.said = list(answers), [], []

        def ask(question, choices=()):
            self.asked.append((question, choices))
            answer = left.pop(0)
            return answer() if callable(answer) else answer
        self.found = self.do('tools', 'review', *more.pop('names', ()),
                             ask=ask, tell=self.said.append)
        self.assertEqual(left, [])
        return [(row['result'], row['id']) for row in self.found['tools']]

    def three(self):
        """Have a tool that changed, one that is new, one as approved."""
        self.lists(tool(annotations=SAFE), tool('same'))
        self.lists(tool(description='Now', annotations=SAFE), tool('same'),
                   tool('new'))

    def test_each_is_shown_and_decided_on(self):
        self.three()
        tokens = [self.diff(name)['token'] for name in ('echo', 'new')]
        self.assertEqual(self.review('approve', 'block'),
                         [('approved', 's:echo'), ('blocked', 's:new')])
        (first, choices), (second, _) = self.asked
        self.assertEqual(choices, ('approve', 'block', 'skip', 'quit'))
        for part in ('-- 1 of 2 --\ns:echo: changed', '\n  -Echo text\n'
                     '  +Now\n', tokens[0], 'What about s:echo?'):
            self.assertIn(part, first)
        self.assertIn('s:new: pending', second)
        self.assertEqual(self.gate('s:echo', 's:new'),
                         ['ready', 'tool_blocked_by_user'])
        self.assertEqual(self.approvals(), [
            {'action': 'block', 'tools': ['s:new']},
            {'action': 'approve', 'tools': ['s:echo'],
             'tokens': tokens[:1]}])

    def test_skip_and_quit_decide_nothing(self):
        self.three()
        self.assertEqual(self.review('skip', 'quit'), [
            ('skipped', 's:echo'), ('not looked at', 's:new')])
        self.assertEqual(self.approvals(), [])
        self.assertEqual(self.gate('s:echo', 's:new'),
                         ['tool_changed', 'tool_pending_approval'])

    def test_what_was_decided_is_not_asked_again(self):
        self.three()
        self.review('approve', 'block')
        self.assertEqual(self.review(), [])
        self.assertEqual(self.said, ['left out: 1 tool that you have '
                                     'blocked'])

    def test_what_changes_while_it_is_shown_is_shown_again(self):
        self.three()

        def change():
            self.lists(tool(description='Then', annotations=SAFE))
            return 'approve'
        self.lists(tool(description='Now', annotations=SAFE))
        self.assertEqual(self.review(change, 'approve'),
                         [('approved', 's:echo')])
        self.assertIn('+Now', self.asked[0][0])
        self.assertIn('+Then', self.asked[1][0])
        self.assertIn('s:echo changed while it was shown and is not '
                      'approved', self.said[0])
        self.assertEqual([row['tokens'] for row in self.approvals()],
                         [[self.diff()['token']]])

    def test_hints_that_change_while_it_is_shown_count_too(self):
        self.three()

        def change():
            self.lists(tool(description='Now'))
            return 'approve'
        self.assertEqual(self.review(change, 'skip'), [
            ('skipped', 's:echo'), ('settled meanwhile', 's:new')])
        self.assertIn('readOnlyHint: true -> absent (riskier)',
                      self.asked[1][0])
        self.assertEqual(self.gate('s:echo'), ['tool_changed'])

    def test_what_is_settled_while_another_is_shown(self):
        """It went, came back as approved, or somebody else approved it."""
        for settle in (lambda: self.lists(tool(annotations=SAFE)),
                       lambda: self.approve('s:new')):
            self.three()
            self.assertEqual(self.review(
                lambda settle=settle: settle() and 'skip'), [
                    ('skipped', 's:echo'), ('settled meanwhile', 's:new')])
            self.lists(tool(annotations=SAFE), tool('same'))

    def test_what_cannot_be_approved_is_not_offered(self):
        self.lists(tool())
        self.lists(tool(), tool(description='Twin'))
        self.assertEqual(self.review('block'), [('blocked', 's:echo')])
        self.assertEqual(self.asked[0][1], ('block', 'skip', 'quit'))
        self.assertIn('advertised twice', self.asked[0][0])

    def test_what_no_id_can_name_is_told(self):
        self.lists(tool())
        self.lists(tool(), tool(' b'))
        self.assertEqual(self.review(), [])
        self.assertIn('left out: "s: b" begins or ends with a blank',
                      self.said[0])

    def test_launches_that_wait_are_listed_with_the_line(self):
        self.three()
        self.configure({'s': {'command': 'y'}, 'q': {
            'command': 'z', 'quarantined': True}})
        self.assertEqual(self.review(), [])
        row, = self.found['servers']
        self.assertEqual((row['server'], row['approve']),
                         ('s', 'preflight servers approve s'))
        self.assertIn('launch changed: it was x, now it is y', row['why'])

    def test_names_of_servers_narrow_it(self):
        self.three()
        self.configure({'s': {'command': 'x'}, 'other': {'command': 'z'}})
        self.assertEqual(self.review(names=['other']), [])
        self.assertEqual(len(self.review('skip', 'skip', names=['s'])), 2)
        self.assertIn('did you mean other?', self.refused(
            'tools', 'review', 'othr'))

    def test_with_a_lockfile_that_approves_it_names_tools_lock(self):
        self.three()
        self.do('tools', 'lock', '--all', '--yes', '--file',
                self.path('preflight.lock'))
        self.configure({'s': {'command': 'x'}}, approvals='lockfile',
                       lockfile=self.path('preflight.lock'))
        self.assertIn('Run: preflight tools lock --all', self.refused(
            'tools', 'review'))
        self.assertIn('Run: preflight tools lock --all', self.refused(
            'tools', 'approve', '--all', '--yes'))


class Test20Commands(CliCase):
    """What each command reads, writes and refuses."""

    def test_block_and_unblock(self):
        self.one_server(tool())
        for verb, result, reason in (
                ('block', 'blocked', 'tool_blocked_by_user'),
                ('block', 'unchanged', 'tool_blocked_by_user'),
                ('unblock', 'unblocked', 'ready'),
                ('unblock', 'unchanged', 'ready')):
            with self.subTest(verb, result=result):
                done = self.cli('tools', verb, ' s:echo ', '-o', 'json')
                self.assertEqual(done.json, [
                    {'id': 's:echo', 'result': result}])
                self.assertEqual(self.reasons('s:echo'), [reason])

    def test_a_block_holds_for_what_is_still_to_come(self):
        self.one_server(tool(), trust_mode='auto')
        done = self.cli('tools', 'block', 's:later')
        self.assertEqual(done.code, 0)
        self.assertIn('not known here', done.err)
        self.serve(tools=[tool(), tool('later')])
        self.look()
        self.assertEqual(self.reasons('s:later'), ['tool_blocked_by_user'])

    def test_a_block_survives_another_launch(self):
        self.one_server(tool())
        self.cli('tools', 'block', 's:echo')
        self.entry['args'].append('--more')
        self.configure({'s': self.entry})
        self.cli('servers', 'approve', 's', '--yes')
        self.look()
        self.assertEqual(self.reasons('s:echo'), ['tool_blocked_by_user'])

    def test_block_refuses_ids_that_lead_nowhere(self):
        self.one_server(tool())
        for words in ((), ('colonless',), ('nope:x',), ('s:echo', 's:')):
            with self.subTest(words):
                done = self.cli('tools', 'block', *words)
                self.assertEqual((done.code, done.out), (1, ''))
        self.assertEqual(self.reasons('s:echo'), ['ready'])

    def test_explain_runs_the_gates_in_their_order(self):
        self.changed('echo')
        before = len(self.records())
        pin = 's:echo=sha256/v1:' + 'f' * 64
        rows = self.cli('tools', 'explain', 's:echo', '--pin', pin, '-o',
                        'json').json
        self.assertEqual([row['gate'] for row in rows],
                         [name for name, _ in pf.GATES])
        self.assertEqual([row['gate'] for row in rows
                          if row['result'] == 'stopped'], ['changed', 'pin'])
        self.assertTrue(all(row['fact'] for row in rows))
        self.assertEqual(len(self.records()), before)

    def test_explain_stops_where_there_is_no_server(self):
        self.one_server(tool())
        rows = self.cli('tools', 'explain', 'nope:x', '-o', 'json').json
        self.assertEqual([row['result'] for row in rows[:3]],
                         ['passed', 'stopped', 'not reached'])

    def test_list_has_the_agreed_keys(self):
        self.one_server(tool(annotations=SAFE), tool('b'))
        self.cli('tools', 'block', 's:b')
        other, row = self.cli('tools', 'list', '-o', 'json').json
        self.assertEqual(list(row), [
            'id', 'server', 'name', 'listed', 'status', 'blocked', 'denied',
            'hash', 'approved_hash', 'annotations', 'first_seen',
            'last_seen'])
        self.assertEqual(row['hash'], PIN % (1, hash_of(tool())))
        self.assertEqual(row['approved_hash'], row['hash'])
        self.assertEqual(row['annotations'], SAFE)
        self.assertEqual((other['blocked'], other['status']),
                         (True, 'approved'))

    def test_list_takes_servers_and_names_a_wrong_one(self):
        self.one_server(tool())
        self.configure({'s': self.entry, 't': self.serve('t')})
        self.assertEqual(len(self.cli('tools', 'list', 's', 't', '-o',
                                      'json').json), 1)
        done = self.cli('tools', 'list', 'ss')
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('did you mean s?', done.err)

    def test_show_prints_the_pin_that_fits(self):
        self.one_server(tool('a b'))
        pin = self.cli('tools', 'show', 's:a b', '-o', 'json').json['pin']
        done = self.shell(self.line('tools', 'preflight', 's:a b') + ' '
                          + pin)
        self.assertEqual(done.code, 0, done)

    def test_show_and_diff_name_the_nearest_tool(self):
        self.one_server(tool())
        for verb in 'show', 'diff':
            done = self.cli('tools', verb, 's:ecko')
            self.assertEqual((done.code, done.out), (1, ''))
            self.assertIn('did you mean s:echo?', done.err)

    def test_diff_says_what_approving_would_trust(self):
        self.one_server(tool(annotations=SAFE))
        self.serve(tools=[tool(description='Changed')])
        self.look()
        found = self.cli('tools', 'diff', 's:echo', '-o', 'json').json
        self.assertEqual(found['status'], 'changed')
        self.assertTrue(found['why'])
        self.assertEqual(
            (found['approved_hash'], found['hash']),
            (PIN % (1, hash_of(tool())),
             PIN % (1, hash_of(tool(description='Changed')))))
        self.assertEqual(found['fields'], [
            {'field': 'description', 'lines': ['-Echo text', '+Changed'],
             'old': 'Echo text', 'new': 'Changed'}])
        self.assertEqual(list(found), [
            'id', 'status', 'why', 'approved_hash', 'hash', 'listed', 'note',
            'changes', 'looks', 'fields', 'hints', 'odd_characters', 'token',
            'approve'])
        self.assertEqual(len(found['hints']), 3)
        self.assertIn(' tools approve --expect %s s:echo' % found['token'],
                      found['approve'])

    def test_diff_of_what_is_approved_has_no_line_to_approve(self):
        self.one_server(tool())
        done = self.cli('tools', 'diff', 's:echo')
        self.assertIn('no difference', done.out)
        self.assertNotIn('approve:', done.out)

    def test_a_tombstone_can_be_shown_but_is_not_listed(self):
        self.changed('echo', 'gone')
        self.serve(tools=[tool()])
        self.look()
        shown = self.cli('tools', 'show', 's:gone', '-o', 'json').json
        self.assertFalse(shown['listed'])
        self.assertNotIn('approve:', self.cli('tools', 'diff', 's:gone').out)
        self.assertEqual(self.reasons('s:gone'), ['not_found'])

    def test_sync_first_looks_at_the_named_servers_only(self):
        self.configure({
            's': self.serve(tools=[tool()]),
            'off': dict(self.serve('off', starts=self.path('off.started')),
                        enabled=False),
            'other': self.serve('other', starts=self.path('other.started'))},
            profiles={'p': {'servers': ['s']}})
        self.assertEqual(self.reasons('--sync', 's:echo', 'off:echo',
                                      'nope:x'),
                         ['ready', 'server_disabled',
                          'server_not_configured'])
        self.assertEqual(self.reasons('--sync', '--profile', 'p', 's:echo',
                                      'other:echo'),
                         ['ready', 'server_not_in_scope'])
        for name in 'off.started', 'other.started':
            self.assertFalse(os.path.exists(self.path(name)))

    def test_a_failed_look_does_not_stop_the_gate(self):
        self.configure({'s': self.serve(die='start', code=3)})
        done = self.ask('--sync', 's:echo')
        self.assertEqual(done.code, 10)
        self.assertEqual(done.json['tools'][0]['cause'], 'exited')

    def test_profiles_list(self):
        self.configure({'s': self.serve()}, profiles={
            'nightly': {'servers': ['s', 'gone']}, 'a': {'servers': []}})
        self.assertEqual(self.cli('profiles', 'list', '-o', 'json').json, [
            {'profile': 'a', 'servers': [], 'not_configured': []},
            {'profile': 'nightly', 'servers': ['s', 'gone'],
             'not_configured': ['gone']}])


class Test20SyncTold(CliCase):
    """What a sync says to a log, once, and to a terminal, with a remedy."""

    def err(self):
        """Sync in a real process; returns the lines of its stderr."""
        return self.cli('sync').err.split('\n')[:-1]

    def test_a_server_that_turns_is_told_once(self):
        self.one_server(tool())
        self.serve(die='start', stderr='no disk\n')
        first, second = self.err()
        self.assertEqual(first[:16], 's: error: exited')
        self.assertIn('no disk', first)
        self.assertEqual(second[:8], 's: Run: ')
        self.assertIn('no disk', self.shell(second[8:]).out)
        self.assertEqual(self.err(), [])
        self.serve(tools=[tool()])
        self.assertEqual(self.err(), ['s: ready again'])
        self.assertEqual(self.err(), [])

    def test_a_first_look_that_fails_is_told(self):
        self.configure({'s': self.serve(die='start')})
        self.assertEqual(self.err()[0][:16], 's: error: exited')
        self.assertEqual(self.err(), [])

    def test_what_awaits_approval_is_told_once_with_its_review(self):
        self.one_server(tool())
        self.serve(tools=[tool(description='New'), tool('b')])
        line, = self.err()
        head, _, remedy = line.partition(': Run: ')
        self.assertEqual(head, 's: awaiting approval: 1 pending, 1 changed')
        self.assertIn('2 approved', self.on_terminal(remedy, 'a').out)
        self.serve(tools=[tool(description='Newer'), tool('b')])
        self.assertIn('1 changed', self.err()[0])
        self.assertEqual(self.err(), [])
        self.assertIn('  Run: ', self.on_terminal(self.line('sync')).out)

    def test_noise_is_told_once_to_a_log_and_stays_known(self):
        self.configure({'s': self.serve(tools=[tool()], noise='hello\n')})
        note = '1 non-protocol line on stdout'
        self.assertIn('warning: s: ' + note, self.err())
        self.assertEqual(self.err(), [])
        self.assertIn(note, self.on_terminal(self.line('sync')).out)
        self.assertEqual(self.cli('servers', 'show', 's', '-o', 'json')
                         .json['warnings'], [note])

    def test_a_changed_launch_is_approved_by_the_line_that_show_prints(self):
        self.one_server(tool())
        self.serve(tools=[tool()], more=1)
        self.configure({'s': dict(self.entry, args=self.entry['args'] + [
            'x'])})
        done = self.cli('servers', 'approve', 's')
        self.assertEqual(done.code, 1)
        self.assertIn('`servers show NAME`', done.err)
        row = self.cli('servers', 'show', 's', '-o', 'json').json
        self.assertIn('--expect=' + row['launch_digest'], row['next'])
        self.assertEqual(self.shell(row['next']).code, 0)
        self.assertNotIn('--expect', self.cli(
            'servers', 'show', 's', '-o', 'json').json['next'])


class Test20Servers(CliCase):
    """Switches, launches, and what `servers` shows of them."""

    def shown(self, name='s'):
        """Run `servers show -o json`."""
        return self.cli('servers', 'show', name, '-o', 'json').json

    def test_show_has_launch_state_and_stderr(self):
        self.configure({'s': self.serve(die='start', code=3,
                                        stderr='no disk\n')})
        self.look()
        row = self.shown()
        self.assertEqual((row['state'], row['cause'], row['stderr']),
                         ('error', 'exited', 'no disk\n'))
        self.assertIn('fake.py', row['launch'])
        self.assertEqual(len(row['launch_digest']), 64)
        self.assertFalse(row['launch_known'])

    def test_show_says_whether_the_launch_is_known(self):
        self.one_server(tool())
        self.assertIs(self.shown()['launch_known'], True)
        self.entry['args'].append('--more')
        self.configure({'s': self.entry})
        row = self.shown()
        self.assertIs(row['launch_known'], False)
        self.assertIn('launch changed', row['why'])

    def test_list_calls_a_look_from_the_future_stale(self):
        self.one_server(tool(), max_age='0')
        self.change_link('s', observed_at=self.world().now() + pf.DAY_MS)
        rows = self.cli('servers', 'list', '-o', 'json').json
        self.assertEqual(rows[0]['state'], 'stale')

    def test_switches(self):
        self.one_server(tool())
        for verb, reason, shown in (
                ('disable', 'server_disabled', (False, 'switch')),
                ('disable', 'server_disabled', (False, 'switch')),
                ('enable', 'ready', (True, 'config'))):
            with self.subTest(verb):
                self.assertEqual(self.cli('servers', verb, 's').code, 0)
                self.assertEqual(self.reasons('s:echo'), [reason])
                row = self.shown()
                self.assertEqual((row['enabled'], row['enabled_by']), shown)

    def test_a_quarantine_is_lifted_by_approve(self):
        self.one_server(tool())
        self.cli('servers', 'quarantine', 's')
        self.assertEqual(self.reasons('s:echo'), ['server_quarantined'])
        self.assertEqual(self.look().code, 11)
        self.assertEqual(self.cli('servers', 'approve', 's').code, 0)
        self.assertEqual(self.reasons('s:echo'), ['ready'])

    def test_a_switch_wins_while_the_config_says_what_it_overrode(self):
        self.one_server(tool())
        off = dict(self.entry, enabled=False)
        self.configure({'s': off})
        self.cli('servers', 'enable', 's')
        self.assertEqual(self.reasons('s:echo'), ['ready'])
        self.assertEqual(self.shown()['enabled_by'], 'switch')
        self.look()
        self.assertEqual(self.reasons('s:echo'), ['ready'])

    def test_a_config_that_changed_since_wins_and_ends_the_switch(self):
        self.one_server(tool())
        off, on = dict(self.entry, enabled=False), self.entry
        self.cli('servers', 'disable', 's')
        self.configure({'s': off})
        self.assertEqual(self.shown()['enabled_by'], 'config')
        self.assertIn('ends the switch', self.look().err)
        self.configure({'s': on})
        self.assertEqual(self.reasons('s:echo'), ['ready'])
        self.assertNotIn('ends the switch', self.look().err)

    def test_a_quarantine_in_the_config_can_be_overridden(self):
        self.one_server(tool())
        self.configure({'s': dict(self.entry, quarantined=True)})
        self.assertEqual(self.reasons('s:echo'), ['server_quarantined'])
        self.cli('servers', 'approve', 's')
        self.assertEqual(self.reasons('s:echo'), ['ready'])
        self.configure({'s': self.entry})
        self.look()
        self.configure({'s': dict(self.entry, quarantined=True)})
        self.assertEqual(self.reasons('s:echo'), ['server_quarantined'])

    def test_a_changed_launch_is_not_started_until_it_is_approved(self):
        self.one_server(tool())
        started = self.path('started')
        self.serve(tools=[tool()], starts=started)
        self.entry['args'].append('--more')
        self.configure({'s': self.entry})
        row = self.look().json['servers'][0]
        self.assertEqual(row['state'], 'quarantined')
        self.assertFalse(os.path.exists(started))
        self.assertEqual(self.cli('servers', 'approve', 's').code, 1)
        digest = self.shown()['launch_digest']
        for expect, code in (('', 1), ('f' * 64, 1), (digest, 0)):
            done = self.cli('servers', 'approve', 's', '--yes', '--expect',
                            expect)
            self.assertEqual(done.code, code, done)
        self.look()
        self.assertEqual(self.reasons('s:echo'), ['ready'])

    def test_an_approved_launch_still_compares_the_definitions(self):
        self.one_server(tool())
        self.serve(tools=[tool(description='Changed too')])
        self.entry['args'].append('--more')
        self.configure({'s': self.entry})
        done = self.cli('servers', 'approve', 's', '--yes', '-o', 'json')
        self.assertEqual(done.json['carried'], 1)
        self.look()
        self.assertEqual(self.reasons('s:echo'), ['tool_changed'])

    def test_what_is_decided_leaves_a_record(self):
        self.one_server(tool())
        for verb, action in (('disable', 'disabled'), ('enable', 'enabled'),
                             ('quarantine', 'quarantined'),
                             ('approve', 'approved')):
            self.cli('servers', verb, 's')
            row = self.records('--type', 'server')[0]
            launch = pf.launch_digest(pf.known_server(
                pf.load_config(self.world()), 's'))
            self.assertEqual(row['metadata'], dict(
                {'action': action, 'server': 's'},
                **({'launch': launch} if verb == 'approve' else {})))

    def test_names_that_are_not_configured(self):
        self.one_server(tool())
        for words in (('enable', 'ss'), ('show',), ('show', 's', 's'),
                      ('list', 'ss'), ('approve', ''), ('disable', '')):
            with self.subTest(words):
                done = self.cli('servers', *words)
                self.assertEqual((done.code, done.out), (1, ''))
        self.assertEqual(self.reasons('s:echo'), ['ready'])


class LockCase(WorldCase, CliCase):
    """A test of lockfiles, in this process: a server s, looked at."""

    def setUp(self):
        super().setUp()
        self.file = self.path('my.lock')
        self.starts = self.path('starts')

    def sees(self, *tools):
        """Have s list these tools, and look at it."""
        self.entry = self.serve(tools=list(tools), starts=self.starts)
        if not os.path.exists(self.config):
            self.configure({'s': self.entry})
        self.do('sync')

    def lock(self, *words, **more):
        """Run `tools lock` on the file: {id: result}."""
        return {row['id']: row['result'] for row in self.do(
            'tools', 'lock', '--file', self.file, *words, **more)}

    def no_lock(self, *words, **more):
        """Be refused by `tools lock`: all that it said. Nothing changes."""
        before = self.bytes()
        text = self.refused('tools', 'lock', '--file', self.file, *words,
                            **more)
        self.assertEqual(self.bytes(), before)
        self.assertEqual([name for name in os.listdir(self.dir)
                          if name.endswith('.new')], [])
        return ' '.join(self.told + [text])

    def bytes(self):
        """Read the lockfile; None where there is none."""
        if not os.path.exists(self.file):
            return None
        with open(self.file, 'rb') as file:
            return file.read()

    def held(self):
        """Read the lockfile as a Lock."""
        return pf.read_lock(self.file)

    def gate(self, *words):
        """Check by the lockfile: {id: reason or ready}."""
        report = self.do('tools', 'preflight', '--lock', self.file, *words)
        self.answers = {answer.id: answer for answer in report.answers}
        return {answer.id: answer.reason or 'ready'
                for answer in report.answers}

    def records(self, kind='lock'):
        """Give the metadata of the records of a kind, newest first."""
        return [row['metadata'] for row in self.do(
            'activity', 'list', '--type', kind)['activities']]

    def token(self, text, tool):
        """Write ID=TOKEN for a tool as a server lists it."""
        return '%s=%s' % (text, pf.review_token(
            hash_of(tool), pf.read_hints(tool.get('annotations'))))


class Test20Lock(LockCase):
    """`tools lock`: what it writes, and when it writes nothing."""

    def test_a_first_lock_and_what_is_in_it(self):
        self.sees(tool(annotations=SAFE), tool('b'))
        self.assertEqual(self.lock('s:echo'), {'s:echo': 'added'})
        lock = self.held()
        self.assertEqual(list(lock.tools), ['s:echo'])
        self.assertEqual(lock.tools['s:echo'], pf.Locked(
            1, hash_of(tool()), SAFE, ''))
        server = pf.known_server(pf.load_config(self.world()), 's')
        self.assertEqual(lock.launches, {'s': (
            pf.launch_digest(server), pf.launch_text(server))})

    def test_twice_is_the_same_bytes_and_no_record(self):
        self.sees(tool(), tool('b'))
        self.lock('s:b', 's:echo')
        before = self.bytes()
        for words in ((), ('s:echo', 's:b'), ('--all',), ('s:echo',)):
            self.assertEqual(set(self.lock(*words).values()), {'unchanged'})
            self.assertEqual(self.bytes(), before)
        self.assertEqual(len(self.records()), 1)

    def test_ids_leave_every_other_tool_as_it_was(self):
        self.sees(tool(), tool('b'), tool('c'))
        self.lock('s:echo', 's:b')
        held = self.held().tools['s:b']
        self.sees(tool(description='New'), tool('b', 'New'), tool('c'))
        self.do('tools', 'approve', '--all', '--yes')
        self.assertEqual(self.lock(' s : echo', 's:c'), {
            's:echo': 'renewed', 's:b': 'unchanged', 's:c': 'added'})
        self.assertEqual(self.held().tools['s:b'], held)
        self.assertEqual(self.lock(), {
            's:echo': 'unchanged', 's:b': 'renewed', 's:c': 'unchanged'})

    def test_what_ignore_changes_covers_is_locked_only_when_reviewed(self):
        self.sees(tool())
        self.lock('s:echo')
        self.configure({'s': dict(self.entry, ignore_changes={
            '*': ['description']})})
        self.sees(tool(description='Moved'))
        self.assertIn('--expect', self.no_lock())
        self.assertEqual(self.lock('--yes'), {'s:echo': 'renewed'})

    def test_all_drops_what_is_no_longer_listed(self):
        self.sees(tool(), tool('b'))
        self.lock('--all')
        self.sees(tool(), tool('c'))
        self.do('tools', 'approve', '--all', '--yes')
        self.assertEqual(self.lock('--all'), {
            's:echo': 'unchanged', 's:b': 'removed', 's:c': 'added'})
        self.assertEqual(self.records()[0]['removed'], ['s:b'])

    def test_all_leaves_out_what_can_never_be_ready_and_says_so(self):
        self.sees(tool(), tool('held'), tool('denied'), tool(' odd'))
        self.configure({'s': dict(self.entry, disabled_tools=['denied']),
                        'off': {'command': 'x', 'enabled': False},
                        'bad': {'type': 'odd'}})
        self.do('tools', 'block', 's:held')
        self.assertEqual(self.lock('--all'), {'s:echo': 'added'})
        text = ' '.join(self.told)
        for part in ('"s:held": it is blocked', '"s:denied": the config den',
                     '"s: odd": no id can name it',
                     'Server "off" is switched off', 'entry "bad" in'):
            self.assertIn('left out: ' * (part[0] != 'e') + part, text)

    def test_remove(self):
        self.sees(tool(), tool('b'))
        self.lock('--all')
        self.sees(tool(description='New'))
        self.assertEqual(self.lock('--remove', 's:b'), {
            's:echo': 'unchanged', 's:b': 'removed'})
        self.assertEqual(list(self.held().tools), ['s:echo'])
        self.assertIn('"s:b" is not in the lockfile', self.no_lock(
            '--remove', 's:b'))
        self.assertIn('nothing is left to be locked', self.no_lock(
            '--remove', 's:echo'))

    def test_full_keeps_the_definitions_from_then_on(self):
        self.sees(tool(), tool('b'))
        self.lock('s:echo')
        self.assertEqual(self.lock('--full'), {'s:echo': 'renewed'})
        self.lock('s:b')
        self.assertEqual({name: row.text for name, row in
                          self.held().tools.items()}, {
            's:echo': pf.definition_text(tool()),
            's:b': pf.definition_text(tool('b'))})

    def test_what_is_refused(self):
        self.sees(tool(), tool('ch'), tool('two'))
        self.sees(tool(), tool('ch', 'New'), tool('new'), tool('two'),
                  tool('two', 'Other'))
        self.configure({'s': self.entry, 'never': {'command': 'x'},
                        'held': {'command': 'x', 'quarantined': True}})
        for words, parts in (
                (('s:echo', 's:ch'), ('"s:ch" is changed',
                                      'preflight tools diff s:ch')),
                (('s:new',), ('"s:new" is pending', 'tools diff s:new')),
                (('s:new', '--expect', 's:new=' + H1), ('last listed here',)),
                (('s:no',), ('"s:no" is not listed now. Run: preflight tools '
                             'list s',)),
                (('s:two', '--yes'), ('"s:two" cannot be locked: advertised '
                                      'twice',)),
                (('never:x', '--yes'), ('Run: preflight sync never',)),
                (('held:x', '--yes'), ('quarantined in', 'Run: preflight '
                                       'servers approve held')),
                (('gone:x',), ('no server "gone" is configured',)),
                (('--all', '--yes'), ('sync never', 'servers approve held')),
                ((), ('there is no lockfile',)),
                (('--remove', 's:echo'), ('there is no lockfile',)),
                (('s',), ('An id has the form',)),
                (('s:echo', '--all'), ('not both',)),
                (('s:echo', '--remove', ' s:echo'), ('to be removed',)),
                (('s:echo', '--expect', 's:ch=x'), ('not locked here',)),
                (('s:echo', '--expect', 'x'), ('is not ID=TOKEN',)),
                (('s:echo', '--expect', ''), ('is not ID=TOKEN',)),
                (('s:echo', '--expect', 's:echo='), ('last listed here',))):
            with self.subTest(words=words):
                text = self.no_lock(*words)
                for part in parts:
                    self.assertIn(part, text)
        self.assertIn('--file is empty', self.refused(
            'tools', 'lock', '--file', '', 's:echo'))
        self.assertIsNone(self.bytes())
        self.assertEqual(self.records(), [])

    def test_a_set_with_a_tool_that_is_gone_names_its_cure(self):
        self.sees(tool(), tool('-b'))
        self.lock('--all')
        self.sees(tool())
        text = self.no_lock()
        command = re.search(r'Run: preflight (.*?) preflight|Run: preflight '
                            '(.*?) nothing was', text).group(2)
        self.assertEqual(self.do(*shlex.split(command)), [
            {'id': 's:-b', 'result': 'removed'},
            {'id': 's:echo', 'result': 'unchanged'}])
        self.assertEqual(self.lock(), {'s:echo': 'unchanged'})

    def test_approved_in_the_same_breath(self):
        """By a token or by --yes; it is approved in the state as well."""
        old, new = tool(), tool(description='New')
        for words in (('--expect', self.token('s:echo', new)), ('--yes',),
                      ('--expect', self.token(' s:echo', new).upper().replace(
                          'S:ECHO', 's:echo'))):
            self.sees(old)
            self.do('tools', 'approve', '--all', '--yes')
            self.lock('s:echo')
            self.sees(new)
            with self.subTest(words=words):
                self.assertEqual(self.lock('s:echo', *words), {
                    's:echo': 'renewed'})
                self.assertEqual(self.gate(), {'s:echo': 'ready'})
                record = self.records()[0]
                self.assertEqual(
                    (record['action'], record['file'], record['tools'],
                     record['approved'], record['tokens']),
                    ('lock', self.file, ['s:echo'], ['s:echo'], [
                        self.token('', new)[1:]]))
                self.assertEqual(self.records('approval')[0]['tokens'],
                                 record['tokens'])

    def test_it_asks_with_the_diff(self):
        self.sees(tool())
        self.sees(tool(description='New'))
        for answer in False, True:
            asked = []
            world = self.world(ask=lambda text: asked.append(text) or answer)
            if answer:
                self.lock('s:echo', world=world)
            else:
                self.no_lock('s:echo', world=world)
            self.assertEqual(len(asked), 1)
            self.assertIn('+New', asked[0])
        self.assertEqual(self.held().tools['s:echo'].hash, hash_of(
            tool(description='New')))

    def test_what_changed_between_the_question_and_the_answer(self):
        self.sees(tool())
        self.lock('s:echo')
        self.sees(tool(description='New'))

        def meanwhile(text):
            self.sees(tool(description='Evil'))
            return True
        self.assertIn('changed while it was reviewed', self.no_lock(
            's:echo', ask=meanwhile))
        self.assertEqual(len(self.records()), 1)
        self.assertEqual(self.do('tools', 'list')[0]['status'], 'changed')

    def test_another_tool_that_changed_meanwhile(self):
        """One that was approved, and that nobody was asked about."""
        self.sees(tool(), tool('b'))
        self.sees(tool(description='New'), tool('b'))

        def meanwhile(text):
            self.sees(tool(description='New'), tool('b', 'Evil'))
            return True
        self.assertIn('changed while it was reviewed', self.no_lock(
            's:echo', 's:b', ask=meanwhile))

    def test_what_could_not_be_read_is_never_written(self):
        self.sees(tool())
        self.patch('render_lock', lambda lock: '{}')
        self.assertIn('has no lockfileVersion', self.no_lock('s:echo'))

    def test_a_file_that_changed_between_the_question_and_the_answer(self):
        self.sees(tool(), tool('b'))
        self.lock('s:echo')
        self.sees(tool(description='New'), tool('b'))

        def meanwhile(text):
            self.lock('s:b')
            self.now = self.bytes()
            return True
        text = self.refused('tools', 'lock', '--file', self.file, 's:echo',
                            ask=meanwhile)
        self.assertIn('the lockfile %s changed meanwhile' % self.file, text)
        self.assertEqual(self.bytes(), self.now)

    def test_two_at_a_time(self):
        """What each run says it did is in the file, or it was refused."""
        names = ['s:a', 's:b', 's:c', 's:d']
        self.sees(tool(), *[tool(name[2:]) for name in names])
        self.lock('s:echo')
        found = self.forked(*[lambda name=name: self.lock(name)
                              for name in names])
        done = {name for name, rows in zip(names, found)
                if isinstance(rows, dict)}
        self.assertEqual(set(self.held().tools), done | {'s:echo'})
        for rows in found:
            if isinstance(rows, str):
                self.assertIn('changed', rows)

    def test_what_it_tells_beside_the_rows(self):
        self.sees(tool(), tool('b'))
        self.do('tools', 'block', 's:b')
        self.lock('s:echo', 's:b')
        self.assertIn('warning: "s:b" is never ready: it is blocked',
                      self.told)
        self.configure({'s': dict(self.entry, cwd='/')})
        self.do('servers', 'approve', 's', '--yes')
        self.do('sync')
        self.assertEqual(self.lock('s:echo'), {'s:b': 'unchanged',
                                               's:echo': 'renewed'})
        self.assertIn('the launch of server "s" was ', self.told[0])
        self.assertIn('[cwd=/]', self.told[0])

    def test_a_launch_that_only_a_first_look_trusted_is_not_locked(self):
        self.sees(tool())
        self.lock('s:echo')
        before, self.home = self.bytes(), self.path('fresh')
        self.configure({'s': dict(self.entry, cwd='/')})
        self.do('sync')
        text = self.no_lock('s:echo')
        self.assertIn('launch changed: the lockfile', text)
        cure = text.split('Run: preflight ')[1].split(' nothing was')[0]
        self.do(*shlex.split(cure) + ['--yes'])
        self.assertNotEqual(self.bytes(), before)
        self.assertEqual(self.lock('s:echo'), {'s:echo': 'unchanged'})

    def test_no_record_no_file(self):
        self.sees(tool())

        def fail(con, record):
            raise pf.StoreError('no room')
        self.patch('append_record', fail)
        self.assertIn('no room', self.no_lock('s:echo'))

    def test_a_damaged_one_is_never_overwritten(self):
        self.sees(tool())
        for data in b'', b'{}', b'<<<<<<< ours', b'{"lockfileVersion": 2}':
            self.write('my.lock', data)
            with self.subTest(data=data):
                for words in ('s:echo',), ('--all', '--yes'), ():
                    self.assertIn('lockfile ' + self.file,
                                  self.no_lock(*words))

    def test_mode_and_link_stay(self):
        self.sees(tool(), tool('b'))
        real = self.write('real', '')
        os.unlink(real)
        os.symlink(real, self.file)
        self.lock('s:echo')
        umask = os.umask(0)
        os.umask(umask)
        self.assertEqual(stat.S_IMODE(os.stat(real).st_mode),
                         0o666 & ~umask)
        os.chmod(real, 0o640)
        self.lock('s:b')
        self.assertTrue(os.path.islink(self.file))
        self.assertEqual(stat.S_IMODE(os.stat(real).st_mode), 0o640)
        self.assertEqual(len(self.held().tools), 2)

    def test_a_place_that_cannot_be_written(self):
        self.sees(tool())
        self.file = self.path('no', 'my.lock')
        self.assertIn('cannot write %s: no such file' % self.file,
                      self.no_lock('s:echo'))
        self.file = self.dir
        self.assertIn('lockfile %s: cannot be read: is a dir' % self.dir,
                      self.refused('tools', 'lock', '--file', self.file,
                                   's:echo'))
        self.assertEqual(self.records(), [])

    def test_what_only_a_first_look_approved_is_shown(self):
        """A host that starts empty trusts what it finds; the lockfile that
        is there does not."""
        self.sees(tool(annotations=SAFE), tool('b'))
        self.lock('--all', '--full')
        for new in tool(description='New', annotations=SAFE), tool():
            self.home = self.path('host' + new['description'])
            self.sees(new, tool('b'))
            self.assertEqual([row['status'] for row in self.do(
                'tools', 'list')], ['approved'] * 2)
            for words in (), ('--all',), ('s:echo',):
                text = self.no_lock(*words)
                self.assertIn('"s:echo" is changed: ', text)
            line = text.split('Review it: ')[1].split(' nothing')[0]
            drift = self.do(*shlex.split(line)[1:]).drift
            self.assertEqual([row['id'] for row in drift], ['s:echo'])
        self.lock('s:b')
        self.do(*shlex.split(drift[0]['approve'])[1:])
        self.assertEqual(self.records()[0]['tokens'],
                         [self.token('', tool())[1:]])
        self.assertEqual(self.gate(), {'s:b': 'ready', 's:echo': 'ready'})
        self.assertEqual(self.lock(), {'s:b': 'unchanged',
                                       's:echo': 'unchanged'})

    def test_no_secret_of_a_launch_is_written(self):
        self.sees(tool())
        self.entry.update(
            args=self.entry['args'] + ['--api-key', 'swordfish1', '-e',
                                       'DB_PASSWORD=swordfish2'],
            env={'PATH': os.environ['PATH'] + ':/x?token=swordfish3',
                 'API_KEY': 'swordfish4'})
        self.configure({'s': self.entry})
        self.do('servers', 'approve', 's', '--yes')
        self.do('sync')
        self.lock('--all', '--full')
        self.assertNotIn(b'swordfish', self.bytes())
        self.assertEqual(self.gate(), {'s:echo': 'ready'})
        self.entry['args'][-1] = 'DB_PASSWORD=other'
        self.configure({'s': self.entry})
        self.assertEqual(self.gate(), {'s:echo': 'server_quarantined'})
        self.assertIn('only a masked part differs',
                      self.answers['s:echo'].detail)

    def test_a_url_is_masked(self):
        self.configure({'w': {
            'url': 'https://u:swordfish1@h.example/mcp?k=swordfish2',
            'headers': {'X': 'swordfish3'}}})
        text = pf.launch_text(pf.known_server(pf.load_config(
            self.world()), 'w'))
        lock = pf.Lock('f', {'w': (H1, text)}, {'w:t': pf.Locked(
            1, H1, {}, '')})
        self.assertNotIn('swordfish', pf.render_lock(lock))

    def test_where_the_file_is(self):
        """--file; else the config's, beside it; else here."""
        self.sees(tool())
        os.mkdir(self.path('sub'))
        for top, words, path in (
                ({'lockfile': 'sub/a'}, ['--file', self.path('b')], 'b'),
                ({'lockfile': 'sub/a'}, [], 'sub/a'),
                ({'lockfile': self.path('c')}, [], 'c'),
                ({'approvals': 'lockfile'}, ['--yes'], 'preflight.lock')):
            self.configure({'s': self.entry}, **top)
            with self.subTest(path=path):
                self.do('tools', 'lock', 's:echo', *words)
                self.assertTrue(os.path.exists(self.path(path)))
        self.configure({'s': self.entry})
        done = self.run_cli('tools', 'lock', 's:echo', cwd=self.path('sub'))
        self.assertEqual(done.out, 'ID      RESULT\ns:echo  added\n')
        self.assertTrue(os.path.exists(self.path('sub', 'preflight.lock')))


class Test20LockCheck(LockCase):
    """`tools preflight --lock`, `tools verify` and --require-pins."""

    def setUp(self):
        super().setUp()
        self.sees(tool(annotations=SAFE), tool('b'), tool('c'))
        self.lock('s:echo', 's:b', '--full')

    def test_the_set_or_a_part_of_it(self):
        self.assertEqual(self.gate(), {'s:b': 'ready', 's:echo': 'ready'})
        self.assertEqual(self.gate(' s:b '), {'s:b': 'ready'})
        text = self.refused('tools', 'preflight', '--lock', self.file, 's:c')
        self.assertIn('"s:c" is not in the lockfile ' + self.file, text)
        self.assertEqual(self.gate('--read-only-only'), {
            's:b': 'missing_annotation', 's:echo': 'ready'})

    def test_pins_and_hints_gate_whatever_the_state_trusts(self):
        self.sees(tool(), tool('b', 'New'))
        self.do('tools', 'approve', '--all', '--yes')
        self.assertEqual(self.gate(), {'s:b': 'hash_mismatch',
                                       's:echo': 'tool_changed'})

    def test_a_second_pin(self):
        pin = 'sha256/v1:' + hash_of(tool('b'))
        self.assertEqual(self.gate('--pin', 's:b=' + pin.upper().replace(
            'SHA256/V', 'sha256/v')), {'s:b': 'ready', 's:echo': 'ready'})
        for words, part in (
                (('--pin', 's:b=sha256/v1:' + H1), 'with two pins'),
                (('--pin', 's:b=x'), 'with two pins'),
                (('--pin', 's:c=' + pin), 'which is not asked for'),
                (('s:echo', '--pin', 's:b=' + pin), 'is not asked for')):
            with self.subTest(words=words):
                self.assertIn(part, self.refused(
                    'tools', 'preflight', '--lock', self.file, *words))

    def test_a_lockfile_that_is_none(self):
        self.write('empty', '')
        self.write('bad', '{}')
        for path, why in (('gone', 'is not there'), ('empty', 'is empty'),
                          ('bad', 'has no lockfileVersion')):
            for verb in 'preflight', 'verify', 'explain':
                done = self.run_cli('tools', verb, '--lock', path, 's:b')
                with self.subTest(path=path, verb=verb):
                    self.assertEqual((done.code, done.out), (1, ''))
                    self.assertIn('lockfile %s: %s' % (path, why), done.err)
        for verb in 'preflight', 'verify':
            self.assertIn('--lock is empty', self.refused(
                'tools', verb, '--lock', '', 's:b'))

    def test_require_pins(self):
        pin = 's:c=sha256/v1:' + hash_of(tool('c'))
        self.assertEqual(self.gate('--require-pins'), {
            's:b': 'ready', 's:echo': 'ready'})
        self.assertEqual(self.do(
            'tools', 'preflight', 's:c', '--pin', pin,
            '--require-pins').verdict, 'ready')
        before = len(self.records('preflight'))
        text = self.refused('tools', 'preflight', 's:c', 's:b', '--pin', pin,
                            '--require-pins', '--sync')
        self.assertIn('--require-pins: there is no pin for "s:b"', text)
        self.assertEqual(len(self.records('preflight')), before)

    def test_a_service_cannot_compare_launches(self):
        done = self.run_cli('--url', 'http://127.0.0.1:9', 'tools',
                            'preflight', '--lock', self.file)
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('--lock is local only', done.err)

    def test_more_than_a_request_may_hold(self):
        names = ['t%03d' % n for n in range(130)]
        self.sees(*map(tool, names))
        self.do('tools', 'approve', '--all', '--yes')
        self.lock('--all')
        self.assertEqual(self.gate(), dict.fromkeys(
            ['s:' + name for name in names], 'ready'))

    def fresh(self, **more):
        """Be a fresh runner with an edited config; its start is counted."""
        self.home = self.path('fresh', str(len(os.listdir(self.dir))))
        os.path.exists(self.starts) and os.unlink(self.starts)
        self.configure({'s': dict(self.entry, **more)})

    def test_a_fresh_runner(self):
        self.fresh()
        self.assertEqual(self.gate('--sync'), {'s:b': 'ready',
                                               's:echo': 'ready'})
        self.assertEqual([line for line in self.told if 'trusted' in line], [
            'trusted on first use: 1 server, 3 tools; this check compares '
            'them with %s, one without --lock with nothing.' % self.file])
        self.assertEqual(len(self.pids()), 1)

    def test_a_pull_request_that_changes_the_launch_does_not_run(self):
        marker = self.path('marker')
        for more in ({'command': 'touch', 'args': [marker]},
                     {'env': {'PYTHONSTARTUP': marker}},
                     {'args': self.entry['args'] + ['--more']},
                     {'cwd': '/'}):
            self.fresh(**more)
            with self.subTest(more=more):
                self.assertEqual(set(self.gate('--sync').values()),
                                 {'server_quarantined'})
                self.assertFalse(os.path.exists(marker))
                self.assertEqual(self.pids(), [])
                self.assertIn('not started: Server "s": launch changed: the '
                              'lockfile', ' '.join(self.told))

    def test_what_a_launch_does_not_hold_does_not_stop_it(self):
        self.fresh(env={'LEVEL': '2'}, max_age='1h')
        self.assertEqual(self.gate('--sync')['s:b'], 'ready')

    def cured(self, text):
        """Follow the remedy of an id at a terminal, as it is printed."""
        done = self.run_cli('tools', 'preflight', '-o', 'json', '--lock',
                            self.file)
        row = {row['id']: row for row in done.json['tools']}[text]
        line = re.search('then run: (.*)', row['remediation']).group(1)
        done = self.on_terminal(line, 'y')
        self.assertEqual(done.code, 0, done)
        return self.gate('--sync')[text]

    def test_each_remedy_cures(self):
        self.sees(tool(), tool('b', 'New'))
        self.do('tools', 'approve', '--all', '--yes')
        for text, reason in (('s:echo', 'tool_changed'),
                             ('s:b', 'hash_mismatch')):
            self.assertEqual(self.gate()[text], reason)
            self.assertEqual(self.cured(text), 'ready')
        self.fresh(args=self.entry['args'] + ['--more'])
        self.assertEqual(self.gate()['s:b'], 'server_quarantined')
        self.assertEqual(self.cured('s:b'), 'ready')

    def test_a_launch_that_is_approved_keeps_its_pins(self):
        before = self.held()
        self.configure({'s': dict(self.entry, cwd='/')})
        self.refused('servers', 'approve', 's', '--lock', self.file)
        self.assertEqual(self.held(), before)
        self.do('servers', 'approve', 's', '--lock', self.file, '--yes')
        self.assertEqual(self.held().tools, before.tools)
        self.assertNotEqual(self.held().launches, before.launches)
        self.assertEqual(self.records()[0]['server'], 's')
        self.do('sync')
        self.assertEqual(self.gate()['s:b'], 'ready')
        self.configure({'s': self.entry, 'n': self.entry})
        for words, why in ((('n', '--lock', self.file), 'no tool of server '
                            '"n" is in the lockfile'),
                           (('s', '--lock', ''), '--lock is empty'),
                           (('s', '--lock', self.path('no')), 'is not the')):
            self.assertIn(why, self.refused('servers', 'approve', *words))

    def verify(self, *words):
        """Run `tools verify -o json`: (exit code, drift by id, new)."""
        done = self.run_cli('tools', 'verify', '--lock', self.file, '-o',
                            'json', *words)
        data = done.json
        self.assertEqual(list(data), ['verdict', 'checked_at', 'tools',
                                      'drift', 'new'])
        return done.code, {row['id']: row for row in data['drift']}, data[
            'new']

    def test_verify_of_no_drift(self):
        code, drift, new = self.verify()
        self.assertEqual((code, drift), (0, {}))
        self.assertEqual(new, [{
            'id': 's:c', 'status': 'approved',
            'hash': 'sha256/v1:' + hash_of(tool('c'))}])
        metadata = self.records('preflight')[0]
        self.assertEqual((metadata['verdict'], metadata['ids_count']),
                         ('ready', 2))

    def test_verify_shows_each_drift(self):
        self.sees(tool('echo', 'New'), tool('d'))
        before = self.bytes()
        code, drift, new = self.verify()
        self.assertEqual((code, sorted(drift)), (12, ['s:b', 's:echo']))
        self.assertEqual(drift['s:b']['status'], 'not listed')
        self.assertEqual(drift['s:echo']['fields'][0]['lines'],
                         ['-Echo text', '+New'])
        self.assertIn('readOnlyHint: true -> absent (riskier)',
                      drift['s:echo']['hints'])
        self.assertEqual([row['id'] for row in new], ['s:d'])
        self.assertEqual(new[0]['status'], 'pending')
        self.assertEqual(self.bytes(), before)
        text = self.run_cli('tools', 'verify', '--lock', self.file).out
        for part in ('VERDICT: unknown_ids (exit 12)', 'drift: s:echo: ch',
                     'drift: s:b: not listed', '-Echo text',
                     ' tools lock --file=', 'not in the lockfile:\n'):
            self.assertIn(part, text)

    def test_verify_on_a_host_that_never_saw_the_locked_text(self):
        """Field by field with --full, else both hashes."""
        self.sees(tool('echo', 'New', annotations=SAFE), tool('b'))
        self.home = self.path('other')
        self.do('sync')
        code, drift, _ = self.verify()
        self.assertEqual(code, 11)
        self.assertIn('-Echo text', drift['s:echo']['fields'][0]['lines'])
        lock = self.held()
        self.write('my.lock', pf.render_lock(lock._replace(tools={
            name: row._replace(text='')
            for name, row in lock.tools.items()})))
        row = self.verify()[1]['s:echo']
        self.assertEqual(row['approved_hash'], 'sha256/v1:' + hash_of(
            tool()))
        self.assertEqual(row['hash'], 'sha256/v1:' + hash_of(
            tool(description='New')))
        self.assertIn('not kept here', row['note'])

    def test_verify_of_another_launch(self):
        self.configure({'s': dict(self.entry, command='/other')})
        code, drift, new = self.verify()
        self.assertEqual((code, list(drift), new), (11, ['s'], []))
        self.assertIsNone(drift['s']['why'])
        lines = drift['s']['fields'][0]['lines']
        self.assertTrue(lines[0].startswith('-' + sys.executable), lines)
        self.assertTrue(lines[1].startswith('+/other'), lines)
        self.assertEqual(self.pids()[1:], [])
        self.assertIn('unknown option --sync', self.refused(
            'tools', 'verify', '--sync'))

    def test_verify_of_a_launch_whose_masked_part_differs(self):
        lock, text = self.held(), pf.launch_text(pf.known_server(
            pf.load_config(self.world()), 's'))
        self.write('my.lock', pf.render_lock(lock._replace(launches={
            's': (H1, text)})))
        self.assertEqual(self.verify()[1]['s']['why'],
                         'only a masked part differs')
        self.assertIn('drift: s: launch changed (only a masked part differs)',
                      self.run_cli('tools', 'verify', '--lock',
                                   self.file).out)

    def test_an_answer_kept_is_not_one_by_a_lockfile(self):
        world = self.world()
        config = pf.load_config(world)
        question = pf.Question([pf.parse_id('s:c')], pf.operator(config), (),
                               world.now(), config.settings, 'p', '')
        lock = pf.Lock('f', {'s': (H1, 'other')}, {})
        with pf.Store(self.home, world) as store, store.read() as con:
            snap = pf.open_snapshot(con, config)
            reasons = [pf.judge_refs(snap, question._replace(lock=held))[
                0][0].reason for held in (None, lock, None)]
        self.assertEqual(reasons, [None, 'server_quarantined', None])

    def test_explain_names_the_lockfile(self):
        self.sees(tool('echo', 'New', annotations=SAFE), tool('b'))
        self.do('tools', 'approve', '--all', '--yes')
        rows = {row['gate']: row for row in self.do(
            'tools', 'explain', '--lock', self.file, 's:echo')}
        self.assertEqual(rows['pin']['result'], 'stopped')
        self.assertIn(self.file, rows['pin']['fact'])


class Test20LockMode(LockCase):
    """"approvals": "lockfile": the committed file is the baseline."""

    def setUp(self):
        super().setUp()
        self.file = self.path('preflight.lock')
        self.entry = self.serve(tools=[tool(), tool('b')],
                                starts=self.starts)
        self.mode()

    def mode(self, approvals='lockfile', top=None, **more):
        """Write the config, with approvals in the lockfile."""
        self.configure({'s': dict(self.entry, **more)}, approvals=approvals,
                       **top or {})

    def gate(self, *words):
        """Check s:echo and s:b: the reasons of both."""
        report = self.do('tools', 'preflight', 's:echo', 's:b', *words)
        self.answers = report.answers
        return [answer.reason or 'ready' for answer in report.answers]

    def lists(self, *tools):
        """Have s list other tools, and look at it."""
        self.serve(tools=list(tools), starts=self.starts)
        return self.do('sync')[0][0]

    def locked(self):
        """Look at s and lock s:echo, unseen."""
        self.do('sync')
        self.assertEqual(self.lock('s:echo', '--yes'), {'s:echo': 'added'})

    def test_without_the_file_no_check_and_the_first_lock(self):
        for words in (('tools', 'preflight', 's:echo'),
                      ('tools', 'explain', 's:echo'), ('tools', 'verify'),
                      ('health',), ('health', '--cached')):
            text = self.refused(*words)
            self.assertIn('lockfile %s: is not there' % self.file, text)
            self.assertIn('preflight tools lock', text)
        found = self.do('config', 'check')
        self.assertIn(self.file, found['errors'][0])
        row = self.do('sync')[0][0]
        self.assertEqual((row.state, row.baseline, row.added), (
            'ready', False, ['echo', 'b']))
        self.assertIn('the lockfile %s is not there' % self.file,
                      ' '.join(self.told))
        self.assertNotIn('trusted', ' '.join(self.told))
        for verb in ('tools', 'list'), ('tools', 'show', 's:b'), (
                'tools', 'diff', 's:b'), ('servers', 'list'), (
                'servers', 'show', 's'):
            self.do(*verb)
        self.assertIn('"s:b" is pending', self.no_lock('s:b'))
        self.lock('--all', '--yes')
        self.assertEqual(self.gate(), ['ready', 'ready'])
        self.assertEqual((self.count('approved'), self.count('launch')),
                         (0, 0))

    def test_a_damaged_one_is_1_everywhere(self):
        self.do('sync')
        self.write('preflight.lock', '{')
        for words in (('tools', 'preflight', 's:echo'), ('sync',),
                      ('tools', 'list'), ('tools', 'show', 's:b'),
                      ('tools', 'lock', '--all', '--yes'), ('servers', 'list'),
                      ('servers', 'approve', 's', '--yes')):
            self.assertIn('lockfile %s: is not JSON' % self.file,
                          self.refused(*words))

    @unittest.skipUnless(hasattr(os, 'mkfifo'), 'needs FIFOs')
    def test_a_pipe_in_its_place_is_not_waited_for(self):
        os.mkfifo(self.file)
        for words in (('tools', 'preflight', 's:echo'), ('sync',),
                      ('tools', 'lock', '--all', '--yes')):
            self.assertIn('%s: is not a regular file' % self.file,
                          self.refused(*words))

    def test_what_is_not_in_it_is_pending(self):
        self.locked()
        self.assertEqual(self.gate(), ['ready', 'tool_pending_approval'])
        self.assertEqual({row['id']: row['status'] for row in self.do(
            'tools', 'list')}, {'s:echo': 'approved', 's:b': 'pending'})
        row = self.do('tools', 'show', 's:echo')
        self.assertEqual((row['approved_how'], row['approved_at']),
                         ('lock', None))

    def test_another_hash_or_riskier_hints_are_changed(self):
        self.lists(tool(annotations=SAFE), tool('b'))
        self.lock('--all', '--yes')
        for new in (tool(description='New', annotations=SAFE), tool()):
            row = self.lists(new, tool('b'))
            self.assertEqual(self.gate(), ['tool_changed', 'ready'])
            self.assertEqual(row.changed, ['echo'])
            self.lists(tool(annotations=SAFE), tool('b'))
            self.assertEqual(self.gate(), ['ready', 'ready'])

    def test_auto_and_quarantine_off_let_pass(self):
        self.locked()
        for top, more in (({'quarantine_enabled': False}, {}),
                          ({}, {'trust_mode': 'auto'})):
            self.mode(top=top, **more)
            self.do('sync')
            self.assertEqual(self.gate(), ['ready', 'ready'])
        self.lists(tool(description='New'), tool('b'), tool('c'))
        self.assertEqual(self.records('sync')[0]['approved'], [])
        self.assertEqual(self.count('approved'), 0)

    def test_a_fleet(self):
        """A host that never saw a thing is judged by the committed file."""
        self.locked()
        self.home = self.path('host2')
        self.lists(tool(description='Swapped'), tool('b'))
        self.assertEqual(self.gate(), ['tool_changed',
                                       'tool_pending_approval'])

    def test_another_launch_is_not_started(self):
        self.locked()
        os.unlink(self.starts)
        self.home = self.path('host2')
        self.mode(args=self.entry['args'] + ['--more'])
        row = self.do('sync')[0][0]
        self.assertEqual(row.state, 'quarantined')
        self.assertEqual(self.gate('--sync'), ['server_quarantined'] * 2)
        self.assertEqual(self.pids(), [])
        row = self.do('servers', 'show', 's')
        self.assertEqual((row['launch_known'], row['quarantined_by']),
                         (False, 'launch'))
        self.assertIn('Run: preflight servers approve s', self.no_lock(
            's:echo', '--yes'))

    def test_the_launches_of_the_state_are_not_asked(self):
        self.mode('state')
        self.do('sync')
        self.mode('state', args=self.entry['args'] + ['--more'])
        self.assertEqual(self.gate(), ['server_quarantined'] * 2)
        self.mode(args=self.entry['args'] + ['--more'])
        self.do('sync')
        self.lock('--all', '--yes')
        self.assertEqual(self.gate(), ['ready', 'ready'])
        self.mode('state', args=self.entry['args'] + ['--more'])
        self.assertEqual(self.gate(), ['server_quarantined'] * 2)

    def test_back_to_state_finds_its_approvals(self):
        self.mode('state')
        self.do('sync')
        self.mode()
        self.lists(tool(description='New'), tool('b'))
        self.lock('--all', '--yes')
        self.assertEqual(self.gate(), ['ready', 'ready'])
        self.mode('state')
        self.assertEqual(self.gate(), ['tool_changed', 'ready'])

    def test_servers_approve_writes_the_file(self):
        self.locked()
        before = self.held()
        self.mode(cwd='/')
        digest = pf.launch_digest(pf.known_server(
            pf.load_config(self.world()), 's'))
        self.assertIn('not approved', self.refused('servers', 'approve', 's'))
        self.assertIn('its digest is now', self.refused(
            'servers', 'approve', 's', '--expect', H1))
        self.assertEqual(self.held(), before)
        found = self.do('servers', 'approve', 's', '--expect', digest)
        self.assertEqual((found['result'], found['carried']),
                         ('approved', 1))
        self.assertEqual(self.held().launches['s'][0], digest)
        self.assertEqual(self.held().tools, before.tools)
        self.assertEqual((self.records()[0]['server'], self.records(
            'server')[0]), ('s', {'action': 'approved', 'server': 's',
                                  'launch': digest}))
        self.assertEqual(self.count('launch'), 0)
        self.do('sync')
        self.assertEqual(self.gate(), ['ready', 'tool_pending_approval'])

    def test_switches_work_as_ever(self):
        self.locked()
        for verb, reason in (('quarantine', 'server_quarantined'),
                             ('approve', 'ready'),
                             ('disable', 'server_disabled'),
                             ('enable', 'ready')):
            self.do('servers', verb, 's')
            self.assertEqual((verb, self.gate()[0]), (verb, reason))

    def test_another_server_can_be_looked_at(self):
        self.locked()
        self.configure({'s': self.entry, 'n': self.entry},
                       approvals='lockfile')
        rows = self.do('sync')[0]
        self.assertEqual([row.state for row in rows], ['ready', 'ready'])
        report = self.do('tools', 'preflight', 'n:echo')
        self.assertEqual(report.answers[0].reason, 'tool_pending_approval')

    def test_a_new_server_is_held_where_the_config_says_so(self):
        self.locked()
        self.configure({'s': self.entry, 'n': self.entry},
                       approvals='lockfile', quarantine_new_servers=True)
        self.assertEqual([row.state for row in self.do('sync')[0]],
                         ['ready', 'quarantined'])
        self.do('servers', 'approve', 'n')
        self.assertEqual([row.state for row in self.do('sync')[0]],
                         ['ready', 'ready'])
        report = self.do('tools', 'preflight', 'n:echo')
        self.assertEqual(report.answers[0].reason, 'tool_pending_approval')
        self.configure({'s': self.entry, 'n': dict(
            self.entry, args=self.entry['args'] + ['x'])},
                       approvals='lockfile', quarantine_new_servers=True)
        report = self.do('tools', 'preflight', 'n:echo')
        self.assertEqual(report.answers[0].reason, 'server_quarantined')

    def test_approve_says_who_approves(self):
        self.locked()
        text = self.refused('tools', 'approve', 's:b', '--yes')
        self.assertIn('`tools lock` approves', text)
        self.assertIn('Run: preflight tools lock s:b', text)

    def test_the_line_of_a_diff_and_of_a_remedy_cure(self):
        self.locked()
        self.assertEqual(self.gate(), ['ready', 'tool_pending_approval'])
        remedy = self.answers[1].remediation
        line = self.do('tools', 'diff', 's:b')['approve']
        self.assertEqual(remedy, 'Review it: preflight tools diff s:b; then '
                         'run: ' + line)
        self.do(*shlex.split(line)[1:])
        self.assertEqual(self.gate(), ['ready', 'ready'])
        self.lists(tool(description='New'), tool('b'))
        self.assertEqual(self.gate(), ['tool_changed', 'ready'])
        self.do(*shlex.split(self.answers[0].remediation.split(
            'then run: ')[1])[1:])
        self.assertEqual(self.gate(), ['ready', 'ready'])
        self.assertEqual(self.count('approved'), 0)
        self.assertEqual(self.records()[0]['approved'], ['s:echo'])

    def test_ignored_changes_need_the_locked_text(self):
        self.do('sync')
        self.lock('--all', '--full', '--yes')
        more = {'ignore_changes': {'*': ['description']}}
        self.home = self.path('host2')
        self.mode(**more)
        row = self.lists(tool(description='Now 17:05'), tool('b'))
        self.assertEqual(row.changed, [])
        self.assertEqual(self.gate(), ['ready', 'ready'])


class Test20Activity(CliCase):
    """The audit records as the commands show them."""

    def check_often(self):
        """Leave four checks of two kinds."""
        self.one_server(tool())
        for words in (('s:echo',), ('s:nope', '--request-id', 'run-7'),
                      ('nope:x', 's:nope'), ('s:echo',)):
            self.ask(*words)

    def test_one_record_for_each_check_with_ids_and_codes_only(self):
        self.check_often()
        row = self.records('--request-id', 'run-7')[0]
        self.assertEqual(row['metadata'], {
            'verdict': 'unknown_ids', 'ids_count': 1,
            'reasons': {'not_found': 1}, 'per_tool': [
                {'id': 's:nope', 'status': 'unavailable',
                 'reason': 'not_found'}]})
        self.assertEqual((row['type'], row['source'], row['actor'],
                          row['status'], row['request_id']), (
            'preflight', 'cli', 'operator', 'blocked', 'run-7'))

    def test_list_filters(self):
        self.check_often()
        now = pf.format_time(self.world().now() + pf.MINUTE_MS)
        for words, count in (
                (('--type', 'preflight'), 4), (('--type', 'sync'), 1),
                (('--status', 'blocked'), 2), (('--since', now), 0),
                (('--until', now), 5), (('--until', '2001-01-01'), 0),
                (('--status', 'success', '--type', 'preflight'), 2),
                (('--limit', '3'), 3), (('--offset', '4'), 1)):
            with self.subTest(words):
                self.assertEqual(len(self.records(*words)), count)
        found = self.cli('activity', 'list', '--limit', '2', '--offset',
                         '1', '-o', 'json').json
        self.assertEqual((found['total'], found['limit'], found['offset']),
                         (5, 2, 1))

    def test_list_reads_as_lines(self):
        self.check_often()
        out = self.cli('activity', 'list').out
        self.assertIn('  ready (1 id)\n', out)
        self.assertIn('  blocked (2 ids): server_not_configured, '
                      'not_found\n', out)
        self.assertTrue(out.endswith('5 of 5 records\n'))

    def test_show_gives_one_record(self):
        self.check_often()
        row = self.records()[0]
        self.assertEqual(self.cli('activity', 'show', row['id'], '-o',
                                  'json').json, {'activity': row})
        for words in (('nope',), (), (row['id'], row['id']),
                      ('0' * 12 + row['id'][12:],)):
            done = self.cli('activity', 'show', *words)
            self.assertEqual((done.code, done.out), (1, ''))

    def test_wrong_filters_are_refused(self):
        self.one_server(tool())
        for words in (('--limit', '0'), ('--limit', '1001'),
                      ('--limit', 'x'), ('--limit', ''), ('--offset', '-1'),
                      ('--since', 'yesterday'), ('--until', ''), ('x',)):
            with self.subTest(words):
                done = self.cli('activity', 'list', *words)
                self.assertEqual((done.code, done.out), (1, ''))

    def edit(self, statement):
        """Change the database behind the program's back."""
        con = sqlite3.connect(os.path.join(self.home, 'preflight.db'))
        con.execute(statement)
        con.commit()
        con.close()

    def test_verify_finds_an_edited_record(self):
        self.check_often()
        done = self.cli('activity', 'verify', '-o', 'json')
        self.assertEqual((done.code, done.json['records']), (0, 5))
        self.edit("update activity set body=replace(body, 'nope', 'echo') "
                  'where seq=3')
        done = self.cli('activity', 'verify')
        self.assertEqual(done.code, 1)
        self.assertIn('problem: record 3', done.out)

    def test_verify_finds_a_cut_tail_by_a_head_noted_before(self):
        self.check_often()
        head = self.cli('activity', 'head').out.strip()
        words = 'activity', 'verify', '--expect-head', head
        self.assertEqual(self.cli(*words).code, 0)
        self.edit('delete from activity where seq=5')
        self.assertEqual(self.cli('activity', 'verify').code, 0)
        self.assertEqual(self.cli(*words).code, 1)
        done = self.cli('activity', 'verify', '--expect-head', 'x')
        self.assertEqual((done.code, done.out), (1, ''))

    def leave_old_records(self):
        """Leave checks that are 20, 11 and 9 days old."""
        world = self.world()
        with pf.Store(self.home, world) as store, store.write() as con:
            for days in 20, 11, 9:
                pf.append_record(con, pf.Record(
                    'preflight', 'cli', world.now() - days * pf.DAY_MS, 'r',
                    'operator', 'success', {
                        'verdict': 'ready', 'ids_count': 1, 'reasons': {},
                        'per_tool': []}))

    def test_sync_prunes_and_the_gate_does_not(self):
        self.configure({'s': self.serve()}, activity_retention='10d')
        self.leave_old_records()
        self.ask('s:x')
        self.assertEqual(len(self.records()), 4)
        self.look()
        self.assertEqual([row['type'] for row in self.records()],
                         ['prune', 'sync', 'preflight', 'preflight'])

    def test_prune_removes_what_is_older_than_the_retention(self):
        self.configure({}, activity_retention='10d')
        self.leave_old_records()
        self.assertEqual(self.cli('activity', 'prune', '-o', 'json').json,
                         {'removed': 2})
        self.assertEqual([row['type'] for row in self.records()],
                         ['prune', 'preflight'])
        self.assertEqual(self.cli('activity', 'verify').code, 0)
        done = self.cli('activity', 'prune', '--older-than', '8d')
        self.assertEqual(done.code, 0)
        self.assertEqual([row['type'] for row in self.records()],
                         ['prune', 'prune'])


class Test20Config(CliCase):
    """Which files are read, and what `config` says of them."""

    def test_check_finds_errors_and_warnings(self):
        for text, code, part in (
                ('{"mcpServers": {}}', 0, '0 servers, 0 errors, 0 warnings'),
                ('{"mcpServers": {"s": {"command": "x", "comand": 1}}}', 0,
                 'did you mean command?'),
                ('{"mcpServers": {"s": 1}}', 0, 'was skipped'),
                ('{"other": 1}', 0, 'no server table found'),
                ('{"mcpServers": {"s": {"command": "${NO_SUCH_V}"}}}', 0,
                 'NO_SUCH_V (command) has no value'),
                ('{"mcpServers": {}, "profiles": {"p": {"servers": ["x"]}}}',
                 0, 'profile p names server "x"'),
                ('{"mcpServers": ', 1, 'line 1, column 16'),
                ('', 1, 'is empty'), ('[]', 1, 'holds no JSON object'),
                ('{"max_age": 5, "mcpServers": {}}', 1, 'max_age must be')):
            with self.subTest(text):
                self.write('config.json', text)
                done = self.cli('config', 'check')
                self.assertEqual(done.code, code, done)
                self.assertIn(part, done.out)
                self.assertEqual(done.err, '')

    def test_what_cannot_be_read_is_no_verdict(self):
        for text in '', '{"mcpServers": ', '[]':
            self.write('config.json', text)
            done = self.ask('s:echo')
            self.assertEqual((done.code, done.out), (1, ''))
            self.assertIn(self.config, done.err)

    def test_a_file_without_a_server_table_knows_no_id(self):
        self.write('config.json', '{"other": 1}')
        done = self.ask('s:echo')
        self.assertEqual(done.code, 12)
        self.assertIn('no server table found', done.err)

    def test_no_config_at_all_names_every_place(self):
        self.write('.mcp.json', '{"mcpServers": {}}')
        own = os.path.join(self.home, 'mcp_config.json')
        done = self.run_cli('--home', self.home, 'tools', 'preflight',
                            's:echo', is_placed=False)
        self.assertEqual((done.code, done.out), (1, ''))
        for part in ('--config', 'PREFLIGHT_CONFIG', own,
                     'add --config ' + self.path('.mcp.json')):
            self.assertIn(part, done.err)

    def test_paths_lists_every_place(self):
        self.write('.mcp.json', '{"mcpServers": {}}')
        self.write('a.json', '{"mcpServers": {}}')
        words = 'config', 'paths', '-o', 'json'
        done = self.run_cli('--home', self.home, '--config', 'a.json',
                            *words, is_placed=False)
        self.assertEqual([(row['path'], row['found'], row['used'])
                          for row in done.json[:3]], [
            ('a.json', True, True),
            (os.path.join(self.home, 'mcp_config.json'), False, False),
            (self.path('.mcp.json'), True, False)])

    def test_the_states_own_file_is_used_when_none_is_named(self):
        os.mkdir(self.home)
        self.write('state/mcp_config.json', '{"mcpServers": {}}')
        done = self.bare('--home', self.home, 'tools', 'preflight', 's:x')
        self.assertEqual(done.code, 12)

    def test_the_flag_wins_over_the_variable(self):
        a = self.write('a.json', '{"mcpServers": {"s": {"command": "x"}}}')
        b = self.write('b.json', '{"mcpServers": {}}')
        ask = '--home', self.home, 'tools', 'preflight', 's:x'
        self.assertEqual(self.bare(*ask, PREFLIGHT_CONFIG=a).code, 10)
        self.assertEqual(self.bare(
            *ask, PREFLIGHT_CONFIG=os.pathsep.join((b, a))).code, 10)
        self.assertEqual(self.bare('--config', b, *ask,
                                   PREFLIGHT_CONFIG=a).code, 12)

    def test_a_repositorys_file_runs_nothing_unless_it_is_named(self):
        ran = self.path('ran')
        self.write('.mcp.json', json.dumps({'mcpServers': {'s': {
            'command': 'sh', 'args': ['-c', 'touch ' + ran]}}}))
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.dir)
        for words in (('sync',), ('tools', 'preflight', '--sync', 's:x'),
                      ('tools', 'list'), ('servers', 'show', 's')):
            with self.subTest(words):
                done = self.bare('--home', self.home, *words)
                self.assertEqual((done.code, done.out), (1, ''))
        self.assertFalse(os.path.exists(ran))
        self.bare('--home', self.home, '--config', '.mcp.json', 'sync')
        self.assertTrue(os.path.exists(ran))


class Test20Remedies(CliCase):
    """Each remedy runs as printed, and those that cure do cure."""

    def one(self, text, *words):
        """Ask for one id: its row."""
        return self.ask(*words + ('--', text)).json['tools'][0]

    def remedy(self, row):
        """Cut the command out of a remedy."""
        found = re.search(r'(?:^Run|, then run): (.*)\Z', row['remediation'],
                          re.DOTALL)
        self.assertTrue(found, row)
        return found.group(1)

    def follow(self, command):
        """Run one remedy as an operator would; returns its verb."""
        verb = re.search(r' (sync|(?:tools|servers|config) [a-z]+)(?: |\Z)',
                         command).group(1)
        if verb == 'servers approve':
            done = self.on_terminal(command, 'y')
        else:
            done = self.shell(command)
        self.assertEqual(done.code, 0, (command, done))
        if verb == 'tools diff':
            line = re.search('^approve: (.*)$', done.out, re.MULTILINE)
            done = self.shell(line.group(1))
            self.assertEqual(done.code, 0, (line.group(1), done))
        self.assertFalse(os.path.exists(self.path('pwned')), command)
        return verb

    def cure(self, text, *words):
        """Follow remedies until the tool is ready: the verbs it took."""
        verbs = []
        while len(verbs) < 3:
            row = self.one(text, *words)
            if row['status'] == 'ready':
                return verbs
            verbs.append(self.follow(self.remedy(row)))
        return verbs + ['not cured']

    def test_each_cure_cures_whatever_the_names_are(self):
        for server, name, count in ((ODD, ODD, 9), ('-s', '--all', 7)):
            with self.subTest(server):
                self.home = self.path('state of %d' % len(server))
                self.cures(server, name, count)

    def cures(self, server, name, count):
        """Put one tool into each curable state, and cure it."""
        text = '%s:%s' % (server, name)
        entry = self.serve('fake', tools=[tool(name)])
        self.configure({server: entry})
        steps = (
            (lambda: None, ['sync']),
            (lambda: self.cli('servers', 'disable', '--', server),
             ['servers enable']),
            (lambda: self.cli('servers', 'quarantine', '--', server),
             ['servers approve']),
            (lambda: self.cli('tools', 'block', '--', text),
             ['tools unblock']),
            (lambda: (self.serve('fake', tools=[tool(name, 'Changed')]),
                      self.look()), ['tools diff']),
            (lambda: (entry['args'].append('--more'),
                      self.configure({server: entry})),
             ['servers approve', 'sync']),
            (lambda: self.configure({server: dict(entry, enabled=False)}),
             ['servers enable']),
            (lambda: self.change_link(server, observed_at=1), ['sync']),
            (lambda: self.change_link(server, state='error',
                                      cause='refused'), ['sync']))
        for number, (how, verbs) in enumerate(steps[:count]):
            how()
            self.assertEqual((number, self.cure(text)), (number, verbs))

    def test_a_look_that_was_cut_off_is_cured(self):
        self.configure({'s': self.serve(tools=[tool()])})
        self.cut_off('s')
        self.assertEqual(self.one('s:echo')['cause'], 'interrupted')
        self.assertEqual(self.cure('s:echo'), ['sync'])

    def test_a_new_tool_is_cured_by_its_review(self):
        self.one_server(tool())
        self.serve(tools=[tool(), tool(ODD)])
        self.look()
        self.assertEqual(self.cure('s:' + ODD), ['tools diff'])

    def test_the_other_remedies_run_and_show_what_to_mend(self):
        self.configure({
            ODD: dict(self.serve('a', tools=[tool(ODD), tool('no')]),
                      disabled_tools=['no']),
            'bad one': self.serve('b', die='start', stderr='no disk\n')},
            profiles={'p': {'servers': []}})
        self.look()
        for text, words, verb in (
                (ODD + ':' + ODD, ('--profile', 'p'), 'config check'),
                (ODD + ':no', (), 'config check'),
                (ODD + ':nope', (), 'tools list'),
                ('elsewhere:x', (), 'servers list'),
                ('bad one:x', (), 'servers show'),
                (ODD + ':' + ODD, ('--pin', '%s:%s=x' % (ODD, ODD)),
                 'tools show')):
            with self.subTest(text, words=words):
                row = self.one(text, *words)
                self.assertEqual(self.follow(self.remedy(row)), verb)

    def test_a_name_with_control_characters_is_never_in_a_command(self):
        name = 'a\n\x1b[2Jb'
        self.one_server(tool(name))
        self.cli('tools', 'block', 's:' + name)
        row = self.one('s:' + name)
        self.assertEqual(row['reason'], 'tool_blocked_by_user')
        self.assertEqual(self.follow(self.remedy(row)), 'tools list')

    def test_a_remedy_repeats_how_the_run_was_started(self):
        entry = json.dumps({'mcpServers': {'s': {'command': 'x'}}})
        config = self.write('a b.json', entry)
        for words, env, parts in (
                (('--home', self.home, '--config', config), {},
                 ['--home', self.home, '--config', config]),
                ((), {'PREFLIGHT_HOME': self.home,
                      'PREFLIGHT_CONFIG': config},
                 ['--home', self.home, '--config', config]),
                (('--config', config), {'STATE_DIRECTORY': self.home},
                 ['--home', self.home, '--config', config]),
                (('--home', self.home, '--config', self.write(
                    '.mcp.json', entry), '--workspace', self.dir), {},
                 ['--home', self.home, '--config', self.path('.mcp.json'),
                  '--workspace', self.dir])):
            with self.subTest(words, env=env):
                done = self.bare('tools', 'preflight', 's:x', '-o', 'json',
                                 *words, **env)
                command = self.remedy(done.json['tools'][0])
                self.assertEqual(shlex.split(command)[1:],
                                 [SCRIPT] + parts + ['sync', 's'])


# --------------------------------------------------------------------------
# the gate touches nothing
# --------------------------------------------------------------------------

# Runs commands in one process where every way to a socket or a process is a
# trap, and tells for each: its code, what was trapped, the tables that moved
# and how many audit records came.
TRAPS = r'''
import io, json, os, socket, sqlite3, subprocess, sys
import _posixsubprocess, _socket
caught = []
def trap(name):
    def caller(*args, **more):
        caught.append(name)
        raise OSError('trapped: ' + name)
    return caller
for module, names in ((socket, 'socket create_connection socketpair '
                       'getaddrinfo gethostbyname fromfd'),
                      (_socket, 'socket getaddrinfo gethostbyname'),
                      (subprocess, 'Popen run call check_call check_output '
                       '_fork_exec'), (_posixsubprocess, 'fork_exec'),
                      (os, 'fork forkpty execv execve execvp execvpe '
                       'posix_spawn posix_spawnp spawnv spawnve system '
                       'popen')):
    for name in names.split():
        if hasattr(module, name):
            setattr(module, name, trap(name))
def hook(event, args):
    if event.startswith(('socket.', 'subprocess.', 'os.exec', 'os.fork',
                         'os.posix_spawn', 'os.spawn', 'os.system',
                         'pty.spawn')):
        caught.append(event)
        raise OSError('trapped: ' + event)
getattr(sys, 'addaudithook', id)(hook)
script, home, commands = sys.argv[1], sys.argv[2], json.load(sys.stdin)
program = {'__name__': 'trapped', '__file__': script}
with open(script, encoding='utf-8') as file:
    exec(compile(file.read(), script, 'exec'), program)
def dump():
    con = sqlite3.connect(os.path.join(home, 'preflight.db'))
    names = [row[0] for row in con.execute(
        "select name from sqlite_master where type='table'")]
    found = {name: sorted(map(repr, con.execute('select * from ' + name)))
             for name in names}
    con.close()
    return found
sys.argv[0] = script
real, told = sys.stdout, []
for words in commands:
    before = dump()
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding='utf-8')
    sys.stderr = io.TextIOWrapper(io.BytesIO(), encoding='utf-8')
    code = program['main'](words)
    after = dump()
    told.append({'words': words, 'code': code, 'caught': caught[:],
                 'records': len(after.pop('activity'))
                 - len(before.pop('activity')),
                 'moved': sorted(name for name in after
                                 if after[name] != before[name])})
    del caught[:]
json.dump(told, real)
real.flush()
'''

# Prints the modules that a run loads beyond those that the named ones bring.
MODULES = r'''
import sys
import json, os, re, time, collections, argparse, sqlite3, hashlib, signal
import gc
try:
    import fcntl
except ImportError:
    import msvcrt
argparse.ArgumentParser(add_help=False).parse_known_args([])
b'x'.decode('utf-8-sig')
known = set(sys.modules)
script = sys.argv[1]
program = {'__name__': 'measured', '__file__': script}
with open(script, encoding='utf-8') as file:
    code = compile(file.read(), script, 'exec')
exec(code, program)
imported = set(sys.modules) - known
code = program['main'](sys.argv[2:])
json.dump({'code': code, 'brought': sorted(known),
           'imported': sorted(imported),
           'loaded': sorted(set(sys.modules) - known)}, sys.stderr)
'''


class TestZero(CliCase):
    """Reading commands reach no server, start nothing, change nothing."""

    def trapped(self, *commands):
        """Run commands among traps: what was told of each."""
        place = ['--home', self.home, '--config', self.config]
        done = subprocess.Popen(
            [sys.executable, '-S', '-c', TRAPS, SCRIPT, self.home],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, cwd=self.dir)
        out, err = done.communicate(json.dumps(
            [place + command.split(' ') for command in commands]).encode(),
            timeout=60)
        self.assertEqual(done.returncode, 0, err.decode())
        return json.loads(out.decode())

    def mixed(self):
        """Have a state with a bit of everything, and a file to tempt."""
        names = 'ok', 'drift', 'gone'
        self.configure({
            's': self.serve(tools=[tool(name) for name in names]),
            'off': dict(self.serve('off'), enabled=False),
            'dead': self.serve('dead', die='start'),
            'never': self.serve('never'),
            'web': {'url': 'http://127.0.0.1:9/mcp'}},
            profiles={'p': {'servers': ['s']}})
        self.look('s', 'dead')
        self.serve(tools=[tool('ok'), tool('drift', 'Changed'),
                          tool('new')])
        self.look('s')
        self.ask('s:ok')
        self.write('.mcp.json', '{"mcpServers": {"x": {"command": "x"}}}')

    def test_the_gate_adds_one_record_and_nothing_else(self):
        self.mixed()
        told = self.trapped(
            'tools preflight s:ok', 'tools preflight s:drift s:new s:okk',
            'tools preflight never:x --wait 1ms',
            'tools preflight dead:x off:x web:x nope:x colonless',
            'tools preflight s:ok --profile p --read-only-only -o yaml',
            'tools preflight s:ok --pin s:ok=x -o json')
        for row in told:
            with self.subTest(row['words']):
                self.assertIn(row['code'], (0, 10, 11, 12))
                self.assertEqual(row['caught'], [])
                self.assertEqual(row['moved'], [])
                self.assertEqual(row['records'], 1)

    def test_commands_that_show_change_nothing_at_all(self):
        self.mixed()
        told = self.trapped(
            'tools list', 'tools list s -o json', 'tools show s:ok',
            'tools show s:gone', 'tools diff s:drift', 'tools diff s:new',
            'tools explain s:drift', 'tools explain dead:x',
            'servers list', 'servers show s', 'servers show dead',
            'servers show web', 'activity list', 'activity head',
            'activity verify', 'profiles list', 'config check',
            'config paths', '--help', '--version', 'tools list --help')
        for row in told:
            with self.subTest(row['words']):
                self.assertEqual((row['code'], row['caught'], row['moved'],
                                  row['records']), (0, [], [], 0))

    def test_a_check_that_cannot_run_leaves_no_record(self):
        self.mixed()
        for row in self.trapped(
                'tools preflight', 'tools preflight s:ok --profile nope',
                'tools preflight s:ok --wait 1h', 'tools preflight s:ok -ox',
                'tools show s:nope', 'activity show nope'):
            with self.subTest(row['words']):
                self.assertEqual((row['code'], row['caught'], row['moved'],
                                  row['records']), (1, [], [], 0))

    def test_decisions_reach_no_server_either(self):
        self.mixed()
        for row in self.trapped(
                'tools block s:ok', 'tools approve --yes s:new',
                'servers enable off', 'servers quarantine s',
                'servers approve s', 'activity prune --older-than 0'):
            with self.subTest(row['words']):
                self.assertEqual((row['code'], row['caught']), (0, []))
                self.assertNotIn('tool', row['moved'])
                self.assertNotIn('server', row['moved'])

    def test_cached_health_starts_nothing_and_leaves_one_record(self):
        self.mixed()
        for row in self.trapped('health --cached s dead off never web',
                                'health --cached -o json',
                                'health --cached nope'):
            with self.subTest(row['words']):
                self.assertIn(row['code'], (11, 12))
                self.assertEqual((row['caught'], row['moved'],
                                  row['records']), ([], [], 1))

    def test_the_traps_do_catch_what_looks_at_servers(self):
        self.mixed()
        for row in self.trapped('sync s', 'tools preflight --sync s:ok',
                                'health s'):
            self.assertTrue(row['caught'], row)

    def modules(self, *words):
        """Run a command in an empty interpreter: what it loaded."""
        done = subprocess.Popen(
            [sys.executable, '-I', '-S', '-c', MODULES, SCRIPT, '--home',
             self.home, '--config', self.config] + list(words),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        told = done.communicate(timeout=60)[1].decode().split('\n')[-1]
        return json.loads(told)

    def test_the_gate_loads_these_modules_and_no_others(self):
        self.one_server(tool())
        for words, code, more in ((('s:echo',), 0, set()),
                                  (('s:ecko', 's:echo'), 12, {'difflib'})):
            with self.subTest(words):
                found = self.modules('tools', 'preflight', *words)
                self.assertEqual(found['code'], code)
                self.assertEqual(found['imported'], [])
                self.assertEqual(set(found['loaded']), more | (
                    {'heapq', '_heapq'} & set(found['loaded'])))

    def test_what_those_modules_bring_is_what_was_measured(self):
        # argparse brings shutil on 3.8, and that threading; sqlite3 brings
        # datetime everywhere. Nothing else that is dear is brought along.
        dear = set('dataclasses typing logging uuid secrets tempfile shutil '
                   'pathlib urllib.request http.client ssl socket subprocess '
                   'threading asyncio difflib unittest inspect'.split())
        self.one_server(tool())
        brought = dear & set(self.modules('--version')['brought'])
        self.assertLessEqual(brought, {'shutil', 'threading'}
                             if sys.version_info[:2] == (3, 8) else set())


# --------------------------------------------------------------------------
# cli
# --------------------------------------------------------------------------

PIN_X = 'sha256/v1:' + 'f' * 64

# What the words are -> what stderr says. Each is exit 1, stdout is empty.
USAGE = (
    ('', 'no command was given'),
    ('tools', 'tools needs a command behind it'),
    ('tools preflite s:x', 'did you mean tools preflight?'),
    ('tool list', 'did you mean tools list?'),
    ('synk', 'did you mean sync?'),
    ('--bogus tools list', 'unknown option --bogus'),
    ('--wait 5s tools preflight s:x', 'options stand after it'),
    ('tools preflight', 'no tool id was given'),
    ('tools preflight --lock a --lock=b s:x', '--lock is given twice'),
    ('tools verify --profile p --profile p', '--profile is given twice'),
    ('tools lock --all --file a --file b', '--file is given twice'),
    ('tools preflight --wai 5s s:x', 'unknown option --wai'),
    ('tools preflight --profil p s:x', 'unknown option --profil'),
    ('tools preflight --outpu json s:x', 'unknown option --outpu'),
    ('tools preflight --hom x s:x', 'unknown option --hom'),
    ('tools preflight -x s:x', 'unknown option -x'),
    ('tools preflight s:x -y', 'unknown option -y'),
    ('tools list --sync', 'unknown option --sync'),
    ('sync --wait 5s', 'unknown option --wait'),
    ('tools preflight s:x --pin', '--pin'),
    ('tools preflight s:x --pin s:x', 'is not ID=PIN'),
    ('tools preflight s:x --pin =' + PIN_X, 'is not ID=PIN'),
    ('tools preflight s:x --pin s:x=', 'is not ID=PIN'),
    ('tools preflight s:x --pin s:y=' + PIN_X, 'is not asked for'),
    ('tools preflight s:x --pin s:x=a --pin s:x=b', 'two pins: a and b'),
    ('tools preflight s:x --profile=', '--profile is empty'),
    ('tools preflight s:x --profile nope', 'Unknown profile "nope"'),
    ('tools preflight s:x --profile nightli', 'did you mean nightly?'),
    ('tools preflight s:x --wait 1h', 'at most 10s'),
    ('tools preflight s:x --wait 10001ms', 'at most 10s'),
    ('tools preflight s:x --wait -5', 'not a duration'),
    ('tools preflight s:x --wait -5s', '--wait'),
    ('tools preflight s:x --wait=-5s', 'not a duration'),
    ('tools preflight s:x --wait 5', 'not a duration'),
    ('tools preflight s:x --wait=', 'not a duration'),
    ('tools preflight s:x --wait 5sec', 'not a duration'),
    ('tools preflight s:x --wait', '--wait'),
    ('tools preflight s:x --request-id=', '--request-id takes'),
    ('tools preflight s:x --request-id a.b', '--request-id takes'),
    ('tools preflight s:x --request-id ' + 'a' * 257, '--request-id takes'),
    ('tools preflight s:x -o xml', 'unknown output format "xml"'),
    ('tools preflight s:x -oxml', 'unknown output format "xml"'),
    ('tools preflight s:x --output=', 'unknown output format ""'),
    ('tools preflight s:x -o', '-o'),
    ('tools preflight s:x --dialect nope', 'unknown dialect "nope"'),
    ('tools preflight s:x --sync=yes', '--sync'),
    ('--home= tools preflight s:x', 'must not be empty'),
    ('--config= tools preflight s:x', '--config is empty'),
    ('--workspace= tools preflight s:x', 'must not be empty'),
    ('sync --timeout 0', 'longer than 0'),
    ('sync --timeout=', 'longer than 0'),
    ('sync --timeout 5', 'not a duration'),
    ('tools show', 'exactly one tool id'),
    ('tools diff a:b c:d', 'exactly one tool id'),
    ('tools explain', 'exactly one tool id'),
    ('servers show', 'exactly one server name'),
    ('profiles list x', 'takes no "x"'),
    ('config paths x', 'takes no "x"'),
    ('activity head x', 'takes no "x"'),
)


class Test23Usage(CliCase):
    """What cannot be asked is refused before anything runs."""

    def test_each_usage_error_is_exit_1_with_one_sentence(self):
        self.configure({'s': {'command': 'x'}},
                       profiles={'nightly': {'servers': []}})
        for words, part in USAGE:
            with self.subTest(words):
                done = self.cli(*words.split(' ')[:1 if words else 0] + (
                    words.split(' ')[1:]))
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertIn(part, done.err)
                self.assertLessEqual(done.err.count('\n'), 2)
                self.assertNotIn('Traceback', done.err)
                self.assertNotIn('internal error', done.err)
                self.assertFalse(os.path.exists(self.home), 'it ran')

    def test_it_is_so_in_a_process_of_its_own(self):
        self.configure({'s': {'command': 'x'}})
        done = self.run_cli('tools', 'preflight', '--wai', '5s', 's:x')
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('unknown option --wai', done.err)

    def test_an_unknown_format_in_the_environment_is_refused(self):
        self.configure({'s': {'command': 'x'}})
        done = self.cli('tools', 'preflight', 's:x', PREFLIGHT_OUTPUT='xml')
        self.assertEqual((done.code, done.out), (1, ''))
        done = self.cli('tools', 'preflight', 's:x', '-ojson',
                        PREFLIGHT_OUTPUT='xml')
        self.assertEqual(done.code, 10)

    def test_only_serve_and_its_clients_take_a_url(self):
        self.one_server(tool())
        for words in (('sync',), ('tools', 'approve', 's:echo', '--yes'),
                      ('config', 'check'), ('servers', 'show', 's'),
                      ('tools', 'preflight', '--sync', 's:echo')):
            with self.subTest(words):
                for more, env in (((), {'PREFLIGHT_URL': 'http://x:1'}),
                                  (('--url', 'http://x:1'), {})):
                    done = self.cli(*words + more, **env)
                    self.assertEqual((done.code, done.out), (1, ''))
                    self.assertIn('env -u PREFLIGHT_URL', done.err)
        self.assertEqual(self.cli('sync', PREFLIGHT_URL='').code, 0)

    def test_there_must_be_a_place_for_the_state(self):
        self.configure({'s': {'command': 'x'}})
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.dir)
        ask = '--config', self.config, 'tools', 'preflight', 's:x'
        for home in '', 'relative', '~':
            with self.subTest(home):
                done = self.bare(*ask, HOME=home, USERPROFILE='')
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertIn('--home', done.err)
        done = self.bare(*ask, HOME=self.config, USERPROFILE='')
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertEqual(os.listdir(self.dir), ['config.json'])

    def test_the_state_directory_is_found_in_its_order(self):
        self.configure({'s': {'command': 'x'}})
        env = {'HOME': self.path('h'), 'XDG_STATE_HOME': self.path('x'),
               'STATE_DIRECTORY': self.path('d') + ':' + self.path('e'),
               'PREFLIGHT_HOME': self.path('p')}
        ask = '--config', self.config, 'tools', 'preflight', 's:x'
        for name, place in (('', 'p'), ('PREFLIGHT_HOME', 'd'),
                            ('STATE_DIRECTORY', 'x/preflight'),
                            ('XDG_STATE_HOME', 'h/.preflight')):
            env.pop(name, None)
            with self.subTest(place):
                self.assertEqual(self.bare(*ask, **env).code, 10)
                self.assertEqual(stat.S_IMODE(os.stat(
                    self.path(place)).st_mode), 0o700)
        env['XDG_STATE_HOME'] = 'relative'
        self.assertEqual(self.bare(*ask, **env).code, 10)
        self.assertFalse(os.path.exists('relative'))
        done = self.bare('--home', self.path('flag'), *ask, **env)
        self.assertEqual(done.code, 10)
        self.assertTrue(os.path.exists(self.path('flag')))


class Test23Cli(CliCase):
    """The command line as it is documented."""

    def test_words_may_come_in_any_order(self):
        self.one_server(tool(annotations=SAFE))
        place = ['--home', self.home, '--config', self.config]
        ask = ['tools', 'preflight']
        rest = ['s:echo', '--read-only-only', '--wait', '1s', 's:no=pe']
        forms = [
            place + ['-o', 'json'] + ask + rest,
            ask + rest + place + ['-o', 'json'],
            ['tools'] + place + ['-o', 'json', 'preflight'] + rest,
            ask + rest[:1] + place + rest[1:] + ['-ojson'],
            ask + rest[1:] + rest[:1] + place + ['-o=json'],
            place + ask + rest + ['--output=json'],
            place + ask + rest + ['--output', 'json'],
            place + ['-ojson'] + ask + rest[1:4] + ['--', rest[0], rest[4]]]
        for words in forms:
            with self.subTest(words):
                done = self.bare(*words)
                self.assertEqual(done.code, 12, done)
                self.assertEqual(
                    {row['id']: row['status'] for row in done.json['tools']},
                    {'s:echo': 'ready', 's:no=pe': 'unavailable'})

    def test_ids_may_hold_equal_signs_dashes_and_blanks(self):
        names = 'a=b', '-x', 'a b', 'n:s:t', '=', '--pin'
        self.one_server(*[tool(name) for name in names])
        pins = []
        for name in names:
            pins += ['--pin=s:%s=%s' % (name, PIN % (1, hash_of(
                tool(name))))]
        done = self.ask(*pins + ['s:' + name for name in names])
        self.assertEqual(done.code, 0, done)
        self.configure({'-s': self.entry})
        self.look()
        self.assertEqual(self.reasons('--', '-s:-x'), ['ready'])

    def test_the_table_is_the_agreed_one(self):
        self.configure({'gh-ops': self.serve(tools=[tool('sync_issues')])})
        self.look()
        done = self.cli('tools', 'preflight', 'gh-ops:sync_issues',
                        'gh-ops:nope')
        self.assertEqual(done.out, (
            'ID                  STATUS       REASON     RETRYABLE  ACTION '
            '    DETAIL\n'
            'gh-ops:sync_issues  ready        -          -          -      '
            '    -\n'
            'gh-ops:nope         unavailable  not_found  false      '
            'configure  No tool with this id is available.\n'
            'VERDICT: unknown_ids (exit 12)\n'))

    def test_json_has_the_agreed_keys_in_their_order(self):
        self.one_server(tool())
        data = self.ask('s:echo', 's:echa', ' s:echo ', '--wait', '1s').json
        self.assertEqual(list(data), ['verdict', 'checked_at', 'waited_ms',
                                      'tools'])
        self.assertRegex(data['checked_at'],
                         r'\A\d{4}(-\d\d){2}T\d\d(:\d\d){2}\.\d{3}Z\Z')
        self.assertEqual([list(row) for row in data['tools']], [
            ['id', 'status', 'hash', 'observed_at'],
            ['id', 'status', 'reason', 'retryable', 'action', 'detail',
             'remediation', 'did_you_mean', 'observed_at']])

    def test_yaml_holds_the_same_as_json(self):
        self.one_server(tool('caf\xe9'))
        words = 's:caf\xe9', 's:no', 's:caf\xe8'
        data = self.ask(*words).json
        self.assertIn('s:caf\xe9  ready', self.cli(
            'tools', 'preflight', *words).out)
        text = self.cli('tools', 'preflight', '-o', 'yaml', *words).out
        text = re.sub('(?<=checked_at: ").*(?=")', data['checked_at'], text)
        self.assertEqual(text, pf.render_yaml(data))

    def test_the_format_is_the_flags_then_the_environments(self):
        self.one_server(tool())
        ask = 'tools', 'preflight', 's:echo'
        for words, env, start in (
                ((), {}, 'ID'), ((), {'PREFLIGHT_OUTPUT': ''}, 'ID'),
                ((), {'PREFLIGHT_OUTPUT': 'json'}, '{'),
                (('-o', 'yaml'), {'PREFLIGHT_OUTPUT': 'json'}, 'verdict:'),
                (('-otable',), {'PREFLIGHT_OUTPUT': 'json'}, 'ID')):
            with self.subTest(words, env=env):
                self.assertTrue(self.cli(*ask + words, **env).out
                                .startswith(start))

    def test_the_request_id_is_told_when_it_is_not_ready(self):
        self.one_server(tool())
        done = self.ask('s:echo', '--request-id', 'ci-1_A')
        self.assertEqual((done.code, done.err), (0, ''))
        self.assertEqual(self.records()[0]['request_id'], 'ci-1_A')
        done = self.ask('s:nope', '--request-id', 'a' * 256)
        self.assertIn('request id: %s\n' % ('a' * 256), done.err)
        told = re.search('request id: (.*)\n', self.ask('s:nope').err)
        self.assertRegex(told.group(1), '-4[0-9a-f]{3}-[89ab]')
        self.assertEqual(self.records()[0]['request_id'], told.group(1))

    def test_a_cause_that_time_does_not_cure_is_told_on_stderr(self):
        self.configure({'s': self.serve(), 't': {'command': 'no-such-cmd'}})
        self.look('t')
        for text, part in (('s:x', 'has never been looked at (state '
                            + self.home), ('t:x', 'no-such-cmd')):
            with self.subTest(text):
                done = self.ask(text)
                self.assertEqual(done.code, 10)
                lines = done.err.split('\n')
                self.assertEqual(len(lines), 3, done.err)
                self.assertIn(part, lines[0])
                self.assertIn('Run: ', lines[0])
        self.assertNotIn('never', self.ask('s:x', 'nope:x').err)

    def test_a_warning_concerns_only_what_was_asked_for(self):
        self.configure({'s': dict(self.serve(), comand='x'),
                        't': self.serve()})
        self.assertIn('did you mean command?', self.ask('s:x').err)
        self.assertNotIn('comand', self.ask('t:x').err)

    def test_a_wait_that_cannot_help_is_over_at_once(self):
        self.one_server(tool())
        for words, is_there in ((('--wait', '10s'), True), ((), False),
                                (('--wait', '0'), False),
                                (('--wait', '1ms'), True)):
            for text in 's:echo', 's:nope':
                with self.subTest(text, words=words):
                    data = self.ask(text, *words).json
                    self.assertEqual('waited_ms' in data, is_there)
                    self.assertLess(data.get('waited_ms', 0), 10000)

    def test_a_wait_gives_up_with_the_reasons_of_then(self):
        self.configure({'s': self.serve()})
        done = self.ask('s:x', '--wait', '300ms')
        self.assertEqual(done.code, 10)
        self.assertGreaterEqual(done.json['waited_ms'], 300)
        self.assertEqual(done.err.count('never been looked at'), 1)
        self.assertEqual(len(self.records()), 1)

    def test_a_wait_ends_when_a_sync_elsewhere_makes_it_ready(self):
        self.configure({'s': self.serve(tools=[tool()])})
        process = self.start('tools', 'preflight', 's:echo', '--wait', '10s',
                             '-ojson')
        line = process.stderr.readline().decode()
        self.assertIn('never been looked at', line)
        self.assertIsNone(process.poll())
        self.look()
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (0, b''))
        data = json.loads(out.decode())
        self.assertEqual(data['tools'][0]['status'], 'ready')
        self.assertGreater(data['waited_ms'], 0)
        self.assertEqual(self.records('--type', 'preflight')[0]['status'],
                         'success')

    def test_sync_tells_what_it_found(self):
        self.configure({'s': self.serve(tools=[tool(), tool('b')]),
                        'dead': self.serve('dead', die='start', code=3),
                        'off': dict(self.serve('off'), enabled=False)})
        done = self.look()
        self.assertEqual(done.code, 10)
        self.assertIn('trusted on first use: 1 server, 2 tools', done.err)
        rows = {row['server']: row for row in done.json['servers']}
        self.assertEqual(list(rows['s']), [
            'server', 'state', 'cause', 'detail', 'tools', 'added',
            'changed', 'vanished', 'baseline', 'ms'])
        self.assertEqual([rows[name]['state'] for name in (
            's', 'dead', 'off')], ['ready', 'error', 'disabled'])
        self.assertEqual(rows['dead']['cause'], 'exited')
        self.serve(tools=[tool(description='Changed'), tool('c')])
        row = self.look('s').json['servers'][0]
        self.assertEqual((row['added'], row['changed'], row['vanished']),
                         (['c'], ['echo'], ['b']))

    def test_exit_codes_of_sync(self):
        self.configure({'s': self.serve(tools=[tool()]),
                        'q': dict(self.serve('q'), quarantined=True),
                        'off': dict(self.serve('off'), enabled=False,
                                    quarantined=True)})
        for words, code in ((('s',), 0), (('off',), 0), (('q',), 11),
                            (('s', 'off'), 0), ((), 11), (('ss',), 12),
                            (('s', 'ss', 'q'), 12)):
            with self.subTest(words):
                done = self.cli('sync', *words)
                self.assertEqual(done.code, code, done)
        self.assertIn('did you mean s?', self.cli('sync', 'ss').err)

    def test_version_is_that_of_this_very_file(self):
        import hashlib
        with open(SCRIPT, 'rb') as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        done = self.bare('--version')
        self.assertEqual((done.code, done.out), (
            0, 'preflight.py %s (%s)\n' % (pf.VERSION, digest[:12])))

    def test_help_for_every_command(self):
        for verb, row in pf.COMMANDS.items():
            for flag in '-h', '--help':
                with self.subTest(verb, flag=flag):
                    done = self.bare(*verb + (flag,))
                    self.assertEqual((done.code, done.err), (0, ''))
                    self.assertIn('usage: preflight.py ' + ' '.join(verb),
                                  done.out)
                    self.assertIn(row.about, done.out)
                    for name, _ in row.options:
                        self.assertIn(name, done.out)
                    self.assertLess(max(map(len, done.out.split('\n'))), 80)

    def test_help_without_a_command_lists_them_all(self):
        for words in ('-h',), ('--help',):
            done = self.bare(*words)
            self.assertEqual((done.code, done.err), (0, ''))
            for verb in pf.COMMANDS:
                self.assertIn('  ' + ' '.join(verb), done.out)
            self.assertLess(max(map(len, done.out.split('\n'))), 80)

    def test_a_terminal_is_shown_the_start_of_a_hash(self):
        row = dict.fromkeys(('id', 'listed', 'status', 'blocked', 'denied',
                             'last_seen'), 'x')
        render = pf.COMMANDS['tools', 'list'].render
        for digest, shown in (('sha256/v1:' + H1, 'sha256/v1:%s...'
                               % H1[:12]), (None, '-')):
            rows = [dict(row, hash=digest)]
            self.assertIn('  %s  ' % shown, render(rows, 200))
            self.assertIn('  %s  ' % (digest or '-'), render(rows, 0))

    def test_help_of_a_group_lists_its_commands_alone(self):
        groups = {verb[0] for verb in pf.COMMANDS if len(verb) > 1}
        for group in groups:
            for words in (group, '-h'), ('--help', group):
                with self.subTest(words):
                    done = self.bare(*words)
                    self.assertEqual((done.code, done.err), (0, ''))
                    listed = {tuple(line.split()[:2]) for line
                              in done.out.split('\n') if line[:2] == '  '}
                    self.assertEqual(listed, {
                        verb for verb in pf.COMMANDS if verb[0] == group})

    def test_a_group_alone_names_its_commands(self):
        for words in ('profiles',), ('profiles', '--pin', 'a=b'):
            done = self.bare(*words)
            self.assertEqual((done.code, done.out), (1, ''))
            self.assertIn('profiles needs a command behind it: list',
                          done.err)

    def test_an_internal_error_is_one_line_and_exit_1(self):
        self.configure({})
        with mock.patch.object(pf, 'load_config',
                               side_effect=ZeroDivisionError('oops')):
            done = self.ask('s:x')
            self.assertEqual((done.code, done.out), (1, ''))
            self.assertIn('internal error: ZeroDivisionError: oops',
                          done.err)
            self.assertNotIn('Traceback', done.err)
            self.assertIn('Traceback', self.ask('s:x', '--debug').err)


class Test23Streams(CliCase):
    """Closed and full streams, signals, locales: in real processes."""

    def test_exit_codes_of_a_real_process(self):
        self.one_server(tool())
        self.configure({'s': self.entry, 'never': self.serve('never')})
        for words, code in ((('s:echo',), 0), (('never:x',), 10),
                            (('s:echo', '--pin', 's:echo=x'), 11),
                            (('s:nope',), 12), ((), 1)):
            with self.subTest(words):
                done = self.check(*words)
                self.assertEqual(done.code, code)
                self.assertEqual(bool(done.out), code != 1)

    def test_a_reader_that_went_away_does_not_change_the_verdict(self):
        self.one_server(tool())
        for text, code in (('s:echo', 0), ('s:nope', 12)):
            ours, theirs = os.pipe()
            os.close(ours)
            process = subprocess.Popen(
                [sys.executable, SCRIPT, '--home', self.home, '--config',
                 self.config, 'tools', 'preflight', text], stdout=theirs,
                stderr=subprocess.PIPE)
            os.close(theirs)
            err = process.communicate(timeout=60)[1].decode()
            self.assertEqual(process.returncode, code)
            self.assertNotIn('rror', err)

    def test_a_table_is_fitted_to_the_terminal_that_shows_it(self):
        self.one_server(tool())
        line = self.line('tools', 'list')
        head = 'ID      LISTED  STATUS    BLOCKED  DENIED  HASH'
        for columns, fits in ((0, False), (79, False), (200, True)):
            with self.subTest(columns):
                shown = self.on_terminal(
                    'stty cols %d; %s' % (columns, line)).out.split('\n')
                if not fits:
                    self.assertEqual(shown[0], head)
                    self.assertEqual(shown[1], '    LAST SEEN')
                    continue
                self.assertTrue(shown[0].endswith('  LAST SEEN'), shown)
        self.assertIn('  LAST SEEN\n', self.shell(line).out)

    def test_streams_that_cannot_be_written(self):
        self.one_server(tool())
        self.configure({'s': self.entry, 'never': self.serve('never')})
        line = self.line('tools', 'preflight', 'never:x').replace(
            ' ', ' -S ', 1)     # what site loads would write there, too
        for more, code in (('>&-', 1), ('>/dev/full', 1), ('2>&-', 10),
                           ('2>/dev/full', 10), ('<&-', 10),
                           ('<&- >&- 2>&-', 1)):
            if '/dev/full' in more and not os.path.exists('/dev/full'):
                continue
            with self.subTest(more):
                done = self.shell('%s %s' % (line, more))
                self.assertEqual(done.code, code, done)
                self.assertNotIn('Traceback', done.err)

    def test_closed_descriptors_are_not_taken_for_the_database(self):
        self.configure({'s': self.serve(tools=[tool()])})
        for words in (('sync',), ('tools', 'preflight', 's:echo'),
                      ('sync',), ('tools', 'preflight', 's:nope')):
            self.shell(self.line(*words) + ' <&- >&- 2>&-')
        self.assertEqual(self.cli('activity', 'verify').code, 0)
        self.assertEqual(len(self.records('--type', 'preflight')), 2)
        con = sqlite3.connect(os.path.join(self.home, 'preflight.db'))
        self.addCleanup(con.close)
        self.assertEqual(con.execute('pragma integrity_check').fetchall(),
                         [('ok',)])

    def test_descriptors_0_to_2_are_always_open(self):
        code = ('import os, stat, sys; script, told = sys.argv[1:]; '
                'program = {"__name__": "p", "__file__": script}; '
                'exec(compile(open(script, encoding="utf-8").read(), '
                'script, "exec"), program); program["main"](["nothing"]); '
                'open(told, "w").write(str([stat.S_ISCHR(os.fstat(n)'
                '.st_mode) for n in (0, 1, 2)]))')
        self.shell(' '.join(map(shlex.quote, (
            sys.executable, '-c', code, SCRIPT, self.path('told'))))
            + ' <&- >&- 2>&-')
        with open(self.path('told')) as file:
            self.assertEqual(file.read(), '[True, True, True]')

    def interrupted(self, *numbers, **more):
        """Send signals to a check that waits; returns its exit code."""
        process = self.start('tools', 'preflight', 's:x', '--wait', '10s',
                             **more)
        self.assertIn(b'never been looked at', process.stderr.readline())
        for number in numbers:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
        self.assertEqual((out, err), (b'', b''))
        return process.returncode

    def test_signals_end_a_wait_with_their_own_code(self):
        self.configure({'s': self.serve()})
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143),
                             (signal.SIGHUP, 129)):
            with self.subTest(number):
                self.assertEqual(self.interrupted(number), code)
        self.assertEqual(self.records(), [])

    def test_nohup_is_respected(self):
        self.configure({'s': self.serve()})

        def ignore():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.assertEqual(self.interrupted(
            signal.SIGHUP, signal.SIGTERM, preexec_fn=ignore), 143)

    def test_no_locale_changes_the_verdict(self):
        self.one_server(tool('caf\xe9'))
        text = 's:caf\xe9'.encode('utf-8')
        for env in QUIET, {'PYTHONIOENCODING': 'ascii'}, {'LC_ALL': 'C'}:
            for form in pf.FORMATS:
                with self.subTest(form, env=env):
                    done = self.run_cli('tools', 'preflight', '-o', form,
                                        text, text + b'x', env=env)
                    self.assertEqual(done.code, 12, done)
                    self.assertIn('caf', done.out)
                    if form == 'json':
                        self.assertEqual(done.json['tools'][0]['id'],
                                         's:caf\xe9')

    def test_names_in_options_are_read_in_any_locale(self):
        self.one_server(tool('caf\xe9'))
        self.configure({'s': self.entry},
                       profiles={'pr\xfcf': {'servers': ['s']}})
        words = ['s:caf\xe9', '--profile', 'pr\xfcf', '--pin',
                 's:caf\xe9=' + PIN % (1, hash_of(tool('caf\xe9')))]
        done = self.run_cli('tools', 'preflight', *[
            word.encode('utf-8') for word in words], env=QUIET)
        self.assertEqual(done.code, 0, done)

    def test_a_path_that_stderr_cannot_spell_is_escaped(self):
        self.configure({'s': {'command': 'x'}})
        done = self.run_cli(
            '--home', os.fsencode(self.home) + 'caf\xe9'.encode('utf-8'),
            '--config', self.config, 'tools', 'preflight', 's:x',
            is_placed=False, env={'PYTHONIOENCODING': 'ascii'})
        self.assertEqual(done.code, 10, done)
        self.assertRegex(done.err, r'statecaf\\(xe9|udcc3)')

    def test_bytes_that_are_no_text_are_an_unknown_id(self):
        self.one_server(tool())
        done = self.check(b's:\xff', b'\xff:x', b'\xff', 's:echo')
        self.assertEqual(done.code, 12, done)
        self.assertEqual([row['status'] for row in done.json['tools']],
                         ['unavailable'] * 3 + ['ready'])
        self.assertEqual(self.cli('activity', 'verify').code, 0)

    def test_a_file_beside_the_program_is_not_imported(self):
        with open(SCRIPT, 'rb') as file:
            self.write('preflight.py', file.read())
        for name in 'json', 'os', 're', 'argparse', 'sqlite3', 'hashlib':
            self.write(name + '.py', 'open(%r, "w")' % self.path('ran'))
        self.configure({'s': {'command': 'x'}})
        process = subprocess.Popen(
            [sys.executable, 'preflight.py', '--home', self.home, '--config',
             self.config, 'tools', 'preflight', 's:x'], cwd=self.dir,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 10)
        self.assertFalse(os.path.exists(self.path('ran')))

    def test_remedies_and_suggestions_are_shown_on_a_terminal(self):
        self.one_server(tool())
        done = self.on_terminal(self.line('tools', 'preflight', 's:ecko'))
        self.assertEqual(done.code, 12)
        self.assertIn('\ns:ecko\n  Run: ', done.out)
        self.assertIn('Did you mean: s:echo', done.out)
        self.assertNotIn('Did you mean', self.cli(
            'tools', 'preflight', 's:ecko').out)


EVIL = ('ev\x1b[31mil', 'a\r\nb:c  ready', 'x\u202ey', 'c\x9b31m', 'd\u2028e',
        'f\x07\x7f', 'g\tb')


class Test23Foreign(CliCase):
    """Foreign text can neither move a cursor nor forge a line."""

    def evil(self):
        """Have a server whose every text is hostile; then it changes."""
        self.names = list(EVIL)
        self.configure({
            's': self.serve(tools=[tool(name, 'Was ' + name)
                                   for name in EVIL]),
            'x\x1b[2Jy\nz': self.serve(
                'y', die='start', stderr='bad \x1b[2J\x9b\r\nstate: ready\n')})
        self.look()
        self.serve(tools=[tool(name, 'Is ' + name) for name in EVIL])
        self.look('s')

    def clean(self, done):
        """Hold both streams of a command to what is safe."""
        for text in done.out, done.err:
            self.assertEqual(RAW.findall(text), [], text)

    def test_no_table_shows_a_raw_control_character(self):
        self.evil()
        ids = ['s:' + name for name in EVIL]
        other = 'x\x1b[2Jy\nz'
        for words in (
                ['tools', 'list'], ['servers', 'list'],
                ['tools', 'preflight'] + ids + [other + ':a'],
                ['servers', 'show', other], ['sync'], ['config', 'check'],
                ['tools', 'preflight', '--profile', '\x1b[2J', 's:a'],
                ['tools', 'preflight', '--\x1b[2J', 's:a'],
                ['tools', 'show', 's:\x1b[2J'], ['\x1b[2J', '\n']):
            with self.subTest(words):
                self.clean(self.cli(*words))
        for text in ids:
            for verb in 'show', 'diff', 'explain':
                with self.subTest(verb, text=text):
                    done = self.cli('tools', verb, text)
                    self.assertEqual(done.code, 0)
                    self.clean(done)

    def test_no_name_forges_a_line(self):
        self.evil()
        ids = ['s:' + name for name in EVIL]
        done = self.cli('tools', 'preflight', *ids)
        self.assertEqual(done.out.count('\n'), len(ids) + 2)
        self.assertEqual(self.cli('tools', 'list', 's').out.count('\n'),
                         len(ids) + 1)
        for words in (['tools', 'show', ids[1]],
                      ['servers', 'show', 'x\x1b[2Jy\nz']):
            out = self.cli(*words).out
            keys = re.findall('^([a-z_]+):', out, re.MULTILINE)
            self.assertEqual(len(keys), len(set(keys)), keys)
            self.assertIn('\\x0a', out.split('\n')[0])

    def test_json_keeps_the_true_names(self):
        self.evil()
        ids = ['s:' + name for name in EVIL]
        done = self.ask(*ids)
        self.assertEqual([row['id'] for row in done.json['tools']], ids)
        self.assertLess(max(done.out), '\x7f')
        self.clean(done)

    def test_the_progress_of_a_sync_is_clean(self):
        self.evil()
        done = self.on_terminal(self.line('sync'))
        self.assertEqual(done.code, 10)
        self.assertIn('\r\x1b[K', done.out)
        self.assertEqual(RAW.findall(done.out.replace('\r\x1b[K', '')), [])

    def test_the_question_of_approve_is_clean(self):
        self.evil()
        done = self.on_terminal(self.line('tools', 'approve',
                                          's:' + EVIL[0]), 'n')
        self.assertEqual(done.code, 1)
        self.assertIn('Approve s:ev\\x1b[31mil?', done.out)
        self.assertEqual(RAW.findall(done.out), [])

    def test_the_question_about_a_launch_is_clean(self):
        self.one_server(tool())
        self.entry['args'].append('--\x1b[2J\nready')
        self.configure({'s': self.entry})
        done = self.on_terminal(self.line('servers', 'approve', 's'), 'n')
        self.assertEqual(done.code, 1)
        self.assertIn('--\\x1b[2J\\x0aready', done.out)
        self.assertEqual(RAW.findall(done.out), [])

    def test_no_secret_is_shown_or_kept(self):
        # Every secret holds QZ, which no path, time or hex digest does.
        secrets = {
            's': dict(self.serve(tools=[tool()]), env={
                'API_KEY': 'sk-live-QZ1', 'PLAIN': 'QZplain-value'}),
            'dead': dict(self.serve(
                'dead', die='initialize', code=3, stderr='API_KEY=QZx9 and '
                'Bearer QZabc; --token QZt, https://u:QZ@h/?exaApiKey=QZ\n'),
                env={'API_KEY': 'sk-live-QZ1'}),
            'web': {'url': 'http://u:QZp@127.0.0.1:9/mcp?exaApiKey=QZz',
                    'headers': {'Authorization': 'Bearer QZabc',
                                'X': '${NO_SUCH_V}'}}}
        for name in 's', 'dead':
            secrets[name]['args'] += ['--token', 'QZt', '-e', 'K=QZe',
                                      '--api-key=QZk', '-H', 'X-A: QZh']
        self.configure(secrets)
        for words in (
                ['sync'], ['tools', 'preflight', 's:echo', 'dead:x', 'web:x'],
                ['servers', 'list'], ['servers', 'show', 's'],
                ['servers', 'show', 'dead'], ['servers', 'show', 'web'],
                ['tools', 'show', 's:echo'], ['config', 'check'],
                ['activity', 'list']):
            for form in 'table', 'json':
                with self.subTest(words, form=form):
                    self.hides(self.cli('-o', form, *words))
        secrets['s']['args'][-1] = 'X-A: QZother'
        self.configure(secrets)
        self.hides(self.ask('s:echo'))
        self.hides(self.cli('servers', 'approve', 's'))
        for name in os.listdir(self.home):
            with open(os.path.join(self.home, name), 'rb') as file:
                self.assertFalse(b'QZ' in file.read(), name)

    def hides(self, done):
        """Hold what a command wrote to not naming a secret."""
        self.assertNotIn('QZ', done.out)
        self.assertNotIn('QZ', done.err)
class ContractCase(SyncCase):
    """A contract `job` on a server `s`, and what syncs say of it."""

    def add(self, *words):
        """Register; returns the result."""
        return self.do('contract', 'add', *words)

    def broken(self, *words):
        """Sync; returns what it tells of contracts."""
        self.do('sync', *words)
        return [line for line in self.told if re.match('(job|other): ',
                                                       line)]

    def moves(self, *tools, **spec):
        """Sync with the server changed; what it tells of contracts."""
        self.serve(tools=list(tools), **spec)
        return self.broken()

    def has(self, *ids):
        """Have `s` list echo and two, trusted, and job need some ids."""
        self.sees(tool(), tool('two'))
        self.add('job', *ids or ('s:echo',))

    def records(self):
        """Give (status, metadata) of the contract records, oldest first."""
        found = self.do('activity', 'list', '--type', 'contract')
        return [(row['status'], row['metadata'])
                for row in reversed(found['activities'])]

    def pin(self, name='echo'):
        """Give the pin of a tool as it is listed."""
        return self.do('tools', 'show', 's:' + name)['hash']

    def lockfile(self, **hints):
        """Write a lockfile of echo as it now is; returns its path."""
        server = pf.known_server(pf.load_config(self.world()), 's')
        version, digest = pf.parse_pin(self.pin())
        return self.write('a.lock', pf.render_lock(pf.Lock('', {
            's': (pf.launch_digest(server), pf.launch_text(server))}, {
            's:echo': pf.Locked(version, digest, hints, '')})))


class Test20Contracts(ContractCase):
    """What breaks a contract is told at the move, and only then."""

    def test_each_move_is_told_once(self):
        self.has()
        new = tool(description='Another')
        for tools, said in (
                ([tool(), tool('two')], []), ([tool()], []),
                ([new], ['changed']), ([new], []),
                ([tool('two')], ['vanished']), ([tool('two')], []),
                ([new, tool('two')], ['changed']),
                ([tool()], ['is back']), ([tool()], [])):
            with self.subTest(tools=tools):
                self.assertEqual(self.moves(*tools), [
                    'job: s:echo ' + word for word in said])

    def test_one_that_was_never_there(self):
        self.has('s:new')
        self.assertIn('s:new is not ready now: not_found', self.told[0])
        self.assertEqual(self.moves(tool()), [])
        self.assertEqual(self.moves(tool(), tool('new')),
                         ['job: s:new pending approval'])
        self.approve('s:new')
        self.assertEqual(self.broken(), ['job: s:new is back'])

    def test_one_added_before_any_look(self):
        self.configure({'s': self.serve(tools=[tool()])})
        self.add('job', 's:echo', 's:nope')
        self.assertEqual(self.broken(), ['job: s:nope is not there'])
        self.assertEqual(self.broken(), [])

    def test_a_pin(self):
        self.sees(tool())
        self.add('job', 's:echo', '--pin', 's:echo=' + self.pin())
        self.assertEqual(self.broken(), [])
        self.moves(tool(description='Another'))
        self.approve('s:echo')
        self.assertEqual(self.broken(), ['job: s:echo pin no longer fits'])
        self.assertEqual(self.broken(), [])

    def test_an_outage_is_no_break_and_hides_none(self):
        self.has()
        for tools, spec, said in (
                ([tool()], {'die': 'start'}, []),
                ([tool('two')], {}, ['job: s:echo vanished']),
                ([tool('two')], {'die': 'start'}, []),
                ([tool('two')], {}, []),
                ([tool('two')], {'die': 'start'}, []),
                ([tool()], {}, ['job: s:echo is back'])):
            with self.subTest(tools=tools, spec=spec):
                self.assertEqual(self.moves(*tools, **spec), said)

    def test_a_login(self):
        self.has()
        held, seen = pf.observe_server, pf.Observation(
            'pending_auth', '', 'asked with 401', None, None, 0, None, {},
            [], '')
        self.patch('observe_server', lambda *given: seen)
        self.assertEqual(self.broken(), ['job: s:echo needs a login'])
        self.assertEqual(self.broken(), [])
        self.patch('observe_server', held)
        self.assertEqual(self.broken(), ['job: s:echo is back'])

    def test_a_launch(self):
        self.has()
        entry = self.serve(tools=[tool()])
        self.configure({'s': dict(entry, args=entry['args'] + ['x'])})
        self.assertEqual(self.broken(), ['job: s:echo launch changed'])
        self.assertEqual(self.broken(), [])
        self.configure({'s': entry})
        self.assertEqual(self.broken(), ['job: s:echo is back'])

    def test_what_the_operator_or_the_config_decides(self):
        self.has()
        entry = self.serve(tools=[tool()])
        off = dict(entry, disabled_tools=['echo'])
        for verb, back, said in (
                ('servers disable s', 'servers enable s', 'is switched off'),
                ('servers quarantine s', 'servers approve s --yes',
                 'is quarantined'),
                ('tools block s:echo', 'tools unblock s:echo', 'is blocked'),
                ({'s': off}, {'s': entry}, 'is denied by the config'),
                ({}, {'s': entry}, 'is not configured')):
            for step, word in ((verb, said), (back, 'is back')):
                with self.subTest(step):
                    if isinstance(step, dict):
                        self.configure(step)
                    else:
                        self.do(*step.split())
                    self.assertEqual(self.broken(), ['job: s:echo ' + word])
                    self.assertEqual(self.broken(), [])

    def test_two_contracts_on_one_tool_and_one_on_none(self):
        self.has()
        self.add('other', 's:echo', 's:two')
        self.add('third', 's:two')
        self.assertEqual(self.moves(tool('two')), [
            'job: s:echo vanished', 'other: s:echo vanished'])
        self.assertEqual(self.moves(tool()), [
            'job: s:echo is back', 'other: s:echo is back',
            'other: s:two vanished'])

    def test_another_projects_server_is_not_the_one(self):
        self.has()
        other = self.write('other.json', json.dumps({'mcpServers': {
            's': self.serve('s2', tools=[tool('two')])}}))
        self.do('sync', configs=(other,))
        self.assertFalse([line for line in self.told if 'job' in line])
        self.assertEqual(self.moves(tool('two')), ['job: s:echo vanished'])

    def test_a_check_that_syncs_first_tells_it_too(self):
        self.has()
        self.serve(tools=[tool('two')])
        self.assertEqual(self.gate('s:two', '--sync'), ['ready'])
        self.assertIn('job: s:echo vanished', self.told)
        self.assertEqual(self.broken(), [])

    def test_health_tells_it_too(self):
        self.has()
        self.serve(tools=[tool('two')])
        self.do('health')
        self.assertIn('job: s:echo vanished', self.told)

    def test_records(self):
        self.has()
        self.add('job', 's:echo')       # unchanged: no record
        self.moves(tool('two'))
        self.moves(tool())
        self.do('contract', 'remove', 'job')

        def move(event):
            return {'contract': 'job', 'server': 's',
                    'tools': [{'id': 's:echo', 'event': event}]}
        self.assertEqual(self.records(), [
            ('success', {'action': 'added', 'contract': 'job',
                         'tools': ['s:echo']}),
            ('blocked', move('vanished')), ('success', move('back')),
            ('success', {'action': 'removed', 'contract': 'job'})])
        self.assertTrue(self.do('activity', 'verify')['ok'])

    def test_syncs_at_once_tell_it_once(self):
        self.has()
        self.serve(tools=[tool('two')])

        def look():
            self.do('sync')
            return [line for line in self.told if 'job: ' in line]
        self.assertEqual(sum(self.forked(look, look, look), []),
                         ['job: s:echo vanished'])

    def test_whoever_comes_second_finds_it_told(self):
        """The comparison is inside the transaction, lease or not."""
        self.has()
        self.patch('watch_contracts', lambda *given: [])
        self.moves(tool('two'))
        self.patch('watch_contracts', self.real_watch)
        config = pf.load_config(self.world())

        def watch():
            with pf.Store(self.home, self.world()) as store:
                with store.write() as con:
                    return pf.watch_contracts(con, self.world(), config, 's')
        found = self.forked(watch, watch)
        self.assertEqual(sorted(found), [[], ['job: s:echo vanished']])

    real_watch = staticmethod(pf.watch_contracts)

    def test_a_broken_contract_moves_no_exit_code_nor_stdout(self):
        def found():
            got, unknown = self.do('sync')
            data = pf.sync_data((got, unknown))['servers']
            return pf.exit_of_sync((got, unknown)), [
                dict(row, ms=0) for row in data]
        self.sees(tool(), tool('two'))
        self.serve(tools=[tool('two')])
        self.broken()
        self.moves(tool())
        self.serve(tools=[tool('two')])
        plain = found()
        self.moves(tool())
        self.add('job', 's:echo')
        self.serve(tools=[tool('two')])
        self.assertEqual(found(), plain)
        self.assertEqual(plain[0], 0)
        self.assertIn('job: s:echo vanished', self.told)


class Test20ContractNames(ContractCase):
    """contract add, list, check, remove."""

    def test_the_same_again_is_unchanged_and_another_replaces(self):
        self.has('s:two', 's:echo')
        for words, result, more in (
                (['s:echo', 's:two'], 'unchanged', {}),
                (['s:echo', 's:new'], 'replaced', {
                    'new': ['s:new'], 'gone': ['s:two'], 'other_pin': []}),
                (['s:echo', 's:new', '--pin', 's:echo=' + self.pin()],
                 'replaced', {'new': [], 'gone': [],
                              'other_pin': ['s:echo']})):
            with self.subTest(words):
                self.assertEqual(self.add('job', *words), dict(
                    more, contract='job', result=result, tools=2))
        self.assertEqual([data['action'] for _, data in self.records()],
                         ['added', 'replaced', 'replaced'])

    def test_what_cannot_be_registered(self):
        self.sees(tool())
        damaged, lock = self.write('d.lock', '{}'), self.lockfile()
        for words, said in (
                ([], 'one name'), (['', 's:a'], 'one name'),
                (['a/b', 's:a'], 'one name'),
                (['x' * 65, 's:a'], 'one name'), (['job'], 'or --lock'),
                (['job', '--lock', ''], 'or --lock'),
                (['job', 's:a', '--lock', lock], 'or --lock'),
                (['job', '--lock', lock, '--pin', 's:echo=x'], '--pin'),
                (['job', '--lock', self.path('none')], 'is not there'),
                (['job', '--lock', damaged], 'is not a lockfile'),
                (['job', 'echo'], '<server>:<tool>'),
                (['job', 's:a', '--pin', 's:a=x'], 'the pin of'),
                (['job', 's:a', '--pin', 's:b=x'], 'not asked for')):
            with self.subTest(words):
                self.assertIn(said, self.refused('contract', 'add', *words))
        self.assertEqual(self.do('contract', 'list'), [])
        self.assertEqual(self.records(), [])

    def test_what_is_not_ready_is_told_and_registered(self):
        self.sees(tool())
        self.add('job', 's:ech', 'no:x')
        self.assertEqual(len(self.told), 2)
        self.assertIn('server_not_configured', self.told[0])
        self.assertIn('Did you mean s:echo?', self.told[1])
        self.assertEqual(self.do('contract', 'list')[0]['broken'], {
            'no:x': 'not_configured', 's:ech': 'missing'})
        self.add('job', *['s:t%d' % n for n in range(12)])
        self.assertIn('2 more are not ready', self.told[-1])

    def test_list(self):
        self.has()
        pin = self.pin()
        self.add('a.b-c_9', 's:two', 's:echo', '--pin', 's:echo=' + pin)
        rows = self.do('contract', 'list')
        self.assertEqual([(row['contract'], row['tools'], row['lock'],
                           row['broken']) for row in rows],
                         [('a.b-c_9', 2, None, {}), ('job', 1, None, {})])
        self.assertEqual(rows[0]['needs'], [{'id': 's:echo', 'pin': pin},
                                            {'id': 's:two'}])
        self.assertEqual(rows[0]['configs'], [self.config])

    def test_remove(self):
        self.has()
        self.assertIn('did you mean job?', self.refused(
            'contract', 'remove', 'jbo'))
        self.assertIn('one name', self.refused('contract', 'remove', 'job',
                                               'x'))
        self.do('contract', 'remove', 'job')
        self.assertEqual(self.do('contract', 'list'), [])
        self.assertEqual(self.moves(tool('two')), [])

    def test_a_need_that_stays_is_no_news_when_others_come(self):
        self.has()
        self.assertEqual(self.moves(tool('two')), ['job: s:echo vanished'])
        self.add('job', 's:echo', 's:two')
        self.assertEqual(self.broken(), [])
        self.assertEqual(self.moves(tool(), tool('two')),
                         ['job: s:echo is back'])

    def test_a_lockfile_is_registered_by_value(self):
        self.sees(tool())
        path = self.lockfile()
        self.assertEqual(self.add('job', '--lock', path)['result'], 'added')
        self.assertEqual(self.add('job', '--lock', path)['result'],
                         'unchanged')
        os.remove(path)
        row = self.do('contract', 'list')[0]
        self.assertEqual((row['lock'], row['needs']), (path, [
            {'id': 's:echo', 'pin': self.pin()}]))
        self.moves(tool(description='Another'))
        self.approve('s:echo')
        self.assertEqual(self.broken(), ['job: s:echo pin no longer fits'])

    def test_the_launch_and_hints_of_a_lockfile_must_hold(self):
        self.sees(tool(annotations={'readOnlyHint': True}))
        self.add('job', '--lock', self.lockfile(readOnlyHint=True))
        self.assertEqual(self.reasons('job'), ['ready'])
        self.serve(tools=[tool()])
        self.do('sync')
        self.approve('s:echo')
        self.assertEqual(self.broken(), [])     # told as changed before
        self.assertEqual(self.reasons('job'), ['tool_changed'])
        entry = self.serve(tools=[tool()])
        self.configure({'s': dict(entry, args=entry['args'] + ['x'])})
        self.do('servers', 'approve', 's', '--yes')
        self.assertEqual(self.reasons('job'), ['server_quarantined'])
        self.assertEqual(self.broken(), ['job: s:echo launch changed'])

    def reasons(self, name, *words):
        """Check a contract; the reasons, 'ready' for none."""
        report = self.do('contract', 'check', name, *words)
        return [answer.reason or 'ready' for answer in report.answers]

    def test_check_syncs_filters_and_names_itself_in_the_record(self):
        self.has()
        self.assertEqual(self.reasons('job', '--read-only-only'),
                         ['missing_annotation'])
        self.serve(tools=[tool('two')])
        self.assertEqual(self.reasons('job', '--sync', '--request-id', 'r1'),
                         ['not_found'])
        row = self.do('activity', 'list', '--request-id', 'r1')[
            'activities'][0]
        self.assertEqual((row['type'], row['metadata']['contract'],
                          row['metadata']['reasons']),
                         ('preflight', 'job', {'not_found': 1}))

    def test_check_after_another_project_registered_it(self):
        """The config of this run is judged, never that of the contract."""
        self.has()
        other = self.write('other.json', '{"mcpServers": {}}')
        report = self.do('contract', 'check', 'job', configs=(other,))
        self.assertEqual(report.answers[0].reason, 'server_not_configured')


class Test20ContractCodes(CliCase):
    """contract check as a shell sees it."""

    def test_codes_and_what_is_printed(self):
        self.one_server(tool(), tool('two'))
        self.configure({'s': self.serve('s', tools=[tool()]), 'n': {
            'command': 'never-run'}})
        self.look('s')
        for name, ids, code, verdict in (
                ('ok', ['s:echo'], 0, 'ready'),
                ('wait', ['n:x'], 10, 'degraded_retryable'),
                ('pin', ['s:echo', '--pin', 's:echo=sha256/v1:' + H1], 11,
                 'blocked'),
                ('gone', ['s:echo', 's:nope'], 12, 'unknown_ids')):
            self.cli('contract', 'add', name, *ids)
            done = self.cli('contract', 'check', name, '-o', 'json')
            with self.subTest(name):
                self.assertEqual((done.code, done.json['verdict']),
                                 (code, verdict))
                self.assertEqual('request id: ' in done.err, code != 0)
        done = self.cli('contract', 'check', 'gon')
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('did you mean gone?', done.err)
        table = self.cli('contract', 'check', 'wait')
        self.assertIn('VERDICT: degraded_retryable (exit 10)', table.out)
        self.assertIn('sync n', table.err)

    def test_a_renewed_lockfile_is_added_again(self):
        self.one_server(tool())
        place = self.path('a lock')
        self.cli('tools', 'lock', 's:echo', '--file', place)
        self.cli('contract', 'add', 'job', '--lock', place)
        self.serve('s', tools=[tool(description='New')])
        self.look('s')
        line = 'note: contract job is the lockfile as it was when it was '
        done = self.cli('contract', 'check', 'job')
        self.assertEqual(done.code, 11)
        self.assertIn(line, done.err)
        self.cli('tools', 'lock', '--file', place, '--yes')
        self.assertEqual(self.cli('contract', 'check', 'job').code, 11)
        remedy = done.err.split('once that is renewed, run: ')[1]
        words = shlex.split(remedy.split('\n')[0])
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        done = self.cli('contract', 'check', 'job')
        self.assertEqual(done.code, 0)
        self.assertNotIn(line, done.err)

    def test_one_that_was_edited_is_an_error_and_no_traceback(self):
        self.one_server(tool())
        self.cli('contract', 'add', 'job', 's:echo')
        for body in ('{', '[]', '{"odd": 1}', ''):
            with contextlib.closing(sqlite3.connect(os.path.join(
                    self.home, 'preflight.db'))) as con, con:
                con.execute('update contract set body=?', (body,))
            for words in (('sync',), ('contract', 'check', 'job')):
                done = self.cli(*words)
                with self.subTest(body, words=words):
                    self.assertEqual((done.code, done.out), (1, ''))
                    self.assertIn('contract "job" cannot be read', done.err)

    def test_the_data_is_that_of_tools_preflight(self):
        self.one_server(tool())
        self.cli('contract', 'add', 'job', 's:echo')
        ours = self.cli('contract', 'check', 'job', '-o', 'json').json
        plain = self.ask('s:echo').json
        self.assertEqual(dict(ours, checked_at=''),
                         dict(plain, checked_at=''))


class Test20Notify(ContractCase):
    """sync --notify: JSON to a command, once, and never lost."""

    TAKE = 'import sys; open(sys.argv[1], "ab").write(sys.stdin.buffer.read())'

    def command(self, code=TAKE, *words):
        """Write a --notify that runs Python code with a path to write."""
        return ' '.join(map(shlex.quote, (
            sys.executable, '-ISc', code, self.path('got')) + words))

    def got(self):
        """Take what the command was given since: the JSON of each run."""
        try:
            with open(self.path('got'), encoding='ascii') as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path('got'))

    def told_of(self, code=TAKE):
        """Sync with --notify; (id, event) of what the command was given."""
        self.do('sync', '--notify', self.command(code))
        return [(event['id'], event['event']) for data in self.got()
                for event in data['events']]

    def test_the_json(self):
        self.has()
        self.serve(tools=[tool('two', 'Another')])
        self.add('other', 's:two')
        self.do('sync', '--notify', self.command())
        data, = self.got()
        self.assertEqual(sorted(data), ['at', 'events'])
        pf.parse_time(data['at'])
        details = [event.pop('detail') for event in data['events']]
        self.assertEqual(data['events'], [
            {'contract': 'job', 'server': 's', 'tool': 'echo',
             'id': 's:echo', 'event': 'vanished', 'reason': 'not_found'},
            {'contract': 'other', 'server': 's', 'tool': 'two',
             'id': 's:two', 'event': 'changed', 'reason': 'tool_changed'}])
        self.assertIn('not the approved one', details[1])

    def test_it_runs_only_when_there_is_news(self):
        self.has()
        self.assertEqual(self.told_of(), [])
        self.serve(tools=[tool('two')])
        self.assertEqual(self.told_of(), [('s:echo', 'vanished')])
        self.assertEqual(self.told_of(), [])
        self.serve(tools=[tool()])
        self.assertEqual(self.told_of(), [('s:echo', 'back')])
        self.assertEqual(self.told_of(), [])

    def test_what_another_sync_found_is_delivered_by_the_next(self):
        self.has()
        self.moves(tool('two'))
        self.assertEqual(self.told_of(), [('s:echo', 'vanished')])

    def test_what_came_and_went_between_two_is_not(self):
        self.has()
        self.moves(tool('two'))
        self.moves(tool())
        self.assertEqual(self.told_of(), [])

    def test_what_a_registration_told_is_no_news(self):
        self.has('s:nope')
        self.assertEqual(self.told_of(), [])

    def test_a_failure_is_told_and_the_next_sync_delivers(self):
        self.has()
        self.serve(tools=[tool('two')])
        for code, said in (('import sys; sys.exit("out of order")',
                            'exited with code 1: out of order'),
                           ('import sys; sys.exit("bad key sk-live-1-abc")',
                            'exited with code 1: bad key ***'),
                           ('import time; time.sleep(60)',
                            'has not ended after 300ms')):
            with self.subTest(code):
                self.patch('NOTIFY_MS', 300)
                rows, unknown = self.do('sync', '--notify',
                                        self.command(code))
                self.assertEqual(pf.exit_of_sync((rows, unknown)), 0)
                self.assertIn(said, self.told[-1])
        self.do('sync', '--notify', 'no-such-command x')
        self.assertIn('not found', self.told[-1])
        self.patch('NOTIFY_MS', 30000)
        self.assertEqual(self.told_of(), [('s:echo', 'vanished')])
        self.assertEqual(self.told_of(), [])

    def test_a_return_that_was_not_delivered_is_so_next_time(self):
        self.has()
        self.serve(tools=[tool('two')])
        self.assertEqual(self.told_of(), [('s:echo', 'vanished')])
        self.serve(tools=[tool()])
        self.assertEqual(self.told_of('import sys; sys.exit(1)'), [])
        self.assertEqual(self.told_of(), [('s:echo', 'back')])

    def test_syncs_at_once_deliver_once(self):
        self.has()
        self.serve(tools=[tool('two')])

        def look():
            self.do('sync', '--notify', self.command())
        self.forked(look, look, look)
        self.do('sync', '--notify', self.command())
        self.assertEqual(len(self.got()), 1)

    def test_what_is_no_command_is_refused_before_anything_runs(self):
        self.configure({'s': self.serve(starts=self.path('starts'))})
        for text, said in (('', 'is empty'), ('  ', 'is empty'),
                           ("''", 'is empty'), ("a 'b", 'quotation')):
            with self.subTest(text):
                self.assertIn(said, self.refused('sync', '--notify', text))
        self.assertEqual(self.pids(), [])

    def test_words(self):
        for text, words in (
                ('a  b', ['a', 'b']), ('a "b c" \'d "e\'', ['a', 'b c',
                                                            'd "e']),
                ('a #b', ['a', '#b']), ('a;b|c $d *', ['a;b|c', '$d', '*']),
                ('a ""', ['a', ''])):
            self.assertEqual(pf.split_notify(text), words)
        self.assertIsNone(pf.split_notify(None))

    def test_a_process_keeps_stdout_for_its_data(self):
        self.has()
        self.serve(tools=[tool('two')])
        done = self.run_cli('sync', '-o', 'json', '--notify', self.command(
            'import os; print("loud"); os.write(2, b"loud")'))
        self.assertEqual(done.code, 0, done)
        self.assertEqual(done.json['servers'][0]['vanished'], ['echo'])
        self.assertEqual(done.err, 'job: s:echo vanished\n')

    def test_a_signal_ends_the_command_and_loses_nothing(self):
        self.has()
        self.serve(tools=[tool('two')])
        process = subprocess.Popen(
            [sys.executable, SCRIPT, '--home', self.home, '--config',
             self.config, 'sync', '--notify', self.command(
                 'import os, sys, time; open(sys.argv[2], "w").write(str('
                 'os.getpid())); time.sleep(60)', self.path('starts'))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        self.wait_for(self.pids)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=30), 130)
        self.assert_gone(self.pids())
        self.assertEqual(self.told_of(), [('s:echo', 'vanished')])


class Test20Decisions(TempCase):
    """What an option or a setting of nothing means."""

    def test_a_retention_of_0_keeps_records_for_ever(self):
        self.configure({'s': self.serve(tools=[tool()])},
                       activity_retention='0')
        self.sync()
        self.check('s:echo')
        self.sync()
        self.assertEqual(self.run_cli('activity', 'list', '-o',
                                      'json').json['total'], 2)
        refused = self.run_cli('activity', 'prune')
        self.assertEqual((refused.code, refused.out), (1, ''))
        self.assertIn('--older-than', refused.err)

    def test_approve_all_leaves_out_what_cannot_be_approved(self):
        self.configure({'s': self.serve(tools=[tool()])})
        self.sync()
        self.serve(tools=[tool('new'), tool('twin'),
                          tool('twin', 'another')])
        self.sync()
        done = self.run_cli('tools', 'approve', '--all', '--yes', '-o',
                            'json')
        self.assertEqual(done.json, [{'id': 's:new',
                                      'result': 'approved'}])
        self.assertIn('left out: s:twin', done.err)

    def test_a_status_that_no_record_has_is_refused(self):
        self.configure({})
        done = self.run_cli('activity', 'list', '--status', 'fine')
        self.assertEqual((done.code, done.out), (1, ''))

    def test_a_warning_is_told_once(self):
        entry = dict(self.serve(tools=[tool()]), url='http://h/')
        self.configure({'s': entry})
        for more in ((), ('--sync',)):
            done = self.check('s:echo', *more)
            self.assertEqual(done.err.count('has a command and a url'), 1)

    def test_names_with_line_breaks_are_never_half_a_suggestion(self):
        names = ['tool_%04d' % n for n in range(1100)] + ['one\ntool_0099x']
        self.configure({'s': self.serve(tools=[tool(n) for n in names])})
        self.sync()
        done = self.check('s:tool_0099y')
        for word in done.json['tools'][0]['did_you_mean']:
            self.assertIn(word[2:], names)


class CarryCase(WorldCase):
    """Two hosts with the same config, each with a state of its own."""

    def serve(self, name='s', **spec):
        """(Re)write a fake server that starts in less time."""
        entry = super().serve(name, **spec)
        return dict(entry, args=['-I', '-S'] + entry['args'])

    def there(self, servers=None, **top):
        """Make the World of another host; servers: None for the same."""
        with open(self.config, encoding='utf-8') as file:
            config = json.load(file)
        if servers is not None:
            config['mcpServers'] = servers
        path = self.write('there.json', json.dumps(dict(config, **top)))
        return self.world(home=self.path('there'), configs=(path,))

    def export(self, *words):
        """Export to a file; returns its path."""
        path = self.path('snapshot.json')
        self.do('state', 'export', '--file', path, *words)
        return path

    def reasons(self, *ids, **more):
        """Check ids; the reason or 'ready' of each."""
        return [answer.reason or 'ready' for answer in self.do(
            'tools', 'preflight', *ids, **more).answers]

    def one(self, *tools, **more):
        """Configure a server s with these tools, and look at it."""
        self.entry = dict(self.serve(tools=list(tools)), **more)
        self.configure({'s': self.entry})
        self.do('sync')

    def dump(self, world):
        """Give all that a state holds."""
        path = os.path.join(world.home, 'preflight.db')
        with contextlib.closing(sqlite3.connect(path)) as con:
            return list(con.iterdump())


class Test20State(CarryCase):
    """Carrying what is known to another host changes no verdict."""

    def full(self):
        """Have a tool of every status and servers of several states."""
        self.configure({
            's': self.serve(tools=[tool('add', annotations=SAFE), tool(
                'find'), tool('drop'), tool('old')]),
            'off': self.serve('off', tools=[tool()]),
            'bad': {'command': 'no-such-program'},
            'fresh': {'command': 'never-looked-at'}})
        self.do('sync', 's', 'off', 'bad')
        self.serve(tools=[tool('add', annotations=SAFE), tool(
            'find', 'Changed'), tool('drop'), tool('late'), tool('twin'),
            tool('twin', 'Another')])
        self.do('sync', 's')
        self.do('tools', 'block', 's:drop')
        self.do('servers', 'disable', 'off')

    IDS = ('s:add', 's:find', 's:drop', 's:late', 's:old', 's:twin',
           'off:echo', 'bad:x', 'fresh:x', 's:ad')
    REASONS = ['ready', 'tool_changed', 'tool_blocked_by_user',
               'tool_pending_approval', 'not_found', 'tool_changed',
               'server_disabled', 'server_unhealthy', 'server_initializing',
               'not_found']

    def test_a_round_trip_loses_nothing_of_a_verdict(self):
        self.full()
        path, there = self.export(), self.there()
        self.assertEqual(
            [row['result'] for row in self.do(
                'state', 'import', path, '--approvals',
                world=there)['servers']], ['imported'] * 3)
        keys = ('id', 'status', 'reason', 'action', 'hash', 'did_you_mean',
                'observed_at', 'cause')
        found = [[[getattr(answer, key) for key in keys]
                  for answer in self.do('tools', 'preflight', *self.IDS,
                                        world=world).answers]
                 for world in (self.world(), there)]
        self.assertEqual(found[0], found[1])
        self.assertEqual([row[2] or 'ready' for row in found[0]],
                         self.REASONS)
        self.assertTrue(self.do('activity', 'verify', world=there)['ok'])

    def test_odd_names_are_carried_too(self):
        names = [' ', 'a:b', 'a\nb', '\u202e', 'x' * 5000]
        entry = self.serve(tools=[tool(name) for name in names + [
            '', 'a\0', '\ud800']])        # these are skipped by a sync
        self.configure({'s': entry, 'odd': dict(entry, args=['\ud800'])})
        self.do('sync')
        there = self.there()
        self.assertEqual(
            [(row['result'], row['tools']) for row in self.do(
                'state', 'import', self.export(), '--approvals',
                world=there)['servers']],
            [('imported', 0), ('imported', len(names))])

    def test_a_second_import_finds_nothing_to_do(self):
        self.full()
        path, there = self.export(), self.there()
        self.do('state', 'import', path, '--approvals', world=there)
        before = self.dump(there)
        rows = self.do('state', 'import', path, '--approvals',
                       world=there)['servers']
        self.assertEqual([(row['result'], row['approved'], row['blocked'])
                          for row in rows], [('kept', [], [])] * 3)
        self.assertEqual(self.dump(there), before)

    def test_what_comes_over_is_recorded(self):
        self.one(tool())
        self.do('tools', 'block', 's:later')
        there = self.there()
        self.do('state', 'import', self.export(), '--approvals',
                world=there)
        rows = self.do('activity', 'list', world=there)['activities']
        self.assertEqual(
            {(row['type'], row['metadata']['action']): row['metadata'].get(
                'tools') for row in rows},
            {('approval', 'block'): ['s:later'],
             ('approval', 'import'): ['s:echo'],
             ('server', 'launch approved'): None,
             ('server', 'imported'): None})

    def test_ages_stay_true_and_what_goes_stale_is_told(self):
        self.one(tool())
        path, there = self.export(), self.there()
        hour = there._replace(now=lambda: int(time.time() * 1000) + 3600000)
        self.do('state', 'import', path, '--approvals', world=hour)
        self.assertIn('stale since', '\n'.join(self.told))
        answer = self.do('tools', 'preflight', 's:echo',
                         world=hour).answers[0]
        self.assertEqual((answer.reason, answer.cause),
                         ('server_unhealthy', 'stale'))
        more = self.told[-1].split('--config: ')[1]
        allowed = hour._replace(configs=hour.configs + (
            self.write('more.json', more),))
        self.assertEqual(self.reasons('s:echo', world=allowed), ['ready'])

    def test_without_approvals_the_tools_are_pending(self):
        self.one(tool(), tool('b'))
        there = self.there()
        row = self.do('state', 'import', self.export(),
                      world=there)['servers'][0]
        self.assertIn('2 pending', row['detail'])
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['tool_pending_approval'])
        self.do('tools', 'approve', 's:echo', '--yes', world=there)
        self.assertEqual(self.reasons('s:echo', 's:b', world=there),
                         ['ready', 'tool_pending_approval'])

    def test_a_look_after_a_choice_is_no_baseline(self):
        self.one(tool(), tool('b'))
        there = self.there()
        self.do('state', 'import', self.export(), world=there)
        self.do('tools', 'approve', 's:echo', '--yes', world=there)
        self.serve(tools=[tool('echo', 'Another'), tool('b')])
        self.do('sync', world=there)
        self.assertEqual(self.reasons('s:echo', 's:b', world=there),
                         ['tool_changed', 'tool_pending_approval'])

    def test_a_look_after_an_import_is_no_baseline(self):
        self.one(tool(), tool('b'))
        there = self.there()
        self.do('state', 'import', self.export(), world=there)
        self.do('sync', world=there)
        self.assertEqual(self.reasons('s:echo', 's:b', world=there),
                         ['tool_pending_approval'] * 2)
        self.assertNotIn('first use', '\n'.join(self.told))

    def test_approvals_of_a_launch_that_was_not_known_make_it_known(self):
        self.one(tool())
        there, path = self.there(), self.altered(
            lambda row: row['launch'].update(known=False, baselined=False))
        self.do('state', 'import', path, '--approvals', world=there)
        self.serve(tools=[tool('echo', 'Another'), tool('b')])
        self.do('sync', world=there)
        self.assertEqual(self.reasons('s:echo', 's:b', world=there),
                         ['tool_changed', 'tool_pending_approval'])

    def test_a_look_after_imported_approvals_is_no_baseline(self):
        self.one(tool())
        there = self.there()
        self.do('state', 'import', self.export(), '--approvals',
                world=there)
        self.serve(tools=[tool('echo', 'Another'), tool('b')])
        self.do('sync', world=there)
        self.assertEqual(self.reasons('s:echo', 's:b', world=there),
                         ['tool_changed', 'tool_pending_approval'])

    def test_another_launch_is_left_out_but_blocks_hold(self):
        self.one(tool())
        there = self.there({'s': dict(self.entry, args=self.entry['args']
                                      + ['--more'])})
        path = self.export()
        self.assertIn('another launch', self.refused(
            'state', 'import', path, '--approvals', world=there))
        self.do('tools', 'block', 's:echo')
        row = self.do('state', 'import', self.export(), '--approvals',
                      world=there)['servers'][0]
        self.assertEqual((row['result'], row['blocked'], row['approved']),
                         ('skipped', ['s:echo'], []))
        self.do('sync', world=there)
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['tool_blocked_by_user'])

    def test_a_server_that_is_not_configured_is_left_out(self):
        self.one(tool())
        path = self.export()
        self.assertIn('no such server', self.refused(
            'state', 'import', path, world=self.there({})))
        self.assertIn('was skipped', self.refused(
            'state', 'import', path, world=self.there({'s': {}})))

    def test_a_newer_look_is_never_replaced(self):
        self.one(tool())
        path, there = self.export(), self.there()
        self.serve(tools=[tool('later')])
        self.do('sync', world=there)
        row = self.do('state', 'import', path, world=there)['servers'][0]
        self.assertEqual(row['result'], 'kept')
        self.assertIn('as new or newer (ready)', row['detail'])
        self.assertEqual(self.reasons('s:later', 's:echo', world=there),
                         ['ready', 'not_found'])

    def test_an_older_look_is_and_what_vanished_meanwhile_is_gone(self):
        self.one(tool(), tool('old'))
        there = self.there()
        self.do('sync', world=there)
        self.serve(tools=[tool()])
        self.do('sync')
        self.do('state', 'import', self.export(), world=there)
        self.assertEqual(self.reasons('s:echo', 's:old', world=there),
                         ['ready', 'not_found'])

    def test_a_newer_approval_is_never_replaced(self):
        self.one(tool())
        path, there = self.export(), self.there()
        self.serve(tools=[tool('echo', 'Another')])
        self.do('sync', world=there)        # a baseline, so approved
        row = self.do('state', 'import', path, '--approvals',
                      world=there)['servers'][0]
        self.assertEqual(row['approved'], [])
        self.assertEqual(self.reasons('s:echo', world=there), ['ready'])

    def test_a_launch_that_is_not_the_known_one_brings_no_approvals(self):
        self.one(tool())
        path = self.export()
        old = dict(self.entry, args=self.entry['args'] + ['--old'])
        self.do('sync', world=self.there({'s': old}))
        there = self.there()
        with contextlib.closing(sqlite3.connect(os.path.join(
                there.home, 'preflight.db'))) as con:
            con.execute('update server set observed_at=1')
            con.commit()
        row = self.do('state', 'import', path, '--approvals',
                      world=there)['servers'][0]
        self.assertEqual((row['result'], row['approved']), ('imported', []))
        self.assertIn('another launch is known here', row['detail'])
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['server_quarantined'])

    def test_only_what_tightens_comes_without_approvals(self):
        self.one(tool(), enabled=False)
        self.do('servers', 'enable', 's')
        self.do('sync')
        path = self.export()
        there = self.there()
        self.do('state', 'import', path, world=there)
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['server_disabled'])
        self.do('state', 'import', path, '--approvals', world=there)
        self.assertEqual(self.reasons('s:echo', world=there), ['ready'])

    def test_a_newer_switch_stays(self):
        self.one(tool())
        self.do('servers', 'disable', 's')
        path, there = self.export(), self.there()
        self.do('servers', 'quarantine', 's', world=there)
        self.do('state', 'import', path, world=there)
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['server_quarantined'])
        row = self.do('servers', 'show', 's', world=there)
        self.assertEqual((row['enabled'], row['quarantined']),
                         (False, True))

    def test_what_was_seen_in_the_future_is_left_out(self):
        self.one(tool())
        path, there = self.export(), self.there()
        early = there._replace(now=lambda: int(time.time() * 1000)
                               - 3600000)
        self.assertIn('a clock is wrong', self.refused(
            'state', 'import', path, world=early))

    def altered(self, change):
        """Export, change the server `s` in it, and sign it: its path."""
        path = self.export()
        with open(path, encoding='utf-8') as file:
            table = json.load(file)
        change(table['servers']['s'])
        table['sha256'] = pf.snapshot_digest(table)
        return self.write('snapshot.json', json.dumps(table))

    def test_approvals_of_the_future_are_left_out(self):
        self.one(tool(), tool('b'))
        there = self.there()
        path = self.altered(lambda row: row['approved'][0].update(
            at='2999-01-01T00:00:00.000Z'))
        row = self.do('state', 'import', path, '--approvals',
                      world=there)['servers'][0]
        self.assertEqual(row['approved'], ['s:echo'])
        self.assertIn('1 approval from the future', row['detail'])
        self.assertEqual(self.reasons('s:b', 's:echo', world=there),
                         ['tool_pending_approval', 'ready'])

    def test_a_switch_of_the_future_loosens_nothing(self):
        self.one(tool(), enabled=False)
        there = self.there()
        self.do('servers', 'enable', 's')
        self.do('sync')
        path = self.altered(lambda row: row['switches']['enabled'].update(
            at='2999-01-01T00:00:00.000Z'))
        self.do('state', 'import', path, '--approvals', world=there)
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['server_disabled'])

    def test_a_tool_that_is_approved_does_not_approve_a_new_server(self):
        self.one(tool(), tool('b'))
        there = self.there(quarantine_new_servers=True)
        self.do('state', 'import', self.export(), world=there)
        self.do('tools', 'approve', 's:echo', '--yes', world=there)
        self.assertEqual(self.reasons('s:echo', world=there),
                         ['server_quarantined'])
        self.do('servers', 'approve', 's', '--yes', world=there)
        self.do('sync', world=there)
        self.assertEqual(self.reasons('s:echo', 's:b', world=there),
                         ['ready', 'tool_pending_approval'])

    def test_a_snapshot_has_a_limit(self):
        self.one(tool())
        path = self.export()
        with mock.patch.object(pf, 'MAX_SNAPSHOT_BYTES', 99):
            self.assertIn('larger than 99 bytes', self.refused(
                'state', 'import', path))

    def test_all_of_it_comes_or_nothing(self):
        self.configure({name: self.serve(name, tools=[tool()])
                        for name in 'st'})
        self.do('sync')
        path, there, real = self.export(), self.there(), pf.save_approvals
        self.do('tools', 'preflight', 's:x', world=there)
        before = self.dump(there)

        def fail(con, name, *more):
            if name == 't':
                raise pf.StoreError('the disk is full')
            real(con, name, *more)
        with mock.patch.object(pf, 'save_approvals', fail):
            self.refused('state', 'import', path, '--approvals',
                         world=there)
        self.assertEqual(self.dump(there), before)

    def test_a_damaged_file_changes_nothing(self):
        self.one(tool())
        path, there = self.export(), self.there()
        self.do('tools', 'preflight', 's:x', world=there)
        before = self.dump(there)
        with open(path, 'rb') as file:
            whole = file.read()
        for name, data in (
                ('empty', b''), ('cut', whole[:-20]), ('not text', b'\xff'),
                ('not JSON', b'{'), ('a list', b'[]'), ('other', b'{}'),
                ('edited', whole.replace(b'Echo text', b'Echo tExt')),
                ('twice', whole.replace(b'"servers"', b'"exported_at": 1, '
                                        b'"servers"'))):
            self.write('snapshot.json', data)
            with self.subTest(name):
                self.assertIn(path, self.refused('state', 'import', path,
                                                 world=there))
                self.assertEqual(self.dump(there), before)
        os.remove(path)
        self.assertIn('cannot read', self.refused('state', 'import', path,
                                                  world=there))

    def test_no_secret_is_in_it(self):
        self.write('api_key', 'k' * 64)
        self.one(tool(), env={'TOKEN': 'hush-hush-1'},
                 headers={'Authorization': 'Bearer hush-hush-2'})
        secret = self.do('token', 'create', 'n', '--servers', 's')['token']
        self.serve(tools=[tool()], stderr='TOKEN=hush-hush-1 hush-hush-3\n',
                   die='start')
        self.do('sync')
        with open(self.export(), encoding='ascii') as file:
            text = file.read()
        for word in ('hush', secret, 'stderr', 'activity'):
            self.assertNotIn(word, text)

    def test_the_file_is_whole_and_for_this_user_alone(self):
        self.one(tool())
        self.write('snapshot.json', b'old')
        path = self.export()
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)
        with open(path, 'rb') as file:
            table = pf.read_snapshot(path, file.read())
        self.assertEqual(sorted(table['servers']), ['s'])
        self.assertEqual([name for name in os.listdir(self.dir)
                          if name.startswith('snapshot')],
                         ['snapshot.json'])

    def test_what_cannot_be_exported_is_said(self):
        self.one(tool())
        for words, why in (
                (['--servers', 'nope'], 'no server "nope"'),
                (['--servers', ' , '], 'must not be empty'),
                (['--file', ''], 'must not be empty'),
                (['-o', 'yaml'], 'a snapshot is JSON'),
                (['--file', self.path('no', 'where')], 'cannot write')):
            with self.subTest(words):
                self.assertIn(why, self.refused('state', 'export', *words))
        self.configure({'t': self.entry})
        self.assertIn('nothing to export', self.refused('state', 'export'))
        self.assertIn('"t" was never looked at', self.told[-1])
        self.assertIn('sync t', self.refused('state', 'export', '--servers',
                                             't'))

    def test_it_can_be_told_to_stdout(self):
        self.one(tool())
        for form in ('table', 'json'):
            value = self.do('state', 'export', '-o', form)
            text = pf.COMMANDS['state', 'export'].render(value, False)
            self.assertEqual(pf.read_snapshot('-', text.encode()), value)

    def test_a_contract_that_it_breaks_is_told(self):
        self.one(tool())
        there, told = self.there(), self.told
        self.do('sync', world=there)
        self.do('contract', 'add', 'job', 's:echo', world=there)
        self.serve(tools=[tool('other')])
        self.do('sync')
        self.do('state', 'import', self.export(), world=there)
        self.assertTrue([line for line in told if line.startswith(
            'job: ')], told)


class Test20Doctor(CarryCase):
    """A problem has a remedy and is exit 1; looking changes nothing."""

    def rows(self, **more):
        """Run doctor: check -> (ok, detail and remedy)."""
        found = self.do('doctor', **more)
        self.assertEqual(found['ok'], all(row['ok']
                                          for row in found['checks']))
        for row in found['checks']:
            self.assertEqual(list(row), ['check', 'ok', 'detail', 'remedy'])
            self.assertTrue(row['detail'])
            if not row['ok']:
                self.assertTrue(row['remedy'], row)
        return {row['check']: (row['ok'], '%s %s' % (
            row['detail'], row['remedy'])) for row in found['checks']}

    def bad(self, **more):
        """Run doctor: the one check that has a problem, and its words."""
        found = [(name, words) for name, (ok, words) in self.rows(
            **more).items() if not ok]
        self.assertEqual(len(found), 1, found)
        return found[0]

    def test_a_sound_installation(self):
        self.one(tool())
        rows = self.rows()
        self.assertEqual(list(rows), [name for name, _ in pf.DOCTOR])
        self.assertEqual({ok for ok, _ in rows.values()}, {True}, rows)
        self.assertIn('1 server ready', rows['servers'][1])

    def test_it_makes_nothing_where_there_is_nothing(self):
        os.remove(self.configure({}))
        rows = self.rows()
        self.assertEqual([name for name, (ok, _) in rows.items()
                          if not ok], ['config', 'database'])
        self.assertIn('sync', rows['database'][1])
        self.assertEqual(os.listdir(self.dir), [])

    def test_a_config_is_read_to_the_last_entry(self):
        self.one(tool())
        for text, check, why in (
                ('{', 'config', 'line 1'),
                ('{"mcpServers": {}}', 'config', 'no server is configured'),
                (json.dumps({'mcpServers': {'s': self.entry, 't': {}}}),
                 'config', '"t"'),
                (json.dumps({'mcpServers': {'s': dict(
                    self.entry, max_age='1m')}}), 'sync interval',
                 'three times')):
            self.write('config.json', text)
            rows = self.rows()
            with self.subTest(text):
                self.assertFalse(rows[check][0])
                self.assertIn(why, rows[check][1])

    def test_what_others_may_read_is_named_and_the_remedy_cures(self):
        self.one(tool())
        for path, mode in ((self.home, 0o755),
                           (os.path.join(self.home, 'preflight.db'), 0o640)):
            os.chmod(path, mode)
            check, words = self.bad()
            self.assertEqual(check, 'state')
            line = words.split('Run: ')[1]
            self.assertEqual(subprocess.call(['sh', '-c', line]), 0, line)
            self.assertTrue(self.rows()['state'][0])

    @unittest.skipIf(not hasattr(os, 'geteuid') or os.geteuid(),
                     'needs to be root')
    def test_what_another_user_owns_is_named(self):
        self.one(tool())
        os.chown(os.path.join(self.home, 'preflight.db'), OTHER_UID, -1)
        check, words = self.bad()
        self.assertEqual(check, 'state')
        self.assertIn('user %d owns' % OTHER_UID, words)

    def test_what_this_user_may_not_write_is_named(self):
        self.one(tool())
        path = os.path.join(self.home, 'preflight.db')
        os.chmod(self.dir, 0o755)
        if os.geteuid() == 0:
            for name in [path, self.home] + [
                    os.path.join(self.home, name)
                    for name in os.listdir(self.home)]:
                os.chown(name, OTHER_UID, -1)
        for place, mode, cure in ((path, 0o400, 'chmod 600 ' + path),
                                  (self.home, 0o500,
                                   'chmod 700 ' + self.home)):
            os.chmod(place, mode)
            found = self.as_other(lambda: self.do('doctor')['checks'])
            os.chmod(place, 0o700)
            with self.subTest(cure):
                row = {row['check']: row for row in found}['state']
                self.assertEqual((row['ok'], row['remedy']),
                                 (False, 'Run: ' + cure))

    def test_a_state_that_everybody_may_write_is_told(self):
        self.one(tool())
        for mode, is_told in ((0o777, True), (0o770, False),
                              (0o1777, False)):
            os.chmod(self.home, mode)
            self.do('tools', 'list')
            with self.subTest(mode):
                self.assertEqual('everybody may write' in
                                 ' '.join(self.told), is_told)

    def test_a_state_of_another_user_is_not_taken_for_none(self):
        self.one(tool())
        os.chmod(self.dir, 0o755)
        os.chmod(self.home, 0o700)
        found = self.as_other(lambda: self.do('doctor')['checks'])
        rows = {row['check']: row for row in found}
        if os.geteuid() == 0:
            self.assertFalse(rows['database']['ok'])
            self.assertIn('permission denied', rows['database']['detail'])

    def test_a_database_that_cannot_be_used_is_a_finding(self):
        self.one(tool())
        path = os.path.join(self.home, 'preflight.db')
        with open(path, 'rb') as file:
            whole = file.read()
        self.raw().execute("update meta set value=99 where key='schema'")
        check, words = self.bad()
        self.assertEqual(check, 'database')
        self.assertIn('newer preflight.py', words)
        at = len(whole) - 4096
        for data in (b'', b'no database', whole[:4096],
                     whole[:at] + b'\x7f' * 4096):
            for name in os.listdir(self.home):
                os.remove(os.path.join(self.home, name))
            self.write('state/preflight.db', data)
            os.chmod(path, 0o600)
            with self.subTest(data[:20]):
                self.assertEqual(self.bad()[0], 'database')

    def test_a_clock_that_went_back_is_seen(self):
        self.one(tool())
        rows = self.rows(now=lambda: int(time.time() * 1000) - 86400000)
        self.assertFalse(rows['clock'][0])
        self.assertIn('Set the clock', rows['clock'][1])

    def test_a_clock_that_was_wrong_once_is_forgotten(self):
        self.one(tool())
        late = self.world(now=lambda: int(time.time() * 1000) + 86400000)
        self.do('tools', 'preflight', 's:echo', world=late)
        self.assertFalse(self.rows()['clock'][0])
        self.do('tools', 'preflight', 's:echo')
        self.assertTrue(self.rows()['clock'][0])

    def test_what_makes_no_sense_is_a_finding(self):
        self.one(tool())
        for change in ("observed_at='x'", "refused='{'"):
            self.raw().execute('update server set ' + change)
            rows = self.rows()
            with self.subTest(change):
                self.assertFalse(rows['servers'][0])
                self.assertIn(self.home, rows['servers'][1])

    @unittest.skipIf(os.name == 'nt', 'needs symbolic links')
    def test_the_mode_of_a_link_is_no_problem(self):
        self.one(tool())
        path = os.path.join(self.home, 'preflight.db')
        os.rename(path, self.path('elsewhere.db'))
        os.symlink(self.path('elsewhere.db'), path)
        self.assertTrue(self.rows()['state'][0])

    def test_an_edited_record_is_seen(self):
        self.one(tool())
        self.raw().execute("update activity set status='blocked'")
        check, words = self.bad()
        self.assertEqual(check, 'audit')
        self.assertIn('activity verify', words)

    def test_servers_that_give_no_verdict_are_named_with_a_remedy(self):
        self.one(tool())
        for change, word in (
                ('update server set observed_at=1', 'sync s'),
                ("update server set state='error', cause='exited'",
                 'servers show s'),
                ("update server set state='pending_auth'", 'Authorization'),
                ("update server set state='error', lease_at=observed_at+1, "
                 'lease_until=observed_at+2, lease_launch=launch', 'cut off'),
                ('delete from server', 'sync s')):
            self.raw().execute(change)
            check, words = self.bad()
            with self.subTest(change):
                self.assertEqual(check, 'servers')
                self.assertIn(word, words)

    def test_many_are_not_named_one_by_one(self):
        self.configure({'s%d' % n: {'command': 'x'} for n in range(50)})
        with self.store() as store, store.read():
            pass
        found = [row for row in self.do('doctor')['checks']
                 if row['check'] == 'servers']
        self.assertEqual(len(found), 21)
        self.assertIn('30 more', found[-1]['detail'])

    def test_what_the_operator_decided_is_no_problem(self):
        self.one(tool())
        self.serve(tools=[tool('echo', 'Changed'), tool('new')])
        self.do('sync')
        ok, words = self.rows()['servers']
        self.assertTrue(ok)
        self.assertIn('1 tool pending, 1 tool changed', words)
        self.do('servers', 'disable', 's')
        self.assertTrue(self.rows()['servers'][0])

    def test_where_it_runs(self):
        self.one(tool())
        import shutil
        usage = mock.Mock(return_value=mock.Mock(free=1 << 20))
        for name, patch, why in (
                ('disk', mock.patch.object(shutil, 'disk_usage', usage),
                 'only 1 MB free'),
                ('disk', mock.patch.object(pf, 'file_system_of',
                                           lambda path: 'nfs4'),
                 'on a network (nfs4)'),
                ('sqlite', mock.patch.object(pf, 'sqlite_version',
                                             lambda: (3, 7, 17)), 'newer')):
            with self.subTest(why), patch:
                check, words = self.bad()
                self.assertEqual(check, name)
                self.assertIn(why, words)

    def test_a_program_that_everybody_may_change_is_a_problem(self):
        self.one(tool())
        copy = self.write('copy.py', b'')
        os.chmod(copy, 0o666)
        with mock.patch.object(pf, '__file__', copy):
            self.assertEqual(self.bad()[0], 'program')

    def test_an_old_store_is_brought_up(self):
        self.configure({})
        os.mkdir(self.home, 0o700)
        self.raw().executescript(SCHEMA_1.replace('/here', self.dir))
        os.chmod(os.path.join(self.home, 'preflight.db'), 0o600)
        rows = self.rows()
        self.assertIn('schema %d' % pf.SCHEMA_VERSION, rows['database'][1])
        self.assertTrue(rows['database'][0])

    def test_the_report_is_data_on_exit_1(self):
        self.one(tool())
        for mode, code, words in ((0o700, 0, ', 0 problems'),
                                  (0o755, 1, ', 1 problem')):
            os.chmod(self.home, mode)
            done = self.run_cli('doctor')
            self.assertEqual((done.code, done.err), (code, ''), done)
            self.assertIn(words, done.out)
            self.assertEqual('PROBLEM  state: ' in done.out, bool(code))


class Test20SelfTest(CarryCase):
    """A canary is changed, and the gate must be seen to close."""

    def sing(self):
        """Run the self-test, with its place in this test's directory."""
        with mock.patch.object(tempfile, 'tempdir', self.dir):
            found = self.do('doctor', '--self-test')
        self.assertEqual(os.listdir(self.dir), [])
        return found

    def test_the_gate_closes_and_nothing_is_left(self):
        found = self.sing()
        self.assertTrue(found['ok'], found)
        seen = [row['detail'].split(':')[0] for row in found['checks']]
        self.assertEqual(seen[:-1], [step[3] for step in pf.CANARY_STEPS])
        self.assertIn('tool_changed', seen)

    def test_a_gate_that_stays_open_is_exit_1(self):
        gates = tuple(gate for gate in pf.GATES if gate[0] != 'changed')
        with mock.patch.object(pf, 'GATES', gates):
            found = self.sing()
        self.assertEqual(pf.COMMANDS['doctor',].exit_of(found), 1)
        row = found['checks'][1]
        self.assertEqual((row['ok'], row['detail'].split(':')[0]),
                         (False, 'ready, which should be tool_changed'))
        self.assertTrue(row['remedy'])

    def test_a_canary_that_cannot_start_is_a_problem(self):
        with mock.patch.object(sys, 'executable', self.path('none')):
            found = self.sing()
        self.assertFalse(found['checks'][0]['ok'])
        self.assertIn('server_unhealthy', found['checks'][0]['detail'])

    def test_no_room_for_it_is_a_finding(self):
        with mock.patch.object(tempfile, 'tempdir', self.path('none')):
            found = self.do('doctor', '--self-test')
        self.assertEqual([row['ok'] for row in found['checks']], [False])
        self.assertTrue(found['checks'][0]['remedy'])


class Test20SelfApproved(TempCase):
    """What a sync approves by itself stands in its record, tool by tool."""

    def last(self):
        """Give the metadata of the newest record of a sync."""
        found = self.run_cli('activity', 'list', '--type', 'sync', '-o',
                             'json').json['activities']
        return found[0]['metadata']

    def test_a_baseline_and_mode_auto_name_what_they_approved(self):
        entry = self.serve(tools=[tool()])
        self.configure({'s': dict(entry, trust_mode='auto')})
        self.sync()
        self.assertEqual((self.last()['approved'], self.last()['baseline']),
                         (['s:echo'], True))
        self.serve(tools=[tool(), tool('later')])
        self.sync()
        self.assertEqual((self.last()['approved'], self.last()['baseline']),
                         (['s:later'], False))


class Test20NotReady(TempCase):
    """Ways to a `ready` that must not be one."""

    def test_a_file_of_variables_cannot_choose_the_code(self):
        self.write('fake.py', FAKE_SERVER)
        self.write('spec.json', json.dumps({'tools': [tool()]}))
        os.makedirs(self.path('.vscode'))
        os.mkdir(self.path('evil'))
        self.write('evil/sitecustomize.py',
                   'open(%r, "w").close()' % self.path('EVIL'))
        self.write('.env', 'PYTHONPATH=%s\nPLAIN=1\n' % self.path('evil'))
        self.config = self.write('.vscode/mcp.json', json.dumps({
            'servers': {'s': {
                'type': 'stdio', 'command': sys.executable,
                'args': [self.path('fake.py'), self.path('spec.json')],
                'envFile': '${workspaceFolder}/.env'}}}))
        done = self.check('--sync', 's:echo')
        self.assertEqual(done.code, 0, done)
        self.assertFalse(os.path.exists(self.path('EVIL')))
        self.assertIn('PYTHONPATH of the envFile is left out',
                      self.run_cli('config', 'check').out)

    def test_a_look_in_one_workspace_does_not_answer_for_another(self):
        os.makedirs(self.path('p', '.cursor'))
        for name in 'ab':
            os.mkdir(self.path(name))
        path = self.write('a/server', '#!%s\n%s' % (sys.executable,
                                                    FAKE_SERVER))
        os.chmod(path, 0o755)
        spec = self.write('spec.json', json.dumps({'tools': [tool()]}))
        self.config = self.write('p/.cursor/mcp.json', json.dumps({
            'mcpServers': {'s': {'command': './server', 'args': [spec]}}}))
        seen = self.check('--workspace', self.path('a'), '--sync', 's:echo')
        self.assertEqual(seen.code, 0, seen)
        for more in (('--workspace', self.path('b')), ()):
            self.assertEqual(self.check('s:echo', *more).code, 10)
        self.assertEqual(self.check('--workspace', self.path('a'),
                                    's:echo').code, 0)

    def test_a_file_that_the_config_names_is_watched_too(self):
        os.mkdir(self.path('.claude-plugin'))
        self.config = self.write('.claude-plugin/plugin.json',
                                 '{"mcpServers": "./servers.json"}')
        self.write('servers.json', '{"a": {"command": "x"}}')
        past = time.time() - 3600
        for name in ('.claude-plugin/plugin.json', 'servers.json'):
            os.utime(self.path(name), (past, past))
        now = [0]
        configs = pf.Configs(self.world(clock=lambda: now[0]), 0)
        self.assertEqual(list(configs.latest().entries), ['a'])
        configs.latest()
        self.assertIs(configs.latest(), configs.current())
        self.write('servers.json', '{"b": {"command": "x"}}')
        self.assertEqual(list(configs.latest().entries), ['b'])
        self.write('servers.json', '{"b": ')
        self.assertFalse(configs.is_settled())
        now[0] += 1
        self.assertTrue(configs.is_settled())
        with self.assertRaises(pf.ConfigError) as caught:
            configs.current()
        self.assertIn(self.path('servers.json'), str(caught.exception))

    def test_a_config_rewritten_with_its_old_size_and_time_is_seen(self):
        entry = self.serve()
        self.configure({'s': dict(entry, enabled=True, x=' ')})
        configs = pf.Configs(self.world(), 0)
        self.assertTrue(configs.is_settled())
        self.assertTrue(pf.look_up(configs.current(), 's')[0].enabled)
        before = os.stat(self.config)
        with open(self.config, 'r+') as file:
            text = file.read().replace('true, "x": " "', 'false, "x": ""')
            file.seek(0)
            file.write(text)
        os.utime(self.config, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.assertEqual(os.stat(self.config).st_size, before.st_size)
        self.assertTrue(configs.is_settled())
        self.assertFalse(pf.look_up(configs.current(), 's')[0].enabled)

    def test_help_and_version_are_no_check(self):
        self.configure({})
        for words in (('s:x', '--profile', '--version'),
                      ('s:x', '--request-id', '-h'), ('s:x', '-h')):
            done = self.run_cli('tools', 'preflight', *words)
            self.assertEqual((done.code, done.out), (1, ''), words)

    def test_config_show_masks_what_files_and_variables_put_in(self):
        self.write('tok', 'supersecretvalue\n')
        path = self.write('opencode.json', json.dumps({'mcp': {
            's': {'type': 'local', 'command': ['echo', '{file:tok}',
                                               '{env:PLAINVAR}']},
            'u': {'type': 'remote', 'url': 'http://h/{file:tok}'}}}))
        env = {'PLAINVAR': 'plainsecret'}
        shown = self.run_cli('config', 'show', path, '-o', 'json', env=env)
        self.assertEqual(shown.code, 0, shown)
        self.assertNotIn('supersecret', shown.out)
        self.assertNotIn('plainsecret', shown.out)
        whole = self.run_cli('config', 'show', path, '--reveal', '-o',
                             'json', env=env)
        self.assertIn('supersecretvalue', whole.out)

    def test_an_age_stands_for_a_time_in_the_record(self):
        self.configure({})
        self.check('s:x')
        for age, count in (('1h', 1), ('0', None)):
            done = self.run_cli('activity', 'list', '--since', age, '-o',
                                'json')
            self.assertEqual(done.json['total'] if done.out else None,
                             count)


class Test20ConfigShow(TempCase):
    """`config show`: any client's file, in one form, nothing secret."""

    CURSOR = {'mcpServers': {'s': {
        'url': 'https://h/mcp', 'headers': {'A': 'Bearer ${env:TOK_X}'}}}}

    def show(self, *words, **more):
        """Run `config show` and give its JSON."""
        done = self.run_cli('config', 'show', '-o', 'json', *words,
                            is_placed=False, env=more)
        self.assertEqual(done.code, 0, done)
        return done.json

    def test_one_file_is_an_object_and_more_are_a_list(self):
        os.mkdir(self.path('.cursor'))
        first = self.write('.cursor/mcp.json', json.dumps(self.CURSOR))
        second = self.write('.mcp.json', '{"mcpServers": {"t": {}}}')
        found = self.show(first)
        self.assertEqual(sorted(found), ['dialect', 'file_warnings',
                                         'servers', 'skipped'])
        self.assertEqual((found['dialect'], found['servers'][0]['source']),
                         ('cursor', first))
        both = self.show(first, second)
        self.assertEqual([file['dialect'] for file in both],
                         ['cursor', 'claude-code'])
        self.assertEqual(both[1]['skipped'],
                         [{'name': 't', 'reason': 'no_transport'}])

    def test_values_are_shown_only_when_asked(self):
        path = self.write('x.json', json.dumps(self.CURSOR))
        words = path, '--dialect', 'cursor'
        found = self.show(*words, TOK_X='s3cr3t-1')
        self.assertEqual(found['servers'][0]['headers'], {'A': '***'})
        found = self.show('--reveal', *words, TOK_X='s3cr3t-1')
        self.assertEqual(found['servers'][0]['headers'],
                         {'A': 'Bearer s3cr3t-1'})

    def test_the_workspace(self):
        path = self.write('x.json', json.dumps({'mcpServers': {'s': {
            'command': '${workspaceFolder}/x'}}}))
        found = self.show(path, '--dialect', 'roo', '--workspace', '/w')
        self.assertEqual(found['servers'][0]['command'], '/w/x')

    def test_files_that_are_referred_to(self):
        self.write('key', 'abc\n')
        self.write('.env', 'A=1\n')
        path = self.write('opencode.json', json.dumps({'mcp': {'s': {
            'type': 'local', 'command': ['x', '{file:key}']}}}))
        self.assertEqual(self.show(path)['servers'][0]['args'], ['abc'])
        os.mkdir(self.path('.vscode'))
        path = self.write('.vscode/mcp.json', json.dumps({'servers': {'s': {
            'command': 'x', 'envFile': '.env'}}}))
        self.assertEqual(self.show('--reveal', path)['servers'][0]['env'],
                         {'A': '1'})

    def test_without_a_name_it_shows_the_configs_of_the_run(self):
        self.configure({'s': {'command': 'x'}}, max_age='1m')
        found = self.run_cli('config', 'show', '-o', 'json').json
        self.assertEqual((found['dialect'], found['servers'][0]['name']),
                         ('preflight', 's'))

    def test_what_cannot_be_read(self):
        path = self.write('x.toml', 'a = "\\q"\n')
        done = self.run_cli('config', 'show', path)
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('line 1, column 6', done.err)

    def test_unknown_dialect(self):
        done = self.run_cli('--dialect', 'cursr', 'config', 'show', 'x')
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('unknown dialect "cursr"', done.err)


class Test20Clients(TempCase):
    """A client's file, from the file to a verdict."""

    def test_a_codex_file_is_looked_at_and_judged(self):
        entry = self.serve(tools=[tool('a'), tool('b')])
        os.mkdir(self.path('.codex'))
        self.config = self.write(
            '.codex/config.toml', "[mcp_servers.s]\ncommand = '%s'\nargs = "
            "['%s', '%s']\nenabled_tools = ['a']\nenv_vars = ['NO_SUCH_V']\n"
            % (entry['command'], entry['args'][0], entry['args'][1]))
        done = self.sync()
        self.assertEqual(done.code, 0, done)
        self.assertIn('NO_SUCH_V is not set; its client leaves it out',
                      done.err)
        done = self.check('s:a', 's:b')
        self.assertEqual([row.get('reason') for row in done.json['tools']],
                         [None, 'tool_denied_by_config'])

    def test_an_input_nobody_can_answer_stops_one_server(self):
        entry = dict(self.serve(tools=[tool('a')]), type='stdio')
        os.mkdir(self.path('.vscode'))
        self.config = self.write('.vscode/mcp.json', json.dumps({'servers': {
            's': entry, 't': dict(entry, env={'K': '${input:k}'})}}))
        rows = {row['server']: row for row in self.sync().json['servers']}
        self.assertEqual((rows['s']['state'], rows['t']['cause'],
                          rows['t']['detail']),
                         ('ready', 'unresolved', ('input:k (env.K) has no '
                          'value')))
        self.assertEqual(self.check('s:a').code, 0)

    def test_a_check_needs_no_variable_and_no_file(self):
        os.mkdir(self.path('.cursor'))
        self.config = self.write('.cursor/mcp.json', json.dumps({
            'mcpServers': {'s': {'command': '${env:NO_SUCH_V}', 'envFile':
                                 self.path('none')}}}))
        done = self.check('s:a')
        self.assertEqual(done.json['tools'][0]['reason'],
                         'server_initializing')

    def test_a_registrys_recipe_is_refused_unless_meant(self):
        self.config = self.write('server.json', json.dumps({
            'name': 'n', 'packages': []}))
        done = self.check('s:a')
        self.assertEqual(done.code, 1)
        self.assertIn('--dialect registry', done.err)

    def test_paths_names_the_clients_files(self):
        os.mkdir(self.path('.cursor'))
        self.write('.cursor/mcp.json', '{}')
        rows = self.run_cli('config', 'paths', '-o', 'json').json
        found = {row['path']: row for row in rows}
        row = found[self.path('.cursor', 'mcp.json')]
        self.assertEqual((row['client'], row['found'], row['used']),
                         ('cursor', True, False))
        self.assertFalse(found[self.path('.roo', 'mcp.json')]['found'])


# ==========================================================================
# 22. serve
# ==========================================================================

ECHO = json.dumps({'tools': [{'id': 's:echo'}]}).encode('ascii')
GATE = '/api/v1/preflight'


class Reply:
    """One HTTP response: status, headers as they came, body."""

    def __init__(self, head, body):
        lines = head.decode('latin-1').split('\r\n')
        self.status = int(lines[0].split(' ')[1])
        self.pairs = [tuple(line.split(': ', 1)) for line in lines[1:]]
        self.headers, self.body = dict(self.pairs), body

    @property
    def json(self):
        """Give the body as JSON, its keys in order."""
        return json.loads(self.body.decode('ascii'))

    @property
    def error(self):
        """Give the sentence of an error envelope."""
        return self.json['error']

    @property
    def tools(self):
        """Give the results of a check."""
        return self.json['data']['tools']


class Wire:
    """One raw connection to a server, by port or path of a socket."""

    def __init__(self, place, context=None):
        if isinstance(place, int):
            self.sock = socket.create_connection(('127.0.0.1', place), 20)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(20)
            self.sock.connect(place)
        if context:
            self.sock = context.wrap_socket(self.sock)
        self.held = b''

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.sock.close()

    def send(self, *parts):
        """Send bytes, as they are."""
        self.sock.sendall(b''.join(parts))
        return self

    def read_until(self, mark):
        """Read up to a mark; what was read, b'' at the end of it all."""
        while mark not in self.held:
            part = self.sock.recv(65536)
            if not part:
                return b''
            self.held += part
        out, _, self.held = self.held.partition(mark)
        return out

    def reply(self, is_bare=False):
        """Read one response, None at the end of the connection.

        is_bare: it has no body, whatever its length says.
        """
        head = self.read_until(b'\r\n\r\n')
        if not head:
            return None
        reply = Reply(head, b'')
        size = int(reply.headers.get('Content-Length', 0))
        while len(self.held) < size and not is_bare:
            part = self.sock.recv(65536)
            if not part:
                return None
            self.held += part
        if not is_bare:
            reply.body, self.held = self.held[:size], self.held[size:]
        return reply

    def is_ended(self):
        """Wait for the end of the connection; False if more came."""
        try:
            return not self.held and not self.sock.recv(1)
        except OSError as exc:      # reset, or cut off without TLS's goodbye
            return not isinstance(exc, socket.timeout)


def head_of(method, path, headers):
    """Make a request's head; a header of None is left out."""
    lines = ['%s %s HTTP/1.1' % (method, path)]
    lines += ['%s: %s' % pair for pair in headers.items()
              if pair[1] is not None]
    return '\r\n'.join(lines).encode('latin-1') + b'\r\n\r\n'


class Server:
    """A `preflight.py serve` of its own; what it logs is in a file."""

    def __init__(self, case, words, patch, more):
        self.case, number = case, len(os.listdir(case.dir))
        self.log_path = case.path('serve%d.log' % number)
        start = [SCRIPT]
        if patch:
            start = ['-c', 'import sys; sys.dont_write_bytecode = True; '
                     'sys.path.insert(0, %r); import preflight as pf; %s; '
                     'sys.exit(pf.main(sys.argv[1:]))' % (HERE, patch)]
        env = {name: value for name, value in os.environ.items()
               if not name.startswith(('PREFLIGHT_', 'STATE_DIR', 'XDG_'))}
        env.update(more.pop('env', {}))
        with open(self.log_path, 'wb') as log:
            self.process = subprocess.Popen(
                [sys.executable] + start + [
                    '--home', case.home, '--config', case.config, 'serve']
                + list(words), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=env, cwd=case.dir, **more)
        case.addCleanup(self.kill)
        self.port = self._port()

    def log(self):
        """Give what it has logged."""
        with open(self.log_path, encoding='utf-8') as file:
            return file.read()

    def _port(self):
        end = time.monotonic() + 30
        while time.monotonic() < end and self.process.poll() is None:
            if 'listening on' in self.log():
                found = re.search(r'://[^ ]*:([0-9]+)[ ;"]', self.log())
                return int(found.group(1)) if found else None
            time.sleep(0.005)
        return None

    def kill(self):
        """End it, whatever it does; politely first, so it is measured."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def stop(self, number=signal.SIGTERM):
        """Ask it to end; returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


class ServeCase(CliCase):
    """Tests that share a state and a server: shared() makes both."""

    words, patch = ('--listen', '127.0.0.1:0', '--no-sync'), ''

    @classmethod
    def setUpClass(cls):
        cls.lab = cls('shared')
        CliCase.setUp(cls.lab)
        try:
            cls.lab.shared()
        except BaseException:
            cls.lab.doCleanups()
            raise

    @classmethod
    def tearDownClass(cls):
        cls.lab.doCleanups()

    def setUp(self):
        self.__dict__.update({
            name: value for name, value in vars(self.lab).items()
            if not name.startswith('_')})

    def shared(self):
        """Have a server s with a tool echo, looked at, and serve it."""
        self.one_server(tool(annotations=SAFE))
        self.start_serve()

    def start_serve(self, *words, **more):
        """Start a server; it becomes this test's own."""
        self.server = Server(self, words or self.words,
                             more.pop('patch', self.patch), more)
        self.port = self.server.port
        if self.server.process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                self.key = self.read(self.home, 'api_key')
        return self.server

    def read(self, *names):
        """Read a file of the test's directory, without its last line end."""
        with open(self.path(*names), encoding='utf-8') as file:
            return file.read().rstrip('\n')

    def wire(self, place=None, context=None):
        """Open a connection, closed with the test."""
        wire = Wire(self.port if place is None else place, context)
        self.addCleanup(wire.sock.close)
        return wire

    def request(self, method, path, body=None, **headers):
        """Make the bytes of a request; X_API_Key='' stands for the key."""
        given = {'Host': '127.0.0.1', 'X-API-Key': self.key}
        given.update((name.replace('_', '-'), value)
                     for name, value in headers.items())
        if body is not None:
            given.setdefault('Content-Length', len(body))
        return head_of(method, path, given) + (body or b'')

    def send(self, method, path, body=None, **headers):
        """Send one request on a connection of its own: its Reply."""
        with Wire(self.port) as wire:
            wire.send(self.request(method, path, body, **headers))
            return wire.reply(method == 'HEAD')

    def get(self, path, **headers):
        """GET a path as the operator."""
        return self.send('GET', path, **headers)

    def post(self, value, path=GATE, **headers):
        """POST bytes, or a value as JSON, as the operator."""
        body = value if isinstance(value, bytes) else json.dumps(
            value).encode('ascii')
        return self.send('POST', path, body, **headers)

    def ask_ids(self, *ids, **headers):
        """Check ids; returns the Reply, which must be a verdict."""
        reply = self.post({'tools': [{'id': name} for name in ids]},
                          **headers)
        self.assertEqual(reply.status, 200, reply.body)
        return reply

    def token(self, name, *words):
        """Make an agent token; returns its secret."""
        done = self.cli('token', 'create', name, '-o', 'json', *words)
        self.assertEqual(done.code, 0, done)
        return done.json['token']

    def records(self, **filters):
        """Read the audit records of the state, newest first."""
        with pf.Store(self.home, self.world()) as store, \
                store.read() as con:
            return [json.loads(body) for body in pf.find_records(
                con, filters, 100000, 0)[1]]

    def wait_for(self, claim):
        """Poll until something holds."""
        end = time.monotonic() + 20
        while not claim():
            self.assertLess(time.monotonic(), end, 'waited in vain')
            time.sleep(0.01)


class Test22Framing(unittest.TestCase):
    """Bytes in, a length or a refusal out, without a connection."""

    def length(self, *lines, **more):
        """Frame a head: what check_framing says."""
        headers = b''.join(line + b'\r\n' for line in lines)
        return pf.check_framing(more.get('line', b'POST / HTTP/1.1'),
                                pf.read_headers(headers))

    def test_what_is_sent_in_one_way_only_is_taken(self):
        for lines, expected in (
                ((b'Host: h',), None),
                ((b'Host: h', b'Content-Length: 0'), 0),
                ((b'HOST: h', b'content-length:\t 12 \t'), 12),
                ((b'Host: h', b'Content-Length: 1048576'), 1 << 20),
                ((b'Host: h', b'Transfer-Encoding: Chunked'), 'chunked'),
                ((b'Host: h', b'X-A: \xe9\xff', b'X-B:', b'X-A: b'), None)):
            with self.subTest(lines):
                self.assertEqual(self.length(*lines), expected)
        self.assertIsNone(self.length(line=b'GET / HTTP/1.0'))

    def test_what_two_readers_could_frame_differently_is_refused(self):
        host = b'Host: h'
        for lines, why in (
                ((host, b'Content-Length: 4', b'Content-Length: 0'),
                 'stands twice'),
                ((host, b'Content-Length: 4', b'content-length: 4'),
                 'stands twice'),
                ((host, b'Content-Length: 4',
                  b'Transfer-Encoding: chunked'), 'alone'),
                ((host, b'Transfer-Encoding: chunked',
                  b'Transfer-Encoding: chunked'), 'stands twice'),
                ((host, b'Transfer-Encoding: gzip, chunked'), 'alone'),
                ((host, b'Transfer-Encoding: identity'), 'alone'),
                ((host, b'Content-Length: 1_0'), 'digits'),
                ((host, b'Content-Length: +2'), 'digits'),
                ((host, b'Content-Length: -1'), 'digits'),
                ((host, b'Content-Length: 2, 2'), 'digits'),
                ((host, b'Content-Length: 0x2'), 'digits'),
                ((host, b'Content-Length: \xb2'), 'digits'),
                ((host, b'Content-Length:'), 'digits'),
                ((host, b'Content-Length: 1048577'), 'over 1 MiB'),
                ((host, b'Content-Length: ' + b'9' * 19), 'digits'),
                ((host, b'Content-Length : 2'), 'malformed'),
                ((host, b' folded: x'), 'malformed'),
                ((host, b'no colon'), 'malformed'),
                ((host, b': empty'), 'malformed'),
                ((host, b'A: b\rc'), 'malformed'),
                ((host, b'A: b\x00c'), 'malformed'),
                ((host, b'A: b\nB: c'), 'malformed'),
                ((host, b'A\xe9: b'), 'malformed'),
                ((host, b'Host: i'), 'stands twice'),
                ((b'Content-Length: 2',), 'Host is missing')):
            with self.subTest(lines), self.assertRaisesRegex(
                    pf.HttpError, why) as caught:
                self.length(*lines)
            with self.subTest(lines):
                self.assertEqual(caught.exception.http_status, 400)

    def test_only_these_request_lines_are_read(self):
        for line in (b'', b'GET', b'GET /', b'GET / HTTP/0.9',
                     b'GET / HTTP/2.0', b'GET / HTTP/1.1 ', b'get / HTTP/1.1',
                     b'GET  / HTTP/1.1', b'GET /a b HTTP/1.1',
                     b'GET /\xe9 HTTP/1.1', b'PRI * HTTP/2.0',
                     b'GET /\x00 HTTP/1.1', b'GET / http/1.1'):
            with self.subTest(line), self.assertRaisesRegex(
                    pf.HttpError, 'request line'):
                self.length(b'Host: h', line=line)

    def test_too_many_headers_are_431(self):
        with self.assertRaises(pf.HttpError) as caught:
            pf.read_headers(b'A: b\r\n' * 101)
        self.assertEqual(caught.exception.http_status, 431)

    def chunks(self, data, step):
        """Feed a chunked body in steps: (body, what is left)."""
        body, held = pf.Body('chunked'), bytearray()
        for at in range(0, len(data), step):
            held += data[at:at + step]
            if body.feed(held):
                return bytes(body.data), bytes(held) + data[at + step:]
        return None, bytes(held)

    def test_chunks_are_joined_however_they_come(self):
        data = (b'3\r\nabc\r\n1;ext="a b"\r\nd\r\nA ; x\r\n0123456789\r\n'
                b'000\r\n\r\nNEXT')
        for step in (1, 2, 3, 7, len(data)):
            with self.subTest(step):
                self.assertEqual(self.chunks(data, step),
                                 (b'abcd0123456789', b'NEXT'))

    def test_an_unfinished_chunked_body_is_none_yet(self):
        for data in (b'', b'3', b'3\r\n', b'3\r\nab', b'3\r\nabc', b'0\r\n',
                     b'3\r\nabc\r', b'0\r\n\r'):
            with self.subTest(data):
                self.assertEqual(self.chunks(data, 1)[0], None)

    def test_a_chunked_body_that_is_not_exact_is_refused(self):
        for data, why in (
                (b'x\r\n', 'chunk'), (b'-1\r\n', 'chunk'),
                (b'+1\r\n', 'chunk'), (b'0x1\r\n', 'chunk'),
                (b'1_0\r\n', 'chunk'), (b'\r\n', 'chunk'),
                (b' 1\r\n', 'chunk'), (b'1\n', 'chunk'),
                (b'1\r\nab', 'chunk'), (b'1\r\na\n\n', 'chunk'),
                (b'1;' + b'x' * 300, 'chunk'), (b'0\r\nA: b\r\n', 'trailers'),
                (b'100001\r\n', 'over 1 MiB'), (b'fffffffff\r\n', 'chunk'),
                (b'1;\x00\r\n', 'chunk')):
            with self.subTest(data), self.assertRaisesRegex(
                    pf.HttpError, why):
                self.chunks(data + b' ' * 200, 1)

    def test_hosts(self):
        names = frozenset(('ci.example', 'gate:8443'))
        for host, on_loopback, elsewhere in (
                ('localhost', True, True), ('LOCALHOST:8080', True, True),
                ('127.0.0.1', True, True), ('127.0.0.1:1', True, True),
                ('127.9.9.9:80', True, True), ('[::1]:8080', True, True),
                ('[::1]', True, True), ('10.0.0.7', False, True),
                ('[fe80::1]:1', False, True), ('ci.example', True, True),
                ('CI.example:9', True, True), ('gate:8443', True, True),
                ('gate', False, False), ('evil.example', False, False),
                ('localhost.evil.example', False, False),
                ('evil@localhost', False, False), ('', False, False),
                ('localhost:80:80', False, False), ('::1', False, False),
                ('[localhost]', False, False), ('localhost:', False, False),
                ('localhost/x', False, False), ('1', False, False),
                ('0.0.0.0', False, True), ('localhost.', False, False)):
            with self.subTest(host):
                found = [pf.is_host_allowed(host, is_loopback, names)
                         for is_loopback in (True, False)]
                self.assertEqual(found, [on_loopback, elsewhere])

    def test_listen_addresses(self):
        for text, expected in (
                ('127.0.0.1:80', ('127.0.0.1', 80)), ('[::1]:0', ('::1', 0)),
                (':8080', ('0.0.0.0', 8080)), ('h:65535', ('h', 65535))):
            self.assertEqual(pf.parse_listen(text), expected)
        for text in ('', '80', 'h:', 'h:65536', 'h:-1', '::1:80', 'h:8o'):
            with self.assertRaises(pf.UsageError):
                pf.parse_listen(text)


class Test22ServeFraming(ServeCase):
    """What may come over a connection, and what becomes of it."""

    patch = 'pf.READ_TIMEOUT_S = pf.IDLE_TIMEOUT_S = 0.6; pf.SWEEP_S = 0.05'
    hidden = b'GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n'

    def refused(self, *parts):
        """Send bytes that must be refused: the only Reply to them."""
        before = len(self.records())
        wire = self.wire().send(*parts)
        reply = wire.reply()
        self.assertTrue(wire.is_ended())
        self.assertEqual(reply.headers['Connection'], 'close')
        self.assertEqual(reply.json, {
            'success': False, 'error': reply.error,
            'request_id': reply.headers['X-Request-Id']})
        self.assertEqual(len(self.records()), before)
        return reply

    def test_a_refused_body_is_never_read_as_a_request(self):
        start = (b'POST /api/v1/preflight HTTP/1.1\r\nHost: localhost\r\n'
                 b'X-API-Key: %s\r\n' % self.key.encode())
        for lines in (b'Content-Length: 4\r\nContent-Length: 0\r\n',
                      b'Content-Length: 4\r\nTransfer-Encoding: chunked\r\n',
                      b'Content-Length: 1_0\r\n', b'Content-Length: +2\r\n',
                      b'Content-Length: -1\r\n', b'Content-Length: 2, 2\r\n',
                      b'Transfer-Encoding: chunked, gzip\r\n',
                      b'Content-Length: 2000000\r\n', b'bad\r\n'):
            with self.subTest(lines):
                reply = self.refused(start, lines, b'\r\n', self.hidden * 3)
                self.assertEqual(reply.status, 400)

    def test_a_malformed_chunk_is_400_and_the_end(self):
        for data in (b'zz\r\n', b'2\r\n{}X', b'0\r\nTrailer: x\r\n\r\n',
                     b'200000\r\n'):
            with self.subTest(data):
                reply = self.refused(self.request(
                    'POST', GATE, Transfer_Encoding='chunked'), data,
                    self.hidden)
                self.assertEqual(reply.status, 400)

    def test_no_length_is_411(self):
        reply = self.refused(self.request('POST', GATE), self.hidden)
        self.assertEqual(reply.status, 411)

    def test_large_headers_are_431(self):
        reply = self.refused(self.request('GET', '/healthz',
                                          X_Long='x' * 40000))
        self.assertEqual(reply.status, 431)
        wire = self.wire().send(b'GET /' + b'x' * 40000)
        self.assertEqual(wire.reply().status, 431)

    def test_what_is_not_http_is_400_at_once(self):
        for data in (b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
                     b'GET / HTTP/1.0\n\n', b'PRI * HTTP/2.0\r\n\r\nSM',
                     b'hello\r\n\r\n'):
            with self.subTest(data):
                self.assertEqual(self.refused(data).status, 400)

    def test_a_refusal_can_be_read_before_a_large_body_is_sent(self):
        wire = self.wire().send(self.request('POST', GATE,
                                             Content_Length=3000000))
        with contextlib.suppress(ConnectionError):
            for _ in range(48):
                wire.send(b' ' * 62500)
        self.assertIn('over 1 MiB', wire.reply().error)

    def test_a_sender_that_falls_silent_is_408(self):
        for parts in ((b'GET /heal',), (self.request(
                'POST', GATE, Content_Length=500000), b'{"tools"')):
            with self.subTest(parts):
                self.assertEqual(self.refused(*parts).status, 408)

    def test_one_byte_at_a_time_ends_at_the_total_deadline(self):
        wire, data = self.wire(), self.request('POST', GATE, ECHO)
        wire.sock.settimeout(0.02)
        for at in range(len(data)):
            with contextlib.suppress(ConnectionError):
                wire.send(data[at:at + 1])
            with contextlib.suppress(socket.timeout):
                self.assertEqual(wire.reply().status, 408)
                return
        self.fail('it was answered after %d bytes' % len(data))

    def test_an_idle_connection_ends_without_a_word(self):
        wire = self.wire().send(self.request('GET', '/healthz'))
        self.assertEqual(wire.reply().status, 200)
        self.assertTrue(wire.is_ended())
        self.assertTrue(self.wire().is_ended())

    def test_health_answers_beside_200_idle_connections(self):
        held = [self.wire() for _ in range(200)]
        self.assertEqual(self.get('/healthz').body, b'ok\n')
        self.assertEqual(held[-1].send(self.request('GET', '/healthz'))
                         .reply().status, 200)

    def is_held(self, wire):
        """Tell whether the service has its end of a connection open."""
        ends = ':%04X' % self.port, ':%04X' % wire.sock.getsockname()[1]
        with open('/proc/net/tcp', encoding='ascii') as file:
            rows = [line.split()[1:4] for line in file]
        return any(row[0].endswith(ends[0]) and row[1].endswith(ends[1])
                   and row[2] == '01' for row in rows)

    @unittest.skipUnless(os.path.exists('/proc/net/tcp'), 'needs /proc')
    def test_who_does_not_read_is_ended_and_harms_nobody(self):
        wire, count = self.wire(), 0
        self.wait_for(lambda: self.is_held(wire))
        wire.sock.settimeout(0.2)
        with contextlib.suppress(socket.timeout, ConnectionError):
            for _ in range(50):
                wire.send(self.request('GET', '/api/v1/openapi.json') * 100)
                count += 100
        self.assertEqual(self.get('/healthz').status, 200)
        self.wait_for(lambda: not self.is_held(wire))
        wire.sock.settimeout(20)
        replies = 0
        with contextlib.suppress(ConnectionError):
            while wire.reply():
                replies += 1
        self.assertLess(replies, count)         # cut off, not awaited

    def test_a_chunked_body_in_pieces_of_one_byte(self):
        body = b''.join(b'1;x\r\n%c\r\n' % byte for byte in ECHO)
        wire = self.wire().send(self.request('POST', GATE,
                                             Transfer_Encoding='chunked'))
        for at in range(len(body)):
            wire.send(body[at:at + 1])
        wire.send(b'0\r\n\r\n')
        self.assertEqual(wire.reply().tools[0]['status'], 'ready')

    def test_requests_in_one_piece_are_answered_in_order(self):
        wire = self.wire().send(
            self.request('GET', '/healthz', X_Request_Id='a'),
            self.request('POST', GATE, ECHO, X_Request_Id='b'),
            self.request('GET', '/nowhere', X_Request_Id='c'),
            self.request('POST', GATE, ECHO, X_Request_Id='d'))
        found = [wire.reply() for _ in range(4)]
        self.assertEqual([(reply.status, reply.headers['X-Request-Id'])
                          for reply in found],
                         [(200, 'a'), (200, 'b'), (404, 'c'), (200, 'd')])

    def test_100_continue_is_sent_after_who_and_how_much_are_known(self):
        good = self.request('POST', GATE, Content_Length=len(ECHO),
                            Expect='100-continue')
        wire = self.wire().send(good)
        self.assertEqual(wire.read_until(b'\r\n\r\n'),
                         b'HTTP/1.1 100 Continue')
        self.assertEqual(wire.send(ECHO).reply().status, 200)
        for status, headers in ((401, {'X_API_Key': 'wrong'}),
                                (403, {'Host': 'evil.example'}),
                                (400, {'Content_Length': 1 << 21})):
            given = dict({'Content_Length': 9, 'Expect': '100-continue'},
                         **headers)
            self.assertEqual(self.refused(self.request(
                'POST', GATE, **given)).status, status)

    def test_100_continue_is_not_for_old_clients_nor_for_whole_bodies(self):
        data = self.request('POST', GATE, ECHO, Expect='100-continue')
        self.assertEqual(self.wire().send(data).reply().status, 200)
        old = data.replace(b'HTTP/1.1', b'HTTP/1.0')
        wire = self.wire().send(old[:-5])
        time.sleep(0.05)
        self.assertEqual(wire.send(old[-5:]).reply().status, 200)

    def test_connections_are_kept_as_the_client_asks(self):
        for version, headers, is_kept in (
                (b'1.1', {}, True), (b'1.1', {'Connection': 'close'}, False),
                (b'1.0', {}, False),
                (b'1.0', {'Connection': 'keep-alive'}, True)):
            with self.subTest(version, headers=headers):
                data = self.request('GET', '/healthz', **headers).replace(
                    b'HTTP/1.1', b'HTTP/' + version)
                wire = self.wire().send(data)
                self.assertEqual(wire.reply().headers['Connection'],
                                 'keep-alive' if is_kept else 'close')
                if is_kept:
                    self.assertEqual(wire.send(data).reply().status, 200)
                else:
                    self.assertTrue(wire.is_ended())

    def test_a_client_that_has_sent_all_is_answered(self):
        wire = self.wire().send(self.request('POST', GATE, ECHO))
        wire.sock.shutdown(socket.SHUT_WR)
        self.assertEqual(wire.reply().status, 200)
        self.assertTrue(wire.is_ended())

    def test_head_has_no_body_and_options_no_cors(self):
        wire = self.wire().send(self.request('HEAD', '/healthz'))
        self.assertEqual(wire.reply(True).status, 405)
        reply = wire.send(self.request('OPTIONS', GATE,
                                       Origin='http://localhost')).reply()
        self.assertEqual((reply.status, reply.headers['Allow']),
                         (405, 'POST'))
        self.assertNotIn(b'Access-Control', str(reply.pairs).encode())
        self.assertEqual(wire.send(self.request('GET', '/healthz')).reply()
                         .body, b'ok\n')

    def test_unknown_paths_and_wrong_methods(self):
        for method, path, status, allow in (
                ('GET', '/', 404, None), ('GET', '/api/v1', 404, None),
                ('GET', '/healthz/', 404, None), ('GET', '*', 404, None),
                ('GET', '/api/v1/servers/a/b/tools', 404, None),
                ('GET', '/api/v1/servers//tools', 404, None),
                ('GET', '/api/v1/activity/', 404, None),
                ('GET', GATE, 405, 'POST'), ('DELETE', GATE, 405, 'POST'),
                ('DELETE', '/healthz', 405, 'GET'),
                ('DELETE', '/api/v1/servers/a/tools', 405, 'GET')):
            with self.subTest(method, path=path):
                reply = self.send(method, path)
                self.assertEqual((reply.status, reply.headers.get('Allow')),
                                 (status, allow))

    def test_a_get_may_have_a_body(self):
        wire = self.wire().send(self.request('GET', '/healthz', b'{}') * 2)
        self.assertEqual([wire.reply().status, wire.reply().status],
                         [200, 200])


class Test22ServeRules(ServeCase):
    """What is refused, and in which words; none of it leaves a record."""

    def shared(self):
        self.entry = self.serve(tools=[tool(annotations=SAFE)])
        self.configure({'s': self.entry}, profiles={'p': {'servers': ['s']}},
                       allow_hosts=['Named.example'])
        self.look()
        self.start_serve(*self.words + ('--allow-host', 'Other.example'))
        self.agent = self.token('bot', '--servers', 's')

    def test_each_broken_rule_of_a_body_is_one_sentence(self):
        one, before = [{'id': 's:echo'}], len(self.records())
        pin = 'sha256/v1:' + '0' * 64
        for body, expected in (
                (b'', 'exactly one JSON object'),
                (b'[]', 'exactly one JSON object'),
                (b'null', 'exactly one JSON object'),
                (b'{}{}', 'exactly one JSON object'),
                (ECHO + b' x', 'exactly one JSON object'),
                (b'{"tools":[{"id":"a:b"}],}', 'exactly one JSON object'),
                (b'{"tools":[1', 'exactly one JSON object'),
                (b'\xef\xbb\xbf' + ECHO, 'byte order mark'),
                (ECHO.decode().encode('utf-16'), 'not UTF-8'),
                (b'{"tools":[{"id":"caf\xe9:b"}]}', 'not UTF-8'),
                (b'{"tools":[{"id":"a:b"}],"tools":[]}', 'stands twice'),
                (b'{"tools":[{"id":"a:b","id":"a:b"}]}', 'stands twice'),
                (b'{"wait_ms":NaN}', 'NaN'),
                (b'{"wait_ms":-Infinity}', 'Infinity'),
                (b'{"wait_ms":' + b'9' * 5000 + b'}', '20 digits'),
                (b'[' * 20000, 'over 64 levels'),
                (b'{"tools":' + b'[' * 64 + b']' * 64 + b'}',
                 'over 64 levels'),
                ({'tools': []}, 'tools is empty'), ({}, 'tools is missing'),
                ({'tools': None}, 'tools is missing'),
                ({'tools': {}}, 'tools must be an array'),
                ({'tools': 's:echo'}, 'tools must be an array'),
                ({'tools': ['s:echo']}, 'must be an object'),
                ({'tools': [None]}, 'must be an object'),
                ({'tools': one * 101}, 'over 100 entries'),
                ({'tools': [{'id': 1}]}, 'must be strings'),
                ({'tools': [{'id': None}]}, 'must be strings'),
                ({'tools': [{}]}, 'must be strings'),
                ({'tools': [{'id': 's:echo', 'pin_hash': 1}]},
                 'must be strings'),
                ({'tools': [{'id': 's:echo', 'pin': 'x'}]},
                 'unknown key "pin" in an entry'),
                ({'tools': one + [{'id': ' s:echo', 'pin_hash': pin}]},
                 's:echo'),
                ({'tools': one, 'tool': []}, 'unknown key "tool"'),
                ({'tools': one, 'as_user': None}, 'as_user is reserved'),
                ({'tools': one, 'wait_ms': True}, 'wait_ms must be'),
                ({'tools': one, 'wait_ms': 1.0}, 'wait_ms must be'),
                ({'tools': one, 'wait_ms': 1.5}, 'wait_ms must be'),
                ({'tools': one, 'wait_ms': '5'}, 'wait_ms must be'),
                ({'tools': one, 'wait_ms': 10001}, 'wait_ms must be'),
                ({'tools': one, 'wait_ms': -1}, 'wait_ms must be'),
                ({'tools': one, 'profile': 1}, 'profile must be'),
                ({'tools': one, 'profile': 'q'}, 'Unknown profile'),
                ({'tools': one, 'policy': []}, 'policy must be'),
                ({'tools': one, 'policy': {'read_only_only': 1}},
                 'read_only_only must be'),
                ({'tools': one, 'policy': {'read_only': True}},
                 'unknown key "read_only" in policy'),
                (b'{"tools":' + b' ' * (1 << 20) + b'[]}', 'over 1 MiB')):
            with self.subTest(str(body)[:60]):
                reply = self.post(body)
                self.assertEqual(reply.status, 400)
                self.assertEqual(list(reply.json), ['success', 'error',
                                                    'request_id'])
                self.assertIs(reply.json['success'], False)
                self.assertIn(expected, reply.error)
                self.assertNotIn('\n', reply.error)
        self.assertEqual(len(self.records()), before)

    def test_rules_are_looked_at_in_order(self):
        broken = {'tools': [{'id': 'a:b'}, {'id': 'a:b', 'pin_hash': 'x'}],
                  'wait_ms': -1, 'profile': 'q'}
        expected = ['a:b', 'wait_ms', 'Unknown profile']
        for word, mend in zip(expected, (
                {'tools': [{'id': 'a:b'}]}, {'wait_ms': 0}, {})):
            self.assertIn(word, self.post(broken).error)
            broken.update(mend)

    def test_conflicting_pins_name_the_id_and_both(self):
        error = self.post({'tools': [
            {'id': 's:echo', 'pin_hash': 'one'},
            {'id': 's:echo', 'pin_hash': 'two'}]}).error
        for word in 's:echo', 'one', 'two':
            self.assertIn(word, error)

    def test_null_and_empty_mean_absent(self):
        for more in ({'wait_ms': None}, {'profile': None}, {'profile': ''},
                     {'policy': None}, {'policy': {'read_only_only': None}},
                     {'tools': [{'id': 's:echo', 'pin_hash': None}]},
                     {'tools': [{'id': 's:echo', 'pin_hash': ''},
                                {'id': ' s:echo '}]}):
            with self.subTest(more):
                reply = self.post(dict({'tools': [{'id': 's:echo'}]}, **more))
                self.assertEqual(reply.status, 200, reply.body)
                self.assertEqual([row['status'] for row in reply.tools],
                                 ['ready'])

    def test_the_media_type_is_not_looked_at(self):
        for kind in (None, 'text/plain', 'APPLICATION/JSON; charset=UTF-8',
                     'application/x-www-form-urlencoded', 'x'):
            with self.subTest(kind):
                self.assertEqual(self.post(ECHO, Content_Type=kind).status,
                                 200)

    def test_a_hundred_ids_and_a_whole_megabyte_are_taken(self):
        ids = ['s:t%d' % n for n in range(99)] + ['s:echo']
        rows = self.ask_ids(*ids).tools
        self.assertEqual([row['id'] for row in rows], ids)
        self.assertEqual(sum('did_you_mean' in row for row in rows), 0)
        body = ECHO + b' ' * ((1 << 20) - len(ECHO))
        self.assertEqual(self.post(body).status, 200)

    def test_odd_ids_are_answered_and_recorded_as_they_came(self):
        ids = ['s:caf\u00e9', 's:\u202e', 's:\ud800', '\ud800:x', 's:a\0b',
               's:' + 'x' * 5000, 'colonless', ':', '', 's:a:b']
        reply = self.ask_ids(*ids)
        self.assertEqual([row['id'] for row in reply.tools], ids)
        self.assertEqual({row['status'] for row in reply.tools},
                         {'unavailable'})
        record = self.records(request_id=reply.headers['X-Request-Id'])[0]
        self.assertEqual([row['id'] for row in
                          record['metadata']['per_tool']], ids)

    def test_no_or_a_wrong_credential_is_401(self):
        before = len(self.records())
        for headers in ({}, {'X_API_Key': ''}, {'X_API_Key': self.key[:-1]},
                        {'X_API_Key': 'k\xe9y'}, {'X_API_Key': '\xff' * 64},
                        {'Authorization': 'Bearer'},
                        {'Authorization': 'Bearer ' + self.key + 'x'},
                        {'Authorization': 'Basic ' + self.key},
                        {'Authorization': self.key},
                        {'X_API_Key': pf.SECRET_PREFIX + '0' * 64},
                        {'X_API_Key': 'x', 'Authorization': 'Bearer '
                         + self.key}):
            with self.subTest(headers):
                given = dict({'X_API_Key': None}, **headers)
                for reply in (self.post(ECHO, **given),
                              self.get('/api/v1/servers', **given),
                              self.get('/readyz?tool=s:echo', **given),
                              self.get('/metrics', **given),
                              self.get('/events', **given)):
                    self.assertEqual(reply.status, 401)
                    self.assertIn('Bearer',
                                  reply.headers['WWW-Authenticate'])
        self.assertEqual(len(self.records()), before)

    def test_a_key_may_come_in_three_ways(self):
        bearer = {'X_API_Key': None, 'Authorization': 'bEARER ' + self.key}
        self.assertEqual(self.post(ECHO, **bearer).status, 200)
        path = '/api/v1/servers?apikey=' + self.key
        self.assertEqual(self.get(path, X_API_Key=None).status, 200)
        self.assertEqual(self.get(path, X_API_Key='x').status, 401)
        self.assertEqual(self.post(ECHO, GATE + '?apikey=' + self.key,
                                   X_API_Key=None).status, 401)

    def test_a_foreign_host_or_origin_is_403_with_a_good_key_too(self):
        for headers in ({'Host': 'evil.example:8080'},
                        {'Host': '10.1.2.3'}, {'Host': ''},
                        {'Origin': 'https://evil.example'},
                        {'Origin': 'null'}, {'Origin': ''},
                        {'Origin': 'file://localhost'},
                        {'Origin': 'http://localhost.evil.example'}):
            with self.subTest(headers):
                for reply in (self.post(ECHO, **headers),
                              self.get('/nowhere', **headers),
                              self.get('/readyz?tool=s:echo', **headers)):
                    self.assertEqual(reply.status, 403)
                    self.assertIn(list(headers.values())[0], reply.error)
                    self.assertIn('--allow-host', reply.error)

    def test_our_own_names_pass(self):
        for headers in ({'Host': 'localhost:%d' % self.port},
                        {'Host': '[::1]:%d' % self.port},
                        {'Host': '127.0.0.1'}, {'Host': 'named.example'},
                        {'Host': 'OTHER.example:1'},
                        {'Origin': 'http://localhost:%d' % self.port},
                        {'Origin': 'http://127.0.0.1:3000'},
                        {'Origin': 'https://named.example'}):
            with self.subTest(headers):
                reply = self.post(ECHO, **headers)
                self.assertEqual(reply.status, 200)
                self.assertNotIn('access-control',
                                 str(reply.pairs).lower())

    def test_probes_are_for_everybody_under_any_name(self):
        for path, word in (('/healthz', b'ok\n'), ('/readyz', b'ready\n')):
            reply = self.get(path, X_API_Key=None, Host='10.0.0.9:1',
                             Origin='null')
            self.assertEqual((reply.status, reply.body), (200, word))

    def test_a_misspelt_parameter_of_readyz_turns_nothing_green(self):
        for path in '/readyz?tools=s:nope', '/readyz?TOOL=s:nope':
            self.assertEqual(self.get(path).status, 400)

    def test_the_operators_endpoints_are_403_for_an_agent(self):
        for method, path in (('GET', '/metrics'), ('POST', '/api/v1/sync'),
                             ('GET', '/api/v1/health')):
            reply = self.send(method, path, b'' if method == 'POST' else
                              None, X_API_Key=self.agent)
            self.assertEqual(reply.status, 403)

    def test_a_failed_handler_costs_only_its_request(self):
        self.start_serve(patch='pf.cmd_servers_list = pf.worst_verdict = '
                         'lambda *_: 1 / 0')
        reply = self.get('/api/v1/servers')
        self.assertEqual((reply.status, reply.error), (500,
                                                       'internal error'))
        self.assertEqual(self.post(ECHO).status, 500)
        self.assertEqual(self.get('/readyz').status, 200)
        self.assertIn('internal error: ZeroDivisionError',
                      self.server.log())


class Test22ServeAnswers(ServeCase):
    """The exact answer, its record, and where both can be found again."""

    def shared(self):
        self.servers = {
            's': self.serve(tools=[tool(annotations=SAFE), tool('plain')]),
            'dead': self.serve('dead', die='start'),
            'off': dict(self.serve('off', tools=[tool()]), enabled=False)}
        self.configure(self.servers, profiles={'p': {'servers': ['off']}})
        self.look()
        self.start_serve()

    def test_a_ready_answer(self):
        data = self.ask_ids('s:echo').json
        self.assertEqual(list(data), ['success', 'data'])
        self.assertIs(data['success'], True)
        self.assertEqual(list(data['data']), ['verdict', 'checked_at',
                                              'tools'])
        self.assertRegex(data['data']['checked_at'],
                         r'\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z')
        row = data['data']['tools'][0]
        self.assertEqual(list(row), ['id', 'status', 'hash', 'observed_at'])
        self.assertRegex(row['hash'], r'\Asha256/v1:[0-9a-f]{64}\Z')

    def test_keys_are_in_order_and_none_is_null(self):
        order = ['id', 'status', 'reason', 'retryable', 'action', 'detail',
                 'remediation', 'hash', 'did_you_mean', 'observed_at',
                 'cause']
        reply = self.ask_ids('s:echo', 's:ecko', 'dead:x', 'off:x', 'no:x',
                             'x')
        for row in reply.tools:
            self.assertEqual(list(row), [key for key in order if key in row])
        self.assertNotIn(b'null', reply.body)
        keys = [set(row) - {'id', 'status', 'detail', 'remediation',
                            'reason', 'retryable'} for row in reply.tools]
        self.assertEqual(keys, [
            {'hash', 'observed_at'}, {'action', 'did_you_mean',
                                      'observed_at'},
            {'action', 'observed_at', 'cause'}, {'action'}, {'action'},
            {'action'}])

    def test_waited_ms_is_there_when_a_wait_was_asked_for(self):
        for wait_ms, expected in ((None, None), (0, None), (1, 0),
                                  (10000, 0)):
            data = self.post({'tools': [{'id': 's:echo'}],
                              'wait_ms': wait_ms}).json['data']
            self.assertEqual(data.get('waited_ms'), expected)
            if expected is not None:
                self.assertEqual(list(data)[2], 'waited_ms')

    def test_the_answer_is_that_of_the_command_line(self):
        ids = ['s:plain', ' s:echo ', 'dead:x', 's:echo', 'p:q']
        done = self.check(*ids + ['--read-only-only'])
        reply = self.post({'tools': [{'id': name} for name in ids],
                           'policy': {'read_only_only': True}})
        ours, theirs = done.json, reply.json['data']
        del ours['checked_at'], theirs['checked_at']
        self.assertEqual(json.dumps(theirs), json.dumps(ours))

    def test_an_answer_has_one_record_with_its_request_id(self):
        reply = self.ask_ids('s:echo', 's:nope', X_Request_Id='My_id-1')
        self.assertEqual(reply.headers['X-Request-Id'], 'My_id-1')
        record, = self.records(request_id='My_id-1')
        self.assertEqual(
            {key: record[key] for key in record
             if key not in ('id', 'timestamp')}, {
                 'type': 'preflight', 'source': 'api',
                 'request_id': 'My_id-1', 'actor': 'operator',
                 'status': 'blocked', 'metadata': {
                     'verdict': 'unknown_ids', 'ids_count': 2,
                     'reasons': {'not_found': 1}, 'per_tool': [
                         {'id': 's:echo', 'status': 'ready'},
                         {'id': 's:nope', 'status': 'unavailable',
                          'reason': 'not_found'}]}})
        self.assertEqual(record['timestamp'],
                         reply.json['data']['checked_at'])

    def test_our_client_is_known_by_its_header(self):
        self.ask_ids('s:echo', X_Request_Id='by-cli',
                     X_MCPProxy_Client='cli/1.0')
        self.assertEqual(self.records(request_id='by-cli')[0]['source'],
                         'cli')

    def test_a_request_id_is_taken_only_if_it_is_one(self):
        given = ['a', 'A-z_9', 'x' * 256]
        for name in given + ['', 'a b', 'x' * 257, 'a/b', 'a\xe9', 'a;b']:
            with self.subTest(name):
                reply = self.get('/healthz', X_Request_Id=name)
                found = reply.headers['X-Request-Id']
                if name in given:
                    self.assertEqual(found, name)
                else:
                    self.assertRegex(found, r'\A[0-9a-f]{8}-[0-9a-f]{4}-4'
                                     r'[0-9a-f]{3}-[89ab][0-9a-f]{3}-'
                                     r'[0-9a-f]{12}\Z')

    def test_a_profile_narrows_the_operator_too(self):
        reply = self.post({'tools': [{'id': 's:echo'}, {'id': 'off:x'}],
                           'profile': 'p'})
        self.assertEqual([row['reason'] for row in reply.tools],
                         ['server_not_in_scope', 'server_disabled'])
        self.assertIn('"p"', reply.tools[0]['detail'])

    def test_readyz_with_ids_is_a_check(self):
        for path, status in (
                ('/readyz?tool=s:echo&tool=s%3Aplain', 200),
                ('/readyz?tool=s:echo&tool=s:nope', 503),
                ('/readyz?tool=+s:echo+', 200), ('/readyz?tool=', 503)):
            with self.subTest(path):
                reply = self.get(path)
                self.assertEqual(reply.status, status)
                self.assertIs(reply.json['success'], True)
                self.assertEqual(len(self.records(
                    request_id=reply.headers['X-Request-Id'])), 1)
        reply = self.get('/readyz?' + '&'.join(['tool=s:echo'] * 101))
        self.assertEqual(reply.status, 400)

    def test_the_rest_for_the_operator(self):
        row = self.get('/api/v1/servers').json['data']['servers'][0]
        self.assertEqual((row['server'], row['state'], row['tools']),
                         ('s', 'ready', 2))
        self.assertEqual(self.get('/api/v1/tools').json['data']['tools'],
                         self.run_cli('tools', 'list', '-o', 'json').json)
        rows = self.get('/api/v1/servers/s/tools').json['data']['tools']
        self.assertEqual([row['id'] for row in rows], ['s:echo', 's:plain'])
        self.assertEqual(self.get('/api/v1/servers/zz/tools').error,
                         'no such server')

    def test_activity_can_be_searched(self):
        for number in range(3):
            self.ask_ids('s:echo', X_Request_Id='find-%d' % number)
        data = self.get('/api/v1/activity?request_id=find-1').json['data']
        self.assertEqual(list(data), ['activities', 'total', 'limit',
                                      'offset'])
        self.assertEqual((data['total'], data['limit'], data['offset']),
                         (1, 50, 0))
        row = data['activities'][0]
        found = self.get('/api/v1/activity/' + row['id']).json['data']
        self.assertEqual(found, {'activity': row})
        data = self.get('/api/v1/activity?type=preflight&status=success&'
                        'limit=1&offset=1&since=2020-01-01').json['data']
        self.assertEqual((len(data['activities']), data['offset']), (1, 1))

    def test_bad_searches_are_400_and_unknown_records_404(self):
        for query in ('limit=0', 'limit=1001', 'limit=x', 'offset=-1',
                      'since=yesterday', 'typ=x', 'limit=1&limit=2'):
            with self.subTest(query):
                self.assertEqual(self.get('/api/v1/activity?' + query)
                                 .status, 400)
        for name in ('x', '0' * 12 + '-00000001', '%00', '..'):
            self.assertEqual(self.get('/api/v1/activity/' + name).status,
                             404)

    @unittest.skipUnless(os.path.exists('/usr/bin/curl')
                         and os.path.exists('/usr/bin/awk'), 'no curl, awk')
    def test_the_request_id_recipe_as_people_paste_it(self):
        done = self.shell(
            'id=$(curl -si -X POST -H "X-API-Key: $KEY" '
            'http://127.0.0.1:%d/api/v1/preflight '
            '-d \'{"tools":[{"id":"s:echo"}]}\' '
            "| awk -F': ' '/X-Request-Id/{print $2}' | tr -d '\\r'); "
            '%s --home state --config config.json activity list '
            '--request-id "$id" -o json' % (self.port, ' '.join(
                map(shlex.quote, [sys.executable, SCRIPT]))), KEY=self.key)
        rows = done.json['activities']
        self.assertEqual([row['metadata']['verdict'] for row in rows],
                         ['ready'])

    def test_a_line_of_the_log_cannot_be_forged(self):
        self.get('/x%0a2026-01-01T00:00:00.000Z%20GET%20/%20200?k=hush-1',
                 X_Request_Id='forged')
        self.wait_for(lambda: 'forged' in self.server.log())
        lines = [line for line in self.server.log().split('\n')
                 if 'forged' in line]
        self.assertRegex(lines[0], r'\A[0-9TZ:.-]+ GET /x%0a\S+ 404 \d+ms '
                         r'forged -\Z')
        self.assertNotIn('hush-1', self.server.log())
        self.assertEqual(len(lines), 1)


NEVER_TOLD = ('hash', 'cause', 'observed_at', 'launch', 'file', 'stderr',
              'path', 'url', 'last_seen', 'first_seen', 'approved_hash')


class Test22ServeAgents(ServeCase):
    """What an agent token opens, and that it says nothing of the rest."""

    def shared(self):
        self.servers = {name: self.serve(name, tools=[tool(
            'echo', annotations=SAFE)]) for name in ('s', 'hidden', 'own')}
        self.servers['dead'] = self.serve('dead', die='start',
                                          stderr='cannot open /etc/hush-2')
        self.profiles = {'p': {'servers': ['own']},
                         'both': {'servers': ['s', 'hidden']},
                         'foreign': {'servers': ['hidden']}}
        self.save()
        self.look()
        self.start_serve()
        self.secret = self.token('bot', '--servers', 's,dead')
        self.pinned = self.token('pinned', '--profile', 'p')

    def save(self):
        """Write the config as it now is."""
        self.configure(self.servers, profiles=self.profiles)

    def reasons_of(self, secret, *ids):
        """Check ids with a token: [reason or 'ready']."""
        return [row.get('reason', row['status'])
                for row in self.ask_ids(*ids, X_API_Key=secret).tools]

    def test_a_token_sees_its_servers_and_no_others(self):
        self.assertEqual(self.reasons_of(
            self.secret, 's:echo', 'hidden:echo', 'dead:x', 'elsewhere:echo',
            's:ecco', 'x'), ['ready', 'not_found', 'server_unhealthy',
                             'not_found', 'not_found', 'not_found'])

    def test_nothing_of_this_host_is_told(self):
        texts = [self.ask_ids('s:echo', 's:ecco', 'dead:x', 'hidden:echo',
                              X_API_Key=self.secret).body]
        for path in ('/api/v1/servers', '/api/v1/tools', '/api/v1/activity',
                     '/api/v1/servers/dead/tools', '/api/v1/servers/s/tools',
                     '/readyz?tool=dead:x', '/api/v1/servers/zz/tools',
                     '/api/v1/activity?limit=0', '/metrics'):
            texts.append(self.get(path, X_API_Key=self.secret).body)
        for text in texts:
            for word in NEVER_TOLD:
                self.assertNotIn(b'"%s"' % word.encode(), text)
            for word in (self.dir, 'hush-2', 'fake.py', sys.executable,
                         'hidden"', 'sha256', '://'):
                self.assertNotIn(word.encode(), text)

    def test_out_of_scope_unknown_and_misspelt_are_the_same_bytes(self):
        plain, found = {}, set()
        for name in 'hidden', 'absent', 'edihhn':
            for how, path, body in (
                    ('check', GATE, {'tools': [{'id': name + ':echo'}]}),
                    ('wait', GATE, {'tools': [{'id': name + ':echo'}],
                                    'wait_ms': 5}),
                    ('pin', GATE, {'tools': [{
                        'id': name + ':echo', 'pin_hash': 'x'}]}),
                    ('profile', GATE, {'tools': [{'id': 's:echo'}],
                                       'profile': {'hidden': 'foreign'}.get(
                                           name, name)}),
                    ('readyz', '/readyz?tool=%s:echo' % name, None),
                    ('tools', '/api/v1/servers/%s/tools' % name, None),
                    ('record', '/api/v1/activity/' + name, None)):
                data = None if body is None else json.dumps(body).encode()
                reply = self.send('POST' if data else 'GET', path, data,
                                  X_API_Key=self.secret, X_Request_Id='same')
                text = re.sub(rb'"checked_at":"[^"]*"|,"did_you_mean":\[.*?\]',
                              b'', reply.body)
                text = text.replace(name.encode(), b'')
                found.add(how)
                plain.setdefault(how, set()).add((
                    reply.status, text, tuple(sorted(
                        pair for pair in reply.pairs
                        if pair[0] != 'Content-Length'))))
        self.assertEqual(len(found), 7)
        for how, answers in plain.items():
            with self.subTest(how):
                self.assertEqual(len(answers), 1, answers)

    def test_lists_are_cut_to_the_scope(self):
        data = self.get('/api/v1/servers', X_API_Key=self.secret).json
        self.assertEqual(data['data']['servers'], [
            {'server': 's', 'state': 'ready', 'tools': 1, 'pending': 0,
             'changed': 0},
            {'server': 'dead', 'state': 'error', 'tools': 0, 'pending': 0,
             'changed': 0}])
        data = self.get('/api/v1/tools', X_API_Key=self.secret).json
        self.assertEqual([row['id'] for row in data['data']['tools']],
                         ['s:echo'])
        self.assertEqual(list(data['data']['tools'][0]),
                         list(pf.AGENT_TOOL_KEYS))

    def test_records_are_the_tokens_own(self):
        mine = self.ask_ids('s:echo', X_API_Key=self.secret)
        other = self.ask_ids('s:echo')
        data = self.get('/api/v1/activity',
                        X_API_Key=self.secret).json['data']
        self.assertEqual({row['actor'] for row in data['activities']},
                         {'bot'})
        self.assertEqual(data['total'], len(self.records(actor='bot')))
        for reply, status in ((mine, 200), (other, 404)):
            record = self.records(
                request_id=reply.headers['X-Request-Id'])[0]
            self.assertEqual(self.get('/api/v1/activity/' + record['id'],
                                      X_API_Key=self.secret).status, status)

    def test_no_token_is_named_like_the_operator_or_inherits_records(self):
        done = self.cli('token', 'create', 'operator', '--servers', '*')
        self.assertEqual((done.code, done.out), (1, ''))
        first = self.token('again', '--servers', 's')
        self.ask_ids('s:echo', X_API_Key=first, X_Request_Id='of-first')
        old = self.records(request_id='of-first')[0]
        self.cli('token', 'revoke', 'again')
        second = self.token('again', '--servers', 's')
        data = self.get('/api/v1/activity?since=2020-01-01',
                        X_API_Key=second).json['data']
        self.assertEqual(data['activities'], [])
        self.assertEqual(self.get('/api/v1/activity/' + old['id'],
                                  X_API_Key=second).status, 404)

    def test_the_scope_is_an_intersection(self):
        everything = self.token('all', '--servers', '*')
        nothing = self.token('none', '--servers', '')
        for secret, profile, expected in (
                (everything, None, ['ready', 'ready', 'ready']),
                (everything, 'p', ['not_found', 'not_found', 'ready']),
                (nothing, None, ['not_found'] * 3),
                (self.secret, 'both', ['ready', 'not_found', 'not_found']),
                (self.pinned, None, ['not_found', 'not_found', 'ready'])):
            with self.subTest(profile, expected=expected):
                reply = self.post({'profile': profile, 'tools': [
                    {'id': name + ':echo'} for name in (
                        's', 'hidden', 'own')]}, X_API_Key=secret)
                self.assertEqual([row.get('reason', row['status'])
                                  for row in reply.tools], expected)

    def test_an_unknown_profile_and_a_foreign_one_are_alike(self):
        found = {self.post({'tools': [{'id': 's:echo'}], 'profile': name},
                           X_API_Key=self.secret, X_Request_Id='x').body
                 for name in ('foreign', 'p', 'nope')}
        self.assertEqual(len(found), 1)
        self.assertIn(b'"Unknown profile"', found.pop())

    def test_a_deleted_pinned_profile_denies_all_until_it_is_back(self):
        self.assertEqual(self.reasons_of(self.pinned, 'own:echo'), ['ready'])
        held = self.profiles.pop('p')
        self.save()
        self.assertEqual(self.reasons_of(self.pinned, 'own:echo', 's:echo',
                                         'zz:y'), ['not_found'] * 3)
        self.profiles['p'] = held
        self.save()
        self.assertEqual(self.reasons_of(self.pinned, 'own:echo'), ['ready'])

    def test_required_tools_may_be_left_to_the_token(self):
        pin = self.ask_ids('s:echo').tools[0]['hash']
        secret = self.token('needs', '--servers', 's', '--require',
                            's:echo=' + pin, '--require', 's:nope')
        for body in {}, {'tools': None}, {'wait_ms': 1}:
            reply = self.post(body, X_API_Key=secret)
            self.assertEqual([row['status'] for row in reply.tools],
                             ['ready', 'unavailable'])
        self.assertEqual(self.post({'tools': []}, X_API_Key=secret).error,
                         'tools is empty')
        self.assertIn('tools is missing',
                      self.post({}, X_API_Key=self.secret).error)
        self.assertEqual(self.post({'tools': [{'id': 's:echo'}]},
                                   X_API_Key=secret).json['data']['verdict'],
                         'ready')

    def test_a_wrong_pin_shows_no_hash(self):
        for pin in 'sha256/v1:' + '0' * 64, 'sha256/v9:' + '0' * 64, 'x':
            reply = self.post({'tools': [{'id': 's:echo', 'pin_hash': pin}]},
                              X_API_Key=self.secret)
            self.assertEqual(reply.tools[0]['reason'], 'hash_mismatch')
            self.assertNotRegex(reply.tools[0]['detail'],
                                'v[0-9]|[0-9a-f]{8}')

    def test_suggestions_stay_inside_the_scope(self):
        rows = self.ask_ids('s:ecco', 'hidden:ecco', 'own:echo',
                            X_API_Key=self.secret).tools
        for row in rows:
            for name in row.get('did_you_mean', ()):
                self.assertTrue(name.startswith('s:'), name)
        self.assertEqual(rows[0]['did_you_mean'], ['s:echo'])

    def test_revoked_is_refused_on_the_very_next_request(self):
        secret = self.token('brief', '--servers', 's')
        wire = self.wire()
        data = self.request('POST', GATE, ECHO, X_API_Key=secret)
        self.assertEqual(wire.send(data).reply().status, 200)
        self.cli('token', 'revoke', 'brief')
        self.assertEqual(wire.send(data).reply().status, 401)
        self.assertEqual(wire.send(self.request(
            'GET', '/api/v1/servers', X_API_Key=secret)).reply().status, 401)

    def test_expired_is_refused(self):
        secret = self.token('short', '--servers', 's', '--expires', '300ms')
        wire = self.wire()
        data = self.request('POST', GATE, ECHO, X_API_Key=secret)
        self.assertEqual(wire.send(data).reply().status, 200)
        self.wait_for(lambda: wire.send(data).reply().status == 401)

    def test_a_broken_config_tells_an_agent_nothing_of_it(self):
        self.addCleanup(self.write, 'config.json', self.read(self.config))
        self.write('config.json', '{"mcpServers": {')
        for reply in (self.post(ECHO, X_API_Key=self.secret),
                      self.get('/api/v1/tools', X_API_Key=self.secret),
                      self.get('/events', X_API_Key=self.secret)):
            self.assertEqual(reply.status, 503)
            self.assertNotIn('config.json', reply.error)
            self.assertNotIn(self.dir, reply.error)

    def test_a_token_on_the_socket_narrows(self):
        path = self.path('sock')
        self.start_serve('--socket', path, '--no-sync')
        for headers, expected in (({'X_API_Key': None}, 'ready'),
                                  ({'X_API_Key': self.secret}, 'not_found')):
            reply = self.wire(path).send(self.request(
                'POST', GATE, b'{"tools":[{"id":"own:echo"}]}',
                **headers)).reply()
            row = reply.tools[0]
            self.assertEqual(row.get('reason', row['status']), expected)
        self.assertEqual(self.wire(path).send(self.request(
            'GET', '/metrics', X_API_Key='wrong')).reply().status, 401)


def body_of(words):
    """Turn the words of `tools preflight` into the body of a request."""
    tools, pins, body, words = [], {}, {}, list(words)
    while words:
        word = words.pop(0)
        if word == '--pin':
            name, _, pin = words.pop(0).rpartition('=')
            pins.setdefault(name, []).append(pin)
        elif word == '--profile':
            body['profile'] = words.pop(0)
        elif word.startswith('--'):
            body.setdefault('policy', {})[word[2:].replace('-', '_')] = True
        else:
            tools.append(word)
    body['tools'] = [dict({'id': name}, **({'pin_hash': pin} if pin else {}))
                     for name in tools for pin in pins.get(name, [''])]
    return body


class Test22ServeScenarios(ServeCase):
    """Each reason and rule, induced for real and asked for over REST."""

    def shared(self):
        lab = Lab('build')
        lab.setUp()
        self.addCleanup(lab.doCleanups)
        before = os.getcwd()
        lab.build()
        self.addCleanup(lab.wake)       # first, so that its children end
        os.chdir(before)
        self.dir, self.home, self.config = lab.dir, lab.home, lab.config
        self.start_serve()

    def found(self, reply, expected):
        """Cut an answer down to what a row speaks of."""
        data = reply.json['data']
        first = data['tools'][0]
        found = {key: first[key] for key in (
            'status', 'reason', 'retryable', 'action', 'cause',
            'did_you_mean') if key in first and 'status' in expected}
        for key in 'cause', 'did_you_mean':
            if key not in expected:
                found.pop(key, None)
        return dict(found, verdict=data['verdict'],
                    exit_code=pf.EXIT_CODES[data['verdict']])

    def test_each_row_has_its_exact_answer(self):
        for name, (_, checks, expected) in SCENARIOS.items():
            for words in checks:
                with self.subTest(name, words=words):
                    words = words.split(' ')
                    if words[0] == '--config':  # is said at the start
                        self.start_serve(*self.words + tuple(words[:2]))
                        del words[:2]
                    reply = self.post(body_of(words))
                    self.port = self.lab.port
                    if 'request_error' in expected:
                        self.assertEqual(reply.status, 400)
                        for part in expected['request_error']:
                            self.assertIn(part, reply.error)
                    else:
                        self.assertEqual(reply.status, 200)
                        self.assertEqual(self.found(reply, expected),
                                         expected)

    def test_each_agent_row_has_its_exact_answer(self):
        for name, (servers, text, expected) in AGENT_SCENARIOS.items():
            with self.subTest(name):
                secret = self.token(name, '--servers', ','.join(
                    server for server in servers))
                reply = self.ask_ids(text, X_API_Key=secret)
                self.assertEqual(self.found(reply, expected), expected)
                self.assertFalse(set(NEVER_TOLD) & set(reply.tools[0]))


class Test22ServeHealth(ServeCase):
    """GET /api/v1/health: what is recorded; nothing is looked at."""

    def shared(self):
        self.one_server(tool(), health={'url': 'http://127.0.0.1:9/me'})
        servers = {'s': self.entry, 'off': dict(self.entry, enabled=False),
                   'dead': self.serve('dead', die='start'),
                   'never': self.serve('never', starts=self.path('ran'))}
        self.configure(servers)
        self.look('dead')
        self.start_serve()

    def health(self, **headers):
        """Ask for it: server -> row; the answer is self.data."""
        reply = self.get('/api/v1/health', **headers)
        self.assertEqual(reply.status, 200, reply.body)
        self.data = json.loads(reply.body.decode())['data']
        return {row['server']: row for row in self.data['servers']}

    def test_what_is_recorded_worst_first(self):
        rows = self.health()
        self.assertEqual(list(rows), ['dead', 'never', 's'])
        self.assertEqual(
            [(row['state'], row['reason']) for row in rows.values()],
            [('OFFLINE', 'exited'), ('DEGRADED', 'not_seen'),
             ('PRESENT (untested)', 'probe_skipped')])
        self.assertEqual(list(self.data), ['overall', 'checked_at',
                                           'servers'])
        self.assertEqual(self.data['overall'], 'OFFLINE')
        self.assertFalse(os.path.exists(self.path('ran')))

    def test_the_last_probe_of_the_command_is_told(self):
        self.assertEqual(self.cli('health', '--cached', 's').code, 10)
        before = len(self.records())
        row = self.health()['s']
        self.assertEqual((row['state'], row['reason']),
                         ('DEGRADED', 'refused'))
        self.assertEqual(len(self.records()), before)
        with pf.Store(self.home, self.world()) as store, \
                store.write() as con:
            pf.save_probe(con, 's', self.config, None)

    def test_it_is_the_operators(self):
        secret = self.token('bot', '--servers', '*')
        for key, status in ((secret, 403), ('no', 401)):
            reply = self.get('/api/v1/health', X_API_Key=key)
            self.assertEqual(reply.status, status)
        self.assertEqual(self.post(b'', '/api/v1/health').status, 405)

    def test_its_answer_is_as_described(self):
        reply = self.get('/api/v1/openapi.json')
        schemas = json.loads(reply.body.decode())['components']['schemas']
        row = self.health()['s']
        self.assertEqual(list(row), schemas['checkup']['required'])
        self.assertEqual(list(self.data),
                         schemas['health']['properties']['data']['required'])
        self.assertEqual(tuple(schemas['checkup']['properties']['state'][
            'enum']), pf.STATES)


class Test22ServeWait(ServeCase):
    """wait_ms: what it waits for, and what ends it."""

    def shared(self):
        self.servers = {name: self.serve(name, tools=[tool()])
                        for name in ('s', 'late', 'gone')}
        self.configure(self.servers)
        self.look('s')
        self.start_serve()

    def ask_slowly(self, server, wait_ms=10000, **headers):
        """Send a check that waits: its Wire."""
        body = json.dumps({'tools': [{'id': server + ':echo'}],
                           'wait_ms': wait_ms}).encode()
        return self.wire().send(self.request('POST', GATE, body, **headers))

    def busy_slots(self):
        """Read from the metrics how many slots are taken."""
        text = self.get('/metrics').body.decode()
        return int(re.search(r'wait_slots\{state="busy"\} (\d)',
                             text).group(1))

    def test_it_ends_when_a_sync_makes_it_ready(self):
        wire = self.ask_slowly('late')
        self.wait_for(lambda: self.busy_slots() == 1)
        self.assertEqual(self.get('/healthz').status, 200)
        self.assertEqual(self.ask_ids('s:echo').tools[0]['status'], 'ready')
        self.sync('late')
        data = wire.reply().json['data']
        self.assertEqual(data['verdict'], 'ready')
        self.assertLess(0, data['waited_ms'])
        self.assertLess(data['waited_ms'], 10000)

    def test_it_ends_when_waiting_cannot_help_any_more(self):
        wire = self.ask_slowly('gone')
        self.wait_for(lambda: self.busy_slots() == 1)
        self.cli('servers', 'disable', 'gone')
        self.addCleanup(self.cli, 'servers', 'enable', 'gone')
        self.assertEqual(wire.reply().tools[0]['reason'], 'server_disabled')

    def test_it_ends_at_its_deadline_with_one_record(self):
        reply = self.ask_slowly('gone', 300, X_Request_Id='slow').reply()
        data = reply.json['data']
        self.assertEqual(data['verdict'], 'degraded_retryable')
        self.assertGreaterEqual(data['waited_ms'], 300)
        self.assertEqual(data['tools'][0]['reason'], 'server_initializing')
        record, = self.records(request_id='slow')
        self.assertEqual(record['timestamp'], data['checked_at'])

    def test_what_waiting_cannot_cure_is_answered_at_once(self):
        data = self.post({'tools': [{'id': 'gone:echo'}, {'id': 'x:y'}],
                          'wait_ms': 10000}).json['data']
        self.assertEqual((data['verdict'], data['waited_ms']),
                         ('unknown_ids', 0))

    def test_without_a_slot_the_answer_is_immediate(self):
        held = [self.ask_slowly('gone') for _ in range(4)]
        self.wait_for(lambda: self.busy_slots() == 4)
        data = self.ask_slowly('gone').reply().json['data']
        self.assertEqual((data['verdict'], data['waited_ms']),
                         ('degraded_retryable', 0))
        for wire in held:
            wire.sock.close()
        self.wait_for(lambda: self.busy_slots() == 0)

    def test_a_vanished_client_frees_its_slot_and_leaves_no_record(self):
        for how in 'close', 'shutdown':
            wire = self.ask_slowly('gone', X_Request_Id='gone-' + how)
            self.wait_for(lambda: self.busy_slots() == 1)
            if how == 'close':
                wire.sock.close()
            else:
                wire.sock.shutdown(socket.SHUT_WR)
            self.wait_for(lambda: self.busy_slots() == 0)
            self.ask_ids('s:echo')
            self.assertEqual(self.records(request_id='gone-' + how), [])

    def test_a_revoked_token_ends_its_wait(self):
        secret = self.token('waits', '--servers', 'gone')
        wire = self.ask_slowly('gone', X_API_Key=secret)
        self.wait_for(lambda: self.busy_slots() == 1)
        self.cli('token', 'revoke', 'waits')
        self.assertEqual(wire.reply().status, 401)
        self.assertEqual(self.records(actor='waits'), [])

    def test_sigterm_answers_what_waits(self):
        server = self.start_serve()
        wire = self.ask_slowly('gone', X_Request_Id='at-the-end')
        half = self.wire().send(self.request('POST', GATE,
                                             Content_Length=9), b'{')
        self.wait_for(lambda: self.busy_slots() == 1)
        server.process.send_signal(signal.SIGTERM)
        reply = wire.reply()
        self.assertEqual(reply.json['data']['verdict'], 'degraded_retryable')
        self.assertEqual(reply.headers['Connection'], 'close')
        self.assertEqual(half.reply().status, 503)
        self.assertEqual(server.process.wait(timeout=30), 143)
        self.assertEqual(len(self.records(request_id='at-the-end')), 1)
        self.assertIn('at-the-end', server.log())


class Test22ServeLoad(ServeCase):
    """No verdict without its record, whatever happens at once."""

    patch = 'pf.BUSY_TIMEOUT_MS = 300'

    def shared(self):
        self.one_server(tool(annotations=SAFE))
        self.start_serve()

    def storm(self, clients, each):
        """Send checks from many threads: request id -> status."""
        found, start = {}, pf.new_request_id(self.world())

        def client(number):
            with Wire(self.port) as wire:
                for turn in range(each):
                    name = '%s-%d-%d' % (start, number, turn)
                    wire.send(self.request('POST', GATE, ECHO,
                                           X_Request_Id=name))
                    reply = wire.reply()
                    found[reply.headers['X-Request-Id']] = reply.status
        threads = [threading.Thread(target=client, args=(number,))
                   for number in range(clients)]
        for thread in threads:
            thread.start()
        return threads, found

    def settle(self, threads, found):
        """Check that exactly the 200s have a record each: the statuses."""
        for thread in threads:
            thread.join(60)
        ids = [row['request_id'] for row in self.records(type='preflight')
               if row['request_id'] in found]
        self.assertEqual(sorted(ids), sorted(
            name for name, status in found.items() if status == 200))
        self.assertIs(self.cli('activity', 'verify', '-o', 'json')
                      .json['ok'], True)
        return set(found.values())

    def test_every_answer_has_its_record_under_load(self):
        threads, found = self.storm(20, 25)
        self.assertEqual(self.settle(threads, found), {200})
        self.assertEqual(len(found), 500)

    def test_a_held_lock_is_503_in_time_and_it_recovers(self):
        with pf.FileLock(self.path('state', 'store.lock'),
                         self.world()) as lock:
            self.addCleanup(lock.close)
            threads, found = self.storm(4, 1)
            self.assertEqual(self.get('/healthz').status, 200)
            for thread in threads:
                thread.join(30)
        self.assertEqual(self.settle(threads, found), {503})
        self.assertEqual(self.post(ECHO).status, 200)

    def test_a_database_locked_by_others_is_503_in_time(self):
        con = sqlite3.connect(self.path('state', 'preflight.db'),
                              isolation_level=None)
        self.addCleanup(con.close)
        con.execute('begin immediate')
        threads, found = self.storm(4, 1)
        for thread in threads:
            thread.join(30)
        self.assertIn('busy', self.post(ECHO).error)
        con.execute('rollback')
        self.assertEqual(self.settle(threads, found), {503})
        self.assertEqual(self.post(ECHO).status, 200)

    def test_a_lock_held_for_a_moment_costs_only_that(self):
        with pf.FileLock(self.path('state', 'store.lock'),
                         self.world()) as lock:
            self.addCleanup(lock.close)
            threads, found = self.storm(4, 1)
            time.sleep(0.05)
        self.assertEqual(self.settle(threads, found), {200})

    @unittest.skipUnless(sys.platform == 'linux', 'prlimit is of Linux')
    def test_a_full_disk_is_503_for_exactly_what_was_not_written(self):
        import resource
        size = os.path.getsize(self.path('state', 'preflight.db'))
        self.start_serve(preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY)))
        statuses = self.settle(*self.storm(8, 10))
        self.assertIn(503, statuses)
        self.assertIn('disk I/O error', self.post(ECHO).error)
        self.assertEqual(self.get('/healthz').status, 200)
        resource.prlimit(self.server.process.pid, resource.RLIMIT_FSIZE,
                         (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.assertEqual(self.settle(*self.storm(8, 3)), {200})

    def test_a_state_moved_aside_is_not_written_to_any_more(self):
        self.home = self.path('moving')
        self.look()
        self.start_serve()
        self.assertEqual(self.ask_ids('s:echo').tools[0]['status'], 'ready')
        os.rename(self.path('moving', 'preflight.db'), self.path('old.db'))
        reply = self.ask_ids('s:echo', X_Request_Id='anew')
        self.assertEqual(reply.tools[0]['reason'], 'server_initializing')
        self.assertEqual(len(self.records(request_id='anew')), 1)
        self.look()
        self.assertEqual(self.ask_ids('s:echo').tools[0]['status'], 'ready')

    def test_thirty_checks_a_sync_and_a_loaded_server_at_once(self):
        self.start_serve(patch='')
        threads, found = self.storm(8, 40)
        words = [sys.executable, SCRIPT, '--home', self.home, '--config',
                 self.config]
        children = [subprocess.Popen(
            words + ['tools', 'preflight', 's:echo', '--request-id',
                     'cli-%d' % number], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL) for number in range(30)]
        children.append(subprocess.Popen(words + ['sync'],
                                         stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL))
        self.assertEqual({child.wait(60) for child in children}, {0})
        self.assertEqual(self.settle(threads, found), {200})
        self.assertEqual(sum(row['request_id'].startswith('cli-')
                             for row in self.records(source='cli')), 30)


class Test22ServeFresh(ServeCase):
    """What others decide or break meanwhile is seen by the next request."""

    def shared(self):
        self.entry = self.serve(tools=[tool()])
        self.configure({'s': self.entry})
        self.look()
        self.start_serve()

    def setUp(self):
        super().setUp()
        self.configure({'s': self.entry})

    def reason(self):
        """Check s:echo: its reason, or ready."""
        row = self.ask_ids('s:echo').tools[0]
        return row.get('reason', row['status'])

    def test_what_the_command_line_decides(self):
        self.assertEqual(self.reason(), 'ready')
        for words, expected in (
                ('tools block s:echo', 'tool_blocked_by_user'),
                ('tools unblock s:echo', 'ready'),
                ('servers disable s', 'server_disabled'),
                ('servers enable s', 'ready'),
                ('servers quarantine s', 'server_quarantined'),
                ('servers approve s', 'ready')):
            self.cli(*words.split(' '))
            self.assertEqual((words, self.reason()), (words, expected))

    def test_a_sync_and_an_approve(self):
        self.serve(tools=[tool(description='Other')])
        self.look()
        self.assertEqual(self.reason(), 'tool_changed')
        self.cli('tools', 'approve', 's:echo', '--yes')
        self.assertEqual(self.reason(), 'ready')

    def test_an_answer_kept_is_not_kept_past_its_age(self):
        self.configure({'s': dict(self.entry, max_age='900ms')})
        self.look()
        self.assertEqual(self.reason(), 'ready')
        self.wait_for(lambda: self.reason() == 'server_unhealthy')
        row = self.ask_ids('s:echo').tools[0]
        self.assertEqual(row['cause'], 'stale')
        self.configure({'s': self.entry})
        self.assertEqual(self.reason(), 'ready')

    def test_an_edited_config(self):
        for more, expected in (
                ({'disabled_tools': ['echo']}, 'tool_denied_by_config'),
                ({'enabled': False}, 'server_disabled'),
                ({'args': self.entry['args'] + ['x']}, 'server_quarantined'),
                ({}, 'ready')):
            self.configure({'s': dict(self.entry, **more)})
            self.assertEqual(self.reason(), expected)
        self.configure({})
        self.assertEqual(self.reason(), 'server_not_configured')

    def test_an_edit_right_after_another_of_the_same_length(self):
        for word, expected in (('echo', 'tool_denied_by_config'),
                               ('ohce', 'ready')) * 3:
            self.configure({'s': dict(self.entry, disabled_tools=[word])})
            self.assertEqual(self.reason(), expected)

    def test_a_broken_config_is_503_until_it_is_mended(self):
        before = len(self.records())
        self.write('config.json', '{"mcpServers":\n {"s": ')
        for _ in range(2):
            for reply in (self.post(ECHO), self.get('/api/v1/servers'),
                          self.get('/api/v1/tools'), self.get('/metrics'),
                          self.get('/readyz?tool=s:echo'),
                          self.get('/events')):
                self.assertEqual(reply.status, 503)
                self.assertIs(reply.json['success'], False)
                self.assertIn('config.json', reply.error)
                self.assertIn('line 2', reply.error)
        self.assertEqual(self.get('/readyz').body, b'unready\n')
        self.assertEqual(self.get('/healthz').body, b'ok\n')
        self.assertEqual(len(self.records()), before)
        self.configure({'s': self.entry})
        self.assertEqual(self.reason(), 'ready')
        self.assertEqual(self.get('/readyz').body, b'ready\n')

    def test_a_config_that_is_only_being_written_is_tried_once_more(self):
        self.write('config.json', '{"mcpServers":')
        wire = self.wire().send(self.request('POST', GATE, ECHO))
        time.sleep(0.05)
        self.configure({'s': self.entry})
        self.assertEqual(wire.reply().status, 200)

    def test_a_config_that_is_gone_is_503(self):
        os.remove(self.config)
        reply = self.post(ECHO)
        self.assertEqual(reply.status, 503)
        self.assertIn(self.config, reply.error)


class Test22ServeLock(ServeCase):
    """A service whose approvals are in a lockfile sees it change."""

    def shared(self):
        self.entry = self.serve(tools=[tool(), tool('b')])
        self.configure({'s': self.entry}, approvals='lockfile')
        self.look()
        self.cli('tools', 'lock', 's:echo', '--yes')
        self.start_serve()

    def reasons(self):
        """Check s:echo and s:b at the service: the reasons of both."""
        return [row.get('reason', row['status'])
                for row in self.ask_ids('s:echo', 's:b').tools]

    def test_it_follows_the_file(self):
        pending = ['ready', 'tool_pending_approval']
        self.assertEqual(self.reasons(), pending)
        held = self.read('preflight.lock')
        for _ in range(3):
            self.cli('tools', 'lock', 's:b', '--yes')
            self.assertEqual(self.reasons(), ['ready', 'ready'])
            self.write('preflight.lock', held)
            self.assertEqual(self.reasons(), pending)
        before = len(self.records(type='preflight'))
        for data, why in (('{', 'is not JSON'), (None, 'is not there')):
            if data is None:
                os.unlink(self.path('preflight.lock'))
            else:
                self.write('preflight.lock', data)
            for reply in (self.post(ECHO), self.get('/readyz?tool=s:echo'),
                          self.get('/api/v1/tools'), self.post(ECHO)):
                self.assertEqual(reply.status, 503)
                self.assertIn('preflight.lock: ' + why, reply.error)
        self.assertEqual(len(self.records(type='preflight')), before)
        self.write('preflight.lock', held)
        self.assertEqual(self.reasons(), pending)

    def test_without_the_file_it_starts_nothing(self):
        """Or a pull request that takes it away has its command run."""
        held = self.read('preflight.lock')
        self.addCleanup(self.write, 'preflight.lock', held)
        self.addCleanup(self.configure, {'s': self.entry},
                        approvals='lockfile')
        self.start_serve('--listen', '127.0.0.1:0', '--sync-interval',
                         '50ms')
        os.unlink(self.path('preflight.lock'))
        self.wait_for(lambda: 'sync: not started: lockfile '
                      in self.server.log())
        self.configure({'s': self.serve('t', starts=self.path('starts'))},
                       approvals='lockfile')
        before = self.server.log().count('not started')
        self.wait_for(lambda: self.server.log().count(
            'not started') > before + 1)
        self.assertFalse(os.path.exists(self.path('starts')))
        self.write('preflight.lock', held)
        self.wait_for(lambda: self.ask_ids('s:echo').tools[0].get('reason')
                      == 'server_quarantined')
        self.assertEqual(self.server.stop(), 143)
        self.assertFalse(os.path.exists(self.path('starts')))

    def test_the_config_names_another_file(self):
        top = {'approvals': 'lockfile', 'lockfile': 'other.lock'}
        self.configure({'s': self.entry}, **top)
        for _ in range(2):
            reply = self.post(ECHO)
            self.assertEqual(reply.status, 503)
            self.assertIn('other.lock: is not there', reply.error)
        self.cli('tools', 'lock', '--all', '--yes')
        self.assertEqual(self.reasons(), ['ready', 'ready'])
        self.configure({'s': self.entry}, approvals='state')
        self.assertEqual(self.reasons(), ['tool_pending_approval'] * 2)
        self.configure({'s': self.entry}, approvals='lockfile')
        self.assertEqual(self.reasons(), ['ready', 'tool_pending_approval'])


class Test22ServeAround(ServeCase):
    """Events, metrics, readiness, sync and the description of it all."""

    def shared(self):
        self.servers = {name: self.serve(name, tools=[tool()])
                        for name in ('s', 'other')}
        self.configure(self.servers)
        self.look()
        self.start_serve('--listen', '127.0.0.1:0', '--no-sync', '--ready',
                         's:echo,s:echo', '--ready', 'other:echo')
        self.agent = self.token('bot', '--servers', 's')

    def listen(self, **headers):
        """Open an event stream: its Wire, past the greeting."""
        wire = self.wire().send(self.request('GET', '/events', **headers))
        head = wire.read_until(b'\r\n\r\n')
        self.assertIn(b'Content-Type: text/event-stream', head)
        self.assertIn(b'X-Request-Id', head)
        greeting = wire.read_until(b'\n\n').decode()
        self.assertRegex(greeting, r'\A: ready\nid: [0-9]+\Z')
        wire.first = greeting.split(' ')[-1]
        return wire

    def event(self, wire):
        """Read one event: (id or None, kind, data)."""
        text = wire.read_until(b'\n\n').decode()
        lines = dict(line.split(': ', 1) for line in text.split('\n'))
        return lines.get('id'), lines['event'], json.loads(lines['data'])

    def test_a_change_is_told_to_whom_it_concerns(self):
        ours, theirs = self.listen(), self.listen(X_API_Key=self.agent)
        self.cli('servers', 'disable', 'other')
        self.cli('tools', 'block', 's:echo')
        self.addCleanup(self.cli, 'servers', 'enable', 'other')
        self.addCleanup(self.cli, 'tools', 'unblock', 's:echo')
        server = {'server': 'other', 'state': 'disabled'}
        blocked = {'id': 's:echo', 'status': 'unavailable',
                   'reason': 'tool_blocked_by_user'}
        self.assertEqual([self.event(ours)[1:] for _ in range(2)],
                         [('server', server), ('tool', blocked)])
        self.assertEqual(self.event(theirs)[1:], ('tool', blocked))

    def test_a_stream_resumes_over_a_restart(self):
        wire = self.listen()
        self.cli('tools', 'block', 's:echo')
        number = self.event(wire)[0]
        self.assertLess(int(wire.first), int(number))
        self.cli('tools', 'unblock', 's:echo')
        self.serve('other', tools=[tool(), tool('more')])
        self.look('other')
        self.assertEqual(self.ask_ids('s:echo').status, 200)
        self.start_serve()
        again = self.listen(Last_Event_ID=number)
        self.assertEqual(again.first, number)
        found = [self.event(again) for _ in range(3)]
        self.assertEqual([row[1:] for row in found], [
            ('tool', {'id': 's:echo', 'status': 'ready'}),
            ('server', {'server': 'other', 'state': 'ready'}),
            ('tool', {'id': 'other:more', 'status': 'unavailable',
                      'reason': 'tool_pending_approval'})])
        self.assertEqual(found[1][0], found[2][0])
        last = self.listen(Last_Event_ID='999999999')
        self.assertEqual(last.first, self.listen(Last_Event_ID='x').first)
        self.assertEqual(self.event(last)[1:], ('reset', {}))

    def test_a_stream_that_cannot_be_resumed_whole_says_so(self):
        self.start_serve(patch='pf.MAX_REPLAY = 2')
        first = self.listen().first
        for action in 'block', 'unblock':
            self.cli('tools', action, 's:echo')
        self.assertEqual(self.event(self.listen(Last_Event_ID=first))[1],
                         'tool')
        self.cli('tools', 'unblock', 's:echo')
        late = self.listen(Last_Event_ID=first)
        self.assertEqual(self.event(late)[1:], ('reset', {}))
        self.assertEqual(int(late.first), int(first) + 3)
        self.cli('activity', 'prune', '--older-than', '0s')
        self.assertEqual(self.event(self.listen(Last_Event_ID=first))[1:],
                         ('reset', {}))

    def test_growing_stale_is_an_event_without_an_id(self):
        servers = dict(self.servers, s=dict(self.servers['s'],
                                            max_age='700ms'))
        self.configure(servers)
        self.addCleanup(self.configure, self.servers)
        self.look('s')
        wire = self.listen()
        found = self.event(wire)
        self.assertEqual(found, (None, 'server', {'server': 's',
                                                  'state': 'stale'}))

    def test_a_server_that_left_the_config_is_not_spoken_of(self):
        self.cli('servers', 'disable', 'other')
        self.addCleanup(self.cli, 'servers', 'enable', 'other')
        self.configure({'s': self.servers['s']})
        self.addCleanup(self.configure, self.servers)
        wire = self.listen(Last_Event_ID='1')
        self.cli('tools', 'block', 's:nope')
        self.addCleanup(self.cli, 'tools', 'unblock', 's:nope')
        found = self.event(wire)
        while found[2].get('id') != 's:nope':
            self.assertNotEqual(found[2].get('server'), 'other')
            found = self.event(wire)

    def test_a_stream_of_a_revoked_token_ends(self):
        secret = self.token('listener', '--servers', 's')
        wire = self.listen(X_API_Key=secret)
        self.cli('token', 'revoke', 'listener')
        self.assertEqual(wire.read_until(b'never'), b'')

    def test_streams_and_connections_are_bounded(self):
        self.start_serve(patch='pf.MAX_PEERS = 5; pf.MAX_STREAMS = 1; '
                         'pf.BEAT_S = 0.05')
        stream = self.listen()
        self.assertEqual(stream.read_until(b'\n\n'), b': still here')
        self.assertEqual(self.get('/events').status, 503)
        held = [self.wire() for _ in range(9)]
        self.assertEqual(self.get('/healthz').status, 200)
        self.assertTrue(held[0].is_ended())
        self.assertEqual(stream.read_until(b'\n\n'), b': still here')

    def test_metrics_are_prometheus_text_and_add_up(self):
        def read():
            text = self.get('/metrics').body.decode()
            return text, {line.rpartition(' ')[0]: float(
                line.rpartition(' ')[2]) for line in text.splitlines()
                if line[0] != '#'}
        before = read()[1]
        self.ask_ids('s:echo', 's:nope')
        self.ask_ids('s:echo')
        text, after = read()
        for line in text.splitlines():
            self.assertRegex(line, r'\A(# (HELP|TYPE) preflight_\w+ .+|'
                             r'preflight_\w+(\{\w+="\w+"\})? [0-9.]+)\Z')
        for name, step in (
                ('checks_total{verdict="ready"}', 1),
                ('checks_total{verdict="unknown_ids"}', 1),
                ('checks_total{verdict="blocked"}', 0),
                ('results_total{reason="ready"}', 2),
                ('results_total{reason="not_found"}', 1),
                ('http_requests_total{status="200"}', 3),
                ('audit_write_seconds_count', 2)):
            name = 'preflight_' + name
            self.assertEqual(after[name] - before.get(name, 0), step, name)
        self.assertEqual(sum(value for name, value in after.items() if
                             name.startswith('preflight_servers{')), 2)
        self.assertEqual(text.count('# TYPE'), len(set(re.findall(
            r'# TYPE (\w+)', text))))

    def test_readyz_stands_for_a_fixed_set(self):
        before = len(self.records(type='preflight'))
        self.assertEqual(self.get('/readyz', X_API_Key=None).body,
                         b'ready\n')
        self.cli('servers', 'disable', 'other')
        reply = self.get('/readyz', X_API_Key=None)
        self.cli('servers', 'enable', 'other')
        self.assertEqual((reply.status, reply.body), (503, b'unready\n'))
        self.assertEqual(len(self.records(type='preflight')), before)

    def test_the_description_names_every_route_and_the_limits(self):
        document = self.get('/api/v1/openapi.json').json
        self.assertEqual(document['info']['version'], pf.VERSION)
        found = {re.sub(r'\{\w+\}', '{}', path): {
            method.upper() for method in row}
            for path, row in document['paths'].items()}
        self.assertEqual(found, {path: set(row) for path, row
                                 in pf.ROUTES.items()})
        schema = document['paths'][GATE]['post']['requestBody'][
            'content']['application/json']['schema']['properties']
        self.assertEqual(set(schema), set(pf.CHECK_KEYS))
        self.assertEqual(set(schema['policy']['properties']),
                         set(pf.FILTERS))
        self.assertEqual(schema['tools']['maxItems'], pf.MAX_IDS)
        self.assertEqual(schema['wait_ms']['maximum'], pf.MAX_WAIT_MS)
        schemas = document['components']['schemas']
        self.assertEqual(list(schemas['result']['properties']),
                         list(pf.Answer._fields))
        for name in re.findall(r'"#/components/([^"]+)"', json.dumps(
                document)):
            kind, _, key = name.partition('/')
            self.assertIn(key, document['components'][kind])

    def test_a_sync_is_started_and_answered_at_once(self):
        starts = self.path('starts')
        self.serve('s', tools=[tool()], starts=starts)
        self.addCleanup(self.serve, 's', tools=[tool()])
        reply = self.post({'servers': ['s']}, '/api/v1/sync')
        self.assertEqual(reply.status, 202)
        self.assertEqual(reply.json, {'success': True, 'data': {
            'id': reply.headers['X-Request-Id']}})
        self.wait_for(lambda: os.path.exists(starts))
        for body, word in (({'servers': ['zz']}, '"zz"'),
                           ({'servers': 's'}, 'servers must be'),
                           ({'names': []}, 'unknown key')):
            reply = self.post(body, '/api/v1/sync')
            self.assertEqual(reply.status, 400)
            self.assertIn(word, reply.error)

    def test_syncs_asked_for_meanwhile_are_one_more(self):
        starts = self.path('twice')
        self.serve('s', tools=[tool()], starts=starts,
                   sleep={'initialize': 0.3})
        self.addCleanup(self.serve, 's', tools=[tool()])
        ids = []
        for body in b'{"servers":["s"]}', b'{"servers":["s"]}', b'', b'{}':
            reply = self.post(body, '/api/v1/sync')
            self.assertEqual(reply.status, 202)
            ids.append(reply.json['data']['id'])
        self.assertEqual(len(set(ids)), 2)      # those of the two runs
        self.assertEqual(ids[1:], ids[1:2] * 3)

        def count():
            return self.read(starts).count('\n') + 1
        self.wait_for(lambda: os.path.exists(starts) and count() == 2)
        time.sleep(0.4)
        self.assertEqual(count(), 2)

    def test_the_records_of_a_sync_carry_its_id(self):
        self.serve('s', tools=[tool(), tool('late')])
        self.addCleanup(self.serve, 's', tools=[tool()])
        number = self.post({'servers': ['s']}, '/api/v1/sync',
                           X_Request_Id='run-7').json['data']['id']
        self.assertEqual(number, 'run-7')

        def found():
            return self.cli('activity', 'list', '--request-id', 'run-7',
                            '--type', 'sync', '-o', 'json').json['activities']
        self.wait_for(found)
        self.assertEqual(found()[0]['metadata']['added'], ['s:late'])


class Test22ServeStart(ServeCase):
    """How it starts, what it listens on, and how it ends."""

    def shared(self):
        self.one_server(tool(annotations=SAFE))
        self.key = self.port = None

    def refused(self, *words, **more):
        """Start a server that must not start: what it says."""
        server = Server(self, ('--no-sync',) + words,
                        more.pop('patch', ''), more)
        self.assertEqual(server.process.wait(timeout=30), 1)
        return server.log()

    def mode(self, path):
        """Give the permission bits of a path."""
        return stat.S_IMODE(os.lstat(path).st_mode)

    def test_a_socket_is_private_whatever_the_umask(self):
        path = self.path('run', 'deep', 'sock')
        server = self.start_serve('--socket', path, '--no-sync',
                                  preexec_fn=lambda: os.umask(0))
        self.assertIsNone(server.port)          # and no other address
        self.assertEqual([self.mode(place) for place in (
            path, os.path.dirname(path), self.path('run'))],
            [0o600, 0o700, 0o700])
        wire = self.wire(path).send(b'GET /api/v1/servers HTTP/1.0\r\n\r\n')
        self.assertEqual(wire.reply().status, 200)
        wire = self.wire(path).send(self.request(
            'POST', GATE, ECHO, X_API_Key=None, Host='evil.example'))
        self.assertEqual(wire.reply().status, 200)
        self.assertEqual(server.stop(), 143)
        self.assertFalse(os.path.exists(path))

    def test_a_stale_socket_is_replaced_and_a_live_one_is_not(self):
        path = self.path('sock2')
        self.start_serve('--socket', path, '--no-sync').stop(signal.SIGKILL)
        self.assertTrue(os.path.exists(path))
        server = self.start_serve('--socket', path, '--no-sync')
        self.assertIn('another server', self.refused('--socket', path))
        self.assertEqual(self.wire(path).send(self.request(
            'GET', '/healthz', X_API_Key=None)).reply().status, 200)
        # Another server's socket stands there now: it must stay.
        os.unlink(path)
        later = self.start_serve('--socket', path, '--no-sync')
        self.assertEqual(server.stop(), 143)
        self.assertTrue(os.path.exists(path))
        self.assertEqual(later.stop(), 143)

    def test_what_is_no_socket_of_ours_is_left_alone(self):
        path = self.write('file', 'precious')
        self.assertIn('not a socket', self.refused('--socket', path))
        self.assertEqual(self.read('file'), 'precious')
        os.symlink(path, self.path('link'))
        self.assertIn('not a socket', self.refused('--socket',
                                                   self.path('link')))

    def test_a_long_path_is_refused_before_anything_is_bound(self):
        said = self.refused('--socket', self.path('x' * 120))
        self.assertIn('at most 103 bytes', said)
        self.assertFalse(os.path.exists(self.path('x' * 120)))

    @unittest.skipIf(os.geteuid(), 'only root can become somebody else')
    def test_another_user_is_not_served_by_the_socket(self):
        path = self.path('sock3')
        self.start_serve('--socket', path, '--no-sync')
        os.chmod(path, 0o666)
        os.chmod(self.dir, 0o755)
        code = ('import socket, sys; s = socket.socket(socket.AF_UNIX); '
                's.connect(sys.argv[1]); '
                's.sendall(b"GET /healthz HTTP/1.0\\r\\n\\r\\n"); '
                'print(s.recv(9))')
        child = subprocess.Popen(
            ['/usr/bin/env', 'python3', '-I', '-c', code, path],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd='/',
            env={'PATH': '/usr/bin:/bin'},
            preexec_fn=lambda: os.setuid(65534))
        out, err = child.communicate(timeout=30)
        self.assertNotIn(b'HTTP', out)
        self.assertTrue(b"b''" in out or b'Error' in err, err)

    def test_no_name_is_looked_up_at_the_start(self):
        self.start_serve(patch='import socket; socket.getfqdn = '
                         'socket.gethostbyaddr = lambda *_: 1 / 0')
        self.assertEqual(self.get('/healthz').status, 200)

    def test_beyond_loopback_it_takes_a_key_that_was_there(self):
        self.home = self.path('fresh')
        said = self.refused('--listen', '0.0.0.0:0')
        path = os.path.join(self.home, 'api_key')
        self.assertIn(path, said)
        self.assertEqual(self.mode(path), 0o600)
        self.assertRegex(self.read(path), r'\A[0-9a-f]{64}\Z')
        self.start_serve('--listen', '0.0.0.0:0', '--no-sync')
        self.assertIs(self.get('/readyz?tool=s:echo', Host='10.1.2.3')
                      .json['success'], True)
        self.assertEqual(self.get('/readyz?tool=s:echo', Host='a.example')
                         .status, 403)

    def test_the_key_may_come_from_a_file_or_the_environment(self):
        odd = 'schl\u00fcssel+%41'
        path = self.write('key', '  %s\n' % odd)
        self.home = self.path('keyless')
        self.start_serve('--listen', '127.0.0.1:0', '--no-sync',
                         '--api-key-file', path)
        self.key = odd.encode('utf-8').decode('latin-1')
        self.assertEqual(self.post(ECHO).status, 200)
        self.assertEqual(self.get(
            '/api/v1/servers?apikey=schl%C3%BCssel%2B%2541',
            X_API_Key=None).status, 200)
        self.assertNotIn('schl', self.server.log())
        self.start_serve('--listen', '127.0.0.1:0', '--no-sync',
                         env={'PREFLIGHT_API_KEY': 'hush-3'})
        self.assertEqual(self.post(ECHO, X_API_Key='hush-3').status, 200)
        self.assertFalse(os.path.exists(os.path.join(self.home, 'api_key')))

    def test_options_that_cannot_be_are_refused(self):
        for words, said in (
                (('--listen', 'nowhere'), 'HOST:PORT'),
                (('--listen', ''), 'HOST:PORT'),
                (('--socket', ''), '--socket is empty'),
                (('--ready', ''), '<server>:<tool>'),
                (('--listen', '203.0.113.7:1'), 'cannot listen'),
                (('--listen', 'no..such:1'), 'cannot listen'),
                (('--log-format', 'xml'), 'text or json'),
                (('--ready', 'x'), '<server>:<tool>'),
                (('--sync-interval', '5'), 'not a duration'),
                (('--notify', "a 'b"), 'quotation'),
                (('--tls-cert', 'c'), 'go together'),
                (('--tls-cert', 'c', '--tls-key', 'k'), 'cannot use'),
                (('--api-key-file', 'missing'), 'missing'),
                (('--api-key-file', os.devnull), 'is empty')):
            with self.subTest(words):
                if '--listen' not in words:
                    words += ('--listen', '127.0.0.1:0')
                said_by_it = self.refused(*words)
                self.assertIn(said, said_by_it)
                self.assertNotIn('Traceback', said_by_it)

    def test_a_port_in_use_is_named(self):
        with socket.socket() as held:
            held.bind(('127.0.0.1', 0))
            held.listen(1)
            place = '127.0.0.1:%d' % held.getsockname()[1]
            self.assertIn('in use', self.refused('--listen', place))

    @unittest.skipUnless(os.path.exists('/usr/bin/openssl'), 'no openssl')
    def test_tls(self):
        import ssl
        cert, key = self.path('cert.pem'), self.path('key.pem')
        self.home = self.path('tls')
        self.look()
        subprocess.check_call(
            ['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt',
             'ec_paramgen_curve:P-256', '-nodes', '-days', '2', '-subj',
             '/CN=localhost', '-keyout', key, '-out', cert],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.start_serve('--listen', '127.0.0.1:0', '--no-sync',
                         '--tls-cert', cert, '--tls-key', key,
                         patch='pf.LINGER_S = 0.2; pf.SWEEP_S = 0.05')
        context = ssl.create_default_context(cafile=cert)
        context.check_hostname = False
        wire = self.wire(context=context).send(self.request(
            'POST', GATE, ECHO) * 2)
        for _ in range(2):
            self.assertEqual(wire.reply().tools[0]['status'], 'ready')
        wire.send(b'nonsense\r\n\r\n')
        self.assertEqual(wire.reply().status, 400)
        self.assertTrue(wire.is_ended())
        strict = ssl.create_default_context()
        strict.check_hostname = False
        with self.assertRaises(ssl.SSLError):
            self.wire(context=strict)
        self.assertEqual(self.server.stop(), 143)
        self.assertNotIn('Traceback', self.server.log())

    def test_json_logs_are_one_object_a_line_and_hold_no_secret(self):
        self.home = self.path('logged')
        self.servers = {'s': dict(
            self.serve('s', tools=[tool()], die='start',
                       stderr='Bearer hush-4'), env={'API_KEY': 'hush-5'})}
        self.configure(self.servers)
        self.addCleanup(self.configure, {'s': self.entry})
        self.addCleanup(self.serve, 's', tools=[tool()])
        server = self.start_serve('--listen', '127.0.0.1:0', '--log-format',
                                  'json', env={'PREFLIGHT_API_KEY': 'hush-6'})
        self.get('/api/v1/servers?apikey=hush-6', X_API_Key=None)
        self.get('/a%22b%5c%0a', X_API_Key='hush-7', X_Request_Id='last')
        self.wait_for(lambda: '"last"' in server.log())
        self.assertEqual(server.stop(), 143)
        rows = [json.loads(line) for line in server.log().splitlines()]
        self.assertIn('listening on', rows[0]['message'])
        found = next(row for row in rows if row.get('request_id') == 'last')
        self.assertEqual(list(found), ['time', 'method', 'path', 'status',
                                       'ms', 'request_id', 'actor'])
        self.assertEqual((found['path'], found['status']),
                         ('/a%22b%5c%0a', 404))
        self.assertNotIn('hush-', server.log())

    def test_it_looks_at_the_servers_at_the_start_and_every_interval(self):
        starts = self.path('each')
        self.serve('s', tools=[tool()], starts=starts)
        self.addCleanup(self.serve, 's', tools=[tool()])

        def count():
            return self.read(starts).count('\n') + 1
        self.start_serve('--listen', '127.0.0.1:0', '--sync-interval',
                         '100ms')
        self.wait_for(lambda: os.path.exists(starts) and count() >= 3)
        self.assertEqual(self.server.stop(), 143)
        before = count()
        for words in ('--no-sync',), ('--sync-interval', '0'):
            self.start_serve('--listen', '127.0.0.1:0', *words)
            self.get('/healthz')
        time.sleep(0.3)
        self.assertEqual(count(), before)

    def test_its_syncs_notify(self):
        taken = self.path('taken')
        self.cli('contract', 'add', 'job', 's:echo')
        self.serve('s', tools=[tool('two', 'Two')])
        self.addCleanup(self.serve, 's', tools=[tool()])
        self.start_serve(
            '--listen', '127.0.0.1:0', '--notify', ' '.join(map(
                shlex.quote, ['sh', '-c', 'cat > "$0.part"; '
                              'mv "$0.part" "$0"', taken])))
        self.wait_for(lambda: os.path.exists(taken))
        self.wait_for(lambda: 'sync: job: s:echo vanished'
                      in self.server.log())
        self.assertEqual(json.loads(self.read(taken))['events'][0]['event'],
                         'vanished')

    def test_a_sync_under_way_ends_with_the_server(self):
        starts = self.path('hangs')
        self.serve('s', starts=starts, sleep={'initialize': 60},
                   ignore_term=True)
        self.addCleanup(self.serve, 's', tools=[tool()])
        self.start_serve('--listen', '127.0.0.1:0')
        self.wait_for(lambda: os.path.exists(starts))
        self.assertEqual(self.get('/healthz').status, 200)
        self.assertEqual(self.server.stop(), 143)
        pid = int(self.read(starts).split()[0])
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)
        row = self.check('s:echo').json['tools'][0]
        self.assertNotEqual(row.get('cause'), 'interrupted')

    def test_a_sync_that_cannot_run_is_told_and_backed_off(self):
        self.start_serve('--listen', '127.0.0.1:0', '--sync-interval',
                         '50ms', patch='import subprocess; subprocess.Popen'
                         ' = lambda *_, **more: open("/nowhere")')
        self.wait_for(lambda: self.server.log().count(
            'sync cannot be started') >= 3)
        self.assertEqual(self.get('/healthz').status, 200)

    def test_signals_end_it_with_their_number(self):
        for number in signal.SIGINT, signal.SIGHUP:
            self.start_serve()
            self.assertEqual(self.server.stop(number), 128 + number)
            self.assertNotIn('Traceback', self.server.log())


class Test22Pauses(TempCase):
    """Between syncs, in numbers."""

    def test_the_pause_doubles_with_each_failure_up_to_eight_times(self):
        asked = []

        class Loop:
            """Notes the pauses asked for."""

            def call_later(self, seconds, run):
                """Note one."""
                asked.append(seconds)

        class Service:
            """What a Syncer needs of one."""

            loop, is_stopping = Loop(), False
            world = self.world(random=lambda count: b'\x80' * count)

        syncer = pf.Syncer(Service, 1000)
        for code in (0, 10, 1, 1, 1, 1, 1, 12):
            syncer._ended(code)
        self.assertEqual([round(seconds) for seconds in asked],
                         [1, 1, 2, 4, 8, 8, 8, 1])
class ScriptedService(threading.Thread):
    """A service on loopback that answers each request as it is told."""

    def __init__(self, answers):
        super().__init__(daemon=True)
        self.answers, self.seen = list(answers), []
        self.sock = socket.socket()
        self.sock.bind(('127.0.0.1', 0))
        self.sock.listen(8)
        self.url = 'http://127.0.0.1:%d' % self.sock.getsockname()[1]
        self.start()

    def run(self):
        """Answer as many requests as there are answers."""
        for status, kind, body in self.answers:
            try:
                peer, _ = self.sock.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(5)
                self.seen.append(self.read(peer))
                if isinstance(body, dict):
                    body = json.dumps(body)
                peer.sendall(('HTTP/1.1 %d X\r\nContent-Type: %s\r\n'
                              'X-Request-Id: theirs\r\nContent-Length: %d'
                              '\r\nConnection: close\r\n\r\n%s' % (
                                  status, kind, len(body.encode()),
                                  body)).encode())

    def read(self, peer):
        """Read one request: its head and body as text."""
        data = b''
        while b'\r\n\r\n' not in data:
            data += peer.recv(65536)
        head, _, body = data.partition(b'\r\n\r\n')
        length = re.search(rb'(?i)content-length: (\d+)', head)
        while length and len(body) < int(length.group(1)):
            body += peer.recv(65536)
        return head.decode(), body.decode()

    def close(self):
        """Stop listening, and let the thread end."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass                # it is not listening any more
        self.sock.close()
        self.join(10)


def told(*tools, **more):
    """Make the envelope of a check's answer."""
    data = dict({'verdict': 'ready', 'checked_at': '2026-08-27T12:00:00Z',
                 'tools': list(tools)}, **more)
    return 200, 'application/json', {'success': True, 'data': data}


GOOD = {'id': 's:a', 'status': 'ready'}


class Test23Client(TempCase):
    """The command line as a client of serve, or of mcpproxy."""

    def ask(self, answers, *args, **more):
        """Run a command against a scripted service."""
        service = ScriptedService(answers)
        self.addCleanup(service.close)
        env = {'PREFLIGHT_URL': service.url, 'PREFLIGHT_API_KEY': 'k3y'}
        env.update(more)
        done = self.run_cli(*args, env=env, is_placed=False)
        self.seen = service.seen
        return done

    def check_at(self, answer, *args):
        """Run `tools preflight s:a -o json` against one answer."""
        return self.ask([answer], 'tools', 'preflight', 's:a', '-o', 'json',
                        *args)

    def test_the_request_is_the_contracts(self):
        done = self.check_at(
            told(GOOD, waited_ms=0), '--pin', 's:a=sha256/v1:' + 'a' * 64,
            '--read-only-only', '--profile', 'p', '--wait', '2s',
            '--request-id', 'mine')
        self.assertEqual(done.code, 0, done)
        head, body = self.seen[0]
        self.assertTrue(head.startswith('POST /api/v1/preflight HTTP/1.1'))
        for line in ('X-API-Key: k3y', 'X-Request-Id: mine',
                     'X-MCPProxy-Client: cli/' + pf.VERSION):
            self.assertIn(line, head)
        self.assertEqual(json.loads(body), {
            'tools': [{'id': 's:a', 'pin_hash': 'sha256/v1:' + 'a' * 64}],
            'policy': {'read_only_only': True}, 'profile': 'p',
            'wait_ms': 2000})

    def test_the_answer_is_worth_the_worse_of_verdict_and_reasons(self):
        def bad(reason, **more):
            return dict({'id': 's:a', 'status': 'unavailable',
                         'reason': reason, 'retryable': True}, **more)
        rows = (
            (GOOD, 'ready', 0), (GOOD, 'blocked', 11),
            (GOOD, 'degraded_retryable', 10), (GOOD, 'unknown_ids', 12),
            (GOOD, 'fantastic', 11), (bad('server_unhealthy'), 'ready', 10),
            (bad('server_saturated'), 'ready', 11),
            (bad('not_found'), 'degraded_retryable', 12),
            (bad('oauth_required'), 'unknown_ids', 12))
        for item, verdict, code in rows:
            with self.subTest(item=item, verdict=verdict):
                done = self.check_at(told(item, verdict=verdict))
                self.assertEqual(done.code, code, done)
                self.assertEqual(pf.EXIT_CODES[done.json['verdict']], code)

    def test_a_reason_of_the_future_is_not_retryable(self):
        done = self.check_at(told({'id': 's:a', 'status': 'unavailable',
                                   'reason': 'brand_new',
                                   'retryable': True}))
        self.assertIs(done.json['tools'][0]['retryable'], False)

    def test_further_fields_are_no_reason_to_fail(self):
        done = self.check_at(told(dict(GOOD, extra={'a': 1}), more=[1]))
        self.assertEqual(done.code, 0, done)

    def test_what_is_not_a_checks_answer_is_exit_1(self):
        page = (200, 'text/html', '<html>sign in</html>')
        plain = (200, 'application/json', '{"verdict": "ready"}')
        rows = (
            page, plain, told(), told(dict(GOOD, id='s:b')),
            told(GOOD, dict(GOOD, id='s:b')), told(dict(GOOD, status='ok')),
            told({'id': 's:a', 'status': 'unavailable'}),
            told(dict(GOOD, reason='not_found')), told('s:a'),
            told(GOOD, verdict=None), told(GOOD, tools={}),
            told(GOOD, waited_ms='1'), told(dict(GOOD, hash=5)),
            (200, 'application/json', {'success': 'true', 'data': {}}),
            (204, 'application/json', ''),
            (503, 'application/json', told(GOOD)[2]),
            (200, 'application/json', '{"success":true,"success":true}'))
        for answer in rows:
            with self.subTest(answer=answer):
                done = self.check_at(answer)
                self.assertEqual((done.code, done.out), (1, ''), done)
                self.assertNotIn('Traceback', done.err)
                self.assertNotIn('internal', done.err)

    def test_a_refusal_is_told_in_the_services_words(self):
        done = self.check_at((401, 'application/json', {
            'success': False, 'error': 'no key\x1b[2J', 'request_id': 'x'}))
        self.assertEqual((done.code, done.out), (1, ''))
        self.assertIn('HTTP 401: no key\\x1b[2J', done.err)

    def test_the_services_request_id_is_printed(self):
        done = self.check_at(told(dict(GOOD), verdict='blocked'))
        self.assertIn('request id: theirs', done.err)

    def test_mcpproxy_lists_are_shown(self):
        def envelope(key, *rows):
            return 200, 'application/json', {
                'success': True, 'data': {key: list(rows)}}
        done = self.ask([envelope('servers', {'name': 'gh',
                                              'status': 'ready'})],
                        'servers', 'list')
        self.assertRegex(done.out, r'(?m)^gh +ready')
        done = self.ask([envelope('tools', {'name': 'x', 'server_name':
                                            'gh'})], 'tools', 'list', 'gh')
        self.assertIn('gh:x', done.out)
        self.assertIn('GET /api/v1/servers/gh/tools', self.seen[0][0])

    def test_usage_is_refused_before_anything_is_sent(self):
        for args in (('tools', 'preflight', '--sync', 's:a'),
                     ('tools', 'preflight', '--wait', '11s', 's:a'),
                     ('tools', 'preflight', '--profile', '', 's:a'),
                     ('tools', 'preflight'), ('sync',), ('config', 'check'),
                     ('tools', 'approve', '--all'), ('activity', 'verify'),
                     ('tools', 'preflight', '--request-id', ' ', 's:a')):
            with self.subTest(args):
                done = self.ask([], *args)
                self.assertEqual((done.code, done.out, self.seen),
                                 (1, '', []), done)

    def test_what_is_local_only_names_the_way_out(self):
        done = self.ask([], 'tools', 'show', 's:a')
        self.assertIn('env -u PREFLIGHT_URL', done.err)

    def test_a_url_of_another_kind_is_refused(self):
        for url in ('ftp://h', 'h:80', 'unix://x', 'http://', 'http://h?x'):
            with self.subTest(url):
                done = self.run_cli('--url', url, 'tools', 'list',
                                    is_placed=False)
                self.assertEqual((done.code, done.out), (1, ''))
                self.assertIn('--url takes', done.err)

    def test_nobody_there_is_exit_1_with_the_place(self):
        free = socket.socket()
        self.addCleanup(free.close)
        free.bind(('127.0.0.1', 0))
        place = '127.0.0.1:%d' % free.getsockname()[1]
        for url in ('http://' + place, 'unix://' + self.path('none')):
            done = self.run_cli('--url', url, 'tools', 'preflight', 's:a',
                                is_placed=False)
            self.assertEqual((done.code, done.out), (1, ''))
            self.assertIn(url[7:], done.err)

    def test_no_proxy_is_asked(self):
        done = self.ask([told(GOOD)], 'tools', 'preflight', 's:a',
                        http_proxy='http://127.0.0.1:9',
                        ALL_PROXY='http://127.0.0.1:9')
        self.assertEqual(done.code, 0, done)

    def test_against_serve_it_is_the_same_answer(self):
        self.configure({'s': self.serve(tools=[tool('a')])})
        self.sync()
        place = self.path('sock')
        child = subprocess.Popen(
            [sys.executable, SCRIPT, '--home', self.home, '--config',
             self.config, 'serve', '--no-sync', '--socket', place],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            self.assertIn(b'listening', child.stderr.readline())
            args = ('tools', 'preflight', 's:a', 's:b', 'nope:x', '-o',
                    'json')
            here = self.run_cli(*args)
            there = self.run_cli('--url', 'unix://' + place, *args,
                                 is_placed=False)
            self.assertEqual((here.code, there.code), (12, 12))
            rows = [[{key: value for key, value in row.items()
                      if key != 'remediation'} for row in
                     done.json['tools']] for done in (here, there)]
            self.assertEqual(rows[0], rows[1])
            listed = self.run_cli('--url', 'unix://' + place, 'activity',
                                  'list', '-o', 'json', '--type',
                                  'preflight', is_placed=False).json
            self.assertEqual([row['source'] for row in
                              listed['activities']], ['cli', 'cli'])
            number = listed['activities'][0]['id']
            shown = self.run_cli('--url', 'unix://' + place, 'activity',
                                 'show', number, '-o', 'json',
                                 is_placed=False)
            self.assertEqual(shown.json['activity']['id'], number)
        finally:
            child.terminate()
            child.stderr.close()
            self.assertEqual(child.wait(), 143)


# ==========================================================================
# The file itself: the map, the line, uphill references, shape, imports
# ==========================================================================


class Section:
    """One section of the program: its map row and its statements."""

    def __init__(self, number, name, uses):
        self.number, self.name, self.uses = number, name, uses
        self.nodes = []


def read_map(source):
    """Parse the table in the module docstring: number -> Section."""
    found = re.findall(r'(?m)^ +([0-9]+) (\w+) .* uses (.+)$',
                       ast.get_docstring(ast.parse(source), False))
    numbers = [int(number) for number, _, _ in found]
    sections = {}
    for number, name, uses in found:
        allowed = {int(number)}
        for part in uses.split(', '):
            low, _, high = part.partition('-')
            if part == 'all':
                allowed.update(numbers)
            elif part != 'nothing':
                allowed.update(range(int(low), int(high or low) + 1))
        sections[int(number)] = Section(int(number), name, allowed)
    return sections


def names_bound(node):
    """List the names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, 'targets', [])
    out = []
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        out += [part.id for part in parts if isinstance(part, ast.Name)]
    return out


def names_read(text, line):
    """List the module names that a top-level statement refers to.

    symtable resolves shadowing, so a local of the same name counts not.
    """
    import symtable
    table = symtable.symtable('\n' * (line - 1) + text, 'x', 'exec')
    out, todo = set(), [table]
    while todo:
        scope = todo.pop()
        todo.extend(scope.get_children())
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (symbol.is_global()
                                           or scope is table):
                out.add(symbol.get_name())
    return out


class Program:
    """The program's source, cut into sections and statements."""

    def __init__(self):
        with open(SCRIPT, encoding='utf-8') as file:
            self.source = file.read()
        self.lines = self.source.split('\n')
        self.tree = ast.parse(self.source)
        self.sections = read_map(self.source)
        self.banners = [
            (int(found.group(1)), found.group(2), n) for n, found in (
                (n, re.match(r'# ([0-9]+)\. (\w+)', line))
                for n, line in enumerate(self.lines, 1)) if found
            and self.lines[n - 2].startswith('# =====')]
        self.starts = self._starts()

    def _starts(self):
        """Give each top-level statement's first line, decorators too."""
        starts = []
        for node in self.tree.body:
            lines = [node.lineno] + [
                d.lineno for d in getattr(node, 'decorator_list', ())]
            starts.append(min(lines))
        starts[0] = 1           # before 3.8 a docstring's line is its last
        return starts + [len(self.lines) + 1]

    def section_at(self, line):
        """Give the number of the section a line stands in, 0 before."""
        return max([0] + [n for n, _, at in self.banners if at <= line])

    def statements(self):
        """Iterate over (node, first line, text) of the top level."""
        for n, node in enumerate(self.tree.body):
            first, after = self.starts[n], self.starts[n + 1]
            while after - 1 > first and re.match(r'\s*(#.*)?$',
                                                 self.lines[after - 2]):
                after -= 1
            yield node, first, '\n'.join(self.lines[first - 1:after - 1])

    def functions(self):
        """Iterate over (name, number of lines, node) of every function."""
        for node, first, text in self.statements():
            yield from self._functions(node, text.count('\n') + first)

    def _functions(self, node, last):
        if isinstance(node, ast.FunctionDef):
            yield node.name, last - node.lineno + 1, node
        elif isinstance(node, ast.ClassDef):
            body = node.body
            for n, item in enumerate(body):
                end = last
                if n + 1 < len(body):
                    after = body[n + 1]
                    end = min([after.lineno] + [
                        d.lineno for d in getattr(after, 'decorator_list',
                                                  ())]) - 2
                yield from self._functions(item, end)


class TestLayout(unittest.TestCase):
    """The map holds, and every reference points up the page."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.program = Program()

    def test_banners_are_the_maps_rows_in_order(self):
        rows = [(s.number, s.name)
                for s in self.program.sections.values()]
        self.assertEqual([(n, name) for n, name, _ in self.program.banners],
                         rows)
        self.assertEqual(rows, sorted(rows))
        self.assertGreater(len(rows), 12)

    def test_references_point_up_and_only_where_the_map_allows(self):
        home, faults = {}, []
        for node, first, _ in self.program.statements():
            here = self.program.section_at(first)
            for name in names_bound(node):
                home.setdefault(name, (first, here))
        for node, first, text in self.program.statements():
            here = self.program.section_at(first)
            mine = names_bound(node)
            for name in names_read(text, first):
                line, section = home.get(name, (0, 0))
                if not line or name in mine or not here:
                    continue
                if line > first:
                    faults.append('line %d refers down to %s' % (first,
                                                                 name))
                if section not in self.program.sections[here].uses:
                    faults.append('line %d: section %d uses %s of %d' % (
                        first, here, name, section))
        self.assertEqual(faults, [])

    def test_no_name_is_bound_twice(self):
        seen, twice = set(), []
        for node, _, _ in self.program.statements():
            for name in names_bound(node):
                if name in seen and not isinstance(node, ast.Assign):
                    twice.append(name)
                seen.add(name)
        self.assertEqual(twice, [])

    def test_pure_sections_reach_no_file_socket_process_or_clock(self):
        allowed = {
            'json': None, 're': None, 'difflib': None, 'hashlib': None,
            'calendar': None, 'unicodedata': None, 'urllib.parse': None,
            'base64': None, 'binascii': None, 'html': None, 'bisect': None,
            'ipaddress': None,
            'time': {'strftime', 'gmtime'},
            'os': {'path', 'sep', 'pathsep', 'name'},
            'os.path': {'dirname', 'basename', 'join', 'isabs', 'normpath',
                        'splitext', 'commonprefix'}}
        faults = []
        for node, first, _ in self.program.statements():
            here = self.program.section_at(first)
            if not 0 < here < 14:
                continue
            for item in ast.walk(node):
                faults += self._impurities(item, allowed)
        self.assertEqual(faults, [])

    def _impurities(self, item, allowed):
        if isinstance(item, ast.Import):
            return ['line %d imports %s' % (item.lineno, alias.name)
                    for alias in item.names if alias.name not in allowed]
        if isinstance(item, ast.ImportFrom):
            if item.module in allowed:
                return []
            return ['line %d imports from %s' % (item.lineno, item.module)]
        if isinstance(item, ast.Name) and item.id in (
                'open', 'print', 'input', 'exec', 'eval', '__import__'):
            return ['line %d uses %s' % (item.lineno, item.id)]
        if isinstance(item, ast.Attribute):
            owner = self._dotted(item.value)
            if allowed.get(owner) and item.attr not in allowed[owner]:
                return ['line %d uses %s.%s' % (item.lineno, owner,
                                                item.attr)]
            if owner == 'sys':
                return ['line %d uses sys' % item.lineno]
        return []

    def _dotted(self, node):
        if isinstance(node, ast.Attribute):
            return self._dotted(node.value) + '.' + node.attr
        return node.id if isinstance(node, ast.Name) else ''

    def test_the_line_stands_between_13_and_14(self):
        at = next(n for n, line in enumerate(self.program.lines, 1)
                  if line.startswith('# == below this line'))
        before = [n for n, _, line in self.program.banners if line < at]
        after = [n for n, _, line in self.program.banners if line > at]
        self.assertLess(max(before), 14)
        self.assertEqual(min(after), 14)

    def test_imports_at_the_top_are_these_and_no_others(self):
        found = []
        for node in self.program.tree.body:
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append(node.module)
        self.assertEqual(found, ['sys', 'json', 'os', 're', 'time',
                                 'collections'])

    def test_late_imports_open_their_function(self):
        faults = []
        for name, _, node in self.program.functions():
            body = list(node.body)
            if ast.get_docstring(node) is not None:
                body = body[1:]
            while body and isinstance(body[0], (ast.Import,
                                                ast.ImportFrom)):
                body = body[1:]
            for item in body:
                for inner in ast.walk(item):
                    if isinstance(inner, (ast.Import, ast.ImportFrom)):
                        if not self._is_by_system(name):
                            faults.append('%s, line %d' % (name,
                                                           inner.lineno))
        self.assertEqual(faults, [])

    def _is_by_system(self, name):
        # msvcrt or fcntl, by system; what only one branch needs and is
        # dear (a traceback, a picture of a rare message).
        return name in ('_take', '__exit__', 'answer_request', '_fail',
                        'text_width')

    def test_lines_are_at_most_79_wide_and_clean(self):
        faults = [n for n, line in enumerate(self.program.lines, 1)
                  if len(line) > 79 or line.rstrip() != line
                  or '\t' in line]
        self.assertEqual(faults, [])

    def test_functions_are_short(self):
        sizes = {}
        for name, size, node in self.program.functions():
            doc = ast.get_docstring(node, False)
            size -= doc.count('\n') + 1 if doc is not None else 0
            sizes[name, node.lineno] = size
        long = {key: size for key, size in sizes.items() if size > 60}
        self.assertEqual(long, {})
        middle = sorted(sizes.values())[len(sizes) // 2]
        self.assertLessEqual(middle, 12)

    def test_functions_take_at_most_five_arguments(self):
        faults = []
        for name, _, node in self.program.functions():
            names = [arg.arg for arg in node.args.args
                     if arg.arg != 'self']
            if len(names) > 5:
                faults.append(name)
        self.assertEqual(faults, [])

    def test_nesting_is_at_most_four_deep(self):
        kinds = (ast.If, ast.For, ast.While, ast.With, ast.Try)
        faults = []

        def depth_of(node, depth, name):
            for child in ast.iter_child_nodes(node):
                is_elif = (isinstance(node, ast.If)
                           and isinstance(child, ast.If)
                           and child in node.orelse)
                deeper = isinstance(child, kinds) and not is_elif
                if depth + deeper > 4:
                    faults.append('%s, line %d' % (
                        name, getattr(child, 'lineno', node.lineno)))
                depth_of(child, depth + deeper, name)
        for name, _, node in self.program.functions():
            depth_of(node, 0, name)
        self.assertEqual(faults, [])

    def test_classes_are_at_most_250_lines(self):
        for node, _, text in self.program.statements():
            if isinstance(node, ast.ClassDef):
                with self.subTest(node.name):
                    self.assertLessEqual(text.count('\n') + 1, 250)

    def test_public_names_have_docstrings(self):
        faults = []
        for name, _, node in self.program.functions():
            doc = ast.get_docstring(node)
            if not name.startswith('_') and self._is_top(node):
                if not doc or not re.match(r'[A-Z].{0,71}', doc):
                    faults.append(name)
                first = (doc or '').split('\n')[0]
                if len(first) > 72:
                    faults.append(name)
        for node, _, _ in self.program.statements():
            if isinstance(node, ast.ClassDef) and not ast.get_docstring(
                    node):
                faults.append(node.name)
        self.assertEqual(faults, [])

    def _is_top(self, node):
        return any(node is item or isinstance(item, ast.ClassDef)
                   and node in item.body for item in self.program.tree.body)

    def test_every_record_says_what_its_fields_are(self):
        records = [name for node, _, _ in self.program.statements()
                   for name in names_bound(node)
                   if isinstance(node, ast.Assign)
                   and isinstance(node.value, ast.Call)
                   and getattr(node.value.func, 'id', '') == 'namedtuple']
        self.assertGreater(len(records), 10)
        for name in records:
            with self.subTest(name):
                self.assertNotIn('(', getattr(pf, name).__doc__[:10])

    def test_what_is_refused_stands_nowhere(self):
        faults = []
        for node in ast.walk(self.program.tree):
            if isinstance(node, ast.Global):
                faults.append('global, line %d' % node.lineno)
            if isinstance(node, ast.Assert):
                faults.append('assert, line %d' % node.lineno)
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                faults.append('bare except, line %d' % node.lineno)
            name = getattr(node, 'name', '') or ''
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if re.search(r'(?i)util|misc|helper|common|manager', name):
                    faults.append(name)
        faults += [n for n, line in enumerate(self.program.lines, 1)
                   if re.search(r'\b(TODO|FIXME|XXX)\b', line)]
        self.assertEqual(faults, [])

    def test_the_program_ends_in_one_place(self):
        ends = [n for n, line in enumerate(self.program.lines, 1)
                if 'sys.exit(' in line or 'SystemExit' in line]
        self.assertEqual(ends, [len(self.program.lines) - 1])

    def test_private_names_have_one_section(self):
        home = {}
        for node, first, _ in self.program.statements():
            for name in names_bound(node):
                home[name] = self.program.section_at(first)
        faults = []
        for _, first, text in self.program.statements():
            here = self.program.section_at(first)
            faults += ['%s in section %d' % (name, here)
                       for name in names_read(text, first)
                       if name.startswith('_') and not name.startswith('__')
                       and home.get(name, here) != here]
        self.assertEqual(faults, [])

    def test_sql_stands_in_the_store_only(self):
        verbs = re.compile(r'[\'"](select .* from|insert |update \w+ set|'
                           r'delete from|begin|commit|rollback)')
        faults = [n for n, line in enumerate(self.program.lines, 1)
                  if verbs.search(line)
                  and self.program.section_at(n) != 15]
        self.assertEqual(faults, [])

    def test_importing_does_nothing(self):
        code = ('import sys, threading; sys.path.insert(0, %r); '
                'before = set(sys.modules); import preflight; '
                'print(threading.active_count(), sorted(set(sys.modules)'
                ' - before - {"preflight"}))' % HERE)
        done = subprocess.Popen(
            [sys.executable, '-B', '-S', '-c', code], cwd=HERE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out = done.communicate()[0].decode()
        self.assertTrue(out.startswith('1 ['), out)
        for name in ('argparse', 'sqlite3', 'subprocess', 'hashlib'):
            self.assertNotIn("'%s'" % name, out)


# ==========================================================================
# README.md and examples/: what they say is run
# ==========================================================================


def read_blocks(language):
    """Give the fenced blocks of a language in the README."""
    with open(os.path.join(HERE, 'README.md'), encoding='utf-8') as file:
        text = file.read()
    return re.findall(r'(?ms)^```%s\n(.*?)^```$' % language, text)


class TestReadme(TempCase):
    """The commands of the README work, and print what it shows."""

    def setUp(self):
        super().setUp()
        self.env = {'PATH': self.path('bin') + os.pathsep
                    + os.environ['PATH'], 'HOME': self.dir}
        os.mkdir(self.path('bin'))
        os.symlink(sys.executable, self.path('bin', 'python3'))

    def shell(self, command):
        """Run a command line as a reader would paste it."""
        done = subprocess.Popen(
            ['sh', '-c', command], cwd=HERE, env=self.env,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        out = done.communicate(timeout=60)[0].decode('utf-8')
        return done.returncode, out

    def plain(self, text):
        """Take out what differs from run to run: ids, homes, this place."""
        text = text.replace(self.dir, '/home/ci').replace(HERE, '/home/ci/pf')
        return re.sub(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', 'UUID',
                      text)

    def test_the_commands_print_what_is_shown(self):
        count = 0
        for block in read_blocks('console'):
            for part in re.split(r'(?m)^\$ ', block)[1:]:
                command, _, shown = part.partition('\n')
                with self.subTest(command):
                    code, out = self.shell(command)
                    self.assertEqual(self.plain(out), self.plain(shown))
                    count += 1
        self.assertGreaterEqual(count, 2)

    def test_the_first_command_is_the_check_and_the_tests_come_next(self):
        with open(os.path.join(HERE, 'README.md'),
                  encoding='utf-8') as file:
            text = file.read()
        first = re.search(r'python3 preflight\.py .*', text).group()
        self.assertIn('tools preflight --sync', first)
        self.assertIn('\n    python3 test_preflight.py\n', text)
        self.assertLess(text.count('\n'), 200)

    def test_the_config_shown_is_read_without_a_warning(self):
        for block in read_blocks('json'):
            path = self.write('shown.json', block)
            config = pf.read_config([(path, path, block.encode())])
            servers, skipped = pf.all_servers(config)
            self.assertEqual((skipped, config.warnings), ([], []))
            self.assertEqual([s.warnings for s in servers], [[]])

    def test_the_scripts_shown_are_shell(self):
        for block in read_blocks('sh'):
            path = self.write('shown.sh', block)
            self.assertEqual(subprocess.call(['sh', '-n', path]), 0)

    def test_the_service_answers_as_it_is_asked_here(self):
        script = read_blocks('sh')[1]
        serve, ask = re.match(r'(?s)python3 (.*?) *#.*?\n(.*)',
                              script).groups()
        self.shell('python3 preflight.py --config examples/mcp.json sync')
        words = shlex.split(serve.replace('mcp.json', 'examples/mcp.json'))
        child = subprocess.Popen(
            [sys.executable] + words + ['--listen', '127.0.0.1:0'],
            cwd=HERE, env=self.env, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL)
        try:
            place = re.search(r'http://[0-9.:]+',
                              child.stderr.readline().decode()).group()
            if not self.has('curl'):
                self.skipTest('curl is not here')
            code, out = self.shell(ask.replace('http://127.0.0.1:8080',
                                               place))
            self.assertEqual(json.loads(out)['data']['verdict'], 'ready')
        finally:
            child.terminate()
            child.stderr.close()
            self.assertEqual(child.wait(), 143)

    def has(self, program):
        """Tell whether a program is on the path."""
        return subprocess.call(['sh', '-c', 'command -v ' + program],
                               stdout=subprocess.DEVNULL) == 0

    def test_the_nightly_script_tries_again_what_may_heal(self):
        script = read_blocks('sh')[0]
        self.write('preflight', '#!/bin/sh\nread code <codes\n'
                   'sed -i 1d codes\nexit $code\n')
        for name in ('page', 'agent'):
            os.chmod(self.write(name, '#!/bin/sh\necho %s\n' % name), 0o755)
        script = script.replace('python3 -I /opt/preflight.py', 'sh preflight')
        script = script.replace('/opt/', './').replace('sleep 600',
                                                       'echo sleep')
        self.write('nightly.sh', script)
        for codes, said in (
                ('0', 'agent'), ('10 0', 'sleep agent'), ('11', 'page'),
                ('12', 'page'), ('1', 'page'), ('10 10 11', 'sleep sleep page'),
                ('10 ' * 6 + '0', 'sleep ' * 6 + 'page')):
            with self.subTest(codes):
                self.write('codes', codes.replace(' ', '\n') + '\n')
                out = self.shell('cd %s; sh nightly.sh' % self.dir)[1]
                self.assertEqual(out.split(), said.split())

    def test_every_reason_and_exit_code_is_in_the_tables(self):
        with open(os.path.join(HERE, 'README.md'),
                  encoding='utf-8') as file:
            text = file.read()
        rows = re.findall(r'(?m)^\| ([a-z_, ]+) \| ([0-9]+) \|', text)
        told = {name: int(code) for names, code in rows
                for name in names.split(', ')}
        self.assertEqual(told, {
            code: pf.EXIT_CODES[row.verdict]
            for code, row in pf.REASONS.items()})

    def test_every_command_is_named(self):
        with open(os.path.join(HERE, 'README.md'),
                  encoding='utf-8') as file:
            text = file.read()
        section = text.split('## Commands')[1].split('\n## ')[0]
        for words in pf.COMMANDS:
            with self.subTest(words):
                self.assertRegex(section, r'`(%s )?%s[ `]' % (
                    words[0], ' '.join(words[-1:])))


class TestExamples(TempCase):
    """The example server works, from its config, on this Python."""

    def talk(self, *messages):
        """Run the notes server on these messages; its replies."""
        server = os.path.join(HERE, 'examples', 'notes_server.py')
        done = subprocess.Popen(
            [sys.executable, server, '--file', self.path('notes.jsonl')],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        data = ''.join(json.dumps(dict(m, jsonrpc='2.0')) + '\n'
                       for m in messages)
        out = done.communicate(data.encode(), timeout=30)[0]
        self.assertEqual(done.returncode, 0)
        return [json.loads(line.decode()) for line in out.splitlines()]

    def call(self, name, **arguments):
        """Call one tool of the notes server; its result."""
        opening = {'protocolVersion': '2025-11-25', 'capabilities': {},
                   'clientInfo': {'name': 't', 'version': '0'}}
        return self.talk(
            {'id': 1, 'method': 'initialize', 'params': opening},
            {'method': 'notifications/initialized'},
            {'id': 2, 'method': 'tools/call', 'params': {
                'name': name, 'arguments': arguments}})[1]['result']

    def test_a_note_is_added_found_read_and_deleted(self):
        made = self.call('add_note', title='Milk', text='two litres')
        number = made['structuredContent']['id']
        self.assertIn('Milk', json.dumps(self.call('search_notes',
                                                   query='litres')))
        self.assertIn('two litres', json.dumps(self.call('read_note',
                                                         id=number)))
        self.assertFalse(self.call('delete_note', id=number)['isError'])
        self.assertNotIn('Milk', json.dumps(self.call('list_notes')))

    def test_a_bad_argument_is_a_result_with_an_error(self):
        self.assertTrue(self.call('add_note', title='')['isError'])

    def test_its_tools_are_seen_with_their_hints(self):
        self.config = os.path.join(HERE, 'examples', 'mcp.json')
        done = self.sync(env={'PATH': self.dir + os.pathsep
                              + os.environ['PATH']})
        self.assertEqual(done.code, 0, done)
        rows = {row['name']: row['annotations']
                for row in self.run_cli('tools', 'list', '-o', 'json').json}
        self.assertEqual(sorted(rows), ['add_note', 'delete_note',
                                        'list_notes', 'read_note',
                                        'search_notes'])
        self.assertIs(rows['search_notes']['readOnlyHint'], True)
        self.assertIs(rows['delete_note']['destructiveHint'], True)
        checked = self.check('--read-only-only', 'notes:search_notes',
                             'notes:add_note')
        self.assertEqual([row['status'] for row in checked.json['tools']],
                         ['ready', 'unavailable'])


# ==========================================================================
# Running it: without arguments the classes are shared out among workers,
# since most of the time goes in waiting for child processes
# ==========================================================================

WORKERS = 3


def run_class(case):
    """Run one class: what it counted, and its report when it failed."""
    stream = io.StringIO()
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TextTestRunner(stream, verbosity=0).run(suite)
    return {'run': result.testsRun, 'good': result.wasSuccessful(),
            'bad': len(result.failures) + len(result.errors)
            + len(result.unexpectedSuccesses),
            'skipped': [[test.id(), why] for test, why in result.skipped],
            'report': stream.getvalue()}


def work(cases, queue, answer):
    """Take classes from the queue, a byte each, until it is empty."""
    done = {}
    for number in iter(lambda: os.read(queue, 1), b''):
        done[number[0]] = run_class(cases[number[0]])
    with os.fdopen(answer, 'w') as file:
        json.dump(done, file)


def start_worker(cases, queue):
    """Fork a worker: (its pid, where its answer is read).

    It ends like any program, so that what it covers is measured.
    """
    reader, writer = os.pipe()
    number = os.fork()
    if not number:
        os.close(reader)
        work(cases, queue, writer)
        sys.exit(0)
    os.close(writer)
    return number, os.fdopen(reader)


def run_shared(cases):
    """Run classes in forked workers; tells whether all is well."""
    began, done, is_good = time.time(), {}, True
    queue, end = os.pipe()
    os.write(end, bytes(range(len(cases)))[::-1])
    os.close(end)
    sys.stdout.flush()
    workers = [start_worker(cases, queue) for _ in range(WORKERS)]
    os.close(queue)
    for number, answer in workers:
        with answer:
            text = answer.read()
        is_good = os.waitpid(number, 0)[1] == 0 and is_good
        done.update(json.loads(text or '{}'))
    rows = [done[key] for key in sorted(done, key=int)]
    for row in rows:
        if not row['good']:
            sys.stderr.write(row['report'])
        for name, why in row['skipped']:
            sys.stderr.write('skipped %s: %s\n' % (name, why))
    is_good = is_good and len(rows) == len(cases) and all(
        row['good'] for row in rows)
    sys.stderr.write('%s\nRan %d tests in %.3fs\n\n%s (failures=%d, '
                     'skipped=%d)\n' % (
                         '-' * 70, sum(row['run'] for row in rows),
                         time.time() - began, 'OK' if is_good else 'FAILED',
                         sum(row['bad'] for row in rows),
                         sum(len(row['skipped']) for row in rows)))
    return is_good


def main():
    """Run all tests, or those that are named."""
    if len(sys.argv) > 1 or not hasattr(os, 'fork'):
        unittest.main()
    cases = [value for value in list(globals().values())
             if isinstance(value, type)
             and issubclass(value, unittest.TestCase)
             and any(name.startswith('test') for name in dir(value))]
    sys.exit(0 if run_shared(cases) else 1)


if __name__ == '__main__':
    main()
