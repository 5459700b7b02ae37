"""Supervisor of one attempt: its end, its root cause, and the shutdown of its tasks.

It acts on events alone. The processes, the screen and the clock are parameters, so that
its tests replay histories without any process.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfdist.cluster import Task
from tfdist.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE
from tfdist.launch.diagnosis import Progress, RootCause, Watcher
from tfdist.launch.events import Beat, Ended, Event, Raised, Started, StopRequest
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.report import AttemptReport, Failure, TaskRecord, signal_name
from tfdist.launch.rundir import restart_log
from tfdist.launch.signals import exit_code_for

EVALUATOR = Task("evaluator", 0)

SERVER_GRACE_S = 3.0
"""How long workers and ps may take to end once the chief has: they hold nothing to save."""

RESTART_GRACE_S = 1.0
"""How long the others may take before a restart: without a peer they wait, deaf, in TensorFlow."""

STRAGGLER_GRACES = 6
"""How many times the grace the other workers may go on after the chief of theirs is done."""

STACKS_S = 0.5
"""How long the stacks of a task that hangs may take to come into its log."""

_GIVE_UP_S = 10.0  # after SIGKILL, for a process that not even that ends
_MAX_NAMES = 8

# What differs between two runs of the same mistake: addresses in memory, ports, process ids, ages.
_ACCIDENTAL = re.compile(
    r"0x[0-9a-fA-F]+|(?<=:)\d{4,5}\b|(?<=pid )\d+|(?<=process )\d+|(?<=for )\d+(?= s\b)"
    r"|(?<=after )\d+(?= s\b)"
)


class Processes(Protocol):
    """The processes of a job, as far as the supervisor deals with them."""

    def start(self, spec: ProcessSpec) -> None:
        """Start a task; its `Started` comes as an event. Raises OSError if it cannot."""

    def signal(self, task: Task, signum: int) -> None:
        """Send a signal to a task's whole process group: the job is about to end."""

    def ask_for_stacks(self, task: Task) -> None:
        """Have a task print its Python stacks; it goes on."""

    def kill_one(self, task: Task) -> None:
        """End one task, and what it has left behind, while the job goes on."""

    def can_start(self, task: Task) -> bool:
        """Return whether a task can be started now: its host is there."""

    def wait(self, timeout_s: float | None) -> Sequence[Event]:
        """Return what has happened, after `timeout_s` at the latest."""


class Screen(Protocol):
    """What a person sees of the job."""

    def say(self, text: str) -> None:
        """Show lines of the launcher's own."""

    def show_failure(self, task: Task, cause: str) -> None:
        """Show what failed first and its last lines; from now on nothing of other tasks."""

    def last_lines(self, task: Task) -> tuple[str, ...]:
        """Return the last lines of a task's output."""


def named(tasks: Iterable[Task]) -> str:
    """Return the tasks as a list for a person, the first ones only where there are many."""
    names = [str(task) for task in tasks]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """Whether to start again, and what to say about it; nothing where nobody asked for it."""

    restart: bool = False
    reason: str = ""


class RestartPolicy:
    """Counts the restarts of a job, those of single tasks too, and decides on the next one.

    A restart repeats what failed only if it got no further: a failure of the same kind of task,
    for the same cause and at the same step as the failure before it is not tried again. Where
    no step is known, both within `window_s` count as the same place: before the first step.
    """

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarted: list[Failure] = []

    def verdict(self, failure: Failure, *, alone: bool = False) -> RestartDecision:
        """Return whether to start again after `failure`, the task `alone` or the whole job.

        Changes nothing. Of tasks that are started again alone each has its own last failure:
        several of them may well be killed at the same step.
        """
        if not self._max_restarts:
            return RestartDecision()
        if failure.exit_code == EXIT_USAGE:
            return RestartDecision(
                reason=f"exit code {EXIT_USAGE} is a mistake that would be made again"
            )
        if failure.exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return RestartDecision(
                reason=f"exit code {failure.exit_code} is that of a task told to stop"
            )
        if self._is_repeated(failure, alone=alone):
            return RestartDecision(reason=f"the same failure {_place(failure)} twice in a row")
        used = sum(failure.at_s - past.at_s <= self._window_s for past in self._restarted)
        within = f"within {self._window_s:g} s"
        if used >= self._max_restarts:
            restarts = f"all {used} restarts" if used > 1 else "the one restart"
            return RestartDecision(reason=f"{restarts} {within} used up")
        return RestartDecision(
            restart=True, reason=f"restart {used + 1} of {self._max_restarts} {within}"
        )

    def restarted(self, failure: Failure) -> None:
        """Count a restart after `failure`."""
        self._restarted.append(failure)

    def _is_repeated(self, failure: Failure, *, alone: bool) -> bool:
        comparable = [past for past in self._restarted if not alone or past.task == failure.task]
        if not comparable or _kind(comparable[-1]) != _kind(failure):
            return False
        before = comparable[-1]
        if failure.step is None and failure.at_s - before.at_s > self._window_s:
            return False
        return before.step == failure.step


