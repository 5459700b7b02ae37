"""Cluster resolver of MPI: the variables that mpirun sets for each rank.

They say how many ranks there are, on all hosts and on this one, and never on which hosts: those
come from TFDIST_HOSTS (``mpirun -x TFDIST_HOSTS``), in a Slurm allocation from its node list,
and are this machine if all ranks are on it. Read are

* Open MPI: OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_SIZE, _LOCAL_RANK
  (https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html);
* MPICH and Intel MPI (Hydra): PMI_SIZE, PMI_RANK, MPI_LOCALNRANKS, MPI_LOCALRANKID;
  PALS: PMI_LOCAL_SIZE, PMI_LOCAL_RANK;
* PMIx alone (prterun): PMIX_RANK, which has no size beside it
  (https://github.com/open-mpi/ompi/issues/9167), and so needs TFDIST_HOSTS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster import placement
from tfdist.cluster.address import shown
from tfdist.cluster.hostlist import expand, parse_hosts, ranks_of
from tfdist.cluster.settings import (
    HOSTS,
    JobSettings,
    contradiction,
    integer,
    missing,
    needed,
    text,
)
from tfdist.cluster.tf_config import TaskConfig

_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
_OMPI_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_PMI = ("PMI_SIZE", "PMI_RANK")
_PMI_LOCAL = (("MPI_LOCALNRANKS", "MPI_LOCALRANKID"), ("PMI_LOCAL_SIZE", "PMI_LOCAL_RANK"))
_PMIX_RANK = "PMIX_RANK"
_LOCAL_HOST = "127.0.0.1"
_JOB_NAMES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID"),
    *("SLURM_JOB_ID", "PBS_JOBID"),  # of the allocation, where mpirun has no name for its job
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _World:
    """What a launcher says of a rank; `names` are the variables of size and rank, then local."""

    size: int
    rank: int
    local_size: int | None
    local_rank: int | None
    names: tuple[str, str]
    local_names: tuple[str, str]


def counted(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable that counts the ranks of mpirun, and how many they are; 1 without it."""
    if _OMPI[0] not in environ and _PMI[1] not in environ:  # PMIx alone does not count them
        return "", 1
    world = _world(environ)
    return (world.names[0], world.size) if world else ("", 1)


def from_environ(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this rank's part of the job, or None outside a job of several ranks.

    Ranks are taken host after host, as mpirun places them by default
    (``--map-by slot``). Ports begin at one that follows from the name of the job, or at
    TFDIST_PORT.

    Raises:
        UsageError: the hosts of the ranks are unknown, or this one is not where it should be.
    """
    world = _world(environ)
    if world is None or world.size == 1:
        return None
    where, ranks = _hosts(environ, world)
    _check_self(environ, world, ranks, where)
    job = next(filter(None, (text(environ, name) for name in _JOB_NAMES)), "0")
    first_port = placement.port_of_job(job, job_settings=job_settings)
    at = placement.ports_of_ranks(ranks, first_port=first_port, among=job_settings.ports)
    types = placement.task_types(world.size, job_settings=job_settings)
    return placement.placed(at, types, rank=world.rank, job_settings=job_settings)


def _world(environ: Mapping[str, str]) -> _World | None:
    if _OMPI[0] in environ:
        return _sized(environ, _OMPI, _OMPI_LOCAL)
    if _is_of_slurm(environ):
        return None
    if _PMI[0] in environ and _PMI[1] in environ:
        known = (names for names in _PMI_LOCAL if names[0] in environ)
        return _sized(environ, _PMI, next(known, _PMI_LOCAL[0]))
    if _PMIX_RANK in environ:
        value = text(environ, HOSTS)
        if not value:
            expected = "the hosts of the job, as PMIx does not tell a rank how many there are"
            raise missing(HOSTS, expected)
        size = len(ranks_of(parse_hosts(value, where=HOSTS)))
        rank = needed(environ, _PMIX_RANK, most=size - 1)
        names = (HOSTS, _PMIX_RANK)
        return _World(
            size=size, rank=rank, local_size=None, local_rank=None, names=names, local_names=names
        )
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
    for name in (_PMI[1] if of_pmi else _PMIX_RANK,):
        if text(environ, name) not in ("", text(environ, "SLURM_PROCID")):
            raise contradiction(
                name,
                f"{shown(text(environ, name))}, and SLURM_PROCID="
                f"{text(environ, 'SLURM_PROCID') or 'unset'}",
                "the two to agree, as Slurm sets both",
                "pass Slurm's variables on to the task as they are",
            )
    return True


def _sized(
    environ: Mapping[str, str], names: tuple[str, str], local_names: tuple[str, str]
) -> _World:
    size = needed(environ, names[0], least=1)
    rank = needed(environ, names[1], most=size - 1)
    local_size = integer(environ, local_names[0], least=1, most=size)
    local_rank = integer(environ, local_names[1], most=(local_size or size) - 1)
    return _World(
        size=size,
        rank=rank,
        local_size=local_size,
        local_rank=local_rank,
        names=names,
        local_names=local_names,
    )


def _hosts(environ: Mapping[str, str], world: _World) -> tuple[str, list[str]]:
    """Return the variable that says where the ranks are, and the host of each."""
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
        return world.local_names[0], [_LOCAL_HOST] * world.size
    listed = text(environ, "SLURM_JOB_NODELIST")
    nodes = expand(listed, where="SLURM_JOB_NODELIST") if listed else []
    if not nodes or world.size % len(nodes):
        expected = f"the hosts of the {world.size} ranks, which are on several"
        raise missing(HOSTS, f"{expected}; pass it on with mpirun -x {HOSTS}")
    each = world.size // len(nodes)
    return "SLURM_JOB_NODELIST", [node for node in nodes for _ in range(each)]


def _check_self(
    environ: Mapping[str, str], world: _World, ranks: Sequence[str], where: str
) -> None:
    """Compare where this rank should be with its own variables."""
    host = ranks[world.rank]
    here = [rank for rank, other in enumerate(ranks) if other == host]
    local = here.index(world.rank)
    for name, value, follows in (
        (world.local_names[0], world.local_size, len(here)),
        (world.local_names[1], world.local_rank, local),
    ):
        if value not in (None, follows):
            raise contradiction(
                name,
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
