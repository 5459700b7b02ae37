"""A server of a ps job outlives a scheduler's warning; only its chief, or SIGTERM, ends it."""

import os
import select
import signal
import time

from tests import forked_python
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, encode, hold_ports
from tfdist.errors import EXIT_STOPPED

DEADLINE_S = 180
PROGRAM = "import logging; logging.basicConfig(level='INFO'); import tfdist; tfdist.make_strategy()"


def test_a_server_ignores_a_warning_and_ends_at_sigterm(monkeypatch):
    ports = hold_ports(3)
    chief, ps, worker = (port.address for port in ports)
    cluster = ClusterSpec(chief=(chief,), worker=(worker,), ps=(ps,))
    config = TaskConfig(cluster=cluster, task=Task("ps", 0), options=JobOptions())
    monkeypatch.setenv("TF_CONFIG", encode(config))
    errors, theirs = os.pipe()
    server = forked_python.Program("-c", PROGRAM, stderr=theirs)
    os.close(theirs)
    said, end_s = b"", time.monotonic() + DEADLINE_S
    try:
        while b"ps-0 serves at" not in said:
            ready = select.select([errors], [], [], end_s - time.monotonic())[0]
            data = os.read(errors, 1 << 16) if ready else b""
            assert data, said.decode(errors="replace")
            said += data
        server.send_signal(signal.SIGUSR1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=DEADLINE_S) == EXIT_STOPPED
    finally:
        server.kill()
        os.close(errors)
