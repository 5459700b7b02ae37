"""Empty plots for the charts of the benchmarks."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def empty_panels(*, columns: int = 1, width: float = 6.4) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, without pyplot or a display."""
    figure = Figure(figsize=(width * columns, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes_of_panels = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in axes_of_panels:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, axes_of_panels
