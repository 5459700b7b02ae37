"""The command line of the launcher: its own flags, then a program with flags of its own.

The program's part must reach it untouched, whatever it looks like, so the line is cut at the
program before anything is read. `argparse` cannot promise that: it looks for its own flags,
abbreviated ones too, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfdist.argument_parser import integer, number
from tfdist.errors import UsageError, given_twice, near
from tfdist.launch.options import DEFAULT_MODULE, OF_OTHERS, LaunchOptions, Program

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
        help="how long a task may stand still before it has failed; 0: for ever (300)",
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
    """Returns what `argv` asks for, or None when it asks for the help text.

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
    """Returns what ``--help`` prints."""
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
    """Returns the first flag of `rest`, its text, and what follows."""
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
    """Reads ``--flag`` and ``--flag=true``; a switch never takes the next word."""
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
