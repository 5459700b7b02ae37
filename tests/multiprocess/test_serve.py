"""A service of several processes: what is killed, hangs or is broken costs no request.

The replicas have a model that needs no TensorFlow and dies when it is asked to.
"""

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import psutil
import pytest
import uvicorn
from google.protobuf.wrappers_pb2 import BytesValue
from prometheus_client import generate_latest
from uvicorn.server import ServerState

from tests.processes import until
from tfdist.serving import front
from tfdist.serving.protocol import Target
from tfdist.serving.supervisor import ServeOptions, ServiceSupervisor, _reserved

DEADLINE_S = 120.0
PREDICT = "/v1/models/m:predict"
HEAD = "POST /v1/models/m:predict HTTP/1.1\r\n"
OF_M = b"\x0a\x01m"  # a ModelSpec with the name m
RETRY = json.dumps(  # of docs/serving.md
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)
OK = grpc.StatusCode.OK
KEY_AND_CERTIFICATE = Path(__file__).parent / "programs" / "localhost.pem"  # of no other use


@dataclasses.dataclass
class Service:
    """A running service, its addresses, and what it has logged."""

    process: subprocess.Popen[str]
    rest: tuple[str, int]
    grpc: str
    log: Path
    tls: ssl.SSLContext | None = None

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Return the matches of a pattern in the log once there are `count`."""

        def found() -> list[str]:
            assert self.process.poll() is None, self.said()
            matches = re.findall(pattern, self.said())
            return matches if len(matches) >= count else []

        return self.until(found)

    def until(self, true: Callable[[], Any]) -> Any:
        """Return what `true` gives once that is true; fail with the log."""
        return until(true, within_s=DEADLINE_S, why=self.said)

    def connect(self) -> http.client.HTTPConnection:
        if self.tls:
            return http.client.HTTPSConnection(*self.rest, timeout=DEADLINE_S, context=self.tls)
        return http.client.HTTPConnection(*self.rest, timeout=DEADLINE_S)

    def get(self, path: str) -> tuple[int, Any]:
        return self.send("GET", path, None)

    def predict(self, asked: Any, path: str = PREDICT) -> tuple[int, Any]:
        return self.send("POST", path, json.dumps({"instances": asked}))

    def send(
        self, method: str, path: str, body: str | bytes | None, headers: Any = None
    ) -> tuple[int, Any]:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.headers["content-type"]
            return answer.status, json.loads(text) if kind == "application/json" else text.decode()

    def replicas(self) -> list[int]:
        """The pids of the replicas that have been ready."""
        pids = dict(re.findall(r"replica (\d+) is loading version \d+ \(pid (\d+)\)", self.said()))
        return [int(pids[id]) for id in re.findall(r"replica (\d+) is ready", self.said())]


def make_version(directory: Path, version: int, text: str = "") -> None:
    unfinished = directory / f".partial-{version}"
    unfinished.mkdir(parents=True)
    (unfinished / "saved_model.pb").write_text(text)
    unfinished.rename(directory / str(version))


@contextlib.contextmanager
def service(
    directory: Path, *, ended: int = 0, tls: ssl.SSLContext | None = None, **options: Any
) -> Iterator[Service]:
    """Run a service of `directory`/m until the block ends; it ends with exit code `ended`."""
    log = directory / "log"
    program = ("-m", "tests.multiprocess.programs.serving_fakes")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *program, str(directory / "m"), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        assert line, log.read_text()
        rest, by_grpc = line.split()
        host, port = rest.split(":")
        running = Service(process, (host, int(port)), by_grpc, log, tls)
        running.wait_for(r"serving version \d+")
        wait_until_healthy(running)
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == ended, running.said()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until_healthy(running: Service) -> None:
    running.until(lambda: running.get("/healthz")[0] == 200)


def load(
    running: Service, clients: int = 4, send: Any = None
) -> contextlib.AbstractContextManager[Counter[str]]:
    """Send requests all the time; yield the outcomes, of which all must be ok at the end."""

    def work(client: int, outcomes: Counter[str], stop: threading.Event) -> None:
        number = 0
        with contextlib.closing(running.connect()) as connection:
            while not stop.is_set():
                number += 1
                asked = [client, number]
                try:
                    answer = (send or send_once)(connection, json.dumps({"instances": asked}))
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    answer = {"error": repr(error)}
                outcomes["ok" if answer.get("predictions") == asked else str(answer)] += 1

    return all_ok(work, clients)


@contextlib.contextmanager
def all_ok(work: Callable[..., None], clients: int) -> Iterator[Counter[str]]:
    """Have clients work beside the block; yield the outcomes, of which all must be ok."""
    outcomes, stop = Counter[str](), threading.Event()
    threads = [
        threading.Thread(target=work, args=(client, outcomes, stop)) for client in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert set(outcomes) == {"ok"}, outcomes


def send_again(connection: http.client.HTTPConnection, body: str, path: str = PREDICT) -> Any:
    """Return the answer to a request, which is sent once more if its connection breaks."""
    try:
        return send_once(connection, body, path)
    except (ConnectionError, http.client.HTTPException):  # before the answer, or within it
        connection.close()
        return send_once(connection, body, path)


def send_once(
    connection: http.client.HTTPConnection, body: str, path: str = PREDICT, headers: Any = None
) -> Any:
    connection.request("POST", path, body, headers or {})
    return json.loads(connection.getresponse().read())


def wait_for_more(outcomes: Counter[str], more: int = 20) -> None:
    wanted = sum(outcomes.values()) + more
    until(lambda: sum(outcomes.values()) >= wanted, within_s=DEADLINE_S)


def in_field_1(message: bytes) -> bytes:
    """A request whose first field is a message."""
    return BytesValue(value=message).SerializeToString()


def call(channel: grpc.Channel, spec: bytes = OF_M, **options: Any) -> None:
    """Have a request for a model answered, by its own bytes; raise grpc.RpcError."""
    method = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    request, options = in_field_1(spec), {"wait_for_ready": True, **options}
    assert method(request, timeout=DEADLINE_S, **options) == request


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("service")
    make_version(directory / "m", 3)
    (directory / "m" / "3").rename(directory / "m" / "003")  # as TensorFlow Serving takes it too
    options = {"replicas": 2, "body_bytes": 10_000}
    with service(directory, **options) as running:
        yield running


def test_both_protocols_answer(shared):
    status, answer = shared.predict([1, 2])
    assert (status, answer["predictions"], answer["by"][0]) == (200, [1, 2], 3)
    assert shared.predict([1], "/v1/models/m/versions/3:predict")[0] == 200
    assert shared.get("/v1/models") == (200, {"models": ["m"]})
    (version,) = shared.get("/v1/models/m")[1]["model_version_status"]
    assert (version["version"], version["state"]) == ("3", "AVAILABLE")
    body = b"POST \r\nUpgrade: h2c\r\n\r\n"  # no JSON, but not to be changed either
    with socket.create_connection(shared.rest, timeout=DEADLINE_S) as connection:
        head = f"{HEAD}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 400 ")
    with grpc.insecure_channel(shared.grpc) as channel:
        call(channel)
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=DEADLINE_S) == b"\x08\x01"
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.RpcError) as error:  # endless streams would fill the queue
            next(watch(b"", timeout=DEADLINE_S))
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for name in ("x", "ü" * 2000):  # which has 12,000 bytes in a trailer
            with pytest.raises(grpc.RpcError) as error:
                call(channel, in_field_1(name.encode()))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            assert error.value.details() == str(Target(name=name).not_found())[:500]


def of_http(number: int, *headers: str, chunked: bool = False) -> bytes:
    """A request as it is sent: its answer has the number."""
    body = json.dumps({"instances": [number]})
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    body = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n" if chunked else body
    return "\r\n".join([HEAD + "Host: localhost", size, *headers, "", body]).encode()


@pytest.mark.parametrize("upgrade", ["h2c", "TLS/1.0", "websocket"])
def test_an_upgrade_offer_keeps_its_body_in_any_pieces(shared, upgrade):
    offer = ("Connection: Upgrade, HTTP2-Settings", f"uPGRADE: {upgrade}", "X: " + "t" * 2000)
    requests = [of_http(1), of_http(2, *offer), of_http(3, *offer, chunked=True), of_http(4)]
    sent = b"".join(requests)
    for cuts in ([], [len(requests[0]) + 1448], range(1, len(sent), 97)):
        with socket.create_connection(shared.rest, timeout=DEADLINE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start, end in itertools.pairwise([0, *cuts, len(sent)]):
                connection.sendall(sent[start:end])
            answers = b""
            while answers.count(b"}") < len(requests):
                answers += connection.recv(1 << 16) or pytest.fail(f"closed after {answers!r}")
            assert re.findall(rb'"predictions": \[(.)\]', answers) == [b"1", b"2", b"3", b"4"]
    refused = answer_to(shared.rest, b"CONNECT a:1 HTTP/1.1\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "/v1/models/x:predict", "{}", 404, "Servable not found for request: Latest(x)"),
        ("POST", "/v1/models/m/versions/4:predict", "{}", 404, "Specific(m, 4)"),
        ("POST", "/v1/models/m/labels/a:predict", "{}", 400, "Malformed request"),
        ("GET", "/v1/models/x", None, 404, "Could not find any versions of model x"),
        ("PUT", "/v1/models/m:predict", "", 400, "Malformed request: PUT /v1/models/m:predict"),
        pytest.param("POST", PREDICT, "x" * 10_001, 400, "more than 10000 bytes", id="large"),
        pytest.param("POST", PREDICT, "x" * (1 << 24), 400, "more than 10000 bytes", id="larger"),
        ("POST", "/v1/models/m:predict", '{"instances": "fail"}', 400, "failed on purpose"),
    ],
)
def test_errors(shared, method, path, body, status, text):
    found, answer = shared.send(method, path, body)
    assert found == status
    assert text in answer["error"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost:1", "127.0.0.2", "[::1]:1", "a.localhost", "box:1")),
        *((host, 403) for host in ("example.org", "127.0.0.1.example.org:1", "10.0.0.1", "a.b.")),
    ],
)
def test_a_page_of_another_site_can_send_no_request(shared, host, status):
    """As that of a name which resolves to this machine."""
    for path in ("/", "/v1/models"):
        assert shared.send("GET", path, None, {"Host": host})[0] == status


def answer_to(address: tuple[str, int], sent: bytes) -> bytes:
    """All that a server says to some bytes until it closes, after we have closed our side."""
    connection = socket.create_connection(address, timeout=DEADLINE_S)
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # the server may have let go
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return b""


def test_a_large_head_closes_the_connection(shared):
    heads = [b"GET /healthz HTTP/1.1\r\nX: " + b"a" * n + b"\r\n\r\n" for n in (1 << 10, 1 << 20)]
    small, large = (answer_to(shared.rest, head) for head in heads)
    assert (small[:13], large) == (b"HTTP/1.1 200 ", b"")


def test_a_client_without_a_head_is_disconnected(monkeypatch):
    monkeypatch.setattr(front, "_HEAD_S", 0.01)

    async def answers(sent):
        config = uvicorn.Config(None, http=front._Connection, loop="none")
        config.load()
        options = {"config": config, "server_state": ServerState(), "app_state": {}}
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: front._Connection(**options), "127.0.0.1", 0)
        async with server, asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                return await reader.read()
            return b""

    for sent in (b"", b"POST /v1/models/m:predict HT"):
        assert asyncio.run(answers(sent)) == b""


def http2(kind: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def of_http2(text: bytes) -> bytes:
    return bytes([len(text)]) + text


CALL_WITHOUT_MESSAGE = b"".join(
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4),
        http2(
            1,
            b"\x83\x86\x04"  # POST, http, path
            + of_http2(b"/tensorflow.serving.PredictionService/Predict")
            + b"\x01"  # authority
            + of_http2(b"localhost")
            + b"\x0f\x10"  # content-type
            + of_http2(b"application/grpc")
            + b"\x00"
            + of_http2(b"te")
            + of_http2(b"trailers"),
            stream=1,
            flags=4,
        ),
    ]
)


def test_a_grpc_client_that_answers_no_ping_loses_its_call(monkeypatch):
    monkeypatch.setattr(front, "_PING_S", 0.5)

    async def run(host: str, port: int) -> None:
        own = front.Front(front.FrontOptions(), Mock(), is_local=True)
        server = await front._grpc_server(own, f"{host}:{port}")
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(CALL_WITHOUT_MESSAGE)
            while await reader.read(1 << 16):
                pass
            while b'via="grpc"} 1.0' not in generate_latest(own._metrics.registry):
                await asyncio.sleep(0.01)
        writer.close()
        await server.stop(0)

    with contextlib.closing(_reserved("127.0.0.1", 0)) as held:
        asyncio.run(run(*held.getsockname()))


def test_metrics(shared):
    shared.predict([1])
    text = shared.get("/metrics")[1]
    assert re.search(r'tfdist_serving_requests_total\{code="200",model="m",via="rest"\} \d', text)
    assert 'tfdist_serving_version{model="m"} 3.0' in text
    assert call_by_grpc(shared.grpc, version=9) is grpc.StatusCode.NOT_FOUND
    wait_for_metric(shared, 'code="NOT_FOUND",model="m",via="grpc"} ')  # after the answer is sent
    assert 'tfdist_serving_replicas{model="m"} 2.0' in text


def test_no_request_is_lost_with_a_replica(tmp_path):
    make_version(tmp_path / "m", 1)
    with service(tmp_path, replicas=2) as running, load(running) as outcomes:
        for kills in range(1, 4):
            wait_for_more(outcomes)
            os.kill(running.replicas()[-1], signal.SIGKILL)
            running.wait_for(r"replica \d+ is ready", 2 + kills)
            wait_for_more(outcomes)
        assert len(running.wait_for(": killed by SIGKILL; replacing it")) == kills
        status, answer = running.predict("kill")  # whoever has it, and that is tried twice
        assert (status, answer["error"]) == (
            500,
            "2 replicas exited while computing this request",
        )
        running.wait_for(r"replica \d+ is ready", 2 + kills + 2)
        wait_for_more(outcomes)
        assert len(running.wait_for(": killed by SIGKILL")) == kills + 2


def test_a_hanging_replica_is_replaced_and_its_requests_retried(tmp_path):
    make_version(tmp_path / "m", 1)
    with (
        service(tmp_path, replicas=2, hang_s=1.0) as running,
        load(running) as outcomes,
    ):
        wait_for_more(outcomes)
        os.kill(running.replicas()[-1], signal.SIGSTOP)
        running.wait_for("s; retrying its requests")
        running.wait_for(r"replica \d+ is ready", 3)
        wait_for_more(outcomes)


def states_of(running: Service) -> dict[int, tuple[str, str]]:
    """The states of the versions of model m, and why they are not served."""
    return {
        int(one["version"]): (one["state"], one["status"]["error_message"])
        for one in running.get("/v1/models/m")[1]["model_version_status"]
    }


def test_versions_are_added_removed_and_broken_under_load(tmp_path):
    make_version(tmp_path / "m", 1)
    with service(tmp_path, replicas=2) as running, load(running) as outcomes:
        last = 2
        make_version(tmp_path / "m", last)
        running.wait_for(f"m: serving version {last}")
        assert running.predict([1])[1]["by"][0] == last
        status, answer = running.predict([1], f"/v1/models/m/versions/{last - 1}:predict")
        assert (status, answer["error"].endswith(f"Specific(m, {last - 1})")) == (404, True)
        make_version(tmp_path / "m", last + 1, "broken")
        running.wait_for(f"version {last + 1} rejected: broken on purpose")
        available, broken = ("AVAILABLE", ""), ("END", "broken on purpose")
        assert states_of(running) == {last + 1: broken, last: available}
        shutil.rmtree(tmp_path / "m" / str(last))
        running.wait_for(f"m: serving version {last - 1}", 2)
        wait_for_more(outcomes)
        assert running.predict([1])[1]["by"][0] == last - 1


def call_by_grpc(address: str, *, version: int = 0) -> grpc.StatusCode:
    """The code of a call by a connection of its own: gRPC's channels share one, and its errors."""
    spec = OF_M + (bytes([0x12, 2, 8, version]) if version else b"")
    own = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=own) as channel:
        try:
            call(channel, spec)
        except grpc.RpcError as error:
            return error.code()
    return OK


