"""Detection of this process's job and task from its environment.

Whoever starts the tasks leaves variables for them, each in its own way. A function for each way
reads them. It returns None when they are not there or speak of one process, and
raises `UsageError` when they are there and say something wrong.

The rules, which docs/hosts.md has for users:

* A process is one of several tasks only if it was started as one: by our launcher, by ``srun``
  as a step of several tasks, by ``mpirun`` with several ranks, in a pod with TFDIST_HOSTS, or
  with TF_CONFIG. An allocation or an index alone says nothing.
* In a task of our launcher (it sets TFDIST_JOB) TF_CONFIG is all that is read: the launcher may
  well be one task of a Slurm step itself.
* Else the sources are asked in the order of `SOURCES`, and the first that knows the process is
  taken: TF_CONFIG goes before the rest, and ``mpirun`` before ``srun``, inside whose step it runs.
* TF_CONFIG must agree with the rest on the number of tasks and, where both name hosts in the same
  way, on the host of this one. Ports, other names of hosts and task types may differ: whoever
  wrote TF_CONFIG knew better.
* TFDIST_CLUSTER names one source and nothing else is read; ``none`` is a process by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tfdist.cluster import placement, settings, slurm, tf_config
from tfdist.cluster.address import expand_hosts, parse_hosts, ranks_of, shown, split_address
from tfdist.cluster.placement import is_name, one_of, same_host
from tfdist.cluster.settings import (
    CLUSTER,
    EVALUATOR,
    HOSTS,
    LOCAL_RANK,
    NODE_RANK,
    PS,
    STRATEGY,
    JobSettings,
    contradiction,
    integer,
    missing,
    needed,
    text,
)
from tfdist.cluster.tf_config import ClusterSpec, JobOptions, Task, TaskConfig
from tfdist.errors import UsageError, require_one_of

# Cluster resolver of MPI: the variables that mpirun sets for each rank.
#
# They say how many ranks there are, on all hosts and on this one, and never on which hosts: those
# come from TFDIST_HOSTS (``mpirun -x TFDIST_HOSTS``), in a Slurm allocation from its node list,
# and are this machine if all ranks are on it. Read are
#
# * Open MPI: OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_SIZE, _LOCAL_RANK
#   (https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html);
# * MPICH and Intel MPI (Hydra): PMI_SIZE, PMI_RANK, MPI_LOCALNRANKS, MPI_LOCALRANKID;
# * PMIx alone (prterun): PMIX_RANK, which has no size beside it
#   (https://github.com/open-mpi/ompi/issues/9167), and so needs TFDIST_HOSTS.

_OMPI = tuple(f"OMPI_COMM_WORLD_{of}" for of in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
_PMI = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
_PMIX_RANK = "PMIX_RANK"
_LOCAL_HOST = "127.0.0.1"
_JOB_NAMES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID"),
    *("SLURM_JOB_ID", "PBS_JOBID"),  # of the allocation, where mpirun has no name for its job
)


class _World(NamedTuple):
    """Place of a rank by its launcher; `names` are the variables that say so, in this order."""

    size: int
    rank: int
    local_size: int | None
    local_rank: int | None
    names: Sequence[str]


def from_mpi(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this rank's part of the job, or None outside a job of several ranks.

    Ranks are taken host after host, as mpirun places them by default
    (``--map-by slot``). Ports begin at one that follows from the name of the job.

    Raises:
        UsageError: the hosts of the ranks are unknown, or this one is not where it should be.
    """
    world = _world(environ)
    if world is None or world.size == 1:
        return None
    where, ranks = _hosts_of_mpi(environ, world)
    _check_mpi(environ, world, ranks, where)
    job = next(filter(None, (text(environ, name) for name in _JOB_NAMES)), "0")
    first_port = placement.port_of_job(job, job_settings=job_settings)
    at = placement.ports_of_ranks(ranks, first_port=first_port, among=job_settings.ports)
    types = placement.task_types(world.size, job_settings=job_settings)
    return placement.placed(at, types, rank=world.rank, job_settings=job_settings)


