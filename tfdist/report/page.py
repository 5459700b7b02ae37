"""HTML page of runs and sweeps: one self-contained file with style and scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from tfdist.errors import named
from tfdist.outputs.run_directory import flat
from tfdist.report.pieces import (
    MAX_ROWS,
    NUM_COLOURS,
    UNKNOWN,
    Mark,
    Scale,
    Series,
    badge,
    card,
    cards,
    chart,
    clock,
    code,
    details,
    duration,
    figures,
    number,
    pairs,
    section,
    table,
    words,
)
from tfdist.report.run_records import AttemptRecord, RunRecord, TaskHistory, TaskSpan, moment
from tfdist.report.sweep_section import SweepRecord, sweep_section

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
CROSSHAIR = Path(__file__).with_name("crosshair.js").read_text(encoding="utf-8")
FOLLOW = Path(__file__).with_name("follow.js").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"
_MORE_TO_FOLLOW = "; connect-src 'self'"
_MAX_CHARTS = 8
_FIRST_CHARTS = 2
"""Number of metrics whose charts are large: the loss and the first metric."""


def render(
    runs: Sequence[RunRecord],
    sweeps: Sequence[SweepRecord] = (),
    *,
    is_followed: bool = False,
) -> str:
    """Return the page. With `is_followed` the page reloads itself while a run is running."""
    names = [*(sweep.name for sweep in sweeps), *(run.name for run in runs)]
    title = " · ".join([names[0], *_origin(runs[0])]) if len(names) == 1 and runs else ""
    title = title or named(names, most=4)
    is_going = "running" in (*(s.status for s in sweeps), *(run.status for run in runs))
    body = [
        _contents(runs, sweeps) if len(names) > 1 else "",
        *(sweep_section(sweep, index) for index, sweep in enumerate(sweeps)),
        _comparison(runs) if len(runs) > 1 else "",
        *(_run_section(run, i) for i, run in enumerate(runs)),
    ]
    scripts = (CROSSHAIR, FOLLOW) if is_followed else (CROSSHAIR,)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    policy = _POLICY.format(" ".join(f"'sha256-{digest}'" for digest in digests))
    policy += _MORE_TO_FOLLOW * is_followed
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>"
        f'<main data-state="{"going" if is_going else "over"}">{"".join(body)}</main>'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _origin(run: RunRecord) -> list[str]:
    begin = clock(run.begin) if run.begin else ""
    return [part for part in (run.strategy, str(run.job.get("command") or ""), begin) if part]


def _contents(runs: Sequence[RunRecord], sweeps: Sequence[SweepRecord]) -> str:
    counts = [
        f"{len(some)} {name}{'s' * (len(some) > 1)}"
        for some, name in ((sweeps, "sweep"), (runs, "run"))
        if some
    ]
    links = [f'<a href="#sweep-{i}">{escape(s.name)}</a>' for i, s in enumerate(sweeps)]
    links += [f'<a href="#run-{i}">{escape(run.name)}</a>' for i, run in enumerate(runs)]
    return f"<h1>{', '.join(counts)}</h1><nav>{''.join(links)}</nav>"


def _comparison(runs: Sequence[RunRecord]) -> str:
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


def _overview(runs: Sequence[RunRecord]) -> str:
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


def _config_differences(runs: Sequence[RunRecord]) -> str:
    configs = [
        {**flat(run.config), "program": " ".join(run.job.get("program", [])), **flags}
        for run in runs
        for flags in [run.job.get("flags", {})]
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [k for k in keys if len({json.dumps(c.get(k)) for c in configs}) > 1][:MAX_ROWS]
    rows = [[code(key), *(code(config.get(key)) for config in configs)] for key in different]
    head = ["field", *(escape(run.name) for run in runs)]
    return card(f"<h3>Fields that differ</h3>{table(head, rows)}", "wide") if rows else ""


# Section of a run.


def _run_section(run: RunRecord, index: int) -> str:
    totals = _totals(run)
    used = [part for part in PARTS if any(parts.get(part) for parts in totals.values())]
    legend = "".join(
        f'<li><span class="box" style="background:var(--{part})"></span>{PARTS[part][0]}</li>'
        for part in used
    )
    legend = f'<ul class="legend">{legend}</ul>'
    return (
        f'<section class="run" id="run-{index}"><h1>{escape(run.name)} {badge(run.status)}</h1>'
        f"<p>{escape(' · '.join(_origin(run)))}</p>"
        f'<p class="path">{escape(str(run.path))}</p>{_figures(run)}'
        f"{section('Failures', _failures(run))}"
        f"{section('Curves', _curves(run))}"
        f"{section('Attempts and tasks', _timeline(run, legend))}"
        f"{section('Time by phase', _time_spent(totals, used, legend))}"
        f"{section('Staleness', _staleness(run))}"
        f"{section('Program and versions', _what_ran(run))}</section>"
    )


def _figures(run: RunRecord) -> str:
    tasks = {span.task for span in run.attempts[-1].tasks} if run.attempts else set()
    rate = run.summary.get("examples_per_second") or run.last("examples_per_second")
    known = [
        (number(run.steps), "steps"),
        (duration(run.seconds), "so far" if run.status == "running" else "from start to end"),
        (number(rate), "examples per second"),
        (number(len(tasks) or None), f"tasks, {run.strategy}"),
        (number(len(run.attempts) or None), "attempts" if len(run.attempts) != 1 else "attempt"),
    ]
    for name, value in run.last_metrics.items():
        shown = number(value) if math.isfinite(value) else "not finite"
        known.append((shown, f"last {words(name).lower()}"))
    return figures(known[:8])


def _failures(run: RunRecord) -> str:
    found = [(attempt, failure) for attempt in run.attempts for failure in attempt.failures]
    content = []
    for attempt, failure in found[-MAX_ROWS:]:
        step, detect_s = failure.get("step"), failure.get("detect_s")
        at = f" at step {step:,}" if step is not None else ""
        detected = f"; detected in {detect_s:.2g} s" if detect_s is not None else ""
        lines = escape("\n".join(failure.get("last_lines", ())))
        content.append(
            f'<h3><span class="bad">▼</span> {escape(failure["task"])}{at}, '
            f"attempt {attempt.number}</h3><p>{escape(failure['cause'])}</p>"
            f'<p class="note">{clock(moment(failure.get("at")))}; {failure["followed"]}{detected}'
            f"</p>{details('its last lines', f'<pre>{lines}</pre>' if lines else '')}"
        )
    return "".join(card(one, "wide") for one in content)


def _curves(run: RunRecord) -> str:
    marks = [
        Mark(x=failure["step"], text=f"{failure['task']} failed: {failure['cause']}")
        for attempt in run.attempts
        for failure in attempt.failures
        if failure.get("step") is not None
    ]

    def whole(name: str) -> str:
        series = [Series(name="whole job", points=run.points(name))]
        return chart(words(name), series, x_label="step", marks=marks)

    def memory(one: TaskHistory) -> list[tuple[float, float]]:
        return [(i * one.width_s, m / 2**20) for i, m in enumerate(one.memory_bytes) if m]

    metrics = [_metric_chart(run, name, marks) for name in run.metric_names[:_MAX_CHARTS]]
    return cards(metrics[:_FIRST_CHARTS], "large") + cards(
        [
            *metrics[_FIRST_CHARTS:],
            whole("learning_rate"),
            whole("examples_per_second"),
            _chart_by_task(run, "Steps per second, by task", TaskHistory.rates),
            _chart_by_task(run, "Memory in MiB, by task", memory),
        ]
    )


def _metric_chart(run: RunRecord, name: str, marks: Sequence[Mark]) -> str:
    evaluations = [
        (float(line["step"]), float(line[key]))
        for line in run.evaluations
        for key in (name, f"val_{name}")
        if "step" in line and isinstance(line.get(key), int | float)
    ]
    series = [
        Series(name="training", points=run.points(name)),
        Series(name="validation", points=run.points(f"val_{name}"), colour=1, is_dashed=True),
        Series(name="evaluator", points=evaluations, colour=2, is_dashed=True),
    ]
    return chart(words(name), series, x_label="step", marks=marks, from_zero="loss" in name)


def _chart_by_task(
    run: RunRecord, title: str, points_of: Callable[[TaskHistory], Iterable[tuple[float, float]]]
) -> str:
    """Return a chart over the time of all attempts. Lines break between attempts."""
    series: dict[str, list[tuple[float, float]]] = {}
    for attempt in run.attempts:
        for task, history in attempt.history.items():
            offset = run.active_s(history.begin)
            points = [(offset + at, y) for at, y in points_of(history)]
            series.setdefault(task, []).extend([(offset, math.nan), *points] if points else [])
    moving = [(task, ps) for task, ps in sorted(series.items()) if any(y > 0 for _, y in ps)]
    lines = [
        Series(name=task, points=points, colour=i, is_dashed=bool(i % 2))
        for i, (task, points) in enumerate(moving[:NUM_COLOURS])
    ]
    return chart(title, lines, x_label="seconds of all attempts")


def _totals(run: RunRecord) -> dict[str, dict[str, float]]:
    """Return the seconds of each task in each part. Time outside all phases is ``other``."""
    totals: dict[str, dict[str, float]] = {}
    for attempt in run.attempts:
        for span in attempt.tasks:
            alive = (span.end or attempt.end or 0.0) - (span.begin or math.inf)
            parts = totals.setdefault(span.task, {})
            parts["other"] = parts.get("other", 0.0) + max(0.0, alive)
        for task, history in attempt.history.items():
            parts = totals.setdefault(task, {})
            for phase, stretches in history.phases.items():
                part, seconds = _PART_OF.get(phase, "other"), sum(stretches)
                parts["other"] = max(0.0, parts.get("other", 0.0) - seconds)
                parts[part] = parts.get(part, 0.0) + seconds
    return dict(sorted(totals.items())) if any(a.history for a in run.attempts) else {}


def _time_spent(totals: dict[str, dict[str, float]], used: Sequence[str], legend: str) -> str:
    rows = []
    longest = max((sum(parts.values()) for parts in totals.values()), default=0.0)
    if not longest:
        return ""
    for task, parts in list(totals.items())[:MAX_ROWS]:
        stack, left = "", 0.0
        for part in used:
            seconds = parts.get(part, 0.0)
            share = 100 * seconds / max(sum(parts.values()), 1e-9)
            tip = f"{task}\n{PARTS[part][0]}: {duration(seconds)} ({share:.0f} %)"
            label = f"{share:.0f} % · {duration(seconds)}" if seconds > longest / 6 else ""
            if seconds:
                stack += _bar(part, left / longest, (left + seconds) / longest, tip, label)
            left += seconds
        rows.append(f'<span>{escape(task)}</span><div class="track">{stack}</div>')
    return card(
        f'{legend}<div class="rows">{"".join(rows)}</div>'
        '<p class="note">All attempts together. Tasks report their phase once a second, so short '
        "phases are estimates.</p>"
    )


def _staleness(run: RunRecord) -> str:
    counts = run.summary.get("staleness") or {}
    ordered = sorted(counts.items(), key=lambda item: int(item[0]))[:MAX_ROWS]
    workers = sorted((run.summary.get("worker_steps") or {}).items())
    twice = run.summary.get("steps_applied_twice")
    note = f'<p class="note">Steps applied twice: {number(twice)}</p>' if twice is not None else ""
    rate = run.summary.get("examples_per_second") or 0.0
    by_staleness = _counts(ordered, lambda share: "")
    by_worker = _counts(workers, lambda share: f", {number(rate * share)} examples/s on average")
    title = "Updates by other workers between read and write"
    return cards(
        [
            card(f"<h3>{title}</h3>{by_staleness}") if ordered else "",
            card(f"<h3>Steps by worker</h3>{by_worker}{note}") if workers else "",
        ]
    )


def _counts(counts: Sequence[tuple[str, int]], more: Callable[[float], str]) -> str:
    """Return a bar for each count of steps."""
    numbers = [count for _, count in counts]
    total, most = max(1, sum(numbers)), max([1, *numbers])  # 0 if a run was resumed at its end
    rows = ""
    for name, count in counts:
        tip = f"{name}: {count:,} steps, {100 * count / total:.1f} %{more(count / total)}"
        rows += f"<span>{escape(str(name))}</span>"
        rows += f'<div class="track">{_bar("step", 0.0, count / most, tip)}</div>'
    return f'<div class="rows">{rows}</div>'


def _what_ran(run: RunRecord) -> str:
    job, versions = run.job, run.job.get("versions", {})
    hosts = sorted({span.host for a in run.attempts for span in a.tasks if span.host})
    facts = {
        "command": code(job.get("command")),
        "strategy": escape(run.strategy),
        "hosts": escape(", ".join(hosts) or job.get("host", "")),
        "CPUs": escape(str(job.get("cpus", ""))),
        "versions": escape(", ".join(f"{name} {version}" for name, version in versions.items())),
        "resumed from step": code(run.summary.get("resumed_from_step")),
        "weights": code(run.summary.get("weights_sha256")),
    }
    config = pairs({name: code(value) or UNKNOWN for name, value in flat(run.config).items()})
    return card(pairs(facts) + details("configuration", config))


# Timeline of a run: attempts and tasks, coloured by phase.

PARTS = {
    "start": ("start", ("import", "rendezvous")),
    "trace": ("tracing", ("trace",)),
    "step": ("steps", ("step",)),
    "wait": ("waiting for peers", ("sum", "barrier", "join")),
    "validate": ("validation", ("validate",)),
    "save": ("saving", ("save",)),
    "callback": ("callbacks", ("callback",)),
    "serve": ("serving the chief", ("serve",)),
    "other": ("start and end of the process", ("done", "other")),
}
"""Parts of a run's time: CSS class, name and phases of each part."""

