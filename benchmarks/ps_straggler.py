"""Three workers of which one has a third of the others' speed: ps beside multiworker, the CNN."""

from __future__ import annotations

import argparse
import functools
import json
import os

import harness
import row
import throttle
from clock import epoch_clock, per_second

NAME = "ps_straggler"
WORKERS = 3
STRAGGLER = 2
BATCH = 64  # of a worker
STEPS = 30  # of three workers together
EPOCHS = 4

# Two workers share a core, half of it each; the straggler has a third of a half of the other one.
CORE_INDEX = {("worker", 0): 1, ("worker", 1): 1, ("worker", 2): 0, ("ps", 0): 0, ("chief", 0): 0}
SHARE = 0.5 / 3


def measure_tfdist(args: argparse.Namespace, *, kind: str) -> None:
    """One task of the job; the chief tells the rate."""
    told = json.loads(os.environ["TF_CONFIG"])["task"]
    task = told["type"], int(told["index"])
    harness.pin(CORE_INDEX[task])
    import keras
    import models

    import tfdist

    if task == ("worker", STRAGGLER):
        throttle.start(SHARE)
    strategy = tfdist.make_strategy(kind)
    steps = (args.steps or STEPS) * WORKERS
    batch = BATCH * (WORKERS if kind == "multiworker" else 1)
    x, y = models.images(steps * BATCH)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = models.cnn(keras)
        model.compile(models.sgd(keras), models.loss(keras))
    clock = epoch_clock(keras)
    tfdist.fit(model, x, y, batch_size=batch, epochs=args.epochs, verbose=0, callbacks=[clock])
    if tfdist.is_chief():
        rate = per_second(steps * BATCH, clock.epochs_s)
        harness.emit(NAME, kind, examples_per_s=rate, epochs_s=clock.epochs_s)


def _of_multiworker(pair: row.Pair) -> float:
    return row.figure(pair, "ps", "examples_per_s") / row.figure(
        pair, "multiworker", "examples_per_s"
    )


def _job(kind: str, *flags: str) -> functools.partial[list[row.Record]]:
    launcher = ["--strategy", kind, "--workers", str(WORKERS), *flags, "--threads_per_task", "1"]
    return functools.partial(row.launched, launcher, f"{NAME}.py", kind, timeout_s=400.0)


ROW = row.Row(
    name=NAME,
    title="ps: 3 workers, one at a third of its speed, the same CNN, beside multiworker",
    sides={"ps": _job("ps", "--ps", "1"), "multiworker": _job("multiworker")},
    claims=(
        row.Claim(
            what="examples/s under ps / under multiworker, the same straggler in both",
            value=_of_multiworker,
            target=2.0,
            at_least=True,
            unit="x",
            expected="2.0: multiworker goes at the straggler's pace, 3 x 64 examples in 330 ms and "
            "its all-reduce; under ps the other two make about 1,000 examples/s and it 150",
        ),
    ),
    notes="The straggler is stopped and let go on in turn (SIGSTOP, SIGCONT) every 60 ms. Two "
    "workers share one core, half of it each; it has a sixth of the other one, where ps and chief "
    "are too. Each worker takes 64 examples at a time in both.",
)


if __name__ == "__main__":
    kinds = {kind: functools.partial(measure_tfdist, kind=kind) for kind in ROW.sides}
    row.main(ROW, kinds, epochs=EPOCHS)
