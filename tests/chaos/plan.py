"""The plan file: which jobs run, and what is done to which task at which moment.

A moment is ``step N`` (at the end of the first range of steps that reaches N), ``phase P`` (as a
task enters `import`, `rendezvous`, `save` or `validate`), ``write N`` (before the N-th operation on
files of the second save of an attempt), ``half write`` (in the middle of that save's first file),
``start S`` (S seconds after the job was started) or ``training S`` (S seconds after the last task
had done its first steps).
"""

import itertools
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

IN_TASK = ("kill", "stop")
"""What a task can do to itself, and so exactly at a step, a phase or a write."""
BY_RUNNER = (
    *("kill", "kill_all", "kill_launcher", "stop"),
    *("slow", "corrupt", "fill_disk", "cut_network"),
)
_EXACT = ("step", "phase", "write", "half")
_MOMENTS = (*_EXACT, "start", "training")
PHASES = ("import", "rendezvous", "save", "validate")


class PlanError(ValueError):
    """A plan that cannot be; one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing done to a job. `lasts_s` is for what ends by itself: slow, cut_network."""

    do: str
    at: str
    task: str = "worker-0"
    lasts_s: float = 2.0
    of: str = "checkpoints"
    """Whose writes ``write N`` counts: of `checkpoints`, or of the `best` model file; of what comes
    `before the first` save of an attempt, such as ``checkpoints before the first``."""

    def __post_init__(self) -> None:
        if self.do not in BY_RUNNER:
            raise PlanError(f"do = {self.do!r}: expected one of {', '.join(BY_RUNNER)}")
        kind, _, value = self.at.partition(" ")
        if kind not in _MOMENTS or not value:
            raise PlanError(f"at = {self.at!r}: expected one of {', '.join(_MOMENTS)}, and a value")
        if kind == "phase" and value not in PHASES:
            raise PlanError(f"at = {self.at!r}: expected a phase of {', '.join(PHASES)}")
        if kind in ("phase", "write", "half") and self.do not in IN_TASK:
            raise PlanError(f"at = {self.at!r}: only {' and '.join(IN_TASK)} can be placed there")

    @property
    def kind(self) -> str:
        """The first word of the moment."""
        return self.at.partition(" ")[0]

    @property
    def number(self) -> float:
        """The step, the number of the write, or the seconds of the moment."""
        return float(self.at.partition(" ")[2])

    @property
    def in_task(self) -> bool:
        """Whether the task does it to itself."""
        return self.do in IN_TASK and self.kind in _EXACT

    def __str__(self) -> str:
        whom = "" if self.do.partition("_")[2] or self.do == "corrupt" else f" {self.task}"
        of = f" of {self.of}" if self.kind in ("write", "half") else ""
        return f"{self.do}{whom} at {self.at}{of}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job to do things to: the launcher's flags, and which variant of the training it runs."""

    name: str
    strategy: str
    workers: int = 1
    stages: int | None = None
    devices: int = 1
    variant: str = "plain"
    start: str = "auto"
    kills_per_run: int = 3
    share: int = 1
    """Of the random kills, against the other cases; 0 takes no part in them."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Returns the names of its tasks."""
        return tuple(f"worker-{i}" for i in range(self.workers))

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the launcher's flags."""
        flags = ["--strategy", self.strategy, "--workers", str(self.workers)]
        flags += ["--start", self.start]
        if self.stages is not None:
            flags += ["--stages", str(self.stages)]
        if self.strategy == "mirrored":
            flags += ["--devices_per_worker", str(self.devices)]
        return tuple(flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A run with these faults, one after the other; `each_write` is one at every write."""

    case: str
    faults: tuple[Fault, ...] = ()
    each_write: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `python -m tests.chaos` does."""

    cases: tuple[Case, ...]
    placed: tuple[Placed, ...]
    kills: int


def read(path: Path) -> Plan:
    """Reads a plan, and the one that it is `more_than`; raises PlanError."""
    content = tomllib.loads(path.read_text())
    more_than = content.get("more_than")
    below = read(path.with_name(more_than)) if more_than else Plan(cases=(), placed=(), kills=0)
    cases = (*below.cases, *(_made(Case, entry) for entry in content.get("case", ())))
    names = [case.name for case in cases]
    placed = list(below.placed)
    for entry in content.get("run", ()):
        if entry.get("case") not in names:
            raise PlanError(f"case = {entry.get('case')!r}: expected one of {', '.join(names)}")
        faults = tuple(_made(Fault, fault) for fault in entry.get("faults", ()))
        placed.append(_made(Placed, {**entry, "faults": faults}))
    kills = below.kills + int(content.get("kills", 0))
    return Plan(cases=cases, placed=tuple(placed), kills=kills)


def random_faults(
    case: Case, draw: random.Random, *, startup_s: float, training_s: float
) -> tuple[Fault, ...]:
    """Kills at random times: a quarter of them while the job starts, the rest while it trains.

    Together those in training take less than `training_s`, so that there is something left to kill.
    """
    faults = []
    for _ in range(case.kills_per_run):
        whom = draw.random()
        do = "kill" if whom < 0.7 else "kill_all" if whom < 0.85 else "kill_launcher"
        task = draw.choice(case.tasks)
        if draw.random() < 0.25:
            at = f"start {draw.uniform(0.0, startup_s):.3f}"
        else:
            at = f"training {draw.uniform(0.0, 0.9 * training_s / case.kills_per_run):.3f}"
        faults.append(Fault(do=do, task=task, at=at))
    return tuple(faults)


def kills_of_cases(plan: Plan) -> dict[str, int]:
    """The random kills of each case, which are its turns by its share of a round."""
    kills = dict.fromkeys((case.name for case in plan.cases), 0)
    left, rounds = plan.kills, max((case.share for case in plan.cases), default=0)
    turns = [case for i in range(rounds) for case in plan.cases if i < case.share]
    for case in itertools.cycle(turns):
        if left <= 0:
            break
        kills[case.name] += min(case.kills_per_run, left)
        left -= case.kills_per_run
    return kills


def _made(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(kind)]
    unknown = [name for name in entry if name not in names]
    if unknown:
        raise PlanError(f"{unknown[0]}: expected one of {', '.join(names)}")
    return kind(**entry)
