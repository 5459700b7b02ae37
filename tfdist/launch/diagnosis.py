"""Diagnosis of an attempt: the root cause of a failure or a hang.

`RootCause` finds a failure from the exits of programs and processes. `Watchdog` finds a hang from
the tasks' heartbeats. In a synchronous job all tasks stop at the same step. So each heartbeat
reports the task's phase, and each phase has a deadline.

The classes do no I/O. They receive events, times and process states as arguments.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING, named
from tfdist.launch.events import Beat, Ended, Raised, exit_code_of, signal_name
from tfdist.launch.machine import CAN_GO_ON
from tfdist.phases import UNTIMED, PendingWork

SETTLE_S = 0.5
"""Seconds that a possible secondary failure waits for its root cause before it is reported."""

_OWN, _ABORTED, _LOST_PEER = range(3)  # most likely root cause first

# Errors that TensorFlow and gRPC raise in a task that lost a peer. The text often begins with
# "Graph execution error". The lines that follow have the details, but a note has only one line.
_WORDS_OF_LOSS = (
    "connection reset|connection refused|broken pipe|socket closed|failed to connect|goaway|"
    "collective|peer|heartbeat|coordination|unhealthy|recvmsg|rendezvous|graph execution error"
)
_LOST = re.compile(
    r"\b(PeerLost|UnavailableError|AbortedError|ConnectionError|ConnectionResetError)\b|"
    r"\bBrokenPipeError\b|"
    rf"\b(InternalError|CancelledError|DeadlineExceededError)\b.*({_WORDS_OF_LOSS})",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Root cause of an attempt's failure. Later failures are secondary."""

    task: Task
    cause: str
    exit_code: int
    """Exit code of the job."""
    at_s: float
    kind: str = ""
    """Text that equal failures share: the program's error, independent of the process's exit."""
    step: int | None = None
    """Highest step that any task had reported."""
    detect_s: float | None = None
    """Seconds from the failure to its detection."""


class RootCause:
    """Collection of an attempt's failures, which selects the root cause.

    After a program fails, its process has `patience_s` seconds to exit. No root cause is selected
    until a process has exited or this time is over.
    """

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._raised: dict[Task, Raised] = {}
        self._ended: dict[Task, Ended] = {}
        self._moments: dict[Task, float] = {}
        self._first_seen_s = math.inf

    def raised(self, event: Raised) -> None:
        """Record the failure of a program."""
        self._raised.setdefault(event.task, event)
        self._moments.setdefault(event.task, event.at_s)

    def ended(self, event: Ended, *, since_s: float, now_s: float) -> None:
        """Record an unexpected exit.

        The launcher sees an exit when it wakes up. A killed task may have died any time since the
        launcher was last awake (`since_s`). So the kill is dated to `since_s`, before the failures
        that it caused in other tasks.
        """
        self._ended[event.task] = event
        was_killed = event.status < 0 and event.status != -signal.SIGABRT
        self._moments.setdefault(event.task, since_s if was_killed else event.at_s)
        self._first_seen_s = min(self._first_seen_s, now_s)

    def forget(self, task: Task) -> None:
        """Forget the failures of a task, after it exited with code 0 or was restarted."""
        for known in (self._raised, self._ended, self._moments):
            known.pop(task, None)
        if not self._ended:
            self._first_seen_s = math.inf

    @property
    def tasks(self) -> set[Task]:
        """Return the tasks that have failed so far."""
        return set(self._moments)

    def suspect(self, now_s: float, *, is_complete: bool) -> Failure | None:
        """Return the root cause, or `None` while it is uncertain.

        `is_complete` means that all running tasks have already failed.
        """
        if not self._ended and not self._overdue(now_s):
            return None
        first = min(self._moments, key=lambda task: (self._rank(task), self._moments[task]))
        is_settled = now_s >= self._first_seen_s + SETTLE_S or self._overdue(now_s)
        if self._rank(first) != _OWN and not is_settled and not is_complete:
            return None
        return self._failure(first, is_overdue=self._overdue(now_s))

    def next_s(self) -> float:
        """Return the time at which `suspect` may return a failure without a new event."""
        patience_s = min(
            (e.at_s + self._patience_s for e in self._raised.values()), default=math.inf
        )
        return min(patience_s, self._first_seen_s + SETTLE_S)

    def _overdue(self, now_s: float) -> bool:
        """Return whether a failed program's process did not exit within `patience_s`."""
        return any(now_s >= event.at_s + self._patience_s for event in self._raised.values())

    def _rank(self, task: Task) -> int:
        raised, ended = self._raised.get(task), self._ended.get(task)
        if raised is not None:
            is_secondary = is_lost_peer(raised.cause) or raised.exit_code == EXIT_PEER_MISSING
            return _LOST_PEER if is_secondary else _OWN
        return _ABORTED if ended and ended.status == -signal.SIGABRT else _OWN

    def _failure(self, task: Task, *, is_overdue: bool) -> Failure:
        raised, ended = self._raised.get(task), self._ended.get(task)
        code = raised.exit_code if raised else 1
        if ended is not None and ended.status:
            code = exit_code_of(ended.status)
        cause = _cause(raised, ended)
        if ended is None and is_overdue:
            cause += ", and its process does not exit"
        at_s = raised.at_s if raised else ended.at_s if ended else self._moments[task]
        kind = f"{raised.exit_code}: {raised.cause}" if raised else ""
        return Failure(task=task, cause=cause, exit_code=code, at_s=at_s, kind=kind)


