"""Every kind of model under every strategy of one process: trains, evaluates, predicts, saves."""

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
from tests.multiprocess.programs import zoo
from tests.refusals import refusal

pytestmark = pytest.mark.slow

L = keras.layers
CLASSES, BATCH_SIZE, EPOCHS = 3, 17, 4
EXAMPLES = 52  # two replicas get 9 and 8 examples of 17, and of the last one one gets none
STEPS = EPOCHS * 4
ROWS, IMAGES, LABELS = zoo.X[:EXAMPLES], zoo.IMAGES[:EXAMPLES], zoo.LABELS[:EXAMPLES]
TARGETS = ROWS @ np.linspace(-1, 1, 6, dtype="float32")[:, None]


@keras.saving.register_keras_serializable(package="test_grid")
class CustomStep(models.OwnStep, keras.Sequential):
    """Updates the metrics of `compile` by itself."""

    def logs_of(self, loss, data):
        x, y = data
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(x)[0])
            else:
                metric.update_state(y, self(x))
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


def subclassed():
    model = Subclassed()
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


def custom_step():
    model = CustomStep([keras.Input((6,)), L.Dense(8, "tanh"), L.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[], keras.Model]
    x: Any
    y: Any
    policy: str = "float32"
    tolerance: float = 1e-5


IN_IMAGES = {"make": zoo.cnn, "x": IMAGES, "y": LABELS}
CASES = {
    "dense": Case(make=zoo.dense, x=ROWS, y=TARGETS),
    "cnn": Case(**IN_IMAGES),
    "two_inputs": Case(
        make=zoo.two_inputs,
        x={"a": ROWS, "b": ROWS[::-1]},
        y={"u": TARGETS, "v": np.concatenate([TARGETS, -TARGETS], 1)},
    ),
    "custom_step": Case(make=custom_step, x=ROWS, y=TARGETS),
    "subclassed": Case(make=subclassed, x=ROWS, y=ROWS.argmax(1) % CLASSES),
    "mixed_bfloat16": Case(**IN_IMAGES, policy="mixed_bfloat16", tolerance=1e-2),
    "mixed_float16": Case(**IN_IMAGES, policy="mixed_float16", tolerance=2e-3),
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
    tfdist.fit(model, ROWS, TARGETS, **options)
    model.save(tmp_path / "model.keras")
    with strategies[1].scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    losses = tfdist.fit(loaded, ROWS, TARGETS, epochs=EPOCHS, **options).history["loss"]
    assert loaded.optimizer.iterations.numpy() == 4 + STEPS
    assert losses[-1] < losses[0]


# Steps, losses and figures of the user's own


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
        return self.criterion(y, self(x, training=True))

    def logs_of(self, loss, data):
        x, y = data
        self.error.update_state(y, self(x))
        super().logs_of(loss, data)
        return {metric.name: metric.result() for metric in self.metrics}


class Returned(Tracked):
    """Returns losses of several kinds as they are, and what is made of them; tracks them too."""

    def compile(self, optimizer):
        super().compile(optimizer)
        names = ("by_hand", "by_examples", "loss")  # the last of which nobody updates
        self.trackers = {name: keras.metrics.Mean(name=name) for name in names}
        self.summed = keras.losses.MeanSquaredError(reduction="sum")

    @property
    def metrics(self):
        return [*super().metrics, *self.trackers.values()]

    def logs_of(self, loss, data):
        x, y = data
        predicted, found = self(x), super().logs_of(loss, data)
        by_hand = tf.reduce_mean((predicted - y) ** 2)
        self.trackers["by_hand"].update_state(by_hand)
        self.trackers["by_examples"].update_state(loss, sample_weight=tf.shape(x)[0])
        losses = {"loss": loss, "twice": 2.0 * loss, "hand": by_hand}
        losses["sum"] = self.summed(y, predicted)
        tracked = {name: tracker.result() for name, tracker in self.trackers.items()}
        return {**found, **tracked, **losses, "rate": self.optimizer.learning_rate}


@pytest.mark.parametrize("kind", [Tracked, Returned])
def test_logs_of_a_custom_step_are_those_of_one_device(strategies, kind):
    def make():
        model = kind([keras.Input((6,)), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05))
        return model

    one, many = (
        models.trained(strategies[n], make, ROWS, TARGETS, batch_size=BATCH_SIZE)[1] for n in (1, 2)
    )
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
    options = {"batch_size": BATCH_SIZE, **options}
    theirs, expected = models.trained(None, make, ROWS[:48], y, **options)
    for replicas in (1, 2):
        ours, logs = models.trained(strategies[replicas], make, ROWS[:48], y, **options)
        assert set(logs) == set(expected)
        assert_close(logs, expected)
        assert models.difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("kind", [Halves, Siamese])
def test_layers_are_built_by_the_step_where_no_call_does(strategies, kind):
    make = lambda: compiled(kind, unbuilt=True)  # noqa: E731
    y = {Halves: TARGETS[:48], Siamese: ROWS[48:0:-1]}[kind]
    one, two = (models.trained(strategies[n], make, ROWS[:48], y, batch_size=8) for n in (1, 2))
    assert models.difference(one[0], two[0]) < 1e-6
    assert_close(one[1], two[1])


def test_a_layer_that_nothing_has_built_is_refused(strategies):
    with strategies[1].scope():
        model = compiled(Halves, unbuilt=True)
    error = refusal(lambda: tfdist.predict(model, ROWS))
    assert error.code == "not-built"
    assert error.received.startswith("first")
