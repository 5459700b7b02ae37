"""Probe results of the hosts of a job, sent over the network as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host as the job names it, and the ports of its tasks; none in a job of one process.

    Attributes:
      needed: where `ports` are some of a range, how many of them tasks will have: the first ones
        that are free, but for the very first, at which the launchers meet. None: all.
    """

    name: str
    ports: tuple[int, ...] = ()
    needed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NameFacts:
    """Attributes:
    name: of a host, as the job has it.
    addresses: what it leads to on the host that asked.
    error: why it leads nowhere.
    took_s: how long the answer took.
    """

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReverseFacts:
    """The name that one of the host's own addresses has, and what that name leads to."""

    address: str
    name: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PortFacts:
    """State of a port of the job: free, or who has it where that can be told.

    Attributes:
      holder: the process that listens, as ``python (4711)``; empty where nobody tells.
      is_ephemeral: one of those that the system gives to outgoing connections.
    """

    port: int
    error: str = ""
    holder: str = ""
    on_all_interfaces: bool = False
    is_ephemeral: bool = False


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
      sync_error, sync_s: of writing a small file through to the disk.
      free: bytes.
    """

    error: str = ""
    is_read_only: bool = False
    unseen: tuple[int, ...] = ()
    torn: int = 0
    reads: int = 0
    sync_error: str = ""
    sync_s: float = 0.0
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
    reverse: tuple[ReverseFacts, ...] = ()
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
        """Return what the job calls a host."""
        return self.hosts[index].name


def reason_of(error: OSError) -> str:
    """Return what an error says, without its number."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()
