"""Options and command line of the launcher, and the program that the tasks run.

A command line holds the launcher's flags, then the program, then the program's own flags. The
program must receive its flags unchanged. So `argparse` reads only the words before the program.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NoReturn

from tfdist.argument_parser import Parser
from tfdist.cluster import STRATEGIES
from tfdist.cluster.ports import parse_ports
from tfdist.errors import UsageError, mutually_exclusive, require_one_of

StartMethod = Literal["exec", "fork"]

STARTS = ("auto", "exec", "fork")
PLACES = ("local", "ssh", "slurm", "ray")
DEFAULT_MODULE = "tfdist.train"

_MAX_TASKS = 10_000
_MAX_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Script (by path) or module (by name) that every task runs, with its flags."""

    target: str = DEFAULT_MODULE
    is_module: bool = True
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the program's short name: ``train.py`` or ``package.module``."""
        return self.target if self.is_module else self.target.rpartition("/")[2]

    @property
    def python_args(self) -> tuple[str, ...]:
        """Return the words after ``python`` that run the program by hand."""
        return ("-m", self.target, *self.args) if self.is_module else (self.target, *self.args)


def _option(default: Any, shown: str, about: str) -> Any:
    """Return a dataclass field for a flag, with its default and its two texts in ``--help``."""
    return field(default=default, metadata={"shown": shown, "help": about})


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Flags of the launcher, validated when created.

    Raises:
        UsageError: A value is out of range, or two values exclude each other.
    """

    strategy: str = _option(
        "auto",
        "auto|single|mirrored|multiworker|ps|pipeline",
        "how the job is spread; auto decides by the next three flags",
    )
    workers: int = _option(1, "N", "processes that compute (1)")
    ps: int | None = _option(None, "M", "parameter servers of a ps job (1)")
    stages: int | None = _option(None, "K", "stages of each pipeline, a task for each (--workers)")
    min_workers: int | None = _option(
        None, "N", "start a ps job with so many workers when the others do not come (all of them)"
    )
    evaluator: bool = _option(
        False, "", "one more task, outside the training, that evaluates each checkpoint"
    )
    devices_per_worker: int | None = _option(
        None,
        "K",
        "devices of each worker (its part of the GPUs, under ps and pipeline one; one CPU)",
    )
    threads_per_task: int | None = _option(
        None, "T", "CPU threads of each task (the CPUs divided among the tasks)"
    )
    startup_timeout_s: float = _option(
        60.0, "S", "how long the tasks wait for each other at the start (60)"
    )
    grace_s: float = _option(10.0, "S", "how long a task may take to end before it is killed (10)")
    max_restarts: int = _option(0, "R", "how often a job that failed is started again (0)")
    restart_window_s: float = _option(
        3600.0, "S", "restarts longer ago than this do not count (3600)"
    )
    hang_timeout_s: float = _option(
        300.0, "S", "how long a task may hang before it has failed; 0: for ever (300)"
    )
    run_dir: str | None = _option(None, "D", "where the job writes (runs/<time>-<random>)")
    resume: bool = _option(False, "", "continue the newest unfinished run of this command in runs/")
    metrics_port: int | None = _option(
        None, "P", "serve the job's metrics to Prometheus, on loopback (none)"
    )
    on: str | None = _option(
        None,
        "local|ssh|slurm|ray",
        "how the agents of other hosts are started: as processes here, by ssh, by srun in a Slurm "
        "allocation, or as actors of a Ray cluster (local; with --hosts ssh)",
    )
    hosts: str | None = _option(
        None, "a:2,b:2", "the hosts of the job and how many tasks each has; implies --on ssh"
    )
    rsh: str | None = _option(
        None, "CMD", "the command of --on ssh that runs a shell command on {host} (ssh {host})"
    )
    env: str | None = _option(
        None,
        "NAME,NAME",
        "variables that the other hosts get, besides TF_, KERAS_, TFDIST_ and the like",
    )
    ports: str | None = _option(
        None, "20000-20100", "the ports that the job may have, on each host (TFDIST_PORTS; any)"
    )
    start: str = _option(
        "auto",
        "auto|exec|fork",
        "a new Python for each task, or TensorFlow imported once and forked",
    )
    split_bytes: int | None = _option(
        None, "N", "divide trainable variables of more bytes over the ps of a ps job (none)"
    )
    isolate: bool = _option(
        False, "", "run the job in a network of its own, whose ports no other process reaches"
    )
    independent: bool = _option(
        False, "", "let each task train a model of its own, in a program without make_strategy"
    )
    dry_run: bool = _option(False, "", "print each task's command and TF_CONFIG, start nothing")
    program: Program = Program()

    def __post_init__(self) -> None:
        require_one_of("--strategy", self.strategy, STRATEGIES)
        require_one_of("--start", self.start, STARTS)
        if self.on is not None:
            require_one_of("--on", self.on, PLACES)
        _check_numbers(self)
        if self.stages is not None and self.strategy == "auto":
            object.__setattr__(self, "strategy", "pipeline")
        if self.stages is not None and self.workers == 1:
            object.__setattr__(self, "workers", self.stages)  # one task per stage
        if self.run_dir is not None and not self.run_dir.strip():
            fix = "give one, or leave --run_dir out"
            _refuse("run_dir", "''", "the path of a directory", fix, code="empty")
        if self.ports is not None:
            parse_ports(self.ports, where="--ports")
        _check_together(self)

    @property
    def where(self) -> str:
        """Return how agents on other hosts are started: `on`, else ssh with `hosts`, else local."""
        return self.on or ("ssh" if self.hosts is not None else "local")

    @property
    def port_range(self) -> range | None:
        """Return the ports that the job may use, or None for any port."""
        return None if self.ports is None else parse_ports(self.ports, where="--ports")

    @property
    def num_ps(self) -> int:
        """Return the number of parameter servers in a ps job (default: 1)."""
        return self.ps or 1


_BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("workers", "ps", "stages", "min_workers"), (1, _MAX_TASKS)),
    **dict.fromkeys(("devices_per_worker", "threads_per_task"), (1, _MAX_TASKS)),
    **dict.fromkeys(("metrics_port",), (1, 65_535)),
    **dict.fromkeys(("startup_timeout_s", "restart_window_s"), (0.001, _MAX_SECONDS)),
    "split_bytes": (1, math.inf),
    "max_restarts": (0, 1_000_000),
    "grace_s": (0, _MAX_SECONDS),
    "hang_timeout_s": (0, _MAX_SECONDS),
}
"""Minimum and maximum of each number."""


def _check_numbers(options: LaunchOptions) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            _refuse(name, value, f"a number from {least:g} to {most:g}", "use one of these")
    if 0 < options.hang_timeout_s < 2:
        expected = "0, or 2 or more: tasks speak once a second"
        _refuse("hang_timeout_s", options.hang_timeout_s, expected, "use --hang_timeout_s 300")


def _check_together(options: LaunchOptions) -> None:
    strategy, workers, hosts = options.strategy, options.workers, options.hosts
    is_ps = strategy == "ps" or options.ps is not None
    for flag, is_of_use, kind, code in (
        ("ps", strategy in ("auto", "ps"), "ps", "exclusive"),
        ("stages", strategy == "pipeline", "pipeline", "out-of-range"),
        ("split_bytes", is_ps, "ps", "LCH001"),
        ("min_workers", is_ps or hosts is not None or options.on is not None, "ps", "no-ps"),
    ):
        value = getattr(options, flag)
        if value not in (None, False) and not is_of_use:
            received = f"{value} with --strategy {strategy}"
            fix = f"leave --{flag} out, or use --strategy {kind}"
            _refuse(flag, received, f"no --{flag}", fix, code=code)
    if strategy in ("single", "mirrored") and (workers > 1 or hosts is not None):
        flag = "workers" if workers > 1 else "hosts"
        received = f"{getattr(options, flag)} with --strategy {strategy}"
        fix = f"use --strategy multiworker, or leave --{flag} out"
        _refuse(flag, received, "one process", fix, code="exclusive")
    stages, fewest, devices = options.stages, options.min_workers, options.devices_per_worker
    if stages is not None and workers % stages:
        fix = "make --workers a multiple of --stages, or leave it out"
        expected = "a task for each stage of each pipeline"
        _refuse("stages", f"{stages} with --workers {workers}", expected, fix)
    if fewest is not None and fewest > workers and options.where == "local" and not hosts:
        received = f"{fewest} of --workers {workers}"
        _refuse("min_workers", received, f"at most {workers}", f"use --min_workers {workers}")
    if strategy == "single" and devices is not None and devices > 1:
        received = f"{devices} with --strategy single"
        fix = "use --strategy mirrored"
        _refuse("devices_per_worker", received, "1", fix, code="exclusive")
    if options.on == "ray" and hosts is not None:
        received, fix = f"{hosts} with --on ray", "leave --hosts out, or use --on ssh"
        _refuse("hosts", received, "the nodes that Ray gives", fix, code="exclusive")
    if options.on == "ssh" and hosts is None:
        fix = "give --hosts a:2,b:2"
        _refuse("on", "ssh without --hosts", "a list of hosts", fix, code="no-hosts")
    fix = "leave one of them out; live.json in the run directory says the same"
    given = {"--metrics_port": options.metrics_port, "--isolate": options.isolate}
    mutually_exclusive(given, fix=fix)
    mutually_exclusive({"--resume": options.resume, "--run_dir": options.run_dir})


def _refuse(
    flag: str, received: object, expected: str, fix: str, *, code: str = "out-of-range"
) -> NoReturn:
    raise UsageError(f"--{flag}", received=received, expected=expected, fix=fix, code=code)


def seconds(text: str) -> float:
    """Return a flag's text as a number of seconds, or raise ValueError.

    The parser uses this function's name in its error messages.
    """
    return float(text)


def switch(text: str) -> bool:
    """Return the value of ``--flag=true`` or ``--flag``, or raise ValueError."""
    if text.lower() not in _SWITCH:
        raise ValueError(text)
    return _SWITCH[text.lower()]


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    read: Callable[[str], object] | None
    """Function that converts the flag's text to its value, or None for a boolean flag."""
    shown: str
    help: str


