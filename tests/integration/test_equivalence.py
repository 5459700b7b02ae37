"""Replicas against one device: the same weights, whatever the optimizer and the split."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.integration.conftest import mirrored
from tfdist.training.keras_compat import reduction

RNG = np.random.RandomState(0)
X = RNG.randn(64, 6).astype("float32")
Y = (RNG.randn(64, 1) * 3).astype("float32")
Y[7] *= 20  # an example whose gradient dominates its replica's, so that clipping tells


def loss_scaled():
    inner = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=1.0)
    return keras.optimizers.LossScaleOptimizer(inner)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw_clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.05, clipvalue=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, clipnorm=0.5),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation_clipped": lambda: keras.optimizers.SGD(
        0.05, momentum=0.9, global_clipnorm=0.5, gradient_accumulation_steps=3
    ),
    "ema": lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=2),
    "loss_scaling": loss_scaled,
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    ),
}


def trained(strategy, *, optimizer, loss="mse", examples=64, epochs=1):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(1.5)),
        ]
        model = keras.Sequential(layers)
        model.compile(OPTIMIZERS[optimizer](), loss)
    x, y = X[:examples], Y[:examples]
    history = tfdist.fit(model, x, y, batch_size=8, epochs=epochs, seed=3, verbose=0)
    return model, history


def difference(one, other):
    return max(
        float(np.abs(a - b).max())
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


@pytest.fixture(scope="module")
def on_one_device(strategies):
    """What one device makes of 60 examples, by optimizer; trained when it is first asked for."""
    return functools.cache(lambda name: trained(strategies[1], optimizer=name, examples=60))


# Three have shares that differ and one that is empty; two have the same share at every step.
EVEN = ("sgd", "accumulation_clipped", "loss_scaling")


@pytest.mark.parametrize(
    ("optimizer", "replicas"), [*((name, 3) for name in OPTIMIZERS), *((name, 2) for name in EVEN)]
)
def test_replicas_equal_one_device(strategies, on_one_device, optimizer, replicas):
    # 60 examples in batches of 8: shares of 2, 3, 3 under three replicas, and a last batch of 4.
    one, one_history = on_one_device(optimizer)
    many, many_history = trained(strategies[replicas], optimizer=optimizer, examples=60)
    assert difference(one, many) < 1e-6
    assert many.optimizer.iterations.numpy() == one.optimizer.iterations.numpy() > 0
    np.testing.assert_allclose(many_history.history["loss"], one_history.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("optimizer", [*EVEN, "ema"])
def test_a_group_of_one_replica_equals_one_device(on_one_device, optimizer):
    """As what is left of a job that was resized to one worker."""
    one, one_history = on_one_device(optimizer)
    group, history = trained(mirrored(1), optimizer=optimizer, examples=60)
    assert difference(one, group) < 1e-6
    np.testing.assert_allclose(history.history["loss"], one_history.history["loss"], rtol=1e-5)


def sequences(strategy):
    """A layer over sequences: the shape of its kernel's gradient is known at run time alone."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4, 6)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x = np.stack([X, X[::-1], X**2, X - 1], 1)[:21]
    tfdist.fit(model, x, x[:, :, :2], batch_size=8, epochs=2, seed=3, verbose=0)
    return model


def test_gradients_whose_shape_is_not_known_are_summed(strategies):
    one, many = sequences(strategies[1]), sequences(strategies[3])
    assert difference(one, many) < 1e-6


@pytest.mark.parametrize("shapes", [[None, (2,)], [(0,), (3,)], [None, None, (2**20,), (1,)]])
def test_every_tensor_travels_once(shapes):
    @tf.function(input_signature=[tf.TensorSpec(shape) for shape in shapes])
    def packs(*tensors):
        found.extend(index for pack in reduction._packs(tensors) for index in pack)

    found = []
    packs.get_concrete_function()
    assert sorted(found) == list(range(len(shapes)))


def test_replicas_equal_one_device_after_a_hundred_steps(strategies):
    one, _ = trained(strategies[1], optimizer="adamw_clipped", epochs=13)
    many, _ = trained(strategies[3], optimizer="adamw_clipped", epochs=13)
    assert one.optimizer.iterations.numpy() == 104
    assert difference(one, many) < 1e-5


def test_sum_reduction_is_not_divided_by_the_replicas(strategies):
    losses = [keras.losses.MeanSquaredError(reduction="sum") for _ in range(2)]
    one, _ = trained(strategies[1], loss=losses[0], optimizer="clipvalue", examples=60)
    many, _ = trained(strategies[3], loss=losses[1], optimizer="clipvalue", examples=60)
    assert difference(one, many) < 1e-6


def test_an_overflow_on_one_replica_is_seen_by_all(strategies):
    for position in (0, 2, 5):
        with strategies[3].scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mse")
        y = np.ones((6, 1), "float32")
        y[position] = 3e38
        before = model.get_weights()
        tfdist.fit(model, np.ones((6, 1), "float32"), y, batch_size=6, verbose=0)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)
        assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14


def test_batch_statistics_are_the_same_on_every_replica(strategies):
    with strategies[3].scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    tfdist.fit(model, X, Y, batch_size=8, epochs=2, verbose=0)
    for variable in model.non_trainable_variables:
        copies = [c.numpy() for c in strategies[3].experimental_local_results(variable.value)]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    assert np.abs(model.layers[1].moving_mean.numpy()).max() > 0


def test_a_sum_without_a_regularizer_equals_one_device(strategies):
    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            loss = keras.losses.MeanSquaredError(reduction="sum")
            model.compile(keras.optimizers.SGD(0.001), loss)
        # The last step has one example: what stands in for the empty shares is not summed.
        options = {"batch_size": 8, "seed": 3, "verbose": 0, "validation_data": (X[:20], Y[:20])}
        return model, tfdist.fit(model, X[:57], Y[:57], **options).history

    (one, one_logs), (many, many_logs) = train(strategies[1]), train(strategies[3])
    assert difference(one, many) < 1e-6
    assert list(one_logs) == ["loss", "val_loss"]
    for name, values in one_logs.items():
        np.testing.assert_allclose(many_logs[name], values, rtol=1e-5)
