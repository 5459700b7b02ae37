"""Command line of `tfdist.submit`, parsed to a job request for any scheduler.

It has its own flags, the launcher's flags (checked by the launcher), and a program.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfdist.argument_parser import Parser
from tfdist.cluster import AUTO, KINDS, Kind
from tfdist.cluster.settings import holds_a_secret, names_a_secret
from tfdist.errors import UsageError, require_int, require_one_of
from tfdist.launch import options as launcher
from tfdist.launch.options import LaunchOptions
from tfdist.options import PS, RUN_DIR, STRATEGY, LaunchFlags, table

_WORD = r"[^\s-]\S*", "one word"
_FORMS = {
    "name": (r"[A-Za-z0-9][A-Za-z0-9_.-]*", "only letters, digits, '.', '_' and '-'"),
    **dict.fromkeys(("partition", "account", "qos", "node_selector"), _WORD),
    **dict.fromkeys(("image", "namespace", "service_account", "image_pull_secret"), _WORD),
    "memory": (r"[1-9][0-9]{0,8}[MGT][iB]?", "a number and M, G or T, such as 16G"),
    "time": (
        r"(?=.*[1-9])([0-9]{1,6}[smhd]|([0-9]{1,4}-)?[0-9]{1,4}:[0-5]?[0-9]:[0-5]?[0-9])",
        "30m, 4h, 2d, HH:MM:SS or D-HH:MM:SS",
    ),
    "volume": (
        r"[^\n:=]+=/[^\n:]+(:ro)?",
        "CLAIM=/PATH or /DIRECTORY=/PATH, and :ro to read only",
    ),
}
"""Format of a flag's text, as a pattern and in words."""

_ONLY = {
    "slurm": ("nodes", "partition", "account", "qos"),
    "kubernetes": (
        *("kind", "image", "namespace", "volume", "service_account", "image_pull_secret"),
    ),
}
"""Flags that only one scheduler has."""

_LAUNCHER = {name: one for name, one in table(LaunchFlags).items() if one.help and name != "env"}
_SWITCHES = {name for name, one in _LAUNCHER.items() if one.type == "bool"}

_SPARE_THREADS = 2  # besides a thread for each worker that may wait in an operation
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SECRETS = {
    "slurm": ("/path/of/a/file", r"/[^\0\n]+"),
    "kubernetes": ("secret/key", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9._-]{1,253}"),
}
"""Format of a --secret's reference, in words and as a pattern."""


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
        for name in self.env:
            if not re.fullmatch(_VARIABLE, name):
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
        for name, one in _LAUNCHER.items():
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


def parse(argv: Sequence[str]) -> JobRequest | None:
    """Return the job of a command line, or `None` if it asks for the help text.

    Raises:
        UsageError: A flag is unknown, has no value, or does not apply to this scheduler.
    """
    flags = {action.dest: action.dest not in _SWITCHES for action in _parser()._actions}
    words, program = launcher.split(argv, takes_value={**flags, "help": False})
    if "--help" in words:
        return None
    values = vars(_parser().parse_args(words))
    own = {name: values.pop(name) for name in [*values] if name not in _LAUNCHER}
    fix = "write --to slurm or --to kubernetes"
    if own["to"] is None:
        raise wrong("to", "the scheduler is missing", fix, "no-value")
    to = require_one_of("--to", own["to"], ("slurm", "kubernetes"), fix=fix)
    for only, names in _ONLY.items():
        for name in names:
            if only != to and own[name]:
                problem = f"--to {to} does not support this flag"
                raise wrong(name, problem, f"leave --{name} out", "exclusive")
    for name in _FORMS:
        for text in own[name] if isinstance(own[name], list) else [own[name]]:
            _check(name, text)
    for name, least in (("cpus", 1), ("nodes", 1), ("gpus", 0)):
        if own[name] is not None:
            require_int(f"--{name}", own[name], least=least, fix=f"write --{name} 2, for example")
    launch, env = _launch_options(values, program, to), pairs("env", own["env"])
    form, pattern = _SECRETS[to]
    _refuse_values(launch.program.python_args, env=env, form=form)
    secrets = dict(_reference(text, pattern, form) for text in own["secret"])
    return JobRequest(flags=argparse.Namespace(**own), launch=launch, env=env, secrets=secrets)


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


def help_text() -> str:
    """Return the text of ``--help``."""
    return _parser().format_help()


def wrong(flag: str, problem: str, fix: str, code: str = "bad-value") -> UsageError:
    """Return the error for a flag's value."""
    return UsageError(f"--{flag}", problem, fix=fix, code=code)


