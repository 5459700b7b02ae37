"""CPUs and GPUs of this machine, to be divided among the tasks."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """CPUs this process may use, and the GPUs it sees as CUDA_VISIBLE_DEVICES names them."""

    cpus: int
    gpus: tuple[str, ...] = ()
    has_gpu_driver: bool = False
    """Whether TensorFlow could find a GPU at all, be it one that we did not."""


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Return what the launcher may use, by its affinity, control group and environment."""
    driver = any(Path(node).exists() for node in _GPU_NODES)
    return Machine(cpus=_cpus(), gpus=_gpus(environ), has_gpu_driver=driver)


def _cpus() -> int:
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max"
        return allowed


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible_gpus(visible)
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return ()
    try:
        listed = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return listed_gpus(listed.stdout)


def listed_gpus(text: str) -> tuple[str, ...]:
    """Return the devices of ``nvidia-smi -L``; of a GPU that is divided (MIG) its parts."""
    gpus: list[str] = []
    for gpu in re.split("^(?=GPU )", text, flags=re.MULTILINE):
        parts = re.findall(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)", gpu, flags=re.MULTILINE)
        gpus += parts or re.findall(r"^GPU (\d+):", gpu)
    return tuple(gpus)


def visible_gpus(value: str) -> tuple[str, ...]:
    """Return the devices that CUDA sees for a value of CUDA_VISIBLE_DEVICES.

    CUDA stops at the first entry that is none, such as -1.
    """
    gpus: list[str] = []
    for entry in value.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        gpus.append(entry.strip())
    return tuple(gpus)
