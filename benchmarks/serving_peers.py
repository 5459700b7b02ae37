"""`tfdist.serve` beside LitServe, Ray Serve and FastAPI: requests/s at equal p99, processor time.

A row of ``python -m benchmarks.serving``. All serve the same SavedModel, a small CNN, with one
replica; each has one core for all its processes, and h2load sends the same bytes from another one.
The servers of the peers, and how they are tuned, are in `serving_servers.py`. In each round each
server is started, asked at 1, 4, 16 and 64 requests at a time, and stopped; its rate of the round
is the highest one whose p99 is at most 50 ms.

Expected before the first run, REST: tfdist 4,000/s (a front of 80 us, JSON of 784 pixels 110, a
share of a batch 20, the answer 10), FastAPI 1,500 (uvicorn and routing 120, JSON 110, a call of the
signature 400), LitServe 1,000 (json 150, two queues, pickles), Ray Serve 400 (proxy, two RPCs). So
2.7, 4 and 10 times. gRPC: tfdist 3,000/s (250 us in grpc.aio), Ray Serve's proxy 400.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where its modules look for each other

import harness  # noqa: E402

from benchmarks.load import PREDICT, percentile  # noqa: E402

P99_MS = 50.0
LADDER = (1, 4, 16, 64)
WARM_UP_S, MEASURED_S = 0.5, 2.5
START_S = 150.0
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = CORES[-1], CORES[0]


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a request goes, and its bytes; of gRPC with the length that HTTP/2 needs before."""

    name: str
    url: str
    body: bytes
    is_grpc: bool = False


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What h2load saw, and what it cost the server."""

    connections: int
    per_s: float
    p99_ms: float
    failed: int
    processor_us: float

    @property
    def counts(self) -> bool:
        """Whether all were answered, within the limit."""
        return not self.failed and self.p99_ms <= P99_MS


def h2load(
    address: Address, connections: int, processor_s: Callable[[], float], *, seconds: float
) -> Answered:
    """Send requests, so many at a time, and count those after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder, "body"), Path(folder, "log")
        body.write_bytes(address.body)
        sockets = min(connections, 4) if address.is_grpc else connections
        kind = "application/grpc" if address.is_grpc else "application/json"
        words = [*("taskset", "-c", f"{LOAD_CORE}", "h2load", "-d", str(body)), f"--log-file={log}"]
        words += ["-c", f"{sockets}", "-m", f"{connections // sockets}", "-H", "te: trailers"]
        words += ["-D", f"{1000 * (WARM_UP_S + seconds):.0f}ms", "-H", f"content-type: {kind}"]
        before = processor_s()
        words += [*([] if address.is_grpc else ["--h1"]), address.url]
        run = subprocess.run(words, capture_output=True, text=True, timeout=60 + seconds)
        spent_s = processor_s() - before
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    if not lines:
        raise RuntimeError(f"{address.url}: {run.stdout}{run.stderr}")
    start = min(int(began) for began, _, _ in lines) + WARM_UP_S * 1e6
    counted = [(status, int(us)) for began, status, us in lines if int(began) >= start]
    taken = sorted(us / 1e3 for status, us in counted if status == "200")
    return Answered(
        connections=connections,
        per_s=len(taken) / seconds,
        p99_ms=percentile(taken, 0.99) if taken else float("inf"),
        failed=len(counted) - len(taken) + _unlike(address, run.stdout, len(lines) - connections),
        processor_us=1e6 * spent_s / len(lines),
    )


def _unlike(address: Address, said: str, count: int) -> int:
    """Return how many gRPC answers had no message: h2load does not show gRPC's own status."""
    if not address.is_grpc:
        return 0
    found = re.search(r"\((\d+)\) data", said)
    answer_bytes = len(ask_grpc(address)) + 5
    return max(0, count - round(int(found[1]) / answer_bytes)) if found else count


def ask_grpc(address: Address) -> bytes:
    """Return the message with which a gRPC request is answered."""
    import grpc

    with grpc.insecure_channel(address.url.split("/")[2]) as channel:
        answer: bytes = channel.unary_unary(PREDICT)(address.body[5:], timeout=30)
    return answer


