"""Lease guard: a process that ends a runner's trials before its lease expires.

Run by its path: ``python -I -S guard.py``. The runner says on standard input, a line each,
``watch PID`` of a trial's launcher and ``renew S``: at S of `now_s` the chief is known to have, or
to come to have, ten more seconds of patience. Six seconds later the trials are asked to save and
end, and killed three seconds after that: before the chief can give them to another runner.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

SAVE_AFTER_S, KILL_AFTER_S = 6.0, 9.0


def now_s() -> float:
    """Return the seconds since the machine started, those in which it was suspended too.

    Nobody sets this clock; and while the machine sleeps the chief does not.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseGuard:
    """State of the lease guard; `due` returns the signals to send at a given time."""

    def __init__(self, begun_s: float) -> None:
        self._renewed_s = begun_s
        self._asked: set[int] = set()

    def renew(self, at_s: float) -> None:
        """The chief has heard of the runner at this time, or has not begun to wait for it."""
        self._renewed_s = max(self._renewed_s, at_s)
        self._asked.clear()

    def due(self, watched: set[int], at_s: float) -> list[tuple[int, signal.Signals]]:
        """Return whom to send what."""
        if at_s >= self._renewed_s + KILL_AFTER_S:
            return [(one, signal.SIGKILL) for one in watched]
        if at_s < self._renewed_s + SAVE_AFTER_S:
            return []
        asked, self._asked = self._asked, watched | self._asked
        return [(one, signal.SIGTERM) for one in watched - asked]


def main() -> None:
    """Reads what the runner says; when it is gone, goes on until its trials have ended."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # they are for the runner
    guard, said = LeaseGuard(now_s()), b""
    pidfds: set[int] = set()
    is_over = False
    while not is_over or pidfds:
        ready, _, _ = select.select([*([] if is_over else [0]), *pidfds], [], [], 0.25)
        for fd in pidfds & set(ready):  # it has ended
            pidfds.discard(fd)
            os.close(fd)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            is_over = not data
            *lines, said = (said + data).split(b"\n")
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
    main()
