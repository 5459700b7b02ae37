"""What a sweep's chief deals with in tests: trials that are no processes, hosts and their mishaps.

The chief, the journal, the leases, the runners and the rule of the guard are the project's own.
Simulated are the trials' processes and, in a `World`, the network and the time. No lock of a file
system keeps two trials from one directory: the leases have to.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from tfdist.files import write_json
from tfdist.launch.multihost.rendezvous import (
    Lost,
    MessageReceived,
    News,
    PeerJoined,
    Violation,
)
from tfdist.outputs.sweep_journal import Journal, Slot, Trial
from tfdist.tuning.chief import IDLE, RUNNING, STOPPED, Chief, NextTrial
from tfdist.tuning.directory import OWNERSHIP as OWNERSHIP_FILE
from tfdist.tuning.directory import Ownership
from tfdist.tuning.guard import LeaseGuard
from tfdist.tuning.options import RunOptions
from tfdist.tuning.protocol import ALIVE, LEASE_S, Message, SweepAddress
from tfdist.tuning.remote_runner import ChiefClient, RemoteRunner
from tfdist.tuning.serving import ServingRunner
from tfdist.tuning.trial_job import Completed, Failed, Killed, Outcome, TrialJob

BEGUN = {"objective": "val_accuracy", "direction": "max", "tuner": "random", "seed": 3}


class Crash(BaseException):
    """The chief is killed: nothing of it runs any more."""


class CrashingJournal(Journal):
    """Dies at the write with number `at`: before it, within it, or after it."""

    def __init__(self, path: Path, *, at: int | None = None, how: str = "before", **begun: Any):
        super().__init__(path, time_of_day=itertools.count(1.0).__next__)
        self._left, self._how = None, how
        if not self.lines:
            super().add("begun", **{**BEGUN, **begun})
        self._left = at

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        if self._left is None or self._left > 0:
            if self._left is not None:
                self._left -= 1
            return super().add(event, **fields)
        if self._how != "before":
            super().add(event, **fields)
        if self._how == "within":
            os.truncate(self.path, self.path.stat().st_size - 5)
        raise Crash


@dataclass
class FakeSearch:
    """Asks for `count` trials; IDLE while more than `ahead` are going on."""

    lines: Sequence[Mapping[str, Any]]
    count: int = 4
    ahead: int = 99
    asked: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replay(self.lines)

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            if line["event"] == "asked" and line["trial"] is not None:
                self.asked.append(line["trial"])
            elif line["event"] == "ended":
                self.told[line["trial"]] = line["status"]

    def ask(self) -> NextTrial:
        going_on = set(self.asked) - set(self.told)
        if len(self.asked) >= self.count:
            return NextTrial(status=STOPPED)
        if len(going_on) >= self.ahead:
            return NextTrial(status=IDLE)
        name = str(len(self.asked))
        self.asked.append(name)
        return NextTrial(status=RUNNING, trial=name, values={"x": int(name) + 1})

    def tell(
        self, trial: str, *, status: str, history: Iterable[Mapping[str, float]], reason: str
    ) -> None:
        assert trial not in self.told, "told twice"
        self.told[trial] = status

    def publish(self, trials: Iterable[str] | None = None) -> None:
        pass


def by_number(job: TrialJob) -> Completed:
    """The score is the better, the smaller the number in the trial's first flag is."""
    score = 1 / (1 + int(job.flags[0].rpartition("=")[2]))
    history = ({"virtual_epoch": 1, "val_accuracy": score},)
    return Completed(history=history, score=score, best_virtual_epoch=1)


