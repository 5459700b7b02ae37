"""Job request, independent of the scheduler: what the command line says, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster.settings import FLAGS, RUN_DIR, names_a_secret
from tfdist.errors import UsageError
from tfdist.launch.options import LaunchOptions
from tfdist.ops.submit.command import Command, wrong

SEVERAL = ("multiworker", "ps", "pipeline")
"""The strategies of jobs of several tasks."""

_SPARE_THREADS = 2  # beside one for each worker that may wait in an operation
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What each task is given; None leaves it to the scheduler."""

    cpus: int | None = None
    memory_mib: int | None = None
    gpus: int = 0
    """Of each task that computes: not of a ps, nor of the chief of a ps job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """One job. `strategy` is auto only in a job of one task, which decides by its devices.

    Raises:
        UsageError: values that no scheduler could take.
    """

    name: str
    strategy: str
    launch: LaunchOptions
    """The launcher's flags, which the launcher has checked."""
    run_dir: str
    python: str = "python"
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """From a variable to where its value is; never the value."""
    time_s: int | None = None

    def __post_init__(self) -> None:
        if self.launch.evaluator and not self.has_several_tasks:
            fix = "leave --evaluator out, or use --strategy ps, multiworker or pipeline"
            raise wrong("evaluator", "one process", "a job of several tasks", fix)
        for name in (*self.env, *self.secrets):
            if not re.fullmatch(_VARIABLE, name):
                expected, fix = "the name of a variable", "use letters, digits and _"
                raise wrong("env", repr(name), expected, fix)
        for name in self.env:
            if name in self.secrets:
                received = f"{name}, which is a --secret too"
                raise wrong("env", received, "each name once", "leave one of them out", "exclusive")

    @property
    def program(self) -> tuple[str, ...]:
        """Return what follows ``python``: a script or ``-m`` and a module, and its own flags."""
        return self.launch.program.python_args

    @property
    def has_several_tasks(self) -> bool:
        """Return whether the job has tasks that must find each other."""
        return self.strategy in SEVERAL

    @property
    def is_ps(self) -> bool:
        """Return whether it is a ps job."""
        return self.strategy == "ps"

    @property
    def num_ps(self) -> int:
        """Return how many tasks are ps."""
        return self.launch.num_ps if self.is_ps else 0

    @property
    def num_tasks(self) -> int:
        """Return how many processes the job has, the chief of a ps job included."""
        return self.is_ps + self.launch.workers + self.num_ps + self.launch.evaluator

    @property
    def grace_s(self) -> int:
        """Return how long before its end a task is told to stop."""
        return math.ceil(self.launch.grace_s)

    @property
    def title(self) -> str:
        """Return the job in a few words."""
        if self.has_several_tasks:
            tasks = [f"{self.launch.workers} workers"]
            if self.is_ps:
                tasks = ["a chief", *tasks, f"{self.num_ps} ps"]
            if self.launch.evaluator:
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
        made[RUN_DIR] = self.run_dir
        for flag, variable in FLAGS.items():
            value = getattr(self.launch, flag)
            if variable != RUN_DIR and value not in (None, False):
                made[variable] = _text(value)
        threads = self.launch.threads_per_task or self.resources.cpus
        if threads:  # a container sees all CPUs of its node, whatever its share is
            made |= {"TF_NUM_INTRAOP_THREADS": f"{threads}", "OMP_NUM_THREADS": f"{threads}"}
        if self.is_ps:
            # With fewer inter-op threads than workers that may wait, a ps job hangs.
            inter_op = max(threads or 0, self.launch.workers + _SPARE_THREADS)
            made["TF_NUM_INTEROP_THREADS"] = f"{inter_op}"
        return {**made, **self.env}


