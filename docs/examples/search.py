"""A search over the classifier of train.py, beside it: each trial is a job of the launcher.

    python docs/examples/search.py --max_trials 6

Killed at any time, the same command goes on.
"""

from __future__ import annotations

import argparse

import keras_tuner
from train import data, make_model

import tfdist


def build_model(hp):
    return make_model(
        units=hp.Int("units", 16, 128, step=16),
        learning_rate=hp.Float("learning_rate", 1e-4, 1e-1, sampling="log"),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dir", default="runs", help="for the sweep")
    args = parser.parse_args()

    tuner = keras_tuner.RandomSearch(
        build_model,
        "val_accuracy",
        max_trials=args.max_trials,
        seed=1,
        directory=args.dir,
        project_name="search",
    )
    (x, y), validation = data()
    tfdist.tuning.search(  # for tuner.search
        tuner,
        x,
        y,
        batch_size=64,
        epochs=args.epochs,
        validation_data=validation,
        parallel_trials=2,
    )
    print(tuner.get_best_hyperparameters()[0].values)


if __name__ == "__main__":
    main()
