"""A job that stands still ends, names the task that holds it up, and shows where the others are.

The tasks are plain Python: they say what they are doing, as the training does.
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

from tests.multiprocess.jobs import FORK, LAUNCH, ROOT, STARTS
from tfdist.launch.watchdog import proc_state

DEADLINE_S = 150.0
HANG_S = 6

# One that stops itself while it imports.
STOPPED = (sys.executable, "-c", FORK[2].replace("('json',)", "('stops',)"), "--start=fork")

TASK = """
import json, os, signal, sys, threading, time
from tfdist.cluster import phases

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
    """A launcher that is running, and what it has said."""

    def __init__(self, process):
        self.process = process
        self.text = ""

    def pids(self, count):
        """Waits until `count` tasks are ready; returns their process ids by name."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found := re.findall(r"ready (\S+) (\d+)\n", self.text)) < count:
            assert self._read(deadline_s), "the job ended before its tasks were ready"
        return {name: int(pid) for name, pid in found}

    def said(self, words):
        """Waits until the job has said something."""
        deadline_s = time.monotonic() + DEADLINE_S
        while words not in self.text:
            assert self._read(deadline_s), f"the job ended before it said {words!r}"

    def end(self, within_s=DEADLINE_S):
        """Reads to the end and returns the exit code."""
        deadline_s = time.monotonic() + within_s
        while self._read(deadline_s):
            pass
        return self.process.wait(max(0.0, deadline_s - time.monotonic()))

    def _read(self, deadline_s):
        left_s = max(0.0, deadline_s - time.monotonic())
        assert select.select([self.process.stdout], [], [], left_s)[0], "nothing more came in time"
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.text += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def launch(tmp_path):
    """Starts jobs; prints all they said, and their logs, at the end."""
    jobs = []

    def start(source, *flags, first="", command=LAUNCH, hang_timeout_s=HANG_S):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(first) + TASK + textwrap.dedent(source))
        flags = ("--run_dir=run", f"--hang_timeout_s={hang_timeout_s}", "--grace_s=1", *flags)
        process = subprocess.Popen(
            [*command, *flags, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        )
        jobs.append(Job(process))
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


def first_failure(tmp_path):
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    return report["attempts"][-1]["first_failure"]


def log(tmp_path, task):
    return (tmp_path / "run" / "logs" / "attempt-1" / f"{task}.log").read_text()


def is_gone(pid):
    return proc_state(pid) in (None, "Z")


@STARTS
def test_a_stopped_task_is_named_and_the_others_show_their_stacks(launch, tmp_path, command):
    job = launch(
        "waits_for_the_others(7)", "--strategy=multiworker", "--workers=3", command=command
    )
    pids = job.pids(3)
    os.kill(pids["worker-1"], signal.SIGSTOP)
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["task"] == "worker-1"
    assert "its process is stopped (SIGSTOP)" in failure["cause"]
    assert "worker-1 failed first: hangs: its process is stopped" in job.text
    for task in ("worker-0", "worker-2"):
        assert "in waits_for_the_others" in log(tmp_path, task)
    assert "waits_for_the_others" not in log(tmp_path, "worker-1")
    assert all(map(is_gone, pids.values()))


@STARTS
def test_a_deadlock_in_a_callback_is_blamed_and_its_stack_shown(launch, tmp_path, command):
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
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["task"] == "worker-2"
    assert failure["cause"].startswith("hangs: in a callback after 7 steps for ")
    assert failure["cause"].endswith("; worker-0, worker-1 wait for it")
    assert "in on_epoch_end" in log(tmp_path, "worker-2")
    for task in ("worker-0", "worker-1"):
        assert "in waits_for_the_others" in log(tmp_path, task)


def test_a_deadlock_before_the_training_is_found_though_others_wait_for_it(launch, tmp_path):
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
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["task"] == "worker-1"
    assert failure["cause"].startswith(
        "hangs: not in its training yet, and all its threads wait for each other for "
    )
    assert failure["cause"].endswith("; worker-0 waits for it")
    assert "in loads_the_data" in log(tmp_path, "worker-1")
    assert "in waits_to_begin" in log(tmp_path, "worker-0")


@STARTS
def test_a_program_that_cannot_end_after_its_training_is_found(launch, tmp_path, command):
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
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["task"] == "worker-0"
    assert failure["cause"].startswith(
        "hangs: done with its training after 30 steps, and all its threads wait for each other for "
    )
    assert "in reports" in log(tmp_path, "worker-0")


def test_a_task_that_never_speaks_is_named_and_still_shows_its_stack(launch, tmp_path):
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
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["task"] == "worker-1"
    assert failure["cause"].startswith("hangs: has not started: silent for ")
    assert "in loads_its_libraries" in log(tmp_path, "worker-1")
    assert "in waits_for_the_others" in log(tmp_path, "worker-0")


def test_tasks_of_a_fork_server_that_stands_still_are_found(launch, tmp_path):
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "stops.py").write_text(stops)
    job = launch("", "--workers=2", "--startup_timeout_s=2", command=STOPPED)
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["cause"].startswith("hangs: has not started: silent for ")
    assert "(it has no process)" in failure["cause"]


def test_a_fork_server_that_is_stopped_is_replaced_for_the_next_attempt(launch, tmp_path):
    job = launch(
        """
        waits_for_the_others(7) if attempt == 1 else ready()
        """,
        "--strategy=multiworker",
        "--workers=2",
        "--max_restarts=1",
        command=FORK,
    )
    pids = job.pids(2)
    stat = Path(f"/proc/{pids['worker-0']}/stat").read_text()
    server = int(stat.rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)
    os.kill(pids["worker-1"], signal.SIGKILL)
    assert job.end() == 0
    first, second = json.loads((tmp_path / "run" / "report.json").read_text())["attempts"]
    failure = first["first_failure"]
    assert failure["task"] == "worker-1"
    assert "its process has ended, and its parent does not say so" in failure["cause"]
    assert second["exit_code"] == 0
    assert is_gone(server)


def test_a_task_that_falls_silent_is_named(launch, tmp_path):
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
    job.pids(2)
    assert job.end() == 1
    failure = first_failure(tmp_path)
    assert failure["task"] == "worker-1"
    assert failure["cause"].startswith("hangs: does not answer: silent for ")
    assert "(its process sleeps)" in failure["cause"]
    assert "in native_code" in log(tmp_path, "worker-1")


PS_JOB = """
if name == "chief-0":
    ready()
    works(until="enough")
