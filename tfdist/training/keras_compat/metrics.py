"""Means and synchronized statistics count the examples that count.

A mean of numbers, one a step, counts numbers and not the examples behind them. A tracker of the
user's own that is fed with the step's loss gets it as one device has it, weighted by the batch
fraction. The loss of each of several outputs is a mean over batches where the size of a batch is
not known when the step is traced, and a small last batch would count too much: examples are
counted. The padding example of a replica whose batch fraction is empty counts neither in a mean nor
in synchronized statistics.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import nn
from keras.src.metrics.reduction_metrics import Mean
from keras.src.trainers.compile_utils import CompileLoss

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import comes_of_scaled, current, unscaled

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


def _noting_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        trace = current()
        if trace is None:
            return original(self, y_true, y_pred, sample_weight)
        trace.in_losses = True
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            trace.in_losses = False

    return call


def _mean_of_examples(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        trace = current()
        if trace is None:
            return original(self, values, sample_weight)
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

    return update_state


def _of_examples_that_count(original: Callable[..., Any]) -> Callable[..., Any]:
    def moments(x: tf.Tensor, axes: Any, keepdims: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance of float `x` over `axes` and all replicas."""
        trace = current()
        context = tf.distribute.get_replica_context()
        if trace is None or trace.num_replicas == 1 or context is None:
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

    return moments


REPLACEMENTS = (
    Replacement(
        owner=CompileLoss,
        name="call",
        make=_noting_losses,
        issue=f"{_SOURCE}/trainers/compile_utils.py#L836",
    ),
    Replacement(
        owner=Mean,
        name="update_state",
        make=_mean_of_examples,
        issue=f"{_SOURCE}/metrics/reduction_metrics.py#L138",
    ),
    Replacement(
        owner=nn,
        name="_compute_moments_sync",
        make=_of_examples_that_count,
        issue=f"{_SOURCE}/backend/tensorflow/nn.py#L1515",
    ),
)
