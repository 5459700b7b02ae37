"""Jobs with CPU limits: their names, their groups of processes and their curves."""

import pytest

from benchmarks.charts import is_oversubscribed
from benchmarks.scaling import measure
from benchmarks.scaling.limits import CpuLimits
from benchmarks.scaling.measure import Shape
from tests.refusals import refusal


def test_a_shape_names_its_limit():
    limited = Shape.parse("8w1ps@19%")
    assert limited == Shape(workers=8, ps=1, cpu_percent=19)
    assert limited.name == "8W1PS@19%"
    assert "--threads_per_task" in limited.flags
    assert Shape.parse("2W@2.5") == Shape(workers=2, rate_mbit=2.5)
    assert refusal(lambda: Shape.parse("2W@0%")).where == "--shapes"


@pytest.mark.parametrize("version", [1, 2])
def test_each_task_gets_a_group_with_its_limit(tmp_path, version):
    parent = tmp_path if version == 2 else tmp_path / "cpu"
    parent.mkdir(exist_ok=True)
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory")
    limits = CpuLimits(19, tmp_path)
    limits.set({"worker-0": 12, "ps-0": 13})
    groups = sorted(parent.glob("tfdist-scaling-*"))
    assert [group.name.split("-", 3)[3] for group in groups] == ["ps-0", "worker-0"]
    assert [(group / "cgroup.procs").read_text() for group in groups] == ["13", "12"]
    if version == 2:
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
        assert (groups[0] / "cpu.max").read_text() == "1900 10000"
    else:
        assert (groups[0] / "cpu.cfs_quota_us").read_text() == "1900"
        assert (groups[0] / "cpu.cfs_period_us").read_text() == "10000"
    for group in groups:  # the system's groups have no files to delete
        for file in group.iterdir():
            file.unlink()
    limits.close()
    assert not list(parent.glob("tfdist-scaling-*"))


def test_a_limited_curve_begins_after_the_first_virtual_epoch():
    lines = [
        {"examples": 100, "loss": 2.0, "examples_per_second": 1000.0},
        {"examples": 200, "loss": 1.0, "examples_per_second": 50.0},
        {"examples": 300, "loss": 0.5, "examples_per_second": 25.0},
    ]
    limited = measure.loss_curve(lines, is_limited=True)
    assert limited == [(0.0, 2.0), (2.0, 1.0), (6.0, 0.5)]
    assert measure.loss_curve(lines)[0] == (0.1, 2.0)
    assert measure.seconds_to_loss(limited, 0.75) == 4.0


@pytest.mark.parametrize(
    ("workers", "percent", "expected"),
    [(8, 20, False), (8, 21, True), (2, None, False), (3, None, True)],
)
def test_tasks_without_enough_cpus_are_oversubscribed(workers, percent, expected):
    row = {"workers": workers, "ps": 1, "cpu_percent": percent}
    assert is_oversubscribed(row, cpus=2) == expected
