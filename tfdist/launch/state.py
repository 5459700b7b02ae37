"""State of one attempt of a job, and the restart policy.

The state is its tasks, what was seen of them, and what was decided. Only `decide` in
`supervisor.py` changes it; it holds no process, screen or clock.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Container, Iterable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

from tfdist.cluster import Task
from tfdist.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE
from tfdist.launch.diagnosis import Failure, RootCause, Watchdog
from tfdist.launch.events import exit_code_for, exit_code_of

_EXIT_KILLED = exit_code_of(-signal.SIGKILL)

# What differs between two runs of the same mistake: addresses in memory, ports, process ids, ages.
_ACCIDENTAL = re.compile(
    r"0x[0-9a-fA-F]+|(?<=:)\d{4,5}\b|(?<=pid )\d+|(?<=process )\d+|(?<=for )\d+(?= s\b)"
    r"|(?<=after )\d+(?= s\b)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartVerdict:
    """Whether to start again, and what to say about it; nothing where nobody asked for it."""

    restart: bool = False
    reason: str = ""


class RestartPolicy:
    """Restarts of a job, those of single tasks too, and the decision on the next one.

    A restart repeats what failed only if it got no further: a failure of the same kind of task,
    for the same cause and at the same step as the failure before it is not tried again. Where
    no step is known, both within `window_s` count as the same place: before the first step.
    SIGKILL of a task that is started again alone is never the same: the others may have got
    further at that step, as in an evaluation.
    """

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarted: list[Failure] = []

    def verdict(self, failure: Failure, *, alone: bool = False) -> RestartVerdict:
        """Return whether to start again after `failure`, the task `alone` or the whole job.

        Changes nothing. Of tasks that are started again alone each has its own last failure:
        several of them may well be killed at the same step.
        """
        if not self._max_restarts:
            return RestartVerdict()
        if failure.exit_code == EXIT_USAGE:
            return RestartVerdict(
                reason=f"exit code {EXIT_USAGE} is a mistake that would be made again"
            )
        if failure.exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return RestartVerdict(
                reason=f"exit code {failure.exit_code} is that of a task that was asked to stop"
            )
        if self._is_repeated(failure, alone=alone):
            place = "before the first step" if failure.step is None else f"at step {failure.step}"
            return RestartVerdict(reason=f"the same failure {place} twice in a row")
        used = sum(failure.at_s - past.at_s <= self._window_s for past in self._restarted)
        within = f"within {self._window_s:g} s"
        if used >= self._max_restarts:
            restarts = f"all {used} restarts" if used > 1 else "the one restart"
            return RestartVerdict(reason=f"{restarts} {within} used up")
        return RestartVerdict(
            restart=True, reason=f"restart {used + 1} of {self._max_restarts} {within}"
        )

    def restarted(self, failure: Failure) -> None:
        """Count a restart after `failure`."""
        self._restarted.append(failure)

    def _is_repeated(self, failure: Failure, *, alone: bool) -> bool:
        if alone and failure.exit_code == _EXIT_KILLED:
            return False
        comparable = [past for past in self._restarted if not alone or past.task == failure.task]
        if not comparable or _kind_of(comparable[-1]) != _kind_of(failure):
            return False
        before = comparable[-1]
        if failure.step is None and failure.at_s - before.at_s > self._window_s:
            return False
        return before.step == failure.step


def _kind_of(failure: Failure) -> tuple[str, str]:
    kind = failure.kind or f"{failure.exit_code}: {failure.cause}"
    return failure.task.type, _ACCIDENTAL.sub("#", kind)


EVALUATOR = Task("evaluator", 0)

RESTART_GRACE_S = 1.0
"""How long the others may take before a restart: without a peer they are blocked in TensorFlow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """How one task went. Times are those of the clock that the supervisor was given."""

    task: Task
    pid: int | None = None
    status: int | None = None
    """Exit code, or minus the signal that ended the task; None if it did not end."""
    started_at_s: float | None = None
    ended_at_s: float | None = None
    stopped: bool = False
    """Whether the launcher had asked it to end."""
    restart: int = 0
    """Which restart of this task alone its process was; 0: the one it began with."""


