"""Optuna's samplers as a KerasTuner oracle.

The study is in memory. Each trial has a new sampler, whose random numbers depend on the seed and
the number of the trial. To restore a search, set `recorded` to each trial's journaled values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras_tuner
import numpy as np
import optuna

from tfdist.errors import require


class OptunaOracle(keras_tuner.Oracle):
    """Oracle that chooses each trial with a sampler of Optuna.

    Args:
      tuner: ``"tpe"``, ``"cmaes"`` or ``"gp"``.
      options: Arguments of `keras_tuner.Oracle`.

    Attributes:
      recorded: Values of the next trial from the journal, `None` to choose values.
    """

    def __init__(self, tuner: str, **options: Any) -> None:
        super().__init__(**options)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._tuner = tuner
        is_max = self.objective.direction == "max"
        self._study = optuna.create_study(direction="maximize" if is_max else "minimize")
        self._running: dict[str, Any] = {}
        self.recorded: Mapping[str, Any] | None = None

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        """Return the values of the next trial."""
        self._tell()
        self._study.sampler = self._new_sampler(len(self._study.trials))
        if self.recorded is not None:
            self._study.enqueue_trial(self._as_params(self.recorded))
        trial = self._running[trial_id] = self._study.ask()
        if self._tuner == "cmaes":
            _ = trial.relative_params  # CMA-ES stores its state in trials, also for recorded values
        hp = keras_tuner.HyperParameters()
        for one in self.hyperparameters.space:
            hp.merge([one])
            if hp.is_active(one):
                hp.values[one.name] = _suggest(trial, one)
        return {"status": "RUNNING", "values": hp.values}

    def _tell(self) -> None:
        """Tell the study the scores of the trials that have ended."""
        for name in [name for name in self._running if self.trials[name].status != "RUNNING"]:
            score = self.trials[name].score if self.trials[name].status == "COMPLETED" else None
            state = None if score is not None else optuna.trial.TrialState.FAIL
            self._study.tell(self._running.pop(name), score, state=state)

    def _new_sampler(self, number: int) -> Any:
        seed = int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])
        if self._tuner == "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        samplers = {"cmaes": optuna.samplers.CmaEsSampler, "gp": optuna.samplers.GPSampler}
        return samplers[self._tuner](seed=seed, warn_independent_sampling=False)

    def _as_params(self, values: Mapping[str, Any]) -> dict[str, Any]:
        space = {one.name: _stepped(one) for one in self.hyperparameters.space}
        return {
            name: stepped.index(values[name]) if stepped else values[name]
            for name, stepped in space.items()
            if name in values
        }


def require_supported(tuner: str, hyperparameters: Any) -> None:
    """Raise UsageError if a sampler of Optuna cannot search a space."""
    where, space = f"--tuner {tuner}", hyperparameters.space
    for number, one in enumerate(space):
        require(
            all(one.name != other.name for other in space[:number]),
            where,
            f"{one.name} is defined twice, and Optuna needs a name for each distribution",
            fix="give each hyperparameter its own name",
            code="search-space",
        )
        require(
            getattr(one, "sampling", None) != "reverse_log" or one.step is not None,
            where,
            f"{one.name} has sampling='reverse_log', which Optuna lacks",
            fix="use sampling='log' or a step, or --tuner bayesian",
            code="search-space",
        )
        require(
            tuner != "cmaes" or not one.conditions,
            where,
            f"{one.name} is conditional, and CMA-ES searches only a space without conditions",
            fix="use --tuner tpe, or leave out hp.conditional_scope()",
            code="search-space",
        )
    require(
        tuner != "cmaes" or any(_is_range(one) and _has_several_values(one) for one in space),
        where,
        "no Int or Float has several values, and CMA-ES draws all other values at random",
        fix="use --tuner tpe",
        code="search-space",
    )


def _stepped(one: Any) -> list[Any] | None:
    """Return the values of a range with a step, or `None` if Optuna's distributions fit.

    Optuna has no step on a logarithmic scale. KerasTuner computes floats with a step differently.
    """
    if not _is_range(one) or one.step is None or _is_linear_int(one):
        return None
    count = one._get_n_values()
    return [one.prob_to_value((index + 0.5) / count) for index in range(count)]


def _is_range(one: Any) -> bool:
    return type(one).__name__ in ("Int", "Float")


def _has_several_values(one: Any) -> bool:
    return bool(one.min_value < one.max_value if one.step is None else one._get_n_values() > 1)


def _is_linear_int(one: Any) -> bool:
    return type(one).__name__ == "Int" and one.sampling == "linear"


def _suggest(trial: Any, one: Any) -> Any:
    """Return a value of a KerasTuner hyperparameter from the Optuna distribution for it."""
    kind, stepped = type(one).__name__, _stepped(one)
    if kind == "Fixed":
        return one.value
    if kind in ("Choice", "Boolean"):
        return trial.suggest_categorical(one.name, list(one.values))
    if stepped:
        return stepped[trial.suggest_int(one.name, 0, len(stepped) - 1)]
    least, most = one.min_value, one.max_value
    if _is_linear_int(one):
        return trial.suggest_int(one.name, least, most - (most - least) % one.step, step=one.step)
    suggest = trial.suggest_int if kind == "Int" else trial.suggest_float
    return suggest(one.name, least, most, log=one.sampling == "log")
