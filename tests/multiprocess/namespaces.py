"""Hosts of their own on one machine: network namespaces with a wire between them, without root."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

DEADLINE_S = 60
NAMES = ("a", "b")


class TwoHosts:
    """Hosts `a` at 10.77.0.1 and `b` at 10.77.0.2, each with a file /etc/hosts of its own."""

    def __init__(self, directory):
        self._directory = Path(directory)
        a = self._holder(["unshare", "--map-root-user", "--net", "--mount"], None)
        self._holders = [a]
        self._holders.append(self._holder([*self.on(0), "unshare", "--net", "--mount"], a.pid))
        wire = f"ip link add eth0 type veth peer name eth0 netns {self._holders[1].pid}"
        self._run(0, wire)
        for rank in (0, 1):
            up = "ip link set lo up && ip link set eth0 up"
            self._run(rank, f"ip addr add 10.77.0.{rank + 1}/24 dev eth0 && {up}")
            self.names(rank, "10.77.0.1 a", "10.77.0.2 b")

    def on(self, rank):
        """Returns what to write before a command that is to run on a host."""
        target = str(self._holders[rank].pid)
        spaces = ("--user", "--net", "--mount", "--preserve-credentials")
        return ["nsenter", "--target", target, *spaces]

    def names(self, rank, *lines):
        """Has a host know these names."""
        path = self._directory / f"hosts.{NAMES[rank]}.{time.monotonic_ns()}"
        path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._run(rank, f"mount --bind {path} /etc/hosts")

    def drop(self, rank, port):
        """Has a host answer nobody at a port, as behind a firewall that drops what comes."""
        self._run(rank, f"ip rule add ipproto tcp sport {port} blackhole")

    def slow_down(self, rank, rate):
        """Has a host send no faster than `rate`, as ``100mbit``."""
        limit = f"tbf rate {rate} burst 64kb latency 50ms"
        self._run(rank, f"tc qdisc add dev eth0 root {limit}")

    def close(self):
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()

    def _run(self, rank, command):
        subprocess.run([*self.on(rank), "sh", "-c", command], check=True, timeout=DEADLINE_S)

    def _holder(self, command, parent):
        """Starts what keeps a host's namespaces, and waits until it has them."""
        holder = subprocess.Popen([*command, "sleep", "900"])
        others = {os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", parent or "self")}
        end_s = time.monotonic() + DEADLINE_S
        while os.readlink(f"/proc/{holder.pid}/ns/net") in others or not _sleeps(holder.pid):
            assert holder.poll() is None, "no namespaces for this user"
            assert time.monotonic() < end_s
            time.sleep(0.01)
        return holder


def _sleeps(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
