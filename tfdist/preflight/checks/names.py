"""Whether the names of the hosts lead to them, there and back."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from tfdist.cluster.placement import is_name
from tfdist.lint.rules import error, warning
from tfdist.preflight.facts import HostFacts, JobFacts, NameFacts
from tfdist.preflight.findings import Finding, Topic

_SLOW_S = 1.0

_RULES = (
    error(
        "D101",
        "a name that leads nowhere",
        reason="A task connects to the others by the names that the job has for their hosts.",
    ),
    error(
        "D102",
        "a name that leads to another host",
        reason="Tasks would talk to a machine that is none of theirs, or to themselves.",
    ),
    warning(
        "D103",
        "a host whose own name is loopback to itself",
        reason="What listens at that address, as gloo and MPI may, is not reached from outside.",
    ),
    warning(
        "D104",
        "an address whose name leads elsewhere",
        reason="Kerberos, MPI and logs go by the name of an address; it names another machine.",
    ),
    warning(
        "D105",
        "a name that takes long to resolve",
        reason="Each task asks for each name when it starts, and again at every new connection.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    for host in facts.present:
        here = facts.name(host.index)
        for index, found in enumerate(host.names):
            yield from _one(facts, host, index, found)
        for reverse in host.reverse:
            if reverse.address not in reverse.addresses:
                leads = ", ".join(reverse.addresses) or "nowhere"
                yield Finding(
                    code="D104",
                    hosts=(here,),
                    received=f"{reverse.address} is called {reverse.name}, which leads to {leads}",
                    expected="a name that leads back",
                    fix=f"correct the entry of {reverse.address} in DNS or /etc/hosts",
                )


def _one(facts: JobFacts, host: HostFacts, index: int, found: NameFacts) -> Iterator[Finding]:
    here = facts.name(host.index)
    if found.error:
        yield Finding(
            code="D101",
            hosts=(here,),
            received=f"{found.name}: {found.error}",
            expected=f"an address for {found.name}",
            fix=f"enter {found.name} in DNS or in /etc/hosts of {here}",
        )
        return
    if found.took_s > _SLOW_S:
        yield Finding(
            code="D105",
            hosts=(here,),
            received=f"{found.took_s:.1f} s for {found.name}",
            expected=f"less than {_SLOW_S:.0f} s",
            fix="correct the name servers in /etc/resolv.conf, or use /etc/hosts",
        )
    if not is_name(found.name):
        return
    if index == host.index:
        others = [a for other in host.names if other is not found for a in other.addresses]
        if _all_loopback(found.addresses) and others and not _all_loopback(others):
            yield _own_loopback(here, found)
        return
    answered = {reach.answered for reach in host.reaches if reach.host == index}
    if answered != {index} and not _leads_there(facts, index, found):
        yield Finding(
            code="D102",
            hosts=(here,),
            received=f"{found.name} leads to {', '.join(found.addresses)}",
            expected=_expected(facts, index),
            fix=f"correct the entry of {found.name} in DNS or in /etc/hosts of {here}",
        )


def _own_loopback(here: str, found: NameFacts) -> Finding:
    return Finding(
        code="D103",
        hosts=(here,),
        received=f"{found.name} leads to {', '.join(found.addresses)} on {here} itself",
        expected="the address by which the others reach it",
        fix=f"take {found.name} out of the line of {found.addresses[0]} in /etc/hosts of {here}",
    )


def _leads_there(facts: JobFacts, index: int, found: NameFacts) -> bool:
    """Returns whether a name leads to its host, as far as the host is there to tell.

    A host behind a translation of addresses does not know its own, so what is no address of it
    counts only if it is loopback or another host's.
    """
    if _all_loopback(found.addresses):
        return False
    others = {
        address: host.index
        for host in facts.present
        for address in host.machine.own_addresses
        if not _is_loopback(address)
    }
    return all(others.get(address, index) == index for address in found.addresses)


def _expected(facts: JobFacts, index: int) -> str:
    for host in facts.present:
        if host.index == index:
            own = [a for a in host.machine.own_addresses if not _is_loopback(a)]
            return f"an address of {facts.name(index)}: {', '.join(own[:4])}"
    return f"an address of {facts.name(index)}"


def _all_loopback(addresses: Sequence[str]) -> bool:
    return all(_is_loopback(address) for address in addresses)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _seen(facts: JobFacts) -> str:
    names = {(n.name, n.addresses[0]) for host in facts.present for n in host.names if n.addresses}
    return ", ".join(
        f"{name} {address}" if name != address else name for name, address in sorted(names)
    )


TOPIC = Topic(name="names", rules=_RULES, check=_check, seen=_seen)
