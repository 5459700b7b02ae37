"""The job under preflight, the probe results of its hosts, and findings.

Probe results are sent over the network as JSON.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tfdist.cluster import Task, TaskConfig, read_environment, settings
from tfdist.cluster.address import parse_hosts, ranks_of, split_address
from tfdist.cluster.placement import place
from tfdist.errors import require
from tfdist.launch.multihost.agreement import fingerprint, read_token
from tfdist.launch.multihost.hosts import rank_of
from tfdist.ops.rules import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host as the job names it, and the ports of its tasks; none in a job of one process."""

    name: str
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NameFacts:
    """Attributes:
    name: of a host, as the job has it.
    addresses: what it leads to on the host that asked.
    error: why it leads nowhere.
    """

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortFacts:
    """State of a port of the job: free, or taken, and by which process.

    Attributes:
      holder: the process that listens, as ``python (4711)``; empty where nobody tells.
    """

    port: int
    error: str = ""
    holder: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proxy:
    """The variable by which gRPC would take a proxy, and where the hosts it does not take it for.

    Attributes:
      name, value: of the variable; the value without a password.
      excepted_by: the variable that names exceptions; empty where there is none.
      exceptions: what that says.
    """

    name: str
    value: str
    excepted_by: str = ""
    exceptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProbe:
    """Resources of a host that a task may use. Sizes are in bytes; None: not known.

    Attributes:
      versions: of what the tasks must have alike, by name.
      cpu_features: of those that change what numerical libraries compute.
      memory_limit: of the control group.
      shared_memory: free in /dev/shm; 0 where it is missing.
      open_files: soft limit; None: no limit.
      public_addresses: of its interfaces, reachable from the internet if nothing is in between.
    """

    host_name: str
    versions: tuple[tuple[str, str], ...] = ()
    cpu: str = ""
    cpus: int = 1
    cpu_features: tuple[str, ...] = ()
    gpus: int = 0
    memory_available: int | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    open_files_most: int | None = None
    own_addresses: tuple[str, ...] = ()
    public_addresses: tuple[str, ...] = ()
    proxy: Proxy | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Result of connecting to a port of another host.

    Attributes:
      error: why nothing came of it.
      answered: which host said that it is at the other end; -1: something that is none of ours.
    """

    host: int
    port: int
    error: str = ""
    answered: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """A plain connection to another host: there and back in `latency_s`, and its bytes a second."""

    host: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Directory:
    """State of the shared directory as a host sees it.

    Attributes:
      error: why it cannot be used at all: it is not there, or not to be written.
      unseen: hosts whose files this one does not see.
      torn: reads of a file while another host replaced it that saw neither the old nor the new.
      sync_error: of writing a small file through to the disk.
      free: bytes.
    """

    error: str = ""
    is_read_only: bool = False
    unseen: tuple[int, ...] = ()
    torn: int = 0
    reads: int = 0
    sync_error: str = ""
    free: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """All that is known of one host, found by itself but for `clock_ahead_s`.

    Attributes:
      index: its place in the job's hosts.
      names: what it finds for the name of each host, in their order.
      clock_ahead_s: its clock against that of the first host; the error is `clock_error_s` at most.
      work_s: how long a fixed piece of work took on all of its CPUs at once.
    """

    index: int
    machine: MachineProbe
    names: tuple[NameFacts, ...] = ()
    ports: tuple[PortFacts, ...] = ()
    reaches: tuple[Reach, ...] = ()
    wires: tuple[Wire, ...] = ()
    clock_ahead_s: float | None = None
    clock_error_s: float = 0.0
    work_s: float | None = None
    directory: Directory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Result of an all-reduce, a push and a pull by TensorFlow's own servers.

    Attributes:
      error: why it came to no result.
      size_bytes: of what was reduced, pushed and pulled.
      is_right: whether the sum was the right one.
      reduce_s, push_s, pull_s: the best of several.
    """

    error: str = ""
    size_bytes: int = 0
    is_right: bool = True
    reduce_s: float = 0.0
    push_s: float = 0.0
    pull_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """A host that did not come, was not let in, or went: `why` begins with what it did not do."""

    index: int
    why: str
    is_other_job: bool = False
    during: str = ""
    """The step in which it went; empty for one that was never there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """Facts of all hosts of a job, as one of them knows them.

    Attributes:
      hosts: as the job names them.
      present: facts of those that are there, in order.
      shared_dir: the directory that was looked at, if one was.
      exchange: None where it was left out, and `left_out` says why.
    """

    hosts: tuple[Host, ...]
    present: tuple[HostFacts, ...]
    absent: tuple[Absence, ...] = ()
    shared_dir: str = ""
    exchange: Exchange | None = None
    left_out: str = field(default="--quick")

    def name(self, index: int) -> str:
        """Return the name of a host in the job."""
        return self.hosts[index].name


def reason_of(error: OSError) -> str:
    """Return the message of an error, without its number."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()


