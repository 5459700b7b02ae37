"""Division of a step's shards among members, and sums over the shards in one order.

A sum adds the shards as a binary tree over their numbers, so its bits do not depend on the members
that computed them. A member adds the whole subtrees of its own shards before it sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
"""Bytes to which TensorFlow aligns the memory of a tensor."""
Block = tuple[int, int]
"""First shard and end shard of a whole subtree."""


def shards_of(rank: int, *, members: int, shards: int) -> range:
    """Return the shards that a member computes."""
    return range(rank * shards // members, (rank + 1) * shards // members)


def blocks_of(own: range, *, shards: int) -> list[Block]:
    """Divide a member's shards into the fewest whole subtrees."""
    return _blocks(0, shards, own)


def _blocks(low: int, high: int, own: range) -> list[Block]:
    if high <= own.start or low >= own.stop:
        return []
    if own.start <= low and high <= own.stop:
        return [(low, high)]
    middle = (low + high) // 2
    return [*_blocks(low, middle, own), *_blocks(middle, high, own)]


def tree_sum(
    parts: Mapping[Block, Sequence[Array]],
    low: int,
    high: int,
    out: Sequence[Array] | None = None,
) -> list[Array]:
    """Return the sum of each array over the shards ``[low, high)``, from subtrees of them.

    `out` receives the sums. Without it, the sum of one subtree is this subtree itself.
    """
    if (low, high) in parts:
        if out is None:
            return list(parts[low, high])
        for array, into in zip(parts[low, high], out, strict=True):
            np.copyto(into, array)
        return list(out)
    middle = (low + high) // 2
    first, second = tree_sum(parts, low, middle), tree_sum(parts, middle, high)
    out = [aligned_like(array) for array in first] if out is None else out
    with np.errstate(all="ignore"):  # the loss scale detects an overflow
        return [np.add(a, b, out=c) for a, b, c in zip(first, second, out, strict=True)]


def aligned_like(array: Array) -> Array:
    """Return an empty array that TensorFlow can read without a copy."""
    data = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return data[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
