"""After the gradient hook each replica updates its own copy of a variable.

TensorFlow's way through `merge_call` cannot stand inside a `cond`, where loss scaling and
accumulation need it (https://github.com/keras-team/keras/issues/20582).

SGD with momentum updates a variable in one operation. Keras makes it of several: it writes the
momentum, reads it again and adds it to the variable. Each goes through the whole of the variable,
which costs a step of a few megabytes some percent of its time; and of two workers that update a
parameter server at once, one's gradient may be lost to the momentum, or be added twice. TensorFlow
has the same update in one operation, to the same bits, which locks what it writes until it is done.
(Its Adam rounds in another way than Keras', whose slots lose nothing: what a worker adds to them is
added.)
Ended by: no release, Keras 3.15.1 and TensorFlow 2.21 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.optimizers.sgd import SGD
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    distribute_lib,
    mirrored_strategy,
)
from tensorflow.python.distribute import values as tf_values

from tfdist.training.keras_compat.on_servers import is_split
from tfdist.training.keras_compat.replacement import Replacement
from tfdist.training.keras_compat.trace import current

_SOURCE = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute"
_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src/optimizers"
_ISSUE = "https://github.com/keras-team/keras/issues/20582"


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


def _momentum(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        if not self.momentum or not _is_ours(gradient, variable):
            return original(self, gradient, variable, learning_rate)
        momentum = self.momentums[self._get_variable_index(variable)]
        return tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=momentum.value.handle,
            lr=tf.cast(learning_rate, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
            momentum=tf.cast(self.momentum, variable.dtype),
            use_locking=True,
            use_nesterov=self.nesterov,
        )

    return update_step


def _is_ours(gradient: Any, variable: Any) -> bool:
    """Return whether this is a dense gradient of a whole variable, in a step's hook."""
    trace = current()
    if trace is None or not (trace.num_replicas == 1 or trace.in_hook) or in_stateless_scope():
        return False
    return isinstance(gradient, tf.Tensor) and not is_split(variable)


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
    Replacement(owner=SGD, name="update_step", make=_momentum, issue=f"{_KERAS}/sgd.py#L95"),
)
