"""The page: runs and sweeps as one HTML file, with style and scripts, that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from tfdist.outputs.run_directory import flat
from tfdist.report.pieces import (
    MAX_ROWS,
    NUM_COLOURS,
    Series,
    badge,
    card,
    cards,
    chart,
    code,
    duration,
    number,
    section,
    table,
    words,
)
from tfdist.report.run import Run
from tfdist.report.run_section import Verdict, run_section
from tfdist.report.sweep import SweepRecord, sweep_section

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
FOLLOW = Path(__file__).with_name("follow.js").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MORE_TO_FOLLOW = "; script-src 'unsafe-inline'; connect-src 'self'"


def render(
    runs: Sequence[Run],
    sweeps: Sequence[SweepRecord] = (),
    *,
    verdicts: Mapping[Path, Verdict] | None = None,
    is_followed: bool = False,
) -> str:
    """Return the page; with `is_followed` it asks for itself again while a run goes on."""
    names = [*(sweep.name for sweep in sweeps), *(run.name for run in runs)]
    title = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    is_going = "running" in (*(s.status for s in sweeps), *(run.status for run in runs))
    link_of = {run.path: f"#run-{index}" for index, run in enumerate(runs)}
    body = [
        _contents(runs, sweeps) if len(names) > 1 else "",
        *(sweep_section(sweep, index, link_of) for index, sweep in enumerate(sweeps)),
        _comparison(runs) if len(runs) > 1 else "",
        *(run_section(run, i, (verdicts or {}).get(run.path)) for i, run in enumerate(runs)),
    ]
    policy = _POLICY + (_MORE_TO_FOLLOW if is_followed else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>"
        f'<main data-state="{"going" if is_going else "over"}">{"".join(body)}</main>'
        f"{f'<script>{FOLLOW}</script>' if is_followed else ''}</body></html>\n"
    )


def _contents(runs: Sequence[Run], sweeps: Sequence[SweepRecord]) -> str:
    counts = [
        f"{len(some)} {name}{'s' * (len(some) > 1)}"
        for some, name in ((sweeps, "sweep"), (runs, "run"))
        if some
    ]
    links = [f'<a href="#sweep-{i}">{escape(s.name)}</a>' for i, s in enumerate(sweeps)]
    links += [f'<a href="#run-{i}">{escape(run.name)}</a>' for i, run in enumerate(runs)]
    return f"<h1>{', '.join(counts)}</h1><nav>{''.join(links)}</nav>"


def _comparison(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.metric_names)
    charts = []
    for name in (f"{prefix}{name}" for name in list(names)[:3] for prefix in ("", "val_")):
        series = [
            Series(name=run.name, points=run.points(name), colour=i, is_dashed=i >= NUM_COLOURS)
            for i, run in enumerate(runs)
        ]
        charts.append(chart(words(name), series, x_label="step", from_zero="loss" in name))
    content = card(_overview(runs)) + cards(charts) + _config_differences(runs)
    return section("Side by side", content)


def _overview(runs: Sequence[Run]) -> str:
    metrics = list(dict.fromkeys(name for run in runs for name in run.last_metrics))[:6]
    head = ["run", "status", "strategy", "workers", "steps", "examples/s", "time", "attempts"]
    rows = [
        [
            f'<a href="#run-{index}">{escape(run.name)}</a>',
            badge(run.status),
            escape(run.strategy),
            number(run.summary.get("workers")),
            number(run.steps),
            number(run.summary.get("examples_per_second")),
            duration(run.seconds),
            str(len(run.attempts)),
            *(number(run.last_metrics.get(name)) for name in metrics),
        ]
        for index, run in enumerate(runs)
    ]
    return table([*head, *(escape(words(name)) for name in metrics)], rows, numbers=3)


def _config_differences(runs: Sequence[Run]) -> str:
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [k for k in keys if len({json.dumps(c.get(k)) for c in configs}) > 1][:MAX_ROWS]
    rows = [[code(key), *(code(config.get(key)) for config in configs)] for key in different]
    head = ["field", *(escape(run.name) for run in runs)]
    return card(f"<h3>Fields that differ</h3>{table(head, rows)}", "wide") if rows else ""
