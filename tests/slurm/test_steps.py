"""Programs in a step of srun: launchers that find each other, checks, and mistakes."""

import json
import re
import sys

import pytest

from tests.slurm.cluster import NODES
from tests.slurm.jobs import PROGRAM

TELL = "import os; os.write(1, b'told %s\\n' % os.environ['TF_CONFIG'].encode())"
FAIL = "import json, os, sys; sys.exit(7 * json.loads(os.environ['TF_CONFIG'])['task']['index'])"
STEP = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "tfdist.launch")


def test_launchers_of_a_step_find_each_other_without_a_flag(slurm):
    program = slurm.folder / "program.py"
    program.write_text(TELL)
    done = slurm.run(*STEP, "--workers", "3", "--run_dir", "run", str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in re.findall("told (.*)", done.stdout)]
    assert sorted(config["task"]["index"] for config in told) == [0, 1, 2]
    report = json.loads((slurm.folder / "run/report.json").read_text())
    hosts = [task["host"] for task in report["attempts"][0]["tasks"]]
    assert hosts == [NODES[0], NODES[0], NODES[1]]

    program.write_text(FAIL)
    done = slurm.run(*STEP, "--run_dir", "failed", str(program))
    assert done.returncode == 7, done.stdout + done.stderr
    report = json.loads((slurm.folder / "failed/report.json").read_text())
    failure = report["attempts"][0]["first_failure"]
    assert (failure["task"], failure["host"]) == ("worker-1", NODES[1])


def test_launchers_that_are_to_know_nothing_of_each_other_do_not(slurm):
    program = slurm.folder / "program.py"
    program.write_text(TELL)
    done = slurm.run(*STEP, str(program), TFDIST_CLUSTER="none")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in re.findall("told (.*)", done.stdout)]
    assert [config["cluster"] for config in told] == [{}, {}]


def test_each_node_of_a_step_is_checked(slurm):
    check = (sys.executable, "-m", "tfdist.check", "--run_dir=.")
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0", *check)
    lines = done.stdout.splitlines()
    assert len([line for line in lines if re.match("no findings|0 errors", line)]) == 2, lines
    assert not list(slurm.folder.glob(".tfdist*"))


# One of ours and one of Slurm's; tests/unit/test_cluster_environment.py has all.
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
