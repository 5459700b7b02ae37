"""Worker pool of a ps job: dispatches each work unit to a live worker.

Each work unit runs on the next free worker, so a slow worker gets fewer units. If a worker dies,
another worker reruns its unit. The worker gets work again after it reconnects. The job continues
while one worker is alive, even if the runtime never reports the death of another worker.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import executor as tf_executor

from tfdist import phases
from tfdist.errors import PeerLost
from tfdist.ps.connections import Connections

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 0.5
_GONE_S = 4.0  # silence after which a ps, or a worker with a work unit, counts as dead
_MAX_LOSSES = 5  # workers lost during a work unit before the unit counts as the cause
_MAX_FAILURES = 3  # in a row, by a worker that answers. An unnoticed restart causes one

# Messages of the runtime for a worker that restarted between two calls.
_REPLACED = (
    "unknown device",
    "Primary device is not remote",
    "Unable to find the relevant tensor remote_handle",
    "Unable to find a context_id",
    "which might mean the worker",
    "nor a name of a function registered",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIncarnation:
    """Connection to a worker. It ends if the worker dies or restarts."""

    worker_index: int
    life: int  # number of connections so far. A new connection loses the worker's data

    @property
    def task(self) -> str:
        return f"worker-{self.worker_index}"


class Done(NamedTuple):
    """Value of a work unit, the worker that finished it, and the number of its starts."""

    value: Any
    worker_index: int
    times: int


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class WorkUnit:
    """Work unit, with the future of its result and the number of workers lost while they ran it.

    `others` is the number of steps of other units that may be applied before this unit ends.
    """

    function: Callable[[WorkerIncarnation], Any]
    future: Future[Done]
    steps: int
    max_staleness: int | None = None
    losses: int = 0
    begun_s: float = 0.0
    others: int = 0

    def may_begin_beside(self, under_way: Collection[WorkUnit]) -> bool:
        """Return whether this unit and all units in flight stay within the staleness bound."""
        bound = self.max_staleness
        if bound is None or not self.steps:
            return True
        if sum(unit.steps for unit in under_way) > bound:
            return False
        return all(unit.others + self.steps <= bound for unit in under_way)

    def begin_beside(self, under_way: Collection[WorkUnit]) -> None:
        self.begun_s = time.monotonic()
        self.others = sum(unit.steps for unit in under_way)
        for unit in under_way:
            unit.others += self.steps


class WorkerPool:
    """Worker pool with a thread per worker. A worker runs a single work unit at a time."""

    def __init__(self, connections: Connections, *, patience_s: float) -> None:
        self._connections = connections
        self._patience_s = patience_s
        self._waiting: collections.deque[WorkUnit] = collections.deque()
        self._changed = threading.Condition()
        self._fatal: BaseException | None = None
        self._nobody_since: float | None = None
        self._held: dict[WorkerIncarnation, WorkUnit] = {}
        self._warm: set[WorkerIncarnation] = set()
        self.shares = {i: WorkerTally() for i in range(connections.num_workers)}
        self.account = Account()
        for worker in self.shares:
            self._begin_to_serve(worker, life=1 if worker in connections.connected else 0)
        threading.Thread(target=self._watch, name="tfdist-workers", daemon=True).start()

    def submit(
        self,
        function: Callable[[WorkerIncarnation], Any],
        *,
        steps: int = 0,
        max_staleness: int | None = None,
    ) -> Future[Done]:
        """Call `function` for the next free worker, with the worker's devices as the default.

        The future returns its result or raises its error. If the worker dies, the pool calls
        `function` again. `steps` is the number of training steps in it. During any unit in flight,
        at most `max_staleness` steps of other units run: the pool delays a unit that would exceed
        this bound. Raises PeerLost after a ps or all workers have died.
        """
        future: Future[Done] = Future()
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            self._waiting.append(
                WorkUnit(function=function, future=future, steps=steps, max_staleness=max_staleness)
            )
            self._changed.notify()
        return future

    def wait_until_begun(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def drop(self) -> None:
        with self._changed:
            for unit in self._waiting:
                unit.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _begin_to_serve(self, worker: int, *, life: int) -> None:
        threading.Thread(
            target=self._serve, args=(worker, life), name=f"tfdist-worker-{worker}", daemon=True
        ).start()

    def _serve(self, worker: int, life: int) -> None:
        """Run work units on a worker, until the pool fails or another thread serves it."""
        executor = tf_executor.new_executor(enable_async=False)
        while self._fatal is None:
            if worker not in self._connections.connected:
                if not self._admit(worker):
                    continue
                life += 1
                executor = tf_executor.new_executor(enable_async=False)
            incarnation = WorkerIncarnation(worker_index=worker, life=life)
            unit = self._next_unit(incarnation)
            if unit is None:
                return
            if unit.losses and not self._connections.answers(worker):
                # The worker died before it started this unit: another worker runs the unit.
                self._connections.lost(worker)
                self._release(incarnation)
                self._requeue(unit)
                continue
            if not self._run(unit, incarnation, executor):
                return  # another thread serves this worker

    def _admit(self, worker: int) -> bool:
        """Connect to a worker that answers again. Wait briefly and return False if it does not."""
        if not self.shares[worker].is_left_out and self._connections.admit(worker):
            _LOG.info("worker-%d connected", worker)
            with self._changed:
                self._nobody_since = None
            return True
        now_s = time.monotonic()
        with self._changed:
            if self._connections.connected or not self._waiting:
                self._nobody_since = None
            else:
                self._nobody_since = self._nobody_since or now_s
            since_s = self._nobody_since
        if since_s is not None and now_s - since_s >= self._patience_s:
            self._fail(PeerLost(f"no worker answered for {self._patience_s:.0f} s"))
        time.sleep(_PROBE_EVERY_S)
        return False

    def _next_unit(self, incarnation: WorkerIncarnation) -> WorkUnit | None:
        """Wait for the next work unit and return it, or `None` after the pool has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._fatal is not None
                    or (self._waiting and self._waiting[0].may_begin_beside(self._held.values()))
                )
            )
            if self._fatal is not None:
                return None
            unit = self._waiting.popleft()
            unit.begin_beside(self._held.values())
            self._held[incarnation] = unit
            self._report_oldest()
            if not self._waiting:
                self._changed.notify_all()  # `wait_until_begun`
            return unit

    def _release(self, incarnation: WorkerIncarnation) -> bool:
        """Remove a worker's unit. Return False if the unit was already removed."""
        with self._changed:
            unit = self._held.pop(incarnation, None)
            if unit is None:
                return False
            self._warm.add(incarnation)
            self._report_oldest()
            self._changed.notify_all()
            return True

    def _run(self, unit: WorkUnit, incarnation: WorkerIncarnation, executor: Any) -> bool:
        """Run a work unit. Return False if the pool has reclaimed it meanwhile."""
        value, error = None, None
        try:
            device = f"/job:worker/replica:0/task:{incarnation.worker_index}"
            dispatch = coordinator_context.with_dispatch_context(incarnation)
            with tf.device(device), tf_context.executor_scope(executor), dispatch:
                value = unit.function(incarnation)
        except BaseException as raised:
            error = raised
        if not self._release(incarnation):
            return False
        if error is None:
            worker = incarnation.worker_index
            share = self.shares[worker]
            share.units, share.steps, share.failures = share.units + 1, share.steps + unit.steps, 0
            unit.future.set_result(Done(value=value, worker_index=worker, times=unit.losses + 1))
        elif isinstance(error, tf.errors.OpError) and self._recover(unit, incarnation, error):
            executor.clear_error()  # else the executor raises the error again when it ends
        else:
            unit.future.set_exception(error)
        return True

    def _report_oldest(self) -> None:
        """Report the age and the worker of the oldest work unit in flight."""
        phases.set_pending_work(
            min(
                (
                    phases.PendingWork(
                        task=one.task, since_s=unit.begun_s, is_first=one not in self._warm
                    )
                    for one, unit in self._held.items()
                ),
                key=lambda pending: pending.since_s,
                default=None,
            )
        )

    def _recover(
        self, unit: WorkUnit, incarnation: WorkerIncarnation, error: tf.errors.OpError
    ) -> bool:
        """Requeue if a worker died, fail if a ps died, and return False for any other error."""
        gone = self._connections.missing()
        if gone:
            self._fail(PeerLost(f"lost {gone[0]}: it does not answer"))
            unit.future.set_exception(self._fatal)
            return True
        if not is_of_the_network(error):
            return False
        reason = f"lost {incarnation.task}"
        if self._connections.answers(incarnation.worker_index):
            says = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            reason = f"{incarnation.task} answers, but a work unit failed: {says}"
            share = self.shares[incarnation.worker_index]
            share.failures += 1
            if share.failures == _MAX_FAILURES:
                line = f"{incarnation.task} answers, but failed {_MAX_FAILURES} work units in a row"
                if all(one.is_left_out for one in self.shares.values()):
                    self._fail(PeerLost(f"{line}: {says}"))
                else:
                    _LOG.warning("%s: %s; continuing without this worker", line, says)
        self._lose(unit, incarnation, reason)
        return True

    def _lose(self, unit: WorkUnit, incarnation: WorkerIncarnation, reason: str) -> None:
        """Requeue the work unit of a worker that died or cannot run it."""
        self._connections.lost(incarnation.worker_index)
        self.shares[incarnation.worker_index].losses += 1
        unit.losses += 1
        if unit.losses < _MAX_LOSSES:
            _LOG.warning("%s; giving its work to another worker", reason)
            self._requeue(unit)
            return
        reason = f"a work unit failed {_MAX_LOSSES} times; last failure: {reason}"
        unit.future.set_exception(self._fatal or PeerLost(reason))

    def _requeue(self, unit: WorkUnit) -> None:
        with self._changed:
            if self._fatal is not None:
                unit.future.set_exception(self._fatal)
                return
            self._waiting.appendleft(unit)
            self._changed.notify()

    def _watch(self) -> None:
        """Detect dead workers and servers while a call to them is blocked."""
        silent_since_s: dict[Any, float] = {}
        while self._fatal is None:
            time.sleep(_PROBE_EVERY_S)
            with self._changed:
                held = list(self._held)
            silent: list[Any] = [i for i in held if not self._connections.answers(i.worker_index)]
            silent += self._connections.missing() if held else []
            now_s = time.monotonic()
            silent_since_s = {one: silent_since_s.get(one, now_s) for one in silent}
            for one, since_s in silent_since_s.items():
                if now_s - since_s < _GONE_S:
                    continue
                if not isinstance(one, WorkerIncarnation):
                    self._fail(PeerLost(f"lost {one}: it does not answer"))
                    continue
                with self._changed:
                    unit = self._held.get(one)
                if unit is not None and self._release(one):  # else its call ended meanwhile
                    self._lose(unit, one, f"lost {one.task}")
                    self._begin_to_serve(one.worker_index, life=one.life)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error
            # Units in flight fail too, because the call to a worker may never end.
            for unit in (*self._waiting, *self._held.values()):
                unit.future.set_exception(error)
            self._waiting.clear()
            self._held.clear()
            self._report_oldest()
            self._changed.notify_all()


