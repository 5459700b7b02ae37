"""A task's process: its program, its signs of life, and whether it is at rest."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from tests.processes import until
from tfdist.launch.task import Rest, note_to, run_program


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        ("ValueError('boom\\nmore')", "ValueError: boom"),
        ("ValueError", "ValueError"),
        (
            "RuntimeError('Graph execution error:\\n\\nDetected at node x\\n"
            "Connection reset by peer\\n\\t [[{{node x}}]] [Op:__inference_1]')",
            "RuntimeError: Graph execution error: Connection reset by peer",
        ),
    ],
)
def test_the_line_that_says_what_happened_is_the_cause(tmp_path, raised, cause, monkeypatch):
    monkeypatch.setattr("sys.argv", ["test"])
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script, said = tmp_path / "script.py", []
    script.write_text(f"raise {raised}")
    with pytest.raises(SystemExit):
        run_program(str(script), [], is_module=False, failed=lambda *note: said.append(note))
    assert said == [(1, cause)]


# A task's signs of life, in processes of its own.

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
START = "import os, sys, time; from tfdist.launch import task; fd = int(sys.argv[1]);"
FAST = START + "task.start_heartbeat(fd, task='worker-0', every_s=0.02)\n"


class Pipe:
    """The launcher's end of a pipe of notes."""

    def __init__(self):
        self.read_fd, self.write_fd = os.pipe()
        self.rest = b""

    def beat_of(self, phase):
        """Reads on to a beat in a phase."""
        while (beat := self.notes(1)[0])["phase"] != phase:
            pass
        return beat

    def notes(self, count):
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


def go_on(process):
    process.stdin.write(".")
    process.stdin.flush()


def end_session(pid):
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def run(pipe):
    """Starts programs with the pipe; ends them, and what they have started, after the test."""
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
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(end_session, process.pid)
            return process

        yield start


BEAT = {
    "is_alone": False,
    **{"event": "beat", "task": "worker-0"},
    **dict.fromkeys(("first_step_s", "rest_s", "awaited")),
}


def test_a_process_that_the_program_has_forked_does_not_fail_for_its_task(pipe):
    failed = note_to(pipe.write_fd, task="worker-0")
    child = os.fork()
    if not child:
        failed(3, "exit code 3")  # as `sys.exit(3)` there calls it
        os._exit(0)
    os.waitpid(child, 0)
    failed(4, "ValueError: mine")
    (note,) = pipe.notes(1)
    assert (note["task"], note["exit_code"], note["cause"]) == ("worker-0", 4, "ValueError: mine")


@pytest.mark.parametrize("cause", ["\N{FIRE}\udc80" * 1000, 'ValueError: "\u00fc"\ttab'])
def test_a_note_is_one_piece_though_the_program_has_a_module_called_json(pipe, cause, monkeypatch):
    monkeypatch.setitem(sys.modules, "json", types.ModuleType("json"))
    note_to(pipe.write_fd, task="worker-0")(1, cause)
    said = pipe.notes(1)[0]["cause"]
    assert cause.startswith(said)
    assert len(said) >= min(len(cause), 100)


def test_a_task_says_what_it_is_doing(pipe, run):
    source = """
    sys.stdin.read(1)
    from tfdist import phases
    phases.set_pending_work(phases.PendingWork(task="worker-1", since_s=2.5, is_first=True))
    phases.enter("step", step=4); phases.enter("validate", step=8)
    state = phases.current()
    print(state.since_s, state.first_step_s, flush=True)
    sys.stdin.read(1)
    phases.enter('"\\n' * 500)
    sys.stdin.read(1)
    """
    before_s = time.monotonic()
    process = run(FAST + textwrap.dedent(source))
    first, second = pipe.notes(2)
    since_s, at_s = first.pop("since_s"), first.pop("at_s")
    assert first == {**BEAT, "phase": "import", "step": None}  # all that is known so early
    assert before_s <= since_s <= at_s < second["at_s"] <= time.monotonic()
    go_on(process)
    since_s, first_step_s = map(float, process.stdout.readline().split())
    beat = pipe.beat_of("validate")
    del beat["at_s"]
    assert beat == {
        **BEAT,
        "phase": "validate",
        "step": 8,
        "since_s": since_s,
        "first_step_s": first_step_s,
        "awaited": {"task": "worker-1", "since_s": 2.5, "is_first": True},
    }
    go_on(process)
    pipe.beat_of("other")  # a name that would not be a note


@pytest.mark.parametrize("phase", ["done", "step"])
def test_a_task_that_can_never_go_on_says_so_outside_of_its_training(pipe, run, phase):
    source = """
    import threading
    from tfdist import phases
    phases.enter(sys.argv[2], step=4)
    lock = threading.Lock()
    lock.acquire()
    print(time.monotonic(), flush=True)
    lock.acquire()
    """
    process = run(FAST + textwrap.dedent(source), phase)
    locked_s = float(process.stdout.readline())
    pipe.beat_of(phase)
    if phase == "step":  # which has a deadline
        assert [told["rest_s"] for told in pipe.notes(9)] == [None] * 9
        return
    deadline_s = time.monotonic() + DEADLINE_S
    while (told := pipe.notes(1)[0])["rest_s"] in (None, told["at_s"]):
        assert time.monotonic() < deadline_s, "it does not say that it rests"
    assert locked_s <= told["rest_s"] < told["at_s"]


