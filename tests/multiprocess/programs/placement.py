"""A ps job that trains one model; the chief writes where its variables are and what they hold."""

from __future__ import annotations

import json
import logging
import pathlib
import sys

import keras
import numpy as np

import tfdist

logging.basicConfig(level=logging.INFO)
strategy = tfdist.make_strategy()

from tfdist.strategy.servers import server_of  # noqa: E402

OUT = pathlib.Path(sys.argv[1])
RNG = np.random.RandomState(0)
X = RNG.randn(120, 16).astype("float32")
Y = np.tanh(X @ RNG.randn(16, 4)).astype("float32")


def network():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(4),
        ]
    )


def placement():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    history = tfdist.fit(model, X, Y, batch_size=8, epochs=3, seed=3, verbose=0)
    listed = [*model.weights, *model.optimizer.variables]
    return {
        "losses": history.history["loss"],
        "iterations": int(model.optimizer.iterations.numpy()),
        "servers": {v.path: server_of(v.value) for v in listed},
        "sizes": {v.path: int(np.prod(v.shape)) * 4 for v in listed},
    }


def waste():
    """A model of fewer variables than there are parameter servers."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4, use_bias=False)])
        model.compile("sgd", "mse")
    history = tfdist.fit(model, X, Y, batch_size=8, seed=3, verbose=0)
    return {"losses": history.history["loss"]}


PARTS = {part.__name__: part for part in (placement, waste)}
seen = {name: PARTS[name]() for name in sys.argv[2:]}
(OUT / "seen.json").write_text(json.dumps(seen))
