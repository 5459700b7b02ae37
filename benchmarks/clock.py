"""Times whole epochs from within, so that start-up and tracing are not in a ratio."""

from __future__ import annotations

import itertools
import time
from typing import Any


def epoch_clock(keras: Any, *, skip: int = 1) -> Any:
    """A callback for keras or tf_keras; `epochs_s` holds the seconds of each epoch after `skip`."""

    class EpochClock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self._ends: list[float] = []

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self._ends.append(time.perf_counter())

        @property
        def epochs_s(self) -> list[float]:
            ends = self._ends[max(skip - 1, 0) :]
            return [b - a for a, b in itertools.pairwise(ends)]

    return EpochClock()


def per_second(amount_per_epoch: float, epochs_s: list[float]) -> float:
    """The rate over all timed epochs."""
    return amount_per_epoch * len(epochs_s) / sum(epochs_s)
