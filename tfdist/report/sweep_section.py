"""Section of the page for one sweep."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from html import escape
from pathlib import Path

from tfdist.report.charts import Crossing, Series, axis_of, parallel_coordinates
from tfdist.report.pieces import badge, card, cards, chart, figures, section, table, text, words
from tfdist.report.sweep import SweepRecord, TrialEntry
from tfdist.report.text import duration, number

_MAX_TRIALS = 500
_MAX_AXES = 10


def sweep_section(sweep: SweepRecord, index: int, link_of: Mapping[Path, str]) -> str:
    """Return a sweep; trials whose runs are on the page are linked by their directories."""
    best = next((t for t in sweep.trials if t.trial == sweep.best), None)
    known = [
        (number(best.score if best else None), f"best {sweep.objective}"),
        (str(len(sweep.completed)), "trials completed"),
        (str(sum(trial.status == "failed" for trial in sweep.trials)), "trials failed"),
        (sweep.tuner, "tuner"),
        (text(sweep.seed), "seed"),
    ]
    return (
        f'<section class="run" id="sweep-{index}">'
        f"<h1>{escape(sweep.name)} {badge(sweep.status)}</h1>"
        f'<p class="path">{escape(str(sweep.path))}</p><p class="soft">{escape(sweep.reason)}</p>'
        f"{figures(known)}{section('Hyperparameters', _parallel(sweep))}"
        f"{section('Scores', cards([_scores(sweep)]))}"
        f"{section('Trials', _trials(sweep, link_of))}</section>"
    )


def _parallel(sweep: SweepRecord) -> str:
    trials = [trial for trial in sweep.ranked if trial.score is not None]
    names = sweep.varied[:_MAX_AXES]
    if not trials or not names:
        return ""
    columns = {name: [t.hyperparameters.get(name) for t in trials] for name in names}
    axes, heights = [], []
    for name, values in (*columns.items(), (sweep.objective, [t.score for t in trials])):
        known = [value for value in values if value is not None]
        axis, height_of = axis_of(name, known, is_log=name in sweep.on_log_scale)
        axes.append(axis)
        heights.append([height_of.get(str(value)) for value in values])
    lines = [
        Crossing(
            heights=[column[rank] for column in heights],
            rank=rank / max(1, len(trials) - 1),
            tip=_tip(trial, sweep.objective),
            is_best=trial.trial == sweep.best,
        )
        for rank, trial in enumerate(trials)
    ]
    svg = parallel_coordinates(axes, lines, label="Parallel coordinates of the trials")
    return card(
        '<ul class="legend"><li><span class="key" style="color:var(--c1)"></span>best trial</li>'
        '<li><span class="key" style="color:var(--c0)"></span>others; the better, the stronger</li>'
        "</ul>"
        f'<div style="min-width:{130 * len(axes)}px">{svg}</div>',
        "scroll",
    )


def _tip(trial: TrialEntry, objective: str) -> str:
    values = [f"{name}: {text(value)}" for name, value in trial.hyperparameters.items()]
    return "\n".join([f"trial {trial.trial}: {objective} {number(trial.score)}", *values])


def _scores(sweep: SweepRecord) -> str:
    scores = [trial.score for trial in sweep.completed if trial.score is not None]
    pick = max if sweep.is_max else min
    best = list(itertools.accumulate(scores, pick))
    series = [
        Series(name="trial", points=list(enumerate(scores, 1)), is_dots=True),
        Series(name="best so far", points=list(enumerate(best, 1)), colour=1, is_dashed=True),
    ]
    return chart(words(sweep.objective), series, x_label="completed trials", from_zero=False)


def _trials(sweep: SweepRecord, link_of: Mapping[Path, str]) -> str:
    names = sweep.varied[:_MAX_AXES]
    rows = [
        [
            _name(trial, link_of.get(trial.path), is_best=trial.trial == sweep.best),
            f'<span class="{escape(trial.status)}">{escape(trial.status)}</span>',
            number(trial.score),
            duration(trial.seconds),
            str(trial.starts),
            *(escape(text(trial.hyperparameters.get(name))) for name in names),
            escape(trial.reason),
        ]
        for trial in sweep.ranked[:_MAX_TRIALS]
    ]
    head = ["trial", "status", escape(sweep.objective), "time", "starts", *map(escape, names), ""]
    return card(table(head, rows))


def _name(trial: TrialEntry, link: str | None, *, is_best: bool) -> str:
    name = escape(trial.trial) + (" ★" if is_best else "")
    return f'<a href="{link}">{name}</a>' if link else name
