"""``python -m benchmarks.load URL``: load on a model server, by REST or gRPC, and its latencies.

URL is that of a model, http://127.0.0.1:8501/v1/models/NAME, of any server that has TensorFlow
Serving's REST interface; with --grpc the requests go to its gRPC interface. Without --rate each
connection sends when it has its answer (closed loop): it measures what a server can do. With
--rate requests are due at a fixed rate whatever the server does, and the time counts from when one
was due, also where it had to wait for a connection (open loop): it measures what clients see.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import itertools
import json
import ssl
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httptools

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.errors import EXIT_FAILED, EXIT_OK, TfdistError, require, require_int, require_number
from tfdist.files import require_private

PREDICT = "/tensorflow.serving.PredictionService/Predict"
_FREE_LENGTH = 16  # of a dimension that the signature leaves open
_ANSWERED = ("200", "OK")
_BROKEN = ("UNAVAILABLE", "BrokenPipeError", "ConnectionRefusedError", "ConnectionResetError")
_READY_S = 5.0  # for a connection
_CALL_S = 60.0
_AGAIN_AFTER_S = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent.

    Attributes:
      url: of the model, like ``http://127.0.0.1:8501/v1/models/NAME``.
      body: of each request, of gRPC a serialized ``PredictRequest``.
      grpc: ``HOST:PORT`` where requests go by gRPC; empty for REST.
      connections: requests that are under way at a time, at most.
      seconds: that are measured; before them `warm_up_s` that are not.
      rate: requests a second, for an open loop; None for a closed one.
      tries: how often a request is sent, at most, where its connection breaks.
      token: the server's secret.
    """

    url: str
    body: bytes
    grpc: str = ""
    connections: int = 8
    seconds: float = 10.0
    warm_up_s: float = 1.0
    rate: float | None = None
    tries: int = 1
    token: str = ""


@dataclasses.dataclass(kw_only=True, slots=True)
class Measured:
    """What came of it: `latencies_s` of those that were answered, the others by what they were."""

    seconds: float
    latencies_s: list[float] = dataclasses.field(default_factory=list)
    failed: Counter[str] = dataclasses.field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Return rate and percentiles (ms)."""
        ordered = sorted(self.latencies_s)
        found: dict[str, Any] = {
            "requests": len(ordered),
            "per_s": round(len(ordered) / self.seconds, 1),
            "failed": dict(self.failed),
        }
        if ordered:
            shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
            found["ms"] = {n: round(1e3 * percentile(ordered, s), 3) for n, s in shares.items()}
        return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the ordered ones do not exceed."""
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


async def run(  # noqa: C901
    load: Load, stop: Callable[[], bool] = lambda: False
) -> Measured:
    """Send the load, until `stop` says so at the latest; return what came of it.

    Raises OSError where nobody listens at the start.
    """
    start = time.perf_counter()
    first, end = start + load.warm_up_s, start + load.warm_up_s + load.seconds
    measured = Measured(seconds=load.seconds)
    due: Iterator[float] | None = None
    if load.rate is not None:
        due = (start + number / load.rate for number in itertools.count())
    make = _GrpcClient if load.grpc else _RestClient
    clients: list[_RestClient | _GrpcClient] = [make(load) for _ in range(load.connections)]

    async def outcome_of(client: _RestClient | _GrpcClient) -> str:
        """Send a request, again where its connection breaks; return what came of it."""
        for _ in range(load.tries - 1):
            if (outcome := await client.ask()) not in _BROKEN:
                return outcome
            await asyncio.sleep(_AGAIN_AFTER_S)
        return await client.ask()

    async def send_all(client: _RestClient | _GrpcClient) -> None:
        """Send one request after the other until the end."""
        while True:
            sent = time.perf_counter()
            if due is not None:
                sent = next(due)
                await asyncio.sleep(max(0.0, sent - time.perf_counter()))
            if sent >= end or stop():
                return
            outcome = await outcome_of(client)
            if sent < first:
                continue
            if outcome in _ANSWERED:
                measured.latencies_s.append(time.perf_counter() - sent)
            else:
                measured.failed[outcome] += 1

    for client in clients:
        await client.connect()
    try:
        await asyncio.gather(*map(send_all, clients))
    finally:
        for client in clients:
            await client.close()
    return measured


