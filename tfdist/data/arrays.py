"""Arrays as a source: in memory, or mapped from files where they are too large for that."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfdist.data.cache import cached_file
from tfdist.data.source import GraphSource, Nest, Transform
from tfdist.errors import UsageError, require

_log = logging.getLogger(__name__)
_SHOWN_ARRAYS = 8
MEMORY_LIMIT_BYTES = 2**31
"""Past this sum, arrays in memory are refused under ps: no message to a worker carries 2 GiB."""


class ArraySource(GraphSource):
    """Arrays `[num_examples, ...]` as the arguments of `keras.Model.fit` take them.

    `x`, `y` and `sample_weight` are arrays, tensors, pandas frames, or tuples or dicts of them.
    They are packed and converted as Keras does it: floating point becomes `keras.config.floatx()`,
    everything else keeps its type, and `y` of shape `(n,)` stays so. An `np.memmap` is mapped from
    its own file, or from a copy below `cache_dir`; of the others ps workers are sent up to
    `memory_limit_bytes` together. Raises `UsageError` for what is not an array and for lengths that
    differ.
    """

    def __init__(
        self,
        x: Nest,
        y: Nest = None,
        *,
        sample_weight: Nest = None,
        transform: Transform | None = None,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        cache_dir: Path | None = None,
    ) -> None:
        # Of a list, TensorFlow's datasets would make one tensor.
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
        self._columns = _map_present(functools.partial(_column, cache_dir=cache_dir), packed)
        self._present = [column for column in tf.nest.flatten(self._columns) if column is not None]
        self.element_spec = _map_present(lambda column: column.spec, self._columns)
        self._memory_limit_bytes = memory_limit_bytes

    @property
    def size_bytes(self) -> int:
        """The bytes of all arrays, as they are kept."""
        return sum(column.size_bytes for column in self._present)

    def require_sendable(self) -> None:
        """Raise `UsageError` for more in memory than ps workers can be sent."""
        size_bytes = sum(column.size_bytes for column in self._present if column.file is None)
        require(
            size_bytes <= self._memory_limit_bytes,
            "data under the ps strategy",
            received=f"arrays of {size_bytes / 1e9:,.2f} GB in memory",
            expected=f"up to {self._memory_limit_bytes / 1e9:,.2f} GB, which workers can be sent",
            fix="np.save them where each worker has them, and pass np.load(file, mmap_mode='r')",
            code="too-large",
        )

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor, *, arrays: Nest = None) -> Nest:
        """Return the examples at `indices`, int64[b] -> nest of [b, ...]."""
        if arrays is None:
            arrays = _map_present(lambda column: column.held(), self._columns)

        def take(column: _Column | None, array: tf.Tensor) -> tf.Tensor | None:
            if column is None:
                return None
            return tf.cast(tf.gather(array, indices, axis=0), column.spec.dtype)

        # Beside the arrays: on an accelerator the whole of them would be copied for each batch.
        with tf.device("/device:CPU:*"):
            return tf.nest.map_structure(take, self._columns, arrays)

    @tf.autograph.experimental.do_not_convert
    def arrays(self) -> Nest:
        """Return the arrays as tensors; in a graph, a mapped file as what maps it there."""
        return _map_present(lambda column: column.sent(), self._columns)

    def describe(self) -> str:
        """Return one line for the log."""
        files = sum(column.file is not None for column in self._present)
        of = len(self._present)
        place = f"{files} of {of} arrays mapped from files" if files else "in memory"
        size = f"{self.num_examples:,} examples, {self.size_bytes / 1e6:,.1f} MB"
        return f"graph-indexed arrays: {size}, {place}"


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Column:
    """One array: a tensor in memory or a mapped file, and the type its examples are given as."""

    spec: tf.TensorSpec
    tensor: tf.Tensor | None = None
    file: MappedFile | None = None

    @property
    def size_bytes(self) -> int:
        array: Any = self.file or self.tensor
        item_bytes = 16 if array.dtype == tf.string else array.dtype.size  # a string's handle
        return math.prod(array.shape) * item_bytes

    def held(self) -> tf.Tensor:
        """Return the eager tensor of this process, made on first use; functions capture it."""
        if self.tensor is None:
            assert self.file is not None
            with tf.init_scope(), tf.device("/CPU:0"):
                self.tensor = self.file.tensor()
        return self.tensor

    def sent(self) -> tf.Tensor:
        if self.file is not None and not tf.executing_eagerly():
            return self.file.tensor()
        return self.held()


def _column(leaf: Any, *, cache_dir: Path | None) -> _Column:
    """Return an array as it is kept: mapped from its file where it has one, else in memory."""
    spec = _spec(leaf)
    file = of_memmap(leaf, cache_dir=cache_dir) if isinstance(leaf, np.memmap) else None
    if file is not None:
        return _Column(file=file, spec=spec)
    with tf.init_scope(), tf.device("/CPU:0"):
        return _Column(tensor=_to_tensor(leaf, spec.dtype), spec=spec)


def _spec(leaf: Any) -> tf.TensorSpec:
    """Return the spec of one example; floating point of any other type becomes Keras' floatx."""
    dtype = dtype_of(leaf, where="data")
    if dtype.is_floating:
        dtype = tf.as_dtype(keras.config.floatx())
    return tf.TensorSpec(leaf.shape[1:], dtype)


