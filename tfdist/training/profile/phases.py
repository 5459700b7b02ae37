"""When the parts of a step are done, by the worker's clock, noted in the graph of the step.

A step is begun; its batch is there; what it reads of the ps has arrived; its gradients are ready;
its updates are applied. Nothing is made to wait that would not wait otherwise, but for the
last: the worker asks every ps whether it is done. The operations that note the time are in the
graph only while a job is profiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.training.profile.traffic import (
    READS,
    WORKER,
    Links,
    Places,
    calls_functions,
    traffic,
)

NAMES = ("input", "read", "compute", "write")


class Phases:
    """The times of one step; made in the graph of the step, before its batch is taken."""

    def __init__(self, step: tf.Tensor) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._first = len(self._graph.get_operations())
        self._begun = _when([step])
        self._batch: tf.Tensor = self._begun
        self._read: tf.Tensor | None = None
        self._gradients: tf.Tensor | None = None

    def batch(self, data: Any) -> None:
        """Notes when the batch is there."""
        self._batch = _when([t for t in tf.nest.flatten(data) if t is not None])

    def gradients(self, gradients: Sequence[Any]) -> None:
        """Notes when gradients are ready, and what was read before them; at each optimizer."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return  # inside a condition of the user's: its end is that of the step
        if self._read is None:
            self._read = _when(self._reads())
        self._gradients = _when([g for g in gradients if g is not None])

    def end(self) -> tf.Tensor:
        """Seconds of each of `NAMES`, and the two ends of the step: float64 ``[6]``."""
        updates = [op for op in self._operations() if _updates(op)]
        read = _when(self._reads()) if self._read is None else self._read
        with tf.control_dependencies(updates):
            done = tf.timestamp()
        gradients = done if self._gradients is None else self._gradients
        arrived = tf.maximum(read, self._batch)
        return tf.stack(
            [
                self._batch - self._begun,
                arrived - self._batch,
                gradients - arrived,
                done - gradients,
                self._begun,
                done,
            ]
        )

    def links(self) -> Links:
        """What the step sends, as it is traced so far."""
        return traffic(self._operations(), Places.of_captures(self._graph))

    def _operations(self) -> list[tf.Operation]:
        found: list[tf.Operation] = self._graph.get_operations()[self._first :]
        return found

    def _reads(self) -> list[tf.Tensor]:
        """What has been read of a ps so far that the worker needs."""
        places = Places.of_captures(self._graph)
        reads = [op for op in self._operations() if op.type in READS]
        return [
            tensor
            for op in reads
            if places.of_operation(op) != WORKER
            for tensor in op.outputs
            if any(places.of_operation(consumer) == WORKER for consumer in tensor.consumers())
        ]


def _when(tensors: Sequence[Any]) -> tf.Tensor:
    """The time at which all of `tensors` are on this device."""
    flat = tf.nest.flatten(list(tensors), expand_composites=True)
    with tf.control_dependencies([tf.identity(tensor) for tensor in flat]):
        return tf.timestamp()


def _updates(operation: tf.Operation) -> bool:
    changes = any(t.dtype == tf.resource for t in operation.inputs)
    return (changes and operation.type not in READS) or calls_functions(operation)
