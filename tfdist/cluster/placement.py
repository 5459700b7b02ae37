"""Cluster of a job, from the placement of its tasks on hosts.

Whatever started the tasks, they are numbered by rank, and each rank is on a host. Everything
else, who is chief and which port is whose, follows by rules here: each task applies them by
itself, and all come to the same cluster.

Without a scheduler, for pods, and for MPI on several hosts, a list ``host:slots,...`` is all there
is: as flags of the launcher, or in the variable TFDIST_HOSTS.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfdist.cluster import hostlist, settings
from tfdist.cluster.address import check_address, shown
from tfdist.cluster.ports import as_text
from tfdist.cluster.settings import HOSTS, LOCAL_RANK, NODE_RANK, JobSettings, text
from tfdist.cluster.spec import TASK_TYPES, ClusterSpec, Task
from tfdist.cluster.tf_config import TaskConfig
from tfdist.errors import UsageError

FIRST_PORT = 20_000
"""Ports from here to 32703 are below those of outgoing connections, as Linux has them."""

PORTS_PER_JOB = 32
_JOBS = 397  # prime, so that job numbers in steps of any size are spread over all


def place(
    hosts: Sequence[str], *, rank: int, job_settings: JobSettings, first_port: int, attempt: int = 1
) -> TaskConfig:
    """Return what the task of `rank` is told, where `hosts` has the host of each rank.

    The tasks of a host have `first_port` and the ports after it, in order of rank. A port
    that is wished for goes before `first_port`, and so does the first of a range.
    """
    types = task_types(len(hosts), job_settings=job_settings)
    if job_settings.ports is not None:
        first_port = job_settings.ports.start
    return placed(
        addresses(hosts, first_port=job_settings.port or first_port, among=job_settings.ports),
        types,
        rank=rank,
        job_settings=job_settings,
        attempt=attempt,
    )


def placed(
    at: Sequence[str],
    types: Sequence[str],
    *,
    rank: int,
    job_settings: JobSettings,
    attempt: int = 1,
) -> TaskConfig:
    """Return what the task of `rank` is told, from the address and the type of each rank."""
    lists: dict[str, list[str]] = {type_: [] for type_ in TASK_TYPES}
    for address, type_ in zip(at, types, strict=True):
        lists[type_].append(address)
    task = Task(types[rank], types[:rank].count(types[rank]))
    cluster = ClusterSpec.from_dict(lists)
    return TaskConfig(cluster=cluster, task=task, options=job_settings.options(attempt=attempt))


def task_types(count: int, *, job_settings: JobSettings) -> list[str]:
    """Return the type of each rank: in a ps job the first is the chief and the last are ps.

    An evaluator comes after them.

    Raises:
        UsageError: the job has too few tasks, or too many, for what is wished.
    """
    if job_settings.groups:
        raise UsageError(
            settings.GROUPS,
            received=",".join(job_settings.groups),
            expected="a heterogeneous job of Slurm",
            fix=f"unset it, and say how many tasks are ps by {settings.PS}",
        )
    if job_settings.evaluator:
        return [*_with_evaluator(count, job_settings), "evaluator"]
    ps = _ps_count(job_settings)
    if not ps:
        if job_settings.strategy in ("single", "mirrored") and count > 1:
            raise UsageError(
                settings.STRATEGY,
                received=f"{job_settings.strategy} in a job of {count} tasks",
                expected="one task",
                fix=f"start one task, or set {settings.CLUSTER}=none for {count} lone processes",
            )
        return ["worker"] * count
    if count < ps + 2:
        raise UsageError(
            settings.PS,
            received=f"{ps} ps in a job of {count} tasks",
            expected=f"{ps + 2} tasks or more: the chief, a worker and {ps} ps",
            fix="start more tasks, or fewer ps",
        )
    return ["chief"] + ["worker"] * (count - 1 - ps) + ["ps"] * ps


def _with_evaluator(count: int, job_settings: JobSettings) -> list[str]:
    """Return the types of all but the last rank, which is the evaluator's."""
    if count > 1 and job_settings.strategy not in ("single", "mirrored"):
        return task_types(count - 1, job_settings=replace(job_settings, evaluator=False))
    raise UsageError(
        settings.EVALUATOR,
        received=f"it in a job of {count} task{'s' * (count > 1)} "
        f"with strategy {job_settings.strategy}",
        expected="a multiworker or ps job, and a task more",
        fix=f"start one more task, or unset {settings.EVALUATOR}",
    )


