"""Schedule of a step: the order of each stage's passes, and the choice of fast cuts.

All functions are pure. Each stage computes the orders of all stages before the first pass.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.errors import require, require_one_of

SCHEDULES = ("1f1b", "gpipe", "serial")
_AHEAD = 2
"""Extra micro-batches in flight under 1f1b, which hide the time of transfers."""
_TOLERANCE = 0.03


class Pass(NamedTuple):
    """Pass of a stage: its direction and the index of its micro-batch."""

    forward: bool
    micro: int


def passes(kind: str, *, stage: int, stages: int, micros: int) -> list[Pass]:
    """Return the passes of a stage in a step, in their order.

    In every schedule the backward passes have the order of their micro-batches, so the sums of
    gradients have the same bits.

    ``1f1b`` keeps the activations of up to S + 2 micro-batches. S counts this stage and all later
    stages. ``gpipe`` keeps all activations. ``serial`` runs the micro-batches in sequence.
    """
    require_one_of("schedule", kind, SCHEDULES)
    if kind == "gpipe":
        return [Pass(forward, m) for forward in (True, False) for m in range(micros)]
    last = stage == stages - 1
    warm = 0 if kind == "serial" or last else min(micros, stages - 1 - stage + _AHEAD)
    order = [Pass(True, m) for m in range(warm)]
    for m in range(micros):
        if m + warm < micros:
            order.append(Pass(True, m + warm))
        order.append(Pass(False, m))
    return order


def micro_sizes(batch: int, *, split_size: int) -> list[int]:
    """Return the sizes of the fewest micro-batches with at most `split_size` examples each.

    The sizes differ by at most 1. The loss weights a micro-batch by its share of the batch.
    """
    count = max(1, -(-batch // split_size))
    bounds = [batch * k // count for k in range(count + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)]


class Timeline(NamedTuple):
    """Simulated duration of a step."""

    makespan_s: float  # from the start of the first pass to the end of the last
    bubble: float  # fraction of all stages' time spent waiting, 0 to 1


def timeline(
    orders: Sequence[Sequence[Pass]],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> Timeline:
    """Simulate a step from the order of each stage's passes and the times of a pass."""
    stages = len(orders)
    done, free_s = [0] * stages, [0.0] * stages
    ended: dict[tuple[int, Pass], float] = {}
    left, before, busy_s = sum(map(len, orders)), 0, 0.0
    while left != before:
        before = left
        for stage, order in enumerate(orders):
            for this in order[done[stage] :]:
                if this.forward:
                    start_s = ended.get((stage - 1, this)) if stage else 0.0
                elif stage == stages - 1:
                    start_s = ended.get((stage, Pass(True, this.micro)))
                else:
                    start_s = ended.get((stage + 1, this))
                if start_s is None:  # its input is not computed yet
                    break
                lasts = forward_s[stage] if this.forward else backward_s[stage]
                free_s[stage] = max(start_s, free_s[stage]) + lasts
                ended[stage, this] = free_s[stage]
                done[stage] += 1
                left -= 1
                busy_s += lasts
    assert not left, "the orders make the stages wait for each other for ever"
    return Timeline(max(free_s), bubble=1 - busy_s / (stages * max(free_s)))


def most_kept(order: Sequence[Pass]) -> int:
    """Return the maximum number of micro-batches with kept activations in a stage."""
    return max(itertools.accumulate(1 if one.forward else -1 for one in order), default=0)


# Balance: cuts that make the slowest stage as fast as possible.


def balanced(
    seconds: Sequence[float],
    crossing_bytes: Sequence[int],
    *,
    stages: int,
    trainable: Sequence[bool] | None = None,
    lead: float = 0.0,
) -> tuple[int, ...]:
    """Return the indices of the places to cut at, in order.

    The cuts minimize the time of the slowest stage. A stage's time is its own seconds plus `lead`
    times the seconds of all stages before it. Among cuts within 3 % of the minimum, choose the cuts
    with the fewest crossing bytes, and among these the fastest.

    Args:
      seconds: Time of each run of layers between two places. It has one more item than the places.
      crossing_bytes: Bytes that cross each place.
      stages: Number of stages.
      trainable: Whether each run has trainable weights (default: all). Each stage needs some.
      lead: Part of the earlier stages' time that a stage waits at the start and end of a step
        (default: 0), for example 1 / M with M micro-batches.

    Raises:
      UsageError: there are fewer places than cuts.
    """
    with_weights = [True] * len(seconds) if trainable is None else trainable
    require_enough(with_weights, stages=stages)
    # For each end: the seconds, and the number of runs with weights, before the end.
    sums = [(0.0, 0), *zip(*map(itertools.accumulate, (seconds, with_weights)), strict=True)]
    ends = [end for end, _ in sums]
    pairs = itertools.combinations(ends, 2)
    limits = sorted({high - low + lead * low for low, high in pairs})
    cheapest = functools.partial(_cheapest, sums, crossing_bytes, stages, lead)

    def least(most_bytes: float) -> float:
        def is_enough(limit: float) -> bool:
            found = cheapest(limit)
            return found is not None and found[0] <= most_bytes

        return limits[bisect.bisect_left(limits, True, key=is_enough)]

    fewest = cheapest(least(math.inf) * (1 + _TOLERANCE))
    assert fewest is not None
    found = cheapest(least(fewest[0]))
    assert found is not None
    return found[1]


def runs(cut: Sequence[int], count: int) -> list[slice]:
    """Return the slice of the `count` parts that each stage has."""
    return list(itertools.starmap(slice, itertools.pairwise([0, *(i + 1 for i in cut), count])))


def require_enough(
    with_weights: Sequence[bool],
    *,
    stages: int,
    reason: str = "",
    fix: str = "use fewer stages",
) -> None:
    """Raise UsageError if the model has fewer places than cuts."""
    places = max(0, sum(with_weights) - 1)
    require(
        stages <= places + 1,
        "stages",
        f"{stages} stages need {stages - 1} cuts, but the model can be cut at {places} places"
        f"{reason}",
        fix=fix,
        code="no-cut",
    )


def _cheapest(
    sums: Sequence[tuple[float, int]],
    weights: Sequence[int],
    stages: int,
    lead: float,
    limit: float,
) -> tuple[int, tuple[int, ...]] | None:
    """Return the fewest bytes and their cuts, if every stage's time is at most `limit`."""
    last, within = len(sums) - 1, limit * (1 + 1e-9)

    def is_stage(start: int, end: int) -> bool:
        (low, weights_before), (high, weights_then) = sums[start], sums[end]
        return weights_before < weights_then and high - low + lead * low <= within

    # Bytes and cuts of the best stages so far, by their end. A cut is a stage's last run.
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
