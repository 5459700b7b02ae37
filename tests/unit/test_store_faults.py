"""The checkpoint store against the machine: kill -9, full and read-only disks, memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfdist.checkpoint import manifest as manifest_module
from tfdist.checkpoint import shards as shards_module
from tfdist.checkpoint.store import CheckpointStore
from tfdist.errors import TfdistError, UsageError

VALUES = 25_000  # 100 kB a checkpoint


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"x": np.full(VALUES, step, np.float32), "step": np.array(step)}


def write(store: CheckpointStore, step: int) -> None:
    store.write(step, arrays_of(step), meta={"step": step})


def assert_whole(store: CheckpointStore, step: int | None = None) -> int:
    """The step of the newest readable checkpoint, whose every byte is right."""
    checkpoint = store.read(step)
    expected = arrays_of(checkpoint.step)
    assert {n: a.tobytes() for n, a in checkpoint.arrays.items()} == {
        n: a.tobytes() for n, a in expected.items()
    }
    assert checkpoint.meta == {"step": checkpoint.step}
    return checkpoint.step


def leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".") and name != ".lock"]


# kill -9 at each write of a save

CHANGES = ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync", "ftruncate", "pwrite")


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ends this process by SIGKILL before the call with this number that changes the disk.

    A write to a file counts three times: before it, when half of it is done, and after it.
    """
    reached = 0

    def point() -> None:
        nonlocal reached
        reached += 1
        if reached == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            point()
            return function(*args, **kwargs)

        return call

    for name in CHANGES:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))

    class File(FileIO):
        def write(self, data: Any) -> int:
            point()
            half = super().write(data[: len(data) // 2])
            point()
            written = half + super().write(data[half:])
            point()
            return written

    monkeypatch.setattr(shards_module, "FileIO", File)


def killed_in_a_save(directory: Path, step: int, *, at: int) -> bool:
    """Saves in a child that is killed at the point; False where the save has fewer points."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as monkeypatch:
            die_at(monkeypatch, at)
            store = CheckpointStore(directory, keep=2)
            store.prepare()
            write(store, step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_kill_at_each_write_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = []
    for point in range(1, 200):
        directory = tmp_path / str(point)
        before = CheckpointStore(directory, keep=2)
        for step in (1, 2):
            write(before, step)
        before.close()
        killed = killed_in_a_save(directory, 3, at=point)
        seen.append(assert_whole(CheckpointStore(directory)))
        if not killed:
            break
        # The next process is killed too, somewhere in its cleaning up or writing.
        killed_in_a_save(directory, 4, at=point * 7 % 40 + 1)
        assert assert_whole(CheckpointStore(directory)) in (seen[-1], 4)
        after = CheckpointStore(directory, keep=2)
        after.prepare()
        assert leftovers(directory) == []
        write(after, 5)
        assert assert_whole(after) == 5
        assert leftovers(directory) == []
        assert len(after.steps()) == 2
        after.close()
    assert not killed
    assert seen == sorted(seen)  # the old one up to the rename, the new one from there on
    assert set(seen) == {2, 3}
    assert len(seen) > 30


# A disk that is full


class _Budget:
    """What stands in for a small file system where none may be mounted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
        left = size_bytes

        class File(FileIO):
            def write(self, data: Any) -> int:
                nonlocal left
                if left <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written = super().write(data[:left])
                left -= written
                return written

        monkeypatch.setattr(shards_module, "FileIO", File)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with room for two checkpoints and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = _mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place))
    if not mounted:
        _Budget(monkeypatch, 250_000)
    yield place
    if mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _mount(*arguments: str) -> bool:
    if os.geteuid() != 0:
        return False
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


def test_a_full_disk_in_the_middle_of_a_save_is_one_line_and_loses_nothing(
    small_disk: Path,
) -> None:
    store = CheckpointStore(small_disk, keep=3)
    store.prepare()
    write(store, 1)
    write(store, 2)
    with pytest.raises(TfdistError) as caught:
        write(store, 3)
    message = str(caught.value)
    assert "\n" not in message
    assert "checkpoint of step 3" in message
    assert "No space left on device" in message
    assert "the newest is of step 2" in message
    assert caught.value.exit_code == 1
    assert leftovers(small_disk) == []
    assert [assert_whole(store, step) for step in store.steps()] == [1, 2]
    store.close()


