"""Plot of a measurement: medians with the range of the repeats."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_PS, _MULTIWORKER = "#1f5fa8", "#d1661a"


def draw(table: Mapping[str, Any], path: Path, *, title: str) -> Path | None:
    """Draws a PNG; returns its path, or None, and says so, where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        _LOG.warning("no picture: matplotlib is missing; pip install matplotlib")
        return None
    panels = {
        "examples_per_second": "examples per second",
        "seconds_to_loss": f"seconds of training to a loss of {table['loss']:.4g}",
    }
    figure = Figure(figsize=(10.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, words) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        _bars(axes, table, key)
        axes.set_title(words.capitalize(), loc="left", fontsize=10)
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
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
