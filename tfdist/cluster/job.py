"""The cluster of a whole job, from how many workers and ps it is to have, and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.address import shown_json
from tfdist.cluster.spec import ClusterSpec, Kind, Task
from tfdist.errors import UsageError, near, require, require_int

STRATEGIES = ("auto", "single", "mirrored", "multiworker", "ps", "pipeline")

_MAX_INT = 2**31 - 1
_MAX_TIMEOUT_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Settings of a job that are the same for all its tasks; checked when created."""

    strategy: str = "auto"
    """One of `STRATEGIES`; ``auto`` lets the cluster and the devices decide."""
    devices_per_worker: int | None = None
    """Devices that compute gradients in each task; None takes what the strategy finds."""
    startup_timeout_s: float = 60.0
    """How long a task waits for the others before it gives up and names them."""
    min_workers: int | None = None
    """With how many workers a job may start when the others do not come; None asks for all."""
    run_dir: str | None = None
    """Where the job writes; None writes nothing."""
    attempt: int = 1
    """Which start of the job by its supervisor this is, from 1 on."""
    threads_per_task: int | None = None
    """CPU threads of each task; None leaves it to the strategy."""
    evaluator: bool = False
    """Whether a task beside the training evaluates its checkpoints."""
    split_bytes: int | None = None
    """Above how many bytes a trainable variable is divided over the ps; None divides none."""
    stages: int | None = None
    """Stages of each pipeline of a job; None for one pipeline of all tasks."""
    profile_ps: bool = False
    """Whether a ps job measures what its steps cost; see docs/placement.md."""
    terminal: bool = False
    """Whether what a task prints is shown on a terminal, where a line may be written over."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy, where="tfdist.strategy", code="TFC019")
        for name in (
            "devices_per_worker",
            "threads_per_task",
            "min_workers",
            "split_bytes",
            "stages",
        ):
            _check_count(name, getattr(self, name), optional=True)
        _check_count("attempt", self.attempt, optional=False)
        _check_seconds("startup_timeout_s", self.startup_timeout_s)
        object.__setattr__(self, "startup_timeout_s", float(self.startup_timeout_s))
        _check_directory("run_dir", self.run_dir)
        for name in ("evaluator", "profile_ps", "terminal"):
            if not isinstance(value := getattr(self, name), bool):
                raise _wrong(name, value, "true or false", "give one")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> JobOptions:
        """Return the options of ``{name: value}``; `UsageError` for a name it does not have."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                fix = f"correct the name or take it out{near(name, names)}"
                expected = "one of " + ", ".join(names)
                raise UsageError(
                    "tfdist", received=shown_json(name), expected=expected, fix=fix, code="TFC018"
                )
        return cls(**values)  # type: ignore[arg-type]  # checked in __post_init__

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return ``{name: value}`` of every option."""
        return dataclasses.asdict(self)


def check_strategy(strategy: object, *, where: str, code: str) -> None:
    """Raise `UsageError`, with the name that was probably meant, unless it is known."""
    if isinstance(strategy, str) and strategy in STRATEGIES:
        return
    hint = near(strategy.strip().lower(), STRATEGIES) if isinstance(strategy, str) else ""
    raise UsageError(
        where,
        received=shown_json(strategy),
        expected="one of " + ", ".join(STRATEGIES),
        fix=f"use one of these names{hint}",
        code=code,
    )


def _check_count(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_INT:
        return
    fix = "give an integer, without quotes" + (", or null for the default" * optional)
    raise _wrong(name, value, f"an integer from 1 to {_MAX_INT}", fix)


def _check_seconds(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and 0 < value <= _MAX_TIMEOUT_S:  # type: ignore[operator]
        return
    fix = "give a number such as 60, without quotes"
    raise _wrong(name, value, "a positive number of seconds, at most 1e9", fix)


def _check_directory(name: str, value: object) -> None:
    if value is None or (isinstance(value, str) and value.strip() and "\0" not in value):
        return
    fix = "give a path as a string, or null for none"
    raise _wrong(name, value, "the path of a directory", fix)


def _wrong(name: str, value: object, expected: str, fix: str) -> UsageError:
    where = f"tfdist.{name}"
    return UsageError(where, received=shown_json(value), expected=expected, fix=fix, code="TFC019")


def addressed_tasks(
    *, strategy: str, workers: int = 1, ps: int = 0, chief: bool = False, evaluator: bool = False
) -> tuple[Task, ...]:
    """Return the tasks of a job that need an address, in the order in which they start.

    A ps job always has a chief, which is not counted among `workers`. In a multiworker job
    worker 0 is the chief, unless `chief` asks for a task of that type besides the workers.
    A job of one process needs no address for it.

    Raises:
        UsageError: the numbers are not those of a job of this strategy.
    """
    kind = _kind(strategy, workers=workers, ps=ps, chief=chief)
    counts = {
        "chief": int(kind == "ps" or chief),
        "worker": 0 if kind == "single" else workers,
        "ps": ps,
        "evaluator": int(evaluator),
    }
    return tuple(Task(type_, i) for type_, count in counts.items() for i in range(count))


def build_cluster(
    *,
    strategy: str,
    addresses: Sequence[str],
    workers: int = 1,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
) -> ClusterSpec:
    """Return the cluster of a job in which `addressed_tasks` get `addresses`, in their order."""
    tasks = addressed_tasks(
        strategy=strategy, workers=workers, ps=ps, chief=chief, evaluator=evaluator
    )
    require(
        len(addresses) == len(tasks),
        "addresses",
        received=len(addresses),
        expected=f"{len(tasks)}, one for each task that needs one",
        fix="give as many addresses as addressed_tasks() returns tasks",
        code="wrong-number",
    )
    lists: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        lists.setdefault(task.type, []).append(address)
    return ClusterSpec.from_dict(lists)


def _kind(strategy: str, *, workers: int, ps: int, chief: bool) -> Kind:
    check_strategy(strategy, where="strategy", code="unknown-value")
    require_int("workers", workers, least=1, fix="ask for --workers 1 or more")
    require_int("ps", ps, least=0, fix="ask for --ps 1 or more")
    if strategy == "ps" and not ps:
        fix = "ask for at least one ps (--ps 1), or for strategy multiworker"
        raise _unfit("ps", "0 with strategy ps", "1 or more", fix)
    if strategy == "ps" or (strategy == "auto" and ps):
        return "ps"
    if ps:
        fix = "ask for strategy ps, or leave ps out"
        raise _unfit("ps", f"{ps} with strategy {strategy}", "0", fix)
    if strategy in ("multiworker", "pipeline") or (strategy == "auto" and (workers > 1 or chief)):
        return "multiworker"
    if workers > 1 or chief:
        received = f"{workers + chief} training tasks with strategy {strategy}"
        fix = "ask for strategy multiworker, or leave workers out"
        raise _unfit("workers", received, "one process", fix)
    return "single"


def _unfit(where: str, received: str, expected: str, fix: str) -> UsageError:
    return UsageError(where, received=received, expected=expected, fix=fix, code="wrong-number")
