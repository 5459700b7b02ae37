"""Whole jobs that are asked to stop, in every way, and started again by the same command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfdist.outputs.run_directory import RunDirectory

DEADLINE_S = 240
EPOCH_STEPS = 60
FLAGS = (
    "--config.total_examples=30000", "--config.checkpoints=10",
    "--config.global_batch_size=50", "--config.seed=3", "--config.backup_every_steps=7",
)  # fmt: skip


class Job:
    """A multiworker job of two tasks in a run directory; on failure, shows all its logs."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = RunDirectory(run_dir)
        command = [sys.executable, "-m", "tfdist.launch", "--strategy", "multiworker"]
        command += ["--workers", "2", "--start", "exec", "--grace_s", "60"]
        self.process = subprocess.Popen(
            [*command, "--run_dir", str(run_dir), "--", *FLAGS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.said: list[str] = []
        # Its output is read all the while, so that it never waits for us.
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stdout or ()))
        self._reader.start()

    def trained_beyond(self, step: int) -> None:
        """Returns when there is a checkpoint of a later step, inside an epoch."""
        self.until(lambda: any(s > step and s % EPOCH_STEPS for s in self._steps()))

    def _steps(self) -> list[int]:
        names = [path.name for path in self.directory.checkpoints.glob("step-*")]
        return [int(re.findall(r"\d+", name)[0]) for name in names]

    def until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not true():
            assert self.process.poll() is None, self.logs()
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.01)

    def task(self, name: str) -> int:
        """The process of a task, a child of the launcher."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            with contextlib.suppress(OSError):
                if name in Path(f"/proc/{pid}/cmdline").read_text():
                    return pid
        raise AssertionError(f"no process of {name}\n{self.logs()}")

    def end(self) -> int:
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"it did not end\n{self.logs()}")
        self._reader.join(DEADLINE_S)
        return code

    def logs(self) -> str:
        files = sorted(self.run_dir.glob("logs/*/*.log"))
        return "\n".join(["".join(self.said), *(f"== {f}\n{f.read_text()}" for f in files)])

    def chiefs_words(self) -> list[str]:
        """What the tasks have said about a stop; the chief alone should."""
        *_, attempt = sorted(self.run_dir.glob("logs/*"), key=lambda path: path.stat().st_mtime)
        text = "\n".join(file.read_text() for file in attempt.glob("*.log"))
        return re.findall(r"stopped by (\w+ at step \d+, state saved); run the same", text)


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = RunDirectory(run_dir).read_metrics()
    return [{k: v for k, v in line.items() if k != "examples_per_second"} for line in lines]


@pytest.mark.timeout(7 * DEADLINE_S)
def test_a_job_asked_to_stop_in_every_way_ends_like_one_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "cut"
    ways = {
        "SIGTERM": (lambda job: job.process.send_signal(signal.SIGTERM), 143),
        "SIGTERM of one task": (lambda job: os.kill(job.task("worker-1"), signal.SIGTERM), 143),
        "SIGUSR1": (lambda job: job.process.send_signal(signal.SIGUSR1), 143),
        "SIGINT": (lambda job: job.process.send_signal(signal.SIGINT), 130),
    }
    stopped_at = 0
    for way, (ask, code) in ways.items():
        job = Job(run_dir)
        job.trained_beyond(stopped_at)
        ask(job)
        assert job.end() == code, job.logs()
        assert "Traceback" not in job.logs(), job.logs()
        (said,) = job.chiefs_words()
        name, step = said.split(" at step ")[0], int(re.findall(r"\d+", said)[-1])
        assert name == way.split()[0], job.logs()
        assert step > stopped_at, job.logs()
        stopped_at = step
        summary = summary_of(run_dir)
        assert (summary["status"], summary["steps"]) == ("stopped", step), job.logs()
    last = Job(run_dir)
    assert last.end() == 0, last.logs()
    summary = summary_of(run_dir)
    assert (summary["status"], summary["resumed_from_step"]) == ("done", stopped_at), last.logs()

    whole = Job(tmp_path / "whole")
    assert whole.end() == 0, whole.logs()
    expected = summary_of(tmp_path / "whole")
    for name in ("weights_sha256", "state_sha256", "metrics", "steps", "examples"):
        assert summary[name] == expected[name], name
    assert metrics_of(run_dir) == metrics_of(tmp_path / "whole")
