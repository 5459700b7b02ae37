"""A replica's loss counts by its share of the global batch.

Keras takes 1 / replicas, whatever the share, and nothing at all of a loss function that returns
one number. Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import StepTrace, current

_MEAN = "sum_over_batch_size"
_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/losses/loss.py"


def unscaled(value: tf.Tensor, trace: StepTrace) -> tf.Tensor:
    """A scaled loss as one device has it: divided by the share."""
    # An empty share counts nothing, so that any finite number does.
    whole = tf.math.divide_no_nan(value, tf.cast(trace.share, value.dtype))
    trace.unscaled.add(whole.op.name)
    return whole


def _scaled(value: tf.Tensor, *, by: tf.Tensor | float, trace: StepTrace) -> tf.Tensor:
    """A replica's part of the loss of the step: the sum over the replicas is that of one device."""
    part = value * tf.cast(by, value.dtype)
    trace.scaled.add(part.op.name)
    return part


def comes_of_scaled(value: tf.Tensor, trace: StepTrace) -> bool:
    """True when `value` was computed from a loss that is scaled by the share."""
    seen: set[str] = set()
    waiting = [value.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in trace.scaled:
            return True
        if operation.name not in seen and operation.name not in trace.unscaled:
            seen.add(operation.name)
            waiting += [tensor.op for tensor in operation.inputs]
    return False


def logs_by_share(logs: dict[str, Any], trace: StepTrace) -> dict[str, tf.Tensor]:
    """What a step returned on one replica, such that the sum over replicas is that of one device.

    Exact for means over examples and for losses; a loss that is scaled has its share already.
    """
    found = {}
    for name, log in logs.items():
        value = tf.cast(tf.convert_to_tensor(log), tf.float32)
        if trace.num_replicas > 1 and not comes_of_scaled(value, trace):
            value = tf.math.multiply_no_nan(value, tf.cast(trace.share, value.dtype))
        found[name] = value
    return found


def _scale_by_share(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(value: Any) -> Any:
        trace = current()
        if trace is None:
            return original(value)
        trace.loss_scaled = True
        # A layer may add a loss that Keras has scaled where it was computed.
        if trace.num_replicas == 1 or comes_of_scaled(value, trace):
            return value
        return _scaled(value, by=trace.share, trace=trace)

    return scale


def _unscale_by_share(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale(value: Any) -> Any:
        trace = current()
        if trace is None:
            return original(value)
        # What a `compute_loss` of the user's own has made by hand was never scaled.
        if trace.num_replicas == 1 or not comes_of_scaled(value, trace):
            return value
        return unscaled(value, trace)

    return unscale


def _noting_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """A Keras loss knows the share by itself, also one that is a sum and is never scaled."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is not None and self.reduction not in (None, "none"):
            trace.loss_scaled = True
        return original(self, *args, **kwargs)

    return call


def _scaling_the_rest(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scales what Keras never does: one number of a loss function, and sums.

    What a loss function returned as one number, and not one for each example, is taken for a mean
    over the batch; its gradient would count once for each replica. A sum is a replica's part as it
    is, but that of an empty share is of an example which does not count.
    """

    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = _MEAN) -> Any:
        reduced = original(values, sample_weight, reduction)
        trace = current()
        if trace is None or reduction in ("none", None):
            return reduced
        if reduction == "sum" and trace.num_replicas > 1:
            return _scaled(reduced, by=tf.sign(trace.share), trace=trace)
        if reduction == "sum" or tuple(values.shape) != ():
            return reduced
        return keras_loss.scale_loss_for_distribution(reduced)

    return reduce_values


REPLACEMENTS = (
    Replacement(
        owner=keras_loss,
        name="scale_loss_for_distribution",
        make=_scale_by_share,
        issue=f"{_SOURCE}#L229",
    ),
    Replacement(
        owner=keras_loss,
        name="unscale_loss_for_distribution",
        make=_unscale_by_share,
        issue=f"{_SOURCE}#L246",
    ),
    Replacement(owner=keras_loss.Loss, name="__call__", make=_noting_loss, issue=f"{_SOURCE}#L56"),
    Replacement(
        owner=keras_loss, name="reduce_values", make=_scaling_the_rest, issue=f"{_SOURCE}#L140"
    ),
)
