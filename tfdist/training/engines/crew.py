"""Hands pieces of work to the workers of a ps job that are alive, each piece to one of them.

A piece goes to whichever worker is free, so that a slow one gets fewer. What a worker had when it
died goes to the next; the worker gets work again as soon as it is back. Work goes on while there
is one worker.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import executor as tf_executor

from tfdist.cluster import phases
from tfdist.errors import PeerLost
from tfdist.strategy.members import Members
from tfdist.training.engines.account import Account, Share
from tfdist.training.engines.in_flight import InFlight

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 0.5
_MAX_LOSSES = 5  # of one piece of work, before it is thought to be what ends the workers
# What the runtime says of a worker that ended and came back between two calls.
_REPLACED = (
    "unknown device",
    "Primary device is not remote",
    "Unable to find the relevant tensor remote_handle",
    "Unable to find a context_id",
    "which might mean the worker",
)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Piece:
    """A piece of work, and who waits for its result."""

    function: Callable[[Place], Any]
    future: Future[Done]
    steps: int
    max_staleness: int | None = None
    losses: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a piece of work runs.

    Attributes:
      worker_index: the worker's.
      life: how many times this worker has been connected to; what was kept there is gone with
        the life before.
    """

    worker_index: int
    life: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A piece of work that is done.

    Attributes:
      value: what its function returned.
      worker_index: of the worker that did it.
      times: how often it was begun: 1, and 1 more for each worker that died over it.
    """

    value: Any
    worker_index: int
    times: int


class Crew:
    """A thread for each declared worker; each hands one piece at a time to its worker."""

    def __init__(
        self,
        members: Members,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._patience_s = patience_s
        self._clock = clock
        self._waiting: collections.deque[_Piece] = collections.deque()
        self._in_flight: InFlight[_Piece] = InFlight()
        self._changed = threading.Condition()
        self._fatal: BaseException | None = None
        self._nobody_since: float | None = None
        self._under_way: dict[int, phases.Awaited] = {}
        self._begun: set[Place] = set()
        self.shares = {i: Share() for i in range(members.num_workers)}
        self.account = Account()
        for worker in self.shares:
            threading.Thread(
                target=self._serve, args=(worker,), name=f"tfdist-worker-{worker}", daemon=True
            ).start()

    def submit(
        self, function: Callable[[Place], Any], *, steps: int = 0, max_staleness: int | None = None
    ) -> Future[Done]:
        """Has `function` called for whichever worker is free, with its devices as the default.

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
                _Piece(function=function, future=future, steps=steps, max_staleness=max_staleness)
            )
            self._changed.notify()
        return future

    def drop(self) -> None:
        """Forgets what no worker has begun."""
        with self._changed:
            for piece in self._waiting:
                piece.future.cancel()
            self._waiting.clear()

    def _serve(self, worker: int) -> None:
        life = 1 if worker in self._members.connected else 0
        executor = tf_executor.new_executor(enable_async=False)
        while self._fatal is None:
            if worker not in self._members.connected:
                if not self._admitted(worker):
                    continue
                life += 1
                executor = tf_executor.new_executor(enable_async=False)
            piece = self._next()
            if piece is None:
                return
            place = Place(worker_index=worker, life=life)
            if not self._run(piece, place, executor):
                executor.clear_error()  # which it would raise again at its end

    def _admitted(self, worker: int) -> bool:
        if self._members.admit(worker):
            _LOG.info("worker-%d takes work", worker)
            with self._changed:
                self._nobody_since = None
            return True
        self._mind_nobody()
        time.sleep(_PROBE_EVERY_S)
        return False

    def _mind_nobody(self) -> None:
        """Gives up when there has been no worker for too long."""
        with self._changed:
            if self._members.connected or not self._waiting:
                self._nobody_since = None
                return
            now_s = self._clock()
            self._nobody_since = self._nobody_since or now_s
            if now_s - self._nobody_since < self._patience_s:
                return
        self._fail(PeerLost(f"no worker for {self._patience_s:.0f} s; all of them have ended"))

    def _next(self) -> _Piece | None:
        with self._changed:
            while not self._may_begin() and self._fatal is None:
                self._changed.wait()
            if self._fatal is not None:
                return None
            piece = self._waiting.popleft()
            self._in_flight.begin(piece, steps=piece.steps)
            return piece

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        piece = self._waiting[0]
        return self._in_flight.admits(piece.steps, max_staleness=piece.max_staleness)

    def _called(self, piece: _Piece, place: Place, executor: Any) -> Any:
        try:
            with self._awaited(place), _at(place, executor):
                return piece.function(place)
        finally:
            with self._changed:
                self._in_flight.end(piece)
                self._changed.notify_all()

    def _run(self, piece: _Piece, place: Place, executor: Any) -> bool:
        """Runs a piece; returns whether the worker is still there."""
        start_s = self._clock()
        try:
            result = self._called(piece, place, executor)
        except BaseException as error:
            if isinstance(error, tf.errors.OpError) and self._has_lost(piece, place, error):
                return False
            piece.future.set_exception(error)
            return True
        share = self.shares[place.worker_index]
        share.pieces += 1
        share.steps += piece.steps
        share.seconds += self._clock() - start_s
        times = piece.losses + 1
        piece.future.set_result(Done(value=result, worker_index=place.worker_index, times=times))
        return True

    @contextlib.contextmanager
    def _awaited(self, place: Place) -> Iterator[None]:
        """Says how old the oldest piece under way is, and who has it."""
        worker = place.worker_index
        task, is_first = f"worker-{worker}", place not in self._begun
        self._begun.add(place)
        now_s = time.monotonic()
        self._say(worker, phases.Awaited(task=task, since_s=now_s, is_first=is_first))
        try:
            yield
        finally:
            self._say(worker, None)

    def _say(self, worker: int, piece: phases.Awaited | None) -> None:
        with self._changed:
            self._under_way.pop(worker, None)
            if piece is not None:
                self._under_way[worker] = piece
            pieces = self._under_way.values()
            phases.say_awaited(min(pieces, key=lambda piece: piece.since_s, default=None))

    def _has_lost(self, piece: _Piece, place: Place, error: tf.errors.OpError) -> bool:
        """Whether `error` is the end of a worker or a ps, and not a mistake in the work."""
        gone = self._members.missing()
        if gone:
            self._fail(PeerLost(f"{gone[0]} does not answer any more"))
            piece.future.set_exception(self._fatal)
            return True
        if not _is_of_the_network(error):
            return False
        self._members.lost(place.worker_index)
        self.shares[place.worker_index].losses += 1
        piece.losses += 1
        if piece.losses >= _MAX_LOSSES:
            return False
        _LOG.warning("worker-%d is gone; its work goes to another", place.worker_index)
        with self._changed:
            self._waiting.appendleft(piece)
            self._changed.notify()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error
            while self._waiting:
                self._waiting.popleft().future.set_exception(error)
            self._changed.notify_all()


_crews: weakref.WeakKeyDictionary[tf.distribute.Strategy, Crew] = weakref.WeakKeyDictionary()


def crew_of(strategy: tf.distribute.Strategy, *, patience_s: float) -> Crew:
    """The one crew of a strategy's workers."""
    if strategy not in _crews:
        _crews[strategy] = Crew(Members.of(strategy), patience_s=patience_s)
    return _crews[strategy]


@contextlib.contextmanager
def _at(place: Place, executor: Any) -> Iterator[None]:
    device = f"/job:worker/replica:0/task:{place.worker_index}"
    dispatch = coordinator_context.with_dispatch_context(place)
    with tf.device(device), tf_context.executor_scope(executor), dispatch:
        yield


def _is_of_the_network(error: tf.errors.OpError) -> bool:
    if isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        return True
    return any(text in str(error) for text in _REPLACED)
