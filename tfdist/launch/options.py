"""Options and command line of the launcher, and the program that the tasks run.

A command line holds the launcher's flags, then the program, then the program's own flags. The
program must receive its flags unchanged. So absl reads only the words before the program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal, NoReturn

from tfdist.cluster.ports import parse_ports
from tfdist.errors import UsageError, mutually_exclusive
from tfdist.kinds import AUTO, KINDS
from tfdist.options import (
    LaunchFlags,
    asks_for_help,
    check,
    flags_of,
    read,
    shown,
    table,
    underscored,
)

StartMethod = Literal["exec", "fork"]

DEFAULT_MODULE = "tfdist.train"
_OTHER_JOBS = ("strategy", "stages", "elastic", "evaluator")
_OTHER_PLACES = ("hosts", "on", "run_dir", "resume")
MOST_MEMBERS = 32  # the launcher makes a pair of sockets for each two members


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


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(LaunchFlags):
    """Flags of the launcher and the program, validated when created.

    Raises:
        UsageError: A value is out of range, or two values exclude each other.
    """

    program: Program = Program()

    def __post_init__(self) -> None:
        if self.probe:
            _require_free_choice(self)
        for value, strategy in ((self.stages, "pipeline"), (self.ps, "ps")):
            if value is not None and self.strategy == AUTO.name:
                object.__setattr__(self, "strategy", strategy)
        if self.elastic or self.kind.is_elastic:
            _require_elastic(self)
            object.__setattr__(self, "strategy", self.kind.elastic_form)
        if self.stages is not None and self.workers == 1:
            object.__setattr__(self, "workers", self.stages)  # one task per stage
        check(self, "--{0.name}", code="bad-value")
        if self.ports is not None:
            parse_ports(self.ports, where="--ports")
        _check_strategy(self)
        _check_together(self)

    @property
    def where(self) -> str:
        """Return the method to start agents: `on`, or else ssh if `hosts` is set, or else local."""
        return self.on or ("ssh" if self.hosts is not None else "local")


def _require_free_choice(options: LaunchOptions) -> None:
    """Refuse the options that a probe sets, and the options of another kind of job."""
    for name in (*_OTHER_JOBS, *_OTHER_PLACES, "dry_run", "isolate"):
        if getattr(options, name) not in (None, False, AUTO.name):
            problem = "--probe runs one job of each strategy on this machine"
            refuse(name, problem, f"leave --{name} or --probe out")


def _require_elastic(options: LaunchOptions) -> None:
    if not options.kind.elastic_form:
        fix = "leave --elastic out, or use --strategy multiworker"
        refuse("elastic", f"a {options.strategy} job is not elastic", fix)
    if options.workers > MOST_MEMBERS:
        refuse("workers", f"an elastic job has at most {MOST_MEMBERS}", "use fewer workers")
    if options.evaluator:
        refuse("elastic", "an elastic job has no evaluator", "pass validation_data to fit")
    if options.on in ("ray", "slurm"):  # they would send the key of its connections in clear
        refuse(
            "on", f"an elastic job does not run over {options.on}", "use --hosts, or leave it out"
        )


def _check_strategy(options: LaunchOptions) -> None:
    """Refuse options that the strategy does not use."""
    kind, workers, hosts = options.kind, options.workers, options.hosts
    of_no_part = [name for name, one in KINDS.items() if not one.divides_variables]
    possible = of_no_part if kind is AUTO else [kind.name]
    for name, rule in table(LaunchFlags).items():
        is_used = not rule.strategies or not set(rule.strategies).isdisjoint(possible)
        if getattr(options, name) not in (None, False) and not is_used:
            fix = f"leave --{name} out, or use --strategy {rule.strategies[0]}"
            refuse(name, f"strategy {kind} does not use it", fix)
    if kind.is_one_process and (workers > 1 or hosts is not None):
        name = "workers" if workers > 1 else "hosts"
        fix = f"use --strategy multiworker, or leave --{name} out"
        refuse(name, f"--strategy {kind} is a job of one process", fix)


def _check_together(options: LaunchOptions) -> None:
    workers, stages, fewest = options.workers, options.stages, options.min_workers
    if options.ps == 0:
        refuse("ps", "a ps job needs a parameter server", "use --ps 1", code="bad-value")
    if 0 < options.hang_timeout_s < 2:
        seconds = f"{options.hang_timeout_s:g}"
        problem = f"{seconds} is less than 2, and tasks send a heartbeat each second"
        refuse("hang_timeout_s", problem, "use --hang_timeout_s 300", code="bad-value")
    if stages is not None and workers % stages:
        fix = "make --workers a multiple of --stages, or leave --workers out"
        refuse("stages", f"{workers} workers cannot form pipelines of {stages} stages", fix)
    are_counted = options.where == "local" or workers > 1  # hosts give the number later
    if fewest is not None and are_counted and fewest > workers:
        problem = f"{fewest} is more than the {workers} workers of the job"
        refuse("min_workers", problem, f"use --min_workers {workers}", code="bad-value")
    if "=" in (options.env or ""):  # a name with a value would match no variable
        fix = "export NAME=VALUE, and pass --env NAME"
        refuse("env", "it has a value (not shown), but takes only names", fix, code="bad-value")
    if options.on == "ray" and options.hosts is not None:
        refuse("hosts", "Ray selects the hosts", "leave --hosts out, or use --on ssh")
    if options.on == "ssh" and options.hosts is None:
        refuse("on", "ssh needs a list of hosts", "give --hosts a:2,b:2", code="no-value")
    fix = "leave one of them out. live.json in the run directory has the same figures"
    given = {"--metrics_port": options.metrics_port, "--isolate": options.isolate}
    mutually_exclusive(given, fix=fix)
    mutually_exclusive({"--resume": options.resume, "--run_dir": options.run_dir})
    on_hosts = options.where != "local" or options.hosts is not None
    mutually_exclusive({"--dry_run": options.dry_run, "--on and --hosts": on_hosts})


def refuse(name: str, problem: str, fix: str, *, code: str = "exclusive") -> NoReturn:
    """Raise UsageError for a flag."""
    raise UsageError(f"--{name}", problem, fix=fix, code=code)


def parse(argv: Sequence[str]) -> LaunchOptions | None:
    """Return the options in `argv`, or `None` if `argv` contains ``--help``.

    Raises:
        UsageError: A flag is unknown, or a value is invalid.
    """
    made = flags_of(LaunchFlags)
    takes_value = {name: not made[name].boolean for name in made}
    words, rest = split(argv, takes_value={**takes_value, "flagfile": True})
    if asks_for_help(words):
        return None
    values = read(made, words)
    if "env" in values:
        values["env"] = ",".join(values["env"])
    if "hosts" in values and "workers" in values:
        fix = "leave --workers out, and write --hosts a:2,b:2 for two tasks on each"
        refuse("workers", "--hosts has the number of tasks", fix)
    return LaunchOptions(**values, program=_program(rest))


def split(argv: Sequence[str], *, takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the launcher's flags, and the remaining words (the program and its flags).

    A flag whose `takes_value` is True becomes ``--name=value``. Dashes in its name become
    underscores. Unknown flags stay.
    """
    words, rest = list[str](), list(argv)
    booleans = {name for name, takes in takes_value.items() if not takes}
    while rest and rest[0].startswith("-") and not begins_program(rest[0]):
        word = underscored(rest.pop(0), booleans)
        if takes_value.get(word[2:]) and rest:
            word += f"={rest.pop(0)}"
        words.append(word)
    return words, rest