def request_of(command: Command, *, runs: str, secret_form: str, secret_pattern: str) -> JobRequest:
    """Return the job of a command line.

    Args:
      command: the command line.
      runs: where a job without --run_dir writes, in a directory of its name.
      secret_form: what a --secret refers to, as the scheduler has it.
      secret_pattern: what such a reference matches.

    Raises:
        UsageError: flags that are wrong.
    """
    launch, env = command.launch, command.pairs("env")
    _refuse_values(launch.program.python_args, env=env, form=secret_form)
    secrets = (_reference(t, secret_pattern, secret_form) for t in command.all("secret"))
    name = command.one("name") or _name_of(launch)
    time, memory = command.one("time"), command.one("memory")
    return JobRequest(
        name=name,
        strategy=_strategy(launch),
        launch=launch,
        run_dir=launch.run_dir or f"{runs}/{name}",  # by which a job that is started again goes on
        python=command.one("python") or "python",
        resources=Resources(
            cpus=command.count("cpus"),
            memory_mib=_mebibytes(memory) if memory else None,
            gpus=command.count("gpus") or 0,
        ),
        env=env,
        secrets=dict(secrets),
        time_s=_seconds(time) if time else None,
    )


def _mebibytes(text: str) -> int:
    """Return the MiB of an amount of memory like ``16G``, ``16Gi`` or ``512M``."""
    number = text.rstrip("MGTiB")
    return int(number) << {"M": 0, "G": 10, "T": 20}[text[len(number)]]


def _seconds(text: str) -> int:
    """Return the seconds of ``90m``, ``4h``, ``2d``, ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    if text[-1] in _SECONDS:
        return int(text[:-1]) * _SECONDS[text[-1]]
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return 86_400 * int(days or 0) + 3600 * hours + 60 * minutes + rest


def _strategy(launch: LaunchOptions) -> str:
    if launch.strategy != "auto":
        return launch.strategy
    if launch.ps is not None:
        return "ps"
    return "multiworker" if launch.workers > 1 else "auto"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return f"{value:d}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _name_of(launch: LaunchOptions) -> str:
    stem = launch.program.name.removesuffix(".py").rpartition(".")[2].lower()
    return re.sub("[^a-z0-9]+", "-", stem).strip("-0123456789") or "tfdist"


# Secrets: a job names where they are. Their values are in no flag, script or manifest.

_KNOWN = re.compile(
    r"\b(ghp_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@"
)
_FIX = "put the value where the scheduler keeps it, and name that: --secret NAME={form}"


def _refuse_values(program: Sequence[str], *, env: Mapping[str, str], form: str) -> None:
    """Refuse what looks like a secret's value in --env or among the program's arguments.

    The message has the name of the flag or variable, and not the value.
    """
    for name, value in env.items():
        if is_secret(name, value):
            raise _refused(f"--env {name}", form)
    for i, argument in enumerate(program):
        name, equals, value = argument.partition("=")
        after = program[i + 1] if i + 1 < len(program) else ""
        if name.startswith("-") and not equals:
            name, value = name, "" if after.startswith("-") else after
        elif not name.startswith("-"):
            name, value = "", argument
        if is_secret(name.lstrip("-"), value) or _KNOWN.search(argument):
            raise _refused(name if name.startswith("--") else "the program's arguments", form)


def is_secret(name: str, value: str) -> bool:
    """Return whether `value`, given for `name`, looks like a secret itself."""
    return bool(value) and bool(names_a_secret(name) or _KNOWN.search(value))


def _reference(text: str, pattern: str, form: str) -> tuple[str, str]:
    """Split ``NAME=reference``; the message of the `UsageError` shows the name at most."""
    name, equals, where = text.partition("=")
    if equals and re.fullmatch(_VARIABLE, name) and re.fullmatch(pattern, where):
        return name, where
    shown = f"{name}=... (not shown)" if equals else "no NAME=reference"
    expected = f"a variable and where its value is: NAME={form}"
    raise wrong("secret", shown, expected, _FIX.format(form=form))


def _refused(where: str, form: str) -> UsageError:
    received = "what looks like a secret's value (not shown)"
    expected = "no secret in a command line, a script or a manifest"
    fix = _FIX.format(form=form)
    return UsageError(where, received=received, expected=expected, fix=fix, code="secret")