def _to_tensor(leaf: Any, dtype: tf.DType) -> tf.Tensor:
    if isinstance(leaf, np.ndarray):
        array = leaf if dtype == tf.string else leaf.astype(dtype.as_numpy_dtype, copy=False)
        return tf.constant(array, dtype)
    return tf.cast(tf.identity(leaf), dtype)


def _map_present(function: Callable[[Any], Any], nest: Nest) -> Nest:
    """Map the leaves of a nest that are not None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), nest)


def _weight_per_output(y: Nest, sample_weight: Nest) -> Nest:
    """Repeat one weight per example for each of several outputs, as Keras does."""
    if sample_weight is None or not tf.nest.is_nested(y):
        return sample_weight
    if not tf.nest.is_nested(sample_weight):
        shape = tuple(getattr(sample_weight, "shape", ()))
        require(
            len(shape) < 2 or shape[1:] == (1,),
            "sample_weight",
            received=f"one array of shape {shape} for several outputs",
            expected="a weight for each example, or an array for each output in y",
            fix="pass the weights of each output, in the structure of y",
            code="structures-differ",
        )
        return tf.nest.map_structure(lambda _: sample_weight, y)
    try:
        tf.nest.assert_same_structure(y, sample_weight)
    except (TypeError, ValueError):
        raise UsageError(
            "sample_weight",
            received="a structure that is not that of y",
            expected="one array per output in y, in the same structure, or one for all",
            fix="name the outputs alike in y and sample_weight",
            code="structures-differ",
        ) from None
    return sample_weight


def _common_length(columns: dict[str, Nest]) -> int:
    found = {
        f"{name}{''.join(f'[{key!r}]' for key in keys)}": int(leaf.shape[0])
        for (name, *keys), leaf in keras.tree.flatten_with_path(columns)
        if leaf is not None
    }
    lengths = set(found.values())
    shown = [f"{name}: {length}" for name, length in found.items()]
    more = f" and {len(shown) - _SHOWN_ARRAYS} more" * (len(shown) > _SHOWN_ARRAYS)
    require(
        len(lengths) == 1 and 0 not in lengths,
        "data",
        received=f"arrays of {', '.join(shown[:_SHOWN_ARRAYS]) or 'no examples'}{more}",
        expected="the same number of examples, at least one, in every array",
        fix="check how the arrays were cut",
        code="lengths-differ",
    )
    return lengths.pop()


# Array-like input as a NumPy array or an eager tensor.


def is_array(value: object) -> bool:
    """Tell whether Keras would take `value` as an array (pandas, JAX and torch included)."""
    return (
        isinstance(value, np.ndarray | tf.Tensor | tf.SparseTensor | tf.RaggedTensor)
        or hasattr(value, "__array__")
        or _is_scipy_sparse(value)
    )


def _as_column(value: Any, *, where: str) -> Any:
    """Return `value` as NumPy array (memmaps stay memmaps) or dense eager tensor.

    Raises `UsageError`, which begins with `where`, for what cannot be indexed by example.
    """
    require_dense(value, where=where)
    if not is_array(value):
        raise UsageError(
            where,
            received=f"{type(value).__name__} {str(value)[:60]!r}",
            expected="an array, a tensor, or a tuple or dict of them",
            fix="wrap it in np.asarray(...)",
            code="not-an-array",
        )
    array = _to_array(value)
    if isinstance(array, np.ndarray) and array.dtype.kind == "O":
        array = _strings(array, where=where)
    dtype_of(array, where=where)
    if len(array.shape) == 0:
        raise UsageError(
            where,
            received="a scalar",
            expected="an array with an axis of examples",
            fix="pass one entry for each example",
            code="not-an-array",
        )
    return array


def dtype_of(array: Any, *, where: str) -> tf.DType:
    """Return the type as TensorFlow has it; raise `UsageError`, which begins with `where`."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "OUS":
        return tf.string
    try:
        return tf.as_dtype(array.dtype)
    except TypeError:
        raise UsageError(
            where,
            received=f"an array of {array.dtype}",
            expected="numbers or strings",
            fix="convert it, times as by .astype('datetime64[s]').astype('int64')",
            code="not-numbers",
        ) from None


