"""The supervisor on histories: events at set times, a clock that jumps, no process."""

import heapq
import itertools
import math
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.launch.diagnosis import SETTLE_S, Hang
from tfdist.launch.events import (
    AskForStacks,
    Beat,
    Ended,
    KillOne,
    Raised,
    Signal,
    Start,
    Started,
    StopRequest,
)
from tfdist.launch.state import EVALUATOR, RESTART_GRACE_S, JobState, RestartPolicy
from tfdist.launch.supervisor import (
    SERVER_GRACE_S,
    STACKS_S,
    STRAGGLER_GRACES,
    Supervisor,
)

CHIEF, W0, W1, W2, PS = (
    Task("chief", 0),
    Task("worker", 0),
    Task("worker", 1),
    Task("worker", 2),
    Task("ps", 0),
)
PS_JOB = (CHIEF, W0, W1, PS)
GRACE_S = 10.0


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
        self.gone = set()
        self.alive = set()
        self.started_again = []
        self.stacks_asked = []
        self.killed_alone = []
        self.watched = set()
        self.hang = None
        self.stopped_task = self.absent_task = None
        self._order = itertools.count()
        self._coming = []

    def at(self, at_s, *events):
        """Has `events` seen at one awakening, at `at_s`."""
        heapq.heappush(self._coming, (at_s, next(self._order), events))

    def happens(self, *events):
        """Has `events` happen, each a moment and what is seen then; of one moment together."""
        for at_s, same in itertools.groupby(events, key=lambda event: event[0]):
            self.at(at_s, *(event for _, event in same))

    def ends(self, task, at_s, status=0):
        self.happens(ended(task, at_s, status))

    def beats(self, task, at_s, *, step, first_step_s=None):
        self.at(
            at_s,
            Beat(
                task=task,
                phase="step",
                step=step,
                since_s=at_s - 0.25,
                first_step_s=first_step_s,
                at_s=at_s,
            ),
        )

    def hangs(self, at_s, task, *stuck, since_s=0.0):
        """Has the watchdog find a task that hangs, at `at_s`."""
        hang = Hang(task=task, cause="hangs: silent", stuck=stuck, since_s=since_s)
        self.hang = (at_s, hang)

    def run(self, tasks, *, is_ps=False, grace_s=GRACE_S, max_restarts=0, min_workers=None):
        state = JobState(
            job_tasks=tasks,
            logs=Path(),
            is_ps=is_ps,
            grace_s=grace_s,
            min_workers=min_workers,
            policy=RestartPolicy(max_restarts=max_restarts, window_s=3600),
            watchdog=self,
            now_s=self.now_s,
        )
        supervisor = Supervisor(state, processes=self, screen=self, clock=lambda: self.now_s)
        supervisor.run()
        self.stacks = supervisor.stacks
        return state

    def sent(self, task):
        """Returns what was sent to a task, and when."""
        return [(at_s, signum) for at_s, to, signum in self.signals if to == task]

    # the processes

    def perform(self, action):
        match action:
            case Start(task=task, restart=restart):
                return self.start(task, restart)
            case Signal(task=task, signum=signum):
                self.signal(task, signum)
            case AskForStacks(task=task):
                self.stacks_asked.append((self.now_s, task))
            case KillOne(task=task):
                self.kill_one(task)

    def start(self, task, restart):
        if task in self.broken:
            return Ended(task=task, status=1, at_s=self.now_s, cause="cannot be started: no room")
        self.started_again += [(task, restart)] * (restart > 0)
        self.alive.add(task)
        self.at(self.now_s, Started(task=task, pid=100, at_s=self.now_s))

    def signal(self, task, signum):
        self.signals.append((self.now_s, task, signum))
        if signum in self.deaf.get(task, ()):
            return
        end_s = self.now_s + (0 if signum == signal.SIGKILL else self.delay_s)
        self.at(end_s, Ended(task=task, status=-signum, at_s=end_s))

    def kill_one(self, task):
        self.killed_alone.append((self.now_s, task))
        if task in self.alive:
            self.at(self.now_s, Ended(task=task, status=-signal.SIGKILL, at_s=self.now_s))

    def can_start(self, task):
        return task not in self.gone

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

    # the watchdog

    def started(self, task, *, at_s):
        self.watched.add(task)

    def ended(self, task):
        self.watched.discard(task)

    def beat(self, beat):
        assert beat.task in self.watched

    def next_check_s(self):
        return self.hang[0] if self.hang else math.inf

    def find_hang(self, now_s):
        hang, self.hang = self.hang[1], None
        return hang

    def stopped(self):
        return self.stopped_task

    def absent(self, now_s):
        return self.absent_task and (self.absent_task, f"has not started by {now_s}")

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
    return next(record for record in attempt.records if record.task == task)


