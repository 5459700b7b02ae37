"""A search of two trials, whose first is killed once in its second epoch: search.py DIRECTORY."""

import os
import pathlib
import signal
import sys

import keras
import keras_tuner
import numpy as np

import tfdist

OUT = pathlib.Path(sys.argv[1])
X = np.random.RandomState(0).randn(64, 4).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


def build(hp):
    units = hp.Int("units", 2, 8)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu")])
    model.add(keras.layers.Dense(2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


class Killed(keras.callbacks.Callback):
    """The process of the first trial is killed as its second epoch begins, once."""

    def on_epoch_begin(self, epoch, logs=None):
        mark = OUT / "killed"
        if epoch == 1 and '"trial": "0"' in os.environ["TFDIST_TRIAL"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    tuner = keras_tuner.RandomSearch(
        build, "val_accuracy", max_trials=2, seed=5, directory=OUT, project_name="search"
    )
    tfdist.tuning.search(
        tuner, X, Y, epochs=3, validation_data=(X, Y), callbacks=[Killed()],
        parallel_trials=2, sweep_dir=OUT / "sweep",
    )  # fmt: skip
    print(f"the chief goes on with {len(tuner.oracle.trials)} trials")
