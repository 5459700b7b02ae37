"""The loop between ranges: what is under way when somebody looks, and what is told then."""

from __future__ import annotations

import signal
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.checkpoint.preemption import SIGNALS, StopRequested
from tfdist.training import loop as loop_module
from tfdist.training.engines.synchronous import SynchronousEngine
from tfdist.training.loop import Loop
from tfdist.training.session import Session as RealSession


class Engine:
    """Leaves the last step of a range under way wherever it may; tells how many steps are done."""

    def __init__(self):
        self.ranges = []
        self.steps_under_way = 0

    def run(self, program, first, last, *, goes_on=False):
        self.ranges.append((first, last, goes_on))
        self.steps_under_way = self.left(first, last) if goes_on else 0
        return {"done": last - self.steps_under_way}

    def left(self, first, last):
        return 1

    def finish(self, program):
        self.steps_under_way = 0
        return {"done": self.ranges[-1][1]}


class Session(types.SimpleNamespace):
    job = types.SimpleNamespace(is_chief=True)
    learning_rate = float("nan")

    def has_run(self, program):
        return True

    def run(self, *args, **kwargs):
        return self.engine.run(*args, **kwargs)

    def finish(self, program):
        return self.engine.finish(program)

    def metrics(self, program, logs):
        return logs


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
        types.SimpleNamespace(steps=lambda epoch: range(40 * epoch, 40 * epoch + 40)),
        callbacks=nothing,
        backups=[],
        requests=types.SimpleNamespace(slots=lambda: asked),
        save=lambda backup, step: None,
        every=[16],
        with_logs=True,
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
        with pytest.raises(StopRequested):
            loop.run_epoch(0)
    else:
        loop.run_epoch(0)
    assert session.engine.ranges[-1][2]  # one was left under way
    assert 0 < loop.step < 40
    assert session.engine.steps_under_way == 0
    assert loop.step_logs == {"done": loop.step}  # and not of what was done before it


def test_logs_are_empty_while_no_step_of_the_epoch_is_done(made):
    """They would be those of the epoch before, and its metrics are 0 by now."""
    loop, session, _ = made
    loop.run_epoch(0)
    loop._every, told = [], []
    loop._callbacks.on_train_batch_end = lambda batch, logs: told.append((batch + 1, logs))
    session.engine.left = lambda first, last: last - 40  # a piece of the first steps takes long
    loop.run_epoch(1)
    assert len(told) > 1
    assert all(logs == {} for _, logs in told[:-1])
    assert told[-1] == (40, {"done": 80})


def test_a_wrong_label_in_a_step_that_was_under_way_is_told_in_one_line():
    def finish(program):
        said = "Received a label value of 7 which is outside the valid range of [0, 3).  Label"
        raise tf.errors.InvalidArgumentError(None, None, said)

    session = object.__new__(RealSession)
    session.engine = types.SimpleNamespace(finish=finish)
    with pytest.raises(tfdist.UsageError, match="labels: received a label of 7"):
        session.finish(None)


def test_what_is_under_way_is_let_go_when_a_callback_raises(monkeypatch):
    release = []
    monkeypatch.setattr(SynchronousEngine, "close", lambda engine: release.append(engine))

    def fail(epoch, logs):
        raise LookupError("mine")

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((8, 2), "float32")
    callback = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(LookupError, match="mine"):
        tfdist.fit(model, x, x[:, :1], verbose=0, callbacks=[callback])
    assert release
