"""Stop requests by signal, detected while the main thread is inside a long compiled call.

Python runs a signal handler only between two bytecode instructions, so not before the compiled call
returns. But Python writes the signal's number to the wake-up descriptor immediately, and a thread
in this module reads it there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from tfdist.errors import Stopped

_LOG = logging.getLogger(__name__)
_SAME_REQUEST_S = 0.1
_END = 0  # no signal has number 0: it tells the listening thread to exit

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

    Args:
      end: function that exits the process with an exit code (default: `os._exit`). The listening
        thread calls it at the second signal. Signals within 0.1 s of the first count as one.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._clock = clock
        self._end = end
        self._signal_s = 0.0
        self._before: dict[int, Any] = {}
        self._before_fd = -1
        self._sockets: tuple[socket.socket, ...] = ()
        self._thread: threading.Thread | None = None
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
        _forget_in_children()
        _entered.append(self)
        reader, writer = self._sockets = socket.socketpair()  # Windows takes no pipe here
        writer.setblocking(False)
        self._thread = threading.Thread(
            target=self._listen, args=(reader,), name="stop requests", daemon=True
        )
        self._thread.start()
        self._before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a C handler
                self._before[signum] = signal.signal(signum, _caught)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._sockets:
            return
        self._give_back()
        self._sockets[1].send(bytes([_END]))
        if self._thread is not None:
            self._thread.join()
        self._close()
        if isinstance(error, Stopped):
            if self.signum is None and not _entered:
                self._pass_over_one()
        elif self.signum is not None:
            if isinstance(error, Exception):  # log first: the signal may end the process
                _LOG.error("%s while stopping: %s", signal.Signals(self.signum).name, error)
            signal.raise_signal(self.signum)

    def _give_back(self) -> None:
        """Restore the old handlers and the old wake-up descriptor."""
        _entered.remove(self)
        self._set_handlers()
        signal.set_wakeup_fd(self._before_fd)

    def _set_handlers(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _pass_over_one(self) -> None:
        for signum in self._before:
            signal.signal(signum, lambda *_: self._set_handlers())

    def _close(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets = ()

    def _listen(self, reader: socket.socket) -> None:
        while True:
            for signum in reader.recv(64):
                if signum == _END:
                    return
                self._receive(signum)

    def _receive(self, signum: int) -> None:
        now_s = self._clock()
        if signum not in self._before:
            if self._before_fd >= 0:
                with contextlib.suppress(OSError):  # Python also ignores a closed descriptor
                    os.write(self._before_fd, bytes([signum]))
        elif self.signum is None:
            self._signal_s = now_s
            self.signum = signum
        elif now_s - self._signal_s >= _SAME_REQUEST_S:
            name = signal.Signals(signum).name
            os.write(2, f"tfdist: {name} while stopping: ended at once\n".encode())
            self._end(128 + signum)


def signal_of(slots: Sequence[float]) -> int | None:
    """Return the signal that some task received, from the sum of all tasks' `slots`."""
    return next((s for s, count in zip(SIGNALS, slots, strict=True) if count > 0), None)


def _caught(signum: int, frame: FrameType | None) -> None:
    """Do nothing: this handler only makes Python write the signal to the wake-up descriptor."""


_entered: list[StopRequests] = []


@functools.cache
def _forget_in_children() -> None:
    """Restore the old handlers in forked children, which share our wake-up socket."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for requests in reversed(_entered[:]):
        requests._give_back()
        requests._close()
