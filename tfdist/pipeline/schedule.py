"""Schedules: in which order a stage runs the forward and backward passes of its micro-batches.

Pure: each stage knows its order, and those of all others, before anything runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfdist.errors import require, require_int, require_one_of

SCHEDULES = ("1f1b", "gpipe", "serial")


class Pass(NamedTuple):
    """One pass of a stage: forward or backward, of which micro-batch."""

    forward: bool
    micro: int


def passes(kind: str, *, stage: int, stages: int, micros: int, ahead: int = 2) -> list[Pass]:
    """Return the passes of a stage in a step, in their order.

    Backward passes come by the number of their micro-batch in every schedule, so that sums of
    gradients have the same bits in all of them.

    Args:
      kind: ``1f1b`` keeps the activations of `ahead` micro-batches more than there are stages left,
        ``gpipe`` of all; ``serial`` runs one micro-batch at a time.
      stage: of `stages`, from 0.
      stages: in a row.
      micros: micro-batches of the step.
      ahead: under ``1f1b``, micro-batches in flight beyond the least, which hide the links' time;
        links must hold as many messages each way, and at least one.
    """
    require_one_of("schedule", kind, SCHEDULES)
    if kind == "gpipe":
        return [Pass(forward, m) for forward in (True, False) for m in range(micros)]
    last = stage == stages - 1
    warm = 0 if kind == "serial" or last else min(micros, stages - 1 - stage + ahead)
    order = [Pass(True, m) for m in range(warm)]
    for m in range(micros):
        if m + warm < micros:
            order.append(Pass(True, m + warm))
        order.append(Pass(False, m))
    return order


def micro_sizes(batch: int, *, split_size: int) -> list[int]:
    """Return the examples of each micro-batch: as few of at most `split_size` as there can be.

    They differ by one at the most; each counts by its share of the batch.

    Raises:
      UsageError: `split_size` is no positive number.
    """
    split_size = require_int("split_size", split_size, least=1, fix="give examples, such as 12")
    count = max(1, -(-batch // split_size))
    bounds = [batch * k // count for k in range(count + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """How a step goes.

    Attributes:
      makespan_s: from the first pass to the last one's end.
      busy_s: how long each stage computes.
      most_kept: of how many micro-batches each stage keeps activations at a time.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    most_kept: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Return the part of all stages' time in which they wait, from 0 to 1."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def timeline(
    orders: Sequence[Sequence[Pass]],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    buffers: int | None = None,
) -> Timeline:
    """Return how a step goes when each stage follows its order.

    Args:
      orders: of each stage.
      forward_s: of each stage, for a micro-batch.
      backward_s: of each stage, for a micro-batch.
      buffers: messages that a link holds each way before its sender waits; None for any number.

    Raises:
      UsageError: the stages would wait for each other for ever.
    """
    done, free_s = _simulated(orders, forward_s, backward_s, buffers)
    left = [stage for stage, order in enumerate(orders) if done[stage] < len(order)]
    require(
        not left,
        "schedule",
        received=f"orders in which stage {left[0] if left else 0} waits for ever",
        expected="orders that come to their end",
        fix="give the links more buffers, or use schedule 1f1b",
        code="deadlock",
    )
    return Timeline(
        makespan_s=max(free_s),
        busy_s=tuple(
            sum(forward_s[s] if one.forward else backward_s[s] for one in order)
            for s, order in enumerate(orders)
        ),
        most_kept=tuple(map(most_kept, orders)),
    )


def _simulated(
    orders: Sequence[Sequence[Pass]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    buffers: int | None,
) -> tuple[list[int], list[float]]:
    """Return how many passes each stage ends, and when it ends the last of them.

    A message leaves when the stage's pass has ended and its link has room: one more is taken out
    when the neighbour begins the pass that it is for.
    """
    stages = len(orders)
    done, free_s = [0] * stages, [0.0] * stages
    began: dict[tuple[int, Pass], float] = {}
    sent: dict[tuple[int, Pass], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                this = order[done[stage]]
                start_s = _arrival(stage, this, stages, sent)
                if start_s is None:
                    break
                if (stage, this) not in began:
                    began[stage, this] = max(start_s, free_s[stage])
                    moved = True
                lasts = forward_s[stage] if this.forward else backward_s[stage]
                room_s = _room(stage, this, orders, began, buffers)
                if room_s is None:
                    break
                free_s[stage] = max(began[stage, this] + lasts, room_s)
                sent[stage, this] = free_s[stage]
                done[stage] += 1
                moved = True
    return done, free_s


def _arrival(
    stage: int, this: Pass, stages: int, sent: dict[tuple[int, Pass], float]
) -> float | None:
    """Return when what a pass needs is there, None while that is not known."""
    source = stage - 1 if this.forward else stage + 1
    if this.forward and stage == 0:
        return 0.0
    if source == stages:
        return sent.get((stage, Pass(True, this.micro)))
    return sent.get((source, this))


def _room(
    stage: int,
    this: Pass,
    orders: Sequence[Sequence[Pass]],
    began: dict[tuple[int, Pass], float],
    buffers: int | None,
) -> float | None:
    """Return when the link has room for what a pass sends, None while that is not known."""
    target = stage + 1 if this.forward else stage - 1
    if buffers is None or not 0 <= target < len(orders):
        return 0.0
    same_way = [one for one in orders[stage] if one.forward == this.forward]
    place = same_way.index(this) - buffers
    return 0.0 if place < 0 else began.get((target, same_way[place]))


def most_kept(order: Sequence[Pass]) -> int:
    """Return of how many micro-batches a stage keeps activations at a time."""
    return max(_kept(order), default=0)


def _kept(order: Sequence[Pass]) -> Iterator[int]:
    kept = 0
    for one in order:
        kept += 1 if one.forward else -1
        yield kept
