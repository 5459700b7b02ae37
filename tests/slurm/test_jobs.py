"""Jobs on a real Slurm: started in every way, harmed in every way, and the same bits at the end."""

import math
import sys

import pytest

from tests.slurm.cluster import NODES
from tests.slurm.jobs import CONFIG, DEADLINE_S, PROGRAM, assert_same, summary_of
from tfdist.outputs.run_directory import Evaluations

ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
TRAIN = (PROGRAM, *CONFIG)
TWO_NODES = ("--workers", "2", "--nodes", "2", "--cpus", "1", "--run_dir", "run")


@pytest.mark.timeout(3 * DEADLINE_S)
def test_srun_and_sbatch_jobs_equal_a_launched_job(slurm, undisturbed):
    job = slurm.submit(*TWO_NODES, program=TRAIN)
    job.is_in_state("COMPLETED")
    assert job.fact("NodeList") == "127.0.0.[2-3]"
    assert_same(summary_of(slurm.folder / "run"), undisturbed)

    for nodes in (2, 1):  # a task on each of two nodes, and both on one
        step = ["srun", f"--nodes={nodes}", "--ntasks=2", sys.executable, *TRAIN]
        done = slurm.run(*step, TFDIST_RUN_DIR=f"srun-{nodes}", **ONE_THREAD)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_same(summary_of(slurm.folder / f"srun-{nodes}"), undisturbed)


@pytest.mark.timeout(3 * DEADLINE_S)
def test_exit_codes_of_tasks_decide_about_a_restart(slurm):
    program = slurm.folder / "program.py"
    program.write_text(
        "import os, sys; sys.exit(int(sys.argv[1 + int(os.environ['SLURM_PROCID'])]))"
    )
    flags = ("--workers", "2", "--cpus", "1", "--max_restarts", "1")
    # The codes of both tasks, and how the job ends: its state, its code, its restarts.
    ends = {
        ("0", "0"): ("COMPLETED", "0:0", "0"),
        ("2", "0"): ("FAILED", "2:0", "0"),
        ("1", "75"): ("FAILED", "75:0", "1"),
    }
    jobs = {codes: slurm.submit(*flags, program=(str(program), *codes)) for codes in ends}
    for codes, (state, code, restarts) in ends.items():
        jobs[codes].is_in_state(state)
        assert (jobs[codes].fact("ExitCode"), jobs[codes].fact("Restarts")) == (code, restarts)


@pytest.mark.timeout(6 * DEADLINE_S)
def test_a_stopped_job_resumes_like_an_undisturbed_one(slurm, undisturbed):
    slurm.hold.touch()
    job = slurm.submit(*TWO_NODES, "--time", "60m", "--grace_s", "75", program=TRAIN)
    job.said("held after")
    # The limit ends nothing: 75 s before it, or up to 30 earlier, Slurm sends the warning.
    minutes = math.ceil((job.ran_s() + 75) / 60)
    slurm.cluster.ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
    job.said("stopped by SIGUSR1")
    # What comes next is not to be warned of it too, however long it takes.
    slurm.cluster.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")

    job.said("held after", times=2)
    slurm.cluster.ask("scancel", "--signal=USR1", "--batch", job.id)
    job.said("stopped by SIGUSR1", times=2)

    job.said("held after", times=3)
    slurm.cluster.ask("scancel", "--signal=TERM", job.id)
    job.said("stopped by SIGTERM")

    job.said("held after", times=4)
    assert job.fact("Restarts") == "3"
    slurm.cluster.ask("scancel", job.id)
    job.is_in_state("CANCELLED")
    job.said("stopped by SIGTERM", times=2)
    summary = summary_of(slurm.folder / "run")
    assert summary["status"] == "stopped"
    assert not list(slurm.folder.glob("*.failures"))

    slurm.hold.unlink()
    again = slurm.submit(*TWO_NODES, program=TRAIN)
    again.is_in_state("COMPLETED")
    resumed = summary_of(slurm.folder / "run")
    assert resumed["resumed_from_step"] == summary["steps"]
    assert_same(resumed, undisturbed)


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize(
    ("kind", "tasks"), [("one", "killed"), ("both", "killed"), ("one", "alive"), ("both", "alive")]
)
def test_a_job_that_loses_a_node_resumes(kind, tasks, slurm, undisturbed):
    slurm.hold.touch()
    one = ("--workers", "2", "--cpus", "1", "--run_dir", "run")
    job = slurm.submit(*(one if kind == "one" else TWO_NODES), program=TRAIN)
    job.said("held after")
    lost = NODES[1] if kind == "both" else job.fact("NodeList")
    if tasks == "killed":
        slurm.cluster.kill_node(lost)
    slurm.cluster.ask("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")
    job.is_started_again()  # those that live are not to come to the end before
    slurm.hold.unlink()
    if kind == "both":  # nothing else has room for it
        job.is_in_state("PENDING")
        if tasks == "killed":
            slurm.cluster.start_node(lost)
        slurm.cluster.ask("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    job.is_in_state("COMPLETED")
    assert job.fact("Restarts") == "1"
    if kind == "one":
        assert job.fact("NodeList") == next(node for node in NODES if node != lost)
    summary = summary_of(slurm.folder / "run")
    assert summary["resumed_from_step"]
    assert_same(summary, undisturbed)


@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_ps_job_trains_on_one_and_two_nodes(slurm):
    ps = ("--strategy", "ps", "--ps", "1", "--cpus", "1")
    program = ("-m", "tfdist.train", *CONFIG)
    one = ("--workers", "1", "--evaluator")
    shapes = {"one": one, "two": ("--workers", "2", "--nodes", "2")}
    jobs = [slurm.submit(*ps, *shape, program=program, name=name) for name, shape in shapes.items()]
    for job in jobs:
        job.is_in_state("COMPLETED")
    asked = {"TFDIST_STRATEGY": "ps", "TFDIST_PS": "1", "TFDIST_RUN_DIR": "runs/srun"}
    step = ["srun", "--nodes=2", "--ntasks=4", sys.executable, *program]
    done = slurm.run(*step, **asked, **ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = slurm.folder / "runs"
    one, two = (runs / job.output.stem for job in jobs)
    for run_dir, workers in ((one, 1), (two, 2), (runs / "srun", 2)):
        summary = summary_of(run_dir)
        assert (summary["status"], summary["strategy"], summary["steps"]) == ("done", "ps", 64)
        assert (summary["workers"], summary["ps"]) == (workers, 1)
        assert sum(summary["worker_steps"].values()) == 64
    evaluated = Evaluations(one / "checkpoints").lines()
    assert evaluated[-1]["step"] == 64
