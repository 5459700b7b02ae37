"""One process, the small dense model: what a tracker that logs every block costs.

Without a tracker, with MLflow on a local store and with W&B offline: all in one process, by turns,
so that what the machine does meanwhile falls on each. The trackers' own threads and processes are
on the one core that trains, so what they take is in the figures.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
import row
from clock import epoch_clock, per_second

NAME = "tracker_overhead"
BATCH = 64
STEPS = 2000
EPOCHS = 3
ROUNDS = 2
SIDES = ("plain", "mlflow", "wandb")


def measure_tfdist(args: argparse.Namespace) -> None:
    """`tfdist.fit` with each tracker and without, by turns; `--epochs` is rounds + 1."""
    import keras
    import models

    import tfdist

    strategy = tfdist.make_strategy("single")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = models.dense(keras)
        model.compile("adam", models.loss(keras))
    steps = args.steps or STEPS
    x, y = models.vectors(steps * BATCH)

    def rate(callbacks: list[Any]) -> float:
        """Return the steps per second of all epochs but the first."""
        clock = epoch_clock(keras)
        tfdist.fit(
            model, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, clock]
        )
        return per_second(steps, clock.epochs_s)

    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=harness.HERE) as directory:
        for number in range(args.epochs):
            order = SIDES if number % 2 else tuple(reversed(SIDES))
            rounds.append({side: _RATE[side](Path(directory), rate) for side in order})
    rounds = rounds[1:]
    harness.emit(
        NAME,
        "tfdist",
        steps_per_s={side: statistics.median(r[side] for r in rounds) for side in SIDES},
        **{f"with_{side}": _ratio(rounds, side) for side in SIDES[1:]},
        rounds=rounds,
    )


def _ratio(rounds: list[dict[str, float]], side: str) -> float:
    return statistics.median(one[side] / one["plain"] for one in rounds)


def _with_mlflow(directory: Path, rate: Any) -> float:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow
    import mlflow.keras

    mlflow.set_tracking_uri((directory / "mlflow").as_uri())
    with mlflow.start_run():
        return float(
            rate([mlflow.keras.MlflowCallback(log_every_epoch=False, log_every_n_steps=1)])
        )


def _with_wandb(directory: Path, rate: Any) -> float:
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    settings = wandb.Settings(mode="offline", silent=True)
    with wandb.init(project=NAME, dir=directory, settings=settings):
        return float(rate([WandbMetricsLogger(log_freq="batch")]))


_RATE = {
    "plain": lambda directory, rate: rate([]),
    "mlflow": _with_mlflow,
    "wandb": _with_wandb,
}


def _claim(side: str, title: str) -> row.Claim:
    return row.Claim(
        what=f"steps/s with {title} / without a tracker",
        value=lambda pair: row.figure(pair, "tfdist", f"with_{side}"),
        target=0.99,
        at_least=True,
        unit="x",
        expected="0.996: the calls of a block take 1.1 ms of about a second, the tracker's own "
        "threads and processes 0.3 % of a core",
    )


ROW = row.Row(
    name=NAME,
    title="single: a small dense model, a tracker that logs every block",
    sides={
        "tfdist": functools.partial(
            row.script, f"{NAME}.py", "tfdist", core=harness.core_of(0), timeout_s=300.0
        ),
    },
    claims=(_claim("mlflow", "MLflow on a local store"), _claim("wandb", "W&B offline")),
    notes="An epoch is one block of half a second or so, shorter than in a longer training, so "
    "that a tracker is called more often.",
)


if __name__ == "__main__":
    row.main(ROW, {"tfdist": measure_tfdist}, epochs=ROUNDS + 1)
