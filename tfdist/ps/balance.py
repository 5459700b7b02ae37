"""Placement of variables on parameter servers, balanced by bytes; which ones are split."""

from __future__ import annotations


class Balance:
    """The bytes on each parameter server of a job, in the order in which variables are made."""

    def __init__(self, num_ps: int) -> None:
        self._sizes_bytes = [0] * num_ps

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """The bytes on each ps, by its index."""
        return tuple(self._sizes_bytes)

    def next(self) -> int:
        """Return the index of the ps with the fewest bytes, the first of several."""
        return self._sizes_bytes.index(min(self._sizes_bytes))

    def add(self, index: int, size_bytes: int) -> None:
        """Count a variable that was made on a ps."""
        self._sizes_bytes[index] += size_bytes


def rows_of_parts(rows: int, *, size_bytes: int, split_bytes: int, num_ps: int) -> tuple[int, ...]:
    """The rows of each part of a variable of so many rows and bytes; one part: it stays whole.

    As few parts as make none larger than `split_bytes`, but no more than there are ps, and of
    the same number of rows or one less.
    """
    parts = max(min(num_ps, rows, -(-size_bytes // split_bytes)), 1)
    return tuple(rows // parts + (index < rows % parts) for index in range(parts))
