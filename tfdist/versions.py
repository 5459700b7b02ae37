"""Installed versions, and those with which tfdist's tests passed."""

from __future__ import annotations

import contextlib
import itertools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("tensorflow", "keras", "numpy", "tfdist")
"""Packages that every host needs in the same version."""

COMPARED = (*PACKAGES, "python", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia driver")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Receipt:
    """Names of the tests that passed with three versions. The README explains the names."""

    python: str
    tensorflow: str
    keras: str
    passed: str

    @property
    def releases(self) -> tuple[str, ...]:
        """Major and minor versions."""
        return tuple(_release(each) for each in (self.python, self.tensorflow, self.keras))


RECEIPTS = (
    Receipt("3.11", "2.20.0", "3.14.1", "one process, jobs"),
    Receipt("3.11", "2.21.0", "3.15.1", "one process, jobs"),
    Receipt("3.11", "2.22.0rc0", "3.16.0.dev2026102704", "core"),
    Receipt("3.12", "2.20.0", "3.15.1", "one process"),
    Receipt("3.12", "2.21.0", "3.16.0.dev2026102704", "core"),
    Receipt("3.12", "2.22.0rc0", "3.14.1", "core, jobs"),
    Receipt("3.13", "2.20.0", "3.16.0.dev2026102704", "core"),
    Receipt("3.13", "2.21.0", "3.14.1", "core"),
    Receipt("3.13", "2.22.0rc0", "3.15.1", "one process, jobs"),
)
"""Nine cells that contain each pair of versions. `make test-versions` runs them."""


def versions() -> dict[str, str]:
    """Return the versions of the compared packages, of Python and of the GPU driver."""
    found = {"python": platform.python_version()}
    for name in COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if "keras" not in found:  # TensorFlow's pre-releases require nightly
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["keras"] = metadata.version("keras-nightly")
    with contextlib.suppress(OSError, IndexError):
        found["nvidia driver"] = _DRIVER.read_text().split("Module")[1].split()[0]
    return found


def verdict(found: Mapping[str, str]) -> str:
    """Return whether the versions of packages and of ``python`` are tested, untested or broken."""
    nightly = found.get("keras-nightly", "none")
    if nightly not in ("none", found.get("keras", nightly)):
        return (
            "known broken: keras and keras-nightly overwrite each other's files. Fix: pip uninstall"
            " -y keras keras-nightly && pip install --no-deps 'keras==3.15.*'"
        )
    names = ("python", "tensorflow", "keras")
    found = {"keras": nightly, **found}
    releases = tuple(_release(found.get(name, "none")) for name in names)
    for receipt in RECEIPTS:
        if receipt.releases == releases:
            return f"tested ({receipt.passed})"
    together = ", ".join(f"{name} {each}" for name, each in zip(names, releases, strict=True))
    pairs = itertools.combinations(enumerate(releases), 2)
    if all(any({*pair} <= {*enumerate(each.releases)} for each in RECEIPTS) for pair in pairs):
        return f"tested in pairs: tests passed with each two of {together}"
    return f"untested: no test ran with {together} together"


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])
