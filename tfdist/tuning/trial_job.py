"""What a trial is to those who run it, and what the chief expects of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tfdist.tuning import assignment
from tfdist.tuning.directory import is_run_in
from tfdist.tuning.place import HERE, Place
from tfdist.tuning.results import Completed, Failed, Goal, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """What is needed to run a trial, or to go on with it."""

    run_dir: Path
    flags: tuple[str, ...]
    """``--config.field=value``."""
    goal: Goal
    place: int = 0
    """Which of the trials at once it is, from 0 on: whose GPUs it takes."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to its environment."""
    trial: str = ""
    lease: int = 0
    """Which start of the trial it is."""
    runner: int = HERE
    """Who is to run it."""
    continues: str | None = None
    """The run directory in which the trial began that this one goes on with."""

    @property
    def is_written(self) -> bool:
        """Returns whether some job writes where this one will: also to checkpoints elsewhere."""
        told = assignment.read(self.variables)
        places = {self.run_dir, *([Path(told.checkpoints).parent] if told else [])}
        return any(map(is_run_in, places))


class RunningTrial(Protocol):
    """A trial that was started."""

    def poll(self) -> Outcome | None:
        """Returns what became of it, None while it runs."""

    def stop(self) -> None:
        """Asks it to save and end; `poll` goes on until it has."""

    def taken(self) -> None:
        """What `poll` has returned is written down: nobody needs to keep it any more."""


class Runner(Protocol):
    """What the chief runs trials with."""

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        """Returns the outcome of a trial that has come to its goal already."""

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        """Returns a line for each virtual epoch that a trial has done."""

    def free_places(self, taken: Collection[Place]) -> Iterable[Place]:
        """Returns where trials can be started now, if they run in the places that are taken."""

    def start(self, job: TrialJob) -> RunningTrial:
        """Starts a trial, or goes on with it where it stood."""

    def take_over(self, job: TrialJob) -> RunningTrial:
        """Returns a trial that another runner has, whose chief has been killed."""

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        """Returns when a trial may have ended, after `timeout_s` at the latest."""
