"""A job that hangs ends, names the task that holds it up, and shows where the others are.

The tasks are plain Python: they say what they are doing, as the training does. Each case has its
job wait in its first half, which ends at `yield`, and looks at it in its second: so that jobs wait
side by side.
"""

import itertools
import os
import signal
import textwrap
import time

import pytest

from tests.multiprocess.jobs import FORK, LAUNCH, ROOT, Job, report, side_by_side
from tfdist.launch.machine import proc_state

HANG_S = 6

# The tasks import a part of tfdist and no TensorFlow: `auto` would import it all for each job.
EXEC = (*LAUNCH, "--start=exec")
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


class HangingJob(Job):
    """A job whose tasks say their names when they are ready."""

    ready_s = 0.0

    def pids(self, count):
        """Waits until `count` tasks are ready; returns their process ids by name."""
        found = self.read_until(r"ready (\S+) (\d+)\n", count=count)
        self.ready_s = time.monotonic()
        return {name: int(pid) for name, pid in found}

    def leave_alone(self, seconds):
        """Returns when its tasks have been ready for so long."""
        time.sleep(max(0.0, self.ready_s + seconds - time.monotonic()))

    def attempts(self):
        return report(self.path / "run")["attempts"]

    def blames(self, *tasks):
        """Why it ended, which it did by one of these tasks."""
        assert self.end() == 1
        failure = self.attempts()[-1]["first_failure"]
        assert failure["task"] in tasks
        return failure["cause"]

    def log(self, task):
        return (self.path / "run" / "logs" / "attempt-1" / f"{task}.log").read_text()


@pytest.fixture
def hang(launch, tmp_path):
    """Starts jobs in directories of their own."""
    numbers = itertools.count()

    def start(source, *flags, first="", command=EXEC, hang_timeout_s=HANG_S, grace_s=1):
        path = tmp_path / f"job-{next(numbers)}"
        path.mkdir()
        source = textwrap.dedent(first) + TASK + textwrap.dedent(source)
        times = (f"--hang_timeout_s={hang_timeout_s}", f"--grace_s={grace_s}")
        python = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
        where = {"directory": path, "kind": HangingJob}
        return launch(source, "--run_dir=run", *times, *flags, command=command, env=python, **where)

    return start


def is_gone(pid):
    return proc_state(pid) in (None, "Z")


def a_task_that_falls_silent_is_named(hang):
    job = hang(
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
    cause = job.blames("worker-1")
    assert cause.startswith("hangs: no heartbeat for ")
    assert ", last report: " in cause
    assert "in native_code" in job.log("worker-1")


def tasks_that_wait_for_someone_to_read_their_output_do_not_hang(hang):
    job = hang(
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


def a_stopped_task_is_named_and_the_others_show_their_stacks(hang):
    job = hang("waits_for_the_others(7)", "--strategy=multiworker", "--workers=3", command=FORK)
    pids = job.pids(3)
    os.kill(pids["worker-1"], signal.SIGSTOP)
    yield
    cause = job.blames("worker-1")
    assert "its process is stopped" in cause
    assert "worker-1 failed first: hangs: no heartbeat for " in job.text
    for task in ("worker-0", "worker-2"):
        assert "in waits_for_the_others" in job.log(task)
    assert "waits_for_the_others" not in job.log("worker-1")
    assert all(map(is_gone, pids.values()))


def test_silent_tasks_are_named_unless_their_output_is_blocked(hang):
    side_by_side(
        a_task_that_falls_silent_is_named(hang),
        a_stopped_task_is_named_and_the_others_show_their_stacks(hang),
        tasks_that_wait_for_someone_to_read_their_output_do_not_hang(hang),
    )
