"""Who failed first, and why the kernel killed it."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from tfdist.cluster import Task
from tfdist.launch.diagnosis import SETTLE_S, KillEvidence, RootCause, is_lost_peer
from tfdist.launch.events import Ended, Raised

W0, W1 = Task("worker", 0), Task("worker", 1)
LOST = "UnavailableError: Collective ops is aborted by: Connection reset by peer"


@pytest.fixture
def diagnosis():
    return RootCause(patience_s=10)


def raises(diagnosis, task, at_s, cause="ValueError: boom", exit_code=1):
    diagnosis.raised(Raised(task=task, exit_code=exit_code, cause=cause, at_s=at_s))


def ends(diagnosis, task, at_s, status=1, *, since_s=0.0, cause=""):
    diagnosis.ended(
        Ended(task=task, status=status, at_s=at_s, cause=cause), since_s=since_s, now_s=at_s
    )


def test_nobody_is_named_before_anything_has_ended(diagnosis):
    assert diagnosis.suspect(5, is_complete=False) is None
    assert diagnosis.next_s() == math.inf
    raises(diagnosis, W0, 5)
    assert diagnosis.suspect(5, is_complete=False) is None
    assert diagnosis.next_s() == 15


def test_a_failure_of_its_own_is_named_at_once(diagnosis):
    raises(diagnosis, W0, 5)
    ends(diagnosis, W0, 6)
    failure = diagnosis.suspect(6, is_complete=False)
    assert (failure.task, failure.at_s, failure.exit_code) == (W0, 5, 1)
    assert failure.cause == "ValueError: boom (exit code 1)"


def test_who_lost_its_peer_waits_for_the_root_cause(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    assert diagnosis.suspect(5.1, is_complete=False) is None
    assert diagnosis.next_s() == 5.1 + SETTLE_S
    ends(diagnosis, W1, 5.3, -signal.SIGKILL, since_s=5.1)
    failure = diagnosis.suspect(5.3, is_complete=False)
    assert (failure.task, failure.at_s, failure.exit_code) == (W1, 5.3, 137)
    assert failure.cause == "killed by SIGKILL, not by the launcher"


def test_who_lost_its_peer_is_named_when_no_culprit_comes(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    assert diagnosis.suspect(5.1 + SETTLE_S, is_complete=False).task == W0


def test_who_lost_its_peer_is_named_at_once_where_no_other_is_left(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    assert diagnosis.suspect(5.1, is_complete=True).task == W0


def test_a_peer_that_failed_with_an_error_of_its_own_goes_before_an_earlier_victim(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    raises(diagnosis, W1, 5.2)
    assert diagnosis.suspect(5.2, is_complete=False).task == W1


def test_an_abort_goes_before_a_lost_peer_and_after_all_else(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    ends(diagnosis, W1, 5.2, -signal.SIGABRT)
    assert diagnosis.suspect(5.2, is_complete=False) is None
    assert diagnosis.suspect(6, is_complete=False).task == W1


def test_a_task_that_gave_up_waiting_for_a_peer_is_its_victim(diagnosis):
    raises(diagnosis, W0, 5, "worker-1 did not come", exit_code=75)
    ends(diagnosis, W0, 5.1, 75)
    assert diagnosis.suspect(5.1, is_complete=False) is None
    ends(diagnosis, W1, 5.2, -signal.SIGSEGV)
    assert diagnosis.suspect(5.2, is_complete=False).task == W1


def test_what_the_kernel_says_is_the_cause(diagnosis):
    ends(diagnosis, W0, 5, -signal.SIGKILL, cause="killed by the kernel's out-of-memory killer (x)")
    failure = diagnosis.suspect(5, is_complete=False)
    assert failure.cause == "killed by the kernel's out-of-memory killer (x)"
    assert failure.exit_code == 137


def test_a_task_that_is_forgotten_is_not_named(diagnosis):
    ends(diagnosis, W0, 5)
    diagnosis.forget(W0)
    assert diagnosis.suspect(5, is_complete=True) is None
    assert diagnosis.next_s() == math.inf
    assert not diagnosis.tasks


@pytest.mark.parametrize(
    "cause",
    [
        LOST,
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
    """A /proc, control groups and a kernel log in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "kmsg"
        self.log.write_text("6,1,1,-;Killed process 10 (old) total-vm:1kB\n")

    def process(self, pid: int, groups: str) -> None:
        path = self.root / "proc" / str(pid)
        path.mkdir(parents=True)
        (path / "cgroup").write_text(groups)

    def count(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def evidence(self, log="kmsg") -> KillEvidence:
        return KillEvidence(
            proc=self.root / "proc",
            v1_root=self.root / "v1",
            v2_root=self.root / "v2",
            kernel_log=self.root / log,
        )


@pytest.fixture
def kernel(tmp_path):
    made = Kernel(tmp_path)
    made.process(10, "9:name=systemd:/\n4:memory:/box\n0::/\n")
    made.process(11, "9:name=systemd:/\n4:memory:/box\n0::/\n")
    made.process(12, "0::/user.slice/box\n")
    made.count("v1/box/memory.oom_control", V1.format(4))
    made.count("v2/user.slice/box/memory.events", V2.format(0))
    return made


def test_a_counter_that_rose_tells_in_both_versions_of_control_groups(kernel):
    evidence = kernel.evidence()
    for pid, file, text in [
        (10, "v1/box/memory.oom_control", V1.format(5)),
        (12, "v2/user.slice/box/memory.events", V2.format(1)),
    ]:
        evidence.started(pid)
        kernel.count(file, text)
        cause = evidence.of_kill(pid)
        assert cause == (
            f"killed by the kernel's out-of-memory killer (oom_kill rose in {kernel.root / file})"
        )
    evidence.close()


def test_a_counter_that_did_not_rise_tells_nothing(kernel):
    evidence = kernel.evidence()
    evidence.started(10)
    assert evidence.of_kill(10) == ""


def test_a_counter_explains_as_many_deaths_as_it_rose(kernel):
    evidence = kernel.evidence()
    evidence.started(10)
    evidence.started(11)
    kernel.count("v1/box/memory.oom_control", V1.format(5))
    assert "oom_kill" in evidence.of_kill(10)
    assert evidence.of_kill(11) == ""


def test_inside_a_container_the_root_of_the_control_groups_is_read(kernel):
    kernel.process(13, "0::/../outside\n")
    kernel.count("v2/memory.events", V2.format(2))
    evidence = kernel.evidence()
    evidence.started(13)
    kernel.count("v2/memory.events", V2.format(3))
    assert "oom_kill rose" in evidence.of_kill(13)


def test_the_kernels_log_names_the_process_and_what_was_there_before_does_not_count(kernel):
    kernel.process(14, "0::/nowhere\n")
    kernel.process(15, "0::/nowhere\n")
    evidence = kernel.evidence()
    for pid in (10, 14, 15):
        evidence.started(pid)
    with open(kernel.log, "a") as log:
        log.write("3,2,2,-;Memory cgroup out of memory: Killed process 14 (python) total-vm:9kB\n")
    assert evidence.of_kill(14).endswith("(14 is in the kernel's log)")
    assert evidence.of_kill(15) == ""
    assert evidence.of_kill(10) == ""


def test_nothing_readable_is_no_evidence(kernel):
    evidence = kernel.evidence(log="no such log")
    evidence.started(999)
    assert evidence.of_kill(999) == ""
    evidence.close()
    evidence.close()


def test_the_files_of_this_machine_can_be_read_or_are_passed_over():
    evidence = KillEvidence()
    evidence.started(os.getpid())
    assert evidence.of_kill(os.getpid()) == ""
    evidence.close()
