"""The workers of a ps job that the chief is connected to, while others of them die."""

import errno
import itertools
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import tensorflow as tf

from tfdist.cluster import ClusterSpec, Task, TaskConfig
from tfdist.ps import connections as module
from tfdist.ps.connections import Connections, VersionHandshake, send_versions

DEADLINE_S = 20.0


@pytest.fixture
def listeners():
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    yield found
    for listener in found:
        listener.close()


@pytest.fixture
def connections(listeners, monkeypatch):
    monkeypatch.setattr(module, "_STEADY_S", 0.3)
    monkeypatch.setattr(module, "_UPDATE_TIMEOUT_S", 4.0)
    definition = tf.train.ServerDef(protocol="grpc", job_name="chief")
    monkeypatch.setattr(module.tf_context, "get_server_def", lambda: definition)
    chief, ps, *workers = (f"127.0.0.1:{one.getsockname()[1]}" for one in listeners)
    made = Connections(ClusterSpec(chief=(chief,), ps=(ps,), worker=tuple(workers)))
    made.connected = frozenset({1})
    return made


@pytest.fixture
def runtime(monkeypatch):
    """What TensorFlow does when it is told of a worker."""
    found = SimpleNamespace(told=[], begun=threading.Event(), may_end=threading.Event())

    def update(definition):
        found.told.append(definition)
        found.begun.set()
        assert found.may_end.wait(DEADLINE_S)

    monkeypatch.setattr(module.tf_context, "update_server_def", update)
    yield found
    found.may_end.set()


def test_a_dying_worker_does_not_delay_other_connections(connections, runtime):
    answered = []
    thread = threading.Thread(target=lambda: answered.append(connections.admit(0)))
    thread.start()
    assert runtime.begun.wait(DEADLINE_S)
    connections.lost(1)
    assert connections.connected == frozenset()
    assert thread.is_alive()  # it is told without a wait for the runtime
    thread.join(DEADLINE_S)
    assert answered == [False]
    assert connections.admit(1) is False  # the runtime cannot be told of anybody any more
    assert len(runtime.told) == 1


def test_a_worker_that_is_being_killed_stays_disconnected(
    connections, runtime, listeners, monkeypatch
):
    runtime.may_end.set()
    answers = module.answers

    def answers_once_more(address):
        is_there = answers(address)
        listeners[2].close()  # worker 0's
        return is_there

    with monkeypatch.context() as patched:
        patched.setattr(module, "answers", answers_once_more)
        assert connections.admit(0) is False
    assert runtime.told == []
    assert connections.admit(1) is True
    assert connections.connected == {1}


def test_slow_peers_and_missing_descriptors_delay_no_versions(listeners):
    chief, *others = (f"127.0.0.1:{one.getsockname()[1]}" for one in listeners)
    cluster = ClusterSpec(chief=(chief,), ps=tuple(others[:1]), worker=tuple(others[1:2]))
    versions = VersionHandshake(TaskConfig(cluster=cluster, task=Task("chief", 0)))
    listener = mock.Mock(wraps=listeners[0])
    full = OSError(errno.EMFILE, "Too many open files")
    listener.accept.side_effect = itertools.chain([full], itertools.repeat(mock.DEFAULT))
    heard = threading.Event()

    def speak_slowly(client):
        while not heard.wait(0.2):
            client.sendall(b"t")

    with socket.create_connection(listeners[0].getsockname()) as client:
        slow = threading.Thread(target=speak_slowly, args=(client,))
        slow.start()
        with versions.receiving_at(listener):
            config = TaskConfig(cluster=cluster, task=Task("worker", 0))
            found = send_versions(config).wait(DEADLINE_S)
        heard.set()
        slow.join()
    assert found


def test_a_strategy_of_tensorflow_is_connected_to_all_its_workers():
    tasks = {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(tasks))
    # TensorFlow's own strategy has no public `cluster_resolver`.
    strategy = SimpleNamespace(
        cluster_resolver=None, _cluster_resolver=resolver, extended=SimpleNamespace()
    )
    assert Connections.of(strategy).connected == {0, 1}
