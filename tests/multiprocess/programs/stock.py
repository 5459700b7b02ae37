"""Keras' own `fit` and its like in a job of several tasks; the chief writes what came of them."""

import json
import pathlib
import sys

import keras
import numpy as np

import tfdist

X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
CALLS = {
    "fit": (X, Y),
    "evaluate": (X, Y),
    "predict": (X,),
    "train_on_batch": (X, Y),
    "test_on_batch": (X, Y),
    "predict_on_batch": (X,),
}


def outcomes(method_of):
    """What comes of each call."""
    found = {}
    for name, arguments in CALLS.items():
        try:
            method_of(name)(*arguments, **({} if "batch" in name else {"verbose": 0}))
            found[name] = "works"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def stock(name):
    """Keras' method, as it is without tfdist."""
    method = getattr(keras.Model, name)
    return getattr(method, "__wrapped__", method).__get__(model)


class Calling(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        SEEN["in a callback"] = outcomes(lambda name: getattr(self.model, name))


strategy = tfdist.make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
elsewhere = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
elsewhere.compile("sgd", "mse")
SEEN = {"stock": outcomes(stock), "in the program": outcomes(lambda name: getattr(model, name))}
SEEN["a model of no strategy"] = outcomes(lambda name: getattr(elsewhere, name))
tfdist.fit(model, X, Y, batch_size=4, verbose=0, callbacks=[Calling()])
if tfdist.is_chief():
    pathlib.Path(sys.argv[1]).write_text(json.dumps(SEEN))
tfdist.barrier()
