"""A sweep: what its directory tells, and its section of the page."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, require
from tfdist.files import is_held
from tfdist.outputs.run_directory import read_json
from tfdist.report.pieces import (
    Axis,
    Crossing,
    Series,
    axis_of,
    badge,
    card,
    cards,
    chart,
    duration,
    figures,
    number,
    parallel_coordinates,
    section,
    table,
    text,
    words,
)
from tfdist.report.run import Run, read_run, reading

SWEEP_FILE, JOURNAL_FILE, LOCK_FILE = "sweep.json", "journal.jsonl", ".chief.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEntry:
    """One trial of a sweep."""

    trial: str
    status: str
    score: float | None
    hyperparameters: Mapping[str, Any]
    starts: int
    reason: str
    seconds: float | None
    path: Path
    """Its run directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """A sweep as of the last change of its `sweep.json`."""

    path: Path
    name: str
    status: str
    reason: str
    tuner: str
    objective: str
    is_max: bool
    seed: int | None
    trials: tuple[TrialEntry, ...]
    best: str
    """The best trial; empty if there is none."""
    on_log_scale: frozenset[str]

    @property
    def completed(self) -> list[TrialEntry]:
        """Return the trials that have a score."""
        return [trial for trial in self.trials if trial.score is not None]

    @property
    def scores(self) -> list[float]:
        """Return the scores of the completed trials, in the order in which they were asked for."""
        return [trial.score for trial in self.trials if trial.score is not None]

    @property
    def best_so_far(self) -> list[float]:
        """Return the best score up to each completed trial."""
        return list(itertools.accumulate(self.scores, max if self.is_max else min))

    @property
    def ranked(self) -> list[TrialEntry]:
        """Return all trials, the best first and those without a score last."""
        sign = -1 if self.is_max else 1
        return sorted(self.trials, key=lambda t: (t.score is None, sign * (t.score or 0.0)))

    @property
    def varied(self) -> list[str]:
        """Return the hyperparameters that differ between trials."""
        seen: dict[str, set[str]] = {}
        for trial in self.trials:
            for name, value in trial.hyperparameters.items():
                seen.setdefault(name, set()).add(str(value))
        return [name for name, values in seen.items() if len(values) > 1] or list(seen)


def is_sweep(path: Path) -> bool:
    """Return whether a sweep has written there."""
    return (path / SWEEP_FILE).is_file() or (path / JOURNAL_FILE).is_file()


def read_sweep(path: Path) -> SweepRecord:
    """Return what is in a sweep's directory; UsageError where it is damaged or has begun only."""
    content = read_json(path / SWEEP_FILE)
    require(
        content,
        str(path / SWEEP_FILE),
        received="nothing yet",
        expected="a sweep of which a trial has begun",
        fix="wait for its first trial, or name another directory",
        code="not-a-sweep",
    )
    with reading(path):
        return _sweep(path, content or {})


def runs_of_best(sweep: SweepRecord, *, most: int) -> list[Run]:
    """Return the runs of the best trials, without those that are not there, or not whole."""
    runs = []
    for trial in sweep.ranked[:most]:
        with contextlib.suppress(TfdistError):
            run = read_run(trial.path)
            runs.append(replace(run, name=f"{sweep.name}, trial {trial.trial}"))
    return runs


def _sweep(path: Path, content: Mapping[str, Any]) -> SweepRecord:
    status = str(content["status"])
    if status == "running" and not is_held(path / LOCK_FILE):
        status = "unfinished: its chief was stopped or killed"
    return SweepRecord(
        path=path,
        name=path.resolve().name,
        status=status,
        reason=content.get("reason") or "",
        tuner=content["tuner"],
        objective=content["objective"],
        is_max=content["direction"] == "max",
        seed=content.get("seed"),
        trials=tuple(_trial(entry, path) for entry in content["trials"]),
        best=(content.get("best") or {}).get("trial", ""),
        on_log_scale=_on_log_scale(path / JOURNAL_FILE),
    )


def _trial(entry: Mapping[str, Any], sweep: Path) -> TrialEntry:
    began, ended = entry.get("began_at"), entry.get("ended_at")
    return TrialEntry(
        trial=str(entry["trial"]),
        status=str(entry["status"]),
        score=entry.get("score"),
        hyperparameters=dict(entry["hyperparameters"]),
        starts=entry.get("starts", 1),
        reason=entry.get("reason") or "",
        seconds=ended - began if began is not None and ended is not None else None,
        path=sweep / "trials" / Path(entry.get("run_dir", "")).name,  # and nowhere else
    )


def _on_log_scale(journal: Path) -> frozenset[str]:
    try:
        with journal.open(encoding="utf-8") as file:
            space = json.loads(file.readline()).get("space", ())
        return frozenset(
            one["config"]["name"] for one in space if "log" in str(one["config"].get("sampling"))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()  # the scale of an axis is all that depends on it


# Section of the page for one sweep.


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


def coordinates(sweep: SweepRecord, *, most: int) -> list[tuple[Axis, list[float | None]]]:
    """Return the axes of parallel coordinates, and where the completed trials cross each.

    The trials are as ranked; the axes are those of `most` hyperparameters, and of the score.
    """
    trials = [trial for trial in sweep.ranked if trial.score is not None]
    columns: dict[str, list[Any]] = {
        name: [t.hyperparameters.get(name) for t in trials] for name in sweep.varied[:most]
    }
    found = []
    for name, values in (*columns.items(), (sweep.objective, [t.score for t in trials])):
        known = [value for value in values if value is not None]
        axis, height_of = axis_of(name, known, is_log=name in sweep.on_log_scale)
        found.append((axis, [height_of.get(str(value)) for value in values]))
    return found


def _parallel(sweep: SweepRecord) -> str:
    trials = [trial for trial in sweep.ranked if trial.score is not None]
    if not trials or not sweep.varied:
        return ""
    axes, heights = zip(*coordinates(sweep, most=_MAX_AXES), strict=True)
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
    points, best = list(enumerate(sweep.scores, 1)), list(enumerate(sweep.best_so_far, 1))
    series = [
        Series(name="trial", points=points, is_dots=True),
        Series(name="best so far", points=best, colour=1, is_dashed=True),
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
