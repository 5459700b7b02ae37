"""Detection of this process's job and task from its environment.

Each launcher sets its own variables, and one function reads the variables of one launcher. The
function returns `None` if the variables are not set or describe one process. It raises `UsageError`
if the variables are wrong.

The rules (docs/schedulers.md explains them to users):

* A process is one of several tasks only if tfdist's launcher, ``srun`` with several tasks or
  ``mpirun`` with several ranks started it, or if TFDIST_HOSTS, TF_CONFIG or a platform's list of
  nodes is set. An allocation or an index is not enough.
* A task of tfdist's launcher (which sets _TFDIST_JOB) reads only TF_CONFIG. The launcher itself may
  be a task of a Slurm step.
* Other processes use the first source in the order of `SOURCES` that describes them. TF_CONFIG
  precedes all other sources. ``mpirun`` precedes ``srun``, because it runs inside a Slurm step.
* TF_CONFIG must agree with the other sources on the number of tasks. Ports, host names and task
  types may differ.
* TFDIST_CLUSTER selects one source. The value ``none`` selects a single process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tfdist.cluster import settings, tf_config
from tfdist.cluster.address import (
    expand_counts,
    expand_hosts,
    is_loopback,
    parse_hosts,
    ranks_of,
    shown,
)
from tfdist.cluster.placement import one_of, place, port_of_job, same_host, unfit
from tfdist.cluster.settings import integer, needed, text
from tfdist.cluster.tf_config import ClusterSpec, Task, TaskConfig
from tfdist.errors import UsageError, require_one_of
from tfdist.options import (
    CLUSTER,
    EVALUATOR,
    HOSTS,
    LOCAL_RANK,
    NODE_RANK,
    PS,
    STRATEGY,
    JobOptions,
    JobSettings,
    part,
)

# Cluster resolver of MPI: the variables that mpirun sets for each rank.
#
# They give the number of ranks on all hosts and on this host, and no host names. The hosts are in
# TFDIST_HOSTS (``mpirun -x TFDIST_HOSTS``) or in the node list of a Slurm allocation. If all ranks
# are on this machine, no list is needed. tfdist reads
#
# * Open MPI: OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_SIZE, _LOCAL_RANK
#   (https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html);
# * MPICH and Intel MPI (Hydra): PMI_SIZE, PMI_RANK, MPI_LOCALNRANKS, MPI_LOCALRANKID.

_OMPI = tuple(f"OMPI_COMM_WORLD_{of}" for of in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
_PMI = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
_LOCAL_HOST = "127.0.0.1"
_JOB_NAMES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    *("SLURM_JOB_ID", "PBS_JOBID"),  # allocation, if mpirun sets no name of its job
)


def from_mpi(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this rank's part of the job, or `None` outside a job of several ranks.

    Ranks fill host after host, the default of mpirun (``--map-by slot``). The first port
    follows from the name of the job.

    Raises:
        UsageError: the hosts of the ranks are unknown, or mpirun placed the ranks in another order.
    """
    names = _names_of_mpi(environ)
    if not names:
        return None
    size = needed(environ, names[0], least=1)
    rank = needed(environ, names[1], most=size - 1)
    if size == 1:
        return None
    is_here = integer(environ, names[2], least=1, most=size) == size
    is_listed = text(environ, HOSTS) or not is_here
    ranks = _hosts_of_mpi(environ, size) if is_listed else [_LOCAL_HOST] * size
    _require_mapped_by_slot(environ, names, rank, ranks)
    job = next(filter(None, (text(environ, name) for name in _JOB_NAMES)), "0")
    first_port = port_of_job(job, job_settings=job_settings)
    return place(ranks, rank=rank, job_settings=job_settings, job_port=first_port)


