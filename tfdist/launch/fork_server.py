"""Fork server: a process that imports TensorFlow once and forks a task per request.

It reads requests from a socket and answers with starts and ends, as it is the parent of the
tasks. It must not run an operation or ask for a device itself: TensorFlow's threads and
devices are made on first use, and do not live through a fork. So there is one thread when it
forks, given that the libraries below NumPy are set to make none (`ONE_THREAD`).

`ForkStarter` is the launcher's side. Who runs many jobs one after the other, such as a sweep, keeps
a `ForkTemplate`: one process imports once, and each job gets a fork server that is a fork of it and
needs no import. The launcher finds its socket in the variable `FORK_SERVER`. The tasks are forked
from that one as from any fork server, and end with it; what a job has allocated is gone with its
processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
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
"""Variable with the socket of a server that the caller of a launcher keeps."""
_MAX_ANSWER_BYTES = 1 << 17
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of the server: NumPy's libraries make their threads when they are loaded, and
TensorFlow's, of which it has its own, when it is first used."""

_FDS_PER_TASK = 3
_FOR_TASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What a service manager or a scheduler that ends a job sends to each of its processes. The tasks
save then, and would end with the server: it waits for its launcher's end."""


def main(argv: Sequence[str]) -> None:
    """Serve until whoever has started it is gone.

    The arguments are those of `_command`. A module that is to be imported where it can be, and
    fails, is left to the tasks; all of these are where one has started a thread, which would not
    live through a fork.
    """
    control, dashes = socket.socket(fileno=int(argv[0])), argv.index("--")
    modules, more = argv[1:dashes], argv[dashes + 1 :]
    gc.disable()  # as `import_once` has it
    for name in more:
        try:
            importlib.import_module(name)
        except Exception as error:
            _log(f"{name} is left to the tasks: {type(error).__name__}: {error}")
    if more and count_threads() > 1:
        _log(f"threads after importing {', '.join(more)}: begun anew without")
        command = _command(control, modules)
        os.execv(command[0], command)
    os.set_inheritable(control.fileno(), False)
    import_once(modules)
    serve(control)


def _command(control: socket.socket, modules: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the command of a server: its socket, what to import, and what else where it can be."""
    return bootstrap_command("fork_server", str(control.fileno()), *modules, "--", *more)


def _log(text: str) -> None:
    print(f"fork server: {text}", flush=True)  # at once, or each fork would write it again


def import_once(modules: Sequence[str]) -> None:
    """Import what all tasks share, and leave it as it is to be shared."""
    # Not ignored: what is sent to a task while it is being made waits until it is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_TASKS)
    set_title("tfdist fork server")
    gc.disable()  # what is imported stays: to look for what does not only takes time
    for name in modules:
        importlib.import_module(name)
    threads = count_threads()
    if threads > 1:  # only the one that forks lives on in a task, whatever the others held
        _log(f"{threads} threads after the imports, where 1 was expected")
    # So that a task's collector does not touch, and so copy, what all share. There is no collection
    # before: it takes a while, and frees places in pages that each task would fill, and so copy.
    gc.freeze()
    gc.enable()


def count_threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def serve(control: socket.socket) -> None:
    """Fork a task for each request, until the launcher is gone; return in tasks alone."""
    request = _Server(control).serve()
    if request is None:  # who started it waits for the end, and Python need not be taken apart
        os._exit(0)
    run_task(request["words"])  # nothing of the server is left on its stack


class _Server:
    """A process that forks for each request: a task, or for one launcher more a server of its own.

    A request for a task comes with three descriptors: of what it says, in a file, and of the task's
    output and notes. One for a server comes with the socket to its launcher.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._tasks: dict[int, Task] = {}
        self._wake_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> dict[str, Any] | None:
        """Return in the server when the launcher is gone, and in each task with its request."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # caught, so that it wakes the server up
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
                except ConnectionError:  # it is gone, and has not read all
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
        """Return True in the task, False in the server."""
        server, task = os.getpid(), task_of(request["words"][0])
        try:
            pid = os.fork()
        except OSError as error:
            pid, cause = -1, f"cannot be forked: {error.strerror}"
            self._report(Ended(task=task, status=1, at_s=time.monotonic(), cause=cause))
        if pid == 0:
            self._become_task(request, server=server, output_fd=fds[0], notes_fd=fds[1])
            return True
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._tasks[pid] = task
            self._report(Started(task=task, pid=pid, at_s=time.monotonic()))
        return False

    def _leave(self) -> None:
        """Give up what is the server's, in a process that was forked from it."""
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
        _reseed()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there is none left
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if (task := self._tasks.pop(found[0], None)) is not None:
                    status = os.waitstatus_to_exitcode(found[1])
                    self._report(Ended(task=task, status=status, at_s=time.monotonic()))

    def _report(self, event: Started | Ended) -> None:
        self._tell(encode_event(event))

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):  # it is gone: `serve` sees that
            self._control.send(json.dumps(message).encode())


def _of_a_pipe(stream: TextIO) -> TextIO:
    """Return a stream as Python makes it for a pipe, unbuffered.

    The server's is that of a file, its log, and asks for its place in it when its encoding is set.
    """
    raw: Any = io.FileIO(stream.fileno(), "w", closefd=False)
    raw.name = stream.name
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


