"""Which task holds up a job that stands still, and how that is said."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfdist.cluster import Task
from tfdist.launch.events import Awaited

WAITING = ("save", "validate", "step", "sum", "rendezvous", "barrier")
"""Phases in which a task may wait for others; the first ones, sooner for a disk or its data."""

_DOING = {
    "barrier": "waiting for its peers",
    "callback": "in a callback",
    "done": "done with its training",
    "import": "not in its training yet",
    "rendezvous": "waiting for its peers to start",
    "save": "saving",
    "serve": "serving the chief",
    "step": "in a step",
    "sum": "at a sum with its peers",
    "trace": "tracing",
    "validate": "validating",
}
_SLEEPS = {
    "R": "its process runs",
    "S": "its process sleeps",
    "D": "its process waits for a disk",
    "Z": "its process has ended, and its parent does not say so",
}
_MAX_NAMES = 4


@dataclass(kw_only=True, slots=True)
class Watched:
    """A running task as of its last beat; times are of the monotonic clock.

    Attributes:
      heard_s: when it last spoke; until it has, when it was started.
      state: the state letter of its process; None when that is gone.
      awaited: the oldest piece of work that it has given to another.
      rest_s: since when its threads wait for each other; None while it can go on.
      started_s: when its present process was started.
    """

    task: Task
    heard_s: float
    since_s: float
    phase: str = "import"
    step: int | None = None
    has_spoken: bool = False
    state: str | None = "R"
    awaited: Awaited | None = None
    rest_s: float | None = None
    started_s: float = -math.inf

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped, by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def steps(self) -> int:
        """Returns how many steps it has done, -1 before its training."""
        return -1 if self.step is None else self.step

    @property
    def doing(self) -> str:
        """Returns what it does, in words."""
        doing = _DOING.get(self.phase, f"in {self.phase}")
        return doing if self.step is None else f"{doing} after {self.step} steps"


def find(
    *,
    silent: Sequence[Watched],
    owing: Sequence[tuple[Watched, float]],
    resting: Sequence[Watched],
    busy: Sequence[Watched],
    waiting: Sequence[Watched],
    chief: Task,
    now_s: float,
) -> tuple[Watched, str] | None:
    """Returns whom to blame and why, None if there is nobody.

    First a silent task: a stopped one before others. Then one that owes work, given with the
    moment since when. Then one that can never go on. Then one that is busy while others wait for
    it. Then, of those that wait, the one with the fewest steps. Where all are alike, the chief.
    """
    if silent:
        blamed = min(silent, key=lambda task: (not task.is_stopped, task.heard_s))
        return blamed, silence(blamed, now_s) + _waits(waiting, but=blamed)
    if owing:
        blamed, since_s = min(owing, key=lambda owed: owed[1])
        return blamed, f"its piece of work is not done after {now_s - since_s:.0f} s"
    if resting:
        blamed = min(resting, key=lambda task: (task.steps, task.task != chief, task.task))
        for_ = f"for {now_s - (blamed.rest_s or now_s):.0f} s"
        cause = f"{blamed.doing}, and all its threads wait for each other {for_}"
        return blamed, cause + _waits(waiting, but=blamed)
    if busy:
        blamed = min(busy, key=lambda task: (task.steps, task.since_s))
        return blamed, f"{blamed.doing} for {_age(blamed, now_s)}" + _waits(waiting, but=blamed)
    if waiting:
        return _last_of(waiting, chief=chief, now_s=now_s)
    return None


def silence(task: Watched, now_s: float) -> str:
    """Returns how a task that says nothing looks from outside."""
    for_ = f"for {now_s - task.heard_s:.0f} s"
    last = f", last heard {task.doing}" if task.phase != "import" else ""
    if task.state == "t":
        return f"its process is held by a debugger, and silent {for_}{last}"
    if task.is_stopped:
        return f"its process is stopped (SIGSTOP), and silent {for_}{last}"
    sleeps = _SLEEPS.get(task.state or "", "it has no process")
    if not task.has_spoken:
        return f"has not started: silent {for_} ({sleeps})"
    return f"does not answer: silent {for_} ({sleeps}){last}"


def _last_of(waiting: Sequence[Watched], *, chief: Task, now_s: float) -> tuple[Watched, str]:
    def place(task: Watched) -> tuple[int, int]:
        return task.steps, WAITING.index(task.phase)

    first, last = max(waiting, key=place), min(waiting, key=place)
    if place(first) != place(last):
        return last, f"{last.doing} for {_age(last, now_s)}, while {first.task} is {first.doing}"
    named = next((task for task in waiting if task.task == chief), last)
    if len(waiting) == 1:
        return named, f"{named.doing} for {_age(named, now_s)}"
    age = min(now_s - task.since_s for task in waiting)
    return named, f"all {len(waiting)} tasks are {named.doing} for {age:.0f} s, none of them behind"


def _age(task: Watched, now_s: float) -> str:
    return f"{now_s - task.since_s:.0f} s"


def _waits(waiting: Iterable[Watched], *, but: Watched) -> str:
    names = [str(task.task) for task in waiting if task is not but]
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"; {', '.join(names[:_MAX_NAMES])}{more} wait{'s' * (len(names) == 1)} for it"
