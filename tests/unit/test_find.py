"""Finders without TensorFlow: what losses suggest, what a graph holds, what fits, what is left."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import TfdistError, UsageError
from tfdist.find import __main__ as program
from tfdist.find import batch_size
from tfdist.find.batch_size import (
    BatchSearch,
    BatchSizes,
    BatchTrial,
    MemoryLimits,
    available_bytes,
    largest,
)
from tfdist.find.liveness import Operation, peak_of
from tfdist.find.range_test import exponential_rates, has_diverged, read, smoothed

RATES = exponential_rates(1e-6, 1.0, steps=61)


def losses_of_a_usual_test() -> list[float]:
    """Flat, then falling fastest at 1e-3, lowest at 1e-1, then rising."""
    return [
        2.0 - 1.5 / (1 + math.exp(-4 * (math.log10(r) + 3))) + max(0.0, math.log10(r) + 1) ** 2
        for r in RATES
    ]


def test_rates_grow_by_one_factor() -> None:
    assert RATES[0] == pytest.approx(1e-6)
    assert RATES[-1] == pytest.approx(1.0)
    assert {round(b / a, 9) for a, b in itertools.pairwise(RATES)} == {round(10**0.1, 9)}


def test_the_moving_average_of_equal_losses_is_that_loss() -> None:
    assert smoothed([3.0] * 5, smoothing=0.9) == pytest.approx([3.0] * 5)
    assert smoothed([1.0, 2.0], smoothing=0.0) == [1.0, 2.0]


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    found = read(RATES, losses_of_a_usual_test(), smoothing=0.0)
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    assert found.lowest == pytest.approx(1e-1, rel=0.6)
    assert found.suggestion == found.steepest
    assert not found.diverged
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.lowest = 1.0  # type: ignore[misc]


def test_the_suggestion_is_no_more_than_a_tenth_of_the_rate_of_the_lowest_loss() -> None:
    losses = [2.0] * 40 + [2.0 - 0.1 * n * n for n in range(1, 5)] + [9.0] * 17
    found = read(RATES, losses, smoothing=0.0)
    assert found.suggestion == pytest.approx(RATES[43] / 10)


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    found = read(RATES, [1.0 + n for n in range(61)], smoothing=0.0)
    assert (found.suggestion, found.steepest) == (None, None)
    assert "never fell" in str(found)


@pytest.mark.parametrize("last", [math.nan, math.inf, 9.0])
def test_a_loss_that_diverges_ends_the_test(last: float) -> None:
    losses = [2.0, 1.5, 1.0, last]
    assert has_diverged(losses, smoothing=0.0, diverges_at=4.0)
    assert not has_diverged(losses[:-1], smoothing=0.0, diverges_at=4.0)
    found = read(RATES, losses, smoothing=0.0)
    assert found.diverged
    assert found.rates == tuple(RATES[:4])


def test_a_negative_loss_that_falls_has_not_diverged() -> None:
    assert not has_diverged([-1.0, -2.0, -3.0], smoothing=0.0, diverges_at=4.0)
    assert has_diverged([-1.0, 5.0], smoothing=0.0, diverges_at=4.0)


def test_the_plot_is_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = read(RATES, losses_of_a_usual_test(), smoothing=0.5).plot(tmp_path / "rates.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def operation(
    name: str, kind: str, inputs: tuple[int, ...], *outputs: tuple[int, int]
) -> Operation:
    return Operation(name=name, kind=kind, inputs=inputs, outputs=outputs)


def test_a_tensor_is_held_from_its_making_to_its_last_reading() -> None:
    graph = [
        operation("x", "Placeholder", (), (0, 1000)),
        operation("a", "Conv2D", (0,), (1, 10)),
        operation("b", "Conv2D", (1,), (2, 20)),
        operation("c", "Conv2D", (2,), (3, 5)),
        operation("d", "Conv2D", (3, 1), (4, 1)),
    ]
    peak = peak_of(graph)
    assert (peak.size_bytes, peak.at) == (35, "c")
    assert peak.by_operation == {"a": 10, "b": 20, "c": 5}


def test_views_and_operations_in_place_take_nothing() -> None:
    graph = [
        operation("a", "Conv2D", (), (0, 10)),
        operation("v", "Reshape", (0,), (1, 10)),
        operation("r", "Relu", (1,), (2, 10)),
        operation("s", "Relu", (2,), (3, 10)),
        operation("t", "Mul", (2, 3), (4, 10)),
    ]
    assert peak_of(graph).size_bytes == 20  # the second one may not write over what is read again


def test_what_is_kept_is_held_to_the_end() -> None:
    graph = [operation(str(n), "Conv2D", (), (n, 10)) for n in range(3)]
    assert peak_of(graph).size_bytes == 10
    assert peak_of(graph, kept=[0, 1]).size_bytes == 30


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 100, 1000])
def test_the_largest_size_is_found_to_an_eighth(limit: int) -> None:
    tried: list[int] = []
    found = largest(lambda n: bool(tried.append(n)) or n <= limit, first=8, most=4096)
    assert limit * 7 / 8 - 1 <= found <= limit
    assert len(tried) == len(set(tried)) <= 14


def test_no_size_above_the_largest_is_tried() -> None:
    tried: list[int] = []
    assert largest(lambda n: not tried.append(n), first=8, most=50) == 50
    assert tried == [8, 16, 32, 50]
    assert largest(lambda n: False, first=8, most=50) == 0


def test_a_batch_of_one_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out(request: Any, limits: MemoryLimits, *, timeout_s: float) -> BatchTrial:
        return BatchTrial(batch_size=request["batch_size"], fits=False, cause="took too much")

    monkeypatch.setattr(batch_size, "try_out", try_out)
    with pytest.raises(TfdistError, match=r"a batch of 1 does not fit into 1 MiB \(took too much"):
        BatchSearch(first=4, most=8).run({}, MemoryLimits(process=1 << 20, gpu=None))


@pytest.mark.parametrize(("gpus", "process", "gpu"), [((), 300, None), ((800, 400), 900, 360)])
def test_replicas_share_the_machine_and_have_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], process: int, gpu: int | None
) -> None:
    monkeypatch.setattr(batch_size, "available_bytes", lambda: 1000)
    monkeypatch.setattr(batch_size, "gpu_bytes", lambda: gpus)
    assert MemoryLimits.of_this_machine(0.9, replicas=3) == MemoryLimits(process=process, gpu=gpu)


def test_the_line_of_a_result_has_the_limits() -> None:
    found = BatchSizes(
        per_replica=8, global_batch_size=16, limit_bytes=5 << 20, gpu_limit_bytes=3 << 20, trials=()
    )
    expected = "batch size 16 (8 a replica) fits into 5 MiB, 3 MiB of a GPU, by 0 trials"
    assert str(found) == expected


def run_child(monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> BatchTrial:
    """Run `code` in the place of the child's program."""
    real = batch_size.subprocess.Popen

    def popen(command: list[str], **given: Any) -> Any:
        return real([command[0], "-c", code], **given)

    monkeypatch.setattr(batch_size.subprocess, "Popen", popen)
    limits = MemoryLimits(process=options.get("limit_bytes", 1 << 30), gpu=None)
    return batch_size.try_out({"batch_size": 4}, limits, timeout_s=30.0)


