"""Guard of a runner's leases: a process that ends the trials of a runner that cannot.

Run by its path in a bare interpreter (-I -S), so it imports nothing of tfdist. It reads from
standard input, a line each, ``watch PID`` of a trial's launcher and ``renew S``: at S of `now_s`
the chief is known to have, or to come to have, ten more seconds of patience. Six seconds later the
trials are asked to save and end, and killed three seconds after that: before the chief can give
them to another runner. A process of its own does this, as a runner that is stopped cannot.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

SAVE_AFTER_S, KILL_AFTER_S = 6.0, 9.0


class LeaseGuardClient:
    """The runner's side of a lease guard, which ends after it, when its trials have ended.

    Raises TfdistError where the guard is gone: the runner cannot keep its promise any more.
    """

    def __enter__(self) -> LeaseGuardClient:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def renew(self, at_s: float) -> None:
        """Report until when the chief leaves our trials to us: from this moment of its clock on."""
        self._say(f"renew {at_s}")

    def watch(self, pid: int) -> None:
        """Have the launcher of a trial ended in time."""
        self._say(f"watch {pid}")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except OSError as error:
            from tfdist.errors import TfdistError  # which a guard itself cannot import

            raise TfdistError("the runner's guard has ended: the runner ends too") from error


def now_s() -> float:
    """Return the seconds since the machine started, those in which it was suspended too.

    Nobody sets this clock; and while the machine sleeps the chief does not.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseGuard:
    """State of the lease guard; `due` returns the signals to send at a given time."""

    def __init__(self, begun_s: float) -> None:
        self._renewed_s = begun_s
        self._signalled: set[int] = set()

    def renew(self, at_s: float) -> None:
        """Note that the chief had heard of the runner at this time, or did not wait for it yet."""
        self._renewed_s = max(self._renewed_s, at_s)
        self._signalled.clear()

    def due(self, watched: set[int], at_s: float) -> list[tuple[int, signal.Signals]]:
        """Return the signals that are due, each with the one of `watched` that is to get it."""
        if at_s >= self._renewed_s + KILL_AFTER_S:
            return [(one, signal.SIGKILL) for one in watched]
        if at_s < self._renewed_s + SAVE_AFTER_S:
            return []
        signalled, self._signalled = self._signalled, watched | self._signalled
        return [(one, signal.SIGTERM) for one in watched - signalled]


def guard_lease() -> None:
    """Follow the runner's lines; when it is gone, go on until its trials have ended."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # they are for the runner
    guard, unread = LeaseGuard(now_s()), b""
    pidfds: set[int] = set()
    is_over = False
    while not is_over or pidfds:
        poll = select.poll()
        for fd in (*([] if is_over else [0]), *pidfds):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(250)}
        for fd in pidfds & ready:  # it has ended
            pidfds.discard(fd)
            os.close(fd)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            is_over = not data
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                _obey(line, guard, pidfds)
        for fd, signum in guard.due(pidfds, now_s()):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signum)


def _obey(line: bytes, guard: LeaseGuard, pidfds: set[int]) -> None:
    word, _, value = line.partition(b" ")
    if word == b"renew":
        guard.renew(float(value))
        return
    with contextlib.suppress(ProcessLookupError):
        pidfds.add(os.pidfd_open(int(value)))


if __name__ == "__main__":
    guard_lease()
