"""The checkpoint store: what was written is read, or the one before it, whatever happens."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tfdist.checkpoint import manifest as manifest_module
from tfdist.checkpoint import shards as shards_module
from tfdist.checkpoint.store import Checkpoint, CheckpointStore, NothingWhole
from tfdist.errors import TfdistError, UsageError


def arrays_of(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "dense/kernel": random.normal(size=(37, 11)).astype(np.float32),
        "dense/bias": random.normal(size=11).astype(ml_dtypes.bfloat16),
        "iterations": np.array(step, np.int64),
    }


def write(store: CheckpointStore, step: int, **options: Any) -> Path:
    return store.write(step, arrays_of(step), meta={"loss": 1 / step}, **options)


def assert_is(checkpoint: Checkpoint, step: int) -> None:
    assert checkpoint.step == step
    assert checkpoint.meta == {"loss": 1 / step}
    expected = arrays_of(step)
    assert list(checkpoint.arrays) == list(expected)
    for name, array in expected.items():
        assert checkpoint.arrays[name].dtype == array.dtype
        assert checkpoint.arrays[name].tobytes() == array.tobytes()


def hidden_leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".") and name != ".lock"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


# What is written is read


def test_what_was_written_is_read(store: CheckpointStore) -> None:
    write(store, 7)
    assert_is(store.read(), 7)
    assert_is(CheckpointStore(store.directory).read(7), 7)
    assert store.steps() == [7]
    assert store.latest() == 7


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint16", "int64", "float16", "float64", "complex64", ">f4", ">i8"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_number_comes_back_with_its_bytes(
    store: CheckpointStore, dtype: Any, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    store.write(1, {"before": np.zeros(3, np.int8), "x": array}, meta={})
    read = store.read().arrays["x"]
    assert read.shape == shape
    assert read.dtype == array.dtype.newbyteorder("=") if array.dtype.str[0] == ">" else array.dtype
    np.testing.assert_array_equal(read, array)


def test_views_are_written_as_they_look(store: CheckpointStore) -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    views = {"transposed": base.T, "strided": base[::2, ::-1], "fortran": np.asfortranarray(base)}
    store.write(1, views, meta={})
    for name, array in store.read().arrays.items():
        np.testing.assert_array_equal(array, views[name])


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([b"a"]), np.array([None])])
def test_strings_and_objects_are_refused_and_leave_nothing(
    store: CheckpointStore, array: np.ndarray
) -> None:
    write(store, 1)
    with pytest.raises(UsageError, match=r"array 'name': received dtype .* Fix: "):
        store.write(2, {"name": array}, meta={})
    assert store.steps() == [1]
    assert hidden_leftovers(store.directory) == []


def test_metadata_is_json_with_its_odd_ends(store: CheckpointStore) -> None:
    meta = {"2": 1, "10": [float("inf"), None], "name": "größer", "nested": {"best": -1e-300}}
    store.write(1, {}, meta=meta)
    assert store.read().meta == meta
    store.write(2, {}, meta={10: "ten", 2: "two"})
    assert store.read(2).meta == {"10": "ten", "2": "two"}
    with pytest.raises(TypeError):
        store.write(3, {}, meta={"x": object()})
    assert store.steps() == [1, 2]


def test_reading_needs_the_arrays_once(store: CheckpointStore) -> None:
    size = 32 << 20
    arrays = {name: np.ones(size // 4, np.uint8) for name in "abcd"}
    store.write(1, arrays, meta={})
    del arrays
    tracemalloc.start()
    store.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.05 * size


# What is kept


def test_the_last_ones_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        write(store, step)
    assert store.steps() == [3, 4]
    assert hidden_leftovers(store.directory) == []


def test_the_best_is_kept_until_a_better_one(store: CheckpointStore) -> None:
    for step in range(1, 7):
        write(store, step, best=step in (2, 5))
        assert store.best() == (None if step < 2 else 2 if step < 5 else 5)
    assert store.steps() == [5, 6]
    for step in range(7, 10):
        write(store, step)
    assert store.steps() == [5, 8, 9]
    assert store.read(5).best


def test_a_step_written_again_replaces_the_old_one(store: CheckpointStore) -> None:
    write(store, 5)
    store.write(5, {"x": np.ones(3)}, meta={})
    assert list(store.read(5).arrays) == ["x"]
    write(store, 3)  # gone back: the newest is the one written last
    assert store.latest() == 3
    assert_is(store.read(), 3)


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(UsageError, match="keep: received"):
        CheckpointStore(tmp_path, keep=keep)


# Damage


def _shard(path: Path) -> Path:
    return path / "arrays.bin"


def _flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "shard cut short": lambda path: os.truncate(_shard(path), 40),
    "shard longer": lambda path: _shard(path).write_bytes(_shard(path).read_bytes() + b"x"),
    "shard gone": lambda path: _shard(path).unlink(),
    "shard empty": lambda path: os.truncate(_shard(path), 0),
    "bit in an array": lambda path: _flip(_shard(path), 8),
    "bit in the padding": lambda path: _flip(_shard(path), 37 * 11 * 4 + 1),
    "manifest cut short": lambda path: os.truncate(path / "manifest.json", 200),
    "manifest empty": lambda path: os.truncate(path / "manifest.json", 0),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
    "manifest edited": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"loss": 0.5', '"loss": 0.4')
    ),
    "manifest not JSON": lambda path: (path / "manifest.json").write_bytes(b"\x00\xff{"),
    "manifest of something else": lambda path: (path / "manifest.json").write_text("[1]"),
    "all files gone": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_newest_is_named_and_the_one_before_used(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any]
) -> None:
    write(store, 1)
    path = write(store, 2)
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert_is(store.read(), 1)
    assert path.name in caplog.text
    assert "using the one before" in caplog.text
    with pytest.raises(TfdistError, match=rf"{path.name} is damaged"):
        store.read(2)


@pytest.mark.parametrize("file", ["arrays.bin", "manifest.json"])
@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.EACCES, UsageError), (errno.ESTALE, TfdistError), (errno.EMFILE, TfdistError)],
)
def test_one_that_may_be_whole_and_cannot_be_read_is_no_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, file: str, number: int, raised: Any
) -> None:
    """A run that took it for damaged would start over, and remove it."""
    paths = [write(store, 1), write(store, 2)]
    _refuse_reading(monkeypatch, paths[1] / file, number)
    with pytest.raises(TfdistError, match=rf"{paths[1].name}/{file}.*{os.strerror(number)}") as got:
        store.read()
    assert isinstance(got.value, UsageError) is (raised is UsageError)
    assert not isinstance(got.value, NothingWhole)
    monkeypatch.undo()
    assert_is(store.read(), 2)
    write(store, 3)
    assert store.steps() == [2, 3]


def test_one_that_the_disk_does_not_give_back_is_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1)
    _refuse_reading(monkeypatch, write(store, 2) / "arrays.bin", errno.EIO)
    assert_is(store.read(), 1)


def _refuse_reading(monkeypatch: pytest.MonkeyPatch, refused: Path, number: int) -> None:
    """As a server of files does, or another user's file; root may read everything."""

    class File(FileIO):
        def __init__(self, path: Any, mode: str) -> None:
            if Path(path) == refused and mode == "rb":
                raise OSError(number, os.strerror(number))
            super().__init__(path, mode)

    def read_bytes(path: Path) -> bytes:
        with File(path, "rb") as file:
            return file.read()

    monkeypatch.setattr(shards_module, "FileIO", File)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def test_one_is_read_by_its_name_or_none_at_all(store: CheckpointStore) -> None:
    old, new, last = write(store, 1), store.write(1, {}, meta={}), store.write(1, {}, meta={})
    assert store.read_named(old.name) is None  # no longer kept
    assert store.read_named(new.name) is not None
    os.truncate(last / "manifest.json", 3)
    assert store.read_named(last.name) is None


