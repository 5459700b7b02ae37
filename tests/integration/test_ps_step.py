"""How stale a step of a ps job is: which updates of others count."""

import pytest
import tensorflow as tf

from tfdist.ps.engine import UpdateClock

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
        begin = [0, *self.clock.begin()]
        _, *ages = tf.while_loop(lambda i, *_: i < STEPS, self.body, begin, parallel_iterations=1)
        return self.clock.staleness(ages)

    def traced(self):
        return tf.function(self.run, autograph=False).get_concrete_function()

    def stale(self):
        return self.traced()().numpy().tolist()


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
def test_staleness_of_a_step_is_its_maximum_over_servers(others, stale):
    """What others did before it began to read is not between."""
    clocks, between = ["/CPU:0", "/CPU:1", "/CPU:2"], {"CPU:1": 4}
    job = Job(devices=clocks[:2], clocks=clocks, meanwhile=others, between=between)
    assert job.stale() == [stale] * STEPS
