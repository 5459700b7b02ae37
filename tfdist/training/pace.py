"""How many steps one compiled call may have, so that something else is heard within a second."""

from __future__ import annotations

_RANGE_S = 1.0
_GROWTH = 8


class Pace:
    """Steps of about a second, by how long the last range took.

    The first range is one step: nothing is known of its speed, and it traces the program. From
    there on ranges grow step by step.
    """

    def __init__(self) -> None:
        self._longest = 1
        self._rate: float | None = None

    def steps(self) -> int:
        """How many steps the next range may have."""
        if self._rate is None:
            return self._longest
        return min(max(1, int(self._rate * _RANGE_S)), self._longest)

    def note(self, steps: int, *, elapsed_s: float) -> None:
        """Takes in how long a range of so many steps took."""
        if steps >= self._longest:
            self._longest = steps * _GROWTH
        self._rate = steps / max(elapsed_s, 1e-6)