@dataclass
class Disk:
    """What trials leave behind, whoever started them."""

    length: int = 2
    """The looks that a trial needs to its end, where its goal has no virtual epoch for that."""
    result: Callable[[TrialJob], Completed] = by_number
    fates: dict[str, list[Outcome]] = field(default_factory=dict)
    """How trials end else, one after the other."""
    fate_of: Callable[[str], Outcome | None] = lambda name: None
    """How a trial ends else, whenever it is started."""
    done: dict[str, int] = field(default_factory=dict)
    """Run to the looks that it has had: where a trial that is started again goes on."""
    work: int = 0
    started: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    most_at_once: int = 0
    taken_over: list[tuple[str, int, int]] = field(default_factory=list)
    """Trials that another runner has: name, lease and runner."""
    on_wait: Callable[[], object] = lambda: None
    """Called where the chief waits."""
    signals: list[int] = field(default_factory=list)
    """What has come to the chief."""

    def outcome(self, job: TrialJob) -> Completed | None:
        needed = job.goal.until or self.length
        return self.result(job) if self.done.get(job.run_dir.name, 0) >= needed else None


class FakeTrial:
    """A trial that was started: it does a step at each look."""

    pid = pidfd = None

    def __init__(self, disk: Disk, job: TrialJob) -> None:
        self.disk, self.job, self.name = disk, job, job.run_dir.name
        self.is_asked_to_stop = False
        disk.started.append(self.name)
        assert self.name not in disk.running, "two jobs in one directory"
        disk.running.add(self.name)
        disk.most_at_once = max(disk.most_at_once, len(disk.running))

    def poll(self) -> Outcome | None:
        outcome = self._outcome()
        if outcome is not None:
            self.disk.running.discard(self.name)
        return outcome

    def _outcome(self) -> Outcome | None:
        if self.is_asked_to_stop:
            return Killed(reason="asked to stop")
        if fates := self.disk.fates.get(self.name):
            return fates.pop(0)
        if fate := self.disk.fate_of(self.name):
            return fate
        self.disk.done[self.name] = self.disk.done.get(self.name, 0) + 1
        self.disk.work += 1
        return self.disk.outcome(self.job)

    def stop(self) -> None:
        self.is_asked_to_stop = True

    def taken(self) -> None:
        pass


class FakeRunner:
    """Starts trials on a disk."""

    def __init__(self, disk: Disk | World, slots: int = 1) -> None:
        self.disk = disk
        self.slots = slots

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        return self.disk.outcome(job)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return [{}] * self.disk.done.get(run_dir.name, 0)

    def free_slots(self, taken: Collection[Slot]) -> list[Slot]:
        slots = [Slot(number=number) for number in range(self.slots)]
        return [place for place in slots if place not in taken]

    def start(self, job: TrialJob) -> FakeTrial:
        return FakeTrial(self.disk, job)

    def take_over(self, job: TrialJob) -> FakeTrial:
        self.disk.taken_over.append((job.trial, job.lease, job.slot.runner))
        return FakeTrial(self.disk, job)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        self.disk.on_wait()


def flags_of(trial: Trial) -> tuple[str, ...]:
    return tuple(f"--config.{name}={value}" for name, value in trial.hyperparameters.items())


def sweep_of(
    sweep_dir: Path,
    *,
    flags_of: Callable[[Trial], tuple[str, ...]] = flags_of,
    **options: Any,
) -> Any:
    """What a chief has to know of a sweep."""
    return SimpleNamespace(
        options=RunOptions(sweep_dir=sweep_dir, **options),
        max_epochs=9,
        tracked={},
        flags_of=lambda trial, seed: flags_of(trial),
        variables_of=lambda trial, seed: {},
    )


def make_chief(
    path: Path,
    disk: Disk,
    *,
    search_of: Callable[[Sequence[Mapping[str, Any]]], Any] = FakeSearch,
    at: int | None = None,
    how: str = "before",
    parallel: int = 1,
    sweep: Any = None,
    begun: Mapping[str, Any] = {},
    **changes: Any,
) -> Chief:
    """A new chief over what the one before has left; it dies at its write `at`."""
    disk.running.clear()  # a trial dies with its chief
    journal = CrashingJournal(path / "journal.jsonl", at=at, how=how, **begun)
    return Chief(
        sweep or sweep_of(path, **changes),
        search=search_of(list(journal.lines)),
        journal=journal,
        runner=FakeRunner(disk, parallel),
        observer=Mock(),
        stop_requests=lambda: disk.signals,
    )


