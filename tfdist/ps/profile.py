"""Profile of a ps job's steps, measured in the steps themselves.

`Phases` notes in the worker's graph when the parts of a step are done, `traffic` counts there what
it sends; `PsProfile` is the account of all workers, by the chief.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

from tfdist.ps.messages import READS, WORKER, Places, function_names

NAMES = ("input", "read", "compute", "write")


@dataclasses.dataclass(kw_only=True, slots=True)
class TrafficLink:
    """What goes one way between two tasks in a step.

    Attributes:
      tensors: sent, each by a request and an answer.
      size_bytes: of those whose shape is known.
      unknown: tensors among them whose shape is not.
    """

    tensors: int = 0
    size_bytes: int = 0
    unknown: int = 0

    def add(self, other: TrafficLink) -> None:
        """Add what another link sends."""
        self.tensors += other.tensors
        self.size_bytes += other.size_bytes
        self.unknown += other.unknown


Links = collections.defaultdict[tuple[str, str], TrafficLink]
"""By the task that sends and the one that receives, such as ``("ps-0", "worker")``."""


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
        """Note when the batch is there."""
        self._batch = _when([t for t in tf.nest.flatten(data) if t is not None])

    def gradients(self, gradients: Sequence[Any]) -> None:
        """Note when gradients are ready, and what was read before them; at each optimizer."""
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
        """Return what the step sends, as it is traced so far."""
        return traffic(self._operations(), Places.of_captures(self._graph))

    def _operations(self) -> list[tf.Operation]:
        found: list[tf.Operation] = self._graph.get_operations()[self._first :]
        return found

    def _reads(self) -> list[tf.Tensor]:
        """Return what has been read of a ps so far that the worker needs."""
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
    """Return the time at which all of `tensors` are on this device."""
    flat = tf.nest.flatten(list(tensors), expand_composites=True)
    with tf.control_dependencies([tf.identity(tensor) for tensor in flat]):
        return tf.timestamp()


def _updates(operation: tf.Operation) -> bool:
    changes = any(t.dtype == tf.resource for t in operation.inputs)
    return (changes and operation.type not in READS) or bool(function_names(operation))


# What a step sends, counted in its graph.


def traffic(operations: Iterable[tf.Operation], places: Places) -> Links:
    """What `operations` have sent to each other; the largest branch of a condition, a loop once."""
    found: Links = collections.defaultdict(TrafficLink)
    sent: set[tuple[str, str]] = set()
    for operation in operations:
        names = function_names(operation)
        if names:
            inside = [_inside(operation, name, places) for name in names]
            most = max(inside, key=lambda one: sum(link.size_bytes for link in one.values()))
            for ends, link in most.items():
                found[ends].add(link)
            continue
        here = places.of_operation(operation)
        for tensor in operation.inputs:
            there = places.of_tensor(tensor)
            if there == here or tensor.dtype == tf.resource or (tensor.name, here) in sent:
                continue
            sent.add((tensor.name, here))
            elements = tensor.shape.num_elements()
            size_bytes = (elements or 0) * tensor.dtype.size
            link = TrafficLink(tensors=1, size_bytes=size_bytes, unknown=int(elements is None))
            found[there, here].add(link)
    return found


def _inside(operation: tf.Operation, name: str, places: Places) -> Links:
    inputs: Sequence[tf.Tensor] = list(operation.inputs)
    if operation.type in ("If", "StatelessIf"):
        inputs = inputs[1:]
    graph = get_func_graph(operation, [tensor.shape for tensor in inputs], name)
    given = {
        inner.name: places.of_tensor(outer)
        for inner, outer in zip(graph.inputs, inputs, strict=False)
    }
    return traffic(graph.get_operations(), Places(given))


# Costs of each worker's steps, collected by the chief.


Times = np.ndarray[Any, Any]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Worker:
    """One worker's steps: what `Phases.end` gave, but of its first work unit, which warms up."""

    is_warm: bool = False
    times: list[Times] = dataclasses.field(default_factory=list)
    outside_s: float = 0.0
    """Of ranges in which it was warm: the time that it spent in no step."""
    outside_steps: int = 0


class PsProfile:
    """The account of a job: an engine adds each range of steps as it is done."""

    def __init__(self) -> None:
        self.links: Mapping[tuple[str, str], TrafficLink] = {}
        """What a step sends, of the program that was traced last."""
        self._workers: dict[int, _Worker] = {}

    def add(self, units: Sequence[tuple[int, Times]], *, wall_s: float) -> None:
        """Add a range: each work unit's worker and its steps' times ``[steps, 6]``, in any order.

        `wall_s` is the chief's time from the first work unit dispatched to the last one returned.
        """
        by_worker: dict[int, list[Times]] = {}
        for number, times in units:
            by_worker.setdefault(number, []).append(times)
        for index, listed in by_worker.items():
            worker = self._workers.setdefault(index, _Worker())
            listed.sort(key=lambda times: float(times[0, 4]))
            if worker.is_warm:
                worker.outside_s += wall_s - sum(float(t[-1, 5] - t[0, 4]) for t in listed)
                worker.outside_steps += sum(map(len, listed))
            worker.times += listed if worker.is_warm else listed[1:]
            worker.is_warm = True

    def summary(self) -> dict[str, Any]:
        """JSON: milliseconds a step by worker, means that add up, and what a step sends."""
        workers = {
            f"worker-{index}": _costs(worker)
            for index, worker in sorted(self._workers.items())
            if worker.times
        }
        links = {
            f"{sender} to {receiver}": dataclasses.asdict(link)
            for (sender, receiver), link in sorted(self.links.items())
        }
        return {"workers": workers, "links": links}


def _costs(worker: _Worker) -> dict[str, Any]:
    times = np.concatenate(worker.times) * 1e3
    means = {f"{name}_ms": float(times[:, i].mean()) for i, name in enumerate(NAMES)}
    # From one step's end to the next one's begin, where both are of one work unit.
    gaps = [float(np.diff(np.ravel(t[:, 4:]))[1::2].sum()) for t in worker.times]
    means["between_ms"] = sum(gaps) * 1e3 / len(times)
    if worker.outside_steps:
        means["waiting_ms"] = worker.outside_s * 1e3 / worker.outside_steps
    step_ms = times[:, 5] - times[:, 4]
    return {
        "steps": len(times),
        **means,
        "step_ms": sum(means.values()),
        "median_ms": float(np.median(step_ms)),
        "p95_ms": float(np.percentile(step_ms, 95)),
    }
