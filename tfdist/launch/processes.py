"""Processes of a job: their start, and an event loop for output, exits, notes and signals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from tfdist.cluster import Task, tf_config
from tfdist.cluster.ports import PortPool
from tfdist.launch.events import (
    NO_SENSE,
    STOP_CODES,
    STOP_SIGNALS,
    AskForStacks,
    Beat,
    Ended,
    Event,
    KillOne,
    Raised,
    Signal,
    SignalPipe,
    Start,
    Started,
    StopRequest,
    TaskAction,
    decode_event,
    task_of,
)
from tfdist.launch.fork_server import ForkStarter, shared_environment
from tfdist.launch.guardian import MARK, GuardianClient, bootstrap_command, start_process
from tfdist.launch.machine import KillEvidence, proc_state
from tfdist.launch.members import MemberLinks
from tfdist.launch.options import MOST_MEMBERS
from tfdist.launch.plan import Attempt, JobDescription, ProcessSpec
from tfdist.launch.screen import JobScreen, TaskOutput
from tfdist.launch.task import STACK_SIGNAL

_READ_BYTES = 1 << 16
_MAX_READS = 64  # of an exited task's pipe: a child may still write


class Starter:
    """Starter of tasks as new Python processes. Unlike `ForkStarter`, it has no helper process."""

    def __init__(self) -> None:
        self._children: dict[Task, subprocess.Popen[bytes]] = {}

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> Started | None:
        """Start a task, or raise OSError. Return `None` if `collect` returns `Started` later."""
        child = start_process(
            bootstrap_command("task", str(notes_fd), *spec.words),
            env=env,
            output_fd=output_fd,
            keep_fds=(notes_fd,),
        )
        self._children[spec.task] = child
        return Started(task=spec.task, pid=child.pid, at_s=time.monotonic())

    def collect(self) -> list[Started | Ended]:
        """Return the starts and exits of tasks since the last call."""
        now_s = time.monotonic()
        over = {t: child for t, child in self._children.items() if child.poll() is not None}
        for task in over:
            del self._children[task]
        return [Ended(task=t, status=child.returncode, at_s=now_s) for t, child in over.items()]

    def give_up(self) -> None:
        """Stop a helper process that does not answer, so that its tasks count as exited."""

    def fileno(self) -> int | None:
        """Return the file descriptor to watch in addition to SIGCHLD, or `None`."""
        return None

    @property
    def pid(self) -> int | None:
        """Return the helper process's id, which is also its session, or `None`."""
        return None

    def close(self) -> None:
        """Stop the helper process."""


