"""Batches one after the other: a `tf.data.Dataset`, or a function that makes one per task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.none_tensor import NoneTensorSpec

from tfdist.data.source import Nest, Source, Transform
from tfdist.errors import UsageError


class _BatchSource(Source):
    """Batches of a `tf.data.Dataset`; `_whole` is the one that a single pipeline would read."""

    _whole: tf.data.Dataset

    @property
    def num_batches(self) -> int | None:
        """The number of batches in one pass, or None where it is unknown or endless."""
        return self._cardinality if self._cardinality >= 0 else None

    @property
    def is_endless(self) -> bool:
        """Whether the dataset says that it never ends (`repeat()` without a count)."""
        return self._cardinality == tf.data.INFINITE_CARDINALITY

    @functools.cached_property
    def _cardinality(self) -> int:
        with tf.init_scope():  # a feed may ask while a function is traced
            return int(self._whole.cardinality())

    @functools.cached_property
    def element_spec(self) -> Nest:
        """Nest of specs of one example: those of a batch without their first axis."""
        return tf.nest.map_structure(_without_batch_axis, self.batched_spec)

    @property
    def batched_spec(self) -> Nest:
        """The dataset's own specs, batch axis included."""
        return self._whole.element_spec


class StreamSource(_BatchSource):
    """A `tf.data.Dataset` of batches, as the user shuffled and batched it.

    A run resumes it by reading again what was read before; that is exact where the dataset gives
    the same batches each time. Raises `UsageError` where its elements are not batches.
    """

    def __init__(self, dataset: tf.data.Dataset, *, transform: Transform | None = None) -> None:
        self._whole = _of_batches(dataset)
        self.transform = transform

    def dataset_for(self, context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Return the dataset; every task gets the whole of it and takes its share of a batch."""
        del context
        return self._whole

    def describe(self) -> str:
        """Return one line for the log."""
        count = "endless" if self.is_endless else f"{self.num_batches or 'an unknown number of'}"
        return f"stream, tf.data.Dataset: {count} batches; resumes by reading again"


class InputFunctionSource(_BatchSource):
    """A function of `tf.distribute.InputContext` that returns the batches of one task.

    The function decides what a task gets. It is called in every task that trains, and once more
    with a context of a single pipeline where the shapes are asked for.
    """

    def __init__(
        self,
        function: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        *,
        transform: Transform | None = None,
    ) -> None:
        self._function = function
        self.transform = transform

    def dataset_for(self, context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        """Return what the function gives for this context; raise `UsageError` if no dataset."""
        dataset = self._function(context or tf.distribute.InputContext())
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(
                self._name,
                received=f"a {type(dataset).__name__} from the input function",
                expected="a tf.data.Dataset of batches",
                fix="return the dataset; fit calls the function with an InputContext",
                code="unsupported-data",
            )
        return dataset

    def describe(self) -> str:
        """Return one line for the log."""
        return f"stream, input function {self._name}: resumes by reading again"

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    @functools.cached_property
    def _whole(self) -> tf.data.Dataset:
        with tf.init_scope():
            return _of_batches(self.dataset_for())


def captured_resources(dataset: Any) -> Iterator[tf.Tensor]:
    """Yield the variables and tables that its functions capture, those of its inputs first."""
    for parent in getattr(dataset, "_inputs", list)():
        yield from captured_resources(parent)
    for wrapper in getattr(dataset, "_functions", list)():
        for tensor in getattr(getattr(wrapper, "function", None), "captured_inputs", ()):
            if tensor.dtype == tf.resource:
                yield tensor


def _of_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    for leaf in tf.nest.flatten(dataset.element_spec):
        shape = getattr(leaf, "shape", None)
        if shape is not None and shape.rank == 0:
            raise UsageError(
                "tf.data.Dataset",
                received=f"elements {dataset.element_spec}",
                expected="batches: a first axis of examples in every part",
                fix="end the dataset with .batch(global_batch_size)",
                code="not-batched",
            )
    return dataset


def _without_batch_axis(spec: Any) -> Any:
    if isinstance(spec, NoneTensorSpec):
        return None
    if isinstance(spec, tf.TensorSpec):
        shape = spec.shape[1:] if spec.shape.rank is not None else spec.shape
        return tf.TensorSpec(shape, spec.dtype)
    return spec