def test_tasks_of_a_machine_beat_at_the_same_moments(pipe, run):
    run(START + "task.start_heartbeat(fd, task='worker-0', every_s=0.5); sys.stdin.read()")
    # A busy machine may be late for some of them.
    assert any(pipe.notes(1)[0]["at_s"] % 0.5 < 0.1 for _ in range(20))


def test_a_short_task_has_no_beat_and_one_whose_pipe_is_closed_no_error(pipe, run):
    source = "task.start_heartbeat(fd, task='worker-0', every_s=600.0);"
    process = run(f"{START} {source} os.close(fd); {source}")
    assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert process.returncode == 0
    os.set_blocking(pipe.read_fd, False)
    with pytest.raises(BlockingIOError):
        os.read(pipe.read_fd, 1)


def test_a_full_pipe_holds_nothing_up_and_is_used_again_when_it_is_read(pipe, run):
    pipe.fill()
    source = "time.sleep(0.3); print('on', flush=True); print(len(sys.stdin.read(1)), flush=True)\n"
    process = run(FAST + source + "sys.stdin.read()")
    assert process.stdout.readline() == "on\n"
    go_on(process)
    assert process.stdout.readline() == "1\n"
    drained = os.read(pipe.read_fd, 1 << 20)
    assert not drained.strip(b"\n")
    assert [beat["task"] for beat in pipe.notes(2)] == ["worker-0", "worker-0"]
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


def test_signals_and_the_main_thread_stay_the_programs(pipe, run):
    source = """
    task.print_stacks_on_request()
    while len(os.listdir("/proc/self/task")) < 2: pass
    time.sleep(0.1)
    assert not {"threading", "json", "signal", "select"} & set(sys.modules), "imported"
    import signal, threading
    assert threading.enumerate() == [threading.main_thread()] == [threading.current_thread()]
    signal.signal(signal.SIGQUIT, lambda *_: print("mine", flush=True))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("on", flush=True)
    sys.stdin.read(1)  # the signals come meanwhile
    print(signal.sigwait([signal.SIGUSR1]).name, flush=True)
    """
    process = run(FAST + textwrap.dedent(source))
    assert process.stdout.readline() == "on\n"
    pipe.notes(1)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGQUIT)  # at which a task prints its stacks
    go_on(process)
    assert process.communicate(timeout=DEADLINE_S)[0] == "mine\nSIGUSR1\n"


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
    pipe.notes(1)
    pipe.notes(50)
    go_on(process)
    used_s = float(process.stdout.readline())
    assert used_s / 50 < 0.001  # of a second, as there is one beat a second


# A process is at rest when nothing in it will ever go on, and only then.

HEAD = "import os, subprocess, sys, threading, time\ndef ready(): print('ready', flush=True)\n"

AT_REST = {
    "a lock taken twice": "lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
    "two locks in two orders": """
        one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
        def take(first, second):
            with first:
                both.wait()
                with second:
                    pass
        threading.Thread(target=take, args=(one, other)).start()
        ready()
        take(other, one)
    """,
    "an import that waits for a thread that imports": """
        import pathlib, tempfile
        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "waits.py").write_text(
            "import threading\\n"
            "def again(): import waits\\n"
            "thread = threading.Thread(target=again)\\n"
            "thread.start()\\n"
            "print('ready', flush=True)\\n"
            "thread.join()\\n"
        )
        sys.path.insert(0, folder)
        import waits
    """,
    "a queue that nobody fills": "import queue; ready(); queue.Queue().get()",
    "the end, where a thread does not": (
        "threading.Thread(target=threading.Event().wait).start(); ready()"
    ),
}
GOES_ON = {
    "sleep": "ready(); time.sleep(1000)",
    "input": "ready(); input()",
    "work": "ready()\nwhile True: pass",
    "a wait with an end": "ready(); threading.Event().wait(1000)",
    "another program": "ready(); subprocess.run(['sleep', '1000'])",
    "another process": """
        import multiprocessing
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire(); ready(); lock.acquire()
    """,
    "a connection": "import socket; here, there = socket.socketpair(); ready(); here.recv(1)",
    "a thread that waits for a connection": """
        import queue, socket
        here, there = socket.socketpair()
        got = queue.Queue()
        threading.Thread(target=lambda: got.put(here.recv(1)), daemon=True).start()
        ready(); got.get()
    """,
    "a thread that looks now and then": """
        found = threading.Event()
        def look():
            while not os.path.exists("/no/such/file"): time.sleep(0.01)
        threading.Thread(target=look, daemon=True).start()
        ready(); found.wait()
    """,
    "a lock of a file": """
        import fcntl, tempfile
        file = tempfile.NamedTemporaryFile()
        again = open(file.name)
        fcntl.flock(file, fcntl.LOCK_EX); ready(); fcntl.flock(again, fcntl.LOCK_EX)
    """,
    "a signal": "import signal; ready(); signal.pause()",
    "an event loop": """
        import asyncio
        async def main():
            ready(); await asyncio.Future()
        asyncio.run(main())
    """,
}


