"""The supervisor of a service: it holds the sockets, starts front and replicas, and replaces them.

It answers no request itself, so that nothing a client sends can end it. A front that ends finds, as
the next one, its listening socket open and the replicas running. All processes die with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError, opening_port
from tfdist.launch.events import STOP_SIGNALS
from tfdist.launch.report import signal_name
from tfdist.serving.door import Door, address_of, bound, prefer_the_next
from tfdist.serving.front import ClientOptions, FrontOptions
from tfdist.serving.replica import ReplicaOptions, ReplicaOrder
from tfdist.serving.versions import (
    Drain,
    Model,
    Policy,
    Replica,
    StartReplica,
    find_versions,
    name_of,
    require_models,
)

_LOG = logging.getLogger("tfdist.serve")
_MODULES = {"front": "tfdist.serving.front", "replica": "tfdist.serving.replica"}
_SCAN_S = 0.25
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(ClientOptions):
    """What `tfdist.serve` is asked for.

    Attributes:
      directory: of versions, or of models that have versions.
      name: of the model, where the directory has versions; else the one model to serve.
      replicas: processes for each version that is served.
      policy: which versions those are.
      rest_port, grpc_port: 0 for any that is free.
      spares: processes that have loaded TensorFlow and wait for the version they are to serve.
      pin: give each replica cores of its own.
      load_timeout_s: after which a replica that is still loading is ended.
    """

    directory: Path
    name: str | None = None
    replicas: int = 1
    policy: Policy = dataclasses.field(default_factory=Policy)
    spares: int = 1
    host: str = "127.0.0.1"
    rest_port: int = 8501
    grpc_port: int = 8500
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    pin: bool = True
    load_timeout_s: float = 600.0


def cores_of(index: int, *, replicas: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of a replica: a part of all, or one that several share."""
    if replicas >= len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[index::replicas])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ReplicaProcess:
    """A replica's process and what it is reached by."""

    process: subprocess.Popen[bytes]
    model: str
    version: int
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Spare:
    """A replica's process that has no order yet, and the pipe on which it will say how it is."""

    process: subprocess.Popen[bytes]
    status: int


