"""Options of the launcher, validated when created, and their command line.

The line is the launcher's own flags, then a program with flags of its own. The program's part
must reach it untouched, whatever it looks like, so the line is cut at the program before anything
is read. `argparse` cannot promise that: it looks for its own flags, abbreviated ones too,
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tfdist.argument_parser import integer, number
from tfdist.cluster import STRATEGIES
from tfdist.cluster.ports import parse_ports
from tfdist.errors import UsageError, given_twice, near

StartMethod = Literal["exec", "fork"]

STARTS = ("auto", "exec", "fork")
OF_OTHERS = {
    **dict.fromkeys(("n", "np", "nproc", "nproc_per_node", "num_proc", "num_processes"), "workers"),
    **dict.fromkeys(("num_workers", "num_processes_per_node"), "workers"),
    **dict.fromkeys(
        ("nnodes", "num_machines", "H", "host", "master_addr", "rdzv_endpoint"), "hosts"
    ),
    **dict.fromkeys(("machine_rank", "rank"), "node_rank"),
    **dict.fromkeys(("master_port", "rdzv_port", "main_process_port"), "rendezvous_port"),
}
"""How other launchers call what ours has a flag for."""
DEFAULT_MODULE = "tfdist.train"

_MAX_TASKS = 10_000
_MAX_RESTARTS = 1_000_000
_LEAST_HOST_TIMEOUT_S = 2.0
_LEAST_HANG_TIMEOUT_S = 2.0
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The flags of the launcher.

    Raises:
        UsageError: a value out of its range, or values that do not go together.
    """

    strategy: str = "auto"
    workers: int = 1
    ps: int | None = None
    min_workers: int | None = None
    evaluator: bool = False
    devices_per_worker: int | None = None
    threads_per_task: int | None = None
    startup_timeout_s: float = 60.0
    grace_s: float = 10.0
    max_restarts: int = 0
    restart_window_s: float = 3600.0
    hang_timeout_s: float = 300.0
    hosts: str | None = None
    node_rank: int | None = None
    rendezvous_port: int | None = None
    rendezvous_token_file: str | None = None
    host_timeout_s: float = 5.0
    ports: str | None = None
    run_dir: str | None = None
    split_bytes: int | None = None
    profile_ps: bool = False
    isolate: bool = False
    dry_run: bool = False
    start: str = "auto"
    fork_server: int | None = None
    """Descriptor of a socket to a fork server that is there already."""
    program: Program = Program()

    def __post_init__(self) -> None:
        _check_name("strategy", self.strategy, STRATEGIES)
        _check_name("start", self.start, STARTS)
        for name in ("workers", "ps", "min_workers", "devices_per_worker", "threads_per_task"):
            _check_count(name, getattr(self, name))
        if self.split_bytes is not None and self.split_bytes < 1:
            expected, fix = "a number of bytes from 1", "use --split_bytes 4000000, for example"
            _refuse("split_bytes", str(self.split_bytes), expected, fix)
        _check_seconds("startup_timeout_s", self.startup_timeout_s, above_zero=True)
        _check_seconds("grace_s", self.grace_s, above_zero=False)
        _check_seconds("restart_window_s", self.restart_window_s, above_zero=True)
        _check_seconds("hang_timeout_s", self.hang_timeout_s, above_zero=False)
        if 0 < self.hang_timeout_s < _LEAST_HANG_TIMEOUT_S:
            expected = f"0, or {_LEAST_HANG_TIMEOUT_S:g} or more: tasks speak once a second"
            _refuse("hang_timeout_s", f"{self.hang_timeout_s:g}", expected, "use 300, the default")
        _check_seconds("host_timeout_s", self.host_timeout_s, above_zero=True)
        if self.host_timeout_s < _LEAST_HOST_TIMEOUT_S:
            expected = f"{_LEAST_HOST_TIMEOUT_S:g} or more: hosts show every second that they live"
            _refuse("host_timeout_s", f"{self.host_timeout_s:g}", expected, "use 5, the default")
        if not 0 <= self.max_restarts <= _MAX_RESTARTS:
            expected = f"an integer from 0 to {_MAX_RESTARTS}"
            _refuse("max_restarts", str(self.max_restarts), expected, "use --max_restarts 3")
        if self.run_dir is not None and not self.run_dir.strip():
            _refuse("run_dir", "''", "the path of a directory", "give one, or leave --run_dir out")
        if self.ports is not None:
            parse_ports(self.ports, where="--ports")
        _check_together(self)
        _check_hosts(self)

    @property
    def port_range(self) -> range | None:
        """Return the ports that the job may have, None for any."""
        return None if self.ports is None else parse_ports(self.ports, where="--ports")

    @property
    def num_ps(self) -> int:
        """Return how many ps a ps job has: one unless more were asked for."""
        return self.ps or 1


