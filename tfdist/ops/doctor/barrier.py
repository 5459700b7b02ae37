"""Meeting of the hosts: plain connections between them, and the preflight barrier.

The hosts connect to the first one, which runs each step on all. The connections of the barrier are
the launchers' own: `Hub` on the first host, `Member` on the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import psutil

from tfdist.errors import PeerLost, opening_port
from tfdist.launch.messages import Message
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

# Listener on the ports of this host's tasks during the preflight.
#
# It listens on every interface, as TensorFlow's servers will: what is free, or reached, for one is
# so for the other. It says whose port this is, and takes data; nothing it is sent is run.

MAX_PIECE_BYTES = 64 << 20

_GREETING = "tfdist doctor"
_PATIENCE_S = 10.0
_BACKLOG = 256


class PortListener:
    """Listener on ports, with a thread for each client.

    Args:
      greeting: the line that whoever connects gets first.
      ports: of this host's tasks.
    """

    def __init__(self, greeting: str, ports: Sequence[int]) -> None:
        self._greeting = greeting.encode() + b"\n"
        self._servers: list[_Server] = []
        self.ports = tuple(self._open(port) for port in ports)

    def close(self) -> None:
        """Free the ports; connections go on."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()

    def _open(self, port: int) -> PortFacts:
        try:
            server = _Server(port, self._greeting)
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            return PortFacts(port=port, error=why, holder=_holder_of(port))
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return PortFacts(port=port)


class _Server(socketserver.ThreadingTCPServer):
    """Server at one port of all interfaces; errors of a client end its connection alone."""

    daemon_threads = True

    def __init__(self, port: int, greeting: bytes) -> None:
        super().__init__(("", port), _Handler, bind_and_activate=False)
        self.greeting = greeting
        self.socket.close()
        self.socket = _listen(port)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client is gone, or is no doctor."""


class _Handler(socketserver.StreamRequestHandler):
    """Greeting of a client, then pieces of announced sizes, confirmed once all of one is here."""

    server: _Server
    timeout = _PATIENCE_S
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Take pieces until the client hangs up."""
        self.wfile.write(self.server.greeting)
        buffer = memoryview(bytearray(1 << 20))
        while len(head := self.rfile.read(8)) == 8:
            left = int.from_bytes(head, "big")
            if left > MAX_PIECE_BYTES:
                return
            while left:
                count = self.rfile.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    return
                left -= count
            self.wfile.write(head)


def _listen(port: int) -> socket.socket:
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=ipv6)


def _holder_of(port: int) -> str:
    """Return the process that listens at a port, as ``python (4711)``; empty if unknown."""
    with contextlib.suppress(OSError, psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_there = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_there and connection.pid is not None:  # else it is another user's
                return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    return ""


def greeting(index: int, fingerprint: str) -> str:
    """Return the line by which a host of a job is known."""
    return f"{_GREETING} {index} {fingerprint}"


def host_of(line: str, fingerprint: str) -> int:
    """Return the host of the job with this greeting; -1 for none."""
    match = re.fullmatch(_GREETING + r" (\d{1,6}) (\w+)", line)
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
    """Connect to every port of the other hosts that are present; return the results.

    Many ports at which nobody answers take long: some may not be tried in time, which is their
    error.
    """
    deadline_s = time.monotonic() + _REACH_S
    targets = [(other, port) for other in present if other != index for port in hosts[other].ports]

    def one(place: tuple[int, int]) -> Reach:
        other, port = place
        if time.monotonic() > deadline_s:
            return Reach(host=other, port=port, error=f"not tried within {_REACH_S:.0f} s")
        try:
            with connected(hosts[other].name, port) as (_, _, line):
                answered = host_of(line, fingerprint)
            return Reach(host=other, port=port, answered=answered)
        except OSError as error:
            return Reach(host=other, port=port, error=reason_of(error))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(one, targets))


def measure(address: str, port: int, *, host: int) -> Wire:
    """Return how fast a plain connection to a host is, which has answered before."""
    latency_s, carried = 0.0, "nothing comes back"
    try:
        with connected(address, port) as (sock, reader, _):
            sock.settimeout(_TALK_S)
            send = functools.partial(_send_piece, sock, reader)
            latency_s = _latency_s(send)
            carried = f"{_FIRST_PIECE_BYTES >> 10} KiB do not come through"
            return Wire(host=host, latency_s=latency_s, bytes_per_s=_bytes_per_s(send))
    except OSError as error:
        return Wire(host=host, latency_s=latency_s, error=f"{carried}: {reason_of(error)}")