ANSWER = "import json, os, sys; r = json.load(sys.stdin); f = os.fdopen(r['answer_fd'], 'w');"


def test_what_a_child_answers_is_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"peak_bytes": 5, "gpu_peak_bytes": None, "examples_per_second": 2.0, "cores": 1.5}
    trial = run_child(monkeypatch, f"{ANSWER} json.dump({answer}, f)")
    assert trial == BatchTrial(batch_size=4, fits=True, **answer)  # type: ignore[arg-type]


def test_a_child_that_takes_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "x = b'1' * (200 << 20); import signal; signal.pause()"
    trial = run_child(monkeypatch, code, limit_bytes=100 << 20)
    assert (trial.fits, trial.cause) == (False, "took more than 100 MiB")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 9)",
        'import os; os.write(2, b"what():  std::bad_alloc"); os.abort()',
        ANSWER + " json.dump({'out_of_memory': 'OOM when allocating'}, f)",
    ],
)
def test_a_child_without_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    trial = run_child(monkeypatch, code)
    assert not trial.fits
    assert trial.cause


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no such layer')", "no such layer"),
        (ANSWER + " json.dump({'error': 'ValueError: shapes'}, f)", "ValueError: shapes"),
        ("import os; os.abort()", "status -6"),
    ],
)
def test_a_child_that_fails_for_something_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    with pytest.raises(TfdistError, match=f"trial with 4 examples failed: .*{said}.*Fix: "):
        run_child(monkeypatch, code)


def test_what_a_child_refuses_is_refused_in_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: name for name in ("where", "received", "expected", "fix", "code")}
    with pytest.raises(UsageError, match="where: received received") as error:
        run_child(monkeypatch, f"{ANSWER} json.dump({{'refused': {parts}}}, f)")
    assert error.value.code == "code"


def groups(root: Path, values: dict[str, str]) -> Path:
    for name, value in values.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(value)
    return root


def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/task\n")
    root = groups(
        tmp_path / "fs",
        {
            "job/task/memory.max": "max",
            "job/memory.max": "1000",
            "job/memory.current": "500",
            "job/memory.stat": "anon 300\ninactive_file 200\n",
        },
    )
    assert available_bytes(root=root, membership=membership, machine=5000) == 700
    assert available_bytes(root=root, membership=membership, machine=600) == 600
    assert available_bytes(root=root, membership=tmp_path / "none", machine=600) == 600


def test_groups_of_version_1_count_too(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("3:cpu,memory:/job\n1:name=systemd:/\n")
    limits = {"limit_in_bytes": "900", "usage_in_bytes": "100", "stat": "total_inactive_file 50\n"}
    root = groups(tmp_path, {f"memory/job/memory.{name}": text for name, text in limits.items()})
    assert available_bytes(root=root, membership=membership, machine=5000) == 850


def test_the_program_refuses_two_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["lr", "a.py:f", "--config.model=cnn"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("tfdist.find: FILE.py:FUNCTION: received it with --config;")
    assert line.count("\n") == 1


def test_flags_of_a_configuration_go_with_their_values() -> None:
    flags = ["--config", "configs/mnist.py", "--config.model=cnn"]
    options, words = program.parse(["lr", "--steps", "20", *flags])
    assert (options.what, options.steps, options.subject, words) == ("lr", 20, None, flags)
    assert program.parse(["batch", "a.py:f"])[1] == ["a.py:f"]
    assert program.parse(["memory"])[1] == []


@pytest.mark.parametrize(
    "flag", ["--first=0", "--most=0", "--steps=-1", "--use=0", "--timeout_s=0"]
)
def test_the_program_refuses_what_cannot_be(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["batch", "a.py:f", flag]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"tfdist.find: {flag[2:].partition('=')[0]}: received")
    assert line.count("\n") == 1


def test_json_takes_an_estimate() -> None:
    trial = BatchTrial(batch_size=1, fits=True)
    assert json.loads(json.dumps(dataclasses.asdict(trial)))["fits"]
