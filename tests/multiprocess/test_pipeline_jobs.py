"""Whole pipeline jobs through the launcher: what comes out is what one process makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.multiprocess.test_training import PROGRAMS
from tests.multiprocess.warm import forked
from tfdist.errors import EXIT_OK, EXIT_USAGE

PROGRAM = PROGRAMS / "staged.py"
DEADLINE_S = 250


def run(out, does, *, stages, flags=()):
    """Run a job to its end; return its exit code, what it said, and what each task saw."""
    command = [sys.executable, "-m", "tfdist.launch", "--run_dir", str(out / f"{does}-{stages}")]
    with forked() as (fork_flags, fds):
        job = subprocess.run(
            [
                *(*command, "--strategy=pipeline", f"--stages={stages}", *flags, *fork_flags),
                *(str(PROGRAM), str(out), does),
            ],
            env={**os.environ, "STAGES": str(stages)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=fds,
            timeout=DEADLINE_S,
            check=False,
        )
    files = [out / f"{does}-{stages}-worker-{i}.json" for i in range(stages)]
    seen = [json.loads(file.read_text()) for file in files if file.exists()]
    return job.returncode, job.stdout, seen


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The same micro-batches, all stages in one process."""
    code, said, (seen,) = run(tmp_path_factory.mktemp("one"), "fits", stages=1)
    assert code == EXIT_OK, said
    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on two stages that saves."""
    code, said, tasks = run(tmp_path_factory.mktemp("saves"), "saves", stages=2)
    assert code == EXIT_OK, said
    return tasks


def assert_same(seen, expected):
    assert seen["history"].keys() == expected["history"].keys()
    for what in ("history", "evaluated", "predicted", "weights", "slots"):
        found, wanted = seen[what], expected[what]
        if isinstance(found, dict):
            found, wanted = list(found.values()), [wanted[key] for key in found]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=what)


@pytest.mark.parametrize(("does", "stages"), [("fits", 2), ("again", 2), ("fits", 3), ("auto", 2)])
def test_stages_end_with_what_one_process_ends_with(one_process, tmp_path, does, stages):
    code, said, tasks = run(tmp_path, does, stages=stages)
    assert code == EXIT_OK, said
    assert len(tasks) == stages
    for seen in tasks:
        assert_same(seen, one_process)


def test_a_run_saved_on_two_stages_ends_on_three(tmp_path):
    code, said, expected = run(tmp_path, "saves", stages=2)
    assert code == EXIT_OK, said
    code, said, tasks = run(tmp_path, "saves", stages=3)  # at its end already: restores it
    assert code == EXIT_OK, said
    for seen in tasks:
        assert seen["weights"] == expected[0]["weights"]
        assert seen["slots"] == expected[0]["slots"]


@pytest.mark.parametrize("task", [0, 1])
def test_a_run_whose_stage_was_killed_ends_with_the_bits_of_one_that_was_not(
    undisturbed, tmp_path, task
):
    code, said, tasks = run(tmp_path, f"kills-{task}", stages=2, flags=["--max_restarts=1"])
    assert code == EXIT_OK, said
    assert f"worker-{task} failed first: killed by SIGKILL" in said
    assert tasks == undisturbed


def test_a_stage_that_dies_is_named(tmp_path):
    code, said, _ = run(tmp_path, "dies", stages=2)
    assert code != EXIT_OK
    assert "worker-1" in said
    assert code != EXIT_USAGE, said
