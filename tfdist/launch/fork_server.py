"""Fork server: a process that imports TensorFlow once and forks a task per request.

The server is the parent of the tasks. It reads requests from a socket and answers with the starts
and exits of tasks. It must not run a TensorFlow operation or use a device, because TensorFlow's
threads and devices do not survive a fork. `ONE_THREAD` limits NumPy's libraries to one thread. So
the server has one thread when it forks.

`ForkStarter` is the launcher's side. A caller that runs many jobs, such as a sweep, keeps a
`ForkTemplate`, a process that imports TensorFlow once. The fork server of each job is a fork of the
template, so the server imports no module. The variable `FORK_SERVER` gives the launcher the
server's socket. The job's tasks exit with its fork server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tfdist.cluster import Task
from tfdist.cluster.tf_config import VARIABLE
from tfdist.launch.events import Ended, Message, Started, decode_event, encode_event, task_of
from tfdist.launch.guardian import bootstrap_command, die_with, start_process
from tfdist.launch.task import main as run_task
from tfdist.launch.task import set_title

if TYPE_CHECKING:
    from tfdist.launch.plan import ProcessSpec

FORK_SERVER = "_TFDIST_FORK_SERVER"
"""Environment variable with the socket of a fork server that the launcher's caller keeps."""
_MAX_ANSWER_BYTES = 1 << 17
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # Arrow, which pandas imports
}
"""Environment of the server. NumPy's libraries and Arrow start threads when they are loaded.
TensorFlow has its own copy of such libraries, and starts threads at its first use."""

_FDS_PER_TASK = 3
_FOR_TASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a service manager or scheduler sends to all processes of a job. The tasks then save.
The server blocks these signals until its launcher exits, because the tasks exit with the server."""


def main(argv: Sequence[str]) -> None:
    """Serve until the starting process has exited.

    `argv` has the arguments of `_command`. If an optional module fails to import, the tasks import
    it. If an optional module starts a thread, the server restarts without all optional modules,
    because threads do not survive a fork.
    """
    control, dashes = socket.socket(fileno=int(argv[0])), argv.index("--")
    modules, more = argv[1:dashes], argv[dashes + 1 :]
    gc.disable()  # as in `import_once`
    for name in more:
        try:
            importlib.import_module(name)
        except Exception as error:
            _log(f"cannot import {name}, so the tasks import it: {type(error).__name__}: {error}")
    if more and count_threads() > 1:
        _log(f"importing {', '.join(more)} started threads, restarting without these modules")
        command = _command(control, modules)
        os.execv(command[0], command)
    os.set_inheritable(control.fileno(), False)
    import_once(modules)
    serve(control)


def _command(control: socket.socket, modules: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the command of a server, with required `modules` and optional modules (`more`)."""
    return bootstrap_command("fork_server", str(control.fileno()), *modules, "--", *more)


def _log(text: str) -> None:
    print(f"fork server: {text}", flush=True)  # flush, or each fork would print it again


def import_once(modules: Sequence[str]) -> None:
    """Import the modules that all tasks share, and prepare the process for forks."""
    # Block, do not ignore: a signal to a task during its fork is delivered after the fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_TASKS)
    set_title("tfdist fork server")
    gc.disable()  # imported objects stay, so a collection only costs time
    for name in modules:
        importlib.import_module(name)
    threads = count_threads()
    if threads > 1:  # other threads, and their locks, do not survive a fork
        _log(f"{threads} threads run after the imports (expected 1), so tasks may hang")
    # Freeze shared objects, so that a task's garbage collector does not copy their pages. Run
    # no collection before: it is slow, and tasks that reuse the freed memory would copy its pages.
    gc.freeze()
    gc.enable()


def count_threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def serve(control: socket.socket) -> None:
    """Fork a task for each request until the launcher has exited. Only tasks return."""
    request = _Server(control).serve()
    if request is None:  # exit fast: the starting process waits
        os._exit(0)
    run_task(request["words"])  # the server's stack frames are gone


