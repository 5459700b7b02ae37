"""Launcher of a host other than 0: starts and ends tasks on request, reports events.

It runs its own program with its own environment and nothing else, whoever tells it: what comes from
host 0 are the addresses of the job and the names of tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tfdist.cluster import Task, hold_ports
from tfdist.cluster.ports import replace_taken
from tfdist.errors import EXIT_FAILED, EXIT_PEER_MISSING, EXIT_USAGE, UsageError
from tfdist.launch.events import (
    AskForStacks,
    Ended,
    Event,
    ShowFailure,
    Signal,
    Start,
    StopRequest,
    TaskAction,
    exit_code_for,
    request_name,
    task_of,
)
from tfdist.launch.messages import (
    NO_SENSE,
    Attempt,
    Message,
    decode,
    decode_action,
    encode_event,
)
from tfdist.launch.multihost.hosts import HostPart
from tfdist.launch.multihost.rendezvous import Joining, Member, readable
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen
from tfdist.launch.starter import ProcessSpec
from tfdist.launch.state import RESTART_GRACE_S

LOOK_EVERY_S = 0.5

_STATES_EVERY_S = 1.0
_STACKS_S = 0.2  # until stacks are in a task's output; host 0 waits for them `STACKS_S`
_GIVE_UP_S = 10.0


class NodeTasks:
    """This host's tasks of an attempt, which do as host 0 says.

    `cause` says why none of them can be started, where that is so; `fd` wakes `wait` up.
    """

    def __init__(
        self, processes: JobProcesses, *, screen: JobScreen, cause: str = "", fd: int
    ) -> None:
        self._processes = processes
        self._screen = screen
        self._cause = cause
        self._fd = fd
        self._clock = time.monotonic
        self._states_sent_s = -math.inf
        self._stacks: dict[Task, float] = {}
        processes.watch(fd)

    def perform(self, action: TaskAction) -> Ended | None:
        """Do something with a task; return its end where it cannot be started."""
        if isinstance(action, ShowFailure):
            self._screen.show_failure(action.task, action.cause)
        elif isinstance(action, Start) and self._cause:
            now_s = self._clock()
            return Ended(task=action.task, status=EXIT_USAGE, at_s=now_s, cause=self._cause)
        elif isinstance(action, AskForStacks):
            self._stacks[action.task] = self._clock() + _STACKS_S
        return self._processes.perform(action)

    def wait(self) -> Sequence[Event]:
        """Return what has happened, in time for the next report."""
        due_s = min(self._stacks.values(), default=math.inf) - self._clock()
        return self._processes.wait(max(0.0, min(LOOK_EVERY_S, due_s)))

    def report_to(self, member: Member) -> None:
        """Tell once a second in which state the tasks are, and the stacks that were asked for."""
        now_s = self._clock()
        for task in [task for task, due_s in self._stacks.items() if now_s >= due_s]:
            del self._stacks[task]
            member.send({"lines": list(self._screen.last_lines(task)), "task": str(task)})
        if (running := self._processes.running) and now_s >= self._states_sent_s + _STATES_EVERY_S:
            self._states_sent_s = now_s
            states = {str(task): self._processes.state_of(task) for task in running}
            member.send({"states": states})

    def end(self, *, grace_s: float) -> Sequence[StopRequest]:
        """End what still runs: host 0 is lost, or done with it; return requests to stop."""
        processes, requests = self._processes, list[StopRequest]()
        processes.unwatch(self._fd)
        for signum, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _GIVE_UP_S)):
            for task in processes.running:
                processes.perform(Signal(task, signum))
            deadline_s = self._clock() + within_s
            while processes.running and (left_s := deadline_s - self._clock()) > 0:
                events = processes.wait(left_s)
                requests += [event for event in events if isinstance(event, StopRequest)]
        processes.finish()
        return requests


class Node:
    """The part of a host other than 0; `run` returns the exit code of the whole job.

    What it starts, and the ports that replace one, end with `stack`.
    """

    def __init__(self, part: HostPart, *, stack: contextlib.ExitStack) -> None:
        self._job, self._group = part.job, part.group
        self._screen, self._signals = part.screen, part.signals
        self._ports = list(part.ports)
        self._hold = partial(hold_ports, host=part.ports[0].host, among=part.job.ports)
        self._stack = stack
        processes = JobProcesses(part.job, screen=part.screen, signals=part.signals)
        self._processes = stack.enter_context(processes)
        self._joining = Joining(
            part.group.hosts[0],
            part.group.port,
            source=part.own,
            token=part.group.token,
            rank=part.group.rank,
            terms=part.terms,
            timeout_s=part.job.options.host_timeout_s,
            clock=time.monotonic,
        )
        self._stop_signal: int | None = None
        self._here: NodeTasks | None = None

    def run(self) -> int:
        """Come to host 0, as often as it is lost and the job may be started again."""
        options = self._job.options
        while True:
            member = self._joining.join(
                within_s=options.startup_timeout_s,
                wake_fds=[self._signals.fd],
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
            self._screen.flush()
            if self._stop_signal is not None:
                return exit_code_for(self._stop_signal)
            if not options.max_restarts:
                return EXIT_PEER_MISSING

    def _is_stop_requested(self) -> bool:
        came = self._signals.stop_requests()
        if came and self._stop_signal is None:
            self._stop_signal = came[0]
        return self._stop_signal is not None

    def _serve(self, member: Member) -> int | None:
        """Do what host 0 says; return the job's exit code, None if host 0 is lost."""
        self._say_ready(member)
        while not member.lost:
            for event in self._wait(member):
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
            if self._here is not None:
                self._here.report_to(member)
        return None

    def _ended(self, message: Message) -> int:
        if why := str(message.get("why", "")):
            self._screen.say(why)
        code = message["end"]
        return code if isinstance(code, int) and 0 <= code < 256 else EXIT_FAILED

    def _wait(self, member: Member) -> Sequence[Event]:
        """Return what has happened here, after a moment at the latest."""
        if self._here is not None:
            return self._here.wait()
        self._screen.flush()
        readable([member.fileno(), self._signals.fd], within_s=LOOK_EVERY_S)
        return [StopRequest(signum=signum) for signum in self._signals.stop_requests()]

    def _tell(self, member: Member, event: Event) -> None:
        if isinstance(event, StopRequest):
            self._stop_signal = event.signum if self._stop_signal is None else self._stop_signal
            self._screen.say(f"{request_name(event.signum)}: {self._group.hosts[0]} ends the job")
        lines = self._screen.last_lines(event.task) if isinstance(event, Ended) else ()
        member.send({**encode_event(event, now_s=time.monotonic()), "lines": lines})

    def _execute(self, member: Member, message: Message) -> None:
        match message:
            case {"attempt": attempt}:
                self._end_attempt()
                self._begin(member, decode(Attempt, attempt))
            case {"action": _} if self._here is not None:
                if (ended := self._here.perform(decode_action(message))) is not None:
                    self._tell(member, ended)
            case _:
                pass

    def _begin(self, member: Member, attempt: Attempt) -> None:
        """Plan this host's tasks of an attempt, as the whole cluster is known now."""
        job = dataclasses.replace(self._job, run_dir=Path(attempt.run_dir))
        number, cluster, tasks = attempt.number, attempt.cluster, attempt.tasks
        self._screen.forget()
        self._screen.hosts = {task_of(name): host for name, host in attempt.hosts.items()}
        logs = job.run_dir / "logs" / f"attempt-{number}"
        specs: Sequence[ProcessSpec] = ()
        cause = ""
        try:
            logs.mkdir(parents=True, exist_ok=True)
            specs = job.specs_here(cluster, tasks, attempt=number, restarts=attempt.restarts)
        except OSError as error:
            cause = f"{logs}: {error.strerror}"
        except UsageError as error:
            cause = str(error)
        fork_log = f"fork-server-{self._group.rank}.log"
        self._processes.begin(specs, chief=cluster.chief_task, logs=logs, fork_log=fork_log)
        self._here = NodeTasks(
            self._processes, screen=self._screen, cause=cause, fd=member.fileno()
        )
        self._screen.announce(f"attempt {number}: {', '.join(map(str, tasks))} in {job.run_dir}")

    def _say_ready(self, member: Member) -> None:
        self._ports = replace_taken(self._ports, stack=self._stack, hold=self._hold)
        member.send({"ready": [port.port for port in self._ports]})

    def _end_attempt(self) -> None:
        here, self._here = self._here, None
        if here is not None:
            options = self._job.options
            grace_s = min(options.grace_s, RESTART_GRACE_S if options.max_restarts else math.inf)
            for request in here.end(grace_s=grace_s):
                self._stop_signal = self._stop_signal or request.signum
