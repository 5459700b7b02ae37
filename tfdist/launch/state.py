"""State of one attempt of a job, and the restart policy.

The state holds the attempt's tasks, their events and the supervisor's decisions. Only `decide` in
`supervisor.py` changes the state. The state holds no process, screen or clock.
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
from tfdist.launch.membership import Membership

_EXIT_KILLED = exit_code_of(-signal.SIGKILL)

# Parts of a message that differ between repeats of one error: addresses, ports, process ids, ages.
_ACCIDENTAL = re.compile(
    r"0x[0-9a-fA-F]+|(?<=:)\d{4,5}\b|(?<=pid )\d+|(?<=process )\d+|(?<=for )\d+(?= s\b)"
    r"|(?<=after )\d+(?= s\b)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartVerdict:
    """Decision on a restart, and its reason ("" if the job has no restarts configured)."""

    restart: bool = False
    reason: str = ""


class RestartPolicy:
    """Restarts of a job and of its single tasks, and the decision on the next restart.

    The policy refuses a restart if the last two failures are the same. Two failures are the same
    if task type, cause and step are equal. If no step is known, two failures within `window_s`
    count as failures at the same step. If only one task restarts, a SIGKILL never counts as the
    same failure, because the job may have made progress.
    """

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarted: list[Failure] = []

    def verdict(self, failure: Failure, *, alone: bool = False) -> RestartVerdict:
        """Return whether to restart the job (or with `alone`, only the task) after `failure`.

        The policy does not change. With `alone`, a failure is compared only with earlier failures
        of the same task, because several tasks may be killed at the same step.
        """
        if not self._max_restarts:
            return RestartVerdict()
        if failure.exit_code == EXIT_USAGE:
            return RestartVerdict(
                reason=f"exit code {EXIT_USAGE} is a mistake, which a restart would repeat"
            )
        if failure.exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return RestartVerdict(
                reason=f"exit code {failure.exit_code} means that a signal stopped the task"
            )
        if self._is_repeated(failure, alone=alone):
            place = "before the first step" if failure.step is None else f"at step {failure.step}"
            return RestartVerdict(reason=f"the same failure {place} twice in a row")
        used = sum(failure.at_s - past.at_s <= self._window_s for past in self._restarted)
        within = f"within {self._window_s:g} s"
        if used >= self._max_restarts:
            restarts = f"all {used} restarts" if used > 1 else "the only restart"
            return RestartVerdict(reason=f"used {restarts} {within}")
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
"""Grace period before a restart, in seconds. Tasks that lost a peer are blocked in TensorFlow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """Start and end of one process of a task. Times are from the supervisor's clock."""

    task: Task
    pid: int | None = None
    status: int | None = None
    """Exit code, or the negative signal number, or `None` if the process did not exit."""
    started_at_s: float | None = None
    ended_at_s: float | None = None
    stopped: bool = False
    """Whether the launcher sent the process a signal to stop."""
    restart: int = 0
    """Number of the task's restart that started this process (0: first start)."""


