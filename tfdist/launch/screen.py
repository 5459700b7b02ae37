"""Console of the launcher, with the output of the tasks and of the launcher."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from tfdist.chatter import CHATTER
from tfdist.cluster import Task
from tfdist.launch.task import MAX_CAUSE_CHARS

_CHUNK_BYTES = 4096  # a ready pipe accepts this much without blocking
_BACKLOG_BYTES = 1 << 20
_MISTAKE = re.compile(rb"(?!\[launch\] )(\S+) (.*\. Fix: .*)")  # task, and text of its UsageError
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Console:
    """Output to a file descriptor, without waiting for its reader.

    Pending output is kept in a backlog. If `is_full`, the caller must stop reading the tasks'
    output. `is_closed` is True after the reader has closed the pipe.
    """

    def __init__(self, fd: int, *, colour: bool = False) -> None:
        self.fd = fd
        self.is_closed = False
        self.mistake = b"", b""
        """Task and text of the last UsageError that was shown."""
        self._colour = colour
        self.backlog = bytearray()

    @property
    def is_waiting(self) -> bool:
        """Return whether output is pending."""
        return bool(self.backlog) and not self.is_closed

    @property
    def is_full(self) -> bool:
        """Return whether so much output is pending that the tasks must wait."""
        return len(self.backlog) > _BACKLOG_BYTES

    def say(self, text: str) -> None:
        """Add lines of the launcher."""
        for line in text.splitlines():
            self.pass_on(b"[launch] " + line.encode(errors="backslashreplace"))

    def line(self, name: str, text: bytes, *, hue: int = 0) -> None:
        """Add one line of the task called `name`."""
        prefix = f"[{name}]".encode()
        if self._colour:
            prefix = b"\x1b[%dm%b\x1b[0m" % (_COLOURS[hue % len(_COLOURS)], prefix)
        self.pass_on(prefix + b" " + text)

    def pass_on(self, line: bytes) -> None:
        """Add a line, such as a line from an agent. Drop a UsageError that another task printed."""
        if found := _MISTAKE.fullmatch(line):
            name, text = self.mistake
            if text == found[2] and name != found[1]:
                return
            self.mistake = found[1], found[2]
        if not self.is_closed:
            self.backlog += line + b"\n"

    def write(self) -> None:
        """Write as much pending output as possible without waiting."""
        self.drain(0.0)

    def drain(self, timeout_s: float | None) -> None:
        """Write all pending output. Wait at most `timeout_s` for each write (`None`: no limit)."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self.is_waiting and poll.poll(None if timeout_s is None else timeout_s * 1000):
            self._write_some()

    def _write_some(self) -> None:
        try:
            written = os.write(self.fd, self.backlog[:_CHUNK_BYTES])
        except BlockingIOError:  # another process has filled the pipe
            return
        except OSError as error:
            # A closed pipe stops the job. A closed terminal under nohup, or a full disk, does not
            # stop the job. The logs contain all output.
            self.is_closed = error.errno == errno.EPIPE
            self.backlog.clear()
            return
        del self.backlog[:written]


MAX_LINE_BYTES = 1 << 16
"""Maximum line length in bytes. Longer lines are split, so that a task cannot fill the memory."""

_LAST_LINES = 20
_MAX_LAST_CHARS = 1000


class LineSplitter:
    """Splitter of a byte stream into lines, as a terminal would show them.

    After a carriage return, new text replaces the line's earlier text.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in _pieces(_visible(line))]
        if b"\r" in rest:  # the next text replaces this text, unless a newline follows
            *full, visible = _pieces(_visible(rest))
            rest = b"\r" + visible + b"\r" * rest.endswith(b"\r")
        else:
            *full, rest = _pieces(rest)
        self._rest = rest
        return lines + full

    def end(self) -> list[bytes]:
        """Return the unfinished line at the end of the stream."""
        rest, self._rest = _visible(self._rest), b""
        return _pieces(rest) if rest else []


class TaskOutput:
    """One task's output: a log file, lines for the console, and the last lines for the report."""

    def __init__(self, name: str, *, log_path: Path, writer: Console, hue: int = 0) -> None:
        self.name = name
        self.muted = False
        self.last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._writer = writer
        self._hue = hue
        self._splitter = LineSplitter()
        self.log_path = log_path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._log_fd = os.open(log_path, flags, 0o644)

    def feed(self, data: bytes) -> None:
        """Log and show new output of the task."""
        self._log(data)
        self._show([line for line in self._splitter.feed(data) if not CHATTER.match(line)])

    def flush_line(self) -> None:
        """Show the unfinished line of a task that has exited."""
        self._show(self._splitter.end())

    def close(self) -> None:
        """Show the unfinished line and close the log."""
        self.flush_line()
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines as text, with invalid UTF-8 escaped."""
        return tuple(line.decode(errors="backslashreplace")[:_MAX_LAST_CHARS] for line in self.last)

    def _show(self, lines: list[bytes]) -> None:
        self.last.extend(lines)
        if not self.muted:
            for line in lines:
                self._writer.line(self.name, line, hue=self._hue)

    def _log(self, data: bytes) -> None:
        try:
            while data and self._log_fd >= 0:
                data = data[os.write(self._log_fd, data) :]
        except OSError as error:
            self._writer.say(f"cannot write {self.log_path}: {error.strerror}; continuing")
            with contextlib.suppress(OSError):
                os.close(self._log_fd)
            self._log_fd = -1


def _visible(line: bytes) -> bytes:
    """Return a line's last text after its carriage returns."""
    if b"\r" not in line:
        return line
    return next((text for text in reversed(line.split(b"\r")) if text), b"")


