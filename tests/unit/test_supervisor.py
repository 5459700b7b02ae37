"""The supervisor on histories: events at set times, a clock that jumps, no process.

A history is a name, the job and what happens, and what is done about it. A job is its number of
workers, or ``ps``: a chief, two workers and a ps. Tasks have short names, such as w0. They end half
a second after a signal, at once when they are killed; `deaf` ones hear only SIGKILL, and `undead`
ones not even that. A task that `fails` says so and ends 0.1 s later.
"""

import heapq
import itertools
import math
import signal
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.histories import JOBS, job_state, parsed, recorded, short, tasks
from tfdist.launch.diagnosis import Failure
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
from tfdist.launch.state import RestartPolicy
from tfdist.launch.supervisor import Supervisor

HISTORIES = """
Done
# all tasks exit 0
2: 5 w0 ends 0; 6 w1 ends 0
> 6 exit 0
# servers are ended after the chief, and soon killed
ps deaf=p0: 30 c0 ends 0
> 30 SIGTERM w0 w1 p0; 33 SIGKILL p0; exit 0
# a worker that ends long before the chief
2: 10 w1 ends 0; 10000 w0 ends 0
> 10000 exit 0
# one that has told a failure but ends with 0
2: 5 w1 raises SystemExit; 6 w1 ends 0; 40 w0 ends 0
> 40 exit 0
# a worker that ends with the chief
ps: 30 w0 ends 0; 30 c0 ends 0
> 30 SIGTERM w1 p0; 30.5 exit 0

The root cause
# a crash
3: 5 w1 ends SEGV
> 5 failed w1: killed by SIGSEGV; SIGTERM w0 w2; 5.5 exit 139
# an exit code, and one that follows
3: 5 w1 ends 7; 5.1 w0 ends 1
> 5 failed w1: exit code 7; SIGTERM w0 w2; 5.5 exit 7
# an error, and an end that comes before its own
3: 5 w1 raises ValueError code 4; 6 w0 ends 1; 7 w1 ends 4
> 6 failed w1: ValueError; SIGTERM w2; 7 exit 4
# a kill that is seen with an error of before
3: 5 w0 raises UnavailableError at 4.9; 5 w0 ends 1; 5 w1 ends KILL
> 5 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w2; 5.5 exit 137
# an abort that is seen with an error of before
3: 5 w1 ends ABRT; 5 w0 raises ValueError at 4.9; 5 w0 ends 1
> 5 failed w0: ValueError (exit code 1); SIGTERM w2; 5.5 exit 1
# an end of which the launcher knows more
3: 5 w0 ends KILL the fork server exited
> 5 failed w0: the fork server exited; SIGTERM w1 w2; 5.5 exit 137
# a lost peer before its own end
3: 5 w0 fails LOST; 5.35 w1 ends KILL
> 5.35 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w2; 5.85 exit 137
# a lost peer before its own error
3: 5 w0 fails LOST; 5.2 w1 raises ValueError; 6 w1 ends 1
> 5.2 failed w1: ValueError; SIGTERM w2; 6 exit 1
# a lost peer before its abort
3: 5 w0 fails LOST; 5.2 w1 ends ABRT
> 5.6 failed w1: killed by SIGABRT; SIGTERM w2; 6.1 exit 134
# a missing peer before its crash
3: 5 w0 fails WAITED code 75; 5.2 w1 ends SEGV
> 5.2 failed w1: killed by SIGSEGV; SIGTERM w2; 5.7 exit 139
# a lost peer that nobody explains
2: 5 w0 fails LOST
> 5.6 failed w0: LOST (exit code 1); SIGTERM w1; 6.1 exit 1
# a lost peer of the last task
1: 5 w0 fails LOST
> 5.1 failed w0: LOST (exit code 1); exit 1

The end of the others
# the first failure stops the others
3 deaf=w0: 5 w1 ends 3
> 5 failed w1: exit code 3; SIGTERM w0 w2; 15 SIGKILL w0; exit 3
# a program that failed and whose process stays
2 deaf=w1: 5 w1 raises ValueError
> 15 failed w1: ValueError, and its process does not exit; SIGTERM w0; 25 SIGKILL w1; exit 1
# without grace
2 grace_s=0: 5 w1 ends 1
> 5 failed w1: exit code 1; SIGTERM w0; SIGKILL w0; exit 1
# a worker that ends before the chief
ps: 5 w0 ends 0
> 5 failed w0: exited before the chief (exit code 0); SIGTERM c0 w1 p0; 5.5 SIGTERM w1 p0; exit 1
# workers that go on long after their chief
3: 10 w0 ends 0; 12 w1 ends 0
> 100 stacks w2; 100.5 failed w2: still running 90 s after w0 exited: w2; SIGTERM w2; 101 exit 1
# workers and an evaluator that go on long after
3+e: 10 w0 ends 0; 12 w1 ends 0
> 100 stacks w2; 100.5 failed w2: still running 90 s after w0 exited: w2; SIGTERM e0 w2; 101 exit 1
# workers that end after their chief, without grace
2 grace_s=0: 10 w0 ends 0; 12 w1 ends 0
> 12 exit 0
# workers that go on long after their chief, with a long grace
2 grace_s=20: 10 w0 ends 0
> 130 stacks w1; 130.5 failed w1: still running 120 s after w0 exited: w1; SIGTERM w1; 131 exit 1
# a task that cannot be started
3 broken=w1:
> 0 failed w1: cannot start: no room; SIGTERM w0; 0.5 exit 1
# a process that not even SIGKILL ends
2 undead=w0 max_restarts=3: 5 w1 ends 1
> 5 failed w1: exit code 1; SIGTERM w0; 6 SIGKILL w0; 16 exit 1

Requests to stop
# a request by SIGINT
2 max_restarts=3: 5 SIGINT
> 5 SIGINT w0 w1; 5.5 exit 130
# a request by SIGHUP
2 max_restarts=3: 5 SIGHUP
> 5 SIGTERM w0 w1; 5.5 exit 129
# a request by SIGUSR1
2 max_restarts=3: 5 SIGUSR1
> 5 SIGUSR1 w0 w1; 5.5 exit 143
# a request by SIGPIPE
2 max_restarts=3: 5 SIGPIPE
> 5 SIGTERM w0 w1; 5.5 exit 141
# a second request
2 deaf=w0,w1: 5 SIGINT; 6 SIGINT
> 5 SIGINT w0 w1; 6 SIGKILL w0 w1; exit 130
# servers live until the chief has saved
ps deaf=c0,w0,w1,p0 max_restarts=3: 5 SIGTERM; 6 w1 raises ValueError; 6 w1 ends KILL; 9 c0 ends 143
> 5 SIGTERM c0; 9 SIGTERM w0 p0; 12 SIGKILL w0 p0; exit 143
# a request that is seen with an end
2: 5 w0 ends TERM; 5 SIGTERM
> 5 SIGTERM w1; 5.5 exit 143

# a task that a request kills while it imports
2 max_restarts=3: 5 w1 ends USR1
> 5 failed w1: killed by SIGUSR1; SIGTERM w0; 5.5 exit 143

Restarts of the whole job
# another attempt after a short grace
2 deaf=w0 grace_s=0.25 max_restarts=3: 5 w1 ends KILL
> 5 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w0; 5.25 SIGKILL w0; again; exit
> 137
# another attempt though the grace is long
2 deaf=w0 grace_s=600 max_restarts=3: 5 w1 ends KILL
> 5 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w0; 6 SIGKILL w0; again; exit 137
# no other attempt after a mistake
2 deaf=w0 max_restarts=3: 5 w1 ends 2
> 5 failed w1: exit code 2; SIGTERM w0; 15 SIGKILL w0; exit 2
# a request while the others end takes the restart back
2 deaf=w0 max_restarts=3: 5 w1 ends KILL; 5.25 SIGTERM
> 5 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w0; 6 SIGKILL w0; exit 143
# a second request while the others end
2 deaf=w0 max_restarts=3: 5 w1 ends KILL; 5.25 SIGINT; 5.5 SIGINT
> 5 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w0; 5.5 SIGKILL w0; exit 130
# a ps job without its chief
ps max_restarts=1: 5 c0 ends KILL
> 5 failed c0: killed by SIGKILL, not by the launcher; SIGTERM w0 w1 p0; 5.5 again; exit 137
# a ps job without a worker and a ps
ps max_restarts=1: 5 w0 ends KILL; 5 p0 ends KILL
> 5 failed w0: killed by SIGKILL, not by the launcher; SIGTERM c0 w1; 5.5 SIGTERM w1; again; exit
> 137

Restarts of a worker alone
# two workers that die at once
ps max_restarts=2: 4 c0 step 7; 5 w0 ends KILL; 5 w1 ends KILL; 30 c0 ends 0
> 5 kill w0; start 1 w0; kill w1; start 1 w1; 30 SIGTERM w0 w1 p0; 30.5 exit 0
# a worker that fails the same way twice
ps max_restarts=9: 5 w1 ends 1; 6 w1 ends 1
> 5 kill w1; start 1 w1; 6 failed w1: exit code 1; SIGTERM c0 w0 p0; 6.5 SIGTERM w0 p0; exit 1
# a worker whose process does not end
ps max_restarts=1: 5 w1 raises ValueError; 40 c0 ends 0
> 15 kill w1 w1; start 1 w1; 40 SIGTERM w0 w1 p0; 40.5 exit 0
# a request while a worker that failed alone is killed
ps max_restarts=1 kill_s=1.5: 5 w1 raises ValueError; 15.5 SIGTERM
> 15 kill w1; 15.5 SIGTERM c0; 16 SIGTERM w0 w1 p0; 16.5 exit 143
# what a worker raises while it is killed
ps max_restarts=1 kill_s=1.5: 5 w1 raises ValueError; 15.5 w1 raises KeyError; 66 c0 ends 0
> 15 kill w1; 16.5 kill w1; start 1 w1; 66 SIGTERM w0 w1 p0; 66.5 exit 0
# a worker that cannot be started again
ps max_restarts=1 broken_again=w1: 5 w1 ends KILL
> 5 kill w1; failed w1: cannot start: no room; SIGTERM c0 w0 p0; 5.5 SIGTERM w0 p0; exit 1
# a worker whose host is gone
ps max_restarts=3 gone=w1: 5 w1 ends 75
> 5 failed w1: exit code 75; SIGTERM c0 w0 p0; 5.5 SIGTERM w0 p0; again; exit 75

A ps job that goes on without a worker
# a ps job goes on without a worker
ps: 4 c0 step 7; 5 w1 ends KILL; 30 c0 ends 0
> 5 kill w1; 30 SIGTERM w0 p0; 30.5 without w1; exit 0
# the end of the last worker is that of the first
ps: 4 c0 step 7; 5 w1 ends SEGV; 25 w0 ends KILL
> 5 kill w1; 25 failed w1: killed by SIGSEGV; SIGTERM c0 p0; 25.5 SIGTERM p0; without w1; exit 139
# not without all workers
ps: 4 c0 step 7; 5 w0 ends KILL; 5 w1 ends KILL
> 5 failed w0: killed by SIGKILL, not by the launcher; SIGTERM c0 p0; 5.5 SIGTERM p0; exit 137
# not without a ps
ps: 4 c0 step 7; 5 p0 ends KILL
> 5 failed p0: killed by SIGKILL, not by the launcher; SIGTERM c0 w0 w1; 5.5 SIGTERM w0 w1; exit
> 137
# not after a mistake
ps3: 4 c0 step 7; 5 w1 ends KILL; 6 w0 ends 2
> 5 kill w1; 6 failed w0: exit code 2; SIGTERM c0 w2 p0; 6.5 SIGTERM w2 p0; without w1; exit 2
# not in a multiworker job
3: 4 w0 step 7; 5 w1 ends KILL
> 5 failed w1: killed by SIGKILL, not by the launcher; SIGTERM w0 w2; 5.5 exit 137
# not before the first step
ps: 5 w1 ends 1; 30 c0 ends 0
> 5 failed w1: exit code 1; SIGTERM c0 w0 p0; 5.5 SIGTERM w0 p0; exit 1
# before the first step with enough
ps min_workers=1: 5 w1 ends 1; 30 c0 ends 0
> 5 kill w1; 30 SIGTERM w0 p0; 30.5 without w1; exit 0
# an error that every worker raises at the start
ps: 5 w0 fails ValueError; 5.2 w1 fails ValueError
> 5.1 failed w0: ValueError (exit code 1); SIGTERM c0 w1 p0; 5.6 SIGTERM p0; exit 1
# an error that all raise though one would be enough
ps min_workers=1: 5 w0 fails ValueError; 5.2 w1 fails ValueError
> 5.1 kill w0; 5.3 failed w0: ValueError (exit code 1); SIGTERM c0 p0; 5.8 SIGTERM p0; without w0;
> exit 1
# workers return while they may, and are done without after that
ps max_restarts=1: 4 c0 step 7; 5 w1 ends KILL; 6 w0 ends 1; 30 c0 ends 0
> 5 kill w1; start 1 w1; 6 kill w0; 30 SIGTERM w1 p0; 30.5 without w0; exit 0

An evaluator
# servers go on until chief and evaluator are done
ps+e: 30 c0 ends 0; 36 w0 ends 0; 40 e0 ends 0
> 40 SIGTERM w1 p0; 40.5 exit 0
# an evaluator that is done first
ps+e: 20 e0 ends 0; 30 c0 ends 0
> 30 SIGTERM w0 w1 p0; 30.5 exit 0
# an evaluator that takes too long in a ps job
ps+e deaf=e0: 30 c0 ends 0
> 120 SIGTERM w0 w1 p0 e0; 123 SIGKILL e0; without e0; exit 0
# an evaluator that takes too long
2+e deaf=e0: 30 w0 ends 0; 30 w1 ends 0
> 120 SIGTERM e0; 123 SIGKILL e0; without e0; exit 0
# training goes on without an evaluator
2+e max_restarts=0: 4 w0 step 7; 5 e0 ends KILL; 30 w0 ends 0; 30 w1 ends 0; 31 e0 ends 0
> 5 kill e0; 30 without e0; exit 0
# training goes on while an evaluator is started again
ps+e max_restarts=1: 4 c0 step 7; 5 e0 ends KILL; 30 c0 ends 0; 30 w1 ends 0; 31 e0 ends 0
> 5 kill e0; start 1 e0; 31 SIGTERM w0 p0; 31.5 exit 0
# an evaluator that fails before the first step
ps+e: 5 e0 ends 1
> 5 failed e0: exit code 1; SIGTERM c0 w0 w1 p0; 5.5 SIGTERM w0 w1 p0; exit 1
# a mistake of an evaluator
ps+e: 4 c0 step 7; 5 e0 ends 2
> 5 failed e0: exit code 2; SIGTERM c0 w0 w1 p0; 5.5 SIGTERM w0 w1 p0; exit 2
# an evaluator that fails on the last checkpoint
ps+e: 4 c0 step 7; 30 c0 ends 0; 32 e0 ends 1
> 32 kill e0; SIGTERM w0 w1 p0; 32.5 without e0; exit 0

Hangs
# a hang
2 deaf=w1 max_restarts=1: 19 w0 step 7; 20 w1 hangs w0
> 20 stacks w0; 20.5 failed w1: hangs: silent; SIGTERM w0 w1; 21.5 SIGKILL w1; again; exit 1
# tasks that end instead of printing their stacks
2 max_restarts=1: 20 w1 hangs w0 w1; 20.1 w0 ends QUIT; 20.1 w1 ends QUIT
> 20 stacks w0 w1; 20.1 failed w1: hangs: silent; again; exit 1
# the others are not disturbed by a worker that hangs
ps max_restarts=0: 4 c0 step 7; 20 w1 hangs c0 w1; 40 c0 ends 0
> 20 stacks w1; 20.5 kill w1 w1; 40 SIGTERM w0 p0; 40.5 without w1; exit 0
# a worker that hangs is started again
ps max_restarts=1: 4 c0 step 7; 20 w1 hangs c0 w1; 40 c0 ends 0
> 20 stacks w1; 20.5 kill w1 w1; start 1 w1; 40 SIGTERM w0 w1 p0; 40.5 exit 0
# a worker that is being killed counts for nobody
ps kill_s=9: 4 c0 step 7; 20 w1 hangs w1; 21 w0 ends KILL
> 20 stacks w1; 20.5 kill w1; 21 failed w0: killed by SIGKILL, not by the launcher; SIGTERM c0 w1
> p0; 21.5 SIGTERM w1 p0; exit 137
# a request while stacks are printed
2 max_restarts=1: 20 w1 hangs w0; 20.1 SIGTERM
> 20 stacks w0; 20.1 SIGTERM w0 w1; 20.6 exit 143
"""
CAUSES = {
    "LOST": "UnavailableError: Graph execution error: ... Connection reset by peer",
    "WAITED": "worker-0: waited 60 s of 60 s for worker-1",
}