def _check_together(options: LaunchOptions) -> None:
    strategy, workers, ps = options.strategy, options.workers, options.ps
    if ps is not None and strategy not in ("auto", "ps"):
        fix = "leave --ps out, or use --strategy ps"
        _refuse("ps", f"{ps} with --strategy {strategy}", "no --ps", fix)
    for flag in ("split_bytes", "profile_ps"):
        value = getattr(options, flag)
        if value and strategy != "ps" and ps is None:
            fix = f"leave --{flag} out, or use --strategy ps"
            received = f"{value} in a job without ps"
            _refuse(flag, received, f"no --{flag}", fix, code="LCH001")
    fewest = options.min_workers
    if fewest is not None and strategy != "ps" and ps is None and options.hosts is None:
        fix = "leave --min_workers out, or use --strategy ps or --hosts"
        _refuse("min_workers", f"{fewest} in a job without ps", "no --min_workers", fix)
    if fewest is not None and fewest > workers and options.hosts is None:
        received = f"{fewest} of --workers {workers}"
        _refuse("min_workers", received, f"at most {workers}", f"use --min_workers {workers}")
    if options.fork_server is not None and (options.isolate or options.start == "exec"):
        received = f"a fork server with {'--isolate' if options.isolate else '--start exec'}"
        _refuse("fork_server", received, "one of them", "leave --fork_server out")
    if workers > 1 and strategy in ("single", "mirrored"):
        fix = "use --strategy multiworker, or leave --workers out"
        _refuse("workers", f"{workers} with --strategy {strategy}", "one process, 1", fix)
    devices = options.devices_per_worker
    if strategy == "single" and devices is not None and devices > 1:
        received = f"{devices} with --strategy single"
        _refuse("devices_per_worker", received, "1", "use --strategy mirrored")


def _check_hosts(options: LaunchOptions) -> None:
    if options.node_rank is not None and options.hosts is None:
        fix = "give --hosts too, or leave --node_rank out"
        _refuse("node_rank", f"{options.node_rank} without --hosts", "a list of hosts", fix)
    port = options.rendezvous_port
    if port is not None and not 1 <= port <= 65_535:
        expected, fix = "a port from 1 to 65535", "use --rendezvous_port 2222, for example"
        _refuse("rendezvous_port", str(port), expected, fix)
    if options.hosts is not None and options.strategy in ("single", "mirrored"):
        received = f"a list of hosts with --strategy {options.strategy}"
        fix = "use --strategy multiworker or ps, or leave --hosts out"
        _refuse("hosts", received, "a job of several tasks", fix)


def _check_name(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = "one of " + ", ".join(choices)
        _refuse(flag, repr(value), expected, f"use one of these{near(value.lower(), choices)}")


def _check_count(flag: str, value: int | None) -> None:
    if value is None or 1 <= value <= _MAX_TASKS:
        return
    expected = f"an integer from 1 to {_MAX_TASKS}"
    fix = f"use --{flag} 1 or more" if value < 1 else f"use --{flag} {_MAX_TASKS} or fewer"
    if flag == "ps" and value < 1:
        fix = "use --ps 1 or more, or --strategy multiworker, which has no ps"
    _refuse(flag, str(value), expected, fix)


def _check_seconds(flag: str, value: float, *, above_zero: bool) -> None:
    if (value > 0 or (value == 0 and not above_zero)) and value <= _MAX_SECONDS:
        return
    expected = "a positive number of seconds" + (" or 0" * (not above_zero))
    _refuse(flag, f"{value:g}", expected, f"use --{flag} 60, for example")


def _refuse(flag: str, received: str, expected: str, fix: str, *, code: str = "") -> None:
    raise UsageError(f"--{flag}", received=received, expected=expected, fix=fix, code=code)


Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flag:
    name: str
    read: Callable[[str, str], Value] | None
    """Takes the flag's name and its text; None for a flag without a value."""
    shown: str
    help: str


def _text(flag: str, text: str) -> str:
    return text


def _integer(flag: str, text: str) -> int:
    try:
        return integer(text)
    except ValueError:
        fix = f"write --{flag} 2, for example"
        raise UsageError(f"--{flag}", received=repr(text), expected="an integer", fix=fix) from None


def _seconds(flag: str, text: str) -> float:
    try:
        return number(text)
    except ValueError:
        expected, fix = "a number of seconds", f"write --{flag} 60, for example"
        raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix) from None


