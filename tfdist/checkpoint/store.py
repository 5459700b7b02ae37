"""Crash-safe directory of checkpoints: readable after a crash at any moment.

A checkpoint is a directory ``step-<step>.<serial>`` with a shard of raw bytes and a manifest. The
manifest contains the checksum of the shard. The store writes a hidden directory, syncs each file to
the disk, and renames the directory. The serial counts the writes: the highest serial is the newest
checkpoint, even if a step is written again. Reads and writes need no TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.checkpoint.format import (
    MANIFEST,
    Damaged,
    Manifest,
    Unreadable,
    check_size,
    read_arrays,
    read_manifest,
    write_checkpoint,
)
from tfdist.errors import TfdistError, UsageError, require_int
from tfdist.files import FileLock, LockedError, fsync

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d+)\.(\d+)")
_LOCK = ".lock"
_UNFINISHED, _DISCARDED = ".unfinished-", ".discarded-"


class SecondWriter(UsageError):
    """Error for a directory to which another process writes."""


class NothingWhole(TfdistError):
    """Error for a directory in which every checkpoint is damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Content of a checkpoint: step, arrays, metadata, and whether it is marked as the best."""

    step: int
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]
    meta: Mapping[str, Any]
    best: bool


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Location:
    serial: int
    step: int
    path: Path


class CheckpointStore:
    """Directory of checkpoints with a single writer and any number of readers.

    `prepare` or the first `write` locks the directory. The lock lasts until `close`, the exit of
    the process, or the deletion of this object.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.directory = Path(directory)
        self.first_serial = 1
        self.keep = require_int("checkpoint: keep", keep, least=1, fix="pass keep=3")
        self._writing = threading.Lock()
        self._lock = FileLock(self.directory / _LOCK)
        self._known_damaged: set[Path] = set()
        self._held = ""

    def prepare(self) -> None:
        """Create the directory, lock it, and remove the leftovers of a crash.

        Only the writing task calls this method. Raises UsageError for a second writer or a newer
        format, and TfdistError for a path that cannot be written.
        """
        with self._writing:
            try:
                self._become_the_writer()
            except OSError as error:
                raise self._failed("checkpoints in ", error) from error

    def write(
        self,
        step: int,
        arrays: Mapping[str, Any],
        *,
        meta: Mapping[str, Any],
        best: bool = False,
    ) -> Path:
        """Write a checkpoint, remove old checkpoints, and return the new directory.

        The method reads the arrays individually, so the mapping may compute `arrays` lazily. `meta`
        is JSON. A checkpoint with `best` is kept until the next checkpoint with `best`. Only one
        task may call this method, from any thread.

        Raises TfdistError for a full disk or a missing permission: earlier checkpoints stay intact.
        Raises UsageError for a second writer or an unsupported dtype. If an old checkpoint cannot
        be removed, logs a warning.
        """
        with self._writing:
            try:
                self._become_the_writer()
                serials = [location.serial + 1 for location in self._locations()]
                serial = max([*serials, self.first_serial])
                name = f"step-{step:09d}.{serial}"
                unfinished = self.directory / f"{_UNFINISHED}{name}"
                try:
                    write_checkpoint(unfinished, arrays, step=step, best=best, meta=meta)
                    os.replace(unfinished, self.directory / name)
                    # Some file systems do not rename a directory together with its files.
                    os.stat(self.directory / name / MANIFEST)
                except BaseException:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
                self._known_damaged.discard(self.directory / name)  # of an old checkpoint
                fsync(self.directory)
            except OSError as error:
                raise self._failed(f"checkpoint of step {step} in ", error) from error
            try:
                self._discard_old()
            except (OSError, TfdistError) as error:  # the next save retries
                text = "%s: cannot remove an old checkpoint: %s; trying again at the next save"
                logger.warning(text, self.directory, error)
        return self.directory / name

    def steps(self) -> list[int]:
        """Return the steps of the intact checkpoints, in the order of their writes."""
        return [location.step for location, _ in self._sound()]

    def latest(self) -> int | None:
        """Return the step of the newest intact checkpoint, or `None`."""
        steps = self.steps()
        return steps[-1] if steps else None

    def newest_name(self) -> str | None:
        """Return the directory name of the newest checkpoint, intact or damaged, or `None`."""
        names = self.names()
        return names[-1] if names else None

    def names(self) -> list[str]:
        """Return the directory names of all checkpoints, intact or damaged, oldest first."""
        return [location.path.name for location in self._locations()]

    def best(self) -> int | None:
        """Return the step of the newest intact checkpoint with `best`, or `None`."""
        steps = [location.step for location, manifest in self._sound() if manifest.best]
        return steps[-1] if steps else None

    def written_at(self, step: int) -> float | None:
        """Return the time of the newest write of `step` in seconds since 1970, or `None`."""
        paths = [location.path for location in self._locations() if location.step == step]
        with contextlib.suppress(IndexError, FileNotFoundError):  # the writer has just removed it
            return paths[-1].stat().st_mtime
        return None

    def read(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint of `step` (default: the newest intact checkpoint).

        If the newest checkpoint is damaged, log a warning and read the previous checkpoint. Memory
        holds a single copy of the arrays.

        Raises UsageError if no checkpoint exists or its format is newer than this tfdist. Raises
        Unreadable, a TfdistError, if it may be intact but cannot be read now. Raises NothingWhole,
        a TfdistError, if all checkpoints (of `step`, if given) are damaged.
        """
        locations = [
            each for each in reversed(self._locations()) if step is None or each.step == step
        ]
        if not locations:
            steps = self.steps()
            raise UsageError(
                f"checkpoints in {self.directory}",
                f"the directory has no checkpoint{'' if step is None else f' of step {step}'}"
                f"{f' (it has {steps})' if steps else ''}",
                fix="correct the path or the step",
                code="no-checkpoint",
            )
        problems = []
        for location in locations:
            try:
                return self._read(location)
            except Damaged as error:
                if not os.path.lexists(location.path):  # the writer has just removed it
                    return self.read(step)
                problems.append(f"{location.path.name} is damaged ({error})")
                if len(problems) < len(locations) and location.path not in self._known_damaged:
                    logger.warning(
                        "%s: %s; using the previous checkpoint", self.directory, problems[-1]
                    )
                self._known_damaged.add(location.path)
        raise NothingWhole(f"{self.directory}: no readable checkpoint: {'; '.join(problems)}")

    def read_named(self, name: str) -> Checkpoint | None:
        """Return the checkpoint in the directory `name`, or `None` if it cannot be read.

        For example, the writer may just have removed it. Raises UsageError for a newer format.
        """
        try:
            return self._read(next(p for p in self._locations() if p.path.name == name))
        except (StopIteration, Damaged, Unreadable) as error:
            reason = error or "the writer has removed it"
            logger.info("%s: cannot read %s: %s", self.directory, name, reason)
            return None

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[bool]:
        """Yield whether a checkpoint exists, and keep it in this block if newer ones replace it."""
        with self._writing:
            self._held = name
            exists = (self.directory / name).exists()
        try:
            yield exists
        finally:
            self._held = ""
            with self._writing, contextlib.suppress(OSError, TfdistError):  # the next save retries
                if self._lock.is_in_place:
                    self._discard_old()

    def close(self) -> None:
        """Release the lock, so that another process can write."""
        with self._writing:
            self._lock.release()

    def _read(self, location: Location) -> Checkpoint:
        manifest = _manifest_of(location)
        return Checkpoint(
            step=manifest.step,
            arrays=read_arrays(location.path, manifest),
            meta=manifest.meta,
            best=manifest.best,
        )

    def _locations(self) -> list[Location]:
        """Return all checkpoints, intact or damaged, oldest first."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unreadable(f"checkpoints in {self.directory}: {error.strerror}") from error
        return sorted(
            Location(serial=int(match[2]), step=int(match[1]), path=self.directory / name)
            for name in names
            if (match := NAME.fullmatch(name))
        )

    def _sound(self) -> list[tuple[Location, Manifest]]:
        """Return the checkpoints with a valid manifest and a shard of the right size.

        The bytes of the shard are not read. Checkpoints that `read` found damaged are left out.
        """
        sound = []
        for location in self._locations():
            with contextlib.suppress(Damaged):
                manifest = _manifest_of(location)
                check_size(location.path, manifest)
                if location.path not in self._known_damaged:
                    sound.append((location, manifest))
        return sound

    def _discard_old(self) -> None:
        """Keep the last `keep` intact checkpoints and the best checkpoint. Remove all others."""
        sound = self._sound()
        kept = {location.path for location, _ in sound[-self.keep :]}
        kept.update([location.path for location, manifest in sound if manifest.best][-1:])
        for location in self._locations():
            if location.path not in kept and location.path.name != self._held:
                # The rename is atomic: after a crash, no visible checkpoint is half deleted.
                discarded = self.directory / f"{_DISCARDED}{location.path.name}"
                os.replace(location.path, discarded)
                _remove(discarded)

    def _become_the_writer(self) -> None:
        if self._lock.is_in_place:
            return
        self._lock.release()  # the directory was moved or removed: another run may write here
        _make_directory(self.directory)
        self._sound()  # raises UsageError for a newer format before any change
        try:
            self._lock.acquire()
        except LockedError as held:
            raise SecondWriter(
                f"checkpoints in {self.directory}",
                f"process {held.holder} already writes there",
                fix="stop the other run, or use another directory for this run",
                code="second-writer",
            ) from held
        for leftover in os.listdir(self.directory):
            if leftover.startswith((_UNFINISHED, _DISCARDED)):
                _remove(self.directory / leftover)

    def _failed(self, where: str, error: OSError) -> TfdistError:
        """Return an error that names the problem and the newest intact checkpoint in one line."""
        newest = None
        with contextlib.suppress(OSError, TfdistError):
            newest = self.latest()
        safe = "no earlier checkpoint exists"
        if newest is not None:
            safe = f"earlier checkpoints are intact (newest: step {newest})"
        return TfdistError(f"{where}{self.directory}: {error.strerror or error}; {safe}")


def _manifest_of(location: Location) -> Manifest:
    manifest = read_manifest(location.path)
    if manifest.step != location.step:
        raise Damaged(f"manifest.json belongs to step {manifest.step}")
    return manifest


def _remove(path: Path) -> None:
    """Remove a directory tree, a file, or a link. Ignore errors: a later call retries."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # already removed, or still a directory
        path.unlink()


def _make_directory(directory: Path) -> None:
    """Create the directory and its parents and sync them to the disk. Raise OSError."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        fsync(directory.parent)
