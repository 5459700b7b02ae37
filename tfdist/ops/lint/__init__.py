"""Checks of a job's files before anything is started; without TensorFlow.

Here is which file is of which kind, and the checks of each.

rules       every rule: code, severity, meaning; and what a check found, and where
tasks       TF_CONFIG and the variables beside it, command lines, config files
manifests   the Kubernetes manifests of a job
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfdist.ops.lint.rules import RULES, Finding, Location
from tfdist.ops.lint.tasks import (
    check_command,
    check_config_file,
    check_environment,
    check_tf_config,
    program_of,
)
from tfdist.ops.rules import Rule, Severity

__all__ = [
    "KINDS",
    "RULES",
    "Finding",
    "LintSource",
    "Location",
    "Rule",
    "Severity",
    "kind_of",
    "lint",
]

KINDS = ("tf_config", "config", "manifest", "environ")
"""What ``--kind`` may be."""

_BY_ENDING = {"py": "config", "yaml": "manifest", "yml": "manifest", "env": "environ"}
_BY_TEXT = (
    (r"#!.*python|.*^def get_config\b", "config"),
    (r".*(^|[{,])\s*['\"]?apiVersion['\"]?\s*:", "manifest"),
    (r"\s*['\"]?\\?[{\[]", "tf_config"),
    (r"\w+=", "environ"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LintSource:
    """A text to check: its `data`, and its `kind` of `KINDS`, or None to detect it."""

    name: str
    data: bytes
    kind: str | None = None


def lint(
    sources: Sequence[LintSource],
    *,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    replicas: int | None = None,
) -> list[Finding]:
    """Return the findings for files, an environment and a command.

    Config files are run, in a process of their own. Manifests are checked together, as one may
    have the Service that another needs. `replicas` is how many the job will have, where that is
    known.
    """
    found: list[Finding] = []
    manifests: list[tuple[str, str]] = []
    if environ is not None:
        found += check_environment(environ, lambda name: Location(file="environment", path=name))
    if command:
        location = Location(file="command line")
        if not program_of(command)[0]:
            fix = "give the command with its words apart, or name files"
            expected = "a command of tfdist.launch or tfdist.train"
            found.append(Finding("LNT002", location, repr(command[0]), expected, fix))
        found += check_command(command, location, replicas=replicas)
    for source in sources:
        try:
            text = source.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            location, fix = Location(file=source.name), "save it as UTF-8, or name another file"
            received = f"byte {source.data[error.start]:#04x} at position {error.start}"
            found.append(Finding("LNT001", location, received, "text in UTF-8", fix))
            continue
        kind = source.kind or kind_of(source.name, text)
        if kind == "manifest":
            manifests.append((text, source.name))
        else:
            found += _check(kind, text, source.name, replicas)
    if manifests:
        from tfdist.ops.lint.manifests import check_manifests  # it loads yaml

        found += check_manifests(manifests)
    return sorted(dict.fromkeys(found), key=lambda f: (f.location.file, f.location.line or 0))


def kind_of(name: str, text: str) -> str | None:
    """Return the kind of a file by its name, or else by its text."""
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    if ending in _BY_ENDING:
        return _BY_ENDING[ending]
    if ending == "json":
        return "manifest" if re.search(r'"apiVersion"\s*:', text) else "tf_config"
    if name != "-" and ending not in ("", "txt"):
        return None
    for pattern, kind in _BY_TEXT:
        if re.match(pattern, text, re.DOTALL | re.MULTILINE):
            return kind
    return None


def _check(kind: str | None, text: str, name: str, replicas: int | None) -> Iterator[Finding]:
    if kind == "tf_config":
        yield from check_tf_config(text.removesuffix("\n"), Location(file=name))
    elif kind == "environ" and (script := re.search("^(export|declare) ", text, re.MULTILINE)):
        yield Finding(
            "LNT002",
            Location(file=name, line=text.count("\n", 0, script.start()) + 1),
            "a line of a shell script",
            "NAME=value, without quotes, as env prints it",
            "write what env prints where the script has run",
        )
    elif kind == "environ":
        values, lines = _read_environ(text)
        yield from check_environment(
            values, lambda n: Location(file=name, line=lines.get(n), path=n)
        )
    elif kind == "config":
        yield from check_config_file(text, name, replicas=replicas)
    else:
        yield Finding(
            "LNT002",
            Location(file=name),
            "neither a name nor a text that is known",
            "TF_CONFIG, a config file, a manifest or an environment",
            f"say what it is: --kind {'|'.join(KINDS)}; scripts are for shellcheck",
        )


def _read_environ(text: str) -> tuple[dict[str, str], dict[str, int]]:
    """Return the variables of ``NAME=value`` lines, as ``env`` prints them, and their lines.

    A value may be JSON of several lines.
    """
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"([A-Za-z_][^\s=]*)=", line):  # bash's functions have a % in it
            name = match[1]
            values[name], lines[name] = line[match.end() :], number
        elif name and re.match(r'\s*["{}\[\],]', line):
            values[name] += f"\n{line}"
    return values, lines
