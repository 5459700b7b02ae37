"""Messages between the launcher and an agent: one JSON object per line, over two descriptors.

The descriptors are the standard input and output of a remote shell. A shell such as ssh
authenticates and encrypts. The launcher skips the shell's output before the agent's first line.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable

from tfdist.launch.events import Message

GREETING = b"tfdist agent 1"
BEAT_EVERY_S = 1.0
SILENT_S = 8.0
"""Seconds until the peer counts as lost if it sends no message."""

_LATE_S = 2.0  # a longer gap between two turns means that this process was stalled
_READ_BYTES = 1 << 16
_MAX_BYTES = 32 << 20


class Pipe:
    """One end of the connection. No method blocks. `lost` says why the connection ended.

    Args:
      awaits_greeting: Whether to skip all lines before the agent's greeting.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        *,
        timeout_s: float,
        awaits_greeting: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self.timeout_s = timeout_s
        self._awaits_greeting = awaits_greeting
        self._clock = clock
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._messages: list[Message] = []
        self.lost = ""
        self.heard_s = self._sent_s = self._looked_s = clock()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor to watch."""
        return self._read_fd

    def greet(self) -> None:
        """Send the greeting. The launcher skips all output before it."""
        self._outgoing += GREETING + b"\n"
        self._flush()

    def send(self, message: Message) -> None:
        """Send a message now, or as soon as the pipe has room."""
        self._outgoing += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._sent_s = self._clock()
        self._flush()

    def take_messages(self) -> list[Message]:
        """Return the messages received since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def turn(self) -> None:
        """Read, write, send a heartbeat if one is due, and detect a silent peer."""
        now_s = self._clock()
        if now_s - self._looked_s > _LATE_S:
            self.heard_s = now_s
        self._looked_s = now_s
        self._read(now_s)
        if now_s - self.heard_s >= self.timeout_s:
            self._lose(f"no message for {self.timeout_s:g} s")
        if now_s - self._sent_s >= BEAT_EVERY_S:
            self.send({})
        self._flush()

    def _read(self, now_s: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.lost:
                try:
                    data = os.read(self._read_fd, _READ_BYTES)
                except BlockingIOError:
                    raise
                except OSError:
                    data = b""
                if not data:
                    self._lose("the connection was closed")
                    break
                self.heard_s = now_s
                self._incoming += data
                if len(self._incoming) > _MAX_BYTES:
                    self._lose("a message is too long")
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        if self._awaits_greeting:
            self._awaits_greeting = line.rstrip(b"\r") != GREETING
            return
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._lose("received an invalid message")
        elif message:  # an empty message is a heartbeat
            self._messages.append(message)

    def _flush(self) -> None:
        try:
            while self._outgoing and not self.lost:
                del self._outgoing[: os.write(self._write_fd, self._outgoing[:_READ_BYTES])]
        except BlockingIOError:
            if len(self._outgoing) > _MAX_BYTES:
                self._lose("it does not read messages")
        except OSError:
            self._lose("the connection was closed")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
