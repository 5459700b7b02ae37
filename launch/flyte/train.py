"""A Flyte workflow whose task runs a tfdist job on interruptible instances.

pyflyte run launch/flyte/train.py digits --run_dir runs/digits
pyflyte run --remote launch/flyte/train.py digits --run_dir /runs/digits
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

from flytekit import Resources, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException


@task(
    container_image="registry.example.org/tfdist:1.0",
    pod_template_name="tfdist-runs",  # a PodTemplate of the cluster that mounts a claim at /runs
    interruptible=True,
    retries=3,
    requests=Resources(cpu="4", mem="4Gi"),
)
def train(run_dir: str, workers: int, total_examples: int) -> float:
    """Train, or resume the run in `run_dir`, and return the last validation accuracy."""
    launcher = ["-m", "tfdist.launch", "--strategy=multiworker", f"--workers={workers}"]
    program = ["-m", "tfdist.train", "--config=configs/digits_multiworker.py"]
    flags = [f"--config.total_examples={total_examples}", "--config.seed=1"]
    job = subprocess.Popen([sys.executable, *launcher, f"--run_dir={run_dir}", *program, *flags])
    # Kubernetes stops a pod by SIGTERM: let the job save its state.
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    code = job.wait()
    if code == 2:
        raise ValueError("the job has a mistake, which its last line names")
    if code:
        raise FlyteRecoverableException(f"the job exited with code {code}")
    return float(json.loads(Path(run_dir, "summary.json").read_text())["metrics"]["val_accuracy"])


@workflow
def digits(run_dir: str = "/runs/digits", workers: int = 2, total_examples: int = 28_800) -> float:
    return train(run_dir=run_dir, workers=workers, total_examples=total_examples)
