"""Sharded optimizer state in one process: where it has no effect, and what is refused."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.multiprocess.programs import zoo
from tests.refusals import refusal
from tfdist.strategy.parts import VariablePart
from tfdist.training import building
from tfdist.training.keras_compat import reduction

optimizers = keras.optimizers


def job_of(kind, *, ring=None, num_replicas=2):
    return types.SimpleNamespace(kind=kind, ring=ring, num_replicas=num_replicas)


def refusal_of(*, job, optimizer="adam", callbacks=None, dtype=None):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])
    model.compile(optimizer, "mse")
    raised = refusal(
        lambda: building.shards(
            model.optimizer, model.trainable_variables, job, callbacks=callbacks
        )
    )
    assert raised.code == "not-sharded"
    return str(raised.received)


def test_one_worker_has_nothing_to_divide():
    weights = []
    for sharded in (False, True):
        model = zoo.dense("adam")
        tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, seed=3, verbose=0, sharded_optimizer=sharded)
        weights.append(zoo.flat(model))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kind", ["mirrored", "ps", "pipeline", "multiworker"])
def test_a_job_without_a_ring_is_refused(kind):
    replicas = 1 if kind in ("ps", "pipeline") else 2
    assert f"strategy {kind}" in refusal_of(job=job_of(kind, num_replicas=replicas))


@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Muon"])
def test_an_optimizer_that_needs_whole_variables_is_refused(name):
    job = job_of("multiworker", ring=object())
    assert name in refusal_of(job=job, optimizer=getattr(optimizers, name)())
    inside = optimizers.LossScaleOptimizer(getattr(optimizers, name)())
    assert name in refusal_of(job=job, optimizer=inside)


def test_an_optimizer_of_the_users_own_is_refused():
    class Own(optimizers.SGD):
        pass

    assert "Own" in refusal_of(job=job_of("multiworker", ring=object()), optimizer=Own())


def test_callbacks_and_types_that_need_the_state_whole_are_refused():
    job = job_of("multiworker", ring=object())
    swap = keras.callbacks.SwapEMAWeights()
    assert refusal_of(job=job, callbacks=[swap]) == "SwapEMAWeights"
    assert "of bfloat16" in refusal_of(job=job, dtype="bfloat16")


@pytest.mark.parametrize("shape", [(7, 3), (5,), (4, 2, 3)])
@pytest.mark.parametrize("workers", [2, 3, 30])
def test_parts_of_a_gradient_by_rows_are_those_of_the_dense_one(shape, workers):
    rows = tf.constant([3, 0, 2])
    values = tf.constant(np.random.default_rng(3).normal(size=(3, *shape[1:])), tf.float32)
    slices = tf.IndexedSlices(values, rows, tf.constant(shape))
    dense = tf.convert_to_tensor(slices).numpy().reshape(-1)
    for rank in range(workers):
        first, end = (dense.size * chunk // workers for chunk in (rank, rank + 1))
        part = VariablePart(shape=shape, first=first, end=end)
        mine = tf.convert_to_tensor(reduction._own_elements(slices, part))
        np.testing.assert_array_equal(mine, dense[first:end])
