"""Metrics in a step: results cover all replicas and steps. A scalar from the step counts once.

On one device, a metric's result in a step's logs covers the whole epoch. On several replicas, and
in a work unit under ps, a step sees only a part of the metric's state. Here the step records which
of its tensors are results, and the logs are computed again from the whole state. A metric update
with a scalar from the step, such as a loss, runs on each replica but must count once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.metrics.metric import Metric
from keras.src.metrics.reduction_metrics import Mean, Sum

from tfdist.errors import require
from tfdist.training.keras_compat.kernels import compiled
from tfdist.training.keras_compat.losses import _by_fraction
from tfdist.training.keras_compat.reduction import sum_over_replicas
from tfdist.training.keras_compat.trace import (
    Original,
    StepTrace,
    ops_behind,
    replaces,
    warn_once,
)

_SOURCE = "value_of_a_metric"
_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


@replaces(Metric, "__getattribute__", issue=f"{_KERAS}/metrics/metric.py#L167")
def _in_a_step(original: Original, trace: StepTrace, self: Any, name: str) -> Any:
    """Return an attribute. Wrap `result` and `update_state` of any class for the step."""
    found = original(self, name)
    if name == "result" and trace.sources is not None:
        return functools.partial(_noted_result, found, trace)
    if name == "update_state":
        return functools.partial(_update_once, found, trace, self)
    return found


# Logs computed from metrics.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Formula:
    """Computation of a log from values of metrics.

    Attributes:
      graph: Operations from the values to the log.
      output: Name of the log's tensor.
      sources: Functions that return the whole values, by the name of the step's tensor.
    """

    graph: tf.compat.v1.GraphDef
    output: str
    sources: Mapping[str, Callable[[], Any]]

    def __call__(self) -> tf.Tensor:
        wholes = {name: tf.convert_to_tensor(whole()) for name, whole in self.sources.items()}
        if self.output in wholes:
            return wholes[self.output]
        (log,) = tf.import_graph_def(self.graph, wholes, [self.output])
        return log


class MetricLogs:
    """Logs of a step that are computed from metrics, over all replicas and steps."""

    def __init__(self) -> None:
        self._formulas: dict[str, _Formula] = {}
        self._read: Any = None

    def __bool__(self) -> bool:
        return bool(self._formulas)

    def note(self, logs: Mapping[str, Any], trace: StepTrace) -> None:
        """Find these logs among all logs of the step being traced.

        Raises:
          UsageError: A log is computed from a metric and from other values of the step.
        """
        if trace.sources is not None:
            found = {name: _formula(name, log, trace) for name, log in logs.items()}
            self._formulas = {name: formula for name, formula in found.items() if formula}

    def read(self, strategy: tf.distribute.Strategy) -> dict[str, tf.Tensor]:
        """Return the logs since the last reset. A collective if there are such logs."""
        if not self:
            return {}
        if self._read is None:
            with strategy.scope():
                self._read = compiled(lambda: {n: log() for n, log in self._formulas.items()})
        logs: dict[str, tf.Tensor] = self._read()
        return logs


def note_source(value: Any, whole: Callable[[], Any], trace: StepTrace) -> tf.Tensor:
    """Return the step's value of a metric as a new tensor. Record it with its function `whole`."""
    found = tf.identity(value, name=_SOURCE)
    if trace.sources is not None and trace.is_in_step():
        trace.sources[found.op.name] = whole
    else:
        trace.hides_sources = True
    return found


def _noted_result(result: Callable[[], Any], trace: StepTrace) -> Any:
    """Return a metric's result, and record its tensors as results."""
    found = result()

    def whole(index: int) -> Any:
        return keras.tree.flatten(result())[index]

    leaves = [
        note_source(leaf, functools.partial(whole, i), trace)
        if tf.is_tensor(leaf) or isinstance(leaf, keras.Variable)
        else leaf
        for i, leaf in enumerate(keras.tree.flatten(found))
    ]
    return keras.tree.pack_sequence_as(found, leaves)


def _formula(name: str, log: Any, trace: StepTrace) -> _Formula | None:
    """Return the formula of a log that is computed from metrics, or `None` for other logs."""
    tensor, sources = tf.convert_to_tensor(log), trace.sources or {}
    if not tf.is_symbolic_tensor(tensor):
        return None
    behind = list(ops_behind([tensor], until=sources))
    used = [op.name for op in behind if op.name in sources]
    rest = [op for op in behind if op.name not in sources]
    hides = trace.hides_sources and any(map(_hides_source, rest))
    if not used and not hides:
        return None
    require(
        not hides and not any(op.type == "Placeholder" or op._is_stateful for op in rest),
        "step",
        f"the log {name!r} combines a metric with other values of the step",
        fix="return the metric's result and the other value under separate keys, and call "
        "result() outside of tf.cond and tf.function",
        code="metric-in-log",
    )
    return _Formula(
        graph=_graph_of(rest, trace),
        output=tensor.name,
        sources={f"{source}:0": sources[source] for source in used},
    )