@contextlib.contextmanager
def connected(address: str, port: int) -> Iterator[tuple[socket.socket, BinaryIO, str]]:
    """Connect; yield the connection, its reader, and the line with which it was greeted.

    The line is empty where none comes in time: others need not greet.
    """
    bare = address.strip("[]")
    with (
        socket.create_connection((bare, port), timeout=_CONNECT_S) as sock,
        sock.makefile("rb") as reader,
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = b""
        with contextlib.suppress(OSError):
            line = reader.readline(_MAX_GREETING_BYTES)
        yield sock, reader, line.decode(errors="replace").rstrip("\n")


def _latency_s(send: Callable[[int], float]) -> float:
    """Return the shortest time that a piece without bytes took there and back."""
    deadline_s = time.monotonic() + _MEASURE_S
    times = [send(0)]
    while len(times) < _PINGS and time.monotonic() < deadline_s:
        times.append(send(0))
    return min(times)


def _bytes_per_s(send: Callable[[int], float]) -> float:
    """Return the better speed of two pieces that take long enough to tell.

    Smaller ones come first, until it is known how large these are. What they say is left out: the
    first of them may go through a limit that has been idle as if there were none.
    """
    size = _FIRST_PIECE_BYTES
    deadline_s = time.monotonic() + _MEASURE_S
    while True:
        took_s = send(size)
        is_long = took_s > _LONG_ENOUGH_S or time.monotonic() > deadline_s
        if is_long or size >= MAX_PIECE_BYTES:
            return size / min(took_s, send(size))
        size *= 2


def _send_piece(sock: socket.socket, reader: BinaryIO, size: int) -> float:
    """Return how long it took until the other side had all of it."""
    data = bytes(size)
    start = time.perf_counter()
    sock.sendall(size.to_bytes(8, "big"))
    sock.sendall(data)
    if len(reader.read(8)) < 8:
        raise ConnectionError("the connection was closed")
    return time.perf_counter() - start


# Preflight barrier.

SILENT_S = 120.0
"""After how long without a word a host is gone; longer than any step, in which it says nothing."""

_STEP_S = 30.0
"""How long one step may take."""

_LOOK_S = 0.05
_AGAIN_S = 0.3

Step = Callable[[Sequence[int]], Message | None]
"""One thing that a host does when all do it, given the hosts that are there."""


class HostBarrier:
    """First host's side of the barrier: hosts that are present, and their answers."""

    def __init__(self, job: PreflightJob) -> None:
        self._job = job
        listener = None
        if len(job.hosts) > 1:
            with opening_port("the port at which the hosts meet", job.meeting_port):
                listener = _listen(job.meeting_port)
        self._hub = Hub(
            listener,
            token=job.token,
            terms=job.terms,
            num_ranks=len(job.hosts),
            timeout_s=SILENT_S,
        )
        self._step = ""
        """Under way; empty while the hosts gather."""
        self._refused: dict[int, str] = {}
        self._answers: dict[int, Message] = {}
        self.absent: list[Absence] = []

    @property
    def present(self) -> list[int]:
        """Return the hosts that are there, this one among them."""
        return sorted({self._job.index, *self._hub.present})

    def gather(self, *, within_s: float) -> None:
        """Wait until all hosts have come, or the time is over; those that have not are absent."""
        listed = set(range(len(self._job.hosts))) - {self._job.index}
        self._wait(lambda: listed <= self._hub.present | self._refused.keys(), within_s=within_s)
        self._step = "gather"
        came = "; ".join(self._hub.turned_away)
        turned_away = f" (turned away: {came})" if came else ""
        for index in sorted(listed - self._hub.present):
            why = self._refused.get(index, f"did not come within {within_s:.0f} s{turned_away}")
            is_other_job = index in self._refused
            self.absent.append(Absence(index=index, why=why, is_other_job=is_other_job))

    def ask(self, step: str, own: Step) -> dict[int, Message]:
        """Have every host do a step, this one by `own`; return the answers of those that gave one.

        Those that gave none are absent from then on.
        """
        self._step = step
        self._answers.clear()
        deadline_s = time.monotonic() + _STEP_S
        asked, request = self._hub.present, {"do": step, "present": self.present}
        for index in asked:
            self._hub.send(index, request)
        answers = {self._job.index: own(self.present) or {}}
        self._wait(
            lambda: asked & self._hub.present <= self._answers.keys(),
            within_s=deadline_s - time.monotonic(),
        )
        for index in sorted(asked - self._answers.keys()):
            self.lose(index, "no answer in time")
        return answers | self._answers

    def lose(self, index: int, why: str) -> None:
        """Count a host as absent from now on."""
        self._hub.drop(index, why)
        self._turn()

    def end(self, exit_code: int) -> None:
        """Tell all hosts how it went, and let them go."""
        self._hub.end({"do": "end", "exit_code": exit_code})

    def _wait(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        self._turn()
        while not is_done() and time.monotonic() < deadline_s:
            readable([self._hub.fileno()], within_s=_LOOK_S)
            self._turn()

    def _turn(self) -> None:
        self._hub.turn()
        for news in self._hub.take_news():
            match news:
                case PeerJoined(rank=index) if self._step:
                    self._hub.drop(index, "it is too late")
                case PeerJoined(rank=index):
                    self._refused.pop(index, None)
                case Differs(rank=index, what=what):
                    self._refused[index] = f"was told of another job: {'; '.join(what)}"
                case MessageReceived(rank=index, message=message):
                    self._answers[index] = message
                case Lost(rank=index, cause=cause) if self._step:
                    if all(absence.index != index for absence in self.absent):
                        self.absent.append(Absence(index=index, why=cause, during=self._step))


def join_barrier(job: PreflightJob, *, within_s: float) -> Member:
    """Come to the first host, again and again until the time is over; raises as `Joining.join`."""
    joining = Joining(
        job.hosts[0].name,
        job.meeting_port,
        token=job.token,
        rank=job.index,
        terms=job.terms,
        timeout_s=SILENT_S,
    )
    member = joining.join(within_s=within_s, is_over=lambda: False)
    assert member is not None  # it is never over
    return member


def run_steps(member: Member, steps: Mapping[str, Step], *, hosts: int) -> int:
    """Run the steps that the first host asks for until it ends; return the exit code.

    Raises:
        PeerLost: the first host has gone.
    """
    while True:
        for request in member.take_messages():
            match request:
                case {"do": "end", "exit_code": int(code)}:
                    return code
                case {"do": str(step), "present": list(listed)} if step in steps:
                    present = [index for index in range(hosts) if index in listed]
                    member.send(steps[step](present) or {})
                case _:
                    raise PeerLost(f"it asks for {request}")
        if member.lost:
            raise PeerLost(member.lost)
        readable([member.fileno()], within_s=_AGAIN_S)
        member.turn()
