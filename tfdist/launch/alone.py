"""Workers of a ps job that fail alone: the others go on while each is started again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tfdist.cluster import Task
from tfdist.launch.blame import Blame
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.records import Records
from tfdist.launch.report import Failure
from tfdist.launch.restarts import RestartPolicy, Verdict
from tfdist.launch.rundir import restart_log
from tfdist.launch.supervised import Processes, Screen


class Alone:
    """Deals with failures that need not end the attempt.

    `running` is kept up to date by the supervisor, whose `start` starts a task again.
    """

    def __init__(
        self,
        specs: Mapping[Task, ProcessSpec],
        *,
        is_ps: bool,
        policy: RestartPolicy,
        blame: Blame,
        running: Mapping[Task, None],
        processes: Processes,
        records: Records,
        screen: Screen,
        start: Callable[[ProcessSpec], None],
    ) -> None:
        self._specs = specs
        self._is_ps = is_ps
        self._policy = policy
        self._blame = blame
        self._running = running
        self._processes = processes
        self._records = records
        self._screen = screen
        self._start = start
        self._leaving: dict[Task, Failure] = {}  # to be dealt with once it has ended
        self.restarts: list[Failure] = []
        """Failures after which a task was started again alone."""

    @property
    def leaving(self) -> frozenset[Task]:
        """Returns the tasks that failed, and are being killed, while the others go on."""
        return frozenset(self._leaving)

    def verdict_on(self, failure: Failure) -> Verdict:
        """Returns whether the failed task alone, where that can be, or the job starts again."""
        return self._policy.verdict(failure, alone=self._is_worker(failure.task))

    def can_take(self, failure: Failure) -> bool:
        """Returns whether the others can go on: in a ps job of which only workers failed."""
        failed = (failure.task, *self._blame.tasks)
        return all(map(self._is_worker, failed)) and self.verdict_on(failure).restart

    def take(self, failure: Failure) -> bool:
        """Has the failed task started again alone if that can be; returns whether it can."""
        if not self.can_take(failure):
            return False
        self._blame.forget(failure.task)
        if failure.task in self._running:
            self._leaving[failure.task] = failure
            self._processes.kill_alone(failure.task)
        else:
            self._start_again(failure)
        return True

    def has_left(self, task: Task) -> bool:
        """Deals with the end of a task; returns whether it was one that had failed alone."""
        failure = self._leaving.pop(task, None)
        if failure is None:
            return False
        self._blame.forget(task)
        self._start_again(failure)
        return True

    def _is_worker(self, task: Task) -> bool:
        return self._is_ps and task.type == "worker"

    def _start_again(self, failure: Failure) -> None:
        task = failure.task
        reason = self.verdict_on(failure).reason
        self._policy.restarted(failure)
        self.restarts.append(failure)
        self._processes.kill_alone(task)  # what it has left behind
        spec = self._specs[task]
        log = restart_log(spec.log_path, self._records.restarted(task))
        self._screen.say(f"{task} failed: {failure.cause}; started again alone, {reason}: {log}")
        self._start(dataclasses.replace(spec, log_path=log))
