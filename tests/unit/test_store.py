"""The checkpoint store: what was written is read, or the one before it, whatever happens.

Kill -9 at each write, full and read-only disks, damage, and second writers included.
"""

import errno
import os
import random
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mutations import JSON, forged, mutated, replacing_at
from tests.refusals import refusal
from tfdist.checkpoint import Checkpoint, CheckpointStore
from tfdist.checkpoint import format as format_module
from tfdist.checkpoint.saved_run import RunStore
from tfdist.checkpoint.store import NothingWhole
from tfdist.errors import TfdistError, UsageError
from tfdist.files import open_untrusted

EARLIER = Path(__file__).parent / "data" / "run" / "checkpoints"


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


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


# What is written is read


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint16", "int64", "float16", "float64", "complex64", ">f4", ">i8"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
    ],
)
def test_every_array_is_read_with_its_bytes(store, dtype):
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3, 4)]
    arrays = {
        str(shape): np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        for shape in shapes
    }
    base = np.arange(24).reshape(4, 6).astype(dtype)
    arrays |= {"transposed": base.T, "strided": base[::2, ::-1], "fortran": np.asfortranarray(base)}
    store.write(1, {"before": np.zeros(3, np.int8), **arrays}, meta={})
    found = store.read().arrays
    for name, array in arrays.items():
        swapped = array.dtype.str[0] == ">"
        assert found[name].dtype == (array.dtype.newbyteorder("=") if swapped else array.dtype)
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_the_format_equals_earlier_versions(store):
    """The checkpoint in `data` is of a run before the modules of the format were joined."""
    (golden,) = EARLIER.glob("step-*")
    checkpoint = CheckpointStore(EARLIER).read()
    assert (checkpoint.step, checkpoint.best) == (6, True)
    assert checkpoint.meta["callbacks"]["EarlyStopping-0"]["best_epoch"] == 1
    again = store.write(6, checkpoint.arrays, meta=checkpoint.meta, best=True)
    for name in ("arrays.bin", "manifest.json"):
        assert (again / name).read_bytes() == (golden / name).read_bytes()


def test_metadata_is_json_and_arrays_are_numbers(store):
    meta = {"2": 1, "10": [float("inf"), None], "name": "größer", "nested": {"best": -1e-300}}
    store.write(1, {}, meta=meta)
    assert store.read().meta == meta
    store.write(2, {}, meta={10: "ten", 2: "two"})
    assert store.read(2).meta == {"10": "ten", "2": "two"}
    with pytest.raises(TypeError):
        store.write(3, {}, meta={"x": object()})
    for array in (np.array(["a"]), np.array([b"a"]), np.array([None])):
        told = refusal(lambda array=array: store.write(3, {"name": array}, meta={}))
        assert told.code == "not-saveable"
    assert store.steps() == [1, 2]


# A checkpoint of a stranger, whose checksums are right


def _set(*path: Any) -> Callable[[Any], None]:
    """Return a function that sets the last of `path` in a manifest, at the keys before it."""
    *keys, last, value = path

    def change(body: Any) -> None:
        for key in keys:
            body = body[key]
        body[last] = value

    return change


SHARD, KERNEL = ("shards", "arrays"), ("arrays", "weights/0")
FORGED: dict[str, Callable[[Any], None]] = {
    "shard above": _set(*SHARD, "file", "../secret"),
    "shard elsewhere": _set(*SHARD, "file", "/etc/hostname"),
    "shard of another type": _set(*SHARD, "file", 3),
    "shard without checksum": lambda body: body["shards"]["arrays"].pop("sha256"),
    "a terabyte in the file": _set(*SHARD, "size_bytes", 1 << 40),
    "a terabyte in an array": _set(*KERNEL, "shape", [1 << 38]),
    "a terabyte before an array": _set(*KERNEL, "offset", 1 << 40),
    "negative offset": _set(*KERNEL, "offset", -64),
    "negative shape": _set(*KERNEL, "shape", [-4, -2]),
    "shape of another type": _set("arrays", "optimizer/0", "shape", {}),
    "shape without end": _set(*KERNEL, "shape", [1 << 62] * 100_000),
    "no numbers": _set(*KERNEL, "dtype", "object"),
    "type of many numbers": _set(*KERNEL, "dtype", "(1000000000,)f4"),
    "type that is a name of a package": _set(*KERNEL, "dtype", "finfo"),
    "array without entry": _set("arrays", {}),
    "step of another type": _set("step", "6"),
    "step of another checkpoint": _set("step", 5),
    "step of another run": _set("meta", "step", 5),
    "step that no int64 holds": _set("meta", "step", 1 << 63),
    "no variables": lambda body: body["meta"].pop("variables"),
    "variable without number": _set("meta", "variables", "weights/x", ["a", [2], "float32"]),
    "variable without array": _set("meta", "variables", "weights/4", ["a", [2], "float32"]),
    "variable of another shape": _set("meta", "variables", "weights/0", ["a", [3], "float32"]),
    "variable without shape": _set("meta", "variables", "weights/0", ["a"]),
    "callbacks of another type": _set("meta", "callbacks", []),
    "seed of another type": _set("meta", "seed", "7"),
    "seed that no int64 holds": _set("meta", "seed", 1 << 80),
    "layers of another type": _set("meta", "configuration", "layer", [1]),
    "logs of another type": _set("meta", "fingerprint", "logs_before_validation", {"a": [[1], 2]}),
    "cut of another type": _set("meta", "stages", {"cut": ["a"]}),
    "cuts of another type": _set("meta", "stages", {"cuts": {"model": ["a"]}}),
    "a cut of nothing": _set("meta", "stages", {"cut_of": ["model", 2]}),
    "no micro-batches": _set("meta", "stages", {"split_size": 0}),
}


