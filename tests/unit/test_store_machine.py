"""Histories of a checkpoint directory, found by Hypothesis: each save is whole or not there.

A model holds the checkpoints that should be in the directory. Saves fail, and are killed or cut by
a loss of power, before and after each call that changes the disk and in the middle of writes.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tfdist.checkpoint import CheckpointStore
from tfdist.checkpoint import format as format_module
from tfdist.checkpoint.store import NothingWhole, SecondWriter
from tfdist.errors import TfdistError, UsageError
from tfdist.files import FileLock

KEEP = 2
CHANGES = ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync", "ftruncate", "pwrite")
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES)
POINTS = st.integers(1, 90)  # a save that discards one checkpoint has about 80


class Killed(BaseException):
    """The process is dead: no further line of it runs."""


class Disk:
    """Watches calls that change a disk, makes one fail, and knows what a loss of power would lose.

    Args:
      point: number of the point to act at, from 1 on.
      error: of the call there; None kills the process.
    """

    def __init__(self, point: int, error: int | None) -> None:
        self._left = point
        self._error = error
        self._unsynced: set[int] = set()  # files by inode
        self._unlisted: dict[int, int] = {}  # new files, and the directory that was not synced yet
        self._renamed: tuple[str, str] | None = None

    @property
    def acted(self) -> bool:
        return self._left <= 0

    def point(self) -> None:
        self._left -= 1
        if self._left == 0 and self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        if self._left <= 0 and self._error is None:
            raise Killed

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        disk = self

        class File(FileIO):
            def __init__(self, path: Any, mode: str, **options: Any) -> None:
                super().__init__(path, mode, **options)
                if "x" in mode:
                    disk._unlisted[self._inode] = os.stat(Path(path).parent).st_ino

            @property
            def _inode(self) -> int:
                return os.fstat(self.fileno()).st_ino

            def write(self, data: Any) -> int:
                disk.point()
                disk._unsynced.add(self._inode)
                half = super().write(data[: len(data) // 2])
                disk.point()
                return half + super().write(data[half:])

        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in CHANGES:
                monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))
            monkeypatch.setattr(format_module, "FileIO", File)
            yield

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.point()
            if name == "fsync":
                self._synced(os.fstat(args[0]))
            else:
                function(*args, **options)
                self._renamed = args if name == "replace" else None
            self.point()

        return call

    def _synced(self, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            self._unlisted = {i: d for i, d in self._unlisted.items() if d != found.st_ino}
            moved = self._renamed
            if moved and os.stat(Path(moved[1]).parent).st_ino == found.st_ino:
                self._renamed = None
        self._unsynced.discard(found.st_ino)

    def lose_power(self, directory: Path) -> None:
        """Lose the bytes, names and renames that no fsync has brought to the disk."""
        for path in [each for each in directory.rglob("*") if each.is_file()]:
            inode = path.stat().st_ino
            if inode in self._unlisted:
                path.unlink()
            elif inode in self._unsynced:
                os.truncate(path, 0)
        if self._renamed:
            source, target = self._renamed
            os.replace(target, source)


def _flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


# A file, what changes in it, and whether its length or the manifest shows that.
DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], bool]] = {
    "shard cut short": ("arrays.bin", lambda data: data[:40], True),
    "shard longer": ("arrays.bin", lambda data: data + b"x", True),
    "shard gone": ("arrays.bin", lambda data: None, True),
    "shard empty": ("arrays.bin", lambda data: b"", True),
    "bit in an array": ("arrays.bin", lambda data: _flipped(data, 8), False),
    "bit in the padding": ("arrays.bin", lambda data: _flipped(data, 5 * 4 + 1), False),
    "manifest cut short": ("manifest.json", lambda data: data[:200], True),
    "manifest empty": ("manifest.json", lambda data: b"", True),
    "manifest gone": ("manifest.json", lambda data: None, True),
    "manifest edited": ("manifest.json", lambda data: data.replace(b'"n": ', b'"n": 1'), True),
    "manifest not JSON": ("manifest.json", lambda data: b"\x00\xff{", True),
    "manifest of a list": ("manifest.json", lambda data: b"[1]", True),
    "manifest of something else": ("manifest.json", lambda data: b'{"format": "x"}', True),
}


@dataclasses.dataclass
class Saved:
    """A checkpoint that should be in the directory."""

    name: str
    step: int
    best: bool
    number: int
    damage: str = ""
    is_known: bool = False  # to the writer, which has read it

    @property
    def shows_damage(self) -> bool:
        return bool(self.damage) and DAMAGE[self.damage][2]


def content(number: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(number).normal(size=(2, 5))
    return {
        "kernel": numbers[0].astype(np.float32),
        "bias": numbers[1].astype(ml_dtypes.bfloat16),
        "iterations": np.array(number),
    }


def assert_is(found: Any, saved: Saved) -> None:
    assert (found.step, found.best, found.meta) == (saved.step, saved.best, {"n": saved.number})
    for name, array in content(saved.number).items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].tobytes() == array.tobytes()


class CheckpointDirectory(RuleBasedStateMachine):
    """One directory, its writer, and the checkpoints that should be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.directory = Path(self.home.name, "run", "checkpoints")
        self.there: list[Saved] = []
        self.numbers = 0
        self.warnings: list[str] = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda descriptor: None)
        self.patch.setitem(FileLock.acquire.__kwdefaults__, "within_s", 0)
        self.log = logging.Handler(logging.WARNING)
        self.log.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("tfdist.checkpoint.store")
        self.patch.setattr(logger, "handlers", [self.log])
        self.patch.setattr(logger, "propagate", False)

    def teardown(self) -> None:
        self.patch.undo()
        self.store.close()
        self.home.cleanup()

    @initialize()
    def start(self) -> None:
        self.store = CheckpointStore(self.directory, keep=KEEP)
        for saved in self.there:
            saved.is_known = False

    @rule(step=st.integers(1, 3), best=st.booleans())
    def save(self, step: int, best: bool) -> None:
        self.there.append(self._saved(step, best, self._write(step, best).name))
        self.there = self._kept()

    @rule(step=st.integers(1, 3), best=st.booleans(), point=POINTS, error=st.sampled_from(ERRORS))
    def save_with_an_error(self, step: int, best: bool, point: int, error: int) -> None:
        self._save_with(Disk(point, error), step, best)

    @rule(step=st.integers(1, 3), best=st.booleans(), point=POINTS, power=st.booleans())
    def save_and_kill(self, step: int, best: bool, point: int, power: bool) -> None:
        disk = Disk(point, None)
        self._save_with(disk, step, best, then=disk.lose_power if power else None)
        self._restart()

    @rule(point=POINTS, error=st.none() | st.sampled_from(ERRORS))
    def prepare(self, point: int, error: int | None) -> None:
        self._restart()
        disk = Disk(point, error)
        with self._told(disk) as told:
            self.store.prepare()
        if isinstance(told[0], Killed):
            self._restart()
        elif told[0] is not None:
            other = CheckpointStore(self.directory)  # which the failed one lets write
            other.prepare()
            other.close()
        elif not disk.acted:
            hidden = [name for name in os.listdir(self.directory) if name.startswith(".")]
            assert hidden == [".lock"]

    @rule()
    def close(self) -> None:
        self.store.close()
        self.start()

    @rule()
    def read(self) -> None:
        self.warnings.clear()
        self._assert_reads(self.store)
        newer = []
        for saved in reversed(self.there):
            if not saved.damage:
                told = "\n".join(self.warnings)
                assert [n for n in newer if n not in told] == []
                break
            newer += [] if saved.is_known else [saved.name]
            saved.is_known = True

    @precondition(lambda self: any(not saved.damage for saved in self.there))
    @rule(data=st.data(), shows=st.booleans())
    def damage(self, data: st.DataObject, shows: bool) -> None:
        damage = data.draw(st.sampled_from([name for name in DAMAGE if DAMAGE[name][2] is shows]))
        saved = data.draw(st.sampled_from([each for each in self.there if not each.damage]))
        file, change, _ = DAMAGE[damage]
        path = self.directory / saved.name / file
        changed = change(path.read_bytes())
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        saved.damage = damage

    @precondition(lambda self: self.store._lock.is_in_place)
    @rule()
    def write_from_a_second_process(self) -> None:
        second = CheckpointStore(self.directory, keep=1)
        for attempt in (second.prepare, lambda: second.write(9, content(0), meta={})):
            with pytest.raises(SecondWriter, match=f"process {os.getpid()} already writes there"):
                attempt()

    @precondition(lambda self: self.directory.exists())
    @rule()
    def move_the_directory_aside(self) -> None:
        self.numbers += 1
        os.rename(self.directory, Path(self.home.name, f"aside-{self.numbers}"))
        self.there = []

    @invariant()
    def holds_what_it_should(self) -> None:
        assert sorted(self._names()) == sorted(saved.name for saved in self.there)
        sound = [saved for saved in self.there if not saved.shows_damage]
        reader = CheckpointStore(self.directory)
        assert reader.steps() == [saved.step for saved in sound]
        assert reader.latest() == (sound[-1].step if sound else None)
        assert reader.best() == next((s.step for s in reversed(sound) if s.best), None)
        self._assert_reads(reader)
        for saved in self.there:
            found = reader.read_named(saved.name)
            assert (found is None) == bool(saved.damage)
            if found is not None:
                assert_is(found, saved)
        assert self.store.steps() == [saved.step for saved in sound if not saved.is_known]

    def _assert_reads(self, store: CheckpointStore) -> None:
        newest = next((saved for saved in reversed(self.there) if not saved.damage), None)
        if newest is not None:
            assert_is(store.read(), newest)
            return
        with pytest.raises(NothingWhole if self.there else UsageError) as told:
            store.read()
        assert "\n" not in str(told.value)
        assert [s.name for s in self.there if s.name not in str(told.value)] == []

    def _write(self, step: int, best: bool) -> Path:
        self.numbers += 1
        meta = {"n": self.numbers}
        return self.store.write(step, content(self.numbers), meta=meta, best=best)

    def _saved(self, step: int, best: bool, name: str) -> Saved:
        return Saved(name=name, step=step, best=best, number=self.numbers)

    def _save_with(
        self, disk: Disk, step: int, best: bool, *, then: Callable[[Path], None] | None = None
    ) -> None:
        """Save with a fault: the new checkpoint is there as a whole, or not."""
        before = {saved.name for saved in self.there}
        of_a_kill = {*self.directory.glob(".unfinished-step*")}
        with self._told(disk) as told:
            self._write(step, best)
        if then is not None:
            then(self.directory)
        new = self._names() - before
        assert len(new) <= 1
        assert new or told[0] is not None, "a save that reported no error is not there"
        if new:
            self.there.append(self._saved(step, best, new.pop()))
            kept = {saved.name for saved in self._kept()}
            self.there = [s for s in self.there if s.name in kept | self._names()]
        if isinstance(told[0], TfdistError):
            assert {*self.directory.glob(".unfinished-step*")} <= of_a_kill

    @contextlib.contextmanager
    def _told(self, disk: Disk) -> Iterator[list[BaseException | None]]:
        """Yield a list that holds the error of the block in the end."""
        told: list[BaseException | None] = [None]
        try:
            with disk.in_place():
                yield told
        except Killed as error:
            told[0] = error
        except TfdistError as error:
            told[0] = error
        line = str(told[0])
        assert not isinstance(told[0], TfdistError) or str(self.directory) in line
        assert "\n" not in line

    def _kept(self) -> list[Saved]:
        sound = [s for s in self.there if not (s.shows_damage or s.is_known)]
        best = [saved for saved in sound if saved.best]
        return [s for s in self.there if s in [*best[-1:], *sound[-KEEP:]]]

    def _names(self) -> set[str]:
        there = os.listdir(self.directory) if self.directory.exists() else []
        return {name for name in there if not name.startswith(".")}

    def _restart(self) -> None:
        self.store._lock.release()  # as the kernel does
        self.start()


def test_every_history_of_a_directory_leaves_whole_checkpoints():
    run_state_machine_as_test(
        CheckpointDirectory,
        settings=settings(
            max_examples=150, stateful_step_count=20, derandomize=True, database=None, deadline=None
        ),
    )
