"""Mistakes are one line with a code, and a program ends with the exit code of its error."""

import io
import pickle
import signal
import socket
import sys

import numpy as np
import pytest

from tests.refusals import refusal, refused
from tfdist import errors, serve
from tfdist.argument_parser import run_program
from tfdist.check import _parser as check
from tfdist.errors import PeerLost, Stopped, UsageError
from tfdist.loopback import listen
from tfdist.tuning.options import parse as tune

PROGRAMS = {
    "serve": serve._parser().parse_args,
    "tune": tune,
}


def test_what_is_no_flag_may_stand_between_and_behind_flags():
    assert check().parse_args(["a.json", "--run_dir", "r", "b.py"]).files == ["a.json", "b.py"]


def test_flags_of_a_configuration_may_come_twice():
    words = ["--config=c.py", "--config.seed=1", "--config.seed=2"]
    assert tune(words).config_flags == ("--config.seed=1", "--config.seed=2")


@pytest.mark.parametrize(
    ("program", "words", "where", "code"),
    [
        ("serve", [], "command line", "no-value"),
        ("serve", ["a", "--toke"], "command line", "unknown-flag"),
        ("serve", ["--no_pin", "a", "--no_pin"], "--no_pin", "given-twice"),
        ("serve", ["a", "--replicas", "x"], "--replicas", "not-an-int"),
        ("serve", ["a", "--replicas=--"], "--replicas", "no-value"),
        ("serve", ["a", "--on", "slurm"], "--on", "unknown-value"),
        ("tune", ["--max_trials=2", "--max_trials=3"], "--max_trials", "given-twice"),
        ("tune", ["--config=c.py", "--hub_token=secret"], "command line", "unknown-flag"),
        ("serve", ["d", "--replcas=2"], "command line", "unknown-flag"),
    ],
)
def test_a_mistake_is_one_line(program, words, where, code):
    error = refusal(lambda: PROGRAMS[program](words))
    assert (error.where, error.code) == (where, code)
    assert "secret" not in str(error)


def test_a_flag_that_is_close_is_hinted_at():
    error = refusal(lambda: tune(["--config=c.py", "--max_trial", "3"]))
    assert "--max_trial (did you mean '--max_trials'?)" in str(error)


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


# What is refused


@pytest.mark.parametrize("value", [0, 1.0, "3", None, True, np.float32(2)])
def test_what_is_no_whole_number_of_at_least_1_is_refused(value):
    found = refused(lambda: errors.require_int("epochs", value, least=1))
    assert found == ("epochs", "not-an-int")


@pytest.mark.parametrize("value", [0, -1.0, "3", None, True, float("nan"), float("inf"), 10**400])
def test_what_is_no_number_above_0_is_refused(value):
    found = refused(lambda: errors.require_number("--grace_s", value, above=0))
    assert found == ("--grace_s", "not-a-number")


def test_a_port_at_which_nothing_can_listen_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 65_536):
            found = refused(lambda port=port: listen(port, flag="--port"))
            assert found == ("--port", "port-taken")


def test_a_refusal_is_the_same_after_a_journey_between_processes():
    told = {"received": "[]", "expected": "one or more", "fix": "add one", "code": "none"}
    caught = refusal(lambda: errors.require([], "workers", **told))
    again = pickle.loads(pickle.dumps(caught))
    assert (str(again), again.code) == (str(caught), "none")
