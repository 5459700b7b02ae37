"""Parameter server engine: the chief dispatches work units (ranges of steps) to workers.

A step is an update by a single worker. The chief sends arrays to a worker once, and the worker
keeps them. A worker returns the metrics of each step with its unit's result. The chief adds them up
in the order of the steps. Counts never depend on a variable that several workers write at once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import VariableWatcher
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.cluster import JobOptions
from tfdist.errors import require
from tfdist.ps.connections import Connections
from tfdist.ps.keras_compat import UpdateCounts
from tfdist.ps.messages import READS, function_names, outermost, read_together
from tfdist.ps.split import parts_of
from tfdist.ps.strategy import bytes_on_servers, log_placement
from tfdist.ps.worker_pool import Done, WorkerIncarnation, is_of_the_network, worker_pool_of
from tfdist.strategy import Job
from tfdist.strategy.devices import server_of
from tfdist.training.feed import Part
from tfdist.training.keras_compat import adding_in_order, compiled
from tfdist.training.keras_compat.metrics import require_sums
from tfdist.training.program import Engine, StepProgram, run_replica

_CLOSURE_STEPS = 32
_CLOSURE_TOTALS = 2**17  # numbers of metrics in a work unit's result: 1 MB
_CLOSURES_PER_WORKER = 2


class DispatchedBlock(NamedTuple):
    """Dispatched steps ``[first, last)`` of a program, and their future result."""

    program: StepProgram
    first: int
    last: int
    future: Future[Done]


class ParameterServerEngine(Engine):
    """Engine that runs a step block as work units. Only the chief calls it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        options = job.config.options if job.config else JobOptions()
        self._worker_pool = worker_pool_of(job.strategy, patience_s=options.startup_timeout_s)
        self._workers = len(self._worker_pool.shares)
        self._clock: UpdateClock | None = None
        self._applied = 0  # updates on the clock when the workers were last idle
        self._completed = 0  # steps since then
        self._work: dict[StepProgram, Work] = {}
        self._under_way: list[DispatchedBlock] = []

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)`` on the live workers.

        Waits until all steps are done. If the next block follows directly (`goes_on`), waits only
        until the last work unit has started, so that no worker idles between the blocks.
        """
        if program not in self._work:
            for variable in program.metrics:  # the first call with this program
                require(
                    not np.any(variable.numpy()),
                    "metrics",
                    f"{variable.path} of a metric does not start at 0, so tfdist cannot add up the "
                    "totals of workers",
                    fix="set the metric's variables to 0 in its reset_state",
                    code="metric",
                )
        work = self._prepared(program)
        if not self._under_way:
            work.count_from(first)
        most = steps_of_a_unit(
            most=min(_CLOSURE_STEPS, _CLOSURE_TOTALS // max([1, *ends_of_totals(program)]) or 1),
            workers=self._workers,
            max_staleness=program.max_staleness,
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
            # In order of dispatch, so that sums do not depend on which worker finished first.
            self._collect(list(itertools.takewhile(lambda p: p.future.done(), self._under_way)))
        else:
            self.finish(program)
        return work.logs

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Wait for the work units that `run` left in flight. Return the last step's logs."""
        self._collect(list(self._under_way))
        return self._work[program].logs if program in self._work else {}

    def close(self) -> None:
        """Cancel work units that have not started, and wait for the others to end."""
        self._worker_pool.drop()
        begun = [unit.future for unit in self._under_way if not unit.future.cancelled()]
        self._under_way.clear()
        concurrent.futures.wait(begun)
        if begun and self._clock is not None:
            # After an error the number of applied steps is unknown: restart both counts.
            self._completed = 0
            with contextlib.suppress(tf.errors.OpError):  # the ps may have exited
                self._applied = self._clock.applied

    @property
    def steps_under_way(self) -> int:
        return sum(unit.last - unit.first for unit in self._under_way)

    def _collect(self, units: Sequence[DispatchedBlock]) -> None:
        with self._nothing_left_after_an_error():
            for unit in units:
                self._account(unit, unit.future.result())
                self._under_way.remove(unit)
        if units and not self._under_way:
            self._work[units[-1].program].rests()
            if self._clock is not None:  # exact only while all workers are idle
                before, self._applied = self._applied, self._clock.applied
                self._worker_pool.account.applied_twice += self._applied - before - self._completed
                self._completed = 0

    @contextlib.contextmanager
    def _nothing_left_after_an_error(self) -> Iterator[None]:
        """Close the engine on an error, so that workers stop updating the model."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs, in order, with a few steps per worker in flight."""
        self._prepared(program, outputs=True)
        waiting: collections.deque[Future[Done]] = collections.deque()
        for step in range(first, last):
            waiting.append(self._dispatch(program, step, step + 1))
            if len(waiting) > 2 * self._workers:
                yield waiting.popleft().result().value
        while waiting:
            yield waiting.popleft().result().value

    def reset_metrics(self) -> None:
        for work in self._work.values():
            work.totals = None

    def publish_metrics(self, program: StepProgram) -> None:
        """Write the totals that workers have returned to the model's metrics."""
        work = self._work.get(program)
        if work is None or work.totals is None:
            return
        parts = np.split(work.totals, ends_of_totals(program))
        for variable, part in zip(program.metrics, parts, strict=False):
            variable.assign(part.reshape(variable.shape).astype(variable.dtype))

    publish_state = publish_metrics  # the rest of the state is on the servers

    def take_state(self, program: StepProgram) -> None:
        """Set the totals from the model's metrics."""
        flat = [np.asarray(v.numpy(), np.float64).ravel() for v in program.metrics]
        self._prepared(program).totals = np.concatenate([*flat, np.zeros(0)])

    def _dispatch(self, program: StepProgram, first: int, last: int) -> Future[Done]:
        return self._worker_pool.submit(
            functools.partial(self._work[program], first, last),
            steps=last - first if program.training else 0,
            max_staleness=program.max_staleness,
        )

    def _account(self, unit: DispatchedBlock, done: Done) -> None:
        numbers, rows = done.value
        ages = self._work[unit.program].take(numbers, steps=unit.last - unit.first)
        if unit.program.training:
            self._worker_pool.account.done(unit.first, unit.last, times=done.times, staleness=ages)
            self._completed += unit.last - unit.first
        span, worker = (unit.first, unit.last), done.worker_index
        for observer, noted in zip(unit.program.observers, rows, strict=True):
            observer.write(*span, noted, worker=worker, begun=done.times)

    def _prepared(self, program: StepProgram, *, outputs: bool = False) -> Work:
        if program not in self._work:
            require_sums(program.keras_metrics)
            with self._job.strategy.scope():
                if program.training and self._clock is None:
                    self._clock = UpdateClock(Connections.of(self._job.strategy).server_devices)
                self._work[program] = Work(
                    program,
                    self._job.strategy,
                    clock=self._clock if program.training else None,
                    outputs=outputs,
                )
        return self._work[program]

    @staticmethod
    def is_of_scope(variable: Any, job: Job) -> bool:
        return all(server_of(part) is not None for part in parts_of(variable))

    @staticmethod
    def log_built(model: keras.Model, job: Job) -> None:
        log_placement(model, job.strategy)

    @staticmethod
    def lost_task(error: tf.errors.OpError, job: Job) -> str:
        gone = Connections.of(job.strategy).missing() if is_of_the_network(error) else []
        return str(gone[0]) if gone else ""

    @staticmethod
    def worker_steps(job: Job) -> dict[str, int]:
        """Return the steps of each worker since this process started."""
        shares = worker_pool_of(job.strategy).shares
        return {f"worker-{index}": share.steps for index, share in shares.items()}

    @staticmethod
    def summary(model: keras.Model, job: Job) -> dict[str, Any]:
        """Return the counts of the steps since this process started, and the bytes on each ps."""
        return {
            "worker_steps": ParameterServerEngine.worker_steps(job),
            **worker_pool_of(job.strategy).account.summary(),
            "ps_bytes": bytes_on_servers(model, job.strategy),
        }


