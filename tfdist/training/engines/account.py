"""What became of the steps that were handed out: who did how many, how stale, how often."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class Share:
    """What one worker has done.

    Attributes:
      pieces: that it finished.
      steps: of training in them.
      seconds: that these took.
      losses: pieces that were under way when it died; each may have been applied in part.
    """

    pieces: int = 0
    steps: int = 0
    seconds: float = 0.0
    losses: int = 0

    def add(self, *, steps: int, seconds: float) -> None:
        """Takes down a piece that it has finished."""
        self.pieces += 1
        self.steps += steps
        self.seconds += seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """A range of training steps ``[first, last)`` that was begun `times` times, as workers died."""

    first: int
    last: int
    times: int


class Account:
    """The training steps of one process: each was completed once, and some were begun again.

    Attributes:
      applied_twice: updates that the servers have seen, less the steps completed.
      staleness: how many steps had so many updates of others between their reading and writing.
      repeats: the ranges that were begun more than once.
    """

    def __init__(self) -> None:
        self.applied_twice = 0
        self.staleness: collections.Counter[int] = collections.Counter()
        self.repeats: list[Repeat] = []

    def done(self, first: int, last: int, *, times: int, staleness: Iterable[int]) -> None:
        """Takes down a piece of work that is done."""
        self.staleness.update(map(int, staleness))
        if times > 1:
            self.repeats.append(Repeat(first=first, last=last, times=times))

    def summary(self) -> dict[str, Any]:
        """Returns what the run's summary says of it."""
        return {
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "steps_applied_twice": self.applied_twice,
            "repeated_ranges": [[r.first, r.last, r.times] for r in self.repeats],
        }