def is_of_the_network(error: tf.errors.OpError) -> bool:
    """Return whether an error may result from a worker's death, rather than from the work.

    TensorFlow cancels a call only if a task dies, for example the task that made the call.
    """
    of_network = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
    if isinstance(error, of_network):
        return True
    return any(text in str(error) for text in _REPLACED)


_worker_pools: weakref.WeakKeyDictionary[tf.distribute.Strategy, WorkerPool] = (
    weakref.WeakKeyDictionary()
)


def worker_pool_of(strategy: tf.distribute.Strategy, *, patience_s: float = 60.0) -> WorkerPool:
    """Return the worker pool of a strategy. Create it at the first call."""
    if strategy not in _worker_pools:
        _worker_pools[strategy] = WorkerPool(Connections.of(strategy), patience_s=patience_s)
    return _worker_pools[strategy]


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkerTally:
    """Counts of the work units and training steps that a worker finished, and of its failures."""

    units: int = 0
    steps: int = 0
    losses: int = 0  # units in flight when it died, maybe applied in part
    failures: int = 0  # units in a row that failed although the worker answers

    @property
    def is_left_out(self) -> bool:
        return self.failures >= _MAX_FAILURES


@dataclasses.dataclass(kw_only=True, slots=True)
class Account:
    """Record of the training steps of one process. A step completes once and may start twice.

    `staleness` counts steps by the number of other updates between a step's read and its write.
    """

    applied_twice: int = 0  # updates on the servers, minus the completed steps
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    repeats: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def done(self, first: int, last: int, *, times: int, staleness: Iterable[int]) -> None:
        self.staleness.update(map(int, staleness))
        if times > 1:
            self.repeats.append((first, last, times))

    def summary(self) -> dict[str, Any]:
        return {
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "steps_applied_twice": self.applied_twice,
            "repeated_ranges": [list(repeat) for repeat in self.repeats],
        }
