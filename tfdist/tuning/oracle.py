"""KerasTuner's oracle in a sweep: the next trial, and its results directory.

An oracle is brought to where it was by asking and telling it all that the journal says. Its own
files do not hold that (GridSearch's queue and BayesianOptimization's random state are in none,
KerasTuner 1.4.8), so they are written for those who read them, whole each time, and never read.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras_tuner
from keras_tuner.src.engine.metrics_tracking import infer_metric_direction

from tfdist.errors import UsageError
from tfdist.files import one_line_errors, write_text
from tfdist.tuning.chief import RUNNING, NextTrial

logger = logging.getLogger(__name__)

PROJECT = "keras_tuner"
"""The name of the project in the sweep directory, for `keras_tuner.RandomSearch(..., directory,
project_name)`."""


class Search:
    """An oracle of KerasTuner in one process, which asks it and tells it, one at a time."""

    def __init__(self, oracle: Any, *, sweep_dir: Path) -> None:
        self._oracle = oracle
        self._project = sweep_dir / PROJECT
        self._recorded: Mapping[str, Any] | None = None
        self._is_last = False
        self._populate = oracle.populate_space
        if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
            self._populate = functools.partial(self._next_of_grid, oracle.populate_space)
        oracle.verbose = 0
        oracle._set_project_dir(str(sweep_dir), PROJECT)
        oracle.populate_space = self._populate_space
        oracle.save = oracle._save_trial = _not_yet  # `publish` does, after the journal

    def ask(self) -> NextTrial:
        """Return what to do next."""
        number = 0
        while f"runner-{number}" in self._oracle.ongoing_trials:
            number += 1
        return self._ask(f"runner-{number}")

    def tell(
        self, trial: str, *, status: str, history: Iterable[Mapping[str, float]], reason: str
    ) -> None:
        """Tell the oracle that a trial has ended, COMPLETED or FAILED, and its metrics."""
        objective, tracker = self._oracle.objective.name, self._oracle.trials[trial].metrics
        for line in history:
            if objective in line:
                metrics = {name: value for name, value in line.items() if name != "virtual_epoch"}
                for name in metrics:
                    if not (name == objective or tracker.exists(name) or _has_direction(name)):
                        tracker.register(name, direction="min")
                self._oracle.update_trial(trial, metrics, step=int(line["virtual_epoch"]))
        ended = self._oracle.trials[trial]
        ended.status, ended.message = status, reason or None
        self._oracle.end_trial(ended)

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Ask and tell all that a journal says, so that the next answer is what it would be."""
        lines = list(lines)
        asked = [line for line in lines if line["event"] == "asked" and line["trial"] is not None]
        for line in lines:
            if line["event"] == "asked":
                self._recorded, self._is_last = line, line is asked[-1] if asked else False
                self._ask(line["asker"])
                self._recorded = None
            elif line["event"] == "ended":
                self.tell(
                    line["trial"],
                    status=line["status"],
                    history=line["history"],
                    reason=line["reason"],
                )
            elif line["event"] == "extended":
                self._oracle.max_trials = line["max_trials"]

    def publish(self, trials: Iterable[str] | None = None) -> None:
        """Write the results directory; of the trials only those named, by default all.

        Raises TfdistError where it cannot be written.
        """
        with one_line_errors(self._project):
            self._project.mkdir(exist_ok=True)
            if trials is None:
                self._remove_unknown()
            for name in self._oracle.trials if trials is None else trials:
                directory = self._project / f"trial_{name}"
                directory.mkdir(exist_ok=True)
                _write(directory / "trial.json", self._oracle.trials[name].get_state())
            _write(self._project / "oracle.json", self._oracle.get_state())
            _write(self._project / "tuner0.json", {})

    def _ask(self, asker: str) -> NextTrial:
        trial = self._oracle.create_trial(asker)
        if trial.status != RUNNING:
            return NextTrial(status=trial.status, asker=asker)
        values = dict(trial.hyperparameters.values)
        return NextTrial(status=RUNNING, asker=asker, trial=trial.trial_id, values=values)

    def _populate_space(self, trial_id: str) -> dict[str, Any]:
        """The oracle's own answer; in a replay, the recorded one where they differ."""
        if self._recorded is not None and not self._is_last and _fits_a_model(self._oracle):
            _draw_as_if_asked(self._oracle)
            return {"status": RUNNING, "values": dict(self._recorded["values"])}
        answer = dict(self._populate(trial_id))
        if answer.get("values"):
            answer["values"] = {k: _plain(v) for k, v in answer["values"].items()}
        if self._recorded is None:
            return answer
        recorded = {"status": self._recorded["status"], "values": self._recorded["values"]}
        if recorded["status"] == RUNNING and answer.get("values") != recorded["values"]:
            logger.warning("trial %s is kept as it was; KerasTuner chooses another now", trial_id)
        return recorded

    def _next_of_grid(self, populate: Callable[[str], Any], trial_id: str) -> dict[str, Any]:
        """Answer as GridSearch, which runs one at a time, would if it ran many.

        It waits for the end of its last trial, as that may ask for something new, before it looks
        for the next one. Here the space is known.
        """
        if self._recorded is not None and self._recorded["status"] != RUNNING:
            return {"status": self._recorded["status"], "values": None}
        answer = dict(populate(trial_id))
        if answer["status"] == RUNNING:
            self._oracle._populate_next.append(trial_id)
        return answer

    def _remove_unknown(self) -> None:
        """Remove trials that a killed chief had published and the journal does not know."""
        for directory in self._project.glob("trial_*"):
            if directory.name.removeprefix("trial_") not in self._oracle.trials:
                shutil.rmtree(directory)


