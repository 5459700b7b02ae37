"""The launcher's side of the guardian process: starting it, telling it, replacing it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping

from tfdist.launch import guardian

_MAX_STARTS = 5
_END_TIMEOUT_S = 2.0
_ONE_TASK_S = 1.0


class Guard:
    """Keeps a guardian that knows every session of this job, and ends what a job leaves.

    A guardian that is killed is replaced, and `say` tells.
    """

    def __init__(self, mark: str, *, environ: Mapping[str, str], say: Callable[[str], None]):
        self._mark = mark
        self._environ = environ
        self._say = say
        self._sessions: set[int] = set()
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def add(self, session: int) -> None:
        """Puts a session under guard; its id is the pid of the task that leads it."""
        self._sessions.add(session)
        self._tell(b"+%d\n" % session)

    def forget_empty(self) -> None:
        """Lets go of sessions that have no process left, before their ids are used again."""
        empty = self._sessions - guardian.occupied(self._sessions)
        self._sessions -= empty
        self._tell(b"".join(b"-%d\n" % session for session in empty))

    def check(self) -> None:
        """Replaces the guardian if it has ended."""
        if self._process is None or self._process.poll() is None:
            return
        if self._starts >= _MAX_STARTS:
            self._process = None
            self._say("the guardian process keeps being killed: kill -9 of the launcher would now")
            self._say("leave processes behind")
            return
        self._say("the guardian process was killed; another one has been started")
        self._start()
        self._tell(b"".join(b"+%d\n" % session for session in self._sessions))

    def end_all(self, *, keep: frozenset[int] = frozenset()) -> list[int]:
        """Kills whatever is left of the job; returns the processes that would not go.

        What is in a session of `keep` stays for the next attempt.
        """
        return guardian.end_all(self._mark, self._sessions, keep=keep)

    def end_session(self, session: int) -> None:
        """Kills one task and what it has left in its session, while the others go on."""
        guardian.end_all(None, {session}, give_up_s=_ONE_TASK_S)

    def close(self) -> None:
        """Dismisses the guardian; the job has no process left."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.write(guardian.DONE + b"\n")
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        self._starts += 1
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={k: v for k, v in self._environ.items() if k != guardian.MARK},
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )

    def _tell(self, message: bytes) -> None:
        if not message or self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # it is gone: `check` starts another, which is told all
            self._process.stdin.write(message)
