"""Whole jobs that are asked to stop, and started again by the same command."""

import os
import re
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


@pytest.mark.timeout(5 * DEADLINE_S)
def test_a_job_that_is_asked_to_stop_ends_like_one_left_alone(tmp_path):
    run_dir = tmp_path / "cut"
    ways = {
        "SIGTERM of one task": (
            lambda job: os.kill(job.task("worker-1"), signal.SIGTERM), 143
        ),
        "SIGINT": (lambda job: job.process.send_signal(signal.SIGINT), 130),
    }  # fmt: skip
    stopped_at = 0
    for way, (ask, code) in ways.items():
        job = TrainingJob(run_dir, *TWO_WORKERS)
        job.trained_beyond(stopped_at)
        ask(job)
        assert job.end() == code, job.logs()
        assert "Traceback" not in job.logs(), job.logs()
        assert len(job.chiefs_words()) == 1, job.logs()
        (said,) = job.chiefs_words()
        name, step = said.split(" at step ")[0], int(re.findall(r"\d+", said)[-1])
        assert name == way.split()[0], job.logs()
        assert step > stopped_at, job.logs()
        stopped_at = step
        summary = summary_of(run_dir)
        assert (summary["status"], summary["steps"]) == ("stopped", step), job.logs()
    last = TrainingJob(run_dir, *TWO_WORKERS)
    assert last.end() == 0, last.logs()
    summary = summary_of(run_dir)
    assert (summary["status"], summary["resumed_from_step"]) == ("done", stopped_at), last.logs()

    whole = TrainingJob(tmp_path / "whole", *TWO_WORKERS)
    assert whole.end() == 0, whole.logs()
    expected = summary_of(tmp_path / "whole")
    for name in ("weights_sha256", "state_sha256", "metrics", "steps", "examples"):
        assert summary[name] == expected[name], name
    assert metrics_of(run_dir) == metrics_of(tmp_path / "whole")