def _world(environ: Mapping[str, str]) -> _World | None:
    if _OMPI[0] in environ:
        return _sized(environ, _OMPI)
    if _is_of_slurm(environ):
        return None
    if _PMI[0] in environ and _PMI[1] in environ:
        return _sized(environ, _PMI)
    if _PMIX_RANK in environ:
        value = text(environ, HOSTS)
        if not value:
            expected = "the hosts of the job, as PMIx does not tell a rank how many there are"
            raise missing(HOSTS, expected)
        size = len(ranks_of(parse_hosts(value, where=HOSTS)))
        rank = needed(environ, _PMIX_RANK, most=size - 1)
        return _World(size, rank, None, None, (HOSTS, _PMIX_RANK))
    return None


def _is_of_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether srun itself set the variables of PMI or PMIx.

    It says the same by its own variables then, and more: with ``--mpi=pmi2`` and ``pmix``, and
    with ``cray_shasta``, the default of HPE Cray EX, which has the step's number in PALS_APID.
    """
    step = text(environ, "SLURM_STEP_ID")
    steps = (text(environ, name).partition(".") for name in ("PMI_JOBID", "PALS_APID"))
    # The job's number is that of the component in a heterogeneous job, and SLURM_JOB_ID is not.
    of_pmi = bool(step) and any(job.isdecimal() and at == step for job, _, at in steps)
    if not of_pmi and not text(environ, "PMIX_NAMESPACE").startswith("slurm.pmix."):
        return False
    name = _PMI[1] if of_pmi else _PMIX_RANK
    rank, expected = text(environ, name), text(environ, "SLURM_PROCID")
    if rank not in ("", expected):
        raise contradiction(
            name,
            shown(rank),
            f"{shown(expected)}, the SLURM_PROCID, as Slurm sets both",
            "pass Slurm's variables on to the task as they are",
        )
    return True


def _sized(environ: Mapping[str, str], names: Sequence[str]) -> _World:
    size = needed(environ, names[0], least=1)
    rank = needed(environ, names[1], most=size - 1)
    local_size = integer(environ, names[2], least=1, most=size)
    local_rank = integer(environ, names[3], most=(local_size or size) - 1)
    return _World(size, rank, local_size, local_rank, names)


def _hosts_of_mpi(environ: Mapping[str, str], world: _World) -> tuple[str, list[str]]:
    """Return the source of the hosts, a variable, and the host of each rank."""
    value = text(environ, HOSTS)
    if value:
        ranks = ranks_of(parse_hosts(value, where=HOSTS))
        if len(ranks) < world.size:
            raise contradiction(
                HOSTS,
                f"{shown(value)}: {len(ranks)} slots",
                f"a slot for each of the {world.size} ranks of {world.names[0]}",
                "give each host as many slots as mpirun gives it ranks, as in a:2,b:2",
            )
        return HOSTS, ranks[: world.size]
    if world.local_size == world.size:
        return world.names[2], [_LOCAL_HOST] * world.size
    listed = text(environ, "SLURM_JOB_NODELIST")
    nodes = expand_hosts(listed, where="SLURM_JOB_NODELIST") if listed else []
    if not nodes or world.size % len(nodes):
        expected = f"the hosts of the {world.size} ranks, which are on several"
        raise missing(HOSTS, f"{expected}; pass it on with mpirun -x {HOSTS}")
    each = world.size // len(nodes)
    return "SLURM_JOB_NODELIST", [node for node in nodes for _ in range(each)]


def _check_mpi(environ: Mapping[str, str], world: _World, ranks: Sequence[str], where: str) -> None:
    """Compare where this rank should be with its own variables."""
    host = ranks[world.rank]
    here = [rank for rank, other in enumerate(ranks) if other == host]
    local = here.index(world.rank)
    found = (world.local_size, world.local_rank)
    for index, (value, follows) in enumerate(zip(found, (len(here), local), strict=True)):
        if value not in (None, follows):
            raise contradiction(
                world.names[2 + index],
                f"{value} for rank {world.rank}",
                f"{follows}, as {where} puts ranks {here[0]} to {here[-1]} on {host}",
                f"map ranks by slot (mpirun --map-by slot), with the slots of {HOSTS}",
            )
    own_host = text(environ, "PMIX_HOSTNAME")
    if own_host and placement.is_name(host) and not placement.same_host(host, own_host):
        raise contradiction(
            "PMIX_HOSTNAME",
            f"{shown(own_host)} for rank {world.rank}",
            f"{host}, where {where} puts it",
            f"write the hosts into {HOSTS} in mpirun's order, by their own names",
        )


# Cluster resolver of Kubernetes: pods of an indexed Job, a StatefulSet or a JobSet.
#
# The manifest names the pods in TFDIST_HOSTS, as a node list; a pod finds itself there by its
# host name, so that one manifest does for all. With a headless Service ``train`` and the pods'
# ``subdomain`` set to it:
#
# * an indexed Job ``mnist``: ``TFDIST_HOSTS=mnist-[0-3].train``. The control plane names pods
#   ``$(job name)-$(index)`` and sets JOB_COMPLETION_INDEX
#   (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/).
# * a StatefulSet ``mnist``: the same names.
# * a JobSet ``mnist``: ``mnist-worker-0-[0-3].mnist,mnist-ps-0-[0-1].mnist``, with TFDIST_PS=2
#   (``site/static/examples/simple/jobset-with-network.yaml`` in
#   https://github.com/kubernetes-sigs/jobset).
#
# TFJob sets TF_CONFIG and needs nothing from here.

POD_INDEX = "JOB_COMPLETION_INDEX"


def from_kubernetes(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this pod's part of the job, or None outside a pod that has TFDIST_HOSTS.

    A pod that says its place itself, by TFDIST_NODE_RANK, is a host like any other.

    Raises:
        UsageError: the pod is not in the list, or is where its index does not say.
    """
    is_pod = "KUBERNETES_SERVICE_HOST" in environ or POD_INDEX in environ
    if not is_pod or not text(environ, HOSTS) or text(environ, NODE_RANK):
        return None
    listed = parse_hosts(text(environ, HOSTS), where=HOSTS)
    if any(slots > 1 for _, slots in listed):
        raise contradiction(
            HOSTS, shown(text(environ, HOSTS)), "one task a pod", "write a pod for each task"
        )
    pods = [host for host, _ in listed]
    return placement.one_of(pods, rank=_rank_of_pod(environ, pods), job_settings=job_settings)


