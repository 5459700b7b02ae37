"""The watchdog on histories of beats: whom it blames, when, and when it blames nobody.

A history is a name, the job and what happens, and who is found to hang. A job is its number of
workers, or ``ps``: a chief, two workers and a ps. Numbers are seconds that pass, in which each task
beats once a second and the launcher looks. After the moment come the task, the tasks that are to
print their stacks, and since when it hangs.
"""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.histories import JOBS, parsed, recorded, short, tasks
from tfdist.launch.diagnosis import LATE_S, Watchdog
from tfdist.launch.events import Beat
from tfdist.phases import PendingWork

HISTORIES = """
# a stopped task, which is not asked for its stacks
3: all step 10; 3; w1 silent T; 30
> 120 w1 (w0 w2) since 103: no heartbeat for 17 s, its process is stopped, last report: in phase
> step after 10 steps
# a stopped task before a silent one
3: all step 7; 3; w0 silent S; 4; w1 silent T; 30
> 120 w1 (w0 w2) since 107: no heartbeat for 13 s, its process is stopped, last report: in phase
> step after 7 steps
# one in a callback, not those who wait for it
3: all callback 120; 1; w0,w2 step 120; 30
> 120 w1 (w1 w0 w2) since 100: in phase callback after 120 steps for 20 s
# one that is a step behind
3: all step 120; w1 step 119; 30
> 120 w1 (w1 w0 w2) since 100: in phase step after 119 steps for 20 s
# one that saves
3: all step 120; w2 save 120; 30
> 120 w2 (w2 w0 w1) since 100: in phase save after 120 steps for 20 s
# one that is done
3: all step 120; w1 done 120; 30
> 120 w1 (w1 w0 w2) since 100: in phase done after 120 steps for 20 s
# one that has not come to a sum
3: all sum 120; w1 step 120; 30
> 120 w1 (w1 w0 w2) since 100: in phase step after 120 steps for 20 s
# one that saves while others are at a sum
3: all sum 120; w1 save 120; 30
> 120 w1 (w1 w0 w2) since 100: in phase save after 120 steps for 20 s
# the chief, where none is behind
3: all step 120; 30
> 120 w0 (w0 w1 w2) since 100: in phase step after 120 steps for 20 s, like all 3 tasks
# one that traces, which takes longer
3 startup_s=1: all step 0; w1 trace 0; 90
> 160 w1 (w1 w0 w2) since 100: in phase trace for 60 s
# one that traces while others are at a sum
3 startup_s=1: all sum 0; w1 trace 0; 90
> 160 w1 (w1 w0 w2) since 100: in phase trace for 60 s
# code of the program's own takes as long as it takes
3: all import; 2000; all done; 2000; all serve; 2000; all of_my_own; 2000
> nobody
# one that imports has the startup besides
3: w0,w2 step 0; 100
> 180 w1 (w1 w0 w2) since 100: in phase import for 80 s
# one that has never spoken
3: w1 silent S; 100
> 180 w1 (w1 w0 w2) since 100: no heartbeat for 80 s
# one that has no process
3: w1 silent gone; 100
> 180 w1 (w0 w2) since 100: no heartbeat for 80 s, it has no process
# one whose libraries load
3: 3; w1 silent S; 100
> 183 w1 (w1 w0 w2) since 103: no heartbeat for 80 s, last report: in phase import
# one that became another program
3: 3; w1 silent another; 2000
> nobody
# tasks that have ended
3: all step 3; 2; all ends; 2000
> nobody
# without a timeout
3 hang_s=inf: all step 3; 10000
> nobody
# a chief that stops to do steps
ps: c0 steps; 200; c0 waits; 30
> 320 c0 (c0 w0 w1 p0) since 300: in phase step after 203 steps for 20 s
# servers are not asked for steps
ps: w0,w1,p0 import; 2000; w0,w1,p0 rendezvous; 2000; w0,w1,p0 serve; 2000
> nobody
# a stopped worker of a ps job
ps: 5; w1 silent T; c0 steps; 30
> 125 w1 (c0 w0 p0) since 105: no heartbeat for 20 s, its process is stopped, last report: in phase
> import
# a stopped ps
ps: 5; p0 silent T; c0 steps; 30
> 125 p0 (c0 w0 w1) since 105: no heartbeat for 20 s, its process is stopped, last report: in phase
> import
# a worker that does not do its work unit
ps: 5; w1 owes; c0 steps; 30
> 125 w1 (w1 c0 w0 p0) since 100: its work unit is unfinished after 20 s
# a worker that does not do its first work unit
ps: 5; w1 owes first; c0 steps; 90
> 165 w1 (w1 c0 w0 p0) since 100: its work unit is unfinished after 60 s
# a worker that is started again owes nothing
ps: 5; w1 owes; c0 steps; 30; w1 ends; w1 starts; 5
> 125 w1 (w1 c0 w0 p0) since 100: its work unit is unfinished after 20 s
# not a chief that waits for a work unit
ps: c0 step 7; 1; w0 owes; 30
> 120 w0 (w0 c0 w1 p0) since 100: its work unit is unfinished after 19 s
# after a sleep of the launcher
3: all step 3; 5; asleep 1000; all steps; 60
> nobody
# a task that was stopped before a sleep of the launcher
3: all step 3; 5; w1 silent T; asleep 1000; 30
> 1125 w1 (w0 w2) since 105: no heartbeat for 1020 s, its process is stopped, last report: in phase
> step after 3 steps
# tasks that wait for the launcher
3: all step 3; launcher waits; 200; launcher reads; 30
> 320 w0 (w0 w1 w2) since 100: in phase step after 3 steps for 220 s, like all 3 tasks
"""
HANG_S, STARTUP_S = 20.0, 60.0
WORKERS = tuple(tasks(JOBS["3"]))


