"""Models x data x optimizers x losses x replicas: each cell ends alike.

A cell is trained by Keras itself, or by one device where Keras has no such case, and by replicas.
Weights, the optimizer's variables and logs are compared. A failure has the name of its cell.
Tasks of several processes are compared in tests/multiprocess, by the models of its `zoo`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests import models
from tests.models import OwnStep, Tracked, difference
from tests.multiprocess.programs import zoo
from tests.multiprocess.programs.without_call import AutoEncoder
from tests.refusals import refusal

RNG = np.random.RandomState(0)
X = RNG.randn(60, 6).astype("float32")
X[1::3] *= 3
Y = RNG.randn(60, 1).astype("float32")
TOKENS = RNG.randint(1, 20, (60, 5))
TOKENS[:, 3:] *= RNG.randint(0, 2, (60, 2))
TOKENS[::4, 1:] = 0
TOKENS[40:48] = 0  # batches in which a replica, or all of them, have nothing unmasked
NEXT = RNG.randint(0, 4, (60, 5))
WEIGHTS = RNG.rand(60, 5).astype("float32")

GUIDE_X = zoo.X[:52]
GUIDE_Y = GUIDE_X @ np.linspace(-1, 1, 6, dtype="float32")[:, None]

SMALL = np.random.default_rng(0)
ROWS = SMALL.normal(size=(20, 5)).astype("float32")
TARGETS = SMALL.normal(size=(20, 1)).astype("float32")
CLASSES = SMALL.integers(0, 3, size=20)
PER_ROW = SMALL.uniform(0.2, 2.0, size=20).astype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A model and its data; `fit` has more options of `fit`."""

    make: Callable[[], keras.Model]
    x: Any
    y: Any = None
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: tuple[type[keras.callbacks.Callback], ...] = ()
    beside_keras: bool = False
    replicas: tuple[int, ...] = (2,)
    tolerance: float = 1e-6
    rtol: float = 1e-5
    atol: float = 1e-7


class Called(keras.callbacks.Callback):
    """Keeps the logs of each batch, epoch and validation."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("batch", batch, dict(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch", epoch, dict(logs)))

    def on_test_end(self, logs=None):
        self.calls.append(("test", 0, dict(logs)))


def trained(strategy, cell):
    """Return the model that `strategy` trains, or Keras if there is none, and the calls."""
    called = Called()
    callbacks = [*(callback() for callback in cell.callbacks), called]
    fit = {**cell.fit, "callbacks": callbacks}
    if strategy is None:
        fit.pop("seed")
    model, _ = models.trained(strategy, cell.make, cell.x, cell.y, **fit)
    calls = called.calls if cell.beside_keras else [c for c in called.calls if c[0] == "epoch"]
    return model, calls


def require_alike(strategies, cell):
    """Train a cell on each number of replicas, and compare all that is left."""
    expected, calls = trained(None if cell.beside_keras else strategies[1], cell)
    for number in cell.replicas:
        model, seen = trained(strategies[number], cell)
        assert difference(model, expected) < cell.tolerance
        pairs = zip(model.optimizer.variables, expected.optimizer.variables, strict=True)
        for one, other in pairs:
            rtol = 1e-7 if cell.beside_keras else 1e-6
            np.testing.assert_allclose(one, other, rtol=rtol, atol=cell.tolerance)
        assert [call[:2] for call in seen] == [call[:2] for call in calls]
        for (*_, logs), (*_, wanted) in zip(seen, calls, strict=True):
            assert list(logs) == list(wanted)
            for name, value in logs.items():
                near = {"rtol": cell.rtol, "atol": cell.atol, "err_msg": name}
                np.testing.assert_allclose(value, wanted[name], **near)


# Losses of several terms


def of(kind=keras.Sequential, parts=lambda: [layers.Dense(1)], loss=None, *, rate=0.01):
    """Return the function that makes a model of a kind."""

    def make():
        model = kind([keras.Input((6,)), *parts()])
        model.compile(keras.optimizers.SGD(rate), loss)
        return model

    return make


class AddsByHand(keras.Sequential):
    """A mean by hand beside the loss of `compile`, as in guides on autoencoders."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.5 * tf.reduce_mean(tf.abs(y_pred))


