"""Peeks and fits of cached streams on a busy machine: none may train on a part of its data.

    python -m tests.stress.cached_streams [--peeks 5000] [--fits 300]

Prints how many batches each second reading had, of 4, and the sum of an epoch's targets, of 32640.
Without `tfdist.data.stream` about a third of the readings is cut here. Exit code 1 if one is.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.data.stream import Reading, read

_X = np.arange(256, dtype="float32")[:, None]
_SUM = int(_X.sum())
_BATCHES = 4


def kinds(folder: Path) -> dict[str, Callable[[], tf.data.Dataset]]:
    """Datasets that end in a cache of some kind; each call makes a new one."""
    names = (str(folder / f"{number}") for number in range(10**9))

    def rows() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((_X, _X)).batch(64).prefetch(4)

    return {
        "memory": lambda: rows().cache(),
        "file": lambda: rows().cache(next(names)),
        "snapshot": lambda: rows().snapshot(next(names)).prefetch(2),
        "shuffle": lambda: rows().cache().shuffle(4).prefetch(2),
        "prefetched shuffle": lambda: rows().shuffle(4).prefetch(16).cache(),
    }


def peeks(make: Callable[[], tf.data.Dataset], count: int) -> Iterator[int]:
    """The batches of a whole reading after one that was dropped at its first batch."""
    for number in range(count):
        dataset = make()
        next(iter(read(dataset, Reading(peek=number % 2 == 1))))
        yield sum(1 for _ in read(dataset, Reading()))


class Total(keras.metrics.Metric):
    """The sum of the targets."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):  # type: ignore[no-untyped-def]
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self) -> tf.Tensor:
        return self.total


def fits(make: Callable[[], tf.data.Dataset], count: int) -> Iterator[int]:
    """The sums of the targets of an epoch, in training and in validation."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Total()])
    for _ in range(count):
        history = tfdist.fit(model, make(), validation_data=make(), epochs=1, verbose=0).history
        yield from (int(history["total"][0]), int(history["val_total"][0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peeks", type=int, default=5000)
    parser.add_argument("--fits", type=int, default=300)
    arguments = parser.parse_args()
    tfdist.make_strategy("single")
    busy = f"from tfdist.launch.guardian import die_with; die_with({os.getpid()})\nwhile 1: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(4)]
    wrong = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = kinds(Path(folder))
            for name, make in made.items():
                seen = collections.Counter(peeks(make, arguments.peeks // len(made)))
                wrong += sum(seen.values()) - seen[_BATCHES]
                print(f"{name}: batches after a peek, of {_BATCHES}: {dict(seen)}", flush=True)
            for name, make in made.items():
                seen = collections.Counter(fits(make, arguments.fits // len(made)))
                wrong += sum(seen.values()) - seen[_SUM]
                print(f"{name}: sums of an epoch, of {_SUM}: {dict(seen)}", flush=True)
    finally:
        for hog in hogs:
            hog.kill()
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