def raised(task, at_s, cause="ValueError: boom", *, exit_code=1, step=None):
    return at_s, Raised(task=task, exit_code=exit_code, cause=cause, at_s=at_s, step=step)


def ended(task, at_s, status=0, *, cause=""):
    return at_s, Ended(task=task, status=status, at_s=at_s, cause=cause)


def asked(signum, at_s):
    return at_s, StopRequest(signum=signum)


# done


def test_a_job_whose_tasks_all_exit_0_is_done(history):
    history.ends(W0, 5)
    history.ends(W1, 6)
    attempt = history.run([W0, W1])
    assert (attempt.exit_code, attempt.failure) == (0, None)
    assert not history.signals
    assert record(attempt, W1).ended_at_s == 6
    assert record(attempt, W1).status == 0
    assert not record(attempt, W1).stopped


def test_servers_are_ended_after_the_chief_is_done_and_soon_killed(history):
    history.deaf[PS] = {signal.SIGTERM}
    history.ends(CHIEF, 30)
    attempt = history.run(PS_JOB, is_ps=True)
    assert (attempt.exit_code, attempt.failure) == (0, None)
    assert history.sent(W0) == history.sent(W1) == [(30, signal.SIGTERM)]
    assert history.sent(PS) == [(30, signal.SIGTERM), (30 + SERVER_GRACE_S, signal.SIGKILL)]
    assert record(attempt, W0).stopped
    assert not history.said


@pytest.mark.parametrize(
    ("tasks", "events"),
    [
        ([W0, W1], [ended(W0, 10), ended(W1, 10 + STRAGGLER_GRACES * GRACE_S - 1)]),
        ([W0, W1], [ended(W1, 10), ended(W0, 10_000)]),
        ([W0, W1], [raised(W1, 5, "SystemExit"), ended(W1, 6), ended(W0, 40)]),
        (PS_JOB, [ended(W0, 30), ended(CHIEF, 30)]),
    ],
    ids=["after the chief", "long before the chief", "told but ended with 0", "with the chief"],
)
def test_it_is_no_failure_to_end(history, tasks, events):
    history.happens(*events)
    assert history.run(tasks, is_ps=CHIEF in tasks).exit_code == 0


# failures

LOST = "UnavailableError: Graph execution error: ... Connection reset by peer"
WAITED = "worker-0: waited 60 s of 60 s for worker-1"
ABORT, KILL, SEGV = -signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("events", "code", "task", "cause"),
    [
        ([ended(W1, 5, SEGV)], 139, W1, "killed by SIGSEGV"),
        ([ended(W1, 5, KILL)], 137, W1, "killed by SIGKILL, not by the launcher"),
        ([ended(W1, 5, 7), ended(W0, 5.1, 1)], 7, W1, "exit code 7"),
        (
            [raised(W1, 5, exit_code=4), ended(W0, 6, 1), ended(W1, 7, 4)],
            *(4, W1, "ValueError: boom"),
        ),
        ([raised(W0, 5), ended(W0, 6, 1)], 1, W0, "ValueError: boom (exit code 1)"),
        (
            [(5, raised(W0, 4.9, "UnavailableError")[1]), ended(W0, 5, 1), ended(W1, 5, KILL)],
            *(137, W1, "killed by SIGKILL, not by the launcher"),
        ),
        (
            [ended(W1, 5, ABORT), (5, raised(W0, 4.9, "ValueError")[1]), ended(W0, 5, 1)],
            *(1, W0, "ValueError (exit code 1)"),
        ),
        ([ended(W0, 5, KILL, cause="the fork server has ended")], 137, W0, "the fork server"),
        (
            [raised(W0, 5, LOST), ended(W0, 5.1, 1), ended(W1, 5.1 + SETTLE_S / 2, KILL)],
            *(137, W1, "killed by SIGKILL, not by the launcher"),
        ),
        (
            [raised(W0, 5, LOST), ended(W0, 5.1, 1), raised(W1, 5.2), ended(W1, 6, 1)],
            *(1, W1, "ValueError: boom"),
        ),
        (
            [raised(W0, 5, LOST), ended(W0, 5.1, 1), ended(W1, 5.2, ABORT)],
            *(134, W1, "killed by SIGABRT"),
        ),
        (
            [raised(W0, 5, WAITED, exit_code=75), ended(W0, 5.1, 75), ended(W1, 5.2, SEGV)],
            *(139, W1, "killed by SIGSEGV"),
        ),
    ],
)
def test_the_root_cause_gives_the_exit_code(history, events, code, task, cause):
    history.happens(*events)
    attempt = history.run([W0, W1, W2])
    assert (attempt.exit_code, attempt.failure.task) == (code, task)
    assert attempt.failure.cause.startswith(cause)
    assert history.failure_shown == (task, attempt.failure.cause)


