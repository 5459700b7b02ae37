"""Feeds: what each replica gets in a step, as a function of the step, and the same in every task.

A feed answers for one data set and one run: given a step, the batch of each replica of this task,
its fraction of the global batch, and how many of its examples count. A replica whose share is empty
gets one example with a count of 0, so that it takes part in every collective.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.data.arrays import ArraySource
from tfdist.data.order import example_at, example_at_numpy
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.source import GraphSource, Source, batch_spec, lean_options, unpack
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.stream_graph import Reading, random_states, read, serialized
from tfdist.errors import UsageError
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.training.epochs import EpochPlan, share_of

AHEAD_STEPS = 2
DIGEST_EVERY_STEPS = 512
Digest = tuple[int, int]
"""Of a whole batch, and of its targets alone; 64 bits each."""


class Part(NamedTuple):
    """One replica's part of a step.

    Attributes:
      data: nest of tensors ``[max(count, 1), ...]``: ``x``, ``(x, y)`` or ``(x, y, weight)``.
      share: count / examples of the step, scalar float32.
      count: examples that count, scalar int64.
      examples: where the feed records, the tensors that `data` was made from: the indices by
        which it was gathered and the passes they belong to, int64 ``[max(count, 1)]`` both.
    """

    data: Any
    share: Any
    count: Any
    examples: Any = None


def graph_span(plan: EpochPlan, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return `EpochPlan.span` in graph: scalar int64 step -> scalar int64 first, last."""
    batch = plan.global_batch_size
    epochs = np.diff(plan.step_starts)
    examples = np.diff(plan.example_starts)
    if len(set(examples)) == 1:
        epoch = step // epochs[0]
        start_step, start = epoch * epochs[0], epoch * examples[0]
        end = start + examples[0]
    else:
        steps = tf.constant(plan.step_starts, tf.int64)
        epoch = tf.searchsorted(steps, step[tf.newaxis], side="right")[0] - 1
        starts = tf.constant(plan.example_starts, tf.int64)
        start_step, start, end = steps[epoch], starts[epoch], starts[epoch + 1]
    first = start + (step - start_step) * batch
    return first, tf.minimum(first + batch, end)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """In which order a run sees its examples.

    Attributes:
      examples: only the first so many of the data, None for a stream of unknown length.
      shuffle: in an order of its own in each pass.
      batches: only the first so many of batches that come ready, None for all.
    """

    examples: int | None
    shuffle: bool
    batches: int | None = None


