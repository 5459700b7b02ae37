"""Run directory of a job, locked while it runs."""

from __future__ import annotations

import os
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from tfdist.cluster import Task
from tfdist.errors import UsageError
from tfdist.files import FileLock, Held

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

    The lock is the kernel's: it ends with this process, however that ends. `attempt` is the number
    of the last attempt that was started.

    Raises:
        UsageError: it cannot be written to, or another job runs in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / _LOGS)
        try:
            self._lock.path.mkdir(parents=True, exist_ok=True)
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
        self.attempt = 0

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def start_attempt(self) -> Path:
        """Make and return the directory for the logs of another attempt, whose number it sets."""
        self.attempt = next_attempt(self.path)
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