class LearnsItsWeights(keras.Sequential):
    """A loss that is weighted by a variable, as for several tasks."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        log_variance = self.layers[0].bias[0]
        return keras.ops.exp(-log_variance) * loss + log_variance


def synchronized():
    dense = layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    return dense, layers.BatchNormalization(synchronized=True)


MEAN, SUM = keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError(reduction="sum")


class DescendsByHand(OwnStep, keras.Sequential):
    """Updates its weights without an optimizer."""

    def update(self, gradients):
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)


class ByTensorFlow(Tracked, keras.Sequential):
    """Losses as in TensorFlow's guide to custom training."""

    global_batch_size = None

    def loss_of(self, data):
        x, y = data
        errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
        size = self.global_batch_size
        loss = tf.nn.compute_average_loss(errors, global_batch_size=size)
        return loss + tf.nn.scale_regularization_loss(self.losses)


class BySize(ByTensorFlow):
    global_batch_size = 9


def penalized():
    return [layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))]


# Masks and weights


def entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def one_number(y_true, y_pred):
    """A mean that masks do not weight."""
    entropies = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return keras.ops.mean(entropies)


def tagger(losses):
    """A class for each token that is not 0, by each of several losses, by heads of their own."""

    def make():
        x = keras.Input((5,), dtype="int32")
        h = layers.Embedding(20, 8, mask_zero=True)(x)
        model = keras.Model(x, {name: layers.Dense(4, name=name)(h) for name in losses})
        weights = {name: 1.0 / number for number, name in enumerate(losses, 1)}
        metrics = dict.fromkeys(losses, "accuracy")
        optimizer = keras.optimizers.SGD(0.5)
        model.compile(optimizer, losses, loss_weights=weights, metrics=metrics)
        return model

    return make


# Losses in one tensor: of each example, or means


class SummedByTheTape(Tracked, keras.Sequential):
    """A loss per example, as of published siamese networks; with a mean; a mean in another call."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            errors = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
            mean = tf.reduce_mean(self(x, training=True) ** 2)
        for target in (errors, [errors, mean], mean):
            self.update(tape.gradient(target, self.trainable_weights))
        return self.logs_of(errors, data)


class PerExample(layers.Layer):
    """Adds a loss of each example, as published models of OCR do."""

    def call(self, x):
        self.add_loss(tf.reduce_sum((x - 1.0) ** 2, -1, keepdims=True))
        return x


def per_example():
    return layers.Dense(1), PerExample()


class ByTheTape(Tracked, keras.Sequential):
    """The gradient of what a function makes of targets and predictions."""

    def __init__(self, layers, loss):
        super().__init__(layers)
        self.loss_by_hand = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_by_hand(y, self(x, training=True))
        self.update(tape.gradient(loss, self.trainable_weights))
        mean = tf.add_n([tf.reduce_mean(part) for part in tf.nest.flatten(loss)])
        return self.logs_of(mean, data)


class ByKerasStep(keras.Sequential):
    """A loss of its own, of which Keras' step takes the gradient."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return means(y, y_pred)


def means(y, p):
    return tf.reduce_mean((p - y) ** 2, 0)


def in_python(y, p):
    return tf.py_function(means, [y, p], tf.float32)


def of_each(y, p):
    return tf.reduce_mean((p - y) ** 2, -1)


def by_tape(loss):
    return of(functools.partial(ByTheTape, loss=loss), lambda: [layers.Dense(4)])


class AddsForEachUnit(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2, 0))
        return x


def unmasked(y, p):
    return tf.boolean_mask(of_each(y, p), p[:, 0] > 0)


class TwoMeans(layers.Layer):
    def call(self, x):
        self.add_loss(tf.stack([tf.reduce_mean(x**2), tf.reduce_mean(tf.abs(x))]))
        return x


