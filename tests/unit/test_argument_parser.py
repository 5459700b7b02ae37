"""Programs that argparse reads tell a mistake in one line, as the others do."""

import io
import signal
import sys

import pytest

from benchmarks.scaling import __main__ as scaling
from tests.refusals import refusal
from tfdist import ledger, replay, serve
from tfdist.argument_parser import run_program
from tfdist.bench import parse_batch as bench
from tfdist.bench import parse_pipeline as split_sizes
from tfdist.errors import PeerLost, Stopped, UsageError
from tfdist.find.__main__ import parse as find
from tfdist.lint import parse as lint
from tfdist.ops.submit.request import parse as submit
from tfdist.tuning.options import parse as tune

PROGRAMS = {
    "bench": bench,
    "find": find,
    "serve": serve._parser().parse_args,
    "submit": submit,
    "ledger": ledger._parser().parse_args,
    "replay": replay._parser().parse_args,
    "scaling": scaling._parser().parse_args,
    "tune": tune,
}


def test_what_is_no_flag_may_stand_between_and_behind_flags():
    assert find(["lr", "--steps", "5", "train.py:make"])[1] == ["train.py:make"]
    assert bench(["batch", "a.py:f", "--sizes", "8", "b.py:g"]).names == ["a.py:f", "b.py:g"]
    assert lint(["a.json", "--kind", "config", "b.py"]).files == ["a.json", "b.py"]


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        (find, ["lr", "--plot=no/such/lr.png"]),
        (bench, ["batch", "--json=no/such/sizes.jsonl"]),
        (split_sizes, ["--plot=no/such/sizes.png"]),
    ],
)
def test_what_cannot_be_written_is_told_before_minutes_of_work(parse, words):
    with pytest.raises(UsageError, match="no/such/") as caught:
        parse(words)
    assert caught.value.code == "not-writable"


def test_a_file_of_a_flag_is_not_made_before_there_is_something_for_it(tmp_path):
    split_sizes([f"--plot={tmp_path / 'sizes.png'}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("ledger", [], "command line: received no run_dir; expected what python"),
        ("ledger", ["a", "--jsn"], "received --jsn (did you mean '--json'?); expected a flag of"),
        ("ledger", ["a", "b"], "received b; expected no more than"),
        ("replay", ["a", "--step", "x"], "--step: received 'x'; expected an integer. Fix: write"),
        (
            "replay",
            ["a", "--step=1", "--strategy=ps"],
            "received 'ps'; expected one of single",
        ),
        ("scaling", ["--out=o", "--loss=x"], "--loss: received 'x'; expected a number"),
        ("replay", ["a", "--step=--"], "--step: received no value; expected a value. Fix: write"),
        ("ledger", ["--json", "a", "--json"], "--json: received it twice"),
        ("tune", ["--max_trials=2", "--max_trials=3"], "--max_trials: received it twice"),
        ("tune", ["--max_trial", "3"], "received --max_trial (did you mean '--max_trials'?)"),
        ("serve", ["d", "--replcas=2"], "received --replcas (did you mean '--replicas'?)"),
        ("bench", ["batch", "--timeout_s=-1"], "--timeout_s: received -1.0; expected a number of"),
        ("bench", ["batch", "--least_s=nan"], "--least_s: received nan; expected a number of"),
        ("find", ["memory", "--batch_size=0"], "--batch_size: received 0; expected a whole"),
        ("tune", ["--hub_token=secret"], "command line: received --hub_token; expected"),
    ],
)
def test_a_mistake_is_one_line(program, words, said):
    caught = refusal(lambda: PROGRAMS[program](words))
    assert said in str(caught)
    assert "secret" not in str(caught)


def test_flags_that_are_none_of_the_programs_may_come_twice():
    words = ["--out=o", "--", "--config.seed=1", "--config.seed=2", "--out=p"]
    assert PROGRAMS["scaling"](words).arguments[-3:] == words[-3:]
    words = ["--config=c.py", "--config.seed=1", "--config.seed=2"]
    assert tune(words).config_flags == ("--config.seed=1", "--config.seed=2")


@pytest.mark.parametrize("program", [ledger, replay, scaling])
def test_a_program_ends_with_its_line_and_2(program, capsys):
    assert program.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(program.__name__.removesuffix(".__main__") + ": ")


# Programs


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("--x", received=1, expected="2", fix="write 2"), 2, "p: --x: received 1"),
        (PeerLost("worker-1 is gone"), 75, "p: worker-1 is gone"),
        (Stopped(signal.SIGTERM), 143, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["usage", "peer", "stopped", "Ctrl-C"],
)
def test_a_program_ends_with_the_code_of_its_error(error, code, said, capsys):
    def run() -> int:
        raise error

    assert run_program("p", run) == code
    assert capsys.readouterr().err.startswith(said)


def test_what_the_output_s_encoding_has_not_is_printed_all_the_same(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert run_program("p", lambda: print("run directory \xe9", flush=True) or 0) == 0
    assert printed.getvalue() == b"run directory \\xe9\n"


def test_an_output_that_is_not_the_programs_own_may_be_closed_by_who_reads_it():
    def run() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_program("p", run)
