"""A sweep of a user's own: trials of a tiny model, a task of the second killed once.

Usage: tuned.py SWEEP_DIR STRATEGY WORKERS TRIALS.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import keras_tuner
import numpy as np

import tfdist.tuning
from tfdist.cluster import read_environment

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


class Hyper(keras_tuner.HyperModel):
    """With a fit of its own, as KerasTuner's guide has it for a batch size."""

    def build(self, hp):
        hp.Choice("batch", [16, 32])
        units = hp.Int("units", 2, 8)
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(2)]
        )
        rate = hp.Float("lr", 1e-3, 1e-1, sampling="log")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
        return model

    def fit(self, hp, model, *args, **kwargs):
        return model.fit(*args, batch_size=hp.get("batch"), **kwargs)


class Mishaps(keras.callbacks.Callback):
    """In the third epoch the last task of trial 1 is killed, once."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_begin(self, epoch, logs=None):
        trial = json.loads(os.environ["_TFDIST_TRIAL"])["trial"]
        config = read_environment(os.environ)
        is_last = config.task.index == len(config.cluster.worker) - 1
        if epoch == 2 and trial == "1" and is_last and not (self.path / "killed").exists():
            (self.path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sweep_dir, strategy = Path(sys.argv[1]), sys.argv[2]
    workers, trials = map(int, sys.argv[3:])
    tuner = keras_tuner.RandomSearch(
        Hyper(), "val_accuracy", max_trials=trials, seed=5, directory=sweep_dir, project_name="own"
    )
    tfdist.tuning.search(
        tuner,
        X,
        Y,
        epochs=4,
        validation_data=(X, Y),
        callbacks=[Mishaps(sweep_dir)],
        strategy=strategy,
        workers=workers,
        parallel_trials=2,
        sweep_dir=sweep_dir / "sweep",
    )
    best = tuner.oracle.get_best_trials()[0]
    model = tuner.get_best_models()[0]
    accuracy = model.evaluate(X, Y, verbose=0, return_dict=True)["accuracy"]
    print(f"best {best.trial_id}: score {best.score:.6f}, evaluated {accuracy:.6f}")
    print(f"learning rate {tuner.get_best_hyperparameters()[0].get('lr')}")