class OfBags(Tracked, keras.Model):
    """A loss per example, of data that come ragged or sparse."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(20, 4)
        self.embed.build((None, None))

    def call(self, x):
        return tf.reduce_mean(self.embed(x.to_tensor() if hasattr(x, "to_tensor") else x), 1)

    def train_step(self, x):
        x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(self(x) ** 2, -1)
        self.update(tape.gradient(losses, self.trainable_variables))
        return self.logs_of(losses, x)


# Losses that layers add


class AddsItsSquares(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


class ReadsAfterTheUpdate(Tracked, keras.Sequential):
    """As the published VQ-VAE, whose metric is what its layers have added."""

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self(x, training=True) - y) ** 2) + sum(self.losses)

    def logs_of(self, loss, data):
        return super().logs_of(sum(self.losses), data)


# Models beside Keras


def dense(optimizer="sgd", *parts, **options):
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, "tanh", name="a"), *parts, layers.Dense(1, name="b")]
    )
    model.compile(optimizer, options.pop("loss", "mse"), **options)
    return model


class Totals(keras.metrics.Metric):
    """A metric of several results."""

    def __init__(self):
        super().__init__(name="totals")
        self.totals = self.add_weight(shape=(2,), initializer="zeros", name="totals")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.totals.assign_add(ops.stack([ops.sum(y_true), ops.sum(y_pred)]))

    def result(self):
        return {"true": self.totals[0], "predicted": self.totals[1]}


class LossLayer(layers.Layer):
    """The layer of Keras' guide that adds a loss which Keras has computed."""

    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(ops.zeros_like(x), x))
        return x


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


class StopAtOnce(keras.callbacks.Callback):
    """The epoch that it stops has one step."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


class Parts(OwnStep, keras.Sequential):
    """A step that takes a dict apart, as for TFDS, and a loss of `compile`."""

    def loss_of(self, data):
        return self.compute_loss(y=data["label"], y_pred=self(data["image"], training=True))


class Itself(OwnStep, keras.Sequential):
    """An autoencoder, whose targets are its inputs."""

    def loss_of(self, data):
        return self.compute_loss(y=data, y_pred=self(data, training=True))


class OfOneBatch(keras.Model):
    """Takes a ragged tensor, which a symbol is not."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = layers.Embedding(6, 4), layers.Dense(1)

    def call(self, x):
        return self.out(ops.mean(self.embed(x.to_tensor(shape=[None, 3])), 1))


class Helped(keras.Model):
    """With a head that training alone uses."""

    def __init__(self):
        super().__init__()
        self.body, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        self.head = layers.Dense(1)

    def call(self, x, training=False):
        x = self.body(x)
        return self.out(x) + self.head(x) if training else self.out(x)


def optimizers_of_parts():
    others = {"a/.*": keras.optimizers.Adam(0.01, use_ema=True)}
    first = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(first, others))


def scaled():
    adam = keras.optimizers.Adam(0.01)
    return keras.optimizers.LossScaleOptimizer(adam, initial_scale=64.0, dynamic_growth_steps=4)


def with_metrics():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, "sigmoid")])
    auc, f1 = keras.metrics.AUC(20, name="auc"), keras.metrics.F1Score(threshold=0.5)
    weighted = [keras.metrics.AUC(20, curve="PR", name="pr")]
    metrics = {"metrics": [auc, f1, Totals(), "mae"], "weighted_metrics": weighted}
    model.compile("adam", "binary_crossentropy", **metrics)
    return model


def several_outputs():
    x = keras.Input((5,))
    parts = (("a", 1, None), ("b", 3, "softmax"), ("c", 2, None))
    model = keras.Model(x, {n: layers.Dense(u, f, name=n)(x) for n, u, f in parts})
    losses = {"a": "mse", "b": "sparse_categorical_crossentropy", "c": None}
    model.compile("adam", losses, metrics={"b": ["accuracy"]})
    return model


def own(kind, units=1, loss="mse"):
    def make():
        model = kind([keras.Input((5,)), layers.Dense(units)])
        model.compile("adam", loss, metrics=None if loss else ["mae"])
        return model

    return make


def words():
    looked_up = layers.TextVectorization(output_sequence_length=3, vocabulary=["a", "b", "c"])
    parts = [keras.Input((), dtype="string"), looked_up, layers.Embedding(6, 2), layers.Flatten()]
    model = keras.Sequential([*parts, layers.Dense(1)])
    # Not Adam: of rows that repeat Keras squares each slice; see test_repeated_rows.
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def averaged():
    return dense(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5))