def _kind(failure: Failure) -> tuple[str, str]:
    kind = failure.kind or f"{failure.exit_code}: {failure.cause}"
    return failure.task.type, _ACCIDENTAL.sub("#", kind)


def _place(failure: Failure) -> str:
    return "before the first step" if failure.step is None else f"at step {failure.step}"


class Records:
    """The record of each process, task by task; the last one of a task is kept up to date."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._records = {task: [TaskRecord(task=task)] for task in tasks}

    def started(self, event: Started) -> None:
        """Record that a task has a process."""
        self._update(event.task, pid=event.pid, started_at_s=event.at_s)

    def ended(self, event: Ended) -> None:
        """Record that a task's process has ended."""
        self._update(event.task, status=event.status, ended_at_s=event.at_s)

    def stopped(self, task: Task) -> None:
        """Record that the launcher has asked a task to end."""
        self._update(task, stopped=True)

    def restarted(self, task: Task) -> int:
        """Begin the record of a task's next process; return which restart of it this is."""
        restart = len(self._records[task])
        self._records[task].append(TaskRecord(task=task, restart=restart))
        return restart

    def all(self) -> tuple[TaskRecord, ...]:
        """Return the records of all processes."""
        return tuple(record for records in self._records.values() for record in records)

    def _update(self, task: Task, **changes: Any) -> None:
        self._records[task][-1] = dataclasses.replace(self._records[task][-1], **changes)


class Shutdown:
    """Shutdown of the tasks in `running`, which the supervisor keeps up to date."""

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
        """When the tasks' grace period ends."""

    @property
    def is_overdue(self) -> bool:
        """Return whether tasks that were told to end in time have not."""
        is_late = self.has_begun and self._clock() >= self.deadline_s
        return is_late and bool(self._running) and not self._killed

    @property
    def has_failed(self) -> bool:
        """Return whether not even SIGKILL ends what is still running."""
        return self._killed and self._clock() >= self.deadline_s and bool(self._running)

    def stop(self, signum: int, *, within_s: float, but: Container[Task] = ()) -> None:
        """Tell all tasks to end by themselves, except those that are ending already."""
        self.has_begun = True
        self.deadline_s = min(self.deadline_s, self._clock() + within_s)
        self._signal(signum, but=but)

    def kill(self) -> None:
        """End all tasks at once."""
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


