"""Segments of stages that compute their layers' outputs again, so that few are there at once."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.pipeline.balance import balanced, runs
from tfdist.pipeline.cuts import Assignment, LayerGraph, ModelPart, made_bytes

_MOST = 8
_MOST_TENSORS = 2


def segments_of(
    graph: LayerGraph, assignment: Assignment, *, kept: Sequence[int]
) -> list[list[ModelPart]]:
    """Return the segments of each stage, with which it needs the least memory.

    That is the inputs of its segments, of all micro-batches that it keeps, and what the layers of
    one segment make.

    Args:
      graph: of the model.
      assignment: of its nodes to stages.
      kept: of how many micro-batches each stage keeps inputs at a time.
    """
    inner = [p for stage, most in enumerate(kept) for p in _inner(graph, assignment, stage, most)]
    fine = graph.divided_behind(assignment, inner)
    parts = graph.divided(fine, num_stages=max(fine) + 1)
    stage_of = dict(zip(fine, assignment, strict=True))
    return [[p for p in parts if stage_of[p.index] == stage] for stage in range(len(kept))]


def _inner(graph: LayerGraph, assignment: Assignment, stage: int, kept: int) -> list[int]:
    """Return the nodes behind which a stage is divided."""
    mine = [i for i, one in enumerate(assignment) if one == stage]
    places = [
        place
        for place in graph.places()
        if mine[0] <= place.position < mine[-1] and place.num_tensors <= _MOST_TENSORS
    ]
    ends = [*(place.position for place in places), mine[-1]]
    made, low = [], mine[0]
    for end in ends:
        made.append(made_bytes([graph.nodes[i] for i in mine if low <= i <= end]))
        low = end + 1
    crossing = [place.example_bytes for place in places]
    found = []
    for count in range(1, min(_MOST, len(ends)) + 1):
        cut = balanced(made, crossing, stages=count)
        largest = max(sum(made[run]) for run in runs(cut, len(made)))
        held = kept * sum(crossing[i] for i in cut) // 2  # they count there and back
        found.append((largest + held, cut))
    return [places[i].position for i in min(found)[1]]