def require_dense(value: Any, *, where: str) -> None:
    """Raise `UsageError`, which begins with `where`, for a sparse or ragged array."""
    if _is_scipy_sparse(value) or isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise UsageError(
            where,
            received=f"a {type(value).__name__}",
            expected="a dense array: rows of sparse and ragged arrays have no fixed size",
            fix="pass .toarray() or .to_tensor(), or a tf.data.Dataset of batches",
            code="not-dense",
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


def _strings(array: np.ndarray[Any, Any], *, where: str) -> np.ndarray[Any, Any]:
    if all(isinstance(item, str | bytes) for item in array.flat):
        return array
    kinds = sorted({type(item).__name__ for item in array.flat})
    raise UsageError(
        where,
        received=f"an array of Python objects ({', '.join(kinds[:4])})",
        expected="numbers, or strings throughout",
        fix="convert the columns to one number type (.astype), or pass them as a dict",
        code="mixed-objects",
    )


def _is_scipy_sparse(value: object) -> bool:
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocoo")


# Arrays in files, read through the page cache by `ImmutableConst` instead of held in memory.


# A slice along axis 0 shares the memory of what it is taken from only where it starts at a
# multiple of this; elsewhere TensorFlow copies.
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MappedFile:
    """A C-contiguous array `[num_examples, ...]` that begins `offset_bytes` into a file."""

    path: str
    dtype: tf.DType
    shape: tuple[int, ...]
    offset_bytes: int = 0

    def tensor(self) -> tf.Tensor:
        """Return the whole array as a tensor that occupies no memory of its own.

        Eager or graph. Every process that runs the operation needs the file under this path.
        """
        if not tf.executing_eagerly():
            return _map_operations(self)
        return tf.function(_map_operations, autograph=False)(self)


def of_memmap(array: np.memmap[Any, Any], *, cache_dir: Path | None = None) -> MappedFile | None:
    """Return the array's own file where it can be mapped as it is, else a copy made for that.

    None where it cannot be mapped at all: private changes (mode "c"), no plain number type, no
    file name, or it needs a copy and can be written to, of which the file's time does not always
    tell. A copy is made once on a machine and says so in the log.
    """
    dtype = _plain_dtype(array.dtype)
    if dtype is None or array.mode == "c" or array.filename is None or array.size == 0:
        return None
    path = os.path.abspath(os.fspath(array.filename))
    offset = _file_offset(array) if array.flags.c_contiguous else None
    if offset is None or offset % _ALIGNMENT_BYTES or not array.dtype.isnative:
        if array.mode != "r":
            return None
        return _aligned_copy(array, path, dtype=dtype, cache_dir=cache_dir)
    return MappedFile(path=path, dtype=dtype, shape=array.shape, offset_bytes=offset)


def _map_operations(file: MappedFile) -> tf.Tensor:
    item_bytes = file.dtype.size
    # A type of one byte is mapped as it is: nothing can be cast bit by bit to bool.
    stored = file.dtype if item_bytes == 1 else tf.uint8
    size_bytes = math.prod(file.shape) * item_bytes
    whole = _immutable_const(file.path, dtype=stored, shape=(file.offset_bytes + size_bytes,))
    # int64 bounds: TensorFlow would take Python integers as int32 and overflow past 2 GB.
    begin = tf.constant([file.offset_bytes], tf.int64)
    data = tf.slice(whole, begin, tf.constant([size_bytes], tf.int64))
    shape = tf.constant([*file.shape, item_bytes] if item_bytes > 1 else file.shape, tf.int64)
    data = tf.reshape(data, shape)
    if item_bytes > 1:
        data = tf.bitcast(data, file.dtype)
    return tf.ensure_shape(data, file.shape)


def _immutable_const(path: str, *, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    tensor = tf.raw_ops.ImmutableConst(dtype=dtype, shape=shape, memory_region_name=path)
    # Constant folding evaluates the operation and keeps a copy of the whole file in memory, only
    # to find it too large to fold. It passes over operations that carry this attribute, which an
    # empty list leaves without any other effect. Seen in TensorFlow 2.21; a test tells when the
    # copy is no longer made.
    empty = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=[]))
    tensor.op._set_attr("_scoped_allocator", empty)
    return tensor


