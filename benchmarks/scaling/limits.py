"""CPU limits for the tasks of a job: each task is a slow machine, and the tasks do not compete.

Linux limits a control group of processes to a part of a CPU. This needs root.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_LOG = logging.getLogger(__name__)
_GROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000
_GONE_S = 10.0


class CpuLimits:
    """Limit of the CPU time of each task.

    Args:
      percent: Percent of one CPU for each task.
      groups: Directory of the system's control groups.
    """

    def __init__(self, percent: float, groups: Path = _GROUPS) -> None:
        quota_us = round(_PERIOD_US * percent / 100)
        self._made: list[Path] = []
        if (groups / "cgroup.controllers").exists():  # version 2
            (groups / "cgroup.subtree_control").write_text("+cpu")
            self._parent, self._limits = groups, {"cpu.max": f"{quota_us} {_PERIOD_US}"}
        else:
            self._parent = groups / "cpu"
            self._limits = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}

    def set(self, pids: Mapping[str, int]) -> None:
        """Limit the process of each task, by the task's name."""
        for task, pid in pids.items():
            group = self._parent / f"tfdist-scaling-{os.getpid()}-{task}"
            group.mkdir()
            self._made.append(group)
            for name, text in self._limits.items():
                (group / name).write_text(text)
            (group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the groups. Their processes must have ended."""
        deadline_s = time.monotonic() + _GONE_S
        while self._made:
            try:
                self._made[-1].rmdir()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
            else:
                self._made.pop()


def possible() -> bool:
    """Return whether this machine allows CPU limits, and log the reason if it does not."""
    try:
        with (
            contextlib.closing(CpuLimits(50)) as limits,
            subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process,
        ):
            limits.set({"trial": process.pid})
    except OSError as error:
        _LOG.warning("no jobs with CPU limits: %s", error)
        return False
    return True
