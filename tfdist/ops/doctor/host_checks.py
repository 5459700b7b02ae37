"""Checks of the hosts: presence, software, resources, clocks, the shared directory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tfdist.launch.events import named
from tfdist.ops.doctor.facts import Directory, HostFacts, HostFinding, JobFacts, Topic
from tfdist.ops.rules import rules_of

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
