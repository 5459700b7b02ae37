"""Cost models of a step: a network of queues for a ps job, a ring for a multiworker job.

A worker goes round computing and exchanging weights and gradients with the ps:

compute_s   its computing
serve_s     what the exchange costs in processing, of all ps together, each having its share
trip_s      a round trip when nothing is in the way; a step has two, reading and writing
cores       how many steps this machine works on at full speed, 1 or more: fewer than it has cores
            where a step keeps several busy (worker, ps and chief), or other programs do

Steps are handed out in ranges of about a second, so what is lost around a range is a part of the
time, however long a step is:

hand        the part for handing out and in
idle        the part that many workers wait for the last of them; of n, (n - 1) / n of it

Bytes are not fitted: those of a step are counted in its graph, and a wire has a rate. On one
machine computing and serving queue for the same cores, and all bytes pass one wire if there is one.
With a machine for each task a worker computes undisturbed; each ps has cores and a link each way.

The network is solved exactly, by mean value analysis (Reiser and Lavenberg, Mean-Value Analysis of
Closed Multichain Queuing Networks, JACM 27(2), 1980), with several servers at a station by the
probabilities that some of them are idle. Exact for stations that serve in turn with exponential
times, or share themselves equally whatever the times.

A step of a multiworker job is computing and an all-reduce around a ring: with n workers each
computes the n-th part of the global batch and sends 2 (n - 1) / n times the gradients' bytes to the
next, in 2 (n - 1) rounds (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters
of workstations, JPDC 69(2), 2009). A step is as long as all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from benchmarks.scaling.measure import Shape


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


TRIPS = 2
PAYLOAD = 1448 / 1514
"""Of a full packet: what is not Ethernet's, IP's or TCP's header."""
CORES, WIRE, PS, LINKS_OUT, LINKS_IN = "cores", "wire", "ps", "links from the ps", "links to the ps"
OWN_STEP = "the workers' own step"
_WEAK = 0.02
_STEPS = 60
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The parameters of a job; see above."""

    compute_s: float
    serve_s: float
    trip_s: float
    cores: float
    hand: float
    idle: float

    @property
    def work_s(self) -> float:
        """What is done in processors."""
        return self.compute_s + self.serve_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job runs: one machine with so many cores, or one for each task; megabits a second."""

    cores: int
    mbit: float | None = None
    apart: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job without its place; bytes of a step, over all ps. A multiworker job has no ps."""

    workers: int
    ps: int
    batch: float
    read_bytes: float
    write_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A job that was measured: the means of its steps, and what came of it."""

    shape: Shape
    work: Work
    place: Place
    examples_per_s: float
    compute_s: float = math.nan
    exchange_s: float = math.nan
    """Of a multiworker job neither is measured."""

    @property
    def seen(self) -> tuple[float, float, float]:
        """What the model is fitted to: a step's computing, its exchange, and all of it."""
        whole_s = self.work.workers * self.work.batch / self.examples_per_s
        return self.compute_s, self.exchange_s, whole_s


def network(costs: Costs, work: Work, place: Place) -> tuple[list[Station], float]:
    """The stations that a step visits, and the time that it spends at none."""
    think_s = TRIPS * costs.trip_s
    if place.apart:
        return [
            Station(name=PS, demand_s=costs.serve_s / work.ps, servers=place.cores, copies=work.ps),
            _link(LINKS_OUT, work.read_bytes, place, copies=work.ps),
            _link(LINKS_IN, work.write_bytes, place, copies=work.ps),
        ], think_s + costs.compute_s
    cores = Station(name=CORES, demand_s=costs.work_s, servers=costs.cores)
    return [cores, _link(WIRE, work.read_bytes + work.write_bytes, place)], think_s


def _link(name: str, size_bytes: float, place: Place, copies: int = 1) -> Station:
    sending_s = size_bytes * 8 / (place.mbit * 1e6 * PAYLOAD) if place.mbit else 0.0
    return Station(name=name, demand_s=sending_s / copies, copies=copies)


def examples_per_s(costs: Costs, work: Work, place: Place) -> float:
    """What all workers together come to."""
    return work.batch * work.workers / expected(costs, work, place)[2]


def expected(costs: Costs, work: Work, place: Place) -> tuple[float, float, float]:
    """What `Point.seen` should be."""
    stations, think_s = network(costs, work, place)
    flow = solve(stations, think_s=think_s, customers=work.workers)
    slower = 1.0 if place.apart else flow.residence_s[CORES] / costs.work_s
    busy_s = work.workers / flow.rounds_per_s
    compute_s = costs.compute_s * slower
    around = costs.hand + costs.idle * (1 - 1 / work.workers)
    return compute_s, busy_s - compute_s, busy_s * (1 + around)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The costs that fit best, and how sure they are, as logarithms: errors are relative."""

    costs: Costs
    covariance: Array
    spread: float
    """Standard deviation of what was measured from what the model says of it."""

    def errors(self) -> Costs:
        """The standard error of each parameter's logarithm."""
        return Costs(**dict(zip(_NAMES, np.sqrt(np.diag(self.covariance)).tolist(), strict=True)))

    def examples_per_s(self, work: Work, place: Place) -> float:
        """What all workers together come to."""
        return examples_per_s(self.costs, work, place)

    def error(self, work: Work, place: Place) -> float:
        """The standard error of the logarithm of that."""
        slope = _slopes(
            lambda at: np.array([math.log(examples_per_s(_costs(at), work, place))]),
            np.log(astuple(self.costs)),
        )[0]
        return math.sqrt(slope @ self.covariance @ slope + self.spread**2)

    def full(self, work: Work, place: Place) -> tuple[str, float]:
        """The station that is full first, and with how many workers."""
        stations, think_s = network(self.costs, work, place)
        station, workers = saturation(stations, think_s=think_s)
        return station.name, workers

    def limit(self, work: Work, place: Place) -> str:
        """What keeps the job from being faster."""
        name, workers = self.full(work, place)
        return name if work.workers > workers else OWN_STEP


