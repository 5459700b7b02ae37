"""What the cost models say: of the measured jobs, of more workers, and of what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tfdist.bench import cost_model, judge
from tfdist.bench.cost_model import Fit, Place, Point
from tfdist.bench.judge import Model
from tfdist.bench.ring import Ring
from tfdist.bench.shapes import Shape

FURTHER = 4
SURE = 2.0
"""Standard errors to each side of what is predicted."""
_MOST = 10.0
_PLAIN = ("cores", "hand", "idle")


def foresee(table: Mapping[str, Any], *, hold_out: str | None, link_mbit: float) -> dict[str, Any]:
    """Fits the models to the table of `scaling`; returns as JSON what they say.

    Raises:
        UsageError: as `judge.divide` and `judge.read`.
    """
    fitted, held = judge.divide([Shape.parse(row["shape"]) for row in table["shapes"]], hold_out)
    points = judge.read(table)
    of_ps = judge.model(_kind(points, fitted, True), _kind(points, held, True))
    models = [of_ps]
    if len({shape.workers for shape in fitted if not shape.ps}) >= judge.RING_POINTS:
        models.append(judge.model(_kind(points, fitted, False), _kind(points, held, False)))
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
