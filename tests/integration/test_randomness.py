"""Every draw of a step comes from (seed, step, replica): different in each, the same again."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import models
from tfdist.checkpoint.model_state import state_sha256, weights_sha256

RNG = np.random.RandomState(0)
STEPS, BATCH_SIZE, UNITS = 8, 6, 24
EXAMPLES = STEPS * BATCH_SIZE
ONES = np.ones((EXAMPLES, UNITS), "float32")
IMAGES = RNG.rand(EXAMPLES, 4, 4, 1).astype("float32")
TARGETS = RNG.randn(EXAMPLES, 1).astype("float32")


class Spy(keras.layers.Layer):
    """Notes, step by step and on each replica, which units of the first example are left."""

    def build(self, shape):
        options = {"dtype": "int32", "initializer": "zeros", "trainable": False}
        self.count = self.add_weight(shape=(), **options)
        self.seen = self.add_weight(shape=(STEPS,), **options)

    def call(self, x, training=False):
        if training:
            bits = tf.cast(x[0] != 0, tf.int32) * tf.bitwise.left_shift(1, tf.range(UNITS))
            noted = tf.one_hot(self.count.value, STEPS, dtype="int32") * tf.reduce_sum(bits)
            self.seen.assign(self.seen.value + noted)
            self.count.assign(self.count.value + 1)
        return x

    def masks(self, strategy):
        """The masks as numbers, [replica][step]."""
        copies = strategy.experimental_local_results(self.seen.value)
        return [copy.numpy().tolist() for copy in copies]


class Unseeded(keras.layers.Layer):
    """Draws from Keras' global generator."""

    def call(self, x, training=False):
        return x * tf.cast(keras.random.uniform(tf.shape(x)) < 0.5, x.dtype) if training else x


def watched(strategy, *, seed):
    """Trains a model that drops in three layers side by side; returns masks [layer][replica]."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input((UNITS,))
        spies = [Spy() for _ in range(3)]
        layers = [keras.layers.Dropout(0.5), keras.layers.Dropout(0.5), Unseeded()]
        branches = [spy(layer(x)) for spy, layer in zip(spies, layers, strict=True)]
        model = keras.Model(x, keras.layers.Dense(1)(keras.layers.Concatenate()(branches)))
        model.compile("sgd", "mse")
    tfdist.fit(model, ONES, TARGETS, BATCH_SIZE, seed=seed, verbose=0)
    return [spy.masks(strategy) for spy in spies]


def test_masks_differ_between_replicas_steps_and_layers(strategies):
    """That a model with Dropout cannot be made under a strategy was keras-team/keras#20611."""
    masks = np.array(watched(strategies[3], seed=7))
    assert masks.shape == (3, 3, STEPS)
    assert len(np.unique(masks)) == masks.size
    assert watched(strategies[3], seed=7) == masks.tolist()
    other = np.array(watched(strategies[3], seed=8))
    assert not set(other.flat) & set(masks.flat)


def test_large_seeds_differ_and_keras_seed_is_the_default(strategies):
    seeds = [5, 5 + 2**31, 5 + 2**40]
    masks = [np.array(watched(strategies[1], seed=seed)) for seed in seeds]
    assert len(np.unique(masks)) == 3 * masks[0].size
    # `watched` sets Keras' seed before each run.
    one, two = (watched(strategies[1], seed=None) for _ in range(2))
    assert one == two != masks[0].tolist()


class EverySteps(keras.callbacks.Callback):
    """Asks for a range that ends at each multiple."""

    def __init__(self, every):
        super().__init__()
        self.every = every

    def next_step(self, step):
        return (step // self.every + 1) * self.every


class EveryBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


def random_model():
    layers = keras.layers
    drawing = [layers.RandomFlip(), layers.RandomTranslation(0.2, 0.2), layers.GaussianNoise(0.1)]
    drawing += [layers.Conv2D(2, 3), layers.BatchNormalization(), layers.SpatialDropout2D(0.2)]
    drawing += [layers.Reshape((4, 2)), layers.GRU(3, dropout=0.2, recurrent_dropout=0.2)]
    drawing += [layers.Dropout(0.2), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4, 4, 1)), *drawing])
    model.compile("adam", "mse")
    return model


