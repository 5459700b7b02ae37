"""Feeds from streams: a dataset of the user's own batches, resumed by reading it again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.data.source import unpack
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.stream_graph import Reading, read, serialized
from tfdist.training.epochs import EpochPlan, share_of
from tfdist.training.feed import AHEAD_STEPS, Feed, Part, digest_is_due, digest_of

_SAY_EVERY_BATCHES = 16
_plain = tf.autograph.experimental.do_not_convert


class StreamFeed(Feed):
    """Feed of a stream: every task reads the same batches and takes its replicas' slices.

    The global batch is then the user's own, whatever the number of tasks. Under ps each worker
    reads its own part of a training stream, over and over: not each example exactly once.
    """

    source: StreamSource

    def __init__(self, source: StreamSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        layout, batches = self._layout, self._order.batches
        in_step = layout.num_tasks > 1 or layout.num_workers > 1
        self._reading = Reading(seed=self._seed, in_step=in_step)
        self.may_be_empty = layout.num_replicas > 1
        self._in_order = not self._order.shuffle
        self._is_endless = source.is_endless and batches is None
        self._take = -1 if batches is None else batches

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; called eagerly."""
        return self._dataset(first, last, self._reading)

    def first_parts(self) -> tuple[Any, ...]:
        """As in `Feed`; fills no cache of the user's."""
        reading = dataclasses.replace(self._reading, peek=True)
        found: tuple[Any, ...] = next(iter(self._dataset(0, 1, reading)))
        return found

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        batches = self._endless(read(self.source.dataset_for(), reading))
        batches = _from_step(first, batches).take(last - first)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), batches))
        if self._layout.num_tasks > 1 and not reading.peek:
            numbered = numbered.map(_plain(functools.partial(self._with_digest, first)))
        return numbered.map(_plain(self._parts)).prefetch(AHEAD_STEPS)

    def _with_digest(self, first: int, step: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        """Note the digests of a batch that tasks are to compare."""

        leaves, targets = _leaves(batch), _leaves(unpack(batch)[1])

        def note() -> tf.Tensor:
            note_of = functools.partial(self._note, len(leaves))
            return tf.numpy_function(note_of, [step, *leaves, *targets], tf.bool)

        due = digest_is_due(step, first=first)
        with tf.control_dependencies([tf.cond(due, note, lambda: tf.constant(True))]):
            return tf.identity(step), batch

    def _note(self, count: int, step: np.ndarray, *arrays: np.ndarray) -> np.bool_:
        self.digests[int(step)] = digest_of(arrays[:count]), digest_of(arrays[count:])
        return np.True_

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the dataset's own graph when order counts, else the worker's batches."""
        with tf.init_scope():
            graph = serialized(self.source.dataset_for(), self._reading)
        if self._in_order:
            return tf.data.Dataset.from_tensors(graph).repeat()
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        batches = _from_graph(graph, self.source)
        return self._endless(batches.shard(self._layout.num_workers, index))

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """As in `Feed`."""
        batches = given
        if self._in_order:
            whole = self._endless(_from_graph(given.get_next(), self.source))
            batches = iter(whole.skip(first).take(last - first))
        return lambda step: Part(*self._whole(step, batches.get_next())[0])

    def _endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if self._is_endless else dataset.take(self._take).repeat()

    def _parts(self, step: tf.Tensor, data: Any) -> tuple[Any, ...]:
        data = self._finished(step, data)
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        return tuple(self._part(data, size, replica) for replica in self._layout.replica_ids)

    def _part(self, data: Any, size: tf.Tensor, replica: int) -> tuple[Any, Any, Any]:
        if self._layout.num_replicas == 1:
            return data, tf.constant(1.0), size
        low, high = share_of(replica, parts=self._layout.num_replicas, size=size)
        start = tf.minimum(low, size - 1)
        stop = tf.maximum(high, start + 1)
        share = tf.cast((high - low) / size, tf.float32)
        return tf.nest.map_structure(lambda leaf: _rows(leaf, start, stop), data), share, high - low

    def _whole(self, number: tf.Tensor, data: Any) -> tuple[Any, ...]:
        """Return one part, of a whole batch; `number` is that of no other batch of the run."""
        data = self._finished(number, data)
        return ((data, tf.constant(1.0), tf.cast(tf.shape(_first(data))[0], tf.int64)),)

    def _finished(self, number: tf.Tensor, data: Any) -> Any:
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        ids = number * self.plan.global_batch_size + tf.range(size)
        data = self.source.transformed(data, example_ids=ids, epoch=0, seed=self._seed)
        return self._after(data) if self._after else data


class InputFunctionFeed(StreamFeed):
    """Feed of what the user's function gives each task; a replica takes whole batches."""

    source: InputFunctionSource  # type: ignore[assignment]
    counts_fractions = True

    def __init__(self, source: Any, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.may_be_empty = False
        self._in_order = False

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        """As in `StreamFeed`; a task with several devices reads its stream once for each."""
        layout = self._layout
        context = tf.distribute.InputContext(
            num_input_pipelines=layout.num_tasks,
            input_pipeline_id=layout.task_index,
            num_replicas_in_sync=layout.num_replicas,
        )
        batches = self._endless(read(self.source.dataset_for(context), reading))
        local = len(layout.replica_ids)
        shards = tuple(batches.shard(local, i) if local > 1 else batches for i in range(local))
        steps = _from_step(first, tf.data.Dataset.zip(shards)).take(last - first)

        def parts(step: tf.Tensor, each: Any) -> tuple[Any, ...]:
            numbers = [step * layout.num_replicas + replica for replica in layout.replica_ids]
            return tuple(self._whole(n, d)[0] for n, d in zip(numbers, each, strict=True))

        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), steps))
        return numbered.map(_plain(parts)).prefetch(AHEAD_STEPS)

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the function's dataset for this worker."""
        context = tf.distribute.InputContext(
            num_input_pipelines=self._layout.num_workers,
            input_pipeline_id=(tf.distribute.coordinator.experimental_get_current_worker_index()),
            num_replicas_in_sync=1,
        )
        return self._endless(self.source.dataset_for(context))


def _from_step(first: int, batches: tf.data.Dataset) -> tf.data.Dataset:
    """Leave out the first batches: reads them again, and report on the way that this goes on.

    It may take longer than a task may hang.
    """
    if first == 0:
        return batches

    def said() -> tf.Tensor:
        return tf.numpy_function(_go_on, [], tf.bool)

    def is_due(number: tf.Tensor, _: Any) -> tf.Tensor:
        speaks = (number < first) & (number % _SAY_EVERY_BATCHES == 0)
        with tf.control_dependencies([tf.cond(speaks, said, lambda: tf.constant(True))]):
            return number >= first

    return batches.enumerate().filter(_plain(is_due)).map(_plain(lambda _, batch: batch))


def _go_on() -> np.bool_:
    phases.go_on()
    return np.True_


def _from_graph(graph: tf.Tensor, source: Any) -> tf.data.Dataset:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return tf.data.experimental.from_variant(variant, structure=source.batched_spec)


def _leaves(nest: Any) -> list[tf.Tensor]:
    """Return the tensors of a batch, those that a sparse or ragged one is made of, too."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def _rows(leaf: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    if leaf is None:
        return None
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    rest = tf.shape(leaf, tf.int64)[1:]
    first = tf.concat([[start], tf.zeros_like(rest)], 0)
    return tf.sparse.slice(leaf, first, tf.concat([[stop - start], rest], 0))


def _first(data: Any) -> tf.Tensor:
    return next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
