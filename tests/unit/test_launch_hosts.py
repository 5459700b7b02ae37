"""A job on several hosts, decided before anybody is spoken to: whose are which tasks."""

import importlib
import json
import os

import pytest

from tests import refusals
from tests.refusals import refused
from tfdist.cluster import Task
from tfdist.launch.job import ports_of_tasks, with_variables
from tfdist.launch.machine import Machine
from tfdist.launch.multihost.agreement import TOKEN_VARIABLE, fingerprint, without_secrets
from tfdist.launch.multihost.hosts import (
    decided_group,
    environment_of_tasks,
    group_alone,
    is_own_address,
    own_address,
    terms,
)
from tfdist.launch.options import parse
from tfdist.launch.plan import decided_strategy

TOKEN = "a secret that nobody must see"
WITH_TOKEN = {TOKEN_VARIABLE: TOKEN}
AB = "--hosts a,b --node_rank 0"
CHIEF, EVALUATOR, PS = Task("chief", 0), Task("evaluator", 0), Task("ps", 0)
W0, W1, W2 = (Task("worker", index) for index in range(3))


def decided(line, environ=None):
    return decided_group(parse(line.split()), WITH_TOKEN if environ is None else environ)


def refusal(line, environ=None):
    said = str(refusals.refusal(lambda: decided(line, environ)))
    assert TOKEN not in said
    assert said.isprintable()
    return said


def test_the_list_says_how_many_workers_there_are_and_whose():
    options, group = decided("--hosts a:2,b:1 --node_rank 1")
    assert (options.strategy, options.workers) == ("multiworker", 3)
    assert (group.hosts, group.slots, group.rank, group.port) == (("a", "b"), (2, 1), 1, 2222)
    assert group.token == TOKEN.encode()
    assert TOKEN not in repr(group)
    assert group.tasks([0, 1]) == {0: (W0, W1), 1: (W2,)}
    assert group.tasks([1]) == {1: (W0,)}  # where the other did not come back
    assert group.cluster({0: ["a:9", "a:2"], 1: ["b:8"]}).worker == ("a:9", "a:2", "b:8")
    assert group.stand_in_cluster().worker[1:] == ("a:2224", "b:2225")


def test_under_ps_the_chief_is_on_the_first_host_and_the_ps_on_the_last():
    options, group = decided("--strategy ps --ps 1 --hosts a:2,b:2 --node_rank 0")
    assert (options.workers, group.num_ps) == (2, 1)
    assert group.tasks([0, 1]) == {0: (CHIEF, W0), 1: (W1, PS)}
    cluster = group.cluster({0: ["a:1", "a:2"], 1: ["b:3", "b:4"]})
    assert cluster.as_dict() == {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["b:4"]}


def test_an_evaluator_is_one_task_more_on_the_host_of_the_chief():
    _, group = decided("--hosts a:2,b:1 --node_rank 0 --evaluator")
    assert group.tasks([0, 1])[0] == (W0, W1, EVALUATOR)
    assert group.tasks([0])[0][-1] == EVALUATOR  # where the other did not come back
    assert [group.num_tasks(rank) for rank in (0, 1)] == [3, 1]
    cluster = group.cluster({0: ["a:1", "a:2", "a:3"], 1: ["b:1"]})
    assert (cluster.worker, cluster.evaluator) == (("a:1", "a:2", "b:1"), ("a:3",))
    ps = decided("--hosts a:2,b:2 --node_rank 0 --ps 1 --evaluator")[1]
    assert ps.tasks([0, 1])[0] == (CHIEF, W0, EVALUATOR)
    assert ps.stand_in_cluster().evaluator == ("a:2225",)


def test_a_list_of_one_host_is_a_job_on_this_machine():
    options, group = decided("--hosts a:3 --node_rank 0 --evaluator", {})
    assert group is None
    assert (options.workers, options.hosts, options.evaluator) == (3, None, True)


def test_a_host_finds_itself_by_its_name_or_address(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "b.example.org")
    monkeypatch.setattr(
        "tfdist.launch.multihost.hosts.is_own_address", ["10.0.0.2", "[fd00::2]"].count
    )
    ranks = {
        "a,b": 1,
        "10.0.0.1,10.0.0.2": 1,
        "[fd00::2],[fd00::1]": 0,
        "10.0.0.1,10.0.0.2 --node_rank 0": 0,
    }
    assert {line: decided(f"--hosts {line}")[1].rank for line in ranks} == ranks
    assert "this host, b.example.org, is not there" in refusal("--hosts a,c")
    for twice in ("b,b", "b,10.0.0.2"):
        assert "this host, b.example.org, is more than once" in refusal(f"--hosts {twice}")