class Supervisor:
    """Runs one attempt and says how it went. `chief` is the task whose end ends a ps job.

    A worker of a ps job, and an evaluator, may fail alone: it is started again, or the others go on
    without it. Before the first step a ps job needs `min_workers`, None for all, and then one.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        chief: Task,
        is_ps: bool,
        grace_s: float,
        min_workers: int | None,
        policy: RestartPolicy,
        watchdog: Watcher,
        processes: Processes,
        screen: Screen,
        clock: Callable[[], float],
    ) -> None:
        self._specs = {spec.task: spec for spec in specs}
        self._chief = chief
        self._is_ps = is_ps
        self._grace_s = grace_s
        self._processes = processes
        self._screen = screen
        self._clock = clock
        self._records = Records(self._specs)
        self._progress = Progress(watchdog)
        self._root_cause = RootCause(patience_s=grace_s)
        self._running: dict[Task, None] = {}  # in the order of their start
        self._hang: tuple[Failure, tuple[Task, ...]] | None = None
        self._failure: Failure | None = None
        self._verdict = RestartDecision()
        self._asked: int | None = None
        self._shutdown = Shutdown(
            self._running, processes=processes, records=self._records, clock=clock
        )
        self._min_workers = min_workers or sum(task.type == "worker" for task in self._specs)
        self._policy = policy
        self._leaving: dict[Task, Failure] = {}  # failed alone, to be dealt with once ended
        self._restarts: list[Failure] = []  # after which a task was started again alone
        self._lost: list[Failure] = []  # after which the others went on without the task
        self._is_done = self._are_servers_told = False
        self._straggler_deadline_s = self._stacks_deadline_s = math.inf
        self._started_s = self._woken_s = clock()

    def run(self) -> AttemptReport:
        """Start every task and return when the last one has ended."""
        for spec in self._specs.values():
            if not self._shutdown.has_begun:
                self._start(spec)
        while self._running and not self._shutdown.has_failed:
            events = self._processes.wait(self._timeout_s())
            since_s, self._woken_s = self._woken_s, self._clock()
            for event in events:
                self._handle(event, since_s=since_s)
            self._judge()
            self._end_servers()
            if not self._running:  # the last ones could not even print their stacks
                self._end_hang()
            self._keep_deadlines()
        if self._running:
            self._screen.say(f"cannot be killed: {named(self._running)}")
        return self._attempt()

    def _start(self, spec: ProcessSpec) -> None:
        self._running[spec.task] = None
        self._progress.start_requested(spec.task, at_s=self._clock())
        try:
            self._processes.start(spec)
        except OSError as error:
            cause = f"cannot be started: {error.strerror or error}"
            ended = Ended(task=spec.task, status=1, at_s=self._clock(), cause=cause)
            self._handle(ended, since_s=self._woken_s)
            self._judge()

    def _handle(self, event: Event, *, since_s: float) -> None:
        match event:
            case Started():
                self._records.started(event)
                self._progress.started(event)
            case Beat(task=task) if task in self._running:
                self._progress.beat(event)
            case Raised(task=task) if task in self._running and not self._shutdown.has_begun:
                self._progress.reached(event.step)
                self._root_cause.raised(event)
            case Ended(task=task) if task in self._running:
                self._running.pop(task)
                self._records.ended(event)
                self._progress.ended(task)
                self._after_end(event, since_s=since_s)
            case StopRequest(signum=signum):
                self._ask(signum)

    def _after_end(self, ended: Ended, *, since_s: float) -> None:
        task = ended.task
        if task == self._chief and (self._shutdown.has_begun or not ended.status):
            self._straggler_deadline_s = self._clock() + STRAGGLER_GRACES * self._grace_s
            self._is_done = True
            self._end_servers()
            for served in filter(self._serves_nobody, self._root_cause.tasks):
                self._root_cause.forget(served)  # they have seen it before
        if self._shutdown.has_begun:
            return
        if self._has_left(task) or self._serves_nobody(task):
            return
        if not ended.status:
            self._root_cause.forget(task)
            if not self._is_ps or task in (self._chief, EVALUATOR):
                return
            ended = dataclasses.replace(ended, cause="ended before the chief (exit code 0)")
        self._root_cause.ended(ended, since_s=since_s, now_s=self._clock())

    def _ask(self, signum: int) -> None:
        is_first = self._asked is None and (not self._shutdown.has_begun or self._verdict.restart)
        if not is_first:
            self._shutdown.kill()
            return
        self._asked = signum
        is_closed = signum == signal.SIGPIPE
        name = "its output is closed" if is_closed else signal_name(signum)
        if self._verdict.restart:
            self._screen.say(f"{name}: not started again")
            return
        tasks = f"{len(self._running)} tasks" if len(self._running) > 1 else "the task"
        self._screen.say(
            f"{name}: ending {tasks} within {self._grace_s:g} s (a second signal kills at once)"
        )
        # The servers of a ps job go on until the chief has saved; `_after_end` ends them then.
        saving = self._is_ps and self._chief in self._running
        servers = self._running.keys() - {self._chief} if saving else ()
        as_term = is_closed or signum == signal.SIGHUP  # which no program saves at
        signum = signal.SIGTERM if as_term else signum
        self._shutdown.stop(signum, within_s=self._grace_s, but=servers)

    def _judge(self) -> None:
        """Finds what failed first once anything has ended badly, and stops the rest.

        Not if the same awakening brought a request to stop or the end of the chief: these
        explain the ends around them.
        """
        while not self._shutdown.has_begun and self._hang is None:
            now_s = self._clock()
            is_complete = not (set(self._running) - self._root_cause.tasks)
            failure = self._root_cause.suspect(now_s, is_complete=is_complete)
            if failure is None:
                self._find_hang(now_s)
                return
            failure = self._progress.dated(self._progress.behind(failure), now_s=now_s)
            if not self._go_on(failure):
                # Its process may still have a traceback to print.
                self._fail(failure, but=(failure.task,))

    def _find_hang(self, now_s: float) -> None:
        serving = [task for task in self._running if not self._serves_nobody(task)]
        self._hang = self._progress.hang(now_s, among=set(serving) - self._leaving.keys())
        if self._hang is None:
            return
        failure, stuck = self._hang
        if self._can_go_on(failure):  # the others go on, and are not disturbed
            stuck = tuple(task for task in stuck if task == failure.task)
        self._hang = failure, stuck
        self._stacks_deadline_s = now_s + (STACKS_S if stuck else 0.0)
        if stuck:
            self._screen.say(f"{failure.task}: {failure.cause}; the stacks of {named(stuck)}:")
        for task in stuck:
            self._processes.ask_for_stacks(task)

    def _end_hang(self) -> None:
        """Act on a task that hangs, once the stacks have been printed."""
        if self._hang is None or self._shutdown.has_begun:
            return
        failure, stuck = self._hang
        self._hang, self._stacks_deadline_s = None, math.inf
        stacks = tuple((task, self._screen.last_lines(task)) for task in stuck)
        failure = dataclasses.replace(failure, stacks=stacks)
        if not self._go_on(failure):
            self._fail(failure)

    def _fail(self, failure: Failure, *, but: Container[Task] = ()) -> None:
        self._verdict = self._verdict_on(failure)
        self._failure = first = self._first(failure)
        if first is not failure:
            self._screen.say(f"{failure.task} failed: {failure.cause}; no worker is left")
        self._screen.show_failure(first.task, first.cause)
        within_s = self._grace_s
        if self._verdict.restart:
            within_s = min(within_s, RESTART_GRACE_S)
        elif self._verdict.reason:
            self._screen.say(f"not started again: {self._verdict.reason}")
        self._shutdown.stop(signal.SIGTERM, within_s=within_s, but=but)

    def _verdict_on(self, failure: Failure) -> RestartDecision:
        """Return whether the failed task alone, where that can be, or the job starts again."""
        return self._policy.verdict(failure, alone=self._is_expendable(failure.task))

    def _can_go_on(self, failure: Failure) -> bool:
        """Return whether the others can go on: only an evaluator or workers of a ps job failed."""
        failed = {failure.task, *self._root_cause.tasks}
        if not all(map(self._is_expendable, failed)):
            return False
        return self._may_start(failure) or self._is_dispensable(failure, failed=failed)

    def _go_on(self, failure: Failure) -> bool:
        """Have the others go on, with the failed task or without; return whether they can."""
        if not self._can_go_on(failure):
            return False
        self._root_cause.forget(failure.task)
        if failure.task in self._running:
            self._leaving[failure.task] = failure
            self._processes.kill_one(failure.task)
        else:
            self._start_again_or_drop(failure)
        return True

    def _first(self, failure: Failure) -> Failure:
        """Return the first of the failures that have left a job without workers."""
        lost = [past for past in self._lost if self._is_worker(past.task)]
        is_last = self._is_worker(failure.task) and not self._others({failure.task})
        is_mistake = failure.exit_code == EXIT_USAGE
        return lost[0] if lost and is_last and not is_mistake else failure

    def _has_left(self, task: Task) -> bool:
        """Deal with the end of a task; return whether it was one that had failed alone."""
        failure = self._leaving.pop(task, None)
        if failure is None:
            return False
        self._root_cause.forget(task)
        self._start_again_or_drop(failure)
        return True

    def _lose(self, failure: Failure) -> None:
        """Go on without the failed task."""
        task, verdict = failure.task, self._verdict_on(failure)
        lines = self._screen.last_lines(task)
        self._lost.append(dataclasses.replace(failure, last_lines=lines))
        others = "without it" if task == EVALUATOR else f"with {named(self._others({task}))}"
        reason = "" if verdict.restart else verdict.reason
        why = f" (not started again: {reason})" if reason else ""
        self._screen.say(f"{task} failed: {failure.cause}; going on {others}{why}")

    def _may_start(self, failure: Failure) -> bool:
        """Return whether the failed task can be started again alone: its host is still there."""
        return self._verdict_on(failure).restart and self._processes.can_start(failure.task)

    def _is_expendable(self, task: Task) -> bool:
        return task == EVALUATOR or self._is_worker(task)

    def _is_worker(self, task: Task) -> bool:
        return self._is_ps and task.type == "worker"

    def _others(self, failed: Container[Task]) -> list[Task]:
        """Return the workers that go on."""
        workers = filter(self._is_worker, self._running)
        return [task for task in workers if task not in failed and task not in self._leaving]

    def _is_dispensable(self, failure: Failure, *, failed: Container[Task]) -> bool:
        """Return whether enough workers are left. A mistake in the program would be made by all."""
        has_begun = self._progress.step is not None
        if failure.exit_code == EXIT_USAGE:
            return False
        if failure.task == EVALUATOR:
            return has_begun
        return len(self._others(failed)) >= (1 if has_begun else self._min_workers)

    def _start_again_or_drop(self, failure: Failure) -> None:
        self._processes.kill_one(failure.task)  # what it has left behind
        if self._may_start(failure):
            self._start_again(failure)
        else:
            self._lose(failure)

    def _start_again(self, failure: Failure) -> None:
        task = failure.task
        reason = self._verdict_on(failure).reason
        self._policy.restarted(failure)
        self._restarts.append(failure)
        spec = self._specs[task]
        log = restart_log(spec.log_path, self._records.restarted(task))
        self._screen.say(f"{task} failed: {failure.cause}; started again alone, {reason}: {log}")
        self._start(dataclasses.replace(spec, log_path=log))

    def _serves_nobody(self, task: Task) -> bool:
        """Whether a task is a worker or ps of a ps job whose chief has ended as it should."""
        return self._is_ps and self._is_done and task != EVALUATOR

    def _end_servers(self) -> None:
        """Tell workers and ps to end, once, when the chief is done and its evaluator too."""
        is_evaluated = self._shutdown.has_begun or EVALUATOR not in self._running
        if self._is_ps and self._is_done and is_evaluated and not self._are_servers_told:
            self._end_served()

    def _end_served(self) -> None:
        """Tell what is left to end: it holds nothing to save, and nobody waits for it."""
        self._are_servers_told = True
        self._shutdown.stop(signal.SIGTERM, within_s=min(self._grace_s, SERVER_GRACE_S))

    def _keep_deadlines(self) -> None:
        now_s = self._clock()
        if self._shutdown.is_overdue:
            # The servers of a ps job that is done may be kept from hearing by TensorFlow.
            is_served_out = self._is_ps and self._chief not in self._running
            if not is_served_out and not self._verdict.restart:
                self._screen.say(f"killed, as still running: {named(self._running)}")
            self._shutdown.kill()
        elif now_s >= self._stacks_deadline_s:
            self._end_hang()
        elif now_s >= self._straggler_deadline_s and not self._shutdown.has_begun and self._running:
            self._end_stragglers(now_s)

    def _end_stragglers(self, now_s: float) -> None:
        waited_s = STRAGGLER_GRACES * self._grace_s
        late = [t for t in self._running if t != EVALUATOR and not self._serves_nobody(t)]
        cause = f"still running {waited_s:g} s after {self._chief} was done"
        failure = Failure(task=EVALUATOR, cause=cause, exit_code=1, at_s=now_s, detect_s=waited_s)
        if late:
            cause += f": {named(late)}"
            self._fail(dataclasses.replace(failure, task=late[0], cause=cause))
        else:
            self._lose(failure)
            self._end_served()

    def _timeout_s(self) -> float | None:
        if self._shutdown.has_begun:
            next_s = self._shutdown.deadline_s
        elif self._hang is not None:
            next_s = self._stacks_deadline_s
        else:
            checks_s = (self._root_cause.next_s(), self._progress.next_check_s())
            next_s = min(self._straggler_deadline_s, *checks_s)
        return None if math.isinf(next_s) else max(0.0, next_s - self._clock())

    def _attempt(self) -> AttemptReport:
        failure, code = self._failure, 0
        if failure is not None:
            lines = self._screen.last_lines(failure.task)
            failure = dataclasses.replace(failure, last_lines=lines)
            code = failure.exit_code
        if self._asked is not None:
            code = exit_code_for(self._asked)
        if not code and self._lost:
            self._screen.say(f"done without {named(lost.task for lost in self._lost)}")
        is_worth_it = self._verdict.restart and self._asked is None and not self._running
        return AttemptReport(
            exit_code=code,
            tasks=self._records.all(),
            first_failure=failure,
            restarts=tuple(self._restarts),
            lost=tuple(self._lost),
            restart=self._verdict.reason if is_worth_it else "",
            started_at_s=self._started_s,
            first_step_at_s=self._progress.first_step_s,
        )
