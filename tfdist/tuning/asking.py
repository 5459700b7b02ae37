"""What a chief asks of a search, and the answers; without KerasTuner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

RUNNING, IDLE, STOPPED = "RUNNING", "IDLE", "STOPPED"
"""KerasTuner's words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A trial to run; or IDLE, ask again when one has ended; or STOPPED, there is none left."""

    status: str
    asker: str
    trial: str | None = None
    values: Mapping[str, Any] | None = None


class Asked(Protocol):
    """Who chooses the trials."""

    def ask(self) -> Answer:
        """Returns what to do next."""

    def tell(
        self, trial: str, *, status: str, history: Iterable[Mapping[str, float]], reason: str
    ) -> None:
        """Takes in how a trial has ended, COMPLETED or FAILED, and its metrics."""

    def publish(self, trials: Iterable[str] | None = None) -> None:
        """Writes down for others what is known of these trials, by default of all."""
