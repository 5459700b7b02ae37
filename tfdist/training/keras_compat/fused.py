"""Kernels that take what Keras composes of several, in training steps of a `fit` that asks for it.

Each of Keras' goes through all of the activations, and as many again do for the gradient. One
kernel, TensorFlow's for BatchNormalization and what XLA compiles for LayerNormalization and GELU,
goes through them once. Products with a matrix of weights are one for all examples, with the bias,
where Keras' are one for each. All round in another way, so they are taken where they are asked for.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.layers import BatchNormalization, Dense, EinsumDense, LayerNormalization
from keras.src.backend.tensorflow import nn

from tfdist.training.keras_compat.trace import Original, StepTrace, replaces

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_TENSORFLOW = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/ops"
_fused: weakref.WeakSet[keras.Layer] = weakref.WeakSet()
_by_xla = functools.partial(tf.function, jit_compile=True, autograph=False)


def fuse(model: keras.Model, *, fused: bool) -> None:
    """Have steps of a model that are traced from now on take the kernels, or Keras' own way.

    It holds for its layers, whichever model has them, until it is set anew.
    """
    for layer in model._flatten_layers():
        (_fused.add if fused else _fused.discard)(layer)


def is_fused(model: keras.Model) -> bool:
    """Return whether `fuse` has set a layer of the model to the kernels."""
    return any(layer in _fused for layer in model._flatten_layers())


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
    if not (
        trace.fused and training and self.trainable and mask is None and _has_kernel(self, inputs)
    ):
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
        type(layer) is BatchNormalization
        and inputs.shape.rank == 4
        and layer.axis in (-1, 3)
        and inputs.dtype == tf.float32
        and layer.compute_dtype == "float32"
        and not (layer.synchronized or getattr(layer, "renorm", False))  # since Keras 3.13
    )


@replaces(
    LayerNormalization, "call", issue=f"{_KERAS}/layers/normalization/layer_normalization.py#L186"
)
def _normalized_by_xla(
    original: Original, trace: StepTrace, self: Any, inputs: tf.Tensor
) -> tf.Tensor:
    """Normalize float32 by its last axis, with both weights. All else goes Keras' way."""
    if not (trace.fused and _is_over_last_axis(self, inputs)):
        return original(self, inputs)
    weights = map(keras.ops.convert_to_tensor, (self.gamma, self.beta))
    outputs: tf.Tensor = _layer_norm(self.epsilon)(inputs, *weights)
    return outputs


def _is_over_last_axis(layer: Any, inputs: tf.Tensor) -> bool:
    return (
        type(layer) is LayerNormalization
        and list(layer.axis) in ([-1], [inputs.shape.rank - 1])
        and layer.scale
        and layer.center
        and not layer.rms_scaling
        and layer.compute_dtype == "float32"
        and _is_known_float32(inputs)
    )


@replaces(nn, "gelu", issue=f"{_TENSORFLOW}/nn_ops.py#L3705")
def _gelu_by_xla(
    original: Original, trace: StepTrace, x: Any, approximate: bool = True
) -> tf.Tensor:
    """Activate float32; of large negative numbers to float32's precision of 1, not of the result.

    TensorFlow takes `erfc` and `pow` for it: 4 times the time of `erf`, 20 times that of products.
    """
    x = tf.convert_to_tensor(x)
    if not (trace.fused and _is_known_float32(x)):
        return original(x, approximate)
    outputs: tf.Tensor = _elementwise(_tanh_gelu if approximate else _erf_gelu)(x)
    return outputs


def _is_known_float32(x: tf.Tensor) -> bool:
    """XLA compiles for each shape anew, so all but the examples must be known."""
    return bool(x.dtype == tf.float32 and x.shape.rank and x.shape[1:].is_fully_defined())


