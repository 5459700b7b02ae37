"""Preflight of all hosts of a job, as run by the first host and by the others, and its report.

The hosts connect to the first one, which runs each step on all. The connections of the barrier are
the launchers' own: `Hub` on the first host, `Member` on the others.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tfdist.cluster import hold_ports
from tfdist.cluster.address import join
from tfdist.cluster.ports import listen
from tfdist.errors import PeerLost, TfdistError, opening_port
from tfdist.launch.events import Message, decode, encode
from tfdist.launch.multihost.rendezvous import (
    Differs,
    Hub,
    Joining,
    Lost,
    Member,
    MessageReceived,
    PeerJoined,
    readable,
)
from tfdist.ops.doctor import checks, probes
from tfdist.ops.doctor.checks import RULES, TOPICS, check
from tfdist.ops.doctor.facts import (
    Absence,
    Exchange,
    HostFacts,
    HostFinding,
    JobFacts,
    PreflightJob,
    Topic,
)
from tfdist.ops.doctor.probes import PortListener, Storage
from tfdist.ops.doctor.servers import ServerProcess
from tfdist.ops.rules import Severity, count, printable, worst

# Preflight barrier.

SILENT_S = 120.0
"""After how long without a word a host is gone; longer than any step, in which it says nothing."""

_STEP_S = 30.0
"""How long one step may take."""

_LOOK_S = 0.05
_AGAIN_S = 0.3

Step = Callable[[Sequence[int]], Message | None]
"""One thing that a host does when all do it, given the hosts that are there."""


class HostBarrier:
    """First host's side of the barrier: hosts that are present, and their answers."""

    def __init__(self, job: PreflightJob) -> None:
        self._job = job
        listener = None
        if len(job.hosts) > 1:
            with opening_port("the port at which the hosts meet", job.meeting_port):
                listener = listen(job.meeting_port)
        self._hub = Hub(
            listener,
            token=job.token,
            terms=job.terms,
            num_ranks=len(job.hosts),
            timeout_s=SILENT_S,
        )
        self._step = ""
        """Under way; empty while the hosts gather."""
        self._refused: dict[int, str] = {}
        self._answers: dict[int, Message] = {}
        self.absent: list[Absence] = []

    @property
    def present(self) -> list[int]:
        """Return the hosts that are there, this one among them."""
        return sorted({self._job.index, *self._hub.present})

    def gather(self, *, within_s: float) -> None:
        """Wait until all hosts have come, or the time is over; those that have not are absent."""
        listed = set(range(len(self._job.hosts))) - {self._job.index}
        self._wait(lambda: listed <= self._hub.present | self._refused.keys(), within_s=within_s)
        self._step = "gather"
        came = "; ".join(self._hub.turned_away)
        turned_away = f" (turned away: {came})" if came else ""
        for index in sorted(listed - self._hub.present):
            why = self._refused.get(index, f"did not come within {within_s:.0f} s{turned_away}")
            is_other_job = index in self._refused
            self.absent.append(Absence(index=index, why=why, is_other_job=is_other_job))

    def ask(self, step: str, own: Step) -> dict[int, Message]:
        """Have every host do a step, this one by `own`; return the answers of those that gave one.

        Those that gave none are absent from then on.
        """
        self._step = step
        self._answers.clear()
        deadline_s = time.monotonic() + _STEP_S
        asked, request = self._hub.present, {"do": step, "present": self.present}
        for index in asked:
            self._hub.send(index, request)
        answers = {self._job.index: own(self.present) or {}}
        self._wait(
            lambda: asked & self._hub.present <= self._answers.keys(),
            within_s=deadline_s - time.monotonic(),
        )
        for index in sorted(asked - self._answers.keys()):
            self.lose(index, "no answer in time")
        return answers | self._answers

    def lose(self, index: int, why: str) -> None:
        """Count a host as absent from now on."""
        self._hub.drop(index, why)
        self._turn()

    def end(self, exit_code: int) -> None:
        """Tell all hosts how it went, and let them go."""
        self._hub.end({"do": "end", "exit_code": exit_code})

    def _wait(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        self._turn()
        while not is_done() and time.monotonic() < deadline_s:
            readable([self._hub.fileno()], within_s=_LOOK_S)
            self._turn()

    def _turn(self) -> None:
        self._hub.turn()
        for news in self._hub.take_news():
            match news:
                case PeerJoined(rank=index) if self._step:
                    self._hub.drop(index, "it is too late")
                case PeerJoined(rank=index):
                    self._refused.pop(index, None)
                case Differs(rank=index, what=what):
                    self._refused[index] = f"was told of another job: {'; '.join(what)}"
                case MessageReceived(rank=index, message=message):
                    self._answers[index] = message
                case Lost(rank=index, cause=cause) if self._step:
                    if all(absence.index != index for absence in self.absent):
                        self.absent.append(Absence(index=index, why=cause, during=self._step))


def join_barrier(job: PreflightJob, *, within_s: float) -> Member:
    """Come to the first host, again and again until the time is over; raises as `Joining.join`."""
    joining = Joining(
        job.hosts[0].name,
        job.meeting_port,
        token=job.token,
        rank=job.index,
        terms=job.terms,
        timeout_s=SILENT_S,
    )
    member = joining.join(within_s=within_s, is_over=lambda: False)
    assert member is not None  # it is never over
    return member


def run_steps(member: Member, steps: Mapping[str, Step], *, hosts: int) -> int:
    """Run the steps that the first host asks for until it ends; return the exit code.

    Raises:
        PeerLost: the first host has gone.
    """
    while True:
        for request in member.take_messages():
            match request:
                case {"do": "end", "exit_code": int(code)}:
                    return code
                case {"do": str(step), "present": list(listed)} if step in steps:
                    present = [index for index in range(hosts) if index in listed]
                    member.send(steps[step](present) or {})
                case _:
                    raise PeerLost(f"it asks for {request}")
        if member.lost:
            raise PeerLost(member.lost)
        readable([member.fileno()], within_s=_AGAIN_S)
        member.turn()


_STEPS = ("reach", "wire", "work", "write", "read")
"""Steps of all hosts, one after the other."""

_MAX_WHY_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightResult:
    """Facts of a preflight, its findings, and how long it took from when all were there."""

    facts: JobFacts
    findings: tuple[HostFinding, ...]
    took_s: float


def lead(
    job: PreflightJob, *, environ: Mapping[str, str], shared_dir: str | None, quick: bool
) -> PreflightResult:
    """Check all hosts, as the first one; `quick` leaves TensorFlow's servers out."""
    barrier = HostBarrier(job)
    with PreflightPeer(job, environ=environ, shared_dir=shared_dir) as peer:
        barrier.gather(within_s=job.startup_timeout_s)
        start = time.monotonic()
        for step in _STEPS:
            barrier.ask(step, peer.steps[step])
        clocks_ahead_s, clock_error_s = _clocks(barrier, peer)
        present = []
        for index, answer in barrier.ask("tell", peer.steps["tell"]).items():
            try:
                told = decode(HostFacts, answer)
            except ValueError as error:
                barrier.lose(index, f"sends {error}")
                continue
            present.append(
                replace(
                    told,
                    index=index,
                    clock_ahead_s=clocks_ahead_s.get(index),
                    clock_error_s=clock_error_s,
                )
            )
        facts = JobFacts(
            hosts=job.hosts,
            present=tuple(present),
            absent=tuple(barrier.absent),
            shared_dir=shared_dir or "",
        )
        if not quick:
            facts = _exchanged(facts, barrier, peer)
    result = PreflightResult(
        facts=facts, findings=tuple(check(facts)), took_s=time.monotonic() - start
    )
    barrier.end(exit_code(result.findings))
    return result


def follow(
    job: PreflightJob, *, environ: Mapping[str, str], shared_dir: str | None
) -> int | PreflightResult:
    """Run the steps of the first host; return its exit code, or the result without it."""
    start = time.monotonic()
    with PreflightPeer(job, environ=environ, shared_dir=shared_dir) as peer:
        try:
            member = join_barrier(job, within_s=job.startup_timeout_s)
            with contextlib.closing(member):
                return run_steps(member, peer.steps, hosts=len(job.hosts))
        except TfdistError as error:
            why, _, _ = str(error).partition(". Fix:")
            facts = JobFacts(
                hosts=job.hosts,
                present=(peer.facts,),
                absent=(Absence(index=0, why=why),),
                shared_dir=shared_dir or "",
                left_out="no other host was met",
            )
    took_s = time.monotonic() - start
    return PreflightResult(facts=facts, findings=tuple(check(facts)), took_s=took_s)


def _clocks(barrier: HostBarrier, peer: PreflightPeer) -> tuple[dict[int, float], float]:
    """Return by how much the clocks of the others are ahead, and how wrong that may be."""
    start, asked_s = time.monotonic(), time.time()
    answers = barrier.ask("clock", peer.steps["clock"])
    error_s = (time.monotonic() - start) / 2
    clocks = {index: answer.get("now") for index, answer in answers.items() if index}
    ahead = {i: now - asked_s - error_s for i, now in clocks.items() if isinstance(now, float)}
    return ahead, error_s


def _exchanged(facts: JobFacts, barrier: HostBarrier, peer: PreflightPeer) -> JobFacts:
    """Return the facts with the result of the servers, or why they were left out."""
    wrong = [f.code for f in check(facts) if RULES[f.code].severity is Severity.ERROR]
    in_the_way = [code for code in wrong if not code.startswith("D8")]
    if in_the_way:
        return replace(facts, left_out=f"{', '.join(dict.fromkeys(in_the_way))} first")
    barrier.ask("serve", peer.steps["serve"])
    found = peer.result()
    answers = barrier.ask("stop", peer.steps["stop"])
    if found.error:
        failures = {i: str(a.get("failure", ""))[:_MAX_WHY_CHARS] for i, a in answers.items()}
        reasons = [f"{facts.name(i)}: {why}" for i, why in failures.items() if why]
        found = Exchange(error="; ".join(reasons) or found.error)
    return replace(facts, exchange=found, absent=tuple(barrier.absent))


# One host's side of the preflight; all hosts run the same step in lockstep.
#
# What it is asked for are names of steps and which hosts are there. Addresses, ports and paths are
# those that its own user gave it.

_LOOPBACK = "127.0.0.1"


class PreflightPeer:
    """This host, which looks at itself when created; closing it frees its ports.

    Attributes:
      facts: what is known of it so far.
      steps: what it can be asked for, by name; each takes the hosts that are there.
    """

    def __init__(
        self, job: PreflightJob, *, environ: Mapping[str, str], shared_dir: str | None
    ) -> None:
        self._job = job
        self._environ = environ
        self._stack = contextlib.ExitStack()
        ports = job.host.ports or (self._stack.enter_context(hold_ports(1)[0]).port,)
        self._listener = PortListener(probes.greeting(job.index, job.fingerprint), ports)
        self._stack.callback(self._listener.close)
        self._storage: Storage | None = None
        if shared_dir:
            self._storage = Storage(shared_dir, mark=job.fingerprint, index=job.index)
            self._stack.callback(self._storage.clean)
        self._server: ServerProcess | None = None
        self.facts = HostFacts(
            index=job.index,
            machine=probes.look(environ),
            names=probes.look_up([h.name for h in job.hosts] if len(job.hosts) > 1 else []),
            ports=self._listener.ports[: len(job.host.ports)],
        )
        self.steps: Mapping[str, Step] = {
            "reach": self._reach,
            "wire": self._wire,
            "work": self._work,
            "write": self._write,
            "read": self._read,
            "clock": lambda present: {"now": time.time()},
            "tell": lambda present: dict(encode(self.facts)),
            "serve": self._serve,
            "stop": self._stop,
        }

    def __enter__(self) -> PreflightPeer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def result(self) -> Exchange:
        """Return the result of the servers; on the first host, once all serve."""
        assert self._server is not None
        return self._server.result()

    def _reach(self, present: Sequence[int]) -> None:
        job = self._job
        found = probes.reach(
            job.hosts, present=present, index=job.index, fingerprint=job.fingerprint
        )
        self.facts = replace(self.facts, reaches=found)

    def _wire(self, present: Sequence[int]) -> None:
        """Measure the way to the next host that is there: each sends and takes, as in a ring.

        A host by itself is the next to itself.
        """
        job = self._job
        other = min((i for i in present if i > job.index), default=min(present))
        reached = [r.port for r in self.facts.reaches if r.host == r.answered == other]
        if len(job.hosts) == 1:
            reached = [port.port for port in self._listener.ports if not port.error]
        if reached:
            wire = probes.measure(self._address_of(other), min(reached), host=other)
            self.facts = replace(self.facts, wires=(wire,))

    def _work(self, present: Sequence[int]) -> None:
        self.facts = replace(self.facts, work_s=probes.work_s(self.facts.machine.cpus))

    def _write(self, present: Sequence[int]) -> None:
        if self._storage is not None:
            self.facts = replace(self.facts, directory=self._storage.write())

    def _read(self, present: Sequence[int]) -> None:
        if self._storage is not None and self.facts.directory is not None:
            found = self._storage.read(self.facts.directory, present=present)
            self.facts = replace(self.facts, directory=found)

    def _serve(self, present: Sequence[int]) -> None:
        self._listener.close()
        own_port = self._listener.ports[0].port
        addresses = [
            join(self._address_of(index), host.ports[0] if host.ports else own_port)
            for index, host in enumerate(self._job.hosts)
        ]
        self._server = ServerProcess(self._job.index, addresses, environ=self._environ)
        self._stack.callback(self._server.close)

    def _stop(self, present: Sequence[int]) -> Message:
        """Return why the server of this host has ended, if it has."""
        return {"failure": self._server.failure() if self._server else ""}

    def _address_of(self, index: int) -> str:
        """Return where a host is reached: one by itself, whose name need lead nowhere, here."""
        return self._job.hosts[index].name if len(self._job.hosts) > 1 else _LOOPBACK


# Report of the doctor: a table for people, JSON for programs.


def exit_code(findings: Sequence[HostFinding]) -> int:
    """Return 0 for none, 1 for warnings and 2 where there is an error."""
    return worst(_severity(finding) for finding in findings)


def as_text(result: PreflightResult) -> str:
    """Return a line for each topic or finding, with its fix below, and one that counts them."""
    width = max(len(topic.name) for topic in TOPICS)
    lines = []
    for topic in TOPICS:
        found = _of(topic, result.findings)
        if not found:
            why = _left_out(topic, result.facts)
            lines.append(f"{topic.name:{width}}  {f'not looked at: {why}' if why else 'ok'}")
        for finding in found:
            state = f"{_severity(finding).value:7}  {finding.code}"
            where = ", ".join(finding.hosts[:4]) + (", ..." if len(finding.hosts) > 4 else "")
            lines.append(
                f"{topic.name:{width}}  {state}  {where}: {finding.received}; "
                f"expected {finding.expected}"
            )
            lines.append(f"{'':{width + 17}}  Fix: {finding.fix}")
    lines.append(_summary(result))
    return "\n".join(printable(line) for line in lines)


def as_json(result: PreflightResult) -> str:
    """Return an object with the exit code, the findings, the topics that are well, the facts."""
    return json.dumps(
        {
            "exit_code": exit_code(result.findings),
            "took_s": round(result.took_s, 3),
            "findings": [
                {"severity": _severity(finding).value, "title": RULES[finding.code].title}
                | asdict(finding)
                for finding in result.findings
            ],
            "topics": [
                topic.name
                for topic in TOPICS
                if not _of(topic, result.findings) and not _left_out(topic, result.facts)
            ],
            "facts": encode(result.facts),
        },
        indent=1,
    )


def _left_out(topic: Topic, facts: JobFacts) -> str:
    """Return why nobody looked at a topic; empty where somebody did."""
    if topic is checks.EXCHANGE and facts.exchange is None:
        return facts.left_out
    if topic is checks.DIRECTORY and not facts.shared_dir:
        return "no --shared_dir"
    measured = {
        checks.NAMES: any(host.names for host in facts.present),
        checks.NETWORK: any(host.wires for host in facts.present),
        checks.CLOCKS: any(host.clock_ahead_s is not None for host in facts.present),
        checks.DIRECTORY: any(host.directory for host in facts.present),
    }
    return "" if measured.get(topic, True) else "no other host was met"


def _summary(result: PreflightResult) -> str:
    severities = [_severity(finding) for finding in result.findings]
    errors = severities.count(Severity.ERROR)
    counts = f"{count(errors, 'error')}, {count(len(severities) - errors, 'warning')}"
    hosts = f"{count(len(result.facts.present), 'host')} of {len(result.facts.hosts)}"
    return f"{hosts} in {result.took_s:.1f} s: {counts if severities else 'nothing is wrong'}"


def _of(topic: Topic, findings: Sequence[HostFinding]) -> list[HostFinding]:
    return [finding for finding in findings if RULES[finding.code] in topic.rules]


def _severity(finding: HostFinding) -> Severity:
    return RULES[finding.code].severity
