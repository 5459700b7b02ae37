"""The trials of a sweep from Python, as the launcher is to run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.tuning import directory, retrain
from tfdist.tuning.assignment import Assignment
from tfdist.tuning.chief import Plan
from tfdist.tuning.options import RunOptions
from tfdist.tuning.results import Goal
from tfdist.tuning.state import Trial
from tfdist.tuning.trial_job import TrialJob

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A sweep from Python as it was asked for."""

    options: RunOptions
    backup_every_steps: int | None

    def assignment(
        self,
        trial: str,
        values: Mapping[str, Any],
        *,
        seed: int,
        run_dir: Path,
        checkpoints: Path,
        save_model: bool = False,
    ) -> Assignment:
        """Returns what a trial is told."""
        return Assignment(
            sweep_dir=str(self.options.sweep_dir.absolute()),
            trial=trial,
            run_dir=str(run_dir.absolute()),
            checkpoints=str(checkpoints.absolute()),
            values=values,
            seed=seed,
            backup_every_steps=self.backup_every_steps,
            save_model=save_model,
        )


def plan_of(tuner: Any, asked: Asked, *, seed: int) -> Plan:
    """Returns how the trials are run."""
    options, objective = asked.options, tuner.oracle.objective

    def variables_of(trial: Trial) -> dict[str, str]:
        trials = options.sweep_dir / directory.TRIALS
        first = _first_of(trial.id, tuner.oracle)
        return asked.assignment(
            trial.id,
            trial.values,
            seed=seed,
            run_dir=trials / trial.id,
            checkpoints=trials / first / _CHECKPOINTS,
        ).encode()

    return Plan(
        sweep_dir=options.sweep_dir,
        objective=objective.name,
        direction=objective.direction,
        max_epochs=None,
        max_failed_trials=options.max_failed_trials,
        early_stop=options.early_stop,
        variables_of=variables_of,
    )


def best_of(tuner: Any, asked: Asked, trial: Trial, *, seed: int) -> TrialJob:
    """Returns the job that trains a trial's values from the beginning, hyperband's in full."""
    values, objective = dict(trial.values), tuner.oracle.objective
    if "tuner/epochs" in values:
        values |= {"tuner/epochs": tuner.oracle.max_epochs, "tuner/initial_epoch": 0}
        values.pop("tuner/trial_id", None)
    run_dir = asked.options.sweep_dir / retrain.NAME
    assignment = asked.assignment(
        retrain.NAME,
        values,
        seed=seed,
        run_dir=run_dir,
        checkpoints=run_dir / _CHECKPOINTS,
        save_model=True,
    )
    goal = Goal(objective=objective.name, direction=objective.direction)
    return TrialJob(run_dir=run_dir, flags=(), variables=assignment.encode(), goal=goal, place=0)


def _first_of(trial: str, oracle: Any) -> str:
    """Returns the trial that this one continues, by way of others or not; else itself."""
    while past := oracle.trials[trial].hyperparameters.values.get("tuner/trial_id"):
        trial = past
    return trial
