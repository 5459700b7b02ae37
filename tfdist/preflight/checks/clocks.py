"""Whether the clocks of the hosts agree."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.lint.rules import warning
from tfdist.preflight.facts import JobFacts
from tfdist.preflight.findings import Finding, Topic

_MOST_S = 1.0

_RULES = (
    warning(
        "D401",
        "a clock that is off",
        reason="Logs of several hosts are read side by side, tickets and certificates expire, "
        "and file systems go by the times of files.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    for host in facts.present:
        ahead = host.clock_ahead_s
        if ahead is None or abs(ahead) - host.clock_error_s <= _MOST_S:
            continue
        here, first = facts.name(host.index), facts.name(facts.present[0].index)
        side = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            code="D401",
            hosts=(here,),
            received=f"{here} is {abs(ahead):.1f} s {side} {first}",
            expected=f"less than {_MOST_S:.0f} s",
            fix=f"let chrony or systemd-timesyncd set the clock of {here} and of {first}",
        )


def _seen(facts: JobFacts) -> str:
    off = [host.clock_ahead_s for host in facts.present if host.clock_ahead_s is not None]
    if not off:
        return ""
    return f"{max(abs(s) for s in off) * 1e3:.1f} ms apart at most"


TOPIC = Topic(name="clocks", rules=_RULES, check=_check, seen=_seen)
