"""A run of `tfdist.train`, from a checked configuration to its summary, and its reporter."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist.app import recipe
from tfdist.checkpoint.backup import BackupAndRestore, save_whole
from tfdist.checkpoint.model_state import state_sha256, weights_sha256
from tfdist.cluster import TaskConfig, read_environment
from tfdist.cluster.settings import restarts
from tfdist.configs import FREE
from tfdist.errors import Stopped, TfdistError, UsageError
from tfdist.files import one_line_errors
from tfdist.outputs.run_directory import COUNTERS, DONE, Claim, RunDirectory
from tfdist.outputs.scalars import ScalarWriter
from tfdist.strategy import barrier, broadcast, current_job, is_chief, make_strategy
from tfdist.strategy.group import whole
from tfdist.training.engines import naming_a_lost_server
from tfdist.training.epochs import EpochPlan
from tfdist.training.evaluation import Evaluator
from tfdist.training.fitting import fit
from tfdist.training.metrics_file import MetricsFile
from tfdist.training.program import engine_class

logger = logging.getLogger(__name__)
STOPPED = "stopped"


def run(config: Any, *, overwrite: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Train the model of `config`. Every task of the job calls it.

    It does not return in worker and ps tasks of a ps job. The chief writes the run directory and
    prints the result.

    Returns:
      The summary in the chief, and an empty dict in other tasks.

    Raises:
      UsageError: The configuration does not fit the data, the cluster, or the run that owns the
        directory. It is raised before training starts.
      TfdistError: The loss became NaN, or the run directory cannot be written.
      Stopped: A task received a signal that requests a stop. The same command resumes the run.
    """
    task = read_environment(environ)
    directory = RunDirectory(_run_dir(config, task, now=datetime.now(UTC)))
    if overwrite and restarts(environ):
        logger.info("restarted: ignoring --overwrite and resuming the run")
        overwrite = False
    chief = task is None or not task.cluster.tasks() or task.task == task.cluster.chief_task
    claim, seed = None, 0
    if chief:
        seed = _seed(config, directory, overwrite=overwrite)
        claim = directory.claim({**config.to_dict(), "seed": seed}, overwrite, free=FREE)
    if claim is Claim.FINISHED and (task is None or not task.cluster.kind.has_collectives):
        return _show_finished(config, directory)
    is_evaluator = task is not None and task.task.type == "evaluator"
    if is_evaluator and not overwrite and (directory.read_summary() or {}).get("status") == DONE:
        return {}  # the run is finished, as the chief will find too
    try:
        return _run_as_task(config, directory, claim, seed=seed, environ=environ)
    except UsageError:
        if claim is Claim.NEW:
            directory.withdraw()  # so that the directory accepts the corrected configuration
        raise


