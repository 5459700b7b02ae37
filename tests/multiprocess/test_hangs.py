"""A job that hangs ends, names the task that holds it up, and shows where the others are.

The tasks are plain Python: they say what they are doing, as the training does. Each case has its
job wait in its first half, which ends at `yield`, and looks at it in its second: so that jobs wait
side by side.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.multiprocess.jobs import FORK, LAUNCH, ROOT
from tfdist.launch.watchdog import proc_state

DEADLINE_S = 150.0
HANG_S = 6

# The tasks import a part of tfdist and no TensorFlow: `auto` would import it all for each job.
EXEC = (*LAUNCH, "--start=exec")
STARTS = pytest.mark.parametrize("command", [EXEC, FORK], ids=["exec", "fork"])
# One that stops itself while it imports.
STOPPED = (sys.executable, "-c", FORK[2].replace("('json',)", "('stops',)"), "--start=fork")

TASK = """
import json, os, signal, sys, threading, time
from tfdist import phases

config = json.loads(os.environ["TF_CONFIG"])
attempt = config["tfdist"]["attempt"]
name = f"{config['task']['type']}-{config['task']['index']}"

def ready():
    print("ready", name, os.getpid(), flush=True)

def waits_for_the_others(step):
    phases.enter("step", step=step)
    ready()
    threading.Event().wait()

def works(seconds=1e9, until="/none"):
    end_s, step = time.monotonic() + seconds, 0
    while time.monotonic() < end_s and not os.path.exists(until):
        step += 1
        phases.enter("step", step=step)
        time.sleep(0.05)
