"""Whole ps jobs under the launcher: workers, a ps and the chief die, and somebody asks to stop."""

import re
import signal
from pathlib import Path

import pytest

from tests.multiprocess.jobs import report
from tests.multiprocess.trainings import (
    DEADLINE_S,
    PROGRAMS,
    STEPS,
    TrainingJob,
    launch,
    summary_of,
)
from tfdist.launch.machine import proc_state


def ps_job(run_dir: Path, *flags: str, workers: int = 2) -> TrainingJob:
    return TrainingJob(run_dir, "--strategy=ps", f"--workers={workers}", "--ps=1", *flags)


@pytest.mark.timeout(2 * DEADLINE_S)
def test_one_of_three_workers_finishes_after_two_die(tmp_path):
    job = ps_job(tmp_path, workers=3)
    for worker in ("worker-0", "worker-2"):
        job.trained_beyond(max(job.saved_steps(), default=0))
        job.kill(worker)
        job.until(lambda w=worker: f"{w} failed: " in "".join(job.said))
    assert job.end() == 0, job.logs()
    (attempt,) = report(tmp_path)["attempts"]
    assert [lost["task"] for lost in attempt["lost"]] == ["worker-0", "worker-2"], job.logs()
    cause = "killed by SIGKILL, not by the launcher"
    assert f"worker-0 failed: {cause}; continuing with worker-1, worker-2\n" in job.logs()
    assert "finished without worker-0, worker-2\n" in job.logs()
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["steps"]) == ("done", STEPS)
    assert sum(summary["worker_steps"].values()) == STEPS
    assert max(summary["worker_steps"], key=summary["worker_steps"].get) == "worker-1"
    assert sum(summary["staleness"].values()) == STEPS
    repeated = summary["repeated_ranges"]
    assert len(repeated) <= 2
    most = sum((last - first) * (times - 1) for first, last, times in repeated)
    assert 0 <= summary["steps_applied_twice"] <= most


@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_ps_job_resumes_after_stops_and_lost_tasks(tmp_path):
    job = ps_job(tmp_path, "--max_restarts=2")
    job.trained_beyond(0)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143, job.logs()
    assert "Traceback" not in job.logs(), job.logs()
    (said,) = job.chiefs_words()
    stopped = summary_of(tmp_path)
    assert stopped["status"] == "stopped"
    assert said == f"SIGTERM at step {stopped['steps']}, state saved", job.logs()
    saved = stopped["steps"]
    assert 0 < saved < STEPS

    job = ps_job(tmp_path, "--max_restarts=2")
    for restart, victim in ((1, "ps-0"), (2, "chief-0")):
        # By this attempt: the one before may have saved since, and its tasks are gone.
        job.trained_beyond(max(job.saved_steps()))
        saved = max(job.saved_steps())
        job.kill(victim)
        job.until(lambda n=restart: f"(restart {n} of 2 within" in "".join(job.said))
    assert job.end() == 0, job.logs()
    first, *attempts = report(tmp_path)["attempts"]
    assert first["first_failure"] is None
    failures = [a["first_failure"] and a["first_failure"]["task"] for a in attempts]
    assert failures == ["ps-0", "chief-0", None], job.logs()
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["steps"]) == ("done", STEPS)
    assert summary["resumed_from_step"] >= saved > stopped["steps"], job.logs()
    assert sum(summary["worker_steps"].values()) == STEPS - summary["resumed_from_step"]
    pids = {task["pid"] for attempt in attempts for task in attempt["tasks"]}
    assert len(pids) == 3 * 4
    assert {proc_state(pid) for pid in pids} <= {None, "Z"}, "outlives the job"


@pytest.mark.slow
def test_the_unit_of_an_idle_worker_moves_to_another(tmp_path):
    run_dir = tmp_path / "run"
    command = ("--strategy=ps", "--workers=2", "--ps=1", "--hang_timeout_s=6")
    said = launch(run_dir, *command, str(PROGRAMS / "owing.py"), timeout_s=DEADLINE_S)
    (failure,) = report(run_dir)["attempts"][-1]["lost"]
    assert failure["task"] == "worker-1"
    assert re.match(r"hangs: its work unit is unfinished after \d+ s", failure["cause"])
    assert "units done: 100" in said
