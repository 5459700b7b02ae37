"""One ps job of two workers, in which the scripts of several issues run one after the other."""

import pathlib
import sys

import keras
import numpy as np

import tfdist

strategy = tfdist.make_strategy()

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import models  # noqa: E402
from recorded import record  # noqa: E402


def keras_18624():
    rate = models.Ramp()
    with strategy.scope():
        model, ones = models.descending(keras.optimizers.SGD(rate), examples=64)
    tfdist.fit(model, ones, ones, batch_size=4, epochs=5, seed=3, verbose=0)
    return {"steps": int(model.optimizer.iterations.numpy()), "weights": models.flat(model)}


def keras_18668():
    with strategy.scope():
        model, ones = models.descending(keras.optimizers.SGD(1.0), examples=64)
    tfdist.fit(model, ones, ones, batch_size=1, epochs=5, seed=3, verbose=0)
    seen = {"steps": int(model.optimizer.iterations.numpy()), "weights": models.flat(model)}
    with strategy.scope():
        model = models.regression(keras.optimizers.Adam(0.01))
    history = tfdist.fit(model, models.X, models.Y, batch_size=4, epochs=20, seed=3, verbose=0)
    seen["adam steps"] = int(model.optimizer.iterations.numpy())
    seen["adam loss"] = history.history["loss"]
    seen["adam weights are finite"] = bool(np.isfinite(models.flat(model)).all())
    return seen


record([keras_18624, keras_18668], pathlib.Path(sys.argv[1]) / "seen-0.jsonl")
