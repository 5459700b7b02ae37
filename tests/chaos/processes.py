"""The processes of a job, seen from outside."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A task that runs now."""

    pid: int
    attempt: int


Told = Callable[[Mapping[str, str]], tuple[str, int]]
"""Reads the name of a task and its attempt from its environment; KeyError if it is no task."""


def from_tf_config(environ: Mapping[str, str]) -> tuple[str, int]:
    """What tfdist's launcher told a task."""
    config = json.loads(environ["TF_CONFIG"])
    return "{type}-{index}".format(**config["task"]), config["tfdist"]["attempt"]


def tasks_of(launcher_pid: int, *, told: Told = from_tf_config) -> dict[str, Running]:
    """The tasks among the children of a launcher that run now, by name."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher_pid).children():
            with contextlib.suppress(psutil.Error, ValueError, KeyError):
                name, attempt = told(child.environ())
                if is_running(child.pid):
                    found[name] = Running(pid=child.pid, attempt=attempt)
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its end to be told."""
    with contextlib.suppress(psutil.Error):
        return _lives(psutil.Process(pid))
    return False


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Watched:
    """Processes that are waited for; each stays the one it was when its id is used again."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def add(self, pid: int) -> None:
        """Watches this process too."""
        if pid not in self._processes:
            with contextlib.suppress(psutil.Error):
                self._processes[pid] = psutil.Process(pid)

    def gone(self, *, within_s: float) -> bool:
        """Whether every one of them ends within so many seconds."""
        end_s = time.monotonic() + within_s
        while any(map(_lives, self._processes.values())):
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        """Kills those that are left."""
        for process in self._processes.values():
            with contextlib.suppress(psutil.Error):
                process.kill()


def send(pid: int, signum: int) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
