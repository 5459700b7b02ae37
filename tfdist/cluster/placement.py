"""Cluster of a job, from the hosts of its tasks.

Every launcher numbers its tasks by rank, and each rank runs on a host. The rules in this module
derive the chief and the ports from the ranks. Each task applies the rules independently, and all
tasks get the same cluster.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from tfdist.cluster.address import join
from tfdist.cluster.ports import as_text
from tfdist.cluster.settings import ports_of
from tfdist.cluster.tf_config import TASK_TYPES, ClusterSpec, Task, TaskConfig
from tfdist.errors import UsageError
from tfdist.kinds import AUTO
from tfdist.options import CLUSTER, EVALUATOR, PORTS, PS, STRATEGY, JobOptions, JobSettings, part

DEFAULT_PORT = 2222
"""Port of the first task on each host, as in TensorFlow's examples and TFJob."""

FIRST_PORT = 20_000
"""First port of the jobs. Ports up to 32703 are below Linux' ports of outgoing connections."""

PORTS_PER_JOB = 32
_JOBS = 397  # prime, to spread job numbers with any regular step


def place(
    hosts: Sequence[str],
    *,
    rank: int,
    job_settings: JobSettings,
    job_port: int | None = None,
) -> TaskConfig:
    """Return the config of the task of `rank`. `hosts` lists the host of each rank.

    With `job_port` (first port of the job) each task has a different port, because two nodes of a
    scheduler may be one machine. With over `PORTS_PER_JOB` tasks, or too few ports in TFDIST_PORTS,
    each host numbers its ports separately. Without `job_port` the tasks of a host use
    TFDIST_PORTS, or `DEFAULT_PORT` and the following ports.
    """
    ports = ports_of(job_settings)
    types = task_types(len(hosts), job_settings=job_settings)
    first_port = job_port or (DEFAULT_PORT if ports is None else ports.start)
    is_few = len(hosts) <= PORTS_PER_JOB and (ports is None or first_port + len(hosts) - 1 in ports)
    if job_port and is_few:
        at = [join(host, first_port + number) for number, host in enumerate(hosts)]
    else:
        at = _addresses(hosts, first_port=first_port, among=ports)
    lists: dict[str, list[str]] = {type_: [] for type_ in TASK_TYPES}
    for address, type_ in zip(at, types, strict=True):
        lists[type_].append(address)
    task = Task(types[rank], types[:rank].count(types[rank]))
    cluster = ClusterSpec.from_dict(lists)
    return TaskConfig(cluster=cluster, task=task, options=part(JobOptions, job_settings))


def one_of(hosts: Sequence[str], *, rank: int, job_settings: JobSettings) -> TaskConfig | None:
    """Return the config of the task of `rank`, or `None` for a job of one process."""
    if len(hosts) == 1 and not job_settings.ps and not job_settings.kind.has_several_tasks:
        return None
    return place(hosts, rank=rank, job_settings=job_settings)


def task_types(count: int, *, job_settings: JobSettings) -> list[str]:
    """Return the type of each rank. In a ps job the first rank is the chief, the last are ps.

    An evaluator follows the training tasks.

    Raises:
        UsageError: the job has too few or too many tasks for its settings.
    """
    is_one_process = job_settings.kind.is_one_process
    if job_settings.evaluator:
        if count == 1 or is_one_process:
            problem = f"no evaluator can join a job of {count} tasks under {job_settings.strategy}"
            fix = f"use multiworker or ps with an additional task, or unset {EVALUATOR}"
            raise unfit(EVALUATOR, problem, fix)
        training = replace(job_settings, evaluator=False)
        return [*task_types(count - 1, job_settings=training), "evaluator"]
    ps = _ps_count(job_settings)
    if not ps:
        if is_one_process and count > 1:
            problem = f"{job_settings.strategy} runs in one task, but the job has {count}"
            fix = f"start one task, or set {CLUSTER}=none for {count} separate jobs"
            raise unfit(STRATEGY, problem, fix)
        return ["worker"] * count
    if count < ps + 2:
        problem = f"{ps} ps need {ps + 2} tasks with a chief and a worker, but the job has {count}"
        raise unfit(PS, problem, "start more tasks, or fewer ps")
    return ["chief"] + ["worker"] * (count - 1 - ps) + ["ps"] * ps


def _addresses(hosts: Sequence[str], *, first_port: int, among: range | None = None) -> list[str]:
    """Return ``host:port`` for each rank, with consecutive ports on each host.

    If `among` is given, all ports are in `among`.
    """
    used: dict[str, int] = {}
    made = []
    for host in hosts:
        port = used.get(host, first_port)
        used[host] = port + 1
        made.append(join(host, port))
    last_port = max(used.values(), default=1) - 1
    if among is None or last_port in among:
        return made
    if first_port > among.start:
        return _addresses(hosts, first_port=among.start, among=among)  # use the whole range
    count = last_port - first_port + 1
    problem = f"{as_text(among)} has {len(among)} ports for {count} tasks on a host"
    raise unfit(PORTS, problem, f"set {PORTS} to a larger range")


def unfit(where: str, problem: str, fix: str) -> UsageError:
    """Return the error for a setting that does not fit the tasks of the job."""
    return UsageError(where, problem, fix=fix, code="exclusive")


def port_of_job(job: str, *, step: int = 0, job_settings: JobSettings | None = None) -> int:
    """Return the first port of a job, computed from the name of the job.

    A job has `PORTS_PER_JOB` ports. Jobs with consecutive numbers, which often share a machine,
    have different ports. The steps of a job have different ports too. If TFDIST_PORTS is set,
    the jobs divide its range.
    """
    first_port, jobs = FIRST_PORT, _JOBS
    ports = None if job_settings is None else ports_of(job_settings)
    if ports is not None:
        first_port, jobs = ports.start, max(1, len(ports) // PORTS_PER_JOB)
    number = int(job) if job.isascii() and job.isdecimal() else zlib.crc32(job.encode())
    return first_port + PORTS_PER_JOB * ((number + 131 * step) % jobs)


def same_host(one: str, other: str) -> bool:
    """Return whether two names may denote one host. One name may lack the domain."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _ps_count(job_settings: JobSettings) -> int:
    kind = job_settings.kind
    if job_settings.ps is None:
        return int(kind.has_servers)
    if kind is not AUTO and not kind.has_servers and job_settings.ps:
        problem = f"{job_settings.ps} ps need {STRATEGY}=ps, not {job_settings.strategy}"
        raise unfit(PS, problem, f"unset {PS}, or set {STRATEGY}=ps")
    if kind.has_servers and not job_settings.ps:
        problem = f"{STRATEGY}=ps needs at least one parameter server"
        raise unfit(PS, problem, f"set {PS}=1, or another strategy")
    return job_settings.ps
