"""The chief's side of a sweep on several hosts: leases, and the runners that have joined.

A lease is a trial and a number, that of the trial's start in the journal, so that a start has one
lease and no later one has it too. While a runner is connected its leases hold: it beats, or the
connection ends. When that has ended they hold for `LEASE_S` from its last word, in which it may
come back. A runner that has lost a lease learns so when it presents it, and what it reports under
it does not count. It ends its trial by itself sooner than its lease can end, by its guard
(`tfdist.tuning.guard`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.launch.multihost.rendezvous import Differs, Hub, Lost, MessageReceived, News, PeerJoined
from tfdist.outputs.sweep_journal import HERE, Slot
from tfdist.tuning import protocol
from tfdist.tuning.protocol import ALIVE, ANY_RANK, LEASE_S, Lease, Message, Ownership
from tfdist.tuning.trial_job import (
    Completed,
    Failed,
    Killed,
    Outcome,
    Runner,
    RunningTrial,
    TrialJob,
    ends_of,
)

logger = logging.getLogger(__name__)


class ServingRunner:
    """Runs trials here, in the slots of `here`, and gives others to the runners that have come.

    Args:
      ownership: that in the sweep's directory.
    """

    def __init__(
        self,
        here: Runner,
        server: RunnerServer,
        *,
        ownership: Ownership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here = here
        self._server = server
        self._ownership = ownership
        self._clock = clock
        self._names: dict[int, str] = {}
        self._slots: dict[int, int] = {}  # of those that are there and stay
        self._trials: dict[str, RemoteTrial] = {}

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        return self._here.outcome(job)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return self._here.metrics(run_dir)

    def free_slots(self, taken: Collection[Slot]) -> Iterable[Slot]:
        """Return those here first, then one of each runner after the other."""
        there = [
            Slot(number=number, runner=rank)
            for number in range(max(self._slots.values(), default=0))
            for rank, slots in self._slots.items()
            if number < slots
        ]
        return [*self._here.free_slots(taken), *(slot for slot in there if slot not in taken)]

    def start(self, job: TrialJob) -> RunningTrial:
        if job.slot.runner == HERE:
            return self._here.start(job)
        trial = self._grant(job)
        self._server.send(job.slot.runner, {"run": protocol.encode_job(job)})
        logger.info("trial %s is with %s", job.trial, self._name_of(job.slot.runner))
        return trial

    def take_over(self, job: TrialJob) -> RunningTrial:
        return self._grant(job, lease_ends_s=self._clock() + LEASE_S)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        """Wait for trials here and for the runners."""
        poll = ends_of(running)
        poll.register(self._server.fileno(), select.POLLIN)
        poll.poll(timeout_s * 1000)
        for news in self._server.take_news():
            self._on_news(news)
        now_s = self._clock()
        for trial in self._trials.values():
            if trial.is_leased and trial.lease_ends_s <= now_s:
                runner = self._name_of(trial.job.slot.runner)
                trial.lose(Killed(reason=f"{runner} was not heard of for {LEASE_S:g} s"))

    def close(self, exit_code: int | None) -> None:
        """End all connections; report how the sweep has ended, if it has."""
        if exit_code is not None:
            for rank in self._names:
                self._server.send(rank, {"end": exit_code})
        self._server.close()

    def _grant(self, job: TrialJob, *, lease_ends_s: float = math.inf) -> RemoteTrial:
        """Let a runner run a trial; until then if it does not come, else while it is there."""
        self._trials[job.trial] = RemoteTrial(self._server, job, lease_ends_s=lease_ends_s)
        return self._trials[job.trial]

    def _leased_to(self, rank: int) -> list[RemoteTrial]:
        return [t for t in self._trials.values() if t.is_leased and t.job.slot.runner == rank]

    def _under(self, lease: Lease, *, rank: int) -> RemoteTrial | None:
        """Return the trial that a runner has under this lease, and of which it may report."""
        trial = self._trials.get(lease[0])
        if trial is None or not trial.is_leased or trial.job.slot.runner != rank:
            return None
        return trial if trial.lease == lease else None

    def _name_of(self, rank: int) -> str:
        """Return how to call a runner; a chief before this one may have known its name."""
        return f"runner {self._names[rank]}" if rank in self._names else "its runner"

    def _on_news(self, news: News) -> None:
        match news:
            case PeerJoined():
                for trial in self._leased_to(news.rank):  # it may hold all that it had
                    trial.lease_ends_s = math.inf
                self._server.send(news.rank, {"sweep": self._ownership.sweep})
            case Differs():
                logger.warning("a runner was sent away: %s", "; ".join(news.what))
            case Lost():
                self._on_lost(news)
            case MessageReceived():
                self._on_message(news.rank, news.message)

    def _on_lost(self, news: Lost) -> None:
        for trial in self._leased_to(news.rank):
            trial.lease_ends_s = news.heard_s + LEASE_S
        self._slots.pop(news.rank, None)
        if news.rank in self._names:
            logger.info("%s is gone: %s", self._name_of(news.rank), news.cause)

    def _on_message(self, rank: int, message: Message) -> None:
        match message:
            case {"runner": {"name": str(name), "slots": int(slots), "holds": holds}}:
                self._on_runner(rank, name, slots, [protocol.decode_lease(one) for one in holds])
            case {"ended": {"lease": lease, "outcome": outcome}}:
                ended = protocol.decode_outcome(outcome)
                self._on_outcome(rank, protocol.decode_lease(lease), ended)
            case {"leaving": True}:
                self._slots.pop(rank, None)

    def _on_runner(self, rank: int, name: str, slots: int, holds: Sequence[Lease]) -> None:
        self._names[rank], self._slots[rank] = name, slots
        logger.info("runner %s is there, with %d slots", name, slots)
        for trial in self._leased_to(rank):
            if trial.lease not in holds:
                trial.lose(Killed(reason=f"runner {name} let it go", counts=False))
        for lease in holds:
            held = self._under(lease, rank=rank)
            if held is None:
                logger.info("runner %s comes too late with trial %s: it is stopped", name, lease[0])
                self._server.send(rank, {"drop": list(lease)})
            elif held.is_unwanted:
                self._server.send(rank, {"stop": list(lease)})

    def _on_outcome(self, rank: int, lease: Lease, outcome: Outcome) -> None:
        """Take in what a runner reports, if it still may; it may say so twice."""
        trial = self._under(lease, rank=rank)
        if trial is not None:
            trial.come_to(outcome)
        else:
            self._server.send(rank, {"drop": list(lease)})


class RemoteTrial:
    """A trial that a runner elsewhere has, and the lease that it has it under."""

    pidfd = None

    def __init__(self, server: RunnerServer, job: TrialJob, *, lease_ends_s: float) -> None:
        self._server = server
        self.job = job
        self.lease: Lease = (job.trial, job.lease)
        self.lease_ends_s = lease_ends_s
        self.is_leased = True
        self.is_unwanted = False
        self._outcome: Outcome | None = None

    def come_to(self, outcome: Outcome) -> None:
        """The first outcome counts, as it may be written down already."""
        self._outcome = self._outcome or outcome

    def lose(self, outcome: Killed) -> None:
        """End the lease: what the runner reports does not count any more."""
        self.is_leased = False
        self.come_to(outcome)

    def poll(self) -> Outcome | None:
        return self._outcome

    def stop(self) -> None:
        """Have it stopped, where its runner is there; else when that comes back."""
        self.is_unwanted = True
        self._server.send(self.job.slot.runner, {"stop": list(self.lease)})

    def taken(self) -> None:
        """The outcome is written down: the runner that has reported it may forget it."""
        if self.is_leased:
            self._server.send(self.job.slot.runner, {"taken": list(self.lease)})
        self.is_leased = False


# Server for a sweep's runners, in its own thread: the chief may be busy for seconds.


class RunnerServer:
    """Listens from its making until `close`; `take_news` and `send` are for another thread.

    Args:
      listener: listening already; it is closed in the end.
      terms: what runners must have in common with the chief.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: bytes,
        terms: Mapping[str, str],
    ) -> None:
        self._hub = Hub(
            listener,
            token=token,
            terms=terms,
            num_ranks=ANY_RANK,
            timeout_s=LEASE_S,
        )
        self._news: deque[News] = deque()
        self._outgoing: deque[tuple[int, Message]] = deque()
        self._has_news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_work = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="runner server", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is news."""
        return self._has_news

    def take_news(self) -> list[News]:
        """Return the news since the last call; raise the error that has ended the thread."""
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._has_news)
        return [self._news.popleft() for _ in range(len(self._news))]

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a runner soon; nothing happens if it is gone."""
        self._outgoing.append((rank, message))
        os.eventfd_write(self._has_work, 1)

    def close(self) -> None:
        """Sends what is left to send and closes everything."""
        self._is_closing = True
        os.eventfd_write(self._has_work, 1)
        self._thread.join()
        os.close(self._has_news)
        os.close(self._has_work)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._hub.fileno(), select.POLLIN)
        poll.register(self._has_work, select.POLLIN)
        try:
            while not self._is_closing:
                poll.poll(max(0.0, self._hub.next_s - time.monotonic()) * 1000)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._has_work)
                self._turn()
            self._turn()  # what was said last
        except Exception as error:
            self._failure = error
            os.eventfd_write(self._has_news, 1)
        finally:
            self._hub.close()

    def _turn(self) -> None:
        for _ in range(len(self._outgoing)):
            self._hub.send(*self._outgoing.popleft())
        self._hub.turn()
        news = [one for one in self._hub.take_news() if not self._is_beat(one)]
        if news:
            self._news.extend(news)
            os.eventfd_write(self._has_news, 1)

    def _is_beat(self, news: News) -> bool:
        """Answer a beat; return whether it was one, of which the chief is not to hear."""
        if not isinstance(news, MessageReceived) or ALIVE not in news.message:
            return False
        self._hub.send(news.rank, {ALIVE: news.message[ALIVE]})
        return True
