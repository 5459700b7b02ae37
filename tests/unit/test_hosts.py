"""Plain hosts, pods and ranks of mpirun: who is where, and every way in which that is unclear."""

from __future__ import annotations

import pytest

from tests.unit.recorded import read, recorded
from tfdist.cluster import Task, read_environment
from tfdist.cluster.address import parse_hosts, ranks_of
from tfdist.cluster.environment import node_plan
from tfdist.cluster.settings import JobSettings
from tfdist.errors import UsageError

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
def test_a_list_of_hosts_says_how_many_tasks_each_has(
    text: str, expected: list[tuple[str, int]]
) -> None:
    assert parse_hosts(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a:0", "a:x", "a:", ":2", "a:2222", "fd00::1", "fd00::1:2", "a b", "a/b", "n[1-"],
)
def test_a_list_of_hosts_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert error.value.where == "--hosts"
    assert error.value.code in ("bad-hosts", "bad-node-list", "TFC010")
    assert str(error.value).isprintable()


@pytest.mark.parametrize("text", ["fd00::1", "fd00::1:2", "a,fd00::1"])
def test_an_ipv6_address_without_brackets_is_told_how_it_is_written(text: str) -> None:
    with pytest.raises(UsageError, match=r"\[fd00::1\]:2"):
        parse_hosts(text)


def test_every_node_comes_to_the_same_cluster_and_starts_its_own_tasks() -> None:
    job_settings = JobSettings(strategy="ps", ps=1)
    plans = [node_plan("a:2,b:2,c", node_rank=rank, job_settings=job_settings) for rank in range(3)]
    assert plans[0].cluster == plans[1].cluster == plans[2].cluster
    assert plans[0].cluster.as_dict() == {
        "chief": ["a:2222"],
        "worker": ["a:2223", "b:2222", "b:2223"],
        "ps": ["c:2222"],
    }
    assert [plan.tasks for plan in plans] == [
        (Task("chief", 0), Task("worker", 0)),
        (Task("worker", 1), Task("worker", 2)),
        (Task("ps", 0),),
    ]


@pytest.mark.parametrize("node_rank", [-1, 2])
def test_a_node_rank_outside_the_list_is_refused(node_rank: int) -> None:
    with pytest.raises(UsageError) as error:
        node_plan("a,b", node_rank=node_rank, job_settings=JobSettings())
    assert error.value.where == "--node_rank"


def test_a_host_that_is_listed_twice_goes_on_counting_its_ports() -> None:
    plan = node_plan("a:1,b:1,a:1", node_rank=2, job_settings=JobSettings(port=5000))
    assert plan.cluster.worker == ("a:5000", "b:5000", "a:5001")
    assert plan.tasks == (Task("worker", 2),)


def test_ranks_fill_host_after_host() -> None:
    assert ranks_of([("a", 2), ("b", 1)]) == ["a", "a", "b"]


def test_one_host_alone_is_a_process_by_itself_unless_more_is_wished() -> None:
    environ = {"TFDIST_HOSTS": "a", "TFDIST_NODE_RANK": "0"}
    assert read_environment(environ) is None
    config = read({**environ, "TFDIST_STRATEGY": "multiworker"})
    assert config.cluster.worker == ("a:2222",)


# Kubernetes


def test_a_pod_may_say_its_place_itself() -> None:
    environ = {**recorded("kubernetes_indexed_job")[0], "HOSTNAME": "any", "TFDIST_NODE_RANK": "2"}
    config = read(environ)
    assert config.task == Task("worker", 2)


def test_a_pod_with_its_full_name_finds_itself() -> None:
    environ = recorded("kubernetes_indexed_job")[1]
    environ["HOSTNAME"] = "example-job-1.headless-svc.default.svc.cluster.local"
    config = read(environ)
    assert config.task == Task("worker", 1)


# mpirun


def test_local_ranks_of_pals_are_read_too() -> None:
    environ = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_LOCAL_SIZE": "2", "PMI_LOCAL_RANK": "1"}
    config = read(environ)
    assert config.cluster.worker == ("127.0.0.1:20000", "127.0.0.1:20001")
    assert config.task == Task("worker", 1)


def test_ranks_of_different_jobs_have_different_ports() -> None:
    ranks = {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_LOCAL_SIZE": "2", "PMI_LOCAL_RANK": "1"}
    jobs = ({}, {"PALS_APID": "b7a5"}, {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.server"})
    first_ports = {str(read_environment({**ranks, **job})) for job in jobs}
    assert len(first_ports) == len(jobs)


def test_a_step_of_a_component_under_cray_is_read_from_slurm() -> None:
    own = {"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_JOBID": "11", "PALS_APID": "11.0"}
    plain = recorded("slurm_het_srun")[1]
    assert plain["SLURM_JOB_ID"] == "10"
    assert read_environment({**plain, **own}) == read_environment(plain)


def test_an_interactive_step_with_pmix_of_slurm_is_a_process_by_itself() -> None:
    own = {
        "PMIX_NAMESPACE": "slurm.pmix.23.4294967290",
        "PMIX_RANK": "0",
        "PMIX_HOSTNAME": "node01",
    }
    assert read_environment({**recorded("slurm_interactive_step")[0], **own}) is None
