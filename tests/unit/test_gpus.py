"""Machines with GPUs, shown by a fake list of devices."""

import dataclasses
from types import SimpleNamespace as Fake

import pytest

from tests.refusals import refused
from tfdist import check
from tfdist.cluster import KINDS, ClusterSpec, JobOptions, Task, TaskConfig
from tfdist.launch.machine import this_machine
from tfdist.strategy import devices, make


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


def test_a_missing_nccl_is_found(monkeypatch, tmp_path):
    machine = dataclasses.replace(this_machine({}), gpus=("0",))
    monkeypatch.setattr(check.ctypes.util, "find_library", lambda _: None)
    for installed in ({}, {"nvidia-nccl-cu12": "2.25"}):
        monkeypatch.setattr(check, "versions", lambda found=installed: found)
        found = [str(one) for one in check.check_host({}, machine=machine, run_dir=str(tmp_path))]
        missing = any(line.startswith("warning  GPU: NCCL is missing") for line in found)
        assert missing == (not installed)
