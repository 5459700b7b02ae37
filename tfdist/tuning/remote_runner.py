"""Remote runner of a sweep: runs the trials that the chief assigns to it.

It runs its own program with its own environment; what comes from the chief are values of
hyperparameters and how far to go. Who may run what, and when not, is in `tfdist.tuning.serving`.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.cluster.address import split_address
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.events import SignalPipe, exit_code_for
from tfdist.launch.multihost.rendezvous import Joining, Member, Violation
from tfdist.tuning import guard, protocol
from tfdist.tuning.guard import SAVE_AFTER_S, LeaseGuardClient
from tfdist.tuning.options import RunOptions
from tfdist.tuning.protocol import ALIVE, ANY_RANK, LEASE_S, Lease, Message, SweepAddress
from tfdist.tuning.trial_job import (
    Failed,
    Killed,
    LaunchedTrial,
    LauncherRunner,
    Outcome,
    ends_of,
)

logger = logging.getLogger(__name__)

_LOOK_S = 0.25


@dataclass(kw_only=True, slots=True)
class _Held:
    """A trial under a lease; with an outcome it has ended, and the chief is yet to hear."""

    running: LaunchedTrial | None = None
    is_watched: bool = False
    is_stopped: bool = False
    """It was stopped, with the save, for a reason that is not its own."""
    outcome: Outcome | None = None

    def stop(self) -> None:
        """Ask it to save and end, if it runs."""
        self.is_stopped = True
        if self.running is not None:
            self.running.stop()


class RemoteRunner:
    """Runner that joins a sweep's chief and runs its trials until stopped; `run` once."""

    def __init__(
        self,
        options: RunOptions,
        runner: LauncherRunner,
        *,
        chief: ChiefClient,
        lease_guard: LeaseGuardClient,
    ) -> None:
        self._options = options
        self._runner = runner
        self._chief = chief
        self._lease_guard = lease_guard
        self._held: dict[Lease, _Held] = {}
        self._dropped: list[LaunchedTrial] = []
        """Killed, as their leases are lost: their ends are waited for and not reported."""
        self._stop_signal: int | None = None
        self._exit_code: int | None = None
        """What the sweep has ended with, once the chief has said so."""

    def run(self) -> int:
        """Return the exit code: that of the sweep, or of a signal that has asked us to leave.

        Raises:
          UsageError: the chief has another token, directory, program or installation.
          StartupTimeout: it was not there for ``--reconnect_s``.
        """
        with SignalPipe() as signals, self._lease_guard:
            try:
                while (code := self.code()) is None:
                    self._turn(signals)
                return code
            finally:
                self._end_all()
                self._chief.close()

    def code(self) -> int | None:
        """Return the exit code, None while there is more to do; raise as `run`."""
        is_busy = any(held.running or self._chief.is_there for held in self._held.values())
        if self._stop_signal is not None and not (is_busy or self._dropped):
            return exit_code_for(self._stop_signal)
        if self._chief.away_s >= self._options.reconnect_s:
            raise StartupTimeout(
                f"{self._chief.address}: no chief of the sweep was there for "
                f"{self._chief.away_s:.0f} s: {self._chief.why}. Fix: start it, see that its "
                "name and port are right and that no firewall is between, or raise --reconnect_s"
            )
        return self._exit_code

    def _turn(self, signals: SignalPipe) -> None:
        came = signals.stop_requests()
        if came and self._stop_signal is None:
            self.leave(came[0])
        self.go_on([signals.fd])
        poll = ends_of(held.running for held in self._held.values() if held.running)
        for fd in (*self._chief.fds, signals.fd):
            poll.register(fd, select.POLLIN)
        poll.poll(_LOOK_S * 1000)

    def go_on(self, wake_fds: Sequence[int] = ()) -> None:
        """Handle messages and trials once, without waiting."""
        for message in self._chief.turn(wake_fds):
            self._on_message(message)
        for lease, held in self._held.items():
            self._poll(lease, held)
        self._dropped = [trial for trial in self._dropped if trial.poll() is None]

    def leave(self, signum: int) -> None:
        """Have all trials save and end; the chief gives them to others."""
        logger.info("asked to stop: the trials are saved and given back")
        self._stop_signal = signum
        self._chief.send({"leaving": True})
        for held in self._held.values():
            held.stop()

    def _on_message(self, message: Message) -> None:
        match message:
            case {"sweep": str()}:
                self._present()
            case {"run": dict(job)}:
                self._begin(job)
            case {"stop": lease} if held := self._held.get(protocol.decode_lease(lease)):
                held.stop()
            case {"drop": lease}:
                self._drop(protocol.decode_lease(lease))
            case {"taken": lease}:
                self._held.pop(protocol.decode_lease(lease), None)
            case {"end": int(code)}:
                self._exit_code = code

    def _present(self) -> None:
        """Report our name, the leases we hold, and the outcomes of trials that have ended."""
        logger.info("the chief at %s is there", self._chief.address)
        holds = [list(lease) for lease in self._held]
        slots = 0 if self._stop_signal is not None else self._options.parallel_trials
        name = f"{socket.gethostname()}:{os.getpid()}"
        self._chief.send({"runner": {"name": name, "slots": slots, "holds": holds}})
        for lease, held in self._held.items():
            self._report(lease, held)

    def _begin(self, message: Mapping[str, Any]) -> None:
        job = protocol.decode_job(message, sweep_dir=self._options.sweep_dir)
        lease = job.trial, job.lease
        held = self._held[lease] = _Held()
        if self._stop_signal is not None:
            held.outcome = Killed(reason="its runner was asked to stop", counts=False)
        elif self._is_stale:  # we hung, and the trial may be another's by now
            held.outcome = Killed(reason="its runner heard of it too late", counts=False)
        elif (outcome := self._runner.outcome(job)) is not None:
            held.outcome = outcome
        else:
            logger.info("trial %s: %s", lease[0], " ".join(job.flags) or "begins")
            held.running = self._runner.start(job)
        self._report(lease, held)

    def _drop(self, lease: Lease) -> None:
        """The lease is lost: another may run the trial, so it is not even saved."""
        held = self._held.pop(lease, None)  # the chief may say so twice
        if held is not None and held.running is not None:
            logger.info("trial %s is no longer ours: it is ended", lease[0])
            held.running.kill()
            self._dropped.append(held.running)

    def _poll(self, lease: Lease, held: _Held) -> None:
        """Watch a trial, and take down how it has ended."""
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
                self._lease_guard.watch(held.running.pid)
            return
        held.running = None
        logger.info("trial %s: %s", lease[0], type(outcome).__name__.lower())
        if held.is_stopped and isinstance(outcome, Killed):
            outcome = Killed(reason=outcome.reason, counts=False)
        held.outcome = outcome
        self._report(lease, held)

    @property
    def _is_stale(self) -> bool:
        """Whether the chief may soon give our trials to others."""
        return self._chief.unrenewed_s >= SAVE_AFTER_S

    def _report(self, lease: Lease, held: _Held) -> None:
        """Report how a trial has ended; it is said again until the chief has taken it."""
        if held.outcome is None or not self._chief.is_there:
            return
        report = {"lease": list(lease), "outcome": protocol.encode_outcome(held.outcome)}
        try:
            self._chief.send({"ended": report})
        except ValueError as error:  # more than a message may hold
            held.outcome = Failed(reason=f"its metrics are {error}")
            self._report(lease, held)

    def _end_all(self) -> None:
        """End the trials that run, with the save."""
        running = [held.running for held in self._held.values() if held.running is not None]
        for trial in running:
            trial.stop()
        running += self._dropped
        while running := [trial for trial in running if trial.poll() is None]:
            self._runner.wait(running, _LOOK_S)


