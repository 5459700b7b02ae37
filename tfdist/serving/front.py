"""Front: the process that accepts REST and gRPC requests, without TensorFlow.

    python -m tfdist.serving.front SUPERVISOR REST GRPC OPTIONS

The arguments are the supervisor's pid, the descriptor of the listening REST socket, the gRPC
address, and `FrontOptions` as JSON. Standard input is a socket to the supervisor.

The front keeps the bytes of each request until the answer and sends them to a replica. The
supervisor sends the replicas and the served versions as lines of JSON. The front replies with the
replicas that the supervisor should kill. uvicorn serves HTTP, and grpc.aio serves gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import math
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import httptools
import uvicorn
from grpc_health.v1 import health, health_pb2
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tfdist.cluster.address import is_loopback
from tfdist.launch.guardian import die_with
from tfdist.serving import protocol
from tfdist.serving.dispatch import Dispatcher, Outcome, QueueLimits, Ticket
from tfdist.serving.protocol import (
    HTTP_STATUS,
    Code,
    Frame,
    FrameBuffer,
    FrameKind,
    RequestError,
    Target,
)

_LOG = logging.getLogger("tfdist.serve")
_TICK_S = 0.1
_MOST_CONNECTIONS = 4096  # maximum number of open HTTP connections
_HEAD_BYTES = 64 << 10  # maximum size of the head of a request
_HEAD_S = 30.0  # longest wait for the head of a request, before a token is known
_PING_S = 30.0  # silence after which gRPC pings a client that has calls, and time for its answer
_MOST_OF_AN_ERROR = 500  # characters of up to 12 bytes: a gRPC trailer has up to 8 KiB
_TICKET = "tfdist.ticket"  # key of the ticket in the scope of a request
_PREDICTION = "tensorflow.serving.PredictionService"
_GRPC_KINDS = {"Predict": FrameKind.GRPC_PREDICT, "GetModelMetadata": FrameKind.GRPC_METADATA}

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_GAUGES = {
    "waiting": "Requests that wait for a replica",
    "outstanding": "Requests at the replicas",
    "replicas": "Replicas that accept requests",
    "version": "Served version",
}
_COUNTS = {
    "retried": "Requests that were retried after their replica exited",
    "rejected": "Requests that were rejected because the queue was full",
    "expired": "Requests past their deadline",
    "poisonous": "Requests that failed because two replicas exited",
}

Message = MutableMapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrontOptions(QueueLimits):
    """Settings of a front. An empty file name means no file."""

    timeout_s: float = 30.0
    body_bytes: int = 64 << 20
    token: str = ""
    certificate: str = ""
    key: str = ""
    drain_s: float = 30.0


class ReplicaConnection(asyncio.Protocol):
    """Connection to a replica. One write sends all frames of an event-loop iteration."""

    def __init__(self, id: int, dispatcher: Dispatcher) -> None:
        self._id = id
        self._dispatcher = dispatcher
        self._buffer = FrameBuffer()
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._dispatcher.connected(self._id, self.send)

    def send(self, frame: Frame) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(protocol.encode_frame(frame))

    def data_received(self, data: bytes) -> None:
        for frame in self._buffer.feed(data):
            self._dispatcher.received(self._id, frame)

    def connection_lost(self, error: Exception | None) -> None:
        self._dispatcher.lost(self._id)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        self._transport.write(data)


class Metrics:
    """Prometheus metrics of a front: requests by outcome, latencies, batch sizes and queues."""

    def __init__(self, models: Mapping[str, Dispatcher]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tfdist_serving_requests",
            "Answered requests",
            ["via", "model", "code"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "tfdist_serving_request_seconds",
            "Seconds from the request to its answer",
            ["via", "model"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.batches = Histogram(
            "tfdist_serving_batch_requests",
            "Number of requests in the batch of each request",
            ["model"],
            buckets=_BATCHES,
            registry=self.registry,
        )
        self._children: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._models = models
        self.registry.register(self)

    def observe(self, via: str, model: str, code: str, seconds: float) -> None:
        key = (via, model, code)
        if key not in self._children:  # a lookup by labels is slower than an increment
            self._children[key] = (self._requests.labels(*key), self._seconds.labels(via, model))
        requests, times = self._children[key]
        requests.inc()
        times.observe(seconds)

    def collect(self) -> Iterator[Any]:
        """Yield the models' current figures, as a custom collector of Prometheus."""
        for texts, make in ((_GAUGES, GaugeMetricFamily), (_COUNTS, CounterMetricFamily)):
            for key, about in texts.items():
                family = make(f"tfdist_serving_{key}", about, labels=["model"])
                for name, model in self._models.items():
                    family.add_metric([name], model.figures[key])
                yield family


