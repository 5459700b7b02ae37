"""Feeds, which provide each replica's batches as a function of the step, the same in every task.

A feed serves one data set and one run. For a step, it returns the batch of each replica of this
task, its batch fraction, and its number of real examples. A replica with an empty batch fraction
gets one padding example and a count of 0, so that it still joins every collective.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist import phases
from tfdist.data.draws import example_at, example_at_numpy
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.source import GraphSource, batch_spec, lean_options, unpack
from tfdist.data.stream import InputFunctionSource, Reading, StreamSource, read, serialized
from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.training.epochs import EpochPlan, share_of
from tfdist.training.task_agreement import Digest, digest_is_due, digest_of, digests_of, leaves_of

_AHEAD_STEPS = 2
_THREADS = 2
_REPORT_EVERY_BATCHES = 16
_plain = tf.autograph.experimental.do_not_convert


class Part(NamedTuple):
    """One replica's part of a step.

    Attributes:
      data: nest of tensors ``[max(count, 1), ...]``: ``x``, ``(x, y)`` or ``(x, y, weight)``.
      share: batch fraction, count / examples of the step, scalar float32.
      count: number of examples without padding, scalar int64.
      examples: if the feed records, the indices of the examples and their passes over the data,
        int64 ``[max(count, 1)]`` both, else `None`.
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
    """Order of a run's examples.

    Attributes:
      examples: number of examples to use from the start of the data, or `None` if it is unknown.
      shuffle: True to shuffle in a different order in each pass.
      batches: number of ready-made batches to use, or `None` for all (default: `None`).
    """

    examples: int | None
    shuffle: bool
    batches: int | None = None


class Feed(abc.ABC):
    """Batches of a data set for an engine. The module's docstring gives an overview.

    Attributes:
      source: source of the examples.
      plan: epochs of the run, in steps and examples.
      order: order of the examples.
      seed: seed of the order and the transforms.
      batch_spec: nest of `tf.TensorSpec` of a batch, used to build the model.
      may_be_empty: True if a replica's batch fraction of some step can be empty.
      direct: True if the compiled step makes its batch with `at`, False if it reads batches from
        `iterator`.
      counts_fractions: True if batch fractions are known only after all replicas have counted.
      can_record: True if batches are made of examples by index.
      in_order: True if a ps worker reads all batches of a stream, and skips those of other workers.
      records: True to fill `Part.examples`. Set it before the first use of the feed.
      digests: digests by step of batches that several tasks read fully and compare.
      digests_cover_inputs: False if inputs may differ between tasks, as with augmentation.
      ends: numbers of batches after which a pass ended (`None` unless several tasks read data of
        unknown length and compare these ends).
      class_weights: weights of the classes from 0 on, `None` without `class_weight`.
      failure: exception of Python code that reads data. For TensorFlow the data end there, because
        it would log the traceback of an exception three times.
    """

    direct: bool = False
    counts_fractions: bool = False
    can_record: bool = False
    in_order: bool = False
    records: bool = False
    digests_cover_inputs: bool = True
    class_weights: Sequence[float] | None = None
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
        weigh: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        self.order = order
        self.batch_spec = batch_spec
        self.digests: dict[int, Digest] = {}
        self.ends: list[int] | None = None
        self.may_be_empty = plan.smallest_step < job.num_replicas
        self._job = job
        self.seed: int | tf.Variable = seed
        self._weigh = weigh
        self._iterator: Any = None
        self._next_step = -1

    @abc.abstractmethod
    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """Return this task's parts for the steps ``[first, last)``, prefetched.

        Elements are tuples with one `Part` for each replica of this task.
        """

    def worker_dataset(self) -> tf.data.Dataset:
        """Return the endless dataset that each ps worker receives once. Called in graph."""
        raise TypeError(f"{type(self).__name__}: Python code does not run on a ps worker")

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """Return a function that makes the parts of the steps ``[first, last)`` on a ps worker.

        Called in graph, once for each block. Call the returned function once in a step's
        graph. It returns the parts in order. `given`: worker's iterator over `worker_dataset`.
        """
        raise TypeError(f"{type(self).__name__}: Python code does not run on a ps worker")

    def first_batch(self) -> Any:
        """Return this task's first part of the first step, as eager tensors.

        This changes no state of the feed.
        """
        return next(iter(self.dataset(0, 1)))[0].data

    def at(self, step: tf.Tensor, shard: Any = None) -> list[Part]:
        """Return the parts of this task's replicas in `step` (scalar int64), in pure graph code.

        With a `shard` (scalar int64), return only the part of this replica.
        """
        raise TypeError(f"{type(self).__name__} cannot compute the batch of a single step")

    def iterator(self, step: int) -> Any:
        """Return the iterator positioned at `step`, a new iterator after a jump between steps."""
        if self._next_step != step:
            self._next_step = step
            self._iterator = iter(self.dataset(step, self.plan.total_steps))
        return self._iterator

    def advanced_to(self, step: int) -> None:
        """Record that the iterator's next element belongs to `step`."""
        self._next_step = step

    def end_pass(self, step: int) -> None:  # noqa: B027, as other data have no hooks
        """Call `on_epoch_end` of a PyDataset if a pass or the run ends at `step`, as Keras does."""

    def take_seed_from_a_variable(self) -> None:
        """Store the seed in a variable of the compiled step, so that the next `fit` can set it."""
        if self.direct:
            with tf.init_scope(), tf.device("/CPU:0"):
                self.seed = ResourceVariable(self.seed, trainable=False, dtype=tf.int64)

    def close(self) -> None:
        """Delete the iterator, with its threads and prefetched batches."""
        self._iterator, self._next_step = None, -1

    def _transformed(self, data: Any, ids: Any, passes: Any) -> Any:
        """Return a batch after the source's transform and the class weights. In graph."""
        data = self.source.transformed(data, example_ids=ids, epoch=passes, seed=self.seed)
        return self._weigh(data) if self._weigh else data


