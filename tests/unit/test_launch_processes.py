"""The loop over the processes of a job, where the order of what it sees matters."""

import contextlib
import dataclasses
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest

from tests.clock import Clock
from tfdist.cluster import ClusterSpec, Task
from tfdist.launch.events import (
    SAME_REQUEST_S,
    Beat,
    Ended,
    KillOne,
    Raised,
    Signal,
    SignalPipe,
    Start,
    Started,
    StopRequest,
)
from tfdist.launch.fork_server import ForkStarter
from tfdist.launch.options import Program
from tfdist.launch.plan import Attempt, ProcessSpec
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import Console, JobScreen
from tfdist.phases import PendingWork

DEADLINE_S = 60.0
pytestmark = pytest.mark.usefixtures("at_a_terminal")
W0, W1 = Task("worker", 0), Task("worker", 1)
SPEC = ProcessSpec(task=W0, program=Program(), argv=(), env={}, added=(), title="")
RAISED = {"event": "raised", "task": "worker-0", "at_s": 4.5}


class World:
    """Starter and signals of a job that has one imaginary task, its guardian and the kernel."""

    pid = None

    def __init__(self):
        self.fd, self.write_fd = os.pipe2(os.O_NONBLOCK)
        self.begun = False
        self.started = []
        self.status = 1
        self.causes = {}
        self.given_up = self.is_full = False
        self.guard = Mock(mark="mark")
        self.guard.end_all.return_value = []
        self.evidence = Mock(of_kill=lambda pid: self.causes.get(pid, ""))

    def wait(self, processes):
        """Has a process change; returns what `processes` tell then."""
        os.write(self.write_fd, bytes([signal.SIGCHLD]))
        return processes.wait(1)

    def starts(self, processes, *, pid):
        self.started = [Started(task=W0, pid=pid, at_s=0)]
        self.wait(processes)

    # the signals

    def read(self):
        return list(os.read(self.fd, 100))

    # the starter

    def start(self, spec, *, env, output_fd, notes_fd):
        if self.is_full:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.output_fd, self._notes_fd = os.dup(output_fd), os.dup(notes_fd)
        return Started(task=spec.task, pid=os.getpid(), at_s=0) if self.begun else None

    def fileno(self):
        return None

    def give_up(self):
        self.given_up = True

    def collect(self):
        if self.started:
            started, self.started = self.started, []
            return started
        note = {**RAISED, "exit_code": 1, "cause": "ValueError", "step": 31}
        os.write(self.output_fd, b"last words")
        os.write(self._notes_fd, b"not a note\n" + json.dumps(note).encode() + b"\n")
        return [Ended(task=W0, status=self.status, at_s=5)]

    def close(self):
        pass


@pytest.fixture
def world():
    return World()


@pytest.fixture
def processes(world, tmp_path, monkeypatch):
    for name, part in [
        ("Starter", world),
        ("GuardianClient", world.guard),
        ("KillEvidence", world.evidence),
    ]:
        monkeypatch.setattr(f"tfdist.launch.processes.{name}", Mock(return_value=part))
    console = Console(os.open(os.devnull, os.O_WRONLY))
    screen = JobScreen(out=console, err=console)
    job = Mock(start="exec", fork_server=None, shards=4)
    job.specs.return_value = [SPEC, dataclasses.replace(SPEC, task=W1)]
    attempt = Attempt(number=1, run_dir=str(tmp_path), cluster=ClusterSpec(), tasks=(W0, W1))
    with JobProcesses(job, screen=screen, signals=world) as made:
        made.begin(attempt, fork_log="")
        assert made.perform(Start(W0)) is None
        yield made
        made.finish()


def test_a_cause_is_reported_after_output_before_the_end(world, processes, tmp_path):
    raised, ended = world.wait(processes)
    assert raised == Raised(task=W0, exit_code=1, cause="ValueError", at_s=4.5, step=31)
    assert ended == Ended(task=W0, status=1, at_s=5)
    assert (tmp_path / "logs/attempt-1/worker-0.log").read_text() == "last words"


@pytest.mark.parametrize(("exit_code", "muted"), [(1, True), (130, False), (143, False)])
def test_only_the_first_traceback_is_shown(processes, exit_code, muted):
    processes.perform(Start(W1))
    outputs = [processes._screen._outputs[task] for task in (W0, W1)]
    with open(f"/proc/self/fd/{processes._notes_fd}", "w") as pipe:
        for task in ("worker-1", "worker-0"):
            note = {**RAISED, "task": task, "exit_code": exit_code, "cause": "", "step": 31}
            pipe.write(json.dumps(note) + "\n")
    processes.wait(1)
    assert [output.muted for output in outputs] == [muted, False]


def test_a_closed_output_is_one_stop_request(processes):
    """Another host asks host 0, and goes on until it is told to end its tasks: two would kill."""
    processes._screen.out.is_closed = True
    assert [*processes.wait(0), *processes.wait(0)] == [StopRequest(signum=signal.SIGPIPE)]


