"""A model in stages, a core each, against one core that accumulates over the same micro-batches.

    python benchmarks/pipeline.py --splits 6,10,20 --rounds 3

Each size of the micro-batches is measured with every number of stages in turn, in processes of
their own, and all of that `--rounds` times. The model is a small residual network of 32x32 images,
or ResNet-50 of 128x128 with ``--model resnet50``. Not part of `make bench`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import sys
import time
from typing import Any

import harness

NAME = "pipeline"
DEADLINE_S = 900.0


def main() -> None:
    args = _arguments()
    if "TF_CONFIG" in os.environ:
        measure(args)
        return
    sizes = [int(size) for size in args.splits.split(",")]
    seconds: dict[tuple[int, int], list[float]] = {}
    for _, size, stages in itertools.product(range(args.rounds), sizes, (1, args.stages)):
        command = [harness.PROJECT_PYTHON, "-m", "tfdist.launch", "--strategy=pipeline"]
        command += [f"--stages={stages}", __file__, *sys.argv[1:], f"--splits={size}"]
        found = harness.measure(command, timeout_s=DEADLINE_S)
        taken_s = max(record["step_s"] for record in found)
        seconds.setdefault((size, stages), []).append(taken_s)
        peaks = ", ".join(f"{record['peak_mib']:.0f}" for record in found)
        print(
            f"split {size}, {stages} stages: {taken_s:.3f} s a step, peaks of {peaks} MiB; others"
            f" took {found[0]['others_cores']:.2f} cores",
            flush=True,
        )
    medians = {cell: statistics.median(found) for cell, found in seconds.items()}
    alone_s = min(medians[size, 1] for size in sizes)
    print(f"\none core at its best: {args.batch / alone_s:.1f} examples/s\n")
    print("| split | examples/s | x |\n|---|---|---|")
    for size in sizes:
        taken_s = medians[size, args.stages]
        print(f"| {size} | {args.batch / taken_s:.1f} | {alone_s / taken_s:.2f} |")


def measure(args: argparse.Namespace) -> None:
    """Trains for some steps in a task of the job; prints the median of a step, and its memory."""
    from tfdist.cluster import read_environment

    config = read_environment(os.environ)
    assert config is not None
    harness.pin(config.task.index)
    import keras
    import numpy as np

    import tfdist

    options = tfdist.PipelineOptions(split_size=int(args.splits), keep=args.keep)
    strategy = tfdist.make_strategy(pipeline=options, threads=1)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = _model(keras, args.model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss)
    draw = np.random.default_rng(0)
    x = draw.random((args.batch, *model.input_shape[1:]), "float32")
    y = draw.integers(0, model.output_shape[-1], (args.batch,))
    clock = _clock(keras)
    epochs = args.steps + 1  # the first one traces
    tfdist.fit(model, x, y, batch_size=args.batch, epochs=epochs, verbose=0, callbacks=[clock])
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    side = f"stage {config.task.index}"
    harness.emit(NAME, side, step_s=statistics.median(clock.seconds[1:]), peak_mib=peak_mib)


def _clock(keras: Any) -> Any:
    class Clock(keras.callbacks.Callback):
        """Seconds of each epoch, which is one step, without what is done at its end."""

        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began_s = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self.began_s)

    return Clock()


def _model(keras: Any, name: str) -> Any:
    if name == "resnet50":
        return keras.applications.ResNet50(
            weights=None, input_shape=(128, 128, 3), classes=1000, classifier_activation=None
        )
    layers = keras.layers
    image = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(image)
    for block in range(8):
        width = 32 if block < 4 else 64
        if block == 4:
            x = layers.Conv2D(width, 3, strides=2, padding="same")(x)
        y = layers.BatchNormalization()(x)
        y = layers.Conv2D(width, 3, padding="same", activation="relu")(y)
        x = layers.Add()([x, layers.Conv2D(width, 3, padding="same")(y)])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10)(x))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("small", "resnet50"), default="small")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batch", type=int, default=120)
    parser.add_argument("--splits", default="6,10,20", help="examples of a micro-batch")
    parser.add_argument("--keep", choices=("tape", "recompute", "compiled"), default="tape")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
