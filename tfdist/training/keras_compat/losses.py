"""A replica's loss counts by its fraction of the global batch.

Keras takes 1 / replicas, whatever the batch fraction, and nothing at all of a loss function that
returns one number. Masked entries and sample weights are counted by each replica for itself. A
tensor of several losses is summed, by `add_loss` or the tape, and counts as a mean. What layers add
is in lists that all replicas share. Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.distillation.distiller import Distiller
from keras.src.layers.layer import Layer
from keras.src.losses import loss as keras_loss
from keras.src.metrics.reduction_metrics import Mean
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.trainer import Trainer

from tfdist.strategy.job import current_job
from tfdist.training.keras_compat.reduction import sum_over_replicas
from tfdist.training.keras_compat.trace import (
    Original,
    StepTrace,
    comes_of_scaled,
    ops_behind,
    replaces,
    scaled,
    unscaled,
)

_LOG = logging.getLogger(__name__)
_PRODUCTS = frozenset(("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"))
_MEAN = "sum_over_batch_size"
_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_SOURCE = f"{_KERAS}/losses/loss.py"
_TAPE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/backprop.py"


def logs_by_fraction(logs: dict[str, Any], trace: StepTrace) -> dict[str, tf.Tensor]:
    """Return one replica's logs such that the sum over replicas is that of one device.

    Exact for means over examples and for losses; a loss that is scaled has its share already.
    """
    found = {}
    for name, log in logs.items():
        value = tf.cast(tf.convert_to_tensor(log), tf.float32)
        if trace.num_replicas > 1 and not comes_of_scaled(value, trace):
            value = tf.math.multiply_no_nan(value, tf.cast(trace.share, value.dtype))
        found[name] = value
    return found


@replaces(keras_loss, "scale_loss_for_distribution", issue=f"{_SOURCE}#L229")
def _scale_by_fraction(original: Original, trace: StepTrace, value: Any) -> Any:
    if trace.by_hand:
        return value
    trace.loss_scaled = True
    # A layer may add a loss that Keras has scaled where it was computed.
    if trace.num_replicas == 1 or comes_of_scaled(value, trace):
        return value
    return scaled(value, by=trace.share, trace=trace)


@replaces(keras_loss, "unscale_loss_for_distribution", issue=f"{_SOURCE}#L246")
def _unscale_by_fraction(original: Original, trace: StepTrace, value: Any) -> Any:
    # What a `compute_loss` of the user's own has made by hand was never scaled.
    if trace.num_replicas == 1 or not comes_of_scaled(value, trace):
        return value
    return unscaled(value, trace)


@replaces(keras_loss.Loss, "__call__", issue=f"{_SOURCE}#L56")
def _noting_loss(original: Original, trace: StepTrace, self: Any, *args: Any, **kw: Any) -> Any:
    """Have a Keras loss know the share by itself, also one that is a sum and is never scaled."""
    if self.reduction not in (None, "none"):
        trace.loss_scaled = True
    return original(self, *args, **kw)


@replaces(Distiller, "compute_loss", issue=f"{_KERAS}/distillation/distiller.py#L418")
def _scaling_the_sum(
    original: Original, trace: StepTrace, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Scale a sum of losses as one: of its parts, means by hand, Keras would scale some."""
    trace.by_hand = True
    try:
        loss = original(self, *args, **kwargs)
    finally:
        trace.by_hand = False
    return keras_loss.scale_loss_for_distribution(loss)


@replaces(keras_loss, "reduce_values", issue=f"{_SOURCE}#L140")
def _scaling_the_rest(
    original: Original,
    trace: StepTrace,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = _MEAN,
) -> Any:
    """Scales what Keras never does: one number of a loss function, and sums.

    What a loss function returned as one number, and not one for each example, is taken for a mean
    over the batch; its gradient would count once for each replica. A sum is a replica's part as it
    is, but that of an empty batch fraction is of an example which does not count. Of a micro-batch,
    whose whole loss is weighted by its part of the step, it is what makes the sum over the step.
    """
    if reduction in ("none", None):
        return original(values, sample_weight, reduction)
    by_weights = reduction == "mean_with_sample_weight" and sample_weight is not None
    if by_weights and tuple(values.shape) != () and _sums_in_step(trace, "a weighted loss"):
        whole = _over_replicas(tf.reduce_sum(sample_weight), trace)
        by = tf.math.divide_no_nan(tf.sign(tf.cast(trace.share, whole.dtype)), whole)
        return scaled(original(values, sample_weight, "sum"), by=by, trace=trace)
    reduced = original(values, sample_weight, reduction)
    if reduction == "sum":
        reduced /= tf.cast(trace.part, reduced.dtype)
    if reduction == "sum" and trace.num_replicas > 1:
        return scaled(reduced, by=tf.sign(trace.share), trace=trace)
    if reduction == "sum" or tuple(values.shape) != ():
        return reduced
    return keras_loss.scale_loss_for_distribution(reduced)


