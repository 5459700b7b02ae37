"""A runner of a sweep: runs the trials that the chief gives it, on whatever host it is.

It runs its own program with its own environment; what comes from the chief are values of
hyperparameters and how far to go. Who may run what, and when not, is in `tfdist.tuning.leases`.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.errors import EXIT_FAILED, StartupTimeout, UsageError
from tfdist.launch.signals import STOP_SIGNALS, SignalPipe, exit_code_for
from tfdist.tuning import assignment, guard, messages
from tfdist.tuning.contact import Contact
from tfdist.tuning.directory import TRIALS
from tfdist.tuning.guard import SAVE_AFTER_S
from tfdist.tuning.guarding import Guarding
from tfdist.tuning.hosts import Meeting
from tfdist.tuning.messages import Lease, Message
from tfdist.tuning.options import RunOptions
from tfdist.tuning.reception import ANY_RANK
from tfdist.tuning.results import Failed, Killed, Outcome
from tfdist.tuning.runner import LOG, LaunchedTrial, LauncherRunner
from tfdist.tuning.trial_job import TrialJob

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LAST_WORDS_S = 5.0


@dataclass(kw_only=True, slots=True)
class _Held:
    """A trial under a lease; with an outcome it has ended, and the chief is yet to hear."""

    running: LaunchedTrial | None = None
    is_watched: bool = False
    is_stopped: bool = False
    """It was asked to save and end, and not because of itself."""
    is_lost: bool = False
    """The lease is another's: it is killed, and nobody is told."""
    outcome: Outcome | None = None

    def stop(self) -> None:
        """Asks it to save and end, if it runs."""
        self.is_stopped = True
        if self.running is not None:
            self.running.stop()


