"""What lives in the step and not in its variable may be written within a condition.

Under ps that is the metrics. A condition is traced as a function for each branch, and a tensor that
one of them makes is not to be had outside: TensorFlow says so ("out of scope") where the metric is
read next, and names neither. So each branch returns what the step holds, along with its result.
Ended by: no release, TensorFlow 2.21 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import cond_v2

from tfdist.errors import UsageError
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace, current

_SOURCE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python"


def hold(variable: Any, value: tf.Tensor, trace: StepTrace) -> None:
    """Has `value` be that of a variable which lives in the step, from here on.

    Raises:
      UsageError: in a loop or a function within the step, which would go on with the value that
        was there when it was traced.
    """
    if tf.compat.v1.get_default_graph() is not trace.holder:
        raise UsageError(
            "metrics",
            received=f"{variable.path}, updated in a tf.while_loop or tf.function within a step",
            expected="updates in the step itself, or in a tf.cond of it, under strategy ps",
            fix="use a Python loop, which the step unrolls, or return what the loop has counted "
            "and update the metric by that",
        )
    trace.local[id(variable)] = tf.cast(value, trace.local[id(variable)].dtype)


def _with_what_the_step_holds(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(pred: Any, true_fn: Any, false_fn: Any, name: str = "cond") -> Any:
        trace = current()
        if trace is None or not _may_write(trace):
            return original(pred, true_fn, false_fn, name)
        branches = [_returning_what_it_holds(branch, trace) for branch in (true_fn, false_fn)]
        result, held = original(pred, *branches, name)
        trace.local.update(zip(trace.local, held, strict=True))
        return result

    return cond


def _may_write(trace: StepTrace) -> bool:
    """Whether a condition that is traced now may write to what the step holds."""
    if trace.in_door or not trace.local:  # what is behind the door updates weights
        return False
    return tf.compat.v1.get_default_graph() is trace.holder


def _returning_what_it_holds(branch: Callable[[], Any], trace: StepTrace) -> Callable[[], Any]:
    def run() -> tuple[Any, list[tf.Tensor]]:
        before, holder = dict(trace.local), trace.holder
        trace.holder = tf.compat.v1.get_default_graph()
        try:
            return branch(), list(trace.local.values())
        finally:
            trace.holder = holder
            trace.local.update(before)

    return run


REPLACEMENTS = (
    Replacement(
        owner=cond_v2,
        name="cond_v2",
        make=_with_what_the_step_holds,
        issue=f"{_SOURCE}/ops/cond_v2.py#L83",
    ),
)
