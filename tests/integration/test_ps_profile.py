"""What a step of a ps job sends is counted in its graph; what its steps cost is put together."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.ps.messages import Places
from tfdist.ps.profile import PsProfile, TrafficLink, traffic

PS = "/job:ps/replica:0/task:{}/device:CPU:0".format


def counted(build):
    """What the graph that `build` makes sends."""
    with tf.Graph().as_default() as graph:
        build()
        return traffic(graph.get_operations(), Places({}))


def test_a_tensor_is_sent_once_to_each_task_that_uses_it():
    def build():
        with tf.device(PS(0)):
            weights = tf.random.normal([10, 4])
        used = weights * 2.0 + weights
        with tf.device(PS(1)):
            tf.reduce_sum(weights)
            tf.identity(used)

    one = TrafficLink(tensors=1, size_bytes=160)
    links = counted(build)
    assert links[("ps-0", "worker")] == one
    assert links[("ps-0", "ps-1")] == one
    assert links[("worker", "ps-1")] == one
    assert sum(link.size_bytes for link in links.values()) == 480


def test_a_shape_that_is_not_known_is_counted_as_such():
    def build():
        with tf.device(PS(0)):
            rows = tf.where(tf.random.normal([10]) > 0)
        tf.identity(rows)

    assert counted(build) == {("ps-0", "worker"): TrafficLink(tensors=1, unknown=1)}


def test_of_a_condition_the_branch_that_sends_most_counts():
    def build():
        gradient = tf.random.normal([100])

        def update():
            with tf.device(PS(1)):
                return tf.reduce_sum(gradient)

        tf.cond(tf.random.normal([]) > 0, update, lambda: 0.0)

    assert counted(build)[("worker", "ps-1")].size_bytes >= 400


def step(begin_s, *parts_s):
    """A row of `Phases.end`: the parts of a step that was begun at a time."""
    return [*parts_s, begin_s, begin_s + sum(parts_s)]


def test_the_parts_of_a_step_add_up_and_the_first_piece_is_left_out():
    profile = PsProfile()
    warm_up = np.array([step(0, 9, 9, 9, 9)])
    profile.add([(0, warm_up)], wall_s=50)
    pieces = [
        np.array([step(10, 0, 1, 2, 1), step(15, 0, 1, 2, 1)]),  # a second between the two
        np.array([step(22, 0, 3, 2, 1), step(28, 0, 3, 2, 1)]),
    ]
    profile.add([(0, pieces[1]), (0, pieces[0])], wall_s=31)
    found = profile.summary()["workers"]["worker-0"]
    assert found["steps"] == 4
    assert found["read_ms"] == pytest.approx(2000)
    assert found["compute_ms"] == pytest.approx(2000)
    assert found["between_ms"] == pytest.approx(250)
    assert found["waiting_ms"] == pytest.approx((31 - 9 - 12) * 1000 / 4)
    assert found["step_ms"] == pytest.approx(31_000 / 4)
    assert found["median_ms"] == pytest.approx(5000)
    text = profile.lines(profile.summary())
    shown = ["0.00", "2000.00", "2000.00", "1000.00", "250.00", "2500.00", "7750.00"]
    assert text[2].split() == ["worker-0", "4", *shown]


def test_too_few_steps_are_no_table():
    profile = PsProfile()
    profile.add([(0, np.array([step(0, 9, 9, 9, 9)]))], wall_s=50)
    assert profile.lines(profile.summary()) == ["what a step costs: too few steps to tell"]
