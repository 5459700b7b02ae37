"""Installed versions of the packages that the hosts of a job must share."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("tensorflow", "keras", "numpy", "tfdist")
"""Packages that every host needs in the same version."""

COMPARED = (*PACKAGES, "python", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia driver")
_DRIVER = Path("/proc/driver/nvidia/version")


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
