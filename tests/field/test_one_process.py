"""Failures of one process with two replicas, replayed, and of interrupted runs of one device.

Where a plain Keras of today still fails, the test says how.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.models import AtStep, Cut
from tests.multiprocess.programs.zoo import flat
from tfdist.errors import UsageError

pytestmark = pytest.mark.slow

layers = keras.layers
RNG = np.random.RandomState(0)
X = RNG.randn(48, 6).astype("float32")
Y = (X @ RNG.randn(6, 1)).astype("float32")


def regression(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


class CutAt(keras.callbacks.Callback):
    """Ends a run at the begin of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Cut


def own_step(model, optimizer):
    """A step of a custom loop."""

    def step(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss}

    return step


def test_keras_23085_a_custom_loop_with_optimizer_variables_trains(one, two):
    """The traced loop had no value for a placeholder; one line says to build, and it trains.

    https://github.com/keras-team/keras/issues/23085
    """

    def make(strategy):
        with strategy.scope():
            model, optimizer = regression("sgd"), keras.optimizers.Adam(0.01)
        return model, optimizer, own_step(model, optimizer)

    _, _, step = make(two)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    batches = iter(two.experimental_distribute_dataset(data))
    is_fixed = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
    fails = pytest.raises(tf.errors.InvalidArgumentError, match="feed a value for placeholder")
    with contextlib.nullcontext() if is_fixed else fails:
        tf.function(lambda: two.run(step, args=(next(batches),)))()

    _, _, step = make(two)
    with two.scope(), pytest.raises(UsageError, match=r"Adam .* not built\. .* its build\("):
        tfdist.StepLoop(step, (X, Y), global_batch_size=8, seed=3).run(1)
    trained = []
    for strategy in (one, two):
        model, optimizer, step = make(strategy)
        with strategy.scope():
            optimizer.build(model.trainable_variables)
            tfdist.StepLoop(step, (X, Y), global_batch_size=8, seed=3).run(12)
        trained.append(flat(model))
    np.testing.assert_allclose(*trained, atol=1e-6)


class Rates(keras.callbacks.Callback):
    """Notes the learning rate at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(self.model.optimizer.learning_rate.numpy())


def test_keras_22010_an_interrupted_run_resumes_within_an_epoch(two, tmp_path):
    """How to go on from the middle of an epoch, at its rate, was asked; the bits are the same.

    https://github.com/keras-team/keras/issues/22010
    """

    def train(directory, *more):
        rates = Rates()
        schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 10, 0.9)
        with two.scope():
            model = regression(keras.optimizers.SGD(schedule, momentum=0.9))
        listed = [tfdist.BackupAndRestore(tmp_path / directory, save_freq=2), rates, *more]
        history = tfdist.fit(
            model, X, Y, batch_size=8, epochs=4, seed=3, verbose=0, callbacks=listed
        )
        return flat(model), history.history, rates.rates

    weights, history, rates = train("whole")
    with pytest.raises(Cut):
        train("cut", AtStep(15))
    assert train("cut") == (weights, history, rates[2:])


def test_keras_20712_an_unbuilt_model_is_saved_and_resumed(tmp_path):
    """A model had to be built before it was backed up; `fit` builds it, and goes on where it was.

    https://github.com/keras-team/keras/issues/20712, with the example of Keras' own page.
    """
    x, y = np.arange(100.0).reshape(5, 20) / 100, np.zeros((5, 10))

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Dense(10)])
        model.compile(keras.optimizers.SGD(), loss="mse")
        return model

    backup = keras.callbacks.BackupAndRestore(tmp_path / "stock")
    with pytest.raises(ValueError, match="must be built before"):
        make().fit(x, y, epochs=2, batch_size=1, verbose=0, callbacks=[backup])
    options = {"epochs": 10, "batch_size": 1, "seed": 3, "verbose": 0}
    backup = tfdist.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(Cut):
        tfdist.fit(make(), x, y, callbacks=[backup, CutAt(4)], **options)
    model, whole = make(), make()
    backup = tfdist.BackupAndRestore(tmp_path / "backup")
    resumed = tfdist.fit(model, x, y, callbacks=[backup], **options)
    assert resumed.history == tfdist.fit(whole, x, y, **options).history
    assert flat(model) == flat(whole)
