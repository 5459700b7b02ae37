"""Two workers, dense layers of 8 M parameters, Adam: sharded optimizer state against whole slots.

Two models train in the same two processes by turns, an epoch each, one with whole slots and one
with sharded ones, so that what the machine does meanwhile falls on both. A pair is two neighbouring
turns, and every other pair begins with the other side; the figure of a run is the median of its
pairs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from typing import Any

import harness
import row

NAME = "sharded_optimizer"
WORKERS = 2
BATCH = 32
LAYERS = 8
WIDTH = 1024
STEPS = 20
PAIRS = 7
SIDES = ("whole", "sharded")


def measure_tfdist(args: argparse.Namespace) -> None:
    """One task of a multiworker job; worker 0 prints each pair and the medians."""
    harness.pin(int(json.loads(os.environ["TF_CONFIG"])["task"]["index"]))
    import keras

    import tfdist

    strategy = tfdist.make_strategy("multiworker")
    steps = args.steps or STEPS
    x, y = _data(steps * BATCH * WORKERS)
    models = {side: _model(keras, strategy) for side in SIDES}
    pairs = []
    for number in range(args.epochs):
        order = SIDES[::-1] if number % 2 else SIDES
        pairs.append({side: _step_s(models[side], x, y, side, steps=steps) for side in order})
    pairs = pairs[1:]
    state = {side: _state_bytes(model) for side, model in models.items()}
    equal = all(
        one.tobytes() == other.tobytes()
        for one, other in zip(*(model.get_weights() for model in models.values()), strict=True)
    )
    if tfdist.is_chief():
        harness.emit(
            NAME,
            "tfdist",
            step=statistics.median(pair["sharded"] / pair["whole"] for pair in pairs),
            state=state["sharded"] / state["whole"],
            step_s={side: statistics.median(pair[side] for pair in pairs) for side in SIDES},
            state_bytes=state,
            equal_bits=equal,
            pairs=pairs,
        )
    tfdist.barrier()


def _data(count: int) -> tuple[Any, Any]:
    import numpy as np

    draw = np.random.default_rng(0)
    return draw.random((count, WIDTH), "float32"), draw.integers(0, 10, count)


def _model(keras: Any, strategy: Any) -> Any:
    """Dense layers of 1024, the optimizer's state twice their bytes."""
    import models

    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(10)])
        model.compile(keras.optimizers.Adam(1e-4), models.loss(keras))
    return model


def _step_s(model: Any, x: Any, y: Any, side: str, *, steps: int) -> float:
    """Seconds a step of the second epoch, when all is traced."""
    import keras

    import tfdist

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            tfdist.barrier()
            self._began_s = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.step_s = (time.perf_counter() - self._began_s) / steps

    clock = Clock()
    tfdist.fit(
        model, x, y, batch_size=BATCH * WORKERS, epochs=2, seed=1, verbose=0,
        callbacks=[clock], sharded_optimizer=side == "sharded",
    )  # fmt: skip
    return clock.step_s


def _state_bytes(model: Any) -> int:
    """Bytes of the optimizer's variables in this worker."""
    return sum(variable.numpy().nbytes for variable in model.optimizer.variables)


ROW = row.Row(
    name=NAME,
    title="multiworker: dense layers of 8 M parameters with Adam, sharded optimizer state",
    sides={
        "tfdist": functools.partial(
            row.launched,
            ("--strategy", "multiworker", "--workers", str(WORKERS)),
            f"{NAME}.py",
            "tfdist",
            timeout_s=600.0,
        ),
    },
    claims=(
        row.Claim(
            what="state of the optimizer per worker, sharded / whole",
            value=lambda pair: row.figure(pair, "tfdist", "state"),
            target=0.52,
            at_least=False,
            unit="x",
            expected="0.50: two workers have a half each of every slot",
        ),
        row.Claim(
            what="time of a step, sharded / whole",
            value=lambda pair: row.figure(pair, "tfdist", "step"),
            target=1.0,
            at_least=False,
            unit="x",
            expected="0.9: as many bytes travel, and each worker updates half of the weights; sum "
            "and update alone took 0.70 of the time in a prototype",
        ),
    ),
    notes="Of the state are counted the optimizer's variables; the copy of the worker's part of "
    "the weights that a sharded one keeps besides is not.",
)


if __name__ == "__main__":
    row.main(ROW, {"tfdist": measure_tfdist}, epochs=PAIRS + 1)
