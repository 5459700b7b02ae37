"""Sums of gradients and statistics over replicas, together and in few messages."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import Variable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.errors import PeerLost, UsageError
from tfdist.strategy.group import MESSAGE_FAILED, VariablePart, part_of
from tfdist.strategy.job import current_job
from tfdist.strategy.ring import Ring
from tfdist.training.keras_compat.trace import StepTrace, current, warn_once

_PACK_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
_BY_RING = frozenset((tf.float16, tf.float32, tf.float64, tf.int32, tf.int64))


def reduced(grads: list[Any], trace: StepTrace) -> list[Any]:
    """Sum gradients over the replicas, together with the statistics of the forward pass."""
    noted, trace.statistics = trace.statistics, []
    values = [tf.convert_to_tensor(v.value) for v in noted]
    # A scalar may count steps, and the mean of equal scalars must be that number. Compute it in
    # float64 and divide by the sum of the rounded shares. Half-precision values use float32: in
    # half precision the shares would not sum to 1.
    is_scalar = [value.shape.rank == 0 for value in values]
    halves = [tf.float32 if value.dtype.size == 2 else value.dtype for value in values]
    types = [tf.float64 if s else half for s, half in zip(is_scalar, halves, strict=True)]
    statistics = [times(tf.cast(v, t), trace.share) for v, t in zip(values, types, strict=True)]
    shares = [tf.cast(trace.share, tf.float64)] if any(is_scalar) else []
    dense = [i for i, g in enumerate(grads) if isinstance(g, tf.Tensor)]
    totals = sum_over_replicas([grads[i] for i in dense] + statistics + shares)
    for i, total in zip(dense, totals, strict=False):
        grads[i] = total
    for variable, scalar, total in zip(noted, is_scalar, totals[len(dense) :], strict=False):
        mean = tf.math.divide_no_nan(total, totals[-1]) if scalar else total
        own_copy(variable).assign(tf.cast(mean, variable.dtype))
    sparse = [i for i, g in enumerate(grads) if isinstance(g, tf.IndexedSlices)]
    if sparse:
        slices = all_reduce([grads[i] for i in sparse])
        for i, total in zip(sparse, slices, strict=True):
            grads[i] = total
    return grads


def warn_of_its_own(optimizer: Any) -> None:
    """Warn if the optimizer has its own `apply` method, which sees gradients before the sum."""
    for name in ("apply", "apply_gradients"):
        owner = next(kind for kind in type(optimizer).__mro__ if name in vars(kind))
        if not owner.__module__.startswith("keras.src."):
            warn_once(
                f"{owner.__name__}.{name} gets the gradients of each replica's own part of the "
                "batch, so clipping or normalizing there differs from one device. Fix: do it in "
                "update_step, or with clipnorm, clipvalue or global_clipnorm"
            )


def reduce_statistics(trace: StepTrace) -> None:
    """Reduce statistics written after the last gradient hook, at the end of the step."""
    if trace.statistics:
        reduced([], trace)


def own_copy(variable: Variable) -> tf.Variable:
    """Return the copy of a variable that this replica holds."""
    value = variable.value
    return value._get_on_device_or_primary() if hasattr(value, "_values") else value


def times(gradient: Any, factor: tf.Tensor | float) -> Any:
    """Return the product of a dense or sparse gradient and a scalar."""
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def summed_rows(gradient: Any) -> Any:
    """Return the gradient with each row once. A sparse gradient may have several slices of a row.

    Call it after the gather over replicas: the number of distinct rows varies by replica, and a
    gather needs equal shapes.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, row_of = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, row_of, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sum each tensor over all replicas in as few messages as possible. Replica context."""
    job = current_job()
    if job is not None and job.shards is not None:
        raise no_sum_in_a_step()
    if job is None or job.ring is None or job.strategy is not tf.distribute.get_strategy():
        return _by_collectives(tensors)
    results: list[tf.Tensor] = list(tensors)
    others = [i for i, tensor in enumerate(tensors) if tensor.dtype not in _BY_RING]
    for i, total in zip(others, _by_collectives([tensors[i] for i in others]), strict=True):
        results[i] = total
    for bucket in _buckets(tensors):
        total = functools.partial(job.ring.sum, of=_sum_name())
        sums = _in_turn(total, [tensors[i] for i in bucket])
        for i, summed in zip(bucket, sums, strict=True):
            results[i] = tf.ensure_shape(summed, tensors[i].shape)
    return results


def no_sum_in_a_step() -> UsageError:
    """Return the error of an elastic job whose step needs a sum before its gradients."""
    return UsageError(
        "elastic",
        "the step needs a sum over the whole batch before its gradients, as for a masked or "
        "weighted loss or a synchronized BatchNormalization",
        fix="start the job without --elastic",
        code="elastic-step",
    )


def scatter_over_workers(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return this worker's flat part of the sum of each tensor. Replica context.

    Needs a job with a ring, and floating-point tensors of known shapes. With two workers the result
    is bit-identical to `sum_over_replicas`. With more, the ring adds in another order.
    """
    ring, results = _ring(), list(tensors)
    for bucket in _buckets(tensors):
        scatter = functools.partial(ring.reduce_scatter, of=_sum_name())
        for i, part in zip(bucket, _in_turn(scatter, [tensors[i] for i in bucket]), strict=True):
            first, end = ring.part(tensors[i].shape.num_elements())
            results[i] = tf.ensure_shape(part, [end - first])
    return results