class ServiceSupervisor:
    """Sockets, processes, and the models' state."""

    def __init__(self, options: ServeOptions, *, modules: Mapping[str, str] = _MODULES) -> None:
        """Bind the sockets; `modules` are what front and replica run, for tests."""
        self._options = options
        self._modules = modules
        self._paths = require_models(options.directory, options.name)
        model = Model(replicas_wanted=options.replicas, policy=options.policy)
        self._models = dict.fromkeys(self._paths, model)
        self._rest = _listen(options.host, options.rest_port)
        self._grpc = _reserve(options.host, options.grpc_port)
        self._private = tempfile.mkdtemp(prefix="tfdist-serve-")
        self._ids = 0
        self._replicas: dict[int, _ReplicaProcess] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._spares: list[_Spare] = []
        self._draining: dict[int, str] = {}
        self._starting: set[tuple[str, int, int]] = set()
        self._front: subprocess.Popen[bytes] | None = None
        self._control: asyncio.StreamWriter | None = None
        self._told = b""
        self._stop = asyncio.Event()
        self._door = Door(self._grpc)
        self._announced: dict[str, frozenset[int]] = {}

    @property
    def rest_address(self) -> str:
        """Host and port of REST."""
        return _address(self._rest)

    @property
    def grpc_address(self) -> str:
        """Host and port of gRPC."""
        return _address(self._grpc)

    async def run(self) -> None:
        """Serve until asked to stop; answer what has come, and end all processes."""
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as of nohup
                loop.add_signal_handler(signum, self._stop.set)
        front = asyncio.create_task(self._keep_front())
        scan = asyncio.create_task(self._keep_scanning())
        door = asyncio.create_task(self._door.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([front, scan, door, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in (front, scan, door):
                if task.done():
                    task.result()
            _LOG.info("stopping: requests that have come are answered")
            self._rest.close()
            door.cancel()
            await front
        finally:
            self._end()

    # Front

    async def _keep_front(self) -> None:
        """Start a front whenever there is none."""
        wait_s = _FIRST_WAIT_S
        while not self._stop.is_set():
            start = asyncio.get_running_loop().time()
            code = await self._run_front()
            if self._stop.is_set():
                return
            lived_s = asyncio.get_running_loop().time() - start
            wait_s = (
                _FIRST_WAIT_S if lived_s > _LONGEST_WAIT_S else min(_LONGEST_WAIT_S, wait_s * 2)
            )
            _LOG.warning("front: %s; another one is started", _how(code))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)

    async def _run_front(self) -> int:
        """Run one front until it has ended; return its exit code."""
        ours, theirs = socket.socketpair()
        options = self._front_options(theirs.fileno())
        passed = (self._rest.fileno(), theirs.fileno())
        self._front = _spawn(self._modules["front"], dataclasses.asdict(options), passed)
        theirs.close()
        reader, self._control = await asyncio.open_connection(sock=ours, limit=1 << 24)
        self._told = b""
        self._tell_front()
        stopper = asyncio.create_task(self._stop_front(self._front))
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
        except ConnectionError:
            pass
        self._door.is_front_there.clear()
        code = await asyncio.to_thread(self._front.wait)
        stopper.cancel()
        self._control.close()
        self._control = None
        return code

    async def _stop_front(self, front: subprocess.Popen[bytes]) -> None:
        """Have the front end when the service does; with force if it takes too long."""
        await self._stop.wait()
        front.terminate()
        await asyncio.sleep(self._options.drain_s + 5)
        front.kill()

    def _front_options(self, control: int) -> FrontOptions:
        names = [field.name for field in dataclasses.fields(ClientOptions)]
        shared = {name: getattr(self._options, name) for name in names}
        return FrontOptions(
            rest=self._rest.fileno(),
            control=control,
            supervisor=os.getpid(),
            grpc=self.grpc_address,
            **shared,
        )

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "listening" in message:
            self._door.is_front_there.set()
        for name, told in message.get("policies", {}).items():
            _LOG.info("%s: versions %s", name, told)
            self._set(name, self._models[name].governed(Policy(**told)))
        if (id := message.get("drained")) in self._replicas:
            self._replicas[id].process.kill()  # it has no request left
        if (id := message.get("hung")) in self._replicas:
            self._replicas[id].process.kill()

    def _tell_front(self) -> None:
        """Send the front all that it needs to know, if that has changed."""
        if self._control is None:
            return
        table = {"models": {name: self._table(name) for name in self._models}}
        line = json.dumps(table).encode() + b"\n"
        if line != self._told:
            self._told = line
            self._control.write(line)

    def _table(self, name: str) -> dict[str, Any]:
        model = self._models[name]
        ready = [r for r in model.replicas if r.ready and r.version in model.served]
        return {
            "serving": model.serving,
            "served": sorted(model.served),
            "labels": dict(model.labels),
            "states": [dataclasses.asdict(state) for state in model.states],
            "replicas": [[r.id, self._replicas[r.id].path, r.version] for r in ready],
            "draining": [id for id, of in self._draining.items() if of == name],
        }

    # Models

    async def _keep_scanning(self) -> None:
        """Look for versions four times a second."""
        unread: dict[str, str | None] = {}
        while True:
            for name, path in self._paths.items():
                try:
                    found = find_versions(path)
                except OSError as error:
                    if unread.get(name) != error.strerror:  # it may be so for long
                        _LOG.warning("%s: cannot read %s: %s", name, path, error.strerror)
                    unread[name] = error.strerror
                    continue
                unread.pop(name, None)
                self._set(name, self._models[name].scanned(found))
            await asyncio.sleep(_SCAN_S)

    def _set(self, name: str, model: Model) -> None:
        """Take a model's new state, do what it asks for, and tell the front."""
        for version in model.refused.keys() - self._models[name].refused.keys():
            _LOG.error("%s: version %d is refused: %s", name, version, model.refused[version])
        self._models[name] = model
        for action in model.actions():
            if isinstance(action, Drain):
                self._models[name] = self._models[name].draining(action.id)
                self._draining[action.id] = name
            else:
                self._start_later(name, action)
        before = self._announced.get(name, frozenset())
        for version in sorted(model.served - before):
            age = self._age(name, version) if before else ""
            _LOG.info("%s: version %s is served%s", name, version, age)
        self._announced[name] = model.served
        self._tell_front()

    def _age(self, name: str, version: int) -> str:
        """Return how long ago the checkpoint of an export was whole, where its manifest tells."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((self._directory(name, version) / "manifest.json").read_text())
            return f", {time.time() - manifest['saved_at']:.1f} s after its checkpoint was whole"
        return ""

    def _directory(self, name: str, version: int) -> Path:
        return self._paths[name] / name_of(self._models[name].found[version])

    def _start_later(self, name: str, start: StartReplica) -> None:
        key = (name, start.version, start.index)
        if key in self._starting:
            return
        self._starting.add(key)

        def begin() -> None:
            self._starting.discard(key)
            wanted = self._models[name].actions()
            if any((a.version, a.index) == key[1:] for a in wanted if isinstance(a, StartReplica)):
                try:
                    self._start(name, start)
                except (OSError, TfdistError) as error:  # the next scan tries again
                    _LOG.error("%s: no replica could be started: %s", name, error)

        if start.wait_s:
            asyncio.get_running_loop().call_later(start.wait_s, begin)
        else:
            begin()

    def _start(self, name: str, start: StartReplica) -> None:
        """Have a process load a version: a spare one, where there is one."""
        self._ids += 1
        id, path = self._ids, f"{self._private}/{self._ids}"
        cores = sorted(os.sched_getaffinity(0))
        chosen = cores_of(start.index, replicas=self._options.replicas, cores=cores)
        order = ReplicaOrder(
            directory=str(self._directory(name, start.version)),
            name=name,
            path=path,
            cores=chosen if self._options.pin else (),
            batch_sizes=self._options.batch_sizes,
        )
        spare = self._ordered(order)
        process = spare.process
        kept = _ReplicaProcess(process=process, model=name, version=start.version, path=path)
        self._replicas[id] = kept
        self._models[name] = self._models[name].started(
            Replica(id=id, version=start.version, index=start.index)
        )
        task = asyncio.create_task(self._follow(id, kept, spare.status))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        _LOG.info("%s: replica %d loads version %d (pid %d)", name, id, start.version, process.pid)

    def _ordered(self, order: ReplicaOrder) -> _Spare:
        """Return a process that has been told what to serve; raise OSError."""
        living = [spare for spare in self._spares if spare.process.poll() is None]
        for ended in set(self._spares) - set(living):
            os.close(ended.status)
        spare = living.pop(0) if living else self._spare()
        self._spares = living
        assert spare.process.stdin is not None
        try:
            spare.process.stdin.write(json.dumps(dataclasses.asdict(order)).encode() + b"\n")
            spare.process.stdin.close()
        except OSError:  # it has just ended
            spare.process.kill()
            spare.process.wait()
            os.close(spare.status)
            raise
        return spare

    def _spare(self) -> _Spare:
        """Start a process that loads TensorFlow and waits for its order."""
        status, theirs = os.pipe()
        try:
            options = ReplicaOptions(status=theirs, supervisor=os.getpid())
            replica = self._modules["replica"]
            return _Spare(_spawn(replica, dataclasses.asdict(options), (theirs,)), status)
        finally:
            os.close(theirs)

    async def _follow(self, id: int, kept: _ReplicaProcess, status: int) -> None:
        """Take what a replica says of its loading, and that it has ended, as its pipe has then."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status, "rb")
        )
        with contextlib.closing(transport):
            try:
                async with asyncio.timeout(self._options.load_timeout_s):
                    said = await reader.readline()
                    if said.endswith(b"\n"):
                        self._heard_of(id, kept.model, json.loads(said))
            except TimeoutError:
                kept.process.kill()
            await reader.read()
        await asyncio.to_thread(kept.process.wait)
        self._ended(id)

    def _heard_of(self, id: int, name: str, said: Mapping[str, Any]) -> None:
        model = self._models[name]
        if "failed" in said:
            self._set(name, model.failed(id, said["failed"]))
        else:
            _LOG.info("%s: replica %d is ready", name, id)
            self._set(name, model.loaded(id))
            if len(self._spares) < self._options.spares and not self._stop.is_set():
                try:  # now, as nothing else is being loaded
                    self._spares.append(self._spare())
                except (OSError, TfdistError) as error:  # the next replica is loaded without it
                    _LOG.error("%s: no spare could be started: %s", name, error)

    def _ended(self, id: int) -> None:
        """Take that a replica's process has ended."""
        kept = self._replicas.pop(id)
        Path(kept.path).unlink(missing_ok=True)
        how = _how(kept.process.returncode)
        if self._draining.pop(id, None) is None and not self._stop.is_set():
            _LOG.warning("%s: replica %d %s; it is replaced", kept.model, id, how)
        if not self._stop.is_set():
            self._set(kept.model, self._models[kept.model].ended(id, how))

    def _end(self) -> None:
        """End all processes and close all sockets."""
        self._stop.set()
        processes = [kept.process for kept in self._replicas.values()]
        processes += [spare.process for spare in self._spares]
        for process in [*processes, *([self._front] if self._front else [])]:
            process.kill()
            process.wait()
        self._rest.close()
        self._grpc.close()
        shutil.rmtree(self._private, ignore_errors=True)


def _listen(host: str, port: int) -> socket.socket:
    """Return the listening socket of REST, which fronts share, one after the other."""
    with opening_port("--rest_port", f"{host}:{port}"):
        return socket.create_server((host, port), backlog=2048)


def _reserve(host: str, port: int) -> socket.socket:
    """Return the socket at the port of gRPC to which connections go while no front listens."""
    with opening_port("--grpc_port", f"{host}:{port}"):
        holder = bound(host, port)
    prefer_the_next(holder)
    holder.listen(2048)
    return holder


def _address(of: socket.socket) -> str:
    host, port = address_of(of)
    return f"{host}:{port}"


def _spawn(
    module: str, options: Mapping[str, Any], passed: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a front or a replica, out of reach of the terminal's signals."""
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(options)],
            pass_fds=passed,
            stdin=subprocess.PIPE,
            env=environ,
            process_group=0,
        )
    except OSError as error:
        raise TfdistError(f"serve: cannot start {module}: {error.strerror}") from error


def _how(code: int) -> str:
    """Return how a process has ended, as the end of a sentence."""
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit code {code}"
