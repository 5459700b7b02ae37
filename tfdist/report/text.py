"""Numbers, times and durations as a person reads them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

UNKNOWN = "\N{EN DASH}"


def number(value: float | None) -> str:
    """Return a number as a person reads it: 12,345 or 0.00123."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return a time as ``1 h 02 min``, ``3 min 20 s``, ``12.3 s``."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02} s"
    return f"{seconds:.1f} s".replace(".0 s", " s")


def clock(at: float | None) -> str:
    """Return a moment as date and time, UTC."""
    return UNKNOWN if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
