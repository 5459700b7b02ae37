"""Shared secret of a job's launchers: its source, and when it is needed."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.errors import UsageError, require

VARIABLE = "TFDIST_RENDEZVOUS_TOKEN"
FLAG = "--rendezvous_token_file"

_MIN_CHARS, _MAX_CHARS = 16, 4096
_MAKE = "head -c 32 /dev/urandom | base64 > FILE, readable by you alone"


def read_token(environ: Mapping[str, str], *, path: str | None, hosts: Sequence[str]) -> bytes:
    """Return the token of a job on `hosts`; empty on this machine alone, where nobody gave one.

    Raises:
        UsageError: there is none, or it cannot be read; no message has any of its text.
    """
    if path is not None:
        return _checked(_text_of(path), where=FLAG)
    if VARIABLE in environ:
        return _checked(environ[VARIABLE], where=VARIABLE)
    if all(is_loopback(host) for host in hosts):
        return b""
    raise UsageError(
        VARIABLE,
        received="no token for a job on several hosts",
        expected=f"the same secret on all hosts, in {VARIABLE} or a file",
        fix=f"give {FLAG} FILE ({_MAKE})",
        code="no-token",
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name or number alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _text_of(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_CHARS + 2)
        return data.decode()
    except OSError as error:
        # A path at which nothing is may be the secret itself, given in the place of its file.
        shown = path if os.path.lexists(path) else "a path at which nothing is, not shown"
        received = f"{shown} ({error.strerror})"
    except UnicodeDecodeError:
        received = f"{path}, which is no text"
    raise UsageError(
        FLAG,
        received=received,
        expected="a file with the token",
        fix=f"make it: {_MAKE}",
        code="unreadable-file",
    )


def _checked(text: str, *, where: str) -> bytes:
    token = text.strip()
    require(
        _MIN_CHARS <= len(token) <= _MAX_CHARS,
        where,
        received=f"a token of {len(token)} characters",
        expected=f"{_MIN_CHARS} to {_MAX_CHARS} of them",
        fix=f"make another: {_MAKE}",
        code="token-length",
    )
    return token.encode()
