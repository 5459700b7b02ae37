"""Cluster specification: the tasks of a job and their addresses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tfdist.cluster.address import check_address, shown
from tfdist.errors import UsageError, require_int, require_one_of

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
Kind = Literal["single", "multiworker", "ps"]

_RANK = {type_: rank for rank, type_ in enumerate(TASK_TYPES)}


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Task:
    """One process of a job: its type and its index among the tasks of that type.

    Tasks sort as they start: chief, workers, ps, evaluator.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        require_one_of("task type", self.type, TASK_TYPES, code="TFC015")
        fix = 'give the position of the task in its list, without quotes, as in "index": 0'
        require_int("task index", self.index, least=0, fix=fix, code="TFC016")

    def __str__(self) -> str:
        return f"{self.type}-{self.index}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        return (_RANK[self.type], self.index) < (_RANK[other.type], other.index)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """The addresses, ``host:port``, of all tasks of a job, by type and in order of index.

    Without any address it describes a job of one process. Creating one checks it all, in
    time linear in the number of tasks, and raises `UsageError` for the first mistake.
    """

    chief: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    ps: tuple[str, ...] = ()
    evaluator: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for type_ in TASK_TYPES:
            object.__setattr__(self, type_, _address_tuple(getattr(self, type_), type_))
        _check_addresses(self)
        _check_roles(self)

    @classmethod
    def from_dict(cls, addresses: Mapping[str, object]) -> ClusterSpec:
        """Return the spec of ``{task type: list of addresses}``, as TF_CONFIG holds it."""
        for type_ in addresses:
            require_one_of("cluster", type_, TASK_TYPES, code="TFC008")
        cluster = cls(**addresses)  # type: ignore[arg-type]  # checked in __post_init__
        _check_not_empty(cluster, addresses)
        return cluster

    @classmethod
    def of(cls, addresses: Mapping[Task, str]) -> ClusterSpec:
        """Return the cluster of tasks that have these addresses."""
        lists: dict[str, list[str]] = {}
        for task in sorted(addresses):
            lists.setdefault(task.type, []).append(addresses[task])
        return cls.from_dict(lists)

    def as_dict(self) -> dict[str, list[str]]:
        """Return ``{task type: list of addresses}`` without the types that have no task."""
        return {type_: list(self.of_type(type_)) for type_ in TASK_TYPES if self.of_type(type_)}

    def of_type(self, type_: str) -> tuple[str, ...]:
        """Return the addresses of the tasks of one type, in order of index."""
        addresses: tuple[str, ...] = getattr(self, type_)
        return addresses

    def tasks(self) -> tuple[Task, ...]:
        """Return every task that has an address, in the order in which they start."""
        return tuple(Task(t, i) for t in TASK_TYPES for i in range(len(self.of_type(t))))

    def training_tasks(self) -> tuple[Task, ...]:
        """Return every task but the evaluator: chief, workers and ps."""
        return tuple(task for task in self.tasks() if task.type != "evaluator")

    def address(self, task: Task) -> str:
        """Return where `task` listens; `UsageError` if the cluster has no such task."""
        addresses = self.of_type(task.type)
        if task.index < len(addresses):
            return addresses[task.index]
        has = ", ".join(f"{len(listed)} {type_}" for type_, listed in self.as_dict().items())
        raise UsageError(
            "task",
            received=f"{task}",
            expected=f"a task of the cluster, which has {has or 'none'}",
            fix=f"correct the task, or add its address to the cluster's {task.type} list",
            code="TFC017",
        )

    def without_evaluator(self) -> ClusterSpec:
        """Return the cluster as training tasks see it."""
        if not self.evaluator:
            return self
        return ClusterSpec(chief=self.chief, worker=self.worker, ps=self.ps)

    @property
    def kind(self) -> Kind:
        """Return ``ps`` if there is a ps; else ``multiworker`` if any training task has an
        address, be it the only one; else ``single``."""
        if self.ps:
            return "ps"
        return "multiworker" if self.chief or self.worker else "single"

    @property
    def chief_task(self) -> Task:
        """Return the task that writes and decides: the chief, or else worker 0."""
        return Task("chief", 0) if self.chief else Task("worker", 0)

    @property
    def num_replica_tasks(self) -> int:
        """Return how many tasks compute gradients.

        Under multiworker these are the chief and the workers, under ps the workers.
        """
        if self.kind == "ps":
            return len(self.worker)
        return max(1, len(self.chief) + len(self.worker))


def _address_tuple(addresses: object, type_: str) -> tuple[str, ...]:
    if isinstance(addresses, (list, tuple)):
        return tuple(addresses)
    fix = f'write "{type_}": ["host:port", ...], or leave {type_} out if there is none'
    expected = 'a list of "host:port"'
    raise UsageError(
        f"cluster {type_}",
        received=shown(addresses),
        expected=expected,
        fix=fix,
        code="TFC009",
    )


def _check_addresses(cluster: ClusterSpec) -> None:
    seen: dict[tuple[str, int], str] = {}
    for type_ in TASK_TYPES:
        for index, address in enumerate(getattr(cluster, type_)):
            name = f"{type_}-{index}"
            key = check_address(address, where=f"cluster {name}")
            first = seen.setdefault(key, name)
            if first is not name:
                raise UsageError(
                    "cluster",
                    received=f"{shown(address)} for both {first} and {name}",
                    expected="an address of its own for each task",
                    fix=f"give {name} another port",
                    code="TFC012",
                )


def _check_roles(cluster: ClusterSpec) -> None:
    for type_ in ("chief", "evaluator"):
        count = len(getattr(cluster, type_))
        if count > 1:
            received, expected = f"{count} addresses for {type_}", f"at most one {type_}"
            _refuse(received, expected=expected, fix=f"keep one {type_}", code="TFC013")
    if not cluster.ps:
        return
    if not cluster.chief:
        fix = 'add "chief": ["host:port"], or take ps out for a multiworker job'
        _refuse("ps without chief", expected="a chief, which coordinates a ps job", fix=fix)
    if not cluster.worker:
        fix = 'add "worker": ["host:port"], or take ps out for a multiworker job'
        _refuse("chief and ps without worker", expected="at least one worker", fix=fix)


def _check_not_empty(cluster: ClusterSpec, addresses: Mapping[str, object]) -> None:
    """Refuse lists that were to say where the training tasks are, and are all empty.

    Left alone, each process would train by itself. Beside the addresses of other types an empty
    list is how a template says that there is none of a type, and TensorFlow takes it so too.
    """
    named = [type_ for type_ in addresses if type_ != "evaluator"]
    if named and not cluster.training_tasks():
        raise UsageError(
            f"cluster {named[0]}",
            received="[], and no address of any task that trains",
            expected=f'a list of "host:port", one for each {named[0]}',
            fix="write where they listen, or unset TF_CONFIG for a process by itself",
            code="TFC009",
        )


def _refuse(received: str, *, expected: str, fix: str, code: str = "TFC014") -> None:
    raise UsageError("cluster", received=received, expected=expected, fix=fix, code=code)
