"""Atomic writes, durable writes and file locks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from tfdist.errors import TfdistError, UsageError

if TYPE_CHECKING:
    import filelock

_RETRY_S = 0.1
# A link could name any file of this user, and opening a FIFO would block.
_UNTRUSTED = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))


def fsync(path: str | os.PathLike[str]) -> None:
    """Flush a file to the disk, or the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` if the block ends without an error.

    The temporary file is in the same directory, with the same suffix and a fixed name. A file or
    link of that name, left by a killed process or another user, is removed first. Without
    `durable` the write is not flushed, so a crash of the machine may lose it.
    """
    unfinished = path.with_name(f".partial-{path.name}")
    unfinished.unlink(missing_ok=True)
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
        with contextlib.suppress(OSError):  # some file systems cannot fsync a directory
            fsync(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True, private: bool = False) -> None:
    """Write a file atomically, or raise OSError. With `private`, only the owner can read it."""
    mode = 0o600 if private else 0o666
    with (
        replacing(path, durable=durable) as unfinished,
        open(  # "x" follows no link
            unfinished, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)
        ) as file,
    ):
        file.write(text)


def write_json(path: Path, content: Any, *, durable: bool = True, private: bool = False) -> None:
    """Write JSON atomically, with the options of `write_text`, or raise OSError."""
    write_text(path, json.dumps(content, indent=1) + "\n", durable=durable, private=private)


def require_private(file: IO[bytes], *, where: str) -> None:
    """Raise UsageError if other users of the machine can read an open file with a secret.

    A group may read the file of another owner: root shares secrets with a container in this way.
    """
    status = os.fstat(file.fileno())
    is_own = status.st_uid == os.geteuid()
    if status.st_mode & (0o077 if is_own else 0o037):
        raise UsageError(
            where,
            f"other users can read {file.name} (mode {stat.S_IMODE(status.st_mode):04o})",
            fix=f"run chmod 600 {file.name} (in a Kubernetes Secret, set defaultMode: 0400)",
            code="readable-by-others",
        )


def open_untrusted(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, or raise OSError for a link, a directory or a FIFO.

    Use it in directories that other users can write to. `open` accepts it as `opener`.
    """
    descriptor = os.open(path, flags | _UNTRUSTED, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "not a regular file", os.fspath(path))
    return descriptor


def move_aside(directory: Path, names: Iterable[str]) -> Path:
    """Move files, in order, to ``old-1``, ``old-2``, ... in their directory, and return it."""
    number = 1
    while (directory / f"old-{number}").exists():
        number += 1
    aside = directory / f"old-{number}"
    aside.mkdir()
    for name in names:
        os.replace(directory / name, aside / name)
    return aside


@contextlib.contextmanager
def one_line_errors(where: object) -> Iterator[None]:
    """Convert an OSError in the block to a one-line TfdistError that names `where`."""
    try:
        yield
    except OSError as error:
        raise TfdistError(f"{where}: {error.strerror or error}") from error


class LockedError(TfdistError):
    """Another process holds the lock. `holder` is its process id, or ``unknown``."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by process {holder}")
        self.holder = holder


class FileLock:
    """File lock that the kernel releases when the process exits or is killed.

    The lock is held from `acquire` until `release`, the deletion of this object, or the exit of the
    process. A child process forked meanwhile, such as a data reader, does not keep the lock. The
    file remains and contains the process id. Only the kernel's lock says whether it is held. Links
    are not followed, and directories cannot be locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: filelock.BaseFileLock | None = None
        self._file: os.stat_result | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        return self._lock is not None and self._lock.is_locked  # False in a forked process

    @property
    def is_in_place(self) -> bool:
        """Return whether the lock is held and its file is still the file at the path."""
        with contextlib.suppress(OSError):
            found = self._file if self.held else None
            return found is not None and os.path.samestat(os.lstat(self.path), found)
        return False

    def acquire(self, *, within_s: float = _RETRY_S) -> Self:
        """Return the acquired lock, or raise LockedError after `within_s` seconds, or OSError.

        The default allows a retry, because `is_held` in another process locks it for a moment.
        """
        if self.held:
            return self
        import filelock  # imported here to keep the start of all programs fast

        os.stat(self.path.parent)  # raise if it is missing: filelock would create it
        files: list[os.stat_result] = []
        lock = filelock.FileLock(
            self.path,
            within_s,
            thread_local=False,  # another thread may release it
            fallback_to_soft=False,
            on_acquired=lambda descriptor: files.append(_sign(descriptor)),
        )
        try:
            lock.acquire()
        except filelock.Timeout:
            raise LockedError(self.path, _holder(self.path)) from None
        self._lock, self._file = lock, files[-1]
        return self

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file (False if the file is missing)."""
    try:
        import fcntl
    except ImportError:  # Windows, where no job of the launcher runs
        return False
    for flags in (os.O_RDWR, os.O_RDONLY):  # NFS locks only files that are open for writing
        # The file may be missing, not accessible, or impossible to lock.
        with contextlib.suppress(OSError):
            descriptor = open_untrusted(path, flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
            return False
    return False


def _sign(descriptor: int) -> os.stat_result:
    """Write this process's id into the lock's file and return the file's status.

    Raises OSError for a hard link or a FIFO, because the write would change another file.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise OSError(errno.EMLINK, "the lock file is a link or not a regular file")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"%d\n" % os.getpid())
    return found


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError), os.fdopen(open_untrusted(path), "rb") as file:
        text = file.read(20).strip()
        return text.decode() if text.isdigit() else "unknown"
    return "unknown"