def _fill(descriptor: int) -> None:
    while True:
        os.write(descriptor, b"x" * 4096)


def test_a_disk_that_is_full_already_is_an_error_before_any_training(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.path.ismount(small_disk):
        filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space"):
            _fill(filler)
        os.close(filler)
    else:
        _Budget(monkeypatch, 0)
    with pytest.raises(TfdistError, match=r"No space left on device .*none was saved before"):
        CheckpointStore(small_disk / "checkpoints").prepare()


# A place where nothing can be written


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory with one checkpoint, then made read-only, for root too."""
    place = tmp_path / "read-only"
    place.mkdir()
    mounted = _mount("-t", "tmpfs", "tmpfs", str(place))
    store = CheckpointStore(place)
    write(store, 1)
    store.close()
    if mounted:
        assert _mount("-o", "remount,ro", str(place))
    else:
        place.chmod(0o555)
    yield place
    if mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)
    else:
        place.chmod(0o755)


def test_a_read_only_directory_is_a_usage_error_at_once(read_only: Path) -> None:
    store = CheckpointStore(read_only)
    with pytest.raises(UsageError, match=r"received (Read-only file system|Permission denied);"):
        store.prepare()
    assert assert_whole(store) == 1


def test_a_path_below_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(UsageError, match=r"received Not a directory; .*Fix: choose another"):
            CheckpointStore(path).prepare()


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _lose_the_files(source: Path, target: Path) -> None:
    os.mkdir(target)
    for name in os.listdir(source):
        os.unlink(source / name)
    os.rmdir(source)


@pytest.mark.parametrize("replace", [_refuse, _lose_the_files, lambda source, target: None])
def test_a_file_system_that_does_not_rename_directories_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Callable[..., None]
) -> None:
    directory = tmp_path / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(UsageError, match="does not rename a directory"):
            CheckpointStore(directory).prepare()
    assert not directory.exists()


def test_a_store_that_could_not_be_prepared_lets_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = CheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _refuse)
        with pytest.raises(UsageError):
            refused.prepare()
    other = CheckpointStore(tmp_path)
    other.prepare()
    with pytest.raises(UsageError, match="a second writer"):
        refused.prepare()
    other.close()


def test_preparing_refuses_a_newer_format_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as later:
        later.setattr(manifest_module, "VERSION", manifest_module.VERSION + 1)
        write(store, 1)
    store.close()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError, match="format version 2"):
        CheckpointStore(tmp_path).prepare()
    assert sorted(os.listdir(tmp_path)) == before


def test_preparing_removes_what_a_crash_left_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    store.close()
    for name in (".unfinished-step-000000002.2", ".discarded-step-000000000.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "arrays.bin").write_bytes(b"half")
    store.prepare()
    assert leftovers(tmp_path) == []
    assert assert_whole(store) == 1
    store.close()


def test_a_directory_that_was_only_tried_out_is_given_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.prepare()
    store.close()
    assert os.listdir(tmp_path) == []
    store.prepare()
    write(store, 1)
    store.close()
    there = CheckpointStore(tmp_path / "there")
    there.directory.mkdir()
    there.prepare()
    there.close()
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "there"]
    assert assert_whole(store) == 1


# Memory

READER = """
import sys
from tfdist.checkpoint.store import CheckpointStore

def kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

before = kib("VmRSS:")
checkpoint = CheckpointStore(sys.argv[1]).read()
print((kib("VmHWM:") - before) * 1024 / sum(a.nbytes for a in checkpoint.arrays.values()))
"""


class _Large(Mapping[str, np.ndarray]):
    """Four arrays of 50 MB, made when asked for."""

    def __getitem__(self, name: str) -> np.ndarray:
        return np.full(50_000_000, int(name), np.uint8)

    def __iter__(self) -> Iterator[str]:
        return iter("0123")

    def __len__(self) -> int:
        return 4


def test_reading_200_mb_takes_the_memory_of_the_arrays_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, _Large(), meta={})
    store.close()
    told = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0.9 < float(told.stdout) < 1.2
