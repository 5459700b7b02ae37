"""Hosts of a job: their list, this host's index, and the tasks of each.

Pure, but for the name and the addresses of this machine. Each host has a launcher of its own; that
of host 0 leads.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster import ClusterSpec, Task, environment, placement, settings
from tfdist.cluster.address import join, parse_hosts, shown
from tfdist.cluster.placement import DEFAULT_PORT
from tfdist.cluster.ports import PortPool
from tfdist.cluster.settings import JobSettings
from tfdist.errors import UsageError, require
from tfdist.launch.multihost import agreement
from tfdist.launch.multihost.agreement import without_secrets
from tfdist.launch.multihost.rendezvous import resolve
from tfdist.launch.options import LaunchOptions
from tfdist.launch.plan import JobDescription
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen

_ANY_PORT = 9  # nothing is sent to it
_OWN_FLAGS = (
    *("node_rank", "rendezvous_token_file", "start", "fork_server", "dry_run", "program"),
    *("host_timeout_s", "keep_fds", "metrics_port"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The hosts of a job by rank, how many tasks each has, and which of them this is.

    An evaluator is not counted in `slots`: it is one task more, on the chief's host, where the
    checkpoints are. Nor is the task of a job of one process, which needs no address.
    """

    hosts: tuple[str, ...]
    slots: tuple[int, ...]
    rank: int
    port: int
    """Where the launcher of host 0 listens; 0 without others."""
    num_ps: int = 0
    has_evaluator: bool = False
    token: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def others(self) -> tuple[str, ...]:
        """Return the hosts but this one."""
        return self.hosts[: self.rank] + self.hosts[self.rank + 1 :]

    def num_tasks(self, rank: int) -> int:
        """Return how many tasks with an address a host has."""
        return self.slots[rank] + (self.has_evaluator and not rank)

    def tasks(self, ranks: Sequence[int]) -> dict[int, tuple[Task, ...]]:
        """Return the tasks of each of the hosts `ranks`, numbered host after host.

        Under ps the chief is on the first host and the ps are on the last.
        """
        if not any(self.slots):
            return {0: (Task("worker", 0),)}
        of_slot = [rank for rank in ranks for _ in range(self.slots[rank])]
        types = placement.task_types(len(of_slot), job_settings=JobSettings(ps=self.num_ps))
        tasks: dict[int, tuple[Task, ...]] = dict.fromkeys(ranks, ())
        for number, (rank, type_) in enumerate(zip(of_slot, types, strict=True)):
            tasks[rank] += (Task(type_, types[:number].count(type_)),)
        if self.has_evaluator and 0 in tasks:
            tasks[0] += (Task("evaluator", 0),)
        return tasks

    def cluster(self, at: Mapping[int, Sequence[str]]) -> ClusterSpec:
        """Return the cluster of the hosts of which `at` has the addresses of the tasks."""
        if not any(self.slots):
            return ClusterSpec()
        tasks = self.tasks(sorted(at))
        return ClusterSpec.of(
            {
                task: address
                for rank in tasks
                for task, address in zip(tasks[rank], at[rank], strict=True)
            }
        )

    def stand_in_cluster(self, ports: Sequence[int] | None = None) -> ClusterSpec:
        """Return the cluster with ports in a row, as nobody knows them before the rendezvous.

        They are the first ones of `ports` on each host, where these are given.
        """
        row = itertools.count(DEFAULT_PORT + 1)
        at = {
            rank: [
                join(host, next(row) if ports is None else ports[number])
                for number in range(self.num_tasks(rank))
            ]
            for rank, host in enumerate(self.hosts)
        }
        return self.cluster(at)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPart:
    """One host's part of a job.

    Attributes:
      own: the address of this host.
      terms: what must be the same on all hosts.
      ports: of its tasks.
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
    """Return the options with the numbers that follow from the hosts, and the hosts.

    They are those of --hosts, or the nodes of a Slurm step that has one launcher on each. A list
    of one host is a job on this machine.

    Raises:
        UsageError: this machine is not in the list, there is no token, or the numbers do not fit.
    """
    if options.hosts is not None:
        listed = parse_hosts(options.hosts)
        hosts, slots = tuple(host for host, _ in listed), tuple(n for _, n in listed)
        options = _with_counts(options, total=sum(slots))
        rank = rank_of(hosts, node_rank=options.node_rank)
        port = (options.port_range or [DEFAULT_PORT])[0]
    else:
        found = _slurm_nodes(options, environ)
        if found is None:
            return options, None
        hosts, rank, port = found
        options, slots = _divided(options, num_hosts=len(hosts))
    require(
        options.min_workers is None or options.min_workers <= options.workers,
        "--min_workers",
        received=f"{options.min_workers} of {options.workers} workers",
        expected=f"at most {options.workers}",
        fix=f"use --min_workers {options.workers}",
        code="out-of-range",
    )
    if len(hosts) == 1:
        return dataclasses.replace(options, hosts=None, node_rank=None), None
    require(
        not options.isolate,
        "--isolate",
        received=f"a job on {len(hosts)} hosts",
        expected="a job on this machine alone: no other host reaches into a network "
        "namespace of its own",
        fix="leave it out, and see that only the hosts of the job reach its ports",
        code="exclusive",
    )
    group = Group(
        hosts=hosts,
        slots=slots,
        rank=rank,
        port=options.rendezvous_port or port,
        num_ps=options.num_ps if options.strategy == "ps" else 0,
        has_evaluator=options.evaluator,
        token=agreement.read_token(environ, path=options.rendezvous_token_file, hosts=hosts),
    )
    return options, group


def group_alone(options: LaunchOptions, strategy: str) -> Group:
    """Return the group of a job on this machine alone.

    A ps job has a chief, which is not counted among the workers.
    """
    num_ps = options.num_ps if strategy == "ps" else 0
    tasks = 0 if strategy in ("single", "mirrored") else options.workers + num_ps + bool(num_ps)
    return Group(
        hosts=("127.0.0.1",),
        slots=(tasks,),
        rank=0,
        port=0,
        num_ps=num_ps,
        has_evaluator=options.evaluator,
    )


def terms(
    options: LaunchOptions, environ: Mapping[str, str], *, group: Group, program_file: str
) -> dict[str, str]:
    """Return what must be the same on all hosts of the job."""
    flags = {
        f"--{name}": str(value)
        for name, value in dataclasses.asdict(options).items()
        if name not in _OWN_FLAGS and value is not None
    }
    program = options.program
    # Of a function the arguments are descriptors, whose numbers are each host's own.
    args = () if options.keep_fds else without_secrets(program.args, key=group.token)
    return {
        **agreement.versions(),
        "hosts": ",".join(f"{h}:{n}" for h, n in zip(group.hosts, group.slots, strict=True)),
        **flags,
        "program": program.target,
        "its text": agreement.digest(program_file),
        **{f"the text of {path}": agreement.digest(path) for path in _config_files(program.args)},
        **{f"argument {number}": arg for number, arg in enumerate(args, 1)},
        **agreement.variables(environ),
    }


def _config_files(args: Sequence[str]) -> list[str]:
    """Return the config files that a program is given, by ``--config=F`` or ``--config F``."""
    following = itertools.zip_longest(args, args[1:], fillvalue="")
    return [
        (text if equals else after).partition(":")[0]
        for arg, after in following
        for name, equals, text in [arg.partition("=")]
        if name in ("--config", "-config")
    ]


def _with_counts(options: LaunchOptions, *, total: int) -> LaunchOptions:
    """Return the options with the workers that a list of `total` slots leaves."""
    strategy = options.strategy
    if strategy == "auto":
        strategy = "ps" if options.ps is not None else "multiworker" if total > 1 else "auto"
    others = 1 + options.num_ps if strategy == "ps" else 0
    require(
        total > others,
        "--hosts",
        received=f"{total} tasks",
        expected=f"{others + 1} or more: the chief, a worker and {options.num_ps} ps",
        fix="list more slots, or use fewer ps",
        code="too-few-tasks",
    )
    return dataclasses.replace(options, strategy=strategy, workers=total - others)


def _divided(options: LaunchOptions, *, num_hosts: int) -> tuple[LaunchOptions, tuple[int, ...]]:
    """Return the options of a job without a list, and how many tasks each host has."""
    require(
        options.strategy not in ("single", "mirrored"),
        "--strategy",
        received=f"{options.strategy} in a step of {num_hosts} launchers",
        expected="multiworker or ps: together they run one job",
        fix=f"use one, or set {settings.CLUSTER}=none for {num_hosts} jobs on their own",
        code="strategy-of-one-host",
    )
    is_ps = options.strategy == "ps" or options.ps is not None
    others = 1 + options.num_ps if is_ps else 0
    workers = options.workers if options.workers > 1 else max(1, num_hosts - others)
    total = workers + others
    require(
        total >= num_hosts,
        "--workers",
        received=f"{workers}, {total} tasks with all others, on {num_hosts} hosts",
        expected="a task for each host or more",
        fix=f"use --workers {num_hosts - others}, or fewer nodes",
        code="too-few-tasks",
    )
    each, more = divmod(total, num_hosts)
    slots = tuple(each + (rank < more) for rank in range(num_hosts))
    return _with_counts(options, total=total), slots


def _slurm_nodes(
    options: LaunchOptions, environ: Mapping[str, str]
) -> tuple[tuple[str, ...], int, int] | None:
    if settings.text(environ, settings.CLUSTER) not in ("", "auto", "slurm"):
        return None
    found = environment.slurm_nodes(environ)
    if found is None:
        return None
    hosts, rank = found
    job_settings = settings.from_environ(environ)
    if options.port_range is not None:
        job_settings = dataclasses.replace(job_settings, ports=options.port_range)
    return tuple(hosts), rank, environment.slurm_first_port(environ, job_settings)


def rank_of(hosts: Sequence[str], *, node_rank: int | None) -> int:
    """Return which of the hosts this one is, by the flag or by its name or address.

    Raises:
        UsageError: it is none of them, or several.
    """
    if node_rank is not None:
        require(
            0 <= node_rank < len(hosts),
            "--node_rank",
            received=node_rank,
            expected=f"0 to {len(hosts) - 1}: the list has {len(hosts)} hosts",
            fix="give each host its position in the list, from 0 on",
            code="out-of-range",
        )
        return node_rank
    name = socket.gethostname()
    is_here = [placement.same_host(host, name) or is_own_address(host) for host in hosts]
    ranks = [rank for rank, here in enumerate(is_here) if here]
    require(
        len(ranks) == 1,
        "--hosts",
        received=f"a list in which this host, {name}, is "
        f"{'more than once' if ranks else 'not there'}",
        expected="each host once, by its name or address",
        fix="say which one this is by --node_rank, from 0 on, or correct the list",
        code="host-not-found",
    )
    return ranks[0]


def environment_of_tasks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the tasks get of the environment: not the secret of the launchers."""
    return {name: value for name, value in environ.items() if name != agreement.TOKEN_VARIABLE}


def own_address(host: str, *, other: str) -> str:
    """Return the address of this machine, which the list of hosts calls `host`.

    Where the name leads to loopback, as it does on its own machine under Debian, it is the
    address from which `other` is reached.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    try:
        _, (address, _) = resolve(host)
    except OSError as error:
        what = f"cannot be resolved: {error.strerror}"
    else:
        if ipaddress.ip_address(address).is_loopback:
            return _address_towards(other) or address
        if is_own_address(address):
            return address
        what = f"is {address}, no address of this machine"
    raise UsageError(
        "--hosts",
        received=f"{shown(host)} for this machine, which {what}",
        expected="a name that leads to this machine",
        fix="correct the name, --node_rank, or what resolves names (/etc/hosts, DNS)",
        code="not-this-host",
    )


def is_own_address(host: str) -> bool:
    """Return whether `host` is an address of this machine, no name and no loopback."""
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
    """Return the address of this machine on the way to `other`; None if that is loopback too."""
    try:
        family, (address, _) = resolve(other, _ANY_PORT)
        if ipaddress.ip_address(address).is_loopback:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((address, _ANY_PORT))
            return str(route.getsockname()[0])
    except OSError:
        return None
