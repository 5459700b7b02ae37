"""Result table of a run: drawn on a terminal, plain text elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tfdist.outputs.progress import number


def show(
    summary: Mapping[str, Any], *, run_dir: str, plot: str | None, console: Console | None = None
) -> None:
    """Write the summary of a run to `console`, by default standard output."""
    console = console or Console(highlight=False, soft_wrap=True)
    rows = result_rows(summary, run_dir=run_dir, plot=plot)
    if console.is_terminal:
        table = Table(title="Result", box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(label, value)
        console.print(table)
        return
    width = max(len(label) for label, _ in rows)
    for label, value in [("result", str(summary["status"])), *rows[1:]]:
        console.print(f"  {label:<{width}}  {value}", markup=False, emoji=False)


def result_rows(
    summary: Mapping[str, Any], *, run_dir: str, plot: str | None
) -> list[tuple[str, str]]:
    """Return label and value of each row."""
    rows = [("status", str(summary["status"])), ("strategy", strategy_line(summary))]
    resumed = summary.get("resumed_from_step")
    steps = f"{summary['steps']:,}" + (f" (resumed from {resumed:,})" if resumed else "")
    rows += [
        ("steps", steps),
        ("examples", f"{summary['examples']:,}"),
        ("virtual epochs", f"{summary['virtual_epochs']:,}"),
    ]
    rows += _metric_rows(summary["metrics"])
    if summary.get("examples_per_second"):
        rows.append(("examples/s", f"{summary['examples_per_second']:,.0f}"))
    if shares := summary.get("worker_steps"):
        total = max(sum(shares.values()), 1)
        parts = [f"{worker} {steps / total:.0%}" for worker, steps in shares.items()]
        rows.append(("steps by", ", ".join(parts)))
    if ages := summary.get("staleness"):
        rows.append(("staleness", _staleness(ages)))
    if twice := summary.get("steps_applied_twice"):
        count = len(summary["repeated_ranges"])
        ranges = f"{count} range{'s' * (count != 1)} of workers that died"
        rows.append(("applied twice", f"{twice} steps, in {ranges}"))
    if sizes := summary.get("ps_bytes"):
        held = [f"{server} {size:,} bytes" for server, size in sizes.items()]
        rows.append(("variables on", ", ".join(held)))
    rows += [("weights", f"sha256 {summary['weights_sha256'][:16]}"), ("run directory", run_dir)]
    if plot:
        rows.append(("plot", plot))
    return rows


def strategy_line(summary: Mapping[str, Any]) -> str:
    """Return strategy and size of the job: ``ps, 4 workers, 1 parameter server``."""
    workers, replicas = summary["workers"], summary["replicas"]
    parts = [f"{workers} worker{'s' * (workers != 1)}"]
    if summary.get("ps"):
        parts.append(f"{summary['ps']} parameter server{'s' * (summary['ps'] != 1)}")
    else:
        parts.append(f"{replicas} replica{'s' * (replicas != 1)}")
    return f"{summary['strategy']}, {', '.join(parts)}"


def _staleness(ages: Mapping[str, int]) -> str:
    """Return ``0: 71%, 1: 20%, 2-3: 9%``: the share of the steps by updates that came between."""
    total = sum(ages.values())
    bins: dict[str, int] = {}
    for age, count in sorted((int(age), count) for age, count in ages.items()):
        low = 1 << age.bit_length() >> 1
        name = str(age) if age < 2 else f"{low}-{2 * low - 1}"
        bins[name] = bins.get(name, 0) + count
    return ", ".join(f"{name}: {count / total:.0%}" for name, count in bins.items())


def _metric_rows(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
    rows = []
    for name, value in sorted(metrics.items(), key=lambda item: item[0] != "loss"):
        if name.startswith("val_") and name.removeprefix("val_") in metrics:
            continue
        text = _number(value)
        if f"val_{name}" in metrics:
            text = f"{text} training, {_number(metrics[f'val_{name}'])} validation"
        rows.append((name.replace("_", " "), text))
    return rows


def _number(value: float | None) -> str:
    return "not finite" if value is None else number(value)
