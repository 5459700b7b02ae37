"""How the tasks of a job are started: forked from the process that has imported for all tests.

What a task does is the same however it was started (docs/adr/0011). Tests that are about the start
itself, or about what a user's own command does, start their jobs without this.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tests.forked_python import SharedTemplate
from tfdist.launch.fork_server import FORK_SERVER

Started = tuple[tuple[str, ...], tuple[int, ...], dict[str, str]]
"""Flags and variables of the launcher, and in between its `pass_fds`."""
Start = Callable[[], AbstractContextManager[Started]]


@contextlib.contextmanager
def forked() -> Iterator[Started]:
    """Has the launcher fork the tasks from the process that has imported."""
    with SharedTemplate().connect() as control:
        fd = control.fileno()
        yield ("--start", "fork"), (fd,), {FORK_SERVER: str(fd)}


@contextlib.contextmanager
def executed() -> Iterator[Started]:
    """Has the launcher start a new Python for each task."""
    yield ("--start", "exec"), (), {}


def tasks_of(launcher: int) -> dict[int, str]:
    """The titles of the tasks of a launcher, however they were started, by process id.

    They are those whose standard output it reads.
    """
    reads, found = _pipes_of(launcher, "*"), {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            title = (process / "cmdline").read_text().strip("\0")
            if re.match(r"tfdist \w+-\d+ ", title) and _pipes_of(process.name, "1") & reads:
                found[int(process.name)] = title
    return found


def _pipes_of(pid: int | str, files: str) -> set[str]:
    """The pipes among the open files of a process."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").glob(files):
        with contextlib.suppress(OSError):  # it is closed meanwhile
            found.add(os.readlink(file))
    return {name for name in found if name.startswith("pipe:")}
