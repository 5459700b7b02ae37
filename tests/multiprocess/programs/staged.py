"""A pipeline job that does what its tests look at; each task writes what it saw.

Arguments: where to write, and what it does, several one after the other with a comma between:
``fits`` and ``plain`` (without statistics of batches) train, evaluate and predict; ``compiled``
(and cut by measured times) and ``scales`` (the loss, up to overflows) train; ``sums`` sums losses,
accumulates gradients and keeps a ledger;
``tries`` finds cut and size of micro-batches by measuring, and keeps them in checkpoints;
``saves`` keeps checkpoints, and ``kills-K`` does too, and in its first attempt task K ends itself;
``looks`` evaluates in the middle of each epoch;
``shapes`` trains models of every shape of graph, evaluates them and saves them.
"""

import functools
import json
import logging
import os
import pathlib
import signal
import sys
from dataclasses import replace

import keras
import numpy as np

import tfdist
from tests import graphs
from tests.tools.ledger import Ledger
from tfdist.strategy.job import current_job
from tfdist.strategy.pipeline_setup import PipelineOptions

OUT, ALL = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
DOES = ALL[0]
STAGES = int(os.environ["STAGES"])
random = np.random.default_rng(0)
X = random.random((26, 5)).astype("float32")
Y = random.integers(0, 3, (26,))
WEIGHTS = random.random(26).astype("float32")
L = keras.layers
MEASURED = ("compiled", "tries", "shapes")
CUTS = {1: None, 2: ["adds"], 3: ["dropout0", "adds"]}


class AddsLoss(L.Layer):
    """Passes on what it gets; its mean of squares is a loss, and its mean a metric."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        self.seen.update_state(x)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def staged_model():
    """Weights that each task draws by itself: the chief's are to count."""
    layers = [
        L.Dense(6, activation="relu", kernel_regularizer="l2", name="d0"),
        L.Dropout(0.3, name="dropout0"),
        L.Dense(6, activation="relu", name="d1"),
        L.LayerNormalization(name="norm") if DOES == "plain" else L.BatchNormalization(name="norm"),
        AddsLoss(name="adds"),
        L.Dropout(0.2, name="dropout1"),
        L.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input((5,)), *layers])
    optimizer = keras.optimizers.AdamW(
        0.01, weight_decay=0.02, global_clipnorm=0.5, use_ema=True, ema_momentum=0.9,
        gradient_accumulation_steps=3 if DOES == "sums" else None,
    )  # fmt: skip
    if DOES == "scales":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**127)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum" if DOES == "sums" else "sum_over_batch_size"
        ),
        metrics=["accuracy"],
        weighted_metrics=["sparse_categorical_crossentropy"],
    )
    return model


def nbytes(variables):
    """Bytes that variables hold at this moment."""
    return sum(np.asarray(v.value).nbytes for v in variables)


class Dies(keras.callbacks.Callback):
    """Ends a task in the second epoch, once; notes what a task holds while steps run."""

    def on_train_batch_end(self, batch, logs=None):
        variables = (self.model.weights, self.model.optimizer.variables)
        held["weights"], held["slots"] = map(nbytes, variables)
        job, (_, _, task) = current_job(), DOES.partition("-")
        mine = job.name == f"worker-{task}" and job.config.options.attempt == 1
        if mine and self.model.optimizer.iterations > 4 and batch >= 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Looks(keras.callbacks.Callback):
    """Evaluates between two steps of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if DOES == "looks" and batch == 1:
            looked.append(self.model.evaluate(X[:7], Y[:7], batch_size=8, verbose=0))


def rate(epoch, before):
    return before * 0.8


def trains(strategy):
    """Trains, evaluates and predicts; writes what this task saw."""
    held.clear()
    looked.clear()
    keras.utils.set_random_seed(1 if tfdist.is_chief() else 99)
    with strategy.scope():
        model = staged_model()
    callbacks = [tfdist.Run(seed=3), keras.callbacks.LearningRateScheduler(rate), Dies(), Looks()]
    if DOES.partition("-")[0] in ("saves", "kills", "tries"):
        callbacks.append(tfdist.BackupAndRestore(OUT / "checkpoints", save_freq=3))
    weights = WEIGHTS * (20 if DOES == "scales" else 1)
    if DOES == "sums":
        callbacks.append(Ledger(OUT / "ledger"))
    if DOES == "looks":  # and leaves the model as it was, whose optimizer is not built
        tfdist.find_learning_rate(model, X, Y, 8, steps=10)
    options = {
        "x": X, "y": Y, "sample_weight": weights, "batch_size": 8, "epochs": 2, "verbose": 0,
        "callbacks": callbacks, "validation_data": (X[:7], Y[:7]),
    }  # fmt: skip
    # By both names, whose results are compared with those of one process.
    explicit = DOES == "compiled"
    history = tfdist.fit(model, **options) if explicit else model.fit(**options)
    seen = {
        "history": history.history,
        "weights": [w.tolist() for w in model.get_weights()],
        "slots": [np.asarray(v.value).tolist() for v in model.optimizer.variables]
        if tfdist.is_chief()
        else [],
        "held": held,
        "looked": looked,
        "chosen": current_job().stages.chosen.state(),
    }
    if DOES in ("fits", "plain"):
        seen["evaluated"] = model.evaluate(X, Y, batch_size=8, verbose=0)
        seen["predicted"] = model.predict(X, batch_size=8, verbose=0).tolist()
    (OUT / f"{DOES}-{STAGES}-{current_job().name}.json").write_text(json.dumps(seen))


def trains_shapes(strategy):
    """Trains a model of each shape, evaluates it and predicts; the chief saves it.

    Each second one has the other schedule, recomputes activations and has fused kernels.
    """
    seen = {"history": {}, "evaluated": {}, "predicted": {}}
    place = current_job().stages
    ways = [place.options, replace(place.options, schedule="gpipe", keep="recompute")]
    for number, (name, make) in enumerate(graphs.SHAPES.items()):
        object.__setattr__(place, "options", ways[number % 2])
        keras.utils.set_random_seed(1 if tfdist.is_chief() else 99)
        with strategy.scope():
            model = make()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", keras.tree.map_structure(lambda _, loss=loss: loss, model.output))
        data, flags = graphs.batches_of(model, 14, batch=8), {"verbose": 0}
        fit = functools.partial(tfdist.fit, fused_kernels=bool(number % 2), seed=3, **flags)
        seen["history"][name] = fit(model, data).history["loss"]
        seen["evaluated"][name] = keras.tree.flatten(tfdist.evaluate(model, data, **flags))
        predicted = keras.tree.flatten(tfdist.predict(model, data, **flags))
        seen["predicted"][name] = [output.tolist() for output in predicted]
        if tfdist.is_chief():
            model.save(OUT / f"{name}-{STAGES}.keras")
    (OUT / f"shapes-{STAGES}-{current_job().name}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    held, looked = {}, []
    options = PipelineOptions(
        split_size="auto" if DOES == "tries" else 4,
        cut="auto" if DOES in MEASURED else CUTS[STAGES],
        keep="compiled" if DOES == "compiled" else "recompute" if STAGES == 3 else "tape",
        schedule="gpipe" if STAGES == 3 else "1f1b",
    )
    strategy = tfdist.make_strategy(pipeline=options)
    for DOES in ALL:  # what is defined above reads it
        (trains_shapes if DOES == "shapes" else trains)(strategy)
