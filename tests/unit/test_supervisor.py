"""The supervisor on histories: events at set times, a clock that jumps, no process."""

from __future__ import annotations

import heapq
import itertools
import math
import signal
from pathlib import Path

import pytest

from tfdist.cluster import Task
from tfdist.launch.events import Asked, Ended, Raised, Started
from tfdist.launch.options import Program
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.supervisor import SERVER_GRACE_S, STRAGGLER_GRACES, Supervisor

CHIEF, W0, W1, W2, PS = (
    Task("chief", 0),
    Task("worker", 0),
    Task("worker", 1),
    Task("worker", 2),
    Task("ps", 0),
)
PS_JOB = (CHIEF, W0, W1, PS)
GRACE_S = 10.0


def spec(task):
    return ProcessSpec(
        task=task,
        program=Program(),
        argv=(),
        env={},
        added=(),
        log_path=Path("log"),
        title=str(task),
    )


class History:
    """Processes, screen and clock at once. Tasks end at any signal unless they are deaf to it."""

    def __init__(self):
        self.now_s = 0.0
        self.signals = []
        self.said = []
        self.failure_shown = None
        self.deaf = {}
        self.delay_s = 0.5
        self.broken = set()
        self.alive = set()
        self._order = itertools.count()
        self._coming = []

    def at(self, at_s, *events):
        """Has `events` seen at one awakening, at `at_s`."""
        heapq.heappush(self._coming, (at_s, next(self._order), events))

    def ends(self, task, at_s, status=0):
        self.at(at_s, Ended(task=task, status=status, at_s=at_s))

    def run(self, tasks, *, is_ps=False, grace_s=GRACE_S):
        supervisor = Supervisor(
            [spec(task) for task in tasks],
            chief=tasks[0],
            is_ps=is_ps,
            grace_s=grace_s,
            processes=self,
            screen=self,
            clock=lambda: self.now_s,
        )
        return supervisor.run()

    def sent(self, task):
        """Returns what was sent to a task, and when."""
        return [(at_s, signum) for at_s, to, signum in self.signals if to == task]

    # the processes

    def start(self, spec):
        if spec.task in self.broken:
            raise OSError(11, "Resource temporarily unavailable")
        self.alive.add(spec.task)
        self.at(self.now_s, Started(task=spec.task, pid=100, at_s=self.now_s))

    def signal(self, task, signum):
        self.signals.append((self.now_s, task, signum))
        if signum in self.deaf.get(task, ()):
            return
        end_s = self.now_s + (0 if signum == signal.SIGKILL else self.delay_s)
        self.at(end_s, Ended(task=task, status=-signum, at_s=end_s))

    def wait(self, timeout_s):
        limit_s = self.now_s + (math.inf if timeout_s is None else timeout_s)
        if not self._coming or self._coming[0][0] > limit_s:
            assert limit_s < math.inf, "the supervisor would sleep for ever"
            self.now_s = limit_s
            return []
        at_s, _, events = heapq.heappop(self._coming)
        self.now_s = max(self.now_s, at_s)
        events = [e for e in events if not isinstance(e, Ended) or e.task in self.alive]
        self.alive -= {event.task for event in events if isinstance(event, Ended)}
        return events

    # the screen

    def say(self, text):
        self.said.append(text)

    def show_failure(self, task, cause):
        self.failure_shown = (task, cause)

    def last_lines(self, task):
        return (f"last line of {task}",)


@pytest.fixture
def history():
    return History()


def record(attempt, task):
    return next(record for record in attempt.tasks if record.task == task)


# done


def test_a_job_whose_tasks_all_exit_0_is_done(history):
    history.ends(W0, 5)
    history.ends(W1, 6)
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 0
    assert attempt.first_failure is None
    assert not history.signals
    assert record(attempt, W1).ended_at_s == 6
    assert record(attempt, W1).status == 0
    assert not record(attempt, W1).stopped


def test_ps_is_stopped_after_the_chief_is_done(history):
    history.ends(CHIEF, 30)
    attempt = history.run(PS_JOB, is_ps=True)
    assert attempt.exit_code == 0
    assert attempt.first_failure is None
    for task in (W0, W1, PS):
        assert history.sent(task) == [(30, signal.SIGTERM)]
        assert record(attempt, task).stopped


def test_servers_that_do_not_hear_sigterm_are_killed_soon_after_the_chief_is_done(history):
    history.deaf[PS] = {signal.SIGTERM}
    history.ends(CHIEF, 30)
    attempt = history.run(PS_JOB, is_ps=True)
    assert attempt.exit_code == 0
    assert history.sent(PS) == [(30, signal.SIGTERM), (30 + SERVER_GRACE_S, signal.SIGKILL)]
    assert not history.said


