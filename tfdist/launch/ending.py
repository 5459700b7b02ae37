"""Telling the tasks of a job to end, and seeing to it that they do."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Container, Mapping

from tfdist.cluster import Task
from tfdist.launch.records import Records
from tfdist.launch.supervised import Processes

_GIVE_UP_S = 10.0  # after SIGKILL, for a process that not even that ends


class Ending:
    """Signals the tasks in `running`, which the supervisor keeps up to date."""

    def __init__(
        self,
        running: Mapping[Task, None],
        *,
        processes: Processes,
        records: Records,
        clock: Callable[[], float],
    ) -> None:
        self._running = running
        self._processes = processes
        self._records = records
        self._clock = clock
        self._killed = False
        self.has_begun = False
        self.deadline_s = math.inf
        """When the patience with the tasks ends."""

    @property
    def is_overdue(self) -> bool:
        """Returns whether tasks that were told to end in time have not."""
        is_late = self.has_begun and self._clock() >= self.deadline_s
        return is_late and bool(self._running) and not self._killed

    @property
    def has_failed(self) -> bool:
        """Returns whether not even SIGKILL ends what is still running."""
        return self._killed and self._clock() >= self.deadline_s and bool(self._running)

    def stop(self, signum: int, *, within_s: float, but: Container[Task] = ()) -> None:
        """Tells all tasks to end by themselves, except those that are ending already."""
        self.has_begun = True
        self.deadline_s = min(self.deadline_s, self._clock() + within_s)
        self._signal(signum, but=but)

    def kill(self) -> None:
        """Ends all tasks at once."""
        if self._killed:
            return
        self._killed = True
        self.deadline_s = self._clock() + _GIVE_UP_S
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int, *, but: Container[Task] = ()) -> None:
        for task in self._running:
            if task not in but:
                self._records.stopped(task)
                self._processes.signal(task, signum)
