"""How the tasks of a multiworker job wait for each other before TensorFlow starts."""

import contextlib
import socket
import threading
import time
import types

from tfdist.cluster import ClusterSpec, Task, TaskConfig, hold_ports
from tfdist.errors import EXIT_OK, StartupTimeout
from tfdist.strategy import rendezvous

DEADLINE_S = 60.0


class Waiting(threading.Thread):
    """Worker 1 of two, which waits for its chief."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ports = hold_ports(2)
        chief, own = (port.address for port in self.ports)
        self.chief_port = self.ports[0].port
        cluster = ClusterSpec(worker=(chief, own))
        self.config = TaskConfig(cluster=cluster, task=Task("worker", 1))
        self.address = own
        self.raised = None
        self.start()

    def run(self):
        try:
            rendezvous.await_peers(self.config, timeout_s=DEADLINE_S)
        except StartupTimeout as error:
            self.raised = str(error)

    def listen(self):
        server = socket.create_server(("127.0.0.1", self.chief_port))
        server.settimeout(DEADLINE_S)
        return server


def said_by(client):
    """Reads until the client leaves, or has said that it speaks HTTP/2."""
    client.settimeout(DEADLINE_S)
    data = b""
    while not data.startswith(b"PRI * HTTP/2.0") and (more := client.recv(100)):
        data += more
    return data


def await_question(listener, stack):
    """Takes connections until one of them asks for a server of gRPC, and leaves that open."""
    while True:
        client = stack.enter_context(listener.accept()[0])
        if said_by(client):
            return client


def test_a_worker_waits_for_the_server_of_the_chief():
    worker = Waiting()
    with contextlib.ExitStack() as stack:
        with worker.listen() as listener:  # in place of the server, as `answering` does
            await_question(listener, stack)
            assert worker.is_alive()
            assert rendezvous.answers(worker.address)  # the chief must be able to see it
        stack.close()  # what has not been answered ends with who listened
        with worker.listen() as server:
            await_question(server, stack).sendall(b"\0")
            worker.join(DEADLINE_S)
    assert not worker.is_alive()
    assert worker.raised is None


def test_a_chief_lost_during_the_rendezvous_is_named(monkeypatch):
    now_s = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    worker = Waiting()
    with contextlib.ExitStack() as stack, worker.listen() as listener:
        await_question(listener, stack)
        now_s[0] = DEADLINE_S + rendezvous.LATER_S
    worker.join(DEADLINE_S)
    assert f"waited 70 s of 70 s for worker-0 (127.0.0.1:{worker.chief_port})" in worker.raised


def test_a_chief_that_met_a_task_gets_more_time(monkeypatch):
    cluster = ClusterSpec(chief=("a:1",), worker=("b:1",), ps=("c:1",))
    config = TaskConfig(cluster=cluster, task=Task("worker", 0))
    now_s, asked_s = 0.0, []
    met, stop = threading.Event(), threading.Event()

    def wait(pause_s):
        nonlocal now_s
        now_s += pause_s
        if now_s > 30:
            met.set()  # by what it has asked this task
        return stop.is_set()

    def answers(address):
        asked_s.append(now_s)
        return False

    monkeypatch.setattr(stop, "wait", wait)
    monkeypatch.setattr(rendezvous, "answers", answers)
    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(rendezvous, "time", clock)
    code = rendezvous.wait_for_chief_to_end(config, stop=stop, timeout_s=60, met=met)
    assert code == EXIT_OK
    assert asked_s[-1] > 35
