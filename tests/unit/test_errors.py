"""Refusals travel between processes, and a port that cannot be had is one."""

import pickle
import socket

import numpy as np
import pytest

from tests.refusals import refusal, refused
from tfdist import errors
from tfdist.loopback import listen


@pytest.mark.parametrize("value", [0, 1.0, "3", None, True, np.float32(2)])
def test_what_is_no_whole_number_of_at_least_1_is_refused(value):
    found = refused(lambda: errors.require_int("epochs", value, least=1))
    assert found == ("epochs", "not-an-int")


@pytest.mark.parametrize("value", [0, -1.0, "3", None, True, float("nan"), float("inf")])
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
