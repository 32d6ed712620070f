"""Measure `preflight.py serve`; run by hand, on a quiet machine.

    python3 .ci/bench_serve.py [PYTHON...]

For each PYTHON (by default the one that runs this):

- requests a second, checks of 10 tools, at 1, 16 and 64 keep-alive
  connections, beside a bare http.server that reads the body and echoes 1 KB
  in one write: the ratio of the two, in turns, median of 5;
- 95th percentile of one connection beside that of a lone synced commit;
- the same at 16 connections while a sync of 1,000 servers runs;
- 20 command line checks at once: the longest wait for the lock;
- resident memory after the load, with 50 tools and with 100,000;
- a misspelt id among 100,000, with its suggestions.

wrk makes the load where it is installed, else a client in a process of its
own. Only ratios within one run count: machines drift.
"""
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time

import bench

ROUNDS = 5
SECONDS = 2
SERVERS = 1000

BARE = r'''
import http.server, socketserver
BODY = b'x' * 1024
HEAD = b'HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n'
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        self.wfile.write(HEAD + BODY)
    def log_message(self, *words):
        pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads, request_queue_size = True, 512
server = Server(('127.0.0.1', 0), Echo)
print(server.server_address[1], flush=True)
server.serve_forever()
'''

# A load client for where there is no wrk: threads would be its own limit.
CLIENT = r'''
import selectors, socket, sys, time
port, number, seconds = map(int, sys.argv[1:4])
data = sys.stdin.buffer.read()
chooser, spans = selectors.DefaultSelector(), []
end = time.perf_counter() + seconds
for _ in range(number):
    sock = socket.create_connection(('127.0.0.1', port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    chooser.register(sock, 1, [b'', 0])
for key in list(chooser.get_map().values()):
    key.data[1] = time.perf_counter(); key.fileobj.sendall(data)
while time.perf_counter() < end:
    for key, _ in chooser.select(0.1):
        state = key.data
        state[0] += key.fileobj.recv(65536)
        head, sign, body = state[0].partition(b'\r\n\r\n')
        if not sign:
            continue
        size = int(head.lower().split(b'content-length:')[1].split()[0])
        if len(body) < size:
            continue
        if not head.startswith(b'HTTP/1.1 200'):
            sys.exit('not 200: %r' % state[0])
        now = time.perf_counter()
        spans.append(now - state[1])
        state[:] = [b'', now]
        key.fileobj.sendall(data)
spans.sort()
print(len(spans) / seconds, spans[len(spans) * 95 // 100] * 1000,
      spans[len(spans) * 99 // 100] * 1000)
'''

# The smallest thing that speaks enough MCP, so that a sync of many servers
# measures us and not them.
TINY = r'''
while read -r line; do
  id=${line#*\"id\":}; id=${id%%,*}; id=${id%%\}*}
  case $line in
  *'"initialize"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"protocolVers'\
'ion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"t","ver'\
'sion":"0"}}}';;
  *'"tools/list"'*) echo '{"jsonrpc":"2.0","id":'$id',"result":{"tools":[{"na'\
'me":"tool_0000","inputSchema":{"type":"object"}}]}}';;
  esac
done
'''

LOCK_WAIT = r'''
import sys, time
sys.path.insert(0, sys.argv[1])
import preflight
enter, waits = preflight.FileLock.__enter__, []
def timed(self):
    began = time.perf_counter()
    out = enter(self)
    waits.append(time.perf_counter() - began)
    return out
preflight.FileLock.__enter__ = timed
code = preflight.main(sys.argv[2:])
sys.stderr.write('WAITED %f\n' % max(waits))
sys.exit(code)
'''


def request(key, ids):
    """The bytes of one check."""
    body = json.dumps({'tools': [{'id': name} for name in ids]}).encode()
    return (b'POST /api/v1/preflight HTTP/1.1\r\nHost: 127.0.0.1\r\n'
            b'X-API-Key: %s\r\nContent-Length: %d\r\n\r\n' % (
                key, len(body)) + body)


