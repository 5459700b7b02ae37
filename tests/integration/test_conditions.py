"""Metrics that live in the step, as under ps, and are updated within conditions and loops."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training import keras_compat

VALUES = np.array([3.0, -1.0, 7.0, 0.5, -4.0, 9.0], "float32")


class Counted(keras.metrics.Metric):
    """Counts what is above 0, and adds up what is above 5, by an update that the test gives."""

    def __init__(self, update):
        super().__init__(name="counted")
        self.above = self.add_weight(name="above", dtype="int64", initializer="zeros")
        self.far = self.add_weight(name="far", shape=(2,), initializer="zeros")
        self.update = update

    def update_state(self, x):
        self.update(self, x)

    def result(self):
        return [self.above.numpy(), *self.far.numpy()]


def count(metric):
    metric.above.assign_add(1)


def add(metric, x):
    metric.far.assign(metric.far + tf.stack([x, 1.0]))


def nothing():
    return None


def nested(metric, x):
    def above():
        count(metric)
        tf.cond(x > 5.0, lambda: add(metric, x), nothing)

    tf.cond(x > 0.0, above, nothing)


def one_after_the_other(metric, x):
    tf.cond(x > 0.0, lambda: count(metric), nothing)
    keras.ops.cond(x <= 5.0, nothing, lambda: add(metric, x))


def with_results(metric, x):
    is_above = tf.cond(
        x > 0.0, lambda: metric.above.assign_add(1) > 0, lambda: metric.above.value < 0
    )
    tf.cond(is_above & (x > 5.0), lambda: add(metric, x), nothing)


def by_case(metric, x):
    def far():
        count(metric)
        add(metric, x)

    tf.case([(x > 5.0, far), (x > 0.0, lambda: count(metric))], default=nothing)


def beside_other_conditions(metric, x):
    """Of which some are in a function and in a loop, and none has to do with metrics."""

    @tf.function(autograph=False)
    def same(x):
        return tf.cond(x > 0.0, lambda: x + 0.0, lambda: x * 1.0)

    def body(i, x):
        return i + 1, tf.cond(x > 0.0, lambda: x - 0.0, lambda: x / 1.0)

    tf.debugging.assert_less(x, 100.0)
    nested(metric, tf.while_loop(lambda i, _: i < 2, body, [0, same(x)])[1])


def in_a_step(metric):
    """The totals of a metric after the values, one a turn of a loop as on a ps worker."""

    def body(i, *totals):
        local = dict(zip(map(id, metric.variables), totals, strict=True))
        key = tf.zeros([2], tf.int32)
        trace = keras_compat.StepTrace(
            num_replicas=1, share=1.0, examples=1, random_key=key, local=local
        )
        with keras_compat.tracing(trace):
            metric.update_state(tf.constant(VALUES)[i])
        return i + 1, *(local[id(v)] for v in metric.variables)

    def run():
        zeros = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
        return tf.while_loop(lambda i, *_: i < len(VALUES), body, [0, *zeros])[1:]

    above, far = tf.function(run, autograph=False)()
    return [above.numpy(), *far.numpy()]


UPDATES = [nested, one_after_the_other, with_results, by_case, beside_other_conditions]


@pytest.mark.parametrize("update", UPDATES)
def test_a_metric_is_updated_within_conditions_as_by_keras(update):
    metric = Counted(update)
    for value in VALUES:
        metric.update_state(tf.constant(value))
    assert metric.result() == [4, 16.0, 2.0]
    metric.reset_state()
    assert in_a_step(metric) == [4, 16.0, 2.0]
    assert metric.result() == [0, 0.0, 0.0]  # its variables are not touched


def in_a_loop(metric, x):
    def body(i):
        count(metric)
        return i + 1

    tf.while_loop(lambda i: i < 2, body, [0])


def in_a_function(metric, x):
    tf.function(lambda: count(metric), autograph=False)()


@pytest.mark.parametrize("update", [in_a_loop, in_a_function])
def test_a_metric_that_is_updated_in_a_loop_or_function_is_refused_in_one_line(update):
    with pytest.raises(UsageError, match="metrics: received counted/above, updated in a"):
        in_a_step(Counted(update))
