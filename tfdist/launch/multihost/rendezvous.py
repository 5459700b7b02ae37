"""Rendezvous of the hosts: the hub of host 0, and the member on each other host."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster.address import join
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.messages import Hello, Message, decode, encode
from tfdist.launch.multihost.agreement import TOKEN_FLAG, TOKEN_VARIABLE, differences
from tfdist.launch.multihost.connection import Channel, Violation, WrongToken, resolve

CHECK_EVERY_S = 0.5

_GREETING_S = 10.0
_GOODBYE_S = 2.0
_SPARE_CLIENTS, _MAX_UNAUTHENTICATED = 64, 2048
_MAX_ACCEPTS = 256  # at once, so that connected hosts are served meanwhile
_MAX_TURNED_AWAY = 16
_BACKLOG = 4096  # the kernel takes as many as it allows


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerJoined:
    """A host has joined, with the same fingerprint as ours."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Differs:
    """A host was refused: it is of another job, or its fingerprint differs."""

    rank: int
    what: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageReceived:
    """A message from a host."""

    rank: int
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The loss of a host that had joined."""

    rank: int
    cause: str
    heard_s: float = field(default=0.0, compare=False)
    """When it said something last, by the hub's clock."""


News = PeerJoined | Differs | MessageReceived | Lost


class _Client(Channel):
    """A connection that was accepted; of a host once it has a rank."""

    def __init__(
        self, sock: socket.socket, token: bytes, *, address: str, clock: Callable[[], float]
    ) -> None:
        super().__init__(sock, token, accepts=True, clock=clock)
        self.address = address
        self.came_s = self.heard_s
        self.rank: int | None = None


