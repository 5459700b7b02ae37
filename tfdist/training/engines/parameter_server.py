"""The chief hands ranges of steps to workers, which update the variables on the ps.

A step is one update by one worker. Each worker keeps the arrays it was sent once, and the metrics
of its range; it returns them with the range, and the chief adds them up. Nothing that many workers
write at once decides a count.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.training.engines.crew import crew_of
from tfdist.training.engines.in_flight import steps_of_a_piece
from tfdist.training.engines.piece import Done, Place
from tfdist.training.engines.reads import read_together
from tfdist.training.engines.update_clock import UpdateClock
from tfdist.training.feed import Part
from tfdist.training.keras_compat import compiled
from tfdist.training.profile import Phases, PsProfile, profile_of
from tfdist.training.program import StepProgram, run_replica

_CLOSURE_STEPS = 32
_CLOSURES_PER_WORKER = 2
_PATIENCE_S = 60.0


@dataclasses.dataclass(kw_only=True, slots=True)
class _Work:
    """A program, ready to be handed out.

    `data` are the workers' iterators, each with the life of the worker in which it was made.
    """

    closure: Callable[..., Any]
    dataset: Callable[[], tf.data.Dataset]
    log_names: list[str]
    training: bool
    data: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict)
    totals: np.ndarray | None = None

    def __call__(self, first: int, last: int, place: Place) -> Any:
        """Runs the steps ``[first, last)`` on a worker; returns arrays."""
        life, given = self.data.get(place.worker_index, (0, None))
        if life != place.life:
            given = iter(self.dataset())
            self.data[place.worker_index] = place.life, given
        bounds = tf.constant(first, tf.int64), tf.constant(last, tf.int64)
        return keras.tree.map_structure(np.asarray, self.closure(given, *bounds))


class ParameterServerEngine:
    """Runs a range of steps as pieces of some steps each. Called by the chief alone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        patience_s = job.config.options.startup_timeout_s if job.config else _PATIENCE_S
        self._crew = crew_of(job.strategy, patience_s=patience_s)
        self._workers = len(self._crew.shares)
        self._clock: UpdateClock | None = None
        self._applied_before = self._crew.account.applied
        self._work: weakref.WeakKeyDictionary[StepProgram, _Work] = weakref.WeakKeyDictionary()
        self._profile: PsProfile | None = None
        if job.config and job.config.options.profile_ps:
            self._profile = profile_of(job.strategy)

    def run(self, program: StepProgram, first: int, last: int) -> dict[str, float]:
        """Runs the steps ``[first, last)`` on whatever workers there are; waits for all."""
        work = self._prepared(program, self._range_of)
        each = -(-(last - first) // (self._workers * _CLOSURES_PER_WORKER))
        each = min(max(each, 1), self._most_steps(program))
        spans = [(start, min(start + each, last)) for start in range(first, last, each)]
        start_s = time.perf_counter()
        bound = program.max_staleness
        waiting = [self._hand_out(work, *span, max_staleness=bound) for span in spans]
        try:
            done = [piece.result() for piece in waiting]
        except BaseException:
            self._crew.drop()
            raise
        if program.training:
            self._account(spans, done)
        if self._profile is not None and program.training:
            times = [(piece.worker_index, piece.value[-1]) for piece in done]
            self._profile.add(times, wall_s=time.perf_counter() - start_s)
        totals = np.sum([piece.value[0] for piece in done], axis=0)
        work.totals = totals if work.totals is None else work.totals + totals
        if program.recorder is not None:
            for span, piece in zip(spans, done, strict=True):
                rows, worker = piece.value[2], piece.worker_index
                program.recorder.write(*span, rows, worker=worker, begun=piece.times)
        return dict(zip(work.log_names, map(float, done[-1].value[1]), strict=True))

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yields each step's outputs, in order; a few steps a worker are under way at a time."""
        work = self._prepared(program, self._output_closure)
        waiting: collections.deque[Future[Done]] = collections.deque()
        for step in range(first, last):
            waiting.append(self._hand_out(work, step, step + 1))
            if len(waiting) > 2 * self._workers:
                yield waiting.popleft().result().value
        while waiting:
            yield waiting.popleft().result().value

    def reset_metrics(self) -> None:
        """Forgets the totals that workers have returned."""
        for work in self._work.values():
            work.totals = None

    def settle_metrics(self, program: StepProgram) -> None:
        """Puts the totals that workers have returned into the model's metrics."""
        work = self._work.get(program)
        if work is None or work.totals is None:
            return
        start = 0
        for variable in program.metrics:
            size = int(np.prod(variable.shape))
            part = work.totals[start : start + size].reshape(variable.shape)
            variable.assign(part.astype(variable.dtype))
            start += size

    def take_metrics(self, program: StepProgram) -> None:
        """Starts from the totals that are in the model's metrics."""
        flat = [np.asarray(v.numpy(), np.float64).ravel() for v in program.metrics]
        self._prepared(program, self._range_of).totals = np.concatenate([*flat, np.zeros(0)])

    def _hand_out(
        self, work: _Work, first: int, last: int, *, max_staleness: int | None = None
    ) -> Future[Done]:
        steps = last - first if work.training else 0
        function = functools.partial(work, first, last)
        return self._crew.submit(function, steps=steps, max_staleness=max_staleness)

    def _most_steps(self, program: StepProgram) -> int:
        return steps_of_a_piece(
            most=_CLOSURE_STEPS, workers=self._workers, max_staleness=program.max_staleness
        )

    def _account(self, spans: Sequence[tuple[int, int]], done: Sequence[Done]) -> None:
        account, clock = self._crew.account, self._clock
        for span, piece in zip(spans, done, strict=True):
            account.done(*span, times=piece.times, staleness=piece.value[3])
        if clock is not None:
            account.applied = self._applied_before + clock.applied

    def _prepared(self, program: StepProgram, make: Callable[..., Any]) -> _Work:
        work = self._work.get(program)
        if work is None:
            _require_sums(program)
            names: list[str] = []
            with self._job.strategy.scope():
                if program.training and self._clock is None:
                    self._clock = UpdateClock()
                dataset = compiled(program.feed.worker_dataset).get_concrete_function()
                iterator = tf.data.IteratorSpec(dataset.structured_outputs.element_spec)
                bound = tf.TensorSpec([], tf.int64)
                # Traced here once: called by many threads at once it might be traced by each.
                closure = compiled(make(program, names))
                closure = closure.get_concrete_function(iterator, bound, bound)
            work = _Work(
                closure=closure, dataset=dataset, log_names=names, training=program.training
            )
            self._work[program] = work
        return work

    def _range_of(self, program: StepProgram, names: list[str]) -> Callable[..., Any]:
        shapes = [tuple(v.shape) for v in program.metrics]
        recorder = program.recorder
        clock = self._clock if program.training else None
        profile = self._profile if program.training else None

        def run_range(data: Any, first: tf.Tensor, last: tf.Tensor) -> Any:
            part_of = program.feed.worker_parts(data, first, last)
            logs: list[tf.Tensor] = []
            rows = recorder.rows(last - first) if recorder else []

            start, now, updates = clock.begin(first) if clock else (first, first, [])
            times = [tf.TensorArray(tf.float64, tf.cast(last - first, tf.int32))] * bool(profile)

            def body(
                step: tf.Tensor, kept: Any, rows: Any, updates: Any, times: Any, *totals: Any
            ) -> Any:
                graph = tf.compat.v1.get_default_graph()
                before = len(graph.get_operations())
                phases = Phases(step) if profile else None
                part = part_of(step)
                if recorder:
                    rows = list(recorder.noted(rows, step - first, [part]))
                one_step = functools.partial(self._step, program, step, part, totals, phases)
                if clock:
                    (outputs, totals), updates = clock.step(updates, work=one_step)
                else:
                    outputs, totals = one_step()
                if profile and phases:
                    at = tf.cast(step - first, tf.int32)
                    times = [array.write(at, phases.end()) for array in times]
                read_together(graph.get_operations()[before:])
                if profile and phases:
                    profile.links = phases.links()
                if program.keep_logs:
                    names[:] = sorted(outputs)
                    logs[:] = [tf.cast(outputs[name], tf.float32) for name in names]
                    kept = tf.stack(logs)
                return step + 1, kept, rows, updates, times, *totals

            zeros = [tf.zeros(s, v.dtype) for s, v in zip(shapes, program.metrics, strict=True)]
            kept, rows, updates, times, *totals = tf.while_loop(
                lambda step, *_: step < last,
                body,
                [start, tf.zeros([0]), rows, updates, times, *zeros],
                shape_invariants=[
                    tf.TensorShape([]),
                    tf.TensorShape([None]),
                    [tf.TensorShape(None) for _ in rows],
                    [tf.TensorShape([]) for _ in updates],
                    [tf.TensorShape(None) for _ in times],
                    *map(tf.TensorShape, shapes),
                ],
                parallel_iterations=1,
            )[1:]
            flat = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in totals]
            total = tf.concat([*flat, tf.zeros([0], tf.float64)], 0)
            ages = clock.staleness(now, updates) if clock else ()
            found = total, kept, [row.stack() for row in rows], ages
            return *found, *(t.stack() for t in times)

        return run_range

    def _output_closure(self, program: StepProgram, names: list[str]) -> Callable[..., Any]:
        def run_step(data: Any, first: tf.Tensor, last: tf.Tensor) -> Any:
            part = program.feed.worker_parts(data, first, last)(first)
            outputs = self._step(program, first, part, ())[0]
            read_together(tf.compat.v1.get_default_graph().get_operations())
            return outputs

        return run_step

    def _step(
        self,
        program: StepProgram,
        step: Any,
        part: Part,
        totals: Any,
        phases: Phases | None = None,
        watcher: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Any]:
        """Runs one step; returns what it returned, and the metric totals after it."""
        at_door = phases.gradients if phases else None
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
                    at_door=at_door,
                )
            returned.append(outputs)

        self._job.strategy.run(in_replica)
        return returned[0], [local[id(v)] for v in program.metrics] if totals else ()


def _require_sums(program: StepProgram) -> None:
    for variable in program.metrics:
        if variable.aggregation != "sum":
            raise UsageError(
                "metrics",
                received=f"a metric whose {variable.name} is combined by {variable.aggregation!r}",
                expected="totals that add up over workers, under strategy ps",
                fix="create the metric's variables with aggregation='sum'",
            )
