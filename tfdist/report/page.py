"""The page: runs and sweeps as one HTML file that loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tfdist.report.charts import (
    NUM_COLOURS,
    Crossing,
    Mark,
    Series,
    axis_of,
    line_chart,
    parallel_coordinates,
    ticks,
)
from tfdist.report.run import Attempt, Run
from tfdist.report.style import FOLLOW, STYLE, TIPS
from tfdist.report.sweep import Sweep, TrialEntry
from tfdist.report.text import UNKNOWN, clock, duration, number

PARTS = {
    "start": ("start", ("import", "rendezvous")),
    "trace": ("tracing", ("trace",)),
    "step": ("steps", ("step",)),
    "wait": ("waiting for peers", ("sum", "barrier")),
    "validate": ("validation", ("validate",)),
    "save": ("saving", ("save",)),
    "callback": ("callbacks", ("callback",)),
    "serve": ("serving the chief", ("serve",)),
    "other": ("start and end of the process", ("done", "other")),
}
"""Where the time went: each part's class, name and phases."""

_PART_OF = {phase: part for part, (_, phases) in PARTS.items() for phase in phases}
_MAX_ROWS = 60
_MAX_TASKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What `tfdist.ledger` says of a run."""

    is_proved: bool | None
    """None where it could not be asked."""
    text: str


def render(
    runs: Sequence[Run],
    sweeps: Sequence[Sweep] = (),
    *,
    verdicts: Mapping[str, Verdict] | None = None,
    is_followed: bool = False,
) -> str:
    """Return the page; with `is_followed` it asks for itself again while a run goes on."""
    names = [*(run.name for run in runs), *(sweep.name for sweep in sweeps)]
    title = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    is_over = not any(run.is_running for run in runs)
    is_over = is_over and all(sweep.status != "running" for sweep in sweeps)
    body = [
        _contents(runs, sweeps) if len(names) > 1 else "",
        _comparison(runs) if len(runs) > 1 else "",
        *(_run(run, index, (verdicts or {}).get(str(run.path))) for index, run in enumerate(runs)),
        *(_sweep(sweep, index) for index, sweep in enumerate(sweeps)),
    ]
    state = "over" if is_over else "going"
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    policy += "; connect-src 'self'" if is_followed else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>"
        f'<main data-state="{state}">{"".join(body)}</main><div id="tip" role="status"></div>'
        f"<script>{TIPS}{FOLLOW if is_followed else ''}</script></body></html>\n"
    )


# several runs


def _contents(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> str:
    links = [f'<a href="#run-{i}">{escape(run.name)}</a>' for i, run in enumerate(runs)]
    links += [f'<a href="#sweep-{i}">{escape(s.name)}</a>' for i, s in enumerate(sweeps)]
    return f"<h1>{len(links)} runs</h1><nav>{''.join(links)}</nav>"


def _comparison(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.metric_names)
    charts = []
    for name in (f"{prefix}{name}" for name in list(names)[:3] for prefix in ("", "val_")):
        series = [
            Series(name=run.name, points=_points(run, name), colour=i, is_dashed=i >= NUM_COLOURS)
            for i, run in enumerate(runs)
        ]
        charts.append(_chart(_words(name), series, x_label="step", from_zero="loss" in name))
    return (
        f"<h2>Side by side</h2>{_overview(runs)}"
        f'<div class="grid-of-charts" style="margin-top:12px">{"".join(charts)}</div>'
        f"{_config_differences(runs)}"
    )


def _overview(runs: Sequence[Run]) -> str:
    metrics = list(dict.fromkeys(name for run in runs for name in _last_metrics(run)))[:6]
    head = ["run", "status", "strategy", "workers", "steps", "examples/s", "time", "attempts"]
    rows = [
        [
            f'<a href="#run-{index}">{escape(run.name)}</a>',
            _badge(run.status),
            escape(_strategy(run)),
            number(run.summary.get("workers")),
            number(_steps(run)),
            number(run.summary.get("examples_per_second")),
            duration(run.seconds),
            str(len(run.attempts)),
            *(number(_last_metrics(run).get(name)) for name in metrics),
        ]
        for index, run in enumerate(runs)
    ]
    return (
        f'<div class="card scroll">{_table([*head, *map(_words, metrics)], rows, numbers=3)}</div>'
    )


def _config_differences(runs: Sequence[Run]) -> str:
    configs = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    different = [k for k in keys if len({json.dumps(c.get(k)) for c in configs}) > 1]
    if not different:
        return ""
    rows = [
        [
            f"<code>{escape(key)}</code>",
            *(f"<code>{escape(_text(c.get(key)))}</code>" for c in configs),
        ]
        for key in different[:_MAX_ROWS]
    ]
    table = _table(["field", *(escape(run.name) for run in runs)], rows)
    return f'<div class="card wide scroll"><h3>Fields that differ</h3>{table}</div>'


# one run


def _run(run: Run, index: int, verdict: Verdict | None) -> str:
    return (
        f'<section class="run" id="run-{index}"><h1>{escape(run.name)} {_badge(run.status)}</h1>'
        f'<p class="path">{escape(str(run.path))}</p>{_figures(run, verdict)}'
        f"{_failures(run)}{_curves(run)}{_timeline(run)}{_time_spent(run)}{_staleness(run)}"
        f"{_checkpoints(run)}{_ledger(verdict)}{_what_ran(run)}</section>"
    )


def _figures(run: Run, verdict: Verdict | None) -> str:
    tasks = run.attempts[-1].tasks if run.attempts else ()
    figures = [
        (number(_steps(run)), "steps"),
        (duration(run.seconds), "from start to end" if not run.is_running else "so far"),
        (number(run.summary.get("examples_per_second") or _last(run, "examples_per_second")),
         "examples per second"),
        (str(len({span.task for span in tasks})), f"tasks, {_strategy(run)}"),
        (str(len(run.attempts)), "attempts" if len(run.attempts) != 1 else "attempt"),
        *((number(v), f"last {_words(name).lower()}") for name, v in _last_metrics(run).items()),
    ]  # fmt: skip
    if verdict is not None and verdict.is_proved is not None:
        figures.append(
            ("proved" if verdict.is_proved else "NOT proved", "each example exactly once")
        )
    shown = [f for f in figures if f[0] not in (UNKNOWN, "0")][:8]
    cells = (
        f'<div class="figure"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in shown
    )
    return f'<div class="figures">{"".join(cells)}</div>'


def _failures(run: Run) -> str:
    found = [(attempt, failure) for attempt in run.attempts for failure in attempt.failures]
    if not found:
        return ""
    cards = []
    for attempt, failure in found[-_MAX_ROWS:]:
        at = f" at step {failure.step:,}" if failure.step is not None else ""
        detected = f"; detected in {failure.detect_s:.2g} s" if failure.detect_s is not None else ""
        lines = "\n".join(failure.last_lines)
        details = f"<details><summary>its last lines</summary><pre>{escape(lines)}</pre></details>"
        cards.append(
            f'<div class="card wide"><h3><span class="bad">▼</span> {escape(failure.task)}{at}, '
            f"attempt {attempt.number}</h3><p>{escape(failure.cause)}</p>"
            f'<p class="note">{clock(failure.at)}; {escape(failure.what_followed)}{detected}</p>'
            f"{details if lines else ''}</div>"
        )
    return f"<h2>Failures</h2>{''.join(cards)}"


def _curves(run: Run) -> str:
    marks = [
        Mark(x=failure.step, text=f"{failure.task} failed: {failure.cause}")
        for attempt in run.attempts
        for failure in attempt.failures
        if failure.step is not None
    ]
    charts = [_metric_chart(run, name, marks) for name in run.metric_names[:8]]
    points = _points(run, "examples_per_second")
    whole = [Series(name="whole job", points=points)]
    charts.append(_chart("Examples per second", whole, x_label="step", marks=marks))
    charts += [_rates(run), _memory(run)]
    content = "".join(charts)
    return f'<h2>Curves</h2><div class="grid-of-charts">{content}</div>' if content else ""


def _metric_chart(run: Run, name: str, marks: Sequence[Mark]) -> str:
    evaluations = [
        (float(line["step"]), float(line[key]))
        for line in run.evaluations
        for key in (name, f"val_{name}")
        if "step" in line and isinstance(line.get(key), int | float)
    ]
    series = [
        Series(name="training", points=_points(run, name)),
        Series(name="validation", points=_points(run, f"val_{name}"), colour=1, is_dashed=True),
        Series(name="evaluator", points=evaluations, colour=2, is_dashed=True),
    ]
    return _chart(_words(name), series, x_label="step", marks=marks, from_zero="loss" in name)


def _rates(run: Run) -> str:
    """Return the rate of each worker: in examples where it is known how many a step has of each."""
    factor, unit = _examples_of_a_step(run)
    begin = min((a.begin for a in run.attempts if a.begin is not None), default=0.0)
    series: dict[str, list[tuple[float, float]]] = {}
    for attempt in run.attempts:
        for task, history in attempt.history.items():
            offset = history.begin - begin
            points = [(offset + at, rate * factor) for at, rate in history.rates()]
            series.setdefault(task, []).extend([*points, (offset, math.nan)])
    lines = [
        Series(name=task, points=points, colour=i, is_dashed=bool(i % 2))
        for i, (task, points) in enumerate(sorted(series.items())[:NUM_COLOURS])
        if any(rate > 0 for _, rate in points)
    ]
    return _chart(f"{unit} per second, by task", lines, x_label="seconds from the first start")


def _examples_of_a_step(run: Run) -> tuple[float, str]:
    batch, workers = run.config.get("global_batch_size"), run.summary.get("workers")
    if _strategy(run) == "ps" and isinstance(batch, int):
        return float(batch), "Examples"
    if isinstance(batch, int) and isinstance(workers, int) and workers > 0:
        return batch / workers, "Examples"
    return 1.0, "Steps"


def _memory(run: Run) -> str:
    begin = min((a.begin for a in run.attempts if a.begin is not None), default=0.0)
    series: dict[str, list[tuple[float, float]]] = {}
    for attempt in run.attempts:
        for task, one in attempt.history.items():
            offset = one.begin - begin
            points = [
                (offset + i * one.width_s, size / 2**20)
                for i, size in enumerate(one.memory_bytes)
                if size
            ]
            series.setdefault(task, []).extend([*points, (offset, math.nan)])
    lines = [
        Series(name=task, points=points, colour=i, is_dashed=bool(i % 2))
        for i, (task, points) in enumerate(sorted(series.items())[:NUM_COLOURS])
    ]
    return _chart("Memory in MiB, by task", lines, x_label="seconds from the first start")


def _timeline(run: Run) -> str:
    begins = [a.begin for a in run.attempts if a.begin is not None]
    ends = [a.end for a in run.attempts if a.end is not None]
    if not begins or not ends or max(ends) <= min(begins):
        return ""
    begin, end = min(begins), max(ends)
    rows = [_scale(end - begin)]
    for attempt in run.attempts[-_MAX_ROWS:]:
        rows.append(_attempt_head(attempt))
        rows += _attempt_rows(attempt, begin, end)
    return (
        f'<h2>Attempts and tasks</h2><div class="card">{_part_legend(run)}'
        f'<div class="rows">{"".join(rows)}</div>'
        f'<p class="note">From {clock(begin)} to {clock(end)}.</p></div>'
    )


def _scale(seconds: float) -> str:
    marks = [at for at in ticks(0, seconds, most=4) if at <= seconds * 0.93]
    labels = "".join(
        f'<span style="left:{100 * at / seconds:.2f}%">{duration(at)}</span>' for at in marks
    )
    labels += f'<span style="left:100%">{duration(seconds)}</span>'
    return f'<span></span><div class="scale">{labels}</div>'


def _attempt_head(attempt: Attempt) -> str:
    said = []
    if attempt.first_step_s is not None:
        said.append(f"first step after {duration(attempt.first_step_s)}")
    if attempt.restart_s is not None:
        said.append(f"restarted in {duration(attempt.restart_s)} after the failure")
    said.append("runs" if attempt.exit_code is None else f"exit code {attempt.exit_code}")
    return f'<div class="head">Attempt {attempt.number} <span>{", ".join(said)}</span></div>'


def _attempt_rows(attempt: Attempt, begin: float, end: float) -> list[str]:
    rows = []
    for span in attempt.tasks[:_MAX_TASKS]:
        if span.begin is None:
            continue
        until = span.end or attempt.end or end
        name = span.task + (f" (restart {span.restart})" if span.restart else "")
        where = f" on {span.host}" if span.host else ""
        tip = f"{name}{where}: {span.outcome}\n{clock(span.begin)} to {clock(until)}"
        bars = _bar("other", span.begin, until, begin, end, tip)
        bars += _phase_bars(attempt, span.task, span.begin, until, begin, end)
        if span.is_failure:
            left = 100 * (until - begin) / (end - begin)
            bars += f'<div class="fail-at" style="left:{left:.2f}%" data-tip="{escape(tip)}"></div>'
        mark = ' <span class="bad">▼</span>' if span.is_failure else ""
        rows.append(f'<span>{escape(name)}{mark}</span><div class="track">{bars}</div>')
    left_out = len(attempt.tasks) - _MAX_TASKS
    if left_out > 0:
        rows.append(f'<span></span><span class="soft">and {left_out} more</span>')
    return rows


def _phase_bars(
    attempt: Attempt, task: str, since: float, until: float, begin: float, end: float
) -> str:
    """Return a bar for each run of stretches with the same longest phase."""
    history = attempt.history.get(task)
    if history is None:
        return ""
    runs: list[tuple[str, float, float]] = []
    for i in range(len(history.steps)):
        spent = {p: s[i] for p, s in history.phases.items() if i < len(s) and s[i] > 0}
        left = history.begin + i * history.width_s
        left, right = max(left, since), min(left + history.width_s, until)
        if not spent or right <= left:
            continue
        part = _PART_OF.get(max(spent, key=lambda phase: spent[phase]), "other")
        if runs and runs[-1][0] == part and abs(runs[-1][2] - left) < 1e-3:
            runs[-1] = (part, runs[-1][1], right)
        else:
            runs.append((part, left, right))
    return "".join(
        _bar(part, left, right, begin, end, f"{task}: {PARTS[part][0]}, {duration(right - left)}")
        for part, left, right in runs
    )


def _bar(part: str, left: float, right: float, begin: float, end: float, tip: str) -> str:
    at, width = 100 * (left - begin) / (end - begin), 100 * (right - left) / (end - begin)
    style = f"left:{at:.2f}%;width:{width:.2f}%"
    return f'<div class="bar p-{part}" style="{style}" data-tip="{escape(tip)}"></div>'


def _time_spent(run: Run) -> str:
    rows, totals = [], _totals(run)
    longest = max((sum(parts.values()) for parts in totals.values()), default=0.0)
    if not longest:
        return ""
    for task, parts in list(totals.items())[:_MAX_TASKS]:
        pieces = "".join(
            f'<div class="p-{part}" style="width:{100 * parts[part] / longest:.2f}%" '
            f'data-tip="{escape(task)}\n{name}: {duration(parts[part])} '
            f'({100 * parts[part] / sum(parts.values()):.0f} %)"></div>'
            for part, (name, _) in PARTS.items()
            if parts.get(part)
        )
        rows.append(f'<span>{escape(task)}</span><div class="stack">{pieces}</div>')
    names = [part for part in PARTS if any(parts.get(part) for parts in totals.values())]
    cells = [
        [escape(task), *(duration(parts.get(part)) for part in names)]
        for task, parts in totals.items()
    ]
    table = _table(["task", *(PARTS[part][0] for part in names)], cells, numbers=1)
    return (
        f'<h2>Where the time went</h2><div class="card">{_part_legend(run)}'
        f'<div class="rows">{"".join(rows)}</div>'
        f'<details><summary>as a table</summary><div class="scroll">{table}</div></details>'
        '<p class="note">All attempts together, from what each task says once a second: short '
        "phases are estimates.</p></div>"
    )


def _totals(run: Run) -> dict[str, dict[str, float]]:
    """Return the seconds of each task in each part; what no phase tells is of its process."""
    totals: dict[str, dict[str, float]] = {}
    for attempt in run.attempts:
        for span in attempt.tasks:
            alive = (span.end or attempt.end or 0.0) - (span.begin or math.inf)
            parts = totals.setdefault(span.task, {})
            parts["other"] = parts.get("other", 0.0) + max(0.0, alive)
        for task, phases in attempt.phases.items():
            parts = totals.setdefault(task, {})
            for phase, seconds in phases.items():
                part = _PART_OF.get(phase, "other")
                parts["other"] = max(0.0, parts.get("other", 0.0) - seconds)
                parts[part] = parts.get(part, 0.0) + seconds
    known = any(attempt.phases for attempt in run.attempts)
    return dict(sorted(totals.items())) if known else {}


def _part_legend(run: Run) -> str:
    totals = _totals(run)
    used = [part for part in PARTS if any(parts.get(part) for parts in totals.values())] or [
        "other"
    ]
    items = (f'<li><span class="box p-{part}"></span>{PARTS[part][0]}</li>' for part in used)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _staleness(run: Run) -> str:
    counts = run.summary.get("staleness")
    if not isinstance(counts, dict) or not counts:
        return ""
    total, most = sum(counts.values()), max(counts.values())
    ordered = sorted(counts.items(), key=lambda item: int(item[0]))
    rows = "".join(_count_row(name, count, most, total) for name, count in ordered[:40])
    workers = run.summary.get("worker_steps") or {}
    all_steps, top = sum(workers.values()), max(workers.values(), default=0)
    by_worker = "".join(
        _count_row(name, steps, top, all_steps) for name, steps in sorted(workers.items())
    )
    twice = run.summary.get("steps_applied_twice")
    note = f'<p class="note">Steps applied twice: {number(twice)}</p>' if twice is not None else ""
    second = (
        f'<div class="card"><h3>Steps by worker</h3><div class="rows">{by_worker}</div>{note}</div>'
    )
    return (
        '<h2>Staleness</h2><div class="grid-of-charts"><div class="card">'
        "<h3>Updates of others between reading and writing</h3>"
        f'<div class="rows">{rows}</div></div>{second if workers else ""}</div>'
    )


def _count_row(name: str, count: int, most: int, total: int) -> str:
    tip = f"{name}: {count:,} steps, {100 * count / total:.1f} %"
    width = f"width:{100 * count / most:.1f}%"
    return (
        f'<span>{escape(str(name))}</span><div class="track" data-tip="{escape(tip)}">'
        f'<div class="bar p-step" style="left:0;{width}"></div></div>'
    )


def _checkpoints(run: Run) -> str:
    if not run.checkpoints:
        return ""
    rows = [
        [
            f"<code>{escape(one.name)}</code>",
            number(one.step),
            f"{one.size_bytes / 1e6:,.1f} MB",
            clock(one.at),
            "whole" if one.is_whole else '<span class="warn">not whole</span>',
        ]
        for one in run.checkpoints[-_MAX_ROWS:]
    ]
    resumed = run.summary.get("resumed_from_step")
    note = f'<p class="note">The last attempt resumed at step {resumed:,}.</p>' if resumed else ""
    table = _table(["checkpoint", "step", "size", "written", ""], rows)
    return f'<h2>Checkpoints on the disk</h2><div class="card scroll">{table}{note}</div>'


def _ledger(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    css = {True: "good", False: "bad", None: "warn"}[verdict.is_proved]
    head = {True: "proved", False: "not proved", None: "not checked"}[verdict.is_proved]
    return (
        f'<h2>Ledger <span class="badge {css}">{head}</span></h2>'
        f'<div class="card"><pre>{escape(verdict.text)}</pre></div>'
    )


def _what_ran(run: Run) -> str:
    job, versions = run.job, run.job.get("versions", {})
    hosts = sorted({span.host for a in run.attempts for span in a.tasks if span.host})
    peaks: dict[str, int] = {}
    for attempt in run.attempts:
        for task, size in attempt.peak_memory_bytes.items():
            peaks[task] = max(size, peaks.get(task, 0))
    pairs = [
        ("command", f"<code>{escape(job['command'])}</code>" if job.get("command") else ""),
        ("strategy", escape(_strategy(run))),
        ("hosts", escape(", ".join(hosts) or job.get("host", ""))),
        ("CPUs", escape(str(job.get("cpus", "")))),
        ("versions", escape(", ".join(f"{name} {v}" for name, v in versions.items()))),
        ("peak memory", ", ".join(f"{escape(t)} {p / 2**20:,.0f} MiB" for t, p in peaks.items())),
        ("weights", f"<code>{escape(str(run.summary.get('weights_sha256', '')))}</code>"),
    ]
    items = "".join(
        f"<dt>{name}</dt><dd>{text}</dd>"
        for name, text in pairs
        if text and text != "<code></code>"
    )
    config = _pairs_of(run.config)
    details = f"<details><summary>configuration</summary>{config}</details>" if config else ""
    return f'<h2>What ran</h2><div class="card"><dl class="pairs">{items}</dl>{details}</div>'


def _pairs_of(config: Mapping[str, Any]) -> str:
    flat = _flat(config)
    items = "".join(
        f"<dt><code>{escape(k)}</code></dt><dd><code>{escape(_text(v))}</code></dd>"
        for k, v in flat.items()
    )
    return f'<dl class="pairs" style="margin-top:8px">{items}</dl>' if flat else ""


# sweeps


def _sweep(sweep: Sweep, index: int) -> str:
    best = next((t for t in sweep.trials if t.trial == sweep.best), None)
    failed = sum(trial.status == "failed" for trial in sweep.trials)
    figures = [
        (number(best.score) if best else UNKNOWN, f"best {sweep.objective}"),
        (str(len(sweep.completed)), "trials completed"),
        (str(failed), "trials failed"),
        (sweep.tuner, "tuner"),
        (str(sweep.seed), "seed"),
    ]
    cells = "".join(
        f'<div class="figure"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in figures
    )
    return (
        f'<section class="run" id="sweep-{index}">'
        f"<h1>{escape(sweep.name)} {_badge(sweep.status)}</h1>"
        f'<p class="path">{escape(str(sweep.path))}</p><p class="soft">{escape(sweep.reason)}</p>'
        f'<div class="figures">{cells}</div>{_parallel(sweep)}{_scores(sweep)}'
        f"{_trials(sweep)}</section>"
    )


def _parallel(sweep: Sweep) -> str:
    trials, names = sweep.completed, sweep.varied[:10]
    if not trials or not names:
        return ""
    axes, heights = [], []
    for name in names:
        values = [t.hyperparameters[name] for t in trials if name in t.hyperparameters]
        axis, at = axis_of(name, values, is_log=name in sweep.on_log_scale)
        axes.append(axis)
        heights.append(at)
    score_axis, score_at = axis_of(sweep.objective, [t.score for t in trials], is_log=False)
    order = sorted(trials, key=lambda t: t.score or 0.0, reverse=sweep.is_max)
    lines = [
        Crossing(
            heights=[
                *(
                    at.get(str(t.hyperparameters.get(name)))
                    for name, at in zip(names, heights, strict=True)
                ),
                score_at[str(t.score)],
            ],
            rank=rank / max(1, len(order) - 1),
            tip=_trial_tip(t, sweep.objective),
            is_best=t.trial == sweep.best,
        )
        for rank, t in enumerate(order)
    ]
    svg = parallel_coordinates(
        [*axes, score_axis], lines, label="Parallel coordinates of the trials"
    )
    least = 130 * (len(axes) + 1)
    return (
        '<h2>Hyperparameters</h2><div class="card scroll">'
        '<ul class="legend"><li class="c1"><span class="key c1"></span>best trial</li>'
        '<li class="c0"><span class="key c0"></span>others; the better, the stronger</li></ul>'
        f'<div style="min-width:{least}px">{svg}</div></div>'
    )


def _trial_tip(trial: TrialEntry, objective: str) -> str:
    values = [f"{name}: {_text(value)}" for name, value in trial.hyperparameters.items()]
    return "\n".join([f"trial {trial.trial}: {objective} {number(trial.score)}", *values])


def _scores(sweep: Sweep) -> str:
    scores = [trial.score for trial in sweep.completed if trial.score is not None]
    best: list[float] = []
    for score in scores:
        pick = max if sweep.is_max else min
        best.append(pick(score, best[-1]) if best else score)
    series = [
        Series(name="trial", points=list(enumerate(scores, 1)), is_dots=True),
        Series(name="best so far", points=list(enumerate(best, 1)), colour=1, is_dashed=True),
    ]
    chart = _chart(_words(sweep.objective), series, x_label="completed trials", from_zero=False)
    return f'<h2>Scores</h2><div class="grid-of-charts">{chart}</div>' if chart else ""


def _trials(sweep: Sweep) -> str:
    names = sweep.varied[:10]
    order = sorted(
        sweep.trials,
        key=lambda t: (t.score is None, (t.score or 0.0) * (-1 if sweep.is_max else 1)),
    )
    rows = [
        [
            escape(t.trial) + (" ★" if t.trial == sweep.best else ""),
            f'<span class="{"bad" if t.status == "failed" else ""}">{escape(t.status)}</span>',
            number(t.score),
            duration(t.seconds),
            str(t.starts),
            *(escape(_text(t.hyperparameters.get(name))) for name in names),
            escape(t.reason),
        ]
        for t in order[:500]
    ]
    head = ["trial", "status", escape(sweep.objective), "time", "starts", *map(escape, names), ""]
    return f'<h2>Trials</h2><div class="card scroll">{_table(head, rows)}</div>'


# pieces


def _chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = True,
) -> str:
    shown = [one for one in series if one.known]
    svg = line_chart(shown, label=title, x_label=x_label, marks=marks, from_zero=from_zero)
    if not svg:
        return ""
    items = "".join(
        f'<li><span class="key c{one.colour % NUM_COLOURS}{" dashed" * one.is_dashed}"></span>'
        f"{escape(one.name)}, last {number(one.known[-1][1])}</li>"
        for one in shown
    )
    return f'<div class="card"><h3>{escape(title)}</h3><ul class="legend">{items}</ul>{svg}</div>'


def _table(
    head: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: int | None = None
) -> str:
    """Return a table of cells that are HTML; columns from number `numbers` on are of numbers."""

    def css(column: int) -> str:
        return ' class="n"' if numbers is not None and column >= numbers else ""

    heads = "".join(f"<th{css(i)}>{text}</th>" for i, text in enumerate(head))
    lines = (
        "<tr>" + "".join(f"<td{css(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _badge(status: str) -> str:
    word = status.split(":")[0]
    css = {"done": "good", "finished": "good", "completed": "good", "running": "live"}.get(word)
    css = css or ("bad" if word.startswith("failed") else "warn")
    return f'<span class="badge {css}">{escape(status)}</span>'


def _points(run: Run, name: str) -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[name]))
        for line in run.metrics
        if isinstance(line.get(name), int | float) and isinstance(line.get("step"), int | float)
    ]


def _last(run: Run, name: str) -> float | None:
    points = _points(run, name)
    return points[-1][1] if points else None


def _last_metrics(run: Run) -> dict[str, float]:
    names = [prefix + name for name in run.metric_names for prefix in ("", "val_")]
    return {n: value for n in names if (value := _last(run, n)) is not None}


def _steps(run: Run) -> int | None:
    told = [run.summary.get("steps"), run.live.get("step"), _last(run, "step")]
    known = [int(step) for step in told if isinstance(step, int | float)]
    return max(known, default=None)


def _strategy(run: Run) -> str:
    return str(
        run.summary.get("strategy") or run.job.get("strategy") or run.live.get("strategy", "")
    )


def _words(name: str) -> str:
    prefix = "validation " if name.startswith("val_") else ""
    words = prefix + name.removeprefix("val_").replace("_", " ")
    return words[:1].upper() + words[1:]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping)
        flat.update(_flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat
