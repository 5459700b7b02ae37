"""Setup of the ring: workers connect to their neighbours, or agree not to use it.

Each worker listens at a port that the system gives it, tells it the others by a collective of
TensorFlow's, and connects to the next. Workers of one machine meet at a socket of that machine,
which costs the processor less. Who does not know a worker's secret is not let in.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from tfdist.cluster.address import split_address
from tfdist.strategy import rendezvous
from tfdist.strategy.rendezvous import own_versions, require_same_versions

_LOG = logging.getLogger(__name__)
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")
_ROW = struct.Struct(f"<I{_SECRET_BYTES}s64s")
_HELLO_S = 1.0  # how long a client may take to say who it is
_BUFFER_BYTES = 4 * 2**20
# A machine that has vanished is noticed after about half a minute by who waits for its part. No
# limit for what is sent (TCP_USER_TIMEOUT): it would end with a worker that is only slow to read.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))

Sum = Callable[[np.ndarray], np.ndarray]


class _Row(NamedTuple):
    """A worker, as the others have to know it."""

    port: int
    secret: bytes
    versions: str


def connect(
    rank: int,
    addresses: Sequence[str],
    names: Sequence[str],
    *,
    total: Sum,
    timeout_s: float,
    ports: range | None = None,
    stride: int = 1,
) -> tuple[socket.socket, socket.socket] | None:
    """Return connections to the next worker and the previous one; the last one's next is the first.

    None in every worker if one cannot connect. A collective.

    Args:
      rank: this worker's place, from 0.
      addresses: ``host:port`` of each worker; the host is where its neighbours look for it.
      names: what to call each worker in a message.
      total: sums an int32 vector of the same length over the workers. A collective.
      timeout_s: how long to wait for both neighbours.
      ports: where to listen for workers of other machines; None for a port that the system gives.
      stride: how many places on the next worker is.
    """
    size, secret = len(addresses), secrets.token_bytes(_SECRET_BYTES)
    hosts = [split_address(address)[0] for address in addresses]
    with contextlib.ExitStack() as stack:
        near, far = _listen_locally(secret), _listen_for_others(ports)
        listeners = [stack.enter_context(one) for one in (near, far) if one]
        mine = _Row(far.getsockname()[1] if far else 0, secret, own_versions())
        table = _exchanged(mine, rank, size, total=total)
        for name, row in zip(names, table, strict=True):
            require_same_versions(row.versions, task=name, own=mine.versions, own_task=names[rank])
        after = (rank + stride) % size
        deadline_s = time.monotonic() + timeout_s
        place = f"{hosts[after]}:{table[after].port}"
        hello = _HELLO.pack(table[after].secret, rank)
        to_next = _connect(hosts[after], table[after].port, hello, deadline_s)
        expected = _HELLO.pack(secret, (rank - stride) % size)
        from_previous = accepted(listeners, [expected], deadline_s).get(expected)
    reached = np.zeros(size, np.int32)
    reached[rank] = to_next is not None and from_previous is not None
    reached = total(reached)
    if reached.all() and to_next is not None and from_previous is not None:
        return to_next, from_previous
    if to_next is None:
        _LOG.warning("%s cannot be reached from %s at %s", names[after], names[rank], place)
    for end in (to_next, from_previous):
        if end is not None:
            end.close()
    return None


def _exchanged(mine: _Row, rank: int, size: int, *, total: Sum) -> list[_Row]:
    """Return the row of each worker. A collective."""
    table = np.zeros((size, _ROW.size // 4), np.int32)
    packed = _ROW.pack(mine.port, mine.secret, mine.versions.encode())
    table[rank] = np.frombuffer(packed, np.int32)
    rows = [_ROW.unpack(row.tobytes()) for row in total(table.reshape(-1)).reshape(table.shape)]
    return [_Row(port, secret, text.rstrip(b"\0").decode()) for port, secret, text in rows]


def _listen_for_others(ports: range | None) -> socket.socket | None:
    """Listen for workers of other machines; None where no port is free."""
    for port in ports or (0,):
        with contextlib.suppress(OSError):
            return rendezvous.listen(port)
    return None


def _listen_locally(secret: bytes) -> socket.socket:
    """Listen at a socket of this machine."""
    near = socket.socket(socket.AF_UNIX)
    near.bind(_local_name(secret))
    near.listen()
    return near


def _local_name(secret: bytes) -> bytes:
    """Return a name that others can see, and that does not tell the secret."""
    return b"\0tfdist-" + hashlib.sha256(b"place" + secret).hexdigest()[:32].encode()


def _connect(host: str, port: int, hello: bytes, deadline_s: float) -> socket.socket | None:
    near = socket.socket(socket.AF_UNIX)
    try:
        near.connect(_local_name(hello[:_SECRET_BYTES]))
        near.sendall(hello)
        return _prepared(near)
    except OSError:
        near.close()
    try:
        remaining_s = max(deadline_s - time.monotonic(), 0.1)
        far = socket.create_connection((host, port), timeout=remaining_s)
        far.sendall(hello)
        return _prepared(far)
    except OSError as error:
        _LOG.debug("%s:%d: %s", host, port, error)
        return None


def accepted(
    listeners: Sequence[socket.socket], expected: Collection[bytes], deadline_s: float
) -> dict[bytes, socket.socket]:
    """Return the connections that say each of `expected`, all as long; others are closed.

    They are heard one after the other: a client that says nothing delays the others by
    `_HELLO_S`. Who has not come by the deadline is left out.
    """
    size = len(next(iter(expected)))
    found: dict[bytes, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, listener)
        while len(found) < len(expected) and (remaining_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                with contextlib.suppress(OSError):  # it has gone already
                    client, _ = key.data.accept()
                    client.settimeout(min(_HELLO_S, remaining_s))
                    hello = _received(client, size)
                    known = any(hmac.compare_digest(hello, each) for each in expected)
                    if known and hello not in found:
                        found[hello] = _prepared(client)
                    else:
                        client.close()
    return found


def _received(client: socket.socket, count: int) -> bytes:
    """Return the first `count` bytes that a client sends; less where no more come in time."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < count and (more := client.recv(count - len(data))):
            data += more
    return data


def _prepared(end: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEP_ALIVE:
            end.setsockopt(socket.IPPROTO_TCP, option, seconds)
    return end
