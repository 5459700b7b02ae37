"""The cost model: the queues, what it recovers of jobs it is shown, what it says past them."""

import itertools
import math
import random
from dataclasses import astuple, replace

import pytest

from benchmarks.scaling import cost_model
from benchmarks.scaling.cost_model import (
    Costs,
    Place,
    Point,
    Ring,
    Station,
    Work,
    fit_ring,
    saturation,
    solve,
)
from benchmarks.scaling.measure import Shape


def flow(*stations: Station, think_s: float = 0.0, customers: int) -> float:
    return solve(stations, think_s=think_s, customers=customers).rounds_per_s


@pytest.mark.parametrize(("stations", "customers"), [(1, 3), (3, 1), (4, 7)])
def test_stations_alike_come_out_as_their_closed_form(stations, customers):
    """N customers at K stations of D seconds, none thinking: N / (D (N + K - 1)) a second."""
    alike = Station(name="alike", demand_s=0.25, copies=stations)
    apart = [Station(name=str(i), demand_s=0.25) for i in range(stations)]
    closed = customers / (0.25 * (customers + stations - 1))
    # Each of several stations named once, or all of them by their number.
    assert flow(*apart, customers=customers) == pytest.approx(closed)
    assert flow(alike, customers=customers) == pytest.approx(closed)


@pytest.mark.parametrize(
    ("servers", "customers"), [(1, 4), (2, 5), (1.5, 6), (2.25, 7), (4, 16), (8, 40)]
)
def test_several_servers_are_as_the_sum_over_all_states_says(servers, customers):
    """Against the product form itself (Gordon and Newell), every state counted."""

    def states(total: int) -> float:
        whole = 0.0
        for first, second in itertools.product(range(total + 1), repeat=2):
            if first + second <= total:
                thinking = total - first - second
                served = math.prod(0.7 / min(j, servers) for j in range(1, first + 1))
                whole += served * 0.2**second * 1.1**thinking / math.factorial(thinking)
        return whole

    stations = [
        Station(name="some", demand_s=0.7, servers=servers),
        Station(name="one", demand_s=0.2),
    ]
    said = flow(*stations, think_s=1.1, customers=customers)
    assert said == pytest.approx(states(customers - 1) / states(customers), rel=1e-6)


def test_one_customer_waits_for_nobody_and_many_fill_the_scarce_station():
    stations = [
        Station(name="two", demand_s=0.3, servers=2),
        Station(name="links", demand_s=0.05, copies=3),
    ]
    assert flow(*stations, think_s=1.0, customers=1) == pytest.approx(1 / 1.45)
    assert flow(*stations, think_s=1.0, customers=200) == pytest.approx(2 / 0.3, rel=1e-3)
    scarce, customers = saturation(stations, think_s=1.0)
    assert (scarce.name, customers) == ("two", pytest.approx(1.45 * 2 / 0.3))


TRUE = Costs(compute_s=0.010, serve_s=0.004, trip_s=0.001, cores=1.6, hand=0.1, idle=0.2)
HERE = Place(cores=2)


def measured(workers: int, ps: int, *, costs: Costs = TRUE, noise: float = 0.0) -> Point:
    """A job as the model has it, with so much noise on each of its figures."""
    chance = random.Random(10 * workers + ps)
    work = Work(workers=workers, ps=ps, batch=64, read_bytes=6e5, write_bytes=6e5)
    off = [math.exp(chance.gauss(0, noise)) for _ in range(3)]
    compute_s, exchange_s, whole_s = cost_model.expected(costs, work, HERE)
    return Point(
        shape=Shape(workers=workers, ps=ps),
        work=work,
        place=HERE,
        examples_per_s=workers * 64 / whole_s * off[0],
        compute_s=compute_s * off[1],
        exchange_s=exchange_s * off[2],
    )


def jobs(noise: float = 0.0) -> list[Point]:
    return [measured(w, p, noise=noise) for w, p in ((1, 1), (2, 1), (3, 1), (2, 2), (6, 1))]


def test_the_costs_of_a_job_are_recovered():
    found = cost_model.fit(jobs())
    assert astuple(found.costs) == pytest.approx(astuple(TRUE), rel=0.05)
    assert found.spread < 0.01


def test_the_errors_hold_what_noise_does():
    """Of the four parameters, each lies within its two standard errors, and noise widens them."""
    found, quiet = cost_model.fit(jobs(noise=0.05)), cost_model.fit(jobs(noise=0.005))
    errors = astuple(found.errors())
    for value, true, error in zip(astuple(found.costs), astuple(TRUE), errors, strict=True):
        assert abs(math.log(value / true)) < 2 * error
    assert all(e > q for e, q in zip(errors, astuple(quiet.errors()), strict=True))


