"""The front: the process that clients talk to, by REST and gRPC, without TensorFlow.

    python -m tfdist.serving.front OPTIONS_AS_JSON

It keeps the bytes of each request until they are answered, and gives them to replicas. Which there
are, and which version is served, its supervisor tells it, in lines of JSON on a socket; it tells
the supervisor which replicas are drained and which hang. uvicorn serves HTTP, grpc.aio gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, cast

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfdist.launch.guardian import die_with
from tfdist.serving import protocol
from tfdist.serving.dispatch import Dispatcher, Outcome, QueueLimits, Ticket
from tfdist.serving.metrics import Metrics
from tfdist.serving.protocol import (
    HTTP_STATUS,
    Code,
    Frame,
    FrameBuffer,
    Kind,
    RequestError,
    Target,
    VersionState,
)
from tfdist.serving.versions import policies_of

_LOG = logging.getLogger("tfdist.serve")
_TICK_S = 0.1
_PREDICTION = "tensorflow.serving.PredictionService"
_MODEL = "tensorflow.serving.ModelService"
_GRPC_KINDS = {
    "Predict": Kind.GRPC_PREDICT,
    "Classify": Kind.GRPC_CLASSIFY,
    "Regress": Kind.GRPC_REGRESS,
    "GetModelMetadata": Kind.GRPC_METADATA,
}
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}

_PAGE = (Path(__file__).parent / "page.html").read_bytes()

Message = MutableMapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """What a service asks of its clients, and gives them.

    Attributes:
      timeout_s: after which a request is answered with an error; a client may ask for less.
      body_bytes: most that a request may have.
      silence_s: how long a client may take over the head, and over the body, of a request.
      connections: of HTTP, at a time.
      token: file with the secret that clients send; empty for none.
      certificate, key: files of TLS; empty for none.
      access_log: file to which a line goes for each request; empty for none.
      drain_s: how long requests may take after SIGTERM.
    """

    limits: QueueLimits = dataclasses.field(default_factory=QueueLimits)
    timeout_s: float = 30.0
    body_bytes: int = 64 << 20
    silence_s: float = 30.0
    connections: int = 4096
    token: str = ""
    certificate: str = ""
    key: str = ""
    access_log: str = ""
    drain_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrontOptions(ClientOptions):
    """What a front is told.

    Attributes:
      rest: descriptor of the listening socket, which the supervisor holds too.
      control: descriptor of the socket to the supervisor.
      supervisor: pid of the process with which this one ends.
      grpc: address to listen at; the supervisor holds the port.
    """

    rest: int
    control: int
    supervisor: int
    grpc: str


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelRoute:
    """A model as the supervisor has told, and its requests.

    Attributes:
      serving: the version for requests that name none.
      served: all versions that get requests.
      replicas: those that are to get requests: the path at which they listen, and the version.
      draining: those that are to end once they have no request.
      dispatchers: of the versions that are served, or whose replicas are draining.
    """

    serving: int | None = None
    served: frozenset[int] = frozenset()
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    states: list[VersionState] = dataclasses.field(default_factory=list)
    replicas: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    draining: set[int] = dataclasses.field(default_factory=set)
    dispatchers: dict[int, Dispatcher] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    batches: Counter[int] = dataclasses.field(default_factory=Counter)

    def take(self, told: Mapping[str, Any], limits: QueueLimits) -> None:
        """Take what the supervisor tells of the model."""
        self.serving, self.served = told["serving"], frozenset(told["served"])
        self.labels = dict(told["labels"])
        self.states = [VersionState(**state) for state in told["states"]]
        self.replicas = {id: (path, version) for id, path, version in told["replicas"]}
        self.draining = set(told["draining"])
        for version in self.served - self.dispatchers.keys():
            self.dispatchers[version] = Dispatcher(
                limits, time.monotonic, counts=self.counts, batches=self.batches
            )

    def route(self) -> set[int]:
        """Give requests to the replicas alone; return the connected others that have none left.

        What waits for a version that is served no more is answered by it, while it has replicas
        that take requests.
        """
        idle: set[int] = set()
        for version, one in list(self.dispatchers.items()):
            if version in self.served:
                idle.update(one.route(self.replicas))
                continue
            if not one.replicas and self.serving is not None:
                one.move_to(self.dispatchers[self.serving])
            if not one.waiting:
                idle.update(one.route(()))
                if not one.has_links:
                    del self.dispatchers[version]
        return idle

    def is_connected(self, id: int) -> bool:
        """Return whether a replica is connected."""
        return any(one.has(id) for one in self.dispatchers.values())


class ReplicaConnection(asyncio.Protocol):
    """The socket to a replica; frames of one turn of the loop are one write."""

    def __init__(self, id: int, version: int, dispatcher: Dispatcher) -> None:
        self._id = id
        self._version = version
        self._dispatcher = dispatcher
        self._buffer = FrameBuffer()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Offer the replica to the dispatcher."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio
        self._dispatcher.connected(self._id, self, version=self._version)

    def send(self, frame: Frame) -> None:
        """Send a frame with the others of this turn."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(protocol.encode_frame(frame))

    def data_received(self, data: bytes) -> None:
        """Hand on the answers."""
        for frame in self._buffer.feed(data):
            self._dispatcher.received(self._id, frame)

    def connection_lost(self, error: Exception | None) -> None:
        """Have what the replica had tried again."""
        self._dispatcher.lost(self._id)

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is not None:
            self._transport.write(data)


