"""Pieces of HTML of which the page is made, and the names and numbers in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from tfdist.report.charts import NUM_COLOURS, Mark, Series, line_chart
from tfdist.report.text import UNKNOWN, number

MAX_ROWS = 60
"""Of attempts and tasks in a timeline, failures, checkpoints, fields."""


def section(title: str, content: str) -> str:
    """Return a titled section; the empty text without content."""
    return f"<h2>{title}</h2>{content}" if content else ""


def card(content: str, css: str = "") -> str:
    """Return a card."""
    return f'<div class="card {css}">{content}</div>'


def cards(contents: Iterable[str]) -> str:
    """Return cards beside each other; the empty text without one."""
    content = "".join(contents)
    return f'<div class="grid-of-charts">{content}</div>' if content else ""


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Return numbers in large print, each with what it is; those that are not known left out."""
    cells = "".join(
        f'<div class="figure"><b>{escape(value)}</b><span>{escape(about)}</span></div>'
        for value, about in pairs
        if value not in (UNKNOWN, "0")
    )
    return f'<div class="figures">{cells}</div>'


def pairs(items: Mapping[str, str]) -> str:
    """Return terms, which are text, with their values, which are HTML; empty ones left out."""
    content = "".join(
        f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in items.items() if value
    )
    return f'<dl class="pairs">{content}</dl>' if content else ""


def code(value: Any) -> str:
    """Return a value as HTML; the empty text for none."""
    return f"<code>{escape(known)}</code>" if (known := text(value)) else ""


def details(summary: str, content: str) -> str:
    """Return what is shown when it is asked for; the empty text without content."""
    return f"<details><summary>{summary}</summary>{content}</details>" if content else ""


def table(head: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: int | None = None) -> str:
    """Return a table of cells that are HTML; columns from number `numbers` on are of numbers."""

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
    """Return a status as a badge."""
    word = status.split(":")[0]
    css = {"done": "good", "finished": "good", "completed": "good", "running": "live"}.get(word)
    css = css or ("bad" if word.startswith("failed") else "warn")
    return f'<span class="badge {css}">{escape(status)}</span>'


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
) -> str:
    """Return a card of a chart with its legend; the empty text where there is no point."""
    shown = [one for one in series if one.known]
    svg = line_chart(shown, label=title, x_label=x_label, marks=marks, from_zero=from_zero)
    if not svg:
        return ""
    items = "".join(
        f'<li><span class="key{" dashed" * one.is_dashed}" '
        f'style="color:var(--c{one.colour % NUM_COLOURS})"></span>'
        f"{escape(one.name)}, last {number(one.known[-1][1])}</li>"
        for one in shown
    )
    return card(f'<h3>{escape(title)}</h3><ul class="legend">{items}</ul>{svg}')


def words(name: str) -> str:
    """Return the name of a metric as a title."""
    prefix = "validation " if name.startswith("val_") else ""
    title = prefix + name.removeprefix("val_").replace("_", " ")
    return title[:1].upper() + title[1:]


def text(value: Any) -> str:
    """Return a value of a configuration as a person writes it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
