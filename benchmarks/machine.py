"""The machine and the versions that a table of figures belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import harness

PACKAGES = {
    harness.PROJECT_PYTHON: ("tfdist", "tensorflow", "keras", "numpy"),
    harness.PEER_PYTHON: (
        "torch",
        "tensorflow",
        "tf_keras",
        "lightning",
        "accelerate",
        "ray",
        "numpy",
    ),
}
_VERSIONS = """
import sys, importlib.metadata as m
for name in sys.argv[1:]:
    try:
        print(name, m.version(name))
    except m.PackageNotFoundError:
        print(name, "not installed")
"""


def describe(*, with_peers: bool = True) -> dict[str, str]:
    """One line a thing, in the order of the report."""
    sides = {"project": harness.PROJECT_PYTHON}
    if with_peers:
        sides["peers"] = harness.PEER_PYTHON
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{side: _versions(python, PACKAGES[python]) for side, python in sides.items()},
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions(python: str, names: tuple[str, ...]) -> str:
    if not Path(python).exists():
        return "not installed"
    command = [python, "-c", _VERSIONS, *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    return ", ".join(run.stdout.splitlines())
