"""What the hosts of one job must have in common, and how two of them differ."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence

_SECRET = re.compile(
    r"(^|[_.-])(token|password|passwd|secret|credentials?|(api|access|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
_MAX_SHOWN = 5
_MAX_CHARS = 120


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Returns ``name: X there, Y here`` for everything in which another host differs."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} here"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def fingerprint(terms: Mapping[str, str]) -> str:
    """Returns a short text that is the same where all of `terms` are."""
    told = json.dumps(sorted(terms.items()))
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def summary(found: Sequence[str]) -> str:
    """Returns differences as one line."""
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + more


def without_secrets(args: Sequence[str], *, key: bytes | None = None) -> list[str]:
    """Returns a program's arguments with a mark in the place of each that is named as a secret.

    With `key` equal values have equal marks, which tell nothing to those who do not have it.
    """
    result: list[str] = []
    follows = False
    for arg in args:
        name, equals, value = arg.partition("=")
        if follows:
            result.append(_mark(arg, key))
        elif equals and _SECRET.search(name):
            result.append(f"{name}={_mark(value, key)}")
        else:
            result.append(arg)
        follows = not equals and arg.startswith("-") and bool(_SECRET.search(arg))
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
