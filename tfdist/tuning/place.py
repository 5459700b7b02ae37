"""Where a trial runs: one of the places for trials of a machine."""

from __future__ import annotations

from dataclasses import dataclass

HERE = 0
"""The sweep's own machine; other runners have numbers of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place for one trial at a time."""

    number: int
    """From 0 on; says whose share of the GPUs it is."""
    runner: int = HERE
