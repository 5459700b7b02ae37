"""Building blocks of the page: formatted numbers, HTML, and SVG charts.

CSS classes of the page define the colours of a chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

UNKNOWN = "\N{EN DASH}"


def number(value: float | None) -> str:
    """Format a number for people, such as 12,345 or 0.00123."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Format a duration as ``1 h 02 min``, ``3 min 20 s`` or ``12.3 s``."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02} s"
    return f"{seconds:.1f} s".replace(".0 s", " s")


def clock(at: float | None) -> str:
    """Format a time as date and time in UTC."""
    return UNKNOWN if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


NUM_COLOURS = 8
_WIDTH, _HEIGHT = 400.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 10.0, 12.0, 34.0
_MAX_HITS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line of a chart: points ``(x, y)``, the number of its colour, and its style.

    A point with y = NaN breaks the line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_dashed: bool = False
    is_dots: bool = False
    """Whether to draw only the points, without a line."""

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(y)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line at `x`, for example for a failure."""

    x: float
    text: str


def _tick(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):g}{letter}"
    if 0 < abs(value) < 1e-3:  # 0.00025 is wider than the margin
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:g}"


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers within a range, at most 6."""
    if high <= low:
        return [low]
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map of values from `low` to `high` to positions from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a value, or the middle if `low` is not below `high`."""
        if self.high <= self.low:
            return (self.begin + self.end) / 2
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
) -> str:
    """Return a card of a chart with its legend, or an empty text if there is no point."""
    shown = [one for one in series if one.known]
    if not shown:
        return ""
    xs = [x for one in shown for x, _ in one.known]
    ys = [y for one in shown for _, y in one.known]
    low = min(0.0, *ys) if from_zero or min(ys) == max(ys) else min(ys)
    high = max(ys) if max(ys) > low else low + 1
    x_of = Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_of = Scale(low, low + (high - low) * 1.04, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        *_grid(x_of, y_of, x_label),
        *(
            f'<g><title>{escape(mark.text)}</title><line class="failure" x1="{x:.1f}" '
            f'x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
            f'<path class="failure-head" d="M{x - 5:.1f} {_TOP - 9} h10 l-5 9 z"/></g>'
            for mark in marks
            for x in [x_of.at(mark.x)]
            if x_of.low <= mark.x <= x_of.high
        ),
        *(_line(one, x_of, y_of) for one in shown),
        f'<line class="crosshair" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM:g}"/>',
        *_hits(shown, x_of, x_label),
    ]
    legend = "".join(
        f'<li><span class="key{" dashed" * one.is_dashed}" '
        f'style="color:var(--c{one.colour % NUM_COLOURS})"></span>'
        f"{escape(one.name)}, last {number(one.points[-1][1])}</li>"
        for one in shown
    )
    svg = (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}" '
        f'data-axis="{escape(x_label)}">{"".join(parts)}</svg>'
    )
    readout = '<p class="readout"></p>'
    return card(f'<h3>{escape(title)}</h3><ul class="legend">{legend}</ul>{readout}{svg}')


def _grid(x_of: Scale, y_of: Scale, x_label: str) -> list[str]:
    parts = []
    for value in ticks(y_of.low, y_of.high):
        y = y_of.at(value)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.1f}">{_tick(value)}</text>',
        ]
    for value in ticks(x_of.low, x_of.high):
        x, y = x_of.at(value), _HEIGHT - _BOTTOM + 15
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{y:g}">{_tick(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="axis mid" x="{middle:g}" y="{_HEIGHT - 3:g}">{escape(x_label)}</text>'
    )
    return parts


def _line(one: Series, x_of: Scale, y_of: Scale) -> str:
    css = "line" + " dashed" * one.is_dashed
    colour = f"color:var(--c{one.colour % NUM_COLOURS})"
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in one.points:
        if not math.isfinite(y) or one.is_dots:
            pieces.append([])
        if math.isfinite(y):
            pieces[-1].append((x_of.at(x), y_of.at(y)))
    return "".join(_piece(piece, f'class="{css}" style="{colour}"') for piece in pieces if piece)


def _piece(points: Sequence[tuple[float, float]], look: str) -> str:
    if len(points) == 1:
        x, y = points[0]
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline {look} points="{text}"/>'


def _hits(shown: Sequence[Series], x_of: Scale, x_label: str) -> list[str]:
    """Return invisible bars: the bar under the pointer shows the values there in a tooltip."""
    xs = sorted({x for one in shown for x, _ in one.known})
    xs = xs[:: -(-len(xs) // _MAX_HITS)]
    values = [dict(one.known) for one in shown]
    parts = []
    for index, x in enumerate(xs):
        left = (x_of.at(xs[index - 1]) + x_of.at(x)) / 2 if index else _LEFT
        right = (x_of.at(xs[index + 1]) + x_of.at(x)) / 2 if index + 1 < len(xs) else _WIDTH
        found = [(one.name, at[x]) for one, at in zip(shown, values, strict=True) if x in at]
        tip = "\n".join([f"{x_label} {number(x)}", *(f"{n}: {number(y)}" for n, y in found)])
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{_TOP}" width="{max(0.5, right - left):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM:g}" data-at="{x:g}" data-x="{x_of.at(x):.1f}">'
            f"<title>{escape(tip)}</title></rect>"
        )
    return parts


MAX_ROWS = 60
"""Maximum rows of attempts, tasks of a timeline, failures and fields."""


def section(title: str, content: str) -> str:
    """Return a titled section, or an empty text without content."""
    return f"<h2>{title}</h2>{content}" if content else ""


def card(content: str, css: str = "") -> str:
    return f'<div class="card {css}">{content}</div>'


def cards(contents: Iterable[str], css: str = "") -> str:
    """Return cards side by side, or an empty text without cards."""
    content = "".join(contents)
    return f'<div class="grid-of-charts {css}">{content}</div>' if content else ""


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Return values in large print with their names. Unknown values are left out."""
    cells = "".join(
        f'<div class="figure"><b>{escape(value)}</b><span>{escape(about)}</span></div>'
        for value, about in pairs
        if value != UNKNOWN
    )
    return f'<div class="figures">{cells}</div>'


