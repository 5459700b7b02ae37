"""What a run shows: hashes, table and progress."""

import hashlib
import io
import struct
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.clock import Clock
from tfdist.checkpoint.model_state import state_sha256, weights_sha256
from tfdist.outputs.display import ProgressDisplay, show_result

SUMMARY = {
    "status": "done",
    "strategy": "ps",
    "workers": 4,
    "ps": 1,
    "replicas": 4,
    "steps": 2000,
    "examples": 128000,
    "virtual_epochs": 10,
    "metrics": {"loss": 0.01, "accuracy": 0.99, "val_loss": 0.05, "val_accuracy": 0.983},
    "examples_per_second": 5210.4,
    "weights_sha256": "ab" * 32,
    "state_sha256": "cd" * 32,
    "resumed_from_step": None,
}


def test_the_hash_covers_weights_in_order_then_the_optimizer():
    kernel = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    halves = np.ones(2, ml_dtypes.bfloat16)
    weights = [kernel.T, np.array(7, ">i4"), halves]
    model = SimpleNamespace(weights=weights, optimizer=None)
    found = struct.pack("<4fi", 1, 3, 2, 4, 7) + halves.tobytes()
    assert weights_sha256(model) == state_sha256(model) == hashlib.sha256(found).hexdigest()
    model.optimizer = SimpleNamespace(variables=[np.array(5, np.int64)])
    assert weights_sha256(model) == hashlib.sha256(found).hexdigest()
    assert state_sha256(model) == hashlib.sha256(found + struct.pack("<q", 5)).hexdigest()


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (
            {},
            [
                "accuracy       0.9900",
                "val_accuracy   0.9830",
                "examples/s     5,210",
            ],
        ),
        (
            {"resumed_from_step": 500, "metrics": {"loss": None}, "worker_steps": {"w": 3, "x": 1}},
            [
                "steps          2,000 (resumed from 500)",
                "loss           not finite",
                "steps by       w 75%, x 25%",
            ],
        ),
        (
            {"staleness": {"0": 50, "1": 25, "2": 10, "3": 10, "7": 5}},
            ["staleness      0: 50%, 1: 25%, 2-3: 20%, 4-7: 5%"],
        ),
    ],
)
def test_the_result_is_plain_text(changes, rows, capsys):
    show_result(SUMMARY | changes, run_dir="runs/a")
    text = capsys.readouterr().out
    assert text.isascii()
    assert "\x1b" not in text
    assert [row for row in rows if f"  {row}\n" not in text] == []
    assert ("staleness" in text) == ("staleness" in changes)


def shown(*, step_s: float, steps: int, out: Any = None, first: int = 0, **given: Any) -> str:
    """What is shown of steps of so many seconds, the first of which takes a minute."""
    out, clock = out or io.StringIO(), Clock()
    display = ProgressDisplay(total_steps=first + steps, stream=out, clock=clock, **given)
    display.begin(step=first, examples=64 * first)
    clock.now_s += 60 if first else 0  # tracing
    for step in range(first + 1, first + steps + 1):
        clock.now_s += step_s
        display.update(step=step, examples=64 * step, logs={"loss": 0.5, "lr": 1.0})
    display.end()
    return out.getvalue()


def test_without_a_terminal_progress_appears_every_ten_seconds():
    lines = shown(step_s=1, steps=25).splitlines()
    assert [line.split()[1] for line in lines] == ["1", "11", "21", "25"]
    assert lines[1] == "step 11 of 25 (44 %)  64 examples/s  loss 0.5000  0:14 left"
    assert lines[-1].endswith("done")
    short = shown(step_s=0.01, steps=30).splitlines()
    assert [line.split()[1] for line in short] == ["1", "30"]
    assert shown(step_s=0.01, steps=1).count("\n") == 1
    ProgressDisplay(total_steps=1).end()  # one that never began
    # The rate is of the last seconds and not of the start.
    assert " 640 examples/s" in shown(step_s=0.1, steps=400, first=1000).splitlines()[-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_each_line_replaces_the_last(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    first, last = shown(step_s=0.1, steps=3, out=Terminal()).split("\r")
    assert first.startswith("step 1 of 3 (33 %)")
    assert last.startswith("step 3 of 3 (100 %)")
    assert last.endswith("done\x1b[K\n")
