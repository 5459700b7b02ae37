"""Every workaround for Keras and TensorFlow that the training step needs, in one place.

The replacements are put in place once, by `install`, and do nothing unless the calling thread is
tracing a tfdist step (`tracing`): anything else in the process sees stock Keras. Each names the
issue it works around; `tests/integration/test_keras_compat.py` has one test for each that fails
on the day Keras no longer needs it. Seen on Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21.

The heart is the one door for gradients: where they enter `Optimizer.apply`, and nowhere else,
they are summed over the replicas. Clipping, finiteness checks, accumulation and decay then see
what one device would see, and every replica does the same update on its own copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend import random_seed_dtype
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss
from keras.src.metrics.reduction_metrics import Mean
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random import seed_generator
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.compile_utils import CompileLoss
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    distribute_lib,
    mirrored_strategy,
)
from tensorflow.python.distribute import values as tf_values

_LOG = logging.getLogger(__name__)
_GOLDEN_RATIO = 0x9E3779B9
_MEAN = "sum_over_batch_size"
_PACK_BYTES = 2**20


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class StepTrace:
    """What the replacements know about the step that this thread is tracing.

    Attributes:
      num_replicas: replicas whose gradients are summed; 1 needs no reduction.
      share: this replica's part of the global batch, scalar float32 or a float.
      examples: how many of this replica's examples count, scalar integer.
      random_key: int32 [2] of (seed, step, replica), from which every draw of the step comes.
      training: False leaves losses as they are.
      local: values of variables, by `id`, that live in the step and not in the variable.
    """

    num_replicas: int
    share: tf.Tensor | float
    examples: tf.Tensor | int
    random_key: tf.Tensor
    training: bool = True
    local: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    draws: int = 0
    in_door: bool = False
    in_losses: bool = False
    loss_scaled: bool = False
    scaled: set[str] = dataclasses.field(default_factory=set)
    unscaled: set[str] = dataclasses.field(default_factory=set)
    statistics: list[Variable] = dataclasses.field(default_factory=list)
    graph: Any = dataclasses.field(default_factory=tf.compat.v1.get_default_graph)


_thread = threading.local()


@contextlib.contextmanager
def tracing(trace: StepTrace) -> Iterator[StepTrace]:
    """Makes Keras follow `trace` in this thread; used inside the replica function of a step."""
    install()
    _thread.trace = trace
    try:
        yield trace
        if trace.training:
            _reduce_statistics(trace)
    finally:
        _thread.trace = None


def compiled(function: Callable[..., Any]) -> Any:
    """`tf.function` for what is traced once for each program, and so often in a process.

    TensorFlow takes that for a mistake and warns; what is traced here is traced on purpose.
    """
    made = tf.function(function, autograph=False)
    made._omit_frequent_tracing_warning = True
    return made


def _current() -> StepTrace | None:
    return getattr(_thread, "trace", None)


@functools.cache
def install() -> None:
    """Puts the replacements in place, once a process."""
    for owner, name, make in (
        (SeedGenerator, "next", _seed_of_the_step),
        (seed_generator, "global_seed_generator", _no_generator_of_the_thread),
        (keras_loss, "scale_loss_for_distribution", _scale_by_share),
        (keras_loss, "unscale_loss_for_distribution", _unscale_by_share),
        (keras_loss.Loss, "__call__", _noting_loss),
        (keras_loss, "reduce_values", _scaling_scalars),
        (CompileLoss, "call", _noting_losses),
        (Mean, "update_state", _mean_of_examples),
        (BaseOptimizer, "apply", _door),
        (LossScaleOptimizer, "apply", _door),
        (LossScaleOptimizer, "_tf_apply", _loss_scaling),
        (TFOptimizer, "_all_reduce_sum_gradients", _already_reduced),
        (Variable, "value", _local_value),
        (Variable, "_direct_assign", _noting_writes),
        (Variable, "assign_add", _in_one_operation("assign_add")),
        (Variable, "assign_sub", _in_one_operation("assign_sub")),
        (distribute_lib.StrategyExtendedV1, "_use_merge_call", _no_merge_call),
        (mirrored_strategy.MirroredExtended, "_use_merge_call", _no_merge_call),
        (
            collective_all_reduce_strategy.CollectiveAllReduceExtended,
            "_use_merge_call",
            _no_merge_call,
        ),
        (tf_values, "_on_write_update_replica", _on_own_copy),
    ):
        original = getattr(owner, name)
        replacement = make(original)
        if not isinstance(replacement, property):
            replacement = functools.wraps(original)(replacement)
        setattr(owner, name, replacement)


# One door for gradients. Keras clips, checks and accumulates each replica's own gradient and sums
# after (https://github.com/keras-team/keras/issues/20582), so that clipping differs from one
# device, an overflow on one replica goes unseen, and a mean over uneven shares is a wrong mean.


def _door(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        trace = _current()
        if trace is None or trace.in_door or not (trace.num_replicas > 1 or _on_ps()):
            return original(self, grads, trainable_variables)
        if trace.num_replicas > 1:
            grads = _reduced(_weighted(list(grads), trace), trace)
        trace.in_door = True
        try:
            with _cross_replica_on_ps():
                return original(self, grads, trainable_variables)
        finally:
            trace.in_door = False

    return apply


def _on_ps() -> bool:
    strategy = tf.distribute.get_strategy()
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)


@contextlib.contextmanager
def _cross_replica_on_ps() -> Iterator[None]:
    """Under ps, updates go straight to the variables, from where no thread is waited for."""
    if not _on_ps():
        yield
        return
    mode = distribute_lib._CrossReplicaThreadMode(tf.distribute.get_strategy())
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _loss_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    def tf_apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        trace = _current()
        if trace is not None and trace.in_door:
            return self._common_apply(grads, trainable_variables)
        return original(self, grads, trainable_variables)

    return tf_apply


def _weighted(grads: list[Any], trace: StepTrace) -> list[Any]:
    """Weights by the share where the step's loss was never scaled: a loss made by hand."""
    if trace.loss_scaled:
        return grads
    return [None if g is None else _times(g, trace.share) for g in grads]