def test_own_addresses_are_bound_to_and_others_refused():
    hosts = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]")
    assert [host for host in hosts if is_own_address(host)] == []
    assert own_address("127.0.0.2", other="127.0.0.1") == "127.0.0.2"
    for host in ("192.0.2.1", "no-such-host.invalid"):
        refusal = refused(lambda host=host: own_address(host, other="127.0.0.1"))
        assert refusal == ("--hosts", "not-this-host")


@pytest.mark.parametrize(
    ("line", "where", "code"),
    [
        ("--hosts a,b --node_rank 2", "--node_rank", "out-of-range"),
        ("--hosts a,b --node_rank -1", "--node_rank", "out-of-range"),
        (f"{AB} --strategy ps", "--hosts", "too-few-tasks"),
        (f"{AB} --min_workers 3", "--min_workers", "out-of-range"),
        (f"{AB} --isolate", "--isolate", "exclusive"),
    ],
)
def test_what_does_not_go_with_several_hosts_is_refused(line, where, code):
    assert refused(lambda: decided(line)) == (where, code)


# The token


def test_several_hosts_need_a_token_from_a_file_or_else_the_environment(tmp_path):
    for hosts in ("a,b", "127.0.0.1,b"):
        line = f"--hosts {hosts} --node_rank 0"
        assert refused(lambda line=line: decided(line, {})) == (TOKEN_VARIABLE, "no-token")
    for loopback in ("127.0.0.1,127.0.0.2", "localhost,[::1]"):
        assert decided(f"--hosts {loopback} --node_rank 0", {})[1].token == b""
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN + "\n")
    for environ in ({}, {TOKEN_VARIABLE: "x" * 20}):
        _, group = decided(f"{AB} --rendezvous_token_file {tmp_path}/token", environ)
        assert group.token == TOKEN.encode()
    assert environment_of_tasks({**WITH_TOKEN, "A": "b"}) == {"A": "b"}


def test_a_token_that_cannot_be_used_is_one_line_without_it(tmp_path):
    (tmp_path / "binary").touch(0o600)
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    for path in ("none", "", "binary"):
        line = f"{AB} --rendezvous_token_file {tmp_path / path}"
        wanted = ("--rendezvous_token_file", "unreadable-file")
        assert refused(lambda line=line: decided(line, {})) == wanted
    for token in ("abc", ""):
        environ = {TOKEN_VARIABLE: token}
        assert refused(lambda e=environ: decided(AB, e)) == (TOKEN_VARIABLE, "token-length")
    secret = TOKEN.replace(" ", "-")
    for given in (secret, f"sub/{secret}", secret + "x" * 300, f"{__file__}/{secret}"):
        assert secret not in refusal(f"{AB} --rendezvous_token_file {given}")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604, 0o666])
def test_a_token_file_that_others_can_read_is_refused(tmp_path, mode):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(mode)
    line = f"{AB} --rendezvous_token_file {token}"
    wanted = ("--rendezvous_token_file", "readable-by-others")
    assert refused(lambda: decided(line, {})) == wanted
    assert f"chmod 600 {token}" in refusal(line, {})


def test_a_group_may_read_the_token_file_of_another_owner(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o640)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(token).st_uid + 1)
    assert decided(f"{AB} --rendezvous_token_file {token}", {})[1].token == TOKEN.encode()


@pytest.mark.parametrize("program", ["launch", "submit", "tune"])
@pytest.mark.parametrize("between", ["=", " "])
def test_no_command_line_takes_a_token_or_repeats_it(program, between, capsys):
    words = f"--rendezvous_token{between}correct-horse-battery-staple".split()
    first = ["--to", "slurm"] if program == "submit" else []
    main = importlib.import_module(f"tfdist.{program}{'.__main__' * (program != 'tune')}").main
    assert main([*first, *words, "train.py"]) == 2
    printed = capsys.readouterr()
    assert "--rendezvous_token" in printed.err
    assert printed.err.count("\n") == 1
    assert "correct-horse" not in printed.out + printed.err


def test_the_values_of_secrets_are_marked_and_still_compared():
    args = ["--lr", "0.1", f"--api_key={TOKEN}", "--token", TOKEN, "x"]
    shown = without_secrets(args, key=b"k")
    assert TOKEN not in " ".join(shown)
    assert shown[:2] == ["--lr", "0.1"]
    assert shown[5] == "x"
    assert shown == without_secrets(args, key=b"k")
    assert shown != without_secrets([*args[:4], "another", "x"], key=b"k")
    assert shown != without_secrets(args, key=b"another")