def pairs(items: Mapping[str, str]) -> str:
    """Return a list of names (plain text) and values (HTML), without empty values."""
    content = "".join(
        f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in items.items() if value
    )
    return f'<dl class="pairs">{content}</dl>' if content else ""


def code(value: Any) -> str:
    """Return a value as HTML, or an empty text for `None`."""
    return f"<code>{escape(known)}</code>" if (known := text(value)) else ""


def details(summary: str, content: str) -> str:
    """Return content that unfolds on a click, or an empty text without content."""
    return f"<details><summary>{summary}</summary>{content}</details>" if content else ""


def table(head: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: int | None = None) -> str:
    """Return a table of HTML cells. Columns from index `numbers` on are aligned as numbers."""

    def css(column: int) -> str:
        return ' class="n"' if numbers is not None and column >= numbers else ""

    heads = "".join(f"<th{css(i)}>{title}</th>" for i, title in enumerate(head))
    lines = (
        "<tr>" + "".join(f"<td{css(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def badge(status: str) -> str:
    word = status.split(":")[0]
    css = {"done": "good", "finished": "good", "completed": "good", "running": "live"}.get(word)
    css = css or ("bad" if word.startswith("failed") else "warn")
    return f'<span class="badge {css}">{escape(status)}</span>'


def words(name: str) -> str:
    """Convert the name of a metric to a title."""
    prefix = "validation " if name.startswith("val_") else ""
    title = prefix + name.removeprefix("val_").replace("_", " ")
    return title[:1].upper() + title[1:]


def text(value: Any) -> str:
    """Format a value of a configuration."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
