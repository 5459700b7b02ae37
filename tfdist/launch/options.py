"""Options of the launcher, validated when created, their command line, and the tasks' program.

The line is the launcher's own flags, then a program with flags of its own. The program's part
must reach it untouched, whatever it looks like, so the line is cut at the program before `argparse`
reads the first part. Whether the program is there is checked before any task is started, and
nothing of it is imported.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, NoReturn

from tfdist.argument_parser import Parser, reading_file
from tfdist.cluster import STRATEGIES
from tfdist.cluster.ports import parse_ports
from tfdist.errors import UsageError, mutually_exclusive, near, require_one_of

StartMethod = Literal["exec", "fork"]

STARTS = ("auto", "exec", "fork")
PLACES = ("local", "ssh", "slurm", "ray")
OF_OTHERS = {
    **dict.fromkeys(("n", "np", "nproc", "nproc_per_node", "num_proc", "num_processes"), "workers"),
    **dict.fromkeys(("num_workers", "num_processes_per_node"), "workers"),
    **dict.fromkeys(
        ("nnodes", "num_machines", "H", "host", "master_addr", "rdzv_endpoint"), "hosts"
    ),
}
"""How other launchers call what ours has a flag for."""
DEFAULT_MODULE = "tfdist.train"

_MAX_TASKS = 10_000
_MAX_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What every task runs: a script by its path or a module by its name, and its flags."""

    target: str = DEFAULT_MODULE
    is_module: bool = True
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the program as a person calls it: ``train.py`` or ``package.module``."""
        return self.target if self.is_module else self.target.rpartition("/")[2]

    @property
    def python_args(self) -> tuple[str, ...]:
        """Return what to write after ``python`` to run it by hand."""
        return ("-m", self.target, *self.args) if self.is_module else (self.target, *self.args)


def _option(default: Any, shown: str, about: str) -> Any:
    """Return a field that is a flag: its default, and what ``--help`` says of value and meaning."""
    return field(default=default, metadata={"shown": shown, "help": about})


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The flags of the launcher.

    Raises:
        UsageError: a value out of its range, or values that do not go together.
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
    fork_server: int | None = _option(
        None,
        "FD",
        "fork from the server at this socket, which has imported TensorFlow (tfdist.tune)",
    )
    keep_fds: str | None = _option(
        None, "FD,FD", "descriptors that the tasks inherit (what tfdist.spawn gives)"
    )
    dry_run: bool = _option(False, "", "print each task's command and TF_CONFIG, start nothing")
    program: Program = Program()

    def __post_init__(self) -> None:
        _check_name("strategy", self.strategy, STRATEGIES)
        _check_name("start", self.start, STARTS)
        if self.on is not None:
            _check_name("on", self.on, PLACES)
        _check_numbers(self)
        if self.stages is not None and self.strategy == "auto":
            object.__setattr__(self, "strategy", "pipeline")
        if self.stages is not None and self.workers == 1:
            object.__setattr__(self, "workers", self.stages)  # a task for each
        if self.run_dir is not None and not self.run_dir.strip():
            fix = "give one, or leave --run_dir out"
            _refuse("run_dir", "''", "the path of a directory", fix, code="empty")
        if self.ports is not None:
            parse_ports(self.ports, where="--ports")
        if self.keep_fds and not all(n.isascii() and n.isdigit() for n in self.keep_fds.split(",")):
            fix = "leave --keep_fds out; tfdist.spawn gives it"
            _refuse("keep_fds", repr(self.keep_fds), "numbers of descriptors, 5,6", fix)
        _check_together(self)

    @property
    def where(self) -> str:
        """Return how the agents of other hosts are started."""
        return self.on or ("ssh" if self.hosts is not None else "local")

    @property
    def port_range(self) -> range | None:
        """Return the ports that the job may have, None for any."""
        return None if self.ports is None else parse_ports(self.ports, where="--ports")

    @property
    def kept_fds(self) -> tuple[int, ...]:
        """Return the descriptors that the tasks inherit."""
        return tuple(int(number) for number in self.keep_fds.split(",")) if self.keep_fds else ()

    @property
    def num_ps(self) -> int:
        """Return how many ps a ps job has: one unless more were asked for."""
        return self.ps or 1


def _check_name(flag: str, value: str, choices: Sequence[str]) -> None:
    is_in_capitals = value.lower() in choices
    fix = f"use --{flag} {value.lower()}" if is_in_capitals else "use one of these"
    require_one_of(f"--{flag}", value, choices, fix=fix)


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
"""The least and the most of each number."""


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
    on = options.where
    has_agents = on != "local" or hosts is not None
    for flag, is_of_use in (("rsh", on in ("ssh", "ray")), ("env", has_agents)):
        if getattr(options, flag) is not None and not is_of_use:
            fix = f"leave --{flag} out, or give --hosts"
            received = f"{getattr(options, flag)} with --on {on}"
            _refuse(flag, received, f"no --{flag}", fix, code="no-hosts")
    if options.keep_fds is not None and options.where != "local":
        fix = "leave --hosts and --on out; tfdist.spawn runs on one machine"
        _refuse("keep_fds", options.where, "a job on this machine", fix, code="exclusive")
    isolate, server = {"--isolate": options.isolate}, {"--fork_server": options.fork_server}
    mutually_exclusive({"--keep_fds": options.keep_fds, **server})
    mutually_exclusive({**server, **isolate})
    mutually_exclusive({**server, "--start exec": options.start == "exec"})
    fix = "leave one of them out; live.json in the run directory says the same"
    mutually_exclusive({"--metrics_port": options.metrics_port, **isolate}, fix=fix)


def _refuse(
    flag: str, received: object, expected: str, fix: str, *, code: str = "out-of-range"
) -> NoReturn:
    raise UsageError(f"--{flag}", received=received, expected=expected, fix=fix, code=code)


def seconds(text: str) -> float:
    """Return the number of seconds that the text of a flag is; ValueError if it is none.

    The parser finds the words for its errors by this name.
    """
    return float(text)


def switch(text: str) -> bool:
    """Return the value of ``--flag=true`` or ``--flag``; ValueError if it is none."""
    if text.lower() not in _SWITCH:
        raise ValueError(text)
    return _SWITCH[text.lower()]


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    read: Callable[[str], object] | None
    """What makes a value of its text; None for a flag without a value."""
    shown: str
    help: str


_READERS: dict[str, Callable[[str], object] | None]
_READERS = {"str": str, "int": int, "float": seconds, "bool": None}
FLAGS = (
    *(
        _Flag(one.name, _READERS[str(one.type).split()[0]], **one.metadata)
        for one in fields(LaunchOptions)
        if one.metadata
    ),
    _Flag("help", None, "", "this text"),
)
_TAKES_VALUE = {flag.name: flag.read is not None for flag in FLAGS}
_SWITCH = {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse(argv: Sequence[str]) -> LaunchOptions | None:
    """Return what `argv` asks for, or None when it asks for the help text.

    Raises:
        UsageError: an unknown flag, or a value that cannot be.
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


