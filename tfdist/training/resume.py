"""Whether a saved run is this run, and where it stands."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.store import SecondWriter
from tfdist.cluster import JobOptions
from tfdist.errors import StartupTimeout, UsageError
from tfdist.strategy import Job, broadcast
from tfdist.training.epochs import EpochPlan
from tfdist.training.inputs import Data

_LOG = logging.getLogger(__name__)
_AGAIN_S = 0.5


def saved_run(backups: Sequence[BackupAndRestore], job: Job) -> RunState | None:
    """What the first backup's newest checkpoint says, in every task. A collective.

    Finds out at once, in the chief, whether every backup can write; raises as
    `BackupAndRestore.prepare`, and StartupTimeout where the attempt before goes on writing.
    """
    if not backups:
        return None
    saved = None
    if job.is_chief:
        for backup in backups:
            _take(backup, job)
            backup.close()  # until the training begins: what comes before it may be refused
        saved = backups[0].saved()
    told = broadcast(None if saved is None else dataclasses.asdict(saved))
    return None if told is None else RunState(**told)


def _take(backup: BackupAndRestore, job: Job) -> None:
    """Takes the backup's directory; a later attempt waits until the one before lets go of it.

    A scheduler that calls a node down starts the job elsewhere, and the tasks there may live on
    for as long as they save.
    """
    options = job.config.options if job.config else JobOptions()
    deadline_s = time.monotonic() + options.startup_timeout_s
    is_told = False
    while True:
        try:
            return backup.prepare()
        except SecondWriter as error:
            if options.attempt == 1:
                raise
            if time.monotonic() >= deadline_s:
                waited = f"waited {options.startup_timeout_s:g} s for the attempt before"
                raise StartupTimeout(f"{waited}: {error}") from error
            if not is_told:
                _LOG.warning("waiting for the attempt before to end: %s", error)
            is_told = True
        time.sleep(_AGAIN_S)


def fingerprint(data: Data) -> dict[str, Any]:
    """What must stay as it is between the attempts of a run: which examples a step consumes."""
    return {
        "global_batch_size": data.plan.global_batch_size,
        "examples_in_the_data": data.order.examples,
        "shuffle": data.order.shuffle,
        "data": type(data.source).__name__,
    }


def epoch_at(step: int, plan: EpochPlan) -> dict[str, Any]:
    """Which epoch a step belongs to: callbacks and History have counted those before it."""
    epoch = plan.epoch_of(step)
    return {"epoch": epoch + 1, "first_example_of_the_epoch": plan.example_starts[epoch]}


def require_same_run(
    saved: RunState, mine: Mapping[str, Any], *, plan: EpochPlan, seed: int
) -> None:
    """Raises UsageError that names what differs between the saved run and this one.

    A run may be made longer: its examples so far must be those of the plan.
    """
    before = {**saved.fingerprint, "seed": saved.seed, "examples_so_far": saved.examples}
    so_far = {"examples_so_far": plan.examples_before(saved.step), **epoch_at(saved.step, plan)}
    now = {**mine, "seed": seed, **so_far}
    differences = [
        f"{name} {before.get(name)} -> {now.get(name)}"
        for name in now
        if before.get(name) != now[name]
    ]
    if differences:
        raise UsageError(
            "BackupAndRestore",
            received=f"a checkpoint of another run: {', '.join(differences)}",
            expected="the data, batch size, seed and epochs that it was saved with",
            fix="use another directory, or start from its weights with initial_weights",
        )