def task(name):
    return tasks(name)[0]


def happening(text):
    """What a text says that happens: events, each with its moment."""
    moment, subject, *words = text.split(" ", 3)
    at_s = float(moment)
    if not words:
        yield at_s, StopRequest(signum=signal.Signals[subject])
        return
    who, what, rest = task(subject), words[0], words[1].split()
    first, more = rest[0], dict(zip(rest[1::2], rest[2::2], strict=False))
    match what:
        case "ends":
            status = -signal.Signals[f"SIG{first}"] if first[0].isalpha() else int(first)
            yield at_s, Ended(task=who, status=status, at_s=at_s, cause=" ".join(rest[1:]))
        case "step":
            beat = {"task": who, "phase": "step", "step": int(first), "since_s": at_s}
            first_s = float(more["first"]) if "first" in more else None
            yield at_s, Beat(**beat, first_step_s=first_s, at_s=at_s)
        case "hangs":
            stuck = tuple(tasks(" ".join(rest)))
            yield at_s, (Failure(task=who, cause="hangs: silent", exit_code=1, at_s=3.0), stuck)
        case "raises" | "fails":
            code, step = int(more.get("code", 1)), int(more["step"]) if "step" in more else None
            raised = {"task": who, "exit_code": code, "cause": CAUSES.get(first, first)}
            yield at_s, Raised(**raised, at_s=float(more.get("at", at_s)), step=step)
            if what == "fails":
                yield at_s + 0.1, Ended(task=who, status=code, at_s=at_s + 0.1)


