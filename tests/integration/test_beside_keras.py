"""What users of Keras have besides the plain model, trained beside `keras.Model.fit` itself."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests import models
from tests.models import OwnStep, difference
from tests.multiprocess.programs.without_call import AutoEncoder
from tfdist.data import PythonSource

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 5)).astype("float32")
Y = RNG.normal(size=(20, 1)).astype("float32")
CLASSES = RNG.integers(0, 3, size=20)
WEIGHTS = RNG.uniform(0.2, 2.0, size=20).astype("float32")
OPTIONS = {"x": X, "y": Y, "batch_size": 6, "epochs": 3}


def dense(optimizer="sgd", *parts, **options):
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, "tanh", name="a"), *parts, layers.Dense(1, name="b")]
    )
    model.compile(optimizer, options.pop("loss", "mse"), **options)
    return model


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


def trained(strategy, make, callbacks=(), **options):
    """Trains by tfdist under a strategy, by Keras without one; returns the model and the calls."""
    called = Called()
    options |= {"callbacks": [*(callback() for callback in callbacks), called]}
    model, _ = models.trained(strategy, make, **OPTIONS | options)
    return model, called.calls


def assert_like_keras(strategies, make, callbacks=(), replicas=(2,), **options):
    """Two replicas have all that one has; `replicas` says where one has a path of its own."""
    theirs, calls = trained(None, make, callbacks, **options)
    for number in replicas:
        ours, seen = trained(strategies[number], make, callbacks, **options)
        assert difference(ours, theirs) < 1e-6
        pairs = zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, atol=1e-6)
        assert [call[:2] for call in seen] == [call[:2] for call in calls]
        for one, other in zip(seen, calls, strict=True):
            assert list(one[2]) == list(other[2])
            for name, value in one[2].items():
                np.testing.assert_allclose(value, other[2][name], rtol=1e-4, atol=1e-6)


OPTIMIZERS = {
    "multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1),
            {"a/.*": keras.optimizers.Adam(0.01, use_ema=True)},
        )
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=4
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(strategies, name):
    """Those around others; every one by itself: test_repeated_rows."""
    assert_like_keras(strategies, lambda: dense(OPTIMIZERS[name]()), replicas=(1, 2))


class Totals(keras.metrics.Metric):
    """A metric of several results."""

    def __init__(self):
        super().__init__(name="totals")
        self.totals = self.add_weight(shape=(2,), initializer="zeros", name="totals")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.totals.assign_add(ops.stack([ops.sum(y_true), ops.sum(y_pred)]))

    def result(self):
        return {"true": self.totals[0], "predicted": self.totals[1]}


def test_metrics_with_state_of_their_own_and_of_several_results(strategies):
    def make():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1, "sigmoid")])
        auc, f1 = keras.metrics.AUC(20, name="auc"), keras.metrics.F1Score(threshold=0.5)
        weighted = [keras.metrics.AUC(20, curve="PR", name="pr")]
        metrics = {"metrics": [auc, f1, Totals(), "mae"], "weighted_metrics": weighted}
        model.compile("adam", "binary_crossentropy", **metrics)
        return model

    options = {"y": (Y > 0).astype("float32"), "sample_weight": WEIGHTS}
    assert_like_keras(strategies, make, validation_split=0.3, **options)


def test_several_outputs_one_without_a_loss(strategies):
    def make():
        x = keras.Input((5,))
        parts = (("a", 1, None), ("b", 3, "softmax"), ("c", 2, None))
        model = keras.Model(x, {n: layers.Dense(u, f, name=n)(x) for n, u, f in parts})
        model.compile(
            "adam",
            {"a": "mse", "b": "sparse_categorical_crossentropy", "c": None},
            metrics={"b": ["accuracy"]},
        )
        return model

    # Batches of one size: under Keras the loss of an output is a mean over batches.
    y = {"a": Y[:18], "b": CLASSES[:18], "c": X[:18, :2]}
    assert_like_keras(strategies, make, x=X[:18], y=y, sample_weight=WEIGHTS[:18])


class LossLayer(layers.Layer):
    """The layer of Keras' guide that adds a loss which Keras has computed."""

    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(ops.zeros_like(x), x))
        return x


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


def test_losses_that_a_model_computes_by_hand_and_a_layer_adds(strategies):
    def make():
        model = OwnLoss([keras.Input((5,)), layers.Dense(1)])
        model.compile("adam", metrics=["mae"])
        return model

    assert_like_keras(strategies, make, x=X[:18], y=Y[:18], validation_data=(X[:12], Y[:12]))
    assert_like_keras(strategies, lambda: dense("sgd", LossLayer()))


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


def test_lists_of_inputs_and_outputs_and_inside_examples_from_python(strategies):
    ours, _ = trained(strategies[2], two_and_two, x=Lists(), y=None, validation_data=Lists())
    theirs, _ = trained(None, two_and_two, x=[X[:18], X[::-1][:18]], y=[Y[:18], 2 * Y[:18]])
    assert difference(ours, theirs) < 1e-6
    examples = [([x, -x], [y, 2 * y]) for x, y in zip(X, Y, strict=True)]
    ours, _ = trained(strategies[2], two_and_two, x=PythonSource(examples), y=None)
    theirs, _ = trained(None, two_and_two, x=[X, -X], y=[Y, 2 * Y])
    assert difference(ours, theirs) < 1e-6