class _Server:
    """Process that forks a task, or a server for another launcher, for each request.

    A request for a task has three file descriptors: the request's content, the task's output, and
    the task's notes. A request for a server has one: the socket to its launcher.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._tasks: dict[int, Task] = {}
        self._wake_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> dict[str, Any] | None:
        """Return None in the server after the launcher has exited, and the request in each task."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a handled signal wakes the server
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
                try:
                    data, fds, _, _ = socket.recv_fds(self._control, 1, _FDS_PER_TASK)
                except ConnectionError:  # the launcher exited with unread data
                    return None
                if not data:
                    return None
                if len(fds) == 1:
                    if os.fork() == 0:
                        self._leave()
                        return _Server(socket.socket(fileno=fds[0])).serve()
                    os.close(fds[0])
                    continue
                with open(fds.pop(0), "rb") as file:
                    request = json.load(file)
                if self._fork_task(request, fds):
                    return dict(request)

    def _fork_task(self, request: dict[str, Any], fds: Sequence[int]) -> bool:
        """Fork a task. Return True in the task, False in the server."""
        server, task = os.getpid(), task_of(request["words"][0])
        try:
            pid = os.fork()
        except OSError as error:
            pid, cause = -1, f"cannot fork: {error.strerror}"
            self._tell(encode_event(Ended(task=task, status=1, at_s=time.monotonic(), cause=cause)))
        if pid == 0:
            self._become_task(request, server=server, output_fd=fds[0], notes_fd=fds[1])
            return True
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._tasks[pid] = task
            self._tell(encode_event(Started(task=task, pid=pid, at_s=time.monotonic())))
        return False

    def _leave(self) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wake_fd)
        os.close(self._wake_write_fd)
        self._control.close()

    def _become_task(
        self, request: dict[str, Any], *, server: int, output_fd: int, notes_fd: int
    ) -> None:
        self._leave()
        die_with(server)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_TASKS)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
        for name in ("stdout", "stderr"):
            stream = _of_a_pipe(getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        request["words"].insert(0, str(notes_fd))
        for name in request["unset"]:
            os.environ.pop(name, None)
        os.environ.update(request["set"])
        random.seed()
        if numpy_random := sys.modules.get("numpy.random"):  # TensorFlow draws its seeds later
            numpy_random.seed()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if (task := self._tasks.pop(found[0], None)) is not None:
                    status = os.waitstatus_to_exitcode(found[1])
                    self._tell(encode_event(Ended(task=task, status=status, at_s=time.monotonic())))

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher has exited: `serve` handles it
            self._control.send(json.dumps(message).encode())


def _of_a_pipe(stream: TextIO) -> TextIO:
    """Return an unbuffered stream, as Python creates it for a pipe.

    The server's stream writes to a log file, and seeks in the file when its encoding is set.
    """
    raw: Any = io.FileIO(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


class ForkTemplate:
    """Process that imports modules once and forks servers. It exits with its creator.

    `start` or the first use starts the process. A killed process is started again.

    Args:
      modules: Modules to import.
      more: Optional modules to import (see `main`).
      environ: Environment of the imports. Each task gets its job's environment.
      log_path: File for the output of the imports.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        more: Sequence[str] = (),
        environ: Mapping[str, str],
        log_path: Path,
    ) -> None:
        self._more = tuple(more)
        self._modules = tuple(modules)
        self._environ = {**environ, **ONE_THREAD}
        self._log_path = log_path
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id, or `None` before the first use."""
        return self._process.pid if self._process else None

    def start(self) -> socket.socket:
        """Start the imports in the background, and return the socket to the process."""
        if self._socket is not None and self._process and self._process.poll() is None:
            return self._socket
        self.close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                _command(theirs, self._modules, self._more),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return self._socket

    def connect(self) -> socket.socket:
        """Return a socket to a new fork server, which is forked after the imports."""
        control = self.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # the template was killed: `ours` closes
            socket.send_fds(control, [b"+"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Kill the process. Fork servers of running jobs exit with their jobs."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()  # an import may block other signals
            self._process.wait()
        self._socket = self._process = None


IMPORTS = ("tensorflow", "keras")
"""Modules that the server imports before it forks: slow imports that all programs need."""


class ForkStarter:
    """Starter of tasks as forks of one process that has imported TensorFlow.

    The process serves all attempts of a job. It never imports the job's program. Each fork gets
    the environment of its attempt.

    Args:
      cause_of_kill: Function that returns why the kernel killed a process ("" if unknown).
      server: Socket to an existing server (see `ForkTemplate`).
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        log_path: Path,
        cause_of_kill: Callable[[int], str],
        server: socket.socket | None = None,
    ) -> None:
        # If another process has started the server, only `ONE_THREAD` of its environment is known.
        self._environ = dict(ONE_THREAD) if server else {**environ, **ONE_THREAD}
        self._log_path = log_path
        self._cause_of_kill = cause_of_kill
        self._is_ready = self._is_over = False
        self._waiting: deque[tuple[int, ...]] = deque()
        self._tasks: set[Task] = set()
        self._server: subprocess.Popen[bytes] | None = None
        if server is not None:
            self._socket = server
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log_path, "ab") as log:
            self._server = start_process(
                _command(theirs, IMPORTS),
                env=self._environ,
                output_fd=log.fileno(),
                keep_fds=(theirs.fileno(),),
            )

    @property
    def pid(self) -> int | None:
        """Return the process id of the server, or `None` if another process has started it."""
        return self._server.pid if self._server else None

    @property
    def is_over(self) -> bool:
        """Return whether the server has exited, so that a new server is needed."""
        return self._is_over or (self._server is not None and self._server.poll() is not None)

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> Started | None:
        """Request a task. The server forks it after its imports."""
        request = {
            "words": spec.words,
            "set": {k: v for k, v in env.items() if self._environ.get(k) != v},
            "unset": [name for name in self._environ if name not in env],
        }
        # Use a memory file: the arguments may exceed the maximum message size of a socket.
        request_fd = os.memfd_create("tfdist request")
        with open(request_fd, "w", closefd=False) as file:
            json.dump(request, file)
        os.lseek(request_fd, 0, os.SEEK_SET)
        self._tasks.add(spec.task)
        self._waiting.append((request_fd, os.dup(output_fd), os.dup(notes_fd)))
        self._send_waiting()
        return None

    def give_up(self) -> None:
        """Kill a server that does not answer. The next attempt starts a new server."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # `collect` then sees the end
        if self._server is not None:
            self._server.kill()

    def fileno(self) -> int | None:
        """Return the socket for the server's answers, or `None` after the server has exited."""
        return None if self._is_over else self._socket.fileno()

    def collect(self) -> list[Started | Ended]:
        """Return the starts and exits of tasks since the last call."""
        events: list[Started | Ended] = []
        while self._socket.fileno() >= 0:
            try:
                data = self._socket.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                return events + self._all_ended()
            self._is_ready = True
            self._send_waiting()
            answer = json.loads(data)
            if "event" in answer:  # else it is the "ready" message
                event = decode_event(answer)
                assert isinstance(event, Started | Ended)
                if isinstance(event, Ended):
                    self._tasks.remove(event.task)
                events.append(event)
        return events

    def close(self) -> None:
        """Stop the server."""
        for fd in itertools.chain.from_iterable(self._waiting):
            os.close(fd)
        self._waiting.clear()
        self._socket.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _send_waiting(self) -> None:
        """Send queued requests without blocking, because the server may wait for `collect`.

        This method runs again after each answer of the server.
        """
        while self._is_ready and self._waiting:
            fds = self._waiting[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
            try:
                self._socket.sendmsg([b"+"], rights, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the server was killed: `collect` handles it
                pass
            for fd in self._waiting.popleft():
                os.close(fd)

    def _all_ended(self) -> list[Started | Ended]:
        """Return `Ended` for all tasks. They exit with the server, which is their parent."""
        self._is_over = True
        tasks, self._tasks = sorted(self._tasks), set()
        why = self._cause_of_kill(self.pid) if self.pid else ""
        cause = f"the fork server exited{', ' * bool(why)}{why}: see {self._log_path}"
        now_s = time.monotonic()
        status = -signal.SIGKILL
        return [Ended(task=task, status=status, at_s=now_s, cause=cause) for task in tasks]


def shared_environment(specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """Return the variables with the same value in all tasks, for the server's imports."""
    first, *others = (spec.env for spec in specs)
    return {
        name: value
        for name, value in first.items()
        if name != VARIABLE and all(env.get(name) == value for env in others)
    }
