"""Training loop: ranges of steps between the steps at which callbacks or saves are due.

`fit` does not count batches. Each party that cares about steps or time says when it is next due;
before a range the chief tells all tasks how far to go, so that tasks cannot disagree.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist import phases
from tfdist.checkpoint.backup import BackupAndRestore
from tfdist.checkpoint.preemption import SIGNALS, StopRequested, StopRequests, signal_of
from tfdist.strategy.group import sum_over_tasks
from tfdist.training.epochs import EpochPlan
from tfdist.training.program import StepProgram
from tfdist.training.session import Session


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the chief decides before a range, the same in every task.

    Attributes:
      last: the range ends before this step.
      stop: a callback of some task has asked to end the training.
      asked: the signal by which some task has been asked to stop, None where none has.
      act: a backup that goes by the clock is due after the range.
      learning_rate: NaN where it cannot be set.
    """

    last: int
    stop: bool
    asked: int | None
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
        requests: StopRequests,
        save: Callable[[BackupAndRestore, int], None],
        every: Sequence[int],
        with_logs: bool,
    ) -> None:
        self._session = session
        self._program = program
        self._plan = plan
        self._callbacks = callbacks
        self._backups = backups
        self._requests = requests
        self._save = save
        self._every = every
        self._with_logs = with_logs
        self._block_length = BlockLengthPolicy()
        self.step = 0
        self.step_logs: dict[str, float] = {}

    def run_epoch(self, epoch: int) -> None:
        """Run the rest of an epoch from `self.step`; return early when a callback stops it.

        Raises:
          Asked: some task has been asked by a signal to stop.
        """
        steps = self._plan.steps(epoch)
        while self.step < steps.stop:
            decision = self._decide(steps.stop)
            if decision.stop or decision.asked is not None:
                self._finish()
            if decision.stop:
                self._session.model.stop_training = True
                if self.step > steps.start:  # one that has begun has a step, as under Keras
                    return
            if decision.asked is not None:
                raise StopRequested(decision.asked)
            self._session.learning_rate = decision.learning_rate
            self._run_range(decision, epoch=steps)
            if self.step < steps.stop:  # at an epoch's end validation comes first
                self._save_due(decision)

    def step_of_epoch(self, epoch: int) -> int:
        """Steps done of an epoch."""
        return self.step - self._plan.steps(epoch).start

    def _save_due(self, decision: Decision) -> None:
        for backup in self._backups:
            if decision.act or backup.wants(self.step):
                self._save(backup, self.step)

    def _run_range(self, decision: Decision, *, epoch: range) -> None:
        first, last, engine = self.step, decision.last, self._session.engine
        goes_on = (
            self._block_length.is_known
            and not decision.act
            and last < min([epoch.stop, *self._due()])
        )
        with phases.entered("callback"):
            self._callbacks.on_train_batch_begin(first - epoch.start)
        phases.enter("step" if self._session.has_run(self._program) else "trace", step=first)
        start, before = time.perf_counter(), engine.steps_under_way
        self.step_logs = self._session.run(self._program, first, last, goes_on=goes_on)
        elapsed_s, left = time.perf_counter() - start, engine.steps_under_way
        done = last - first + before - left
        self._block_length.note(done, elapsed_s=elapsed_s, is_whole=not before and not left)
        self.step = last
        phases.enter("step", step=last)
        logs: dict[str, Any] = {}
        if self._with_logs and left < last - epoch.start:  # some step of the epoch has been done
            logs = self._session.metrics(self._program, self.step_logs)
        with phases.entered("callback"):
            self._callbacks.on_train_batch_end(last - 1 - epoch.start, logs)

    def _finish(self) -> None:
        """Wait for the steps that are under way; what the last of them says is what counts."""
        if self._session.engine.steps_under_way:
            self.step_logs = self._session.finish(self._program)

    def _decide(self, epoch_end: int) -> Decision:
        session, step = self._session, self.step
        told = np.zeros(4 + len(SIGNALS))
        if session.job.is_chief:
            last = min([epoch_end, step + self._block_length.steps(), *self._due()])
            act = any(backup.due() for backup in self._backups)
            told[:3] = last, act, session.learning_rate
        told[3:] = session.model.stop_training, *self._requests.slots()
        last_, act_, rate, stop, *asked = sum_over_tasks(
            session.job, told, of="the next range of steps"
        )
        return Decision(
            last=step + 1 if stop > 0 else int(last_),
            stop=stop > 0,
            asked=signal_of(asked),
            act=act_ > 0,
            learning_rate=float(rate),
        )

    def _due(self) -> list[int]:
        """Return the next step of each callback that goes by steps, after the present one."""
        fixed = [(self.step // n + 1) * n for n in self._every]
        own = [c.next_step(self.step) for c in self._callbacks.callbacks if hasattr(c, "next_step")]
        return fixed + [step for step in own if step is not None]


# Block length policy: steps per compiled call, so that each takes about a second.


_RANGE_S = 1.0
_GROWTH = 8


class BlockLengthPolicy:
    """Length of the next step block, by how long the last one took.

    The first range is one step: nothing is known of its speed, and it traces the program. From
    there on ranges grow step by step.
    """

    def __init__(self) -> None:
        self._longest = 1
        self._rate: float | None = None
        self._steps, self._elapsed_s = 0, 0.0

    def steps(self) -> int:
        """Return how many steps the next range may have."""
        if self._rate is None:
            return self._longest
        return min(max(1, int(self._rate * _RANGE_S)), self._longest)

    @property
    def is_known(self) -> bool:
        """Whether ranges are as long as they are by their speed, and do not grow any more."""
        return self._rate is not None and self._rate * _RANGE_S < self._longest

    def note(self, steps: int, *, elapsed_s: float, is_whole: bool = True) -> None:
        """Take in how many steps were done in so much time.

        What is not a whole range, as steps of another were done too or some were not, tells
        little of the speed: it counts together with what follows.
        """
        if steps >= self._longest:
            self._longest = steps * _GROWTH
        self._steps += steps
        self._elapsed_s += elapsed_s
        if self._steps and (is_whole or self._elapsed_s >= _RANGE_S / 2):
            self._rate = self._steps / max(self._elapsed_s, 1e-6)
            self._steps, self._elapsed_s = 0, 0.0
