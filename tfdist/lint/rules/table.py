"""How the tables of rules are written: three texts a rule."""

from __future__ import annotations

from tfdist.lint.findings import Rule, Severity


def error(code: str, title: str, *, reason: str) -> Rule:
    """Returns a rule whose findings keep a job from starting or from ending well."""
    return Rule(code=code, severity=Severity.ERROR, title=title, reason=reason)


def warning(code: str, title: str, *, reason: str) -> Rule:
    """Returns a rule whose findings a job can live with."""
    return Rule(code=code, severity=Severity.WARNING, title=title, reason=reason)
