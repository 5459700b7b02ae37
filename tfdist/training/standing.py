"""How a run stands by the evaluations of its checkpoints: its best, and how long that is ago."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import UsageError, near


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the lines of an evaluator come to.

    Attributes:
      best: the line with the best figure, None where no figure was finite.
      since: the evaluations after that one.
    """

    best: Mapping[str, Any] | None
    since: int


def standing(
    lines: Sequence[Mapping[str, Any]], *, monitor: str, less: bool, min_delta: float = 0.0
) -> Standing:
    """Returns how a run stands; what is not better by more than `min_delta` is no better.

    Raises:
      UsageError: no line has the figure.
    """
    if lines and all(monitor not in line for line in lines):
        names = [name for name in lines[-1] if name.startswith("val_")]
        raise UsageError(
            "Evaluator: monitor",
            received=f"{monitor!r}{near(monitor, names)}",
            expected=f"one of {', '.join(names)}",
            fix="name a figure that the evaluation yields",
        )
    best, since = None, 0
    for line in lines:
        value = line.get(monitor)
        gain = _gain(value, best[monitor] if best else None, less=less)
        if gain is not None and gain > min_delta:
            best, since = line, 0
        else:
            since += 1
    return Standing(best=best, since=since)


def _gain(value: Any, before: Any, *, less: bool) -> float | None:
    """By how much a figure is better than the best before it; None where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if before is None:
        return float("inf")
    return float(before - value) if less else float(value - before)
