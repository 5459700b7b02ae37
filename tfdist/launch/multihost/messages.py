"""Encoding of another host's task events as messages. Times are sent as ages: clocks differ."""

from __future__ import annotations

from typing import Any

from tfdist.launch.events import Beat, Ended, Raised, Started, TaskPendingWork, task_of

TaskEvent = Started | Raised | Beat | Ended
Message = dict[str, Any]

NO_SENSE = (ValueError, KeyError, TypeError, OverflowError)
"""What the functions here raise for a message that makes no sense."""


def told(event: TaskEvent, *, now_s: float) -> Message:
    """Return an event as a message."""
    message: Message = {
        "event": type(event).__name__.lower(),
        "task": str(event.task),
        "age_s": now_s - event.at_s,
    }
    match event:
        case Started():
            return {**message, "pid": event.pid}
        case Raised():
            own = {"exit_code": event.exit_code, "cause": event.cause, "step": event.step}
            return {**message, **own}
        case Ended():
            return {**message, "status": event.status, "cause": event.cause}
        case Beat():
            awaited = event.awaited
            return {
                **message,
                "phase": event.phase,
                "step": event.step,
                "since_age_s": now_s - event.since_s,
                "first_step_age_s": _age_s(event.first_step_s, now_s=now_s),
                "rest_age_s": _age_s(event.rest_s, now_s=now_s),
                "awaited": awaited and _told_awaited(awaited, now_s=now_s),
            }


def heard(message: Message, *, now_s: float) -> TaskEvent:
    """Return the event of a message; raise one of `NO_SENSE` if it is none."""
    task, at_s = task_of(message["task"]), now_s - float(message["age_s"])
    match message["event"]:
        case "started":
            return Started(task=task, pid=int(message["pid"]), at_s=at_s)
        case "raised":
            return Raised(
                task=task,
                exit_code=int(message["exit_code"]),
                cause=str(message["cause"]),
                step=_optional(message["step"]),
                at_s=at_s,
            )
        case "ended":
            cause = str(message["cause"])
            return Ended(task=task, status=int(message["status"]), cause=cause, at_s=at_s)
        case "beat":
            return Beat(
                task=task,
                phase=str(message["phase"]),
                step=_optional(message["step"]),
                since_s=now_s - float(message["since_age_s"]),
                first_step_s=_moment_s(message["first_step_age_s"], now_s=now_s),
                at_s=at_s,
                awaited=_heard_awaited(message["awaited"], now_s=now_s),
                rest_s=_moment_s(message["rest_age_s"], now_s=now_s),
            )
    raise ValueError(f"no event: {message['event']!r}")


def _told_awaited(awaited: TaskPendingWork, *, now_s: float) -> Message:
    age_s = now_s - awaited.since_s
    return {"task": str(awaited.task), "age_s": age_s, "is_first": awaited.is_first}


def _heard_awaited(told: Message | None, *, now_s: float) -> TaskPendingWork | None:
    if told is None:
        return None
    since_s, is_first = now_s - float(told["age_s"]), bool(told["is_first"])
    return TaskPendingWork(task=task_of(told["task"]), since_s=since_s, is_first=is_first)


def _age_s(at_s: float | None, *, now_s: float) -> float | None:
    return None if at_s is None else now_s - at_s


def _moment_s(age_s: Any, *, now_s: float) -> float | None:
    return None if age_s is None else now_s - float(age_s)


def _optional(number: Any) -> int | None:
    return None if number is None else int(number)
