"""Workarounds for Keras that only a step with parameter servers needs.

`tfdist.training.keras_compat` installs them if this module is imported. Only a ps job imports it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from keras import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.muon import Muon
from tensorflow.python.distribute import distribute_lib

from tfdist.ps.messages import sent_together
from tfdist.ps.split import parts_of, reading_once, require_by_rows
from tfdist.strategy.devices import server_of
from tfdist.training.keras_compat.trace import CONTEXTS, Original, StepTrace, replaces

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_BASE = f"{_KERAS}/optimizers/base_optimizer.py"
CONTEXTS.append(reading_once)


class UpdateCounts:
    """Update counts that optimizers see while a step is traced. Create it in the step's graph.

    Args:
      given: Number of updates in the earlier steps, int64 ``[optimizers]``, for each variable in
        `followed`.
    """

    def __init__(self, given: tf.Tensor) -> None:
        self.followed: list[Variable] = []
        self.each: list[int] = []
        self._given = given
        self._also_in_updates = False
        self._graph = tf.compat.v1.get_default_graph()

    def follow(self, variable: Variable) -> None:
        """Replace an optimizer's count, unless the optimizer updates it within a condition."""
        if self._in_step() and self._place(variable) is None:
            self.followed.append(variable)
            self.each.append(0)

    def add(self, variable: Variable) -> None:
        place = self._place(variable)
        if place is not None and self._in_step():
            self.each[place] += 1

    def value(self, variable: Variable) -> tf.Tensor | None:
        """Return a count in this step. Return `None` for other variables and in an update."""
        place, in_update = self._place(variable), distribute_lib.get_update_replica_id() is not None
        if place is None or (in_update and not self._also_in_updates):
            return None
        return tf.cast(self._given[place] + self.each[place], variable.dtype)

    @contextlib.contextmanager
    def also_in_updates(self) -> Iterator[None]:
        """Use the step's counts within an update as well."""
        before, self._also_in_updates = self._also_in_updates, True
        try:
            yield
        finally:
            self._also_in_updates = before

    def after(self) -> tf.Tensor:
        return self._given + tf.constant(self.each, tf.int64) if self.each else self._given

    def _in_step(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._graph

    def _place(self, variable: Variable) -> int | None:
        return next((i for i, one in enumerate(self.followed) if one is variable), None)


# An update uses the learning rate of the dispatched step.
#
# For weight decay, Keras computes the learning rate again within the update. The server's
# count there belongs to another step. The function below uses the step's count (`UpdateCounts`).


@replaces(BaseOptimizer, "_get_current_learning_rate", issue=f"{_BASE}#L777")
def _of_the_step(original: Original, trace: StepTrace, self: Any) -> Any:
    if trace.counts is None:
        return original(self)
    with trace.counts.also_in_updates():
        return original(self)


# A loss scale also grows if workers have counted past its growth step.
#
# Keras tests whether the count equals that step. If two workers test just before that step and both
# add 1, the count skips the step. The scale would then not grow until gradients overflow.


@replaces(
    LossScaleOptimizer,
    "_stateful_handle_finite_grads",
    issue=f"{_KERAS}/optimizers/loss_scale_optimizer.py#L213",
)
def _growing_past_the_step(
    original: Original, trace: StepTrace, self: Any, grads: Any, trainable_variables: Any
) -> None:
    counted = tf.convert_to_tensor(self.step_counter._value)
    trace.held[id(self.step_counter)] = tf.minimum(counted, self.dynamic_growth_steps - 1)
    original(self, grads, trainable_variables)


# Gradient accumulation of several workers loses no gradient and counts each gradient once.
#
# Keras reads a sum of gradients, adds to it and writes it. An update reads the sums on the worker
# and sets them to 0 at its end. Gradients that others add meanwhile are lost, and two simultaneous
# updates use the same sum. Here an atomic operation adds a gradient. An update subtracts from a sum
# the value that it read, on the server and under a lock. Elements that are not finite restart at 0,
# as in Keras.


def taken(variable: Any) -> tf.Tensor:
    """Subtract a sum of gradients from its server, and return it."""
    parts = []
    for part in parts_of(variable._value):
        with tf.device(part.device):
            parts.append(_take_sum(part))
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _take_sum(part: Any) -> tf.Tensor:
    mutex = tf.raw_ops.MutexV2(shared_name=f"taken/{part._unique_id}")
    lock = tf.raw_ops.MutexLock(mutex=mutex)
    with tf.control_dependencies([lock]):
        mine = part.read_value()
        is_finite = tf.math.is_finite(mine)

        def subtract() -> tf.Tensor:
            part.assign_sub(mine)
            return is_finite

        def begin_anew() -> tf.Tensor:
            part.assign(tf.where(is_finite, part.read_value() - mine, tf.zeros_like(mine)))
            return is_finite

        done = tf.cond(tf.reduce_all(is_finite), subtract, begin_anew)
    with tf.control_dependencies([done]):
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)  # frees the lock after `done`
    return mine


