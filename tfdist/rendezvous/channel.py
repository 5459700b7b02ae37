"""A link over a socket that never waits, and how long the other side has been silent."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tfdist.rendezvous.link import Link, Message, Violation

BEAT_EVERY_S = 1.0
"""How often a launcher shows that it is alive when it has nothing else to say."""

_LATE_S = 2.0  # between two looks: then it was we who were held up
_READ_BYTES = 1 << 16
_MAX_READS = 64
_MAX_BACKLOG_BYTES = 32 << 20

_BEAT = "beat"


class Channel:
    """A connection to another launcher. Errors of the network are OSError, the rest `Violation`."""

    def __init__(self, sock: socket.socket, link: Link, *, clock: Callable[[], float]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._link = link
        self._clock = clock
        self._heard_s = self._sent_s = self._looked_s = clock()

    def fileno(self) -> int:
        """Returns what to watch."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """Returns whether both sides know the token."""
        return self._link.is_open

    @property
    def is_waiting(self) -> bool:
        """Returns whether there is something that the network has not taken yet."""
        return bool(self._link.outgoing)

    @property
    def silent_s(self) -> float:
        """Returns how long nothing has come; the time in which nobody looked does not count."""
        now_s = self._clock()
        if now_s - self._looked_s > _LATE_S:
            self._heard_s = now_s
        self._looked_s = now_s
        return now_s - self._heard_s

    def send(self, message: Message) -> None:
        """Sends a message, now or when the network takes it."""
        self._link.send(message)
        self._sent_s = self._clock()
        self.flush()

    def beat(self) -> None:
        """Sends a sign of life if it is time for one."""
        if self.is_open and self._clock() - self._sent_s >= BEAT_EVERY_S:
            self.send({_BEAT: True})

    def read(self) -> list[Message]:
        """Returns the messages that have come; raises ConnectionError at the end of them."""
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
            self._heard_s = self._clock()
            messages += self._link.receive(data)
        self.flush()  # what the greeting answers
        return _without_beats(messages)

    def flush(self) -> None:
        """Writes what the network takes without waiting."""
        outgoing = self._link.outgoing
        while outgoing:
            try:
                del outgoing[: self._socket.send(outgoing[:_READ_BYTES])]
            except BlockingIOError:
                break
        if len(outgoing) > _MAX_BACKLOG_BYTES:
            raise Violation("it takes no more messages")

    def close(self) -> None:
        """Closes the connection; what the network has been given is still sent."""
        self._socket.close()


def _without_beats(messages: list[Message]) -> list[Message]:
    return [message for message in messages if _BEAT not in message]
