"""The launcher of any host but 0: it starts and ends what it is told to, and tells what happens.

It runs its own program with its own environment and nothing else, whoever tells it: what comes from
host 0 are the addresses of the job and the names of tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tfdist.cluster import ClusterSpec, HeldPort, hold_ports
from tfdist.errors import EXIT_FAILED, EXIT_PEER_MISSING, UsageError
from tfdist.launch.attempts import Job
from tfdist.launch.events import Asked, Ended, Event
from tfdist.launch.hosts import Group
from tfdist.launch.messages import NO_SENSE, task_of, told
from tfdist.launch.node_tasks import LOOK_EVERY_S, NodeTasks
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.port_choice import replace_taken
from tfdist.launch.report import signal_name
from tfdist.launch.screen import JobScreen
from tfdist.launch.signals import STOP_SIGNALS, SignalPipe, exit_code_for
from tfdist.launch.supervisor import RESTART_GRACE_S
from tfdist.launch.workshop import Workshop
from tfdist.rendezvous.link import Message
from tfdist.rendezvous.member import Joining, Member


class Node:
    """This host's part of a job; `run` returns the exit code of the whole."""

    def __init__(
        self,
        job: Job,
        group: Group,
        joining: Joining,
        *,
        ports: Sequence[HeldPort],
        workshop: Workshop,
        screen: JobScreen,
        signals: SignalPipe,
        stack: contextlib.ExitStack,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._group = group
        self._joining = joining
        self._ports = list(ports)
        self._hold = partial(hold_ports, host=ports[0].host, among=job.ports)
        self._workshop = workshop
        self._screen = screen
        self._signals = signals
        self._stack = stack
        self._clock = clock
        self._asked: int | None = None
        self._here: NodeTasks | None = None

    def run(self) -> int:
        """Comes to host 0, as often as it is lost and the job may be started again."""
        options = self._job.options
        while True:
            member = self._joining.join(
                within_s=options.startup_timeout_s,
                wake_fds=[self._signals.fd],
                is_over=self._is_asked,
            )
            if member is None:
                return exit_code_for(self._asked or signal.SIGTERM)
            try:
                code = self._serve(member)
            finally:
                member.close()
                self._end_attempt()
            if code is not None:
                return code
            self._screen.say(f"the launcher of {self._group.hosts[0]} is gone: {member.lost}")
            self._screen.flush()
            if self._asked is not None:
                return exit_code_for(self._asked)
            if not options.max_restarts:
                return EXIT_PEER_MISSING

    def _is_asked(self) -> bool:
        came = [signum for signum in self._signals.read() if signum in STOP_SIGNALS]
        if came and self._asked is None:
            self._asked = came[0]
        return self._asked is not None

    def _serve(self, member: Member) -> int | None:
        """Does what host 0 says; returns the job's exit code, None if host 0 is lost."""
        self._say_ready(member)
        while not member.lost:
            for event in self._wait(member):
                self._tell(member, event)
            member.turn()
            for message in member.take_messages():
                if "end" in message:
                    return self._ended(message)
                with contextlib.suppress(*NO_SENSE):
                    self._obey(member, message)
            if self._here is not None:
                self._here.report_to(member)
        return None

    def _ended(self, message: Message) -> int:
        if why := str(message.get("why", "")):
            self._screen.say(why)
        code = message["end"]
        return code if isinstance(code, int) and 0 <= code < 256 else EXIT_FAILED

    def _wait(self, member: Member) -> Sequence[Event]:
        """Returns what has happened here, after a moment at the latest."""
        if self._here is not None:
            return self._here.wait()
        self._screen.flush()
        poll = select.poll()
        for fd in (member.fileno(), self._signals.fd):
            poll.register(fd, select.POLLIN)
        poll.poll(LOOK_EVERY_S * 1000)
        return [Asked(signum=s) for s in self._signals.read() if s in STOP_SIGNALS]

    def _tell(self, member: Member, event: Event) -> None:
        if isinstance(event, Asked):
            self._asked = event.signum if self._asked is None else self._asked
            self._screen.say(f"{_name(event.signum)}: {self._group.hosts[0]} ends the job")
            member.send({"asked": int(event.signum)})
        elif self._here is not None:
            self._here.note(event)
            lines = list(self._screen.last_lines(event.task)) if isinstance(event, Ended) else []
            member.send({**told(event, now_s=self._clock()), "lines": lines})

    def _obey(self, member: Member, message: Message) -> None:
        match message:
            case {"attempt": dict(attempt)}:
                self._end_attempt()
                self._begin(member, attempt)
            case {"start": name, "log": str(log)}:
                if self._here is not None:
                    for event in self._here.start(task_of(name), log=log):
                        self._tell(member, event)
            case {"finish": _}:
                self._end_attempt()
                self._say_ready(member)
            case {"failed": name, "cause": str(cause)}:
                self._screen.show_failure(task_of(name), cause)
            case _:
                if self._here is not None:
                    self._here.obey(message)

    def _begin(self, member: Member, told: Message) -> None:
        """Plans this host's tasks of an attempt, as the whole cluster is known now."""
        job = dataclasses.replace(self._job, run_dir=Path(told["run_dir"]))
        cluster = ClusterSpec.from_dict(told["cluster"])
        tasks = [task_of(name) for name in told["tasks"]]
        number = int(told["number"])
        self._screen.forget()
        self._screen.hosts = {task_of(name): str(host) for name, host in told["hosts"].items()}
        logs = job.run_dir / "logs" / f"attempt-{number}"
        specs: Sequence[ProcessSpec] = ()
        cause = ""
        try:
            logs.mkdir(parents=True, exist_ok=True)
            specs = job.specs_here(cluster, tasks, attempt=number)
        except OSError as error:
            cause = f"{logs}: {error.strerror}"
        except UsageError as error:
            cause = str(error)
        self._workshop.check()
        processes = self._workshop.processes(
            specs, chief=cluster.chief_task, fork_log=logs / f"fork-server-{self._group.rank}.log"
        )
        processes.watch(member.fileno())
        self._here = NodeTasks(
            specs, processes, screen=self._screen, cause=cause, fd=member.fileno()
        )
        self._screen.announce(f"attempt {number}: {', '.join(map(str, tasks))} in {job.run_dir}")

    def _say_ready(self, member: Member) -> None:
        self._ports = replace_taken(self._ports, stack=self._stack, hold=self._hold)
        member.send({"ready": [port.port for port in self._ports]})

    def _end_attempt(self) -> None:
        here, self._here = self._here, None
        if here is not None:
            here.end(grace_s=self._grace_s())

    def _grace_s(self) -> float:
        options = self._job.options
        return min(options.grace_s, RESTART_GRACE_S if options.max_restarts else math.inf)


def _name(signum: int) -> str:
    return "its output is closed" if signum == signal.SIGPIPE else signal_name(signum)
