"""Staleness of a step: counters on the parameter servers measure it, the work under way bounds it.

What a counter does at each step, its server does alone: no step waits for it, and none sends a
message for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager.record import VariableWatcher
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.ps.messages import READS, function_names, outermost

_NO_LIMIT = 2**62
_WRITES = ("Assign", "Resource", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_T = TypeVar("_T")


class UpdateClock:
    """A counter on each of the servers, by their devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._counts: dict[str, Any] = {}
        for device in devices:
            with tf.device(device):
                count = ResourceVariable(0, dtype=tf.int64, trainable=False, name="updates")
            self._counts[count.device] = count
        self._begun: dict[str, tf.Tensor] = {}
        self._counting: list[str] = []

    @property
    def applied(self) -> int:
        """The updates so far, by all workers, on the server that has seen most of them."""
        return max(int(count.numpy()) for count in self._counts.values())

    def begin(self) -> list[tf.Tensor]:
        """Begin a range of steps, in graph; return what `step` takes from step to step."""
        ages = []
        for device in self._counts:
            with tf.device(device):
                ages.append(
                    tf.raw_ops.EmptyTensorList(
                        element_shape=tf.constant([], tf.int32),
                        max_num_elements=-1,
                        element_dtype=tf.int64,
                    )
                )
        return ages

    def step(
        self, ages: list[tf.Tensor], *, work: Callable[[VariableWatcher], _T]
    ) -> tuple[_T, list[tf.Tensor]]:
        """Trace a step's `work`; return its result, and `ages` with what this step has found.

        Each server whose variables the step trains counts it once it has written them; the first
        server does if it trains none. `work` enters the watcher that it is called with in the
        thread that traces the step. `look_first` has to follow when all of the step is traced.
        """
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        for device, count in self._counts.items():
            with tf.device(device):
                self._begun[device] = count.read_value()
        watcher = VariableWatcher()
        result = work(watcher)
        trained = {id(v.handle) for v in watcher.watched_variables()}
        writes: dict[str, list[Any]] = {}
        for op in filter(_writes, graph.get_operations()[before:]):
            for handle in _variables_of(op):
                if id(handle) in trained:
                    writes.setdefault(str(handle.device), []).append(op)
        self._counting = [d for d in self._counts if d in writes] or list(self._counts)[:1]
        kept = dict(zip(self._counts, ages, strict=True))
        for device in self._counting:
            with tf.device(device), tf.control_dependencies(writes.get(device, [])):
                # Adds and returns what was there before it, in one operation.
                number = tf.raw_ops.ResourceCountUpTo(
                    resource=self._counts[device].handle, limit=_NO_LIMIT, T=tf.int64
                )
                kept[device] = tf.raw_ops.TensorListPushBack(
                    input_handle=kept[device], tensor=number - self._begun[device]
                )
        return result, list(kept.values())

    def look_first(self, operations: Sequence[Any]) -> None:
        """Have the step look at a server's clock before it does anything else there.

        Given all operations of the step. What it reads within a condition or a loop is left alone:
        to wait there would cost a message.
        """
        clocks = {id(count.handle) for count in self._counts.values()}
        for op in operations:
            handles = _variables_of(op)
            if function_names(op) or clocks & set(map(id, handles)):
                continue
            for device in {str(handle.device) for handle in handles} & self._begun.keys():
                op._add_control_input(self._begun[device].op)

    def staleness(self, ages: list[tf.Tensor]) -> tf.Tensor:
        """Return how many updates of others there were from before each step until its own.

        On that server on which there were most.
        """
        found = []
        for device, kept in zip(self._counts, ages, strict=True):
            if device in self._counting:
                with tf.device(device):
                    found.append(
                        tf.raw_ops.TensorListStack(
                            input_handle=kept,
                            element_shape=tf.constant([], tf.int32),
                            element_dtype=tf.int64,
                        )
                    )
        return tf.reduce_max(tf.stack(found), 0)


def _variables_of(op: Any) -> list[Any]:
    """Return the handles of the variables that an operation is given."""
    return [outermost(tensor) for tensor in op.inputs if tensor.dtype == tf.resource]


def _writes(op: Any) -> bool:
    """Return whether an operation may write.

    A loop that only reads, as a recurrent layer's, does not: to wait for it would cost a message.
    """
    if op.type in _LOOPS:
        body = op.graph._get_function(op.get_attr("body").name)
        return body is not None and any(map(_writes, body.graph.get_operations()))
    return bool(op.type.startswith(_WRITES)) and op.type not in READS


class InFlight:
    """The work units under way. For each, the steps of others that may be applied before its end.

    These are the steps that were under way when it began, and those begun since.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, int] = {}
        self._others: dict[Hashable, int] = {}

    def admits(self, steps: int, *, max_staleness: int | None) -> bool:
        """Return whether a work unit of so many steps may begin now."""
        if max_staleness is None or not steps:
            return True
        if sum(self._steps.values()) > max_staleness:
            return False
        return all(others + steps <= max_staleness for others in self._others.values())

    def begin(self, unit: Hashable, *, steps: int) -> None:
        """Record that a work unit is under way."""
        for other in self._others:
            self._others[other] += steps
        self._others[unit] = sum(self._steps.values())
        self._steps[unit] = steps

    def end(self, unit: Hashable) -> None:
        """Record that a work unit has ended, done or not."""
        self._steps.pop(unit, None)
        self._others.pop(unit, None)


def steps_of_a_unit(*, most: int, workers: int, max_staleness: int | None) -> int:
    """Return how long work units may be that still let as many workers as can be work at a time.

    With a bound of k at most k + 1 work at a time. Half of the bound is for the work units that are
    under way when one begins, half for those that begin while it is.
    """
    if max_staleness is None:
        return most
    others = min(workers - 1, max_staleness)
    return most if not others else min(most, max(1, max_staleness // (2 * others)))
