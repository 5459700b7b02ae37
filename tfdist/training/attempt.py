"""One attempt at a training run: from the resumed step to its end or a stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np

from tfdist import phases
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.preemption import StopRequested, StopRequests, signal_of
from tfdist.errors import Stopped
from tfdist.strategy import broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.training import inputs, resume
from tfdist.training.callbacks import (
    begin_epoch,
    callback_list,
    steps_between_calls,
    wants_logs,
)
from tfdist.training.evaluation import Evaluation
from tfdist.training.loop import Loop
from tfdist.training.session import Session

if TYPE_CHECKING:
    from tfdist.audit.recorder import Ledger

_LOG = logging.getLogger(__name__)


class Attempt:
    """Epochs of ranges, validation and checkpoints between them. Every training task makes one."""

    def __init__(
        self,
        session: Session,
        data: inputs.Data,
        validation: Evaluation | None,
        *,
        backups: Sequence[BackupAndRestore],
        saved: RunState | None,
        requests: StopRequests,
        seed: int,
        ledger: Ledger | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self._session = session
        self._plan = data.plan
        self._seed = seed
        resume.require_exact(backups, data, job=session.job)
        exact = any(backup.exact for backup in backups)
        self._program = session.program(
            "train_step", data.feed, seed=seed, exact=exact, max_staleness=max_staleness
        )
        self._validation = validation
        self._backups = backups
        self._saved = saved
        self._requests = requests
        self._saved_step = None if saved is None else saved.step
        self._warned = not session.job.is_chief
        self._fingerprint = resume.fingerprint(data)
        if saved is not None:
            resume.require_same_run(saved, self._fingerprint, plan=data.plan, seed=seed)
        if ledger is not None:
            self._program = ledger.recording(self._program, data, session.job, seed=seed)

    def train(
        self, callbacks: Any, *, verbose: Any, initial_epoch: int, validation_freq: Any
    ) -> Any:
        """Run the epochs from where the run stands; return Keras' History.

        Raises:
          Stopped: some task was asked by a signal to stop; what there was to save is saved.
        """
        session, model, plan = self._session, self._session.model, self._plan
        self._callbacks = callback_list(
            callbacks,
            job=session.job,
            model=model,
            verbose=verbose,
            epochs=plan.num_epochs,
            steps=len(plan.steps(0)) if plan.num_epochs else 0,
            history=True,
        )
        first, start = self._best_so_far(initial_epoch)
        if self._saved is not None:
            callback_state.prepare_to_resume(self._callbacks.callbacks, epoch=start)
        loop = self._loop(first)
        model.stop_training = False
        with phases.entered("callback"):
            self._callbacks.on_train_begin()
        self._agree_to_stop()
        self._resume_between_epochs(start, first)
        logs: dict[str, Any] = {}
        for epoch in range(start, plan.num_epochs):
            if model.stop_training:
                break
            logs = self._epoch(epoch, loop, validation_freq)
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and plan.num_epochs:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        with phases.entered("callback"):
            self._callbacks.on_train_end(logs)
        self._finish(loop)
        return model.history

    def _best_so_far(self, initial_epoch: int) -> tuple[int, int]:
        """Return the next step, and the first epoch whose end is still to come."""
        plan, saved = self._plan, self._saved
        first = plan.step_starts[min(initial_epoch, plan.num_epochs)]
        if saved is not None:
            first = saved.step
        epoch = plan.epoch_of(first) if first < plan.total_steps else plan.num_epochs
        if resume.logs_before_validation(saved) is not None:
            epoch -= 1
        elif saved is not None and saved.stopped and first > plan.step_starts[epoch]:
            epoch += 1  # a callback had stopped it in the middle; its hooks have been called
        return first, epoch

    def _loop(self, first: int) -> Loop:
        listed = self._callbacks.callbacks
        loop = Loop(
            self._session,
            self._program,
            self._plan,
            callbacks=self._callbacks,
            backups=self._backups,
            requests=self._requests,
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
        with phases.entered("callback"):
            self._callbacks.on_epoch_begin(epoch)
        if within:
            self._restore()  # after the hook, which may set what the checkpoint knows better
        try:
            loop.run_epoch(epoch)
        except StopRequested as asked:
            self._stop(asked.signum, loop.step, at_epoch_begin=loop.step_of_epoch(epoch) == 0)
        logs = self._logs_of_epoch(loop)
        self._warn_of_bad_loss(logs.get("loss"), epoch=epoch)
        if self._validation is not None and session.model._should_eval(epoch, validation_freq):
            values = self._validated(self._validation, logs, step=loop.step)
            logs.update({f"val_{name}": value for name, value in values.items()})
        with phases.entered("callback"):
            self._callbacks.on_epoch_end(epoch, logs)
        self._agree_to_stop()
        for backup in self._backups:
            self._save(backup, loop.step, ended=logs)
        return logs

    def _logs_of_epoch(self, loop: Loop) -> dict[str, Any]:
        """The metrics of an epoch's training, as they were where only its validation is due."""
        before, self._saved = self._saved, None
        kept = resume.logs_before_validation(before)
        return kept or self._session.metrics(self._program, loop.step_logs)

    def _validated(
        self, validation: Evaluation, logs: Mapping[str, Any], *, step: int
    ) -> dict[str, Any]:
        """Evaluates; when asked to stop, saves so that a resumed run does all of it again."""
        if self._agree_to_stop():
            return validation.run(self._callbacks)  # the training ends with it
        listed = self._callbacks.callbacks
        before = callback_state.get_states(listed) if self._backups else {}
        requests = self._requests if resume.may_break_off(listed) else None
        try:
            return validation.run(self._callbacks, requests=requests)
        except StopRequested as asked:
            callback_state.set_states(listed, before)
            self._stop(asked.signum, step, logs=logs)

    def _agree_to_stop(self) -> bool:
        """End the training in every task when a callback of some task has. A collective."""
        model = self._session.model
        asked = np.array([float(model.stop_training)])
        model.stop_training = bool(sum_over_tasks(self._session.job, asked, of="wishes to stop")[0])
        return bool(model.stop_training)

    def _warn_of_bad_loss(self, loss: Any, *, epoch: int) -> None:
        """Report once that the loss is NaN or infinite; like Keras, the run goes on."""
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
        """Restore a run that stands between two epochs, or at its end, or is asked to stop."""
        saved, asked = self._saved, self._session.model.stop_training
        if saved is None:
            return
        ended = saved.stopped or epoch == self._plan.num_epochs
        if not ended and not asked and step > self._plan.steps(epoch).start:
            return  # within one: `_epoch` restores it
        self._restore()
        self._session.model.stop_training = saved.stopped or asked
        self._saved = None
        if ended and self._session.job.is_chief:
            _LOG.warning(resume.NOTHING_LEFT, step, self._backups[0].store.directory)

    def _restore(self) -> None:
        assert self._saved is not None
        step, session = self._saved.step, self._session
        with phases.entered("save"):
            self._backups[0].restore(session.model, session.job, callbacks=self._callbacks)
            session.engine.take_metrics(self._program)
        for callback in self._callbacks.callbacks:
            if hasattr(callback, "resumed_at"):
                callback.resumed_at(step)
        _LOG.info("resumed at step %d", step)

    def _save(
        self,
        backup: BackupAndRestore,
        step: int,
        *,
        ended: Mapping[str, Any] | None = None,
        logs: Mapping[str, Any] | None = None,
    ) -> None:
        """Have a checkpoint made, also of an epoch that has `ended` or is yet to be validated."""
        session = self._session
        with phases.entered("save"):
            session.engine.publish_metrics(self._program)
            figures = ended or logs or session.metrics(self._program, {})
            if wrong := resume.unfit(session.model, figures):
                _LOG.warning("%s at step %d: not saved; the one before it is kept", wrong, step)
                return
            more = resume.epoch_at(step, self._plan) | resume.kept_logs(logs)
            run = RunState(
                step=step,
                examples=self._plan.examples_before(step),
                seed=self._seed,
                stopped=bool(session.model.stop_training),
                fingerprint=self._fingerprint | more,
            )
            backup.save(session.model, session.job, run, callbacks=self._callbacks)
            self._saved_step = step

    def _finish(self, loop: Loop) -> None:
        """Wait for what is being written; a request to stop that came too late is answered."""
        with phases.entered("save"):
            for backup in self._backups:
                backup.wait()
            mine = np.array(self._requests.slots())
            slots = sum_over_tasks(self._session.job, mine, of="signals at the end")
        signum = signal_of(slots.tolist())
        if signum is not None:
            self._say_and_stop(signum, loop.step)
        phases.enter("done")

    def _stop(
        self,
        signum: int,
        step: int,
        *,
        at_epoch_begin: bool = False,
        logs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Saves at `step`, waits until that is on the disk, and raises `Stopped`. A collective.

        Where an epoch has only begun, its first hooks have been called and will be called again:
        the state to go on from is that of the end of the epoch before, which is saved already.
        """
        if not at_epoch_begin:
            for backup in self._backups:
                self._save(backup, step, logs=logs)
        with phases.entered("save"):
            for backup in self._backups:
                backup.wait()
        self._say_and_stop(signum, step)

    def _say_and_stop(self, signum: int, step: int) -> NoReturn:
        line = resume.message(
            signum, step=step, saved_step=self._saved_step, has_backup=bool(self._backups)
        )
        if self._session.job.is_chief:  # before another one's end has the launcher end all
            _LOG.warning("%s", line)
        with phases.entered("save"):
            # Whoever ended now would take down the others, and with them the chief's last write.
            sum_over_tasks(self._session.job, np.zeros(1), of="the end of a stopped run")
        phases.enter("done")
        raise Stopped(signum, line)
