"""Host 0's view of a job on several hosts: who is there, and their tasks as if they were its own.

The supervisor decides about all tasks here. The launchers of the other hosts start what they are
told to, and tell what happens to it (`tfdist.launch.node`).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.cluster import ClusterSpec, HeldPort, Task, placement
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.hosts import Group
from tfdist.launch.options import LaunchOptions
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.screen import JobScreen
from tfdist.launch.signals import STOP_SIGNALS, SignalPipe
from tfdist.rendezvous.hub import Differs, Heard, Hub, Lost
from tfdist.rendezvous.link import Message
from tfdist.rendezvous.terms import fingerprint, summary_of_hosts

_TELL_S = 5.0  # before it is said who is being waited for
_GOODBYE_S = 2.0
_MAX_NAMES = 8


class Team:
    """The other hosts, from the first attempt to the last."""

    def __init__(
        self,
        group: Group,
        hub: Hub,
        *,
        options: LaunchOptions,
        strategy: str,
        screen: JobScreen,
        signals: SignalPipe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._hub = hub
        self._options = options
        self._strategy = strategy
        self._screen = screen
        self._signals = signals
        self._clock = clock
        self._ports: dict[int, list[int]] = {}  # of each host that is ready for an attempt
        self._others = tuple(range(1, len(group.hosts)))
        self._unlike: dict[int, tuple[str, ...]] = {}  # who was sent away, and why
        self._began = False
        self.host_of: dict[Task, int] = {}
        """The rank of the host of each task of this attempt."""

    @property
    def hub(self) -> Hub:
        """Returns the connections."""
        return self._hub

    def name(self, rank: int) -> str:
        """Returns the host of a rank as the user wrote it."""
        return self._group.hosts[rank]

    def gather(self) -> int | None:
        """Waits until all hosts are ready; returns the signal that asks to stop meanwhile.

        Raises:
            StartupTimeout: too few have come in time; the message names the others.
            UsageError: some of them differ from this one; who has not come by a moment later is
                not waited for to say whether it does, too.
        """
        began_s, said = self._clock(), False
        limit_s = self._options.startup_timeout_s
        while missing := self._missing():
            waited_s = self._clock() - began_s
            if self._unlike:
                limit_s = min(limit_s, waited_s + _TELL_S)
            if waited_s >= limit_s:
                break
            if waited_s >= _TELL_S and not said:
                said = True
                limit = f"{self._options.startup_timeout_s:g} s"
                self._screen.say(f"waiting for {self._named(missing)}, for {limit} in all")
            asked = self._wait()
            if asked is not None:
                return asked
        if self._unlike:
            raise self._differ()
        if missing:
            self._do_without(missing)
        return None

    def roll_call(self, *, own: str, terms: Mapping[str, str]) -> str:
        """Returns who is there, at which addresses, and what all of them have in common."""
        at = {0: own} | {rank: self._hub.address_of(rank) for rank in sorted(self._hub.present)}
        shown = [f"{self.name(rank)} at {at[rank]}" for rank in list(at)[:_MAX_NAMES]]
        more = f" and {len(at) - len(shown)} more" if len(at) > len(shown) else ""
        alike = [f"{name} {terms[name]}" for name in ("tfdist", "tensorflow", "keras")]
        return (
            f"{len(at)} hosts, alike in {', '.join(alike)}, configuration {fingerprint(terms)}: "
            f"{', '.join(shown)}{more}"
        )

    def specs(
        self,
        local: Callable[[ClusterSpec, Sequence[Task]], Sequence[ProcessSpec]],
        *,
        ports: Sequence[HeldPort],
        attempt: int,
        run_dir: Path,
    ) -> tuple[ProcessSpec, ...]:
        """Returns the processes of all tasks, and tells the hosts of the attempt.

        `local` makes those of this host; the others make theirs by themselves.
        """
        self._began = True
        at = {0: [port.address for port in ports]} | {
            rank: [placement.join(self._hub.address_of(rank), port) for port in self._ports[rank]]
            for rank in sorted(self._ports)
            if rank in self._hub.present
        }
        cluster = self._group.cluster(at, strategy=self._strategy)
        tasks = self._group.tasks(sorted(at))
        self.host_of = {task: rank for rank in tasks for task in tasks[rank]}
        self._screen.forget()
        self._screen.hosts = {task: self.name(rank) for task, rank in self.host_of.items()}
        self._ports.clear()
        logs = run_dir / "logs" / f"attempt-{attempt}"
        for rank in at.keys() - {0}:
            told = {"cluster": cluster.as_dict(), "tasks": [str(task) for task in tasks[rank]]}
            hosts = {str(task): host for task, host in self._screen.hosts.items()}
            where = {"number": attempt, "run_dir": str(run_dir), "strategy": self._strategy}
            self._hub.send(rank, {"attempt": {**told, **where, "hosts": hosts}})
        away = [
            _elsewhere(task, options=self._options, logs=logs)
            for task, rank in self.host_of.items()
            if rank
        ]
        here = local(cluster, tasks[0])
        return tuple(sorted([*here, *away], key=lambda spec: spec.task))

    def ready(self, rank: int, message: Message) -> None:
        """Takes down that a host is ready for an attempt, with these ports."""
        ports = message.get("ready")
        if isinstance(ports, list) and len(ports) == self._group.num_tasks(rank):
            self._ports[rank] = [int(port) for port in ports]

    def lost(self, rank: int) -> None:
        """Takes down that a host is gone."""
        self._ports.pop(rank, None)

    def end(self, exit_code: int, *, why: str = "") -> None:
        """Tells all hosts that the job is over, and waits a moment for them to hang up."""
        for rank in self._hub.present:
            self._hub.send(rank, {"end": exit_code, "why": why})
        deadline_s = self._clock() + _GOODBYE_S
        while self._hub.present and self._clock() < deadline_s:
            select.select([self._hub], [], [], 0.1)
            self._hub.turn()
        self._hub.close()

    def _wait(self) -> int | None:
        """Waits for news; returns a signal to stop, wherever it came from."""
        self._screen.flush()
        left_s = max(0.0, self._hub.next_s - self._clock())
        poll = select.poll()
        for fd in (self._hub.fileno(), self._signals.fd):
            poll.register(fd, select.POLLIN)
        poll.poll(left_s * 1000)
        self._hub.turn()
        for news in self._hub.take_news():
            match news:
                case Differs(rank=rank, what=what):
                    self._unlike[rank] = what
                case Heard(rank=rank, message={"asked": int(signum)}):
                    return signum
                case Heard(rank=rank, message=message):
                    self.ready(rank, message)
                case Lost(rank=rank):
                    self.lost(rank)
        return next((s for s in self._signals.read() if s in STOP_SIGNALS), None)

    def _do_without(self, missing: Sequence[int]) -> None:
        """Goes on with the hosts that are there, where that was asked for; else gives up."""
        there = 1 + len(self._others) - len(missing)
        fewest = self._options.min_workers
        workers = sum(self._group.slots) - sum(self._group.slots[rank] for rank in missing)
        can = self._began and self._strategy == "multiworker" and fewest is not None
        if can and fewest is not None and workers >= fewest:
            left = f"{workers} worker{'s' * (workers > 1)}"
            self._screen.say(f"going on without {self._named(missing)}, with {left}")
            return
        waited = f"waited {self._options.startup_timeout_s:g} s"
        turned_away = "; ".join(self._hub.turned_away)
        raise StartupTimeout(
            f"{there} of {len(self._group.hosts)} hosts are there: {waited} for "
            f"{self._named(missing)} at {placement.join(self.name(0), self._group.port)}"
            + (f" (turned away: {turned_away})" if turned_away else "")
            + ". Fix: start the launcher on each host, with the same line but for --node_rank, or "
            "raise --startup_timeout_s"
        )

    def _missing(self) -> list[int]:
        """Returns who is not ready; where some differ, who has not come."""
        known = self._unlike.keys() | self._hub.present if self._unlike else self._ports.keys()
        return [rank for rank in self._others if rank not in known]

    def _differ(self) -> UsageError:
        ranks = sorted(self._unlike)
        listed = [rank for rank in ranks if 0 < rank < len(self._group.hosts)]
        strange = [f"rank {rank}" for rank in ranks if rank not in listed][:_MAX_NAMES]
        hosts = f"host{'s' * (len(listed) > 1)} {self._named(listed)}" if listed else ""
        found = {self.name(r) if r in listed else f"rank {r}": self._unlike[r] for r in ranks}
        return UsageError(
            ", ".join(filter(None, [hosts, *strange])),
            received=summary_of_hosts(found),
            expected=f"the same as on {self.name(0)} (rank 0)",
            fix="start the same line, of the same installation, on all hosts",
        )

    def _named(self, ranks: Sequence[int]) -> str:
        names = ", ".join(f"{self.name(rank)} (rank {rank})" for rank in ranks[:_MAX_NAMES])
        more = len(ranks) - _MAX_NAMES
        return names + (f" and {more} more" if more > 0 else "")


def _elsewhere(task: Task, *, options: LaunchOptions, logs: Path) -> ProcessSpec:
    """Returns what is known here of a process on another host."""
    environ: Mapping[str, str] = {}
    return ProcessSpec(
        task=task,
        program=options.program,
        argv=(),
        env=environ,
        added=(),
        log_path=logs / f"{task}.log",
        title="",
    )
