"""Gives a process a share of its core: stopped and let go on in turn, until it has ended.

``python throttle.py PID SHARE``
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 0.06


def start(share: float) -> None:
    """Throttles this process from now on, by a process beside it."""
    subprocess.Popen([sys.executable, __file__, str(os.getpid()), str(share)])


def main(pid: int, share: float) -> None:
    """Returns when the process is gone; one that ends while it is stopped is let go on."""
    with contextlib.suppress(ProcessLookupError):
        while _lives(pid):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(PERIOD_S * share)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
