"""Metrics in a step of the user's own: results under any key, and numbers that count once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.multiprocess.programs import figures
from tests.refusals import refusal

pytestmark = pytest.mark.slow

expected = functools.cache(figures.by_keras)


@functools.cache
def found(replicas, strategy):
    return figures.by_tfdist(strategy)


def equal(one, other, key):
    for where, wanted in other.items():
        keys = [key, f"val_{key}"]
        for seen, value in [(one[where][k], wanted[k]) for k in keys]:
            np.testing.assert_allclose(seen, value, rtol=1e-4, err_msg=where)
        evaluated = one[where]["evaluated"][key], wanted["evaluated"][key]
        np.testing.assert_allclose(*evaluated, rtol=1e-4, err_msg=f"{where}, evaluate")


KEYS = {key: [key] for key in [*figures.LOGGED, *figures.FED]} | {
    "a dict": ["mean of two", "count of two"],
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("row", KEYS)
def test_a_metric_is_equal_on_any_number_of_replicas(strategies, row, replicas):
    ours = found(replicas, strategies[replicas])
    for key in KEYS[row]:
        equal(ours, expected(), key)


@pytest.mark.parametrize("key", figures.MIXED)
def test_a_log_computed_from_a_metric_is_refused(strategies, key):
    with strategies[2].scope():
        model = figures.figures(mixed=key)
    for action in (tfdist.fit, tfdist.evaluate):
        error = refusal(lambda act=action: act(model, figures.X, figures.Y, verbose=0))
        assert (error.where, error.code) == ("step", "metric")
        assert key.startswith("in a ") or f"the log {key!r} " in error.problem


def test_a_step_loop_returns_results_of_all_its_steps(strategies):
    def run(strategy):
        with strategy.scope():
            loss, steps = keras.metrics.Mean(), keras.metrics.Sum()

        def step(x):
            loss.update_state(tf.reduce_mean(x))
            steps.update_state(1)
            return {"g_loss": loss.result(), "steps": steps.result(), "last": tf.reduce_mean(x)}

        with strategy.scope():
            loop = tfdist.StepLoop(
                step, figures.X, global_batch_size=15, seed=1, metrics=[loss, steps]
            )
        return [loop.run(3), loop.run(2), [*loop.results().values()], loop.run(1)]

    one, two = run(strategies[1]), run(strategies[2])
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert [two[i]["steps"] for i in (0, 1, 3)] == [3, 5, 1]


def test_a_metric_updating_function_may_return_a_loss(strategies):
    with strategies[2].scope():
        auc = keras.metrics.AUC()

        @tf.function
        def judged(x):
            auc.update_state(tf.cast(x > 0, tf.float32), tf.sigmoid(x))
            return tf.reduce_mean(x)

        loop = tfdist.StepLoop(
            lambda x: {"loss": judged(x), "auc": auc.result()},
            figures.X[:48],
            global_batch_size=48,
            metrics=[auc],
        )
    logs = loop.run(1)
    assert logs["loss"] == pytest.approx(figures.X[:48].mean(), abs=1e-6)
    assert logs["auc"] == pytest.approx(1, abs=1e-3)


class Counting(keras.metrics.Metric):
    """Counts numbers, or calls."""

    def update_state(self, number=1):
        self.total.assign_add(tf.cast(number, tf.float32))

    def build(self):
        self.total = self.add_weight(initializer="zeros")

    def result(self):
        return self.total


def counted(strategy, kind, *numbers):
    with strategy.scope():
        metric = kind()
        if kind is Counting:
            metric.build()

    def step(x):
        metric.update_state(*(number(x) for number in numbers))
        return {"found": metric.result()}

    with strategy.scope():
        loop = tfdist.StepLoop(step, figures.X[:48], global_batch_size=16, metrics=[metric])
    return loop.run(3)["found"]


@pytest.mark.parametrize("numbers", [(), (tf.reduce_mean,)], ids=["calls", "numbers"])
def test_numbers_for_an_own_metric_are_refused_on_several_replicas(strategies, numbers):
    counted(strategies[1], Counting, *numbers)
    error = refusal(lambda: counted(strategies[2], Counting, *numbers))
    assert (error.where, error.code) == ("metrics", "metric")


def test_a_sum_rejects_numbers_that_may_be_means(strategies):
    error = refusal(lambda: counted(strategies[2], keras.metrics.Sum, tf.reduce_mean))
    assert (error.where, error.code) == ("metrics", "metric")
    sizes = (lambda x: tf.shape(x)[0], lambda x: tf.cast(tf.shape(x)[0], tf.float32))
    for number in (*sizes, lambda x: tf.constant(16.0)):
        assert counted(strategies[2], keras.metrics.Sum, number) == 48


def test_a_sum_in_a_mean_warns(strategies, warnings):
    counted(strategies[2], keras.metrics.Mean, tf.reduce_sum)
    (found,) = warnings()
    assert found.startswith("the metric 'mean' gets a sum, and counts it as a mean")


def test_a_number_that_equals_the_size_of_a_part_warns(strategies, warnings):
    for number in (lambda x: x.shape[0], lambda x: tf.size(x[:, 0])):
        assert counted(strategies[2], keras.metrics.Sum, number) == 48
    (found,) = warnings()
    assert found.startswith("a metric gets the number 8, which")
