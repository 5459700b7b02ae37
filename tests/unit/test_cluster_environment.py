"""What the environment says of a job: schedulers' variables as recorded, and what contradicts."""

import json
from pathlib import Path

import pytest

from tests import refusals
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, encode, read_environment
from tfdist.cluster.address import split_address
from tfdist.cluster.placement import FIRST_PORT, PORTS_PER_JOB, port_of_job

POD = "example-job"
PAGE = (Path(__file__).parents[2] / "docs" / "schedulers.md").read_text()
RECORDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "environments").glob("*.json"))
}
assert len(RECORDS) > 30


def recorded(name, **more):
    """The environment of each task of a recorded job, in order of rank."""
    return [{**RECORDS[name]["common"], **own, **more} for own in RECORDS[name]["tasks"]]


def read(environ):
    config = read_environment(environ)
    assert config is not None
    return config


def tasks_of(configs):
    return [str(config.task) for config in configs]


def hosts_of(cluster, tasks):
    return [split_address(cluster.address(task))[0] for task in tasks]


@pytest.mark.parametrize("name", RECORDS)
def test_all_tasks_read_a_recorded_environment_alike(name):
    record = RECORDS[name]
    assert record["source"].startswith("https://")
    assert record.get("recorded") or record.get("written")
    if name.startswith("refused"):
        return
    hosts = record["hosts_of_ranks"]
    if not hosts:  # an allocation or an index alone
        assert [read_environment(e) for e in recorded(name)] == [None for _ in recorded(name)]
        return
    configs = [read(environ) for environ in recorded(name)]
    (cluster,) = {config.cluster for config in configs}
    assert sorted(config.task for config in configs) == list(cluster.tasks())
    assert hosts_of(cluster, [config.task for config in configs]) == hosts
    types = record.get("types_of_ranks") or ["worker"] * len(configs)
    assert [config.task.type for config in configs] == types


# Ports


def test_ports_follow_from_the_number_of_a_job():
    assert port_of_job("0") == FIRST_PORT
    assert port_of_job("1") == FIRST_PORT + PORTS_PER_JOB
    first_ports = {port_of_job(str(job)) for job in range(1_000_000, 1_000_397)}
    assert len(first_ports) == 397
    assert max(first_ports) + PORTS_PER_JOB <= 32_768  # where outgoing connections begin
    assert port_of_job("7", step=1) != port_of_job("7")
    assert port_of_job("prterun-a1-4711@1") in range(FIRST_PORT, 32_704)
    steps = [read(recorded("slurm_srun_n3", SLURM_STEP_ID=step)[0]) for step in "01"]
    assert not set(steps[0].cluster.worker) & set(steps[1].cluster.worker)
    ranks = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    jobs = ({}, {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.server"})
    assert len({str(read({**ranks, **job})) for job in jobs}) == len(jobs)


@pytest.mark.parametrize(
    ("name", "ports", "workers"),
    [
        ("slurm_srun_n3", "30000-30031", ("node01:30000", "node01:30001", "node02:30002")),
        # Of a range for several jobs job 1 has the second part; of one that is small all of it.
        ("slurm_srun_n3", "30000-30099", ("node01:30032", "node01:30033", "node02:30034")),
        ("slurm_srun_n3", "30000-30001", ("node01:30000", "node01:30001", "node02:30000")),
        ("kubernetes_indexed_job", "80-80", tuple(f"{POD}-{i}.headless-svc:80" for i in range(3))),
    ],
)
def test_one_variable_sets_the_ports_of_a_job(name, ports, workers):
    assert read(recorded(name, TFDIST_PORTS=ports)[0]).cluster.worker == workers


@pytest.mark.parametrize(
    ("tasks", "per_node", "ports", "last"),
    [
        (10_000, 8, "", f"n1250:{port_of_job('5') + 7}"),
        (4_800, 48, "30000-30063", "n100:30047"),
    ],
)
def test_large_jobs_count_their_ports_on_each_host(tasks, per_node, ports, last):
    nodes, rank = tasks // per_node, tasks - 1
    step = {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURMD_NODENAME": f"n{nodes}",
        "SLURM_GTIDS": ",".join(str(other) for other in range(tasks - per_node, tasks)),
        "TFDIST_PORTS": ports,
    }
    config = read(step)
    assert config.task == Task("worker", rank)
    assert config.cluster.worker[rank] == last
    assert len(encode(config)) > 50_000


# Slurm


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slurm_srun_n3", {"SLURM_PROCID": ""}),
        ("slurm_srun_n3", {"SLURM_STEP_ID": "4294967290"}),  # the shell of salloc
        ("slurm_srun_n3", {"SLURM_STEP_ID": "4294967291"}),  # the batch script
        ("slurm_srun_n3", {"SLURM_STEP_ID": ""}),
        ("slurm_srun_n3", {"SLURM_STEP_NUM_TASKS": ""}),
        ("slurm_srun_n3", {"TFDIST_CLUSTER": "none"}),
        ("slurm_sbatch_plain", {"SLURM_RESTART_COUNT": "0"}),
        (
            "slurm_interactive_step",
            {"PMIX_NAMESPACE": "slurm.pmix.23.4294967290", "PMIX_RANK": "0"},
        ),
        ("plain_shell", {"TFDIST_STRATEGY": "auto", "TFDIST_PS": "0"}),
        ("plain_shell", {"TFDIST_SOMETHING_ELSE": "1", "_TFDIST_JOB": "mark"}),
        ("plain_shell", {"TFDIST_HOSTS": "a", "TFDIST_NODE_RANK": "0"}),
        # The only host of a job needs no rank.
        ("plain_shell", {"TFDIST_HOSTS": "a"}),
        ("plain_shell", {"TFDIST_HOSTS": "a", "KUBERNETES_SERVICE_HOST": "k", "HOSTNAME": "a"}),
    ],
)
def test_a_process_started_alone_has_no_cluster(name, change):
    assert read_environment(recorded(name, **change)[0]) is None