class Feed(abc.ABC):
    """Batches of a data set, as an engine asks for them; see the module's docstring.

    Attributes:
      source: where the examples come from.
      plan: the run's epochs, in steps and examples.
      order: in which order the examples come.
      batch_spec: nest of `tf.TensorSpec` of a batch, to build the model from.
      rows: of the first batch where replicas divide batches that the user has made, else None.
      may_be_empty: True when a replica's batch fraction of some step can be empty.
      direct: True when the step itself makes its batch by `at`; otherwise batches come from
        `iterator`.
      counts_fractions: True when a replica's batch fraction is known only once all have counted.
      can_record: True when a batch is made of examples by index.
      records: True to give `Part.examples`; set before anything is made from the feed.
      digests: by step, of batches that several tasks read whole and are to compare.
      digests_cover_inputs: False where inputs may differ between tasks, as augmented ones do.
      failure: what Python code that reads has raised, of which TensorFlow gives the text alone.
    """

    direct: bool = False
    counts_fractions: bool = False
    can_record: bool = False
    records: bool = False
    digests_cover_inputs: bool = True
    failure: Exception | None = None

    def __init__(
        self,
        source: Any,
        plan: EpochPlan,
        *,
        job: Job,
        seed: int,
        order: Order,
        batch_spec: Any = None,
        rows: int | None = None,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        self.order = order
        self.batch_spec = batch_spec
        self.rows = rows
        self.digests: dict[int, Digest] = {}
        self.may_be_empty = plan.smallest_step < job.num_replicas
        self._job = job
        self._seed = seed
        self._after = after
        self._iterator: Any = None
        self._next_step = -1

    @abc.abstractmethod
    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """Return the parts of this task's replicas for the steps ``[first, last)``, made ahead.

        Elements are tuples, one `Part` for each replica of this task.
        """

    def worker_dataset(self) -> tf.data.Dataset:
        """Return what each ps worker is given once, an endless dataset; called in graph."""
        raise TypeError(f"{type(self).__name__}: Python code does not run on a ps worker")

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """Return what makes the parts of the steps ``[first, last)``, in order, on a ps worker.

        Called in graph, once for the block, and what it returns once in a step's graph. `given`
        is the worker's iterator over `worker_dataset`.
        """
        raise TypeError(f"{type(self).__name__}: Python code does not run on a ps worker")

    def first_batch(self) -> Any:
        """Return this task's first part of the first step, as the step gets it; eager tensors.

        A look that changes nothing.
        """
        return next(iter(self.dataset(0, 1)))[0].data

    def at(self, step: tf.Tensor) -> list[Part]:
        """Return the parts of this task's replicas in `step`, scalar int64; pure graph."""
        raise TypeError(f"{type(self).__name__} has no batch for a step by itself")

    def iterator(self, step: int) -> Any:
        """Return the iterator whose next element is that of `step`; made anew after a jump."""
        if self._next_step != step:
            with phases.starting_runtime():
                self._iterator = iter(self.dataset(step, self.plan.total_steps))
            self._next_step = step
        return self._iterator

    def advanced_to(self, step: int) -> None:
        """Note that the iterator's next element is that of `step`."""
        self._next_step = step

    def close(self) -> None:
        """End the iterator: its threads, and the batches that they have made ahead."""
        self._iterator, self._next_step = None, -1


def digest_is_due(step: Any, *, first: int) -> Any:
    """Return whether tasks compare the batch of `step`, an int or tensor, read from `first` on."""
    return (step == first) | (step % DIGEST_EVERY_STEPS == 0)


def ids_of_rows(number: Any, rows: Any, *, batch: int) -> Any:
    """Return an id for each of the `rows` of a batch that comes ready, by the batch's number.

    No other row of a pass has it, also where batches are larger than the first one, of `batch`.
    """
    return rows // batch * 2**40 + number * batch + rows % batch


class GraphFeed(Feed):
    """Feeds from a graph-indexed source: a pure function of the step, under every strategy."""

    source: GraphSource
    can_record = True

    def __init__(self, source: GraphSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.direct = source.transform is None

    def at(self, step: tf.Tensor, arrays: Any = None) -> list[Part]:
        """As in `Feed`; with `arrays` (of `GraphSource.arrays`) only those are read."""
        first, last = graph_span(self.plan, step)
        size: Any = self.plan.global_batch_size if self.plan.all_full else last - first
        return [self._part(replica, first, size, arrays) for replica in self._job.replica_ids]

    def dataset(self, first: Any, last: Any, arrays: Any = None) -> tf.data.Dataset:
        """As in `Feed`."""

        @tf.autograph.experimental.do_not_convert
        def parts(step: tf.Tensor) -> tuple[Part, ...]:
            return tuple(self.at(step, arrays))

        steps = tf.data.Dataset.range(first, last).with_options(lean_options())
        return steps.map(parts, num_parallel_calls=2, deterministic=True).prefetch(AHEAD_STEPS)

    def worker_dataset(self) -> tf.data.Dataset:
        """As in `Feed`: the arrays."""
        arrays = tf.data.Dataset.from_tensors(self.source.arrays())
        return arrays.with_options(lean_options()).repeat()

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """As in `Feed`."""
        arrays = given.get_next()
        if self.direct:
            return lambda step: self.at(step, arrays)[0]
        # Traced, optimized and started anew in each work unit, which costs as much as sending
        # some megabytes: worth it for a transform, which is so done ahead.
        batches = iter(self.dataset(first, last, arrays))
        return lambda _: batches.get_next()[0]

    def _part(self, replica: int, first: tf.Tensor, size: Any, arrays: Any) -> Part:
        low, high = share_of(replica, parts=self._job.num_replicas, size=size)
        count: Any = high - low
        if isinstance(count, int):
            positions = first + low + tf.range(max(count, 1), dtype=tf.int64)
            share: Any = tf.constant(count / size, tf.float32)
            count = tf.constant(count, tf.int64)
        else:
            positions = first + low + tf.range(tf.maximum(count, 1), dtype=tf.int64)
            share = tf.cast(tf.cast(count, tf.float64) / tf.cast(size, tf.float64), tf.float32)
        data, examples = self._gather(positions, arrays)
        return Part(data, share, count, examples if self.records else None)

    def _gather(self, positions: tf.Tensor, arrays: Any) -> tuple[Any, Any]:
        size = self.order.examples
        indices = example_at(
            positions, num_examples=size, seed=self._seed, shuffle=self.order.shuffle
        )
        data = self.source.gather(indices, arrays=arrays)
        passes = positions // size
        data = self.source.transformed(data, example_ids=indices, epoch=passes, seed=self._seed)
        return (self._after(data) if self._after else data), (indices, passes)


def digest_of(leaves: Sequence[Any]) -> int:
    """Return the digest of arrays, 64 bits."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        array = np.asarray(leaf)
        found.update(f"{array.shape}{array.dtype}".encode())
        is_text = array.dtype.kind in "OUS"
        found.update(repr(array.tolist()).encode() if is_text else array.tobytes())
    return int.from_bytes(found.digest(), "little")


def digests_of(batch: Any) -> Digest:
    """Return the digests of a batch of arrays: of all of it, and of the targets alone."""
    return digest_of(_leaves(batch)), digest_of(_leaves(unpack(batch)[1]))


# Feeds from Python: examples or whole batches by index, read ahead by threads.


_THREADS = 2


class PythonFeed(Feed):
    """Feeds whose batches Python code makes; not under ps, where Python runs only in the chief."""

    def __init__(self, source: Any, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self._spec = batch_spec(source.element_spec)
        self._threads = _THREADS

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; read ahead by threads, delivered in order."""
        leaves = [spec for spec in tf.nest.flatten(self._spec) if spec is not None]
        one = (*leaves, tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64),
               tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))  # fmt: skip
        signature = tuple(one for _ in self._job.replica_ids)
        raw = tf.data.Dataset.from_generator(
            lambda: self._read_noting(int(first), int(last)), output_signature=signature
        )
        packed = tf.autograph.experimental.do_not_convert(
            lambda *parts: tuple(map(self._packed, parts))
        )
        return raw.map(packed).prefetch(AHEAD_STEPS)

    @abc.abstractmethod
    def _batch(self, step: int) -> tuple[int, Callable[[int, int], tuple[Any, Any, Any]]]:
        """Return the size of a batch, and what gives leaves, ids and passes of some of its rows."""

    def _load(self, step: int) -> tuple[Any, ...]:
        """Return, for each replica of this task: leaves, ids, passes, share, count."""
        size, rows = self._batch(step)
        parts = []
        for replica in self._job.replica_ids:
            low, high = share_of(replica, parts=self._job.num_replicas, size=size)
            leaves, ids, passes = rows(low, max(high, low + 1))
            share, count = np.float32((high - low) / size), np.int64(high - low)
            parts.append((*leaves, ids, passes, share, count))
        return tuple(parts)

    def _ordered(self, positions: np.ndarray, *, size: int) -> np.ndarray:
        """Return what is at positions of the run, in the order of its passes over `size` things."""
        return example_at_numpy(
            positions, num_examples=size, seed=self._seed, shuffle=self.order.shuffle
        )

    def _read_noting(self, first: int, last: int) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._read(first, last)
        except Exception as error:
            self.failure = error
            raise

    def _read(self, first: int, last: int) -> Iterator[tuple[Any, ...]]:
        threads = self._threads
        self._first = first
        waiting: collections.deque[Future[tuple[Any, ...]]] = collections.deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="tfdist-data") as pool:
            for step in range(first, last):
                hooks = self._hooks_before(step, is_first=step == first)
                while hooks and waiting:
                    yield waiting.popleft().result()
                for hook in hooks:
                    hook()
                waiting.append(pool.submit(self._load, step))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _hooks_before(self, step: int, *, is_first: bool) -> Sequence[Callable[[], None]]:
        """Return what to call before a step is read, the first or another; nothing else is then."""
        return ()

    def _packed(self, part: tuple[Any, ...]) -> Part:
        *leaves, ids, passes, share, count = part
        rest = iter(leaves)
        flat = [None if s is None else next(rest) for s in tf.nest.flatten(self._spec)]
        data = tf.nest.pack_sequence_as(self._spec, flat)
        data = self.source.transformed(data, example_ids=ids, epoch=passes, seed=self._seed)
        data = self._after(data) if self._after else data
        return Part(data, share, count, (ids, passes) if self.records else None)