def is_lost_peer(cause: str) -> bool:
    """Return whether an error message shows that its task lost a peer."""
    return bool(_LOST.search(cause))


def _cause(raised: Raised | None, ended: Ended | None) -> str:
    if ended is None:
        return raised.cause if raised else "failed"
    if ended.cause:
        return ended.cause
    end = f"exit code {ended.status}"
    if ended.status < 0:
        end = f"killed by {signal_name(-ended.status)}"
        end += ", not by the launcher" * (ended.status == -signal.SIGKILL)
    return f"{raised.cause} ({end})" if raised and raised.cause != end else end


def root_of(failure: Failure, watchdog: Watchdog) -> Failure:
    """Return the failure of a stopped or absent peer that caused `failure`, else `failure`.

    A task may fail because of such a peer before `Watchdog` reports the peer as hanging.
    """
    has_missed = failure.exit_code == EXIT_PEER_MISSING
    if not has_missed and not is_lost_peer(failure.cause):
        return failure
    if stopped := watchdog.stopped():
        cause = f"stopped (SIGSTOP), and {failure.task} lost the connection: {failure.cause}"
        return dataclasses.replace(failure, task=stopped, cause=cause, kind="stopped")
    absent = watchdog.absent(failure.at_s) if has_missed else None
    if absent is None:
        return failure
    task, looks = absent
    cause = f"{looks}, and {failure.task} failed: {failure.cause}"
    return dataclasses.replace(failure, task=task, cause=cause, kind="absent")


WAITING = ("save", "validate", "step", "sum", "rendezvous", "barrier")
"""Phases in which a task may wait for peers (in the first ones, more likely for disk or data)."""

_DOING = {
    "barrier": "waiting for its peers",
    "callback": "in a callback",
    "done": "after its training",
    "import": "before its training",
    "rendezvous": "waiting for its peers to start",
    "save": "saving",
    "serve": "serving the chief",
    "step": "in a step",
    "sum": "in a sum with its peers",
    "trace": "tracing",
    "validate": "validating",
}
_PROCESS_STATES: dict[str | None, str] = {
    "R": "its process runs",
    "S": "its process sleeps",
    "T": "its process is stopped by SIGSTOP",
    "t": "a debugger holds its process",
    "D": "its process waits for a disk",
    "Z": "its process has exited, but its parent did not report it",
    "": "its process runs another program",
}


