"""Every kind of model under every strategy of one process: trains, evaluates, predicts, saves."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import models
from tests.models import bits
from tests.refusals import refusal

pytestmark = pytest.mark.slow

L = keras.layers
RNG = np.random.RandomState(0)
EXAMPLES, BATCH_SIZE, EPOCHS = 52, 17, 4
STEPS = EPOCHS * 4  # two replicas get 9 and 8 examples, and of the last one one gets none
CLASSES = 4

ROWS = RNG.randn(EXAMPLES, 6).astype("float32")
IMAGES = RNG.randn(EXAMPLES, 8, 8, 1).astype("float32")
TOKENS = RNG.randint(0, 20, (EXAMPLES, 3)).astype("int32")
LABELS = np.argmax(ROWS @ RNG.randn(6, CLASSES), axis=1)
IMAGE_LABELS = np.argmax(IMAGES.reshape(EXAMPLES, -1) @ RNG.randn(64, CLASSES), axis=1)
TARGETS = (ROWS @ RNG.randn(6, 1)).astype("float32")


@keras.saving.register_keras_serializable(package="test_grid")
class CustomStep(models.OwnStep, keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        x, y = data
        predicted = self(x, training=True)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(tf.reduce_mean((predicted - y) ** 2), tf.shape(x)[0])
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


@keras.saving.register_keras_serializable(package="test_grid")
class Subclassed(keras.Model):
    """Not built: the first batch gives the shapes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = L.Dense(8, activation="relu")
        self.normalize = L.BatchNormalization()
        self.out = L.Dense(CLASSES, activation="softmax")

    def call(self, x, training=False):
        return self.out(self.normalize(self.hidden(x), training=training))


def classifying(model, rate=0.02):
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def dense():
    layers = L.Dense(16, activation="relu"), L.Dense(CLASSES, activation="softmax")
    return classifying(keras.Sequential([keras.Input((6,)), *layers]))


def convolutional():
    layers = [L.Conv2D(4, 3, activation="relu"), L.BatchNormalization(momentum=0.7), L.Flatten()]
    layers += [L.Dropout(0.1), L.Dense(CLASSES, activation="softmax")]
    return classifying(keras.Sequential([keras.Input((8, 8, 1)), *layers]), rate=0.01)


def two_inputs():
    rows, tokens = keras.Input((6,), name="rows"), keras.Input((3,), dtype="int32", name="tokens")
    embedded = L.GlobalAveragePooling1D()(L.Embedding(20, 4)(tokens))
    features = L.Dense(8, activation="tanh")(L.Concatenate()([rows, embedded]))
    label = L.Dense(CLASSES, activation="softmax", name="label")(features)
    target = L.Dense(1, name="target")(features)
    model = keras.Model({"rows": rows, "tokens": tokens}, {"label": label, "target": target})
    model.compile(
        keras.optimizers.AdamW(0.02, clipnorm=1.0),
        {"label": "sparse_categorical_crossentropy", "target": "mse"},
        loss_weights={"label": 1.0, "target": 0.5},
        metrics={"label": ["accuracy"], "target": ["mae"]},
    )
    return model


