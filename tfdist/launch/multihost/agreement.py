"""What all hosts share: the fingerprint of the job, and the secret of its launchers."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster.address import is_loopback
from tfdist.cluster.settings import may_hold_a_secret, may_name_a_secret
from tfdist.errors import UsageError, require
from tfdist.files import require_private

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


def summary(found: Sequence[str]) -> str:
    """Return differences as one line, the first ones only where there are many."""
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + more


def without_secrets(args: Sequence[str], *, key: bytes | None = None) -> list[str]:
    """Return a program's arguments with a mark in the place of each that is, or may be, a secret.

    With `key` equal values have equal marks, which tell nothing to those who do not have it.
    """
    result: list[str] = []
    before = ""
    for arg in args:
        name, equals, value = arg.partition("=")
        if _names_next(before) and not arg.startswith("--"):
            result.append(_mark(arg, key))
        elif equals and _FLAG.fullmatch(name) and (may_hold_a_secret(arg) or _is_user(name, value)):
            result.append(f"{name}={_mark(value, key)}")
        elif may_hold_a_secret(arg) or _is_user(before, arg) or _PASSWORD_AFTER_P.match(arg):
            result.append(_mark(arg, key))
        else:
            result.append(arg)
        before = arg
    return result


_FLAG = re.compile(r"-*[\w.-]+")
_PASSWORD_AFTER_P = re.compile(r"-p(?=.*[^A-Za-z_-])[^=]+$")  # -pX of mysql, not a word: -params
_USER_FLAGS = ("-u", "--user", "--proxy-user", "--userpwd")


def _names_next(arg: str) -> bool:
    """Return whether the next argument is a secret by this one: ``--pw``, ``Authorization:``."""
    is_name = ("=" not in arg and arg.startswith("-")) or arg.endswith(":")
    return (is_name and may_name_a_secret(arg.rstrip(":"))) or arg.lower() == "bearer"


def _is_user(flag: str, value: str) -> bool:
    """Return whether a value is ``user:password``, as curl takes it."""
    return flag in _USER_FLAGS and ":" in value


def _mark(value: str, key: bytes | None) -> str:
    if key is None:
        return "<secret>"
    return f"<secret {hmac.new(key, value.encode(), 'sha256').hexdigest()[:8]}>"


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    text = value if value.isprintable() else repr(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"


TOKEN_VARIABLE = "TFDIST_RENDEZVOUS_TOKEN"
TOKEN_FLAG = "--rendezvous_token_file"

_MIN_TOKEN_CHARS, _MAX_TOKEN_CHARS = 16, 4096
_MAKE = "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def read_token(environ: Mapping[str, str], *, path: str | None, hosts: Sequence[str]) -> bytes:
    """Return the token of a job on `hosts`; empty on this machine alone, where nobody gave one.

    Raises:
        UsageError: there is none, or it cannot be read; no message has any of its text.
    """
    text = environ.get(TOKEN_VARIABLE) if path is None else _text_of(path)
    if text is None:
        require(
            all(map(is_loopback, hosts)),
            TOKEN_VARIABLE,
            received="no token for a job on several hosts",
            expected=f"the same secret on all hosts, in {TOKEN_VARIABLE} or a file",
            fix=f"give {TOKEN_FLAG} FILE ({_MAKE})",
            code="no-token",
        )
        return b""
    token = text.strip()
    require(
        _MIN_TOKEN_CHARS <= len(token) <= _MAX_TOKEN_CHARS,
        TOKEN_VARIABLE if path is None else TOKEN_FLAG,
        received=f"a token of {len(token)} characters",
        expected=f"{_MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS} of them",
        fix=f"make another: {_MAKE}",
        code="token-length",
    )
    return token.encode()


def _text_of(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            require_private(file, where=TOKEN_FLAG)
            data = file.read(_MAX_TOKEN_CHARS + 2)
        return data.decode()
    except OSError as error:
        # A path at which nothing is may be the secret itself, given in the place of its file.
        shown = path if os.path.lexists(path) else "a path at which nothing is, not shown"
        received = f"{shown} ({error.strerror})"
    except UnicodeDecodeError:
        received = f"{path}, which is no text"
    raise UsageError(
        TOKEN_FLAG,
        received=received,
        expected="a file with the token",
        fix=f"make it: {_MAKE}",
        code="unreadable-file",
    )
