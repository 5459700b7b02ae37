"""Metrics of a ps job: those that add up are taken, others are refused before the first step."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusal, refused
from tfdist.ps.engine import require_sums, require_zeros
from tfdist.training import keras_compat


def program(*metrics):
    return types.SimpleNamespace(
        keras_metrics=metrics, metrics=[v for metric in metrics for v in metric.variables]
    )


def compiled(*metrics):
    """The metrics of a compiled model, as Keras lists them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=list(metrics))
    model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    return program(*model.metrics)


class Percent(keras.metrics.MeanAbsoluteError):
    """One of Keras', shown in another way."""

    def result(self):
        return 100.0 * super().result()


class Own(keras.metrics.Metric):
    """A metric with an update of its own, about which nothing is said."""

    def __init__(self, aggregation="sum"):
        super().__init__(name="own")
        self.total = self.add_variable((), "zeros", aggregation=aggregation, name="total")

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self):
        return self.total


class Sums(Own):
    """One that says that it adds up."""

    adds_up = True


class Most(Own):
    """The greatest value."""

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.total.assign(tf.maximum(self.total, tf.reduce_max(y_true)))


class Running(keras.metrics.Mean):
    """A running mean."""

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.total.assign(0.9 * self.total + 0.1 * tf.reduce_mean(y_true))


class Nested(keras.metrics.Metric):
    """A metric that is made of another one."""

    adds_up = True

    def __init__(self, inner):
        super().__init__(name="nested")
        self.inner = inner

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.inner.update_state(y_true)

    def result(self):
        return self.inner.result()


@pytest.mark.parametrize(
    "metrics", [("mae", keras.metrics.AUC()), (Percent(),), (Sums(),), (Nested(Sums()),)]
)
def test_metrics_of_keras_and_those_that_say_that_they_add_up_are_taken(metrics):
    require_sums(compiled(*metrics))


def test_trackers_of_a_step_of_the_users_own_are_taken():
    keras_compat.install()  # which replaces a method of one of them
    require_sums(program(keras.metrics.Mean(), keras.metrics.Sum()))


@pytest.mark.parametrize("wrong", [Own, Running, lambda: Nested(Most())])
def test_a_metric_with_an_update_of_its_own_that_says_nothing_is_refused(wrong):
    assert refused(lambda: require_sums(compiled("mae", wrong()))) == ("metrics", "metric-adds-up")


def test_a_variable_that_is_not_summed_is_refused_whatever_its_metric_says():
    caught = refusal(lambda: require_sums(program(Sums(aggregation="mean"))))
    assert caught.code == "metric-aggregation"


def test_a_metric_that_does_not_begin_at_0_is_refused():
    metric = Sums()
    require_zeros(program(metric))
    metric.total.assign(3.0)
    assert refusal(lambda: require_zeros(program(metric))).code == "metric-zero"


def in_a_step(update):
    """What a metric holds after an update in a step, as on a ps worker."""
    metric = Sums()

    def step():
        local = {id(metric.total): tf.zeros([])}
        trace = keras_compat.StepTrace(
            num_replicas=1, share=1.0, examples=1, random_key=tf.zeros([2], tf.int32), local=local
        )
        with keras_compat.tracing(trace):
            update(metric)
        return local[id(metric.total)]

    assert float(metric.total.numpy()) == 0.0
    return float(tf.function(step, autograph=False)())


def in_a_condition(metric):
    tf.cond(tf.timestamp() > 0, lambda: metric.update_state([2.0]), lambda: None)


def in_a_loop(metric):
    tf.while_loop(lambda i: i < 2, lambda i: (i + 1, metric.update_state([2.0]))[:1], [0])


def in_a_function(metric):
    tf.function(lambda: metric.update_state([2.0]), autograph=False)()


def test_a_metric_is_updated_in_the_step_and_its_variable_is_left_alone():
    assert in_a_step(lambda metric: metric.update_state([2.0])) == 2.0


@pytest.mark.parametrize("update", [in_a_condition, in_a_loop, in_a_function])
def test_a_metric_that_is_updated_in_a_graph_within_the_step_is_refused(update):
    assert refused(lambda: in_a_step(update)) == ("metrics", "metric-in-step")
