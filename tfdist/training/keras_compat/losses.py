"""Weighting of a replica's loss by its batch fraction.

While a step is traced, every loss is a mean over the replica's own part of the batch. A sum is
divided by the batch fraction, so all terms of a loss can be added. The gradient hook weights the
gradients by the batch fraction. Updates of metrics and logs weight their values by it.

Keras divides some losses by the number of replicas, whatever the batch fraction. It does not scale
sums, loss functions that return one number, or losses computed by hand. Each replica counts masked
entries and sample weights separately. `add_loss` and the tape sum the elements of a tensor. All
replicas share the lists of the losses that layers add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.layer import Layer
from keras.src.losses import loss as keras_loss
from keras.src.models.model import Trainer
from keras.src.trainers.compile_utils import CompileLoss

from tfdist.errors import UsageError
from tfdist.training.keras_compat.reduction import no_sum_in_a_step, sum_over_replicas
from tfdist.training.keras_compat.trace import (
    BatchAxes,
    Original,
    StepTrace,
    nn,
    ops_behind,
    replaces,
    warn_once,
)

_PRODUCTS = frozenset(("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"))
_QUOTIENTS = frozenset(("RealDiv", "DivNoNan"))
_OF_A_BATCH = keras.losses.Dice, keras.losses.Tversky
_MEAN = "sum_over_batch_size"
_WHOLE_BATCHES = ". Fix: set PipelineOptions(split_size=...) to the batch size"
_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_SOURCE = f"{_KERAS}/losses/loss.py"
_TENSORFLOW = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python"
_TAPE = f"{_TENSORFLOW}/eager/backprop.py"
_NN = f"{_TENSORFLOW}/ops/nn_impl_distribute.py"


def logs_by_fraction(logs: dict[str, Any], trace: StepTrace) -> dict[str, tf.Tensor]:
    """Return one replica's logs, weighted so that the sum over replicas equals one device's logs.

    This is exact for means over examples and for losses.
    """
    found = {name: tf.cast(tf.convert_to_tensor(log), tf.float32) for name, log in logs.items()}
    if trace.num_replicas == 1:
        return found
    share = tf.cast(trace.share, tf.float32)
    return {name: tf.math.multiply_no_nan(value, share) for name, value in found.items()}


@replaces(keras_loss, "scale_loss_for_distribution", issue=f"{_SOURCE}#L229")
@replaces(keras_loss, "unscale_loss_for_distribution", issue=f"{_SOURCE}#L246")
def _as_it_is(original: Original, trace: StepTrace, value: Any) -> Any:
    return value


@replaces(keras_loss, "reduce_values", issue=f"{_SOURCE}#L140")
def _sums_by_fraction(
    original: Original,
    trace: StepTrace,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = _MEAN,
) -> Any:
    """Return a replica's loss. Weighted by batch fraction, the losses add up to the whole loss.

    If the batch fraction is empty, a padding example supplies the value, with weight 0. For a
    micro-batch, a sum is also divided by `trace.part`, the later weight of its loss.
    """
    by_weights = reduction == "mean_with_sample_weight" and sample_weight is not None
    if by_weights and tuple(values.shape) != () and _sums_in_step(trace, "a weighted loss"):
        whole = _over_replicas(tf.reduce_sum(sample_weight), trace)
        mean = tf.math.divide_no_nan(original(values, sample_weight, "sum"), whole)
        return _by_fraction(mean, trace)
    reduced = original(values, sample_weight, reduction)
    if reduction != "sum":
        return reduced
    whole = _by_fraction(reduced, trace)
    trace.whole_sums.add(whole.op.name)
    return whole


def _by_fraction(value: tf.Tensor, trace: StepTrace) -> tf.Tensor:
    """Divide a sum over the examples by its later weight, the batch fraction times `part`."""
    return tf.math.divide_no_nan(value, tf.cast(trace.share * trace.part, value.dtype))


# The functions of TensorFlow's guide to custom training divide by the number of replicas.


@replaces(tf.nn, "compute_average_loss", issue=f"{_NN}#L72")
def _average_by_fraction(
    original: Original,
    trace: StepTrace,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    loss = original(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        return loss * tf.cast(trace.num_replicas, loss.dtype)
    return _by_fraction(loss, trace)


@replaces(tf.nn, "scale_regularization_loss", issue=f"{_NN}#L29")
def _regularization_as_it_is(original: Original, trace: StepTrace, regularization_loss: Any) -> Any:
    part = original(regularization_loss)
    return part * tf.cast(trace.num_replicas, part.dtype)


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
    """Weight a scalar from a loss function by the mask and sample weights of the whole batch.

    Keras would weight it by the replica's own mask and sample weights.
    """
    values = tf.convert_to_tensor(values, dtype)
    is_one = values.shape.rank == 0 and (mask is not None or sample_weight is not None)
    is_mean = reduction in (_MEAN, "mean", "mean_with_sample_weight")
    if is_one and is_mean and _sums_in_step(trace, "a masked or weighted loss"):
        mine = original(tf.ones_like(values), sample_weight, mask, reduction, dtype)
        values *= _over_replicas(mine * tf.cast(trace.share, mine.dtype), trace)
        return original(values, reduction=reduction)
    return original(values, sample_weight, mask, reduction, dtype)


# Keras divides by the replica's own number of unmasked entries or sum of sample weights.


@replaces(keras_loss, "apply_mask", issue=f"{_SOURCE}#L197")
def _unmasked_in_all(
    original: Original, trace: StepTrace, sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """Weight unmasked entries so that the means, weighted by `share`, add up to the whole mean."""
    is_mean = mask is not None and reduction in (_MEAN, "mean")
    if not is_mean or not _sums_in_step(trace, "a masked loss"):
        return original(sample_weight, mask, dtype, reduction)
    weights = original(sample_weight, tf.cast(mask, tf.bool), dtype, "sum")
    valid = _over_replicas(tf.reduce_sum(tf.cast(mask, tf.float32)), trace)
    total = tf.cast(tf.size(mask), tf.float32)
    each = tf.math.divide_no_nan(total, tf.cast(trace.share, tf.float32) * valid)
    return weights * tf.cast(each, weights.dtype)


def _sums_in_step(trace: StepTrace, what: str) -> bool:
    """Return whether replicas can sum at this place. Warn if several replicas cannot."""
    if trace.num_replicas > 1 and not trace.is_in_step():
        warn_once(
            f"{what} in a loop or condition of the step is divided by each replica's own count "
            f"({trace.num_replicas} replicas), so it differs from the value on one device. "
            "Fix: compute it in the step itself"
        )
    return trace.num_replicas > 1 and trace.is_in_step()


def _over_replicas(count: tf.Tensor, trace: StepTrace) -> tf.Tensor:
    """Sum a count over all replicas that have an example, without a gradient."""
    mine = tf.stop_gradient(count) * tf.sign(tf.cast(trace.share, count.dtype))
    return sum_over_replicas([mine])[0]


# Several losses in one tensor are summed: by Keras if a layer adds them, else by the tape.


def _is_of_examples(value: tf.Tensor, trace: StepTrace, what: str) -> bool:
    """Return whether a tensor has a loss per example, so that its sum is a sum over the batch.

    Raises UsageError if the shape does not determine this. Warns for a tensor without a batch axis
    and treats its numbers as means.
    """
    number = len(trace.losses)
    trace.losses.append(tf.TensorShape(value.shape))
    if trace.num_replicas == 1 or value.shape.rank == 0:
        return False
    if trace.batch_axes.shapes is None:
        trace.batch_axes.are_wanted = True  # the engine then finds the batch axes and traces again
        return False
    if has_examples(value, trace.batch_axes, number=number, what=what):
        return True
    warn_once(
        f"{what} of shape {tuple(value.shape)} on {trace.num_replicas} replicas: tfdist treats its "
        f"numbers as means over the batch. Fix: return means (a sum counts 1/{trace.num_replicas} "
        "of its value on one device)"
    )
    return False


def has_examples(loss: tf.Tensor, batch_axes: BatchAxes, *, number: int, what: str) -> bool:
    """Return whether a loss has a batch axis. Raise UsageError if this is unknown."""
    found = batch_axes.has_batch(number)
    if found is None:
        raise UsageError(
            "loss",
            f"the loss of shape {loss.shape}, from {what}, is neither one number nor has an axis "
            "that follows the batch size",
            fix="reduce the loss to one number, or set its shape: loss.set_shape([]) for one "
            "number, loss.set_shape(y.shape[:1]) for a loss of each example. To leave out "
            "examples, set their losses to 0",
            code="unknown-shape",
        )
    return found


@replaces(
    Trainer,
    "_aggregate_additional_loss",
    issue=f"{_KERAS}/backend/tensorflow/trainer.py#L742",
)
def _summing_what_is_added(original: Original, trace: StepTrace, self: Any, loss: Any) -> Any:
    whole = original(self, loss)
    if not _is_of_examples(loss, trace, "add_loss"):
        return whole
    return _by_fraction(whole, trace)


def added_in_part(loss: tf.Tensor, trace: StepTrace, *, is_sum: bool) -> tf.Tensor:
    """Return a layer's loss in a micro-batch, for later weighting by the micro-batch's part."""
    total = tf.reduce_sum(tf.cast(loss, tf.float32))
    return _by_fraction(total, trace) if is_sum else total


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
    """Treat the gradient of a tensor with a loss per example as the gradient of the sum."""
    if output_gradients is None:
        variables = tf.nest.flatten(sources)
        if all(isinstance(v, tf.Variable | keras.Variable) for v in variables):
            targets = tf.nest.flatten(target)
            output_gradients = _seeds(targets, trace)
            if trace.num_replicas > 1:
                _warn_of_pairs(targets, trace)
                _warn_of_quotients(targets, trace)
    return original(self, target, sources, output_gradients, **kwargs)


def _seeds(targets: Sequence[Any], trace: StepTrace) -> list[tf.Tensor] | None:
    """Return the tape's output gradients, or `None` if no target has a loss per example."""
    if not all(isinstance(target, tf.Tensor) for target in targets):
        return None
    what = "the gradient of a tensor"
    of_examples = [_is_of_examples(target, trace, what) for target in targets]
    if not any(of_examples):
        return None
    ones = [tf.ones_like(target) for target in targets]
    return [
        _by_fraction(one, trace) if is_sum else one
        for one, is_sum in zip(ones, of_examples, strict=True)
    ]


