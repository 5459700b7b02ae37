"""A sweep on simulated hosts: its trials, the network, the time, and what goes wrong with them.

The chief, the journal, the leases, the runners and the rule of the guard are the project's own. No
lock of a file system keeps two trials from one directory: the leases have to.
"""

import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from tfdist.errors import EXIT_OK, EXIT_STOPPED
from tfdist.files import write_json
from tfdist.launch.multihost.rendezvous import Lost, MessageReceived, News, PeerJoined, Violation
from tfdist.outputs import sweep_journal
from tfdist.outputs.sweep_journal import JOURNAL, Journal, Slot, Trial
from tfdist.tuning import protocol
from tfdist.tuning.chief import IDLE, RUNNING, STOPPED, Chief, NextTrial
from tfdist.tuning.guard import LeaseGuard
from tfdist.tuning.options import RunOptions
from tfdist.tuning.protocol import ALIVE, LEASE_S, Message, Ownership, SweepAddress
from tfdist.tuning.remote_runner import ChiefClient, RemoteRunner
from tfdist.tuning.serving import ServingRunner
from tfdist.tuning.trial_job import Completed, Failed, Killed, Outcome, TrialJob

TICK_S = 0.5
LONGEST_S = 9000.0
BEGUN = {"objective": "val_accuracy", "direction": "max", "tuner": "random", "seed": 3}
OWNERSHIP = Ownership(sweep="s", address="a:1")
READABLE = os.eventfd(1)  # for ever: the chief never waits


class Crash(BaseException):
    """The chief is killed: nothing of it runs any more."""


class CrashingJournal(Journal):
    """Has its chief die at the write with number `at`: before it, within it, or after it."""

    def __init__(self, world: "World", *, at: int | None, how: str) -> None:
        clock = [0.0, 1e9, 2e9, -5.0]  # which somebody sets, again and again
        any_time = world.time_of_day or (lambda: clock[len(self.lines) % len(clock)])
        super().__init__(world.path / JOURNAL, time_of_day=any_time)
        self._world, self._left, self._how = world, math.inf, how
        if not self.lines:
            self.add("begun", **{**BEGUN, **world.begun})
        self._left = math.inf if at is None else at

    def add(self, event: str, *, durable: bool = True, **fields: Any) -> dict[str, Any]:
        self._left -= 1
        self._world.is_on_disk = durable
        line = {}
        if self._left >= 0 or self._how != "before":
            line = super().add(event, durable=durable, **fields)
        if self._left < 0:
            if self._how == "within":
                os.truncate(self.path, self.path.stat().st_size - 5)
            self._world.is_dead = True
            raise Crash
        return line

    def sync(self) -> None:
        super().sync()
        self._world.is_on_disk = True


@dataclass
class FakeSearch:
    """Asks for `count` trials; IDLE while more than `ahead` are going on."""

    lines: Sequence[Mapping[str, Any]] = ()
    count: int = 4
    ahead: int = 99
    think: Callable[[], object] = lambda: None
    asked: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.replay(self.lines)

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self.asked += [one["trial"] for one in lines if one["event"] == "asked" and one["trial"]]
        self.told |= {one["trial"] for one in lines if one["event"] == "ended"}

    def ask(self) -> NextTrial:
        self.think()
        if len(self.asked) >= self.count:
            return NextTrial(status=STOPPED)
        if len(self.asked) - len(self.told) >= self.ahead:
            return NextTrial(status=IDLE)
        name = str(len(self.asked))
        self.asked.append(name)
        return NextTrial(status=RUNNING, trial=name, values={"x": int(name) + 1})

    def tell(self, ended: Mapping[str, Any]) -> None:
        assert ended["trial"] not in self.told, "told twice"
        self.told.add(ended["trial"])

    def publish(self, trials: Iterable[str] | None = None) -> None:
        pass


def top_of(run: str) -> float:
    """The score of a run at its end, another one for each."""
    return 1 / (1 + int(run) * 37 % 101)


