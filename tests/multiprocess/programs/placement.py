"""A ps job that trains one model; the chief writes where its variables are and what they hold."""

import json
import logging
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist

logging.basicConfig(level=logging.INFO)
strategy = tfdist.make_strategy()

from tfdist.ps.split import parts_of  # noqa: E402
from tfdist.strategy.devices import server_of  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import zoo  # noqa: E402

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


def split():
    """Models with variables in parts: each optimizer, then what is saved and resumed."""
    data = (zoo.TOKENS, zoo.CALM)
    seen = {"every optimizer": zoo.by_every_optimizer(strategy, zoo.looked_up, data, steps=12)}
    with strategy.scope():
        model = zoo.tokens(recurrent=True)
    history = tfdist.fit(model, *data, batch_size=8, epochs=3, seed=3, verbose=0)
    seen |= {"weights": zoo.flat(model), "losses": history.history["loss"]}
    listed = [*model.weights, *model.optimizer.variables]
    seen["parts"] = {v.path: [server_of(p) for p in parts_of(v.value)] for v in listed}
    with strategy.scope():
        model = zoo.two_updates()
    tfdist.fit(model, zoo.X, zoo.CALM, batch_size=8, epochs=2, seed=3, verbose=0)
    seen["two updates"] = zoo.flat(model)
    with strategy.scope():
        model = zoo.tokens()
        model.compile(keras.optimizers.Adafactor(), "mse")
        inner = keras.optimizers.Lamb()
        second = zoo.two_updates(keras.optimizers.LossScaleOptimizer(inner))
    refused = {
        "Adafactor": lambda: tfdist.fit(model, zoo.TOKENS, zoo.CALM, batch_size=8, verbose=0),
        "Lamb": lambda: tfdist.fit(second, zoo.X, zoo.CALM, batch_size=8, verbose=0),
        "checkpoint": lambda: tf.train.Checkpoint(model=model).save(OUT / "checkpoint"),
        "export": lambda: model.export(OUT / "export", verbose=False),
    }
    for name, attempt in refused.items():
        try:
            attempt()
        except tfdist.UsageError as error:
            seen[name] = str(error)
    return seen


def resume():
    """Goes on, or begins, where a job of another number of servers has saved."""
    with strategy.scope():
        model = zoo.tokens()
    backup = tfdist.BackupAndRestore(OUT.parent / "backup", save_freq=5)
    history = tfdist.fit(
        model, zoo.TOKENS, zoo.CALM, batch_size=8, epochs=int(os.environ["EPOCHS"]), seed=3,
        verbose=0, callbacks=[backup],
    )  # fmt: skip
    model.save(OUT / "model.keras")
    return {
        "weights": zoo.flat(model),
        "losses": history.history["loss"],
        "predicted": tfdist.predict(model, zoo.TOKENS, batch_size=8, verbose=0).tolist(),
        "evaluated": tfdist.evaluate(model, zoo.TOKENS, zoo.CALM, batch_size=8, verbose=0),
        "parts": max(len(parts_of(v.value)) for v in model.weights),
    }


PARTS = {part.__name__: part for part in (placement, split, resume)}
seen = {name: PARTS[name]() for name in sys.argv[2:]}
(OUT / "seen.json").write_text(json.dumps(seen))
