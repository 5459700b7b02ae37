"""Failures of one process with two replicas, replayed, and of interrupted runs of one device.

Where a plain Keras of today still fails, the test says how.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.field.programs import models
from tests.field.programs.models import X, Y
from tests.models import AtStep, Cut
from tfdist.errors import UsageError

pytestmark = pytest.mark.slow

layers = keras.layers


class CutAt(keras.callbacks.Callback):
    """Ends a run at the begin of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Cut


def test_keras_20582_gradient_accumulation_under_a_strategy(one, two):
    """Gradient accumulation raised an error under a strategy; it equals batches twice as large.

    https://github.com/keras-team/keras/issues/20582
    """

    def make(strategy, steps):
        with strategy.scope():
            return models.regression(
                keras.optimizers.Adam(0.01, clipnorm=0.5, gradient_accumulation_steps=steps)
            )

    with pytest.raises(RuntimeError, match="merge_call"):
        make(two, 2).fit(X, Y, batch_size=8, verbose=0)
    accumulated, whole = make(two, 2), make(one, None)
    tfdist.fit(accumulated, X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    tfdist.fit(whole, X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(models.flat(accumulated), models.flat(whole), atol=1e-6)


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


def test_keras_23085_a_custom_loop_with_an_optimizer_that_has_variables(one, two):
    """The traced loop had no value for a placeholder; one line says to build, and it trains.

    https://github.com/keras-team/keras/issues/23085
    """

    def make(strategy):
        with strategy.scope():
            model, optimizer = models.regression("sgd"), keras.optimizers.Adam(0.01)
        return model, optimizer, own_step(model, optimizer)

    _, _, step = make(two)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    batches = iter(two.experimental_distribute_dataset(data))
    with pytest.raises(tf.errors.InvalidArgumentError, match="feed a value for placeholder"):
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
        trained.append(models.flat(model))
    np.testing.assert_allclose(*trained, atol=1e-6)


def test_keras_20568_training_that_became_nan_under_a_strategy(one, two):
    """The loss became NaN under a strategy; it stays finite, and that of one device where asked.

    https://github.com/keras-team/keras/issues/20568. What still does so in Keras is a last batch
    that leaves a replica without an example, under BatchNormalization.
    """

    def make(strategy, *, synchronized):
        keras.utils.set_random_seed(1)
        rate = keras.optimizers.schedules.CosineDecay(0.01, decay_steps=20)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    layers.Dense(8, activation="relu"),
                    layers.BatchNormalization(synchronized=synchronized),
                    layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
        return model

    stock = make(two, synchronized=False)
    stock.fit(X[:5], Y[:5], batch_size=4, verbose=0)
    assert np.isnan(models.flat(stock)).any()
    trained = []
    for strategy, synchronized in ((two, False), (one, True), (two, True)):
        model = make(strategy, synchronized=synchronized)
        tfdist.fit(model, X[:17], Y[:17], batch_size=4, epochs=4, seed=3, verbose=0)
        trained.append(models.flat(model))
    assert np.isfinite(trained).all()
    np.testing.assert_allclose(*trained[1:], atol=1e-5)


class OwnStep(keras.Sequential):
    """A training step that reduces no gradient by itself."""

    def train_step(self, data):
        return own_step(self, self.optimizer)(data)


def test_keras_19308_gradients_of_a_step_of_ones_own_are_summed(one, two):
    """The optimizer no longer summed gradients; they are, before it clips, as on one device.

    https://github.com/keras-team/keras/issues/19308. Keras sums again, but what it sums is clipped.
    """

    def make(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = OwnStep([keras.Input((6,)), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.1))
        return model

    stock, alone, replicated = make(two), make(one), make(two)
    stock.fit(X[:6], Y[:6], batch_size=6, shuffle=False, verbose=0)
    for model in (alone, replicated):
        tfdist.fit(model, X[:6], Y[:6], batch_size=6, shuffle=False, verbose=0)
    np.testing.assert_allclose(models.flat(replicated), models.flat(alone), atol=1e-6)
    assert np.abs(np.subtract(models.flat(stock), models.flat(alone))).max() > 1e-3


class Rates(keras.callbacks.Callback):
    """Notes the learning rate at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(self.model.optimizer.learning_rate.numpy())


def test_keras_22010_a_run_interrupted_within_an_epoch_goes_on_at_its_rate(two, tmp_path):
    """How to go on from the middle of an epoch, at its rate, was asked; the bits are the same.

    https://github.com/keras-team/keras/issues/22010
    """

    def train(directory, *more):
        rates = Rates()
        schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 10, 0.9)
        with two.scope():
            model = models.regression(keras.optimizers.SGD(schedule, momentum=0.9))
        listed = [tfdist.BackupAndRestore(tmp_path / directory, save_freq=2), rates, *more]
        history = tfdist.fit(
            model, X, Y, batch_size=8, epochs=4, seed=3, verbose=0, callbacks=listed
        )
        return models.flat(model), history.history, rates.rates

    weights, history, rates = train("whole")
    with pytest.raises(Cut):
        train("cut", AtStep(15))
    assert train("cut") == (weights, history, rates[2:])


def test_keras_20463_a_backup_that_was_damaged_is_not_the_last_one(one, tmp_path):
    """A backup that an interruption had damaged ended each restart; the one before it is taken.

    https://github.com/keras-team/keras/issues/20463
    """

    def stock(*more):
        model = models.regression("sgd")
        backup = keras.callbacks.BackupAndRestore(tmp_path / "stock")
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[backup, *more])

    def train(directory, *more):
        with one.scope():
            model = models.regression("adam")
        backup = tfdist.BackupAndRestore(tmp_path / directory, save_freq=4)
        listed = [backup, *more]
        tfdist.fit(model, X, Y, batch_size=8, epochs=3, seed=3, verbose=0, callbacks=listed)
        return models.flat(model)

    with pytest.raises(Cut):
        stock(CutAt(2))
    halve(tmp_path / "stock" / "latest.weights.h5")
    with pytest.raises(OSError, match="truncated file"):
        stock()
    with pytest.raises(Cut):
        train("cut", CutAt(2))
    newest = max((tmp_path / "cut").glob("step-*"))
    halve(newest / "arrays.bin")
    assert train("cut") == train("whole")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_keras_20712_a_model_that_is_not_built_is_backed_up_and_resumed(tmp_path):
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
    assert models.flat(model) == models.flat(whole)


def test_keras_17012_the_best_model_outlives_an_interruption(one, tmp_path):
    """After an interruption a worse model took the place of the best; the best stays.

    https://github.com/keras-team/keras/issues/17012. The model of the test gets worse with each
    epoch, so that the first one is the best.
    """
    x, y = np.ones((8, 1), "float32"), np.zeros((8, 1), "float32")

    def train(fit, backup, checkpoint, *more):
        with one.scope():
            layer = layers.Dense(1, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layer])
            model.compile(keras.optimizers.SGD(1.25), "mse")
        fit(
            model, x, y, batch_size=8, epochs=4, validation_data=(x, y), verbose=0,
            callbacks=[backup, checkpoint, *more],
        )  # fmt: skip

    found = {}
    for name, (fit, callbacks) in {
        "stock": (keras.Model.fit, keras.callbacks),
        "tfdist": (tfdist.fit, tfdist),
    }.items():
        path = tmp_path / f"{name}.weights.h5"
        for more in ([CutAt(2)], []):
            backup = callbacks.BackupAndRestore(tmp_path / name)
            best = {"monitor": "val_loss", "save_best_only": True, "save_weights_only": True}
            checkpoint = callbacks.ModelCheckpoint(path, **best)
            try:
                train(fit, backup, checkpoint, *more)
            except Cut:
                continue
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
        model.load_weights(path)
        found[name] = models.flat(model)
    assert found == {"stock": [-3.375], "tfdist": [-1.5]}
