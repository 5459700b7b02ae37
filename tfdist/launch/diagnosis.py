"""Diagnosis of an attempt: what failed first, and what hangs.

A failure is found from the ends of programs and processes: `RootCause`. A hang is found from the
tasks' heartbeats: `Watchdog`. In a synchronous job all steps stop together, so each task says what
it is doing, and each phase has its deadline.

Pure: events, times and the states of processes go in, a failure or a hang comes out.
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
"""How long a failure that looks secondary waits for its root cause before it counts itself."""

_OWN, _ABORTED, _LOST_PEER = range(3)  # how likely a task is to have failed by itself

# What TensorFlow and gRPC raise in a task whose peer has gone. The text often begins with
# "Graph execution error" and tells the rest in lines that follow, which a note does not have.
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
    """The root cause; later failures are secondary."""

    task: Task
    cause: str
    exit_code: int
    """What the job ends with."""
    at_s: float
    kind: str = ""
    """What it has in common with others: the program's error, however its process ended."""
    step: int | None = None
    """The last step that any task had reported."""
    detect_s: float | None = None
    """From the failure to when it was named."""


class RootCause:
    """Collected failures of an attempt, of which it names the root cause.

    A program that has failed may take its process up to `patience_s` to end. Until a process
    has ended, or has taken longer, nobody is named.
    """

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._raised: dict[Task, Raised] = {}
        self._ended: dict[Task, Ended] = {}
        self._moments: dict[Task, float] = {}
        self._first_seen_s = math.inf

    def raised(self, event: Raised) -> None:
        """Record that a program has failed."""
        self._raised.setdefault(event.task, event)
        self._moments.setdefault(event.task, event.at_s)

    def ended(self, event: Ended, *, since_s: float, now_s: float) -> None:
        """Record an end that should not have been.

        It is seen when the launcher wakes up, so a task that was killed since it last did, at
        `since_s`, may have died before the moment at which the task that failed because of it says
        it failed.
        """
        self._ended[event.task] = event
        was_killed = event.status < 0 and event.status != -signal.SIGABRT
        self._moments.setdefault(event.task, since_s if was_killed else event.at_s)
        self._first_seen_s = min(self._first_seen_s, now_s)

    def forget(self, task: Task) -> None:
        """Forget all about a task that has ended well after all, or has been started again."""
        for known in (self._raised, self._ended, self._moments):
            known.pop(task, None)
        if not self._ended:
            self._first_seen_s = math.inf

    @property
    def tasks(self) -> set[Task]:
        """Return the tasks that have failed so far."""
        return set(self._moments)

    def suspect(self, now_s: float, *, is_complete: bool) -> Failure | None:
        """Return the root cause, None while it is not certain yet.

        `is_complete` says that no task is left of which a failure could still come.
        """
        if not self._ended and not self._overdue(now_s):
            return None
        first = min(self._moments, key=lambda task: (self._rank(task), self._moments[task]))
        is_settled = now_s >= self._first_seen_s + SETTLE_S or self._overdue(now_s)
        if self._rank(first) != _OWN and not is_settled and not is_complete:
            return None
        return self._failure(first, is_overdue=self._overdue(now_s))

    def next_s(self) -> float:
        """Return when `suspect` may answer without another event."""
        patience_s = min(
            (e.at_s + self._patience_s for e in self._raised.values()), default=math.inf
        )
        return min(patience_s, self._first_seen_s + SETTLE_S)

    def _overdue(self, now_s: float) -> bool:
        """Return whether a task whose program has failed does not end: nothing else would tell."""
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
            cause += ", and its process does not end"
        at_s = raised.at_s if raised else ended.at_s if ended else self._moments[task]
        kind = f"{raised.exit_code}: {raised.cause}" if raised else ""
        return Failure(task=task, cause=cause, exit_code=code, at_s=at_s, kind=kind)


