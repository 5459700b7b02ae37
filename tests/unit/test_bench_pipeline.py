"""`tfdist.bench pipeline` without TensorFlow: jobs that step when told to, a table, a picture."""

import contextlib
import json
import sys
from typing import Any

import pytest

from tfdist import bench
from tfdist.errors import TfdistError
from tfdist.find import split_size
from tfdist.find.split_size import StepperJob, StepTimes, in_turn

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


def job(*answers: dict[str, Any], program: str = ANSWERS) -> StepperJob:
    """A job whose steps have these answers."""
    command = [sys.executable, "-c", program.format(answers=list(answers))]
    return StepperJob(command, timeout_s=30.0)


class Fake:
    """A job in so many stages that is as fast as its micro-batches are few."""

    def __init__(self, options: Any, *, stages: int, sizes: list[int], run_dir: str) -> None:
        rounds = options.steps + 1
        self._sizes = [0] * (stages > 1) + list(sizes) * rounds
        self._stages = stages

    def wait(self) -> None:
        """Ready."""

    def close(self) -> None:
        assert not self._sizes

    def step(self) -> dict[str, Any]:
        size = self._sizes.pop(0) or 8
        return {"size": size, "seconds": 24 / size / self._stages}


def test_all_sizes_are_measured_beside_one_device(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(split_size, "stepper", Fake)
    files = ["--plot", str(tmp_path / "p.png"), "--json", str(tmp_path / "p.jsonl")]
    words = ["--batch_size=24", "--sizes=auto,12,4", "--one_device=12", "--steps=3"]
    assert bench.main(["pipeline", "a.py:f", *words, *files]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["2", "4", "3.000", "8.0", "0.33"],
        ["2", "12", "1.000", "24.0", "1.00"],
        ["2", "24", "0.500", "48.0", "2.00"],
        ["2", "8", "(auto)", "1.500", "16.0", "0.67"],
        ["1", "12", "2.000", "12.0", "0.50"],
        ["1", "24", "1.000", "24.0", "1.00"],
    ]
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [len(line["seconds"]) for line in lines] == [3] * 6
    assert [line["found"] for line in lines] == [False] * 3 + [True] + [False] * 2
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_jobs_step_in_turn_and_the_first_round_is_left_out():
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name, first in (("a", 1.0), ("b", 10.0)):
            jobs[name] = job(*({"seconds": first + n} for n in range(3)))
            stack.callback(jobs[name].close)
            jobs[name].wait()
        assert in_turn([*jobs.values()], rounds=2) == [[2.0, 3.0], [11.0, 12.0]]


@pytest.mark.parametrize("program", [ANSWERS, "print('out of memory')"])
def test_a_job_that_ends_early_is_an_error_with_its_last_words(program):
    with contextlib.ExitStack() as stack:
        one = job({"seconds": 1.0}, program=program)
        stack.callback(one.close)
        with pytest.raises(TfdistError, match="out of memory"):
            [act() for act in (one.wait, one.step, one.step)]


@pytest.mark.parametrize("flags", [[], ["--fused_kernels"]])
def test_a_job_trains_with_the_kernel_that_is_asked_for(monkeypatch, flags):
    monkeypatch.setattr(split_size, "StepperJob", lambda command, timeout_s: command)
    command = split_size.stepper(split_size.parse(flags), stages=2, sizes=[8], run_dir="runs/1")
    assert json.loads(command[-1])["fused_kernels"] is bool(flags)


def test_a_step_is_as_fast_as_its_median():
    times = StepTimes(stages=2, size=4, batch=12, seconds=(1.0, 9.0, 2.0))
    assert (times.median_s, times.examples_per_second) == (2.0, 6.0)


@pytest.mark.parametrize(
    "flag",
    ["--sizes=8,0", "--sizes=8,,x", "--steps=0", "--stages=1", "--keep=all", "--size=8"],
)
def test_what_cannot_be_is_one_line(flag, capsys):
    assert bench.main(["pipeline", flag]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_whole_batch_is_always_among_the_sizes():
    options = split_size.parse(["--batch_size=24", "--sizes=60,8"])
    assert (options.auto, options.sizes, options.one_device) == (False, [8, 24], [8, 24])