@pytest.mark.parametrize(
    ("name", "settings", "tasks"),
    [
        *(
            ("slurm_salloc_srun", settings, "chief-0 worker-0 worker-1 ps-0")
            for settings in ("STRATEGY=ps PS=1", "STRATEGY=ps")
        ),
        ("slurm_salloc_srun", "EVALUATOR=1", "worker-0 worker-1 worker-2 evaluator-0"),
        ("slurm_salloc_srun", "EVALUATOR=1 PS=1", "chief-0 worker-0 ps-0 evaluator-0"),
    ],
)
def test_settings_select_ps_and_evaluator_tasks(name, settings, tasks):
    variables = {f"TFDIST_{n}": v for n, v in (s.split("=") for s in settings.split())}
    configs = [read(environ) for environ in recorded(name, **variables)]
    assert tasks_of(configs) == tasks.split()
    seen = [len(config.cluster.evaluator) for config in configs]
    assert seen == [int(config.task.type == "evaluator") for config in configs]
    assert {config.options.evaluator for config in configs} == {"EVALUATOR" in settings}
    assert {config.options.strategy for config in configs} <= {"ps", "auto"}


RESTARTED = {
    "SLURM_RESTART_COUNT=2": 3,
    "TFDIST_RESTARTS=1 TFDIST_RESTARTS_UNCOUNTED=": 2,
    "TFDIST_RESTARTS= TFDIST_RESTARTS_UNCOUNTED=2": 3,
    "TFDIST_RESTARTS=1 TFDIST_RESTARTS_UNCOUNTED=2": 4,
}
REQUEUED = ("slurm_srun_n3", "mpi_open_mpi_in_slurm", "slurm_srun_n1", "slurm_sbatch_plain")
OTHERS = ("kubernetes_indexed_job", "kubernetes_stateful_set", "kubernetes_tfjob", "plain_shell")


@pytest.mark.parametrize(
    ("name", "restarts"),
    [
        (name, restarts)
        for restarts in RESTARTED
        for name in (REQUEUED if "SLURM" in restarts else OTHERS)
    ],
)
def test_a_restarted_job_or_process_has_another_attempt(name, restarts):
    variables = dict(word.split("=") for word in restarts.split())
    config = read(recorded(name, **variables)[0])
    assert config.options.attempt == RESTARTED[restarts]
    assert bool(config.cluster.tasks()) == bool(RECORDS[name]["hosts_of_ranks"])


# TF_CONFIG and our own variables beside a scheduler