class IndexedFeed(PythonFeed):
    """Feed by index: each task reads the examples of its own replicas."""

    source: PythonSource
    can_record = True

    def _batch(self, step: int) -> tuple[int, Callable[[int, int], tuple[Any, Any, Any]]]:
        span, size = self.plan.span(step), self.order.examples or 1

        def rows(low: int, high: int) -> tuple[Any, Any, Any]:
            positions = span.start + np.arange(low, high)
            ids = self._ordered(positions, size=size)
            return _leaves(self.source.fetch(ids)), ids, positions // size

        return len(span), rows


class BatchFeed(PythonFeed):
    """Feed of a PyDataset's batches: each task reads them whole and takes its replicas' slices."""

    source: PyDatasetSource
    digests_cover_inputs = False

    def __init__(self, source: PyDatasetSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.may_be_empty = True
        self._threads = source.workers
        self._batches = self.order.batches or source.num_batches

    def _hooks_before(self, step: int, *, is_first: bool) -> Sequence[Callable[[], None]]:
        """As in `PythonFeed`; one that begins within a pass has not been told of it."""
        begins = self._batches is not None and step % self._batches == 0
        if step and begins:
            return self.source.on_epoch_end, self.source.on_epoch_begin
        return (self.source.on_epoch_begin,) if begins or is_first else ()

    def _batch(self, step: int) -> tuple[int, Callable[[int, int], tuple[Any, Any, Any]]]:
        batches, index, passes = self._batches, step, 0
        if batches:
            passes = step // batches
            index = int(self._ordered(np.array([step]), size=batches)[0])
        batch = self.source.fetch_batch(index)
        if self._job.num_tasks > 1 and digest_is_due(step, first=self._first):
            self.digests[step] = digests_of(batch)
        leaves = _leaves(batch)

        def rows(low: int, high: int) -> tuple[Any, Any, Any]:
            numbers = np.arange(low, high)
            ids = ids_of_rows(index, numbers, batch=self.plan.global_batch_size)
            return [leaf[low:high] for leaf in leaves], ids, np.full(len(ids), passes)

        return len(leaves[0]), rows


def _leaves(batch: Any) -> list[Any]:
    """Return the tensors of a batch, those that a sparse or ragged one is made of, too."""
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


# Feeds from streams: a dataset of the user's own batches, resumed by reading it again.


_SAY_EVERY_BATCHES = 16
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

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; called eagerly."""
        return self._dataset(first, last, self._reading)

    def first_batch(self) -> Any:
        """As in `Feed`; fills no cache of the user's."""
        reading = dataclasses.replace(self._reading, peek=True)
        return next(iter(self._dataset(0, 1, reading)))[0].data

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        batches = self._endless(read(self.source.dataset_for(), reading))
        batches = _from_step(first, batches).take(last - first)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), batches))
        if self._job.num_tasks > 1 and not reading.peek:
            numbered = numbered.map(_plain(partial(self._with_digest, first)))
        return numbered.map(_plain(self._parts)).prefetch(AHEAD_STEPS)

    def _with_digest(self, first: int, step: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        """Note the digests of a batch that tasks are to compare."""

        leaves, targets = _leaves(batch), _leaves(unpack(batch)[1])

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
        data = self.source.transformed(data, example_ids=ids, epoch=0, seed=self._seed)
        data = self._after(data) if self._after else data
        # Counted once more: a transform may leave rows out.
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        return Part(data, tf.constant(1.0), size)


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
        job = self._job
        context = tf.distribute.InputContext(
            num_input_pipelines=job.num_tasks,
            input_pipeline_id=job.task_index,
            num_replicas_in_sync=job.num_replicas,
        )
        batches = self._endless(read(self.source.dataset_for(context), reading))
        local = len(job.replica_ids)
        shards = tuple(batches.shard(local, i) if local > 1 else batches for i in range(local))
        steps = _from_step(first, tf.data.Dataset.zip(shards)).take(last - first)

        def parts(step: tf.Tensor, each: Any) -> tuple[Part, ...]:
            numbers = [step * job.num_replicas + replica for replica in job.replica_ids]
            return tuple(self._whole(n, d) for n, d in zip(numbers, each, strict=True))

        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), steps))
        return numbered.map(_plain(parts)).prefetch(AHEAD_STEPS)

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


