"""Hosts of the job under preflight, and this host's index."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tfdist.cluster import ClusterSpec, Task, read_environment, settings
from tfdist.cluster.address import split_address
from tfdist.cluster.hostlist import parse_hosts
from tfdist.cluster.hosts import node_plan
from tfdist.cluster.ports import as_text, parse_ports
from tfdist.errors import require
from tfdist.launch.multihost.agreement import read_token
from tfdist.launch.multihost.hosts import rank_of
from tfdist.ops.doctor.facts import Host

_ALONE = Task("worker", 0)
_TRIED = 64  # of the ports of a range


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightJob:
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
        """Return this host."""
        return self.hosts[self.index]

    @property
    def terms(self) -> dict[str, str]:
        """Return what is the same on all hosts that were told of the same job, to be shown."""
        hosts = ",".join(f"{host.name}:{host.ports[0]}" for host in self.hosts if host.ports)
        return {"hosts": hosts, "fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """Return what is the same on all hosts that were told of the same job."""
        text = json.dumps([[host.name, host.ports] for host in self.hosts])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def job_of(
    environ: Mapping[str, str],
    *,
    hosts: str | None = None,
    node_rank: int | None = None,
    token_file: str | None = None,
    ports: str | None = None,
) -> PreflightJob:
    """Return the job of ``--hosts``, or else the one that the environment tells of.

    A process by itself is a job of this host without ports, or with those of the range `ports`.

    Raises:
        UsageError: neither can be understood, or the token cannot be read.
    """
    # The launchers want one. Here nothing is started by what is said, and it may be left out.
    token = read_token(environ, path=token_file, hosts=())
    among = None if ports is None else parse_ports(ports, where="--ports")
    job = _job_of(environ, hosts=hosts, node_rank=node_rank, among=among)
    return replace(job, token=token)


def _job_of(
    environ: Mapping[str, str], *, hosts: str | None, node_rank: int | None, among: range | None
) -> PreflightJob:
    if hosts is not None:
        rank = rank_of([host for host, _ in parse_hosts(hosts)], node_rank=node_rank)
        job_settings = settings.from_environ(environ)
        among = among or job_settings.ports
        plan = node_plan(hosts, node_rank=rank, job_settings=replace(job_settings, ports=None))
        job = _placed(plan.cluster, plan.tasks[0], timeout_s=job_settings.startup_timeout_s)
        return job if among is None else _within(job, among)
    require(
        node_rank is None,
        "--hosts",
        received="nothing",
        expected="the list of which --node_rank is the place",
        fix="give --hosts a,b,... too",
        code="missing-flag",
    )
    config = read_environment(environ)
    if config is None or not config.cluster.training_tasks():
        host = Host(name=socket.gethostname())
        return PreflightJob(
            hosts=(replace(host, ports=_tried(among, needed=1), needed=1) if among else host,)
        )
    require(
        among is None,
        "--ports",
        received="it in a job that the environment tells of",
        expected="it with --hosts, as launchers have it",
        fix=f"set {settings.PORTS} in all tasks, as the job will have it, or leave --ports out",
        code="exclusive",
    )
    require(
        config.task.type != "evaluator",
        "TF_CONFIG",
        received="an evaluator",
        expected="a task that trains",
        fix="start the command in chief, workers and ps",
        code="wrong-task",
    )
    timeout_s = config.options.startup_timeout_s
    return _placed(config.cluster, config.task, timeout_s=timeout_s)


def _within(job: PreflightJob, among: range) -> PreflightJob:
    """Return a job whose tasks may have any ports of a range, which some of them stand for."""
    needed = max(len(host.ports) for host in job.hosts)
    require(
        needed < len(among),
        "--ports",
        received=f"{as_text(among)}, {len(among)} ports",
        expected=f"{needed + 1} or more: for the tasks of a host, and one for the launchers",
        fix="give a larger range",
        code="too-few-ports",
    )
    tried = _tried(among, needed=needed)
    return replace(
        job,
        hosts=tuple(replace(host, ports=tried, needed=len(host.ports)) for host in job.hosts),
    )


def _tried(among: range, *, needed: int) -> tuple[int, ...]:
    """Return ports of a range, the first and the last among them, that are all looked at."""
    count = min(len(among), max(_TRIED, 4 * needed))
    return tuple(among[place * (len(among) - 1) // max(1, count - 1)] for place in range(count))


def _placed(cluster: ClusterSpec, task: Task, *, timeout_s: float) -> PreflightJob:
    ports: dict[str, list[int]] = {}
    speakers: dict[str, Task] = {}
    for other in cluster.training_tasks():
        name, port = split_address(cluster.address(other))
        ports.setdefault(name, []).append(port)
        speakers.setdefault(name, other)
    own, _ = split_address(cluster.address(task))
    return PreflightJob(
        hosts=tuple(Host(name=name, ports=tuple(listed)) for name, listed in ports.items()),
        index=list(ports).index(own),
        task=task,
        speaker=speakers[own],
        startup_timeout_s=timeout_s,
    )
