"""Crash-safe directory of checkpoints: readable after a crash at any moment.

A checkpoint is a directory ``step-<step>.<serial>``: a shard of raw bytes and a manifest that names
it with its checksum. It is written under a hidden name, fsynced file by file, and renamed. The
serial counts writes, so that the newest is the one written last, also when a step is written
again. TensorFlow is not needed to read or write one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
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
from tfdist.files import FileLock, Held, fsync

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)\.(\d+)")
_LOCK = ".lock"
_UNFINISHED, _DISCARDED = ".unfinished-", ".discarded-"


class SecondWriter(UsageError):
    """Another process writes to the directory."""


class NothingWhole(TfdistError):
    """There are checkpoints, and every one of them is damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What was written at a step."""

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
    """Writes and reads the checkpoints of one directory.

    Any number of processes may read; one writes. The lock is taken by `prepare` or the first
    `write` and held until `close`, the end of the process, or the end of this object.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.directory = Path(directory)
        self._keep = require_int("checkpoint: keep", keep, least=1, fix="say keep=3")
        self._writing = threading.Lock()
        self._lock = FileLock(self.directory / _LOCK)
        self._known_damaged: set[Path] = set()

    def prepare(self) -> None:
        """Become the writer: make the directory, take the lock, remove what a crash left.

        Called by the task that writes. Raises UsageError for a second writer or a later format,
        and TfdistError for a path that cannot be written.
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
        """Write a checkpoint and remove those no longer kept; return its directory.

        `arrays` is read one at a time, so it may compute them when asked. `meta` is JSON. A
        checkpoint written with `best` is kept until a better one is. Safe to call from any thread;
        one task calls.

        Raises TfdistError (disk full, no permission) with every earlier checkpoint in place, and
        UsageError for a second writer or a dtype that cannot be stored. An old one that cannot be
        removed is a warning.
        """
        with self._writing:
            try:
                self._become_the_writer()
                serial = max((location.serial for location in self._locations()), default=0) + 1
                name = f"step-{step:09d}.{serial}"
                unfinished = self.directory / f"{_UNFINISHED}{name}"
                try:
                    write_checkpoint(unfinished, arrays, step=step, best=best, meta=meta)
                    os.replace(unfinished, self.directory / name)
                    # Not every file system renames a directory together with its files.
                    os.stat(self.directory / name / MANIFEST)
                except BaseException:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
                self._known_damaged.discard(self.directory / name)  # of a directory that was moved
                fsync(self.directory)
            except OSError as error:
                raise self._failed(f"checkpoint of step {step} in ", error) from error
            try:
                self._discard_old()
            except (OSError, TfdistError) as error:  # this one is whole, and the next save tries
                logger.warning("%s: an old checkpoint was not removed: %s", self.directory, error)
        return self.directory / name

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints, in the order they were written."""
        return [location.step for location, _ in self._sound()]

    def latest(self) -> int | None:
        """Return the step that was written last, None where there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def newest_name(self) -> str | None:
        """Return the name of the directory that was written last, whole or not."""
        locations = self._locations()
        return locations[-1].path.name if locations else None

    def best(self) -> int | None:
        """Return the step of the last checkpoint written with `best`."""
        steps = [location.step for location, manifest in self._sound() if manifest.best]
        return steps[-1] if steps else None

    def written_at(self, step: int) -> float | None:
        """Return when the newest checkpoint of a step was whole, in seconds since 1970."""
        paths = [location.path for location in self._locations() if location.step == step]
        with contextlib.suppress(IndexError, FileNotFoundError):  # a newer one has replaced it
            return paths[-1].stat().st_mtime
        return None

    def read(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint of `step`, or the newest one that is whole.

        A damaged newest one is named in a warning and the one before it used; a damaged one that
        was asked for by its step is an error. Holds no more than the arrays once.

        Raises UsageError if there is none or its format is newer than this tfdist; Unreadable, a
        TfdistError, if it may be whole and cannot be read now; and NothingWhole, a TfdistError, if
        all are damaged.
        """
        locations = [
            each for each in reversed(self._locations()) if step is None or each.step == step
        ]
        if not locations:
            steps = self.steps()
            raise UsageError(
                f"checkpoints in {self.directory}",
                received="no checkpoint" if step is None else f"step {step}",
                expected=f"one of {steps}" if steps else "a directory with a checkpoint",
                fix="check the path and the step",
                code="no-checkpoint",
            )
        problems = []
        for location in locations:
            try:
                return self._read(location)
            except Damaged as error:
                if not os.path.lexists(location.path):  # the writer has removed it, for a newer one
                    return self.read(step)
                problems.append(f"{location.path.name} is damaged ({error})")
                if len(problems) < len(locations) and location.path not in self._known_damaged:
                    logger.warning("%s: %s; using the one before", self.directory, problems[-1])
                self._known_damaged.add(location.path)
        raise NothingWhole(f"{self.directory}: no readable checkpoint: {'; '.join(problems)}")

    def read_named(self, name: str) -> Checkpoint | None:
        """Return the checkpoint in the directory of that name; None if it cannot be read.

        As when the writer removes it meanwhile. Raises UsageError for a newer format.
        """
        try:
            return self._read(next(p for p in self._locations() if p.path.name == name))
        except (StopIteration, Damaged, Unreadable) as error:
            logger.info("%s: %s was not read: %s", self.directory, name, error or "it is gone")
            return None

    def close(self) -> None:
        """Let another writer in."""
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
        """Return the checkpoints there are, whole or not, oldest first."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unreadable(f"checkpoints in {self.directory}: {error.strerror}") from error
        return sorted(
            Location(serial=int(match[2]), step=int(match[1]), path=self.directory / name)
            for name in names
            if (match := _NAME.fullmatch(name))
        )

    def _sound(self) -> list[tuple[Location, Manifest]]:
        """Return those whose manifest reads and whose shard has its length, with the bytes unread.

        Left out is what has been found damaged when it was read.
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
        """Remove what is neither among the last `keep` nor the best; the damaged do not count."""
        sound = self._sound()
        kept = {location.path for location, _ in sound[-self._keep :]}
        kept.update([location.path for location, manifest in sound if manifest.best][-1:])
        for location in self._locations():
            if location.path not in kept:
                # Out of sight in one move first, so that a crash leaves none half deleted.
                discarded = self.directory / f"{_DISCARDED}{location.path.name}"
                os.replace(location.path, discarded)
                _remove(discarded)

    def _become_the_writer(self) -> None:
        if self._lock.is_in_place:
            return
        self._lock.release()  # of a directory that was moved or removed: another run may write here
        _make_directory(self.directory)
        self._sound()  # refuses a directory of a later format before it is touched
        try:
            self._lock.acquire()
        except Held as held:
            raise SecondWriter(
                f"checkpoints in {self.directory}",
                received=f"a second writer while process {held.holder} writes there",
                expected="one writer",
                fix="end the other run, or give this one a directory of its own",
                code="second-writer",
            ) from held
        for leftover in os.listdir(self.directory):
            if leftover.startswith((_UNFINISHED, _DISCARDED)):
                _remove(self.directory / leftover)

    def _failed(self, where: str, error: OSError) -> TfdistError:
        """Return what is wrong and what is safe, in one line."""
        newest = None
        with contextlib.suppress(OSError, TfdistError):
            newest = self.latest()
        safe = "none was saved before"
        if newest is not None:
            safe = f"earlier checkpoints are untouched, the newest is of step {newest}"
        return TfdistError(f"{where}{self.directory}: {error.strerror or error}; {safe}")


def _manifest_of(location: Location) -> Manifest:
    manifest = read_manifest(location.path)
    if manifest.step != location.step:
        raise Damaged(f"manifest.json is of step {manifest.step}")
    return manifest


def _remove(path: Path) -> None:
    """Remove a directory with what is in it, or a file or link; errors are left to the next try."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # it was no directory
        path.unlink()


def _make_directory(directory: Path) -> None:
    """Make the directory of a store, and those above it, on the disk too; raise OSError."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        fsync(directory.parent)