class Front:
    """Front process: the models' dispatchers, and the REST and gRPC handlers."""

    def __init__(
        self, options: FrontOptions, control: asyncio.StreamWriter, *, is_local: bool
    ) -> None:
        self.options = options
        self._checks_host = is_local and not options.token
        self.models: dict[str, Dispatcher] = {}
        self._metrics = Metrics(self.models)
        self.health = health.aio.HealthServicer()
        self._token = Path(options.token).read_text().strip() if options.token else ""
        self._control = control
        self._connected: set[int] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    # The supervisor

    async def follow(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            for name, table in json.loads(line).items():
                if name not in self.models:
                    batches = self._metrics.batches.labels(name)
                    dispatcher = Dispatcher(self.options, time.monotonic, batches.observe)
                    self.models[name] = dispatcher
                self.models[name].update(table)
            known = {id for m in self.models.values() for id in (*m.replicas, *m.draining)}
            self._connected &= known
            for model in self.models.values():
                self._route(model)
            states = health_pb2.HealthCheckResponse
            for service in ("", _PREDICTION):
                state = states.SERVING if self.is_healthy else states.NOT_SERVING
                await self.health.set(service, state)

    def send(self, **message: Any) -> None:
        self._control.write(json.dumps(message).encode() + b"\n")

    def _route(self, model: Dispatcher) -> None:
        """Connect to new replicas. Report drained replicas to the supervisor."""
        for id in model.replicas.keys() - self._connected:
            self._connected.add(id)
            connection = ReplicaConnection(id, model)
            task = asyncio.create_task(self._connect(id, model.replicas[id], connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        for id in model.drained():
            self._connected.discard(id)
            model.draining.discard(id)
            self.send(end=id)

    async def _connect(self, id: int, path: str, connection: ReplicaConnection) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, path)
        except OSError:  # the next tick retries unless the replica has exited
            self._connected.discard(id)

    @property
    def is_healthy(self) -> bool:
        return bool(self.models) and all(model.replicas for model in self.models.values())

    async def tick(self) -> None:
        """Check deadlines, hanging replicas and drained replicas every 0.1 s."""
        while True:
            await asyncio.sleep(_TICK_S)
            for name, model in self.models.items():
                model.expire()
                for id in model.hanging():
                    text = "%s: replica %d: no answer for %g s; retrying its requests"
                    _LOG.warning(text, name, id, self.options.hang_s)
                    self.send(end=id)
                    model.lost(id)
                self._route(model)

    # Requests

    async def ask(
        self,
        kind: FrameKind,
        target: Target,
        payload: bytes,
        timeout_s: float,
        *,
        scope: Message | None = None,
    ) -> bytes:
        """Return a replica's answer to a request, or raise RequestError.

        While an HTTP request waits, its `scope` holds the ticket. `_Connection` answers it
        if the client disconnects. For gRPC, the server cancels this coroutine.
        """
        protocol.version_of(target, self._status(target))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def answer(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        deadline = time.monotonic() + min(timeout_s, self.options.timeout_s)
        ticket = Ticket(
            kind=kind,
            payload=payload,
            deadline=deadline,
            answer=answer,
            version=target.version,
        )
        self.models[target.name].submit(ticket)
        scope = {} if scope is None else scope
        scope[_TICKET] = ticket
        try:
            outcome = await future
        finally:
            ticket.abandoned = True
            del scope[_TICKET]  # idle connections keep their scope
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _status(self, target: Target) -> protocol.ModelStatus | None:
        model = self.models.get(target.name)
        return model.status if model else None

    def _authorize(self, sent: str) -> None:
        wanted = f"Bearer {self._token}"
        is_right = self._token and hmac.compare_digest(sent.encode(), wanted.encode())
        if self.options.token and not is_right:  # also if the token file is empty
            text = "Missing or wrong token: send 'Authorization: Bearer ...'"
            raise RequestError(Code.UNAUTHENTICATED, text)

    # gRPC

    def grpc_service(self) -> grpc.GenericRpcHandler:
        """Return the PredictionService with messages as bytes."""
        # Same wire format as unary_unary, which reads the message before it calls the handler.
        handler = grpc.stream_unary_rpc_method_handler
        methods = {name: handler(self._grpc(kind)) for name, kind in _GRPC_KINDS.items()}
        return grpc.method_handlers_generic_handler(_PREDICTION, methods)

    def _grpc(self, kind: FrameKind) -> Callable[[Any, Any], Awaitable[bytes]]:
        async def handle(_: Any, context: Any) -> bytes:
            start = time.monotonic()
            name, code = "", Code.CANCELLED  # defaults if the client cancels
            try:
                if self.options.token:
                    sent = dict(context.invocation_metadata() or ()).get("authorization", "")
                    self._authorize(str(sent))
                payload = b"" if (read := await context.read()) is grpc.aio.EOF else bytes(read)
                remaining_s = context.time_remaining()
                timeout_s = self.options.timeout_s if remaining_s is None else remaining_s
                target = protocol.parse_model_spec(payload)
                name = target.name if target.name in self.models else ""
                answer = await self.ask(kind, target, payload, timeout_s)
                code = Code.OK
                return answer
            except RequestError as error:
                code = error.code
                await context.abort(grpc.StatusCode[code.name], str(error)[:_MOST_OF_AN_ERROR])
                raise  # abort has raised
            finally:
                self._metrics.observe("grpc", name, code.name, time.monotonic() - start)

        return handle

    # REST

    async def app(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        start = time.monotonic()
        status, kind, target, payload = 200, b"application/json", "", None
        try:
            headers = dict(scope["headers"])
            path = scope["path"]
            if self._checks_host:
                protocol.require_own_name(headers.get(b"host", b"").decode("latin-1"))
            if path == "/" and scope["method"] in ("GET", "HEAD"):
                body = b"{}"
            elif path == "/healthz":
                status, body = (200, b"{}") if self.is_healthy else (503, b"{}")
            else:
                self._authorize(headers.get(b"authorization", b"").decode("latin-1"))
                if path == "/v1/models" and scope["method"] == "GET":
                    body = json.dumps({"models": sorted(self.models)}).encode()
                elif path in ("/metrics", "/monitoring/prometheus/metrics"):
                    kind = b"text/plain; version=0.0.4; charset=utf-8"
                    body = generate_latest(self._metrics.registry)
                else:
                    wanted, what = protocol.parse_path(scope["method"], path)
                    target = wanted.name if wanted.name in self.models else ""
                    payload = await self._body(receive)
                    if what is None:
                        states = protocol.states_of(wanted, self._status(wanted))
                        body = protocol.status_json(states)
                    else:
                        most_s = self.options.timeout_s
                        body = await self.ask(what, wanted, payload, most_s, scope=scope)
        except RequestError as error:
            status, body = HTTP_STATUS.get(error.code, 500), protocol.error_body(error)
        sent = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        if payload is None and scope["method"] == "POST":
            sent.append((b"connection", b"close"))  # the rest of the request is not read
        if status in (429, 503):
            sent.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})
        self._metrics.observe("rest", target, str(status), time.monotonic() - start)

    async def _body(self, receive: Callable[[], Awaitable[Message]]) -> bytes:
        """Return a request's body, or raise RequestError.

        It also reads a body that is too large, because a client reads no answer while it sends.
        """
        parts, size_bytes, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _client_gone()
            more, part = message.get("more_body", False), message.get("body", b"")
            size_bytes += len(part)
            if size_bytes <= self.options.body_bytes:
                parts.append(part)
            else:
                parts.clear()
        if size_bytes > self.options.body_bytes:
            text = f"The request has more than {self.options.body_bytes} bytes"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        return b"".join(parts)


def _client_gone() -> RequestError:
    return RequestError(Code.CANCELLED, "The client disconnected")


class _Parser:
    """httptools' parser that ignores the Upgrade header of a request.

    httptools skips the body of a request with this header. Java's HttpClient sends this header, for
    example. A server may ignore the header (RFC 9110, 7.8).
    """

    def __init__(self, connection: HttpToolsProtocol) -> None:
        self._connection = connection
        self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._without_offer() + data[offer.args[0] :]
                self._begin()
            else:
                return

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self._connection)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn

    def _without_offer(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":  # httptools treats CONNECT as an upgrade
            raise httptools.HttpParserError("CONNECT is not supported")
        lines = [method + b" " + self._connection.url + b" HTTP/" + version]
        headers = self._connection.headers
        lines += [name + b": " + value for name, value in headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class _Connection(HttpToolsProtocol):
    """Connection with a limit on heads, which answers the requests of a client that has left.

    The connection closes if a request's head is too slow or too large. If a client disconnects, its
    requests get an error, and replicas do not compute them any more.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.parser = cast(httptools.HttpRequestParser, _Parser(self))
        self._unanswered = list[Any]()  # uvicorn keeps only the last request
        self._await_head()

    def _await_head(self) -> None:
        self._head_bytes_left: float = _HEAD_BYTES
        self._timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._head_bytes_left -= len(data)
        super().data_received(data)
        if self._head_bytes_left < 0:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._timer.cancel()
        self._await_head()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser reads this request again
        self._timer.cancel()
        self._head_bytes_left = math.inf  # `Front.app` limits the body
        super().on_headers_complete()
        unanswered = [one for one in self._unanswered if not one.response_complete]
        self._unanswered = [*unanswered, self.cycle]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._head_bytes_left = _HEAD_BYTES  # of the next request

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
        for one in self._unanswered:
            one.disconnected = True
            one.message_event.set()
            if _TICKET in one.scope:
                one.scope[_TICKET].answer(_client_gone())


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(front: Front) -> _Http:
    options = front.options
    config = uvicorn.Config(
        front.app,
        http=_Connection,
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
        limit_concurrency=_MOST_CONNECTIONS,
        ssl_certfile=options.certificate or None,
        ssl_keyfile=options.key or None,
    )
    return _Http(config)


async def _grpc_server(front: Front, address: str) -> grpc.aio.Server:
    options = front.options
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", options.body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", int(_PING_S * 1000)),
            ("grpc.http2.ping_timeout_ms", int(_PING_S * 1000)),
        ],
        maximum_concurrent_rpcs=2 * options.requests,
    )
    server.add_generic_rpc_handlers((front.grpc_service(),))
    check = grpc.unary_unary_rpc_method_handler(
        front.health.Check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    # Watch is left out: its streams stay open and count as requests.
    methods = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})
    server.add_generic_rpc_handlers((methods,))
    if options.certificate:
        pair = (Path(options.key).read_bytes(), Path(options.certificate).read_bytes())
        server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    else:
        server.add_insecure_port(address)
    await server.start()
    return server


async def run(options: FrontOptions, rest: socket.socket, grpc_address: str) -> int:
    control = socket.socket(fileno=sys.stdin.fileno())
    reader, writer = await asyncio.open_connection(sock=control, limit=1 << 24)
    front = Front(options, writer, is_local=is_loopback(rest.getsockname()[0]))
    follower = asyncio.create_task(front.follow(reader))
    ticker = asyncio.create_task(front.tick())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    grpc_server = await _grpc_server(front, grpc_address)
    http = _http_server(front)
    serving = asyncio.create_task(http.serve([rest]))
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


def main(argv: Sequence[str]) -> int:
    supervisor, rest, grpc_address, text = argv
    die_with(int(supervisor))
    options = FrontOptions(**json.loads(text))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    loop_factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run(options, socket.socket(fileno=int(rest)), grpc_address))
