"""Events of a running job, the actions that the supervisor decides on, and how both are sent.

Signals are events too: `SignalPipe`. What the processes of a job send each other are JSON objects.

What a task tells its launcher, and a fork server too, is an event. The launcher sends its agents,
one on each other host::

    {"module": name, ...}               first: what the agent runs, and with what
    {"attempt": Attempt}                the next attempt; its tasks are not started yet
    {"action": kind, ...}               what to do with a task
    {"finish": true}                    end what the attempt has left
    {"end": exit code}                  the job is over

and an agent sends the launcher::

    {"hello": address, "terms": {...}}        first: its host's address, and its versions
    {"refused": text}                         instead: why the job cannot run on its host
    {"ready": ports}                          ready for an attempt
    {"event": kind, ..., "lines": [...]}      what has happened; of a task's end, its last lines
    {"states": {task: state}, "full": bool}   states of the tasks' processes, and whether these
                                              wait, as nobody reads the output of this host
    {"lines": [...], "task": task}            the stacks that were asked for

`encode` and `decode` are for any frozen dataclass, and check every type. A `Task` goes by its name.
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
from tfdist.phases import PendingWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The attempt begins: a task is to be started."""

    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A task has a process."""

    task: Task
    pid: int
    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """A task's program has failed; its process will end, which may take it a while."""

    task: Task
    exit_code: int
    cause: str
    at_s: float
    step: int | None = None
    """Steps done, where known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A sign of life: what a task is doing, by its own word. Moments are those of one clock."""

    task: Task
    phase: str
    step: int | None
    """Optimizer steps done; None before the training loop."""
    since_s: float
    """When it entered the phase or last did a step."""
    first_step_s: float | None
    """When this process had done its first steps."""
    at_s: float
    awaited: PendingWork | None = None
    is_alone: bool = False
    """Whether it trains with Keras and has joined no job; see `tfdist.launch.alone`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A task's process has ended, and its output has been read.

    `status` is its exit code, or minus the signal that ended it.
    """

    task: Task
    status: int
    at_s: float
    cause: str = ""
    """Why, where the launcher knows better than the status says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequest:
    """A stop request to the launcher, by a signal or by closing its output (SIGPIPE)."""

    signum: int


Event = Started | Raised | Beat | Ended | StopRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Awakening:
    """What has happened since the supervisor was last awake; a history is a list of these."""

    at_s: float
    events: tuple[Event | Begin, ...] = ()
    unreachable: frozenset[Task] = frozenset()
    """Tasks that cannot be started now: their host is gone."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a task; its `Started` comes as an event. Where it cannot be started, its `Ended`."""

    task: Task
    restart: int = 0
    """How often it was started again alone before, in this attempt."""

    @property
    def log_name(self) -> str:
        """Return the name of its log, such as ``worker-1.restart-1.log`` once started again."""
        return f"{self.task}.restart-{self.restart}.log" if self.restart else f"{self.task}.log"


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to a task: the job is about to end."""

    task: Task
    signum: int


@dataclass(frozen=True, slots=True)
class KillOne:
    """End one task, and what it has left behind, while the job goes on."""

    task: Task


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Have a task print its Python stacks; it goes on."""

    task: Task


@dataclass(frozen=True, slots=True)
class ShowFailure:
    """Show what failed first and its last lines; from now on nothing of other tasks."""

    task: Task
    cause: str
    stacks: tuple[Task, ...] = ()
    """Tasks that have just printed their stacks: their last lines are kept for the report."""


@dataclass(frozen=True, slots=True)
class Say:
    """Show lines of the launcher's own."""

    text: str


TaskAction = Start | Signal | KillOne | AskForStacks | ShowFailure
Action = TaskAction | Say


_TASK = re.compile(r"([a-z]{1,20})-([0-9]{1,9})")


def task_of(name: object) -> Task:
    """Return the task that `str` gives as ``worker-1``; raise ValueError if it is none."""
    match = _TASK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError("no task's name")
    return Task(match[1], int(match[2]))  # UsageError, which is a ValueError


Message = dict[str, Any]

