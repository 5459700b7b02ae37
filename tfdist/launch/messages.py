"""Messages that the processes of a job send each other: JSON objects.

What a task tells its launcher, and a fork server too, is an event. Between the launchers of several
hosts there are, from a host that comes and from host 0 when it has come::

    {"hello": Hello}                           its first message
    {"welcome": rank}                          it is in
    {"refused": reason, "differs": bool}       it is not; where it differs it need not try again

from host 0 to another::

    {"attempt": Attempt}                the next attempt; its tasks are not started yet
    {"action": kind, ...}               what to do with a task
    {"finish": true}                    end what the attempt has left
    {"end": exit code, "why": text}     the job is over

and from another to host 0::

    {"ready": ports}                          ready for an attempt
    {"event": kind, ..., "lines": [...]}      what has happened; of a task's end, its last lines
    {"states": {task: state}}                 states of the tasks' processes
    {"lines": [...], "task": task}            the stacks that were asked for

`encode` and `decode` are for any frozen dataclass, and check every type; the doctor sends its
facts by them too. A `Task` goes by its name.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tfdist.cluster import ClusterSpec, Task
from tfdist.launch.events import Event, TaskAction, task_of
from tfdist.phases import PendingWork

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
        return _several(inside, value)
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


def _several(inside: tuple[Any, ...], value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{type(value).__name__} for a list")
    if inside[-1] is Ellipsis:
        return tuple(_one(inside[0], item) for item in value)
    if len(value) != len(inside):
        raise ValueError(f"{len(value)} parts of {len(inside)}")
    return tuple(_one(kind, item) for kind, item in zip(inside, value, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First message of a host, about itself."""

    rank: int
    terms: dict[str, str]
    """What must be the same on all hosts, the version of tfdist among it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Plan of an attempt for one host."""

    number: int
    restarts: int = 0
    """How often the launcher has started the job again before."""
    run_dir: str
    cluster: ClusterSpec
    tasks: tuple[Task, ...]
    """Those of this host."""
    hosts: dict[str, str] = dataclasses.field(default_factory=dict)
    """The host of each task of the job, by the task's name, where there are several."""

    @property
    def logs(self) -> Path:
        """Return the directory of its logs."""
        return Path(self.run_dir) / "logs" / f"attempt-{self.number}"


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
