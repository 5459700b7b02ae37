"""Arrays as a source: in memory, or mapped from files if they are too large for memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.data_adapter_utils import is_scipy_sparse
from tensorflow.core.framework import attr_value_pb2

from tfdist.data.source import GraphSource, Nest, Transform
from tfdist.errors import UsageError, require
from tfdist.renamed import without_renamed


class ArraySource(GraphSource):
    """Arrays `[num_examples, ...]`, with the same arguments as `keras.Model.fit`.

    `x`, `y` and `sample_weight` are arrays, tensors, pandas frames, or tuples or dicts of them. As
    in Keras, floating point values become `keras.config.floatx()` and other values keep their type.
    `y` keeps the shape `(n,)`. An `np.memmap` is mapped from its file if possible. Raises
    `UsageError` if a value is not an array or if lengths differ.
    """

    kind = "arrays"

    @without_renamed("data.ArraySource")
    def __init__(
        self,
        x: Nest,
        y: Nest = None,
        *,
        sample_weight: Nest = None,
        transform: Transform | None = None,
    ) -> None:
        # TensorFlow's datasets would convert a list to a tensor.
        x, y, sample_weight = keras.tree.lists_to_tuples((x, y, sample_weight))
        sample_weight = _weight_per_output(y, sample_weight)
        parts = {"x": x, "y": y, "sample_weight": sample_weight}
        columns = {
            name: _map_present(functools.partial(_as_column, where=name), part)
            for name, part in parts.items()
        }
        self.transform = transform
        self.num_examples: int = _common_length(columns)
        packed = keras.utils.pack_x_y_sample_weight(*columns.values())
        self._columns = _map_present(_column, packed)
        self._present = [column for column in tf.nest.flatten(self._columns) if column is not None]
        self.element_spec = _map_present(lambda column: column.spec, self._columns)

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor, *, arrays: Nest = None) -> Nest:
        """Return the examples at `indices`: int64[b] -> nest of [b, ...]."""
        if arrays is None:
            arrays = _map_present(lambda column: column.held(), self._columns)

        def take(column: _Column | None, array: tf.Tensor) -> tf.Tensor | None:
            if column is None:
                return None
            return tf.cast(tf.gather(array, indices, axis=0), column.spec.dtype)

        # On the CPU, like the arrays: an accelerator would copy whole arrays for each batch.
        with tf.device("/device:CPU:*"):
            return tf.nest.map_structure(take, self._columns, arrays)

    @tf.autograph.experimental.do_not_convert
    def arrays(self) -> Nest:
        """Return the arrays as tensors. In a graph, operations map the files of mapped arrays."""
        return _map_present(lambda column: column.sent(), self._columns)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Column:
    """Array of examples: a tensor in memory or a mapped file, and the spec of an example."""

    spec: tf.TensorSpec
    tensor: tf.Tensor | None = None
    file: MappedFile | None = None

    def held(self) -> tf.Tensor:
        """Return the eager tensor of this process, created at the first call."""
        if self.tensor is None:
            assert self.file is not None
            with tf.init_scope(), tf.device("/CPU:0"):
                self.tensor = tf.function(MappedFile.mapped, autograph=False)(self.file)
        return self.tensor

    def sent(self) -> tf.Tensor:
        if self.file is not None and not tf.executing_eagerly():
            return self.file.mapped()
        return self.held()


def _column(leaf: Any) -> _Column:
    """Return an array's column: mapped from its file if possible, otherwise in memory."""
    dtype = dtype_of(leaf)
    if dtype.is_floating:
        dtype = tf.as_dtype(keras.config.floatx())
    spec = tf.TensorSpec(leaf.shape[1:], dtype)
    file = of_memmap(leaf) if isinstance(leaf, np.memmap) else None
    if file is not None:
        return _Column(file=file, spec=spec)
    with tf.init_scope(), tf.device("/CPU:0"):
        if not isinstance(leaf, np.ndarray):
            return _Column(tensor=tf.cast(tf.identity(leaf), dtype), spec=spec)
        array = leaf if dtype == tf.string else leaf.astype(dtype.as_numpy_dtype, copy=False)
        return _Column(tensor=tf.constant(array, dtype), spec=spec)


def _map_present(function: Callable[[Any], Any], nest: Nest) -> Nest:
    """Apply `function` to the leaves of a nest that are not `None`."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), nest)


def _weight_per_output(y: Nest, sample_weight: Nest) -> Nest:
    """Use an example's weight for all outputs, as Keras does."""
    if sample_weight is None or not tf.nest.is_nested(y):
        return sample_weight
    is_nested = tf.nest.is_nested(sample_weight)
    if not is_nested and tuple(getattr(sample_weight, "shape", ()))[1:] in ((), (1,)):
        return tf.nest.map_structure(lambda _: sample_weight, y)
    tf.nest.assert_same_structure(y, sample_weight)
    return sample_weight


def _common_length(columns: dict[str, Nest]) -> int:
    found = {
        name: {int(leaf.shape[0]) for leaf in tf.nest.flatten(part) if leaf is not None}
        for name, part in columns.items()
        if part is not None
    }
    lengths = set[int]().union(*found.values())
    require(
        len(lengths) == 1 and 0 not in lengths,
        "data",
        f"the arrays are empty or differ in their numbers of examples: {found}",
        fix="pass arrays with the same number of examples",
        code="shapes-differ",
    )
    return lengths.pop()


