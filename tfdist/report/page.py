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


STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --ink: #1a1f27; --soft: #596271; --rule: #dde1e7;
  --good: #1a7f4b; --bad: #b42318; --warn: #8a5a00; --live: #1f5fa8;
  --c0: #1f5fa8; --c1: #c2410c; --c2: #0f766e; --c3: #9333a8; --c4: #7a5b00; --c5: #be185d;
  --c6: #475569; --c7: #3f7d20;
  --start: #64748b; --trace: #c026a3; --step: #2f6fbd; --wait: #a87700; --validate: #0f9488;
  --save: #d9541e; --callback: #7c5cd6; --serve: #3d85c6; --other: #848d9b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12151a; --card: #1b2028; --ink: #e7eaf0; --soft: #a3adbc; --rule: #313844;
    --good: #57c98a; --bad: #ff8a7a; --warn: #f0bd57; --live: #7db4f0;
    --c0: #7db4f0; --c1: #ff9d66; --c2: #4fd1c0; --c3: #d79bea; --c4: #e3c04d; --c5: #ff8fbd;
    --c6: #b3c0d1; --c7: #9bd770;
    --start: #7c8899; --trace: #e06fcb; --step: #5b9be6; --wait: #e8b530; --validate: #35b8aa;
    --save: #f0763f; --callback: #a48cf0; --serve: #9cc6f0; --other: #6c7788;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 64px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p { margin: 0 0 8px; }
.soft, .note, .path, dt, th, summary, .legend { color: var(--soft); }
.note, .path, table, .pairs, summary { font-size: .875rem; }
.note { margin: 8px 0 0; }
.path, code, dd { overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 8px 16px; margin: 12px 0 0; }
* + .run { border-top: 2px solid var(--rule); margin-top: 48px; padding-top: 32px; }
.badge { padding: 1px 10px; border-radius: 999px; font-size: .8125rem; font-weight: 600;
  border: 1.5px solid; vertical-align: 3px; white-space: nowrap; }
.good { color: var(--good); } .bad, .failed { color: var(--bad); }
.warn { color: var(--warn); } .live, a { color: var(--live); }
.figures { display: grid; gap: 12px; margin: 16px 0 0;
  grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); }
.figure b { display: block; font-size: 1.25rem; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figure span { font-size: .8125rem; color: var(--soft); }
.grid-of-charts { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.card, .figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 12px 14px; min-width: 0; }
.card + .grid-of-charts, .card + .card.wide, .grid-of-charts + .card.wide { margin-top: 12px; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--soft); }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.axis-name { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
circle.line, .cross circle { fill: currentColor; }
.dashed { stroke-dasharray: 5 3; }
.hit { fill: transparent; } .hit:hover { fill: color-mix(in srgb, var(--ink) 8%, transparent); }
.failure { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 3 3; }
.failure-head { fill: var(--bad); }
.cross { color: var(--c0); } .cross.best { color: var(--c1); }
.cross:hover { opacity: 1 !important; } .cross:hover .line { stroke-width: 4; }
.cross.best .line { stroke-width: 3.2; }
.spine { stroke: var(--soft); stroke-width: 1; }
.halo { paint-order: stroke; stroke: var(--card); stroke-width: 3px; fill: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0 0 6px; padding: 0;
  list-style: none; font-size: .8125rem; }
.key { display: inline-block; width: 18px; height: 0; border-top: 3px solid; vertical-align: 4px;
  margin-right: 5px; }
.key.dashed { border-top-style: dashed; }
.box { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; }
tr:last-child td { border-bottom: 0; }
code, pre { font: .8125rem/1.5 ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
pre { margin: 6px 0 0; padding: 10px; overflow-x: auto; border-radius: 6px;
  background: var(--bg); border: 1px solid var(--rule); }
details { margin-top: 8px; } summary { cursor: pointer; } dd { margin: 0; }
.pairs { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 16px;
  margin: 0; }
.rows { display: grid; grid-template-columns: minmax(72px, max-content) minmax(0, 1fr);
  gap: 5px 10px; align-items: center; font-size: .8125rem; }
.rows .head { grid-column: 1 / -1; font-weight: 600; margin-top: 8px; font-size: .875rem; }
.rows .head span { font-weight: 400; color: var(--soft); }
.track { position: relative; height: 20px; background: var(--bg); border-radius: 4px;
  overflow: hidden; }
.bar, .fail-at { position: absolute; top: 0; bottom: 0; min-width: 1px; }
.fail-at { width: 3px; margin-left: -3px; background: var(--bad); }
.scale { position: relative; height: 18px; color: var(--soft); }
.scale span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.scale span:first-child { transform: none; }
.scale span:last-child { transform: translateX(-100%); }
.lost::before { content: "tfdist.report does not answer: what follows is old"; display: block;
  position: sticky; top: 0; z-index: 8; padding: 4px 16px; background: var(--bad);
  color: var(--bg); }
"""

FOLLOW = """
async function follow() {
  const main = document.querySelector("main");
  if (main.dataset.state === "over") return;
  if (!document.hidden) {
    const answer = await fetch(location.href).catch(() => null);
    document.body.classList.toggle("lost", !(answer && answer.ok));
    if (answer && answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details")].map((one) => one.open);
      main.replaceWith(page.querySelector("main"));
      document.querySelectorAll("details").forEach((one, i) => { one.open = !!open[i]; });
    }
  }
  setTimeout(follow, 3000);
}
setTimeout(follow, 3000);
"""
