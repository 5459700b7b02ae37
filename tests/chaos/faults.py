"""The faults of one run, one after the other: when each is due, how it is done, what followed."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.marks import spent_file
from tests.chaos.plan import Case, Fault
from tests.chaos.processes import Running, Told, from_tf_config, is_running, send, tasks_of
from tests.chaos.record import Record

_SLOW_CYCLE_S = (0.3, 0.1)  # stopped, running
STOPPED_AT_MOST_S = 90.0  # for the launcher to notice a task that was stopped
_PASSING = ("slow", "cut_network")
"""They end by themselves, and nothing need be restarted."""
_CLONE_NEWNET = 0x40000000


class Faults:
    """Acts on one job; the job's own process acts on those that it does to itself."""

    def __init__(
        self,
        case: Case,
        out: Path,
        faults: Sequence[Fault],
        *,
        checkpoints: Path,
        told: Told = from_tf_config,
    ) -> None:
        self.faults = faults
        self.records: list[Record] = []
        self.unexpected: list[str] = []
        """What the launcher said had failed without a fault."""
        self.disk: SmallDisk | None = None
        self._case = case
        self._out = out
        self._checkpoints = checkpoints
        self._told = told
        self._launcher = 0
        self._anchor_s = 0.0
        self._told_of: dict[str, Running] = {}
        self._attempt_of_fault = 0
        self._step: int | None = None
        self._begun: set[str] = set()
        self._begun_s = 0.0
        self._mend: Callable[[], None] | None = None
        self._later: list[tuple[float, Callable[[], None]]] = []
        text = json.dumps([{**asdict(fault), "in_task": fault.in_task} for fault in faults])
        (out / "faults.json").write_text(text)

    def has(self, do: str) -> bool:
        """Whether one of them is of this kind."""
        return any(fault.do == do for fault in self.faults)

    def pending_restart(self) -> bool:
        """Whether the last fault's restart has not come to its first steps."""
        return bool(self.records) and self.records[-1].last("first_step") is None

    def begin(self, launcher_pid: int) -> None:
        """The job has been started; what happens is counted from here."""
        self._launcher = launcher_pid
        self._count_from(time.monotonic())

    def named(self, line: str, now_s: float) -> None:
        """The launcher has said what failed; what it starts next counts from here."""
        self._count_from(now_s)
        self._mend_all()
        if not (self.records and self.records[-1].named(line, now_s)):
            self.unexpected.append(line)

    def ended(self, exit_code: int) -> None:
        """The launcher and all of its tasks are gone."""
        self._mend_all()
        if self.records and exit_code:
            self.records[-1].named("the launcher and its tasks have ended", time.monotonic())

    def tasks_went_on(self) -> None:
        """The launcher is gone and its tasks were not; the runner ends them."""
        if self.records:
            self.records[-1].place = "its tasks went on"

    def restarted_by_runner(self) -> None:
        """What comes now is started by the same command again."""
        if self.records and not self.records[-1].restarted_by:
            self.records[-1].restarted_by = "runner"

    def saw(self, mark: dict[str, Any]) -> None:
        """Takes a mark of a task."""
        if mark["event"] == "program":
            self._told_of[mark["task"]] = Running(pid=mark["pid"], attempt=mark["attempt"])
        if mark["event"] == "fault":
            fault = self.faults[mark["index"]]
            place = " ".join(v for v in (mark.get("operation", ""), mark.get("path", "")) if v)
            self._note(fault, at_s=mark["at"], place=place, attempt=mark["attempt"])
        if mark["attempt"] > self._attempt_of_fault:
            self._step = mark.get("step", self._step)
            if mark["event"] == "first_step":
                self._begun.add(mark["task"])
                self._begun_s = mark["at"]
        if self.records:
            self.records[-1].saw(mark)

    def tick(self, launcher_pid: int) -> None:
        """Does what is due; to be called often."""
        now_s = time.monotonic()
        for due in [entry for entry in self._later if entry[0] <= now_s]:
            self._later.remove(due)
            due[1]()
        done = len(self.records)
        if done < len(self.faults) and self._is_due(self.faults[done], now_s):
            fault = self.faults[done]
            tasks = self._tasks(launcher_pid)
            if len(tasks) == len(self._case.tasks) or (fault.task in tasks and fault.do == "kill"):
                self._do(fault, tasks)

    def _count_from(self, now_s: float) -> None:
        self._anchor_s = now_s
        self._begun.clear()
        self._step = None

    def _tasks(self, launcher_pid: int) -> dict[str, Running]:
        """The tasks that run: forked ones, which are no children of the launcher's, by marks."""
        marked = {n: task for n, task in self._told_of.items() if is_running(task.pid)}
        return {**marked, **tasks_of(launcher_pid, told=self._told)}

    def _is_due(self, fault: Fault, now_s: float) -> bool:
        if fault.in_task:
            return False
        last = self.records[-1] if self.records else None
        if last and last.detected_s is None and last.fault.do not in _PASSING:
            return False  # what it hits must be what came after
        if fault.kind == "start":
            return now_s >= self._anchor_s + fault.number
        if len(self._begun) < len(self._case.tasks):
            return False
        if fault.kind == "training":
            return now_s >= self._begun_s + fault.number
        return self._step is not None and self._step >= fault.number

    def _do(self, fault: Fault, tasks: Mapping[str, Running]) -> None:
        index, place = len(self.records), ""
        at_s = time.monotonic()
        match fault.do:
            case "kill":
                send(tasks[fault.task].pid, signal.SIGKILL)
            case "kill_all":
                send_all(tasks, signal.SIGKILL)
            case "kill_launcher":
                send(self._launcher, signal.SIGKILL)
            case "corrupt":  # while nobody can write another; then all are killed
                send_all(tasks, signal.SIGSTOP)
                place = corrupt_newest(self._checkpoints)
                at_s = time.monotonic()
                send_all(tasks, signal.SIGKILL)
            case "fill_disk":
                assert self.disk is not None
                self.disk.fill()
            case "stop":
                pid = tasks[fault.task].pid
                send(pid, signal.SIGSTOP)
                self._after(STOPPED_AT_MOST_S, lambda: self._give_up_on(index, pid))
            case "slow":
                self._slow(tasks[fault.task].pid, until_s=at_s + fault.lasts_s)
            case "cut_network":
                pid = self._launcher
                set_network(pid, up=False)
                self._mend = lambda: set_network(pid, up=True)
                self._after(fault.lasts_s, self._mend)
        spent_file(self._out, index).touch()
        attempt = max(task.attempt for task in tasks.values())
        self._note(fault, at_s=at_s, place=place, attempt=attempt)

    def _slow(self, pid: int, *, until_s: float) -> None:
        stopped_s, running_s = _SLOW_CYCLE_S
        if time.monotonic() >= until_s:
            return
        send(pid, signal.SIGSTOP)
        self._after(stopped_s, lambda: send(pid, signal.SIGCONT))
        self._after(stopped_s + running_s, lambda: self._slow(pid, until_s=until_s))

    def _give_up_on(self, index: int, pid: int) -> None:
        """Kills a stopped task that the launcher has not found."""
        if self.records[index].detected_s is None:
            self.records[index].place = "not found by the launcher; killed by the runner"
            send(pid, signal.SIGKILL)

    def _mend_all(self) -> None:
        """Gives back disk and network, as somebody would who has been told of the failure."""
        if self.disk is not None:
            self.disk.empty()
        if self._mend is not None:
            self._mend()
            self._mend = None

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, call))

    def _note(self, fault: Fault, *, at_s: float, place: str, attempt: int) -> None:
        if fault.do not in _PASSING:
            self._attempt_of_fault = attempt
            self._begun.clear()
        about = {"case": self._case.name, "tasks": len(self._case.tasks), "step": self._step}
        self.records.append(Record(fault=fault, at_s=at_s, attempt=attempt, place=place, **about))


