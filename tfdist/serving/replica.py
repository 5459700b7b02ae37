"""Replica: a process that loads one version of a model and answers the frames of a front.

    python -m tfdist.serving.replica SUPERVISOR

SUPERVISOR is the pid of the supervisor. The replica dies with that process. It reads an order from
standard input: a line of JSON with the version's directory, the model's name, the path of the
socket, the CPU cores and the batch sizes for padding. The replica loads the version and writes
`ready` or the reason of a failure to standard output. Then it serves one front at a time. If a
front exits, the replica waits for the next front. A batch has the requests that arrived during the
previous batch. A replica never waits to fill a batch. The replica imports TensorFlow.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.launch.guardian import die_with
from tfdist.serving.protocol import (
    Frame,
    FrameBuffer,
    FrameKind,
    RequestError,
    encode_error,
    encode_frame,
    reason_of,
)

if TYPE_CHECKING:
    from tfdist.serving.model import ServedModel

_PIECE = 1 << 20
_OBJECTS = 100_000  # new objects before Python's garbage collector runs


def main(argv: Sequence[str]) -> int:
    """Serve until the supervisor kills this process. Return 1 if the version fails to load."""
    die_with(int(argv[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: the supervisor ends replicas
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # drop warnings about Sessions
    status = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # send prints of libraries to standard error
    try:
        from tfdist.serving.model import ServedModel  # import TensorFlow before the order arrives

        line = sys.stdin.readline()
        if not line:
            return 0  # the supervisor closed the pipe without an order
        order = json.loads(line)
        os.sched_setaffinity(0, order["cores"])  # before the Session starts threads
        directory, sizes = Path(order["directory"]), order["batch_sizes"]
        model = ServedModel(directory, order["name"], batch_sizes=sizes)
        model.warm_up(directory)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(order["path"])
        listener.listen()
    except Exception as error:
        print(json.dumps({"failed": reason_of(error)}), file=status)
        return 1
    # The model's objects stay alive. Exclude them from garbage collection during requests.
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    print(json.dumps({"ready": True}), file=status)
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                _serve(model, connection, max_batch=max(sizes))
            except ConnectionError:
                continue


def _serve(model: ServedModel, connection: socket.socket, *, max_batch: int) -> None:
    buffer = FrameBuffer()
    waiting: list[Frame] = []
    while True:
        waiting += _received(connection, buffer, wait=not waiting)
        if not waiting:
            return
        batch, waiting = waiting[:max_batch], waiting[max_batch:]
        # Send the answers of each call at once: a replica that is silent for `hang_s` is killed.
        for answers in model.answers([(frame.kind, frame.payload) for frame in batch]):
            frames = (_encoded(batch[at].id, answer, len(batch)) for at, answer in answers)
            connection.sendall(b"".join(frames))


def _received(connection: socket.socket, buffer: FrameBuffer, *, wait: bool) -> list[Frame]:
    """Return the received frames. With `wait`, an empty list means the end of the stream."""
    frames: list[Frame] = []
    while True:
        block = wait and not frames
        try:
            data = connection.recv(_PIECE, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return frames
        if not data:
            return frames
        frames += buffer.feed(data)


def _encoded(id: int, answer: bytes | RequestError, batch: int) -> bytes:
    if isinstance(answer, RequestError):
        return encode_error(id, answer)
    return encode_frame(Frame(id, FrameKind.ANSWER, answer, batch))
