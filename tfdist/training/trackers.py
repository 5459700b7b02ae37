"""Experiment trackers: the callbacks of MLflow and W&B.

The package of a callback's class tells whether it is a tracker (`TRACKERS`). Trackers run in the
chief and log each epoch and the end of each step block. They do not shorten blocks. The checkpoint
holds the id of the tracker's run: a resumed training continues that run and logs no step twice. If
a tracker fails, tfdist logs one warning and stops calling it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
from keras.src.utils.python_utils import is_default

from tfdist.errors import TfdistError
from tfdist.files import write_json
from tfdist.outputs.run_directory import read_json

TRACKERS: Mapping[str, str] = {"mlflow": "MLflow", "wandb": "Weights & Biases"}
"""Packages with callbacks that are trackers, and the trackers' display names."""

_LOG = logging.getLogger(__name__)


def is_of_tracker(kind: type) -> bool:
    """Return whether a class is defined in the package of a tracker."""
    return kind.__module__.partition(".")[0] in TRACKERS


def package_of(callback: Any) -> str | None:
    """Return the tracker package that defines the callback's class or a base class, or `None`."""
    kinds = [kind for kind in type(callback).__mro__ if is_of_tracker(kind)]
    return kinds[0].__module__.partition(".")[0] if kinds else None


