"""Journal of a sweep, and the state computed from it.

Each event is a line that is on the disk before the next event. The state of a sweep is a fold over
the lines and does not need KerasTuner.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tfdist.errors import TfdistError, UsageError, require
from tfdist.files import fsync, one_line_errors, open_untrusted

JOURNAL, TRIALS, LOCK = "journal.jsonl", "trials", ".chief.lock"
"""Names in a sweep's directory: journal, trials' runs, lock of the chief."""


class Journal:
    """Writer of a journal. Only the sweep's chief, which holds the lock, has one.

    Raises:
      TfdistError: The file cannot be written.
      UsageError: The file is not a journal.
    """

    def __init__(self, path: Path, *, time_of_day: Callable[[], float]) -> None:
        self.path = path
        self._time_of_day = time_of_day
        self.lines = read(path)
        self._size = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append a line, flush it to the disk, and return it."""
        line = {"event": event, "at": round(self._time_of_day(), 3), **fields}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with one_line_errors(self.path):
            with open(self.path, "ab", opener=open_untrusted) as file:
                file.truncate(self._size)  # a partial line of a killed chief or a full disk
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not self.lines:
                fsync(self.path.parent)
        self._size += len(data)
        self.lines.append(line)
        return line


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal, also while it is written, [] if it is missing.

    Raises UsageError for a file that is not a journal.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TfdistError(f"{path}: {error.strerror or error}") from error
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, Mapping) or "event" not in line:
            raise UsageError(
                f"{path}, line {number}",
                f"{text[:60].decode(errors='replace')!r} is not a line of a sweep's journal",
                fix="delete the line, or pass another --sweep_dir",
                code="not-json",
            )
        lines.append(dict(line))
    return lines


# State of a sweep: a fold over the journal's lines.

Status = Literal["waiting", "running", "completed", "failed"]

COMPLETED: Status = "completed"
FAILED: Status = "failed"
RUNNING: Status = "running"
WAITING: Status = "waiting"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One set of hyperparameters, and the progress and result of its job."""

    id: str
    values: Mapping[str, Any]
    """Values of the active hyperparameters and of KerasTuner's own (``tuner/epochs``)."""
    run: str
    """Name of its run's directory under `trials/`, shared with the trial that it continues."""
    until: int | None = None
    """Virtual epoch after which the trial pauses, `None` if it runs to its end."""
    status: Status = WAITING
    starts: int = 0
    """Number of starts of its job, also by earlier chiefs."""
    kills: int = 0
    """Number of times the job was killed from outside since its last progress."""
    reached: int = 0
    """Number of virtual epochs done at the last kill."""
    score: float | None = None
    best_virtual_epoch: int | None = None
    history: tuple[Mapping[str, float], ...] = ()
    """Metrics of each virtual epoch."""
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    began_at: float | None = None
    ended_at: float | None = None
    started_at: float | None = None
    """Time of its last start, `None` if it does not run."""
    ran_s: float = 0.0
    """Total run time of its ended jobs in seconds."""
    asked: Mapping[str, Any] | None = None
    """Values requested by its program, including fixed values, `None` if not known yet."""

    @property
    def is_over(self) -> bool:
        return self.status in (COMPLETED, FAILED)

    @property
    def seconds(self) -> float | None:
        """Return the total run time of its jobs, `None` until the trial has ended."""
        return None if self.began_at is None or self.ended_at is None else self.ran_s

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Return the values requested by its program, without KerasTuner's own."""
        values = self.values if self.asked is None else self.asked
        return {k: v for k, v in values.items() if not k.startswith("tuner/")}


