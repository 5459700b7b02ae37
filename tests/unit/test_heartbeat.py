"""A task's signs of life, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
START = "import os, sys, time; from tfdist.launch import task; fd = int(sys.argv[1]);"
FAST = START + "task.start_heartbeat(fd, task='worker-0', every_s=0.02)\n"


class Pipe:
    """The launcher's end of a pipe of notes."""

    def __init__(self):
        self.read_fd, self.write_fd = os.pipe()
        self.rest = b""

    def beats(self, count):
        """Reads `count` notes more."""
        deadline_s = time.monotonic() + DEADLINE_S
        found = []
        while len(found) < count:
            while b"\n" not in self.rest:
                left_s = deadline_s - time.monotonic()
                assert select.select([self.read_fd], [], [], max(0.0, left_s))[0], "no beat came"
                self.rest += os.read(self.read_fd, 1 << 16)
            line, _, self.rest = self.rest.partition(b"\n")
            assert len(line) < select.PIPE_BUF
            found.append(json.loads(line))
        return found

    def fill(self):
        os.set_blocking(self.write_fd, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.write_fd, b"\n" * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.write_fd, b"\n")
        os.set_blocking(self.write_fd, True)


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    for fd in (pipe.read_fd, pipe.write_fd):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.fixture
def run(pipe):
    """Starts programs with the pipe; ends them after the test."""
    with contextlib.ExitStack() as stack:

        def start(source, *args):
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(source), str(pipe.write_fd), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(pipe.write_fd,),
                cwd=ROOT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def test_before_its_training_a_task_says_only_that_it_lives(pipe, run):
    before_s = time.monotonic()
    run(FAST + "sys.stdin.read()")
    first, second = pipe.beats(2)
    assert first["task"] == "worker-0"
    beat = {"phase": "import", "step": None, "first_step": None, "awaited": None, "rest": None}
    assert first["beat"] == beat | {"since": first["beat"]["since"]}
    now_s, rounded_s = time.monotonic(), 0.001  # times are sent in milliseconds
    since_s = first["beat"]["since"]
    assert before_s - rounded_s <= since_s <= first["at"] < second["at"] <= now_s + rounded_s


def test_a_task_says_what_it_is_doing(pipe, run):
    source = """
    from tfdist import phases
    phases.set_pending_work(phases.PendingWork(task="worker-1", since_s=2.5, is_first=True))
    phases.enter("step", step=4); phases.enter("validate", step=8)
    state = phases.current()
    print(state.since_s, state.first_step_s, flush=True)
    """
    process = run(FAST + textwrap.dedent(source) + "sys.stdin.read()")
    since_s, first_step_s = map(float, process.stdout.readline().split())
    while (beat := pipe.beats(1)[0]["beat"])["phase"] != "validate":
        pass
    assert beat == {
        "phase": "validate",
        "step": 8,
        "since": pytest.approx(since_s, abs=0.001),
        "first_step": pytest.approx(first_step_s, abs=0.001),
        "rest": None,
        "awaited": {"task": "worker-1", "since": 2.5, "first": True},
    }


def test_a_task_that_can_never_go_on_says_so_before_and_after_its_training(pipe, run):
    source = """
    import threading
    from tfdist import phases
    phases.enter(sys.argv[2], step=4)
    lock = threading.Lock()
    lock.acquire()
    print("on", time.monotonic(), flush=True)
    lock.acquire()
    """
    process = run(FAST + textwrap.dedent(source), "done")
    locked_s = float(process.stdout.readline().split()[1])
    deadline_s = time.monotonic() + DEADLINE_S
    while (told := pipe.beats(1)[0])["beat"]["rest"] in (None, told["at"]):
        assert time.monotonic() < deadline_s, "it does not say that it rests"
    assert locked_s - 0.001 <= told["beat"]["rest"] < told["at"]


def test_what_a_task_waits_for_in_its_training_is_for_its_deadlines(pipe, run):
    source = """
    import threading
    from tfdist import phases
    phases.enter("step", step=4)
    print("on", flush=True)
    threading.Event().wait()
    """
    process = run(FAST + textwrap.dedent(source))
    assert process.stdout.readline() == "on\n"
    while (beat := pipe.beats(1)[0]["beat"])["phase"] == "import":
        pass
    assert [beat["rest"], *(told["beat"]["rest"] for told in pipe.beats(9))] == [None] * 10


def test_a_phase_of_any_name_is_one_note(pipe, run):
    run(FAST + "from tfdist import phases; phases.enter('\"\\n' * 500); sys.stdin.read()")
    while (beat := pipe.beats(1)[0]["beat"])["phase"] == "import":
        pass
    assert beat["phase"] == "other"


def test_tasks_of_a_machine_beat_at_the_same_moments(pipe, run):
    run(START + "task.start_heartbeat(fd, task='worker-0', every_s=0.5); sys.stdin.read()")
    # A busy machine may be late for some of them.
    assert any(pipe.beats(1)[0]["at"] % 0.5 < 0.1 for _ in range(20))


