"""Closure of a ps job: a range of a program's steps, traced once, and what its calls return."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import require
from tfdist.ps.clock import UpdateClock
from tfdist.ps.keras_compat import UpdateCounts
from tfdist.ps.messages import read_together
from tfdist.ps.profile import Phases, PsProfile
from tfdist.ps.workers import WorkerIncarnation
from tfdist.training.feed import Part
from tfdist.training.program import StepProgram, run_replica


@dataclasses.dataclass(kw_only=True, slots=True)
class Work:
    """A program, ready to be dispatched, and the results of its steps.

    Attributes:
      closure: traced, of a `UnitGraph`.
      dataset: makes what a worker iterates over.
      log_shapes: of the last step's logs, by name, in the order of their results.
      counted: the counts of the optimizers that each step applies.
      counts_each: what a step adds to each of them.
      num_totals: how many numbers the metrics of the program have.
      data: the workers' iterators, each with the life of the worker in which it was made.
      totals: of the metrics since they were reset, None before the first result.
      logs: of the last step with a result.
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
        """Have what optimizers count follow the step from here on, while none is under way.

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

    def __call__(self, first: int, last: int, incarnation: WorkerIncarnation) -> Any:
        """Run the steps ``[first, last)`` on a worker; return arrays."""
        life, given = self.data.get(incarnation.worker_index, (0, None))
        if life != incarnation.life:
            given = iter(self.dataset())
            self.data[incarnation.worker_index] = incarnation.life, given
        numbers = np.array([first, last], np.int64)
        if self.counts_of_step_0 is not None:
            numbers = np.append(numbers, self.counts_of_step_0 + first * self.counts_each)
        return keras.tree.map_structure(np.asarray, self.closure(given, tf.constant(numbers)))

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Take in the totals and log of a range; return the staleness of its steps."""
        totals, rest = np.split(numbers, [self.num_totals])
        self.totals = totals if self.totals is None else self.totals + totals
        logs: dict[str, Any] = {}
        for name, shape in self.log_shapes.items():
            log, rest = np.split(rest, [math.prod(shape)])
            logs[name] = log.astype(np.float32).reshape(shape) if shape else float(log[0])
        self.logs = logs
        return rest.astype(np.int64)


def encode_result(totals: list[tf.Tensor], logs: tf.Tensor, ages: tf.Tensor) -> tf.Tensor:
    """Encode for `Work.take` as one vector: each tensor would be a message of its own."""
    parts = [tf.reshape(tf.cast(part, tf.float64), [-1]) for part in (*totals, logs, ages)]
    return tf.concat(parts, 0)


class _Carried(NamedTuple):
    """What one step of a work unit hands to the next: tensors, and lists of them.

    Attributes:
      step: the next one.
      logs: of the step before, float32 ``[numbers]``.
      rows: what is recorded of the steps so far.
      ages: lists of what `UpdateClock.step` has found so far.
      times: of the steps so far, where they are profiled.
      counts: what each optimizer has counted, int64 ``[optimizers]``.
      totals: of the program's metrics.
    """

    step: tf.Tensor
    logs: tf.Tensor
    rows: list[Any]
    ages: list[tf.Tensor]
    times: list[Any]
    counts: tf.Tensor
    totals: list[tf.Tensor]


def _shapes(begin: _Carried) -> _Carried:
    """Return the shapes that hold after any number of steps."""
    any_shape, scalar, vector = tf.TensorShape(None), tf.TensorShape([]), tf.TensorShape([None])
    return _Carried(
        step=scalar,
        logs=vector,
        rows=[any_shape for _ in begin.rows],
        ages=[scalar for _ in begin.ages],
        times=[any_shape for _ in begin.times],
        counts=vector,
        totals=[zero.shape for zero in begin.totals],
    )


