"""What a step of a multiworker job costs: computing, and an all-reduce around a ring.

With n workers each computes the n-th part of the global batch and sends 2 (n - 1) / n times the
gradients' bytes to the next, in 2 (n - 1) rounds (Patarasuk and Yuan, Bandwidth optimal all-reduce
algorithms for clusters of workstations, JPDC 69(2), 2009). A step is as long as all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.bench.cost_model import CORES, OWN_STEP, PAYLOAD, WIRE, Place, Point, Work

ROUNDS = "rounds of the ring"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The parameters: of the global batch on one core, and of one round of the ring."""

    compute_s: float
    round_s: float
    spread: float = 0.0
    """Standard deviation of what was measured from what the model says of it."""

    def examples_per_s(self, work: Work, place: Place) -> float:
        """What all workers together come to."""
        return work.batch / sum(self._parts_s(work, place).values())

    def error(self, work: Work, place: Place) -> float:
        """The standard error of the logarithm of that, as far as the fit knows."""
        return self.spread

    def limit(self, work: Work, place: Place) -> str:
        """The longest part of a step."""
        parts_s = self._parts_s(work, place)
        return max(parts_s, key=lambda name: parts_s[name])

    def _parts_s(self, work: Work, place: Place) -> dict[str, float]:
        computing, rounds = _shares(work, place)
        sent_bytes = 2 * (work.workers - 1) * work.write_bytes
        if place.apart:  # each has a link of its own, and sends its part
            sent_bytes /= work.workers
        crowded = not place.apart and work.workers > place.cores
        return {
            CORES if crowded else OWN_STEP: self.compute_s * computing,
            ROUNDS: self.round_s * rounds,
            WIRE: sent_bytes * 8 / (place.mbit * 1e6 * PAYLOAD) if place.mbit else 0.0,
        }


def _shares(work: Work, place: Place) -> tuple[float, int]:
    """How much of the batch the slowest core has, and the rounds."""
    at_once = work.workers if place.apart else min(work.workers, place.cores)
    return 1 / at_once, 2 * (work.workers - 1)


def fit(points: Sequence[Point]) -> Ring:
    """Least squares of relative errors, of jobs that no wire limits; no parameter below 0."""
    rates = np.array([point.examples_per_s / point.work.batch for point in points])
    parts = np.array([_shares(point.work, point.place) for point in points]) * rates[:, None]
    found = np.linalg.lstsq(parts, np.ones(len(points)), rcond=None)[0]
    if found[1] < 0:  # rounds cost nothing that could be seen
        found = np.array([1 / parts[:, 0].mean(), 0.0])
    missed = float(((parts @ found - 1) ** 2).sum())
    spread = math.sqrt(missed / max(1, len(points) - 2))
    return Ring(compute_s=float(found[0]), round_s=float(found[1]), spread=spread)
