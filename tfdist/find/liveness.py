"""Most bytes that the tensors of a graph take at once, were its operations run in their order.

A tensor is there from the operation that makes it until the last one that reads it. An operation
that changes nothing (`VIEWS`) gives its input's memory on, and one that works element by element
(`IN_PLACE`) writes over an input that nobody reads any more, as TensorFlow's kernels do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

_VIEWS = "Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient"
_HELD = "Placeholder ReadVariableOp Const NoOp Shape ShapeN Size"
_IN_PLACE = (
    "Relu Relu6 LeakyRelu Elu Selu Sigmoid Tanh Softplus Softsign "
    "ReluGrad Relu6Grad LeakyReluGrad EluGrad SigmoidGrad TanhGrad "
    "AddV2 Add AddN Sub Mul RealDiv Maximum Minimum BiasAdd SquaredDifference "
    "Neg Exp Log Sqrt Rsqrt RsqrtGrad Square Erf Softmax LogSoftmax Select SelectV2"
)
VIEWS = frozenset(_VIEWS.split())
HELD = frozenset(_HELD.split())
"""Operations whose tensors are held by somebody else, or are tiny."""
IN_PLACE = frozenset(_IN_PLACE.split())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of a graph.

    Attributes:
      name: with its scopes.
      kind: its type.
      inputs: keys of the tensors that it reads; one that it reads twice is there twice.
      outputs: key and bytes of each tensor that it makes.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment at which most is held.

    Attributes:
      size_bytes: of all buffers.
      at: name of the operation that runs then.
      by_operation: bytes of each operation that made a buffer which is held then.
    """

    size_bytes: int
    at: str
    by_operation: dict[str, int]


class _Memory:
    """Buffers that are held while the operations run."""

    def __init__(self, operations: Iterable[Operation], kept: Iterable[int]) -> None:
        self._reads: dict[int, int] = {}
        for operation in operations:
            for key in operation.inputs:
                self._reads[key] = self._reads.get(key, 0) + 1
        for key in kept:
            self._reads[key] = self._reads.get(key, 0) + 1
        self._buffer_of: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self.held: dict[int, tuple[str, int]] = {}
        self.size_bytes = 0

    def make(self, operation: Operation) -> list[int]:
        """Return the buffers of what an operation makes; new ones are held from now on."""
        buffers = []
        for key, size in operation.outputs:
            buffer = self._given_on(operation, size)
            if buffer is None:
                if operation.kind in HELD or operation.kind in VIEWS:
                    continue
                buffer = key
                self.held[buffer] = (operation.name, size)
                self._left[buffer] = 0
                self.size_bytes += size
            self._buffer_of[key] = buffer
            self._left[buffer] += self._reads.get(key, 0)
            buffers.append(buffer)
        return buffers

    def done(self, operation: Operation, made: Iterable[int]) -> None:
        """Take note that an operation has read its inputs; free what nobody reads any more."""
        read = [self._buffer_of[key] for key in operation.inputs if key in self._buffer_of]
        for buffer in read:
            self._left[buffer] -= 1
        for buffer in {*read, *made}:
            if not self._left[buffer] and buffer in self.held:
                self.size_bytes -= self.held.pop(buffer)[1]

    def _given_on(self, operation: Operation, size: int) -> int | None:
        """Return the buffer of an input that an output takes over, None for a new one."""
        found = [self._buffer_of[key] for key in operation.inputs if key in self._buffer_of]
        if operation.kind in VIEWS:
            return found[0] if found else None
        if operation.kind not in IN_PLACE:
            return None
        fitting = (b for b in found if self._left[b] == 1 and self.held[b][1] == size)
        return next(fitting, None)


def peak_of(operations: Sequence[Operation], *, kept: Iterable[int] = ()) -> Peak:
    """Return the peak of a graph; tensors that are `kept` are held to the end."""
    memory = _Memory(operations, kept)
    most, at, held = 0, "", dict[int, tuple[str, int]]()
    for operation in operations:
        made = memory.make(operation)
        if memory.size_bytes > most:
            most, at, held = memory.size_bytes, operation.name, dict(memory.held)
        memory.done(operation, made)
    by_operation: dict[str, int] = {}
    for name, size in held.values():
        by_operation[name] = by_operation.get(name, 0) + size
    return Peak(size_bytes=most, at=at, by_operation=by_operation)
