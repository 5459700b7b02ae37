"""What a task of this machine tells the launcher by a line of JSON, as an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.cluster import Task
from tfdist.launch.events import Awaited, Beat, Raised
from tfdist.launch.messages import task_of


def event_of(note: dict[str, Any], tasks: Mapping[str, Task]) -> Raised | Beat:
    """Returns what a task has told.

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


def _awaited(told: dict[str, Any] | None) -> Awaited | None:
    if told is None:
        return None
    # It may be on another host.
    return Awaited(task=task_of(told["task"]), since_s=told["since"], is_first=told["first"])
