"""A job on several hosts, decided before anybody is spoken to: whose are which tasks."""

import json

import pytest

from tests import refusals
from tests.refusals import refused
from tfdist.cluster import Task
from tfdist.errors import UsageError
from tfdist.launch.job import ports_of_tasks, with_variables
from tfdist.launch.machine import Machine
from tfdist.launch.multihost.agreement import fingerprint
from tfdist.launch.multihost.hosts import (
    Group,
    decided_group,
    environment_of_tasks,
    group_alone,
    terms,
)
from tfdist.launch.options import parse
from tfdist.launch.plan import decided_strategy

TOKEN = "a secret that nobody must see"
WITH_TOKEN = {"TFDIST_RENDEZVOUS_TOKEN": TOKEN}


def decided(line, environ=None):
    return decided_group(parse(line.split()), WITH_TOKEN if environ is None else environ)


def refusal(line, environ=None):
    said = str(refusals.refusal(lambda: decided(line, environ)))
    assert TOKEN not in said
    return said


def test_the_list_says_how_many_workers_there_are_and_whose():
    options, group = decided("--hosts a:2,b:1 --node_rank 1")
    assert (options.strategy, options.workers) == ("multiworker", 3)
    assert (group.hosts, group.slots, group.rank, group.port) == (("a", "b"), (2, 1), 1, 2222)
    assert group.token == TOKEN.encode()
    workers = [Task("worker", index) for index in range(3)]
    assert group.tasks([0, 1]) == {0: tuple(workers[:2]), 1: (workers[2],)}
    assert group.tasks([1]) == {1: (workers[0],)}  # where the other did not come back


def test_under_ps_the_chief_is_on_the_first_host_and_the_ps_on_the_last():
    options, group = decided("--strategy ps --ps 1 --hosts a:2,b:2 --node_rank 0")
    assert (options.workers, group.num_ps) == (2, 1)
    assert group.tasks([0, 1]) == {
        0: (Task("chief", 0), Task("worker", 0)),
        1: (Task("worker", 1), Task("ps", 0)),
    }
    cluster = group.cluster({0: ["a:1", "a:2"], 1: ["b:3", "b:4"]})
    assert cluster.as_dict() == {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["b:4"]}


def test_the_cluster_has_each_address_at_its_task():
    _, group = decided("--hosts a:2,b:2 --node_rank 0")
    cluster = group.cluster({0: ["a:9", "a:2"], 1: ["b:8", "b:4"]})
    assert cluster.worker == ("a:9", "a:2", "b:8", "b:4")
    assert group.stand_in_cluster().worker[1:3] == ("a:2224", "b:2225")


def test_a_host_finds_itself_by_its_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "b.example.org")
    assert decided("--hosts a,b")[1].rank == 1
    assert "this host, b.example.org, is not there" in refusal("--hosts a,c")
    assert "this host, b.example.org, is more than once" in refusal("--hosts b,b")


def test_a_host_finds_itself_by_its_address(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "b.example.org")
    monkeypatch.setattr(
        "tfdist.launch.multihost.hosts.is_own_address", ["10.0.0.2", "[fd00::2]"].count
    )
    assert decided("--hosts 10.0.0.1,10.0.0.2")[1].rank == 1
    assert decided("--hosts [fd00::2],[fd00::1]")[1].rank == 0
    assert decided("--hosts 10.0.0.1,10.0.0.2 --node_rank 0")[1].rank == 0
    assert "is more than once" in refusal("--hosts b,10.0.0.2")


def test_a_list_of_one_host_is_a_job_on_this_machine():
    options, group = decided("--hosts a:3 --node_rank 0", {})
    assert group is None
    assert (options.workers, options.hosts) == (3, None)


def test_an_evaluator_is_one_task_more_on_the_host_of_the_chief():
    _, group = decided("--hosts a:2,b:1 --node_rank 0 --evaluator")
    evaluator = Task("evaluator", 0)
    assert group.tasks([0, 1])[0] == (Task("worker", 0), Task("worker", 1), evaluator)
    assert group.tasks([0])[0][-1] == evaluator  # where the other did not come back
    assert [group.num_tasks(rank) for rank in (0, 1)] == [3, 1]
    cluster = group.cluster({0: ["a:1", "a:2", "a:3"], 1: ["b:1"]})
    assert (cluster.worker, cluster.evaluator) == (("a:1", "a:2", "b:1"), ("a:3",))
    ps = decided("--hosts a:2,b:2 --node_rank 0 --ps 1 --evaluator")[1]
    assert ps.tasks([0, 1])[0] == (Task("chief", 0), Task("worker", 0), evaluator)
    assert ps.stand_in_cluster().evaluator == ("a:2225",)