# Agreement check: the tasks of a job compare digests of the data they read.
#
# Each task takes its part of the same batches. Where tasks read different ones, by a shuffle or a
# generator of each process's own, another order of files or another version of them, some examples
# are seen twice and some never, and nothing fails. So tasks compare what they read: examples spread
# over data by index before the first step; of data that come as batches the first one that is read
# and one of 512 after it.


_LOG = logging.getLogger(__name__)
_EXAMPLES_BY_GRAPH = 32
_EXAMPLES_BY_PYTHON = 8
_FIX = (
    "seed whatever shuffles or draws, sort lists of files, give every host the same files, or pass "
    "a function of tf.distribute.InputContext if each worker is to read a part of its own"
)


def share_random_states(job: Job, source: Source) -> None:
    """Give the random states that a stream's functions capture the chief's values. A collective.

    Such as the seed of a `RandomFlip` that a dataset maps: each process has drawn one of its own.
    """
    if not isinstance(source, StreamSource) or job.num_tasks == 1:
        return
    for handle in random_states(source.dataset_for()):
        dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        chiefs = broadcast(value.numpy())
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(chiefs, dtype))


def require_same_examples(job: Job, source: Source) -> None:
    """Compare some examples of data by index. A collective of the training tasks.

    Raises:
      UsageError: the tasks do not have the same number of examples, or not the same targets or, of
        arrays, inputs at the same indices.
    """
    if job.num_tasks == 1 or not isinstance(source, GraphSource | PythonSource):
        return
    count = source.num_examples or 0
    most = _EXAMPLES_BY_GRAPH if isinstance(source, GraphSource) else _EXAMPLES_BY_PYTHON
    indices = np.unique(np.linspace(0, max(count - 1, 0), most).astype(np.int64))
    if isinstance(source, GraphSource):
        found = source.gather(tf.constant(indices))
        found = tf.nest.map_structure(lambda leaf: leaf.numpy(), found)
    else:
        found = source.fetch(indices)
    counts = _of_all_tasks(job, [float(count)])
    if len({tuple(row) for row in counts}) > 1:
        raise _differ(job, "numbers of examples", [f"{int(row[0]):,}" for row in counts])
    whole = isinstance(source, ArraySource)
    _require_same(job, digests_of(found), where="examples at the same indices", inputs_too=whole)


