"""A job on several hosts, decided before any agent is started: the tasks of each."""

import io
import sys
from functools import partial
from unittest.mock import Mock

import pytest

from tests.processes import script
from tests.refusals import refusal, refused
from tests.unit.histories import short
from tests.unit.test_cluster_environment import recorded
from tfdist.launch.ending import SPAWN
from tfdist.launch.job_run import run_job
from tfdist.launch.multihost import on_ray
from tfdist.launch.multihost.agents import shell_of
from tfdist.launch.multihost.host_agreement import passed_variables
from tfdist.launch.multihost.hosts import (
    certificate,
    decided_group,
    is_own_address,
    is_this_host,
    own_address,
    terms,
)
from tfdist.launch.options import parse

SECRET = "a secret that nobody must see"


def decided(line, environ=None):
    return decided_group(parse(line.split()), environ or {})


@pytest.fixture(autouse=True)
def _on_host_a(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "a.example.org")
    unknown = Mock(side_effect=OSError("unknown"))
    monkeypatch.setattr("tfdist.launch.multihost.hosts.resolve", unknown)


def slurm(nodes, **more):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"n[1-{nodes}]"}
    return {**job, "SLURMD_NODENAME": "n1", **more}


@pytest.mark.parametrize(
    ("line", "environ", "strategy", "tasks"),
    [
        ("--hosts a:2,b:1", {}, "multiworker", "a: w0 w1; b: w2"),
        ("--hosts b", {}, "multiworker", "launcher: ; b: w0"),
        ("--hosts b:2,c --evaluator", {}, "multiworker", "launcher: ; b: w0 w1 e0; c: w2"),
        ("--elastic --hosts a,b:2", {}, "elastic", "a: w0; b: w1 w2"),
        # Under ps the chief is first and servers are last. An evaluator is on the chief's host.
        ("--strategy ps --ps 1 --hosts a:2,b:2", {}, "ps", "a: c0 w0; b: w1 p0"),
        ("--hosts a:2,b:2 --ps 1 --evaluator", {}, "ps", "a: c0 w0 e0; b: w1 p0"),
        ("--hosts a:2,b:1 --evaluator", {}, "multiworker", "a: w0 w1 e0; b: w2"),
        # Slurm's allocation, also of a launcher on its login node.
        ("--on slurm", slurm(3), "multiworker", "n1: w0; n2: w1; n3: w2"),
        (
            *("--on slurm", slurm(2, SLURMD_NODENAME="")),
            *("multiworker", "launcher: ; n1: w0; n2: w1"),
        ),
        ("--on slurm --workers 4", slurm(2), "multiworker", "n1: w0 w1; n2: w2 w3"),
        ("--on slurm --ps 1", slurm(4), "ps", "n1: c0; n2: w0; n3: w1; n4: p0"),
        (
            *("--on slurm --strategy ps --workers 4 --ps 2", slurm(3)),
            *("ps", "n1: c0 w0 w1; n2: w2 w3; n3: p0 p1"),
        ),
    ],
)
def test_a_list_of_hosts_gives_the_tasks_of_each_host(line, environ, strategy, tasks):
    options, group = decided(line, environ)
    by_rank = group.tasks(range(len(group.hosts)))
    shown = [
        f"{host}: {short(' '.join(map(str, by_rank[i])))}" for i, host in enumerate(group.hosts)
    ]
    assert (options.strategy, "; ".join(shown)) == (strategy, tasks)
    counts = [tasks.count(f" {letter}") for letter in "wp"]
    assert (options.workers, group.num_ps, group.rank) == (*counts, 0)
    assert [group.num_tasks(rank) for rank in by_rank] == [len(each) for each in by_rank.values()]
    at = {r: [f"{group.hosts[r]}:{n + 1}" for n in range(len(by_rank[r]))] for r in by_rank}
    cluster = group.cluster(at)
    assert {r: [*map(cluster.address, by_rank[r])] for r in by_rank} == at


@pytest.mark.parametrize(
    ("line", "present", "tasks"),
    [
        ("--hosts a:2,b:1", [1], {1: "w0"}),
        ("--hosts a:2,b:1 --evaluator", [0], {0: "w0 w1 e0"}),
        ("--hosts b:2,c --evaluator", [0, 2], {0: "", 2: "w0"}),
    ],
)
def test_the_tasks_of_present_hosts_are_a_smaller_job(line, present, tasks):
    found = decided(line)[1].tasks(present)
    assert {rank: short(" ".join(map(str, each))) for rank, each in found.items()} == tasks


