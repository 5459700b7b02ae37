"""The tasks of a ps job tell the chief which TensorFlow they have, before it speaks to theirs.

Two versions may understand each other, or end with an error that names neither, or wait. A task
tells it to what answers at the chief's address. That is, until its workers and ps are there, a
listener of ours; afterwards, or in a chief that has made its strategy by itself, a server of gRPC,
for which the words are in a frame of HTTP/2 that it leaves aside (RFC 9113, section 5.5).
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

from tfdist.cluster import Task, TaskConfig
from tfdist.errors import UsageError
from tfdist.strategy.rendezvous import serves

_AGAIN_S = 0.1
_PATIENCE_S = 1.0
_SHY_S = 3.0
_MOST_BYTES = 1024
_FRAME = 0xFA  # a type of frame that HTTP/2 does not have
_HEARD = b"tfdist: heard\n"
_WORDS = re.compile(rb"tfdist: (chief|worker|ps)-(\d+) has TensorFlow (\S+)\n")


def introduce(config: TaskConfig, *, version: str) -> threading.Event:
    """Tells the chief this task's version from a thread, as soon as something answers there.

    Returns what is set then.
    """
    is_told = threading.Event()
    words = f"tfdist: {config.task} has TensorFlow {version}\n".encode()
    chief = config.cluster.address(config.cluster.chief_task)

    def tell() -> None:
        while not _is_told(chief, words):
            time.sleep(_AGAIN_S)
        is_told.set()

    threading.Thread(target=tell, name="tfdist-introduction", daemon=True).start()
    return is_told


class Introductions:
    """What the tasks of a job have told its chief of themselves."""

    def __init__(self, config: TaskConfig, *, version: str) -> None:
        self._config = config
        self._version = version
        self._versions: dict[Task, str] = {}
        self._seen_s: dict[Task, float] = {}

    @contextlib.contextmanager
    def heard_at(self, listener: socket.socket) -> Iterator[None]:
        """Hears all who connect, until the end of the block."""
        thread = threading.Thread(target=self._hear_all, args=(listener,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which keeps the port
            thread.join()

    def awaits(self, task: Task) -> bool:
        """Whether a task that answers may still say what it is; some never do."""
        since_s = self._seen_s.setdefault(task, time.monotonic())
        return task not in self._versions and time.monotonic() - since_s < _SHY_S

    def require_alike(self) -> None:
        """Raises UsageError for a task that has another version than this process."""
        for task in self._config.cluster.tasks():
            version = self._versions.get(task, self._version)
            if version != self._version:
                raise UsageError(
                    f"{task} ({self._config.cluster.address(task)})",
                    received=f"TensorFlow {version}",
                    expected=f"{self._version}, as {self._config.task} has",
                    fix="install the same version on every machine",
                )

    def _hear_all(self, listener: socket.socket) -> None:
        while True:
            try:
                guest, _ = listener.accept()
            except OSError:
                return
            with guest, contextlib.suppress(OSError):
                self._hear(guest)

    def _hear(self, guest: socket.socket) -> None:
        guest.settimeout(_PATIENCE_S)
        said = b""
        while len(said) < _MOST_BYTES and (more := guest.recv(_MOST_BYTES)):
            said += more
            if found := _WORDS.search(said):
                kind, index, version = (part.decode() for part in found.groups())
                self._versions[Task(kind, int(index))] = version
                guest.sendall(_HEARD)
                return


def _is_told(address: str, words: bytes) -> bool:
    """Whether somebody has heard the words, or a server of gRPC is there and leaves them aside."""
    header = len(words).to_bytes(3) + bytes([_FRAME, 0, 0, 0, 0, 0])
    return serves(address, timeout_s=_PATIENCE_S, frame=header + words)
