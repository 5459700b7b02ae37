"""A job on several hosts, decided before any agent is started: the tasks of each."""

import io
import sys
from functools import partial
from unittest.mock import Mock

import pytest

from tests.refusals import refusal, refused
from tests.unit.test_cluster_environment import recorded
from tfdist.cluster import Task
from tfdist.errors import UsageError
from tfdist.launch.ending import SPAWN
from tfdist.launch.job_run import run_job
from tfdist.launch.multihost import on_ray
from tfdist.launch.multihost.agents import shell_of
from tfdist.launch.multihost.host_agreement import passed_variables, without_secrets
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
CHIEF, EVALUATOR, PS = Task("chief", 0), Task("evaluator", 0), Task("ps", 0)
W0, W1, W2 = (Task("worker", index) for index in range(3))


def decided(line, environ=None):
    return decided_group(parse(line.split()), environ or {})


@pytest.fixture(autouse=True)
def _on_host_a(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "a.example.org")
    unknown = Mock(side_effect=OSError("unknown"))
    monkeypatch.setattr("tfdist.launch.multihost.hosts.resolve", unknown)


def test_a_host_list_gives_the_number_of_workers():
    options, group = decided("--hosts a:2,b:1")
    assert (options.strategy, options.workers) == ("multiworker", 3)
    assert (group.hosts, group.slots, group.rank) == (("a", "b"), (2, 1), 0)
    assert group.tasks([0, 1]) == {0: (W0, W1), 1: (W2,)}
    assert group.tasks([1]) == {1: (W0,)}  # where the other did not come back
    assert group.cluster({0: ["a:9", "a:2"], 1: ["b:8"]}).worker == ("a:9", "a:2", "b:8")


def test_under_ps_the_chief_is_first_and_servers_last():
    options, group = decided("--strategy ps --ps 1 --hosts a:2,b:2")
    assert (options.workers, group.num_ps) == (2, 1)
    assert group.tasks([0, 1]) == {0: (CHIEF, W0), 1: (W1, PS)}
    cluster = group.cluster({0: ["a:1", "a:2"], 1: ["b:3", "b:4"]})
    assert cluster.as_dict() == {"chief": ["a:1"], "worker": ["a:2", "b:3"], "ps": ["b:4"]}


def test_an_evaluator_runs_on_the_host_of_the_chief():
    _, group = decided("--hosts a:2,b:1 --evaluator")
    assert group.tasks([0, 1])[0] == (W0, W1, EVALUATOR)
    assert group.tasks([0])[0][-1] == EVALUATOR  # where the other did not come back
    assert [group.num_tasks(rank) for rank in (0, 1)] == [3, 1]
    cluster = group.cluster({0: ["a:1", "a:2", "a:3"], 1: ["b:1"]})
    assert (cluster.worker, cluster.evaluator) == (("a:1", "a:2", "b:1"), ("a:3",))
    ps = decided("--hosts a:2,b:2 --ps 1 --evaluator")[1]
    assert ps.tasks([0, 1])[0] == (CHIEF, W0, EVALUATOR)


def test_a_list_of_only_this_host_is_local():
    for line in ("--hosts a:3 --evaluator", "--hosts 127.0.0.1:3 --evaluator"):
        options, group = decided(line)
        assert group is None
        assert (options.workers, options.hosts, options.evaluator) == (3, None, True)


def test_an_unlisted_launcher_has_no_tasks():
    options, group = decided("--hosts b:2,c --evaluator")
    assert (group.hosts, group.slots, options.workers) == (("launcher", "b", "c"), (0, 2, 1), 3)
    assert group.tasks([0, 1, 2]) == {0: (), 1: (W0, W1, EVALUATOR), 2: (W2,)}
    assert [group.num_tasks(rank) for rank in (0, 1, 2)] == [0, 3, 1]
    assert group.tasks([0, 2]) == {0: (), 2: (W0,)}
    assert decided("--hosts b")[0].strategy == "multiworker"


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
        refusal = refused(lambda host=host: own_address(host, other="127.0.0.1"))
        assert refusal == ("--hosts", "not-this-host")


