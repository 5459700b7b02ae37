"""Files made once for all processes, and the lock of who makes them."""

import logging
import os

import pytest

from tfdist.data.cache import cached_file, exclusive
from tfdist.errors import StartupTimeout, TfdistError


def test_a_wait_names_the_owner_and_ends_at_its_deadline(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO),
        exclusive(tmp_path / "lock", purpose="held", timeout_s=60),
        pytest.raises(StartupTimeout, match=f"preparing x: process {os.getpid()} has held"),
        exclusive(tmp_path / "lock", purpose="preparing x", timeout_s=0.5),
    ):
        pass
    assert f"preparing x: waiting for process {os.getpid()}" in caplog.text


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