@pytest.fixture
def foreign(tmp_path):
    """The directory of a run's checkpoint, which a test may forge."""
    shutil.copytree(EARLIER, tmp_path / "checkpoints")
    (tmp_path / "secret").write_bytes(bytes(1348))
    return next((tmp_path / "checkpoints").glob("step-*"))


def damage_of(directory: Path) -> str:
    with pytest.raises(NothingWhole) as caught:
        RunStore(directory.parent).read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_a_forged_checkpoint_is_rejected_without_using_memory(foreign, change):
    forged(foreign, change)
    tracemalloc.start()
    said = damage_of(foreign)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "is damaged (manifest.json" in said or "arrays.bin has 1348 bytes" in said
    assert peak < 32 << 20


@pytest.mark.parametrize("size", [None, 8])
def test_pipeline_choices_are_read_with_any_split_size(foreign, size):
    choices = {"cuts": {"model of 4 layers": [1, 3]}, "split_size": size}
    forged(foreign, _set("meta", "stages", choices))
    found = RunStore(foreign.parent).read()
    assert found is not None
    assert found.meta["stages"] == choices


def link(path: Path) -> None:
    outside = next(above for above in path.parents if (above / "secret").exists())
    path.symlink_to(path.rename(outside / "moved"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLANTED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest is a link": ("manifest.json", link),
    "shard is a link": ("arrays.bin", link),
    "checkpoint is a link": (".", link),
    "manifest is a FIFO": ("manifest.json", fifo),
    "shard is a FIFO": ("arrays.bin", fifo),
    "manifest is a directory": ("manifest.json", lambda path: (path.unlink(), path.mkdir())),
    "manifest of 5 GiB": ("manifest.json", lambda path: os.truncate(path, 5 << 30)),
    "deep manifest": ("manifest.json", lambda path: path.write_text("[" * 200_000)),
}


@pytest.mark.parametrize(("name", "plant"), PLANTED.values(), ids=PLANTED.keys())
def test_links_and_odd_files_in_a_checkpoint_are_damage(foreign, name, plant):
    plant(foreign / name)
    there = os.listdir(foreign.resolve())
    damage_of(foreign)
    assert RunStore(foreign.parent).steps() == []
    behind = foreign.resolve()
    store = RunStore(foreign.parent, keep=1)
    for step in (7, 8):
        write(store, step)
    store.close()
    assert sorted(os.listdir(foreign.parent)) == [".lock", "step-000000008.4"]
    if name == ".":  # what a link leads to is not touched
        assert os.listdir(behind) == there


@settings(max_examples=300)
@given(
    path=st.lists(st.integers(0, 40), max_size=6),
    value=JSON,
    number=st.integers(0),
    file=st.sampled_from(["manifest.json", "arrays.bin", None]),
)
def test_any_checkpoint_content_is_read_or_damaged(path, value, number, file):
    """A value anywhere in the manifest, with a right checksum; or other bytes in a file."""
    with tempfile.TemporaryDirectory() as place:
        (earlier,) = EARLIER.glob("step-*")
        directory = Path(shutil.copytree(earlier, Path(place) / "c" / earlier.name))
        if file is None:
            forged(directory, replacing_at(path, value))
        else:
            data = (directory / file).read_bytes()
            changed = mutated(data, random.Random(number), [b"[", b'"', b"\xff", b"9" * 5000])
            (directory / file).write_bytes(changed)
        said, arrays = "", {}
        try:
            arrays = RunStore(directory.parent).read().arrays
        except TfdistError as error:
            said = str(error)
        assert "\n" not in said
        assert sum(array.nbytes for array in arrays.values()) <= 1348


@pytest.mark.parametrize("file", ["arrays.bin", "manifest.json"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_an_unreadable_checkpoint_is_not_called_damaged(store, monkeypatch, caplog, file, number):
    """A run that took it for damaged would start over, and remove it."""
    paths = [write(store, 1), write(store, 2)]
    _refuse_reading(monkeypatch, paths[1] / file, number)
    with pytest.raises(TfdistError, match=rf"{paths[1].name}/{file}.*{os.strerror(number)}") as got:
        store.read()
    assert not isinstance(got.value, NothingWhole)
    write(store, 3)
    assert ("cannot remove an old checkpoint" in caplog.text) is (file == "manifest.json")
    monkeypatch.undo()
    assert_is(store.read(2), 2)
    write(store, 4)
    assert store.steps() == [3, 4]


def test_a_checkpoint_with_a_disk_error_is_damaged(store, monkeypatch):
    write(store, 1)
    _refuse_reading(monkeypatch, write(store, 2) / "arrays.bin", errno.EIO)
    assert_is(store.read(), 1)


def _refuse_reading(monkeypatch: pytest.MonkeyPatch, refused: Path, number: int) -> None:
    """As a server of files does, or another user's file; root may read everything."""

    def opened(path: str, flags: int) -> int:
        if Path(path) == refused:
            raise OSError(number, os.strerror(number))
        return open_untrusted(path, flags)

    monkeypatch.setattr(format_module, "open_untrusted", opened)


@pytest.mark.parametrize("step", [None, 1])
def test_a_checkpoint_removed_by_its_writer_is_not_damaged(tmp_path, monkeypatch, step):
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
        with pytest.raises(UsageError, match=r"no checkpoint of step 1 \(it has \[2\]\)"):
            reader.read(step)


def test_a_missing_checkpoint_is_refused(store, tmp_path):
    assert store.latest() is None
    assert refusal(store.read).code == "no-checkpoint"
    write(store, 1)
    assert "no checkpoint of step 4 (it has [1])" in refusal(lambda: store.read(4)).problem
    assert refusal(lambda: CheckpointStore(tmp_path, keep=0)).code == "not-an-int"


def test_a_newer_format_is_refused_and_kept(store, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(format_module, "VERSION", format_module.VERSION + 1)
        path = write(store, 1)
    store.close()
    other = CheckpointStore(store.directory)
    for attempt in (store.read, store.steps, other.prepare, lambda: write(other, 2)):
        assert refusal(attempt).code == "version"
    assert os.listdir(store.directory / path.name)
    assert [name for name in os.listdir(store.directory) if name.startswith("step")] == [path.name]


def test_threads_may_write_at_once(tmp_path):
    store = CheckpointStore(tmp_path, keep=10)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda step: write(store, step), range(1, 7)))
    assert sorted(store.steps()) == [1, 2, 3, 4, 5, 6]
    for step in store.steps():
        assert_is(store.read(step), step)
    store.close()


def test_new_directories_reach_the_disk(tmp_path, disk_events):
    store = CheckpointStore(tmp_path / "runs" / "a" / "checkpoints")
    store.prepare()
    above = [tmp_path, tmp_path / "runs", tmp_path / "runs" / "a"]
    assert [path for what, path in disk_events if what == "fsync" and path in above] == above
    store.close()


# A place where nothing can be written


def test_a_path_below_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(TfdistError, match=r"(Not a directory|File exists); no earlier"):
            CheckpointStore(path).prepare()


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _lose_the_files(source: Path, target: Path) -> None:
    os.mkdir(target)
    for name in os.listdir(source):
        os.unlink(source / name)
    os.rmdir(source)


@pytest.mark.parametrize("replace", [_refuse, _lose_the_files, lambda source, target: None])
def test_a_file_system_without_directory_renames_is_named(tmp_path, monkeypatch, replace):
    store = CheckpointStore(tmp_path / "checkpoints")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(TfdistError, match=r"(not supported|No such file).*; no earlier"):
        write(store, 1)
    store.close()
