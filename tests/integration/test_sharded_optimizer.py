"""Sharded optimizer state in one process: where it has no effect, and what is refused."""

import types

import keras
import pytest

import tfdist
from tests.multiprocess.programs import zoo
from tests.refusals import refusal
from tfdist.cluster import KINDS
from tfdist.training import building

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