def make_oracle(
    tuner: str,
    *,
    hyperparameters: Any,
    objective: str,
    direction: str,
    seed: int,
    max_trials: int | None,
    max_epochs: int,
    factor: int,
) -> Any:
    """Return KerasTuner's oracle of that name; `max_epochs` and `factor` are of hyperband."""
    common = {
        "objective": keras_tuner.Objective(objective, direction),
        "hyperparameters": hyperparameters.copy(),
        "seed": seed,
        # It would raise with its lock held; --max_failed_trials is ours.
        "max_consecutive_failed_trials": sys.maxsize,
    }
    if tuner == "hyperband":
        oracle = keras_tuner.oracles.HyperbandOracle(max_epochs=max_epochs, factor=factor, **common)
        oracle.max_trials = max_trials
        return oracle
    kinds = {
        "random": keras_tuner.oracles.RandomSearchOracle,
        "grid": keras_tuner.oracles.GridSearchOracle,
        "bayesian": keras_tuner.oracles.BayesianOptimizationOracle,
    }
    try:
        return kinds[tuner](max_trials=max_trials, **common)
    except ImportError as error:
        raise UsageError(
            "--tuner",
            received=f"{tuner} without scikit-learn and SciPy",
            expected="both installed: its model is theirs",
            fix="pip install 'tfdist[digits]', or use --tuner random",
            code="missing-package",
        ) from error


def _fits_a_model(oracle: Any) -> bool:
    """Return whether the oracle would now take seconds to answer, and always with a trial."""
    if not isinstance(oracle, keras_tuner.oracles.BayesianOptimizationOracle):
        return False
    completed = sum(trial.status == "COMPLETED" for trial in oracle.trials.values())
    least = oracle.num_initial_points or max(3 * len(oracle.hyperparameters.space), 3)
    return bool(completed >= least)


def _draw_as_if_asked(oracle: Any) -> None:
    """Takes the random numbers that an answer takes, and computes nothing.

    The model itself is fitted anew for each answer, so that all but the last leave nothing else
    behind. 50 is KerasTuner 1.4's `num_restarts`.
    """
    oracle._random_state.uniform(size=(50, len(oracle._get_hp_bounds())))


@functools.cache
def _has_direction(metric: str) -> bool:
    """Return whether KerasTuner can look for which way a metric is better.

    It makes the metric of Keras' that has this name, and fails where that needs arguments, as that
    of ``mean_io_u`` does (1.4.8).
    """
    try:
        infer_metric_direction(metric)
    except Exception:
        return False
    return True


def _not_yet(*_: object) -> None:
    """Stands for the oracle's own writing, which is not atomic."""


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as the number it is, so that it survives JSON."""
    return value.item() if hasattr(value, "item") else value


def _write(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content), durable=False)
