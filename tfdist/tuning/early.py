"""Early stopping of trials: the median rule of Golovin et al., "Google Vizier", 2017.

Pure, and a function of what trials have reported: a sweep that goes on decides as before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_TRIALS = 5
"""So many must have come as far before another one is measured by them."""
LEAST_EPOCHS = 2
"""No trial is stopped before it has done so many virtual epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianRule:
    """Stops a trial whose best so far is worse than the median of the others' averages so far.

    Attributes:
      direction: ``max`` or ``min``: which way is better.
      medians: at each virtual epoch, of the others' averages so far; None where there are too few.
    """

    objective: str
    direction: str
    medians: tuple[float | None, ...]

    def last(self, metrics: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the virtual epoch at which to stop, None where the trial is to go on.

        `metrics` has a line for each virtual epoch that the trial has done.
        """
        values = values_of(metrics, self.objective)
        for done in range(LEAST_EPOCHS, len(values) + 1):
            if self._is_hopeless(values[:done]):
                return int(metrics[done - 1]["virtual_epoch"])
        return None

    def _is_hopeless(self, values: Sequence[float]) -> bool:
        median = self.medians[len(values) - 1] if len(values) <= len(self.medians) else None
        if median is None:
            return False
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return True
        return max(finite) < median if self.direction == "max" else min(finite) > median


def medians_of(others: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """Return what to measure by, from the objective at each virtual epoch of other trials."""
    return tuple(
        _median(_average(other[:done]) for other in others if len(other) >= done)
        for done in range(1, max(map(len, others), default=0) + 1)
    )


def _median(averages: Iterable[float | None]) -> float | None:
    known = [average for average in averages if average is not None]
    return statistics.median(known) if len(known) >= LEAST_TRIALS else None


def values_of(metrics: Iterable[Mapping[str, Any]], objective: str) -> tuple[float, ...]:
    """Return the objective of each line, NaN where it is not finite or not there."""
    found = (line.get(objective) for line in metrics)
    return tuple(math.nan if value is None else float(value) for value in found)


def _average(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None