def ends_of_totals(program: StepProgram) -> list[int]:
    """Return where the numbers of each metric variable end among those of a program."""
    return [*itertools.accumulate(int(np.prod(v.shape)) for v in program.metrics)]


def steps_of_a_unit(*, most: int, workers: int, max_staleness: int | None) -> int:
    """Return the steps of the longest work unit that lets as many workers as possible compute.

    With a staleness bound of k, at most k + 1 workers run at a time. Half of the bound allows for
    units that are in flight when a unit starts. The other half allows for units that start later.
    """
    if max_staleness is None:
        return most
    others = min(workers - 1, max_staleness)
    return most if not others else min(most, max(1, max_staleness // (2 * others)))


# Closure of a ps job: a function that runs a range of steps, traced once, and its results.


class _Carried(NamedTuple):
    """State that a step of a work unit passes to the next step.

    `logs` are float32 ``[numbers]``, and `counts` the update counts of the optimizers. `rows` are
    the observers' records, `ages` the lists of `UpdateClock.step`. `totals` is an array with a row
    per step: the metric variables, each from 0.
    """

    step: tf.Tensor
    logs: tf.Tensor
    rows: list[Any]
    ages: list[tf.Tensor]
    counts: tf.Tensor
    totals: tf.TensorArray


@dataclasses.dataclass(slots=True)
class _Reader:
    """Iterator of a worker's `life`, and the step of its next batch if the feed is in order."""

    life: int
    batches: Any
    step: int = 0


class Work:
    """Program traced for the workers of a job, with the results of its steps."""

    def __init__(
        self,
        program: StepProgram,
        strategy: tf.distribute.Strategy,
        *,
        clock: UpdateClock | None = None,
        outputs: bool = False,
    ) -> None:
        """Trace the program once, before several threads could each trace it."""
        self.totals: np.ndarray | None = None  # of the metrics since their last reset
        self.logs: dict[str, Any] = {}  # of the last step with a result
        self._program = program
        self._strategy = strategy
        self._clock = clock
        self._ends = ends_of_totals(program)
        self._num_totals = max([0, *self._ends])
        self._types = [tf.as_dtype(v.dtype).as_numpy_dtype for v in program.metrics]
        self._log_shapes: dict[str, tuple[int, ...]] = {}
        # Update count of each optimizer that a step applies, and the count's increment per step.
        # `_counts_of_step_0` and `_counts_at_rest`: the counts before step 0 and when last idle.
        self._counted: list[Any] = []
        self._counts_each = np.zeros(0, np.int64)
        self._counts_of_step_0: np.ndarray | None = None
        self._counts_at_rest: np.ndarray | None = None
        self._readers: dict[int, _Reader] = {}  # by worker
        self._dataset = compiled(program.feed.worker_dataset).get_concrete_function()
        iterator = tf.data.IteratorSpec(self._dataset.structured_outputs.element_spec)
        # First step, last step + 1, step of the iterator, and the optimizers' counts at the first.
        numbers = tf.TensorSpec([None], tf.int64)
        traced = compiled(self._outputs if outputs else self._steps)
        self._closure = traced.get_concrete_function(iterator, numbers)

    def count_from(self, step: int) -> None:
        """Set the optimizers' counts for `step`. Call it only if no step is in flight.

        The counts continue from the last step of this program. If a callback or another program
        with the same optimizer has changed them since `rests`, they continue from the new values.
        """
        counts = self._counts()
        if self._counts_at_rest is None or np.any(counts != self._counts_at_rest):
            self._counts_of_step_0 = counts - step * self._counts_each

    def rests(self) -> None:
        """Record the counts now that no step is in flight."""
        self._counts_at_rest = self._counts()

    def _counts(self) -> np.ndarray:
        return np.array([count.numpy() for count in self._counted], np.int64)

    def __call__(self, first: int, last: int, incarnation: WorkerIncarnation) -> Any:
        """Run the steps ``[first, last)`` on a worker. Return their results on this task."""
        reader = self._readers.get(incarnation.worker_index)
        is_past = self._program.feed.in_order and reader is not None and reader.step > first
        if reader is None or reader.life != incarnation.life or is_past:
            reader = _Reader(incarnation.life, iter(self._dataset()))
            self._readers[incarnation.worker_index] = reader
        numbers = np.array([first, last, reader.step], np.int64)
        if self._counts_of_step_0 is not None:
            numbers = np.append(numbers, self._counts_of_step_0 + first * self._counts_each)
        reader.step = _NO_LIMIT  # unknown if the call fails
        with adding_in_order():
            found = self._closure(reader.batches, tf.constant(numbers))
        reader.step = last
        return keras.tree.map_structure(_as_numpy, found)

    def take(self, numbers: np.ndarray, *, steps: int) -> np.ndarray:
        """Add the totals and set the logs of a range. Return the staleness of its steps.

        Totals are added step by step in each variable's own type. Their bits then do not depend on
        the length of a work unit, and a checkpoint can hold them.
        """
        rows, rest = np.split(numbers, [steps * self._num_totals])
        rows = rows.reshape(steps, self._num_totals)
        if self.totals is not None:
            rows = np.concatenate([self.totals[None], rows])
        parts = zip(np.split(rows, self._ends, axis=1), self._types, strict=False)
        with np.errstate(all="ignore"):
            sums = [np.add.accumulate(part.astype(kind))[-1] for part, kind in parts]
        self.totals = np.concatenate([np.zeros(0), *(total.astype(float) for total in sums)])
        logs: dict[str, Any] = {}
        for name, shape in self._log_shapes.items():
            log, rest = np.split(rest, [math.prod(shape)])
            logs[name] = log.astype(np.float32).reshape(shape) if shape else float(log[0])
        self.logs = logs
        return rest.astype(np.int64)

    def _part_of(self, data: Any, numbers: tf.Tensor) -> Callable[[tf.Tensor], Part]:
        """Return the function that makes the unit's parts."""
        first, feed = numbers[0], self._program.feed

        def skip(step: tf.Tensor) -> list[tf.Tensor]:
            data.get_next()
            return [step + 1]

        if feed.in_order:  # other workers run the steps in between
            tf.while_loop(lambda step: step < first, skip, [numbers[2]], parallel_iterations=1)
        return feed.worker_parts(data, first, numbers[1])

    def _outputs(self, data: Any, numbers: tf.Tensor) -> Any:
        part_of = self._part_of(data, numbers)
        found = self._step(numbers[0], part_of(numbers[0]), [])[0]
        read_together(tf.compat.v1.get_default_graph().get_operations())
        return found

    def _steps(self, data: Any, numbers: tf.Tensor) -> Any:
        """Run the steps. Return the vector that `take` splits, and the observers' rows."""
        first, last = numbers[0], numbers[1]
        part_of = self._part_of(data, numbers)
        program, steps = self._program, last - first
        begin = _Carried(
            step=first,
            logs=tf.zeros([0]),
            rows=[observer.rows(steps) for observer in program.observers],
            ages=self._clock.begin() if self._clock else [],
            counts=numbers[3:],
            totals=tf.TensorArray(
                tf.float64, tf.cast(steps, tf.int32), element_shape=[self._num_totals]
            ),
        )
        any_shape, scalar, vector = tf.TensorShape(None), tf.TensorShape([]), tf.TensorShape([None])
        shapes = _Carried(
            step=scalar,
            logs=vector,
            rows=[[any_shape for _ in rows] for rows in begin.rows],
            ages=[scalar for _ in begin.ages],
            counts=vector,
            totals=any_shape,
        )
        end = tf.while_loop(
            lambda carried: carried.step < last,
            lambda carried: [self._turn(carried, first, part_of)],
            [begin],
            shape_invariants=[shapes],
            parallel_iterations=1,
        )[0]
        stale = self._clock.staleness(end.ages) if self._clock else tf.zeros([0])
        # A single vector, because each tensor would be a separate message.
        parts = [_numbers(part) for part in (end.totals.stack(), end.logs, stale)]
        return tf.concat(parts, 0), [[row.stack() for row in noted] for noted in end.rows]

    def _turn(self, given: _Carried, first: tf.Tensor, part_of: Callable[..., Part]) -> _Carried:
        """Run one step, and rewire its messages after the whole step is traced."""
        clock, observers = self._clock, self._program.observers
        graph = tf.compat.v1.get_default_graph()
        before, position = len(graph.get_operations()), given.step - first
        ages, part = given.ages, part_of(given.step)
        rows = [o.noted(r, position, [part]) for o, r in zip(observers, given.rows, strict=True)]
        updates = UpdateCounts(given.counts)
        zeros = [tf.zeros(tuple(v.shape), v.dtype) for v in self._program.metrics]
        one_step = functools.partial(self._step, given.step, part, zeros, updates)
        if clock:
            (outputs, totals), ages = clock.step(ages, work=one_step)
        else:
            outputs, totals = one_step()
        self._counted, self._counts_each = updates.followed, np.array(updates.each, np.int64)
        traced = graph.get_operations()[before:]
        read_together(traced)
        if clock:
            clock.look_first(traced)
        return _Carried(
            step=given.step + 1,
            logs=self._logs(outputs) if self._program.keep_logs else given.logs,
            rows=rows,
            ages=ages,
            counts=updates.after(),
            totals=given.totals.write(
                tf.cast(position, tf.int32),
                tf.concat([*map(_numbers, totals), tf.zeros([0], tf.float64)], 0),
            ),
        )

    def _logs(self, outputs: dict[str, Any]) -> tf.Tensor:
        logs = {name: tf.cast(outputs[name], tf.float32) for name in sorted(outputs)}
        for name, log in logs.items():
            require(
                log.shape.is_fully_defined(),
                "step",
                f"the step returned {name!r} with the unknown shape {log.shape}",
                fix=f"return a number, such as tf.reduce_mean({name})",
                code="unknown-shape",
            )
            self._log_shapes[name] = tuple(log.shape.as_list())
        return tf.concat([tf.reshape(log, [-1]) for log in logs.values()], 0)

    def _step(
        self,
        step: Any,
        part: Part,
        totals: Any,
        counts: UpdateCounts | None = None,
        watcher: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Any]:
        """Run one step. Return its result and the metric totals after it."""
        program = self._program
        returned: list[Any] = []
        local = dict(zip(map(id, program.metrics), totals, strict=False))

        def in_replica() -> None:
            with watcher or contextlib.nullcontext():
                outputs = run_replica(
                    program,
                    part,
                    step=step,
                    replica=0,
                    num_replicas=1,
                    local=local,
                    counts=counts,
                )
            returned.append(outputs)

        self._strategy.run(in_replica)
        return returned[0], [local[id(v)] for v in program.metrics] if totals else []


def _numbers(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(tensor, tf.float64), [-1])


def _as_numpy(value: Any) -> Any:
    """Return a worker's result as an array or number. Ragged and sparse values keep their type."""
    if isinstance(value, tf.Tensor):
        return value.numpy()
    with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
        return tf.nest.map_structure(
            lambda part: tf.constant(part.numpy()), value, expand_composites=True
        )


# Staleness of a step, measured by counters on the parameter servers.
#
# Only the server of a counter runs the counter's operations at each step. No step waits for them
# or sends a message for them.


_NO_LIMIT = 2**62
_WRITES = ("Assign", "Resource", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_T = TypeVar("_T")


class UpdateClock:
    """Counter of updates on each server, by device."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._counts: dict[str, Any] = {}
        for device in devices:
            with tf.device(device):
                count = ResourceVariable(0, dtype=tf.int64, trainable=False, name="updates")
            self._counts[count.device] = count
        self._begun: dict[str, tf.Tensor] = {}
        self._counting: list[str] = []

    @property
    def applied(self) -> int:
        """Number of updates so far by all workers, on the server with the most updates."""
        return max(int(count.numpy()) for count in self._counts.values())

    def begin(self) -> list[tf.Tensor]:
        """Begin a range of steps, in graph. Return the empty `ages` for the first `step`."""
        ages = []
        for device in self._counts:
            with tf.device(device):
                ages.append(
                    tf.raw_ops.EmptyTensorList(
                        element_shape=tf.constant([], tf.int32),
                        max_num_elements=-1,
                        element_dtype=tf.int64,
                    )
                )
        return ages

    def step(
        self, ages: list[tf.Tensor], *, work: Callable[[VariableWatcher], _T]
    ) -> tuple[_T, list[tf.Tensor]]:
        """Trace a step's `work`. Return its result, and `ages` with this step's staleness.

        A server counts the step after its write of the variables that the step trains. If the step
        trains no variables, the first server counts it. `work` gets a watcher, a context manager to
        enter in the thread that traces the step. Call `look_first` after the step is traced.
        """
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        for device, count in self._counts.items():
            with tf.device(device):
                self._begun[device] = count.read_value()
        watcher = VariableWatcher()
        result = work(watcher)
        trained = {id(v.handle) for v in watcher.watched_variables()}
        writes: dict[str, list[Any]] = {}
        for op in filter(_writes, graph.get_operations()[before:]):
            for handle in _variables_of(op):
                if id(handle) in trained:
                    writes.setdefault(str(handle.device), []).append(op)
        self._counting = [d for d in self._counts if d in writes] or list(self._counts)[:1]
        kept = dict(zip(self._counts, ages, strict=True))
        for device in self._counting:
            with tf.device(device), tf.control_dependencies(writes.get(device, [])):
                # An atomic operation adds 1 and returns the previous value.
                number = tf.raw_ops.ResourceCountUpTo(
                    resource=self._counts[device].handle, limit=_NO_LIMIT, T=tf.int64
                )
                kept[device] = tf.raw_ops.TensorListPushBack(
                    input_handle=kept[device], tensor=number - self._begun[device]
                )
        return result, list(kept.values())

    def look_first(self, operations: Sequence[Any]) -> None:
        """Make the step read a server's clock before any other operation on that server.

        Takes all operations of the step. Reads within a condition or a loop do not wait for the
        clock, because the wait would cost a message.
        """
        clocks = {id(count.handle) for count in self._counts.values()}
        for op in operations:
            handles = _variables_of(op)
            if function_names(op) or clocks & set(map(id, handles)):
                continue
            for device in {str(handle.device) for handle in handles} & self._begun.keys():
                op._add_control_input(self._begun[device].op)

    def staleness(self, ages: list[tf.Tensor]) -> tf.Tensor:
        """Return the number of other workers' updates between each step's read and its write.

        The result is the maximum over the servers.
        """
        found = []
        for device, kept in zip(self._counts, ages, strict=True):
            if device in self._counting:
                with tf.device(device):
                    found.append(
                        tf.raw_ops.TensorListStack(
                            input_handle=kept,
                            element_shape=tf.constant([], tf.int32),
                            element_dtype=tf.int64,
                        )
                    )
        return tf.reduce_max(tf.stack(found), 0)


def _variables_of(op: Any) -> list[Any]:
    return [outermost(tensor) for tensor in op.inputs if tensor.dtype == tf.resource]


def _writes(op: Any) -> bool:
    """Return whether an operation may write.

    Return False for a loop that only reads (recurrent layers): a wait would cost a message.
    """
    if op.type in _LOOPS:
        body = op.graph._get_function(op.get_attr("body").name)
        return body is not None and any(map(_writes, body.graph.get_operations()))
    return bool(op.type.startswith(_WRITES)) and op.type not in READS
