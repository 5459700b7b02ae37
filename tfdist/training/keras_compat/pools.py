"""The gradient of max pooling by oneDNN's kernel.

That kernel needs what oneDNN's own pool has left in the same graph, and TensorFlow takes it where
its pass over the nodes comes by the pool before the gradient
(https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/common_runtime/mkl_layout_pass.cc).
In a loop of steps no node is the first, and where the pass begins goes by names and by how the
graph was optimized. The other kernel takes ten times as long on one thread; the bits are the same.
So the pool is computed once more beside its gradient, in a function of their own, without a loop.
Ended by: no release, TensorFlow 2.21 included.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops
from tensorflow.python.util import _pywrap_util_port

from tfdist.training.keras_compat.trace import Original, StepTrace, replaces

_SOURCE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/common_runtime"
_AGAIN = "TfdistMaxPoolAgain"
_WINDOW = ("ksize", "strides", "padding", "explicit_paddings", "data_format")


@replaces(gen_nn_ops, "max_pool_grad", issue=f"{_SOURCE}/mkl_layout_pass.cc")
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
    if not _has_kernel(images.dtype):
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


def _has_kernel(dtype: tf.DType) -> bool:
    """Return whether oneDNN computes pools of this type here."""
    on_cpu = not tf.config.list_physical_devices("GPU")
    return on_cpu and dtype in (tf.float32, tf.bfloat16) and _pywrap_util_port.IsMklEnabled()
