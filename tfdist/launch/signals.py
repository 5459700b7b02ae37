"""Signals as events: they wake the event loop through a pipe."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a job to stop; SIGUSR1 is what schedulers such as Slurm announce the end with."""

SAME_REQUEST_S = 0.1
"""What sends one request to a process and to its group, as `timeout` does, or a wrapper that hands
Ctrl-C on, delivers it twice: within so long it is one."""


def exit_code_for(signum: int) -> int:
    """Return what a job ends with that was asked to stop: 128 + n, and for SIGUSR1 as SIGTERM."""
    return 128 + (signal.SIGTERM if signum == signal.SIGUSR1 else signum)


class SignalPipe:
    """Delivers SIGCHLD and requests to stop through a descriptor, while it is entered.

    A signal that the launcher was started to ignore, as nohup does, stays ignored.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_s = -math.inf
        self._old_fd = -1
        self._old: dict[signal.Signals, object] = {}
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> SignalPipe:
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *STOP_SIGNALS):
            if signum != signal.SIGCHLD and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            self._old[signum] = signal.signal(signum, _nothing)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # as it was returned
        signal.set_wakeup_fd(self._old_fd)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """Return the signals that have come since the last call, each request to stop once."""
        try:
            came = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signum for signum in came if signum not in STOP_SIGNALS or self._is_new()]

    def _is_new(self) -> bool:
        """Whether the request to stop that has just come is another than the last one."""
        now_s = self._clock()
        if now_s - self._asked_s < SAME_REQUEST_S:
            return False
        self._asked_s = now_s
        return True


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A handler only so that the signal is caught: its number comes through the pipe."""
