"""Checks of a job's hosts: every rule by its code, and what of the facts breaks it.

They are functions of the facts and of nothing else. A code keeps its meaning for good, and is not
given again.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster.placement import is_name
from tfdist.errors import named
from tfdist.launch.multihost.agreement import is_loopback
from tfdist.ops.doctor.facts import (
    Directory,
    Exchange,
    HostFacts,
    HostFinding,
    JobFacts,
    NameFacts,
    Reach,
    Topic,
)
from tfdist.ops.rules import Rule, rules_of

# Checks that all hosts are present and belong to the same job.

_HOSTS_RULES = rules_of("""
D001 error: a host that did not come
    A job waits for all of its tasks, and those of this host would not be there.
D002 error: a host that does not reach the first one
    Tasks of a job connect to each other, and all of them to the first.
D003 error: a host that was told of another job
    Tasks that disagree about who is where wait for each other for ever.
D004 error: a host that went away while it was looked at
    A connection that does not last for a few seconds does not carry a job.
""")


def _check_hosts(facts: JobFacts) -> Iterator[HostFinding]:
    for absence in facts.absent:
        name = facts.name(absence.index)
        if absence.index == 0:
            here = facts.name(facts.present[0].index)
            received = f"no way to {name}: {absence.why}"
            fix = f"start the same command on {name}, and open its ports to this host"
            yield HostFinding("D002", (here,), received, f"an answer from {name}", fix)
        elif absence.is_other_job:
            expected = "the same hosts and ports, and the same version, on all hosts"
            fix = f"give {name} the same --hosts or TF_CONFIG, and the same tfdist"
            yield HostFinding("D003", (name,), absence.why, expected, fix)
        elif absence.during:
            received = f"{absence.why}, asked for {absence.during}"
            expected = "a connection that lasts, and a process that lives"
            fix = f"see what the command says on {name}, and what is between the hosts"
            yield HostFinding("D004", (name,), received, expected, fix)
        else:
            fix = f"start the same command on {name}, with its own --node_rank"
            yield HostFinding("D001", (name,), absence.why, "every host of the job", fix)


HOSTS = Topic(name="hosts", rules=_HOSTS_RULES, check=_check_hosts)


# Checks of the hosts' name resolution.

_NAMES_RULES = rules_of("""
D101 error: a name that leads nowhere
    A task connects to the others by the names that the job has for their hosts.
D102 error: a name that leads to another host
    Tasks would talk to a machine that is none of theirs, or to themselves.
""")


def _check_names(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        for index, found in enumerate(host.names):
            yield from _wrong_name(facts, host, index, found)


def _wrong_name(
    facts: JobFacts, host: HostFacts, index: int, found: NameFacts
) -> Iterator[HostFinding]:
    here = facts.name(host.index)
    if found.error:
        received = f"{found.name}: {found.error}"
        fix = f"enter {found.name} in DNS or in /etc/hosts of {here}"
        yield HostFinding("D101", (here,), received, f"an address for {found.name}", fix)
        return
    if index == host.index or not is_name(found.name):
        return
    answered = {reach.answered for reach in host.reaches if reach.host == index}
    if answered != {index} and not _leads_there(facts, index, found):
        received = f"{found.name} leads to {', '.join(found.addresses)}"
        fix = f"correct the entry of {found.name} in DNS or in /etc/hosts of {here}"
        expected = f"an address of {facts.name(index)}"
        yield HostFinding("D102", (here,), received, expected, fix)


def _leads_there(facts: JobFacts, index: int, found: NameFacts) -> bool:
    """Return whether a name leads to its host, as far as the host is there to tell.

    A host behind a translation of addresses does not know its own, so what is no address of it
    counts only if it is loopback or another host's.
    """
    if all(map(is_loopback, found.addresses)):
        return False
    others = {
        address: host.index
        for host in facts.present
        for address in host.machine.own_addresses
        if not is_loopback(address)
    }
    return all(others.get(address, index) == index for address in found.addresses)


NAMES = Topic(name="names", rules=_NAMES_RULES, check=_check_names)


# Checks of the job's ports: free, reachable from the other hosts, and exposed to whom.

_PORTS_RULES = rules_of("""
D201 error: a port that is taken
    The task that is to listen there ends when it starts.