def test_a_list_of_one_host_has_an_evaluator_where_there_are_several_tasks():
    options, group = decided("--hosts a:2 --node_rank 0 --evaluator", {})
    assert (group, options.workers, options.strategy) == (None, 2, "multiworker")
    assert options.evaluator


@pytest.mark.parametrize(
    ("line", "where", "code"),
    [
        ("--hosts a,b --node_rank 2", "--node_rank", "out-of-range"),
        ("--hosts a,b --node_rank -1", "--node_rank", "out-of-range"),
        ("--hosts a,b --strategy ps --node_rank 0", "--hosts", "too-few-tasks"),
        ("--hosts a,b --node_rank 0 --min_workers 3", "--min_workers", "out-of-range"),
        (
            "--hosts a,b --node_rank 0 --rendezvous_token_file /none",
            "--rendezvous_token_file",
            "unreadable-file",
        ),
        ("--hosts a,b --node_rank 0 --isolate", "--isolate", "exclusive"),
    ],
)
def test_what_does_not_go_with_several_hosts_is_refused(line, where, code):
    assert refused(lambda: decided(line)) == (where, code)


def test_several_hosts_need_a_token_and_loopback_none():
    assert refusal("--hosts a,b --node_rank 0", {}).startswith("TFDIST_RENDEZVOUS_TOKEN: ")
    assert refusal("--hosts 127.0.0.1,b --node_rank 0", {}).startswith("TFDIST_RENDEZVOUS_TOKEN: ")
    for loopback in ("127.0.0.1,127.0.0.2", "localhost,[::1]"):
        assert decided(f"--hosts {loopback} --node_rank 0", {})[1].token == b""


# ports


def ports_of(line, environ=None):
    options = with_variables(parse(line.split()), environ or {})
    options, group = decided_group(options, {**WITH_TOKEN, **(environ or {})})
    group = group or group_alone(options, decided_strategy(options, Machine(cpus=2)))
    return ports_of_tasks(options, group), group.port


def test_launchers_meet_at_the_first_port_of_a_range_and_tasks_have_the_others():
    hosts = "--hosts a:2,b --node_rank 0 --ports 20000-20003"
    assert ports_of(hosts) == ([20001, 20002, 20003], 20000)
    assert ports_of(f"{hosts} --rendezvous_port 2222") == ([*range(20000, 20004)], 2222)
    assert ports_of(f"{hosts} --rendezvous_port 20002") == ([20000, 20001, 20003], 20002)
    assert ports_of("--workers 2 --ports 20000-20001") == ([20000, 20001], 0)
    assert ports_of("--workers 2") == (None, 0)
    environ = {"TFDIST_PORTS": "20000-20003"}
    assert ports_of("--workers 2", environ)[0] == [*range(20000, 20004)]
    assert ports_of("--workers 2 --ports 7-9", environ)[0] == [7, 8, 9]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--workers 3 --ports 20000-20001", "20000-20001, 2 ports; expected 3 or more"),
        (
            "--hosts a:1,b:2 --node_rank 0 --ports 7-8",
            "expected 2 or more for the tasks of a host,",
        ),
        ("--hosts a:2,b:1 --node_rank 1 --evaluator --ports 7-9", "expected 3 or more"),
    ],
)
def test_a_range_that_is_too_small_is_one_line(line, said):
    with pytest.raises(UsageError) as error:
        ports_of(line)
    assert str(error.value).startswith("--ports: received ")
    assert said in str(error.value)


def test_a_range_of_ports_is_divided_among_the_jobs_of_slurm():
    _, port = ports_of("--ports 30000-30099", slurm(2, 0))
    assert port == 30000 + 32 * (7 % 3)


# Slurm


def slurm(nodes, rank, **more):
    return {
        **WITH_TOKEN,
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": f"{nodes}",
        "SLURM_STEP_NUM_TASKS": f"{nodes}",
        "SLURM_STEP_NUM_NODES": f"{nodes}",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURM_PROCID": f"{rank}",
        "SLURM_NODEID": f"{rank}",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": f"n{rank + 1}",
        **more,
    }