def is_lost_peer(cause: str) -> bool:
    """Return whether an error says that its task has lost another one."""
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
    """Return the failure of another task where `failure` is of one that has lost or missed a peer.

    TensorFlow gives up a peer that is stopped and does not answer, and the tasks wait for one
    that does not come, which both may be over before it counts as hanging.
    """
    has_missed = failure.exit_code == EXIT_PEER_MISSING
    if not has_missed and not is_lost_peer(failure.cause):
        return failure
    if stopped := watchdog.stopped():
        cause = f"stopped (SIGSTOP), and {failure.task} lost it: {failure.cause}"
        return dataclasses.replace(failure, task=stopped, cause=cause, kind="stopped")
    absent = watchdog.absent(failure.at_s) if has_missed else None
    if absent is None:
        return failure
    task, looks = absent
    cause = f"{looks}, and {failure.task} gave up: {failure.cause}"
    return dataclasses.replace(failure, task=task, cause=cause, kind="absent")


WAITING = ("save", "validate", "step", "sum", "rendezvous", "barrier")
"""Phases in which a task may wait for others; the first ones, sooner for a disk or its data."""

_DOING = {
    "barrier": "waiting for its peers",
    "callback": "in a callback",
    "done": "done with its training",
    "import": "not in its training yet",
    "rendezvous": "waiting for its peers to start",
    "save": "saving",
    "serve": "serving the chief",
    "step": "in a step",
    "sum": "at a sum with its peers",
    "trace": "tracing",
    "validate": "validating",
}
_PROCESS_STATES: dict[str | None, str] = {
    "R": "its process runs",
    "S": "its process sleeps",
    "D": "its process waits for a disk",
    "Z": "its process has ended, and its parent does not say so",
    "": "its process has become another program",
}


@dataclass(kw_only=True, slots=True)
class Watched:
    """A running task as of its last beat; times are of the monotonic clock.

    Attributes:
      beat_s: when it last spoke; until it has, when it was started.
      state: of its process, as `proc_state`.
      awaited: the oldest work unit that it has given to another.
      started_s: when its present process was started.
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
        """Return whether its process is stopped, by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def steps(self) -> int:
        """Return how many steps it has done, -1 before its training."""
        return -1 if self.step is None else self.step

    @property
    def doing(self) -> str:
        """Return what it does, in words."""
        doing = _DOING.get(self.phase, f"in {self.phase}")
        return doing if self.step is None else f"{doing} after {self.step} steps"


def _silent_cause(task: Watched, now_s: float) -> str:
    """Return how a task that says nothing looks from outside."""
    for_ = f"for {now_s - task.beat_s:.0f} s"
    last = f", last report: {task.doing}" if task.phase != "import" else ""
    if task.state == "t":
        return f"its process is held by a debugger, and silent {for_}{last}"
    if task.is_stopped:
        return f"its process is stopped (SIGSTOP), and silent {for_}{last}"
    process = _PROCESS_STATES.get(task.state, "it has no process")
    if not task.has_spoken:
        return f"has not started: silent {for_} ({process})"
    return f"does not answer: silent {for_} ({process}){last}"


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
    return one, f"all {len(waiting)} tasks are {one.doing} for {age:.0f} s, none of them behind"


def _age(task: Watched, now_s: float) -> str:
    return f"{now_s - task.since_s:.0f} s"


def _text_of_waiting(waiting: Iterable[Watched], *, but: Watched) -> str:
    tasks = [task.task for task in waiting if task is not but]
    return f"; {named(tasks, most=4)} wait{'s' * (len(tasks) == 1)} for it" if tasks else ""


_CHECK_EVERY_S = 1.0
LATE_S = 3.0
"""How late a check may be before the launcher itself was held up, and no task is at fault."""

_SUSPECT_S = 3.0  # of silence, in a job that hangs
_TRACE_TIMEOUTS = 3  # a large model is traced for long, and once

