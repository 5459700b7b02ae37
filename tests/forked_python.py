"""Programs and jobs that are forked from one process, which has imported what they all import.

They do what they do when a Python is started for them (docs/adr/0011), but for the seconds that it
takes to import TensorFlow. Programs whose start is what is tested, and those that load TensorFlow
in a way of their own, are started by `subprocess`.

There is one such process for all workers of a run of the tests (tests/conftest.py); who needs it
first starts it, and it ends with the run.
"""

import contextlib
import fcntl
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

ROOT = Path(__file__).parents[1]
FOLDER = "TFDIST_TESTS_FOLDER"
"""The variable that tells all processes of a run where its server is, and whose run it is."""
IMPORTS = (
    "tensorflow",
    "keras",
    "tensorflow_datasets",
    "matplotlib.pyplot",
    "tfdist.app.run",
    "tfdist.launch.fork_server",
)
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
        with open(os.devnull, "r+b") as nothing:
            files = [nothing if f == subprocess.DEVNULL else f for f in (stdin, stdout, stderr)]
            fds = [f if isinstance(f, int) else f.fileno() for f in files]
            self._status = _asked(request, fds)
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


class SharedTemplate:
    """What a `ForkTemplate` is to a launcher or a sweep, in front of the server of all tests."""

    pid = None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what a `ForkTemplate` takes; what is imported is what all tests need."""

    def start(self) -> None:
        """It is there."""

    def connect(self) -> socket.socket:
        """Returns a socket to a fork server of its own, which is forked after the imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _asked({"cwd": str(Path.cwd())}, [theirs.fileno()]).close()
        return ours

    def close(self) -> None:
        """It stays for the others."""


def said() -> str:
    """What the server has printed."""
    log = _folder() / "server.log"
    return log.read_text() if log.exists() else ""


@contextlib.contextmanager
def of_this_run() -> Iterator[None]:
    """Has this process, and those that it starts, use one server while this lasts."""
    with tempfile.TemporaryDirectory(prefix="tfdist-tests-") as folder:
        os.environ[FOLDER] = f"{os.getpid()}:{folder}"
        yield
        del os.environ[FOLDER]


def _folder() -> Path:
    return Path(os.environ[FOLDER].partition(":")[2])


def _asked(request: dict[str, Any], fds: list[int]) -> socket.socket:
    """Sends the server a request and files; returns the connection, on which it may answer."""
    path = str(_folder() / "server")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
        except OSError:  # there is none yet, or it has been killed
            _start(path)
            connection.connect(path)
    socket.send_fds(connection, [json.dumps(request).encode()], fds)
    return connection


def _start(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    owner = os.environ[FOLDER].partition(":")[0]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(128)
        with open(_folder() / "server.log", "ab") as log:
            server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), owner],
                env={**environ, **ENVIRON},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
    _started.append(server)  # it ends after this process


_started: list[subprocess.Popen[bytes]] = []


def _serve(listener: socket.socket, owner: int) -> None:
    """Forks what each request asks for; returns when it has come to its end, in its process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever has started the tests
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    until = os.pidfd_open(owner)
    while True:
        if until in select.select([listener, until], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
        if data and os.fork() == 0:
            break
        connection.close()
        for fd in fds:
            os.close(fd)
    listener.close()
    os.close(until)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(data)
    if "argv" in request:
        _run(request, connection, fds)
    else:
        connection.close()
        os.chdir(request["cwd"])  # that of the launcher, as where it forks itself
        _serve_a_job(socket.socket(fileno=fds[0]))


def _reap(*_: object) -> None:
    """Takes those that have ended, so that what they have used is counted as that of the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve_a_job(control: socket.socket) -> None:
    """Is the fork server of a job, and returns in its tasks."""
    from tfdist.launch import fork_server

    os.setsid()
    del sys.path[0]  # as of any fork server; a program's own directory takes its place
    fork_server.import_once(())
    fork_server.serve(control)


def _run(request: dict[str, Any], connection: socket.socket, fds: list[int]) -> None:
    program = os.fork()
    if program:
        _watch(program, connection)
    connection.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    _become(**request)


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
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
