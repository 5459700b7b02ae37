"""Most bytes that the tensors of a graph take at once, were its operations run in their order.

A tensor is there from the operation that makes it until the last one that reads it. An operation
that changes nothing (`VIEWS`) gives its input's memory on, and one that works element by element
(`IN_PLACE`) writes over an input that nobody reads any more, as TensorFlow's kernels do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
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


def peak_of(operations: Sequence[Operation], *, kept: Iterable[int] = ()) -> Peak:
    """Return the peak of a graph; tensors that are `kept` are held to the end."""
    reads = Counter(itertools.chain(kept, *(operation.inputs for operation in operations)))
    buffer_of, unread = dict[int, int](), Counter[int]()
    held = dict[int, tuple[str, int]]()
    now = most = 0
    at, at_peak = "", dict(held)
    for operation in operations:
        inputs = [buffer_of[key] for key in operation.inputs if key in buffer_of]
        for key, size in operation.outputs:
            fitting = [b for b in inputs if unread[b] == 1 and held[b][1] == size]
            reused = _reused(operation.kind, inputs, fitting)
            if reused is None and operation.kind in HELD | VIEWS:
                continue
            buffer_of[key] = key if reused is None else reused
            if reused is None:
                held[key] = (operation.name, size)
                now += size
            unread[buffer_of[key]] += reads[key]
        if now > most:
            most, at, at_peak = now, operation.name, dict(held)
        unread.subtract(inputs)
        outputs = (buffer_of[key] for key, _ in operation.outputs if key in buffer_of)
        for buffer in {*inputs, *outputs}:
            if not unread[buffer] and buffer in held:
                now -= held.pop(buffer)[1]
    by_operation = Counter[str]()
    for name, size in at_peak.values():
        by_operation[name] += size
    return Peak(size_bytes=most, at=at, by_operation=dict(by_operation))


def _reused(kind: str, inputs: Sequence[int], fitting: Sequence[int]) -> int | None:
    """Return the buffer of an input that an output takes over, None for a new one."""
    choices = inputs if kind in VIEWS else fitting if kind in IN_PLACE else ()
    return next(iter(choices), None)