# Runner's connection to its chief, reestablished when lost.

_ALIVE_EVERY_S = 1.0
_RETRY_S = 0.5


class ChiefClient:
    """Connection to the chief, kept up; `turn` does what there is to do.

    Args:
      renew: is told of each moment from which on the chief is known to leave us our trials. It has
        heard of us then; or nobody listened at its address, so that there was no chief, and one
        that starts later waits as long for us. A chief that does not answer may be there.
    """

    def __init__(
        self,
        sweep_address: SweepAddress,
        *,
        sweep_dir: Path,
        renew: Callable[[float], None],
        clock: Callable[[], float] = guard.now_s,
    ) -> None:
        self.address = sweep_address.address
        self.why = ""
        self._rank = secrets.randbelow(ANY_RANK - 1) + 1
        self._sweep_address = sweep_address
        self._sweep_dir = sweep_dir
        self._renew = renew
        self._clock = clock
        self._member: Member | None = None
        self.is_there = False
        self._lost_s = self._renewed_s = clock()
        self._next_s = self._said_s = 0.0

    @property
    def fds(self) -> list[int]:
        """Return the descriptors to watch."""
        return [self._member.fileno()] if self._member else []

    @property
    def unrenewed_s(self) -> float:
        """Return how long ago the last such moment was."""
        return self._clock() - self._renewed_s

    @property
    def away_s(self) -> float:
        """Return for how long there has been no chief."""
        return self._clock() - self._lost_s if self._member is None else 0.0

    def turn(self, wake_fds: Sequence[int] = ()) -> list[Message]:
        """Return the chief's messages; the first is ``sweep``, by which it is known to be ours.

        Raises:
          UsageError: it has another token, or directory, or differs from us.
        """
        if self._member is None:
            if self._clock() >= self._next_s:
                self._connect(wake_fds)
            return []
        self._member.turn()
        heard = [one for one in self._member.take_messages() if not self._is_beat(one)]
        for message in heard:
            if "sweep" in message:
                self._check(str(message["sweep"]))
        if self._clock() - self._said_s >= _ALIVE_EVERY_S:
            self._said_s = self._clock()
            self._member.send({ALIVE: self._said_s})
        if self._member.lost:
            logger.info("the chief at %s is gone: %s", self.address, self._member.lost)
            self.close()
        return heard

    def send(self, message: Message) -> None:
        """Send a message; nothing happens if the chief is gone."""
        if self._member is not None:
            self._member.send(message)

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._member is not None:
            self._member.close()
            self._member = None
            self._lost_s = self._clock()
        self.is_there = False

    def _is_beat(self, message: Message) -> bool:
        if ALIVE not in message:
            return False
        self._renewed(message[ALIVE])
        return True

    def _joining(self) -> Joining:
        host, port = split_address(self.address)
        return Joining(
            host,
            port,
            token=self._sweep_address.token,
            rank=self._rank,
            terms=self._sweep_address.terms,
            timeout_s=LEASE_S,
            clock=self._clock,
        )

    def _connect(self, wake_fds: Sequence[int]) -> None:
        began_s = self._clock()
        try:
            self._member = self._joining().attempt(wake_fds)
        except (OSError, Violation) as error:
            self.why = str(getattr(error, "strerror", None) or error)
            if isinstance(error, ConnectionRefusedError):
                self._on_refused(began_s)
            self._next_s = self._clock() + _RETRY_S
        else:
            self._renewed(began_s)

    def _on_refused(self, at_s: float) -> None:
        found = protocol.read_ownership(self._sweep_dir)
        if found is None or found.address == self.address:
            self._renewed(at_s)
        else:
            logger.info("the chief is at %s now", found.address)
            self.address = found.address

    def _renewed(self, at_s: float) -> None:
        self._renewed_s = max(self._renewed_s, at_s)
        self._renew(at_s)

    def _check(self, sweep: str) -> None:
        """Make sure that the chief has the directory that we have."""
        found = protocol.read_ownership(self._sweep_dir)
        if found is None or found.sweep != sweep:
            raise UsageError(
                "--sweep_dir",
                received=f"{self._sweep_dir}, which is not that of the chief at {self.address}",
                expected="the same directory, which the hosts share; no copy",
                fix="mount it at this path on this host too",
                code="not-shared",
            )
        self.is_there = True
