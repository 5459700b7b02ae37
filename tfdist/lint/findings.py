"""What a check says: a rule, a place, what was seen there, and how to put it right."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tfdist.errors import UsageError


class Severity(enum.Enum):
    """An error does not start or does not end well; a warning can."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that can be wrong; `code` never changes its meaning."""

    code: str
    severity: Severity
    title: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something was seen: a file, and the line or the path in it, or both."""

    file: str
    line: int | None = None
    path: str = ""

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}" if self.line else self.file
        return f"{at} {self.path}" if self.path else at


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One mistake in one place; the parts are those of a `UsageError`."""

    code: str
    place: Place
    received: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.place}: {self.code} received {self.received}; "
            f"expected {self.expected}. Fix: {self.fix}"
        )


def of_error(code: str, place: Place, error: UsageError) -> Finding:
    """Returns the finding that says in `place` what `error` says."""
    return Finding(
        code=code,
        place=place,
        received=str(error.received),
        expected=error.expected,
        fix=error.fix,
    )
