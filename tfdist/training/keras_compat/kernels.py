"""TensorFlow's computation of a step: order of sums, gradients of pools, and fused kernels."""

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
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_math_ops, gen_nn_ops
from tensorflow.python.util import _pywrap_util_port

from tfdist.training.keras_compat.trace import (
    REPLACEMENTS,
    Original,
    Replacement,
    StepTrace,
    nn,
    replaces,
)

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"
_TENSORFLOW = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow"


# Order of sums of three and more terms, independent of the threads.
#
# TensorFlow's AddN starts with a term that no other operation holds when it runs. Thread timing
# decides which term this is (aggregate_ops.h). AddN sums the gradients of one tensor, and a pass of
# the graph optimizer also turns any ``a + b + c`` into AddN. For two terms the order does not
# matter. tfdist therefore adds terms one by one and disables that pass, which has no finer switch.
# Its other rewritings made no step of a CNN, LSTM, ResNet or transformer faster by 1 % (float32 on
# a CPU, not measured on GPUs).
#
# Gradients are added from the last to the first. In a normalization, the last two gradients belong
# to mean and variance. A tape around a layer yields these two in another order than the layer's
# backward function. Added first, these two give the same sum in a pipeline and on one device.


_thread = threading.local()


def compiled(function: Callable[..., Any]) -> Any:
    """Return a `tf.function` without TensorFlow's warning of frequent tracing.

    tfdist traces such a function once per program, and a process has many. TensorFlow would warn
    of this (https://github.com/tensorflow/tensorflow/issues/34025) and has no public option to
    disable the warning for one function. Needed up to TensorFlow 2.22.0rc0.
    Sums have a fixed order, as in `adding_in_order`.
    """
    made = tf.function(function, autograph=False)
    made._omit_frequent_tracing_warning = True
    return _Compiled(made)


class _Compiled:
    def __init__(self, made: Any) -> None:
        self._made = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function with sums in a fixed order."""
        with adding_in_order():
            return self._made(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return the concrete function. Its callers must use `adding_in_order` themselves."""
        with adding_in_order():
            return self._made.get_concrete_function(*args, **kwargs)


@contextlib.contextmanager
def adding_in_order() -> Iterator[None]:
    """Make this thread trace and run sums with a fixed order of terms in this block.

    The block overrides a user's option that enables the arithmetic pass of the graph optimizer.
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


def inline(traced: Any) -> Callable[..., Any]:
    """Return a concrete function that runs in the calling thread, with sums in a fixed order.

    Its arguments and results are lists of tensors.

    TensorFlow checks the arguments of a call in Python, and passes the kernels to a pool of
    threads. For a small model, both together take as much CPU time as its kernels.
    """
    types, captured = [tensor.dtype for tensor in traced.outputs], traced.captured_inputs
    before = context.context().function_call_options.config_proto_serialized
    config = _without_rewriting(before).SerializeToString()

    def call(*tensors: tf.Tensor) -> Any:
        return tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, *captured], Tout=types, f=traced, config_proto=config
        )

    return call


def _is_adding() -> bool:
    return getattr(_thread, "adding", False)


def _added(original: Original, _: Any, inputs: Sequence[Any], name: str | None = None) -> Any:
    if not _is_adding() or tf.executing_eagerly() or not all(map(_is_of_floats, inputs)):
        return original(inputs, name)
    terms = [tf.convert_to_tensor(value) for value in inputs]  # IndexedSlices do not add
    total = tf.identity(functools.reduce(operator.add, reversed(terms)), name)
    for term in terms:
        total.set_shape(term.shape)  # as in AddN: equal shapes, each maybe known in part
    return total


def _is_of_floats(value: Any) -> bool:
    return tf.is_tensor(value) and (value.dtype.is_floating or value.dtype.is_complex)


# Active outside of a step too, because the main thread sums the replicas' values.
_ADD_N = Replacement(
    owner=gen_math_ops,
    name="add_n",
    instead=_added,
    issue=f"{_TENSORFLOW}/core/kernels/aggregate_ops.h#L250",
    anywhere=True,
)
REPLACEMENTS.append(_ADD_N)


# The gradient of max pooling with oneDNN's kernel.
#
# That kernel needs the workspace of oneDNN's own pool in the same graph. TensorFlow selects it only
# if its pass over the nodes visits the pool before the gradient (mkl_layout_pass.cc). A loop of
# steps has no first node: the start of the pass depends on names and on graph optimizations. The
# other kernel is bit-identical and ten times slower on one thread. Therefore the pool is computed
# again beside its gradient, in a separate function without a loop.


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
    """Make gradients of pools compute the pool again, for pools added to the graph in this block.

    Use it for a graph that another graph, without a loop, differentiates as a whole.
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
    """Return whether oneDNN computes pools of this dtype on this machine."""
    on_cpu = not tf.config.list_physical_devices("GPU")
    return on_cpu and dtype in (tf.float32, tf.bfloat16) and _pywrap_util_port.IsMklEnabled()