def test_a_start_is_given_up_in_the_end(world, processes):
    processes.perform(Signal(W0, signal.SIGTERM))
    assert not world.given_up
    processes.perform(Signal(W0, signal.SIGKILL))
    assert world.given_up


@contextlib.contextmanager
def fork_starter(path, **options):
    """A starter of forks, which is asked for one task."""
    starter = ForkStarter(
        environ=dict(os.environ),
        log_path=path / "log",
        cause_of_kill=lambda pid: f"killed for its memory ({pid})",
        **options,
    )
    with open(os.devnull) as file:
        starter.start(SPEC, env={}, output_fd=file.fileno(), notes_fd=file.fileno())
    yield starter
    starter.close()


def test_an_abandoned_fork_server_ends_with_its_tasks(tmp_path):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there, fork_starter(tmp_path, server=here) as starter:
        there.send(b'{"ready": true}')
        assert starter.collect() == []
        starter.give_up()
        (ended,) = starter.collect()
        assert (ended.task, ended.status) == (W0, -signal.SIGKILL)
        assert starter.is_over


def test_a_kernel_kill_of_a_fork_server_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.launch.fork_server.IMPORTS", ("json",))
    with fork_starter(tmp_path) as starter:
        os.kill(starter.pid, signal.SIGKILL)
        while not starter.is_over or not (events := starter.collect()):
            select.select([starter.fileno()], [], [], DEADLINE_S)
        said = f"the fork server exited, killed for its memory ({starter.pid}): see {tmp_path}"
        assert events[-1].cause.startswith(said)


def test_a_heartbeat_is_an_event(processes):
    said = {"phase": "step", "step": 7, "since_s": 4.0, "first_step_s": None}
    waits = {"awaited": {"task": "worker-0", "since_s": 3.0, "is_first": False}}
    note = {"event": "beat", "task": "worker-0", "at_s": 4.5, **said, **waits}
    stray, bad = {**note, "task": "worker-9"}, {**note, "phase": 7}
    lie = {"event": "ended", "task": "worker-0", "status": 0, "at_s": 4.5}
    with open(f"/proc/self/fd/{processes._notes_fd}", "w") as pipe:
        pipe.writelines(json.dumps(one) + "\n" for one in (stray, bad, lie, note))
    (event,) = processes.wait(1)
    awaited = PendingWork(task="worker-0", since_s=3.0, is_first=False)
    assert event == Beat(task=W0, at_s=4.5, awaited=awaited, **said)


def test_leftovers_end_and_a_kernel_kill_is_explained(world, processes):
    world.status, world.causes = -signal.SIGKILL, {4711: "out of memory"}
    world.starts(processes, pid=4711)
    processes.perform(KillOne(W0))
    world.guard.end_session.assert_called_once_with(4711)
    *_, ended = world.wait(processes)
    assert ended == Ended(task=W0, status=-signal.SIGKILL, at_s=5, cause="out of memory")


@pytest.mark.parametrize("task", [W0, W1])
def test_a_failed_start_does_not_affect_the_next_one(world, processes, monkeypatch, task):
    """As that of a worker of a ps job, when the machine had no process left for it."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append(signum))
    if task == W1:
        world.is_full = True
        ended = processes.perform(Start(W1))
        assert ended.cause == "cannot start: Resource temporarily unavailable"
    processes.perform(KillOne(task))
    if task == W0:  # asked for, and it fails later
        assert Ended in [type(event) for event in world.wait(processes)]
    world.is_full, world.begun = False, True
    assert processes.perform(Start(task, restart=1)) is None
    assert Started in [type(event) for event in processes.wait(0)]
    assert sent == []


def test_a_bound_command_ends_with_its_parent():
    code = (
        "import subprocess, sys, time; from tfdist.launch.guardian import bound_command;"
        "own = [sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(600)'];"
        "subprocess.Popen(bound_command(own)).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"1\n"
        owner.kill()
        assert owner.stdout.read() == b""  # both have let go of it


# What the launcher hears.


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_repeated_at_once_is_one_request(again, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tfdist.launch.events.time", Mock(monotonic=clock))
    with SignalPipe() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(again)
        assert signals.read() == [signal.SIGTERM]
        clock.now_s += 0.9 * SAME_REQUEST_S
        signal.raise_signal(again)
        assert signals.read() == []
        clock.now_s += 0.2 * SAME_REQUEST_S
        signal.raise_signal(again)
        assert signals.read() == [again]


def test_signals_blocked_at_the_start_are_heard_then_restored():
    """As of a launcher that a thread without signals has started."""
    blocked = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with SignalPipe() as signals:
            signal.raise_signal(signal.SIGCHLD)
            assert signals.read() == [signal.SIGCHLD]
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & blocked
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
