"""Request queue of a model: assigns requests to replicas and retries requests.

If a replica dies, the dispatcher retries each of its requests once, on a replica that has no other
request. If that replica dies too, the request is the cause and gets an error. The other requests
get their answers. The caller passes the functions that send, and the clock.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.serving.protocol import (
    Code,
    Frame,
    FrameKind,
    ModelStatus,
    RequestError,
    VersionState,
    decode_error,
)

Outcome = bytes | RequestError
MAX_DEATHS = 2  # replica deaths after which a request gets an error


@dataclasses.dataclass(kw_only=True, slots=True)
class Ticket:
    """Request with its bytes, and the callback that gets the outcome.

    If `version` is set, no other version answers the request.
    """

    kind: FrameKind
    payload: bytes
    deadline: float
    answer: Callable[[Outcome], None]
    version: int | None = None
    abandoned: bool = False
    deaths: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class ReplicaLink:
    """Front's state of a replica. `since` is the time at which it last answered or became busy."""

    id: int
    send: Callable[[Frame], None]
    outstanding: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    alone: bool = False
    since: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Limits of a queue.

    Attributes:
      requests: Maximum number of requests that wait for a replica (default: 1000).
      window: Maximum number of requests at one replica, in its batch or socket (default: 64).
      hang_s: Seconds without an answer after which a busy replica hangs (default: 15).
    """

    requests: int = 1000
    window: int = 64
    hang_s: float = 15.0


class Dispatcher:
    """Queue of a model's requests, with its replicas and its state from the supervisor."""

    def __init__(
        self,
        limits: QueueLimits,
        clock: Callable[[], float],
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Create a dispatcher that calls `on_batch` with the batch size of each answer."""
        self.status = ModelStatus()
        self.replicas: dict[int, str] = {}  # socket path of each replica that gets requests
        self.draining: set[int] = set()  # the supervisor kills these after their last request
        self.links: dict[int, ReplicaLink] = {}
        self.counts: Counter[str] = Counter()
        self._limits = limits
        self._clock = clock
        self._on_batch = on_batch
        self._ids = itertools.count(1)
        self._waiting: deque[Ticket] = deque()
        self._suspects: deque[Ticket] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests that are not at a replica."""
        return len(self._waiting) + len(self._suspects)

    @property
    def figures(self) -> Counter[str]:
        """Current values and event counts, by name."""
        outstanding = sum(len(link.outstanding) for link in self.links.values())
        now = {"waiting": self.waiting, "outstanding": outstanding}
        now |= {"replicas": len(self._serving()), "version": self.status.served or 0}
        return Counter({**now, **self.counts})

    def update(self, table: Mapping[str, Any]) -> None:
        states = [VersionState(**state) for state in table["states"]]
        self.status = ModelStatus(served=table["served"], states=states)
        self.replicas = dict(table["replicas"])
        self.draining = set(table["draining"])
        self.pump()

    def drained(self) -> set[int]:
        """Return the draining replicas that have no request."""
        return {
            id for id in self.draining if id not in self.links or not self.links[id].outstanding
        }

    def submit(self, ticket: Ticket) -> None:
        if self.waiting >= self._limits.requests:
            self.counts["rejected"] += 1
            message = f"The queue is full: {self.waiting} requests are waiting, try again later"
            raise RequestError(Code.RESOURCE_EXHAUSTED, message)
        self._waiting.append(ticket)
        self.pump()

    def connected(self, id: int, send: Callable[[Frame], None]) -> None:
        self.links[id] = ReplicaLink(id=id, send=send)
        self.pump()

    def received(self, id: int, frame: Frame) -> None:
        link = self.links.get(id)
        ticket = link.outstanding.pop(frame.id, None) if link else None
        if link is None or ticket is None:
            return
        link.alone = False
        link.since = self._clock()
        if frame.batch:
            self._on_batch(frame.batch)
        error = frame.kind is FrameKind.ERROR
        self._end(ticket, decode_error(frame.payload) if error else frame.payload)
        self.pump()

    def lost(self, id: int) -> None:
        """Remove a dead replica and retry each of its requests once, in sequence."""
        link = self.links.pop(id, None)
        if link is None:
            return
        for ticket in link.outstanding.values():
            ticket.deaths += 1
            if ticket.deaths >= MAX_DEATHS:
                self.counts["poisonous"] += 1
                message = f"{ticket.deaths} replicas exited while computing this request"
                self._end(ticket, RequestError(Code.INTERNAL, message))
            else:
                self.counts["retried"] += 1
                self._suspects.append(ticket)
        self.pump()

    def hanging(self) -> list[int]:
        """Return the replicas that have requests but sent no answer for `hang_s` seconds."""
        before = self._clock() - self._limits.hang_s
        return [o.id for o in self.links.values() if o.outstanding and o.since < before]

    def expire(self) -> None:
        """Answer requests past their deadline with an error, and drop abandoned requests."""
        now = self._clock()
        sent = [ticket for link in self.links.values() for ticket in link.outstanding.values()]
        for ticket in [*self._waiting, *self._suspects, *sent]:
            if ticket.deadline <= now and not ticket.abandoned:
                self.counts["expired"] += 1
                ticket.abandoned = True
                ticket.answer(RequestError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        self._waiting = deque(ticket for ticket in self._waiting if not ticket.abandoned)
        self._suspects = deque(ticket for ticket in self._suspects if not ticket.abandoned)

    def pump(self) -> None:
        """Send waiting requests to replicas that have room. One replica runs the retries."""
        while self._suspects:
            link = self._quarantine()
            if link is None or link.outstanding:
                break
            link.alone = self._send(self._suspects.popleft(), link)
        while self._waiting and (free := self._least_busy()):
            self._send(self._waiting.popleft(), free)

    def _serving(self) -> list[ReplicaLink]:
        return [link for link in self.links.values() if link.id in self.replicas]

    def _quarantine(self) -> ReplicaLink | None:
        """Return the replica that runs only retries, or `None`."""
        serving = self._serving()
        alone = next((link for link in serving if link.alone), None)
        if alone or not self._suspects:
            return alone
        return min(serving, key=lambda one: len(one.outstanding), default=None)

    def _least_busy(self) -> ReplicaLink | None:
        kept_free, window = self._quarantine(), self._limits.window
        others = [link for link in self._serving() if link is not kept_free]
        room = [link for link in others if len(link.outstanding) < window]
        return min(room, key=lambda one: len(one.outstanding), default=None)

    def _send(self, ticket: Ticket, link: ReplicaLink) -> bool:
        """Send a request, unless its client has disconnected. Return whether it was sent."""
        if ticket.abandoned:
            return False
        if ticket.version not in (None, self.status.served):
            message = f"Version {ticket.version} is no longer served"
            self._end(ticket, RequestError(Code.NOT_FOUND, message))
            return False
        id = next(self._ids)
        if not link.outstanding:
            link.since = self._clock()
        link.outstanding[id] = ticket
        link.send(Frame(id, ticket.kind, ticket.payload))
        return True

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        if not ticket.abandoned:
            ticket.abandoned = True
            ticket.answer(outcome)