_USAGE = f"""usage: python -m tfdist.launch [flags] [script.py | -m module] [program's own flags]

Starts the processes of a job, each with its TF_CONFIG. Restarts failed tasks if
the flags allow it, and stops all processes when the job ends.

The words after the program are its arguments. The default program is
{DEFAULT_MODULE}. Its arguments begin with the first --config flag, or after --.

  python -m tfdist.launch --strategy multiworker --workers 2 train.py --lr 0.1
  python -m tfdist.launch --strategy ps --workers 4 --ps 1 --config.seed=1"""


def help_text(*, full: bool) -> str:
    """Return the text that ``--help`` prints, or ``--helpfull``."""
    return shown(_USAGE, flags_of(LaunchFlags), full=full)


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
        raise UsageError("-m", "no module", fix="write -m package.module", code="no-value")
    return Program(target=rest[1], args=tuple(rest[2:]))


_IMPORTS = re.compile(
    rb"^[ \t]*(?:import[ \t][^#\n]*?|from[ \t]+)\b(?:tensorflow|keras|tfdist)\b", re.MULTILINE
)
_READ_AT_IMPORT = re.compile(rb"\b(?:TF|TF2|KERAS|XLA|OMP|CUDA)_(?!CONFIG\b)[A-Z0-9_]+\b")


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
            f"{program.target!r} is not a file",
            fix="correct the path, or use -m for a module",
            code="no-file",
        )


def imports_tensorflow(program: Program, *, search: Sequence[str]) -> bool:
    """Return whether a program's own file imports tensorflow, keras or tfdist.

    Return False if the file contains the name of a variable that these packages read at import.
    The program may set that variable, which must happen before the import.
    """
    try:
        source = Path(file_of_program(program, search=search)).read_bytes()
    except OSError:
        return False  # the task reports the error
    return bool(_IMPORTS.search(source)) and not _READ_AT_IMPORT.search(source)


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