def addresses(hosts: Sequence[str], *, first_port: int, among: range | None = None) -> list[str]:
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
    if among is not None and last_port not in among and first_port > among.start:
        return addresses(hosts, first_port=among.start, among=among)  # the whole of it
    _check_last_port(last_port, first_port=first_port, among=among)
    return made


def port_of_job(job: str, *, step: int = 0, job_settings: JobSettings | None = None) -> int:
    """Return the first of the ports of a job, the same wherever its name is known.

    `PORTS_PER_JOB` ports belong to it. Jobs with numbers that follow each other, as those that
    share a machine often have, get different ones; so do the steps of a job. A port that is
    wished for goes before them, and a range is divided among the jobs.
    """
    if job_settings is not None and job_settings.port:
        return job_settings.port
    first_port, jobs = FIRST_PORT, _JOBS
    if job_settings is not None and job_settings.ports is not None:
        first_port, jobs = (
            job_settings.ports.start,
            max(1, len(job_settings.ports) // PORTS_PER_JOB),
        )
    number = int(job) if job.isascii() and job.isdecimal() else zlib.crc32(job.encode())
    return first_port + PORTS_PER_JOB * ((number + 131 * step) % jobs)


def ports_of_ranks(
    hosts: Sequence[str], *, first_port: int, among: range | None = None
) -> list[str]:
    """Return ``host:port`` for each rank, with a port of its own in the job if they suffice.

    With at most `PORTS_PER_JOB` tasks the port is `first_port` and the rank, so that two nodes
    of a scheduler that are one machine do not meet; else, and where `among` has not so many, the
    tasks of a host count by themselves.
    """
    last_port = first_port + len(hosts) - 1
    if len(hosts) > PORTS_PER_JOB or (among is not None and last_port not in among):
        return addresses(hosts, first_port=first_port, among=among)
    _check_last_port(last_port, first_port=first_port)
    return [join(host, first_port + rank) for rank, host in enumerate(hosts)]


def join(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare else f"{host}:{port}"


def same_host(one: str, other: str) -> bool:
    """Return whether two names can be of one host: the same, or one with its domain."""
    one, other = one.lower().rstrip("."), other.lower().rstrip(".")
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def is_name(host: str) -> bool:
    """Return whether `host` is a name that says which host it is: no number, not localhost."""
    plain = host.strip("[]").lower()
    return ":" not in plain and not plain.replace(".", "").isdigit() and plain != "localhost"


def _check_last_port(last_port: int, *, first_port: int, among: range | None = None) -> None:
    count = last_port - first_port + 1
    if among is not None and count > len(among):
        raise UsageError(
            settings.PORTS,
            received=f"{as_text(among)}, {len(among)} ports, for {count} tasks on a host",
            expected="a port for each task of a host",
            fix=f"set {settings.PORTS} to a larger range",
        )
    if last_port > 65_535:
        raise UsageError(
            settings.PORT,
            received=f"{first_port} for the first of {count} ports in a row",
            expected="ports up to 65535",
            fix=f"set {settings.PORT} to a lower one",
        )


def _ps_count(job_settings: JobSettings) -> int:
    if job_settings.ps is None:
        return int(job_settings.strategy == "ps")
    if job_settings.strategy not in ("auto", "ps") and job_settings.ps:
        raise UsageError(
            settings.PS,
            received=f"{job_settings.ps} with {settings.STRATEGY}={job_settings.strategy}",
            expected="0, or strategy ps",
            fix=f"unset {settings.PS}, or set {settings.STRATEGY}=ps",
        )
    if job_settings.strategy == "ps" and not job_settings.ps:
        raise UsageError(
            settings.PS,
            received=f"0 with {settings.STRATEGY}=ps",
            expected="1 or more",
            fix=f"set {settings.PS}=1, or another strategy",
        )
    return job_settings.ps


DEFAULT_PORT = 2222
"""Of the first task of each host; what TensorFlow's own examples and TFJob have."""

_MAX_SLOTS = 1024  # more is a port that was written in its place


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What one node of a job of several starts: the whole cluster, and its own tasks in it."""

    cluster: ClusterSpec
    tasks: tuple[Task, ...]


def parse_hosts(value: str, *, where: str = "--hosts") -> list[tuple[str, int]]:
    """Return the hosts and slots of ``host:slots,host,n[1-3]:slots``; one slot if not said.

    Hosts in brackets are a node list (`hostlist.expand`), IPv6 addresses stay in theirs. A host
    may be repeated: its slots come at both places.
    """
    made: list[tuple[str, int]] = []
    for part in hostlist.split(value.strip(), where=where):
        names, slots = _slots(part, where)
        is_ipv6 = names.startswith("[") and ":" in names
        hosts = [names] if is_ipv6 else hostlist.expand(names, where=where)
        for host in hosts:
            check_address(f"{host}:1", where=where)
        made += [(host, slots) for host in hosts]
    return made


def ranks_of(listed: Sequence[tuple[str, int]]) -> list[str]:
    """Return the host of each rank: host after host, as many ranks as it has slots."""
    return [host for host, slots in listed for _ in range(slots)]


def node_plan(
    value: str, *, node_rank: int, job_settings: JobSettings, where: str = "--hosts"
) -> NodePlan:
    """Return the cluster of a job on `value` and the tasks that node `node_rank` starts.

    Every node that is given the same list comes to the same cluster. Tasks are numbered host
    after host: under ps the chief is on the first host and the ps are on the last.
    """
    listed = parse_hosts(value, where=where)
    _check_node_rank(node_rank, listed, where="--node_rank")
    hosts = ranks_of(listed)
    first = sum(slots for _, slots in listed[:node_rank])
    configs = [
        place(hosts, rank=rank, job_settings=job_settings, first_port=DEFAULT_PORT)
        for rank in range(first, first + listed[node_rank][1])
    ]
    return NodePlan(cluster=configs[0].cluster, tasks=tuple(config.task for config in configs))


def from_environ(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return this task's part of the job on TFDIST_HOSTS, or None where that is not set.

    TFDIST_NODE_RANK says which entry of the list this host is, and TFDIST_LOCAL_RANK, where
    the entry has several slots, which of them this process is.
    """
    value, job_settings = text(environ, HOSTS), settings.from_environ(environ)
    if not value:
        return None
    listed = parse_hosts(value, where=HOSTS)
    node_rank = settings.needed(environ, NODE_RANK)
    _check_node_rank(node_rank, listed, where=NODE_RANK)
    slots = listed[node_rank][1]
    local = settings.integer(environ, LOCAL_RANK, most=slots - 1)
    if local is None and slots > 1:
        expected = f"a number from 0 to {slots - 1}: {listed[node_rank][0]} has {slots} slots"
        raise settings.missing(LOCAL_RANK, expected)
    rank = sum(count for _, count in listed[:node_rank]) + (local or 0)
    return one_of(ranks_of(listed), rank=rank, job_settings=job_settings)


def one_of(hosts: Sequence[str], *, rank: int, job_settings: JobSettings) -> TaskConfig | None:
    """Return what the task of `rank` is told, or None in a job of one task that asks nothing."""
    if (
        len(hosts) == 1
        and not job_settings.ps
        and job_settings.strategy not in ("multiworker", "ps")
    ):
        return None
    return place(hosts, rank=rank, job_settings=job_settings, first_port=DEFAULT_PORT)


def _slots(part: str, where: str) -> tuple[str, int]:
    """Split ``names:slots``, where an IPv6 address in its brackets has colons of its own."""
    names, colon, number = part.strip().rpartition(":")
    if not colon or number.endswith("]"):
        names, number = part.strip(), "1"
    if ":" in names and not names.startswith("["):
        fix = "write host:slots, and an IPv6 address in brackets, as in [fd00::1]:2"
        expected = "host or host:slots, separated by commas"
        raise UsageError(where, received=shown(part), expected=expected, fix=fix)
    count = int(number) if re.fullmatch("[0-9]{1,6}", number) else 0
    if not names or not 1 <= count <= _MAX_SLOTS:
        fix = "give the number of the host's tasks there; ports are not part of the list"
        expected = f"a host with 1 to {_MAX_SLOTS} slots, as in host:2"
        raise UsageError(where, received=shown(part), expected=expected, fix=fix)
    return names, count


def _check_node_rank(node_rank: int, listed: Sequence[tuple[str, int]], *, where: str) -> None:
    if not 0 <= node_rank < len(listed):
        raise UsageError(
            where,
            received=str(node_rank),
            expected=f"0 to {len(listed) - 1}: the list has {len(listed)} hosts",
            fix="give each host its position in the list, from 0 on",
        )
