"""tfdist.train under the launcher: what the demo does, and what a second start finds."""

import os

import pytest

from tests.multiprocess.trainings import ended, launch
from tfdist.outputs.run_directory import RunDirectory

DEADLINE_S = 240
JOBS = {
    "ps": ["--strategy", "ps", "--workers", "2", "--ps", "1"],
    "multiworker": ["--strategy", "multiworker", "--workers", "2"],
}


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.timeout(3 * DEADLINE_S)
def test_digits_are_learned_and_a_changed_restart_is_refused(kind, tmp_path):
    run_dir = tmp_path / "run"
    job = (*JOBS[kind], "--")
    flags = ("--config.total_examples=14400", "--config.checkpoints=5", "--config.seed=1")
    launch(run_dir, *job, *flags, timeout_s=DEADLINE_S)
    summary = RunDirectory(run_dir).read_summary()
    assert summary is not None
    assert (summary["status"], summary["strategy"]) == ("done", kind)
    assert (summary["workers"], summary["ps"]) == (2, 1 if kind == "ps" else 0)
    assert (summary["steps"], summary["examples"]) == (225, 14400)
    if kind == "ps":
        assert sum(summary["worker_steps"].values()) == 225
        lines = RunDirectory(run_dir).read_metrics()
        assert [sum(line["worker_steps"].values()) for line in lines] == [45, 90, 135, 180, 225]
        assert all(line["learning_rate"] == pytest.approx(1e-3) for line in lines)
        assert summary["ps_bytes"]["ps-0"] > 0
    assert summary["metrics"]["val_accuracy"] > 0.95
    names = {"config.json", "metrics.jsonl", "report.json", "checkpoints", "logs"}
    assert names <= set(os.listdir(run_dir))

    if kind == "multiworker":
        again = launch(run_dir, *job, *flags, timeout_s=DEADLINE_S)
        assert "is finished (pass --overwrite to run it again)" in again
        assert RunDirectory(run_dir).read_summary() == summary

        other = (*job, *flags, "--config.optimizer=sgd")
        code, refused = ended(run_dir, *other, timeout_s=DEADLINE_S)
        assert code == 2, refused
        assert "another configuration: optimizer='sgd' (there: 'adam')" in refused
