"""What a step of the user's own gives, in the shape that it has; what its optimizers count."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.ps.closure import UnitGraph, Work, encode_result

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
def test_metrics_of_any_shape_are_results(strategies, replicas):
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


@pytest.mark.parametrize("options", [{"max_staleness": -1}, {"max_staleness": 0.5}])
def test_what_could_only_wait_for_ever_is_refused(strategies, options):
    """No work unit of a ps job ever meets such a bound."""
    with strategies[1].scope(), pytest.raises(tfdist.UsageError, match="max_staleness: received"):
        tfdist.StepLoop(lambda x: {"loss": x}, X, global_batch_size=4, **options)


def test_steps_that_cannot_be_are_refused(strategies):
    def loop(**options):
        return tfdist.StepLoop(lambda x: {"sum": tf.reduce_sum(x)}, X, **options)

    with strategies[1].scope():
        for steps in (0, 2.5, "a", True):
            with pytest.raises(tfdist.UsageError, match="steps: received"):
                loop().run(steps)
        with pytest.raises(tfdist.UsageError, match="first_step: received -1"):
            loop(first_step=-1)


def ready(*, log_shapes=(), counted=(), num_totals=0):
    """A program that is ready to be handed out."""
    return Work(
        closure=None,
        dataset=None,
        log_shapes=dict(log_shapes),
        counted=list(counted),
        counts_each=np.ones(len(counted), np.int64),
        num_totals=num_totals,
        training=True,
    )


def test_what_a_step_returns_comes_from_a_ps_worker_in_its_shape():
    """Among totals and stalenesses, as one vector."""
    graph = object.__new__(UnitGraph)
    graph.log_shapes = {}
    returned = {"table": tf.ones([2, 2]), "each": tf.constant([5, 6, 7]), "loss": tf.constant(0.5)}
    numbers = encode_result([tf.constant([8.0, 9.0])], graph._logs(returned), tf.constant([3, 0]))
    work = ready(log_shapes=graph.log_shapes, num_totals=2)
    assert work.take(numbers.numpy()).tolist() == [3, 0]
    assert work.totals.tolist() == [8.0, 9.0]
    assert {name: np.asarray(log).tolist() for name, log in work.logs.items()} == {
        "table": [[1.0, 1.0], [1.0, 1.0]],
        "each": [5.0, 6.0, 7.0],
        "loss": 0.5,
    }
    assert work.logs["each"].dtype == np.float32


def test_what_a_step_returns_of_a_shape_that_is_not_known_is_refused_under_ps():
    graph = object.__new__(UnitGraph)
    graph.log_shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def step(losses):
        return graph._logs({"losses": losses})

    with pytest.raises(tfdist.UsageError, match=r"step: received 'losses' of shape \(None,\)"):
        step.get_concrete_function()


def test_counts_go_on_by_the_step_until_somebody_changes_them():
    count = tf.Variable(5, dtype=tf.int64)
    work = ready(counted=[count])
    work.count_from(2)
    assert work.counts_of_step_0.tolist() == [3]
    count.assign(9)  # three steps, one of which was done twice, as a worker died
    work.rests()
    work.count_from(5)
    assert work.counts_of_step_0.tolist() == [3]
    count.assign(0)
    work.count_from(5)
    assert work.counts_of_step_0.tolist() == [-5]
