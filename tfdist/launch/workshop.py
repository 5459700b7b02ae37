"""What starts tasks and sees to their ends, from the first attempt of a job to the last."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster import Task
from tfdist.errors import UsageError
from tfdist.launch.evidence import KillEvidence
from tfdist.launch.forking import ForkStarter, shared_environment
from tfdist.launch.guard import Guard
from tfdist.launch.guardian import MARK
from tfdist.launch.options import StartMethod
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.process import ExecStarter, Starter
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen
from tfdist.launch.signals import SignalPipe


class Workshop:
    """The guardian and the fork server; a context manager that leaves no process behind."""

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        start: StartMethod,
        fork_server: int | None,
        screen: JobScreen,
        signals: SignalPipe,
        open_files: tuple[int, int],
    ) -> None:
        self._environ = environ
        self._start = start
        self._screen = screen
        self._signals = signals
        self._open_files = open_files
        self._stack = contextlib.ExitStack()
        self._mark = secrets.token_hex(8)
        self._starter: Starter | None = None
        self._given = _socket_of(fork_server)
        self._evidence = KillEvidence()

    def __enter__(self) -> Workshop:
        self._stack.callback(self._evidence.close)
        self._guard = Guard(self._mark, environ=self._environ, say=self._screen.say)
        self._stack.callback(self._guard.close)
        self._stack.callback(self._guard.end_all)
        self._stack.callback(self._close_starter)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Replaces the guardian if it has ended."""
        self._guard.check()

    def processes(
        self, specs: Sequence[ProcessSpec], *, chief: Task, fork_log: Path
    ) -> JobProcesses:
        """Returns the processes of an attempt, none of them started.

        `fork_log` is where a fork server would write.
        """
        return JobProcesses(
            chief=chief,
            mark=self._mark,
            starter=self._ready_starter(specs, fork_log=fork_log),
            guard=self._guard,
            evidence=self._evidence,
            screen=self._screen,
            signals=self._signals,
            clock=time.monotonic,
        )

    def _ready_starter(self, specs: Sequence[ProcessSpec], *, fork_log: Path) -> Starter:
        """Returns what starts the tasks: of the attempt before, unless that has ended."""
        if self._starter is not None and not self._starter.is_over:
            return self._starter
        self._close_starter()
        if not specs:  # nothing can be started, and host 0 is told why
            return ExecStarter(clock=time.monotonic, open_files=self._open_files)
        if self._start == "exec":
            self._starter = ExecStarter(clock=time.monotonic, open_files=self._open_files)
            return self._starter
        given, self._given = self._given, None  # the first; another would be started here
        server = ForkStarter(
            environ={**shared_environment(specs), MARK: self._mark},
            log_path=fork_log,
            open_files=self._open_files,
            clock=time.monotonic,
            cause_of_kill=self._evidence.of_kill,
            server=given,
        )
        if server.pid is not None:
            self._guard.add(server.pid)
            self._evidence.started(server.pid)
        self._starter = server
        return server

    def _close_starter(self) -> None:
        if self._starter is not None:
            self._starter.close()


def _socket_of(descriptor: int | None) -> socket.socket | None:
    if descriptor is None:
        return None
    try:
        os.set_inheritable(descriptor, False)  # no task is to keep it open
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise UsageError(
            "--fork_server",
            received=f"{descriptor}, which is no socket ({error.strerror})",
            expected="the descriptor of a socket to a fork server",
            fix="leave --fork_server out; tfdist.tune gives it",
        ) from None
