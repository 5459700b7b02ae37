"""Events of a running job, actions of the supervisor, and their encoding as messages.

Signals are events too (`SignalPipe`). The processes of a job exchange JSON objects. Tasks and fork
servers send events to the launcher. The launcher sends these messages to its agents (one agent on
each other host)::

    {"module": name, ...}               first message: the module to run, and its arguments
    {"attempt": Attempt}                the next attempt, before its tasks start
    {"action": kind, ...}               action on a task
    {"finish": true}                    kill the remaining processes of the attempt
    {"end": exit code}                  the job is over

An agent sends these messages to the launcher::

    {"hello": address, "terms": {...}}        first message: the host's address and its versions
    {"refused": text}                         alternative: the reason the host cannot run the job
    {"ready": ports}                          ready for an attempt
    {"event": kind, ..., "lines": [...]}      an event, with the last lines of an exited task
    {"states": {task: state}}                 states of the tasks' processes
    {"lines": [...], "task": task}            the requested stacks

`encode` and `decode` accept any frozen dataclass and check all types. A `Task` is sent by its name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import signal
import time
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tfdist.cluster import Task
from tfdist.launch.membership import Go, Knock, View, Welcome
from tfdist.phases import PendingWork

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Request to start a task at the beginning of an attempt."""

    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Start of a task's process."""

    task: Task
    pid: int
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """Failure of a task's program. Its process may need some time to exit."""

    task: Task
    exit_code: int
    cause: str
    at_s: float
    step: int | None = None
    """Finished steps, or `None` if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Heartbeat of a task, with its phase and step. Times are from the monotonic clock."""

    task: Task
    phase: str
    step: int | None
    """Finished optimizer steps (`None` if the training loop did not start)."""
    since_s: float
    """Time at which the task entered the phase or finished its last step."""
    first_step_s: float | None
    """Time at which this process finished its first steps."""
    at_s: float
    awaited: PendingWork | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Exit of a task's process, after its output was read.

    `status` is the exit code, or the negative number of the signal that killed the process.
    """

    task: Task
    status: int
    at_s: float
    cause: str = ""
    """Reason of the exit if the launcher knows more than the status, else ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequest:
    """Stop request to the launcher, by a signal or by closing its output (SIGPIPE)."""

    signum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberSaid:
    """Message of an elastic task to the launcher (see `tfdist.launch.membership`).

    The messages are ``{"ready": true}`` at the start, ``{"ack": epoch, "done": operations,
    "has_state": bool}`` from a member that has left its old view, ``{"knock": true}`` from a task
    that joins, ``{"admit": index, "epoch": epoch}`` with the consent of a member,
    ``{"broken": epoch}`` after a lost connection, and ``{"is_replaceable": bool}`` from the chief.
    """

    task: Task
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize:
    """Request of the user for another number of workers. `AnswerResize` answers it."""

    workers: int


NOT_STEADY = "the job is starting or ending"


Event = Started | Raised | Beat | Ended | StopRequest | MemberSaid | Resize


@dataclass(frozen=True, kw_only=True, slots=True)
class Awakening:
    """Events since the supervisor's last decision."""

    at_s: float
    events: tuple[Event | Begin, ...] = ()
    unreachable: frozenset[Task] = frozenset()
    """Tasks that cannot be started because their host is lost."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a task. A `Started` event follows, or an `Ended` event if the start fails."""

    task: Task
    restart: int = 0
    """Number of earlier restarts of only this task in this attempt."""

    @property
    def log_name(self) -> str:
        """Return the log's file name, such as ``worker-1.restart-1.log`` after one restart."""
        return f"{self.task}.restart-{self.restart}.log" if self.restart else f"{self.task}.log"


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to a task, when the job stops."""

    task: Task
    signum: int


@dataclass(frozen=True, slots=True)
class KillOne:
    """Kill one task and its remaining child processes, while the job continues."""

    task: Task


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Tell a task to print its Python stacks, without stopping the task."""

    task: Task


@dataclass(frozen=True, slots=True)
class ShowFailure:
    """Show the root cause with its task's last lines, and hide later output of other tasks."""

    task: Task
    cause: str
    stacks: tuple[Task, ...] = ()
    """Tasks that have just printed their stacks. The report keeps their last lines."""


@dataclass(frozen=True, slots=True)
class Say:
    """Show lines of the launcher."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell a member of an elastic job to exit."""

    task: Task


@dataclass(frozen=True, slots=True)
class AnswerResize:
    """Answer the oldest request for another number of workers."""

    refusal: str
    """Reason of a refusal, "" if the number changes."""


MemberAction = View | Go | Welcome | Knock | Leave | AnswerResize
TaskAction = Start | Signal | KillOne | AskForStacks | ShowFailure | MemberAction
Action = TaskAction | Say


_TASK = re.compile(r"([a-z]{1,20})-([0-9]{1,9})")


def task_of(name: object) -> Task:
    """Return the task for a name such as ``worker-1``, or raise ValueError."""
    match = _TASK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError("not a task name")
    return Task(match[1], int(match[2]))  # may raise UsageError, a kind of ValueError


def worker(index: int) -> Task:
    """Return the task of a worker."""
    return Task("worker", index)


NO_SENSE = (ValueError, KeyError, TypeError, OverflowError)
"""Exceptions when decoding an invalid message."""

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a dataclass or a field's value as JSON types."""
    if isinstance(value, Task):
        return str(value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}


