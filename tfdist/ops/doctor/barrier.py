"""Meeting of the hosts: plain connections between them, and the preflight barrier.

The hosts connect to the first one, which runs each step on all. The connections of the barrier are
the launchers' own: `Hub` on the first host, `Member` on the others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil

from tfdist.cluster.ports import ephemeral_ports
from tfdist.errors import EXIT_FAILED, UsageError
from tfdist.launch.multihost.connection import Message, Violation, WrongToken
from tfdist.launch.multihost.rendezvous import (
    Differs,
    Hub,
    Joining,
    Lost,
    Member,
    MessageReceived,
    PeerJoined,
    readable,
)
from tfdist.ops.doctor.facts import Absence, Host, PortFacts, PreflightJob, Reach, Wire, reason_of


def take(sock: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes; ConnectionError at an early end, TimeoutError when late."""
    timeout_s = sock.gettimeout()
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    data = bytearray()
    while len(data) < count:
        if deadline_s is not None and time.monotonic() > deadline_s:
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
_ACCEPT_AGAIN_S = 0.2


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
                if self._is_closed.wait(_ACCEPT_AGAIN_S):
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


# Preflight barrier.

SILENT_S = 120.0
"""After how long without a word a host is gone; longer than any step, in which it says nothing."""

_AGAIN_S = 0.3
_LOOK_S = 0.05  # how long a host that has asked to meet may wait to be taken in
_CLOCK_WITHIN_S = 3.0
_CLOCK_ROUNDS = 5
_OF_A_RANGE = 4


class ClockOffset(NamedTuple):
    """How far another host's clock is ahead, and by how much that may be wrong."""

    ahead_s: float
    error_s: float


