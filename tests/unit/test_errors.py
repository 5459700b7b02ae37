"""The checks of arguments: what passes, and the line and code of what does not."""

import pickle
import socket

import numpy as np
import pytest

from tests.refusals import refusal
from tfdist import errors
from tfdist.errors import UsageError
from tfdist.loopback import listen


@pytest.mark.parametrize("value", [1, np.int64(7), True - 0])
def test_a_whole_number(value):
    number = errors.require_int("epochs", value, least=1)
    assert number == value
    assert type(number) is int


@pytest.mark.parametrize("value", [0, 1.0, "3", None, True, np.float32(2)])
def test_no_whole_number_of_at_least_1(value):
    with pytest.raises(UsageError, match=r"epochs: .* a whole number of at least 1") as caught:
        errors.require_int("epochs", value, least=1)
    assert caught.value.code == "not-an-int"


@pytest.mark.parametrize("value", [0.5, 2, np.float32(3)])
def test_a_number(value):
    number = errors.require_number("--grace_s", value, above=0)
    assert number == value
    assert type(number) is float


@pytest.mark.parametrize("value", [0, -1.0, "3", None, True, float("nan"), float("inf")])
def test_no_number_above_0(value):
    caught = refusal(lambda: errors.require_number("--grace_s", value, above=0, unit="seconds"))
    assert caught.expected == "a number of seconds above 0"
    assert caught.code == "not-a-number"


def test_a_choice_and_the_nearest_one():
    assert errors.require_one_of("--mode", "min", ("min", "max")) == "min"
    with pytest.raises(UsageError, match=r"'mni' \(did you mean 'min'\?\)") as caught:
        errors.require_one_of("--mode", "mni", ("min", "max"))
    assert (caught.value.where, caught.value.code) == ("--mode", "unknown-value")


def test_options_of_which_one_is_given():
    errors.mutually_exclusive({"--join": "", "--serve": None, "--resume": True})
    with pytest.raises(UsageError, match="--join: received --join and --serve together") as caught:
        errors.mutually_exclusive({"--join": "a:1", "--serve": True, "--resume": False})
    assert caught.value.code == "exclusive"


def test_an_address_at_which_nothing_can_listen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 65_536):
            with pytest.raises(UsageError, match=rf"^--port: received {port} \(.+\)") as caught:
                listen(port, flag="--port")
            assert caught.value.code == "port-taken"
            assert "while attempting" not in str(caught.value)


def test_a_package_that_is_not_installed():
    errors.require_packages("--tuner bayesian", "json", extra="digits")
    with pytest.raises(UsageError, match=r"without no_such.*'tfdist\[digits\]'") as caught:
        errors.require_packages("--tuner bayesian", "json", "no_such", extra="digits")
    assert caught.value.code == "missing-package"


def test_a_condition():
    told = {"received": "[]", "expected": "one or more", "fix": "add one", "code": "none"}
    errors.require([1], "workers", **told)
    caught = refusal(lambda: errors.require([], "workers", **told))
    again = pickle.loads(pickle.dumps(caught))
    assert (str(again), again.code) == (str(caught), "none")