"""


class Job:
    """A launcher that is running, what it has said, and its directory."""

    def __init__(self, process, path):
        self.process = process
        self.path = path
        self.text = ""
        self.ready_s = 0.0

    def pids(self, count):
        """Waits until `count` tasks are ready; returns their process ids by name."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found := re.findall(r"ready (\S+) (\d+)\n", self.text)) < count:
            assert self._read(deadline_s), "the job ended before its tasks were ready"
        self.ready_s = time.monotonic()
        return {name: int(pid) for name, pid in found}

    def said(self, words):
        """Waits until the job has said something."""
        deadline_s = time.monotonic() + DEADLINE_S
        while words not in self.text:
            assert self._read(deadline_s), f"the job ended before it said {words!r}"

    def leave_alone(self, seconds):
        """Returns when its tasks have been ready for so long."""
        time.sleep(max(0.0, self.ready_s + seconds - time.monotonic()))

    def end(self):
        """Reads to the end and returns the exit code."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._read(deadline_s):
            pass
        return self.process.wait(max(0.0, deadline_s - time.monotonic()))

    def attempts(self):
        return json.loads((self.path / "run" / "report.json").read_text())["attempts"]

    def first_failure(self):
        return self.attempts()[-1]["first_failure"]

    def log(self, task):
        return (self.path / "run" / "logs" / "attempt-1" / f"{task}.log").read_text()

    def _read(self, deadline_s):
        left_s = max(0.0, deadline_s - time.monotonic())
        assert select.select([self.process.stdout], [], [], left_s)[0], "nothing more came in time"
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.text += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def launch(tmp_path):
    """Starts jobs in directories of their own; prints all they said, and their logs, at the end."""
    jobs = []

    def start(source, *flags, first="", command=EXEC, hang_timeout_s=HANG_S, grace_s=1):
        path = tmp_path / f"job-{len(jobs)}"
        path.mkdir()
        script = path / "program.py"
        script.write_text(textwrap.dedent(first) + TASK + textwrap.dedent(source))
        times = (f"--hang_timeout_s={hang_timeout_s}", f"--grace_s={grace_s}")
        flags = ("--run_dir=run", *times, *flags)
        process = subprocess.Popen(
            [*command, *flags, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        )
        jobs.append(Job(process, path))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()  # the guardian ends the tasks
        job.process.wait()
        with contextlib.suppress(OSError):
            job.process.stdout.close()
        print(job.text)
    for path in sorted(tmp_path.rglob("*.log")):
        print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")


def side_by_side(*cases):
    """Runs the first half of each case, one after the other, and then the second halves."""
    for case in cases:
        next(case)
    for case in cases:
        assert next(case, "over") == "over"


def is_gone(pid):
    return proc_state(pid) in (None, "Z")


def a_stopped_task_is_named_and_the_others_show_their_stacks(launch, command):
    job = launch(
        "waits_for_the_others(7)", "--strategy=multiworker", "--workers=3", command=command
    )
    pids = job.pids(3)
    os.kill(pids["worker-1"], signal.SIGSTOP)
    yield
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["task"] == "worker-1"
    assert "its process is stopped (SIGSTOP)" in failure["cause"]
    assert "worker-1 failed first: hangs: its process is stopped" in job.text
    for task in ("worker-0", "worker-2"):
        assert "in waits_for_the_others" in job.log(task)
    assert "waits_for_the_others" not in job.log("worker-1")
    assert all(map(is_gone, pids.values()))


def a_deadlock_in_a_callback_is_blamed_and_its_stack_shown(launch, command):
    job = launch(
        """
        def on_epoch_end():
            phases.enter("callback", step=7)
            lock = threading.Lock()
            lock.acquire()
            ready()
            lock.acquire()
        on_epoch_end() if name == "worker-2" else waits_for_the_others(7)
        """,
        "--strategy=multiworker",
        "--workers=3",
        command=command,
    )
    job.pids(3)
    yield
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["task"] == "worker-2"
    assert failure["cause"].startswith("hangs: in a callback after 7 steps for ")
    assert failure["cause"].endswith("; worker-0, worker-1 wait for it")
    assert "in on_epoch_end" in job.log("worker-2")
    for task in ("worker-0", "worker-1"):
        assert "in waits_for_the_others" in job.log(task)


def a_deadlock_before_the_training_is_found_though_others_wait_for_it(launch):
    job = launch(
        """
        def loads_the_data():
            lock = threading.Lock()
            lock.acquire()
            ready()
            lock.acquire()
        def waits_to_begin():
            phases.enter("rendezvous")
            ready()
            threading.Event().wait()
        loads_the_data() if name == "worker-1" else waits_to_begin()
        """,
        "--strategy=multiworker",
        "--workers=2",
        "--startup_timeout_s=600",
    )
    job.pids(2)
    yield
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["task"] == "worker-1"
    assert failure["cause"].startswith(
        "hangs: not in its training yet, and all its threads wait for each other for "
    )
    assert failure["cause"].endswith("; worker-0 waits for it")
    assert "in loads_the_data" in job.log("worker-1")
    assert "in waits_to_begin" in job.log("worker-0")


def a_program_that_cannot_end_after_its_training_is_found(launch, command):
    job = launch(
        """
        def reports():
            ready()
            threading.Event().wait()
        works(1)
        phases.enter("done", step=30)
        if name == "worker-0":
            threading.Thread(target=reports).start()
        """,
        "--strategy=multiworker",
        "--workers=2",
        command=command,
    )
    job.pids(1)
    yield
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["task"] == "worker-0"
    assert failure["cause"].startswith(
        "hangs: done with its training after 30 steps, and all its threads wait for each other for "
    )
    assert "in reports" in job.log("worker-0")


def a_task_that_never_speaks_is_named_and_still_shows_its_stack(launch):
    # Before all else: the first word of a task is due a second after its start.
    loads = """
        import ctypes, os
        def loads_its_libraries():
            ctypes.PyDLL(None).sleep(1000)  # with the lock of the interpreter
        if '"index": 1' in os.environ["TF_CONFIG"]:
            loads_its_libraries()
        """
    job = launch(
        "waits_for_the_others(0)",
        "--strategy=multiworker",
        "--workers=3",
        "--startup_timeout_s=2",
        first=loads,
    )
    job.pids(2)
    yield
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["task"] == "worker-1"
    assert failure["cause"].startswith("hangs: has not started: silent for ")
    assert "in loads_its_libraries" in job.log("worker-1")
    assert "in waits_for_the_others" in job.log("worker-0")


def tasks_of_a_fork_server_that_stands_still_are_found(launch, tmp_path):
    (tmp_path / "stops.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    job = launch("", "--workers=2", "--startup_timeout_s=2", command=STOPPED)
    yield
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["cause"].startswith("hangs: has not started: silent for ")
    assert "(it has no process)" in failure["cause"]


def a_fork_server_that_is_stopped_is_replaced_for_the_next_attempt(launch):
    job = launch(
        """
        waits_for_the_others(7) if attempt == 1 else ready()
        """,
        "--strategy=multiworker",
        "--workers=2",
        "--max_restarts=1",
        "--startup_timeout_s=2",
        command=FORK,
    )
    pids = job.pids(2)
    stat = Path(f"/proc/{pids['worker-0']}/stat").read_text()
    server = int(stat.rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)
    os.kill(pids["worker-1"], signal.SIGKILL)
    yield
    assert job.end() == 0
    first, second = job.attempts()
    failure = first["first_failure"]
    assert failure["task"] == "worker-1"
    assert "its process has ended, and its parent does not say so" in failure["cause"]
    assert second["exit_code"] == 0
    assert is_gone(server)


def a_task_that_falls_silent_is_named(launch):
    job = launch(
        """
        import ctypes
        def native_code():
            works(5)  # within two seconds it says its first word
            ready()
            ctypes.PyDLL(None).sleep(1000)
        if name == "worker-1":
            native_code()
        works(5)
        waits_for_the_others(60)
        """,
        "--strategy=multiworker",
        "--workers=2",
    )
    yield
    job.pids(2)
    assert job.end() == 1
    failure = job.first_failure()
    assert failure["task"] == "worker-1"
    assert failure["cause"].startswith("hangs: does not answer: silent for ")
    assert "(its process sleeps)" in failure["cause"]
    assert "in native_code" in job.log("worker-1")


PS_JOB = """
if name == "chief-0":
    ready()
    works(until="enough")