D202 error: a port that another host does not reach
    Tasks wait for each other for ever where one cannot connect.
D203 error: a port at which something else answers
    The name leads to another machine, or something between the hosts answers for it.
D205 warning: a host with a public address
    TensorFlow's servers listen on all interfaces and run what any client sends.
""")


def _check_ports(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        yield from _taken(facts, host)
        yield from _unreached(facts, host)
        here = facts.name(host.index)
        if facts.hosts[host.index].ports and host.machine.public_addresses:
            received = ", ".join(host.machine.public_addresses[:4])
            expected = "no way to the ports of the job but from its own hosts"
            fix = "let a firewall admit the job's hosts only, or run on a private network"
            yield HostFinding("D205", (here,), received, expected, fix)


def _taken(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
    here = facts.name(host.index)
    for port in host.ports:
        if port.error:
            by = f" by {port.holder}" if port.holder else ""
            received = f"{here}:{port.port} is taken{by} ({port.error})"
            fix = f"end what listens there (ss -ltnp 'sport = {port.port}'), or take another port"
            yield HostFinding("D201", (here,), received, "a free port", fix)


def _unreached(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
    here = facts.name(host.index)
    taken = {(h.index, p.port) for h in facts.present for p in h.ports if p.error}
    unreached: dict[tuple[int, str], list[int]] = defaultdict(list)
    strange: dict[int, list[Reach]] = defaultdict(list)
    for reach in host.reaches:
        if (reach.host, reach.port) in taken:
            continue  # nobody of ours listens there
        if reach.error:
            unreached[reach.host, reach.error].append(reach.port)
        elif reach.answered != reach.host:
            strange[reach.host].append(reach)
    for (other, why), ports in unreached.items():
        name = facts.name(other)
        received = f"{here} does not reach {name} at {_ports(ports)}: {why}"
        expected = "every port of the job reached from all of its hosts"
        fix = f"let the firewalls of {name} and {here}, and between them, pass these ports"
        yield HostFinding("D202", (here, name), received, expected, fix)
    for other, reaches in strange.items():
        name, answered = facts.name(other), reaches[0].answered
        who = "something that is not of this job"
        if answered is not None and 0 <= answered < len(facts.hosts):
            who = facts.name(answered)
        received = f"{who} answers {here} at {name}:{reaches[0].port}"
        fix = f"correct what {name} leads to on {here}, and what forwards the port"
        yield HostFinding("D203", (here,), received, name, fix)


def _ports(ports: list[int]) -> str:
    return f"port{'s' * (len(ports) > 1)} {named(ports)}"


PORTS = Topic(name="ports", rules=_PORTS_RULES, check=_check_ports)


# How well the connections between hosts carry what a job sends.

_SLOW_WIRE = 0.5  # of the median of the other connections
_MAX_LATENCY_S = 0.005

_NETWORK_RULES = rules_of("""
D301 error: a connection that carries nothing large
    Small packets pass and large ones are lost: the sizes of packets do not agree.
D302 warning: a connection slower than the others
    An all-reduce goes through all hosts, and is as fast as its slowest connection.
D303 warning: a long way between two hosts
    Every step waits for several messages, one after the other.
""")


def _check_network(facts: JobFacts) -> Iterator[HostFinding]:
    wires = [(host.index, wire) for host in facts.present for wire in host.wires]
    for index, wire in wires:
        here, there = facts.name(index), facts.name(wire.host)
        if wire.error:
            received = f"{here} to {there}: {wire.error}"
            fix = f"compare the MTU of {here}, {there} and what is between (ip link, ping -M do)"
            yield HostFinding("D301", (here, there), received, "data of any size to pass", fix)
            continue
        others = [w.bytes_per_s for i, w in wires if not w.error and (i, w) != (index, wire)]
        median = statistics.median(others) if others else 0.0
        if wire.bytes_per_s < _SLOW_WIRE * median:
            received = f"{here} to {there}: {rate(wire.bytes_per_s)}"
            expected = f"about {rate(median)}, as the others have"
            fix = (
                f"see the speed and the errors of their interfaces (ethtool, ip -s link), "
                f"and what else {here} and {there} send"
            )
            yield HostFinding("D302", (here, there), received, expected, fix)
        if wire.latency_s > _MAX_LATENCY_S:
            received = f"{here} to {there} and back: {wire.latency_s * 1e3:.1f} ms"
            expected = f"less than {_MAX_LATENCY_S * 1e3:.0f} ms"
            fix = "take hosts of one site, or take fewer and larger steps"
            yield HostFinding("D303", (here, there), received, expected, fix)


def rate(bytes_per_s: float) -> str:
    """Return a speed for people."""
    return f"{bytes_per_s / 1e6:.2f} MB/s"


NETWORK = Topic(name="network", rules=_NETWORK_RULES, check=_check_network)


# Checks of the hosts' clocks.

_MOST_APART_S = 1.0

_CLOCKS_RULES = rules_of("""
D401 warning: a clock that is off
    Logs of several hosts are read side by side, tickets and certificates expire, and file
    systems go by the times of files.
