"""`evaluate` and `predict`, which use each example exactly once, and the evaluator task.

The evaluator task runs beside the training and evaluates its checkpoints. It joins no collective.
It reads the chief's checkpoints and requests a stop of the training through a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
from keras.src.utils.python_utils import pythonify_logs

from tfdist import phases
from tfdist.checkpoint.backup import BackupAndRestore, best_so_far, less_is_better, save_whole
from tfdist.checkpoint.store import Checkpoint
from tfdist.checkpoint.warm_start import set_weights
from tfdist.data.python_indexed import PyDatasetSource
from tfdist.errors import EXIT_OK, Stopped, require, require_int
from tfdist.outputs.run_directory import Evaluations
from tfdist.outputs.scalars import ScalarWriter
from tfdist.strategy import Job, broadcast
from tfdist.strategy.rendezvous import chief_watch
from tfdist.training import building
from tfdist.training.blocks import BlockRunner, Decision, any_task, decide, naming_bad_data
from tfdist.training.callbacks import callback_list, count_test_steps, wants_every_batch
from tfdist.training.engines import joined
from tfdist.training.inputs import Length, prepare
from tfdist.training.program import Engine, engine_class, program_of
from tfdist.training.run_settings import by_own_method
from tfdist.training.stop_requests import StopRequested, StopRequests
from tfdist.training.task_agreement import require_same_weights

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5


@by_own_method
def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
) -> Any:
    """Evaluate a compiled model under every strategy, like `keras.Model.evaluate`.

    This is a collective: every training task must call it with the same arguments. All tasks get
    the same metrics, as a list or a dict. Each example counts exactly once. `batch_size` is the
    global batch (default: 32). Raises UsageError if the model is not compiled, or of another scope,
    or if the strategy cannot use the data.
    """
    job = building.job_for(model, doing="evaluate")
    building.require_compiled(model, doing="evaluate")
    engine, data = engine_class(job)(job), (x, y, sample_weight)
    evaluation = Evaluation(model, job, engine, data, batch_size=batch_size, steps=steps)
    if job.stages is None:  # the stages of a pipeline get the chief's weights
        require_same_weights(job, model)
    listed = callback_list(
        callbacks, job=job, model=model, verbose=verbose, epochs=1, steps=evaluation.steps
    )
    with contextlib.closing(evaluation.feed):
        logs = pythonify_logs(evaluation.run(listed))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


@by_own_method
def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Return the model's outputs for each example of `x`, in order and once each.

    Works like `keras.Model.predict`, under every strategy. This is a collective: every training
    task must call it with the same arguments. All tasks get the full arrays ``[examples, ...]``.
    `batch_size` is the global batch (default: 32). Raises UsageError if the model is of another
    scope, or if the strategy cannot use the data.
    """
    job = building.job_for(model, doing="predict")
    length = _length(batch_size=batch_size, steps=steps)
    feed = prepare(x, None, None, job=job, length=length, shuffle=False, seed=0, model=model)
    building.build_to_predict(model, job, feed)
    if job.stages is None:  # the stages of a pipeline get the chief's weights
        require_same_weights(job, model)
    # Layers that draw random numbers in `predict` draw again in each call, as in Keras.
    seed = int(broadcast(random.randrange(2**31)))
    program = program_of(model, job, "predict_step", feed, seed=seed)
    total = feed.plan.total_steps
    listed = callback_list(callbacks, job=job, model=model, verbose=verbose, epochs=1, steps=total)
    model.stop_predicting = False
    listed.on_predict_begin()
    by_batch = _goes_by_batch(job, listed, mode="predict", stop=model.stop_predicting)
    every = model.steps_per_execution if by_batch else 1
    batches: list[Any] = []
    computed = engine_class(job)(job).outputs(program, 0, total)
    with contextlib.closing(feed):
        while len(batches) < total:
            step = len(batches)
            if by_batch and step and any_task(job, model.stop_predicting, of="requests to stop"):
                break
            if step % every == 0:
                listed.on_predict_batch_begin(step)
            with naming_bad_data(feed):
                batches.append(next(computed))
            if len(batches) % every == 0 or len(batches) == total:
                first = step // every * every
                outputs = _joined(batches[first:])
                listed.on_predict_batch_end(first + every - 1, {"outputs": outputs})
        feed.end_pass(len(batches))
    listed.on_predict_end()
    return _joined(batches)


def _joined(batches: Sequence[Any]) -> Any:
    return keras.tree.map_structure(lambda *parts: joined(parts), *batches)


def _length(*, batch_size: int | None, steps: int | None) -> Length:
    most = keras.config.max_steps_per_epoch()
    return Length(batch_size=batch_size, steps_per_epoch=steps, once=True, most_steps=most)


def _goes_by_batch(job: Job, callbacks: Any, *, mode: str, stop: bool) -> bool:
    """Return True in every task if some task stops or has a callback for each batch."""
    by_batch = any(wants_every_batch(c, mode=mode) for c in callbacks.callbacks)
    return any_task(job, by_batch or stop, of="callbacks that need every batch")


