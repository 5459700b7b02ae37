"""The cost model of a measurement: what is fitted and judged, the curves, the advice, mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from benchmarks.scaling import cost_model, measure, predictions
from benchmarks.scaling.__main__ import main
from benchmarks.scaling.cost_model import Costs, Place, Ring, Work
from benchmarks.scaling.measure import Shape, parse_shapes
from tests.refusals import refusal

SHAPES = "1W1PS,2W1PS,3W1PS,4W1PS,2W2PS,1W,2W,4W,2W1PS@20"
COSTS = Costs(compute_s=0.010, serve_s=0.004, trip_s=0.001, cores=1.6, hand=0.1, idle=0.2)
RING = Ring(compute_s=0.011, round_s=0.0008)


def row(shape: Shape, faster: float = 1.0) -> dict[str, Any]:
    """What a job measures that is as the models have it; `faster` by a factor than they have it."""
    work = Work(workers=shape.workers, ps=shape.ps, batch=64, read_bytes=6e5, write_bytes=5e5)
    place = Place(cores=2, mbit=shape.rate_mbit)
    parts = None
    rate = RING.examples_per_s(work, place)
    if shape.ps:
        compute_s, exchange_s, _ = cost_model.expected(COSTS, work, place)
        rate = cost_model.examples_per_s(COSTS, work, place)
        halves = dict.fromkeys(("read", "write"), exchange_s * 500)
        parts = {"input": 1.0, "compute": compute_s * 1e3 - 1, **halves}
        parts |= dict.fromkeys(("between", "waiting", "step"), 1.0)
    median = rate * faster
    return {
        **{"shape": shape.name, "workers": shape.workers, "ps": shape.ps},
        **{"rate_mbit": shape.rate_mbit, "batch": 64.0, "step_ms": parts},
        "sent_bytes": {"read": 600_000, "write": 500_000} if shape.ps else None,
        "examples_per_second": {"median": median, "least": median, "most": median},
        "seconds_to_loss": None,
    }


def table(shapes: str = SHAPES, **faster: float) -> dict[str, Any]:
    rows = [row(shape, faster.get(f"_{shape.name}", 1.0)) for shape in parse_shapes(shapes)]
    return {"arguments": ["--x"], "cpus": 2, "loss": 1.0, "repeats": 1, "shapes": rows}


def predict(found: dict[str, Any], hold_out: str | None = None) -> dict[str, Any]:
    return predictions.predict(found, hold_out=hold_out, link_mbit=100)


def errors(model: dict[str, Any], *, held_out: bool) -> dict[str, float]:
    points = [point for point in model["points"] if point["held_out"] is held_out]
    return {point["shape"]: point["relative_error"] for point in points}


def test_the_most_workers_and_what_a_wire_limits_are_held_out():
    model = predict(table())
    assert model["fitted"] == ["1W1PS", "2W1PS", "3W1PS", "2W2PS", "1W", "2W"]
    held = errors(model, held_out=True)
    assert set(held) == {"4W1PS", "4W", "2W1PS@20"}
    assert max(map(abs, held.values())) < 0.02


def test_what_was_named_is_held_out_and_never_fitted():
    """The one that is named is out by what it is faster, and the others not at all."""
    model = predict(table(_2W2PS=1.5), "2w2ps, 4W")
    assert errors(model, held_out=True)["2W2PS"] == pytest.approx(1 / 1.5 - 1, abs=0.02)
    assert max(map(abs, errors(model, held_out=False).values())) < 0.02
    assert "2W2PS" not in model["fitted"]
    assert "4W1PS" in model["fitted"]


@pytest.mark.parametrize(
    ("place", "full", "best"),
    [
        ("this machine", "cores", "twice the cores x 2.00"),
        ("this machine, 20 Mbit/s", "wire", "half the bytes x 2.00"),
        ("a machine a task, 100 Mbit/s", "links from the ps", "twice the batch x 2.00"),
    ],
)
def test_the_advice_names_what_is_full_and_the_change_that_helps_most(place, full, best):
    model = predict(table())
    (line,) = [line for line in model["advice"] if line.startswith(f"{place}, 1 ps: ")]
    curve = next(c for c in model["curves"] if (c["place"], c["job"]) == (place, "1 ps"))
    limits = [point["limit"] for point in curve["points"]]
    first = int(line.split(" workers on")[0].split()[-1])
    assert f"1 ps: {full} full from {first} workers on; at 16: " in line
    changes = dict(change.split(" x ") for change in line.split(" at 16: ")[1].split(", "))
    assert len(changes) == 4
    assert list(changes.values()) == sorted(changes.values(), reverse=True)
    assert best in line
    numbers = [point["workers"] for point in curve["points"]]
    assert limits == [full if n >= first else cost_model.OWN_STEP for n in numbers]


def test_without_multiworker_jobs_there_is_a_model_of_ps_jobs():
    model = predict(table("1W1PS,2W1PS,3W1PS,4W1PS,2W"))
    assert [point["shape"] for point in model["points"]] == ["1W1PS", "2W1PS", "3W1PS", "4W1PS"]
    assert {curve["job"] for curve in model["curves"]} == {"1 ps"}


@pytest.mark.parametrize(
    ("shapes", "hold_out", "said"),
    [
        (SHAPES, "5W1PS", "--hold_out: received '5W1PS'; expected of the jobs that are measured"),
        (SHAPES, "", "--hold_out: received ''"),
        (SHAPES, "1W1PS,2W1PS,3W1PS", "--hold_out: received 4W1PS, 2W2PS to fit a model to; exp"),
        ("1W1PS,2W1PS,2W1PS@20", None, "--shapes: received 1W1PS, 2W1PS to fit a model to; exp"),
        ("2W1PS,2W2PS,2W3PS", None, "3 or more ps jobs at no limited rate, of 2 or more numbers"),
        ("1W,2W,4W", None, "received no ps job to fit a model to"),
    ],
)
def test_what_cannot_be_fitted_is_refused(shapes, hold_out, said):
    assert said in str(refusal(lambda: predictions.divide(parse_shapes(shapes), hold_out)))


def again(tmp_path: Path, text: str, *flags: str) -> int:
    file = tmp_path / "measured.json"
    file.write_text(text)
    return main(["--from", str(file), "--out", str(tmp_path / "out"), *flags])


def test_a_measurement_is_read_back_and_fitted_again(capsys, tmp_path):
    assert again(tmp_path, json.dumps(table()), "--hold_out", "3W1PS", "--link_mbit", "7") == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert "3W1PS" not in found["cost_model"]["fitted"]
    assert "cost model, fitted on 1W1PS, 2W1PS, 4W1PS, 2W2PS, 1W, 2W, 4W" in said
    assert "a machine a task, 7 Mbit/s, 1 ps: links from the ps full from" in said
    for point in found["cost_model"]["points"]:
        assert f"{point['shape']:<12} {point['measured']:>10,.0f}" in said
    height, width, _ = matplotlib.image.imread(tmp_path / "out" / "scaling.png").shape
    assert (height, abs(width - 1560) <= 2) == (1200, True)


def no_parts(found: dict[str, Any]) -> dict[str, Any]:
    found["shapes"][0]["step_ms"] = None
    return found


def no_rate(found: dict[str, Any]) -> dict[str, Any]:
    found["shapes"][-1]["examples_per_second"] = None
    return found


def broken(found: dict[str, Any]) -> dict[str, Any]:
    found["shapes"][0]["examples_per_second"]["median"] = math.nan
    return found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "expected a scaling.json of this program"),
        ("[]", "expected a scaling.json of this program"),
        ('{"shapes": [{"shape": "2W"}]}', "expected a scaling.json of this program"),
        (json.dumps(broken(table())), "expected a scaling.json of this program"),
        (json.dumps(no_parts(table())), "1W1PS: received a measurement without what its steps"),
        (json.dumps(no_rate(table())), "2W1PS@20: received a measurement without what its steps"),
        (json.dumps(table("1W1PS,2W")), "--shapes: received 1W1PS to fit a model to"),
    ],
)
def test_a_file_that_is_not_ours_is_one_line(text, said, capsys, tmp_path):
    assert again(tmp_path, text) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        *(("--rate_mbit", "0"), ("--link_mbit", "-1"), ("--repeats", "0")),
        *(("--hold_out", "9W1PS"), ("--from", "none.json")),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(flags, capsys, tmp_path):
    out = tmp_path / "new"
    assert main(["--out", str(out), *flags]) == 2
    assert flags[0] in capsys.readouterr().err
    assert not out.exists()


# Measured by this program on 2 cores on which others worked as well: python -m benchmarks.scaling
# --shapes 1W1PS,2W1PS,3W1PS,4W1PS,2W2PS,1W,2W,4W,1W1PS@100,2W1PS@100 --out ... -- and `arguments`
# of the file, its cost model taken out.
REAL = json.loads((Path(__file__).parent / "data" / "scaling_digits.json").read_text())


@pytest.mark.parametrize(
    ("hold_out", "within"),
    [
        (None, {"4W1PS": 0.15, "1W1PS@100": 0.1, "2W1PS@100": 0.3, "4W": 0.5}),
        ("3W1PS", {"3W1PS": 0.15, "1W1PS@100": 0.1, "2W1PS@100": 0.3}),
        ("2W1PS", {"2W1PS": 0.15, "1W1PS@100": 0.1, "2W1PS@100": 0.35}),
        ("2W2PS", {"2W2PS": 0.2, "1W1PS@100": 0.1, "2W1PS@100": 0.35}),
    ],
)
def test_real_jobs_are_foretold_within_an_error(hold_out, within):
    """As benchmarks/SCALING.md says of them; what the machine did besides is in the errors."""
    found = errors(predict(REAL, hold_out), held_out=True)
    assert set(found) == set(within)
    assert all(abs(error) < within[shape] for shape, error in found.items()), found


def test_the_bars_of_real_jobs_hold_what_was_measured_past_those_fitted():
    rates = {row["shape"]: row["examples_per_second"]["median"] for row in REAL["shapes"]}
    model = predict(REAL)
    for job, shape in (("1 ps", "4W1PS"), ("multiworker", "4W")):
        curve = next(c for c in model["curves"] if c["job"] == job)
        four = next(point for point in curve["points"] if point["workers"] == 4)
        assert four["least"] < rates[shape] < four["most"]


@pytest.fixture
def measured(monkeypatch):
    """The jobs that were run, none of them really."""
    names: list[str] = []

    def run(shape: Shape, run_dir: Path, **_: Any) -> dict[str, Any]:
        names.append(shape.name)
        rate = {"examples_per_second": 1.0, "examples": 8, "steps": 1}
        return {**rate, "metrics": {"loss": 1.0}, "lines": []}

    monkeypatch.setattr(measure, "run_job", run)
    return names


def measure_all(tmp_path: Path) -> int:
    flags = ("--shapes", "1W1PS,2W,2W1PS@30", "--rate_mbit", "20", "--repeats", "1")
    return main(["--out", str(tmp_path / "out"), *flags])


def test_ps_jobs_are_measured_once_more_behind_a_wire(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "possible", lambda rate_mbit: True)
    assert measure_all(tmp_path) == 0
    assert measured == ["1W1PS", "2W", "2W1PS@30", "1W1PS@20", "2W1PS@20"]


def test_where_no_wire_can_be_had_the_other_jobs_are_measured_and_a_line_says_so(
    measured, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_all(tmp_path) == 0
    assert measured == ["1W1PS", "2W"]
    messages = [r.message for r in caplog.records if r.name == "benchmarks.scaling.measure"]
    (line,) = [message for message in messages if "wire" in message]
    assert line == "nothing is measured behind a wire: unshare, ip, tc not found"
