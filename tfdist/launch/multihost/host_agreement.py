"""Versions and variables that all hosts of a job share, and masking of secrets in arguments."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.settings import may_hold_a_secret, may_name_a_secret

_MATTERS = re.compile(r"(TF|TF2|KERAS|XLA|TFDIST)_")
_OWN = re.compile(r"TF_CONFIG|TF_CPP_|TF_NUM_|TF_GPU_|TFDIST_(HOSTS|NODE_RANK|LOCAL_RANK|RESTARTS)")
"""Variables that may differ between hosts."""
_PASSED = re.compile(
    r"(TF|TF2|KERAS|XLA|TFDIST|NCCL|GRPC|OMP)_.*|PYTHON.*|LD_LIBRARY_PATH|LANG|LC_ALL"
)
_NOT_PASSED = re.compile(r"TF_CONFIG|TFDIST_(NODE_RANK|LOCAL_RANK|HOSTS)")


def versions_of_hosts() -> dict[str, str]:
    """Return the versions of Python and of the packages that every host needs."""
    from tfdist.versions import PACKAGES, versions  # 20 ms of the launcher's start

    found = versions()
    return {"Python": found["python"]} | {n: found.get(n, "not installed") for n in PACKAGES}


def digest(path: str) -> str:
    """Return a short digest of a file's content."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return "not readable"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect results."""
    return {n: v for n, v in environ.items() if _MATTERS.match(n) and not _OWN.match(n)}


def passed_variables(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables to send to an agent: the given `names`, and variables that tasks read.

    CUDA_VISIBLE_DEVICES is sent only if it hides all GPUs. Otherwise each host uses its own.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in names
        or (_PASSED.fullmatch(name) and not _NOT_PASSED.fullmatch(name))
        or (name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"))
    }


_MAX_SHOWN = 5
_MAX_CHARS = 120


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return ``name X there, Y here`` for the first differences to another host."""
    found = [
        f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} here"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + more


def without_secrets(args: Sequence[str]) -> list[str]:
    """Return a program's arguments with each secret, or possible secret, replaced by a mark."""
    result: list[str] = []
    before = ""
    for arg in args:
        name, equals, _ = arg.partition("=")
        names_next = "=" not in before and before.startswith("-") and may_name_a_secret(before)
        if names_next and not arg.startswith("--"):
            result.append(_SECRET)
        elif equals and _FLAG.fullmatch(name) and may_hold_a_secret(arg):
            result.append(f"{name}={_SECRET}")
        else:
            result.append(_SECRET if may_hold_a_secret(arg) else arg)
        before = arg
    return result


_SECRET = "<secret>"
_FLAG = re.compile(r"-*[\w.-]+")


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    text = value if value.isprintable() else repr(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"