@replaces(BaseOptimizer, "_backend_apply_gradients", issue=f"{_BASE}#L535")
def _about_to_update(
    original: Original, trace: StepTrace, self: Any, grads: Any, trainable_variables: Any
) -> Any:
    require_by_rows(self, trainable_variables)
    trace.packed = sent_together
    if self.gradient_accumulation_steps:
        sums = [one for one in self._accumulated_gradients if one is not None]
        for one in sums:
            if _are_on_servers([one._value]):
                trace.taken[id(one)] = functools.cache(functools.partial(taken, one))
    return original(self, grads, trainable_variables)


@replaces(
    TFOptimizer,
    "_backend_increment_gradient_accumulators",
    issue=f"{_KERAS}/backend/tensorflow/optimizer.py#L203",
)
def _adding(original: Original, trace: StepTrace, self: Any, grads: Any, sums: Any) -> Any:
    if not trace.taken:
        return original(self, grads, sums)
    pairs = zip(grads, (one._value for one in sums), strict=True)
    for gradient, variable in sent_together(list(pairs)):
        self._distribution_strategy.extended.update(
            variable, self.assign_add, args=(gradient,), group=False
        )
    return None


@replaces(BaseOptimizer, "_backend_reset_gradient_accumulators", issue=f"{_BASE}#L623")
def _has_taken(original: Original, trace: StepTrace, self: Any) -> Any:
    return None if trace.taken else original(self)


def _are_on_servers(variables: Iterable[Any]) -> bool:
    return all(server_of(part) is not None for one in variables for part in parts_of(one))


# The parameter servers compute the averages of weights, which start at the server's first update.
#
# Keras computes them in the step, on the worker. The worker reads weights and averages again and
# sends the new averages, while other workers do the same. Keras starts the averages in step 0.
# Under ps another step may be the first to finish. If that step replaced weights by averages, it
# would use averages that have not started.


@replaces(BaseOptimizer, "_update_model_variables_moving_average", issue=f"{_BASE}#L970")
def _on_their_servers(
    original: Original, trace: StepTrace, self: Any, trainable_variables: Any
) -> Any:
    weights = [v.value if isinstance(v, Variable) else v for v in trainable_variables]
    if not _are_on_servers(weights):
        return original(self, trainable_variables)

    def update(weight: Any, average: Any) -> None:
        # `iterations` is the server's count here, as in any update.
        is_begun = tf.cast(tf.not_equal(self.iterations, 0), weight.dtype)
        momentum = is_begun * tf.cast(self.ema_momentum, weight.dtype)
        before, now = tf.convert_to_tensor(average), tf.convert_to_tensor(weight)
        self.assign(average, momentum * before + (1 - momentum) * now)

    averages = self._model_variables_moving_average
    for weight, average in zip(weights, averages, strict=True):
        if average is not None:
            self._distribution_strategy.extended.update(
                weight, update, args=(average,), group=False
            )
    return None


# The parameter servers apply Muon's weight decay, an operation per weight.
#
# Muon has its own weight decay, which reads and writes each weight on the worker. Writes by other
# workers between that read and that write are lost.


@replaces(Muon, "_apply_weight_decay", issue=f"{_KERAS}/optimizers/muon.py#L293")
def _subtracted(original: Original, trace: StepTrace, self: Any, variables: Any) -> None:
    if not _are_on_servers([variable._value for variable in variables]):
        original(self, variables)
        return

    def update(weight: Any, decay: float) -> None:
        rate = tf.cast(self.learning_rate, weight.dtype)
        self.assign_sub(weight, weight * tf.cast(decay, weight.dtype) * rate)

    for variable in filter(self._use_weight_decay, variables):
        own = self.adam_weight_decay if self._should_use_adamw(variable) else self.weight_decay
        if own is not None:
            self._distribution_strategy.extended.update(
                variable.value, update, args=(own,), group=False
            )


# The parameter server that holds a variable applies its constraint.
#
# Keras reads the updated variable, constrains it and writes it back. On the worker, this sends the
# variable over the network twice, and loses the writes of other workers in between. The worker
# still constrains a split variable, because a constraint may need the whole value.


@replaces(Variable, "constraint", issue=f"{_BASE}#L530")
def _on_its_server(original: Original, trace: StepTrace, self: Any) -> Callable[[Any], Any] | None:
    own: Callable[[Any], Any] | None = original(self)
    if own is None or server_of(self._value) is None:
        return own

    def on_its_server(variable: Any) -> Any:
        with tf.device(self._value.device):
            return own(variable)

    return on_its_server
