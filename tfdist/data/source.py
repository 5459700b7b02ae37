"""Source interface: examples by index, or batches of a stream.

There are three kinds. A *graph* source reads examples by index in graph operations, under every
strategy. A *python* source reads examples or batches by index in Python, except under ps. A
*stream* source reads the user's batches in sequence.
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
    """Change of a batch with random draws per example, which do not depend on the batch."""

    def __call__(
        self, batch: Nest, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int
    ) -> Nest:
        """Return the changed batch. `example_ids` is int64[b], `epoch` is int64[] or [b]."""


class Source(abc.ABC):
    """Base class of sources. `transform` is applied to each batch after the read."""

    kind = "data"
    transform: Transform | None = None
    num_examples: int | None = None
    """Number of examples in a pass, or `None` if unknown."""
    element_spec: Nest
    """Nest of `tf.TensorSpec` of one example before the transform, with `None` for absent parts."""

    def describe(self) -> str:
        """Return the kind and the number of examples, as a line for the log."""
        count = "" if self.num_examples is None else f": {self.num_examples:,} examples"
        return f"{self.kind}{count}"

    def transformed(
        self, batch: Nest, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int
    ) -> Nest:
        """Return the batch after this source's transform, or unchanged without a transform."""
        if self.transform is None:
            return batch
        return self.transform(batch, example_ids=example_ids, epoch=epoch, seed=seed)


class GraphSource(Source):
    """Base class of sources that read examples by index in graph operations."""

    @abc.abstractmethod
    def gather(self, indices: tf.Tensor, *, arrays: Nest = None) -> Nest:
        """Return the examples at `indices` (int64[b], b may be 0), batched along axis 0.

        Without `arrays`, the graph captures the data of this process and does not copy them. With
        `arrays`, it reads these arrays: the result of `arrays()`, directly or from a dataset.
        """

    @abc.abstractmethod
    def arrays(self) -> Nest:
        """Return the nest of tensors that `gather` reads, for another process.

        Call it in the dataset function of each ps worker, for example as
        ``Dataset.from_tensors(source.arrays()).repeat()``. Arrays in memory are sent to the worker
        once. The worker maps a mapped file from the same path.
        """


def preprocessed(source: Source, preprocess: Callable[..., Nest] | None) -> Source:
    """Return a copy of the source that applies `preprocess` after the transform.

    `preprocess` runs in graph mode. It gets x, y and sample weights of a batch (`None` for absent
    parts) and returns them packed.
    """
    if preprocess is None:
        return source

    def transform(batch: Nest, **draws: Any) -> Nest:
        return preprocess(*unpack(source.transformed(batch, **draws)))

    found = copy.copy(source)
    found.transform = transform
    return found


def traced_transform(source: Source) -> Any:
    """Return the source's transform as a traced graph function of a batch and example ids.

    Any batch size works, unless the transform needs a fixed size. Then the trace has 8 rows.
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
    """Return the spec of a batch of any size after the source's transform."""
    if source.transform is None:
        return batch_spec(source.element_spec)

    def spec(tensor: Any) -> Any:
        if isinstance(tensor, tf.Tensor) and tensor.shape.rank:
            return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
        return None if tensor is None else tf.type_spec_from_value(tensor)

    return tf.nest.map_structure(spec, traced_transform(source).structured_outputs)


def batch_spec(element_spec: Nest, rows: int | None = None) -> Nest:
    """Return the spec of a batch before the transform, with `rows` examples or any number."""

    def batched(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        if not isinstance(spec, tf.TensorSpec):
            return spec  # None, ragged or sparse: these have no spec of one example
        return tf.TensorSpec(None if spec.shape.rank is None else [rows, *spec.shape], spec.dtype)

    return tf.nest.map_structure(batched, element_spec)


def lean_options() -> tf.data.Options:
    """Return the options for a dataset that maps steps to batches of captured arrays.

    TensorFlow's default optimizations copy every captured array once per dataset: an array of
    2.3 GB took 3 s. They also made the pipeline two to four times slower. Keras' array adapter
    turns them off for the same reason.
    """
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def unpack(batch: Nest) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)` of a batch, with `None` for absent parts."""
    return keras.utils.unpack_x_y_sample_weight(batch)
