"""The gradient of max pooling by oneDNN's kernel, which TensorFlow finds by chance in a loop.

That kernel needs what oneDNN's own pool has left, so TensorFlow takes it where it has come by the
pool before the gradient. In a loop of steps a graph has no first operation, and where it begins
goes by addresses
(https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/common_runtime/mkl_layout_pass.cc).
The other kernel takes ten times as long on one thread; the bits are the same. So the pool is
computed once more beside its gradient, in a function of their own, which has no loop.
Ended by: no release, TensorFlow 2.21 included.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops
from tensorflow.python.util import _pywrap_util_port

from tfdist.training.keras_compat.trace import Original, StepTrace, replaces

_SOURCE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/common_runtime"


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

    def pool_again(images: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        again = gen_nn_ops.max_pool(images, ksize, strides, **options)
        return original(images, again, gradient, ksize, strides, **options)

    apart = {"_noinline": True}
    return tf.function(pool_again, autograph=False, experimental_attributes=apart)(images, gradient)


def _has_kernel(dtype: tf.DType) -> bool:
    """Return whether oneDNN computes pools of this type here."""
    on_cpu = not tf.config.list_physical_devices("GPU")
    return on_cpu and dtype in (tf.float32, tf.bfloat16) and _pywrap_util_port.IsMklEnabled()
