"""`fit`: what `keras.Model.fit` does, under every strategy."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint import callback_state
from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.warm_start import load_weights
from tfdist.strategy import broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.training import building, inputs, resume
from tfdist.training.arguments import require_whole
from tfdist.training.callbacks import (
    begin_epoch,
    callback_list,
    steps_between_calls,
    wants_logs,
)
from tfdist.training.epochs import VirtualEpochs
from tfdist.training.evaluation import Evaluation
from tfdist.training.inputs import Length
from tfdist.training.loop import Loop
from tfdist.training.session import Session

_LOG = logging.getLogger(__name__)


def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    virtual_epochs: VirtualEpochs | None = None,
    seed: int | None = None,
    overfit_batches: int | None = None,
    initial_weights: str | os.PathLike[str] | None = None,
) -> keras.callbacks.History:
    """Trains a compiled model; what `keras.Model.fit` does, under every strategy.

    The arguments and their meaning are Keras' own; `batch_size` is the global batch. A collective:
    every training task calls it alike (under ps only the chief gets this far).

    Args:
      virtual_epochs: the length of the run in examples, instead of `epochs`.
      seed: of the order of the examples, of augmentation and of Dropout; by default the chief
        draws one from Python's `random`, which `keras.utils.set_random_seed` seeds.
      overfit_batches: train on the first so many batches of the data only, on purpose.
      initial_weights: a `.keras` or `.weights.h5` file or a checkpoint directory to start from;
        see `tfdist.load_weights`. A run that is resumed goes on with its own.

    Returns:
      Keras' `History`, the same in every task.

    Raises:
      UsageError: the model is of another scope, or not compiled; the data cannot be had under
        this strategy; the global batch is smaller than the number of replicas.
    """
    job = building.job_for(model, doing="fit")
    building.require_compiled(model, doing="fit")
    require_whole("initial_epoch", initial_epoch, least=0)
    if isinstance(validation_freq, int):
        require_whole("validation_freq", validation_freq, least=1)
    if validation_split and validation_data is None:
        arrays = (x, y, sample_weight)
        (x, y, sample_weight), validation_data = inputs.split(
            arrays, validation_split=validation_split
        )
    backups = [c for c in keras.tree.flatten(callbacks or []) if isinstance(c, BackupAndRestore)]
    saved = resume.saved_run(backups, job)
    seed = _seed(seed, saved)
    data = inputs.prepare(
        x,
        y,
        sample_weight,
        job=job,
        length=Length(
            batch_size=batch_size,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            virtual_epochs=virtual_epochs,
            overfit_batches=overfit_batches,
        ),
        shuffle=shuffle,
        seed=seed,
        class_weight=class_weight,
    )
    building.build(model, job, data.batch_spec)
    if initial_weights is not None and saved is None:
        load_weights(model, initial_weights, job=job)
    session = Session(model, job)
    validation = None
    if validation_data is not None:
        validation = Evaluation(
            session,
            keras.utils.unpack_x_y_sample_weight(validation_data),
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
        )
    run = Run(session, data, validation, backups=backups, saved=saved, seed=seed)
    try:
        return run.train(
            callbacks,
            verbose=verbose,
            initial_epoch=initial_epoch,
            validation_freq=validation_freq,
        )
    finally:
        for backup in backups:
            backup.close()


class Run:
    """One training run: epochs of ranges, validation and checkpoints between them."""

    def __init__(
        self,
        session: Session,
        data: inputs.Data,
        validation: Evaluation | None,
        *,
        backups: Sequence[BackupAndRestore],
        saved: RunState | None,
        seed: int,
    ) -> None:
        self._session = session
        self._plan = data.plan
        self._seed = seed
        self._program = session.program("train_step", data.feed, seed=seed)
        self._validation = validation
        self._backups = backups
        self._saved = saved
        self._warned = not session.job.is_chief
        self._fingerprint = resume.fingerprint(data)
        if saved is not None:
            resume.require_same_run(saved, self._fingerprint, plan=data.plan, seed=seed)

    def train(
        self, callbacks: Any, *, verbose: Any, initial_epoch: int, validation_freq: Any
    ) -> Any:
        """Runs the epochs from where the run stands; returns Keras' History."""
        session, model, plan, saved = self._session, self._session.model, self._plan, self._saved
        self._callbacks = callback_list(
            callbacks,
            job=session.job,
            model=model,
            verbose=verbose,
            epochs=plan.num_epochs,
            steps=len(plan.steps(0)) if plan.num_epochs else 0,
            history=True,
        )
        first = (
            plan.step_starts[min(initial_epoch, plan.num_epochs)] if saved is None else (saved.step)
        )
        start = plan.epoch_of(first) if first < plan.total_steps else plan.num_epochs
        if saved is not None:
            callback_state.prepare_to_resume(self._callbacks.callbacks, epoch=start)
        loop = self._loop(first)
        model.stop_training = False
        self._callbacks.on_train_begin()
        logs: dict[str, Any] = {}
        self._resume_between_epochs(start, first)
        for epoch in range(start, plan.num_epochs):
            if model.stop_training:
                break
            logs = self._epoch(epoch, loop, validation_freq)
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and plan.num_epochs:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs)
        return model.history

    def _loop(self, first: int) -> Loop:
        listed = self._callbacks.callbacks
        loop = Loop(
            self._session,
            self._program,
            self._plan,
            callbacks=self._callbacks,
            backups=self._backups,
            save=self._save,
            every=[n for n in map(steps_between_calls, listed) if n],
            with_logs=bool(broadcast(wants_logs(listed))),
        )
        loop.step = first
        return loop

    def _epoch(self, epoch: int, loop: Loop, validation_freq: Any) -> dict[str, Any]:
        session, within = self._session, loop.step > self._plan.steps(epoch).start
        if not within:
            session.reset_metrics()
            begin_epoch(self._callbacks.callbacks)
        self._callbacks.on_epoch_begin(epoch)
        if within:
            self._restore()  # after the hook, which may set what the checkpoint knows better
        loop.run_epoch(epoch)
        logs = session.metrics(self._program, loop.step_logs)
        self._warn_of_bad_loss(logs.get("loss"), epoch=epoch)
        validation = self._validation
        if validation is not None and session.model._should_eval(epoch, validation_freq):
            values = validation.run(self._callbacks)
            logs.update({f"val_{name}": value for name, value in values.items()})
        self._callbacks.on_epoch_end(epoch, logs)
        asked = np.array([float(session.model.stop_training)])
        session.model.stop_training = bool(sum_over_tasks(session.job, asked)[0])
        for backup in self._backups:
            self._save(backup, loop.step)
        return logs

    def _warn_of_bad_loss(self, loss: Any, *, epoch: int) -> None:
        """Says once that the loss is NaN or infinite; like Keras, the run goes on."""
        if self._warned or not isinstance(loss, float) or math.isfinite(loss):
            return
        self._warned = True
        _LOG.warning(
            "loss: received %s in epoch %d; expected a finite number. Fix: lower the learning "
            "rate, set clipnorm, or look for NaN in the data; the run goes on, unless "
            "keras.callbacks.TerminateOnNaN() stops it",
            loss,
            epoch + 1,
        )

    def _resume_between_epochs(self, epoch: int, step: int) -> None:
        """Restores a run that stands between two epochs, or at its end."""
        if self._saved is None:
            return
        if step < self._plan.total_steps and step > self._plan.steps(epoch).start:
            return  # within one: `_epoch` restores it
        self._restore()
        self._session.model.stop_training = self._saved.stopped
        if self._saved.stopped or step >= self._plan.total_steps:
            _LOG.info("the run had come to its end at step %d; nothing is left to do", step)

    def _restore(self) -> None:
        session = self._session
        self._backups[0].restore(session.model, session.job, callbacks=self._callbacks)
        session.engine.take_metrics(self._program)
        _LOG.info("resumed at step %d", self._saved.step if self._saved else 0)

    def _save(self, backup: BackupAndRestore, step: int) -> None:
        session = self._session
        session.engine.settle_metrics(self._program)
        loss = session.metrics(self._program, {}).get("loss", 0.0)
        if not np.isfinite(loss):
            _LOG.warning(
                "the loss is %s at step %d: not saved; the checkpoint before it is kept", loss, step
            )
            return
        run = RunState(
            step=step,
            examples=self._plan.examples_before(step),
            seed=self._seed,
            stopped=bool(session.model.stop_training),
            fingerprint=self._fingerprint,
        )
        backup.save(session.model, session.job, run, callbacks=self._callbacks)


def _seed(seed: int | None, saved: RunState | None) -> int:
    """The run's seed, the same in every task: as given, as saved, or as the chief draws it."""
    if seed is None:
        seed = saved.seed if saved is not None else random.randrange(2**31)
    return int(broadcast(seed))
