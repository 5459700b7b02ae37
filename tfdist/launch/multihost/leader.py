"""Host 0's view of a job on several hosts: the other hosts and their tasks.

Here the supervisor decides about all tasks. The agents of the other hosts execute its decisions and
report events (`tfdist.launch.multihost.node`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tfdist.cluster import Task
from tfdist.cluster.address import join
from tfdist.errors import EXIT_PEER_MISSING, StartupTimeout, UsageError, named, require
from tfdist.launch.events import (
    NO_SENSE,
    AnswerResize,
    Ended,
    Event,
    Message,
    Resize,
    ShowFailure,
    Start,
    StopRequest,
    TaskAction,
    decode_event,
    encode,
    encode_action,
    task_of,
)
from tfdist.launch.membership import Go, Knock, View, Welcome
from tfdist.launch.multihost.agents import Hub
from tfdist.launch.multihost.hosts import HostPart
from tfdist.launch.plan import Attempt

_ANNOUNCE_S = 5.0  # before the launcher logs the missing hosts


class Team:
    """All hosts of a job and their processes, controlled from host 0."""

    def __init__(
        self,
        part: HostPart,
        hub: Hub,
        *,
        pem: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._part, self._group = part, part.group
        self.hub, self._pem = hub, pem
        self._options, self._kind = part.job.options, part.job.kind
        self._screen, self._local = part.screen, part.processes
        self._clock = clock
        self._ports: dict[int, list[int]] = {}  # by rank, of hosts that are ready for an attempt
        self._others = tuple(range(1, len(part.group.hosts)))
        self._error: UsageError | None = None  # the reason why an agent cannot start
        self._began = False
        self.host_of: dict[Task, int] = {}
        """Rank of the host of each task of this attempt, in the order of their start."""
        self._events: list[Event] = []
        self._alive: dict[Task, int] = {}
        self._lost: dict[int, str] = {}
        self._states: dict[Task, str | None] = {}
        self._stopping_ranks: set[int] = set()
        self._local.watch(hub.fileno())

    def gather(self) -> int | None:
        """Wait until all hosts are ready. Return the signal of a stop request meanwhile, or `None`.

        Raises:
            StartupTimeout: Too few hosts are ready in time. The message names the missing hosts.
            UsageError: A host has other versions or variables, or no agent can start there.
        """
        began_s, is_announced = self._clock(), False
        limit_s = self._options.startup_timeout_s
        self._error = None
        while missing := [rank for rank in self._others if rank not in self._ports]:
            waited_s = self._clock() - began_s
            if waited_s >= limit_s:
                self._do_without(missing)
                break
            if waited_s >= _ANNOUNCE_S and not is_announced:
                is_announced = True
                self._screen.say(f"waiting for {self._named(missing)} (timeout: {limit_s:g} s)")
            for event in self.wait(None):
                if isinstance(event, StopRequest):
                    return event.signum
            if self._error is not None:
                raise self._error
        if self._kind.is_elastic:
            self._require_apart()
        return None

    def _require_apart(self) -> None:
        """Refuse two hosts with one address: elastic workers tell hosts apart by it."""
        ranks: dict[str, int] = {}
        for rank, address in self._addresses().items():
            both = self._named([ranks.setdefault(address, rank), rank])
            require(
                ranks[address] == rank,
                "--hosts",
                f"{both} have one address, {address}",
                fix="list each host once, with all its tasks",
                code="bad-value",
            )

    def _addresses(self) -> dict[int, str]:
        """Return the address of each connected host that has tasks, by its rank."""
        at = {0: self._part.own} if self._group.num_tasks(0) else {}
        return at | {rank: self.hub.address_of(rank) for rank in sorted(self.hub.present)}

    def roll_call(self) -> str:
        """Return a line with the connected hosts, their addresses and their common versions."""
        terms, at = self._part.terms, self._addresses()
        versions = [f"{name} {terms[name]}" for name in ("tfdist", "tensorflow", "keras")]
        return f"{len(at)} host{'s' * (len(at) > 1)}, all with {', '.join(versions)}: " + named(
            f"{self._group.hosts[rank]} at {address}" for rank, address in at.items()
        )

    def begin_attempt(self, number: int, *, restarts: int) -> Sequence[Task]:
        """Begin an attempt on all ready hosts, set `host_of`, and return the tasks."""
        self._began = True
        self._alive.clear()
        self._lost.clear()
        self._states.clear()
        self._stopping_ranks.clear()
        at = {0: [port.address for port in self._part.ports.renewed()]} | {
            rank: [join(self.hub.address_of(rank), port) for port in self._ports[rank]]
            for rank in sorted(self._ports)
            if rank in self.hub.present
        }
        self._ports.clear()
        tasks = self._group.tasks(sorted(at))
        self.host_of = dict(sorted((task, rank) for rank in tasks for task in tasks[rank]))
        names = {str(task): self._group.hosts[rank] for task, rank in self.host_of.items()}
        plan = Attempt(
            number=number,
            restarts=restarts,
            run_dir=str(self._part.job.run_dir),
            cluster=self._group.cluster(at),
            tasks=tasks[0],
            pem=self._pem,
            hosts=names,
        )
        message = encode(plan)
        for rank in at.keys() - {0}:
            self.hub.send(rank, {"attempt": {**message, "tasks": encode(tasks[rank])}})
        self._local.begin(plan, fork_log="fork-server.log")
        return [*self.host_of]

    def _ready(self, rank: int, message: Message) -> None:
        ports = message.get("ready")
        if isinstance(ports, list) and len(ports) == self._group.num_tasks(rank):
            self._ports[rank] = [int(port) for port in ports]

    def end(self, exit_code: int) -> None:
        """Tell all agents the exit code of the job, and wait for their exit."""
        self._local.unwatch(self.hub.fileno())
        within_s = self._options.grace_s if self._began else 0.0
        self.hub.end({"end": exit_code}, within_s=within_s)

    def _do_without(self, missing: Sequence[int]) -> None:
        """Continue with the ready hosts if --min_workers allows it, else raise StartupTimeout."""
        listed = len(self._others) + bool(self._group.num_tasks(0))
        fewest = self._options.min_workers
        workers = sum(self._group.slots) - sum(self._group.slots[rank] for rank in missing)
        can_go_on = self._began and self._kind.can_shrink
        if can_go_on and fewest is not None and workers >= fewest:
            left = f"{workers} worker{'s' * (workers > 1)}"
            self._screen.say(f"continuing without {self._named(missing)}, with {left}")
            return
        within = f"within {self._options.startup_timeout_s:g} s"
        turned_away = "; ".join(self.hub.turned_away)
        raise StartupTimeout(
            f"{listed - len(missing)} of {listed} hosts connected {within}, without "
            f"{self._named(missing)}"
            + (f" ({turned_away})" if turned_away else "")
            + ". Fix: check that the hosts run and that the launcher reaches them, or raise "
            "--startup_timeout_s"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        return named(f"{self._group.hosts[rank]} (rank {rank})" for rank in ranks)

    # An attempt.

    def perform(self, action: TaskAction) -> Ended | None:
        """Perform an action on the task's host like `JobProcesses`. Show a failure on all hosts."""
        if isinstance(action, ShowFailure | View | Go | Welcome | Knock):
            for rank in self.hub.present:
                self.hub.send(rank, encode_action(action))
            return None if isinstance(action, ShowFailure) else self._local.perform(action)
        if isinstance(action, AnswerResize):
            return self._local.perform(action)
        task, rank = action.task, self.host_of[action.task]
        if not rank:
            return self._local.perform(action)
        if isinstance(action, Start):
            self._alive[task] = rank
            self._states.pop(task, None)
        self.hub.send(rank, encode_action(action))
        if isinstance(action, Start) and not self.can_start(task):
            self._end(task, self._lost.get(rank, "not connected"))
        return None

    def can_start(self, task: Task) -> bool:
        """Return whether the task's host has been connected during the whole attempt."""
        rank = self.host_of[task]
        return not rank or (rank in self.hub.present and rank not in self._lost)

    def is_here(self, task: Task) -> bool:
        """Return whether a task runs on this host."""
        return not self.host_of[task]

    def state_of(self, task: Task) -> str | None:
        """Return the state of a task's process in its host's last report."""
        if not self.host_of[task]:
            return self._local.state_of(task)
        return self._states.get(task, "S")

    def wait(self, timeout_s: float | None) -> Sequence[Event]:
        """Return the events since the last call, after at most `timeout_s` seconds."""
        self._turn()
        left_s = max(0.0, self.hub.next_s - self._clock())
        timeout_s = left_s if timeout_s is None else min(left_s, timeout_s)
        events = [*self._local.wait(0.0 if self._events else timeout_s)]
        self._turn()
        came, self._events = self._events, []
        return [*came, *(event for event in events if self._counts(event, rank=0))]

    def finish(self) -> None:
        """Clean up after the tasks on all hosts."""
        for rank in self.hub.present:
            self.hub.send(rank, {"finish": True})
        self._local.finish()

    def _turn(self) -> None:
        self.hub.turn()
        for rank, news in self.hub.take_news():
            if isinstance(news, UsageError):
                self._error = self._error or news
            elif isinstance(news, str):
                self._lost_host(rank, news)
            else:
                self._receive(rank, news)

    def _lost_host(self, rank: int, cause: str) -> None:
        self._ports.pop(rank, None)
        self._lost[rank] = cause
        for task in [task for task, host in self._alive.items() if host == rank]:
            self._end(task, cause)

    def _end(self, task: Task, why: str) -> None:
        rank = self._alive.pop(task)
        cause = f"lost host {self._group.hosts[rank]}: {why}"
        now_s = self._clock()
        self._events.append(Ended(task=task, status=EXIT_PEER_MISSING, at_s=now_s, cause=cause))

    def _receive(self, rank: int, message: Message) -> None:
        try:
            if "event" in message:
                self._event(rank, message)
            elif "states" in message:
                for name, state in dict(message["states"]).items():
                    if self._alive.get(task := task_of(name)) == rank:
                        self._states[task] = None if state is None else str(state)
            elif "lines" in message:
                lines = tuple(map(str, message["lines"]))
                self._screen.keep_last_lines(task_of(message["task"]), lines)
            else:
                self._ready(rank, message)
        except NO_SENSE:
            return

    def _event(self, rank: int, message: Message) -> None:
        event = decode_event(message, now_s=self._clock())
        if isinstance(event, StopRequest):
            self._events += [event] if self._counts(event, rank=rank) else []
            return
        if isinstance(event, Resize) or self._alive.get(event.task) != rank:
            return
        if isinstance(event, Ended):
            lines = tuple(map(str, message["lines"]))
            del self._alive[event.task]
            self._screen.keep_last_lines(event.task, lines)
        self._events.append(event)

    def _counts(self, event: Event, *, rank: int) -> bool:
        """Return whether a stop request counts. If several hosts get one, only the first counts.

        A second request on the same host counts: it kills the job.
        """
        if not isinstance(event, StopRequest):
            return not isinstance(event, Resize)  # a new worker would have no host
        is_new = rank not in self._stopping_ranks
        is_first = not self._stopping_ranks
        self._stopping_ranks.add(rank)
        return is_first or not is_new
