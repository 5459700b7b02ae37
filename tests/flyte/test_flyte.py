"""The workflow of launch/flyte with the real flytekit, on this machine; `make test-flyte`."""

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit.exceptions.base import FlyteException

from tests.processes import until
from tfdist.outputs.run_directory import RunDirectory

WORKFLOW = Path(__file__).parents[2] / "launch" / "flyte" / "train.py"
DEADLINE_S = 240
PROGRAM = """
import runpy, sys
runpy.run_path(sys.argv[1])["digits"](run_dir=sys.argv[2], total_examples=int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def flow():
    return runpy.run_path(str(WORKFLOW))


def test_the_task_runs_on_interruptible_instances_with_retries(flow):
    metadata = flow["train"].metadata
    assert (metadata.interruptible, metadata.retries) == (True, 3)
    assert flow["train"].container_image == "registry.example.org/tfdist:1.0"


def test_an_interrupted_task_saves_and_the_next_one_resumes(flow, tmp_path):
    run = RunDirectory(tmp_path / "run")
    program = [sys.executable, "-c", PROGRAM, str(WORKFLOW), str(run.path), "57600"]
    with open(tmp_path / "log", "wb") as log:
        task = subprocess.Popen(program, stdout=log, stderr=log)
    try:
        until(lambda: run.read_metrics() or task.poll() is not None, within_s=DEADLINE_S)
        task.send_signal(signal.SIGTERM)
        assert task.wait(DEADLINE_S) == 1
    finally:
        task.kill()
        task.wait()
        print((tmp_path / "log").read_text(errors="replace"))
    summary = run.read_summary()
    assert summary is not None
    assert summary["status"] == "stopped"
    accuracy = flow["digits"](run_dir=str(run.path), total_examples=57600)
    summary = run.read_summary() or {}
    assert summary["resumed_from_step"]
    assert accuracy == summary["metrics"]["val_accuracy"]


def test_a_usage_error_is_not_retried(flow, tmp_path):
    with pytest.raises(Exception, match="the job has a mistake") as told:
        flow["digits"](run_dir=str(tmp_path), workers=0)
    assert not isinstance(told.value, FlyteException)
