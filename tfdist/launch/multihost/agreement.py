"""Job fingerprint that all hosts share, and the differences between two hosts."""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.settings import names_a_secret

_MATTERS = re.compile(r"(TF|TF2|KERAS|XLA|TFDIST)_")
_OWN = re.compile(
    r"TF_CONFIG|TF_CPP_|TF_NUM_|TF_GPU_|TFDIST_(NODE_RANK|LOCAL_RANK|JOB|RENDEZVOUS_TOKEN|RESTARTS)"
)
"""Variables that may well differ from host to host."""


def versions() -> dict[str, str]:
    """Return those of Python, tfdist and what it computes with, as installed."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _version(name) for name in ("tfdist", "tensorflow", "keras", "numpy")},
    }


def digest(path: str) -> str:
    """Return a few characters that are the same for files of the same text."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return "not readable"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what is computed."""
    return {n: v for n, v in environ.items() if _MATTERS.match(n) and not _OWN.match(n)}


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms of a launcher's start

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


_MAX_SHOWN = 5
_MAX_CHARS = 120


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return ``name: X there, Y here`` for everything in which another host differs."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} here"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def fingerprint(terms: Mapping[str, str]) -> str:
    """Return a short text that is the same where all of `terms` are."""
    text = json.dumps(sorted(terms.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def summary(found: Sequence[str], *, most: int = _MAX_SHOWN) -> str:
    """Return differences as one line, at most so many of them."""
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def summary_of_hosts(found: Mapping[str, Sequence[str]]) -> str:
    """Return in what hosts differ as one line, those that do so in the same together."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for host, what in found.items():
        hosts.setdefault(tuple(what), []).append(host)
    if len(hosts) == 1:
        return summary(next(iter(hosts)))
    groups = [f"{', '.join(names)}: {summary(what, most=2)}" for what, names in hosts.items()]
    return summary(groups)


def without_secrets(args: Sequence[str], *, key: bytes | None = None) -> list[str]:
    """Return a program's arguments with a mark in the place of each that is named as a secret.

    With `key` equal values have equal marks, which tell nothing to those who do not have it.
    """
    result: list[str] = []
    follows = False
    for arg in args:
        name, equals, value = arg.partition("=")
        if follows:
            result.append(_mark(arg, key))
        elif equals and names_a_secret(name):
            result.append(f"{name}={_mark(value, key)}")
        else:
            result.append(arg)
        follows = not equals and arg.startswith("-") and names_a_secret(arg)
    return result


def _mark(value: str, key: bytes | None) -> str:
    if key is None:
        return "<secret>"
    return f"<secret {hmac.new(key, value.encode(), 'sha256').hexdigest()[:8]}>"


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    text = value if value.isprintable() else repr(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"
