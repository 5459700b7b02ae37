"""Command line of `tfdist.submit`: its own flags, those of the launcher, and a program."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.argument_parser import Parser
from tfdist.errors import UsageError, require_one_of
from tfdist.launch import options as launcher
from tfdist.launch.options import LaunchOptions, begins_program

SCHEDULERS = ("slurm", "kubernetes")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

SLURM_WORD = r"[A-Za-z0-9][A-Za-z0-9_.,:=@+-]*", "a name as Slurm has it"
_OBJECT = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "the name of an object of Kubernetes"
_JOB = r"[A-Za-z0-9][A-Za-z0-9_.-]*", "letters, digits, '.', '_' and '-'"
_COUNT = r"0*[1-9][0-9]{0,4}", "an integer from 1 to 99999"
_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9_./-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_IN_ONE_LINE = r"[^\0\n]+", "a value in one line"
_MEMORY = r"[1-9][0-9]{0,8}[MGT][iB]?", "a number and M, G or T"
_TIME = (
    r"(?=.*[1-9])([0-9]{1,6}[smhd]|([0-9]{1,4}-)?[0-9]{1,4}:[0-5]?[0-9]:[0-5]?[0-9])",
    "30m, 4h, 2d, HH:MM:SS or D-HH:MM:SS",
)
_VOLUME = (
    r"(/[^\0\n:=]*|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)=/[^\0\n:]+(:ro)?",
    "CLAIM=/PATH or /DIRECTORY=/PATH, and :ro to read only",
)
_TAINT = (
    rf"{_KEY}(=({_VALUE})?)?(:({'|'.join(EFFECTS)}))?",
    f"KEY, KEY:EFFECT or KEY=VALUE:EFFECT, EFFECT being {' or '.join(EFFECTS)}",
)
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9_./:@-]*", "the image of the pods, with tfdist in it"
_USER = r"[0-9]{1,10}(:[0-9]{1,10})?", "the number of a user, or of a user and a group"
LABEL = rf"{_KEY}=({_VALUE})?"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with a value: `form` is the pattern and what is expected of it in words."""

    name: str
    shown: str
    help: str
    form: tuple[str, str] = _IN_ONE_LINE
    example: str = ""
    only: str = ""
    """For which scheduler; empty for both."""
    repeats: bool = False


FLAGS = (
    Flag("to", "slurm|kubernetes", "which scheduler"),
    Flag("kind", "job|jobset|tfjob", "what to make (job)", only="kubernetes"),
    Flag("status", "NAME", "show the state of a job, and submit nothing", _JOB, "mnist"),
    Flag("logs", "NAME", "show the output of a job, and submit nothing", _JOB, "mnist"),
    Flag("name", "NAME", "of the job (the program's)"),
    Flag("python", "PATH", "the Python that has tfdist (python)"),
    Flag("cpus", "N", "CPUs of each task", _COUNT, "8"),
    Flag("memory", "16G", "memory of each task", _MEMORY, "16G"),
    Flag("gpus", "N", "GPUs of each task that computes (0)", ("[0-9]{1,5}", "an integer"), "1"),
    Flag("time", "4h", "limit: under Slurm of each run, else of the job", _TIME, "4h"),
    Flag("env", "NAME=VALUE", "a variable for the tasks", repeats=True),
    Flag(
        "secret",
        "NAME=WHERE",
        "a variable whose value is in a file (Slurm: /path) or a Secret (secret/key)",
        repeats=True,
    ),
    Flag(
        "node_selector",
        "KEY=VALUE|FEATURE",
        "a label of the nodes; under Slurm a feature",
        repeats=True,
    ),
    Flag(
        "image",
        "IMAGE",
        "the container's, with tfdist in it",
        _IMAGE,
        "registry/name:tag",
        only="kubernetes",
    ),
    Flag("namespace", "NS", "where (that of kubectl's context)", _OBJECT, only="kubernetes"),
    Flag(
        "volume",
        "CLAIM=/PATH[:ro]",
        "a claim, or with a leading / a directory of the node, and where it is mounted",
        _VOLUME,
        "data=/data, or --volume data=/data:ro",
        only="kubernetes",
        repeats=True,
    ),
    Flag("service_account", "NAME", "the pods' account", _OBJECT, only="kubernetes"),
    Flag(
        "image_pull_secret",
        "NAME",
        "the Secret that opens the image's registry",
        _OBJECT,
        only="kubernetes",
    ),
    Flag(
        "label",
        "KEY=VALUE",
        "a label of all objects and pods, as that of a queue",
        only="kubernetes",
        repeats=True,
    ),
    Flag(
        "toleration",
        "KEY[=VALUE][:EFFECT]",
        "a taint of nodes that the pods put up with, as kubectl taint writes it",
        _TAINT,
        "gpu=yes:NoSchedule",
        only="kubernetes",
        repeats=True,
    ),
    Flag("priority_class", "NAME", "the pods' PriorityClass", _OBJECT, only="kubernetes"),
    Flag(
        "run_as_user",
        "UID[:GID]",
        "whom the tasks run as (the image's user, who must not be root)",
        _USER,
        "1000, or 1000:1000",
        only="kubernetes",
    ),
    Flag("nodes", "N", "on how many nodes", _COUNT, "2", only="slurm"),
    Flag("partition", "NAME", "the partition", SLURM_WORD, only="slurm"),
    Flag("account", "NAME", "whose hours", SLURM_WORD, only="slurm"),
    Flag("qos", "NAME", "the quality of service", SLURM_WORD, only="slurm"),
)
_BY_NAME = {flag.name: flag for flag in FLAGS}
_LAUNCHER = {flag.name: flag for flag in launcher.FLAGS if flag.name != "help"}

