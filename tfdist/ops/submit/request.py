"""Job request, independent of the scheduler; validated when created."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdist.errors import UsageError

SEVERAL = ("multiworker", "ps")
"""The strategies of jobs of several tasks."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPARE_THREADS = 2  # beside one for each worker that may wait in an operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What each task is given; None leaves it to the scheduler."""

    cpus: int | None = None
    memory_mib: int | None = None
    gpus: int = 0
    """Of each task that computes: not of a ps, nor of the chief of a ps job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A claim, or a directory of the node where `source` begins with a slash, seen at `mount`."""

    source: str
    mount: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """One job. `strategy` is auto only in a job of one task, which decides by its devices.

    Raises:
        UsageError: values that no scheduler could take.
    """

    name: str
    strategy: str
    program: tuple[str, ...]
    """What follows ``python``: a script or ``-m`` and a module, and the program's own flags."""
    run_dir: str
    workers: int = 1
    ps: int = 0
    evaluator: bool = False
    python: str = "python"
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """From a variable to where its value is; never the value."""
    time_s: int | None = None
    grace_s: int = 60
    max_restarts: int = 3
    hang_timeout_s: int = 300
    options: Mapping[str, str] = field(default_factory=dict)
    """Variables of `tfdist.cluster.settings` that the user's flags have set."""
    ports: range | None = None
    """Those at which tasks may listen; None for any."""
    threads_per_task: int | None = None

    def __post_init__(self) -> None:
        if self.evaluator and not self.has_several_tasks:
            fix = "leave --evaluator out, or use --strategy ps or multiworker"
            expected = "a job of several tasks"
            raise UsageError("--evaluator", received="one process", expected=expected, fix=fix)
        for name in (*self.env, *self.secrets):
            if not _VARIABLE.fullmatch(name):
                fix = "use letters, digits and _"
                expected = "the name of a variable"
                raise UsageError("--env", received=repr(name), expected=expected, fix=fix)
        for name in self.env:
            if name in self.secrets:
                fix = "leave one of them out"
                received = f"{name}, which is a --secret too"
                raise UsageError("--env", received=received, expected="each name once", fix=fix)

    @property
    def has_several_tasks(self) -> bool:
        """Return whether the job has tasks that must find each other."""
        return self.strategy in SEVERAL

    @property
    def num_tasks(self) -> int:
        """Return how many processes the job has, the chief of a ps job included."""
        chief = int(self.strategy == "ps")
        return chief + self.workers + self.ps + self.evaluator

    @property
    def title(self) -> str:
        """Return the job in a few words."""
        if self.has_several_tasks:
            tasks = [f"{self.workers} workers"]
            if self.strategy == "ps":
                tasks = ["a chief", *tasks, f"{self.ps} ps"]
            if self.evaluator:
                tasks.append("an evaluator")
            *first, last = tasks
            return f"{self.name}: {', '.join(first)}{' and ' * bool(first)}{last}"
        kind = "" if self.strategy == "auto" else f", strategy {self.strategy}"
        return f"{self.name}: one process{kind}"

    def variables(self) -> dict[str, str]:
        """Return the environment of every task, without what only one scheduler needs."""
        made = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}
        if self.strategy != "auto":
            made["TFDIST_STRATEGY"] = self.strategy
        made |= {"TFDIST_RUN_DIR": self.run_dir, **self.options}
        threads = self.threads_per_task or self.resources.cpus
        if threads:  # a container sees all CPUs of its node, whatever its share is
            made |= {"TF_NUM_INTRAOP_THREADS": f"{threads}", "OMP_NUM_THREADS": f"{threads}"}
        if self.strategy == "ps":
            # With fewer inter-op threads than workers that may wait, a ps job hangs.
            inter_op = max(threads or 0, self.workers + _SPARE_THREADS)
            made["TF_NUM_INTEROP_THREADS"] = f"{inter_op}"
        return {**made, **self.env}