def _erf_gelu(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


def _tanh_gelu(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


@replaces(Dense, "call", issue=f"{_KERAS}/layers/core/dense.py#L221")
def _dense(
    original: Original, trace: StepTrace, self: Any, inputs: tf.Tensor, training: Any = None
) -> tf.Tensor:
    return _projected(original, trace, self, inputs, training, axes=1)


@replaces(EinsumDense, "call", issue=f"{_KERAS}/layers/core/einsum_dense.py#L312")
def _einsum_dense(
    original: Original, trace: StepTrace, self: Any, inputs: tf.Tensor, training: Any = None
) -> tf.Tensor:
    """Project as attention does: all letters of the inputs' last axes are summed over."""
    matrix = re.fullmatch(r"(\w{2,})(\w+),\2(\w*)->\1\3", self.equation.replace(" ", ""))
    letters = "".join(matrix.groups()) if matrix else ""
    axes = len(matrix[2]) if matrix and len(set(letters)) == len(letters) else 0
    return _projected(original, trace, self, inputs, training, axes=axes)


def _projected(
    original: Original, trace: StepTrace, layer: Any, inputs: tf.Tensor, training: Any, *, axes: int
) -> tf.Tensor:
    """Multiply the last `axes` by a matrix of weights, in one kernel with the bias.

    Keras' product by example has a gradient of the weights by example too, which is then summed.
    """
    if not (trace.fused and axes and _is_projection(layer, inputs, axes)):
        return original(layer, inputs, training=training)
    kernel = keras.ops.convert_to_tensor(layer.kernel)
    leading, units = inputs.shape[:-axes], kernel.shape[axes:]
    rows = tf.reshape(inputs, [-1, math.prod(kernel.shape[:axes])])
    outputs = rows @ tf.reshape(kernel, [rows.shape[1], -1])
    if layer.bias is not None:  # the kernel takes both where nothing is between them
        bias = keras.ops.convert_to_tensor(layer.bias)
        outputs = tf.nn.bias_add(outputs, tf.reshape(bias, [-1]))
    outputs = tf.reshape(outputs, tf.concat([tf.shape(inputs)[:-axes], units], 0))
    outputs.set_shape([*leading, *units])
    return outputs if layer.activation is None else layer.activation(outputs)


def _is_projection(layer: Any, inputs: Any, axes: int) -> bool:
    kernel, bias = layer.kernel, layer.bias
    return (
        type(layer) in (Dense, EinsumDense)
        and isinstance(inputs, tf.Tensor)
        and inputs.shape.rank is not None
        and inputs.shape.rank > axes
        and inputs.dtype.is_floating
        and inputs.dtype == layer.compute_dtype
        and (bias is None or tuple(bias.shape) == tuple(kernel.shape[axes:]))
    )


@replaces(nn, "_dot_product_attention_xla", issue=f"{_KERAS}/backend/tensorflow/nn.py#L1704")
def _attention_by_heads(
    original: Original,
    trace: StepTrace,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *rest: Any,
) -> tf.Tensor:
    """Transpose float32 ``[batch, length, heads, width]`` once, where each `einsum` does."""
    if not (trace.fused and query.dtype == tf.float32):
        return original(query, key, value, *rest)
    bias, mask, is_causal, scale = rest
    query, key, value = (tf.transpose(each, [0, 2, 1, 3]) for each in (query, key, value))
    logits = tf.matmul(query, key, transpose_b=True) * tf.cast(scale, tf.float32)
    if bias is not None:
        logits += bias
    weights = tf.nn.softmax(nn._apply_masks(logits, mask, is_causal))
    return tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])


@functools.cache
def _elementwise(function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return the function in one kernel, and its gradient, which computes it again, in another."""
    forward = _by_xla(function)

    @_by_xla
    def backward(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = function(x)
        return tape.gradient(outputs, x, output_gradients=upstream)

    return tf.custom_gradient(lambda x: (forward(x), functools.partial(backward, x)))


@functools.cache
def _layer_norm(epsilon: float) -> Any:
    def standardized(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        centered = x - tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centered), -1, keepdims=True)
        factor = tf.math.rsqrt(variance + epsilon)
        return centered * factor, factor

    @_by_xla
    def forward(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tf.Tensor:
        return standardized(x)[0] * gamma + beta

    @_by_xla
    def backward(x: tf.Tensor, gamma: tf.Tensor, upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (normal, factor), scaled = standardized(x), upstream * gamma
        along = normal * tf.reduce_mean(scaled * normal, -1, keepdims=True)
        of_x = (scaled - tf.reduce_mean(scaled, -1, keepdims=True) - along) * factor
        return of_x, upstream * normal

    @tf.custom_gradient
    def normalized(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            # Of x itself and of nothing kept, so that it has a gradient in turn. Sums over the
            # examples are TensorFlow's, as without the kernel; XLA's take the same time.
            of_x, by_example = backward(x, gamma, upstream)
            leading = list(range(x.shape.rank - 1))
            sums = (tf.reduce_sum(each, leading) for each in (by_example, upstream))
            return of_x, *sums

        return forward(x, gamma, beta), gradient

    return normalized
