"""What tests do with processes: run a new Python to its end, and wait for what others do."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def python(
    *words: object, timeout: float = 120.0, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run a new Python to its end; `given` is for `subprocess.run`."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **given)


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
