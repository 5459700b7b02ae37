"""Rendezvous of the hosts: the hub of host 0, the member on each other host, and their protocol.

What `Link` does is pure, so that its tests need no socket. First each side shows that it knows the
token, without sending it:

    accepting side    magic with the version of the protocol, its nonce
    connecting side   its nonce, HMAC(token, "connects", both nonces)
    accepting side    HMAC(token, "accepts", both nonces); zeros where the other's was wrong

Then frames of JSON objects, in both directions, each with the HMAC of its side, number and text
under a key of this connection alone: nothing can be put in, repeated or changed on the way. It can
be read on the way. Every size is bounded, and nothing is parsed before its sender is known.

Why not `multiprocessing.connection`: under Python 3.11 its handshake is HMAC-MD5, and it yields no
key to seal messages with. Its reads and writes block: a host whose network is cut in the middle of
a message would stop the supervisor of all others, and a thread for each connection would fork
unsafely, as tasks are started with `preexec_fn`. `accept` waits for ever for a peer that says
nothing (https://github.com/python/cpython/issues/123736); `Client` has no time-out and no source
address.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from tfdist.cluster.address import join
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.events import Hello, Message, decode, encode
from tfdist.launch.multihost.agreement import TOKEN_FLAG, TOKEN_VARIABLE, differences

MAX_FRAME_BYTES = 4 << 20
"""Of one message: the cluster of 10,000 tasks is a tenth of it."""

_MAGIC = b"tfdist rendezvous 3\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_SIZE_BYTES = 4
_REFUSED = bytes(_PROOF_BYTES)


class Violation(Exception):
    """The other side sends what no launcher would send; the connection is of no use."""


class WrongToken(Violation):
    """The two sides do not have the same token."""


class Link:
    """One end of a connection: `receive` takes what came, `outgoing` is what is to be sent."""

    def __init__(self, token: bytes, *, accepts: bool) -> None:
        self._token = token
        self._accepts = accepts
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonces = b""
        self._key: bytes | None = None
        self._incoming = bytearray()
        self._sent = self._received = 0
        self.outgoing = bytearray(_MAGIC + self._nonce if accepts else b"")

    @property
    def is_open(self) -> bool:
        """Return whether the other side has shown that it knows the token."""
        return self._key is not None

    def send(self, message: Message) -> None:
        """Add a message to what is to be sent; only once the link is open."""
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes")
        seal = self._seal(payload, accepting=self._accepts, number=self._sent)
        self._sent += 1
        self.outgoing += len(payload).to_bytes(_SIZE_BYTES, "big") + seal + payload

    def receive(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes; raise `Violation`."""
        self._incoming += data
        greet = self._greet_as_host if self._accepts else self._greet_as_client
        if not self.is_open and not greet():
            return []
        messages = []
        while (payload := self._next_payload()) is not None:
            messages.append(_parsed(payload))
        return messages

    def _greet_as_host(self) -> bool:
        """Go on with the greeting; return whether it is done."""
        have, whole = len(self._incoming), _NONCE_BYTES + _PROOF_BYTES
        if have > whole:
            raise Violation("more than a greeting")
        if have < whole:
            return False
        nonce, proof = self._take(_NONCE_BYTES), self._take(_PROOF_BYTES)
        self._nonces = self._nonce + nonce
        if not hmac.compare_digest(proof, self._prove(b"connects")):
            self.outgoing += _REFUSED
            raise WrongToken("a wrong token")
        self.outgoing += self._prove(b"accepts")
        self._key = self._prove(b"session")
        return True

    def _greet_as_client(self) -> bool:
        if not self._nonces:
            start = bytes(self._incoming[: len(_MAGIC)])
            if start != _MAGIC[: len(start)]:
                raise Violation("no launcher of this version of tfdist listens there")
            if len(self._incoming) < len(_MAGIC) + _NONCE_BYTES:
                return False
            self._take(len(_MAGIC))
            self._nonces = self._take(_NONCE_BYTES) + self._nonce
            self.outgoing += self._nonce + self._prove(b"connects")
        if len(self._incoming) < _PROOF_BYTES:
            return False
        proof = self._take(_PROOF_BYTES)
        if not hmac.compare_digest(proof, self._prove(b"accepts")):
            raise WrongToken("it has another token")
        self._key = self._prove(b"session")
        return True

    def _prove(self, what: bytes) -> bytes:
        return hmac.digest(self._token, what + b"\0" + self._nonces, "sha256")

    def _seal(self, payload: bytes, *, accepting: bool, number: int) -> bytes:
        assert self._key is not None, "a message before the greeting"
        head = b"%d %d %d\n" % (accepting, number, len(payload))
        return hmac.digest(self._key, head + payload, "sha256")

    def _next_payload(self) -> bytes | None:
        if len(self._incoming) < _SIZE_BYTES:
            return None
        size = int.from_bytes(self._incoming[:_SIZE_BYTES], "big")
        if size > MAX_FRAME_BYTES:
            raise Violation(f"a message of {size} bytes")
        if len(self._incoming) < _SIZE_BYTES + _PROOF_BYTES + size:
            return None
        self._take(_SIZE_BYTES)
        seal, payload = self._take(_PROOF_BYTES), self._take(size)
        wanted = self._seal(payload, accepting=not self._accepts, number=self._received)
        if not hmac.compare_digest(seal, wanted):
            raise Violation("a message that was changed on its way")
        self._received += 1
        return payload

    def _take(self, count: int) -> bytes:
        taken = bytes(self._incoming[:count])
        del self._incoming[:count]
        return taken


