"""Metrics in a step of the user's own: results under any key, and numbers that count once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.multiprocess.programs import figures
from tests.refusals import refusal
from tfdist.ps.engine import Work

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_are_equal_on_any_number_of_replicas(strategies, replicas):
    figures.require_equal(figures.by_tfdist(strategies[replicas]), figures.by_keras())


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


# Results in the shape that they have.


ROWS = np.arange(24, dtype="float32").reshape(8, 3)


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
        loop = tfdist.StepLoop(step, ROWS, global_batch_size=4, seed=1, metrics=metrics)
    logs = loop.run(2)
    assert logs["each"].shape == (3,)
    found = loop.results()
    np.testing.assert_array_equal(found.pop("columns"), ROWS.sum(0))
    np.testing.assert_array_equal(found.pop("others"), ROWS.sum(0)[1:])
    assert found == {"first": float(ROWS.sum(0)[0]), "sum": float(ROWS.sum())}
    assert not loop.results()["columns"].any()


def test_ps_step_results_of_unknown_shape_are_refused():
    work = object.__new__(Work)
    work._log_shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def step(losses):
        return work._logs({"losses": losses})

    error = refusal(step.get_concrete_function)
    assert (error.where, error.code) == ("step", "unknown-shape")