def test_retrying_clients_lose_no_answer_with_the_front(tmp_path):
    make_version(tmp_path / "m", 1)
    with service(tmp_path, replicas=2) as running, contextlib.ExitStack() as clients:
        # Each for itself, so that no request is sent again as the next front is killed.
        loads = [load(running, clients=1, send=send_again) for _ in range(4)]
        outcomes = list(map(clients.enter_context, [*loads, load_by_grpc(running.grpc)]))
        replicas = running.replicas()
        for kills in range(1, 3):
            for each in outcomes:
                wait_for_more(each)
            os.kill(front_of(running.process.pid), signal.SIGKILL)
            running.wait_for("front: killed by SIGKILL; starting a new front", kills)
            assert call_by_grpc(running.grpc) is OK  # a new connection
            assert running.predict([1])[0] == 200
        for each in outcomes:
            wait_for_more(each)
        assert running.replicas() == replicas


def load_by_grpc(address: str) -> contextlib.AbstractContextManager[Counter[str]]:
    """Call all the time by a channel that tries again, as the docs have it."""

    def work(client: int, outcomes: Counter[str], stop: threading.Event) -> None:
        with grpc.insecure_channel(address, options=[("grpc.service_config", RETRY)]) as channel:
            while not stop.is_set():
                try:
                    call(channel)
                    outcomes["ok"] += 1
                except grpc.RpcError as error:
                    outcomes[str(error)] += 1

    return all_ok(work, 1)


