"""Two hosts on one machine: network namespaces with a link between them, names, and faults.

They need no root: the namespaces belong to a user namespace of their own.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

DEADLINE_S = 60
DEVICE = "link0"


class TwoHosts:
    """Hosts at 10.77.0.1 and 10.77.0.2, each with a file /etc/hosts of its own, until `close`."""

    def __init__(self, directory: Path, names: tuple[str, str] = ("a", "b")) -> None:
        self._directory = directory
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        first, second = names
        spaces = ("unshare", "--net", "--mount")
        try:
            self._holders[first] = _holder(*spaces, "--map-root-user")
            self._holders[second] = _holder(*self.inside(first), *spaces)
            wire = ("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE)
            self.on(first, *wire, "netns", str(self._holders[second].pid))
            for host, address in self.addresses.items():
                self.on(host, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
                self.on(host, "ip", "link", "set", "lo", "up")
                self.on(host, "ip", "link", "set", DEVICE, "up")
                self.name(host, self.addresses)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the hosts."""
        for holder in reversed(self._holders.values()):
            holder.kill()
            holder.wait()

    def inside(self, host: str) -> tuple[str, ...]:
        """Returns what to write before a command to run it on a host, in this directory."""
        target = str(self._holders[host].pid)
        spaces = ("--user", "--net", "--mount", "--preserve-credentials")
        return ("nsenter", "--target", target, *spaces, "env", f"--chdir={Path.cwd()}")

    def on(self, host: str, *command: str) -> None:
        """Runs a command on a host."""
        line = [*self.inside(host), *command]
        done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)
        assert not done.returncode, f"{' '.join(command)}: {done.stderr}"

    def name(self, host: str, names: Mapping[str, str]) -> None:
        """Has a host know others by these names, each with its address."""
        path = self._directory / f"hosts.{host}.{time.monotonic_ns()}"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        path.write_text("\n".join(lines) + "\n")
        self.on(host, "mount", "--bind", str(path), "/etc/hosts")

    def set_link(self, state: str) -> None:
        """Takes the link ``down`` or ``up``."""
        host = [*self.addresses][1]
        self.on(host, "ip", "link", "set", DEVICE, state)

    def slow_down(
        self, *hosts: str, rate: str, burst: str = "16kb", latency: str = "300ms"
    ) -> None:
        """Has hosts send no faster than `rate`; what does not fit waits, and then is lost."""
        limits = ("tbf", "rate", rate, "burst", burst, "latency", latency)
        for host in hosts or self.addresses:
            self.on(host, "tc", "qdisc", "add", "dev", DEVICE, "root", *limits)

    @contextlib.contextmanager
    def dropping(self, host: str, ports: str) -> Iterator[None]:
        """Has a host answer nobody at some ports (``1-9``), as behind a firewall that drops."""
        rule = ("ipproto", "tcp", "sport", ports, "blackhole")
        self.on(host, "ip", "rule", "add", *rule)
        try:
            yield
        finally:
            self.on(host, "ip", "rule", "delete", *rule)


def _holder(*command: str) -> subprocess.Popen[bytes]:
    """Starts what keeps a host's namespaces, and waits until it has them."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo; exec sleep 900"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.readline() == b"\n", "no namespaces for this user"
    return holder
