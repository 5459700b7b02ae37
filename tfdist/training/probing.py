"""Measurement of a `fit` for `tfdist launch --probe`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import EXIT_OK
from tfdist.outputs.run_directory import RunDirectory
from tfdist.strategy import Job, barrier
from tfdist.training.callbacks import writes_files
from tfdist.training.epochs import EpochPlan

_EVERY_S = 0.5
_FEWEST_LINES = 6  # for steps that take seconds


def shortened(
    job: Job, callbacks: list[Any], validation_steps: int | None, *, batches: int
) -> tuple[list[Any], int | None]:
    """Return the callbacks and validation steps of a `fit`, fewer in a trial run.

    In a trial run, `batches` is set or the launcher measures the job. The run writes no files.
    """
    if not batches and (job.config is None or job.config.options.probe_s is None):
        return callbacks, validation_steps
    most = batches or 1
    kept = [callback for callback in callbacks if not writes_files(callback)]
    return kept, min(most, validation_steps or most)


class Probe(keras.callbacks.Callback):
    """Callback that measures the training, and then ends the program in all tasks.

    The chief appends lines with ``seconds`` and ``examples`` to `metrics.jsonl`. They exclude
    the first block, which traces, and all validations.

    Args:
      directory: run directory, `None` in tasks that do not write.
      plan: epochs of the run.
      limit_s: least seconds of training to measure.
      clock: function that returns seconds.
    """

    once_a_range = writes_metrics = True

    def __init__(
        self,
        directory: RunDirectory | None,
        plan: EpochPlan,
        *,
        limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._plan = plan
        self._limit_s = limit_s
        self._clock = clock
        self._epoch = self._examples = 0
        self._seconds: float | None = None
        self._lines, self._written_s = 0, 0.0
        self._began_s, self._before = 0.0, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began_s, self._before = self._clock(), self._examples_before(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._seconds is None:
            self._seconds = 0.0
            self._write()
            return
        self._seconds += self._clock() - self._began_s
        self._examples += self._examples_before(batch + 1) - self._before
        if self._seconds - self._written_s >= _EVERY_S:
            self._write()
        if self._seconds >= self._limit_s and self._lines >= _FEWEST_LINES:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """End the program: its later code may need files that were not written."""
        barrier()
        raise SystemExit(EXIT_OK)

    def _examples_before(self, batch: int) -> int:
        return self._plan.examples_before(self._plan.step_starts[self._epoch] + batch)

    def _write(self) -> None:
        assert self._seconds is not None
        self._lines, self._written_s = self._lines + 1, self._seconds
        if self._directory is not None:
            self._directory.path.mkdir(parents=True, exist_ok=True)
            line = {"seconds": self._seconds, "examples": self._examples}
            self._directory.append_metrics(line)
