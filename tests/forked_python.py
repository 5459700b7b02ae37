"""Python programs that are forked from one process, which has imported what they all import.

They do what they do when a Python is started for them (docs/adr/0011), but for the seconds that it
takes to import TensorFlow. Programs whose start is what is tested, and those that load TensorFlow
in a way of their own, are started by `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

ROOT = Path(__file__).parents[1]
IMPORTS = ("tensorflow", "keras", "tensorflow_datasets", "matplotlib.pyplot", "tfdist.app.run")
ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": str(ROOT),
    # Threads of these libraries are made when they are loaded, and do not live through a fork.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_MAX_REQUEST_BYTES = 1 << 17


class Program:
    """A program that runs, with what the tests need of a `subprocess.Popen`.

    Args:
      argv: what comes after ``python``: a script, ``-m`` and a module, or ``-c`` and a text, and
        then its arguments.
    """

    def __init__(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
    ) -> None:
        request = {"argv": argv, "env": {**(env or os.environ)}, "cwd": str(cwd or Path.cwd())}
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "r+b") as nothing:
            files = [nothing if f == subprocess.DEVNULL else f for f in (stdin, stdout, stderr)]
            fds = [f if isinstance(f, int) else f.fileno() for f in (theirs, *files)]
            socket.send_fds(_server(), [json.dumps(request).encode()], fds)
        self.pid = int(self._status.recv(100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code, when it has ended."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._status.recv(100))
            self._status.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    *argv: str, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as `subprocess.run` does; ends it when it is not done in time."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = Program(*argv, env=env, cwd=cwd, stdout=out, stderr=err)
        late = None
        try:
            program.wait(timeout)
        except subprocess.TimeoutExpired as error:
            late = error
        finally:
            program.kill()
            program.wait()
        for file in (out, err):
            file.seek(0)
        said, errors = out.read(), err.read()
    if late is not None:
        raise subprocess.TimeoutExpired(argv, timeout, said, errors)
    return subprocess.CompletedProcess(argv, program.wait(), said, errors)


@functools.cache
def _server() -> socket.socket:
    """The process that imports; it is started with the first program and ends with the tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**os.environ, **ENVIRON},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve(control: socket.socket) -> None:
    """Forks a program for each request; returns when it has come to its end, in its process."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those who watch have ended
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program:
        _watch(program, socket.socket(fileno=fds[0]))
    for number, fd in enumerate(fds[1:]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    _become(**json.loads(data))


def _watch(program: int, asker: socket.socket) -> None:
    """Tells who asked for a program which process it is and how it ends; ends it without them."""
    asker.send(str(program).encode())
    if asker in select.select([asker, os.pidfd_open(program)], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        asker.send(str(status).encode())
    os._exit(0)


def _become(argv: list[str], env: dict[str, str], cwd: str) -> None:
    """Runs a program as Python does when it is started."""
    os.environ.clear()
    os.environ.update(env)
    importlib.import_module("numpy").random.seed()  # the `random` of Python does so by itself
    os.chdir(cwd)
    first, *sys.argv = argv
    if first == "-m":
        sys.path[0] = cwd
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # as Python does
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        sys.path[0], name, source = "", "<string>", sys.argv[0]
        sys.argv[0] = "-c"
    else:
        sys.path[0], name, source = str(Path(first).parent), first, Path(first).read_text()
        main.__file__ = first
        sys.argv.insert(0, first)
    exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    sys.path[0] = ""  # and not the directory of this file
    _serve(socket.socket(fileno=int(sys.argv[1])))
