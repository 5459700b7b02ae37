"""The loop over the processes of a job, where the order of what it sees matters."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tfdist.cluster import Task
from tfdist.launch.console import Console
from tfdist.launch.events import Asked, Ended, Raised, Started
from tfdist.launch.options import Program
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen

W0 = Task("worker", 0)


class World:
    """Starter, guardian and signals of a job that has one imaginary task."""

    def __init__(self):
        self.fd, self.write_fd = os.pipe2(os.O_NONBLOCK)
        self.begun = False
        self.withdrawn = []
        self.sent = []

    # the signals

    def read(self):
        return list(os.read(self.fd, 100))

    # the guardian

    def add(self, session):
        self.session = session

    def check(self):
        pass

    def forget_empty(self):
        pass

    def end_all(self):
        return []

    # the starter

    def start(self, spec, *, env, output_fd, notes_fd):
        self.output_fd, self.notes_fd = os.dup(output_fd), os.dup(notes_fd)
        return Started(task=spec.task, pid=os.getpid(), at_s=0) if self.begun else None

    def fileno(self):
        return None

    def withdraw(self, task):
        return True

    def collect(self):
        note = {"task": "worker-0", "at": 4.5, "exit_code": 1, "cause": "ValueError"}
        os.write(self.output_fd, b"last words")
        os.write(self.notes_fd, b"not a note\n" + json.dumps(note).encode() + b"\n")
        return [Ended(task=W0, status=1, at_s=5)]

    def close(self):
        pass


@pytest.fixture
def world():
    return World()


@pytest.fixture
def processes(world, tmp_path):
    console = Console(os.open(os.devnull, os.O_WRONLY))
    screen = JobScreen(out=console, err=console)
    made = JobProcesses(
        chief=W0,
        mark="mark",
        starter=world,
        guard=world,
        screen=screen,
        signals=world,
        clock=lambda: 5.0,
    )
    made.start(
        ProcessSpec(
            task=W0,
            program=Program(),
            argv=(),
            env={},
            added=(),
            log_path=tmp_path / "log",
            title="",
        )
    )
    yield made
    made.finish()


def test_why_a_task_failed_is_told_before_its_end_and_after_its_last_words(
    world, processes, tmp_path: Path
):
    os.write(world.write_fd, bytes([signal.SIGCHLD]))
    raised, ended = processes.wait(1)
    assert raised == Raised(task=W0, exit_code=1, cause="ValueError", at_s=4.5)
    assert ended == Ended(task=W0, status=1, at_s=5)
    assert (tmp_path / "log").read_text() == "last words"


def test_requests_to_stop_are_events_and_other_signals_are_not(world, processes):
    os.write(world.write_fd, bytes([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))
    assert processes.wait(1) == [Asked(signum=signal.SIGTERM), Asked(signum=signal.SIGINT)]


def test_nothing_happening_is_no_event(processes):
    assert processes.wait(0) == []


def test_a_start_that_was_not_begun_is_taken_back_when_the_task_is_to_end(processes):
    processes.signal(W0, signal.SIGTERM)
    assert processes.wait(1) == [Ended(task=W0, status=-signal.SIGTERM, at_s=5.0)]
