"""The loop between ranges: what is under way when somebody looks."""

from __future__ import annotations

import signal
import types

import numpy as np
import pytest

from tfdist.checkpoint.preemption import SIGNALS, Asked
from tfdist.training import loop as loop_module
from tfdist.training.loop import Loop


class Engine:
    """Leaves the last step of a range under way wherever it may."""

    def __init__(self):
        self.ranges = []
        self.steps_under_way = 0

    def run(self, program, first, last, *, goes_on=False):
        self.ranges.append((first, last, goes_on))
        self.steps_under_way = int(goes_on)
        return {}

    def finish(self):
        self.steps_under_way = 0


class Session(types.SimpleNamespace):
    job = types.SimpleNamespace(is_chief=True)
    learning_rate = float("nan")

    def has_run(self, program):
        return True

    def run(self, *args, **kwargs):
        return self.engine.run(*args, **kwargs)


@pytest.fixture
def made(monkeypatch):
    """A loop over 40 steps of 0.3 s, of which somebody looks at each sixteenth."""
    monkeypatch.setattr(loop_module, "sum_over_tasks", lambda job, told, of: told)
    seconds = iter(np.arange(0, 1e6, 0.3))
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(loop_module, "time", clock)
    session = Session(engine=Engine(), model=types.SimpleNamespace(stop_training=False))
    nothing = types.SimpleNamespace(
        callbacks=[],
        on_train_batch_begin=lambda batch: None,
        on_train_batch_end=lambda batch, logs: None,
    )
    asked = [0.0] * len(SIGNALS)
    loop = Loop(
        session,
        object(),
        types.SimpleNamespace(steps=lambda epoch: range(40)),
        callbacks=nothing,
        backups=[],
        requests=types.SimpleNamespace(slots=lambda: asked),
        save=lambda backup, step: None,
        every=[16],
        with_logs=False,
    )
    return loop, session, asked


def test_a_range_goes_on_only_where_nobody_looks_at_its_end(made):
    loop, session, _ = made
    loop.run_epoch(0)
    found = {last: goes_on for _, last, goes_on in session.engine.ranges}
    assert any(found.values())
    assert not any(found[step] for step in (16, 32, 40))


@pytest.mark.parametrize("how", ["signal", "callback"])
def test_nothing_is_under_way_when_a_training_is_stopped(made, how):
    loop, session, asked = made

    def stop(batch, logs):
        if session.engine.steps_under_way and how == "signal":
            asked[SIGNALS.index(signal.SIGTERM)] = 1.0
        elif session.engine.steps_under_way:
            session.model.stop_training = True

    loop._callbacks.on_train_batch_end = stop
    if how == "signal":
        with pytest.raises(Asked):
            loop.run_epoch(0)
    else:
        loop.run_epoch(0)
    assert session.engine.ranges[-1][2]  # one was left under way
    assert 0 < loop.step < 40
    assert session.engine.steps_under_way == 0
