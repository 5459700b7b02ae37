"""Reads and writes of Keras variables in a step, updates by an optimizer, and random draws.

BatchNormalization's statistics are recorded and reduced. If the step holds a variable's value in
a tensor, reads and writes use the tensor. An optimizer's update count is the step's count. Each
addition is one operation. After the gradient hook, each replica updates its own copy.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from keras import Variable
from keras.src.backend.common.stateless_scope import in_stateless_scope
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

from tfdist.errors import UsageError, require
from tfdist.strategy.devices import server_of
from tfdist.training.keras_compat.metrics import note_source
from tfdist.training.keras_compat.trace import Original, StepTrace, replaces, warn_once

_KERAS = "https://github.com/keras-team/keras/blob/v3.15.1/keras/src"


# BatchNormalization writes each replica's own moving statistics, and they diverge. Weights that a
# step updates without an optimizer diverge, too. The gradient hook reduces both. The end of the
# step reduces values written after the last gradient hook.
#
# Outside of steps, TensorFlow sums a metric's variable over the workers to return its new value. A
# sum per variable costs time at each epoch, and waits for a worker that has died.


@replaces(
    Variable,
    "_direct_assign",
    issue=f"{_KERAS}/layers/normalization/batch_normalization.py#L385",
    anywhere=True,
)
def _noting_writes(original: Original, trace: StepTrace | None, self: Any, value: Any) -> Any:
    if trace is None:
        if not isinstance(self._value, tf_values.SyncOnReadVariable):
            return original(self, value)
        return self._value.assign(tf.cast(value, self._value.dtype), read_value=False)
    if id(self) in trace.local:
        _hold(self, value, trace)
        return None
    if _is_statistic(self, trace):
        trace.statistics.append(self)
    if trace.num_replicas == 1 or trace.in_hook or self.aggregation == "none":
        return original(self, value)
    # By the variable's `aggregation`, TensorFlow would sum the replicas or use one replica.
    copies = self._value
    own = copies._get_on_device_or_primary() if hasattr(copies, "_values") else copies
    return own.assign(tf.cast(value, own.dtype))


def _hold(variable: Any, value: tf.Tensor, trace: StepTrace) -> None:
    """Set the value of a variable that the step holds in a tensor.

    A tensor created in a condition, loop or function cannot be used outside, so updates must be in
    the step itself.

    Raises:
      UsageError: The call is in a condition, loop or function within the step.
    """
    require(
        trace.is_in_step(),
        "metrics",
        f"a tf.cond, tf.while_loop or tf.function of the step updates {variable.path}",
        fix="update it in the step itself (with tf.where or a Python loop), or return the count "
        "and update the metric with it",
        code="metric",
    )
    trace.local[id(variable)] = tf.cast(value, trace.local[id(variable)].dtype)


def _is_statistic(variable: Any, trace: StepTrace) -> bool:
    return (
        trace.num_replicas > 1
        and not trace.in_hook
        and variable.synchronization != "on_read"
        and tf.as_dtype(variable.dtype).is_floating
        and all(variable is not seen for seen in trace.statistics)
    )


# Keras creates the metrics of `compile` in the first step with outputs for them. Each of several
# replicas would create its own, and a ps worker cannot create them on the servers.
@replaces(CompileMetrics, "build", issue=f"{_KERAS}/trainers/compile_utils.py#L183")
def _metrics_before_the_step(original: Original, trace: StepTrace, self: Any, *args: Any) -> Any:
    strategy = tf.distribute.get_strategy()
    on_ps = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    if trace.updates and (on_ps or len(strategy.extended.worker_devices) > 1):
        raise UsageError(
            "metrics",
            "the metrics of compile are not built before the first step on several devices",
            fix="leave metrics out of compile, make them attributes of the model inside "
            "`with strategy.scope():`, and update them in the step",
            code="not-built",
        )
    return original(self, *args)


# Under ps the worker's step holds the metrics, and the servers hold the weights. Keras'
# StatelessScope covers all variables, so it cannot be used for the metrics only.


@replaces(Variable, "value", issue=f"{_KERAS}/backend/common/stateless_scope.py#L82")
def _local_value(original: Original, trace: StepTrace, self: Any) -> Any:
    """Read a variable that the step holds in a tensor. `_noting_writes` writes it."""
    found = trace.local.get(id(self), trace.held.get(id(self)))
    if found is None and id(self) in trace.taken:
        found = trace.taken[id(self)]()
    if found is None and trace.counts is not None:
        found = trace.counts.value(self)
    found = original(self) if found is None else found
    of_metric = trace.sources is not None and self.synchronization == "on_read"
    if not of_metric or not trace.is_in_step() or in_stateless_scope():
        return found
    return note_source(found, lambda: self, trace)


# Keras adds in three operations: read, add, assign. Under ps this loses updates by other workers.


def _where_added(value: Any, variable: Any) -> AbstractContextManager[Any]:
    """Create a constant on the parameter server, so that steps need not send it."""
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
# TensorFlow uses `merge_call`, which cannot run inside a `cond`. Loss scaling and accumulation
# update variables in a `cond` (https://github.com/keras-team/keras/issues/20582).
#
# SGD with momentum updates a variable in one operation here. Keras uses several: it writes the
# momentum, reads it again and adds it to the variable. Each scans the whole variable, which costs
# a few percent of a step with some megabytes of weights. If two workers update a parameter server
# at once, the momentum may miss a gradient or count it twice. TensorFlow's single operation is
# bit-identical and locks its outputs until it is done. Adam stays Keras' own: TensorFlow's Adam
# rounds differently, and Keras' Adam only adds to its slots, which loses no update.


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
    """Return whether this is a dense gradient of a whole variable in a step's hook."""
    if not (trace.num_replicas == 1 or trace.in_hook) or in_stateless_scope():
        return False
    return isinstance(gradient, tf.Tensor) and isinstance(variable, tf.Variable)


# Random draws, as in dropout, depend only on (seed, step, replica).
#
# Keras gives all replicas the same seed state, and gives a resumed run a different state.


_GOLDEN_RATIO = 0x9E3779B9
_SEEDS = f"{_KERAS}/random/seed_generator.py"


def random_key(seed: int | tf.Variable, *, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    """Return a hash of (seed, step, replica), int32 [2]. Each draw adds an offset to it."""
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
    return tf.cast(key + offset, tf.int64)  # as in Keras with TensorFlow


def _warn_in_loop(trace: StepTrace) -> None:
    graph = tf.compat.v1.get_default_graph()
    if graph is not trace.graph and type(graph).__name__ == "WhileBodyFuncGraph":
        warn_once(
            "a random draw inside a loop of the model gives the same numbers in each iteration "
            "of that loop. Fix: draw before the loop, or pass the iteration's number as the seed"
        )


# For a draw without a seed, Keras creates a generator per thread. Each replica is traced in its
# own thread and cannot create variables there.


@dataclasses.dataclass(frozen=True, slots=True)
class _SeedsOfTheStep:
    """Substitute for the global generator."""

    trace: StepTrace

    def next(self, ordered: bool = True) -> tf.Tensor:
        return _draw(self.trace)


@replaces(seed_generator, "global_seed_generator", issue=f"{_SEEDS}#L121")
def _no_generator_of_the_thread(original: Original, trace: StepTrace) -> _SeedsOfTheStep:
    return _SeedsOfTheStep(trace)
