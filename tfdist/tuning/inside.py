"""Trial of a KerasTuner tuner: the part that runs in each task of the trial's job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
from keras.callbacks import History
from keras_tuner.src.engine import trial as trial_module
from keras_tuner.src.engine import tuner_utils
from keras_tuner.src.engine.tuner_utils import SaveBestEpoch

from tfdist.checkpoint.backup import BackupAndRestore
from tfdist.checkpoint.model_state import weights_sha256
from tfdist.errors import TfdistError, UsageError, require
from tfdist.files import one_line_errors, replacing
from tfdist.outputs.run_directory import DONE, RunDirectory
from tfdist.strategy import barrier, current_job, is_chief, job_of, make_strategy
from tfdist.strategy.job import remember
from tfdist.training.fitting import fit
from tfdist.training.run_settings import SETTINGS, Run, fits_by, run_of
from tfdist.tuning.oracle import PROJECT, of_epochs, own_fit, record_asked, unreported
from tfdist.tuning.trial_job import Assignment


def run_assigned(
    tuner: Any, assignment: Assignment, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the trial with `tuner.run_trial`. The chief writes the result.

    All tasks of a job must call this function. Raises UsageError if the objective is unreported.
    """
    _use_sweep_directory(tuner, assignment)
    keras.utils.set_random_seed(assignment.seed)
    trial = _assigned_trial(tuner, assignment)
    hp = trial.hyperparameters
    asked = record_asked(hp)
    fitting = _TrialFit(
        assignment,
        directory=RunDirectory(assignment.run_dir),
        objective=of_epochs(tuner),
    )

    def require_known() -> None:
        if tuner.oracle.tune_new_entries:
            _require_known(hp, assignment)

    def fit_trial(*args: Any, **kwargs: Any) -> Any:
        require_known()  # before the training, to fail early
        return fitting(*args, **kwargs)

    if own_fit(tuner) is None:  # Keras' fit does not accept the settings of `Run`
        settings = {name: kwargs[name] for name in SETTINGS if name in kwargs}
        callbacks = keras.tree.flatten(kwargs.get("callbacks") or [])
        if settings or not any(isinstance(callback, Run) for callback in callbacks):
            callbacks.append(Run(**settings))  # also without settings: it needs the engine
        kwargs = {**kwargs, "callbacks": callbacks}
        kwargs = {name: value for name, value in kwargs.items() if name not in SETTINGS}
    with fits_by(fit_trial):
        results = tuner.run_trial(trial, *args, **kwargs)
    require_known()
    if is_chief():
        fitting.directory.path.mkdir(parents=True, exist_ok=True)
        has_reported = fitting.has_reported(results, tuner.oracle.objective.name)
        result: dict[str, Any] = {} if has_reported else {"result": _result(tuner, results)}
        result["hyperparameters"] = asked
        fitting.directory.write_summary({"status": DONE, **result, **fitting.summary()})
    barrier()  # a task that exits early would make its peers fail


def _use_sweep_directory(tuner: Any, assignment: Assignment) -> None:
    """Make the tuner write to the sweep's directory, and disable the oracle's own files."""
    tuner.directory, tuner.project_name = assignment.sweep_dir, PROJECT
    tuner.oracle._set_project_dir(tuner.directory, tuner.project_name)
    tuner.oracle.save = tuner.oracle._save_trial = lambda *_: None
    tuner.oracle.verbose = 0
    if getattr(tuner, "distribution_strategy", None) is None:
        tuner.distribution_strategy = make_strategy()
    elif current_job() is None:  # the program made the strategy itself
        remember(job_of(tuner.distribution_strategy))


def _assigned_trial(tuner: Any, assignment: Assignment) -> Any:
    hp = tuner.oracle.get_space()
    hp.values = dict(assignment.values)
    trial = trial_module.Trial(hyperparameters=hp, trial_id=assignment.trial, status="RUNNING")
    tuner.oracle.trials[trial.trial_id] = trial
    if is_chief():
        Path(tuner.get_trial_dir(trial.trial_id)).mkdir(parents=True, exist_ok=True)
    return trial