def test_an_elastic_job_may_have_several_hosts():
    options = parse(["--elastic", "--hosts", "a,b:2", "x.py"])
    assert options.kind.is_elastic
    job, group = decided_group(options, {})
    assert (job.strategy, job.workers, group.hosts[-2:]) == ("elastic", 3, ("a", "b"))


def test_a_missing_openssl_is_an_error_before_the_start(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert refused(certificate) == ("--elastic", "missing-package")


def test_an_openssl_that_fails_says_why(monkeypatch, tmp_path):
    (tmp_path / "openssl").write_text("#!/bin/sh\necho 'no entropy' >&2\nexit 1\n")
    (tmp_path / "openssl").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"but openssl fails: no entropy\. Fix"):
        certificate()


@pytest.mark.parametrize("on", ["ray", "slurm"])
def test_an_elastic_job_sends_no_key_in_clear(on):
    assert refused(lambda: parse(["--elastic", "--on", on, "x.py"]))[0] == "--on"


def test_agents_get_the_variables_of_tasks_and_named_ones():
    own = dict.fromkeys(("HOME", "SECRET_KEY", "TF_CONFIG", "_TFDIST_JOB", "TFDIST_HOSTS"), "x")
    passed = dict.fromkeys(("TF_X", "KERAS_HOME", "TFDIST_RING", "PYTHONPATH", "MY_VAR"), "x")
    assert passed_variables({**own, **passed}, ["MY_VAR"]) == passed
    assert parse(["--hosts", "a,b", "--env", "A", "--env=B", "x.py"]).env == "A,B"
    for value, is_passed in (("-1", True), ("", True), ("0", False)):
        environ = {"CUDA_VISIBLE_DEVICES": value}
        assert passed_variables(environ, ()) == (environ if is_passed else {})


def test_a_variable_with_its_value_is_refused_without_showing_it():
    error = refusal(lambda: parse(["--hosts", "a,b", "--env", "X,API_KEY=tiger", "x.py"]))
    assert (error.where, error.code) == ("--env", "bad-value")
    assert "tiger" not in str(error)


def test_a_custom_shell_command_contains_the_host():
    assert shell_of("ssh", None)[0] == "ssh"
    assert shell_of("ssh", "ssh -p 2222") == ["ssh", "-p", "2222", "{host}"]
    assert shell_of("ssh", "kubectl exec -i {host} -- sh -c")[-2:] == ["sh", "-c"]


def test_the_values_of_secrets_are_marked():
    args = ["--lr", "0.1", f"--api_key={SECRET}", "--token", SECRET, "x"]
    shown = without_secrets(args)
    assert shown == ["--lr", "0.1", "--api_key=<secret>", "--token", "<secret>", "x"]


# Slurm


def slurm(nodes, **more):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"n[1-{nodes}]"}
    return {**job, "SLURMD_NODENAME": "n1", **more}


def step(nodes):
    return slurm(
        nodes,
        SLURM_STEP_ID="0",
        SLURM_STEP_NUM_TASKS=f"{nodes}",
        SLURM_STEP_NODELIST=f"n[1-{nodes}]",
        SLURM_STEP_TASKS_PER_NODE=f"1(x{nodes})",
        SLURM_PROCID="0",
    )


def test_a_local_host_list_ignores_the_remote_shell():
    options, group = decided("--hosts a:2 --rsh x --env HOME")
    assert group is None
    assert (options.where, options.workers, options.rsh, options.env) == ("local", 2, None, None)


def test_an_allocation_of_slurm_gives_the_hosts():
    options, group = decided("--on slurm", slurm(3))
    assert (group.hosts, group.slots, group.rank) == (("n1", "n2", "n3"), (1, 1, 1), 0)
    assert (options.strategy, options.workers) == ("multiworker", 3)
    from_a_login_node = slurm(2, SLURMD_NODENAME="")
    assert decided("--on slurm", from_a_login_node)[1].slots == (0, 1, 1)


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


def test_an_allocation_spreads_tasks_over_its_nodes():
    options, group = decided("--on slurm --strategy ps --workers 4 --ps 2", slurm(3))
    assert (options.workers, group.slots, group.num_ps) == (4, (3, 2, 2), 2)
    assert decided("--on slurm --workers 4", slurm(2))[1].slots == (2, 2)
    assert decided("--on slurm --ps 1", slurm(4))[0].workers == 2
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
