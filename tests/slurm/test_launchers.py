"""One launcher on each node of a step: together they run one job."""

import json
import re
import sys

from tests.slurm.cluster import NODES

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