# Fused kernels instead of several kernels, an option of `fit`.
#
# Each of Keras' kernels reads all activations, and the gradient needs as many kernels again. A
# fused kernel reads the activations once. BatchNormalization uses TensorFlow's fused kernel.
# LayerNormalization and GELU use kernels compiled by XLA. One product with the matrix of weights,
# with the bias, replaces Keras' product per example. Fused kernels round differently from Keras, so
# they are off by default.


_fused: weakref.WeakSet[keras.Layer] = weakref.WeakSet()
_by_xla = functools.partial(tf.function, jit_compile=True, autograph=False)


def fuse(model: keras.Model, *, fused: bool) -> None:
    """Select fused kernels or Keras' own operations for steps of a model traced from now on.

    The choice applies to the model's layers, in any model that has them, until the next call.
    """
    for layer in model._flatten_layers():
        (_fused.add if fused else _fused.discard)(layer)


def is_fused(model: keras.Model) -> bool:
    """Return whether `fuse` has selected fused kernels for a layer of the model."""
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

    Keras' own code handles all other cases: inference, frozen layers, masks, `synchronized`,
    `renorm`, and other shapes, axes and types.
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
        mean=tf.zeros([0]),  # training takes no mean or variance
        variance=tf.zeros([0]),
        epsilon=self.epsilon,
        is_training=True,
    )
    # The kernel returns the sample variance, and Keras uses the population variance. Use a single
    # product: TensorFlow merges two products with constants if it knows the shape, which changes
    # the rounding.
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
    """Normalize float32 by its last axis, with both weights. Else call Keras' own code."""
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
    """Apply GELU to float32. For large negative inputs only the absolute error is small.

    TensorFlow uses `erfc`, 4 times slower than `erf`, and `pow`, 20 times slower than products.
    """
    x = tf.convert_to_tensor(x)
    if not (trace.fused and _is_known_float32(x)):
        return original(x, approximate)
    outputs: tf.Tensor = _elementwise(_tanh_gelu if approximate else _erf_gelu)(x)
    return outputs


def _is_known_float32(x: tf.Tensor) -> bool:
    """Return whether `x` is float32 with known axes after the first: XLA compiles per shape."""
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
    """Project as in attention, if the equation sums over the inputs' last axes."""
    matrix = re.fullmatch(r"(\w{2,})(\w+),\2(\w*)->\1\3", self.equation.replace(" ", ""))
    letters = "".join(matrix.groups()) if matrix else ""
    axes = len(matrix[2]) if matrix and len(set(letters)) == len(letters) else 0
    return _projected(original, trace, self, inputs, training, axes=axes)


def _projected(
    original: Original, trace: StepTrace, layer: Any, inputs: tf.Tensor, training: Any, *, axes: int
) -> tf.Tensor:
    """Multiply the last `axes` by a matrix of weights, in one kernel with the bias.

    Keras' product per example also computes the weights' gradient per example and sums it later.
    """
    if not (trace.fused and axes and _is_projection(layer, inputs, axes)):
        return original(layer, inputs, training=training)
    kernel = keras.ops.convert_to_tensor(layer.kernel)
    leading, units = inputs.shape[:-axes], kernel.shape[axes:]
    rows = tf.reshape(inputs, [-1, math.prod(kernel.shape[:axes])])
    outputs = rows @ tf.reshape(kernel, [rows.shape[1], -1])
    if layer.bias is not None:  # the kernel fuses both if they are adjacent
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
    """Transpose float32 ``[batch, length, heads, width]`` once. Keras does it in each `einsum`."""
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
    """Return the function as one kernel. The gradient is a kernel that computes it again."""
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
            # Computed from x, not from kept tensors, so that it also has a gradient. TensorFlow
            # sums over the examples, as without the kernel. XLA's sums take the same time.
            of_x, by_example = backward(x, gamma, upstream)
            leading = list(range(x.shape.rank - 1))
            sums = (tf.reduce_sum(each, leading) for each in (by_example, upstream))
            return of_x, *sums

        return forward(x, gamma, beta), gradient

    return normalized
