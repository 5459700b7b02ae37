"""For which writes of a step the clock waits before it counts the step."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.training.engines.update_clock import UpdateClock


def waited_for(*, devices, clock_on):
    """The variables whose writes a step that trains them, on these devices, is counted after."""
    variables = []
    for device in devices:
        with tf.device(device):
            variables.append(tf.Variable([1.0, 2.0], name=f"on_{device[-1]}"))
    with tf.device(clock_on):
        other = tf.Variable(0.0, trainable=False)
        clock = UpdateClock()

    def work(watcher):
        with watcher, tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable**2) for variable in variables)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)
        other.assign_add(1.0)
        return loss

    def run(first):
        first, now, numbers = clock.begin(first)
        body = lambda step, numbers: (step + 1, *clock.step([numbers], work=work)[1])  # noqa: E731
        numbers = tf.while_loop(lambda step, _: step < 3, body, [first, numbers[0]])[1]
        return clock.staleness(now, [numbers])

    graph = tf.function(run, autograph=False).get_concrete_function(tf.constant(0)).graph
    loop = next(op for op in graph.get_operations() if op.type == "While")
    body = graph._get_function(loop.get_attr("body").name).graph
    number = next(op for op in body.get_operations() if op.type == "ResourceCountUpTo")
    return [op.type for op in number.control_inputs]


@pytest.mark.parametrize(
    ("devices", "clock_on", "writes"),
    [
        (["/CPU:0", "/CPU:1"], "/CPU:1", 1),
        (["/CPU:0", "/CPU:1"], "/CPU:2", 2),
    ],
)
def test_a_step_is_counted_after_its_update(devices, clock_on, writes):
    waited = waited_for(devices=devices, clock_on=clock_on)
    assert waited == ["AssignSubVariableOp"] * writes
