"""Step blocks, for the training loop and for evaluation.

A step block is the group of steps that an engine runs in one call. `decide` selects the same block
in all tasks. `BlockRunner` runs it and then reads the model's metrics. `BlockLengthPolicy` sets the
maximum length of the next block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import phases
from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.strategy.group import require_same_place, sum_over_tasks
from tfdist.training.keras_compat import compiled
from tfdist.training.program import Engine, StepProgram, as_number, flat_logs, with_metric_logs
from tfdist.training.stop_requests import SIGNALS, StopRequests, signal_of

_BLOCK_S = 1.0
_GROWTH = 8
_LENGTH = re.compile(
    r"expected to contain (\d+|an infinite number of) elements? but "
    r"contained (?:only |at least )?(\d+)"
)
_LOCKED = re.compile(r"cache lockfile already exists \('(.+?)'\)")
_BAD_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of (\[.*?\))")


class BlockLengthPolicy:
    """Length of the next step block, chosen so that a block runs for about one second.

    The first block is one step, because its speed is unknown and it traces the program. Later
    blocks grow gradually.
    """

    def __init__(self) -> None:
        self._longest = 1
        self._rate: float | None = None
        self._steps, self._elapsed_s = 0, 0.0

    def steps(self) -> int:
        """Return the maximum number of steps of the next block."""
        if self._rate is None:
            return self._longest
        return min(max(1, int(self._rate * _BLOCK_S)), self._longest)

    @property
    def is_known(self) -> bool:
        """True if the measured speed sets the block length, so that blocks stop growing."""
        return self._rate is not None and self._rate * _BLOCK_S < self._longest

    def note(self, steps: int, *, elapsed_s: float, is_whole: bool = True) -> None:
        """Record that `steps` steps took `elapsed_s` seconds.

        `is_whole` is True if these are exactly the steps of one block. Other measurements say
        little about the speed, so they are added to the next measurement.
        """
        if steps >= self._longest:
            self._longest = steps * _GROWTH
        self._steps += steps
        self._elapsed_s += elapsed_s
        if self._steps and (is_whole or self._elapsed_s >= _BLOCK_S / 2):
            self._rate = self._steps / max(self._elapsed_s, 1e-6)
            self._steps, self._elapsed_s = 0, 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision before the next block, the same in every task.

    Attributes:
      last: first step after the block, set by the chief.
      stop: True if a callback of some task requests a stop.
      signum: signal that requested a stop in some task, or `None`.
      save: True if a time-based backup of the chief is due after the block.
      learning_rate: learning rate of the chief (NaN if it cannot be set).
      joins: worker of an elastic job that joins before the block, or `None`.
      shares: True if the states of the chief's own callbacks have changed.
    """

    last: int
    stop: bool
    signum: int | None = None
    save: bool = False
    learning_rate: float = math.nan
    joins: int | None = None
    shares: bool = False


def decide(
    job: Job,
    of_task: Callable[[], Decision],
    *,
    requests: StopRequests | None,
    of: str = "the next block of steps",
) -> Decision:
    """Combine the tasks' decisions into one. A collective, called `of` in messages.

    It calls `of_task` again if an elastic job has lost its chief.
    """
    mine, message = of_task(), np.zeros(6 + len(SIGNALS))
    if job.is_chief:
        message[:4] = mine.last, mine.save, mine.learning_rate, mine.shares
        message[4] = 0 if mine.joins is None else mine.joins + 1
    message[5] = mine.stop
    if requests is not None:
        message[6:] = requests.slots()
    last, save, rate, shares, joins, stop, *slots = sum_over_tasks(job, message, of=of)
    if not last:
        return decide(job, of_task, requests=requests, of=of)
    return Decision(
        last=int(last),
        stop=bool(stop > 0),
        signum=signal_of(slots),
        save=bool(save > 0),
        learning_rate=float(rate),
        joins=int(joins) - 1 if joins else None,
        shares=bool(shares),
    )


def any_task(job: Job, value: bool, *, of: str) -> bool:
    """Return True in every task if `value` is true in some task. A collective."""
    return bool(sum_over_tasks(job, np.array([float(value)]), of=of)[0])


