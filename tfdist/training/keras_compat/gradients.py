"""Gradient hook: reduces gradients when they enter the optimizer.

Keras clips, checks and accumulates each replica's own gradient and sums later
(https://github.com/tensorflow/tensorflow/issues/25806 reports this for an older Keras). Clipping
then differs from one device, an overflow on one replica stays undetected, and a mean over unequal
batch fractions is wrong. Keras also squares each slice of a sparse gradient separately. A row that
occurs twice, in a batch or on two replicas, then counts as two gradients (`summed_rows`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from tensorflow.python.distribute import distribute_lib

from tfdist.errors import UsageError
from tfdist.training.keras_compat.reduction import (
    reduced,
    scattered,
    summed_rows,
    times,
    warn_of_its_own,
    wholes_of,
)
from tfdist.training.keras_compat.trace import Original, StepTrace, replaces

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers"


# Keras checks only the first replica's gradients for finite values.
@replaces(LossScaleOptimizer, "apply", issue=f"{_SOURCE}/loss_scale_optimizer.py#L276")
@replaces(BaseOptimizer, "apply", issue=f"{_SOURCE}/base_optimizer.py#L588")
def _gradient_hook(
    original: Original,
    trace: StepTrace,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Any = None,
) -> Any:
    if not trace.updates:
        if not self.built and trainable_variables is not None:
            trace.unbuilt.append((self, list(trainable_variables)))
        return None
    if trace.in_hook:
        return original(self, grads, trainable_variables)
    if trace.instead_of_update is None and not _in_group():
        return original(self, [summed_rows(g) for g in grads], trainable_variables)
    if trace.counts is not None:
        trace.counts.follow(self._iterations)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if trace.num_replicas > 1:
        _require_built(self)
        warn_of_its_own(self)
        grads = [g if g is None else times(g, trace.share) for g in grads]
    if trace.instead_of_update is not None:
        grads = [summed_rows(g) for g in grads]
        updated = trainable_variables or list(self._trainable_variables)
        note_read = trace.instead_of_update(self, grads, updated)
        trace.taken |= dict.fromkeys(map(id, updated), note_read)
        return None
    if whole_variables := wholes_of.get(self):
        trainable_variables = trainable_variables or list(whole_variables)
        grads = scattered(self, list(grads), trainable_variables, trace)
    else:
        grads = reduced(list(grads), trace) if trace.num_replicas > 1 else grads
        grads = [summed_rows(g) for g in grads]
    if trace.at_hook is not None:
        trace.at_hook(grads)
    trace.in_hook = True
    try:
        with _cross_replica_on_ps():
            return original(self, grads, trainable_variables)
    finally:
        trace.in_hook = False


def _in_group() -> bool:
    """Return whether Keras would sum over replicas, which includes a group of one replica."""
    group = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(tf.distribute.get_strategy(), group) or _on_ps()


def _require_built(optimizer: Any) -> None:
    """Raise UsageError if the optimizer would create variables in a step on several replicas."""
    if not optimizer.built:
        raise UsageError(
            "optimizer",
            f"a step uses the {type(optimizer).__name__} {optimizer.name!r}, which is not built",
            fix="call its build(variables) inside `with strategy.scope():` before the first step",
            code="not-built",
        )


def _on_ps() -> bool:
    strategy = tf.distribute.get_strategy()
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)


@contextlib.contextmanager
def _cross_replica_on_ps() -> Iterator[None]:
    """Update variables directly under ps, in a context that waits for no other thread."""
    if not _on_ps():
        yield
        return
    mode = distribute_lib._CrossReplicaThreadMode(tf.distribute.get_strategy())
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@replaces(LossScaleOptimizer, "_tf_apply", issue="https://github.com/keras-team/keras/issues/18666")
def _loss_scaling(
    original: Original, trace: StepTrace, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Skip `merge_call`: after the hook, all replicas check the same gradients."""
    if trace.in_hook:
        return self._common_apply(grads, trainable_variables)
    return original(self, grads, trainable_variables)


@replaces(LossScaleOptimizer, "scale_loss", issue=f"{_SOURCE}/loss_scale_optimizer.py#L315")
def _scaling_as_it_will_unscale(original: Original, trace: StepTrace, self: Any, loss: Any) -> Any:
    """Unscale gradients by the scale of their loss, even if another worker changes it meanwhile."""
    if trace.is_in_step() and self.built:
        scale = tf.convert_to_tensor(self.dynamic_scale)
        trace.held.setdefault(id(self.dynamic_scale), scale)
    return original(self, loss)


# Keras' update sums again and has no option to skip this sum. Only the update uses the gradients
# afterwards, so this replacement also packs them. On one device the sum would only keep the graph
# of the step in memory (see `reduction.all_reduce`).
@replaces(
    TFOptimizer,
    "_all_reduce_sum_gradients",
    issue="https://github.com/keras-team/keras/issues/19308",
)
def _already_reduced(original: Original, trace: StepTrace, self: Any, grads_and_vars: Any) -> Any:
    if trace.in_hook or not _in_group():
        return trace.packed(list(grads_and_vars))
    return original(self, grads_and_vars)
