"""Running one trial of a KerasTuner tuner, in each task of the trial's job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
from keras.callbacks import History
from keras_tuner.src.engine import trial as trial_module
from keras_tuner.src.engine import tuner_utils

from tfdist.checkpoint import BackupAndRestore
from tfdist.checkpoint.model_checkpoint import save_whole
from tfdist.errors import TfdistError, UsageError
from tfdist.outputs.digest import weights_sha256
from tfdist.outputs.run_directory import DONE, RunDirectory
from tfdist.strategy import barrier, current_job, is_chief, make_strategy
from tfdist.training import fit
from tfdist.tuning.assignment import Assignment
from tfdist.tuning.hypermodel import HyperModel
from tfdist.tuning.oracle import PROJECT
from tfdist.tuning.own_tuner import of_epochs, unreported


def run_assigned(
    tuner: Any, assignment: Assignment, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Runs the trial with `tuner.run_trial`, and has the chief write down its result.

    A collective. Raises UsageError where the model does not report the objective.
    """
    _settle(tuner, assignment)
    keras.utils.set_random_seed(assignment.seed)
    trial = _trial(tuner, assignment)
    hp = trial.hyperparameters
    fitting = _TrialFit(
        assignment,
        directory=RunDirectory(assignment.run_dir),
        objective=of_epochs(tuner),
    )

    def require_known() -> None:
        if tuner.oracle.tune_new_entries:
            _require_known(hp, assignment)

    def route(*args: Any, **kwargs: Any) -> Any:
        require_known()  # before the training, not after it
        return fitting(*args, **kwargs)

    if tuner.hypermodel is not None:  # else `run_trial` does without
        tuner.hypermodel = HyperModel(tuner.hypermodel, fit=route)
    results = tuner.run_trial(trial, *args, **kwargs)
    require_known()
    if is_chief():
        fitting.directory.path.mkdir(parents=True, exist_ok=True)
        objective = tuner.oracle.objective.name
        if trial.metrics.exists(objective):  # the tuner itself has told it to its oracle
            told = {"result": _result_told(trial.metrics, objective)}
        elif fitting.has_told(results, objective):
            told = {}
        else:
            told = {"result": _result(tuner, results)}
        if assignment.save_model and fitting.model is not None:
            save_whole(fitting.model, fitting.directory.model_file)
        fitting.directory.write_summary({"status": DONE, **told, **fitting.summary()})
    barrier()  # a task that ends early would take its peers down


def _settle(tuner: Any, assignment: Assignment) -> None:
    """Has the tuner write where all trials of the sweep do, and nothing of the oracle's."""
    tuner.directory, tuner.project_name = assignment.sweep_dir, PROJECT
    tuner.oracle._set_project_dir(tuner.directory, tuner.project_name)
    tuner.oracle.save = tuner.oracle._save_trial = lambda *_: None
    tuner.oracle.verbose = 0
    if getattr(tuner, "distribution_strategy", None) is None:
        tuner.distribution_strategy = make_strategy()


def _trial(tuner: Any, assignment: Assignment) -> Any:
    hp = tuner.oracle.get_space()
    hp.values = dict(assignment.values)
    trial = trial_module.Trial(hyperparameters=hp, trial_id=assignment.trial, status="RUNNING")
    tuner.oracle.trials[trial.trial_id] = trial
    if is_chief():
        Path(tuner.get_trial_dir(trial.trial_id)).mkdir(parents=True, exist_ok=True)
    return trial


