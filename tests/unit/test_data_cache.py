"""Files made once for all processes, and the lock of who makes them."""

import logging
import os
import signal
import subprocess
import sys

import pytest

from tfdist.data.cache import cached_file, exclusive
from tfdist.errors import StartupTimeout, TfdistError

HOLD = """
import pathlib, sys
from tfdist.data.cache import exclusive
folder = pathlib.Path(sys.argv[1])
with exclusive(folder / "lock", purpose="held", timeout_s=60):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds `lock` until its input is closed."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
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


def test_a_lock_of_a_killed_process_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    with exclusive(tmp_path / "lock", purpose="x", timeout_s=60):
        pass


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    lock = tmp_path / "file" / "data" / "lock"
    said = f"preparing x in {lock.parent}: Not a directory"
    held = exclusive(lock, purpose="preparing x", timeout_s=60)
    with pytest.raises(TfdistError, match=said), held:
        pass


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