_BUSY = ("callback", "trace", "import", "done")
"""Phases in which a task waits for nobody, while others may wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A job that hangs.

    Attributes:
      task: the root cause.
      cause: why, to be read after the task's name and a colon.
      stuck: the tasks that can print their Python stacks, the root cause first.
      since_s: when the root cause last got on, by its last heartbeat or what that says.
    """

    task: Task
    cause: str
    stuck: tuple[Task, ...]
    since_s: float


class Watchdog:
    """Watch over the running tasks of a job; times are of the machine's monotonic clock.

    Args:
      hang_timeout_s: how long a task may be silent, or in one phase without progress.
      startup_timeout_s: how much longer it may take before its training begins.
      is_ps: whether workers and ps serve a chief.
      chief: who is named when the tasks do not differ.
      state_of: the state of a task's process, as `proc_state`.
      is_held_up: whether tasks wait for the launcher, which cannot show what they print.
    """

    def __init__(
        self,
        *,
        hang_timeout_s: float,
        startup_timeout_s: float,
        is_ps: bool,
        chief: Task,
        state_of: Callable[[Task], str | None],
        is_held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._suspect_s = min(_SUSPECT_S, hang_timeout_s)
        self._startup_timeout_s = startup_timeout_s
        self._is_ps = is_ps
        self._chief = chief
        self._state_of = state_of
        self._is_held_up = is_held_up
        self._watched: dict[Task, Watched] = {}
        self._checked_s = math.inf
        self._excused_s = -math.inf  # what was before it does not count
        self._noticed_s: float | None = None  # when the job was first seen to hang

    def started(self, task: Task, *, at_s: float) -> None:
        """Begin to watch a task."""
        if not self._watched:
            self._checked_s = at_s
        self._watched[task] = Watched(task=task, beat_s=at_s, since_s=at_s, started_s=at_s)

    def ended(self, task: Task) -> None:
        """Watch a task no more."""
        self._watched.pop(task, None)

    def beat(self, beat: Beat) -> None:
        """Note what a task says; not of a beat from before the task's present process."""
        task = self._watched.get(beat.task)
        if task is None or beat.at_s < task.beat_s:
            return
        task.beat_s, task.has_spoken = beat.at_s, True
        task.phase, task.step, task.since_s = beat.phase, beat.step, beat.since_s
        task.awaited = beat.awaited

    def next_check_s(self) -> float:
        """Return when `find_hang` is to be asked for again; infinity when nothing is watched."""
        if not self._watched or math.isinf(self._hang_timeout_s):
            return math.inf
        return self._checked_s + _CHECK_EVERY_S

    def find_hang(self, now_s: float) -> Hang | None:
        """Return what is wrong, None while nothing is; to be called at `next_check_s`.

        Where it comes much later, because the launcher itself was stopped, and while tasks wait
        for the launcher, every task gets all its time again.
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
            if task.state == "":  # it is not expected to report
                self.ended(task.task)
        is_overdue = any(self._is_overdue(task, now_s) for task in self._tasks())
        if not is_overdue and not self._overdue_work(now_s):
            self._noticed_s = None
            return None
        self._noticed_s = now_s if self._noticed_s is None else self._noticed_s
        return self._hang(now_s, noticed_s=self._noticed_s)

    def stopped(self) -> Task | None:
        """Return a task whose process is stopped at this moment, None where all run."""
        states = ((task.task, self._state_of(task.task)) for task in self._tasks())
        return next((task for task, state in states if state in ("T", "t")), None)

    def absent(self, now_s: float) -> tuple[Task, str] | None:
        """Return a silent task that has not come to its training, and how it looks; else None."""
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
            limit_s += self._startup_timeout_s  # libraries may hold up all else while they load
        return self._silence_s(task, now_s) >= limit_s

    def _is_overdue(self, task: Watched, now_s: float) -> bool:
        """Return whether a task is silent for too long, or in its phase with nobody to wait for."""
        if self._is_too_silent(task, now_s):
            return True
        if not self._is_late(task, now_s):
            return False
        if self._waits(task):
            return all(self._is_late(other, now_s) for other in self._tasks() if self._busy(other))
        return self._busy(task) and task.phase not in UNTIMED

    def _is_late(self, task: Watched, now_s: float) -> bool:
        if task.phase == "barrier":  # for others who may take their time
            return False
        age_s = now_s - max(task.since_s, self._excused_s)
        timeout_s = self._hang_timeout_s
        if task.phase in ("import", "rendezvous"):
            timeout_s += self._startup_timeout_s
        elif task.phase == "trace":
            timeout_s += max((_TRACE_TIMEOUTS - 1) * timeout_s, self._startup_timeout_s)
        return age_s >= timeout_s

    def _overdue_work(self, now_s: float, *, early_s: float = 0.0) -> list[tuple[Watched, float]]:
        """Return the tasks that have had a work unit for too long, and since when."""
        found, named_tasks = [], {str(task.task): task for task in self._tasks()}
        for awaited in (task.awaited for task in self._tasks()):
            owing = named_tasks.get(awaited.task) if awaited else None
            if awaited is None or owing is None or awaited.since_s < owing.started_s:
                continue  # there is none, or it was given to the process before
            limit_s = self._hang_timeout_s * (_TRACE_TIMEOUTS if awaited.is_first else 1)
            if now_s - max(awaited.since_s, self._excused_s) >= limit_s - early_s:
                found.append((owing, awaited.since_s))
        return found

    def _busy(self, task: Watched) -> bool:
        """Return whether others may wait for a task that does not wait for them."""
        return task.phase in _BUSY and not self._serves(task)

    def _waits(self, task: Watched) -> bool:
        return task.phase in WAITING and not self._serves(task)

    def _serves(self, task: Watched) -> bool:
        """Return whether a task does only what the chief gives it to do, whatever it reports."""
        if task.task.type == "evaluator":
            return True
        return self._is_ps and task.task != self._chief

    def _hang(self, now_s: float, *, noticed_s: float) -> Hang | None:
        tasks = self._tasks()
        for task in tasks:
            task.state = self._state_of(task.task)
        silent = [task for task in tasks if self._is_silent(task, now_s)]
        if not silent and any(task.has_spoken and task.beat_s < noticed_s for task in tasks):
            return None  # one of them may have stopped just now: its next beat tells
        found = self._suspect(silent, now_s)
        if found is None:  # the one that was stopped has just gone on
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
        """Return the task that causes the hang and why, None if there is none.

        First a silent task: a stopped one before others. Then one that owes work. Then one that is
        busy while others wait for it. Then, of those that wait, the one with the fewest steps. Of
        equal ones, the chief.
        """
        waiting = [task for task in self._tasks() if self._waits(task)]
        if silent:
            suspect = min(silent, key=lambda task: (not task.is_stopped, task.beat_s))
            return suspect, _silent_cause(suspect, now_s) + _text_of_waiting(waiting, but=suspect)
        if owing := self._overdue_work(now_s, early_s=LATE_S):  # the chief may have been late first
            suspect, since_s = min(owing, key=lambda owed: owed[1])
            return suspect, f"its work unit is not done after {now_s - since_s:.0f} s"
        if busy := [t for t in self._tasks() if self._busy(t) and self._is_late(t, now_s)]:
            suspect = min(busy, key=lambda task: (task.steps, task.since_s))
            cause = f"{suspect.doing} for {_age(suspect, now_s)}"
            return suspect, cause + _text_of_waiting(waiting, but=suspect)
        return _last_of(waiting, chief=self._chief, now_s=now_s) if waiting else None

    def _is_silent(self, task: Watched, now_s: float) -> bool:
        """Return whether a task of a job that hangs is silent, and has had the time to speak."""
        if task.has_spoken or task.is_stopped:
            return task.is_stopped or self._silence_s(task, now_s) >= self._suspect_s
        return self._is_too_silent(task, now_s)

    def _silence_s(self, task: Watched, now_s: float) -> float:
        return now_s - max(task.beat_s, self._excused_s)