else:
    phases.enter("serve")
    ready()
    threading.Event().wait()
"""


def a_stopped_server_that_a_ps_job_cannot_do_without_is_named(launch, frozen):
    job = launch(PS_JOB, "--strategy=ps", "--workers=1", "--ps=1")
    os.kill(job.pids(3)[frozen], signal.SIGSTOP)
    yield
    assert job.end() == 1
    assert job.first_failure()["task"] == frozen


def a_stopped_worker_of_several_is_killed_and_done_without(launch):
    job = launch(PS_JOB, "--strategy=ps", "--workers=2", "--ps=1")
    os.kill(job.pids(4)["worker-1"], signal.SIGSTOP)
    yield
    job.said("; going on with worker-0\n")
    (job.path / "enough").touch()
    assert job.end() == 0
    (attempt,) = job.attempts()
    assert [lost["task"] for lost in attempt["lost"]] == ["worker-1"]
    assert "stopped (SIGSTOP)" in attempt["lost"][0]["cause"]
    assert "done without worker-1\n" in job.text


def a_job_that_goes_on_is_left_alone(launch):
    flags = ("--strategy=multiworker", "--workers=2", "--startup_timeout_s=0.5")
    job = launch(f"ready(); works({2 * HANG_S + 1})", *flags)
    job.pids(2)
    yield
    assert job.end() == 0


def a_script_that_trains_by_itself_may_take_its_time(launch):
    job = launch(f"ready(); time.sleep({2 * HANG_S + 1})", "--startup_timeout_s=0.5")
    job.pids(1)
    yield
    assert job.end() == 0


def who_waits_for_another_process_may_take_its_time(launch):
    source = """
    import subprocess
    ready()
    waiting = threading.Thread(target=subprocess.run, args=(["sleep", "{seconds}"],))
    waiting.start()
    waiting.join()
    """
    job = launch(source.format(seconds=2 * HANG_S + 1), "--startup_timeout_s=0.5")
    job.pids(1)
    yield
    assert job.end() == 0


def a_script_that_becomes_another_program_is_not_expected_to_speak(launch):
    again = f"import time; time.sleep({2 * HANG_S + 1}); print('done')"
    source = f"ready(); os.execv(sys.executable, [sys.executable, '-c', {again!r}])"
    job = launch(source, "--startup_timeout_s=0.5")
    job.pids(1)
    yield
    assert job.end() == 0
    assert "done" in job.text


def after_a_sleep_of_the_whole_machine_nobody_is_blamed(launch):
    two = ("--strategy=multiworker", "--workers=2")
    source = f"ready(); works({2 * HANG_S + 6})"
    job = launch(source, *two, grace_s=20)  # they need not end together
    tasks = job.pids(2).values()
    job.process.send_signal(signal.SIGSTOP)
    for pid in tasks:
        os.kill(pid, signal.SIGSTOP)
    yield
    job.leave_alone(2 * HANG_S)
    job.process.send_signal(signal.SIGCONT)
    time.sleep(1)  # the launcher looks at tasks that have said nothing for long
    for pid in tasks:
        os.kill(pid, signal.SIGCONT)
    assert job.end() == 0


def tasks_that_wait_for_someone_to_read_their_output_do_not_hang(launch):
    job = launch(
        """
        phases.enter("step", step=1)
        ready()
        print(("x" * 99 + "\\n") * 20000, flush=True)
        phases.enter("done")
        """
    )
    job.pids(1)
    yield
    job.leave_alone(2 * HANG_S)  # is what is tested: behind a pager
    assert job.end() == 0


def without_a_timeout_a_job_stands_still_for_ever(launch):
    job = launch("waits_for_the_others(3)", hang_timeout_s=0)
    job.pids(1)
    yield
    job.leave_alone(2 * HANG_S)
    assert job.process.poll() is None
    job.process.terminate()
    assert job.end() == 143
    assert job.first_failure() is None
    assert "hangs" not in job.text


@STARTS
def test_who_holds_up_the_others_is_named(launch, command):
    side_by_side(
        a_stopped_task_is_named_and_the_others_show_their_stacks(launch, command),
        a_deadlock_in_a_callback_is_blamed_and_its_stack_shown(launch, command),
        a_program_that_cannot_end_after_its_training_is_found(launch, command),
    )


def test_who_does_not_speak_or_does_not_come_to_train_is_named(launch, tmp_path):
    side_by_side(
        a_task_that_falls_silent_is_named(launch),
        a_deadlock_before_the_training_is_found_though_others_wait_for_it(launch),
        a_task_that_never_speaks_is_named_and_still_shows_its_stack(launch),
        a_fork_server_that_is_stopped_is_replaced_for_the_next_attempt(launch),
        tasks_of_a_fork_server_that_stands_still_are_found(launch, tmp_path),
    )


def test_a_server_of_a_ps_job_that_is_stopped_is_named_or_done_without(launch):
    side_by_side(
        a_stopped_server_that_a_ps_job_cannot_do_without_is_named(launch, "worker-0"),
        a_stopped_server_that_a_ps_job_cannot_do_without_is_named(launch, "ps-0"),
        a_stopped_worker_of_several_is_killed_and_done_without(launch),
    )


def test_who_may_take_its_time_is_left_alone(launch):
    side_by_side(
        after_a_sleep_of_the_whole_machine_nobody_is_blamed(launch),
        a_job_that_goes_on_is_left_alone(launch),
        a_script_that_trains_by_itself_may_take_its_time(launch),
        who_waits_for_another_process_may_take_its_time(launch),
        a_script_that_becomes_another_program_is_not_expected_to_speak(launch),
        tasks_that_wait_for_someone_to_read_their_output_do_not_hang(launch),
        without_a_timeout_a_job_stands_still_for_ever(launch),
    )
