"""Metrics in a step of the user's own: results under any key, and numbers that count once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import models
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
    "parts": ["part 0", "part 1", "part 2"],
    "a dict": ["mean of two", "count of two"],
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("row", KEYS)
def test_a_metric_is_equal_on_any_number_of_replicas(strategies, row, replicas):
    ours = found(replicas, strategies[replicas])
    for key in KEYS[row]:
        equal(ours, expected(), key)


@pytest.mark.parametrize("key", figures.MIXED)
def test_a_log_mixing_a_metric_is_refused_by_key(strategies, key):
    with strategies[2].scope():
        model = figures.figures(mixed=key)
    for action in (tfdist.fit, tfdist.evaluate):
        error = refusal(lambda act=action: act(model, figures.X, figures.Y, verbose=0))
        assert (error.where, error.code) == ("step", "metric-in-log")
        assert f"the log {key!r} " in error.problem


def test_a_step_loop_returns_results_of_all_its_steps(strategies):
    def run(strategy):
        with strategy.scope():
            loss, steps = keras.metrics.Mean(), figures.Steps()

        def step(x):
            loss.update_state(tf.reduce_mean(x))
            steps.update_state()
            return {"g_loss": loss.result(), "twice": 2 * steps.result(), "last": tf.reduce_mean(x)}

        with strategy.scope():
            loop = tfdist.StepLoop(
                step, figures.X, global_batch_size=15, seed=1, metrics=[loss, steps]
            )
        return [loop.run(3), loop.run(2), [*loop.results().values()], loop.run(1)]

    one, two = run(strategies[1]), run(strategies[2])
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert [two[i]["twice"] for i in (0, 1, 3)] == [6, 10, 2]


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


class Updating(models.OwnStep, keras.Sequential):
    """Updates a metric of its own, as a test says."""

    def compile(self, update):
        super().compile("sgd", "mse")
        self.own, self.update_of = figures.Own(), update

    def logs_of(self, loss, data):
        self.update_of(self.own, data[0])
        return {"own": self.own.result()}


def in_a_condition(metric, x):
    tf.cond(x[0, 0] > 0, lambda: (metric.update_state(1), 0)[1], lambda: 0)


@pytest.mark.parametrize(
    ("update", "line"),
    [
        (lambda metric, x: metric.update_state(x.shape[0]), "a metric gets the number 8, which"),
        (in_a_condition, "metric 'own': an update in a loop or condition"),
    ],
    ids=["examples by Python", "in a condition"],
)
def test_an_update_with_another_count_warns(strategies, warnings, update, line):
    with strategies[2].scope():
        model = Updating([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(update)
    tfdist.fit(model, figures.X[:48], figures.Y[:48], batch_size=16, verbose=0)
    (found,) = warnings()
    assert found.startswith(line)