""")


def _check_clocks(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        ahead = host.clock_ahead_s
        if ahead is None or abs(ahead) - host.clock_error_s <= _MOST_APART_S:
            continue
        here, first = facts.name(host.index), facts.name(facts.present[0].index)
        side = "ahead of" if ahead > 0 else "behind"
        received = f"{here} is {abs(ahead):.1f} s {side} {first}"
        fix = f"let chrony or systemd-timesyncd set the clock of {here} and of {first}"
        yield HostFinding("D401", (here,), received, f"less than {_MOST_APART_S:.0f} s", fix)


CLOCKS = Topic(name="clocks", rules=_CLOCKS_RULES, check=_check_clocks)


# Checks that hosts have the same software and equivalent processors.

NEEDED = ("tensorflow", "keras", "numpy", "tfdist")
"""Packages that a host must have at all."""

_CODES = {
    "python": "D502",
    "tensorflow": "D503",
    "keras": "D504",
    "numpy": "D505",
    "tfdist": "D506",
    "cuda": "D507",
    "cudnn": "D507",
    "nccl": "D507",
    "nvidia driver": "D507",
}
_NONE = "none"

_SOFTWARE_RULES = rules_of("""
D501 error: a host without what a task needs
    The task ends when it imports it.
D502 error: versions of Python that differ
    A program may run under one and not under the other.
D503 error: versions of TensorFlow that differ
    What its servers say to each other is not promised between versions.
D504 error: versions of Keras that differ
    Tasks would trace different steps of the same program, and wait for each other.
D505 warning: versions of NumPy that differ
    Data that a program makes by it may differ between tasks.
D506 error: versions of tfdist that differ
    Its tasks send each other messages of its own.
D507 error: versions of CUDA, cuDNN, NCCL or the driver that differ
    NCCL refuses, or waits for ever for, a peer of another version.
D508 warning: processors that differ in what they can compute
    Kernels are chosen by it: the same step has other last bits on another host.
