"""Host 0's side of the rendezvous: who has come, what they say, and who is gone."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tfdist.cluster.placement import join
from tfdist.launch.multihost.agreement import differences
from tfdist.launch.multihost.connection import Channel, Link, Message, Violation, WrongToken

CHECK_EVERY_S = 0.5

_GREETING_S = 10.0
_SPARE_GUESTS = 64
_MAX_ACCEPTS = 256  # at once, so that those who are in are heard meanwhile
_MAX_TURNED_AWAY = 16
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A host is there, with the same terms as ours."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Differs:
    """A host is there and was sent away: it is not of the same job, or not alike."""

    rank: int
    what: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A host says something."""

    rank: int
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A host that was there is not any more."""

    rank: int
    cause: str


News = Joined | Differs | Heard | Lost


@dataclass(kw_only=True, slots=True)
class _Guest:
    channel: Channel
    address: str
    came_s: float
    rank: int | None = None
    events: int = field(default=selectors.EVENT_READ)


class Hub:
    """Listens for the others, of ranks 1 and up. `turn` does what there is to do, and waits not.

    Whoever does not know the token, says nothing, or says what no launcher says is dropped. Their
    number is limited, and so is what any of them can have us keep.

    Args:
      num_ranks: of all hosts; ours is 0.
      max_strangers: how many may be connected that have not joined; by default some more than
        there are ranks.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: bytes,
        terms: Mapping[str, str],
        num_ranks: int,
        timeout_s: float,
        clock: Callable[[], float],
        max_strangers: int | None = None,
    ) -> None:
        self._listener = listener
        self._token = token
        self._terms = dict(terms)
        self._num_ranks = num_ranks
        self._max_strangers = max_strangers or num_ranks + _SPARE_GUESTS
        self._timeout_s = timeout_s
        self._clock = clock
        self._guests: dict[int, _Guest] = {}
        self._members: dict[int, _Guest] = {}
        self._news: list[News] = []
        self._checked_s = clock()
        self._turned_away: Counter[str] = Counter()
        self._selector = selectors.EpollSelector()
        self._is_listening = False
        listener.setblocking(False)
        self._listen(True)

    def fileno(self) -> int:
        """Returns what is readable when there is something to do."""
        return self._selector.fileno()

    @property
    def present(self) -> frozenset[int]:
        """Returns the ranks that are there."""
        return frozenset(self._members)

    @property
    def turned_away(self) -> tuple[str, ...]:
        """Returns who came and could not join, and why."""
        return tuple(f"{who} ({n} times)" if n > 1 else who for who, n in self._turned_away.items())

    def address_of(self, rank: int) -> str:
        """Returns the address from which a present host came."""
        return self._members[rank].address

    @property
    def next_s(self) -> float:
        """Returns when `turn` is to be called at the latest."""
        return self._checked_s + CHECK_EVERY_S

    def turn(self) -> None:
        """Accepts, reads, writes, and looks who is silent."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif (guest := self._guests.get(key.fd)) is not None:
                self._serve(guest)
        if self._clock() >= self.next_s:
            self._check()

    def take_news(self) -> list[News]:
        """Returns what has happened since the last call."""
        news, self._news = self._news, []
        return news

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to a host; nothing happens if it is gone."""
        if (guest := self._members.get(rank)) is not None:
            self._with(guest, lambda: guest.channel.send(message))

    def close(self) -> None:
        """Closes everything."""
        for guest in list(self._guests.values()):
            with contextlib.suppress(OSError, Violation):
                guest.channel.flush()
            guest.channel.close()
        self._guests.clear()
        self._members.clear()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                return  # else there is nobody any more
            link = Link(self._token, accepts=True)
            channel = Channel(sock, link, clock=self._clock)
            guest = _Guest(channel=channel, address=str(address[0]), came_s=self._clock())
            self._make_room()
            self._guests[channel.fileno()] = guest
            self._selector.register(channel.fileno(), guest.events)
            self._with(guest, channel.flush)

    def _pause(self, error: OSError) -> None:
        """Leaves who comes waiting until the next check, as accepting fails until then.

        A listener with somebody before it stays readable: watched, it would have us turn at once,
        again and again.
        """
        self._listen(False)
        self._turned_away[f"whoever came next: {error.strerror} (see ulimit -n)"] += 1

    def _listen(self, wanted: bool) -> None:
        """Watches the listener, or does not."""
        if wanted and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_listening and not wanted:
            self._selector.unregister(self._listener)
        self._is_listening = wanted

    def _make_room(self) -> None:
        """Drops the oldest of those who have not joined where there are too many."""
        strangers = [guest for guest in self._guests.values() if guest.rank is None]
        if len(strangers) >= self._max_strangers:
            self._drop(strangers[0], "too many connections")

    def _serve(self, guest: _Guest) -> None:
        messages: list[Message] = []
        self._with(guest, lambda: messages.extend(guest.channel.read()))
        for message in messages:
            if guest.rank is not None:
                self._news.append(Heard(rank=guest.rank, message=message))
            else:
                self._greet(guest, message)

    def _greet(self, guest: _Guest, message: Message) -> None:
        hello = message.get("hello")
        rank = hello.get("rank") if isinstance(hello, dict) else None
        terms = hello.get("terms") if isinstance(hello, dict) else None
        if not isinstance(rank, int) or not isinstance(terms, dict):
            self._drop(guest, "no greeting")
            return
        found = differences(self._terms, {str(k): str(v) for k, v in terms.items()})
        if not found and not 1 <= rank < self._num_ranks:
            found = [f"rank {rank} there, 0 to {self._num_ranks - 1} here"]
        if found:
            self._news.append(Differs(rank=rank, what=tuple(found)))
            self._refuse(guest, reason="; ".join(found), differs=True)
        elif rank in self._members:
            taken = f"rank {rank} is that of {self._members[rank].address} already"
            self._refuse(guest, reason=taken, differs=False)
        else:
            guest.rank = rank
            self._members[rank] = guest
            self._news.append(Joined(rank=rank))
            self._with(guest, lambda: guest.channel.send({"welcome": rank}))

    def _refuse(self, guest: _Guest, *, reason: str, differs: bool) -> None:
        message = {"refused": reason, "differs": differs}
        self._with(guest, lambda: guest.channel.send(message))
        self._drop(guest, reason)

    def _with(self, guest: _Guest, action: Callable[[], object]) -> None:
        """Does something with a connection, and drops it where that fails."""
        try:
            action()
        except WrongToken:
            with contextlib.suppress(OSError, Violation):
                guest.channel.flush()
            self._drop(guest, "a wrong token")
        except (OSError, Violation) as error:
            self._drop(guest, str(error))
        else:
            self._watch(guest)

    def _watch(self, guest: _Guest) -> None:
        events = selectors.EVENT_READ
        if guest.channel.is_waiting:
            events |= selectors.EVENT_WRITE
        if events != guest.events and guest.channel.fileno() in self._guests:
            guest.events = events
            self._selector.modify(guest.channel.fileno(), events)

    def _drop(self, guest: _Guest, cause: str) -> None:
        if self._guests.pop(guest.channel.fileno(), None) is None:
            return
        self._selector.unregister(guest.channel.fileno())
        guest.channel.close()
        if guest.rank is None:
            if len(self._turned_away) < _MAX_TURNED_AWAY:
                self._turned_away[f"{guest.address}: {cause}"] += 1
        else:
            del self._members[guest.rank]
            self._news.append(Lost(rank=guest.rank, cause=cause))

    def _check(self) -> None:
        """Shows the others that we live, and drops those of whom nothing is heard."""
        self._checked_s = now_s = self._clock()
        self._listen(True)
        for guest in list(self._guests.values()):
            if guest.rank is None:
                if now_s - guest.came_s > _GREETING_S:
                    self._drop(guest, f"no greeting in {_GREETING_S:g} s")
            elif guest.channel.silent_s >= self._timeout_s:
                self._drop(guest, f"no word for {self._timeout_s:g} s")
            else:
                self._with(guest, guest.channel.beat)


def listen(address: str, port: int, *, num_hosts: int) -> socket.socket:
    """Returns a socket that listens at one address alone; raises OSError, with its name."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(max(128, num_hosts))
    except OSError as error:
        listener.close()
        error.filename = join(address, port)
        raise
    return listener
