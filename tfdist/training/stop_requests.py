"""Stop requests by signal, which a run answers after the current step block.

Python calls a signal handler between two bytecode instructions, so after a compiled call returns.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from tfdist.errors import Stopped

_LOG = logging.getLogger(__name__)
_SAME_REQUEST_S = 0.1

_NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that make a run save and stop. Some schedulers announce the end by SIGUSR1."""


class StopRequested(Exception):
    """Raised at the same point in all tasks after some task received a stop signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopRequests:
    """Receives the first of `SIGNALS` while entered, and exits the process at the second.

    It works only in the main thread, because Python handles signals there. Signals that the process
    ignores from its start, as under nohup, stay ignored. On exit it restores the old handlers. If
    no `Stopped` has answered the signal, it then sends the signal again to the old handler.

    A task may stop because of another task's signal. It then treats its own first signal as the
    same request, also after the block. When the first task exits, a launcher or scheduler signals
    the other tasks, which may still be writing.

    Signals within 0.1 s of the first count as one.
    """

    def __init__(self) -> None:
        self._signal_s = 0.0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self.signum: int | None = None

    def slots(self) -> list[float]:
        """Return a number per signal to sum over tasks: 1 if this task received it, else 0."""
        return [float(self.signum == signum) for signum in SIGNALS]

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is not threading.main_thread():
            _LOG.debug(
                "not in the main thread: the handlers of SIGTERM, SIGUSR1 and SIGINT are unchanged"
            )
            return self
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a C handler
                self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        if isinstance(error, Stopped):
            if self.signum is None:
                for signum in self._before:  # ignore one signal
                    signal.signal(signum, lambda *_: self._give_back())
        elif self.signum is not None:
            if isinstance(error, Exception):  # log first: the signal may end the process
                _LOG.error("%s while stopping: %s", signal.Signals(self.signum).name, error)
            signal.raise_signal(self.signum)

    def _give_back(self) -> None:
        """Restore the old handlers."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if os.getpid() != self._process:  # a forked child answers as before
            self._give_back()
            signal.raise_signal(signum)
        elif self.signum is None:
            self._signal_s = now_s
            self.signum = signum
        elif now_s - self._signal_s >= _SAME_REQUEST_S:
            name = signal.Signals(signum).name
            os.write(2, f"tfdist: {name} while stopping: ended at once\n".encode())
            os._exit(128 + signum)


def signal_of(slots: Sequence[float]) -> int | None:
    """Return the signal that some task received, from the sum of all tasks' `slots`."""
    return next((s for s, count in zip(SIGNALS, slots, strict=True) if count > 0), None)
