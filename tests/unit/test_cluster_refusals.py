"""Environments that are wrong: each is refused by the variable that is wrong, with the rule."""

import json
from pathlib import Path

import pytest

from tests.unit.recorded import Environ, recorded, refusal

TWO_WORKERS = json.dumps(
    {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
)
MULTIWORKER = json.dumps({**json.loads(TWO_WORKERS), "tfdist": {"strategy": "multiworker"}})
ELSEWHERE = json.dumps(
    {
        "cluster": {"worker": ["node01:1", "node01:2", "node02:1"]},
        "task": {"type": "worker", "index": 2},
    }
)

# Of a recorded job, by its name: what its first task has besides or in the place of what was
# recorded, the variable that is named then, and the rule that is broken.
REFUSED: dict[str, list[tuple[Environ, str, str]]] = {
    "slurm_srun_n3": [
        ({"TFDIST_PORT": "5000"}, "TFDIST_PORT", "ENV002"),
        ({"TFDIST_PORTS": "30000-30000"}, "TFDIST_PORTS", "ENV001"),
        ({"TFDIST_PORTS": "30000"}, "TFDIST_PORTS", "bad-ports"),
        ({"SLURM_STEP_NODELIST": "node[01-02"}, "SLURM_STEP_NODELIST", "bad-node-list"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST", "ENV007"),
        ({"SLURM_STEP_NODELIST": "node[01-03]"}, "SLURM_STEP_TASKS_PER_NODE", "ENV007"),
        ({"SLURM_STEP_NODELIST": "node01,node01"}, "SLURM_STEP_NODELIST", "ENV007"),
        ({"SLURM_STEP_NODELIST": "node[02-03]"}, "SLURMD_NODENAME", "ENV007"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_TASKS_PER_NODE", "ENV007"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS", "ENV007"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_STEP_TASKS_PER_NODE", "ENV007"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE", "ENV007"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two,1"}, "SLURM_STEP_TASKS_PER_NODE", "bad-node-list"),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID", "ENV007"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID", "ENV007"),
        ({"SLURM_PROCID": "2"}, "SLURMD_NODENAME", "ENV007"),
        ({"SLURMD_NODENAME": "node07"}, "SLURMD_NODENAME", "ENV007"),
        ({"SLURM_GTIDS": "0,2"}, "SLURM_GTIDS", "ENV007"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID", "ENV007"),
        ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE", "ENV007"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "SLURM_GTIDS", "ENV007"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_JOB_NODELIST_HET_GROUP_0", "ENV007"),
        ({"SLURM_RESTART_COUNT": "often"}, "SLURM_RESTART_COUNT", "ENV007"),
        ({"TFDIST_HET_GROUPS": "worker,ps"}, "TFDIST_HET_GROUPS", "ENV007"),
        ({"TFDIST_CLUSTER": "mpi"}, "TFDIST_CLUSTER", "ENV007"),
        ({"TFDIST_CLUSTER": "slrum"}, "TFDIST_CLUSTER", "ENV001"),
        ({"TFDIST_CLUSTER": "none", "TFDIST_STRATEGY": "ps"}, "TFDIST_STRATEGY", "ENV004"),
        ({"TFDIST_STRATEGY": "PS"}, "TFDIST_STRATEGY", "ENV001"),
        ({"TFDIST_STRATEGY": "single"}, "TFDIST_STRATEGY", "ENV004"),
        ({"TFDIST_STRATEGY": "mirrored"}, "TFDIST_STRATEGY", "ENV004"),
        ({"TFDIST_STRATEGY": "multiworker", "TFDIST_PS": "1"}, "TFDIST_PS", "ENV004"),
        ({"TFDIST_STRATEGY": "ps", "TFDIST_PS": "0"}, "TFDIST_PS", "ENV004"),
        ({"TFDIST_PS": "2"}, "TFDIST_PS", "ENV004"),
        ({"TFDIST_PS": "one"}, "TFDIST_PS", "ENV001"),
        ({"TFDIST_STRATGY": "ps"}, "TFDIST_STRATGY", "ENV002"),
        ({"TFDIST_HOST": "a,b"}, "TFDIST_HOST", "ENV002"),
        ({"TFDIST_HOSTS": "a:2,b", "TFDIST_NODE_RANK": "0"}, "TFDIST_HOSTS", "ENV006"),
        ({"TFDIST_HOSTS": "node01,node02", "TFDIST_NODE_RANK": "0"}, "TFDIST_HOSTS", "ENV006"),
        ({"TFDIST_HOSTS": "node[01-03]", "TFDIST_NODE_RANK": "0"}, "TFDIST_HOSTS", "ENV006"),
        ({"TF_CONFIG": TWO_WORKERS}, "TF_CONFIG", "ENV006"),
        ({"TF_CONFIG": ELSEWHERE}, "TF_CONFIG", "ENV006"),
    ],
    "slurm_salloc_srun": [
        ({"TFDIST_EVALUATOR": "1", "TFDIST_PS": "2"}, "TFDIST_PS", "ENV004"),
        ({"TFDIST_EVALUATOR": "1", "TFDIST_STRATEGY": "single"}, "TFDIST_EVALUATOR", "ENV004"),
    ],
    "slurm_het_srun": [
        ({"TFDIST_HET_GROUPS": "worker"}, "TFDIST_HET_GROUPS", "ENV007"),
        ({"TFDIST_HET_GROUPS": "ps,worker,worker"}, "TFDIST_HET_GROUPS", "ENV007"),
        ({"TFDIST_HET_GROUPS": "wroker,ps"}, "TFDIST_HET_GROUPS", "ENV001"),
        ({"TFDIST_HET_GROUPS": "ps,ps"}, "TFDIST_HET_GROUPS", "ENV007"),
        ({"TFDIST_HET_GROUPS": "worker,chief"}, "TFDIST_HET_GROUPS", "ENV007"),
        # One worker, who is the chief.
        ({"TFDIST_HET_GROUPS": "worker,ps"}, "TFDIST_HET_GROUPS", "ENV007"),
        ({"TFDIST_HET_GROUPS": "ps,worker", "TFDIST_PS": "2"}, "TFDIST_PS", "ENV007"),
        (
            {"TFDIST_HET_GROUPS": "ps,worker", "TFDIST_EVALUATOR": "1"},
            "TFDIST_EVALUATOR",
            "ENV007",
        ),
        (  # the components share a node
            {"SLURM_JOB_NODELIST_PACK_GROUP_1": "node01,gpu[1-2]"},
            "SLURM_JOB_NODELIST_PACK_GROUP_1",
            "ENV007",
        ),
        (  # a node of no component
            {"SLURM_JOB_NODELIST_PACK_GROUP_1": "gpu1"},
            "SLURM_STEP_NODELIST",
            "ENV007",
        ),
    ],
    "slurm_sbatch_plain": [({"SLURM_RESTART_COUNT": "often"}, "SLURM_RESTART_COUNT", "ENV007")],
    "slurm_srun_pmix": [
        ({"PMIX_RANK": "1"}, "PMIX_RANK", "ENV007"),
        ({"TF_CONFIG": TWO_WORKERS}, "TF_CONFIG", "ENV006"),
    ],
    "slurm_srun_pmi2": [({"PMI_RANK": "1"}, "PMI_RANK", "ENV007")],
    "slurm_srun_cray": [({"PMI_RANK": "1"}, "PMI_RANK", "ENV007")],
    "mpi_open_mpi_one_host": [
        ({"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE", "ENV007"),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE", "ENV007"),
        ({"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK", "ENV007"),
        ({"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK", "ENV007"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "TFDIST_HOSTS", "ENV007"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "OMPI_COMM_WORLD_LOCAL_RANK", "ENV007"),
        ({"TFDIST_HET_GROUPS": "worker,ps"}, "TFDIST_HET_GROUPS", "ENV007"),
    ],
    "mpi_open_mpi_two_hosts": [
        ({"TFDIST_HOSTS": ""}, "TFDIST_HOSTS", "ENV007"),
        ({"TFDIST_HOSTS": "a1,a2"}, "TFDIST_HOSTS", "ENV007"),
        ({"TFDIST_HOSTS": "a1,a2:2"}, "OMPI_COMM_WORLD_LOCAL_SIZE", "ENV007"),
        ({"TFDIST_HOSTS": "b1:2,b2:1"}, "PMIX_HOSTNAME", "ENV007"),
        ({"PMIX_HOSTNAME": "a2"}, "PMIX_HOSTNAME", "ENV007"),
        ({"TF_CONFIG": TWO_WORKERS}, "TF_CONFIG", "ENV006"),
    ],
    "mpi_open_mpi_in_slurm": [
        ({"SLURM_JOB_NODELIST": "node[01-03]"}, "TFDIST_HOSTS", "ENV007"),
        ({"SLURM_JOB_NODELIST": "node["}, "SLURM_JOB_NODELIST", "bad-node-list"),
        ({"SLURM_JOB_NODELIST": "gpu[1-2]"}, "PMIX_HOSTNAME", "ENV007"),
    ],
    "mpi_hydra_two_hosts": [
        ({"MPI_LOCALRANKID": "1"}, "MPI_LOCALRANKID", "ENV007"),
        ({"TF_CONFIG": TWO_WORKERS}, "TF_CONFIG", "ENV006"),
    ],
    "mpi_pmix_alone": [
        ({"TFDIST_HOSTS": ""}, "TFDIST_HOSTS", "ENV007"),
        ({"PMIX_RANK": "2"}, "PMIX_RANK", "ENV007"),
        ({"PMIX_RANK": "1"}, "PMIX_HOSTNAME", "ENV007"),
    ],
    "hosts_by_hand": [
        ({"TFDIST_NODE_RANK": "3"}, "TFDIST_NODE_RANK", "ENV007"),
        ({"TFDIST_NODE_RANK": ""}, "TFDIST_NODE_RANK", "ENV007"),
        ({"TFDIST_NODE_RANK": "1"}, "TFDIST_LOCAL_RANK", "ENV007"),
        ({"TFDIST_NODE_RANK": "1", "TFDIST_LOCAL_RANK": "2"}, "TFDIST_LOCAL_RANK", "ENV001"),
        ({"TFDIST_LOCAL_RANK": "1"}, "TFDIST_LOCAL_RANK", "ENV001"),
        ({"TFDIST_HOSTS": "alpha,"}, "TFDIST_HOSTS", "bad-node-list"),
        ({"TFDIST_HOSTS": "alpha,beta:2x"}, "TFDIST_HOSTS", "bad-hosts"),
        (
            {"TFDIST_HOSTS": "alpha,beta:22", "TFDIST_NODE_RANK": "2"},
            "TFDIST_NODE_RANK",
            "ENV007",
        ),
        ({"TFDIST_HET_GROUPS": "worker,ps"}, "TFDIST_HET_GROUPS", "ENV007"),
        ({"TF_CONFIG": TWO_WORKERS}, "TF_CONFIG", "ENV006"),
    ],
    "kubernetes_indexed_job": [
        ({"HOSTNAME": "other-0"}, "HOSTNAME", "ENV007"),
        ({"HOSTNAME": ""}, "HOSTNAME", "ENV007"),
        ({"HOSTNAME": "example-job-3"}, "HOSTNAME", "ENV007"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX", "ENV007"),
        ({"JOB_COMPLETION_INDEX": "first"}, "JOB_COMPLETION_INDEX", "ENV007"),
        ({"TFDIST_HOSTS": "example-job-[0-2"}, "TFDIST_HOSTS", "bad-node-list"),
        ({"TFDIST_HOSTS": "example-job-[0-2]:2"}, "TFDIST_HOSTS", "ENV007"),
        ({"TFDIST_HOSTS": "example-job-0.svc,example-job-0.other"}, "HOSTNAME", "ENV007"),
        ({"TFDIST_RESTARTS": "often"}, "TFDIST_RESTARTS", "ENV001"),
    ],
    "plain_shell": [
        ({"TFDIST_RESTARTS": "often"}, "TFDIST_RESTARTS", "ENV001"),
        ({"TFDIST_RESTART": "1"}, "TFDIST_RESTART", "ENV002"),
        ({"TFDIST_EVALUATOR": "1"}, "TFDIST_EVALUATOR", "ENV004"),
        ({"TFDIST_EVALUATOR": "yes"}, "TFDIST_EVALUATOR", "ENV001"),
        ({"TFDIST_STRATEGY": "ps"}, "TFDIST_STRATEGY", "ENV004"),
        ({"TFDIST_STRATEGY": "multiworker"}, "TFDIST_STRATEGY", "ENV004"),
        ({"TFDIST_PS": "1"}, "TFDIST_PS", "ENV004"),
        ({"TFDIST_STRATGY": "ps"}, "TFDIST_STRATGY", "ENV002"),
        ({"TF_CONFIG": TWO_WORKERS, "TFDIST_PS": "none"}, "TFDIST_PS", "ENV001"),
        ({"TF_CONFIG": TWO_WORKERS, "TFDIST_PS": "1"}, "TFDIST_PS", "ENV006"),
        ({"TF_CONFIG": MULTIWORKER, "TFDIST_STRATEGY": "ps"}, "TFDIST_STRATEGY", "ENV006"),
        *(
            ({"TFDIST_STARTUP_TIMEOUT_S": value}, "TFDIST_STARTUP_TIMEOUT_S", "ENV001")
            for value in ("0", "-1", "soon", "inf", "nan")
        ),
        (
            {"TFDIST_HOSTS": "a", "TFDIST_NODE_RANK": "0", "TFDIST_STRATEGY": "ps"},
            "TFDIST_PS",
            "ENV004",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "variable", "code"),
    [(name, *refused) for name, listed in REFUSED.items() for refused in listed],
)
def test_it_is_refused(name, change, variable, code):
    refusal({**recorded(name)[0], **change}, variable, code=code)


def test_a_distribution_that_no_task_is_told_is_refused_in_each():
    for environ in recorded("refused_slurm_arbitrary"):
        assert "--distribution=block" in refusal(environ, "SLURM_DISTRIBUTION").fix


def test_ranks_dealt_out_over_hosts_are_refused_with_the_flag_that_helps():
    environ = recorded("mpi_open_mpi_two_hosts")[1]  # mpirun --map-by node
    environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_HOSTNAME": "a2"}
    environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"
    assert "--map-by slot" in refusal(environ, "OMPI_COMM_WORLD_LOCAL_RANK").fix


def test_the_page_shows_the_message_as_it_is():
    page = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    environ = {**recorded("slurm_srun_n3")[0], "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert str(refusal(environ, "SLURM_STEP_TASKS_PER_NODE")) in page
