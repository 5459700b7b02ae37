"""A tiny process that outlives the launcher and ends what it left behind, however it died.

It reads from a pipe which sessions the launcher has started, and waits. The pipe ends with the
launcher, by kill -9 too. Everything of the job is killed then: what is in those sessions, and
what carries the job's mark in its environment, wherever it moved.

Run by its path in a bare interpreter (-I -S), so it imports nothing of tfdist.
"""

from __future__ import annotations

import os
import signal
import sys
import time

MARK = "TFDIST_JOB"
"""Variable by which the processes of a job, and theirs, are known. Those of a job inside a task
have that job's mark, and its own guardian ends them when its launcher has been ended."""

DONE = b"done"
_GIVE_UP_S = 30.0  # a process in uninterruptible sleep does not even hear SIGKILL
_PAUSE_S = 0.01


def main(mark: str) -> None:
    """Waits until the launcher has ended; kills what it left, unless it said it was done."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # the launcher's end is the only reason to end
    sessions: set[int] = set()
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == DONE:
                return
            change = sessions.add if line[:1] == b"+" else sessions.discard
            change(int(line[1:]))
    end_all(mark, sessions)


def end_all(
    mark: str | None,
    sessions: set[int],
    *,
    keep: frozenset[int] = frozenset(),
    give_up_s: float = _GIVE_UP_S,
) -> list[int]:
    """Kills all processes of a job until none is left; returns those that would not go.

    Those in a session of `keep` stay. Without a mark only the sessions count.
    """
    deadline = time.monotonic() + give_up_s
    while left := members(mark, sessions, keep=keep):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone meanwhile, or of another user
                continue
        if time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_S)
    return []


def members(
    mark: str | None, sessions: set[int], *, keep: frozenset[int] = frozenset()
) -> list[int]:
    """Returns the living processes that carry `mark` or are in `sessions`, but not in `keep`."""
    entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    own = os.getpid()
    return [pid for pid in entries if pid != own and _belongs(pid, mark, sessions, keep)]


def occupied(sessions: set[int]) -> set[int]:
    """Returns those of `sessions` in which a process lives."""
    entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {_session(pid) for pid in entries} & sessions


def _belongs(pid: int, mark: str | None, sessions: set[int], keep: frozenset[int]) -> bool:
    session = _session(pid)
    if session == 0 or session in keep:
        return False
    return session in sessions or (mark is not None and _is_marked(pid, mark))


def _session(pid: int) -> int:
    """Returns the session of a living process, 0 for a dead one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[3])


def _is_marked(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = b"\0" + file.read() + b"\0"
    except OSError:
        return False
    return f"\0{MARK}={mark}\0".encode() in environ


if __name__ == "__main__":
    main(sys.argv[1])
