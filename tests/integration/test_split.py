"""What a step that writes to a variable in parts reads of it then, and its gradients by it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refused
from tfdist.ps.split import SplitVariable, reading_once

START = np.arange(6, dtype="float32").reshape(3, 2)


def in_parts():
    """A Keras variable, as a strategy with `split_bytes` makes it."""
    variable = keras.Variable(START)
    parts = [tf.Variable(START[:2]), tf.Variable(START[2:])]
    variable._value = SplitVariable(parts, name="weights")
    return variable


def traced(step, variable):
    """The step's concrete function."""

    def run():
        with reading_once():
            return step(variable)

    return tf.function(run, autograph=False).get_concrete_function()


def update(variable, power=2):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**power)
    variable.assign_sub(0.1 * tape.gradient(loss, variable))
    return loss


def twice(variable):
    return [update(variable), update(variable, 3), update(variable)]


def twice_in_conditions(variable):
    for _ in range(2):
        tf.cond(tf.constant(True), lambda: update(variable), lambda: 0.0)
    return [update(variable)]


def both_within_one_condition(variable):
    update(variable)

    def branch():
        return update(variable) + update(variable, 3)

    return [tf.cond(tf.constant(True), branch, lambda: 0.0), tf.identity(variable)]


def of_one_tape_after_a_write(variable):
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_sum(variable**2), tf.reduce_sum(variable**3)]
    for loss in losses:
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
    return losses


def around_a_write(variable):
    with tf.GradientTape() as tape:
        first = tf.reduce_sum(variable**2)
        variable.assign_add(tf.ones([3, 2]))
        loss = first + tf.reduce_sum(variable**3)
    return [tape.gradient(loss, variable), tf.identity(variable)]


@pytest.mark.parametrize(
    "step",
    [
        twice,
        twice_in_conditions,
        both_within_one_condition,
        of_one_tape_after_a_write,
        around_a_write,
    ],
    ids=lambda step: step.__name__,
)
def test_a_split_variable_steps_like_a_whole_one(step):
    parts, whole = traced(step, in_parts()), traced(step, keras.Variable(START))
    for _ in range(2):
        for seen, expected in zip(parts(), whole(), strict=True):
            np.testing.assert_allclose(seen, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "step",
    [
        lambda v: tf.while_loop(lambda i: i < 2, lambda i: (i + 1, update(v))[:1], [0]),
        lambda v: tf.function(lambda: update(v), autograph=False)(),
    ],
    ids=["loop", "function"],
)
def test_an_update_in_a_loop_is_refused(step):
    assert refused(lambda: traced(step, in_parts())) == ("step", "split-variable")
