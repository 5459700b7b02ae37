"""Connection between two hosts: wire protocol and socket.

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

import hmac
import json
import secrets
import socket
from collections.abc import Callable

from tfdist.launch.messages import Message

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
