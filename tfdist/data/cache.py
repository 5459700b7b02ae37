"""Cache files, made once and read by every process of a job."""

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
from tfdist.files import FileLock, Held, one_line_errors, replacing

_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0
_MAKING_S = 3600.0


def default_cache_dir() -> Path:
    """Return `~/.cache/tfdist`, or a folder of this user's in the temporary directory."""
    home = Path("~/.cache/tfdist").expanduser()
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    return Path(tempfile.gettempdir()) / f"tfdist-{os.getuid()}"


@contextlib.contextmanager
def exclusive(lock_file: Path, *, purpose: str, timeout_s: float) -> Iterator[None]:
    """Holds a lock that dies with its owner; says whom it waits for, and gives up in the end.

    Raises `StartupTimeout` after `timeout_s` seconds, `TfdistError` where it cannot be made.
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
            except Held as held:
                wait_s = min(_REPORT_EVERY_S, deadline_s - time.monotonic())
                if wait_s <= 0:
                    raise StartupTimeout(
                        f"{purpose}: process {held.holder} has held {lock_file} "
                        f"for more than {timeout_s:g} s"
                    ) from None
                _log.info("%s: waiting for process %s (%s)", purpose, held.holder, lock_file)
        yield


def cached_file(
    key: str,
    *,
    suffix: str,
    write: Callable[[Path], None],
    cache_dir: Path | None = None,
    purpose: str,
) -> Path:
    """Return the file made for `key`, after making it if no process on this machine has yet.

    `write` fills the path it is given; the result appears under its name whole or not at all.
    """
    directory = cache_dir or default_cache_dir()
    target = directory / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)
    if target.exists():
        return target
    with exclusive(Path(f"{target}.lock"), purpose=purpose, timeout_s=_MAKING_S):
        if not target.exists():
            with replacing(target) as unfinished:
                write(unfinished)
    return target
