"""One process, the CNN: `model.fit` by tfdist beside the same line by Keras."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import harness
import row
from clock import epoch_clock, per_second

NAME = "single_fit"
BATCH, STEPS = 64, 50
STEPS_PER_EXECUTION = (1, 50)


def measure_tfdist(args: argparse.Namespace) -> None:
    """`model.fit` of a model made in the scope."""
    import tfdist

    strategy = tfdist.make_strategy("single")
    import keras

    with strategy.scope():
        model = _compiled(keras)
    _measure("tfdist", keras, model, args)


def measure_keras(args: argparse.Namespace) -> None:
    """`model.fit` of Keras, with its default of one step per execution and with 50."""
    import keras

    for steps in STEPS_PER_EXECUTION:
        model = _compiled(keras, steps_per_execution=steps)
        _measure("keras", keras, model, args, steps_per_execution=steps)


def _compiled(keras: Any, **options: Any) -> Any:
    import models

    keras.utils.set_random_seed(0)
    model = models.cnn(keras)
    model.compile(models.sgd(keras), models.loss(keras), jit_compile=False, **options)
    return model


def _measure(side: str, keras: Any, model: Any, args: argparse.Namespace, **variant: Any) -> None:
    import models

    steps = args.steps or STEPS
    x, y = models.images(steps * BATCH)
    clock = epoch_clock(keras)
    model.fit(x, y, batch_size=BATCH, epochs=args.epochs, verbose=0, callbacks=[clock])
    rate = per_second(steps * BATCH, clock.epochs_s)
    harness.emit(NAME, side, examples_per_s=rate, epochs_s=clock.epochs_s, **variant)


def _of_keras(pair: row.Pair) -> float:
    ours = row.figure(pair, "tfdist", "examples_per_s")
    return ours / row.best(pair, "keras", "examples_per_s")


ROW = row.Row(
    name=NAME,
    title="single: model.fit of the CNN of 1.2 M parameters, by tfdist and by Keras",
    sides={
        side: functools.partial(row.script, f"{NAME}.py", side, core=harness.core_of(0))
        for side in ("tfdist", "keras")
    },
    claims=(
        row.Claim(
            what="examples/s of model.fit by tfdist / by Keras",
            value=_of_keras,
            target=0.97,
            at_least=True,
            unit="x",
            expected="1.00 or a little more: a step is about 50 ms of convolutions, beside which "
            "the loop of either side is small",
        ),
    ),
    notes="Keras runs 1 and 50 steps per execution, without XLA, which is slower for this model "
    "on a CPU. The better figure counts.",
)


if __name__ == "__main__":
    row.main(ROW, {"tfdist": measure_tfdist, "keras": measure_keras})
