"""Tasks whose failure need not end the others: workers of a ps job, and the evaluator.

Each is started again alone, or the others go on without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping

from tfdist.cluster import Task
from tfdist.errors import EXIT_USAGE
from tfdist.launch.blame import Blame
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.progress import Progress
from tfdist.launch.records import Records
from tfdist.launch.report import Failure
from tfdist.launch.restarts import RestartPolicy, Verdict
from tfdist.launch.rundir import restart_log
from tfdist.launch.supervised import Processes, Screen, named

EVALUATOR = Task("evaluator", 0)


class Alone:
    """Deals with failures that need not end the attempt.

    `running` is kept up to date by the supervisor, whose `start` starts a task again. Before the
    first step the job needs `min_workers`, None for all; from then on it needs one.
    """

    def __init__(
        self,
        specs: Mapping[Task, ProcessSpec],
        *,
        is_ps: bool,
        min_workers: int | None,
        policy: RestartPolicy,
        blame: Blame,
        progress: Progress,
        running: Mapping[Task, None],
        processes: Processes,
        records: Records,
        screen: Screen,
        start: Callable[[ProcessSpec], None],
    ) -> None:
        self._specs = specs
        self._is_ps = is_ps
        self._min_workers = min_workers or sum(task.type == "worker" for task in specs)
        self._policy = policy
        self._blame = blame
        self._progress = progress
        self._running = running
        self._processes = processes
        self._records = records
        self._screen = screen
        self._start = start
        self._leaving: dict[Task, Failure] = {}  # to be dealt with once it has ended
        self.restarts: list[Failure] = []
        """Failures after which a task was started again alone."""
        self.lost: list[Failure] = []
        """Failures after which the others went on without the task."""

    @property
    def leaving(self) -> frozenset[Task]:
        """Returns the tasks that failed, and are being killed, while the others go on."""
        return frozenset(self._leaving)

    def verdict_on(self, failure: Failure) -> Verdict:
        """Returns whether the failed task alone, where that can be, or the job starts again."""
        return self._policy.verdict(failure, alone=self._is_alone(failure.task))

    def can_take(self, failure: Failure) -> bool:
        """Returns whether the others can go on: only an evaluator or workers of a ps job failed."""
        failed = {failure.task, *self._blame.tasks}
        if not all(map(self._is_alone, failed)):
            return False
        return self._may_start(failure) or self._is_dispensable(failure, failed=failed)

    def take(self, failure: Failure) -> bool:
        """Has the others go on, with the failed task or without; returns whether they can."""
        if not self.can_take(failure):
            return False
        self._blame.forget(failure.task)
        if failure.task in self._running:
            self._leaving[failure.task] = failure
            self._processes.kill_alone(failure.task)
        else:
            self._settle(failure)
        return True

    def first(self, failure: Failure) -> Failure:
        """Returns the first of the failures that have left a job without workers."""
        lost = [past for past in self.lost if self._is_worker(past.task)]
        is_last = self._is_worker(failure.task) and not self._others({failure.task})
        is_mistake = failure.exit_code == EXIT_USAGE
        return lost[0] if lost and is_last and not is_mistake else failure

    def has_left(self, task: Task) -> bool:
        """Deals with the end of a task; returns whether it was one that had failed alone."""
        failure = self._leaving.pop(task, None)
        if failure is None:
            return False
        self._blame.forget(task)
        self._settle(failure)
        return True

    def _may_start(self, failure: Failure) -> bool:
        """Whether the failed task can be started again alone: its host is still there."""
        return self.verdict_on(failure).restart and self._processes.can_start(failure.task)

    def lose(self, failure: Failure) -> None:
        """Goes on without the failed task."""
        task, verdict = failure.task, self.verdict_on(failure)
        lines = self._screen.last_lines(task)
        self.lost.append(dataclasses.replace(failure, last_lines=lines))
        others = "without it" if task == EVALUATOR else f"with {named(self._others({task}))}"
        reason = "" if verdict.restart else verdict.reason
        why = f" (not started again: {reason})" if reason else ""
        self._screen.say(f"{task} failed: {failure.cause}; going on {others}{why}")

    def _is_alone(self, task: Task) -> bool:
        return task == EVALUATOR or self._is_worker(task)

    def _is_worker(self, task: Task) -> bool:
        return self._is_ps and task.type == "worker"

    def _others(self, failed: Container[Task]) -> list[Task]:
        """Returns the workers that go on."""
        workers = filter(self._is_worker, self._running)
        return [task for task in workers if task not in failed and task not in self._leaving]

    def _is_dispensable(self, failure: Failure, *, failed: Container[Task]) -> bool:
        """Whether enough workers are left. A mistake in the program would be made by all."""
        has_begun = self._progress.step is not None
        if failure.exit_code == EXIT_USAGE:
            return False
        if failure.task == EVALUATOR:
            return has_begun
        return len(self._others(failed)) >= (1 if has_begun else self._min_workers)

    def _settle(self, failure: Failure) -> None:
        self._processes.kill_alone(failure.task)  # what it has left behind
        if self._may_start(failure):
            self._start_again(failure)
        else:
            self.lose(failure)

    def _start_again(self, failure: Failure) -> None:
        task = failure.task
        reason = self.verdict_on(failure).reason
        self._policy.restarted(failure)
        self.restarts.append(failure)
        spec = self._specs[task]
        log = restart_log(spec.log_path, self._records.restarted(task))
        self._screen.say(f"{task} failed: {failure.cause}; started again alone, {reason}: {log}")
        self._start(dataclasses.replace(spec, log_path=log))
