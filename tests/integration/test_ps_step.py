"""What a step of a ps job sends and makes, without the job."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource
from tfdist.ps import messages
from tfdist.ps.messages import Places, read_together, sent_together
from tfdist.ps.profile import TrafficLink, traffic
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import GraphFeed, Layout, Order
from tfdist.training.keras_compat import variables

PS = "/job:ps/replica:0/task:{}/device:CPU:0".format
X = np.arange(60, dtype=np.float32).reshape(20, 3)


def on(server):
    return SimpleNamespace(device=PS(server))


def test_small_gradients_go_to_each_server_as_one_tensor():
    with tf.Graph().as_default() as graph:
        shapes = [[4, 5], [3], [200, 200], [5], [7], [2]]
        pairs = [
            (tf.random.normal(s), on(i)) for s, i in zip(shapes, [0, 0, 0, 0, 1, 1], strict=True)
        ]
        slices = tf.IndexedSlices(tf.random.normal([2, 3]), tf.constant([0, 1]))
        for gradient, variable in sent_together([*pairs, (slices, on(0))]):
            with tf.device(variable.device):
                tf.identity(gradient) if gradient is not slices else None
        links = traffic(graph.get_operations(), Places({}))
    assert links == {
        ("worker", "ps-0"): TrafficLink(tensors=2, size_bytes=4 * (28 + 40_000)),
        ("worker", "ps-1"): TrafficLink(tensors=1, size_bytes=4 * 9),
    }


def test_gradients_sent_together_are_the_same_to_the_bit(monkeypatch):
    monkeypatch.setattr(messages, "server_of", lambda variable: 0)
    here = SimpleNamespace(device="/CPU:0")
    rng = np.random.RandomState(0)
    kinds = [((4, 5), "f4"), ((3,), "f2"), ((), "f4"), ((2, 2), "f2"), ((1, 3), "f4")]
    given = [np.asarray(rng.randn(*shape), dtype) for shape, dtype in kinds]
    found = sent_together([(tf.constant(value), here) for value in given])
    for value, (gradient, variable) in zip(given, found, strict=True):
        assert variable is here
        np.testing.assert_array_equal(gradient.numpy(), value)


def test_a_count_is_made_where_it_is_added():
    with tf.Graph().as_default() as graph:
        with variables._where_added(1, on(1)):
            one = tf.cast(1, tf.int64)
        with variables._where_added(tf.zeros([]), on(1)):
            sent = tf.cast(tf.zeros([]), tf.int64)
        with tf.device(PS(1)):
            tf.identity(one)
            tf.identity(sent)
        links = traffic(graph.get_operations(), Places({}))
    assert links == {("worker", "ps-1"): TrafficLink(tensors=1, size_bytes=8)}


class Reading:
    """A step that reads small and large variables, some of them twice, updates and reads again."""

    def __init__(self, device_of=lambda server: None):
        rng = np.random.RandomState(0)

        def variable(server, *shape):
            with tf.device(device_of(server)):
                return tf.Variable(rng.randn(*shape).astype("f4"))

        self.kernel, self.bias, self.wide = variable(0, 3, 5), variable(0, 5), variable(0, 5, 4000)
        self.scale, self.shift = variable(1, 2), variable(1, 3)
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


@pytest.mark.parametrize(
    ("together", "of_ps_0", "of_ps_1"),
    [
        (False, TrafficLink(tensors=5, size_bytes=4 * (15 + 5 + 2 * 20_000 + 5)), 4),
        (True, TrafficLink(tensors=3, size_bytes=4 * (15 + 5 + 20_000 + 5)), 2),
    ],
)
def test_what_is_small_comes_together_and_what_is_large_once(together, of_ps_0, of_ps_1):
    with tf.Graph().as_default():
        graph = Reading(PS).traced(tf.zeros([2, 3]), together=together).graph
        links = traffic(graph.get_operations(), Places.of_captures(graph))
    assert links["ps-0", "worker"] == of_ps_0  # the bias once more, after it was written
    assert links["ps-1", "worker"].tensors == of_ps_1  # the shift too


def test_what_comes_together_is_the_same_to_the_bit_and_read_anew_after_a_write(monkeypatch):
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
def test_a_worker_makes_its_batches_itself_unless_they_are_transformed(transform):
    source = ArraySource(X, transform=transform)
    plan = EpochPlan.uniform(epochs=2, examples=20, global_batch_size=4)
    order = Order(examples=20, shuffle=True)
    feed = GraphFeed(source, plan, layout=Layout(), seed=1, order=order)
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


FREED = """
import ctypes, os, resource, sys
from tfdist.ps.members import keep_freed_memory
assert keep_freed_memory(os.environ) == (sys.argv[1] == "kept")
libc = ctypes.CDLL(None)
assert libc.prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE: on any machine, pages are small
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(5_000_000) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 5_000_000)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_server_keeps_the_memory_of_freed_tensors(monkeypatch):
    def faults(expected):
        command = [sys.executable, "-c", FREED, expected]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)

    assert faults("kept") < 1000
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")  # the user's word goes before ours
    assert faults("given back") > 40_000