def warn_of_parts(targets: Sequence[Any], trace: StepTrace) -> None:
    """Warn if a loss is not the mean of the losses of the batch's parts."""
    if trace.division:
        _warn_of_pairs(targets, trace)
        _warn_of_quotients(targets, trace)


def _warn_of_pairs(targets: Sequence[Any], trace: StepTrace) -> None:
    """Warn if a loss depends on products of the batch with itself, as contrastive losses do."""
    if compares_examples(targets, trace):
        warn_once(
            f"a matrix product of the batch with itself {trace.division} compares only examples "
            "of the same part, so the loss differs from the loss on one device"
            + _WHOLE_BATCHES
            * (trace.micros > 1)
        )


def compares_examples(targets: Sequence[Any], trace: StepTrace, losses: Any = ()) -> bool:
    """Return whether one of the tensors depends on a product of the batch with itself.

    Such products have an entry per pair of examples, or sum over all examples. Some of Keras'
    `losses` compare the examples of a batch in other ways.
    """
    if any(map(_is_of_a_batch, losses)):
        return True
    batch = {part.op.name for part in trace.parts()}
    sizes = {None, trace.rows()}
    for operation in ops_behind([target for target in targets if isinstance(target, tf.Tensor)]):
        if operation.type not in _PRODUCTS or operation.outputs[0].shape.rank != 2:
            continue
        of_examples = {size in sizes for size in operation.outputs[0].shape}
        among_examples = len(of_examples) == 1 and all(
            any(op.name in batch for op in ops_behind([factor])) for factor in operation.inputs
        )
        if among_examples:
            return True
    return False


