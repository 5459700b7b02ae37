"""Cache files that one process writes and every process of a job reads."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.errors import StartupTimeout
from tfdist.files import FileLock, LockedError, one_line_errors, replacing

_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0
_MAKING_S = 3600.0


def private_cache_dir() -> Path | None:
    """Return `~/.cache/tfdist`, or `None` if another user could have written files there.

    The directory, its parent, and links to them must belong to this user or root.
    """
    directory = Path("~/.cache/tfdist")
    with contextlib.suppress(OSError, RuntimeError):  # this user has no home
        directory = directory.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(directory.parent, shut=0o002) and _is_own(directory, shut=0o022):
            directory.chmod(0o700)
            return directory
    return None


def _is_own(directory: Path, *, shut: int) -> bool:
    """Return whether this user or root owns a directory that grants no permission in `shut`."""
    link, found = directory.lstat(), directory.stat()
    return {link.st_uid, found.st_uid} <= {0, os.geteuid()} and not found.st_mode & shut


@contextlib.contextmanager
def exclusive(lock_file: Path, *, purpose: str, timeout_s: float) -> Iterator[None]:
    """Hold a lock during the block. While another process holds the lock, log its process ID.

    Raises `StartupTimeout` after `timeout_s` seconds, `TfdistError` if the file cannot be created.
    """
    deadline_s, wait_s = time.monotonic() + timeout_s, 0.0
    where = f"{purpose} in {lock_file.parent}"
    with one_line_errors(where):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_file) as lock:
        while not lock.held:
            try:
                with one_line_errors(where):
                    lock.acquire(within_s=wait_s)
            except LockedError as held:
                wait_s = min(_REPORT_EVERY_S, deadline_s - time.monotonic())
                if wait_s <= 0:
                    raise StartupTimeout(
                        f"{purpose}: process {held.holder} holds {lock_file} for more than "
                        f"{timeout_s:g} s. Fix: wait until the process has finished, or stop it"
                    ) from None
                _log.info("%s: waiting for process %s (%s)", purpose, held.holder, lock_file)
        yield


@contextlib.contextmanager
def cached_file(
    key: str,
    *,
    suffix: str,
    write: Callable[[Path], None],
    cache_dir: Path | None = None,
    purpose: str,
) -> Iterator[Path]:
    """Yield the cache file for `key`. If it does not exist on this machine, write it first.

    `write` writes the content to a given path. The file then appears atomically under its name. If
    no private cache directory exists, the file is temporary and is removed after the block.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as own:
        directory = cache_dir or private_cache_dir() or Path(own)
        target = directory / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)
        if not target.exists():
            with exclusive(Path(f"{target}.lock"), purpose=purpose, timeout_s=_MAKING_S):
                if not target.exists():
                    with replacing(target) as unfinished:
                        write(unfinished)
        yield target
