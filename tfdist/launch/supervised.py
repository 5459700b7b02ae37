"""What a supervisor works with: the processes of a job, and what a person sees of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tfdist.cluster import Task
from tfdist.launch.events import Event
from tfdist.launch.plan import ProcessSpec

_MAX_NAMES = 8


class Processes(Protocol):
    """The processes of a job, as far as the supervisor deals with them."""

    def start(self, spec: ProcessSpec) -> None:
        """Starts a task; its `Started` comes as an event. Raises OSError if it cannot."""

    def signal(self, task: Task, signum: int) -> None:
        """Sends a signal to a task's whole process group: the job is about to end."""

    def ask_for_stacks(self, task: Task) -> None:
        """Has a task print its Python stacks; it goes on."""

    def kill_alone(self, task: Task) -> None:
        """Ends one task, and what it has left behind, while the job goes on."""

    def can_start(self, task: Task) -> bool:
        """Returns whether a task can be started now: its host is there."""

    def wait(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened, after `timeout_s` at the latest."""


class Screen(Protocol):
    """What a person sees of the job."""

    def say(self, text: str) -> None:
        """Shows lines of the launcher's own."""

    def show_failure(self, task: Task, cause: str) -> None:
        """Shows what failed first and its last lines; from now on nothing of other tasks."""

    def last_lines(self, task: Task) -> tuple[str, ...]:
        """Returns the last lines of a task's output."""


def named(tasks: Iterable[Task]) -> str:
    """Returns the tasks as a list for a person, the first ones only where there are many."""
    names = [str(task) for task in tasks]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
