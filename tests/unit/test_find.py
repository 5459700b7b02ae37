"""Finders without TensorFlow: what fits, and what is left."""

from types import SimpleNamespace
from typing import Any

import pytest

from tfdist import check
from tfdist.check import available_bytes
from tfdist.errors import TfdistError, UsageError
from tfdist.find import batch_size
from tfdist.find.batch_size import BatchTrial, failure, largest, memory_limits, search
from tfdist.launch.machine import memory_groups


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 100, 1000])
def test_the_largest_size_is_found_to_an_eighth(limit):
    tried: list[int] = []
    found = largest(lambda n: bool(tried.append(n)) or n <= limit, first=8, most=4096)
    assert limit * 7 / 8 - 1 <= found <= limit
    assert len(tried) == len(set(tried)) <= 14


def test_no_size_above_the_largest_is_tried():
    tried: list[int] = []
    assert largest(lambda n: not tried.append(n), first=8, most=50) == 50
    assert tried == [8, 16, 32, 50]


def test_one_example_that_does_not_fit_is_an_error(monkeypatch):
    def try_out(request: Any, limits: Any, *, timeout_s: float) -> BatchTrial:
        return BatchTrial(batch_size=request["batch_size"], fits=False, cause="took too much")

    monkeypatch.setattr(batch_size, "try_out", try_out)
    with pytest.raises(TfdistError, match=r"a batch of 1 does not fit into 1 MiB \(took too much"):
        search({}, (1 << 20, None), first=4, most=8, steps=3, timeout_s=1.0)


@pytest.mark.parametrize(("gpus", "process", "gpu"), [((), 300, None), ((800, 400), 900, 360)])
def test_replicas_share_the_machine_and_have_a_gpu_each(monkeypatch, gpus, process, gpu):
    monkeypatch.setattr(batch_size, "available_bytes", lambda: 1000)
    monkeypatch.setattr(batch_size, "gpu_bytes", lambda: gpus)
    assert memory_limits(0.9, replicas=3) == (process, gpu)


@pytest.fixture
def child(monkeypatch):
    """Has `code` run in the place of the child's program, with 100 MiB."""

    def run(code: str) -> BatchTrial:
        real = batch_size.subprocess.Popen

        def popen(command: list[str], **given: Any) -> Any:
            return real([command[0], "-c", f"import json, os, sys\n{code}"], **given)

        monkeypatch.setattr(batch_size.subprocess, "Popen", popen)
        return batch_size.try_out({"batch_size": 4}, (100 << 20, None), timeout_s=30.0)

    return run


def test_the_answer_of_a_child_is_the_trial(child):
    answer = {"peak_bytes": 5, "gpu_peak_bytes": None, "examples_per_second": 2.0}
    trial = child(f"json.dump({answer}, sys.stdout)")
    assert trial == BatchTrial(batch_size=4, fits=True, **answer)


def test_out_of_memory_differs_from_other_errors():
    assert "out_of_memory" in failure(ValueError("OOM when allocating tensor with shape[8]"))
    assert "out_of_memory" in failure(MemoryError())
    assert failure(TypeError("no 'BLOOMBlock'")) == {"error": "TypeError: no 'BLOOMBlock'"}


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "out of memory (killed)"),
        ('os.write(2, b"what():  std::bad_alloc"); os.abort()', "out of memory (killed)"),
        ("json.dump({'out_of_memory': 'OOM when allocating'}, sys.stdout)", "OOM"),
        ("x = b'1' * (200 << 20); import signal; signal.pause()", "took more than 100 MiB"),
        # A peak between two looks.
        ("json.dump({'peak_bytes': 2 << 30}, sys.stdout)", "took more than 100 MiB"),
    ],
)
def test_a_child_that_exceeds_memory_does_not_fit(child, code, cause):
    trial = child(code)
    assert not trial.fits
    assert cause in trial.cause


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no such layer')", "no such layer"),
        ("json.dump({'error': 'ValueError: shapes'}, sys.stdout)", "ValueError: shapes"),
        ("os.abort()", "status -6"),
    ],
)
def test_another_failure_of_a_child_is_an_error(child, code, said):
    with pytest.raises(TfdistError, match=f"trial with 4 examples failed: .*{said}.*Fix: "):
        child(code)


def test_a_refusal_of_a_child_is_repeated(child):
    parts = {name: name for name in ("where", "problem", "fix", "code")}
    with pytest.raises(UsageError, match=r"where: problem\. Fix: fix") as error:
        child(f"json.dump({{'refused': {parts}}}, sys.stdout)")
    assert error.value.code == "code"


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        (
            "0::/job/task\n",
            {
                "job/task/memory.max": "max",
                "job/memory.max": "1000",
                "job/memory.current": "500",
                "job/memory.stat": "anon 300\ninactive_file 200\n",
            },
            700,
        ),
        (
            "3:cpu,memory:/job\n1:name=systemd:/\n",
            {
                "memory/job/memory.limit_in_bytes": "900",
                "memory/job/memory.usage_in_bytes": "100",
                "memory/job/memory.stat": "total_inactive_file 50\n",
            },
            850,
        ),
        (None, {}, 5000),
    ],
    ids=["version 2", "version 1", "none"],
)
def test_the_smallest_limit_counts(tmp_path, monkeypatch, membership, files, left):
    if membership is not None:
        (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [*memory_groups(root=tmp_path, membership=tmp_path / "cgroup")]
    monkeypatch.setattr(check, "memory_groups", lambda: found)
    for machine, free in ((5000, left), (600, 600)):
        memory = SimpleNamespace(available=machine)
        monkeypatch.setattr(check.psutil, "virtual_memory", lambda memory=memory: memory)
        assert available_bytes() == free