def gather_over_workers(
    parts: Sequence[tf.Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[tf.Tensor]:
    """Return the whole tensors of these shapes, gathered from the workers' flat parts."""
    ring, results = _ring(), list(parts)
    # Whole sizes decide the buckets, so that all workers have the same buckets.
    wholes = [tf.TensorSpec(shape, part.dtype) for shape, part in zip(shapes, parts, strict=True)]
    for bucket in _buckets(wholes):
        sizes = tuple(wholes[i].shape.num_elements() for i in bucket)
        gather = functools.partial(ring.all_gather, sizes=sizes, of=_sum_name())
        for i, flat in zip(bucket, _in_turn(gather, [parts[i] for i in bucket]), strict=True):
            results[i] = tf.reshape(flat, shapes[i])
    return results


def _ring() -> Ring:
    job = current_job()
    assert job is not None
    assert isinstance(job.ring, Ring)
    return job.ring


def _in_turn(call: Callable[..., Any], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Call the ring with tensors, after all ring calls that were traced earlier.

    If a worker is lost, `naming_lost_peer` reads the reason in the ring.
    """
    turn, types = _turn(), [tensor.dtype for tensor in tensors]
    with tf.control_dependencies([turn.read_value()]):
        results = call_to_peer(call, tensors, types)
    with tf.control_dependencies(results):
        turn.assign_add(1, read_value=False)
    return results


def call_to_peer(
    call: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor], types: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Add a Python call that may lose a peer to the graph. Return its results.

    TensorFlow would log an exception of the call twice with its traceback. So a lost peer fails an
    assertion, and the ring or the link keeps the reason.
    """

    def without_exception(*arrays: Any) -> list[Any]:
        try:
            return [np.True_, *call(*arrays)]
        except (ConnectionError, PeerLost):
            return [np.False_, *(np.zeros(0, dtype.as_numpy_dtype) for dtype in types)]

    done, *results = tf.numpy_function(without_exception, list(tensors), [tf.bool, *types])
    with tf.control_dependencies([tf.raw_ops.Assert(condition=done, data=[MESSAGE_FAILED])]):
        return [tf.identity(result) for result in results]


@functools.cache
def _turn() -> Any:
    """Return a variable that each sum reads and then writes, so that workers sum in one order.

    TensorFlow keeps Python calls in order only within one function. It keeps reads and writes of a
    variable in order also in a `tf.cond` or a `tf.function` within the step. The variable belongs
    to no strategy.
    """
    with tf.init_scope(), tf.device("/CPU:0"):
        return ResourceVariable(0, trainable=False, dtype=tf.int64)


def _sum_name() -> str:
    """Return a name for the sum being traced, unique in the step, so that branches do not mix.

    The name is a number, because names of tensors and layers may differ between workers.
    """
    trace = current()
    if trace is None:
        return "examples of a step"
    trace.sums += 1
    return f"place {trace.sums} of a step"


def _buckets(tensors: Sequence[Any]) -> list[list[int]]:
    """Return groups of tensors to sum in one call each, in the order in which they are ready.

    Gradients of the last layers are first. Their sum runs while the others are computed.
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for i in reversed(range(len(tensors))):
        if tensors[i].dtype not in _BY_RING:
            continue
        if filled >= _BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += (tensors[i].shape.num_elements() or 0) * tensors[i].dtype.size
    return [bucket for bucket in buckets if bucket]


def _by_collectives(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sum tensors by TensorFlow's collectives, with small tensors packed into few messages.

    A large tensor is a separate message: this saves a copy and overlaps with other computations.
    """
    results: list[tf.Tensor] = list(tensors)
    for pack in _packs(tensors):
        if len(pack) == 1:
            results[pack[0]] = all_reduce(tensors[pack[0]])
            continue
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in pack], 0)
        total = all_reduce(flat)
        sizes = [tf.size(tensors[i]) for i in pack]
        for i, part in zip(pack, tf.split(total, sizes, num=len(pack)), strict=True):
            results[i] = tf.ensure_shape(tf.reshape(part, tf.shape(tensors[i])), tensors[i].shape)
    return results


def all_reduce(values: Any) -> Any:
    """Sum a structure of tensors over all replicas, without a gradient. Replica context.

    `ReplicaContext.all_reduce` is a `tf.custom_gradient`. TensorFlow keeps each custom gradient
    and the graph of its step until the process exits, which is some MiB per trace:
    https://github.com/tensorflow/tensorflow/issues/97697. Needed up to 2.22.0rc0.
    """
    extended = tf.distribute.get_strategy().extended
    return extended._replica_ctx_all_reduce(tf.distribute.ReduceOp.SUM, values)


def _packs(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Return groups of tensors for one message each: one dtype, at most `_PACK_BYTES`."""
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int] | None, int]] = {}
    for i, tensor in enumerate(tensors):
        size_bytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        pack, filled = open_packs.get(tensor.dtype, (None, 0))
        if pack is None or filled + size_bytes > _PACK_BYTES:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(i)
        if size_bytes < _PACK_BYTES:
            open_packs[tensor.dtype] = pack, filled + size_bytes
    return packs


# This worker's part of each sum, for an optimizer that is built on parts of the variables.


wholes_of: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Whole variables of each optimizer that is built on parts, in the order of the parts."""


def scattered(optimizer: Any, grads: list[Any], variables: Sequence[Any], trace: StepTrace) -> Any:
    """Return this worker's part of the sum of each gradient. Reduce the statistics, too.

    With two workers the sum of parts is bit-identical to the whole sum. With more, the order of
    additions would differ, so this function computes the whole sum and cuts it.
    """
    indices = map(optimizer._get_variable_index, variables)
    parts = [place_of(optimizer._trainable_variables[index]) for index in indices]
    if trace.num_replicas > 2:
        return [_own(g, part) for g, part in zip(reduced(grads, trace), parts, strict=True)]
    dense = [i for i, g in enumerate(grads) if isinstance(g, tf.Tensor)]
    # For layers over sequences, TensorFlow knows the shape of a gradient only at run time.
    sums = scatter_over_workers([tf.ensure_shape(grads[i], variables[i].shape) for i in dense])
    others = reduced([None if isinstance(g, tf.Tensor) else g for g in grads], trace)
    totals = [_own(g, part) for g, part in zip(others, parts, strict=True)]
    for i, total in zip(dense, sums, strict=True):
        totals[i] = total
    return totals


def _own(gradient: Any, part: VariablePart) -> Any:
    """Return this part of a whole gradient, flat."""
    if isinstance(gradient, tf.IndexedSlices):
        return _own_elements(summed_rows(gradient), part)
    return None if gradient is None else cut(gradient, part)


def _own_elements(slices: tf.IndexedSlices, part: VariablePart) -> tf.IndexedSlices:
    """Return this part of a sparse gradient, still sparse, because dense updates differ."""
    width = math.prod(part.shape[1:])
    first_of_row = tf.cast(slices.indices, tf.int64) * width - part.first
    places = tf.reshape(first_of_row[:, None] + tf.range(width, dtype=tf.int64), [-1])
    mine = tf.where((places >= 0) & (places < part.end - part.first))[:, 0]
    values = tf.gather(tf.reshape(slices.values, [-1]), mine)
    return tf.IndexedSlices(values, tf.gather(places, mine), tf.constant([part.end - part.first]))


def cut(value: tf.Tensor, place: VariablePart) -> tf.Tensor:
    return tf.reshape(value, [-1])[place.first : place.end]


def place_of(part: Any) -> VariablePart:
    place = part_of(part)
    assert place is not None
    return place