def wrapped(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a tracker's callback as a `Tracker`, and any other callback unchanged.

    A tracker's `ModelCheckpoint` stays unchanged, because it saves models and has its own state.
    """
    package = package_of(callback)
    if package is None or isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback
    return Tracker(callback, package=package)


class Tracker(keras.callbacks.Callback):
    """Wrapper of a tracker's callback, in the chief, called at the end of blocks.

    Attributes:
      inner: the tracker's callback.
      package: package name, a key of `TRACKERS`.
      step: number of steps done in the run.
    """

    once_a_range = True

    def __init__(self, inner: keras.callbacks.Callback, *, package: str) -> None:
        super().__init__()
        self.inner = inner
        self.package = package
        self.step = 0
        self._first_batch = 0
        self._epoch = 0
        self._is_broken = self._is_resumed = self._is_interrupted = False
        self._journal: Path | None = None
        self._logged = {"step": 0, "epoch": -1}

    @property
    def wants_block_logs(self) -> bool:
        """Return whether the tracker uses the logs at the end of a block."""
        if self.package == "wandb" and hasattr(self.inner, "logging_batch_wise"):
            return bool(self.inner.logging_batch_wise)
        if self.package == "mlflow" and hasattr(self.inner, "log_every_n_steps"):
            return self.inner.log_every_n_steps is not None
        hooks = ("on_batch_end", "on_train_batch_end")
        return any(not is_default(getattr(self.inner, hook)) for hook in hooks)

    def keep_journal(self, path: Path) -> None:
        """Write a journal of the logged steps and epochs to a file beside the checkpoints.

        It continues an existing journal of the same run, for a restart before any checkpoint.
        """
        self._journal = path
        self._logged.update(self._noted(self.get_state()["run"]))

    def resume_run(self, state: Mapping[str, Any]) -> None:
        """Continue the tracker's run that a checkpoint names. Call this before `on_train_begin`."""
        run = state.get("run") if isinstance(state, dict) else None
        if not isinstance(run, str) or state.get("package") != self.package:
            return
        if not re.fullmatch(r"[\w-]+", run):  # reject paths and addresses
            return
        with self._warning_of_failure(f"resume its run {run}"):
            _resume(self.package, run)
            self._logged.update(self._noted(run))
            if self.package == "mlflow":  # MLflow writes in a thread: ask it for its last step
                self._logged.update(_logged_in_mlflow(self.inner, run))
            self._is_resumed = True

    def get_state(self) -> dict[str, Any]:
        """Return the id of the tracker's run, for the checkpoint."""
        run = None
        with contextlib.suppress(Exception):  # a failed tracker has no run
            run = run_of(self.package)
        return {"package": self.package, "run": run}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing: `resume_run` has used the state already, before the first log."""

    def resumed_at(self, step: int) -> None:
        """Set the step counter to the first step of the resumed run."""
        self.step = step

    def interrupted(self) -> None:
        """Leave out the end of the current epoch: the next run repeats it."""
        self._is_interrupted = True

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._call("set_model", model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._call("set_params", params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the tracker, except in a resumed MLflow run, whose parameters are fixed."""
        if self.package == "mlflow":
            _watch_failures_of_mlflow(self.fail)
        if not (self.package == "mlflow" and self._is_resumed):
            self._call("on_train_begin", logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Stop the tracker after all its logs are written."""
        self._call("on_train_end", logs)
        if self.package == "mlflow" and not self._is_broken:
            with self._warning_of_failure("write"):
                sys.modules["mlflow"].flush_async_logging()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._call("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log an epoch unless the run already has it."""
        if epoch > self._logged["epoch"] and not self._is_interrupted:
            self._call("on_epoch_end", epoch, logs)
            self._note(epoch=epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._call("on_test_begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Log a validation unless the run already has its epoch."""
        if self._epoch > self._logged["epoch"] and not self._is_interrupted:
            self._call("on_test_end", logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        self._call("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log the end of a block unless the run already has that step."""
        before = self.step
        self.step += batch - self._first_batch + 1
        if self._is_broken or self.step <= self._logged["step"]:
            return
        if self.wants_block_logs:
            with self._warning_of_failure("write"):
                if self._log_block(max(before, self._logged["step"]), batch, logs):
                    self._note(step=self.step)

    def _log_block(self, before: int, batch: int, logs: Any) -> bool:
        """Log the end of a block if the block contains one of the tracker's logging steps.

        W&B's callback counts calls, and it logs batch number 0 at any logging rate.
        """
        inner, every = self.inner, _steps_between_logs(self.package, self.inner)
        if every is None:
            inner.on_train_batch_end(batch, logs)
        elif not crossed(before, self.step, every):
            return False
        elif self.package == "mlflow":
            inner.log_every_n_steps = 1
            try:
                inner.on_train_batch_end(batch, logs)
            finally:
                inner.log_every_n_steps = every
        else:  # log with the number of the block's last batch
            inner.global_step = inner.global_batch = self.step - 1
            inner.on_train_batch_end(0, logs)
        return True

    def _call(self, hook: str, *args: Any) -> None:
        if not self._is_broken:
            with self._warning_of_failure("write"):
                getattr(self.inner, hook)(*args)

    @contextlib.contextmanager
    def _warning_of_failure(self, doing: str) -> Iterator[None]:
        """Disable the tracker if it fails. The training continues with its other logs."""
        try:
            yield
        except Exception as error:
            self.fail(doing, error)

    def fail(self, doing: str, error: Exception) -> None:
        """Disable the tracker, and log a warning for the first failure only."""
        if not self._is_broken:
            self._is_broken = True
            warn(f"{TRACKERS[self.package]}: cannot {doing}", error)

    def _note(self, **done: int) -> None:
        self._logged.update(done)
        if self._journal is not None and not self._is_broken:
            with self._warning_of_failure("be noted beside the checkpoints"):
                write_json(self._journal, {**self.get_state(), **self._logged}, durable=False)

    def _noted(self, run: str | None) -> dict[str, int]:
        """Return the last step and epoch of a run in the journal."""
        noted = None
        if self._journal is not None:
            with contextlib.suppress(TfdistError):  # unreadable, for example after a power loss
                noted = read_json(self._journal)
        if run is None or noted is None or noted.get("run") != run:
            return {}
        return {n: noted[n] for n in ("step", "epoch") if isinstance(noted.get(n), int)}


def prepare_trackers(callbacks: Any, backups: Any, states: Mapping[str, Any]) -> None:
    """Start the trackers' journals beside the checkpoints, and resume the runs of `states`."""
    listed = [callback for callback in callbacks if isinstance(callback, Tracker)]
    for number, tracker in enumerate(listed if backups else ()):
        tracker.keep_journal(backups[0].store.directory / f"tracker-{number}.json")
        if (state := states.get(f"Tracker-{number}")) is not None:
            tracker.resume_run(state)


def warn(what: str, error: Exception) -> None:
    """Log one warning line that a tracker is disabled."""
    gist = (str(error).splitlines() or [""])[0]
    _LOG.warning("%s (%s: %s); the training continues without it", what, type(error).__name__, gist)


def crossed(before: int, after: int, every: int) -> bool:
    """Return whether the steps ``(before, after]`` contain a multiple of `every`."""
    return after // every > before // every


# Differences between trackers: how they count steps, and how their runs are named and resumed.


def _steps_between_logs(package: str, inner: Any) -> int | None:
    """Return the steps between logs of a tracker's callback, or `None` to log every block."""
    every = None
    if package == "mlflow":
        every = getattr(inner, "log_every_n_steps", None)
    elif package == "wandb" and hasattr(inner, "global_batch"):
        every = getattr(inner, "log_freq", None)
    return every if isinstance(every, int) and not isinstance(every, bool) else None


class _FailuresOfMlflow(logging.Filter):
    """Log filter that reports MLflow's logged failures: its callback and threads raise none."""

    def __init__(self, fail: Callable[[str, Exception], None]) -> None:
        super().__init__()
        self._fail = fail

    def filter(self, record: logging.LogRecord) -> bool:
        is_failure = record.levelno >= logging.WARNING
        if is_failure:
            self._fail("write", RuntimeError(record.getMessage()))
        return not is_failure


def _watch_failures_of_mlflow(fail: Callable[[str, Exception], None]) -> None:
    """Call `fail` for each failure that MLflow logs, instead of any earlier `fail`."""
    for name in ("async_logging.async_logging_queue", "autologging_utils"):
        logger = logging.getLogger(f"mlflow.utils.{name}")
        logger.filters[:] = [f for f in logger.filters if not isinstance(f, _FailuresOfMlflow)]
        logger.addFilter(_FailuresOfMlflow(fail))


def run_of(package: str) -> str | None:
    """Return the id of the tracker's current run, or `None`."""
    module: Any = sys.modules[package]
    if package == "mlflow":
        run = module.active_run()
        return None if run is None else str(run.info.run_id)
    return None if module.run is None else str(module.run.id)


def _resume(package: str, run: str) -> None:
    """Resume a run, instead of the run that the program has started."""
    if run_of(package) == run:
        return
    if package == "mlflow":
        _resume_in_mlflow(run)
        return
    wandb: Any = sys.modules[package]
    begun = wandb.run
    if begun is not None:
        known = {"project": begun.project, "entity": begun.entity or None}
        directory = begun.settings.root_dir
        wandb.finish()
        wandb.init(id=run, resume="allow", dir=directory, **known)


def _resume_in_mlflow(run: str) -> None:
    """Resume an MLflow run, and delete the run that the program has started instead."""
    mlflow: Any = sys.modules["mlflow"]
    begun = mlflow.active_run()
    client = mlflow.MlflowClient()
    client.get_run(run)  # fails here if the run is missing, before the other run is deleted
    if begun is not None:
        mlflow.end_run()
        client.delete_run(begun.info.run_id)
    mlflow.start_run(run_id=run)


def _logged_in_mlflow(inner: Any, run: str) -> dict[str, int]:
    client = sys.modules["mlflow"].MlflowClient()
    keys = [k for k in client.get_run(run).data.metrics if not k.startswith("system/")]
    steps = [m.step for k in keys for m in client.get_metric_history(run, k)]
    last = "epoch" if getattr(inner, "log_every_epoch", True) else "step"
    return {last: max(steps)} if steps else {}