def _rank_of_pod(environ: Mapping[str, str], pods: Sequence[str]) -> int:
    """Return where this pod is in the list."""
    name = text(environ, "HOSTNAME")
    if not name:
        raise missing("HOSTNAME", "the pod's name, which containers have there")
    ranks = [rank for rank, pod in enumerate(pods) if placement.same_host(pod, name)]
    if len(ranks) != 1:
        raise contradiction(
            "HOSTNAME",
            f"{shown(name)}, which is {len(ranks)} times in {HOSTS}",
            f"one of {shown(environ[HOSTS])}, each once",
            f"write the names of the job's pods into {HOSTS}, with the Service's name",
        )
    index = integer(environ, POD_INDEX)
    if index is not None and name.split(".")[0].rpartition("-")[2] != str(index):
        raise contradiction(
            POD_INDEX,
            f"{index} in the pod {shown(name)}",
            "the number at the end of the pod's name",
            f"leave {POD_INDEX} and HOSTNAME as Kubernetes sets them",
        )
    return ranks[0]


# Cluster resolver of plain hosts, without a scheduler: a list ``host:slots,...`` is all there is.
#
# The list is in TFDIST_HOSTS, or a flag of a program; the host is given its index in it.


def from_hosts(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this task's part of the job on TFDIST_HOSTS, or None where that is not set.

    TFDIST_NODE_RANK says which entry of the list this host is, and TFDIST_LOCAL_RANK, where
    the entry has several slots, which of them this process is.
    """
    value = text(environ, HOSTS)
    if not value:
        return None
    listed = parse_hosts(value, where=HOSTS)
    # A host alone needs no rank; of pods one that is all of its job comes here.
    node_rank = needed(environ, NODE_RANK) if listed[1:] else integer(environ, NODE_RANK) or 0
    if node_rank >= len(listed):
        raise contradiction(
            NODE_RANK,
            str(node_rank),
            f"0 to {len(listed) - 1}: the list has {len(listed)} hosts",
            "give each host its position in the list, from 0 on",
        )
    slots = listed[node_rank][1]
    local = integer(environ, LOCAL_RANK, most=slots - 1)
    if local is None and slots > 1:
        expected = f"a number from 0 to {slots - 1}: {listed[node_rank][0]} has {slots} slots"
        raise missing(LOCAL_RANK, expected)
    rank = sum(count for _, count in listed[:node_rank]) + (local or 0)
    return one_of(ranks_of(listed), rank=rank, job_settings=job_settings)


Reader = Callable[[Mapping[str, str], JobSettings], TaskConfig | None]


def _read_tf_config(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return the task of TF_CONFIG, completed by our variables."""
    config = tf_config.from_environ(environ)
    return None if config is None else _with_settings(config, job_settings)


SOURCES: Mapping[str, Reader] = {
    "tf_config": _read_tf_config,
    "mpi": from_mpi,
    "slurm": slurm.from_environ,
    "kubernetes": from_kubernetes,
    "hosts": from_hosts,
}
"""By the name that TFDIST_CLUSTER has for it; in order of precedence."""


def detect(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return the task of this process; None for a process by itself, without settings."""
    job_settings = settings.from_environ(environ)
    named = text(environ, CLUSTER)
    check_source(named)
    if named == "none":
        return _alone(job_settings)
    if named not in ("", "auto"):
        config = SOURCES[named](environ, job_settings)
        if config is not None:
            return config
        raise UsageError(
            CLUSTER,
            received=f"{named}, whose variables do not make this process one of several tasks",
            expected=f"a process that {named} started as a task of a job",
            fix=f"start it so, or unset {CLUSTER}",
            code="ENV007",
        )
    for name, read in SOURCES.items():
        config = read(environ, job_settings)
        if config is not None:
            _check_agreement(name, config, environ)
            return config
    return _alone(job_settings)


def check_source(name: str) -> None:
    """Refuse a value of TFDIST_CLUSTER that names no source."""
    fix = "name one of them, or unset it"
    require_one_of(CLUSTER, name or "auto", ("auto", "none", *SOURCES), fix=fix, code="ENV001")


def _alone(job_settings: JobSettings) -> TaskConfig | None:
    """Return the settings of a process by itself: None, or options and its attempt."""
    strategy = job_settings.strategy
    of_several = {
        STRATEGY: strategy if strategy in ("multiworker", "ps", "pipeline") else None,
        PS: job_settings.ps,
        EVALUATOR: int(job_settings.evaluator),
    }
    for where, value in of_several.items():
        if value:
            raise UsageError(
                where,
                received=f"{value} in a process that nothing started as one of several tasks",
                expected="a step of srun, ranks of mpirun, TFDIST_HOSTS or TF_CONFIG",
                fix=f"start the program so, or unset {where}",
                code="ENV004",
            )
    options = job_settings.options()
    if options == JobOptions():
        return None
    return TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)


def _with_settings(config: TaskConfig, job_settings: JobSettings) -> TaskConfig:
    """Return `config` with the strategy and the options of our variables, where it has none."""
    strategy, has = job_settings.strategy, config.options.strategy
    if "auto" not in (strategy, has) and strategy != has:
        raise _disagreement(STRATEGY, f"{strategy}, and TF_CONFIG with {has}", "correct TF_CONFIG")
    count = len(config.cluster.ps)
    if job_settings.ps not in (None, count):
        received = f"{job_settings.ps}, and TF_CONFIG with {count} ps"
        raise _disagreement(PS, received, "correct TF_CONFIG")
    options = config.options
    if options == JobOptions(strategy=has):
        options = job_settings.options()
    return replace(config, options=replace(options, strategy=strategy if has == "auto" else has))


def _check_agreement(source: str, config: TaskConfig, environ: Mapping[str, str]) -> None:
    """Compare a task with the other sources: the number of tasks, and its host."""
    if source == "tf_config" and config.task.type != "evaluator":  # which some count, others not
        _check_size(config, environ)
        for variable in ("PMIX_HOSTNAME", "SLURMD_NODENAME"):
            _check_host(config, variable, text(environ, variable))
    if source == "slurm" and text(environ, HOSTS):
        _check_listed(config, text(environ, HOSTS))


def _check_size(config: TaskConfig, environ: Mapping[str, str]) -> None:
    """Compare the number of tasks in TF_CONFIG with that of the innermost launcher."""
    count = max(1, len(config.cluster.training_tasks()))
    sizes: dict[str, int] = {}
    if _OMPI[0] in environ or _PMI[1] in environ:  # PMIx alone does not count its ranks
        world = _world(environ)
        sizes |= {world.names[0]: world.size} if world else {}
    sizes["SLURM_STEP_NUM_TASKS"] = slurm.num_tasks(environ)
    if text(environ, HOSTS):
        sizes[HOSTS] = len(ranks_of(parse_hosts(environ[HOSTS], where=HOSTS)))
    source, other = next(((name, size) for name, size in sizes.items() if size > 1), ("", count))
    if other != count:
        raise _disagreement(
            "TF_CONFIG",
            f"{count} training {'task' if count == 1 else 'tasks'} in TF_CONFIG, "
            f"and {other} in {source}",
            f"set {CLUSTER}=tf_config to have it alone read",
        )


def _check_host(config: TaskConfig, variable: str, name: str) -> None:
    """Refuse a TF_CONFIG that knows this host by its name, and puts the task on another."""
    if not name or config.cluster.kind == "single":
        return
    at = {t: split_address(config.cluster.address(t))[0] for t in config.cluster.training_tasks()}
    own = at[config.task]
    here = next((task for task, host in at.items() if same_host(host, name)), None)
    if here is not None and not same_host(own, name):
        raise UsageError(
            "TF_CONFIG",
            received=f"{config.task} on {own} in TF_CONFIG, and {variable}={name}",
            expected=f"the two to agree: TF_CONFIG has {here} on {name}",
            fix="give each task its own index in TF_CONFIG, or unset it",
            code="ENV006",
        )


def _check_listed(found: TaskConfig, value: str) -> None:
    """Refuse a list of hosts beside a step that has other tasks, or has them elsewhere."""
    cluster = found.cluster
    unseen = int(found.options.evaluator and not cluster.evaluator)  # by those that train
    here = [split_address(cluster.address(task))[0] for task in cluster.tasks()]
    listed = ranks_of(parse_hosts(value, where=HOSTS))
    known = set(here)
    unknown = [
        host
        for host in dict.fromkeys(listed)
        if host not in known
        and is_name(host)
        and not any(same_host(host, h) or not is_name(h) for h in known)
    ]
    if (unknown and not unseen) or len(listed) != len(here) + unseen:
        raise _disagreement(
            HOSTS,
            f"{shown(value)}, {len(listed)} tasks, in a job of {len(here) + unseen} tasks "
            f"on {shown(','.join(dict.fromkeys(here)))}",
            f"set {CLUSTER}=hosts to have it alone read",
        )


def _disagreement(where: str, received: str, or_else: str) -> UsageError:
    fix = f"unset {where}, or {or_else}"
    return UsageError(where, received=received, expected="the two to agree", fix=fix, code="ENV006")
