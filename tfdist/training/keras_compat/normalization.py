"""BatchNormalization by TensorFlow's fused kernel, in training steps of a `fit` that asks for it.

Keras composes the layer of five kernels, each of which goes through all of the activations, and of
as many for the gradient. The fused kernel, which Keras 2 took, rounds in another way; so it is
taken where it is asked for.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf
from keras.layers import BatchNormalization

from tfdist.training.keras_compat.trace import Original, StepTrace, replaces

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_fused: weakref.WeakSet[BatchNormalization] = weakref.WeakSet()


def fuse_batch_norm(model: keras.Model, *, fused: bool) -> None:
    """Have steps of a model that are traced from now on take the fused kernel, or Keras' own way.

    It holds for each `BatchNormalization` of the model, not for layers of a class derived from it,
    until it is set anew. See `_by_fused_kernel` for which of them have one.
    """
    for layer in _layers_of(model):
        (_fused.add if fused else _fused.discard)(layer)


def fuses_batch_norm(model: keras.Model) -> list[bool]:
    """Return of each such layer of the model whether `fuse_batch_norm` has set it to the kernel."""
    return [layer in _fused for layer in _layers_of(model)]


def _layers_of(model: keras.Model) -> list[BatchNormalization]:
    return [layer for layer in model._flatten_layers() if type(layer) is BatchNormalization]


@replaces(
    BatchNormalization, "call", issue=f"{_KERAS}/layers/normalization/batch_normalization.py#L334"
)
def _by_fused_kernel(
    original: Original,
    trace: StepTrace,
    self: Any,
    inputs: tf.Tensor,
    training: Any = None,
    mask: Any = None,
) -> tf.Tensor:
    """Normalize float32 ``[batch, height, width, channels]`` and update the moving statistics.

    All else goes Keras' way: inference, frozen layers, other shapes, axes and types, masks,
    `synchronized` and `renorm`.
    """
    if not (training and self.trainable and mask is None and _has_kernel(self, inputs)):
        return original(self, inputs, training=training, mask=mask)
    channels = self.moving_mean.shape
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=keras.ops.convert_to_tensor(self.gamma) if self.scale else tf.ones(channels),
        offset=keras.ops.convert_to_tensor(self.beta) if self.center else tf.zeros(channels),
        mean=tf.zeros([0]),  # which a training step has none of
        variance=tf.zeros([0]),
        epsilon=self.epsilon,
        is_training=True,
    )
    # The kernel's variance is that of a sample, Keras' of the population. One product for each:
    # of two with constants TensorFlow makes one where it knows the shape, which rounds otherwise.
    count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:3]), variance.dtype)
    new = 1.0 - self.momentum
    for moving, value, factor in (
        (self.moving_mean, mean, new),
        (self.moving_variance, variance, (count - 1.0) / count * new),
    ):
        moving.assign(moving * self.momentum + value * factor)
    return outputs


def _has_kernel(layer: Any, inputs: tf.Tensor) -> bool:
    return (
        layer in _fused
        and inputs.shape.rank == 4
        and layer.axis in (-1, 3)
        and inputs.dtype == tf.float32
        and layer.compute_dtype == "float32"
        and not (layer.synchronized or getattr(layer, "renorm", False))  # since Keras 3.13
    )
