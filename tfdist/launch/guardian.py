"""Guardian of a job: a process that kills the job's processes after the launcher was killed.

`die_with`, `bound_command` and `start_process` tell the kernel to signal a process when its parent
exits. The kernel does not signal the process's own children. So each job has a guardian, which
outlives the launcher. It reads the ids of the job's sessions from a pipe, which closes when the
launcher exits (also after kill -9). The guardian then kills all processes in these sessions, and
all processes with the job's mark in their environment. `GuardianClient` is the launcher's side.

Python runs this file by its path in isolated mode (-I -S), so it must not import tfdist.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_CLOSE_TIMEOUT_S = 2.0
_ONE_TASK_S = 1.0


_BOUND = "bound"
_BOOTSTRAP = os.path.join(os.path.dirname(__file__), "bootstrap.py")
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Tell the kernel to send `signum` to this process when `parent`, its creator, exits."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before this call
        os._exit(128 + signum)


def bound_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs a launcher and sends SIGTERM to it when this process exits.

    The launcher then tells its tasks to save. The first word of `command` is a path.
    """
    return [sys.executable, "-I", "-S", __file__, _BOUND, str(os.getpid()), *command]


def bootstrap_command(module: str, *args: str) -> list[str]:
    """Return a command that runs `main` of a module in a new Python.

    A name without dots is a module of the launcher. The working directory is not searched.
    """
    return [sys.executable, _BOOTSTRAP, module, *args]


def start_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output_fd: int,
    keep_fds: Collection[int],
) -> subprocess.Popen[bytes]:
    """Start a process in a new session. The kernel kills the process when the launcher exits."""
    parent = os.getpid()
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=tuple(keep_fds),
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),  # the launcher has one thread
    )


class GuardianClient:
    """Launcher's side of a guardian. It sends the guardian all sessions of the job."""

    def __init__(
        self, mark: str, *, environ: Mapping[str, str], hold: Collection[int] = ()
    ) -> None:
        self.mark = mark
        self._sessions: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={k: v for k, v in environ.items() if k != MARK},
            cwd="/",
            pass_fds=tuple(hold),
            start_new_session=True,
            bufsize=0,
        )

    def add(self, session: int) -> None:
        """Add a session. Its id is the pid of its first process."""
        self._sessions.add(session)
        self._tell_sessions()

    def forget_empty(self) -> None:
        """Forget sessions without processes, before the kernel reuses their ids."""
        self._sessions = occupied(self._sessions)
        self._tell_sessions()

    def end_all(self, *, keep: int = 0) -> list[int]:
        """Kill all remaining processes of the job, and return the processes that did not exit.

        Processes in the session `keep` stay for the next attempt.
        """
        return end_all(self.mark, self._sessions, keep=keep)

    def end_session(self, session: int) -> None:
        """Kill all processes in one task's session."""
        end_all(None, {session}, give_up_s=_ONE_TASK_S)

    def close(self) -> None:
        """Tell the guardian to exit, after all processes of the job have exited."""
        self._tell(DONE)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell_sessions(self) -> None:
        self._tell(" ".join(map(str, self._sessions)).encode())

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(line + b"\n")


MARK = "_TFDIST_JOB"
"""Environment variable that marks the processes of a job and their children. A job started inside
a task has its own mark and its own guardian, which kills that job's processes."""

DONE = b"done"
_GIVE_UP_S = 30.0  # a process in uninterruptible sleep ignores SIGKILL
_PAUSE_S = 0.01


def main(mark: str) -> None:
    """Wait for the launcher to exit, then kill the job's processes unless it reported `DONE`."""
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)  # exit only after the launcher
    sessions: set[int] = set()
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == DONE:
                return
            sessions = set(map(int, line.split()))
    end_all(mark, sessions)


def end_all(
    mark: str | None,
    sessions: set[int],
    *,
    keep: int = 0,
    give_up_s: float = _GIVE_UP_S,
) -> list[int]:
    """Kill all processes of a job, and return the processes that did not exit.

    Processes in the session `keep` stay. Without a mark, only processes in `sessions` are killed.
    """
    deadline = time.monotonic() + give_up_s
    while left := members(mark, sessions, keep=keep):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it exited meanwhile, or has another user
                continue
        if time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_S)
    return []


def members(mark: str | None, sessions: set[int], *, keep: int = 0) -> list[int]:
    """Return the processes with `mark` or in `sessions`, except those in session `keep`."""
    entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    own = os.getpid()
    return [pid for pid in entries if pid != own and _belongs(pid, mark, sessions, keep)]


def occupied(sessions: set[int]) -> set[int]:
    """Return the sessions that have a running process."""
    entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {_session(pid) for pid in entries} & sessions


def _belongs(pid: int, mark: str | None, sessions: set[int], keep: int) -> bool:
    session = _session(pid)
    if session in (0, keep):
        return False
    return session in sessions or (mark is not None and _is_marked(pid, mark))


def _session(pid: int) -> int:
    """Return the session of a process (0 if it has exited)."""
    fields = stat_of(pid)
    return int(fields[3]) if fields and fields[0] not in (b"Z", b"X") else 0


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat`` from the state letter on, or [] if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process name, in parentheses, may contain spaces and parentheses.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _is_marked(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = b"\0" + file.read() + b"\0"
    except OSError:
        return False
    return f"\0{MARK}={mark}\0".encode() in environ


if __name__ == "__main__":
    if sys.argv[1] == _BOUND:
        die_with(int(sys.argv[2]), signal.SIGTERM)
        os.execv(sys.argv[3], sys.argv[3:])
    main(sys.argv[1])