class HostBarrier:
    """First host's side of the barrier: hosts that are present, and their answers."""

    def __init__(self, job: PreflightJob, port_listener: PortListener) -> None:
        self._job = job
        self._port_listener = port_listener
        self._hub = Hub(
            None,
            token=job.token,
            terms=job.terms,
            num_ranks=len(job.hosts),
            timeout_s=SILENT_S,
            clock=time.monotonic,
        )
        self._others: set[int] = set()  # who has come, and is not absent
        self._is_gathered = False
        self._refused: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self._answers: dict[int, Message] = {}
        self.absent: list[Absence] = []

    @property
    def present(self) -> list[int]:
        """Return the hosts that are there, this one among them."""
        return sorted({self._job.index, *self._others})

    def gather(self, *, within_s: float) -> None:
        """Wait until all hosts have come, or the time is over; those that have not are absent."""
        listed = set(range(len(self._job.hosts))) - {self._job.index}
        self._wait(lambda: listed <= self._others | self._refused.keys(), within_s=within_s)
        self._is_gathered = True
        came = "; ".join(self._hub.turned_away)
        turned_away = f" (turned away: {came})" if came else ""
        for index in sorted(listed - self._others):
            why = self._refused.get(index, f"did not come within {within_s:.0f} s{turned_away}")
            is_other_job = index in self._refused
            self.absent.append(Absence(index=index, why=why, is_other_job=is_other_job))

    def ask(self, step: str, *, within_s: float, own: Callable[[], Message]) -> dict[int, Message]:
        """Have every host do a step, this one by `own`; return the answers of those that gave one.

        Those that gave none are absent from then on.
        """
        deadline_s = time.monotonic() + within_s
        pending = self._send(step)
        answers = {self._job.index: own()}
        return answers | self._received(step, pending, within_s=deadline_s - time.monotonic())

    def clocks(self) -> dict[int, ClockOffset]:
        """Return how far the clock of each host is ahead of this one's."""
        rounds = [self._clock_round() for _ in range(_CLOCK_ROUNDS)]
        return {
            index: min((found[index] for found in rounds), key=lambda clock: clock.error_s)
            for index in self._others
            if all(index in found for found in rounds)
        }

    def lose(self, index: int, why: str, *, step: str) -> None:
        """Count a host as absent from now on."""
        self._hub.drop(index, why)
        self._others.discard(index)
        self.absent.append(Absence(index=index, why=why, during=step))

    def end(self, exit_code: int) -> None:
        """Tell all hosts how it went, and let them go."""
        self._hub.end({"do": "end", "exit_code": exit_code})

    def _clock_round(self) -> dict[int, ClockOffset]:
        """Ask each host for its time, one after the other, as the answers are timed."""
        found = {}
        for index in sorted(self._others):
            start, began = time.monotonic(), time.time()
            pending = self._send("clock", only=index)
            answers = self._received("clock", pending, within_s=_CLOCK_WITHIN_S)
            took_s = time.monotonic() - start
            there = answers.get(index, {}).get("now")
            if type(there) is float:
                found[index] = ClockOffset(ahead_s=there - began - took_s / 2, error_s=took_s / 2)
        return found

    def _send(self, step: str, *, only: int | None = None) -> set[int]:
        """Ask the hosts for a step; return which."""
        self._answers.clear()
        pending = set(self._others) if only is None else {only}
        for index in pending:
            self._hub.send(index, {"do": step, "present": self.present})
        return pending

    def _received(self, step: str, pending: set[int], *, within_s: float) -> dict[int, Message]:
        """Return what these hosts have answered in time; those that have not are absent."""
        self._wait(lambda: pending & self._hub.present <= self._answers.keys(), within_s=within_s)
        for index in sorted(pending - self._answers.keys()):
            self.lose(index, self._gone.get(index, "no answer in time"), step=step)
        return {index: self._answers[index] for index in pending & self._answers.keys()}

    def _wait(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        self._turn()
        while not is_done() and time.monotonic() < deadline_s:
            readable([self._hub.fileno()], within_s=_LOOK_S)
            self._turn()

    def _turn(self) -> None:
        while True:
            try:
                sock, address = self._port_listener.clients.get_nowait()
            except queue.Empty:
                break
            self._hub.add(sock, address=address)
        self._hub.turn()
        for news in self._hub.take_news():
            match news:
                case PeerJoined(rank=index) if self._is_gathered:
                    self._hub.drop(index, "it is too late")
                case PeerJoined(rank=index):
                    self._others.add(index)
                    self._refused.pop(index, None)
                    self._gone.pop(index, None)
                case Differs(rank=index, what=what):
                    self._refused[index] = f"was told of another job: {'; '.join(what)}"
                case MessageReceived(rank=index, message=message):
                    self._answers[index] = message
                case Lost(rank=index, cause=cause):
                    self._gone[index] = cause


class BarrierFailed(Exception):
    """The first host was not found, or has gone; the message says what came of it."""


def join_barrier(job: PreflightJob, *, within_s: float) -> Member:
    """Come to the first host, again and again until the time is over.

    Raises:
        BarrierFailed: it was not found, or does not let this one in.
    """
    first = job.hosts[0]
    deadline_s = time.monotonic() + within_s
    while True:
        whys: dict[int, str] = {}
        # Of a range a few: where all are closed, each takes a while to say so.
        ports = first.ports if first.needed is None else first.ports[:_OF_A_RANGE]
        for port in (*ports, *spare_ports(first.ports)):
            try:
                return _member(job, port)
            except WrongToken:
                raise BarrierFailed("it has another token (TFDIST_RENDEZVOUS_TOKEN)") from None
            except UsageError as error:
                raise BarrierFailed(
                    f"this host was told of another job: {error.received}"
                ) from None
            except Violation as error:
                whys[port] = str(error)
            except OSError as error:
                whys[port] = reason_of(error)
        if time.monotonic() > deadline_s:
            tried = "; ".join(f"port {port}: {whys[port]}" for port in first.ports[:4])
            raise BarrierFailed(f"{tried}, for {within_s:.0f} s")
        time.sleep(_AGAIN_S)


def _member(job: PreflightJob, port: int) -> Member:
    joining = Joining(
        job.hosts[0].name,
        port,
        source=None,
        token=job.token,
        rank=job.index,
        terms=job.terms,
        timeout_s=SILENT_S,
        clock=time.monotonic,
    )
    with connected(joining.host, port) as (sock, line):
        if (index := host_of(line, job.fingerprint)) not in (0, -1):
            raise Violation(f"{job.hosts[index].name} answers")
        if not line.startswith(f"{PROTOCOL} 0 "):
            is_doctor = line.startswith(PROTOCOL.rstrip("0123456789"))
            who = "a doctor of another version" if is_doctor else "something else"
            raise Violation(f"{who} answers")
        sock.sendall(MEET)
        return joining.member_over(sock.dup())


def run_steps(
    member: Member,
    steps: Mapping[str, Callable[[Sequence[int]], dict[str, Any]]],
    *,
    hosts: int,
) -> int:
    """Do what the first host asks for until it has no more; return the exit code.

    Raises:
        BarrierFailed: the first host has gone.
    """
    while True:
        for request in member.take_messages():
            step, listed = request.get("do"), request.get("present")
            present = listed if isinstance(listed, list) else []
            if step == "end":
                code = request.get("exit_code")
                return code if type(code) is int else EXIT_FAILED
            if step == "clock":
                member.send({"now": time.time()})
            elif isinstance(step, str) and step in steps:
                member.send(steps[step]([index for index in range(hosts) if index in present]))
            else:
                raise BarrierFailed(f"it asks for the step {step!r}")
        if member.lost:
            raise BarrierFailed(member.lost)
        readable([member.fileno()], within_s=_AGAIN_S)
        member.turn()
