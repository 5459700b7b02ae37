"""Stop requests by signal, noticed while the main thread is inside a long compiled call.

Python runs a signal's handler between two of its own instructions, and so not before such a call
has returned. What it does at once is to write the number to the wake-up descriptor, where a thread
reads it here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from tfdist.errors import Stopped

_LOG = logging.getLogger(__name__)
_SAME_REQUEST_S = 0.1
_END = 0  # which no signal has: no signal comes any more

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What asks a run to save and stop; SIGUSR1 is how some schedulers announce the end."""


class StopRequested(Exception):
    """Some task of the job has been asked to stop. Raised at the same point in all of them."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopRequests:
    """Receives the first of `SIGNALS` while it is entered, and ends the process at the second.

    Only in the main thread of the program, where Python has its signals; in another one it gets
    nothing. A signal that the program was started to ignore, as nohup does, stays ignored. At the
    end everything is as it was before; a signal that nobody has answered by `Stopped` is then sent
    again, to whoever handled it before. A task that stops for the signal of another one takes the
    first signal of its own, even after the end, as the same request: the first task to be gone has
    a launcher or a scheduler tell the others, which may still have something to write.

    Args:
      end: ends the process with an exit code, from the thread that has got the second signal.
        What sends one signal to a process and to its group delivers it twice: within a tenth of a
        second that is one request.
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
        self._fds: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self.signum: int | None = None

    def slots(self) -> list[float]:
        """Return what this task adds to a message to all: 1 for the signal it has got, else 0."""
        return [float(self.signum == signum) for signum in SIGNALS]

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is not threading.main_thread():
            _LOG.debug("not the main thread: SIGTERM, SIGUSR1 and SIGINT stay as they are")
            return self
        _forget_in_children()
        _entered.append(self)
        read_fd, write_fd = self._fds = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_fd, False)
        self._thread = threading.Thread(
            target=self._listen, args=(read_fd,), name="stop requests", daemon=True
        )
        self._thread.start()
        self._before_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a handler of C
                self._before[signum] = signal.signal(signum, _caught)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fds is None:
            return
        self._give_back()
        os.write(self._fds[1], bytes([_END]))
        if self._thread is not None:
            self._thread.join()
        self._close()
        if isinstance(error, Stopped):
            if self.signum is None and not _entered:
                self._pass_over_one()
        elif self.signum is not None:
            if isinstance(error, Exception):  # the signal may end the process before it is logged
                _LOG.error("%s while stopping: %s", signal.Signals(self.signum).name, error)
            signal.raise_signal(self.signum)

    def _give_back(self) -> None:
        """Set the handlers and the descriptor as they were."""
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
        for fd in self._fds or ():
            os.close(fd)
        self._fds = None

    def _listen(self, fd: int) -> None:
        while True:
            for signum in os.read(fd, 64):
                if signum == _END:
                    return
                self._receive(signum)

    def _receive(self, signum: int) -> None:
        now_s = self._clock()
        if signum not in self._before:
            if self._before_fd >= 0:
                with contextlib.suppress(OSError):  # as Python does where its reader is gone
                    os.write(self._before_fd, bytes([signum]))
        elif self.signum is None:
            self._signal_s = now_s
            self.signum = signum
        elif now_s - self._signal_s >= _SAME_REQUEST_S:
            name = signal.Signals(signum).name
            os.write(2, f"tfdist: {name} while stopping: ended at once\n".encode())
            self._end(128 + signum)


def signal_of(slots: Sequence[float]) -> int | None:
    """Return the signal that some task has got, by the sum of all tasks' `slots`."""
    return next((s for s, count in zip(SIGNALS, slots, strict=True) if count > 0), None)


def _caught(signum: int, frame: FrameType | None) -> None:
    """A handler only so that the signal is caught: its number comes through the descriptor."""


_entered: list[StopRequests] = []


@functools.cache
def _forget_in_children() -> None:
    """Have forked children answer signals as before: theirs would come through our descriptor."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for requests in reversed(_entered[:]):
        requests._give_back()
        requests._close()
