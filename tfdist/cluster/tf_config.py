"""Tasks of a job, their addresses, and TF_CONFIG, by which a launcher tells them to each task.

TF_CONFIG is what TensorFlow itself reads, a JSON object with ``cluster`` and ``task``, plus our
options under ``tfdist``, a key that TensorFlow leaves alone.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tfdist.cluster.address import check_address, shown
from tfdist.errors import UsageError, near, require_int, require_one_of

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
Kind = Literal["single", "multiworker", "ps"]

_RANK = {type_: rank for rank, type_ in enumerate(TASK_TYPES)}
_FIX_OF_OLD_NAMES = {
    "master": "write 'chief' for 'master', as the cluster and as the task's type",
    "sparseCluster": "set enableDynamicWorker: false in the TFJob: a sparseCluster lists only some"
    " of the tasks, and each task needs the addresses of all in 'cluster'",
}
"""How to correct the names of older platforms (AI Platform, SageMaker, Kubeflow's TFJob)."""


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Task:
    """One process of a job: its type and its index among the tasks of that type.

    Tasks sort as they start: chief, workers, ps, evaluator.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        fix = _FIX_OF_OLD_NAMES.get(str(self.type), "")
        require_one_of("task type", self.type, TASK_TYPES, fix=fix, code="TFC015")
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
            fix = _FIX_OF_OLD_NAMES.get(type_, "")
            require_one_of("cluster", type_, TASK_TYPES, fix=fix, code="TFC008")
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


STRATEGIES = ("auto", "single", "mirrored", "multiworker", "ps", "pipeline")

_COUNTS = ("devices_per_worker", "threads_per_task", "min_workers", "split_bytes", "stages")
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
    terminal: bool = False
    """Whether what a task prints is shown on a terminal, where a line may be written over."""

    def __post_init__(self) -> None:
        require_one_of("tfdist.strategy", self.strategy, STRATEGIES, code="TFC019")
        _check_count("attempt", self.attempt)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        _check_seconds("startup_timeout_s", self.startup_timeout_s)
        object.__setattr__(self, "startup_timeout_s", float(self.startup_timeout_s))
        _check_directory("run_dir", self.run_dir)
        for name in ("evaluator", "terminal"):
            if not isinstance(value := getattr(self, name), bool):
                raise _wrong(name, value, "true or false", "give one")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> JobOptions:
        """Return the options of ``{name: value}``; `UsageError` for a name it does not have."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            require_one_of("tfdist", name, names, code="TFC018")
        return cls(**values)  # type: ignore[arg-type]  # checked in __post_init__

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return ``{name: value}`` of every option."""
        return dataclasses.asdict(self)


def _check_count(name: str, value: object) -> None:
    fix = "give a whole number, without quotes"
    require_int(f"tfdist.{name}", value, least=1, fix=fix, code="TFC019")


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
    return UsageError(where, received=shown(value), expected=expected, fix=fix, code="TFC019")


def parse_object(text: str | bytes, *, where: str) -> dict[str, object]:
    """Return the JSON object in `text`; `UsageError` names the mistake if there is none."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    try:
        value = _loads(text)
    except RecursionError:
        fix = "write the object that TensorFlow documents, three levels deep"
        expected = "a JSON object of a few levels"
        raise UsageError(
            where, received="deep nesting", expected=expected, fix=fix, code="TFC004"
        ) from None
    except _DuplicateKeyError as error:
        received = f"the key {shown(error.args[0])} twice in one object"
        fix = "join the two, or take one out"
        raise UsageError(
            where, received=received, expected="each key once", fix=fix, code="TFC003"
        ) from None
    except ValueError as error:
        raise _repaired(text, where=where) or UsageError(
            where,
            received=f"{shown(text)} ({error})",
            expected="a JSON object",
            fix="correct it there; json.dumps in Python or jq on the command line write valid JSON",
            code="TFC001",
        ) from None
    if isinstance(value, dict):
        return value
    raise _repaired(text, where=where) or UsageError(
        where,
        received=shown(value),
        expected="a JSON object",
        fix='write {"cluster": {...}, "task": {...}}',
        code="TFC004",
    )


class _DuplicateKeyError(ValueError):
    """A key that is twice in one object, of which json itself would drop all but the last."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _DuplicateKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return made


def _loads(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique)


def _repaired(text: str, *, where: str) -> UsageError | None:
    """Return the error with the right text in it, when the mistake is a usual one of quoting."""
    bare = text.strip("'\" \t\r\n").replace('\\"', '"')
    if bare == text.strip() and "'" not in bare:
        return None
    for read in (_loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            right = json.dumps(value := read(bare))
            if isinstance(value, dict):
                return UsageError(
                    where,
                    received="an object in the wrong quotes, as of a printed Python dict",
                    expected="JSON, whose names are in double quotes",
                    fix=f"{where}={shlex.quote(right)}",
                    code="TFC002",
                )
    return None


VARIABLE = "TF_CONFIG"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """All settings of one task: the cluster, which task of it this is, and the options.

    A job of one process has an empty cluster and is ``worker-0``. The cluster of a training
    task never holds the evaluator, which is dropped here: a coordinator that sees one waits
    for it for ever (tensorflow#46169). That of an evaluator may or may not hold it, as
    schedulers differ.

    Raises:
        UsageError: the cluster has no such task, or is not one for the strategy asked for.
    """

    cluster: ClusterSpec
    task: Task
    options: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
        if self.cluster.evaluator or self.task.type == "evaluator":
            object.__setattr__(self, "options", replace(self.options, evaluator=True))
        if self.task.type != "evaluator":
            object.__setattr__(self, "cluster", self.cluster.without_evaluator())
        _check_membership(self)
        _check_agreement(self)


def encode(config: TaskConfig) -> str:
    """Return the value of TF_CONFIG, in ASCII and on one line, that `decode` reads back."""
    return json.dumps(
        {
            "cluster": config.cluster.as_dict(),
            "task": {"type": config.task.type, "index": config.task.index},
            "tfdist": config.options.as_dict(),
        }
    )


def decode(text: str | bytes) -> TaskConfig:
    """Return the task of a value of TF_CONFIG, ours or a scheduler's.

    Other keys than ``cluster``, ``task`` and ``tfdist`` are left alone: schedulers add theirs.

    Raises:
        UsageError: for anything wrong with it; the message names the place and the fix.
    """
    fields = parse_object(text, where=VARIABLE)
    with _place(VARIABLE):
        _refuse_misspelt_options(fields)
        cluster = ClusterSpec.from_dict(_section(fields, "cluster", '{"worker": ["host:port"]}'))
        task = _task(_section(fields, "task", '{"type": "worker", "index": 0}'))
        options = JobOptions.from_dict(_object(fields.get("tfdist", {}), "tfdist"))
        return TaskConfig(cluster=cluster, task=task, options=options)


def from_environ(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return the task of TF_CONFIG in `environ`, or None when it is unset or empty."""
    text = environ.get(VARIABLE, "")
    return decode(text) if text.strip() else None


def job_configs(cluster: ClusterSpec, *, options: JobOptions) -> Iterator[TaskConfig]:
    """Yield the config of each task of a whole job, in the order in which they start.

    A job of one process has ``worker-0``, and an evaluator if the cluster holds one.
    """
    training = cluster.without_evaluator()  # once, and not again for each task
    options = replace(options, evaluator=options.evaluator or bool(cluster.evaluator))
    alone = (Task("worker", 0),) if cluster.kind == "single" else ()
    for task in alone + cluster.tasks():
        seen = cluster if task.type == "evaluator" else training
        yield TaskConfig(cluster=seen, task=task, options=options)


def resolved_strategy(config: TaskConfig) -> str:
    """Return the strategy a task is to use, as far as its config decides it.

    A strategy that was asked for stays. For ``auto``, a cluster with a ps means ``ps``, any
    other cluster ``multiworker``, one address alone being a job of size 1. With no cluster
    the answer is ``auto``: single or mirrored, which the devices decide. An evaluator works
    by itself beside the cluster, so for it ``ps`` and ``multiworker`` become ``auto`` too.
    """
    strategy = config.options.strategy
    if config.task.type == "evaluator":
        return strategy if strategy in ("single", "mirrored") else "auto"
    if strategy != "auto" or config.cluster.kind == "single":
        return strategy
    return config.cluster.kind


def _check_membership(config: TaskConfig) -> None:
    cluster, task = config.cluster, config.task
    if cluster.kind == "single" and task == Task("worker", 0):
        return
    if task == Task("evaluator", 0):
        return
    cluster.address(task)


def _check_agreement(config: TaskConfig) -> None:
    strategy, kind, cluster = config.options.strategy, config.cluster.kind, config.cluster
    if strategy in ("multiworker", "pipeline") and kind == "ps":
        fix = 'take "ps" out of the cluster, or ask for strategy ps'
        _disagree(strategy, has=f"{len(cluster.ps)} ps", expected="no ps in the cluster", fix=fix)
    if config.task.type == "evaluator":
        return
    if strategy == "ps" and kind != "ps":
        fix = "add chief, worker and ps to the cluster, or ask for another strategy"
        _disagree(strategy, has="no ps", expected="at least one ps in the cluster", fix=fix)
    if strategy in ("multiworker", "pipeline") and kind == "single":
        fix = 'add "worker": ["host:port", ...] to the cluster, or ask for strategy single'
        _disagree(strategy, has="no address", expected="the workers' addresses", fix=fix)
    count = len(cluster.chief) + len(cluster.worker) + len(cluster.ps)
    if strategy in ("single", "mirrored") and count > 1:
        fix = f"ask for strategy {kind} or auto, or empty the cluster"
        _disagree(strategy, has=f"{count} training tasks", expected="one training task", fix=fix)
    if count % (config.options.stages or 1):
        raise UsageError(
            "tfdist.stages",
            received=f"{config.options.stages} stages and {count} tasks",
            expected="a task for each stage of each pipeline",
            fix=f"use {count} stages, or another number of tasks",
            code="TFC020",
        )


def _disagree(strategy: str, *, has: str, expected: str, fix: str) -> None:
    received = f"{strategy!r} and a cluster with {has}"
    raise UsageError(
        "tfdist.strategy", received=received, expected=expected, fix=fix, code="TFC020"
    )


def _refuse_misspelt_options(fields: Mapping[str, object]) -> None:
    """Refuse a key that was meant to be ``tfdist``: left alone, its options would be lost."""
    if "tfdist" in fields:
        return
    for key in fields:
        if near(key.lower(), ["tfdist"]):
            expected = "our options under the key 'tfdist'"
            fix = f"write 'tfdist' for {shown(key)}"
            raise UsageError("key", received=shown(key), expected=expected, fix=fix, code="TFC021")


def _section(fields: Mapping[str, object], key: str, example: str) -> dict[str, object]:
    return _object(_present(fields, key, where=key, example=example), key)


def _present(fields: Mapping[str, object], key: str, *, where: str, example: str) -> object:
    if key in fields:
        return fields[key]
    fix = f'add "{key}": {example}'
    for other in fields:
        if key == "cluster" and other in _FIX_OF_OLD_NAMES:
            fix = _FIX_OF_OLD_NAMES[other]
        elif near(other.strip().lower(), [key]):
            fix = f"write {key!r} for {shown(other)}"
    others = ", ".join(shown(other) for other in list(fields)[:5])
    received = f"no {key!r}" + (f", only {others}" if others else "")
    code = "TFC005" if where == "cluster" else "TFC006"
    raise UsageError(where, received=received, expected=f"the key {key!r}", fix=fix, code=code)


def _object(value: object, key: str) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    fix = f'write "{key}": {{...}}'
    raise UsageError(key, received=shown(value), expected="an object", fix=fix, code="TFC007")


def _task(fields: Mapping[str, object]) -> Task:
    type_ = _present(fields, "type", where="task", example='"worker"')
    index = _present(fields, "index", where="task", example="0")
    return Task(type_, index)  # type: ignore[arg-type]  # it checks them


@contextlib.contextmanager
def _place(name: str) -> Iterator[None]:
    """Put `name` before the place that an error inside names."""
    try:
        yield
    except UsageError as error:
        raise UsageError(
            f"{name} {error.where}",
            received=error.received,
            expected=error.expected,
            fix=error.fix,
            code=error.code,
        ) from None
