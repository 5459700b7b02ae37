"""The requests of a model: which replica gets which, and what is tried again.

No request is lost with its replica. Those that a dead replica had are sent once more, each alone to
a replica that has nothing else: so the one that kills replicas is known after the second, and its
neighbours are answered. Sockets and clock are arguments.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.serving.protocol import (
    Code,
    Frame,
    Kind,
    ModelStatus,
    RequestError,
    VersionState,
    decode_error,
)

Outcome = bytes | RequestError
_ROOM_S = 1.0  # how long a request waits for memory
MAX_DEATHS = 2  # replicas that end with a request


class Room:
    """The memory that requests of all models and both protocols share."""

    def __init__(self, size_bytes: int) -> None:
        self.left_bytes = size_bytes
        self._given = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Take memory as soon as there is enough; raise RequestError after a second."""
        try:
            async with asyncio.timeout(_ROOM_S):
                while size_bytes > self.left_bytes:
                    self._given.clear()
                    await self._given.wait()
        except TimeoutError:
            message = "Requests use all memory that they may have, try again later"
            raise RequestError(Code.RESOURCE_EXHAUSTED, message) from None
        self.left_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        self.left_bytes += size_bytes
        self._given.set()


class Held:
    """The memory that one request has taken of a room."""

    def __init__(self, room: Room, size_bytes: int = 0) -> None:
        self._room = room
        self._size_bytes = size_bytes

    async def grow(self, size_bytes: int) -> None:
        await self._room.take(size_bytes)
        self._size_bytes += size_bytes

    def shrink(self, size_bytes: int = 0) -> None:
        """Give back all memory but `size_bytes`."""
        self._room.give(self._size_bytes - size_bytes)
        self._size_bytes = size_bytes

    def move(self) -> Held:
        """Return another owner of the memory; this one has none from then on."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        return Held(self._room, size_bytes)


@dataclasses.dataclass(kw_only=True, slots=True)
class Ticket:
    """One request: its bytes and their memory until it is answered, and who waits for the outcome.

    If it names a `version`, no other version answers it.
    """

    kind: Kind
    payload: bytes
    held: Held
    deadline: float
    answer: Callable[[Outcome], None]
    version: int | None = None
    abandoned: bool = False
    deaths: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class ReplicaLink:
    """A replica as the front sees it; `since` is when it last answered, or had nothing to do."""

    id: int
    send: Callable[[Frame], None]
    outstanding: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    alone: bool = False
    since: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Bounds of a queue.

    Attributes:
      requests: that wait for a replica.
      size_bytes: of all requests of a service, from their first byte to their answer.
      window: requests that a replica may have at a time; those behind its batch are in its socket.
      hang_s: how long a replica that has requests may answer none before it counts as hanging.
    """

    requests: int = 1000
    size_bytes: int = 512 << 20
    window: int = 64
    hang_s: float = 15.0


class Dispatcher:
    """A model as the supervisor describes it, the queue of its requests, and its replicas."""

    def __init__(
        self,
        limits: QueueLimits,
        clock: Callable[[], float],
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Take a function that is called with the size of the batch of each answer."""
        self.status = ModelStatus()
        self.replicas: dict[int, str] = {}  # those that get requests, and where each listens
        self.draining: set[int] = set()  # killed by the supervisor once they have no request
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
        """Requests that no replica has."""
        return len(self._waiting) + len(self._suspects)

    @property
    def figures(self) -> Counter[str]:
        """Current values and counts of events, by name."""
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
            ticket.held.shrink()
            self.counts["rejected"] += 1
            message = f"The queue is full: {self.waiting} requests wait, try again later"
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
        error = frame.kind is Kind.ERROR
        self._end(ticket, decode_error(frame.payload) if error else frame.payload)
        self.pump()

    def lost(self, id: int) -> None:
        """Take that a replica has ended: what it had is tried once more, each request alone."""
        link = self.links.pop(id, None)
        if link is None:
            return
        for ticket in link.outstanding.values():
            ticket.deaths += 1
            if ticket.deaths >= MAX_DEATHS:
                self.counts["poisonous"] += 1
                message = f"{ticket.deaths} replicas ended while they had this request"
                self._end(ticket, RequestError(Code.INTERNAL, message))
            else:
                self.counts["retried"] += 1
                self._suspects.append(ticket)
        self.pump()

    def hanging(self) -> list[int]:
        """Return the replicas that have requests and have answered none for too long."""
        before = self._clock() - self._limits.hang_s
        return [o.id for o in self.links.values() if o.outstanding and o.since < before]

    def expire(self) -> None:
        """Answer the requests whose deadline has passed, and forget those that nobody waits for."""
        now = self._clock()
        sent = [ticket for link in self.links.values() for ticket in link.outstanding.values()]
        for ticket in [*self._waiting, *self._suspects, *sent]:
            if ticket.deadline <= now and not ticket.abandoned:
                self.counts["expired"] += 1
                ticket.abandoned = True
                ticket.answer(RequestError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        for queue in (self._waiting, self._suspects):
            kept = [ticket for ticket in queue if not ticket.abandoned]
            for ticket in queue:
                if ticket.abandoned:
                    ticket.held.shrink()
            queue.clear()
            queue.extend(kept)

    def pump(self) -> None:
        """Send what waits to replicas that have room; one of them runs what is tried again."""
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
        """Return the replica that gets nothing but requests which another one ended with."""
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
        """Send a request unless its client has left; return whether it was sent."""
        if ticket.abandoned:
            ticket.held.shrink()
            return False
        if ticket.version not in (None, self.status.served):
            message = f"Version {ticket.version} is served no more"
            self._end(ticket, RequestError(Code.NOT_FOUND, message))
            return False
        id = next(self._ids)
        if not link.outstanding:
            link.since = self._clock()
        link.outstanding[id] = ticket
        link.send(Frame(id, ticket.kind, ticket.payload))
        return True

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        ticket.held.shrink()
        if not ticket.abandoned:
            ticket.abandoned = True
            ticket.answer(outcome)
