"""Metrics in a step: results cover all replicas and steps. A scalar from the step counts once.

On one device, a metric's result in a step's logs covers the whole epoch. On several replicas, and
in a work unit under ps, a step sees only a part of the metric's state. Here the step records which
of its tensors are results, and the logs are read again from the whole state. A metric update with a
scalar from the step, such as a loss, runs on each replica but must count once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.metrics.metric import Metric
from keras.src.metrics.reduction_metrics import Mean, Sum
from keras.src.trainers.compile_utils import CompileMetrics

from tfdist.errors import require
from tfdist.training.keras_compat.kernels import compiled
from tfdist.training.keras_compat.trace import Original, StepTrace, ops_behind, replaces, warn_once

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


@replaces(Metric, "__getattribute__", issue=f"{_KERAS}/metrics/metric.py#L167")
def _in_a_step(original: Original, trace: StepTrace, self: Any, name: str) -> Any:
    """Return an attribute. Wrap `result` and `update_state` of any class for the step."""
    found = original(self, name)
    if name == "result" and trace.sources is not None:
        return functools.partial(_noted_result, found, trace, self)
    if name == "update_state":
        return functools.partial(_without_numbers, found, trace, self)
    return found


# Logs that are results of metrics.


class MetricLogs:
    """Logs of a step that are results of metrics, over all replicas and steps."""

    def __init__(self) -> None:
        self._wholes: dict[str, Callable[[], Any]] = {}
        self._read: Any = None

    def __bool__(self) -> bool:
        return bool(self._wholes)

    def note(self, logs: Mapping[str, Any], trace: StepTrace) -> None:
        """Find these logs among all logs of the step being traced.

        Raises:
          UsageError: A log is computed from a metric.
        """
        if trace.sources is not None:
            found = {name: _whole_of(name, log, trace) for name, log in logs.items()}
            self._wholes = {name: whole for name, whole in found.items() if whole}

    def read(self, strategy: tf.distribute.Strategy) -> dict[str, tf.Tensor]:
        """Return the logs since the last reset. A collective if there are such logs."""
        if not self:
            return {}
        if self._read is None:
            with strategy.scope():
                self._read = compiled(
                    lambda: {n: tf.convert_to_tensor(w()) for n, w in self._wholes.items()}
                )
        logs: dict[str, tf.Tensor] = self._read()
        return logs


def note_source(value: Any, whole: Callable[[], Any], trace: StepTrace) -> tf.Tensor:
    """Return the step's value of a metric as a new tensor. Record it with its function `whole`."""
    found = tf.identity(value)
    assert trace.sources is not None
    trace.sources[found.op.name] = whole
    return found


def _noted_result(result: Callable[[], Any], trace: StepTrace, metric: Metric) -> Any:
    """Return a metric's result, and record its tensors as results."""
    require(
        trace.is_in_step(),
        "step",
        f"a tf.cond, tf.while_loop or tf.function calls result() of {metric.name!r}",
        fix="call result() in the step itself",
        code="metric",
    )
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


def _whole_of(name: str, log: Any, trace: StepTrace) -> Callable[[], Any] | None:
    """Return the function for the whole value of a log, or `None` if no metric is behind it."""
    tensor, sources = tf.convert_to_tensor(log), trace.sources or {}
    if not tf.is_symbolic_tensor(tensor):
        return None
    whole = sources.get(tensor.op.name)
    require(
        whole or not any(op.name in sources for op in ops_behind([tensor])),
        "step",
        f"the log {name!r} is computed from a metric",
        fix="return the metric's result itself, and compute with it in a callback",
        code="metric",
    )
    return whole


# Metric updates with scalars from the step.
#
# `Mean` and `Sum` are linear, so a replica can add its own part of the number. The mean of a number
# is the mean over the examples. In a sum, an integer tensor is a count of the replica's examples,
# and a constant counts once. Any other metric may square the number or count in integers.


