"""Files that appear whole, are on the disk, and have one holder at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from tfdist.errors import TfdistError, UsageError

_RETRY_S = 0.1


def fsync(path: str | os.PathLike[str]) -> None:
    """Return once a file is on the disk, or what was made or renamed in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces `path` when the block ends without error.

    It is beside it, with the same suffix, and of one name: what a killed process left there is
    overwritten. Without `durable` the disk is not waited for: a crash of the machine may lose it.
    """
    unfinished = path.with_name(f".partial-{path.name}")
    try:
        yield unfinished
        if durable:
            fsync(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    if durable:
        with contextlib.suppress(OSError):  # not every file system has it for a directory
            fsync(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True, private: bool = False) -> None:
    """Write a file whole or not at all; raise OSError. A `private` one is for its owner only."""
    with replacing(path, durable=durable) as unfinished:
        if private:
            unfinished.unlink(missing_ok=True)  # an earlier one may be readable, and open
            unfinished.touch(0o600, exist_ok=False)
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, *, durable: bool = True, private: bool = False) -> None:
    """Write JSON whole or not at all, as `write_text`; raise OSError."""
    write_text(path, json.dumps(content, indent=1) + "\n", durable=durable, private=private)


def require_private(file: IO[bytes], *, where: str) -> None:
    """Raise UsageError for an open file with a secret that other users of the machine can read.

    A group may read the file of another owner, as root gives one to a container's user.
    """
    status = os.fstat(file.fileno())
    is_own = status.st_uid == os.geteuid()
    if status.st_mode & (0o077 if is_own else 0o037):
        raise UsageError(
            where,
            received=f"{file.name}, which other users can read "
            f"(mode {stat.S_IMODE(status.st_mode):04o})",
            expected="a file that only its owner can read",
            fix=f"run chmod 600 {file.name} (in a Kubernetes Secret, set defaultMode: 0400)",
            code="readable-by-others",
        )


def move_aside(directory: Path, names: Iterable[str]) -> None:
    """Move files to ``old-1``, ``old-2``, ... inside their directory, in this order."""
    number = 1
    while (directory / f"old-{number}").exists():
        number += 1
    aside = directory / f"old-{number}"
    aside.mkdir()
    for name in names:
        os.replace(directory / name, aside / name)


@contextlib.contextmanager
def one_line_errors(where: object) -> Iterator[None]:
    """Raise TfdistError, which names `where`, for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise TfdistError(f"{where}: {error.strerror or error}") from error


class Held(TfdistError):
    """Another process holds the lock; `holder` is its id, or ``unknown``."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by process {holder}")
        self.holder = holder


class FileLock:
    """Lock of a file or directory, by `flock`: the kernel releases it when the process ends.

    Held from `acquire` until `release`, the end of this object, or of the process. A process
    forked meanwhile, such as one that reads data, does not keep it. A file stays there, with the
    id of the process; only the kernel's lock says whether it is held.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._close: weakref.finalize[..., Any] | None = None
        _locks.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        return self._close is not None

    @property
    def is_in_place(self) -> bool:
        """Whether it is held, and its file is still the one at the path."""
        found = self._close.peek() if self._close else None
        return found is not None and _is_at(self.path, found[2][0])

    def acquire(self, *, within_s: float = _RETRY_S) -> Self:
        """Take the lock and return it; raise Held after `within_s`, and OSError.

        The default is one more try, because `is_held` in another process takes it for a moment.
        """
        deadline_s = time.monotonic() + within_s
        while not self.held:
            try:
                self._close = weakref.finalize(self, os.close, _open_locked(self.path))
            except Held:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_RETRY_S)
        return self

    def release(self) -> None:
        if self._close is not None:
            self._close()
            self._close = None


def is_held(path: Path) -> bool:
    """Return whether a process has the lock of a file or directory; False without one."""
    for flags in (os.O_RDWR, os.O_RDONLY):  # NFS locks only a file that is open for writing
        # It is a directory, another user's, not there, or cannot be locked.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags)
            try:
                return not _lock(descriptor)
            finally:
                os.close(descriptor)
    return False


def _open_locked(path: Path) -> int:
    """Return a descriptor of the locked file."""
    is_directory = path.is_dir()
    flags = os.O_RDONLY if is_directory else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        if not _lock(descriptor):
            raise Held(path, "unknown" if is_directory else _holder(descriptor))
        if _is_at(path, descriptor):
            if not is_directory:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)  # the last holder has removed it meanwhile
    return _open_locked(path)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_all)  # a lock lasts until its last copy is closed
