"""Metrics whose totals add up, as for jobs that send them with the gradients or from workers.

A part of the work starts at zero and returns its totals, and the job adds them up. Each variable of
a metric must therefore be a sum over the examples. Keras' own metrics meet this condition. A metric
with its own `update_state` or `reset_state` must declare it with the attribute `adds_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import keras
from keras.src.trainers.compile_utils import CompileMetrics

from tfdist.errors import require
from tfdist.training.program import StepProgram

_BY_KERAS = "keras.src."
_DECIDING = ("update_state", "reset_state")


def require_sums(program: StepProgram) -> None:
    """Reject metrics if their totals do not add up over work units or do not declare it."""
    for metric in _with_nested(program.keras_metrics):
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
    for variable in program.metrics:
        require(
            variable.aggregation == "sum",
            "metrics",
            f"{variable.name} of a metric has aggregation={variable.aggregation!r} instead of "
            "'sum'",
            fix="create the metric's variables with aggregation='sum'",
            code="metric",
        )


def _with_nested(metrics: Iterable[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    for metric in metrics:
        yield metric
        is_list = isinstance(metric, CompileMetrics)
        yield from _with_nested(metric.metrics if is_list else metric._metrics)