@dataclass(kw_only=True, slots=True)
class Watched:
    """A running task at its last heartbeat. Times are from the monotonic clock.

    Attributes:
      beat_s: Time of the last heartbeat (before the first heartbeat: start of the process).
      state: State of the process, as returned by `proc_state`.
      awaited: Oldest unfinished work unit that this task gave to another task.
      started_s: Start of the current process.
    """

    task: Task
    beat_s: float
    since_s: float
    phase: str = "import"
    step: int | None = None
    has_spoken: bool = False
    state: str | None = "R"
    awaited: PendingWork | None = None
    started_s: float = -math.inf

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped, by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def steps(self) -> int:
        """Return the number of finished steps (-1 before training)."""
        return -1 if self.step is None else self.step

    @property
    def doing(self) -> str:
        """Return the task's phase and finished steps as text."""
        doing = _DOING.get(self.phase, f"in {self.phase}")
        return doing if self.step is None else f"{doing} after {self.step} steps"


def _silent_cause(task: Watched, now_s: float) -> str:
    """Return a description of a silent task: its process state and last report."""
    silent = f"no heartbeat for {now_s - task.beat_s:.0f} s"
    process = _PROCESS_STATES.get(task.state, "it has no process")
    if not task.has_spoken and not task.is_stopped:
        return f"has not started: {silent} ({process})"
    last = f", last report: {task.doing}" if task.phase != "import" else ""
    return f"{silent} ({process}{last})"


def _last_of(waiting: Sequence[Watched], *, chief: Task, now_s: float) -> tuple[Watched, str]:
    def progress(task: Watched) -> tuple[int, int]:
        return task.steps, WAITING.index(task.phase)

    first, last = max(waiting, key=progress), min(waiting, key=progress)
    if progress(first) != progress(last):
        return last, f"{last.doing} for {_age(last, now_s)}, while {first.task} is {first.doing}"
    one = next((task for task in waiting if task.task == chief), last)
    if len(waiting) == 1:
        return one, f"{one.doing} for {_age(one, now_s)}"
    age = min(now_s - task.since_s for task in waiting)
    return one, f"all {len(waiting)} tasks are {one.doing} for {age:.0f} s, with equal progress"


def _age(task: Watched, now_s: float) -> str:
    return f"{now_s - task.since_s:.0f} s"


def _text_of_waiting(waiting: Iterable[Watched], *, but: Watched) -> str:
    tasks = [task.task for task in waiting if task is not but]
    return f"; {named(tasks, most=4)} wait{'s' * (len(tasks) == 1)} for it" if tasks else ""


_CHECK_EVERY_S = 1.0
LATE_S = 3.0
"""If a check is this late, in seconds, the launcher and not a task was held up."""

_SUSPECT_S = 3.0  # seconds of silence, in a job that hangs
_TRACE_TIMEOUTS = 3  # tracing a large model is slow, but happens once

_BUSY = ("callback", "trace", "import", "done")
"""Phases in which a task does not wait for peers, but peers may wait for the task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Hang of a job.

    Attributes:
      task: Task that causes the hang.
      cause: Description of the hang, to follow the task's name and a colon.
      stuck: Tasks that can print their Python stacks, with the root cause first.
      since_s: Time of the root cause's last progress, from its heartbeats.
    """

    task: Task
    cause: str
    stuck: tuple[Task, ...]
    since_s: float


