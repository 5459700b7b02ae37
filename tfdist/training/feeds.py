"""Which feed a source gets, and how large its batches are."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.source import GraphSource, Source, batch_spec
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.stream_graph import Reading, read
from tfdist.errors import UsageError
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import Feed, GraphFeed, Layout, Order
from tfdist.training.loading import BatchFeed, IndexedFeed
from tfdist.training.streaming import InputFunctionFeed, StreamFeed

_LOG = logging.getLogger(__name__)
_DEFAULT_BATCH_SIZE = 32
_COUNTING = (
    "a dataset does not tell its length, and is read once to count its batches; steps_per_epoch "
    "(validation_steps, steps) or tf.data.experimental.assert_cardinality(n) saves that"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A source in numbers.

    Attributes:
      batch: examples of a global batch.
      examples: examples in one pass; a last batch that is smaller counts as whole where batches
        come ready. None where it is not known.
      spec: nest of `tf.TensorSpec` of a batch.
      ready: batches come ready, made by the user, and cannot be cut.
    """

    batch: int
    examples: int | None
    spec: Any
    ready: bool = False


def sizes_of(source: Source, *, batch_size: int | None, layout: Layout, count: int = -1) -> Sizes:
    """Returns the sizes of a source: of one by index as asked, of batches as they come.

    A stream of unknown length is read once to count its batches: up to `count` of them, -1 for all.
    """
    spec = batch_spec(source.element_spec)
    if isinstance(source, GraphSource | PythonSource):
        return Sizes(
            batch=batch_size or _DEFAULT_BATCH_SIZE, examples=source.num_examples, spec=spec
        )
    batch = _size_of_first(source, num_replicas=layout.num_replicas)
    batches = getattr(source, "num_batches", None)
    if batches is None and count and isinstance(source, StreamSource) and not source.is_endless:
        if layout.task_index == 0:
            _LOG.warning(_COUNTING)
        whole = read(source.dataset_for(), Reading(in_step=layout.num_tasks > 1))
        batches = int(whole.take(count).reduce(np.int64(0), lambda n, *_: n + 1))
    if batches == 0:
        raise UsageError(
            "data",
            received="a dataset without a batch",
            expected="at least one batch",
            fix="check the files it reads, and drop_remainder",
        )
    examples = None if batches is None else batches * batch
    return Sizes(batch=batch, examples=examples, spec=spec, ready=True)


def feed_for(
    source: Source,
    plan: EpochPlan,
    *,
    layout: Layout,
    seed: int,
    order: Order,
    after: Callable[[Any], Any] | None = None,
) -> Feed:
    """Makes the feed of a source for one run; `after` is applied to each batch, in graph."""
    kinds: tuple[tuple[type[Source], Any], ...] = (
        (GraphSource, GraphFeed),
        (PythonSource, IndexedFeed),
        (PyDatasetSource, BatchFeed),
        (InputFunctionSource, InputFunctionFeed),
        (StreamSource, StreamFeed),
    )
    feed = next(feed for kind, feed in kinds if isinstance(source, kind))
    made: Feed = feed(source, plan, layout=layout, seed=seed, order=order, after=after)
    return made


def _size_of_first(source: Any, *, num_replicas: int) -> int:
    if isinstance(source, PyDatasetSource):
        sizes = _lengths(source.fetch_batch(0))
    else:
        sizes = _lengths(source.batched_spec)
        if None in sizes:
            sizes = _lengths(next(iter(read(source.dataset_for(), Reading(peek=True))), None))
    if len(sizes) > 1 and num_replicas > 1 and not isinstance(source, InputFunctionSource):
        raise UsageError(
            "data",
            received=f"a batch whose parts have {', '.join(map(str, sorted(sizes)))} rows",
            expected="a row for each example in every part, as replicas divide a batch",
            fix="repeat in the data what belongs to all examples, or use strategy single",
        )
    return max(*sizes, 1) if sizes else 1


def _lengths(batch: Any) -> set[Any]:
    return {part.shape[0] for part in tf.nest.flatten(batch) if hasattr(part, "shape")}
