"""Memory that is left for a new process: of its control groups, of the machine, of its GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 says so by a number near 2**63
_NVIDIA_SMI_TIMEOUT_S = 20.0
_MIB = 1 << 20


def available_bytes(
    *, root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup"), machine: int | None = None
) -> int:
    """Return how many bytes processes may take more, before the kernel ends one of them."""
    left = [psutil.virtual_memory().available if machine is None else machine]
    left += [max(0, limit - used) for limit, used in _groups(root, membership)]
    return min(left)


def gpu_bytes() -> tuple[int, ...]:
    """Return the free memory of each GPU of this machine; empty where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    query = [command, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(line) * _MIB for line in done.stdout.split() if line.isdecimal())


def _groups(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group with a limit that this process is in."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(root / "memory", path, *names)


def _limits(root: Path, path: str, limit: str, use: str, cache: str) -> Iterator[tuple[int, int]]:
    """Yield those of a group and of the groups that it is in."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = root.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError):  # "max", or not seen from in here
            most = int((group / limit).read_text())
            if most < _UNLIMITED:
                yield most, int((group / use).read_text()) - _cache(group, cache)


def _cache(group: Path, name: str) -> int:
    """Return the bytes of files that the kernel gives back when they are needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            key, value = line.split()
            if key == name:
                return int(value)
    return 0
