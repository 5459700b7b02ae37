"""A small model that tests of one process have in common, what cuts its run, and compares two."""

import contextlib
import csv
import functools

import keras
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfdist
from tfdist.training.engines import SynchronousEngine


class Cut(Exception):
    """The process ends here, as far as the training can tell."""


class AtStep(keras.callbacks.Callback):
    """Does something once so many steps are done; cuts the run, if not said otherwise."""

    def __init__(self, step, act=None):
        super().__init__()
        self.step, self.act = step, act or self.cut

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer._iterations.numpy() == self.step:
            self.act()

    def cut(self):
        raise Cut


class OwnStep:
    """A training step of the user's own; a test says what is special in it."""

    def loss_of(self, data):
        x, y = data
        return self.compute_loss(x, y, self(x, training=True))

    def update(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)

    def logs_of(self, loss, data):
        return {"mine": loss}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        self.update(tape.gradient(loss, self.trainable_variables))
        return self.logs_of(loss, data)


class Tracked(OwnStep):
    """Keeps its loss in a tracker, as in Keras' guide."""

    def compile(self, *arguments, **options):
        super().compile(*arguments, **options)
        self.tracker = keras.metrics.Mean(name="tracked")

    def logs_of(self, loss, data):
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


def classifier(strategy, optimizer, *, inputs=4, rate=0.5, classes=3):
    """Two layers with BatchNormalization and Dropout, the same in every process."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((inputs,)), layers.Dense(8, activation="relu"),
             layers.BatchNormalization(), layers.Dropout(rate),
             layers.Dense(classes, dtype="float32")]
        )  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def sequential(
    strategy, *layers, kind=keras.Sequential, inputs=(4,), optimizer="sgd", loss="mse", **compiled
):
    """A model in a strategy's scope; its layers, and maybe the optimizer, are made there."""
    with strategy.scope():
        model = kind([keras.Input(inputs), *(make() for make in layers)])
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, **compiled)
    return model


def linear(strategy, **options):
    """One layer of one unit."""
    return sequential(strategy, functools.partial(keras.layers.Dense, 1), **options)


def around(optimizer):
    """An optimizer that has another one: MultiOptimizer, or an older one before Keras 3.15."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer))


def trained(strategy, make, x, y=None, **options):
    """A model that tfdist has trained under a strategy, or Keras without one, and its logs."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make()
    fit = functools.partial(tfdist.fit, model) if strategy else model.fit
    options = {"epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model, fit(x, y, **options).history


def bits(model):
    """What a run ends with: weights, and all that the optimizer has."""
    return [v.numpy().tobytes() for v in [*model.weights, *model.optimizer.variables]]


def difference(one, other):
    """The largest difference between the weights of two models; NaN where one has that."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return float(np.max([np.abs(a - b).max() for a, b in pairs]))


def noted_ranges(patch):
    """The ranges of training steps that the engine is asked to run from now on."""
    seen = []
    run = SynchronousEngine.run

    def noting(self, program, first, last, **kwargs):
        if program.training:
            seen.append((first, last))
        return run(self, program, first, last, **kwargs)

    patch.setattr(SynchronousEngine, "run", noting)
    return seen


def written(folder):
    """What callbacks have left in a folder: models, lines of CSV, and scalars of TensorBoard."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".keras":
            model = keras.saving.load_model(path)
            found[name] = [int(model.optimizer.iterations.numpy()), *model.get_weights()]
        elif path.suffix == ".csv":
            rows = csv.DictReader(path.read_text().splitlines())
            found[name] = [{key: float(value) for key, value in row.items()} for row in rows]
        elif path.is_dir():
            events = EventAccumulator(str(path), size_guidance={"tensors": 0}).Reload()
            for tag in events.Tags()["tensors"]:
                points: list[tuple[int, np.ndarray]] = []
                for event in events.Tensors(tag):
                    # As TensorBoard: events of a resumed run replace those from their step on.
                    points = [point for point in points if point[0] < event.step]
                    points.append((event.step, tf.make_ndarray(event.tensor_proto)))
                scalars = [(s, float(v)) for s, v in points if v.dtype == "f" and v.ndim == 0]
                found |= {f"{name} {tag}": scalars} if scalars else {}
    return found
