"""A service on Ray Serve over two nodes of this machine: `make test-ray`, with the real Ray."""

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

import psutil
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

    def __init__(self, port, clients=8, version=1, older=1):
        self.first = collections.Counter()
        self.last = collections.Counter()
        self._port = port
        self._factors = (float(version), float(older))
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

    def wait_for(self, more):
        until = sum(self.last.values()) + more
        wait_until(lambda: sum(self.last.values()) >= until)

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
        right = [[factor * x for x in asked] for factor in self._factors]
        is_right = status == 200 and answer["predictions"] in right
        return "ok" if is_right else f"{status} {answer}"


def replicas_of(node):
    """The pids of the replicas on a node."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    children = [one for one in raylet.children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one.pid for one in children if "ServeReplica" in " ".join(one.cmdline())]


def test_deaths_cost_a_client_at_most_one_retry(cluster, tmp_path):
    """A replica is killed, then its node; each client's requests are answered, at times the second.

    Then two versions come, of which one is broken: no request needs a second try.
    """
    directory = tmp_path / "m"
    make_version(directory, 1)
    head, second = cluster.head_node, cluster.second
    with service(cluster, directory, "--replicas", "2") as port:
        check_answers(port)
        wait_until(lambda: replicas_of(head) and replicas_of(second))
        with Load(port) as load:
            load.wait_for(200)
            os.kill(replicas_of(head)[0], signal.SIGKILL)
            load.wait_for(1000)
            wait_until(lambda: len(replicas_of(head)) + len(replicas_of(second)) == 2)
        report("a replica", load)
        with Load(port) as load:
            load.wait_for(200)
            cluster.remove_node(second, allow_graceful=False)
            load.wait_for(1000)
            wait_until(lambda: len(replicas_of(head)) == 2)
            load.wait_for(200)
        report("a node", load)
        with Load(port, version=2, older=1) as load:
            make_version(directory, 2)
            (directory / "3").mkdir()
            (directory / "3" / "saved_model.pb").write_text("broken")
            wait_until(lambda: refused_everywhere(port))
            load.wait_for(200)
        report("versions", load)
        assert set(load.first) == {"ok"}
        found = once(port, "POST", "/v1/models/m/versions/2:predict", {"instances": [2.0]})
        assert found == (200, {"predictions": [4.0]})


def check_answers(port):
    """The addresses, JSON and texts of errors are those of `tfdist.serve` without Ray."""
    for path in ("m", "m/versions/1"):
        found = once(port, "POST", f"/v1/models/{path}:predict", {"instances": [1.0, 2.5]})
        assert found == (200, {"predictions": [1.0, 2.5]})
    found = once(port, "POST", "/v1/models/m:predict", {"inputs": {"x": [3.0]}})
    assert found == (200, {"outputs": [3.0]})
    (state,) = once(port, "GET", "/v1/models/m")[1]["model_version_status"]
    assert (state["version"], state["state"]) == ("1", "AVAILABLE")
    metadata = once(port, "GET", "/v1/models/m/metadata")[1]["metadata"]
    inputs = metadata["signature_def"]["signature_def"]["serving_default"]["inputs"]
    assert inputs["x"]["dtype"] == "DT_FLOAT"
    for path, body, status, text in (
        ("x", {"instances": [1.0]}, 404, "Servable not found for request: Latest(x)"),
        ("m/versions/7", {"instances": [1.0]}, 404, "Specific(m, 7)"),
        ("m", {"instances": ["a"]}, 400, "of type float, or a number loses"),
    ):
        found, answer = once(port, "POST", f"/v1/models/{path}:predict", body)
        assert (found, text in answer["error"]) == (status, True), answer


def refused_everywhere(port):
    """Whether version 3 was refused, and 2 is served, in the replicas that answer ten times."""
    for _ in range(10):
        states = once(port, "GET", "/v1/models/m")[1]["model_version_status"]
        if [(one["version"], one["state"]) for one in states] != [
            ("3", "END"),
            ("2", "AVAILABLE"),
        ]:
            return False
    return True


def report(what, load):
    print(f"{what}: first tries {dict(load.first)}, with one more {dict(load.last)}")
    assert set(load.last) == {"ok"}, load.last
