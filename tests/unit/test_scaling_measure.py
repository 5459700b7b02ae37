"""Jobs of several sizes beside each other: which, what is read of them, what is shown."""

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from benchmarks.scaling import measure, plot
from benchmarks.scaling.__main__ import main
from benchmarks.scaling.measure import Shape, parse_shapes, seconds_to_loss


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("2w1ps", "--strategy ps --workers 2 --ps 1"),
        ("2W2PS", "--strategy ps --workers 2 --ps 2"),
        ("4W", "--strategy multiworker --workers 4"),
        ("2W1PS@50", "--strategy ps --workers 2 --ps 1"),
        ("2W@2.5", "--strategy multiworker --workers 2"),
    ],
)
def test_a_shape_is_flags_of_the_launcher(word, flags):
    shape = Shape.parse(word)
    assert shape.flags == tuple(flags.split())
    assert shape.name == word.upper()


def test_a_shape_twice_is_measured_once():
    assert parse_shapes("1W1PS, 1w1ps,2W") == (Shape(workers=1, ps=1), Shape(workers=2))


@pytest.mark.parametrize("word", ["", "0W1PS", "2PS", "1W0PS", "two", "2W@", "2W@0", "2W@-1"])
def test_what_is_no_shape_is_refused(word, capsys, tmp_path):
    assert main(["--shapes", word, "--out", str(tmp_path / "new")]) == 2
    assert f"--shapes: received {word!r}" in capsys.readouterr().err


def test_runs_of_before_are_not_taken_for_new_ones(capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    assert main(["--out", str(tmp_path)]) == 2
    assert "name another directory" in capsys.readouterr().err


def epochs(*rows: tuple[int, float, float | None]) -> list[dict[str, Any]]:
    return [{"examples": e, "loss": loss, "examples_per_second": rate} for e, loss, rate in rows]


def test_the_time_to_a_loss_is_read_between_two_virtual_epochs():
    lines = epochs((100, 2.0, 50.0), (200, 1.0, 100.0), (300, 0.5, 100.0))
    assert seconds_to_loss(lines, 2.5) == 2.0
    assert seconds_to_loss(lines, 1.0) == 3.0
    assert seconds_to_loss(lines, 1.5) == 2.5
    assert seconds_to_loss(lines, 0.75) == 3.5
    assert seconds_to_loss(lines, 0.1) is None
    assert seconds_to_loss(epochs((100, 2.0, None), (200, 1.0, 100.0)), 1.0) is None


def table(tmp_path: Path, *, loss: float | None = None) -> tuple[dict[str, Any], list[str]]:
    """The table of jobs that are as fast as they have workers, and the order they ran in."""
    order = []

    def run(shape: Shape, run_dir: Path) -> dict[str, Any]:
        order.append(run_dir.name)
        rate = 100.0 * shape.workers + len(order)
        last = 0.5 + shape.ps / 10
        lines = epochs((100, 2.0, rate), (200, last, rate))
        found = {"examples_per_second": rate, "metrics": {"loss": last}, "lines": lines}
        found |= {"examples": 200, "steps": 25}
        if shape.ps:
            parts = {"compute_ms": 10.0 * len(order), "read_ms": 2.0, "step_ms": 12.0}
            workers = {
                "worker-0": {"steps": 30, **parts},
                "worker-1": {"steps": 10, "read_ms": 6.0},
            }
            sizes = {
                "ps-0 to worker": 7,
                "ps-1 to ps-0": 1,
                "worker to ps-0": 8,
                "worker to ps-1": 2,
            }
            links = {ends: {"size_bytes": size} for ends, size in sizes.items()}
            found["ps_profile"] = {"workers": workers, "links": links}
        return found

    shapes = parse_shapes("1W1PS,2W")
    return measure.measure(shapes, repeats=2, loss=loss, out=tmp_path, run=run), order


def test_shapes_run_in_turn_and_the_loss_is_what_all_reach(tmp_path):
    found, order = table(tmp_path)
    assert order == ["1W1PS-0", "2W-0", "1W1PS-1", "2W-1"]
    assert found["loss"] == 0.6
    first, second = found["shapes"]
    assert first["examples_per_second"] == {
        "median": 102.0,
        "least": 101.0,
        "most": 103.0,
        "all": [101.0, 103.0],
    }
    assert first["seconds_to_loss"]["least"] == pytest.approx(200 / 103)
    assert second["seconds_to_loss"]["most"] < first["seconds_to_loss"]["least"]
    shown = measure.lines(found)
    assert shown[1].split()[:5] == ["1W1PS", "102", "101", "to", "103"]


def test_what_a_step_costs_is_that_of_all_steps_in_the_middle_of_the_repeats(tmp_path):
    found, _ = table(tmp_path)
    of_ps, of_multiworker = (row["step_ms"] for row in found["shapes"])
    assert of_multiworker is None
    assert of_ps["read"] == pytest.approx((30 * 2 + 10 * 6) / 40)
    assert of_ps["compute"] == pytest.approx(0.75 * (10 + 30) / 2)
    shown = measure.lines(found)
    assert found["shapes"][0]["sent_bytes"] == {"read": 7, "write": 11}
    assert [row["batch"] for row in found["shapes"]] == [8, 8]
    assert shown[-2].split()[:5] == ["ms", "a", "step", "input", "read"]
    assert shown[-1].split()[:4] == ["1W1PS", "0.00", "3.00", "15.00"]


def test_a_loss_that_was_not_reached_has_no_time_and_a_picture_all_the_same(tmp_path):
    found, _ = table(tmp_path, loss=0.55)
    assert [row["seconds_to_loss"] is None for row in found["shapes"]] == [True, False]
    path = plot.draw(found, tmp_path / "scaling.png", title="digits")
    assert path is not None
    height, width, _ = matplotlib.image.imread(path).shape
    assert (height, abs(width - 1560) <= 2) == (600, True)