def _reseed() -> None:
    """Give the task random numbers of its own; TensorFlow draws its seeds when first used."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


class ForkTemplate:
    """The process that imports once; it ends with the one that made it.

    It is started by `start` or on first use, and again when it has been killed.

    Args:
      modules: what to import.
      more: what else, where it can be; see `main`.
      environ: of the imports; each task gets the environment of its job.
      log_path: for what the imports say.
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
        """Return its process id; None before its first use."""
        return self._process.pid if self._process else None

    def start(self) -> socket.socket:
        """Begin to import; its owner may do other things until it needs the first fork server."""
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
        """Return a socket to a fork server of its own, which is forked after the imports."""
        control = self.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # it is gone: who reads `ours` sees that
            socket.send_fds(control, [b"+"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End it; the fork servers of jobs that go on end with these."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()  # it may be in an import, and see nothing
            self._process.wait()
        self._socket = self._process = None


IMPORTS = ("tensorflow", "keras")
"""What the server imports before it forks: what every program needs that takes long."""


class ForkStarter:
    """Starter of tasks as forks of one process that has imported TensorFlow.

    The process serves all attempts of a job: it never imports the job's own program, and each
    fork gets the environment of its attempt.

    Args:
      cause_of_kill: why the kernel killed a process; "" where that is not known.
      server: a socket to a server that is there already; see `ForkTemplate`.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        log_path: Path,
        open_files: tuple[int, int],
        clock: Callable[[], float],
        cause_of_kill: Callable[[int], str],
        server: socket.socket | None = None,
    ) -> None:
        # Of a server that another process has started it is only known what it must have.
        self._environ = dict(ONE_THREAD) if server else {**environ, **ONE_THREAD}
        self._log_path = log_path
        self._clock = clock
        self._cause_of_kill = cause_of_kill
        self._is_ready = self._is_over = False
        self._waiting: deque[tuple[Task, tuple[int, ...]]] = deque()
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
                open_files=open_files,
            )

    @property
    def pid(self) -> int | None:
        """Return the id of the server that it has started."""
        return self._server.pid if self._server else None

    def owns(self, pid: int) -> bool:
        """Return whether a process is the server that it has started."""
        return pid == self.pid

    @property
    def is_over(self) -> bool:
        """Return whether the server has ended, so that another one is needed."""
        return self._is_over or (self._server is not None and self._server.poll() is not None)

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> Started | None:
        """Ask for a task. It is forked once the server has imported everything."""
        request = {
            "words": spec.words,
            "set": {k: v for k, v in env.items() if self._environ.get(k) != v},
            "unset": [name for name in self._environ if name not in env],
        }
        # In memory, as a program may have more arguments than go through a socket in one piece.
        request_fd = os.memfd_create("tfdist request")
        with open(request_fd, "w", closefd=False) as file:
            json.dump(request, file)
        os.lseek(request_fd, 0, os.SEEK_SET)
        self._tasks.add(spec.task)
        self._waiting.append((spec.task, (request_fd, os.dup(output_fd), os.dup(notes_fd))))
        self._send_waiting()
        return None

    def withdraw(self, task: Task) -> bool:
        """Withdraw a start that has not been begun; return whether it could."""
        for request in self._waiting:
            if request[0] == task:
                self._waiting.remove(request)
                self._tasks.discard(task)
                self._forget(request)
                return True
        return False

    def give_up(self) -> None:
        """End a server that does not tell what has started or ended; another takes its place."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that `collect` sees its end, even so
        if self._server is not None:
            self._server.kill()

    def fileno(self) -> int | None:
        """Return the socket on which the server answers, None once that has ended."""
        return None if self._is_over else self._socket.fileno()

    def collect(self) -> list[Started | Ended]:
        """Return which tasks have started or ended since the last call."""
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
            events += self._event(json.loads(data))
        return events

    def close(self) -> None:
        """End the server."""
        for request in self._waiting:
            self._forget(request)
        self._waiting.clear()
        self._socket.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def _event(self, answer: Message) -> list[Started | Ended]:
        self._is_ready = True
        self._send_waiting()
        if "event" not in answer:  # it is ready
            return []
        event = decode_event(answer)
        if isinstance(event, Ended):
            self._tasks.remove(event.task)
        return [event] if isinstance(event, Started | Ended) else []

    def _send_waiting(self) -> None:
        """Send what the server takes at once: while it does not read, it may wait for `collect`.

        Each of its answers brings us back here.
        """
        while self._is_ready and self._waiting:
            _, fds = request = self._waiting[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
            try:
                self._socket.sendmsg([b"+"], rights, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # it is gone: `collect` sees that
                pass
            self._waiting.popleft()
            self._forget(request)

    def _all_ended(self) -> list[Started | Ended]:
        """Return the ends of all tasks, which end with the server, their parent."""
        self._is_over = True
        tasks, self._tasks = sorted(self._tasks), set()
        why = self._cause_of_kill(self.pid) if self.pid else ""
        cause = f"the fork server has ended{', ' * bool(why)}{why}: see {self._log_path}"
        now_s = self._clock()
        status = -signal.SIGKILL
        return [Ended(task=task, status=status, at_s=now_s, cause=cause) for task in tasks]

    def _forget(self, request: tuple[Task, tuple[int, ...]]) -> None:
        for fd in request[1]:
            os.close(fd)


def shared_environment(specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """Return what the environments of all tasks agree on, for the server to import with."""
    first, *others = (spec.env for spec in specs)
    return {
        name: value
        for name, value in first.items()
        if name != VARIABLE and all(env.get(name) == value for env in others)
    }
