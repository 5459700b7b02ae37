"""The journal of a sweep: a line for each thing that happened, on disk before the next happens."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, UsageError
from tfdist.files import fsync, one_line_errors

FILE_NAME = "journal.jsonl"


class Journal:
    """Adds lines to a journal; the sweep's chief, which holds the lock, has the only one.

    Raises:
      TfdistError: the file cannot be written.
      UsageError: it is no journal.
    """

    def __init__(self, path: Path, *, time_of_day: Callable[[], float]) -> None:
        self.path = path
        self._time_of_day = time_of_day
        self.lines = read(path)
        self._is_together = False
        self._cut_unfinished_line()

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Writes a line and returns it; when this returns, the line is on disk.

        Within `together` it outlives this process, and the machine only when that has ended.
        """
        line = {"event": event, "at": round(self._time_of_day(), 3), **fields}
        is_new = not self.path.exists()
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with one_line_errors(self.path):
            with FileIO(self.path, "a") as file:
                self._write(file, data)
            if is_new:
                fsync(self.path.parent)
        self.lines.append(line)
        return line

    def _write(self, file: FileIO, data: bytes) -> None:
        """Writes all of a line or, where the disk is full, nothing: others may come after it."""
        size_before = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
            if not self._is_together:
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), size_before)
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Has the lines that are added meanwhile on disk when it ends: the disk is waited for once.

        Raises TfdistError where it fails.
        """
        before, self._is_together = len(self.lines), True
        try:
            yield
        finally:
            self._is_together = False
            if len(self.lines) > before:
                with one_line_errors(self.path):
                    fsync(self.path)

    def _cut_unfinished_line(self) -> None:
        """Takes away what a killed chief had not finished, so that the next line is whole."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(self.path, end)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a journal, also of one that is being written; none without one.

    Raises UsageError for a file that is no journal.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TfdistError(f"{path}: {error.strerror or error}") from error
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, Mapping) or "event" not in line:
            raise UsageError(
                f"{path}, line {number}",
                received=repr(text[:60].decode(errors="replace")),
                expected="a line that a sweep wrote",
                fix="take the line out by hand, or give the sweep another --sweep_dir",
            )
        lines.append(dict(line))
    return lines
