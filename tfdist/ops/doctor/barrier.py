"""Preflight barrier: the hosts connect to the first one, which runs each step on all."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tfdist.errors import EXIT_FAILED
from tfdist.launch.multihost.connection import Message, Violation, WrongToken
from tfdist.ops.doctor import port_listener
from tfdist.ops.doctor.facts import Absence
from tfdist.ops.doctor.job import PreflightJob
from tfdist.ops.doctor.port_listener import Conversation, PortListener, host_of, spare_ports

STEP_TIMEOUT_S = 120.0
"""How long a host waits for the first one's next word; longer than any step takes."""

_HELLO_S = 3.0
_AGAIN_S = 0.3
_CLOCK_ROUNDS = 5
_OF_A_RANGE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How far another host's clock is ahead, and by how much that may be wrong."""

    ahead_s: float
    error_s: float


class HostBarrier:
    """First host's side of the barrier: hosts that are present, and their answers."""

    def __init__(self, job: PreflightJob, port_listener: PortListener) -> None:
        self._job = job
        self._port_listener = port_listener
        self._others: dict[int, Conversation] = {}
        self.absent: list[Absence] = []

    @property
    def present(self) -> list[int]:
        """Return the hosts that are there, this one among them."""
        return sorted([self._job.index, *self._others])

    def gather(self, *, within_s: float) -> None:
        """Wait until all hosts have come, or the time is over; those that have not are absent."""
        deadline_s = time.monotonic() + within_s
        refused: dict[int, str] = {}
        while len(self._others) < len(self._job.hosts) - 1:
            try:
                left_s = max(0.0, deadline_s - time.monotonic())
                talk, hello = self._port_listener.clients.get(timeout=left_s)
            except queue.Empty:
                break
            try:
                self._let_in(talk, hello, refused)
            except OSError:
                talk.close()
            if len(self._others) + len(refused) >= len(self._job.hosts) - 1:
                break
        wrong = self._port_listener.wrong_tokens
        unauthenticated = f", and {wrong} came with another token" if wrong else ""
        for index in range(len(self._job.hosts)):
            if index not in self.present:
                why = refused.get(index, f"did not come within {within_s:.0f} s{unauthenticated}")
                absence = Absence(index=index, why=why, is_other_job=index in refused)
                self.absent.append(absence)

    def ask(self, step: str, *, within_s: float, own: Callable[[], Message]) -> dict[int, Message]:
        """Have every host do a step, this one by `own`; return the answers of those that gave one.

        Those that gave none are absent from then on.
        """
        asked = {"do": step, "present": self.present}
        for index in list(self._others):
            self._with(index, step, partial(_send, message=asked, within_s=within_s))
        answers = {self._job.index: own()}
        deadline_s = time.monotonic() + within_s
        for index in list(self._others):
            left_s = max(0.1, deadline_s - time.monotonic())
            answer = self._with(index, step, partial(Conversation.receive, within_s=left_s))
            if answer is not None:
                answers[index] = answer
        return answers

    def clocks(self) -> dict[int, Clock]:
        """Return how far the clock of each host is ahead of this one's."""
        found = {}
        for index in list(self._others):
            best = self._with(index, "clock", _best_round)
            if best is not None:
                found[index] = Clock(ahead_s=best["ahead_s"], error_s=best["took_s"] / 2)
        return found

    def lose(self, index: int, why: str, *, step: str) -> None:
        """Count a host as absent from now on."""
        if index in self._others:
            self._others.pop(index).close()
        self.absent.append(Absence(index=index, why=why, during=step))

    def end(self, exit_code: int) -> None:
        """Tells all hosts how it went, and lets them go."""
        for talk in self._others.values():
            with contextlib.suppress(OSError):
                talk.send({"do": "end", "exit_code": exit_code}, within_s=_HELLO_S)
            talk.close()
        self._others.clear()

    def _let_in(self, talk: Conversation, hello: Message, refused: dict[int, str]) -> None:
        index, why = hello.get("index"), ""
        if not isinstance(index, int) or not 0 <= index < len(self._job.hosts):
            index, why = -1, "is none of the hosts of this job"
        elif index in self.present:
            why = "is there already: two hosts have the same place in the job"
        elif hello.get("job") != self._job.fingerprint:
            why = f"was told of another job: {str(hello.get('hosts'))[:200]}"
            refused[index] = why
        talk.send({"refused": why}, within_s=_HELLO_S)
        if why:
            talk.close()
        else:
            self._others[index] = talk
            refused.pop(index, None)

    def _with(self, index: int, step: str, do: Callable[[Conversation], Message]) -> Message | None:
        try:
            return do(self._others[index])
        except TimeoutError:
            self.lose(index, "no answer in time", step=step)
        except OSError as error:
            self.lose(index, port_listener.said(error), step=step)
        except Violation as error:
            self.lose(index, f"sends {error}", step=step)
        return None


