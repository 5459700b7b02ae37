"""Restart policy: whether a failed job, or one task of it, is worth another start."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tfdist.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE
from tfdist.launch.report import Failure

# What differs between two runs of the same mistake: addresses in memory, ports, process ids, ages.
_ACCIDENTAL = re.compile(
    r"0x[0-9a-fA-F]+|(?<=:)\d{4,5}\b|(?<=pid )\d+|(?<=process )\d+|(?<=for )\d+(?= s\b)"
    r"|(?<=after )\d+(?= s\b)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """Whether to start again, and what to say about it; nothing where nobody asked for it."""

    restart: bool = False
    reason: str = ""


class RestartPolicy:
    """Counts the restarts of a job, those of single tasks too, and decides on the next one.

    A restart repeats what failed only if it got no further: a failure of the same kind of task,
    for the same cause and at the same step as the failure before it is not tried again. Where
    no step is known, both within `window_s` count as the same place: before the first step.
    """

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarted: list[Failure] = []

    def verdict(self, failure: Failure, *, alone: bool = False) -> RestartDecision:
        """Return whether to start again after `failure`, the task `alone` or the whole job.

        Changes nothing. Of tasks that are started again alone each has its own last failure:
        several of them may well be killed at the same step.
        """
        if not self._max_restarts:
            return RestartDecision()
        if failure.exit_code == EXIT_USAGE:
            return RestartDecision(
                reason=f"exit code {EXIT_USAGE} is a mistake that would be made again"
            )
        if failure.exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return RestartDecision(
                reason=f"exit code {failure.exit_code} is that of a task that was asked to stop"
            )
        if self._is_repeated(failure, alone=alone):
            return RestartDecision(reason=f"the same failure {_place(failure)} twice in a row")
        used = sum(failure.at_s - past.at_s <= self._window_s for past in self._restarted)
        within = f"within {self._window_s:g} s"
        if used >= self._max_restarts:
            restarts = f"all {used} restarts" if used > 1 else "the one restart"
            return RestartDecision(reason=f"{restarts} {within} used up")
        return RestartDecision(
            restart=True, reason=f"restart {used + 1} of {self._max_restarts} {within}"
        )

    def restarted(self, failure: Failure) -> None:
        """Count a restart after `failure`."""
        self._restarted.append(failure)

    def _is_repeated(self, failure: Failure, *, alone: bool) -> bool:
        comparable = [past for past in self._restarted if not alone or past.task == failure.task]
        if not comparable or _kind(comparable[-1]) != _kind(failure):
            return False
        before = comparable[-1]
        if failure.step is None and failure.at_s - before.at_s > self._window_s:
            return False
        return before.step == failure.step


def _kind(failure: Failure) -> tuple[str, str]:
    kind = failure.kind or f"{failure.exit_code}: {failure.cause}"
    return failure.task.type, _ACCIDENTAL.sub("#", kind)


def _place(failure: Failure) -> str:
    return "before the first step" if failure.step is None else f"at step {failure.step}"
