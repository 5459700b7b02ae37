"""What is wrong is one line of each task and exit code 2; what Slurm refuses is not submitted."""

import sys

import pytest

from tests.slurm.jobs import PROGRAM


# One of ours and one of Slurm's; tests/unit/test_cluster_refusals.py has all.
@pytest.mark.parametrize(
    ("variable", "value"), [("TFDIST_PS", "5"), ("SLURM_STEP_TASKS_PER_NODE", "2")]
)
def test_a_contradiction_is_a_line_of_each_task_and_exit_code_2(variable, value, slurm):
    command = ["env", f"{variable}={value}", sys.executable, "-m"]
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", *command, "tfdist.train")
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(lines) == 2, done.stderr
    assert all(line.startswith(f"tfdist.train: {variable}: ") for line in lines), done.stderr


def test_what_slurm_refuses_is_one_line_and_exit_code_2(slurm):
    submit = [sys.executable, "-m", "tfdist.submit", "--to", "slurm"]
    no_partition = slurm.run(*submit, "--partition", "nope", PROGRAM)
    assert_one_line(no_partition, "invalid partition specified: nope")
    assert not slurm.cluster.ask("squeue", "--noheader").stdout


def assert_one_line(done, words):
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert words in done.stderr
