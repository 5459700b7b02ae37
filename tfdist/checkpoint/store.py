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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.checkpoint import files
from tfdist.checkpoint import shards as shard_files
from tfdist.checkpoint.manifest import VERSION, Damaged, Manifest, NewerFormat, Unreadable
from tfdist.errors import TfdistError, UsageError
from tfdist.files import FileLock, Held, fsync

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)\.(\d+)")
_LOCK = ".lock"


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
class _Place:
    serial: int
    step: int
    path: Path


class CheckpointStore:
    """Writes and reads the checkpoints of one directory.

    Any number of processes may read; one writes. The lock is taken by `prepare` or the first
    `write` and held until `close`, the end of the process, or the end of this object.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(
                "checkpoint: keep",
                received=repr(keep),
                expected="a whole number of at least 1",
                fix="say keep=3",
            )
        self._directory = Path(directory)
        self._keep = keep
        self._writing = threading.Lock()
        self._lock = FileLock(self._directory / _LOCK)
        self._made = False
        self._known_damaged: set[Path] = set()

    @property
    def directory(self) -> Path:
        return self._directory

    def prepare(self) -> None:
        """Become the writer, and find out now whether a checkpoint can be written.

        Makes the directory, takes the lock, removes what a crash left, and writes and renames a
        directory of one byte. Called by the task that writes.

        Raises UsageError for a second writer, a later format, a path that cannot be written or a
        file system that does not rename directories, and TfdistError for a disk that is full.
        """
        with self._writing:
            held = self._lock.held
            try:
                self._become_the_writer()
                files.try_out(self._directory)
            except BaseException as error:
                if not held:
                    self._give_up()
                if not isinstance(error, OSError):
                    raise
                told = files.wrong_path(self._directory, error) or self._failed("", error)
                raise told from error

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
        UsageError for a second writer or a dtype that cannot be stored.
        """
        Manifest(step=step, best=best, meta=meta, shards={}, arrays={}).to_bytes()
        with self._writing, self._one_line_errors(step):
            self._become_the_writer()
            serial = max((place.serial for place in self._places()), default=0) + 1
            name = f"step-{step:09d}.{serial}"
            unfinished = self._directory / f"{files.UNFINISHED}{name}"
            try:
                files.write_files(unfinished, arrays=arrays, step=step, best=best, meta=meta)
                os.replace(unfinished, self._directory / name)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            fsync(self._directory)
            self._discard_old()
        return self._directory / name

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints, in the order they were written."""
        return [place.step for place, _ in self._sound()]

    def latest(self) -> int | None:
        """Return the step that was written last, None where there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def newest_name(self) -> str | None:
        """Return the name of the directory that was written last, whole or not."""
        places = self._places()
        return places[-1].path.name if places else None

    def best(self) -> int | None:
        """Return the step of the last checkpoint written with `best`."""
        steps = [place.step for place, manifest in self._sound() if manifest.best]
        return steps[-1] if steps else None

    def read(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint of `step`, or the newest one that is whole.

        A damaged newest one is named in a warning and the one before it used; a damaged one that
        was asked for by its step is an error. Holds no more than the arrays once.

        Raises UsageError where there is none, its format is newer than this tfdist, or this user
        may not read it; Unreadable, a TfdistError, where it may be whole and cannot be read now;
        and NothingWhole, another, where all are damaged.
        """
        places = [p for p in reversed(self._places()) if step is None or p.step == step]
        if not places:
            raise self._nothing_to_read(step)
        problems = []
        for place in places:
            try:
                return self._read(place)
            except Damaged as error:
                if not os.path.lexists(place.path):  # the writer has removed it, for a newer one
                    return self.read(step)
                problems.append(f"{place.path.name} is damaged ({error})")
                if len(problems) < len(places) and place.path not in self._known_damaged:
                    logger.warning("%s: %s; using the one before", self._directory, problems[-1])
                self._known_damaged.add(place.path)
        raise NothingWhole(f"{self._directory}: no readable checkpoint: {'; '.join(problems)}")

    def read_named(self, name: str) -> Checkpoint | None:
        """Reads the checkpoint in the directory of that name; None where it cannot be read, as when
        the writer removes it meanwhile. Raises UsageError for a newer format, or one that this user
        may not read."""
        try:
            return self._read(next(p for p in self._places() if p.path.name == name))
        except (StopIteration, Damaged, Unreadable) as error:
            logger.info("%s: %s was not read: %s", self._directory, name, error or "it is gone")
            return None

    def read_newest(self) -> Checkpoint | None:
        """As `read`, but None where the directory has no checkpoint at all."""
        return self.read() if self._places() else None

    def close(self) -> None:
        """Let another writer in; remove a directory that was made for it and never used."""
        with self._writing:
            self._give_up()

    def _read(self, place: _Place) -> Checkpoint:
        manifest = self._manifest(place)
        arrays = {}
        for name, shard in manifest.shards.items():
            entries = {key: e for key, e in manifest.arrays.items() if e.shard == name}
            arrays.update(
                shard_files.read_shard(place.path / shard.file, shard=shard, entries=entries)
            )
        ordered = {key: arrays[key] for key in manifest.arrays}
        return Checkpoint(
            step=manifest.step, arrays=ordered, meta=manifest.meta, best=manifest.best
        )

    def _manifest(self, place: _Place) -> Manifest:
        try:
            return Manifest.read(place.path)
        except NewerFormat as error:
            raise UsageError(
                f"checkpoint {place.path}",
                received=error,
                expected=f"{VERSION} or lower",
                fix="use the tfdist that wrote it, or a later one",
            ) from error

    def _places(self) -> list[_Place]:
        """Return the checkpoints there are, whole or not, oldest first."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            told = f"checkpoints in {self._directory}: {error.strerror}"
            raise files.wrong_path(self._directory, error) or TfdistError(told) from error
        return sorted(
            _Place(serial=int(match[2]), step=int(match[1]), path=self._directory / name)
            for name in names
            if (match := _NAME.fullmatch(name))
        )

    def _sound(self) -> list[tuple[_Place, Manifest]]:
        """Those whose manifest reads and whose shards have their length; bytes are not read."""
        sound = []
        for place in self._places():
            with contextlib.suppress(Damaged):
                manifest = self._manifest(place)
                for shard in manifest.shards.values():
                    shard_files.check_size(place.path / shard.file, shard=shard)
                if place.path not in self._known_damaged:
                    sound.append((place, manifest))
        return sound

    def _discard_old(self) -> None:
        """Remove what is neither among the last `keep` nor the best; the damaged do not count."""
        sound = self._sound()
        kept = {place.path for place, _ in sound[-self._keep :]}
        kept.update([place.path for place, manifest in sound if manifest.best][-1:])
        for place in self._places():
            if place.path not in kept:
                # Out of sight in one move first, so that a crash leaves none half deleted.
                discarded = self._directory / f"{files.DISCARDED}{place.path.name}"
                os.replace(place.path, discarded)
                shutil.rmtree(discarded, ignore_errors=True)

    def _become_the_writer(self) -> None:
        if self._lock.held:
            return
        self._made = files.make_directory(self._directory)
        self._sound()  # refuses a directory of a later format before it is touched
        try:
            self._lock.acquire()
        except Held as held:
            raise SecondWriter(
                f"checkpoints in {self._directory}",
                received=f"a second writer while process {held.holder} writes there",
                expected="one writer",
                fix="end the other run, or give this one a directory of its own",
            ) from held
        for leftover in os.listdir(self._directory):
            if leftover.startswith((files.UNFINISHED, files.DISCARDED)):
                shutil.rmtree(self._directory / leftover, ignore_errors=True)

    def _give_up(self) -> None:
        if self._made and self._lock.held:
            files.remove_unused(self._directory, but=_LOCK)
        self._made = False
        self._lock.release()

    def _nothing_to_read(self, step: int | None) -> UsageError:
        steps = self.steps()
        return UsageError(
            f"checkpoints in {self._directory}",
            received="no checkpoint" if step is None else f"step {step}",
            expected=f"one of {steps}" if steps else "a directory with a checkpoint",
            fix="check the path and the step",
        )

    @contextlib.contextmanager
    def _one_line_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(f"checkpoint of step {step} in ", error) from error

    def _failed(self, what: str, error: OSError) -> TfdistError:
        newest = None
        with contextlib.suppress(OSError, TfdistError):
            newest = self.latest()
        return files.failure(self._directory, error, what=what, newest=newest)
