"""The command line of the linter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import UsageError, near
from tfdist.lint.files import KINDS, Source

_FLAGS = ("--json", "--list", "--environ", "--kind", "--replicas", "--help")
_MAX_BYTES = 16 << 20

HELP = f"""usage: python -m tfdist.lint [flags] FILE... | - | --environ

Says what is wrong with a job's files before anything is started. Nothing in them is run.

  FILE            TF_CONFIG (.json), a config file (.py), Kubernetes manifests (.yaml, .yml,
                  .json), an sbatch or another script (.sh, .sbatch, .slurm), the output of env
                  (.env)
  -               standard input
  --environ       the present environment, TF_CONFIG in it
  --kind KIND     what the files are: {", ".join(KINDS)}
  --replicas N    how many replicas the job will have: for the global batch of a config file
  --json          findings as JSON
  --list          every rule and its reason

Exit code: 0 no findings, 1 warnings only, 2 errors or a wrong command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What the command line asks for."""

    files: tuple[str, ...] = ()
    environ: bool = False
    json: bool = False
    list: bool = False
    help: bool = False
    kind: str | None = None
    replicas: int | None = None


def parse(arguments: Sequence[str]) -> Command:
    """Returns what `arguments` ask for; raises UsageError where that makes no sense."""
    files: list[str] = []
    switches: set[str] = set()
    values: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        head, equals, text = word.partition("=")
        if head in ("--kind", "--replicas"):
            if not equals and not rest:
                raise _refuse(head, "no value", "a value", f"write {head}=...")
            values[head[2:]] = text if equals else rest.pop(0)
        elif word in ("--json", "--list", "--environ", "--help", "-h"):
            switches.add("help" if word == "-h" else word[2:])
        elif word.startswith("-") and word != "-":
            meant = near(head, _FLAGS)
            raise _refuse("command line", f"{head}{meant}", "a file or a flag", "see --help")
        else:
            files.append(word)
    if not files and not switches & {"environ", "list", "help"}:
        raise _refuse("command line", "no file", "files, - or --environ", "see --help")
    return Command(
        files=tuple(files),
        environ="environ" in switches,
        json="json" in switches,
        list="list" in switches,
        help="help" in switches,
        kind=_kind(values.get("kind")),
        replicas=_replicas(values.get("replicas")),
    )


def read(command: Command) -> list[Source]:
    """Returns the files that the command names; raises UsageError for one that is not there."""
    return [Source(name=name, data=_bytes(name), kind=command.kind) for name in command.files]


def _bytes(name: str) -> bytes:
    if name == "-":
        return _bounded(name, sys.stdin.buffer.read(_MAX_BYTES + 1))
    path = Path(name)
    try:
        with path.open("rb") as file:
            return _bounded(name, file.read(_MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        beside = [str(other) for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise _refuse(
            "command line", f"{name!r}: {why}{near(name, beside)}", "a file", "check the path"
        ) from None


def _bounded(name: str, data: bytes) -> bytes:
    if len(data) > _MAX_BYTES:
        expected = f"at most {_MAX_BYTES >> 20} MiB"
        raise _refuse("command line", f"{name!r}, which is larger", expected, "name another file")
    return data


def _kind(value: str | None) -> str | None:
    if value is not None and value not in KINDS:
        expected = f"one of {', '.join(KINDS)}"
        raise _refuse("--kind", f"{value!r}{near(value, KINDS)}", expected, "name one of them")
    return value


def _replicas(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value)):
        raise _refuse("--replicas", repr(value), "a number from 1 on", "write --replicas 8")
    return int(value)


def _refuse(where: str, received: str, expected: str, fix: str) -> UsageError:
    return UsageError(where, received=received, expected=expected, fix=fix)