def ids_of_rows(number: Any, rows: Any, *, batch: int) -> Any:
    """Return ids for `rows` of the ready-made batch `number`.

    Ids are unique within a pass, even if some batches are larger than the first (`batch`).
    """
    return rows // batch * 2**40 + number * batch + rows % batch


class GraphFeed(Feed):
    """Feed of a source indexed in graph: a pure function of the step, under every strategy."""

    source: GraphSource
    can_record = True

    def __init__(self, source: GraphSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.direct = source.transform is None

    def at(self, step: tf.Tensor, shard: Any = None, arrays: Any = None) -> list[Part]:
        """As in `Feed`. With `arrays` (from `GraphSource.arrays`), only these arrays are read."""
        first, last = graph_span(self.plan, step)
        size: Any = self.plan.global_batch_size if self.plan.all_full else last - first
        replicas = self._job.replica_ids if shard is None else [shard]
        return [self._part(replica, first, size, arrays) for replica in replicas]

    def dataset(self, first: Any, last: Any, arrays: Any = None) -> tf.data.Dataset:
        """Return the parts as in `Feed`."""

        @_plain
        def parts(step: tf.Tensor) -> tuple[Part, ...]:
            return tuple(self.at(step, arrays=arrays))

        steps = tf.data.Dataset.range(first, last).with_options(lean_options())
        return steps.map(parts, num_parallel_calls=2, deterministic=True).prefetch(_AHEAD_STEPS)

    def worker_dataset(self) -> tf.data.Dataset:
        """Return the arrays, endlessly repeated."""
        arrays = tf.data.Dataset.from_tensors(self.source.arrays())
        return arrays.with_options(lean_options()).repeat()

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """Return a function that makes the parts, as in `Feed`."""
        arrays = given.get_next()
        if self.direct:
            return lambda step: self.at(step, arrays=arrays)[0]
        # Each work unit traces, optimizes and starts this dataset again. That costs as much as
        # sending some megabytes, and is worth it to run a transform ahead of the step.
        batches = iter(self.dataset(first, last, arrays))
        return lambda _: batches.get_next()[0]

    def _part(self, replica: int, first: tf.Tensor, size: Any, arrays: Any) -> Part:
        low, high = share_of(replica, parts=self._job.num_replicas, size=size)
        divides = isinstance(size, int) and size % self._job.num_replicas == 0
        count: Any = size // self._job.num_replicas if divides else high - low
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
            positions, num_examples=size, seed=self.seed, shuffle=self.order.shuffle
        )
        data = self.source.gather(indices, arrays=arrays)
        passes = positions // size
        return self._transformed(data, indices, passes), (indices, passes)


