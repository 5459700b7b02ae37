"""Schedules: in which order a stage runs the forward and backward passes of its micro-batches.

Pure: each stage knows its order, and those of all others, before anything runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.errors import require_one_of

SCHEDULES = ("1f1b", "gpipe", "serial")
_AHEAD = 2
"""Micro-batches in flight under 1f1b beyond the least, which hide the links' time."""


class Pass(NamedTuple):
    """One pass of a stage: forward or backward, of which micro-batch."""

    forward: bool
    micro: int


def passes(kind: str, *, stage: int, stages: int, micros: int) -> list[Pass]:
    """Return the passes of a stage in a step, in their order.

    Backward passes come by the number of their micro-batch in every schedule, so that sums of
    gradients have the same bits in all of them.

    Args:
      kind: ``1f1b`` keeps the activations of two micro-batches more than there are stages left,
        ``gpipe`` of all; ``serial`` runs one micro-batch at a time.
      stage: of `stages`, from 0.
      stages: in a row.
      micros: micro-batches of the step.
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
    """Return the examples of each micro-batch: as few of at most `split_size` as there can be.

    They differ by one at the most; each counts by its share of the batch.
    """
    count = max(1, -(-batch // split_size))
    bounds = [batch * k // count for k in range(count + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)]


class Timeline(NamedTuple):
    """How a step goes.

    Attributes:
      makespan_s: from the first pass to the last one's end.
      bubble: the part of all stages' time in which they wait, from 0 to 1.
    """

    makespan_s: float
    bubble: float


def timeline(
    orders: Sequence[Sequence[Pass]],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> Timeline:
    """Return how a step goes when each stage follows its order.

    Args:
      orders: of each stage.
      forward_s: of each stage, for a micro-batch.
      backward_s: of each stage, for a micro-batch.
    """
    stages = len(orders)
    done, free_s = [0] * stages, [0.0] * stages
    ended: dict[tuple[int, Pass], float] = {}
    left, before, busy_s = sum(map(len, orders)), 0, 0.0
    while left != before:
        before = left
        for stage, order in enumerate(orders):
            for this in order[done[stage] :]:
                start_s = _arrival(stage, this, stages, ended)
                if start_s is None:
                    break
                lasts = forward_s[stage] if this.forward else backward_s[stage]
                free_s[stage] = max(start_s, free_s[stage]) + lasts
                ended[stage, this] = free_s[stage]
                done[stage] += 1
                left -= 1
                busy_s += lasts
    assert not left, "orders in which the stages wait for each other for ever"
    return Timeline(max(free_s), bubble=1 - busy_s / (stages * max(free_s)))


def _arrival(
    stage: int, this: Pass, stages: int, ended: dict[tuple[int, Pass], float]
) -> float | None:
    """Return when what a pass needs is there, None while that is not known."""
    source = stage - 1 if this.forward else stage + 1
    if this.forward and stage == 0:
        return 0.0
    if source == stages:
        return ended.get((stage, Pass(True, this.micro)))
    return ended.get((source, this))


def most_kept(order: Sequence[Pass]) -> int:
    """Return of how many micro-batches a stage keeps activations at a time."""
    return max(itertools.accumulate(1 if one.forward else -1 for one in order), default=0)
