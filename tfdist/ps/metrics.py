"""Checks that a metric's totals add up over work units; others are refused."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

from tfdist.errors import UsageError
from tfdist.training.program import StepProgram

_CONDITION = ("then_branch", "else_branch")
_FUNCTIONS = {
    "If": _CONDITION,
    "StatelessIf": _CONDITION,
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}
_THE_SAME = ("Identity", "Cast", "EnsureShape", "Reshape", "StopGradient", "PreventGradient")
_SUMS = ("Add", "AddV2", "AddN")
_CHOICES = ("Select", "SelectV2")
_OTHERS = (
    *("Maximum", "Minimum", "Max", "Min", "Mul", "RealDiv", "Div", "DivNoNan", "Neg", "Square"),
    *("Sqrt", "Exp", "Log", "Pow", "Sub", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less"),
    *("LessEqual", "LogicalAnd", "LogicalOr", "LogicalNot"),
)


class _Way(enum.Enum):
    """How a tensor goes by what there was before the step."""

    FREE = enum.auto()  # not at all
    SUM = enum.auto()  # it is that, and something free added to it
    OTHER = enum.auto()
    UNKNOWN = enum.auto()


_Ways = dict[int, dict[int, _Way]]
"""By the `id` of a tensor, and the number of a variable it is not free of: how it goes by that."""


def require_sums(program: StepProgram) -> None:
    """Refuse metrics whose totals do not add up over pieces."""
    for variable in program.metrics:
        if variable.aggregation != "sum":
            raise UsageError(
                "metrics",
                received=f"a metric whose {variable.name} is combined by {variable.aggregation!r}",
                expected="totals that add up over workers, under strategy ps",
                fix="create the metric's variables with aggregation='sum'",
            )


def require_zeros(program: StepProgram) -> None:
    """Refuse metrics that do not begin at 0: each piece begins there."""
    for variable in program.metrics:
        if np.any(variable.numpy()):
            raise UsageError(
                "metrics",
                received=f"a metric whose {variable.path} does not begin at 0",
                expected="totals that add up over workers, each of which begins at 0, under ps",
                fix="have the metric's reset_state set its variables to 0",
            )


def require_added(
    variables: Sequence[Any],
    before: Sequence[tf.Tensor],
    after: Sequence[tf.Tensor],
    *,
    operations: Sequence[tf.Operation],
) -> None:
    """Refuse metrics whose variables a step sets to something else than what was there and more.

    Given what `variables` hold before and after a step, and the operations of the step in the order
    in which they were traced. What it does in ways that are not known here is taken for a sum.
    """
    ways: _Ways = {id(old): {number: _Way.SUM} for number, old in enumerate(before)}
    _follow(operations, ways)
    for number, (variable, new) in enumerate(zip(variables, after, strict=True)):
        if ways.get(id(new), {}).get(number, _Way.FREE) in (_Way.FREE, _Way.OTHER):
            raise UsageError(
                "metrics",
                received=f"a metric that sets its {variable.path}, and does not add to it",
                expected="totals that add up over workers, under strategy ps",
                fix="keep sums, such as of values and of how many they are, or return the figure "
                "from the step",
            )


def _follow(operations: Sequence[tf.Operation], ways: _Ways) -> None:
    """Add what `operations` make of what is in `ways`."""
    for op in operations:
        given = [ways.get(id(tensor), {}) for tensor in op.inputs]
        numbers = {number for one in given for number in one}
        if numbers:
            inside = _inside(op, given)
            for i, output in enumerate(op.outputs):
                ways[id(output)] = {
                    number: _either([one[i].get(number, _Way.FREE) for one in inside])
                    if inside
                    else _of(op.type, [one.get(number, _Way.FREE) for one in given])
                    for number in numbers
                }


def _of(kind: str, ways: Sequence[_Way]) -> _Way:
    """How what an operation makes goes by a variable, by how its inputs do."""
    if all(way is _Way.FREE for way in ways):
        return _Way.FREE
    if _Way.UNKNOWN in ways:
        return _Way.UNKNOWN
    if kind in _THE_SAME:
        return ways[0]
    if kind in _CHOICES and ways[0] is _Way.FREE:
        return _either(ways[1:])
    bound = [way for way in ways if way is not _Way.FREE]
    if kind in _SUMS or (kind == "Sub" and ways[1] is _Way.FREE):
        return _Way.SUM if bound == [_Way.SUM] else _Way.OTHER
    return _Way.OTHER if kind in (*_CHOICES, *_OTHERS) else _Way.UNKNOWN


def _inside(op: tf.Operation, given: Sequence[dict[int, _Way]]) -> list[list[dict[int, _Way]]]:
    """For each branch of a condition, or for a function that is called: how its outputs go."""
    names = _FUNCTIONS.get(op.type, ())
    inputs = list(op.inputs)
    if len(names) > 1:
        inputs, given = inputs[1:], given[1:]
    found = []
    for name in names:
        graph = get_func_graph(op, [one.shape for one in inputs], op.get_attr(name).name)
        ways = {id(inner): way for inner, way in zip(graph.inputs, given, strict=False) if way}
        _follow(graph.get_operations(), ways)
        found.append([ways.get(id(output), {}) for output in graph.outputs])
    return found


def _either(ways: Sequence[_Way]) -> _Way:
    """Return what is one or the other."""
    if _Way.UNKNOWN in ways:
        return _Way.UNKNOWN
    return ways[0] if len(set(ways)) == 1 else _Way.OTHER
