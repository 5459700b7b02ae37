"""A service on Ray Serve over two nodes of this machine: `make test-ray`, with the real Ray."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

# Read as Ray is imported: without clusters it keeps to loopback.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import tensorflow as tf
from ray.cluster_utils import Cluster

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 250.0
ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, of which the second can be killed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        size = {"num_cpus": 2, "object_store_memory": 100 << 20}
        made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
        made.second = made.add_node(**size)
        yield made
        made.shutdown()


def make_version(directory, version):
    """A version whose answers are ``version * x``; published whole."""
    module = tf.Module()
    module.factor = tf.Variable(float(version))
    spec = tf.TensorSpec([None], tf.float32, name="x")
    module.serve = tf.function(lambda x: {"y": module.factor * x}, input_signature=[spec])
    tf.saved_model.save(module, directory / ".partial", signatures=module.serve)
    (directory / ".partial").rename(directory / str(version))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def service(cluster, directory, *flags):
    """`tfdist.serve --on ray` of a directory until the block ends; yields its port."""
    port = free_port()
    log = directory.with_suffix(".log")
    command = [sys.executable, "-m", "tfdist.serve", str(directory), "--on", "ray", *flags]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--rest_port", str(port)],
            env={**os.environ, **ENVIRON, "RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        assert line.startswith(f"serving {directory} on ray: REST http://127.0.0.1:{port}/"), (
            line + log.read_text()
        )
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(connection, method, path, body=None):
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def once(port, method, path, body=None):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as one:
        return ask(one, method, path, body)


def wait_until(condition):
    end_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < end_s
        pause.wait(0.1)


class Load:
    """Clients that send all the time, each request once more where it is not answered."""

    def __init__(self, port, clients=4):
        self.first = collections.Counter()
        self.last = collections.Counter()
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _work(self, client):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        number = 0
        while not self._stop.is_set():
            number += 1
            asked = [float(client), float(number)]
            outcome = self._try(connection, asked)
            self.first[outcome] += 1
            if outcome != "ok":
                self._stop.wait(1.0)
                outcome = self._try(connection, asked)
            self.last[outcome] += 1
        connection.close()

    def _try(self, connection, asked):
        try:
            body = {"instances": asked}
            status, answer = ask(connection, "POST", "/v1/models/m:predict", body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            return repr(error)
        return "ok" if status == 200 and answer["predictions"] == asked else f"{status} {answer}"


def test_a_killed_node_costs_a_client_with_one_more_try_nothing(cluster, tmp_path):
    directory = tmp_path / "m"
    make_version(directory, 1)
    with service(cluster, directory, "--replicas", "2") as port, Load(port) as load:
        wait_until(lambda: load.last["ok"] > 200)
        cluster.remove_node(cluster.second, allow_graceful=False)
        killed = sum(load.last.values())
        wait_until(lambda: sum(load.last.values()) > killed + 2000)
    print("first tries:", dict(load.first))
    print("with one more:", dict(load.last))
    assert set(load.last) == {"ok"}, load.last