def _graph_of(operations: list[tf.Operation], trace: StepTrace) -> tf.compat.v1.GraphDef:
    """Return a separate graph of the operations, without device placement."""
    graph = tf.compat.v1.GraphDef()
    for operation in operations:
        node = graph.node.add()
        node.CopyFrom(operation.node_def)
        node.ClearField("device")
        node.attr.pop("_class", None)  # colocates it with a variable
        inputs = [given for given in node.input if not given.startswith("^")]
        node.input[:] = inputs
    if any(attr.HasField("func") for node in graph.node for attr in node.attr.values()):
        graph.library.CopyFrom(trace.graph.as_graph_def().library)
    return graph


def _hides_source(operation: tf.Operation) -> bool:
    """Return whether a condition, loop or function has a metric's result in its own graph."""
    functions = [a.func.name for a in operation.node_def.attr.values() if a.HasField("func")]
    found = [operation.graph._get_function(name) for name in functions]
    return any(
        (inner.type == "Identity" and _SOURCE in inner.name) or _hides_source(inner)
        for function in filter(None, found)
        for inner in function.graph.get_operations()
    )


# Metric updates with scalars from the step.
#
# The metric must get the value that one device has. A mean over the examples is weighted by the
# batch fraction, or by a micro-batch's part of the step. Sums over the examples add up. `Mean` and
# `Sum` are linear in the number. Any other metric gets the number of the whole batch on one
# replica, so it may also square the number or count in integers.


