"""Which metrics of a ps job add up, as seen in the graph of a step."""

from __future__ import annotations

import types

import pytest
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.ps.metrics import require_added


@tf.function
def doubled(x):
    return 2.0 * x


@tf.function
def more(old):
    return old + 1.0


ADD_UP = {
    "as it was": lambda old, x: old,
    "sum": lambda old, x: old + tf.reduce_sum(x),
    "sum of a call": lambda old, x: doubled(tf.reduce_sum(x)) + old,
    "sum in a call": lambda old, x: more(old),
    "difference": lambda old, x: old - x[0],
    "many": lambda old, x: tf.add_n([x[0], old, x[1]]),
    "in a type and a shape": lambda old, x: tf.reshape(tf.cast(old + x[0], "float64"), []),
    "where": lambda old, x: tf.where(x[0] > 0, old + x[0], old),
    "condition": lambda old, x: tf.cond(x[0] > 0, lambda: old + x[0], lambda: old - 1.0),
    "in ways that are not followed": lambda old, x: tf.stack([old + x[0], x[1]])[0],
}  # fmt: skip
DO_NOT = {
    "maximum": lambda old, x: tf.maximum(old, x[0]),
    "last": lambda old, x: x[0],
    "constant": lambda old, x: tf.constant(1.0),
    "running mean": lambda old, x: 0.9 * old + 0.1 * x[0],
    "nearer to the mean": lambda old, x: old + (x[0] - old) / 2.0,
    "twice": lambda old, x: old + old,
    "in place of": lambda old, x: tf.where(x[0] > old, x[0], old),
    "turned around": lambda old, x: x[0] - old,
    "maximum by a condition": lambda old, x: tf.cond(x[0] > old, lambda: x[0], lambda: old),
    "maximum in a call": lambda old, x: more(tf.maximum(old, x[0])),
}  # fmt: skip


def judge(update):
    with tf.Graph().as_default() as graph:
        old, other = tf.compat.v1.placeholder("float32", []), tf.compat.v1.placeholder("float32")
        x = tf.compat.v1.placeholder("float32", [2])
        new = update(old, x)
        variables = [types.SimpleNamespace(path="other/total"), types.SimpleNamespace(path="mine")]
        operations = graph.get_operations()
        require_added(variables, [other, old], [other, new], operations=operations)


@pytest.mark.parametrize("update", ADD_UP.values(), ids=ADD_UP)
def test_what_a_metric_adds_is_taken(update):
    judge(update)


@pytest.mark.parametrize("update", DO_NOT.values(), ids=DO_NOT)
def test_what_a_metric_sets_otherwise_is_refused_by_its_name(update):
    with pytest.raises(UsageError, match="a metric that sets its mine, and does not add to it"):
        judge(update)
