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
import json, os, signal, subprocess, sys, time
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
if SPEC.get('ignore_term'):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if SPEC.get('grandchild'):
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
            raw(answer['raw'].encode('latin-1').replace(
                b'@ID@', str(number).encode()))
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
            ask=lambda question: False, tell=self.told.append,
            is_terminal=False)
        return pf.World(**dict(given, **more))


# ==========================================================================
# What the pure sections are tested with: one value of each kind
# ==========================================================================

NOW = 1790000000000             # 2026-09-21T13:33:20.000Z
H1, H2, H3 = '1' * 64, '2' * 64, '3' * 64


def a_server(**more):
    """Make a Server as a config gives it; more: what is different."""
    given = dict(
        name='s', file='/c/config.json', dialect='preflight', base='/c',
        transport='stdio', command='run', args=(), env={}, cwd=None,
        url=None, headers={}, enabled=True, quarantined=False,
        trust_mode='manual', allow=None, deny=[], start_timeout=60000,
        request_timeout=30000, max_age=None, client=None, health={},
        ignore_changes={}, overlaid=frozenset(), warnings=[])
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
        causes = ('command_not_found exited timeout refused dns tls '
                  'http_status rate_limited redirected protocol no_tools '
                  'unresolved stale interrupted').split()
        found = [cause for cause in causes
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
            ("it's", "'it'\\''s'"), ('a\n', "'a\n'"), ('caf\u00e9',
                                                      "'caf\u00e9'"))
        for word, quoted in table:
            with self.subTest(word=word):
                self.assertEqual(pf.shell_word(word), quoted)
                self.assertEqual(shlex.split(quoted), [word])

    def test_plural(self):
        self.assertEqual([pf.plural(n, 'tool') for n in (0, 1, 2)],
                         ['0 tools', '1 tool', '2 tools'])


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
        self.assertEqual(pf.redact('a hunter2-long b hunter2 c abc',
                                   ('hunter2', 'hunter2-long', 'abc')),
                         'a *** b *** c abc')

    def test_long_text_costs_one_scan(self):
        """A server's own text must not be able to keep us busy."""
        for text in ('key' * 30000, 'a' * 90000, '-' * 90000,
                     'http://' * 9000, 'token ' * 9000, '"' * 90000,
                     'key' + ' ' * 90000, '://' + 'a' * 90000):
            with self.subTest(text=text[:10]):
                self.assertEqual(pf.redact(text), text)


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
            ('mcp____x', plain),
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
        {'env': {'NPM_CONFIG_REGISTRY': 'x'}})
    COUNTS_NOT = (
        {'env': {'TOKEN': 'x'}}, {'env': {'MYPATH': 'x'}},
        {'env': {'NODE_ENV': 'x'}}, {'headers': {'A': 'x'}},
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

    ZZ = (('--token', 'zz'), ('--token=zz',), ('-e', 'K=zz'), ('-eK=zz',),
          ('--env', 'K=zz'), ('--env=K=zz',), ('--header', 'X: zz'),
          ('-H', 'X-Api-Key:zz'), ('--header=X: zz',), ('-HX: zz',),
          ('API_KEY=zz',), ('--db-password', 'zz'), ('-apikey', 'zz'),
          ('https://u:zz@h/x',), ('https://h/x?k=zz',),
          ('--header', 'Authorization: Bearer zz'), ('Bearer zz',))

    def test_masked_arguments(self):
        for args in self.ZZ:
            with self.subTest(args=args):
                shown = pf.launch_text(a_server(args=args))
                self.assertNotIn('zz', shown)
                self.assertIn('***', shown)

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

    def test_shown_environment(self):
        """Only what chooses code is shown, and where it runs."""
        server = a_server(cwd='/w', env={'TOKEN': 'zz', 'PATH': None,
                                         'PYTHONPATH': '/p'})
        self.assertEqual(
            pf.launch_text(server),
            'run [cwd=/w PATH=(removed) PYTHONPATH=/p]')


# ==========================================================================
# 20. commands and 23. cli
# ==========================================================================

# What may not reach a terminal from foreign text; \n ends our own lines.
RAW = re.compile('[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')
QUIET = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}


class CliCase(TempCase):
    """Runs the command line inside this process, where one of its own
    would add nothing but the time to start it."""

    def cli(self, *words, **env):
        """Run main() against this test's state; returns a Result."""
        return self.bare('--home', self.home, '--config', self.config,
                         *words, **env)

    def bare(self, *words, **env):
        """Run main() with the environment given and no place named."""
        from unittest import mock
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding='utf-8')
                    for _ in range(2))
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
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
        process.communicate()

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
            if seen.endswith(b'[y/N] '):
                if before:
                    before()
                os.write(ours, answer.encode() + b'\n')
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
        ids = 's:ok', 'elsewhere:ok', 'flip:nope', 'odd:ok', 'off:echo'
        rows = [pf.answer_fields(self.agent(['flip'], text).answers[0])
                for text in ids if text != 'flip:nope']
        rows.append(pf.answer_fields(
            self.agent(['live'], 'live:nope').answers[0]))
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
        rows = self.ask('off:ech', 'flip:ech', 'elsewhere:xx').json['tools']
        for row in rows:
            self.assertNotIn('did_you_mean', row)

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
        for node, first, text in self.program.statements():
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
                        'splitext'}}
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
                    faults.append('%s, line %d' % (name, child.lineno))
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
        for node, first, text in self.program.statements():
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
        """Take out what differs from run to run: ids and the home."""
        text = text.replace(self.dir, '/home/ci')
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

    def test_the_nightly_script_pages_at_the_third_10(self):
        script = read_blocks('sh')[0]
        self.write('preflight', '#!/bin/sh\nexit $(cat %s)\n'
                   % self.path('code'))
        for name in ('page', 'agent'):
            os.chmod(self.write(name, '#!/bin/sh\necho %s "$@"\n' % name),
                     0o755)
        script = script.replace('python3 -I /opt/preflight.py',
                                'sh ' + self.path('preflight'))
        script = script.replace('/opt/', self.dir + '/').replace(
            '/var/tmp/', self.dir + '/')
        path = self.write('nightly.sh', script)
        said = []
        for code in (10, 10, 10, 0, 10, 11, 1):
            self.write('code', str(code))
            out = self.shell('sh ' + path)[1].split()
            said.append(out[0] if out else '')
        self.assertEqual(said, ['', '', 'page', 'agent', '', 'page',
                                'page'])

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


if __name__ == '__main__':
    unittest.main()
