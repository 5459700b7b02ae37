"""What the workers of a ps job accumulate is neither lost nor counted twice.

Keras reads a sum of gradients, adds to it and writes it; an update reads the sums by way of the
worker, and sets them to 0 when it is done. What others add meanwhile is lost, and two updates at
once take the same. Here a gradient is added in one operation, and an update subtracts on the server
what it has taken there. Two that take the same all the same leave a debt, which the next one pays.
What is not finite has no difference: it begins anew, as under Keras.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.strategy.servers import server_of
from tfdist.strategy.split import parts_of
from tfdist.training.keras_compat.packing import sent_together
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace, current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


def taken(variable: Any, trace: StepTrace) -> tf.Tensor | None:
    """What an update takes of a sum, read on its server; None of any other variable."""
    parts = trace.taken.get(id(variable))
    if parts is None:
        return None
    if not parts:
        for part in parts_of(variable._value):
            with tf.device(part.device):
                parts.append(part.read_value())
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _about_to_take(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        trace = current()
        if trace is not None and self.gradient_accumulation_steps:
            sums = [one for one in self._accumulated_gradients if one is not None]
            trace.taken.update((id(one), []) for one in sums if _is_on_servers(one))
        return original(self, grads, trainable_variables)

    return apply_gradients


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    def increment(self: Any, grads: Any, sums: Any) -> Any:
        trace = current()
        if trace is None or not trace.taken:
            return original(self, grads, sums)
        pairs = zip(grads, (one._value for one in sums), strict=True)
        for gradient, variable in sent_together(list(pairs)):
            self._distribution_strategy.extended.update(
                variable, self.assign_add, args=(gradient,), group=False
            )
        return None

    return increment


def _subtracting(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset(self: Any) -> Any:
        trace = current()
        if trace is None or not trace.taken:
            return original(self)
        for one in self._accumulated_gradients:
            for part, mine in zip(_parts(one), trace.taken.get(id(one), ()), strict=False):
                with tf.device(part.device):
                    _subtract(part, mine)
        return None

    return reset


def _subtract(part: Any, mine: tf.Tensor) -> None:
    is_finite = tf.math.is_finite(mine)

    def begin_anew() -> None:
        part.assign(tf.where(is_finite, part.read_value() - mine, tf.zeros_like(mine)))

    def subtract() -> None:
        part.assign_sub(mine)

    tf.cond(tf.reduce_all(is_finite), subtract, begin_anew)


def _is_on_servers(variable: Any) -> bool:
    return all(server_of(part) is not None for part in _parts(variable))


def _parts(variable: Any) -> tuple[Any, ...]:
    return () if variable is None else parts_of(variable._value)


REPLACEMENTS = (
    Replacement(
        owner=BaseOptimizer,
        name="_backend_apply_gradients",
        make=_about_to_take,
        issue=f"{_SOURCE}/optimizers/base_optimizer.py#L535",
    ),
    Replacement(
        owner=TFOptimizer,
        name="_backend_increment_gradient_accumulators",
        make=_adding,
        issue=f"{_SOURCE}/backend/tensorflow/optimizer.py#L203",
    ),
    Replacement(
        owner=BaseOptimizer,
        name="_backend_reset_gradient_accumulators",
        make=_subtracting,
        issue=f"{_SOURCE}/optimizers/base_optimizer.py#L623",
    ),
)