def _send(talk: Conversation, *, message: Message, within_s: float) -> Message:
    talk.send(message, within_s=within_s)
    return {}


def _best_round(talk: Conversation) -> Message:
    """Ask for the time over and over, and return the answer that was the soonest."""
    return min((_one_round(talk) for _ in range(_CLOCK_ROUNDS)), key=lambda r: r["took_s"])


def _one_round(talk: Conversation) -> Message:
    start, began = time.monotonic(), time.time()
    talk.send({"do": "clock", "present": []}, within_s=_HELLO_S)
    there = talk.receive(within_s=_HELLO_S).get("now")
    took_s = time.monotonic() - start
    if type(there) is not float:
        raise Violation("no time")
    return {"took_s": took_s, "ahead_s": there - began - took_s / 2}


class BarrierFailed(Exception):
    """The first host was not found; the message says what came of it."""


def join_meeting(job: PreflightJob, *, within_s: float) -> Conversation:
    """Come to the first host, again and again until the time is over.

    Raises:
        NoMeeting: it was not found, or does not let this one in.
    """
    first = job.hosts[0]
    deadline_s = time.monotonic() + within_s
    while True:
        whys: dict[int, str] = {}
        # Of a range a few: where all are closed, each takes a while to say so.
        ports = first.ports if first.needed is None else first.ports[:_OF_A_RANGE]
        for port in (*ports, *spare_ports(first.ports)):
            try:
                return _come(job, port)
            except (OSError, Violation) as error:
                whys[port] = port_listener.said(error) if isinstance(error, OSError) else str(error)
        if time.monotonic() > deadline_s:
            told = "; ".join(f"port {port}: {whys[port]}" for port in first.ports[:4])
            raise BarrierFailed(f"{told}, for {within_s:.0f} s")
        time.sleep(_AGAIN_S)


def _come(job: PreflightJob, port: int) -> Conversation:
    with port_listener.connected(job.hosts[0].name, port) as (sock, line):
        if host_of(line, job.fingerprint) not in (0, -1):
            raise Violation(f"{job.hosts[host_of(line, job.fingerprint)].name} answers")
        if not line.startswith("tfdist doctor 1 0 "):
            raise Violation("something else answers")
        sock.sendall(b"meet\n")
        talk = Conversation(sock.dup(), token=job.token, accepts=False)
    try:
        _greet(job, talk)
    except BaseException:
        talk.close()
        raise
    return talk


def _greet(job: PreflightJob, talk: Conversation) -> None:
    try:
        talk.greet(within_s=_HELLO_S)
    except WrongToken:
        raise BarrierFailed("it has another token (TFDIST_RENDEZVOUS_TOKEN)") from None
    hosts = ",".join(f"{host.name}:{host.ports[0]}" for host in job.hosts)[:200]
    hello = {"index": job.index, "job": job.fingerprint, "hosts": hosts}
    talk.send(hello, within_s=_HELLO_S)
    if why := talk.receive(within_s=STEP_TIMEOUT_S).get("refused"):
        raise BarrierFailed(f"this host {why}")


def attend(
    talk: Conversation,
    steps: Mapping[str, Callable[[Sequence[int]], dict[str, Any]]],
    *,
    hosts: int,
    gathering_s: float = 0.0,
) -> int:
    """Do what the first host asks for until it ends the meeting; return the exit code.

    Before it asks for anything it may wait for the other hosts, `gathering_s` at the most.

    Raises:
        NoMeeting: the first host has gone.
    """
    while True:
        with _losing():
            asked = talk.receive(within_s=STEP_TIMEOUT_S + gathering_s)
        gathering_s = 0.0
        step, told = asked.get("do"), asked.get("present")
        present = told if isinstance(told, list) else []
        if step == "end":
            code = asked.get("exit_code")
            return code if type(code) is int else EXIT_FAILED
        if step == "clock":
            answer: Message = {"now": time.time()}
        elif isinstance(step, str) and step in steps:
            answer = steps[step]([index for index in range(hosts) if index in present])
        else:
            raise BarrierFailed(f"it asks for the step {step!r}")
        with _losing():
            talk.send(answer, within_s=STEP_TIMEOUT_S)


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    """Report what becomes of the connection to the first host."""
    try:
        yield
    except TimeoutError:
        raise BarrierFailed("no word in time") from None
    except OSError as error:
        raise BarrierFailed(port_listener.said(error)) from None
    except Violation as error:
        raise BarrierFailed(f"it sends {error}") from None
