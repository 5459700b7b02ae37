"""A peer that never comes is named, and the tasks that wait for it give up in time."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, encode, hold_ports
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE

DEADLINE_S = 180
CASES = {
    "chief of a ps job": (Task("chief", 0), "worker-1"),
    "worker of a ps job": (Task("worker", 0), "chief-0"),
    "worker of a multiworker job": (Task("worker", 0), "worker-1"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_task_names_whom_it_waits_for_and_gives_up(case, monkeypatch):
    task, missing = CASES[case]
    ports = hold_ports(4)
    a, b, chief, ps = (port.address for port in ports)
    cluster = ClusterSpec(chief=(chief,), worker=(a, b), ps=(ps,))
    if "multiworker" in case:
        cluster = ClusterSpec(worker=(a, b))
    options = JobOptions(startup_timeout_s=3.0)
    monkeypatch.setenv("TF_CONFIG", encode(TaskConfig(cluster=cluster, task=task, options=options)))
    command = [sys.executable, "-c", "import tfdist; tfdist.make_strategy()"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"still waiting after {DEADLINE_S} s\n{error.stderr}")
    assert done.returncode == EXIT_PEER_MISSING, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("tfdist: ")]
    address = cluster.address(Task(missing[:-2], int(missing[-1])))
    assert f"{missing} ({address}" in line
    assert "raise --startup_timeout_s" in line


def test_a_peer_that_dies_while_tensorflow_waits_for_it_is_given_up_on_too():
    program = (
        "import ctypes; from tfdist.strategy.rendezvous import last_resort\n"
        "with last_resort(timeout_s=2.0):\n"
        "    ctypes.PyDLL(None).sleep(600)  # holds Python's lock, as TensorFlow does\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert 'File "<string>", line 3' in done.stderr


def test_a_peer_that_dies_between_the_meeting_and_tensorflows_start_is_given_up_on(monkeypatch):
    port, dying = hold_ports(1)[0], socket.create_server(("127.0.0.1", 0))
    peer = f"127.0.0.1:{dying.getsockname()[1]}"
    cluster = ClusterSpec(worker=(port.address, peer))
    options = JobOptions(startup_timeout_s=5.0)
    config = TaskConfig(cluster=cluster, task=Task("worker", 0), options=options)
    monkeypatch.setenv("TF_CONFIG", encode(config))
    process = subprocess.Popen(
        [sys.executable, "-c", "import tfdist; tfdist.make_strategy()"],
        stderr=subprocess.PIPE,
        text=True,
    )
    dying.settimeout(DEADLINE_S)
    dying.accept()[0].close()  # worker 0 has seen its peer
    dying.close()
    try:
        _, told = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still waiting after {DEADLINE_S} s\n{process.communicate()[1]}")
    assert process.returncode == 1, told
    assert "Timeout" in told
    assert "in make_strategy" in told


def test_a_mistake_ends_a_program_without_the_launcher_in_one_line(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{'cluster': {}}")
    done = subprocess.run(
        [sys.executable, "-c", "import tfdist; tfdist.make_strategy()"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == EXIT_USAGE
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("tfdist: TF_CONFIG")]
