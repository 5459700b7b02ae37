"""What comes of connecting to the other hosts: who answers, how soon, and how much goes through."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfdist.preflight.door import MAX_PIECE_BYTES, PING_BYTES, host_of
from tfdist.preflight.facts import Host, Reach, Wire
from tfdist.preflight.wire import take

_CONNECT_S = 2.0
_TALK_S = 5.0
_REACH_S = 20.0
_AT_ONCE = 64
_MAX_GREETING_BYTES = 80
_PINGS = 50
_FIRST_PIECE_BYTES = 64 << 10
_LONG_ENOUGH_S = 0.1  # for a piece, to be a measure of what goes through
_MEASURE_S = 1.0


def reach(
    hosts: Sequence[Host], *, present: Sequence[int], index: int, fingerprint: str
) -> tuple[Reach, ...]:
    """Returns who answers at each port of each other host that is there.

    Many ports at which nobody answers take long; those that are not tried in time are left out.
    """
    deadline_s = time.monotonic() + _REACH_S
    asked = [(other, port) for other in present if other != index for port in hosts[other].ports]

    def one(place: tuple[int, int]) -> Reach | None:
        other, port = place
        if time.monotonic() > deadline_s:
            return None
        try:
            with connected(hosts[other].name, port) as (_, line):
                answered = host_of(line, fingerprint)
            return Reach(host=other, port=port, answered=answered)
        except OSError as error:
            return Reach(host=other, port=port, error=said(error))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(reach for reach in pool.map(one, asked) if reach is not None)


def measure(address: str, port: int, *, host: int) -> Wire:
    """Returns how fast a plain connection to a host is, which has answered before."""
    try:
        latency_s = _latency_s(address, port)
    except OSError as error:
        return Wire(host=host, error=f"no answer to {PING_BYTES} bytes: {said(error)}")
    try:
        speed = _bytes_per_s(address, port)
    except OSError as error:
        lost = f"{_FIRST_PIECE_BYTES >> 10} KiB do not come through: {said(error)}"
        return Wire(host=host, latency_s=latency_s, error=lost)
    return Wire(host=host, latency_s=latency_s, bytes_per_s=speed)


@contextlib.contextmanager
def connected(address: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Connects, and yields the connection and the line with which it was greeted."""
    bare = address.strip("[]")
    with socket.create_connection((bare, port), timeout=_CONNECT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock, _line(sock)


def said(error: OSError) -> str:
    """Returns what an error says, without its number."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()


def _line(sock: socket.socket) -> str:
    """Returns the first line that comes, or what came of it in time: others need not greet."""
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and len(data) < _MAX_GREETING_BYTES:
            piece = sock.recv(1)
            if not piece:
                break
            data += piece
    return data.decode(errors="replace").rstrip("\n")


def _latency_s(address: str, port: int) -> float:
    """Returns the shortest time that a few bytes took there and back."""
    best_s = float("inf")
    deadline_s = time.monotonic() + _MEASURE_S
    with connected(address, port) as (sock, _):
        sock.settimeout(_TALK_S)
        sock.sendall(b"echo\n")
        for _ in range(_PINGS):
            start = time.perf_counter()
            sock.sendall(bytes(PING_BYTES))
            take(sock, PING_BYTES)
            best_s = min(best_s, time.perf_counter() - start)
            if time.monotonic() > deadline_s:
                break
    return best_s


def _bytes_per_s(address: str, port: int) -> float:
    """Returns the better speed of two pieces that take long enough to tell.

    Smaller ones come first, until it is known how large these are. What they say is left out: the
    first of them may go through a limit that has been idle as if there were none.
    """
    size = _FIRST_PIECE_BYTES
    deadline_s = time.monotonic() + _MEASURE_S
    with connected(address, port) as (sock, _):
        sock.settimeout(_TALK_S)
        sock.sendall(b"sink\n")
        while True:
            took_s = _send_piece(sock, size)
            is_long = took_s > _LONG_ENOUGH_S or time.monotonic() > deadline_s
            if is_long or size >= MAX_PIECE_BYTES:
                return size / min(took_s, _send_piece(sock, size))
            size *= 2


def _send_piece(sock: socket.socket, size: int) -> float:
    """Returns how long it took until the other side had all of it."""
    data = bytes(size)
    start = time.perf_counter()
    sock.sendall(size.to_bytes(8, "big"))
    sock.sendall(data)
    take(sock, 8)
    return time.perf_counter() - start
