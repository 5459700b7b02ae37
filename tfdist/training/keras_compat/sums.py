"""Order of sums of three and more terms, which does not go by the threads.

TensorFlow's AddN begins with whichever of its terms nothing else holds by the time it runs, and
that goes by which thread was faster
(https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels/aggregate_ops.h#L250).
Gradients of one tensor are summed by it, and a pass of the graph's optimizer makes it of any
``a + b + c``. Of two terms the order does not matter. So what tfdist compiles adds one term after
the other, without that pass, which has no finer switch; its other rewritings made no step of a CNN,
LSTM, ResNet or transformer faster by 1 % (float32, a CPU; GPUs are not tried).

Gradients are added from the last to the first: a tape around a layer and a backward function of it
have the two of a mean and of a variance, which come last, in either order. So a normalization
rounds in the same way in the stages of a pipeline and on one device.
Ended by: no release, TensorFlow 2.21 included.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_math_ops

from tfdist.training.keras_compat.trace import REPLACEMENTS, Original, Replacement

_SOURCE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels"
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
    issue=f"{_SOURCE}/aggregate_ops.h#L250",
    anywhere=True,
)
REPLACEMENTS.append(_ADD_N)
