"""One attempt of a job: when it is over, what failed first, and who is told to end when.

It acts on events alone. The processes, the screen and the clock are parameters, so that
its tests replay histories without any process.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tfdist.cluster import Task
from tfdist.launch.events import Asked, Ended, Event, Raised, Started
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.report import Attempt, Failure, TaskRecord, exit_code_of, signal_name

SERVER_GRACE_S = 3.0
"""How long workers and ps may take to end once the chief has: they hold nothing to save."""

STRAGGLER_GRACES = 6
"""How many times the grace the other workers may go on after the chief of theirs is done."""

_GIVE_UP_S = 10.0  # after SIGKILL, for a process that not even that ends

_log = logging.getLogger(__name__)


class Processes(Protocol):
    """The processes of a job, as far as the supervisor deals with them."""

    def start(self, spec: ProcessSpec) -> None:
        """Starts a task; its `Started` comes as an event. Raises OSError if it cannot."""

    def signal(self, task: Task, signum: int) -> None:
        """Sends a signal to a task's whole process group."""

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


class Supervisor:
    """Runs one attempt and says how it went. `chief` is the task whose end ends a ps job."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        chief: Task,
        is_ps: bool,
        grace_s: float,
        processes: Processes,
        screen: Screen,
        clock: Callable[[], float],
    ) -> None:
        self._specs = specs
        self._chief = chief
        self._is_ps = is_ps
        self._grace_s = grace_s
        self._processes = processes
        self._screen = screen
        self._clock = clock
        self._records = {spec.task: TaskRecord(task=spec.task) for spec in specs}
        self._running: dict[Task, None] = {}  # in the order of their start
        self._raised: dict[Task, Raised] = {}
        self._failed: dict[Task, Ended] = {}
        self._failure: Failure | None = None
        self._asked: int | None = None
        self._stopping = False
        self._killed = False
        self._deadline_s = math.inf
        self._straggler_deadline_s = math.inf
        self._woken_s = clock()

    def run(self) -> Attempt:
        """Starts every task and returns when the last one has ended."""
        for spec in self._specs:
            if self._stopping:
                break
            self._start(spec)
        while self._running and not self._has_given_up():
            before_s = self._woken_s
            events = self._processes.wait(self._timeout_s())
            self._woken_s = self._clock()
            for event in events:
                self._handle(event)
            self._judge(since_s=before_s)
            self._keep_deadlines()
        return self._attempt()

    def _start(self, spec: ProcessSpec) -> None:
        self._running[spec.task] = None
        try:
            self._processes.start(spec)
        except OSError as error:
            cause = f"cannot be started: {error.strerror or error}"
            self._handle(Ended(task=spec.task, status=1, at_s=self._clock(), cause=cause))
            self._judge(since_s=self._woken_s)

    def _handle(self, event: Event) -> None:
        match event:
            case Started(task=task):
                self._update(task, pid=event.pid, started_at_s=event.at_s)
            case Raised(task=task) if task in self._running and not self._stopping:
                self._raised.setdefault(task, event)
            case Ended(task=task) if task in self._running:
                self._running.pop(task)
                self._update(task, status=event.status, ended_at_s=event.at_s)
                self._after_end(event)
            case Asked(signum=signum):
                self._ask(signum)

    def _after_end(self, ended: Ended) -> None:
        task = ended.task
        if self._stopping:
            if self._is_ps and task == self._chief:
                self._stop(signal.SIGTERM, within_s=min(self._grace_s, SERVER_GRACE_S))
            return
        if ended.status:
            self._failed[task] = ended
            return
        self._raised.pop(task, None)
        if self._is_ps and task == self._chief:
            self._stop(signal.SIGTERM, within_s=min(self._grace_s, SERVER_GRACE_S))
        elif self._is_ps:
            cause = "ended before the chief (exit code 0)"
            self._failed[task] = dataclasses.replace(ended, cause=cause)
        elif task == self._chief:
            self._straggler_deadline_s = self._clock() + STRAGGLER_GRACES * self._grace_s

    def _ask(self, signum: int) -> None:
        if self._stopping:
            self._kill()
            return
        self._asked = signum
        name = "its output is closed" if signum == signal.SIGPIPE else signal_name(signum)
        passed = signal.SIGTERM if signum == signal.SIGPIPE else signum
        tasks = f"{len(self._running)} tasks" if len(self._running) > 1 else "the task"
        self._screen.say(
            f"{name}: ending {tasks} within {self._grace_s:g} s (a second signal kills at once)"
        )
        self._stop(passed, within_s=self._grace_s)

    def _judge(self, *, since_s: float) -> None:
        """Finds what failed first once anything has ended badly, and stops the rest.

        Not if the same awakening brought a request to stop or the end of the chief: these
        explain the ends around them.
        """
        if self._stopping:
            return
        raised = self._overdue_raised()
        if not self._failed and not raised:
            return
        moments = {task: event.at_s for task, event in self._raised.items()}
        for task, ended in self._failed.items():
            # The end of a process is seen when the launcher wakes, so one that was killed in
            # between may have died before the moment at which its victim says it failed.
            killed = ended.status < 0 and ended.status != -signal.SIGABRT
            moments.setdefault(task, since_s if killed else ended.at_s)
        first = min(moments, key=lambda task: moments[task])
        self._fail(first, at_s=moments[first])

    def _overdue_raised(self) -> bool:
        """Whether a task whose program has failed does not end: nothing else would tell."""
        now_s = self._clock()
        return any(now_s >= event.at_s + self._grace_s for event in self._raised.values())

    def _fail(self, task: Task, *, at_s: float) -> None:
        raised, ended = self._raised.get(task), self._failed.get(task)
        if ended is not None and ended.status:
            code = exit_code_of(ended.status)
        else:
            code = raised.exit_code if raised else 1
        cause = _cause(raised, ended)
        if ended is None and self._overdue_raised():
            cause += ", and its process does not end"
        self._failure = Failure(task=task, cause=cause, exit_code=code, at_s=at_s)
        self._screen.show_failure(task, cause)
        self._stop(signal.SIGTERM, within_s=self._grace_s, but=() if ended else (task,))

    def _stop(self, signum: int, *, within_s: float, but: Iterable[Task] = ()) -> None:
        self._stopping = True
        self._deadline_s = min(self._deadline_s, self._clock() + within_s)
        for task in self._running:
            if task not in but:
                self._update(task, stopped=True)
                self._processes.signal(task, signum)

    def _kill(self) -> None:
        if self._killed:
            return
        self._killed = True
        self._deadline_s = self._clock() + _GIVE_UP_S
        for task in self._running:
            self._update(task, stopped=True)
            self._processes.signal(task, signal.SIGKILL)

    def _keep_deadlines(self) -> None:
        now_s = self._clock()
        if self._stopping and not self._killed and now_s >= self._deadline_s and self._running:
            if not self._is_served_out():
                self._screen.say(f"killed, as still running: {_names(self._running)}")
            self._kill()
        if not self._stopping and now_s >= self._straggler_deadline_s and self._running:
            self._fail_stragglers(now_s)

    def _is_served_out(self) -> bool:
        """Whether only servers of a ps job are left, which TensorFlow may keep from hearing."""
        return self._is_ps and self._chief not in self._running

    def _fail_stragglers(self, now_s: float) -> None:
        first = next(iter(self._running))
        waited_s = STRAGGLER_GRACES * self._grace_s
        cause = f"still running {waited_s:g} s after {self._chief} was done: "
        cause += _names(self._running)
        self._failed[first] = Ended(task=first, status=0, at_s=now_s, cause=cause)
        self._fail(first, at_s=now_s)

    def _timeout_s(self) -> float | None:
        next_s = min(self._deadline_s, self._straggler_deadline_s)
        if self._stopping:
            next_s = self._deadline_s
        else:
            for event in self._raised.values():
                next_s = min(next_s, event.at_s + self._grace_s)
        return None if math.isinf(next_s) else max(0.0, next_s - self._clock())

    def _has_given_up(self) -> bool:
        if not self._killed or self._clock() < self._deadline_s:
            return False
        self._screen.say(f"cannot be killed: {_names(self._running)}")
        return True

    def _attempt(self) -> Attempt:
        failure = self._failure
        if failure is not None:
            lines = self._screen.last_lines(failure.task)
            failure = dataclasses.replace(failure, last_lines=lines)
            code = failure.exit_code
        elif self._asked is not None:
            code = 128 + self._asked
        else:
            code = 0
        return Attempt(exit_code=code, tasks=tuple(self._records.values()), first_failure=failure)

    def _update(self, task: Task, **changes: Any) -> None:
        self._records[task] = dataclasses.replace(self._records[task], **changes)


def _cause(raised: Raised | None, ended: Ended | None) -> str:
    if ended is None:
        return raised.cause if raised else "failed"
    if ended.cause:
        return ended.cause
    end = f"exit code {ended.status}"
    if ended.status < 0:
        end = f"killed by {signal_name(-ended.status)}"
    return f"{raised.cause} ({end})" if raised and raised.cause != end else end


def _names(tasks: Iterable[Task]) -> str:
    names = [str(task) for task in tasks]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