def require_same_batches(job: Job, feed: Feed, first: int, last: int) -> None:
    """Compare the batches of ``[first, last)`` of which the feed has a digest. A collective.

    Raises:
      UsageError: the tasks have read different batches.
    """
    for step in sorted(step for step in list(feed.digests) if step < last):  # threads add to it
        digest = feed.digests.pop(step)
        if step >= first:
            _require_same(
                job, digest, where=f"batches of step {step}", inputs_too=feed.digests_cover_inputs
            )


def _require_same(job: Job, digest: Digest, *, where: str, inputs_too: bool) -> None:
    words = [float(part) for value in digest for part in divmod(value, 2**32)]
    rows = _of_all_tasks(job, words)
    whole, targets = ({tuple(row[part]) for row in rows} for part in (slice(0, 2), slice(2, 4)))
    if len(targets) > 1 or (len(whole) > 1 and inputs_too):
        raise _differ(job, where, [f"digest {_hex(row)}" for row in rows])
    if len(whole) > 1 and job.is_chief and where.startswith("batches"):
        _LOG.warning(
            "data: the inputs of the %s differ between the workers (%s) and the targets do not: "
            "right for random augmentation, wrong for anything else",
            where,
            ", ".join(map(_hex, rows)),
        )


def _hex(row: np.ndarray) -> str:
    return f"{int(row[0]) * 2**32 + int(row[1]):016x}"


def _of_all_tasks(job: Job, values: Sequence[float]) -> np.ndarray:
    """Return each task's numbers, float64 ``[tasks, len(values)]``. A collective."""
    table = np.zeros((job.num_tasks, len(values)))
    table[job.task_index] = values
    whole = sum_over_tasks(job, table.reshape(-1), of="digests of the data")
    return whole.reshape(table.shape)


def _differ(job: Job, what: str, seen: Sequence[str]) -> UsageError:
    names = ("the chief", *(f"worker {index}" for index in range(1, len(seen))))
    each = ", ".join(f"{name} {text}" for name, text in zip(names, seen, strict=True))
    return UsageError(
        "data",
        received=f"{what} that differ between the workers: {each}",
        expected="the same in every worker, as each takes its part of a batch",
        fix=_FIX,
        code="tasks-differ",
    )
