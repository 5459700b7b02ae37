"""Whether each host has the memory, files and speed that its tasks need."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tfdist.lint.rules import warning
from tfdist.preflight.facts import HostFacts, JobFacts
from tfdist.preflight.findings import Finding, Topic

_MIB, _GIB = 1 << 20, 1 << 30
_PER_TASK = _GIB  # importing TensorFlow takes 640 MB of it
_SHARED = 256 * _MIB
_FILES, _FILES_PER_TASK = 1024, 16
_SLOW = 1.5
_FEW = 0.5

_RULES = (
    warning(
        "D601",
        "little memory for the tasks",
        reason="Importing TensorFlow takes 640 MB; a task that the kernel ends says nothing.",
    ),
    warning(
        "D602",
        "much less memory than the other hosts",
        reason="All tasks hold the same model: what fits elsewhere may not fit here.",
    ),
    warning(
        "D603",
        "little shared memory on a host with GPUs",
        reason="NCCL moves data between GPUs of a host by /dev/shm, of which a container has 64 MB "
        "unless told otherwise.",
    ),
    warning(
        "D604",
        "few open files",
        reason="Each task has a connection to each other one, in both directions, and its data.",
    ),
    warning(
        "D605",
        "a host slower than the others",
        reason="Every step of a synchronous job waits for the slowest.",
    ),
    warning(
        "D606",
        "fewer CPUs than the other hosts",
        reason="Its tasks prepare data and compute slower, and the others wait.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    for host in facts.present:
        yield from _memory(facts, host)
        yield from _limits(facts, host)
        yield from _speed(facts, host)


def available(host: HostFacts) -> int | None:
    """Returns how many bytes the tasks of a host may take; None where nobody knows."""
    machine = host.machine
    found = [] if machine.memory_available is None else [machine.memory_available]
    if machine.memory_limit is not None:
        found.append(max(0, machine.memory_limit - (machine.memory_used or 0)))
    return min(found, default=None)


def _memory(facts: JobFacts, host: HostFacts) -> Iterator[Finding]:
    here, has = facts.name(host.index), available(host)
    if has is None:
        return
    tasks = max(1, len(facts.hosts[host.index].ports))
    limit = host.machine.memory_limit
    of = f" (limit {_size(limit)})" if limit is not None else ""
    if has < tasks * _PER_TASK:
        yield Finding(
            code="D601",
            hosts=(here,),
            received=f"{_size(has)} free{of} for {tasks} {'tasks' if tasks > 1 else 'task'}",
            expected=f"{_size(tasks * _PER_TASK)} or more",
            fix="end what else runs there, ask for more memory, or start fewer tasks",
        )
    others = [a for h in facts.present if h is not host and (a := available(h)) is not None]
    if others and has < _FEW * statistics.median(others):
        yield Finding(
            code="D602",
            hosts=(here,),
            received=f"{_size(has)} free{of}",
            expected=f"about {_size(statistics.median(others))}, as on the others",
            fix="give all hosts the same limit, and see what else runs there",
        )


def _limits(facts: JobFacts, host: HostFacts) -> Iterator[Finding]:
    here, machine = facts.name(host.index), host.machine
    if machine.gpus and machine.shared_memory is not None and machine.shared_memory < _SHARED:
        yield Finding(
            code="D603",
            hosts=(here,),
            received=f"{_size(machine.shared_memory)} free in /dev/shm",
            expected=f"{_size(_SHARED)} or more",
            fix="docker run --shm-size=1g, or an emptyDir of medium Memory at /dev/shm",
        )
    needed = max(_FILES, _FILES_PER_TASK * sum(len(other.ports) for other in facts.hosts))
    if machine.open_files is not None and machine.open_files < needed:
        most = machine.open_files_most
        yield Finding(
            code="D604",
            hosts=(here,),
            received=f"{machine.open_files} (ulimit -n), {'any' if most is None else most} allowed",
            expected=f"{needed} or more",
            fix=f"ulimit -n {needed}, or LimitNOFILE of the service that starts the tasks",
        )


def _speed(facts: JobFacts, host: HostFacts) -> Iterator[Finding]:
    here, others = facts.name(host.index), [h for h in facts.present if h is not host]
    cpus = [h.machine.cpus for h in others]
    if cpus and host.machine.cpus < _FEW * statistics.median(cpus):
        yield Finding(
            code="D606",
            hosts=(here,),
            received=f"{host.machine.cpus} CPUs",
            expected=f"about {statistics.median(cpus):.0f}, as the others have",
            fix="ask for the same number on each host (--cpus-per-task, resources.limits.cpu)",
        )
    if host.work_s is None:
        return
    times = [h.work_s for h in others if h.work_s is not None]
    if times and host.work_s > _SLOW * statistics.median(times):
        yield Finding(
            code="D605",
            hosts=(here,),
            received=f"{host.work_s * 1e3:.0f} ms for a piece of work on each of its CPUs",
            expected=f"about {statistics.median(times) * 1e3:.0f} ms, as on the others",
            fix="see what else runs there (top), its limit of CPUs, its clock and temperature",
        )


def _size(size_bytes: float) -> str:
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    return f"{size_bytes / _MIB:.0f} MiB"


def _seen(facts: JobFacts) -> str:
    cpus = sorted({host.machine.cpus for host in facts.present})
    counts = " and ".join(str(count) for count in cpus)
    memory = [has for host in facts.present if (has := available(host)) is not None]
    work = [host.work_s for host in facts.present if host.work_s is not None]
    parts = [f"{counts} CPU{'s' * (cpus != [1])}"]
    parts += [f"{_size(min(memory))} free or more"] if memory else []
    parts += [f"the slowest {max(work) / min(work):.2f} of the fastest"] if len(work) > 1 else []
    return ", ".join(parts)


TOPIC = Topic(name="machines", rules=_RULES, check=_check, seen=_seen)
