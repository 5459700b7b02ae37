"""The faults of one run, one after the other: when each is due, and what followed from it."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import actions
from tests.chaos.marks import spent_file
from tests.chaos.plan import Case, Fault
from tests.chaos.processes import Running, Told, from_tf_config, is_running, send, tasks_of
from tests.chaos.record import Record

_SLOW_CYCLE_S = (0.3, 0.1)  # stopped, running
STOPPED_AT_MOST_S = 90.0  # for the launcher to notice a task that was stopped
_PASSING = ("slow", "cut_network")
"""They end by themselves, and nothing need be restarted."""


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
        self.disk: actions.SmallDisk | None = None
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
        text = json.dumps([fault.as_dict() for fault in faults])
        (out / "faults.json").write_text(text)

    @property
    def left(self) -> Sequence[Fault]:
        """Those that have not happened."""
        return self.faults[len(self.records) :]

    @property
    def done(self) -> int:
        """How many have happened."""
        return len(self.records)

    def has(self, do: str) -> bool:
        """Returns whether one of them is of this kind."""
        return any(fault.do == do for fault in self.faults)

    def pending_restart(self) -> bool:
        """Whether the last fault's restart has not come to its first steps."""
        return bool(self.records) and self.records[-1].first_step_s is None

    def begin(self, launcher_pid: int) -> None:
        """The job has been started."""
        self._launcher = launcher_pid
        self._anchor_s = time.monotonic()
        self._begun.clear()
        self._step = None

    def named(self, line: str, now_s: float) -> None:
        """The launcher has said what failed; what it starts next counts from here."""
        self._anchor_s = now_s
        self._begun.clear()
        self._step = None
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
        if "step" in mark and mark["attempt"] > self._attempt_of_fault:
            self._step = mark["step"]
        if mark["event"] == "first_step" and mark["attempt"] > self._attempt_of_fault:
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
        if self.done < len(self.faults) and self._is_due(self.faults[self.done], now_s):
            fault = self.faults[self.done]
            tasks = self._tasks(launcher_pid)
            if len(tasks) == len(self._case.tasks) or (fault.task in tasks and fault.do == "kill"):
                self._do(fault, tasks)

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

    def _do(self, fault: Fault, tasks: dict[str, Running]) -> None:
        index, place = self.done, ""
        at_s = time.monotonic()
        match fault.do:
            case "kill":
                actions.kill({fault.task: tasks[fault.task]})
            case "kill_all":
                actions.kill(tasks)
            case "kill_launcher":
                send(self._launcher, signal.SIGKILL)
            case "corrupt":
                place, at_s = self._corrupt(tasks)
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
                actions.set_network(pid, up=False)
                self._mend = lambda: actions.set_network(pid, up=True)
                self._after(fault.lasts_s, self._mend)
        spent_file(self._out, index).touch()
        attempt = max(task.attempt for task in tasks.values())
        self._note(fault, at_s=at_s, place=place, attempt=attempt)

    def _corrupt(self, tasks: dict[str, Running]) -> tuple[str, float]:
        """Damages the newest checkpoint while nobody can write another, then kills all."""
        for task in tasks.values():
            send(task.pid, signal.SIGSTOP)
        place = actions.corrupt_newest(self._checkpoints)
        at_s = time.monotonic()
        actions.kill(tasks)
        return place, at_s

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
        self.records.append(
            Record(
                fault=fault,
                case=self._case.name,
                at_s=at_s,
                attempt=attempt,
                step=self._step,
                place=place,
                tasks=len(self._case.tasks),
            )
        )
