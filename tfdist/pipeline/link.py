"""Link between two neighbouring stages: arrays in both directions over a socket.

One thread sends queued messages and one thread receives in advance, so that a stage computes during
transfers. The schedule, which both ends know, bounds the number of queued messages. The module uses
arrays and does not import TensorFlow.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist import phases
from tfdist.errors import PeerLost

_LOG = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_ERROR = "error"


class StageLink:
    """End of a link: a socket connected to the neighbour with this name."""

    def __init__(self, end: socket.socket, *, name: str) -> None:
        self._end, self._name = end, name
        self.lost = ""  # reason of a failure, or ""
        self._out: queue.SimpleQueue[tuple[str, Sequence[np.ndarray]]] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        end.setblocking(True)
        for work in (self._send_all, self._receive_all):
            threading.Thread(target=work, name=f"tfdist-link-{name}", daemon=True).start()

    def send(self, tag: str, arrays: Sequence[np.ndarray]) -> None:
        """Queue a message. The arrays must not change afterwards."""
        self._out.put((tag, arrays))

    def receive(self, tag: str) -> list[np.ndarray]:
        """Return the arrays of the next message, which must have this tag.

        Raises:
          PeerLost: the neighbour exited, failed, or sent a message with another tag.
        """
        if self.lost:
            raise PeerLost(self.lost)
        phases.set_at_sum(True)  # a task in a wait is not the cause of a hang
        try:
            found, arrays = self._inbox.get()
        finally:
            phases.set_at_sum(False)
        if found == tag:
            return list(arrays)
        if found == _ERROR:
            self.lost = str(arrays)
        else:
            self.lost = f"{self._name} sent {found}, but this stage expects {tag}"
        raise PeerLost(self.lost)

    def fail(self, reason: str) -> None:
        """Send the reason of a failure to the neighbour, after all queued messages."""
        self._out.put((_ERROR, [np.frombuffer(reason.encode(), np.uint8)]))

    def _send_all(self) -> None:
        try:
            while True:
                tag, arrays = self._out.get()
                whole = [np.ascontiguousarray(a).reshape(a.shape) for a in arrays]
                header = json.dumps([tag, [(a.dtype.name, a.shape) for a in whole]]).encode()
                self._end.sendall(_LENGTH.pack(len(header)) + header)
                for array in whole:
                    self._end.sendall(array.reshape(-1).view(np.uint8).data)
        except OSError as error:  # the receiving thread has the neighbour's message
            _LOG.debug("%s: %s", self._name, error)

    def _receive_all(self) -> None:
        try:
            while True:
                tag, arrays = self._message()
                reason = arrays[0].tobytes().decode(errors="replace") if tag == _ERROR else ""
                self._inbox.put((tag, reason or arrays))
                if tag == _ERROR:
                    return
        except (OSError, ValueError, TypeError) as error:
            self._inbox.put((_ERROR, f"lost {self._name}: {error}"))

    def _message(self) -> tuple[str, list[np.ndarray]]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        tag, kinds = json.loads(self._exactly(length))
        arrays = [np.empty(shape, np.dtype(kind)) for kind, shape in kinds]
        for array in arrays:
            self._fill(array.reshape(-1).view(np.uint8).data)
        return tag, arrays

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._end.recv_into(view)
            if not count:
                raise ConnectionError("it closed the connection")
            view = view[count:]