class Served:
    """A server under load, ended with the block."""

    def __init__(self, argv, pattern, env=None):
        self.child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=env)
        line = self.child.stdout.readline().decode()
        self.port = int(re.search(pattern, line).group(1))
        # Its log is read by nobody's Python.
        self.drain = subprocess.Popen(['cat'], stdin=self.child.stdout,
                                      stdout=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.child.terminate()
        self.child.wait()
        self.drain.wait()

    def resident(self):
        """Resident memory in MB."""
        with open('/proc/%d/status' % self.child.pid) as file:
            return int(re.search(r'VmRSS:\s+([0-9]+)', file.read()
                                 ).group(1)) / 1024


def serve(python, state):
    """Start our server on a state, without background sync."""
    home, config = state
    return Served([python, '-I', '-S', bench.PROGRAM, '--home', home,
                   '--config', config, 'serve', '--listen', '127.0.0.1:0',
                   '--no-sync'], r'http://127\.0\.0\.1:([0-9]+)')


def load(work, port, number, data, seconds=SECONDS):
    """Requests a second, 95th and 99th percentile in ms."""
    if shutil.which('wrk'):
        return load_wrk(work, port, number, data, seconds)
    out = subprocess.run([sys.executable, '-c', CLIENT, str(port),
                          str(number), str(seconds)], input=data,
                         stdout=subprocess.PIPE, check=True).stdout
    return tuple(map(float, out.split()))


def load_wrk(work, port, number, data, seconds):
    """The same by wrk."""
    head, _, body = data.decode().partition('\r\n\r\n')
    lines = head.split('\r\n')
    script = os.path.join(work, 'post.lua')
    with open(script, 'w') as file:
        file.write('wrk.method = "POST"\nwrk.path = %s\nwrk.body = %s\n' % (
            json.dumps(lines[0].split()[1]), json.dumps(body)))
        for line in lines[2:]:
            name, _, value = line.partition(': ')
            if name != 'Content-Length':
                file.write('wrk.headers[%s] = %s\n' % (
                    json.dumps(name), json.dumps(value)))
        file.write('function done(summary, latency)\n'
                   'if summary.errors.status + summary.errors.read > 0 then '
                   'print("FAILED") end\n'
                   'print(string.format("P95 %f P99 %f", '
                   'latency:percentile(95) / 1000, '
                   'latency:percentile(99) / 1000)) end\n')
    out = subprocess.run(
        ['wrk', '-t1', '-c%d' % number, '-d%ds' % seconds, '-s', script,
         'http://127.0.0.1:%d' % port], stdout=subprocess.PIPE,
        check=True).stdout.decode()
    if 'FAILED' in out:
        sys.exit('requests failed:\n' + out)
    return tuple(float(re.search(pattern + r'\s+([0-9.]+)', out).group(1))
                 for pattern in ('Requests/sec:', 'P95', 'P99'))


def median(rows):
    """The median, column by column."""
    return [sorted(column)[len(column) // 2] for column in zip(*rows)]


def commit_ms(work):
    """Median and 95th percentile of a lone synced commit on this disk."""
    con = sqlite3.connect(tempfile.mktemp('.db', dir=work),
                          isolation_level=None)
    con.execute('pragma journal_mode=wal')
    con.execute('pragma synchronous=full')
    con.execute('create table t(a)')
    spans = []
    for _ in range(2000):
        began = time.perf_counter()
        con.execute('begin immediate')
        con.execute('insert into t values(?)', ('x' * 500,))
        con.execute('commit')
        spans.append((time.perf_counter() - began) * 1000)
    con.close()
    spans.sort()
    return spans[1000], spans[1900]


def key_of(state):
    """The API key of a state."""
    with open(os.path.join(state[0], 'api_key'), 'rb') as file:
        return file.read().strip()


def ids_of(servers):
    """Ten ids, spread over the servers."""
    return ['%s:%s' % (bench.server_name(number * servers // 10),
                       bench.tool_name(number % 5)) for number in range(10)]


def bench_ratio(python, work, state):
    """Rates against the bare server, percentiles, memory."""
    with Served([python, '-I', '-S', '-c', BARE], '([0-9]+)') as bare, \
            serve(python, state) as ours:
        data = request(key_of(state), ids_of(10))
        load(work, ours.port, 4, data, 1)
        for number in (1, 16, 64):
            rows = []
            for _ in range(ROUNDS):
                rows.append(load(work, ours.port, number, data)
                            + load(work, bare.port, number, data))
            rate, p95, p99, plain, _, _ = median(rows)
            ratio = median([(row[0] / row[3],) for row in rows])[0]
            print('  %2d connections: %5.0f/s, bare %5.0f/s, ratio %.2f; '
                  'p95 %.2f ms, p99 %.2f ms' % (number, rate, plain, ratio,
                                                p95, p99))
            if number == 1:
                lone, lone95 = commit_ms(work)
                print('     a lone commit: median %.2f ms, p95 %.2f; so '
                      'the aim is p95 %.2f' % (lone, lone95, 3 * lone + 0.5))
        print('  resident, 50 tools: %.1f MB' % ours.resident())


def bench_large(python, work, state):
    """Memory and misses with 100,000 tools."""
    with serve(python, state) as ours:
        key, spans = key_of(state), []
        load(work, ours.port, 16, request(key, ids_of(SERVERS)))
        sock = socket.create_connection(('127.0.0.1', ours.port))
        for number in range(200):
            name = bench.server_name(number * 5)
            data = request(key, ['%s:tol_%04d' % (name, number % 100)])
            began = time.perf_counter()
            sock.sendall(data)
            answer = sock.recv(65536)
            spans.append((time.perf_counter() - began) * 1000)
            if b'did_you_mean' not in answer:
                sys.exit('no suggestion: %r' % answer)
        spans.sort()
        print('  a miss among 100,000: p50 %.1f ms, p95 %.1f ms' % (
            spans[100], spans[190]))
        print('  resident, 100,000 tools: %.1f MB' % ours.resident())


def bench_one_big(python, work):
    """Misses on one server with 100,000 tools."""
    state = bench.make_state(os.path.join(work, 'one'), 1, 100000)
    with serve(python, state) as ours:
        key, spans = key_of(state), []
        sock = socket.create_connection(('127.0.0.1', ours.port))
        for number in range(200):
            data = request(key, ['%s:tol_%04d' % (bench.server_name(0),
                                                  number * 37)])
            began = time.perf_counter()
            sock.sendall(data)
            sock.recv(65536)
            spans.append((time.perf_counter() - began) * 1000)
        spans.sort()
        print('  a miss on one server of 100,000: p50 %.1f ms, p95 %.1f ms'
              % (spans[100], spans[190]))


def bench_sync(python, work):
    """Percentiles at 16 connections while a sync of 1,000 servers runs."""
    place = os.path.join(work, 'sync')
    state = bench.make_state(place, 10, 5)
    tiny = os.path.join(place, 'tiny.sh')
    with open(tiny, 'w') as file:
        file.write(TINY)
    with open(state[1]) as file:
        config = json.load(file)
    for number in range(SERVERS):
        config['mcpServers']['more%04d' % number] = {
            'command': '/bin/sh', 'args': [tiny]}
    with open(state[1], 'w') as file:
        json.dump(config, file)
    with serve(python, state) as ours:
        data = request(key_of(state), ids_of(10))
        quiet = load(work, ours.port, 16, data)
        child = subprocess.Popen(
            [python, '-I', '-S', bench.PROGRAM, '--home', state[0],
             '--config', state[1], 'sync', '-o', 'json'],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        rows = []
        while child.poll() is None and len(rows) < 5:
            rows.append(load(work, ours.port, 16, data))
        child.send_signal(signal.SIGTERM)
        child.communicate()
        busy = median(rows)
        print('  16 connections, p95: %.2f ms alone, %.2f ms (p99 %.2f) '
              'while 1,000 servers are synced; %.0f/s and %.0f/s' % (
                  quiet[1], busy[1], busy[2], quiet[0], busy[0]))


def bench_locks(python, state):
    """20 command line checks at once: the longest wait for the lock."""
    worst = []
    for _ in range(ROUNDS):
        children = [subprocess.Popen(
            [python, '-I', '-S', '-c', LOCK_WAIT, bench.ROOT, '--home',
             state[0], '--config', state[1], 'tools', 'preflight']
            + ids_of(10), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for _ in range(20)]
        waits = [float(re.search(b'WAITED ([0-9.]+)', child.communicate()[1]
                                 ).group(1)) for child in children]
        worst.append((max(waits) * 1000,))
    print('  20 checks at once: the longest wait for the lock %.0f ms'
          % median(worst)[0])


def main(argv):
    """Run every measurement for each interpreter named."""
    work = tempfile.mkdtemp(prefix='bench')
    try:
        small = bench.make_state(os.path.join(work, 'small'), 10, 5)
        large = bench.make_state(os.path.join(work, 'large'), SERVERS, 100)
        for python in argv[1:] or [sys.executable]:
            print(subprocess.check_output([python, '-V']).decode().strip())
            bench_ratio(python, work, small)
            bench_locks(python, small)
            bench_large(python, work, large)
            bench_one_big(python, work)
            bench_sync(python, work)
            shutil.rmtree(os.path.join(work, 'one'))
            shutil.rmtree(os.path.join(work, 'sync'))
    finally:
        shutil.rmtree(work)


if __name__ == '__main__':
    main(sys.argv)
