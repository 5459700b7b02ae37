"""Run directory of a job, locked while it runs, and its `report.json`.

The report has each attempt, its tasks, and its root cause.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tfdist.cluster import Task
from tfdist.errors import UsageError
from tfdist.files import FileLock, Held

if TYPE_CHECKING:
    from tfdist.launch.state import JobState

FILE_NAME = "report.json"
_RESERVE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The root cause; later failures are secondary."""

    task: Task
    cause: str
    exit_code: int
    """What the job ends with."""
    at_s: float
    kind: str = ""
    """What it has in common with others: the program's error, however its process ended."""
    step: int | None = None
    """The last step that any task had reported."""
    detect_s: float | None = None
    """From the failure to when it was named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """How one task went. Times are those of the clock that the supervisor was given."""

    task: Task
    pid: int | None = None
    status: int | None = None
    """Exit code, or minus the signal that ended the task; None if it did not end."""
    started_at_s: float | None = None
    ended_at_s: float | None = None
    stopped: bool = False
    """Whether the launcher had asked it to end."""
    restart: int = 0
    """Which restart of this task alone its process was; 0: the one it began with."""


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def request_name(signum: int) -> str:
    """Return by what a job was asked to stop; SIGPIPE stands for its output, which is closed."""
    return "its output is closed" if signum == signal.SIGPIPE else signal_name(signum)


def exit_code_of(status: int) -> int:
    """Return the exit code a shell would give for a task's `status`: 128 + n for a signal n."""
    return 128 - status if status < 0 else status


def attempt_entry(
    attempt: JobState,
    *,
    number: int,
    epoch_s: float,
    last_lines: Callable[[Task], Sequence[str]],
    stacks: Mapping[Task, Sequence[str]],
    hosts: Mapping[Task, str],
) -> dict[str, Any]:
    """Return the report's entry of an attempt that is over.

    Args:
      attempt: one start of all tasks of a job, and its end.
      number: of the attempt.
      epoch_s: the time of day when the clock stood at 0.
      last_lines: returns those of a task's output.
      stacks: the last lines of the tasks that were asked for their stacks, after a hang.
      hosts: where each task was, in a job on several hosts.
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

    failure, restarts, lost = attempt.failure, attempt.restarts, attempt.lost
    return {
        "attempt": number,
        "exit_code": attempt.exit_code,
        "detect_s": _rounded(failure.detect_s) if failure else None,
        "restart_s": None,
        "first_step_s": _elapsed_s(attempt.started_s, attempt.first_step_s),
        "tasks": [task_entry(record) for record in attempt.records],
        "restarts": [
            {**failure_entry(past), "restart_s": _restart_s(attempt, past)} for past in restarts
        ],
        "lost": [
            {**failure_entry(past), "last_lines": list(last_lines(past.task))} for past in lost
        ],
        "first_failure": failure
        and {
            **failure_entry(failure),
            "last_lines": list(last_lines(failure.task)),
            "stacks": {str(task): list(lines) for task, lines in stacks.items()},
        },
    }


def restart_seconds(failed: JobState, following: JobState) -> float | None:
    """Return the seconds from a failure until every task of the next attempt was started."""
    firsts = [record.started_at_s for record in following.records if not record.restart]
    known = [moment for moment in firsts if moment is not None]
    all_started_s = max(known) if known and len(known) == len(firsts) else None
    return _elapsed_s(failed.failure.at_s if failed.failure else None, all_started_s)


def _restart_s(attempt: JobState, failure: Failure) -> float | None:
    """Return the seconds from a failure until its task was started again alone."""
    moments = [
        record.started_at_s
        for record in attempt.records
        if record.task == failure.task and record.started_at_s is not None
    ]
    after = [moment for moment in moments if moment > failure.at_s]
    return _elapsed_s(failure.at_s, min(after, default=None))


def _elapsed_s(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else _rounded(end_s - begin_s)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def earlier_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the attempts of earlier runs in this directory; none if the report is damaged."""
    try:
        report = json.loads((run_dir / FILE_NAME).read_text())
        attempts = report["attempts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return attempts if isinstance(attempts, list) else []


def reserve_room(run_dir: Path) -> IO[bytes]:
    """Take room on the disk for a report until the file, which has no name, is closed.

    Raises OSError where there is not so much.
    """
    file = tempfile.TemporaryFile(dir=run_dir)  # noqa: SIM115
    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
    return file


_LOGS = "logs"


def chosen_run_dir(given: str | None) -> Path:
    """Return the absolute path of the run directory: the one given, or a new name."""
    if given is not None:
        return Path(os.path.abspath(os.path.expanduser(given)))
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return Path(os.path.abspath(os.path.join("runs", name)))


def log_name(task: Task, restart: int = 0) -> str:
    """Return the name of a task's log, such as ``worker-1.restart-1.log`` once started again."""
    return f"{task}.restart-{restart}.log" if restart else f"{task}.log"


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next start of the job in `run_dir`, from 1 on."""
    try:
        names = os.listdir(run_dir / _LOGS)
    except OSError:
        return 1
    numbers = [int(m[1]) for name in names if (m := re.fullmatch(r"attempt-(\d+)", name))]
    return max(numbers, default=0) + 1


class RunDir:
    """A run directory that no other launcher uses until it is closed.

    The lock is the kernel's: it ends with this process, however that ends.

    Raises:
        UsageError: it cannot be written to, or another job runs in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / _LOGS)
        try:
            self._lock.path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._lock.acquire()
        except OSError as error:
            raise not_writable(path, error) from None
        except Held:
            raise UsageError(
                "--run_dir",
                received=f"{path}, where a job runs",
                expected="a directory of its own",
                fix="wait until that job has ended, or give this one another --run_dir",
                code="run-dir-in-use",
            ) from None
        self.attempt = next_attempt(path)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def next_attempt(self) -> Path:
        """Go on to the next attempt; make and return the directory for its logs."""
        self.attempt += 1
        return self.start_attempt()

    def start_attempt(self) -> Path:
        """Make and return the directory for the logs of this attempt."""
        logs = self.path / _LOGS / f"attempt-{self.attempt}"
        try:
            logs.mkdir()
        except OSError as error:
            raise not_writable(self.path, error) from None
        return logs


def not_writable(path: Path, error: OSError) -> UsageError:
    """Return the error for a run directory that refuses what is written to it."""
    return UsageError(
        "--run_dir",
        received=f"{path} ({error.strerror})",
        expected="a directory that can be written to",
        fix="give another one with --run_dir",
        code="not-writable",
    )
