"""One chief to a sweep, held by `flock`: the kernel lets go when the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from tfdist.errors import TfdistError, UsageError

FILE_NAME = ".chief.lock"
_MOMENT_S = 0.1


class ChiefLock:
    """Held while it is entered. The file stays: only the kernel's lock on it says anything.

    Raises UsageError where another process has it.
    """

    def __init__(self, sweep_dir: Path) -> None:
        self._sweep_dir = sweep_dir
        self._descriptor = -1

    def __enter__(self) -> ChiefLock:
        path = self._sweep_dir / FILE_NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TfdistError(f"{path}: {error.strerror or error}") from error
        if not _locked(descriptor) and not self._locked_a_moment_later(descriptor):
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UsageError(
                f"sweep directory {self._sweep_dir}",
                received=f"a second chief while process {holder} runs the sweep",
                expected="one chief",
                fix="wait for it or end it; --show prints how far it is",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def _locked_a_moment_later(self, descriptor: int) -> bool:
        """Tries once more: `is_held`, of a --show, takes a lock for a moment too."""
        time.sleep(_MOMENT_S)
        return _locked(descriptor)


def is_held(path: Path) -> bool:
    """Returns whether some process has a `flock` on the file or directory; False without one.

    A file is opened to be written where that is allowed: NFS locks no other.
    """
    try:
        descriptor = _opened(path)
    except OSError:
        return False
    try:
        return not _locked(descriptor)
    except OSError:  # it cannot be locked, and so is not
        return False
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # a directory, another user's, or a file system that is read only
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
