"""Ledgers of whole jobs: several tasks write, one proof; and a step of them in one process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import forked_python
from tests.multiprocess.trainings import PROGRAMS, launch

DEADLINE_S = 200
JOBS = {
    "multiworker": ["--strategy", "multiworker", "--workers", "2"],
    "ps": ["--strategy", "ps", "--workers", "2", "--ps", "1"],
}
CONFIG = (
    "--config.total_examples=2000", "--config.checkpoints=2", "--config.global_batch_size=50",
    "--config.seed=3", "--config.augmentation.random_crop_padding=1", "--config.ledger=full",
    "--config.backup_every_steps=10", "--config.model=dense",
)  # fmt: skip


def run(*arguments: str) -> Any:
    """Runs a program to its end; raises when it is not done in time."""
    return forked_python.run("-m", *arguments, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run directories by strategy; each job is run when it is first asked for."""
    found: dict[str, Path] = {}

    def trained_by(kind: str) -> Path:
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp(kind) / "run"
            launch(found[kind], *JOBS[kind], "--", *CONFIG, timeout_s=DEADLINE_S)
        return found[kind]

    return trained_by


@pytest.mark.parametrize("kind", ["multiworker", "ps"])
def test_every_task_writes_and_one_program_proves(trained, kind):
    run_dir = trained(kind)
    done = run("tfdist.ledger", str(run_dir), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["proved"] is True
    tasks = {"multiworker": ["worker-0", "worker-1"], "ps": ["chief-0"]}[kind]
    assert told["attempts"][0]["tasks"] == tasks
    assert [p["seen"] for p in told["passes"]] == [1442, 558]


def test_a_step_of_two_workers_runs_again_in_one_process(trained):
    done = run("tfdist.replay", str(trained("multiworker")), "--step", "39", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["strategy"], found["replicas"], found["restored_step"]) == ("mirrored", 2, 30)
    assert found["checkpoint_difference"] < 1e-6
    assert [len(examples) for examples in found["examples"]] == [25, 25]


def test_steps_that_two_workers_did_are_listed(tmp_path):
    program = [str(PROGRAMS / "twice.py"), str(tmp_path / "ledger")]
    launch(tmp_path / "run", *JOBS["ps"], *program, timeout_s=DEADLINE_S)
    proof = run("tfdist.ledger", str(tmp_path / "ledger"))
    assert proof.returncode == 1, proof.stdout
    assert re.search(r"steps? 0\b.*: handed out 2 times", proof.stdout)
    assert "passes: 1 of 1 proved" in proof.stdout
