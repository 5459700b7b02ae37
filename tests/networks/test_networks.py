"""Jobs over a network that fails: each goes on, or ends in one line with the host and the port."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess import jobs
from tests.multiprocess.jobs import PAUSE, report
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE

ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}
NOBODY = "10.77.0.9"
TRAIN = "import runpy; runpy.run_module('tfdist.train', run_name='__main__', alter_sys=True)"
FLAGS = (
    *("--config.total_examples=2048", "--config.global_batch_size=32", "--config.checkpoints=8"),
    *("--config.backup_every_steps=3", "--config.seed=3"),
)
LAUNCH = ("--strategy", "multiworker", "--threads_per_task", "1")


def train(on, *flags):
    return [on(host, TRAIN, *LAUNCH, *flags, args=FLAGS) for host in ("beta", "alpha")]


def summary():
    return json.loads(Path("run/summary.json").read_text())


@pytest.mark.timeout(1000)
def test_a_slow_link_that_goes_down_and_comes_back_gives_the_weights_of_an_undisturbed_job(
    on, network
):
    other, first = train(on)
    assert (other.end(), first.end()) == (0, 0)
    undisturbed = summary()
    Path("run").rename("undisturbed")

    network.slow_down(rate="20mbit")
    other, first = train(on, "--max_restarts", "1", "--host_timeout_s", "5")
    first.read_until(r"step (1[2-9]|[2-4]\d) of 64")
    network.set_link("down")
    first.read_until("host beta is gone: no word for 5 s")
    other.read_until("the launcher of alpha is gone: no word for 5 s")
    network.set_link("up")
    assert (other.end(), first.end()) == (0, 0)
    attempts = report("run")["attempts"]
    assert [attempt["exit_code"] for attempt in attempts] == [EXIT_PEER_MISSING, 0]
    failure = attempts[0]["first_failure"]
    assert (failure["task"], failure["host"]) == ("worker-1", "beta")
    assert summary()["resumed_from_step"] > 0
    assert summary()["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary()["state_sha256"] == undisturbed["state_sha256"]


def test_the_host_that_is_left_trains_to_the_end_where_that_was_asked_for(on, network):
    network.slow_down(rate="20mbit")
    flags = ("--max_restarts", "1", "--host_timeout_s", "5", "--min_workers", "1")
    other, first = train(on, *flags, "--startup_timeout_s", "40")
    first.read_until(r"step (1[2-9]|[2-4]\d) of 64")
    network.set_link("down")
    assert (other.end(), first.end()) == (EXIT_PEER_MISSING, 0)
    assert "going on without beta (rank 1), with 1 worker" in first.text
    assert re.search(r"alpha:2222: .* not reached in \d+ s: Network is unreachable", other.text)
    assert summary()["resumed_from_step"] > 0
    assert (summary()["workers"], summary()["steps"]) == (1, 64)


def test_a_firewall_before_a_tasks_port_ends_in_a_line_with_host_and_port(on, network):
    with network.dropping("beta", "61000-65534"):
        other, first = train(on, "--startup_timeout_s", "15")
        codes = (other.end(), first.end())
    assert codes == (EXIT_PEER_MISSING, EXIT_PEER_MISSING)
    (address,) = set(re.findall(rf"worker-1 \(({ADDRESSES['beta']}:\d+)", first.text))
    failure = report("run")["attempts"][0]["first_failure"]
    assert f"worker-1 ({address}" in failure["last_lines"][-1]


def test_a_firewall_before_the_rendezvous_ends_in_a_line_with_host_and_port(on, network):
    with network.dropping("alpha", "2222"):
        other = on("beta", PAUSE, "--startup_timeout_s", "3")
        first = on("alpha", PAUSE, "--startup_timeout_s", "3")
        assert (other.end(), first.end()) == (EXIT_PEER_MISSING, EXIT_PEER_MISSING)
    assert re.match(r"alpha:2222: .* not reached in \d+ s: timed out", other.text)
    assert first.text.startswith("1 of 2 hosts are there: waited 3 s for beta (rank 1) at alpha:")


def test_a_host_finds_itself_by_its_address(network):
    program = (
        "import sys; from tfdist.launch.multihost.hosts import rank_of;"
        "print(rank_of(sys.argv[1:], node_rank=None))"
    )
    for rank, host in enumerate(ADDRESSES):
        line = [*network.inside(host), sys.executable, "-c", program, *ADDRESSES.values()]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        assert done.stdout == f"{rank}\n", done.stderr


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (
            {**ADDRESSES, "alpha": NOBODY},
            EXIT_PEER_MISSING,
            r"alpha:2222: .* not reached in \d+ s: (timed out|No route to host)",
        ),
        (
            {"beta": ADDRESSES["beta"]},
            EXIT_PEER_MISSING,
            r"alpha:2222: .* not reached in \d+ s: (Temporary failure|Name or service)",
        ),
        (
            {**ADDRESSES, "beta": NOBODY},
            EXIT_USAGE,
            rf"--hosts: received 'beta' for this machine, which is {NOBODY}, no address",
        ),
    ],
    ids=["of nobody", "unknown", "its own"],
)
def test_a_wrong_name_is_a_line_with_the_host(on, network, names, code, said):
    network.name("beta", names)
    other = on("beta", PAUSE, "--startup_timeout_s", "3")
    assert other.end() == code
    assert re.match(said, other.text)
    assert len(other.text.splitlines()) == 1


def test_a_wrong_name_of_another_on_host_0_does_not_matter(on, network):
    network.name("alpha", {**ADDRESSES, "beta": NOBODY})
    show = "import os; print(os.environ['TF_CONFIG'])"
    other, first = on("beta", show), on("alpha", show)
    assert (other.end(), first.end()) == (0, 0)
    assert ADDRESSES["beta"] in first.text
    assert NOBODY not in first.text


def test_hosts_of_ipv6_meet_and_tell_their_tasks_so(launch, network):
    addresses = {"alpha": "fd77::1", "beta": "fd77::2"}
    for host, address in addresses.items():
        network.on(host, "ip", "address", "add", f"{address}/64", "dev", "link0", "nodad")
    listed = ("--hosts", ",".join(f"[{address}]" for address in addresses.values()))
    show = "import os; print(os.environ['TF_CONFIG'])"
    started = [
        launch(
            show, *listed, "--node_rank", str(rank), "--run_dir", "run",
            command=(*network.inside(host), *jobs.LAUNCH),
            env={"TFDIST_RENDEZVOUS_TOKEN": "known to both hosts"},
        )
        for rank, host in enumerate(addresses)
    ]  # fmt: skip
    assert [job.end() for job in started] == [0, 0]
    for job in started:
        assert re.search(r'"worker": \["\[fd77::1\]:\d+", "\[fd77::2\]:\d+"\]', job.text)


def test_the_rendezvous_listens_on_the_jobs_interface_alone(on, network):
    network.on("alpha", "ip", "address", "add", "10.78.0.1/24", "dev", "link0")
    first = on("alpha", PAUSE, "--startup_timeout_s", "40")
    first.read_until("waiting for beta")
    listening = Path("listening")
    network.on("alpha", "sh", "-c", f"ss -Hltn > {listening}")
    assert re.findall(r"(\S+):2222 ", listening.read_text()) == [ADDRESSES["alpha"]]