def custom_step():
    model = CustomStep([keras.Input((6,)), L.Dense(8, "tanh"), L.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def mixed():
    layers = [L.Dense(16, activation="relu"), L.BatchNormalization(), L.Dropout(0.1)]
    layers += [L.Dense(CLASSES, activation="softmax", dtype="float32")]
    return classifying(keras.Sequential([keras.Input((6,)), *layers]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[], keras.Model]
    x: Any = dataclasses.field(default_factory=lambda: ROWS)
    y: Any = dataclasses.field(default_factory=lambda: LABELS)
    policy: str = "float32"
    tolerance: float = 1e-5


CASES = {
    "dense": Case(make=dense),
    "cnn": Case(make=convolutional, x=IMAGES, y=IMAGE_LABELS),
    "two_inputs": Case(
        make=two_inputs,
        x={"rows": ROWS, "tokens": TOKENS},
        y={"label": LABELS, "target": TARGETS},
    ),
    "custom_step": Case(make=custom_step, y=TARGETS),
    "subclassed": Case(make=lambda: classifying(Subclassed())),
    "mixed_bfloat16": Case(make=mixed, policy="mixed_bfloat16", tolerance=1e-2),
    "mixed_float16": Case(make=mixed, policy="mixed_float16", tolerance=2e-3),
}


def made(case, strategy):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(case.policy)
    try:
        with strategy.scope():
            return case.make()
    finally:
        keras.config.set_dtype_policy("float32")


# On one replica, what is a path apart.
GRID = [*((name, 2) for name in CASES), ("dense", 1), ("mixed_float16", 1)]


def assert_close(one, other, tolerance=1e-5):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
    )


@pytest.mark.parametrize(("name", "replicas"), GRID)
def test_a_model_trains_evaluates_predicts_and_is_saved(strategies, tmp_path, name, replicas):
    case = CASES[name]
    model = made(case, strategies[replicas])
    options = {"batch_size": BATCH_SIZE, "verbose": 0}
    history = tfdist.fit(model, case.x, case.y, epochs=EPOCHS, seed=5, **options).history
    require_trained(case, model, history["loss"])

    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy(case.policy)  # Keras takes loss scaling from it
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert bits(loaded) == bits(model)

    predicted = tfdist.predict(model, case.x, **options)
    expected = loaded(case.x, training=False)
    keras.tree.assert_same_structure(predicted, expected)
    assert {len(output) for output in keras.tree.flatten(predicted)} == {EXAMPLES}
    assert_close(predicted, keras.tree.map_structure(np.asarray, expected), case.tolerance)

    evaluated = tfdist.evaluate(model, case.x, case.y, return_dict=True, **options)
    # In one batch: over several, Keras gives a small last one too much weight in some losses.
    options["batch_size"] = EXAMPLES
    keras_own = loaded.evaluate(case.x, case.y, return_dict=True, **options)
    assert set(evaluated) == set(keras_own)
    assert_close(evaluated, keras_own, case.tolerance)


def require_trained(case, model, losses):
    assert len(losses) == EPOCHS
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    taken = model.optimizer.iterations.numpy()
    if case.policy == "mixed_float16":
        assert STEPS - 5 < taken <= STEPS  # loss scaling skips the first until the scale fits
    else:
        assert taken == STEPS


def test_a_loaded_model_trains_on_under_any_strategy(strategies, tmp_path):
    model, options = made(CASES["dense"], strategies[2]), {"batch_size": BATCH_SIZE, "verbose": 0}
    tfdist.fit(model, ROWS, LABELS, **options)
    model.save(tmp_path / "model.keras")
    with strategies[1].scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    losses = tfdist.fit(loaded, ROWS, LABELS, epochs=EPOCHS, **options).history["loss"]
    assert loaded.optimizer.iterations.numpy() == 4 + STEPS
    assert losses[-1] < losses[0]


# Steps, losses and figures of the user's own


def trained(scope, fit, make, x=ROWS, y=TARGETS, **options):
    """A model that was trained by Keras' `fit` or by ours, and its history."""
    keras.utils.set_random_seed(1)
    with scope:
        model = make()
    options = {"batch_size": BATCH_SIZE, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model, fit(model, x, y, **options).history


def by_keras(*arguments, **options):
    return trained(contextlib.nullcontext(), keras.Model.fit, *arguments, **options)


class Tracked(models.Tracked, keras.Sequential):
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
        predicted = self(x, training=True)
        self.error.update_state(y, predicted)
        return self.loss_between(y, predicted)

    def loss_between(self, y, predicted):
        return self.criterion(y, predicted)

    def logs_of(self, loss, data):
        super().logs_of(loss, data)
        return {metric.name: metric.result() for metric in self.metrics}


class TrackedByHand(Tracked):
    def loss_between(self, y, predicted):
        return tf.reduce_mean((predicted - y) ** 2)


class Returned(Tracked):
    """Returns the loss itself, and something made of it."""

    def logs_of(self, loss, data):
        super().logs_of(loss, data)
        return {"returned": loss, "twice": 2.0 * loss}


class ReturnedByHand(TrackedByHand, Returned):
    pass


class TrackedByExamples(Tracked):
    def logs_of(self, loss, data):
        self.tracker.update_state(loss, sample_weight=tf.shape(data[0])[0])
        return {metric.name: metric.result() for metric in self.metrics}


class ReturnedSum(Returned):
    def loss_between(self, y, predicted):
        return 0.05 * keras.losses.MeanSquaredError(reduction="sum")(y, predicted)


class TrackedAndMore(Tracked):
    def compile(self, optimizer):
        super().compile(optimizer)
        self.untouched = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [*super().metrics, self.untouched]

    def logs_of(self, loss, data):
        return {**super().logs_of(loss, data), "loss": loss, "rate": self.optimizer.learning_rate}


CUSTOM = [
    *(Tracked, TrackedByHand, TrackedByExamples, TrackedAndMore),
    *(Returned, ReturnedByHand, ReturnedSum),
]


@pytest.mark.parametrize("kind", CUSTOM)
def test_logs_of_a_custom_step_are_those_of_one_device(strategies, kind):
    def make():
        model = kind([keras.Input((6,)), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05))
        return model

    one, many = (trained(strategies[n].scope(), tfdist.fit, make)[1] for n in (1, 2))
    assert list(one) == list(many)
    assert_close(many, one)


class MoreFigures(keras.Sequential):
    """With a figure that is no metric's, as Keras' guide has it."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        figures = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**figures, "error": tf.reduce_mean(tf.abs(y - y_pred))}


def more_figures():
    model = MoreFigures([keras.Input((6,)), L.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class Halves(models.OwnStep, keras.Model):
    """Steps of its own and no `call`, as the autoencoders of Keras' guides."""

    def __init__(self, *, built=True):
        super().__init__()
        self.first, self.second = L.Dense(3, name="first"), L.Dense(1)
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


VALIDATED = {"validation_data": (ROWS[:32], TARGETS[:32])}
LIKE_KERAS = {
    "more figures": (more_figures, TARGETS[:48], VALIDATED),
    "no call": (lambda: compiled(Halves), TARGETS[:48], VALIDATED),
    # `call` takes more than x, and does without metrics of `compile`.
    "a call of pairs": (lambda: compiled(Siamese, weighted_metrics=[]), ROWS[48:0:-1], {}),
}


@pytest.mark.parametrize("what", LIKE_KERAS)
def test_a_model_with_more_of_its_own_trains_as_under_keras(strategies, what):
    make, y, options = LIKE_KERAS[what]
    theirs, expected = by_keras(make, ROWS[:48], y, **options)
    for replicas in (1, 2):
        scope = strategies[replicas].scope()
        ours, logs = trained(scope, tfdist.fit, make, ROWS[:48], y, **options)
        assert set(logs) == set(expected)
        assert_close(logs, expected)
        assert models.difference(ours, theirs) < 1e-6


def test_a_layer_that_nothing_has_built_is_refused(strategies):
    scope, make = strategies[1].scope(), lambda: compiled(Halves, unbuilt=True)
    error = refusal(lambda: trained(scope, tfdist.fit, make))
    assert error.code == "not-built"
    assert error.received.startswith("first")