@pytest.mark.parametrize("step", [None, 1])
def test_one_that_its_writer_removes_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    writer, reader = CheckpointStore(tmp_path, keep=1), CheckpointStore(tmp_path)
    write(writer, 1)
    listdir = os.listdir

    def list_and_save(path: Path) -> list[str]:
        names = listdir(path)
        monkeypatch.undo()
        write(writer, 2)
        return names

    monkeypatch.setattr(os, "listdir", list_and_save)
    if step is None:
        assert_is(reader.read(), 2)
    else:
        with pytest.raises(UsageError, match=r"received step 1; expected one of \[2\]"):
            reader.read(step)


def test_a_damaged_one_does_not_count_among_those_kept(store: CheckpointStore) -> None:
    write(store, 1)
    _flip(_shard(write(store, 2)), 8)
    assert store.read().step == 1
    write(store, 3)
    assert store.steps() == [1, 3]


def test_all_damaged_names_each(store: CheckpointStore) -> None:
    paths = [write(store, 1), write(store, 2)]
    for path in paths:
        os.truncate(_shard(path), 3)
    with pytest.raises(TfdistError) as caught:
        store.read()
    assert all(path.name in str(caught.value) for path in paths)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("step", [None, 4])
def test_nothing_to_read_is_one_line(store: CheckpointStore, step: int | None) -> None:
    assert store.latest() is None
    with pytest.raises(UsageError, match="received"):
        store.read(step)
    write(store, 1)
    with pytest.raises(UsageError, match=r"received step 4; expected one of \[1\]"):
        store.read(4)