class Hub:
    """The connections of host 0 to the others, of ranks 1 and up. `turn` does not wait.

    Whoever does not know the token, says nothing, or says what no launcher says is dropped. Their
    number is limited, and so is what any of them can have us keep.

    Args:
      listener: where the others come; None where there are none.
      num_ranks: of all hosts; ours is 0.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        *,
        token: bytes,
        terms: Mapping[str, str],
        num_ranks: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._token = token
        self._terms = dict(terms)
        self._num_ranks = num_ranks
        self._max_unauthenticated = min(num_ranks + _SPARE_CLIENTS, _MAX_UNAUTHENTICATED)
        self._timeout_s = timeout_s
        self._clock = clock
        self._clients: dict[int, _Client] = {}
        self._members: dict[int, _Client] = {}
        self._news: list[News] = []
        self._checked_s = clock()
        self._turned_away: Counter[str] = Counter()
        self._selector = selectors.EpollSelector()
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return what is readable when there is something to do."""
        return self._selector.fileno()

    @property
    def present(self) -> frozenset[int]:
        """Return the ranks that are there."""
        return frozenset(self._members)

    @property
    def turned_away(self) -> tuple[str, ...]:
        """Return who came and could not join, and why."""
        return tuple(f"{who} ({n} times)" if n > 1 else who for who, n in self._turned_away.items())

    def address_of(self, rank: int) -> str:
        """Return the address from which a present host came."""
        return self._members[rank].address

    @property
    def next_s(self) -> float:
        """Return when `turn` is to be called at the latest."""
        return self._checked_s + CHECK_EVERY_S

    def turn(self) -> None:
        """Accept, read, write, and drop who is silent."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener and self._listener is not None:
                self._accept(self._listener)
            elif (client := self._clients.get(key.fd)) is not None:
                self._serve(client)
        if self._clock() >= self.next_s:
            self._check()

    def take_news(self) -> list[News]:
        """Return what has happened since the last call."""
        news, self._news = self._news, []
        return news

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a host; nothing happens if it is gone."""
        if (client := self._members.get(rank)) is not None:
            with self._guarding(client):
                client.send(message)

    def drop(self, rank: int, cause: str) -> None:
        """End the connection to a host; nothing happens if it is gone."""
        if (client := self._members.get(rank)) is not None:
            self._drop(client, cause)

    def end(self, message: Message) -> None:
        """Send a last message to all, wait a moment for them to hang up, and close everything."""
        for rank in self.present:
            self.send(rank, message)
        deadline_s = self._clock() + _GOODBYE_S
        while self.present and self._clock() < deadline_s:
            readable([self.fileno()], within_s=0.1)
            self.turn()
        self.close()

    def close(self) -> None:
        """Close everything."""
        for client in list(self._clients.values()):
            with contextlib.suppress(OSError, Violation):
                client.flush()
            client.close()
        self._clients.clear()
        self._members.clear()
        self._selector.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = listener.accept()
            except OSError:
                return  # there is nobody any more
            # A socket of both kinds writes an IPv4 address as one of IPv6.
            host = str(address[0]).removeprefix("::ffff:")
            client = _Client(sock, self._token, address=host, clock=self._clock)
            self._make_room()
            self._clients[client.fileno()] = client
            self._selector.register(client, selectors.EVENT_READ)
            with self._guarding(client):
                client.flush()

    def _make_room(self) -> None:
        """Drop the oldest of those who have not joined where there are too many."""
        unauthenticated = [client for client in self._clients.values() if client.rank is None]
        if len(unauthenticated) >= self._max_unauthenticated:
            self._drop(unauthenticated[0], "too many connections")

    def _serve(self, client: _Client) -> None:
        messages: list[Message] = []
        with self._guarding(client):
            messages = client.read()
        for message in messages:
            if client.rank is not None:
                self._news.append(MessageReceived(rank=client.rank, message=message))
            else:
                self._greet(client, message)

    def _greet(self, client: _Client, message: Message) -> None:
        try:
            hello = decode(Hello, message.get("hello"))
        except ValueError:
            self._drop(client, "no greeting")
            return
        rank, found = hello.rank, differences(self._terms, hello.terms)
        if not found and not 1 <= rank < self._num_ranks:
            found = [f"rank {rank} there, 0 to {self._num_ranks - 1} here"]
        if found:
            self._news.append(Differs(rank=rank, what=tuple(found)))
            self._refuse(client, reason="; ".join(found), differs=True)
        elif rank in self._members:
            taken = f"rank {rank} is that of {self._members[rank].address} already"
            self._refuse(client, reason=taken, differs=False)
        else:
            client.rank = rank
            self._members[rank] = client
            self._news.append(PeerJoined(rank=rank))
            with self._guarding(client):
                client.send({"welcome": rank})

    def _refuse(self, client: _Client, *, reason: str, differs: bool) -> None:
        with self._guarding(client):
            client.send({"refused": reason, "differs": differs})
        self._drop(client, reason)

    @contextlib.contextmanager
    def _guarding(self, client: _Client) -> Iterator[None]:
        """Drop a connection where the block fails."""
        try:
            yield
        except WrongToken:
            with contextlib.suppress(OSError, Violation):
                client.flush()
            self._drop(client, "a wrong token")
        except (OSError, Violation) as error:
            self._drop(client, str(error))

    def _drop(self, client: _Client, cause: str) -> None:
        if self._clients.pop(client.fileno(), None) is None:
            return
        self._selector.unregister(client)
        client.close()
        if client.rank is None:
            if len(self._turned_away) < _MAX_TURNED_AWAY:
                self._turned_away[f"{client.address}: {cause}"] += 1
        else:
            del self._members[client.rank]
            self._news.append(Lost(rank=client.rank, cause=cause, heard_s=client.heard_s))

    def _check(self) -> None:
        """Send heartbeats and what is left to send, and drop hosts that are silent for too long."""
        self._checked_s = now_s = self._clock()
        for client in list(self._clients.values()):
            if client.rank is None:
                if now_s - client.came_s > _GREETING_S:
                    self._drop(client, f"no greeting in {_GREETING_S:g} s")
            elif client.silent_s >= self._timeout_s:
                self._drop(client, f"no word for {self._timeout_s:g} s")
            else:
                with self._guarding(client):
                    client.beat()
                    client.flush()


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address alone; raise OSError where it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


_RETRY_S = 0.2
_CONNECT_S = 1.0  # then again: a packet that was lost is sent anew sooner than the system would


