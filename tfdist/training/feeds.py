"""Which feed a source gets, and how large its batches are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.data.source import GraphSource, Source, batch_spec
from tfdist.training.epochs import EpochPlan
from tfdist.training.feed import Feed, GraphFeed, Layout, Order

_DEFAULT_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A source in numbers.

    Attributes:
      batch: examples of a global batch.
      examples: examples in one pass, None where it is not known.
      spec: nest of `tf.TensorSpec` of a batch.
    """

    batch: int
    examples: int | None
    spec: Any


def sizes_of(source: Source, *, batch_size: int | None, layout: Layout) -> Sizes:
    """Returns the sizes of a source: of one by index as asked, of batches as they come."""
    batch = batch_size or _DEFAULT_BATCH_SIZE
    return Sizes(batch=batch, examples=source.num_examples, spec=batch_spec(source.element_spec))


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
    if isinstance(source, GraphSource):
        return GraphFeed(source, plan, layout=layout, seed=seed, order=order, after=after)
    raise TypeError(type(source).__name__)
