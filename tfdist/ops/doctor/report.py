"""Report of the doctor: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfdist.launch.multihost.messages import encode
from tfdist.ops.doctor.checks import RULES, TOPICS
from tfdist.ops.doctor.examine import PreflightResult
from tfdist.ops.doctor.findings import HostFinding, Topic
from tfdist.ops.rules import Severity, count, printable, worst

_OK, _NOT_SEEN = "ok", "-"


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
            state, seen = _state(topic, result)
            lines.append(f"{topic.name:{width}}  {state:7}        {seen}".rstrip())
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
    well = [topic for topic in TOPICS if not _of(topic, result.findings)]
    return json.dumps(
        {
            "exit_code": exit_code(result.findings),
            "took_s": round(result.took_s, 3),
            "findings": [
                {
                    "code": finding.code,
                    "severity": _severity(finding).value,
                    "title": RULES[finding.code].title,
                    "hosts": finding.hosts,
                    "received": finding.received,
                    "expected": finding.expected,
                    "fix": finding.fix,
                }
                for finding in result.findings
            ],
            "topics": [
                {"topic": topic.name, "severity": state if state == _OK else None, "seen": seen}
                for topic in well
                for state, seen in [_state(topic, result)]
            ],
            "facts": encode(result.facts),
        },
        indent=1,
    )


def _state(topic: Topic, result: PreflightResult) -> tuple[str, str]:
    """Return ``ok`` and what was seen, or why nobody looked."""
    seen = topic.seen(result.facts)
    if seen:
        return _OK, seen
    left_out = result.facts.left_out if topic.name == "exchange" else ""
    return _NOT_SEEN, f"not looked at{f': {left_out}' if left_out else ''}"


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