class BlockRunner:
    """Runs a model's program block by block, and reads the metrics between blocks.

    Every training task creates a runner for each program and makes the same calls.

    Attributes:
      length: length policy of the next block.
      logs: result of the last step, if the program keeps it.
    """

    def __init__(
        self, model: keras.Model, job: Job, engine: Engine, program: StepProgram, *, phase: str
    ) -> None:
        self.model = model
        self.job = job
        self.engine = engine
        self.program = program
        self.length = BlockLengthPolicy()
        self.logs: dict[str, float] = {}
        self._phase = phase
        self._has_run = False
        self._read_metrics: Any = None

    def run(self, first: int, last: int, *, looked_at: bool) -> int:
        """Run the steps ``[first, last)`` and return the number of steps still running.

        If `looked_at` (a callback or a save follows), wait for all steps. Wrong labels and data
        that end too early are reported in one line.
        """
        engine, counts = self.engine, self.program.training
        # Each block renews the phase, so a long run is not mistaken for a hang.
        phases.enter(self._phase if self._has_run else "trace", step=first if counts else None)
        start, before = time.perf_counter(), engine.steps_under_way
        goes_on = self.length.is_known and not looked_at
        with naming_bad_data(self.program.feed):
            self.logs = engine.run(self.program, first, last, goes_on=goes_on)
        self._has_run = True
        elapsed_s, left = time.perf_counter() - start, engine.steps_under_way
        done = last - first + before - left
        self.length.note(done, elapsed_s=elapsed_s, is_whole=not before and not left)
        phases.enter(self._phase, step=last if counts else None)
        return left

    def finish(self) -> None:
        """Wait for running steps, and keep the last step's logs."""
        if self.engine.steps_under_way:
            with naming_bad_data(self.program.feed):
                self.logs = self.engine.finish(self.program)

    def metrics(self, logs: Mapping[str, float]) -> dict[str, Any]:
        """Return the model's metrics over all replicas. A collective.

        As in Keras, `logs` of a custom step replace the metrics if their names differ from the
        names of the model's metrics.
        """
        require_same_place(self.job, of="metrics of the run")
        self.engine.publish_metrics(self.program)
        if self._read_metrics is None:
            with self.job.strategy.scope():
                self._read_metrics = compiled(self._metrics_in_graph)
        results, updated = self._read_metrics()
        metrics = {name: as_number(value) for name, value in results.items()}
        if not logs or set(logs) == set(metrics):
            return metrics
        # The log of a metric covers only one replica, or the last block of one worker.
        seen = {name for name, moved in updated.items() if moved.numpy()}
        of_metrics = {name: metrics[name] for name in logs if name in seen & set(metrics)}
        return with_metric_logs({**logs, **of_metrics}, self.program, self.job)

    def reset_metrics(self) -> None:
        """Reset every metric to zero on every replica."""
        self.model.reset_metrics()
        self.engine.reset_metrics()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the optimizer if it can be set, else NaN (with a schedule)."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        return float(rate.numpy()) if isinstance(rate, keras.Variable) else math.nan

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not math.isnan(value) and np.float32(value) != np.float32(self.learning_rate):
            self.model.optimizer.learning_rate = value

    def _metrics_in_graph(self) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Return each metric's result and whether a step has updated the metric, both by name.

        The second dict is empty unless the program keeps the step's logs.
        """
        results = flat_logs(self.model.get_metrics_result())
        updated: dict[str, tf.Tensor] = {}
        for metric in self.model.metrics if self.program.keep_logs else ():
            result = metric.result()
            moved = tf.constant(False)
            for variable in metric.variables:
                moved |= keras.ops.any(keras.ops.not_equal(variable, 0))
            names = flat_logs(result) if isinstance(result, dict) else [metric.name]
            updated |= dict.fromkeys(names, moved)
        return {name: tf.convert_to_tensor(result) for name, result in results.items()}, updated


@contextlib.contextmanager
def naming_bad_data(feed: Any) -> Iterator[None]:
    """Raise a one-line UsageError for data that end too early, and for a wrong label.

    An error of Python code that reads data for the feed is raised unchanged.
    """
    try:
        yield
    except tf.errors.OpError as error:
        has_ended = isinstance(error, tf.errors.OutOfRangeError)
        named = (feed.failure if has_ended else None) or _bad_data(error)
        if named is None:
            raise
        raise named from None


def _bad_data(error: tf.errors.OpError) -> UsageError | None:
    """Return an error about the data, or `None` if the error has another cause."""
    text = str(error)
    if isinstance(error, tf.errors.OutOfRangeError):
        return UsageError(
            "data",
            "the dataset ended before the requested step",
            fix="pass a function to from_generator, so that each pass has a new iterator. Give "
            "every task the same number of batches",
            code="data-ended",
        )
    if isinstance(error, tf.errors.FailedPreconditionError) and (found := _LENGTH.search(text)):
        return UsageError(
            "data",
            f"a pass over the dataset has {found[2]} batches, but its cardinality is {found[1]}",
            fix="delete the files of its cache or snapshot, which a stopped program may have left "
            "incomplete, or correct tf.data.experimental.assert_cardinality",
            code="data-ended",
        )
    if isinstance(error, tf.errors.AlreadyExistsError) and (found := _LOCKED.search(text)):
        return UsageError(
            "data",
            f"the file cache of the dataset is locked by another reader or a killed program: "
            f"{found[1]}",
            fix="delete this file if no program fills the cache, and use a file name for each task",
            code="unreadable",
        )
    if isinstance(error, tf.errors.InvalidArgumentError) and (found := _BAD_LABEL.search(text)):
        return UsageError(
            "labels",
            f"the label {found[1]} is not in the range {found[2]}",
            fix="number the classes from 0, or set the output layer's units to the number of "
            "classes",
            code="label-range",
        )
    return None
