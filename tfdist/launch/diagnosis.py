"""Diagnosis of an attempt: the root cause of a failure or a hang.

`RootCause` finds a failure from the exits of programs and processes. `Watchdog` finds a hang from
the tasks' heartbeats. In a synchronous job all tasks stop at the same step. So each heartbeat
reports the task's phase, and each phase has a deadline.

The classes do no I/O. They receive events, times and process states as arguments.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.events import Beat, Ended, Raised, exit_code_of, signal_name
from tfdist.launch.machine import CAN_GO_ON
from tfdist.phases import UNTIMED, PendingWork

SETTLE_S = 0.5
"""Seconds between a possible secondary failure and its report. The root cause may still follow."""

_OWN, _ABORTED, _LOST_PEER = range(3)  # most likely root cause first

# Errors that TensorFlow and gRPC raise in a task that lost a peer. The text often begins with
# "Graph execution error". A task reports only one line to the launcher, without the details.
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
    """Text to compare failures by: the program's error, without the process's exit."""
    step: int | None = None
    """Highest step that any task had reported."""
    detect_s: float | None = None
    """Seconds from the failure to its detection."""


class RootCause:
    """Failures of an attempt, and the choice of the root cause among them.

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

        The launcher sees an exit when it wakes up. A killed task may have died at any time after
        `since_s`, when the launcher was last awake. The kill is recorded at `since_s`, so that it
        precedes the failures that it caused in other tasks.
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


WAITING = ("save", "validate", "step", "sum", "rendezvous", "barrier")
"""Phases in which a task may wait for peers. A task in an earlier phase is suspected first."""

_BUSY = ("callback", "trace", "import", "done")
"""Phases in which a task does not wait for peers, but peers may wait for the task."""

_STATES: dict[str | None, str] = {
    "T": "its process is stopped",
    "t": "its process is stopped",
    "Z": "its process is a zombie",
    None: "it has no process",
}
_CHECK_EVERY_S = 1.0
LATE_S = 3.0
"""A check that is later than this, in seconds, shows that the launcher itself was stalled."""

_SUSPECT_S = 3.0  # seconds of silence after which a task may be the cause of a hang
_TRACE_TIMEOUTS = 3  # tracing a large model is slow, but happens once


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
    started_s: float
    phase: str = "import"
    step: int | None = None
    has_spoken: bool = False
    state: str | None = "R"
    awaited: PendingWork | None = None

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped, by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def progress(self) -> tuple[bool, int, int]:
        """Return a key that is smallest for the task that delays the others."""
        is_waiting = self.phase in WAITING
        place = WAITING.index(self.phase) if is_waiting else 0
        return is_waiting, -1 if self.step is None else self.step, place

    @property
    def doing(self) -> str:
        """Return the task's phase and finished steps as text."""
        return f"in phase {self.phase}" + (f" after {self.step} steps" if self.step else "")


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

    def find_hang(self, now_s: float) -> tuple[Failure, tuple[Task, ...]] | None:
        """Return a hang and the tasks that can print their stacks, or `None`.

        Call it at `next_check_s`. All timeouts restart if the call is late by more than `LATE_S`
        (the launcher was stopped), or while tasks are blocked by the launcher.
        """
        due_s = self.next_check_s()
        if math.isinf(due_s):
            return None
        if now_s > due_s + LATE_S or self._is_held_up():
            self._excused_s = now_s
        self._checked_s = now_s
        for task in list(self._watched.values()):
            is_silent = self._silence_s(task, now_s) >= self._suspect_s
            task.state = self._state_of(task.task) if is_silent else "R"
            if task.state == "":  # the process cannot send heartbeats any more
                self.ended(task.task)
        found = self._suspect(now_s)
        if found is None:
            return None
        suspect, cause = found
        tasks = sorted(self._watched.values(), key=lambda task: (task is not suspect, task.task))
        stuck = tuple(task.task for task in tasks if task.state in CAN_GO_ON)
        has_stopped = now_s - suspect.beat_s > _SUSPECT_S
        since_s = suspect.beat_s if has_stopped else suspect.since_s
        cause = f"hangs: {cause}"
        return Failure(task=suspect.task, cause=cause, exit_code=1, at_s=since_s), stuck

    def _suspect(self, now_s: float) -> tuple[Watched, str] | None:
        """Return the task that causes a hang and a description, or `None` if no task hangs.

        The order is: a silent task (stopped tasks first), a task with an overdue work unit, a busy
        task that is late, and the waiting task with the fewest steps. If all waiting tasks are
        equal, return the chief.
        """
        tasks = self._watched.values()
        # Other tasks of a ps job only execute the chief's requests.
        judged = [
            task
            for task in tasks
            if task.phase in (*WAITING, *_BUSY) and task.task.type != "evaluator"
            if task.task == self._chief or not self._has_servers
        ]
        late = [task for task in judged if self._is_late(task, now_s)]
        is_expected = any(task.phase in _BUSY and task not in late for task in judged)
        is_stuck = any(
            not is_expected if task.phase in WAITING else task.phase not in UNTIMED for task in late
        )
        mute = [task for task in tasks if self._is_too_silent(task, now_s)]
        if not (mute or is_stuck or self._overdue_work(now_s)):
            return None
        silent = [
            task
            for task in tasks
            if task in mute
            or task.is_stopped
            or (task.has_spoken and self._silence_s(task, now_s) >= self._suspect_s)
        ]
        if silent:
            suspect = min(silent, key=lambda task: (not task.is_stopped, task.beat_s))
            cause = f"no heartbeat for {now_s - suspect.beat_s:.0f} s"
            if suspect.state in _STATES:
                cause += f", {_STATES[suspect.state]}"
            if suspect.has_spoken:
                cause += f", last report: {suspect.doing}"
            return suspect, cause
        if owing := self._overdue_work(now_s, early_s=LATE_S):  # the chief may time out first
            suspect, since_s = min(owing, key=lambda owed: owed[1])
            return suspect, f"its work unit is unfinished after {now_s - since_s:.0f} s"
        able = [task for task in judged if task.phase in WAITING or task in late]
        suspect = min(able, key=lambda task: (task.progress, task.task != self._chief))
        cause = f"{suspect.doing} for {now_s - suspect.since_s:.0f} s"
        is_equal = len(able) > 1 and len({task.progress for task in able}) == 1
        return suspect, f"{cause}, like all {len(able)} tasks" if is_equal else cause

    def _is_too_silent(self, task: Watched, now_s: float) -> bool:
        limit_s = self._hang_timeout_s
        if not task.is_stopped and (not task.has_spoken or task.phase in ("import", "rendezvous")):
            limit_s += self._startup_timeout_s  # loading a library may block the heartbeat
        return self._silence_s(task, now_s) >= limit_s

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
        found, by_name = [], {str(task): watched for task, watched in self._watched.items()}
        for awaited in (task.awaited for task in self._watched.values()):
            owing = by_name.get(awaited.task) if awaited else None
            if awaited is None or owing is None or awaited.since_s < owing.started_s:
                continue  # no work unit, or an earlier process received it
            limit_s = self._hang_timeout_s * (_TRACE_TIMEOUTS if awaited.is_first else 1)
            if now_s - max(awaited.since_s, self._excused_s) >= limit_s - early_s:
                found.append((owing, awaited.since_s))
        return found

    def _silence_s(self, task: Watched, now_s: float) -> float:
        return now_s - max(task.beat_s, self._excused_s)
