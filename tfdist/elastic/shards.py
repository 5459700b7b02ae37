"""Sums over the shards of a batch in one order, for any division of the shards among members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Sequence[np.ndarray[Any, Any]]


def tree_sum(parts: Mapping[int, Arrays], count: int) -> list[np.ndarray[Any, Any]]:
    """Return the sums of the arrays of all `count` shards, added as a binary tree over them."""
    return _subtree(parts, 0, count)


def _subtree(parts: Mapping[int, Arrays], low: int, high: int) -> list[np.ndarray[Any, Any]]:
    if high - low == 1:
        return list(parts[low])
    middle = (low + high) // 2
    first, second = _subtree(parts, low, middle), _subtree(parts, middle, high)
    with np.errstate(all="ignore"):
        return [np.add(a, b) for a, b in zip(first, second, strict=True)]
