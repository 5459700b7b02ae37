"""Metrics in a step: their results in its logs are those of all replicas and steps.

On one device the result of a metric in the logs of a step is that of the whole epoch. On several
replicas, and in a work unit under ps, a step sees a part of the metric's state. Here the step notes
which of its tensors are results, and what it computes from them is computed again from the whole
state. Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.metrics.metric import Metric

from tfdist.errors import require
from tfdist.training.keras_compat.kernels import compiled
from tfdist.training.keras_compat.trace import (
    Original,
    StepTrace,
    ops_behind,
    replaces,
)

_SOURCE = "value_of_a_metric"
_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


@replaces(Metric, "__getattribute__", issue=f"{_KERAS}/metrics/metric.py#L167")
def _in_a_step(original: Original, trace: StepTrace, self: Any, name: str) -> Any:
    """Return an attribute; the `result` of any class notes what it returns."""
    found = original(self, name)
    if name == "result" and trace.sources is not None:
        return functools.partial(_noted_result, found, trace)
    return found


# Logs that are computed from metrics.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Formula:
    """Computation of a log from values of metrics.

    Attributes:
      graph: operations from the values to the log.
      output: name of the log's tensor.
      sources: functions that return the whole values, by the names of the step's tensors.
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
    """Logs of a step that are computed from metrics, read over all replicas and steps."""

    def __init__(self) -> None:
        self._formulas: dict[str, _Formula] = {}
        self._read: Any = None

    def __bool__(self) -> bool:
        return bool(self._formulas)

    def note(self, logs: Mapping[str, Any], trace: StepTrace) -> None:
        """Find these logs among all logs of the step that is being traced.

        Raises:
          UsageError: a log is computed from a metric and from other values of the step.
        """
        if trace.sources is not None:
            found = {name: _formula(name, log, trace) for name, log in logs.items()}
            self._formulas = {name: formula for name, formula in found.items() if formula}

    def read(self, strategy: tf.distribute.Strategy) -> dict[str, tf.Tensor]:
        """Return the logs since metrics were reset. A collective, unless there is no such log."""
        if not self:
            return {}
        if self._read is None:
            with strategy.scope():
                self._read = compiled(lambda: {n: log() for n, log in self._formulas.items()})
        logs: dict[str, tf.Tensor] = self._read()
        return logs


def note_source(value: Any, whole: Callable[[], Any], trace: StepTrace) -> tf.Tensor:
    """Return the step's value of a metric as a tensor of its own, noted with the whole value."""
    found = tf.identity(value, name=_SOURCE)
    if trace.sources is not None and trace.is_in_step():
        trace.sources[found.op.name] = whole
    else:
        trace.hides_sources = True
    return found


def _noted_result(result: Callable[[], Any], trace: StepTrace) -> Any:
    """Return a metric's result, and note that its tensors are that."""
    found = result()

    def whole(index: int) -> Any:
        return keras.tree.flatten(result())[index]

    leaves = [
        note_source(leaf, functools.partial(whole, i), trace)
        if tf.is_tensor(leaf) or isinstance(leaf, Variable)
        else leaf
        for i, leaf in enumerate(keras.tree.flatten(found))
    ]
    return keras.tree.pack_sequence_as(found, leaves)


def _formula(name: str, log: Any, trace: StepTrace) -> _Formula | None:
    """Return how a log is computed from metrics; None if it is not."""
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
        received=f"{name!r}, computed from a metric and from other values of the step",
        expected="logs that are computed from metrics only, or not from metrics, on several "
        "replicas and under ps",
        fix="return the metric's result and the other value under keys of their own, and call "
        "result() outside of tf.cond and tf.function",
        code="metric-in-log",
    )
    return _Formula(
        graph=_graph_of(rest, trace),
        output=tensor.name,
        sources={f"{source}:0": sources[source] for source in used},
    )


def _graph_of(operations: list[tf.Operation], trace: StepTrace) -> tf.compat.v1.GraphDef:
    """Return operations as a graph of their own, on any device."""
    graph = tf.compat.v1.GraphDef()
    for operation in operations:
        node = graph.node.add()
        node.CopyFrom(operation.node_def)
        node.ClearField("device")
        node.attr.pop("_class", None)  # places it beside a variable
        inputs = [given for given in node.input if not given.startswith("^")]
        node.input[:] = inputs
    if any(attr.HasField("func") for node in graph.node for attr in node.attr.values()):
        graph.library.CopyFrom(trace.graph.as_graph_def().library)
    return graph


def _hides_source(operation: tf.Operation) -> bool:
    """Return whether a condition, a loop or a function has a metric's result in its own graph."""
    functions = [a.func.name for a in operation.node_def.attr.values() if a.HasField("func")]
    found = [operation.graph._get_function(name) for name in functions]
    return any(
        (inner.type == "Identity" and _SOURCE in inner.name) or _hides_source(inner)
        for function in filter(None, found)
        for inner in function.graph.get_operations()
    )
