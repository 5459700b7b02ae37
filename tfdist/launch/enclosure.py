"""PID namespace for a job: if its first process ends, the kernel kills every process inside.

The guardian kills what a killed launcher leaves. If both are killed at once, only the tasks
themselves die with the launcher, and processes that they started live on. A PID namespace has no
such gap. Process ids inside are not those outside, so only `--isolate` makes one.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import NoReturn

from tfdist.launch.events import STOP_SIGNALS, exit_code_of
from tfdist.launch.guardian import die_with
from tfdist.launch.isolation import call

_CLONE_NEWNS, _CLONE_NEWPID = 0x2_0000, 0x2000_0000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x4000, 1 << 19
_SI_USER = 0
_OUTSIDE = 0  # the parent of a namespace's first process, as that process sees it


def enclose() -> bool:
    """Go on as a process of a new PID namespace; return False, and change nothing, if refused.

    The process that called stays outside: it passes signals on and ends with the same exit code.
    Called while the process has one thread.
    """
    told, tell = os.pipe()
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would not be delivered
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *STOP_SIGNALS))
    caller = os.getpid()
    if maker := os.fork():
        os.close(tell)
        if os.read(told, 1):
            _stand_for(maker)
        os.waitpid(maker, 0)
    else:
        os.close(told)
        _make_namespace(caller, tell)
        os.write(tell, b"1")
    is_enclosed = not maker
    os.close(tell if is_enclosed else told)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGCHLD, chld)
    return is_enclosed


def _make_namespace(caller: int, tell: int) -> None:
    """Return in the second process of a new namespace; the others stand for it, or exit."""
    die_with(caller)
    try:
        call("unshare", _CLONE_NEWPID | _CLONE_NEWNS)
        if first := os.fork():
            os.close(tell)
            _stand_for(first, sender=caller)
        die_with(_OUTSIDE)
        _mount("none", "/", "", _MS_REC | _MS_SLAVE)  # what is mounted here is not seen outside
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        if second := os.fork():
            os.close(tell)
            _stand_for(second, sender=_OUTSIDE)
    except OSError:  # no right to, as in most containers
        os._exit(1)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _stand_for(child: int, *, sender: int | None = None) -> NoReturn:
    """Pass requests to stop on to a child process, reap orphans, and exit as the child does.

    Args:
      child: process id.
      sender: the process whose requests are passed on; None for any. What a terminal sends reaches
        the child too, and is not passed on.
    """
    while True:
        info = signal.sigwaitinfo((signal.SIGCHLD, *STOP_SIGNALS))
        if info.si_signo != signal.SIGCHLD:
            if info.si_code == _SI_USER and sender in (None, info.si_pid):
                os.kill(child, info.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                os._exit(exit_code_of(os.waitstatus_to_exitcode(ended[1])))
