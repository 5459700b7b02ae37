"""A closed queueing network, solved exactly: so many customers that go round a few stations.

Mean value analysis (Reiser and Lavenberg, Mean-Value Analysis of Closed Multichain Queuing
Networks, JACM 27(2), 1980), with several servers at a station by the probabilities that some of
them are idle. Exact for stations that serve in turn with exponential times, or share themselves
equally whatever the times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Station:
    """What a customer queues for in each round; of `copies` alike it visits one after the other."""

    name: str
    demand_s: float
    """Of one round at one copy, when nobody else is there."""
    servers: float = 1.0
    """How many it serves at full speed; of 1.5, two customers get 0.75 each."""
    copies: int = 1

    @property
    def rounds_per_s(self) -> float:
        """The most that it can do."""
        return self.servers / self.demand_s if self.demand_s else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Rounds of all customers together, and the time of one round at each station's copies."""

    rounds_per_s: float
    residence_s: dict[str, float]


def solve(stations: Sequence[Station], *, think_s: float, customers: int) -> Flow:
    """The mean values with so many customers, who spend `think_s` of each round in no queue."""
    queue = [0.0] * len(stations)
    # Of each station, the probabilities of 0 .. servers - 2 customers there.
    few = [[1.0] + [0.0] * (math.ceil(station.servers) - 1) for station in stations]
    rate, times = 0.0, list(queue)
    for n in range(1, customers + 1):
        times = [_residence_s(*each) for each in zip(stations, queue, few, strict=True)]
        around_s = think_s + sum(
            time_s * station.copies for time_s, station in zip(times, stations, strict=True)
        )
        rate = n / around_s
        queue = [rate * time_s for time_s in times]
        few = [_few(station, old, rate) for station, old in zip(stations, few, strict=True)]
    residence_s = {s.name: t * s.copies for s, t in zip(stations, times, strict=True)}
    return Flow(rounds_per_s=rate, residence_s=residence_s)


def _residence_s(station: Station, queue: float, few: Sequence[float]) -> float:
    """Of one who comes and finds what is there with one customer less."""
    idle = sum((station.servers - 1 - j) * p for j, p in enumerate(few[:-1]))
    return station.demand_s / station.servers * (1 + queue + idle)


def _few(station: Station, before: Sequence[float], rate: float) -> list[float]:
    load, servers = rate * station.demand_s, station.servers
    some = [load / j * before[j - 1] for j in range(1, len(before))]
    busy = load + sum((servers - j) * p for j, p in enumerate(some, start=1))
    return [max(0.0, 1 - busy / servers), *some]  # not below 0, where rounding would have it


def saturation(stations: Sequence[Station], *, think_s: float) -> tuple[Station, float]:
    """The station that is full first, and with how many customers (Kleinrock's point).

    With fewer the rounds' own length is the limit, with more that station.
    """
    scarce = min(stations, key=lambda station: station.rounds_per_s)
    alone_s = think_s + sum(station.demand_s * station.copies for station in stations)
    return scarce, alone_s * scarce.rounds_per_s
