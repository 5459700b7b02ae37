"""The fork server: a process that imports TensorFlow once and forks a task for each request.

It reads requests from a socket and answers with starts and ends, as it is the parent of the
tasks. It must not run an operation or ask for a device itself: TensorFlow's threads and
devices are made on first use, and do not live through a fork. So there is one thread when it
forks, given that the libraries below NumPy are told to make none (`ONE_THREAD`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tfdist.launch import heartbeat
from tfdist.launch.process import die_with
from tfdist.launch.program import run_program
from tfdist.launch.task import note_to, set_title

MAX_MESSAGE_BYTES = 1 << 17
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of the server: NumPy's libraries make their threads when they are loaded, and
TensorFlow's, of which it has its own, when it is first used."""

_FDS_PER_REQUEST = 2
_FOR_TASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What a service manager or a scheduler that ends a job sends to each of its processes. The tasks
save then, and would end with the server: it waits for its launcher's end."""


def main(argv: Sequence[str]) -> None:
    """Serves until the launcher is gone: socket descriptor, then the modules to import."""
    control = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(control.fileno(), False)
    import_once(argv[1:])
    serve(control)


def import_once(modules: Sequence[str]) -> None:
    """Imports what all tasks share, and leaves it as it is to be shared."""
    # Not ignored: what is sent to a task while it is being made waits until it is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_TASKS)
    set_title("tfdist fork server")
    gc.disable()  # what is imported stays: to look for what does not only takes time
    for name in modules:
        importlib.import_module(name)
    threads = count_threads()
    if threads > 1:  # only the one that forks lives on in a task, whatever the others held
        print(f"fork server: {threads} threads after the imports, where 1 was expected")
    # So that a task's collector does not touch, and so copy, what all share. There is no collection
    # before: it takes a while, and frees places in pages that each task would fill, and so copy.
    gc.freeze()
    gc.enable()


def count_threads() -> int:
    """Returns how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def serve(control: socket.socket) -> None:
    """Forks a task for each request, until the launcher is gone; returns in tasks as well."""
    request = _Server(control).serve()
    if request is not None:  # in a task: nothing of the server is left on its stack
        _run(request)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._tasks: dict[int, str] = {}
        self._wake_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> dict[str, Any] | None:
        """Returns in the server when the launcher is gone, and in each task with its request."""
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)
        self._tell({"ready": True})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake_fd:
                    os.read(self._wake_fd, 4096)
                    self._reap()
                    continue
                data, fds, _, _ = socket.recv_fds(
                    self._control, MAX_MESSAGE_BYTES, _FDS_PER_REQUEST
                )
                if not data:
                    return None
                request = json.loads(data)
                if self._fork(request, fds):
                    return dict(request)

    def _fork(self, request: dict[str, Any], fds: Sequence[int]) -> bool:
        """Returns True in the task, False in the server."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            cause = f"cannot be forked: {error.strerror}"
            self._tell({"ended": request["task"], "status": 1, "cause": cause, "at": _now()})
            pid = -1
        if pid == 0:
            self._become_task(request, server=server, output_fd=fds[0], notes_fd=fds[1])
            return True
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._tasks[pid] = request["task"]
            self._tell({"started": request["task"], "pid": pid, "at": _now()})
        return False

    def _become_task(
        self, request: dict[str, Any], *, server: int, output_fd: int, notes_fd: int
    ) -> None:
        os.setsid()
        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_TASKS)
        os.close(self._wake_fd)
        os.close(self._wake_write_fd)
        self._control.close()
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
        os.set_inheritable(notes_fd, False)
        request["notes_fd"] = notes_fd
        for name in request["unset"]:
            os.environ.pop(name, None)
        os.environ.update(request["set"])
        _reseed()

    def _reap(self) -> None:
        while self._tasks:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            task = self._tasks.pop(pid, None)
            if task is not None:
                code = os.waitstatus_to_exitcode(status)
                self._tell({"ended": task, "status": code, "at": _now()})

    def _tell(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


def _run(request: dict[str, Any]) -> None:
    set_title(request["title"])
    failed = note_to(request["notes_fd"], task=request["task"])
    heartbeat.print_stacks_when_asked()
    heartbeat.start(request["notes_fd"], task=request["task"])
    run_program(request["target"], request["args"], is_module=request["is_module"], failed=failed)


def _reseed() -> None:
    """Gives the task random numbers of its own; TensorFlow draws its seeds when first used."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _now() -> float:
    return time.monotonic()


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A handler only so that SIGCHLD is caught and wakes the server up."""
