"""Early stopping of trials: the median rule of Golovin et al., "Google Vizier", 2017.

Pure, and a function of what trials have reported: a sweep that goes on decides as before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEAST_TRIALS = 5
"""So many must have come as far before another one is measured by them."""
LEAST_EPOCHS = 2
"""No trial is stopped before it has done so many virtual epochs."""


Medians = tuple[float | None, ...]
"""At each virtual epoch, of the others' averages so far; None where there are too few."""


def hopeless_after(
    metrics: Sequence[Mapping[str, Any]], *, objective: str, direction: str, medians: Medians
) -> int | None:
    """Return the virtual epoch at which to stop a trial, None where it is to go on.

    That is where its best so far is worse than the median of the others' averages so far.
    `metrics` has a line for each virtual epoch that the trial has done.
    """
    values = values_of(metrics, objective)
    for done in range(LEAST_EPOCHS, min(len(values), len(medians)) + 1):
        median = medians[done - 1]
        if median is not None and _is_hopeless(values[:done], median, direction=direction):
            return int(metrics[done - 1]["virtual_epoch"])
    return None


def _is_hopeless(values: Sequence[float], median: float, *, direction: str) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return True
    return max(finite) < median if direction == "max" else min(finite) > median


def medians_of(others: Sequence[Sequence[float]]) -> Medians:
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