def _is_of_a_batch(loss: Any) -> bool:
    return isinstance(loss, _OF_A_BATCH) and loss.axis is None


def _warn_of_quotients(targets: Sequence[Any], trace: StepTrace) -> None:
    """Warn if a sum over the batch is divided by a number that depends on a replica's part."""
    behind = ops_behind([target for target in targets if isinstance(target, tf.Tensor)])
    count = trace.num_replicas * trace.micros
    parts = f"{count} {'micro-batches' if trace.micros > 1 else 'replicas'}"
    for operation in behind if trace.whole_sums else ():
        is_number = operation.type in _QUOTIENTS and operation.outputs[0].shape.rank == 0
        if not is_number or operation.name in trace.whole_sums:
            continue
        numerator, denominator = operation.inputs
        of_sum = any(op.name in trace.whole_sums for op in ops_behind([numerator]))
        if of_sum and any(_is_of_part(op, trace) for op in ops_behind([denominator])):
            warn_once(
                "a loss that is a sum over the batch is divided by a number of each of "
                f"{parts}: it counts {count} times as much as on one device. "
                'Fix: let the loss compute the mean (reduction="mean")'
            )
            return


def _is_of_part(operation: tf.Operation, trace: StepTrace) -> bool:
    """Return whether an operation returns a part of the batch or its size (maybe constant)."""
    if operation.type == "Const":
        return trace.rows() in np.ravel(tf.get_static_value(operation.outputs[0]))
    return operation.type == "Shape" or any(part.op is operation for part in trace.parts())