NO_SENSE = (ValueError, KeyError, TypeError, OverflowError)
"""Exceptions of reading a message that makes no sense."""

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a dataclass, or what may be in one, as JSON has it."""
    if isinstance(value, Task):
        return str(value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}


def decode(kind: type[T], value: object) -> T:
    """Return the `kind` that `value` encodes, what is missing having its default.

    Raises:
        ValueError: something is of another type, or has a name that `kind` does not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"no {kind.__name__}")
    hints = _hints(kind)
    if unknown := set(value) - set(hints):
        raise ValueError(f"{kind.__name__} with {sorted(map(str, unknown))[0]}")
    try:
        return kind(**{name: _one(hints[name], item) for name, item in value.items()})
    except TypeError:
        raise ValueError(f"{kind.__name__} without some of its parts") from None


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def _one(hint: Any, value: object) -> object:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _one(next(kind for kind in inside if kind is not types.NoneType), value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{type(value).__name__} for a list")
        kinds = [inside[0]] * len(value) if inside[-1] is Ellipsis else inside
        if len(value) != len(kinds):
            raise ValueError(f"{len(value)} parts of {len(kinds)}")
        return tuple(_one(kind, item) for kind, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {_one(inside[0], key): _one(inside[1], item) for key, item in value.items()}
    if hint is Task:
        return task_of(value)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value)
    if hint is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    if type(value) is not (origin or hint):
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
    """Return the action of a message; raise one of `NO_SENSE` if it is none."""
    kind = _ACTIONS[message["action"]]
    return decode(kind, {name: value for name, value in message.items() if name != "action"})


def encode_event(event: Event, *, now_s: float | None = None) -> Message:
    """Return an event as a message; with `now_s` its moments are ages, for another host's clock."""
    sent = event if now_s is None else _ages(event, now_s=now_s)
    return {"event": type(event).__name__.lower(), **encode(sent)}


def decode_event(message: Message, *, now_s: float | None = None) -> Event:
    """Return the event that was encoded, with `now_s` at the same distance from now.

    Raises one of `NO_SENSE` if it is none. What else is in the message is left out.
    """
    kind = _EVENTS[message["event"]]
    event = decode(kind, {name: value for name, value in message.items() if name in _hints(kind)})
    return event if now_s is None else _ages(event, now_s=now_s)


def _ages(event: T, *, now_s: float) -> T:
    """Return an event with ages for moments, or with moments for ages."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(event):  # type: ignore[arg-type]  # all of them are dataclasses
        value = getattr(event, field.name)
        if isinstance(value, PendingWork):
            changes[field.name] = _ages(value, now_s=now_s)
        elif field.name.endswith("_s") and value is not None:
            changes[field.name] = now_s - value
    return dataclasses.replace(event, **changes)  # type: ignore[type-var]


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a job to stop; SIGUSR1 is what schedulers such as Slurm announce the end with."""

SAME_REQUEST_S = 0.1
"""What sends one request to a process and to its group, as `timeout` does, or a wrapper that hands
Ctrl-C on, delivers it twice: within so long it is one."""


def exit_code_for(signum: int) -> int:
    """Return what a job ends with that was asked to stop: 128 + n, and for SIGUSR1 as SIGTERM."""
    return 128 + (signal.SIGTERM if signum == signal.SIGUSR1 else signum)


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def request_name(signum: int) -> str:
    """Return by what a job was asked to stop; SIGPIPE stands for its output, which is closed."""
    return "its output is closed" if signum == signal.SIGPIPE else signal_name(signum)


def exit_code_of(status: int) -> int:
    """Return the exit code for a task's `status`: 128 + n for a signal n, as a shell gives it.

    A task that SIGUSR1 killed was asked to stop before it could save anything.
    """
    return exit_code_for(-status) if status < 0 else status


STOP_CODES = {exit_code_for(signum) for signum in (*STOP_SIGNALS, signal.SIGPIPE)}


class SignalPipe:
    """Delivers SIGCHLD and requests to stop through a descriptor, while it is entered.

    A signal that the launcher was started to ignore, as nohup does, stays ignored. One that whoever
    started it had blocked, as a thread without signals does, is let through.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested_s = -math.inf
        self._old_fd = -1
        self._old: dict[signal.Signals, object] = {}
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> SignalPipe:
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *STOP_SIGNALS):
            if signum != signal.SIGCHLD and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            # Its number arrives through the pipe.
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
        """Return the signals that have come since the last call, each request to stop once."""
        try:
            came = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signum for signum in came if signum not in STOP_SIGNALS or self._is_new()]

    def stop_requests(self) -> list[int]:
        """Return the requests to stop alone; what else has come is forgotten."""
        return [signum for signum in self.read() if signum in STOP_SIGNALS]

    def _is_new(self) -> bool:
        """Return whether a request to stop that comes now is another than the last one."""
        now_s = self._clock()
        if now_s - self._requested_s < SAME_REQUEST_S:
            return False
        self._requested_s = now_s
        return True