class JoinedRunner:
    """Comes to a sweep's chief, runs trials for it, and leaves when asked to; `run` once."""

    def __init__(
        self,
        options: RunOptions,
        runner: LauncherRunner,
        *,
        meeting: Meeting,
        clock: Callable[[], float] = guard.now_s,
    ) -> None:
        self._options = options
        self._runner = runner
        self._clock = clock
        self._guarding = Guarding()
        self._contact = Contact(
            meeting,
            rank=secrets.randbelow(ANY_RANK - 1) + 1,
            sweep_dir=options.sweep_dir,
            renew=self._guarding.renew,
            clock=clock,
        )
        self._held: dict[Lease, _Held] = {}
        self._asked: int | None = None
        self._asked_s = 0.0
        self._end: int | None = None

    def run(self) -> int:
        """Returns the exit code: that of the sweep, or of a signal that has asked us to leave.

        Raises:
          UsageError: the chief has another token, directory, program or installation.
          StartupTimeout: it was not there for ``--reconnect_s``.
        """
        with SignalPipe() as signals, self._guarding:
            try:
                while (code := self._code()) is None:
                    self._turn(signals)
                return code
            finally:
                self._end_all()
                self._contact.close()

    def _code(self) -> int | None:
        """Returns what to end with, None while there is more to do."""
        if self._asked is not None and not any(held.running for held in self._held.values()):
            is_late = self._clock() - self._asked_s > _LAST_WORDS_S
            if not self._held or not self._contact.is_there or is_late:
                return exit_code_for(self._asked)
        if self._contact.away_s >= self._options.reconnect_s:
            raise StartupTimeout(
                f"{self._contact.address}: no chief of the sweep was there for "
                f"{self._contact.away_s:.0f} s: {self._contact.why}. Fix: start it, see that its "
                "name and port are right and that no firewall is between, or raise --reconnect_s"
            )
        return self._end

    def _turn(self, signals: SignalPipe) -> None:
        came = [signum for signum in signals.read() if signum in STOP_SIGNALS]
        if came and self._asked is None:
            self._leave(came[0])
        self.go_on([signals.fd])
        pidfds = [h.running.pidfd for h in self._held.values() if h.running and h.running.pidfd]
        select.select([*pidfds, *self._contact.fds, signals.fd], [], [], _LOOK_S)

    def go_on(self, wake_fds: Sequence[int] = ()) -> None:
        """Does what there is to do, without waiting."""
        for message in self._contact.turn(wake_fds):
            try:
                self._obey(message)
            except UsageError:  # a ValueError, too, but ours
                raise
            except messages.NO_SENSE:
                logger.debug("not understood: %s", message)
        for lease, held in list(self._held.items()):
            self._look(lease, held)

    def _leave(self, signum: int) -> None:
        """Has all trials save and end; the chief gives them to others."""
        logger.info("asked to stop: the trials are saved and given back")
        self._asked, self._asked_s = signum, self._clock()
        self._contact.send({"leaving": True})
        for held in self._held.values():
            held.stop()

    def _obey(self, message: Message) -> None:
        match message:
            case {"sweep": str()}:
                self._present()
            case {"run": dict(told)}:
                self._begin(told)
            case {"stop": lease}:
                self._held[messages.lease_of(lease)].stop()
            case {"drop": lease}:
                self._drop(messages.lease_of(lease))
            case {"taken": lease} if self._held[messages.lease_of(lease)].running is None:
                del self._held[messages.lease_of(lease)]
            case {"end": int(code)}:
                self._end = code if 0 <= code < 256 else EXIT_FAILED

    def _present(self) -> None:
        """Says who we are, which leases we hold, and what has ended meanwhile."""
        logger.info("the chief at %s is there", self._contact.address)
        holds = [list(lease) for lease, held in self._held.items() if not held.is_lost]
        places = 0 if self._asked is not None else self._options.parallel_trials
        name = f"{socket.gethostname()}:{os.getpid()}"
        self._contact.send({"runner": {"name": name, "places": places, "holds": holds}})
        for lease, held in self._held.items():
            self._report(lease, held)

    def _begin(self, told: Mapping[str, Any]) -> None:
        lease, job = messages.lease_of((told["trial"], told["lease"])), self._job(told)
        held = self._held[lease] = _Held()
        self._require_shared(lease, job)
        try:
            if self._asked is not None:
                held.outcome = Killed(reason="its runner was asked to stop", counts=False)
            elif self._is_stale:  # we stood still, and the trial may be another's by now
                held.outcome = Killed(reason="its runner heard of it too late", counts=False)
            elif (outcome := self._runner.outcome(job)) is not None:
                held.outcome = outcome
            else:
                logger.info("trial %s: %s", lease[0], " ".join(job.flags) or "begins")
                held.running = self._runner.start(job)
        except UsageError as error:
            held.outcome = Failed(reason=str(error))
        self._report(lease, held)

    def _require_shared(self, lease: Lease, job: TrialJob) -> None:
        """Refuses to go on with a trial of which nothing is here: it would begin anew.

        Raises UsageError, which ends us; the chief hears why, and gives the trial to another.
        """
        trials = self._options.sweep_dir / TRIALS
        if job.continues is None or (trials / job.continues / LOG).exists():
            return
        error = UsageError(
            f"{trials / job.continues} on {socket.gethostname()}",
            received=f"nothing of the trial that trial {lease[0]} continues",
            expected="what the runner before has written: the same directory on all hosts",
            fix=f"mount {trials} from where the others have it",
        )
        self._held[lease].outcome = Killed(reason=str(error))
        self._contact.send({"leaving": True})
        self._report(lease, self._held[lease])
        raise error

    def _job(self, told: Mapping[str, Any]) -> TrialJob:
        """Returns the trial of a message; raises ValueError for what no chief would say."""
        flags, variables = tuple(map(str, told["flags"])), dict(told["variables"])
        run, continues = str(told["run"]), told["continues"]
        if (
            not all(flag.startswith("--config.") for flag in flags)
            or variables.keys() - {assignment.VARIABLE}
            or not all(map(_is_name, [run, "0" if continues is None else continues]))
        ):
            raise ValueError("no trial")
        return TrialJob(
            run_dir=self._options.sweep_dir / TRIALS / run,
            flags=flags,
            variables=variables,
            goal=messages.goal_of(told["goal"]),
            place=int(told["place"]),
            continues=continues,
        )

    def _drop(self, lease: Lease) -> None:
        """The lease is lost: another may run the trial, so it is not even saved."""
        held = self._held[lease]
        held.is_lost = True
        if held.running is None:
            del self._held[lease]
        else:
            logger.info("trial %s is no longer ours: it is ended", lease[0])
            held.running.kill()

    def _look(self, lease: Lease, held: _Held) -> None:
        """Watches a trial, and takes down how it has ended."""
        if held.running is None:
            return
        if self._is_stale:
            held.is_stopped = True  # the guard has seen to it
            if held.running.pid is None:  # but for one that waits for its directory
                held.running.stop()
        outcome = held.running.poll()
        if outcome is None:
            if not held.is_watched and held.running.pid is not None:
                held.is_watched = True
                self._guarding.watch(held.running.pid)
            return
        held.running = None
        if held.is_lost:
            del self._held[lease]
            return
        logger.info("trial %s: %s", lease[0], type(outcome).__name__.lower())
        if held.is_stopped and isinstance(outcome, Killed):
            outcome = Killed(reason=outcome.reason, counts=False)
        held.outcome = outcome
        self._report(lease, held)

    @property
    def _is_stale(self) -> bool:
        """Whether the chief may soon give our trials to others."""
        return self._contact.unrenewed_s >= SAVE_AFTER_S

    def _report(self, lease: Lease, held: _Held) -> None:
        """Says how a trial has ended; it is said again until the chief has taken it."""
        if held.outcome is None or held.is_lost or not self._contact.is_there:
            return
        told = {"lease": list(lease), "outcome": messages.told_outcome(held.outcome)}
        try:
            self._contact.send({"ended": told})
        except ValueError as error:  # more than a message may hold
            held.outcome = Failed(reason=f"its metrics are {error}")
            self._report(lease, held)

    def _end_all(self) -> None:
        """Ends the trials that run, with the save."""
        running = [held.running for held in self._held.values() if held.running is not None]
        for trial in running:
            trial.stop()
        while running := [trial for trial in running if trial.poll() is None]:
            self._runner.wait(running, _LOOK_S)


def _is_name(run: str) -> bool:
    """Whether it is a directory among the trials, and nothing else."""
    return run == os.path.basename(run) and not run.startswith(".")