class World:
    """Processes, watchdog, screen and clock at once, which write down what is done."""

    def __init__(self, events, *, kill_s=0.0, **behaviour):
        self.now_s, self.kill_s = 0.0, kill_s
        self.are = defaultdict(set)
        self.are |= {name: set(tasks(who)) for name, who in behaviour.items()}
        events = list(events)
        self.hang = next((event for event in events if isinstance(event[1], tuple)), None)
        self.alive, self.watched = set(), set()
        self.done, self.said = [], []
        self._order, self._coming = itertools.count(), []
        seen = [event for event in events if event is not self.hang]
        for at_s, together in itertools.groupby(seen, key=lambda event: event[0]):
            self._at(at_s, *(event for _, event in together))

    def _at(self, at_s, *events):
        heapq.heappush(self._coming, (at_s, next(self._order), events))

    def _ends(self, task, status, within_s):
        end_s = self.now_s + within_s
        self._at(end_s, Ended(task=task, status=status, at_s=end_s))

    def write(self, what, about=""):
        self.done.append((self.now_s, what, str(about)))

    # the processes

    def perform(self, action):
        task = action.task
        match action:
            case Start(restart=restart):
                return self._start(task, restart)
            case Signal(signum=signum):
                self.write(signal.Signals(signum).name, task)
                is_kill = signum == signal.SIGKILL
                if task not in self.are["undead"] and (is_kill or task not in self.are["deaf"]):
                    self._ends(task, -signum, 0.0 if is_kill else 0.5)
            case AskForStacks():
                self.write("stacks", task)
            case KillOne():
                self.write("kill", task)
                if task in self.alive:
                    self._ends(task, -signal.SIGKILL, self.kill_s)

    def _start(self, task, restart):
        if task in self.are["broken_again" if restart else "broken"]:
            return Ended(task=task, status=1, at_s=self.now_s, cause="cannot start: no room")
        if restart:
            self.write(f"start {restart}", task)
        self.alive.add(task)
        self._at(self.now_s, Started(task=task, pid=100, at_s=self.now_s))

    def can_start(self, task):
        return task not in self.are["gone"]

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
        (_, hang), self.hang = self.hang, None
        return hang

    # the screen

    def say(self, text):
        self.said.append(text)

    def show_failure(self, task, cause):
        self.write("failed", f"{task}: {cause}")

    def last_lines(self, task):
        return (f"last line of {task}",)