def crashes_to_the_end(make: Callable[[], Chief]) -> int:
    """Runs chief after chief until one comes to the end; returns how many have died."""
    crashes = 0
    while True:
        try:
            assert make().run() == 0
            return crashes
        except Crash:
            crashes += 1


# Hosts with runners, by a turned clock.

TICK_S = 0.5
TRIALS = 5
LONGEST_S = 9000.0
EPOCHS = 9
LENGTH = 27
"""Ticks that a trial needs for all of them: longer than a lease."""
FAILS = "3"
"""A trial that raises when it has done half of that."""
OWNERSHIP = Ownership(sweep="s", address="a:1")


class Process:
    """A trial's launcher and its tasks: a step at each tick, saved, so that none is done twice."""

    def __init__(self, world: World, job: TrialJob, *, host: Host | None) -> None:
        self.world, self.job, self.host = world, job, host
        self.pid = next(world.pids)
        self.pidfd = None
        self.outcome: Outcome | None = None
        self.is_asked = False
        self.run = job.run_dir.name
        world.started[self.run] += 1
        world.processes[self.pid] = self

    def work(self) -> None:
        done = self.world.done
        if self.outcome is None and self.is_asked:
            self.outcome = Killed(reason="asked to stop")
        elif self.outcome is None:
            done[self.run] += 1
            if self.run == FAILS and done[self.run] >= LENGTH // 2:
                self.world.failures += 1
                self.outcome = Failed(reason="ValueError")
            self.outcome = self.outcome or self.world.outcome(self.job)

    def poll(self) -> Outcome | None:
        return self.outcome

    def stop(self) -> None:
        self.is_asked = True

    def kill(self) -> None:
        self.outcome = self.outcome or Killed(reason="SIGKILL")

    def taken(self) -> None:
        pass


@dataclass
class Host:
    """A host with a runner on it, its guard, and the network's view of it."""

    world: World
    rank: int
    held_up: int = 0
    """Ticks for which the runner's process hangs."""
    asleep: int = 0
    """Ticks for which the whole machine does."""
    cut: int = 0
    """Ticks for which nothing that is said arrives, either way."""
    is_gone: bool = False
    watched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.guard = LeaseGuard(self.world.now_s)
        self.member: SimMember | None = None
        self.client = SimClient(self)
        options = RunOptions(sweep_dir=self.world.path, join="a:1", parallel_trials=1)
        sides: dict[str, Any] = {"chief": self.client, "lease_guard": self}
        self.runner = RemoteRunner(
            options,
            SimpleNamespace(  # type: ignore[arg-type]
                outcome=self.world.outcome,
                start=lambda job: Process(self.world, job, host=self),
            ),
            **sides,
        )

    def watch(self, pid: int) -> None:
        self.watched.add(pid)

    def processes(self) -> list[Process]:
        mine = self.world.processes.values()
        return [one for one in mine if one.host is self and one.outcome is None]

    def kill_runner(self) -> None:
        """The kernel asks its trials to stop; the guard is there until they have ended."""
        self.is_gone = True
        self.client.close()
        for process in self.processes():
            process.stop()

    def power_off(self) -> None:
        """Nobody is told: the chief hears nothing any more."""
        self.is_gone = True
        for process in self.processes():
            process.kill()

    def turn(self) -> None:
        if self.asleep:
            self.asleep -= 1
            if self.asleep:
                return
        living = {one.pid for one in self.processes()}
        for pid, signum in self.guard.due(self.watched & living, self.world.now_s):
            process = self.world.processes[pid]
            process.stop() if signum.name == "SIGTERM" else process.kill()
        for process in self.processes():
            process.work()
        if self.held_up:
            self.held_up -= 1
        elif not self.is_gone:
            self.runner.go_on()
            if self.runner.exit_code is not None:
                self.kill_runner()
        self.cut = max(0, self.cut - 1)


