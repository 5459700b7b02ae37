"""Fork servers that need no import: all are forked from one process that has imported once.

Who runs many jobs one after the other, such as a sweep, keeps a `WarmServer`. `connect` returns a
socket to a new fork server, a fork of it, for one job: ``tfdist.launch --fork_server FD``. The
tasks are forked from that one as from any fork server, and end with it; what a job has allocated
is gone with its processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from tfdist.launch import zygote
from tfdist.launch.process import bootstrap_command

_END_TIMEOUT_S = 2.0


class WarmServer:
    """The process that imports once; it ends with the one that made it.

    It is started by `start` or on first use, and again when it has been killed.

    Args:
      modules: what to import.
      more: what else, where it can be: a module that fails is left to the tasks, and all of these
        are where one has started a thread, which would not live through a fork.
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
        self._environ = {**environ, **zygote.ONE_THREAD}
        self._log_path = log_path
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_used = False

    @property
    def pid(self) -> int | None:
        """Returns its process id; None before its first use."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Begins to import; its owner may do other things until it needs the first fork server."""
        self._ready_socket()

    def connect(self) -> socket.socket:
        """Returns a socket to a fork server of its own, which is forked after the imports."""
        control = self._ready_socket()
        self._is_used = True
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # it is gone: who reads `ours` sees that
            socket.send_fds(control, [b"+"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends it; the fork servers of jobs that go on end with these."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is None:
            return
        try:
            process.wait(_END_TIMEOUT_S if self._is_used else 0)
        except subprocess.TimeoutExpired:  # in an import
            process.kill()
            process.wait()

    def _ready_socket(self) -> socket.socket:
        if self._socket is not None and self._process and self._process.poll() is None:
            return self._socket
        self.close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                _command(theirs.fileno(), self._modules, self._more),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return self._socket


def main(argv: Sequence[str]) -> None:
    """Serves until its owner is gone: socket descriptor, modules to import, ``--``, and more."""
    control = socket.socket(fileno=int(argv[0]))
    modules, more = argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    gc.disable()  # as `import_once` has it
    for name in more:
        _import_if_it_can_be(name)
    if more and zygote.count_threads() > 1:
        print(f"fork server: threads after importing {', '.join(more)}: begun anew without")
        sys.stdout.flush()
        command = _command(control.fileno(), modules)
        os.execv(command[0], command)
    os.set_inheritable(control.fileno(), False)
    zygote.import_once(modules)
    server = _forked(control)
    if server is None:  # its owner waits for the end, and Python need not be taken apart for it
        sys.stdout.flush()
        os._exit(0)
    zygote.serve(server)


def _command(fd: int, modules: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    return bootstrap_command("warm", str(fd), *modules, "--", *more)


def _import_if_it_can_be(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"fork server: {name} is left to the tasks: {type(error).__name__}: {error}")


def _forked(control: socket.socket) -> socket.socket | None:
    """Returns None when the owner is gone, and in each fork the socket to its launcher."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return None
        if os.fork() == 0:
            os.setsid()
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return socket.socket(fileno=fds[0])
        os.close(fds[0])


def _reap(signum: int, frame: FrameType | None) -> None:
    """Takes those that have ended, so that what they have used is counted as their owner's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