def test_the_first_failure_stops_the_others(history):
    history.deaf[W0] = {signal.SIGTERM}
    history.ends(W1, 5, status=3)
    attempt = history.run([W0, W1, W2])
    assert attempt.failure.at_s == 5
    assert history.sent(W0) == [(5, signal.SIGTERM), (5 + GRACE_S, signal.SIGKILL)]
    assert history.sent(W1) == []
    assert record(attempt, W0).stopped
    assert not record(attempt, W1).stopped
    assert history.said == ["killed, as still running: worker-0"]


def test_a_program_that_failed_but_whose_process_stays_is_found_after_the_grace(history):
    history.deaf[W1] = {signal.SIGTERM}
    history.happens(raised(W1, 5))
    attempt = history.run([W0, W1])
    assert (attempt.exit_code, attempt.failure.at_s) == (1, 5)
    assert "does not end" in attempt.failure.cause
    assert history.sent(W0) == [(5 + GRACE_S, signal.SIGTERM)]


@pytest.mark.parametrize("task", [W0, PS])
def test_a_server_that_ends_before_the_chief_is_a_failure(history, task):
    history.ends(task, 5)
    attempt = history.run(PS_JOB, is_ps=True)
    assert (attempt.exit_code, attempt.failure.task) == (1, task)
    assert "before the chief" in attempt.failure.cause
    assert history.sent(CHIEF) == [(5, signal.SIGTERM)]


@pytest.mark.parametrize("others", [(), (EVALUATOR,)])
def test_workers_that_go_on_long_after_their_chief_are_a_failure_that_names_them(history, others):
    history.ends(W0, 10)
    history.ends(W1, 12)
    attempt = history.run([W0, *others, W1, W2])
    assert history.sent(W2) == [(10 + STRAGGLER_GRACES * GRACE_S, signal.SIGTERM)]
    assert attempt.exit_code == 1
    assert attempt.failure.cause == "still running 60 s after worker-0 was done: worker-2"


def test_a_task_that_cannot_be_started_fails_the_job_and_stops_those_before_it(history):
    history.broken = {W1}
    attempt = history.run([W0, W1, W2])
    assert (attempt.exit_code, attempt.failure.task) == (1, W1)
    assert "cannot be started: no room" in attempt.failure.cause
    assert history.sent(W0) == [(0, signal.SIGTERM)]
    assert record(attempt, W2).started_at_s is None


def test_a_process_that_not_even_sigkill_ends_is_named_and_takes_the_restart_back(history):
    history.deaf[W0] = {signal.SIGTERM, signal.SIGKILL}
    history.ends(W1, 5, status=1)
    attempt = history.run([W0, W1], max_restarts=3)
    assert (attempt.exit_code, attempt.restart) == (1, "")
    assert history.said[-1] == "cannot be killed: worker-0"
    assert record(attempt, W0).status is None


