"""Jobs with an evaluator: beside tfdist.train, and in a program that stops early."""

import json

import keras
import pytest

from tests.multiprocess.jobs import report
from tests.multiprocess.trainings import DEADLINE_S, FLAGS, PROGRAMS, STEPS, TrainingJob, summary_of
from tfdist.outputs.run_directory import Evaluations

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "evaluated.py"


SMALL = (
    *("--config.total_examples=1000", "--config.checkpoints=2", "--config.seed=3"),
    *("--config.model=dense", "--config.global_batch_size=50"),
)


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(
    ("strategy", "program", "steps"),
    [
        ((), FLAGS, STEPS),
        (("--strategy=pipeline", "--stages=2"), (*SMALL, "--config.strategy=pipeline"), 20),
    ],
    ids=["multiworker", "pipeline"],
)
def test_checkpoints_are_evaluated_beside_a_training_on_two_hosts(
    tmp_path, strategy, program, steps
):
    hosts = ("127.0.0.1", "127.0.0.2")
    where = (f"--hosts={','.join(hosts)}", "--on=local", "--evaluator")
    job = TrainingJob(tmp_path, *strategy, *where, program=("--", *program))
    assert job.end() == 0, job.logs()
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["lost"] == [], job.logs()
    ended = {task["task"]: (task["exit_code"], task["host"]) for task in attempt["tasks"]}
    workers = {f"worker-{rank}": (0, host) for rank, host in enumerate(hosts)}
    assert ended == {**workers, "evaluator-0": (0, hosts[0])}, job.logs()
    assert "exited; evaluator-0 exits too" in job.logs()
    files = Evaluations(tmp_path / "checkpoints")
    lines = files.lines()
    assert (lines[-1]["step"], lines[-1]["examples"]) == (steps, 50 * steps), job.logs()
    assert lines[-1]["val_accuracy"] > (0.95 if steps == STEPS else 0)
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert keras.models.load_model(files.best_file) is not None
    assert list((tmp_path / "tensorboard" / "evaluator").iterdir())
    assert not [line for line in job.directory.read_metrics() if "val_loss" in line]
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["steps"]) == ("done", steps)


@pytest.mark.timeout(2 * DEADLINE_S)
def test_an_evaluator_stops_a_ps_job_and_ends(tmp_path):
    job = TrainingJob(
        tmp_path / "run", "--strategy=ps", "--workers=2", "--evaluator",
        program=(str(PROGRAM), str(tmp_path)),
    )  # fmt: skip
    assert job.end() == 0, job.logs()
    assert job.logs().count("the training has ended in the chief\n") >= 1
    assert "the training has ended in another task" not in job.logs()
    (attempt,) = report(tmp_path / "run")["attempts"]
    assert (attempt["lost"], attempt["first_failure"]) == ([], None), job.logs()
    files = Evaluations(tmp_path / "backup")
    asked, lines = json.loads(files.stop_file.read_text()), files.lines()
    assert asked["best_step"] == lines[0]["step"]
    assert asked["step"] == lines[2]["step"]
    assert lines[-1]["step"] >= asked["step"]
