"""One writer to a directory, held by `flock`: the kernel lets go when the process ends."""

from __future__ import annotations

import fcntl
import functools
import os
import weakref
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError

FILE_NAME = ".lock"


class SecondWriter(UsageError):
    """Another process writes to the directory."""


class WriterLock:
    """Held from `acquire` until `release`, the end of this object, or of the process.

    A process forked meanwhile, such as one that reads data, does not hold it on.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._close: weakref.finalize[..., Any] | None = None

    @property
    def held(self) -> bool:
        return self._close is not None

    def acquire(self) -> None:
        """Takes the lock at once; raises SecondWriter where another has it, and OSError."""
        _let_go_in_children()
        descriptor = self._open()
        while not self._is_there(descriptor):  # its last holder has removed it meanwhile
            os.close(descriptor)
            descriptor = self._open()
        self._close = weakref.finalize(self, os.close, descriptor)
        _acquired.add(self)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._close is not None:
            self._close()
            self._close = None

    def _open(self) -> int:
        """Returns a descriptor of the locked file."""
        descriptor = os.open(self._directory / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode().strip() or "unknown"
            os.close(descriptor)
            raise SecondWriter(
                f"checkpoints in {self._directory}",
                received=f"a second writer while process {holder} writes there",
                expected="one writer",
                fix="end the other run, or give this one a directory of its own",
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _is_there(self, descriptor: int) -> bool:
        try:
            there = os.stat(self._directory / FILE_NAME)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))


_acquired: weakref.WeakSet[WriterLock] = weakref.WeakSet()


@functools.cache
def _let_go_in_children() -> None:
    """Has forked children close their copies: the lock lasts until the last one is closed."""
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for lock in list(_acquired):
        lock.release()
