"""Sources that read by index in Python: map-style datasets and Keras' PyDataset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.arrays import dtype_of, require_dense
from tfdist.data.source import Nest, Source, Transform
from tfdist.errors import UsageError, require

_NUMBER = int | float | str | bytes | np.generic


class PythonSource(Source):
    """Collection with `__len__` and `__getitem__`. An item is an example: ``(x, y)`` or a dict.

    If the collection has `__getitems__(indices)`, as in TFDS `as_data_source` and torch, the source
    calls this method. `convert` converts an item to ``(x, y)``. All examples have the same shape.
    Floating point values become `keras.config.floatx()`. Several threads read at the same time.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        *,
        convert: Callable[[Any], Nest] | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.kind = f"Python-indexed, {type(examples).__name__}"
        self._examples = examples
        self._convert = convert or (lambda example: example)
        self.num_examples: int = len(examples)
        self.element_spec = tf.nest.map_structure(_leaf_spec, self._example(examples[0]))
        self.transform = transform

    def fetch(self, indices: np.ndarray[Any, Any]) -> Nest:
        """Return the examples at `indices` (int64[b], b at least 1) as arrays [b, ...]."""
        wanted = [int(index) for index in indices]
        get_many = getattr(self._examples, "__getitems__", None)
        found = get_many(wanted) if get_many else [self._examples[index] for index in wanted]
        examples = [self._example(item) for item in found]
        for index, example in zip(wanted, examples, strict=True):
            _require_structure(example, self.element_spec, where=f"example {index}")
        columns = zip(*map(tf.nest.flatten, examples), strict=True)
        specs = tf.nest.flatten(self.element_spec)
        stacked = [
            _stack(leaves, spec, wanted) for leaves, spec in zip(columns, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self.element_spec, stacked)

    def _example(self, item: Any) -> Nest:
        example = self._convert(item)
        return _without_lists(tuple(example) if isinstance(example, list) else example)


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`: each item is a batch from the user's code.

    `num_examples` is unknown, so the training loop counts batches. Shuffling permutes the batches
    of a pass.
    """

    def __init__(
        self, dataset: keras.utils.PyDataset, *, transform: Transform | None = None
    ) -> None:
        self.kind = f"Python-indexed, {type(dataset).__name__}"
        self._dataset = dataset
        self.transform = transform
        require(
            self.num_batches != 0,
            type(dataset).__name__,
            "the PyDataset has no batches",
            fix="check __len__ (or num_batches) of the PyDataset",
            code="no-data",
        )
        self.element_spec = None
        first = [self.fetch_batch(index) for index in range(min(2, self.num_batches or 2))]
        if len(first) > 1:
            _require_structure(first[1], first[0], where=f"{type(dataset).__name__}[1]")
        self.element_spec = tf.nest.map_structure(_batch_leaf_spec, *first)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in a pass, or `None` for an endless PyDataset."""
        count = self._dataset.num_batches
        return None if count is None else int(count)

    @property
    def workers(self) -> int:
        """Number of threads that may call `fetch_batch`, set by the user."""
        return max(1, int(self._dataset.workers))

    def fetch_batch(self, index: int) -> Nest:
        """Return batch `index` as NumPy arrays: a dict, or a tuple as Keras packs it."""
        where = f"{type(self._dataset).__name__}[{index}]"
        batch = self._dataset[index]
        batch = _without_lists(tuple(batch) if isinstance(batch, list) else batch)
        if isinstance(batch, np.ndarray):
            batch = (batch,)
        batch = tf.nest.map_structure(functools.partial(_as_array, where=where), batch)
        if self.element_spec is not None:
            _require_structure(batch, self.element_spec, where=where)
            for leaf, spec in zip(*map(tf.nest.flatten, (batch, self.element_spec)), strict=True):
                if leaf is not None and spec is not None:
                    require(
                        leaf.ndim and len(leaf),
                        where,
                        "the batch has no examples",
                        fix="leave the empty batch out of __len__ (or num_batches)",
                        code="no-data",
                    )
                    _require_type(leaf, _numpy_dtype(spec), where=where)
        return batch

    def on_epoch_begin(self, num_batches: int | None) -> None:
        """Call `on_epoch_begin` of the user's dataset, if it still has `num_batches` batches."""
        require(
            self.num_batches == num_batches,
            type(self._dataset).__name__,
            f"the number of batches changes from {num_batches} to {self.num_batches} within a run",
            fix="keep the number of batches, or call fit once for each number",
            code="shapes-differ",
        )
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call `on_epoch_end` of the user's dataset."""
        self._dataset.on_epoch_end()


def _without_lists(nest: Any) -> Any:
    """Convert lists of numbers to arrays and other lists to tuples: tf.data would stack lists."""
    if isinstance(nest, dict):
        return {key: _without_lists(part) for key, part in nest.items()}
    if isinstance(nest, list) and all(isinstance(n, _NUMBER) for n in nest):
        return np.asarray(nest)
    if isinstance(nest, list | tuple) and not hasattr(nest, "_fields"):
        return tuple(_without_lists(part) for part in nest)
    return nest


def _as_array(leaf: Any, *, where: str) -> np.ndarray[Any, Any] | None:
    require_dense(leaf, where=where)
    return None if leaf is None else np.asarray(leaf)


def _leaf_spec(leaf: Any) -> tf.TensorSpec | None:
    if leaf is None:
        return None
    array = np.asarray(leaf)
    dtype = dtype_of(array)
    return tf.TensorSpec(array.shape, keras.config.floatx() if dtype.is_floating else dtype)


def _batch_leaf_spec(*leaves: np.ndarray[Any, Any] | None) -> tf.TensorSpec | None:
    first = leaves[0]
    if first is None:
        return None
    shapes = [tf.TensorShape(leaf.shape[1:]) for leaf in leaves if leaf is not None]
    shape = functools.reduce(tf.TensorShape.most_specific_compatible_shape, shapes)
    return tf.TensorSpec(shape, dtype_of(first))


def _numpy_dtype(spec: tf.TensorSpec) -> Any:
    return object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype


def _stack(
    leaves: tuple[Any, ...], spec: tf.TensorSpec | None, indices: list[int]
) -> np.ndarray[Any, Any] | None:
    if spec is None:
        return None
    result = np.empty((len(leaves), *spec.shape), _numpy_dtype(spec))
    for row, leaf in enumerate(leaves):
        array = np.asarray(leaf)
        if array.shape != tuple(spec.shape):
            raise UsageError(
                f"example {indices[row]}",
                f"the shape is {array.shape}, but the first example has {tuple(spec.shape)}",
                fix="pad or crop the examples to the same shape",
                code="shapes-differ",
            )
        _require_type(array, result.dtype, where=f"example {indices[row]}")
        result[row] = array if array.ndim else array[()]
    return result


def _require_structure(nest: Nest, first: Nest, *, where: str) -> None:
    try:
        tf.nest.assert_same_structure(nest, first)
    except (TypeError, ValueError):
        parts = [keras.tree.map_structure(lambda _: "...", each) for each in (nest, first)]
        raise UsageError(
            where,
            f"the parts are {parts[0]}, but the first item has {parts[1]}",
            fix="return the same parts for each index",
            code="shapes-differ",
        ) from None


def _require_type(array: np.ndarray[Any, Any], dtype: Any, *, where: str) -> None:
    fits = np.can_cast(array.dtype, dtype, "same_kind")
    if fits and np.dtype(dtype).kind in "iu" and array.dtype != dtype:
        fits = bool((array.astype(dtype) == array).all())
    require(
        fits,
        where,
        f"the numbers are {array.dtype} and do not fit into {np.dtype(dtype)}, the type of the "
        "first item",
        fix="convert all items to the same type, for example with np.float32(...)",
        code="shapes-differ",
    )
