"""What a person sees of a job: the tasks' lines, and what the launcher itself has to say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from tfdist.cluster import Task
from tfdist.launch.console import Console
from tfdist.launch.output import TaskOutput
from tfdist.launch.plan import ProcessSpec

_LAST_WORDS_S = 1.0


class JobScreen:
    """Shows tasks on `out` and the launcher's own remarks on `err`, which may be the same."""

    def __init__(self, *, out: Console, err: Console) -> None:
        self.out = out
        self.err = err
        self.consoles = (out,) if out is err else (out, err)
        self._outputs: dict[Task, TaskOutput] = {}
        self._log_paths: dict[Task, str] = {}
        self._hues: dict[Task, int] = {}
        self._told: dict[Task, tuple[str, ...]] = {}
        self.hosts: dict[Task, str] = {}
        """Where each task is, in a job on several hosts."""

    def open(self, spec: ProcessSpec, *, is_chief: bool) -> TaskOutput:
        """Returns a new place for a task's output; OSError if its log cannot be made."""
        hue = self._hues.setdefault(spec.task, len(self._hues))
        if (before := self._outputs.get(spec.task)) is not None:
            before.close()
        output = TaskOutput(
            str(spec.task), log_path=spec.log_path, writer=self.out, hue=hue, is_chief=is_chief
        )
        self._outputs[spec.task] = output
        self._log_paths[spec.task] = str(spec.log_path)
        return output

    def announce(self, text: str) -> None:
        """Shows a line that belongs to the job's output."""
        self.out.say(text)

    def say(self, text: str) -> None:
        """Shows lines of the launcher's own."""
        self.out.write()
        self.err.say(text)

    def show_failure(self, task: Task, cause: str) -> None:
        """Shows what failed first and its last lines; from now on nothing of other tasks."""
        for other, output in self._outputs.items():
            output.muted = other != task
        failed = self._outputs.get(task)
        self.say(self._failure_block(task, failed, cause))

    def last_lines(self, task: Task) -> tuple[str, ...]:
        """Returns the last lines of a task's output."""
        output = self._outputs.get(task)
        return output.last_lines() if output else self._told.get(task, ())

    def told(self, task: Task, lines: tuple[str, ...]) -> None:
        """Takes the last lines of a task on another host."""
        self._told[task] = lines

    def forget(self) -> None:
        """Lets go of the tasks: the next attempt may have others."""
        self._outputs.clear()
        self._told.clear()

    def flush(self) -> None:
        """Writes what the reader takes without waiting, where no processes do it in their loop."""
        for console in self.consoles:
            console.write()

    def last_words(self, *, is_hurried: bool) -> None:
        """Waits for whoever reads the output, not for long when the job was asked to stop."""
        with contextlib.suppress(KeyboardInterrupt):
            for console in self.consoles:
                console.drain(_LAST_WORDS_S if is_hurried else None)

    def close(self) -> None:
        """Ends all logs and takes a progress line away."""
        for output in self._outputs.values():
            output.close()
        self.out.drop_progress()

    def _failure_block(self, task: Task, output: TaskOutput | None, cause: str) -> str:
        where = f" on {self.hosts[task]}" if task in self.hosts else ""
        head = f"{task}{where} failed first: {cause}"
        if output is None:
            told = [f"  {line}" for line in self._told.get(task, ())]
            return "\n".join([f"{head}\nits last lines:" if told else head, *told])
        log = self._log_paths[task]
        lines = output.last_lines()
        if not lines:
            return f"{head}\nit printed nothing"
        if self.out is self.err and output.is_last_on_screen():
            return f"{head}\nwhat it printed is above, and in {log}"
        return "\n".join([head, f"its last lines, from {log}:", *(f"  {line}" for line in lines)])


def standard_screen(environ: Mapping[str, str]) -> JobScreen:
    """Returns a screen on this process's standard output and error."""
    out = _console(1, environ)
    return JobScreen(out=out, err=out if _is_same(1, 2) else _console(2, environ))


def shows_in_place(fd: int, environ: Mapping[str, str]) -> bool:
    """Returns whether a line on `fd` can be written over, as on a terminal."""
    return os.isatty(fd) and environ.get("TERM") != "dumb"


def _console(fd: int, environ: Mapping[str, str]) -> Console:
    is_terminal = shows_in_place(fd, environ)
    colour = is_terminal and not environ.get("NO_COLOR")
    return Console(fd, is_terminal=is_terminal, colour=colour, columns=lambda: _columns(fd))


def _columns(fd: int) -> int:
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


def _is_same(fd: int, other: int) -> bool:
    one, two = os.fstat(fd), os.fstat(other)
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)