""")


def _check_software(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        missing = [name for name in NEEDED if name not in dict(host.machine.versions)]
        if missing:
            here = facts.name(host.index)
            received = f"no {', '.join(missing)} for {host.machine.host_name}'s Python"
            fix = f"install it on {here}, or start the command there by the same Python"
            yield HostFinding("D501", (here,), received, "all that tfdist installs", fix)
    for name, code in _CODES.items():
        versions = _versions(facts.present, name)
        has = [version for version in versions if version != _NONE]
        if len(has) > 1 or (code == "D507" and len(versions) > 1):
            yield _differing(facts, code=code, what=f"{name} ", groups=versions)
    features = _features(facts.present)
    if len(features) > 1:
        yield _differing(facts, code="D508", what="", groups=features)


def _versions(hosts: Sequence[HostFacts], name: str) -> dict[str, list[int]]:
    groups = defaultdict(list)
    for host in hosts:
        version = dict(host.machine.versions).get(name, _NONE)
        if name == "python":
            version = ".".join(version.split(".")[:2])  # the rest is repairs
        groups[version].append(host.index)
    return groups


def _features(hosts: Sequence[HostFacts]) -> dict[str, list[int]]:
    """Return the hosts by the features that not all of them have."""
    sets = [set(host.machine.cpu_features) for host in hosts]
    common = set.intersection(*sets) if sets else set()
    groups = defaultdict(list)
    for host, features in zip(hosts, sets, strict=True):
        groups[" ".join(sorted(features - common)) or "none of them"].append(host.index)
    return groups


def _differing(
    facts: JobFacts, *, code: str, what: str, groups: Mapping[str, list[int]]
) -> HostFinding:
    """Return the finding for the hosts that differ from most; in a tie, from the first."""
    most = max(groups.values(), key=len)
    groups_named = [
        f"{what}{value} on {named(map(facts.name, hosts))}" for value, hosts in groups.items()
    ]
    others = [index for hosts in groups.values() if hosts is not most for index in hosts]
    fix = "install the same on all, from one list of versions or one image"
    if code == "D508":
        fix = "take hosts of one kind, where the last bits are to be the same"
    names = tuple(facts.name(index) for index in others)
    return HostFinding(code, names, "; ".join(groups_named), "the same on all hosts", fix)


SOFTWARE = Topic(name="software", rules=_SOFTWARE_RULES, check=_check_software)


# Checks of each host's memory, file limits and speed.

_PER_TASK = 1 << 30  # importing TensorFlow takes 640 MB of it
_SHARED = 256 << 20
_FILES, _FILES_PER_TASK = 1024, 16
_SLOW_HOST = 1.5

_MACHINES_RULES = rules_of("""
D601 warning: little memory for the tasks
    Importing TensorFlow takes 640 MB; a task that the kernel ends says nothing.
D603 warning: little shared memory on a host with GPUs
    NCCL moves data between GPUs of a host by /dev/shm, of which a container has 64 MB unless
    told otherwise.
D604 warning: few open files
    Each task has a connection to each other one, in both directions, and its data.
D605 warning: a host slower than the others
    Every step of a synchronous job waits for the slowest.
""")


def _check_machines(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        yield from _memory(facts, host)
        yield from _limits(facts, host)
        yield from _speed(facts, host)


def _memory(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
    here, machine = facts.name(host.index), host.machine
    if machine.memory_available is None:
        return
    has, limit, of = machine.memory_available, machine.memory_limit, ""
    if limit is not None:
        has = min(has, max(0, limit - (machine.memory_used or 0)))
        of = f" (limit {_size(limit)})"
    tasks = max(1, len(facts.hosts[host.index].ports))
    if has < tasks * _PER_TASK:
        received = f"{_size(has)} free{of} for {tasks} {'tasks' if tasks > 1 else 'task'}"
        fix = "end what else runs there, ask for more memory, or start fewer tasks"
        yield HostFinding("D601", (here,), received, f"{_size(tasks * _PER_TASK)} or more", fix)


def _limits(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
    here, machine = facts.name(host.index), host.machine
    if machine.gpus and machine.shared_memory is not None and machine.shared_memory < _SHARED:
        received = f"{_size(machine.shared_memory)} free in /dev/shm"
        fix = "docker run --shm-size=1g, or an emptyDir of medium Memory at /dev/shm"
        yield HostFinding("D603", (here,), received, f"{_size(_SHARED)} or more", fix)
    needed = max(_FILES, _FILES_PER_TASK * sum(len(other.ports) for other in facts.hosts))
    if machine.open_files is not None and machine.open_files < needed:
        most = machine.open_files_most
        received = f"{machine.open_files} (ulimit -n), {'any' if most is None else most} allowed"
        fix = f"ulimit -n {needed}, or LimitNOFILE of the service that starts the tasks"
        yield HostFinding("D604", (here,), received, f"{needed} or more", fix)


def _speed(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
    others = [o.work_s for o in facts.present if o is not host and o.work_s is not None]
    if host.work_s is None or not others:
        return
    usual_s = statistics.median(others)
    if host.work_s > _SLOW_HOST * usual_s:
        received = f"{host.work_s * 1e3:.0f} ms for a piece of work on each of its CPUs"
        expected = f"about {usual_s * 1e3:.0f} ms, as on the others"
        fix = "see what else runs there (top), its limit of CPUs, its clock and temperature"
        yield HostFinding("D605", (facts.name(host.index),), received, expected, fix)


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB"


MACHINES = Topic(name="machines", rules=_MACHINES_RULES, check=_check_machines)


# Checks for proxies that gRPC would use between tasks.

_PROXIES_RULES = rules_of("""
D701 error: a proxy between the tasks
    gRPC takes grpc_proxy, https_proxy or http_proxy for all hosts that no_grpc_proxy or
    no_proxy does not name, and a proxy does not pass on what tasks say.