class Front:
    """Models, their dispatchers, and the two protocols over them."""

    def __init__(self, options: FrontOptions, *, token: str = "") -> None:
        self.options = options
        self.models: dict[str, ModelRoute] = {}
        self.metrics = Metrics(self.models)
        self.health = health.aio.HealthServicer()
        self._token = token
        self._control: asyncio.StreamWriter | None = None
        self._connections: dict[int, ReplicaConnection] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._reading_bytes = 0
        self._access = _access_logger(options.access_log)

    # The supervisor

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what the supervisor says until it has ended."""
        self._control = writer
        while line := await reader.readline():
            await self._take(json.loads(line))

    def tell(self, **message: Any) -> None:
        """Say something to the supervisor."""
        if self._control is not None:
            self._control.write(json.dumps(message).encode() + b"\n")

    async def _take(self, table: Mapping[str, Any]) -> None:
        for name, told in table["models"].items():
            self.models.setdefault(name, ModelRoute()).take(told, self.options.limits)
        known = {id for m in self.models.values() for id in (*m.replicas, *m.draining)}
        self._connections = {id: c for id, c in self._connections.items() if id in known}
        for model in self.models.values():
            self._settle(model)
        await self._tell_health()

    def _settle(self, model: ModelRoute) -> None:
        """Connect to replicas; give requests to them alone; say which others have none left."""
        for id in model.replicas.keys() - self._connections.keys():
            self._connect(model, id)
        idle = model.route()
        for id in model.draining:
            if id in idle or not model.is_connected(id):
                if connection := self._connections.pop(id, None):
                    connection.close()
                model.draining = model.draining - {id}
                self.tell(drained=id)

    def _connect(self, model: ModelRoute, id: int) -> None:
        path, version = model.replicas[id]
        connection = ReplicaConnection(id, version, model.dispatchers[version])
        self._connections[id] = connection
        loop = asyncio.get_running_loop()

        async def connect() -> None:
            try:
                await loop.create_unix_connection(lambda: connection, path)
            except OSError:  # it has ended, or the next tick tries again
                self._connections.pop(id, None)

        task = loop.create_task(connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self.is_healthy else status.NOT_SERVING
        for service in ("", _PREDICTION, _MODEL):
            await self.health.set(service, now)

    @property
    def is_healthy(self) -> bool:
        """Whether there is a model, and each has a version that is served."""
        served = [model.serving is not None for model in self.models.values()]
        return bool(served) and all(served)

    async def tick(self) -> None:
        """Look every tenth of a second at deadlines, hanging replicas and drained ones."""
        while True:
            await asyncio.sleep(_TICK_S)
            for name, model in self.models.items():
                for dispatcher in model.dispatchers.values():
                    dispatcher.expire()
                    self._end_hanging(name, dispatcher)
                self._settle(model)

    def _end_hanging(self, name: str, dispatcher: Dispatcher) -> None:
        for id in dispatcher.hanging():
            _LOG.warning("%s: replica %d hangs; its requests go to others", name, id)
            self.tell(hung=id)
            dispatcher.lost(id)
            self._connections[id].close()

    # Requests

    async def ask(self, kind: Kind, target: Target, payload: bytes, timeout_s: float) -> bytes:
        """Return a replica's answer to a request; raise RequestError."""
        target = protocol.unlabelled(target, self.models)
        version = protocol.version_of(target, self.models)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def answer(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        deadline = time.monotonic() + min(timeout_s, self.options.timeout_s)
        ticket = Ticket(
            kind=kind, payload=payload, deadline=deadline, answer=answer, version=target.version
        )
        self.models[target.name].dispatchers[version].submit(ticket)
        try:
            outcome = await future
        finally:
            ticket.abandoned = True
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _states(self, target: Target) -> list[VersionState]:
        return protocol.states_of(protocol.unlabelled(target, self.models), self.models)

    def _authorize(self, sent: str) -> None:
        wanted = f"Bearer {self._token}"
        if self._token and not hmac.compare_digest(sent.encode(), wanted.encode()):
            raise RequestError(Code.UNAUTHENTICATED, "Send the token: 'Authorization: Bearer ...'")

    # gRPC

    def grpc_handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the services; messages stay bytes."""
        ask = {name: functools.partial(self.ask, kind) for name, kind in _GRPC_KINDS.items()}
        told = {"GetModelStatus": self._grpc_status, "HandleReloadConfigRequest": self._grpc_reload}
        make, unary = grpc.method_handlers_generic_handler, grpc.unary_unary_rpc_method_handler
        return [
            make(service, {name: unary(self._grpc(method)) for name, method in methods.items()})
            for service, methods in ((_PREDICTION, ask), (_MODEL, told))
        ]

    async def _grpc_status(self, target: Target, payload: bytes, timeout_s: float) -> bytes:
        return protocol.status_message(self._states(target))

    async def _grpc_reload(self, target: Target, payload: bytes, timeout_s: float) -> bytes:
        """Have the supervisor take policies and labels; the versions follow."""
        policies = policies_of(protocol.parse_reload(payload))
        for name in policies:
            if name not in self.models:
                raise Target(name=name).not_found()
        self.tell(policies={name: dataclasses.asdict(one) for name, one in policies.items()})
        return b""  # a response without an error

    def _grpc(
        self, method: Callable[[Target, bytes, float], Awaitable[bytes]]
    ) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """Return the handler that answers with the method's bytes, or with its error."""
        is_of_all = method == self._grpc_reload

        async def handle(payload: bytes, context: Any) -> bytes:
            start = time.monotonic()
            name, code = "", Code.CANCELLED  # by the client, unless it is answered
            try:
                if self._token:
                    sent = dict(context.invocation_metadata() or ()).get("authorization", "")
                    self._authorize(str(sent))
                remaining_s = context.time_remaining()
                timeout_s = self.options.timeout_s if remaining_s is None else remaining_s
                target = Target(name="") if is_of_all else protocol.parse_model_spec(payload)
                name = target.name if target.name in self.models else ""
                answer = await method(target, payload, timeout_s)
                code = Code.OK
                return answer
            except RequestError as error:
                code = error.code
                await context.abort(_GRPC_CODES[int(code)], str(error))
                raise  # abort has raised
            finally:
                self._record("grpc", name, code.name, start, len(payload))

        return handle

    # REST

    async def app(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer a request, as an ASGI application."""
        start = time.monotonic()
        status, kind, target, payload = 200, b"application/json", "", None
        try:
            headers = dict(scope["headers"])
            path = scope["path"]
            if path == "/" and scope["method"] in ("GET", "HEAD"):
                kind, body = b"text/html; charset=utf-8", _PAGE
            elif path == "/healthz":
                status, body = (200, b"{}") if self.is_healthy else (503, b"{}")
            else:
                self._authorize(headers.get(b"authorization", b"").decode("latin-1"))
                if path in ("/metrics", "/monitoring/prometheus/metrics"):
                    kind, body = b"text/plain; version=0.0.4; charset=utf-8", self.metrics.text()
                else:
                    wanted, what = protocol.parse_path(scope["method"], path)
                    target = wanted.name if wanted.name in self.models else ""
                    payload = await self._body(headers, receive)
                    body = await self._rest(wanted, what, payload)
        except RequestError as error:
            status, body = HTTP_STATUS.get(error.code, 500), protocol.error_body(error)
        except Exception as error:  # of ours; the client is told in the protocol's form
            _LOG.exception("%s %s", scope["method"], scope["path"])
            status, body = 500, protocol.error_body(RequestError(Code.INTERNAL, repr(error)))
        sent = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        if payload is None and scope["method"] == "POST":
            sent.append((b"connection", b"close"))  # the rest of the request is not read
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})
        self._record("rest", target, str(status), start, len(payload or b""))

    async def _rest(self, target: Target, kind: Kind | None, payload: bytes) -> bytes:
        if kind is None:
            return json.dumps(protocol.status_json(self._states(target)), indent=1).encode()
        return await self.ask(kind, target, payload, self.options.timeout_s)

    async def _body(
        self, headers: Mapping[bytes, bytes], receive: Callable[[], Awaitable[Message]]
    ) -> bytes:
        """Return the body of a request, which is bounded, as are all that are being read."""
        told = headers.get(b"content-length", b"0")
        if int(told) > self.options.body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size_bytes = 0
        try:
            async with asyncio.timeout(self.options.silence_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(Code.CANCELLED, "The client has gone")
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size_bytes += len(parts[-1])
                    self._reading_bytes += len(parts[-1])
                    if size_bytes > self.options.body_bytes:
                        raise self._too_large()
                    if self._reading_bytes > self.options.limits.size_bytes:
                        message_ = "Too many requests are being read, try again later"
                        raise RequestError(Code.RESOURCE_EXHAUSTED, message_)
        except TimeoutError:
            message_ = f"The request did not come within {self.options.silence_s:g} s"
            raise RequestError(Code.DEADLINE_EXCEEDED, message_) from None
        finally:
            self._reading_bytes -= size_bytes
        return b"".join(parts) if len(parts) > 1 else parts[0]

    def _too_large(self) -> RequestError:
        message = f"The request has more than {self.options.body_bytes} bytes"
        return RequestError(Code.INVALID_ARGUMENT, message)

    def _record(self, via: str, model: str, code: str, start: float, size_bytes: int) -> None:
        seconds = time.monotonic() - start
        self.metrics.observe(via=via, model=model, code=code, seconds=seconds)
        if self._access is not None:
            entry = {"via": via, "model": model, "code": code, "bytes": size_bytes}
            stamp = {"time": round(time.time(), 3), "ms": round(seconds * 1e3, 2)}
            self._access.info(json.dumps(stamp | entry))


def _access_logger(path: str) -> logging.Logger | None:
    if not path:
        return None
    logger = logging.getLogger("tfdist.serve.access")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(
        logging.StreamHandler(sys.stdout) if path == "-" else logging.FileHandler(path)
    )
    return logger


def _quick_heads(silence_s: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's connection, closed when a client takes too long over the head of a request.

    uvicorn itself waits without end for the first request of a connection.
    """

    class Connection(HttpToolsProtocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._stop()
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(silence_s, self.transport.abort)

        def _stop(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Connection


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the front."""
        yield


def _http_server(front: Front) -> _Http:
    options = front.options
    config = uvicorn.Config(
        front.app,
        http=_quick_heads(options.silence_s),
        loop="none",
        interface="asgi3",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(options.drain_s) or 1,
        limit_concurrency=options.connections,
        ssl_certfile=options.certificate or None,
        ssl_keyfile=options.key or None,
    )
    return _Http(config)


async def _grpc_server(front: Front) -> grpc.aio.Server:
    options = front.options
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", options.body_bytes),
            ("grpc.max_send_message_length", -1),
        ],
        maximum_concurrent_rpcs=2 * options.limits.requests,
    )
    server.add_generic_rpc_handlers(tuple(front.grpc_handlers()))
    health_pb2_grpc.add_HealthServicer_to_server(front.health, server)
    if options.certificate:
        pair = (Path(options.key).read_bytes(), Path(options.certificate).read_bytes())
        server.add_secure_port(options.grpc, grpc.ssl_server_credentials([pair]))
    else:
        server.add_insecure_port(options.grpc)
    await server.start()
    return server


async def run(options: FrontOptions) -> int:
    """Serve until SIGTERM, then answer what has come."""
    token = Path(options.token).read_text().strip() if options.token else ""
    front = Front(options, token=token)
    control = socket.socket(fileno=options.control)
    reader, writer = await asyncio.open_connection(sock=control, limit=1 << 24)
    follower = asyncio.create_task(front.follow(reader, writer))
    ticker = asyncio.create_task(front.tick())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    grpc_server = await _grpc_server(front)
    http = _http_server(front)
    serving = asyncio.create_task(http.serve([socket.socket(fileno=options.rest)]))
    front.tell(listening=True)
    await asyncio.wait(
        [asyncio.create_task(stop.wait()), follower, ticker, serving],
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in (follower, ticker):
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error
    http.should_exit = True
    await asyncio.gather(grpc_server.stop(options.drain_s), serving)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run a front; return its exit code."""
    (text,) = sys.argv[1:] if argv is None else argv
    told = json.loads(text)
    options = FrontOptions(**{**told, "limits": QueueLimits(**told["limits"])})
    die_with(options.supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the supervisor sends SIGTERM
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    loop_factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
