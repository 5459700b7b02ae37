"""What the directory of a sweep tells."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, require
from tfdist.files import is_held
from tfdist.outputs.run_directory import read_json
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
        path=sweep / entry.get("run_dir", ""),
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
