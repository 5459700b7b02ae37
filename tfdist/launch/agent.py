"""``python -m tfdist.launch.agent``: the agent of a job on one host.

The launcher starts the agent through a remote shell. They exchange lines on the agent's standard
input and output (see `tfdist.launch.multihost.pipe`). The first message names a module, and the
agent calls its `serve`. The tasks write to the agent's standard error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import select
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.errors import EXIT_PEER_MISSING, TfdistError, UsageError
from tfdist.launch.events import Message
from tfdist.launch.multihost.pipe import BEAT_EVERY_S, SILENT_S, Pipe

_FIRST_S = 60.0
_RETRY_S = 0.1
MODULES = ("tfdist.launch.job_run", "tfdist.check")
"""Modules with a `serve` that an agent may run."""


def main(argv: Sequence[str] = ()) -> None:
    """Serve the launcher on standard input and output, and exit with the job's exit code."""
    pipe = Pipe(os.dup(0), os.dup(1), timeout_s=_FIRST_S)
    # Tasks must not write between the messages: redirect standard output to standard error.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    pipe.greet()
    try:
        code = _serve(pipe, address=argv[0] if argv else "")
    except TfdistError as error:
        pipe.send({"refused": str(error)})
        code = error.exit_code
    sys.exit(code)


def _serve(pipe: Pipe, *, address: str) -> int:
    messages: list[Message] = []
    while not messages:
        if pipe.lost:
            return EXIT_PEER_MISSING
        select.select([pipe], [], [], BEAT_EVERY_S)
        pipe.turn()
        messages = pipe.take_messages()
    pipe.timeout_s = SILENT_S
    first = {**messages[0], "at": address}
    os.chdir(first["cwd"])
    os.environ.update(first["env"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    sys.path.append(first["cwd"])  # last: a secrets.py there must not replace Python's module
    assert first["module"] in MODULES, first["module"]
    from importlib import import_module

    code: int = import_module(first["module"]).serve(first, pipe)
    return code


def lock_host(run_dir: str, host: str, *, within_s: float, pipe: Pipe) -> int:
    """Return a file descriptor that holds the lock for this host and run directory.

    An earlier agent that lost its launcher has `within_s` seconds to stop its tasks. Then it is
    killed, and its guardian kills the tasks. So two agents never write to one run directory.
    """
    name = hashlib.sha256(f"{run_dir}\0{host}".encode()).hexdigest()[:16]
    path = os.path.join(tempfile.gettempdir(), f"tfdist-{os.getuid()}-{name}.lock")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink > 1:
            raise OSError(errno.EPERM, "it is not a file of this user")
    except OSError as error:  # every user of the host may make a file of this name
        raise UsageError(
            path,
            f"cannot lock the file ({error.strerror})",
            fix="remove the file, or pass another --run_dir",
            code="not-writable",
        ) from None
    deadline_s = time.monotonic() + within_s
    while not pipe.lost:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, os.pwrite(fd, b"%d" % os.getpid(), 0))
            return fd
        if time.monotonic() > deadline_s:
            with contextlib.suppress(OSError, ValueError):
                pid = int(os.pread(fd, 20, 0))
                if b"bootstrap.py\0agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        select.select([pipe], [], [], _RETRY_S)
        pipe.turn()
    return fd


if __name__ == "__main__":
    main()
