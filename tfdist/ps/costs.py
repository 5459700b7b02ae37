"""Table of the costs of a ps job's steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

COLUMNS = ("input", "read", "compute", "write", "between", "waiting", "step")


def show(profile: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Write the table to `console`, by default standard output."""
    console = console or Console(highlight=False, soft_wrap=True)
    for line in lines(profile):
        console.print(line, markup=False, emoji=False)


def lines(profile: Mapping[str, Any]) -> list[str]:
    """Return the table of `PsProfile.summary`, line by line."""
    workers = profile["workers"]
    if not workers:
        return ["what a step costs: too few steps to tell"]
    text = ["what a step costs, in ms, as means that add up"]
    text.append(f"  {'':<10} {'steps':>8} " + " ".join(f"{name:>9}" for name in COLUMNS))
    for name, costs in workers.items():
        cells = " ".join(_cell(costs.get(f"{column}_ms")) for column in COLUMNS)
        text.append(f"  {name:<10} {costs['steps']:>8,} {cells}")
    text.append("what a step sends")
    for ends, link in profile["links"].items():
        more = f", and {link['unknown']} of unknown size" if link["unknown"] else ""
        known = link["tensors"] - link["unknown"]
        text.append(f"  {ends:<18} {link['size_bytes']:>14,} bytes in {known} tensors{more}")
    return text


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>9}"
