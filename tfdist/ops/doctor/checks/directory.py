"""Checks of the shared directory that checkpoints need."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.ops.doctor.facts import Directory, HostFacts, JobFacts
from tfdist.ops.doctor.findings import HostFinding, Topic
from tfdist.ops.rules import error, warning

_GIB = 1 << 30
_LEAST_FREE = _GIB
_SLOW_SYNC_S = 1.0

_RULES = (
    error(
        "D801",
        "a shared directory that is not there",
        reason="Every task of a job reads checkpoints, and one writes them.",
    ),
    error(
        "D802",
        "a shared directory that cannot be written",
        reason="The job would train and save nothing.",
    ),
    error(
        "D803",
        "files that another host does not see",
        reason="The directory is another one there, or is seen late: a resume would find nothing.",
    ),
    error(
        "D804",
        "a rename that is not atomic",
        reason="A checkpoint is written beside and renamed; a reader must find the old or the new.",
    ),
    error(
        "D805",
        "a file system without fsync",
        reason="A checkpoint that is not on the disk is lost with the host's power.",
    ),
    warning(
        "D806",
        "an fsync that takes long",
        reason="Each checkpoint waits for several of them.",
    ),
    warning(
        "D807",
        "little free space in the shared directory",
        reason="A save that fails keeps the last good checkpoint, and ends the job.",
    ),
)


def _check(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        if host.directory is not None:
            yield from _one(facts, host, host.directory)


def _one(facts: JobFacts, host: HostFacts, found: Directory) -> Iterator[HostFinding]:
    here, path = facts.name(host.index), facts.shared_dir
    if found.error:
        yield HostFinding(
            code="D802" if found.is_read_only else "D801",
            hosts=(here,),
            received=f"{path}: {found.error}",
            expected="a directory that this user may write on every host",
            fix=f"mount it on {here}, with the right to write"
            if found.is_read_only
            else f"mount it on {here}, under the same path, or correct --shared_dir",
        )
        return
    if found.unseen:
        names = ", ".join(facts.name(index) for index in found.unseen[:8])
        yield HostFinding(
            code="D803",
            hosts=(here,),
            received=f"{path}: files of {names} are not seen",
            expected="the same files on all hosts, within seconds",
            fix=f"mount the same file system at {path} on {here} and on {names}",
        )
    if found.torn:
        yield HostFinding(
            code="D804",
            hosts=(here,),
            received=f"{path}: {found.torn} of {found.reads} reads found neither the old file nor "
            f"the new",
            expected="one of the two",
            fix="use a file system whose rename is atomic, and no layer over an object store",
        )
    yield from _disk(here, path, found)


def _disk(here: str, path: str, found: Directory) -> Iterator[HostFinding]:
    if found.sync_error:
        yield HostFinding(
            code="D805",
            hosts=(here,),
            received=f"{path}: {found.sync_error}",
            expected="a write that reaches the disk",
            fix="use a file system that has fsync",
        )
    elif found.sync_s > _SLOW_SYNC_S:
        yield HostFinding(
            code="D806",
            hosts=(here,),
            received=f"{path}: {found.sync_s:.1f} s for a small file",
            expected=f"less than {_SLOW_SYNC_S:.0f} s",
            fix="see what else writes there, or save less often",
        )
    if found.free < _LEAST_FREE:
        yield HostFinding(
            code="D807",
            hosts=(here,),
            received=f"{path}: {found.free >> 20} MiB free",
            expected=f"{_LEAST_FREE >> 20} MiB or more, and room for several checkpoints",
            fix="delete old runs, or name another directory",
        )


def _seen(facts: JobFacts) -> str:
    found = [host.directory for host in facts.present if host.directory is not None]
    if not found:
        return ""
    sync_ms = max(directory.sync_s for directory in found) * 1e3
    free = min(directory.free for directory in found) / _GIB
    return f"{facts.shared_dir}: {free:.1f} GiB free, fsync {sync_ms:.0f} ms"


TOPIC = Topic(name="shared directory", rules=_RULES, check=_check, seen=_seen)
