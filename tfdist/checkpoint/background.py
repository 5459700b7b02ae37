"""A background thread that runs one job at a time and hands its errors back."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time in a thread that ends with it.

    The thread is not a daemon: an interpreter that ends waits for it. To be used by one thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """True while a piece of work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Start `work`, once the one before has ended; raise the error of that one instead."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Return once nothing is under way; raise, once, what went wrong."""
        error = self.join()
        if error is not None:
            raise error

    def join(self) -> BaseException | None:
        """Return once nothing is under way: what went wrong and was not told yet, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
