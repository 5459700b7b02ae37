"""The runner of a sweep that is served: trials here, and with the runners that have come."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tfdist.launch.multihost.hub import Differs, Heard, Joined
from tfdist.tuning import messages
from tfdist.tuning.leases import LEASE_S, Leases
from tfdist.tuning.mark import Mark
from tfdist.tuning.messages import Lease, Message
from tfdist.tuning.place import HERE, Place
from tfdist.tuning.reception import Gone, RunnerNews
from tfdist.tuning.results import Completed, Failed, Killed, Outcome
from tfdist.tuning.trial_job import Runner, RunningTrial, TrialJob

_MOST_PLACES = 1024

logger = logging.getLogger(__name__)


class Line(Protocol):
    """The connections to all runners, as `Reception` has them."""

    def fileno(self) -> int:
        """Returns what is readable when there is news."""

    def take_news(self) -> list[RunnerNews]:
        """Returns what has happened since the last call."""

    def send(self, rank: int, message: Message) -> None:
        """Sends a message; nothing happens if the runner is gone."""

    def close(self) -> None:
        """Ends all connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guest:
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
        mark: Mark,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here = here
        self._line = line
        self._mark = mark
        self._clock = clock
        self._guests: dict[int, _Guest] = {}
        self._names: dict[int, str] = {}
        self._leases = Leases()
        self._trials: dict[str, RemoteTrial] = {}

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        return self._here.outcome(job)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return self._here.metrics(run_dir)

    def free_places(self, taken: Collection[Place]) -> Iterable[Place]:
        """Returns those here first, then one of each runner after the other."""
        free = [*self._here.free_places(taken)]
        most = max((guest.places for guest in self._guests.values()), default=0)
        for number in range(most):
            for rank, guest in self._guests.items():
                place = Place(number=number, runner=rank)
                if number < guest.places and place not in taken:
                    free.append(place)
        return free

    def start(self, job: TrialJob) -> RunningTrial:
        if job.runner == HERE:
            return self._here.start(job)
        trial = self._grant(job)
        self._line.send(job.runner, {"run": messages.told_job(job)})
        logger.info("trial %s is with %s", job.trial, self._name_of(job.runner))
        return trial

    def take_over(self, job: TrialJob) -> RunningTrial:
        return self._grant(job, until_s=self._clock() + LEASE_S)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        """Waits for trials here and for the runners."""
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
        """Ends all connections; says how the sweep has ended, if it has."""
        if exit_code is not None:
            for rank in self._guests:
                self._line.send(rank, {"end": exit_code})
        self._line.close()

    def _grant(self, job: TrialJob, **until_s: float) -> RemoteTrial:
        self._leases.grant(job.trial, job.lease, runner=job.runner, **until_s)
        self._trials[job.trial] = RemoteTrial(self, job)
        return self._trials[job.trial]

    def _name_of(self, rank: int) -> str:
        """Returns how to call a runner; a chief before this one may have known its name."""
        return f"runner {self._names[rank]}" if rank in self._names else "its runner"

    def _hear(self, news: RunnerNews) -> None:
        match news:
            case Joined():
                self._leases.connected(news.rank)
                told = {"sweep": self._mark.sweep, "chief": self._mark.chief}
                self._line.send(news.rank, told)
            case Differs():
                logger.warning("a runner was sent away: %s", "; ".join(news.what))
            case Gone():
                self._gone(news)
            case Heard():
                with contextlib.suppress(*messages.NO_SENSE):
                    self._obey(news.rank, news.message)

    def _gone(self, news: Gone) -> None:
        self._leases.gone(news.rank, heard_s=news.heard_s)
        guest = self._guests.pop(news.rank, None)
        if guest is not None:
            logger.info("runner %s is gone: %s", guest.name, news.cause)

    def _obey(self, rank: int, message: Message) -> None:
        match message:
            case {"runner": {"name": str(name), "places": int(places), "holds": holds}}:
                self._came(rank, name, places, [messages.lease_of(one) for one in holds])
            case {"ended": {"lease": lease, "outcome": outcome}}:
                self._ended(rank, messages.lease_of(lease), messages.outcome_of(outcome))
            case {"leaving": True} if rank in self._guests:
                self._guests[rank] = _Guest(name=self._guests[rank].name, places=0)

    def _came(self, rank: int, name: str, places: int, holds: Sequence[Lease]) -> None:
        self._guests[rank] = _Guest(name=name, places=min(places, _MOST_PLACES))
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
        """Takes in what a runner reports, if it still may; it may say so twice."""
        if self._leases.is_current(*lease, runner=rank):
            self._trials[lease[0]].come_to(outcome)
        else:
            self._line.send(rank, {"drop": list(lease)})

    def stop(self, job: TrialJob) -> None:
        """Has a trial stopped, where its runner is there; else when it comes back."""
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
