"""Hosts of a job: their list, and the tasks of each host.

Host 0 is the launcher's host. Each other host has an agent. If the launcher's host is not in the
list, host 0 has no tasks. I/O: name resolution, digests of files, openssl and Ray.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster import AUTO, KINDS, ClusterSpec, Task, environment, placement, settings
from tfdist.cluster.address import expand_hosts, is_loopback, parse_hosts, shown
from tfdist.cluster.ports import PortPool
from tfdist.errors import UsageError, require
from tfdist.launch.multihost import host_agreement, on_ray
from tfdist.launch.options import LaunchOptions, Program, file_of_program, refuse
from tfdist.launch.plan import JobDescription
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen
from tfdist.options import CLUSTER, LAUNCHED, JobSettings

_ANY_PORT = 9  # no data is sent to it
LAUNCHER = "launcher"
"""Name of host 0 if it has no tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Hosts of a job by rank, the number of tasks of each, and the rank of this host.

    `slots` does not count the evaluator, an extra task on the chief's host.
    """

    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    rank: int
    num_ps: int = 0
    has_evaluator: bool = False

    @property
    def chief_rank(self) -> int:
        """Return the first host that has tasks."""
        return next((rank for rank, count in enumerate(self.slots) if count), 0)

    def num_tasks(self, rank: int) -> int:
        """Return how many tasks of a host have an address."""
        return self.slots[rank] + (self.has_evaluator and rank == self.chief_rank)

    def tasks(self, ranks: Sequence[int]) -> dict[int, tuple[Task, ...]]:
        """Return the tasks of each host in `ranks`, numbered host by host.

        Under ps the chief is on the first host and the ps are on the last.
        """
        of_slot = [rank for rank in ranks for _ in range(self.slots[rank])]
        types = placement.task_types(len(of_slot), job_settings=JobSettings(ps=self.num_ps))
        tasks: dict[int, tuple[Task, ...]] = dict.fromkeys(ranks, ())
        for number, (rank, type_) in enumerate(zip(of_slot, types, strict=True)):
            tasks[rank] += (Task(type_, types[:number].count(type_)),)
        if self.has_evaluator and self.chief_rank in tasks:
            tasks[self.chief_rank] += (Task("evaluator", 0),)
        return tasks

    def cluster(self, at: Mapping[int, Sequence[str]]) -> ClusterSpec:
        """Return the cluster. `at` has the addresses of each host's tasks, by the host's rank."""
        tasks = self.tasks(sorted(at))
        return ClusterSpec.of(
            {
                task: address
                for rank in tasks
                for task, address in zip(tasks[rank], at[rank], strict=True)
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPart:
    """One host's part of a job.

    Attributes:
      own: Address of this host.
      terms: Versions, digests and variables that must be equal on all hosts.
      ports: Ports of its tasks.
    """

    job: JobDescription
    group: Group
    own: str
    terms: Mapping[str, str]
    ports: PortPool
    screen: JobScreen
    processes: JobProcesses


def decided_group(
    options: LaunchOptions, environ: Mapping[str, str]
) -> tuple[LaunchOptions, Group | None]:
    """Return the options, with the number of workers filled in, and the group of hosts.

    The hosts are listed in --hosts, or are the nodes of a Slurm allocation or a Ray cluster. The
    group is `None` if this machine is the only host.

    Raises:
        UsageError: The numbers of tasks and hosts do not fit, or there is no allocation.
    """
    on = options.where
    if options.hosts is not None:
        listed = parse_hosts(options.hosts)
        hosts, slots = tuple(host for host, _ in listed), tuple(n for _, n in listed)
    elif on == "ray":
        (total,) = _divided(options, num_hosts=1)
        name, slots = on_ray.reserve(total, within_s=options.startup_timeout_s)
        options = dataclasses.replace(options, rsh=shlex.join(on_ray.shell(name)))
        hosts = tuple(f"node-{number}" for number in range(1, len(slots) + 1))
    else:
        hosts = slurm_nodes(environ)
        slots = _divided(options, num_hosts=len(hosts))
    options = _with_counts(options, total=sum(slots))
    if on == "slurm" and (node := environ.get("SLURMD_NODENAME")):
        is_here = placement.same_host(hosts[0], node)
    else:
        is_here = on == "local" or (on != "ray" and is_this_host(hosts[0], environ))
    if len(hosts) == 1 and is_here:
        return dataclasses.replace(options, hosts=None, on=None, rsh=None, env=None), None
    if options.isolate:
        problem = f"a job on {len(hosts)} hosts cannot run in a network namespace of this machine"
        fix = "leave it out, and let only the hosts of the job reach its ports (firewall)"
        refuse("isolate", problem, fix)
    if not is_here:
        hosts, slots = (LAUNCHER, *hosts), (0, *slots)
    kind = options.kind
    if kind is AUTO:  # one task on another host
        kind = KINDS["multiworker"]
        options = dataclasses.replace(options, strategy=kind.name)
    group = Group(
        hosts=hosts,
        slots=slots,
        rank=0,
        num_ps=options.num_ps if kind.has_servers else 0,
        has_evaluator=options.evaluator,
    )
    return options, group


def certificate() -> str:
    """Return a new key and a self-signed certificate, which only the tasks of one job know.

    Raises:
        UsageError: The program openssl is missing or fails.
    """
    kind = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650"
    words = ["openssl", *kind.split(), "-subj", "/CN=tfdist", "-keyout", "-", "-out", "-"]
    env = {**os.environ, "OPENSSL_CONF": os.devnull}  # a site's file may limit its use
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UsageError(
            "--elastic",
            f"an elastic job on several hosts encrypts its tensors, but openssl fails: {lines[-1]}",
            fix="make the program openssl work on this machine",
            code="missing-package",
        ) from None


def terms(environ: Mapping[str, str], *, program: Program, search: Sequence[str]) -> dict[str, str]:
    """Return this host's versions, digests and variables that must be equal on all hosts."""
    versions, file = host_agreement.versions_of_hosts(), file_of_program(program, search=search)
    return {
        **versions,
        "Python": versions["Python"].rpartition(".")[0],
        f"the hash of {program.name}": host_agreement.digest(file),
        **{f"the hash of {p}": host_agreement.digest(p) for p in _config_files(program.args)},
        **host_agreement.variables(environ),
    }


