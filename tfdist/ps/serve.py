"""Server loop of a worker or ps task: version handshake, then serve until the chief is gone."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NoReturn

import tensorflow as tf

from tfdist import phases
from tfdist.cluster import Task, TaskConfig
from tfdist.errors import UsageError
from tfdist.strategy.chief_watch import wait_for_chief_to_end
from tfdist.strategy.rendezvous import serves

_LOG = logging.getLogger(__name__)


def serve(config: TaskConfig, *, timeout_s: float) -> NoReturn:
    """Serve this task's devices to the chief, and end the process when the chief has gone.

    `tf.distribute.Server.join` never returns; so the chief's port is asked once a second. The
    exit code is 0 after a chief that was there, 75 when none came within `timeout_s`, 143 on
    SIGTERM.
    """
    stop = threading.Event()
    # A scheduler's warning goes to all tasks: the chief saves, and needs its servers for that.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    keep_freed_memory(os.environ)
    server = _start(config)
    met = send_version(config, version=tf.__version__)
    phases.enter("serve")
    # TensorFlow's own handler swallows SIGTERM: ours is set once the server is up.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _LOG.info("%s serves at %s", config.task, config.cluster.address(config.task))
    code = wait_for_chief_to_end(config, stop=stop, timeout_s=timeout_s, met=met)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    del server
    os._exit(code)


def _start(config: TaskConfig) -> tf.distribute.Server:
    cluster = config.cluster.as_dict()
    cluster.pop("evaluator", None)
    protos = tf.compat.v1.ConfigProto()
    if "TF_NUM_INTEROP_THREADS" not in os.environ:
        # Fewer threads than closures in flight can deadlock a server on a small machine.
        protos.inter_op_parallelism_threads = max(len(config.cluster.worker) + 2, 4)
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster),
        job_name=config.task.type,
        task_index=config.task.index,
        protocol="grpc",
        config=protos,
        start=True,
    )


# Version handshake of a ps job: each task tells the chief its TensorFlow version.
#
# Two versions may understand each other, or end with an error that names neither, or wait. A task
# tells it to what answers at the chief's address. That is, until its workers and ps are there, a
# listener of ours; afterwards, or in a chief that has made its strategy by itself, a server of
# gRPC, for which the words are in a frame of HTTP/2 that it leaves aside (RFC 9113, section 5.5).


_AGAIN_S = 0.1
_PATIENCE_S = 1.0
_SHY_S = 3.0
_MOST_BYTES = 1024
_FRAME = 0xFA  # a type of frame that HTTP/2 does not have
_HEARD = b"tfdist: heard\n"
_WORDS = re.compile(rb"tfdist: (chief|worker|ps)-(\d+) has TensorFlow (\S+)\n")


def send_version(config: TaskConfig, *, version: str) -> threading.Event:
    """Tell the chief this task's version from a thread, as soon as something answers there.

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


class VersionHandshake:
    """Versions that the tasks of a job have sent to its chief."""

    def __init__(self, config: TaskConfig, *, version: str) -> None:
        self._config = config
        self._version = version
        self._versions: dict[Task, str] = {}
        self._seen_s: dict[Task, float] = {}

    @contextlib.contextmanager
    def receiving_at(self, listener: socket.socket) -> Iterator[None]:
        """Hear all who connect, until the end of the block."""
        thread = threading.Thread(target=self._receive_all, args=(listener,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which keeps the port
            thread.join()

    def awaits(self, task: Task) -> bool:
        """Return whether a task that answers may still say what it is; some never do."""
        since_s = self._seen_s.setdefault(task, time.monotonic())
        return task not in self._versions and time.monotonic() - since_s < _SHY_S

    def require_same_version(self) -> None:
        """Raise UsageError for a task that has another version than this process."""
        for task in self._config.cluster.tasks():
            version = self._versions.get(task, self._version)
            if version != self._version:
                raise UsageError(
                    f"{task} ({self._config.cluster.address(task)})",
                    received=f"TensorFlow {version}",
                    expected=f"{self._version}, as {self._config.task} has",
                    fix="install the same version on every machine",
                )

    def _receive_all(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                self._hear(client)

    def _hear(self, client: socket.socket) -> None:
        client.settimeout(_PATIENCE_S)
        said = b""
        while len(said) < _MOST_BYTES and (more := client.recv(_MOST_BYTES)):
            said += more
            if found := _WORDS.search(said):
                kind, index, version = (part.decode() for part in found.groups())
                self._versions[Task(kind, int(index))] = version
                client.sendall(_HEARD)
                return


def _is_told(address: str, words: bytes) -> bool:
    """Whether somebody has heard the words, or a server of gRPC is there and leaves them aside."""
    header = len(words).to_bytes(3) + bytes([_FRAME, 0, 0, 0, 0, 0])
    return serves(address, timeout_s=_PATIENCE_S, frame=header + words)


# Memory allocator settings of a ps server: freed tensor memory is kept.


# Of <malloc.h>. The values are those to which glibc goes by itself in a process that has freed a
# block of 32 MiB: larger ones are of their own, less than twice as much free memory is kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**25


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let freed blocks of up to 32 MiB serve the next ones; False where that is not for us to say.

    Where a server has freed nothing so large yet, glibc gives the memory of a step's tensors back
    to the kernel and gets it again at the next one, page by page, filled with zeros. A user's own
    settings of glibc's malloc go before these; another C library has none.
    """
    told = environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if told or set_option is None:
        return False
    large = set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    return bool(large and set_option(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES))
