"""Cluster of a job, from the placement of its tasks on hosts.

Whatever started the tasks, they are numbered by rank, and each rank is on a host. Everything
else, who is chief and which port is whose, follows by rules here: each task applies them by
itself, and all come to the same cluster.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from tfdist.cluster import settings
from tfdist.cluster.address import join
from tfdist.cluster.ports import as_text
from tfdist.cluster.settings import JobSettings
from tfdist.cluster.tf_config import TASK_TYPES, ClusterSpec, Task, TaskConfig
from tfdist.errors import UsageError

DEFAULT_PORT = 2222
"""Of the first task of each host; what TensorFlow's own examples and TFJob have."""

FIRST_PORT = 20_000
"""Ports from here to 32703 are below those of outgoing connections, as Linux has them."""

PORTS_PER_JOB = 32
_JOBS = 397  # prime, so that job numbers in steps of any size are spread over all


def place(
    hosts: Sequence[str],
    *,
    rank: int,
    job_settings: JobSettings,
    job_port: int | None = None,
) -> TaskConfig:
    """Return the TF_CONFIG of the task of `rank`, where `hosts` has the host of each rank.

    With `job_port`, the first of the ports of its job, each task has a port of its own in the job,
    so that two nodes of a scheduler that are one machine do not meet; with more tasks than
    `PORTS_PER_JOB`, or than a range that is set has, those of a host count by themselves. Without
    it the tasks of a host have `DEFAULT_PORT` and the ports after it, or those of the range.
    """
    ports = job_settings.ports
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
    return TaskConfig(cluster=cluster, task=task, options=job_settings.options())


def one_of(hosts: Sequence[str], *, rank: int, job_settings: JobSettings) -> TaskConfig | None:
    """Return the TF_CONFIG of the task of `rank`, or None for one task without options."""
    if (
        len(hosts) == 1
        and not job_settings.ps
        and job_settings.strategy not in ("multiworker", "ps", "pipeline")
    ):
        return None
    return place(hosts, rank=rank, job_settings=job_settings)


def task_types(count: int, *, job_settings: JobSettings) -> list[str]:
    """Return the type of each rank: in a ps job the first is the chief and the last are ps.

    An evaluator comes after them.

    Raises:
        UsageError: the job has too few tasks, or too many, for what is set.
    """
    if job_settings.evaluator:
        if count == 1 or job_settings.strategy in ("single", "mirrored"):
            raise _unfit(
                settings.EVALUATOR,
                f"it in a job of {count} tasks with strategy {job_settings.strategy}",
                "a multiworker or ps job, and a task more",
                f"start one more task, or unset {settings.EVALUATOR}",
            )
        training = replace(job_settings, evaluator=False)
        return [*task_types(count - 1, job_settings=training), "evaluator"]
    ps = _ps_count(job_settings)
    if not ps:
        if job_settings.strategy in ("single", "mirrored") and count > 1:
            raise _unfit(
                settings.STRATEGY,
                f"{job_settings.strategy} in a job of {count} tasks",
                "one task",
                f"start one task, or set {settings.CLUSTER}=none for {count} lone processes",
            )
        return ["worker"] * count
    if count < ps + 2:
        raise _unfit(
            settings.PS,
            f"{ps} ps in a job of {count} tasks",
            f"{ps + 2} tasks or more: the chief, a worker and {ps} ps",
            "start more tasks, or fewer ps",
        )
    return ["chief"] + ["worker"] * (count - 1 - ps) + ["ps"] * ps


def _addresses(hosts: Sequence[str], *, first_port: int, among: range | None = None) -> list[str]:
    """Return ``host:port`` for each rank, the ranks of a host having ports in a row.

    All of them are of `among`, where that is given.
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
        return _addresses(hosts, first_port=among.start, among=among)  # the whole of it
    raise UsageError(
        settings.PORTS,
        received=f"{as_text(among)}, {len(among)} ports, "
        f"for {last_port - first_port + 1} tasks on a host",
        expected="a port for each task of a host",
        fix=f"set {settings.PORTS} to a larger range",
        code="ENV001",
    )


def port_of_job(job: str, *, step: int = 0, job_settings: JobSettings | None = None) -> int:
    """Return the first of the ports of a job, the same wherever its name is known.

    `PORTS_PER_JOB` ports belong to it. Jobs with numbers that follow each other, as those that
    share a machine often have, get different ones; so do the steps of a job. A range
    that is set is divided among the jobs.
    """
    first_port, jobs = FIRST_PORT, _JOBS
    if job_settings is not None and job_settings.ports is not None:
        first_port, jobs = (
            job_settings.ports.start,
            max(1, len(job_settings.ports) // PORTS_PER_JOB),
        )
    number = int(job) if job.isascii() and job.isdecimal() else zlib.crc32(job.encode())
    return first_port + PORTS_PER_JOB * ((number + 131 * step) % jobs)


def same_host(one: str, other: str) -> bool:
    """Return whether two names can be of one host: the same, or one with its domain."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def is_name(host: str) -> bool:
    """Return whether `host` is a name that says which host it is: no number, not localhost."""
    plain = host.strip("[]").lower()
    return ":" not in plain and not plain.replace(".", "").isdigit() and plain != "localhost"


def _ps_count(job_settings: JobSettings) -> int:
    if job_settings.ps is None:
        return int(job_settings.strategy == "ps")
    if job_settings.strategy not in ("auto", "ps") and job_settings.ps:
        raise _unfit(
            settings.PS,
            f"{job_settings.ps} with {settings.STRATEGY}={job_settings.strategy}",
            "0, or strategy ps",
            f"unset {settings.PS}, or set {settings.STRATEGY}=ps",
        )
    if job_settings.strategy == "ps" and not job_settings.ps:
        raise _unfit(
            settings.PS,
            f"0 with {settings.STRATEGY}=ps",
            "1 or more",
            f"set {settings.PS}=1, or another strategy",
        )
    return job_settings.ps


def _unfit(where: str, received: str, expected: str, fix: str) -> UsageError:
    return UsageError(where, received=received, expected=expected, fix=fix, code="ENV004")
