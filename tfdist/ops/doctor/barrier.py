"""Preflight barrier: the hosts connect to the first one, which runs each step on all.

The connections are the launchers' own: `Hub` on the first host, `Member` on the others.
"""

from __future__ import annotations

import queue
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.errors import EXIT_FAILED, UsageError
from tfdist.launch.multihost.connection import Message, Violation, WrongToken
from tfdist.launch.multihost.rendezvous import (
    Differs,
    Hub,
    Joining,
    Lost,
    Member,
    MessageReceived,
    PeerJoined,
)
from tfdist.ops.doctor import port_listener
from tfdist.ops.doctor.facts import Absence, reason_of
from tfdist.ops.doctor.port_listener import PortListener, host_of, spare_ports
from tfdist.ops.doctor.preflight_job import PreflightJob

SILENT_S = 120.0
"""After how long without a word a host is gone; longer than any step, in which it says nothing."""

_AGAIN_S = 0.3
_LOOK_S = 0.05  # how long a host that has asked to meet may wait to be taken in
_CLOCK_WITHIN_S = 3.0
_CLOCK_ROUNDS = 5
_OF_A_RANGE = 4


class ClockOffset(NamedTuple):
    """How far another host's clock is ahead, and by how much that may be wrong."""

    ahead_s: float
    error_s: float


