"""What crosses between the tasks of a ps job in one step, counted in the step's graph.

TensorFlow cuts the graph of a step where a tensor is made on one task and used on another, and
sends it there once, however many uses it has there: a request and its answer. Where an operation
runs is known when the step is traced: with the variable that it reads or updates, where the
optimizer said, or else on the worker. Counted are tensors and, where their shapes are known,
their bytes; the few bytes of the protocol, and messages without a value, are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

WORKER = "worker"
READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
_BRANCHES = ("then_branch", "else_branch", "cond", "body", "f")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What goes one way between two tasks in a step.

    Attributes:
      tensors: sent, each by a request and an answer.
      size_bytes: of those whose shape is known.
      unknown: tensors among them whose shape is not.
    """

    tensors: int = 0
    size_bytes: int = 0
    unknown: int = 0

    def __add__(self, other: Link) -> Link:
        return Link(
            tensors=self.tensors + other.tensors,
            size_bytes=self.size_bytes + other.size_bytes,
            unknown=self.unknown + other.unknown,
        )


Links = dict[tuple[str, str], Link]
"""By the task that sends and the one that receives, such as ``("ps-0", "worker")``."""


class Places:
    """On which task the operations of one graph run, by that of its inputs."""

    def __init__(self, inputs: dict[str, str]) -> None:
        self._inputs = inputs

    @classmethod
    def of_captures(cls, graph: Any) -> Places:
        """The places of a function's graph, by where the variables are that it captured."""
        return cls({inner.name: _of_captured(outer) for outer, inner in graph.captures})

    def of_tensor(self, tensor: tf.Tensor) -> str:
        """The task that a tensor is made on."""
        return self._inputs.get(tensor.name) or self.of_operation(tensor.op)

    def of_operation(self, operation: tf.Operation) -> str:
        """The task that runs an operation."""
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource:
                place = self._inputs.get(tensor.name)
                if place is not None and place != WORKER:
                    return place
        return _of_device(operation.device)


def calls_functions(operation: tf.Operation) -> bool:
    """Whether an operation is a condition, a loop or a call."""
    return any(True for _ in _function_names(operation))


def traffic(operations: Iterable[tf.Operation], places: Places) -> Links:
    """What `operations` have sent to each other; the largest branch of a condition, a loop once."""
    found: Links = {}
    sent: set[tuple[str, str]] = set()
    for operation in operations:
        names = list(_function_names(operation))
        if names:
            inside = [_inside(operation, name, places) for name in names]
            merge(found, max(inside, key=lambda one: sum(k.size_bytes for k in one.values())))
            continue
        here = places.of_operation(operation)
        for tensor in operation.inputs:
            there = places.of_tensor(tensor)
            if there == here or tensor.dtype == tf.resource or (tensor.name, here) in sent:
                continue
            sent.add((tensor.name, here))
            merge(found, {(there, here): _link(tensor)})
    return found


def merge(links: Links, more: Links) -> None:
    """Adds `more` to `links`."""
    for ends, link in more.items():
        links[ends] = links.get(ends, Link()) + link


def _link(tensor: tf.Tensor) -> Link:
    elements = tensor.shape.num_elements()
    known = elements is not None
    return Link(
        tensors=1, size_bytes=(elements or 0) * tensor.dtype.size, unknown=0 if known else 1
    )


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


def _function_names(operation: tf.Operation) -> Iterator[str]:
    attributes = operation.node_def.attr
    for key in _BRANCHES:
        if key in attributes and attributes[key].func.name:
            yield attributes[key].func.name


def _of_captured(tensor: Any) -> str:
    """The task of what a graph captured, through the graphs around it."""
    graph = getattr(tensor, "graph", None) if not hasattr(tensor, "numpy") else None
    if graph is None:
        return _of_device(tensor.device)
    for outer, inner in getattr(graph, "captures", ()):
        if inner is tensor:
            return _of_captured(outer)
    return _of_device(tensor.device) if tensor.dtype == tf.resource else WORKER


def _of_device(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device or "")
    return f"ps-{spec.task}" if spec.job == "ps" else WORKER
