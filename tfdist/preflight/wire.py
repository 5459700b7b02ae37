"""Messages between two hosts, sealed as the launchers' are, each within a deadline."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable

from tfdist.launch.multihost.connection import Link, Message, Violation, WrongToken

__all__ = ["Conversation", "Message", "Violation", "WrongToken", "take"]

_READ_BYTES = 1 << 16
_LEAST_S = 0.001


class Conversation:
    """One end of a connection. Errors of the network are OSError, what nobody sends `Violation`.

    Args:
      sock: waits no longer than the deadline of each call.
      token: what both sides must know; empty where the user gave none.
      accepts: whether this side was connected to.
    """

    def __init__(self, sock: socket.socket, *, token: bytes, accepts: bool) -> None:
        self._socket = sock
        self._link = Link(token, accepts=accepts)
        self._messages: deque[Message] = deque()

    def greet(self, *, within_s: float) -> None:
        """Has both sides show that they know the token; each calls it before anything else."""
        deadline_s = time.monotonic() + within_s
        try:
            while not self._link.is_open:
                self._flush(deadline_s)
                self._read(deadline_s)
        except WrongToken:
            with contextlib.suppress(OSError):
                self._flush(deadline_s)  # the other side is told so
            raise
        self._flush(deadline_s)

    def send(self, message: Message, *, within_s: float) -> None:
        """Sends a message; TimeoutError when the other side does not take it."""
        self._link.send(message)
        self._flush(time.monotonic() + within_s)

    def receive(self, *, within_s: float) -> Message:
        """Returns the next message; TimeoutError when it does not come."""
        deadline_s = time.monotonic() + within_s
        while not self._messages:
            self._read(deadline_s)
        return self._messages.popleft()

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _read(self, deadline_s: float) -> None:
        self._socket.settimeout(max(_LEAST_S, deadline_s - time.monotonic()))
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the connection was closed")
        self._messages.extend(self._link.receive(data))

    def _flush(self, deadline_s: float) -> None:
        if self._link.outgoing:
            self._socket.settimeout(max(_LEAST_S, deadline_s - time.monotonic()))
            self._socket.sendall(self._link.outgoing)
            self._link.outgoing.clear()


def take(sock: socket.socket, count: int, *, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Returns exactly `count` bytes; ConnectionError at an early end, TimeoutError when late."""
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
