"""Process in its own session that does not outlive its parent; tasks started by exec."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tfdist.cluster import Task
from tfdist.launch.events import Ended, Started
from tfdist.launch.plan import ProcessSpec

_PR_SET_PDEATHSIG = 1
_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_libc = ctypes.CDLL(None, use_errno=True)


class Starter(Protocol):
    """A way of making a task's process."""

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> Started | None:
        """Start a task; None if `Started` will come from `collect`."""

    def withdraw(self, task: Task) -> bool:
        """Withdraw a start that has not been begun; return whether it could."""

    def give_up(self) -> None:
        """Have starts and end that nobody tells of come to an end: its helper does not answer."""

    def fileno(self) -> int | None:
        """Return what to watch for news besides SIGCHLD."""

    def collect(self) -> list[Started | Ended]:
        """Return which tasks have started or ended since the last call."""

    @property
    def sessions(self) -> frozenset[int]:
        """Return the sessions of its own, which live on from one attempt to the next."""

    @property
    def is_over(self) -> bool:
        """Return whether it can start no task any more."""

    def close(self) -> None:
        """End what the starter itself has running."""


class ExecStarter:
    """Starts each task as a new Python."""

    def __init__(self, *, clock: Callable[[], float], open_files: tuple[int, int]) -> None:
        self._clock = clock
        self._open_files = open_files
        self._children: dict[Task, subprocess.Popen[bytes]] = {}

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> Started:
        """Start a task and return its `Started`. Raises OSError if that fails."""
        child = spawn(
            task_command(spec, notes_fd=notes_fd),
            env=env,
            output_fd=output_fd,
            keep_fds=(notes_fd,),
            open_files=self._open_files,
        )
        self._children[spec.task] = child
        return Started(task=spec.task, pid=child.pid, at_s=self._clock())

    def withdraw(self, task: Task) -> bool:
        """Return False: a start here is done at once."""
        return False

    def give_up(self) -> None:
        """Do nothing: it has no helper."""

    def fileno(self) -> int | None:
        """Return None: SIGCHLD tells."""
        return None

    def collect(self) -> list[Started | Ended]:
        """Return the tasks that have ended since the last call."""
        now_s = self._clock()
        over = {t: child for t, child in self._children.items() if child.poll() is not None}
        for task in over:
            del self._children[task]
        return [Ended(task=t, status=child.returncode, at_s=now_s) for t, child in over.items()]

    @property
    def sessions(self) -> frozenset[int]:
        """Return none: no process but the tasks'."""
        return frozenset()

    @property
    def is_over(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing: no process but the tasks'."""


def task_command(spec: ProcessSpec, *, notes_fd: int) -> list[str]:
    """Return the command that runs a task's program, titled, with a line to the launcher."""
    kind = "module" if spec.program.is_module else "script"
    return [
        *(sys.executable, _BOOTSTRAP, "task", str(spec.task), spec.title, str(notes_fd), kind),
        *(spec.program.target, *spec.program.args),
    ]


def bootstrap_command(module: str, *args: str) -> list[str]:
    """Return the command that runs `main` of a module of the launcher in a new Python."""
    return [sys.executable, _BOOTSTRAP, module, *args]


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output_fd: int,
    keep_fds: Collection[int],
    open_files: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which the kernel kills when we end.

    `open_files` are the limits it gets, which the launcher may have raised for itself.
    """
    parent = os.getpid()

    def before_exec() -> None:  # between fork and exec; the launcher has one thread
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        die_with(parent)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=tuple(keep_fds),
        start_new_session=True,
        preexec_fn=before_exec,
    )


def die_with(parent: int) -> None:
    """Has the kernel kill this process when `parent`, which made it, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before it could be said
        os._exit(1)


def raise_file_limit(needed: int) -> tuple[int, int]:
    """Let this process open `needed` files if it may; return the limits from before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        most = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return soft, hard