def _config_files(args: Sequence[str]) -> list[str]:
    following = itertools.zip_longest(args, args[1:], fillvalue="")
    return [
        (text if equals else after).partition(":")[0]
        for arg, after in following
        for name, equals, text in [arg.partition("=")]
        if name in ("--config", "-config")
    ]


def _with_counts(options: LaunchOptions, *, total: int) -> LaunchOptions:
    """Return the options with the number of workers of a host list with `total` slots."""
    kind = options.kind
    if kind is AUTO and total > 1:
        kind = KINDS["multiworker"]
    others = 1 + options.num_ps if kind.has_servers else 0
    if total <= others:
        problem = f"the chief, a worker and {options.num_ps} ps need {others + 1} tasks"
        refuse("hosts", f"{problem}, got {total}", "list more slots, or use fewer ps")
    return dataclasses.replace(options, strategy=kind.name, workers=total - others)


def _divided(options: LaunchOptions, *, num_hosts: int) -> tuple[int, ...]:
    kind = options.kind
    if kind.is_one_process:
        fix = "use multiworker or ps, or leave --on out to run on this node"
        refuse("strategy", f"{kind} runs only on one host", fix)
    others = 1 + options.num_ps if kind.has_servers else 0
    workers = options.workers if options.workers > 1 else max(1, num_hosts - others)
    total = workers + others
    if total < num_hosts:
        problem = f"{num_hosts} hosts need at least {num_hosts} tasks, but the job has only {total}"
        refuse("workers", problem, f"use --workers {num_hosts - others}, or fewer nodes")
    each, more = divmod(total, num_hosts)
    return tuple(each + (rank < more) for rank in range(num_hosts))


