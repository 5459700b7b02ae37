"""A look at all hosts of a job, from the first one's side and from the others'."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tfdist.preflight.checks import RULES, check
from tfdist.preflight.facts import Absence, Exchange, HostFacts, JobFacts
from tfdist.preflight.findings import Finding, Severity
from tfdist.preflight.job import Job
from tfdist.preflight.meeting import Meeting, NoMeeting, attend, join_meeting
from tfdist.preflight.party import Party
from tfdist.preflight.reading import read
from tfdist.preflight.wire import Message

_STEPS = {"look": 15.0, "reach": 30.0, "wire": 30.0, "work": 30.0, "write": 30.0, "read": 30.0}
"""What all hosts do one after the other, and how long each may take."""

_SERVE_S = 10.0
_MAX_WHY_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a user asks for besides the job.

    Attributes:
      quick: leave TensorFlow's servers out.
      startup_timeout_s: how long the hosts wait for each other.
    """

    shared_dir: str | None = None
    quick: bool = False
    startup_timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was seen, what is wrong of it, and how long it took from when all were there."""

    facts: JobFacts
    findings: tuple[Finding, ...]
    took_s: float


def lead(job: Job, wanted: Wanted, *, environ: Mapping[str, str]) -> tuple[Verdict, Meeting]:
    """Looks at all hosts, as the first one; whoever calls ends the meeting."""
    with Party(job, environ=environ, shared_dir=wanted.shared_dir) as party:
        meeting = Meeting(job, party.door)
        meeting.gather(within_s=wanted.startup_timeout_s)
        start = time.monotonic()
        parts: dict[int, Message] = {index: {"index": index} for index in meeting.present}
        for step, within_s in _STEPS.items():
            _do(meeting, party, step, within_s=within_s, parts=parts)
        for index, clock in meeting.clocks().items():
            parts[index] |= {"clock_ahead_s": clock.ahead_s, "clock_error_s": clock.error_s}
        facts = _facts(job, wanted, meeting, parts)
        facts = _exchanged(facts, wanted, meeting, party)
        took_s = time.monotonic() - start
    return Verdict(facts=facts, findings=tuple(check(facts)), took_s=took_s), meeting


def follow(job: Job, wanted: Wanted, *, environ: Mapping[str, str]) -> int | Verdict:
    """Does what the first host asks for; returns its exit code, or what is seen without it."""
    start = time.monotonic()
    with Party(job, environ=environ, shared_dir=wanted.shared_dir) as party:
        try:
            talk = join_meeting(job, within_s=wanted.startup_timeout_s)
            with contextlib.closing(talk):
                return attend(
                    talk,
                    party.steps,
                    hosts=len(job.hosts),
                    gathering_s=wanted.startup_timeout_s,
                )
        except NoMeeting as error:
            alone = {"index": job.index, **party.steps["look"]([job.index])}
            facts = JobFacts(
                hosts=job.hosts,
                present=(read(HostFacts, alone),),
                absent=(Absence(index=0, why=str(error)),),
                left_out="there is no meeting",
            )
    took_s = time.monotonic() - start
    return Verdict(facts=facts, findings=tuple(check(facts)), took_s=took_s)


def _do(
    meeting: Meeting, party: Party, step: str, *, within_s: float, parts: dict[int, Message]
) -> None:
    """Has all hosts do a step, and adds what they answer to what is known of them."""
    own: Callable[[], Any] = lambda: party.steps[step](meeting.present)  # noqa: E731
    for index, part in meeting.ask(step, within_s=within_s, own=own).items():
        try:
            read(HostFacts, {**_nothing(index), **part})
        except ValueError as error:
            if index == 0:  # this one
                raise
            meeting.lose(index, f"sends {error}", step=step)
            continue
        parts[index] |= part


def _nothing(index: int) -> Message:
    return {"index": index, "machine": {"host_name": ""}}


def _facts(job: Job, wanted: Wanted, meeting: Meeting, parts: Mapping[int, Message]) -> JobFacts:
    known = [parts[index] for index in sorted(parts) if "machine" in parts[index]]
    return JobFacts(
        hosts=job.hosts,
        present=tuple(read(HostFacts, part) for part in known),
        absent=tuple(meeting.absent),
        shared_dir=wanted.shared_dir or "",
    )


def _exchanged(facts: JobFacts, wanted: Wanted, meeting: Meeting, party: Party) -> JobFacts:
    """Returns the facts with what the servers did, or why they were not asked."""
    wrong = [f.code for f in check(facts) if RULES[f.code].severity is Severity.ERROR]
    in_the_way = [code for code in wrong if not code.startswith("D8")]
    if wanted.quick:
        return facts
    if in_the_way:
        return replace(facts, left_out=f"{', '.join(dict.fromkeys(in_the_way))} first")
    for host in facts.present:
        if host.ports and host.ports[0].error:  # of a range, in which others are free
            why = f"port {host.ports[0].port} of {facts.name(host.index)} is taken"
            return replace(facts, left_out=why)
    steps = party.steps
    meeting.ask("serve", within_s=_SERVE_S, own=lambda: steps["serve"](meeting.present))
    found = party.result()
    answers = meeting.ask("stop", within_s=_SERVE_S, own=lambda: steps["stop"](meeting.present))
    if found.error:
        failures = {i: str(a.get("failure", ""))[:_MAX_WHY_CHARS] for i, a in answers.items()}
        told = [f"{facts.name(i)}: {why}" for i, why in failures.items() if why]
        found = Exchange(error="; ".join(told) or found.error)
    return replace(facts, exchange=found, absent=tuple(meeting.absent))
