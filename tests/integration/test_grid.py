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
from tests.models import bits

pytestmark = pytest.mark.slow

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
class CustomStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
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
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.normalize = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(CLASSES, activation="softmax")

    def call(self, x, training=False):
        return self.out(self.normalize(self.hidden(x), training=training))


def dense():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def convolutional():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def two_inputs():
    rows = keras.Input((6,), name="rows")
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(tokens))
    features = keras.layers.Dense(8, activation="tanh")(
        keras.layers.Concatenate()([rows, embedded])
    )
    model = keras.Model(
        {"rows": rows, "tokens": tokens},
        {
            "label": keras.layers.Dense(CLASSES, activation="softmax", name="label")(features),
            "target": keras.layers.Dense(1, name="target")(features),
        },
    )
    model.compile(
        keras.optimizers.AdamW(0.02, clipnorm=1.0),
        {"label": "sparse_categorical_crossentropy", "target": "mse"},
        loss_weights={"label": 1.0, "target": 0.5},
        metrics={"label": ["accuracy"], "target": ["mae"]},
    )
    return model


def custom_step():
    model = CustomStep([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def subclassed():
    model = Subclassed()
    model.compile(
        keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def mixed():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(CLASSES, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[], keras.Model]
    x: Any
    y: Any
    policy: str = "float32"
    tolerance: float = 1e-5


CASES = {
    "dense": Case(make=dense, x=ROWS, y=LABELS),
    "cnn": Case(make=convolutional, x=IMAGES, y=IMAGE_LABELS),
    "two_inputs": Case(
        make=two_inputs,
        x={"rows": ROWS, "tokens": TOKENS},
        y={"label": LABELS, "target": TARGETS},
    ),
    "custom_step": Case(make=custom_step, x=ROWS, y=TARGETS),
    "subclassed": Case(make=subclassed, x=ROWS, y=LABELS),
    "mixed_bfloat16": Case(make=mixed, x=ROWS, y=LABELS, policy="mixed_bfloat16", tolerance=1e-2),
    "mixed_float16": Case(make=mixed, x=ROWS, y=LABELS, policy="mixed_float16", tolerance=2e-3),
}


def made(case):
    keras.config.set_dtype_policy(case.policy)
    try:
        return case.make()
    finally:
        keras.config.set_dtype_policy("float32")


# On one replica, what is a path apart.
GRID = [*((name, 2) for name in CASES), ("dense", 1), ("mixed_float16", 1)]


def assert_close(one, other, tolerance):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
    )


@pytest.mark.parametrize(("name", "replicas"), GRID)
def test_a_model_trains_evaluates_predicts_and_is_saved(strategies, tmp_path, name, replicas):
    case = CASES[name]
    keras.utils.set_random_seed(1)
    with strategies[replicas].scope():
        model = made(case)
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
    case = CASES["dense"]
    with strategies[2].scope():
        model = made(case)
    tfdist.fit(model, case.x, case.y, batch_size=BATCH_SIZE, epochs=1, seed=5, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategies[1].scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    history = tfdist.fit(
        loaded, case.x, case.y, batch_size=BATCH_SIZE, epochs=EPOCHS, seed=6, verbose=0
    )
    assert loaded.optimizer.iterations.numpy() == 4 + STEPS
    assert history.history["loss"][-1] < history.history["loss"][0]


class Tracked(keras.Sequential):
    """The custom step of Keras' guide: a loss object, trackers, and what `metrics` lists."""

    def compile(self, optimizer):
        super().compile(optimizer=optimizer)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.criterion = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def loss_of(self, y, predicted):
        return self.criterion(y, predicted)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.loss_of(y, predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        self.track(loss, x)
        self.error.update_state(y, predicted)
        return self.logs_of(loss)

    def track(self, loss, x):
        self.tracker.update_state(loss)

    def logs_of(self, loss):
        return {metric.name: metric.result() for metric in self.metrics}


class TrackedByHand(Tracked):
    def loss_of(self, y, predicted):
        return tf.reduce_mean((predicted - y) ** 2)


class Returned(Tracked):
    """Returns the loss itself, and something made of it."""

    def logs_of(self, loss):
        return {"returned": loss, "twice": 2.0 * loss}


class ReturnedByHand(TrackedByHand, Returned):
    pass


class TrackedByExamples(Tracked):
    def track(self, loss, x):
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])


class ReturnedSum(Returned):
    def loss_of(self, y, predicted):
        return 0.05 * keras.losses.MeanSquaredError(reduction="sum")(y, predicted)


class TrackedAndMore(Tracked):
    def compile(self, optimizer):
        super().compile(optimizer)
        self.untouched = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [*super().metrics, self.untouched]

    def logs_of(self, loss):
        figures = {metric.name: metric.result() for metric in super().metrics}
        return {**figures, "loss": loss, "rate": self.optimizer.learning_rate}


CUSTOM = [
    *(Tracked, TrackedByHand, TrackedByExamples, TrackedAndMore),
    *(Returned, ReturnedByHand, ReturnedSum),
]


@pytest.mark.parametrize("kind", CUSTOM)
def test_logs_of_a_custom_step_are_those_of_one_device(strategies, kind):
    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = kind([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05))
        options = {"batch_size": BATCH_SIZE, "epochs": 2, "seed": 5, "verbose": 0}
        return tfdist.fit(model, ROWS, TARGETS, **options).history

    one, many = train(strategies[1]), train(strategies[2])
    assert list(one) == list(many)
    for name, values in one.items():
        np.testing.assert_allclose(many[name], values, rtol=1e-5)


class MoreFigures(keras.Sequential):
    """With a figure that is no metric's, as Keras' guide has it."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        figures = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**figures, "error": tf.reduce_mean(tf.abs(y - y_pred))}


def test_figures_that_a_model_adds_to_its_metrics_are_in_the_logs(strategies):
    def train(scope, fit):
        keras.utils.set_random_seed(1)
        with scope:
            model = MoreFigures([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        data = {"validation_data": (ROWS[:40], TARGETS[:40]), "shuffle": False, "verbose": 0}
        return fit(model, ROWS, TARGETS, batch_size=BATCH_SIZE, epochs=2, **data).history

    ours = train(strategies[2].scope(), tfdist.fit)
    keras_own = train(contextlib.nullcontext(), keras.Model.fit)
    assert set(ours) == set(keras_own) == {"loss", "error", "val_loss", "val_error"}
    for name, values in keras_own.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


class Halves(keras.Model):
    """Steps of its own and no `call`, as the autoencoders of Keras' guides."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self.second(self.first(x)) - y) ** 2)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.test_step(data, loss)

    def test_step(self, data, loss=None):
        self.tracker.update_state(self.loss_of(data) if loss is None else loss)
        return {"loss": self.tracker.result()}


def test_a_model_without_call_trains_by_its_own_step(strategies):
    def train(scope, fit, built=True):
        keras.utils.set_random_seed(1)
        with scope:
            model = Halves(keras.layers.Dense(3, name="first"), keras.layers.Dense(1))
            model.compile(keras.optimizers.SGD(0.05))
            if built:
                model.first.build((None, 6))
                model.second.build((None, 3))
        data = {"validation_data": (ROWS[:32], TARGETS[:32]), "shuffle": False, "verbose": 0}
        return fit(model, ROWS[:48], TARGETS[:48], batch_size=BATCH_SIZE, epochs=2, **data).history

    expected = train(contextlib.nullcontext(), keras.Model.fit)
    for replicas in (1, 2):
        logs = train(strategies[replicas].scope(), tfdist.fit)
        assert set(logs) == {"loss", "val_loss"}
        for name, values in expected.items():
            np.testing.assert_allclose(logs[name], values, rtol=1e-5)
    with pytest.raises(tfdist.UsageError, match="first, which is not built"):
        train(strategies[1].scope(), tfdist.fit, built=False)


class Siamese(Halves):
    """Its `call` takes pairs, of which a batch gives one as x and the other as y."""

    def call(self, pair):
        return self.second(self.first(pair[0])) - self.second(self.first(pair[1]))

    def loss_of(self, data):
        return tf.reduce_mean(self(data) ** 2)


def test_a_call_that_takes_more_than_x_does_without_metrics_of_compile(strategies):
    def train(scope, fit, **compiled):
        keras.utils.set_random_seed(1)
        with scope:
            first = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model = Siamese(first, keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
            model.compile(keras.optimizers.SGD(0.05), **compiled)
        options = {"batch_size": BATCH_SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
        fit(model, ROWS[:48], ROWS[48:0:-1], **options)
        return model.get_weights()

    expected = train(contextlib.nullcontext(), keras.Model.fit, weighted_metrics=[])
    for replicas in (1, 2):
        found = train(strategies[replicas].scope(), tfdist.fit, weighted_metrics=[])
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
