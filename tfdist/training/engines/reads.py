"""What a step reads of a parameter server crosses the network once, and what is small together.

A message costs its two ends more than a tenth of a millisecond of processor, whatever is in it.
Half of a model's variables are biases; layers and regularizers read one anew each time; and where
TensorFlow needs of a value on another task no more than that it is there, as of a kernel whose
shape it knows, it sends a message for that too.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.training.engines.handles import outermost
from tfdist.training.keras_compat.packing import is_small
from tfdist.training.profile.traffic import READS, WORKER, Places

_Use = tuple[tf.Operation, int]


def read_together(operations: Sequence[tf.Operation]) -> None:
    """Rewires the worker's part of a step, given all operations of the step once it is traced.

    Values are the same to the last bit, and of one moment where a variable was read several
    times. Left alone are gathers, and reads before which something else in the step has to be.
    """
    places = Places.of_captures(tf.compat.v1.get_default_graph())
    alike = collections.defaultdict(list)
    for server, values in _read_of_servers(operations):
        uses = [use for value in values for use in _uses_by_worker(value, places)]
        if uses and is_small(values[0]):
            alike[server, values[0].dtype].append((values[0], uses))
        elif len(uses) > 1:
            _give(tf.identity(values[0]), uses)
    for (server, _), small in alike.items():
        values = [value for value, _ in small]
        for here, (_, uses) in zip(_fetched(values, server=server), small, strict=True):
            _give(here, uses)


def _read_of_servers(operations: Sequence[tf.Operation]) -> Iterator[tuple[str, list[tf.Tensor]]]:
    """Of each variable on a server: the server, and what is read before the first write to it."""
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


def _uses_by_worker(value: tf.Tensor, places: Places) -> list[_Use]:
    """The inputs of the worker's operations that are `value`."""
    return [
        (operation, index)
        for operation in dict.fromkeys(value.consumers())
        if places.of_operation(operation) == WORKER
        for index, given in enumerate(operation.inputs)
        if given is value
    ]


def _fetched(values: list[tf.Tensor], *, server: str) -> list[tf.Tensor]:
    """`values` on the worker, sent by their server as one tensor."""
    if len(values) == 1:
        return [tf.identity(values[0])]
    with tf.device(server):
        packed = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
    parts = tf.split(packed, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]


def _give(value: tf.Tensor, uses: Sequence[_Use]) -> None:
    """Has each of `uses` take `value`."""
    for operation, index in uses:
        operation._update_input(index, value)
