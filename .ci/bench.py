"""Measure what one check costs; run by hand, on a quiet machine.

    python3 .ci/bench.py [PYTHON...]
    python3 .ci/bench.py sync [PYTHON...]

For each PYTHON (by default 3.8, 3.11 and 3.13, those that are found):

- cold start of a check of 10 tools, against the floor: the interpreter,
  the imports a check cannot do without, and compiling this program;
- the same check with 100,000 tools on 1,000 servers known;
- 20 such checks started at once: the slowest of them.

With sync: a sync of 50 servers that each take 1 s to start, against the
ideal of 16 side by side, which is 4 rounds of 1 s.

Only ratios within one interleaved run count: machines drift. Every process
is started with -I -S, so that no site package takes part.
"""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.path.join(ROOT, 'preflight.py')
ROUNDS = 20
FLOOR = ('import argparse, json, sqlite3, hashlib; '
         'compile(open(%r, encoding="utf-8").read(), "x", "exec")' % PROGRAM)
ASKED = 10


def find_pythons():
    """Paths of 3.8, 3.11 and 3.13, those that are here."""
    roots = [os.environ.get('PYENV_ROOT'), os.path.expanduser('~/.pyenv')]
    for minor in ('3.8', '3.11', '3.13'):
        found = [path for root in filter(None, roots)
                 for path in glob.glob('%s/versions/%s.*/bin/python3'
                                       % (root, minor))]
        found.append(shutil.which('python' + minor))
        if found[0]:
            yield found[0]


def server_name(number):
    return 'server%04d' % number


def tool_name(number):
    return 'tool_%04d' % number


def make_state(work, servers, tools):
    """A home and a config with that many servers and tools on each."""
    home = os.path.join(work, 'home')
    config = os.path.join(work, 'config.json')
    names = [server_name(number) for number in range(servers)]
    os.makedirs(work)
    with open(config, 'w') as file:
        json.dump({'max_age': '1d', 'mcpServers': {
            name: {'command': '/bin/true', 'args': [name]}
            for name in names}}, file)
    fill_state(home, config, names,
               [tool_name(number) for number in range(tools)])
    return home, config


def listed_tool(server, name):
    """A definition of ordinary size, different on each server."""
    return {
        'name': name, 'description': '%s of %s. %s' % (
            name, server, 'What it does, in some detail. ' * 10),
        'inputSchema': {
            'type': 'object', 'required': ['path'], 'properties': {
                key: {'type': 'string', 'description': 'The %s to use.' % key}
                for key in ('path', 'query', 'format', 'owner', 'branch')}},
        'annotations': {'readOnlyHint': True, 'openWorldHint': False}}


def fill_state(home, config, servers, tools):
    """Record a look at each server that listed these tools, approved.

    The program's own functions write it, as a first sync would.
    """
    sys.path.append(ROOT)
    import preflight
    options = preflight.parse_argv(['--home', home, '--config', config,
                                    'sync'])[1]
    world = preflight.make_world(options, [])
    loaded = preflight.load_config(world)
    with preflight.Store(home, world) as store:
        for name in servers:
            now = world.now()
            with store.write() as con:
                known = preflight.load_known(con, loaded, name)[0]
                preflight.take_lease(con, name, known.server.file, (
                    now, now + 60000, known.launch, 'bench'))
            found, warnings = preflight.read_tools(
                [listed_tool(name, tool) for tool in tools])
            row = preflight.save_observation(
                store, known, preflight.Observation(
                    'ready', '', '', '2025-11-25', 'handshake', 0, found,
                    {}, warnings, ''), 'bench')
            if (row.state, row.tools) != ('ready', len(tools)):
                sys.exit('%s was not recorded: %r' % (name, row))


