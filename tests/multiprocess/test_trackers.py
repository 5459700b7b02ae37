"""A tracker's run over a kill, in the chief alone, and with another number of workers."""

from __future__ import annotations

import json

import pytest

from tests.multiprocess.jobs import ROOT
from tests.multiprocess.test_training import launch

PROGRAM = str(ROOT / "tests" / "multiprocess" / "programs" / "tracked.py")
DEADLINE_S = 240


def lines_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["multiworker", "ps"])
def test_a_killed_job_goes_on_in_its_run_and_logs_each_epoch_once(tmp_path, strategy):
    out = tmp_path / "tracked.jsonl"
    flags = ("--strategy", strategy, "--workers", "2", "--max_restarts", "1")
    args = (PROGRAM, str(out), str(tmp_path / "backup"), "1")
    launch(tmp_path / "run", *flags, *args, timeout_s=DEADLINE_S)
    lines = lines_in(out)
    assert len({line["run"] for line in lines}) == 1
    assert {line["task"] for line in lines} == {"chief-0" if strategy == "ps" else "worker-0"}
    assert [line["epoch"] for line in lines if "epoch" in line] == [0, 1, 2, 3]
    assert (tmp_path / "tracked.killed").exists()
