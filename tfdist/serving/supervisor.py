"""Supervisor of a service: holds the sockets, and starts and replaces the front and the replicas.

The supervisor answers no requests, so no request can crash it. If a front exits, the next front
uses the same listening socket and the same replicas. All processes die with the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, opening_port
from tfdist.files import one_line_errors
from tfdist.launch.events import STOP_SIGNALS, signal_name
from tfdist.launch.guardian import bootstrap_command
from tfdist.serving.front import FrontOptions
from tfdist.serving.model_versions import (
    Model,
    Replica,
    directory_name,
    find_versions,
    require_models,
)

_LOG = logging.getLogger("tfdist.serve")
_MODULES = {"front": "tfdist.serving.front", "replica": "tfdist.serving.replica"}
_SCAN_S = 0.25
_LOAD_S = 600.0  # longest time to load a version before the replica is killed
_PAUSE_S = 0.1  # wait before the supervisor replaces an exited front
_END_S = 5.0  # time for a front to exit, in addition to `drain_s`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(FrontOptions):
    """Settings of a service, from the flags of ``tfdist.serve``."""

    directory: Path
    name: str | None = None
    replicas: int = 1
    host: str = "127.0.0.1"
    rest_port: int = 8501
    grpc_port: int = 8500
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)


class ServiceSupervisor:
    """Supervisor process, with the sockets, the child processes and the models' state."""

    def __init__(self, options: ServeOptions, *, modules: Mapping[str, str] = _MODULES) -> None:
        self._options = options
        self._modules = modules
        self._paths = require_models(options.directory, options.name)
        self._models = dict.fromkeys(self._paths, Model(replicas_wanted=options.replicas))
        with opening_port("--rest_port", f"{options.host}:{options.rest_port}"):
            self._rest = socket.create_server((options.host, options.rest_port), backlog=2048)
        with opening_port("--grpc_port", f"{options.host}:{options.grpc_port}"):
            self._grpc = _reserved(options.host, options.grpc_port)
        self.rest_address = "{}:{}".format(*self._rest.getsockname())
        self.grpc_address = "{}:{}".format(*self._grpc.getsockname())
        self._private = tempfile.mkdtemp(prefix="tfdist-serve-")
        self._ids = itertools.count(1)
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._draining: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._front: subprocess.Popen[bytes] | None = None
        self._control: asyncio.StreamWriter | None = None
        self._sent = b""
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until a stop signal. Then answer the received requests and end all processes."""
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # ignored under nohup
                loop.add_signal_handler(signum, self._stop.set)
        front = asyncio.create_task(self._keep_front())
        scan = asyncio.create_task(self._keep_scanning())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([front, scan, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in (front, scan):
                if task.done():
                    task.result()
            _LOG.info("stopping: answering the received requests")
            self._rest.close()
            if self._front is not None:
                self._front.terminate()
            await asyncio.wait([front], timeout=self._options.drain_s + _END_S)
        finally:
            self._end()

    # Front

    async def _keep_front(self) -> None:
        while not self._stop.is_set():
            try:
                how = _how(await self._run_front())
            except TfdistError as error:  # cannot start a process: retry
                if self._front is None:
                    raise
                how = str(error)
            if not self._stop.is_set():
                _LOG.warning("front: %s; starting a new front", how)
                await asyncio.sleep(_PAUSE_S)

    async def _run_front(self) -> int:
        """Run a front until it exits. Return its exit code."""
        names = [field.name for field in dataclasses.fields(FrontOptions)]
        options = {name: getattr(self._options, name) for name in names}
        text = json.dumps(options)
        rest, (ours, theirs) = self._rest.fileno(), socket.socketpair()
        with contextlib.ExitStack() as not_started:
            not_started.enter_context(ours)
            with theirs:
                words = (f"{rest}", self.grpc_address, text)
                self._front = self._spawn("front", *words, stdin=theirs, pass_fds=(rest,))
            not_started.pop_all()
        reader, self._control = await asyncio.open_connection(sock=ours, limit=1 << 24)
        self._sent = b""
        self._send_state()
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                message = json.loads(line)
                if (id := message["end"]) in self._replicas:  # hanging or drained
                    self._replicas[id].kill()
        code = await asyncio.to_thread(self._front.wait)
        self._control.close()
        self._control = None
        return code

    def _send_state(self) -> None:
        if self._control is None:
            return
        tables = {}
        for name, model in self._models.items():
            ready = [r.id for r in model.replicas if r.ready and r.version == model.served]
            tables[name] = {
                "served": model.served,
                "states": [dataclasses.asdict(state) for state in model.status.states],
                "replicas": [[id, f"{self._private}/{id}"] for id in ready],
                "draining": [id for id, of in self._draining.items() if of == name],
            }
        line = json.dumps(tables).encode() + b"\n"
        if line != self._sent:
            self._sent = line
            self._control.write(line)

    # Models

    async def _keep_scanning(self) -> None:
        unread: set[str] = set()
        while True:
            for name, path in self._paths.items():
                try:
                    found = find_versions(path)
                except OSError as error:
                    if name not in unread:  # warn only once
                        _LOG.warning("%s: cannot read %s: %s; retrying", name, path, error.strerror)
                    unread.add(name)
                else:
                    unread.discard(name)
                    self._set(name, self._models[name].scanned(found))
            await asyncio.sleep(_SCAN_S)

    def _set(self, name: str, model: Model) -> None:
        """Set a model's new state, start and drain replicas, and inform the front."""
        before, self._models[name] = self._models[name], model
        for version in model.refused.keys() - before.refused.keys():
            _LOG.error("%s: version %d rejected: %s", name, version, model.refused[version])
        if model.served not in (None, before.served):
            _LOG.info("%s: serving version %s", name, model.served)
        self._models[name], starts, drains = model.plan(self._ids)
        self._draining.update({id: name for id in drains if id in self._replicas})
        for replica in starts:
            task = asyncio.create_task(self._run_replica(name, replica))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._send_state()

    def _directory(self, name: str, version: int) -> Path:
        return self._paths[name] / directory_name(self._models[name].found[version])

    # Replicas

    async def _run_replica(self, name: str, replica: Replica) -> None:
        """Start a replica after its wait, and follow it until it exits."""
        id = replica.id
        await asyncio.sleep(replica.wait_s)
        model = self._models[name]
        if self._stop.is_set() or model.replica(id) is None or replica.version not in model.found:
            self._models[name] = model.without(id)  # obsolete, or its files are gone
            return
        order: dict[str, Any] = {
            "directory": str(self._directory(name, replica.version)),
            "name": name,
            "path": f"{self._private}/{id}",
            "cores": self._cores_of(replica.index),
            "batch_sizes": self._options.batch_sizes,
        }
        try:
            process = self._start_replica(order)
        except TfdistError as error:
            _LOG.error("%s: cannot start a replica: %s; retrying", name, error)
            self._models[name] = model.without(id)  # the next scan retries
            return
        self._replicas[id] = process
        _LOG.info(
            "%s: replica %d is loading version %d (pid %d)", name, id, replica.version, process.pid
        )
        await self._follow(name, id, process)
        del self._replicas[id]
        Path(order["path"]).unlink(missing_ok=True)
        how = _how(process.returncode)
        if self._draining.pop(id, None) is None and not self._stop.is_set():
            _LOG.warning("%s: replica %d: %s; replacing it", name, id, how)
        self._set(name, self._models[name].ended(id, how))

    def _cores_of(self, index: int) -> list[int]:
        """Return the CPU cores of a replica: an equal part, or one shared core if few exist."""
        cores, replicas = sorted(os.sched_getaffinity(0)), self._options.replicas
        return cores[index::replicas] if replicas < len(cores) else [cores[index % len(cores)]]

    async def _follow(self, name: str, id: int, process: subprocess.Popen[bytes]) -> None:
        """Read a replica's status line after loading, and wait until the replica exits."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        with contextlib.closing(transport):
            try:
                async with asyncio.timeout(_LOAD_S):
                    line = await reader.readline()
                if line.endswith(b"\n"):
                    self._receive_loaded(name, id, json.loads(line))
            except TimeoutError:
                process.kill()
            await reader.read()
        await asyncio.to_thread(process.wait)

    def _receive_loaded(self, name: str, id: int, message: Mapping[str, Any]) -> None:
        model = self._models[name]
        if "failed" in message:
            _LOG.error("%s: replica %d failed to load: %s", name, id, message["failed"])
            self._set(name, model.failed(id, message["failed"]))
            return
        replica = model.replica(id)
        if replica is not None and replica.version != model.served:
            with contextlib.suppress(OSError):  # the next scan reports the error
                found = find_versions(self._paths[name]).get(replica.version)
                if found != model.found.get(replica.version):
                    self._set(name, model.failed(id, "its files changed during loading"))
                    return
        _LOG.info("%s: replica %d is ready", name, id)
        self._set(name, model.loaded(id))

    def _start_replica(self, order: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Return a replica process after sending its order, or raise TfdistError."""
        process = self._spawn("replica", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it just exited
            pipe.write(json.dumps(order).encode() + b"\n")
        return process

    def _spawn(self, role: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        module = self._modules[role]
        with one_line_errors(f"serve: cannot start {module}"):
            return subprocess.Popen(
                bootstrap_command(module, str(os.getpid()), *words),
                env={"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ,
                process_group=0,
                **options,
            )

    def _end(self) -> None:
        self._stop.set()
        fronts = [self._front] if self._front else []
        for process in [*self._replicas.values(), *fronts]:
            process.kill()
            process.wait()
        self._rest.close()
        self._grpc.close()
        shutil.rmtree(self._private, ignore_errors=True)


def _how(code: int) -> str:
    if code < 0:
        return f"killed by {signal_name(-code)}"
    return f"exit code {code}"


def _reserved(host: str, port: int) -> socket.socket:
    """Return a socket that holds the gRPC port and does not listen, or raise OSError.

    gRPC accepts no existing socket, so each front listens there with its own (SO_REUSEPORT).
    """
    with socket.create_server((host, port)) as probe:  # fails if another service has the port
        address = probe.getsockname()
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(address)
    return held
