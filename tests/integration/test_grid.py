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
