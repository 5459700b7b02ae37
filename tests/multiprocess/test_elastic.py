"""Elastic jobs: the same bits with any number of workers, and after workers are lost."""

import json
import re

import pytest

from tests.multiprocess.trainings import DEADLINE_S, PROGRAMS, ended

FLAGS = ("--strategy=multiworker", "--elastic", "--threads_per_task=1")


def digests_of(run_dir, *flags, **env):
    """Return the digests that the workers print, the digest of the files, and the job's output."""
    words = (*FLAGS, *flags, str(PROGRAMS / "elastic.py"))
    env = {name: text if isinstance(text, str) else json.dumps(text) for name, text in env.items()}
    code, output = ended(run_dir, *words, timeout_s=DEADLINE_S, **env)
    assert code == 0, output[-20000:]
    (files,) = re.findall(r"FILES (\w+)", output)
    return dict(re.findall(r"\[(worker-\d)\] DIGEST (\w+)", output)), files, output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found, files, _ = digests_of(tmp_path_factory.mktemp("one") / "run", "--workers=1")
    return found["worker-0"], files


@pytest.mark.timeout(2 * DEADLINE_S)
def test_bits_do_not_depend_on_the_number_of_workers(tmp_path, undisturbed):
    """Of two; of more, and of changing numbers, in the tests below."""
    found, files, output = digests_of(tmp_path / "run", "--workers=2")
    assert found == {f"worker-{i}": undisturbed[0] for i in range(2)}, output
    assert files == undisturbed[1]


@pytest.mark.timeout(2 * DEADLINE_S)
def test_survivors_continue_and_a_restarted_worker_joins(tmp_path, undisturbed):
    found, files, output = digests_of(
        tmp_path / "run",
        *("--workers=3", "--max_restarts=1"),
        FAULTS={"worker-1": ["on_epoch_begin", 1], "worker-2": ["on_epoch_begin", 4]},
        JOINED={"3": 3},
    )
    digest = undisturbed[0]
    assert found == {"worker-0": digest, "worker-1": digest}, output
    assert files == undisturbed[1]
    assert "restarting only this task" in output
    assert "finished without worker-2" in output
    assert "as attempt 2" not in output


@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_cut_run_resumes_after_a_lost_chief(tmp_path, undisturbed):
    words = (*FLAGS, "--workers=3", "--max_restarts=1", str(PROGRAMS / "elastic.py"))
    env = {"FAULTS": json.dumps({"worker-0": ["save", 2]}), "CUT": "2", "BACKUP": "1"}
    code, output = ended(tmp_path / "run", *words, timeout_s=DEADLINE_S, **env)
    assert code == 0, output[-20000:]
    assert "max_time: the run stops after" in output
    assert "killed by SIGKILL" in output
    found, _, output = digests_of(tmp_path / "run", "--workers=3", BACKUP="1")
    assert set(found.values()) == {undisturbed[0]}, output


LOSSES = {
    "between epochs, in a validation": (
        ("--workers=3",),
        {"worker-0": ["on_epoch_end", 1], "worker-1": ["on_test_begin", 3]},
        {},
    ),
    "in a save, in the last write": (
        ("--workers=3",),
        {"worker-0": ["save", 2], "worker-1": ["write", 5]},
        {},
    ),
    "in the last write, two are left": (("--workers=3",), {"worker-0": ["write", 5]}, {}),
    "the successor has joined and admits another": (
        ("--workers=2", "--max_restarts=2"),
        {"worker-1": ["on_epoch_begin", 1], "worker-0": ["on_epoch_begin", 4]},
        {"3": 2, "5": 2},
    ),
}
"""Flags of a job, where its workers die, and the workers for which its chief waits."""


@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize("case", LOSSES)
def test_another_worker_takes_over_from_a_lost_chief(tmp_path, undisturbed, case):
    flags, faults, joined = LOSSES[case]
    found, files, output = digests_of(
        tmp_path / "run", *flags, FAULTS=faults, JOINED=joined, BACKUP="1"
    )
    left = {"worker-0", "worker-1"} if joined else {f"worker-{i}" for i in range(3)} - {*faults}
    assert found == dict.fromkeys(left, undisturbed[0]), output
    assert files == undisturbed[1], output
    takeovers = 1 if joined else len(faults)
    assert len(re.findall("takes over at step", output)) == takeovers
    assert "as attempt 2" not in output


@pytest.mark.timeout(2 * DEADLINE_S)
def test_two_hosts_compute_the_same_bits_after_losses(tmp_path, undisturbed):
    found, files, output = digests_of(
        tmp_path / "run",
        *("--hosts=127.0.0.1:1,127.0.0.2:2", "--on=local", "--max_restarts=1"),
        FAULTS={"worker-1": ["on_epoch_begin", 1], "worker-0": ["on_epoch_begin", 4]},
        JOINED={"3": 3},
    )
    assert found == {"worker-1": undisturbed[0], "worker-2": undisturbed[0]}, output
    assert files == undisturbed[1], output
    assert "worker-1 failed" in output
    assert "takes over at step" in output
    assert "as attempt 2" not in output


@pytest.mark.timeout(2 * DEADLINE_S)
def test_resizing_a_job_adds_and_removes_workers(tmp_path, undisturbed):
    found, files, output = digests_of(
        tmp_path / "run", "--workers=3", RESIZES={"1": 1, "2": 4}, JOINED={"3": 2}
    )
    assert set(found.values()) == {undisturbed[0]}, output
    assert len(found) > 1, output
    assert files == undisturbed[1], output
    assert "restarting" not in output
    assert "failed" not in output


@pytest.mark.timeout(2 * DEADLINE_S)
def test_losing_the_chief_before_the_first_step_restarts(tmp_path, undisturbed):
    faults = {"worker-0": ["on_epoch_begin", 0]}
    found, files, output = digests_of(
        tmp_path / "run", "--workers=2", "--max_restarts=1", FAULTS=faults, BACKUP="1"
    )
    assert found == {"worker-0": undisturbed[0], "worker-1": undisturbed[0]}, output
    assert files == undisturbed[1], output
    assert "as attempt 2" in output
