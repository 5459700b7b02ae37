"""CPUs, memory, processes and GPUs of this machine, read from the kernel."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.launch.guardian import stat_of

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For cgroup 2 and cgroup 1: file of the limit, file of the use, name of the cache counter."""
_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63
_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_NVIDIA_SMI_TIMEOUT_S = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

CAN_GO_ON = ("R", "S", "D")
"""State letters of a process that runs, sleeps, or waits for a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """CPUs that this process may use, and visible GPUs as in CUDA_VISIBLE_DEVICES."""

    cpus: int
    gpus: tuple[str, ...] = ()
    has_gpu_driver: bool = False
    """Whether a GPU driver exists, so that TensorFlow may find a GPU not listed in `gpus`."""


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Return the CPUs and GPUs allowed by CPU affinity, control group and environment."""
    cpus = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        quota, period = (_CGROUPS / "cpu.max").read_text().split()
        cpus = max(1, min(cpus, math.ceil(int(quota) / int(period))))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = listed_gpus(nvidia_smi("-L", environ=environ))
    else:
        gpus = visible_gpus(visible)
    driver = any(Path(node).exists() for node in _GPU_NODES)
    return Machine(cpus=cpus, gpus=gpus, has_gpu_driver=driver)


def control_groups(membership: Path, *, root: Path = _CGROUPS) -> Iterator[Path]:
    """Yield the control groups that count a process's memory, with the process's own group first.

    `membership` is the process's ``cgroup`` file in /proc. Some groups may not exist: in a
    container, the file may name the host's groups, and the container's own group is the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root  # version 1, or 2
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def memory_groups(
    *, root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group that limits this process's memory.

    The use excludes the file cache that the kernel can free.
    """
    for group in control_groups(membership, root=root):
        for limit, use, cache in _MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max", or not visible here
                most = int((group / limit).read_text())
                if most < _UNLIMITED:
                    cached = counters(group / "memory.stat").get(cache, 0)
                    yield most, int((group / use).read_text()) - cached


def counters(path: Path) -> dict[str, int]:
    """Return the counters in a file of a control group, or {} if it cannot be read."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(count) for name, count in pairs}
    except (OSError, ValueError):
        return {}


def nvidia_smi(*words: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the output of ``nvidia-smi``, or "" if it is missing or does not answer."""
    if command := shutil.which("nvidia-smi", path=environ.get("PATH")):
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with contextlib.suppress(OSError):
            process = subprocess.Popen([command, *words], text=True, **pipes)
            try:
                return str(process.communicate(timeout=_NVIDIA_SMI_TIMEOUT_S)[0])
            except subprocess.TimeoutExpired:
                process.kill()  # do not wait: SIGKILL has no effect if the driver hangs
    return ""


def listed_gpus(text: str) -> tuple[str, ...]:
    """Return the devices in the output of ``nvidia-smi -L`` (MIG devices for a divided GPU)."""
    gpus: list[str] = []
    for gpu in re.split("^(?=GPU )", text, flags=re.MULTILINE):
        parts = re.findall(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)", gpu, flags=re.MULTILINE)
        gpus += parts or re.findall(r"^GPU (\d+):", gpu)
    return tuple(gpus)


def visible_gpus(value: str) -> tuple[str, ...]:
    """Return the devices that CUDA sees for a value of CUDA_VISIBLE_DEVICES.

    CUDA stops at the first entry that is not a device, such as -1 or Slurm's NoDevFiles.
    """
    entries = (entry.strip() for entry in value.split(","))
    return tuple(itertools.takewhile(re.compile(r"\d|GPU-|MIG-").match, entries))


def proc_state(pid: int, *, pipe_fd: int | None = None) -> str | None:
    """Return the state letter of a process (T: stopped), or `None` if it has exited.

    Return "" if the process can run but no longer has the pipe of `pipe_fd` open. It has then
    executed another program or closed its files, and cannot send heartbeats.
    """
    fields = stat_of(pid)
    state = fields[0].decode() if fields else None
    if state in CAN_GO_ON and pipe_fd is not None and not _holds_pipe(pid, pipe_fd):
        return ""
    return state


def _holds_pipe(pid: int, pipe_fd: int) -> bool:
    """Return whether a process has a pipe open (True if this is unknown)."""
    wanted = f"pipe:[{os.fstat(pipe_fd).st_ino}]"
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return True
    for name in names:
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}") == wanted:
                return True
    return False


def memory_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, or `None` if it has exited."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


_COUNTER_FILES = ("memory.events", "memory.oom_control")


class KillEvidence:
    """Reasons why the kernel killed a task, from counters that this user may read.

    A control group counts its processes that an out-of-memory killer has killed.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._counted: dict[Path, int] = {}
        self._files: dict[int, Path] = {}

    def started(self, pid: int) -> None:
        """Record the control group of a task's process, and its present count of kills."""
        groups = control_groups(self._proc / str(pid) / "cgroup", root=self._cgroups)
        for path in (group / name for group in groups for name in _COUNTER_FILES):
            if (count := counters(path).get("oom_kill")) is not None:
                self._files[pid] = path
                self._counted.setdefault(path, count)
                return

    def of_kill(self, pid: int) -> str:
        """Return why the kernel killed process `pid`, or "" if the reason is unknown.

        Each increment of a counter explains only a single killed process.
        """
        path = self._files.pop(pid, None)
        if path is None or counters(path).get("oom_kill", 0) <= self._counted[path]:
            return ""
        self._counted[path] += 1
        return f"killed by the kernel's out-of-memory killer (oom_kill rose in {path})"
