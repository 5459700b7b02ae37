"""Free ports of this machine, held until their task listens on them.

How a port is held. The socket is bound without SO_REUSEADDR, which fails if anyone at all
has the port, so two jobs never hold the same one. The option is set after that. From then
on Linux lets a server that sets it too, as gRPC and so TensorFlow do, bind and listen while
the port is still held, because the holder itself never listens. So there need be no moment
at which the port belongs to nobody: a launcher can hold it as long as the job lives, and a
task that is started again finds its port.

Which ports. Not those of ``ip_local_port_range``, from which the system serves outgoing
connections and everyone who asks for any free port. Measured, in a network namespace whose
range had 20 ports: connections left held ports alone; 10 released ports inside the range
were all taken by the next 10 connections, and a server could then not bind them; of 10
released outside it none was. A port inside the range has a second trap: a task that keeps
trying to reach a peer that is not up yet may be given the peer's port as its own end, and
then talks to itself (1 of 200 tries there).

The wildcard address of both IP versions is bound, as TensorFlow's servers listen on every
interface whatever address they are given: a port that is free on 127.0.0.1 alone is no use.
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
    """Return the ports of ``first-last``, both of them included.

    Raises:
        UsageError: no such range; the message begins with `where`.
    """
    found = _FORM.fullmatch(value.strip())
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if 1 <= first <= last <= 65_535:
        return range(first, last + 1)
    expected, fix = "first-last, ports from 1 to 65535", "write 20000-20100, for example"
    raise UsageError(where, received=shown(value), expected=expected, fix=fix, code="bad-ports")


def as_text(ports: range) -> str:
    """Return a range as `parse_ports` reads it."""
    return f"{ports.start}-{ports.stop - 1}"


_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOW_BAND = range(20_000, 30_000)  # past most services, below the node ports of Kubernetes
_TAKEN = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)


class HeldPort:
    """A port that no other job gets until it is released; a context manager.

    A process that is forked while it holds a port holds it too: it releases its own copy.
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
        """Give the port up at once, for any process; a second call does nothing."""
        self._bound.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def hold_ports(
    n: int, *, host: str = "127.0.0.1", among: Sequence[int] | None = None
) -> list[HeldPort]:
    """Return `n` different free ports of this machine, which peers reach under `host`.

    They are the first ones of `among` that are free; where that is None, any.

    Raises:
        UsageError: `n` ports cannot be held, or `host` is no host.
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
            raise _cannot_hold(n, error, among=among) from error
        stack.pop_all()
    return held


def is_port_free(address: str) -> bool:
    """Return whether a server could listen at `address` could do so now.

    Only the port counts, as servers listen on every interface. The answer for a port that
    a `HeldPort` holds is yes: it is held for just that server.
    """
    _, port = split_address(address)
    with contextlib.closing(unbound()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bind(server, port)


def preferred_ports(ephemeral: range) -> Iterator[int]:
    """Yield ports in random order that are not `ephemeral`: those above it, then low ones."""
    source = random.Random()  # of its own: a program's seed must not choose the ports
    for band in (range(ephemeral.stop, 65_536), _LOW_BAND):
        ports = [port for port in band if port not in ephemeral]
        yield from source.sample(ports, len(ports))


def _hold_one(candidates: Iterator[int], *, host: str, is_any: bool) -> HeldPort:
    # The last is the system's own choice, from the ephemeral ports.
    for port in itertools.chain(candidates, (0,) if is_any else ()):
        bound = unbound()
        if _bind(bound, port):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return HeldPort(bound, host=host)
        bound.close()
    raise OSError(errno.EADDRINUSE, "no port is free")


def unbound() -> socket.socket:
    """Return a socket for both IP versions, or for IPv4 where the system has no IPv6."""
    if not socket.has_dualstack_ipv6():
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made


def _bind(unbound: socket.socket, port: int) -> bool:
    """Bind `port` on every interface; return False when someone else has it."""
    try:
        unbound.bind(("::" if unbound.family == socket.AF_INET6 else "", port))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def ephemeral_ports() -> range:
    """Return the ports of outgoing connections; Linux' defaults where it does not say."""
    try:
        first, last = map(int, _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return range(32_768, 61_000)
    return range(first, last + 1)


def _cannot_hold(n: int, error: OSError, *, among: Sequence[int] | None) -> UsageError:
    fix = "start fewer tasks"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "raise the limit of open files (ulimit -n)"
    elif among is not None:
        given = f"{among[0]} to {among[-1]}"
        fix = (
            f"give more ports than {given} (--ports), or end what has them (ss -tanp); those of a "
            "job that has just ended are free a minute later"
        )
    return UsageError(
        "ports",
        received=f"{n} to hold ({error.strerror})",
        expected="a free one for each task of this host",
        fix=fix,
        code="no-free-port",
    )


class PortPool:
    """Ports of a host's tasks, held until the end of the block.

    Holding a port keeps away everyone who asks for any port, but not a server that insists
    on just this one: another takes the place of one that was taken.
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
        """Return the ports, all of them free now."""
        for index in range(len(self._ports)):
            while not is_port_free(self._ports[index].address):  # those stay held as well
                self._ports[index] = self._stack.enter_context(self._hold(1)[0])
        return list(self._ports)
