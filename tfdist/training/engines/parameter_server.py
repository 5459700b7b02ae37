"""The coordinator hands ranges of steps to workers, which update the variables on the ps.

A step is one update by one worker. Each worker keeps the arrays it was sent once, and the metrics
of its range; it returns them with the range, and the chief adds them up. Nothing that many workers
write at once decides a count.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.source import lean_options
from tfdist.errors import UsageError
from tfdist.strategy import Job
from tfdist.training.feed import Part
from tfdist.training.keras_compat import compiled
from tfdist.training.ledger import Recorder
from tfdist.training.program import StepProgram, run_replica

_CLOSURE_STEPS = 32
_CLOSURES_PER_WORKER = 2
_COUNTED_CLOSURES = 4096


@dataclasses.dataclass(kw_only=True, slots=True)
class _Work:
    """A program, ready to be handed out.

    `begun` counts on the ps how often workers have begun each closure of a range, so that one
    that was handed out again after its worker died is seen; only where a program is recorded.
    """

    closure: Callable[..., Any]
    data: Any
    log_names: list[str]
    totals: np.ndarray | None = None
    begun: Any = None


class ParameterServerEngine:
    """Runs a range of steps as closures of some steps each. Called by the chief alone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(job.strategy)
        self._workers = len(job.config.cluster.worker) if job.config else 1
        self._work: weakref.WeakKeyDictionary[StepProgram, _Work] = weakref.WeakKeyDictionary()

    def run(self, program: StepProgram, first: int, last: int) -> dict[str, float]:
        """Runs the steps ``[first, last)`` on whatever workers there are; waits for all."""
        work = self._prepared(program, self._closure)
        each = -(-(last - first) // (self._workers * _CLOSURES_PER_WORKER))
        each = min(max(each, 1), _CLOSURE_STEPS)
        spans = [(start, min(start + each, last)) for start in range(first, last, each)]
        results = [self._hand_out(work, *span, number=i) for i, span in enumerate(spans)]
        self._coordinator.join()
        fetched = self._coordinator.fetch(results)
        totals = np.sum([np.asarray(t) for t, *_ in fetched], axis=0)
        work.totals = totals if work.totals is None else work.totals + totals
        if program.recorder is not None:
            self._record(program.recorder, work, spans, [rows for *_, rows in fetched])
        return dict(zip(work.log_names, map(float, fetched[-1][1]), strict=True))

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yields each step's outputs, in order; a few steps a worker are under way at a time."""
        work = self._prepared(program, self._output_closure)
        waiting: collections.deque[Any] = collections.deque()
        for step in range(first, last):
            waiting.append(self._hand_out(work, step, step + 1))
            if len(waiting) > 2 * self._workers:
                yield self._fetched(waiting.popleft())
        while waiting:
            yield self._fetched(waiting.popleft())

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
        self._prepared(program, self._closure).totals = np.concatenate([*flat, np.zeros(0)])

    def _hand_out(self, work: _Work, first: int, last: int, *, number: int = 0) -> Any:
        bounds = tf.constant(first, tf.int64), tf.constant(last, tf.int64)
        slot = [] if work.begun is None else [tf.constant(number % _COUNTED_CLOSURES)]
        return self._coordinator.schedule(work.closure, args=(work.data, *bounds, *slot))

    def _record(
        self, recorder: Recorder, work: _Work, spans: Sequence[tuple[int, int]], rows: Sequence[Any]
    ) -> None:
        """Records each closure of a range that is done."""
        begun = np.asarray(work.begun.numpy())
        work.begun.assign(np.zeros_like(begun))
        slots = np.arange(len(spans)) % _COUNTED_CLOSURES
        shared = np.bincount(slots, minlength=_COUNTED_CLOSURES)
        for (first, last), slot, (worker, *arrays) in zip(spans, slots, rows, strict=True):
            times = int(begun[slot] - shared[slot] + 1)
            recorder.write(
                first, last, [np.asarray(a) for a in arrays], worker=int(worker), begun=times
            )

    def _fetched(self, result: Any) -> Any:
        return keras.tree.map_structure(np.asarray, result.fetch())

    def _prepared(self, program: StepProgram, make: Callable[..., Any]) -> _Work:
        work = self._work.get(program)
        if work is None:
            _require_sums(program)
            names: list[str] = []
            dataset, begun = program.feed.worker_dataset, None
            if program.recorder is not None:
                dataset = _numbered(dataset)
                with self._job.strategy.scope():
                    begun = tf.Variable(tf.zeros([_COUNTED_CLOSURES], tf.int32), trainable=False)
            per_worker = self._coordinator.create_per_worker_dataset(compiled(dataset))
            closure = make(program, names, begun)
            work = _Work(closure=closure, data=iter(per_worker), log_names=names, begun=begun)
            self._work[program] = work
        return work

    def _closure(self, program: StepProgram, names: list[str], begun: Any) -> Callable[..., Any]:
        if begun is None:
            return compiled(self._range_of(program, names))
        run_range = self._range_of(program, names)

        @compiled
        def run_counted(data: Any, first: tf.Tensor, last: tf.Tensor, slot: tf.Tensor) -> Any:
            # Before any update: a worker that dies has been counted.
            with tf.control_dependencies(
                [begun.assign_add(tf.one_hot(slot, *begun.shape, dtype=tf.int32))]
            ):
                first = tf.identity(first)
            given = _WithoutNumber(data)
            totals, kept, rows = run_range(given, first, last)
            return totals, kept, [given.number, *rows]

        return run_counted

    def _range_of(self, program: StepProgram, names: list[str]) -> Callable[..., Any]:
        shapes = [tuple(v.shape) for v in program.metrics]
        recorder = program.recorder

        def run_range(data: Any, first: tf.Tensor, last: tf.Tensor) -> Any:
            batches = program.feed.worker_batches(data, first, last)
            logs: list[tf.Tensor] = []
            rows = recorder.rows(last - first) if recorder else []

            def body(step: tf.Tensor, kept: tf.Tensor, rows: Any, *totals: tf.Tensor) -> Any:
                part = Part(*batches.get_next()[0])
                if recorder:
                    rows = list(recorder.noted(rows, step - first, [part]))
                outputs, totals = self._step(program, step, part, totals)
                if program.keep_logs:
                    names[:] = sorted(outputs)
                    logs[:] = [tf.cast(outputs[name], tf.float32) for name in names]
                    kept = tf.stack(logs)
                return step + 1, kept, rows, *totals

            zeros = [tf.zeros(s, v.dtype) for s, v in zip(shapes, program.metrics, strict=True)]
            kept, rows, *totals = tf.while_loop(
                lambda step, *_: step < last,
                body,
                [first, tf.zeros([0]), rows, *zeros],
                shape_invariants=[
                    tf.TensorShape([]),
                    tf.TensorShape([None]),
                    [tf.TensorShape(None) for _ in rows],
                    *map(tf.TensorShape, shapes),
                ],
                parallel_iterations=1,
            )[1:]
            flat = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in totals]
            total = tf.concat([*flat, tf.zeros([0], tf.float64)], 0)
            return total, kept, [row.stack() for row in rows]

        return run_range

    def _output_closure(
        self, program: StepProgram, names: list[str], begun: Any
    ) -> Callable[..., Any]:
        @compiled
        def run_step(data: Any, first: tf.Tensor, last: tf.Tensor) -> Any:
            batches = program.feed.worker_batches(data, first, last)
            return self._step(program, first, Part(*batches.get_next()[0]), ())[0]

        return run_step

    def _step(self, program: StepProgram, step: Any, part: Any, totals: Any) -> tuple[Any, Any]:
        """Runs one step; returns what it returned, and the metric totals after it."""
        returned: list[Any] = []
        local = dict(zip(map(id, program.metrics), totals, strict=False))

        def in_replica() -> None:
            outputs = run_replica(program, part, step=step, replica=0, num_replicas=1, local=local)
            returned.append(outputs)

        self._job.strategy.run(in_replica)
        return returned[0], [local[id(v)] for v in program.metrics] if totals else ()


def _numbered(dataset: Callable[[], tf.data.Dataset]) -> Callable[[], tf.data.Dataset]:
    """A worker's dataset, with the worker's number beside each element."""

    def numbered() -> tf.data.Dataset:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        numbers = tf.data.Dataset.from_tensors(tf.cast(index, tf.int64)).repeat()
        return tf.data.Dataset.zip((numbers, dataset())).with_options(lean_options())

    return numbered


class _WithoutNumber:
    """An iterator over a numbered dataset, as one over the elements; keeps the number."""

    def __init__(self, numbered: Any) -> None:
        self._numbered = numbered
        self.number: Any = tf.constant(-1, tf.int64)

    def get_next(self) -> Any:
        """The next element."""
        self.number, element = self._numbered.get_next()
        return element


def _require_sums(program: StepProgram) -> None:
    for variable in program.metrics:
        if variable.aggregation != "sum":
            raise UsageError(
                "metrics",
                received=f"a metric whose {variable.name} is combined by {variable.aggregation!r}",
                expected="totals that add up over workers, under strategy ps",
                fix="create the metric's variables with aggregation='sum'",
            )
