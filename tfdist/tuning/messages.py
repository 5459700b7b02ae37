"""Messages between a sweep's chief and its runners, as JSON objects.

A runner comes with ``runner``: its name, its places and the leases it holds. It is told to ``run``
a trial, ``stop`` one with the save, or ``drop`` one whose lease it has lost; it says what has
``ended`` until it hears that this was ``taken``.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from tfdist.tuning import trial_job
from tfdist.tuning.directory import TRIALS
from tfdist.tuning.journal import Slot
from tfdist.tuning.trial_job import Completed, Failed, Goal, Killed, Outcome, TrialJob

Message = dict[str, Any]
Lease = tuple[str, int]
"""A trial and the number of its start."""

ALIVE = "alive"
"""What a runner says each second with the time of its own clock, and hears back at once: so it
knows by when it has been heard."""

LEASE_S = 10.0
"""From the last word of a runner; a trial is given to another within 15 s."""

ANY_RANK = 1 << 48
"""A runner draws its rank from so many, so that hardly two of them draw the same."""

NO_SENSE = (KeyError, TypeError, ValueError, AttributeError)
"""What the functions here raise for a message that makes no sense."""

_KINDS = {"completed": Completed, "failed": Failed, "killed": Killed}


def encode_job(job: TrialJob) -> Message:
    """Return a trial as a message; the paths in it are as on the chief's host."""
    return {
        "trial": job.trial,
        "lease": job.lease,
        "place": job.slot.number,
        "run": job.run_dir.name,
        "continues": job.continues,
        "flags": list(job.flags),
        "variables": dict(job.variables),
        "goal": dataclasses.asdict(job.goal),
    }


def decode_job(told: Any, *, sweep_dir: Path) -> TrialJob:
    """Return the trial of a message; raise ValueError for what no chief would say."""
    flags, variables = tuple(map(str, told["flags"])), dict(told["variables"])
    run, continues, goal = str(told["run"]), told["continues"], told["goal"]
    if (
        not all(flag.startswith("--config.") for flag in flags)
        or variables.keys() - {trial_job.VARIABLE}
        or not all(map(_is_name, [run, "0" if continues is None else continues]))
    ):
        raise ValueError("no trial")
    return TrialJob(
        run_dir=sweep_dir / TRIALS / run,
        flags=flags,
        variables=variables,
        goal=Goal(**{**goal, "medians": tuple(goal["medians"])}),
        slot=Slot(number=int(told["place"])),
        continues=continues,
    )


def _is_name(run: str) -> bool:
    """Return whether it is a directory among the trials, and nothing else."""
    return run == os.path.basename(run) and not run.startswith(".")


def encode_outcome(outcome: Outcome) -> Message:
    """Return what became of a trial as a message."""
    return {"kind": type(outcome).__name__.lower(), **dataclasses.asdict(outcome)}


def decode_outcome(told: Any) -> Outcome:
    """Return the outcome of a message."""
    values = dict(told)
    kind = _KINDS[values.pop("kind")]
    listed = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    outcome: Outcome = kind(**listed)
    return outcome


def decode_lease(told: Any) -> Lease:
    """Return the trial and the number of a lease."""
    trial, number = told
    return str(trial), int(number)
