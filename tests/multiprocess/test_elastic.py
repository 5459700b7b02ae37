"""Elastic jobs: the same bits with any number of workers, and after workers are lost."""

import json
import re

import pytest

from tests.multiprocess.trainings import DEADLINE_S, PROGRAMS, ended

FLAGS = ("--strategy=multiworker", "--elastic", "--threads_per_task=1")


def digests_of(run_dir, *flags, **env):
    """Return the digests that the workers print, and the output of the job."""
    words = (*FLAGS, *flags, str(PROGRAMS / "elastic.py"))
    code, output = ended(run_dir, *words, timeout_s=DEADLINE_S, **env)
    assert code == 0, output[-20000:]
    return dict(re.findall(r"\[(worker-\d)\] DIGEST (\w+)", output)), output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found, _ = digests_of(tmp_path_factory.mktemp("one") / "run", "--workers=1")
    return found["worker-0"]


@pytest.mark.timeout(4 * DEADLINE_S)
def test_the_bits_do_not_depend_on_the_number_of_workers(tmp_path, undisturbed):
    for workers in (2, 3):
        found, output = digests_of(tmp_path / f"{workers}", f"--workers={workers}")
        assert found == {f"worker-{i}": undisturbed for i in range(workers)}, output


@pytest.mark.timeout(2 * DEADLINE_S)
def test_survivors_go_on_and_a_restarted_worker_joins_with_the_same_bits(tmp_path, undisturbed):
    faults = json.dumps({"worker-1": 1, "worker-2": 4})
    found, output = digests_of(
        tmp_path / "run", "--workers=3", "--max_restarts=1", FAULTS=faults, WAIT_EPOCH="3"
    )
    assert found == {"worker-0": undisturbed, "worker-1": undisturbed}, output
    assert "restarting only this task" in output
    assert "finished without worker-2" in output
    assert "as attempt 2" not in output


@pytest.mark.timeout(2 * DEADLINE_S)
def test_the_loss_of_worker_0_restarts_the_job_with_the_same_bits(tmp_path, undisturbed):
    faults = json.dumps({"worker-0": 2})
    found, output = digests_of(
        tmp_path / "run", "--workers=2", "--max_restarts=1", FAULTS=faults, BACKUP="1"
    )
    assert found == {"worker-0": undisturbed, "worker-1": undisturbed}, output
    assert "as attempt 2" in output
