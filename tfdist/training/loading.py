"""Feeds from Python: examples or whole batches by index, read ahead by threads."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.order import example_at_numpy
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.source import batch_spec
from tfdist.training.epochs import EpochPlan, share_of
from tfdist.training.feed import AHEAD_STEPS, Feed, Layout, Order, Part, digest_is_due, digest_of

_THREADS = 2


class PythonFeed(Feed):
    """Feeds whose batches Python code makes; not under ps, where Python runs only in the chief."""

    direct = False

    def __init__(
        self,
        source: Any,
        plan: EpochPlan,
        *,
        layout: Layout,
        seed: int,
        order: Order,
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source = source
        self.plan = plan
        self.digests = {}
        self.may_be_empty = plan.smallest_step < layout.num_replicas
        self._layout = layout
        self._seed = seed
        self._order = order
        self._after = after
        self._spec = batch_spec(source.element_spec)

    def dataset(self, first: Any, last: Any) -> tf.data.Dataset:
        """As in `Feed`; read ahead by threads, delivered in order."""
        leaves = [spec for spec in tf.nest.flatten(self._spec) if spec is not None]
        one = (*leaves, tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64),
               tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))  # fmt: skip
        signature = tuple(one for _ in self._layout.replica_ids)
        raw = tf.data.Dataset.from_generator(
            lambda: self._read(int(first), int(last)), output_signature=signature
        )
        packed = tf.autograph.experimental.do_not_convert(
            lambda *parts: tuple(map(self._packed, parts))
        )
        return raw.map(packed).prefetch(AHEAD_STEPS)

    def worker_parts(self, given: Any, first: Any, last: Any) -> Callable[[tf.Tensor], Part]:
        """Python code does not run on a ps worker."""
        raise TypeError("a Python-indexed source under ps")

    def worker_dataset(self) -> tf.data.Dataset:
        """Python code does not run on a ps worker."""
        raise TypeError("a Python-indexed source under ps")

    @abc.abstractmethod
    def _load(self, step: int) -> tuple[Any, ...]:
        """Returns, for each replica of this task: leaves, ids, passes, share, count."""

    def _read(self, first: int, last: int) -> Iterator[tuple[Any, ...]]:
        threads = self._threads
        self._first = first
        waiting: collections.deque[Future[tuple[Any, ...]]] = collections.deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="tfdist-data") as pool:
            for step in range(first, last):
                if self._begins_pass(step):
                    while waiting:
                        yield waiting.popleft().result()
                    self._turn_pass(step)
                waiting.append(pool.submit(self._load, step))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    @property
    def _threads(self) -> int:
        return _THREADS

    def _begins_pass(self, step: int) -> bool:
        return False

    def _turn_pass(self, step: int) -> None:
        """Called between two passes, when nothing is being read."""

    def _packed(self, part: tuple[Any, ...]) -> tuple[Any, ...]:
        *leaves, ids, passes, share, count = part
        rest = iter(leaves)
        flat = [None if s is None else next(rest) for s in tf.nest.flatten(self._spec)]
        data = tf.nest.pack_sequence_as(self._spec, flat)
        data = self.source.transformed(data, example_ids=ids, epoch=passes, seed=self._seed)
        element = ((self._after(data) if self._after else data), share, count)
        return (*element, (ids, passes)) if self.records else element


class IndexedFeed(PythonFeed):
    """Each task reads the examples of its own replicas, by index."""

    source: PythonSource
    can_record = True

    def _load(self, step: int) -> tuple[Any, ...]:
        span = self.plan.span(step)
        parts = []
        for replica in self._layout.replica_ids:
            low, high = share_of(replica, parts=self._layout.num_replicas, size=span.size)
            positions = span.first_example + np.arange(low, max(high, low + 1))
            ids = example_at_numpy(
                positions,
                num_examples=self._order.examples or 1,
                seed=self._seed,
                shuffle=self._order.shuffle,
            )
            passes = positions // (self._order.examples or 1)
            leaves = _leaves(self.source.fetch(ids))
            share = np.float32((high - low) / span.size)
            parts.append((*leaves, ids, passes, share, np.int64(high - low)))
        return tuple(parts)


class BatchFeed(PythonFeed):
    """Each task reads whole batches of a PyDataset and takes its replicas' slices."""

    source: PyDatasetSource
    digests_cover_inputs = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.may_be_empty = True

    @property
    def _threads(self) -> int:
        return self.source.workers

    def _begins_pass(self, step: int) -> bool:
        batches = self._order.batches or self.source.num_batches
        return batches is not None and step % batches == 0

    def _turn_pass(self, step: int) -> None:
        if step:
            self.source.on_epoch_end()
        self.source.on_epoch_begin()

    def _load(self, step: int) -> tuple[Any, ...]:
        batches = self._order.batches or self.source.num_batches
        index, passes = step, 0
        if batches:
            passes = step // batches
            at = np.array([step])
            index = int(
                example_at_numpy(
                    at, num_examples=batches, seed=self._seed, shuffle=self._order.shuffle
                )[0]
            )
        batch = self.source.fetch_batch(index)
        if self._layout.num_tasks > 1 and digest_is_due(step, first=self._first):
            self.digests[step] = digest_of(batch)
        leaves = _leaves(batch)
        size = len(leaves[0])
        parts = []
        for replica in self._layout.replica_ids:
            low, high = share_of(replica, parts=self._layout.num_replicas, size=size)
            start = min(low, size - 1)
            rows = slice(start, max(high, start + 1))
            ids = index * self.plan.global_batch_size + np.arange(rows.start, rows.stop)
            share = np.float32((high - low) / size)
            cut = [leaf[rows] for leaf in leaves]
            parts.append((*cut, ids, np.full(len(ids), passes), share, np.int64(high - low)))
        return tuple(parts)


def _leaves(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
