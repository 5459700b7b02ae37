"""What users of Keras have besides the plain model, trained beside `keras.Model.fit` itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.integration.test_conformance import dense
from tests.models import difference, trained
from tfdist.data import PythonSource

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 5)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
OPTIONS = {"batch_size": 6, "epochs": 3}


class Lists(keras.utils.PyDataset):
    """Batches of two inputs and two outputs in lists, as many programs have them."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(6 * index, 6 * index + 6)
        return [X[rows], X[::-1][rows]], [Y[rows], 2 * Y[rows]]


def two_and_two():
    inputs = [keras.Input((5,)), keras.Input((5,))]
    x = layers.Concatenate()(inputs)
    model = keras.Model(inputs, [layers.Dense(1, name="one")(x), layers.Dense(1, name="two")(x)])
    model.compile("adam", ["mse", "mae"])
    return model


def test_lists_as_inputs_outputs_and_examples_train_as_keras(strategies):
    ours, _ = trained(strategies[2], two_and_two, Lists(), validation_data=Lists(), epochs=3)
    theirs = [X[:18], X[::-1][:18]], [Y[:18], 2 * Y[:18]]
    theirs, _ = trained(None, two_and_two, *theirs, batch_size=6, epochs=3)
    assert difference(ours, theirs) < 1e-6
    examples = [([x, -x], [y, 2 * y]) for x, y in zip(X, Y, strict=True)]
    ours, _ = trained(strategies[2], two_and_two, PythonSource(examples), **OPTIONS)
    theirs, _ = trained(None, two_and_two, [X, -X], [Y, 2 * Y], **OPTIONS)
    assert difference(ours, theirs) < 1e-6


@pytest.fixture
def limits():
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Limiting", "ignore:Your input ran out of data")
def test_the_limits_of_keras_config_hold(strategies, limits):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    data = {"x": X[:18], "y": Y[:18], "validation_data": (X[:4], Y[:4])}
    (ours, logs), (theirs, expected) = (
        trained(strategy, dense, **data, **OPTIONS) for strategy in (strategies[2], None)
    )
    assert difference(ours, theirs) < 1e-6
    assert list(logs) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-4, atol=1e-6)
    keras.config.set_max_steps_per_epoch(2)
    model, _ = trained(strategies[2], dense, X, Y, **OPTIONS)
    assert tfdist.predict(model, X, batch_size=6, verbose=0).shape == (12, 1)
    read = []

    def batches():
        for number in range(50):
            read.append(number)
            yield X[:6], Y[:6]

    signature = tf.TensorSpec([6, *X.shape[1:]], X.dtype), tf.TensorSpec([6, *Y.shape[1:]], Y.dtype)
    stream = tf.data.Dataset.from_generator(batches, output_signature=signature)
    assert tfdist.fit(model, stream, epochs=1, verbose=0).epoch == [0]
    assert max(read) < 10  # also where batches are counted first
    virtual = tfdist.VirtualEpochs(total_examples=len(X), checkpoints=3)  # which they leave alone
    assert tfdist.fit(model, X, Y, virtual_epochs=virtual, verbose=0).epoch == [0, 1, 2]


def predictions(strategies, make, x, *, replicas=(1, 2), **options):
    """What Keras predicts, and what tfdist does on one replica and on two."""
    keras.utils.set_random_seed(1)
    yield make().predict(x, verbose=0, **options)
    for number in replicas:
        keras.utils.set_random_seed(1)
        with strategies[number].scope():
            model = make()
        yield tfdist.predict(model, x, verbose=0, **options)


def test_predictions_of_batches_of_other_widths_are_ragged(strategies):
    rows = RNG.normal(size=(3, 4, 6, 2)).astype("float32")
    batches = [rows[0, :, :2], rows[1], rows[2, :3, :5]]
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tf.TensorSpec((None, None, 2))
    )

    def make():
        return keras.Sequential([keras.Input((None, 2)), layers.Dense(3)])

    theirs, *both = predictions(strategies, make, data)
    for ours in both:
        assert ours.row_lengths().numpy().tolist() == [2] * 4 + [6] * 4 + [5] * 3
        np.testing.assert_allclose(ours.to_tensor(), theirs.to_tensor(), atol=1e-6)


class Numbers(keras.Sequential):
    def predict_step(self, data):
        return {"rows": tf.repeat(self(data), 2, axis=0), "mean": tf.reduce_mean(data)}


class WithoutCall(keras.Model):
    """Predicts by its own step."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)
        self.out.build((None, 5))

    def predict_step(self, data):
        return {"rows": self.out(data)}


@pytest.mark.parametrize(
    ("make", "replicas"),
    [
        # What is not one for each example is whole on one device.
        (lambda: Numbers([keras.Input((5,)), layers.Dense(1)]), (1,)),
        (WithoutCall, (1, 2)),
    ],
)
def test_predictions_by_a_custom_step_equal_one_device(strategies, make, replicas):
    theirs, *found = predictions(strategies, make, X, replicas=replicas, batch_size=6)
    for ours in found:
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=1e-6)
