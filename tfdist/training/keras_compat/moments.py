"""Synchronized statistics count no example that pads an empty batch fraction.

A replica without an example gets one, so that it takes part in every collective; Keras counts it.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import nn

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/tensorflow/nn.py"


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
        owner=nn,
        name="_compute_moments_sync",
        make=_of_examples_that_count,
        issue=f"{_SOURCE}#L1515",
    ),
)