@naming_a_lost_server()
def _run_as_task(
    config: Any,
    directory: RunDirectory,
    claim: Claim | None,
    *,
    seed: int,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Run in the strategy. The chief broadcasts `claim`, `seed` and the path of `directory`."""
    strategy = make_strategy(
        config.strategy, devices_per_worker=config.devices_per_worker or None, environ=environ
    )
    of_chief = [claim is Claim.FINISHED, seed, str(directory.path)]
    finished, seed, path = broadcast(of_chief)
    directory = RunDirectory(path)
    try:
        if finished:
            summary = _show_finished(config, directory) if is_chief() else {}
        else:
            summary = _train(config, strategy, directory, seed=seed)
    except Stopped:  # raised in all tasks at the same step
        barrier()
        raise
    # Peers fail if a task exits early, so all tasks wait until the chief has written the summary.
    barrier()
    return summary


def _train(config: Any, strategy: Any, directory: RunDirectory, *, seed: int) -> dict[str, Any]:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(seed)
    plan = recipe.plan_of(config)
    reporter = RunReporter(directory, plan, objective_file=config.objective_file)
    try:
        datasets = recipe.load_datasets(config)
        with strategy.scope():
            model = recipe.compiled_model(config, datasets, total_steps=plan.total_steps)
        done = _fit(config, model, datasets, directory, reporter, seed=seed)
    except Stopped:
        _write_summary(model, reporter, directory, plan, status=STOPPED)
        raise
    finally:
        reporter.close()
        keras.config.set_dtype_policy(policy)
    if is_chief() and config.save_model and done:
        save_whole(model, directory.model_file)
    status = DONE if done else STOPPED
    summary = _write_summary(model, reporter, directory, plan, status=status)
    if summary:
        _log_result(summary, directory)
    return summary


def _fit(
    config: Any,
    model: keras.Model,
    datasets: recipe.Datasets,
    directory: RunDirectory,
    reporter: RunReporter,
    *,
    seed: int,
) -> bool:
    """Train. Return whether the run finished, at its last step or by early stopping."""
    stopping = _stopping(config)
    callbacks = [
        *([stopping] if stopping else []),
        _backup(config, directory),
        keras.callbacks.TerminateOnNaN(),
        reporter,
    ]
    options = {
        "overfit_batches": config.overfit_batches,
        "initial_weights": config.initial_weights,
    }
    history = fit(
        model,
        datasets.training,
        batch_size=config.global_batch_size,
        verbose=1 if sys.stdout.isatty() else 2,  # a log gets a line for each virtual epoch
        callbacks=callbacks,
        validation_data=datasets.validation,
        virtual_epochs=recipe.virtual_epochs(config),
        seed=seed,
        max_staleness=config.max_staleness,
        **{name: value for name, value in options.items() if value},
    )
    losses = history.history.get("loss", [])
    if losses and not math.isfinite(losses[-1]):
        raise TfdistError(
            f"training: the loss is {losses[-1]} in virtual epoch {len(losses)}. "
            "Fix: lower learning_rate, or set clip_norm"
        )
    has_ended = stopping is not None and (
        stopping.has_stopped if isinstance(stopping, Evaluator) else stopping.stopped_epoch
    )
    return bool(not model.stop_training or has_ended)


def _stopping(config: Any) -> keras.callbacks.EarlyStopping | Evaluator | None:
    patience, job = config.early_stopping_patience, current_job()
    if job is not None and job.has_evaluator:
        return Evaluator("val_loss", patience=patience or None)
    return keras.callbacks.EarlyStopping("val_loss", patience=patience) if patience else None


def _backup(config: Any, directory: RunDirectory) -> keras.callbacks.Callback:
    job = current_job()
    is_validated = bool(config.validation_split) and (job is None or not job.has_evaluator)
    return BackupAndRestore(
        directory.checkpoints,
        best="val_loss" if is_validated else None,
        save_freq=config.backup_every_steps or "epoch",
        keep=2,
    )


def _write_summary(
    model: keras.Model,
    reporter: RunReporter,
    directory: RunDirectory,
    plan: EpochPlan,
    *,
    status: str,
) -> dict[str, Any]:
    """Write the summary in the chief and return it. Return {} in other tasks.

    A collective if the optimizer is sharded.
    """
    state_digest, job = state_sha256(model, read=whole), current_job()
    if not is_chief():
        return {}
    assert job is not None
    cluster = job.config.cluster if job.config else None
    workers = cluster.num_replica_tasks if cluster else 1
    # A run that was resumed after its last step does no step. Use the step of its last line.
    lines = directory.read_metrics()
    step = reporter.step if reporter.first_step is not None else lines[-1]["step"] if lines else 0
    summary = {
        "status": status,
        "ended_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "strategy": job.kind.name,
        "workers": workers,
        "ps": len(cluster.ps) if cluster else 0,
        "replicas": workers if job.kind.has_servers else job.num_replicas,
        "steps": step,
        "examples": plan.examples_before(step),
        "virtual_epochs": sum(end <= step for end in plan.step_starts[1:]),
        "metrics": {k: v for k, v in (lines[-1] if lines else {}).items() if k not in COUNTERS},
        "examples_per_second": reporter.examples_per_second,
        "weights_sha256": weights_sha256(model),
        "state_sha256": state_digest,
        "resumed_from_step": reporter.first_step or None,
        **engine_class(job).summary(model, job),
    }
    directory.write_summary(summary)
    return summary


def _show_finished(config: Any, directory: RunDirectory) -> dict[str, Any]:
    summary = directory.read_summary() or {}
    if config.objective_file:  # another pod has no file yet
        write_objectives(config.objective_file, directory.read_metrics(), mode="w")
    logger.info("the run in %s is finished (pass --overwrite to run it again)", directory.path)
    _log_result(summary, directory)
    return summary


def _log_result(summary: Mapping[str, Any], directory: RunDirectory) -> None:
    text = "%s at step %s; files in %s"
    logger.info(text, summary.get("status"), summary.get("steps"), directory.path)


def _run_dir(config: Any, task: TaskConfig | None, *, now: datetime) -> str:
    """Return the run directory of the configuration, of the launcher, or a new one in ``runs``.

    A random suffix separates runs that start in the same second.
    """
    given = task.options.run_dir if task else None
    name = f"{now:%Y%m%d-%H%M%S}-{config.dataset.replace('/', '-')}-{config.model}"
    return config.run_dir or given or f"runs/{name}-{secrets.token_hex(2)}"


def _seed(config: Any, directory: RunDirectory, *, overwrite: bool) -> int:
    if config.seed is not None:
        return int(config.seed)
    recorded = None if overwrite else directory.read_config()
    return int((recorded or {}).get("seed", random.SystemRandom().randrange(2**31)))


# Progress and metrics of a run.


def write_objectives(
    path: str | os.PathLike[str], lines: Sequence[Mapping[str, Any]], *, mode: str = "a"
) -> None:
    """Write the metrics of virtual epochs as ``time name=value``, for Katib's file collector.

    The collector's default pattern knows no exponents. The times increase, so that Katib finds the
    latest value.
    """
    now = datetime.now(UTC).replace(tzinfo=None)
    with one_line_errors(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode, encoding="utf-8") as file:
            for number, line in enumerate(lines):
                time_of_line = now + timedelta(microseconds=number)
                for name, value in line.items():
                    is_metric = name not in COUNTERS and isinstance(value, (int, float))
                    if is_metric and math.isfinite(value):
                        text = np.format_float_positional(value, trim="0")
                        file.write(f"{time_of_line.isoformat()}Z {name}={text}\n")


class RunReporter(MetricsFile):
    """Callback that writes `metrics.jsonl` and TensorBoard scalars. Only the chief calls it."""

    is_required = True

    def __init__(
        self,
        directory: RunDirectory,
        plan: EpochPlan,
        *,
        clock: Callable[[], float] = time.perf_counter,
        objective_file: str = "",
    ) -> None:
        super().__init__(directory, plan, clock=clock)
        self._objective_file = objective_file
        self.log_dir = str(directory.tensorboard)
        self._scalars = ScalarWriter(directory.tensorboard)

    def resumed_at(self, step: int) -> None:
        """Remove the lines that the resumed run repeats. Call it before the first step."""
        super().resumed_at(step)
        if self._objective_file:
            write_objectives(self._objective_file, self._directory.read_metrics(), mode="w")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.step != self._plan.step_starts[epoch + 1]:
            logger.info("stopped at step %d, inside virtual epoch %d", self.step, epoch + 1)
            return
        super().on_epoch_end(epoch, logs)
        if self._objective_file:
            write_objectives(self._objective_file, self._directory.read_metrics()[-1:])
        scalars = {n: v for n, v in (logs or {}).items() if isinstance(v, (int, float))}
        if rate := self.examples_per_second_of_epoch:
            scalars["examples_per_second"] = rate
        self._scalars.write(self.step, scalars)

    def on_train_end(self, logs: Any = None) -> None:
        self.close()

    def close(self) -> None:
        """Close the event file, also after an error."""
        self._scalars.close()
