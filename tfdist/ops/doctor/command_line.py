"""The command line of the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.argument_parser import number
from tfdist.errors import UsageError, given_twice, near

_VALUES = (
    *("hosts", "node_rank", "ports"),
    *("rendezvous_token_file", "shared_dir", "startup_timeout_s"),
)
_SWITCHES = ("quick", "json", "list", "help")

HELP = """usage: python -m tfdist.doctor [flags]

Looks at the hosts of a job before it is started: start it on all of them, as the job is started
(srun, mpirun, pods), or with --hosts. The first says what is wrong. Alone it looks at this one.

  --hosts a,b,...        the hosts of the job, as the launcher takes them
  --node_rank R          which of them this one is, from 0 on (found by its name or address)
  --ports 20000-20100    the ports that the job may have, as the launcher takes them
  --shared_dir D         a directory that all hosts are to share: where the job writes
  --rendezvous_token_file F
                         what the hosts must know to meet, as the launcher takes it
  --quick                leave TensorFlow's own servers out: no all-reduce, push and pull
  --startup_timeout_s S  how long the hosts wait for each other (60, or what the job says)
  --json                 findings and facts as JSON
  --list                 every rule and its reason

Exit code: 0 nothing is wrong, 1 warnings only, 2 errors or a wrong command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorCommand:
    """What the command line asks for."""

    hosts: str | None = None
    node_rank: int | None = None
    ports: str | None = None
    rendezvous_token_file: str | None = None
    shared_dir: str | None = None
    startup_timeout_s: float | None = None
    quick: bool = False
    json: bool = False
    list: bool = False
    help: bool = False


def parse(arguments: Sequence[str]) -> DoctorCommand:
    """Return what `arguments` ask for; raise UsageError where that makes no sense."""
    values: dict[str, str] = {}
    switches: dict[str, bool] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        head, equals, text = word.partition("=")
        name = "help" if word == "-h" else head.removeprefix("--").replace("-", "_")
        if head.startswith("-") and (name in values or name in switches):
            raise given_twice(f"--{name}")
        if name in _SWITCHES and (word == "-h" or head.startswith("--")) and not equals:
            switches[name] = True
        elif name in _VALUES and head.startswith("--"):
            if not equals and not rest:
                raise _refuse(head, "no value", "a value", f"write {head}=...")
            values[name] = text if equals else rest.pop(0)
        else:
            meant = near(f"--{name}", [f"--{flag}" for flag in (*_VALUES, *_SWITCHES)])
            raise _refuse("command line", f"{head}{meant}", "a flag of the doctor", "see --help")
    return DoctorCommand(
        hosts=values.get("hosts"),
        node_rank=_node_rank(values.get("node_rank")),
        ports=values.get("ports"),
        rendezvous_token_file=values.get("rendezvous_token_file"),
        shared_dir=_directory(values.get("shared_dir")),
        startup_timeout_s=_seconds(values.get("startup_timeout_s")),
        **switches,
    )


def _node_rank(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 7):
        raise _refuse("--node_rank", repr(value), "a number from 0 on", "write --node_rank 0")
    return int(value)


def _directory(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise _refuse("--shared_dir", "''", "the path of a directory", "give one, or leave it out")
    return value


def _seconds(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = number(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        where = "--startup_timeout_s"
        raise _refuse(where, repr(value), "a positive number of seconds", f"write {where} 60")
    return seconds


def _refuse(where: str, received: str, expected: str, fix: str) -> UsageError:
    return UsageError(where, received=received, expected=expected, fix=fix)
