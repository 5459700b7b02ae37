"""Settings from ``TFDIST_*`` variables, for a job that another launcher starts.

A scheduler sets the number and the hosts of the tasks. These variables set the strategy, the
number of ps and other options. They must have the same values in all tasks of the job.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.address import shown
from tfdist.cluster.ports import parse_ports
from tfdist.errors import UsageError
from tfdist.options import (
    CLUSTER,
    PLACE,
    PORTS,
    RESTARTS,
    STAGES,
    STRATEGY,
    UNCOUNTED_RESTARTS,
    JobOptions,
    JobSettings,
    Option,
    table,
)

_OF_OPTIONS = {one.variable: one for one in table(JobSettings).values() if one.variable}
NAMES = (*_OF_OPTIONS, *PLACE)

_MAX = 2**31 - 1
_COUNTS_OF_RESTARTS = (RESTARTS, UNCOUNTED_RESTARTS, "SLURM_RESTART_COUNT")


def restarts(environ: Mapping[str, str]) -> int:
    """Return the number of earlier starts of this task, counted by a launcher or a scheduler."""
    return sum(integer(environ, name) or 0 for name in _COUNTS_OF_RESTARTS)


def from_environ(environ: Mapping[str, str]) -> JobSettings:
    """Return the settings in `environ`. Raise `UsageError` with the name of a wrong variable."""
    _refuse_misspelt(environ)
    given = {
        one.name: _value(one, text(environ, name))
        for name, one in _OF_OPTIONS.items()
        if text(environ, name)
    }
    settings = JobSettings(**given, attempt=1 + restarts(environ))
    if settings.stages is not None and not settings.kind.has_stages:
        problem = f"stages need the strategy pipeline, but the strategy is {settings.strategy}"
        raise UsageError(STAGES, problem, fix=f"set {STRATEGY}=pipeline", code="bad-value")
    ports_of(settings)
    return settings


def ports_of(options: JobOptions) -> range | None:
    """Return the ports that tasks may use, `None` for any. Raise UsageError if they are invalid."""
    return None if options.ports is None else parse_ports(options.ports, where=PORTS)


def _value(option: Option, value: str) -> Any:
    """Return a variable's text as the option's type, unchanged if it is not valid."""
    if option.type == "bool":
        return {"0": False, "1": True}.get(value, value)
    try:
        return {"int": int, "float": float}.get(option.type, str)(value)
    except ValueError:
        return value


def text(environ: Mapping[str, str], name: str) -> str:
    """Return the stripped value of a variable, "" if it is not set."""
    return environ.get(name, "").strip()


def integer(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int = _MAX
) -> int | None:
    """Return the value of an integer variable, `None` if it is not set or empty."""
    value = text(environ, name)
    if not value:
        return None
    if len(value) <= 10 and value.isascii() and value.isdecimal() and least <= int(value) <= most:
        return int(value)
    allowed = f"an integer from {least} " + ("on" if most == _MAX else f"to {most}")
    problem = f"{shown(value)} is not {allowed}"
    if name in NAMES:
        raise UsageError(name, problem, fix="correct it, or unset it", code="bad-value")
    fix = f"find the program that sets {name} in this job"
    raise UsageError(name, problem, fix=fix, code="bad-environment")


def needed(environ: Mapping[str, str], name: str, *, least: int = 0, most: int = _MAX) -> int:
    """Return the value of an integer variable. Raise `UsageError` if it is not set."""
    value = integer(environ, name, least=least, most=most)
    if value is None:
        fix = f"pass it on to the task, or set {CLUSTER}=none if the job has one task"
        raise UsageError(name, "the variable is not set", fix=fix, code="bad-environment")
    return value


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    for name in environ:
        if not name.startswith("TFDIST_") or name in NAMES:
            continue
        endings = [ours.removeprefix("TFDIST_") for ours in NAMES]
        close = difflib.get_close_matches(name.removeprefix("TFDIST_"), endings, n=1, cutoff=0.8)
        if close:
            ours = f"TFDIST_{close[0]}"
            problem, fix = f"the name is unknown, unlike {ours}", f"write {ours}, or unset {name}"
            raise UsageError(name, problem, fix=fix, code="unknown-value")


_SECRET = re.compile(
    r"((^|[_.-])(token|secret|credentials?|(api|access|private|secret)[_-]?key)"
    r"|password|passwd|passphrase)$",
    re.IGNORECASE,
)
_MAY_BE_SECRET = re.compile(
    r"(^|[_.-])(key|auth|authorization|pwd|pw|pass|bearer|jwt|pat|cookie|dsn|sig|signature|sas)$",
    re.IGNORECASE,
)
_HOLDS_SECRET = re.compile(
    r"\b(ghp_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA|ASIA|AIza|ya29\.|npm_|pypi-)[\w-]{12,}"
    r"|\beyJ[\w-]{5,}\.eyJ[\w-]{5,}\."  # JSON Web Token: two JSON objects in base64
    r"|\b[Bb]earer +[\w.~+/-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|[a-z][a-z0-9+.-]{0,30}://[^/\s:@]*:[^/\s@]+@"  # bounded, or long texts are slow
)
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?:([\w.-]++)["']?\s*[=:]|(-[\w.-]++)\s)\s*["']?(?=[^\s"'&,;])"""
)
"""A name and its value in a text, such as ``?sig=X``, ``{"key": "X"}`` or ``--token X``."""
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def names_a_secret(name: str) -> bool:
    """Return whether a name denotes a secret, such as HF_TOKEN, ``--api_key`` or PGPASSWORD."""
    return bool(_SECRET.search(name))


def may_name_a_secret(name: str) -> bool:
    """Return whether to hide the value of this name, such as ``--wandb_key`` or ``--auth``.

    It is also True for harmless names such as ``--sort_key``, so never raise an error for it.
    """
    words = _WORD_BOUNDARY.sub("_", name)  # AccountKey
    return names_a_secret(words) or bool(_MAY_BE_SECRET.search(words))


def holds_a_secret(text: str) -> bool:
    """Return whether a text contains a token of a known format, or a password in a URL."""
    return bool(_HOLDS_SECRET.search(text))


def may_hold_a_secret(text: str) -> bool:
    """Return whether to hide a text, because it contains a secret or a value named as a secret."""
    return holds_a_secret(text) or any(
        may_name_a_secret(found[1] or found[2]) for found in _ASSIGNMENT.finditer(text)
    )
