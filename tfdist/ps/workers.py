"""Hand pieces of work to the workers of a ps job that are alive, each piece to one of them.

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

from tfdist.cluster import Task, phases
from tfdist.errors import PeerLost
from tfdist.ps.closure import Done, Piece, Place, is_of_the_network, running_at
from tfdist.ps.members import Members

_LOG = logging.getLogger(__name__)
_PROBE_EVERY_S = 0.5
_GONE_S = 4.0  # how long who has work, or the weights for it, may not answer before it has gone
_MAX_LOSSES = 5  # of one piece of work, before it is thought to be what ends the workers


class Crew:
    """A thread for each declared worker; each hands one piece at a time to its worker."""

    def __init__(self, members: Members, *, patience_s: float) -> None:
        self._members = members
        self._patience_s = patience_s
        self._waiting: collections.deque[Piece] = collections.deque()
        self._in_flight: InFlight[Piece] = InFlight()
        self._changed = threading.Condition()
        self._fatal: BaseException | None = None
        self._nobody_since: float | None = None
        self._held: dict[Place, Piece] = {}
        self._under_way: dict[Place, phases.Awaited] = {}
        self._begun: set[Place] = set()
        self._doubts = Doubts()
        self.shares = {i: Share() for i in range(members.num_workers)}
        self.account = Account()
        for worker in self.shares:
            self._begin_to_serve(worker, life=1 if worker in members.connected else 0)
        threading.Thread(target=self._watch, name="tfdist-workers", daemon=True).start()

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
                Piece(function=function, future=future, steps=steps, max_staleness=max_staleness)
            )
            self._changed.notify()
        return future

    def wait_until_begun(self) -> None:
        """Waits until there is no piece that no worker has begun."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def drop(self) -> None:
        """Forgets what no worker has begun."""
        with self._changed:
            for piece in self._waiting:
                piece.future.cancel()
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
            place = Place(worker_index=worker, life=life)
            piece = self._next(place)
            if piece is None:
                return
            if piece.losses and not self._members.answers(worker):
                self._give_back(piece, place)  # which is not what has ended this worker
                continue
            is_there = self._run(piece, place, executor)
            if is_there is None:
                return  # another thread serves this worker
            if not is_there:
                executor.clear_error()  # which it would raise again at its end

    def _admitted(self, worker: int) -> bool:
        if worker not in self._doubts.left_out and self._members.admit(worker):
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
            now_s = time.monotonic()
            self._nobody_since = self._nobody_since or now_s
            if now_s - self._nobody_since < self._patience_s:
                return
        self._fail(PeerLost(f"no worker for {self._patience_s:.0f} s; all of them have ended"))

    def _next(self, place: Place) -> Piece | None:
        with self._changed:
            while not self._may_begin() and self._fatal is None:
                self._changed.wait()
            if self._fatal is not None:
                return None
            piece = self._waiting.popleft()
            self._in_flight.begin(piece, steps=piece.steps)
            self._held[place] = piece
            if not self._waiting:
                self._changed.notify_all()  # `wait_until_begun`
            return piece

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        piece = self._waiting[0]
        return self._in_flight.admits(piece.steps, max_staleness=piece.max_staleness)

    def _released(self, place: Place) -> bool:
        """Takes down that a piece is not under way any more; False if that had been done."""
        with self._changed:
            piece = self._held.pop(place, None)
            if piece is not None:
                self._in_flight.end(piece)
                self._changed.notify_all()
            return piece is not None

    def _run(self, piece: Piece, place: Place, executor: Any) -> bool | None:
        """Runs a piece; returns whether the worker is still there, None if that was judged."""
        start_s = time.monotonic()
        failed: BaseException | None = None
        try:
            with self._awaited(place), running_at(place, executor):
                result = piece.function(place)
        except BaseException as error:
            failed = error
        if not self._released(place):
            return None
        if failed is not None:
            if isinstance(failed, tf.errors.OpError) and self._has_lost(piece, place, failed):
                return False
            piece.future.set_exception(failed)
            return True
        self._doubts.did(place.worker_index)
        taken_s = time.monotonic() - start_s
        self.shares[place.worker_index].add(steps=piece.steps, seconds=taken_s)
        times = piece.losses + 1
        piece.future.set_result(Done(value=result, worker_index=place.worker_index, times=times))
        return True

    @contextlib.contextmanager
    def _awaited(self, place: Place) -> Iterator[None]:
        """Says how old the oldest piece under way is, and who has it."""
        is_first, now_s = place not in self._begun, time.monotonic()
        self._begun.add(place)
        self._say(place, phases.Awaited(task=place.task, since_s=now_s, is_first=is_first))
        try:
            yield
        finally:
            self._say(place, None)

    def _say(self, place: Place, piece: phases.Awaited | None) -> None:
        with self._changed:
            self._under_way.pop(place, None)
            if piece is not None:
                self._under_way[place] = piece
            pieces = self._under_way.values()
            phases.say_awaited(min(pieces, key=lambda piece: piece.since_s, default=None))

    def _has_lost(self, piece: Piece, place: Place, error: tf.errors.OpError) -> bool:
        """Whether `error` is the end of a worker or a ps, and not a mistake in the work."""
        gone = self._members.missing()
        if gone:
            self._fail(PeerLost(f"{gone[0]} does not answer any more"))
            piece.future.set_exception(self._fatal)
            return True
        if not is_of_the_network(error):
            return False
        said = first_line(error) if self._members.answers(place.worker_index) else ""
        if said:
            self._doubt(place.worker_index, error)
        self._lost(piece, place, said=said)
        return True

    def _doubt(self, worker: int, error: tf.errors.OpError) -> None:
        line = self._doubts.failed(worker, error)
        if line and self._doubts.left_out == self.shares.keys():
            self._fail(PeerLost(line))
        elif line:
            _LOG.warning("%s; going on without it", line)

    def _lost(self, piece: Piece, place: Place, *, said: str = "") -> None:
        """Gives the piece of a worker that is gone, or has `said` why it failed, to another."""
        self._members.lost(place.worker_index)
        self.shares[place.worker_index].losses += 1
        piece.losses += 1
        why = f"{place.task} answers, and says: {said}" if said else f"{place.task} is gone"
        if piece.losses < _MAX_LOSSES:
            _LOG.warning("%s; its work goes to another", why)
            self._queue_again(piece)
            return
        why = f"a piece of work was begun {_MAX_LOSSES} times and never done; {why}"
        piece.future.set_exception(self._fatal or PeerLost(why))

    def _give_back(self, piece: Piece, place: Place) -> None:
        """Leaves a piece that was not begun to another."""
        self._members.lost(place.worker_index)
        self._released(place)
        self._queue_again(piece)

    def _queue_again(self, piece: Piece) -> None:
        with self._changed:
            if self._fatal is not None:
                piece.future.set_exception(self._fatal)
                return
            self._waiting.appendleft(piece)
            self._changed.notify()

    def _watch(self) -> None:
        """Finds out who is gone while a call that needs them does not end."""
        workers, servers = Silence[Place](_GONE_S), Silence[Task](_GONE_S)
        while self._fatal is None:
            time.sleep(_PROBE_EVERY_S)
            with self._changed:
                held = list(self._held)
            silent = [place for place in held if not self._members.answers(place.worker_index)]
            for place in workers.too_long(silent):
                self._take_back(place)
            for server in servers.too_long(self._members.missing() if held else []):
                self._fail(PeerLost(f"{server} does not answer any more"))

    def _take_back(self, place: Place) -> None:
        with self._changed:
            piece = self._held.get(place)
        if piece is None or not self._released(place):
            return  # its call has ended meanwhile
        self._say(place, None)
        self._lost(piece, place)
        self._begin_to_serve(place.worker_index, life=place.life)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = error
            # Of those under way too: the call to a worker may never end.
            for piece in (*self._waiting, *self._held.values()):
                piece.future.set_exception(error)
            self._waiting.clear()
            self._held.clear()
            self._changed.notify_all()


