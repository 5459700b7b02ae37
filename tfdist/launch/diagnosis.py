"""Diagnosis of a failed attempt: its root cause.

Pure: events and times go in, a failure comes out.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from dataclasses import dataclass

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.events import Ended, Raised, exit_code_of, signal_name
from tfdist.launch.watchdog import Watchdog

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
        self._moments.setdefault(event.task, since_s if _was_killed(event) else event.at_s)
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


def _was_killed(ended: Ended) -> bool:
    return ended.status < 0 and ended.status != -signal.SIGABRT


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
