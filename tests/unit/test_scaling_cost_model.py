"""The queues of the cost model, against theory. Its fits are in test_scaling_predictions."""

import itertools
import math

import pytest

from benchmarks.scaling.cost_model import (
    Station,
    solve,
)


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
