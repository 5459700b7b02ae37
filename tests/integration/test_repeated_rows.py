"""Rows of a table that occur several times, in a replica's batch and on two replicas.

Their gradients are sparse, a slice for each occurrence. What an optimizer squares, clips or takes
the sign of is the sum of a row's slices, as of a dense gradient on one device.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

RNG = np.random.RandomState(0)
TOKENS = RNG.randint(0, 5, (8, 4))  # of 7: some often, some never
TARGETS = RNG.randn(8, 4).astype("float32")
OPTIMIZERS = {
    "sgd": functools.partial(keras.optimizers.SGD, momentum=0.9, nesterov=True),
    "rmsprop": functools.partial(keras.optimizers.RMSprop, momentum=0.5, centered=True),
    "adam": functools.partial(keras.optimizers.Adam, amsgrad=True),
    **{
        name.lower(): getattr(keras.optimizers, name)
        for name in (
            *("AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion"),
            *("Lamb", "Muon", "ScheduleFreeAdamW"),
        )
        if hasattr(keras.optimizers, name)
    },
}
SETTINGS = {
    "weight_decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "accumulation": {"gradient_accumulation_steps": 2, "clipnorm": 0.05, "weight_decay": 0.1},
}


def variables():
    """Rows for 7 tokens and 4 positions, and a dense vector."""
    rng = np.random.RandomState(1)
    return [keras.Variable(rng.randn(*shape).astype("f")) for shape in ((11, 3), (3,))]


def loss_of(variables, tokens, targets):
    table, scale = variables
    rows = keras.ops.take(table, tokens, axis=0)
    rows += keras.ops.take(table, keras.ops.arange(7, 11), axis=0)
    return tf.reduce_mean((tf.reduce_sum(rows**2 * scale, -1) - targets) ** 2)


def trained(strategy, names, setting, run):
    """The weights that optimizers make of the same gradients, in one program."""
    with strategy.scope():
        start = variables()
        trained_by = {name: variables() for name in names}
        optimizers = {name: OPTIMIZERS[name](0.01, **SETTINGS[setting]) for name in names}
        for name, optimizer in optimizers.items():
            optimizer.build(trained_by[name])

    def step(batch, *, dense=False):
        with tf.GradientTape() as tape:
            loss = loss_of(start, *batch)
        by_row, by_scale = tape.gradient(loss, start)
        assert isinstance(by_row, tf.IndexedSlices)
        if dense:
            by_row = tf.convert_to_tensor(by_row)
        for name, optimizer in optimizers.items():
            optimizer.apply([by_row, by_scale], trained_by[name])
        return {"loss": loss}

    with strategy.scope():
        run(step)
    return {name: [v.numpy() for v in mine] for name, mine in trained_by.items()}


def by_keras(step):
    """Keras on one device, with dense gradients."""
    for first in (0, 4, 0, 4):
        step((TOKENS[first : first + 4], TARGETS[first : first + 4]), dense=True)


def by_tfdist(step):
    data = TOKENS, TARGETS
    tfdist.StepLoop(step, data, global_batch_size=4, shuffle=False, seed=3).run(4)


# Every optimizer with one thing that Keras' base class does; all that it does, with some of them.
SOME = ("sgd", "adam", "adafactor")


@pytest.mark.parametrize(
    ("replicas", "setting", "names"),
    [
        (2, "weight_decay", tuple(OPTIMIZERS)),
        (1, "weight_decay", SOME),
        *((2, setting, SOME) for setting in SETTINGS if setting != "weight_decay"),
    ],
)
def test_repeated_rows_are_one_gradient_for_every_optimizer(strategies, replicas, setting, names):
    expected = trained(tf.distribute.get_strategy(), names, setting, by_keras)
    found = trained(strategies[replicas], names, setting, by_tfdist)
    start = [v.numpy() for v in variables()]
    for name, values in expected.items():
        for mine, value, before in zip(found[name], values, start, strict=True):
            assert np.abs(value - before).max() > 1e-5, name
            np.testing.assert_allclose(mine, value, rtol=0, atol=1e-6, err_msg=name)
