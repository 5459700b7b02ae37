"""Sweeps from Python: a user's tuner, whose trials are jobs that run the user's program again."""

import os
import re
from pathlib import Path

import pytest

from tests import forked_python
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import fold, read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "multiprocess" / "programs" / "tuned.py"
EXAMPLES = 96
DEADLINE_S = 240.0


ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(tmp_path: Path, *args: str, **variables: str) -> str:
    program, env = (str(PROGRAM), str(tmp_path), *args), {**ENVIRON, **variables}
    done = forked_python.run(*program, timeout=DEADLINE_S, env=env)
    print(done.stdout, done.stderr)
    for path in sorted(tmp_path.rglob("*.log")):
        print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")
    assert done.returncode == 0
    return done.stdout


@pytest.mark.timeout(2.5 * DEADLINE_S)
def test_one_of_two_parallel_trials_loses_a_worker(tmp_path):
    """The trial is not lost (keras-tuner#915), and the program goes on when all is done (#344)."""
    said = run(tmp_path, "multiworker", "2", "3")
    state = fold(read(tmp_path / "sweep" / "journal.jsonl"))
    trials = state.trials
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
    # A finished sweep: nothing is run, the same is told.
    again = run(tmp_path, "multiworker", "2", "3")
    assert "best" in again
    assert again.endswith("".join(said.splitlines(keepends=True)[-2:]))
    assert len(read(tmp_path / "sweep" / "journal.jsonl")) == sum(
        # begun, asked, started, killed, ended, finished
        (1, len(trials) + 1, 4, 1, len(trials), 1)
    )
