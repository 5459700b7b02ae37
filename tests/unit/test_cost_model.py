"""The cost model of `benchmarks.scaling`: its queues against theory, and what it predicts."""

import itertools
import math
from typing import Any

import pytest

from benchmarks.scaling import cost_model, predictions
from benchmarks.scaling.cost_model import Costs, Place, Ring, Station, Work
from benchmarks.scaling.measure import Shape, parse_shapes

COSTS = Costs(compute_s=0.010, serve_s=0.004, trip_s=0.001, cores=1.6, hand=0.1, idle=0.2)
RING = Ring(compute_s=0.011, round_s=0.0008)


@pytest.mark.parametrize(("servers", "customers"), [(1, 4), (1.5, 6), (4, 16)])
def test_the_flow_through_the_queues_is_as_the_sum_over_all_states_says(servers, customers):
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
    flow = cost_model.solve(stations, think_s=1.1, customers=customers).rounds_per_s
    assert flow == pytest.approx(states(customers - 1) / states(customers), rel=1e-6)


def row(shape: Shape) -> dict[str, Any]:
    """What a job measures that is as the models have it."""
    work = Work(workers=shape.workers, ps=shape.ps, batch=64, read_bytes=6e5, write_bytes=5e5)
    place = Place(cores=2, mbit=shape.rate_mbit)
    parts, rate = None, RING.examples_per_s(work, place)
    if shape.ps:
        compute_s, exchange_s, _ = cost_model.expected(COSTS, work, place)
        rate = cost_model.examples_per_s(COSTS, work, place)
        parts = dict.fromkeys(("between", "waiting", "step", "input"), 1.0)
        parts |= {"compute": compute_s * 1e3 - 1}
        parts |= dict.fromkeys(("read", "write"), exchange_s * 500)
    return {
        **{"shape": shape.name, "workers": shape.workers, "ps": shape.ps},
        **{"rate_mbit": shape.rate_mbit, "batch": 64.0, "step_ms": parts},
        "sent_bytes": {"read": 600_000, "write": 500_000} if shape.ps else None,
        "examples_per_second": {"median": rate, "least": rate, "most": rate},
        "seconds_to_loss": None,
    }


def test_the_most_workers_and_what_a_wire_limits_are_held_out_and_predicted():
    shapes = parse_shapes("1W1PS,2W1PS,3W1PS,4W1PS,2W2PS,1W,2W,4W,2W1PS@20")
    table = {"arguments": [], "cpus": 2, "loss": 1.0, "repeats": 1, "shapes": [*map(row, shapes)]}
    model = predictions.predict(table, hold_out=None, link_mbit=100)
    assert model["fitted"] == ["1W1PS", "2W1PS", "3W1PS", "2W2PS", "1W", "2W"]
    errors = {p["shape"]: p["relative_error"] for p in model["points"] if p["held_out"]}
    assert set(errors) == {"4W1PS", "4W", "2W1PS@20"}
    assert max(map(abs, errors.values())) < 0.02
