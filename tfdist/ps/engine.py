"""Parameter server engine: the chief dispatches ranges of steps to workers.

A step is one update by one worker. Each worker keeps the arrays it was sent once, and the metrics
of its range; it returns them with the range, and the chief adds them up. Nothing that many workers
write at once decides a count.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from tfdist.cluster import JobOptions
from tfdist.errors import require
from tfdist.ps.clock import UpdateClock, steps_of_a_unit
from tfdist.ps.closure import Work
from tfdist.ps.members import Members
from tfdist.ps.workers import Done, worker_pool_of
from tfdist.strategy import Job
from tfdist.training.program import StepProgram

_CLOSURE_STEPS = 32
_CLOSURES_PER_WORKER = 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DispatchedBlock:
    """The steps ``[first, last)`` of a program on their way, and where their result will be."""

    program: StepProgram
    first: int
    last: int
    future: Future[Done]


class ParameterServerEngine:
    """Runs a range of steps as work units of some steps each. Called by the chief alone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        options = job.config.options if job.config else JobOptions()
        self._worker_pool = worker_pool_of(job.strategy, patience_s=options.startup_timeout_s)
        self._workers = len(self._worker_pool.shares)
        self._clock: UpdateClock | None = None
        self._applied = 0  # when nobody worked last, by the clock
        self._completed = 0  # since then
        self._work: dict[StepProgram, Work] = {}
        self._under_way: list[DispatchedBlock] = []
        self._times: list[tuple[int, Any]] = []
        self._since_s = 0.0
        self._profile = self._worker_pool.profile if options.profile_ps else None

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)`` on whatever workers there are.

        Waits for all of them, or where the next range `goes_on` from here, until the last one has
        begun, so that no worker waits for the others' last work units.
        """
        if program not in self._work:
            require_zeros(program)  # none but a new run, or one of another program, begins here
        work = self._prepared(program)
        if not self._under_way:
            work.count_from(first)
            self._since_s = time.perf_counter()
        most = steps_of_a_unit(
            most=_CLOSURE_STEPS, workers=self._workers, max_staleness=program.max_staleness
        )
        each = -(-(last - first) // (self._workers * _CLOSURES_PER_WORKER))
        each = min(max(each, 1), most)
        for start in range(first, last, each):
            span = start, min(start + each, last)
            future = self._dispatch(program, *span)
            self._under_way.append(DispatchedBlock(program, *span, future))
        if goes_on:
            with self._nothing_left_after_an_error():
                self._worker_pool.wait_until_begun()
            # In their order, so that sums are the same whoever was first.
            self._take(list(itertools.takewhile(lambda p: p.future.done(), self._under_way)))
        else:
            self.finish(program)
        return work.logs

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Wait for what `run` has left under way; return the last step's logs."""
        self._take(list(self._under_way))
        return self._work[program].logs if program in self._work else {}

    def close(self) -> None:
        """Forget what no worker has begun, and wait until what they have begun has ended."""
        self._worker_pool.drop()
        begun = [unit.future for unit in self._under_way if not unit.future.cancelled()]
        self._under_way.clear()
        concurrent.futures.wait(begun)
        if begun:
            self._forget_what_was_applied()

    @property
    def steps_under_way(self) -> int:
        """The steps that `run` has dispatched and not seen done."""
        return sum(unit.last - unit.first for unit in self._under_way)

    def _take(self, units: Sequence[DispatchedBlock]) -> None:
        """Take in what comes of `units`, in their order."""
        with self._nothing_left_after_an_error():
            for unit in units:
                self._account(unit, unit.future.result())
                self._under_way.remove(unit)
        if units and not self._under_way:
            self._work[units[-1].program].rests()
            self._account_when_idle()

    @contextlib.contextmanager
    def _nothing_left_after_an_error(self) -> Iterator[None]:
        """Where waiting ends with an error, no worker changes the model any more."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs, in order; a few steps a worker are under way at a time."""
        self._prepared(program, outputs=True)
        waiting: collections.deque[Future[Done]] = collections.deque()
        for step in range(first, last):
            waiting.append(self._dispatch(program, step, step + 1))
            if len(waiting) > 2 * self._workers:
                yield waiting.popleft().result().value
        while waiting:
            yield waiting.popleft().result().value

    def reset_metrics(self) -> None:
        """Forget the totals that workers have returned."""
        for work in self._work.values():
            work.totals = None

    def publish_metrics(self, program: StepProgram) -> None:
        """Put the totals that workers have returned into the model's metrics."""
        work = self._work.get(program)
        if work is None or work.totals is None:
            return
        start = 0
        for variable in program.metrics:
            size = int(np.prod(variable.shape))
            part = work.totals[start : start + size].reshape(variable.shape)
            variable.assign(part.astype(variable.dtype))
            start += size

    def publish_state(self, program: StepProgram) -> None:
        """Put the totals into the model's metrics; the rest of the state is on the servers."""
        self.publish_metrics(program)

    def take_state(self, program: StepProgram) -> None:
        """Start from the totals that are in the model's metrics."""
        flat = [np.asarray(v.numpy(), np.float64).ravel() for v in program.metrics]
        self._prepared(program).totals = np.concatenate([*flat, np.zeros(0)])

    def _dispatch(self, program: StepProgram, first: int, last: int) -> Future[Done]:
        return self._worker_pool.submit(
            functools.partial(self._work[program], first, last),
            steps=last - first if program.training else 0,
            max_staleness=program.max_staleness,
        )

    def _account(self, unit: DispatchedBlock, done: Done) -> None:
        numbers, rows, *times = done.value
        ages = self._work[unit.program].take(numbers)
        if unit.program.training:
            self._worker_pool.account.done(unit.first, unit.last, times=done.times, staleness=ages)
            self._completed += unit.last - unit.first
            self._times += [(done.worker_index, found) for found in times]
        recorder = unit.program.recorder
        if recorder is not None:
            span, worker = (unit.first, unit.last), done.worker_index
            recorder.write(*span, rows, worker=worker, begun=done.times)

    def _account_when_idle(self) -> None:
        """Add up what is known only while nobody works."""
        if self._clock is not None:
            before, self._applied = self._applied, self._clock.applied
            self._worker_pool.account.applied_twice += self._applied - before - self._completed
            self._completed = 0
        if self._profile is not None and self._times:
            self._profile.add(self._times, wall_s=time.perf_counter() - self._since_s)
            self._times = []

    def _forget_what_was_applied(self) -> None:
        """Of steps that an error has ended nobody knows which were applied, and how often."""
        self._completed = 0
        if self._clock is not None:
            with contextlib.suppress(tf.errors.OpError):  # the ps may be what has ended
                self._applied = self._clock.applied

    def _prepared(self, program: StepProgram, *, outputs: bool = False) -> Work:
        if program not in self._work:
            require_sums(program)
            with self._job.strategy.scope():
                if program.training and self._clock is None:
                    self._clock = UpdateClock(Members.of(self._job.strategy).server_devices)
                self._work[program] = Work(
                    program,
                    self._job.strategy,
                    clock=self._clock if program.training else None,
                    profile=self._profile if program.training else None,
                    outputs=outputs,
                )
        return self._work[program]