@pytest.mark.parametrize(
    ("cause", "exit_code", "is_there", "expected"),
    [
        (LOST, 1, True, "stopped (SIGSTOP), and worker-0 lost it: UnavailableError"),
        (WAITED, 75, True, "stopped (SIGSTOP), and worker-0 lost it: worker-0: waited"),
        (WAITED, 75, False, f"has not started by 5, and worker-0 gave up: {WAITED}"),
        ("ValueError: boom", 1, True, None),
    ],
)
def test_who_lost_or_missed_a_peer_names_it(history, cause, exit_code, is_there, expected):
    if is_there:
        history.stopped_task = W1
    else:
        history.absent_task = W1
    history.happens(raised(W0, 5, cause, exit_code=exit_code), ended(W0, 6, exit_code))
    attempt = history.run([W0, W1])
    assert attempt.exit_code == exit_code
    assert attempt.failure.task == (W1 if expected else W0)
    assert attempt.failure.cause.startswith(expected or cause)


@pytest.mark.parametrize(("tasks", "settle_s"), [([W0, W1], SETTLE_S), ([W0], 0)])
def test_a_secondary_failure_without_a_culprit_is_named_after_a_moment(history, tasks, settle_s):
    history.happens(raised(W0, 5, LOST), ended(W0, 5.1, 1))
    attempt = history.run(tasks)
    assert attempt.failure.task == W0
    assert history.sent(W1) == [(5.1 + settle_s, signal.SIGTERM)][: len(tasks) - 1]
    assert attempt.failure.detect_s == pytest.approx(0.1 + settle_s)


def test_a_failure_knows_the_last_step_that_any_task_told_and_the_attempt_its_first(history):
    history.beats(W0, 3, step=20, first_step_s=2.5)
    history.beats(W1, 3.5, step=18, first_step_s=2.75)
    history.ends(W1, 5, status=1)
    attempt = history.run([W0, W1])
    assert (attempt.failure.step, attempt.first_step_s) == (20, 2.5)


def test_a_program_that_fails_tells_the_step_itself(history):
    history.beats(W1, 3, step=18)
    history.happens(raised(W1, 5, step=31), ended(W1, 5.5, 1))
    assert history.run([W0, W1]).failure.step == 31


# requests to stop


@pytest.mark.parametrize(
    ("signum", "passed_on", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGHUP, signal.SIGTERM, 129),
        (signal.SIGUSR1, signal.SIGUSR1, 143),
        (signal.SIGPIPE, signal.SIGTERM, 141),
    ],
)
def test_a_signal_is_passed_to_every_task_once(history, signum, passed_on, code):
    history.happens(asked(signum, 5))
    attempt = history.run([W0, W1], max_restarts=3)
    assert (attempt.exit_code, attempt.failure, attempt.restart) == (code, None, "")
    assert history.sent(W0) == history.sent(W1) == [(5, passed_on)]


def test_a_second_signal_kills_at_once(history):
    history.deaf = {W0: {signal.SIGINT}, W1: {signal.SIGINT}}
    history.happens(asked(signal.SIGINT, 5), asked(signal.SIGINT, 6))
    assert history.run([W0, W1]).exit_code == 130
    assert history.sent(W0) == [(5, signal.SIGINT), (6, signal.SIGKILL)]
    assert history.now_s == 6


def test_servers_live_until_the_chief_has_saved_and_not_much_longer(history):
    history.deaf = {task: {signal.SIGTERM} for task in PS_JOB}
    history.happens(asked(signal.SIGTERM, 5), raised(W1, 6), ended(W1, 6, KILL))
    history.ends(CHIEF, 9, status=143)
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=3)
    assert (attempt.exit_code, attempt.failure, attempt.restarts) == (143, None, [])
    assert history.sent(CHIEF) == [(5, signal.SIGTERM)]
    assert history.sent(PS) == [(9, signal.SIGTERM), (9 + SERVER_GRACE_S, signal.SIGKILL)]
    assert history.said == ["SIGTERM: ending 4 tasks within 10 s (a second signal kills at once)"]


def test_a_signal_seen_together_with_an_end_explains_it(history):
    history.happens(ended(W0, 5, -15), asked(signal.SIGTERM, 5))
    attempt = history.run([W0, W1])
    assert (attempt.exit_code, attempt.failure) == (143, None)


def test_without_grace_tasks_are_killed_right_after_the_signal(history):
    history.ends(W1, 5, status=1)
    history.run([W0, W1], grace_s=0)
    assert history.sent(W0) == [(5, signal.SIGTERM), (5, signal.SIGKILL)]


