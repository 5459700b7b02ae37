"""Recorded histories of whole attempts, given to `decide` again: no process, clock or screen."""

import math
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.launch.diagnosis import Failure
from tfdist.launch.events import (
    Awakening,
    Beat,
    Begin,
    Ended,
    KillOne,
    Raised,
    Signal,
    Start,
    Started,
    StopRequest,
)
from tfdist.launch.state import EVALUATOR, JobState, RestartPolicy
from tfdist.launch.supervisor import decide
from tfdist.launch.watchdog import Watchdog

CHIEF, PS = Task("chief", 0), Task("ps", 0)
W0, W1, W2 = (Task("worker", index) for index in range(3))
PS_JOB = (CHIEF, W0, W1, PS)
MULTIWORKER_JOB = (W0, W1, W2)
GRACE_S, HANG_S = 10.0, 5.0
TERM, KILL = signal.SIGTERM, signal.SIGKILL


def job(tasks, *, max_restarts=0, hang_timeout_s=1000.0, states=None, min_workers=None):
    """Returns the state of an attempt; `states` are the letters of processes in /proc."""
    is_ps = CHIEF in tasks
    watchdog = Watchdog(
        hang_timeout_s=hang_timeout_s,
        startup_timeout_s=60.0,
        is_ps=is_ps,
        chief=tasks[0],
        state_of=(states or {}).get,
    )
    policy = RestartPolicy(max_restarts=max_restarts, window_s=3600.0)
    return JobState(
        job_tasks=tasks, logs=Path(), is_ps=is_ps, grace_s=GRACE_S, min_workers=min_workers,
        policy=policy, watchdog=watchdog, now_s=0.0,
    )  # fmt: skip


def begun(tasks):
    """Returns the history of a start: each task is started, and has a process soon."""
    starts = [Awakening(at_s=0.0, events=(Begin(task=task),)) for task in tasks]
    came = tuple(Started(task=task, pid=7, at_s=0.25) for task in tasks)
    return [*starts, Awakening(at_s=0.25, events=came)]


def beat(task, at_s, *, step, phase="step", since_s=None):
    return Beat(
        task=task,
        phase=phase,
        step=step,
        since_s=at_s if since_s is None else since_s,
        first_step_s=2.0,
        at_s=at_s,
    )


def ended(task, at_s, status):
    return Ended(task=task, status=status, at_s=at_s)


def replay(state, *history):
    """Returns what was decided at each moment, but nothing of the moments without a decision."""
    decided = [(one.at_s, decide(state, one)) for one in history]
    return [(at_s, actions) for at_s, actions in decided if actions]


def test_a_task_that_never_gets_a_process_hangs_and_one_that_has_ended_does_not():
    state = job((W0, W1), hang_timeout_s=HANG_S, states={W1: "S"})
    begin = [Awakening(at_s=0.0, events=(Begin(task=task),)) for task in (W0, W1)]
    came = Awakening(at_s=0.25, events=(Started(task=W1, pid=7, at_s=0.25),))
    spoke = Awakening(at_s=1.0, events=(beat(W1, 1.0, step=1),))
    over = Awakening(at_s=2.5, events=(ended(W1, 2.5, 0),))
    later = [Awakening(at_s=float(n)) for n in range(3, 70)]
    decided = replay(state, *begin, came, spoke, over, *later)
    at_s, (shown, signalled) = decided[2]
    assert (at_s, shown.task, signalled) == (60.0 + HANG_S, W0, Signal(W0, TERM))
    assert shown.cause == "hangs: has not started: silent for 65 s (it has no process)"


def test_what_a_worker_raises_while_it_is_killed_is_no_failure_of_the_next_process():
    state = job(PS_JOB, max_restarts=1)
    decided = replay(
        state,
        *begun(PS_JOB),
        Awakening(at_s=1.0, events=(Raised(task=W1, exit_code=1, cause="ValueError", at_s=1.0),)),
        Awakening(at_s=1.0 + GRACE_S),  # its process does not end
        Awakening(at_s=11.5, events=(Raised(task=W1, exit_code=1, cause="KeyError", at_s=11.5),)),
        Awakening(at_s=12.0, events=(ended(W1, 12.0, -KILL),)),
        Awakening(at_s=12.5, events=(Started(task=W1, pid=8, at_s=12.5),)),
        Awakening(at_s=12.5 + 2 * GRACE_S),
    )
    assert decided[4][1] == [KillOne(W1)]
    assert decided[5][1][-1] == Start(W1, restart=1)
    assert len(decided) == 6


