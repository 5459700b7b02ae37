"""Workers that a ps job's chief is connected to. Each may exit and return.

TensorFlow's own coordinator connects to all declared workers or to no worker. It waits for all of
them at the start, and again after several deaths
(tensorflow/python/distribute/coordinator/cluster_coordinator.py, `WorkerPreemptionHandler`). The
runtime, however, accepts a cluster with absent tasks, and accepts a new cluster at any time. This
module gives the runtime a cluster of only the workers that answer. Seen on TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import remote
from tensorflow.python.training import server_lib

from tfdist import phases
from tfdist.cluster import ClusterSpec, Task, TaskConfig
from tfdist.cluster.address import split_address
from tfdist.cluster.local_only import restricting_server
from tfdist.errors import StartupTimeout, require
from tfdist.strategy.rendezvous import (
    answers,
    at_addresses,
    missing_peers,
    own_versions,
    require_same_versions,
    wait_for_answers,
    wait_for_chief_to_end,
    waited_for,
)

_LOG = logging.getLogger(__name__)
_STEADY_S = 0.5  # time a worker must answer: a killed worker still answers briefly
_UPDATE_TIMEOUT_S = 30.0


class Connections:
    """Workers that the chief of a ps job is connected to. Thread-safe."""

    def __init__(self, cluster: ClusterSpec, *, min_workers: int | None = None) -> None:
        self._cluster = cluster
        self._workers = [task for task in cluster.tasks() if task.type == "worker"]
        self._min_workers = min_workers or len(self._workers)
        require(
            self._min_workers <= len(self._workers),
            "min_workers",
            f"{min_workers} exceeds the {len(self._workers)} workers of the cluster",
            fix="list more workers in TF_CONFIG, or lower min_workers",
            code="too-few-tasks",
        )
        self.num_workers, self.num_ps = len(self._workers), len(cluster.ps)  # as declared
        self.server_devices = [
            f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(self.num_ps)
        ]
        self.connected: frozenset[int] = frozenset()  # indices of workers that get work
        self._updating = threading.Lock()
        self._noting = threading.Lock()  # never held for long
        self._is_stuck = False

    def wait(
        self, config: TaskConfig, *, timeout_s: float, versions: VersionHandshake
    ) -> frozenset[int]:
        """Return the workers that answer: all of them, or at least `min_workers` at the timeout.

        Raises:
          StartupTimeout: A ps or too many workers did not answer. The message names them.
          UsageError: A task has other versions than this task.
        """
        tasks = [task for task in self._cluster.tasks() if task.type in ("ps", "worker")]
        missing = wait_for_answers(config, tasks, timeout_s=timeout_s)
        there = [task for task in tasks if task not in missing]
        versions.require_same(there)
        workers = frozenset(task.index for task in there if task.type == "worker")
        if len(workers) < self._min_workers or any(task.type == "ps" for task in missing):
            raise StartupTimeout(waited_for(config, missing, timeout_s, timeout_s))
        if missing:
            names = at_addresses(self._cluster, missing)
            _LOG.warning("waited %.0f s for %s; starting without them", timeout_s, names)
        return workers

    def missing(self) -> list[Task]:
        """Return the parameter servers that do not answer now."""
        servers = [task for task in self._cluster.tasks() if task.type == "ps"]
        return missing_peers(self._cluster, servers)

    def answers(self, worker: int) -> bool:
        return answers(self._cluster.worker[worker])

    def spec(self, workers: Collection[int]) -> tf.train.ClusterSpec:
        """Return the cluster with only these `workers`. Each keeps its index."""
        cluster = self._cluster
        return tf.train.ClusterSpec(
            {
                "chief": list(cluster.chief),
                "ps": list(cluster.ps),
                "worker": {i: cluster.worker[i] for i in sorted(workers)},
            }
        )

    def connect(self, workers: Collection[int]) -> None:
        """Connect to `workers` and all ps. Call it before creating anything on them."""
        # As in TensorFlow's strategy: at most one call to a worker at a time, no async executors.
        os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
        os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
        filters = server_lib.ClusterDeviceFilters()
        for i in range(len(self._workers)):
            filters.set_device_filters("worker", i, ["/job:ps", "/job:chief"])
        for i in range(len(self._cluster.ps)):
            filters.set_device_filters("ps", i, ["/job:worker", "/job:chief"])
        remote.connect_to_cluster(
            self.spec(workers), job_name="chief", protocol="grpc", cluster_device_filters=filters
        )
        tf_context.ensure_initialized()
        self.connected = frozenset(workers)

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> Connections:
        """Return a strategy's connections. A strategy of TensorFlow is connected to all workers."""
        connections = getattr(strategy, "connections", None)
        if isinstance(connections, cls):
            return connections
        tasks = strategy._cluster_resolver.cluster_spec().as_dict()
        connections = cls(ClusterSpec(**{kind: tuple(at) for kind, at in tasks.items()}))
        connections.connected = frozenset(range(connections.num_workers))
        strategy.extended._allow_run_without_coordinator = True
        strategy.connections = connections
        return connections

    def admit(self, worker: int) -> bool:
        """Connect to a worker that started or restarted. Return False if it does not answer."""
        if self._is_stuck or not self.answers(worker):
            return False
        time.sleep(_STEADY_S)
        if not self.answers(worker):
            return False
        with self._updating:
            there = {i for i in self.connected if answers(self._cluster.worker[i])} | {worker}
            definition = copy.deepcopy(tf_context.get_server_def())
            cluster = self.spec(there).as_cluster_def()
            definition.cluster.CopyFrom(cluster)
            try:
                if self._is_stuck or not self._updated(definition):
                    return False
            except tf.errors.OpError as error:  # a worker died meanwhile: the next call finds it
                _LOG.debug("cannot connect to worker-%d yet: %s", worker, error)
                return False
            with self._noting:
                self.connected = self.connected | {worker}
        return True

    def lost(self, worker: int) -> None:
        with self._noting:
            self.connected = self.connected - {worker}

    def _updated(self, definition: Any) -> bool:
        """Give the runtime the new cluster. Return False if this or an earlier call hangs.

        If a worker dies during the call, TensorFlow waits for it without a timeout.
        """
        done: Future[None] = Future()

        def update() -> None:
            try:
                done.set_result(tf_context.update_server_def(definition))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=update, name="tfdist-update", daemon=True).start()
        try:
            done.result(_UPDATE_TIMEOUT_S)
        except TimeoutError:
            self._is_stuck = True
            _LOG.warning(
                "TensorFlow waits for a worker that died while another worker connected: "
                "no worker can rejoin this attempt; continuing with the connected workers"
            )
        return not self._is_stuck


