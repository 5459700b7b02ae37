"""The hosts of the job that is to be looked at, and which of them this one is."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tfdist.cluster import ClusterSpec, Task, read_environment, wishes
from tfdist.cluster.address import split_address
from tfdist.cluster.hosts import node_plan
from tfdist.errors import UsageError
from tfdist.preflight.facts import Host
from tfdist.rendezvous.token import read_token

_ALONE = Task("worker", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as each of its hosts sees it.

    Attributes:
      index: of this host.
      speaker: the task that looks at this host; the others of it leave that to it.
      task: this one.
      token: what the hosts must know to be let in; empty where the user gave none.
    """

    hosts: tuple[Host, ...]
    index: int = 0
    task: Task = _ALONE
    speaker: Task = _ALONE
    startup_timeout_s: float = 60.0
    token: bytes = field(default=b"", repr=False)

    @property
    def host(self) -> Host:
        """Returns this host."""
        return self.hosts[self.index]

    @property
    def fingerprint(self) -> str:
        """Returns what is the same on all hosts that were told of the same job."""
        told = json.dumps([[host.name, host.ports] for host in self.hosts])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def job_of(
    environ: Mapping[str, str],
    *,
    hosts: str | None = None,
    node_rank: int | None = None,
    token_file: str | None = None,
) -> Job:
    """Returns the job of ``--hosts``, or else the one that the environment tells of.

    A process by itself is a job of this host without ports.

    Raises:
        UsageError: neither can be understood, or the token cannot be read.
    """
    # The launchers want one. Here nothing is started by what is said, and it may be left out.
    token = read_token(environ, path=token_file, hosts=())
    return replace(_job_of(environ, hosts=hosts, node_rank=node_rank), token=token)


def _job_of(environ: Mapping[str, str], *, hosts: str | None, node_rank: int | None) -> Job:
    if hosts is not None:
        if node_rank is None:
            expected, fix = "which of --hosts this one is", "give --node_rank 0, 1, ..."
            raise UsageError("--node_rank", received="nothing", expected=expected, fix=fix)
        wished = wishes.from_environ(environ)
        plan = node_plan(hosts, node_rank=node_rank, wished=wished)
        return _placed(plan.cluster, plan.tasks[0], timeout_s=wished.startup_timeout_s)
    if node_rank is not None:
        expected, fix = "the list of which it is the place", "give --hosts a,b,... too"
        raise UsageError("--hosts", received="nothing", expected=expected, fix=fix)
    config = read_environment(environ)
    if config is None or not config.cluster.training_tasks():
        return Job(hosts=(Host(name=socket.gethostname()),))
    if config.task.type == "evaluator":
        raise UsageError(
            "TF_CONFIG",
            received="an evaluator",
            expected="a task that trains",
            fix="start the command in chief, workers and ps",
        )
    timeout_s = config.options.startup_timeout_s
    return _placed(config.cluster, config.task, timeout_s=timeout_s)


def _placed(cluster: ClusterSpec, task: Task, *, timeout_s: float) -> Job:
    ports: dict[str, list[int]] = {}
    speakers: dict[str, Task] = {}
    for other in cluster.training_tasks():
        name, port = split_address(cluster.address(other))
        ports.setdefault(name, []).append(port)
        speakers.setdefault(name, other)
    own, _ = split_address(cluster.address(task))
    return Job(
        hosts=tuple(Host(name=name, ports=tuple(listed)) for name, listed in ports.items()),
        index=list(ports).index(own),
        task=task,
        speaker=speakers[own],
        startup_timeout_s=timeout_s,
    )
