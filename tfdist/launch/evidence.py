"""What the kernel knows of a process that was killed: whether it was for its memory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOT = Path("/sys/fs/cgroup")
_KILLED = re.compile(rb"Killed process (\d+) ")
_MAX_RECORDS = 10_000


class KillEvidence:
    """Tells why the kernel killed a task, as far as this user may read it.

    The counters of a control group say that some process of it was killed, the kernel's own log
    says which one; inside a container its numbers may be others than ours, and it is often not
    readable.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        v1_root: Path = _V1_ROOT,
        v2_root: Path = _V2_ROOT,
        kernel_log: Path = Path("/dev/kmsg"),
    ) -> None:
        self._proc = proc
        self._roots = (v1_root, v2_root)
        self._counters: dict[Path, int] = {}
        self._files: dict[int, Path] = {}
        self._log_fd = -1
        with contextlib.suppress(OSError):
            self._log_fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log_fd, 0, os.SEEK_END)
        self._killed: set[int] = set()

    def started(self, pid: int) -> None:
        """Remembers where a task's memory is counted, and how many were killed there so far."""
        path = self._counter_file(pid)
        if path is not None:
            self._files[pid] = path
            self._counters.setdefault(path, _oom_kills(path) or 0)

    def of_kill(self, pid: int) -> str:
        """Returns why the kernel killed the task whose process was `pid`; "" if it is not known.

        A rise of a counter explains one death only.
        """
        path = self._files.pop(pid, None)
        risen = False
        if path is not None:
            now, before = _oom_kills(path) or 0, self._counters[path]
            risen = now > before
            self._counters[path] = min(now, before + 1)
        logged = self._is_logged(pid)
        if not (risen or logged):
            return ""
        where = f"oom_kill rose in {path}" if risen else f"{pid} is in the kernel's log"
        return f"killed by the kernel's out-of-memory killer ({where})"

    def close(self) -> None:
        """Lets go of the kernel's log."""
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _counter_file(self, pid: int) -> Path | None:
        try:
            groups = (self._proc / str(pid) / "cgroup").read_text()
        except OSError:
            return None
        v1_root, v2_root = self._roots
        for line in groups.splitlines():
            _, controllers, group = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, name = v1_root, "memory.oom_control"
            elif not controllers:
                root, name = v2_root, "memory.events"
            else:
                continue
            # Inside a container the group's own path may not be there: its root is mounted.
            for path in (root / group.lstrip("/") / name, root / name):
                if _oom_kills(path) is not None:
                    return path
        return None

    def _is_logged(self, pid: int) -> bool:
        for _ in range(_MAX_RECORDS if self._log_fd >= 0 else 0):
            try:
                record = os.read(self._log_fd, 8192)
            except BrokenPipeError:  # records were lost: go on with the next one there is
                continue
            except OSError:
                break
            if not record:
                break
            self._killed |= {int(found) for found in _KILLED.findall(record)}
        return pid in self._killed


def _oom_kills(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    try:
        return int(counts["oom_kill"])
    except (KeyError, ValueError):
        return None
