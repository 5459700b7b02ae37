"""Rules: a code, a severity, a meaning in one line. A code keeps its meaning for good.

The codes of rules that were removed are not given again.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tfdist.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE


class Severity(enum.StrEnum):
    """An error does not start or does not end well; a warning can."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that can be wrong; `title` is its meaning, `reason` why that is wrong."""

    code: str
    severity: Severity
    title: str
    reason: str = ""


def rules_of(text: str) -> tuple[Rule, ...]:
    """Return the rules of a text: ``CODE severity: title``, and below it the reason, indented."""
    rules = []
    for part in re.split(r"\n(?=\S)", text.strip()):
        head, *reason = part.splitlines()
        code, severity, title = re.split(r":? ", head, maxsplit=2)
        lines = (line.strip() for line in reason)
        rule = Rule(code=code, severity=Severity(severity), title=title, reason=" ".join(lines))
        rules.append(rule)
    return tuple(rules)


def worst(severities: Iterable[Severity]) -> int:
    """Return the exit code for findings of these severities: 0 for none, 1 warnings, 2 errors."""
    seen = set(severities)
    if Severity.ERROR in seen:
        return EXIT_USAGE
    return EXIT_FAILED if seen else EXIT_OK


def rules_as_text(rules: Iterable[Rule]) -> str:
    """Return a line for each rule, with its reason below where it has one."""
    return "\n".join(
        f"{rule.code} {rule.severity.value:7} {rule.title}"
        + (f"\n       {rule.reason}" if rule.reason else "")
        for rule in rules
    )


def rules_as_json(rules: Iterable[Rule]) -> str:
    """Return the rules as a list of objects."""
    return json.dumps([asdict(rule) for rule in rules], indent=1)


def count(number: int, name: str) -> str:
    """Return ``1 error`` or ``2 errors``."""
    return f"{number} {name}" + "s" * (number != 1)


def printable(line: str) -> str:
    """Return a line with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