class Evaluation:
    """Data set and the traced program that evaluates the model on it, for repeated runs."""

    def __init__(
        self,
        model: keras.Model,
        job: Job,
        engine: Engine,
        data: tuple[Any, Any, Any],
        *,
        batch_size: int | None,
        steps: int | None,
    ) -> None:
        length = _length(batch_size=batch_size, steps=steps)
        self.feed = prepare(*data, job=job, length=length, shuffle=False, seed=0, model=model)
        building.build(model, job, self.feed, slots="none")  # `fit` creates slots, maybe in shards
        program = program_of(model, job, "test_step", self.feed, seed=0)
        self.steps = self.feed.plan.total_steps
        self._blocks = BlockRunner(model, job, engine, program, phase="validate")

    def run(self, callbacks: Any, *, requests: StopRequests | None = None) -> dict[str, Any]:
        """Evaluate every example once and return the metrics. A collective.

        Raises:
          StopRequested: some task received a stop signal. Raised only if `requests` is given.
        """
        blocks, model = self._blocks, self._blocks.model
        blocks.reset_metrics()
        model.stop_evaluating = False
        with phases.entered("validate"):
            with phases.entered("callback"):
                if isinstance(self.feed.source, PyDatasetSource):
                    self.feed.source.on_epoch_end()  # as Keras does before each evaluation
                callbacks.on_test_begin()
            by_batch = _goes_by_batch(
                blocks.job, callbacks, mode="test", stop=model.stop_evaluating
            )
            every = model.steps_per_execution if by_batch else 1
            blocks.logs = {}
            first = 0
            while first < self.steps:
                longest = every - first % every if by_batch else self.steps
                decision = self._decide(first, longest, by_batch=by_batch, requests=requests)
                if decision.stop:
                    break
                last = decision.last
                count_test_steps(callbacks.callbacks, last - first + (first % every > 0))
                if first % every == 0:
                    with phases.entered("callback"):
                        callbacks.on_test_batch_begin(first)
                blocks.run(first, last, looked_at=by_batch or last == self.steps)
                if last % every == 0 or last == self.steps:
                    seen = blocks.metrics(blocks.logs) if by_batch else {}
                    with phases.entered("callback"):
                        callbacks.on_test_batch_end(-(-last // every) * every - 1, seen)
                first = last
            result = blocks.metrics(blocks.logs)
            with phases.entered("callback"):
                self.feed.end_pass(first)
                callbacks.on_test_end(result)
        return result

    def _decide(
        self, first: int, longest: int, *, by_batch: bool, requests: StopRequests | None
    ) -> Decision:
        """Return the end of the next block, and whether a callback stopped the evaluation."""
        blocks = self._blocks
        mine = Decision(
            last=min(self.steps, first + min(longest, blocks.length.steps())),
            stop=by_batch and first > 0 and blocks.model.stop_evaluating,
        )
        of = "the next block of an evaluation"
        decision = decide(blocks.job, lambda: mine, requests=requests, of=of)
        if decision.signum is not None:
            blocks.finish()
            raise StopRequested(decision.signum)
        return decision


# The evaluator task: its settings, and its part of `fit`.


class Evaluator(keras.callbacks.Callback):
    """Settings of the evaluator task. Pass it among the callbacks of `fit` in every task.

    In the training tasks it stops the training when the evaluator requests a stop.

    Args:
      monitor: metric that selects the best checkpoint (default: "val_loss").
      mode: "min", "max", or "auto" to choose by the metric's name (default: "auto").
      patience: number of consecutive checkpoints without improvement after which the evaluator
        requests a stop (default: `None`, never).
      min_delta: smallest change that counts as an improvement (default: 0.0).
    """

    once_a_range = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: str = "auto",
        patience: int | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__()
        if patience is not None:
            require_int("Evaluator: patience", patience, least=1)
        self.monitor = monitor
        self.less = less_is_better(monitor, mode, where="Evaluator: mode")
        self.patience = patience
        self.min_delta = min_delta
        self.has_stopped = False
        self.files: Evaluations | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._look()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._look()

    def on_train_end(self, logs: Any = None) -> None:
        # If a request arrives between the hooks of two tasks, only one task has seen it.
        if self.files is not None and self.model.stop_training:
            self.has_stopped |= self.files.is_stop_requested

    def _look(self) -> None:
        if self.files is not None and not self.has_stopped and self.files.is_stop_requested:
            self.has_stopped = self.model.stop_training = True
            _LOG.info("the evaluator requested a stop (%s)", self.files.stop_file)


def evaluator_of(
    callbacks: Any, *, job: Job, validation_data: Any, is_dev_run: bool = False
) -> Evaluator | None:
    """Return the evaluator's settings, or `None` in a job without an evaluator.

    Raises:
      UsageError: validation data or a backup is missing.
    """
    listed = [c for c in keras.tree.flatten(callbacks or []) if c is not None]
    given = next((c for c in listed if isinstance(c, Evaluator)), None)
    if not job.has_evaluator:
        if given is not None:
            _LOG.warning("this job has no evaluator: start it with --evaluator")
        return None
    if is_dev_run:  # it has no checkpoints, and the training tasks validate
        if job.is_evaluator:
            raise SystemExit(EXIT_OK)
        return None
    evaluator = given or Evaluator()
    require(
        validation_data is not None and _backups(listed),
        "fit",
        "a job with an evaluator needs validation_data, and tfdist.BackupAndRestore, which saves "
        "its checkpoints",
        fix="pass both, or start the job without --evaluator",
        code="missing-backup",
    )
    evaluator.files = Evaluations(_backups(listed)[0].store.directory)
    return evaluator


def evaluate_checkpoints(
    model: keras.Model,
    evaluation_in: Callable[[Job], Evaluation],
    *,
    job: Job,
    callbacks: Any,
    evaluator: Evaluator,
) -> NoReturn:
    """Evaluate checkpoints until the training ends, then exit: `fit` in the evaluator task.

    `evaluation_in` creates the evaluation, for a job with only this task. The exit code is 0 if
    the run has a checkpoint or its chief exited, and 75 if no chief started.

    Raises:
      Stopped: the evaluator received a stop signal.
    """
    assert job.config is not None
    assert evaluator.files is not None
    watch = chief_watch(job.config, timeout_s=job.config.options.startup_timeout_s)
    alone = dataclasses.replace(job, config=None)  # this task evaluates without the other tasks
    evaluation = evaluation_in(alone)
    quiet = callback_list(None, job=alone, model=model, verbose=0, epochs=1, steps=evaluation.steps)
    listed = keras.tree.flatten(callbacks or [])
    store, unread = _backups(listed)[0].store, set[str]()
    folders = [c.log_dir for c in listed if getattr(c, "log_dir", None)]
    scalars = [ScalarWriter(f"{folder}/evaluator") for folder in folders]

    def line_of(name: str, checkpoint: Checkpoint, requests: StopRequests) -> dict[str, Any]:
        start_s = time.perf_counter()
        set_weights(model, checkpoint, where=f"weights in {store.directory}")
        metrics = evaluation.run(quiet, requests=requests)
        values = {f"val_{key}": value for key, value in metrics.items()}
        for writer in scalars:
            numbers = {n: v for n, v in values.items() if isinstance(v, (int, float))}
            writer.write(checkpoint.step, numbers)
        return {
            "step": checkpoint.step,
            "examples": checkpoint.meta["examples"],
            "checkpoint": name,
            **values,
            "seconds": time.perf_counter() - start_s,
        }

    phases.enter("serve")
    with StopRequests() as requests:
        try:
            while True:
                is_over = watch.done()  # first: `newest_name` then returns the last name
                name = store.newest_name()
                # Read the file: an earlier process of this task may have evaluated it already.
                done = {line.get("checkpoint") for line in evaluator.files.lines()} | unread
                if name is not None and name not in done:
                    checkpoint = store.read_named(name)
                    if checkpoint is None:  # the chief has deleted it and written newer checkpoints
                        unread.add(name)
                    else:
                        _record(line_of(name, checkpoint, requests), model, evaluator)
                elif is_over:
                    break
                elif requests.signum is not None:
                    raise StopRequested(requests.signum)
                else:
                    time.sleep(_LOOK_EVERY_S)
        except StopRequested as request:
            message = f"evaluator: stopped by signal {request.signum}"
            raise Stopped(request.signum, message) from None
    raise SystemExit(EXIT_OK if store.newest_name() is not None else watch.result())


def _record(line: dict[str, Any], model: keras.Model, evaluator: Evaluator) -> None:
    """Record a checkpoint's metrics, save the best model, and request a stop if needed."""
    files = evaluator.files
    assert files is not None
    lines = files.with_line(line)
    best, since = best_so_far(
        lines, monitor=evaluator.monitor, less=evaluator.less, min_delta=evaluator.min_delta
    )
    is_best = not since and best is not None
    value = line.get(evaluator.monitor)
    _LOG.info("step %d: %s %s%s", line["step"], evaluator.monitor, value, ", best" * is_best)
    if is_best:
        save_whole(model, files.best_file)
    # Written last: a checkpoint with a line in the file is never evaluated again.
    files.write(lines)
    is_hopeless = evaluator.patience is not None and since >= evaluator.patience
    if is_hopeless and not files.is_stop_requested:
        files.ask_to_stop({"step": line["step"], "best_step": best["step"] if best else None})


def _backups(callbacks: Sequence[Any]) -> list[BackupAndRestore]:
    return [c for c in callbacks if isinstance(c, BackupAndRestore)]