# Array-like input as a NumPy array or an eager tensor.


def is_array(value: object) -> bool:
    """Return whether Keras accepts `value` as an array (also pandas, JAX and torch)."""
    return value is not None and bool(array_slicing.can_slice_array(value))


def _as_column(value: Any, *, where: str) -> Any:
    """Return `value` as a NumPy array (a memmap stays a memmap) or a dense eager tensor.

    Raises `UsageError` at `where` for a value without an axis of examples.
    """
    require_dense(value, where=where)
    array = _to_array(value) if is_array(value) else None
    if array is None or len(array.shape) == 0:
        raise UsageError(
            where,
            f"the {type(value).__name__} {str(value)[:60]!r} is not an array of examples",
            fix="convert it with np.asarray(...), with an entry for each example",
            code="unsupported-data",
        )
    return array


def dtype_of(array: Any) -> tf.DType:
    """Return the TensorFlow dtype of an array."""
    is_text = isinstance(array, np.ndarray) and array.dtype.kind in "OUS"
    return tf.string if is_text else tf.as_dtype(array.dtype)


def require_dense(value: Any, *, where: str) -> None:
    """Raise `UsageError` at `where` for a sparse or ragged array."""
    if is_scipy_sparse(value) or isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise UsageError(
            where,
            f"tfdist cannot read a {type(value).__name__}, because its rows have no fixed size",
            fix="pass .toarray() or .to_tensor(), or a tf.data.Dataset of batches",
            code="unsupported-data",
        )


def _to_array(value: Any) -> Any:
    if isinstance(value, np.ndarray | tf.Tensor):
        return value
    if isinstance(value, tf.Variable):
        return tf.identity(value)
    if type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "to_numpy"):
        # Keras gives a Series of n numbers the shape (n, 1).
        array = value.to_numpy()
        return array[:, None] if array.ndim == 1 else array
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
    return np.asarray(value)


# Arrays in files, which `ImmutableConst` reads through the page cache.


# A slice along axis 0 shares memory with its source if it starts at a multiple of this number of
# bytes. Otherwise TensorFlow copies the slice.
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MappedFile:
    """C-contiguous array `[num_examples, ...]` that starts at byte `offset_bytes` of a file."""

    path: str
    dtype: tf.DType
    shape: tuple[int, ...]
    offset_bytes: int = 0

    def mapped(self) -> tf.Tensor:
        """Return the array in a graph, from operations that map the file in the graph's process.

        The tensor needs no additional memory. The process needs the file at the same path.
        """
        item_bytes = self.dtype.size
        # Single-byte types are mapped directly, because `tf.bitcast` does not support bool.
        stored = self.dtype if item_bytes == 1 else tf.uint8
        size_bytes = math.prod(self.shape) * item_bytes
        end = self.offset_bytes + size_bytes
        whole = tf.raw_ops.ImmutableConst(dtype=stored, shape=(end,), memory_region_name=self.path)
        # Constant folding evaluates the operation, keeps a copy of the whole file in memory, and
        # then finds the copy too large to fold. It skips operations with this attribute. An empty
        # list has no other effect. Seen in TensorFlow 2.21. A test fails if a later TensorFlow no
        # longer makes the copy.
        empty = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=[]))
        whole.op._set_attr("_scoped_allocator", empty)
        # int64 bounds: TensorFlow converts Python integers to int32, which overflows above 2 GB.
        begin = tf.constant([self.offset_bytes], tf.int64)
        data = tf.slice(whole, begin, tf.constant([size_bytes], tf.int64))
        shape = tf.constant([*self.shape, item_bytes] if item_bytes > 1 else self.shape, tf.int64)
        data = tf.reshape(data, shape)
        if item_bytes > 1:
            data = tf.bitcast(data, self.dtype)
        return tf.ensure_shape(data, self.shape)


def of_memmap(array: np.memmap[Any, Any]) -> MappedFile | None:
    """Return the place of an array in its file, or `None` if the array cannot be mapped.

    The array needs a file name, numbers in native byte order, and contiguous bytes that start at a
    multiple of 64. Private changes (mode "c") are not supported.
    """
    is_plain = array.dtype.kind in "biufc" and array.dtype.isnative and array.flags.c_contiguous
    if not is_plain or array.mode == "c" or array.filename is None or array.size == 0:
        return None
    offset = _file_offset(array)
    if offset is None or offset % _ALIGNMENT_BYTES:
        return None
    path = os.path.abspath(os.fspath(array.filename))
    dtype = tf.as_dtype(array.dtype)
    return MappedFile(path=path, dtype=dtype, shape=array.shape, offset_bytes=offset)


def _file_offset(array: np.memmap[Any, Any]) -> int | None:
    """Return the array's offset in its file. For a view, `array.offset` is the parent's."""
    mapping = getattr(array, "_mmap", None)
    if mapping is None:
        return None
    base = np.frombuffer(mapping, np.uint8).ctypes.data
    mapped_from = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return mapped_from + int(array.ctypes.data) - base
