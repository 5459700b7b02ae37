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
        self._steps, self._elapsed_s = 0, 0.0

    def steps(self) -> int:
        """How many steps the next range may have."""
        if self._rate is None:
            return self._longest
        return min(max(1, int(self._rate * _RANGE_S)), self._longest)

    @property
    def is_known(self) -> bool:
        """Whether ranges are as long as they are by their speed, and do not grow any more."""
        return self._rate is not None and self._rate * _RANGE_S < self._longest

    def note(self, steps: int, *, elapsed_s: float, is_whole: bool = True) -> None:
        """Takes in how many steps were done in so much time.

        What is not a whole range, as steps of another were done too or some were not, tells
        little of the speed: it counts together with what follows.
        """
        if steps >= self._longest:
            self._longest = steps * _GROWTH
        self._steps += steps
        self._elapsed_s += elapsed_s
        if self._steps and (is_whole or self._elapsed_s >= _RANGE_S / 2):
            self._rate = self._steps / max(self._elapsed_s, 1e-6)
            self._steps, self._elapsed_s = 0, 0.0
