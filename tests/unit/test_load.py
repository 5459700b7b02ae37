"""The load generator counts what it should: answers, failures, and time from when one was due."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

from benchmarks import load

INPUTS = {"x": {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}, {"size": "2"}]}}}
METADATA = {
    "metadata": {"signature_def": {"signature_def": {"serving_default": {"inputs": INPUTS}}}}
}
MODEL = "http://127.0.0.1:9/v1/models/m"
SHORT = ["--json", "--seconds", "0.5", "--warm_up_s", "0", "--connections", "2"]


class Handler(BaseHTTPRequestHandler):
    """Answers after `delay_s`; where `picky` each tenth with 429, and the fifth not at all.

    It notes in `at_once` how many requests were under way whenever one came.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    delay_s = 0.0
    picky = False
    bodies: list[bytes] = []  # noqa: RUF012
    numbers = itertools.count(1)
    under_way: set[int] = set()  # noqa: RUF012
    at_once: list[int] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._send(200, json.dumps(METADATA).encode())

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        number = next(self.numbers)  # of its own, whatever other threads do
        self.under_way.add(number)
        self.at_once.append(len(self.under_way))
        threading.Event().wait(self.delay_s)
        self.under_way.discard(number)
        if self.picky and number == 5:
            self.close_connection = True
        else:
            self._send(429 if self.picky and number % 10 == 0 else 200, b"{}")

    def _send(self, status: int, body: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # who has given it up
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url():
    Handler.delay_s, Handler.picky = 0.0, False
    Handler.numbers = itertools.count(1)
    for seen in (Handler.bodies, Handler.under_way, Handler.at_once):
        seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/models/m"
        server.shutdown()
        thread.join()


def measured(url: str, **options: Any) -> load.Measured:
    return asyncio.run(load.run(load.Load(url=url, body=b"{}", warm_up_s=0.0, **options)))


def test_a_closed_loop_has_as_many_requests_under_way_as_connections(url):
    Handler.delay_s = 0.05
    found = measured(url, connections=2, seconds=0.5).summary()
    assert found["failed"] == {}
    assert max(Handler.at_once) == 2
    assert 2 <= found["requests"] <= 2 * 0.5 / 0.05 + 2
    assert found["ms"]["max"] >= found["ms"]["p99"] >= found["ms"]["p50"] >= 50


def test_an_open_loop_counts_from_when_a_request_was_due(url):
    Handler.delay_s = 0.1
    found = measured(url, connections=1, seconds=0.2, rate=50)
    assert len(found.latencies_s) == 10
    # One connection makes 10 a second: the last of 10 was due at 0.2 s and is answered after 1.
    assert max(found.latencies_s) > 0.7


def test_a_server_that_never_answers_is_a_failure(url, monkeypatch):
    Handler.delay_s = 1.0
    monkeypatch.setattr(load, "_CALL_S", 0.2)
    found = measured(url, connections=1, seconds=0.3, tries=3).summary()
    assert (found["requests"], set(found["failed"])) == (0, {"TimeoutError"})


def test_failures_are_counted_by_what_they_are(url, capsys):
    Handler.picky = True
    assert load.main([url, *SHORT, "--tries", "2"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"].keys() == {"429"}, "sent again where its connection broke"
    assert Handler.bodies[0] == b'{"instances": [[0.5, 0.5]]}', "made from the signature"


def test_load_by_grpc(tmp_path, capsys):
    came: list[bytes] = []
    numbers = itertools.count(1)

    def predict(request: bytes, context: grpc.ServicerContext) -> bytes:
        came.append(request)
        if next(numbers) % 10 == 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return b""

    _, service, method = load.PREDICT.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(predict)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "body").write_bytes(b"request")
    words = [MODEL, "--grpc", f"127.0.0.1:{port}", "--body", f"{tmp_path}/body", *SHORT]
    assert load.main(words) == 1
    server.stop(None).wait()
    found = json.loads(capsys.readouterr().out)
    failed = found["failed"].pop("RESOURCE_EXHAUSTED")
    assert (found["failed"], set(came)) == ({}, {b"request"})
    assert found["requests"] + failed == len(came)
    assert failed == len(came) // 10 > 0


def test_nobody_there_and_what_is_no_server_of_http_is_one_line(capsys):
    """As the port of gRPC, taken for that of REST."""
    assert load.main([MODEL]) == 1
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"\0\0\x12\x04 no line of HTTP\n\n")

        done = pool.submit(answer)
        port = listener.getsockname()[1]
        assert load.main([f"http://127.0.0.1:{port}/v1/models/m"]) == 1
        done.result()
    nobody, _ = capsys.readouterr().err.splitlines()
    assert "Connection refused" in nobody


def test_percentiles():
    ordered = [float(number) for number in range(1, 101)]
    found = [load.percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)]
    assert (found, load.percentile([7.0], 0.5)) == ([50, 90, 99, 100], 7.0)
