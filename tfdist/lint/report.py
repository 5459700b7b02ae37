"""What the program prints: findings for people or for programs, and the list of rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tfdist.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from tfdist.lint.findings import Finding, Rule, Severity
from tfdist.lint.rules import RULES


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns 0 for none, 1 for warnings and 2 where there is an error."""
    return worst(_severity(finding) for finding in findings)


def worst(severities: Iterable[Severity]) -> int:
    """Returns the exit code of findings of these severities."""
    seen = set(severities)
    if Severity.ERROR in seen:
        return EXIT_USAGE
    return EXIT_FAILED if seen else EXIT_OK


def as_text(findings: Sequence[Finding], *, files: int) -> str:
    """Returns a line for each finding, and one that counts them."""
    lines = [
        printable(
            f"{finding.place}: {finding.code} {_severity(finding).value}: "
            f"received {finding.received}; expected {finding.expected}. Fix: {finding.fix}"
        )
        for finding in findings
    ]
    errors = sum(_severity(finding) is Severity.ERROR for finding in findings)
    warnings = len(findings) - errors
    said = f"{count(errors, 'error')}, {count(warnings, 'warning')}" if lines else "no findings"
    return "\n".join([*lines, f"{count(files, 'file')}: {said}"])


def as_json(findings: Sequence[Finding]) -> str:
    """Returns an object with the exit code and the findings, each with its parts."""
    return json.dumps(
        {
            "exit_code": exit_code(findings),
            "findings": [
                {
                    "code": finding.code,
                    "severity": _severity(finding).value,
                    "title": RULES[finding.code].title,
                    "file": finding.place.file,
                    "line": finding.place.line,
                    "path": finding.place.path,
                    "received": finding.received,
                    "expected": finding.expected,
                    "fix": finding.fix,
                }
                for finding in findings
            ],
        },
        indent=1,
    )


def rules_as_text(rules: Iterable[Rule] = RULES.values()) -> str:
    """Returns every rule: its code, its severity, what it finds and why that is wrong."""
    return "\n".join(
        f"{rule.code} {rule.severity.value:7} {rule.title}\n       {rule.reason}" for rule in rules
    )


def rules_as_json(rules: Iterable[Rule] = RULES.values()) -> str:
    """Returns the rules as a list of objects."""
    return json.dumps(
        [
            {
                "code": rule.code,
                "severity": rule.severity.value,
                "title": rule.title,
                "reason": rule.reason,
            }
            for rule in rules
        ],
        indent=1,
    )


def _severity(finding: Finding) -> Severity:
    return RULES[finding.code].severity


def count(number: int, name: str) -> str:
    """Returns ``1 error`` or ``2 errors``."""
    return f"{number} {name}" + "s" * (number != 1)


def printable(line: str) -> str:
    """Returns a line on which a file cannot write over what the terminal shows."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
