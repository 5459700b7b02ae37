"""Training loop: step blocks between the steps at which callbacks or saves are due.

`fit` does not loop over single batches. Each callback or backup names its next due step. Before
each block, the chief tells all tasks at which step the block ends, so tasks cannot disagree.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np

from tfdist import phases
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.backup import BackupAndRestore, RunState
from tfdist.checkpoint.model_state import own_arrays, set_own_arrays
from tfdist.errors import Stopped
from tfdist.strategy import broadcast
from tfdist.strategy.group import sum_over_tasks
from tfdist.strategy.native import engine_runs
from tfdist.training import resume
from tfdist.training.blocks import BlockRunner, Decision, any_task, decide
from tfdist.training.building import compiled_parts, require_as_compiled, use_averages
from tfdist.training.callbacks import (
    History,
    begin_epoch,
    callback_list,
    counting_steps,
    steps_to_save,
    wants_every_batch,
    wants_logs,
)
from tfdist.training.metrics_file import metrics_file
from tfdist.training.program import LoopState, RunObserver
from tfdist.training.run_settings import Run
from tfdist.training.stop_requests import StopRequested, StopRequests, signal_of
from tfdist.training.succession import Succession
from tfdist.training.task_agreement import require_same_weights
from tfdist.training.trackers import Tracker, prepare_trackers

if TYPE_CHECKING:
    from tfdist.training.evaluation import Evaluation
    from tfdist.training.feed import Feed

_LOG = logging.getLogger(__name__)
_TIME_IS_OVER = (
    "max_time: the run stops after %.3g s at step %d; to continue from a backup, raise max_time"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Settings of a run, decided by `fit` before the first step.

    Attributes:
      feed: training data, with the run's epochs.
      seed: seed of every random draw in the run.
      validation: evaluation at the end of an epoch, or `None`.
      validation_freq: same as in `fit`.
      initial_epoch: same as in `fit`.
      callbacks: callbacks of the user.
      verbose: same as in `fit`.
      backups: callbacks that save and restore.
      saved: state from which the run resumes, or `None` for a new run.
      source: index of the backup with this state.
      run: settings of the run.
      observers: callbacks that observe steps.
    """

    feed: Feed
    seed: int
    validation: Evaluation | None = None
    validation_freq: Any = 1
    initial_epoch: int = 0
    callbacks: Any = None
    verbose: Any = 0
    backups: Sequence[BackupAndRestore] = ()
    saved: RunState | None = None
    source: int = 0
    run: Run = dataclasses.field(default_factory=Run)
    observers: Sequence[RunObserver] = ()


