"""Whole jobs that are asked to stop, and started again by the same command."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.trainings import DEADLINE_S, TrainingJob, summary_of
from tfdist.outputs.run_directory import RunDirectory

TWO_WORKERS = ("--strategy", "multiworker", "--workers", "2")


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = RunDirectory(run_dir).read_metrics()
    return [{k: v for k, v in line.items() if k != "examples_per_second"} for line in lines]


@pytest.mark.timeout(4 * DEADLINE_S)
def test_a_stopped_job_ends_like_an_undisturbed_one(tmp_path):
    run_dir = tmp_path / "cut"
    job = TrainingJob(run_dir, *TWO_WORKERS)
    job.trained_beyond(0)
    os.kill(job.task("worker-1"), signal.SIGTERM)
    assert job.end() == 143, job.logs()
    assert "Traceback" not in job.logs(), job.logs()
    (said,) = job.chiefs_words()
    stopped = summary_of(run_dir)
    stopped_at = stopped["steps"]
    assert said == f"SIGTERM at step {stopped_at}, state saved", job.logs()
    assert stopped["status"] == "stopped", job.logs()
    assert stopped_at > 0
    last = TrainingJob(run_dir, *TWO_WORKERS)
    assert last.end() == 0, last.logs()
    summary = summary_of(run_dir)
    assert (summary["status"], summary["resumed_from_step"]) == ("done", stopped_at), last.logs()
    (resumes,) = [line for line in last.said if "resumes at step" in line]
    assert resumes.startswith("[worker-0] "), last.logs()
    assert f"resumes at step {stopped_at} (epoch " in resumes, last.logs()

    whole = TrainingJob(tmp_path / "whole", *TWO_WORKERS)
    assert whole.end() == 0, whole.logs()
    expected = summary_of(tmp_path / "whole")
    for name in ("weights_sha256", "state_sha256", "metrics", "steps", "examples"):
        assert summary[name] == expected[name], name
    assert metrics_of(run_dir) == metrics_of(tmp_path / "whole")
