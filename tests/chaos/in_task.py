"""The faults that a task does to itself: at a step, a phase, or a write of a save."""

import json
import os
import resource
import signal
import sys
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
        watches = {
            name: _Watch(self, name=name, place=os.path.abspath(place))
            for name, place in places.items()
        }

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in _ON_FILES and isinstance(args[0], (str, os.PathLike)):
                for watch in watches.values():
                    watch.saw(event, os.fspath(args[0]), args)

        def fsync(fd: int | Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            path = os.readlink(f"/proc/self/fd/{number}")
            for watch in watches.values():
                watch.saw("fsync", path, ())
            real_fsync(fd)

        real_fsync = os.fsync
        os.fsync = fsync
        # By default Python turns the signal of a file that grew too long into an error.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        sys.addaudithook(hook)

    def at_write(self, number: int, *, save: int, of: str, event: str, path: str) -> None:
        """Acts if a fault is placed at this operation of this save."""
        if save not in (0, _SAVE_THAT_COUNTS):
            return
        of = of if save else f"{of} before the first"
        index, fault = self._current("write")
        if fault and fault["of"] == of and int(fault["at"].split()[1]) == number:
            self._do(index, fault, operation=event, path=os.path.basename(path))

    def at_first_file(self, *, save: int, of: str, path: str) -> None:
        """Has the kernel kill this process when the file that is opened gets 1,000 bytes long."""
        index, fault = self._current("half")
        if save == _SAVE_THAT_COUNTS and fault and fault["of"] == of:
            self._say(index, operation="half written", path=os.path.basename(path))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    def count(self, of: str, number: int) -> None:
        """Tells how many operations a save took, when the next one begins."""
        self._marks.write("points", of=of, count=number)

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


class _Watch:
    """Counts what happens below one directory."""

    def __init__(self, owner: InTask, *, name: str, place: str) -> None:
        self._owner = owner
        self._name = name
        self._below = place + os.sep
        self._save = 0
        self._number = 0
        self._files = 0

    def saw(self, event: str, path: str, args: tuple[Any, ...]) -> None:
        if not path.startswith(self._below) and path + os.sep != self._below:
            return
        if event == "open" and not _writes(args):
            return
        if path.startswith(self._below) and _begins_save(event, os.path.basename(path)):
            of = self._name if self._save else f"{self._name} before the first"
            self._owner.count(of, self._number)
            self._save += 1
            self._number = self._files = 0
        self._number += 1
        where: dict[str, Any] = {"save": self._save, "of": self._name, "path": path}
        if event == "open":
            self._files += 1
            if self._files == 1:
                self._owner.at_first_file(**where)
        self._owner.at_write(self._number, event=event, **where)


def _begins_save(event: str, name: str) -> bool:
    """Whether a checkpoint's directory is made or a model file opened to be written."""
    return (event == "os.mkdir" and "step-" in name) or (event == "open" and ".keras" in name)


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR))