@pytest.mark.parametrize(
    "line", ["a:3 --evaluator", "127.0.0.1:3 --evaluator", "a:3 --evaluator --rsh x --env HOME"]
)
def test_a_list_of_only_this_host_is_local(line):
    options, group = decided(f"--hosts {line}")
    assert group is None
    assert (options.where, options.workers, options.hosts) == ("local", 3, None)
    assert (options.evaluator, options.rsh, options.env) == (True, None, None)


def test_the_first_host_is_recognized_by_name_or_address(monkeypatch):
    monkeypatch.setattr("tfdist.launch.multihost.hosts.is_own_address", ["10.0.0.2"].count)
    first = {"a,b": "a", "10.0.0.2,b": "10.0.0.2", "localhost,b": "localhost", "b,a": "launcher"}
    assert {line: decided(f"--hosts {line}")[1].hosts[0] for line in first} == first
    assert decided("--hosts b,c --on local")[1].hosts[0] == "b"
    assert is_this_host("n1", {"SLURMD_NODENAME": "n1"})


def test_own_addresses_are_bound_to_and_others_refused(monkeypatch):
    monkeypatch.undo()
    hosts = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]")
    assert [host for host in hosts if is_own_address(host)] == []
    assert own_address("127.0.0.2", other="127.0.0.1") == "127.0.0.2"
    for host in ("192.0.2.1", "no-such-host.invalid"):
        found = refused(lambda host=host: own_address(host, other="127.0.0.1"))
        assert found == ("--hosts", "not-this-host")


@pytest.mark.parametrize(
    ("text", "says"), [(None, ""), ("echo 'no entropy' >&2; exit 1", "openssl fails: no entropy. ")]
)
def test_a_missing_or_failing_openssl_is_an_error_before_the_start(
    monkeypatch, tmp_path, text, says
):
    if text:
        script(tmp_path / "openssl", text)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refusal(certificate)
    assert (error.where, error.code) == ("--elastic", "missing-package")
    assert says in str(error)


def test_agents_get_the_variables_of_tasks_and_named_ones():
    own = dict.fromkeys(("HOME", "SECRET_KEY", "TF_CONFIG", "_TFDIST_JOB", "TFDIST_HOSTS"), "x")
    passed = dict.fromkeys(("TF_X", "KERAS_HOME", "TFDIST_RING", "PYTHONPATH", "MY_VAR"), "x")
    assert passed_variables({**own, **passed}, ["MY_VAR"]) == passed
    assert parse(["--hosts", "a,b", "--env", "A", "--env=B", "x.py"]).env == "A,B"
    for value, is_passed in (("-1", True), ("", True), ("0", False)):
        environ = {"CUDA_VISIBLE_DEVICES": value}
        assert passed_variables(environ, ()) == (environ if is_passed else {})


def test_a_custom_shell_command_contains_the_host():
    assert shell_of("ssh", None)[0] == "ssh"
    assert shell_of("ssh", "ssh -p 2222") == ["ssh", "-p", "2222", "{host}"]
    assert shell_of("ssh", "kubectl exec -i {host} -- sh -c")[-2:] == ["sh", "-c"]


# Slurm


def step(nodes):
    return slurm(
        nodes,
        SLURM_STEP_ID="0",
        SLURM_STEP_NUM_TASKS=f"{nodes}",
        SLURM_STEP_NODELIST=f"n[1-{nodes}]",
        SLURM_STEP_TASKS_PER_NODE=f"1(x{nodes})",
        SLURM_PROCID="0",
    )


def planned_here(environ, *, program="this"):
    """Exit code of a job on this machine, of which only the plan is printed."""
    return run_job(parse(["--dry_run", "--strategy=single", "-m", program]), environ=environ)


def test_several_launchers_in_a_step_are_refused():
    for start in (planned_here, partial(decided, "--on slurm")):
        assert refused(lambda start=start: start(step(2))) == ("srun", "nested-launcher")
    for environ in (slurm(3), step(1), {**step(2), "TFDIST_CLUSTER": "none"}):
        assert planned_here(environ) == 0


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mpi_open_mpi_one_host", "mpi"),
        ("mpi_open_mpi_two_hosts", "mpi"),
        ("mpi_hydra_one_host", "mpi"),
        ("kubernetes_job_set", "hosts"),
        ("skypilot_two_nodes", "skypilot"),
        ("lws_group_of_three", "lws"),
        ("sagemaker_two_hosts", "sagemaker"),
    ],
)
def test_a_launcher_of_several_processes_is_refused(name, source):
    for environ in recorded(name):
        assert refused(lambda e=environ: planned_here(e)) == (source, "nested-launcher")
        assert planned_here({**environ, "TFDIST_CLUSTER": "none"}) == 0
        in_a_task = {**environ, "_TFDIST_JOB": "mark"}
        assert planned_here(in_a_task) == 0
        assert planned_here(environ, program=SPAWN) == 0  # any process may call tfdist.spawn


