"""`tfdist.bench batch` and `pipeline` without TensorFlow: tables, lines, pictures, stepped jobs."""

import contextlib
import json
import sys
from typing import Any

import pytest

from tfdist import bench
from tfdist.bench import StepperJob, parse_batch, parse_pipeline
from tfdist.errors import TfdistError
from tfdist.find.batch_size import BatchTrial, MemoryLimits


def tried(request: Any, limits: MemoryLimits, *, timeout_s: float) -> BatchTrial:
    """As fast as the model is small; of the large one a batch of 16 does not fit."""
    size, words = request["batch_size"], request["subject"]
    if words == ["a.py:large"] and size > 8:
        return BatchTrial(batch_size=size, fits=False, cause="full")
    measured = {"peak_bytes": size << 20, "examples_per_second": 100.0 * size, "cores": 1.5}
    return BatchTrial(batch_size=size, fits=True, parameters=1234, **measured)


class Stages:
    """A job in so many stages that is as fast as its micro-batches are few."""

    def __init__(self, options: Any, *, stages: int, sizes: list[int], run_dir: str) -> None:
        self._sizes = [0] * (stages > 1) + list(sizes) * (options.steps + 1)
        self._stages = stages

    def wait(self) -> None:
        """Ready."""

    def close(self) -> None:
        assert not self._sizes

    def step(self) -> dict[str, Any]:
        size = self._sizes.pop(0) or 8
        return {"size": size, "seconds": 24 / size / self._stages}


@pytest.fixture
def measured(tmp_path, capsys):
    """Measures; returns the table and the lines of the file, beside which there is a picture."""

    def measure(*words: str) -> tuple[list[list[str]], list[Any]]:
        pytest.importorskip("matplotlib")
        plot, lines = tmp_path / "b.png", tmp_path / "b.jsonl"
        assert bench.main([*words, "--plot", str(plot), "--json", str(lines)]) == 0
        assert plot.read_bytes().startswith(b"\x89PNG")
        table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        return table, [json.loads(line) for line in lines.read_text().splitlines()]

    return measure


def test_each_subject_is_measured_until_a_size_does_not_fit(monkeypatch, measured):
    monkeypatch.setattr(bench, "try_out", tried)
    table, lines = measured("batch", "a.py:small", "a.py:large", "--sizes", "32,8,16")
    assert table == [
        ["a.py:small", "1,234", "8", "800", "1.50", "8"],
        ["a.py:small", "1,234", "16", "1,600", "1.50", "16"],
        ["a.py:small", "1,234", "32", "3,200", "1.50", "32"],
        ["a.py:large", "1,234", "8", "800", "1.50", "8"],
        ["a.py:large", "16", "full"],
    ]
    assert [line["fits"] for line in lines] == [True] * 4 + [False]


def test_all_split_sizes_are_measured_beside_one_device(monkeypatch, measured):
    monkeypatch.setattr(bench, "stepper", Stages)
    words = ["--batch_size=24", "--sizes=auto,12,4", "--one_device=12", "--steps=3"]
    table, lines = measured("pipeline", "a.py:f", *words)
    assert table == [
        ["2", "4", "3.000", "8.0", "0.33"],
        ["2", "12", "1.000", "24.0", "1.00"],
        ["2", "24", "0.500", "48.0", "2.00"],
        ["2", "8", "(auto)", "1.500", "16.0", "0.67"],
        ["1", "12", "2.000", "12.0", "0.50"],
        ["1", "24", "1.000", "24.0", "1.00"],
    ]
    assert [len(line["seconds"]) for line in lines] == [3] * 6
    assert [line["found"] for line in lines] == [False] * 3 + [True] + [False] * 2


def test_what_is_asked_for_is_read():
    assert parse_batch(["batch"]).subjects == [[]]
    flags = ["--config=configs/mnist.py", "--config.model=dense"]
    assert parse_batch(["batch", "a.py:f", *flags]).subjects == [["a.py:f"], flags]
    options = parse_pipeline(["--batch_size=24", "--sizes=60,8"])
    assert (options.auto, options.sizes, options.one_device) == (False, [8, 24], [8, 24])


@pytest.mark.parametrize("flags", [[], ["--fused_kernels"]])
def test_a_job_trains_with_the_kernel_that_is_asked_for(monkeypatch, flags):
    monkeypatch.setattr(bench, "StepperJob", lambda command, timeout_s: command)
    command = bench.stepper(parse_pipeline(flags), stages=2, sizes=[8], run_dir="runs/1")
    assert json.loads(command[-1])["fused_kernels"] is bool(flags)


@pytest.mark.parametrize(
    "words",
    [
        *("batch --sizes=8,0", "batch --sizes=8,,9", "batch --steps=0", "batch --size=8"),
        *("pipeline --sizes=8,0", "pipeline --sizes=8,,x", "pipeline --steps=0"),
        *("pipeline --stages=1", "pipeline --keep=all", "pipeline --size=8"),
    ],
)
def test_what_cannot_be_is_one_line(words, capsys):
    assert bench.main(words.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


ANSWERS = """
import json, socket, sys
end = socket.socket(socket.AF_UNIX)
end.connect(sys.argv[1])
lines = end.makefile("rw")
for number, answer in enumerate({answers}):
    lines.readline()
    lines.write(json.dumps(answer) + "\\n")
    lines.flush()
print("out of memory")
"""


@pytest.fixture
def job():
    """Makes jobs whose steps take so many seconds, and which then end."""
    with contextlib.ExitStack() as stack:

        def make(*seconds: float, program: str = ANSWERS) -> StepperJob:
            answers = [{"seconds": each} for each in seconds]
            command = [sys.executable, "-c", program.format(answers=answers)]
            made = StepperJob(command, timeout_s=30.0)
            stack.callback(made.close)
            return made

        yield make


def test_jobs_step_in_turn_and_the_first_round_is_left_out(job):
    jobs = [job(1.0, 2.0, 3.0), job(10.0, 11.0, 12.0)]
    for one in jobs:
        one.wait()
    assert bench.in_turn(jobs, rounds=2) == [[2.0, 3.0], [11.0, 12.0]]


@pytest.mark.parametrize("program", [ANSWERS, "print('out of memory')"])
def test_a_job_that_ends_early_is_an_error_with_its_last_words(job, program):
    one = job(1.0, program=program)

    def two_steps() -> None:
        one.wait()
        one.step()
        one.step()

    with pytest.raises(TfdistError, match="out of memory"):
        two_steps()
