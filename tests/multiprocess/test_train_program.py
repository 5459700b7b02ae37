"""tfdist.train under the launcher: what the demo does, and what a second start finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.warm import QUIET, Start, as_it_comes, forked
from tfdist.outputs.run_directory import RunDirectory

DEADLINE_S = 240
JOBS = {
    "ps": ["--strategy", "ps", "--workers", "2", "--ps", "1", "--profile_ps"],
    "multiworker": ["--strategy", "multiworker", "--workers", "2"],
}


def launched(kind: str, run_dir: Path, *flags: str, start: Start = forked) -> Any:
    command = [sys.executable, "-m", "tfdist.launch", *JOBS[kind], "--run_dir", str(run_dir)]
    with start() as (how, fds):
        return subprocess.run(
            [*command, *how, "--", *flags],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, **QUIET},
            pass_fds=fds,
        )


def logs(run_dir: Path, done: Any) -> str:
    files = sorted(run_dir.glob("logs/*/*.log"))
    return "\n".join([done.stdout, done.stderr, *(f"== {f}\n{f.read_text()}" for f in files)])


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.timeout(3 * DEADLINE_S)
def test_the_digits_are_learned_and_a_second_start_is_told(kind: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--config.total_examples=14400", "--config.checkpoints=5", "--config.seed=1")
    done = launched(kind, run_dir, *flags, start=as_it_comes)
    assert done.returncode == 0, logs(run_dir, done)
    summary = RunDirectory(run_dir).read_summary()
    assert summary is not None
    assert (summary["status"], summary["strategy"]) == ("done", kind)
    assert (summary["workers"], summary["ps"]) == (2, 1 if kind == "ps" else 0)
    assert (summary["steps"], summary["examples"]) == (225, 14400)
    if kind == "ps":
        assert sum(summary["worker_steps"].values()) == 225
        lines = RunDirectory(run_dir).read_metrics()
        assert [sum(line["worker_steps"].values()) for line in lines] == [45, 90, 135, 180, 225]
        assert summary["ps_bytes"]["ps-0"] > 0
        steps = [costs["steps"] for costs in summary["ps_profile"]["workers"].values()]
        assert 0 < sum(steps) < 225
        assert "what a step costs, in ms" in logs(run_dir, done)
    assert summary["metrics"]["val_accuracy"] > 0.95
    names = {"config.json", "metrics.jsonl", "metrics.png", "report.json", "checkpoints", "logs"}
    assert names <= set(os.listdir(run_dir))

    again = launched(kind, run_dir, *flags)
    assert again.returncode == 0, logs(run_dir, again)
    assert "is finished; --overwrite runs it again" in logs(run_dir, again)
    assert RunDirectory(run_dir).read_summary() == summary

    if kind == "multiworker":
        other = launched(kind, run_dir, *flags, "--config.optimizer=sgd")
        assert other.returncode == 2, logs(run_dir, other)
        assert "received optimizer='sgd' (there: 'adam')" in logs(run_dir, other)
