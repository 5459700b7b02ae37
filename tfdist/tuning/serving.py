"""Runner of a served sweep: trials here and on the runners that have joined."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tfdist.launch.multihost.hub import Differs, Hub, Lost, MessageReceived, PeerJoined
from tfdist.tuning import hosts
from tfdist.tuning.directory import Ownership
from tfdist.tuning.hosts import ALIVE, ANY_RANK, LEASE_S, Lease, Message
from tfdist.tuning.journal import HERE, Slot
from tfdist.tuning.trial_job import (
    Completed,
    Failed,
    Killed,
    Outcome,
    Runner,
    RunningTrial,
    TrialJob,
)

_MAX_SLOTS = 1024

logger = logging.getLogger(__name__)


class Line(Protocol):
    """The connections to all runners, as `RunnerServer` has them."""

    def fileno(self) -> int:
        """Return what is readable when there is news."""

    def take_news(self) -> list[RunnerNews]:
        """Return what has happened since the last call."""

    def send(self, rank: int, message: Message) -> None:
        """Send a message; nothing happens if the runner is gone."""

    def close(self) -> None:
        """End all connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RemoteRunner:
    name: str
    places: int


class ServingRunner:
    """Runs trials here, in the places of `here`, and gives others to the runners that have come.

    Args:
      mark: that in the sweep's directory.
    """

    def __init__(
        self,
        here: Runner,
        line: Line,
        *,
        mark: Ownership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here = here
        self._line = line
        self._mark = mark
        self._clock = clock
        self._remote_runners: dict[int, _RemoteRunner] = {}
        self._names: dict[int, str] = {}
        self._leases = Leases()
        self._trials: dict[str, RemoteTrial] = {}

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        return self._here.outcome(job)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return self._here.metrics(run_dir)

    def free_slots(self, taken: Collection[Slot]) -> Iterable[Slot]:
        """Return those here first, then one of each runner after the other."""
        free = [*self._here.free_slots(taken)]
        most = max((client.places for client in self._remote_runners.values()), default=0)
        for number in range(most):
            for rank, client in self._remote_runners.items():
                place = Slot(number=number, runner=rank)
                if number < client.places and place not in taken:
                    free.append(place)
        return free

    def start(self, job: TrialJob) -> RunningTrial:
        if job.runner == HERE:
            return self._here.start(job)
        trial = self._grant(job)
        self._line.send(job.runner, {"run": hosts.encode_job(job)})
        logger.info("trial %s is with %s", job.trial, self._name_of(job.runner))
        return trial

    def take_over(self, job: TrialJob) -> RunningTrial:
        return self._grant(job, until_s=self._clock() + LEASE_S)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        """Wait for trials here and for the runners."""
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        for trial in running:
            if trial.pidfd is not None:
                poll.register(trial.pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        for news in self._line.take_news():
            self._hear(news)
        for name in self._leases.take_over(self._clock()):
            trial = self._trials[name]
            said = f"{self._name_of(trial.job.runner)} was not heard of for {LEASE_S:g} s"
            trial.come_to(Killed(reason=said))

    def close(self, exit_code: int | None) -> None:
        """End all connections; report how the sweep has ended, if it has."""
        if exit_code is not None:
            for rank in self._remote_runners:
                self._line.send(rank, {"end": exit_code})
        self._line.close()

    def _grant(self, job: TrialJob, **until_s: float) -> RemoteTrial:
        self._leases.grant(job.trial, job.lease, runner=job.runner, **until_s)
        self._trials[job.trial] = RemoteTrial(self, job)
        return self._trials[job.trial]

    def _name_of(self, rank: int) -> str:
        """Return how to call a runner; a chief before this one may have known its name."""
        return f"runner {self._names[rank]}" if rank in self._names else "its runner"

    def _hear(self, news: RunnerNews) -> None:
        match news:
            case PeerJoined():
                self._leases.connected(news.rank)
                told = {"sweep": self._mark.sweep, "chief": self._mark.chief}
                self._line.send(news.rank, told)
            case Differs():
                logger.warning("a runner was sent away: %s", "; ".join(news.what))
            case Gone():
                self._gone(news)
            case MessageReceived():
                with contextlib.suppress(*hosts.NO_SENSE):
                    self._obey(news.rank, news.message)

    def _gone(self, news: Gone) -> None:
        self._leases.gone(news.rank, heard_s=news.heard_s)
        client = self._remote_runners.pop(news.rank, None)
        if client is not None:
            logger.info("runner %s is gone: %s", client.name, news.cause)

    def _obey(self, rank: int, message: Message) -> None:
        match message:
            case {"runner": {"name": str(name), "places": int(places), "holds": holds}}:
                self._came(rank, name, places, [hosts.lease_of(one) for one in holds])
            case {"ended": {"lease": lease, "outcome": outcome}}:
                self._ended(rank, hosts.lease_of(lease), hosts.outcome_of(outcome))
            case {"leaving": True} if rank in self._remote_runners:
                self._remote_runners[rank] = _RemoteRunner(
                    name=self._remote_runners[rank].name, places=0
                )

    def _came(self, rank: int, name: str, places: int, holds: Sequence[Lease]) -> None:
        self._remote_runners[rank] = _RemoteRunner(name=name, places=min(places, _MAX_SLOTS))
        self._names[rank] = name
        logger.info("runner %s is there, with %d places", name, places)
        for trial in self._leases.back(rank, holds):
            self._trials[trial].come_to(Killed(reason=f"runner {name} let it go", counts=False))
        for lease in holds:
            if not self._leases.is_current(*lease, runner=rank):
                logger.info("runner %s comes too late with trial %s: it is stopped", name, lease[0])
                self._line.send(rank, {"drop": list(lease)})
            elif self._trials[lease[0]].is_unwanted:
                self._line.send(rank, {"stop": list(lease)})

    def _ended(self, rank: int, lease: Lease, outcome: Outcome) -> None:
        """Take in what a runner reports, if it still may; it may say so twice."""
        if self._leases.is_current(*lease, runner=rank):
            self._trials[lease[0]].come_to(outcome)
        else:
            self._line.send(rank, {"drop": list(lease)})

    def stop(self, job: TrialJob) -> None:
        """Have a trial stopped, where its runner is there; else when it comes back."""
        self._line.send(job.runner, {"stop": [job.trial, job.lease]})

    def taken(self, job: TrialJob) -> None:
        """The outcome is written down: who has reported it may forget it."""
        if self._leases.is_current(job.trial, job.lease, runner=job.runner):
            self._leases.end(job.trial)
            self._line.send(job.runner, {"taken": [job.trial, job.lease]})
        self._trials.pop(job.trial, None)


class RemoteTrial:
    """A trial that a runner elsewhere has."""

    pidfd = None

    def __init__(self, serving: ServingRunner, job: TrialJob) -> None:
        self._serving = serving
        self.job = job
        self.outcome: Outcome | None = None
        self.is_unwanted = False

    def come_to(self, outcome: Outcome) -> None:
        """The first outcome counts, as it may be written down already."""
        self.outcome = self.outcome or outcome

    def poll(self) -> Outcome | None:
        return self.outcome

    def stop(self) -> None:
        self.is_unwanted = True
        self._serving.stop(self.job)

    def taken(self) -> None:
        self._serving.taken(self.job)


# Server for a sweep's runners, in its own thread: the chief may be busy for seconds.

_MAX_UNAUTHENTICATED = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """The connection to a runner has ended."""

    rank: int
    cause: str
    heard_s: float
    """When it said something last."""


RunnerNews = PeerJoined | Differs | MessageReceived | Gone


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = Hub(
            listener,
            token=token,
            terms=terms,
            num_ranks=ANY_RANK,
            max_unauthenticated=_MAX_UNAUTHENTICATED,
            timeout_s=LEASE_S,
            clock=clock,
        )
        self._clock = clock
        self._heard_s: dict[int, float] = {}
        self._news: deque[RunnerNews] = deque()
        self._outgoing: deque[tuple[int, Message]] = deque()
        self._has_news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_work = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="reception", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return what is readable when there is news."""
        return self._has_news

    def take_news(self) -> list[RunnerNews]:
        """Return what has happened since the last call; raise what has ended the thread."""
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
                poll.poll(max(0.0, self._hub.next_s - self._clock()) * 1000)
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
        news = [one for one in map(self._noted, self._hub.take_news()) if one is not None]
        if news:
            self._news.extend(news)
            os.eventfd_write(self._has_news, 1)

    def _noted(self, news: PeerJoined | Differs | MessageReceived | Lost) -> RunnerNews | None:
        """Return what the chief is to hear of some news, None for a beat, which is answered."""
        now_s = self._clock()
        match news:
            case PeerJoined():
                self._heard_s[news.rank] = now_s
            case MessageReceived():
                self._heard_s[news.rank] = now_s
                if ALIVE in news.message:
                    self._hub.send(news.rank, {ALIVE: news.message[ALIVE]})
                    return None
            case Lost():
                heard_s = self._heard_s.pop(news.rank, now_s)
                return Gone(rank=news.rank, cause=news.cause, heard_s=heard_s)
        return news


# Leases of trials to runners: pure, times are passed in.
#
# A lease is a trial and a number, that of the trial's start in the journal, so that a start has
# one lease and no later one has it too. While a runner is connected its leases hold: it beats, or
# the connection ends. When that has ended they hold for `LEASE_S` from its last word, in which it
# may come back. A runner that has lost a lease learns so when it presents it, and what it reports
# under it does not count. It ends its trial by itself sooner than its lease can end
# (`tfdist.tuning.guard`).


@dataclass(kw_only=True, slots=True)
class _Lease:
    number: int
    runner: int
    ends_s: float


class Leases:
    """The leases that a chief has granted, or found in its journal."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def grant(self, trial: str, number: int, *, runner: int, until_s: float = math.inf) -> None:
        """Let a runner run a trial; until then if it does not come, else while it is there."""
        self._leases[trial] = _Lease(number=number, runner=runner, ends_s=until_s)

    def is_current(self, trial: str, number: int, *, runner: int) -> bool:
        """Return whether a runner has this lease, and may report under it."""
        lease = self._leases.get(trial)
        return lease is not None and (lease.number, lease.runner) == (number, runner)

    def of(self, runner: int) -> dict[str, int]:
        """Return the trials that a runner may run, and the numbers of the leases."""
        return {t: lease.number for t, lease in self._leases.items() if lease.runner == runner}

    def connected(self, runner: int) -> None:
        """A runner is there, and will say what it holds: until then it may hold all that it had."""
        for trial in self.of(runner):
            self._leases[trial].ends_s = math.inf

    def gone(self, runner: int, *, heard_s: float) -> None:
        """The connection to a runner has ended; it has been heard last at `heard_s`."""
        for lease in self._leases.values():
            if lease.runner == runner:
                lease.ends_s = heard_s + LEASE_S

    def back(self, runner: int, holds: Iterable[tuple[str, int]]) -> list[str]:
        """A runner is there and presents leases: those hold; returns the trials it has let go."""
        presented = set(holds)
        release = [pair for pair in self.of(runner).items() if pair not in presented]
        self.connected(runner)
        for trial, _ in release:
            self.end(trial)
        return [trial for trial, _ in release]

    def end(self, trial: str) -> None:
        """End the lease of a trial, if there is one."""
        self._leases.pop(trial, None)

    def take_over(self, now_s: float) -> list[str]:
        """End the leases whose time is up, and return their trials."""
        trials = [trial for trial, lease in self._leases.items() if lease.ends_s <= now_s]
        for trial in trials:
            self.end(trial)
        return trials