@pytest.fixture
def rests(run):
    """Starts programs side by side; what is known of the rest of each, by its name."""

    def of(programs):
        found = {}
        for name, source in programs.items():
            process = run(HEAD + textwrap.dedent(source))
            assert process.stdout.readline() == "ready\n"
            found[name] = Rest(f"/proc/{process.pid}", cpu_s=lambda: 0.0)
        return found

    return of


def test_what_can_never_go_on_is_at_rest(rests):
    of_each, now_s, since_s = rests(AT_REST), itertools.count(1.0), {}

    def all_rest():
        """Whether the same threads of each are asleep, three times more."""
        at_s = next(now_s)
        since_s.update({name: rest.since_s(at_s) for name, rest in of_each.items()})
        return None not in since_s.values() and at_s >= max(since_s.values()) + 3

    until(all_rest, within_s=DEADLINE_S, why=lambda: f"some go on: {since_s}")


def test_what_may_go_on_is_not(rests):
    of_each = rests(GOES_ON)
    for now_s in range(20):
        found = {name: rest.since_s(float(now_s)) for name, rest in of_each.items()}
        assert found == dict.fromkeys(GOES_ON)
        time.sleep(0.02)


def test_a_process_of_which_nothing_is_known_is_not(tmp_path):
    assert Rest(str(tmp_path)).since_s(1.0) is None


class Threads:
    """Threads as /proc shows them."""

    SLEEPS = "202 0x7f00 0x189 0x0 0x0 0x0 0xffffffff 0x7ffc 0x7f01"
    TIMED = "202 0x7f00 0x189 0x0 0x7fff 0x0 0xffffffff 0x7ffc 0x7f01"
    HEARS = "232 0x6 0x7f00 0x1 0xffffffff 0x0 0x0 0x7ffc 0x7f01"
    NAPS = "230 0x0 0x0 0x7ffc 0x7ffd 0x0 0x0 0x7ffc 0x7f01"
    SLEEPS_IN_PYTHON = "230 0x1 0x1 0x7ffc 0x0 0x0 0x0 0x7ffc 0x7f01"
    READS = "0 0x6 0x7f00 0x1 0x0 0x0 0x0 0x7ffc 0x7f01"

    def __init__(self, folder):
        self.folder = folder

    def set(self, number, call, *, turns=1):
        thread = self.folder / "task" / str(number)
        thread.mkdir(parents=True, exist_ok=True)
        (thread / "syscall").write_text(call + "\n")
        counts = f"voluntary_ctxt_switches:\t{turns}\nnonvoluntary_ctxt_switches:\t0\n"
        (thread / "status").write_text(f"Name:\tx\n{counts}")


@pytest.fixture
def threads(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.launch.task._FUTEX", b"202")
    monkeypatch.setattr("tfdist.launch.task._SLEEP", b"230")
    monkeypatch.setattr("tfdist.launch.task._EPOLL", (b"232",))
    return Threads(tmp_path)


def test_who_has_run_since_rests_from_now_on(threads, tmp_path):
    rest = Rest(str(tmp_path), cpu_s=lambda: 0.0)
    threads.set(1, Threads.SLEEPS)
    assert [rest.since_s(now_s) for now_s in (1.0, 2.0)] == [1.0, 1.0]
    threads.set(1, Threads.SLEEPS, turns=2)
    assert [rest.since_s(now_s) for now_s in (3.0, 4.0)] == [3.0, 3.0]
    threads.set(2, Threads.SLEEPS)
    assert rest.since_s(5.0) == 5.0


def test_threads_that_hear_peers_may_wake_up_but_hardly_work(threads, tmp_path):
    worked_s = [0.0]
    rest = Rest(str(tmp_path), cpu_s=lambda: worked_s[0])
    threads.set(1, Threads.SLEEPS)
    calls = (Threads.TIMED, Threads.HEARS, "running", Threads.SLEEPS, Threads.NAPS)
    for turn, call in enumerate(calls):
        threads.set(2, call, turns=turn)
        assert rest.since_s(1.0 + turn, runtime=(2,)) == 1.0
        assert rest.since_s(1.0 + turn, but=(2,)) == 1.0
    worked_s[0] = 1.5
    assert rest.since_s(6.0, runtime=(2,)) == 6.0  # they compute
    for call in (Threads.READS, Threads.SLEEPS_IN_PYTHON):
        threads.set(2, call)
        assert rest.since_s(7.0, runtime=(2,)) is None
    assert rest.since_s(7.0) is None
