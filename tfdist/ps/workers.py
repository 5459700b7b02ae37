"""Worker pool of a ps job: dispatches each work unit to one live worker.

A piece goes to whichever worker is free, so that a slow one gets fewer. What a worker had when it
died goes to the next; the worker gets work again as soon as it is back. Work goes on while there
is one worker, also where the runtime never says that another has gone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import tensorflow as tf
from tensorflow.python.eager import executor as tf_executor

from tfdist import phases
from tfdist.cluster import Task
from tfdist.errors import PeerLost
from tfdist.ps.closure import Done, WorkerIncarnation, WorkUnit, is_of_the_network, running_on
from tfdist.ps.members import Members

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 0.5
_GONE_S = 4.0  # how long who has work, or the weights for it, may not answer before it has gone
_MAX_LOSSES = 5  # of one work unit, before it is thought to be what ends the workers


class WorkerPool:
    """Worker pool with a thread per worker, which runs one work unit at a time on it."""

    def __init__(self, members: Members, *, patience_s: float) -> None:
        self._members = members
        self._patience_s = patience_s
        self._waiting: collections.deque[WorkUnit] = collections.deque()
        self._in_flight: InFlight[WorkUnit] = InFlight()
        self._changed = threading.Condition()
        self._fatal: BaseException | None = None
        self._nobody_since: float | None = None
        self._held: dict[WorkerIncarnation, WorkUnit] = {}
        self._under_way: dict[WorkerIncarnation, phases.PendingWork] = {}
        self._begun: set[WorkerIncarnation] = set()
        self._stalled_workers = StalledWorkerDetector()
        self.shares = {i: WorkerTally() for i in range(members.num_workers)}
        self.account = Account()
        for worker in self.shares:
            self._begin_to_serve(worker, life=1 if worker in members.connected else 0)
        threading.Thread(target=self._watch, name="tfdist-workers", daemon=True).start()

    def submit(
        self,
        function: Callable[[WorkerIncarnation], Any],
        *,
        steps: int = 0,
        max_staleness: int | None = None,
    ) -> Future[Done]:
        """Have `function` called for whichever worker is free, with its devices as the default.

        The result, or what it raised, comes by the future. It is called again if its worker dies.
        `steps` are those of training in it. It begins only when none of them can have more than
        `max_staleness` steps of other pieces between its beginning and its end, nor those that
        are under way. Raises PeerLost once a ps or all workers have gone.
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
        """Wait until there is no piece that no worker has begun."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def drop(self) -> None:
        """Forget what no worker has begun."""
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
        executor = tf_executor.new_executor(enable_async=False)
        while self._fatal is None:
            if worker not in self._members.connected:
                if not self._admitted(worker):
                    continue
                life += 1
                executor = tf_executor.new_executor(enable_async=False)
            incarnation = WorkerIncarnation(worker_index=worker, life=life)
            unit = self._next(incarnation)
            if unit is None:
                return
            if unit.losses and not self._members.answers(worker):
                self._decline(unit, incarnation)  # which is not what has ended this worker
                continue
            is_there = self._run(unit, incarnation, executor)
            if is_there is None:
                return  # another thread serves this worker
            if not is_there:
                executor.clear_error()  # which it would raise again at its end

    def _admitted(self, worker: int) -> bool:
        if worker not in self._stalled_workers.left_out and self._members.admit(worker):
            _LOG.info("worker-%d takes work", worker)
            with self._changed:
                self._nobody_since = None
            return True
        self._mind_nobody()
        time.sleep(_PROBE_EVERY_S)
        return False

    def _mind_nobody(self) -> None:
        """Give up when there has been no worker for too long."""
        with self._changed:
            if self._members.connected or not self._waiting:
                self._nobody_since = None
                return
            now_s = time.monotonic()
            self._nobody_since = self._nobody_since or now_s
            if now_s - self._nobody_since < self._patience_s:
                return
        self._fail(PeerLost(f"no worker for {self._patience_s:.0f} s; all of them have ended"))

    def _next(self, incarnation: WorkerIncarnation) -> WorkUnit | None:
        with self._changed:
            while not self._may_begin() and self._fatal is None:
                self._changed.wait()
            if self._fatal is not None:
                return None
            unit = self._waiting.popleft()
            self._in_flight.begin(unit, steps=unit.steps)
            self._held[incarnation] = unit
            if not self._waiting:
                self._changed.notify_all()  # `wait_until_begun`
            return unit

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        unit = self._waiting[0]
        return self._in_flight.admits(unit.steps, max_staleness=unit.max_staleness)

    def _released(self, incarnation: WorkerIncarnation) -> bool:
        """Record that a piece is not under way any more; False if that had been done."""
        with self._changed:
            unit = self._held.pop(incarnation, None)
            if unit is not None:
                self._in_flight.end(unit)
                self._changed.notify_all()
            return unit is not None

    def _run(self, unit: WorkUnit, incarnation: WorkerIncarnation, executor: Any) -> bool | None:
        """Run a piece; return whether the worker is still there, None if that was judged."""
        start_s = time.monotonic()
        failed: BaseException | None = None
        try:
            with self._awaited(incarnation), running_on(incarnation, executor):
                result = unit.function(incarnation)
        except BaseException as error:
            failed = error
        if not self._released(incarnation):
            return None
        if failed is not None:
            if isinstance(failed, tf.errors.OpError) and self._has_lost(unit, incarnation, failed):
                return False
            unit.future.set_exception(failed)
            return True
        self._stalled_workers.did(incarnation.worker_index)
        taken_s = time.monotonic() - start_s
        self.shares[incarnation.worker_index].add(steps=unit.steps, seconds=taken_s)
        times = unit.losses + 1
        unit.future.set_result(
            Done(value=result, worker_index=incarnation.worker_index, times=times)
        )
        return True

    @contextlib.contextmanager
    def _awaited(self, incarnation: WorkerIncarnation) -> Iterator[None]:
        """Report how old the oldest piece under way is, and who has it."""
        is_first, now_s = incarnation not in self._begun, time.monotonic()
        self._begun.add(incarnation)
        self._say(
            incarnation, phases.PendingWork(task=incarnation.task, since_s=now_s, is_first=is_first)
        )
        try:
            yield
        finally:
            self._say(incarnation, None)

    def _say(self, incarnation: WorkerIncarnation, unit: phases.PendingWork | None) -> None:
        with self._changed:
            self._under_way.pop(incarnation, None)
            if unit is not None:
                self._under_way[incarnation] = unit
            units = self._under_way.values()
            phases.set_pending_work(min(units, key=lambda unit: unit.since_s, default=None))

    def _has_lost(
        self, unit: WorkUnit, incarnation: WorkerIncarnation, error: tf.errors.OpError
    ) -> bool:
        """Return whether `error` is the end of a worker or a ps, and not a mistake in the work."""
        gone = self._members.missing()
        if gone:
            self._fail(PeerLost(f"{gone[0]} does not answer any more"))
            unit.future.set_exception(self._fatal)
            return True
        if not is_of_the_network(error):
            return False
        message = first_line(error) if self._members.answers(incarnation.worker_index) else ""
        if message:
            self._note_failure(incarnation.worker_index, error)
        self._lost(unit, incarnation, message=message)
        return True

    def _note_failure(self, worker: int, error: tf.errors.OpError) -> None:
        line = self._stalled_workers.failed(worker, error)
        if line and self._stalled_workers.left_out == self.shares.keys():
            self._fail(PeerLost(line))
        elif line:
            _LOG.warning("%s; going on without it", line)

    def _lost(self, unit: WorkUnit, incarnation: WorkerIncarnation, *, message: str = "") -> None:
        """Gives the piece of a worker that is gone, or has `message` why it failed, to another."""
        self._members.lost(incarnation.worker_index)
        self.shares[incarnation.worker_index].losses += 1
        unit.losses += 1
        why = (
            f"{incarnation.task} answers, and says: {message}"
            if message
            else f"{incarnation.task} is gone"
        )
        if unit.losses < _MAX_LOSSES:
            _LOG.warning("%s; its work goes to another", why)
            self._requeue(unit)
            return
        why = f"a work unit was begun {_MAX_LOSSES} times and never done; {why}"
        unit.future.set_exception(self._fatal or PeerLost(why))

    def _decline(self, unit: WorkUnit, incarnation: WorkerIncarnation) -> None:
        """Leave a piece that was not begun to another."""
        self._members.lost(incarnation.worker_index)
        self._released(incarnation)
        self._requeue(unit)

    def _requeue(self, unit: WorkUnit) -> None:
        with self._changed:
            if self._fatal is not None:
                unit.future.set_exception(self._fatal)
                return
            self._waiting.appendleft(unit)
            self._changed.notify()

    def _watch(self) -> None:
        """Find out who is gone while a call that needs them does not end."""
        workers, servers = (
            HeartbeatTimeout[WorkerIncarnation](_GONE_S),
            HeartbeatTimeout[Task](_GONE_S),
        )
        while self._fatal is None:
            time.sleep(_PROBE_EVERY_S)
            with self._changed:
                held = list(self._held)
            unresponsive = [
                incarnation
                for incarnation in held
                if not self._members.answers(incarnation.worker_index)
            ]
            for incarnation in workers.too_long(unresponsive):
                self._reclaim(incarnation)
            for server in servers.too_long(self._members.missing() if held else []):
                self._fail(PeerLost(f"{server} does not answer any more"))

    def _reclaim(self, incarnation: WorkerIncarnation) -> None:
        with self._changed:
            unit = self._held.get(incarnation)
        if unit is None or not self._released(incarnation):
            return  # its call has ended meanwhile
        self._say(incarnation, None)
        self._lost(unit, incarnation)
        self._begin_to_serve(incarnation.worker_index, life=incarnation.life)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error
            # Of those under way too: the call to a worker may never end.
            for unit in (*self._waiting, *self._held.values()):
                unit.future.set_exception(error)
            self._waiting.clear()
            self._held.clear()
            self._changed.notify_all()


_worker_pools: weakref.WeakKeyDictionary[tf.distribute.Strategy, WorkerPool] = (
    weakref.WeakKeyDictionary()
)


def worker_pool_of(strategy: tf.distribute.Strategy, *, patience_s: float) -> WorkerPool:
    """Return the worker pool of a strategy."""
    if strategy not in _worker_pools:
        _worker_pools[strategy] = WorkerPool(Members.of(strategy), patience_s=patience_s)
    return _worker_pools[strategy]


# Workers and servers whose heartbeat has timed out.


_T = TypeVar("_T", bound=Hashable)


class HeartbeatTimeout(Generic[_T]):
    """Tracker of how long each peer has not answered."""

    def __init__(self, most_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._since_s: dict[_T, float] = {}

    def too_long(self, unresponsive: Collection[_T]) -> list[_T]:
        """Record who is silent now; return those silent at each poll for `most_s`."""
        now_s = self._clock()
        self._since_s = {one: self._since_s.get(one, now_s) for one in unresponsive}
        return [one for one, since_s in self._since_s.items() if now_s - since_s >= self._most_s]


# Detection of stalled workers, which answer but complete no work.


_MOST_FAILURES = 3  # failures in a row; one that came back unseen fails once


class StalledWorkerDetector:
    """Counter of consecutive failed work units of each live worker."""

    def __init__(self) -> None:
        self._failures: collections.Counter[int] = collections.Counter()
        self.left_out: frozenset[int] = frozenset()

    def did(self, worker: int) -> None:
        """A worker has done a piece."""
        self._failures.pop(worker, None)

    def failed(self, worker: int, error: BaseException) -> str | None:
        """Return a line once a worker is to be left out."""
        self._failures[worker] += 1
        if self._failures[worker] < _MOST_FAILURES or worker in self.left_out:
            return None
        self.left_out |= {worker}
        message = first_line(error)
        most = _MOST_FAILURES
        return f"worker-{worker} answers, but none of {most} work units got done: {message}"


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line that is not too long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# Work units in flight, and the staleness bound of each.


_P = TypeVar("_P", bound=Hashable)


class InFlight(Generic[_P]):
    """The pieces under way. For each, the steps of others that may be applied before its end.

    These are the steps that were under way when it began, and those begun since.
    """

    def __init__(self) -> None:
        self._steps: dict[_P, int] = {}
        self._others: dict[_P, int] = {}

    def admits(self, steps: int, *, max_staleness: int | None) -> bool:
        """Return whether a piece of so many steps may begin now."""
        if max_staleness is None or not steps:
            return True
        if sum(self._steps.values()) > max_staleness:
            return False
        return all(others + steps <= max_staleness for others in self._others.values())

    def begin(self, unit: _P, *, steps: int) -> None:
        """Record that a piece is under way."""
        for other in self._others:
            self._others[other] += steps
        self._others[unit] = sum(self._steps.values())
        self._steps[unit] = steps

    def end(self, unit: _P) -> None:
        """Record that a piece has ended, done or not."""
        self._steps.pop(unit, None)
        self._others.pop(unit, None)


def steps_of_a_unit(*, most: int, workers: int, max_staleness: int | None) -> int:
    """Return how long pieces may be that still let as many workers as can be work at a time.

    With a bound of k at most k + 1 work at a time. Half of the bound is for the pieces that are
    under way when one begins, half for those that begin while it is.
    """
    if max_staleness is None:
        return most
    others = min(workers - 1, max_staleness)
    return most if not others else min(most, max(1, max_staleness // (2 * others)))


# Account of dispatched steps: per worker, staleness, repeats.


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkerTally:
    """What one worker has done.

    Attributes:
      pieces: that it finished.
      steps: of training in them.
      seconds: that these took.
      losses: pieces that were under way when it died; each may have been applied in part.
    """

    units: int = 0
    steps: int = 0
    seconds: float = 0.0
    losses: int = 0

    def add(self, *, steps: int, seconds: float) -> None:
        """Record a piece that it has finished."""
        self.units += 1
        self.steps += steps
        self.seconds += seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """A range of training steps ``[first, last)`` that was begun `times` times, as workers died."""

    first: int
    last: int
    times: int


class Account:
    """The training steps of one process: each was completed once, and some were begun again.

    Attributes:
      applied_twice: updates that the servers have seen, less the steps completed.
      staleness: how many steps had so many updates of others between their reading and writing.
      repeats: the ranges that were begun more than once.
    """

    def __init__(self) -> None:
        self.applied_twice = 0
        self.staleness: collections.Counter[int] = collections.Counter()
        self.repeats: list[Repeat] = []

    def done(self, first: int, last: int, *, times: int, staleness: Iterable[int]) -> None:
        """Record a work unit that is done."""
        self.staleness.update(map(int, staleness))
        if times > 1:
            self.repeats.append(Repeat(first=first, last=last, times=times))

    def summary(self) -> dict[str, Any]:
        """Return what the run's summary says of it."""
        return {
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "steps_applied_twice": self.applied_twice,
            "repeated_ranges": [[r.first, r.last, r.times] for r in self.repeats],
        }
