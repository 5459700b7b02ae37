"""Events of a running job that the supervisor acts on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.cluster import Task


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
class TaskPendingWork:
    """The oldest work unit that a task has dispatched and that is not done."""

    task: Task
    since_s: float
    is_first: bool
    """Whether it is this task's first, which takes longer."""


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
    awaited: TaskPendingWork | None = None
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


_TASK = re.compile(r"([a-z]{1,20})-([0-9]{1,9})")


def task_of(name: object) -> Task:
    """Return the task that `str` gives as ``worker-1``; raise ValueError if it is none."""
    match = _TASK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError("no task's name")
    return Task(match[1], int(match[2]))  # UsageError, which is a ValueError


def named(tasks: Iterable[Task], *, most: int = 8) -> str:
    """Return the tasks as a list for a person, the first ones only where there are many."""
    names = [str(task) for task in tasks]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def event_of(note: dict[str, Any], tasks: Mapping[str, Task]) -> Raised | Beat:
    """Return the event of a message of a task.

    Raises KeyError for a task that is not running or a note that lacks something, ValueError and
    TypeError for one that makes no sense.
    """
    task, at_s = tasks[note["task"]], note["at"]
    if beat := note.get("beat"):
        return Beat(
            task=task,
            phase=beat["phase"],
            step=beat["step"],
            since_s=beat["since"],
            first_step_s=beat["first_step"],
            at_s=at_s,
            awaited=_awaited(beat["awaited"]),
            rest_s=beat["rest"],
        )
    return Raised(
        task=task,
        exit_code=note["exit_code"],
        cause=note["cause"],
        at_s=at_s,
        step=note.get("step"),
    )


def _awaited(message: dict[str, Any] | None) -> TaskPendingWork | None:
    if message is None:
        return None
    # It may be on another host.
    return TaskPendingWork(
        task=task_of(message["task"]), since_s=message["since"], is_first=message["first"]
    )