def trained(strategy, callback=None):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = random_model()
    callbacks = [callback] if callback else []
    states = [v for v in model.variables if "seed_generator_state" in v.path]
    before = [v.numpy().tolist() for v in states]
    tfdist.fit(model, IMAGES, TARGETS, 7, 2, seed=7, verbose=0, callbacks=callbacks)
    # What is saved does not depend on how often the model was run before.
    assert len(states) >= 5
    assert [v.numpy().tolist() for v in states] == before
    return model


@pytest.mark.parametrize(("replicas", "callback"), [(1, EveryBatch()), (2, EverySteps(3))])
def test_bits_do_not_depend_on_the_ranges_of_steps(strategies, replicas, callback):
    whole = trained(strategies[replicas])
    cut = trained(strategies[replicas], callback)
    assert weights_sha256(cut) == weights_sha256(whole)
    assert state_sha256(cut) == state_sha256(whole)


class Drawing(keras.Model):
    """Predicts with the random layers at work: what they do can be looked at."""

    def __init__(self, *layers):
        super().__init__()
        self.drawing = list(layers)

    def call(self, x):
        return [layer(x, training=True) for layer in self.drawing]


def drawn(strategy, layers, x, batch_size):
    with strategy.scope():
        model = Drawing(*layers())
    return [np.asarray(out) for out in tfdist.predict(model, x, batch_size, verbose=0)]


def assert_uncorrelated(samples):
    """Rows of independent draws: no pair correlates beyond chance (5 standard errors)."""
    correlations = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlations).max() < 5 / np.sqrt(samples.shape[1])


def test_dropout_and_noise_have_their_rates_and_are_independent(strategies):
    rates, x = (0.1, 0.5, 0.8), np.ones((12, 5000), "float32")

    def layers():
        drops = [keras.layers.Dropout(rate) for rate in rates for _ in range(2)]
        return [*drops, *(keras.layers.GaussianNoise(0.5) for _ in range(2))]

    # Of each layer: 2 steps x 3 replicas x 2 examples.
    *dropped, noisy, noisier = drawn(strategies[3], layers, x, 6)
    for rate, values in zip(rates, np.reshape(dropped, (3, 24, 5000)), strict=True):
        kept = values != 0
        np.testing.assert_allclose(values[kept], 1 / (1 - rate), rtol=1e-5)
        deviation = np.sqrt(rate * (1 - rate) / kept.size)
        assert abs(kept.mean() - (1 - rate)) < 5 * deviation
    noise = np.concatenate([noisy, noisier]) - 1
    assert abs(noise.mean()) < 5 * 0.5 / np.sqrt(noise.size)
    assert abs(noise.std() - 0.5) < 0.01
    assert_uncorrelated(np.concatenate([*(values != 0 for values in dropped), noise]))


class Langevin(keras.optimizers.SGD):
    """Adds noise to each update, as stochastic gradient Langevin dynamics does."""

    def update_step(self, gradient, variable, learning_rate):
        gradient += keras.random.normal(gradient.shape)
        super().update_step(gradient, variable, learning_rate)


def test_replicas_draw_alike_in_an_update(strategies):
    """Each updates its own copy of a weight: by other numbers the copies would drift apart."""
    kernels = []
    for replicas in (1, 3):
        keras.utils.set_random_seed(1)
        model = models.linear(strategies[replicas], inputs=(UNITS,), optimizer=Langevin)
        tfdist.fit(model, ONES, TARGETS, BATCH_SIZE, seed=7, verbose=0)
        kernels += strategies[replicas].experimental_local_results(model.layers[0].kernel.value)
    for kernel in kernels[1:]:
        np.testing.assert_allclose(kernel, kernels[0], atol=1e-6)