class SimClient(ChiefClient):
    """A runner's side of its connection to the chief, over the world's network."""

    def __init__(self, host: Host) -> None:
        world = host.world
        super().__init__(
            SweepAddress(address=OWNERSHIP.address, token=b"", terms={}),
            sweep_dir=world.path,
            renew=host.guard.renew,
            clock=lambda: world.now_s,
        )
        self._host = host

    def _joining(self) -> Any:
        return SimpleNamespace(attempt=self._attempt)

    def _attempt(self, wake_fds: Sequence[int]) -> SimMember:
        if self._host.cut:
            raise TimeoutError("it does not answer")
        if self._host.world.chief is None:
            raise ConnectionRefusedError("Connection refused")
        self._host.member = SimMember(self._host)
        return self._host.member


class SimMember:
    """A connection, by the rules of `Member` and `RunnerServer`."""

    def __init__(self, host: Host) -> None:
        if not host.world.join(host.rank):
            raise Violation("its connection before this one is not known to have ended")
        self.lost = ""
        self._host = host
        self._inbox: list[Message] = []
        self._under_way: list[tuple[bool, Message]] = []
        """What a cut holds up: whether to the chief, and what; a connection loses nothing."""
        self._heard_s = host.world.now_s

    def turn(self) -> None:
        if not self._host.cut:
            under_way, self._under_way = self._under_way, []
            for is_said, message in under_way:
                self._pass(is_said, message)
        if self._inbox:
            self._heard_s = self._host.world.now_s
        if self._host.world.now_s - self._heard_s >= LEASE_S:
            self.lost = "no word"

    def take_messages(self) -> list[Message]:
        heard, self._inbox = self._inbox, []
        return heard

    def send(self, message: Message) -> None:
        self._pass(True, message)

    def deliver(self, message: Message) -> None:
        self._pass(False, message)

    def _pass(self, is_said: bool, message: Message) -> None:
        if self._host.cut:
            self._under_way.append((is_said, message))
        elif not is_said:
            self._inbox.append(message)
        elif not self._host.world.said(self._host.rank, message):
            self.lost = "reset"  # the chief has given us up

    def close(self) -> None:
        self.lost = self.lost or "closed"
        if not self._host.cut:
            self._host.world.lose(self._host.rank, "reset")


class WorldJournal(CrashingJournal):
    """A journal whose chief is dead when it has died there."""

    world: World

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        try:
            return super().add(event, **fields)
        except Crash:
            self.world.is_dead = True
            raise


