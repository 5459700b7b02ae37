"""The launcher's own standard output: prefixed lines, and a progress line on a terminal."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable

from tfdist.errors import TfdistError

_CHUNK_BYTES = 4096  # a pipe that is ready takes this much without blocking
_BACKLOG_BYTES = 1 << 20
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_ERASE = b"\r\x1b[K"


class Console:
    """Writes to a descriptor without ever waiting for whoever reads it.

    What cannot be written yet is kept; `is_full` asks the caller to read no more output from
    the tasks until there is room. `is_closed` says that nobody reads any more.
    """

    def __init__(
        self,
        fd: int,
        *,
        is_terminal: bool = False,
        colour: bool = False,
        columns: Callable[[], int] = lambda: 80,
    ) -> None:
        self.fd = fd
        self.is_terminal = is_terminal
        self.is_closed = False
        self.num_lines = 0
        self._colour = colour
        self._columns = columns
        self._backlog = bytearray()
        self._progress = b""

    @property
    def is_waiting(self) -> bool:
        """Return whether there is output that the reader has not taken yet."""
        return bool(self._backlog) and not self.is_closed

    @property
    def is_full(self) -> bool:
        """Return whether so much is waiting that the tasks should wait too."""
        return len(self._backlog) > _BACKLOG_BYTES

    def say(self, text: str) -> None:
        """Add lines of the launcher's own."""
        for line in text.splitlines():
            self._put(b"[launch] " + line.encode(errors="backslashreplace"))

    def line(self, name: str, text: bytes, *, hue: int = 0) -> None:
        """Add one line of the task called `name`."""
        self._put(self._prefix(name, hue) + text)

    def progress(self, name: str, text: bytes, *, hue: int = 0) -> None:
        """Show a line that the next one replaces; only a terminal can."""
        if not self.is_terminal:
            return
        room = max(0, self._columns() - len(name) - 4)
        plain = _ESCAPES.sub(b"", text).replace(b"\t", b" ")
        cut = plain.decode(errors="replace")[:room].encode()
        self._progress = self._prefix(name, hue) + cut
        self._add(_ERASE + self._progress)

    def drop_progress(self) -> None:
        """Take the progress line away."""
        if self._progress:
            self._progress = b""
            self._add(_ERASE)

    def write(self) -> None:
        """Write what the reader takes without waiting."""
        self.drain(0.0)

    def drain(self, timeout_s: float | None) -> None:
        """Write all that is left; wait for the reader as long as `timeout_s` each time."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self.is_waiting and poll.poll(None if timeout_s is None else timeout_s * 1000):
            self._write_some()

    def forget_backlog(self) -> None:
        """Give up what is waiting for a reader that does not read."""
        self._backlog.clear()

    def _write_some(self) -> None:
        try:
            written = os.write(self.fd, self._backlog[:_CHUNK_BYTES])
        except OSError as error:
            # A reader that has left wants no job; a terminal that was closed behind nohup, or a
            # full disk, is no reason to end one. The logs have it all.
            self.is_closed = error.errno == errno.EPIPE
            self._backlog.clear()
            return
        del self._backlog[:written]

    def _put(self, line: bytes) -> None:
        self.num_lines += 1
        if self._progress:
            self._add(_ERASE + line + b"\n" + self._progress)
        else:
            self._add(line + b"\n")

    def _add(self, data: bytes) -> None:
        if not self.is_closed:
            self._backlog += data

    def _prefix(self, name: str, hue: int) -> bytes:
        if not self._colour:
            return f"[{name}] ".encode()
        return f"\x1b[{_COLOURS[hue % len(_COLOURS)]}m[{name}]\x1b[0m ".encode()


def show(text: str) -> None:
    """Print what a command was asked for, to standard output.

    Raises:
        BrokenPipeError: its reader has left.
        TfdistError: it cannot be written, as on a full disk.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try again at its end
        if isinstance(error, BrokenPipeError):
            raise
        raise TfdistError(f"standard output: cannot be written: {error.strerror}") from None
