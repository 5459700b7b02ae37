"""A user's sweep over the digits with KerasTuner: ``sweep_program.py HOW DIRECTORY TRIALS``.

HOW is ``search``, KerasTuner's own, alone or as its variables say, or ``tfdist``. The same
program, the same trials.
"""

from __future__ import annotations

import sys

import keras
import keras_tuner
from sklearn.datasets import load_digits

import tfdist.tuning

EPOCHS = 5
TRAINING = 1440


def build(hp: keras_tuner.HyperParameters) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(hp.Choice("filters", [16, 32]), 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(hp.Float("dropout", 0.0, 0.5, step=0.1)),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(hp.Float("learning_rate", 1e-4, 1e-1, sampling="log")),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(how: str, directory: str, trials: int) -> None:
    """Searches."""
    data = load_digits()
    x, y = data.images[..., None].astype("float32") / 16, data.target
    tuner = keras_tuner.RandomSearch(
        build, "val_accuracy", max_trials=trials, seed=7, directory=directory, project_name="p"
    )
    validation = (x[TRAINING:], y[TRAINING:])
    fitting = {"epochs": EPOCHS, "batch_size": 64, "validation_data": validation, "verbose": 0}
    if how == "search":
        tuner.search(x[:TRAINING], y[:TRAINING], **fitting)
    else:
        tfdist.tuning.search(tuner, x[:TRAINING], y[:TRAINING], parallel_trials=2, **fitting)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
