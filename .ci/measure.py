"""Measure branch coverage of preflight.py, its child processes included.

    python3 .ci/measure.py VENV SCRIPT DIR

Run SCRIPT with the Python of VENV, which has coverage installed, and leave
DIR/coverage.ini and the data files beside it.

The tests start the program as a child, mostly with -I and often with an
empty environment, so no variable can carry the settings to it. A line in a
.pth file does, with -I too: while the settings file exists, every process
of this Python is measured. Only children started with -S escape, and what
they run is not counted. Nor are copies of the program: a test may change
its copy.
"""
import os
import subprocess
import sys

SETTINGS = """\
[run]
branch = true
parallel = true
data_file = {directory}/data
include = {root}/preflight.py
disable_warnings = no-data-collected,module-not-measured

[report]
show_missing = true
exclude_also =
    if __name__ == .__main__.:
"""

# The environment is left as it was found: tests compare it. A process that
# ends by exec or _exit never reaches coverage's own exit handler.
HOOK = """\
import os

SETTINGS = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                        'measure.ini')


def saving(call, measured):
    def wrapper(*args):
        try:
            measured.save()
        except Exception:
            pass        # a full disk, another user: the call must not fail
        return call(*args)
    return wrapper


def start():
    import coverage
    os.environ['COVERAGE_PROCESS_START'] = SETTINGS
    try:
        measured = coverage.process_startup()
    finally:
        del os.environ['COVERAGE_PROCESS_START']
    if measured is not None:
        for name in ('_exit', 'execv', 'execve'):
            setattr(os, name, saving(getattr(os, name), measured))


if os.path.exists(SETTINGS):
    start()
"""


def main(argv):
    venv, script, directory = argv[1:]
    python = os.path.join(venv, 'bin', 'python')
    site = subprocess.check_output(
        [python, '-I', '-c',
         'import sysconfig; print(sysconfig.get_path("purelib"))'])
    site = site.decode().strip()
    settings = SETTINGS.format(
        directory=directory, root=os.path.dirname(os.path.abspath(script)))
    switch = os.path.join(site, 'measure.ini')
    for path, text in ((os.path.join(site, 'measure_hook.py'), HOOK),
                       (os.path.join(site, 'measure.pth'),
                        'import measure_hook\n'),
                       (os.path.join(directory, 'coverage.ini'), settings),
                       (switch, settings)):
        with open(path, 'w') as file:
            file.write(text)
    try:
        # An argument keeps the tests in one process, which can be measured.
        return subprocess.call([python, script, '-q'])
    finally:
        os.unlink(switch)


if __name__ == '__main__':
    sys.exit(main(sys.argv))
