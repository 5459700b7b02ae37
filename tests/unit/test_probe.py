"""`--probe`: what is measured of the lines of a job, and the sentence that names the fastest."""

import json
import os
from pathlib import Path

import pytest

from tests.refusals import refused
from tfdist.errors import UsageError
from tfdist.launch import probe
from tfdist.launch.options import parse
from tfdist.launch.probe import Row, rates, verdict


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"single": (100, 0), "ps": (121, 0)}, "fastest: ps, 21% faster than single"),
        ({"single": (100, 0.01), "ps": (106, 0.01)}, "fastest: ps, 6% faster than single"),
        # Two runs of one job may differ by 5 %.
        ({"single": (100, 0), "ps": (104, 0)}, "within noise: single, ps differ by 4%. single"),
        (
            {"ps": (130, 0.2), "single": (100, 0.15)},
            "within noise: ps, single differ by 30%. ps",
        ),
        (
            {"single": (103, 0), "mirrored": (50, 0), "multiworker": (104, 0), "ps": (105, 0)},
            "within noise: single, multiworker, ps differ by 2%. single is the simplest",
        ),
        ({"single": (100, 9), "ps": (0, 0)}, "only single was measured"),
        ({"single": (0, 0), "ps": (0, 0)}, "no strategy was measured"),
    ],
)
def test_the_fastest_is_named_if_it_is_not_noise(rows, said):
    made = [Row(name, "", rate, noise) for name, (rate, noise) in rows.items()]
    assert verdict(made).startswith(said)


def test_the_first_quarter_of_a_measurement_does_not_count():
    slow, fast = [(0, 0), (9, 1)], [(10, 11), (11, 21), (12, 36), (14, 56), (15, 66), (16, 76)]
    assert rates(slow + fast) == [10, 15, 10, 10, 10]
    assert rates(fast[:3]) == []
    again = [(0, 0), (1, 10), (2, 20)]  # of a second fit, in a program that ignores the end
    assert rates(slow + fast + again) == rates(slow + fast)


def lines(rate):
    return "".join(json.dumps({"seconds": s, "examples": s * rate}) + "\n" for s in range(9))


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """The jobs that a probe starts, instead of which files are written."""
    started = []

    def run_job(options, *, environ, screen):
        started.append(options)
        run_dir = Path(options.run_dir)
        if options.strategy == "mirrored":
            raise UsageError("model", "it cannot\nbe copied", fix="do not")
        run_dir.mkdir()
        if options.strategy == "multiworker":
            failure = {"first_failure": {"cause": "ValueError: no"}}
            (run_dir / "report.json").write_text(json.dumps({"attempts": [failure]}))
            return 143  # the task's own exit code
        if options.strategy == "ps":
            (run_dir / "metrics.jsonl").write_text(lines(200))
            return interrupted[0] if interrupted else 0
        (run_dir / "metrics.jsonl").write_text(lines(100))
        return 0

    interrupted = []
    monkeypatch.setattr(probe, "run_job", run_job)
    monkeypatch.setattr(probe.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return started, interrupted


def test_a_failing_strategy_is_a_row_among_the_others(jobs, capsys, tmp_path):
    flags = "--probe --workers 3 --ps 2 --max_restarts 4 --threads_per_task 1 --min_workers 2"
    options = parse([*flags.split(), "train.py", "--lr", "1"])
    assert probe.run_probe(options, environ=dict(os.environ)) == 0
    shapes = [(job.strategy, job.workers, job.ps, job.min_workers) for job in jobs[0]]
    assert shapes == [
        *(("single", 1, None, None), ("mirrored", 1, None, None)),
        *(("multiworker", 3, None, None), ("ps", 3, 2, 2)),
    ]
    assert {(job.probe, job.max_restarts, job.threads_per_task) for job in jobs[0]} == {
        (False, 0, 1)
    }
    assert {job.program.args for job in jobs[0]} == {("--lr", "1")}
    said = capsys.readouterr().out
    assert "Other writes of the program happen." in said
    rows = [line.split() for line in said.splitlines()[3:7]]
    assert [row[0] for row in rows] == list(probe.STRATEGIES)
    assert rows[0][3:] == ["100", "±", "0%"]
    assert " ".join(rows[1][3:]) == "- model: it cannot be copied. Fix: do not"
    assert " ".join(rows[2][3:]) == "- ValueError: no"
    assert rows[3][1:] == ["3", "workers,", "2", "ps", "200", "±", "0%"]
    assert "fastest: ps, 100% faster than single" in said
    scratch = said.splitlines()[-1].removeprefix("logs: ")
    assert Path(scratch).parent == tmp_path
    assert Path(scratch, "ps").is_dir()


def test_a_program_that_always_fails_ends_with_code_1(jobs, capsys, monkeypatch):
    def fail(options, *, environ, screen):
        run_dir = Path(options.run_dir)
        run_dir.mkdir()
        failure = {"first_failure": {"cause": f"ValueError: no {options.strategy}"}}
        (run_dir / "report.json").write_text(json.dumps({"attempts": [failure]}))
        return 143 if options.strategy == "ps" else 1

    monkeypatch.setattr(probe, "run_job", fail)
    assert probe.run_probe(parse(["--probe", "train.py"]), environ={}) == 1
    said = capsys.readouterr().out
    assert said.count("  ValueError: no ") == len(probe.STRATEGIES)
    assert "no strategy was measured\nlogs: " in said


def test_a_signal_ends_the_probe(jobs):
    jobs[1].append(130)
    with pytest.raises(SystemExit) as ended:
        probe.run_probe(parse(["--probe", "train.py"]), environ={})
    assert ended.value.code == 130


def test_a_program_that_does_not_exist_starts_no_job(jobs):
    options = parse(["--probe", "no.py"])
    assert refused(lambda: probe.run_probe(options, environ={})) == ("program", "no-file")
    assert jobs[0] == []
