"""A sweep with simulated trials: the chief and the journal are the project's own."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from tfdist.errors import EXIT_OK, EXIT_STOPPED
from tfdist.outputs import sweep_journal
from tfdist.outputs.sweep_journal import JOURNAL, Journal, Trial
from tfdist.tuning.chief import IDLE, RUNNING, STOPPED, Chief, NextTrial
from tfdist.tuning.options import RunOptions
from tfdist.tuning.trial_job import Completed, Failed, Killed, Outcome, Slot, TrialJob

TICK_S = 0.5
LONGEST_S = 9000.0
BEGUN = {"objective": "val_accuracy", "direction": "max", "tuner": "random", "seed": 3}


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

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        self._left -= 1
        line = {}
        if self._left >= 0 or self._how != "before":
            line = super().add(event, **fields)
        if self._left < 0:
            if self._how == "within":
                os.truncate(self.path, self.path.stat().st_size - 5)
            self._world.is_dead = True
            raise Crash
        return line


@dataclass
class FakeSearch:
    """Asks for `count` trials; IDLE while more than `ahead` are going on."""

    lines: Sequence[Mapping[str, Any]] = ()
    count: int = 4
    ahead: int = 99
    asked: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.replay(self.lines)

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self.asked += [one["trial"] for one in lines if one["event"] == "asked" and one["trial"]]
        self.told |= {one["trial"] for one in lines if one["event"] == "ended"}

    def ask(self) -> NextTrial:
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

    def __init__(self, world: "World", job: TrialJob) -> None:
        self.world, self.job = world, job
        self.run = job.run_dir.name
        self.outcome: Outcome | None = None
        self.is_asked = False
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


@dataclass
class Slots:
    """The runner of one machine, with so many slots."""

    world: "World"
    count: int = 1

    def outcome(self, job: TrialJob) -> Outcome | None:
        return self.world.outcome(job)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return [{}] * (self.world.done[run_dir.name] // self.world.ticks)

    def free_slots(self, taken: Iterable[Slot]) -> list[Slot]:
        return [one for one in map(lambda n: Slot(number=n), range(self.count)) if one not in taken]

    def start(self, job: TrialJob) -> Process:
        return Process(self.world, job)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        if self.world.is_dead:
            raise Crash
        self.world.tick()


@dataclass
class World:
    """All there is; `run` starts a chief again and again until the sweep has ended."""

    path: Path
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
    begun: Mapping[str, Any] = field(default_factory=dict)
    fates: dict[str, list[Outcome]] = field(default_factory=dict)
    """How trials end else, one after the other."""
    fate_of: Callable[[str], Outcome | None] = lambda run: None
    """How a trial ends else, whenever it runs."""
    events: Callable[[], object] = lambda: None
    """Called at each tick."""
    time_of_day: Callable[[], float] | None = None
    """Of the journals, if their clock is right."""

    def __post_init__(self) -> None:
        self.path.mkdir(exist_ok=True)
        self.sweep: Any = SimpleNamespace(
            options=RunOptions(sweep_dir=self.path, **self.options),
            max_epochs=self.epochs,
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
        self.chief: Chief | None = None
        self.is_dead = False
        """Whether the chief was killed just now: what it does on its way out does not happen."""
        self.chiefs = 0

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
        return self._by_run(job) if self.done[job.run_dir.name] >= needed else None

    # The time.

    def tick(self) -> None:
        self.now_s += TICK_S
        assert self.now_s < LONGEST_S, "the sweep does not end"
        self.events()
        for process in self.processes:
            process.work()
        awake = [one for one in self.processes if one.lives]
        writers = Counter(one.run for one in awake)
        assert all(count == 1 for count in writers.values()), f"two write at once: {writers}"

    def begin(self, *, at: int | None = None, how: str = "before") -> Chief:
        """Returns a new chief over what the one before has left; it dies at its write `at`."""
        self.chiefs, self.most_at_once = self.chiefs + 1, 0
        if self.chiefs > 1 and self.slots_later is not None:
            self.slots = self.slots_later
        journal = CrashingJournal(self, at=at, how=how)
        search_of = self.search_of or partial(FakeSearch, count=self.trials)
        search = search_of(list(journal.lines))
        self.chief = Chief(
            self.sweep,
            search=search,
            journal=journal,
            runner=cast(Any, Slots(self, self.slots)),
            observer=Mock(),
            stop_requests=lambda: self.signals,
        )
        return self.chief

    def run(self, *, at: int | None = None, how: str = "before", always: bool = False) -> Chief:
        """Returns the last chief; the first one, or always each, dies at its write `at`."""
        while True:
            try:
                chief = self.begin(at=at, how=how)
                code = chief.run()
                if code != EXIT_STOPPED:
                    assert code == EXIT_OK
                    return chief
                self.chief = None
                self.signals.clear()
            except Crash:
                at = at if always else None
            self._chief_has_gone()

    def _chief_has_gone(self) -> None:
        self.chief, self.is_dead = None, False
        for process in self.processes:
            process.kill()


def flags_of(trial: Trial) -> tuple[str, ...]:
    return tuple(f"--config.{name}={value}" for name, value in trial.hyperparameters.items())


def trials_in(path: Path) -> list[tuple[Any, ...]]:
    """What has become of each trial of the sweep in a directory."""
    state = sweep_journal.fold(sweep_journal.read(path / JOURNAL))
    return [(t.id, t.run, dict(t.values), t.status, t.score) for t in state.trials.values()]


FAILED = Failed(reason="ValueError")