class JobProcesses:
    """Processes of a job on this host over all attempts, as a context manager.

    `wait` returns events, also between attempts. From `begin` to `finish`, `perform` starts and
    stops tasks. All attempts share the guardian and the fork server. On exit, all processes of the
    job are killed.
    """

    def __init__(
        self,
        job: JobDescription,
        *,
        screen: JobScreen,
        signals: SignalPipe,
        hold: Collection[int] = (),
    ) -> None:
        """Create it. The guardian keeps the file descriptors `hold` open until all tasks exit."""
        self._job = job
        self._screen = screen
        self.signals = signals
        self._evidence = KillEvidence()
        self._starter: Starter | ForkStarter = Starter()
        self._given: socket.socket | None = None
        if (descriptor := job.fork_server) is not None:
            os.set_inheritable(descriptor, False)  # tasks must not inherit it
            self._given = socket.socket(fileno=descriptor)
        self._specs: dict[Task, ProcessSpec] = {}
        self._logs = Path()
        self._news: list[Event] = []
        self._running: dict[Task, int | None] = {}
        self._pids: dict[Task, int] = {}  # last process of each task, also after its exit
        self._owed: dict[Task, int] = {}
        self._raised: set[Task] = set()
        self._pipes: dict[int, tuple[Task, TaskOutput]] = {}
        self._is_patient = True
        self._is_closed = False
        self._is_paused = False
        self._notes_rest = b""
        self._notes_fd, self._notes_write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._notes_fd, False)
        self._selector = selectors.DefaultSelector()
        self.watch(signals.fd, self._on_signals)
        self.watch(self._notes_fd, self._on_notes)
        mark = secrets.token_hex(8)
        self._links: MemberLinks | None = None
        if job.kind.is_elastic:
            self._links = MemberLinks(
                f"tfdist-{mark}",
                most=min(job.shards or 1, MOST_MEMBERS),
                task_of=self._task_of,
                is_here=lambda task: task in self._specs,
                watch=self.watch,
                unwatch=self.unwatch,
                tell=self._news.append,
            )
        self._guard = GuardianClient(mark, environ=job.environ, hold=hold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._starter.close()
        self._guard.end_all()
        if self._links is not None:
            self._links.close()
        self._guard.close()
        self._selector.close()
        os.close(self._notes_fd)
        os.close(self._notes_write_fd)

    def begin(self, attempt: Attempt, *, fork_log: str) -> None:
        """Begin an attempt, without starting its tasks.

        `fork_log` is the name of the fork server's log file in the directory of the logs.

        Raises:
            OSError: The logs cannot be written, for example.
            UsageError: The tasks do not fit this machine.
        """
        self._specs = {}
        self._screen.forget()
        self._screen.hosts = {task_of(name): host for name, host in attempt.hosts.items()}
        self._logs = attempt.logs
        self._pids.clear()
        self._raised.clear()
        self._is_patient = True
        self._is_closed = False
        if self._links is not None:
            self._links.forget()
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._links is not None:
            self._links.pem = attempt.pem
        specs = self._job.specs(dataclasses.replace(attempt, control=self.control))
        if self._job.start == "fork":
            self._ready_fork_server(specs, log_path=self._logs / fork_log)
        self._specs = {spec.task: spec for spec in specs}

    def _ready_fork_server(self, specs: Sequence[ProcessSpec], *, log_path: Path) -> None:
        """Start a fork server, unless the previous attempt's fork server still runs."""
        if isinstance(self._starter, ForkStarter) and not self._starter.is_over:
            return
        if (fd := self._starter.fileno()) is not None:
            self.unwatch(fd)
        self._starter.close()
        given, self._given = self._given, None  # use it only once
        self._starter = server = ForkStarter(
            environ={**shared_environment(specs), MARK: self._guard.mark},
            log_path=log_path,
            cause_of_kill=self._evidence.of_kill,
            server=given,
        )
        if (fd := server.fileno()) is not None:
            self.watch(fd, self._collect)
        if server.pid is not None:
            self._guard.add(server.pid)
            self._evidence.started(server.pid)

    @property
    def running(self) -> list[Task]:
        """Return the tasks that were started and have not exited."""
        return list(self._running)

    def perform(self, action: TaskAction) -> Ended | None:
        """Perform an action, and return an `Ended` event if a task cannot be started."""
        match action:
            case Start(task=task):
                try:
                    self._start(self._spec_of(task), log=action.log_name)
                except OSError as error:
                    cause = f"cannot start: {error.strerror or error}"
                    return Ended(task=task, status=1, at_s=time.monotonic(), cause=cause)
            case Signal(task=task, signum=signum):
                self._signal(task, signum)
            case KillOne(task=task):
                self._kill_one(task)
            case AskForStacks(task=task):
                if pid := self._running.get(task):
                    _send(pid, STACK_SIGNAL)
            case _ if self._links is not None:
                self._links.perform(action)
        return None

    def _spec_of(self, task: Task) -> ProcessSpec:
        """Return a task's process. A new worker of an elastic job starts like worker 0."""
        if task not in self._specs:
            first = self._specs[Task(task.type, 0)]
            config = json.loads(first.env[tf_config.VARIABLE])
            hosts = config["cluster"][task.type]  # no member uses its address
            hosts += [f"127.0.0.1:{1 + number}" for number in range(len(hosts), task.index + 1)]
            config["task"]["index"] = task.index
            self._specs[task] = dataclasses.replace(
                first,
                task=task,
                env={**first.env, tf_config.VARIABLE: json.dumps(config)},
                title=first.title.replace(str(first.task), str(task), 1),
            )
        return self._specs[task]

    def _start(self, spec: ProcessSpec, *, log: str) -> None:
        output = self._screen.open(spec.task, self._logs / log)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        self._pipes[read_fd] = (spec.task, output)
        if not self._is_paused:
            self.watch(read_fd, self._read, read_fd)
        env = {**spec.env, MARK: self._guard.mark}
        self._running[spec.task] = None
        try:
            started = self._starter.start(
                spec, env=env, output_fd=write_fd, notes_fd=self._notes_write_fd
            )
        except OSError:
            del self._running[spec.task]  # it did not start
            raise
        finally:
            os.close(write_fd)
        if started is not None:
            self._on_started(started)

    def _signal(self, task: Task, signum: int) -> None:
        self._is_patient = False
        if task not in self._running:
            return
        pid = self._running[task]
        if pid is not None:
            if signum == signal.SIGKILL and proc_state(pid) == "Z":  # its parent has not reaped it
                self._starter.give_up()
            _send(pid, signum)
        else:
            self._owed[task] = signum
            if signum == signal.SIGKILL:
                self._starter.give_up()

    def _kill_one(self, task: Task) -> None:
        self._raised.discard(task)  # the job continues
        if task in self._running and self._running[task] is None:
            self._owed[task] = signal.SIGKILL
        elif task in self._pids:
            self._guard.end_session(self._pids[task])

    @property
    def control(self) -> str | None:
        """Return the name of the socket for the members of an elastic job."""
        return self._links.name if self._links else None

    def _task_of(self, pid: int) -> Task | None:
        self._collect()  # the process may be newer than its event
        return next((task for task, known in self._running.items() if known == pid), None)

    def state_of(self, task: Task) -> str | None:
        """Return the state of a task's process, as `proc_state`, or `None` without a process."""
        pid = self._pids.get(task)
        return None if pid is None else proc_state(pid, pipe_fd=self._notes_fd)

    def watch(
        self,
        fd: int,
        handler: Callable[..., object] = lambda: None,
        *args: int,
        events: int = selectors.EVENT_READ,
    ) -> None:
        """Make `wait` call `handler`, and return, when the file descriptor is ready."""
        self._selector.register(fd, events, (handler, args))

    def unwatch(self, fd: int) -> None:
        """Stop watching a file descriptor."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def wait(self, timeout_s: float | None) -> Sequence[Event]:
        """Return new events after at most `timeout_s` seconds."""
        self._flush()
        ready = self._selector.select(0 if self._news else timeout_s)
        # Return events before reading the tasks' output. The supervisor can then suppress output
        # that is caused by a peer's failure.
        for handler, args in [key.data for key, _ in ready if key.fd not in self._pipes]:
            handler(*args)
        if not self._news:
            for fd in [key.fd for key, _ in ready if key.fd in self._pipes]:
                self._read(fd)
        news = list(self._news)
        self._news.clear()
        return news

    def finish(self) -> None:
        """End the attempt: kill its remaining processes and read the remaining output."""
        left = self._guard.end_all(keep=self._starter.pid or 0)
        if left:
            self._screen.say(f"cannot kill processes {', '.join(map(str, left))}")
        for fd in list(self._pipes):
            self._read_all(fd)
        for fd in list(self._pipes):  # a process that cannot be killed has it open
            self._close_pipe(fd)
        self._screen.close()
        self._running.clear()
        if self._links is not None:
            self._links.forget()
        self._owed.clear()
        self._on_notes()  # discard notes of tasks that have exited
        self._news.clear()

    def _on_started(self, started: Started) -> None:
        task = started.task
        self._running[task] = self._pids[task] = started.pid
        self._guard.add(started.pid)
        self._evidence.started(started.pid)
        self._news.append(started)
        if task in self._owed:
            _send(started.pid, self._owed.pop(task))

    def _on_signals(self) -> None:
        came = self.signals.read()
        self._news += [StopRequest(signum=signum) for signum in came if signum in STOP_SIGNALS]
        if signal.SIGCHLD in came:
            self._collect()

    def _collect(self) -> None:
        fd = self._starter.fileno()
        came = self._starter.collect()
        if fd is not None and self._starter.fileno() is None:
            self.unwatch(fd)
        self._on_notes()  # written before these exits: report notes first
        if self._links is not None:
            self._links.read_all()
        for event in came:
            if isinstance(event, Started):
                self._on_started(event)
                continue
            self._running.pop(event.task, None)
            self._owed.pop(event.task, None)  # its start has failed
            for fd in [fd for fd, (task, _) in self._pipes.items() if task == event.task]:
                self._read_all(fd)
            pid = self._pids.get(event.task)
            if pid is not None and not event.cause and event.status == -signal.SIGKILL:
                event = dataclasses.replace(event, cause=self._evidence.of_kill(pid))
            self._news.append(event)
        if any(isinstance(event, Ended) for event in came):
            self._guard.forget_empty()

    def _on_notes(self) -> None:
        for _ in range(_MAX_READS):
            try:
                self._notes_rest += os.read(self._notes_fd, _READ_BYTES)
            except BlockingIOError:
                break
        *lines, self._notes_rest = self._notes_rest.split(b"\n")
        for line in lines:
            with contextlib.suppress(*NO_SENSE):
                event = decode_event(json.loads(line))
                if isinstance(event, Raised | Beat) and event.task in self._running:
                    self._news.append(event)
                if isinstance(event, Raised) and event.exit_code not in STOP_CODES:
                    if self._raised - {event.task}:  # hide repeats of one error
                        self._screen.mute(event.task)
                    self._raised.add(event.task)

    def _read(self, fd: int) -> bool:
        """Pass a pipe's data to the task's output, and return whether there may be more."""
        _, output = self._pipes[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            output.feed(data)
            return True
        self._close_pipe(fd)
        return False

    def _close_pipe(self, fd: int) -> None:
        self.unwatch(fd)
        os.close(fd)
        _, output = self._pipes.pop(fd)
        output.close()

    def _read_all(self, fd: int) -> None:
        for _ in range(_MAX_READS):
            if not self._read(fd):
                break
        if fd in self._pipes:
            self._pipes[fd][1].flush_line()

    def _flush(self) -> None:
        """Write to the consoles. If a console is full, stop reading the tasks' output."""
        for console in self._screen.consoles:
            console.write()
            if console.is_full and not self._is_patient:
                console.backlog.clear()
            is_watched = console.fd in self._selector.get_map()
            if console.is_waiting and not is_watched:
                self.watch(console.fd, console.write, events=selectors.EVENT_WRITE)
            elif is_watched and not console.is_waiting:
                self.unwatch(console.fd)
        out = self._screen.out
        if out.is_closed and self._is_patient and not self._is_closed:
            self._is_closed = True  # report it once: a second stop request kills
            self._news.append(StopRequest(signum=signal.SIGPIPE))
        if out.is_full is not self._is_paused:
            self._is_paused = out.is_full
            for fd in self._pipes:
                if self._is_paused:
                    self.unwatch(fd)
                else:
                    self.watch(fd, self._read, fd)


class LocalProcesses(JobProcesses):
    """All processes of a job on this machine. Jobs on several hosts have a `Team` instead."""

    def __init__(
        self, job: JobDescription, *, ports: PortPool, screen: JobScreen, signals: SignalPipe
    ) -> None:
        super().__init__(job, screen=screen, signals=signals)
        self._ports = ports

    def begin_attempt(self, number: int, *, restarts: int) -> Sequence[Task]:
        """Begin an attempt and return its tasks, in start order."""
        addresses = [port.address for port in self._ports.renewed()]
        attempt = self._job.local_attempt(addresses, number=number, restarts=restarts)
        self.begin(attempt, fork_log="fork-server.log")
        return attempt.tasks

    def gather(self) -> None:
        """Return at once: a job on this machine waits for no host."""

    def is_here(self, task: Task) -> bool:
        return True

    def can_start(self, task: Task) -> bool:
        return True


def _send(pid: int, signum: int) -> None:
    """Signal a task's process but not its children, which it may need until it has saved."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
