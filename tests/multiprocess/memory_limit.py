"""Control groups with a limit of memory, below the one that the tests run in."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path("/sys/fs/cgroup")


class LimitedGroup:
    """A control group of version 1 or 2, whose processes may take so many bytes together."""

    def __init__(self, path: pathlib.Path, limit_bytes: int) -> None:
        self.path = path
        path.mkdir()
        self._first = (path / "memory.limit_in_bytes").exists()
        limit = "memory.limit_in_bytes" if self._first else "memory.max"
        (path / limit).write_text(str(limit_bytes))
        without = path / ("memory.swappiness" if self._first else "memory.swap.max")
        without.write_text("0")

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed at the limit."""
        name = "memory.oom_control" if self._first else "memory.events"
        lines = (self.path / name).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    @property
    def peak_bytes(self) -> int:
        """The most that the processes had."""
        name = "memory.max_usage_in_bytes" if self._first else "memory.peak"
        return int((self.path / name).read_text())


@contextlib.contextmanager
def limited_groups(count: int, *, limit_bytes: int) -> Iterator[list[LimitedGroup]]:
    """Groups that are gone at the end; skips the test where this user can make none."""
    made = []
    try:
        try:
            for index in range(count):
                path = _parent() / f"tfdist-test-{os.getpid()}-{index}"
                made.append(LimitedGroup(path, limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group with a limit of memory can be made here: {error}")
        yield made
    finally:
        for group in made:
            group.path.rmdir()


def _parent() -> pathlib.Path:
    """The group in which groups with a limit can be made."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / path.lstrip("/")
    # In version 2 a group with processes has no groups with limits in it.
    own = (ROOT / path.lstrip("/")).parent
    return own if own.is_relative_to(ROOT) else ROOT