# restarts of the whole job


@pytest.mark.parametrize("grace_s", [0.25, 600])
def test_a_failed_job_is_worth_another_attempt_and_its_victims_get_little_time(history, grace_s):
    history.deaf[W0] = {signal.SIGTERM}
    history.ends(W1, 5, status=KILL)
    attempt = history.run([W0, W1], grace_s=grace_s, max_restarts=3)
    assert attempt.restart == "restart 1 of 3 within 3600 s"
    assert attempt.exit_code == 137
    assert history.sent(W0)[-1] == (5 + min(grace_s, RESTART_GRACE_S), signal.SIGKILL)
    assert not history.said


def test_a_failure_that_is_not_worth_it_keeps_the_grace_and_is_explained(history):
    history.deaf[W0] = {signal.SIGTERM}
    history.ends(W1, 5, status=2)
    attempt = history.run([W0, W1], max_restarts=3)
    assert not attempt.restart
    assert history.sent(W0)[-1] == (5 + GRACE_S, signal.SIGKILL)
    assert history.said[0] == (
        "not started again: exit code 2 is a mistake that would be made again"
    )


def test_a_request_to_stop_while_secondary_failures_end_takes_the_restart_back(history):
    history.deaf[W0] = {signal.SIGTERM}
    history.ends(W1, 5, status=KILL)
    history.happens(asked(signal.SIGTERM, 5.25))
    attempt = history.run([W0, W1], max_restarts=3)
    assert (attempt.exit_code, attempt.restart, attempt.failure.task) == (143, "", W1)
    assert history.said == ["SIGTERM: not started again"]
    assert history.sent(W0) == [(5, signal.SIGTERM), (6, signal.SIGKILL)]


def test_a_second_request_while_secondary_failures_end_kills_at_once(history):
    history.deaf[W0] = {signal.SIGTERM}
    history.ends(W1, 5, status=KILL)
    history.happens(asked(signal.SIGINT, 5.25), asked(signal.SIGINT, 5.5))
    assert history.run([W0, W1], max_restarts=3).exit_code == 130
    assert history.sent(W0)[-1] == (5.5, signal.SIGKILL)


# restarts of a worker alone


def test_two_workers_that_die_at_once_both_return(history):
    history.beats(CHIEF, 4, step=7)
    history.happens(ended(W0, 5, KILL), ended(W1, 5, KILL), ended(CHIEF, 30))
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=2)
    assert (attempt.exit_code, attempt.failure) == (0, None)
    assert {(f.task, f.step, f.at_s) for f in attempt.restarts} == {(W0, 7, 5), (W1, 7, 5)}
    assert history.killed_alone == [(5, W0), (5, W1)]  # what they have left behind
    assert history.started_again == [(W0, 1), (W1, 1)]
    assert history.said[-1] == (
        "worker-1 failed: killed by SIGKILL, not by the launcher; started again alone, "
        "restart 2 of 2 within 3600 s: worker-1.restart-1.log"
    )
    records = [r for r in attempt.records if r.task == W1]
    assert [(r.restart, r.status, r.stopped) for r in records] == [
        *((0, KILL, False), (1, -signal.SIGTERM, True))
    ]


def test_a_worker_that_fails_the_same_way_twice_ends_the_job(history):
    history.ends(W1, 5, status=1)
    history.ends(W1, 6, status=1)
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=9)
    assert (attempt.exit_code, attempt.restart) == (1, "")
    assert "the same failure" in history.said[-1]


@pytest.mark.parametrize("failed", [[CHIEF], [PS], [W0, PS]])
def test_a_ps_job_without_chief_or_ps_is_started_again_whole(history, failed):
    history.happens(*(ended(task, 5, KILL) for task in failed))
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=1)
    assert attempt.failure.task == failed[0]
    assert attempt.restart
    assert not attempt.restarts


def test_a_worker_whose_process_does_not_end_is_killed_and_returns(history):
    history.happens(raised(W1, 5), ended(CHIEF, 40))
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=1)
    assert attempt.exit_code == 0
    assert history.killed_alone[0] == (5 + GRACE_S, W1)
    assert history.started_again == [(W1, 1)]
    assert "does not end" in attempt.restarts[0].cause


