"""The launcher's side of the fork server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import Task
from tfdist.cluster.tf_config import VARIABLE
from tfdist.launch.events import Ended, Started
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.process import bootstrap_command, spawn
from tfdist.launch.zygote import MAX_MESSAGE_BYTES, ONE_THREAD

IMPORTS = ("tensorflow", "keras")
"""What the server imports before it forks: what every program needs that takes long."""

_END_TIMEOUT_S = 2.0


class ForkStarter:
    """Starts each task as a fork of one process that has TensorFlow imported.

    The process serves all attempts of a job: it never imports the job's own program, and each
    fork gets the environment of its attempt.

    Args:
      cause_of_kill: why the kernel killed a process; "" where that is not known.
      server: a socket to a server that is there already; see `tfdist.launch.warm`.
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
        self._waiting: deque[tuple[Task, bytes, tuple[int, int]]] = deque()
        self._tasks: dict[str, Task] = {}
        self._server: subprocess.Popen[bytes] | None = None
        if server is not None:
            self._socket = server
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log_path, "ab") as log:
            self._server = spawn(
                bootstrap_command("zygote", str(theirs.fileno()), *IMPORTS),
                env=self._environ,
                output_fd=log.fileno(),
                keep_fds=(theirs.fileno(),),
                open_files=open_files,
            )

    @property
    def pid(self) -> int | None:
        """Returns the id of the server that it has started, which is its session's too."""
        return self._server.pid if self._server else None

    @property
    def sessions(self) -> frozenset[int]:
        """Returns the server's session."""
        return frozenset({self._server.pid} if self._server else ())

    @property
    def is_over(self) -> bool:
        """Returns whether the server has ended, so that another one is needed."""
        return self._is_over or (self._server is not None and self._server.poll() is not None)

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> None:
        """Asks for a task. It is forked once the server has imported everything."""
        program = spec.program
        request = {
            "task": str(spec.task),
            "title": spec.title,
            "target": program.target,
            "is_module": program.is_module,
            "args": program.args,
            "set": {k: v for k, v in env.items() if self._environ.get(k) != v},
            "unset": [name for name in self._environ if name not in env],
        }
        message = json.dumps(request).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise OSError(f"its flags are too long for --start fork: {len(message)} bytes")
        self._tasks[str(spec.task)] = spec.task
        self._waiting.append((spec.task, message, (os.dup(output_fd), os.dup(notes_fd))))
        self._send_waiting()

    def withdraw(self, task: Task) -> bool:
        """Takes back a start that has not been begun; returns whether it could."""
        for request in self._waiting:
            if request[0] == task:
                self._waiting.remove(request)
                self._tasks.pop(str(task), None)
                self._forget(request)
                return True
        return False

    def give_up(self) -> None:
        """Ends a server that does not tell what has started or ended; another takes its place."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that `collect` sees its end, even so
        if self._server is not None:
            self._server.kill()

    def fileno(self) -> int | None:
        """Returns the socket on which the server answers."""
        return self._socket.fileno()

    def collect(self) -> list[Started | Ended]:
        """Returns which tasks have started or ended since the last call."""
        events: list[Started | Ended] = []
        while self._socket.fileno() >= 0:
            try:
                data = self._socket.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                return events + self._all_ended()
            events += self._event(json.loads(data))
        return events

    def close(self) -> None:
        """Ends the server."""
        for request in self._waiting:
            self._forget(request)
        self._waiting.clear()
        self._socket.close()
        if self._server is None:
            return
        if self._is_ready:  # it reads, and so sees that nobody asks any more
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(_END_TIMEOUT_S)
        if self._server.returncode is None:
            self._server.kill()
            self._server.wait()

    def _event(self, answer: dict[str, Any]) -> list[Started | Ended]:
        self._is_ready = True
        self._send_waiting()
        if "started" in answer:
            task = self._tasks[answer["started"]]
            return [Started(task=task, pid=answer["pid"], at_s=answer["at"])]
        if "ended" in answer:
            task = self._tasks.pop(answer["ended"])
            status, cause = answer["status"], answer.get("cause", "")
            return [Ended(task=task, status=status, at_s=answer["at"], cause=cause)]
        return []

    def _send_waiting(self) -> None:
        """Sends what the server takes at once: while it does not read, it may wait for `collect`.

        Each of its answers brings us back here.
        """
        while self._is_ready and self._waiting:
            _, message, fds = request = self._waiting[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
            try:
                self._socket.sendmsg([message], rights, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # it is gone: `collect` sees that
                pass
            self._waiting.popleft()
            self._forget(request)

    def _all_ended(self) -> list[Started | Ended]:
        """Every task has ended with the server, which was their parent."""
        self._is_over = True
        tasks = list(self._tasks.values())
        self._tasks.clear()
        why = self._cause_of_kill(self.pid) if self.pid else ""
        cause = f"the fork server has ended{', ' * bool(why)}{why}: see {self._log_path}"
        now_s = self._clock()
        status = -signal.SIGKILL
        return [Ended(task=task, status=status, at_s=now_s, cause=cause) for task in tasks]

    def _forget(self, request: tuple[Task, bytes, tuple[int, int]]) -> None:
        for fd in request[2]:
            os.close(fd)


def shared_environment(specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """Returns what the environments of all tasks agree on, for the server to import with."""
    first, *others = (spec.env for spec in specs)
    return {
        name: value
        for name, value in first.items()
        if name != VARIABLE and all(env.get(name) == value for env in others)
    }
