"""`BackupAndRestore`: saves a run as it goes, and goes on at the step where it stood."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist.checkpoint import callback_state, state
from tfdist.checkpoint.store import Checkpoint, CheckpointStore
from tfdist.errors import UsageError
from tfdist.strategy import Job, broadcast

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a checkpoint says of a run besides its arrays; everything else follows from the step.

    Attributes:
      step: steps done.
      examples: examples consumed by them.
      seed: of the run.
      stopped: a callback had asked to stop.
      fingerprint: what must not change between the attempts of a run.
    """

    step: int
    examples: int
    seed: int
    stopped: bool
    fingerprint: Mapping[str, Any]


class BackupAndRestore(keras.callbacks.Callback):
    """Saves model, optimizer, metrics and callbacks every so often; resumes at that very step.

    Given to `tfdist.fit` by every task; the chief writes and reads, so the directory need only be
    the chief's. A run that is started again with the same directory goes on; one that had come to
    its end says so and does nothing.

    Args:
      directory: of the checkpoints; nothing else should write there.
      every_steps: save after each so many steps.
      every_s: save when so many seconds have passed since the last time.
      keep: how many checkpoints are kept.

    It saves at the end of each (virtual) epoch as well.

    Raises:
      UsageError: an interval is not positive; the checkpoint is of another model, data, batch
        size, seed, or of a newer format; another process writes to the directory.
      TfdistError: the disk is full or read-only; what was saved before is untouched.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_s", every_s)):
            if value is not None and value <= 0:
                raise UsageError(
                    "BackupAndRestore",
                    received=f"{name}={value}",
                    expected="more than 0",
                    fix=f"leave {name} out, or give the interval between two checkpoints",
                )
        self.store = CheckpointStore(directory, keep=keep)
        self._every_steps = every_steps
        self._every_s = every_s
        self._clock = clock
        self._saved_at = clock()
        self._saved_step = -1

    def next_step(self, step: int) -> int | None:
        """The step after which it is next due, None where it does not go by steps."""
        every = self._every_steps
        return None if every is None else (step // every + 1) * every

    def due(self) -> bool:
        """True when it goes by time and its time has come; asked of the chief."""
        return self._every_s is not None and self._clock() - self._saved_at >= self._every_s

    def wants(self, step: int) -> bool:
        """True when a checkpoint is due after `step` by the number of steps."""
        return self._every_steps is not None and step % self._every_steps == 0

    def saved(self) -> RunState | None:
        """What the newest checkpoint says of the run, None where there is none. Chief only."""
        if self.store.latest() is None:
            return None
        return _run_state(self.store.read())

    def save(self, model: keras.Model, job: Job, run: RunState, *, callbacks: Any) -> None:
        """Writes a checkpoint. A collective: every training task calls it alike."""
        if run.step == self._saved_step:
            return
        arrays = state.capture(model, job)
        self._saved_at = self._clock()
        self._saved_step = run.step
        if not job.is_chief:
            return
        others = callbacks.callbacks
        arrays.update(callback_state.best_weights(others))
        meta = {
            **dataclasses.asdict(run),
            "variables": state.names_of(model),
            "callbacks": callback_state.get_states(others),
        }
        self.store.write(run.step, arrays, meta=meta)

    def close(self) -> None:
        """Lets another run write to the directory; the next `save` takes it again."""
        self.store.close()

    def restore(self, model: keras.Model, job: Job, *, callbacks: Any) -> None:
        """Sets model, optimizer, metrics and callbacks as they were saved. A collective."""
        checkpoint = self.store.read() if job.is_chief else None
        if checkpoint is not None:
            where = f"checkpoint {self.store.directory}"
            state.require_same(model, checkpoint.meta["variables"], where=where)
        state.restore(model, job, checkpoint.arrays if checkpoint else None)
        told = broadcast(
            None
            if checkpoint is None
            else {
                "step": checkpoint.step,
                "callbacks": checkpoint.meta["callbacks"],
                "best": {n: a for n, a in checkpoint.arrays.items() if n.startswith("callbacks/")},
            }
        )
        self._saved_step = int(told["step"])
        others = callbacks.callbacks
        callback_state.set_states(others, told["callbacks"])
        callback_state.set_best_weights(others, told["best"])


def _run_state(checkpoint: Checkpoint) -> RunState:
    names = [field.name for field in dataclasses.fields(RunState)]
    return RunState(**{name: checkpoint.meta[name] for name in names})