FLAGS = (
    _Flag(
        name="strategy",
        read=_text,
        shown="auto|single|mirrored|multiworker|ps",
        help="how the job is spread; auto decides by the next three flags",
    ),
    _Flag(name="workers", read=_integer, shown="N", help="processes that compute (1)"),
    _Flag(name="ps", read=_integer, shown="M", help="parameter servers of a ps job (1)"),
    _Flag(
        name="min_workers",
        read=_integer,
        shown="N",
        help="start a ps job with so many workers when the others do not come (all of them)",
    ),
    _Flag(
        name="evaluator",
        read=None,
        shown="",
        help="one more task, outside the training, that evaluates each checkpoint",
    ),
    _Flag(
        name="devices_per_worker",
        read=_integer,
        shown="K",
        help="devices of each worker (the GPUs divided among the workers, or one CPU)",
    ),
    _Flag(
        name="threads_per_task",
        read=_integer,
        shown="T",
        help="CPU threads of each task (the CPUs divided among the tasks)",
    ),
    _Flag(
        name="startup_timeout_s",
        read=_seconds,
        shown="S",
        help="how long the tasks wait for each other at the start (60)",
    ),
    _Flag(
        name="grace_s",
        read=_seconds,
        shown="S",
        help="how long a task may take to end before it is killed (10)",
    ),
    _Flag(
        name="max_restarts",
        read=_integer,
        shown="R",
        help="how often a job that failed is started again (0)",
    ),
    _Flag(
        name="restart_window_s",
        read=_seconds,
        shown="S",
        help="restarts longer ago than this do not count (3600)",
    ),
    _Flag(
        name="hang_timeout_s",
        read=_seconds,
        shown="S",
        help="how long a task may hang before it has failed; 0: for ever (300)",
    ),
    _Flag(
        name="run_dir",
        read=_text,
        shown="D",
        help="where the job writes (runs/<time>-<random>)",
    ),
    _Flag(
        name="hosts",
        read=_text,
        shown="a:2,b:2",
        help="the hosts of the job and how many tasks each has; start the same line on all of them",
    ),
    _Flag(
        name="node_rank",
        read=_integer,
        shown="R",
        help="which of --hosts this one is, from 0 on (found by its name or address)",
    ),
    _Flag(
        name="rendezvous_port",
        read=_integer,
        shown="P",
        help="where the launcher of host 0 listens for the others (2222)",
    ),
    _Flag(
        name="rendezvous_token_file",
        read=_text,
        shown="F",
        help="the secret that the hosts share (TFDIST_RENDEZVOUS_TOKEN in the environment)",
    ),
    _Flag(
        name="ports",
        read=_text,
        shown="20000-20100",
        help="the ports that the job may have, on each host (TFDIST_PORTS; any)",
    ),
    _Flag(
        name="host_timeout_s",
        read=_seconds,
        shown="S",
        help="after how long without a word a host counts as gone (5)",
    ),
    _Flag(
        name="start",
        read=_text,
        shown="auto|exec|fork",
        help="a new Python for each task, or TensorFlow imported once and forked",
    ),
    _Flag(
        name="split_bytes",
        read=_integer,
        shown="N",
        help="divide trainable variables of more bytes over the ps of a ps job (none)",
    ),
    _Flag(
        name="profile_ps",
        read=None,
        shown="",
        help="measure what the steps of a ps job cost, and say it at the end",
    ),
    _Flag(
        name="isolate",
        read=None,
        shown="",
        help="run the job in a network of its own, with nothing but loopback in it",
    ),
    _Flag(
        name="fork_server",
        read=_integer,
        shown="FD",
        help="fork from the server at this socket, which has imported TensorFlow (tfdist.tune)",
    ),
    _Flag(
        name="dry_run",
        read=None,
        shown="",
        help="print each task's command and TF_CONFIG, start nothing",
    ),
    _Flag(name="help", read=None, shown="", help="this text"),
)

