"""Jobs that are forked from one process, which imports TensorFlow once for all tests of a worker.

What a task does is the same however it was started (docs/adr/0011). Tests that are about the start
itself, or about what a user's own command does, start their jobs without this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from tfdist.launch.fork_server import ForkTemplate

IMPORTS = ("tensorflow", "keras", "tfdist.app.run")
Started = tuple[tuple[str, ...], tuple[int, ...]]
"""Flags of the launcher, and what it has to inherit for them (`pass_fds`)."""
Start = Callable[[], AbstractContextManager[Started]]
QUIET = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@functools.cache
def server() -> ForkTemplate:
    """The process that imports; it is started with the first job and ends with the tests."""
    warm = ForkTemplate(IMPORTS, environ={**os.environ, **QUIET}, log_path=_log())
    atexit.register(warm.close)
    return warm


def said() -> str:
    """What it has printed."""
    return _log().read_text() if _log().exists() else ""


@functools.cache
def _log() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="tfdist-warm-")
    atexit.register(folder.cleanup)
    return Path(folder.name) / "fork-server.log"


@contextlib.contextmanager
def forked() -> Iterator[Started]:
    """Has the launcher fork the tasks from the process that has imported."""
    with server().connect() as control:
        yield ("--start", "fork", "--fork_server", str(control.fileno())), (control.fileno(),)


@contextlib.contextmanager
def executed() -> Iterator[Started]:
    """Has the launcher start a new Python for each task."""
    yield ("--start", "exec"), ()


@contextlib.contextmanager
def as_it_comes() -> Iterator[Started]:
    """Leaves it to the launcher."""
    yield (), ()


def tasks_of(launcher: int) -> dict[int, str]:
    """The titles of the tasks of a launcher, however they were started, by process id.

    Of jobs that were `forked`, those of all that run now.
    """
    parents = [launcher, *_children(launcher), *_children(server().pid or 0)]
    found = {}
    for pid in (task for parent in parents for task in _children(parent)):
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_text().strip("\0")
            if re.match(r"tfdist \w+-\d+ ", title):
                found[pid] = title
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