def _times(gradient: Any, factor: tf.Tensor | float) -> Any:
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _reduced(grads: list[Any], trace: StepTrace) -> list[Any]:
    """Sums gradients over the replicas; the statistics of the forward pass travel with them."""
    noted, trace.statistics = trace.statistics, []
    statistics = [_times(tf.convert_to_tensor(v.value), trace.share) for v in noted]
    dense = [i for i, g in enumerate(grads) if isinstance(g, tf.Tensor)]
    reduced = sum_over_replicas([grads[i] for i in dense] + statistics)
    for i, total in zip(dense, reduced, strict=False):
        grads[i] = total
    for variable, total in zip(noted, reduced[len(dense) :], strict=True):
        _own_copy(variable).assign(total)
    sparse = [i for i, g in enumerate(grads) if isinstance(g, tf.IndexedSlices)]
    if sparse:
        context = tf.distribute.get_replica_context()
        totals = context.all_reduce("SUM", [grads[i] for i in sparse])
        for i, total in zip(sparse, totals, strict=True):
            grads[i] = total
    return grads


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over all replicas, small ones packed into few messages. Replica context.

    A large one is a message of its own: it needs no copy, and leaves while others are computed.
    """
    context = tf.distribute.get_replica_context()
    results: list[tf.Tensor] = list(tensors)
    for pack in _packs(tensors):
        if len(pack) == 1:
            results[pack[0]] = context.all_reduce("SUM", tensors[pack[0]])
            continue
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in pack], 0)
        total = context.all_reduce("SUM", flat)
        sizes = [tf.size(tensors[i]) for i in pack]
        for i, part in zip(pack, tf.split(total, sizes, num=len(pack)), strict=True):
            results[i] = tf.ensure_shape(tf.reshape(part, tf.shape(tensors[i])), tensors[i].shape)
    return results


def _packs(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Groups of tensors that travel together: of one type, of no more than `_PACK_BYTES`."""
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        size_bytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        pack, filled = open_packs.get(tensor.dtype, ([], _PACK_BYTES))
        if filled + size_bytes > _PACK_BYTES:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(i)
        if size_bytes < _PACK_BYTES:
            open_packs[tensor.dtype] = pack, filled + size_bytes
    return packs


def _already_reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: Any, grads_and_vars: Any) -> Any:
        trace = _current()
        if trace is not None and trace.in_door:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return reduce


# Behind the door every replica holds the same gradient and updates its own copy of each variable.
# TensorFlow's way through `merge_call` cannot stand inside a `cond`, where loss scaling and
# accumulation need it.


