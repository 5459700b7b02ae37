"""Which pieces of work are under way, and how many steps of others each may have seen applied."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_P = TypeVar("_P", bound=Hashable)


class InFlight(Generic[_P]):
    """The pieces under way. For each, the steps of others that may be applied before its end.

    These are the steps that were under way when it began, and those begun since.
    """

    def __init__(self) -> None:
        self._steps: dict[_P, int] = {}
        self._others: dict[_P, int] = {}

    def admits(self, steps: int, *, max_staleness: int | None) -> bool:
        """Returns whether a piece of so many steps may begin now."""
        if max_staleness is None or not steps:
            return True
        if sum(self._steps.values()) > max_staleness:
            return False
        return all(others + steps <= max_staleness for others in self._others.values())

    def begin(self, piece: _P, *, steps: int) -> None:
        """Takes down that a piece is under way."""
        for other in self._others:
            self._others[other] += steps
        self._others[piece] = sum(self._steps.values())
        self._steps[piece] = steps

    def end(self, piece: _P) -> None:
        """Takes down that a piece has ended, done or not."""
        self._steps.pop(piece, None)
        self._others.pop(piece, None)


def steps_of_a_piece(*, most: int, workers: int, max_staleness: int | None) -> int:
    """Returns how long pieces may be that still let as many workers as can be work at a time.

    With a bound of k at most k + 1 work at a time. Half of the bound is for the pieces that are
    under way when one begins, half for those that begin while it is.
    """
    if max_staleness is None:
        return most
    others = min(workers - 1, max_staleness)
    return most if not others else min(most, max(1, max_staleness // (2 * others)))
