"""Feeds from streams: a dataset of the user's own batches, resumed by reading it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.data.source import unpack
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.stream_graph import Reading, read, serialized
from tfdist.strategy import Job
from tfdist.training.agreement import digest_is_due, digest_of, leaves_of
from tfdist.training.epochs import EpochPlan, share_of
from tfdist.training.feed import AHEAD_STEPS, Feed, Part, ids_of_rows

_REPORT_EVERY_BATCHES = 16
_plain = tf.autograph.experimental.do_not_convert


def reading_of(job: Job, seed: int) -> Reading:
    """Return how a job reads a stream."""
    return Reading(seed=seed, in_step=job.num_tasks > 1 or job.kind == "ps")


class StreamFeed(Feed):
    """Feed of a stream: every task reads the same batches and takes its replicas' slices.

    The global batch is then the user's own, whatever the number of tasks. Under ps each worker
    reads its own part of a training stream, over and over: not each example exactly once.
    """

    source: StreamSource

    def __init__(self, source: StreamSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self._reading = reading_of(self._job, self._seed)
        self.may_be_empty = self._job.num_replicas > 1
        self._in_order = not self.order.shuffle
        self._is_compared = self._job.num_tasks > 1

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; called eagerly."""
        return self._dataset(first, last, self._reading)

    def first_batch(self) -> Any:
        """As in `Feed`; fills no cache of the user's."""
        reading = dataclasses.replace(self._reading, peek=True)
        return next(iter(self._dataset(0, 1, reading)))[0].data

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        batches = _from_step(first, self._batches(reading)).take(last - first)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), batches))
        if self._is_compared and not reading.peek:
            numbered = numbered.map(_plain(partial(self._with_digest, first)))
        return numbered.map(_plain(self._parts)).prefetch(AHEAD_STEPS)

    def _batches(self, reading: Reading) -> tf.data.Dataset:
        """Return what this task reads for each step, without an end."""
        return self._endless(read(self.source.dataset_for(), reading))

    def _with_digest(self, first: int, step: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        """Note the digests of a batch that tasks are to compare."""

        leaves, targets = leaves_of(batch), leaves_of(unpack(batch)[1])

        def note() -> tf.Tensor:
            note_of = partial(self._note, len(leaves))
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
        return self._endless(batches).shard(self._job.num_workers, index)

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """As in `Feed`."""
        batches = given
        if self._in_order:
            whole = self._endless(_from_graph(given.get_next(), self.source))
            batches = iter(whole.skip(first).take(last - first))
        return lambda step: self._whole(step, batches.get_next())

    def _endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        batches = self.order.batches
        if batches is None:
            return dataset if self.source.is_endless else dataset.repeat()
        return dataset.take(batches).repeat()

    def _parts(self, step: tf.Tensor, data: Any) -> tuple[Part, ...]:
        whole = self._whole(step, data)
        if self._job.num_replicas == 1:
            return (whole,)
        return tuple(self._part(whole, replica) for replica in self._job.replica_ids)

    def _part(self, whole: Part, replica: int) -> Part:
        low, high = share_of(replica, parts=self._job.num_replicas, size=whole.count)
        stop = tf.maximum(high, low + 1)
        data = tf.nest.map_structure(lambda leaf: _rows(leaf, low, stop), whole.data)
        share = (high - low) / tf.maximum(whole.count, 1)  # a batch may have no example
        return Part(data, tf.cast(share, tf.float32), high - low)

    def _whole(self, number: tf.Tensor, data: Any) -> Part:
        """Return the part of a whole batch; `number` is that of no other batch of the run."""
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        ids = ids_of_rows(number, tf.range(size), batch=self.plan.global_batch_size)
        data = self._transformed(data, ids, 0)
        # Counted once more: a transform may leave rows out.
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        return Part(data, tf.constant(1.0), size)


class InputFunctionFeed(StreamFeed):
    """Feed of what the user's function gives each task; a replica takes whole batches."""

    source: InputFunctionSource  # type: ignore[assignment]
    counts_fractions = True

    def __init__(self, source: Any, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.may_be_empty = self._in_order = self._is_compared = False

    def _batches(self, reading: Reading) -> tf.data.Dataset:
        """As in `StreamFeed`; a task with several devices reads its stream once for each."""
        job = self._job
        context = tf.distribute.InputContext(
            num_input_pipelines=job.num_tasks,
            input_pipeline_id=job.task_index,
            num_replicas_in_sync=job.num_replicas,
        )
        batches = self._endless(read(self.source.dataset_for(context), reading))
        local = len(job.replica_ids)
        shards = tuple(batches.shard(local, i) if local > 1 else batches for i in range(local))
        return tf.data.Dataset.zip(shards)

    def _parts(self, step: tf.Tensor, data: Any) -> tuple[Part, ...]:
        job = self._job
        numbers = [step * job.num_replicas + replica for replica in job.replica_ids]
        return tuple(self._whole(n, d) for n, d in zip(numbers, data, strict=True))

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the function's dataset for this worker."""
        context = tf.distribute.InputContext(
            num_input_pipelines=self._job.num_workers,
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

    def report() -> tf.Tensor:
        return tf.numpy_function(_go_on, [], tf.bool)

    def is_left(number: tf.Tensor, _: Any) -> tf.Tensor:
        is_due = (number < first) & (number % _REPORT_EVERY_BATCHES == 0)
        with tf.control_dependencies([tf.cond(is_due, report, lambda: tf.constant(True))]):
            return number >= first

    return batches.enumerate().filter(_plain(is_left)).map(_plain(lambda _, batch: batch))


def _go_on() -> np.bool_:
    phases.go_on()
    return np.True_


def _from_graph(graph: tf.Tensor, source: Any) -> tf.data.Dataset:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return tf.data.experimental.from_variant(variant, structure=source.batched_spec)


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