def _names_of_mpi(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the variables with the size, the rank and the local size, () outside of mpirun."""
    if _OMPI[0] in environ:
        return _OMPI
    # With --mpi=pmi2 srun sets the variables of PMI too. Its own variables have more details.
    step = f"{text(environ, 'SLURM_JOB_ID')}.{text(environ, 'SLURM_STEP_ID')}"
    is_of_slurm = text(environ, "PMI_JOBID") == step
    return _PMI if {*_PMI[:2]} <= {*environ} and not is_of_slurm else ()


def _hosts_of_mpi(environ: Mapping[str, str], size: int) -> list[str]:
    """Return the host of each rank, from TFDIST_HOSTS or a Slurm allocation."""
    if value := text(environ, HOSTS):
        ranks = ranks_of(parse_hosts(value, where=HOSTS))
        if len(ranks) < size:
            problem = f"{shown(value)} has {len(ranks)} slots, but mpirun started {size} ranks"
            fix = "give each host as many slots as mpirun gives it ranks, as in a:2,b:2"
            raise _contradiction(HOSTS, problem, fix)
        return ranks[:size]
    listed = text(environ, "SLURM_JOB_NODELIST")
    nodes = expand_hosts(listed, where="SLURM_JOB_NODELIST") if listed else []
    if not nodes or size % len(nodes):
        problem = f"the list of hosts of the {size} ranks is missing"
        raise _missing(HOSTS, problem, f"pass {HOSTS} on with mpirun -x {HOSTS}")
    return [node for node in nodes for _ in range(size // len(nodes))]


def _require_mapped_by_slot(
    environ: Mapping[str, str], names: Sequence[str], rank: int, ranks: Sequence[str]
) -> None:
    """Raise UsageError if this rank is not on its host: other ranks would wait for it there."""
    most = len(ranks)
    found = (integer(environ, names[3], most=most - 1), integer(environ, names[2], most=most))
    host = ranks[rank]
    expected = (ranks[:rank].count(host), ranks.count(host))
    if None not in found and found != expected and not all(map(is_loopback, ranks)):
        problem = (
            f"rank {rank} has local rank {found[0]} of {found[1]}, but the list of hosts gives it "
            f"local rank {expected[0]} of {expected[1]} on {shown(host)}"
        )
        fix = f"run mpirun with --map-by slot, and with the hosts and slots of {HOSTS}"
        raise _contradiction(names[3], problem, fix)


# Cluster resolver of Slurm: the variables that ``srun`` sets in a step's tasks.
#
# Only a step of several tasks is a job. A batch script, a shell of ``salloc`` and a step of one
# task are single processes for any size of the allocation. ``SLURM_NTASKS`` counts tasks that do
# not run there. Checked with Slurm 22.05. Slurm documents the variables at
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # batch scripts, salloc shells and similar steps


def from_slurm(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this task's part of the job step, or `None` outside a step of several tasks.

    Tasks have the order of SLURM_PROCID. Their first port follows from the job and step number
    (`placement.port_of_job`).

    Raises:
        UsageError: the variables contradict each other, or do not give the node of a task.
    """
    count = num_slurm_tasks(environ)
    if count == 1:
        return None
    if (integer(environ, "SLURM_HET_SIZE") or 1) > 1:
        problem = f"a heterogeneous job of {environ['SLURM_HET_SIZE']} components is not supported"
        fix = "submit a job of a single component, or set TF_CONFIG"
        raise _contradiction("SLURM_HET_SIZE", problem, fix)
    node_of_ranks = _nodes_of_ranks(environ, count=count)
    rank = needed(environ, "SLURM_PROCID", most=count - 1)
    name, node = text(environ, "SLURMD_NODENAME"), node_of_ranks[rank]
    if name and node != name:
        problem = f"the task runs on {shown(name)}, but SLURM_PROCID={rank} belongs to {node}"
        fix = "run srun with --distribution=block, and pass Slurm's variables on unchanged"
        raise _contradiction("SLURMD_NODENAME", problem, fix)
    first_port = slurm_first_port(environ, job_settings)
    return place(node_of_ranks, rank=rank, job_settings=job_settings, job_port=first_port)


def num_slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks in this process's ``srun`` step, 1 outside a step."""
    step = integer(environ, "SLURM_STEP_ID", most=2**32 - 1)
    if step is None or step >= _FIRST_SPECIAL_STEP or not text(environ, "SLURM_PROCID"):
        return 1
    return integer(environ, "SLURM_STEP_NUM_TASKS", least=1) or 1


def slurm_first_port(environ: Mapping[str, str], job_settings: JobSettings) -> int:
    """Return the port of the first task of the step."""
    step = needed(environ, "SLURM_STEP_ID")
    job = str(needed(environ, "SLURM_JOB_ID"))
    return port_of_job(job, step=step, job_settings=job_settings)


def _nodes_of_ranks(environ: Mapping[str, str], *, count: int) -> list[str]:
    """Return the node of each rank. Slurm's ``block`` distribution fills node after node.

    https://slurm.schedmd.com/srun.html#OPT_distribution
    """
    variables = {"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    for variable, example in variables.items():
        if not text(environ, variable):
            problem = f"the variable is not set (it has a list such as {example})"
            raise _missing(variable, problem, f"pass {variable} on to the task")
    listed, per_node = (text(environ, variable) for variable in variables)
    names = expand_hosts(listed, where="SLURM_STEP_NODELIST")
    tasks = expand_counts(per_node, where="SLURM_STEP_TASKS_PER_NODE")
    if len(tasks) != len(set(names)) or sum(tasks) != count:
        raise _contradiction(
            "SLURM_STEP_TASKS_PER_NODE",
            f"{shown(per_node)} gives {sum(tasks)} tasks for {len(tasks)} "
            f"node{'s' * (len(tasks) > 1)}, but SLURM_STEP_NUM_TASKS={count} and "
            f"SLURM_STEP_NODELIST={shown(listed)}",
            "pass Slurm's variables on to the task unchanged",
        )
    return [name for name, number in zip(names, tasks, strict=True) for _ in range(number)]


# Cluster resolver of plain hosts and of Kubernetes: a list ``host:slots,...`` in TFDIST_HOSTS.
#
# A host gets its index from TFDIST_NODE_RANK, or finds its name in the list. So all pods of an
# indexed Job, a StatefulSet or a JobSet share one manifest. With a headless Service ``train`` as
# the pods' ``subdomain``:
#
# * an indexed Job ``mnist``: ``TFDIST_HOSTS=mnist-[0-3].train``. The control plane names pods
#   ``$(job name)-$(index)``
#   (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/).
# * a StatefulSet ``mnist``: the same names.
# * a JobSet ``mnist``: ``mnist-worker-0-[0-3].mnist,mnist-ps-0-[0-1].mnist``, with TFDIST_PS=2
#   (``site/static/examples/simple/jobset-with-network.yaml`` in
#   https://github.com/kubernetes-sigs/jobset).


def from_hosts(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this task's part of the job on TFDIST_HOSTS, or `None` if TFDIST_HOSTS is not set.

    TFDIST_LOCAL_RANK is the index of this process among the slots of the host, if the host has
    several slots.

    Raises:
        UsageError: the place of this host or process is unknown.
    """
    value = text(environ, HOSTS)
    if not value:
        return None
    listed = parse_hosts(value, where=HOSTS)
    node_rank = _rank_of_host(environ, [host for host, _ in listed])
    slots = listed[node_rank][1]
    local = integer(environ, LOCAL_RANK, most=slots - 1)
    if local is None and slots > 1:
        problem = f"the variable is not set, but {listed[node_rank][0]} has {slots} slots"
        raise _missing(LOCAL_RANK, problem, f"set it to a number from 0 to {slots - 1}")
    rank = sum(count for _, count in listed[:node_rank]) + (local or 0)
    return one_of(ranks_of(listed), rank=rank, job_settings=job_settings)


def _rank_of_host(environ: Mapping[str, str], hosts: Sequence[str]) -> int:
    """Return TFDIST_NODE_RANK, or the position of HOSTNAME in the list of hosts."""
    rank = integer(environ, NODE_RANK, most=len(hosts) - 1)
    if rank is not None or len(hosts) == 1:  # the only pod of a job needs no rank
        return rank or 0
    name = text(environ, "HOSTNAME")
    ranks = [i for i, host in enumerate(hosts) if name and same_host(host, name)]
    if len(ranks) == 1:
        return ranks[0]
    problem = f"the variable is not set, and {HOSTS} has HOSTNAME {shown(name)} {len(ranks)} times"
    raise _missing(NODE_RANK, problem, "set it to the position of each host in the list")


# Platforms that give each node the list of nodes and its own position. Each node is one task.


def from_skypilot(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this node's part of a SkyPilot task, or `None` elsewhere.

    https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
    """
    nodes = text(environ, "SKYPILOT_NODE_IPS").split()
    return _node_of(nodes, environ, rank="SKYPILOT_NODE_RANK", job_settings=job_settings)


def from_leader_worker_set(
    environ: Mapping[str, str], job_settings: JobSettings
) -> TaskConfig | None:
    """Return this pod's part of its group in a LeaderWorkerSet, or `None` elsewhere.

    Pod ``i`` of the group of leader ``NAME.DOMAIN`` is ``NAME-i.DOMAIN``:
    https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
    """
    leader = text(environ, "LWS_LEADER_ADDRESS")
    name, _, domain = leader.partition(".")
    size = needed(environ, "LWS_GROUP_SIZE", least=1) if leader else 0
    nodes = [leader, *(f"{name}-{index}.{domain}" for index in range(1, size))] if leader else []
    return _node_of(nodes, environ, rank="LWS_WORKER_INDEX", job_settings=job_settings)


def from_sagemaker(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this host's part of a SageMaker training job, or `None` elsewhere.

    https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """
    value, own = text(environ, "SM_HOSTS"), text(environ, "SM_CURRENT_HOST")
    if not value:
        return None
    try:
        nodes = [str(host) for host in json.loads(value)]
        rank = str(nodes.index(own))
    except (ValueError, TypeError):
        problem = f"{shown(value)} is not a JSON list that contains SM_CURRENT_HOST={shown(own)}"
        fix = "pass SageMaker's variables on to the task unchanged"
        raise _contradiction("SM_HOSTS", problem, fix) from None
    return _node_of(nodes, {"rank": rank}, rank="rank", job_settings=job_settings)


def _node_of(
    nodes: Sequence[str], environ: Mapping[str, str], *, rank: str, job_settings: JobSettings
) -> TaskConfig | None:
    if not nodes:
        return None
    number = needed(environ, rank, most=len(nodes) - 1)
    return one_of(nodes, rank=number, job_settings=job_settings)


Reader = Callable[[Mapping[str, str], JobSettings], TaskConfig | None]


def _read_tf_config(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    config = tf_config.from_environ(environ)
    return None if config is None else _with_settings(config, job_settings)


SOURCES: Mapping[str, Reader] = {
    "tf_config": _read_tf_config,
    "mpi": from_mpi,
    "slurm": from_slurm,
    "hosts": from_hosts,
    "skypilot": from_skypilot,
    "lws": from_leader_worker_set,
    "sagemaker": from_sagemaker,
}
"""Readers by their names in TFDIST_CLUSTER, in order of precedence."""


def num_processes(source: str, environ: Mapping[str, str]) -> int:
    """Return the number of processes that a source started with this process (1 if unknown)."""
    if source == "mpi":  # the hosts of the ranks may be unknown
        names = _names_of_mpi(environ)
        return needed(environ, names[0], least=1) if names else 1
    with contextlib.suppress(UsageError):
        config = SOURCES[source](environ, JobSettings())
        return len(config.cluster.tasks()) if config else 1
    return 1


def detect(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return the config of this process's task, `None` for a single process without settings."""
    job_settings = settings.from_environ(environ)
    named = text(environ, CLUSTER)
    fix = "correct the value, or unset the variable"
    require_one_of(CLUSTER, named or "auto", ("auto", "none", *SOURCES), fix=fix, code="bad-value")
    if named == "none":
        return _alone(job_settings)
    if named not in ("", "auto"):
        config = SOURCES[named](environ, job_settings)
        if config is not None:
            return config
        problem = f"the variables of {named} do not make this process one of several tasks"
        fix = f"start the program as a task of {named}, or unset {CLUSTER}"
        raise _contradiction(CLUSTER, problem, fix)
    for name, read in SOURCES.items():
        config = read(environ, job_settings)
        if config is not None:
            if name == "tf_config" and config.task.type != "evaluator":  # not all count it
                _check_size(config, environ, job_settings)
            return config
    return _alone(job_settings)


def _alone(job_settings: JobSettings) -> TaskConfig | None:
    """Return the config of a single process, `None` if all options have their defaults."""
    kind = job_settings.kind
    of_several = {
        STRATEGY: kind.name if kind.has_several_tasks else None,
        PS: job_settings.ps,
        EVALUATOR: int(job_settings.evaluator),
    }
    for where, value in of_several.items():
        if value:
            problem = f"{value} needs several tasks, but this process is not a task of a job"
            fix = "start the program with srun, mpirun, TFDIST_HOSTS or TF_CONFIG"
            raise unfit(where, problem, f"{fix}, or unset {where}")
    options = part(JobOptions, job_settings)
    if options == JobOptions():
        return None
    return TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)


def _with_settings(config: TaskConfig, job_settings: JobSettings) -> TaskConfig:
    """Return `config`, with strategy and options from ``TFDIST_*`` variables if it has none."""
    strategy, has = job_settings.strategy, config.options.strategy
    if "auto" not in (strategy, has) and strategy != has:
        problem = f"{strategy} contradicts the strategy {has} in TF_CONFIG"
        raise _disagreement(STRATEGY, problem, "correct TF_CONFIG")
    count = len(config.cluster.ps)
    if job_settings.ps not in (None, count):
        problem = f"{job_settings.ps} contradicts TF_CONFIG, which has {count} ps"
        raise _disagreement(PS, problem, "correct TF_CONFIG")
    options = config.options
    if options == JobOptions(strategy=has):
        options = part(JobOptions, job_settings)
    strategy = strategy if has == "auto" else has
    ports = options.ports or job_settings.ports  # of this host, whatever else TF_CONFIG says
    return replace(config, options=replace(options, strategy=strategy, ports=ports))


def _check_size(config: TaskConfig, environ: Mapping[str, str], job_settings: JobSettings) -> None:
    """Check the number of tasks in TF_CONFIG against the first other source that gives one."""
    count = max(1, len(config.cluster.training_tasks()))
    for name, read in SOURCES.items():
        other = None
        if name != "tf_config":
            with contextlib.suppress(UsageError):  # TF_CONFIG precedes it
                other = read(environ, job_settings)
        if other is not None and (found := len(other.cluster.training_tasks())) != count:
            raise _disagreement(
                "TF_CONFIG",
                f"TF_CONFIG has {count} training task{'s' * (count > 1)}, but {name} has {found}",
                f"set {CLUSTER}=tf_config to read only TF_CONFIG",
            )
        if other is not None:
            return


def _disagreement(where: str, problem: str, or_else: str) -> UsageError:
    return UsageError(where, problem, fix=f"unset {where}, or {or_else}", code="bad-environment")


def _missing(where: str, problem: str, fix: str) -> UsageError:
    return _contradiction(where, problem, f"{fix}, or set {CLUSTER}=none if the job has one task")


def _contradiction(where: str, problem: str, fix: str) -> UsageError:
    return UsageError(where, problem, fix=fix, code="bad-environment")
