"""Who failed first among tasks of which some end only because another did."""

from __future__ import annotations

import math
import signal

import pytest

from tfdist.cluster import Task
from tfdist.launch.diagnosis import SETTLE_S, RootCause, is_lost_peer
from tfdist.launch.events import Ended, Raised

W0, W1 = Task("worker", 0), Task("worker", 1)
LOST = "UnavailableError: Collective ops is aborted by: Connection reset by peer"


@pytest.fixture
def diagnosis():
    return RootCause(patience_s=10)


def raises(diagnosis, task, at_s, cause="ValueError: boom", exit_code=1):
    diagnosis.raised(Raised(task=task, exit_code=exit_code, cause=cause, at_s=at_s))


def ends(diagnosis, task, at_s, status=1, *, since_s=0.0, cause=""):
    diagnosis.ended(
        Ended(task=task, status=status, at_s=at_s, cause=cause), since_s=since_s, now_s=at_s
    )


def test_nobody_is_named_before_anything_has_ended(diagnosis):
    assert diagnosis.suspect(5, is_complete=False) is None
    assert diagnosis.next_s() == math.inf
    raises(diagnosis, W0, 5)
    assert diagnosis.suspect(5, is_complete=False) is None
    assert diagnosis.next_s() == 15


def test_a_failure_of_its_own_is_named_at_once(diagnosis):
    raises(diagnosis, W0, 5)
    ends(diagnosis, W0, 6)
    failure = diagnosis.suspect(6, is_complete=False)
    assert (failure.task, failure.at_s, failure.exit_code) == (W0, 5, 1)
    assert failure.cause == "ValueError: boom (exit code 1)"


def test_who_lost_its_peer_waits_for_the_root_cause(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    assert diagnosis.suspect(5.1, is_complete=False) is None
    assert diagnosis.next_s() == 5.1 + SETTLE_S
    ends(diagnosis, W1, 5.3, -signal.SIGKILL, since_s=5.1)
    failure = diagnosis.suspect(5.3, is_complete=False)
    assert (failure.task, failure.at_s, failure.exit_code) == (W1, 5.3, 137)
    assert failure.cause == "killed by SIGKILL, not by the launcher"


def test_who_lost_its_peer_is_named_when_no_culprit_comes(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    assert diagnosis.suspect(5.1 + SETTLE_S, is_complete=False).task == W0


def test_who_lost_its_peer_is_named_at_once_where_no_other_is_left(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    assert diagnosis.suspect(5.1, is_complete=True).task == W0


def test_a_peer_that_failed_with_an_error_of_its_own_goes_before_an_earlier_victim(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    raises(diagnosis, W1, 5.2)
    assert diagnosis.suspect(5.2, is_complete=False).task == W1


def test_an_abort_goes_before_a_lost_peer_and_after_all_else(diagnosis):
    raises(diagnosis, W0, 5, LOST)
    ends(diagnosis, W0, 5.1)
    ends(diagnosis, W1, 5.2, -signal.SIGABRT)
    assert diagnosis.suspect(5.2, is_complete=False) is None
    assert diagnosis.suspect(6, is_complete=False).task == W1


def test_a_task_that_gave_up_waiting_for_a_peer_is_its_victim(diagnosis):
    raises(diagnosis, W0, 5, "worker-1 did not come", exit_code=75)
    ends(diagnosis, W0, 5.1, 75)
    assert diagnosis.suspect(5.1, is_complete=False) is None
    ends(diagnosis, W1, 5.2, -signal.SIGSEGV)
    assert diagnosis.suspect(5.2, is_complete=False).task == W1


def test_what_the_kernel_says_is_the_cause(diagnosis):
    ends(diagnosis, W0, 5, -signal.SIGKILL, cause="killed by the kernel's out-of-memory killer (x)")
    failure = diagnosis.suspect(5, is_complete=False)
    assert failure.cause == "killed by the kernel's out-of-memory killer (x)"
    assert failure.exit_code == 137


def test_a_task_that_is_forgotten_is_not_named(diagnosis):
    ends(diagnosis, W0, 5)
    diagnosis.forget(W0)
    assert diagnosis.suspect(5, is_complete=True) is None
    assert diagnosis.next_s() == math.inf
    assert not diagnosis.tasks


@pytest.mark.parametrize(
    "cause",
    [
        LOST,
        "UnavailableError: Graph execution error:",
        "AbortedError: {{function_node __wrapped__...}}",
        "InternalError: Socket closed",
        "InternalError: Graph execution error:",
        "CancelledError: heartbeat timeout",
        "DeadlineExceededError: Barrier timed out. coordination service",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_errors_of_a_lost_peer(cause):
    assert is_lost_peer(cause)


@pytest.mark.parametrize(
    "cause",
    [
        "ValueError: Peer",
        "InternalError: cuDNN failed",
        "killed by SIGKILL",
        "exit code 1",
        "MyUnavailableErrors",
    ],
)
def test_errors_of_its_own(cause):
    assert not is_lost_peer(cause)
