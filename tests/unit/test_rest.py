"""A process is at rest when nothing in it will ever go on, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tfdist.launch.task import Rest

DEADLINE_S = 30.0
HEAD = "import os, subprocess, sys, threading, time\ndef ready(): print('ready', flush=True)\n"

AT_REST = {
    "a lock taken twice": """
        lock = threading.Lock()
        lock.acquire()
        ready()
        lock.acquire()
    """,
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
    "a queue that nobody fills": """
        import queue
        ready()
        queue.Queue().get()
    """,
    "the end of a program whose thread does not end": """
        threading.Thread(target=threading.Event().wait).start()
        ready()
    """,
}
GOES_ON = {
    "sleep": "ready(); time.sleep(1000)",
    "input": "ready(); input()",
    "work": "ready()\nwhile True: pass",
    "a wait with an end": "ready(); threading.Event().wait(1000)",
    "another program": "ready(); subprocess.run(['sleep', '1000'])",
    "another process": """
        import multiprocessing
        ready()
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()
        lock.acquire()
    """,
    "a connection": """
        import socket
        here, there = socket.socketpair()
        ready()
        here.recv(1)
    """,
    "a thread that waits for a connection": """
        import queue, socket
        here, there = socket.socketpair()
        got = queue.Queue()
        threading.Thread(target=lambda: got.put(here.recv(1)), daemon=True).start()
        ready()
        got.get()
    """,
    "a thread that looks now and then": """
        found = threading.Event()
        def look():
            while not os.path.exists("/no/such/file"):
                time.sleep(0.01)
            found.set()
        threading.Thread(target=look, daemon=True).start()
        ready()
        found.wait()
    """,
    "a lock of a file": """
        import fcntl, tempfile
        file = tempfile.NamedTemporaryFile()
        again = open(file.name)
        fcntl.flock(file, fcntl.LOCK_EX)
        ready()
        fcntl.flock(again, fcntl.LOCK_EX)
    """,
    "a signal": "import signal; ready(); signal.pause()",
    "an event loop": """
        import asyncio
        async def main():
            ready()
            await asyncio.Future()
        asyncio.run(main())
    """,
}


@pytest.fixture
def start():
    """Starts a program and returns its id once it is ready."""
    running = []

    def start(source):
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("source", AT_REST.values(), ids=AT_REST)
def test_what_can_never_go_on_is_at_rest(start, source):
    pid = start(source)
    rest = Rest(f"/proc/{pid}", cpu_s=lambda: 0.0)
    deadline_s = time.monotonic() + DEADLINE_S
    now_s = since_s = 0.0
    while since_s is None or now_s < since_s + 3:  # the same threads asleep, three times more
        assert time.monotonic() < deadline_s, "it goes on"
        now_s += 1
        since_s = rest.since_s(now_s)
        time.sleep(0.02)


@pytest.mark.parametrize("source", GOES_ON.values(), ids=GOES_ON)
def test_what_may_go_on_is_not(start, source):
    pid = start(source)
    rest = Rest(f"/proc/{pid}", cpu_s=lambda: 0.0)
    for now_s in range(20):
        assert rest.since_s(float(now_s)) is None
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
