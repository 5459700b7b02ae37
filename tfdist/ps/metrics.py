"""Metrics of a ps job: their totals add up over work units; others are refused.

A work unit begins at zero and returns what its steps have added; the chief adds that up. So every
variable of a metric has to be a sum over the examples. Keras' own metrics are. A metric with an
`update_state` or a `reset_state` of its own says that it is one by the attribute `adds_up`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import keras
import numpy as np
from keras.src.trainers.compile_utils import CompileMetrics

from tfdist.errors import require
from tfdist.training.program import StepProgram

_BY_KERAS = "keras.src."
_DECIDING = ("update_state", "reset_state")


def require_sums(program: StepProgram) -> None:
    """Refuse metrics whose totals do not add up over work units, or do not say so."""
    for metric in _with_nested(program.keras_metrics):
        own = [name for name in _DECIDING if not _is_by_keras(metric, name)]
        require(
            not own or getattr(metric, "adds_up", False),
            "metrics",
            received=f"{type(metric).__name__}, whose {' and '.join(own)} may do anything",
            expected="metrics that add up over workers, under strategy ps",
            fix="set adds_up = True in its class if each of its variables begins at 0 and is only "
            "added to; else return the figure from the step",
            code="metric-adds-up",
        )
    for variable in program.metrics:
        require(
            variable.aggregation == "sum",
            "metrics",
            received=f"a metric whose {variable.name} is combined by {variable.aggregation!r}",
            expected="totals that add up over workers, under strategy ps",
            fix="create the metric's variables with aggregation='sum'",
            code="metric-aggregation",
        )


def require_zeros(program: StepProgram) -> None:
    """Refuse metrics that do not begin at 0: each work unit begins there."""
    for variable in program.metrics:
        require(
            not np.any(variable.numpy()),
            "metrics",
            received=f"a metric whose {variable.path} does not begin at 0",
            expected="totals that add up over workers, each of which begins at 0, under ps",
            fix="have the metric's reset_state set its variables to 0",
            code="metric-zero",
        )


def _with_nested(metrics: Iterable[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    """Yield metrics and those that they are made of."""
    for metric in metrics:
        yield metric
        is_list = isinstance(metric, CompileMetrics)
        yield from _with_nested(metric.metrics if is_list else metric._metrics)


def _is_by_keras(metric: keras.metrics.Metric, name: str) -> bool:
    defined_in = next(kind for kind in type(metric).__mro__ if name in vars(kind))
    return defined_in.__module__.startswith(_BY_KERAS)