class _TrialFit:
    """Callable that runs `tfdist.fit` with the trial's checkpoints, seed and metric lines.

    Each call is one execution of the trial. Each execution has separate checkpoints.
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
        callbacks, run = run_of(kwargs.pop("callbacks", None), {})
        _require_no_backup(callbacks)
        callbacks = [SaveBest(c) if type(c) is SaveBestEpoch else c for c in callbacks]
        if run.seed is None:
            run = dataclasses.replace(run, seed=self._assignment.seed + self.executions)
        lines = _MetricLines(
            self.directory,
            epochs_before=self._epochs,
            steps_before=self._steps,
            objective=self._objective if kwargs.get("validation_freq", 1) == 1 else None,
        )
        backup = BackupAndRestore(
            self._checkpoints(), self._assignment.backup_every_steps or "epoch"
        )
        own_epochs = _OwnEpochs(self._assignment.trial)
        options = {
            "verbose": 2,
            **kwargs,
            "callbacks": [run, own_epochs, *callbacks, lines, backup],
        }
        history = fit(model, *args, **options)
        self.executions += 1
        self._epochs += history.epoch[-1] + 1 if history.epoch else 0
        self._steps += _steps_of(model)
        self.model, self._resumed_from = model, lines.resumed_from
        return history

    def summary(self) -> dict[str, Any]:
        if self.model is None:
            return {}
        job = current_job()
        return {
            "strategy": job.kind.name if job else "single",
            "steps": self._steps,
            "virtual_epochs": self._epochs,
            "weights_sha256": weights_sha256(self.model),
            "resumed_from_step": self._resumed_from,
        }

    def has_reported(self, results: Any, objective: str) -> bool:
        """Return whether a single fit reported the result and the metric lines have its epochs.

        If this trial continues a trial that early stopping had ended, there are no lines.
        """
        is_one = isinstance(results, list) and [isinstance(r, History) for r in results] == [True]
        is_there = is_one and objective in results[0].history
        return is_there and self.executions == 1 and bool(self.directory.read_metrics())

    def _checkpoints(self) -> Path:
        name = f"-{self.executions}" if self.executions else ""
        return Path(f"{self._assignment.checkpoints}{name}")


class _OwnEpochs(keras.callbacks.Callback):
    """Callback that removes an earlier trial's epochs from the History if this trial continues it.

    If early stopping ended the earlier trial, this trial has no epochs, and the History keeps the
    earlier trial's epochs. This callback must run before a History in the user's callbacks.
    """

    def __init__(self, trial: str) -> None:
        super().__init__()
        self._trial = self._trial_of_history = trial

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._trial_of_history != self._trial:
            self.model.history.epoch.clear()
            self.model.history.history.clear()
            self._trial_of_history = self._trial

    def get_state(self) -> Any:
        return {"trial": self._trial_of_history}

    def set_state(self, state: Any) -> None:
        if isinstance(state, dict):
            self._trial_of_history = state.get("trial", self._trial)


class _MetricLines(keras.callbacks.Callback):
    """Callback that writes a line to `metrics.jsonl` for each epoch. The sweep reads these lines.

    It raises an error if the loss is not finite or if `objective` is missing from the metrics.
    """

    writes_metrics = True

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
                f"training: the loss is {loss} in epoch {epoch + 1}. "
                "Fix: exclude these hyperparameters from the search space, or set clipnorm"
            )
        if self._objective is not None and self._objective not in logs:
            raise unreported(self._objective, sorted(logs))

    def _write(self, epoch: int, logs: Mapping[str, Any]) -> None:
        step = self._steps_before + _steps_of(self.model)
        virtual_epoch = self._epochs_before + epoch + 1
        if not self._has_written:  # drop lines of an earlier attempt that ran further
            self._directory.drop_metrics_from(virtual_epoch)
        self._has_written = True
        self._directory.append_metrics({"step": step, "virtual_epoch": virtual_epoch, **logs})


def _steps_of(model: keras.Model) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def _result(tuner: Any, results: Any) -> dict[str, Any]:
    objective = tuner.oracle.objective
    tuner_utils.validate_trial_results(results, objective, "Tuner.run_trial()")
    first = results[0] if isinstance(results, list) else results
    try:
        metrics = tuner_utils.convert_to_metrics_dict(results, objective)
        step = tuner_utils.get_best_step(results, objective)
    except KeyError as error:
        raise unreported(objective.name, sorted(first.history)) from error
    before = first.epoch[0] if isinstance(first, History) and first.epoch else 0
    return {"virtual_epoch": before + step + 1, **{n: float(v) for n, v in metrics.items()}}


def _require_known(hp: Any, assignment: Assignment) -> None:
    """Raise UsageError if the program reads a hyperparameter that the sweep does not know."""
    new = [one.name for one in hp.space if hp.is_active(one) and one.name not in assignment.values]
    if new:
        raise UsageError(
            "search space",
            f"hyperparameter {new[0]!r} was unknown before the first trial",
            fix="read it in every call of build(hp), or under hp.conditional_scope()",
            code="search-space",
        )


def _require_no_backup(callbacks: list[Any]) -> None:
    require(
        not any(isinstance(callback, BackupAndRestore) for callback in callbacks),
        "callbacks",
        "all trials would share the directory of this BackupAndRestore",
        fix="leave it out (each trial has backups), and pass backup_every_steps to search",
        code="shared-directory",
    )


# Replacement for a callback of KerasTuner that does not support resumed runs.


class SaveBest(keras.callbacks.Callback):
    """Callback that saves the best epoch's weights in the chief. It supports resumed runs.

    A trial that continues another trial has its own best epoch. If early stopping had already
    ended the other trial, this trial has no epochs and copies the best weights of that trial.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._original = original
        self._file = Path(original.filepath)
        self._before: Path | None = None
        """Best weights of the continued trial, unless this trial resumed its own checkpoint."""
        self._has_saved = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        original, value = self._original, None
        if original.objective.has_value(logs):
            value = original.objective.get_value(logs)
            if not original.objective.better_than(value, original.best_value):
                return
            original.best_value = value
        elif math.isfinite(original.best_value):  # the objective is missing in some epochs
            return
        if is_chief():
            with one_line_errors(self._file), replacing(self._file) as unfinished:
                self.model.save_weights(str(unfinished))
            if not self._has_saved:  # KerasTuner writes this file only after the training
                shapes = self._file.with_name("build_config.json")
                shapes.write_text(json.dumps(self.model.get_build_config()), encoding="utf-8")
        self._has_saved = True

    def on_train_end(self, logs: Any = None) -> None:
        has_best = self._has_saved or math.isfinite(self._original.best_value)
        if self._before is not None and not has_best and is_chief():
            shutil.copyfile(self._before, self._file)

    def get_state(self) -> Any:
        best = repr(float(self._original.best_value))  # JSON has no infinity
        return {"trial": self._file.parent.name, "best": best}

    def set_state(self, state: Any) -> None:
        state = state if isinstance(state, dict) else {}
        trial, best = (str(state.get(key, "")) for key in ("trial", "best"))
        if trial == self._file.parent.name:
            with contextlib.suppress(ValueError):
                self._original.best_value = float(best)
        elif re.fullmatch(r"[\w.-]*\w", trial):  # only a directory beside this trial's directory
            self._before = self._file.parents[1] / trial / self._file.name