# Metrics of a ps job: their totals add up over work units; others are refused.
#
# A work unit begins at zero and returns what its steps have added; the chief adds that up. So every
# variable of a metric has to be a sum over the examples. Keras' own metrics are. A metric with an
# `update_state` or a `reset_state` of its own says that it is one by the attribute `adds_up`.


_BY_KERAS = "keras.src."
_DECIDING = ("update_state", "reset_state")


def require_sums(program: StepProgram) -> None:
    """Refuse metrics whose totals do not add up over work units, or do not say so."""
    for metric in _with_nested(program.keras_metrics):
        own = [name for name in _DECIDING if not _is_by_keras(metric, name)]
        require(
            not own or getattr(metric, "adds_up", False),
            "metrics",
            received=f"{type(metric).__name__}, whose {' and '.join(own)} may do anything",
            expected="metrics that add up over workers, under strategy ps",
            fix="set adds_up = True in its class if each of its variables begins at 0 and is only "
            "added to; else return the figure from the step",
            code="metric-adds-up",
        )
    for variable in program.metrics:
        require(
            variable.aggregation == "sum",
            "metrics",
            received=f"a metric whose {variable.name} is combined by {variable.aggregation!r}",
            expected="totals that add up over workers, under strategy ps",
            fix="create the metric's variables with aggregation='sum'",
            code="metric-aggregation",
        )


def require_zeros(program: StepProgram) -> None:
    """Refuse metrics that do not begin at 0: each work unit begins there."""
    for variable in program.metrics:
        require(
            not np.any(variable.numpy()),
            "metrics",
            received=f"a metric whose {variable.path} does not begin at 0",
            expected="totals that add up over workers, each of which begins at 0, under ps",
            fix="have the metric's reset_state set its variables to 0",
            code="metric-zero",
        )


def _with_nested(metrics: Iterable[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    """Yield metrics and those that they are made of."""
    for metric in metrics:
        yield metric
        is_list = isinstance(metric, CompileMetrics)
        yield from _with_nested(metric.metrics if is_list else metric._metrics)


def _is_by_keras(metric: keras.metrics.Metric, name: str) -> bool:
    defined_in = next(kind for kind in type(metric).__mro__ if name in vars(kind))
    return defined_in.__module__.startswith(_BY_KERAS)
