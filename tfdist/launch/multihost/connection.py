"""Connection between two hosts: wire protocol, socket and messages.

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

import dataclasses
import errno
import functools
import hmac
import json
import secrets
import socket
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tfdist.cluster import ClusterSpec, Task
from tfdist.launch.events import (
    AskForStacks,
    Beat,
    Ended,
    Event,
    KillOne,
    Raised,
    ShowFailure,
    Signal,
    Start,
    Started,
    StopRequest,
    TaskAction,
    task_of,
)
from tfdist.phases import PendingWork

Message = dict[str, Any]

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
        if not self.is_open and not self._greet():
            return []
        messages = []
        while (payload := self._next_payload()) is not None:
            messages.append(_parsed(payload))
        return messages

    def _greet(self) -> bool:
        """Go on with the greeting; return whether it is done."""
        return self._greet_as_host() if self._accepts else self._greet_as_client()

    def _greet_as_host(self) -> bool:
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

    @property
    def silent_s(self) -> float:
        """Return how long nothing has come; the time in which nobody looked does not count."""
        now_s = self._clock()
        if now_s - self._looked_s > _LATE_S:
            self.heard_s = now_s
        self._looked_s = now_s
        return now_s - self.heard_s

    def send(self, message: Message) -> None:
        """Send a message, now or when the network takes it."""
        super().send(message)
        self._sent_s = self._clock()
        self.flush()

    def beat(self) -> None:
        """Send a sign of life if it is time for one."""
        if self.is_open and self._clock() - self._sent_s >= BEAT_EVERY_S:
            self.send({_BEAT: True})

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
                    return _without_beats(messages)
                raise ConnectionError("it has closed the connection")
            self.heard_s = self._clock()
            messages += self.receive(data)
        self.flush()  # what the greeting answers
        return _without_beats(messages)

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


def _without_beats(messages: list[Message]) -> list[Message]:
    return [message for message in messages if _BEAT not in message]


def resolve(host: str, port: int = 0) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return family and address of a host; raise OSError, also for a name that is unknown.

    Of a name with both, that of IPv4: the system puts them in an order that follows from its own
    routes, and host 0 listens at one of them.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # as of a label that is too long
        raise OSError(errno.EINVAL, f"no name: {error}") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


# Messages between the launchers of a job: JSON objects, the larger ones typed dataclasses.
#
# A host that comes, and host 0 when it has come::
#
#     {"hello": Hello}                           its first message
#     {"welcome": rank}                          it is in
#     {"refused": reason, "differs": bool}       it is not; where it differs it need not try again
#
# Host 0 to another::
#
#     {"attempt": Attempt}                the next attempt; its tasks are not started yet
#     {"action": kind, ...}               what to do with a task
#     {"finish": true}                    end what the attempt has left
#     {"end": exit code, "why": text}     the job is over
#
# Another to host 0::
#
#     {"ready": ports}                          ready for an attempt
#     {"event": kind, ..., "lines": [...]}      what has happened; of a task's end, its last lines
#     {"states": {task: state}}                 states of the tasks' processes
#     {"lines": [...], "task": task}            the stacks that were asked for
#
# `encode` and `decode` are for any frozen dataclass, and check every type; the doctor sends its
# facts by them too. A `Task` goes by its name. Moments go as ages, since the clocks of two hosts
# differ.

NO_SENSE = (ValueError, KeyError, TypeError, OverflowError)
"""Exceptions of reading a message that makes no sense."""

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a dataclass, or what may be in one, as JSON has it."""
    if isinstance(value, Task):
        return str(value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}


def decode(kind: type[T], value: object) -> T:
    """Return the `kind` that `value` encodes, what is missing having its default.

    Raises:
        ValueError: something is of another type, or has a name that `kind` does not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"no {kind.__name__}")
    hints = _hints(kind)
    if unknown := set(value) - set(hints):
        raise ValueError(f"{kind.__name__} with {sorted(map(str, unknown))[0]}")
    try:
        return kind(**{name: _one(hints[name], item) for name, item in value.items()})
    except TypeError:
        raise ValueError(f"{kind.__name__} without some of its parts") from None


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _one(hint: Any, value: object) -> object:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _one(next(kind for kind in inside if kind is not types.NoneType), value)
    if origin is tuple:
        return _several(inside, value)
    if origin is dict and isinstance(value, dict):
        return {_one(inside[0], key): _one(inside[1], item) for key, item in value.items()}
    if hint is Task:
        return task_of(value)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value)
    if hint is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    if type(value) is not (origin or hint):
        raise ValueError(f"{type(value).__name__} for {hint}")
    return value


def _several(inside: tuple[Any, ...], value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{type(value).__name__} for a list")
    if inside[-1] is Ellipsis:
        return tuple(_one(inside[0], item) for item in value)
    if len(value) != len(inside):
        raise ValueError(f"{len(value)} parts of {len(inside)}")
    return tuple(_one(kind, item) for kind, item in zip(inside, value, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First message of a host, about itself."""

    rank: int
    terms: dict[str, str]
    """What must be the same on all hosts, the version of tfdist among it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Plan of the next attempt, for a host other than 0."""

    number: int
    restarts: int
    """How often the launcher has started the job again before."""
    run_dir: str
    cluster: ClusterSpec
    tasks: tuple[Task, ...]
    """Those of this host."""
    hosts: dict[str, str]
    """The host of each task of the job, by the task's name."""


_EVENTS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Started, Raised, Beat, Ended, StopRequest)
}
_ACTIONS: dict[str, type[TaskAction]] = {
    kind.__name__.lower(): kind for kind in (Start, Signal, KillOne, AskForStacks, ShowFailure)
}


def encode_action(action: TaskAction) -> Message:
    """Return an action as a message."""
    return {"action": type(action).__name__.lower(), **encode(action)}


def decode_action(message: Message) -> TaskAction:
    """Return the action of a message; raise one of `NO_SENSE` if it is none."""
    kind = _ACTIONS[message["action"]]
    return decode(kind, {name: value for name, value in message.items() if name != "action"})


def encode_event(event: Event, *, now_s: float) -> Message:
    """Return an event as a message, its moments as ages."""
    return {"event": type(event).__name__.lower(), **encode(_ages(event, now_s=now_s))}


def decode_event(message: Message, *, now_s: float) -> Event:
    """Return the event of a message; raise one of `NO_SENSE` if it is none."""
    return _ages(event_of(message), now_s=now_s)


def event_of(note: Message) -> Event:
    """Return the event of a task's own note, which has moments; raise one of `NO_SENSE`."""
    kind = _EVENTS[note["event"]]
    return decode(kind, {name: value for name, value in note.items() if name in _hints(kind)})


def _ages(event: T, *, now_s: float) -> T:
    """Return an event with ages for moments, or with moments for ages."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(event):  # type: ignore[arg-type]  # all of them are dataclasses
        value = getattr(event, field.name)
        if isinstance(value, PendingWork):
            changes[field.name] = _ages(value, now_s=now_s)
        elif field.name.endswith("_s") and value is not None:
            changes[field.name] = now_s - value
    return dataclasses.replace(event, **changes)  # type: ignore[type-var]
