"""A replica: a process that has one version of a model and answers the frames of a front.

    python -m tfdist.serving.replica SUPERVISOR

SUPERVISOR is the pid of the process with which this one ends. It loads TensorFlow and reads its
order from its standard input, a line of JSON: the version's directory, the model's name, the path
of the socket to listen at, its cores (none for all), and the sizes to which batches are padded. A
spare one waits for that. It loads the version, and writes to its standard output that it is ready
or why it is not. Then it serves one front at a time. A
front that ends takes nothing with it: the replica waits for the next one. What has come while it
computed is its next batch; it waits for nothing to fill one.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.launch.guardian import die_with
from tfdist.serving.protocol import (
    Frame,
    FrameBuffer,
    Kind,
    RequestError,
    encode_error,
    encode_frame,
    reason_of,
)

if TYPE_CHECKING:
    from tfdist.serving.model import ServedModel

_PIECE = 1 << 20
_OBJECTS = 100_000  # that may be added before garbage is looked for


def main() -> int:
    """Serve until the supervisor ends this process; return 1 where the version does not load."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the supervisor ends replicas
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns of what a Session is
    status = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer to the supervisor
    try:
        from tfdist.serving.model import ServedModel  # TensorFlow, before there is an order

        line = sys.stdin.readline()
        if not line:
            return 0  # no order has come, and none will
        order = json.loads(line)
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])  # before the threads of a Session are made
        directory, sizes = Path(order["directory"]), order["batch_sizes"]
        model = ServedModel(directory, order["name"], batch_sizes=sizes)
        model.warm_up(directory)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(order["path"])
        listener.listen()
    except Exception as error:
        print(json.dumps({"failed": reason_of(error)}), file=status)
        return 1
    # What is loaded stays; the lists of one request alone would have the collector look at them.
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
        answers = model.answer([(frame.kind, frame.payload) for frame in batch])
        pairs = zip(batch, answers, strict=True)
        connection.sendall(b"".join(_encoded(frame.id, one, len(batch)) for frame, one in pairs))


def _received(connection: socket.socket, buffer: FrameBuffer, *, wait: bool) -> list[Frame]:
    """Return the frames that have come; with `wait` at least one, or none at the end."""
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
    return encode_frame(Frame(id, Kind.ANSWER, answer, batch))


if __name__ == "__main__":
    sys.exit(main())