def test_the_first_beat_comes_after_the_interval_so_that_a_short_task_has_none(pipe, run):
    process = run(START + "task.start_heartbeat(fd, task='worker-0', every_s=600.0)")
    assert process.wait(DEADLINE_S) == 0
    os.set_blocking(pipe.read_fd, False)
    with pytest.raises(BlockingIOError):
        os.read(pipe.read_fd, 1)


def test_a_full_pipe_holds_nothing_up_and_is_used_again_when_it_is_read(pipe, run):
    pipe.fill()
    source = "time.sleep(0.3); print('on', flush=True); print(len(sys.stdin.read(1)), flush=True)\n"
    process = run(FAST + source + "sys.stdin.read()")
    assert process.stdout.readline() == "on\n"
    process.stdin.write(".")
    process.stdin.flush()
    assert process.stdout.readline() == "1\n"
    drained = os.read(pipe.read_fd, 1 << 20)
    assert not drained.strip(b"\n")
    assert [beat["task"] for beat in pipe.beats(2)] == ["worker-0", "worker-0"]
    assert os.get_blocking(pipe.write_fd)


def test_without_a_launcher_the_thread_ends_and_the_program_goes_on(pipe, run):
    source = """
    import signal
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    while len(os.listdir("/proc/self/task")) < 2: pass
    print("on", flush=True)
    while len(os.listdir("/proc/self/task")) > 1: time.sleep(0.01)
    print("alone", flush=True)
    """
    process = run(FAST + textwrap.dedent(source))
    assert process.stdout.readline() == "on\n"
    os.close(pipe.read_fd)
    os.close(pipe.write_fd)
    assert process.communicate(timeout=DEADLINE_S)[0] == "alone\n"
    assert process.returncode == 0


def test_nothing_is_written_into_a_file_that_took_the_place_of_the_pipe(pipe, run, tmp_path):
    source = """
    os.closerange(3, 64)
    for _ in range(64 - 3): os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
    while len(os.listdir("/proc/self/task")) > 1: time.sleep(0.01)
    """
    file = tmp_path / "weights"
    process = run(FAST + textwrap.dedent(source), str(file))
    assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert file.read_bytes() == b""


def test_signals_stay_the_programs(pipe, run):
    source = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("on", flush=True)
    sys.stdin.read(1)  # the signal comes meanwhile
    print(signal.sigwait([signal.SIGUSR1]).name, flush=True)
    """
    process = run(FAST + textwrap.dedent(source))
    assert process.stdout.readline() == "on\n"
    pipe.beats(1)
    process.send_signal(signal.SIGUSR1)
    process.stdin.write(".")
    process.stdin.flush()
    assert process.communicate(timeout=DEADLINE_S)[0] == "SIGUSR1\n"


def test_the_programs_main_thread_stays_the_main_one(pipe, run):
    source = """
    while len(os.listdir("/proc/self/task")) < 2: pass
    time.sleep(0.1)
    assert not {"threading", "json", "signal", "select"} & set(sys.modules), "imported"
    import threading
    assert threading.current_thread() is threading.main_thread()
    assert threading.enumerate() == [threading.main_thread()]
    """
    process = run(FAST + textwrap.dedent(source))
    assert process.communicate(timeout=DEADLINE_S)[0] == ""


def test_a_closed_pipe_at_the_start_is_no_error(run):
    process = run(START + "os.close(fd); task.start_heartbeat(fd, task='worker-0')")
    assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert process.returncode == 0


def test_stacks_are_printed_while_no_python_code_can_run(run):
    source = """
    task.print_stacks_on_request()
    import ctypes
    def holds_the_lock_of_the_interpreter():
        print("on", flush=True)
        while True:  # a signal ends each sleep
            ctypes.PyDLL(None).sleep(600)
    holds_the_lock_of_the_interpreter()
    """
    process = run(START + textwrap.dedent(source))
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGQUIT)
    lines = iter(process.stdout.readline, "")
    assert any("holds_the_lock_of_the_interpreter" in line for line in lines)
    assert process.poll() is None


def test_a_programs_own_handler_of_the_signal_wins(run):
    source = """
    task.print_stacks_on_request()
    import signal
    signal.signal(signal.SIGQUIT, lambda *_: print("mine", flush=True))
    print("on", flush=True)
    sys.stdin.read()
    """
    process = run(START + textwrap.dedent(source))
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGQUIT)
    assert process.communicate(timeout=DEADLINE_S)[0] == "mine\n"


def test_a_beat_costs_less_than_a_thousandth_of_a_core(pipe, run):
    source = """
    from tfdist import phases
    phases.enter("step", step=3)
    def used_s(): return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    before_s = used_s()
    sys.stdin.read(1)
    print(used_s() - before_s, flush=True)
    """
    process = run(FAST + textwrap.dedent(source))
    pipe.beats(1)
    pipe.beats(100)
    process.stdin.write(".")
    process.stdin.flush()
    used_s = float(process.stdout.readline())
    assert used_s / 100 < 0.001  # of a second, as there is one beat a second
