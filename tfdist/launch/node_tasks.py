"""The tasks of one attempt on a host that is not the first."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import time
from collections.abc import Sequence

from tfdist.cluster import Task
from tfdist.errors import EXIT_USAGE
from tfdist.launch.events import Beat, Ended, Event, Started
from tfdist.launch.messages import task_of
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen
from tfdist.rendezvous.link import Message
from tfdist.rendezvous.member import Member

LOOK_EVERY_S = 0.5

_STATES_EVERY_S = 1.0
_SILENT_S = 3.0
_STACKS_S = 0.2  # until stacks are in a task's output; host 0 waits for them `STACKS_S`
_GIVE_UP_S = 10.0
_LOG = re.compile(r"[\w.-]+\.log")


class NodeTasks:
    """Starts and ends them as host 0 says, and knows what it is to be told.

    `cause` says why none of them can be started, where that is so; `fd` wakes `wait` up.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        processes: JobProcesses,
        *,
        screen: JobScreen,
        cause: str,
        fd: int,
    ) -> None:
        self._specs = {spec.task: spec for spec in specs}
        self.processes = processes
        self._screen = screen
        self._cause = cause
        self._fd = fd
        self._clock = time.monotonic
        self._running: dict[Task, float] = {}  # and when it last spoke
        self._told_s = -math.inf
        self._stacks: dict[Task, float] = {}

    def start(self, task: Task, *, log: str) -> Sequence[Event]:
        """Starts a task; returns its end where that cannot be."""
        now_s = self._clock()
        if self._cause:
            return [Ended(task=task, status=EXIT_USAGE, at_s=now_s, cause=self._cause)]
        if task not in self._specs or not _LOG.fullmatch(log):
            return []
        spec = self._specs[task]
        self._running[task] = now_s
        try:
            self.processes.start(dataclasses.replace(spec, log_path=spec.log_path.with_name(log)))
        except OSError as error:
            self._running.pop(task)
            cause = f"cannot be started: {error.strerror or error}"
            return [Ended(task=task, status=1, at_s=now_s, cause=cause)]
        return []

    def wait(self) -> Sequence[Event]:
        """Returns what has happened, in time for what is to be told."""
        due_s = min(self._stacks.values(), default=math.inf) - self._clock()
        return self.processes.wait(max(0.0, min(LOOK_EVERY_S, due_s)))

    def note(self, event: Event) -> None:
        """Takes down what has happened to a task."""
        match event:
            case Ended(task=task):
                self._running.pop(task, None)
            case Started(task=task) | Beat(task=task):
                self._running[task] = self._clock()
            case _:
                pass

    def obey(self, message: Message) -> None:
        """Does something with a task that runs."""
        match message:
            case {"signal": name, "number": int(number)}:
                self.processes.signal(task_of(name), signal.Signals(number))
            case {"stacks": name}:
                self.processes.ask_for_stacks(task_of(name))
                self._stacks[task_of(name)] = self._clock() + _STACKS_S
            case {"kill_alone": name}:
                self.processes.kill_alone(task_of(name))
            case _:
                pass

    def report_to(self, member: Member) -> None:
        """Tells once a second in which state the tasks are, and the stacks that were asked for."""
        now_s = self._clock()
        for task in [task for task, due_s in self._stacks.items() if now_s >= due_s]:
            del self._stacks[task]
            member.send({"lines": list(self._screen.last_lines(task)), "task": str(task)})
        if now_s - self._told_s < _STATES_EVERY_S or not self._running:
            return
        self._told_s = now_s
        silent = [task for task, at_s in self._running.items() if now_s - at_s > _SILENT_S]
        mute = [str(task) for task in silent if not self.processes.can_speak(task)]
        states = {str(task): self.processes.state_of(task) for task in self._running}
        member.send({"states": states, "mute": mute})

    def end(self, *, grace_s: float) -> None:
        """Ends what still runs: host 0 is lost, or done with it."""
        self.processes.unwatch(self._fd)
        for signum, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _GIVE_UP_S)):
            for task in self._running:
                self.processes.signal(task, signum)
            deadline_s = self._clock() + within_s
            while self._running and (left_s := deadline_s - self._clock()) > 0:
                for event in self.processes.wait(left_s):
                    self.note(event)
        self.processes.finish()
