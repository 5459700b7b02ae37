"""Checks of the network: names, ports, latency, throughput, TensorFlow's servers."""

from __future__ import annotations

import ipaddress
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tfdist.cluster.placement import is_name
from tfdist.launch.events import named
from tfdist.launch.multihost.agreement import is_loopback
from tfdist.ops.doctor.facts import (
    Exchange,
    HostFacts,
    HostFinding,
    JobFacts,
    NameFacts,
    Reach,
    Topic,
)
from tfdist.ops.rules import rules_of

# Checks of the hosts' name resolution.

_NAMES_RULES = rules_of("""
D101 error: a name that leads nowhere
    A task connects to the others by the names that the job has for their hosts.
D102 error: a name that leads to another host
    Tasks would talk to a machine that is none of theirs, or to themselves.
""")


def _check_names(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        for index, found in enumerate(host.names):
            yield from _wrong_name(facts, host, index, found)


def _wrong_name(
    facts: JobFacts, host: HostFacts, index: int, found: NameFacts
) -> Iterator[HostFinding]:
    here = facts.name(host.index)
    if found.error:
        received = f"{found.name}: {found.error}"
        fix = f"enter {found.name} in DNS or in /etc/hosts of {here}"
        yield HostFinding("D101", (here,), received, f"an address for {found.name}", fix)
        return
    if index == host.index or not is_name(found.name):
        return
    answered = {reach.answered for reach in host.reaches if reach.host == index}
    if answered != {index} and not _leads_there(facts, index, found):
        received = f"{found.name} leads to {', '.join(found.addresses)}"
        fix = f"correct the entry of {found.name} in DNS or in /etc/hosts of {here}"
        expected = f"an address of {facts.name(index)}"
        yield HostFinding("D102", (here,), received, expected, fix)


def _leads_there(facts: JobFacts, index: int, found: NameFacts) -> bool:
    """Return whether a name leads to its host, as far as the host is there to tell.

    A host behind a translation of addresses does not know its own, so what is no address of it
    counts only if it is loopback or another host's.
    """
    if all(map(is_loopback, found.addresses)):
        return False
    others = {
        address: host.index
        for host in facts.present
        for address in host.machine.own_addresses
        if not is_loopback(address)
    }
    return all(others.get(address, index) == index for address in found.addresses)


NAMES = Topic(name="names", rules=_NAMES_RULES, check=_check_names)


# Checks of the job's ports: free, reachable from the other hosts, and exposed to whom.

_PORTS_RULES = rules_of("""
D201 error: a port that is taken
    The task that is to listen there ends when it starts.
D202 error: a port that another host does not reach
    Tasks wait for each other for ever where one cannot connect.
D203 error: a port at which something else answers
    The name leads to another machine, or something between the hosts answers for it.
D205 warning: a host with a public address
    TensorFlow's servers listen on all interfaces and run what any client sends.
""")


def _check_ports(facts: JobFacts) -> Iterator[HostFinding]:
    for host in facts.present:
        yield from _taken(facts, host)
        yield from _unreached(facts, host)
        here = facts.name(host.index)
        if facts.hosts[host.index].ports and host.machine.public_addresses:
            received = ", ".join(host.machine.public_addresses[:4])
            expected = "no way to the ports of the job but from its own hosts"
            fix = "let a firewall admit the job's hosts only, or run on a private network"
            yield HostFinding("D205", (here,), received, expected, fix)


def _taken(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
    here = facts.name(host.index)
    for port in host.ports:
        if port.error:
            by = f" by {port.holder}" if port.holder else ""
            received = f"{here}:{port.port} is taken{by} ({port.error})"
            fix = f"end what listens there (ss -ltnp 'sport = {port.port}'), or take another port"
            yield HostFinding("D201", (here,), received, "a free port", fix)


def _unreached(facts: JobFacts, host: HostFacts) -> Iterator[HostFinding]:
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
        received = f"{here} does not reach {name} at {_ports(ports)}: {why}"
        expected = "every port of the job reached from all of its hosts"
        fix = f"let the firewalls of {name} and {here}, and between them, pass these ports"
        yield HostFinding("D202", (here, name), received, expected, fix)
    for other, reaches in strange.items():
        name, answered = facts.name(other), reaches[0].answered
        who = "something that is not of this job"
        if answered is not None and 0 <= answered < len(facts.hosts):
            who = facts.name(answered)
        received = f"{who} answers {here} at {name}:{reaches[0].port}"
        fix = f"correct what {name} leads to on {here}, and what forwards the port"
        yield HostFinding("D203", (here,), received, name, fix)


def _ports(ports: list[int]) -> str:
    return f"port{'s' * (len(ports) > 1)} {named(ports)}"


PORTS = Topic(name="ports", rules=_PORTS_RULES, check=_check_ports)


# How well the connections between hosts carry what a job sends.

_SLOW_WIRE = 0.5  # of the median of the other connections
_MAX_LATENCY_S = 0.005

_NETWORK_RULES = rules_of("""
D301 error: a connection that carries nothing large
    Small packets pass and large ones are lost: the sizes of packets do not agree.
D302 warning: a connection slower than the others
    An all-reduce goes through all hosts, and is as fast as its slowest connection.
D303 warning: a long way between two hosts
    Every step waits for several messages, one after the other.
""")


def _check_network(facts: JobFacts) -> Iterator[HostFinding]:
    wires = [(host.index, wire) for host in facts.present for wire in host.wires]
    for index, wire in wires:
        here, there = facts.name(index), facts.name(wire.host)
        if wire.error:
            received = f"{here} to {there}: {wire.error}"
            fix = f"compare the MTU of {here}, {there} and what is between (ip link, ping -M do)"
            yield HostFinding("D301", (here, there), received, "data of any size to pass", fix)
            continue
        others = [w.bytes_per_s for i, w in wires if not w.error and (i, w) != (index, wire)]
        median = statistics.median(others) if others else 0.0
        if wire.bytes_per_s < _SLOW_WIRE * median:
            received = f"{here} to {there}: {rate(wire.bytes_per_s)}"
            expected = f"about {rate(median)}, as the others have"
            fix = (
                f"see the speed and the errors of their interfaces (ethtool, ip -s link), "
                f"and what else {here} and {there} send"
            )
            yield HostFinding("D302", (here, there), received, expected, fix)
        if wire.latency_s > _MAX_LATENCY_S:
            received = f"{here} to {there} and back: {wire.latency_s * 1e3:.1f} ms"
            expected = f"less than {_MAX_LATENCY_S * 1e3:.0f} ms"
            fix = "take hosts of one site, or take fewer and larger steps"
            yield HostFinding("D303", (here, there), received, expected, fix)


def rate(bytes_per_s: float) -> str:
    """Return a speed for people."""
    return f"{bytes_per_s / 1e6:.2f} MB/s"


NETWORK = Topic(name="network", rules=_NETWORK_RULES, check=_check_network)


# Checks for proxies that gRPC would use between tasks.

_PROXIES_RULES = rules_of("""
D701 error: a proxy between the tasks
    gRPC takes grpc_proxy, https_proxy or http_proxy for all hosts that no_grpc_proxy or
    no_proxy does not name, and a proxy does not pass on what tasks say.
""")


def _check_proxies(facts: JobFacts) -> Iterator[HostFinding]:
    if len(facts.hosts) == 1 and not facts.hosts[0].ports:
        return
    names = [host.name for host in facts.hosts]
    for host in facts.present:
        proxy, here = host.machine.proxy, facts.name(host.index)
        if proxy is None:
            continue
        caught = [name for name in names if not excepted(name, proxy.exceptions)]
        if not caught:
            continue
        without = f"{proxy.excepted_by} does not name" if proxy.excepted_by else "without no_proxy:"
        received = f"{proxy.name}={proxy.value}, {without} {', '.join(caught[:8])}"
        fix = (
            f"export {proxy.excepted_by or 'no_proxy'}={','.join(names[:64])}, "
            f"or unset {proxy.name}"
        )
        yield HostFinding("D701", (here,), received, "no proxy for the hosts of the job", fix)


def excepted(host: str, exceptions: Sequence[str]) -> bool:
    """Return whether gRPC goes to a host without the proxy: an entry ends it, or has it inside.

    See ``HttpProxyMapper`` in gRPC: entries are endings of the name or, for a number, networks.
    """
    plain = host.strip("[]").lower()
    for entry in exceptions:
        entry = entry.strip().lower()
        if entry and (plain.endswith(entry) or _inside(plain, entry)):
            return True
    return False


def _inside(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


PROXIES = Topic(name="proxies", rules=_PROXIES_RULES, check=_check_proxies)


# Checks of TensorFlow's servers: all-reduce, push and pull, compared with a plain socket.

# An all-reduce of 16 MB between two processes of one machine took 31 ms: 516 MB/s through each of
# them, where a plain socket has gigabytes. What is slower than a connection allows is compared
# with the smaller of the two.
_SERVERS_BYTES_PER_S = 400e6
_SLOW = 4.0
_SLACK_S = 0.02

_EXCHANGE_RULES = rules_of("""
D901 error: TensorFlow's servers that do not come together
    What a job does first does not work here.
D902 error: an all-reduce with a wrong sum
    Every step would be wrong.
D903 warning: an all-reduce slower than the connection
    Every step of a multiworker job has one, of the size of the model.
D904 warning: a push to a ps slower than the connection
    Every step of a ps job sends its gradients.
D905 warning: a pull from a ps slower than the connection
    Every step of a ps job fetches the weights.
""")


def _check_exchange(facts: JobFacts) -> Iterator[HostFinding]:
    found = facts.exchange
    if found is None:
        return
    names = tuple(host.name for host in facts.hosts)
    if found.error:
        expected = "an all-reduce, a push and a pull between all hosts"
        fix = "put right what else is found here; else see whether `import tensorflow` works"
        yield HostFinding("D901", names, found.error, expected, fix)
        return
    if not found.is_right:
        received = "another sum than that of the parts"
        fix = "test the memory and the network cards of the hosts"
        yield HostFinding("D902", names, received, "the sum of what the hosts put in", fix)
    for code, what, took_s, should_s in _times(facts, found):
        if took_s > _SLOW * should_s + _SLACK_S:
            received = f"{took_s * 1e3:.0f} ms for {what} {found.size_bytes >> 20} MiB"
            expected = (
                f"about {should_s * 1e3:.0f} ms by what plain sockets carry "
                f"({rate(_slowest(facts)[0])})"
            )
            fix = "see what else runs on the hosts, and what inspects or limits connections"
            yield HostFinding(code, names, received, expected, fix)


def _times(facts: JobFacts, found: Exchange) -> Iterator[tuple[str, str, float, float]]:
    """Yield code, words, the time taken and the time that the connections allow."""
    if not any(not wire.error for host in facts.present for wire in host.wires):
        return
    speed, latency_s = _slowest(facts)
    bytes_per_s = min(speed, _SERVERS_BYTES_PER_S)
    tasks = max(2, len(facts.hosts))
    # A ring: each of n sends 2(n - 1) pieces of an n-th, one after the other.
    ring_s = 2 * (tasks - 1) * (latency_s + found.size_bytes / tasks / bytes_per_s)
    once_s = 2 * latency_s + found.size_bytes / bytes_per_s
    yield "D903", "an all-reduce of", found.reduce_s, ring_s
    yield "D904", "a push of", found.push_s, once_s
    yield "D905", "a pull of", found.pull_s, once_s


def _slowest(facts: JobFacts) -> tuple[float, float]:
    """Return the least bytes a second and the longest way there and back."""
    wires = [wire for host in facts.present for wire in host.wires if not wire.error]
    return min(w.bytes_per_s for w in wires), max(w.latency_s for w in wires)


EXCHANGE = Topic(name="exchange", rules=_EXCHANGE_RULES, check=_check_exchange)