""")


def _check_proxies(facts: JobFacts) -> Iterator[HostFinding]:
    if len(facts.hosts) == 1 and not facts.hosts[0].ports:
        return
    names = [host.name for host in facts.hosts]
    for host in facts.present:
        proxy, here = host.machine.proxy, facts.name(host.index)
        if proxy is None:
            continue
        caught = [name for name in names if not excepted(name, proxy.exceptions)]
        if not caught:
            continue
        without = f"{proxy.excepted_by} does not name" if proxy.excepted_by else "without no_proxy:"
        received = f"{proxy.name}={proxy.value}, {without} {', '.join(caught[:8])}"
        fix = (
            f"export {proxy.excepted_by or 'no_proxy'}={','.join(names[:64])}, "
            f"or unset {proxy.name}"
        )
        yield HostFinding("D701", (here,), received, "no proxy for the hosts of the job", fix)


def excepted(host: str, exceptions: Sequence[str]) -> bool:
    """Return whether gRPC goes to a host without the proxy: an entry ends it, or has it inside.

    See ``HttpProxyMapper`` in gRPC: entries are endings of the name or, for a number, networks.
    """
    plain = host.strip("[]").lower()
    for entry in exceptions:
        entry = entry.strip().lower()
        if entry and (plain.endswith(entry) or _inside(plain, entry)):
            return True
    return False


def _inside(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


PROXIES = Topic(name="proxies", rules=_PROXIES_RULES, check=_check_proxies)


# Checks of the shared directory that checkpoints need.

_LEAST_FREE = 1 << 30

_DIRECTORY_RULES = rules_of("""
D801 error: a shared directory that is not there
    Every task of a job reads checkpoints, and one writes them.
D802 error: a shared directory that cannot be written
    The job would train and save nothing.
D803 error: files that another host does not see
    The directory is another one there, or is seen late: a resume would find nothing.
D804 error: a rename that is not atomic
    A checkpoint is written beside and renamed; a reader must find the old or the new.
D805 error: a file system without fsync
    A checkpoint that is not on the disk is lost with the host's power.
D807 warning: little free space in the shared directory
    A save that fails keeps the last good checkpoint, and ends the job.
""")


def _check_directories(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        if host.directory is not None:
            yield from _check_directory(facts, host, host.directory)


def _check_directory(facts: JobFacts, host: HostFacts, found: Directory) -> Iterator[HostFinding]:
    here, path = facts.name(host.index), facts.shared_dir
    if found.error:
        code, right = "D801", "under the same path, or correct --shared_dir"
        if found.is_read_only:
            code, right = "D802", "with the right to write"
        expected = "a directory that this user may write on every host"
        fix = f"mount it on {here}, {right}"
        yield HostFinding(code, (here,), f"{path}: {found.error}", expected, fix)
        return
    if found.unseen:
        names = ", ".join(facts.name(index) for index in found.unseen[:8])
        expected = "the same files on all hosts, within seconds"
        fix = f"mount the same file system at {path} on {here} and on {names}"
        yield HostFinding("D803", (here,), f"{path}: files of {names} are not seen", expected, fix)
    if found.torn:
        received = (
            f"{path}: {found.torn} of {found.reads} reads found neither the old file nor the new"
        )
        fix = "use a file system whose rename is atomic, and no layer over an object store"
        yield HostFinding("D804", (here,), received, "one of the two", fix)
    yield from _check_disk(here, path, found)


def _check_disk(here: str, path: str, found: Directory) -> Iterator[HostFinding]:
    if found.sync_error:
        expected = "a write that reaches the disk"
        fix = "use a file system that has fsync"
        yield HostFinding("D805", (here,), f"{path}: {found.sync_error}", expected, fix)
    if found.free < _LEAST_FREE:
        expected = f"{_size(_LEAST_FREE)} or more, and room for several checkpoints"
        fix = "delete old runs, or name another directory"
        yield HostFinding("D807", (here,), f"{path}: {_size(found.free)} free", expected, fix)


DIRECTORY = Topic(name="shared directory", rules=_DIRECTORY_RULES, check=_check_directories)


# Checks of TensorFlow's servers: all-reduce, push and pull, compared with a plain socket.

# An all-reduce of 16 MB between two processes of one machine took 31 ms: 516 MB/s through each of
# them, where a plain socket has gigabytes. What is slower than a connection allows is compared
# with the smaller of the two.
_SERVERS_BYTES_PER_S = 400e6
_SLOW = 4.0
_SLACK_S = 0.02

_EXCHANGE_RULES = rules_of("""
D901 error: TensorFlow's servers that do not come together
    What a job does first does not work here.
