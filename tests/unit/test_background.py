"""A write beside the training: one at a time, errors come back, no thread is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tfdist.checkpoint.background import Background


def test_the_next_piece_waits_for_the_one_before() -> None:
    background, may_end, events = Background("test"), threading.Event(), []

    def first() -> None:
        may_end.wait(30)
        events.append("first")

    background.start(first)
    assert background.busy
    threading.Timer(0.05, may_end.set).start()
    background.start(lambda: events.append("second"))
    background.wait()
    assert events == ["first", "second"]
    assert not background.busy


def test_an_error_is_raised_once_where_the_next_piece_begins() -> None:
    background, ran = Background("test"), []
    background.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.start(lambda: ran.append(1))
    assert ran == []
    background.start(lambda: ran.append(2))
    background.wait()
    background.wait()
    assert ran == [2]


def test_an_error_can_be_had_without_being_raised() -> None:
    background = Background("test")
    background.start(lambda: 1 / 0)
    assert isinstance(background.join(), ZeroDivisionError)
    assert background.join() is None


def test_no_thread_is_left_once_the_work_is_done() -> None:
    before = set(threading.enumerate())
    background = Background("test")
    for _ in range(5):
        background.start(lambda: None)
    background.wait()
    assert set(threading.enumerate()) <= before


PROGRAM = """
import sys, threading
import numpy as np
from tfdist.checkpoint.background import Background
from tfdist.checkpoint.store import CheckpointStore

class Slow(dict):
    def __getitem__(self, name):
        threading.main_thread().join()   # the interpreter is ending
        return super().__getitem__(name)

store = CheckpointStore(sys.argv[1])
background = Background("checkpoint")
background.start(lambda: store.write(3, Slow(x=np.ones(1000)), meta={}))
raise {end}
"""


@pytest.mark.parametrize("end", ["RuntimeError", "KeyboardInterrupt", "SystemExit(4)"])
def test_a_program_that_ends_lets_the_write_end_first(tmp_path: Path, end: str) -> None:
    from tfdist.checkpoint.store import CheckpointStore

    program = PROGRAM.replace("{end}", end)
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, timeout=60
    )
    assert ended.returncode != 0
    assert CheckpointStore(tmp_path).read().step == 3