def test_servers_seen_to_end_together_with_the_chief_are_no_failure(history):
    history.at(30, Ended(task=W0, status=0, at_s=30), Ended(task=CHIEF, status=0, at_s=30))
    attempt = history.run(PS_JOB, is_ps=True)
    assert attempt.exit_code == 0


# failures


def test_the_first_failure_stops_the_others_and_gives_its_exit_code(history):
    history.ends(W1, 5, status=3)
    attempt = history.run([W0, W1, W2])
    assert attempt.exit_code == 3
    assert attempt.first_failure.task == W1
    assert attempt.first_failure.cause == "exit code 3"
    assert attempt.first_failure.at_s == 5
    assert attempt.first_failure.last_lines == ("last line of worker-1",)
    assert history.failure_shown == (W1, "exit code 3")
    assert history.sent(W0) == [(5, signal.SIGTERM)]
    assert history.sent(W1) == []
    assert record(attempt, W0).stopped
    assert not record(attempt, W1).stopped


@pytest.mark.parametrize(
    ("signum", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_a_task_ended_by_a_signal_gives_128_and_its_number(history, signum, name):
    history.ends(W0, 5, status=-signum)
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 128 + signum
    assert attempt.first_failure.cause == f"killed by {name}"


def test_a_task_deaf_to_sigterm_is_killed_after_the_grace(history):
    history.deaf[W0] = {signal.SIGTERM}
    history.ends(W1, 5, status=1)
    attempt = history.run([W0, W1])
    assert history.sent(W0) == [(5, signal.SIGTERM), (5 + GRACE_S, signal.SIGKILL)]
    assert attempt.exit_code == 1
    assert "worker-0" in history.said[0]


def test_later_failures_are_victims(history):
    history.ends(W1, 5, status=7)
    history.ends(W0, 5.1, status=1)
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 7
    assert attempt.first_failure.task == W1


def test_who_raised_first_failed_first_although_its_victim_ended_before_it(history):
    history.at(5, Raised(task=W1, exit_code=4, cause="ValueError: boom", at_s=5))
    history.ends(W0, 6, status=1)
    history.ends(W1, 7, status=4)
    attempt = history.run([W0, W1])
    assert attempt.first_failure.task == W1
    assert attempt.first_failure.cause == "ValueError: boom"
    assert attempt.exit_code == 4
    assert history.sent(W1) == []  # so that its traceback is not cut short


def test_a_cause_that_was_told_is_given_with_the_exit_code(history):
    history.at(5, Raised(task=W0, exit_code=1, cause="ValueError: boom", at_s=5))
    history.ends(W0, 6, status=1)
    attempt = history.run([W0])
    assert attempt.first_failure.cause == "ValueError: boom (exit code 1)"
    assert attempt.first_failure.at_s == 5


def test_of_ends_seen_together_a_killed_task_comes_before_one_that_raised(history):
    history.at(3, Started(task=W2, pid=1, at_s=3))
    history.at(
        5,
        Raised(task=W0, exit_code=1, cause="UnavailableError", at_s=4.9),
        Ended(task=W0, status=1, at_s=5),
        Ended(task=W1, status=-9, at_s=5),
    )
    attempt = history.run([W0, W1, W2])
    assert attempt.first_failure.task == W1


def test_of_ends_seen_together_an_abort_does_not_come_first(history):
    history.at(
        5,
        Ended(task=W1, status=-signal.SIGABRT, at_s=5),
        Raised(task=W0, exit_code=1, cause="ValueError", at_s=4.9),
        Ended(task=W0, status=1, at_s=5),
    )
    attempt = history.run([W0, W1])
    assert attempt.first_failure.task == W0


def test_a_program_that_failed_but_whose_process_stays_is_found_after_the_grace(history):
    history.deaf[W1] = {signal.SIGTERM}
    history.at(5, Raised(task=W1, exit_code=1, cause="ValueError: boom", at_s=5))
    attempt = history.run([W0, W1])
    assert attempt.first_failure.at_s == 5
    assert "does not end" in attempt.first_failure.cause
    assert history.sent(W0) == [(5 + GRACE_S, signal.SIGTERM)]
    assert attempt.exit_code == 1


def test_a_failure_that_was_told_but_ends_with_0_is_none(history):
    history.at(5, Raised(task=W1, exit_code=1, cause="SystemExit", at_s=5))
    history.ends(W1, 6)
    history.ends(W0, 40)
    assert history.run([W0, W1]).exit_code == 0


@pytest.mark.parametrize("task", [W0, PS])
def test_a_server_that_ends_before_the_chief_is_a_failure(history, task):
    history.ends(task, 5)
    attempt = history.run(PS_JOB, is_ps=True)
    assert attempt.exit_code == 1
    assert attempt.first_failure.task == task
    assert "before the chief" in attempt.first_failure.cause
    assert history.sent(CHIEF) == [(5, signal.SIGTERM)]


def test_workers_that_go_on_long_after_their_chief_are_a_failure_that_names_them(history):
    history.ends(W0, 10)
    history.ends(W1, 12)
    attempt = history.run([W0, W1, W2])
    limit_s = 10 + STRAGGLER_GRACES * GRACE_S
    assert history.sent(W2) == [(limit_s, signal.SIGTERM)]
    assert attempt.exit_code == 1
    assert attempt.first_failure.cause == "still running 60 s after worker-0 was done: worker-2"


def test_workers_may_end_some_time_after_their_chief(history):
    history.ends(W0, 10)
    history.ends(W1, 10 + STRAGGLER_GRACES * GRACE_S - 1)
    assert history.run([W0, W1]).exit_code == 0


def test_a_chief_may_go_on_as_long_as_it_likes_after_its_workers(history):
    history.ends(W1, 10)
    history.ends(W0, 10_000)
    assert history.run([W0, W1]).exit_code == 0


def test_a_task_that_cannot_be_started_fails_the_job_and_stops_those_before_it(history):
    history.broken = {W1}
    attempt = history.run([W0, W1, W2])
    assert attempt.exit_code == 1
    assert attempt.first_failure.task == W1
    assert "cannot be started: Resource temporarily unavailable" in attempt.first_failure.cause
    assert history.sent(W0) == [(0, signal.SIGTERM)]
    assert record(attempt, W2).started_at_s is None


def test_an_end_whose_cause_the_starter_knows_says_it(history):
    history.at(5, Ended(task=W0, status=-9, at_s=5, cause="the fork server has ended"))
    assert history.run([W0]).first_failure.cause == "the fork server has ended"


def test_a_process_that_not_even_sigkill_ends_is_named_and_left(history):
    history.deaf[W0] = {signal.SIGTERM, signal.SIGKILL}
    history.ends(W1, 5, status=1)
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 1
    assert history.said[-1] == "cannot be killed: worker-0"
    assert record(attempt, W0).status is None


# requests to stop


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_passed_to_every_task_once(history, signum, code):
    history.at(5, Asked(signum=signum))
    attempt = history.run([W0, W1])
    assert attempt.exit_code == code
    assert attempt.first_failure is None
    for task in (W0, W1):
        assert history.sent(task) == [(5, signum)]


def test_a_second_signal_kills_at_once(history):
    history.deaf = {W0: {signal.SIGINT}, W1: {signal.SIGINT}}
    history.at(5, Asked(signum=signal.SIGINT))
    history.at(6, Asked(signum=signal.SIGINT))
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 130
    assert history.sent(W0) == [(5, signal.SIGINT), (6, signal.SIGKILL)]
    assert history.now_s == 6


def test_after_a_signal_the_grace_is_kept_and_then_tasks_are_killed(history):
    history.deaf[W0] = {signal.SIGTERM}
    history.at(5, Asked(signum=signal.SIGTERM))
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 143
    assert history.sent(W0) == [(5, signal.SIGTERM), (5 + GRACE_S, signal.SIGKILL)]


def test_tasks_that_fail_while_they_are_stopped_are_no_failure(history):
    history.deaf = {W0: {signal.SIGTERM}, W1: {signal.SIGTERM}}
    history.at(5, Asked(signum=signal.SIGTERM))
    history.at(6, Raised(task=W0, exit_code=1, cause="UnavailableError", at_s=6))
    history.ends(W0, 7, status=1)
    history.ends(W1, 8, status=143)
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 143
    assert attempt.first_failure is None


def test_servers_live_until_the_chief_has_saved_and_not_much_longer(history):
    history.deaf = {task: {signal.SIGTERM} for task in PS_JOB}
    history.at(5, Asked(signum=signal.SIGTERM))
    history.ends(CHIEF, 9, status=143)
    attempt = history.run(PS_JOB, is_ps=True)
    assert attempt.exit_code == 143
    assert history.sent(PS) == [
        (5, signal.SIGTERM),
        (9, signal.SIGTERM),
        (9 + SERVER_GRACE_S, signal.SIGKILL),
    ]


def test_a_signal_seen_together_with_an_end_explains_it(history):
    history.at(5, Ended(task=W0, status=-15, at_s=5), Asked(signum=signal.SIGTERM))
    attempt = history.run([W0, W1])
    assert attempt.exit_code == 143
    assert attempt.first_failure is None


def test_a_closed_output_ends_the_job_like_sigpipe(history):
    history.at(5, Asked(signum=signal.SIGPIPE))
    attempt = history.run([W0])
    assert attempt.exit_code == 141
    assert history.sent(W0) == [(5, signal.SIGTERM)]


def test_without_grace_tasks_are_killed_right_after_the_signal(history):
    history.ends(W1, 5, status=1)
    history.run([W0, W1], grace_s=0)
    assert history.sent(W0) == [(5, signal.SIGTERM), (5, signal.SIGKILL)]