_BY_NAME = {flag.name: flag for flag in FLAGS}
_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse(argv: Sequence[str]) -> LaunchOptions | None:
    """Return what `argv` asks for, or None when it asks for the help text.

    Raises:
        UsageError: an unknown flag, or a value that cannot be.
    """
    values: dict[str, Value] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and not _begins_program(rest[0]):
        flag, text, rest = _next_flag(rest)
        if flag.name == "help":
            return None
        if flag.name in values:
            raise given_twice(f"--{flag.name}")
        values[flag.name] = flag.read(flag.name, text) if flag.read else _switch(flag.name, text)
    if "hosts" in values and "workers" in values:
        raise UsageError(
            "--workers",
            received=f"{values['workers']} with --hosts",
            expected="the numbers of tasks in the list of hosts alone",
            fix="leave --workers out, and write --hosts a:2,b:2 for two tasks on each",
        )
    return LaunchOptions(**values, program=_program(rest))  # type: ignore[arg-type]


def help_text() -> str:
    """Return what ``--help`` prints."""
    lines = [
        "usage: python -m tfdist.launch [flags] [script.py | -m module] [the program's own flags]",
        "",
        "Starts the processes of a job on this machine, each told its part in TF_CONFIG,",
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


def _begins_program(token: str) -> bool:
    """Whether `token` is no flag of the launcher's, and all from it on is to be passed on."""
    name = token.removeprefix("--")
    return token in ("-m", "--") or name == "config" or name.startswith(("config.", "config="))


def _next_flag(rest: list[str]) -> tuple[_Flag, str, list[str]]:
    """Return the first flag of `rest`, its text, and what follows."""
    head, equals, text = rest[0].partition("=")
    name = "help" if head == "-h" else head.removeprefix("--").replace("-", "_")
    flag = _BY_NAME.get(name)
    if flag is None or not (head.startswith("--") or head == "-h"):
        raise _unknown(head)
    if equals or flag.read is None:
        return flag, text, rest[1:]
    if len(rest) < 2:
        fix = f"write --{name} {flag.shown}"
        raise UsageError(f"--{name}", received="no value", expected="a value", fix=fix)
    return flag, rest[1], rest[2:]


def _unknown(head: str) -> UsageError:
    name = head.lstrip("-").replace("-", "_")
    meant = OF_OTHERS.get(name) or near(name, _BY_NAME).removeprefix(" (did you mean '")[:-3]
    fix = f"correct the flag (did you mean --{meant}?)"
    if not meant:
        fix = "put the program's own flags after the program, or those of tfdist.train after --"
    expected = "a flag of the launcher (--help lists them)"
    return UsageError("command line", received=head, expected=expected, fix=fix)


def _switch(flag: str, text: str) -> bool:
    """Read ``--flag`` and ``--flag=true``; a switch never takes the next word."""
    if text.lower() in _TRUE or not text:
        return _TRUE.get(text.lower(), True)
    raise UsageError(
        f"--{flag}", received=repr(text), expected="true or false", fix=f"write --{flag} alone"
    )


def _program(rest: list[str]) -> Program:
    if rest and rest[0] == "--":
        rest = rest[1:]
        if rest and rest[0].startswith("-") and rest[0] != "-m":
            return Program(args=tuple(rest))
    if not rest or rest[0].startswith("--"):
        return Program(args=tuple(rest))
    if not rest[0].strip():
        fix = "name the script, or leave it out to run tfdist.train"
        raise UsageError("program", received=repr(rest[0]), expected="a Python script", fix=fix)
    if rest[0] != "-m":
        return Program(target=rest[0], is_module=False, args=tuple(rest[1:]))
    if len(rest) < 2 or not rest[1] or rest[1].startswith("-"):
        fix = "write -m package.module"
        raise UsageError("-m", received="no module", expected="a module's name", fix=fix)
    return Program(target=rest[1], args=tuple(rest[2:]))