def test_what_a_worker_raises_while_it_is_killed_is_no_failure_of_the_next_process(history):
    history.kill_one = lambda task: None  # it takes its time
    still = 5 + GRACE_S + 0.5
    history.happens(raised(W1, 5), raised(W1, still, "KeyError"), ended(W1, still + 1, KILL))
    history.ends(CHIEF, still + 5 * GRACE_S)
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=1)
    assert (attempt.exit_code, len(attempt.restarts), attempt.lost) == (0, 1, [])
    assert history.started_again == [(W1, 1)]


def test_a_worker_that_cannot_be_started_again_ends_the_job(history):
    def broken_from_now(task):
        history.broken = {W1}

    history.kill_one = broken_from_now  # called before the new start
    history.ends(W1, 5, status=KILL)
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=1)
    assert attempt.exit_code == 1
    assert "cannot be started" in attempt.failure.cause


def test_a_worker_whose_host_is_gone_is_not_started_again_alone(history):
    history.gone = {W1}
    history.ends(W1, 5, status=75)
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=3)
    assert (attempt.exit_code, attempt.restarts) == (75, [])
    assert attempt.restart


# a ps job that goes on without a worker


def test_a_ps_job_that_trains_goes_on_without_a_worker_and_says_so(history):
    history.beats(CHIEF, 4, step=7)
    history.happens(ended(W1, 5, KILL), ended(CHIEF, 30))
    attempt = history.run(PS_JOB, is_ps=True)
    assert (attempt.exit_code, attempt.failure) == (0, None)
    assert history.sent(W0) == [(30, signal.SIGTERM)]
    (lost,) = attempt.lost
    assert (lost.task, lost.at_s, lost.step) == (W1, 5, 7)
    assert history.killed_alone == [(5, W1)]  # what it has left behind
    assert history.said == [
        "worker-1 failed: killed by SIGKILL, not by the launcher; going on with worker-0",
        "done without worker-1",
    ]


def test_the_end_of_the_last_worker_ends_the_job_by_the_name_of_the_first(history):
    history.beats(CHIEF, 4, step=7)
    history.happens(ended(W1, 5, SEGV), ended(W0, 25, KILL))
    attempt = history.run(PS_JOB, is_ps=True)
    assert (attempt.exit_code, attempt.failure.task) == (139, W1)
    assert history.failure_shown == (W1, "killed by SIGSEGV")
    assert "worker-0 failed: killed by SIGKILL, not by the launcher; no worker is left" in (
        history.said
    )
    assert history.sent(CHIEF) == [(25, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("tasks", "events", "code"),
    [
        (PS_JOB, [ended(W0, 5, KILL), ended(W1, 5, KILL)], 137),
        (PS_JOB, [ended(CHIEF, 5, KILL)], 137),
        (PS_JOB, [ended(PS, 5, KILL)], 137),
        ((CHIEF, W0, W1, W2, PS), [ended(W1, 5, KILL), ended(W0, 6, 2)], 2),
        ([W0, W1, W2], [ended(W1, 5, KILL)], 137),
        ((*PS_JOB, EVALUATOR), [ended(EVALUATOR, 5, 2)], 2),
    ],
    ids=["all workers", "chief", "ps", "a mistake", "multiworker", "a mistake of an evaluator"],
)
def test_without_these_a_job_that_trains_does_not_go_on(history, tasks, events, code):
    history.beats(tasks[0], 4, step=7)
    history.happens(*events)
    assert history.run(tasks, is_ps=CHIEF in tasks).exit_code == code


@pytest.mark.parametrize(("min_workers", "code"), [(None, 1), (2, 1), (1, 0)])
def test_before_the_first_step_enough_workers_must_be_left(history, min_workers, code):
    history.happens(ended(W1, 5, 1), ended(CHIEF, 30))
    attempt = history.run(PS_JOB, is_ps=True, min_workers=min_workers)
    assert attempt.exit_code == code
    assert len(attempt.lost) == 1 - code


@pytest.mark.parametrize("min_workers", [None, 1])
def test_an_error_that_every_worker_raises_at_the_start_ends_the_job_at_once(history, min_workers):
    for at_s, task in ((5.0, W0), (5.2, W1)):
        history.happens(raised(task, at_s), ended(task, at_s + 0.1, 1))
    attempt = history.run(PS_JOB, is_ps=True, min_workers=min_workers)
    assert (attempt.exit_code, attempt.failure.task) == (1, W0)
    assert attempt.failure.cause == "ValueError: boom (exit code 1)"
    assert history.sent(CHIEF)[0][0] <= 5.3


def test_workers_return_while_they_may_and_are_done_without_after_that(history):
    history.beats(CHIEF, 4, step=7)
    history.happens(ended(W1, 5, KILL), ended(W0, 6, 1), ended(CHIEF, 30))
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=1)
    assert attempt.exit_code == 0
    assert ([f.task for f in attempt.restarts], [f.task for f in attempt.lost]) == ([W1], [W0])
    assert history.said[1] == (
        "worker-0 failed: exit code 1; going on with worker-1"
        " (not started again: the one restart within 3600 s used up)"
    )


