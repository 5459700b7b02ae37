"""Rules for files as such."""

from __future__ import annotations

from tfdist.lint.rules.table import error

RULES = (
    error(
        "LNT001",
        "a file that cannot be read as text",
        reason="What cannot be read is not checked, and is no reason to say that all is well.",
    ),
    error(
        "LNT002",
        "a file of no known kind",
        reason="Neither its name nor its text says what to check; --kind does.",
    ),
)