class _TrialFit:
    """`tfdist.fit` with the trial's checkpoints, seed and lines of metrics.

    Each call is one execution of the trial, with checkpoints of its own.
    """

    def __init__(
        self, assignment: Assignment, *, directory: RunDirectory, objective: str | None
    ) -> None:
        self._assignment = assignment
        self._objective = objective
        self.executions = self._epochs = self._steps = 0
        self.model: keras.Model | None = None
        self._resumed_from: int | None = None
        self.directory = directory

    def __call__(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        callbacks = list(keras.tree.flatten(kwargs.pop("callbacks", None) or []))
        _require_no_backup(callbacks)
        lines = _MetricLines(
            self.directory,
            epochs_before=self._epochs,
            steps_before=self._steps,
            objective=self._objective if kwargs.get("validation_freq", 1) == 1 else None,
        )
        backup = BackupAndRestore(
            self._checkpoints(), every_steps=self._assignment.backup_every_steps
        )
        options = {"seed": self._assignment.seed + self.executions, "verbose": 2, **kwargs}
        options["callbacks"] = [*callbacks, lines, backup]
        history = fit(model, *args, **options)
        self.executions += 1
        self._epochs += len(history.epoch)
        self._steps += _steps_of(model)
        self.model, self._resumed_from = model, lines.resumed_from
        return history

    def summary(self) -> dict[str, Any]:
        """Returns what there is to say of the last model that was fitted."""
        if self.model is None:
            return {}
        job = current_job()
        return {
            "strategy": job.kind if job else "single",
            "steps": self._steps,
            "virtual_epochs": self._epochs,
            "weights_sha256": weights_sha256(self.model),
            "resumed_from_step": self._resumed_from,
        }

    def has_told(self, results: Any, objective: str) -> bool:
        """Returns whether the result is the best of the epochs of one fit, whose lines are there.

        There are none where the trial that this one continues had been stopped for good.
        """
        is_one = isinstance(results, list) and [type(one) for one in results] == [History]
        is_there = is_one and objective in results[0].history
        return is_there and self.executions == 1 and bool(self.directory.read_metrics())

    def _checkpoints(self) -> Path:
        name = f"-{self.executions}" if self.executions else ""
        return Path(f"{self._assignment.checkpoints}{name}")


class _MetricLines(keras.callbacks.Callback):
    """Writes a line to `metrics.jsonl` for each epoch, which the sweep shows and judges by.

    Ends a trial that is no use any more: its loss is not finite, or `objective` is not reported.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        epochs_before: int,
        steps_before: int,
        objective: str | None,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._objective = objective
        self._epochs_before, self._steps_before = epochs_before, steps_before
        self._has_written = False
        self.resumed_from: int | None = None

    def resumed_at(self, step: int) -> None:
        self.resumed_from = step

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = logs or {}
        if is_chief():
            self._write(epoch, logs)
        if not math.isfinite(loss := float(logs.get("loss", 0.0))):
            raise TfdistError(
                f"training: the loss became {loss} in epoch {epoch + 1}. "
                "Fix: leave such values out of the search space, or set clipnorm"
            )
        if self._objective is not None and self._objective not in logs:
            raise unreported(self._objective, sorted(logs))

    def _write(self, epoch: int, logs: Mapping[str, Any]) -> None:
        step = self._steps_before + _steps_of(self.model)
        virtual_epoch = self._epochs_before + epoch + 1
        if not self._has_written:  # those of an attempt that went further
            self._directory.drop_metrics_from(virtual_epoch)
        self._has_written = True
        self._directory.append_metrics({"step": step, "virtual_epoch": virtual_epoch, **logs})


def _steps_of(model: keras.Model) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def _result(tuner: Any, results: Any) -> dict[str, Any]:
    objective = tuner.oracle.objective
    tuner_utils.validate_trial_results(results, objective, "Tuner.run_trial()")
    try:
        metrics = tuner_utils.convert_to_metrics_dict(results, objective)
        step = tuner_utils.get_best_step(results, objective)
    except KeyError as error:
        raise unreported(objective.name, _reported(results)) from error
    return {"virtual_epoch": step + 1, **{name: float(value) for name, value in metrics.items()}}


def _result_told(tracker: Any, objective: str) -> dict[str, Any]:
    """Returns the result of a trial that has called ``oracle.update_trial``, as older tuners do."""
    best = {name: tracker.get_best_value(name) for name in tracker.metrics}
    return {"virtual_epoch": (tracker.get_best_step(objective) or 0) + 1, **best}


def _reported(results: Any) -> list[str]:
    first = results[0] if isinstance(results, list) else results
    return sorted(first.history if isinstance(first, History) else first)


def _require_known(hp: Any, assignment: Assignment) -> None:
    """Raises UsageError where the program has asked for a value that the sweep has not chosen."""
    new = [one.name for one in hp.space if hp.is_active(one) and one.name not in assignment.values]
    if new:
        raise UsageError(
            "search space",
            received=f"hyperparameter {new[0]!r}, first asked for in this trial",
            expected="a space that is known before the first trial",
            fix="ask for it in build(hp) under hp.conditional_scope(), or whatever the values are",
        )


def _require_no_backup(callbacks: list[Any]) -> None:
    if any(isinstance(callback, BackupAndRestore) for callback in callbacks):
        raise UsageError(
            "callbacks",
            received="a BackupAndRestore, with one directory for all trials",
            expected="none: each trial has its own",
            fix="leave it out; search(..., backup_every_steps=100) says how often",
        )
