"""Both sides of the pages for those who come from elsewhere run: `make test-migrations`.

The other side's blocks are marked `py`, as they need what is not installed with tfdist. They run
here with the real libraries, in their own launcher where they have one; the `python` blocks beside
them, which run in one process in tests/integration/test_docs_python.py, run as a job of the
launcher's.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_docs_python import BEFORE, DATA, FLAT, programs_of
from tests.unit.test_docs import ROOT, python_blocks

DEADLINE_S = 280
ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without clusters Ray keeps to loopback
    "RAY_USAGE_STATS_ENABLED": "0",
}
NUMPY = """
import numpy as np
rng = np.random.default_rng(1)
x, y = rng.random((512, 64), "float32"), np.arange(512) % 10
"""
LOADER = f"""{NUMPY}
import torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.as_tensor(x), torch.as_tensor(y)), batch_size=64)
"""
KERAS_2 = "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'"
IN_RAY = f"""{NUMPY}
import os, ray
env_vars = {ENVIRON!r}
env_vars |= {{name: value for name, value in os.environ.items() if name == "TF_USE_LEGACY_KERAS"}}
ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False,
         runtime_env={{"env_vars": env_vars}})
"""
MAKE_MODEL = """
def make_model():
    from tensorflow import keras

    layers = keras.layers
    return keras.Sequential(
        [keras.Input((64,)), layers.Flatten(), layers.Dense(10, activation="softmax")]
    )
"""
LAUNCH = ("-m", "tfdist.launch", "--start", "exec", "--run_dir", "run")
PS = ("--strategy", "ps", "--workers", "2", "--ps", "1")
MULTIWORKER = ("--strategy", "multiworker", "--workers", "2")
JOB = {"docs/migrate/tf_keras_ps.md": PS}
"""How a page's own side is started, where that is not with two workers."""
STEPS = {
    "docs/migrate/horovod.md": 5 * 2,
    "docs/migrate/model_fit.md": 5 * 8,
    "docs/migrate/ray_train.md": 5 * 2,
    "docs/migrate/tf_keras_ps.md": 5 * 8,
    "docs/migrate/torch.md": 5 * 2,
}
"""The steps of a page's own side: epochs, and global batches of the 512 examples."""


def run(*argv: str, folder: Path, exit_code: int = 0) -> str:
    """Run a Python as a process group until the deadline; return what it has printed."""
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=folder,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"no end after {DEADLINE_S} s:\n{process.communicate()[0]}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == exit_code, output
    return output


def write(
    folder: Path, page: str, number: int, before: str, after: str = "", **changes: str
) -> str:
    """Write the other side's block of a page with what it takes for granted; return the script."""
    code = [code for _, code in python_blocks(ROOT / page, "py")][number]
    for old, new in changes.values():
        assert old in code
        code = code.replace(old, new)
    script = folder / "theirs.py"
    script.write_text("\n".join([before, code, after]))
    return str(script)


def test_parameter_servers_of_tf_keras(tmp_path):
    after = "assert int(model.optimizer.iterations) == 40"
    script = write(tmp_path, "docs/migrate/tf_keras_ps.md", 0, NUMPY, after)
    run(*LAUNCH, *PS, script, folder=tmp_path)


def test_a_loop_of_horovod(tmp_path):
    before = KERAS_2 + NUMPY + MAKE_MODEL
    script = write(tmp_path, "docs/migrate/horovod.md", 0, before)
    horovodrun = ("-m", "horovod.runner.launch", "-np", "2", "--gloo")
    run(*horovodrun, sys.executable, script, folder=tmp_path)
    assert (tmp_path / "checkpoint-5.h5").exists()


def test_a_loop_under_torchrun_resumes_from_its_checkpoint(tmp_path):
    page, torchrun = "docs/migrate/torch.md", ("-m", "torch.distributed.run", "--standalone")
    after = "print('epochs from', first)"
    for epochs, first in ((2, 0), (5, 2)):
        fewer = ("range(first, 5)", f"range(first, {epochs})")
        script = write(tmp_path, page, 0, NUMPY, after, fewer=fewer)
        output = run(*torchrun, "--nproc_per_node", "2", script, folder=tmp_path)
        assert output.count(f"epochs from {first}") == 2


def test_a_module_of_lightning(tmp_path):
    fewer = ("devices=4", "devices=2, accelerator='cpu'")
    script = write(tmp_path, "docs/migrate/torch.md", 1, LOADER, fewer=fewer)
    run(script, folder=tmp_path)
    assert list(tmp_path.rglob("epoch=4-step=20.ckpt"))


@pytest.mark.parametrize(
    ("keras_2", "says"), [(KERAS_2, ""), ("", "ValueError")], ids=["keras_2", "keras_3"]
)
def test_the_loop_of_ray_trains_only_with_keras_2(tmp_path, keras_2, says):
    fewer = ("num_workers=4", "num_workers=2")
    before = keras_2 + IN_RAY + MAKE_MODEL
    script = write(tmp_path, "docs/migrate/ray_train.md", 0, before, fewer=fewer)
    assert says in run(script, folder=tmp_path, exit_code=int(bool(says)))


def test_the_loop_of_the_tutorial_in_ray(tmp_path):
    page, loop = "docs/tutorials/ray.md", programs_of(ROOT / "docs/tutorials/ray.md")[0]
    shared = ("/shared/run", str(tmp_path / "shared"))
    script = write(tmp_path, page, 0, IN_RAY + loop, shared=shared)
    run(script, folder=tmp_path)
    assert (tmp_path / "shared" / "model.keras").exists()


@pytest.mark.parametrize("page", STEPS)
def test_this_side_of_a_page_runs_as_a_job(page, tmp_path):
    ours = programs_of(ROOT / page)[-1]
    before = BEFORE.get(page, f"{FLAT}{DATA}")
    after = f"assert model.optimizer.iterations.numpy() == {STEPS[page]}"
    script = tmp_path / "train.py"
    script.write_text("\n".join([before, ours, after]))
    run(*LAUNCH, *JOB.get(page, MULTIWORKER), str(script), folder=tmp_path)
