"""A classifier of scikit-learn's digits: a Keras script under every strategy.

    python -m tfdist.launch --strategy multiworker --workers 2 docs/examples/train.py

Beside a script for one device there are two lines of tfdist, marked (1) and (2),
a callback that saves, and `is_chief`.
"""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits

import tfdist


def data():
    """Images [n, 8, 8, 1] from 0 to 1 and classes [n], to train with and to validate with."""
    digits = load_digits()
    x = (digits.images[..., None] / 16).astype("float32")
    return (x[:1500], digits.target[:1500]), (x[1500:], digits.target[1500:])


def make_model(units: int = 64, learning_rate: float = 1e-3) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(learning_rate)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dir", default="runs/digits", help="for checkpoints and the model")
    args = parser.parse_args()

    strategy = tfdist.make_strategy()  # (1) before any other work of TensorFlow
    with strategy.scope():  # (2)
        model = make_model()
    (x, y), validation = data()
    model.fit(
        x,
        y,
        batch_size=64,  # of all workers together
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[tfdist.BackupAndRestore(f"{args.dir}/backup", save_freq=20)],
    )
    if tfdist.is_chief():  # one task writes
        model.save(f"{args.dir}/model.keras")
    tfdist.barrier()  # no task leaves before it has


if __name__ == "__main__":
    main()
