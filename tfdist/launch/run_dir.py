"""Run directory of a job: its lock, its logs, and `report.json`.

The report lists all attempts, with the tasks and the root cause of each attempt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tfdist.cluster import Task, settings
from tfdist.errors import TfdistError, UsageError
from tfdist.files import FileLock, LockedError
from tfdist.launch.diagnosis import Failure
from tfdist.launch.events import signal_name
from tfdist.launch.multihost.host_agreement import without_secrets
from tfdist.launch.state import JobState, TaskRecord
from tfdist.outputs.run_directory import read_json

RUNS = "runs"
"""Directory of the run directories that the launcher names."""

_LOGS = "logs"


def chosen_run_dir(given: str | None, environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the given run directory, or a new path if `None`.

    The name of a new directory has the id of the Slurm job, or else the time.
    """
    if given is not None:
        return Path(os.path.abspath(os.path.expanduser(given)))
    name = slurm_prefix(environ) or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-"
    return Path(os.path.abspath(os.path.join(RUNS, f"{name}{secrets.token_hex(2)}")))


def slurm_prefix(environ: Mapping[str, str]) -> str:
    """Return the first part of the names of the runs of this Slurm job, "" outside of Slurm."""
    job_id = settings.text(environ, "SLURM_JOB_ID")
    return f"slurm-{job_id}-" if job_id.isdecimal() else ""


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next attempt in `run_dir` (first attempt: 1)."""
    try:
        names = os.listdir(run_dir / _LOGS)
    except OSError:
        return 1
    numbers = [int(m[1]) for name in names if (m := re.fullmatch(r"attempt-(\d+)", name))]
    return max(numbers, default=0) + 1


class RunDir:
    """Run directory, locked against other launchers while the context is open.

    The kernel releases the lock when this process exits or is killed. `attempt` is the number of
    the last attempt that was started.

    Raises:
        TfdistError: The directory is not writable, or another job uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / _LOGS / ".lock")
        try:
            self._lock.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise not_writable(path, error) from None
        except LockedError:
            raise UsageError(
                "--run_dir",
                f"another job is running in {path}",
                fix="wait until that job ends, or pass another --run_dir",
                code="run-dir-in-use",
            ) from None
        self.attempt = 0

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def discard(self) -> None:
        """Remove the directory of a job that has not started, unless it has other files."""
        with contextlib.suppress(OSError):
            self._lock.path.unlink()
            self._lock.path.parent.rmdir()
            self.path.rmdir()

    def start_attempt(self) -> Path:
        """Set `attempt` to the next number, and create and return its log directory."""
        self.attempt = next_attempt(self.path)
        logs = self.path / _LOGS / f"attempt-{self.attempt}"
        try:
            logs.mkdir()
        except OSError as error:
            raise not_writable(self.path, error) from None
        return logs


def not_writable(path: Path, error: OSError) -> TfdistError:
    """Return the error for a run directory that is not writable."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):  # not a usage error: a retry may succeed
        return TfdistError(f"--run_dir {path}: {error.strerror}. Fix: free disk space")
    return UsageError(
        "--run_dir",
        f"cannot write to {path} ({error.strerror})",
        fix="pass another --run_dir",
        code="not-writable",
    )


REPORT_FILE = "report.json"


def attempt_entry(
    attempt: JobState,
    *,
    number: int,
    epoch_s: float,
    last_lines: Callable[[Task], Sequence[str]],
    stacks: Mapping[Task, Sequence[str]],
    hosts: Mapping[Task, str],
) -> dict[str, Any]:
    """Return the report's entry for a finished attempt.

    Args:
      attempt: Final state of the attempt.
      number: Number of the attempt.
      epoch_s: Time of day at which the clock was 0.
      last_lines: Function that returns the last lines of a task's output.
      stacks: Last lines of each task that printed its stacks after a hang.
      hosts: Host of each task (empty for a job on one host).
    """

    def time_of(at_s: float | None) -> str | None:
        if at_s is None:
            return None
        moment = datetime.fromtimestamp(epoch_s + at_s, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def host_of(task: Task) -> dict[str, str]:
        return {"host": hosts[task]} if task in hosts else {}

    def task_entry(record: TaskRecord) -> dict[str, Any]:
        status = record.status
        killed = status is not None and status < 0
        return {
            "task": str(record.task),
            **host_of(record.task),
            "pid": record.pid,
            "exit_code": None if killed else status,
            "signal": signal_name(-status) if status is not None and killed else None,
            "started_at": time_of(record.started_at_s),
            "ended_at": time_of(record.ended_at_s),
            "stopped": record.stopped,
            "restart": record.restart,
        }

    def failure_entry(failure: Failure) -> dict[str, Any]:
        return {
            "task": str(failure.task),
            **host_of(failure.task),
            "cause": failure.cause,
            "step": failure.step,
            "at": time_of(failure.at_s),
            "detect_s": _rounded(failure.detect_s),
        }

    failure, first_s = attempt.failure, attempt.first_step_s
    return {
        "attempt": number,
        "exit_code": attempt.exit_code,
        "detect_s": _rounded(failure.detect_s) if failure else None,
        "first_step_s": None if first_s is None else _rounded(first_s - attempt.started_s),
        "tasks": [task_entry(record) for record in attempt.records],
        "restarts": [failure_entry(past) for past in attempt.restarts],
        "lost": [
            {**failure_entry(past), "last_lines": list(last_lines(past.task))}
            for past in attempt.lost
        ],
        "views": [
            {"members": [*map(str, v.members)], "step": v.step, "at": time_of(v.at_s)}
            for v in attempt.views
        ],
        "first_failure": failure
        and {
            **failure_entry(failure),
            "last_lines": list(last_lines(failure.task)),
            "stacks": {str(task): list(lines) for task, lines in stacks.items()},
        },
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def earlier_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the attempts in this directory's report, or [] if the report is unreadable."""
    with contextlib.suppress(TfdistError):
        attempts = (read_json(run_dir / REPORT_FILE) or {}).get("attempts")
        return attempts if isinstance(attempts, list) else []
    return []


def description_of_job(strategy: str, *, argv: Sequence[str]) -> dict[str, Any]:
    """Return the command, strategy and host for `report.json`, without secrets in the command."""
    return {
        "command": shlex.join(without_secrets(argv)),
        "strategy": strategy,
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
    }