# an evaluator

WITH_EVALUATOR = (*PS_JOB, EVALUATOR)


@pytest.mark.parametrize(
    ("events", "end_s"),
    [
        ([ended(CHIEF, 30), ended(W0, 36), ended(EVALUATOR, 40)], 40),  # W0: the chief is gone
        ([ended(EVALUATOR, 20), ended(CHIEF, 30)], 30),
    ],
)
def test_the_servers_go_on_until_chief_and_evaluator_are_done(history, events, end_s):
    history.happens(*events)
    attempt = history.run(WITH_EVALUATOR, is_ps=True)
    assert (attempt.exit_code, attempt.failure, attempt.lost) == (0, None, [])
    assert history.sent(EVALUATOR) == []
    assert history.sent(PS) == [(end_s, signal.SIGTERM)]
    assert not history.said


@pytest.mark.parametrize("is_ps", [True, False])
def test_an_evaluator_that_takes_too_long_after_the_chief_is_done_without(history, is_ps):
    tasks = WITH_EVALUATOR if is_ps else (W0, W1, EVALUATOR)
    history.deaf[EVALUATOR] = {signal.SIGTERM}
    history.happens(ended(tasks[0], 30), ended(W1, 30))
    attempt = history.run(tasks, is_ps=is_ps)
    assert attempt.exit_code == 0
    (lost,) = attempt.lost
    assert lost.cause == f"still running 60 s after {tasks[0]} was done"
    limit_s = 30 + STRAGGLER_GRACES * GRACE_S
    assert history.sent(EVALUATOR) == [
        (limit_s, signal.SIGTERM),
        (limit_s + SERVER_GRACE_S, signal.SIGKILL),
    ]


@pytest.mark.parametrize("is_ps", [True, False])
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_end_of_an_evaluator_does_not_end_the_training(history, is_ps, max_restarts):
    tasks = WITH_EVALUATOR if is_ps else (W0, W1, EVALUATOR)
    history.beats(tasks[0], 4, step=7)
    history.happens(ended(EVALUATOR, 5, KILL), ended(tasks[0], 30), ended(W1, 30))
    history.happens(ended(EVALUATOR, 31))
    attempt = history.run(tasks, is_ps=is_ps, max_restarts=max_restarts)
    assert attempt.exit_code == 0
    assert (len(attempt.restarts), len(attempt.lost)) == (max_restarts, 1 - max_restarts)
    if not max_restarts:
        assert history.said[0].endswith("; going on without it")


def test_what_an_evaluator_raises_before_the_first_step_ends_the_job(history):
    history.ends(EVALUATOR, 5, status=1)
    attempt = history.run(WITH_EVALUATOR, is_ps=True)
    assert (attempt.exit_code, attempt.failure.task) == (1, EVALUATOR)


def test_an_evaluator_that_fails_on_the_last_checkpoint_is_reported(history):
    history.beats(CHIEF, 4, step=7)
    history.happens(ended(CHIEF, 30), ended(EVALUATOR, 32, 1))
    attempt = history.run(WITH_EVALUATOR, is_ps=True)
    assert attempt.exit_code == 0
    assert [lost.task for lost in attempt.lost] == [EVALUATOR]
    assert history.sent(PS) == [(32, signal.SIGTERM)]


