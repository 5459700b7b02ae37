"""What a worker of a ps job runs of a program, in graph: a range of steps, or a step's outputs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.training.engines.reads import read_together
from tfdist.training.engines.totals import require_added
from tfdist.training.engines.update_clock import UpdateClock
from tfdist.training.engines.work import told
from tfdist.training.feed import Part
from tfdist.training.keras_compat import UpdateCounts
from tfdist.training.profile import Phases, PsProfile
from tfdist.training.program import StepProgram, run_replica


class PieceGraph:
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
        """Returns what the first step returns."""
        first, last = numbers[0], numbers[1]
        part = self._program.feed.worker_parts(data, first, last)(first)
        found = self._step(first, part, ())[0]
        read_together(tf.compat.v1.get_default_graph().get_operations())
        return found

    def steps(self, data: Any, numbers: tf.Tensor) -> Any:
        """Runs the steps; returns what `Work.take` takes apart, what was recorded, and where steps
        are profiled, when the parts of each were done.
        """
        program, clock, profile = self._program, self._clock, self._profile
        first, last = numbers[0], numbers[1]
        recorder = program.recorder
        part_of = program.feed.worker_parts(data, first, last)
        rows = recorder.rows(last - first) if recorder else []
        ages = clock.begin() if clock else []
        times = [tf.TensorArray(tf.float64, tf.cast(last - first, tf.int32))] * bool(profile)

        def body(
            step: tf.Tensor, kept: Any, rows: Any, ages: Any, times: Any, counts: Any, *totals: Any
        ) -> Any:
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            phases = Phases(step) if profile else None
            part = part_of(step)
            if recorder:
                rows = list(recorder.noted(rows, step - first, [part]))
            updates, before_step = UpdateCounts(counts), totals
            one_step = functools.partial(self._step, step, part, totals, phases, updates)
            if clock:
                (outputs, totals), ages = clock.step(ages, work=one_step)
            else:
                outputs, totals = one_step()
            self.counted, self.counts_each = updates.followed, updates.each
            if profile and phases:
                at = tf.cast(step - first, tf.int32)
                times = [array.write(at, phases.end()) for array in times]
            traced = graph.get_operations()[before:]
            require_added(program.metrics, before_step, totals, operations=traced)
            read_together(traced)
            if clock:
                clock.look_first(traced)
            if profile and phases:
                profile.links = phases.links()
            if program.keep_logs:
                kept = self._logs(outputs)
            return step + 1, kept, rows, ages, times, updates.after(), *totals

        zeros = [tf.zeros(tuple(v.shape), v.dtype) for v in program.metrics]
        kept, rows, ages, times, _, *totals = tf.while_loop(
            lambda step, *_: step < last,
            body,
            [first, tf.zeros([0]), rows, ages, times, numbers[2:], *zeros],
            shape_invariants=[
                tf.TensorShape([]),
                tf.TensorShape([None]),
                [tf.TensorShape(None) for _ in rows],
                [tf.TensorShape([]) for _ in ages],
                [tf.TensorShape(None) for _ in times],
                tf.TensorShape([None]),
                *(zero.shape for zero in zeros),
            ],
            parallel_iterations=1,
        )[1:]
        stale = clock.staleness(ages) if clock else tf.zeros([0])
        numbers = told(totals, kept, stale)
        return numbers, [row.stack() for row in rows], *(t.stack() for t in times)

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
        """Runs one step; returns what it returned, and the metric totals after it."""
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
                    at_door=phases.gradients if phases else None,
                    counts=counts,
                )
            returned.append(outputs)

        self._strategy.run(in_replica)
        return returned[0], [local[id(v)] for v in program.metrics] if totals else ()


def _known_shape(log: tf.Tensor, *, name: str) -> tuple[int, ...]:
    if log.shape.is_fully_defined():
        return tuple(log.shape.as_list())
    raise UsageError(
        "step",
        received=f"{name!r} of shape {log.shape} from a step",
        expected="scalars, or tensors whose shape is known when the step is traced, under ps",
        fix=f"return a figure of it, such as tf.reduce_mean({name})",
    )
