"""Reads and writes of Keras variables in a step.

Four workarounds share these names: BatchNormalization's statistics are noted to be reduced, what
lives in the step is read and written there, an optimizer's count is that of the step, and
additions are one operation.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow.core import Variable

from tfdist.strategy.devices import server_of
from tfdist.training.keras_compat.on_servers import hold, taken
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace, current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


# BatchNormalization writes each replica's own moving statistics, and they drift apart. The gradient
# hook takes them along; what is written after the last gradient hook is reduced at the end of the
# step.


def _noting_writes(original: Callable[..., Any]) -> Callable[..., Any]:
    def direct_assign(self: Any, value: Any) -> Any:
        trace = current()
        if trace is not None and id(self) in trace.local:
            hold(self, value, trace)
            return None
        if trace is not None and trace.training and _is_statistic(self, trace):
            trace.statistics.append(self)
        return original(self, value)

    return direct_assign


def _is_statistic(variable: Any, trace: StepTrace) -> bool:
    return (
        trace.num_replicas > 1
        and not trace.in_hook
        and not variable.trainable
        and variable.synchronization != "on_read"
        and tf.as_dtype(variable.dtype).is_floating
        and all(variable is not seen for seen in trace.statistics)
    )


# Under ps the metrics stay in the worker's step while the weights are on the servers. Keras'
# StatelessScope takes either all variables or none.


def _local_value(original: property) -> property:
    """Read a variable that lives in the step; `_noting_writes` is the other half."""

    def value(self: Any) -> Any:
        trace = current()
        found = None if trace is None else _in_step(self, trace)
        return original.fget(self) if found is None else found  # type: ignore[misc]

    return property(value, doc=original.__doc__)


def _in_step(variable: Any, trace: StepTrace) -> tf.Tensor | None:
    found = trace.local.get(id(variable))
    if found is None:
        found = trace.held.get(id(variable))
    if found is None:
        found = taken(variable, trace)
    if found is None and trace.counts is not None:
        found = trace.counts.value(variable)
    return found


# Keras adds by reading, adding and assigning, which loses updates under a parameter server.


def _where_added(value: Any, variable: Any) -> AbstractContextManager[Any]:
    """Make a number on the parameter server, to which each step would send it otherwise."""
    if tf.is_tensor(value) or server_of(variable) is None:
        return nullcontext()
    device: AbstractContextManager[Any] = tf.device(variable.device)
    return device


def _in_one_operation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign(self: Any, value: Any) -> Any:
            trace = current()
            at_once = (
                trace is not None
                and id(self) not in trace.local
                and (trace.num_replicas == 1 or trace.in_hook or self.synchronization == "on_read")
            )
            if trace is None or not at_once or in_stateless_scope():
                return original(self, value)
            with _where_added(value, self._value):
                value = tf.cast(value, self._value.dtype)
            if value.shape != self._value.shape:
                return original(self, value)
            if trace.counts is not None and name == "assign_add":
                trace.counts.add(self)
            return getattr(self._value, name)(value)

        return assign

    return make


REPLACEMENTS = (
    Replacement(
        owner=Variable,
        name="_direct_assign",
        make=_noting_writes,
        issue=f"{_SOURCE}/layers/normalization/batch_normalization.py#L385",
    ),
    Replacement(
        owner=Variable,
        name="value",
        make=_local_value,
        issue=f"{_SOURCE}/backend/common/stateless_scope.py#L82",
    ),
    *(
        Replacement(
            owner=Variable,
            name=name,
            make=_in_one_operation(name),
            issue="https://github.com/keras-team/keras/issues/18668",
        )
        for name in ("assign_add", "assign_sub")
    ),
)
