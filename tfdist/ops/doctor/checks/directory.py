"""Checks of the shared directory that checkpoints need."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.ops.doctor.facts import Directory, HostFacts, JobFacts
from tfdist.ops.doctor.findings import HostFinding, Topic
from tfdist.ops.rules import rules_of

_GIB = 1 << 30
_LEAST_FREE = _GIB
_SLOW_SYNC_S = 1.0

_RULES = rules_of("""
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
D806 warning: an fsync that takes long
    Each checkpoint waits for several of them.
D807 warning: little free space in the shared directory
    A save that fails keeps the last good checkpoint, and ends the job.
""")


def _check(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        if host.directory is not None:
            yield from _one(facts, host, host.directory)


def _one(facts: JobFacts, host: HostFacts, found: Directory) -> Iterator[HostFinding]:
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
    yield from _disk(here, path, found)


def _disk(here: str, path: str, found: Directory) -> Iterator[HostFinding]:
    if found.sync_error:
        expected = "a write that reaches the disk"
        fix = "use a file system that has fsync"
        yield HostFinding("D805", (here,), f"{path}: {found.sync_error}", expected, fix)
    elif found.sync_s > _SLOW_SYNC_S:
        received = f"{path}: {found.sync_s:.1f} s for a small file"
        fix = "see what else writes there, or save less often"
        yield HostFinding("D806", (here,), received, f"less than {_SLOW_SYNC_S:.0f} s", fix)
    if found.free < _LEAST_FREE:
        expected = f"{_LEAST_FREE >> 20} MiB or more, and room for several checkpoints"
        fix = "delete old runs, or name another directory"
        yield HostFinding("D807", (here,), f"{path}: {found.free >> 20} MiB free", expected, fix)


def _seen(facts: JobFacts) -> str:
    found = [host.directory for host in facts.present if host.directory is not None]
    if not found:
        return ""
    sync_ms = max(directory.sync_s for directory in found) * 1e3
    free = min(directory.free for directory in found) / _GIB
    return f"{facts.shared_dir}: {free:.1f} GiB free, fsync {sync_ms:.0f} ms"


TOPIC = Topic(name="shared directory", rules=_RULES, check=_check, seen=_seen)
