"""How stale a step was: which updates of others count, and for which writes a clock waits."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.ps.clock import UpdateClock
from tfdist.ps.messages import outermost

STEPS = 3


class Job:
    """A step that trains a variable on each device, while others update on some of them."""

    def __init__(self, *, devices, clocks, meanwhile=None, between=None):
        self.variables = []
        for device in devices:
            with tf.device(device):
                self.variables.append(tf.Variable([1.0, 2.0]))
        with tf.device(clocks[-1]):
            self.other = tf.Variable(0.0, trainable=False)
        self.clock = UpdateClock(clocks)
        self.meanwhile, self.between = meanwhile or {}, between or {}

    def updated_by_others(self, numbers):
        return [
            count.assign_add(numbers[device[-5:]])
            for device, count in self.clock._counts.items()
            if device[-5:] in numbers
        ]

    def work(self, watcher):
        with watcher, tf.GradientTape() as tape:
            read = [variable.read_value() for variable in self.variables]
            with tf.control_dependencies(read):
                others = self.updated_by_others(self.meanwhile)
            with tf.control_dependencies(others):
                loss = sum(tf.reduce_sum(tf.identity(value) ** 2) for value in read)
        gradients = tape.gradient(loss, self.variables)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        self.other.assign_add(1.0)
        return loss

    def body(self, step, *ages):
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        ages = self.clock.step(list(ages), work=self.work)[1]
        self.clock.look_first(graph.get_operations()[before:])
        self.updated_by_others(self.between)  # after the step's own update, before the next reads
        return step + 1, *ages

    def run(self):
        _, *ages = tf.while_loop(
            lambda step, *_: step < STEPS, self.body, [0, *self.clock.begin()],
            parallel_iterations=1,
        )  # fmt: skip
        return self.clock.staleness(ages)

    def traced(self):
        return tf.function(self.run, autograph=False).get_concrete_function()


@pytest.mark.parametrize(
    ("others", "stale"),
    [
        ({}, 0),
        ({"CPU:0": 2}, 2),
        ({"CPU:1": 3}, 3),  # on a server where only a part of the step's variables is
        ({"CPU:0": 2, "CPU:1": 5}, 5),
        ({"CPU:2": 7}, 0),  # on one that holds none of them
    ],
)
def test_a_step_is_as_stale_as_on_that_server_on_which_it_is_most(others, stale):
    clocks = ["/CPU:0", "/CPU:1", "/CPU:2"]
    job = Job(devices=clocks[:2], clocks=clocks, meanwhile=others)
    assert job.traced()().numpy().tolist() == [stale] * STEPS


def test_what_others_did_before_a_step_began_to_read_is_not_between():
    job = Job(devices=["/CPU:0", "/CPU:1"], clocks=["/CPU:0", "/CPU:1"], between={"CPU:1": 4})
    assert job.traced()().numpy().tolist() == [0] * STEPS


def test_a_step_that_trains_nothing_counts_on_the_first_server():
    job = Job(devices=[], clocks=["/CPU:0", "/CPU:1"])
    job.work = do_nothing
    assert job.traced()().numpy().tolist() == [0] * STEPS
    assert job.clock.applied == STEPS


def do_nothing(watcher):
    with watcher:
        return tf.zeros([])


class InLoops(Job):
    """Reads in a loop and updates in another, on the second of two servers alone."""

    def work(self, watcher):
        (variable,) = self.variables
        with watcher:
            read = tf.while_loop(
                lambda i, _: i < 2,
                lambda i, x: (i + 1, x + variable.read_value()),
                [0, tf.zeros([2])],
            )[1]
        with tf.control_dependencies([read]):
            others = self.updated_by_others(self.meanwhile)
        with tf.control_dependencies(others):
            tf.while_loop(lambda i: i < 2, self.turn, [0])
        return tf.zeros([])

    def turn(self, i):
        self.variables[0].assign_sub([0.1, 0.1])
        return i + 1


def test_a_step_that_updates_in_a_loop_counts_once_that_is_done():
    job = InLoops(devices=["/CPU:1"], clocks=["/CPU:0", "/CPU:1"], meanwhile={"CPU:1": 3})
    assert job.traced()().numpy().tolist() == [3] * STEPS
    assert [int(count.numpy()) for count in job.clock._counts.values()] == [0, 4 * STEPS]
    assert [len(before) for before in counted_after(job.traced().graph)] == [1]


def counted_after(graph):
    """The loops that each count of a step waits for."""
    operations = body_of(graph)
    counts = [op for op in operations if op.type == "ResourceCountUpTo"]
    loops = ("While", "StatelessWhile")
    return [[one for one in op.control_inputs if one.type in loops] for op in counts]


def body_of(graph):
    loop = next(op for op in graph.get_operations() if op.type == "While")
    return graph._get_function(loop.get_attr("body").name).graph.get_operations()


def test_a_clock_is_read_before_what_the_step_does_on_its_server_and_counts_after_its_update():
    graph = Job(devices=["/CPU:0", "/CPU:1"], clocks=["/CPU:0", "/CPU:1"]).traced().graph
    operations = body_of(graph)
    looked, counted = [], []
    for op in operations:
        for before in op.control_inputs:
            if op.type == "ReadVariableOp" and before.type == "Identity":  # of a clock
                looked.append((server(op.inputs[0]), server(before.inputs[0].op.inputs[0])))
            if op.type == "ResourceCountUpTo" and before.type == "AssignSubVariableOp":
                counted.append((server(op.inputs[0]), server(before.inputs[0])))
    assert looked == counted == [("CPU:0", "CPU:0"), ("CPU:1", "CPU:1")]


def server(handle):
    return outermost(handle).device[-5:]
