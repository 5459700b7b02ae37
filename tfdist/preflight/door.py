"""What answers at the ports of this host's tasks while the hosts are looked at.

It listens on every interface, as TensorFlow's servers will: what is free, or reached, for one is so
for the other. It says whose port this is, and takes small questions; nothing it is sent is run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
from collections.abc import Sequence
from types import TracebackType

import psutil

from tfdist.cluster.ports import ephemeral_ports
from tfdist.preflight.facts import PortFacts
from tfdist.preflight.wire import Conversation, Message, Violation, WrongToken, take

MAX_PIECE_BYTES = 64 << 20
PING_BYTES = 8

_BACKLOG = 256
_MAX_GUESTS = 256
_PATIENCE_S = 10.0
_HELLO_S = 3.0
_ASKED_BYTES = 5  # of each request: "meet\n", "echo\n" or "sink\n"
_SPARE_PORTS = 3
_AGAIN_S = 0.2


class Door:
    """Answers at ports until it is closed; who asks to meet is in `guests`, with its first message.

    Args:
      greeting: the line that whoever connects gets first.
      ports: of this host's tasks.
      token: what who asks to meet must know; `wrong_tokens` counts those that do not.
      spare: whether to listen at one of the ports after the last if none of them is free.
    """

    def __init__(
        self, greeting: str, ports: Sequence[int], *, token: bytes = b"", spare: bool = False
    ) -> None:
        self._greeting = greeting.encode() + b"\n"
        self._token = token
        self.wrong_tokens = 0
        self._listeners: list[socket.socket] = []
        self._is_closed = threading.Event()
        self._room = threading.BoundedSemaphore(_MAX_GUESTS)
        self.guests: queue.SimpleQueue[tuple[Conversation, Message]] = queue.SimpleQueue()
        self.ports = tuple(self._open(port) for port in ports)
        if spare and not self._listeners:
            for port in spare_ports(ports):
                if not self._open(port).error:
                    break

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the ports; what has been accepted goes on."""
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
                guest, _ = listener.accept()
            except OSError:  # closed; else who came is gone, or has to wait for a free descriptor
                if self._is_closed.wait(_AGAIN_S):
                    return
                continue
            if not self._room.acquire(blocking=False):
                guest.close()
                continue
            threading.Thread(target=self._serve, args=(guest,), daemon=True).start()

    def _serve(self, guest: socket.socket) -> None:
        is_kept = False
        try:
            guest.settimeout(_PATIENCE_S)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guest.sendall(self._greeting)
            asked = take(guest, _ASKED_BYTES)
            if asked == b"meet\n":
                talk = Conversation(guest, token=self._token, accepts=True)
                talk.greet(within_s=_HELLO_S)
                self.guests.put((talk, talk.receive(within_s=_HELLO_S)))
                is_kept = True
            elif asked == b"echo\n":
                _echo(guest)
            elif asked == b"sink\n":
                _sink(guest)
        except WrongToken:
            self.wrong_tokens += 1
        except (OSError, ValueError, Violation):
            pass  # whoever asked is gone, or is none of ours
        finally:
            self._room.release()
            if not is_kept:
                guest.close()


def spare_ports(ports: Sequence[int]) -> tuple[int, ...]:
    """Returns the ports after those of a host's tasks: where to meet if these are taken."""
    last = max(ports, default=0)
    return tuple(port for port in range(last + 1, last + 1 + _SPARE_PORTS) if port <= 65_535)


def holder_of(port: int) -> tuple[str, bool]:
    """Returns who listens at a port, and whether on all interfaces, as far as can be told."""
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


def _echo(guest: socket.socket) -> None:
    while True:
        guest.sendall(take(guest, PING_BYTES))


def _sink(guest: socket.socket) -> None:
    """Takes pieces of announced sizes, and confirms each once all of it is here."""
    while True:
        size = int.from_bytes(take(guest, 8), "big")
        if size > MAX_PIECE_BYTES:
            raise ValueError(f"a piece of {size} bytes")
        buffer = bytearray(min(size, 1 << 20) or 1)
        left = size
        while left:
            count = guest.recv_into(buffer, min(left, len(buffer)))
            if not count:
                return
            left -= count
        guest.sendall(size.to_bytes(8, "big"))


def greeting(index: int, fingerprint: str) -> str:
    """Returns the line by which a host of a job is known."""
    return f"tfdist doctor 1 {index} {fingerprint}"


def host_of(line: str, fingerprint: str) -> int:
    """Returns which host of the job said a line; -1 where none of it did."""
    said = re.fullmatch(r"tfdist doctor 1 (\d{1,6}) (\w+)", line)
    return int(said[1]) if said and said[2] == fingerprint else -1
