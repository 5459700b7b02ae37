"""Reader of run directories: files of the launcher, the training and the evaluator."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError, require
from tfdist.files import is_held
from tfdist.outputs.run_directory import COUNTERS, DONE, Evaluations, RunDirectory, read_json
from tfdist.outputs.sweep_journal import JOURNAL

REPORT_FILE, LIVE_FILE, HISTORY_FILE = "report.json", "live.json", "history.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpan:
    """One process of a task. Times are seconds since the epoch, or `None` if unknown."""

    task: str
    host: str
    begin: float | None
    end: float | None
    outcome: str
    """Its end: ``running``, ``done``, ``stopped``, ``exit code 1``, ``SIGKILL``."""
    is_failure: bool
    restart: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHistory:
    """History of one task, in intervals of `width_s` seconds that start at `begin`.

    `phases` has the seconds of each phase, `steps` the last step of each interval.
    """

    begin: float
    width_s: float
    phases: Mapping[str, tuple[float, ...]]
    steps: tuple[int | None, ...]
    memory_bytes: tuple[int | None, ...]

    def rates(self) -> list[tuple[float, float]]:
        """Return steps per second at the middle of each interval, in seconds from `begin`.

        The first steps have no rate, because they may be the steps of a restored checkpoint.
        """
        known = [(i * self.width_s, step) for i, step in enumerate(self.steps) if step]
        return [
            ((before_s + at_s) / 2 + self.width_s, (step - before) / (at_s - before_s))
            for (before_s, before), (at_s, step) in itertools.pairwise(known)
            if step >= before  # otherwise the program trains again
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One start of all tasks."""

    number: int
    exit_code: int | None
    begin: float | None
    end: float | None
    tasks: tuple[TaskSpan, ...]
    first_step_s: float | None = None
    failures: Sequence[Mapping[str, Any]] = ()
    """Failures in the launcher's report. ``followed`` says how the job continued."""
    history: Mapping[str, TaskHistory]
    views: Sequence[Mapping[str, Any]] = ()
    """Members of an elastic job, each with the step from which they worked together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Content of a run directory. Unknown parts are empty."""

    path: Path
    name: str
    status: str
    """``done``, ``running``, ``stopped``, ``failed (…)``, ``unfinished``."""
    job: Mapping[str, Any]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    attempts: tuple[AttemptRecord, ...]
    live: Mapping[str, Any]

    @property
    def metric_names(self) -> list[str]:
        """Return the metrics of training, loss first, without the prefix ``val_``."""
        names = dict.fromkeys(
            name.removeprefix("val_")
            for line in self.metrics
            for name, value in line.items()
            if name not in COUNTERS and isinstance(value, int | float)
        )
        return sorted(names, key=lambda name: name != "loss")

    @property
    def last_metrics(self) -> dict[str, float]:
        """Return the last value of each metric with any value, or NaN if it is not finite."""
        names = [prefix + name for name in self.metric_names for prefix in ("", "val_")]
        return {n: value for n in names if (value := self.last(n)) is not None}

    @property
    def steps(self) -> int | None:
        told = [self.summary.get("steps"), self.live.get("step"), self.last("step")]
        return max((int(step) for step in told if isinstance(step, int | float)), default=None)

    @property
    def strategy(self) -> str:
        """Return the strategy, or an empty text if it is unknown."""
        sources = (self.summary, self.job, self.live)
        return str(next((told["strategy"] for told in sources if told.get("strategy")), ""))

    @property
    def begin(self) -> float:
        """Return the start time of the first attempt, or 0 if it is unknown."""
        return min((a.begin for a in self.attempts if a.begin is not None), default=0.0)

    @property
    def seconds(self) -> float | None:
        """Return the time from the first start to the last end."""
        ends = [a.end for a in self.attempts if a.end is not None]
        return max(ends) - self.begin if self.begin and ends else None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Return end and begin of the attempts before and after each gap."""
        spans = [(a.begin, a.end) for a in self.attempts if a.begin is not None and a.end]
        gaps = ((end, begin) for (_, end), (begin, _) in itertools.pairwise(spans))
        return [(end, begin) for end, begin in gaps if begin > end]

    def active_s(self, moment: float) -> float:
        """Return the seconds of the attempts before a moment, without the gaps between them."""
        idle = sum(min(max(0.0, moment - end), begin - end) for end, begin in self.gaps)
        return moment - self.begin - idle

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return a metric over the steps, with NaN for non-finite values (null in the file).

        The result is empty if the metric was never finite.
        """
        found = [
            (float(line["step"]), math.nan if line[name] is None else float(line[name]))
            for line in self.metrics
            if isinstance(line.get(name, ""), int | float | None)
            and isinstance(line.get("step"), int | float)
        ]
        return found if any(math.isfinite(value) for _, value in found) else []

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, NaN if it is not finite, `None` without values."""
        points = self.points(name)
        return points[-1][1] if points else None


@contextlib.contextmanager
def reading(where: object) -> Iterator[None]:
    """Raise UsageError for `where` if the block finds content in an unexpected format."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            str(where),
            f"a file is incomplete or belongs to another program ({error!r})",
            fix="start the run again there, or pass another directory",
            code="not-a-run",
        ) from error