else:
    phases.enter("serve")
    ready()
    threading.Event().wait()
"""


@pytest.mark.parametrize("frozen", ["worker-0", "ps-0"])
def test_a_stopped_server_that_a_ps_job_cannot_do_without_is_named(launch, tmp_path, frozen):
    job = launch(PS_JOB, "--strategy=ps", "--workers=1", "--ps=1")
    os.kill(job.pids(3)[frozen], signal.SIGSTOP)
    assert job.end() == 1
    assert first_failure(tmp_path)["task"] == frozen


def test_a_stopped_worker_of_several_is_killed_and_done_without(launch, tmp_path):
    job = launch(PS_JOB, "--strategy=ps", "--workers=2", "--ps=1")
    os.kill(job.pids(4)["worker-1"], signal.SIGSTOP)
    job.said("; going on with worker-0\n")
    (tmp_path / "enough").touch()
    assert job.end() == 0
    (attempt,) = json.loads((tmp_path / "run" / "report.json").read_text())["attempts"]
    assert [lost["task"] for lost in attempt["lost"]] == ["worker-1"]
    assert "stopped (SIGSTOP)" in attempt["lost"][0]["cause"]
    assert "done without worker-1\n" in job.text


def test_a_job_that_goes_on_is_left_alone(launch):
    flags = ("--strategy=multiworker", "--workers=2", "--startup_timeout_s=0.5")
    job = launch(f"works({2 * HANG_S + 1})", *flags)
    assert job.end() == 0


def test_a_script_that_trains_by_itself_may_take_its_time(launch):
    job = launch(f"time.sleep({2 * HANG_S + 1})", "--startup_timeout_s=0.5")
    assert job.end() == 0


def test_who_waits_for_another_process_may_take_its_time(launch):
    source = """
    import subprocess
    waiting = threading.Thread(target=subprocess.run, args=(["sleep", "{seconds}"],))
    waiting.start()
    waiting.join()
    """
    job = launch(source.format(seconds=2 * HANG_S + 1), "--startup_timeout_s=0.5")
    assert job.end() == 0


def test_a_script_that_becomes_another_program_is_not_expected_to_speak(launch):
    again = f"import time; time.sleep({2 * HANG_S + 1}); print('done')"
    source = f"os.execv(sys.executable, [sys.executable, '-c', {again!r}])"
    job = launch(source, "--startup_timeout_s=0.5")
    assert job.end() == 0
    assert "done" in job.text


def test_after_a_sleep_of_the_whole_machine_nobody_is_blamed(launch):
    job = launch(f"ready(); works({2 * HANG_S + 6})", "--strategy=multiworker", "--workers=2")
    tasks = job.pids(2).values()
    job.process.send_signal(signal.SIGSTOP)
    for pid in tasks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * HANG_S)
    job.process.send_signal(signal.SIGCONT)
    time.sleep(1)  # the launcher looks at tasks that have said nothing for long
    for pid in tasks:
        os.kill(pid, signal.SIGCONT)
    assert job.end() == 0


def test_tasks_that_wait_for_someone_to_read_their_output_do_not_hang(launch):
    job = launch(
        """
        phases.enter("step", step=1)
        ready()
        print(("x" * 99 + "\\n") * 20000, flush=True)
        phases.enter("done")
        """
    )
    job.pids(1)
    time.sleep(2 * HANG_S)  # is what is tested: behind a pager
    assert job.end() == 0


def test_without_a_timeout_a_job_stands_still_for_ever(launch, tmp_path):
    job = launch("waits_for_the_others(3)", hang_timeout_s=0)
    job.pids(1)
    with pytest.raises(AssertionError, match="nothing more came in time"):
        job.end(HANG_S + 2)
    job.process.terminate()
    assert job.end() == 143
    assert first_failure(tmp_path) is None
