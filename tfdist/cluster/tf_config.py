"""Tasks of a job, their addresses, and the TF_CONFIG of each task.

TF_CONFIG is a JSON object with ``cluster`` and ``task``, which TensorFlow reads. The key
``tfdist`` holds tfdist's options. TensorFlow ignores this key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tfdist.cluster.address import check_address, shown
from tfdist.errors import UsageError, require_int, require_one_of
from tfdist.kinds import AUTO, KINDS, Kind
from tfdist.options import JobOptions, table

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

CODE = "bad-tf-config"
"""Code of the errors of a job's tasks, addresses and options."""

_RANK = {type_: rank for rank, type_ in enumerate(TASK_TYPES)}


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Task:
    """One process of a job: its type and its index among the tasks of that type.

    Tasks sort in the order chief, workers, ps, evaluator.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        require_one_of("task type", self.type, TASK_TYPES, code=CODE)
        fix = 'give the position of the task in its list, without quotes, as in "index": 0'
        require_int("task index", self.index, least=0, fix=fix, code=CODE)

    def __str__(self) -> str:
        return f"{self.type}-{self.index}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        return (_RANK[self.type], self.index) < (_RANK[other.type], other.index)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """The addresses, ``host:port``, of all tasks of a job, by type and in order of index.

    An empty spec describes a job of one process. The constructor checks all addresses in
    linear time, and raises `UsageError` for the first mistake.
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
        """Return the spec of ``{task type: list of addresses}``, the format of TF_CONFIG."""
        for type_ in addresses:
            require_one_of("cluster", type_, TASK_TYPES, code=CODE)
        cluster = cls(**addresses)  # type: ignore[arg-type]  # checked in __post_init__
        _check_not_empty(cluster, addresses)
        return cluster

    @classmethod
    def of(cls, addresses: Mapping[Task, str]) -> ClusterSpec:
        """Return the cluster of ``{task: address}``."""
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
        """Return the chief, the workers and the ps, without the evaluator."""
        return tuple(task for task in self.tasks() if task.type != "evaluator")

    def address(self, task: Task) -> str:
        """Return the address of `task`. Raise `UsageError` if the cluster has no such task."""
        addresses = self.of_type(task.type)
        if task.index < len(addresses):
            return addresses[task.index]
        has = ", ".join(f"{len(listed)} {type_}" for type_, listed in self.as_dict().items())
        problem = f"the cluster has no {task} (it has {has or 'no tasks'})"
        fix = f"correct the task, or add its address to the cluster's {task.type} list"
        raise _wrong("task", problem, fix)

    def without_evaluator(self) -> ClusterSpec:
        """Return the cluster of the training tasks."""
        if not self.evaluator:
            return self
        return ClusterSpec(chief=self.chief, worker=self.worker, ps=self.ps)

    @property
    def kind(self) -> Kind:
        """Return the kind ``ps`` if the cluster has a ps, ``multiworker`` if it has another
        training task, and ``single`` otherwise."""
        if self.ps:
            return KINDS["ps"]
        return KINDS["multiworker" if self.chief or self.worker else "single"]

    @property
    def chief_task(self) -> Task:
        """Return the task that writes files: the chief, or worker 0 if there is no chief."""
        return Task("chief", 0) if self.chief else Task("worker", 0)

    @property
    def num_replica_tasks(self) -> int:
        """Return the number of tasks that compute gradients.

        Under multiworker these are the chief and the workers, under ps the workers.
        """
        if self.kind.has_servers:
            return len(self.worker)
        return max(1, len(self.chief) + len(self.worker))


def _address_tuple(addresses: object, type_: str) -> tuple[str, ...]:
    if isinstance(addresses, (list, tuple)):
        return tuple(addresses)
    fix = f'write "{type_}": ["host:port", ...], or leave out {type_}'
    raise _wrong(f"cluster {type_}", f"{shown(addresses)} is not a list of addresses", fix)


def _check_addresses(cluster: ClusterSpec) -> None:
    seen: dict[tuple[str, int], str] = {}
    for type_ in TASK_TYPES:
        for index, address in enumerate(getattr(cluster, type_)):
            name = f"{type_}-{index}"
            key = check_address(address, where=f"cluster {name}")
            first = seen.setdefault(key, name)
            if first is not name:
                problem = f"{first} and {name} have the same address, {shown(address)}"
                raise _wrong("cluster", problem, f"give {name} another port")


def _check_roles(cluster: ClusterSpec) -> None:
    for type_ in ("chief", "evaluator"):
        if (count := len(getattr(cluster, type_))) > 1:
            problem = f"it has {count} addresses of type {type_}, but a job has at most one"
            raise _wrong("cluster", problem, f"keep one {type_}")
    for type_ in ("chief", "worker"):
        if cluster.ps and not getattr(cluster, type_):
            fix = f'add "{type_}": ["host:port"], or remove "ps" if the job is multiworker'
            raise _wrong("cluster", f"a cluster with ps needs a {type_}, but has none", fix)


def _check_not_empty(cluster: ClusterSpec, addresses: Mapping[str, object]) -> None:
    """Raise UsageError if the cluster lists training types, and all of these lists are empty.

    Otherwise each process would train separately. If another training type has addresses, an empty
    list is valid: templates and TensorFlow use it for a type without tasks.
    """
    named = [type_ for type_ in addresses if type_ != "evaluator"]
    if named and not cluster.training_tasks():
        fix = f"list the address of each {named[0]}, or unset TF_CONFIG if the job has one task"
        raise _wrong(f"cluster {named[0]}", "the cluster has no training task", fix)


