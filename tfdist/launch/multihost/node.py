"""Agent's main loop: starts and stops tasks of its host on request, and reports events."""

from __future__ import annotations

import contextlib
import math
import signal
import time

from tfdist.cluster import Task
from tfdist.errors import EXIT_FAILED, EXIT_PEER_MISSING, EXIT_USAGE, UsageError
from tfdist.launch.events import (
    NO_SENSE,
    AskForStacks,
    Ended,
    Event,
    Message,
    ShowFailure,
    Signal,
    Start,
    TaskAction,
    decode,
    decode_action,
    encode_event,
)
from tfdist.launch.multihost.hosts import HostPart
from tfdist.launch.multihost.pipe import Pipe
from tfdist.launch.plan import Attempt
from tfdist.launch.state import RESTART_GRACE_S

LOOK_EVERY_S = 0.5

_STATES_EVERY_S = 1.0
_GIVE_UP_S = 10.0


class Node:
    """A host with an agent. `run` returns the exit code of the whole job."""

    def __init__(self, part: HostPart, pipe: Pipe) -> None:
        self._job, self._group = part.job, part.group
        self._own, self._terms = part.own, part.terms
        self._screen, self._processes = part.screen, part.processes
        self._ports = part.ports
        self._pipe = pipe
        self._is_in_attempt = False
        self._cause = ""
        """Reason why the attempt's tasks cannot start, or an empty text."""
        self._states_sent_s = -math.inf
        self._stacks: dict[Task, tuple[str, ...]] = {}
        """Last lines that the launcher has received, for each task that prints its stacks."""

    def run(self) -> int:
        """Execute the launcher's messages until it ends the job or disconnects, then end tasks."""
        self._processes.watch(self._pipe.fileno(), self._turn)
        try:
            self._pipe.send({"hello": self._own, "terms": dict(self._terms)})
            self._say_ready()
            while not self._pipe.lost:
                code = self._serve()
                if code is not None:
                    return code
            return EXIT_PEER_MISSING
        finally:
            self._processes.unwatch(self._pipe.fileno())
            self._end_attempt(is_last=True)

    def _serve(self) -> int | None:
        """Report events and execute messages. Return the job's exit code if the job has ended."""
        for event in self._processes.wait(LOOK_EVERY_S):
            self._tell(event)
        self._pipe.turn()
        for message in self._pipe.take_messages():
            if "end" in message:
                code = message["end"]
                return code if isinstance(code, int) and 0 <= code < 256 else EXIT_FAILED
            if "finish" in message:
                self._end_attempt()
                self._say_ready()
                continue
            with contextlib.suppress(*NO_SENSE):
                self._execute(message)
        self._report()
        return None

    def _turn(self) -> None:
        self._pipe.turn()
        if self._pipe.lost:  # select would report the closed pipe forever
            self._processes.unwatch(self._pipe.fileno())

    def _tell(self, event: Event) -> None:
        lines = self._screen.last_lines(event.task) if isinstance(event, Ended) else ()
        self._pipe.send({**encode_event(event, now_s=time.monotonic()), "lines": lines})

    def _report(self) -> None:
        """Send new lines of requested stacks, and once a second the states of the tasks."""
        for task, sent in self._stacks.items():
            if (lines := self._screen.last_lines(task)) != sent:
                self._stacks[task] = lines
                self._pipe.send({"lines": lines, "task": str(task)})
        now_s = time.monotonic()
        if (running := self._processes.running) and now_s >= self._states_sent_s + _STATES_EVERY_S:
            self._states_sent_s = now_s
            states = {str(task): self._processes.state_of(task) for task in running}
            self._pipe.send({"states": states})

    def _execute(self, message: Message) -> None:
        match message:
            case {"attempt": attempt}:
                self._end_attempt()
                self._begin(decode(Attempt, attempt))
            case {"action": _} if self._is_in_attempt:
                if (ended := self._perform(decode_action(message))) is not None:
                    self._tell(ended)
            case _:
                pass

    def _perform(self, action: TaskAction) -> Ended | None:
        """Perform an action on a task and return the task's end if the task cannot start."""
        if isinstance(action, ShowFailure):
            self._screen.mute_others(action.task)  # the launcher shows the failure
        elif isinstance(action, Start) and self._cause:
            now_s = time.monotonic()
            return Ended(task=action.task, status=EXIT_USAGE, at_s=now_s, cause=self._cause)
        elif isinstance(action, AskForStacks):
            self._stacks[action.task] = self._screen.last_lines(action.task)
        return self._processes.perform(action)

    def _begin(self, attempt: Attempt) -> None:
        """Plan this host's tasks of an attempt, with the addresses of the whole cluster."""
        self._cause = ""
        if not attempt.logs.is_dir():
            self._cause = (
                f"{attempt.run_dir} is not shared: this host does not see {attempt.logs}. "
                "Fix: pass a --run_dir on a file system that all hosts share"
            )
            self._is_in_attempt = True
            return
        try:
            self._processes.begin(attempt, fork_log=f"fork-server-{self._group.rank}.log")
        except OSError as error:
            self._cause = f"{attempt.logs}: {error.strerror}"
        except UsageError as error:
            self._cause = str(error)
        self._is_in_attempt = True

    def _say_ready(self) -> None:
        self._pipe.send({"ready": [port.port for port in self._ports.renewed()]})

    def _end_attempt(self, *, is_last: bool = False) -> None:
        """Stop the running tasks, after the launcher disconnected or ended the attempt."""
        if not self._is_in_attempt:
            return
        self._is_in_attempt = False
        options, processes = self._job.options, self._processes
        is_hurried = options.max_restarts and not is_last
        grace_s = min(options.grace_s, RESTART_GRACE_S if is_hurried else math.inf)
        for signum, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _GIVE_UP_S)):
            for task in processes.running:
                processes.perform(Signal(task, signum))
            deadline_s = time.monotonic() + within_s
            while processes.running and (left_s := deadline_s - time.monotonic()) > 0:
                processes.wait(left_s)
        processes.finish()
        self._stacks.clear()
