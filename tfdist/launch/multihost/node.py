"""Launcher of a host other than 0: starts and ends tasks on request, reports events.

It runs its own program with its own environment and nothing else, whoever tells it: what comes from
host 0 are the addresses of the job and the names of tasks.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Sequence
from functools import partial

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
    StopRequest,
    TaskAction,
    decode,
    decode_action,
    encode_event,
    exit_code_for,
    request_name,
)
from tfdist.launch.multihost.hosts import HostPart
from tfdist.launch.multihost.rendezvous import Joining, Member
from tfdist.launch.plan import Attempt
from tfdist.launch.state import RESTART_GRACE_S

LOOK_EVERY_S = 0.5

_STATES_EVERY_S = 1.0
_GIVE_UP_S = 10.0


class Node:
    """The part of a host other than 0; `run` returns the exit code of the whole job."""

    def __init__(self, part: HostPart) -> None:
        self._job, self._group = part.job, part.group
        self._screen, self._processes = part.screen, part.processes
        self._ports = part.ports
        self._joining = Joining(
            part.group.hosts[0],
            part.group.port,
            source=part.own,
            token=part.group.token,
            rank=part.group.rank,
            terms=part.terms,
            timeout_s=part.job.options.host_timeout_s,
        )
        self._clock = time.monotonic
        self._stop_signal: int | None = None
        self._is_in_attempt = False
        self._cause = ""
        """Why none of the tasks of the attempt can be started, where that is so."""
        self._states_sent_s = -math.inf
        self._stacks: dict[Task, tuple[str, ...]] = {}
        """What was sent of the output of each task whose stacks were asked for."""

    def run(self) -> int:
        """Come to host 0, as often as it is lost and the job may be started again."""
        options = self._job.options
        while True:
            member = self._joining.join(
                within_s=options.startup_timeout_s,
                wake_fds=[self._processes.signals.fd],
                is_over=self._is_stop_requested,
            )
            if member is None:
                return exit_code_for(self._stop_signal or signal.SIGTERM)
            try:
                code = self._serve(member)
            finally:
                member.close()
                self._end_attempt()
            if code is not None:
                return code
            self._screen.say(f"the launcher of {self._group.hosts[0]} is gone: {member.lost}")
            if not options.max_restarts and not self._is_stop_requested():
                return EXIT_PEER_MISSING

    def _is_stop_requested(self) -> bool:
        self._wait(0)
        return self._stop_signal is not None

    def _wait(self, timeout_s: float) -> Sequence[Event]:
        """Return what has happened here; remember the first request to stop."""
        events = self._processes.wait(timeout_s)
        for event in events:
            if isinstance(event, StopRequest) and self._stop_signal is None:
                self._stop_signal = event.signum
        return events

    def _serve(self, member: Member) -> int | None:
        """Do what host 0 says; return the job's exit code, None if host 0 is lost."""
        self._processes.watch(member.fileno(), partial(self._turn, member))
        try:
            self._say_ready(member)
            while not member.lost:
                for event in self._wait(LOOK_EVERY_S):
                    self._tell(member, event)
                member.turn()
                for message in member.take_messages():
                    if "end" in message:
                        return self._ended(message)
                    if "finish" in message:
                        self._end_attempt()
                        self._say_ready(member)
                        continue
                    with contextlib.suppress(*NO_SENSE):
                        self._execute(member, message)
                self._report_to(member)
        finally:
            self._processes.unwatch(member.fileno())
        return None

    def _turn(self, member: Member) -> None:
        member.turn()
        if member.lost:  # it can be read for ever
            self._processes.unwatch(member.fileno())

    def _ended(self, message: Message) -> int:
        if why := str(message.get("why", "")):
            self._screen.say(why)
        code = message["end"]
        return code if isinstance(code, int) and 0 <= code < 256 else EXIT_FAILED

    def _tell(self, member: Member, event: Event) -> None:
        if isinstance(event, StopRequest):
            self._screen.say(f"{request_name(event.signum)}: {self._group.hosts[0]} ends the job")
        lines = self._screen.last_lines(event.task) if isinstance(event, Ended) else ()
        member.send({**encode_event(event, now_s=self._clock()), "lines": lines})

    def _report_to(self, member: Member) -> None:
        """Tell the stacks that were asked for as they come, and once a second the tasks' states."""
        for task, sent in self._stacks.items():
            if (lines := self._screen.last_lines(task)) != sent:
                self._stacks[task] = lines
                member.send({"lines": lines, "task": str(task)})
        now_s = self._clock()
        if (running := self._processes.running) and now_s >= self._states_sent_s + _STATES_EVERY_S:
            self._states_sent_s = now_s
            states = {str(task): self._processes.state_of(task) for task in running}
            member.send({"states": states, "full": self._screen.out.is_full})

    def _execute(self, member: Member, message: Message) -> None:
        match message:
            case {"attempt": attempt}:
                self._end_attempt()
                self._begin(decode(Attempt, attempt))
            case {"action": _} if self._is_in_attempt:
                if (ended := self._perform(decode_action(message))) is not None:
                    self._tell(member, ended)
            case _:
                pass

    def _perform(self, action: TaskAction) -> Ended | None:
        """Do something with a task; return its end where it cannot be started."""
        if isinstance(action, ShowFailure):
            self._screen.show_failure(action.task, action.cause)
        elif isinstance(action, Start) and self._cause:
            now_s = self._clock()
            return Ended(task=action.task, status=EXIT_USAGE, at_s=now_s, cause=self._cause)
        elif isinstance(action, AskForStacks):
            self._stacks[action.task] = self._screen.last_lines(action.task)
        return self._processes.perform(action)

    def _begin(self, attempt: Attempt) -> None:
        """Plan this host's tasks of an attempt, as the whole cluster is known now."""
        self._cause = ""
        try:
            self._processes.begin(attempt, fork_log=f"fork-server-{self._group.rank}.log")
        except OSError as error:
            self._cause = f"{attempt.logs}: {error.strerror}"
        except UsageError as error:
            self._cause = str(error)
        self._is_in_attempt = True
        tasks = ", ".join(map(str, attempt.tasks))
        self._screen.announce(f"attempt {attempt.number}: {tasks} in {attempt.run_dir}")

    def _say_ready(self, member: Member) -> None:
        member.send({"ready": [port.port for port in self._ports.renewed()]})

    def _end_attempt(self) -> None:
        """End what still runs: host 0 is lost, or done with it."""
        if not self._is_in_attempt:
            return
        self._is_in_attempt = False
        options, processes = self._job.options, self._processes
        grace_s = min(options.grace_s, RESTART_GRACE_S if options.max_restarts else math.inf)
        for signum, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _GIVE_UP_S)):
            for task in processes.running:
                processes.perform(Signal(task, signum))
            deadline_s = self._clock() + within_s
            while processes.running and (left_s := deadline_s - self._clock()) > 0:
                self._wait(left_s)
        processes.finish()
        self._stacks.clear()