def command(python, state, servers):
    """A check of 10 tools, spread over the servers."""
    home, config = state
    ids = ['%s:%s' % (server_name(number * servers // ASKED),
                      tool_name(number % 5)) for number in range(ASKED)]
    return [python, '-I', '-S', PROGRAM, '--home', home,
            '--config', config, 'tools', 'preflight'] + ids


def timed(argv):
    """Milliseconds of one run, which must exit 0."""
    began = time.perf_counter()
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = child.communicate()
    took = time.perf_counter() - began
    if child.returncode:
        sys.exit('%r exited %d:\n%s%s' % (argv, child.returncode,
                                          out.decode(), err.decode()))
    return took * 1000


def interleaved(commands):
    """Median milliseconds of each command, run in turns."""
    times = [[] for _ in commands]
    for number in range(ROUNDS + 1):
        for argv, row in zip(commands, times):
            took = timed(argv)
            if number:          # the first round only warms the caches
                row.append(took)
    return [sorted(row)[len(row) // 2] for row in times]


def at_once(argv, number=20):
    """Milliseconds until the slowest of that many is done."""
    began = time.perf_counter()
    children = [subprocess.Popen(argv, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL)
                for _ in range(number)]
    codes = {child.wait() for child in children}
    if codes != {0}:
        sys.exit('exit codes %r of checks at once' % codes)
    return (time.perf_counter() - began) * 1000


# A server that is slow to start and then does as it should.
SLOW_SERVER = '''
import json, sys, time
time.sleep(1)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get('method') == 'initialize':
        result = {'protocolVersion': asked['params']['protocolVersion'],
                  'capabilities': {'tools': {}},
                  'serverInfo': {'name': 'slow', 'version': '0'}}
    elif asked.get('method') == 'tools/list':
        result = {'tools': [{'name': 'echo', 'inputSchema': {}}]}
    else:
        continue
    print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'],
                      'result': result}), flush=True)
'''
SLOW_SERVERS, SIDE_BY_SIDE = 50, 16


def sync_slow(python, work):
    """Seconds that a first sync of the slow servers takes."""
    home, config = os.path.join(work, 'home'), os.path.join(work, 'c.json')
    server = os.path.join(work, 'slow.py')
    os.makedirs(work)
    with open(server, 'w') as file:
        file.write(SLOW_SERVER)
    with open(config, 'w') as file:
        json.dump({'mcpServers': {
            server_name(number): {'command': python,
                                  'args': ['-I', '-S', server]}
            for number in range(SLOW_SERVERS)}}, file)
    return timed([python, '-I', '-S', PROGRAM, '--home', home, '--config',
                  config, 'sync']) / 1000


def main_sync(pythons):
    ideal = -(-SLOW_SERVERS // SIDE_BY_SIDE)
    for number, python in enumerate(pythons):
        work = tempfile.mkdtemp(prefix='bench')
        try:
            took = sync_slow(python, os.path.join(work, str(number)))
        finally:
            shutil.rmtree(work)
        print('%s: %d servers that take 1 s each: %.2f s, %.2f of the ideal '
              '%d s' % (python, SLOW_SERVERS, took, took / ideal, ideal))


def main(argv):
    if argv[1:2] == ['sync']:
        main_sync(argv[2:] or list(find_pythons()))
        return
    work = tempfile.mkdtemp(prefix='bench')
    try:
        small = make_state(os.path.join(work, 'small'), 10, 5)
        large = make_state(os.path.join(work, 'large'), 1000, 100)
        for python in argv[1:] or list(find_pythons()):
            version = subprocess.check_output(
                [python, '-I', '-S', '-c',
                 'import sys; print("%d.%d.%d" % sys.version_info[:3])'])
            floor, ours, big = interleaved([
                [python, '-I', '-S', '-c', FLOOR],
                command(python, small, 10), command(python, large, 1000)])
            slowest = at_once(command(python, small, 10))
            print('%-8s floor %.1f ms; 10 tools of 50 %.1f ms (%.2f of the '
                  'floor); of 100,000 %.1f ms (%.2f of that); '
                  '20 at once %.0f ms'
                  % (version.decode().strip(), floor, ours, ours / floor,
                     big, big / ours, slowest))
    finally:
        shutil.rmtree(work)


if __name__ == '__main__':
    main(sys.argv)
