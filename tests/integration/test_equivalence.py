"""Replicas against one device: the same weights, whatever the optimizer and the split."""

import keras
import numpy as np
import pytest

import tfdist
from tests.integration.conftest import mirrored
from tests.models import difference
from tests.multiprocess.programs import zoo

X, Y = zoo.X, zoo.Y


def trained(strategy):
    # 60 examples in batches of 8: shares of 2, 3, 3 under three replicas, and a last batch of 4.
    with strategy.scope():
        model = zoo.penalized("loss_scaling")
    history = tfdist.fit(model, X, Y, batch_size=8, seed=3, verbose=0)
    return model, history


@pytest.fixture(scope="module")
def on_one_device(strategies):
    """What one device makes of a few steps of each optimizer, and of an epoch of one."""
    every = zoo.by_every_optimizer(strategies[1], steps=8)
    return every, *trained(strategies[1])


@pytest.fixture(params=[1, 3])
def group(request, strategies):
    """Replicas; one as of what is left of a job that was resized to one worker."""
    return strategies[request.param] if request.param > 1 else mirrored(1)


def test_replicas_equal_one_device(group, on_one_device):
    expected, one, one_history = on_one_device
    found = zoo.by_every_optimizer(group, steps=8)
    for name, (updates, weights) in expected.items():
        assert found[name][0] == updates > 0
        np.testing.assert_allclose(found[name][1], weights, rtol=0, atol=1e-6, err_msg=name)
    many, history = trained(group)
    assert difference(one, many) < 1e-6
    assert many.optimizer.iterations.numpy() == one.optimizer.iterations.numpy() == 8
    np.testing.assert_allclose(history.history["loss"], one_history.history["loss"], rtol=1e-5)


def test_a_batch_with_fewer_examples_than_replicas_equals_one_device(strategies):
    def results(strategy):
        with strategy.scope():
            model = zoo.penalized("adam")
        data = (X[:5], Y[:5])
        options = {"batch_size": 2, "seed": 3, "verbose": 0}
        history = tfdist.fit(model, *data, validation_data=data, **options).history
        outputs = tfdist.predict(model, X[:5], batch_size=1, verbose=0)
        return [*model.get_weights(), outputs, *history.values()]

    for found, expected in zip(*map(results, (strategies[3], strategies[1])), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_overflow_on_one_replica_is_seen_by_all(strategies):
    with strategies[3].scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mse")
    y = np.ones((18, 1), "float32")
    y[[0, 6 + 2, 12 + 5]] = 3e38  # in each of three steps on another replica
    before = model.get_weights()
    tfdist.fit(model, np.ones_like(y), y, batch_size=6, shuffle=False, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**12


class CountsSteps(keras.layers.Layer):
    def build(self, input_shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.steps.assign_add(1.0)
        return inputs


class Follows(keras.layers.Layer):
    """Follows the mean of its inputs, also of a validation's."""

    def __init__(self, aggregation):
        super().__init__(name=aggregation)
        self.options = {"initializer": "zeros", "trainable": False, "aggregation": aggregation}

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], **self.options)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x


AGGREGATIONS = "none", "mean", "sum", "only_first_replica"


def test_batch_statistics_are_the_same_on_every_replica(strategies):
    def train(strategy):
        layers = keras.layers
        with strategy.scope():
            hidden = layers.Dense(4), layers.BatchNormalization(), CountsSteps()
            following = [keras.Input((6,)), *map(Follows, AGGREGATIONS)]
            model = keras.Sequential([*following, *hidden, layers.Dense(1)])
            model.compile("adam", "mse")
        # The last batch of the validation has one example: two replicas have an empty share.
        given = {"validation_data": (X[:17], Y[:17]), "seed": 3, "verbose": 0}
        tfdist.fit(model, X, Y, batch_size=8, epochs=2, **given)
        return model

    one, model = train(strategies[1]), train(strategies[3])
    for name in AGGREGATIONS:
        mean = one.get_layer(name).mean
        np.testing.assert_allclose(model.get_layer(name).mean, mean, atol=1e-6, err_msg=name)
    *_, normalized, counting, _ = model.layers
    assert counting.steps.numpy() == 22  # though shares of 3/8 and 2/8 do not sum up to 1
    for variable in model.non_trainable_variables:
        copies = [c.numpy() for c in strategies[3].experimental_local_results(variable.value)]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    assert np.abs(normalized.moving_mean.numpy()).max() > 0


def test_half_precision_statistics_equal_one_device(strategies):
    """Thirds do not sum to 1 there: step by step a moving mean faded."""
    means = []
    for replicas in (1, 3):
        with strategies[replicas].scope():
            layer = keras.layers.BatchNormalization(dtype="float16")
            model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        tfdist.fit(model, np.full_like(X, 3.21), Y, batch_size=3, epochs=20, verbose=0)
        means.append(np.asarray(layer.moving_mean))
    np.testing.assert_array_equal(*means)
