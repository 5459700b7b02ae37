"""Mistakes are one line with a code, and a program ends with the exit code of its error."""

import io
import pickle
import signal
import sys

import pytest

from tfdist.argument_parser import run_program
from tfdist.check import _parser as check
from tfdist.errors import PeerLost, Stopped, UsageError
from tfdist.tuning.options import parse as tune


def test_positional_arguments_may_stand_between_flags():
    assert check().parse_args(["a.json", "--run_dir", "r", "b.py"]).files == ["a.json", "b.py"]


def test_dashes_equal_underscores_and_the_last_flag_counts():
    words = ["--run-dir", "r", "--run_dir=s", "a.json", "--", "--no-flag"]
    found = check().parse_args(words)
    assert (found.run_dir, found.files) == ("s", ["a.json", "--no-flag"])


def test_flags_of_a_configuration_may_be_repeated():
    words = ["--config=c.py", "--config.seed=1", "--config.seed=2"]
    assert tune(words).config_flags == ("--config.seed=1", "--config.seed=2")


# Programs


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("--x", "1 is too small", fix="write 2"), 2, "p: --x: 1 is too small. Fix: "),
        (UsageError("p", "no package", fix="install it"), 2, "p: no package. Fix: "),
        (PeerLost("worker-1 is gone"), 75, "p: worker-1 is gone"),
        (Stopped(signal.SIGTERM), 143, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["usage", "program", "peer", "stopped", "Ctrl-C"],
)
def test_a_program_ends_with_the_code_of_its_error(error, code, said, capsys):
    def run() -> int:
        raise error

    assert run_program("p", run) == code
    assert capsys.readouterr().err.startswith(said)


def test_characters_outside_the_encoding_are_printed_escaped(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert run_program("p", lambda: print("run directory \xe9", flush=True) or 0) == 0
    assert printed.getvalue() == b"run directory \\xe9\n"


def test_a_broken_pipe_of_another_output_is_raised():
    def run() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_program("p", run)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("workers", "the list is empty", fix="add a worker", code="none"),
        Stopped(signal.SIGUSR1, "stopped at step 3"),
    ],
)
def test_an_error_survives_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