@dataclass(kw_only=True, slots=True)
class TaskState:
    """State of one task, with a record per process. The last record is the current process."""

    records: list[TaskRecord]
    is_running: bool = False
    """Whether the task has a process or its process is being started."""
    failed_alone: Failure | None = None
    """Failure for which the launcher kills only this task, or `None`."""
    was_member: bool = False
    """Whether the process has been a member of an elastic job."""
    leaves_by_s: float = math.inf
    """End of the grace period if the job gets fewer workers and the process has to exit."""
    is_replaceable: bool = False
    """Whether another member can take over if this process is the chief of an elastic job."""

    @property
    def is_leaving(self) -> bool:
        """Return whether the launcher told the process to exit, and the job continues."""
        return self.leaves_by_s < math.inf

    def record(self, **changes: Any) -> None:
        """Update the record of the current process."""
        self.records[-1] = replace(self.records[-1], **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewRecord:
    """Members of an elastic job, and the last known step when they began to work together."""

    members: tuple[Task, ...]
    step: int | None
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingHang:
    """Detected hang, while the stuck tasks print their stacks."""

    failure: Failure
    stuck: tuple[Task, ...]
    due_s: float
    """Time at which the supervisor stops waiting for the stacks."""


@dataclass(kw_only=True, slots=True)
class JobState:
    """State of an attempt. Times are from the supervisor's clock."""

    job_tasks: InitVar[Iterable[Task]]
    """Tasks of the job, not started yet, with the chief first."""
    tasks: dict[Task, TaskState] = field(init=False)
    logs: Path
    """Directory of this attempt's logs."""
    has_servers: bool
    """Whether this is a ps job: workers and ps serve the chief, and one worker can restart."""
    grace_s: float
    """Seconds a task has to exit before it is killed."""
    min_workers: int | None = None
    """Number of workers that a ps job needs before its first step (if `None`, all), and that an
    elastic job needs always (if `None`, 1)."""
    membership: Membership | None = None
    """Members of an elastic job, by the index of their tasks."""
    policy: RestartPolicy
    """Restart policy of the job, which also counts the restarts of earlier attempts."""
    watchdog: Watchdog
    root_cause: RootCause = field(init=False)
    now_s: float
    """Time of the supervisor's last decision, initially the start of the attempt."""
    started_s: float = field(init=False)

    step: int | None = None
    """Highest step that any task has reported (`None` if no task trains yet)."""
    first_step_s: float | None = None
    """Time at which the first step of this attempt finished."""
    hang: PendingHang | None = None
    restarts: list[Failure] = field(default_factory=list)
    """Failures after which only the failed task was restarted."""
    lost: list[Failure] = field(default_factory=list)
    """Failures after which the job continued without the failed task."""
    num_workers: int | None = None
    """Number of workers that the user has requested for an elastic job since its start."""
    views: list[ViewRecord] = field(default_factory=list)
    """Views of an elastic job."""

    done: Task | None = None
    """Chief that exited with code 0 (with any code if the job is stopping)."""
    are_servers_closed: bool = False
    """Whether the launcher told the workers and ps to exit after the chief exited."""
    straggler_deadline_s: float = math.inf

    failure: Failure | None = None
    """Root cause of the attempt's failure."""
    verdict: RestartVerdict = field(default_factory=RestartVerdict)
    stop_signal: int | None = None
    """Signal that told the launcher to stop."""

    is_ending: bool = False
    """Whether the launcher told the tasks to exit."""
    is_killed: bool = False
    deadline_s: float = math.inf
    """End of the grace period. After SIGKILL: end of the wait for processes to exit."""

    def __post_init__(self, job_tasks: Iterable[Task]) -> None:
        self.tasks = {task: TaskState(records=[TaskRecord(task=task)]) for task in job_tasks}
        self.root_cause = RootCause(patience_s=self.grace_s)
        self.started_s = self.now_s

    @property
    def chief(self) -> Task:
        """Return the first task. A ps job ends when this task exits.

        In an elastic job, the first member is the chief.
        """
        if self.membership is not None and self.membership.members:
            return Task("worker", self.membership.members[0])
        return next(iter(self.tasks))

    @property
    def is_done(self) -> bool:
        """Return whether the chief has finished."""
        return self.done is not None

    @property
    def running(self) -> list[Task]:
        """Return the tasks that were started and have not exited."""
        return [task for task, state in self.tasks.items() if state.is_running]

    def is_running(self, task: Task) -> bool:
        """Return whether a task was started and has not exited."""
        known = self.tasks.get(task)
        return known is not None and known.is_running

    @property
    def is_over(self) -> bool:
        """Return whether all tasks have exited, or some did not exit after SIGKILL."""
        is_given_up = self.is_killed and self.now_s >= self.deadline_s
        return is_given_up or not self.running

    @property
    def exit_code(self) -> int:
        """Return the exit code of the attempt."""
        if self.stop_signal is not None:
            return exit_code_for(self.stop_signal)
        return self.failure.exit_code if self.failure else 0

    @property
    def records(self) -> list[TaskRecord]:
        """Return the records of all processes, grouped by task in order of start."""
        return [record for task in self.tasks.values() for record in task.records]

    @property
    def restart(self) -> str:
        """Return the reason to restart the whole job, or "" if it must not restart."""
        is_worth_it = self.verdict.restart and self.stop_signal is None and not self.running
        return self.verdict.reason if is_worth_it else ""

    @property
    def next_s(self) -> float:
        """Return the time of the next decision if no event happens before."""
        if self.is_ending:
            return self.deadline_s
        if self.hang is not None:
            return self.hang.due_s
        checks_s = (self.root_cause.next_s(), self.watchdog.next_check_s())
        leave_s = (task.leaves_by_s for task in self.tasks.values() if task.is_running)
        return min(self.straggler_deadline_s, *checks_s, *leave_s)

    def reached(self, step: int | None) -> None:
        """Record a step that a task has finished."""
        if step is not None:
            self.step = step if self.step is None else max(self.step, step)

    def is_expendable(self, task: Task) -> bool:
        """Return whether the job can continue while a task is missing or restarts."""
        return task == EVALUATOR or self.works_for_chief(task) or self.is_member(task)

    def works_for_chief(self, task: Task) -> bool:
        """Return whether a task is a worker that runs the steps a chief sends."""
        return self.has_servers and task.type == "worker"

    def is_member(self, task: Task) -> bool:
        """Return whether a task is an elastic worker that the job can lose."""
        if self.membership is None or task.type != "worker":
            return False
        is_replaceable = task != self.chief or self.tasks[task].is_replaceable
        return is_replaceable and self.membership.epoch > 0 and not self.is_done

    def serves_nobody(self, task: Task) -> bool:
        """Return whether a task is a worker or ps, and the chief has already finished."""
        if self.waits_to_join(task):
            return self.is_done
        return self.has_servers and self.is_done and task != EVALUATOR

    def waits_to_join(self, task: Task) -> bool:
        """Return whether a task of an elastic job runs and is no member yet, or no longer."""
        membership = self.membership
        if membership is None or not membership.epoch or task.type != "worker":
            return False
        return self.tasks[task].is_leaving or not self.tasks[task].was_member

    def other_workers(self, failed: Container[Task]) -> list[Task]:
        """Return the ps workers, or members of an elastic job, that run and have not failed."""
        members = self.membership.members if self.membership else ()
        return [
            task
            for task in self.running
            if (self.works_for_chief(task) or (task.type == "worker" and task.index in members))
            and task not in failed
            and self.tasks[task].failed_alone is None
        ]

    def has_enough_without(self, failure: Failure, *, failed: Container[Task]) -> bool:
        """Return whether the job can continue without the failed tasks (not after a usage error).

        Before the first step, any error may be a mistake in the program. The job then needs its
        evaluator and `min_workers` workers (default: all).
        """
        if failure.exit_code == EXIT_USAGE and not self.waits_to_join(failure.task):
            return False
        has_begun = self.step is not None
        if failure.task == EVALUATOR:
            return has_begun
        if self.membership is not None:
            return len(self.other_workers(failed)) >= (self.min_workers or 1)
        workers = sum(task.type == "worker" for task in self.tasks)
        needed = 1 if has_begun else self.min_workers or workers
        return len(self.other_workers(failed)) >= needed