def _parsed(payload: bytes) -> Message:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Violation("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise Violation("a message that is no object")
    return message


BEAT_EVERY_S = 1.0
"""How often a launcher shows that it is alive when it has nothing else to say."""

_LATE_S = 2.0  # between two looks: then it was we who were held up
_READ_BYTES = 1 << 16
_MAX_READS = 64
_MAX_BACKLOG_BYTES = 32 << 20

_BEAT = "beat"


class Channel(Link):
    """A connection to another launcher. Errors of the network are OSError, the rest `Violation`."""

    def __init__(
        self, sock: socket.socket, token: bytes, *, accepts: bool, clock: Callable[[], float]
    ) -> None:
        super().__init__(token, accepts=accepts)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._clock = clock
        self.heard_s = self._sent_s = self._looked_s = clock()
        """When something came last."""

    def fileno(self) -> int:
        """Return what to watch."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, now or when the network takes it."""
        super().send(message)
        self._sent_s = self._clock()
        self.flush()

    def beat(self) -> None:
        """Send a sign of life if it is time for one."""
        if self.is_open and self._clock() - self._sent_s >= BEAT_EVERY_S:
            self.send({_BEAT: True})

    def keep_alive(self, timeout_s: float) -> None:
        """Send what is left to send, and a sign of life if it is time for one.

        Raises:
            TimeoutError: nothing has come for `timeout_s`; time in which nobody looked does not
                count.
        """
        now_s = self._clock()
        if now_s - self._looked_s > _LATE_S:
            self.heard_s = now_s
        self._looked_s = now_s
        if now_s - self.heard_s >= timeout_s:
            raise TimeoutError(f"no word for {timeout_s:g} s")
        self.beat()
        self.flush()

    def read(self) -> list[Message]:
        """Return the messages that have come; raise ConnectionError at the end of them."""
        messages: list[Message] = []
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""  # reset: as good as closed
            if not data:
                if messages:  # they come first; the end is read again
                    return messages
                raise ConnectionError("it has closed the connection")
            self.heard_s = self._clock()
            messages += [message for message in self.receive(data) if _BEAT not in message]
        self.flush()  # what the greeting answers
        return messages

    def flush(self) -> None:
        """Write what the network takes without waiting."""
        while self.outgoing:
            try:
                del self.outgoing[: self._socket.send(self.outgoing[:_READ_BYTES])]
            except BlockingIOError:
                break
        if len(self.outgoing) > _MAX_BACKLOG_BYTES:
            raise Violation("it takes no more messages")

    def close(self) -> None:
        """Close the connection; what the network has been given is still sent."""
        self._socket.close()


def resolve(host: str, port: int = 0) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return family and address of a host; raise OSError, also for a name that is unknown.

    Of a name with both, that of IPv4: the system puts them in an order that follows from its own
    routes, and host 0 listens at one of them.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


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
            else:
                with self._guarding(client):
                    client.keep_alive(self._timeout_s)


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
            self.keep_alive(self._timeout_s)

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
    _: KW_ONLY
    source: str | None = None
    token: bytes = field(repr=False)
    rank: int
    terms: Mapping[str, str]
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

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
