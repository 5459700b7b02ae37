"""What a step that writes to a variable in parts reads of it then, and its gradients by it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refused
from tfdist.ps import strategy as ps_strategy
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


def with_a_penalty_on_the_gradient(variable):
    losses = []
    x = tf.constant([[1.0, 2.0, 3.0]])
    for _ in range(2):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.tanh(x @ variable))
            loss = y + tf.reduce_sum(inner.gradient(y, x) ** 2)
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        losses.append(loss)
    return losses


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


def by_rows(variable):
    gradients = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variable, [2, 0, 2]) ** 2)
        gradients.append(tf.convert_to_tensor(tape.gradient(loss, variable)))
        variable.assign_sub(0.1 * gradients[-1])
    return gradients


def in_a_loop_after_a_write(variable):
    update(variable)
    with tf.GradientTape() as tape:
        turn = lambda i, x: (i + 1, x + tf.reduce_sum(variable**2))  # noqa: E731
        total = tf.while_loop(lambda i, x: i < 3, turn, [0, 0.0], maximum_iterations=3)[1]
    return [tape.gradient(total, variable)]


@pytest.mark.parametrize(
    "step",
    [
        twice,
        twice_in_conditions,
        both_within_one_condition,
        with_a_penalty_on_the_gradient,
        of_one_tape_after_a_write,
        around_a_write,
        by_rows,
        in_a_loop_after_a_write,
    ],
    ids=lambda step: step.__name__,
)
def test_a_split_variable_steps_like_a_whole_one(step):
    parts, whole = traced(step, in_parts()), traced(step, keras.Variable(START))
    for _ in range(2):
        for seen, expected in zip(parts(), whole(), strict=True):
            np.testing.assert_allclose(seen, expected, rtol=1e-5)


def test_each_part_is_read_once_between_two_writes():
    def read_often(variable):
        for _ in range(3):
            tf.identity(variable)
        variable.assign_add(tf.ones([3, 2]))
        return [tf.identity(variable) + tf.identity(variable)]

    operations = traced(read_often, in_parts()).graph.get_operations()
    assert sum(operation.type == "ReadVariableOp" for operation in operations) == 2 * 2


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


def test_a_gradient_of_dynamic_shape_is_split_among_partitions():
    variable, found = in_parts().value, []
    shapes = [None, [None, 2], [3, 2], [], [2, 2]]

    @tf.function(input_signature=[tf.TensorSpec(shape) for shape in shapes], autograph=False)
    def update(*values):
        found.extend(ps_strategy._is_of(value, variable) for value in values)
        return [variable.rows_of(value, 1) for value in values[:3]]

    rows = update(START, START, START, 0.1, START[:2])
    assert found == [True, True, True, False, False]
    for mine in rows:
        np.testing.assert_array_equal(mine, START[2:])