class World:
    """All there is; `run` starts a chief again and again until the sweep has ended."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int = 0,
        trials: int = TRIALS,
        search_of: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None,
    ) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.trials = trials
        self._search_of = search_of or (lambda lines: FakeSearch(lines, count=trials))
        self.now_s = 1000.0
        self.pids = iter(range(1, 1 << 30))
        self.done: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.failures = 0
        self.processes: dict[int, Process] = {}
        self.hosts: dict[int, Host] = {}
        self.chief: Chief | None = None
        self.is_dead = False
        """Whether the chief was killed just now: what it does on its way out does not happen."""
        self.chiefs = 0
        self.events: Callable[[], None] = lambda: None
        self._heard_s: dict[int, float] = {}
        self._news: list[News] = []
        write_json(path / OWNERSHIP_FILE, asdict(OWNERSHIP))
        self._eventfd = os.eventfd(1)  # readable for ever: the chief never waits

    # what the chief sees of the line

    def fileno(self) -> int:
        return self._eventfd

    def take_news(self) -> list[News]:
        if self.is_dead:
            raise Crash
        self.tick()
        news, self._news = self._news, []
        return news

    def send(self, rank: int, message: Message) -> None:
        if rank in self._heard_s and not self.is_dead:
            self.deliver(rank, message)

    def deliver(self, rank: int, message: Message) -> None:
        member = self.hosts[rank].member
        if member is not None and not member.lost:
            member.deliver(message)

    def close(self) -> None:
        pass

    # what the runners' side does

    def join(self, rank: int) -> bool:
        if rank in self._heard_s:
            return False
        self._heard_s[rank] = self.now_s
        self._news.append(PeerJoined(rank=rank))
        return True

    def said(self, rank: int, message: Message) -> bool:
        if rank not in self._heard_s:
            return False
        self._heard_s[rank] = self.now_s
        if ALIVE in message:
            self.deliver(rank, message)
        else:
            self._news.append(MessageReceived(rank=rank, message=message))
        return True

    def lose(self, rank: int, cause: str) -> None:
        if rank in self._heard_s:
            self._news.append(Lost(rank=rank, cause=cause, heard_s=self._heard_s.pop(rank)))

    # the time

    def outcome(self, job: TrialJob) -> Completed | None:
        run, epochs = job.run_dir.name, job.goal.until or EPOCHS
        if self.done[run] * EPOCHS < LENGTH * epochs:
            return None
        top = 1 / (1 + int(run))
        history = tuple(
            {"virtual_epoch": epoch, "val_accuracy": top * epoch / EPOCHS}
            for epoch in range(1, epochs + 1)
        )
        score = top * epochs / EPOCHS
        return Completed(history=history, score=score, best_virtual_epoch=epochs)

    def tick(self) -> None:
        self.now_s += TICK_S
        assert self.now_s < LONGEST_S, "the sweep does not end"
        self.events()
        for host in list(self.hosts.values()):
            host.turn()
        awake = [one for host in self.hosts.values() if not host.asleep for one in host.processes()]
        writers = Counter(one.run for one in awake)
        assert all(count == 1 for count in writers.values()), f"two write at once: {writers}"
        for rank, heard_s in list(self._heard_s.items()):
            if self.now_s - heard_s >= LEASE_S:
                self.lose(rank, "no word")

    def add_host(self) -> Host:
        host = Host(self, len(self.hosts) + 1)
        self.hosts[host.rank] = host
        return host

    def kill_chief(self) -> None:
        self.is_dead = True
        raise Crash

    def run(self, *, at: int | None = None, how: str = "before", pause: int = 4) -> Chief:
        """Returns the last chief; the first one dies at its write `at`."""
        while True:
            try:
                chief = self._begin(at=at, how=how)
                assert chief.run() == 0
                os.close(self._eventfd)
                return chief
            except Crash:
                at = None
                self._chief_has_died()
                for _ in range(self.random.randrange(pause) if pause else 0):
                    self.tick()

    def _chief_has_died(self) -> None:
        self.chief, self.is_dead = None, False
        self._heard_s.clear()
        self._news.clear()
        for host in self.hosts.values():
            host.client.close()

    def _begin(self, *, at: int | None, how: str) -> Chief:
        self.chiefs += 1
        journal = WorldJournal(self.path / "journal.jsonl", at=at, how=how)
        journal.world = self
        journal._time_of_day = self._time_of_day
        serving = ServingRunner(
            FakeRunner(self, 0), self, ownership=OWNERSHIP, clock=lambda: self.now_s
        )
        search = self._search_of(list(journal.lines))
        self.chief = Chief(
            sweep_of(self.path), search=search, journal=journal, runner=serving, observer=Mock()
        )
        return self.chief

    def _time_of_day(self) -> float:
        """A clock that somebody sets, again and again."""
        return self.random.choice([0.0, 1e9, 2e9, -5.0])


class Mishaps:
    """What happens to a world at any tick, so often; there is always a runner, sooner or later."""

    def __init__(self, world: World, *, count: int) -> None:
        self._world = world
        self._left = count

    def __call__(self) -> None:
        world = self._world
        living = [host for host in world.hosts.values() if not host.is_gone]
        if not living:
            living = [world.add_host()]
        if self._left and world.random.random() < 0.12:
            self._left -= 1
            self._happen(world.random.choice(living), ticks=world.random.randrange(1, 45))

    def _happen(self, host: Host, *, ticks: int) -> None:
        match self._world.random.randrange(8):
            case 0 if self._world.chief is not None:
                self._world.kill_chief()
            case 1:
                host.kill_runner()
            case 2:
                host.power_off()
            case 3:
                host.held_up = ticks
            case 4:
                host.asleep = ticks
            case 5:
                host.cut = ticks
            case 6:
                host.client.close()
            case _:
                self._world.add_host()
