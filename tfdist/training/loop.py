"""The training loop: ranges of steps between the moments at which somebody wants to look.

`fit` does not count batches. Each party that cares about steps or time says when it is next due;
before a range the chief tells all tasks how far to go, so that tasks cannot disagree.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.checkpoint.backup import BackupAndRestore
from tfdist.strategy.group import sum_over_tasks
from tfdist.training.epochs import EpochPlan
from tfdist.training.program import StepProgram
from tfdist.training.session import Session

_LOG = logging.getLogger(__name__)
_RANGE_S = 1.0
_FIRST_RANGE_STEPS = 16
_GROWTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the chief decides before a range, the same in every task.

    Attributes:
      last: the range ends before this step.
      stop: some task has asked to stop; no step is run.
      act: a backup that goes by the clock is due after the range.
      learning_rate: NaN where it cannot be set.
    """

    last: int
    stop: bool
    act: bool
    learning_rate: float


class Loop:
    """Runs the steps of one `fit`, range by range. Every training task runs it alike."""

    def __init__(
        self,
        session: Session,
        program: StepProgram,
        plan: EpochPlan,
        *,
        callbacks: Any,
        backups: Sequence[BackupAndRestore],
        save: Callable[[BackupAndRestore, int], None],
        every: Sequence[int],
        with_logs: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._program = program
        self._plan = plan
        self._callbacks = callbacks
        self._backups = backups
        self._save = save
        self._every = every
        self._with_logs = with_logs
        self._clock = clock
        self._rate = 0.0
        self._longest = _FIRST_RANGE_STEPS
        self.step = 0
        self.step_logs: dict[str, float] = {}

    def run_epoch(self, epoch: int) -> None:
        """Runs the rest of an epoch from `self.step`; returns early when somebody stops."""
        steps = self._plan.steps(epoch)
        while self.step < steps.stop:
            decision = self._decide(steps.stop)
            if decision.stop:
                self._session.model.stop_training = True
                return
            self._session.learning_rate = decision.learning_rate
            self._run_range(decision, epoch_start=steps.start)
            if self.step < steps.stop:  # at an epoch's end validation comes first
                self._save_due(decision)

    def _save_due(self, decision: Decision) -> None:
        for backup in self._backups:
            if decision.act or backup.wants(self.step):
                self._save(backup, self.step)

    def _run_range(self, decision: Decision, *, epoch_start: int) -> None:
        first, last = self.step, decision.last
        self._callbacks.on_train_batch_begin(first - epoch_start)
        start = self._clock()
        self.step_logs = self._session.run(self._program, first, last)
        self._note_rate(last - first, self._clock() - start)
        self.step = last
        logs = self._session.metrics(self._program, self.step_logs) if self._with_logs else {}
        self._callbacks.on_train_batch_end(last - 1 - epoch_start, logs)

    def _decide(self, epoch_end: int) -> Decision:
        session, step = self._session, self.step
        last = min([epoch_end, step + self._range_steps(), *self._due()])
        act = any(backup.due() for backup in self._backups)
        told = np.zeros(4)
        if session.job.is_chief:
            told[:3] = last, act, session.learning_rate
        told[3] = session.model.stop_training
        last_, act_, rate, stop = sum_over_tasks(session.job, told)
        return Decision(last=int(last_), stop=stop > 0, act=act_ > 0, learning_rate=float(rate))

    def _due(self) -> list[int]:
        """The next step of each callback that goes by steps, after the present one."""
        fixed = [(self.step // n + 1) * n for n in self._every]
        own = [c.next_step(self.step) for c in self._callbacks.callbacks if hasattr(c, "next_step")]
        return fixed + [step for step in own if step is not None]

    def _range_steps(self) -> int:
        """Steps of about a second, so that signals are heard; few until the speed is known."""
        return (
            min(max(1, int(self._rate * _RANGE_S)), self._longest)
            if self._rate
            else (self._longest)
        )

    def _note_rate(self, steps: int, elapsed_s: float) -> None:
        if steps >= self._longest:
            self._longest *= _GROWTH
        self._rate = steps / max(elapsed_s, 1e-6)
