"""Counts the updates on a parameter server, so that each step knows how many others came between.

It costs a range one question and one answer. What it does at each step, the server does alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager.record import VariableWatcher

from tfdist.training.engines.handles import outermost

_NO_LIMIT = 2**62
_WRITES = ("Assign", "Resource", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
_T = TypeVar("_T")


class UpdateClock:
    """A counter on a parameter server; made in the strategy's scope."""

    def __init__(self) -> None:
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")

    @property
    def applied(self) -> int:
        """The updates so far, by all workers."""
        return int(self._count.numpy())

    def begin(self, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Begins a range of steps, in graph.

        Returns:
          `first`, once the clock has been read; what it showed; and what `step` takes from step
          to step.
        """
        with tf.device(self._count.device):
            now = tf.identity(self._count)
            numbers = tf.raw_ops.EmptyTensorList(
                element_shape=tf.constant([], tf.int32),
                max_num_elements=-1,
                element_dtype=tf.int64,
            )
        with tf.control_dependencies([now]):
            return tf.identity(first), now, [numbers]

    def step(
        self, numbers: list[tf.Tensor], *, work: Callable[[VariableWatcher], _T]
    ) -> tuple[_T, list[tf.Tensor]]:
        """Does a step's `work` and returns its result; keeps which update it was, of all workers',
        when its own had been written on this clock's server, or where that holds no variable which
        the step trains, on every server.

        `work` enters the watcher that it is called with in the thread that traces the step.
        """
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        watcher = VariableWatcher()
        result = work(watcher)
        trained = {id(v.handle) for v in watcher.watched_variables()}
        written = [
            (op, str(handle.device))
            for op in graph.get_operations()[before:]
            for handle in _written(op)
            if id(handle) in trained
        ]
        here = [op for op, device in written if device == self._count.device]
        # To wait for a variable on another server costs a message.
        waited = here or [op for op, _ in written]
        with tf.device(self._count.device), tf.control_dependencies(waited):
            # Adds and returns what was there before it, in one operation.
            number = tf.raw_ops.ResourceCountUpTo(
                resource=self._count.handle, limit=_NO_LIMIT, T=tf.int64
            )
            return result, [tf.raw_ops.TensorListPushBack(input_handle=numbers[0], tensor=number)]

    def staleness(self, now: tf.Tensor, numbers: list[tf.Tensor]) -> tf.Tensor:
        """Returns for each step of the range the updates of others from before it until its own.

        Before the first one the clock showed `now`, before another that after the one before.
        """
        with tf.device(self._count.device):
            kept = tf.raw_ops.TensorListStack(
                input_handle=numbers[0],
                element_shape=tf.constant([], tf.int32),
                element_dtype=tf.int64,
            )
            return kept - tf.concat([now[tf.newaxis], kept[:-1] + 1], 0)


def _written(op: Any) -> list[Any]:
    """The handles of the variables that an operation may write to."""
    if not op.type.startswith(_WRITES):
        return []
    return [outermost(tensor) for tensor in op.inputs if tensor.dtype == tf.resource]
