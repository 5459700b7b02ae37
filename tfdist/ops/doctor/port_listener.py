"""Plain connections between the hosts: listening, reaching and measuring."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from tfdist.cluster.ports import ephemeral_ports
from tfdist.ops.doctor.facts import Host, PortFacts, Reach, Wire, reason_of


def take(sock: socket.socket, count: int, *, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Return exactly `count` bytes; ConnectionError at an early end, TimeoutError when late."""
    timeout_s = sock.gettimeout()
    deadline_s = None if timeout_s is None else clock() + timeout_s
    data = bytearray()
    while len(data) < count:
        if deadline_s is not None and clock() > deadline_s:
            raise TimeoutError("timed out")
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


# Preflight listener: answers on the ports of this host's tasks during the preflight.
#
# It listens on every interface, as TensorFlow's servers will: what is free, or reached, for one is
# so for the other. It says whose port this is, and takes small questions; nothing it is sent is
# run.

MAX_PIECE_BYTES = 64 << 20

PROTOCOL = "tfdist doctor 2"
MEET, _SINK = b"meet\n", b"sink\n"
"""Requests of a client, all of one length; after `MEET` it is the launchers' protocol."""

_BACKLOG = 256
_MAX_CLIENTS = 256
_PATIENCE_S = 10.0
_SPARE_PORTS = 3
_AGAIN_S = 0.2


class PortListener:
    """Listener on ports; who asks to meet is in `clients`, with its address.

    Args:
      greeting: the line that whoever connects gets first.
      ports: of this host's tasks.
      spare: whether to listen at one of the ports after the last if none of them is free.
    """

    def __init__(self, greeting: str, ports: Sequence[int], *, spare: bool = False) -> None:
        self._greeting = greeting.encode() + b"\n"
        self._listeners: list[socket.socket] = []
        self._is_closed = threading.Event()
        self._room = threading.BoundedSemaphore(_MAX_CLIENTS)
        self.clients: queue.SimpleQueue[tuple[socket.socket, str]] = queue.SimpleQueue()
        self.ports = tuple(self._open(port) for port in ports)
        if spare and not self._listeners:
            for port in spare_ports(ports):
                if not self._open(port).error:
                    break

    def __enter__(self) -> PortListener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the ports; what has been accepted goes on."""
        self._is_closed.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            listener.close()
        self._listeners.clear()

    def _open(self, port: int) -> PortFacts:
        is_ephemeral = port in ephemeral_ports()
        try:
            listener = _listen(port)
        except OSError as error:
            holder, everywhere = holder_of(port)
            return PortFacts(
                port=port,
                error=os.strerror(error.errno).lower() if error.errno else str(error),
                holder=holder,
                on_all_interfaces=everywhere,
                is_ephemeral=is_ephemeral,
            )
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return PortFacts(port=port, is_ephemeral=is_ephemeral)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, address = listener.accept()
            except OSError:  # closed; else who came is gone, or has to wait for a free descriptor
                if self._is_closed.wait(_AGAIN_S):
                    return
                continue
            if not self._room.acquire(blocking=False):
                client.close()
                continue
            known = (client, str(address[0]).removeprefix("::ffff:"))  # IPv4 at an IPv6 socket
            threading.Thread(target=self._serve, args=known, daemon=True).start()

    def _serve(self, client: socket.socket, address: str) -> None:
        is_kept = False
        try:
            client.settimeout(_PATIENCE_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(self._greeting)
            request = take(client, len(MEET))
            if request == MEET:
                self.clients.put((client, address))
                is_kept = True
            elif request == _SINK:
                _sink(client)
        except (OSError, ValueError):
            pass  # whoever asked is gone, or is none of ours
        finally:
            self._room.release()
            if not is_kept:
                client.close()


def spare_ports(ports: Sequence[int]) -> tuple[int, ...]:
    """Return the ports after those of a host's tasks: where to meet if these are taken."""
    last = max(ports, default=0)
    return tuple(port for port in range(last + 1, last + 1 + _SPARE_PORTS) if port <= 65_535)


def holder_of(port: int) -> tuple[str, bool]:
    """Return who listens at a port, and whether on all interfaces, as far as can be told."""
    holder, everywhere = "", False
    with contextlib.suppress(OSError, psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                everywhere |= connection.laddr.ip in ("0.0.0.0", "::")
                if connection.pid is not None:  # else it is another user's
                    holder = f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    return holder, everywhere


def _listen(port: int) -> socket.socket:
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=ipv6)