_crews: weakref.WeakKeyDictionary[tf.distribute.Strategy, Crew] = weakref.WeakKeyDictionary()


def crew_of(strategy: tf.distribute.Strategy, *, patience_s: float) -> Crew:
    """The one crew of a strategy's workers."""
    if strategy not in _crews:
        _crews[strategy] = Crew(Members.of(strategy), patience_s=patience_s)
    return _crews[strategy]


# Who has not answered for so long that they are thought to be gone.


_T = TypeVar("_T", bound=Hashable)


class Silence(Generic[_T]):
    """Remembers since when each of those who do not answer has been silent."""

    def __init__(self, most_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._since_s: dict[_T, float] = {}

    def too_long(self, silent: Collection[_T]) -> list[_T]:
        """Takes down who is silent now; returns those who have been at each look for `most_s`."""
        now_s = self._clock()
        self._since_s = {one: self._since_s.get(one, now_s) for one in silent}
        return [one for one, since_s in self._since_s.items() if now_s - since_s >= self._most_s]


# Workers that answer and get nothing done, as one does that cannot reach a parameter server.


_MOST_FAILURES = 3  # failures in a row; one that came back unseen fails once


class Doubts:
    """Counts the pieces in a row that workers could not do, although they were there."""

    def __init__(self) -> None:
        self._failures: collections.Counter[int] = collections.Counter()
        self.left_out: frozenset[int] = frozenset()

    def did(self, worker: int) -> None:
        """A worker has done a piece."""
        self._failures.pop(worker, None)

    def failed(self, worker: int, error: BaseException) -> str | None:
        """Returns a line once a worker is to be left out."""
        self._failures[worker] += 1
        if self._failures[worker] < _MOST_FAILURES or worker in self.left_out:
            return None
        self.left_out |= {worker}
        said = first_line(error)
        most = _MOST_FAILURES
        return f"worker-{worker} answers, but none of {most} pieces of work got done: {said}"


def first_line(error: BaseException) -> str:
    """What an error says, in a line that is not too long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# Which pieces of work are under way, and how many steps of others each may have seen applied.


_P = TypeVar("_P", bound=Hashable)


class InFlight(Generic[_P]):
    """The pieces under way. For each, the steps of others that may be applied before its end.

    These are the steps that were under way when it began, and those begun since.
    """

    def __init__(self) -> None:
        self._steps: dict[_P, int] = {}
        self._others: dict[_P, int] = {}

    def admits(self, steps: int, *, max_staleness: int | None) -> bool:
        """Returns whether a piece of so many steps may begin now."""
        if max_staleness is None or not steps:
            return True
        if sum(self._steps.values()) > max_staleness:
            return False
        return all(others + steps <= max_staleness for others in self._others.values())

    def begin(self, piece: _P, *, steps: int) -> None:
        """Takes down that a piece is under way."""
        for other in self._others:
            self._others[other] += steps
        self._others[piece] = sum(self._steps.values())
        self._steps[piece] = steps

    def end(self, piece: _P) -> None:
        """Takes down that a piece has ended, done or not."""
        self._steps.pop(piece, None)
        self._others.pop(piece, None)


def steps_of_a_piece(*, most: int, workers: int, max_staleness: int | None) -> int:
    """Returns how long pieces may be that still let as many workers as can be work at a time.

    With a bound of k at most k + 1 work at a time. Half of the bound is for the pieces that are
    under way when one begins, half for those that begin while it is.
    """
    if max_staleness is None:
        return most
    others = min(workers - 1, max_staleness)
    return most if not others else min(most, max(1, max_staleness // (2 * others)))


# What became of the steps that were handed out: who did how many, how stale, how often.


@dataclasses.dataclass(kw_only=True, slots=True)
class Share:
    """What one worker has done.

    Attributes:
      pieces: that it finished.
      steps: of training in them.
      seconds: that these took.
      losses: pieces that were under way when it died; each may have been applied in part.
    """

    pieces: int = 0
    steps: int = 0
    seconds: float = 0.0
    losses: int = 0

    def add(self, *, steps: int, seconds: float) -> None:
        """Takes down a piece that it has finished."""
        self.pieces += 1
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
        """Takes down a piece of work that is done."""
        self.staleness.update(map(int, staleness))
        if times > 1:
            self.repeats.append(Repeat(first=first, last=last, times=times))

    def summary(self) -> dict[str, Any]:
        """Returns what the run's summary says of it."""
        return {
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "steps_applied_twice": self.applied_twice,
            "repeated_ranges": [[r.first, r.last, r.times] for r in self.repeats],
        }
