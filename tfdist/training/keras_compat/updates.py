"""After the gradient hook each replica updates its own copy of a variable.

TensorFlow's way through `merge_call` cannot stand inside a `cond`, where loss scaling and
accumulation need it (https://github.com/keras-team/keras/issues/20582).
Ended by: no release, Keras 3.15.1 and TensorFlow 2.21 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    distribute_lib,
    mirrored_strategy,
)
from tensorflow.python.distribute import values as tf_values

from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute"
_ISSUE = "https://github.com/keras-team/keras/issues/20582"


def own_copy(variable: Variable) -> tf.Variable:
    """Return the copy of a variable that this replica holds."""
    value = variable.value
    return value._get_on_device_or_primary() if hasattr(value, "_values") else value


def _no_merge_call(original: Callable[..., bool]) -> Callable[..., bool]:
    def use_merge_call(self: Any) -> bool:
        trace = current()
        return False if trace is not None and trace.in_hook else original(self)

    return use_merge_call


def _on_own_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(var: Any, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is not None and trace.in_hook:
            return update_fn(var._get_on_device_or_primary(), value, **kwargs)
        return original(var, update_fn, value, **kwargs)

    return update


REPLACEMENTS = (
    *(
        Replacement(owner=extended, name="_use_merge_call", make=_no_merge_call, issue=_ISSUE)
        for extended in (
            distribute_lib.StrategyExtendedV1,
            mirrored_strategy.MirroredExtended,
            collective_all_reduce_strategy.CollectiveAllReduceExtended,
        )
    ),
    Replacement(
        owner=tf_values,
        name="_on_write_update_replica",
        make=_on_own_copy,
        issue=f"{_SOURCE}/values.py#L52",
    ),
)
