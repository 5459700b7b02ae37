"""What the environment says of a job: schedulers' variables as recorded, and lists of hosts."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tests.unit.recorded import FOLDER, Environ, read, read_all, recorded
from tfdist.cluster import (
    ClusterSpec,
    JobOptions,
    Task,
    TaskConfig,
    encode,
    read_environment,
    slurm,
)
from tfdist.cluster.address import parse_hosts, split_address
from tfdist.cluster.placement import FIRST_PORT, PORTS_PER_JOB, port_of_job
from tfdist.cluster.settings import NAMES, JobSettings
from tfdist.errors import UsageError


def records() -> list[Any]:
    found = [json.loads(path.read_text()) | {"name": path.stem} for path in FOLDER.glob("*.json")]
    assert len(found) > 30
    return sorted(found, key=lambda record: record["name"])


JOBS = [r for r in records() if r["hosts_of_ranks"] and not r["name"].startswith("refused")]
SINGLE = [r for r in records() if not r["hosts_of_ranks"]]


@pytest.mark.parametrize("record", records(), ids=lambda record: record["name"])
def test_a_recorded_environment_says_where_it_is_from(record):
    assert record["source"].startswith("https://")
    assert record.get("recorded") or record.get("written")


@pytest.mark.parametrize("record", JOBS, ids=lambda record: record["name"])
def test_all_tasks_of_a_job_come_to_the_same_cluster_and_are_where_they_ran(record):
    configs = read_all([{**record["common"], **own} for own in record["tasks"]])
    assert len(configs) == len(record["hosts_of_ranks"])
    cluster = configs[0].cluster
    assert all(config.cluster == cluster for config in configs)
    assert sorted(config.task for config in configs) == list(cluster.tasks())
    hosts = [split_address(cluster.address(config.task))[0] for config in configs]
    assert hosts == record["hosts_of_ranks"]
    types = record.get("types_of_ranks") or ["worker"] * len(configs)
    assert [config.task.type for config in configs] == types


@pytest.mark.parametrize("record", SINGLE, ids=lambda record: record["name"])
def test_an_allocation_or_an_index_alone_leaves_a_process_by_itself(record):
    assert [read_environment({**record["common"], **own}) for own in record["tasks"]] == [
        None for _ in record["tasks"]
    ]


# Ports


def test_the_ports_of_a_job_follow_from_its_number_and_step():
    assert port_of_job("0") == FIRST_PORT
    assert port_of_job("1") == FIRST_PORT + PORTS_PER_JOB
    first_ports = {port_of_job(str(job)) for job in range(1_000_000, 1_000_397)}
    assert len(first_ports) == 397
    assert max(first_ports) + PORTS_PER_JOB <= 32_768  # where outgoing connections begin
    assert port_of_job("7", step=1) != port_of_job("7")
    assert port_of_job("prterun-a1-4711@1") in range(FIRST_PORT, 32_704)


def test_one_variable_says_which_ports_a_job_may_have():
    steps = recorded("slurm_srun_n3")  # of job 1
    few = read_all([{**e, "TFDIST_PORTS": "30000-30031"} for e in steps])[0].cluster.worker
    assert few == ("node01:30000", "node01:30001", "node02:30002")
    many = read_all([{**e, "TFDIST_PORTS": "30000-30099"} for e in steps])[0].cluster.worker
    assert many[0] == f"node01:{30_000 + PORTS_PER_JOB}"  # job 2 has others
    two = read_all([{**e, "TFDIST_PORTS": "30000-30001"} for e in steps])[0].cluster.worker
    assert two == ("node01:30000", "node01:30001", "node02:30000")
    pods = recorded("kubernetes_indexed_job")
    worker = read_all([{**e, "TFDIST_PORTS": "80-80"} for e in pods])[2].cluster.worker
    assert worker[2].endswith(":80")


def test_a_large_job_has_the_whole_range_on_each_host():
    ports = {"TFDIST_PORTS": "30000-30063"}
    config = read(large_slurm_job(4_800, 48, rank=4_799) | ports)
    assert config.cluster.worker[4_799] == "n100:30047"


def large_slurm_job(tasks: int, per_node: int, rank: int = 0) -> Environ:
    nodes = tasks // per_node
    first = rank // per_node * per_node
    return {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURMD_NODENAME": f"n{rank // per_node + 1}",
        "SLURM_GTIDS": ",".join(str(other) for other in range(first, first + per_node)),
    }


def test_ports_of_a_large_job_are_counted_on_each_host():
    config = read(large_slurm_job(10_000, 8, rank=9_999))
    assert config.task == Task("worker", 9_999)
    assert config.cluster.worker[9_999] == f"n1250:{port_of_job('5') + 7}"
    assert len(encode(config)) > 100_000


# Slurm


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_PROCID": ""},
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_STEP_ID": "4294967291"},  # the batch script
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_NUM_TASKS": ""},
    ],
)
def test_what_srun_did_not_start_as_one_of_several_is_a_process_by_itself(change):
    assert read_environment({**recorded("slurm_srun_n3")[0], **change}) is None


def test_steps_of_a_job_at_the_same_time_have_different_ports():
    environ = recorded("slurm_srun_n3")[0]
    first, second = read_all([environ, {**environ, "SLURM_STEP_ID": "1"}])
    assert not set(first.cluster.worker) & set(second.cluster.worker)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 10**7))
def test_every_task_of_any_step_comes_to_the_same_cluster(per_node, job):
    nodes = [f"n{index}" for index in range(len(per_node))]
    ranks = [node for node, count in zip(nodes, per_node, strict=True) for _ in range(count)]
    step = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(len(ranks)),
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, per_node)),
    }
    configs = read_all(
        [
            {**step, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": node}
            for rank, node in enumerate(ranks)
        ]
    )
    if len(ranks) == 1:
        assert configs == []
        return
    assert {config.cluster for config in configs} == {configs[0].cluster}
    assert [config.task.index for config in configs] == list(range(len(ranks)))
    addresses = [split_address(address) for address in configs[0].cluster.worker]
    assert [host for host, _ in addresses] == ranks


def test_a_launcher_on_each_node_learns_which_node_it_is_on():
    environs = recorded("slurm_srun_three_nodes")
    hosts = ["gpu1", "gpu2", "node01"]
    assert [slurm.node_of(environ) for environ in environs] == [(hosts, rank) for rank in range(3)]
    assert slurm.node_of(recorded("slurm_sbatch_plain")[0]) is None
    assert slurm.first_port(environs[0], JobSettings()) == port_of_job("2")
    with pytest.raises(UsageError, match="--ntasks-per-node=1"):
        slurm.node_of(recorded("slurm_srun_n3")[0])


def test_the_last_tasks_of_a_step_are_ps_where_that_is_wished():
    wish = {"TFDIST_STRATEGY": "ps", "TFDIST_PS": "1"}
    configs = read_all([{**e, **wish} for e in recorded("slurm_salloc_srun")])
    assert [str(config.task) for config in configs] == ["chief-0", "worker-0", "worker-1", "ps-0"]
    assert configs[0].options == JobOptions(strategy="ps")
    alone = read_all([{**e, "TFDIST_STRATEGY": "ps"} for e in recorded("slurm_salloc_srun")])
    assert [config.cluster for config in alone] == [config.cluster for config in configs]


def test_the_very_last_task_is_an_evaluator_where_that_is_wished():
    step = [{**e, "TFDIST_EVALUATOR": "1"} for e in recorded("slurm_salloc_srun")]
    configs = [config for e in step if (config := read_environment(e)) is not None]
    assert [str(c.task) for c in configs] == ["worker-0", "worker-1", "worker-2", "evaluator-0"]
    assert [len(config.cluster.evaluator) for config in configs] == [0, 0, 0, 1]
    assert all(config.options.evaluator for config in configs)
    ps = [read_environment({**e, "TFDIST_PS": "1"}) for e in step]
    assert [str(c and c.task) for c in ps] == ["chief-0", "worker-0", "ps-0", "evaluator-0"]
    groups = {"TFDIST_HET_GROUPS": "evaluator,worker"}
    found = [read_environment({**e, **groups}) for e in recorded("slurm_het_srun")]
    assert str(found[0] and found[0].task) == "evaluator-0"


def test_components_of_a_heterogeneous_job_are_workers_and_ps():
    wish = {"TFDIST_HET_GROUPS": "ps,worker"}
    configs = read_all([{**e, **wish} for e in recorded("slurm_het_srun")])
    assert [str(config.task) for config in configs] == ["ps-0", "chief-0", "worker-0", "worker-1"]
    assert [split_address(a)[0] for a in configs[0].cluster.worker] == ["gpu1", "gpu2"]
    wish = {"TFDIST_HET_GROUPS": "chief,worker"}
    configs = read_all([{**e, **wish} for e in recorded("slurm_het_groups")])
    assert [str(config.task) for config in configs] == ["chief-0", "worker-0", "worker-1"]


REQUEUED = ("slurm_srun_n3", "mpi_open_mpi_in_slurm")
OTHERS = ("kubernetes_indexed_job", "kubernetes_stateful_set", "kubernetes_tfjob", "plain_shell")
TOLD = {
    2: {"TFDIST_RESTARTS": "1", "TFDIST_RESTARTS_UNCOUNTED": ""},
    3: {"TFDIST_RESTARTS": "", "TFDIST_RESTARTS_UNCOUNTED": "2"},
    4: {"TFDIST_RESTARTS": "1", "TFDIST_RESTARTS_UNCOUNTED": "2"},
}


@pytest.mark.parametrize(
    ("name", "told", "attempt"),
    [
        *((name, {"SLURM_RESTART_COUNT": "2"}, 3) for name in REQUEUED),
        *((name, told, attempt) for name in OTHERS for attempt, told in TOLD.items()),
    ],
)
def test_a_job_that_was_started_before_is_at_another_attempt(name, told, attempt):
    assert read({**recorded(name)[0], **told}).options.attempt == attempt


@pytest.mark.parametrize("name", ["slurm_srun_n1", "slurm_sbatch_srun_n1", "slurm_sbatch_plain"])
def test_a_requeued_process_by_itself_is_another_attempt(name):
    environ = recorded(name)[0]
    again = read({**environ, "SLURM_RESTART_COUNT": "2"})
    assert (again.cluster.tasks(), again.options) == ((), JobOptions(attempt=3))
    assert read_environment({**environ, "SLURM_RESTART_COUNT": "0"}) is None


# TF_CONFIG beside a scheduler


def tf_config(cluster: dict[str, list[str]], index: int = 0) -> Environ:
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


HERE = {"worker": ["127.0.0.1:7001", "127.0.0.1:7002"]}


def test_a_task_of_our_launcher_is_what_the_launcher_says():
    job = ClusterSpec.from_dict(HERE)
    launched = {"TF_CONFIG": encode(TaskConfig(cluster=job, task=Task("worker", 1)))}
    for name in ("slurm_srun_n1", "slurm_sbatch_plain", "slurm_interactive_step", "slurm_srun_n3"):
        environ = {**recorded(name)[0], **launched, "TFDIST_JOB": "mark", "TFDIST_PS": "1"}
        config = read_environment(environ)
        assert config is not None
        assert (config.cluster, config.task) == (job, Task("worker", 1))


BY_HAND = tf_config(HERE, 1)
EVALUATOR = {"cluster": HERE, "task": {"type": "evaluator", "index": 0}}
FULL_NAME = "example-job-1.headless-svc.default.svc.cluster.local"


@pytest.mark.parametrize(
    ("name", "change", "task"),
    [
        # TF_CONFIG by hand on one node of an allocation; an evaluator beside a step.
        ("slurm_srun_n1", BY_HAND, "worker-1"),
        ("slurm_sbatch_plain", BY_HAND, "worker-1"),
        ("slurm_salloc_plain", BY_HAND, "worker-1"),
        ("mpi_open_mpi_one_rank", BY_HAND, "worker-1"),
        ("slurm_srun_n3", {"TF_CONFIG": json.dumps(EVALUATOR)}, "evaluator-0"),
        # A pod that says its place itself, and one with its full name.
        ("kubernetes_indexed_job", {"HOSTNAME": "any", "TFDIST_NODE_RANK": "2"}, "worker-2"),
        (
            "kubernetes_indexed_job",
            {"HOSTNAME": FULL_NAME, "JOB_COMPLETION_INDEX": "1"},
            "worker-1",
        ),
    ],
)
def test_what_says_the_place_of_a_task_itself_is_taken(name, change, task):
    assert str(read({**recorded(name)[0], **change}).task) == task


def test_tf_config_with_other_ports_and_names_of_the_same_tasks_is_taken():
    for hosts in (["a-ib:1", "a-ib:2", "b-ib:1"], ["node01.site:1", "node01:2", "10.0.0.2:1"]):
        config = read_environment(
            {**recorded("slurm_srun_n3")[1], **tf_config({"worker": hosts}, 1)}
        )
        assert config is not None
        assert config.cluster.worker == tuple(hosts)


@pytest.mark.parametrize("listed", ["node01:2,node02", "node01.site:2,node02.site"])
def test_the_hosts_of_a_step_may_be_listed_too(listed):
    environ = recorded("slurm_srun_n3")[0]
    assert read_environment({**environ, "TFDIST_HOSTS": listed}) == read_environment(environ)


# Our own variables


def test_the_user_can_name_the_source_or_none():
    environ = recorded("slurm_srun_n3")[0]
    assert read_environment({**environ, "TFDIST_CLUSTER": "none"}) is None
    assert read_environment({**environ, "TFDIST_CLUSTER": "slurm"}) == read_environment(environ)
    assert read_environment({**environ, "TFDIST_CLUSTER": "auto"}) == read_environment(environ)
    other = {**environ, **tf_config(HERE), "TFDIST_CLUSTER": "tf_config"}
    assert read(other).cluster == ClusterSpec.from_dict(HERE)


def test_wishes_beside_tf_config_fill_it_or_agree_with_it():
    config = read({**tf_config(HERE), "TFDIST_STRATEGY": "multiworker"})
    assert config.options.strategy == "multiworker"
    assert (
        read_environment(
            {**tf_config(HERE), "TFDIST_CLUSTER": "tf_config"} | {"TFDIST_STRATEGY": "multiworker"}
        )
        == config
    )


def test_a_process_by_itself_may_have_a_strategy_of_one_task():
    config = read({"TFDIST_STRATEGY": "mirrored"})
    assert config == TaskConfig(
        cluster=ClusterSpec(), task=Task("worker", 0), options=JobOptions(strategy="mirrored")
    )
    assert read_environment({"TFDIST_STRATEGY": "auto", "TFDIST_PS": "0"}) is None
    assert read_environment({"TFDIST_SOMETHING_ELSE": "1", "TFDIST_JOB": "mark"}) is None
    apart = {**recorded("slurm_srun_n3")[0], "TFDIST_CLUSTER": "none"}
    assert read({**apart, "TFDIST_STRATEGY": "mirrored"}) == config


# The page


def test_the_page_has_every_variable():
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    assert [name for name in NAMES if name not in page] == []
    assert f"{FIRST_PORT} + {PORTS_PER_JOB} x (n mod 397)" in page


# Plain hosts, pods and ranks of mpirun: who is where, and every way in which that is unclear.

# host:slots


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", 1)]),
        ("a:2,b", [("a", 2), ("b", 1)]),
        ("n[1-2]:3,m", [("n1", 3), ("n2", 3), ("m", 1)]),
        ("p-[0-1].svc", [("p-0.svc", 1), ("p-1.svc", 1)]),
        ("10.0.0.1:2,[fd00::1]:3,[::1]", [("10.0.0.1", 2), ("[fd00::1]", 3), ("[::1]", 1)]),
        ("a:2,a:1", [("a", 2), ("a", 1)]),
        (" a , b:2 ", [("a", 1), ("b", 2)]),
    ],
)
def test_a_list_of_hosts_says_how_many_tasks_each_has(text, expected):
    assert parse_hosts(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a:0", "a:x", "a:", ":2", "a:2222", "fd00::1", "fd00::1:2", "a b", "a/b", "n[1-"],
)
def test_a_list_of_hosts_that_is_none_is_refused(text):
    error = refusal(lambda: parse_hosts(text))
    assert error.where == "--hosts"
    assert error.code in ("bad-hosts", "bad-node-list", "TFC010")
    assert str(error).isprintable()


def test_a_host_that_is_listed_twice_goes_on_counting_its_ports():
    config = read({"TFDIST_HOSTS": "a:1,b:1,a:1", "TFDIST_NODE_RANK": "2"})
    assert config.cluster.worker == ("a:2222", "b:2222", "a:2223")
    assert config.task == Task("worker", 2)


def test_one_host_alone_is_a_process_by_itself_unless_more_is_wished():
    environ = {"TFDIST_HOSTS": "a", "TFDIST_NODE_RANK": "0"}
    assert read_environment(environ) is None
    config = read({**environ, "TFDIST_STRATEGY": "multiworker"})
    assert config.cluster.worker == ("a:2222",)
    pod = {"KUBERNETES_SERVICE_HOST": "k", "HOSTNAME": "a"}
    for more in ({}, pod):  # it needs no rank
        assert read_environment({"TFDIST_HOSTS": "a", **more}) is None
        assert read({"TFDIST_HOSTS": "a", "TFDIST_RUN_DIR": "r", **more}).options.run_dir == "r"


# mpirun


def test_ranks_of_different_jobs_have_different_ports():
    ranks = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    jobs = ({}, {"PALS_APID": "b7a5"}, {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.server"})
    first_ports = {str(read_environment({**ranks, **job})) for job in jobs}
    assert len(first_ports) == len(jobs)


def test_a_step_of_a_component_under_cray_is_read_from_slurm():
    own = {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_JOBID": "11", "PALS_APID": "11.0"}
    plain = recorded("slurm_het_srun")[1]
    assert plain["SLURM_JOB_ID"] == "10"
    assert read_environment({**plain, **own}) == read_environment(plain)


def test_an_interactive_step_with_pmix_of_slurm_is_a_process_by_itself():
    own = {
        "PMIX_NAMESPACE": "slurm.pmix.23.4294967290",
        "PMIX_RANK": "0",
        "PMIX_HOSTNAME": "node01",
    }
    assert read_environment({**recorded("slurm_interactive_step")[0], **own}) is None