def test_a_newer_format_is_refused_and_left_alone(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(manifest_module, "VERSION", manifest_module.VERSION + 1)
        path = write(store, 1)
    store.close()
    for attempt in (store.read, store.steps, lambda: write(CheckpointStore(store.directory), 2)):
        with pytest.raises(UsageError, match="format version 2"):
            attempt()
    assert os.listdir(store.directory / path.name)
    assert [name for name in os.listdir(store.directory) if name.startswith("step")] == [path.name]


# One writer


def test_a_second_writer_is_refused_with_the_first_ones_pid(store: CheckpointStore) -> None:
    write(store, 1)
    second = CheckpointStore(store.directory)
    with pytest.raises(UsageError, match=f"a second writer while process {os.getpid()} writes"):
        write(second, 2)
    assert second.steps() == [1]
    store.close()
    write(second, 2)
    second.close()


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=10)
    threads = [threading.Thread(target=write, args=(store, step)) for step in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.steps()) == [1, 2, 3, 4, 5, 6]
    for step in store.steps():
        assert_is(store.read(step), step)
    store.close()


# Errors at every point of a write; kills are in test_store_faults.py


class Points:
    """Counts the points at which a write touches the disk, and acts at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, act: Callable[[], None]):
        self.count = 0
        self._at = at
        self._act = act
        for module, name in ((os, "fsync"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
            monkeypatch.setattr(module, name, self._around(getattr(module, name)))
        points = self

        class File(FileIO):
            def write(self, data: Any) -> int:
                if points._reached():
                    super().write(data[: len(data) // 2])
                    points._act()
                written = super().write(data)
                if points._reached():
                    points._act()
                return written

        monkeypatch.setattr(shards_module, "FileIO", File)

    def _reached(self) -> bool:
        self.count += 1
        return self.count == self._at

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._reached():
                self._act()
            result = function(*args, **kwargs)
            if self._reached():
                self._act()
            return result

        return wrapped


def _error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except TfdistError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only"), (errno.EIO, "Input/output")],
)
def test_an_error_at_any_point_is_one_line_and_loses_nothing(
    tmp_path: Path, number: int, says: str
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for point in range(1, 200):
        store = CheckpointStore(tmp_path / str(point), keep=2)
        for step in (1, 2):
            write(store, step)
        with pytest.MonkeyPatch.context() as monkeypatch:
            points = Points(monkeypatch, at=point, act=fail)
            error = _error_of(lambda store=store: write(store, 3))
        if points.count < point:
            break
        assert error is not None
        assert says in error
        assert "\n" not in error
        assert store.read().step in (2, 3)
        assert_is(store.read(2), 2)
        write(store, 4)
        assert_is(store.read(), 4)
        store.close()
    else:
        raise AssertionError("the write did not end")


def test_nothing_is_renamed_before_it_is_on_the_disk(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1)
    events = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    path = write(store, 2)
    assert events == [
        ("fsync", "arrays.bin"),
        ("fsync", "manifest.json"),
        ("fsync", f".unfinished-{path.name}"),
        ("rename", path.name),
        ("fsync", store.directory.name),
    ]


def test_directories_above_that_were_made_for_it_are_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsynced, fsync = [], os.fsync

    def note_fsync(descriptor: int) -> None:
        fsynced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    store = CheckpointStore(tmp_path / "runs" / "a" / "checkpoints")
    store.prepare()
    store.close()
    above = [tmp_path, tmp_path / "runs", tmp_path / "runs" / "a"]
    assert [path for path in fsynced if path in above] == above


def test_a_directory_without_permission_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TfdistError, match=r"step 1 in .*: Permission denied"):
        write(CheckpointStore(tmp_path), 1)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints"
    file.write_text("")
    with pytest.raises(TfdistError, match="checkpoints"):
        write(CheckpointStore(file), 1)


def test_the_store_needs_no_tensorflow() -> None:
    program = (
        "import sys, tfdist.checkpoint.store as s;"
        "assert not {'tensorflow', 'keras'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
