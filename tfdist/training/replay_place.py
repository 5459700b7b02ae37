"""Under which strategy a run did a step, by what it left behind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.checkpoint import CheckpointStore
from tfdist.errors import TfdistError, UsageError
from tfdist.outputs.ledger import read_directory
from tfdist.outputs.ledger_merge import merged
from tfdist.outputs.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a step ran; `replicas` is None and `threads` 0 where that is not known."""

    kind: str
    replicas: int | None
    threads: int = 0


def place_of(
    directory: RunDirectory,
    store: CheckpointStore,
    config: Any,
    *,
    step: int,
    kind: str | None,
    replicas: int | None,
) -> Place:
    """Where the run did the step, by what it wrote down; `kind` and `replicas` go before that."""
    told = next(
        (place for place in _told(directory, store, config, step) if place is not None), None
    )
    if (told is not None and told.kind == "ps") or config.strategy == "ps":
        raise UsageError(
            f"run directory {directory.path}",
            received="a run under strategy ps",
            expected="single, mirrored or multiworker",
            fix="nothing: a step of ps depends on which workers' updates came before it, and not "
            "on the step alone",
        )
    if replicas is not None and (replicas < 1 or (kind == "single" and replicas != 1)):
        raise UsageError(
            "--replicas",
            received=f"{replicas} with --strategy {kind or 'mirrored'}",
            expected="1" if kind == "single" else "at least 1",
            fix="say --strategy mirrored and how many, or leave --replicas out",
        )
    count = replicas or (1 if kind == "single" else told.replicas if told else None)
    if count is None:
        raise UsageError(
            f"run directory {directory.path}",
            received="neither a ledger nor a checkpoint nor a summary that tells the replicas",
            expected="to know on how many the step ran",
            fix="say --strategy single, or --replicas N",
        )
    return Place(
        kind=kind or (told.kind if told else "single"),
        replicas=count,
        threads=told.threads if told else 0,
    )


def _told(
    directory: RunDirectory, store: CheckpointStore, config: Any, step: int
) -> Iterator[Place | None]:
    """What the run wrote down of where the step ran, the surest first."""
    yield _by_ledger(directory, step)
    # The checkpoint after the step was written by those who did it.
    steps = sorted(set(store.steps()), key=lambda s: (s <= step, abs(s - step)))
    for found in steps:
        with contextlib.suppress(TfdistError):  # a damaged one: the next tells as well
            yield _by_checkpoint(store.read(found).meta.get("place", {}))
    summary = directory.read_summary() or {}
    if "strategy" in summary:
        yield Place(kind=summary["strategy"], replicas=int(summary["replicas"]))
    if config.strategy == "single":
        yield Place(kind="single", replicas=1)


def _by_checkpoint(meta: Mapping[str, Any]) -> Place | None:
    if "replicas" not in meta:
        return None
    threads = int(meta.get("threads", 0))
    return Place(kind=meta["strategy"], replicas=int(meta["replicas"]), threads=threads)


def _by_ledger(directory: RunDirectory, step: int) -> Place | None:
    try:
        ledger = merged(read_directory(directory.path / "ledger"))
    except TfdistError:
        return None
    for attempt in ledger.attempts:
        if attempt.first <= step < min(attempt.last, attempt.limit):
            told = attempt.header
            return Place(kind=told.strategy, replicas=told.num_replicas, threads=told.threads)
    return None
