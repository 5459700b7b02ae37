"""Which failures are worth another start, alone or of the whole job."""

import pytest

from tfdist.cluster import Task
from tfdist.launch.diagnosis import Failure
from tfdist.launch.state import RestartPolicy

CHIEF = Task("chief", 0)
W0, W1 = Task("worker", 0), Task("worker", 1)


def failure(at_s=0.0, *, task=W0, cause="killed by SIGKILL", exit_code=137, step=None, kind=""):
    return Failure(task=task, cause=cause, exit_code=exit_code, at_s=at_s, step=step, kind=kind)


def policy(*past, max_restarts=3, window_s=3600.0):
    made = RestartPolicy(max_restarts=max_restarts, window_s=window_s)
    for one in past:
        made.restarted(one)
    return made


FIRST = "restart 1 of 3 within 3600 s"
TWICE = "the same failure {} twice in a row"
ERROR = "1: ValueError"


def by(number):
    """A failure at its step whose cause has a number that is another each time."""
    return failure(step=4, cause=f"no answer from 127.0.0.1:{number}, <Thing at 0x{number:x}>")


@pytest.mark.parametrize(
    ("past", "now", "restart", "reason"),
    [
        ([], failure(step=40), True, FIRST),
        # A mistake, or a request to stop.
        *(([], failure(exit_code=code), False, f"exit code {code}") for code in (2, 130, 143)),
        # The same failure as the last one: of another task of its type, at its step.
        ([failure(step=40)], failure(100, task=W1, step=40), False, TWICE.format("at step 40")),
        ([failure()], failure(3600), False, TWICE.format("before the first step")),
        ([failure()], failure(3601), True, FIRST),
        ([by(61100)], by(63397), False, TWICE.format("at step 4")),
        (
            [failure(cause="hangs: no heartbeat for 301 s")],
            *(failure(9, cause="hangs: no heartbeat for 300 s"), False, "the same failure"),
        ),
        (
            [failure(cause="ValueError (exit code 1)", exit_code=1, kind=ERROR)],
            failure(9, cause="ValueError (killed by SIGABRT)", exit_code=134, kind=ERROR),
            *(False, "the same failure"),
        ),
        # Another one: further, or with another cause, code or type of task; or not the last.
        ([failure(step=40)], failure(100, step=41), True, ""),
        ([failure(step=40)], failure(100, step=40, cause="killed by SIGSEGV"), True, ""),
        ([failure(step=40)], failure(100, step=40, exit_code=139), True, ""),
        ([failure(step=40)], failure(100, step=40, task=CHIEF), True, ""),
        ([failure(step=40)], failure(100), True, ""),
        ([failure(step=40), failure(10, step=50)], failure(20, step=40), True, ""),
        # Three restarts within an hour.
        ([failure(s, step=s) for s in (0, 1000, 3000)], failure(3500, step=9), False, "used all"),
        (
            [failure(s, step=s) for s in (0, 1000, 3000)],
            *(failure(3700, step=9), True, "restart 3 of 3 within 3600 s"),
        ),
    ],
)
def test_a_failure_restarts_unless_it_would_repeat(past, now, restart, reason):
    verdict = policy(*past).verdict(now)
    assert verdict.restart is restart
    assert reason in verdict.reason


def test_a_used_up_restart_is_reported():
    verdict = policy(failure(step=1), max_restarts=1).verdict(failure(step=2))
    assert (verdict.restart, verdict.reason) == (False, "used the only restart within 3600 s")
    verdict = policy(max_restarts=0).verdict(failure())
    assert (verdict.restart, verdict.reason) == (False, "")


@pytest.mark.parametrize("step", [None, 40])
def test_each_restarted_worker_has_its_own_last_failure(step):
    raised, of_other = (failure(step=step, task=task, exit_code=1) for task in (W0, W1))
    assert policy(raised).verdict(of_other, alone=True).restart
    assert not policy(raised, of_other).verdict(raised, alone=True).restart
    # As in an evaluation, which has no steps.
    assert policy(*2 * [failure(step=step)]).verdict(failure(step=step), alone=True).restart
