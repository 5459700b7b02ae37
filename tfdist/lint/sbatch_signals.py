"""Checks how a Slurm job is told that its time is over, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfdist.lint.findings import Finding, Place
from tfdist.lint.sbatch_options import named
from tfdist.lint.shell import Directive, Script

_SAVING = ("USR1", "TERM", "INT")
_NUMBERS = {"10": "USR1", "15": "TERM", "2": "INT"}
_VALUE = re.compile(r"(?:([BR]{1,2}):)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", re.IGNORECASE)
_LEAST_S = 30
_DEFAULT_S = 60


def check_signals(script: Script, file: str) -> Iterator[Finding]:
    """Yields what keeps the tasks from saving before the end of their time."""
    directive = named(script, "signal")
    if directive is None:
        yield from _no_warning(script, file)
    else:
        yield from _signal(script, directive, file)
    requeue, mode = named(script, "requeue"), named(script, "open-mode")
    if requeue and not (mode and mode.value == "append"):
        yield Finding(
            code="SLM012",
            place=Place(file=file, line=requeue.line, path="--requeue"),
            received="--requeue with a log that begins anew",
            expected="--open-mode=append",
            fix="add #SBATCH --open-mode=append",
        )


def _no_warning(script: Script, file: str) -> Iterator[Finding]:
    limit = named(script, "time")
    if limit is not None:
        yield Finding(
            code="SLM008",
            place=Place(file=file, line=limit.line, path="--time"),
            received=f"--time={limit.value} without --signal",
            expected="a signal some time before the end",
            fix="add #SBATCH --signal=USR1@120: the tasks save and stop",
        )


def _signal(script: Script, directive: Directive, file: str) -> Iterator[Finding]:
    at = Place(file=file, line=directive.line, path="--signal")
    match = _VALUE.fullmatch(directive.value or "")
    if match is None:
        yield Finding(
            code="SLM004",
            place=at,
            received=str(directive.value),
            expected="[B:]SIGNAL[@seconds]",
            fix="write --signal=USR1@120",
        )
        return
    name = _NUMBERS.get(match[2], match[2].upper())
    if name not in _SAVING:
        yield Finding(
            code="SLM011",
            place=at,
            received=f"SIG{name}" if not name.isdigit() else f"signal {name}",
            expected="USR1, TERM or INT",
            fix="write --signal=USR1@120",
        )
    if int(match[3] or _DEFAULT_S) < _LEAST_S:
        yield Finding(
            code="SLM010",
            place=at,
            received=f"{match[3]} s before the end",
            expected=f"{_LEAST_S} s or more, and longer than a save takes",
            fix="write --signal=USR1@120",
        )
    if "B" in (match[1] or "").upper() and not _is_handed_on(script, name):
        yield Finding(
            code="SLM009",
            place=at,
            received=f"B: in a script without a trap for {name}",
            expected="a script that hands the signal on",
            fix="leave B: out, which signals the tasks, or begin the last command with exec",
        )


def _is_handed_on(script: Script, name: str) -> bool:
    traps = (c for c in script.commands if c.name == "trap")
    if any(word.upper().removeprefix("SIG") == name for trap in traps for word in trap.words):
        return True
    return any(command.is_exec for command in script.commands)