OF_LAUNCHER = (REPORT_FILE, LIVE_FILE)
_FILES = (*OF_LAUNCHER, "summary.json", "metrics.jsonl", JOURNAL)
"""Files of which each run or sweep has at least one."""


def runs_in(path: Path, files: Sequence[str] = _FILES) -> list[Path]:
    """Return the runs and sweeps one level below `path`, the newest last.

    Return only `path` if it is a run or a sweep, or if there is no run below. A run has one of
    `files`.
    """
    found: dict[Path, float] = {}
    with contextlib.suppress(OSError):
        below = () if _written_at(path, files) else path.iterdir()
        found = {run: at for run in below if (at := _written_at(run, files))}
    return sorted(found, key=lambda run: found[run]) or [path]


def newest_run(files: Sequence[str] = _FILES) -> Path:
    """Return the run or sweep in ``runs/`` that was written last, or raise UsageError."""
    newest = runs_in(Path("runs"), files)[-1]
    if not _written_at(newest, files):
        fix = "name a run directory, or change to the directory that has runs/"
        raise UsageError("RUN_DIR", "runs/ has no run", fix=fix, code="no-run")
    return newest


def add_run_dir(parser: argparse.ArgumentParser, *, nargs: str = "?") -> None:
    """Add the argument RUN_DIR to a program that reads runs."""
    about = "directory of a run, a sweep or several runs (default: the newest run in runs/)"
    parser.add_argument("run_dir", nargs=nargs, metavar="RUN_DIR", help=about)


def job_in(run_dir: str | None) -> Path:
    """Return the newest job of the launcher in RUN_DIR, or in ``runs/``."""
    path = Path(run_dir) if run_dir else newest_run(OF_LAUNCHER)
    return runs_in(path, OF_LAUNCHER)[-1]


