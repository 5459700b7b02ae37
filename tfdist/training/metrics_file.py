"""Lines of `metrics.jsonl`, which every `fit` with a run directory writes, and job probes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist.errors import EXIT_OK, TfdistError
from tfdist.options import TRIAL, JobOptions
from tfdist.outputs.run_directory import RunDirectory
from tfdist.strategy import Job, barrier, current_job
from tfdist.training.callbacks import writes_files
from tfdist.training.epochs import EpochPlan
from tfdist.training.program import engine_class
from tfdist.training.run_settings import fit_by
from tfdist.training.trackers import warn

_fits = itertools.count(1)
_of_later_fits: list[Mapping[str, Any]] = []
"""Lines of an earlier attempt, kept for the fits of this program that may resume them."""


class MetricsFile(keras.callbacks.Callback):
    """Callback that appends a line to `metrics.jsonl` at the end of each epoch.

    A resumed run first removes the lines that it repeats. A later `fit` of the program continues
    the counts of steps, examples and epochs. Its lines have the field ``fit`` with its number.

    Args:
      directory: run directory.
      plan: epochs of the run.
      fit: number of the `fit` in its program (default: 1).
      initial_epoch: same as in `fit` (default: 0).

    Attributes:
      first_step: first step of this process, `None` before it is known.
      step: number of steps done in the run.
    """

    once_a_range = chief_only = writes_metrics = True
    is_required = False
    """Whether an error of the file ends the training. If not, it is a warning."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: EpochPlan,
        *,
        fit: int = 1,
        initial_epoch: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._plan = plan
        self._fit = fit
        self._initial_epoch = initial_epoch
        self._clock = clock
        self._is_broken = False
        self._before: Mapping[str, int] = {}
        self._epoch = 0
        self._ranges: list[tuple[int, float]] = []
        self._epoch_ranges: list[tuple[int, float]] = []
        self._range_start = (0, 0.0)
        self.first_step: int | None = None
        self.step = 0

    @property
    def examples_per_second(self) -> float | None:
        """Training throughput, without validation and without the first block (tracing)."""
        return _rate(self._ranges[1:]) or _rate(self._ranges)

    @property
    def examples_per_second_of_epoch(self) -> float | None:
        """Training throughput of the current epoch, without validation."""
        return _rate(self._epoch_ranges)

    def resumed_at(self, step: int) -> None:
        """Remove the lines that the resumed run repeats. Call it before the first step."""
        self.first_step = self.step = step
        self._change(lambda: self._keep_until(step))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._epoch_ranges = epoch, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = self._plan.step_starts[self._epoch] + batch
        if self.first_step is None:
            self.resumed_at(step)
        self._range_start = (self._plan.examples_before(step), self._clock())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step = self._plan.step_starts[self._epoch] + batch + 1
        before, start = self._range_start
        done = (self._plan.examples_before(self.step) - before, self._clock() - start)
        self._ranges.append(done)
        self._epoch_ranges.append(done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._change(lambda: self._append(epoch, logs or {}))

    def _append(self, epoch: int, logs: Mapping[str, Any]) -> None:
        if len(self._ranges) == len(self._epoch_ranges):  # the first epoch may have a line already
            self._keep_until(self._plan.step_starts[epoch])
        self._directory.path.mkdir(parents=True, exist_ok=True)  # another host than the launcher's
        job = current_job()
        workers = engine_class(job).worker_steps(job) if job is not None else {}
        line: dict[str, Any] = {
            "step": self.step,
            "examples": self._plan.examples_before(self.step),
            "virtual_epoch": epoch + 1,
        }
        self._directory.append_metrics(
            {
                **{name: value + self._before.get(name, 0) for name, value in line.items()},
                **logs,
                **self._learning_rate(),
                "examples_per_second": self.examples_per_second_of_epoch,
                **({"worker_steps": workers} if workers else {}),
                **({"fit": self._fit} if self._fit > 1 else {}),
            }
        )

    def _keep_until(self, step: int) -> None:
        """Keep the lines of earlier fits, and the lines of this `fit` up to its step `step`."""
        lines = [*self._directory.read_metrics(), *_of_later_fits]
        kept = [line for line in lines if line.get("fit", 1) < self._fit]
        if kept:
            first = self._plan.step_starts[min(self._initial_epoch, self._plan.num_epochs)]
            self._before = {
                "step": kept[-1]["step"] - first,
                "examples": kept[-1]["examples"] - self._plan.examples_before(first),
                "virtual_epoch": kept[-1]["virtual_epoch"] - self._initial_epoch,
            }
        last = step + self._before.get("step", 0)
        kept += [ln for ln in lines if ln.get("fit", 1) == self._fit and ln["step"] <= last]
        _of_later_fits[:] = [line for line in lines if line.get("fit", 1) > self._fit]
        if kept or self._directory.metrics_file.exists():  # the last line may be truncated
            self._directory.write_metrics(kept)

    def _learning_rate(self) -> dict[str, float]:
        optimizer: Any = getattr(self.model, "optimizer", None)
        rate = getattr(optimizer, "learning_rate", None)  # a MultiOptimizer has several
        if optimizer is None or rate is None or not optimizer.built:
            return {}
        return {"learning_rate": float(keras.ops.convert_to_numpy(rate))}

    def _change(self, change: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            change()
        except (TfdistError, OSError, LookupError, TypeError) as error:
            if self.is_required:
                raise
            self._is_broken = True
            warn(f"{self._directory.metrics_file}: not written", error)


def metrics_file(
    callbacks: Sequence[Any], plan: EpochPlan, *, job: Job, initial_epoch: int
) -> list[keras.callbacks.Callback]:
    """Return [the writer of `metrics.jsonl`], or [] without a directory or with another writer."""
    options = job.config.options if job.config else JobOptions()
    # In a sweep's trial, only the fits of its tuner write. `tfdist.fit` in the tuner comes here.
    is_other = TRIAL in os.environ and fit_by.get() is None
    has_writer = any(getattr(c, "writes_metrics", False) for c in callbacks)
    if options.run_dir is None or has_writer or is_other:
        return []
    directory = RunDirectory(options.run_dir)
    if options.probe_s is not None:
        return [Probe(directory if job.is_chief else None, plan, limit_s=options.probe_s)]
    return [MetricsFile(directory, plan, fit=next(_fits), initial_epoch=initial_epoch)]


def _rate(ranges: list[tuple[int, float]]) -> float | None:
    seconds = sum(elapsed for _, elapsed in ranges)
    return sum(examples for examples, _ in ranges) / seconds if seconds > 0 else None


# Measurement of a `fit` for `tfdist launch --probe`.


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