@dataclass(kw_only=True, slots=True)
class TaskState:
    """One task, and the record of each of its processes; the last is the present or next one."""

    records: list[TaskRecord]
    is_running: bool = False
    """Whether it has a process, or is about to get one."""
    failed_alone: Failure | None = None
    """What it is being ended for while the others go on."""

    def record(self, **changes: Any) -> None:
        """Change the record of its present process."""
        self.records[-1] = replace(self.records[-1], **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingHang:
    """A hang that was found, and whose stacks are being printed."""

    failure: Failure
    stuck: tuple[Task, ...]
    due_s: float
    """When they are taken as printed."""


@dataclass(kw_only=True, slots=True)
class JobState:
    """All that is known of an attempt. Moments are those of the supervisor's clock."""

    job_tasks: InitVar[Iterable[Task]]
    """None of which has been started; first the chief, whose end ends a ps job."""
    tasks: dict[Task, TaskState] = field(init=False)
    logs: Path
    """The directory of this attempt's logs."""
    is_ps: bool
    """Whether workers and ps serve the chief; a worker may then fail alone."""
    grace_s: float
    """How long a task may take to end before it is killed."""
    min_workers: int | None = None
    """How many workers a ps job needs before its first step; None: all of them."""
    policy: RestartPolicy
    """Of the job: it counts the restarts of earlier attempts too."""
    watchdog: Watchdog
    root_cause: RootCause = field(init=False)
    now_s: float
    """When the supervisor was last awake; at first, when the attempt began."""
    started_s: float = field(init=False)

    step: int | None = None
    """The last step that any task has reported; None before the training."""
    first_step_s: float | None = None
    """When the first step of this attempt was done."""
    hang: PendingHang | None = None
    restarts: list[Failure] = field(default_factory=list)
    """Failures after which a task was started again alone."""
    lost: list[Failure] = field(default_factory=list)
    """Failures after which the others went on without the task."""

    alone: list[Task] = field(default_factory=list)
    """Tasks that train with Keras and have joined no job."""

    is_done: bool = False
    """Whether the chief has ended with 0, or in any way while the job is ending."""
    are_servers_closed: bool = False
    """Whether those that served it were asked to end."""
    straggler_deadline_s: float = math.inf

    failure: Failure | None = None
    """The root cause of the attempt's failure."""
    verdict: RestartVerdict = field(default_factory=RestartVerdict)
    stop_signal: int | None = None
    """By which the launcher was asked to stop."""

    is_ending: bool = False
    """Whether the tasks were asked to end."""
    is_killed: bool = False
    deadline_s: float = math.inf
    """When the grace period ends; once killed, when a process that lives on is given up."""

    def __post_init__(self, job_tasks: Iterable[Task]) -> None:
        self.tasks = {task: TaskState(records=[TaskRecord(task=task)]) for task in job_tasks}
        self.root_cause = RootCause(patience_s=self.grace_s)
        self.started_s = self.now_s

    @property
    def chief(self) -> Task:
        """Return the task whose end ends a ps job."""
        return next(iter(self.tasks))

    @property
    def running(self) -> list[Task]:
        """Return the tasks that have not ended."""
        return [task for task, state in self.tasks.items() if state.is_running]

    @property
    def has_running(self) -> bool:
        """Return whether any task has not ended."""
        return any(state.is_running for state in self.tasks.values())

    def is_running(self, task: Task) -> bool:
        """Return whether a task has been started and has not ended."""
        known = self.tasks.get(task)
        return known is not None and known.is_running

    @property
    def is_over(self) -> bool:
        """Return whether all tasks have ended, or not even SIGKILL ends them."""
        is_given_up = self.is_killed and self.now_s >= self.deadline_s
        return is_given_up or not self.has_running

    @property
    def exit_code(self) -> int:
        """Return what the attempt ends with."""
        if self.stop_signal is not None:
            return exit_code_for(self.stop_signal)
        return self.failure.exit_code if self.failure else 0

    @property
    def records(self) -> list[TaskRecord]:
        """Return that of every process; one started again is followed by the next of its task."""
        return [record for task in self.tasks.values() for record in task.records]

    @property
    def restart(self) -> str:
        """Return why the whole job is to be started again; empty if it is not."""
        is_worth_it = self.verdict.restart and self.stop_signal is None and not self.has_running
        return self.verdict.reason if is_worth_it else ""

    @property
    def next_s(self) -> float:
        """Return when there is something to decide without another event."""
        if self.is_ending:
            return self.deadline_s
        if self.hang is not None:
            return self.hang.due_s
        checks_s = (self.root_cause.next_s(), self.watchdog.next_check_s())
        return min(self.straggler_deadline_s, *checks_s)

    def reached(self, step: int | None) -> None:
        """Record a step that a task has reached."""
        if step is not None:
            self.step = step if self.step is None else max(self.step, step)

    def is_expendable(self, task: Task) -> bool:
        """Return whether the others can go on without a task, or while it is started again."""
        return task == EVALUATOR or self.is_ps_worker(task)

    def is_ps_worker(self, task: Task) -> bool:
        """Return whether a task is a worker of a ps job."""
        return self.is_ps and task.type == "worker"

    def serves_nobody(self, task: Task) -> bool:
        """Return whether a task is a worker or ps whose chief has ended as it should."""
        return self.is_ps and self.is_done and task != EVALUATOR

    def other_workers(self, failed: Container[Task]) -> list[Task]:
        """Return the workers of a ps job that go on."""
        return [
            task
            for task in self.running
            if self.is_ps_worker(task)
            and task not in failed
            and self.tasks[task].failed_alone is None
        ]

    def has_enough_without(self, failure: Failure, *, failed: Container[Task]) -> bool:
        """Return whether enough workers are left.

        A mistake in the program would be made by all, and before the first step any error may be
        one.
        """
        if failure.exit_code == EXIT_USAGE:
            return False
        has_begun = self.step is not None
        if failure.task == EVALUATOR:
            return has_begun
        workers = sum(task.type == "worker" for task in self.tasks)
        needed = 1 if has_begun else self.min_workers or workers
        return len(self.other_workers(failed)) >= needed