def play(history):
    """How the attempt of a history has ended, and its world with what was done in it."""
    job, given, parts = parsed(history)
    rules = {n: int(given.pop(n, 0)) or None for n in ("max_restarts", "min_workers")}
    grace_s, kill_s = float(given.pop("grace_s", 10)), float(given.pop("kill_s", 0))
    world = World(itertools.chain(*map(happening, parts)), kill_s=kill_s, **given)
    state = job_state(
        tasks(JOBS[job]),
        has_servers=job.startswith("ps"),
        grace_s=grace_s,
        min_workers=rules["min_workers"],
        policy=RestartPolicy(max_restarts=rules["max_restarts"] or 0, window_s=3600),
        watchdog=world,
    )
    supervisor = Supervisor(state, processes=world, screen=world, clock=lambda: world.now_s)
    supervisor.run()
    for lost in state.lost:
        world.write("without", lost.task)
    if state.restart:
        world.write("again")
    world.write(f"exit {state.exit_code}")
    world.stacks = supervisor.stacks
    return state, world


def transcript(world):
    """What was done: with its moment where that is another, and all tasks to which it was done."""
    parts, before_s = [], None
    for (at_s, what), same in itertools.groupby(world.done, key=lambda done: done[:2]):
        about = " ".join(about for *_, about in same)
        parts.append(f"{at_s:g} " * (at_s != before_s) + f"{what} {about}".strip())
        before_s = at_s
    text = "; ".join(parts)
    for name, cause in CAUSES.items():
        text = text.replace(cause, name)
    return short(text)