class _RestClient(asyncio.Protocol):
    """A connection that is opened again when it breaks; one request at a time."""

    def __init__(self, load: Load) -> None:
        self._parts = parts = urllib.parse.urlsplit(load.url)
        authorization = f"Authorization: Bearer {load.token}\r\n" if load.token else ""
        head = (
            f"POST {parts.path}:predict HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(load.body)}\r\n\r\n"
        )
        self._request = head.encode() + load.body
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None

    async def connect(self) -> None:
        secure = self._parts.scheme == "https"
        await asyncio.get_running_loop().create_connection(
            lambda: self,
            self._parts.hostname or "",
            self._parts.port or (443 if secure else 80),
            ssl=ssl.create_default_context() if secure else None,
        )

    async def ask(self) -> str:
        """Send the request; return the status of the answer, or by what error there is none."""
        try:
            async with asyncio.timeout(_CALL_S):
                if self._transport is None or self._transport.is_closing():
                    await self.connect()
                assert self._transport is not None
                self._answer = asyncio.get_running_loop().create_future()
                self._transport.write(self._request)
                return f"{await self._answer}"
        except (OSError, httptools.HttpParserError) as error:
            await self.close()  # else the next request has a late answer to this one
            return type(error).__name__

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionResetError("the server has closed the connection"))

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class _GrpcClient:
    """A connection of its own; one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._metadata = [("authorization", f"Bearer {load.token}")] if load.token else None
        options = [("grpc.use_local_subchannel_pool", 1)]  # else all share one connection
        if load.url.startswith("https"):
            secure = grpc.ssl_channel_credentials()
            self._channel = grpc.aio.secure_channel(load.grpc, secure, options)
        else:
            self._channel = grpc.aio.insecure_channel(load.grpc, options)
        self._call = self._channel.unary_unary(PREDICT)

    async def connect(self) -> None:
        try:
            await asyncio.wait_for(self._channel.channel_ready(), _READY_S)
        except TimeoutError:
            raise OSError(f"no server of gRPC at {self._load.grpc}") from None

    async def ask(self) -> str:
        """Send the request; return the status of the answer."""
        try:
            await self._call(self._load.body, timeout=_CALL_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def close(self) -> None:
        await self._channel.close()


def example_body(url: str, *, examples: int = 1, token: str = "") -> bytes:
    """Return a request of so many examples that the signature of a served model asks for.

    Raises TfdistError where the server does not tell.
    """
    inputs = {name: _example(tensor) for name, tensor in _inputs(url, token).items()}
    row = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    return json.dumps({"instances": [row] * examples}).encode()


def example_message(url: str, *, examples: int = 1, token: str = "") -> bytes:
    """Return the same as a serialized ``PredictRequest``. Loads TensorFlow."""
    import tensorflow as tf
    from tensorflow.core.framework import types_pb2
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = url.rpartition("/")[2]
    for name, tensor in _inputs(url, token).items():
        kind = tf.as_dtype(types_pb2.DataType.Value(tensor["dtype"]))
        values = [_example(tensor)] * examples
        request.inputs[name].CopyFrom(tf.make_tensor_proto(values, kind))
    return bytes(request.SerializeToString())


def _inputs(url: str, token: str) -> dict[str, Any]:
    """Return the inputs of a served model, as its metadata have them; raise TfdistError."""
    request = urllib.request.Request(f"{url}/metadata")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            document = json.load(answer)
        signatures = document["metadata"]["signature_def"]["signature_def"]
        return dict(signatures["serving_default"]["inputs"])
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise TfdistError(f"{url}/metadata: {said}") from error


def _example(tensor: Mapping[str, Any]) -> Any:
    """Return one example of an input, without its first dimension."""
    kinds = {"DT_STRING": "", "DT_BOOL": False, "DT_FLOAT": 0.5, "DT_DOUBLE": 0.5, "DT_HALF": 0.5}
    value: Any = kinds.get(tensor["dtype"], 0)
    sizes = [int(dim["size"]) for dim in tensor["tensor_shape"].get("dim", [])]
    for size in reversed(sizes[1:]):
        value = [value] * (size if size >= 0 else _FREE_LENGTH)
    return value


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.load", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("url", metavar="URL", help="http://HOST:PORT/v1/models/NAME")
    add("--grpc", default="", metavar="HOST:PORT", help="send by gRPC, to this address")
    add("--connections", type=int, default=8, help="requests at a time; default 8")
    add("--seconds", type=float, default=10.0, help="to measure; default 10")
    add("--warm_up_s", type=float, default=1.0, help="before that; default 1")
    add("--rate", type=float, metavar="N", help="requests a second, for an open loop")
    add("--tries", type=int, default=1, help="of a request whose connection breaks; default 1")
    add("--examples", type=int, default=1, help="in a request made from the signature; default 1")
    add("--body", type=Path, metavar="FILE", help="the request: JSON, of gRPC a PredictRequest")
    add("--token", type=Path, metavar="FILE", help="has the server's secret")
    add("--json", action="store_true", help="one line of JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 1 if a request failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("benchmarks.load", lambda: _measure(words))


def _measure(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    with reading_file("--token", options.token, expected="a file of one line of text"):
        token = ""
        if options.token:
            with options.token.open("rb") as file:
                require_private(file, where="--token")
                token = file.read().decode().strip()
    with reading_file("--body", options.body, expected="a file"):
        body = options.body.read_bytes() if options.body else b""
    url = options.url.rstrip("/")
    if not options.body:
        make = example_message if options.grpc else example_body
        body = make(url, examples=options.examples, token=token)
    same = ("grpc", "connections", "seconds", "warm_up_s", "rate", "tries")
    load = Load(url=url, body=body, token=token, **{name: getattr(options, name) for name in same})
    try:
        found = asyncio.run(run(load)).summary()
    except OSError as error:
        raise TfdistError(f"{options.grpc or url}: {error.strerror or error}") from error
    print(json.dumps(found) if options.json else _text(found, options))
    return EXIT_FAILED if found["failed"] else EXIT_OK


def _check(options: Any) -> None:
    require(
        _is_of_a_model(options.url),
        "URL",
        f"{options.url!r} is not the address of a model",
        fix="write http://127.0.0.1:8501/v1/models/NAME",
        code="bad-value",
    )
    require_int("--connections", options.connections, least=1)
    require_int("--tries", options.tries, least=1)
    require_int("--examples", options.examples, least=1)
    require_number("--seconds", options.seconds, above=0, unit="seconds")
    require_number("--warm_up_s", options.warm_up_s, least=0, unit="seconds")
    if options.rate is not None:
        require_number("--rate", options.rate, above=0, unit="requests a second")


def _is_of_a_model(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        at_host = parts.port != 0 and parts.hostname
    except ValueError:  # a port that is none
        return False
    return bool(at_host) and parts.scheme in ("http", "https") and "/models/" in parts.path


def _text(found: dict[str, Any], options: Any) -> str:
    loop = f"open loop at {options.rate:g}/s" if options.rate else "closed loop"
    failed = ", ".join(f"{count}x {what}" for what, count in found["failed"].items()) or "none"
    lines = [
        f"{loop}, {options.connections} connections, {options.seconds:g} s",
        f"answered: {found['requests']} ({found['per_s']:g}/s); failed: {failed}",
    ]
    if "ms" in found:
        lines.append("ms: " + ", ".join(f"{name} {ms:g}" for name, ms in found["ms"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