def test_strings_are_looked_up_in_the_model(strategies):
    def make():
        words = layers.TextVectorization(output_sequence_length=3, vocabulary=["a", "b", "c"])
        model = keras.Sequential(
            [keras.Input((), dtype="string"), words, layers.Embedding(6, 2), layers.Flatten()]
        )
        model.add(layers.Dense(1))
        # Not Adam: of rows that repeat Keras squares each slice; see test_repeated_rows.
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_like_keras(strategies, make, x=tf.constant(["a b", "c x a"] * 10))


def test_averaged_weights_are_swapped_in_for_the_validation(strategies):
    def make():
        return dense(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5))

    callbacks = [keras.callbacks.SwapEMAWeights]
    assert_like_keras(strategies, make, callbacks, validation_data=(X, Y))


def test_averages_take_the_place_of_the_weights_that_are_trained(strategies):
    with strategies[2].scope():
        first, second = (keras.layers.Dense(6, name=name) for name in ("first", "second"))
        model = keras.Sequential([keras.Input((6,)), first, second])
        model.compile(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
    fit = functools.partial(tfdist.fit, model, x, x, batch_size=6, verbose=0)
    fit()
    first.trainable = False
    new = np.eye(6, dtype="float32")
    first.kernel.assign(new)
    fit()
    np.testing.assert_array_equal(first.kernel, new)
    average = model.optimizer._model_variables_moving_average[2]
    np.testing.assert_array_equal(second.kernel, average)


class StopAtOnce(keras.callbacks.Callback):
    """The epoch that it stops has one step."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def test_batches_without_weights_say_none_and_an_epoch_is_stopped_at_its_begin(strategies):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6).map(lambda x, y: (x, y, None))
    assert_like_keras(strategies, dense, [StopAtOnce], x=data, y=None, validation_data=data)


@pytest.fixture
def limits():
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Limiting", "ignore:Your input ran out of data")
def test_the_limits_of_keras_config_hold(strategies, limits):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    assert_like_keras(strategies, dense, x=X[:18], y=Y[:18], validation_data=(X[:4], Y[:4]))
    keras.config.set_max_steps_per_epoch(2)
    model, _ = trained(strategies[2], dense)
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


class Parts(OwnStep, keras.Sequential):
    """A step that takes a dict apart, as for TFDS, and a loss of `compile`."""

    def loss_of(self, data):
        return self.compute_loss(y=data["label"], y_pred=self(data["image"], training=True))


class Itself(OwnStep, keras.Sequential):
    """An autoencoder, whose targets are its inputs."""

    def loss_of(self, data):
        return self.compute_loss(y=data, y_pred=self(data, training=True))


@pytest.mark.parametrize(
    ("kind", "units", "x"), [(Parts, 1, {"image": X, "label": Y}), (Itself, 5, X)]
)
def test_a_step_of_its_own_takes_a_batch_apart(strategies, kind, units, x):
    def make():
        model = kind([keras.Input((5,)), layers.Dense(units)])
        model.compile("adam", "mse")
        return model

    assert_like_keras(strategies, make, x=x, y=None)


@pytest.mark.parametrize("rows", [6, 10])
def test_metrics_of_compile_are_built_by_a_step_without_a_call(strategies, rows):
    def make():
        model = AutoEncoder()
        model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"])
        return model

    data = tf.data.Dataset.from_tensor_slices(X).batch(rows)
    options = {"x": data, "y": None, "batch_size": None, "validation_data": data}
    assert_like_keras(strategies, make, replicas=(1, 2), **options)


class OfOneBatch(keras.Model):
    """Takes what a symbol is not: a ragged tensor, or a batch whose size is known."""

    def __init__(self, ragged):
        super().__init__()
        self.ragged, self.embed, self.out = ragged, layers.Embedding(6, 4), layers.Dense(1)

    def call(self, x):
        x = x.to_tensor(shape=[None, 3]) if self.ragged else tf.reshape(x, [x.shape[0], 3])
        return self.out(ops.mean(self.embed(x), 1))


@pytest.mark.parametrize("ragged", [True, False])
def test_a_model_is_built_by_the_first_batch_where_symbols_do_not_do(strategies, ragged):
    tokens = tf.ragged.constant([[1, 2, 3], [3], [4, 5], [2]] * 5, dtype=tf.int32)
    rows = tokens if ragged else tokens.to_tensor()
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).batch(4, drop_remainder=not ragged)

    def make():
        model = OfOneBatch(ragged)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])  # its rows repeat, too
        return model

    replicas = 2 if ragged else 1
    data_of_both = {"x": data, "y": None, "validation_data": data}
    assert_like_keras(strategies, make, replicas=(replicas,), **data_of_both)
    theirs, ours = predictions(strategies, make, data, replicas=(replicas,))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


class Helped(keras.Model):
    """With a head that training alone uses."""

    def __init__(self):
        super().__init__()
        self.body, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        self.head = layers.Dense(1)

    def call(self, x, training=False):
        x = self.body(x)
        return self.out(x) + self.head(x) if training else self.out(x)


def test_layers_that_training_alone_uses_are_built(strategies):
    def make():
        model = Helped()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_like_keras(strategies, make, validation_data=(X, Y))


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
def test_predictions_by_a_step_of_ones_own(strategies, make, replicas):
    theirs, *found = predictions(strategies, make, X, replicas=replicas, batch_size=6)
    for ours in found:
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=1e-6)


def test_figures_of_an_evaluation_come_in_the_order_of_keras(strategies):
    def make():
        return dense(metrics=["mae", "accuracy"])

    with strategies[2].scope():
        ours = make()
    figures = tfdist.evaluate(ours, X, Y, return_dict=True, verbose=0)
    assert list(figures) == list(make().evaluate(X, Y, return_dict=True, verbose=0))