# The chief of a ps job compares the versions of all tasks. A worker or ps sends a line with its
# versions to the chief's address. Until all tasks have connected, our own listener answers there.
# Later, or if the chief's script creates its own strategy, TensorFlow's server answers. That server
# sends a greeting to any client and closes connections that do not use gRPC.


_RETRY_S = 0.1
_POLL_S = 0.02
_TIMEOUT_S = 1.0
_VERSIONS_TIMEOUT_S = 3.0
_MAX_LINE_BYTES = 1024
_LINE = re.compile(r"tfdist (chief|worker|ps)-(\d+): (.+)\n")


def send_versions(config: TaskConfig) -> threading.Event:
    """Send this task's versions to the chief from a thread, when the chief's address answers.

    Returns an event that is set when the chief has answered.
    """
    received = threading.Event()
    line = f"tfdist {config.task}: {own_versions()}\n".encode()
    chief = split_address(config.cluster.address(config.cluster.chief_task))

    def send() -> None:
        while not received.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(chief, timeout=_TIMEOUT_S) as connection,
            ):
                connection.sendall(line)
                if connection.recv(1):
                    received.set()
            received.wait(_RETRY_S)

    threading.Thread(target=send, name="tfdist-versions", daemon=True).start()
    return received


class VersionHandshake:
    """Versions that the tasks of a job send to its chief."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._found: dict[Task, str] = {}

    @contextlib.contextmanager
    def receiving_at(self, listener: socket.socket) -> Iterator[None]:
        """Receive versions from all clients until the block ends."""
        end = threading.Event()
        thread = threading.Thread(target=self._receive_all, args=(listener, end), daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which holds the port
            thread.join()

    def require_same(self, tasks: Collection[Task]) -> None:
        """Raise UsageError if one of the tasks has other versions than this process.

        Waits at most 3 s for the versions, because some tasks never send them.
        """
        end_s = time.monotonic() + _VERSIONS_TIMEOUT_S
        while not self._found.keys() >= set(tasks) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        for task, versions in dict(self._found).items():
            require_same_versions(
                versions,
                task=f"{task} ({self._config.cluster.address(task)})",
                own=own_versions(),
                own_task=str(self._config.task),
            )

    def _receive_all(self, listener: socket.socket, end: threading.Event) -> None:
        while not end.is_set():
            try:
                client, _ = listener.accept()
            except OSError:  # the end, or no file descriptor is free
                end.wait(_RETRY_S)
                continue
            # One thread per client, so that a slow client does not block the others.
            try:
                threading.Thread(target=self._receive, args=(client,), daemon=True).start()
            except RuntimeError:  # cannot start a thread: the client retries
                client.close()

    def _receive(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(_TIMEOUT_S)
            line = client.makefile("rb").readline(_MAX_LINE_BYTES).decode(errors="replace")
            if not (found := _LINE.fullmatch(line)):
                return
            kind, index, versions = found.groups()
            task = Task(kind, int(index))
            if task in self._config.cluster.tasks():
                self._found[task] = versions
            else:  # answer it too, so that the client stops sending
                _LOG.warning(
                    "ignored the versions that %s sent from %s: the cluster has no such task",
                    *(task, client.getpeername()[0]),
                )
            client.sendall(b"tfdist: heard\n")


# Server loop of a worker or ps task: serve the chief until the chief exits.


def serve(config: TaskConfig, *, timeout_s: float) -> NoReturn:
    """Serve this task's devices to the chief, and exit the process after the chief exits.

    `tf.distribute.Server.join` never returns, so this function polls the chief's port every second.
    The exit code is 0 if the chief connected and exited, 75 if it did not connect within
    `timeout_s`, and 143 on SIGTERM.
    """
    stop = threading.Event()
    # A scheduler sends SIGUSR1 to all tasks. The chief then saves, and its servers must run on.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    keep_freed_memory(os.environ)
    protos = tf.compat.v1.ConfigProto()
    protos.gpu_options.allow_growth = True  # else the server takes all memory of a shared GPU
    if "TF_NUM_INTEROP_THREADS" not in os.environ:
        # Fewer threads than closures in flight can deadlock a server on a small machine.
        protos.inter_op_parallelism_threads = max(len(config.cluster.worker) + 2, 4)
    with restricting_server(config):
        server = tf.distribute.Server(
            tf.train.ClusterSpec(config.cluster.as_dict()),
            job_name=config.task.type,
            task_index=config.task.index,
            protocol="grpc",
            config=protos,
            start=True,
        )
    met = send_versions(config)
    phases.enter("serve")
    # TensorFlow's own handler ignores SIGTERM, so set ours after the server starts.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _LOG.info("%s serves at %s", config.task, config.cluster.address(config.task))
    code = wait_for_chief_to_end(config, stop=stop, timeout_s=timeout_s, met=met)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    del server
    os._exit(code)


# Memory allocator settings of a ps server: freed tensor memory is kept.


# From <malloc.h>. glibc sets the same values after a process has freed a block of 32 MiB. Larger
# blocks are mapped separately, and glibc keeps at most 64 MiB of free memory.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**25


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make glibc reuse freed blocks of up to 32 MiB. Return False if it keeps its settings.

    Until a server has freed a block that large, glibc returns a step's memory to the kernel. At
    the next step the kernel supplies it again, page by page, filled with zeros. The user's own
    malloc settings have priority. Other C libraries have no such option.
    """
    tuned = environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if tuned or set_option is None:
        return False
    large = set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    return bool(large and set_option(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES))