def without_call():
    model = AutoEncoder()
    model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"])
    return model


def of_one_batch():
    model = OfOneBatch()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])  # its rows repeat, too
    return model


def helped():
    model = Helped()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def tokens():
    rows = tf.ragged.constant([[1, 2, 3], [3], [4, 5], [2]] * 5, dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((rows, TARGETS)).batch(4)


# Steps, losses and figures of the user's own


class Guide(Tracked, keras.Sequential):
    """The custom step of Keras' guide: a loss object, trackers, and what `metrics` lists."""

    def compile(self, optimizer):
        super().compile(optimizer=optimizer)
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.criterion = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def loss_of(self, data):
        x, y = data
        return self.criterion(y, self(x, training=True))

    def logs_of(self, loss, data):
        x, y = data
        self.error.update_state(y, self(x))
        super().logs_of(loss, data)
        return {metric.name: metric.result() for metric in self.metrics}


class MoreFigures(keras.Sequential):
    """With a figure that is no metric's, as Keras' guide has it."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        figures = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**figures, "error": tf.reduce_mean(tf.abs(y - y_pred))}


def more_figures():
    model = MoreFigures([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class Halves(OwnStep, keras.Model):
    """Steps of its own and no `call`, as the autoencoders of Keras' guides."""

    def __init__(self, *, built=True):
        super().__init__()
        self.first, self.second = layers.Dense(3, name="first"), layers.Dense(1)
        if built:
            self.first.build((None, 6))
            self.second.build((None, 3))
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self.second(self.first(x)) - y) ** 2)

    def logs_of(self, loss, data):
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        return self.logs_of(self.loss_of(data), data)


class Alternating(Halves):
    """Two optimizers that only its step uses, as in a GAN."""

    def compile(self, *arguments, **options):
        super().compile(*arguments, **options)
        self.of_first = keras.optimizers.Adam(0.01)
        self.of_second = keras.optimizers.SGD(0.05, momentum=0.9)

    def update(self, gradients):
        self.of_first.apply(gradients[:2], self.first.trainable_variables)
        self.of_second.apply(gradients[2:], self.second.trainable_variables)


class Headed(OwnStep, keras.Model):
    """With a head that only its step calls."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.body(x)

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self.head(self(x)) - y) ** 2)


class Siamese(Halves):
    """Its `call` takes pairs, of which a batch gives one as x and the other as y."""

    def call(self, pair):
        return self.second(self.first(pair[0])) - self.second(self.first(pair[1]))

    def loss_of(self, data):
        return tf.reduce_mean(self(data) ** 2)


def compiled(kind, **options):
    model = kind(**({"built": False} if options.pop("unbuilt", False) else {}))
    model.compile(keras.optimizers.SGD(0.05), **options)
    return model


def own_guide(kind):
    def make():
        model = kind([keras.Input((6,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05))
        return model

    return make


# Models of several replicas beside one device


def over_rows():
    """A layer over sequences: the shape of its kernel's gradient is known at run time alone."""
    model = keras.Sequential([keras.Input((4, 6)), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def of_bags():
    model = OfBags()
    model.compile(keras.optimizers.SGD(0.01))
    return model


def bags(of_tokens):
    return tf.data.Dataset.from_tensor_slices(of_tokens(TOKENS[:36])).batch(9)


def distiller(loss):
    teacher, student = (
        keras.Sequential([keras.Input((6,)), layers.Dense(4, "softmax")]) for _ in "ts"
    )
    model = keras.distillation.Distiller(
        teacher, student, keras.distillation.LogitsDistillation(), student_loss_weight=0.7
    )
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model


def embedding_of_any_length(optimizer):
    inputs, embedding = keras.Input((None,), dtype="int64"), layers.Embedding(12, 4)
    both = [layers.GlobalAveragePooling1D()(embedding(t)) for t in (inputs, inputs + 1)]
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(both)))
    model.compile(optimizer(), "mse")
    return model


