"""Findings: what a check found, where, and how to put it right."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Location of a finding: a file, and the line or the path in it, or both."""

    file: str
    line: int | None = None
    path: str = ""

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}" if self.line else self.file
        return f"{at} {self.path}" if self.path else at


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake in one place; the last three parts are those of a `UsageError`."""

    code: str
    place: Location
    received: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.place}: {self.code} received {self.received}; "
            f"expected {self.expected}. Fix: {self.fix}"
        )


def of_error(code: str, place: Location, error: UsageError) -> Finding:
    """Return the finding that says in `place` what `error` says."""
    return Finding(code, place, str(error.received), error.expected, error.fix)