def _sink(client: socket.socket) -> None:
    """Take pieces of announced sizes, and confirm each once all of it is here."""
    while True:
        size = int.from_bytes(take(client, 8), "big")
        if size > MAX_PIECE_BYTES:
            raise ValueError(f"a piece of {size} bytes")
        buffer = bytearray(min(size, 1 << 20) or 1)
        left = size
        while left:
            count = client.recv_into(buffer, min(left, len(buffer)))
            if not count:
                return
            left -= count
        client.sendall(size.to_bytes(8, "big"))


def greeting(index: int, fingerprint: str) -> str:
    """Return the line by which a host of a job is known."""
    return f"{PROTOCOL} {index} {fingerprint}"


def host_of(line: str, fingerprint: str) -> int:
    """Return which host of the job said a line; -1 where none of it did."""
    match = re.fullmatch(PROTOCOL + r" (\d{1,6}) (\w+)", line)
    return int(match[1]) if match and match[2] == fingerprint else -1


# Connection probes to the other hosts: reachability, latency, throughput.

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
    """Return who answers at each port of each other host that is there.

    Many ports at which nobody answers take long; those that are not tried in time are left out.
    """
    deadline_s = time.monotonic() + _REACH_S
    targets = [(other, port) for other in present if other != index for port in hosts[other].ports]

    def one(place: tuple[int, int]) -> Reach | None:
        other, port = place
        if time.monotonic() > deadline_s:
            return None
        try:
            with connected(hosts[other].name, port) as (_, line):
                answered = host_of(line, fingerprint)
            return Reach(host=other, port=port, answered=answered)
        except OSError as error:
            return Reach(host=other, port=port, error=reason_of(error))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(reach for reach in pool.map(one, targets) if reach is not None)


def measure(address: str, port: int, *, host: int) -> Wire:
    """Return how fast a plain connection to a host is, which has answered before."""
    latency_s, carried = 0.0, "nothing comes back"
    try:
        with connected(address, port) as (sock, _):
            sock.settimeout(_TALK_S)
            sock.sendall(_SINK)
            latency_s = _latency_s(sock)
            carried = f"{_FIRST_PIECE_BYTES >> 10} KiB do not come through"
            return Wire(host=host, latency_s=latency_s, bytes_per_s=_bytes_per_s(sock))
    except OSError as error:
        return Wire(host=host, latency_s=latency_s, error=f"{carried}: {reason_of(error)}")


@contextlib.contextmanager
def connected(address: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Connect; yield the connection and the line with which it was greeted."""
    bare = address.strip("[]")
    with socket.create_connection((bare, port), timeout=_CONNECT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock, _line(sock)


def _line(sock: socket.socket) -> str:
    """Return the first line that comes, or what came of it in time: others need not greet."""
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and len(data) < _MAX_GREETING_BYTES:
            piece = sock.recv(1)
            if not piece:
                break
            data += piece
    return data.decode(errors="replace").rstrip("\n")


def _latency_s(sock: socket.socket) -> float:
    """Return the shortest time that a piece without bytes took there and back."""
    best_s = float("inf")
    deadline_s = time.monotonic() + _MEASURE_S
    for _ in range(_PINGS):
        best_s = min(best_s, _send_piece(sock, 0))
        if time.monotonic() > deadline_s:
            break
    return best_s


def _bytes_per_s(sock: socket.socket) -> float:
    """Return the better speed of two pieces that take long enough to tell.

    Smaller ones come first, until it is known how large these are. What they say is left out: the
    first of them may go through a limit that has been idle as if there were none.
    """
    size = _FIRST_PIECE_BYTES
    deadline_s = time.monotonic() + _MEASURE_S
    while True:
        took_s = _send_piece(sock, size)
        is_long = took_s > _LONG_ENOUGH_S or time.monotonic() > deadline_s
        if is_long or size >= MAX_PIECE_BYTES:
            return size / min(took_s, _send_piece(sock, size))
        size *= 2


def _send_piece(sock: socket.socket, size: int) -> float:
    """Return how long it took until the other side had all of it."""
    data = bytes(size)
    start = time.perf_counter()
    sock.sendall(size.to_bytes(8, "big"))
    if data:
        sock.sendall(data)
    take(sock, 8)
    return time.perf_counter() - start
