"""A program as a chief hands it out in pieces, and what comes back of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training.engines.piece import Done, Place
from tfdist.training.program import StepProgram


@dataclasses.dataclass(kw_only=True, slots=True)
class Work:
    """A program, ready to be handed out, and what its steps have told.

    Attributes:
      closure: traced, of a `PieceGraph`.
      dataset: makes what a worker iterates over.
      log_shapes: of the last step's logs, by name, in the order in which they are told.
      counted: the counts of the optimizers that each step applies.
      counts_each: what a step adds to each of them.
      num_totals: how many numbers the metrics of the program have.
      data: the workers' iterators, each with the life of the worker in which it was made.
      totals: of the metrics since they were reset, None where nothing has been told.
      logs: of the last step that was told of.
      counts_of_step_0: what the optimizers count before it, None until a step is run.
      counts_at_rest: what they counted when no step was under way any more, None before.
    """

    closure: Callable[..., Any]
    dataset: Callable[[], tf.data.Dataset]
    log_shapes: dict[str, tuple[int, ...]]
    counted: list[Any]
    counts_each: np.ndarray
    num_totals: int
    training: bool
    data: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)
    totals: np.ndarray | None = None
    logs: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts_of_step_0: np.ndarray | None = None
    counts_at_rest: np.ndarray | None = None

    def count_from(self, step: int) -> None:
        """Has what optimizers count follow the step from here on, while none is under way.

        They go on from where this program's steps have brought them, unless somebody has changed
        them since `rests`, such as another program of the same optimizer or a callback.
        """
        counts = self._counts()
        if self.counts_at_rest is None or np.any(counts != self.counts_at_rest):
            self.counts_of_step_0 = counts - step * self.counts_each

    def rests(self) -> None:
        """No step is under way any more."""
        self.counts_at_rest = self._counts()

    def _counts(self) -> np.ndarray:
        return np.array([count.numpy() for count in self.counted], np.int64)

    def __call__(self, first: int, last: int, place: Place) -> Any:
        """Runs the steps ``[first, last)`` on a worker; returns arrays."""
        life, given = self.data.get(place.worker_index, (0, None))
        if life != place.life:
            given = iter(self.dataset())
            self.data[place.worker_index] = place.life, given
        numbers = np.array([first, last], np.int64)
        if self.counts_of_step_0 is not None:
            numbers = np.append(numbers, self.counts_of_step_0 + first * self.counts_each)
        return keras.tree.map_structure(np.asarray, self.closure(given, tf.constant(numbers)))

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Takes in the totals and logs of a range; returns the staleness of its steps."""
        totals, rest = np.split(numbers, [self.num_totals])
        self.totals = totals if self.totals is None else self.totals + totals
        logs: dict[str, Any] = {}
        for name, shape in self.log_shapes.items():
            log, rest = np.split(rest, [math.prod(shape)])
            logs[name] = log.astype(np.float32).reshape(shape) if shape else float(log[0])
        self.logs = logs
        return rest.astype(np.int64)


def told(totals: list[tf.Tensor], logs: tf.Tensor, ages: tf.Tensor) -> tf.Tensor:
    """What `Work.take` takes apart: one vector, as each tensor would be a message of its own."""
    parts = [tf.reshape(tf.cast(part, tf.float64), [-1]) for part in (*totals, logs, ages)]
    return tf.concat(parts, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HandedOut:
    """The steps ``[first, last)`` of a program on their way, and where their result will be."""

    program: StepProgram
    work: Work
    first: int
    last: int
    future: Future[Done]


def require_sums(program: StepProgram) -> None:
    """Refuses metrics whose totals do not add up over pieces."""
    for variable in program.metrics:
        if variable.aggregation != "sum":
            raise UsageError(
                "metrics",
                received=f"a metric whose {variable.name} is combined by {variable.aggregation!r}",
                expected="totals that add up over workers, under strategy ps",
                fix="create the metric's variables with aggregation='sum'",
            )


def require_zeros(program: StepProgram) -> None:
    """Refuses metrics that do not begin at 0: each piece begins there."""
    for variable in program.metrics:
        if np.any(variable.numpy()):
            raise UsageError(
                "metrics",
                received=f"a metric whose {variable.path} does not begin at 0",
                expected="totals that add up over workers, each of which begins at 0, under ps",
                fix="have the metric's reset_state set its variables to 0",
            )
