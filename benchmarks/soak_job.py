"""Job of `soak.py`: rounds of fit, evaluate and predict until it is stopped.

Rounds use arrays and a `tf.data` stream in turn. Short fits are followed by a few long ones, to
tell memory that grows with fits from memory that grows with steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

FEATURES = 32
CLASSES = 4
BATCH = 32
TRAINING = 3200
VALIDATION = 640
EPOCHS = (2,) * 10 + (30,) * 3
EVERY_STEPS = 75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=int, required=True, help="1 at the first start")
    args = parser.parse_args()
    strategy = tfdist.make_strategy()
    keras.utils.set_random_seed(args.start)
    with strategy.scope():
        model = _model()
    progress = Progress(args.out / "progress.json")
    for number in range(10**6):
        backups = args.out / f"backups-{args.start}-{number}"
        _round(model, number, backups=backups, progress=progress)
        if tfdist.is_chief():
            shutil.rmtree(backups, ignore_errors=True)


class Progress(keras.callbacks.Callback):
    """Count of steps and fits over all rounds, in a file that the chief writes."""

    once_a_range = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._done = {"steps": 0, "fits": 0}
        self._epoch = 0

    def write(self, phase: str, *, steps: int = 0) -> None:
        """Replace the file atomically."""
        if tfdist.is_chief():
            progress = self._done | {"phase": phase, "steps": self._done["steps"] + steps}
            beside = self._path.with_suffix(".unfinished")
            beside.write_text(json.dumps(progress))
            os.replace(beside, self._path)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.write("fit", steps=self._epoch * (TRAINING // BATCH) + batch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        self._done["steps"] += (self._epoch + 1) * (TRAINING // BATCH)
        self._done["fits"] += 1


def _model() -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(64, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def _round(model: Any, number: int, *, backups: Path, progress: Progress) -> None:
    x, y = _examples()
    validation = (x[TRAINING:], y[TRAINING:])
    epochs = EPOCHS[number % len(EPOCHS)]
    callbacks = [
        progress,
        keras.callbacks.EarlyStopping("val_loss", patience=10**6, restore_best_weights=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 1e-3),
        tfdist.BackupAndRestore(backups, save_freq=EVERY_STEPS),
    ]
    options: dict[str, Any] = {
        "epochs": epochs,
        "callbacks": callbacks,
        "validation_data": validation,
    }
    if number % 2:
        stream = tf.data.Dataset.from_tensor_slices((x[:TRAINING], y[:TRAINING]))
        stream = stream.shuffle(TRAINING, seed=number).batch(BATCH)
        tfdist.fit(model, stream, verbose=0, seed=number, **options)
    else:
        arrays = x[:TRAINING], y[:TRAINING]
        tfdist.fit(model, *arrays, batch_size=BATCH, verbose=0, seed=number, **options)
    progress.write("evaluate")
    tfdist.evaluate(model, *validation, batch_size=BATCH, verbose=0)
    progress.write("predict")
    tfdist.predict(model, validation[0], batch_size=BATCH, verbose=0)


def _examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((TRAINING + VALIDATION, FEATURES), dtype=np.float32)
    return x, (x[:, :2] > 0) @ np.array([1, 2])


if __name__ == "__main__":
    main()