def decode(kind: type[T], value: object) -> T:
    """Return the dataclass `kind` that `value` encodes. A missing field has its default.

    Raises:
        ValueError: A value has a wrong type, or `kind` has no field of that name.
    """
    if not isinstance(value, dict):
        raise ValueError(f"no {kind.__name__}")
    hints = _hints(kind)
    if unknown := set(value) - set(hints):
        raise ValueError(f"{kind.__name__} with {sorted(map(str, unknown))[0]}")
    try:
        return kind(**{name: _one(hints[name], item) for name, item in value.items()})
    except TypeError:
        raise ValueError(f"{kind.__name__} lacks a required field") from None


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _one(hint: Any, value: object) -> object:
    inside = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        kind = next(kind for kind in inside if kind is not types.NoneType)
        return None if value is None else _one(kind, value)
    if isinstance(value, list) and inside:
        return tuple(_one(inside[0], item) for item in value)
    if hint is Task:
        return task_of(value)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value)
    kind = typing.get_origin(hint) or hint
    if not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError(f"{type(value).__name__} for {hint}")
    return value


_EVENTS: dict[str, type[Event]] = {kind.__name__.lower(): kind for kind in typing.get_args(Event)}
_ACTIONS: dict[str, type[TaskAction]] = {
    kind.__name__.lower(): kind for kind in typing.get_args(TaskAction)
}


def encode_action(action: TaskAction) -> Message:
    """Return an action as a message."""
    return {"action": type(action).__name__.lower(), **encode(action)}


def decode_action(message: Message) -> TaskAction:
    """Return the action in a message, or raise one of `NO_SENSE`."""
    kind = _ACTIONS[message["action"]]
    return decode(kind, {name: value for name, value in message.items() if name != "action"})


def encode_event(event: Event, *, now_s: float | None = None) -> Message:
    """Return an event as a message. With `now_s`, times are sent as ages, for another host."""
    sent = event if now_s is None else _ages(event, now_s=now_s)
    return {"event": type(event).__name__.lower(), **encode(sent)}


def decode_event(message: Message, *, now_s: float | None = None) -> Event:
    """Return the event in a message. With `now_s`, ages are converted to times of this host.

    Raises one of `NO_SENSE` if the message is invalid. Other fields of the message are ignored.
    """
    kind = _EVENTS[message["event"]]
    event = decode(kind, {name: value for name, value in message.items() if name in _hints(kind)})
    return event if now_s is None else _ages(event, now_s=now_s)


def _ages(event: T, *, now_s: float) -> T:
    """Return an event with its times converted to ages, or its ages to times."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(event):  # type: ignore[arg-type]  # all of them are dataclasses
        value = getattr(event, field.name)
        if isinstance(value, PendingWork):
            changes[field.name] = _ages(value, now_s=now_s)
        elif field.name.endswith("_s") and value is not None:
            changes[field.name] = now_s - value
    return dataclasses.replace(event, **changes)  # type: ignore[type-var]


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a job. Schedulers such as Slurm can send SIGUSR1 before the time limit."""

SAME_REQUEST_S = 0.1
"""Seconds within which two stop signals count as one request. Some programs, such as `timeout`,
send a signal both to a process and to its group."""


def exit_code_for(signum: int) -> int:
    """Return the exit code of a job stopped by signal n: 128 + n (for SIGUSR1, as for SIGTERM)."""
    return 128 + (signal.SIGTERM if signum == signal.SIGUSR1 else signum)


def signal_name(signum: int) -> str:
    """Return a signal's name, such as ``SIGKILL`` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def request_name(signum: int) -> str:
    """Return the text for a stop request. SIGPIPE means that the launcher's output is closed."""
    return "the launcher's output was closed" if signum == signal.SIGPIPE else signal_name(signum)


def exit_code_of(status: int) -> int:
    """Return the exit code for a task's `status` (128 + n for a signal n, as in a shell).

    A task that SIGUSR1 kills has the exit code of a stopped task.
    """
    return exit_code_for(-status) if status < 0 else status


STOP_CODES = {exit_code_for(signum) for signum in (*STOP_SIGNALS, signal.SIGPIPE)}


class SignalPipe:
    """Context manager that delivers SIGCHLD and stop signals through a file descriptor.

    A stop signal that the caller ignores (for example nohup) stays ignored. A stop signal that the
    caller has blocked is unblocked.
    """

    def __init__(self) -> None:
        self._requested_s = -math.inf
        self._old_fd = -1
        self._old: dict[signal.Signals, object] = {}
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> SignalPipe:
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *STOP_SIGNALS):
            if signum != signal.SIGCHLD and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            # The signal's number is written to the pipe.
            self._old[signum] = signal.signal(signum, lambda *_: None)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._old)
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # as it was returned
        signal.set_wakeup_fd(self._old_fd)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """Return the signals since the last call, with each stop request once."""
        try:
            came = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signum for signum in came if signum not in STOP_SIGNALS or self._is_new()]

    def stop_requests(self) -> list[int]:
        """Return only the stop signals since the last call, and drop all other signals."""
        return [signum for signum in self.read() if signum in STOP_SIGNALS]

    def _is_new(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._requested_s < SAME_REQUEST_S:
            return False
        self._requested_s = now_s
        return True