_PART_OF = {phase: part for part, (_, phases) in PARTS.items() for phase in phases}


def _bar(part: str, left: float, right: float, tip: str, label: str = "") -> str:
    """Return a bar of a track. `left` and `right` are fractions of the track's width."""
    place = f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"
    style = f"{place};background:var(--{part})"
    return f'<div class="bar" style="{style}" title="{escape(tip)}">{escape(label)}</div>'


def _timeline(run: RunRecord, legend: str) -> str:
    """Return the timeline of the last attempts, or an empty text if no times are known."""
    ends = [attempt.end for attempt in run.attempts if attempt.end is not None]
    if not run.begin or not ends or max(ends) <= run.begin:
        return ""
    shown = Scale(0.0, run.active_s(max(ends)), 0.0, 1.0)

    def place(moment: float) -> float:
        return shown.at(run.active_s(moment))

    # More labels would overlap on a phone.
    labels = "".join(
        f'<span style="left:{100 * part:g}%">{duration(part * shown.high)}</span>'
        for part in (0.0, 0.5, 1.0)
    )
    rows = f'<span></span><div class="scale">{labels}</div>'
    for attempt in run.attempts[-MAX_ROWS:]:
        rows += _head(attempt)
        rows += "".join(_row(attempt, span, place, max(ends)) for span in attempt.tasks[:MAX_ROWS])
        if (left_out := len(attempt.tasks) - MAX_ROWS) > 0:
            rows += f'<span></span><span class="soft">and {left_out} more</span>'
        for view in attempt.views[-MAX_ROWS:]:
            members = escape(", ".join(map(str, view["members"])))
            rows += f'<span class="soft">from step {view["step"]:,}</span><span>{members}</span>'
    gaps = ", ".join(duration(right - left) for left, right in run.gaps)
    note = f'<p class="note">From {clock(run.begin)} to {clock(max(ends))}.'
    note += f" Gaps between attempts are left out: {gaps}.</p>" if gaps else "</p>"
    return card(f'{legend}<div class="rows">{rows}</div>{note}')


