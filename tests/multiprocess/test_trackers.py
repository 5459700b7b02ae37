"""A tracker's run over a kill, in the chief alone, and with another number of workers."""

import json

import pytest

from tests.fake_trackers import steps_in_events
from tests.multiprocess.jobs import ROOT
from tests.multiprocess.trainings import EPOCH_STEPS, FLAGS, STEPS, TrainingJob, launch

pytestmark = pytest.mark.slow

PROGRAM = str(ROOT / "tests" / "multiprocess" / "programs" / "tracked.py")
DEADLINE_S = 240


def test_a_killed_job_goes_on_in_its_run_and_logs_each_epoch_once(tmp_path):
    out = tmp_path / "tracked.jsonl"
    flags = ("--strategy", "ps", "--workers", "2", "--max_restarts", "1")
    args = (PROGRAM, str(out), str(tmp_path / "backup"), "1")
    launch(tmp_path / "run", *flags, *args, timeout_s=DEADLINE_S)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["run"] for line in lines}) == 1
    assert {line["task"] for line in lines} == {"chief-0"}
    assert [line["epoch"] for line in lines if "epoch" in line] == [0, 1, 2, 3]
    assert (tmp_path / "tracked.killed").exists()
    assert steps_in_events(tmp_path / "board" / "train", "epoch_loss") == [0, 1, 2, 3]


def test_tfdist_train_goes_on_in_its_run_with_another_number_of_workers(tmp_path, monkeypatch):
    store = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    program = ("--", *FLAGS, "--config.tracker=mlflow")
    two = ("--strategy", "multiworker", "--workers", "2")
    job = TrainingJob(tmp_path / "run", *two, program=program)
    try:
        job.trained_beyond(130)
        job.kill("worker-0")
    finally:
        code = job.end()
    assert code != 0
    job = TrainingJob(tmp_path / "run", "--strategy", "single", program=program)
    assert job.end() == 0, job.logs()
    import mlflow  # takes seconds

    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["config.seed"] == "3"
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(steps) == list(range(STEPS // EPOCH_STEPS))
    told = job.directory.read_metrics()[-1]["loss"]
    assert run.data.metrics["loss"] == told