# Each replica is traced in a thread. The threads switch at collectives, also during a forward pass.
# Keras clears the loss lists of a layer when the next replica's pass starts.


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


# Means and synchronized statistics weight batches by their examples, without padding.
#
# With several outputs, Keras logs each output's loss as a mean over batches if the batch size is
# unknown at tracing. A small last batch would then count too much, so `metrics` in this package
# weights by examples. If a replica's batch fraction is empty, its padding example has weight 0 in
# means and in synchronized statistics.


@replaces(CompileLoss, "call", issue=f"{_KERAS}/trainers/compile_utils.py#L836")
def _noting_losses(original: Original, trace: StepTrace, self: Any, *args: Any, **kw: Any) -> Any:
    trace.in_losses = True
    try:
        total = original(self, *args, **kw)
    finally:
        trace.in_losses = False
    for _, loss, *_ in self._flat_losses if trace.division else ():
        if _is_of_a_batch(loss):
            warn_once(
                f"{type(loss).__name__} of a whole batch {trace.division} is computed for each "
                "part of the batch, so it differs from the loss on one device. "
                "Fix: pass the axes of an example, as axis=(1, 2, 3)"
            )
    return total


@replaces(nn, "_compute_moments_sync", issue=f"{_KERAS}/backend/tensorflow/nn.py#L1515")
def _of_examples_that_count(
    original: Original, trace: StepTrace, x: tf.Tensor, axes: Any, keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance of float `x` over `axes` and all replicas."""
    context = tf.distribute.get_replica_context()
    if trace.num_replicas == 1 or context is None:
        found: tuple[tf.Tensor, tf.Tensor] = original(x, axes, keepdims)
        return found
    if trace.instead_of_update is not None:
        raise no_sum_in_a_step()
    counts = tf.cast(tf.convert_to_tensor(trace.examples) > 0, x.dtype)
    share = tf.cast(trace.share, x.dtype)
    # Replicas sum these gradients: weight them by `share` first, and undo the hook's weight.
    sums = [
        _gradient_times(
            counts * tf.reduce_sum(values, axis=axes, keepdims=True),
            tf.math.divide_no_nan(tf.ones_like(share), share),
        )
        for values in (x, tf.square(x), tf.ones_like(x))
    ]
    wholes = context.all_reduce("SUM", sums)
    total, of_squares, count = (_gradient_times(whole, share) for whole in wholes)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(of_squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _gradient_times(value: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return the same value, with its gradient multiplied by a factor."""
    more = value * (factor - 1)
    return value + (more - tf.stop_gradient(more))