class Job:
    """Tasks that beat once a second and a launcher that checks when it is told to."""

    def __init__(self, job="3", *, hang_s=HANG_S, startup_s=STARTUP_S):
        self.now_s = 100.0
        self.tasks = tasks(JOBS[job])
        self.states = dict.fromkeys(self.tasks, "S")
        self.is_held_up = False
        self.doing = {}
        self.enter("import", *self.tasks)
        self.silent, self.stepping = set(), set()
        self.awaited = None
        self.steps = itertools.count(4)
        self.watchdog = Watchdog(
            hang_timeout_s=float(hang_s),
            startup_timeout_s=float(startup_s),
            has_servers=job == "ps",
            chief=self.tasks[0],
            state_of=self.states.get,
            is_held_up=lambda: self.is_held_up,
        )
        for task in self.tasks:
            self.watchdog.started(task, at_s=self.now_s)

    def enter(self, phase, *tasks, step=None):
        for task in tasks or self.tasks:
            self.doing[task] = (phase, step, self.now_s)

    def happens(self, text):
        """Has something happen; returns the hang, if there is one."""
        match text.split(" "):
            case [seconds]:
                return self.run(float(seconds))
            case ["asleep", seconds]:  # the launcher, and beats do not fit into the pipe
                self.now_s += float(seconds)
                return self.watchdog.find_hang(self.now_s)
            case ["launcher", what]:
                self.is_held_up = what == "waits"
            case [names, what, *more]:
                for task in self.tasks if names == "all" else tasks(names):
                    self._does(task, what, more)

    def _does(self, task, what, more):
        match what:
            case "steps":
                self.stepping.add(task)
            case "waits":
                self.stepping.discard(task)
            case "silent":
                self.silent.add(task)
                self.states[task] = {"gone": None, "another": ""}.get(*more, more[0])
            case "owes":
                is_first = more == ["first"]
                self.awaited = PendingWork(task=str(task), since_s=self.now_s, is_first=is_first)
            case "ends":
                self.watchdog.ended(task)
            case "starts":
                self.watchdog.started(task, at_s=self.now_s)
            case phase:
                self.enter(phase, task, step=int(more[0]) if more else None)

    def beat(self):
        for task in set(self.tasks) - self.silent:
            phase, step, since_s = self.doing[task]
            awaited = self.awaited if task.type == "chief" else None
            self.watchdog.beat(
                Beat(
                    task=task, phase=phase, step=step, since_s=since_s, first_step_s=None,
                    at_s=self.now_s, awaited=awaited,
                )
            )  # fmt: skip

    def run(self, seconds, *, work=lambda: None):
        """Lets seconds pass; returns the hang, if there is one."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            work()
            if self.stepping:
                self.enter("step", *self.stepping, step=next(self.steps))
            self.beat()
            if self.now_s >= self.watchdog.next_check_s():
                hang = self.watchdog.find_hang(self.now_s)
                if hang is not None:
                    return hang
        return None


def play(history):
    """Who is found to hang in a history, and when."""
    kind, options, parts = parsed(history)
    job, found = Job(kind, **options), []
    for part in parts:
        if hang := job.happens(part):
            failure, stuck = hang
            about = f"{job.now_s:g} {failure.task} ({' '.join(map(str, stuck))})"
            cause = failure.cause.removeprefix("hangs: ")
            found.append(short(f"{about} since {failure.at_s:g}: {cause}"))
    return " ".join(found) or "nobody"


@recorded(HISTORIES)
def test_history(history, outcome):
    assert play(history) == outcome


@pytest.mark.parametrize("history", ["3 hang_s=inf: 1", "3: all ends"])
def test_the_launcher_sleeps_without_tasks_to_watch(history):
    kind, options, (part,) = parsed(history)
    job = Job(kind, **options)
    job.happens(part)
    assert job.watchdog.next_check_s() == math.inf
    assert job.watchdog.find_hang(job.now_s + 1000) is None


def test_heartbeats_of_an_earlier_start_are_ignored():
    job = Job("1")
    job.now_s += 10
    job.watchdog.started(*job.tasks, at_s=job.now_s + 0.5)
    job.enter("step", step=3)
    job.beat()  # still in the pipe
    job.happens("w0 silent S")
    failure, _ = job.run(STARTUP_S + HANG_S + 2)
    assert failure.cause == "hangs: no heartbeat for 80 s"


def test_a_check_in_time_is_not_a_late_one():
    job = Job("1")
    job.enter("step", step=3)
    while job.watchdog.find_hang(job.now_s) is None:
        job.now_s = job.watchdog.next_check_s() + LATE_S
        job.beat()
        assert job.now_s < 100 + 2 * HANG_S


phases = st.sampled_from(("step", "save", "validate", "callback", "trace"))


@given(
    gaps_s=st.lists(st.floats(0, HANG_S - 2), min_size=1, max_size=20),
    entered=st.lists(st.tuples(st.sampled_from(WORKERS), phases), max_size=40),
    startup_s=st.floats(0, STARTUP_S + HANG_S - 3),
)
def test_a_job_with_heartbeats_and_progress_does_not_hang(gaps_s, entered, startup_s):
    job = Job()
    assert job.run(startup_s) is None
    news = iter(entered)
    for step, gap_s in enumerate(gaps_s):
        job.enter("step", step=step)
        for task, phase in [pair for pair, _ in zip(news, range(3), strict=False)]:
            job.enter(phase, task, step=step)
        assert job.run(gap_s) is None


@given(
    frozen=st.sets(st.sampled_from(WORKERS), min_size=1),
    state=st.sampled_from("TRSDZ"),
    before_s=st.integers(1, 50),
    range_s=st.integers(1, int(HANG_S) - 1),
    phase=phases,
    hang_s=st.floats(2, 100),
)
def test_a_frozen_task_is_named_within_the_timeout(frozen, state, before_s, range_s, phase, hang_s):
    hang_s = max(hang_s, range_s + 4.0)  # silence counts from 3 s on
    job = Job(hang_s=hang_s)

    def work():
        if not job.silent and int(job.now_s) % range_s == 0:
            job.enter(phase, step=next(job.steps))

    job.enter(phase, step=next(job.steps))
    assert job.run(before_s, work=work) is None
    for task in frozen:
        job.happens(f"{short(task)} silent {state}")
    frozen_s = job.now_s
    failure, stuck = job.run(10 * HANG_S, work=work)
    assert failure.task in frozen
    assert job.now_s <= frozen_s + hang_s + 2
    assert set(stuck) == set(WORKERS) - (frozen if state in "TZ" else set())
