"""Hands pieces of work to the workers of a ps job that are alive, each piece to one of them.

A piece goes to whichever worker is free, so that a slow one gets fewer. What a worker had when it
died goes to the next; the worker gets work again as soon as it is back. Work goes on while there
is one worker, also where the runtime never says that another has gone.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import executor as tf_executor

from tfdist.cluster import Task, phases
from tfdist.errors import PeerLost
from tfdist.strategy.members import Members
from tfdist.training.engines.account import Account, Share
from tfdist.training.engines.doubts import Doubts, first_line
from tfdist.training.engines.in_flight import InFlight
from tfdist.training.engines.piece import Done, Piece, Place, is_of_the_network, running_at
from tfdist.training.engines.silence import Silence

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
