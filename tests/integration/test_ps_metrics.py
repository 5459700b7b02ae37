"""Metrics of a ps job: those that add up are taken, others are refused before the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refused
from tfdist.training import keras_compat
from tfdist.training.keras_compat.metrics import require_sums


def compiled(*metrics):
    """The metrics of a compiled model, as Keras lists them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=list(metrics))
    model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    return model.metrics


class Percent(keras.metrics.MeanAbsoluteError):
    """One of Keras', shown in another way."""

    def result(self):
        return 100.0 * super().result()


class Own(keras.metrics.Metric):
    """A metric with an update of its own, about which nothing is said."""

    def __init__(self, aggregation="sum"):
        super().__init__(name=type(self).__name__.lower())
        self.total = self.add_variable((), "zeros", aggregation=aggregation, name="total")

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self):
        return self.total


class Sums(Own):
    """One that says that it adds up."""

    adds_up = True


class Nested(Sums):
    """A metric that is made of another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize(
    "make",
    [
        lambda: compiled("mae", keras.metrics.AUC()),
        lambda: compiled(Percent(), Sums(), Nested(Sums())),
        lambda: [keras.metrics.Mean(), keras.metrics.Sum()],
    ],
    ids=["of Keras", "that say so", "trackers of a step of the user's own"],
)
def test_metrics_that_add_up_are_accepted(make):
    keras_compat.install()  # which replaces a method of one of them
    require_sums(make())


@pytest.mark.parametrize(
    ("metric", "code"),
    [
        (Own, "metric"),
        (lambda: Nested(Own()), "metric"),
        (lambda: Sums(aggregation="mean"), "metric"),
    ],
)
def test_a_metric_that_may_not_add_up_is_refused(metric, code):
    assert refused(lambda: require_sums(compiled("mae", metric()))) == (
        "metrics",
        code,
    )


def in_a_step(update):
    """What a metric holds after an update in a step, as on a ps worker."""
    metric = Sums()

    def step():
        local = {id(metric.total): tf.zeros([])}
        with keras_compat.tracing(keras_compat.bare_trace(1, local=local)):
            update(lambda: metric.update_state([2.0]))
        return local[id(metric.total)]

    found = float(tf.function(step, autograph=False)())
    assert float(metric.total.numpy()) == 0.0
    return found


def test_metric_updates_in_a_step_leave_the_variable_unchanged():
    assert in_a_step(lambda update: update()) == 2.0


@pytest.mark.parametrize(
    "within",
    [
        lambda update: tf.cond(tf.timestamp() > 0, update, lambda: None),
        lambda update: tf.while_loop(lambda i: i < 2, lambda i: (i + 1, update())[:1], [0]),
        lambda update: tf.function(update, autograph=False)(),
    ],
    ids=["condition", "loop", "function"],
)
def test_a_metric_update_in_an_inner_graph_is_refused(within):
    assert refused(lambda: in_a_step(within)) == ("metrics", "metric")