class _Parser(Parser):
    def unknown(self, word: str) -> UsageError:
        """Return the error for a word before the program that is no flag of the launcher."""
        head = word.partition("=")[0]
        name = head.lstrip("-").replace("-", "_")
        meant = (
            OF_OTHERS.get(name) or near(name, _TAKES_VALUE).removeprefix(" (did you mean '")[:-3]
        )
        fix = f"correct the flag (did you mean --{meant}?)"
        if not meant:
            fix = "put the program's own flags after the program, or those of tfdist.train after --"
        expected = "a flag of the launcher (--help lists them)"
        return UsageError(
            "command line", received=head, expected=expected, fix=fix, code="unknown-flag"
        )


def _parser() -> Parser:
    parser = _Parser(prog="the launcher", add_help=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        value: dict[str, Any] = {"type": switch, "nargs": "?", "const": True}
        if flag.read is not None:
            value = {"type": flag.read}
        if flag.name == "env":
            value["action"] = "append"
        parser.add_argument(f"--{flag.name}", metavar=flag.shown, **value)
    return parser


def split(argv: Sequence[str], *, takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the flags before the program as ``--name=value`` each, and the program as it is.

    `takes_value` has the names of flags, which may be written with dashes; others are left as they
    are.
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


def help_text() -> str:
    """Return what ``--help`` prints."""
    lines = [
        "usage: python -m tfdist.launch [flags] [script.py | -m module] [the program's own flags]",
        "",
        "Starts the processes of a job on this machine, each with its part in TF_CONFIG,",
        "and ends them all when it is done or when one of them fails.",
        "",
    ]
    for flag in FLAGS:
        lines.append(f"  --{flag.name} {flag.shown}".rstrip())
        lines.append(f"        {flag.help}")
    return "\n".join(
        [
            *lines,
            "",
            "What follows the program belongs to the program. Without a program the job is",
            f"{DEFAULT_MODULE}, which gets everything from the first --config flag, or after --.",
            "",
            "  python -m tfdist.launch --strategy multiworker --workers 2 train.py --lr 0.1",
            "  python -m tfdist.launch --strategy ps --workers 4 --ps 1 --config.seed=1",
        ]
    )


def begins_program(token: str) -> bool:
    """Return whether all from `token` on is the program's: it is no flag of the launcher."""
    name = token.removeprefix("--")
    return token in ("-m", "--") or name == "config" or name.startswith(("config.", "config="))


def _program(rest: list[str]) -> Program:
    if rest and rest[0] == "--":
        rest = rest[1:]
        if rest and rest[0].startswith("-") and rest[0] != "-m":
            return Program(args=tuple(rest))
    if not rest or rest[0].startswith("--"):
        return Program(args=tuple(rest))
    if not rest[0].strip():
        fix = "name the script, or leave it out to run tfdist.train"
        _refuse_program(repr(rest[0]), "a Python script", fix, code="empty")
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
_ADDS_MODULES = re.compile(rb"__path__|declare_namespace|sys\.modules|meta_path")


def check_program(program: Program, *, search: Sequence[str]) -> None:
    """Raise `UsageError`, with the near name, unless the program is there; import nothing.

    `search` is where modules are looked for, as `sys.path` is.
    """
    if program.is_module:
        _check_module(program.target, search=search)
        if program.target == DEFAULT_MODULE:
            _check_configuration(program)
    else:
        _check_script(program.target)


def imports_tensorflow(program: Program, *, search: Sequence[str]) -> bool:
    """Return whether a program's own file imports tensorflow, keras or tfdist.

    One that names a variable which these read at their import may set it, and has to do so before:
    of such a program it returns False.
    """
    path = file_of_program(program, search=search)
    try:
        nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return False  # the task says it
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
    """Return the file of a program that is there, of a package its ``__main__``; "" if none."""
    if not program.is_module:
        return program.target
    *_, spec = _specs(program.target, search=search)
    if spec.submodule_search_locations is not None:
        *_, spec = _specs(f"{program.target}.__main__", search=search)
    return spec.origin if spec.has_location and spec.origin else ""


def _specs(name: str, *, search: Sequence[str]) -> list[ModuleSpec]:
    """Return the specs of the packages on the way to a module, and its own if it is there.

    All finders that an import would ask are asked, since an editable install may bring one of its
    own, and nothing is imported. So what a package makes of itself at its import stays unseen.
    """
    specs: list[ModuleSpec] = []
    places, parts = search, name.split(".")
    for depth, part in enumerate(parts, 1):
        for finder in sys.meta_path:
            if finder is BuiltinImporter or not hasattr(finder, "find_spec"):
                continue  # built-in modules cannot be run
            if finder is PathFinder:  # for a name with dots it would look at the package itself
                spec = finder.find_spec(part, places)
            else:
                spec = finder.find_spec(".".join(parts[:depth]), places if specs else None)
            if spec is not None:
                break
        else:
            break
        specs.append(spec)
        places = list(spec.submodule_search_locations or ())  # nothing is inside a module
    return specs


def _check_configuration(program: Program) -> None:
    """Raise `UsageError` for what each task of `tfdist.train` would refuse by itself."""
    from tfdist.configs import command_line  # not for other programs: it takes a moment

    command_line.parse(program.args)


def _refuse_program(received: str, expected: str, fix: str, *, code: str) -> NoReturn:
    raise UsageError("program", received=received, expected=expected, fix=fix, code=code)


def _check_script(target: str) -> None:
    path = Path(target)
    with reading_file("program", target, expected="a Python script"):
        is_directory, is_file = path.is_dir(), path.is_file()
    # What is in /dev or /proc is something else in each process.
    if is_directory or path.parts[:2] in (("/", "dev"), ("/", "proc")):
        fix = "write the script to a file, or use -m for a package"
        _refuse_program(f"{target}, which is no file", "a Python script", fix, code="no-file")
    if not is_file:
        meant = near(path.name, [entry.name for entry in path.parent.glob("*")])
        received = f"{target}, which does not exist{meant}"
        _refuse_program(received, "a Python script", "correct the path", code="missing-file")
    if not os.access(path, os.R_OK):
        fix = f"make it readable: chmod u+r {target}"
        _refuse_program(target, "a readable script", fix, code="not-readable")


def _check_module(name: str, *, search: Sequence[str]) -> None:
    parts, specs = name.split("."), _specs(name, search=search)
    if specs and _adds_modules(specs[-1]):
        return
    if len(specs) < len(parts):
        places = specs[-1].submodule_search_locations or () if specs else search
        entries = [entry for place in places for entry in Path(place or ".").glob("*")]
        names = {entry.stem for entry in entries if entry.suffix in ("", ".py")}
        received = f"-m {name}, which does not exist{near(parts[len(specs)], names)}"
        is_script = name.endswith(".py")
        fix = "leave -m out to run a script by its path" if is_script else "correct the name"
        _refuse_program(received, "a Python module", fix, code="missing-module")
    if specs[-1].submodule_search_locations is None:
        return
    if len(_specs(f"{name}.__main__", search=search)) == len(parts):
        fix = f"name a module in it, or add {name.replace('.', '/')}/__main__.py"
        received = f"-m {name}, a package without __main__"
        _refuse_program(received, "a module to run", fix, code="no-main")


def _adds_modules(package: ModuleSpec) -> bool:
    """Return whether a package says that it adds modules to itself when it is imported."""
    if package.submodule_search_locations is None or not package.has_location:
        return False
    try:
        return bool(_ADDS_MODULES.search(Path(package.origin or "").read_bytes()))
    except OSError:
        return False