def _check(name: str, text: str | None) -> None:
    pattern, form = _FORMS[name]
    if text is not None and not re.fullmatch(pattern, text):
        raise wrong(name, f"{text!r} is not valid", f"pass {form}")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.submit",
        usage="python -m tfdist.submit --to slurm|kubernetes [--dry_run] [flags] "
        "[script.py | -m module] [the program's own flags]",
        description="Submit a job to a scheduler. With --dry_run, print its script or manifests.",
        add_help=False,
    )
    add = parser.add_argument
    add("--to", metavar="slurm|kubernetes", help="scheduler")
    add("--name", metavar="NAME", help="name of the job (the program's name)")
    add("--python", metavar="PATH", help="Python with tfdist (python)")
    add("--cpus", type=int, metavar="N", help="CPUs of each task")
    add("--memory", metavar="16G", help="memory of each task")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each computing task (0)")
    add("--time", metavar="4h", help="limit of each run (Slurm) or of the job (Kubernetes)")
    collect = functools.partial(parser.add_argument, action="append", default=[])
    collect("--env", metavar="NAME=VALUE", help="variable of the tasks (repeatable)")
    secret = "variable with the value of a file (Slurm: /path) or a Secret (secret/key)"
    collect("--secret", metavar="NAME=WHERE", help=f"{secret} (repeatable)")
    selector = "label of the nodes, or their feature under Slurm (repeatable)"
    collect("--node_selector", metavar="KEY=VALUE|FEATURE", help=selector)
    add = parser.add_argument_group("for Kubernetes").add_argument
    add("--kind", metavar="job|jobset|trainjob", help="kind of the object (job)")
    add("--image", metavar="IMAGE", help="container image with tfdist")
    add("--namespace", metavar="NS", help="namespace (of kubectl's context)")
    volume = "claim, or directory of the node with a leading /, and its mount point"
    shown = "CLAIM=/PATH[:ro]"
    add("--volume", action="append", default=[], metavar=shown, help=f"{volume} (repeatable)")
    add("--service_account", metavar="NAME", help="service account of the pods")
    add("--image_pull_secret", metavar="NAME", help="Secret of the image's registry")
    add = parser.add_argument_group("for Slurm").add_argument
    add("--nodes", type=int, metavar="N", help="number of nodes")
    add("--partition", metavar="NAME", help="partition")
    add("--account", metavar="NAME", help="account that pays")
    add("--qos", metavar="NAME", help="quality of service")
    add = parser.add_argument_group("of python -m tfdist.launch").add_argument
    for name, one in _LAUNCHER.items():
        about = argparse.SUPPRESS if one.submit is None else one.submit or one.help
        shown = "|".join(one.choices) or ("true" if one.type == "bool" else "VALUE")
        add(f"--{name}", nargs="?", default=argparse.SUPPRESS, metavar=shown, help=about)
    return parser


def _launch_options(
    values: Mapping[str, str | None], program: Sequence[str], to: str
) -> LaunchOptions:
    """Return the launcher's options with defaults for clusters, checked by the launcher."""
    for name in values:
        one = _LAUNCHER[name]
        if one.submit is None or to not in one.schedulers:
            raise UsageError(
                f"--{name}",
                f"--to {to} does not use this flag",
                fix=f"leave --{name} out",
                code="not-here",
            )
    given = {name: one.submit_default for name, one in _LAUNCHER.items() if one.submit_default}
    words = [
        f"--{name}" if text is None else f"--{name}={text}"
        for name, text in {**given, **values}.items()
    ]
    options = launcher.parse([*words, *program])
    assert options is not None  # `parse` has handled --help
    return options


def _text(value: object) -> str:
    if isinstance(value, bool):
        return f"{value:d}"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


# Secrets: a job has only references. No flag, script or manifest has a secret's value.

_FIX = "store the value with the scheduler, and pass a reference: --secret NAME={form}"


def _refuse_values(program: Sequence[str], *, env: Mapping[str, str], form: str) -> None:
    """Reject values that look like secrets in --env or the program's arguments.

    The message has the name of the flag or variable, but not the value.
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
        if is_secret(name.lstrip("-"), value) or holds_a_secret(argument):
            raise _refused(name if name.startswith("--") else "the program's arguments", form)


def is_secret(name: str, value: str) -> bool:
    """Return whether `value` of the flag or variable `name` looks like a secret."""
    return bool(value) and (names_a_secret(name) or holds_a_secret(value))


def _reference(text: str, pattern: str, form: str) -> tuple[str, str]:
    """Split ``NAME=reference``. The error message shows at most the name."""
    name, equals, where = text.partition("=")
    if equals and re.fullmatch(_VARIABLE, name) and re.fullmatch(pattern, where):
        return name, where
    shown = f"{name}=... (value not shown)" if equals else "a text without ="
    raise wrong("secret", f"{shown} is not of the form NAME={form}", _FIX.format(form=form))


def _refused(where: str, form: str) -> UsageError:
    problem = "the value (not shown) looks like a secret, which the job's files must not contain"
    return UsageError(where, problem, fix=_FIX.format(form=form), code="secret")