_READERS: dict[str, Callable[[str], object] | None]
_READERS = {"str": str, "int": int, "float": seconds, "bool": None}
FLAGS = tuple(
    _Flag(one.name, _READERS[str(one.type).split()[0]], **one.metadata)
    for one in fields(LaunchOptions)
    if one.metadata
)
_TAKES_VALUE = {"help": False, **{flag.name: flag.read is not None for flag in FLAGS}}
_SWITCH = {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse(argv: Sequence[str]) -> LaunchOptions | None:
    """Return the options in `argv`, or None if `argv` contains ``--help``.

    Raises:
        UsageError: A flag is unknown, or a value is invalid.
    """
    words, rest = split(argv, takes_value=_TAKES_VALUE)
    if "--help" in (word.partition("=")[0] for word in words):
        return None
    values = vars(_parser().parse_args(words))
    if "env" in values:
        values["env"] = ",".join(values["env"])
    if "hosts" in values and "workers" in values:
        raise UsageError(
            "--workers",
            received=f"{values['workers']} with --hosts",
            expected="the numbers of tasks in the list of hosts alone",
            fix="leave --workers out, and write --hosts a:2,b:2 for two tasks on each",
            code="exclusive",
        )
    return LaunchOptions(**values, program=_program(rest))


def _parser() -> Parser:
    parser = Parser(
        prog="the launcher (the program's own flags follow the program)",
        usage="python -m tfdist.launch [flags] [script.py | -m module] [the program's own flags]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for flag in FLAGS:
        value: dict[str, Any] = {"type": switch, "nargs": "?", "const": True}
        if flag.read is not None:
            value = {"type": flag.read}
        if flag.name == "env":
            value["action"] = "append"
        shown = flag.shown or "true|false"
        parser.add_argument(f"--{flag.name}", metavar=shown, help=flag.help, **value)
    return parser


def split(argv: Sequence[str], *, takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the launcher's flags, and the remaining words (the program and its flags).

    Each flag named in `takes_value` is written as ``--name=value``. Its name may contain dashes.
    Unknown flags stay unchanged.
    """
    words, rest = list[str](), list(argv)
    while rest and rest[0].startswith("-") and not begins_program(rest[0]):
        word = rest.pop(0)
        head, equals, value = word.partition("=")
        name = "help" if head == "-h" else head.removeprefix("--").replace("-", "_")
        if name in takes_value:
            if takes_value[name] and not equals and rest:
                equals, value = "=", rest.pop(0)
            word = f"--{name}{equals}{value}"
        words.append(word)
    return words, rest


_DESCRIPTION = f"""Starts the processes of a job on this machine, each with its part in TF_CONFIG,
and ends them all when it is done or when one of them fails.

The words after the program belong to the program. Without a program the job is
{DEFAULT_MODULE}, which gets everything from the first --config flag, or after --.

  python -m tfdist.launch --strategy multiworker --workers 2 train.py --lr 0.1
  python -m tfdist.launch --strategy ps --workers 4 --ps 1 --config.seed=1"""


def help_text() -> str:
    """Return the text that ``--help`` prints."""
    return _parser().format_help()


def begins_program(token: str) -> bool:
    """Return whether `token` is the first word of the program's part of the command line."""
    name = token.removeprefix("--")
    return token in ("-m", "--") or name == "config" or name.startswith(("config.", "config="))


def _program(rest: list[str]) -> Program:
    if rest and rest[0] == "--":
        rest = rest[1:]
        if rest and rest[0].startswith("-") and rest[0] != "-m":
            return Program(args=tuple(rest))
    if not rest or rest[0].startswith("--"):
        return Program(args=tuple(rest))
    if rest[0] != "-m":
        return Program(target=rest[0], is_module=False, args=tuple(rest[1:]))
    if len(rest) < 2 or not rest[1] or rest[1].startswith("-"):
        fix = "write -m package.module"
        raise UsageError(
            "-m", received="no module", expected="a module's name", fix=fix, code="no-value"
        )
    return Program(target=rest[1], args=tuple(rest[2:]))


_TENSORFLOW = ("tensorflow", "keras", "tfdist")
_READ_AT_IMPORT = re.compile("(TF|TF2|KERAS|XLA|OMP|CUDA)_(?!CONFIG$)[A-Z0-9_]+")


def check_program(program: Program) -> None:
    """Raise UsageError if the tasks' script does not exist (modules are not checked)."""
    if program.target == DEFAULT_MODULE:
        from tfdist.configs import command_line  # a slow import

        command_line.parse(program.args)
    # Files in /dev and /proc differ from process to process.
    is_file = os.path.isfile(program.target) and not re.match("/(dev|proc)/", program.target)
    if not program.is_module and not is_file:
        raise UsageError(
            "program",
            received=f"{program.target!r}, which is no file",
            expected="a Python script",
            fix="correct the path, or use -m for a module",
            code="no-file",
        )


def imports_tensorflow(program: Program, *, search: Sequence[str]) -> bool:
    """Return whether a program's own file imports tensorflow, keras or tfdist.

    Return False if the file contains the name of a variable that these packages read at import.
    The program may set that variable, which must happen before the import.
    """
    path = file_of_program(program, search=search)
    try:
        nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return False  # the task reports the error
    return any(map(_imports, nodes)) and not any(map(_names_a_variable, nodes))


def _imports(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in _TENSORFLOW for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return module.split(".")[0] in _TENSORFLOW
    return False


def _names_a_variable(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
            return _READ_AT_IMPORT.fullmatch(name) is not None
    return False


def file_of_program(program: Program, *, search: Sequence[str]) -> str:
    """Return a program's file (for a package, its ``__main__``), or "" if not in `search`.

    The program is not imported.
    """
    if not program.is_module:
        return program.target
    names, places = program.target.split("."), list(search)
    spec = PathFinder.find_spec(names.pop(0), places)
    while spec is not None and spec.submodule_search_locations is not None:
        places = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(names.pop(0) if names else "__main__", places)
    return spec.origin if spec and spec.has_location and spec.origin and not names else ""