class Answers:
    """Gives a job its events, and has its tasks do what was decided at the next moment."""

    def __init__(self, state):
        self.state, self.now_s, self.coming, self.starts = state, 0.0, [], 0

    def give(self, *events):
        self.now_s += 0.1
        was_ending = self.state.is_ending
        events, self.coming = (*self.coming, *events), []
        for action in decide(self.state, Awakening(at_s=self.now_s, events=events)):
            match action:
                case Start(task=task):
                    assert not was_ending
                    self.starts += 1
                    self.coming.append(Started(task=task, pid=7, at_s=self.now_s))
                case Signal(task=task, signum=signum):
                    self.coming.append(ended(task, self.now_s, -signum))
                case KillOne(task=task) if self.state.is_running(task):
                    self.coming.append(ended(task, self.now_s, -KILL))

    def wait(self):
        if not self.coming:
            self.now_s = max(self.now_s, min(self.state.next_s, self.now_s + 1000.0))
        self.give()


WHAT = st.sampled_from([0, 1, 2, 75, -KILL, -signal.SIGABRT, "raised", "step", "wait"])


@given(
    is_ps=st.booleans(),
    what=st.lists(st.tuples(st.integers(0, 4), WHAT), max_size=12),
    max_restarts=st.integers(0, 2),
    min_workers=st.sampled_from([None, 1]),
)
def test_whatever_happens_every_process_ends_and_is_reported(
    is_ps, what, max_restarts, min_workers
):
    tasks = (*(PS_JOB if is_ps else MULTIWORKER_JOB), EVALUATOR)
    state = job(tasks, max_restarts=max_restarts, hang_timeout_s=math.inf, min_workers=min_workers)
    job_ = Answers(state)
    for task in tasks:
        job_.give(Begin(task=task))
    for index, event in what:
        task = tasks[index % len(tasks)]
        if event == "wait":
            job_.wait()
        elif event == "step":
            job_.give(beat(task, job_.now_s, step=index))
        elif event == "raised":
            job_.give(Raised(task=task, exit_code=1, cause="ValueError", at_s=job_.now_s))
        else:
            job_.give(ended(task, job_.now_s, event))
    while not state.is_over:
        job_.give(*([] if state.stop_signal else [StopRequest(signum=TERM)]))
        job_.wait()
    assert job_.starts <= len(tasks) + max_restarts
    assert all(record.status is not None for task in tasks for record in state.tasks[task].records)
    assert state.exit_code or not state.failure


# The restart policy.


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
            [failure(cause="hangs: silent for 301 s")],
            *(failure(9, cause="hangs: silent for 300 s"), False, "the same failure"),
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
        ([failure(s, step=s) for s in (0, 1000, 3000)], failure(3500, step=9), False, "used up"),
        (
            [failure(s, step=s) for s in (0, 1000, 3000)],
            *(failure(3700, step=9), True, "restart 3 of 3 within 3600 s"),
        ),
    ],
)
def test_a_failure_is_worth_another_start_unless_it_would_be_the_same(past, now, restart, reason):
    verdict = policy(*past).verdict(now)
    assert verdict.restart is restart
    assert reason in verdict.reason


def test_one_restart_is_said_to_be_used_up_and_without_any_nothing_is():
    verdict = policy(failure(step=1), max_restarts=1).verdict(failure(step=2))
    assert (verdict.restart, verdict.reason) == (False, "the one restart within 3600 s used up")
    verdict = policy(max_restarts=0).verdict(failure())
    assert (verdict.restart, verdict.reason) == (False, "")


@pytest.mark.parametrize("step", [None, 40])
def test_workers_that_are_started_again_alone_each_have_a_last_failure(step):
    raised, of_other = (failure(step=step, task=task, exit_code=1) for task in (W0, W1))
    assert policy(raised).verdict(of_other, alone=True).restart
    assert not policy(raised, of_other).verdict(raised, alone=True).restart
    # As in an evaluation, which has no steps.
    assert policy(*2 * [failure(step=step)]).verdict(failure(step=step), alone=True).restart
