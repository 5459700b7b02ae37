"""What a step of a ps job sends and makes, without the job."""

import concurrent.futures
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource
from tfdist.ps import messages
from tfdist.ps.engine import UpdateClock
from tfdist.ps.keras_compat import taken
from tfdist.ps.messages import outermost, read_together, sent_together
from tfdist.strategy import job_of
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import GraphFeed, Order

X = np.arange(60, dtype=np.float32).reshape(20, 3)


def test_gradients_sent_together_are_the_same_to_the_bit(monkeypatch):
    monkeypatch.setattr(messages, "server_of", lambda variable: 0)
    here = SimpleNamespace(device="/CPU:0")
    rng = np.random.RandomState(0)
    kinds = [((4, 5), "f4"), ((3,), "f2"), ((), "f4"), ((2, 2), "f2"), ((1, 3), "f4")]
    given = [np.asarray(rng.randn(*shape), dtype) for shape, dtype in kinds]

    @tf.function
    def sent():
        pairs = sent_together([(tf.constant(value), here) for value in given])
        assert all(variable is here for _, variable in pairs)
        return [gradient for gradient, _ in pairs]

    for value, gradient in zip(given, sent(), strict=True):
        np.testing.assert_array_equal(gradient, value)
    operations = sent.get_concrete_function().graph.get_operations()
    assert sum(one.type == "ConcatV2" for one in operations) == 2  # one for each type


class Reading:
    """A step that reads small and large variables, some of them twice, updates and reads again."""

    def __init__(self):
        rng = np.random.RandomState(0)
        shapes = (3, 5), (5,), (5, 4000), (2,), (3,)
        made = [tf.Variable(rng.randn(*shape).astype("f4")) for shape in shapes]
        self.kernel, self.bias, self.wide, self.scale, self.shift = made
        self.trained = [self.kernel, self.bias, self.wide]

    def __call__(self, x):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ self.kernel + self.bias)
            hidden = tf.while_loop(lambda i, _: i < 3, self._turn(), [0, hidden])[1]
            loss = tf.reduce_sum((hidden @ self.wide) ** 2) + tf.reduce_sum(self.wide**2)
            loss = loss * tf.reduce_sum(self.scale.value()) + tf.reduce_max(self.shift.value())
        for variable, gradient in zip(self.trained, tape.gradient(loss, self.trained), strict=True):
            variable.assign_sub(1e-5 * gradient)
        with tf.control_dependencies([self.shift.assign_add([1.0, 2.0, 3.0])]):
            shifted = self.shift.read_value()
        return loss, tf.reduce_sum(self.bias.value()), shifted

    def _turn(self):
        shift = self.shift.value()  # which the loop takes from outside of it
        return lambda i, hidden: (i + 1, hidden + shift[0])

    def traced(self, x, *, together):
        """The step as a function, its reads rewired or as they were."""

        @tf.function(autograph=False)
        def run(x):
            found = self(x)
            if together:
                read_together(tf.compat.v1.get_default_graph().get_operations())
            return found

        return run.get_concrete_function(x)


def test_grouped_reads_have_the_same_bits_and_follow_writes(monkeypatch):
    monkeypatch.setattr(messages, "_is_server", lambda device: True)
    x = tf.constant(X[:4] / 60)
    seen = {}
    for together in (False, True):
        step = Reading()
        run = step.traced(x, together=together)
        for _ in range(3):
            found = run(x)
            np.testing.assert_array_equal(found[2], step.shift)
        kinds = [operation.type for operation in run.graph.get_operations()]
        assert ("SplitV" in kinds) == together
        seen[together] = [*found, *step.trained]
    for one, other in zip(*seen.values(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def shifted(batch, **which):
    return keras.tree.map_structure(lambda leaf: leaf + 1.0, batch)


@pytest.mark.parametrize("transform", [None, shifted])
def test_a_worker_makes_its_own_untransformed_batches(transform):
    source = ArraySource(X, transform=transform)
    plan = EpochPlan.uniform(epochs=2, examples=20, global_batch_size=4)
    order = Order(examples=20, shuffle=True)
    job = job_of(tf.distribute.get_strategy())
    feed = GraphFeed(source, plan, job=job, seed=1, order=order)
    steps = range(3, 9)

    @tf.function(autograph=False)
    def parts(given):
        part_of = feed.worker_parts(given, steps.start, steps.stop)
        return [part_of(tf.constant(step, tf.int64)).data for step in steps]

    given = iter(feed.worker_dataset())
    expected = [feed.at(tf.constant(step, tf.int64))[0].data for step in steps]
    for found, batch in zip(parts(given), expected, strict=True):
        for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(batch), strict=True):
            np.testing.assert_array_equal(one, other)
    # A dataset is traced, optimized and started anew in each work unit.
    kinds = {op.type for op in parts.get_concrete_function(given).graph.get_operations()}
    assert any("Dataset" in kind for kind in kinds) == (transform is not None)


# How stale a step was: which updates of others count, and for which writes a clock waits.


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


def test_a_step_without_updates_counts_on_the_first_server():
    job = Job(devices=[], clocks=["/CPU:0", "/CPU:1"])
    job.work = do_nothing
    assert job.stale() == [0] * STEPS
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


def test_a_step_that_updates_in_a_loop_counts_once():
    job = InLoops(devices=["/CPU:1"], clocks=["/CPU:0", "/CPU:1"], meanwhile={"CPU:1": 3})
    assert job.stale() == [3] * STEPS
    assert [int(count.numpy()) for count in job.clock._counts.values()] == [0, 4 * STEPS]
    (count,) = [op for op in body_of(job) if op.type == "ResourceCountUpTo"]
    assert sum(op.type in ("While", "StatelessWhile") for op in count.control_inputs) == 1


def test_a_clock_is_read_first_and_advances_after_updates():
    looked, counted = [], []
    for op in body_of(Job(devices=["/CPU:0", "/CPU:1"], clocks=["/CPU:0", "/CPU:1"])):
        for before in op.control_inputs:
            if op.type == "ReadVariableOp" and before.type == "Identity":  # of a clock
                looked.append((server(op.inputs[0]), server(before.inputs[0].op.inputs[0])))
            if op.type == "ResourceCountUpTo" and before.type == "AssignSubVariableOp":
                counted.append((server(op.inputs[0]), server(before.inputs[0])))
    assert looked == counted == [("CPU:0", "CPU:0"), ("CPU:1", "CPU:1")]


def test_concurrent_updates_each_take_their_own_gradients():
    gradients = keras.Variable(np.zeros(1_000_000, "float32"), trainable=False)

    @tf.function
    def update():
        gradients.value.assign_add(tf.ones(gradients.shape))
        return tf.reduce_min(taken(gradients))  # below 0 where two took the same before

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert min(pool.map(lambda _: update().numpy(), range(400))) >= 0


def body_of(job):
    """The operations of a step."""
    graph = job.traced().graph
    loop = next(op for op in graph.get_operations() if op.type == "While")
    return graph._get_function(loop.get_attr("body").name).graph.get_operations()


def server(handle):
    return outermost(handle).device[-5:]
