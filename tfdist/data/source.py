"""Source interface: examples by index, or batches of a stream.

There are three kinds. *graph*: any example by its index in pure graph operations, under every
strategy. *python*: any example by its index in Python; not under ps. *stream*: batches one after
the other, as the user made them.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

_ROWS = 8
Nest = Any
"""A tensor, array or spec, or a tuple or dict of them: `x`, `(x, y)`, `(x, y, sample_weight)`."""


class Transform(Protocol):
    """Changes the images of a batch, each by its own draw, whatever batch it is in."""

    def __call__(
        self, batch: Nest, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int
    ) -> Nest:
        """Return the batch with `x` changed; `example_ids` int64[b], `epoch` int64[] or [b]."""


class Source(abc.ABC):
    """Examples and where they come from; `transform` is applied to each batch after it is read."""

    kind = "data"
    transform: Transform | None = None
    num_examples: int | None = None
    """The number of examples in one pass, or None where it is not known."""
    element_spec: Nest
    """Nest of `tf.TensorSpec` of one example, before the transform; None where y is absent."""

    def describe(self) -> str:
        """Return one line for the log: the kind and the number of examples."""
        count = "" if self.num_examples is None else f": {self.num_examples:,} examples"
        return f"{self.kind}{count}"

    def transformed(
        self, batch: Nest, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int
    ) -> Nest:
        """Return the batch after this source's transform, or as it is where there is none."""
        if self.transform is None:
            return batch
        return self.transform(batch, example_ids=example_ids, epoch=epoch, seed=seed)


class GraphSource(Source):
    """Examples by index in pure graph operations."""

    @abc.abstractmethod
    def gather(self, indices: tf.Tensor, *, arrays: Nest = None) -> Nest:
        """Return the examples at `indices` (int64[b], b may be 0), batched along axis 0.

        Without `arrays` the data held by this process are captured, not copied into the graph.
        With `arrays` (what `arrays()` gave, perhaps through a dataset) only those are read.
        """

    @abc.abstractmethod
    def arrays(self) -> Nest:
        """Return the nest of tensors that `gather` reads, for a process that is not this one.

        To be called inside the dataset function of each ps worker
        (``Dataset.from_tensors(source.arrays()).repeat()``): arrays in memory are then sent to
        the worker once, and a mapped file is mapped by the worker itself, under the same path.
        """


def preprocessed(source: Source, preprocess: Callable[..., Nest] | None) -> Source:
    """Return a source whose batches, as its transform leaves them, are preprocessed besides.

    `preprocess` gets x, y and sample weights of a batch, None for what it does not have, in graph,
    and returns them packed.
    """
    if preprocess is None:
        return source

    def transform(batch: Nest, **draws: Any) -> Nest:
        return preprocess(*unpack(source.transformed(batch, **draws)))

    found = copy.copy(source)
    found.transform = transform
    return found


def traced_transform(source: Source) -> Any:
    """Return the source's transform as a function of a batch and ids, in graph, traced.

    For batches of any size, or of one where it asks for that.
    """

    @tf.function(autograph=False)
    def transform(batch: Nest, ids: tf.Tensor) -> Nest:
        epoch = tf.constant(0, tf.int64)
        return source.transformed(batch, example_ids=ids, epoch=epoch, seed=0)

    try:
        ids = tf.TensorSpec([None], tf.int64)
        return transform.get_concrete_function(batch_spec(source.element_spec), ids)
    except Exception as error:
        try:
            ids = tf.TensorSpec([_ROWS], tf.int64)
            return transform.get_concrete_function(batch_spec(source.element_spec, _ROWS), ids)
        except Exception:
            raise error from None


def spec_of_batches(source: Source) -> Nest:
    """Return the spec of a batch, of any size, as the source's transform leaves it."""
    if source.transform is None:
        return batch_spec(source.element_spec)

    def spec(tensor: Any) -> Any:
        if isinstance(tensor, tf.Tensor) and tensor.shape.rank:
            return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
        return None if tensor is None else tf.type_spec_from_value(tensor)

    return tf.nest.map_structure(spec, traced_transform(source).structured_outputs)


def batch_spec(element_spec: Nest, rows: int | None = None) -> Nest:
    """Return the spec of a batch of such examples, of any size or so many, before the transform."""

    def batched(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        if not isinstance(spec, tf.TensorSpec):
            return spec  # none, or ragged or sparse, whose examples are not described one by one
        return tf.TensorSpec([rows, *spec.shape], spec.dtype)

    return tf.nest.map_structure(batched, element_spec)


def lean_options() -> tf.data.Options:
    """Return the options for a dataset that maps steps to batches of captured arrays.

    TensorFlow's default rewriting of a dataset copies every captured array once for each dataset
    (measured: 2.3 GB and 3 s for an array of that size) and made such a pipeline two to four
    times slower. Keras' array adapter turns it off for the same reason.
    """
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def unpack(batch: Nest) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)` of a batch, None for what it does not have."""
    return keras.utils.unpack_x_y_sample_weight(batch)
