"""Machines with GPUs, shown by a fake list of devices."""

import dataclasses
from types import SimpleNamespace as Fake

import pytest
import tensorflow as tf

from tests.processes import script
from tests.refusals import refused
from tfdist import check
from tfdist.cluster import KINDS, ClusterSpec, JobOptions, Task, TaskConfig
from tfdist.launch.machine import this_machine
from tfdist.strategy import devices, make

WHEEL = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]  # TensorFlow 2.21


@pytest.fixture
def gpus(monkeypatch):
    """Make TensorFlow list GPUs, of which some have parts: ``gpus(1, 2)`` has a divided GPU."""

    def lists(*parts):
        grown = []
        divided = {f"gpu-{i}": [None] * count for i, count in enumerate(parts) if count > 1}
        config = {
            "list_physical_devices": lambda kind: [f"gpu-{i}" for i in range(len(parts))],
            "get_visible_devices": lambda kind: [f"gpu-{i}" for i in range(len(parts))],
            "get_logical_device_configuration": divided.get,
            "experimental": Fake(set_memory_growth=lambda gpu, _: grown.append(gpu)),
        }
        monkeypatch.setattr(devices, "tf", Fake(config=Fake(**config)))
        return grown

    return lists


def test_parts_of_a_gpu_are_replicas_with_own_memory(gpus):
    grown = gpus(1, 2)
    devices.grow_gpu_memory()
    assert grown == ["gpu-0"]
    assert devices.replica_devices(None) == ["/GPU:0", "/GPU:1", "/GPU:2"]
    assert devices.replica_devices(2) == ["/GPU:0", "/GPU:1"]
    assert refused(lambda: devices.replica_devices(4))[1] == "devices"


@pytest.mark.parametrize(
    ("task", "count", "code"), [("worker", 1, None), ("worker", 2, "devices"), ("ps", 2, None)]
)
def test_a_ps_worker_that_sees_several_gpus_is_refused(gpus, task, count, code):
    gpus(*[1] * count)
    cluster = ClusterSpec(chief=("a:1",), worker=("a:2",), ps=("a:3",))
    config = TaskConfig(cluster=cluster, task=Task(task, 0))

    def ask():
        make._require_devices(JobOptions(), KINDS["ps"], config)

    if code is None:
        ask()
    else:
        assert refused(ask)[:2] == ("worker-0", code)


@pytest.mark.parametrize(
    ("gpu", "kernels", "says"),
    [
        (("H200", "9.0"), WHEEL, ""),
        (("L4", "8.9"), WHEEL, ""),
        (("A10", "8.6"), WHEEL, ""),
        (
            ("RTX 5090", "12.0"),
            WHEEL,
            "warning  GPU: TensorFlow has no kernels for RTX 5090 (sm_1",
        ),
        (("RTX 5090", "12.0"), [*WHEEL, "sm_120a"], ""),
        (("M60", "5.2"), WHEEL, "error    GPU: TensorFlow has no kernels for M60 (sm_52)"),
        (("M60", "5.2"), [], ""),
    ],
)
def test_a_gpu_without_kernels_in_the_wheel_is_found(gpu, kernels, says):
    found = "\n".join(map(str, check.check_gpus([gpu, gpu], kernels, nccl="2.25")))
    assert found.startswith(says)
    assert found.count("\n") == 0
    assert bool(found) == bool(says)
    (last,) = [str(one) for one in check.check_gpus([("L4", "8.9")], WHEEL, nccl="")]
    assert last.startswith("warning  GPU: NCCL is missing")


def test_gpus_and_kernels_of_the_host_are_read(monkeypatch, tmp_path):
    script(tmp_path / "nvidia-smi", "echo 'NVIDIA GeForce RTX 5090, 12.0'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check._gpus() == [("NVIDIA GeForce RTX 5090", "12.0")]
    built = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    assert check._kernels() == list(built)
    machine = dataclasses.replace(this_machine({}), gpus=("0",))
    found = [str(one) for one in check.check_host({}, machine=machine, run_dir=str(tmp_path))]
    assert any("RTX 5090 (sm_120)" in line for line in found) == bool(built)
