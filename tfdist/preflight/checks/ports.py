"""Whether the ports of the job are free, reached from the other hosts, and from how far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tfdist.lint.rules import error, warning
from tfdist.preflight.facts import HostFacts, JobFacts, PortFacts, Reach
from tfdist.preflight.findings import Finding, Topic

_RULES = (
    error(
        "D201",
        "a port that is taken",
        reason="The task that is to listen there ends when it starts.",
    ),
    error(
        "D202",
        "a port that another host does not reach",
        reason="Tasks wait for each other for ever where one cannot connect.",
    ),
    error(
        "D203",
        "a port at which something else answers",
        reason="The name leads to another machine, or something between the hosts answers for it.",
    ),
    warning(
        "D204",
        "a port from which the system serves outgoing connections",
        reason="Any connection of any process may have it when the task wants to listen there.",
    ),
    warning(
        "D205",
        "a host with a public address",
        reason="TensorFlow's servers listen on all interfaces and run what any client sends.",
    ),
    error(
        "D206",
        "a range with too few ports that are free",
        reason="Each task of the host takes one of them, and is not started where there is none.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    for host in facts.present:
        yield from _own(facts, host)
        yield from _unreached(facts, host)
        here = facts.name(host.index)
        if facts.hosts[host.index].ports and host.machine.public_addresses:
            yield Finding(
                code="D205",
                hosts=(here,),
                received=", ".join(host.machine.public_addresses[:4]),
                expected="no way to the ports of the job but from its own hosts",
                fix="let a firewall admit the job's hosts only, or run on a private network",
            )


def _own(facts: JobFacts, host: HostFacts) -> Iterator[Finding]:
    here = facts.name(host.index)
    ephemeral = []
    for port in host.ports:
        if port.is_ephemeral:
            ephemeral.append(port.port)
        if not port.error or not _is_due(facts, host, port):
            continue
        by = f" by {port.holder}" if port.holder else ""
        where = ", on all interfaces" if port.on_all_interfaces else ""
        yield Finding(
            code="D201",
            hosts=(here,),
            received=f"{here}:{port.port} is taken{by}{where} ({port.error})",
            expected="a free port",
            fix=f"end what listens there (ss -ltnp 'sport = {port.port}'), or take another port",
        )
    yield from _too_few(facts, host)
    if ephemeral:
        yield Finding(
            code="D204",
            hosts=(here,),
            received=f"{_ports(ephemeral)} in net.ipv4.ip_local_port_range",
            expected="ports outside of that range",
            fix="take lower ports, 20000 and on, say",
        )


def _is_due(facts: JobFacts, host: HostFacts, port: PortFacts) -> bool:
    """Returns whether the job cannot do without a port: of a range only where launchers meet."""
    if facts.hosts[host.index].needed is None:
        return True
    return len(facts.hosts) > 1 and not host.index and port == host.ports[0]


def _too_few(facts: JobFacts, host: HostFacts) -> Iterator[Finding]:
    needed = facts.hosts[host.index].needed
    if needed is None or not host.ports:
        return
    of_tasks = host.ports if len(facts.hosts) == 1 else host.ports[1:]
    free = sum(not port.error for port in of_tasks)
    if free < needed:
        here, first, last = facts.name(host.index), host.ports[0].port, host.ports[-1].port
        yield Finding(
            code="D206",
            hosts=(here,),
            received=f"{free} free of {len(of_tasks)} ports of {here} from {first} to {last}",
            expected=f"{needed}, one for each task of {here}",
            fix="end what listens there (ss -ltnp), or give a larger range to --ports",
        )


def _unreached(facts: JobFacts, host: HostFacts) -> Iterator[Finding]:
    here = facts.name(host.index)
    taken = {(h.index, p.port) for h in facts.present for p in h.ports if p.error}
    unreached: dict[tuple[int, str], list[int]] = defaultdict(list)
    strange: dict[int, list[Reach]] = defaultdict(list)
    for reach in host.reaches:
        if (reach.host, reach.port) in taken:
            continue  # nobody of ours listens there
        if reach.error:
            unreached[reach.host, reach.error].append(reach.port)
        elif reach.answered != reach.host:
            strange[reach.host].append(reach)
    for (other, why), ports in unreached.items():
        name = facts.name(other)
        yield Finding(
            code="D202",
            hosts=(here, name),
            received=f"{here} does not reach {name} at {_ports(ports)}: {why}",
            expected="every port of the job reached from all of its hosts",
            fix=f"let the firewalls of {name} and {here}, and between them, pass these ports",
        )
    for other, reaches in strange.items():
        name, answered = facts.name(other), reaches[0].answered
        who = "something that is not of this job"
        if answered is not None and 0 <= answered < len(facts.hosts):
            who = facts.name(answered)
        yield Finding(
            code="D203",
            hosts=(here,),
            received=f"{who} answers {here} at {name}:{reaches[0].port}",
            expected=name,
            fix=f"correct what {name} leads to on {here}, and what forwards the port",
        )


def _ports(ports: list[int]) -> str:
    listed = ", ".join(str(port) for port in ports[:8])
    more = f" and {len(ports) - 8} more" if len(ports) > 8 else ""
    return f"port{'s' * (len(ports) > 1)} {listed}{more}"


def _seen(facts: JobFacts) -> str:
    count = sum(not port.error for host in facts.present for port in host.ports)
    if not count:
        return ""
    reached = ", reached from all hosts" if len(facts.hosts) > 1 else ""
    return f"{count} free{reached}"


TOPIC = Topic(name="ports", rules=_RULES, check=_check, seen=_seen)
