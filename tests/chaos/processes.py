"""The processes of a job, seen from outside through /proc."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A task that runs now."""

    pid: int
    attempt: int


Told = Callable[[Mapping[str, str]], tuple[str, int]]
"""Reads the name of a task and its attempt from its environment; KeyError if it is no task."""


def from_tf_config(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns what tfdist's launcher told a task."""
    config = json.loads(environ["TF_CONFIG"])
    return "{type}-{index}".format(**config["task"]), config["tfdist"]["attempt"]


def tasks_of(launcher_pid: int, *, told: Told = from_tf_config) -> dict[str, Running]:
    """Returns the tasks among the children of a launcher that run now, by name."""
    found = {}
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(OSError, ValueError, KeyError):
                name, attempt = told(_environ(child))
                if _state(child) != "Z":
                    found[name] = Running(pid=int(child), attempt=attempt)
    return found


def is_running(pid: int) -> bool:
    """Returns whether there is such a process, and not only its end to be told."""
    with contextlib.suppress(OSError):
        return _state(str(pid)) != "Z"
    return False


class Watched:
    """Processes that are waited for; a handle stays with its process when its id is used again."""

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}

    def add(self, pids: Iterable[int]) -> None:
        """Watches these processes too."""
        for pid in set(pids) - set(self._handles):
            with contextlib.suppress(ProcessLookupError):
                self._handles[pid] = os.pidfd_open(pid)

    def gone(self, *, within_s: float) -> bool:
        """Returns whether every one of them ends within so many seconds."""
        deadline_s = time.monotonic() + within_s
        return all(
            select.select([handle], [], [], max(0.0, deadline_s - time.monotonic()))[0]
            for handle in self._handles.values()
        )

    def kill(self) -> None:
        """Kills those that are left."""
        for handle in self._handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def send(pid: int, signum: int) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _environ(pid: str) -> Mapping[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _state(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