class Watchdog:
    """Watchdog over the running tasks of a job. Times are from the machine's monotonic clock.

    Args:
      hang_timeout_s: Seconds that a task may be silent, or in one phase without progress.
      startup_timeout_s: Additional seconds before the task's training begins.
      has_servers: Whether workers and ps serve a chief.
      chief: Task to report if all tasks are in the same phase at the same step.
      state_of: Function that returns the state of a task's process, as `proc_state`.
      is_held_up: Function that returns whether tasks are blocked by the launcher's full output.
    """

    def __init__(
        self,
        *,
        hang_timeout_s: float,
        startup_timeout_s: float,
        has_servers: bool,
        chief: Task,
        state_of: Callable[[Task], str | None],
        is_held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._suspect_s = min(_SUSPECT_S, hang_timeout_s)
        self._startup_timeout_s = startup_timeout_s
        self._has_servers = has_servers
        self._chief = chief
        self._state_of = state_of
        self._is_held_up = is_held_up
        self._watched: dict[Task, Watched] = {}
        self._checked_s = math.inf
        self._excused_s = -math.inf  # earlier time does not count as silence
        self._noticed_s: float | None = None  # when the hang was first detected

    def started(self, task: Task, *, at_s: float) -> None:
        """Start watching a task."""
        if not self._watched:
            self._checked_s = at_s
        self._watched[task] = Watched(task=task, beat_s=at_s, since_s=at_s, started_s=at_s)

    def ended(self, task: Task) -> None:
        """Stop watching a task."""
        self._watched.pop(task, None)

    def beat(self, beat: Beat) -> None:
        """Record a task's heartbeat, unless it is from an earlier process of the task."""
        task = self._watched.get(beat.task)
        if task is None or beat.at_s < task.beat_s:
            return
        task.beat_s, task.has_spoken = beat.at_s, True
        task.phase, task.step, task.since_s = beat.phase, beat.step, beat.since_s
        task.awaited = beat.awaited

    def next_check_s(self) -> float:
        """Return the time of the next call to `find_hang` (infinity without watched tasks)."""
        if not self._watched or math.isinf(self._hang_timeout_s):
            return math.inf
        return self._checked_s + _CHECK_EVERY_S

    def find_hang(self, now_s: float) -> Hang | None:
        """Return a hang, or `None`. Call it at `next_check_s`.

        All timeouts restart if the call is late by more than `LATE_S` (the launcher was stopped),
        or while tasks are blocked by the launcher.
        """
        due_s = self.next_check_s()
        if math.isinf(due_s):
            return None
        if now_s > due_s + LATE_S or self._is_held_up():
            self._excused_s = now_s
        self._checked_s = now_s
        for task in self._tasks():
            is_silent = self._silence_s(task, now_s) >= self._suspect_s
            task.state = self._state_of(task.task) if is_silent else "R"
            if task.state == "":  # the process cannot send heartbeats any more
                self.ended(task.task)
        is_overdue = any(self._is_overdue(task, now_s) for task in self._tasks())
        if not is_overdue and not self._overdue_work(now_s):
            self._noticed_s = None
            return None
        self._noticed_s = now_s if self._noticed_s is None else self._noticed_s
        return self._hang(now_s, noticed_s=self._noticed_s)

    def stopped(self) -> Task | None:
        """Return a task with a stopped process, or `None` if all processes run."""
        states = ((task.task, self._state_of(task.task)) for task in self._tasks())
        return next((task for task, state in states if state in ("T", "t")), None)

    def absent(self, now_s: float) -> tuple[Task, str] | None:
        """Return a silent task that has not started training, with a description, or `None`."""
        for task in self._tasks():
            if task.phase == "import" and self._silence_s(task, now_s) >= self._suspect_s:
                task.state = self._state_of(task.task)
                return task.task, _silent_cause(task, now_s)
        return None

    def _tasks(self) -> list[Watched]:
        return list(self._watched.values())

    def _is_too_silent(self, task: Watched, now_s: float) -> bool:
        limit_s = self._hang_timeout_s
        if not task.is_stopped and (not task.has_spoken or task.phase in ("import", "rendezvous")):
            limit_s += self._startup_timeout_s  # loading a library may block the heartbeat
        return self._silence_s(task, now_s) >= limit_s

    def _is_overdue(self, task: Watched, now_s: float) -> bool:
        """Return whether a task is silent or in its phase for too long (unless it waits)."""
        if self._is_too_silent(task, now_s):
            return True
        if not self._is_late(task, now_s):
            return False
        if self._waits(task):
            return all(self._is_late(other, now_s) for other in self._tasks() if self._busy(other))
        return self._busy(task) and task.phase not in UNTIMED

    def _is_late(self, task: Watched, now_s: float) -> bool:
        if task.phase == "barrier":  # peers may take any time before a barrier
            return False
        age_s = now_s - max(task.since_s, self._excused_s)
        timeout_s = self._hang_timeout_s
        if task.phase in ("import", "rendezvous"):
            timeout_s += self._startup_timeout_s
        elif task.phase == "trace":
            timeout_s += max((_TRACE_TIMEOUTS - 1) * timeout_s, self._startup_timeout_s)
        return age_s >= timeout_s

    def _overdue_work(self, now_s: float, *, early_s: float = 0.0) -> list[tuple[Watched, float]]:
        """Return the tasks with an overdue work unit, and the time they received it."""
        found, named_tasks = [], {str(task.task): task for task in self._tasks()}
        for awaited in (task.awaited for task in self._tasks()):
            owing = named_tasks.get(awaited.task) if awaited else None
            if awaited is None or owing is None or awaited.since_s < owing.started_s:
                continue  # no work unit, or an earlier process received it
            limit_s = self._hang_timeout_s * (_TRACE_TIMEOUTS if awaited.is_first else 1)
            if now_s - max(awaited.since_s, self._excused_s) >= limit_s - early_s:
                found.append((owing, awaited.since_s))
        return found

    def _busy(self, task: Watched) -> bool:
        """Return whether peers may wait for a task that does not wait for peers."""
        return task.phase in _BUSY and not self._serves(task)

    def _waits(self, task: Watched) -> bool:
        return task.phase in WAITING and not self._serves(task)

    def _serves(self, task: Watched) -> bool:
        """Return whether a task only executes the chief's requests, or is the evaluator."""
        if task.task.type == "evaluator":
            return True
        return self._has_servers and task.task != self._chief

    def _hang(self, now_s: float, *, noticed_s: float) -> Hang | None:
        tasks = self._tasks()
        for task in tasks:
            task.state = self._state_of(task.task)
        silent = [task for task in tasks if self._is_silent(task, now_s)]
        if not silent and any(task.has_spoken and task.beat_s < noticed_s for task in tasks):
            return None  # a task may have stopped just now: wait for its next heartbeat
        found = self._suspect(silent, now_s)
        if found is None:  # a stopped task has just resumed
            return None
        suspect, cause = found
        tasks.sort(key=lambda task: (task is not suspect, task.task))
        stuck = tuple(task.task for task in tasks if task.state in CAN_GO_ON)
        has_stopped = now_s - suspect.beat_s > _SUSPECT_S
        return Hang(
            task=suspect.task,
            cause=f"hangs: {cause}",
            stuck=stuck,
            since_s=suspect.beat_s if has_stopped else suspect.since_s,
        )

    def _suspect(self, silent: Sequence[Watched], now_s: float) -> tuple[Watched, str] | None:
        """Return the task that causes the hang and a description, or `None`.

        The order is: a silent task (stopped tasks first), a task with an overdue work unit, a busy
        task that is late, and the waiting task with the fewest steps. If all waiting tasks are
        equal, return the chief.
        """
        waiting = [task for task in self._tasks() if self._waits(task)]
        if silent:
            suspect = min(silent, key=lambda task: (not task.is_stopped, task.beat_s))
            return suspect, _silent_cause(suspect, now_s) + _text_of_waiting(waiting, but=suspect)
        if owing := self._overdue_work(now_s, early_s=LATE_S):  # the chief may have been late first
            suspect, since_s = min(owing, key=lambda owed: owed[1])
            return suspect, f"its work unit is unfinished after {now_s - since_s:.0f} s"
        if busy := [t for t in self._tasks() if self._busy(t) and self._is_late(t, now_s)]:
            suspect = min(busy, key=lambda task: (task.steps, task.since_s))
            cause = f"{suspect.doing} for {_age(suspect, now_s)}"
            return suspect, cause + _text_of_waiting(waiting, but=suspect)
        return _last_of(waiting, chief=self._chief, now_s=now_s) if waiting else None

    def _is_silent(self, task: Watched, now_s: float) -> bool:
        """Return whether a task of a hanging job is silent, and had time to send a heartbeat."""
        if task.has_spoken or task.is_stopped:
            return task.is_stopped or self._silence_s(task, now_s) >= self._suspect_s
        return self._is_too_silent(task, now_s)

    def _silence_s(self, task: Watched, now_s: float) -> float:
        return now_s - max(task.beat_s, self._excused_s)
