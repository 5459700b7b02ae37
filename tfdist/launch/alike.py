"""What tells two installations, programs and environments apart, to compare those of two hosts."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping

_MATTERS = re.compile(r"(TF|TF2|KERAS|XLA|TFDIST)_")
_OWN = re.compile(
    r"TF_CONFIG|TF_CPP_|TF_NUM_|TF_GPU_|TFDIST_(NODE_RANK|LOCAL_RANK|JOB|RENDEZVOUS_TOKEN|RESTARTS)"
)
"""Variables that may well differ from host to host."""


def versions() -> dict[str, str]:
    """Returns those of Python, tfdist and what it computes with, as installed."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _version(name) for name in ("tfdist", "tensorflow", "keras", "numpy")},
    }


def digest(path: str) -> str:
    """Returns a few characters that are the same for files of the same text."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return "not readable"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change what is computed."""
    return {n: v for n, v in environ.items() if _MATTERS.match(n) and not _OWN.match(n)}


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms of a launcher's start

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