@recorded(HISTORIES)
def test_history(history, outcome):
    assert transcript(play(history)[1]) == outcome


@pytest.mark.parametrize(
    ("history", "said"),
    [
        ("ps: 30 c0 ends 0", []),
        ("2 max_restarts=3: 5 w1 ends KILL", []),
        ("2 deaf=w0: 5 w1 ends 3", ["w0 did not exit within the grace period; killed"]),
        ("2 undead=w0 max_restarts=3: 5 w1 ends 1", ["cannot kill w0"]),
        ("2 max_restarts=3: 5 w1 ends KILL; 5.1 SIGTERM", ["SIGTERM: not restarting"]),
        ("2: 5 SIGINT", ["SIGINT: stopping 2 tasks within 10 s (a second signal kills at once)"]),
        ("2: 20 w1 hangs w0", ["w1: hangs: silent; Python stacks of w0:"]),
        (
            "ps max_restarts=1: 4 c0 step 7; 5 w1 ends 1; 6 w0 ends 3; 9 c0 ends 0",
            [
                "w1 failed: exit code 1; restarting only this task, restart 1 of 1 within 3600 s:"
                " w1.restart-1.log",
                "w0 failed: exit code 3; continuing with w1"
                " (not restarting: used the only restart within 3600 s)",
                "finished without w0",
            ],
        ),
    ],
)
def test_each_action_has_its_message(history, said):
    assert [short(text) for text in play(history)[1].said] == said


