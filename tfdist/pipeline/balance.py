"""Balance: at which places to cut, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
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
    it besides its own; of the cuts within `tolerance` of that, those that the fewest bytes cross,
    and of these the fastest.

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

    def least(most_bytes: float) -> float:
        def is_enough(limit: float) -> bool:
            found = cheapest(limit)
            return found is not None and found[0] <= most_bytes

        return limits[bisect.bisect_left(limits, True, key=is_enough)]

    fewest = cheapest(least(math.inf) * (1 + tolerance))
    assert fewest is not None
    found = cheapest(least(fewest[0]))
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
    last, within = len(sums) - 1, limit * (1 + 1e-9)

    def is_stage(start: int, end: int) -> bool:
        (low, weights_before), (high, weights_then) = sums[start], sums[end]
        return weights_before < weights_then and _stage_s(low, high, lead) <= within

    # By where the stages so far end; the cut behind the run before that has its index.
    found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages):
        found = {
            end: min(options)
            for end in range(stage, last)
            if (
                options := [
                    (cost + weights[end - 1], (*cuts, end - 1))
                    for start, (cost, cuts) in found.items()
                    if is_stage(start, end)
                ]
            )
        }
    return min((one for start, one in found.items() if is_stage(start, last)), default=None)
