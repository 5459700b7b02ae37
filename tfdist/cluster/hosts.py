"""Cluster resolver of plain hosts, without a scheduler: a list ``host:slots,...`` is all there is.

The list is in TFDIST_HOSTS, or a flag of a program; the host is given its index in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.hostlist import parse_hosts, ranks_of
from tfdist.cluster.placement import one_of, place
from tfdist.cluster.settings import (
    HOSTS,
    LOCAL_RANK,
    NODE_RANK,
    JobSettings,
    contradiction,
    integer,
    missing,
    needed,
    text,
)
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import TaskConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What one node of a job of several starts: the whole cluster, and its own tasks in it."""

    cluster: ClusterSpec
    tasks: tuple[Task, ...]


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


def _check_node_rank(node_rank: int, listed: Sequence[tuple[str, int]], *, where: str) -> None:
    if not 0 <= node_rank < len(listed):
        raise contradiction(
            where,
            str(node_rank),
            f"0 to {len(listed) - 1}: the list has {len(listed)} hosts",
            "give each host its position in the list, from 0 on",
        )