class Process:
    """A trial's launcher and its tasks: a step at each tick, saved, so that none is done twice."""

    pidfd = None

    def __init__(self, world: "World", job: TrialJob, host: "Host | None") -> None:
        self.world, self.job, self.host = world, job, host
        self.run = job.run_dir.name
        self.outcome: Outcome | None = None
        self.is_asked = False
        assert world.is_on_disk, "a trial is started before the disk has the line that says so"
        world.started.append(self.run)
        world.processes.append(self)
        self.pid = len(world.processes)
        world.most_at_once = max(world.most_at_once, sum(one.lives for one in world.processes))

    @property
    def lives(self) -> bool:
        return self.outcome is None

    def work(self) -> None:
        if self.lives and self.is_asked:
            self.kill("asked to stop")
        elif self.lives and (fates := self.world.fates.get(self.run)):
            self.outcome = fates.pop(0)
        elif self.lives and not (fate := self.world.fate_of(self.run)):
            self.world.done[self.run] += 1
            self.outcome = self.world.outcome(self.job)
        elif self.lives:
            self.outcome = fate

    def poll(self) -> Outcome | None:
        return self.outcome

    def stop(self) -> None:
        self.is_asked = True

    def kill(self, reason: str = "SIGKILL") -> None:
        self.outcome = self.outcome or Killed(reason=reason)

    def taken(self) -> None:
        pass


