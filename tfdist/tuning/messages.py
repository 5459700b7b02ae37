"""What the chief of a sweep and its runners say to each other, as JSON objects.

A runner comes with ``runner``: its name, its places and the leases it holds. It is told to ``run``
a trial, ``stop`` one with the save, or ``drop`` one whose lease it has lost; it says what has
``ended`` until it hears that this was ``taken``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.tuning.early import MedianRule
from tfdist.tuning.results import Completed, Failed, Goal, Killed, Outcome
from tfdist.tuning.trial_job import TrialJob

Message = dict[str, Any]
Lease = tuple[str, int]
"""A trial and the number of its start."""

ALIVE = "alive"
"""What a runner says each second with the time of its own clock, and hears back at once: so it
knows by when it has been heard."""

NO_SENSE = (KeyError, TypeError, ValueError, AttributeError)
"""What the functions here raise for a message that makes no sense."""

_KINDS = {"completed": Completed, "failed": Failed, "killed": Killed}


def told_job(job: TrialJob) -> Message:
    """Returns a trial as a message; the paths in it are as on the chief's host."""
    return {
        "trial": job.trial,
        "lease": job.lease,
        "place": job.place,
        "run": job.run_dir.name,
        "continues": job.continues,
        "flags": list(job.flags),
        "variables": dict(job.variables),
        "goal": dataclasses.asdict(job.goal),
    }


def goal_of(told: Any) -> Goal:
    """Returns the goal of a message."""
    rule = told["rule"]
    if rule is not None:
        rule = MedianRule(**{**rule, "medians": tuple(rule["medians"])})
    return Goal(**{**told, "rule": rule})


def told_outcome(outcome: Outcome) -> Message:
    """Returns what became of a trial as a message."""
    return {"kind": type(outcome).__name__.lower(), **dataclasses.asdict(outcome)}


def outcome_of(told: Any) -> Outcome:
    """Returns the outcome of a message."""
    values = dict(told)
    kind = _KINDS[values.pop("kind")]
    listed = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    outcome: Outcome = kind(**listed)
    return outcome


def lease_of(told: Any) -> Lease:
    """Returns the trial and the number of a lease."""
    trial, number = told
    return str(trial), int(number)
