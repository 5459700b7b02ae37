"""Who has not answered for so long that they are thought to be gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


class Silence(Generic[_T]):
    """Remembers since when each of those who do not answer has been silent."""

    def __init__(self, most_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._since_s: dict[_T, float] = {}

    def too_long(self, silent: Collection[_T]) -> list[_T]:
        """Takes down who is silent now; returns those who have been at each look for `most_s`."""
        now_s = self._clock()
        self._since_s = {one: self._since_s.get(one, now_s) for one in silent}
        return [one for one, since_s in self._since_s.items() if now_s - since_s >= self._most_s]
