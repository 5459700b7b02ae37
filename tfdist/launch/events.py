"""Events of a running job, the actions that the supervisor decides on, and signals as events."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

from tfdist.cluster import Task
from tfdist.phases import PendingWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The attempt begins: a task is to be started."""

    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A task has a process."""

    task: Task
    pid: int
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """A task's program has failed; its process will end, which may take it a while."""

    task: Task
    exit_code: int
    cause: str
    at_s: float
    step: int | None = None
    """Steps done, where known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A sign of life: what a task is doing, by its own word. Moments are those of one clock."""

    task: Task
    phase: str
    step: int | None
    """Optimizer steps done; None before the training loop."""
    since_s: float
    """When it entered the phase or last did a step."""
    first_step_s: float | None
    """When this process had done its first steps."""
    at_s: float
    awaited: PendingWork | None = None
    rest_s: float | None = None
    """Since when each of its threads waits for another of them; None where one does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A task's process has ended, and its output has been read.

    `status` is its exit code, or minus the signal that ended it.
    """

    task: Task
    status: int
    at_s: float
    cause: str = ""
    """Why, where the launcher knows better than the status says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequest:
    """A stop request to the launcher, by a signal or by closing its output (SIGPIPE)."""

    signum: int


Event = Started | Raised | Beat | Ended | StopRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Awakening:
    """What has happened since the supervisor was last awake; a history is a list of these."""

    at_s: float
    events: tuple[Event | Begin, ...] = ()
    unreachable: frozenset[Task] = frozenset()
    """Tasks that cannot be started now: their host is gone."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a task; its `Started` comes as an event. Where it cannot be started, its `Ended`."""

    task: Task
    restart: int = 0
    """How often it was started again alone before, in this attempt."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to a task's whole process group: the job is about to end."""

    task: Task
    signum: int


@dataclass(frozen=True, slots=True)
class KillOne:
    """End one task, and what it has left behind, while the job goes on."""

    task: Task


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Have a task print its Python stacks; it goes on."""

    task: Task


@dataclass(frozen=True, slots=True)
class ShowFailure:
    """Show what failed first and its last lines; from now on nothing of other tasks."""

    task: Task
    cause: str
    stacks: tuple[Task, ...] = ()
    """Tasks that have just printed their stacks: their last lines are kept for the report."""


@dataclass(frozen=True, slots=True)
class Say:
    """Show lines of the launcher's own."""

    text: str


TaskAction = Start | Signal | KillOne | AskForStacks | ShowFailure
Action = TaskAction | Say


_TASK = re.compile(r"([a-z]{1,20})-([0-9]{1,9})")


def task_of(name: object) -> Task:
    """Return the task that `str` gives as ``worker-1``; raise ValueError if it is none."""
    match = _TASK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError("no task's name")
    return Task(match[1], int(match[2]))  # UsageError, which is a ValueError


def named(things: Iterable[object], *, most: int = 8) -> str:
    """Return tasks, say, as a list for a person, the first ones only where there are many."""
    names = [str(thing) for thing in things]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a job to stop; SIGUSR1 is what schedulers such as Slurm announce the end with."""

SAME_REQUEST_S = 0.1
"""What sends one request to a process and to its group, as `timeout` does, or a wrapper that hands
Ctrl-C on, delivers it twice: within so long it is one."""


def exit_code_for(signum: int) -> int:
    """Return what a job ends with that was asked to stop: 128 + n, and for SIGUSR1 as SIGTERM."""
    return 128 + (signal.SIGTERM if signum == signal.SIGUSR1 else signum)


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


STOP_CODES = {exit_code_for(signum) for signum in (*STOP_SIGNALS, signal.SIGPIPE)}


class SignalPipe:
    """Delivers SIGCHLD and requests to stop through a descriptor, while it is entered.

    A signal that the launcher was started to ignore, as nohup does, stays ignored. One that whoever
    started it had blocked, as a thread without signals does, is let through.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested_s = -math.inf
        self._old_fd = -1
        self._old: dict[signal.Signals, object] = {}
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> SignalPipe:
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *STOP_SIGNALS):
            if signum != signal.SIGCHLD and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            self._old[signum] = signal.signal(signum, _catch)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._old)
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # as it was returned
        signal.set_wakeup_fd(self._old_fd)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """Return the signals that have come since the last call, each request to stop once."""
        try:
            came = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signum for signum in came if signum not in STOP_SIGNALS or self._is_new()]

    def stop_requests(self) -> list[int]:
        """Return the requests to stop alone; what else has come is forgotten."""
        return [signum for signum in self.read() if signum in STOP_SIGNALS]

    def _is_new(self) -> bool:
        """Return whether a request to stop that comes now is another than the last one."""
        now_s = self._clock()
        if now_s - self._requested_s < SAME_REQUEST_S:
            return False
        self._requested_s = now_s
        return True


def _catch(signum: int, frame: FrameType | None) -> None:
    """Catch a signal, so that its number comes through the pipe."""
