"""A task's process: its program and its signs of life."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.task import note_to, run_program


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
        (
            "RuntimeError('Graph execution error:\\n\\nDetected at node x\\n2 root errors found.\\n"
            "  (0) INVALID_ARGUMENT: no file\\n\\t [[{{node x}}]]\\n  (1) CANCELLED: step\\n"
            "0 derived errors ignored. [Op:__inference_1]')",
            "RuntimeError: Graph execution error: INVALID_ARGUMENT: no file",
        ),
    ],
)
def test_the_cause_is_the_line_of_the_exception(tmp_path, raised, cause, monkeypatch):
    monkeypatch.setattr("sys.argv", ["test"])
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script, said = tmp_path / "script.py", []
    script.write_text(f"raise {raised}")
    with pytest.raises(SystemExit):
        run_program(str(script), [], is_module=False, failed=lambda *note: said.append(note))
    assert said == [(1, cause)]


ROOT = Path(__file__).parents[2]


def test_a_backport_beside_tfdist_replaces_no_module_of_python(tmp_path):
    """As PyPI's dataclasses in site-packages, which old requirements list."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tfdist", tmp_path / "tfdist", ignore=ignored)
    (tmp_path / "dataclasses.py").write_text("raise ImportError('a backport')")
    command = [sys.executable, str(tmp_path / "tfdist/launch/bootstrap.py"), "agent"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == EXIT_PEER_MISSING, done.stderr  # it has no launcher


# A task's signs of life, in processes of its own.

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
    **{"event": "beat", "task": "worker-0"},
    **dict.fromkeys(("first_step_s", "awaited")),
}


def test_a_forked_process_does_not_report_for_its_task(pipe):
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
def test_a_note_is_whole_despite_a_user_json_module(pipe, cause, monkeypatch):
    monkeypatch.setitem(sys.modules, "json", types.ModuleType("json"))
    note_to(pipe.write_fd, task="worker-0")(1, cause)
    said = pipe.notes(1)[0]["cause"]
    assert cause.startswith(said)
    assert len(said) >= min(len(cause), 100)


def test_a_task_reports_its_current_phase(pipe, run):
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


def test_short_tasks_and_closed_pipes_send_no_heartbeat(pipe, run):
    source = "task.start_heartbeat(fd, task='worker-0', every_s=600.0);"
    process = run(f"{START} {source} os.close(fd); {source}")
    assert process.communicate(timeout=DEADLINE_S)[0] == ""
    assert process.returncode == 0
    os.set_blocking(pipe.read_fd, False)
    with pytest.raises(BlockingIOError):
        os.read(pipe.read_fd, 1)


def test_a_full_pipe_does_not_block_and_is_reused(pipe, run):
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


def test_without_a_launcher_only_the_heartbeat_thread_ends(pipe, run):
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


def test_a_file_replacing_the_pipe_is_not_written(pipe, run, tmp_path):
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
    assert not {"threading", "select"} & set(sys.modules), "imported"
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
