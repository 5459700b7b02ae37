"""Some of the measured jobs are for fitting the cost models, the others for judging them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tfdist.bench import cost_model, ring
from tfdist.bench.cost_model import Costs, Fit, Place, Point, Work
from tfdist.bench.ring import Ring
from tfdist.bench.shapes import Shape
from tfdist.errors import UsageError

PS_POINTS, RING_POINTS = 3, 2


def divide(shapes: Sequence[Shape], hold_out: str | None) -> tuple[list[Shape], list[Shape]]:
    """Returns those to fit to, and those to judge by.

    What a wire limits is never fitted: the models know bytes without it. Without `hold_out` it is
    the job with the most workers, of each kind of which enough others are left.

    Raises:
        UsageError: a job of `hold_out` is none of these, or too few others are left.
    """
    free = [shape for shape in shapes if shape.rate_mbit is None]
    held = _most_workers(free) if hold_out is None else _named(hold_out, shapes)
    fitted = [shape for shape in free if shape not in held]
    of_ps = [shape for shape in fitted if shape.ps]
    if len(of_ps) < PS_POINTS or len({shape.workers for shape in of_ps}) < 2:
        raise UsageError(
            "--shapes" if hold_out is None else "--hold_out",
            received=f"{', '.join(shape.name for shape in of_ps) or 'no ps job'} to fit a model to",
            expected=f"{PS_POINTS} or more ps jobs at no limited rate, of 2 or more numbers of "
            f"workers: it has {len(fields(Costs))} parameters",
            fix="measure more shapes, or hold out fewer",
        )
    return fitted, [shape for shape in shapes if shape not in fitted]


def _most_workers(shapes: Sequence[Shape]) -> list[Shape]:
    of_ps = [shape for shape in shapes if shape.ps]
    others = [shape for shape in shapes if not shape.ps]
    kinds = [(of_ps, PS_POINTS), (others, RING_POINTS)]
    return [
        max(kind, key=lambda shape: (shape.workers, -shape.ps))
        for kind, least in kinds
        if len(kind) > least
    ]


def _named(hold_out: str, shapes: Sequence[Shape]) -> list[Shape]:
    names = {shape.name: shape for shape in shapes}
    wanted = [word.strip().upper() for word in hold_out.split(",")]
    for word in wanted:
        if word not in names:
            raise UsageError(
                "--hold_out",
                received=repr(word),
                expected=f"of the jobs that are measured: {', '.join(names)}",
                fix=f"write --hold_out {shapes[-1].name}",
            )
    return [names[word] for word in wanted]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One of the two models, and how far it was out on the jobs that were held out."""

    fitted: Fit | Ring
    work: Work
    """Of the fitted job with the fewest ps, and the fewest workers."""
    most_workers: int
    held_out_error: float
    """Root mean square of logarithms; 0 where nothing was held out."""

    def error(self, work: Work, place: Place) -> float:
        """The standard error of a prediction's logarithm.

        That of the fit, and that of the jobs held out, which counts once more for each doubling
        of the workers past those fitted.
        """
        past = math.log2(max(1.0, work.workers / self.most_workers))
        return math.hypot(self.fitted.error(work, place), self.held_out_error * math.sqrt(1 + past))

    def miss(self, point: Point) -> float:
        """The logarithm of predicted by measured."""
        return math.log(self.fitted.examples_per_s(point.work, point.place) / point.examples_per_s)


def model(fitted: Sequence[Point], held: Sequence[Point]) -> Model:
    """Fits to some jobs of one kind and judges by others."""
    first = min(fitted, key=lambda point: (point.work.ps, point.work.workers))
    new = Model(
        fitted=cost_model.fit(fitted) if first.work.ps else ring.fit(fitted),
        work=first.work,
        most_workers=max(point.work.workers for point in fitted),
        held_out_error=0.0,
    )
    squares = [new.miss(point) ** 2 for point in held]
    return replace(new, held_out_error=math.sqrt(sum(squares) / max(1, len(squares))))


def read(table: Mapping[str, Any]) -> dict[Shape, Point]:
    """The jobs of the table of `scaling`; what ps jobs write is what a ring sends round.

    Raises:
        UsageError: the steps of a ps job were not measured, or nothing was.
    """
    found: dict[Shape, Point] = {}
    for row in sorted(table["shapes"], key=lambda row: -row["ps"]):
        shape = Shape.parse(row["shape"])
        parts, sent = row["step_ms"], row["sent_bytes"]
        if row["examples_per_second"] is None or (shape.ps and not (parts and sent)):
            raise UsageError(
                row["shape"],
                received="a measurement without what its steps cost",
                expected="one with it: the cost model is fitted to that",
                fix="measure without --no-profile_ps, and long enough for all workers to warm up",
            )
        first = next(iter(found.values()), None)
        point = Point(
            shape=shape,
            work=Work(
                workers=shape.workers,
                ps=shape.ps,
                batch=row["batch"],
                read_bytes=sent["read"] if sent else 0.0,
                write_bytes=sent["write"] if sent else first.work.write_bytes if first else 0.0,
            ),
            place=Place(cores=table["cpus"], mbit=shape.rate_mbit),
            examples_per_s=row["examples_per_second"]["median"],
        )
        if parts:
            point = replace(
                point,
                compute_s=(parts["input"] + parts["compute"]) / 1e3,
                exchange_s=(parts["read"] + parts["write"]) / 1e3,
            )
        found[shape] = point
    return {shape: found[shape] for shape in map(Shape.parse, _names(table))}


def _names(table: Mapping[str, Any]) -> list[str]:
    return [row["shape"] for row in table["shapes"]]