def slurm_nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of this Slurm allocation."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        problem = "the launcher is not in a Slurm job (SLURM_JOB_NODELIST is not set)"
        fix = "start it in an sbatch script, or after salloc -N2"
        refuse("on slurm", problem, fix, code="no-cluster")
    refuse_launchers_in_a_step(environ)
    return tuple(expand_hosts(nodes, where="SLURM_JOB_NODELIST"))


def refuse_launchers_in_a_step(environ: Mapping[str, str]) -> None:
    """Raise UsageError if srun has started this launcher in several tasks of a step."""
    if settings.text(environ, CLUSTER) not in ("", "auto", "slurm"):
        return
    count = environment.num_slurm_tasks(environ)
    require(
        count < 2,
        "srun",
        f"the Slurm step has {count} launchers, but one launcher starts the agents of all nodes",
        fix="write python -m tfdist.launch --on slurm without srun in the batch script, or set "
        f"{CLUSTER}=none for {count} separate jobs",
        code="nested-launcher",
    )


def refuse_several_launchers(environ: Mapping[str, str], *, is_here: bool) -> None:
    """Raise UsageError if mpirun or a platform has started this launcher in several processes.

    With hosts of its own (not `is_here`), a launcher may run on only one node of a platform.
    """
    named = settings.text(environ, CLUSTER)
    for source in environment.SOURCES if LAUNCHED not in environ else ():
        if source in ("tf_config", "slurm") or named not in ("", "auto", source):
            continue
        count = environment.num_processes(source, environ)
        require(
            count < 2 or not (is_here or source == "mpi"),
            source,
            f"this launcher is one of {count} processes, and each would start a separate job",
            fix="start the program without the launcher, or set "
            f"{CLUSTER}=none if only this process starts a job",
            code="nested-launcher",
        )


def is_this_host(host: str, environ: Mapping[str, str]) -> bool:
    """Return whether a name or an address belongs to this machine."""
    names = (socket.gethostname(), environ.get("SLURMD_NODENAME", ""))
    if any(placement.same_host(host, name) for name in names if name):
        return True
    try:
        _, (address, _) = resolve(host)
    except OSError:  # for example an alias in ~/.ssh/config
        address = host
    return is_loopback(address) or is_own_address(address)


def own_address(host: str, *, other: str) -> str:
    """Return the address of this machine, which is `host` in the list of hosts.

    If the name resolves to loopback (Debian does so for its own name), return the local address
    of the route to `other`.

    Raises:
        UsageError: `host` does not resolve to an address of this machine.
    """
    try:
        _, (address, _) = resolve(host)
    except OSError as error:
        fault = f"does not resolve: {error.strerror}"
    else:
        if ipaddress.ip_address(address).is_loopback:
            return _address_towards(other) or address
        if is_own_address(address):
            return address
        fault = f"resolves to {address}, which is not an address of this machine"
    raise UsageError(
        "--hosts",
        f"{shown(host)} is the name of this machine in the list, but {fault}",
        fix="correct the name, /etc/hosts or DNS",
        code="not-this-host",
    )


def resolve(host: str, port: int = 0) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return family and address of a host, preferring IPv4, or raise OSError."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def is_own_address(host: str) -> bool:
    """Return whether `host` is a non-loopback IP address of this machine."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        if address.is_loopback or address.is_unspecified:
            return False
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((str(address), 0))
    except (ValueError, OSError):
        return False
    return True


def _address_towards(other: str) -> str | None:
    """Return the local address of the route to `other`, `None` if `other` is on loopback."""
    try:
        family, (address, _) = resolve(other, _ANY_PORT)
        if ipaddress.ip_address(address).is_loopback:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((address, _ANY_PORT))
            return str(route.getsockname()[0])
    except OSError:
        return None
