"""The faults that a task does to itself: at a step, a phase, or a write of a save."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marks import Marks, spent_file

_ON_FILES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "open"}
_SAVE_THAT_COUNTS = 2  # of an attempt: the first one shows that there was progress


class InTask:
    """Does the first fault of the list that has not happened yet, if it is this task's."""

    def __init__(self, directory: Path, *, task: str, marks: Marks) -> None:
        self._directory = directory
        self._task = task
        self._marks = marks
        self._faults: list[dict[str, Any]] = json.loads((directory / "faults.json").read_text())

    def next_step(self, step: int) -> int | None:
        """Returns the step of a fault that lies ahead, so that a range of steps ends there."""
        _, fault = self._current("step")
        at = int(fault["at"].split()[1]) if fault else 0
        return at if at > step else None

    def at_step(self, step: int) -> None:
        """To be called after each range of steps."""
        index, fault = self._current("step")
        if fault and step >= int(fault["at"].split()[1]):
            self._do(index, fault)

    def at_phase(self, phase: str) -> None:
        """To be called as a phase begins."""
        index, fault = self._current("phase")
        if fault and fault["at"].split()[1] == phase:
            self._do(index, fault)

    def watch_writes(self, places: dict[str, Path]) -> None:
        """Counts the operations on files below each place from now on, and acts on them.

        A new checkpoint directory or model file there begins a save. Python itself tells of
        everything but fsync, in whatever thread it happens.
        """
        watched = [
            _Watched(name=name, below=os.path.abspath(place) + os.sep)
            for name, place in places.items()
        ]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            is_named = event in _ON_FILES and isinstance(args[0], (str, os.PathLike))
            if is_named and (event != "open" or _writes(args)):
                saw(event, os.fspath(args[0]))

        def fsync(fd: int | Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            saw("fsync", os.readlink(f"/proc/self/fd/{number}"))
            real_fsync(fd)

        def saw(event: str, path: str) -> None:
            for place in watched:
                if f"{path}{os.sep}".startswith(place.below):
                    self._saw(place, event, path)

        real_fsync = os.fsync
        os.fsync = fsync
        # By default Python turns the signal of a file that grew too long into an error.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        sys.addaudithook(hook)

    def _saw(self, place: _Watched, event: str, path: str) -> None:
        """Counts an operation, and does the fault that is placed at it."""
        name = os.path.basename(path)
        if path.startswith(place.below) and _begins_save(event, name):
            self._marks.write("points", of=place.of, count=place.number)
            place.save += 1
            place.number = place.files = 0
        place.number += 1
        place.files += event == "open"
        if place.save not in (0, _SAVE_THAT_COUNTS):
            return
        if place.save and event == "open" and place.files == 1:
            index, fault = self._current("half")
            if fault and fault["of"] == place.of:
                # The kernel kills this process when the file gets 1,000 bytes long.
                self._say(index, operation="half written", path=name)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        index, fault = self._current("write")
        if fault and fault["of"] == place.of and int(fault["at"].split()[1]) == place.number:
            self._do(index, fault, operation=event, path=name)

    def _current(self, kind: str) -> tuple[int, dict[str, Any] | None]:
        for index, fault in enumerate(self._faults):
            if not spent_file(self._directory, index).exists():
                mine = fault["in_task"] and fault["task"] == self._task
                return index, fault if mine and fault["at"].split()[0] == kind else None
        return -1, None

    def _do(self, index: int, fault: dict[str, Any], **found: str) -> None:
        self._say(index, **found)
        os.kill(os.getpid(), signal.SIGKILL if fault["do"] == "kill" else signal.SIGSTOP)

    def _say(self, index: int, **found: str) -> None:
        spent_file(self._directory, index).touch()
        self._marks.write("fault", index=index, **found)


@dataclass(kw_only=True)
class _Watched:
    """What has happened below a directory: the saves, and the operations of the present one."""

    name: str
    below: str
    save: int = 0
    number: int = 0
    files: int = 0

    @property
    def of(self) -> str:
        return self.name if self.save else f"{self.name} before the first"


def _begins_save(event: str, name: str) -> bool:
    """Whether a checkpoint's directory is made or a model file opened to be written."""
    return (event == "os.mkdir" and "step-" in name) or (event == "open" and ".keras" in name)


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR))
