"""Jobs by ssh over a network that fails: each goes on, or ends in one line that names the host."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.jobs import DEADLINE_S, PAUSE, children, report
from tests.networks.conftest import ADDRESSES
from tests.processes import agents
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE

TRAIN = "import runpy; runpy.run_module('tfdist.train', run_name='__main__', alter_sys=True)"
FLAGS = (
    *("--config.total_examples=2048", "--config.global_batch_size=32", "--config.checkpoints=8"),
    *("--config.backup_every_steps=3", "--config.seed=3"),
)
LAUNCH = ("--strategy", "multiworker", "--threads_per_task", "1")


def train(job, *flags, **more):
    return job(TRAIN, *LAUNCH, *flags, args=FLAGS, **more)


def summary():
    return json.loads(Path("run/summary.json").read_text())


@pytest.mark.timeout(1000)
def test_a_broken_and_restored_link_leaves_weights_unchanged(job, launch, network):
    first = train(job)
    assert first.end() == 0
    undisturbed = summary()
    Path("run").rename("undisturbed")
    alone = launch(TRAIN, *LAUNCH, "--workers", "2", "--run_dir", "run", args=FLAGS)
    assert alone.end() == 0
    assert summary()["weights_sha256"] == undisturbed["weights_sha256"]
    Path("run").rename("alone")

    network.slow_down(rate="20mbit")
    first = train(job, "--max_restarts", "1")
    first.read_until(r"Epoch [3-6]/8")
    cut_s = time.monotonic()
    network.set_link("down")
    first.read_until("lost host beta: no message for 8 s")
    assert time.monotonic() - cut_s < 10
    network.set_link("up")
    assert first.end() == 0
    attempts = report("run")["attempts"]
    assert [attempt["exit_code"] for attempt in attempts] == [EXIT_PEER_MISSING, 0]
    failure = attempts[0]["first_failure"]
    assert (failure["task"], failure["host"]) == ("worker-1", "beta")
    assert summary()["resumed_from_step"] > 0
    assert summary()["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary()["state_sha256"] == undisturbed["state_sha256"]


@pytest.mark.timeout(600)
def test_a_killed_agent_or_ssh_leaves_weights_unchanged(job, network):
    network.slow_down(rate="20mbit")
    first = train(job)
    assert first.end() == 0
    undisturbed = summary()
    for what in ("agent", "ssh"):
        Path("run").rename(f"before-{what}")
        first = train(job, "--max_restarts", "1")
        first.read_until(r"Epoch [3-6]/8")
        (ssh,) = (p for p, line in children(first.process.pid).items() if line.startswith("ssh"))
        for pid in agents() if what == "agent" else [ssh]:
            os.kill(pid, signal.SIGKILL)
        assert first.end() == 0
        attempts = report("run")["attempts"]
        assert [attempt["exit_code"] for attempt in attempts] == [EXIT_PEER_MISSING, 0]
        assert "worker-1 on beta failed first: lost host beta" in first.text
        assert summary()["weights_sha256"] == undisturbed["weights_sha256"]


SAYS = """
import tfdist
tfdist.make_strategy()
assert tfdist.broadcast("in the clear " * 5000) == "in the clear " * 5000
"""
LISTENS = """
import select, socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
print("on", flush=True)
heard = bytearray()
while not select.select([sys.stdin], [], [], 0)[0]:
    if select.select([wire], [], [], 0.1)[0]:
        heard += wire.recv(1 << 16)
print(len(heard), b"in the clear" in heard, b"\\x17\\x03\\x03" in heard)
"""


@pytest.mark.timeout(1000)
def test_an_elastic_job_continues_without_the_other_host(job, launch, network):
    alone = launch(TRAIN, *LAUNCH, "--elastic", "--workers=2", "--run_dir=run", args=FLAGS)
    assert alone.end() == 0
    undisturbed = summary()
    Path("run").rename("alone")

    network.slow_down(rate="20mbit")
    first = train(job, "--elastic")
    first.read_until(r"Epoch [3-6]/8")
    network.set_link("down")
    assert first.end() == 0
    assert "lost host beta" in first.text
    (attempt,) = report("run")["attempts"]
    assert len(attempt["views"][-1]["members"]) == 1
    assert summary()["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary()["state_sha256"] == undisturbed["state_sha256"]


def test_an_elastic_job_sends_no_plain_values(job, network):
    command = [*network.inside("beta"), sys.executable, "-c", LISTENS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as listener:
        assert listener.stdout.readline() == "on\n"
        assert job(SAYS, *LAUNCH, "--elastic").end() == 0
        size, is_plain, is_tls = listener.communicate("\n", timeout=DEADLINE_S)[0].split()
    assert int(size) > 65_000
    assert (is_plain, is_tls) == ("False", "True")


def test_a_firewall_error_names_the_host_and_port(job, network):
    with network.dropping("beta", "61000-65534"):
        first = train(job, "--startup_timeout_s", "15")
        assert first.end() == EXIT_PEER_MISSING
    (address,) = set(re.findall(rf"worker-1 \(({ADDRESSES['beta']}:\d+)", first.text))
    failure = report("run")["attempts"][0]["first_failure"]
    assert f"worker-1 ({address}" in failure["last_lines"][-1]


def lines(job):
    return job.text.strip().splitlines()


def test_an_ssh_error_is_one_line_with_its_fix(job, network, sshd):
    key = sshd.host_key
    sshd.know("ssh-ed25519 " + "A" * 68)
    refused = job(PAUSE)
    assert refused.end() == EXIT_USAGE
    assert "Host key verification failed" in lines(refused)[-1]

    sshd.know(key)
    (sshd.folder / "authorized_keys").write_text("")
    refused = job(PAUSE)
    assert refused.end() == EXIT_USAGE
    assert "Permission denied" in lines(refused)[-1]

    with network.dropping("beta", "22"):
        silent = job(PAUSE, "--startup_timeout_s", "3")
        assert silent.end() == EXIT_PEER_MISSING
    assert lines(silent)[-1].startswith("1 of 2 hosts connected within 3 s, without beta (rank 1)")

    unknown = job(PAUSE, hosts="alpha,gamma")
    assert unknown.end() == EXIT_USAGE
    assert lines(unknown)[-1].startswith(
        "gamma: cannot start an agent: ssh: Could not resolve hostname gamma"
    )


def test_a_launcher_elsewhere_has_no_tasks(job):
    show = "import os; print(os.environ['TF_CONFIG'])"
    first = job(show, hosts="beta:2")
    assert first.end() == 0
    at = ADDRESSES["beta"]
    assert re.search(rf'"worker": \["{at}:\d+", "{at}:\d+"\]', first.text)
    assert {task["host"] for task in report("run")["attempts"][0]["tasks"]} == {"beta"}


def test_tasks_of_ipv6_hosts_use_ipv6(job, network):
    addresses = {"alpha": "fd77::1", "beta": "fd77::2"}
    for host, address in addresses.items():
        network.on(host, "ip", "address", "add", f"{address}/64", "dev", "link0", "nodad")
    show = "import os; print(os.environ['TF_CONFIG'])"
    started = job(show, hosts=",".join(f"[{address}]" for address in addresses.values()))
    assert started.end() == 0
    assert re.search(r'"worker": \["\[fd77::1\]:\d+", "\[fd77::2\]:\d+"\]', started.text)