def predictions(address: Address) -> list[float]:
    """Return the answer to the request of an address; raise OSError where there is none."""
    if address.is_grpc:
        from tensorflow_serving.apis import predict_pb2

        answer = predict_pb2.PredictResponse.FromString(ask_grpc(address))
        return list(next(iter(answer.outputs.values())).float_val)
    _, _, place, path = address.url.split("/", 3)
    with contextlib.closing(http.client.HTTPConnection(place, timeout=30)) as connection:
        connection.request("POST", f"/{path}", address.body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    if response.status != 200:
        raise ConnectionError(f"{address.url}: {response.status} {text.decode()[:200]}")
    return [float(one) for one in json.loads(text)["predictions"][0]]


def tree_s(pid: int) -> float:
    """Return processor seconds of a process and all that come from it."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
    return total


@contextlib.contextmanager
def on_core(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a server on its core; end it and all that come from it."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["taskset", "-c", f"{SERVER_CORE}", *words],
            cwd=ROOT,
            env={**os.environ, **harness.QUIET_ENVIRON, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        except Exception as error:
            log.seek(0)
            error.add_note(log.read()[-2000:])
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    tree = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for left in [process, *tree]:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def until_answered(address: Address, process: subprocess.Popen[str]) -> list[float]:
    """Return the first answer of a server that is starting."""
    import grpc

    end = time.monotonic() + START_S
    while True:
        try:
            return predictions(address)
        except (OSError, http.client.HTTPException, grpc.RpcError):
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def ours(
    served: Path, model: str, bodies: Mapping[str, bytes]
) -> Iterator[tuple[int, list[Address]]]:
    """Run `tfdist.serve`; yield its pid and addresses."""
    words = [sys.executable, "-m", "tfdist.serve", str(served), "--rest_port=0", "--grpc_port=0"]
    with on_core(words, {}) as process:
        assert process.stdout is not None
        found = re.search(r"(http://\S+), gRPC (\S+)", process.stdout.readline())
        assert found
        addresses = [Address(name="tfdist", url=f"{found[1]}/{model}:predict", body=bodies["rest"])]
        if "grpc" in bodies:
            addresses.append(_grpc("tfdist gRPC", found[2], bodies["grpc"]))
        yield process.pid, _ready(process, addresses)


@contextlib.contextmanager
def peer(kind: str, served: Path, bodies: Mapping[str, bytes]) -> Iterator[tuple[int, list[Any]]]:
    """Run a peer; yield its pid and addresses."""
    port, grpc_port = free_port(), free_port()
    program = str(ROOT / "benchmarks" / "serving_servers.py")
    words = [harness.PEER_PYTHON, program, kind, str(served / "cnn" / "1"), f"{port}"]
    addresses = [Address(name=kind, url=f"http://127.0.0.1:{port}/predict", body=bodies["rest"])]
    if kind == "ray":
        words.append(f"{grpc_port}")
        addresses.append(_grpc("ray gRPC", f"127.0.0.1:{grpc_port}", bodies["grpc"]))
    with on_core(words, {"PYTHONPATH": ""}) as process:
        yield process.pid, _ready(process, addresses)


def _grpc(name: str, place: str, body: bytes) -> Address:
    framed = b"\0" + len(body).to_bytes(4, "big") + body
    return Address(name=name, url=f"http://{place}{PREDICT}", body=framed, is_grpc=True)


def _ready(process: subprocess.Popen[str], addresses: list[Address]) -> list[Address]:
    answers = [until_answered(address, process) for address in addresses]
    for answer in answers:
        if max(abs(a - b) for a, b in zip(answer, answers[0], strict=True)) > 1e-5:
            raise RuntimeError(f"{addresses[0].name}: {answers}")
    return addresses


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def climb(address: Address, pid: int) -> list[Answered]:
    """Ask at more and more requests at a time, until p99 is above the limit or one fails."""
    found: list[Answered] = []
    for connections in LADDER:
        one = h2load(address, connections, lambda: tree_s(pid), seconds=MEASURED_S)
        found.append(one)
        if not one.counts:
            break
    return found


def best(found: Sequence[Answered]) -> Answered | None:
    """Return the highest rate with a p99 within the limit."""
    within = [one for one in found if one.counts]
    return max(within, key=lambda one: one.per_s, default=None)


def compare(served: Path, rounds: int) -> dict[str, list[list[Answered]]]:
    """Measure all servers, one after the other in each round; return climbs by address."""
    bodies = make_bodies(np.random.default_rng(0).random((28, 28, 1), np.float32).round(4))
    found: dict[str, list[list[Answered]]] = {}
    for _ in range(rounds):
        makers: list[Any] = [ours(served, "cnn", bodies)]
        makers += [peer(kind, served, bodies) for kind in ("fastapi", "litserve", "ray")]
        for maker in makers:
            with maker as (pid, addresses):
                for address in addresses:
                    found.setdefault(address.name, []).append(climb(address, pid))
                    print(_line(address.name, found[address.name][-1]), file=sys.stderr)
    return found


def make_bodies(image: Any) -> dict[str, bytes]:
    """Return the request of one image for both protocols. Loads TensorFlow."""
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = "cnn"
    request.inputs["image"].CopyFrom(tf.make_tensor_proto(image[None]))
    return {
        "rest": rest_body(image),
        "grpc": request.SerializeToString(),
    }


def rest_body(example: Any) -> bytes:
    """Return the request of one example, numbers of four digits."""
    return json.dumps({"instances": [np.round(example.astype(float), 4).tolist()]}).encode()


def ratios(found: Mapping[str, list[list[Answered]]], name: str, other: str) -> list[float]:
    """Return one address's rate over another's, by round; none where p99 was above the limit."""
    pairs = zip(map(best, found[name]), map(best, found[other]), strict=True)
    return [a.per_s / b.per_s for a, b in pairs if a and b]


def described(found: Mapping[str, list[list[Answered]]]) -> list[str]:
    """Return a line for each address: its best of each round, and processor time at 16."""
    return [
        f"{name}: {'; '.join(_best(climbed) for climbed in all)}" for name, all in found.items()
    ]


def _best(climbed: Sequence[Answered]) -> str:
    one = best(climbed)
    if one is None:
        return f"p99 above {P99_MS:g} ms, or failures"
    text = f"{one.per_s:.0f}/s at {one.connections} (p99 {one.p99_ms:.1f} ms, "
    return f"{text}{one.processor_us:.0f} us of processor)"


def _line(name: str, climbed: Sequence[Answered]) -> str:
    parts = [
        f"{o.connections}: {o.per_s:.0f}/s p99 {o.p99_ms:.1f} ms, {o.failed} failed"
        for o in climbed
    ]
    return (
        f"  {name}: {', '.join(parts)}; {statistics.mean(o.processor_us for o in climbed):.0f} us"
    )