class UnitGraph:
    """A program as a worker runs it, to be traced once.

    Both functions take the worker's own iterator, and numbers, int64 ``[2 + optimizers]``: the
    first step, the one after the last, and what each optimizer has counted before the first.

    Attributes:
      log_shapes: of what a step returns, by name, once it is traced.
      counted: the counts of the optimizers that each step applies, once it is traced.
      counts_each: what a step adds to each of them.
    """

    def __init__(
        self,
        program: StepProgram,
        strategy: tf.distribute.Strategy,
        *,
        clock: UpdateClock | None = None,
        profile: PsProfile | None = None,
    ) -> None:
        self.log_shapes: dict[str, tuple[int, ...]] = {}
        self.counted: list[Any] = []
        self.counts_each: list[int] = []
        self._program = program
        self._strategy = strategy
        self._clock = clock
        self._profile = profile

    def outputs(self, data: Any, numbers: tf.Tensor) -> Any:
        """Return what the first step returns."""
        first, last = numbers[0], numbers[1]
        part = self._program.feed.worker_parts(data, first, last)(first)
        found = self._step(first, part, [])[0]
        read_together(tf.compat.v1.get_default_graph().get_operations())
        return found

    def steps(self, data: Any, numbers: tf.Tensor) -> Any:
        """Runs the steps; returns what `Work.take` takes apart, what was recorded, and where steps
        are profiled, when the parts of each were done.
        """
        first, last = numbers[0], numbers[1]
        part_of = self._program.feed.worker_parts(data, first, last)
        begin = self._begin(first, last, counts=numbers[2:])
        end = tf.while_loop(
            lambda carried: carried.step < last,
            lambda carried: [self._turn(carried, first, part_of)],
            [begin],
            shape_invariants=[_shapes(begin)],
            parallel_iterations=1,
        )[0]
        stale = self._clock.staleness(end.ages) if self._clock else tf.zeros([0])
        result = encode_result(end.totals, end.logs, stale)
        return result, [row.stack() for row in end.rows], *(times.stack() for times in end.times)

    def _begin(self, first: tf.Tensor, last: tf.Tensor, *, counts: tf.Tensor) -> _Carried:
        steps, recorder = last - first, self._program.recorder
        return _Carried(
            step=first,
            logs=tf.zeros([0]),
            rows=list(recorder.rows(steps)) if recorder else [],
            ages=self._clock.begin() if self._clock else [],
            times=[tf.TensorArray(tf.float64, tf.cast(steps, tf.int32))] if self._profile else [],
            counts=counts,
            totals=[tf.zeros(tuple(v.shape), v.dtype) for v in self._program.metrics],
        )

    def _turn(self, given: _Carried, first: tf.Tensor, part_of: Callable[..., Part]) -> _Carried:
        """Run one step, and rewire its messages once all of it is traced."""
        clock, profile, recorder = self._clock, self._profile, self._program.recorder
        graph = tf.compat.v1.get_default_graph()
        before, position = len(graph.get_operations()), given.step - first
        rows, ages, times = given.rows, given.ages, given.times
        phases = Phases(given.step) if profile else None
        part = part_of(given.step)
        if recorder:
            rows = list(recorder.noted(rows, position, [part]))
        updates = UpdateCounts(given.counts)
        one_step = functools.partial(self._step, given.step, part, given.totals, phases, updates)
        if clock:
            (outputs, totals), ages = clock.step(ages, work=one_step)
        else:
            outputs, totals = one_step()
        self.counted, self.counts_each = updates.followed, updates.each
        if phases:
            times = [array.write(tf.cast(position, tf.int32), phases.end()) for array in times]
        traced = graph.get_operations()[before:]
        read_together(traced)
        if clock:
            clock.look_first(traced)
        if profile and phases:
            profile.links = phases.links()
        return _Carried(
            step=given.step + 1,
            logs=self._logs(outputs) if self._program.keep_logs else given.logs,
            rows=rows,
            ages=ages,
            times=times,
            counts=updates.after(),
            totals=totals,
        )

    def _logs(self, outputs: dict[str, Any]) -> tf.Tensor:
        logs = {name: tf.cast(outputs[name], tf.float32) for name in sorted(outputs)}
        self.log_shapes.update({name: _known_shape(log, name=name) for name, log in logs.items()})
        return tf.concat([tf.reshape(log, [-1]) for log in logs.values()], 0)

    def _step(
        self,
        step: Any,
        part: Part,
        totals: Any,
        phases: Phases | None = None,
        counts: UpdateCounts | None = None,
        watcher: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Any]:
        """Run one step; return what it returned, and the metric totals after it."""
        program = self._program
        if phases:
            phases.batch(part.data)
        returned: list[Any] = []
        local = dict(zip(map(id, program.metrics), totals, strict=False))

        def in_replica() -> None:
            with watcher or nullcontext():
                outputs = run_replica(
                    program,
                    part,
                    step=step,
                    replica=0,
                    num_replicas=1,
                    local=local,
                    at_hook=phases.gradients if phases else None,
                    counts=counts,
                )
            returned.append(outputs)

        self._strategy.run(in_replica)
        return returned[0], [local[id(v)] for v in program.metrics] if totals else []


def _known_shape(log: tf.Tensor, *, name: str) -> tuple[int, ...]:
    require(
        log.shape.is_fully_defined(),
        "step",
        received=f"{name!r} of shape {log.shape} from a step",
        expected="scalars, or tensors whose shape is known when the step is traced, under ps",
        fix=f"return a figure of it, such as tf.reduce_mean({name})",
        code="unknown-shape",
    )
    return tuple(log.shape.as_list())
