"""Plot of a run: loss and metrics over steps, training and validation."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError
from tfdist.outputs.run_directory import COUNTERS

logger = logging.getLogger(__name__)

_NOT_METRICS = COUNTERS | {"learning_rate"}
_TRAINING, _VALIDATION = "#1f5fa8", "#d1661a"


def draw(
    lines: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str
) -> Path | None:
    """Draw the lines of `metrics.jsonl` as a PNG; return its path.

    Returns None, and says so in the log, where matplotlib is not installed or nothing was logged.
    """
    if not lines:
        logger.info("no plot: no virtual epoch was finished")
        return None
    names = panels(lines)
    try:
        figure, axes_of_panels = empty_panels("plot", columns=len(names), width=5.2)
    except UsageError as error:
        logger.info("no plot: %s; %s", error.received, error.fix)
        return None
    for axes, name in zip(axes_of_panels, names, strict=True):
        _draw_panel(axes, lines, name)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
    return Path(path)


def empty_panels(where: str, *, columns: int = 1, width: float = 6.4) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, without pyplot or a display.

    Raises UsageError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            where,
            received="no matplotlib",
            expected="it to be installed",
            fix="pip install 'tfdist[plots]'",
            code="no-matplotlib",
        ) from None
    figure = Figure(figsize=(width * columns, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes_of_panels = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in axes_of_panels:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, axes_of_panels


def panels(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics to show, loss first and no more than three."""
    names = [
        name
        for name, value in lines[-1].items()
        if name not in _NOT_METRICS
        and not name.startswith("val_")
        and isinstance(value, (int, float, type(None)))
    ]
    return sorted(names, key=lambda name: name != "loss")[:3] or ["loss"]


def _draw_panel(axes: Any, lines: Sequence[Mapping[str, Any]], name: str) -> None:
    for key, label, color, marker in (
        (name, "training", _TRAINING, "o"),
        (f"val_{name}", "validation", _VALIDATION, "s"),
    ):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            last = f"{label}, last {points[-1][1]:.4g}"
            axes.plot(*zip(*points, strict=True), label=last, color=color, marker=marker, ms=3.5)
    words = name.replace("_", " ")
    axes.set_title(words.capitalize(), loc="left", fontsize=10)
    axes.set_xlabel("step (optimizer updates)")
    is_share = "accuracy" in name
    unit = {"loss": " (mean per example)"}.get(name, " (fraction of examples)" if is_share else "")
    axes.set_ylabel(words + unit)
    if is_share:
        axes.set_ylim(top=1.005)
    elif all((line.get(key) or 0) >= 0 for line in lines for key in (name, f"val_{name}")):
        axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)
