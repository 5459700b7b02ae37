"""Section of the page about a sweep, read from its journal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tfdist.files import is_held
from tfdist.outputs.sweep_journal import JOURNAL, LOCK, SweepState, fold, read
from tfdist.report.pieces import (
    Series,
    badge,
    card,
    cards,
    chart,
    duration,
    figures,
    number,
    section,
    table,
    text,
    words,
)
from tfdist.report.run_records import reading

_MAX_TRIALS = 500
_MAX_COLUMNS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """A sweep and its directory."""

    path: Path
    name: str
    status: str
    state: SweepState


def is_sweep(path: Path) -> bool:
    """Return whether the directory has the journal of a sweep."""
    return os.path.isfile(path / JOURNAL)  # also False if the directory is not readable


def read_sweep(path: Path) -> SweepRecord:
    """Return the sweep of a directory, or raise UsageError if it is damaged."""
    with reading(path):
        state = fold(read(path / JOURNAL))
    status = "finished"
    if is_held(path / LOCK):
        status = "running"
    elif state.finished is None:
        status = "unfinished: its chief was stopped or killed"
    return SweepRecord(path=path, name=path.resolve().name, status=status, state=state)


def sweep_section(sweep: SweepRecord, index: int) -> str:
    state, best = sweep.state, sweep.state.ranked()[:1]
    known = [
        (number(best[0].score if best else None), f"best {state.begun['objective']}"),
        (str(len(state.scores)), "trials completed"),
        (number(state.num_failed or None), "trials failed"),
        (state.begun["tuner"], "tuner"),
        (text(state.begun["seed"]), "seed"),
    ]
    return (
        f'<section class="run" id="sweep-{index}">'
        f"<h1>{escape(sweep.name)} {badge(sweep.status)}</h1>"
        f'<p class="path">{escape(str(sweep.path))}</p>'
        f'<p class="soft">{escape(state.finished or "")}</p>'
        f"{figures(known)}{section('Scores', cards([_scores(state)]))}"
        f"{section('Trials', _trials(state))}</section>"
    )


def _scores(state: SweepState) -> str:
    points, best = list(enumerate(state.scores, 1)), list(enumerate(state.best_so_far, 1))
    series = [
        Series(name="trial", points=points, is_dots=True),
        Series(name="best so far", points=best, colour=1),
    ]
    title = words(state.begun["objective"])
    return chart(title, series, x_label="completed trials", from_zero=False)


def _trials(state: SweepState) -> str:
    ranked, names = state.ranked(), state.varied[:_MAX_COLUMNS]
    others = [trial for trial in state.trials.values() if trial.score is None]
    rows = [
        [
            escape(trial.id) + (" ★" if trial in ranked[:1] else ""),
            f'<span class="{escape(trial.status)}">{escape(trial.status)}</span>',
            number(trial.score),
            duration(trial.seconds),
            str(trial.starts),
            *(escape(text(trial.hyperparameters.get(name))) for name in names),
            escape(trial.reason),
        ]
        for trial in [*ranked, *others][:_MAX_TRIALS]
    ]
    head = ["trial", "status", escape(state.begun["objective"]), "time", "starts"]
    return card(table([*head, *map(escape, names), ""], rows))
