"""Progress and metrics that `tfdist.train` reports during a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.tensorboard import ScalarWriter, StepProfiler
from tfdist.outputs.terminal import ProgressDisplay
from tfdist.training.epochs import EpochPlan

_LOG = logging.getLogger(__name__)


class RunReporter(keras.callbacks.ProgbarLogger):
    """Writes `metrics.jsonl` and TensorBoard scalars, and moves the progress display.

    A `ProgbarLogger`, and so: run on the chief alone, called once a range of steps rather than at
    every batch, and in place of Keras' own bar. `worker_steps` returns the steps that each worker
    of a ps job has done since this process started.
    """

    once_a_range = True

    def __init__(
        self,
        directory: RunDirectory,
        plan: EpochPlan,
        *,
        display: ProgressDisplay,
        profiler: StepProfiler | None = None,
        worker_steps: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._plan = plan
        self._display = display
        self._profiler = profiler
        self._worker_steps = worker_steps
        self._clock = clock
        self.log_dir = str(directory.tensorboard)
        self._scalars = ScalarWriter(directory.tensorboard)
        self._epoch = 0
        self._ranges: list[tuple[int, float]] = []
        self._epoch_ranges: list[tuple[int, float]] = []
        self._range_start = (0, 0.0)
        self.first_step: int | None = None
        self.step = 0
        self.logs: dict[str, Any] = {}

    @property
    def examples_per_second(self) -> float | None:
        """Training throughput, validation and the first range, which traces, left out."""
        return _rate(self._ranges[1:]) or _rate(self._ranges)

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def on_train_begin(self, logs: Any = None) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._epoch_ranges = epoch, []

    def resumed_at(self, step: int) -> None:
        """Withdraw the lines of what the run is about to do again; before its first step."""
        self.first_step = self.step = step
        self._directory.drop_metrics_after(step)
        self._display.begin(step=step, examples=self._plan.examples_before(step))

    def next_step(self, step: int) -> int | None:
        """The next step at which a range should end, so that a profile is of its very steps."""
        return self._profiler.next_step(step) if self._profiler else None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = self._plan.step_starts[self._epoch] + batch
        if self.first_step is None:
            self.resumed_at(step)
        if self._profiler is not None:
            self._profiler.before(step)
        self._range_start = (self._plan.examples_before(step), self._clock())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step = self._plan.step_starts[self._epoch] + batch + 1
        examples, (before, start) = self._plan.examples_before(self.step), self._range_start
        done = (examples - before, self._clock() - start)
        self._ranges.append(done)
        self._epoch_ranges.append(done)
        if self._profiler is not None:
            self._profiler.after(self.step)
        self._display.update(step=self.step, examples=examples, logs=logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        examples = self._plan.examples_before(self.step)
        self._display.update(step=self.step, examples=examples, logs=logs)
        if self.step != self._plan.step_starts[epoch + 1]:
            _LOG.info("stopped at step %d, inside virtual epoch %d", self.step, epoch + 1)
            return
        self.logs = dict(logs or {})
        if not self._ranges:  # only its validation was left to do, and may have been done before
            self._directory.drop_metrics_after(self.step - 1)
        rate, workers = _rate(self._epoch_ranges), dict(self._worker_steps())
        self._directory.append_metrics(
            {
                "step": self.step,
                "examples": examples,
                "virtual_epoch": epoch + 1,
                **self.logs,
                "examples_per_second": rate,
                **({"worker_steps": workers} if workers else {}),
            }
        )
        scalars = {n: v for n, v in self.logs.items() if isinstance(v, (int, float))}
        self._scalars.write(self.step, scalars | ({"examples_per_second": rate} if rate else {}))

    def on_train_end(self, logs: Any = None) -> None:
        self.close()

    def on_test_begin(self, logs: Any = None) -> None:
        pass

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        pass

    def on_test_end(self, logs: Any = None) -> None:
        pass

    def close(self) -> None:
        """End the display, the profile and the event file, also after an error."""
        if self._profiler is not None:
            self._profiler.close()
        self._display.end()
        self._scalars.close()


def _rate(ranges: list[tuple[int, float]]) -> float | None:
    seconds = sum(elapsed for _, elapsed in ranges)
    return sum(examples for examples, _ in ranges) / seconds if seconds > 0 else None