# Finding of a check: a rule, the hosts, what was seen, and the fix.


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One thing that is wrong; `hosts` are those it is to be put right on."""

    code: str
    hosts: tuple[str, ...]
    received: str
    expected: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One line of the answer.

    Attributes:
      rules: what can be wrong here.
      check: yields what is.
    """

    name: str
    rules: tuple[Rule, ...]
    check: Callable[[JobFacts], Iterator[HostFinding]]


# Hosts of the job under preflight, and this host's index.

_ALONE = Task("worker", 0)
_VERSION = "3"  # of what the hosts of a preflight tell each other


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightJob:
    """A job as each of its hosts sees it.

    Attributes:
      index: of this host.
      probe_task: the task that looks at this host; the others of it leave that to it.
      task: this one.
      token: what the hosts must know to be let in; empty where the user gave none.
    """

    hosts: tuple[Host, ...]
    index: int = 0
    task: Task = _ALONE
    probe_task: Task = _ALONE
    startup_timeout_s: float = 60.0
    token: bytes = field(default=b"", repr=False)

    @property
    def host(self) -> Host:
        """Return this host."""
        return self.hosts[self.index]

    @property
    def meeting_port(self) -> int:
        """Return where the first host waits for the others: the port after those of all tasks."""
        ports = [port for host in self.hosts for port in host.ports]
        return max(ports) + 1 if max(ports) < 65_535 else min(ports) - 1

    @property
    def terms(self) -> dict[str, str]:
        """Return the values that all hosts of a job share, by name."""
        hosts = ",".join(f"{host.name}:{'+'.join(map(str, host.ports))}" for host in self.hosts)
        return {"doctor": _VERSION, "hosts": hosts}

    @property
    def fingerprint(self) -> str:
        """Return a short hash of the hosts and their ports."""
        return fingerprint(self.terms)


def job_of(
    environ: Mapping[str, str],
    *,
    hosts: str | None = None,
    node_rank: int | None = None,
    token_file: str | None = None,
) -> PreflightJob:
    """Return the job of ``--hosts``, or else the one that the environment tells of.

    A process by itself is a job of this host without ports.

    Raises:
        UsageError: neither can be understood, or the token cannot be read.
    """
    # The launchers want one. Here nothing is started by what is said, and it may be left out.
    token = read_token(environ, path=token_file, hosts=())
    if hosts is not None:
        listed = parse_hosts(hosts)
        rank = rank_of([host for host, _ in listed], node_rank=node_rank)
        first = sum(slots for _, slots in listed[:rank])
        # The evaluator is in no slot.
        job_settings = replace(settings.from_environ(environ), evaluator=False)
        config: TaskConfig | None = place(ranks_of(listed), rank=first, job_settings=job_settings)
    else:
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
        return PreflightJob(hosts=(Host(name=socket.gethostname()),))
    require(
        config.task.type != "evaluator",
        "TF_CONFIG",
        received="an evaluator",
        expected="a task that trains",
        fix="start the command in chief, workers and ps",
        code="wrong-task",
    )
    return _placed(config, token)


def _placed(config: TaskConfig, token: bytes) -> PreflightJob:
    cluster, task = config.cluster, config.task
    ports: dict[str, list[int]] = {}
    probe_tasks: dict[str, Task] = {}
    for other in cluster.training_tasks():
        name, port = split_address(cluster.address(other))
        ports.setdefault(name, []).append(port)
        probe_tasks.setdefault(name, other)
    own, _ = split_address(cluster.address(task))
    return PreflightJob(
        hosts=tuple(Host(name=name, ports=tuple(listed)) for name, listed in ports.items()),
        index=list(ports).index(own),
        task=task,
        probe_task=probe_tasks[own],
        startup_timeout_s=config.options.startup_timeout_s,
        token=token,
    )
