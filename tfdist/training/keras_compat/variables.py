"""Reads and writes of Keras variables in a step, updates by an optimizer, and random draws.

BatchNormalization's statistics are noted to be reduced, what lives in the step is read and written
there, an optimizer's count is that of the step, additions are one operation, and after the gradient
hook each replica updates its own copy.
Ended by: no release, Keras 3.15.1 included.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from keras.src.backend import random_seed_dtype
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow.core import Variable
from keras.src.optimizers.sgd import SGD
from keras.src.random import seed_generator
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.compile_utils import CompileMetrics
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    distribute_lib,
    mirrored_strategy,
)
from tensorflow.python.distribute import values as tf_values

from tfdist.errors import UsageError
from tfdist.strategy.devices import server_of
from tfdist.training.keras_compat.metrics import note_source
from tfdist.training.keras_compat.trace import (
    Original,
    StepTrace,
    replaces,
    warn_once,
)

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


def on_servers() -> Any:
    """Return `tfdist.ps.keras_compat`, by which a step on parameter servers differs, else None.

    A ps job alone imports `tfdist.ps`, and does so before it traces its first step.
    """
    if "tfdist.ps" not in sys.modules:
        return None
    from tfdist.ps import keras_compat

    return keras_compat


# BatchNormalization writes each replica's own moving statistics, and they drift apart, as weights
# do that a step updates without an optimizer. The gradient hook takes them along; what is written
# after the last gradient hook is reduced at the end of the step.


@replaces(
    Variable,
    "_direct_assign",
    issue=f"{_KERAS}/layers/normalization/batch_normalization.py#L385",
)
def _noting_writes(original: Original, trace: StepTrace, self: Any, value: Any) -> Any:
    if id(self) in trace.local:
        from tfdist.ps.keras_compat import hold

        hold(self, value, trace)
        return None
    if _is_statistic(self, trace):
        trace.statistics.append(self)
    if trace.num_replicas == 1 or trace.in_hook or self.aggregation == "none":
        return original(self, value)
    # By its own `aggregation` TensorFlow would add replicas up, or take one, before that.
    copies = self._value
    own = copies._get_on_device_or_primary() if hasattr(copies, "_values") else copies
    return own.assign(tf.cast(value, own.dtype))


def _is_statistic(variable: Any, trace: StepTrace) -> bool:
    return (
        trace.num_replicas > 1
        and not trace.in_hook
        and variable.synchronization != "on_read"
        and tf.as_dtype(variable.dtype).is_floating
        and all(variable is not seen for seen in trace.statistics)
    )


# Keras makes the metrics of `compile` in the first step that has outputs for them. Of several
# replicas each would make its own there, and a ps worker has no servers to make them on.
@replaces(CompileMetrics, "build", issue=f"{_KERAS}/trainers/compile_utils.py#L183")
def _metrics_before_the_step(original: Original, trace: StepTrace, self: Any, *args: Any) -> Any:
    strategy = tf.distribute.get_strategy()
    on_ps = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    if trace.updates and (on_ps or len(strategy.extended.worker_devices) > 1):
        raise UsageError(
            "metrics",
            received="metrics of compile that have no variables yet in a step, on several devices",
            expected="metrics that are built before the first step",
            fix="leave metrics out of compile, make them attributes of the model inside "
            "`with strategy.scope():`, and update them in the step",
            code="not-built",
        )
    return original(self, *args)


# Under ps the metrics stay in the worker's step while the weights are on the servers. Keras'
# StatelessScope takes either all variables or none.


@replaces(Variable, "value", issue=f"{_KERAS}/backend/common/stateless_scope.py#L82")
def _local_value(original: Original, trace: StepTrace, self: Any) -> Any:
    """Read a variable that lives in the step; `_noting_writes` is the other half."""
    found = trace.local.get(id(self), trace.held.get(id(self)))
    if found is None and id(self) in trace.taken:
        from tfdist.ps.keras_compat import taken

        found = taken(self, trace)
    if found is None and trace.counts is not None:
        found = trace.counts.value(self)
    found = original(self) if found is None else found
    of_metric = trace.sources is not None and self.synchronization == "on_read"
    if not of_metric or not trace.is_in_step() or in_stateless_scope():
        return found
    return note_source(found, lambda: self, trace)


# Keras adds by reading, adding and assigning, which loses updates under a parameter server.


def _where_added(value: Any, variable: Any) -> AbstractContextManager[Any]:
    """Make a number on the parameter server, to which each step would send it otherwise."""
    if tf.is_tensor(value) or server_of(variable) is None:
        return nullcontext()
    device: AbstractContextManager[Any] = tf.device(variable.device)
    return device


def _in_one_operation(
    name: str, original: Original, trace: StepTrace, self: Any, value: Any
) -> Any:
    at_once = id(self) not in trace.local and (
        trace.num_replicas == 1 or trace.in_hook or self.synchronization == "on_read"
    )
    if not at_once or in_stateless_scope():
        return original(self, value)
    with _where_added(value, self._value):
        value = tf.cast(value, self._value.dtype)
        if value.shape != self._value.shape and isinstance(value, tf.Tensor):
            value = tf.broadcast_to(value, self._value.shape)
    if value.shape != self._value.shape:
        return original(self, value)
    if trace.counts is not None and name == "assign_add":
        trace.counts.add(self)
    return getattr(self._value, name)(value)


for _name in ("assign_add", "assign_sub"):
    replaces(Variable, _name, issue="https://github.com/keras-team/keras/issues/18668")(
        functools.partial(_in_one_operation, _name)
    )


# After the gradient hook each replica updates its own copy of a variable.
#
# TensorFlow's way through `merge_call` cannot stand inside a `cond`, where loss scaling and
# accumulation need it (https://github.com/keras-team/keras/issues/20582).
#
# SGD with momentum updates a variable in one operation. Keras makes it of several: it writes the
# momentum, reads it again and adds it to the variable. Each goes through the whole of the variable,
# which costs a step of a few megabytes some percent of its time; and of two workers that update a
# parameter server at once, one's gradient may be lost to the momentum, or be added twice.
# TensorFlow has the same update in one operation, to the same bits, which locks what it writes
# until it is done. (Its Adam rounds in another way than Keras', whose slots lose nothing: what a
# worker adds to them is added.)


_TENSORFLOW = "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute"
_ISSUE = "https://github.com/keras-team/keras/issues/20582"


@replaces(distribute_lib.StrategyExtendedV1, "_use_merge_call", issue=_ISSUE)
@replaces(mirrored_strategy.MirroredExtended, "_use_merge_call", issue=_ISSUE)
@replaces(
    collective_all_reduce_strategy.CollectiveAllReduceExtended, "_use_merge_call", issue=_ISSUE
)
def _no_merge_call(original: Original, trace: StepTrace, self: Any) -> bool:
    return False if trace.in_hook else bool(original(self))


@replaces(tf_values, "_on_write_update_replica", issue=f"{_TENSORFLOW}/values.py#L52")
def _on_own_copy(
    original: Original, trace: StepTrace, var: Any, update_fn: Any, value: Any, **kwargs: Any
) -> Any:
    if trace.in_hook:
        return update_fn(var._get_on_device_or_primary(), value, **kwargs)
    return original(var, update_fn, value, **kwargs)


@replaces(SGD, "update_step", issue=f"{_KERAS}/optimizers/sgd.py#L95")
def _momentum(
    original: Original,
    trace: StepTrace,
    self: Any,
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> Any:
    if not self.momentum or not _is_ours(gradient, variable, trace):
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


def _is_ours(gradient: Any, variable: Any, trace: StepTrace) -> bool:
    """Return whether this is a dense gradient of a whole variable, in a step's hook."""
    if not (trace.num_replicas == 1 or trace.in_hook) or in_stateless_scope():
        return False
    servers = on_servers()
    is_split = servers is not None and isinstance(variable, servers.SplitVariable)
    return isinstance(gradient, tf.Tensor) and not is_split