# Feeds from Python code: threads prefetch examples or whole batches by index.


class PythonFeed(Feed):
    """Feed with batches from Python code. Not for ps, because only the chief runs the code."""

    def __init__(self, source: Any, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self._spec = batch_spec(source.element_spec)
        self._threads = _THREADS

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`. Threads read ahead, and parts keep their order."""
        leaves = [spec for spec in tf.nest.flatten(self._spec) if spec is not None]
        one = (*leaves, tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64),
               tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))  # fmt: skip
        own = self._job.replica_ids  # an elastic job may change them while threads read
        signature = tuple(one for _ in own)
        raw = tf.data.Dataset.from_generator(
            lambda: self._read_noting(int(first), int(last), own), output_signature=signature
        )
        packed = _plain(lambda *parts: tuple(map(self._packed, parts)))
        return raw.map(packed).prefetch(_AHEAD_STEPS).with_options(lean_options())

    def first_batch(self) -> Any:
        """As in `Feed`. Raise the error of Python code that cannot read the batch."""
        try:
            return super().first_batch()
        except StopIteration as ended:
            raise (self.failure or ended) from None

    @abc.abstractmethod
    def _batch(self, step: int) -> tuple[int, Callable[[int, int], tuple[Any, Any, Any]]]:
        """Return a batch's size, and a function that returns leaves, ids and passes of its rows."""

    def _load(self, step: int, own: Sequence[int]) -> tuple[Any, ...]:
        """Return `(*leaves, ids, passes, share, count)` for each of the replicas `own`."""
        size, rows = self._batch(step)
        parts = []
        for replica in own:
            low, high = share_of(replica, parts=self._job.num_replicas, size=size)
            leaves, ids, passes = rows(low, max(high, low + 1))
            share, count = np.float32((high - low) / size), np.int64(high - low)
            parts.append((*leaves, ids, passes, share, count))
        return tuple(parts)

    def _ordered(self, positions: np.ndarray, *, size: int) -> np.ndarray:
        """Return the indices at these positions of the run, for passes over `size` items."""
        return example_at_numpy(
            positions, num_examples=size, seed=self.seed, shuffle=self.order.shuffle
        )

    def _read_noting(self, *span: Any) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._read(*span)
        except Exception as error:
            self.failure = error

    def _read(self, first: int, last: int, own: Sequence[int]) -> Iterator[tuple[Any, ...]]:
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
                waiting.append(pool.submit(self._load, step, own))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _hooks_before(self, step: int, *, is_first: bool) -> Sequence[Callable[[], None]]:
        """Return the calls to make before a step is read, while no other step is being read."""
        return ()

    def _packed(self, part: tuple[Any, ...]) -> Part:
        *leaves, ids, passes, share, count = part
        rest = iter(leaves)
        flat = [None if s is None else next(rest) for s in tf.nest.flatten(self._spec)]
        data = tf.nest.pack_sequence_as(self._spec, flat)
        data = self._transformed(data, ids, passes)
        return Part(data, share, count, (ids, passes) if self.records else None)


class IndexedFeed(PythonFeed):
    """Feed by index: each task reads only its own replicas' examples."""

    source: PythonSource
    can_record = True

    def _batch(self, step: int) -> tuple[int, Callable[[int, int], tuple[Any, Any, Any]]]:
        span, size = self.plan.span(step), self.order.examples or 1

        def rows(low: int, high: int) -> tuple[Any, Any, Any]:
            positions = span.start + np.arange(low, high)
            ids = self._ordered(positions, size=size)
            return leaves_of(self.source.fetch(ids)), ids, positions // size

        return len(span), rows


class BatchFeed(PythonFeed):
    """Feed of a PyDataset: each task reads whole batches and slices its replicas' parts."""

    source: PyDatasetSource
    digests_cover_inputs = False

    def __init__(self, source: PyDatasetSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.may_be_empty = True
        self._threads = source.workers
        self._length = source.num_batches
        self._batches = self.order.batches or self._length
        self._ended_at: int | None = None
        self._lock = threading.Lock()

    def end_pass(self, step: int) -> None:
        """As in `Feed`, unless the thread that reads ahead has already called the hook."""
        with self._lock:
            if self._ended_at is not None and self._ended_at < step and self._ends(step):
                self._ended_at = step
                self.source.on_epoch_end()

    def _ends(self, step: int) -> bool:
        """Return whether a pass or the run ends at `step`. An epoch is a pass of endless data."""
        by_pass = step % self._batches == 0 if self._batches else step in self.plan.step_starts
        return by_pass or step == self.plan.total_steps

    def _hooks_before(self, step: int, *, is_first: bool) -> Sequence[Callable[[], None]]:
        """As in `PythonFeed`. A run that starts within a pass also calls `on_epoch_begin`."""
        begin = partial(self.source.on_epoch_begin, self._length)
        if self._next_step < 0 or not (is_first or self._ends(step)):  # `first_batch` has no hooks
            return ()
        if is_first:
            self._ended_at = step
        return (begin,) if is_first else (partial(self.end_pass, step), begin)

    def _batch(self, step: int) -> tuple[int, Callable[[int, int], tuple[Any, Any, Any]]]:
        batches, index, passes = self._batches, step, 0
        if batches:
            passes = step // batches
            index = int(self._ordered(np.array([step]), size=batches)[0])
        batch = self.source.fetch_batch(index)
        if self._job.num_tasks > 1 and digest_is_due(step, first=self._first):
            self.digests[step] = digests_of(batch)
        leaves = leaves_of(batch)
        divided = self._job.num_replicas > 1
        if divided:
            require_even({len(leaf) for leaf in leaves})

        def rows(low: int, high: int) -> tuple[Any, Any, Any]:
            numbers = np.arange(low, high)
            ids = ids_of_rows(index, numbers, batch=self.plan.global_batch_size)
            mine = [leaf[low:high] for leaf in leaves] if divided else leaves
            return mine, ids, np.full(len(ids), passes)

        return len(leaves[0]), rows


def require_even(sizes: set[int]) -> None:
    """Reject a batch if its parts have different numbers of rows: replicas cannot divide it."""
    if len(sizes) > 1:
        raise UsageError(
            "data",
            f"the parts of a batch have {', '.join(map(str, sorted(sizes)))} rows, so replicas "
            "cannot divide it",
            fix="repeat shared values for each example in the data, or use strategy single",
            code="shapes-differ",
        )


# Feeds from streams: datasets of ready-made batches, which a resumed run reads again.


def reading_of(job: Job, seed: int) -> Reading:
    """Return a job's settings for reading a stream."""
    return Reading(seed=seed, in_step=job.num_tasks > 1 or job.kind.has_servers)


class StreamFeed(Feed):
    """Feed of a stream: every task reads the same batches and slices its replicas' parts.

    The user's batch is the global batch, for any number of tasks. Under ps each worker repeatedly
    reads its own part of a training stream, so examples are not used exactly once.
    """

    source: StreamSource

    def __init__(self, source: StreamSource, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self._reading = reading_of(self._job, self.seed)
        self.may_be_empty = self._job.num_replicas > 1
        self.in_order = not self.order.shuffle
        self._read: Any = None
        if self._job.num_tasks > 1:  # the tasks compare their batches
            unknown = self.source.num_batches is None and not self.source.is_endless
            self.ends = [] if unknown and self.order.batches is None else None
            with tf.init_scope(), tf.device("/CPU:0"):
                self._read = ResourceVariable(0, trainable=False, dtype=tf.int64)

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """Return the parts as in `Feed`. Called eagerly."""
        return self._dataset(first, last, self._reading)

    def first_batch(self) -> Any:
        """Return the first part as in `Feed`, without writes to the user's caches."""
        reading = dataclasses.replace(self._reading, peek=True)
        return next(iter(self._dataset(0, 1, reading)))[0].data

    def _dataset(self, first: int, last: int, reading: Reading) -> tf.data.Dataset:
        batches = _from_step(first, self._batches(reading), self._read).take(last - first)
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(first, last), batches))
        if self._read is not None and not reading.peek:
            self._read.assign(0)
            if self.ends is not None:
                self.ends = []
            numbered = numbered.map(_plain(partial(self._noted, first)))
        return numbered.map(_plain(self._parts)).prefetch(_AHEAD_STEPS)

    def _batches(self, reading: Reading) -> tf.data.Dataset:
        """Return the endless dataset of this task's batches."""
        batches = read(self.source.dataset_for(), reading)
        if self.ends is not None and not reading.peek:
            batches = batches.concatenate(self._noted_end(batches))
        return self._endless(batches)

    def _noted_end(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Return an empty dataset that records when it is reached."""

        def end(_: tf.Tensor) -> tf.data.Dataset:
            none = tf.numpy_function(self._note_end, [self._read.read_value()], tf.int64)
            return batches.take(none)

        return tf.data.Dataset.range(1).flat_map(_plain(end))

    def _note_end(self, count: np.ndarray) -> np.int64:
        if self.ends is not None:
            self.ends.append(int(count))
        return np.int64(0)

    def _noted(self, first: int, step: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        """Count a batch, and record its digests."""
        noted = [self._read.assign(step + 1, read_value=False), self._digested(first, step, batch)]
        with tf.control_dependencies(noted):
            return tf.identity(step), batch

    def _digested(self, first: int, step: tf.Tensor, batch: Any) -> tf.Tensor:
        leaves, targets = leaves_of(batch), leaves_of(unpack(batch)[1])

        def note() -> tf.Tensor:
            note_of = partial(self._note, len(leaves))
            return tf.numpy_function(note_of, [step, *leaves, *targets], tf.bool)

        return tf.cond(digest_is_due(step, first=first), note, lambda: tf.constant(True))

    def _note(self, count: int, step: np.ndarray, *arrays: np.ndarray) -> np.bool_:
        self.digests[int(step)] = digest_of(arrays[:count]), digest_of(arrays[count:])
        return np.True_

    def worker_dataset(self) -> tf.data.Dataset:
        """Return all batches if their order matters, else the worker's batches."""
        with tf.init_scope():
            graph = serialized(self.source.dataset_for(), self._reading)
        batches = self._endless(_from_graph(graph, self.source))
        if self.in_order:
            return batches
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        return batches.shard(self._job.num_workers, index)

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """Return a function that makes the parts, as in `Feed`."""
        return lambda step: self._whole(step, given.get_next())

    def _endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        batches = self.order.batches
        if batches is None:
            return dataset if self.source.is_endless else dataset.repeat()
        return dataset.take(batches).cache().repeat()  # the same batches in each shuffled pass

    def _parts(self, step: tf.Tensor, data: Any) -> tuple[Part, ...]:
        whole = self._whole(step, data)
        if self._job.num_replicas == 1:
            return (whole,)
        # Every batch is checked, because zipped datasets may differ only in their last batches.
        parts = [part for part in tf.nest.flatten(whole.data) if part is not None]
        rows = tf.stack([tf.shape(part, tf.int64)[0] for part in parts])
        even = tf.debugging.assert_equal(rows, rows[0], "the parts of a batch differ in their rows")
        with tf.control_dependencies([even]):
            whole = whole._replace(count=tf.identity(whole.count))
        return tuple(self._part(whole, replica) for replica in self._job.replica_ids)

    def _part(self, whole: Part, replica: int) -> Part:
        low, high = share_of(replica, parts=self._job.num_replicas, size=whole.count)
        stop = tf.maximum(high, low + 1)
        data = rows_of(whole.data, low, stop)
        share = (high - low) / tf.maximum(whole.count, 1)  # a batch may be empty
        return Part(data, tf.cast(share, tf.float32), high - low)

    def _whole(self, number: tf.Tensor, data: Any) -> Part:
        """Return the part of a whole batch. `number` is unique among the run's batches."""
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        ids = ids_of_rows(number, tf.range(size), batch=self.plan.global_batch_size)
        data = self._transformed(data, ids, 0)
        # Count again: a transform may remove rows.
        size = tf.cast(tf.shape(_first(data))[0], tf.int64)
        return Part(data, tf.constant(1.0), size)


class InputFunctionFeed(StreamFeed):
    """Feed of the user's input function. Each replica uses whole batches."""

    source: InputFunctionSource  # type: ignore[assignment]
    counts_fractions = True

    def __init__(self, source: Any, plan: EpochPlan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self.may_be_empty = self.in_order = False
        self._read = self.ends = None
        few = self.order.batches and self.order.batches * len(self._job.replica_ids)
        self.order = dataclasses.replace(self.order, batches=few)  # a step uses one for each device

    def _batches(self, reading: Reading) -> tf.data.Dataset:
        """As in `StreamFeed`. A task's devices get the batches of one dataset in turn."""
        job = self._job
        context = tf.distribute.InputContext(
            num_input_pipelines=job.num_tasks,
            input_pipeline_id=job.task_index,
            num_replicas_in_sync=job.num_replicas,
        )
        batches = self._endless(read(self.source.dataset_for(context), reading))
        return _in_groups(batches, len(job.replica_ids))

    def _parts(self, step: tf.Tensor, data: Any) -> tuple[Part, ...]:
        job = self._job
        numbers = [step * job.num_replicas + replica for replica in job.replica_ids]
        return tuple(self._whole(n, d) for n, d in zip(numbers, data, strict=True))

    def worker_dataset(self) -> tf.data.Dataset:
        """Return the function's dataset for this worker."""
        context = tf.distribute.InputContext(
            num_input_pipelines=self._job.num_workers,
            input_pipeline_id=(tf.distribute.coordinator.experimental_get_current_worker_index()),
            num_replicas_in_sync=1,
        )
        return self._endless(self.source.dataset_for(context))


def _from_step(first: int, batches: tf.data.Dataset, count: Any) -> tf.data.Dataset:
    """Skip the batches before step `first` by reading them, and report progress.

    Skipping may take longer than the hang timeout. `count`, if given, counts the skipped batches.
    """
    if first == 0:
        return batches

    def report() -> tf.Tensor:
        return tf.numpy_function(_go_on, [], tf.bool)

    def is_left(number: tf.Tensor, _: Any) -> tf.Tensor:
        is_due = (number < first) & (number % _REPORT_EVERY_BATCHES == 0)
        noted = [] if count is None else [count.assign(number + 1, read_value=False)]
        noted.append(tf.cond(is_due, report, lambda: tf.constant(True)))
        with tf.control_dependencies(noted):
            return number >= first

    return batches.enumerate().filter(_plain(is_left)).map(_plain(lambda _, batch: batch))


def _go_on() -> np.bool_:
    phases.go_on()
    return np.True_


def _in_groups(batches: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Return tuples of `size` consecutive batches, each with its own shape.

    Separate iterators over the dataset would not work: a shuffle gives each iterator another order.
    """
    alone = tf.data.Dataset.zip((batches,))
    if size == 1:
        return alone

    @_plain
    def group(window: Any) -> tf.data.Dataset:
        whole = tf.data.Dataset.zip(window)
        return tf.data.Dataset.zip(tuple(whole.skip(i).take(1) for i in range(size)))

    return alone.window(size, drop_remainder=True).flat_map(group)


def _from_graph(graph: tf.Tensor, source: Any) -> tf.data.Dataset:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return tf.data.experimental.from_variant(variant, structure=source.batched_spec)


def rows_of(batch: Any, start: Any, stop: Any) -> Any:
    """Return rows ``[start, stop)`` of each tensor in a nest, also if ragged or sparse."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, tf.SparseTensor):
            return None if leaf is None else leaf[start:stop]
        rest = tf.shape(leaf, tf.int64)[1:]
        first = tf.concat([[start], tf.zeros_like(rest)], 0)
        return tf.sparse.slice(leaf, first, tf.concat([[stop - start], rest], 0))

    return tf.nest.map_structure(rows, batch)


def _first(data: Any) -> tf.Tensor:
    return next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
