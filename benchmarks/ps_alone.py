"""Two workers and one ps, the CNN, beside what two processes make that need nobody."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys

import harness
import ps_cnn
import row
from clock import epoch_clock, per_second

NAME = "ps_alone"


def measure_alone(args: argparse.Namespace) -> None:
    """Both processes at once, each on the core of a worker; the sum of their rates."""
    command = [sys.executable, __file__, "--epochs", str(args.epochs), "--side"]
    both = [
        subprocess.Popen([*command, f"process_{index}"], stdout=subprocess.PIPE, text=True)
        for index in range(ps_cnn.WORKERS)
    ]
    told = [harness.records(process.communicate()[0]) for process in both]
    rates = [record["examples_per_s"] for records in told for record in records]
    if len(rates) != ps_cnn.WORKERS:
        raise harness.MeasurementError(f"{len(rates)} of {ps_cnn.WORKERS} processes have measured")
    harness.emit(NAME, "alone", examples_per_s=sum(rates), each=rates)


def measure_process(args: argparse.Namespace, *, index: int) -> None:
    """One of them: `tfdist.fit` under single."""
    harness.pin(ps_cnn.CORE_INDEX["worker", index])
    import keras
    import models

    import tfdist

    steps = args.steps or ps_cnn.STEPS // ps_cnn.WORKERS
    strategy = tfdist.make_strategy("single")
    x, y = models.images(steps * ps_cnn.BATCH)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = models.cnn(keras)
        model.compile(models.sgd(keras), models.loss(keras))
    clock = epoch_clock(keras)
    tfdist.fit(
        model, x, y, batch_size=ps_cnn.BATCH, epochs=args.epochs, verbose=0, callbacks=[clock]
    )
    rate = per_second(steps * ps_cnn.BATCH, clock.epochs_s)
    harness.emit(NAME, "process", examples_per_s=rate, epochs_s=clock.epochs_s)


def _of_alone(pair: row.Pair) -> float:
    return row.figure(pair, "tfdist", "examples_per_s") / row.figure(
        pair, "alone", "examples_per_s"
    )


ROW = row.Row(
    name=NAME,
    title="ps: 2 workers, 1 ps, the same CNN, beside its workers alone",
    sides={
        "tfdist": ps_cnn.ROW.sides["tfdist"],
        "alone": functools.partial(row.script, f"{NAME}.py", "alone", timeout_s=240.0),
    },
    claims=(
        row.Claim(
            what="examples/s of the job / of two processes that train alone on the same cores",
            value=_of_alone,
            target=0.75,
            at_least=True,
            unit="x",
            expected="0.70: two processes alone make 2,480 examples/s, the job has made up to "
            "1,725; beside a step's 55 ms of arithmetic, ps and chief take 11 ms of these "
            "cores, and reading and sending 4.8 MB each way the rest",
        ),
    ),
    notes="Both sides have the same two cores; the job's ps and chief are on them too.",
)


if __name__ == "__main__":
    processes = {
        f"process_{index}": functools.partial(measure_process, index=index)
        for index in range(ps_cnn.WORKERS)
    }
    row.main(ROW, {"alone": measure_alone, **processes})
