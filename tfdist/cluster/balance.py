"""Which parameter server gets the next variable, by bytes and not by count."""

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
        """The index of the ps with the fewest bytes, the first of several."""
        return self._sizes_bytes.index(min(self._sizes_bytes))

    def add(self, index: int, size_bytes: int) -> None:
        """Counts a variable that was made on a ps."""
        self._sizes_bytes[index] += size_bytes
