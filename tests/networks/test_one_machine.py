"""A job on one machine of a network: who connects to it, and where it connects to."""

import contextlib
import re
import subprocess
import sys

import pytest

from tests.multiprocess import jobs
from tfdist.errors import EXIT_OK

TRAINS = "import tfdist; tfdist.make_strategy(); tfdist.barrier()"
PORTS = range(20_000, 20_004)
AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")

# Tries each port all the time, and prints what the tries came to once its input ends.
CONNECTS = """
import collections, contextlib, select, socket, sys
ended = collections.Counter()
print("on", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    tries = [socket.socket() for _ in sys.argv[2:]]
    for one, port in zip(tries, sys.argv[2:]):
        one.setblocking(False)
        one.connect_ex((sys.argv[1], int(port)))
    select.select([], [], [], 0.002)
    for one in tries:
        state = "refused" if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else "dropped"
        with contextlib.suppress(OSError):
            one.getpeername()
            state = "connected"
        ended[state] += 1
        one.close()
print(dict(ended))
"""
SERVES = """
import http.server, sys
class Says(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[3].encode())
server = http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Says)
print("on", flush=True)
server.serve_forever()
"""
RESOLVES = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))
print("on", flush=True)
while True:
    question, client = server.recvfrom(512)
    end = question.index(b"\\0", 12) + 5
    is_ipv4 = question[end - 4 : end - 2] == b"\\0\\1"
    answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x10\\0\\4" + socket.inet_aton("10.77.0.2")
    head = question[:2] + b"\\x81\\x80\\0\\1\\0" + bytes([is_ipv4]) + b"\\0\\0\\0\\0"
    server.sendto(head + question[12:end] + answer * is_ipv4, client)
"""
DOWNLOADS = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for url in sys.argv[1:]:
    print("got", opener.open(url, timeout=60).read().decode(), flush=True)
"""


@pytest.fixture
def running(network):
    """Runs a program on a host until the test ends, and returns it once it is on."""
    with contextlib.ExitStack() as stack:

        def start(host, source, *args):
            command = [*network.inside(host), sys.executable, "-c", source, *map(str, args)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, **pipes))
            stack.callback(process.kill)
            assert process.stdout.readline() == "on\n"
            return process

        yield start


@pytest.mark.parametrize("flags", ["multiworker --workers 2", "ps --workers 2 --ps 1"])
def test_other_machines_cannot_connect_to_a_local_job(launch, network, running, flags):
    address = network.addresses["alpha"]
    stranger = running("beta", CONNECTS, address, *PORTS)
    job = launch(
        TRAINS,
        *("--strategy", *flags.split(), f"--ports={PORTS[0]}-{PORTS[-1]}"),
        command=(*network.inside("alpha"), *jobs.LAUNCH),
    )
    assert job.end() == EXIT_OK
    said, _ = stranger.communicate("", timeout=jobs.DEADLINE_S)
    assert "dropped" in said
    assert "connected" not in said
    assert re.search(r"all users .* servers \(ports 2000\d, ", job.text)


@pytest.mark.parametrize("user", [(), AS_USER], ids=["root", "user"])
def test_an_isolated_job_connects_to_machines_by_name(launch, network, running, tmp_path, user):
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    network.on("alpha", "mount", "--bind", str(tmp_path / "resolv.conf"), "/etc/resolv.conf")
    network.on("alpha", "ip", "route", "add", "default", "via", network.addresses["beta"])
    running("alpha", RESOLVES)
    running("beta", SERVES, network.addresses["beta"], 8000, "from beta")
    running("alpha", SERVES, "127.0.0.1", 8001, "from loopback")
    job = launch(
        DOWNLOADS,
        *("--strategy=single", "--isolate"),
        args=("http://data.example:8000", "http://10.0.2.2:8001"),
        command=(*network.inside("alpha"), *user, *jobs.LAUNCH),
    )
    assert job.end() == EXIT_OK
    assert job.read_until("got (from .*)\n", count=2) == ["from beta", "from loopback"]
    assert "--isolate: connections to other machines go through slirp4netns" in job.text
