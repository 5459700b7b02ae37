"""Who failed first: the culprit among tasks of which some end only because another did.

Pure: it is told what has happened, and asked with the time.
"""

from __future__ import annotations

import math
import re
import signal

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.events import Ended, Raised
from tfdist.launch.report import Failure, exit_code_of, signal_name

SETTLE_S = 0.5
"""How long a task that looks like a victim waits for its culprit before it is blamed itself."""

_OWN, _ABORTED, _LOST_PEER = range(3)  # how likely a task is to have failed by itself

# What TensorFlow and gRPC raise in a task whose peer has gone. The text often begins with
# "Graph execution error" and tells the rest in lines that follow, which a note does not have.
_SAID = (
    "connection reset|connection refused|broken pipe|socket closed|failed to connect|goaway|"
    "collective|peer|heartbeat|coordination|unhealthy|recvmsg|rendezvous|graph execution error"
)
_LOST = re.compile(
    r"\b(PeerLost|UnavailableError|AbortedError|ConnectionError|ConnectionResetError)\b|"
    r"\bBrokenPipeError\b|"
    rf"\b(InternalError|CancelledError|DeadlineExceededError)\b.*({_SAID})",
    re.IGNORECASE | re.DOTALL,
)


class Blame:
    """Collects failures and names the first.

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
        """Takes down that a program has failed."""
        self._raised.setdefault(event.task, event)
        self._moments.setdefault(event.task, event.at_s)

    def ended(self, event: Ended, *, since_s: float, now_s: float) -> None:
        """Takes down an end that should not have been.

        It is seen when the launcher wakes up, so a task that was killed since it last did, at
        `since_s`, may have died before the moment at which its victim says it failed.
        """
        self._ended[event.task] = event
        self._moments.setdefault(event.task, since_s if _was_killed(event) else event.at_s)
        self._first_seen_s = min(self._first_seen_s, now_s)

    def forget(self, task: Task) -> None:
        """Takes back all about a task: it has ended well after all, or has been started again."""
        for known in (self._raised, self._ended, self._moments):
            known.pop(task, None)
        if not self._ended:
            self._first_seen_s = math.inf

    @property
    def tasks(self) -> set[Task]:
        """Returns the tasks that have failed so far."""
        return set(self._moments)

    def suspect(self, now_s: float, *, is_complete: bool) -> Failure | None:
        """Returns who failed first, or None while that is not to be said yet.

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
        """Returns when `suspect` may answer without another event."""
        patience_s = min(
            (e.at_s + self._patience_s for e in self._raised.values()), default=math.inf
        )
        return min(patience_s, self._first_seen_s + SETTLE_S)

    def _overdue(self, now_s: float) -> bool:
        """Whether a task whose program has failed does not end: nothing else would tell."""
        return any(now_s >= event.at_s + self._patience_s for event in self._raised.values())

    def _rank(self, task: Task) -> int:
        raised, ended = self._raised.get(task), self._ended.get(task)
        if raised is not None:
            is_victim = is_lost_peer(raised.cause) or raised.exit_code == EXIT_PEER_MISSING
            return _LOST_PEER if is_victim else _OWN
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
    """Returns whether an error says that its task has lost another one."""
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
