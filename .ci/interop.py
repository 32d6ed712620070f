"""Use the program with real MCP servers, as a user would.

    python3 .ci/interop.py install DIR VENV_PYTHON
    python3 .ci/interop.py check DIR [PYTHON]

install puts pinned servers from npm and PyPI into DIR, once; VENV_PYTHON
must be 3.10 or newer, because the servers are. check runs preflight.py with
PYTHON (this one by default) in a new home and says what is not as expected.
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NPM = ['@modelcontextprotocol/server-%s@2026.8.31' % name for name in
       ('everything', 'filesystem', 'memory', 'sequential-thinking')]
NPM.append('@modelcontextprotocol/server@2.4.0')
# This one stays up and lists no tools while its key is missing; a made-up
# key is enough for it to list them.
NPM.append('@morphllm/morphmcp@0.8.213')
PYPI = {
    'current': ['mcp-server-time==2026.10.19', 'mcp-server-git==2026.10.19',
                'mcp-server-fetch==2026.10.24', 'mcp==2.3.0'],
    # This server was written for the library's first version and crashes
    # with the second: a server that is configured and cannot start.
    'crashing': ['mcp-server-sqlite==2025.4.25', 'mcp==2.3.0'],
    'first': ['mcp==1.30.0'],
    'fastmcp': ['fastmcp==4.2.3'],
}
# The tools each server lists, and one of them to ask for.
EXPECTED = {
    'everything': (13, 'echo'),
    'filesystem': (14, 'read_text_file'),
    'memory': (9, 'read_graph'),
    'sequential-thinking': (1, 'sequentialthinking'),
    'time': (2, 'get_current_time'),
    'git': (12, 'git_status'),
    'fetch': (1, 'fetch'),
}
CRASHING = 'sqlite'

SERVERS = os.path.join(ROOT, '.ci', 'servers')
EVERYTHING = '{dir}/npm/node_modules/.bin/mcp-server-everything'
MCP_1 = '{dir}/first/bin/python {servers}/server_mcp1.py {port} '
MCP_2 = '{dir}/current/bin/python {servers}/server_mcp2.py {port} '
FASTMCP = '{dir}/fastmcp/bin/python {servers}/server_fastmcp.py {port} '
TS = 'node {servers}/server_ts.mjs {port} '
# Servers over HTTP: how many tools, one of them, the path of the URL, its
# type in the config, and the command.
WEB = {
    'web-everything': (13, 'echo', '/mcp', 'http',
                       EVERYTHING + ' streamableHttp'),
    'sse-everything': (13, 'echo', '/sse', 'sse', EVERYTHING + ' sse'),
    'web-mcp-2': (2, 'add', '/mcp', None, MCP_2 + 'http'),
    'web-mcp-2-redirected': (2, 'add', '/mcp/', 'http', MCP_2 + 'http'),
    'web-mcp-2-json': (2, 'add', '/mcp', 'http', MCP_2 + 'json'),
    'sse-mcp-2': (2, 'add', '/sse', None, MCP_2 + 'sse'),
    'web-mcp-1': (2, 'add', '/mcp', None, MCP_1 + 'http'),
    'web-mcp-1-json': (2, 'add', '/mcp', 'http', MCP_1 + 'json'),
    'sse-mcp-1': (2, 'add', '/sse', 'sse', MCP_1 + 'sse'),
    'web-fastmcp-paged': (5, 'e', '/mcp', 'http', FASTMCP + 'http'),
    'sse-fastmcp': (5, 'e', '/sse', None, FASTMCP + 'sse'),
    'web-typescript': (1, 'ping', '/mcp', None, TS),
    'web-typescript-modern': (1, 'ping', '/mcp', None, TS + 'reject'),
}
EXPECTED.update((name, row[:2]) for name, row in WEB.items())
# Children inherit the environment, but for the program's own variables;
# whatever still carries this one afterwards was left behind.
MARK = 'INTEROP_RUN'


def install(directory, python):
    """Install the servers into directory; keep what is there already."""
    os.makedirs(directory, exist_ok=True)
    wanted = json.dumps([NPM, PYPI, os.path.realpath(python)])
    stamp = os.path.join(directory, 'installed')
    if os.path.exists(stamp) and open_text(stamp) == wanted:
        return
    for name in ['npm'] + sorted(PYPI):
        shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    os.makedirs(os.path.join(directory, 'npm'))
    call(['npm', 'install', '--loglevel=error', '--no-audit', '--no-fund',
          '--prefix', os.path.join(directory, 'npm')] + NPM)
    for name, packages in sorted(PYPI.items()):
        venv = os.path.join(directory, name)
        call([python, '-m', 'venv', venv])
        call([os.path.join(venv, 'bin', 'python'), '-m', 'pip', 'install',
              '-qq', '--disable-pip-version-check'] + packages)
    with open(stamp, 'w') as file:
        file.write(wanted)


def open_text(path):
    with open(path) as file:
        return file.read()


def call(argv):
    subprocess.check_call(argv, stdin=subprocess.DEVNULL)


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as held:
        held.bind(('127.0.0.1', 0))
        return held.getsockname()[1]


class WebServers:
    """All servers over HTTP, running while it is entered.

    entries: name -> entry of a config, once they listen.
    """

    def __init__(self, directory, work):
        self.directory, self.work = directory, work
        self.children, self.entries = [], {}

    def __enter__(self):
        try:
            ports = [self.start(name) for name in sorted(WEB)]
            for port in ports:
                self.wait(port)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, name):
        _, _, path, kind, command = WEB[name]
        port = free_port()
        words = [word.format(dir=self.directory, servers=SERVERS, port=port)
                 for word in command.split()]
        with open(os.path.join(self.work, name + '.log'), 'w') as log:
            self.children.append(subprocess.Popen(
                words, cwd=os.path.join(self.directory, 'npm'),
                env=dict(os.environ, PORT=str(port)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        self.entries[name] = {'url': 'http://localhost:%d%s' % (port, path)}
        if kind:
            self.entries[name]['type'] = kind
        return port

    @staticmethod
    def wait(port):
        for _ in range(300):
            try:
                return socket.create_connection(('127.0.0.1', port)).close()
            except OSError:
                time.sleep(0.1)
        sys.exit('no server listens on port %d' % port)

    def __exit__(self, *exc):
        for child in self.children:
            child.kill()
            child.wait()


def config(directory, work):
    """The config of a user who has all these servers."""
    npm = os.path.join(directory, 'npm', 'node_modules', '.bin')
    current = os.path.join(directory, 'current', 'bin')
    files = os.path.join(work, 'files')
    repository = os.path.join(work, 'repository')
    os.mkdir(files)
    call(['git', 'init', '--quiet', repository])
    commands = {
        'everything': [npm + '/mcp-server-everything', 'stdio'],
        'filesystem': [npm + '/mcp-server-filesystem', files],
        'memory': [npm + '/mcp-server-memory'],
        'sequential-thinking': [npm + '/mcp-server-sequential-thinking'],
        'time': [current + '/mcp-server-time'],
        'git': [current + '/mcp-server-git', '--repository', repository],
        'fetch': [current + '/mcp-server-fetch'],
        CRASHING: [os.path.join(directory, 'crashing', 'bin',
                                'mcp-server-sqlite'),
                   '--db-path', os.path.join(work, 'test.db')],
    }
    servers = {name: {'command': argv[0], 'args': argv[1:]}
               for name, argv in commands.items()}
    servers['memory']['env'] = {
        'MEMORY_FILE_PATH': os.path.join(work, 'memory.json')}
    return {'mcpServers': servers, 'max_age': '15m'}


class User:
    """One user's home and config; counts what is not as expected."""

    def __init__(self, python, work, name='config'):
        self.start = [python, '-I', os.path.join(ROOT, 'preflight.py'),
                      '--home', os.path.join(work, 'home-' + name),
                      '--config', os.path.join(work, name + '.json')]
        self.environ = {'PATH': os.environ.get('PATH', os.defpath),
                        'HOME': work, 'TMPDIR': work, MARK: work}
        self.failures = 0
        self.last = ''

    def run(self, *words):
        """Run one command -> exit code, what its standard output holds.

        The output is read as JSON, and is None when it is not that.
        """
        child = subprocess.Popen(
            self.start + list(words), env=self.environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
        out, err = child.communicate(timeout=180)
        out, err = (data.decode('utf-8', 'replace') for data in (out, err))
        self.last = ('%s\n%s' % (out, err)).strip()
        try:
            return child.returncode, json.loads(out)
        except ValueError:
            return child.returncode, None

    def same(self, what, found, expected):
        """Print one line a check, and what a failed one was made of."""
        good = found == expected
        print('%-4s %s' % ('ok' if good else 'FAIL', what))
        if not good:
            self.failures += 1
            print('     found    %r\n     expected %r' % (found, expected))
            if self.last:       # once is enough for all that it fails
                print('     | ' + self.last.replace('\n', '\n     | '))
            self.last = ''


def count(value):
    """A number of things, given as a number, a list or nothing."""
    return value if isinstance(value, int) else len(value or ())


def check_first_sync(user):
    """Every server is seen, with its tools; the crashed one says why."""
    code, out = user.run('sync', '-o', 'json')
    user.same('sync: exit code, one server cannot start', code, 10)
    rows = {row['server']: row for row in (out or {}).get('servers', ())}
    user.same('sync: servers', sorted(rows),
                 sorted(list(EXPECTED) + [CRASHING]))
    for name, (tools, _) in sorted(EXPECTED.items()):
        row = rows.get(name, {})
        user.same('sync: %s is ready with %d tools' % (name, tools),
                     (row.get('state'), count(row.get('tools'))),
                     ('ready', tools))
    row = rows.get(CRASHING, {})
    user.same('sync: %s crashed' % CRASHING,
                 (row.get('state'), row.get('cause')), ('error', 'exited'))


def check_gate(user):
    """One tool of each server is ready; one of the crashed is not."""
    ids = ['%s:%s' % (name, tool)
           for name, (_, tool) in sorted(EXPECTED.items())]
    code, out = user.run('tools', 'preflight', '-o', 'json', *ids)
    user.same('preflight: exit code', code, 0)
    found = out or {}
    user.same('preflight: verdict', found.get('verdict'), 'ready')
    user.same('preflight: every id is ready',
                 [(tool['id'], tool['status'])
                  for tool in found.get('tools', ())],
                 [(name, 'ready') for name in ids])
    code, out = user.run('tools', 'preflight', '-o', 'json',
                            CRASHING + ':read_query')
    found = (out or {}).get('tools', [{}])[0]
    user.same('preflight: the crashed server',
                 (code, found.get('reason'), found.get('cause')),
                 (10, 'server_unhealthy', 'exited'))


def tools(user):
    """All tools as the program lists them, without the time seen last."""
    code, out = user.run('tools', 'list', '-o', 'json')
    user.same('tools list: exit code', code, 0)
    rows = out or []
    for row in rows:
        row.pop('last_seen', None)
    return rows


def check_second_sync(user):
    """Nothing changed, so nothing may be reported or written as changed."""
    before = tools(user)
    user.same('tools list: all tools', len(before),
                 sum(number for number, _ in EXPECTED.values()))
    code, out = user.run('sync', '-o', 'json')
    user.same('second sync: exit code', code, 10)
    moved = {row['server']: [row.get(key) for key in
                             ('added', 'changed', 'vanished')]
             for row in (out or {}).get('servers', ())
             if any(count(row.get(key)) for key in
                    ('added', 'changed', 'vanished'))}
    user.same('second sync: nothing added, changed or vanished',
                 moved, {})
    after = tools(user)
    user.same('second sync: no tool is different',
                 [row for row in after if row not in before], [])
    user.same('second sync: as many tools', len(after), len(before))


# What `health` says of servers that are alike but for what is told here:
# state, reason, exit code, part of the evidence.
HEALTH = {
    'everything': ('HEALTHY', 'no_upstream', 0, '13 tools'),
    CRASHING: ('OFFLINE', 'exited', 11, 'exited with code 1'),
    'morph': ('OFFLINE', 'no_tools', 11, 'lists no tools'),
    'morph-key': ('PRESENT (untested)', 'probe_skipped', 0, '7 tools'),
    'morph-probe': ('PRESENT (untested)', 'probe_skipped', 0,
                    'credential not readable here'),
}


def health_config(directory, servers):
    """The config of a user who asks for health."""
    morph = {'command': os.path.join(directory, 'npm', 'node_modules',
                                     '.bin', 'morph-mcp'),
             'health': {'preset': 'morph'}}
    keyed = dict(morph, env={'MORPH_API_KEY': 'made-up-key-0123456789'})
    probed = dict(keyed, health={'preset': 'morph', 'token_env': 'NOT_SET'})
    return {'mcpServers': {
        'everything': servers['everything'], CRASHING: servers[CRASHING],
        'morph': morph, 'morph-key': keyed, 'morph-probe': probed}}


def check_health(user):
    """What each server of HEALTH is worth, live and as it is recorded."""
    for words in ((), ('--cached',)):
        code, out = user.run('health', '-o', 'json', *words)
        title = ' '.join(('health',) + words)
        user.same(title + ': exit code, two are offline', code, 11)
        rows = {row['server']: row for row in (out or {}).get('servers', ())}
        user.same(title + ': servers', sorted(rows), sorted(HEALTH))
        for name, (state, reason, _, part) in sorted(HEALTH.items()):
            row = rows.get(name, {})
            evidence = row.get('evidence', '')
            user.same('%s: %s is %s' % (title, name, state),
                      (row.get('state'), row.get('reason'),
                       part if part in evidence else evidence),
                      (state, reason, part))
    for name, row in sorted(HEALTH.items()):
        code, _ = user.run('health', '--cached', name)
        user.same('health --cached %s: exit code' % name, code, row[2])
    code, _ = user.run('health', '--cached', 'morphh')
    user.same('health of an unknown name: exit code', code, 12)


def left_behind(value):
    """Processes that carry the mark -> {pid: command line}."""
    mark = ('%s=%s' % (MARK, value)).encode()
    found = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open('/proc/%s/environ' % pid, 'rb') as file:
                marked = mark in file.read().split(b'\0')
            with open('/proc/%s/cmdline' % pid, 'rb') as file:
                command = file.read().replace(b'\0', b' ').decode('latin-1')
        except OSError:
            continue    # it has ended, or is not ours to look at
        if marked:
            found[int(pid)] = command
    return found


def check(directory, python):
    """Run all checks in a new home -> number of failures."""
    work = os.path.realpath(tempfile.mkdtemp(prefix='interop'))
    user = User(python, work)
    try:
        with WebServers(directory, work) as web:
            table = config(directory, work)
            table['mcpServers'].update(web.entries)
            with open(os.path.join(work, 'config.json'), 'w') as file:
                json.dump(table, file)
            check_first_sync(user)
            check_gate(user)
            check_second_sync(user)
            servers = health_config(directory, table['mcpServers'])
            with open(os.path.join(work, 'health.json'), 'w') as file:
                json.dump(servers, file)
            other = User(python, work, 'health')
            check_health(other)
        code, _ = user.run('activity', 'verify')
        user.same('activity verify: exit code', code, 0)
        time.sleep(0.5)     # a killed child may still be going
        user.same('no process is left', left_behind(work), {})
    finally:
        for pid in left_behind(work):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(work, ignore_errors=True)
    return user.failures + other.failures


def main(argv):
    if argv[1:2] == ['install']:
        install(os.path.abspath(argv[2]), argv[3])
        return 0
    failures = check(os.path.abspath(argv[2]),
                     argv[3] if argv[3:] else sys.executable)
    print('%d checks failed' % failures if failures else 'all as expected')
    return 1 if failures else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv))
