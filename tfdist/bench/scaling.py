"""Examples per second and time to a loss, over the numbers of workers and parameter servers."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.bench.jobs import seconds_to_loss
from tfdist.bench.shapes import Shape
from tfdist.outputs.costs import COLUMNS

_LOG = logging.getLogger(__name__)
Run = Callable[[Shape, Path], Mapping[str, Any]]


def measure(
    shapes: Sequence[Shape], *, repeats: int, loss: float | None, out: Path, run: Run
) -> dict[str, Any]:
    """Runs every shape `repeats` times, in turn; returns the table as JSON.

    In turn, so that a machine that is slow for a while is slow for all of them. Without `loss` it
    is the highest of the last losses of all jobs: what all of them came to.
    """
    results: dict[Shape, list[Mapping[str, Any]]] = {shape: [] for shape in shapes}
    for repeat in range(repeats):
        for shape in shapes:
            found = run(shape, out / "runs" / f"{shape.name}-{repeat}")
            rate = found["examples_per_second"] or 0.0
            _LOG.info("%s, %d of %d: %.0f examples/s", shape.name, repeat + 1, repeats, rate)
            results[shape].append(found)
    every = [found for listed in results.values() for found in listed]
    target = max(found["metrics"]["loss"] for found in every) if loss is None else loss
    return {
        "loss": target,
        "repeats": repeats,
        "cpus": len(os.sched_getaffinity(0)),
        "shapes": [_row(shape, listed, target) for shape, listed in results.items()],
    }


def _row(shape: Shape, listed: Sequence[Mapping[str, Any]], loss: float) -> dict[str, Any]:
    to_loss = [seconds_to_loss(found["lines"], loss) for found in listed]
    return {
        "shape": shape.name,
        "workers": shape.workers,
        "ps": shape.ps,
        "rate_mbit": shape.rate_mbit,
        "batch": listed[0]["examples"] / listed[0]["steps"],
        "sent_bytes": _sent_bytes(listed[0].get("ps_profile")),
        "examples_per_second": _spread([found["examples_per_second"] for found in listed]),
        "seconds_to_loss": _spread(to_loss),
        "last_loss": _spread([found["metrics"]["loss"] for found in listed]),
        "step_ms": _step_ms([found.get("ps_profile") for found in listed]),
    }


def _step_ms(profiles: Sequence[Mapping[str, Any] | None]) -> dict[str, float] | None:
    """The parts of a step: medians of the jobs' means over their workers; None: not measured."""
    means: list[dict[str, float]] = []
    for profile in profiles:
        workers = list((profile or {"workers": {}})["workers"].values())
        steps = sum(worker["steps"] for worker in workers)
        if not steps:
            return None
        means.append(
            {
                name: sum(w["steps"] * w.get(f"{name}_ms", 0.0) for w in workers) / steps
                for name in COLUMNS
            }
        )
    return {name: statistics.median(mean[name] for mean in means) for name in COLUMNS}


def _sent_bytes(profile: Mapping[str, Any] | None) -> dict[str, int] | None:
    """What a step reads from all ps, and what it writes to them; None: not counted."""
    if not profile:
        return None
    sizes = {ends: link["size_bytes"] for ends, link in profile["links"].items()}
    read = sum(size for ends, size in sizes.items() if ends.endswith(" to worker"))
    return {"read": read, "write": sum(sizes.values()) - read}


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median and range of what was measured; None where one of the jobs has no such figure."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    median = statistics.median(known)
    return {"median": median, "least": min(known), "most": max(known), "all": known}


def check(table: Mapping[str, Any]) -> None:
    """Raises `KeyError`, `TypeError` or `ValueError` for what is no table of `measure`."""
    for key in ("arguments", "cpus", "loss", "repeats"):
        table[key]
    for row in table["shapes"]:
        Shape.parse(row["shape"])
        for key in ("rate_mbit", "batch", "sent_bytes", "step_ms", "seconds_to_loss"):
            row[key]
        rate = row["examples_per_second"]
        if (rate is not None and not rate["median"] > 0) or not row["batch"] > 0:
            raise ValueError(f"{row['shape']} did nothing")


def lines(table: Mapping[str, Any]) -> list[str]:
    """The table for a person: medians, and the range of the repeats."""
    loss = f"s to loss {table['loss']:.4g}"
    text = [f"{'job':<10} {'examples/s':>12} {'range':>17} {loss:>22} {'range':>15}"]
    for row in table["shapes"]:
        rate, seconds = row["examples_per_second"], row["seconds_to_loss"]
        cells = [_cells(rate, 12, 17, ",.0f"), _cells(seconds, 22, 15, ".2f")]
        text.append(f"{row['shape']:<10} {cells[0]} {cells[1]}")
    profiled = [row for row in table["shapes"] if row["step_ms"]]
    if profiled:
        text += ["", f"{'ms a step':<10} " + " ".join(f"{name:>9}" for name in COLUMNS)]
    for row in profiled:
        parts = " ".join(f"{row['step_ms'][name]:>9.2f}" for name in COLUMNS)
        text.append(f"{row['shape']:<10} {parts}")
    return text


def _cells(spread: Mapping[str, Any] | None, width: int, range_width: int, form: str) -> str:
    if spread is None:
        return f"{'-':>{width}} {'':>{range_width}}"
    between = f"{spread['least']:{form}} to {spread['most']:{form}}"
    return f"{spread['median']:>{width}{form}} {between:>{range_width}}"
