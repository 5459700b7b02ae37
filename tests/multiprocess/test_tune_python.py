"""Sweeps from Python: a user's tuner, whose trials are jobs that run the user's program again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.outputs.run_directory import RunDirectory
from tfdist.tuning.journal import read
from tfdist.tuning.state import fold

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "multiprocess" / "programs" / "tuned.py"
EXAMPLES = 96
DEADLINE_S = 240.0


def run(tmp_path: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    print(done.stdout, done.stderr)
    for path in sorted(tmp_path.rglob("*.log")):
        print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")
    assert done.returncode == 0
    return done.stdout


@pytest.mark.timeout(2.5 * DEADLINE_S)
def test_two_multiworker_trials_at_once_of_which_one_loses_a_worker(tmp_path: Path) -> None:
    said = run(tmp_path, "multiworker", "2")
    state = fold(read(tmp_path / "sweep" / "journal.jsonl"))
    trials, best = state.trials, state.ranked()[0]
    assert {trial.status for trial in trials.values()} == {"completed"}
    assert [trial.starts for trial in trials.values()] == [1, 2, 1]
    assert (trials["1"].began_at or 0) < (trials["0"].ended_at or 0), "they were not at once"
    steps = -(-EXAMPLES // trials["1"].values["batch"])
    summaries = [RunDirectory(tmp_path / "sweep" / "trials" / n).read_summary() for n in trials]
    assert [summary["strategy"] for summary in summaries if summary] == ["multiworker"] * 3
    assert summaries[1] is not None
    assert summaries[1]["resumed_from_step"] in (steps, 2 * steps)  # the second may be unfinished
    assert [line["virtual_epoch"] for line in trials["1"].history] == [1, 2, 3, 4]
    found = re.search(r"score ([\d.]+), evaluated ([\d.]+)", said)
    assert found is not None
    assert found[1] == found[2], "the best model is not that of the best epoch"
    assert f"saved model of {best.values['units']} units" in said
    again = run(tmp_path, "multiworker", "2")  # a finished sweep: nothing is run, the same is told
    assert "best" in again
    assert again.endswith("".join(said.splitlines(keepends=True)[-3:]))
    assert len(read(tmp_path / "sweep" / "journal.jsonl")) == sum(
        (1, len(trials) + 1, 4, 1, len(trials), 1)  # begun, asked, started, killed, ended, finished
    )
