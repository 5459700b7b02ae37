"""Errors of a lost peer, and what the kernel tells of a process: its state, and why it was killed.

Who failed first: test_supervisor.
"""

import os
import subprocess
import sys

import pytest

from tfdist.launch.diagnosis import is_lost_peer
from tfdist.launch.machine import KillEvidence, proc_state

LOST = (
    "UnavailableError: Collective ops is aborted by: Connection reset by peer",
    "UnavailableError: Graph execution error:",
    "AbortedError: {{function_node __wrapped__...}}",
    "InternalError: Socket closed",
    "InternalError: Graph execution error:",
    "CancelledError: heartbeat timeout",
    "DeadlineExceededError: Barrier timed out. coordination service",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
)
OF_ITS_OWN = (
    *("ValueError: Peer", "InternalError: cuDNN failed", "killed by SIGKILL", "exit code 1"),
    "MyUnavailableErrors",
)


@pytest.mark.parametrize("cause", [*LOST, *OF_ITS_OWN])
def test_errors_of_a_lost_peer_are_recognized(cause):
    assert is_lost_peer(cause) is (cause in LOST)


def test_the_process_state_is_read_after_the_name():
    program = "import os; open('/proc/self/comm', 'w').write('x) Z (1 2'); os.write(1, b'.');"
    command = [sys.executable, "-c", program + "import signal; signal.pause()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        try:
            assert proc_state(process.pid) in ("R", "S", "D")
            process.send_signal(19)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert proc_state(process.pid) == "T"
        finally:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert proc_state(process.pid) == "Z"
    assert proc_state(process.pid) is None


# Why a process was killed, read from files as the kernel writes them.

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 7\noom 3\noom_kill {}\noom_group_kill 0\n"


@pytest.fixture
def write(tmp_path):
    """Writes a file of the kernel's."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("9:name=systemd:/\n4:memory:/box\n0::/\n", "memory/box/memory.oom_control", V1),
        ("0::/user.slice/box\n", "user.slice/box/memory.events", V2),
        ("0::/../outside\n", "memory.events", V2),  # inside a container
    ],
)
def test_a_counter_explains_as_many_deaths_as_it_rose(tmp_path, write, groups, file, text):
    evidence = KillEvidence(proc=tmp_path / "proc", cgroups=tmp_path / "cgroups")
    write(f"cgroups/{file}", text.format(4))
    for pid in (10, 11):
        write(f"proc/{pid}/cgroup", groups)
        evidence.started(pid)
    write(f"cgroups/{file}", text.format(5))
    path = tmp_path / "cgroups" / file
    killed = f"killed by the kernel's out-of-memory killer (oom_kill rose in {path})"
    assert [evidence.of_kill(pid) for pid in (10, 11)] == [killed, ""]
    evidence.started(999)
    assert evidence.of_kill(999) == ""