# What is done to a job from outside: to its processes, its disk, its network.


def send_all(tasks: Mapping[str, Running], signum: int) -> None:
    for task in tasks.values():
        send(task.pid, signum)


def corrupt_newest(checkpoints: Path) -> str:
    """Turns over a byte in the middle of the newest checkpoint's largest file; returns its name."""
    newest = max(checkpoints.glob("step-*"), key=lambda p: int(p.name.rpartition(".")[2]))
    file = max((f for f in newest.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0xFF]))
    return f"{newest.name}/{file.name}"


class SmallDisk:
    """A tmpfs of a few megabytes, which can be filled and emptied; needs the right to mount."""

    def __init__(self, directory: Path, *, size_bytes: int) -> None:
        self._directory = directory
        self._filler = directory / ".filler"
        directory.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)]
        subprocess.run(command, check=True)

    def fill(self) -> None:
        """Takes all the room that is left."""
        with open(self._filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def empty(self) -> None:
        """Gives the room back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Keeps what is on it, and unmounts."""
        kept = self._directory.with_name(self._directory.name + "-kept")
        shutil.copytree(self._directory, kept, dirs_exist_ok=True)
        subprocess.run(["umount", "-l", str(self._directory)], check=False)


def own_network() -> None:
    """Puts the calling process into a network of its own, with a loopback interface that is up.

    For `preexec_fn`. Raises PermissionError without the right to.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise PermissionError(os.strerror(ctypes.get_errno()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def set_network(pid: int, *, up: bool) -> None:
    """Cuts the network of a process that has one of its own, or joins it again."""
    command = ["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "lo", "up" if up else "down"]
    subprocess.run(command, check=False, capture_output=True)
