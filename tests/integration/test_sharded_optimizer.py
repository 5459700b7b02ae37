"""Sharded optimizer state in one process: where it has no effect, and what is refused."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.multiprocess.programs import zoo
from tests.refusals import refusal
from tfdist.cluster import KINDS
from tfdist.strategy.group import VariablePart
from tfdist.training import building
from tfdist.training.keras_compat import reduction

optimizers = keras.optimizers


class Own(optimizers.SGD):
    """One of the user's own."""


def of_kind(kind, *, ring=None, num_replicas=2):
    return types.SimpleNamespace(kind=KINDS[kind], ring=ring, num_replicas=num_replicas)


RING = of_kind("multiworker", ring=object())
SWAP = keras.callbacks.SwapEMAWeights()
OF_WHOLE_VARIABLES = {name: getattr(optimizers, name) for name in ("Adafactor", "Lamb", "Muon")}


def scaled(kind):
    return lambda: optimizers.LossScaleOptimizer(kind())


def test_sharding_does_not_change_a_single_worker():
    weights = []
    for sharded in (False, True):
        model = zoo.dense("adam")
        tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, seed=3, verbose=0, sharded_optimizer=sharded)
        weights.append(zoo.flat(model))
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("job", "optimizer", "others", "named"),
    [
        (of_kind("mirrored"), optimizers.Adam, {}, "strategy mirrored"),
        (of_kind("multiworker"), optimizers.Adam, {}, "strategy multiworker"),
        (of_kind("ps", num_replicas=1), optimizers.Adam, {}, "strategy ps"),
        (of_kind("pipeline", num_replicas=1), optimizers.Adam, {}, "strategy pipeline"),
        *((RING, kind, {}, name) for name, kind in OF_WHOLE_VARIABLES.items()),
        *((RING, scaled(kind), {}, name) for name, kind in OF_WHOLE_VARIABLES.items()),
        (RING, Own, {}, "Own"),
        (RING, optimizers.Adam, {"callbacks": [SWAP]}, "SwapEMAWeights"),
        (RING, optimizers.Adam, {"dtype": "bfloat16"}, "has dtype bfloat16"),
    ],
)
def test_settings_that_prevent_sharding_are_refused(job, optimizer, others, named):
    dense = keras.layers.Dense(2, dtype=others.get("dtype"))
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(optimizer(), "mse")
    variables, callbacks = model.trainable_variables, others.get("callbacks")
    told = refusal(lambda: building.shards(model.optimizer, variables, job, callbacks=callbacks))
    assert told.code == "unsupported"
    assert named in told.problem


@pytest.mark.parametrize("shape", [(7, 3), (5,), (4, 2, 3)])
@pytest.mark.parametrize("workers", [2, 3, 30])
def test_shards_of_a_sparse_gradient_equal_the_dense_one(shape, workers):
    rows = tf.constant([3, 0, 2])
    values = tf.constant(np.random.default_rng(3).normal(size=(3, *shape[1:])), tf.float32)
    slices = tf.IndexedSlices(values, rows, tf.constant(shape))
    dense = tf.convert_to_tensor(slices).numpy().reshape(-1)
    for rank in range(workers):
        first, end = (dense.size * chunk // workers for chunk in (rank, rank + 1))
        part = VariablePart(shape=shape, first=first, end=end)
        mine = tf.convert_to_tensor(reduction._own_elements(slices, part))
        np.testing.assert_array_equal(mine, dense[first:end])