def tf_config(hosts, index=0, type_="worker"):
    task = {"type": type_, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": task})}


HERE = ["127.0.0.1:7001", "127.0.0.1:7002"]
BY_HAND = tf_config(HERE, 1)
FULL_NAME = f"{POD}-1.headless-svc.default.svc.cluster.local"


@pytest.mark.parametrize(
    ("name", "change", "task"),
    [
        # TF_CONFIG by hand on one node of an allocation; an evaluator beside a step.
        ("slurm_srun_n1", BY_HAND, "worker-1"),
        ("slurm_sbatch_plain", BY_HAND, "worker-1"),
        ("slurm_salloc_plain", BY_HAND, "worker-1"),
        ("mpi_open_mpi_one_rank", BY_HAND, "worker-1"),
        ("slurm_srun_n3", tf_config(HERE, 0, "evaluator"), "evaluator-0"),
        # Other ports, and other names of the same tasks.
        ("slurm_srun_n3", tf_config(["a-ib:1", "a-ib:2", "b-ib:1"], 1), "worker-1"),
        ("slurm_srun_n3", tf_config(["node01.site:1", "node01:2", "10.0.0.2:1"], 1), "worker-1"),
        # A task of our launcher, whatever the launcher itself is a task of.
        *(
            (name, BY_HAND | {"_TFDIST_JOB": "mark", "TFDIST_PS": "1"}, "worker-1")
            for name in ("slurm_srun_n1", "slurm_interactive_step", "slurm_srun_n3")
        ),
        ("slurm_srun_n3", BY_HAND | {"TFDIST_CLUSTER": "tf_config"}, "worker-1"),
        # A pod that says its place itself, and one with its full name.
        ("kubernetes_indexed_job", {"HOSTNAME": "any", "TFDIST_NODE_RANK": "2"}, "worker-2"),
        (
            "kubernetes_indexed_job",
            {"HOSTNAME": FULL_NAME, "JOB_COMPLETION_INDEX": "1"},
            "worker-1",
        ),
    ],
)
def test_an_explicit_place_of_a_task_has_priority(name, change, task):
    config = read(recorded(name, **change)[0])
    assert str(config.task) == task
    if text := change.get("TF_CONFIG"):
        assert list(config.cluster.worker) == json.loads(text)["cluster"]["worker"]


@pytest.mark.parametrize(
    "more",
    [
        *({"TFDIST_HOSTS": h} for h in ("node01:2,node02", "node01.site:2,node02.site")),
        *({"TFDIST_CLUSTER": source} for source in ("slurm", "auto")),
    ],
)
def test_settings_equal_to_the_scheduler_change_nothing(more):
    assert read(recorded("slurm_srun_n3", **more)[0]) == read(recorded("slurm_srun_n3")[0])


def test_a_host_listed_twice_continues_its_port_numbers():
    config = read({"TFDIST_HOSTS": "a:1,b:1,a:1", "TFDIST_NODE_RANK": "2"})
    assert config.cluster.worker == ("a:2222", "b:2222", "a:2223")
    assert config.task == Task("worker", 2)


def test_settings_fill_tf_config_and_a_process_by_itself():
    environ = {**tf_config(HERE), "TFDIST_STRATEGY": "multiworker"}
    config = read(environ)
    assert config.options.strategy == "multiworker"
    assert read({**environ, "TFDIST_CLUSTER": "tf_config"}) == config
    text = environ["TF_CONFIG"][:-1] + ', "tfdist": {"startup_timeout_s": 300}}'
    options = read({"TF_CONFIG": text, "TFDIST_PORTS": "20000-20100"}).options
    assert (options.ports, options.startup_timeout_s) == ("20000-20100", 300)
    alone = TaskConfig(
        cluster=ClusterSpec(), task=Task("worker", 0), options=JobOptions(strategy="mirrored")
    )
    assert read({"TFDIST_STRATEGY": "mirrored"}) == alone
    apart = {"TFDIST_CLUSTER": "none", "TFDIST_STRATEGY": "mirrored"}
    assert read(recorded("slurm_srun_n3", **apart)[0]) == alone
    one = {"TFDIST_HOSTS": "a", "TFDIST_STRATEGY": "multiworker"}
    assert read(one).cluster.worker == ("a:2222",)
    assert read({"TFDIST_HOSTS": "a", "TFDIST_RUN_DIR": "r"}).options.run_dir == "r"


def test_the_page_states_the_port_rule_and_a_message():
    assert f"{FIRST_PORT} + {PORTS_PER_JOB} x (n mod 397)" in PAGE
    environ = recorded("slurm_srun_n3", SLURM_STEP_TASKS_PER_NODE="2")[0]
    assert str(refusal(environ)) in PAGE


# What is wrong is refused by the variable that is wrong, with the rule.


def refusal(environ):
    error = refusals.refusal(lambda: read_environment(environ))
    assert str(error).isprintable()
    assert len(str(error)) < 500
    return error


TWO_WORKERS = tf_config(["a:1", "b:1"])["TF_CONFIG"]
MULTIWORKER = json.dumps({**json.loads(TWO_WORKERS), "tfdist": {"strategy": "multiworker"}})


def test_ranks_of_mpirun_on_other_hosts_are_refused():
    by_node = [{"OMPI_COMM_WORLD_RANK": "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}]
    on_one_host = [{"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}]
    for changes in (by_node, on_one_host):
        for change in changes:
            error = refusal(recorded("mpi_open_mpi_two_hosts", **change)[0])
            assert (error.where, error.code) == ("OMPI_COMM_WORLD_LOCAL_RANK", "bad-environment")
            assert "--map-by slot" in error.fix
    error = refusal(recorded("mpi_hydra_two_hosts", MPI_LOCALRANKID="1")[2])
    assert "rank 2 has local rank 1 of 2," in error.problem
    names = {"TFDIST_HOSTS": "127.0.0.1:2,127.0.0.2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    read(recorded("mpi_open_mpi_two_hosts", **names)[0])  # two names of this machine


def test_a_task_on_an_unexpected_node_is_refused():
    for kind, number in (("arbitrary", 0), ("srun_cyclic", 1), ("srun_plane", 2)):
        error = refusal(recorded(f"refused_slurm_{kind}")[number])
        assert error.where == "SLURMD_NODENAME"
        assert "--distribution=block" in error.fix
