"""The job that chaos is done to: small, but with everything in it that a resume could get wrong.

Dropout, BatchNormalization, Adam, augmentation, validation, a learning rate that changes, the
callbacks that keep a state, checkpoints by steps and by time. Its chief ends with a file that says
how it all came out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from in_task import InTask
from marks import Marks

if TYPE_CHECKING:
    from tfdist.training.epochs import EpochPlan

SEED = 11
BATCH = 24
VARIANTS = ("plain", "accumulation", "mixed_bfloat16", "sharded", "auto", "exact")
TIMINGS = ("examples_per_second",)


def main() -> None:
    args = _arguments()
    config = json.loads(os.environ["TF_CONFIG"])
    task = "{type}-{index}".format(**config["task"])
    marks = Marks(args.out, task=task, attempt=config["tfdist"]["attempt"])
    marks.write("program")
    faults = InTask(args.out, task=task, marks=marks)
    faults.at_phase("import")
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    import tfdist

    marks.write("imported")
    faults.at_phase("rendezvous")
    cut = ["normalization"] if args.variant == "exact" else "auto"
    strategy = tfdist.make_strategy(pipeline=tfdist.PipelineOptions(split_size=6, cut=cut))
    marks.write("joined")
    faults.watch_writes({"checkpoints": args.checkpoints, "best": args.out / "best"})
    verdict = _train(args, strategy, marks=marks, faults=faults)
    if tfdist.is_chief():
        beside = args.out / "verdict.unfinished"
        beside.write_text(json.dumps(verdict))
        os.replace(beside, args.out / "verdict.json")
    marks.write("done", weights_sha256=verdict["weights_sha256"])
    tfdist.barrier()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--examples", type=int, required=True)
    return parser.parse_args()


def _train(args: argparse.Namespace, strategy: Any, *, marks: Marks, faults: InTask) -> Any:
    import keras

    import tfdist
    from tfdist.outputs.run_directory import RunDirectory
    from tfdist.strategy import current_job
    from tfdist.training.epochs import EpochPlan

    if args.variant == "mixed_bfloat16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    length = tfdist.VirtualEpochs(total_examples=args.examples, checkpoints=8)
    plan = EpochPlan.from_boundaries(length.boundaries(), global_batch_size=BATCH)
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = _model(args.variant, total_steps=plan.total_steps)
    training, validation = _data()
    directory, choices = RunDirectory(args.out), args.checkpoints / "choices.json"
    if choices.exists():  # of a pipeline
        current_job().stages.chosen.take(json.loads(choices.read_text()))
    callbacks = _callbacks(args, plan=plan, directory=directory, marks=marks, faults=faults)
    history = tfdist.fit(
        model, training, batch_size=BATCH, verbose=0, callbacks=callbacks,
        validation_data=validation, virtual_epochs=length, seed=SEED,
        sharded_optimizer=args.variant == "sharded",
    )  # fmt: skip
    return _verdict(args, model, callbacks, history=history.history, directory=directory)


def _model(variant: str, *, total_steps: int) -> Any:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu", name="convolution"),
            layers.BatchNormalization(name="normalization"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dropout(0.2),
            layers.Dense(4, dtype="float32", name="logits"),
        ]
    )
    rate: Any = 3e-3
    options = {}
    if variant == "accumulation":
        rate = keras.optimizers.schedules.CosineDecay(
            3e-4, total_steps - 9, warmup_target=3e-3, warmup_steps=9
        )
        options = {"gradient_accumulation_steps": 3}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate, **options), loss, metrics=["accuracy"])
    return model


def _data() -> tuple[Any, Any]:
    import numpy as np

    from tfdist.data.arrays import ArraySource
    from tfdist.data.augment import Compose, RandomCrop, RandomFlip

    random = np.random.default_rng(SEED)
    images = random.normal(size=(700, 8, 8, 1)).astype("float32")
    means = images[:, :4, :4].mean((1, 2, 3)), images[:, 4:, 4:].mean((1, 2, 3))
    labels = (means[0] > 0) * 2 + (means[1] > 0)
    augmented = Compose([RandomCrop(padding=1), RandomFlip("horizontal")])
    training = ArraySource(images[:500], labels[:500], transform=augmented)
    return training, (images[500:], labels[500:])


def _callbacks(
    args: argparse.Namespace, *, plan: EpochPlan, directory: Any, marks: Marks, faults: InTask
) -> list[Any]:
    import keras

    import tfdist
    from tfdist.app.run import RunReporter

    (args.out / "best").mkdir(exist_ok=True)
    own = keras.callbacks
    callbacks = [own.EarlyStopping("val_loss", patience=30, restore_best_weights=True)]
    if args.variant != "accumulation":  # there the rate is a function of the step
        callbacks += [
            own.ReduceLROnPlateau("val_loss", patience=1, factor=0.6),
            own.LearningRateScheduler(lambda epoch, rate: rate * 0.95),
        ]
    return [
        *callbacks,
        tfdist.ModelCheckpoint(args.out / "best" / "best.keras", save_best_only=True),
        RunReporter(directory, plan),
        _told_of(plan, marks=marks, faults=faults),
        _timed_backup(args, marks=marks, faults=faults),
    ]


def _told_of(plan: EpochPlan, *, marks: Marks, faults: InTask) -> Any:
    import keras

    class Told(keras.callbacks.Callback):
        """Marks each range of steps, and lets faults happen at them."""

        once_a_range = True
        epoch = 0
        begun = False

        def next_step(self, step: int) -> int | None:
            ahead: int | None = faults.next_step(step)
            return ahead

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = plan.step_starts[self.epoch] + batch + 1
            marks.write("range" if self.begun else "first_step", step=step)
            self.begun = True
            faults.at_step(step)

        def on_test_begin(self, logs: Any = None) -> None:
            faults.at_phase("validate")

    return Told()


def _timed_backup(args: argparse.Namespace, *, marks: Marks, faults: InTask) -> Any:
    import tfdist

    class Backup(tfdist.BackupAndRestore):
        """Tells how long reading and restoring took."""

        def saved(self) -> Any:
            began_s = time.monotonic()
            result = super().saved()
            marks.write("read", took_s=time.monotonic() - began_s)
            return result

        def restore(self, *args: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            result = super().restore(*args, **options)
            marks.write("restored", took_s=time.monotonic() - began_s)
            return result

        def save(self, *args: Any, **options: Any) -> Any:
            faults.at_phase("save")
            return super().save(*args, **options)

    if args.variant == "auto":
        return Backup(args.checkpoints, save_freq="auto", mtbf_s=10.0)
    return Backup(args.checkpoints, save_freq=6, every_s=0.2, exact=args.variant == "exact")


def _verdict(
    args: argparse.Namespace, model: Any, callbacks: list[Any], *, history: Any, directory: Any
) -> dict[str, Any]:
    """Everything that must not depend on what happened on the way, and no time in it."""
    import keras

    import tfdist
    from tfdist.checkpoint.callback_state import get_states
    from tfdist.checkpoint.model_state import state_sha256, weights_sha256
    from tfdist.strategy import current_job
    from tfdist.strategy.group import whole

    state = state_sha256(model, read=whole)
    verdict = {"weights_sha256": weights_sha256(model), "state_sha256": state}
    job = current_job()
    if job is not None and job.stages is not None:
        verdict["choices"] = job.stages.chosen.state()
    if not tfdist.is_chief():
        return verdict
    best = keras.models.load_model(args.out / "best" / "best.keras", compile=False)
    lines = [
        {name: value for name, value in line.items() if name not in TIMINGS}
        for line in directory.read_metrics()
    ]
    return {
        **verdict,
        "best_sha256": weights_sha256(best),
        "history": {name: [repr(v) for v in values] for name, values in history.items()},
        "callbacks": {name: repr(state) for name, state in get_states(callbacks).items()},
        "metrics": lines,
    }


if __name__ == "__main__":
    main()
