"""Metrics of a job for Prometheus, on a port of this machine's loopback.

The launcher has one thread, since it forks: the sockets are looked after whenever it is awake, and
a request wakes it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfdist.errors import UsageError
from tfdist.phases import PHASES, SUM

_PATIENCE_S = 5.0
_MAX_CONNECTIONS = 16
_MAX_REQUEST_BYTES = 1 << 14
_HEAD = "HTTP/1.1 {status}\r\nContent-Type: {type}\r\nContent-Length: {size}\r\nConnection: close"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OF_TASK = (
    ("step", "tfdist_step", "gauge", "Optimizer steps that the task has done."),
    ("steps_per_s", "tfdist_steps_per_second", "gauge", "Steps per second of the last 15 s."),
    ("memory_bytes", "tfdist_memory_bytes", "gauge", "Resident memory of the task's process."),
    ("peak_memory_bytes", "tfdist_memory_peak_bytes", "gauge", "The most of it that was seen."),
    ("silent_s", "tfdist_heartbeat_age_seconds", "gauge", "Since the task's last heartbeat."),
    ("phase_s", "tfdist_phase_age_seconds", "gauge", "Since the task's last progress."),
    ("restarts", "tfdist_task_restarts", "gauge", "How often it was restarted alone."),
)


class Watch(Protocol):
    """What wakes the launcher when there is something to read from a descriptor."""

    def watch(self, fd: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...


def render(status: Mapping[str, Any]) -> str:
    """Return a status of `live.json` in Prometheus' text format."""
    lines = [
        "# HELP tfdist_attempt Number of the job's present attempt.",
        "# TYPE tfdist_attempt gauge",
    ]
    lines.append(f"tfdist_attempt {status['attempt']}")
    if status.get("step") is not None:
        lines += ["# HELP tfdist_job_step Steps of the job.", "# TYPE tfdist_job_step gauge"]
        lines.append(f"tfdist_job_step {status['step']}")
    tasks: Sequence[Mapping[str, Any]] = status["tasks"]
    lines += ["# HELP tfdist_task_up Whether the task runs.", "# TYPE tfdist_task_up gauge"]
    lines += [f"tfdist_task_up{_labels(t)} {int(t['state'] == 'running')}" for t in tasks]
    for key, name, kind, about in _OF_TASK:
        values = [f"{name}{_labels(task)} {task[key]}" for task in tasks if task[key] is not None]
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *values] if values else []
    lines += ["# HELP tfdist_task_phase 1 for the task's phase.", "# TYPE tfdist_task_phase gauge"]
    lines += [
        f"tfdist_task_phase{_labels(task, phase=phase)} {int(task['phase'] == phase)}"
        for task in tasks
        for phase in (*PHASES, SUM)
    ]
    return "\n".join(lines) + "\n"


def _labels(task: Mapping[str, Any], **more: str) -> str:
    labels = {"task": task["task"], **({"host": task["host"]} if task["host"] else {}), **more}
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(kw_only=True, slots=True)
class _Connection:
    socket: socket.socket
    came_s: float
    request: bytes = b""


class MetricsServer:
    """Answers ``GET /metrics`` on loopback; a context manager.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(self, port: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._text = ""
        self._connections: list[_Connection] = []
        self._watch: Watch | None = None
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(
                "--metrics_port",
                received=f"{port} ({error.strerror})",
                expected="a port of this machine that is free",
                fix="give another one, or leave --metrics_port out",
                code="port-taken",
            ) from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()
        self._listener.close()

    def tell(self, status: Mapping[str, Any]) -> None:
        """Take what is to be served from now on."""
        self._text = render(status)

    def attach(self, watch: Watch) -> None:
        """Have requests wake the launcher."""
        self._watch = watch
        watch.watch(self._listener.fileno())

    def detach(self) -> None:
        """Close all connections; what was attached to may close then."""
        for connection in list(self._connections):
            self._drop(connection)
        if self._watch is not None:
            self._watch.unwatch(self._listener.fileno())
            self._watch = None

    def turn(self) -> None:
        """Accept and answer what has come, without waiting."""
        with contextlib.suppress(OSError):
            while len(self._connections) < _MAX_CONNECTIONS:
                self._accept(self._listener.accept()[0])
        for connection in list(self._connections):
            self._serve(connection)

    def _accept(self, client: socket.socket) -> None:
        client.setblocking(False)
        self._connections.append(_Connection(socket=client, came_s=self._clock()))
        if self._watch is not None:
            self._watch.watch(client.fileno())

    def _serve(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_MAX_REQUEST_BYTES)
        except BlockingIOError:
            if self._clock() - connection.came_s > _PATIENCE_S:
                self._drop(connection)
            return
        except OSError:
            data = b""
        connection.request += data
        is_whole = b"\r\n\r\n" in connection.request
        if is_whole:
            with contextlib.suppress(OSError):  # a client that does not read gets no more of it
                connection.socket.send(self._answer(connection.request))
        if is_whole or not data or len(connection.request) > _MAX_REQUEST_BYTES:
            self._drop(connection)

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split()
        is_known = len(words) == 3 and words[0] == b"GET" and words[1].split(b"?")[0] == b"/metrics"
        text = self._text if is_known else "GET /metrics\n"
        body = text.encode()
        status = "200 OK" if is_known else "404 Not Found"
        head = _HEAD.format(status=status, type=_TYPE, size=len(body))
        return f"{head}\r\n\r\n".encode() + body

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        if self._watch is not None:
            self._watch.unwatch(connection.socket.fileno())
        connection.socket.close()