def test_what_the_jobs_do_not_tell_apart_has_a_wide_error_and_does_not_run_away():
    """Two workers never queue for many cores: an exchange may be processing or round trips."""
    many = replace(TRUE, cores=64)
    shapes = ((1, 1), (2, 1), (2, 2))
    found = cost_model.fit([measured(w, p, costs=many, noise=0.02) for w, p in shapes])
    assert found.costs.compute_s == pytest.approx(TRUE.compute_s, rel=0.1)
    assert 10 * found.errors().compute_s < min(found.errors().serve_s, found.errors().trip_s)
    exchange_s = found.costs.serve_s + cost_model.TRIPS * found.costs.trip_s
    assert exchange_s == pytest.approx(TRUE.serve_s + cost_model.TRIPS * TRUE.trip_s, rel=0.1)


def test_a_machine_works_on_one_step_at_least():
    """With less than one, the same jobs would be as well explained by any length of a step."""
    shapes = ((1, 1), (2, 1), (3, 1), (2, 2))
    points = []
    for workers, ps in shapes:
        alone = measured(workers, ps)
        times_s = {"compute_s": 0.004 * workers, "exchange_s": 0.004 * workers}
        points.append(replace(alone, examples_per_s=64 / (0.0115 * workers**0.1), **times_s))
    found = cost_model.fit(points)
    assert found.costs.cores >= 1
    assert found.costs.compute_s == pytest.approx(0.004, rel=0.2)
    assert found.errors().compute_s < 0.5


def test_a_wire_is_known_without_being_fitted():
    """12 Mbit/s carry 1.2 MB in 0.84 s: one worker waits for it, and more are no faster."""
    costs = cost_model.fit(jobs()).costs
    slow = replace(HERE, mbit=12.0)
    alone, many = (measured(workers, 1).work for workers in (1, 8))
    sending_s = 1.2e6 * 8 / 12e6 / cost_model.PAYLOAD
    others_s = TRUE.compute_s + TRUE.serve_s + 2 * TRUE.trip_s
    one = cost_model.examples_per_s(costs, alone, slow)
    assert one == pytest.approx(64 / 1.1 / (sending_s + others_s), rel=1e-2)
    full = 64 / sending_s / (1 + costs.hand + costs.idle * 7 / 8)
    assert cost_model.examples_per_s(costs, many, slow) == pytest.approx(full, rel=1e-3)
    assert cost_model.fit(jobs()).limit(many, slow) == cost_model.WIRE


def test_with_a_machine_each_the_links_of_the_ps_are_full_and_a_second_ps_doubles_them():
    place = Place(cores=2, mbit=100.0, apart=True)
    one, two = (measured(64, ps).work for ps in (1, 2))
    link_s = 6e5 * 8 / 100e6 / cost_model.PAYLOAD
    full = 64 / link_s / (1 + TRUE.hand + TRUE.idle * 63 / 64)
    assert cost_model.examples_per_s(TRUE, one, place) == pytest.approx(full, rel=0.05)
    gain = cost_model.examples_per_s(TRUE, two, place) / cost_model.examples_per_s(TRUE, one, place)
    assert gain == pytest.approx(2, rel=0.05)
    stations, think_s = cost_model.network(TRUE, one, place)
    full, workers = saturation(stations, think_s=think_s)
    assert full.name in (cost_model.LINKS_IN, cost_model.LINKS_OUT)
    alone_s = TRUE.compute_s + TRUE.serve_s + 2 * TRUE.trip_s + 2 * link_s
    assert workers == pytest.approx(alone_s / link_s)


def ring_jobs(true: Ring, *counts: int) -> list[Point]:
    works = [Work(workers=n, ps=0, batch=64, read_bytes=0, write_bytes=6e5) for n in counts]
    return [
        Point(
            shape=Shape(workers=work.workers),
            work=work,
            place=HERE,
            examples_per_s=true.examples_per_s(work, HERE),
        )
        for work in works
    ]


def test_a_ring_is_recovered_and_known_behind_a_wire():
    true = Ring(compute_s=0.02, round_s=0.0015)
    points = ring_jobs(true, 1, 2, 4)
    found, work = fit_ring(points), points[-1].work
    assert (found.compute_s, found.round_s) == pytest.approx((0.02, 0.0015))
    slow = Place(cores=2, mbit=10.0)
    step_s = 0.02 / 2 + 6 * 0.0015 + 6 * 6e5 * 8 / 10e6 / cost_model.PAYLOAD
    assert found.examples_per_s(work, slow) == pytest.approx(64 / step_s)
    assert (found.limit(work, HERE), found.limit(work, slow)) == (cost_model.CORES, cost_model.WIRE)
    step_s = 0.02 / 4 + 6 * 0.0015 + 6 / 4 * 6e5 * 8 / 10e6 / cost_model.PAYLOAD
    apart = found.examples_per_s(work, replace(slow, apart=True))
    assert apart == pytest.approx(64 / step_s)


def test_rounds_that_cost_nothing_are_not_below_nothing():
    points = ring_jobs(Ring(compute_s=0.02, round_s=0.0), 1, 2, 4)
    faster = [replace(p, examples_per_s=p.examples_per_s * p.work.workers**0.2) for p in points]
    assert fit_ring(faster).round_s == 0.0
