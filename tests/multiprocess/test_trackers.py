"""A tracker's run over a kill, in the chief alone, and with another number of workers."""

import pytest

from tests.multiprocess.trainings import EPOCH_STEPS, FLAGS, STEPS, TrainingJob

pytestmark = pytest.mark.slow


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
