"""What tests do with processes: run a new Python to its end, and wait for what others do."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def python(
    *words: object, timeout: float = 120.0, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a new Python to its end; `given` is for `subprocess.run`."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **given)


def script(path: Path, text: str) -> Path:
    """Write a program for a shell to a file that can be run."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def until(
    true: Callable[[], Any],
    *,
    within_s: float,
    why: Callable[[], object] = lambda: "it did not come about in time",
) -> Any:
    """Return what `true` gives once that is true; fail after `within_s`, and say why."""
    pause, end_s = threading.Event(), time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end_s, why()
        pause.wait(0.02)
    return found


def agents(mark: str = "") -> list[int]:
    """Return the process ids of the launcher's agents, of those with `mark` in their variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            is_agent = line.startswith(sys.executable.encode()) and b"bootstrap.py\0agent" in line
            found += [int(path.name)] * (is_agent and mark.encode() in environ)
    return found
