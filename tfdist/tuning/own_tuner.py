"""The tuner that a program gives to `search`: what it must be, and what its trials go by."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras_tuner

from tfdist.errors import UsageError, near
from tfdist.tuning.options import check_no_rule


def sweep_dir_of(tuner: Any, given: str | os.PathLike[str] | None) -> Path:
    """Returns where a sweep with this tuner writes; raises UsageError for what is no tuner."""
    if not isinstance(tuner, keras_tuner.Tuner):
        raise UsageError(
            "tfdist.tuning.search",
            received=f"a {type(tuner).__name__}",
            expected="a keras_tuner.Tuner, such as RandomSearch",
            fix="make one from the build function",
        )
    if given is None:
        return default_dir(tuner)
    theirs = Path(tuner.directory, tuner.project_name).resolve()
    if Path(given).resolve().is_relative_to(theirs):
        raise UsageError(
            "sweep_dir",
            received=f"{given}, in the tuner's own directory",
            expected="another one: with overwrite=True a tuner deletes its own when it is made",
            fix="leave it out, or give one beside it",
        )
    return Path(given)


def default_dir(tuner: Any) -> Path:
    """Returns where a sweep with this tuner writes where nothing else is said."""
    return Path(f"{tuner.directory}/{tuner.project_name}-sweep")


def require_fresh(tuner: Any) -> None:
    """Raises UsageError for a tuner that has searched."""
    if tuner.oracle.trials:
        raise UsageError(
            "tfdist.tuning.search",
            received=f"a tuner that has searched already, {len(tuner.oracle.trials)} trials",
            expected="a new one; what a sweep has found is read from its sweep_dir",
            fix="give the tuner another project_name",
        )


def require_one_rule(tuner: Any, early_stop: str) -> None:
    """Raises UsageError for a rule beside hyperband's own."""
    if isinstance(tuner.oracle, keras_tuner.oracles.HyperbandOracle):
        check_no_rule(early_stop)


def of_epochs(tuner: Any) -> str | None:
    """Returns the objective where nothing but the epochs of a fit can report it, else None."""
    fits = (tuner.run_trial, getattr(tuner.hypermodel, "fit", None))
    is_plain = all(getattr(one, "__module__", "").startswith("keras_tuner.") for one in fits)
    objective = tuner.oracle.objective
    return str(objective.name) if is_plain and type(objective) is keras_tuner.Objective else None


def require_validation(tuner: Any, fit_kwargs: Mapping[str, Any]) -> None:
    """Raises UsageError for an objective of the validation where there is none.

    A callback might report it; then the first epoch tells.
    """
    objective = of_epochs(tuner) or ""
    data, split, callbacks = map(
        fit_kwargs.get, ("validation_data", "validation_split", "callbacks")
    )
    if objective.startswith("val_") and data is None and not split and not callbacks:
        raise UsageError(
            "objective",
            received=f"{objective!r} without data to validate on",
            expected="what the model reports",
            fix="give search validation_data or validation_split, or go by the training's figure",
        )


def unreported(objective: str, there: Iterable[str]) -> UsageError:
    """Returns what to raise where a trial reports only these."""
    there = list(there)
    return UsageError(
        "objective",
        received=f"{objective!r}{near(objective, there)}",
        expected=f"what the model reports: {', '.join(there)}",
        fix="name one of them, or add it to the metrics of model.compile",
    )