# A cluster's tasks come at different times, and a place in it is lost for longer than a moment.
_DEFAULTS = {"startup_timeout_s": "300", "grace_s": "60", "max_restarts": "3"}
_HELP = {
    "devices_per_worker": "devices of each worker (all that it sees)",
    "threads_per_task": "CPU threads of each task (--cpus)",
    "startup_timeout_s": "how long the tasks wait for each other at the start (300)",
    "grace_s": "how long before its end a task is told to save and stop (60)",
    "max_restarts": "how often a job that failed is started again (3)",
    "hang_timeout_s": "how long workers may run on when one has ended, under Slurm (300)",
    "run_dir": "where the job writes (runs/NAME, in the first --volume)",
    "ports": "the ports that tasks may have (any)",
    "dry_run": "print what would be submitted",
}
NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("start", "fork_server", "keep_fds", "isolate", "restart_window_s", "metrics_port"),
        "a flag that a scheduler has a use for",
    ),
    **dict.fromkeys(
        ("hosts", "node_rank", "rendezvous_port", "rendezvous_token_file", "host_timeout_s"),
        "no hosts: the scheduler knows them, and each task finds itself",
    ),
}
"""Flags of the launcher that are refused here, and what is expected in their place."""

_SLURM_ALONE = {"hang_timeout_s": "--time: a pod that is done does not end the others"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command line: the scheduler, our flags, and the launcher's as it has checked them."""

    to: str
    flags: Mapping[str, str | Sequence[str]]
    launch: LaunchOptions

    def one(self, name: str) -> str | None:
        """Return the value of a flag, None where it was not given."""
        value = self.flags.get(name)
        assert value is None or isinstance(value, str)
        return value

    def all(self, name: str) -> tuple[str, ...]:
        """Return every value of a flag that repeats."""
        return tuple(self.flags.get(name, ()))

    def pairs(self, name: str) -> dict[str, str]:
        """Return the names and values of a flag that is given as NAME=VALUE, and repeats."""
        made: dict[str, str] = {}
        for text in self.all(name):
            key, equals, value = text.partition("=")
            if not key or not equals:
                raise wrong(name, repr(key), "a name, = and a value", f"write --{name} NAME=VALUE")
            if key in made:
                raise wrong(name, f"{key} twice", "each name once", "leave one of them out")
            made[key] = value
        return made

    def count(self, name: str) -> int | None:
        """Return the number that a flag gives, None where it was not given."""
        text = self.one(name)
        return None if text is None else int(text)


def parse(argv: Sequence[str]) -> Command | None:
    """Return what a command line asks for, or None when it asks for the help text.

    Raises:
        UsageError: an unknown flag, one without its value, or one that is not for this scheduler.
    """
    words, program = _split(argv)
    if "-h" in words or "--help" in words:
        return None
    values = vars(_parser().parse_args(words))
    own = {name: value for name, value in values.items() if name in _BY_NAME}
    fix = "write --to slurm or --to kubernetes"
    if "to" not in own:
        raise wrong("to", "nothing", "slurm or kubernetes", fix, "no-value")
    to = require_one_of("--to", own["to"], SCHEDULERS, fix=fix)
    for name, value in own.items():
        only = _BY_NAME[name].only
        if only and only != to:
            raise wrong(name, f"it with --to {to}", only, f"leave --{name} out", "exclusive")
        for text in [value] if isinstance(value, str) else value:
            _check(_BY_NAME[name], text)
    theirs = {name: value for name, value in values.items() if name in _LAUNCHER}
    return Command(to=to, flags=own, launch=_launch_options(theirs, program, to))


def help_text() -> str:
    """Return what ``--help`` prints."""
    lines = [
        "usage: python -m tfdist.submit --to slurm|kubernetes [--dry_run] [flags]",
        "           [script.py | -m module] [the program's own flags]",
        "",
        "Gives a job to a scheduler; with --dry_run, prints what it would be given.",
        "A model that was exported: python -m tfdist.submit --to kserve --help",
        "",
    ]
    for flag in FLAGS:
        only = f"{flag.only}: " if flag.only else ""
        again = "; may be repeated" if flag.repeats else ""
        lines += [f"  --{flag.name} {flag.shown}", f"        {only}{flag.help}{again}"]
    lines += ["", "Flags that python -m tfdist.launch has too:", ""]
    for name, theirs in _LAUNCHER.items():
        if name not in NOT_HERE:
            help_ = _HELP.get(name, theirs.help)
            lines += [f"  --{name} {theirs.shown}".rstrip(), f"        {help_}"]
    return "\n".join(lines)


def wrong(flag: str, received: str, expected: str, fix: str, code: str = "bad-value") -> UsageError:
    """Return the error for the value of a flag."""
    return UsageError(f"--{flag}", received=received, expected=expected, fix=fix, code=code)


def _check(flag: Flag, text: str) -> None:
    pattern, expected = flag.form
    fix = f"write --{flag.name} {flag.example or flag.shown}"
    if not text.strip():
        raise wrong(flag.name, "no value", expected, fix, "no-value")
    if not re.fullmatch(pattern, text):
        raise wrong(flag.name, repr(text), expected, fix)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags, as ``--name=value`` each, and the program, which is left as it is."""
    words, rest = list[str](), list(argv)
    while rest and rest[0].startswith("-") and not begins_program(rest[0]):
        head, equals, value = rest.pop(0).partition("=")
        name = head.removeprefix("--").replace("-", "_")
        theirs = _LAUNCHER.get(name)
        takes_value = name in _BY_NAME or (theirs is not None and theirs.read is not None)
        if not equals and takes_value and rest:
            equals, value = "=", rest.pop(0)
        words.append((f"--{name}" if head.startswith("--") else head) + equals + value)
    return words, rest


def _parser() -> Parser:
    parser = Parser(prog="tfdist.submit", add_help=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        action = "append" if flag.repeats else "store"
        parser.add_argument(f"--{flag.name}", action=action, metavar=flag.shown)
    for name in _LAUNCHER:
        parser.add_argument(f"--{name}", nargs="?")
    return parser


def _launch_options(
    values: Mapping[str, str | None], program: Sequence[str], to: str
) -> LaunchOptions:
    """Return the launcher's flags, checked by the launcher, with the defaults of a cluster."""
    refused = NOT_HERE if to == "slurm" else {**NOT_HERE, **_SLURM_ALONE}
    for name, expected in refused.items():
        if name in values:
            raise wrong(name, "it", expected, f"leave --{name} out", "not-here")
    given = {**_DEFAULTS, **values}
    words = [f"--{name}" if text is None else f"--{name}={text}" for name, text in given.items()]
    options = launcher.parse([*words, *program])
    assert options is not None  # --help has been answered
    return options
