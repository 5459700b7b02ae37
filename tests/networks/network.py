"""Two hosts with a link between them: network namespaces, addresses, names, and faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}
NOBODY = "10.77.0.9"
DEADLINE_S = 60


class Network:
    """Hosts alpha and beta. Everything of it is gone when it is closed."""

    def __init__(self) -> None:
        assert os.geteuid() == 0, "network namespaces need root: run make test-networks as root"
        for tool in ("ip", "tc", "iptables"):
            assert shutil.which(tool), f"{tool} is missing: make test-networks installs it"
        self._spaces = {host: f"tfdist-{os.getpid()}-{host}" for host in ADDRESSES}
        self._files = {host: Path("/etc/netns") / space for host, space in self._spaces.items()}

    def __enter__(self) -> Network:
        try:
            for host in ADDRESSES:
                _run("ip", "netns", "add", self._spaces[host])
                self._files[host].mkdir(parents=True)
                self.name(host, ADDRESSES)
            _run(
                *("ip", "link", "add", "link0", "netns", self._spaces["alpha"], "type", "veth"),
                *("peer", "name", "link0", "netns", self._spaces["beta"]),
            )
            for host, address in ADDRESSES.items():
                self.on(host, "ip", "address", "add", f"{address}/24", "dev", "link0")
                self.on(host, "ip", "link", "set", "lo", "up")
                self.on(host, "ip", "link", "set", "link0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends whatever runs on the hosts, and takes them away."""
        for host, space in self._spaces.items():
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            shutil.rmtree(self._files[host], ignore_errors=True)

    def inside(self, host: str) -> tuple[str, ...]:
        """Returns what to write before a command to run it on a host."""
        return ("ip", "netns", "exec", self._spaces[host])

    def on(self, host: str, *command: str) -> None:
        """Runs a command on a host."""
        _run(*self.inside(host), *command)

    def name(self, host: str, names: dict[str, str]) -> None:
        """Has a host know others by these names; what is started before does not hear of it."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (self._files[host] / "hosts").write_text("\n".join(lines) + "\n")

    def set_link(self, state: str) -> None:
        """Takes the link ``down`` or ``up``."""
        self.on("beta", "ip", "link", "set", "link0", state)

    def slow_down(self, *, rate: str) -> None:
        """Limits the link to a rate, both ways; what does not fit waits, and then is lost."""
        limits = ("rate", rate, "burst", "16kb", "latency", "300ms")
        for host in ADDRESSES:
            self.on(host, "tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limits)

    @contextlib.contextmanager
    def dropping(self, host: str, ports: str) -> Iterator[None]:
        """Has the firewall of a host drop what comes to some of its ports, without an answer."""
        rule = ("INPUT", "-i", "link0", "-p", "tcp", "--dport", ports, "-j", "DROP")
        self.on(host, "iptables", "-A", *rule)
        try:
            yield
        finally:
            self.on(host, "iptables", "-D", *rule)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert not done.returncode, f"{_line(command)}: {done.stderr}"


def _line(command: Sequence[str]) -> str:
    return " ".join(command)