def _wrong(where: str, problem: str, fix: str) -> UsageError:
    return UsageError(where, problem, fix=fix, code=CODE)


VARIABLE = "TF_CONFIG"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """All settings of one task: the cluster, the task itself, and the options.

    A job of one process has an empty cluster and the task ``worker-0``. The constructor removes
    the evaluator from the cluster of a training task. TensorFlow's coordinator would wait for
    the evaluator for ever (tensorflow#46169). The cluster of an evaluator may contain it.

    Raises:
        UsageError: the cluster does not contain the task, or does not fit the strategy.
    """

    cluster: ClusterSpec
    task: Task
    options: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
        if self.cluster.evaluator or self.task.type == "evaluator":
            object.__setattr__(self, "options", replace(self.options, evaluator=True))
        if self.task.type != "evaluator":
            object.__setattr__(self, "cluster", self.cluster.without_evaluator())
        is_alone = self.cluster.kind.is_one_process and self.task == Task("worker", 0)
        if not is_alone and self.task != Task("evaluator", 0):
            self.cluster.address(self.task)
        _check_agreement(self)


def encode(config: TaskConfig) -> str:
    """Return the value of TF_CONFIG for `decode`, as one line of ASCII."""
    return json.dumps(
        {
            "cluster": config.cluster.as_dict(),
            "task": {"type": config.task.type, "index": config.task.index},
            "tfdist": dataclasses.asdict(config.options),
        }
    )


def decode(text: str | bytes) -> TaskConfig:
    """Return the config in a value of TF_CONFIG, written by tfdist or by a scheduler.

    Keys other than ``cluster``, ``task`` and ``tfdist`` are ignored, because schedulers add keys.

    Raises:
        UsageError: the value is wrong. The message names the key and the fix.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "correct the value (json.dumps in Python and jq write valid JSON)"
        raise _wrong(VARIABLE, f"{shown(text)} is not valid JSON ({error})", fix) from None
    with _place(VARIABLE):
        match fields:
            case {"cluster": dict(lists), "task": {"type": type_, "index": index}}:
                cluster = ClusterSpec.from_dict(lists)
                options = _options(fields.get("tfdist", {}))
                return TaskConfig(cluster=cluster, task=Task(type_, index), options=options)
        fix = 'write {"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
        raise _wrong("", f"{shown(fields)} lacks some of the keys", fix)


def _options(values: object) -> JobOptions:
    if not isinstance(values, dict):
        raise _wrong("tfdist", f"{shown(values)} is not a JSON object", 'write "tfdist": {...}')
    for name in values:
        require_one_of("tfdist", name, table(JobOptions), code=CODE)
    return JobOptions(**values)


def from_environ(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return the config in TF_CONFIG of `environ`, or `None` if TF_CONFIG is unset or empty."""
    text = environ.get(VARIABLE, "")
    return decode(text) if text.strip() else None


def job_configs(cluster: ClusterSpec, *, options: JobOptions) -> Iterator[TaskConfig]:
    """Yield the config of each task of a job, in the order of the tasks.

    A job of one process has ``worker-0``, and an evaluator if the cluster has one.
    """
    training = cluster.without_evaluator()  # computed once for all tasks
    options = replace(options, evaluator=options.evaluator or bool(cluster.evaluator))
    alone = (Task("worker", 0),) if cluster.kind.is_one_process else ()
    for task in alone + cluster.tasks():
        seen = cluster if task.type == "evaluator" else training
        yield TaskConfig(cluster=seen, task=task, options=options)


def resolved_kind(config: TaskConfig) -> Kind:
    """Return the kind that the config gives a task, `AUTO` if the devices decide.

    A strategy other than ``auto`` stays. ``auto`` becomes ``ps`` if the cluster has a ps, and
    ``multiworker`` for any other cluster, even with one address. Without a cluster ``auto``
    stays, and the devices select single or mirrored. An evaluator is a separate process, so
    every strategy of several tasks becomes ``auto`` for it.
    """
    kind = config.options.kind
    if config.task.type == "evaluator":
        return AUTO if kind.has_several_tasks else kind
    if kind is not AUTO or config.cluster.kind.is_one_process:
        return kind
    return config.cluster.kind


def _check_agreement(config: TaskConfig) -> None:
    kind, cluster = config.options.kind, config.cluster
    count = len(cluster.training_tasks())
    is_training = config.task.type != "evaluator"
    for is_wrong, has, fix in (
        (kind.has_collectives and cluster.ps, "ps tasks", "remove the ps"),
        (
            is_training and kind.has_servers and not cluster.ps,
            "no ps task",
            "add a chief, workers and ps",
        ),
        (
            is_training and kind.has_collectives and cluster.kind.is_one_process,
            "no address",
            'add the addresses of the workers, as in "worker": ["host:port", ...]',
        ),
        (
            is_training and kind.is_one_process and count > 1,
            f"{count} training tasks",
            "keep a single training task",
        ),
    ):
        if is_wrong:
            problem = f"{kind.name!r} is impossible, because the cluster has {has}"
            raise _wrong("tfdist.strategy", problem, f"{fix}, or use another strategy")
    if is_training and count % (config.options.stages or 1):
        stages = config.options.stages
        problem = f"{count} tasks cannot be divided into pipelines of {stages} stages"
        raise _wrong("tfdist.stages", problem, f"use {count} stages, or another number of tasks")


@contextlib.contextmanager
def _place(name: str) -> Iterator[None]:
    """Prefix `name` to the place in a UsageError raised in the block."""
    try:
        yield
    except UsageError as error:
        raise UsageError(
            f"{name} {error.where}".rstrip(), error.problem, fix=error.fix, code=error.code
        ) from None
