"""The files of one checkpoint, each synced to disk before the next step relies on it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.checkpoint import shards as shard_files
from tfdist.checkpoint.manifest import FILE_NAME, Manifest
from tfdist.errors import TfdistError, UsageError
from tfdist.files import fsync

UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"
_SHARD = "arrays"
_PROBE = "probe"
# What a second try with the same path cannot cure.
_WRONG_PATH = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT),
    )
)


def write_files(
    directory: Path,
    *,
    arrays: Mapping[str, Any],
    step: int,
    best: bool,
    meta: Mapping[str, Any],
) -> None:
    """Write a shard and the manifest into a new `directory` and fsync each; raise OSError."""
    shutil.rmtree(directory, ignore_errors=True)
    os.mkdir(directory)
    shard, entries = shard_files.write_shard(
        directory / f"{_SHARD}.bin", shard=_SHARD, arrays=arrays
    )
    manifest = Manifest(step=step, best=best, meta=meta, shards={_SHARD: shard}, arrays=entries)
    shard_files.write_bytes(directory / FILE_NAME, manifest.to_bytes())
    fsync(directory)


def make_directory(directory: Path) -> bool:
    """Make the directory of a store, and those above it; False where it was there. Or OSError."""
    if directory.is_dir():
        return False
    if directory.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    fsync(directory.parent)
    return True


def remove_unused(directory: Path, *, but: str) -> None:
    """Remove a directory where nothing but the file named `but` is in it."""
    with contextlib.suppress(OSError):
        if os.listdir(directory) == [but]:
            os.unlink(directory / but)
            os.rmdir(directory)


def try_out(directory: Path) -> None:
    """Writes, renames and removes a small directory as a checkpoint is.

    Raises OSError where that cannot be done, and UsageError on a file system that takes the files
    and does not rename their directory as a whole.
    """
    beside, place = directory / f"{UNFINISHED}{_PROBE}", directory / f"{DISCARDED}{_PROBE}"
    try:
        os.mkdir(beside)
        shard_files.write_bytes(beside / _PROBE, b"\0")
        fsync(beside)
        _try_rename(beside, place)
    finally:
        for leftover in (beside, place):
            shutil.rmtree(leftover, ignore_errors=True)


def wrong_path(directory: Path, error: OSError) -> UsageError | None:
    """Return what to tell of an error that the choice of `directory` brings, else None."""
    if error.errno not in _WRONG_PATH:
        return None
    return UsageError(
        f"checkpoints in {directory}",
        received=error.strerror,
        expected="a directory that can be made and written",
        fix="choose another directory, or give this user the right to write there",
    )


def failure(
    directory: Path, error: OSError, *, what: str = "", newest: int | None = None
) -> TfdistError:
    """Return what is wrong and what is safe, in one line.

    Args:
      what: of the directory, as in ``checkpoint of step 7 in ``; all of it if not said.
      newest: the step of the newest checkpoint that is whole.
    """
    free = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(directory).free >> 20} MiB free)"
    safe = "none was saved before"
    if newest is not None:
        safe = f"earlier checkpoints are untouched, the newest is of step {newest}"
    where = what or "checkpoints in "
    return TfdistError(f"{where}{directory}: {error.strerror or error}{free}; {safe}")


def _try_rename(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
        moved = not source.exists() and (target / _PROBE).read_bytes() == b"\0"
        problem = "" if moved else "the files did not come along"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise UsageError(
            f"checkpoints in {target.parent}",
            received=f"a file system that does not rename a directory ({problem})",
            expected="one on which a directory is renamed at once, as a local one does",
            fix="write checkpoints to a local disk, and copy them",
        )
