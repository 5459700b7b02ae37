"""The chief's initial values of variables, sent by the ring.

TensorFlow's multiworker strategy sends each by a collective of its own, of which the workers first
agree by several messages. That is most of what making a model of many variables costs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.base import CheckpointInitialValue

from tfdist.strategy.group import sum_bytes
from tfdist.strategy.job import Job


def go_by_ring(job: Job) -> None:
    """Have variables that are made from now on in the scope of `job`, in all workers, start alike.

    Those of a graph, and those of strings, are TensorFlow's as before.
    """
    extended = job.strategy.extended
    by_collective = extended._get_variable_creator_initial_value

    def creator(*, initial_value: Any, dtype: Any = None, **where: Any) -> Callable[[], Any]:
        def given(value: Any) -> Any:
            return by_collective(initial_value=value, dtype=dtype, **where)()

        def initial() -> Any:
            if not tf.executing_eagerly():
                return given(initial_value)
            with tf.device(where["device"]):
                value = _tensor(initial_value, dtype)
                if value.dtype == tf.string or not value.dtype.is_numpy_compatible:
                    return given(value)
                mine = value.numpy() if job.is_chief else np.zeros_like(value.numpy())
                return tf.constant(sum_bytes(job, mine, of="the initial value of a variable"))

        return initial

    extended._get_variable_creator_initial_value = creator


def _tensor(value: Any, dtype: Any) -> tf.Tensor:
    value = value() if callable(value) else value
    if isinstance(value, CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)