class HostBarrier:
    """First host's side of the barrier: hosts that are present, and their answers."""

    def __init__(self, job: PreflightJob, port_listener: PortListener) -> None:
        self._job = job
        self._port_listener = port_listener
        self._hub = Hub(
            None,
            token=job.token,
            terms=job.terms,
            num_ranks=len(job.hosts),
            timeout_s=SILENT_S,
            clock=time.monotonic,
        )
        self._others: set[int] = set()  # who has come, and is not absent
        self._is_gathered = False
        self._refused: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self._answers: dict[int, Message] = {}
        self.absent: list[Absence] = []

    @property
    def present(self) -> list[int]:
        """Return the hosts that are there, this one among them."""
        return sorted({self._job.index, *self._others})

    def gather(self, *, within_s: float) -> None:
        """Wait until all hosts have come, or the time is over; those that have not are absent."""
        listed = set(range(len(self._job.hosts))) - {self._job.index}
        self._wait(lambda: listed <= self._others | self._refused.keys(), within_s=within_s)
        self._is_gathered = True
        came = "; ".join(self._hub.turned_away)
        turned_away = f" (turned away: {came})" if came else ""
        for index in sorted(listed - self._others):
            why = self._refused.get(index, f"did not come within {within_s:.0f} s{turned_away}")
            is_other_job = index in self._refused
            self.absent.append(Absence(index=index, why=why, is_other_job=is_other_job))

    def ask(self, step: str, *, within_s: float, own: Callable[[], Message]) -> dict[int, Message]:
        """Have every host do a step, this one by `own`; return the answers of those that gave one.

        Those that gave none are absent from then on.
        """
        deadline_s = time.monotonic() + within_s
        pending = self._send(step)
        answers = {self._job.index: own()}
        return answers | self._received(step, pending, within_s=deadline_s - time.monotonic())

    def clocks(self) -> dict[int, ClockOffset]:
        """Return how far the clock of each host is ahead of this one's."""
        rounds = [self._clock_round() for _ in range(_CLOCK_ROUNDS)]
        return {
            index: min((found[index] for found in rounds), key=lambda clock: clock.error_s)
            for index in self._others
            if all(index in found for found in rounds)
        }

    def lose(self, index: int, why: str, *, step: str) -> None:
        """Count a host as absent from now on."""
        self._hub.drop(index, why)
        self._others.discard(index)
        self.absent.append(Absence(index=index, why=why, during=step))

    def end(self, exit_code: int) -> None:
        """Tell all hosts how it went, and let them go."""
        self._hub.end({"do": "end", "exit_code": exit_code})

    def _clock_round(self) -> dict[int, ClockOffset]:
        """Ask each host for its time, one after the other, as the answers are timed."""
        found = {}
        for index in sorted(self._others):
            start, began = time.monotonic(), time.time()
            pending = self._send("clock", only=index)
            answers = self._received("clock", pending, within_s=_CLOCK_WITHIN_S)
            took_s = time.monotonic() - start
            there = answers.get(index, {}).get("now")
            if type(there) is float:
                found[index] = ClockOffset(ahead_s=there - began - took_s / 2, error_s=took_s / 2)
        return found

    def _send(self, step: str, *, only: int | None = None) -> set[int]:
        """Ask the hosts for a step; return which."""
        self._answers.clear()
        pending = set(self._others) if only is None else {only}
        for index in pending:
            self._hub.send(index, {"do": step, "present": self.present})
        return pending

    def _received(self, step: str, pending: set[int], *, within_s: float) -> dict[int, Message]:
        """Return what these hosts have answered in time; those that have not are absent."""
        self._wait(lambda: pending & self._hub.present <= self._answers.keys(), within_s=within_s)
        for index in sorted(pending - self._answers.keys()):
            self.lose(index, self._gone.get(index, "no answer in time"), step=step)
        return {index: self._answers[index] for index in pending & self._answers.keys()}

    def _wait(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        self._turn()
        while not is_done() and time.monotonic() < deadline_s:
            select.select([self._hub], [], [], _LOOK_S)
            self._turn()

    def _turn(self) -> None:
        while True:
            try:
                sock, address = self._port_listener.clients.get_nowait()
            except queue.Empty:
                break
            self._hub.add(sock, address=address)
        self._hub.turn()
        for news in self._hub.take_news():
            match news:
                case PeerJoined(rank=index) if self._is_gathered:
                    self._hub.drop(index, "it is too late")
                case PeerJoined(rank=index):
                    self._others.add(index)
                    self._refused.pop(index, None)
                    self._gone.pop(index, None)
                case Differs(rank=index, what=what):
                    self._refused[index] = f"was told of another job: {'; '.join(what)}"
                case MessageReceived(rank=index, message=message):
                    self._answers[index] = message
                case Lost(rank=index, cause=cause):
                    self._gone[index] = cause


class BarrierFailed(Exception):
    """The first host was not found, or has gone; the message says what came of it."""


def join_barrier(job: PreflightJob, *, within_s: float) -> Member:
    """Come to the first host, again and again until the time is over.

    Raises:
        BarrierFailed: it was not found, or does not let this one in.
    """
    first = job.hosts[0]
    deadline_s = time.monotonic() + within_s
    while True:
        whys: dict[int, str] = {}
        # Of a range a few: where all are closed, each takes a while to say so.
        ports = first.ports if first.needed is None else first.ports[:_OF_A_RANGE]
        for port in (*ports, *spare_ports(first.ports)):
            try:
                return _member(job, port)
            except WrongToken:
                raise BarrierFailed("it has another token (TFDIST_RENDEZVOUS_TOKEN)") from None
            except UsageError as error:
                raise BarrierFailed(
                    f"this host was told of another job: {error.received}"
                ) from None
            except Violation as error:
                whys[port] = str(error)
            except OSError as error:
                whys[port] = reason_of(error)
        if time.monotonic() > deadline_s:
            tried = "; ".join(f"port {port}: {whys[port]}" for port in first.ports[:4])
            raise BarrierFailed(f"{tried}, for {within_s:.0f} s")
        time.sleep(_AGAIN_S)


def _member(job: PreflightJob, port: int) -> Member:
    joining = Joining(
        job.hosts[0].name,
        port,
        source=None,
        token=job.token,
        rank=job.index,
        terms=job.terms,
        timeout_s=SILENT_S,
        clock=time.monotonic,
    )
    with port_listener.connected(joining.host, port) as (sock, line):
        if (index := host_of(line, job.fingerprint)) not in (0, -1):
            raise Violation(f"{job.hosts[index].name} answers")
        if not line.startswith(f"{port_listener.PROTOCOL} 0 "):
            is_doctor = line.startswith(port_listener.PROTOCOL.rstrip("0123456789"))
            who = "a doctor of another version" if is_doctor else "something else"
            raise Violation(f"{who} answers")
        sock.sendall(port_listener.MEET)
        return joining.member_over(sock.dup())


def run_steps(
    member: Member,
    steps: Mapping[str, Callable[[Sequence[int]], dict[str, Any]]],
    *,
    hosts: int,
) -> int:
    """Do what the first host asks for until it has no more; return the exit code.

    Raises:
        BarrierFailed: the first host has gone.
    """
    while True:
        for request in member.take_messages():
            step, listed = request.get("do"), request.get("present")
            present = listed if isinstance(listed, list) else []
            if step == "end":
                code = request.get("exit_code")
                return code if type(code) is int else EXIT_FAILED
            if step == "clock":
                member.send({"now": time.time()})
            elif isinstance(step, str) and step in steps:
                member.send(steps[step]([index for index in range(hosts) if index in present]))
            else:
                raise BarrierFailed(f"it asks for the step {step!r}")
        if member.lost:
            raise BarrierFailed(member.lost)
        select.select([member], [], [], _AGAIN_S)
        member.turn()
