"""Free ports of this machine, held until their task listens on them.

Holding a port. `hold_ports` binds a socket without SO_REUSEADDR. The bind fails if any other
process has the port, so two jobs never hold the same port. Then it sets SO_REUSEADDR. Linux now
lets a server with the same option (gRPC and TensorFlow set it) bind and listen, because the
holder never listens. A launcher can hold the port for the whole job, and a restarted task
finds its port.

Choice of ports. Ports of ``ip_local_port_range`` are avoided, because Linux uses them for outgoing
connections and for requests of any free port. A test used a network namespace with 20 ports in
this range. Connections did not use held ports. The next 10 connections used all 10 released ports
in the range, and a server could not bind them. No connection used the 10 released ports outside
the range. A second risk: a task that retries a connection to a port in the range can connect to
itself (1 of 200 tries).

Every bind uses the wildcard address of both IP versions. TensorFlow's servers listen on every
interface, so a port must be free on all addresses and not only on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import random
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfdist.cluster.address import check_address, join, shown, split_address
from tfdist.errors import UsageError

_FORM = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def parse_ports(value: str, *, where: str) -> range:
    """Return the ports of ``first-last``, including both ends.

    Raises:
        UsageError: the range is not valid. The message starts with `where`.
    """
    found = _FORM.fullmatch(value.strip())
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if 1 <= first <= last <= 65_535:
        return range(first, last + 1)
    raise UsageError(
        where,
        f"{shown(value)} is not a range first-last of ports from 1 to 65535",
        fix="write a range such as 20000-20100",
        code="bad-value",
    )


def as_text(ports: range) -> str:
    """Return a range in the format of `parse_ports`."""
    return f"{ports.start}-{ports.stop - 1}"


_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOW_BAND = range(20_000, 30_000)  # above most services, below Kubernetes' node ports
_TAKEN = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)


class HeldPort:
    """Port that no other job can get until its release. Use it as a context manager.

    A forked child holds the port too, and must release its own copy.
    """

    def __init__(self, bound: socket.socket, *, host: str) -> None:
        self._bound = bound
        self.host = host
        self.port: int = bound.getsockname()[1]

    @property
    def address(self) -> str:
        """Return ``host:port``, with brackets around an IPv6 host."""
        return join(self.host, self.port)

    def release(self) -> None:
        """Release the port at once. A second call has no effect."""
        self._bound.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def hold_ports(
    n: int, *, host: str = "127.0.0.1", among: Sequence[int] | None = None
) -> list[HeldPort]:
    """Return `n` different free ports of this machine, held under the host name `host`.

    The ports are the first free ports of `among` (default: any ports).

    Raises:
        UsageError: fewer than `n` ports are free, or `host` is not a host.
    """
    check_address(join(host, 1), where="host")
    candidates = preferred_ports(ephemeral_ports()) if among is None else iter(among)
    with contextlib.ExitStack() as stack:
        try:
            held = [
                stack.enter_context(_hold_one(candidates, host=host, is_any=among is None))
                for _ in range(n)
            ]
        except OSError as error:
            problem = f"tfdist cannot reserve {n} ports, one for each task ({error.strerror})"
            fix = "start fewer tasks, raise the limit of open files (ulimit -n), or pass more ports"
            fix += " (--ports). If a job just finished, wait a minute"
            raise UsageError("ports", problem, fix=fix, code="port-taken") from error
        stack.pop_all()
    return held


def is_port_free(address: str) -> bool:
    """Return whether a server can listen at the port of `address` now.

    The host is ignored, because servers listen on every interface. The result is True for a
    port of a `HeldPort`, which is held for such a server.
    """
    _, port = split_address(address)
    with contextlib.closing(unbound()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bind(server, port)


def preferred_ports(ephemeral: range) -> Iterator[int]:
    """Yield ports outside `ephemeral` in random order: higher ports first, then low ports."""
    source = random.Random()  # separate: a program's seed must not set the ports
    for band in (range(ephemeral.stop, 65_536), _LOW_BAND):
        ports = [port for port in band if port not in ephemeral]
        yield from source.sample(ports, len(ports))


def _hold_one(candidates: Iterator[int], *, host: str, is_any: bool) -> HeldPort:
    # The last candidate, 0, lets the system choose from the ephemeral ports.
    for port in itertools.chain(candidates, (0,) if is_any else ()):
        bound = unbound()
        if _bind(bound, port):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return HeldPort(bound, host=host)
        bound.close()
    raise OSError(errno.EADDRINUSE, "no port is free")


def unbound() -> socket.socket:
    """Return a socket for both IP versions, or for IPv4 if the system has no IPv6."""
    if not socket.has_dualstack_ipv6():
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made


def _bind(unbound: socket.socket, port: int) -> bool:
    """Bind `port` on every interface. Return False if another process has the port."""
    try:
        unbound.bind(("::" if unbound.family == socket.AF_INET6 else "", port))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def ephemeral_ports() -> range:
    """Return the ports of outgoing connections (Linux' defaults if the file is unreadable)."""
    try:
        first, last = map(int, _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return range(32_768, 61_000)
    return range(first, last + 1)


class PortPool:
    """Ports of a host's tasks, held until the end of the block.

    A held port is safe from programs that request any port. A server that requests this exact
    port can still take it. `renewed` then replaces the port.
    """

    def __init__(
        self, n: int, *, host: str = "127.0.0.1", among: Sequence[int] | None = None
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._hold = functools.partial(hold_ports, host=host, among=among)
        self._ports = [self._stack.enter_context(port) for port in self._hold(n)]

    def __enter__(self) -> PortPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def renewed(self) -> list[HeldPort]:
        """Return the ports, after replacing ports that another server uses."""
        for index in range(len(self._ports)):
            while not is_port_free(self._ports[index].address):  # replaced ports stay held
                self._ports[index] = self._stack.enter_context(self._hold(1)[0])
        return list(self._ports)
