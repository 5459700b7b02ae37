"""Conversion of arrays to raw bytes and back, streamed one array at a time."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.checkpoint.manifest import Damaged, Entry, Shard, reading_failed
from tfdist.errors import UsageError

# Offsets are multiples of this, so that a shard can be memory-mapped as any dtype.
_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 16 << 20

_NUMPY_NAMES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_ML_NAMES = frozenset(
    name
    for name in dir(ml_dtypes)
    if isinstance(scalar := getattr(ml_dtypes, name), type) and issubclass(scalar, np.generic)
)

Array = np.ndarray[Any, np.dtype[Any]]


def write_shard(
    path: Path, *, shard: str, arrays: Mapping[str, Any]
) -> tuple[Shard, dict[str, Entry]]:
    """Writes the arrays to `path` one after another and fsyncs; raises OSError."""
    digest = hashlib.sha256()
    entries = {}
    size_bytes = 0
    with FileIO(path, "xb") as file:
        for name in arrays:
            array = np.asarray(arrays[name])
            dtype = _storable(name, array)
            padding = bytes(-size_bytes % _ALIGNMENT_BYTES)
            for piece in (memoryview(padding), _raw_bytes(array)):
                _write_all(file, piece, digest)
                size_bytes += len(piece)
            entries[name] = Entry(
                shard=shard, offset=size_bytes - array.nbytes, dtype=dtype, shape=array.shape
            )
        os.fsync(file.fileno())
    stored = Shard(file=path.name, size_bytes=size_bytes, sha256=digest.hexdigest())
    return stored, entries


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new small file and fsync; raise OSError."""
    with FileIO(path, "xb") as file:
        _write_all(file, memoryview(data), hashlib.sha256())
        os.fsync(file.fileno())


def read_shard(path: Path, *, shard: Shard, entries: Mapping[str, Entry]) -> dict[str, Array]:
    """Read the arrays of one shard, verifying its checksum; raise Damaged or TfdistError."""
    digest = hashlib.sha256()
    arrays = {}
    position = 0
    try:
        with FileIO(path, "rb") as file:
            check_size(path, shard=shard)
            for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
                gap = np.empty(entry.offset - position, np.uint8)
                array = np.empty(entry.shape, _dtype(entry.dtype))
                for target in (gap, array.reshape(-1).view(np.uint8)):
                    _read_all(file, target.data, digest)
                position = entry.offset + array.nbytes
                arrays[name] = array.byteswap() if sys.byteorder == "big" else array
    except OSError as error:
        raise reading_failed(path, error) from error
    except (ValueError, TypeError, EOFError) as error:
        raise Damaged(f"{path.name}: {error}") from error
    if digest.hexdigest() != shard.sha256 or position != shard.size_bytes:
        raise Damaged(f"{path.name} does not match its checksum")
    return arrays


def check_size(path: Path, *, shard: Shard) -> None:
    """Raise Damaged where the file is missing or not as long as it was written, or TfdistError."""
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise reading_failed(path, error) from error
    if size_bytes != shard.size_bytes:
        raise Damaged(f"{path.name} has {size_bytes} bytes of {shard.size_bytes}")


def _storable(name: str, array: Array) -> str:
    dtype = array.dtype.name
    if dtype in _NUMPY_NAMES or dtype in _ML_NAMES:
        return dtype
    raise UsageError(
        f"checkpoint: array {name!r}",
        received=f"dtype {dtype}",
        expected="numbers or booleans",
        fix="keep strings and objects in the metadata, as JSON",
    )


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in _ML_NAMES else name)


def _raw_bytes(array: Array) -> memoryview:
    """Return the array's little-endian bytes in C order, without a copy where it lies like that."""
    big = array.dtype.byteorder == ">" or (sys.byteorder == "big" and array.dtype.byteorder == "=")
    flat = np.ascontiguousarray(array.byteswap() if big else array).reshape(-1)
    return flat.view(np.uint8).data


def _write_all(file: FileIO, data: memoryview, digest: Any) -> None:
    while data:
        written = file.write(data[:_CHUNK_BYTES])
        digest.update(data[:written])
        data = data[written:]


def _read_all(file: FileIO, target: memoryview, digest: Any) -> None:
    while target:
        count = file.readinto(target[:_CHUNK_BYTES])
        if not count:
            raise EOFError("ends too early")
        digest.update(target[:count])
        target = target[count:]