# hangs


def test_a_task_that_hangs_is_a_failure_after_the_stacks_were_asked_for(history):
    history.deaf[W1] = {signal.SIGTERM}
    history.beats(W0, 19, step=7)
    history.hangs(20, W1, W0, since_s=3)
    attempt = history.run([W0, W1], max_restarts=1)
    assert history.stacks_asked == [(20, W0)]
    assert history.said[0] == "worker-1: hangs: silent; the stacks of worker-0:"
    failure = attempt.failure
    assert (failure.task, failure.cause, failure.step) == (W1, "hangs: silent", 7)
    assert (failure.at_s, failure.detect_s) == (3, 17)
    assert history.stacks == {W0: ("last line of worker-0",)}
    assert history.sent(W0) == [(20 + STACKS_S, signal.SIGTERM)]
    assert history.sent(W1)[-1] == (20 + STACKS_S + RESTART_GRACE_S, signal.SIGKILL)
    assert attempt.exit_code == 1
    assert attempt.restart


def test_tasks_that_end_instead_of_printing_stacks_do_not_hide_the_hang(history):
    history.hangs(20, W1, W0, W1)
    history.happens(ended(W0, 20.1, -signal.SIGQUIT), ended(W1, 20.1, -signal.SIGQUIT))
    attempt = history.run([W0, W1], max_restarts=1)
    assert attempt.failure.cause == "hangs: silent"
    assert attempt.restart


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_worker_that_hangs_is_killed_and_the_others_are_not_disturbed(history, max_restarts):
    history.beats(CHIEF, 4, step=7)
    history.hangs(20, W1, CHIEF, W1)
    history.ends(CHIEF, 40)
    attempt = history.run(PS_JOB, is_ps=True, max_restarts=max_restarts)
    assert attempt.exit_code == 0
    assert history.stacks_asked == [(20, W1)]
    assert history.killed_alone[0] == (20 + STACKS_S, W1)
    (failure,) = attempt.restarts if max_restarts else attempt.lost
    assert failure.cause == "hangs: silent"


def test_a_worker_that_is_being_killed_counts_for_nobody(history):
    history.beats(CHIEF, 4, step=7)
    history.kill_one = lambda task: None  # it takes its time
    history.hangs(20, W1, W1)
    history.ends(W0, 21, status=KILL)
    assert history.run(PS_JOB, is_ps=True).exit_code == 137


def test_a_request_to_stop_while_stacks_are_printed_comes_first(history):
    history.hangs(20, W1, W0)
    history.happens(asked(signal.SIGTERM, 20.1))
    attempt = history.run([W0, W1], max_restarts=1)
    assert (attempt.exit_code, attempt.failure) == (143, None)


# anything at all

WHAT = st.sampled_from([0, 1, 2, 75, KILL, ABORT, "raised", "step", "grace", "wait"])


@given(
    is_ps=st.booleans(),
    what=st.lists(st.tuples(st.integers(0, 4), WHAT), max_size=12),
    max_restarts=st.integers(0, 2),
    min_workers=st.sampled_from([None, 1]),
    stop_s=st.sampled_from([0.1, 1000]),
)
def test_whatever_happens_every_process_ends_and_is_reported(
    is_ps, what, max_restarts, min_workers, stop_s
):
    history, at_s = History(), 1.0
    history.kill_one = lambda task: history.ends(task, history.now_s + 1, KILL)
    tasks = WITH_EVALUATOR if is_ps else (W0, W1, W2, EVALUATOR)
    for index, event in what:
        task = tasks[index % len(tasks)]
        at_s += {"wait": 1000, "grace": GRACE_S}.get(event, 0.1)
        if event == "step":
            history.beats(task, at_s, step=index)
        elif event == "raised":
            history.happens(raised(task, at_s))
        elif event not in ("wait", "grace"):
            history.ends(task, at_s, event)
    history.happens(asked(signal.SIGTERM, at_s + stop_s))
    attempt = history.run(tasks, is_ps=is_ps, max_restarts=max_restarts, min_workers=min_workers)
    assert not history.alive
    assert len(history.started_again) <= max_restarts
    assert all(record.status is not None for record in attempt.records)
    assert attempt.exit_code or not attempt.failure
