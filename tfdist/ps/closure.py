"""Closure of a ps job: a range of a program's steps, traced once, and what its calls return."""

from __future__ import annotations

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
from tfdist.training.keras_compat import adding_in_order, compiled
from tfdist.training.program import StepProgram, run_replica


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


class Work:
    """A program, traced for the workers of a job, and the results of its steps.

    Attributes:
      totals: of the metrics since they were reset, None before the first result.
      logs: of the last step with a result.
    """

    def __init__(
        self,
        program: StepProgram,
        strategy: tf.distribute.Strategy,
        *,
        clock: UpdateClock | None = None,
        profile: PsProfile | None = None,
        outputs: bool = False,
    ) -> None:
        """Trace the program: here once, as many threads at once might each trace it."""
        self.totals: np.ndarray | None = None
        self.logs: dict[str, Any] = {}
        self._program = program
        self._strategy = strategy
        self._clock = clock
        self._profile = profile
        self._num_totals = sum(int(np.prod(v.shape)) for v in program.metrics)
        self._log_shapes: dict[str, tuple[int, ...]] = {}
        # Counts of the optimizers that each step applies, and what it adds to each of them; their
        # values before step 0, and when no step was under way any more.
        self._counted: list[Any] = []
        self._counts_each = np.zeros(0, np.int64)
        self._counts_of_step_0: np.ndarray | None = None
        self._counts_at_rest: np.ndarray | None = None
        # Each worker's iterator, with the life of the worker in which it was made.
        self._data: dict[int, tuple[int, Any]] = {}
        self._dataset = compiled(program.feed.worker_dataset).get_concrete_function()
        iterator = tf.data.IteratorSpec(self._dataset.structured_outputs.element_spec)
        # The first step, the one after the last, and each optimizer's count before the first.
        numbers = tf.TensorSpec([None], tf.int64)
        traced = compiled(self._outputs if outputs else self._steps)
        self._closure = traced.get_concrete_function(iterator, numbers)

    def count_from(self, step: int) -> None:
        """Have what optimizers count follow the step from here on, while none is under way.

        They go on from where this program's steps have brought them, unless somebody has changed
        them since `rests`, such as another program of the same optimizer or a callback.
        """
        counts = self._counts()
        if self._counts_at_rest is None or np.any(counts != self._counts_at_rest):
            self._counts_of_step_0 = counts - step * self._counts_each

    def rests(self) -> None:
        """Note that no step is under way any more."""
        self._counts_at_rest = self._counts()

    def _counts(self) -> np.ndarray:
        return np.array([count.numpy() for count in self._counted], np.int64)

    def __call__(self, first: int, last: int, incarnation: WorkerIncarnation) -> Any:
        """Run the steps ``[first, last)`` on a worker; return what comes of them, on this task."""
        life, given = self._data.get(incarnation.worker_index, (0, None))
        if life != incarnation.life:
            given = iter(self._dataset())
            self._data[incarnation.worker_index] = incarnation.life, given
        numbers = np.array([first, last], np.int64)
        if self._counts_of_step_0 is not None:
            numbers = np.append(numbers, self._counts_of_step_0 + first * self._counts_each)
        with adding_in_order():
            found = self._closure(given, tf.constant(numbers))
        return keras.tree.map_structure(_fetched, found)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Take in the totals and log of a range; return the staleness of its steps."""
        totals, rest = np.split(numbers, [self._num_totals])
        self.totals = totals if self.totals is None else self.totals + totals
        logs: dict[str, Any] = {}
        for name, shape in self._log_shapes.items():
            log, rest = np.split(rest, [math.prod(shape)])
            logs[name] = log.astype(np.float32).reshape(shape) if shape else float(log[0])
        self.logs = logs
        return rest.astype(np.int64)

    def _outputs(self, data: Any, numbers: tf.Tensor) -> Any:
        """Return what the first step returns."""
        first, last = numbers[0], numbers[1]
        part = self._program.feed.worker_parts(data, first, last)(first)
        found = self._step(first, part, [])[0]
        read_together(tf.compat.v1.get_default_graph().get_operations())
        return found

    def _steps(self, data: Any, numbers: tf.Tensor) -> Any:
        """Run the steps; return what `take` takes apart, what was recorded, and where steps are
        profiled, when the parts of each were done.
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
        # As one vector: each tensor would be a message of its own.
        parts = [tf.reshape(tf.cast(p, tf.float64), [-1]) for p in (*end.totals, end.logs, stale)]
        result = tf.concat(parts, 0)
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
        self._counted, self._counts_each = updates.followed, np.array(updates.each, np.int64)
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
        self._log_shapes.update({name: _known_shape(log, name=name) for name, log in logs.items()})
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


def _fetched(value: Any) -> Any:
    """Return a worker's result as an array or a number; what is ragged or sparse stays so."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
        return tf.nest.map_structure(
            lambda part: tf.constant(part.numpy()), value, expand_composites=True
        )


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
