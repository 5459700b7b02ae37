"""Whether a failed job is worth another start, by its failures alone."""

from __future__ import annotations

import pytest

from tfdist.cluster import Task
from tfdist.launch.report import Failure
from tfdist.launch.state import RestartPolicy

W0, W1, CHIEF = Task("worker", 0), Task("worker", 1), Task("chief", 0)


def failure(at_s=0.0, *, task=W0, cause="killed by SIGKILL", exit_code=137, step=None, kind=""):
    return Failure(task=task, cause=cause, exit_code=exit_code, at_s=at_s, step=step, kind=kind)


def policy(*past, max_restarts=3, window_s=3600.0):
    made = RestartPolicy(max_restarts=max_restarts, window_s=window_s)
    for one in past:
        made.restarted(one)
    return made


def test_without_restarts_it_says_nothing():
    verdict = policy(max_restarts=0).verdict(failure())
    assert not verdict.restart
    assert not verdict.reason


def test_a_first_failure_is_worth_another_start():
    verdict = policy().verdict(failure(step=40))
    assert verdict.restart
    assert verdict.reason == "restart 1 of 3 within 3600 s"


@pytest.mark.parametrize("exit_code", [2, 130, 143])
def test_mistakes_and_requests_to_stop_are_not(exit_code):
    verdict = policy().verdict(failure(exit_code=exit_code))
    assert not verdict.restart
    assert f"exit code {exit_code}" in verdict.reason


def test_the_same_failure_at_the_same_step_twice_in_a_row_is_not():
    verdict = policy(failure(step=40)).verdict(failure(100, task=W1, step=40))
    assert not verdict.restart
    assert verdict.reason == "the same failure at step 40 twice in a row"


@pytest.mark.parametrize(
    "now",
    [
        failure(100, step=41),
        failure(100, step=40, cause="killed by SIGSEGV"),
        failure(100, step=40, exit_code=139),
        failure(100, step=40, task=CHIEF),
        failure(100),
    ],
    ids=["further", "another cause", "another code", "another kind of task", "before the steps"],
)
def test_another_failure_is(now):
    assert policy(failure(step=40)).verdict(now).restart


def test_a_failure_is_compared_with_the_last_one_only():
    past = (failure(step=40), failure(10, step=50))
    assert policy(*past).verdict(failure(20, step=40)).restart


def test_the_same_failure_before_the_first_step_counts_within_the_window_only():
    assert not policy(failure()).verdict(failure(3600)).restart
    assert policy(failure()).verdict(failure(3601)).restart


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<Thing at 0x7f06f463afc0> is broken", "<Thing at 0x7f06f4456cd0> is broken"),
        ("no answer from 127.0.0.1:61100", "no answer from 127.0.0.1:63397"),
        ("hangs: silent for 301 s", "hangs: silent for 300 s"),
        ("its work unit is not done after 300 s", "its work unit is not done after 301 s"),
    ],
)
def test_what_differs_by_accident_makes_no_other_failure(before, after):
    verdict = policy(failure(cause=before, step=4)).verdict(failure(9, cause=after, step=4))
    assert not verdict.restart


def test_restarts_are_counted_within_the_window():
    past = [failure(at_s, step=at_s) for at_s in (0, 1000, 3000)]
    assert not policy(*past).verdict(failure(3500, step=9)).restart
    verdict = policy(*past).verdict(failure(3700, step=9))
    assert verdict.restart
    assert verdict.reason == "restart 3 of 3 within 3600 s"


def test_used_up_restarts_are_said():
    verdict = policy(failure(step=1), max_restarts=1).verdict(failure(step=2))
    assert not verdict.restart
    assert verdict.reason == "the one restart within 3600 s used up"


def test_workers_that_are_started_again_alone_each_have_a_last_failure():
    assert policy(failure(step=40)).verdict(failure(step=40, task=W1), alone=True).restart
    past = (failure(step=40), failure(step=40, task=W1))
    assert not policy(*past).verdict(failure(step=40), alone=True).restart


def test_the_same_error_counts_however_the_process_ended():
    before = failure(cause="ValueError (exit code 1)", exit_code=1, kind="1: ValueError")
    after = failure(9, cause="ValueError (killed by SIGABRT)", exit_code=134, kind="1: ValueError")
    assert not policy(before).verdict(after).restart
