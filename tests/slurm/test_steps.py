"""Jobs in an allocation: agents started by srun, programs in a step, and what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.multiprocess.jobs import children
from tests.processes import agents
from tests.slurm.cluster import NODES
from tests.slurm.jobs import CONFIG, DEADLINE_S, PROGRAM, ROOT, assert_same, launched, summary_of
from tfdist.outputs.sweep_journal import fold, read

TELL = "import os; os.write(1, b'told %s\\n' % os.environ['TF_CONFIG'].encode())"
FAIL = "import json, os, sys; sys.exit(7 * json.loads(os.environ['TF_CONFIG'])['task']['index'])"
LAUNCH = (sys.executable, "-m", "tfdist.launch")
STEP = ("srun", "--nodes=2", "--ntasks-per-node=1", *LAUNCH)


@pytest.fixture
def allocation(slurm):
    """Returns the variables of an allocation of two nodes, which ends with the test."""
    made = slurm.run("salloc", "--nodes=2", "--no-shell", "--job-name=agents")
    job_id = re.search(r"Granted job allocation (\d+)", made.stderr)
    assert job_id, made.stderr
    nodes = slurm.cluster.ask("squeue", "--noheader", "--format=%N", f"--jobs={job_id[1]}")
    listed = {"SLURM_JOB_NODELIST": nodes.stdout.strip(), "SLURMD_NODENAME": NODES[0]}
    yield {"SLURM_JOB_ID": job_id[1], "SLURM_JOBID": job_id[1], **listed}
    slurm.cluster.ask("scancel", job_id[1])


def test_one_launcher_runs_a_job_on_all_nodes(slurm, allocation):
    program = slurm.folder / "program.py"
    program.write_text(TELL)
    command = (*LAUNCH, "--on", "slurm")
    done = slurm.run(*command, "--workers", "3", "--run_dir", "run", str(program), **allocation)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in re.findall("told (.*)", done.stdout)]
    assert sorted(config["task"]["index"] for config in told) == [0, 1, 2]
    report = json.loads((slurm.folder / "run/report.json").read_text())
    hosts = [task["host"] for task in report["attempts"][0]["tasks"]]
    assert hosts == [NODES[0], NODES[0], NODES[1]]

    program.write_text(FAIL)
    done = slurm.run(*command, "--run_dir", "failed", str(program), **allocation)
    assert done.returncode == 7, done.stdout + done.stderr
    report = json.loads((slurm.folder / "failed/report.json").read_text())
    failure = report["attempts"][0]["first_failure"]
    assert (failure["task"], failure["host"]) == ("worker-1", NODES[1])


def test_trials_of_a_sweep_run_on_all_nodes(slurm, allocation):
    space = ("--config", str(ROOT / "configs/digits_sweep.py"), "--config.total_examples=960")
    flags = ("--config.checkpoints=3", "--max_trials", "3", "--seed", "2", "--sweep_dir", "sweep")
    tune = (sys.executable, "-m", "tfdist.tune", "--on", "slurm")
    done = slurm.run(*tune, *space, *flags, **allocation)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = fold(read(slurm.folder / "sweep" / "journal.jsonl")).trials.values()
    assert [trial.status for trial in trials] == ["completed"] * 3
    logs = [(slurm.folder / "sweep/trials" / t.run / "launch.log").read_text() for t in trials]
    assert any(f" {NODES[1]} at " in log for log in logs), logs


@pytest.mark.parametrize("killed", ["agent", "srun"])
def test_a_killed_agent_is_named_and_changes_no_weights(slurm, allocation, killed):
    expected = launched(slurm.folder / "expected", "--strategy", "multiworker", "--workers", "2")
    command = (*LAUNCH, "--on", "slurm", "--threads_per_task", "1", "--max_restarts", "1")
    run_dir = slurm.folder / "run"
    with open(slurm.folder / "launch.out", "wb") as out:
        process = subprocess.Popen(
            [*command, "--run_dir", str(run_dir), PROGRAM, *CONFIG],
            env=slurm.environ(**allocation),
            cwd=slurm.folder,
            stdout=out,
            stderr=out,
        )
    said = slurm.folder / "launch.out"
    slurm.cluster.until(lambda: "epoch 1 begins" in said.read_text(), "a step", within_s=DEADLINE_S)
    if killed == "agent":
        (pid,) = agents(str(slurm.cluster.folder))
    else:
        (pid,) = (p for p, line in children(process.pid).items() if line.startswith("srun"))
    os.kill(pid, signal.SIGKILL)
    assert process.wait(DEADLINE_S) == 0, said.read_text()
    assert f"worker-1 on {NODES[1]} failed first: lost host {NODES[1]}" in said.read_text()
    assert_same(summary_of(run_dir), expected)


def test_several_launchers_in_a_step_need_separate_jobs(slurm):
    program = slurm.folder / "program.py"
    program.write_text(TELL)
    done = slurm.run(*STEP, str(program))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--on slurm" in done.stderr
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


def test_agents_check_each_node_of_an_allocation(slurm, allocation):
    done = slurm.run(sys.executable, "-m", "tfdist.check", "--on", "slurm", **allocation)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # a test machine may lack memory
    assert re.search("^(no findings|0 errors, . warnings)$", done.stdout, re.MULTILINE)
    missing = slurm.run(
        *(sys.executable, "-m", "tfdist.check", "--on", "slurm"),
        **{**allocation, "SLURM_JOB_NODELIST": f"{NODES[0]},no-such-node"},
    )
    assert missing.returncode == 2
    assert "error    no-such-node: host: " in missing.stdout, missing.stdout + missing.stderr


def test_an_error_of_slurm_is_one_line(slurm):
    submit = [sys.executable, "-m", "tfdist.submit", "--to", "slurm"]
    no_partition = slurm.run(*submit, "--partition", "nope", PROGRAM)
    assert_one_line(no_partition, "invalid partition specified: nope")
    assert not slurm.cluster.ask("squeue", "--noheader").stdout


def assert_one_line(done, words):
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert words in done.stderr
