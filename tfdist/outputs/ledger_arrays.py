"""The arrays of a ledger's record as bytes, in little room, and back."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def to_bytes(arrays: Sequence[Array]) -> bytes:
    """Compresses them, integers in the smallest type that holds them."""
    stream = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(stream, _narrow(array), allow_pickle=False)
    return zlib.compress(stream.getvalue(), 1)


def from_bytes(payload: bytes) -> tuple[Array, ...]:
    """Reads what `to_bytes` wrote; integers as int64, so that sums of them do not overflow."""
    stream = io.BytesIO(zlib.decompress(payload))
    arrays = []
    while stream.tell() < len(stream.getbuffer()):
        array = np.lib.format.read_array(stream, allow_pickle=False)
        arrays.append(array.astype(np.int64) if array.dtype.kind == "i" else array)
    return tuple(arrays)


def _narrow(array: Array) -> Array:
    array = np.asarray(array)
    if array.dtype.kind != "i" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array
