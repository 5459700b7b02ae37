"""Three workers and one ps, the CNN: what the other two make before and after one is killed."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import harness
import row

NAME = "ps_killed"
WORKERS = 3
VICTIM = 2
BATCH = 64
STEPS = 90
WARM_EPOCHS, EPOCHS_BEFORE, EPOCHS_AFTER = 1, 3, 3
POLL_S = 0.05

# The two that live share a core, which the victim never was on; it has the other with the ps and
# the chief. So what they gain by its death is only what ps and chief gain.
CORE_INDEX = {("worker", 0): 1, ("worker", 1): 1, ("worker", 2): 0, ("ps", 0): 0, ("chief", 0): 0}


def measure_tfdist(args: argparse.Namespace) -> None:
    """One task of the job; the victim kills itself when the chief says so by a file."""
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]["type"], int(config["task"]["index"])
    harness.pin(CORE_INDEX[task])
    order = Path(config["tfdist"]["run_dir"]) / "kill"
    if task == ("worker", VICTIM):
        threading.Thread(target=_kill_when_told, args=(order,), daemon=True).start()
    import keras
    import models

    import tfdist

    strategy = tfdist.make_strategy("ps")
    steps = args.steps or STEPS
    x, y = models.images(steps * BATCH)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = models.cnn(keras)
        model.compile(models.sgd(keras), models.loss(keras))
    samples = _sampler(keras, strategy, order)
    epochs = WARM_EPOCHS + EPOCHS_BEFORE + EPOCHS_AFTER
    tfdist.fit(model, x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[samples])
    _emit(samples.taken)


def _kill_when_told(order: Path) -> None:
    while not order.exists():
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _sampler(keras: Any, strategy: Any, order: Path) -> Any:
    from tfdist.ps.worker_pool import worker_pool_of

    class Sampler(keras.callbacks.Callback):
        """At each epoch's end, when no piece is under way: the time, and the steps of each."""

        taken: list[tuple[float, list[int]]] = []  # noqa: RUF012

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            shares = worker_pool_of(strategy, patience_s=0).shares
            self.taken.append((time.perf_counter(), [share.steps for share in shares.values()]))
            if epoch + 1 == WARM_EPOCHS + EPOCHS_BEFORE:
                order.touch()

    return Sampler()


def _emit(taken: list[tuple[float, list[int]]]) -> None:
    middle = WARM_EPOCHS + EPOCHS_BEFORE - 1
    before = _rates(taken[WARM_EPOCHS - 1], taken[middle])
    after = _rates(taken[middle], taken[-1])
    living = [index for index in range(WORKERS) if index != VICTIM]
    harness.emit(
        NAME,
        "tfdist",
        living_before=sum(before[index] for index in living),
        living_after=sum(after[index] for index in living),
        before=before,
        after=after,
    )


def _rates(first: tuple[float, list[int]], last: tuple[float, list[int]]) -> list[float]:
    """Examples per second of each worker between two samples."""
    seconds = last[0] - first[0]
    return [BATCH * (b - a) / seconds for a, b in zip(first[1], last[1], strict=True)]


def _after_of_before(pair: row.Pair) -> float:
    return row.figure(pair, "tfdist", "living_after") / row.figure(pair, "tfdist", "living_before")


ROW = row.Row(
    name=NAME,
    title="ps: 3 workers, 1 ps, the same CNN, one worker is killed",
    sides={
        "tfdist": functools.partial(
            row.launched,
            [
                *("--strategy", "ps", "--workers", str(WORKERS), "--ps", "1"),
                *("--threads_per_task", "1"),
            ],
            f"{NAME}.py",
            "tfdist",
        ),
    },
    claims=(
        row.Claim(
            what="examples/s of the other two after the kill / before it",
            value=_after_of_before,
            target=0.95,
            at_least=True,
            unit="x",
            expected="1.0: the dead worker's connection is refused at once, its piece goes to "
            "another, and nobody waits for it; a little more where ps and chief gain by its core",
        ),
    ),
    notes="The time after begins with the kill itself. The two that live share one core, the "
    "victim had the other with ps and chief.",
)


if __name__ == "__main__":
    row.main(ROW, {"tfdist": measure_tfdist})
