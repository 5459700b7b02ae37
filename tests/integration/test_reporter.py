"""What the program writes and shows while it trains."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import keras
import pytest
from rich.console import Console

from tfdist.app.run import RunReporter
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.terminal import ProgressDisplay
from tfdist.training.epochs import EpochPlan


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.claim({})
    return directory


PLAN = EpochPlan.from_boundaries([0, 100, 200, 300], global_batch_size=10)


def reporter_of(
    directory: RunDirectory, clock: Clock, *, worker_steps: Callable[[], dict[str, int]] = dict
) -> RunReporter:
    console = Console(file=io.StringIO(), force_terminal=False, soft_wrap=True)
    display = ProgressDisplay(total_steps=PLAN.total_steps, console=console, clock=clock)
    return RunReporter(directory, PLAN, display=display, clock=clock, worker_steps=worker_steps)


def run_range(
    reporter: RunReporter, clock: Clock, batches: tuple[int, int], *, seconds: float
) -> None:
    reporter.on_train_batch_begin(batches[0])
    clock.now_s += seconds
    reporter.on_train_batch_end(batches[1] - 1, {"loss": 0.5})


def run_epoch(reporter: RunReporter, clock: Clock, epoch: int, *, first: int = 0) -> None:
    reporter.on_epoch_begin(epoch)
    for start in range(first, 10, 5):
        run_range(reporter, clock, (start, start + 5), seconds=0.5)
    clock.now_s += 7  # validation is not training
    reporter.on_epoch_end(epoch, {"loss": 0.5, "val_loss": 0.75})


def test_a_line_for_each_virtual_epoch(directory: RunDirectory) -> None:
    clock = Clock()
    reporter = reporter_of(directory, clock)
    for epoch in range(3):
        run_epoch(reporter, clock, epoch)
    reporter.on_train_end()
    expected = {"loss": 0.5, "val_loss": 0.75, "examples_per_second": 100.0}
    assert directory.read_metrics() == [
        {"step": 10 * n, "examples": 100 * n, "virtual_epoch": n, **expected} for n in (1, 2, 3)
    ]
    assert reporter.examples_per_second == 100
    assert reporter.first_step == 0
    assert list(directory.tensorboard.glob("events.*"))


def test_a_line_of_a_ps_job_has_the_steps_of_each_worker(directory: RunDirectory) -> None:
    clock, steps = Clock(), {"worker-0": 7, "worker-1": 3}
    run_epoch(reporter_of(directory, clock, worker_steps=lambda: steps), clock, 0)
    (line,) = directory.read_metrics()
    assert line["worker_steps"] == steps


def test_a_resumed_run_takes_back_what_it_does_again(directory: RunDirectory) -> None:
    for step in (10, 20):
        directory.append_metrics({"step": step, "loss": 1.0})
    clock = Clock()
    reporter = reporter_of(directory, clock)
    run_epoch(reporter, clock, 1, first=5)
    assert reporter.first_step == 15
    assert [(line["step"], line["loss"]) for line in directory.read_metrics()] == [
        (10, 1.0),
        (20, 0.5),
    ]
    reporter.close()


def test_a_run_of_which_only_a_validation_was_left_writes_its_line_once(
    directory: RunDirectory,
) -> None:
    for step in (10, 20):
        directory.append_metrics({"step": step, "loss": 1.0})  # of an attempt that was killed next
    reporter = reporter_of(directory, Clock())
    reporter.on_epoch_begin(1)
    reporter.resumed_at(20)
    reporter.on_epoch_end(1, {"loss": 0.5})
    assert [(line["step"], line["loss"]) for line in directory.read_metrics()] == [
        (10, 1.0),
        (20, 0.5),
    ]
    assert reporter.examples_per_second is None
    reporter.close()


def test_an_epoch_that_was_cut_short_has_no_line(directory: RunDirectory) -> None:
    clock = Clock()
    reporter = reporter_of(directory, clock)
    reporter.on_epoch_begin(0)
    run_range(reporter, clock, (0, 5), seconds=1)
    reporter.on_epoch_end(0, {"loss": 0.5})
    reporter.on_train_end()
    assert directory.read_metrics() == []
    assert reporter.step == 5


def test_the_first_range_which_traces_does_not_count(directory: RunDirectory) -> None:
    clock = Clock()
    reporter = reporter_of(directory, clock)
    reporter.on_epoch_begin(0)
    run_range(reporter, clock, (0, 1), seconds=20)
    assert reporter.examples_per_second == 0.5
    run_range(reporter, clock, (1, 10), seconds=1)
    assert reporter.examples_per_second == 90
    reporter.close()


def test_keras_takes_it_for_its_bar_and_adds_no_other(directory: RunDirectory) -> None:
    reporter = reporter_of(directory, Clock())
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    callbacks = keras.callbacks.CallbackList([reporter], add_progbar=True, model=model, verbose=1)
    bars = [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]
    assert bars == [reporter]
