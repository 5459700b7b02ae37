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
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.data.arrays import ArraySource
from tfdist.data.order import example_at, example_at_numpy
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.source import GraphSource, Source, batch_spec, lean_options, unpack
from tfdist.data.stream import StreamSource
from tfdist.data.stream_graph import random_states
from tfdist.errors import UsageError
from tfdist.strategy import Job, broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.training.epochs import EpochPlan, share_of

AHEAD_STEPS = 2
DIGEST_EVERY_STEPS = 512
Digest = tuple[int, int]
"""Of a whole batch, and of its targets alone; 64 bits each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
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

        Elements are tuples, one ``(data, share, count)`` for each replica of this task, with
        `Part.examples` after them where the feed records.
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
        return next(iter(self.dataset(0, 1)))[0][0]

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
        def parts(step: tf.Tensor) -> tuple[tuple[Any, ...], ...]:
            return tuple(_as_element(part) for part in self.at(step, arrays))

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
        return lambda _: Part(*batches.get_next()[0])

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


def _as_element(part: Part) -> tuple[Any, ...]:
    element = (part.data, part.share, part.count)
    return element if part.examples is None else (*element, part.examples)


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
    def _load(self, step: int) -> tuple[Any, ...]:
        """Returns, for each replica of this task: leaves, ids, passes, share, count."""

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

    def _packed(self, part: tuple[Any, ...]) -> tuple[Any, ...]:
        *leaves, ids, passes, share, count = part
        rest = iter(leaves)
        flat = [None if s is None else next(rest) for s in tf.nest.flatten(self._spec)]
        data = tf.nest.pack_sequence_as(self._spec, flat)
        data = self.source.transformed(data, example_ids=ids, epoch=passes, seed=self._seed)
        element = ((self._after(data) if self._after else data), share, count)
        return (*element, (ids, passes)) if self.records else element


class IndexedFeed(PythonFeed):
    """Feed by index: each task reads the examples of its own replicas."""

    source: PythonSource
    can_record = True

    def _load(self, step: int) -> tuple[Any, ...]:
        span = self.plan.span(step)
        parts = []
        for replica in self._job.replica_ids:
            low, high = share_of(replica, parts=self._job.num_replicas, size=len(span))
            positions = span.start + np.arange(low, max(high, low + 1))
            ids = example_at_numpy(
                positions,
                num_examples=self.order.examples or 1,
                seed=self._seed,
                shuffle=self.order.shuffle,
            )
            passes = positions // (self.order.examples or 1)
            leaves = _leaves(self.source.fetch(ids))
            share = np.float32((high - low) / len(span))
            parts.append((*leaves, ids, passes, share, np.int64(high - low)))
        return tuple(parts)


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

    def _load(self, step: int) -> tuple[Any, ...]:
        batches = self._batches
        index, passes = step, 0
        if batches:
            passes = step // batches
            at = np.array([step])
            index = int(
                example_at_numpy(
                    at, num_examples=batches, seed=self._seed, shuffle=self.order.shuffle
                )[0]
            )
        batch = self.source.fetch_batch(index)
        if self._job.num_tasks > 1 and digest_is_due(step, first=self._first):
            self.digests[step] = digests_of(batch)
        leaves = _leaves(batch)
        size = len(leaves[0])
        parts = []
        for replica in self._job.replica_ids:
            low, high = share_of(replica, parts=self._job.num_replicas, size=size)
            start = min(low, size - 1)
            rows = slice(start, max(high, start + 1))
            numbers = np.arange(rows.start, rows.stop)
            ids = ids_of_rows(index, numbers, batch=self.plan.global_batch_size)
            share = np.float32((high - low) / size)
            cut = [leaf[rows] for leaf in leaves]
            parts.append((*cut, ids, np.full(len(ids), passes), share, np.int64(high - low)))
        return tuple(parts)


def _leaves(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


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
