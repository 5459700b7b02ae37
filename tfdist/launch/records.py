"""What is known of each process of an attempt, for the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tfdist.cluster import Task
from tfdist.launch.events import Ended, Started
from tfdist.launch.report import TaskRecord


class Records:
    """The record of each process, task by task; the last one of a task is kept up to date."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._records = {task: [TaskRecord(task=task)] for task in tasks}

    def started(self, event: Started) -> None:
        """Takes down that a task has a process."""
        self._update(event.task, pid=event.pid, started_at_s=event.at_s)

    def ended(self, event: Ended) -> None:
        """Takes down that a task's process has ended."""
        self._update(event.task, status=event.status, ended_at_s=event.at_s)

    def stopped(self, task: Task) -> None:
        """Takes down that the launcher has asked a task to end."""
        self._update(task, stopped=True)

    def restarted(self, task: Task) -> int:
        """Begins the record of a task's next process; returns which restart of it this is."""
        restart = len(self._records[task])
        self._records[task].append(TaskRecord(task=task, restart=restart))
        return restart

    def started_at_s(self, task: Task) -> float | None:
        """Returns when a task's process was started."""
        return self._records[task][-1].started_at_s

    def all(self) -> tuple[TaskRecord, ...]:
        """Returns the records of all processes."""
        return tuple(record for records in self._records.values() for record in records)

    def _update(self, task: Task, **changes: Any) -> None:
        self._records[task][-1] = dataclasses.replace(self._records[task][-1], **changes)