@dataclass(kw_only=True, slots=True)
class SweepState:
    """All trials of a sweep, in the order of their creation."""

    begun: Mapping[str, Any] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)
    finished: str | None = None
    """Reason for the end of the sweep, `None` if it still runs."""
    is_complete: bool = False
    """Whether the sweep ended because all trials were done."""

    def apply(self, line: Mapping[str, Any]) -> None:
        event = line["event"]
        if event == "begun":
            self.begun = line
        elif event == "extended":
            self.begun = {**self.begun, "max_trials": line["max_trials"]}
            self.finished, self.is_complete = None, False
        elif event == "finished":
            self.finished, self.is_complete = line["reason"], line["is_complete"]
        elif event == "asked" and line["trial"] is not None:
            self._asked(line)
        elif event in ("started", "killed", "ended"):
            self.finished = None
            trial = self.trials[line["trial"]]
            self.trials[trial.id] = _changed(trial, line)

    def _asked(self, line: Mapping[str, Any]) -> None:
        self.trials[line["trial"]] = Trial(
            id=line["trial"],
            values=line["values"],
            run=line["run"],
            until=line["until"],
            asked=line.get("hyperparameters"),
        )
        self.finished, self.is_complete = None, False

    @property
    def completed(self) -> tuple[str, ...]:
        """Return the ids of the completed trials."""
        return tuple(trial.id for trial in self.trials.values() if trial.status == COMPLETED)

    @property
    def scores(self) -> list[float]:
        """Return the scores of the completed trials, in the order of their creation."""
        return [t.score for t in self.trials.values() if t.score is not None]

    @property
    def best_so_far(self) -> list[float]:
        """Return the best score up to each completed trial."""
        return list(itertools.accumulate(self.scores, max if self.is_max else min))

    @property
    def is_max(self) -> bool:
        return self.begun.get("direction") == "max"

    @property
    def varied(self) -> list[str]:
        """Return the hyperparameters that differ between trials, or all if no values differ."""
        seen: dict[str, set[str]] = {}
        for trial in self.trials.values():
            for name, value in trial.hyperparameters.items():
                seen.setdefault(name, set()).add(str(value))
        return [name for name, values in seen.items() if len(values) > 1] or list(seen)

    @property
    def num_failed(self) -> int:
        return sum(trial.status == FAILED for trial in self.trials.values())

    @property
    def has_failed(self) -> bool:
        """Return whether at least one trial has failed and no trial is completed."""
        return self.num_failed > 0 and not self.completed

    def ranked(self) -> list[Trial]:
        """Return the completed trials, best first."""
        done = [t for t in self.trials.values() if t.status == COMPLETED and t.score is not None]
        return sorted(done, key=lambda t: t.score or 0.0, reverse=self.is_max)


def fold(lines: Iterable[Mapping[str, Any]]) -> SweepState:
    """Compute the state of a sweep from the lines of its journal."""
    state = SweepState()
    for line in lines:
        state.apply(line)
    return state


def sweep_in(path: Path, *, where: str) -> SweepState:
    """Return the state of the sweep in a directory, or raise UsageError if there is none."""
    state = fold(read(path / JOURNAL))
    require(
        state.begun,
        where,
        f"there is no sweep in {path} ({JOURNAL} is missing)",
        fix="give the --sweep_dir of the sweep",
        code="not-a-run",
    )
    return state


def best_trial(path: Path, *, where: str) -> tuple[SweepState, Trial]:
    """Return the state of the sweep in a directory, and its best trial.

    Raises UsageError at `where` if the directory has no sweep, or if no trial is completed.
    """
    state = sweep_in(path, where=where)
    ranked = state.ranked()
    require(
        ranked,
        where,
        f"no trial of the sweep in {path} is completed",
        fix=f"wait for its first trial, or print its failures with tfdist tune --show {path}",
        code="no-best",
    )
    return state, ranked[0]


def _changed(trial: Trial, line: Mapping[str, Any]) -> Trial:
    if trial.started_at is not None:  # a killed chief's job counts up to its last sign of life
        until = min(line.get("ran_until", line["at"]), line["at"])
        ran_s = trial.ran_s + max(0.0, until - trial.started_at)
        trial = replace(trial, ran_s=ran_s, started_at=None)
    if line["event"] == "started":
        began_at = trial.began_at if trial.began_at is not None else line["at"]
        return replace(
            trial,
            status=RUNNING,
            starts=trial.starts + 1,
            began_at=began_at,
            started_at=line["at"],
        )
    if line["event"] == "killed":
        return replace(
            trial,
            status=WAITING,
            kills=line["kills"],
            reached=line["reached"],
            reason=line["reason"],
        )
    return replace(
        trial,
        status=COMPLETED if line["status"] == "COMPLETED" else FAILED,
        score=line["score"],
        best_virtual_epoch=line["best_virtual_epoch"],
        history=tuple(line["history"]),
        reason=line["reason"],
        last_lines=tuple(line["last_lines"]),
        ended_at=line["at"],
        asked=line.get("hyperparameters") or trial.asked,
    )
