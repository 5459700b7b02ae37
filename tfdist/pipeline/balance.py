"""Balance: at which places to cut, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

from tfdist.errors import require

_TOLERANCE = 0.03


def balanced(
    seconds: Sequence[float],
    crossing_bytes: Sequence[int],
    *,
    stages: int,
    trainable: Sequence[bool] | None = None,
    lead: float = 0.0,
    tolerance: float = _TOLERANCE,
) -> tuple[int, ...]:
    """Return which of the places to cut at, in order.

    The slowest stage is as fast as it can be, where each has `lead` of the seconds of those before
    it besides its own; of the cuts within `tolerance` of that, those that the fewest bytes cross.

    Args:
      seconds: of each run of layers between two places, forward and backward; one more than places.
      crossing_bytes: of each place.
      stages: how many to make.
      trainable: whether each run has trainable weights, of which each stage needs some; by default
        all have.
      lead: what a stage waits for those before it, at the start and at the end of a step: of M
        micro-batches 1 / M.
      tolerance: as a fraction.

    Raises:
      UsageError: there are fewer places than cuts.
    """
    with_weights = [True] * len(seconds) if trainable is None else trainable
    require_enough(with_weights, stages=stages)
    # Of each end the seconds, and the runs with weights, that are before it.
    sums = [(0.0, 0), *zip(*map(itertools.accumulate, (seconds, with_weights)), strict=True)]
    ends = [end for end, _ in sums]
    limits = sorted({_stage_s(*each, lead) for each in itertools.combinations(ends, 2)})
    cheapest = functools.partial(_cheapest, sums, crossing_bytes, stages, lead)
    least = limits[bisect.bisect_left(limits, True, key=lambda limit: cheapest(limit) is not None)]
    found = cheapest(least * (1 + tolerance))
    assert found is not None
    return found[1]


def runs(cut: Sequence[int], count: int) -> list[slice]:
    """Return which of `count` parts each stage has."""
    return list(itertools.starmap(slice, itertools.pairwise([0, *(i + 1 for i in cut), count])))


def require_enough(with_weights: Sequence[bool], *, stages: int) -> None:
    """Raise UsageError where a model has fewer places than cuts, by the runs between places."""
    places = max(0, sum(with_weights) - 1)
    require(
        stages <= places + 1,
        "stages",
        received=stages,
        expected=f"at most {places + 1}, as the model can be cut at {places} places",
        fix="ask for fewer stages",
        code="too-many-stages",
    )


def _stage_s(low: float, high: float, lead: float) -> float:
    """Return the seconds of a stage from `low` to `high` of the model's."""
    return high - low + lead * low


def _cheapest(
    sums: Sequence[tuple[float, int]],
    weights: Sequence[int],
    stages: int,
    lead: float,
    limit: float,
) -> tuple[int, tuple[int, ...]] | None:
    """Return the fewest bytes, and the cuts, with which no stage takes longer than `limit`."""
    end = len(sums) - 1
    costs: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        ends = [end] if stage == stages - 1 else range(stage + 1, end)
        costs = {
            e: min(options)
            for e in ends
            if (options := list(_extended(costs, e, sums, weights, lead, limit)))
        }
    return costs.get(end)


def _extended(
    costs: dict[int, tuple[int, tuple[int, ...]]],
    end: int,
    sums: Sequence[tuple[float, int]],
    weights: Sequence[int],
    lead: float,
    limit: float,
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the costs with one more stage, which ends here."""
    last = end == len(sums) - 1
    within = limit * (1 + 1e-9)
    return [
        (cost, cuts) if last else (cost + weights[end - 1], (*cuts, end - 1))
        for start, (cost, cuts) in costs.items()
        if sums[start][1] < sums[end][1] and _stage_s(sums[start][0], sums[end][0], lead) <= within
    ]