def front_of(supervisor: int) -> int:
    (front,) = children_of(supervisor, "tfdist.serving.front")
    return front


def children_of(supervisor: int, word: str) -> set[int]:
    """The pids of a supervisor's processes that have a word in their command line."""
    found = set()
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.Error):
            if word in child.cmdline():
                found.add(child.pid)
    return found


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path):
    make_version(tmp_path / "m", 1)
    with service(tmp_path, ended=-signal.SIGKILL, replicas=1) as running:
        processes = [*running.replicas(), front_of(running.process.pid)]
        running.process.kill()
        running.process.wait()
        running.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


def supervisor_of(directory: Path) -> ServiceSupervisor:
    """A supervisor of a model with one version, in this process."""
    make_version(directory / "m", 1)
    options = ServeOptions(directory=directory, rest_port=0, grpc_port=0)
    modules = {"replica": "tests.multiprocess.programs.fake_replica"}
    return ServiceSupervisor(options, modules=modules)


def test_a_file_in_the_working_directory_replaces_no_module(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise ImportError('not the module of Python')")
    monkeypatch.chdir(tmp_path)
    supervisor = supervisor_of(tmp_path / "models")
    try:
        process = supervisor._spawn("replica", stdin=subprocess.DEVNULL)
        assert process.wait(DEADLINE_S) == 0  # it got no order
    finally:
        supervisor._end()


def test_two_services_cannot_have_one_grpc_port():
    held = _reserved("127.0.0.1", 0)
    with contextlib.closing(held), pytest.raises(OSError, match="already in use"):
        _reserved(*held.getsockname())


def test_a_full_queue_answers_429_and_a_deadline_504(tmp_path):
    make_version(tmp_path / "m", 1)
    limits = {"requests": 1, "window": 1, "hang_s": 100.0}
    with service(tmp_path, replicas=1, timeout_s=2.0, **limits) as running:
        (replica,) = running.replicas()
        os.kill(replica, signal.SIGSTOP)
        answers = list[tuple[int, str | None]]()

        def ask() -> None:
            with contextlib.closing(running.connect()) as connection:
                connection.request("POST", PREDICT, '{"instances": [1]}')
                answer = connection.getresponse()
                answers.append((answer.status, answer.headers["retry-after"]))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        os.kill(replica, signal.SIGCONT)
    assert Counter(answers) == {(504, None): 2, (429, "1"): 2}


def test_abandoned_requests_end_and_sigterm_answers_the_rest(tmp_path):
    make_version(tmp_path / "m", 1)
    with service(tmp_path, replicas=1, window=1) as running:
        (replica,) = running.replicas()
        os.kill(replica, signal.SIGSTOP)
        stays, leaves = running.connect(), running.connect()
        for client, counted in ((stays, "outstanding"), (leaves, "waiting")):
            client.request("POST", PREDICT, '{"instances": [1]}')
            wait_for_metric(running, f'{counted}{{model="m"}} 1.0')
        pipelines = socket.create_connection(running.rest)
        pipelines.sendall(of_http(1) + of_http(2))
        wait_for_metric(running, 'waiting{model="m"} 2.0')
        leaves.close()
        pipelines.close()
        wait_for_metric(running, 'waiting{model="m"} 0.0')
        wait_for_metric(running, 'code="499",model="m",via="rest"} 2.0')
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("stopping")
        os.kill(replica, signal.SIGCONT)
        assert stays.getresponse().status == 200
    assert not re.findall("replaced|Traceback", running.said())
    assert not Path(f"/proc/{replica}").exists()


def wait_for_metric(running: Service, line: str) -> None:
    running.until(lambda: line in running.get("/metrics")[1])


def test_a_token_is_required_and_both_protocols_are_encrypted(tmp_path):
    make_version(tmp_path / "m", 1)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    pem = str(KEY_AND_CERTIFICATE)
    options = {"token": str(tmp_path / "token"), "certificate": pem, "key": pem}
    tls = ssl.create_default_context(cafile=pem)
    credentials = grpc.ssl_channel_credentials(KEY_AND_CERTIFICATE.read_bytes())
    with service(tmp_path, tls=tls, replicas=1, **options) as running:
        assert running.predict([1])[0] == 401
        sent = {"Authorization": "Bearer secret", "Host": "behind-a-proxy.example.org"}
        assert running.send("POST", PREDICT, '{"instances": [1]}', sent)[0] == 200
        with grpc.secure_channel(running.grpc, credentials) as channel:
            call(channel, metadata=(("authorization", "Bearer secret"),))
            ended = threading.Event()
            method = channel.stream_unary("/tensorflow.serving.PredictionService/Predict")
            waits = (b"" for _ in iter(lambda: ended.wait(DEADLINE_S), True))
            asks = method.future(waits, timeout=DEADLINE_S)  # sends no message
            assert asks.code() is grpc.StatusCode.UNAUTHENTICATED
            ended.set()
        (tmp_path / "token").write_text("")  # as it is rotated: the next front lets nobody in
        os.kill(front_of(running.process.pid), signal.SIGKILL)
        wait_until_healthy(running)
        assert running.predict([1])[0] == 401
