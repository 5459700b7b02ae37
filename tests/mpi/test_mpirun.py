"""Two ranks of a real mpirun are a job by their environment alone; `make test-mpi`."""

import os
import subprocess
import sys

from tfdist.errors import EXIT_OK, EXIT_USAGE
from tfdist.outputs.run_directory import RunDirectory

DEADLINE_S = 240
# Open MPI wants to be told so, where root or a machine with one core starts it.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
LAUNCH = (sys.executable, "-m", "tfdist.launch", "--workers=2", "--threads_per_task=1")
DIGITS = ("--config.total_examples=3200", "--config.checkpoints=2", "--config.seed=1")
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | variables,
        check=False,
    )


def test_two_ranks_train_like_two_launcher_tasks(tmp_path):
    ranks, tasks = tmp_path / "mpirun", tmp_path / "launch"
    program = [sys.executable, "-m", "tfdist.train", f"--config.run_dir={ranks}", *DIGITS]
    done = run([*MPIRUN, *program], **ONE_THREAD)
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    made = RunDirectory(ranks).read_summary()
    assert made is not None
    assert (made["status"], made["strategy"], made["workers"]) == ("done", "multiworker", 2)

    done = run([*LAUNCH, f"--run_dir={tasks}", "--", *DIGITS])
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    same = RunDirectory(tasks).read_summary()
    assert same is not None
    assert made["weights_sha256"] == same["weights_sha256"]


def test_a_launcher_in_each_rank_is_refused():
    done = run([*MPIRUN, *LAUNCH, "-m", "this"])
    assert done.returncode == EXIT_USAGE, done.stdout + done.stderr
    assert "mpi: this launcher is one of 2 processes" in done.stderr
