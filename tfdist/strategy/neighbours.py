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
from typing import Any, NamedTuple

import numpy as np

from tfdist.cluster.address import check_address, split_address
from tfdist.cluster.address import join as join_address
from tfdist.strategy.rendezvous import own_versions, require_same_versions
from tfdist.strategy.ring import Ring

_LOG = logging.getLogger(__name__)
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")
_ROW = struct.Struct(f"<I{_SECRET_BYTES}s64s")
_MAX_CLIENTS = 64  # who have not said yet who they are
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


def join(
    rank: int,
    addresses: Sequence[str],
    names: Sequence[str],
    *,
    total: Sum,
    timeout_s: float,
    ports: range | None = None,
) -> Ring | None:
    """Return this worker's place in a ring of all, None in every worker if one cannot join.

    A collective.

    Args:
      rank: this worker's place, from 0.
      addresses: ``host:port`` of each worker; the host is where its neighbours look for it.
      names: what to call each worker in a message.
      total: sums an int32 vector of the same length over the workers. A collective.
      timeout_s: how long to wait for both neighbours.
      ports: where to listen for workers of other machines; None for a port that the system gives.
    """
    ends = connect(rank, addresses, names, total=total, timeout_s=timeout_s, ports=ports)
    if ends is not None:
        return Ring(rank, names, ends)
    if rank == 0:
        _LOG.warning(
            "not every worker reaches the next one beside TensorFlow's own port: gradients go by"
            " TensorFlow's collectives, which on CPUs is slower"
        )
    return None


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

    The next one is `stride` places on. None in every worker if one cannot connect. A collective;
    other arguments as of `join`.
    """
    size, secret = len(addresses), secrets.token_bytes(_SECRET_BYTES)
    hosts = [split_address(address)[0] for address in addresses]
    with contextlib.ExitStack() as stack:
        near, far = _on_this_machine(secret), _for_other_machines(hosts[rank], ports)
        listeners = [stack.enter_context(one) for one in (near, far) if one is not None]
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


def _for_other_machines(host: str, ports: range | None) -> socket.socket | None:
    """Listen at the job's own interface if it is known; None where no port is free.

    It is not where a machine's own name leads to loopback there, as under Debian (127.0.1.1).
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if _is_loopback(str(address[0])) and not _is_loopback(host):
            raise OSError(f"{host} is {address[0]} here, which no other machine reaches")
        socket.create_server(address[:2], family=family).close()
        where, dual = str(address[0]), False
    except OSError:  # a name that stands for this task but is no address of this machine's
        where, dual = "", socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
    for port in (0,) if ports is None else ports:
        with contextlib.suppress(OSError):
            return socket.create_server((where, port), family=family, dualstack_ipv6=dual)
    return None


def _is_loopback(host: str) -> bool:
    return check_address(join_address(host, 1), where="host")[0] == "localhost"


def _on_this_machine(secret: bytes) -> socket.socket | None:
    """Listen at a socket of this machine; None where the system has none of that kind."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        near = stack.enter_context(socket.socket(socket.AF_UNIX))
        near.bind(_place_on_this_machine(secret))
        near.listen()
        stack.pop_all()
        return near
    return None


def _place_on_this_machine(secret: bytes) -> bytes:
    """Return a name that others can see, and that does not tell the secret."""
    return b"\0tfdist-" + hashlib.sha256(b"place" + secret).hexdigest()[:32].encode()


def _connect(host: str, port: int, hello: bytes, deadline_s: float) -> socket.socket | None:
    near = socket.socket(socket.AF_UNIX)
    try:
        near.connect(_place_on_this_machine(hello[:_SECRET_BYTES]))
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

    All are read at once: a client that sends nothing, or a byte now and then, delays nobody. Who
    has not come by the deadline is left out.
    """
    size = len(next(iter(expected)))
    received: dict[socket.socket, bytes] = {}
    found: dict[bytes, socket.socket] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_ends:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while len(found) < len(expected) and (remaining_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                end: Any = key.fileobj
                if end in listeners:
                    end = _client(end)
                    if end is not None:
                        received[open_ends.enter_context(end)] = b""
                        selector.register(end, selectors.EVENT_READ)
                elif end in received:
                    data = _received(end, size - len(received[end]))
                    received[end] += data
                    for hello in expected:
                        if hello not in found and hmac.compare_digest(received[end], hello):
                            found[hello] = _prepared(end.dup())  # what is open here is closed
                    if not data or len(received[end]) == size:
                        _dismiss(end, received, selector)
            while len(received) > _MAX_CLIENTS + len(expected):
                _dismiss(next(iter(received)), received, selector)
    return found


def _client(listener: socket.socket) -> socket.socket | None:
    try:
        client, _ = listener.accept()
    except OSError:  # it has gone already
        return None
    client.setblocking(False)
    return client


def _received(end: socket.socket, count: int) -> bytes:
    try:
        return end.recv(count)
    except OSError:
        return b""


def _dismiss(
    client: socket.socket, received: dict[socket.socket, bytes], selector: selectors.BaseSelector
) -> None:
    del received[client]
    selector.unregister(client)
    client.close()


def _prepared(end: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEP_ALIVE:
            end.setsockopt(socket.IPPROTO_TCP, option, seconds)
    return end
