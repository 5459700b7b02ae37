"""Secrets: a job names where they are. Their values are in no flag, script or manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.wishes import names_a_secret
from tfdist.errors import UsageError

_KNOWN = re.compile(
    r"\b(ghp_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@"
)
_FIX = "put the value where the scheduler keeps it, and name that: --secret NAME={form}"


def refuse_values(program: Sequence[str], *, env: Mapping[str, str], form: str) -> None:
    """Refuses what looks like a secret's value in --env or among the program's arguments.

    The message has the name of the flag or variable, and not the value.
    """
    for name, value in env.items():
        if is_secret(name, value):
            raise _refused(f"--env {name}", form)
    for i, argument in enumerate(program):
        name, equals, value = argument.partition("=")
        after = program[i + 1] if i + 1 < len(program) else ""
        if name.startswith("-") and not equals:
            name, value = name, "" if after.startswith("-") else after
        elif not name.startswith("-"):
            name, value = "", argument
        if is_secret(name.lstrip("-"), value) or _KNOWN.search(argument):
            raise _refused(name if name.startswith("--") else "the program's arguments", form)


def is_secret(name: str, value: str) -> bool:
    """Returns whether `value`, given for `name`, looks like a secret itself."""
    return bool(value) and bool(names_a_secret(name) or _KNOWN.search(value))


def reference(text: str, *, pattern: str, form: str) -> tuple[str, str]:
    """Splits ``NAME=reference``; the message of the `UsageError` shows the name at most."""
    name, equals, where = text.partition("=")
    if equals and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) and re.fullmatch(pattern, where):
        return name, where
    shown = f"{name}=... (not shown)" if equals else "no NAME=reference"
    expected = f"a variable and where its value is: NAME={form}"
    raise UsageError("--secret", received=shown, expected=expected, fix=_FIX.format(form=form))


def _refused(where: str, form: str) -> UsageError:
    received = "what looks like a secret's value (not shown)"
    expected = "no secret in a command line, a script or a manifest"
    return UsageError(where, received=received, expected=expected, fix=_FIX.format(form=form))
