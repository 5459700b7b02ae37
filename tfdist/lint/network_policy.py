"""Checks NetworkPolicies: whether they guard the pods of a job, and let these at each other.

Of several policies for a pod, each adds to what it may do. What cannot be known from manifests,
such as addresses and the labels of namespaces, is taken to be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster import wishes
from tfdist.cluster.hosts import DEFAULT_PORT
from tfdist.cluster.port_range import parse_ports
from tfdist.cluster.tf_config import VARIABLE
from tfdist.errors import UsageError
from tfdist.lint.findings import Finding, Place
from tfdist.lint.network import Beside, labels_of, matches
from tfdist.lint.variables import are_alone
from tfdist.lint.workloads import Part, Workload, as_map, as_seq
from tfdist.lint.yaml_text import Map

_DNS_PORT = 53
_PEERS = {"ingress": "from", "egress": "to"}
_PORT_OF_TFJOB = "tfjob-port"


def check_network_policies(job: Workload, policies: Sequence[Beside]) -> Iterator[Finding]:
    """Yields what lets others at the pods of a job, or keeps these from each other."""
    if job.count < 2:
        return
    yield from _unguarded(job, policies)
    if any(are_alone(container.values) for part in job.parts for container in part.containers):
        return
    for direction in _PEERS:
        shut_out = next(_shut_out(job, policies, direction=direction), None)
        if shut_out:
            yield shut_out
        elif direction == "egress":
            yield from _without_dns(job, policies)


def _unguarded(job: Workload, policies: Sequence[Beside]) -> Iterator[Finding]:
    for part in job.parts:
        if any(map(_guards, _those_of(job, part, policies, direction="ingress"))):
            continue
        yield job.finding(
            "K8S028",
            Place(file=job.file, line=job.document.line, path=f"{part.path}.template"),
            received="no NetworkPolicy for these pods in the files",
            expected="one that admits the job's own pods only",
            fix="add one whose ingress is from the same podSelector",
        )
        return


def _guards(policy: Beside) -> bool:
    """Returns whether a policy keeps somebody out."""
    return not any(map(_lets_everybody_in, _rules(policy, "ingress")))


def _lets_everybody_in(rule: Map) -> bool:
    """Returns whether a rule without senders, perhaps with ports, or one of them is everybody."""
    senders = [as_map(sender) for sender in as_seq(rule.get("from"))]
    networks = [str(as_map(sender.get("ipBlock")).get("cidr", "")) for sender in senders]
    everywhere = [s.get("namespaceSelector") == {} and "podSelector" not in s for s in senders]
    return not senders or any(net.endswith("/0") for net in networks) or any(everywhere)


def _shut_out(job: Workload, policies: Sequence[Beside], *, direction: str) -> Iterator[Finding]:
    """Yields which pods the policies keep from which others, in one direction."""
    for part in job.parts:
        chosen = _those_of(job, part, policies, direction=direction)
        rules = [rule for policy in chosen for rule in _rules(policy, direction)]
        for other in job.parts if chosen else ():
            listening = part if direction == "ingress" else other
            near = [r for r in rules if _is_for(r, labels_of(job, other), direction=direction)]
            if any(_opens(rule, listening) for rule in near):
                continue
            pods = f"the pods of {job.kind}/{job.name} {other.name}".rstrip()
            port = f"port {_port(listening) or 'of theirs'}"
            yield Finding(
                code="K8S040",
                place=_place(chosen[0], direction),
                received=f"other ports than {port}" if near else f"no rule for {pods}",
                expected=f"{_PEERS[direction]} the job's own pods, at {port} or at all",
                fix="write the labels of the pods' template there, as in podSelector, and no ports",
            )


def _without_dns(job: Workload, policies: Sequence[Beside]) -> Iterator[Finding]:
    for part in job.parts:
        chosen = _those_of(job, part, policies, direction="egress")
        if not chosen or any(map(_reaches_dns, chosen)):
            continue
        yield Finding(
            code="K8S041",
            place=_place(chosen[0], "egress"),
            received=f"no way to port {_DNS_PORT} of another namespace",
            expected="DNS, by which the pods find each other",
            fix="add ports [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}] to kube-system",
        )
        return


def _reaches_dns(policy: Beside) -> bool:
    for rule in _rules(policy, "egress"):
        peers, ports = [as_map(p) for p in as_seq(rule.get("to"))], as_seq(rule.get("ports"))
        elsewhere = any("namespaceSelector" in peer or "ipBlock" in peer for peer in peers)
        if (elsewhere or not peers) and (
            not ports or any(_has(as_map(p), _DNS_PORT, named={}, protocol=None) for p in ports)
        ):
            return True
    return False


def _those_of(
    job: Workload, part: Part, policies: Sequence[Beside], *, direction: str
) -> list[Beside]:
    """Returns the policies for the pods of a part that say something about a direction."""
    return [
        policy
        for policy in policies
        if direction in _directions(policy)
        and len({job.namespace, policy.namespace} - {""}) < 2
        and _selects(as_map(policy.spec.get("podSelector")), labels_of(job, part))
    ]


def _directions(policy: Beside) -> list[str]:
    types = as_seq(policy.spec.get("policyTypes"))
    if types:
        return [str(type_).lower() for type_ in types]
    return ["ingress", *(["egress"] if policy.spec.get("egress") else [])]


def _rules(policy: Beside, direction: str) -> list[Map]:
    return [as_map(rule) for rule in as_seq(policy.spec.get(direction))]


def _selects(selector: Map, labels: Mapping[str, str]) -> bool:
    if as_seq(selector.get("matchExpressions")):
        return True  # taken to be meant for them
    return matches({k: str(v) for k, v in as_map(selector.get("matchLabels")).items()}, labels)


def _is_for(rule: Map, labels: Mapping[str, str], *, direction: str) -> bool:
    """Returns whether pods with these labels are among the peers of a rule."""
    peers = [as_map(peer) for peer in as_seq(rule.get(_PEERS[direction]))]
    return not peers or any(
        "ipBlock" in peer or _selects(as_map(peer.get("podSelector")), labels) for peer in peers
    )


def _opens(rule: Map, part: Part) -> bool:
    """Returns whether a rule is for the port at which the tasks of a part listen."""
    ports, port = [as_map(entry) for entry in as_seq(rule.get("ports"))], _port(part)
    named = _named_ports(part)
    return not ports or port is None or any(_has(each, port, named=named) for each in ports)


def _has(
    entry: Map, port: int, *, named: Mapping[str, object], protocol: str | None = "TCP"
) -> bool:
    """Returns whether an entry of ``ports`` has a port; of any protocol, where that is None."""
    if protocol not in (None, entry.get("protocol", "TCP")):
        return False
    first = entry.get("port")
    if isinstance(first, str):
        if protocol is None or not first.replace("-", "").isalnum():
            return True  # a name, or the variable of a template, which nobody here knows
        first = named.get(first)
        return first == port
    last = entry.get("endPort", first)
    return first is None or (
        isinstance(first, int) and isinstance(last, int) and first <= port <= last
    )


def _port(part: Part) -> int | None:
    """Returns the port at which each pod of a part listens; None where that is not known."""
    for container in part.containers:
        try:
            if wishes.PORTS in container.env_lines:
                return parse_ports(container.values.get(wishes.PORTS, ""), where="").start
            if wishes.PORT in container.env_lines:
                return wishes.integer(container.values, wishes.PORT)
        except UsageError:
            return None  # said of the variable
        if VARIABLE in container.env_lines:
            return None
    of_operator = _named_ports(part).get(_PORT_OF_TFJOB)
    return of_operator if isinstance(of_operator, int) else DEFAULT_PORT


def _named_ports(part: Part) -> dict[str, object]:
    """Returns the number of each port that a container has a name for."""
    ports = [as_map(p) for each in part.containers for p in as_seq(each.spec.get("ports"))]
    return {str(port.get("name")): port.get("containerPort") for port in ports}


def _place(policy: Beside, key: str) -> Place:
    path = f"NetworkPolicy/{policy.name} spec.{key}"
    return Place(file=policy.file, line=policy.spec.line_of(key), path=path)