def test_a_launcher_with_hosts_may_run_on_one_node_of_a_platform():
    hosts = partial(run_job, parse(["--hosts", "b:2,c:2", "--rsh", "false", "-m", "this"]))
    for name in ("skypilot_two_nodes", "kubernetes_job_set"):
        error = refusal(lambda name=name: hosts(environ=recorded(name)[0]))
        assert error.code == "cannot-start-agent"
    ranks = recorded("mpi_open_mpi_one_host")[0]
    assert refused(lambda: hosts(environ=ranks)) == ("mpi", "nested-launcher")


@pytest.mark.parametrize("name", ["mpi_open_mpi_one_rank", "slurm_sbatch_plain", "slurm_srun_n1"])
def test_a_launcher_that_runs_once_is_not_refused(name):
    assert [planned_here(environ) for environ in recorded(name)] == [0]


def test_an_allocation_has_a_worker_on_each_node():
    few = refused(lambda: decided("--on slurm --workers 2", slurm(3)))
    assert few == ("--workers", "exclusive")
    alone = refused(lambda: decided("--on slurm --strategy single", slurm(3)))
    assert alone == ("--strategy", "exclusive")


# What is alike


def alike(tmp_path, environ=None, *, text="x", args="--lr 1"):
    script, config = tmp_path / "train.py", tmp_path / "mnist.py"
    script.write_text(text)
    program = parse([str(script), *args.format(config).split()]).program
    return terms(environ or {}, program=program, search=())


def test_launchers_of_a_ray_cluster_reserve_different_groups(monkeypatch):
    answers = (Mock(stdout=io.StringIO('{"slots": [2]}\n')) for _ in range(2))
    monkeypatch.setattr(on_ray.subprocess, "Popen", lambda *args, **options: next(answers))
    one, other = (on_ray.reserve(2, within_s=1.0) for _ in range(2))  # containers share their ids
    assert one[1] == other[1] == (2,)
    assert one[0] != other[0]


def test_a_ray_cluster_without_cpus_has_no_room(monkeypatch, capsys):
    ray = Mock(nodes=lambda: [{"Alive": True, "Resources": {"memory": 1.0}}])
    ray.util.placement_group.return_value.wait.return_value = False
    monkeypatch.setitem(sys.modules, "ray.util", ray.util)
    monkeypatch.setattr(on_ray, "_ray", lambda: ray)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    on_ray._hold("name", 0, 1.0)
    ray.util.placement_group.assert_not_called()
    on_ray._hold("name", 2, 1.0)  # Ray may start nodes for this request
    assert ray.util.placement_group.call_args.args == ([{"CPU": 1}, {"CPU": 1}],)
    assert capsys.readouterr().out == '{"waited": 1.0}\n' * 2


def test_settings_of_one_host_make_no_difference(tmp_path):
    own = {"TF_CONFIG": "x", "TF_NUM_INTRAOP_THREADS": "4", "HOME": "/root", "TF_CPP_X": "1"}
    own["TFDIST_HOSTS"] = "a,b"  # which the launcher ignores and does not pass on
    assert alike(tmp_path) == alike(tmp_path, own)
    missing = alike(tmp_path, args="--config {}")
    assert missing[f"the hash of {tmp_path / 'mnist.py'}"] == "not readable"


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("TF_ENABLE_ONEDNN_OPTS", {"environ": {"TF_ENABLE_ONEDNN_OPTS": "0"}}),
        ("the hash of train.py", {"text": "y"}),
    ],
)
def test_settings_that_change_the_job_differ(name, there, tmp_path):
    assert alike(tmp_path).get(name) != alike(tmp_path, **there).get(name)


@pytest.mark.parametrize("args", ["--config={}", "--config {}", "--config={}:dense"])
def test_a_config_file_of_another_text_differs(args, tmp_path):
    config, found = tmp_path / "mnist.py", []
    for text in ("seed = 1", "seed = 1", "seed = 2"):
        config.write_text(text)
        found.append(alike(tmp_path, args=args))
    same, again, other = found
    assert same == again
    assert {name for name in same if same[name] != other[name]} == {f"the hash of {config}"}