@replaces(keras_loss, "reduce_weighted_values", issue=f"{_SOURCE}#L164")
def _one_number_of_all(
    original: Original,
    trace: StepTrace,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = _MEAN,
    dtype: Any = None,
) -> Any:
    """Leave the mask out where a loss function returned one number: in a mean it cancels out.

    Replicas would weight their numbers by unmasked entries. On one device, too, a batch without
    any is left out.
    """
    values = tf.convert_to_tensor(values, dtype)
    is_one = values.shape.rank == 0 and mask is not None and sample_weight is None
    is_mean = reduction in (_MEAN, "mean", "mean_with_sample_weight")
    if is_one and is_mean and _sums_in_step(trace, "a masked loss"):
        unmasked = _over_replicas(tf.reduce_sum(tf.cast(mask, tf.float32)), trace)
        return original(values * tf.cast(tf.sign(unmasked), values.dtype), reduction=reduction)
    return original(values, sample_weight, mask, reduction, dtype)


# Keras divides by the replica's own number of unmasked entries, or sum of sample weights.


@replaces(keras_loss, "apply_mask", issue=f"{_SOURCE}#L197")
def _unmasked_in_all(
    original: Original, trace: StepTrace, sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """Weight unmasked entries such that the mean by the share is that over the whole batch."""
    is_mean = mask is not None and reduction in (_MEAN, "mean")
    if not is_mean or not _sums_in_step(trace, "a masked loss"):
        return original(sample_weight, mask, dtype, reduction)
    weights = original(sample_weight, tf.cast(mask, tf.bool), dtype, "sum")
    valid = _over_replicas(tf.reduce_sum(tf.cast(mask, tf.float32)), trace)
    total = tf.cast(tf.size(mask), tf.float32)
    each = tf.math.divide_no_nan(total, tf.cast(trace.share, tf.float32) * valid)
    return weights * tf.cast(each, weights.dtype)


def _sums_in_step(trace: StepTrace, what: str) -> bool:
    """Return whether replicas can sum where `what` is computed; warn where several cannot."""
    if trace.num_replicas > 1 and not trace.is_in_step():
        _warn(
            f"{what} in a loop or condition of the step is divided by what each of "
            f"{trace.num_replicas} replicas counts for itself, which is not what one device "
            "computes; compute it in the step itself"
        )
    return trace.num_replicas > 1 and trace.is_in_step()


def _over_replicas(count: tf.Tensor, trace: StepTrace) -> tf.Tensor:
    """Sum a count over all replicas that have an example; no gradient goes through it."""
    mine = tf.stop_gradient(count) * tf.sign(tf.cast(trace.share, count.dtype))
    return sum_over_replicas([mine])[0]


@functools.cache
def _warn(line: str) -> None:
    """Log a line once in the process, on the chief."""
    job = current_job()
    if job is None or job.is_chief:
        _LOG.warning("%s", line)


# Several losses in one tensor are summed: by Keras where a layer adds them, else by the tape.


def _is_of_examples(value: tf.Tensor, trace: StepTrace, what: str) -> bool:
    """Return whether a tensor has a loss for each example, so that its sum is one over the batch.

    A shape without an axis of the batch is taken for that of several means, with a warning.
    """
    if value.shape.rank == 0:
        return False
    if not value.shape.is_fully_defined() or trace.rows() in tuple(value.shape):
        return True
    _warn(
        f"{what} of shape {tuple(value.shape)} on {trace.num_replicas} replicas: its numbers are "
        "taken for means over the batch; sums over the batch would count "
        f"1/{trace.num_replicas} of what they count on one device: make them means"
    )
    return False


@replaces(
    TensorFlowTrainer,
    "_aggregate_additional_loss",
    issue=f"{_KERAS}/backend/tensorflow/trainer.py#L742",
)
def _summing_what_is_added(original: Original, trace: StepTrace, self: Any, loss: Any) -> Any:
    if trace.num_replicas == 1 or comes_of_scaled(loss, trace):
        return original(self, loss)
    if not _is_of_examples(loss, trace, "add_loss"):
        return original(self, loss)
    trace.loss_scaled = True
    whole = Trainer._aggregate_additional_loss(self, loss)
    return scaled(whole, by=tf.sign(trace.share), trace=trace)


@replaces(tf.GradientTape, "gradient", issue=f"{_TAPE}#L960")
def _summing_by_the_tape(
    original: Original,
    trace: StepTrace,
    self: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    **kwargs: Any,
) -> Any:
    """Keep gradients by a loss per example, which are sums, from being weighted by the share."""
    if trace.num_replicas > 1 and output_gradients is None:
        variables = tf.nest.flatten(sources)
        if all(isinstance(v, tf.Variable | keras.Variable) for v in variables):
            targets = tf.nest.flatten(target)
            _warn_of_pairs(targets, trace)
            output_gradients = _seeds(targets, trace)
    return original(self, target, sources, output_gradients, **kwargs)


def _seeds(targets: Sequence[Any], trace: StepTrace) -> list[tf.Tensor | None] | None:
    """Return what a tape begins with; None where no target has a loss for each example."""
    if not all(isinstance(target, tf.Tensor) for target in targets):
        return None
    whole = [comes_of_scaled(target, trace) for target in targets]
    of_examples = [
        not done and _is_of_examples(target, trace, "the gradient of a tensor")
        for target, done in zip(targets, whole, strict=True)
    ]
    if not any(of_examples):
        return None
    return [
        None
        if done
        else scaled(
            tf.ones_like(target), by=tf.sign(trace.share) if is_sum else trace.share, trace=trace
        )
        for target, done, is_sum in zip(targets, whole, of_examples, strict=True)
    ]


def _warn_of_pairs(targets: Sequence[Any], trace: StepTrace) -> None:
    """Warn where a loss goes by products of the batch with itself, as contrastive losses do."""
    batch = {part.op.name for part in trace.parts()}
    sizes = {None, trace.rows()}
    for operation in ops_behind([target for target in targets if isinstance(target, tf.Tensor)]):
        if operation.type not in _PRODUCTS or operation.outputs[0].shape.rank != 2:
            continue
        among_examples = sizes.issuperset(operation.outputs[0].shape) and all(
            any(op.name in batch for op in ops_behind([factor])) for factor in operation.inputs
        )
        if among_examples:
            _warn(
                f"a matrix product of the batch with itself on {trace.num_replicas} replicas: each "
                "compares the examples of its own part only, so that the loss is not what one "
                "device computes"
            )
            return


# Replicas are traced in threads that take turns where they talk to each other, in the middle of a
# forward pass too; Keras clears the lists of a layer when the next one begins.


class _LayerOfTheStep:
    """Layer with lists of losses that belong to the step."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._losses: list[Any] = []
        self._loss_ids: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@replaces(Layer, "add_loss", issue=f"{_KERAS}/layers/layer.py#L1255")
@replaces(Layer, "_get_own_losses", issue=f"{_KERAS}/layers/layer.py#L1285")
@replaces(Layer, "_clear_losses", issue=f"{_KERAS}/layers/layer.py#L1323")
def _on_lists_of_the_step(
    original: Original, trace: StepTrace, self: Any, *args: Any, **kwargs: Any
) -> Any:
    own = trace.layers.setdefault(id(self), _LayerOfTheStep(self))
    return original(own, *args, **kwargs)


# Means and synchronized statistics count the examples that count.
#
# A mean of numbers, one a step, counts numbers and not the examples behind them. A tracker of the
# user's own that is fed with the step's loss gets it as one device has it, weighted by the batch
# fraction. The loss of each of several outputs is a mean over batches where the size of a batch is
# not known when the step is traced, and a small last batch would count too much: examples are
# counted. The padding example of a replica whose batch fraction is empty counts neither in a mean
# nor in synchronized statistics.


@replaces(CompileLoss, "call", issue=f"{_KERAS}/trainers/compile_utils.py#L836")
def _noting_losses(original: Original, trace: StepTrace, self: Any, *args: Any, **kw: Any) -> Any:
    trace.in_losses = True
    try:
        return original(self, *args, **kw)
    finally:
        trace.in_losses = False


@replaces(Mean, "update_state", issue=f"{_KERAS}/metrics/reduction_metrics.py#L138")
def _mean_of_examples(
    original: Original, trace: StepTrace, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    if trace.in_losses and sample_weight is None:
        return original(self, values, trace.examples)
    if trace.num_replicas == 1:
        return original(self, values, sample_weight)
    values = tf.convert_to_tensor(values)
    if values.shape.rank != 0:
        return original(self, values, sample_weight)
    if comes_of_scaled(values, trace):
        values = unscaled(values, trace)
    return original(self, values, trace.share if sample_weight is None else sample_weight)


@replaces(nn, "_compute_moments_sync", issue=f"{_KERAS}/backend/tensorflow/nn.py#L1515")
def _of_examples_that_count(
    original: Original, trace: StepTrace, x: tf.Tensor, axes: Any, keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of float `x` over `axes` and all replicas."""
    context = tf.distribute.get_replica_context()
    if trace.num_replicas == 1 or context is None:
        found: tuple[tf.Tensor, tf.Tensor] = original(x, axes, keepdims)
        return found
    counts = tf.cast(tf.convert_to_tensor(trace.examples) > 0, x.dtype)
    sums = [
        counts * tf.reduce_sum(values, axis=axes, keepdims=True)
        for values in (x, tf.square(x), tf.ones_like(x))
    ]
    total, of_squares, count = context.all_reduce("SUM", sums)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(of_squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
