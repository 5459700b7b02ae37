"""Jobs through the launcher as a test sees them: what they say, and the processes they have."""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 250.0
GONE_S = 20.0

LAUNCH = (sys.executable, "-m", "tfdist.launch")
# The fork server as it is, but for what it imports: no test here needs TensorFlow.
FORK = (
    sys.executable,
    "-c",
    "import sys, tfdist.launch.fork_server as f; f.IMPORTS = ('json',);"
    "from tfdist.launch.__main__ import main; sys.exit(main())",
    "--start=fork",
)
STARTS = pytest.mark.parametrize("command", [LAUNCH, FORK], ids=["exec", "fork"])

PAUSE = "import os, signal; os.write(1, b'ready %d\\n' % os.getpid()); signal.pause()"
DEAF = "import os, signal; signal.signal(15, signal.SIG_IGN)\n" + PAUSE.partition("; ")[2]
TREE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = '''import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"ready %d\\\\n" % os.getpid())
signal.pause()'''
subprocess.Popen([sys.executable, "-c", child])
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
subprocess.Popen([sys.executable, "-c", child], process_group=0, env={})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"ready %d\\n" % os.getpid())
        signal.pause()
    os._exit(0)
os.write(1, b"ready %d\\n" % os.getpid())
signal.pause()
"""


class Job:
    """A launcher that is running, what it has said, and the processes that said `ready`."""

    def __init__(self, process, fd, path):
        self.process = process
        self.fd = fd
        self.path = path
        self.text = ""
        self.pidfds = {}

    def read_until(self, pattern, *, count=1):
        """Reads the output until `pattern` has been seen `count` times; returns the matches."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found := re.findall(pattern, self.text)) < count:
            assert self._read(deadline_s), f"{pattern!r} is not in what was printed"
        return found

    def ready(self, count):
        """Waits until `count` processes have said that they are; returns their ids."""
        pids = [int(pid) for pid in self.read_until(r"ready (\d+)\n", count=count)]
        for pid in set(pids) - set(self.pidfds):
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self.pidfds[pid] = os.pidfd_open(pid)
        return pids

    def end(self):
        """Reads to the end and returns the exit code."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._read(deadline_s):
            pass
        return self.process.wait(max(0.0, deadline_s - time.monotonic()))

    def assert_gone(self, within_s=GONE_S):
        """Fails if a process that said `ready` lives longer than `within_s` from now."""
        deadline_s = time.monotonic() + within_s
        for pid, fd in self.pidfds.items():
            left_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([fd], [], [], left_s)[0], f"process {pid} is still there"

    def signal(self, signum):
        self.process.send_signal(signum)

    def _read(self, deadline_s):
        left_s = max(0.0, deadline_s - time.monotonic())
        assert select.select([self.fd], [], [], left_s)[0], "nothing more was printed in time"
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:  # the end of a terminal
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def default_signals():
    """Undoes what nohup, or a shell without job control, has this process ignore."""
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def take_terminal():
    default_signals()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


def report(run_dir):
    return json.loads((Path(run_dir) / "report.json").read_text())


def children(pid):
    """Returns the command lines of a process's children, by process id."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {}
    for child in listed:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
    return found


def side_by_side(*cases):
    """Runs the first half of each case, which ends at its `yield`, and then the second halves."""
    for case in cases:
        next(case)
    for case in cases:
        assert next(case, "over") == "over"
