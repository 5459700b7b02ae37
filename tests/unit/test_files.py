"""Files against the machine: failed writes, kills, second holders, forks."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tfdist import files
from tfdist.files import FileLock, LockedError, is_held

# Atomic writes


def write_twice(path: Path, text: str) -> None:
    """Write as a library does that opens the file by its name."""
    with files.replacing(path) as unfinished:
        unfinished.write_text(text)


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_file_reaches_the_disk_before_its_rename(tmp_path, disk_events):
    path = tmp_path / "a.json"
    files.write_json(path, {"b": 1})
    beside = tmp_path / ".partial-a.json"
    assert disk_events == [("fsync", beside), ("rename", path), ("fsync", tmp_path)]
    assert path.read_text() == '{\n "b": 1\n}\n'
    disk_events.clear()
    files.write_json(path, {"b": 2}, durable=False)
    assert disk_events == [("rename", path)]
    assert json.loads(path.read_text()) == {"b": 2}
    assert names_in(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_file(tmp_path, error):
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


def test_leftovers_of_a_kill_are_overwritten(tmp_path):
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


def test_a_private_file_is_readable_only_by_its_owner(tmp_path):
    file, left = tmp_path / "a.json", tmp_path / ".partial-a.json"
    for path in (file, left):
        path.write_text("older")
        path.chmod(0o644)
    with left.open() as opened:
        files.write_json(file, {}, private=True)
        assert opened.read() == "older"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text()) == {}


def test_a_file_system_without_directory_fsync_is_accepted(tmp_path, monkeypatch):
    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse_directories)
    files.write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


# Locks

HOLD = """
import os, pathlib, sys
from tfdist.files import FileLock
with FileLock(pathlib.Path(sys.argv[1])).acquire():
    if os.fork() == 0:  # as a process that reads data
        print(flush=True), sys.stdin.read(), os._exit(0)
    os.wait()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds `tmp_path / "lock"`, and has a child that lives until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield process
        process.kill()


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path, holder):
    lock = FileLock(tmp_path / "lock")
    assert is_held(lock.path)
    with pytest.raises(LockedError, match=f"lock is locked by process {holder.pid}$"):
        lock.acquire()
    assert not lock.held
    holder.kill()
    holder.wait()
    assert not is_held(lock.path)
    with lock.acquire():
        assert is_held(lock.path)
        assert lock.path.read_text() == f"{os.getpid()}\n"
    assert not is_held(lock.path)


def test_a_fork_keeps_the_lock_of_its_parent(tmp_path):
    with FileLock(tmp_path / "lock").acquire() as lock:
        child = os.fork()
        if child == 0:
            os._exit(lock.held)
        assert os.waitpid(child, 0)[1] == 0
        assert is_held(lock.path)


def test_a_lock_ends_with_its_object(tmp_path):
    lock = FileLock(tmp_path / "lock").acquire()
    assert is_held(tmp_path / "lock")
    del lock
    assert not is_held(tmp_path / "lock")


def test_a_lock_is_waited_for(tmp_path):
    first, second = FileLock(tmp_path / "lock").acquire(), FileLock(tmp_path / "lock")
    with pytest.raises(LockedError):
        second.acquire(within_s=0)
    threading.Timer(0.05, first.release).start()
    second.acquire(within_s=60)
    assert second.held
    assert not first.held
    second.release()


def test_a_lock_file_removed_meanwhile_is_created_again(tmp_path, monkeypatch):
    """The file is removed between opening and locking it: the lock must be on the new one."""
    flock, held = fcntl.flock, []

    def remove_first(descriptor: int, operation: int) -> None:
        if not held:
            (tmp_path / "lock").unlink()
        held.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with FileLock(tmp_path / "lock").acquire():
        assert len(held) == 2
        assert is_held(tmp_path / "lock")


@pytest.mark.parametrize("make", [os.symlink, os.link, None])
def test_a_planted_link_or_fifo_is_no_lock(tmp_path, make):
    victim, path = tmp_path / "authorized_keys", tmp_path / "lock"
    victim.write_text("ssh-ed25519 AAAA\n")
    make(victim, path) if make else os.mkfifo(path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="link"):
        FileLock(path).acquire()
    assert not is_held(path)
    assert victim.read_text() == "ssh-ed25519 AAAA\n"
    assert os.listdir("/proc/self/fd") == before


def test_a_lock_does_not_create_or_lock_directories(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "no" / "lock").acquire()
    with pytest.raises(IsADirectoryError):
        FileLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == []


def test_a_lock_file_names_a_process_or_unknown(tmp_path):
    with FileLock(tmp_path / "lock").acquire():
        (tmp_path / "lock").write_text("\x1b[2J")
        with pytest.raises(LockedError, match=r"locked by process unknown$"):
            FileLock(tmp_path / "lock").acquire()


@pytest.mark.parametrize("write", [files.write_text, write_twice])
def test_a_planted_partial_link_is_not_followed(tmp_path, write):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".partial-a").symlink_to(victim)
    write(tmp_path / "a", "new")
    assert victim.read_text() == "mine"
    assert (tmp_path / "a").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("victim"), os.mkfifo, os.mkdir])
def test_untrusted_files_are_opened_only_if_regular(tmp_path, make):
    (tmp_path / "victim").write_text("mine")
    make(tmp_path / "planted")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError, match=r"link|regular|directory|device"):
            files.open_untrusted(tmp_path / "planted", flags)
    with open(tmp_path / "victim", "a", opener=files.open_untrusted) as file:
        file.write(" too")
    assert (tmp_path / "victim").read_text() == "mine too"


def test_a_failed_lock_is_an_error_and_not_held(tmp_path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No locks available"):
        FileLock(tmp_path / "lock").acquire()
    assert not is_held(tmp_path / "lock")
    assert not is_held(tmp_path / "no")
    assert os.listdir("/proc/self/fd") == before
