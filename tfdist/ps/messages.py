"""Messages between a worker and the servers in a step: small tensors share messages."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategy.devices import server_of

WORKER = "worker"
READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
_BRANCHES = ("then_branch", "else_branch", "cond", "body", "f")


def tasks_of_captures(graph: Any) -> dict[str, str]:
    """Return the task of each variable that a function's graph captured, by input name."""
    return {inner.name: _task_of_captured(outer) for outer, inner in graph.captures}


def task_of(operation: tf.Operation, captured: Mapping[str, str]) -> str:
    """Return the task that runs an operation: a server if it holds a variable of the operation."""
    places = (captured.get(t.name, WORKER) for t in operation.inputs if t.dtype == tf.resource)
    return next((one for one in places if one != WORKER), _task_of_device(operation.device))


def function_names(operation: tf.Operation) -> list[str]:
    attributes = operation.node_def.attr
    names = [attributes[key].func.name for key in _BRANCHES if key in attributes]
    return [name for name in names if name]


def _task_of_captured(tensor: Any) -> str:
    """Return the task of a captured tensor, resolved through the outer graphs."""
    tensor = outermost(tensor)
    is_placed = tensor.dtype == tf.resource or hasattr(tensor, "numpy")
    return _task_of_device(tensor.device) if is_placed else WORKER


def _task_of_device(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device or "")
    return f"ps-{spec.task}" if spec.job == "ps" else WORKER


# Variable of an operation, resolved through nested functions.


def outermost(handle: Any) -> Any:
    """Return the outermost tensor, such as a variable's handle, behind a captured tensor."""
    graph = getattr(handle, "graph", None)
    while graph is not None and hasattr(graph, "captures"):
        handle = next((outer for outer, inner in graph.captures if inner is handle), handle)
        graph = graph.outer_graph
    return handle


# Small gradients go to a parameter server together.
#
# A message of any size costs its sender and receiver more than 0.1 ms of CPU time. Many gradients
# are small, because half of a model's variables are biases.


_SMALL_BYTES = 2**16  # packing copies a tensor: worth it if the copy costs less than a message


def sent_together(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs of gradient and variable. Small gradients share a message to a server.

    The values are bit-identical. Before this call, finish all uses of the gradients except the
    update: a later use would fetch the gradients from the server.
    """
    pairs = list(pairs)
    alike = collections.defaultdict(list)
    for place, (gradient, variable) in enumerate(pairs):
        if is_small(gradient) and server_of(variable) is not None:
            alike[variable.device, gradient.dtype].append(place)
    for (device, _), places in alike.items():
        if len(places) < 2:
            continue
        gradients = [pairs[place][0] for place in places]
        packed = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        with tf.device(device):
            parts = tf.split(packed, [gradient.shape.num_elements() for gradient in gradients])
            for place, gradient, part in zip(places, gradients, parts, strict=True):
                pairs[place] = tf.reshape(part, gradient.shape), pairs[place][1]
    return pairs


def is_small(value: Any) -> bool:
    """Return whether a gradient or a variable's value costs less to copy than to send."""
    if not isinstance(value, tf.Tensor) or not value.shape.is_fully_defined():
        return False
    return bool(value.shape.num_elements() * value.dtype.size <= _SMALL_BYTES)


# Reads of a step from parameter servers: a read per variable, small variables packed together.
#
# Layers and regularizers read a variable anew at each use. TensorFlow also sends a message if
# an operation only waits for a value, for example if it uses only the known shape of a kernel.


def read_together(operations: Sequence[tf.Operation]) -> None:
    """Rewire the reads of a traced step, given all of its operations.

    The values are bit-identical, and repeated reads of a variable return the same value. Gathers
    and reads with control dependencies stay unchanged.
    """
    captured = tasks_of_captures(tf.compat.v1.get_default_graph())
    alike = collections.defaultdict(list)
    for server, values in _read_of_servers(operations):
        uses = [use for value in values for use in _uses_by_worker(value, captured)]
        if uses and is_small(values[0]):
            alike[server, values[0].dtype].append((values[0], uses))
        elif len(uses) > 1:
            _give(tf.identity(values[0]), uses)
    for (server, _), small in alike.items():
        values = [value for value, _ in small]
        for here, (_, uses) in zip(_received_packed(values, server=server), small, strict=True):
            _give(here, uses)


def _read_of_servers(operations: Sequence[tf.Operation]) -> Iterator[tuple[str, list[tf.Tensor]]]:
    """Yield `(server, reads before the first write)` for each variable on a server."""
    read: dict[int, tuple[str, list[tf.Tensor]]] = {}
    written: set[int] = set()
    for operation in operations:
        handles = [outermost(tensor) for tensor in operation.inputs if tensor.dtype == tf.resource]
        if operation.type not in READS:
            written.update(map(id, handles))
        elif operation.type == "ReadVariableOp" and not operation.control_inputs:
            handle, server = handles[0], str(handles[0].device)
            if id(handle) not in written and _is_server(server):
                read.setdefault(id(handle), (server, []))[1].append(operation.outputs[0])
    yield from read.values()


def _is_server(device: str) -> bool:
    return bool(tf.DeviceSpec.from_string(device).job == "ps")


def _uses_by_worker(
    value: tf.Tensor, captured: Mapping[str, str]
) -> list[tuple[tf.Operation, int]]:
    return [
        (operation, index)
        for operation in dict.fromkeys(value.consumers())
        if task_of(operation, captured) == WORKER
        for index, given in enumerate(operation.inputs)
        if given is value
    ]


def _received_packed(values: list[tf.Tensor], *, server: str) -> list[tf.Tensor]:
    """Return `values` on the worker, sent by their server as a single tensor."""
    if len(values) == 1:
        return [tf.identity(values[0])]
    with tf.device(server):
        packed = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
    parts = tf.split(packed, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]


def _give(value: tf.Tensor, uses: Sequence[tuple[tf.Operation, int]]) -> None:
    for operation, index in uses:
        operation._update_input(index, value)