class Member(Channel):
    """A connection to host 0 that has not ended until `lost` says why."""

    def __init__(
        self, sock: socket.socket, token: bytes, *, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(sock, token, accepts=False, clock=clock)
        self._timeout_s = timeout_s
        self.messages: list[Message] = []
        self.lost = ""

    def turn(self) -> None:
        """Read, write, send a heartbeat if it is time, and notice if host 0 is silent."""
        with self._noticing_loss():
            self.messages += self.read()
            self.beat()
            self.flush()
            if self.silent_s >= self._timeout_s:
                raise TimeoutError(f"no word for {self._timeout_s:g} s")

    def take_messages(self) -> list[Message]:
        """Return what host 0 has said since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: Message) -> None:
        """Send a message; nothing happens if host 0 is gone."""
        with self._noticing_loss():
            super().send(message)

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Violation) as error:
            self.lost = self.lost or str(error)


@dataclass(frozen=True, slots=True)
class Joining:
    """How this host comes to host 0.

    Attributes:
      host, port: where host 0 listens.
      source: the address of this host; None for the system's choice.
      rank, terms: of this host.
      timeout_s: after how long without a word host 0 counts as gone.
    """

    host: str
    port: int
    source: str | None = field(default=None, kw_only=True)
    token: bytes = field(kw_only=True, repr=False)
    rank: int = field(kw_only=True)
    terms: Mapping[str, str] = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)

    def join(
        self, *, within_s: float, wake_fds: Sequence[int] = (), is_over: Callable[[], bool]
    ) -> Member | None:
        """Try until it works; return None once `is_over`, which each of `wake_fds` has us ask.

        Raises:
            StartupTimeout: host 0 has not let us in; the message says where it was looked for.
            UsageError: it has another token, or this host differs from it.
        """
        began_s, why = self.clock(), ""
        while not is_over():
            try:
                return self.attempt(wake_fds)
            except (OSError, Violation) as error:
                why = str(getattr(error, "strerror", None) or error)
            waited_s = self.clock() - began_s
            if waited_s >= within_s:
                raise StartupTimeout(
                    f"{join(self.host, self.port)}: host 0 was not reached in {waited_s:.0f} s: "
                    f"{why}. Fix: start it, see that its name and port are right and that no "
                    "firewall is between, or raise --startup_timeout_s"
                )
            readable(wake_fds, within_s=min(_RETRY_S, within_s - waited_s))
        return None

    def attempt(self, wake_fds: Sequence[int] = ()) -> Member:
        """Try once; a descriptor that can be read ends the wait for an answer.

        Raises OSError and `Violation` where it is worth another try, and UsageError where host 0
        has another token, or this host differs from it.
        """
        family, address = resolve(self.host, self.port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self.source is not None and (":" in self.source) == (family == socket.AF_INET6):
                sock.bind((self.source, 0))
            sock.settimeout(_CONNECT_S)
            sock.connect(address)
            member = Member(sock, self.token, timeout_s=self.timeout_s, clock=self.clock)
            self._greet(member, wake_fds)
        except BaseException:
            sock.close()
            raise
        return member

    def _greet(self, member: Member, wake_fds: Sequence[int]) -> None:
        """Report who we are; return once host 0 has let us in."""
        deadline_s = self.clock() + _GREETING_S
        has_greeted = False
        while self.clock() < deadline_s:
            ready = readable((member.fileno(), *wake_fds), within_s=_RETRY_S)
            if member.fileno() not in ready:
                if ready:
                    raise TimeoutError("asked to stop")
                continue
            try:
                messages = member.read()
            except WrongToken:
                raise UsageError(
                    "token",
                    received=f"one that {join(self.host, self.port)} does not have",
                    expected="the same on all hosts of the job",
                    fix=f"give all hosts the same {TOKEN_VARIABLE} or {TOKEN_FLAG}",
                    code="wrong-token",
                ) from None
            if member.is_open and not has_greeted:
                hello = Hello(rank=self.rank, terms=dict(self.terms))
                member.send({"hello": encode(hello)})
                has_greeted = True
            for number, message in enumerate(messages):
                if "welcome" in message:
                    member.messages = messages[number + 1 :]
                    return
                if "refused" in message:
                    raise self._refusal(message)
        raise TimeoutError("it does not answer")

    def _refusal(self, message: Message) -> Exception:
        if not message.get("differs"):
            return Violation(str(message["refused"]))
        return UsageError(
            f"this host, for {join(self.host, self.port)}",
            received=str(message["refused"]),
            expected="the same on all hosts",
            fix="start the same line, of the same installation, on each of them",
            code="hosts-differ",
        )


def readable(fds: Iterable[int], *, within_s: float) -> list[int]:
    """Return which descriptors can be read, of any number, after `within_s` at the latest."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(within_s * 1000)]
