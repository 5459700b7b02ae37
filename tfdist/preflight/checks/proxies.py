"""Whether gRPC would send what tasks say to each other to a proxy."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from tfdist.lint.rules import error
from tfdist.preflight.facts import JobFacts
from tfdist.preflight.findings import Finding, Topic

_RULES = (
    error(
        "D701",
        "a proxy between the tasks",
        reason="gRPC takes grpc_proxy, https_proxy or http_proxy for all hosts that no_grpc_proxy "
        "or no_proxy does not name, and a proxy does not pass on what tasks say.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
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
        yield Finding(
            code="D701",
            hosts=(here,),
            received=f"{proxy.name}={proxy.value}, {without} {', '.join(caught[:8])}",
            expected="no proxy for the hosts of the job",
            fix=f"export {proxy.excepted_by or 'no_proxy'}={','.join(names[:64])}, "
            f"or unset {proxy.name}",
        )


def excepted(host: str, exceptions: Sequence[str]) -> bool:
    """Returns whether gRPC goes to a host without the proxy: an entry ends it, or has it inside.

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


def _seen(facts: JobFacts) -> str:
    proxies = [host for host in facts.present if host.machine.proxy is not None]
    return "excepted for the hosts of the job" if proxies else "none"


TOPIC = Topic(name="proxies", rules=_RULES, check=_check, seen=_seen)
