"""Range tests of learning rates in jobs: the same in every task, and no trace of them."""

from __future__ import annotations

import json

import pytest

from tests.multiprocess.trainings import PROGRAMS, launch


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        (["--strategy", "multiworker", "--workers", "2"], 2),
        (["--strategy", "ps", "--workers", "2", "--ps", "1"], 1),
    ],
    ids=["multiworker", "ps"],
)
def test_a_range_test_in_a_job_leaves_no_trace(tmp_path, flags, tasks):
    launch(
        tmp_path / "run", *flags, str(PROGRAMS / "finding.py"), str(tmp_path), timeout_s=200
    )  # fmt: skip
    seen = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(seen) == tasks
    for one in seen:
        assert one == seen[0]
        assert one["same"]
        assert one["same after an error"]
        assert one["refused"] == "not-finite"
        assert len(one["rates"]) == len(one["losses"]) >= 10
