"""tfdist inside Ray Train: `make test-ray`, with the real Ray."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

# Read as Ray is imported: without clusters it, and so TF_CONFIG, keeps to loopback.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

from tests.ray.loop import train_loop

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 250
ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",  # bits are those of a number of threads
}


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this machine."""
    ray.init(
        num_cpus=4,
        object_store_memory=100 << 20,
        include_dashboard=False,
        runtime_env={"env_vars": ENVIRON},
    )
    yield
    ray.shutdown()


def trained(folder, *, kill):
    """Trains with Ray's trainer and two workers; returns what the chief saw."""
    folder.mkdir()
    result = TensorflowTrainer(
        train_loop,
        train_loop_config={"folder": str(folder), "in_ray": True, "kill": kill},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            name="run",
            failure_config=FailureConfig(max_failures=1 if kill else 0),
        ),
    ).fit()
    assert result.error is None
    return json.loads((folder / "seen.json").read_text())


def launched(folder):
    """Trains with the launcher and two workers; returns what the chief saw."""
    folder.mkdir()
    command = [sys.executable, "-m", "tfdist.launch", "--run_dir", str(folder / "run")]
    command += ["--strategy", "multiworker", "--workers", "2"]
    done = subprocess.run(
        [*command, str(pathlib.Path(__file__).with_name("loop.py")), str(folder)],
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "seen.json").read_text())


def test_ray_47464_the_trainer_example_survives_a_killed_worker(cluster, tmp_path):
    """The example of Ray's trainer failed in `fit`; it trains, to the bits of the launcher's job.

    https://github.com/ray-project/ray/issues/47464. One of its two workers is killed, Ray starts
    the group again, and the run goes on at its step.
    """
    whole, killed = trained(tmp_path / "whole", kill=False), trained(tmp_path / "cut", kill=True)
    assert (tmp_path / "cut" / "killed").exists()
    assert killed == whole == launched(tmp_path / "launched")
