"""Plot of a measurement: medians with the range of the repeats, and the predicted curves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.scaling.measure import Shape

_LOG = logging.getLogger(__name__)
_PS, _MULTIWORKER = "#1f5fa8", "#d1661a"


def draw(table: Mapping[str, Any], path: Path, *, title: str) -> Path | None:
    """Draws a PNG; returns its path, or None, and says so, where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        _LOG.warning("no picture: matplotlib is missing; pip install 'tfdist[plots]'")
        return None
    panels = {
        "examples_per_second": "examples per second",
        "seconds_to_loss": f"seconds of training to a loss of {table['loss']:.4g}",
    }
    model = table.get("cost_model")
    rows = 2 if model else 1
    figure = Figure(figsize=(10.4, 4.0 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(rows, 2, squeeze=False)
    for axes, (key, words) in zip(every[0], panels.items(), strict=True):
        _bars(axes, table, key)
        axes.set_title(words.capitalize(), loc="left", fontsize=10)
    if model:
        _predicted(every[1][0], every[1][1], model)
    figure.suptitle(title, fontsize=12, wrap=True)
    figure.supxlabel(
        f"medians of {table['repeats']}, bars from least to most; {table['cpus']} CPUs", fontsize=8
    )
    figure.savefig(path)
    return path


def _bars(axes: Any, table: Mapping[str, Any], key: str) -> None:
    rows = [row for row in table["shapes"] if row[key] is not None]
    middle = [row[key]["median"] for row in rows]
    below = [row[key]["median"] - row[key]["least"] for row in rows]
    above = [row[key]["most"] - row[key]["median"] for row in rows]
    axes.bar(
        [row["shape"] for row in rows],
        middle,
        yerr=[below, above],
        color=[_PS if row["ps"] else _MULTIWORKER for row in rows],
        capsize=3,
    )
    axes.tick_params(axis="x", labelrotation=45 if len(rows) > 5 else 0)
    axes.set_ylim(bottom=0)
    if not rows:
        axes.text(0.5, 0.5, "not reached", ha="center", transform=axes.transAxes)
    _plain(axes)


def _predicted(here: Any, apart: Any, model: Mapping[str, Any]) -> None:
    """The curves of this machine with what was measured on it, and beside them the last place."""
    last = model["curves"][-1]["place"]
    for curve in model["curves"]:
        _curve(apart if curve["place"] == last else here, curve)
    for point in model["points"]:
        shape = Shape.parse(point["shape"])
        color = _PS if shape.ps else _MULTIWORKER
        face = "white" if point["held_out"] else color
        here.plot(shape.workers, point["measured"], "o", mec=color, mfc=face, zorder=3)
        label = point["shape"].lower()
        here.annotate(
            label, (shape.workers, point["measured"]), (4, -9), textcoords="offset points", size=6
        )
    titles = {
        here: "This machine; circles measured, hollow held out",
        apart: f"Not measured: {last}",
    }
    for axes, words in titles.items():
        axes.set_title(words, loc="left", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="workers", ylabel="examples per second")
        axes.legend(fontsize=7)
        _plain(axes)


def _curve(axes: Any, curve: Mapping[str, Any]) -> None:
    """A line, with bars of two standard errors to each side past what it was fitted to."""
    points = curve["points"]
    past = [point for point in points if point["workers"] > curve["most_workers_fitted"]]
    color = _MULTIWORKER if curve["job"] == "multiworker" else _PS
    name = f"{curve['job']}, {curve['place']}"
    style = "--" if "Mbit" in curve["place"] else "-"
    workers = [point["workers"] for point in points]
    axes.plot(workers, [point["value"] for point in points], style, color=color, label=name)
    axes.errorbar(
        [point["workers"] for point in past],
        [point["value"] for point in past],
        yerr=[
            [point["value"] - point["least"] for point in past],
            [point["most"] - point["value"] for point in past],
        ],
        fmt="none",
        color=color,
        capsize=3,
    )


def _plain(axes: Any) -> None:
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
