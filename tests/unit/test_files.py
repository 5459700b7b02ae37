"""Files against the machine: failed writes, kills, second holders, forks."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from tfdist import files
from tfdist.errors import TfdistError

# Atomic writes


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_file_is_on_the_disk_before_it_is_renamed_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(("rename", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    path = tmp_path / "a.json"
    files.write_json(path, {"b": 1})
    beside = str(tmp_path / ".partial-a.json")
    assert events == [("fsync", beside), ("rename", str(path)), ("fsync", str(tmp_path))]
    assert path.read_text() == '{\n "b": 1\n}\n'
    events.clear()
    files.write_json(path, {"b": 2}, durable=False)
    assert events == [("rename", str(path))]
    assert json.loads(path.read_text()) == {"b": 2}
    assert names_in(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_old_file_alone(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "model.keras"
    files.write_text(path, "old")

    def write() -> None:
        with files.replacing(path) as unfinished:
            assert unfinished.suffix == ".keras", "Keras tells the format from it"
            unfinished.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["model.keras"]


def test_what_a_kill_left_is_overwritten(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with files.replacing(tmp_path / "a") as unfinished:
            unfinished.write_text("much of what was to be written")
            os._exit(9)
    os.waitpid(child, 0)
    assert len(names_in(tmp_path)) == 1
    assert not (tmp_path / "a").exists()
    files.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert names_in(tmp_path) == ["a"]


def test_a_file_system_without_fsync_of_directories_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse_directories)
    files.write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


def test_an_error_names_where_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(TfdistError, match=r"^run directory x: No such file or directory$"),
        files.one_line_errors("run directory x"),
    ):
        files.write_text(tmp_path / "no" / "a", "x")