def _written_at(path: Path, files: Sequence[str]) -> float:
    times = [0.0]
    for name in files:
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or the whole paths if last parts are equal."""
    names = [path.resolve().name or str(path) for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def is_running(path: Path) -> bool:
    """Return whether a launcher is running a job in a run directory."""
    return is_held(path / "logs" / ".lock")


def read_run(path: Path) -> RunRecord:
    """Return the run of a run directory.

    Raises:
        UsageError: The directory has no run, or a file in it is damaged.
    """
    with reading(path):
        return _read(path)


def _read(path: Path) -> RunRecord:
    directory = RunDirectory(path)
    report = read_json(path / REPORT_FILE) or {}
    live = read_json(path / LIVE_FILE) or {}
    summary, config = directory.read_summary() or {}, directory.read_config() or {}
    metrics = directory.read_metrics() if path.is_dir() else []
    require(
        "attempts" in report
        or "status" in summary
        or "global_batch_size" in config
        or any("step" in line for line in metrics),
        str(path),
        "the directory has no run of tfdist" if path.is_dir() else "the directory does not exist",
        fix="pass the directory of a sweep, or the run directory from the launcher's first line",
        code="not-a-run",
    )
    is_going = is_running(path)
    attempts = [_attempt(entry, path) for entry in report.get("attempts", ())]
    is_reported = any(attempt.number == live.get("attempt") for attempt in attempts)
    if live and not is_reported and (is_going or live.get("state") != "ended"):
        attempts.append(_unfinished(live, path, is_going=is_going))
    known = [at for attempt in attempts for at in (attempt.begin, attempt.end) if at is not None]
    ended_at = moment(summary.get("ended_at"))
    is_newer = ended_at is not None and ended_at > max(known, default=0.0)
    is_done = summary.get("status") == DONE and not is_going and is_newer
    return RunRecord(
        path=path,
        name=path.resolve().name,
        status="done" if is_done else _status(report, summary, is_going=is_going),
        job=report.get("job", {}),
        config=config,
        summary=summary,
        metrics=tuple(metrics),
        evaluations=tuple(Evaluations(directory.checkpoints).lines()),
        attempts=tuple(attempts),
        live=live if is_going else {},
    )


def _status(report: Mapping[str, Any], summary: Mapping[str, Any], *, is_going: bool) -> str:
    if is_going:
        return "running"
    code = report.get("exit_code")
    if report and code is None:
        return "unfinished: its launcher was killed"
    if code in (130, 143, 129, 141):
        return "stopped"
    if code:
        return f"failed (exit code {code})"
    return str(summary.get("status", "done" if report else "unfinished"))


def moment(text: str | None) -> float | None:
    """Convert a time of `report.json` to seconds since the epoch."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _attempt(entry: Mapping[str, Any], path: Path) -> AttemptRecord:
    number = int(entry["attempt"])
    failures = _failures(entry)
    blamed = {failure["task"] for failure in failures}
    spans = tuple(_span(task, blamed) for task in entry["tasks"])
    begin, history = _history(path, number)
    begins = [at for at in (begin, *(span.begin for span in spans)) if at is not None]
    return AttemptRecord(
        number=number,
        exit_code=entry["exit_code"],
        begin=min(begins, default=None),
        end=max((span.end for span in spans if span.end is not None), default=None),
        first_step_s=entry.get("first_step_s"),
        tasks=spans,
        failures=failures,
        history=history,
        views=[{**view, "step": int(view["step"] or 0)} for view in entry.get("views", ())],
    )


def _span(task: Mapping[str, Any], blamed: set[str]) -> TaskSpan:
    code, killed_by = task.get("exit_code"), task.get("signal")
    if killed_by:
        outcome = "stopped" if task.get("stopped") and killed_by == "SIGTERM" else killed_by
    elif code is None:
        outcome = "no end seen"
    else:
        outcome = "done" if code == 0 else f"exit code {code}"
    return TaskSpan(
        task=str(task["task"]),
        host=task.get("host", ""),
        begin=moment(task.get("started_at")),
        end=moment(task.get("ended_at")),
        outcome=outcome,
        is_failure=task["task"] in blamed and outcome not in ("done", "stopped"),
        restart=task.get("restart", 0),
    )


def _failures(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the failures in the launcher's report, each with the job's reaction."""
    first = entry.get("first_failure")
    return [
        *([{**first, "followed": "the attempt ended"}] if first else []),
        *({**one, "followed": "only this task was restarted"} for one in entry.get("restarts", ())),
        *({**one, "followed": "the other tasks continued"} for one in entry.get("lost", ())),
    ]


def _history(path: Path, number: int) -> tuple[float | None, dict[str, TaskHistory]]:
    told = read_json(path / "logs" / f"attempt-{number}" / HISTORY_FILE)
    if told is None:
        return None, {}
    begin, width_s = float(told["begin"]), float(told["width_s"])
    return begin, {
        str(task): TaskHistory(
            begin=begin,
            width_s=width_s,
            phases={phase: tuple(seconds) for phase, seconds in columns["phases"].items()},
            steps=tuple(columns["step"]),
            memory_bytes=tuple(columns["memory_bytes"]),
        )
        for task, columns in told["tasks"].items()
    }


def _unfinished(live: Mapping[str, Any], path: Path, *, is_going: bool) -> AttemptRecord:
    """Return an attempt that is running or was killed with its launcher (not in the report)."""
    number, begin, end = int(live["attempt"]), float(live["began_at"]), float(live["at"])
    _, history = _history(path, number)
    spans = tuple(
        TaskSpan(
            task=str(task["task"]),
            host=task["host"] or "",
            begin=begin,
            end=end,
            outcome=task["state"] if is_going else "no end seen",
            is_failure=False,
            restart=task["restarts"],
        )
        for task in live["tasks"]
    )
    return AttemptRecord(
        number=number,
        exit_code=None,
        begin=begin,
        end=end,
        tasks=spans,
        history=history,
    )
