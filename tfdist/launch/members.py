"""Connections of the launcher to the members of an elastic job.

The members connect to a named socket of the job. The kernel tells the launcher which process is
at the other end, so only the job's own tasks are members. A message is one packet of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from tfdist.cluster import Task
from tfdist.launch.events import (
    NO_SENSE,
    NOT_STEADY,
    AnswerResize,
    Event,
    Leave,
    MemberSaid,
    Resize,
    TaskAction,
    worker,
)
from tfdist.launch.membership import Go, Knock, View, Welcome

_MOST_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class MemberLinks:
    """Sockets to the members of an elastic job.

    Args:
      name: Name of the socket, unique on this machine.
      most: Number of workers that the job can have.
      task_of: Function that returns the task of a process, or `None`.
      is_here: Function that returns whether a task runs on this host.
      watch: Function that calls a handler when a file descriptor is ready.
      unwatch: Function that stops the watch of a file descriptor.
      tell: Function that receives the members' events.
    """

    def __init__(
        self,
        name: str,
        *,
        most: int,
        task_of: Callable[[int], Task | None],
        is_here: Callable[[Task], bool],
        watch: Callable[..., None],
        unwatch: Callable[[int], None],
        tell: Callable[[Event], None],
    ) -> None:
        self.name, self._most, self._is_here = name, most, is_here
        self.pem: str | None = None
        """Key and certificate of a job on several hosts."""
        self._task_of, self._watch, self._unwatch, self._tell = task_of, watch, unwatch, tell
        self._ends: dict[Task, socket.socket] = {}
        self._asking: deque[socket.socket] = deque()  # users who wait for an answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close all sockets."""
        self.forget()
        self._unwatch(self._listener.fileno())
        self._listener.close()

    def forget(self) -> None:
        """Drop the members of an attempt that is over."""
        for task in list(self._ends):
            self._drop(task)
        while self._asking:
            self._answer(NOT_STEADY)

    def read_all(self) -> None:
        """Read the messages that members have sent before they exited."""
        for task in list(self._ends):
            self._read(task)

    def perform(self, action: TaskAction) -> None:
        """Perform an action on the members, and ignore any other action."""
        match action:
            case View():
                for member in action.members:
                    self._send(worker(member), {"view": action.epoch})
            case Go():
                self._go_on(action)
            case Welcome():
                self._welcome(action)
            case Knock():
                self._send(worker(action.first), {"knock": action.joining})
            case Leave():
                self._send(action.task, {"leave": True})
            case AnswerResize():
                self._answer(action.refusal)

    def _go_on(self, go: Go) -> None:
        ends: dict[tuple[int, int], socket.socket] = {}
        here = [member for member in go.members if self._is_here(worker(member))]
        message = {
            "go": go.epoch,
            "members": go.members,
            "here": here,
            "done": go.done,
            "source": go.source,
            "behind": go.behind,
            "joining": go.joining,
        }
        for member in here:  # close its ends at once: all ends exceed a usual limit of open files
            others = [other for other in here if other != member]
            for other in others:
                if (member, other) not in ends:
                    ends[member, other], ends[other, member] = socket.socketpair()
            own = [ends.pop((member, other)) for other in others]
            self._send(worker(member), message, [end.fileno() for end in own])
            for end in own:
                end.close()

    def _welcome(self, action: Welcome) -> None:
        joining, teacher = worker(action.joining), worker(action.teacher)
        is_direct = self._is_here(joining) and self._is_here(teacher)
        ends = socket.socketpair()
        fds = [[end.fileno()] if is_direct else [] for end in ends]
        self._send(joining, {"join": action.joining}, fds[0])
        self._send(teacher, {"teach": action.joining}, fds[1])
        for end in ends:
            end.close()

    def _send(self, task: Task, message: object, fds: list[int] | None = None) -> None:
        end = self._ends.get(task)
        if end is not None:
            try:
                socket.send_fds(end, [json.dumps(message).encode()], fds or [])
            except OSError as error:  # it has exited, which is an event of its own
                if error.errno == errno.ETOOMANYREFS:  # the task would wait for ever
                    raise

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            end, _ = self._listener.accept()
            raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(raw)
            task = self._task_of(pid)
            if user != os.getuid():
                end.close()
                return
            end.setblocking(False)
            if task is None:
                self._watch(end.fileno(), self._read_request, end)
                return
            self._drop(task)
            self._ends[task] = end
            if self.pem is not None:
                self._send(task, {"pem": self.pem})
            self._watch(end.fileno(), self._read, task)

    def _read_request(self, end: socket.socket) -> None:
        """Read a request of `tfdist.workers`."""
        self._unwatch(end.fileno())
        try:
            workers = int(json.loads(end.recv(_MOST_BYTES))["workers"])
        except (OSError, *NO_SENSE):
            end.close()
            return
        if 1 <= workers <= self._most:
            self._asking.append(end)
            self._tell(Resize(workers=workers))
        else:
            _reply(end, f"the job can have 1 to {self._most} workers")

    def _answer(self, refusal: str) -> None:
        """Answer the oldest request, with the reason of a refusal or ""."""
        if self._asking:
            _reply(self._asking.popleft(), refusal)

    def _read(self, task: Task) -> None:
        end = self._ends.get(task)
        while end is not None:
            try:
                data = end.recv(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(task)
                return
            with contextlib.suppress(*NO_SENSE):
                self._tell(MemberSaid(task=task, message=dict(json.loads(data))))

    def _drop(self, task: Task) -> None:
        if (end := self._ends.pop(task, None)) is not None:
            self._unwatch(end.fileno())
            end.close()


def _reply(end: socket.socket, refusal: str) -> None:
    with end, contextlib.suppress(OSError):  # the user waits no longer
        end.send(json.dumps({"refusal": refusal}).encode())