def _plain_dtype(dtype: np.dtype[Any]) -> tf.DType | None:
    if dtype.kind not in "biufc" or dtype.names is not None:
        return None
    try:
        return tf.as_dtype(dtype.newbyteorder("="))
    except TypeError:
        return None


def _file_offset(array: np.memmap[Any, Any]) -> int | None:
    """Return where in its file the array begins; `array.offset` is the parent's for a view."""
    mapping = getattr(array, "_mmap", None)
    if mapping is None:
        return None
    base = np.frombuffer(mapping, np.uint8).ctypes.data
    mapped_from = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return mapped_from + int(array.ctypes.data) - base


def _aligned_copy(
    array: np.memmap[Any, Any], path: str, *, dtype: tf.DType, cache_dir: Path | None
) -> MappedFile:
    status = os.stat(path)
    view = (array.shape, array.strides, array.dtype.str, _file_offset(array))
    key = repr((path, status.st_size, status.st_mtime_ns, view))

    def write(target: Path) -> None:
        _log.info(
            "%s cannot be mapped as it is (not contiguous, or not at a multiple of %d bytes): "
            "copying %.2f GB to %s, once",
            path, _ALIGNMENT_BYTES, array.nbytes / 1e9, target,
        )  # fmt: skip
        native = array.dtype.newbyteorder("=")
        copy = np.memmap(target, dtype=native, mode="w+", shape=array.shape)
        rows = max(1, (64 << 20) // max(1, array.nbytes // len(array)))
        for first in range(0, len(array), rows):
            copy[first : first + rows] = array[first : first + rows]
        copy.flush()

    target = cached_file(key, suffix=".bin", write=write, cache_dir=cache_dir, purpose=path)
    return MappedFile(path=str(target), dtype=dtype, shape=array.shape)
