"""The flags that a job for a scheduler has besides those of the launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.errors import UsageError, given_twice, near

SCHEDULERS = ("slurm", "kubernetes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A flag with a value: `repeats` if it may be given again, `only` for which scheduler."""

    name: str
    shown: str
    help: str
    repeats: bool = False
    only: str = ""


FLAGS = (
    Flag(name="to", shown="slurm|kubernetes", help="which scheduler"),
    Flag(name="kind", shown="job|jobset|tfjob", only="kubernetes", help="what to make (job)"),
    Flag(name="status", shown="NAME", help="show the state of a job, and submit nothing"),
    Flag(name="logs", shown="NAME", help="show the output of a job, and submit nothing"),
    Flag(name="name", shown="NAME", help="of the job (the program's)"),
    Flag(name="python", shown="PATH", help="the Python that has tfdist (python)"),
    Flag(name="cpus", shown="N", help="CPUs of each task"),
    Flag(name="memory", shown="16G", help="memory of each task"),
    Flag(name="gpus", shown="N", help="GPUs of each task that computes (0)"),
    Flag(name="time", shown="4h", help="limit: under Slurm of each run, else of the job"),
    Flag(name="env", shown="NAME=VALUE", repeats=True, help="a variable for the tasks"),
    Flag(
        name="secret",
        shown="NAME=WHERE",
        repeats=True,
        help="a variable whose value is in a file (Slurm: /path) or a Secret (secret/key)",
    ),
    Flag(
        name="node_selector",
        shown="KEY=VALUE|FEATURE",
        repeats=True,
        help="a label of the nodes; under Slurm a feature",
    ),
    Flag(name="image", shown="IMAGE", only="kubernetes", help="the container's, with tfdist in it"),
    Flag(name="namespace", shown="NS", only="kubernetes", help="where (that of kubectl's context)"),
    Flag(
        name="volume",
        shown="CLAIM=/PATH[:ro]",
        repeats=True,
        only="kubernetes",
        help="a claim, or with a leading / a directory of the node, and where it is mounted",
    ),
    Flag(name="service_account", shown="NAME", only="kubernetes", help="the pods' account"),
    Flag(
        name="image_pull_secret",
        shown="NAME",
        only="kubernetes",
        help="the Secret that opens the image's registry",
    ),
    Flag(
        name="label",
        shown="KEY=VALUE",
        repeats=True,
        only="kubernetes",
        help="a label of all objects and pods, as that of a queue",
    ),
    Flag(
        name="toleration",
        shown="KEY[=VALUE][:EFFECT]",
        repeats=True,
        only="kubernetes",
        help="a taint of nodes that the pods put up with, as kubectl taint writes it",
    ),
    Flag(name="priority_class", shown="NAME", only="kubernetes", help="the pods' PriorityClass"),
    Flag(
        name="run_as_user",
        shown="UID[:GID]",
        only="kubernetes",
        help="whom the tasks run as (the image's user, who must not be root)",
    ),
    Flag(name="nodes", shown="N", only="slurm", help="on how many nodes"),
    Flag(name="partition", shown="NAME", only="slurm", help="the partition"),
    Flag(name="account", shown="NAME", only="slurm", help="whose hours"),
    Flag(name="qos", shown="NAME", only="slurm", help="the quality of service"),
)
_BY_NAME = {flag.name: flag for flag in FLAGS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A command line taken apart."""

    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    launcher: Mapping[str, str | None] = field(default_factory=dict)
    """Flags of the launcher; None for one without a value."""
    program: tuple[str, ...] = ()
    help: bool = False

    def one(self, name: str) -> str | None:
        """Return the last value of a flag, None where it was not given."""
        values = self.own.get(name, ())
        return values[-1] if values else None

    def all(self, name: str) -> tuple[str, ...]:
        """Return every value of a flag that repeats."""
        return self.own.get(name, ())

    def pairs(self, name: str) -> dict[str, str]:
        """Returns the names and values of a flag that is given as NAME=VALUE, and repeats."""
        made = {}
        for text in self.all(name):
            key, equals, value = text.partition("=")
            if not key or not equals:
                fix, expected = f"write --{name} NAME=VALUE", "a name, = and a value"
                raise UsageError(f"--{name}", received=repr(key), expected=expected, fix=fix)
            if key in made:
                fix, expected = "leave one of them out", "each name once"
                raise UsageError(f"--{name}", received=f"{key} twice", expected=expected, fix=fix)
            made[key] = value
        return made


def split(argv: Sequence[str], *, launcher: Mapping[str, bool]) -> Given:
    """Take the command line apart, up to the program, which is left as it is.

    Args:
      launcher: the launcher's flags, and whether each takes a value.

    Raises:
        UsageError: an unknown flag, one without its value, or one given twice.
    """
    own: dict[str, tuple[str, ...]] = {}
    theirs: dict[str, str | None] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and not _begins_program(rest[0]):
        head, equals, text = rest.pop(0).partition("=")
        name = head.removeprefix("--").replace("-", "_")
        if head in ("-h", "--help"):
            return Given(help=True)
        if not head.startswith("--") or (name not in _BY_NAME and name not in launcher):
            raise _unknown(head, [*_BY_NAME, *launcher])
        if name in theirs or (name in own and not _BY_NAME[name].repeats):
            raise given_twice(f"--{name}")
        if name in launcher and not launcher[name]:
            theirs[name] = text if equals else None
            continue
        if not equals:
            if not rest:
                raise _valueless(name)
            text = rest.pop(0)
        if name in launcher:
            theirs[name] = text
        else:
            own[name] = (*own.get(name, ()), _value(name, text))
    return Given(own=own, launcher=theirs, program=tuple(rest))


def check_scheduler(given: Given) -> str:
    """Return which scheduler is meant; refuse flags that only another one has."""
    to = given.one("to") or ""
    if to not in SCHEDULERS:
        fix = f"write --to slurm or --to kubernetes{near(to, SCHEDULERS)}"
        received = repr(to) if to else "nothing"
        raise UsageError("--to", received=received, expected="slurm or kubernetes", fix=fix)
    for name in given.own:
        only = _BY_NAME[name].only
        if only and only != to:
            fix = f"leave --{name} out"
            raise UsageError(f"--{name}", received=f"it with --to {to}", expected=only, fix=fix)
    return to


def help_text(launcher: Sequence[tuple[str, str, str]]) -> str:
    """Return what ``--help`` prints; `launcher` has name, value and help of its flags."""
    lines = [
        "usage: python -m tfdist.submit --to slurm|kubernetes [--dry_run] [flags]",
        "           [script.py | -m module] [the program's own flags]",
        "",
        "Gives a job to a scheduler; with --dry_run, prints what it would be given.",
        "",
    ]
    for flag in FLAGS:
        only = f"{flag.only}: " if flag.only else ""
        again = "; may be repeated" if flag.repeats else ""
        lines += [f"  --{flag.name} {flag.shown}", f"        {only}{flag.help}{again}"]
    lines += ["", "Flags that python -m tfdist.launch has too:", ""]
    for name, shown, text in launcher:
        lines += [f"  --{name} {shown}".rstrip(), f"        {text}"]
    return "\n".join(lines)


def _begins_program(token: str) -> bool:
    name = token.removeprefix("--")
    return token in ("-m", "--") or name == "config" or name.startswith(("config.", "config="))


def _value(name: str, text: str) -> str:
    if not text.strip() or "\0" in text or "\n" in text:
        raise _valueless(name)
    return text


def _valueless(name: str) -> UsageError:
    shown = _BY_NAME[name].shown if name in _BY_NAME else "VALUE"
    fix = f"write --{name} {shown}"
    return UsageError(f"--{name}", received="no value", expected="a value in one line", fix=fix)


def _unknown(head: str, names: Sequence[str]) -> UsageError:
    meant = near(head.lstrip("-").replace("-", "_"), names)
    fix = "put the program's own flags after the program"
    if meant:
        fix = f"correct the flag{meant.replace(chr(39), '--', 1).replace(chr(39), '')}"
    expected = "a flag of tfdist.submit (--help lists them)"
    return UsageError("command line", received=head, expected=expected, fix=fix)


# Parsers of amounts: memory, times, counts.

_MIB = {"M": 1, "Mi": 1, "MB": 1, "G": 1024, "Gi": 1024, "GB": 1024, "T": 1024**2, "Ti": 1024**2}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST = 10**9


def count(text: str, *, flag: str, least: int = 1, most: int = _MOST) -> int:
    """Return an integer from `least` to `most`; `UsageError` names the flag."""
    if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
        return int(text)
    expected = f"an integer from {least} to {most}"
    fix = f"write --{flag} {least}, for example"
    raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix)


def mebibytes(text: str, *, flag: str = "memory") -> int:
    """Return the MiB of ``16G``, ``16Gi``, ``512M``: G is 1024 M, as Slurm has it."""
    match = re.fullmatch("([0-9]{1,9})([A-Za-z]{1,2})", text)
    if match and match[2] in _MIB and int(match[1]):
        return int(match[1]) * _MIB[match[2]]
    expected = "a number and M, G or T"
    fix = f"write --{flag} 16G, for example"
    raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix)


def seconds(text: str, *, flag: str = "time") -> int:
    """Return the seconds of ``90m``, ``4h``, ``2d``, ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    if (match := re.fullmatch("([0-9]{1,6})([smhd])", text)) and int(match[1]):
        return int(match[1]) * _SECONDS[match[2]]
    clock = re.fullmatch("(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5]?[0-9]):([0-5]?[0-9])", text)
    if clock:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        total = 86_400 * days + 3600 * hours + 60 * minutes + rest
        if total:
            return total
    expected, fix = "30m, 4h, 2d, HH:MM:SS or D-HH:MM:SS", f"write --{flag} 4h, for example"
    raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix)


def clock_text(total_s: int) -> str:
    """Return ``D-HH:MM:SS``, which Slurm cannot misread, as it does a number alone."""
    days, rest = divmod(total_s, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
