"""What a step of a ps job sends, counted in its graph."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

from tfdist.ps.messages import function_names, task_of


@dataclasses.dataclass(kw_only=True)
class Link:
    """What goes one way between two tasks: tensors, their bytes, those of unknown size."""

    tensors: int = 0
    size_bytes: int = 0
    unknown: int = 0

    def add(self, other: Link) -> None:
        self.tensors += other.tensors
        self.size_bytes += other.size_bytes
        self.unknown += other.unknown


Links = collections.defaultdict[tuple[str, str], Link]
"""By the task that sends and the task that receives, such as ``("ps-0", "worker")``."""


def traffic(operations: Iterable[tf.Operation], captured: Mapping[str, str]) -> Links:
    """Return what operations send to each other; the largest branch of a condition, a loop once."""
    found: Links = collections.defaultdict(Link)
    sent: set[tuple[str, str]] = set()
    for operation in operations:
        if names := function_names(operation):
            inside = [_inside(operation, name, captured) for name in names]
            most = max(inside, key=lambda one: sum(link.size_bytes for link in one.values()))
            for ends, link in most.items():
                found[ends].add(link)
            continue
        here = task_of(operation, captured)
        for tensor in operation.inputs:
            there = _maker_of(tensor, captured)
            if there == here or tensor.dtype == tf.resource or (tensor.name, here) in sent:
                continue
            sent.add((tensor.name, here))
            elements = tensor.shape.num_elements()
            size_bytes = (elements or 0) * tensor.dtype.size
            link = Link(tensors=1, size_bytes=size_bytes, unknown=int(elements is None))
            found[there, here].add(link)
    return found


def _maker_of(tensor: tf.Tensor, captured: Mapping[str, str]) -> str:
    return captured.get(tensor.name) or task_of(tensor.op, captured)


def _inside(operation: tf.Operation, name: str, captured: Mapping[str, str]) -> Links:
    inputs: Sequence[tf.Tensor] = list(operation.inputs)
    if operation.type in ("If", "StatelessIf"):
        inputs = inputs[1:]
    graph = get_func_graph(operation, [tensor.shape for tensor in inputs], name)
    pairs = zip(graph.inputs, inputs, strict=False)
    given = {inner.name: _maker_of(outer, captured) for inner, outer in pairs}
    return traffic(graph.get_operations(), given)
