"""Hold a running server to its own OpenAPI document with schemathesis.

    .ci/schema_check.py TOOLS PYTHON

TOOLS: the environment that schemathesis is installed in. PYTHON: the
interpreter that serves. The example of this repository is looked at first,
so that there is something to ask for. /events never ends, and a 503 of
/readyz is an answer; nothing else may be a 5xx or leave the document.
"""
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECONDS = 60

SETTINGS = '''
headers = { X-API-Key = "%s" }

[[operations]]
include-path = "/readyz"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]

[[operations]]
include-path = "/api/v1/servers/{name}/tools"
parameters = { "name" = "notes" }

[[operations]]
include-path = "/api/v1/activity/{id}"
parameters = { "id" = "%s" }

[[operations]]
include-path = "/events"
enabled = false

[[operations]]
include-path = "/api/v1/events"
enabled = false
'''

CHECKS = ('not_a_server_error,status_code_conformance,'
          'content_type_conformance,response_headers_conformance,'
          'response_schema_conformance,unsupported_method,'
          'negative_data_rejection,ignored_auth')


@contextlib.contextmanager
def serving(python, home):
    """Serve the example, looked at once: (address, key)."""
    words = [python, os.path.join(ROOT, 'preflight.py'), '--home', home,
             '--config', os.path.join(ROOT, 'examples', 'mcp.json')]
    subprocess.check_call(words + ['sync'], stdout=subprocess.DEVNULL)
    log = os.path.join(home, 'serve.log')
    with open(log, 'wb') as file:
        child = subprocess.Popen(
            words + ['serve', '--listen', '127.0.0.1:0', '--no-sync'],
            stdout=file, stderr=file)
    try:
        found = None
        while not found and child.poll() is None:
            time.sleep(0.02)
            with open(log) as file:
                found = re.search('(http://[0-9.:]+);', file.read())
        with open(os.path.join(home, 'api_key')) as file:
            yield found.group(1), file.read().strip()
        if child.poll() is not None:
            sys.exit('the server ended by itself')
    finally:
        child.terminate()
        child.wait()
    with open(log) as file:
        faults = [line for line in file if 'internal error' in line]
    if faults:
        sys.exit('internal errors:\n' + ''.join(faults[:5]))


def record_id(url, key):
    """The id of the newest audit record."""
    request = urllib.request.Request(url + '/api/v1/activity?limit=1',
                                     headers={'X-API-Key': key})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)['data']['activities'][0]['id']


def main(tools, python):
    """Run it; the exit code is schemathesis's."""
    with tempfile.TemporaryDirectory() as place, \
            serving(python, os.path.join(place, 'home')) as (url, key):
        settings = os.path.join(place, 'schemathesis.toml')
        with open(settings, 'w') as file:
            file.write(SETTINGS % (key, record_id(url, key)))
        return subprocess.call(
            [os.path.join(tools, 'bin', 'schemathesis'), '--config-file',
             settings, 'run', '--checks', CHECKS, '--phases',
             'examples,coverage,fuzzing', '--max-examples', '60',
             '--max-time', str(SECONDS), '--seed', '1', '--no-color',
             '--suppress-health-check', 'all',
             url + '/api/v1/openapi.json'], cwd=place)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