@replaces(Mean, "update_state", issue=f"{_KERAS}/metrics/reduction_metrics.py#L138")
def _mean_of_examples(
    original: Original, trace: StepTrace, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    if trace.in_losses and sample_weight is None:
        return original(self, values, trace.examples)
    if sample_weight is not None or not _is_partial(trace) or not _is_number(values):
        return original(self, values, sample_weight)
    if tf.is_symbolic_tensor(values) and values.op.type == "Sum":
        warn_once(
            f"the metric {self.name!r} gets a sum, and counts it as a mean over the examples of a "
            "part of the batch. Fix: pass the tensor with its batch axis"
        )
    return original(self, values, trace.share * trace.part)


@replaces(Sum, "update_state", issue=f"{_KERAS}/metrics/reduction_metrics.py#L84")
def _sum_of_steps(
    original: Original, trace: StepTrace, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    if sample_weight is not None or not _is_partial(trace) or not _is_number(values):
        return original(self, values, sample_weight)
    if tf.is_symbolic_tensor(values) and values.op.type != "Const":
        given = values.op.inputs[0] if values.op.type == "Cast" else values
        require(
            given.dtype.is_integer,
            "metrics",
            f"a step gives {self.name!r} a single number of type {values.dtype.name}, which may be "
            "a sum or a mean of a part of the batch",
            fix="pass the tensor with its batch axis, an integer count of examples, or use Mean",
            code="metric",
        )
        return original(self, values)
    # For a tensor of a known shape, tf.size returns a constant.
    number = tf.get_static_value(values).item() if tf.is_symbolic_tensor(values) else values
    if isinstance(number, int) and number == trace.rows() and number > 1:
        warn_once(
            f"a metric gets the number {number}, which tfdist treats as the number of examples on "
            "a replica. Fix: pass tf.shape(x)[0] to count examples"
        )
        return original(self, values)
    return original(self, values, trace.share * trace.part)


def _is_partial(trace: StepTrace) -> bool:
    """Return whether metrics of this replica or micro-batch see only a part of the step."""
    return trace.num_replicas > 1 or tf.is_tensor(trace.part)


def _is_number(value: Any) -> bool:
    """Return whether an argument is `None` or one number."""
    if value is None or isinstance(value, bool | int | float | np.number):
        return True
    return (tf.is_tensor(value) or isinstance(value, keras.Variable)) and value.shape.rank == 0


def _without_numbers(
    update: Callable[..., Any], trace: StepTrace, metric: Metric, *args: Any, **kwargs: Any
) -> Any:
    """Update a metric. Reject an update of a user's own metric with numbers of a replica's part."""
    is_own = not type(metric).update_state.__module__.startswith("keras.src.")
    numbers = all(map(_is_number, keras.tree.flatten([args, kwargs])))
    require(
        not (is_own and numbers and _is_partial(trace)),
        "metrics",
        f"a step gives {type(metric).__name__} single numbers, and each replica or micro-batch "
        "would count its own number",
        fix="pass tensors with a batch axis, or use keras.metrics.Mean or Sum",
        code="metric",
    )
    return update(*args, **kwargs)


# Metrics whose totals add up, as for jobs that send them with the gradients or from workers.
#
# A part of the work starts at zero and returns its totals, and the job adds them up. Each variable
# of a metric must therefore be a sum over the examples. Keras' own metrics meet this condition. A
# metric with its own `update_state` or `reset_state` must declare it with the attribute `adds_up`.


_BY_KERAS = "keras.src."
_DECIDING = ("update_state", "reset_state")


def require_sums(metrics: Sequence[Metric]) -> None:
    """Reject metrics if their totals do not add up over work units or do not declare it."""
    for metric in _with_nested(metrics):
        kinds = type(metric).__mro__
        definers = {name: next(k for k in kinds if name in vars(k)) for name in _DECIDING}
        own = [n for n, kind in definers.items() if not kind.__module__.startswith(_BY_KERAS)]
        require(
            not own or getattr(metric, "adds_up", False),
            "metrics",
            f"{type(metric).__name__} overrides {' and '.join(own)}, so tfdist cannot tell if its "
            "totals add up over workers",
            fix="set adds_up = True in its class if its variables start at 0 and are only added "
            "to. Otherwise return the number from the step",
            code="metric",
        )
    for variable in (variable for metric in metrics for variable in metric.variables):
        require(
            variable.aggregation == "sum",
            "metrics",
            f"{variable.name} of a metric has aggregation={variable.aggregation!r} instead of "
            "'sum'",
            fix="create the metric's variables with aggregation='sum'",
            code="metric",
        )


def _with_nested(metrics: Iterable[Metric]) -> Iterator[Metric]:
    for metric in metrics:
        yield metric
        is_list = isinstance(metric, CompileMetrics)
        yield from _with_nested(metric.metrics if is_list else metric._metrics)