def test_srun_says_the_hosts_and_the_rank():
    options, group = decided("", slurm(3, 2))
    assert (group.hosts, group.slots, group.rank) == (("n1", "n2", "n3"), (1, 1, 1), 2)
    assert (options.strategy, options.workers) == ("multiworker", 3)
    assert group.port == 20_000 + 32 * 7


def test_under_srun_the_tasks_are_spread_over_the_nodes():
    options, group = decided("--strategy ps --workers 4 --ps 2", slurm(3, 0))
    assert (options.workers, group.slots, group.num_ps) == (4, (3, 2, 2), 2)
    assert decided("--workers 4", slurm(2, 0))[1].slots == (2, 2)
    assert decided("--ps 1", slurm(4, 0))[0].workers == 2
    assert refusal("--workers 2", slurm(3, 0)).startswith("--workers: received 2")
    assert refusal("--strategy single", slurm(3, 0)).startswith("--strategy: received single")


def test_several_launchers_that_know_nothing_of_each_other_can_be_asked_for():
    options, group = decided("", slurm(3, 2, TFDIST_CLUSTER="none"))
    assert group is None
    assert options.workers == 1


def test_several_launchers_on_a_node_are_refused():
    environ = slurm(2, 0, SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS="4")
    environ["SLURM_STEP_TASKS_PER_NODE"] = "2(x2)"
    assert "--ntasks-per-node=1" in refusal("", environ)


# what is alike


def alike(line, environ=None, *, text="x", tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    environ = {**WITH_TOKEN, **(environ or {})}
    options, group = decided_group(parse([*line.split(), str(script), "--lr", "1"]), environ)
    return terms(options, environ, group=group, program_file=str(script))


def test_hosts_are_alike_whatever_is_their_own(tmp_path):
    own = {"TF_CONFIG": "x", "TF_NUM_INTRAOP_THREADS": "4", "HOME": "/root", "TF_CPP_X": "1"}
    here = alike("--hosts a,b --node_rank 0", tmp_path=tmp_path)
    assert here == alike("--hosts a,b --node_rank 1 --start exec", own, tmp_path=tmp_path)
    assert TOKEN not in json.dumps(here)
    assert here["hosts"] == "a:1,b:1"
    assert here["argument 2"] == "1"


@pytest.mark.parametrize(
    ("line", "environ", "text", "name"),
    [
        ("--hosts a,b:2 --node_rank 1", {}, "x", "hosts"),
        ("--hosts a,b --node_rank 1 --max_restarts 2", {}, "x", "--max_restarts"),
        ("--hosts a,b --node_rank 1", {"TF_ENABLE_ONEDNN_OPTS": "0"}, "x", "TF_ENABLE_ONEDNN_OPTS"),
        ("--hosts a,b --node_rank 1", {}, "y", "its text"),
    ],
)
def test_what_would_make_another_job_of_it_differs(line, environ, text, name, tmp_path):
    here = alike("--hosts a,b --node_rank 0", tmp_path=tmp_path)
    there = alike(line, environ, text=text, tmp_path=tmp_path)
    assert here.get(name) != there.get(name)


@pytest.mark.parametrize("line", ["--config={}", "--config {}", "--config={}:dense"])
def test_a_config_file_of_another_text_differs(line, tmp_path):
    config, here = tmp_path / "mnist.py", []
    for text in ("seed = 1", "seed = 1", "seed = 2"):
        config.write_text(text)
        options, group = decided_group(
            parse(["--hosts", "a,b", "--node_rank", "0", *line.format(config).split()]), WITH_TOKEN
        )
        here.append(terms(options, {}, group=group, program_file="/none"))
    assert here[0] == here[1]
    assert {name for name in here[0] if here[0][name] != here[2][name]} == {f"the text of {config}"}
    assert fingerprint(here[0]) == fingerprint(here[1]) != fingerprint(here[2])


def test_the_tasks_do_not_get_the_token():
    assert environment_of_tasks({**WITH_TOKEN, "A": "b"}) == {"A": "b"}


def test_a_group_does_not_print_its_token():
    group = Group(hosts=("a",), slots=(1,), rank=0, port=1, token=b"hidden")
    assert "hidden" not in repr(group)
