"""Whether the connections between the hosts carry what a job sends."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tfdist.lint.rules import error, warning
from tfdist.preflight.facts import JobFacts, Wire
from tfdist.preflight.findings import Finding, Topic

_SLOW = 0.5  # of the median of the other connections
_MAX_LATENCY_S = 0.005

_RULES = (
    error(
        "D301",
        "a connection that carries nothing large",
        reason="Small packets pass and large ones are lost: the sizes of packets do not agree.",
    ),
    warning(
        "D302",
        "a connection slower than the others",
        reason="An all-reduce goes through all hosts, and is as fast as its slowest connection.",
    ),
    warning(
        "D303",
        "a long way between two hosts",
        reason="Every step waits for several messages, one after the other.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    wires = [(host.index, wire) for host in facts.present for wire in host.wires]
    for index, wire in wires:
        here, there = facts.name(index), facts.name(wire.host)
        if wire.error:
            yield Finding(
                code="D301",
                hosts=(here, there),
                received=f"{here} to {there}: {wire.error}",
                expected="data of any size to pass",
                fix=f"compare the MTU of {here}, {there} and what is between (ip link, ping -M do)",
            )
            continue
        others = [w.bytes_per_s for i, w in wires if not w.error and (i, w) != (index, wire)]
        median = statistics.median(others) if others else 0.0
        if wire.bytes_per_s < _SLOW * median:
            yield Finding(
                code="D302",
                hosts=(here, there),
                received=f"{here} to {there}: {rate(wire.bytes_per_s)}",
                expected=f"about {rate(median)}, as the others have",
                fix=f"see the speed and the errors of their interfaces (ethtool, ip -s link), "
                f"and what else {here} and {there} send",
            )
        if wire.latency_s > _MAX_LATENCY_S:
            yield Finding(
                code="D303",
                hosts=(here, there),
                received=f"{here} to {there} and back: {wire.latency_s * 1e3:.1f} ms",
                expected=f"less than {_MAX_LATENCY_S * 1e3:.0f} ms",
                fix="take hosts of one site, or take fewer and larger steps",
            )


def rate(bytes_per_s: float) -> str:
    """Returns a speed for people."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    if bytes_per_s >= 1e6:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    return f"{bytes_per_s / 1e3:.0f} kB/s"


def _seen(facts: JobFacts) -> str:
    wires = [wire for host in facts.present for wire in host.wires if not wire.error]
    if not wires:
        return ""
    return f"{_range(wires)}, {max(wire.latency_s for wire in wires) * 1e3:.2f} ms there and back"


def _range(wires: list[Wire]) -> str:
    speeds = sorted(wire.bytes_per_s for wire in wires)
    least, most = rate(speeds[0]), rate(speeds[-1])
    return least if least == most else f"{least} to {most}"


TOPIC = Topic(name="network", rules=_RULES, check=_check, seen=_seen)
