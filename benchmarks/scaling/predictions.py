"""Predictions of the cost models, judged by jobs that they were not fitted to.

Some of the measured jobs are for fitting, the others for judging: of these, of more workers and of
other places it is said what is full first, and which change helps most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.scaling import cost_model
from benchmarks.scaling.cost_model import Costs, Fit, Place, Point, Ring, Work
from benchmarks.scaling.measure import Shape
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


def fitted_model(fitted: Sequence[Point], held: Sequence[Point]) -> Model:
    """Fits to some jobs of one kind and judges by others."""
    first = min(fitted, key=lambda point: (point.work.ps, point.work.workers))
    new = Model(
        fitted=cost_model.fit(fitted) if first.work.ps else cost_model.fit_ring(fitted),
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


FURTHER = 4
SURE = 2.0
"""Standard errors to each side of what is predicted."""
_MOST = 10.0
_PLAIN = ("cores", "hand", "idle")


def predict(table: Mapping[str, Any], *, hold_out: str | None, link_mbit: float) -> dict[str, Any]:
    """Fits the models to the table of `scaling`; returns as JSON what they say.

    Raises:
        UsageError: as `divide` and `read`.
    """
    fitted, held = divide([Shape.parse(row["shape"]) for row in table["shapes"]], hold_out)
    points = read(table)
    of_ps = fitted_model(_kind(points, fitted, True), _kind(points, held, True))
    models = [of_ps]
    if len({shape.workers for shape in fitted if not shape.ps}) >= RING_POINTS:
        models.append(fitted_model(_kind(points, fitted, False), _kind(points, held, False)))
    places = _places(table["cpus"], list(points), link_mbit)
    counts = _counts(FURTHER * max(shape.workers for shape in points))
    return {
        "parameters": [_parameters(model) for model in models],
        "fitted": [shape.name for shape in fitted],
        "points": [
            _judged(model, point, held=point.shape in held)
            for model in models
            for point in points.values()
            if bool(point.work.ps) == bool(model.work.ps)
        ],
        "curves": [
            _curve(model, name, place, counts) for name, place in places.items() for model in models
        ],
        "advice": [_advice(of_ps, name, place, counts[-1]) for name, place in places.items()],
    }


def _kind(points: Mapping[Shape, Point], shapes: Sequence[Shape], of_ps: bool) -> list[Point]:
    return [points[shape] for shape in shapes if bool(shape.ps) == of_ps]


def _places(cores: int, shapes: Sequence[Shape], link_mbit: float) -> dict[str, Place]:
    found = {"this machine": Place(cores=cores)}
    for rate in sorted({shape.rate_mbit for shape in shapes if shape.rate_mbit}):
        found[f"this machine, {rate:g} Mbit/s"] = Place(cores=cores, mbit=rate)
    apart = Place(cores=cores, mbit=link_mbit, apart=True)
    return found | {f"a machine a task, {link_mbit:g} Mbit/s": apart}


def _counts(most: int) -> list[int]:
    return [*(2**i for i in range((most - 1).bit_length())), most]


def _parameters(model: Model) -> dict[str, Any]:
    """In milliseconds; how sure they are is known of those of a ps job."""
    work, fitted = model.work, model.fitted
    if isinstance(fitted, Ring):
        times_s = {"compute": fitted.compute_s, "round": fitted.round_s}
        ms = {name: {"value": time_s * 1e3} for name, time_s in times_s.items()}
        return {"job": "multiworker", "ms": ms, "sent_bytes": {"gradients": work.write_bytes}}
    values, errors = asdict(fitted.costs), asdict(fitted.errors())
    times = [name for name in values if name.endswith("_s")]
    ms = {name.removesuffix("_s"): _about(values[name] * 1e3, errors[name]) for name in times}
    plain = {name: _about(values[name], errors[name]) for name in _PLAIN}
    sent = {"read": work.read_bytes, "write": work.write_bytes}
    return {"job": "ps", "ms": ms, **plain, "sent_bytes": sent}


def _about(value: float, error: float) -> dict[str, float]:
    factor = math.exp(min(SURE * error, _MOST))
    return {"value": value, "least": value / factor, "most": value * factor}


def _judged(model: Model, point: Point, *, held: bool) -> dict[str, Any]:
    off = math.exp(model.miss(point))
    return {
        "shape": point.shape.name,
        "held_out": held,
        "measured": point.examples_per_s,
        "predicted": point.examples_per_s * off,
        "relative_error": off - 1,
    }


def _curve(model: Model, name: str, place: Place, counts: Sequence[int]) -> dict[str, Any]:
    works = [replace(model.work, workers=count) for count in counts]
    points = [
        {
            "workers": work.workers,
            **_about(model.fitted.examples_per_s(work, place), model.error(work, place)),
            "limit": model.fitted.limit(work, place),
        }
        for work in works
    ]
    job = f"{model.work.ps} ps" if model.work.ps else "multiworker"
    past = model.most_workers if not place.apart else 0
    return {"place": name, "job": job, "most_workers_fitted": past, "points": points}


def _advice(model: Model, name: str, place: Place, most: int) -> str:
    """One line: what is full first in a ps job, from how many workers on, and what helps then."""
    assert isinstance(model.fitted, Fit)
    work, costs = replace(model.work, workers=most), model.fitted.costs
    full, workers = model.fitted.full(work, place)
    head = f"{name}, {work.ps} ps: "
    if most <= workers:
        return f"{head}nothing is full up to {most} workers; more workers help most"
    halved = replace(work, read_bytes=work.read_bytes / 2, write_bytes=work.write_bytes / 2)
    longer = replace(costs, compute_s=2 * costs.compute_s)
    changes = {
        "twice the ps": (costs, replace(work, ps=2 * work.ps), place),
        "twice the cores": (
            replace(costs, cores=2 * costs.cores),
            work,
            replace(place, cores=2 * place.cores),
        ),
        "half the bytes": (costs, halved, place),
        "twice the batch": (longer, replace(work, batch=2 * work.batch), place),
    }
    now = model.fitted.examples_per_s(work, place)
    gains = {what: cost_model.examples_per_s(*to) / now for what, to in changes.items()}
    best = sorted(gains, key=lambda what: -gains[what])
    said = ", ".join(f"{what} x {gains[what]:.2f}" for what in best)
    # The first worker beyond.
    return f"{head}{full} full from {math.floor(workers) + 1} workers on; at {most}: {said}"


def lines(model: Mapping[str, Any]) -> list[str]:
    """The models for a person: what was measured, what is predicted, what to change."""
    text = [f"cost model, fitted on {', '.join(model['fitted'])}; ms and bytes of a step"]
    text += [_costs(of_job) for of_job in model["parameters"]]
    text.append(f"{'job':<12} {'measured':>10} {'predicted':>10} {'error':>7}")
    for point in model["points"]:
        row = f"{point['shape']:<12} {point['measured']:>10,.0f} {point['predicted']:>10,.0f}"
        held = "  held out" if point["held_out"] else ""
        text.append(f"{row} {point['relative_error']:>+7.1%}{held}")
    names = [f"{curve['place']}, {curve['job']}" for curve in model["curves"]]
    width = max(map(len, names))
    counts = "".join(f"{point['workers']:>15}" for point in model["curves"][0]["points"])
    text.append(f"{'examples/s with workers:':<{width}}{counts}")
    for name, curve in zip(names, model["curves"], strict=True):
        text.append(f"{name:<{width}}" + "".join(map(_cell, curve["points"])))
    return text + model["advice"]


def _costs(of_job: Mapping[str, Any]) -> str:
    fitted = of_job["ms"] | {name: of_job[name] for name in _PLAIN if name in of_job}
    parts = [
        f"{name} {found['value']:.3g}"
        + (f" ({found['least']:.2g} to {found['most']:.2g})" if "least" in found else "")
        for name, found in fitted.items()
    ]
    sent = [f"{name} {size:,.0f} bytes" for name, size in of_job["sent_bytes"].items()]
    return f"  {of_job['job']}: {', '.join(parts + sent)}"


def _cell(point: Mapping[str, float]) -> str:
    around = f"±{min(point['most'] / point['value'] - 1, 9.99):.0%}"
    return f"{point['value']:>9,.0f} {around:<5}"