def test_every_process_has_a_record():
    state, _ = play("ps max_restarts=1 undead=p0: 4 c0 step 7; 5 w1 ends KILL; 9 c0 ends 0")
    records = [(r.task, r.restart, r.status, r.stopped, r.ended_at_s) for r in state.records]
    assert [(short(one), *more) for one, *more in records] == [
        ("c0", 0, 0, False, 9),
        ("w0", 0, -signal.SIGTERM, True, 9.5),
        ("w1", 0, -signal.SIGKILL, False, 5),
        ("w1", 1, -signal.SIGTERM, True, 9.5),
        ("p0", 0, None, True, None),
    ]
    state, _ = play("3 broken=w1:")
    assert [record.started_at_s for record in state.records] == [0, None, None]


@pytest.mark.parametrize(
    ("history", "task", "step", "at_s", "detect_s"),
    [
        ("3: 5 w1 ends 3", "w1", None, 5, 0),
        ("2 deaf=w1: 5 w1 raises ValueError", "w1", None, 5, 10),
        ("2: 5 w0 fails LOST", "w0", None, 5, 0.6),
        ("1: 5 w0 fails LOST", "w0", None, 5, 0.1),
        ("2: 3 w0 step 20; 3.5 w1 step 18; 5 w1 ends 1", "w1", 20, 5, 0),
        ("2: 3 w1 step 18; 5 w1 raises ValueError step 31; 5.5 w1 ends 1", "w1", 31, 5, 0.5),
        ("2: 19 w0 step 7; 20 w1 hangs w0", "w1", 7, 3, 17),
    ],
)
def test_a_failure_has_step_and_moment_and_is_dated(history, task, step, at_s, detect_s):
    failure = play(history)[0].failure
    assert (short(failure.task), failure.step, failure.at_s) == (task, step, at_s)
    assert failure.detect_s == pytest.approx(detect_s)


