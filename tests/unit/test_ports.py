"""Ports that are held until their task starts."""

import contextlib
import ctypes
import errno
import os
import re
import socket
import subprocess
import sys

import pytest

from tests.ports import in_a_row
from tests.processes import python
from tests.refusals import refused
from tfdist.cluster import (
    ClusterSpec,
    HeldPort,
    Task,
    TaskConfig,
    hold_ports,
    is_port_free,
    local_only,
    ports,
)
from tfdist.cluster.ports import as_text, parse_ports
from tfdist.launch import isolation

DEADLINE_S = 60
TRY_TO_LISTEN = """
import socket, sys
port, reuse = map(int, sys.argv[1:])
with socket.socket(socket.AF_INET) as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        server.bind(("", port))
        server.listen()
    except OSError as error:
        sys.exit(error.errno)
"""
HOLD_MANY = """
import sys
from tfdist.cluster import hold_ports
held = hold_ports(int(sys.argv[1]))
print(*[port.port for port in held], flush=True)
sys.stdin.read()
"""


def other_process_listens(port: HeldPort, *, reuse_address: bool) -> int:
    """Returns 0 when another process can listen on the port, or the error number."""
    return python("-c", TRY_TO_LISTEN, port.port, int(reuse_address)).returncode


def listening(port: HeldPort, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port.port), family=family)


def test_the_address_has_the_host_that_peers_use():
    for host, written in [("::1", "[::1]"), ("node-3.cluster", "node-3.cluster")]:
        with hold_ports(1, host=host)[0] as port:
            assert port.address == f"{written}:{port.port}"
    assert refused(lambda: hold_ports(1, host="no host")) == ("host", "bad-value")
    assert refused(lambda: is_port_free("localhost")) == ("address", "bad-value")


def test_a_range_has_both_its_ends():
    assert parse_ports(" 20000-20001 ", where="--ports") == range(20_000, 20_002)
    assert as_text(parse_ports("7-7", where="--ports")) == "7-7"


def test_ports_of_a_range_are_used_in_order():
    with contextlib.ExitStack() as stack:
        three = [stack.enter_context(port) for port in in_a_row(3)]
        among = [port.port for port in three]
        for port in (three[0], three[2]):  # somebody has the second
            port.release()
        held = [stack.enter_context(port) for port in hold_ports(2, among=among)]
        assert [port.port for port in held] == [among[0], among[2]]
        assert refused(lambda: hold_ports(1, among=among)) == ("ports", "port-taken")


def test_a_held_port_is_silent_and_free_once_released():
    (port,) = hold_ports(1)
    # A child that got the port from here does not keep it.
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with port, subprocess.Popen(command, **pipes, close_fds=False) as child:
        child.stdout.readline()
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port.port)) == errno.ECONNREFUSED
        assert other_process_listens(port, reuse_address=False) == errno.EADDRINUSE
        for _ in range(2):  # its task, and that task again
            assert other_process_listens(port, reuse_address=True) == 0
        port.release()
        assert other_process_listens(port, reuse_address=False) == 0
        child.communicate(timeout=DEADLINE_S)


def test_concurrent_jobs_never_get_the_same_port():
    jobs, each = 4, 500  # of 4,536 that are tried first: by chance they would meet
    command = [sys.executable, "-c", HOLD_MANY, str(each)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(jobs)]
        got = [port for job in started for port in job.stdout.readline().split()]
        for job in started:
            job.communicate(timeout=DEADLINE_S)
    assert len(got) == len(set(got)) == jobs * each


@pytest.mark.parametrize("host", ["", "127.0.0.1", "127.0.0.2", "::1"])
def test_a_port_on_which_anyone_listens_is_not_free(host):
    with hold_ports(1)[0] as port:
        with listening(port, host):
            assert not is_port_free(port.address)
        assert is_port_free(port.address)


def test_a_port_is_free_while_an_old_connection_fades():
    (port,) = hold_ports(1)
    with listening(port, "127.0.0.1") as server:
        port.release()
        with socket.create_connection(("127.0.0.1", port.port)) as client:
            server.accept()[0].close()  # the end that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port.port))
    assert is_port_free(port.address)