class TrainLoop:
    """Runs the epochs of one `fit`, from the first or resumed step to the end or a stop.

    Every training task creates a loop and makes the same calls.

    Attributes:
      step: number of steps done in the run.
    """

    def __init__(self, plan: RunPlan, blocks: BlockRunner, requests: StopRequests) -> None:
        self.step = 0
        self._plan = plan
        self._epochs = plan.feed.plan
        self._blocks = blocks
        self._model = blocks.model
        self._job = blocks.job
        self._compiled = compiled_parts(blocks.model)
        self._requests = requests
        self._epoch_start = 0
        self._saved_step = None if plan.saved is None else plan.saved.step
        self._seconds_before = 0.0 if plan.saved is None else plan.saved.seconds
        self._began_s = time.monotonic()
        self._max_time_s = plan.run.max_time_s
        self._is_time_over = False
        self._joined: LoopState | None = None
        self._is_save_due = self._is_in_hook = False
        self._warned = not self._job.is_chief
        given = keras.tree.flatten(plan.callbacks or [])
        if not plan.run.fast_dev_run:
            first = plan.initial_epoch
            given += metrics_file(given, self._epochs, job=self._job, initial_epoch=first)
        self._given = given
        if not any(isinstance(c, keras.callbacks.History) for c in given):
            self._given.append(History())
        self._list_callbacks()
        self._succession = Succession(self._job)
        listed = self._callbacks.callbacks
        steps = self._model.steps_per_execution if self._every_batch else 1
        self._steps_per_hook = int(broadcast(steps))
        self._with_logs = bool(broadcast(wants_logs(listed)))

    def run(self) -> keras.callbacks.History:
        """Run the remaining epochs and return Keras' History.

        Raises:
          Stopped: some task received a stop signal. The state is already saved if possible.
        """
        model, epochs = self._model, self._epochs
        if (joined := self._blocks.engine.begin(self._blocks.program)) is not None:
            self._join(joined)
        self.step, start = resume.first_step_and_epoch(self._plan)
        if self._plan.backups and self._joined is None:
            states = self._plan.backups[self._plan.source].found_states
            with phases.entered("callback"):
                prepare_trackers(self._callbacks.callbacks, self._plan.backups, states)
        if self._plan.saved is not None:
            callback_state.prepare_to_resume(self._callbacks.callbacks, epoch=start)
        model.stop_training = False
        with engine_runs():
            self._call("on_train_begin")
        self._agree_to_stop()
        self._resume_between_epochs(start)
        logs: dict[str, Any] = {}
        for epoch in range(start, epochs.num_epochs):
            if model.stop_training or (self.step == epochs.step_starts[epoch] and self._is_over()):
                break
            logs = self._run_epoch(epoch, is_first=epoch == start)
        self._settle(logs)
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs.num_epochs:
            use_averages(model)
        self._call("on_train_end", logs)
        self._finish()
        return model.history

    def _run_epoch(self, epoch: int, *, is_first: bool) -> dict[str, Any]:
        """Run the rest of an epoch and its validation, and return the epoch's logs."""
        plan, steps = self._plan, self._epochs.steps(epoch)
        within, self._epoch_start = self.step > steps.start, steps.start
        if not within:
            self._blocks.reset_metrics()
            begin_epoch(self._callbacks.callbacks)
        self._call("on_epoch_begin", epoch)
        if within or self._joined is not None:
            self._restore(epoch)  # after the hook: the checkpoint's values override the hook's
        if self._job.stages is None or not is_first:  # a pipeline starts with the chief's weights
            require_same_weights(self._job, self._model)
        try:
            self._run_steps(steps)
        except StopRequested as request:
            self._stop(request.signum, at_epoch_begin=self.step == steps.start)
        plan.feed.end_pass(self.step)  # before the hooks of the validation data draw numbers
        self._blocks.engine.publish_state(self._blocks.program)
        # If only the epoch's validation is left, use the saved logs of its training.
        kept = resume.logs_before_validation(plan.saved) if is_first else None
        logs = kept or self._blocks.metrics(self._blocks.logs)
        self._warn_of_bad_loss(logs.get("loss"), epoch=epoch)
        if plan.validation is not None and self._model._should_eval(epoch, plan.validation_freq):
            values = self._validated(plan.validation, logs)
            logs.update({f"val_{name}": value for name, value in values.items()})
        self._call("on_epoch_end", epoch, logs)
        self._agree_to_stop()
        if not self._is_time_over:  # else a state within the epoch is already saved
            for backup in plan.backups:
                self._save(backup, ended=logs)
        return logs

    def _run_steps(self, steps: range) -> None:
        """Run the rest of an epoch's steps, and return early if a callback stops the training.

        Raises:
          StopRequested: some task received a stop signal.
        """
        while self.step < steps.stop:
            if self.step > steps.start and self._is_over():
                self._cut_epoch()
                return
            decision = self._decide(steps.stop)
            if decision.stop or decision.signum is not None:
                self._blocks.finish()
            if decision.stop:
                self._model.stop_training = True
                if self.step > steps.start:  # a started epoch runs at least one step, as in Keras
                    return
            if decision.signum is not None:
                raise StopRequested(decision.signum)
            self._blocks.learning_rate = decision.learning_rate
            self._run_block(decision, epoch=steps)
            if self.step < steps.stop:  # at the end of an epoch, validation runs first
                for backup in self._plan.backups:
                    if decision.save or backup.wants(self.step):
                        self._save(backup)

    def _cut_epoch(self) -> None:
        """End the training within an epoch. The next run repeats the end of this epoch."""
        self._blocks.finish()
        if self._plan.backups:
            logs = self._blocks.metrics({})  # a collective, so not when a successor saves
            for backup in self._plan.backups:
                self._save(backup, ended=logs)
            self._settle(logs)
            for callback in self._callbacks.callbacks:
                if isinstance(callback, Tracker):
                    callback.interrupted()
        self._model.stop_training = True

    def _seconds(self) -> float:
        """Return the run's time, including the time before its checkpoint."""
        return self._seconds_before + time.monotonic() - self._began_s

    def _is_over(self) -> bool:
        """Return whether the chief's clock has passed `max_time`. A collective if it is set."""
        if self._max_time_s is None:
            return False
        mine = self._job.is_chief and self._seconds() >= self._max_time_s
        self._is_time_over = any_task(self._job, mine, of="the time limit")
        if self._is_time_over and self._job.is_chief:
            _LOG.warning(_TIME_IS_OVER, self._seconds(), self.step)
        return self._is_time_over

    def _decide(self, epoch_end: int) -> Decision:
        require_as_compiled(self._model, self._compiled)
        engine = self._blocks.engine
        if self._joined is not None:
            decision = Decision(**self._joined.loop["decision"])
            self._succession.take(self._joined.loop["shared"])
            self._joined = None
            engine.go_on()
            engine.say_replaceable(True)
            return decision

        def of_task() -> Decision:
            self._take_over()
            mine = Decision(last=0, stop=self._model.stop_training)
            if not self._job.is_chief:
                return mine
            longest = self.step + self._blocks.length.steps()
            return dataclasses.replace(
                mine,
                last=min([epoch_end, longest, *self._due()]),
                save=self._is_save_due or any(backup.due() for backup in self._plan.backups),
                learning_rate=self._blocks.learning_rate,
                joins=engine.joining,
                shares=self._succession.has_news(self._callbacks.callbacks),
            )

        decision = decide(self._job, of_task, requests=self._requests)
        epoch, listed = self._epochs.epoch_of(self.step), self._callbacks.callbacks
        self._succession.share(listed, epoch=epoch, step=self.step, has_news=decision.shares)
        self._is_save_due = False
        engine.say_replaceable(True)
        if decision.joins is not None and not decision.stop and decision.signum is None:
            engine.admit(decision.joins, lambda: self._state(decision))
        return dataclasses.replace(decision, last=self.step + 1) if decision.stop else decision

    def _due(self) -> list[int]:
        """Return the next due step of each callback that depends on steps."""
        own = [callback.next_step(self.step) for callback in self._scheduled]
        due = [step for step in own if step is not None]
        if self._every_batch:
            done = self.step - self._epoch_start
            return [*due, self.step + self._steps_per_hook - done % self._steps_per_hook]
        left = map(steps_to_save, self._callbacks.callbacks)
        return due + [self.step + steps for steps in left if steps is not None]

    def _run_block(self, decision: Decision, *, epoch: range) -> None:
        first, last, blocks, every = self.step, decision.last, self._blocks, self._steps_per_hook
        looked_at = decision.save or last >= min([epoch.stop, *self._due()])
        with counting_steps(self._callbacks.callbacks, first, last):
            if not self._is_in_hook:  # a run may also resume between two hooks
                self._call("on_train_batch_begin", first - epoch.start)
            self._is_in_hook = last != epoch.stop and (last - epoch.start) % every != 0
            left = blocks.run(first, last, looked_at=looked_at)
            self.step = last
            if not self._is_in_hook:
                logs: dict[str, Any] = {}
                if self._with_logs and left < last - epoch.start:  # some step is complete
                    logs = blocks.metrics(blocks.logs)
                done = -(-(last - epoch.start) // every) * every  # Keras also counts past the end
                self._call("on_train_batch_end", done - 1, logs)
            require_as_compiled(self._model, self._compiled)

    def _validated(self, validation: Evaluation, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate. After a stop signal, save a state from which a run repeats the validation."""
        if self._agree_to_stop():
            return validation.run(self._callbacks)  # the training ends after this validation
        listed = self._callbacks.callbacks
        before = callback_state.get_states(listed) if self._plan.backups else {}
        requests = self._requests if resume.may_break_off(self._model, listed) else None
        try:
            return validation.run(self._callbacks, requests=requests)
        except StopRequested as request:
            callback_state.set_states(listed, before)
            self._stop(request.signum, logs=logs)

    def _agree_to_stop(self) -> bool:
        """Stop the training in every task if a callback of some task stops it. A collective."""
        stop = any_task(self._job, self._model.stop_training, of="requests to stop")
        self._model.stop_training = stop
        self._take_over()
        return stop

    def _warn_of_bad_loss(self, loss: Any, *, epoch: int) -> None:
        """Log once that the loss is NaN or infinite. The run continues, as in Keras."""
        if self._warned or not isinstance(loss, float) or math.isfinite(loss):
            return
        self._warned = True
        _LOG.warning(
            "loss: %s in epoch %d is not finite; continuing the run. Fix: lower the learning rate, "
            "set clipnorm, or look for NaN in the data (keras.callbacks.TerminateOnNaN() stops "
            "such a run)",
            loss,
            epoch + 1,
        )

    def _resume_between_epochs(self, epoch: int) -> None:
        """Restore a run that is between two epochs, has ended, or has a stop request."""
        saved, asked = self._plan.saved, self._model.stop_training
        if saved is None or self._joined is not None:  # `_run_epoch` sets a joining task's state
            return
        ended = saved.stopped or epoch == self._epochs.num_epochs
        if not ended and not asked and self.step > self._epochs.steps(epoch).start:
            return  # the run is within an epoch: `_run_epoch` restores it
        self._restore(epoch, line=resume.NOTHING_LEFT if ended else resume.RESUMES)
        self._model.stop_training = saved.stopped or asked

    def _restore(self, epoch: int, *, line: str = resume.RESUMES) -> None:
        with phases.entered("save"):
            if self._joined is not None:
                self._take(self._joined)
            else:
                backup = self._plan.backups[self._plan.source]
                backup.restore(self._model, self._job, callbacks=self._callbacks)
            self._blocks.engine.take_state(self._blocks.program)
        for callback in self._callbacks.callbacks:
            if hasattr(callback, "resumed_at"):
                callback.resumed_at(self.step)
        if self._joined is None and self._job.is_chief:
            directory = self._plan.backups[self._plan.source].place
            _LOG.warning(line, {"step": self.step, "epoch": epoch + 1, "directory": directory})

    def _save(
        self,
        backup: BackupAndRestore,
        *,
        ended: Mapping[str, Any] | None = None,
        logs: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint, with the logs of an `ended` epoch or of a pending validation."""
        require_as_compiled(self._model, self._compiled)
        blocks, model, step = self._blocks, self._model, self.step
        with phases.entered("save"):
            blocks.engine.publish_state(blocks.program)
            metrics = ended or logs or blocks.metrics({})
            run = self._run_state(resume.kept_logs(logs))
            wrong = resume.reason_not_to_save(model, metrics)
            if wrong or (wrong := backup.save(model, self._job, run, callbacks=self._callbacks)):
                _LOG.warning(
                    "%s at step %d: checkpoint skipped, previous checkpoint kept", wrong, step
                )
                backup.pass_over()
                return
            self._saved_step, self._is_save_due = step, False

    def _run_state(self, more: Mapping[str, Any]) -> RunState:
        return RunState(
            step=self.step,
            examples=self._epochs.examples_before(self.step),
            seed=self._plan.seed,
            stopped=bool(self._model.stop_training),
            fingerprint=resume.fingerprint(self._plan.feed)
            | resume.epoch_at(self.step, self._epochs)
            | dict(more),
            seconds=self._seconds(),
        )

    # elastic jobs

    def _state(self, decision: Decision) -> LoopState:
        """Return the loop's state before the block of `decision`, for a task that joins."""
        listed = self._callbacks.callbacks
        loop = {
            "run": dataclasses.asdict(self._run_state({})),
            "decision": dataclasses.asdict(decision),
            "callbacks": callback_state.get_states(listed),
            "shared": self._succession.shared,
        }
        arrays = own_arrays(self._model) | callback_state.best_weights(listed)
        return LoopState(loop=loop, arrays=arrays)

    def _join(self, joined: LoopState) -> None:
        """Begin at the state of the other tasks' loop."""
        self._joined = joined
        self._seconds_before, self._began_s = joined.loop["run"]["seconds"], time.monotonic()
        self._plan = dataclasses.replace(self._plan, saved=RunState(**joined.loop["run"]))

    def _take(self, joined: LoopState) -> None:
        set_own_arrays(self._model, joined.arrays)
        callback_state.set_states(self._callbacks.callbacks, joined.loop["callbacks"])
        callback_state.set_best_weights(self._callbacks.callbacks, joined.arrays)

    def _list_callbacks(self) -> None:
        self._callbacks = callback_list(
            self._given,
            job=self._job,
            model=self._model,
            verbose=self._plan.verbose,
            epochs=self._epochs.num_epochs,
            steps=len(self._epochs.steps(0)) if self._epochs.num_epochs else 0,
        )
        listed = self._callbacks.callbacks
        self._every_batch = any(wants_every_batch(c, mode="train") for c in listed)
        self._scheduled = [c for c in listed if hasattr(c, "next_step")]

    def _call(self, hook: str, *args: Any) -> None:
        self._succession.note(hook, args)
        with phases.entered("callback"):
            getattr(self._callbacks, hook)(*args)

    def _take_over(self) -> None:
        """Run the chief's callbacks if this task is the successor of a lost chief."""
        if self._succession.is_due:
            self._list_callbacks()
            self._succession.take_over(self._callbacks, self._plan.backups, step=self.step)
            self._is_save_due, self._saved_step = True, None

    def _settle(self, logs: Mapping[str, Any]) -> None:
        """Wait for the last save in an elastic job. The successor of a lost chief repeats it.

        From here on, the loss of the chief restarts the job, because the weights may change.
        """
        if self._job.shards is None or not self._job.has_peers:
            return
        with phases.entered("save"):
            for backup in self._plan.backups:
                backup.finish()
            self._blocks.engine.say_replaceable(False)
            any_task(self._job, False, of="the end of the last save")
        self._take_over()
        if self._is_save_due and logs:
            for backup in self._plan.backups:
                self._save(backup, ended=logs)

    def _finish(self) -> None:
        """Wait for unfinished writes, then handle a stop signal received after the last step."""
        with phases.entered("save"):
            for backup in self._plan.backups:
                backup.finish()
            slots = sum_over_tasks(self._job, np.array(self._requests.slots()), of="last signals")
        signum = signal_of(slots.tolist())
        if signum is not None:
            self._log_and_stop(signum)
        phases.enter("done")

    def _stop(
        self,
        signum: int,
        *,
        at_epoch_begin: bool = False,
        logs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Save a checkpoint, wait until it is written, and raise `Stopped`. A collective.

        If `at_epoch_begin`, skip the save, because the end of the previous epoch is already saved.
        The resumed run calls the first hooks of this epoch again.
        """
        self._take_over()
        if at_epoch_begin and self._job.shards is not None:
            at_epoch_begin = not any_task(self._job, self._is_save_due, of="a save that is due")
        if not at_epoch_begin:
            for backup in self._plan.backups:
                self._save(backup, logs=logs)
        with phases.entered("save"):
            for backup in self._plan.backups:
                backup.finish()
        self._log_and_stop(signum)

    def _log_and_stop(self, signum: int) -> NoReturn:
        has_backup = bool(self._plan.backups)
        line = resume.stop_message(
            signum, step=self.step, saved_step=self._saved_step, has_backup=has_backup
        )
        if self._job.is_chief:  # first: when another task exits, the launcher stops all tasks
            _LOG.warning("%s", line)
        with phases.entered("save"):
            # Exit together: an early exit would stop the other tasks during the chief's last write.
            sum_over_tasks(self._job, np.zeros(1), of="the end of a stopped run")
        phases.enter("done")
        raise Stopped(signum, line)