def test_an_attempt_records_steps_restarts_losses_and_stacks():
    state, _ = play(
        "ps max_restarts=1: 3 c0 step 7 first 2.75; 3.5 c0 step 9 first 2.5; 5 w1 ends KILL;"
        " 6 w0 ends 1; 9 c0 ends 0"
    )
    assert state.first_step_s == 2.5
    assert [(f.task, f.step, f.at_s) for f in state.restarts] == [(task("w1"), 9, 5)]
    assert [(f.task, f.step, f.at_s) for f in state.lost] == [(task("w0"), 9, 6)]
    assert play("2: 20 w1 hangs w0")[1].stacks == {task("w0"): ("last line of worker-0",)}


WHAT = ["ends 0", "ends 1", "ends 2", "ends 75", "ends KILL", "ends ABRT", "raises ValueError",
        "step 7", "grace", "wait"]  # fmt: skip


@given(
    job=st.sampled_from(["3+e", "ps+e"]),
    what=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(WHAT)), max_size=12),
    max_restarts=st.integers(0, 2),
    min_workers=st.integers(0, 1),
    stop_s=st.sampled_from([0.1, 1000]),
)
def test_every_process_ends_and_is_reported(job, what, max_restarts, min_workers, stop_s):
    names, at_s, events = JOBS[job].split(), 1.0, []
    for index, event in what:
        at_s += {"wait": 1000, "grace": 10}.get(event, 0.1)
        if event not in ("wait", "grace"):
            events.append(f"{at_s} {names[index % len(names)]} {event}")
    events.append(f"{at_s + stop_s} SIGTERM")
    rules = f"max_restarts={max_restarts} min_workers={min_workers} kill_s=1"
    state, world = play(f"{job} {rules}: {'; '.join(events)}")
    assert not world.alive
    assert len(state.restarts) <= max_restarts
    assert all(record.status is not None for record in state.records)
    assert state.exit_code or not state.failure