def test_outgoing_connections_never_get_the_preferred_ports():
    ephemeral = ports.ephemeral_ports()
    preferred = list(ports.preferred_ports(ephemeral))
    assert len(set(preferred)) == len(preferred)
    assert not set(preferred) & set(ephemeral)
    preferred = list(ports.preferred_ports(range(32_768, 61_000)))
    assert set(preferred[:4_536]) == set(range(61_000, 65_536))
    assert set(preferred[4_536:]) == set(range(20_000, 30_000))


def test_the_system_chooses_if_all_ports_are_ephemeral(monkeypatch, tmp_path):
    where = tmp_path / "range"
    monkeypatch.setattr(ports, "_RANGE_FILE", where)
    for text in (None, "", "many few"):
        if text is not None:
            where.write_text(text)
        assert ports.ephemeral_ports() == range(32_768, 61_000)  # as Linux has them
    where.write_text("1024\t65535\n")
    assert not list(ports.preferred_ports(ports.ephemeral_ports()))
    for port in hold_ports(3):
        with port:
            assert other_process_listens(port, reuse_address=False) == errno.EADDRINUSE


def test_a_system_without_ipv6_holds_ports_too(monkeypatch):
    real = socket.socket

    def ipv4_only(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", ipv4_only)
        (port,) = hold_ports(1)
        assert is_port_free(port.address)
    with port:
        assert other_process_listens(port, reuse_address=False) == errno.EADDRINUSE


SO_GET_FILTER = 26


def is_filtered(listener):
    """Returns whether a socket has a filter; the kernel counts its length in instructions."""
    code, length = ctypes.create_string_buffer(8 * 64), ctypes.c_uint(64)
    place = (listener.fileno(), socket.SOL_SOCKET, SO_GET_FILTER)
    assert not ctypes.CDLL(None).getsockopt(*place, code, ctypes.byref(length))
    return length.value > 0


def as_tensorflow(port):
    """Returns what listens as a server of TensorFlow does."""
    server = ports.unbound()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if os.environ.get("TF_GRPC_REUSE_PORT"):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("::" if server.family == socket.AF_INET6 else "", port))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("peer", "is_closed"), [("127.0.0.1:9", True), ("[::1]:9", True), ("other:9", False)]
)
def test_a_local_job_closes_its_server_to_other_machines(peer, is_closed):
    with hold_ports(1)[0] as port:
        cluster = ClusterSpec(worker=(port.address, peer))
        with local_only.restricting_server(TaskConfig(cluster=cluster, task=Task("worker", 0))):
            server = as_tensorflow(port.port)
        with server:
            assert is_filtered(server) is is_closed
            for host in ("127.0.0.1", "localhost"):
                socket.create_connection((host, port.port), timeout=DEADLINE_S).close()
    assert "TF_GRPC_REUSE_PORT" not in os.environ


def test_the_server_reports_a_port_in_use():
    with hold_ports(1)[0] as port, as_tensorflow(port.port):
        config = TaskConfig(cluster=ClusterSpec(worker=(port.address,)), task=Task("worker", 0))
        with local_only.restricting_server(config), pytest.raises(OSError, match="in use"):
            as_tensorflow(port.port)


@pytest.mark.parametrize("only_local", [True, False])
def test_a_listener_can_be_closed_to_other_machines(only_local):
    with local_only.listen(0, only_local=only_local) as listener:
        assert is_filtered(listener) is only_local
        socket.create_connection(
            ("127.0.0.1", listener.getsockname()[1]), timeout=DEADLINE_S
        ).close()


@pytest.mark.parametrize(
    ("interfaces", "filters", "says"),
    [
        (["lo"], True, None),
        (["lo", "eth0"], True, "^all users.*ports 21, 22.*--isolate"),
        (["lo", "eth0"], False, "every machine of the network.*ports 21, 22.*--isolate"),
    ],
)
def test_the_launcher_reports_the_reach_of_its_ports(monkeypatch, interfaces, filters, says):
    monkeypatch.setattr(isolation, "kernel_filters", lambda: filters)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(interfaces, 1)))
    monkeypatch.setattr(isolation, "_flags", lambda control, name: isolation._IFF_UP)
    line = isolation.reach([21, 22])
    assert re.search(says, line) if says else line == ""
