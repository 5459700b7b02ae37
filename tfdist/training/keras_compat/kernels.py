"""What TensorFlow computes steps by: the order of its sums, its pools, and kernels for several ops.

Ended by: no release, Keras 3.15.1 and TensorFlow 2.21 included.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras.layers import BatchNormalization, Dense, EinsumDense, LayerNormalization
from keras.src.backend.tensorflow import nn
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_math_ops, gen_nn_ops
from tensorflow.python.util import _pywrap_util_port

from tfdist.training.keras_compat.trace import (
    REPLACEMENTS,
    Original,
    Replacement,
    StepTrace,
    replaces,
)

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_TENSORFLOW = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow"


# Order of sums of three and more terms, which does not go by the threads.
#
# TensorFlow's AddN begins with whichever of its terms nothing else holds by the time it runs, and
# that goes by which thread was faster (aggregate_ops.h). Gradients of one tensor are summed by it,
# and a pass of the graph's optimizer makes it of any ``a + b + c``. Of two terms the order does not
# matter. So what tfdist compiles adds one term after the other, without that pass, which has no
# finer switch; its other rewritings made no step of a CNN, LSTM, ResNet or transformer faster by
# 1 % (float32, a CPU; GPUs are not tried).
#
# Gradients are added from the last to the first: a tape around a layer and a backward function of
# it have the two of a mean and of a variance, which come last, in either order. So a normalization
# rounds in the same way in the stages of a pipeline and on one device.


_thread = threading.local()


def compiled(function: Callable[..., Any]) -> Any:
    """`tf.function` for what is traced once for each program, and so often in a process.

    TensorFlow takes that for a mistake and warns, by the name of the Python function
    (https://github.com/tensorflow/tensorflow/issues/34025); it has no public switch for one
    function. Ended by: no release, TensorFlow 2.21 included.

    And its sums are made in one order, as by `adding_in_order`.
    """
    made = tf.function(function, autograph=False)
    made._omit_frequent_tracing_warning = True
    return _Compiled(made)


class _Compiled:
    def __init__(self, made: Any) -> None:
        self._made = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, adding in order."""
        with adding_in_order():
            return self._made(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is compiled for such arguments; its callers add in order themselves."""
        with adding_in_order():
            return self._made.get_concrete_function(*args, **kwargs)


@contextlib.contextmanager
def adding_in_order() -> Iterator[None]:
    """Have what this thread traces and runs meanwhile add one term after the other.

    A user's option that switches the optimizer's arithmetic pass on has no effect meanwhile.
    """
    _ADD_N.put_in_place()
    eager = context.context()
    before, was_adding = eager.function_call_options, _is_adding()
    config = _without_rewriting(before.config_proto_serialized)
    options = context.FunctionCallOptions(before.executor_type, config)
    eager.function_call_options, _thread.adding = options, True
    try:
        yield
    finally:
        eager.function_call_options, _thread.adding = before, was_adding


@functools.lru_cache(maxsize=8)
def _without_rewriting(serialized: bytes) -> config_pb2.ConfigProto:
    config = config_pb2.ConfigProto.FromString(serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.arithmetic_optimization = rewriter_config_pb2.RewriterConfig.OFF
    return config


def _is_adding() -> bool:
    return getattr(_thread, "adding", False)


def _added(original: Original, _: Any, inputs: Sequence[Any], name: str | None = None) -> Any:
    if not _is_adding() or tf.executing_eagerly() or not all(map(_is_of_floats, inputs)):
        return original(inputs, name)
    terms = [tf.convert_to_tensor(value) for value in inputs]  # IndexedSlices do not add
    total = tf.identity(functools.reduce(operator.add, reversed(terms)), name)
    for term in terms:
        total.set_shape(term.shape)  # as AddN: all are equal, and each may know a part
    return total


def _is_of_floats(value: Any) -> bool:
    return tf.is_tensor(value) and (value.dtype.is_floating or value.dtype.is_complex)


# Outside of a step too: replicas' values are summed by the main thread.
_ADD_N = Replacement(
    owner=gen_math_ops,
    name="add_n",
    instead=_added,
    issue=f"{_TENSORFLOW}/core/kernels/aggregate_ops.h#L250",
    anywhere=True,
)
REPLACEMENTS.append(_ADD_N)


# The gradient of max pooling by oneDNN's kernel.
#
# That kernel needs what oneDNN's own pool has left in the same graph, and TensorFlow takes it where
# its pass over the nodes comes by the pool before the gradient (mkl_layout_pass.cc). In a loop of
# steps no node is the first, and where the pass begins goes by names and by how the graph was
# optimized. The other kernel takes ten times as long on one thread; the bits are the same. So the
# pool is computed once more beside its gradient, in a function of their own, without a loop.


_AGAIN = "TfdistMaxPoolAgain"
_WINDOW = ("ksize", "strides", "padding", "explicit_paddings", "data_format")


@replaces(
    gen_nn_ops, "max_pool_grad", issue=f"{_TENSORFLOW}/core/common_runtime/mkl_layout_pass.cc"
)
def _max_pool_grad(
    original: Original,
    trace: StepTrace,
    images: tf.Tensor,
    pooled: tf.Tensor,
    gradient: tf.Tensor,
    ksize: Any,
    strides: Any,
    **options: Any,
) -> tf.Tensor:
    if not _has_pool(images.dtype):
        return original(images, pooled, gradient, ksize, strides, **options)

    def gradient_of_pool(images: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        return _gradient(images, gradient, ksize=ksize, strides=strides, **options)

    apart = {"_noinline": True}
    made = tf.function(gradient_of_pool, autograph=False, experimental_attributes=apart)
    return made(images, gradient)


def pools_again() -> AbstractContextManager[None]:
    """Have pools that the default graph gets meanwhile be computed again in their gradient.

    For a graph that is differentiated as a whole, in another one, which has no loop.
    """
    return tf.compat.v1.get_default_graph().gradient_override_map({"MaxPool": _AGAIN})


@tf.RegisterGradient(_AGAIN)
def _gradient_in_another_graph(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    (images,) = op.inputs
    return _gradient(images, gradient, **{name: op.get_attr(name) for name in _WINDOW})


def _gradient(images: tf.Tensor, gradient: tf.Tensor, **window: Any) -> tf.Tensor:
    again = tf.raw_ops.MaxPool(input=images, **window)
    return tf.raw_ops.MaxPoolGrad(orig_input=images, orig_output=again, grad=gradient, **window)


def _has_pool(dtype: tf.DType) -> bool:
    """Return whether oneDNN computes pools of this type here."""
    on_cpu = not tf.config.list_physical_devices("GPU")
    return on_cpu and dtype in (tf.float32, tf.bfloat16) and _pywrap_util_port.IsMklEnabled()


# Kernels that take what Keras composes of several, in steps of a `fit` that asks for them.
#
# Each of Keras' goes through all of the activations, and as many again do for the gradient. One
# kernel, TensorFlow's for BatchNormalization and what XLA compiles for LayerNormalization and GELU,
# goes through them once. Products with a matrix of weights are one for all examples, with the bias,
# where Keras' are one for each. All round in another way, so they are taken where they are asked
# for.


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


@replaces(nn, "gelu", issue=f"{_TENSORFLOW}/python/ops/nn_ops.py#L3705")
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