@dataclass
class Slots:
    """The runner of one machine, with so many slots."""

    world: "World"
    count: int = 1
    host: "Host | None" = None

    def outcome(self, job: TrialJob) -> Outcome | None:
        return self.world.outcome(job)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return [{}] * (self.world.done[run_dir.name] // self.world.ticks)

    def free_slots(self, taken: Iterable[Slot]) -> list[Slot]:
        return [one for one in map(lambda n: Slot(number=n), range(self.count)) if one not in taken]

    def start(self, job: TrialJob) -> Process:
        return Process(self.world, job, self.host)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        self.world.tick()


class Host:
    """A host with a runner on it, its guard, and what is wrong with it, each for so many ticks."""

    def __init__(self, world: "World", rank: int, slots: int) -> None:
        self.world, self.rank = world, rank
        self.held_up = self.asleep = self.cut = 0
        """The runner's process hangs; the machine sleeps; nothing arrives, either way."""
        self.is_gone = False
        self.watched: set[int] = set()
        self.member: SimMember | None = None
        self.guard = LeaseGuard(world.now_s)
        self.client = SimClient(self)
        options = RunOptions(
            sweep_dir=world.path, join="a:1", parallel_trials=slots, reconnect_s=LONGEST_S
        )
        self.runner = RemoteRunner(
            options, Slots(world, host=self), chief=self.client, lease_guard=self
        )

    def watch(self, pid: int) -> None:
        self.watched.add(pid)

    def processes(self) -> list[Process]:
        return [one for one in self.world.processes if one.host is self and one.lives]

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
        self.asleep = max(0, self.asleep - 1)
        if self.asleep:
            return
        living = {one.pid: one for one in self.processes()}
        for pid, signum in self.guard.due(self.watched & set(living), self.world.now_s):
            (living[pid].stop if signum == signal.SIGTERM else living[pid].kill)()
        for process in living.values():
            process.work()
        if self.held_up:
            self.held_up -= 1
        elif not self.is_gone:
            self.runner.go_on()
            if self.runner.code() is not None:
                self.kill_runner()
        self.cut = max(0, self.cut - 1)


class SimClient(ChiefClient):
    """A runner's side of its connection to the chief, over the world's network."""

    def __init__(self, host: Host) -> None:
        super().__init__(
            SweepAddress(address=OWNERSHIP.address, token=b"", terms={}),
            sweep_dir=host.world.path,
            renew=host.guard.renew,
            clock=lambda: host.world.now_s,
        )
        self._host = host

    def _joining(self) -> Any:
        return SimpleNamespace(attempt=lambda wake_fds: SimMember(self._host))


class SimMember:
    """A connection, by the rules of `Member` and `RunnerServer`; it loses nothing."""

    def __init__(self, host: Host) -> None:
        if host.cut:
            raise TimeoutError("it does not answer")
        if host.world.chief is None:
            raise ConnectionRefusedError("Connection refused")
        if not host.world.join(host.rank):
            raise Violation("its connection before this one is not known to have ended")
        self.lost = ""
        self._host = host
        self._inbox: list[Message] = []
        self._under_way: list[tuple[bool, Message]] = []
        """What a cut holds up: whether it is for the chief, and what."""
        self._heard_s = host.world.now_s
        host.member = self

    def turn(self) -> None:
        if not self._host.cut:
            under_way, self._under_way = self._under_way, []
            for is_said, message in under_way:
                self.carry(is_said, message)
        if self._inbox:
            self._heard_s = self._host.world.now_s
        if self._host.world.now_s - self._heard_s >= LEASE_S:
            self.lost = "no word"

    def take_messages(self) -> list[Message]:
        heard, self._inbox = self._inbox, []
        return heard

    def send(self, message: Message) -> None:
        self.carry(True, message)

    def carry(self, is_said: bool, message: Message) -> None:
        message = json.loads(json.dumps(message))
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


@dataclass
class World:
    """All there is; `run` starts a chief again and again until the sweep has ended."""

    path: Path
    seed: int = 0
    trials: int = 4
    """That the search asks for, if `search_of` makes no other of the journal's lines."""
    epochs: int = 2
    """Of a whole run."""
    ticks: int = 1
    """Of an epoch."""
    slots: int = 1
    """Of the chief's own machine."""
    slots_later: int | None = None
    """Of every chief after the first, where they differ."""
    options: dict[str, Any] = field(default_factory=dict)
    search_of: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None
    result: Callable[[TrialJob], Outcome | None] | None = None
    begun: Mapping[str, Any] = field(default_factory=dict)
    fates: dict[str, list[Outcome]] = field(default_factory=dict)
    """How trials end else, one after the other."""
    fate_of: Callable[[str], Outcome | None] = lambda run: None
    """How a trial ends else, whenever it runs."""
    events: Callable[[], object] = lambda: None
    """Called at each tick."""
    think: Callable[[], object] = lambda: None
    """Called at each question to the search."""
    time_of_day: Callable[[], float] | None = None
    """Of the journals, if their clock is right."""

    def __post_init__(self) -> None:
        self.path.mkdir(exist_ok=True)
        self.random = random.Random(self.seed)
        self.sweep: Any = SimpleNamespace(
            options=RunOptions(sweep_dir=self.path, **self.options),
            max_epochs=self.epochs,
            tracked={},
            flags_of=lambda trial, seed: flags_of(trial),
            variables_of=lambda trial, seed: {},
            asked_for=lambda values: None,
        )
        self.signals: list[int] = []
        """What has come to the chief."""
        self.now_s = 1000.0
        self.done: Counter[str] = Counter()
        """Ticks that each run has had: where a trial that is started again goes on."""
        self.started: list[str] = []
        self.processes: list[Process] = []
        self.most_at_once = 0
        """Under the last chief."""
        self.hosts: dict[int, Host] = {}
        self.chief: Chief | None = None
        self.is_dead = False
        self.is_on_disk = True
        """Whether the chief was killed just now: what it does on its way out does not happen."""
        self.chiefs = 0
        self._heard_s: dict[int, float] = {}
        self._news: list[News] = []
        write_json(self.path / protocol.OWNERSHIP, asdict(OWNERSHIP))

    def _by_run(self, job: TrialJob) -> Completed:
        epochs, top = job.goal.until or self.epochs, top_of(job.run_dir.name)
        history = tuple(
            {"virtual_epoch": n, "val_accuracy": top * n / self.epochs}
            for n in range(1, epochs + 1)
        )
        score = history[-1]["val_accuracy"]
        return Completed(history=history, score=score, best_virtual_epoch=epochs)

    def outcome(self, job: TrialJob) -> Outcome | None:
        needed = (job.goal.until or self.epochs) * self.ticks
        result = self.result or self._by_run
        return result(job) if self.done[job.run_dir.name] >= needed else None

    # The chief's line to its runners, as `RunnerServer` has it.

    def fileno(self) -> int:
        return READABLE

    def take_news(self) -> list[News]:
        if self.is_dead:
            raise Crash
        self.tick()
        news, self._news = self._news, []
        return news

    def send(self, rank: int, message: Message) -> None:
        member = self.hosts[rank].member if rank in self._heard_s else None
        if member is not None and not member.lost and not self.is_dead:
            member.carry(False, message)

    def close(self) -> None:
        pass

    # What the runners' side does.

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
            self.send(rank, message)
        else:
            self._news.append(MessageReceived(rank=rank, message=message))
        return True

    def lose(self, rank: int, cause: str) -> None:
        if rank in self._heard_s:
            self._news.append(Lost(rank=rank, cause=cause, heard_s=self._heard_s.pop(rank)))

    # The time.

    def tick(self) -> None:
        self.now_s += TICK_S
        assert self.now_s < LONGEST_S, "the sweep does not end"
        self.events()
        for process in self.processes:
            if process.host is None:
                process.work()
        for host in list(self.hosts.values()):
            host.turn()
        awake = [one for one in self.processes if one.lives and not (one.host and one.host.asleep)]
        writers = Counter(one.run for one in awake)
        assert all(count == 1 for count in writers.values()), f"two write at once: {writers}"
        for rank, heard_s in list(self._heard_s.items()):
            if self.now_s - heard_s >= LEASE_S:
                self.lose(rank, "no word")

    def add_host(self, *, slots: int = 1) -> Host:
        host = self.hosts[len(self.hosts) + 1] = Host(self, len(self.hosts) + 1, slots)
        return host

    def kill_chief(self) -> None:
        self.is_dead = True
        raise Crash

    def begin(self, *, at: int | None = None, how: str = "before") -> Chief:
        """Returns a new chief over what the one before has left; it dies at its write `at`."""
        self.chiefs, self.most_at_once = self.chiefs + 1, 0
        if self.chiefs > 1 and self.slots_later is not None:
            self.slots = self.slots_later
        journal = CrashingJournal(self, at=at, how=how)
        self.serving = ServingRunner(
            Slots(self, self.slots), self, ownership=OWNERSHIP, clock=lambda: self.now_s
        )
        search_of = self.search_of or partial(FakeSearch, count=self.trials, think=self.think)
        search = search_of(list(journal.lines))
        self.chief = Chief(
            self.sweep,
            search=search,
            journal=journal,
            runner=self.serving,
            observer=Mock(),
            stop_requests=lambda: self.signals,
        )
        return self.chief

    def run(
        self, *, at: int | None = None, how: str = "before", always: bool = False, pause: int = 0
    ) -> Chief:
        """Returns the last chief; the first one, or always each, dies at its write `at`."""
        while True:
            try:
                chief = self.begin(at=at, how=how)
                code = chief.run()
                if code != EXIT_STOPPED:
                    assert code == EXIT_OK
                    return chief
                self.serving.close(code)
                self.chief = None
                self.signals.clear()
                self.tick()  # the runners hear of it
            except Crash:
                at = at if always else None
            self._chief_has_gone()
            for _ in range(self.random.randrange(pause) if pause else 0):
                self.tick()

    def _chief_has_gone(self) -> None:
        self.chief, self.is_dead = None, False
        self._heard_s.clear()
        self._news.clear()
        for process in self.processes:
            if process.host is None:
                process.kill()
        for host in self.hosts.values():
            host.client.close()


def flags_of(trial: Trial) -> tuple[str, ...]:
    return tuple(f"--config.{name}={value}" for name, value in trial.hyperparameters.items())


def trials_in(path: Path) -> list[tuple[Any, ...]]:
    """What has become of each trial of the sweep in a directory."""
    state = sweep_journal.fold(sweep_journal.read(path / JOURNAL))
    return [(t.id, t.run, dict(t.values), t.status, t.score) for t in state.trials.values()]


FAILED = Failed(reason="ValueError")


class Mishaps:
    """What happens to a world at any tick, so often; there is always a runner, sooner or later."""

    def __init__(self, world: World, *, count: int) -> None:
        self._world = world
        self._left = count
        world.events, world.think = self, self._think

    def _think(self) -> None:
        """An answer of the search may take longer than a lease."""
        for _ in range(self._world.random.choice([0, 0, 0, 30])):
            self._world.tick()

    def __call__(self) -> None:
        world = self._world
        living = [host for host in world.hosts.values() if not host.is_gone]
        if not living:
            living = [world.add_host(slots=world.random.randrange(1, 3))]
        if self._left and world.random.random() < 0.12:
            self._left -= 1
            self._happen(world.random.choice(living), ticks=world.random.randrange(1, 45))

    def _happen(self, host: Host, *, ticks: int) -> None:
        match self._world.random.randrange(10):
            case 0 if self._world.chief is not None:
                self._world.kill_chief()
            case 1 if self._world.chief is not None:
                self._world.signals.append(signal.SIGTERM)
            case 2:
                host.kill_runner()
            case 3:
                host.power_off()
            case 4:
                host.held_up = ticks
            case 5:
                host.asleep = ticks
            case 6:
                host.cut = ticks
            case 7:
                host.client.close()
            case 8:
                host.runner.leave(signal.SIGTERM)
            case _:
                self._world.add_host()
