"""The order of the ring's sums: the one in which the step was written, wherever they are in it."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.cluster import KINDS
from tfdist.strategy import job as jobs
from tfdist.training.keras_compat import reduction

PATIENCE_S = 1.0


class Ring:
    """Notes the sums, by the size of what is summed."""

    def __init__(self):
        self.lost = ""
        self.sizes = []
        self.later_began = threading.Event()

    def sum(self, *arrays, of):
        self.sizes.append(arrays[0].size)
        if arrays[0].size > 1:
            self.later_began.set()
        return [np.array(array) for array in arrays]


@pytest.fixture
def ring(strategies, monkeypatch):
    job = jobs.Job(strategy=strategies[1], kind=KINDS["multiworker"], ring=Ring())
    monkeypatch.setattr(jobs, "_made", [job])
    return job.ring


def door(variable, *, after=None):
    """Sums what has the variable's size, ready only once an event has come or is late."""
    gradient = tf.identity(variable)
    if after is not None:

        def late(value):
            after.wait(PATIENCE_S)
            return value

        gradient = tf.numpy_function(late, [gradient], tf.float32, stateful=False)
        gradient = tf.ensure_shape(gradient, variable.shape)
    variable.assign_add(reduction.sum_over_replicas([gradient])[0])


def in_functions(first, second):
    tf.function(first, autograph=False)()
    tf.function(second, autograph=False)()


def in_a_branch(first, second):
    tf.cond(tf.random.uniform([]) < 2, lambda: first() or 0.0, lambda: 0.0)
    second()


def in_a_loop(first, second):
    tf.while_loop(lambda i: i < 1, lambda i: first() or i + 1, [0])
    second()


def flat(first, second):
    first()
    second()


@pytest.mark.parametrize("place", [flat, in_functions, in_a_branch, in_a_loop])
def test_unordered_sums_keep_the_order_of_the_program(strategies, ring, place):
    with strategies[1].scope():
        one, two = tf.Variable(tf.ones([1])), tf.Variable(tf.ones([2]))

    def step():
        place(lambda: door(one, after=ring.later_began), lambda: door(two))

    @tf.function(autograph=False)
    def run():
        def body(i):
            strategies[1].run(step)
            return i + 1

        tf.while_loop(lambda i: i < 2, body, [0], parallel_iterations=1)

    run()
    assert ring.sizes == [1, 2, 1, 2]
