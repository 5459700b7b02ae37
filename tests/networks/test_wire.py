"""A job behind a wire that is as slow as it was told to be, beside the cost model's word for it."""

import pytest

from benchmarks.scaling import cost_model, measure
from benchmarks.scaling.cost_model import Costs, Place, Work
from benchmarks.scaling.measure import Shape

DEADLINE_S = 200
ROUNDS = 3
RATE_MBIT = 40.0
FLAGS = (
    *("--config.total_examples=2560", "--config.checkpoints=1", "--config.validation_split="),
    *("--config.model=cnn", "--config.seed=1"),
)


@pytest.mark.alone
@pytest.mark.timeout(ROUNDS * (DEADLINE_S + 60))
def test_the_bytes_of_a_step_take_what_the_cost_model_says(tmp_path):
    """A wire so slow that an exchange is nothing but its bytes, whatever else the machine does."""
    assert measure.possible(RATE_MBIT)
    for number in range(ROUNDS):  # other work on the machine only ever makes it longer
        ratio = measured(tmp_path / str(number))
        if ratio < 1.2:
            break
    assert 0.85 < ratio < 1.2


def measured(out):
    """How long the bytes of a step took, by how long the cost model has them take."""
    shape = Shape(workers=1, ps=1, rate_mbit=RATE_MBIT)
    found = measure.run_job(shape, out, arguments=FLAGS, timeout_s=DEADLINE_S, profile_ps=True)
    table = measure.measure([shape], repeats=1, loss=None, out=out, run=lambda *_: found)
    (row,) = table["shapes"]
    read_bytes, write_bytes = row["sent_bytes"]["read"], row["sent_bytes"]["write"]
    assert 1e6 < read_bytes + write_bytes < 2e6
    work = Work(workers=1, ps=1, batch=64, read_bytes=read_bytes, write_bytes=write_bytes)
    nothing = Costs(compute_s=1e-6, serve_s=1e-6, trip_s=1e-6, cores=2, hand=0, idle=0)
    _, exchange_s, _ = cost_model.expected(nothing, work, Place(cores=2, mbit=RATE_MBIT))
    measured_s = (row["step_ms"]["read"] + row["step_ms"]["write"]) / 1e3
    print(measured_s, exchange_s, row)
    return measured_s / exchange_s
