"""RESULTS.md from the raw figures; a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import results
import row

HEAD = """# Benchmarks

Written by `make bench` (`benchmarks/run.py`) from `results.json`; not by hand. Each row is measured
beside its peer, A B A B, on an otherwise idle machine: a figure is the median over the pairs of one
pair's ratio, and the smallest and largest pair stand beside it. Every process is pinned to a core
and has one intra-op thread unless a row says otherwise. Rates are of whole epochs timed from
within, the first left out, so that start-up and tracing are in none of them. `others_cores` is what
everything else on the machine took meanwhile: where it is not near 0 the figure is noise. What was
expected was written down before the first measurement.
"""


def render(rows: Sequence[row.Row], found: Mapping[str, Any]) -> str:
    """The whole file. Rows without figures are listed as not measured."""
    parts = [HEAD, _summary(rows, found)]
    parts += [_details(one, found["rows"].get(one.name)) for one in rows]
    return "\n".join(parts)


def _summary(rows: Sequence[row.Row], found: Mapping[str, Any]) -> str:
    lines = ["| what | min | **median** | max | target | met |", "|---|---|---|---|---|---|"]
    for one in rows:
        measured = found["rows"].get(one.name, {})
        verdicts = results.verdicts(one, measured.get("pairs", []))
        for claim in one.claims if not verdicts else ():
            state = "failed" if measured.get("error") else "not measured"
            lines.append(f"| {_what(one, claim)} | | | | {_target(claim)} | {state} |")
        for verdict in verdicts:
            low, middle, high = (_figure(v, verdict.claim) for v in results.spread(verdict.values))
            target = _target(verdict.claim)
            lines.append(
                f"| {_what(one, verdict.claim)} | {low} | **{middle}** | {high} | {target} "
                f"| {_met(verdict.met)} |"
            )
    return "\n".join(lines) + "\n"


def _details(one: row.Row, measured: Mapping[str, Any] | None) -> str:
    lines = [f"## {one.title}", "", f"`python benchmarks/{one.name}.py`. {one.notes}".strip(), ""]
    for claim in one.claims:
        lines.append(f"- {claim.what}: expected before measuring: {claim.expected}.")
    lines.append("")
    if measured is None:
        return "\n".join([*lines, "Not measured.", ""])
    lines += [f"- {key}: {value}" for key, value in measured["machine"].items()]
    lines.append("")
    if measured.get("error"):
        lines += ["The measurement failed:", "", "```", measured["error"], "```", ""]
    pairs = measured["pairs"]
    if pairs:
        lines += [*_pair_table(one, pairs), "", *_raw_table(pairs), ""]
    return "\n".join(lines)


def _pair_table(one: row.Row, pairs: Sequence[row.Pair]) -> list[str]:
    numbers = [str(i + 1) for i in range(len(pairs))]
    lines = [_line("pair by pair", *numbers, "**median**"), _rule(len(numbers) + 2)]
    for verdict in results.verdicts(one, pairs):
        cells = [_figure(v, verdict.claim) for v in (*verdict.values, verdict.median)]
        lines.append(_line(verdict.claim.what, *cells[:-1], f"**{cells[-1]}**"))
    return lines


def _raw_table(pairs: Sequence[row.Pair]) -> list[str]:
    numbers = [str(i + 1) for i in range(len(pairs))]
    lines = [_line("raw figure", *numbers, "min", "median", "max"), _rule(len(numbers) + 4)]
    for (side, variant, key), values in results.series(pairs).items():
        label = f"{side}{f' ({variant})' if variant else ''}: {key}"
        cells = [_number(v) for v in (*values, *results.spread(values))]
        lines.append(_line(label, *cells))
    return lines


def _what(one: row.Row, claim: row.Claim) -> str:
    return f"{one.title}: {claim.what}"


def _target(claim: row.Claim) -> str:
    if claim.target is None:
        return ""
    return f"{'at least' if claim.at_least else 'at most'} {claim.target:g} {claim.unit}"


def _met(met: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[met]


def _figure(value: float, claim: row.Claim) -> str:
    return f"{_number(value)} {claim.unit}"


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"