_NAMES = tuple(Costs.__dataclass_fields__)


def _costs(logarithms: Array) -> Costs:
    found = dict(zip(_NAMES, np.exp(logarithms).tolist(), strict=True))
    return Costs(**found | {"cores": max(1.0, found["cores"])})


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of logarithms, by Levenberg and Marquardt's steps.

    A parameter of which the points say nothing would run away: each is drawn to its first guess,
    with a weight (0.02) at which a spread of 0.1 leaves it free within a factor of 100 and more.
    """
    first = np.log(astuple(_guess(points)))
    seen = np.log([value for point in points for value in point.seen])

    def misses(at: Array) -> Array:
        costs = _costs(at)
        said = [value for p in points for value in expected(costs, p.work, p.place)]
        return np.concatenate([np.log(said) - seen, _WEAK * (at - first)])

    at = _least_squares(misses, first)
    slopes = _slopes(misses, at)
    freedom = max(1, len(seen) - len(at))
    variance = float((misses(at)[: len(seen)] ** 2).sum()) / freedom
    covariance = variance * np.linalg.inv(slopes.T @ slopes)
    return Fit(costs=_costs(at), covariance=covariance, spread=math.sqrt(variance))


def _guess(points: Sequence[Point]) -> Costs:
    compute_s, exchange_s, whole_s = min(points, key=lambda point: point.work.workers).seen
    return Costs(
        compute_s=compute_s,
        serve_s=exchange_s / 2,
        trip_s=exchange_s / 2 / TRIPS,
        cores=points[0].place.cores,
        hand=max(whole_s / (compute_s + exchange_s) - 1, 0.05),
        idle=0.1,
    )


def _least_squares(misses: Callable[[Array], Array], at: Array) -> Array:
    missed, damping = misses(at), 1e-2
    for _ in range(_STEPS):
        slopes = _slopes(misses, at)
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slopes.T @ missed)
        tried = at - np.clip(step, -1, 1)
        now = misses(tried)
        better = float(now @ now) < float(missed @ missed)
        damping = damping / 5 if better else damping * 5
        if better:
            at, missed = tried, now
        if np.abs(step).max() < 1e-7:
            break
    return at


def _slopes(function: Callable[[Array], Array], at: Array, by: float = 1e-5) -> Array:
    """The derivatives at a point, ``[values, parameters]``."""
    moves = by * np.eye(len(at))
    return np.stack([(function(at + m) - function(at - m)) / (2 * by) for m in moves], axis=1)


ROUNDS = "rounds of the ring"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The parameters: of the global batch on one core, and of one round of the ring."""

    compute_s: float
    round_s: float
    spread: float = 0.0
    """Standard deviation of what was measured from what the model says of it."""

    def examples_per_s(self, work: Work, place: Place) -> float:
        """What all workers together come to."""
        return work.batch / sum(self._parts_s(work, place).values())

    def error(self, work: Work, place: Place) -> float:
        """The standard error of the logarithm of that, as far as the fit knows."""
        return self.spread

    def limit(self, work: Work, place: Place) -> str:
        """The longest part of a step."""
        parts_s = self._parts_s(work, place)
        return max(parts_s, key=lambda name: parts_s[name])

    def _parts_s(self, work: Work, place: Place) -> dict[str, float]:
        computing, rounds = _shares(work, place)
        sent_bytes = 2 * (work.workers - 1) * work.write_bytes
        if place.apart:  # each has a link of its own, and sends its part
            sent_bytes /= work.workers
        crowded = not place.apart and work.workers > place.cores
        return {
            CORES if crowded else OWN_STEP: self.compute_s * computing,
            ROUNDS: self.round_s * rounds,
            WIRE: sent_bytes * 8 / (place.mbit * 1e6 * PAYLOAD) if place.mbit else 0.0,
        }


def _shares(work: Work, place: Place) -> tuple[float, int]:
    """How much of the batch the slowest core has, and the rounds."""
    at_once = work.workers if place.apart else min(work.workers, place.cores)
    return 1 / at_once, 2 * (work.workers - 1)


def fit_ring(points: Sequence[Point]) -> Ring:
    """Least squares of relative errors, of jobs that no wire limits; no parameter below 0."""
    rates = np.array([point.examples_per_s / point.work.batch for point in points])
    parts = np.array([_shares(point.work, point.place) for point in points]) * rates[:, None]
    found = np.linalg.lstsq(parts, np.ones(len(points)), rcond=None)[0]
    if found[1] < 0:  # rounds cost nothing that could be seen
        found = np.array([1 / parts[:, 0].mean(), 0.0])
    missed = float(((parts @ found - 1) ** 2).sum())
    spread = math.sqrt(missed / max(1, len(points) - 2))
    return Ring(compute_s=float(found[0]), round_s=float(found[1]), spread=spread)
