"""What a task of a chaos job tells the runner: a line for each thing that happened, and when.

Imported by the job before anything else, so it imports next to nothing.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

FILE_NAME = "marks.jsonl"


def spent_file(directory: Path, index: int) -> Path:
    """Returns the file that says that a fault of the list has happened."""
    return directory / f"spent-{index}"


class Marks:
    """Appends to one file from every task; a line is one write, so lines do not mix."""

    def __init__(self, directory: Path, *, task: str, attempt: int) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(directory / FILE_NAME, flags, 0o644)
        self._who = {"task": task, "attempt": attempt, "pid": os.getpid()}

    def write(self, event: str, **values: Any) -> None:
        """Says that `event` happens now, by the clock that all processes share."""
        line = {"event": event, "at": time.monotonic(), **self._who, **values}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Tail:
    """Reads the lines that were added since the last time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the new lines that are whole."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