def _pieces(line: bytes) -> list[bytes]:
    size = MAX_LINE_BYTES
    return [line[first : first + size] for first in range(0, max(1, len(line)), size)]


_HURRIED_DRAIN_S = 1.0


class JobScreen:
    """Output of the tasks on `out`, and of the launcher on `err` (may be the same console)."""

    def __init__(self, *, out: Console, err: Console, verbosity: int = 0) -> None:
        self.out = out
        self.is_quiet = verbosity < 0
        self.err = err
        self.consoles = (out,) if out is err else (out, err)
        self._outputs: dict[Task, TaskOutput] = {}
        self._hues: dict[Task, int] = {}
        self._remote_lines: dict[Task, tuple[str, ...]] = {}
        self.hosts: dict[Task, str] = {}
        """Host of each task (empty if the job runs on one host)."""

    def open(self, task: Task, log_path: Path) -> TaskOutput:
        """Return a new output for a task, or raise OSError if its log cannot be created."""
        hue = self._hues.setdefault(task, len(self._hues))
        if (before := self._outputs.get(task)) is not None:
            before.close()
        output = TaskOutput(str(task), log_path=log_path, writer=self.out, hue=hue)
        self._outputs[task] = output
        return output

    def announce(self, text: str) -> None:
        """Show a line of the launcher in the tasks' output, unless the launcher is quiet."""
        if not self.is_quiet:
            self.out.say(text)

    def say(self, text: str) -> None:
        """Show lines of the launcher. Do not repeat a UsageError that is on the screen."""
        shown = self.out.mistake[1].decode(errors="backslashreplace")[:MAX_CAUSE_CHARS]
        if shown and self.out is self.err:
            text = text.replace(shown, "see the message above")
        self.out.write()
        self.err.say(text)

    def show_failure(self, task: Task, cause: str) -> None:
        """Show the root cause with its task's last lines, and hide later output of other tasks."""
        self.mute_others(task)
        failed = self._outputs.get(task)
        self.out.write()
        self.err.say(self._failure_block(task, failed, cause))

    def mute(self, task: Task) -> None:
        """Hide all later output of a task."""
        if task in self._outputs:
            self._outputs[task].muted = True

    def mute_others(self, task: Task) -> None:
        """Hide all later output of other tasks."""
        for other in self._outputs:
            if other != task:
                self.mute(other)

    def last_lines(self, task: Task) -> tuple[str, ...]:
        """Return the last lines of a task's output."""
        output = self._outputs.get(task)
        return output.last_lines() if output else self._remote_lines.get(task, ())

    def keep_last_lines(self, task: Task, lines: tuple[str, ...]) -> None:
        """Keep the last lines of a task on another host."""
        self._remote_lines[task] = lines

    def forget(self) -> None:
        """Forget all tasks, because the next attempt may have different tasks."""
        self._outputs.clear()
        self._remote_lines.clear()

    def drain(self, *, is_hurried: bool) -> None:
        """Write all pending output. If `is_hurried`, wait only briefly for the reader."""
        with contextlib.suppress(KeyboardInterrupt):
            for console in self.consoles:
                console.drain(_HURRIED_DRAIN_S if is_hurried else None)

    def close(self) -> None:
        """Close all logs."""
        for output in self._outputs.values():
            output.close()

    def _failure_block(self, task: Task, output: TaskOutput | None, cause: str) -> str:
        where = f" on {self.hosts[task]}" if task in self.hosts else ""
        lines, is_shown = self.last_lines(task), self.out is self.err
        texts = [self.out.mistake[1].decode(errors="backslashreplace")] if is_shown else lines
        place = f"see the message {'above' if is_shown else 'below'}"
        for text in [text for text in texts if ". Fix: " in text]:  # do not repeat a UsageError
            cause = cause.replace(text[:MAX_CAUSE_CHARS], place, 1)
        if is_shown and ". Fix: " in cause:  # lines of another host may come later
            self.out.mistake = b"", cause.partition(" (exit code ")[0].encode()
        head = f"{task}{where} failed first: {cause}"
        if not lines:
            return head if output is None else f"{head}\nit printed nothing"
        if is_shown:
            return f"{head}\nits output is in {output.log_path}" if output else head
        source = f", from {output.log_path}" if output else ""
        return "\n".join([head, f"its last lines{source}:", *(f"  {line}" for line in lines)])


def standard_screen(environ: Mapping[str, str], *, verbosity: int = 0) -> JobScreen:
    """Return a screen on this process's standard output and error."""
    out = _console(1, environ)
    err = out if os.path.samestat(os.fstat(1), os.fstat(2)) else _console(2, environ)
    return JobScreen(out=out, err=err, verbosity=verbosity)


def _console(fd: int, environ: Mapping[str, str]) -> Console:
    is_plain = environ.get("TERM") == "dumb" or environ.get("NO_COLOR")
    return Console(fd, colour=os.isatty(fd) and not is_plain)
