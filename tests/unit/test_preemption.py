"""Requests to stop by signals, without TensorFlow: heard, told apart, and everything given back."""

import contextlib
import functools
import os
import queue
import re
import signal
import textwrap
from types import SimpleNamespace

import pytest

from tests.processes import python, until
from tfdist.errors import Stopped
from tfdist.training import stop_requests
from tfdist.training.stop_requests import SIGNALS, StopRequests, signal_of

DEADLINE_S = 60.0
pytestmark = pytest.mark.usefixtures("at_a_terminal")


wait_until = functools.partial(until, within_s=DEADLINE_S)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_heard_and_answered_by_stopped(signum):
    stopped = Stopped(signum)
    assert stopped.code == (130 if signum == signal.SIGINT else 143)
    with contextlib.suppress(Stopped), StopRequests() as requests:
        assert signal_of(requests.slots()) is None
        signal.raise_signal(signum)
        wait_until(lambda: requests.signum is not None)
        assert signal_of(requests.slots()) == signum
        raise stopped  # or the signal would come again


def test_a_second_signal_ends_the_process_unless_repeated(monkeypatch):
    times, codes = iter([0.0, 0.05, 5.0]), queue.SimpleQueue[int]()
    monkeypatch.setattr(stop_requests, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(os, "_exit", codes.put)
    with contextlib.suppress(Stopped), StopRequests() as requests:
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: requests.signum is not None)
        signal.raise_signal(signal.SIGTERM)
        assert codes.empty()
        signal.raise_signal(signal.SIGINT)
        assert codes.get(timeout=DEADLINE_S) == 128 + signal.SIGINT
        raise Stopped(signal.SIGTERM)
    assert codes.empty()


def test_the_first_signal_after_a_remote_stop_is_ignored():
    heard: list[int] = []
    before = {s: signal.signal(s, lambda signum, _: heard.append(signum)) for s in SIGNALS}
    try:
        with contextlib.suppress(Stopped), StopRequests():
            raise Stopped(signal.SIGUSR1)  # which another task has heard
        signal.raise_signal(signal.SIGTERM)  # the launcher's, when that one was gone
        assert heard == []
        for signum in SIGNALS:
            signal.raise_signal(signum)
        assert heard == list(SIGNALS)
        with contextlib.suppress(Stopped), StopRequests() as requests:
            signal.raise_signal(signal.SIGTERM)
            wait_until(lambda: requests.signum is not None)
            raise Stopped(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a second one
        assert heard == [*SIGNALS, signal.SIGTERM]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_an_unanswered_signal_reaches_the_earlier_handler():
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: heard.append(signum))
    try:
        with StopRequests():
            signal.raise_signal(signal.SIGUSR1)
            assert heard == []
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(KeyboardInterrupt), StopRequests():
        signal.raise_signal(signal.SIGINT)


def test_a_signal_ignored_at_the_start_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            signal.raise_signal(signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert requests.signum is None
    finally:
        signal.signal(signal.SIGUSR1, before)


BEGIN = """
import os, signal, time, warnings
from tfdist.errors import TfdistError
from tfdist.training.stop_requests import StopRequests
"""
PROGRAMS = {
    # As a save that fails on a full disk: SIGTERM's own answer ends a process without a word.
    "an error while stopping is told before the signal ends the process": (
        """
        with StopRequests() as requests:
            signal.raise_signal(signal.SIGTERM)
            while requests.signum is None:
                time.sleep(0.001)
            raise TfdistError("checkpoint of step 7: No space left on device")
        """,
        -signal.SIGTERM,
        r"SIGTERM while stopping: checkpoint of step 7: No space left on device\n",
    ),
    "a forked child answers signals as before and does not tell its parent": (
        """
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork with threads
        with StopRequests() as requests:
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM
        assert requests.signum is None
        """,
        0,
        "",
    ),
}


@pytest.mark.parametrize(("program", "code", "said"), PROGRAMS.values(), ids=PROGRAMS)
def test_in_a_program(program, code, said):
    done = python("-c", BEGIN + textwrap.dedent(program), timeout=DEADLINE_S)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(said, done.stderr), done.stderr