def _head(attempt: AttemptRecord) -> str:
    facts = []
    if attempt.first_step_s is not None:
        facts.append(f"first step after {duration(attempt.first_step_s)}")
    facts.append("runs" if attempt.exit_code is None else f"exit code {attempt.exit_code:d}")
    return f'<div class="head">Attempt {attempt.number} <span>{", ".join(facts)}</span></div>'


def _row(
    attempt: AttemptRecord, span: TaskSpan, place: Callable[[float], float], last: float
) -> str:
    if span.begin is None:
        return ""
    until = span.end or attempt.end or last
    name = span.task + (f" (restart {span.restart})" if span.restart else "")
    where = f" on {span.host}" if span.host else ""
    tip = f"{name}{where}: {span.outcome}\n{clock(span.begin)} to {clock(until)}"
    bars = _bar("other", place(span.begin), place(until), tip)
    for part, left, right in _stretches(attempt, span.task, span.begin, until):
        about = f"{span.task}: {PARTS[part][0]}, {duration(right - left)}"
        bars += _bar(part, place(left), place(right), about)
    if span.is_failure:
        at = f"left:{100 * place(until):.2f}%"
        bars += f'<div class="fail-at" style="{at}" title="{escape(tip)}"></div>'
    mark = ' <span class="bad">▼</span>' if span.is_failure else ""
    return f'<span>{escape(name)}{mark}</span><div class="track">{bars}</div>'


def _stretches(
    attempt: AttemptRecord, task: str, since: float, until: float
) -> list[tuple[str, float, float]]:
    """Return the longest part of each stretch of time, with equal neighbours merged."""
    history = attempt.history.get(task)
    found: list[tuple[str, float, float]] = []
    for i in range(len(history.steps) if history else 0):
        assert history is not None
        spent = {p: s[i] for p, s in history.phases.items() if i < len(s) and s[i] > 0}
        left = history.begin + i * history.width_s
        left, right = max(left, since), min(left + history.width_s, until)
        if not spent or right <= left:
            continue
        part = _PART_OF.get(max(spent, key=lambda phase: spent[phase]), "other")
        if found and found[-1][0] == part and abs(found[-1][2] - left) < 1e-3:
            left = found.pop()[1]
        found.append((part, left, right))
    return found
