"""Files made once for all processes, and folders that end with their owner."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys

import pytest

from tfdist.data.cache import SpillDirectory, cached_file, exclusive
from tfdist.errors import StartupTimeout

HOLD = """
import pathlib, sys
from tfdist.data.cache import SpillDirectory, exclusive
folder = pathlib.Path(sys.argv[1])
spill = SpillDirectory(folder / "spill")
with exclusive(folder / "lock", purpose="held", timeout_s=60):
    print(spill.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds `lock` and a spill folder until its input is closed."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    process.spill = process.stdout.readline().strip()
    assert process.spill
    yield process
    process.kill()
    process.wait(timeout=60)
    process.stdin.close()
    process.stdout.close()


def test_a_wait_names_the_owner_and_ends_at_its_deadline(tmp_path, holder, caplog):
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(StartupTimeout, match=f"preparing x: process {holder.pid} has held"),
        exclusive(tmp_path / "lock", purpose="preparing x", timeout_s=0.5),
    ):
        pass
    assert f"preparing x: waiting for process {holder.pid}" in caplog.text


def test_a_lock_and_a_folder_of_a_killed_process_are_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    assert os.path.isdir(holder.spill)
    with exclusive(tmp_path / "lock", purpose="x", timeout_s=60):
        pass
    spill = SpillDirectory(tmp_path / "spill")
    assert not os.path.exists(holder.spill)
    spill.close()


def test_a_folder_in_use_is_left_alone(tmp_path, holder):
    spill = SpillDirectory(tmp_path / "spill")
    assert os.path.isdir(holder.spill)
    spill.close()
    assert not spill.path.exists()
    holder.stdin.close()
    assert holder.wait(timeout=60) == 0
    assert not os.path.exists(holder.spill)


def test_a_folder_that_another_process_is_making_is_left_alone(tmp_path, monkeypatch):
    """Here it is just about to lock the file that says so."""
    flock, made = fcntl.flock, []

    def make_another_first(descriptor, operation):
        if not made:
            made.append(None)
            made.append(SpillDirectory(tmp_path))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", make_another_first)
    spill = SpillDirectory(tmp_path)
    third = SpillDirectory(tmp_path)
    for one in (spill, made[1], third):
        assert one.path.is_dir()
        one.close()
    assert not list(tmp_path.iterdir())


def test_a_forked_child_does_not_delete_the_folder(tmp_path):
    spill = SpillDirectory(tmp_path)
    child = os.fork()
    if child == 0:
        spill.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert spill.path.exists()
    spill.close()


def test_a_file_is_made_once(tmp_path):
    calls = []

    def write(path):
        calls.append(path)
        path.write_text("made")

    def get(key):
        return cached_file(key, suffix=".txt", write=write, cache_dir=tmp_path, purpose="x")

    assert get("a") == get("a") != get("b")
    assert get("a").read_text() == "made"
    assert len(calls) == 2
