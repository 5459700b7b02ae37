"""Parent-death guard: runs a command and stops it when its parent process is gone.

Run by its path: ``python -I -S leash.py PARENT_PID command...``. A chief that is killed leaves
no trial behind: the kernel sends the trial's launcher SIGTERM, upon which its tasks save.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Replace this process by the command."""
    parent, command = int(argv[0]), argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
