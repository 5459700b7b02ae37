"""Feeds from streams: a dataset of the user's own batches, resumed by reading it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import phases
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.training.epochs import EpochPlan, share_of
from tfdist.training.feed import AHEAD_STEPS, Feed, Layout, Order, Part

_SAY_EVERY_BATCHES = 16
_plain = tf.autograph.experimental.do_not_convert


class StreamFeed(Feed):
    """Every task reads the same batches and takes its replicas' slices of each.

    The global batch is then the user's own, whatever the number of tasks. Under ps each worker
    reads its own part of a training stream, over and over: not each example exactly once.
    """

    direct = False

    def __init__(
        self,
        source: StreamSource,
        plan: EpochPlan,
        *,
        layout: Layout,
        seed: int,
        order: Order,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        self.may_be_empty = layout.num_replicas > 1
        self._layout = layout
        self._seed = seed
        self._in_order = not order.shuffle
        self._after = after
        self._is_endless = source.is_endless and order.batches is None
        self._take = -1 if order.batches is None else order.batches

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`."""
        batches = _from_step(first, self._endless(self.source.dataset_for())).take(last - first)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), batches))
        return numbered.map(_plain(self._parts)).prefetch(AHEAD_STEPS)

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the dataset's own graph when order counts, else the worker's batches."""
        with tf.init_scope():
            graph = tf.raw_ops.DatasetToGraphV2(
                input_dataset=self.source.dataset_for()._variant_tensor,
                strip_device_assignment=True,
            )
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
        """One part of a whole batch; `number` is that of no other batch of the run."""
        data = self._finished(number, data)
        return ((data, tf.constant(1.0), tf.cast(tf.shape(_first(data))[0], tf.int64)),)

    def _finished(self, number: tf.Tensor, data: Any) -> Any:
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        ids = number * self.plan.global_batch_size + tf.range(size)
        data = self.source.transformed(data, example_ids=ids, epoch=0, seed=self._seed)
        return self._after(data) if self._after else data


class InputFunctionFeed(StreamFeed):
    """Each task reads what the user's function gives it; a replica takes whole batches."""

    source: InputFunctionSource  # type: ignore[assignment]
    counts_shares = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.may_be_empty = False
        self._in_order = False

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; a task with several devices reads its stream once for each."""
        layout = self._layout
        context = tf.distribute.InputContext(
            num_input_pipelines=layout.num_tasks,
            input_pipeline_id=layout.task_index,
            num_replicas_in_sync=layout.num_replicas,
        )
        batches = self._endless(self.source.dataset_for(context))
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
    """Leaves out the first batches: reads them again, and says on the way that this goes on.

    It may take longer than a task may stand still.
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