def _no_merge_call(original: Callable[..., bool]) -> Callable[..., bool]:
    def use_merge_call(self: Any) -> bool:
        trace = _current()
        return False if trace is not None and trace.in_door else original(self)

    return use_merge_call


def _on_own_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(var: Any, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        trace = _current()
        if trace is not None and trace.in_door:
            return update_fn(var._get_on_device_or_primary(), value, **kwargs)
        return original(var, update_fn, value, **kwargs)

    return update


def _own_copy(variable: Variable) -> tf.Variable:
    value = variable.value
    return value._get_on_device_or_primary() if hasattr(value, "_values") else value


# A replica's loss counts by its share of the global batch. Keras takes 1 / replicas whatever the
# share (https://github.com/keras-team/keras/blob/v3.15.1/keras/src/losses/loss.py#L229).


def _scale_by_share(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(value: Any) -> Any:
        trace = _current()
        if trace is None:
            return original(value)
        trace.loss_scaled = True
        if not trace.training or trace.num_replicas == 1:
            return value
        scaled = value * tf.cast(trace.share, value.dtype)
        trace.scaled.add(scaled.op.name)
        return scaled

    return scale


def _unscale_by_share(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale(value: Any) -> Any:
        trace = _current()
        if trace is None:
            return original(value)
        if not trace.training or trace.num_replicas == 1:
            return value
        return _unscaled(value, trace)

    return unscale


def _unscaled(value: tf.Tensor, trace: StepTrace) -> tf.Tensor:
    # An empty share counts nothing, so that any finite number does.
    unscaled = tf.math.divide_no_nan(value, tf.cast(trace.share, value.dtype))
    trace.unscaled.add(unscaled.op.name)
    return unscaled


def _comes_of_scaled(value: tf.Tensor, trace: StepTrace) -> bool:
    """True when `value` was computed from a loss that is scaled by the share."""
    seen: set[str] = set()
    waiting = [value.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in trace.scaled:
            return True
        if operation.name not in seen and operation.name not in trace.unscaled:
            seen.add(operation.name)
            waiting += [tensor.op for tensor in operation.inputs]
    return False


def logs_by_share(logs: dict[str, Any], trace: StepTrace) -> dict[str, tf.Tensor]:
    """What a step returned on one replica, such that the sum over replicas is that of one device.

    Exact for means over examples and for losses; a loss that is scaled has its share already.
    """
    found = {}
    for name, log in logs.items():
        value = tf.cast(tf.convert_to_tensor(log), tf.float32)
        if trace.num_replicas > 1 and not _comes_of_scaled(value, trace):
            value = tf.math.multiply_no_nan(value, tf.cast(trace.share, value.dtype))
        found[name] = value
    return found


def _noting_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """A Keras loss knows the share by itself, also one that is a sum and is never scaled."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = _current()
        if trace is not None and self.reduction not in (None, "none"):
            trace.loss_scaled = True
        return original(self, *args, **kwargs)

    return call


# A loss function that returns one number, and not one for each example, is never scaled by Keras:
# with n replicas its gradient counts n times. It is taken for a mean over the batch.


def _scaling_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = _MEAN) -> Any:
        reduced = original(values, sample_weight, reduction)
        if _current() is None or tuple(values.shape) != () or reduction in ("sum", "none", None):
            return reduced
        return keras_loss.scale_loss_for_distribution(reduced)

    return reduce_values


# A mean of numbers, one a step, counts numbers and not the examples behind them. A tracker of the
# user's own that is fed with the step's loss gets it as one device has it, weighted by the share.
# The loss of each of several outputs is a mean over batches where the size of a batch is not known
# when the step is traced, and a small last batch would count too much: examples are counted
# (https://github.com/keras-team/keras/blob/v3.15.1/keras/src/trainers/compile_utils.py#L836).


def _noting_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        trace = _current()
        if trace is None:
            return original(self, y_true, y_pred, sample_weight)
        trace.in_losses = True
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            trace.in_losses = False

    return call


def _mean_of_examples(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        trace = _current()
        if trace is None or sample_weight is not None:
            return original(self, values, sample_weight)
        if trace.in_losses:
            return original(self, values, trace.examples)
        values = tf.convert_to_tensor(values)
        if trace.num_replicas == 1 or values.shape.rank != 0:
            return original(self, values)
        if _comes_of_scaled(values, trace):
            values = _unscaled(values, trace)
        return original(self, values, trace.share)

    return update_state


# BatchNormalization writes each replica's own moving statistics, and they drift apart
# (https://github.com/keras-team/keras/issues/20585). The door takes them along; what is written
# after the last door is reduced at the end of the step.


def _noting_writes(original: Callable[..., Any]) -> Callable[..., Any]:
    def direct_assign(self: Any, value: Any) -> Any:
        trace = _current()
        if trace is not None and id(self) in trace.local:
            trace.local[id(self)] = tf.cast(value, trace.local[id(self)].dtype)
            return None
        if trace is not None and trace.training and _is_statistic(self, trace):
            trace.statistics.append(self)
        return original(self, value)

    return direct_assign


def _is_statistic(variable: Any, trace: StepTrace) -> bool:
    return (
        trace.num_replicas > 1
        and not trace.in_door
        and not variable.trainable
        and variable.synchronization != "on_read"
        and tf.as_dtype(variable.dtype).is_floating
        and all(variable is not seen for seen in trace.statistics)
    )


def _reduce_statistics(trace: StepTrace) -> None:
    if trace.statistics:
        _reduced([], trace)


# Keras adds by reading, adding and assigning, which loses updates under a parameter server
# (https://github.com/keras-team/keras/blob/v3.15.1/keras/src/backend/common/variables.py#L300).


def _in_one_operation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign(self: Any, value: Any) -> Any:
            trace = _current()
            at_once = (
                trace is not None
                and id(self) not in trace.local
                and (trace.num_replicas == 1 or trace.in_door or self.synchronization == "on_read")
            )
            if not at_once or in_stateless_scope():
                return original(self, value)
            value = tf.cast(value, self._value.dtype)
            if value.shape != self._value.shape:
                return original(self, value)
            return getattr(self._value, name)(value)

        return assign

    return make


def _local_value(original: property) -> property:
    """Reads a variable that lives in the step; `_noting_writes` is the other half."""

    def value(self: Any) -> Any:
        trace = _current()
        if trace is not None and trace.local:
            found = trace.local.get(id(self))
            if found is not None:
                return found
        return original.fget(self)  # type: ignore[misc]

    return property(value, doc=original.__doc__)


# Dropout and friends draw from (seed, step, replica). Keras gives every replica the same seed
# state, and a resumed run another one.


def _seed_of_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_seed(self: Any, ordered: bool = True) -> Any:
        trace = _current()
        return original(self, ordered) if trace is None else _draw(trace)

    return next_seed


def _draw(trace: StepTrace) -> tf.Tensor:
    _warn_in_loop(trace)
    trace.draws += 1
    offset = trace.draws * _GOLDEN_RATIO % 2**32
    offset = tf.constant([offset - 2**32 if offset >= 2**31 else offset, trace.draws])
    return tf.cast(trace.random_key + offset, random_seed_dtype())


# A draw without a seed makes a generator for each thread, so for each replica while its step is
# traced, where no variable can be made.


class _SeedsOfTheStep:
    """Stands for the global generator; `next` without a trace cannot happen."""

    def next(self, ordered: bool = True) -> tf.Tensor:
        trace = _current()
        assert trace is not None
        return _draw(trace)


def _no_generator_of_the_thread(original: Callable[[], Any]) -> Callable[[], Any]:
    def global_seed_generator() -> Any:
        return original() if _current() is None else _SeedsOfTheStep()

    return global_seed_generator


def _warn_in_loop(trace: StepTrace) -> None:
    graph = tf.compat.v1.get_default_graph()
    if graph is not trace.graph and type(graph).__name__ == "WhileBodyFuncGraph":
        _LOG.warning(
            "a random draw inside a loop of the model gives the same numbers in each iteration "
            "of that loop; draw before the loop, or give the iteration's number as the seed"
        )


def random_key(seed: int, *, step: tf.Tensor, replica: tf.Tensor | int) -> tf.Tensor:
    """Returns int32 [2], a hash of (seed, step, replica): one draw's seed is an offset of it."""
    low, high = seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF
    step = tf.cast(step, tf.int64)
    words = tf.stack([step * 2**16 + tf.cast(replica, tf.int64), tf.constant(high, tf.int64)])
    words = tf.bitwise.bitwise_xor(words, tf.constant([low << 32, low], tf.int64))
    return tf.random.stateless_uniform([2], words, minval=None, maxval=None, dtype=tf.int32)