@replaces(Mean, "update_state", issue=f"{_KERAS}/metrics/reduction_metrics.py#L138")
def _mean_of_examples(
    original: Original, trace: StepTrace, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    if trace.in_losses and sample_weight is None:
        return original(self, values, trace.examples)
    if sample_weight is not None or not _is_partial(trace) or not _is_number(values):
        return original(self, values, sample_weight)
    if _is_sum(values, trace):
        values = _by_fraction(tf.cast(values, self.dtype), trace)
    return original(self, values, trace.share * trace.part)


@replaces(Sum, "update_state", issue=f"{_KERAS}/metrics/reduction_metrics.py#L84")
def _sum_of_steps(
    original: Original, trace: StepTrace, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    if sample_weight is not None or not _is_partial(trace) or not _is_number(values):
        return original(self, values, sample_weight)
    if _is_sum(values, trace):
        return original(self, values)
    return original(self, values, trace.share * trace.part)


def _is_partial(trace: StepTrace) -> bool:
    """Return whether metrics of this replica or micro-batch see only a part of the step."""
    return not trace.in_update and (trace.num_replicas > 1 or tf.is_tensor(trace.part))


def _is_number(value: Any) -> bool:
    """Return whether an argument is `None` or one number."""
    if value is None or isinstance(value, bool | int | float | np.number):
        return True
    return (tf.is_tensor(value) or isinstance(value, keras.Variable)) and value.shape.rank == 0


def _update_once(
    update: Callable[..., Any], trace: StepTrace, metric: Metric, *args: Any, **kwargs: Any
) -> Any:
    """Update a metric. Update a user's own metric once per step if its arguments are numbers."""
    numbers = keras.tree.flatten([args, kwargs])
    is_own = not type(metric).update_state.__module__.startswith("keras.src.")
    if not is_own or not _is_partial(trace) or not all(map(_is_number, numbers)):
        return update(*args, **kwargs)
    if not trace.is_in_step():
        warn_once(
            f"metric {metric.name!r}: an update in a loop or condition of the step counts once on "
            f"each of {trace.num_replicas} replicas. Fix: update the metric in the step itself"
        )
        return update(*args, **kwargs)
    wholes, counts_here = _of_whole_batch(numbers, trace)
    args, kwargs = keras.tree.pack_sequence_as([args, kwargs], wholes)
    before = [tf.identity(v) for v in metric.variables]
    trace.in_update = True
    try:
        returned = update(*args, **kwargs)
    finally:
        trace.in_update = False
    for variable, old in zip(metric.variables, before, strict=True):
        new = tf.convert_to_tensor(variable)
        if trace.num_replicas > 1:
            variable.assign(tf.where(counts_here, new, old))
        elif new.dtype.is_floating:  # micro-batches run one after another
            variable.assign(old + (new - old) * tf.cast(trace.part, new.dtype))
    return returned


def _of_whole_batch(numbers: list[Any], trace: StepTrace) -> tuple[list[Any], Any]:
    """Return the whole batch's numbers, and whether this is the first replica with examples."""
    wholes = [tf.convert_to_tensor(n) if isinstance(n, keras.Variable) else n for n in numbers]
    sums = [_is_sum(number, trace) for number in wholes]
    if trace.num_replicas == 1:
        pairs = zip(wholes, sums, strict=True)
        return [
            _by_fraction(tf.cast(n, tf.float32), trace) if is_sum else n for n, is_sum in pairs
        ], True
    places = [i for i, number in enumerate(wholes) if sums[i] or _is_computed(number)]
    has_examples = tf.cast(tf.convert_to_tensor(trace.examples) > 0, tf.float64)
    share = tf.cast(trace.share, tf.float64)
    mine = [
        tf.math.multiply_no_nan(tf.cast(wholes[i], tf.float64), has_examples if sums[i] else share)
        for i in places
    ]
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    place = tf.one_hot(replica, trace.num_replicas, dtype=tf.float64)
    *totals, filled = sum_over_replicas([*mine, place * has_examples])
    for i, total in zip(places, totals, strict=True):
        kind = tf.convert_to_tensor(wholes[i]).dtype
        wholes[i] = tf.cast(total if kind.is_floating else tf.round(total), kind)
    return wholes, tf.equal(tf.cast(tf.argmax(filled), tf.int32), replica)


def _is_computed(number: Any) -> bool:
    """Return whether a number may differ between replicas."""
    return tf.is_symbolic_tensor(number) and number.dtype != tf.bool and number.op.type != "Const"


# Sums over the examples. The operations that computed a number tell sums from means.


_ELEMENTWISE = frozenset(
    ("Abs", "Cast", "Identity", "Neg", "PreventGradient", "Reshape", "Squeeze", "StopGradient")
)
_SUMS = frozenset(("Add", "AddN", "AddV2", "Maximum", "Minimum", "SelectV2", "Sub"))
_QUOTIENTS = frozenset(("DivNoNan", "RealDiv"))
_REDUCTIONS = frozenset(("All", "Any", "Max", "Mean", "Min", "Prod", "Sum"))


def _is_sum(value: Any, trace: StepTrace) -> bool:
    """Return whether a scalar from the step is a sum over the replica's examples, or their count.

    All other numbers count as means.
    """
    if isinstance(value, int) and value == trace.rows() and value > 1:
        warn_once(
            f"a metric gets the number {value}, which tfdist treats as the number of examples on a "
            "replica. Fix: pass tf.shape(x)[0] to count examples"
        )
        return True
    if not tf.is_symbolic_tensor(value):
        return False
    return _growth(value, trace) == 1


def _growth(tensor: tf.Tensor, trace: StepTrace) -> int:
    """Return the exponent n if a tensor without a batch axis grows as (number of examples)^n."""
    operation = tensor.op
    kind, inputs = operation.type, list(operation.inputs)
    if operation.name in trace.means or not inputs:
        return 0
    if kind == "Sum" and _has_their_axis(inputs[0], trace):
        return 1
    if kind == "StridedSlice":
        return int(_is_size(inputs[0], inputs[1], trace))
    if kind in ("Size", "Prod"):
        shaped = inputs[0].op.inputs[0] if inputs[0].op.type == "Shape" else inputs[0]
        is_size = kind == "Size" or shaped is not inputs[0]
        return int(is_size and _has_their_axis(shaped, trace))
    if kind in _ELEMENTWISE or kind == "Sum":
        return _growth(inputs[0], trace)
    if kind == "Mul":
        return sum(_growth(factor, trace) for factor in inputs)
    if kind in _QUOTIENTS:
        return _growth(inputs[0], trace) - _growth_of_divisor(inputs[0], inputs[1], trace)
    if kind in _SUMS:
        terms = inputs[1:] if kind == "SelectV2" else inputs
        return min((_growth(t, trace) for t in terms if t.op.type != "Const"), default=0)
    return 0


def _growth_of_divisor(dividend: tf.Tensor, divisor: tf.Tensor, trace: StepTrace) -> int:
    """Return the growth of a divisor. A constant that equals a known size counts as this size."""
    number = tf.get_static_value(divisor)
    if number is None:
        return _growth(divisor, trace)
    sums = [op.inputs[0].shape for op in ops_behind([dividend]) if op.type == "Sum"]
    sizes = {trace.rows(), *(shape.num_elements() for shape in sums)}
    return int(bool(np.isin(number, [size for size in sizes if size])))


def _is_size(shape: tf.Tensor, begin: tf.Tensor, trace: StepTrace) -> bool:
    """Return whether an element of a shape is the number of examples."""
    first = tf.get_static_value(begin)
    if first is None or first[0] != 0:
        return False
    if shape.op.type == "Shape":
        return _has_their_axis(shape.op.inputs[0], trace)
    known = tf.get_static_value(shape)
    return known is not None and bool(known[0] == trace.rows())


def _has_their_axis(tensor: tf.Tensor, trace: StepTrace) -> bool:
    """Return whether a tensor has a batch axis, judged by its shape and its operations."""
    if tensor.shape.is_fully_defined() and trace.rows() not in tuple(tensor.shape):
        return False
    ends = {operation.name for operation in ops_behind([tensor]) if _reduces_first_axis(operation)}
    batch = {part.op.name for part in trace.parts()}
    return any(operation.name in batch for operation in ops_behind([tensor], until=ends))


def _reduces_first_axis(operation: tf.Operation) -> bool:
    if operation.type not in _REDUCTIONS:
        return False
    rank, axes = operation.inputs[0].shape.rank, tf.get_static_value(operation.inputs[1])
    return bool(rank) and axes is not None and 0 in np.ravel(axes) % rank
