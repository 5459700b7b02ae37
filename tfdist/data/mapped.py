"""Arrays in files, read through the page cache by `ImmutableConst` instead of held in memory."""

from __future__ import annotations

import dataclasses
import logging
import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfdist.data.cache import cached_file

_log = logging.getLogger(__name__)
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
    file name. A copy is made once on a machine and says so in the log.
    """
    dtype = _plain_dtype(array.dtype)
    if dtype is None or array.mode == "c" or array.filename is None or array.size == 0:
        return None
    path = os.path.abspath(os.fspath(array.filename))
    offset = _file_offset(array) if array.flags.c_contiguous else None
    if offset is None or offset % _ALIGNMENT_BYTES or not array.dtype.isnative:
        return _aligned_copy(array, path, dtype=dtype, cache_dir=cache_dir)
    return MappedFile(path=path, dtype=dtype, shape=array.shape, offset_bytes=offset)


def of_array(array: np.ndarray[Any, Any], path: Path) -> MappedFile:
    """Write an array in memory to `path` and return it mapped from there."""
    np.ascontiguousarray(array).tofile(path)
    dtype = tf.as_dtype(array.dtype)
    return MappedFile(path=str(path), dtype=dtype, shape=array.shape)


def _map_operations(file: MappedFile) -> tf.Tensor:
    item_bytes = file.dtype.size
    size_bytes = math.prod(file.shape) * item_bytes
    if file.offset_bytes == 0:
        return _immutable_const(file.path, dtype=file.dtype, shape=file.shape)
    whole = _immutable_const(file.path, dtype=tf.uint8, shape=(file.offset_bytes + size_bytes,))
    # int64 bounds: TensorFlow would take Python integers as int32 and overflow past 2 GB.
    begin = tf.constant([file.offset_bytes], tf.int64)
    data = tf.slice(whole, begin, tf.constant([size_bytes], tf.int64))
    shape = tf.constant([*file.shape, item_bytes] if item_bytes > 1 else file.shape, tf.int64)
    data = tf.reshape(data, shape)
    return tf.ensure_shape(tf.bitcast(data, file.dtype), file.shape)


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
