"""PID namespace for a job: if its first process ends, the kernel kills every process inside.

The guardian kills the remaining processes of a killed launcher. If both are killed at once, the
tasks die with the launcher, but the tasks' children survive. In a PID namespace the kernel kills
them too. Process ids inside differ from process ids outside, so only `--isolate` creates one.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from tfdist.launch.events import STOP_SIGNALS, exit_code_of
from tfdist.launch.guardian import die_with
from tfdist.launch.isolation import call, mount

_CLONE_NEWNS, _CLONE_NEWPID = 0x2_0000, 0x2000_0000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x4000, 1 << 19
_SI_USER = 0
_OUTSIDE = 0  # parent pid that a namespace's first process sees


def enclose() -> bool:
    """Continue as a process in a new PID namespace. Return False if the kernel refuses it.

    A new process inside returns from this function. The calling process stays outside, forwards
    signals, and exits with the same exit code. It must have only one thread.
    """
    told, tell = os.pipe()
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored signal is not delivered
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
    """Return in the second process of a new namespace. The other processes wait or exit."""
    die_with(caller)
    try:
        call("unshare", _CLONE_NEWPID | _CLONE_NEWNS)
        if first := os.fork():
            os.close(tell)
            _stand_for(first, sender=caller)
        die_with(_OUTSIDE)
        mount("none", "/", "", _MS_REC | _MS_SLAVE)  # mounts are not visible outside
        mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        if second := os.fork():
            os.close(tell)
            _stand_for(second, sender=_OUTSIDE)
    except OSError:  # not permitted, as in most containers
        os._exit(1)


def _stand_for(child: int, *, sender: int | None = None) -> NoReturn:
    """Forward stop signals to a child process, reap orphans, and exit with the child's code.

    Args:
      child: Process id of the child.
      sender: Only signals from this process are forwarded (None: from any process). Signals from a
        terminal reach the child directly and are never forwarded.
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
