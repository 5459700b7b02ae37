"""Request for a job: the launcher's options with the flags and variables for a scheduler."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfdist.cluster import AUTO, KINDS, Kind
from tfdist.errors import UsageError
from tfdist.launch.options import LaunchOptions
from tfdist.options import PS, RUN_DIR, STRATEGY, LaunchFlags, table

_SPARE_THREADS = 2  # besides a thread for each worker that may wait in an operation
VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Volume(NamedTuple):
    """A claim, or a node's directory if `source` starts with a slash, mounted at `mount`."""

    source: str
    mount: str
    read_only: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """A job to submit. `flags` has the values of all flags (`None` or [] if not given).

    Raises:
        UsageError: A value is invalid for every scheduler.
    """

    flags: argparse.Namespace
    launch: LaunchOptions
    """The launcher's flags, checked by the launcher."""
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    """References to secret values by variable, but never the values."""

    def __post_init__(self) -> None:
        if self.launch.evaluator and not self.kind.has_several_tasks:
            fix = "leave --evaluator out, or use --strategy ps, multiworker or pipeline"
            raise wrong("evaluator", "the job has only one process", fix)
        if self.kind.is_elastic:
            fix = "use --strategy multiworker with --max_restarts"
            raise wrong("strategy", "an elastic job needs the launcher in the job", fix)
        for name in self.env:
            if not re.fullmatch(VARIABLE, name):
                fix = "use only letters, digits and _, and no digit first"
                raise wrong("env", f"{name!r} is not a name of a variable", fix)
            if name in self.secrets:
                problem = f"{name} is also set by --secret"
                raise wrong("env", problem, "leave one of them out", "exclusive")

    @property
    def name(self) -> str:
        """Return the given name, or a name made from the program's name."""
        if self.flags.name:
            return str(self.flags.name)
        stem = self.launch.program.name.removesuffix(".py").rpartition(".")[2].lower()
        return re.sub("[^a-z0-9]+", "-", stem).strip("-0123456789") or "tfdist"

    @property
    def kind(self) -> Kind:
        """Return the kind. It is `AUTO` only for one task, which chooses by its devices."""
        kind = self.launch.kind
        return KINDS["multiworker"] if kind is AUTO and self.launch.workers > 1 else kind

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """Return the volumes of the pods."""
        made = []
        for text in self.flags.volume:
            source, _, rest = text.partition("=")
            mount, _, mode = rest.partition(":")
            made.append(Volume(source, mount, mode == "ro"))
        return tuple(made)

    @property
    def run_dir(self) -> str:
        """Return the run directory. Its name is fixed, so that a restarted job can resume.

        The batch script adds Slurm's job id, unless the user gave the directory.
        """
        writable = [volume.mount.rstrip("/") for volume in self.volumes if not volume.read_only]
        return self.launch.run_dir or f"{(writable or ['runs'])[0]}/{self.name}"

    @property
    def memory_mib(self) -> int | None:
        """Return the MiB of ``16G``, ``16Gi`` or ``512M`` for each task, `None` without a limit."""
        if not (text := self.flags.memory):
            return None
        number = text.rstrip("MGTiB")
        return int(number) << {"M": 0, "G": 10, "T": 20}[text[len(number)]]

    @property
    def time_s(self) -> int | None:
        """Return the time limit in seconds, given as ``90m``, ``4h``, ``2d``, ``[D-]HH:MM:SS``."""
        if not (text := self.flags.time):
            return None
        if text[-1] in _SECONDS:
            return int(text[:-1]) * _SECONDS[text[-1]]
        days, _, clock = text.rpartition("-")
        hours, minutes, rest = map(int, clock.split(":"))
        return 86_400 * int(days or 0) + 3600 * hours + 60 * minutes + rest

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command of a task: Python, script or ``-m`` module, and its arguments."""
        return self.flags.python or "python", *self.launch.program.python_args

    @property
    def num_ps(self) -> int:
        """Return how many tasks are ps."""
        return self.launch.num_ps if self.kind.has_servers else 0

    @property
    def num_tasks(self) -> int:
        """Return the number of processes, including the chief of a ps job and an evaluator."""
        return self.kind.has_servers + self.launch.workers + self.num_ps + self.launch.evaluator

    @property
    def grace_s(self) -> int:
        """Return the seconds between a task's stop signal and its end."""
        return math.ceil(self.launch.grace_s)

    @property
    def title(self) -> str:
        """Return a short description of the job."""
        return f"{self.name}: strategy {self.kind}, tasks: {self.num_tasks}"

    def variables(self) -> dict[str, str]:
        """Return the environment of every task, except variables for only one scheduler."""
        made = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}
        if self.kind is not AUTO:
            made[STRATEGY] = self.kind.name
        made[RUN_DIR] = self.run_dir
        for name, one in table(LaunchFlags).items():
            value = getattr(self.launch, name)
            if one.variable not in ("", PS, STRATEGY, RUN_DIR) and value not in (None, False):
                made[one.variable] = _text(value)
        threads = self.launch.threads_per_task or self.flags.cpus
        if threads:  # a container sees all CPUs of its node, not only its share
            made |= {"TF_NUM_INTRAOP_THREADS": f"{threads}", "OMP_NUM_THREADS": f"{threads}"}
        if self.kind.has_servers:
            # A ps job hangs if it has fewer inter-op threads than workers that may wait.
            inter_op = max(threads or 0, self.launch.workers + _SPARE_THREADS)
            made["TF_NUM_INTEROP_THREADS"] = f"{inter_op}"
        return {**made, **self.env}


def pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the names and values of a repeated NAME=VALUE flag."""
    made: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            problem = f"{key!r} is not a name and a value"
            raise wrong(flag, problem, f"write --{flag} NAME=VALUE")
        if key in made:
            raise wrong(flag, f"{key} is set twice", "leave one of them out")
        made[key] = value
    return made


def wrong(flag: str, problem: str, fix: str, code: str = "bad-value") -> UsageError:
    """Return the error for a flag's value."""
    return UsageError(f"--{flag}", problem, fix=fix, code=code)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return f"{value:d}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"
