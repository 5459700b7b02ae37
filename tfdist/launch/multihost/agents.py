"""Agents of a job: the launcher starts one on each other host, through a remote shell.

`PipeAgent` is an agent behind a command such as ``ssh HOST``. `Hub` keeps one agent on each host
and restarts lost agents.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.errors import EXIT_USAGE, UsageError
from tfdist.launch.events import Message
from tfdist.launch.guardian import bootstrap_command
from tfdist.launch.multihost.host_agreement import differences
from tfdist.launch.multihost.pipe import SILENT_S, Pipe

SHELLS = {
    "local": ("sh", "-c"),
    "ssh": ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "{host}"),
    "slurm": (
        *("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--quiet"),
        *("--nodelist={host}", "sh", "-c"),
    ),
}
"""Commands that run the following word as a shell command line on a host."""


def shell_of(where: str, rsh: str | None) -> list[str]:
    """Return the command of a remote shell: `rsh` if given, else the default of `where` (--on)."""
    if rsh is None:
        return list(SHELLS[where])
    words = shlex.split(rsh)
    return words if any("{host}" in word for word in words) else [*words, "{host}"]


LOOK_EVERY_S = 0.5
_AGAIN_S, _AGAIN_MOST_S = 0.5, 10.0
_EXIT_S = 0.2
_GOODBYE_S = 5.0
_READ_BYTES = 1 << 16
_USELESS = re.compile(
    "Host key verification failed|Permission denied|Could not resolve hostname|Invalid node name|"
    "Invalid job id|not in this job|[Nn]o such file or directory|not found|can't open file"
)
"""Output of a remote shell that makes a retry useless."""
_FIX = (
    "make this command work without a password or a question, with Python, tfdist and this "
    "directory at the same paths there: "
)
_HARMLESS = r"^@|^Warning: Permanently added"


News = tuple[int, Message | str | UsageError]
"""A host's rank with a message of its agent, the cause of the agent's loss, or the error if no
agent can start there."""


class PipeAgent:
    """An agent behind a remote shell: a child process with its pipes and output lines.

    Args:
      shell: Command of the remote shell, with ``{host}`` for the host.
      first: First message to the agent.
      startup_timeout_s: Seconds to wait for the agent to connect.
      show: Function that prints a line of the host's tasks.
      say: Function that prints a line of the remote shell or of the agent itself.
      may_read: Function that returns whether more lines can be printed.
    """

    def __init__(
        self,
        host: str,
        shell: Sequence[str],
        first: Message,
        *,
        startup_timeout_s: float,
        show: Callable[[bytes], None],
        say: Callable[[str], None],
        may_read: Callable[[], bool],
    ) -> None:
        self._host, self._show, self._say, self._may_read = host, show, say, may_read
        words = [word.replace("{host}", host.strip("[]")) for word in shell]
        command = "exec " + shlex.join(bootstrap_command("agent"))
        self._command = shlex.join([*words, shlex.join([sys.executable, "-V"])])
        # A separate process group: only the launcher gets Ctrl-C, and then lets all hosts save.
        self.child = subprocess.Popen(
            [*words, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        self._errors = self.child.stderr
        os.set_blocking(self._errors.fileno(), False)
        self._rest, self._last_line, self._has_joined = b"", "", False
        self._pipe = Pipe(
            self.child.stdout.fileno(),
            self.child.stdin.fileno(),
            timeout_s=startup_timeout_s,
            awaits_greeting=True,
        )
        self.send, self.take_messages = self._pipe.send, self._pipe.take_messages
        self.send(first)

    @property
    def lost(self) -> str:
        """Return why the agent was lost, or an empty text while it is connected."""
        return self._pipe.lost

    def filenos(self) -> Sequence[int]:
        """Return the descriptors to watch."""
        return self._pipe.fileno(), self._errors.fileno()

    def turn(self) -> None:
        """Read and write without waiting."""
        self._read_lines()
        self._pipe.turn()

    def joined(self) -> None:
        """Mark the agent as connected: from now on show its tasks' lines and expect heartbeats."""
        self._has_joined = True
        self._pipe.timeout_s = SILENT_S

    def close(self) -> tuple[str, str]:
        """Close the connection. Return why the agent ended, and a fix if a retry is useless."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(_EXIT_S)  # it has exited, or it does not respond
        self._read_lines()
        code = self.child.poll()
        self.child.kill()  # its exit closes the agent's standard input
        self.child.wait()
        for file in (self.child.stdin, self.child.stdout, self._errors):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]  # all are pipes
        if code is None:
            return self._pipe.lost, ""
        why = f"the agent exited with code {code}"
        if code < 0:
            why = f"the agent or its remote shell was killed by signal {-code}"
        if self._last_line and not self._has_joined:
            why = self._last_line
        is_useless = _USELESS.search(self._last_line) or 0 < code < 128
        return why, _FIX + self._command if is_useless and not self._has_joined else ""

    def _read_lines(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while self._may_read() and (data := os.read(self._errors.fileno(), _READ_BYTES)):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take_line(line.removesuffix(b"\r"))

    def _take_line(self, line: bytes) -> None:
        """Show a task's line unchanged, and a line of the shell or agent with the host's name."""
        if self._has_joined and line.startswith(b"[") and not line.startswith(b"[launch] "):
            self._show(line)
            return
        text = line.removeprefix(b"[launch] ").decode(errors="backslashreplace")
        if self._has_joined:
            self._say(f"{self._host}: {text}")
        elif (
            text.strip() and not re.search(_HARMLESS, text) and not _USELESS.search(self._last_line)
        ):
            self._last_line = text


class Hub:
    """The agents of a job by rank, starting at 1. `turn` does not block.

    Args:
      hosts: Host name of each agent.
      start: Function that starts the agent of a rank.
      terms: Versions, digests and variables that must be equal on each agent and this host.
      say: Function that prints a line of the launcher itself.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        start: Callable[[int], PipeAgent],
        *,
        terms: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._hosts, self._start, self._terms = hosts, start, terms
        self._say = say
        self._agents: dict[int, PipeAgent] = {}
        self._addresses: dict[int, str] = {}
        self._known: set[int] = set()
        self._refused: set[int] = set()
        self._again = dict.fromkeys(hosts, 0.0)
        self._wait_s = dict.fromkeys(hosts, _AGAIN_S)
        self._why: dict[int, str] = {}
        self._news: list[News] = []
        self._selector = selectors.EpollSelector()
        self.next_s = 0.0
        """Latest time for the next call of `turn`."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when an agent has sent data."""
        return self._selector.fileno()

    @property
    def present(self) -> frozenset[int]:
        """Return the ranks of the connected agents."""
        return frozenset(self._addresses)

    @property
    def turned_away(self) -> tuple[str, ...]:
        """Return why the missing agents are not connected."""
        return tuple(
            f"{self._hosts[rank]}: {why}"
            for rank, why in sorted(self._why.items())
            if rank not in self._addresses
        )

    def address_of(self, rank: int) -> str:
        """Return the address of a host with a connected agent."""
        return self._addresses[rank]

    def turn(self) -> None:
        """Start agents, read, write, and remove lost agents."""
        now_s = time.monotonic()
        self.next_s = now_s + LOOK_EVERY_S
        for rank in [rank for rank, at_s in self._again.items() if now_s >= at_s]:
            del self._again[rank]
            try:
                agent = self._agents[rank] = self._start(rank)
            except OSError as error:
                self._cannot_start(rank, f"{error.filename}: {error.strerror}", "install it here")
                continue
            for fd in agent.filenos():
                self._selector.register(fd, selectors.EVENT_READ)
        for rank, agent in list(self._agents.items()):
            agent.turn()
            for message in agent.take_messages():
                self._receive(rank, agent, message)
            if agent.lost:
                self._drop(rank)

    def take_news(self) -> list[News]:
        """Return the news since the last call."""
        news, self._news = self._news, []
        return news

    def send(self, rank: int, message: Message) -> None:
        """Send a message to an agent. Do nothing if it is not connected."""
        if rank in self._addresses:
            self._agents[rank].send(message)

    def end(self, message: Message, *, within_s: float = 0.0) -> None:
        """Send a last message to all agents, wait for their exit, and close all connections."""
        for agent in self._agents.values():
            agent.send(message)
        deadline_s = time.monotonic() + within_s + _GOODBYE_S
        while self._agents and time.monotonic() < deadline_s:
            self._again.clear()
            self._selector.select(0.1)
            self.turn()
        self._again.clear()
        for rank in list(self._agents):
            self._drop(rank)
        self._selector.close()

    def _receive(self, rank: int, agent: PipeAgent, message: Message) -> None:
        match message:
            case _ if rank in self._addresses:
                self._news.append((rank, message))
            case {"refused": str(text)}:
                problem, _, fix = text.partition(". Fix: ")
                self._refuse(rank, problem, fix or "correct it on that host")
                self._refused.add(rank)
            case {"hello": str(address), "terms": dict(terms)}:
                if found := differences(self._terms, terms):
                    fix = "install the same versions there, and share the program's files"
                    self._refuse(rank, f"it differs from the launcher's host: {found}", fix)
                    agent.send({"end": EXIT_USAGE})
                    self._refused.add(rank)
                    return
                self._addresses[rank] = address
                self._known.add(rank)
                self._wait_s[rank] = _AGAIN_S
                agent.joined()

    def _drop(self, rank: int) -> None:
        agent = self._agents.pop(rank)
        lost = agent.lost
        for fd in agent.filenos():
            self._selector.unregister(fd)
        why, fix = agent.close()
        if self._addresses.pop(rank, None) is not None:
            self._news.append((rank, why or lost))
        elif rank in self._refused:
            return
        elif fix and rank not in self._known:
            self._cannot_start(rank, why, fix)
            return
        elif self._why.get(rank) != why:
            self._say(f"{self._hosts[rank]}: {why or lost}; retrying")
        self._why[rank] = why or lost
        self._again[rank] = time.monotonic() + self._wait_s[rank]
        self._wait_s[rank] = min(_AGAIN_MOST_S, 2 * self._wait_s[rank])

    def _cannot_start(self, rank: int, why: str, fix: str) -> None:
        self._why[rank] = why
        self._refuse(rank, f"cannot start an agent: {why.rstrip('.')}", fix)

    def _refuse(self, rank: int, problem: str, fix: str) -> None:
        error = UsageError(self._hosts[rank], problem, fix=fix, code="cannot-start-agent")
        self._news.append((rank, error))
