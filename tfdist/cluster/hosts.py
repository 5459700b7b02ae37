"""Cluster resolver of plain hosts: a list ``host:slots,...`` is all there is.

Without a scheduler, for pods, and for MPI on several hosts: as flags of the launcher, or in the
variable TFDIST_HOSTS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster import hostlist
from tfdist.cluster.address import check_address, shown
from tfdist.cluster.placement import place
from tfdist.cluster.settings import (
    HOSTS,
    LOCAL_RANK,
    NODE_RANK,
    JobSettings,
    integer,
    missing,
    needed,
    text,
)
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import TaskConfig
from tfdist.errors import UsageError

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
        place(hosts, rank=rank, job_settings=job_settings)
        for rank in range(first, first + listed[node_rank][1])
    ]
    return NodePlan(cluster=configs[0].cluster, tasks=tuple(config.task for config in configs))


def from_environ(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this task's part of the job on TFDIST_HOSTS, or None where that is not set.

    TFDIST_NODE_RANK says which entry of the list this host is, and TFDIST_LOCAL_RANK, where
    the entry has several slots, which of them this process is.
    """
    value = text(environ, HOSTS)
    if not value:
        return None
    listed = parse_hosts(value, where=HOSTS)
    node_rank = needed(environ, NODE_RANK)
    _check_node_rank(node_rank, listed, where=NODE_RANK)
    slots = listed[node_rank][1]
    local = integer(environ, LOCAL_RANK, most=slots - 1)
    if local is None and slots > 1:
        expected = f"a number from 0 to {slots - 1}: {listed[node_rank][0]} has {slots} slots"
        raise missing(LOCAL_RANK, expected)
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
    return place(hosts, rank=rank, job_settings=job_settings)


def _slots(part: str, where: str) -> tuple[str, int]:
    """Split ``names:slots``, where an IPv6 address in its brackets has colons of its own."""
    names, colon, number = part.strip().rpartition(":")
    if not colon or number.endswith("]"):
        names, number = part.strip(), "1"
    if ":" in names and not names.startswith("["):
        fix = "write host:slots, and an IPv6 address in brackets, as in [fd00::1]:2"
        expected = "host or host:slots, separated by commas"
        raise _mistake(part, where, expected, fix)
    count = int(number) if re.fullmatch("[0-9]{1,6}", number) else 0
    if not names or not 1 <= count <= _MAX_SLOTS:
        fix = "give the number of the host's tasks there; ports are not part of the list"
        expected = f"a host with 1 to {_MAX_SLOTS} slots, as in host:2"
        raise _mistake(part, where, expected, fix)
    return names, count


def _mistake(part: str, where: str, expected: str, fix: str) -> UsageError:
    return UsageError(where, received=shown(part), expected=expected, fix=fix, code="bad-hosts")


def _check_node_rank(node_rank: int, listed: Sequence[tuple[str, int]], *, where: str) -> None:
    if not 0 <= node_rank < len(listed):
        raise UsageError(
            where,
            received=str(node_rank),
            expected=f"0 to {len(listed) - 1}: the list has {len(listed)} hosts",
            fix="give each host its position in the list, from 0 on",
            code="ENV007",
        )