def any_length():
    """Sequences of 1 to 5 tokens; of the last batch a replica gets none."""
    targets = GUIDE_Y[np.arange(49) % len(GUIDE_Y)]
    numbers = tf.data.Dataset.range(49)
    rows = numbers.map(lambda i: (tf.range(1 + i % 5) + i % 7, tf.gather(targets, i)))
    return rows.padded_batch(8)


def in_half_precision():
    """Return a model whose gradients do not overflow, on any number of replicas."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    keras.config.set_dtype_policy("float32")
    sgd = keras.optimizers.SGD(0.01)
    model.compile(keras.optimizers.LossScaleOptimizer(sgd, initial_scale=16.0), "mse")
    return model


def squares():
    yield from (layers.Dense(4), AddsItsSquares())
    yield from (layers.BatchNormalization(synchronized=True), layers.Dense(1))


# The table


FIELDS = {field.name for field in dataclasses.fields(Cell)}


def one_device(make, x=X[:55], y=Y[:55], *, seed=3, **options):
    """Return a cell beside one device; options that are no fields of a cell are of `fit`."""
    fields = {name: value for name, value in options.items() if name in FIELDS}
    fit = {name: value for name, value in options.items() if name not in FIELDS}
    fit = {"batch_size": 9, "shuffle": True, "seed": seed, **fit}
    return Cell(make=make, x=x, y=y, fit=fit, **fields)


def keras_too(make, x=ROWS, y=TARGETS, **options):
    """Return a cell beside Keras, whose batches come in order."""
    near = {"rtol": 1e-4, "atol": 1e-6, "batch_size": 6, "epochs": 3, "shuffle": False}
    return one_device(make, x, y, seed=None, beside_keras=True, **near | options)


GUIDED = {"batch_size": 17, "shuffle": False, "rtol": 1e-5, "atol": 1e-5}


def masked(examples, batch_size):
    losses = {"masked": entropy(), "ignoring": entropy(ignore_class=1), "number": one_number}
    x, y = TOKENS[:examples], NEXT[:examples]
    y = {name: np.roll(y, n, 0) for n, name in enumerate(losses)}
    return one_device(tagger(losses), x, y, validation_data=(x, y), batch_size=batch_size)


def masked_and_weighted():
    losses = {"mean": entropy(), "weighted": entropy(reduction="mean_with_sample_weight")}
    losses["number"] = one_number
    y, weights = dict.fromkeys(losses, NEXT), dict.fromkeys(losses, WEIGHTS)
    return one_device(tagger(losses), TOKENS, y, sample_weight=weights)


def per_example_cells(name, make, **validated):
    """Yield cells with a last batch of 1, and with all batches alike."""
    for examples, batch_size in ((55, 9), (48, 8)):
        x, y = X[:examples], Y[:examples]
        yield (
            f"{name}, {batch_size} a step",
            one_device(make, x, y, batch_size=batch_size, **validated),
        )


def of_means(make, batch_size=8, **options):
    return one_device(make, X[:48], Y[:48], batch_size=batch_size, **options)


VALIDATED = {"validation_data": (X[:19], Y[:19])}
STACK = np.stack([zoo.X, zoo.X[::-1], zoo.X**2, zoo.X - 1], 1)[:21]
SUM_OF_ALL = keras.losses.MeanSquaredError(reduction="sum")
ADDED = of(parts=lambda: [layers.Dense(4), AddsForEachUnit(), layers.Dense(1)], loss="mse")
ALONG = tf.data.Dataset.from_tensor_slices
# fmt: off
CELLS = {
    # Optimizers; every one by itself: test_equivalence
    "several optimizers": keras_too(lambda: dense(optimizers_of_parts()), replicas=(1, 2)),
    "loss scaling": keras_too(lambda: dense(scaled()), replicas=(1, 2)),
    "mixed precision": one_device(in_half_precision, tolerance=2e-3, rtol=1e-2),
    "averages in validation": keras_too(
        averaged, callbacks=(keras.callbacks.SwapEMAWeights,), validation_data=(ROWS, TARGETS)
    ),
    "a hundred steps": one_device(
        lambda: zoo.penalized("adamw_clipped"), zoo.X, zoo.Y, batch_size=8, epochs=13,
        replicas=(3,), tolerance=1e-5, rtol=1e-4,
    ),
    # Metrics
    "metrics with a state and of several results": keras_too(
        with_metrics, y=(TARGETS > 0).astype("float32"), sample_weight=PER_ROW,
        validation_split=0.3,
    ),
    "metrics of compile without a call": keras_too(
        without_call, ALONG(ROWS).batch(6), None, batch_size=None, replicas=(1, 2),
        validation_data=ALONG(ROWS).batch(6),
    ),
    "more figures": keras_too(
        more_figures, GUIDE_X[:48], GUIDE_Y[:48], replicas=(1, 2), epochs=2,
        **GUIDED, validation_data=(GUIDE_X[:32], GUIDE_Y[:32]),
    ),
    "trackers of the guide": one_device(own_guide(Guide), GUIDE_X, GUIDE_Y, **GUIDED),
    # Models and data
    # Batches of one size: under Keras the loss of an output is a mean over batches.
    "several outputs, one without a loss": keras_too(
        several_outputs, ROWS[:18], {"a": TARGETS[:18], "b": CLASSES[:18], "c": ROWS[:18, :2]},
        sample_weight=PER_ROW[:18],
    ),
    "strings": keras_too(words, tf.constant(["a b", "c x a"] * 10)),
    "no weights, and an epoch stopped at its begin": keras_too(
        dense, ALONG((ROWS, TARGETS)).batch(6).map(lambda x, y: (x, y, None)), None,
        batch_size=None, callbacks=(StopAtOnce,),
        validation_data=ALONG((ROWS, TARGETS)).batch(6).map(lambda x, y: (x, y, None)),
    ),
    "a step that takes a dict apart": keras_too(
        own(Parts), {"image": ROWS, "label": TARGETS}, None
    ),
    "a step whose targets are its inputs": keras_too(own(Itself, 5), ROWS, None),
    "built by a ragged batch": keras_too(
        of_one_batch, tokens(), None, batch_size=None, validation_data=tokens(),
    ),
    "layers that training alone uses": keras_too(helped, validation_data=(ROWS, TARGETS)),
    "no call": keras_too(
        lambda: compiled(Halves), GUIDE_X[:48], GUIDE_Y[:48], replicas=(1, 2), epochs=2,
        **GUIDED, validation_data=(GUIDE_X[:32], GUIDE_Y[:32]),
    ),
    "two optimizers that its step builds": keras_too(
        lambda: compiled(Alternating), GUIDE_X[:48], GUIDE_Y[:48], replicas=(1, 2), epochs=2,
        **GUIDED,
    ),
    # `call` takes more than x, and does without metrics of `compile`.
    "a call of pairs": keras_too(
        lambda: compiled(Siamese, weighted_metrics=[]), GUIDE_X[:48], GUIDE_X[48:0:-1],
        replicas=(1, 2), epochs=2, **GUIDED,
    ),
    "no call, built by the step": one_device(
        lambda: compiled(Halves, unbuilt=True), GUIDE_X[:48], GUIDE_Y[:48],
        **GUIDED | {"batch_size": 8},
    ),
    "gradients of unknown shape": one_device(
        over_rows, STACK, STACK[:, :, :2], batch_size=8, replicas=(3,)
    ),
    **{
        f"keras-team/keras#21069: rows of an embedding, {optimizer.__name__}": one_device(
            functools.partial(
                embedding_of_any_length, functools.partial(optimizer, rate, **options)
            ),
            any_length(), None, batch_size=None,
        )
        for optimizer, rate, options in (
            (keras.optimizers.SGD, 0.01, {"momentum": 0.9, "weight_decay": 0.1}),
            (keras.optimizers.Adam, 0.01, {"clipnorm": 1.0}),
        )
    },
    # Losses of several terms
    "a mean by hand beside a sum": one_device(of(AddsByHand, synchronized, SUM), **VALIDATED),
    "a loss by hand, beside Keras": keras_too(
        own(OwnLoss, loss=None), ROWS[:18], TARGETS[:18],
        validation_data=(ROWS[:12], TARGETS[:12]),
    ),
    "a loss that a layer has computed": keras_too(lambda: dense("sgd", LossLayer())),
    "weighted by a variable": one_device(of(LearnsItsWeights, synchronized, SUM), **VALIDATED),
    "no optimizer": one_device(of(DescendsByHand, loss="mse")),
    "TensorFlow's guide": one_device(of(ByTensorFlow, penalized)),
    "TensorFlow's guide and a size": one_device(of(BySize, penalized)),
    "activities": one_device(lambda: zoo.with_activities(shared=True), **VALIDATED),
    "distillation": one_device(
        lambda: distiller("sparse_categorical_crossentropy"), X, NEXT[:, 0]
    ),
    "losses read after the update": one_device(of(ReadsAfterTheUpdate, squares)),
    # The last step has one example: what stands in for the empty shares is not summed.
    "a sum": one_device(
        of(loss=SUM_OF_ALL, rate=0.001), zoo.X[:57], zoo.Y[:57], batch_size=8, epochs=1,
        replicas=(3,), validation_data=(zoo.X[:20], zoo.Y[:20]),
    ),
    # Masks and weights. Of 55 the last step has one example for two replicas; of 48 in batches of
    # 8, each has as many as the other at every step.
    "masks, 55 in batches of 9": masked(55, 9),
    "masks, 48 in batches of 8": masked(48, 8),
    "masks and weights": masked_and_weighted(),
    "a mean with weights": one_device(
        of(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")), X, Y,
        sample_weight=WEIGHTS[:, 0] ** 4,
    ),
    # A loss per example is a sum
    **dict(per_example_cells("summed by the tape", of(SummedByTheTape, rate=0.001))),
    **dict(
        per_example_cells(
            "add_loss", of(parts=per_example, loss="mse", rate=0.001), **VALIDATED
        )
    ),
    "of ragged data": one_device(
        of_bags, bags(tf.RaggedTensor.from_tensor), None, batch_size=None, shuffle=False
    ),
    "of sparse data": one_device(
        of_bags, bags(tf.sparse.from_dense), None, batch_size=None, shuffle=False
    ),
    # Means in one tensor, of which there are as many as examples of a replica
    "a mean for each output": of_means(by_tape(means)),
    "by Keras' step": of_means(of(ByKerasStep, lambda: [layers.Dense(4)])),
    "of layers": of_means(ADDED, validation_data=(X[:24], Y[:24])),
    "two means of a layer": one_device(
        of(parts=lambda: [layers.Dense(1), TwoMeans()], loss="mse", rate=0.001), X, Y,
        batch_size=8,
    ),
}
# fmt: on
if not hasattr(keras.optimizers, "MultiOptimizer"):  # Keras 3.15 has it
    del CELLS["several optimizers"]

CORE = "several optimizers", "metrics with a state and of several results", "a call of pairs"


@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=[pytest.mark.slow] * (c not in CORE)) for c in CELLS]
)
def test_replicas_end_alike(strategies, cell):
    require_alike(strategies, CELLS[cell])


def test_a_layer_that_only_the_step_calls_is_trained(strategies):
    options = {"replicas": (1, 2), "epochs": 2, **GUIDED}
    cell = keras_too(lambda: compiled(Headed), GUIDE_X[:48], GUIDE_Y[:48], **options)
    require_alike(strategies, cell)


class Compiled(keras.Sequential):
    """A model whose step is a tf.function with an optimizer of its own."""

    mine = None

    @tf.function
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        self.mine.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_compiled_step_with_its_own_optimizer_trains(strategies):
    with strategies[1].scope():
        model = Compiled([keras.Input((GUIDE_X.shape[1],)), layers.Dense(1)])
        model.mine = keras.optimizers.SGD(0.1)
        model.compile()
    before = model.get_weights()
    tfdist.fit(model, GUIDE_X[:32], GUIDE_X[:32, :1], batch_size=8, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])


def test_an_unbuilt_layer_is_refused(strategies):
    with strategies[1].scope():
        model = compiled(Halves, unbuilt=True)
    error = refusal(lambda: tfdist.predict(model, GUIDE_X))
    assert error.code == "not-built"
    assert "its layer first is not built" in error.problem