# Dropout and friends draw from (seed, step, replica).
#
# Keras gives every replica the same seed state, and a resumed run another one.
# Ended by: no release, Keras 3.15.1 included.


_GOLDEN_RATIO = 0x9E3779B9
_SEEDS = f"{_KERAS}/random/seed_generator.py"


def random_key(seed: int | tf.Variable, *, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    """Return int32 [2], a hash of (seed, step, replica): one draw's seed is an offset of it."""
    if isinstance(seed, tf.Variable):  # of at most 31 bits
        key, high = tf.stack([seed * 2**32, seed]), 0
    else:
        low, high = seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF
        key = tf.constant([low << 32, low], tf.int64)
    step = tf.cast(step, tf.int64)
    words = tf.stack([step * 2**16 + tf.cast(replica, tf.int64), tf.constant(high, tf.int64)])
    words = tf.bitwise.bitwise_xor(words, key)
    return tf.random.stateless_uniform([2], words, minval=None, maxval=None, dtype=tf.int32)


@replaces(SeedGenerator, "next", issue=f"{_SEEDS}#L98")
def _seed_of_the_step(
    original: Original, trace: StepTrace, self: Any, ordered: bool = True
) -> tf.Tensor:
    return _draw(trace, generator=self)


def _draw(trace: StepTrace, generator: SeedGenerator | None = None) -> tf.Tensor:
    _warn_in_loop(trace)
    if id(generator) in trace.numbers:
        number = next(trace.numbers[id(generator)])
    else:
        number = trace.draws = trace.draws + 1
    offset = number * _GOLDEN_RATIO % 2**32
    offset = tf.constant([offset - 2**32 if offset >= 2**31 else offset, number])
    is_update = trace.in_hook and trace.update_key is not None
    key = trace.update_key if is_update else trace.random_key
    return tf.cast(key + offset, random_seed_dtype())


def _warn_in_loop(trace: StepTrace) -> None:
    graph = tf.compat.v1.get_default_graph()
    if graph is not trace.graph and type(graph).__name__ == "WhileBodyFuncGraph":
        warn_once(
            "a random draw inside a loop of the model gives the same numbers in each iteration "
            "of that loop; draw before the loop, or give the iteration's number as the seed"
        )


# A draw without a seed makes a generator for each thread, so for each replica while its step is
# traced, where no variable can be made.


@dataclasses.dataclass(frozen=True, slots=True)
class _SeedsOfTheStep:
    """Stands for the global generator."""

    trace: StepTrace

    def next(self, ordered: bool = True) -> tf.Tensor:
        return _draw(self.trace)


@replaces(seed_generator, "global_seed_generator", issue=f"{_SEEDS}#L121")
def _no_generator_of_the_thread(original: Original, trace: StepTrace) -> _SeedsOfTheStep:
    return _SeedsOfTheStep(trace)