# Ports


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
    # A range of ports is divided among the jobs of Slurm.
    assert ports_of("--ports 30000-30099", slurm(2, 0))[1] == 30000 + 32 * (7 % 3)


@pytest.mark.parametrize(
    "line",
    [
        "--workers 3 --ports 20000-20001",
        "--hosts a:1,b:2 --node_rank 0 --ports 7-8",
        "--hosts a:2,b:1 --node_rank 1 --evaluator --ports 7-9",
    ],
)
def test_a_range_that_is_too_small_is_refused(line):
    assert refused(lambda: ports_of(line)) == ("--ports", "too-few-ports")


# Slurm


def slurm(nodes, rank, **more):
    return {
        **WITH_TOKEN,
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": f"{nodes}",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURM_PROCID": f"{rank}",
        "SLURMD_NODENAME": f"n{rank + 1}",
        **more,
    }


def test_srun_says_the_hosts_and_the_rank():
    options, group = decided("", slurm(3, 2))
    assert (group.hosts, group.slots, group.rank) == (("n1", "n2", "n3"), (1, 1, 1), 2)
    assert (options.strategy, options.workers) == ("multiworker", 3)
    assert group.port == 20_000 + 32 * 7
    options, group = decided("", slurm(3, 2, TFDIST_CLUSTER="none"))
    assert (options.workers, group) == (1, None)
    two = slurm(2, 0, SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE="2(x2)")
    assert "--ntasks-per-node=1" in refusal("", two)


def test_under_srun_the_tasks_are_spread_over_the_nodes():
    options, group = decided("--strategy ps --workers 4 --ps 2", slurm(3, 0))
    assert (options.workers, group.slots, group.num_ps) == (4, (3, 2, 2), 2)
    assert decided("--workers 4", slurm(2, 0))[1].slots == (2, 2)
    assert decided("--ps 1", slurm(4, 0))[0].workers == 2
    few = refused(lambda: decided("--workers 2", slurm(3, 0)))
    assert few == ("--workers", "too-few-tasks")
    alone = refused(lambda: decided("--strategy single", slurm(3, 0)))
    assert alone == ("--strategy", "strategy-of-one-host")


# What is alike


def alike(tmp_path, line="--hosts a,b --node_rank 1", environ=None, *, text="x", args="--lr 1"):
    script, config = tmp_path / "train.py", tmp_path / "mnist.py"
    script.write_text(text)
    environ = {**WITH_TOKEN, **(environ or {})}
    words = [*line.split(), str(script), *args.format(config).split()]
    options, group = decided_group(parse(words), environ)
    return terms(options, environ, group=group, program_file=str(script))


def test_hosts_are_alike_whatever_is_their_own(tmp_path):
    own = {"TF_CONFIG": "x", "TF_NUM_INTRAOP_THREADS": "4", "HOME": "/root", "TF_CPP_X": "1"}
    here = alike(tmp_path, AB)
    assert here == alike(tmp_path, "--hosts a,b --node_rank 1 --start exec", own)
    assert TOKEN not in json.dumps(here)
    missing = alike(tmp_path, args="--config {}")
    assert missing[f"the text of {tmp_path / 'mnist.py'}"] == "not readable"
    assert here["hosts"] == "a:1,b:1"
    assert here["argument 2"] == "1"


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("hosts", {"line": "--hosts a,b:2 --node_rank 1"}),
        ("--max_restarts", {"line": f"{AB} --max_restarts 2"}),
        ("TF_ENABLE_ONEDNN_OPTS", {"environ": {"TF_ENABLE_ONEDNN_OPTS": "0"}}),
        ("its text", {"text": "y"}),
        ("argument 2", {"args": "--lr 2"}),
    ],
)
def test_what_would_make_another_job_of_it_differs(name, there, tmp_path):
    assert alike(tmp_path, AB).get(name) != alike(tmp_path, **there).get(name)


@pytest.mark.parametrize("args", ["--config={}", "--config {}", "--config={}:dense"])
def test_a_config_file_of_another_text_differs(args, tmp_path):
    config, found = tmp_path / "mnist.py", []
    for text in ("seed = 1", "seed = 1", "seed = 2"):
        config.write_text(text)
        found.append(alike(tmp_path, args=args))
    same, again, other = found
    assert same == again
    assert {name for name in same if same[name] != other[name]} == {f"the text of {config}"}
    assert fingerprint(same) == fingerprint(again) != fingerprint(other)