D902 error: an all-reduce with a wrong sum
    Every step would be wrong.
D903 warning: an all-reduce slower than the connection
    Every step of a multiworker job has one, of the size of the model.
D904 warning: a push to a ps slower than the connection
    Every step of a ps job sends its gradients.
D905 warning: a pull from a ps slower than the connection
    Every step of a ps job fetches the weights.
""")


def _check_exchange(facts: JobFacts) -> Iterator[HostFinding]:
    found = facts.exchange
    if found is None:
        return
    names = tuple(host.name for host in facts.hosts)
    if found.error:
        expected = "an all-reduce, a push and a pull between all hosts"
        fix = "put right what else is found here; else see whether `import tensorflow` works"
        yield HostFinding("D901", names, found.error, expected, fix)
        return
    if not found.is_right:
        received = "another sum than that of the parts"
        fix = "test the memory and the network cards of the hosts"
        yield HostFinding("D902", names, received, "the sum of what the hosts put in", fix)
    for code, what, took_s, should_s in _times(facts, found):
        if took_s > _SLOW * should_s + _SLACK_S:
            received = f"{took_s * 1e3:.0f} ms for {what} {found.size_bytes >> 20} MiB"
            expected = (
                f"about {should_s * 1e3:.0f} ms by what plain sockets carry "
                f"({rate(_slowest(facts)[0])})"
            )
            fix = "see what else runs on the hosts, and what inspects or limits connections"
            yield HostFinding(code, names, received, expected, fix)


def _times(facts: JobFacts, found: Exchange) -> Iterator[tuple[str, str, float, float]]:
    """Yield code, words, the time taken and the time that the connections allow."""
    if not any(not wire.error for host in facts.present for wire in host.wires):
        return
    speed, latency_s = _slowest(facts)
    bytes_per_s = min(speed, _SERVERS_BYTES_PER_S)
    tasks = max(2, len(facts.hosts))
    # A ring: each of n sends 2(n - 1) pieces of an n-th, one after the other.
    ring_s = 2 * (tasks - 1) * (latency_s + found.size_bytes / tasks / bytes_per_s)
    once_s = 2 * latency_s + found.size_bytes / bytes_per_s
    yield "D903", "an all-reduce of", found.reduce_s, ring_s
    yield "D904", "a push of", found.push_s, once_s
    yield "D905", "a pull of", found.pull_s, once_s


def _slowest(facts: JobFacts) -> tuple[float, float]:
    """Return the least bytes a second and the longest way there and back."""
    wires = [wire for host in facts.present for wire in host.wires if not wire.error]
    return min(w.bytes_per_s for w in wires), max(w.latency_s for w in wires)


EXCHANGE = Topic(name="exchange", rules=_EXCHANGE_RULES, check=_check_exchange)


# All of them.

TOPICS: tuple[Topic, ...] = (
    HOSTS,
    NAMES,
    PORTS,
    NETWORK,
    CLOCKS,
    SOFTWARE,
    MACHINES,
    PROXIES,
    DIRECTORY,
    EXCHANGE,
)

RULES: dict[str, Rule] = {rule.code: rule for topic in TOPICS for rule in topic.rules}


def check(facts: JobFacts) -> list[HostFinding]:
    """Return all that is wrong, topic after topic."""
    return [finding for topic in TOPICS for finding in topic.check(facts)]
