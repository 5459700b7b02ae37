"""Errors of a lost peer, and why the kernel killed a process. Who failed first: test_supervisor."""

import os
from pathlib import Path

import pytest

from tfdist.launch.diagnosis import is_lost_peer
from tfdist.launch.machine import KillEvidence


@pytest.mark.parametrize(
    "cause",
    [
        "UnavailableError: Collective ops is aborted by: Connection reset by peer",
        "UnavailableError: Graph execution error:",
        "AbortedError: {{function_node __wrapped__...}}",
        "InternalError: Socket closed",
        "InternalError: Graph execution error:",
        "CancelledError: heartbeat timeout",
        "DeadlineExceededError: Barrier timed out. coordination service",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_errors_of_a_lost_peer(cause):
    assert is_lost_peer(cause)


@pytest.mark.parametrize(
    "cause",
    [
        "ValueError: Peer",
        "InternalError: cuDNN failed",
        "killed by SIGKILL",
        "exit code 1",
        "MyUnavailableErrors",
    ],
)
def test_errors_of_its_own(cause):
    assert not is_lost_peer(cause)


# What the kernel tells of a process that was killed, read from files as it writes them.

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 7\noom 3\noom_kill {}\noom_group_kill 0\n"


class Kernel:
    """A /proc and control groups in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def process(self, pid: int, groups: str) -> None:
        path = self.root / "proc" / str(pid)
        path.mkdir(parents=True)
        (path / "cgroup").write_text(groups)

    def count(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def evidence(self) -> KillEvidence:
        return KillEvidence(proc=self.root / "proc", cgroups=self.root / "cgroups")


@pytest.fixture
def kernel(tmp_path):
    made = Kernel(tmp_path)
    made.process(10, "9:name=systemd:/\n4:memory:/box\n0::/\n")
    made.process(11, "9:name=systemd:/\n4:memory:/box\n0::/\n")
    made.process(12, "0::/user.slice/box\n")
    made.count("cgroups/memory/box/memory.oom_control", V1.format(4))
    made.count("cgroups/user.slice/box/memory.events", V2.format(0))
    return made


def test_a_counter_that_rose_tells_in_both_versions_of_control_groups(kernel):
    evidence = kernel.evidence()
    for pid, file, text in [
        (10, "cgroups/memory/box/memory.oom_control", V1.format(5)),
        (12, "cgroups/user.slice/box/memory.events", V2.format(1)),
    ]:
        evidence.started(pid)
        kernel.count(file, text)
        cause = evidence.of_kill(pid)
        assert cause == (
            f"killed by the kernel's out-of-memory killer (oom_kill rose in {kernel.root / file})"
        )


def test_a_counter_explains_as_many_deaths_as_it_rose(kernel):
    evidence = kernel.evidence()
    evidence.started(10)
    evidence.started(11)
    kernel.count("cgroups/memory/box/memory.oom_control", V1.format(5))
    assert "oom_kill" in evidence.of_kill(10)
    assert evidence.of_kill(11) == ""


def test_inside_a_container_the_root_of_the_control_groups_is_read(kernel):
    kernel.process(13, "0::/../outside\n")
    kernel.count("cgroups/memory.events", V2.format(2))
    evidence = kernel.evidence()
    evidence.started(13)
    kernel.count("cgroups/memory.events", V2.format(3))
    assert "oom_kill rose" in evidence.of_kill(13)


def test_nothing_readable_is_no_evidence(kernel):
    for evidence, pid in ((kernel.evidence(), 999), (KillEvidence(), os.getpid())):
        evidence.started(pid)
        assert evidence.of_kill(pid) == ""
