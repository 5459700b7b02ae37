"""The watchdog on histories of beats: whom it blames, when, and when it blames nobody."""

import itertools
import math
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.launch.diagnosis import LATE_S, Watchdog
from tfdist.launch.events import Beat
from tfdist.launch.machine import proc_state
from tfdist.phases import PendingWork

CHIEF, PS = Task("chief", 0), Task("ps", 0)
W0, W1, W2 = WORKERS = tuple(Task("worker", index) for index in range(3))
PS_JOB = (CHIEF, W0, W1, PS)
HANG_S, STARTUP_S = 20.0, 60.0


class Job:
    """Tasks that beat once a second and a launcher that checks when it is told to."""

    def __init__(
        self, tasks=WORKERS, *, is_ps=False, hang_timeout_s=HANG_S, startup_timeout_s=STARTUP_S
    ):
        self.now_s = 1000.0
        self.states = dict.fromkeys(tasks, "S")
        self.held_up = False
        self.doing = {task: ("import", None, self.now_s) for task in tasks}
        self.silent = set()
        self.resting = {}
        self.awaited = None
        self.steps = itertools.count()
        self.watchdog = Watchdog(
            hang_timeout_s=hang_timeout_s,
            startup_timeout_s=startup_timeout_s,
            is_ps=is_ps,
            chief=tasks[0],
            state_of=self.states.get,
            is_held_up=lambda: self.held_up,
        )
        for task in tasks:
            self.watchdog.started(task, at_s=self.now_s)

    def enter(self, phase, *tasks, step=None):
        for task in tasks or self.doing:
            self.doing[task] = (phase, step, self.now_s)

    def step(self):
        """Has the chief do one more."""
        self.enter("step", CHIEF, step=next(self.steps))

    def rest(self, *tasks):
        """Has them wait in themselves, for nothing that could still come."""
        self.resting |= dict.fromkeys(tasks, self.now_s)

    def stop(self, task):
        self.silent.add(task)
        self.states[task] = "T"

    def beat(self):
        for task in set(self.doing) - self.silent:
            phase, step, since_s = self.doing[task]
            self.watchdog.beat(
                Beat(
                    task=task,
                    phase=phase,
                    step=step,
                    since_s=since_s,
                    first_step_s=None,
                    at_s=self.now_s,
                    awaited=self.awaited if task == CHIEF else None,
                    rest_s=self.resting.get(task),
                )
            )

    def run(self, seconds, *, work=lambda: None):
        """Lets seconds pass; returns the hang, if there is one."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            work()
            self.beat()
            if self.now_s >= self.watchdog.next_check_s():
                hang = self.watchdog.find_hang(self.now_s)
                if hang is not None:
                    return hang
        return None


def test_a_stopped_task_is_told_at_once():
    job = Job()
    assert job.watchdog.stopped() is None
    job.stop(W1)
    assert job.watchdog.stopped() == W1


def test_a_task_that_does_not_come_and_says_nothing_is_told_at_once():
    job = Job()
    job.silent.add(W1)
    job.run(2)
    job.enter("rendezvous", W0)
    assert job.watchdog.absent(job.now_s) is None
    job.run(5)
    task, looks = job.watchdog.absent(job.now_s)
    assert task == W1
    assert looks == "has not started: silent for 7 s (its process sleeps)"
    job.silent.clear()
    job.run(1)
    assert job.watchdog.absent(job.now_s) is None


def test_a_stopped_task_is_named_and_not_asked_for_its_stacks():
    job = Job()
    job.enter("step", step=10)
    job.run(3)
    job.stop(W1)
    hang = job.run(HANG_S + 2)
    assert hang.task == W1
    assert "its process is stopped (SIGSTOP)" in hang.cause
    assert "last report: in a step after 10 steps" in hang.cause
    assert hang.cause.endswith("; worker-0, worker-2 wait for it")
    assert hang.stuck == (W0, W2)
    assert hang.since_s == 1003.0  # its last word


def test_before_one_of_all_alike_is_blamed_each_is_heard_once_more():
    job = Job()
    job.enter("step", step=10)
    job.run(HANG_S - 1)
    job.silent.add(W2)  # by something that cannot be seen from outside
    assert job.run(2) is None
    assert job.run(3).task == W2


def test_stopped_goes_before_silent():
    job = Job()
    job.enter("step", step=7)
    job.run(3)
    job.silent.add(W0)
    job.run(4)
    job.stop(W1)
    assert job.run(HANG_S + 2).task == W1


def test_one_in_a_callback_is_blamed_not_those_who_wait_for_it():
    job = Job()
    job.enter("callback", step=120)
    job.run(1)
    job.enter("step", W0, W2, step=120)
    hang = job.run(HANG_S + 2)
    assert (hang.task, hang.stuck) == (W1, (W1, W0, W2))
    assert hang.cause.startswith("hangs: in a callback after 120 steps for 20 s; worker-0, ")
    assert hang.since_s == 1000.0  # when it last got on, though it speaks


@pytest.mark.parametrize(
    ("everyone", "one", "blamed", "cause"),
    [
        (
            ("step", 120),
            ("step", W1, 119),
            W1,
            "in a step after 119 steps for 20 s, while worker-0 is in a step after 120 steps",
        ),
        (("step", 120), ("save", W2, 120), W2, "saving after 120 steps"),
        (("step", 120), ("done", W1, 120), W1, "done with its training after 120 steps"),
        *(
            (
                ("sum", 120),
                (phase, W1, 120),
                W1,
                f"{doing} after 120 steps for 20 s, while worker-0 is at a sum with its peers",
            )
            for phase, doing in (("step", "in a step"), ("save", "saving"))
        ),
        (
            ("step", 120),
            ("step", W0, 120),
            W0,
            "all 3 tasks are in a step after 120 steps for 20 s, none of them behind",
        ),
    ],
)
def test_the_one_that_is_behind_is_blamed_else_the_chief(everyone, one, blamed, cause):
    job = Job()
    job.enter(everyone[0], step=everyone[1])
    job.enter(one[0], one[1], step=one[2])
    hang = job.run(HANG_S + 2)
    assert hang.task == blamed
    assert hang.cause.startswith(f"hangs: {cause}")


@pytest.mark.parametrize("phase", ["step", "sum"])
def test_others_wait_for_one_that_traces_and_it_has_longer(phase):
    job = Job(startup_timeout_s=1)
    job.enter(phase, step=0)
    job.enter("trace", W1, step=0)
    assert job.run(2.5 * HANG_S) is None
    hang = job.run(HANG_S)
    assert hang.task == W1
    assert "tracing" in hang.cause


@pytest.mark.parametrize("phase", ["import", "done", "serve", "of_my_own"])
def test_code_of_the_programs_own_takes_as_long_as_it_takes(phase):
    job = Job()
    job.enter(phase)
    assert job.run(100 * HANG_S) is None


def test_others_wait_for_one_that_still_imports_and_it_has_the_startup_besides():
    job = Job()
    job.enter("step", W0, W2, step=0)
    assert job.run(STARTUP_S + HANG_S - 1) is None
    assert job.run(2).task == W1


@pytest.mark.parametrize(
    ("state", "looks"), [("S", "its process sleeps"), (None, "it has no process")]
)
def test_a_task_that_never_speaks_has_not_started(state, looks):
    job = Job()
    job.silent.add(W1)
    job.states[W1] = state
    assert job.run(STARTUP_S + HANG_S - 1) is None
    hang = job.run(2)
    assert (hang.task, W1 in hang.stuck) == (W1, state is not None)
    assert hang.cause == f"hangs: has not started: silent for 80 s ({looks})"


def test_libraries_that_hold_all_else_up_while_they_load_have_the_startup_besides():
    job = Job()
    job.run(3)
    job.silent.add(W1)
    assert job.run(STARTUP_S + HANG_S - 1) is None
    assert "does not answer" in job.run(2).cause


def test_a_task_that_became_another_program_is_not_expected_to_speak():
    job = Job()
    job.run(3)
    job.silent.add(W1)
    job.states[W1] = ""
    assert job.run(100 * HANG_S) is None


def test_a_task_that_has_ended_is_not_watched():
    job = Job()
    job.enter("step", step=3)
    job.run(2)
    for task in WORKERS:
        job.watchdog.ended(task)
    assert job.watchdog.next_check_s() == math.inf
    assert job.watchdog.find_hang(job.now_s + 1000) is None


def test_without_a_timeout_nothing_is_watched():
    job = Job(hang_timeout_s=math.inf)
    job.enter("step", step=3)
    assert job.watchdog.next_check_s() == math.inf
    assert job.run(10_000) is None


def test_workers_and_ps_serve_and_the_chief_is_watched_by_its_steps():
    job = Job(PS_JOB, is_ps=True)
    assert job.run(10 * HANG_S, work=job.step) is None
    hang = job.run(HANG_S + 2)
    assert (hang.task, hang.stuck) == (CHIEF, (CHIEF, W0, W1, PS))
    assert hang.cause == "hangs: in a step after 199 steps for 20 s"


@pytest.mark.parametrize("phase", ["import", "rendezvous", "serve"])
def test_a_server_is_not_asked_for_steps(phase):
    job = Job(PS_JOB, is_ps=True)
    job.enter(phase, W0, W1, PS)
    assert job.run(100 * HANG_S) is None


@pytest.mark.parametrize("frozen", [W1, PS])
def test_a_stopped_server_is_found_by_its_silence(frozen):
    job = Job(PS_JOB, is_ps=True)
    job.run(5)
    job.stop(frozen)
    hang = job.run(HANG_S + 2, work=job.step)
    assert hang.task == frozen


@pytest.mark.parametrize("is_first", [False, True])
def test_a_worker_that_does_not_do_its_piece_is_blamed_while_the_others_go_on(is_first):
    job = Job(PS_JOB, is_ps=True)
    job.run(5)
    job.awaited = PendingWork(task="worker-1", since_s=job.now_s, is_first=is_first)
    limit_s = HANG_S * (3 if is_first else 1)
    assert job.run(limit_s - 2, work=job.step) is None
    hang = job.run(4, work=job.step)
    assert hang.task == W1
    assert re.fullmatch(r"hangs: its work unit is not done after (2|6)[01] s", hang.cause)


def test_a_worker_that_was_started_again_does_not_owe_what_the_one_before_it_had():
    job = Job(PS_JOB, is_ps=True)
    job.run(5)
    job.awaited = PendingWork(task="worker-1", since_s=job.now_s, is_first=False)
    assert job.run(HANG_S + 2, work=job.step).task == W1
    job.watchdog.ended(W1)
    job.watchdog.started(W1, at_s=job.now_s)
    assert job.run(5, work=job.step) is None


def test_a_chief_that_waits_for_a_piece_is_not_blamed_for_it():
    job = Job(PS_JOB, is_ps=True)
    job.enter("step", CHIEF, step=7)
    job.run(1)
    job.awaited = PendingWork(task="worker-0", since_s=job.now_s, is_first=False)
    assert job.run(HANG_S + 2).task == W0


def test_a_launcher_that_was_stopped_itself_blames_nobody():
    job = Job()
    job.enter("step", step=3)
    job.run(5)
    job.now_s += 1000  # the beats of that time did not fit into the pipe, nor did the steps
    assert job.watchdog.find_hang(job.now_s) is None
    steps = iter(range(4, 1000))
    assert job.run(3 * HANG_S, work=lambda: job.enter("step", step=next(steps))) is None


def test_after_a_stop_of_the_launcher_a_hang_is_found_in_the_time_it_always_takes():
    job = Job()
    job.enter("step", step=3)
    job.run(5)
    job.stop(W1)
    job.now_s += 1000
    assert job.watchdog.find_hang(job.now_s) is None
    assert job.run(HANG_S - 2) is None
    assert job.run(4).task == W1


def test_tasks_that_wait_for_the_launcher_are_not_blamed():
    job = Job()
    job.enter("step", step=3)
    job.held_up = True
    assert job.run(10 * HANG_S) is None
    job.held_up = False
    assert job.run(HANG_S - 1) is None
    assert job.run(3) is not None


def test_what_a_task_said_before_it_was_started_again_does_not_count():
    job = Job((W0,))
    job.now_s += 10
    job.watchdog.started(W0, at_s=job.now_s + 0.5)
    job.enter("step", step=3)
    job.beat()  # still in the pipe
    job.silent.add(W0)
    assert "has not started" in job.run(STARTUP_S + HANG_S + 2).cause


def test_a_check_in_time_is_not_a_late_one():
    job = Job((W0,))
    job.enter("step", step=3)
    while (hang := job.watchdog.find_hang(job.now_s)) is None:
        job.now_s = job.watchdog.next_check_s() + LATE_S
        job.beat()
        assert job.now_s < 1000 + 2 * HANG_S
    assert hang.task == W0


phases = st.sampled_from(("step", "save", "validate", "callback", "trace"))


@given(
    gaps_s=st.lists(st.floats(0, HANG_S - 2), min_size=1, max_size=20),
    entered=st.lists(st.tuples(st.sampled_from(WORKERS), phases), max_size=40),
    startup_s=st.floats(0, STARTUP_S + HANG_S - 3),
)
def test_no_hang_while_every_task_beats_and_goes_on(gaps_s, entered, startup_s):
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
    job = Job(hang_timeout_s=max(hang_s, range_s + 2.0))

    def work():
        moving = [task for task in WORKERS if task not in job.silent]
        if not job.silent and int(job.now_s) % range_s == 0:
            job.enter(phase, *moving, step=next(job.steps))

    job.enter(phase, step=next(job.steps))
    assert job.run(before_s, work=work) is None
    for task in frozen:
        job.stop(task)
        job.states[task] = state
    frozen_s = job.now_s
    hang = job.run(10 * HANG_S, work=work)
    assert hang.task in frozen
    assert job.now_s <= frozen_s + max(hang_s, range_s + 2.0) + 2
    assert set(hang.stuck) == set(WORKERS) - (frozen if state in "TZ" else set())


def test_the_state_of_a_process_is_read_behind_its_name(tmp_path):
    program = "import os; open('/proc/self/comm', 'w').write('x) Z (1 2'); os.write(1, b'.');"
    command = [sys.executable, "-c", program + "import signal; signal.pause()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        try:
            assert proc_state(process.pid) in ("R", "S", "D")
            process.send_signal(19)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert proc_state(process.pid) == "T"
        finally:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert proc_state(process.pid) == "Z"
    assert proc_state(process.pid) is None


# before and after the training, where a program may take its time


@pytest.mark.parametrize(("phase", "step"), [("import", None), ("done", 30)])
def test_a_task_that_can_never_go_on_is_found_where_it_has_no_deadline(phase, step):
    job = Job((W0,))
    job.enter(phase, step=step)
    assert job.run(3 * HANG_S) is None  # it works, sleeps, or waits for a connection
    job.rest(W0)
    assert job.run(HANG_S - 2) is None
    hang = job.run(4)
    doing = "not in its training yet" if step is None else "done with its training after 30 steps"
    assert re.fullmatch(
        f"hangs: {doing}, and all its threads wait for each other for 2[01] s", hang.cause
    )
    assert (hang.task, hang.stuck) == (W0, (W0,))


def test_a_task_that_goes_on_after_a_rest_has_all_its_time_again():
    job = Job((W0,))
    job.rest(W0)
    assert job.run(HANG_S - 2) is None
    job.rest(W0)
    assert job.run(HANG_S - 2) is None
    job.resting.clear()
    assert job.run(3 * HANG_S) is None


def test_who_rests_while_another_works_may_wait_for_it():
    job = Job()
    job.rest(W0, W2)
    assert job.run(3 * HANG_S) is None
    job.rest(W1)
    hang = job.run(HANG_S + 3)
    assert hang.task == W0
    assert hang.stuck == WORKERS


@pytest.mark.parametrize("phase", ["barrier", "rendezvous"])
def test_who_rests_is_blamed_by_those_who_wait_for_it_to_come(phase):
    job = Job()
    job.enter(phase, W0, W2)
    if phase == "barrier":  # others may take their time there
        assert job.run(9 * HANG_S) is None
    job.rest(W1)
    hang = job.run(HANG_S + 3)
    assert hang.task == W1
    assert hang.cause.endswith("; worker-0, worker-2 wait for it")


def test_who_rests_before_its_training_is_blamed_before_those_after_theirs():
    job = Job((W0, W1))
    job.enter("done", W0, step=30)
    job.rest(W0, W1)
    assert job.run(HANG_S + 3).task == W1


def test_who_serves_rests_as_long_as_it_likes():
    job = Job((CHIEF, W0, PS), is_ps=True)
    job.enter("serve", W0, PS)
    job.rest(W0, PS)
    assert job.run(3 * HANG_S) is None
    job.rest(CHIEF)
    assert job.run(HANG_S + 3).task == CHIEF


def test_a_rest_while_the_launcher_was_stopped_does_not_count():
    job = Job((W0,))
    job.rest(W0)
    job.run(HANG_S / 2)
    job.now_s += 10 * HANG_S
    assert job.run(HANG_S - 2) is None
    assert job.run(4).task == W0
