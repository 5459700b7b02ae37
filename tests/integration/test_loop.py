"""The loop between blocks: what is under way when somebody looks, and what is told then.

`fit` runs on an engine of the test, which computes nothing.
"""

import signal
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import Cut
from tests.refusals import refusal, refused
from tfdist.ps.engine import Work
from tfdist.training import blocks, fitting
from tfdist.training.engines import SynchronousEngine
from tfdist.training.program import Engine
from tfdist.training.stop_requests import SIGNALS, StopRequests


class Leaving(Engine):
    """Leaves the last step of a block under way wherever it may; tells how many steps are done."""

    steps_under_way = 0

    def __init__(self):
        self.blocks = []

    def run(self, program, first, last, *, goes_on=False):
        self.blocks.append((first, last, goes_on))
        self.steps_under_way = self.left(first, last) if goes_on else 0
        return {"done": last - self.steps_under_way}

    def left(self, first, last):
        return 1

    def finish(self, program):
        self.steps_under_way = 0
        return {"done": self.blocks[-1][1]}


class Looking(keras.callbacks.Callback):
    """Looks at each sixteenth step of the first epoch, and notes what the others are told."""

    once_a_range = True

    def __init__(self, engine, *, act=lambda self: None):
        super().__init__()
        self.engine, self.act, self.told = engine, act, []

    def next_step(self, step):
        return (step // 16 + 1) * 16 if step < 40 else None

    def on_train_batch_end(self, batch, logs=None):
        self.told.append((batch + 1, logs))
        self.act(self)


@pytest.fixture
def engine(monkeypatch):
    """An engine whose calls take 0.3 s each."""
    engine, seconds = Leaving(), iter(np.arange(0, 1e6, 0.3))
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(blocks, "time", clock)
    monkeypatch.setattr(fitting, "engine_class", lambda job: lambda job: engine)
    return engine


def made():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(*callbacks, model=None, epochs=1):
    """Trains for 40 steps an epoch, with somebody who looks at the logs of a block."""
    x = np.zeros((40, 2), "float32")
    callbacks = [*callbacks, keras.callbacks.TerminateOnNaN()]
    options = {"batch_size": 1, "epochs": epochs, "verbose": 0, "callbacks": callbacks}
    return tfdist.fit(model or made(), x, x[:, :1], **options).history


def test_a_block_continues_unless_a_callback_needs_its_end(engine):
    fit(Looking(engine))
    found = {last: goes_on for _, last, goes_on in engine.blocks}
    assert any(found.values())
    assert not any(found[step] for step in (16, 32, 40))


@pytest.mark.parametrize("how", ["signal", "callback"])
def test_no_step_is_pending_when_a_training_is_stopped(engine, monkeypatch, how):
    asked = [0.0] * len(SIGNALS)
    monkeypatch.setattr(StopRequests, "slots", lambda requests: asked)

    def stop(callback):
        if engine.steps_under_way and how == "signal":
            asked[SIGNALS.index(signal.SIGTERM)] = 1.0
        elif engine.steps_under_way:
            callback.model.stop_training = True

    if how == "signal":
        with pytest.raises(tfdist.Stopped):
            fit(Looking(engine, act=stop))
    else:
        (done,) = fit(Looking(engine, act=stop))["done"]
        assert done == engine.blocks[-1][1]  # and not of what was done before it
    assert engine.blocks[-1][2]  # one was left under way
    assert 0 < engine.blocks[-1][1] < 40
    assert engine.steps_under_way == 0


def test_logs_are_empty_before_the_first_step_ends(engine):
    """They would be those of the epoch before, and its metrics are 0 by now."""
    looking = Looking(engine)
    engine.left = lambda first, last: last - 40 if first >= 40 else 1  # its first steps take long
    fit(looking, epochs=2)
    first_epoch = [batch for batch, _ in looking.told].index(40) + 1
    told = looking.told[first_epoch:]
    assert len(told) > 1
    assert all(logs == {} for _, logs in told[:-1])
    assert told[-1] == (40, {"done": 80})


def test_a_wrong_label_in_flight_is_one_line(engine):
    def finish(program):
        said = "Received a label value of 7 which is outside the valid range of [0, 3).  Label"
        raise tf.errors.InvalidArgumentError(None, None, said)

    def stop(callback):
        callback.model.stop_training = engine.steps_under_way > 0

    engine.finish = finish
    assert refused(lambda: fit(Looking(engine, act=stop))) == ("labels", "label-range")


def cut(*_):
    raise Cut


def test_pending_steps_are_dropped_if_a_callback_raises(monkeypatch):
    release = []
    monkeypatch.setattr(SynchronousEngine, "close", lambda engine: release.append(engine))
    with pytest.raises(Cut):
        fit(keras.callbacks.LambdaCallback(on_epoch_end=cut))
    assert release


def test_state_kept_by_an_engine_is_saved_and_restored(engine, tmp_path):
    """As one would whose optimizer is in shards: the bias counts the steps, and is kept apart."""
    model, kept = made(), [0.0]
    run = engine.run

    def counting(program, first, last, *, goes_on=False):
        kept[0] += last - first
        return run(program, first, last, goes_on=goes_on)

    engine.run = counting
    engine.publish_state = lambda program: model.layers[0].bias.assign(kept)
    engine.take_state = lambda program: kept.__setitem__(0, float(model.layers[0].bias[0]))
    at_60 = Looking(engine, act=lambda callback: engine.blocks[-1][1] >= 60 and cut())
    with pytest.raises(Cut):
        fit(tfdist.BackupAndRestore(tmp_path, save_freq=30), at_60, model=model, epochs=2)
    kept[0] = 0.0
    fit(tfdist.BackupAndRestore(tmp_path, save_freq=30), model=model, epochs=2)
    assert float(model.layers[0].bias[0]) == 80.0


# What a step of the user's own gives, in the shape that it has; what its optimizers count.


X = np.arange(24, dtype="float32").reshape(8, 3)


class Columns(keras.metrics.Metric):
    """The sum of each column."""

    def __init__(self, name):
        super().__init__(name=name)
        self.sums = self.add_weight(name="sums", shape=(3,), initializer="zeros")

    def update_state(self, x):
        self.sums.assign(self.sums + tf.reduce_sum(x, 0))

    def result(self):
        return self.sums


class FirstAndLast(Columns):
    """Some of them, by names of their own."""

    def result(self):
        return {"first": self.sums[0], "others": self.sums[1:]}


@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_of_any_shape_are_returned(strategies, replicas):
    with strategies[replicas].scope():
        metrics = [Columns("columns"), FirstAndLast("some"), keras.metrics.Sum(name="sum")]

    def step(x):
        for metric in metrics:
            metric.update_state(x)
        return {"each": tf.reduce_sum(x, 0)}

    with strategies[replicas].scope():
        loop = tfdist.StepLoop(step, X, global_batch_size=4, seed=1, metrics=metrics)
    logs = loop.run(2)
    assert logs["each"].shape == (3,)
    found = loop.results()
    np.testing.assert_array_equal(found.pop("columns"), X.sum(0))
    np.testing.assert_array_equal(found.pop("others"), X.sum(0)[1:])
    assert found == {"first": float(X.sum(0)[0]), "sum": float(X.sum())}
    assert not loop.results()["columns"].any()


def ready(*, counted=(), num_totals=0):
    """A program that is ready to be dispatched."""
    work = object.__new__(Work)
    work.totals, work.logs = None, {}
    work._log_shapes, work._num_totals = {}, num_totals
    work._types, work._ends = [np.float32], [num_totals]
    work._counted, work._counts_each = list(counted), np.ones(len(counted), np.int64)
    work._counts_of_step_0 = work._counts_at_rest = None
    return work


def test_ps_step_results_keep_their_shapes():
    """Among totals and stalenesses, as one vector."""
    work = ready(num_totals=2)
    returned = {"table": tf.ones([2, 2]), "each": tf.constant([5, 6, 7]), "loss": tf.constant(0.5)}
    numbers = tf.concat([[8.0, 9.0], work._logs(returned), [3.0, 0.0]], 0)
    assert work.take(numbers.numpy(), steps=1).tolist() == [3, 0]
    assert work.totals.tolist() == [8.0, 9.0]
    assert {name: np.asarray(log).tolist() for name, log in work.logs.items()} == {
        "table": [[1.0, 1.0], [1.0, 1.0]],
        "each": [5.0, 6.0, 7.0],
        "loss": 0.5,
    }
    assert work.logs["each"].dtype == np.float32


def test_ps_step_results_of_unknown_shape_are_refused():
    work = ready()

    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def step(losses):
        return work._logs({"losses": losses})

    error = refusal(step.get_concrete_function)
    assert (error.where, error.code) == ("step", "unknown-shape")


def test_step_counts_continue_until_the_program_changes_them():
    count = tf.Variable(5, dtype=tf.int64)
    work = ready(counted=[count])
    work.count_from(2)
    assert work._counts_of_step_0.tolist() == [3]
    count.assign(9)  # three steps, one of which was done twice, as a worker died
    work.rests()
    work.count_from(5)
    assert work._counts_of_step_0.tolist() == [3]
    count.assign(0)
    work.count_from(5)
    assert work._counts_of_step_0.tolist() == [-5]
